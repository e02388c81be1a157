"""Table 1: how much of the labels lies on the top 50 eigenvectors of the kernel, before and after training.

Ortiz-Jimenez et al., supplement E.2. Energy concentration ‖Φᵀy‖ / ‖y‖ on K = 50 eigenvectors of the Gram
matrix of 12,000 samples of CIFAR-2, and test accuracy:

                 MLP      LeNet    ResNet18
    at start     26.0 %   25.8 %   22.7 %
    at the end   63.6 %   83.0 %   96.7 %
    accuracy     67.6 %   75.0 %   81.4 %

The default run has 2,000 samples, one sixth, and a narrow ResNet18. On N samples random labels have a
concentration of √(K/N), so the table also gives K = 8, the paper's share of N.

    python -m experiments.kernels.concentration --threads 1
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.kernels.networks import accuracy, build, cats_and_dogs, train
from experiments.study import Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import spectrum

PAPER = {"MLP": (26.0, 63.6, 67.6), "LeNet": (25.8, 83.0, 75.0), "ResNet18": (22.7, 96.7, 81.4)}
TOP = 50
EPOCHS = {"MLP": 100, "LeNet": 100, "ResNet18": 25}
SAMPLES = 2000
COUNTS = (1, 2, 5, 8, 20, 50, 100, 200, 400)


def shares(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Energy concentration of the labels on the first k eigenvectors, for every k of ``COUNTS``."""
    counts = [k for k in COUNTS if k <= len(x)]
    found = spectrum.eigenfunctions(network, x, k=max(counts), progress=False)
    return [float(found.energy_concentration(y, k=k)) for k in counts]


def cell(name: str, seed: int, data: tuple[Tensor, ...], epochs: int, width: int) -> dict[str, Any]:
    """One network: its kernel before and after training."""
    x, y, x_test, y_test = data
    network = build(name, seed, width=width).to(x.device).eval()
    start = shares(network, x, y)
    train(network, x, y, epochs, 128, seed)
    return {
        "start": start, "end": shares(network, x, y),
        "accuracy": accuracy(network, x_test, y_test), "training accuracy": accuracy(network, x, y),
        "parameters": sum(p.numel() for p in network.parameters()),
    }  # fmt: skip


def row(name: str, cells: list[dict[str, Any]]) -> list[str]:
    """A line of the table."""
    at = {k: COUNTS.index(k) for k in (TOP, 8) if k in COUNTS[: len(cells[0]["start"])]}
    values = [name]
    for k in (TOP, 8):
        for when in ("start", "end"):
            here = [found[at[k]] for found in chosen(cells, when, network=name)] if k in at else []
            values.append(with_error(here, scale=100))
    paper = PAPER[name]
    return [
        *values[:3], f"{paper[0]} → {paper[1]}", *values[3:],
        with_error(chosen(cells, "accuracy", network=name), scale=100), f"{paper[2]}",
    ]  # fmt: skip


def draw(cells: list[dict[str, Any]], study: Study, samples: int) -> None:
    """Concentration against the number of eigenvectors."""
    drawn, axes = figure(width=6.0)
    for color, name in zip(COLORS, PAPER, strict=False):
        for when, style in (("start", "--"), ("end", "-")):
            lines = chosen(cells, when, network=name)
            if lines:
                middle = torch.tensor(lines).mean(0)
                axes.plot(COUNTS[: len(middle)], 100 * middle, style, color=color,
                          label=f"{name}, {'before' if when == 'start' else 'after'} training")  # fmt: skip
    counts = [k for k in COUNTS if k <= samples]
    axes.plot(
        counts, [100 * math.sqrt(k / samples) for k in counts], ":", color="gray", label="random labels"
    )
    axes.set(xscale="log", xlabel="eigenvectors K", ylabel="labels' norm on the top K (%)", ylim=(0, 102))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(drawn, study.out / "concentration.svg")


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument(
        "--samples", type=int, default=None, help="training samples (default 2000; all in full)"
    )
    options.add_argument(
        "--epochs", type=int, default=None, help="epochs of training (default 100, ResNet 25)"
    )
    options.add_argument("--networks", nargs="*", choices=list(PAPER), default=list(PAPER))
    arguments = options.parse_args(words)
    study = Study("kernels/concentration", arguments)
    data = tuple(part.to(arguments.device) for part in cats_and_dogs(arguments.data_dir, arguments.full))
    samples = arguments.samples or (10000 if arguments.full else SAMPLES)
    data = (data[0][:samples], data[1][:samples], *data[2:])
    width, cells = (64 if arguments.full else 8), []
    for seed in study.seeds:
        for name in arguments.networks:
            epochs = arguments.epochs or (200 if arguments.full else EPOCHS[name])
            what = {"network": name, "seed": seed, "samples": len(data[0]), "epochs": epochs, "width": width}
            cells.append(study.cell(what, lambda n=name, s=seed, e=epochs: cell(n, s, data, e, width)))
    header = [
        "network", "K = 50, start", "K = 50, end", "paper", "K = 8, start", "K = 8, end", "accuracy", "paper"
    ]  # fmt: skip
    table = markdown(header, [row(name, cells) for name in arguments.networks])
    chance = {k: 100 * math.sqrt(k / len(data[0])) for k in (8, TOP)}
    study.publish(table, cells, paper=PAPER, random_labels=chance, counts=COUNTS)
    draw(cells, study, len(data[0]))


if __name__ == "__main__":
    main()
