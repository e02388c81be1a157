"""Singular values of the Jacobians of LeNets trained on different tasks (Maddox et al. 2021, figure A.2).

Jacobians on images of MNIST1 (the first 30,000 of MNIST) of LeNet-5s trained on MNIST1, on MNIST2 (the
others), and on Fashion MNIST with the last layer trained anew on MNIST1 (1000 steps of Adam at 0.01). The
paper has 25 models a task, 5000 images and the 1000 largest singular values by a randomized method: those
of MNIST1 and MNIST2 decay alike and more rapidly than those of Fashion MNIST. Here fewer images, whose Gram
matrix J Jᵀ over all outputs is formed exactly; its eigenvalues are the squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.fast_adaptation.networks import accuracy, lenet
from experiments.figures import COLORS, figure, save
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

TASKS = ("MNIST1", "MNIST2", "Fashion MNIST")
RANKS = (1, 10, 100, 300)


def trained(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float, only: nn.Module | None = None
) -> None:
    """Adam on batches of 256, of all weights or of one layer's."""
    optimizer = torch.optim.Adam((only or model).parameters(), lr=rate)
    for _ in range(steps):
        index = torch.randint(len(x), (256,))
        loss = F.cross_entropy(model(x[index]), y[index])
        model.zero_grad()
        loss.backward()
        optimizer.step()


def singular_values(model: nn.Module, x: Tensor) -> Tensor:
    """Of J on x, descending: square roots of the eigenvalues of J Jᵀ (N C x N C)."""
    gram = linnet.spectrum.gram(linnet.linearize(model), x, form="full", accumulate="float64")
    size = x.shape[0] * 10
    values = torch.linalg.eigvalsh(gram.reshape(size, size).double())
    return values.clamp_min(0).sqrt().flip(0)


def measured(task: str, data: dict[str, tuple[Tensor, Tensor]], given: Any, seed: int) -> dict[str, Any]:
    """Train on a task, and take the singular values on MNIST1."""
    torch.manual_seed(seed)
    model = lenet().to(given.device)
    trained(model, *data[task], given.steps, 2e-3)
    own = accuracy(model, *(t[:2000] for t in data[task]))
    if task == "Fashion MNIST":
        last = model[-1]
        trained(model, *data["MNIST1"], given.head_steps, 1e-2, only=last)
    x, y = data["MNIST1"]
    values = singular_values(model, x[: given.images])
    kept = [float(f"{value:.5g}") for value in values[:1000]]
    ranks = {f"at_{rank}": float(values[rank - 1] / values[0]) for rank in RANKS if rank <= len(values)}
    return {"values": kept, "accuracy": own, "on_mnist1": accuracy(model, x[:2000], y[:2000]),
            "largest": float(values[0]), "effective": float(values.square().sum() ** 2 / values.pow(4).sum()),
            **ranks}  # fmt: skip


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Figure A.2: mean over models, and their range."""
    drawn, ax = figure(width=4.4, height=3.2)
    for color, task in zip(COLORS, TASKS, strict=False):
        values = torch.tensor([c["values"] for c in cells if c["task"] == task])
        rank = range(1, values.shape[1] + 1)
        ax.semilogy(rank, values.mean(0), color=color, label=f"trained on {task}")
        ax.fill_between(rank, values.amin(0), values.amax(0), color=color, alpha=0.2, lw=0)
    ax.set(xlabel="index", ylabel="singular value on MNIST1")
    ax.legend(fontsize=8)
    save(drawn, study.out / "task_jacobians.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--images", type=int, default=100, help="images of the Jacobian")
    options.add_argument("--train", type=int, default=10_000, help="images trained on")
    options.add_argument("--steps", type=int, default=200, help="steps of training, 256 images each")
    options.add_argument("--head-steps", type=int, default=100, help="of the new last layer")
    given = options.parse_args(arguments)
    if given.full:  # 20 epochs of 30,000 images
        given.images, given.train, given.steps, given.head_steps = 500, 30_000, 2344, 1000
    study = Study("fast_adaptation/task_jacobians", given)
    digits, fashion = images("mnist", given.data_dir), images("fashion_mnist", given.data_dir)
    half = len(digits.train_y) // 2
    sources = {
        "MNIST1": (digits.train_x[:half], digits.train_y[:half]),
        "MNIST2": (digits.train_x[half:], digits.train_y[half:]),
        "Fashion MNIST": (fashion.train_x, fashion.train_y),
    }
    data = {
        name: (pixels(x[: given.train], side=32).to(given.device), y[: given.train].to(given.device))
        for name, (x, y) in sources.items()
    }
    cells = []
    for seed in study.seeds:
        for task in TASKS:
            what = {"task": task, "seed": seed, "images": given.images, "train": given.train,
                    "steps": given.steps}  # fmt: skip
            if task == "Fashion MNIST":  # the others keep their last layers
                what["head_steps"] = given.head_steps
            cells.append(study.cell(what, lambda t=task, s=seed: measured(t, data, given, s)))
    study.publish(table(cells), cells)
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each task trained on, means over networks."""
    ranks = [rank for rank in RANKS[1:] if f"at_{rank}" in cells[0]]
    rows = []
    for task in TASKS:
        own = [cell for cell in cells if cell["task"] == task]
        rows.append([
            task,
            with_error(chosen(own, "on_mnist1"), 1, 100),
            with_error(chosen(own, "largest"), 1),
            *(with_error(chosen(own, f"at_{rank}"), 4) for rank in ranks),
            with_error(chosen(own, "effective"), 2),
        ])  # fmt: skip
    header = ["trained on", "accuracy on MNIST1, %", "largest singular value"]
    return markdown([*header, *(f"{rank}th / largest" for rank in ranks), "(Σ s²)² / Σ s⁴"], rows)


if __name__ == "__main__":
    main()
