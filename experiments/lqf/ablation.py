"""Figure 2: LQF without one of its parts: cross-entropy, no preconditioner, ReLU as it is.

The paper finds that the squared loss matters most, then the preconditioner, then Leaky ReLU. Every
variant has four learning rates of its own to choose from, on a fifth of the training images of seed 0;
those of plain SGD on the squared loss are multiples of what the largest eigenvalue of its Hessian allows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.lqf.pairs import STEPS, runs
from experiments.lqf.tasks import PAIRS, Pair, finetune, load, options, tuned
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

CHANGES: dict[str, dict[str, Any]] = {
    "cross-entropy instead of the squared loss": {"loss": "cross-entropy"},
    "no preconditioner": {"preconditioner": "none"},
    "ReLU as it is": {"activation": "relu"},
}
WHOLE = "lqf, whole"
MULTIPLES = (0.5, 1.0, 2.0, 4.0)  # of 1/(2 λ_max), for SGD without a preconditioner


def stable_rate(pair: Pair, data_dir: str | None) -> float:
    """Half of 1/λ_max of the squared loss without a preconditioner, on the training images of seed 0."""
    model, train, _ = load(pair, 0, data_dir)
    one = finetune(model, train, "lqf", preconditioner="none", steps=1)
    return float(one.settings.values["learning_rate"])


def variant(study: Study, pair: Pair, change: dict[str, Any]) -> list[Cell]:
    """A changed recipe for all seeds; the learning rate chosen with the first."""
    directory = study.arguments.data_dir
    given = {**options("lqf", STEPS["lqf"]), **change}
    rates = None
    if change.get("preconditioner") == "none":
        what = {"pair": pair.name, "shots": pair.shots, "stable rate": True}
        stable = study.cell(what, lambda: {"rate": stable_rate(pair, directory)})["rate"]
        rates = [multiple * stable for multiple in MULTIPLES]
    found: list[Cell] = []
    for seed in study.seeds:
        rate = found[0]["rate"] if found else None
        what = {"pair": pair.name, "shots": pair.shots, "method": "lqf", "seed": seed, "change": change,
                "rate given": rate, "steps": given["steps"]}  # fmt: skip
        found.append(
            study.cell(
                what,
                lambda seed=seed, rate=rate: tuned(
                    pair, "lqf", seed, rate, given, data_dir=directory, rates=rates
                ),
            )
        )
    return found


def errors_of(cells: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """Test errors over the seeds by variant and pair."""
    pairs = list(dict.fromkeys(cell["pair"] for cell in cells))
    return {
        name: {pair: [1 - a for a in chosen(cells, "accuracy", pair=pair, change=change)] for pair in pairs}
        for name, change in {WHOLE: {}, **CHANGES}.items()
    }


def increases_of(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Increases of the mean error without each part, of every pair, in percent."""
    errors = errors_of(cells)
    return {
        name: [100 * (statistics.fmean(own[p]) / statistics.fmean(errors[WHOLE][p]) - 1) for p in own]
        for name, own in errors.items()
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a variant."""
    cells = [cell for cell in cells if "accuracy" in cell and not cell.get("stable rate")]
    shots = {cell["pair"]: cell["shots"] for cell in cells}
    rows, increases = [], increases_of(cells)
    for name, own in errors_of(cells).items():
        median = "0" if name == WHOLE else f"{statistics.median(increases[name]):+.0f} %"
        rows.append([name, *(with_error(e, scale=100) for e in own.values()), median])
    header = ["test error, %", *(f"{pair}, {shots[pair]} shots" for pair in shots), "median increase"]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 3], help="numbers of the pairs")
    given = arguments.parse_args(argv)
    study, main_study = Study("lqf/ablation", given), Study("lqf/pairs", given)
    taken = pairs or [PAIRS[i] for i in given.pairs]
    cells: list[Cell] = []
    for pair in taken:
        cells += runs(main_study, pair, "lqf")
        for change in CHANGES.values():
            cells += variant(study, pair, change)
    increases = increases_of(cells)
    study.publish(table(cells), cells, increases=increases)
    drawn, axes = figure(width=5.2)
    for i, values in enumerate(list(increases.values())[1:]):
        axes.plot([i] * len(values), values, "o", color=COLORS[i], alpha=0.6)
        axes.plot([i - 0.3, i + 0.3], [statistics.median(values)] * 2, color=COLORS[i], linewidth=2)
    axes.axhline(0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xticks(range(len(CHANGES)), ["cross-entropy", "no preconditioner", "ReLU"])
    axes.set_ylabel("increase of the test error, %")
    save(drawn, study.out / "ablation.svg")


if __name__ == "__main__":
    main()
