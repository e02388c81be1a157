"""Figure 8: the test error along a path of weight decays, from scratch and from one kernel.

The paper (Caltech-256) trains from scratch at five weight decays and compares with fine-tuning a solution
from one weight decay to another: the errors are alike, since the optimum is unique. Here the optimum at
each ridge ρ = N λ comes from one kernel, so a path costs no more than a point of it. Beside it are
the test errors where leave-one-out, generalized cross-validation, evidence, or a fifth of the samples, held
out and then given back, choose the ridge. A head that is ``--head random`` has seen no label; ``--params``
takes a part of the weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linnet
from experiments.figures import COLORS, figure, save
from experiments.lqf.informative import evenly, part_of
from experiments.lqf.tasks import TESTED, Pair, accuracy, linear_model, load
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error, with_error
from linnet.fitting import Dual

PAIR = Pair("resnet20", "flowers_64", 32, 20)
FULL_PAIR = Pair("resnet56", "flowers_64", 64, 100)
DECADES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)  # log₁₀ of ρ over the kernel's mean diagonal
CRITERIA = ("loo", "gcv", "evidence")
CHOICES = {
    "loo": "leave-one-out", "gcv": "generalized cross-validation", "evidence": "evidence",
    "validation": "a fifth held out",
}  # fmt: skip


def path(
    pair: Pair, seed: int, data_dir: str | None, head: str, params: str | None, tested: int
) -> dict[str, Any]:
    """Test accuracy at each ridge, and what the criteria and a validation set choose.

    Args:
        pair: The pair.
        seed: Seed of the draw and of a random head.
        data_dir: Folder of the data.
        head: ``"probe"`` or ``"random"``.
        params: Regular expression of the weights that vary; all by default.
        tested: Number of test images.

    Returns:
        Ridges, test and leave-one-out accuracies, and for each choice of the ridge the ridge, its test
        accuracy and what the choice itself takes the accuracy to be.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir, tested=tested)
    lin = part_of(linear_model(model, train, head=head, seed=seed), params)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "kernel.npy")  # the kernel is formed once and read again by every fit
        chosen = {c: linnet.fit(lin, train, ridge=c, solver=Dual(file)) for c in CRITERIA}
        # K's mean diagonal, from its definition: ‖J‖² / (N C)
        rows = len(train[1]) * (int(train[1].max()) + 1)
        scale = float(linnet.spectrum.gram(lin, train[0], file=file).reshape(rows, rows).diagonal().mean())
        ridges = [scale * 10**decade for decade in DECADES]
        fits = [linnet.fit(lin, train, ridge=ridge, solver=Dual(file)) for ridge in ridges]
    along = chosen["loo"].path(torch.tensor(ridges, dtype=torch.float64))
    tests = [accuracy(f.predict(xt), yt) for f in fits]
    taken = {
        c: {"ridge": f.ridge, "accuracy": accuracy(f.predict(xt), yt), "told": accuracy(f.loo(), train[1])}
        for c, f in chosen.items()
    }
    best, share = validated(lin, train, seed, ridges)
    taken["validation"] = {"ridge": ridges[best], "accuracy": tests[best], "told": share}
    return {
        "scale": scale,
        "accuracy": tests,
        "loo": along.loo_accuracy.tolist() if along.loo_accuracy is not None else [],
        "degrees": along.degrees_of_freedom.tolist(),
        "chosen": taken,
    }


def validated(
    lin: linnet.Linearized, train: tuple[Tensor, Tensor], seed: int, ridges: Sequence[float]
) -> tuple[int, float]:
    """Which ridge does best on a fifth of every class, held out, and its accuracy there."""
    x, y = train
    order = evenly(torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)), y)
    held, kept = order[: len(y) // 5], order[len(y) // 5 :]
    with tempfile.TemporaryDirectory() as folder:
        solver = Dual(str(Path(folder) / "kernel.npy"))
        fits = [linnet.fit(lin, (x[kept], y[kept]), ridge=ridge, solver=solver) for ridge in ridges]
    shares = [accuracy(fit.predict(x[held]), y[held]) for fit in fits]
    best = max(range(len(ridges)), key=shares.__getitem__)
    return best, shares[best]


def tasks(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each task and head, under their name."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(f"{cell['pair'].split(' → ')[1]}, {cell.get('head', 'probe')} head", []).append(cell)
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: test and leave-one-out errors at each ridge, and the same of each choice of it."""
    rows = []
    for i, decade in enumerate(DECADES):
        row = [f"10^{decade:g}"]
        for own in tasks(cells).values():
            row += [with_error((1 - c[key][i] for c in own), scale=100) for key in ("accuracy", "loo")]
        rows.append(row)
    for choice, name in CHOICES.items():
        row = [f"chosen by {name}"]
        for own in tasks(cells).values():
            known = [c["chosen"][choice] for c in own if choice in c["chosen"]]
            row.append(with_error((1 - k["accuracy"] for k in known), scale=100))
            row.append(with_error((1 - k["told"] for k in known if "told" in k), scale=100))
        rows.append(row)
    header = ["ridge / mean diagonal of the kernel"]
    for name in tasks(cells):
        header += [f"{name}: test error, %", "as told without the test, %"]
    return markdown(header, rows)


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Test and leave-one-out error along the path, a panel for each task."""
    panels = tasks(cells)
    drawn, axes = figure(len(panels), width=3.6)
    for axis, (title, own) in zip([axes] if len(panels) == 1 else axes, panels.items(), strict=True):
        for color, name, label in ((COLORS[0], "accuracy", "test"), (COLORS[1], "loo", "leave-one-out")):
            columns = zip(*(cell[name] for cell in own), strict=True)
            points = [mean_and_error(100 * (1 - a) for a in column) for column in columns]
            axis.errorbar([10**d for d in DECADES], [m for m, _ in points], [e for _, e in points],
                          color=color, label=label, capsize=2)  # fmt: skip
        axis.set_title(title, fontsize=8)
        axis.set(xscale="log", xlabel="ridge / mean diagonal of the kernel", ylabel="error, %")
        axis.legend()
    save(drawn, file)


def main(argv: Sequence[str] | None = None, pair: Pair | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "")
    options.add_argument("--head", choices=["probe", "random"], default="probe")
    options.add_argument("--target", default=None, help="another data set than flowers")
    options.add_argument("--params", default=None, help="regular expression of the weights that vary")
    options.add_argument("--tested", type=int, default=TESTED, help="test images")
    given = options.parse_args(argv)
    study = Study("lqf/weight_decay", given)
    pair = pair or (FULL_PAIR if given.full else PAIR)
    pair = replace(pair, target=given.target or pair.target)
    more = {} if given.params is None else {"params": given.params}
    cells = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "seed": seed, "head": given.head, "tested": given.tested,
             **more},
            lambda seed=seed: path(pair, seed, given.data_dir, given.head, given.params, given.tested),
        )
        for seed in study.seeds
    ]  # fmt: skip
    study.publish(table(cells), cells)
    draw(cells, study.out / "weight_decay.svg")


if __name__ == "__main__":
    main()
