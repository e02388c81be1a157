"""Figures 2 to 5: networks and their linearizations trained on binarized eigenfunctions of the kernel.

Ortiz-Jimenez et al., section 3.2 and supplement E.1: x ↦ sign φ_j(x) for eigenfunctions φ_j of the kernel
at initialization, with SGD and with Adam on CIFAR-10 (figure 2) and with SGD on MNIST (figure 3). The paper's
findings: accuracy falls with the index for both; the linearization is ahead on most eigenfunctions though
it is far behind on CIFAR-2; on MNIST the curves of LeNet cross around index 500; and the iterations to a
training loss of 0.01 and the distance from initialization grow with the index (figures 4 and 5).

The paper has 60,000 images and 100 epochs; the default run has 2,000 and 20 epochs of smaller batches.

    python -m experiments.kernels.eigenfunctions --threads 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.kernels.advantage import linear_advantage
from experiments.kernels.networks import build, cats_and_dogs, cifar10, sgd
from experiments.sources import CIFAR, images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import spectrum

GRAY = ((0.1307,), (0.3081,))
SETTINGS = (("CIFAR-10", "SGD"), ("CIFAR-10", "Adam"), ("MNIST", "SGD"))
INDICES = (0, 8, 32, 128, 512)
NETWORKS = ("MLP", "LeNet")
TASK = -1  # index that stands for the labels of CIFAR-2


def load(name: str, data_dir: str | None, samples: int, full: bool) -> Tensor:
    """Images, training and test together, as in the paper."""
    data = cifar10(data_dir, full) if name == "CIFAR-10" else images("mnist", data_dir)
    norm = CIFAR if name == "CIFAR-10" else GRAY
    share = len(data.train_x) / (len(data.train_x) + len(data.test_x))
    first = round(samples * share)
    return torch.cat([pixels(data.train_x[:first], norm), pixels(data.test_x[: samples - first], norm)])


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at its usual rate."""
    return torch.optim.Adam(parameters, 1e-3)


def compare(
    network: nn.Module,
    train: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
    optimizer: str,
    epochs: int,
    batch: int,
) -> dict[str, Any]:
    """The network and its linearization on one binary task."""
    steps = epochs * -(-len(train[0]) // batch)
    make, schedule = sgd(steps)
    found = linear_advantage(
        network, train, make if optimizer == "SGD" else adam, validation=held, make_schedule=schedule,
        epochs=epochs, batch_size=batch, every=max(1, steps // (4 * epochs)), progress=False,
    )  # fmt: skip
    result: dict[str, Any] = {}
    for name, run in (("plain", found.network), ("linear", found.linear)):
        result[name] = {
            "validation": run.accuracy["validation"], "training": run.accuracy["training"],
            "iterations": run.iterations, "distance": run.distance, "cosine": 1 - run.cosine,
            "loss": run.final_loss,
        }  # fmt: skip
    return {**result, "gap": found.gap}


class Functions:
    """The eigenfunctions of one network on one data set, computed when they are first asked for."""

    def __init__(self, name: str, x: Tensor, seed: int, count: int) -> None:
        self.name, self.x, self.seed, self.count = name, x, seed, count
        self._found: spectrum.Eigenfunctions | None = None

    def network(self) -> nn.Module:
        """The network at its initialization."""
        network = build(self.name, self.seed, self.x.shape[1], self.x.shape[2])
        return network.to(self.x.device).eval()

    def split(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and validation parts, 5 : 1 as in the paper, of the task of one eigenfunction."""
        if self._found is None:
            self._found = spectrum.eigenfunctions(self.network(), self.x, k=self.count, progress=False)
        y = self._found.binarized(index)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.seed))
        first, rest = order[: len(order) * 5 // 6], order[len(order) * 5 // 6 :]
        return (self.x[first], y[first]), (self.x[rest], y[rest])


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each setting, network and index."""
    header = ["setting", "target", "network %", "linear %", "iterations", "linear", "distance", "linear"]
    indices, found = sorted({cell["index"] for cell in cells} - {TASK}), []
    for data, optimizer in SETTINGS:
        for name in NETWORKS:
            for index in (TASK, *indices):
                where = {"data": data, "optimizer": optimizer, "network": name, "index": index}
                own = [[cell[kind] for cell in cells if all(cell[k] == v for k, v in where.items())]
                       for kind in ("plain", "linear")]  # fmt: skip
                if not own[0]:
                    continue
                steps = [[str(run["iterations"] or "–") for run in runs] for runs in own]
                found.append([
                    f"{data}, {optimizer}, {name}", "CIFAR-2" if index == TASK else f"φ {index}",
                    *(with_error([run["validation"] for run in runs], scale=100) for runs in own),
                    *(" ".join(each) for each in steps),
                    *(with_error([run["distance"] for run in runs], 2) for runs in own),
                ])  # fmt: skip
    return markdown(header, found)


def draw(cells: list[dict[str, Any]], study: Study) -> None:
    """Figures 2 and 3 above, figures 4 and 5 below."""
    drawn, axes = figure(3, 2, width=3.2, height=2.5)
    for panel, (data, optimizer) in zip(axes[0], SETTINGS, strict=True):
        lines(panel, cells, data, optimizer, lambda run: 100 * run["validation"])
        panel.set(title=f"{data}, {optimizer}", ylim=(45, 102))
    axes[0][0].set_ylabel("validation accuracy (%)")
    axes[0][0].legend(fontsize=6)
    names = {
        "iterations": "iterations to a loss of 0.01",
        "distance": "distance from start",
        "cosine": "1 − cosine",
    }
    for panel, (key, label) in zip(axes[1], names.items(), strict=True):
        lines(panel, cells, "CIFAR-10", "SGD", lambda run, k=key: run[k])
        panel.set(ylabel=label, xlabel="index of the eigenfunction, from 1")
        if any(np.isfinite(line.get_ydata()).any() for line in panel.lines):
            panel.set_yscale("log")
    save(drawn, study.out / "eigenfunctions.svg")


def lines(
    panel: Any, cells: list[dict[str, Any]], data: str, optimizer: str, value: Callable[[dict[str, Any]], Any]
) -> None:
    """One line for each network and its linearization."""
    for color, name in zip(COLORS, NETWORKS, strict=False):
        for kind, style in (("plain", "o-"), ("linear", "s--")):
            own = [c for c in cells if (c["data"], c["optimizer"], c["network"]) == (data, optimizer, name)]
            indices = sorted({c["index"] for c in own if c["index"] != TASK})
            means = []
            for index in indices:
                values = [value(run) for run in chosen(own, kind, index=index)]
                known = [v for v in values if v is not None]
                means.append(sum(known) / len(known) if known else float("nan"))
            label = name if kind == "plain" else f"{name}, linearized"
            panel.plot([i + 1 for i in indices], means, style, color=color, ms=3, label=label)
            base = [value(run) for run in chosen(own, kind, index=TASK) if value(run) is not None]
            if base:
                panel.axhline(sum(base) / len(base), color=color, lw=0.7, ls=":" if kind == "plain" else "-.")
    panel.set_xscale("log")


def main(words: list[str] | None = None) -> None:
    """Entry point."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--samples", type=int, default=None, help="images (default 2000; 60,000 in full)")
    options.add_argument("--epochs", type=int, default=None, help="epochs (default 20; 100 in full)")
    options.add_argument("--indices", nargs="*", type=int, default=None)
    options.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    arguments = options.parse_args(words)
    full = arguments.full
    samples = arguments.samples or (60000 if full else 2000)
    epochs = arguments.epochs or (100 if full else 20)
    batch = 128 if full else 32
    wanted = arguments.indices or ([*INDICES, 2048, 8192] if full else list(INDICES))
    indices = [index for index in wanted if index < samples]
    study, cells = Study("kernels/eigenfunctions", arguments), []
    pair = cats_and_dogs(arguments.data_dir, full)
    for seed in study.seeds:
        for name in arguments.networks:
            functions = {}
            for data in ("CIFAR-10", "MNIST"):
                x = load(data, arguments.data_dir, samples, full).to(arguments.device)
                functions[data] = Functions(name, x, seed, max(indices) + 1)
            for data, optimizer in SETTINGS:
                for index in [TASK, *indices] if data == "CIFAR-10" else indices:
                    what = {
                        "data": data, "optimizer": optimizer, "network": name, "index": index, "seed": seed,
                        "samples": samples, "epochs": epochs, "batch": batch,
                    }  # fmt: skip

                    def compute(d: str = data, o: str = optimizer, j: int = index, f: Any = functions) -> Any:
                        train, held = f[d].split(j) if j != TASK else ((pair[0], pair[1]), (pair[2], pair[3]))
                        cut = samples * 5 // 6 if j == TASK else len(train[0])
                        return compare(
                            f[d].network(), (train[0][:cut], train[1][:cut]), held, o, epochs, batch
                        )

                    cells.append(study.cell(what, compute))
    study.publish(table(cells), cells)
    draw(cells, study)


if __name__ == "__main__":
    main()
