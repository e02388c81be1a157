"""Split MNIST, task-incremental: elastic weight consolidation with the exact Fisher matrix.

Van de Ven (ICLR 2025 blog post track): five tasks of two digits, an output layer for each, two hidden layers
of 400 units, Adam at 1e-3 from a new state each task, 2000 iterations of 128 examples. EWC with the Fisher
matrix that is exact over labels, with 1e4 to 1e6 times the averaged Fisher matrix and the factor ½, gives a
mean test accuracy of 99.12 ± 0.16 %, none at all 85.41 ± 0.88 %. Strengths here are on that scale
(``convert_strength(..., "averaged")``) and chosen on validation examples with seed 0. ``--full``: 2000
iterations, all images, 30 seeds with ``--seeds 30``; by default fewer iterations and images for the Fisher
matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import linnet
from experiments import tables
from experiments.continual.networks import multilayer
from experiments.continual.streams import classes, mnist
from experiments.continual.training import Method, Training, best, run_stream
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser

PAPER = {"EWC, exact Fisher matrix": "99.12 ± 0.16", "plain training": "85.41 ± 0.88"}
STRENGTHS = [1e4, 1e5, 1e6]
GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def averaged(net: nn.Module, strength: float, scale: float) -> Method:
    """EWC with a strength on the scale of averaged Fisher matrices.

    The Fisher matrix is summed over N₀ of the task's N examples and ``add_grad_(examples=N)`` divides by N,
    so that λ on the averaged scale is λ N₀ / N on linnet's; ``scale`` is N / N₀.
    """
    own = linnet.continual.convert_strength(strength, "averaged", old=1.0, new=scale)
    return linnet.continual.EWC(net, linnet.likelihoods.Categorical(), "diagonal", strength=own)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=2)
    make.add_argument("--train", type=int, default=None, help="training images (default all)")
    make.add_argument("--test", type=int, default=None, help="test images (default all)")
    make.add_argument("--iterations", type=int, default=None, help="steps a task (default 300; 2000 if full)")
    make.add_argument("--hidden", type=int, default=400, help="units of both hidden layers")
    options = make.parse_args(arguments)
    iterations = options.iterations or (2000 if options.full else 300)
    study = Study("continual/split_mnist", options)
    tasks = classes(mnist(options.data_dir, options.train, options.test), GROUPS, True)
    size, inputs = tasks[0].read("train")[0].shape
    epochs = max(1, round(iterations * 128 / size))
    how = Training(
        epochs=epochs, batch=128, measured=size if options.full else min(2000, size), device=options.device
    )

    def cell(strength: float, seed: int) -> Cell:
        what = {"strength": strength, "seed": seed, "train": size, "hidden": options.hidden, **how.words()}

        def compute() -> dict[str, Any]:
            net = multilayer([options.hidden] * 2, inputs, [2] * len(GROUPS), seed)
            method = averaged if strength else None
            return run_stream(net, tasks, method, strength, how, seed)

        return study.cell(what, compute)

    tried = [cell(strength, 0) for strength in STRENGTHS]
    chosen = best(tried)
    final = {strength: [cell(strength, seed) for seed in study.seeds] for strength in (chosen, 0.0)}
    lines = []
    for name, strength in (("EWC, exact Fisher matrix", chosen), ("plain training", 0.0)):
        average = tables.with_error((c["average"] for c in final[strength]), 2, 100)
        lines.append([name, f"{strength:g}" if strength else "–", average, PAPER[name]])
    drawn, axis = figure()
    for label, group in (("EWC", final[chosen]), ("plain training", final[0.0])):
        means = [[100 * sum(r) / len(r) for _, r in c["rows"]] for c in group]
        axis.plot(range(1, 6), [sum(v) / len(v) for v in zip(*means, strict=True)], "o-", label=label)
    axis.set(xlabel="tasks seen", ylabel="mean test accuracy, %")
    axis.legend()
    save(drawn, study.out / "split_mnist.svg")
    header = ["method", "λ (averaged)", "mean of five tasks, %", "published, %"]
    cells = [*tried, *(c for group in final.values() for c in group)]
    study.publish(tables.markdown(header, lines), cells, paper=PAPER)


if __name__ == "__main__":
    main()
