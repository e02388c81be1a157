"""Section 4.4: convex regularizers, where there are few images.

Achille et al. remark that a linear model can take any convex regularizer, which few shots may want. linnet
has quadratic ones alone. Here the linear model of the last convolution and a random head is solved with an L1
penalty and with an elastic net too: an L1 penalty on top of the ridge that folds chose or of a tenth of it,
of no weight if folds prefer that. The solver is FISTA on a growing set of weights, until all weights meet the
conditions of optimality. All strengths are those of least squared error on the same folds.

    python -m experiments.lqf.convex --threads 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.lqf.crops import solved
from experiments.lqf.informative import part_of
from experiments.lqf.tasks import PAIRS, Pair, accuracy, first_classes, linear_model, load, place_in_class
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error

PARAMS = r"layer3\.2\.(conv2|bn2)|fc|linear"  # last convolution and its normalization, and head
SHOTS, TESTED, ALPHA = (2, 5, 10), 1000, 15.0
METHODS = ("ridge", "L1", "elastic net")
STRENGTHS = tuple(10 ** (-k / 3) for k in range(1, 9))  # of L1, over the least that gives zero weights
RIDGES = torch.logspace(-6, 3, 37, dtype=torch.float64)  # over the mean diagonal of the kernel
TOLERANCE, STEPS = 1e-2, 20_000  # of the conditions of optimality, over the strength
SHARES = (1.0, 0.1)  # of the ridge, in the elastic net
ADDED = 200  # weights that the set grows by at once

Model = tuple[Tensor, float]  # weights, and how far they are from optimal


def optimality(gradient: Tensor, w: Tensor, strength: float) -> float:
    """How far JᵀR − ρw is from λ∂‖w‖₁, over λ."""
    wrong = torch.where(
        w == 0, (gradient.abs() - strength).clamp_min(0), (gradient - strength * w.sign()).abs()
    )
    return float(wrong.max()) / strength


def slope(rows: Tensor, target: Tensor, w: Tensor, ridge: float) -> Tensor:
    """Jᵀ(t − Jw) − ρw: the smooth part's gradient, turned round."""
    return rows.T @ (target - rows @ w) - ridge * w


def fista(rows: Tensor, target: Tensor, strength: float, ridge: float, start: Tensor) -> Tensor:
    """The w of least ½‖t − Jw‖² + λ‖w‖₁ + ½ρ‖w‖², by proximal steps with momentum that begins anew.

    Source:
        Beck and Teboulle, 2009; O'Donoghue and Candès, 2015 (restarts).
    """
    small = rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows
    step = 1 / (float(torch.linalg.eigvalsh(small)[-1]) * (1 + 1e-9) + ridge)
    w, ahead, momentum = start, start, 1.0
    for count in range(STEPS):
        if count % 20 == 0 and optimality(slope(rows, target, w, ridge), w, strength) <= 0.5 * TOLERANCE:
            break
        gradient = slope(rows, target, ahead, ridge)
        moved = ahead + step * gradient
        new = moved.sign() * (moved.abs() - step * strength).clamp_min(0)
        if float((ahead - new) @ (new - w)) > 0:
            momentum, ahead = 1.0, new
        else:
            later = 0.5 + (0.25 + momentum**2) ** 0.5
            ahead, momentum = new + (momentum - 1) / later * (new - w), later
        w = new
    return w


def path(rows: Tensor, target: Tensor, strengths: Sequence[float], ridge: float) -> list[Model]:
    """Solutions from the largest strength on, among weights that violate a condition at zero."""
    w = rows.new_zeros(rows.shape[1])
    gradient, found = rows.T @ target, []
    for strength in strengths:
        active = w != 0
        while True:
            missed = (gradient.abs() - strength * (1 + TOLERANCE)).masked_fill(active, 0).clamp_min(0)
            if not bool(missed.any()):
                break
            active[missed.topk(min(ADDED, int((missed > 0).sum()))).indices] = True
            part = rows[:, active]
            w = torch.zeros_like(w).masked_scatter(active, fista(part, target, strength, ridge, w[active]))
            gradient = slope(rows, target, w, ridge)
        found.append((w, optimality(gradient, w, strength)))
    return found


def ridge_weights(rows: Tensor, target: Tensor, ridges: Tensor) -> Tensor:
    """Jᵀ(K + ρI)⁻¹t for each ρ, (R, P)."""
    return solved(rows @ rows.T, target, ridges) @ rows


def by_folds(
    fit: Callable[[Tensor, Tensor], Sequence[Tensor] | Tensor], rows: Tensor, target: Tensor, fold: Tensor
) -> Tensor:
    """Mean squared errors of what is left out, of each solution that ``fit`` gives."""
    errors = []
    for out in (fold == one for one in fold.unique()):
        weights = torch.stack([*fit(rows[~out], target[~out])])
        errors.append((weights @ rows[out].T - target[out]).square().sum(1))
    return torch.stack(errors).sum(0) / len(target)


def compute(pair: Pair, shots: int, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy and strengths of each penalty."""
    model, *both = load(pair, seed, data_dir, shots, TESTED)
    (x, y), (xt, yt) = map(first_classes, both)
    classes = int(yt.max()) + 1
    lin = part_of(linear_model(model, (x, y), classes=classes, head="random", seed=seed), PARAMS)
    rows = lin.jacobian(x).reshape(len(y) * classes, -1).double()
    known = torch.nn.functional.one_hot(y, classes)
    target = (ALPHA * known - lin.base(x)).double().flatten()
    fold = (place_in_class(y) % min(shots, 3)).repeat_interleave(classes)
    ridges = RIDGES * float(rows.square().sum(1).mean())
    errors = {"ridge": by_folds(partial(ridge_weights, ridges=ridges), rows, target, fold)}
    ridge = float(ridges[errors["ridge"].argmin()])
    least = float((rows.T @ target).abs().max())
    strengths = [least * one for one in STRENGTHS]

    def solutions(j: Tensor, t: Tensor, rho: float) -> list[Tensor]:
        return [w for w, _ in path(j, t, strengths, rho)]

    errors["L1"] = by_folds(partial(solutions, rho=0.0), rows, target, fold)
    mixed = [by_folds(partial(solutions, rho=share * ridge), rows, target, fold) for share in SHARES]
    errors["elastic net"] = torch.cat([errors["ridge"].min()[None], *mixed])
    best = {method: int(values.argmin()) for method, values in errors.items()}
    bare = ridge_weights(rows, target, torch.tensor([ridge], dtype=rows.dtype))[0]
    lasso = path(rows, target, strengths[: best["L1"] + 1], 0.0)[-1]
    share, k = divmod(best["elastic net"] - 1, len(STRENGTHS))
    net = (bare, 0.0)  # without an L1 penalty
    if share >= 0:
        net = path(rows, target, strengths[: k + 1], SHARES[share] * ridge)[-1]
    models = {
        "ridge": (bare, 0.0),
        "L1": lasso,
        "elastic net": net,
    }
    base = lin.base(xt)
    return {
        method: {
            "accuracy": accuracy(base + lin.jvp(xt, w.to(base)), yt),
            "told": float(errors[method].min()) / ALPHA**2,
            "chosen": best[method],
            "nonzero": int((w != 0).sum()),
            "optimality": gap,
        }
        for method, (w, gap) in models.items()
    } | {"weights": rows.shape[1], "ridge over the mean diagonal": float(RIDGES[best["ridge"]])}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a number of images and a penalty; differences are over tasks and draws."""
    pairs, rows = list(dict.fromkeys(cell["pair"] for cell in cells)), []
    for shots in dict.fromkeys(cell["shots"] for cell in cells):
        own = [cell for cell in cells if cell["shots"] == shots]
        for method in METHODS:
            errors = [
                with_error((1 - c[method]["accuracy"] for c in own if c["pair"] == pair), scale=100)
                for pair in pairs
            ]
            less = with_error((c[method]["accuracy"] - c["ridge"]["accuracy"] for c in own), scale=100)
            told = with_error((c["ridge"]["told"] - c[method]["told"] for c in own), 4)
            nonzero = with_error((c[method]["nonzero"] / c["weights"] for c in own), 2, 100)
            same = method == "ridge"
            rows.append(
                [f"{method}, {shots} a class", *errors, *(["–"] * 2 if same else [less, told]), nonzero]
            )
    short = [f"{pair.split(' → ')[1].split(' ')[0]}, error %" for pair in pairs]
    header = ["penalty", *short, "error less by", "error of folds less by", "weights that are not zero, %"]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] = PAIRS[:3]) -> None:
    """Run the study."""
    given = parser(__doc__ or "", seeds=5).parse_args(argv)
    study = Study("lqf/convex", given)
    cells = [
        study.cell(
            {"pair": pair.name, "shots": shots, "seed": seed},
            partial(compute, pair, shots, seed, given.data_dir),
        )
        for seed in study.seeds
        for pair in pairs
        for shots in SHOTS
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
