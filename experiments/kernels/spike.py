"""Figures 6 and 7: the kernel aligns with the eigenfunction that the network was trained on.

Ortiz-Jimenez et al., supplement E.3: alignment α(φ_i) of the eigenfunctions of the kernel at initialization
with the kernel before and after training on the sign of one of them, MLP (figure 6) and LeNet (figure 7).
The paper's finding: the relative alignment of the trained eigenfunction spikes.

Relative alignment here is α(φ_i) over the kernel's mean diagonal E Θ(x, x), so that a kernel that only grows
changes nothing. The alignments of all eigenfunctions come from one pass over the data (lemma 1).

    python -m experiments.kernels.spike --threads 1
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.kernels.eigenfunctions import load
from experiments.kernels.networks import accuracy, build, train
from experiments.study import Study, parser
from experiments.tables import markdown, with_error
from linnet import linearize, spectrum

TRAINED = (4, 40)
COUNT = 100


def diagonal(network: nn.Module, x: Tensor) -> float:
    """E Θ(x, x)."""
    lin = linearize(network)
    parts = [spectrum.gram(lin, part, form="trace", progress=False).diagonal() for part in x.split(100)]
    return float(torch.cat(parts).mean())


def cell(name: str, index: int, seed: int, x: Tensor, epochs: int, count: int) -> dict[str, Any]:
    """Alignments before and after training on one eigenfunction."""
    network = build(name, seed, x.shape[1], x.shape[2]).to(x.device).eval()
    found = spectrum.eigenfunctions(network, x, k=count, progress=False)
    before = found.values / diagonal(network, x)  # α(φ_j) = λ_j at initialization
    y = found.binarized(index)
    train(network, x, y, epochs, 32, seed)
    after = spectrum.alignment(network, (x, found.functions), progress=False) / diagonal(network, x)
    return {
        "before": before.tolist(), "after": after.tolist(), "accuracy": accuracy(network, x, y),
        "binarized": float((y * found.functions[:, index]).mean()),
    }  # fmt: skip


def growth(found: dict[str, Any]) -> tuple[float, float, float, int]:
    """Growth of the trained one, median and largest of the others, and its rank by alignment afterwards."""
    ratios = [b / a for a, b in zip(found["before"], found["after"], strict=True)]
    own = ratios[found["index"]]
    others = [r for i, r in enumerate(ratios) if i != found["index"]]
    rank = 1 + sum(a > found["after"][found["index"]] for a in found["after"])
    return own, statistics.median(others), max(others), rank


def draw(cells: list[dict[str, Any]], indices: list[int], names: list[str], study: Study) -> None:
    """Relative alignment against the index, before and after."""
    drawn, axes = figure(len(indices), len(names), width=3.4, height=2.4)
    for row, name in enumerate(names):
        for column, index in enumerate(indices):
            panel = axes.reshape(len(names), -1)[row][column] if hasattr(axes, "reshape") else axes
            own = next(c for c in cells if c["network"] == name and c["index"] == index)
            ranks = range(1, len(own["before"]) + 1)
            panel.plot(ranks, own["before"], "--", color="gray", label="before training")
            panel.plot(ranks, own["after"], color=COLORS[0], lw=1, label="after")
            panel.plot([index + 1], [own["after"][index]], "o", color=COLORS[1], ms=5, label="trained on")
            panel.set(xscale="log", yscale="log", title=f"{name}, φ {index}")
            if row == len(names) - 1:
                panel.set_xlabel("index of the eigenfunction, from 1")
            if not column:
                panel.set_ylabel("relative alignment")
            if not row and not column:
                panel.legend(fontsize=6)
    save(drawn, study.out / "spike.svg")


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--samples", type=int, default=None, help="images (default 2000; 60,000 in full)")
    options.add_argument("--epochs", type=int, default=None, help="epochs (default 30; 100 in full)")
    options.add_argument("--count", type=int, default=None, help="eigenfunctions (default 100; 1000 in full)")
    options.add_argument("--networks", nargs="*", default=["MLP", "LeNet"])
    arguments = options.parse_args(words)
    full = arguments.full
    samples = arguments.samples or (60000 if full else 2000)
    epochs = arguments.epochs or (100 if full else 30)
    count = arguments.count or (1000 if full else COUNT)
    indices = [j for j in ((*TRAINED, 400) if full else TRAINED) if j < count]
    study, cells = Study("kernels/spike", arguments), []
    x = load("CIFAR-10", arguments.data_dir, samples, full).to(arguments.device)
    for seed in study.seeds:
        for name in arguments.networks:
            for index in indices:
                what = {"network": name, "index": index, "seed": seed, "samples": samples, "epochs": epochs,
                        "count": count}  # fmt: skip
                cells.append(
                    study.cell(what, lambda n=name, j=index, s=seed: cell(n, j, s, x, epochs, count))
                )
    rows = []
    for name in arguments.networks:
        for index in indices:
            own = [c for c in cells if c["network"] == name and c["index"] == index]
            measures = list(zip(*(growth(c) for c in own), strict=True))
            rows.append([
                f"{name}, φ {index}", *(with_error(values, 2) for values in measures[:3]),
                " ".join(map(str, measures[3])), with_error([c["accuracy"] for c in own], scale=100),
                with_error([c["binarized"] for c in own], 3),
            ])  # fmt: skip
    header = ["trained on", "its growth", "median of others", "largest of others", "its rank after",
              "training accuracy %", "inner product with its sign"]  # fmt: skip
    study.publish(markdown(header, rows), cells)
    draw(cells, indices, arguments.networks, study)


if __name__ == "__main__":
    main()
