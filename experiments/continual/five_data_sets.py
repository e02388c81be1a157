"""Botev 2020, figures 5.10 to 5.12 and table 5.3: five sets of images in sequence, an output layer for each.

The thesis learns MNIST, notMNIST, Fashion-MNIST, SVHN and CIFAR-10 with a network like LeNet and finds mean
test accuracies of 85.40 % (online Laplace, Kronecker factors), 82.71 % (diagonal) and 77.21 % (synaptic
intelligence); EWC 85.32 % and 82.96 %, non-online Laplace 85.35 % and 82.55 %. Here EuroSAT stands in for
SVHN, notMNIST has 8,000 training images, EuroSAT 1,000, and the other sets are cut to 10,000 (``--full``) or
fewer. λ (c of SI) is chosen by the mean validation accuracy at the end with seed 0. The methods of figures
5.11 and 5.12 take part with ``--all`` or ``--full``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import tables
from experiments.continual.networks import lenet
from experiments.continual.streams import FIVE, five
from experiments.continual.training import METHODS, Training, best, run_stream
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser

PAPER = {
    "Online Laplace (KF)": 85.40, "Online Laplace (D)": 82.71, "SI": 77.21, "EWC (KF)": 85.32, "EWC (D)":
    82.96, "Non-online Laplace (KF)": 85.35, "Non-online Laplace (D)": 82.55,
}  # fmt: skip
FIRST = ("Online Laplace (KF)", "Online Laplace (D)", "SI")
STRENGTHS = {
    "laplace": [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0],
    "SI": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0],
}
PLAIN, ALONE = "Plain training", "Each set alone"
NAMES = [name.split("_")[0] for name in FIVE]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=1)
    make.add_argument("--train", type=int, default=None, help="training images a set (default 2,000)")
    make.add_argument("--test", type=int, default=None, help="test images a set (default 1,000)")
    make.add_argument("--epochs", type=int, default=None, help="passes over a set (default 6; 20 if full)")
    make.add_argument("--all", action="store_true", help="also EWC and non-online Laplace")
    make.add_argument(
        "--scale", type=float, default=None, help="what the network's widths are multiplied with"
    )
    options = make.parse_args(arguments)
    sizes = (10_000, 10_000, 20) if options.full else (2_000, 1_000, 6)
    for name, size in zip(("train", "test", "epochs"), sizes, strict=True):
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    options.scale = options.scale or (1.0 if options.full else 0.5)
    study = Study("continual/five_data_sets", options)
    tasks = five(options.data_dir, options.train, options.test)
    how = Training(
        epochs=options.epochs, batch=100, measured=options.train if options.full else min(500, options.train),
        device=options.device,
    )  # fmt: skip

    def cell(method: str, strength: float, seed: int, only: int | None = None) -> Cell:
        what = {
            "method": method, "strength": strength, "seed": seed, "only": only, "train": options.train,
            "test": options.test, "scale": options.scale, **how.words(),
        }  # fmt: skip

        def compute() -> dict[str, Any]:
            net = lenet([10] * len(FIVE), options.scale, seed)
            stream = tasks if only is None else [tasks[only]]
            return run_stream(net, stream, METHODS.get(method), strength, how, seed)

        return study.cell(what, compute)

    methods = tuple(PAPER) if options.all or options.full else FIRST
    cells: list[Cell] = []
    for method in methods:
        tried = [cell(method, s, 0) for s in STRENGTHS["SI" if method == "SI" else "laplace"]]
        chosen = best(tried)
        cells += [{**c, "role": "search"} for c in tried]
        cells += [{**cell(method, chosen, seed), "role": "final"} for seed in study.seeds]
    for seed in study.seeds:
        cells.append({**cell(PLAIN, 0.0, seed), "role": "final"})
        cells += [{**cell(ALONE, 0.0, seed, only), "role": "alone"} for only in range(len(FIVE))]
    draw(cells, methods, study)
    study.publish(table(cells), cells, paper=PAPER)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: table 5.3 of the methods that have run."""
    methods = [name for name in PAPER if any(c["method"] == name and c["role"] == "final" for c in cells)]
    return tables.markdown(["method", "λ or c", *NAMES, "mean, %", "thesis, %"], rows(cells, methods))


def rows(cells: Sequence[Cell], methods: Sequence[str]) -> list[list[object]]:
    """Table 5.3."""
    found: list[list[object]] = []
    for method in (*methods, PLAIN):
        mine = [c for c in cells if c["method"] == method and c["role"] == "final" and c["finite"]]
        each = [tables.with_error((c["rows"][-1][1][i] for c in mine), 1, 100) for i in range(len(FIVE))]
        strength = f"{mine[0]['strength']:g}" if mine and method != PLAIN else "–"
        paper = f"{PAPER[method]:.2f}" if method in PAPER else "–"
        found.append(
            [method, strength, *each, tables.with_error((c["average"] for c in mine), 2, 100), paper]
        )
    alone = [
        [c["average"] for c in cells if c["role"] == "alone" and c["only"] == i] for i in range(len(FIVE))
    ]
    means = [sum(each) / len(each) for each in zip(*alone, strict=True)]
    single = [tables.with_error(values, 1, 100) for values in alone]
    found.append([ALONE, "–", *single, tables.with_error(means, 2, 100), "–"])
    return found


def draw(cells: Sequence[Cell], methods: Sequence[str], study: Study) -> None:
    """Figure 5.10: the accuracy on every set along the stream."""
    drawn, axes = figure(len(FIVE), 1, 2.2, 2.4)
    for place, axis in enumerate(axes):
        for method in (*methods, PLAIN):
            mine = [c for c in cells if c["method"] == method and c["role"] == "final" and c["finite"]]
            if mine:
                lines = [[100 * r[place] for _, r in c["rows"][place:]] for c in mine]
                mean = [sum(v) / len(v) for v in zip(*lines, strict=True)]
                axis.plot(range(place + 1, len(FIVE) + 1), mean, "o-", markersize=3, label=method)
        alone = [100 * c["average"] for c in cells if c["role"] == "alone" and c["only"] == place]
        axis.axhline(sum(alone) / len(alone), color="k", linestyle=":")
        axis.set(title=NAMES[place], xlabel="sets seen", xlim=(0.8, len(FIVE) + 0.2))
    axes[0].set(ylabel="test accuracy, %")
    axes[0].legend(fontsize=5)
    save(drawn, study.out / "five_data_sets.svg")


if __name__ == "__main__":
    main()
