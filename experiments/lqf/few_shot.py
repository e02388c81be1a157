"""Figure 4: LQF and plain fine-tuning at 1, 2, 5 and 10 training images a class.

The paper finds LQF ahead of plain fine-tuning on average where data are few. Learning rates are those
that a fifth of the images held out prefers at the shots of the pair (the cells of
``experiments.lqf.pairs``): at one shot there is nothing to hold out.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.figures import COLORS, figure, save
from experiments.lqf.pairs import STEPS, optima, runs
from experiments.lqf.tasks import PAIRS, Pair, optimum, options, tuned
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

SHOTS = (1, 2, 5, 10)
METHODS = ("lqf", "nlft", "fc")


def other(shots: Sequence[int], pair: Pair) -> list[int]:
    """The numbers of shots that the study of pairs does not have."""
    return [count for count in shots if count != pair.shots]


def cells_of(study: Study, main_study: Study, pair: Pair, shots: Sequence[int]) -> list[Cell]:
    """Every method at every number of shots."""
    found: list[Cell] = []
    directory = study.arguments.data_dir
    for method in METHODS:
        most = runs(main_study, pair, method)
        found += most
        rate = most[0]["rate"]
        for count in other(shots, pair):
            for seed in study.seeds:
                what = {"pair": pair.name, "shots": count, "method": method, "seed": seed, "rate given": rate}
                found.append(
                    study.cell(
                        what,
                        lambda count=count, seed=seed, method=method, rate=rate: tuned(
                            pair, method, seed, rate, options(method, STEPS[method]),
                            data_dir=directory, per_class=count,
                        ),
                    )
                )  # fmt: skip
    found += optima(main_study, pair, "optimum")
    for count in other(shots, pair):
        for seed in study.seeds:
            found.append(
                study.cell(
                    {"pair": pair.name, "shots": count, "method": "optimum", "seed": seed},
                    lambda count=count, seed=seed: optimum(pair, seed, data_dir=directory, per_class=count),
                )
            )
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: errors of each pair and number of images, and differences over draws."""
    rows = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        for count in sorted({cell["shots"] for cell in cells if cell["pair"] == pair}):
            errors = [
                [100 * (1 - a) for a in chosen(cells, "accuracy", pair=pair, shots=count, method=m)]
                for m in (*METHODS, "optimum")
            ]
            ahead = [b - a for a, b in zip(errors[0], errors[1], strict=True)]
            rows.append([f"{pair}, {count} shots", *map(with_error, errors), with_error(ahead)])
    return markdown(["test error, %", *METHODS, "optimum", "nlft − lqf, points"], rows)


def main(
    argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None, shots: Sequence[int] = SHOTS
) -> None:
    """Run the study."""
    given = parser(__doc__ or "").parse_args(argv)
    study, main_study = Study("lqf/few_shot", given), Study("lqf/pairs", given)
    taken = pairs or PAIRS[:2]
    cells: list[Cell] = []
    for pair in taken:
        cells += cells_of(study, main_study, pair, shots)
    study.publish(table(cells), cells)
    drawn, axes = figure(len(taken))
    for axis, pair in zip([axes] if len(taken) == 1 else axes, taken, strict=True):
        counts = sorted({*shots, pair.shots})
        for color, method in zip(COLORS, METHODS, strict=False):
            points = [
                mean_and_error(
                    100 * (1 - a) for a in chosen(cells, "accuracy", pair=pair.name, shots=n, method=method)
                )
                for n in counts
            ]
            axis.errorbar(
                counts, [m for m, _ in points], [e for _, e in points], color=color, label=method, capsize=2
            )
        axis.set_xscale("log")
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.set_title(pair.name)
        axis.set_xlabel("images a class")
        axis.set_ylabel("test error, %")
        axis.legend()
    save(drawn, study.out / "few_shot.svg")


if __name__ == "__main__":
    main()
