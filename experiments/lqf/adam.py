"""Table 3, the last layer: Adam beside SGD behind K-FAC, and how far either is from the optimum.

Achille et al. train LQF of the last layer alone with Adam too, and find it behind SGD with a K-FAC
preconditioner, since the problem is small and badly conditioned. The objective of a linear model has one
minimum, which is solved for here. Beside it stand Adam, SGD behind K-FAC and SGD alone after equally many
steps of 16 images from a head of zeros, with momentum and a rate that is annealed, on features that are
computed once (of the squared loss of a last layer K-FAC is the damped Hessian; a test holds the steps to
those of ``linnet.finetune``): the share of what the objective can fall by that is still missing, the distance
of the test outputs from those of the optimum, and the accuracy. The rates of each are chosen twice, with the
first draw's training images: by the squared loss on folds of them, and by the objective itself, for the rate
that comes nearest to the optimum.

    python -m experiments.lqf.adam --threads 1
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import linnet
from experiments.lqf.tasks import Data, Pair, accuracy, load
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.fitting.descent import held_out_splits
from linnet.fitting.last_layer import features
from linnet.linear.targets import ALPHA, make_targets
from linnet.training import cosine, stream

PAIRS = tuple(
    Pair("resnet20", target, 32, 20)
    for target in ("flowers_64", "eurosat_1000_500", "fashion_mnist", "notmnist_test10k")
)
# rates of each method; those of SGD alone are multiples of 1 / λ_max
METHODS: dict[str, tuple[float, ...]] = {
    "K-FAC": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "Adam": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "SGD": (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0),
}
DECAY, MOMENTUM, BATCH = 1e-5, 0.9, 16
DAMPING = 0.1  # of the mean eigenvalue
FOLDS, TESTED = 5, 200
CHOICES = ("folds", "objective")


@lru_cache(maxsize=8)
def drawn(pair: Pair, seed: int, data_dir: str | None) -> tuple[Data, Data]:
    """Features of the last layer behind Leaky ReLU, of a draw and of the test images."""
    model, (x, y), (xt, yt) = load(pair, seed, data_dir, tested=TESTED)
    leaky = linnet.surgery.leaky_relu(model, 0.2)
    return (features(leaky, x), y), (features(leaky, xt), yt)


def design(phi: Tensor) -> Tensor:
    """Features with a column for the intercept, in double precision."""
    padded: Tensor = F.pad(phi.double(), (0, 1), value=1.0)
    return padded


def goals(y: Tensor, classes: int) -> Tensor:
    """α-scaled targets, as linnet makes them."""
    found: Tensor = make_targets(y, classes, ALPHA, varied=False, dtype=torch.float64).values
    return found


def optimum(data: Data, classes: int) -> Tensor:
    """Weights (D + 1, C) of least objective."""
    a, t = design(data[0]), goals(data[1], classes)
    gram = a.T @ a / len(a) + DECAY * torch.eye(a.shape[1], dtype=a.dtype)
    found: Tensor = torch.linalg.solve(gram, a.T @ t / len(a))
    return found


def objective(weights: Tensor, data: Data) -> float:
    """Half the mean squared error, with the weight decay."""
    residual = goals(data[1], weights.shape[1]) - design(data[0]) @ weights
    return float(0.5 * residual.square().sum() / len(residual) + 0.5 * DECAY * weights.square().sum())


def run(data: Data, classes: int, method: str, rate: float, steps: int, seed: int) -> Tensor:
    """Weights (D + 1, C) that a method ends at."""
    a, t = design(data[0]), goals(data[1], classes)
    before = torch.eye(a.shape[1], dtype=a.dtype)
    if method == "K-FAC":
        hessian = a.T @ a / len(a)
        damping = DAMPING * float(hessian.diagonal().mean()) + DECAY
        before = torch.linalg.inv(hessian + damping * before)
    weights = torch.zeros(a.shape[1], classes, dtype=a.dtype)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    generator = torch.Generator().manual_seed(seed)
    batches = stream(len(a), BATCH, lambda epoch: torch.randperm(len(a), generator=generator))
    for step, rows in zip(range(steps), batches, strict=False):
        x = a[rows]
        gradient = x.T @ (x @ weights - t[rows]) / len(rows) + DECAY * weights
        now = rate * cosine(step, steps)
        if method == "Adam":
            first = MOMENTUM * first + (1 - MOMENTUM) * gradient
            second = 0.999 * second + 0.001 * gradient.square()
            one, two = (1 - decay ** (step + 1) for decay in (MOMENTUM, 0.999))
            weights = weights - now * first / one / ((second / two).sqrt() + 1e-8)
        else:
            first = MOMENTUM * first + before @ gradient
            weights = weights - now * first
    return weights


def rates_of(method: str, data: Data) -> list[float]:
    """What a method has to choose from."""
    a = design(data[0])
    unit = 1.0 if method != "SGD" else 1 / float(torch.linalg.eigvalsh(a.T @ a / len(a))[-1])
    return [multiple * unit for multiple in METHODS[method]]


def tuned(data: Data, classes: int, method: str, steps: int) -> dict[str, Any]:
    """The rates of least squared error on held-out folds and of least objective; 1e9 where one diverges."""

    def ended(train: Data, held: Data, rate: float) -> float:
        found = objective(run(train, classes, method, rate, steps, 0), held)
        return found if found < 1e9 else 1e9

    x, y = data
    rates, parts = rates_of(method, data), held_out_splits(y, 0, FOLDS)
    scores = {
        "folds": [
            statistics.fmean(ended((x[rows], y[rows]), (x[held], y[held]), rate) for rows, held in parts)
            for rate in rates
        ],
        "objective": [ended(data, data, rate) for rate in rates],
    }
    places = {by: found.index(min(found)) for by, found in scores.items()}
    return {"rates": {by: rates[place] for by, place in places.items()}, "places": places, "scores": scores}


def compared(drawn_now: tuple[Data, Data], method: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """What is missing to the optimum after the steps, and the accuracies of both."""
    data, (phi, y) = drawn_now
    classes = int(data[1].max()) + 1
    best = optimum(data, classes)
    weights = run(data, classes, method, rate, steps, seed)
    low, here, start = (objective(w, data) for w in (best, weights, torch.zeros_like(best)))
    outputs, exact = (design(phi) @ w for w in (weights, best))
    return {
        "missing": (here - low) / (start - low),
        "distance": float((outputs - exact).norm() / exact.norm()),
        "accuracy": accuracy(outputs, y),
        "accuracy of the optimum": accuracy(exact, y),
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each task and method, rates by folds, and means over tasks for both choices."""
    own = [cell for cell in cells if "missing" in cell]
    rows: list[list[str]] = []
    folds = [cell for cell in own if cell["by"] == "folds"]
    for pair in dict.fromkeys(cell["pair"] for cell in folds):
        exact = chosen(folds, "accuracy of the optimum", pair=pair, method="K-FAC")
        for method in METHODS:
            found = [cell for cell in folds if (cell["pair"], cell["method"]) == (pair, method)]
            rows.append([f"{pair}, {method}", f"{found[0]['rate given']:.2g}", *_columns(found),
                         with_error(chosen(found, "accuracy"), 1, 100), _less(found)])  # fmt: skip
        rows.append([f"{pair}, optimum", "", "0", "0", with_error(exact, 1, 100), "0"])
    for by in CHOICES:
        for method in METHODS:
            found = averaged([cell for cell in own if (cell["by"], cell["method"]) == (by, method)])
            rows.append([f"mean, {method}, rates by {by}", "", *_columns(found), "", _less(found)])
    header = ["", "rate", "objective left, %", "distance of test outputs", "accuracy, %",
              "less the optimum's"]  # fmt: skip
    return markdown(header, rows)


def averaged(cells: Sequence[Cell]) -> list[dict[str, float]]:
    """Means over tasks of each draw."""
    seeds = dict.fromkeys(cell["seed"] for cell in cells)
    keys = ("missing", "distance", "accuracy", "accuracy of the optimum")
    return [{key: statistics.fmean(chosen(cells, key, seed=seed)) for key in keys} for seed in seeds]


def _columns(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is left of the objective, and the distance of the outputs."""
    return [with_error((c["missing"] for c in cells), 2, 100), with_error((c["distance"] for c in cells), 3)]


def _less(cells: Sequence[Mapping[str, Any]]) -> str:
    """Points of accuracy above the optimum."""
    return with_error((c["accuracy"] - c["accuracy of the optimum"] for c in cells), 1, 100)


def _drawn_and_compared(pair: Pair, method: str, rate: float, given: Any, seed: int) -> dict[str, Any]:
    """One cell."""
    return compared(drawn(pair, seed, given.data_dir), method, rate, given.steps, seed)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] = PAIRS) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=300)
    given = arguments.parse_args(argv)
    study, directory = Study("lqf/adam", given), given.data_dir
    cells: list[Cell] = []
    for pair in pairs:
        for method in METHODS:
            what = {"pair": pair.name, "shots": pair.shots, "method": method, "steps": given.steps}

            def choose(pair: Pair = pair, method: str = method) -> dict[str, Any]:
                data, _ = drawn(pair, 0, directory)
                return tuned(data, int(data[1].max()) + 1, method, given.steps)

            choice = study.cell({**what, "grid": [*METHODS[method]], "folds": FOLDS}, choose)
            cells.append(choice)
            for by in CHOICES:
                for seed in study.seeds:
                    rate = choice["rates"][by]
                    run_of = partial(_drawn_and_compared, pair, method, rate, given, seed)
                    cells.append(study.cell({**what, "by": by, "seed": seed, "rate given": rate}, run_of))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
