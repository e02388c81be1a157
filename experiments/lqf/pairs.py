"""Table 1 and figure 1 (left): linear and plain fine-tuning on several source-target pairs.

The paper (ResNet-50 from ImageNet, ten data sets, whole training sets) reports the median increase of the
test error over plain fine-tuning: lqf 12 %, lqf-fc 42 %, gaf 47 %, fc 71 %. Here: small networks, small
training sets, the same budget of search for every method (four learning rates, chosen on a fifth of the
training images of seed 0 held out, then kept for the other seeds), and beside them the optimum of the linear
model, which has no learning rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.figures import COLORS, figure, save
from experiments.lqf.tasks import FULL_PAIRS, METHODS, PAIRS, Pair, optimum, options, tuned
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

PAPER = {"lqf": 12, "lqf-fc": 42, "gaf": 47, "fc": 71}
STEPS = {"nlft": 60, "lqf": 300, "lqf-fc": 300, "gaf": 300, "fc": 300}
OPTIMA = {"optimum": "squared", "optimum-ce": "cross-entropy"}


def runs(study: Study, pair: Pair, method: str, settings: dict[str, Any] | None = None) -> list[Cell]:
    """A method on a pair for all seeds: the learning rate chosen with the first, kept for the others.

    Args:
        study: Where cells are kept.
        pair: The pair.
        method: One of ``METHODS``.
        settings: What is changed in the recipe.

    Returns:
        One cell a seed.
    """
    given = {**options(method, STEPS[method]), **(settings or {})}
    cells: list[Cell] = []
    for seed in study.seeds:
        rate = cells[0]["rate"] if cells else None
        what = {"pair": pair.name, "shots": pair.shots, "method": method, "seed": seed,
                "change": settings or {}, "steps": given["steps"], "rate given": rate}  # fmt: skip
        cells.append(
            study.cell(
                what,
                lambda seed=seed, rate=rate: tuned(
                    pair, method, seed, rate, given, data_dir=study.arguments.data_dir
                ),
            )
        )
    return cells


def optima(study: Study, pair: Pair, name: str) -> list[Cell]:
    """The optimum of the linear model for all seeds."""
    directory = study.arguments.data_dir
    return [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "method": name, "seed": seed},
            lambda seed=seed: optimum(pair, seed, OPTIMA[name], data_dir=directory),
        )
        for seed in study.seeds
    ]


def increases(cells: Sequence[Cell], method: str) -> dict[str, float]:
    """Relative increase of the mean test error over that of plain fine-tuning, by pair.

    Args:
        cells: All cells.
        method: The method.

    Returns:
        Pairs to (error − error of nlft) / error of nlft, in per cent.
    """
    found = {}
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        plain = [1 - a for a in chosen(cells, "accuracy", pair=pair, method="nlft")]
        own = [1 - a for a in chosen(cells, "accuracy", pair=pair, method=method)]
        if plain and own and statistics.fmean(plain) > 0:
            found[pair] = 100 * (statistics.fmean(own) / statistics.fmean(plain) - 1)
    return found


def table(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    """Test errors, and the median increase below them."""
    rows: list[list[str]] = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        count = next(cell["shots"] for cell in cells if cell["pair"] == pair)
        errors = [
            with_error((1 - a for a in chosen(cells, "accuracy", pair=pair, method=m)), scale=100)
            for m in methods
        ]
        rows.append([f"{pair}, {count} shots", *errors])
    medians = [
        "0" if m == "nlft" else f"{statistics.median(found.values()):+.0f} %"
        if (found := increases(cells, m)) else "–"
        for m in methods
    ]  # fmt: skip
    rows.append(["median increase of the error over nlft", *medians])
    rows.append(
        ["the paper's", *("0" if m == "nlft" else f"+{PAPER[m]} %" if m in PAPER else "" for m in methods)]
    )
    return markdown(["test error, %", *methods], rows)


def draw(study: Study, cells: Sequence[Cell], methods: Sequence[str]) -> None:
    """Figure 1 (left): the increase of the error of every pair, with the median and the paper's."""
    drawn, axes = figure(width=5.2)
    shown = [m for m in methods if m != "nlft"]
    for i, method in enumerate(shown):
        values = list(increases(cells, method).values())
        axes.plot([i] * len(values), values, "o", color=COLORS[i], alpha=0.6)
        if values:
            axes.plot([i - 0.3, i + 0.3], [statistics.median(values)] * 2, color=COLORS[i], linewidth=2)
        if method in PAPER:
            axes.plot(i, PAPER[method], "x", color="black", label="the paper's median" if i == 0 else None)
    axes.axhline(0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xticks(range(len(shown)), shown)
    axes.set_ylabel("increase of the test error over nlft, %")
    axes.legend()
    save(drawn, study.out / "pairs.svg")


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, nargs="*", default=None, help="numbers of the pairs to run")
    arguments.add_argument("--optima", nargs="*", default=["optimum"], choices=list(OPTIMA))
    given = arguments.parse_args(argv)
    study = Study("lqf/pairs", given)
    listed = pairs or (FULL_PAIRS if given.full else PAIRS)
    taken = listed if given.pairs is None else [listed[i] for i in given.pairs]
    cells: list[Cell] = []
    for pair in taken:
        for method in METHODS:
            cells += runs(study, pair, method)
        for name in given.optima:
            cells += optima(study, pair, name)
    methods = ["nlft", "lqf", "lqf-fc", "gaf", "fc", *given.optima]
    chances = {m: {p: round(v, 1) for p, v in increases(cells, m).items()} for m in methods if m != "nlft"}
    seeds = {m: mean_and_error(chosen(cells, "seconds", method=m))[0] for m in methods}
    study.publish(table(cells, methods), cells, paper=PAPER, increases=chances, seconds=seeds)
    draw(study, cells, methods)


if __name__ == "__main__":
    main()
