"""Botev 2020, figures 5.7 and 5.8: a long stream of permuted MNIST.

A network with two hidden layers of 100 units learns MNIST in one order of the pixels after another. Figure
5.7 shows the mean test accuracy over the tasks so far: online Laplace with Kronecker factors keeps over 90 %
over 50 tasks, nearly a network trained on all data at once; diagonal curvatures, EWC and synaptic
intelligence (SI) forget. Figure 5.8 shows the effect of λ.

Part one compares all methods on ``--tasks`` permutations. λ (c of SI) and Adam's rate are chosen on
validation examples with seed 0; further seeds have other permutations, weights and orders. Part two is the
long stream of 50 tasks with the methods whose cost does not grow with the number of tasks. ``--full`` is the
thesis' size: 50 tasks, 60,000 images, 20 epochs, all methods.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments import tables
from experiments.continual.networks import multilayer
from experiments.continual.streams import Examples, mnist, permuted
from experiments.continual.training import JOINT, METHODS, Training, run_stream, train_jointly
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser

PLAIN = "Plain training"
COMPARED = (
    "Online Laplace (KF)", "Online Laplace (D)", "Non-online Laplace (KF)", "EWC (KF)", "EWC (D)", "SI",
)  # fmt: skip
CONSTANT = ("Online Laplace (KF)", "SI", "Online Laplace (D)")  # cost does not grow with the tasks
STRENGTHS = {"laplace": [1.0, 3.0, 10.0, 30.0, 100.0], "SI": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]}
BALANCE = ("Online Laplace (KF)", (1.0, 3.0, 100.0))  # figure 5.8: run with every seed
PAPER = {"Online Laplace (KF), 50 tasks": "over 90 % (figure 5.7)", "best λ of KF": 3}


def strengths(method: str) -> list[float]:
    """The values that are tried."""
    return [0.0] if method == PLAIN else STRENGTHS["SI" if method == "SI" else "laplace"]


class Stream:
    """Cells of this study: one network along one stream."""

    def __init__(
        self, study: Study, parts: dict[str, Examples], how: Training, hidden: Sequence[int]
    ) -> None:
        self.study, self.parts, self.how, self.hidden = study, parts, how, tuple(hidden)

    def cell(self, method: str, strength: float, seed: int, tasks: int, how: Training | None = None) -> Cell:
        """The accuracies of one method along one stream."""
        how = how or self.how
        what = {
            "method": method, "strength": strength, "seed": seed, "tasks": tasks, "hidden": list(self.hidden),
            "train": len(self.parts["train"][0]), **how.words(),
        }  # fmt: skip

        def compute() -> dict[str, Any]:
            net = multilayer(self.hidden, self.parts["train"][0].shape[1], seed=seed)
            stream = permuted(self.parts, tasks, seed)
            if method == JOINT:
                return train_jointly(net, self.parts, stream, how, seed)
            along = None if tasks <= 10 else [0, *range(4, tasks, 5)]
            return run_stream(net, stream, METHODS.get(method), strength, how, seed, along=along)

        return self.study.cell(what, compute)


def compare(
    stream: Stream, methods: Sequence[str], rates: Sequence[float], options: argparse.Namespace
) -> list[Cell]:
    """Part one: choose strengths and rates on validation examples with seed 0; run the other seeds."""
    cells: list[Cell] = []
    for method in methods:
        tried = [
            stream.cell(method, s, 0, options.tasks, replace(stream.how, rate=rate))
            for rate in rates
            for s in strengths(method)
        ]
        chosen = max(tried, key=lambda c: -1.0 if c["validation"] is None else c["validation"])
        cells += [{**cell, "role": "search", "chosen": cell["rate"] == chosen["rate"]} for cell in tried]
        how = replace(stream.how, rate=chosen["rate"])
        for seed in range(options.seeds):
            final = stream.cell(method, chosen["strength"], seed, options.tasks, how)
            cells.append({**final, "role": "final"})
            if method == BALANCE[0]:
                found = [stream.cell(method, strength, seed, options.tasks, how) for strength in BALANCE[1]]
                cells += [{**cell, "role": "balance"} for cell in found]
    return cells


def together(stream: Stream, options: argparse.Namespace) -> list[Cell]:
    """The bound: one network trained on one, half and all of the tasks at once."""
    counts = sorted({1, max(1, options.tasks // 2), options.tasks})
    return [
        {**stream.cell(JOINT, 0.0, seed, count), "role": "final" if count == options.tasks else "joint"}
        for seed in range(options.seeds)
        for count in counts
    ]


def long_stream(stream: Stream, cells: Sequence[Cell], options: argparse.Namespace) -> list[Cell]:
    """Part two: many tasks with the strengths and rates that were chosen on few."""
    steps = options.long_epochs * (len(stream.parts["train"][0]) // stream.how.batch)
    # the penalty grows stiffer with every task, and steps have to become smaller (section 5.4.1)
    how = replace(stream.how, epochs=options.long_epochs, decay=options.decay, drop=max(1, 3 * steps // 4))
    chosen = {c["method"]: c for c in cells if c["role"] == "final" and c["method"] in options.long_methods}
    found = [
        stream.cell(name, c["strength"], 1, options.long, replace(how, rate=c["rate"]))
        for name, c in chosen.items()
    ]
    return [{**cell, "role": "long"} for cell in found]


def table(cells: Sequence[Cell]) -> str:
    """Markdown: means over seeds at the end, forgetting of the first task, and the long stream."""
    found: list[list[object]] = []
    for method in (PLAIN, *COMPARED, JOINT):
        final = [c for c in cells if c["method"] == method and c["role"] == "final" and c["finite"]]
        far = [c for c in cells if c["method"] == method and c["role"] == "long" and c["finite"]]
        if not final:
            continue
        first = tables.with_error((c["rows"][-1][1][0] for c in final), 1, 100)
        last = tables.with_error((c["rows"][-1][1][-1] for c in final), 1, 100)
        strength = f"{final[0]['strength']:g}" if method not in (PLAIN, JOINT) else "–"
        average = tables.with_error((c["average"] for c in final), 1, 100)
        rate = f"{final[0]['rate']:g}"
        found.append(
            [
                method,
                strength,
                rate,
                average,
                first,
                last,
                tables.with_error((c["average"] for c in far), 1, 100),
            ]
        )
    tasks, long = ({c["tasks"] for c in cells if c["role"] == role} for role in ("final", "long"))
    header = [
        "method", "λ or c", "rate", f"mean of {max(tasks)} tasks, %", "first task", "newest task",
        f"mean of {max(long)} tasks, %" if long else "long stream",
    ]  # fmt: skip
    return tables.markdown(header, found)


def balance(cells: Sequence[Cell]) -> str:
    """Markdown: first and newest task by the strength of Kronecker factors (figure 5.8)."""
    found: list[list[object]] = []
    for strength in BALANCE[1]:
        mine = [c for c in cells if c["role"] == "balance" and c["strength"] == strength and c["finite"]]
        ends = [c["rows"][-1][1] for c in mine]
        means = [tables.with_error((end[place] for end in ends), 1, 100) for place in (0, -1)]
        found.append([f"{strength:g}", *means, tables.with_error((c["average"] for c in mine), 1, 100)])
    return tables.markdown(["λ", "first task, %", "newest task, %", "mean, %"], found)


def draw(cells: Sequence[Cell], tasks: int, path: Any) -> None:
    """Figure 5.7: means along both streams; figure 5.8: what λ does."""
    drawn, axes = figure(4, 1, 3.4, 3.0)
    for method in (PLAIN, *COMPARED):
        finals = [c for c in cells if c["method"] == method and c["role"] == "final" and c["finite"]]
        if finals:
            means = [[100 * sum(r) / len(r) for _, r in c["rows"]] for c in finals]
            places = [index + 1 for index, _ in finals[0]["rows"]]
            axes[0].plot(places, [sum(v) / len(v) for v in zip(*means, strict=True)], label=method)
    joint = sorted(
        (len(c["rows"][-1][1]), 100 * c["average"]) for c in cells
        if c["method"] == JOINT and c["role"] != "long" and c["seed"] == 0
    )  # fmt: skip
    axes[0].plot(*zip(*joint, strict=True), "k:", label=JOINT)
    for method in (*CONSTANT, JOINT):
        for c in (c for c in cells if c["method"] == method and c["role"] == "long" and c["finite"]):
            style = "k:o" if method == JOINT else "-"
            axes[1].plot(
                [index + 1 for index, _ in c["rows"]], [100 * sum(r) / len(r) for _, r in c["rows"]], style,
                label=method,
            )  # fmt: skip
    for axis, method in zip(axes[2:], ("Online Laplace (KF)", "Online Laplace (D)"), strict=True):
        tried = [c for c in cells if c["method"] == method and c.get("chosen") and c["finite"]]
        for color, c in enumerate(tried):
            places = [index + 1 for index, _ in c["rows"]]
            axis.plot(places, [100 * r[0] for _, r in c["rows"]], ":", color=f"C{color}")  # the first task
            axis.plot(places, [100 * r[-1] for _, r in c["rows"]], "--", color=f"C{color}")  # the newest
            axis.plot(
                places, [100 * sum(r) / len(r) for _, r in c["rows"]], color=f"C{color}",
                label=f"λ = {c['strength']:g}",
            )  # fmt: skip
        axis.set(title=f"{method}: mean, first (dotted), newest (dashed)", xlabel="tasks seen")
        axis.title.set_fontsize(7)
        axis.legend(fontsize=7)
    axes[0].set(xlabel="tasks seen", ylabel="mean test accuracy, %")
    axes[1].set(xlabel="tasks seen")
    axes[0].legend(fontsize=6)
    if axes[1].lines:
        axes[1].legend(fontsize=6)
    save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=1)
    make.add_argument("--tasks", type=int, default=None, help="permutations (default 10; 50 with --full)")
    make.add_argument("--train", type=int, default=None, help="training images (default 10,000; all if full)")
    make.add_argument("--test", type=int, default=None, help="test images (default 2,000; all if full)")
    make.add_argument("--epochs", type=int, default=None, help="passes over a task (default 2; 20 if full)")
    make.add_argument("--methods", nargs="*", choices=COMPARED, default=list(COMPARED))
    make.add_argument("--long-methods", nargs="*", choices=(*CONSTANT, JOINT), default=[*CONSTANT, JOINT])
    make.add_argument("--long", type=int, default=50, help="tasks of the long stream; 0 leaves it out")
    make.add_argument("--long-epochs", type=int, default=None, help="its passes over a task (default 4)")
    make.add_argument(
        "--decay", type=float, default=0.05, help="k: task t of the long stream has rate / (1 + k t)"
    )
    make.add_argument("--hidden", type=int, nargs="*", default=[100, 100], help="hidden units")
    make.add_argument("--rates", type=float, nargs="*", default=[1e-3, 5e-3], help="learning rates of Adam")
    options = make.parse_args(arguments)
    sizes = (50, None, None, 20) if options.full else (10, 10_000, 2_000, 2)
    for name, size in zip(("tasks", "train", "test", "epochs"), sizes, strict=True):
        setattr(options, name, size if getattr(options, name) is None else getattr(options, name))
    options.long_epochs = options.long_epochs or (options.epochs if options.full else 4)
    study = Study("continual/permuted_mnist", options)
    parts = mnist(options.data_dir, options.train, options.test)
    measured = len(parts["train"][0]) if options.full else min(4000, len(parts["train"][0]))
    how = Training(epochs=options.epochs, measured=measured, device=options.device)
    stream = Stream(study, parts, how, options.hidden)
    first = [method for method in options.methods if method in CONSTANT]
    cells = compare(stream, (PLAIN, *first), options.rates, options)
    rate = next(
        (c["rate"] for c in cells if c["method"] == CONSTANT[0] and c["role"] == "final"), options.rates[-1]
    )
    stream.how = replace(stream.how, rate=rate)
    cells += together(stream, options)
    cells += long_stream(stream, cells, options) if options.long else []
    rates = options.rates if options.full else options.rates[-1:]
    cells += compare(stream, [method for method in options.methods if method not in CONSTANT], rates, options)
    draw(cells, options.tasks, study.out / "permuted_mnist.svg")
    study.publish(f"{table(cells)}\n\n{balance(cells)}", cells, paper=PAPER)


if __name__ == "__main__":
    main()
