"""Figure 3: the condition number of the Hessian before and after the training of a network.

Achille et al. find that the Hessian of a network is conditioned much better at the end of its fine-tuning
(179.7) than at the start (1482.4), which a linear model, whose Hessian is what it is, has no part in. Here
LeNets with the squared loss: the nonzero eigenvalues of its Gauss-Newton matrix are those of the kernel of
the training images, whose condition number is taken in double precision, also with a ridge that is a
thousandth of its mean diagonal. The networks begin at random weights, or trained on Fashion MNIST with a
new head, and are trained on MNIST.

    python -m experiments.lqf.condition --threads 1
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.kernels.networks import lenet
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

STARTS = ("random weights", "Fashion MNIST")
RIDGE = 1e-3  # over the kernel's mean diagonal
Data = tuple[Tensor, Tensor]


def train(network: nn.Module, data: Data, steps: int, seed: int) -> None:
    """SGD with momentum on the squared loss, its rate falling to zero."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        index = torch.randint(len(x), (64,), generator=generator)
        loss = (network(x[index]) - F.one_hot(y[index], 10)).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def conditioned(network: nn.Module, x: Tensor) -> dict[str, float]:
    """Condition numbers of the kernel of all outputs, without a ridge and with one, and its largest value."""
    twin = copy.deepcopy(network).double().eval()
    kernel = linnet.spectrum.gram(linnet.linearize(twin, "all"), x.double(), form="full", progress=False)
    matrix = kernel.reshape(10 * len(x), 10 * len(x))
    ridge = RIDGE * float(matrix.diagonal().mean())
    return {
        "condition": linnet.spectrum.condition_number(matrix),
        "with ridge": linnet.spectrum.condition_number(matrix, ridge=ridge),
        "largest": float(torch.linalg.eigvalsh(matrix)[-1]) / len(x),
    }


def compared(start: str, seed: int, data: dict[str, Data], steps: int, count: int) -> dict[str, Any]:
    """Condition numbers before and after the training on MNIST."""
    torch.manual_seed(seed)
    network = lenet(1, 28, outputs=10)
    if start != STARTS[0]:
        train(network, data[start], steps, seed)
        head = network[-1]
        assert isinstance(head, nn.Linear)
        head.reset_parameters()
    x, y = data["MNIST"]
    before = conditioned(network, x[:count])
    train(network, (x, y), steps, seed + 1000)
    with torch.no_grad():
        share = float((network(x).argmax(1) == y).double().mean())
    after = conditioned(network, x[:count])
    growth = {key: math.log10(after[key] / before[key]) for key in before}
    return {"before": before, "after": after, "growth": growth, "accuracy": share}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each start and time."""
    rows = []
    for start in dict.fromkeys(cell["start"] for cell in cells):
        for when in ("before", "after"):
            own = chosen(cells, when, start=start)
            rows.append([
                f"{start}, {when}", with_error([c["condition"] for c in own], 0),
                with_error([c["with ridge"] for c in own], 0), with_error([c["largest"] for c in own], 1),
            ])  # fmt: skip
        growth = chosen(cells, "growth", start=start)
        rows.append([f"{start}, log₁₀ of after over before",
                     *(with_error([c[key] for c in growth], 2) for key in growth[0])])  # fmt: skip
    header = ["start", "condition number", "with a ridge", "largest eigenvalue"]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--train", type=int, default=2000, help="images trained on")
    options.add_argument("--images", type=int, default=100, help="of these, in the kernel")
    options.add_argument("--steps", type=int, default=1000, help="of 64 images")
    given = options.parse_args(argv)
    data = {}
    for name, file in (("MNIST", "mnist"), ("Fashion MNIST", "fashion_mnist")):
        found = images(file, given.data_dir)
        data[name] = pixels(found.train_x[: given.train]), found.train_y[: given.train]
    study = Study("lqf/condition", given)
    cells = [
        study.cell(
            {"start": start, "seed": seed, "train": given.train, "images": given.images,
             "steps": given.steps},
            lambda s=start, k=seed: compared(s, k, data, given.steps, given.images),
        )
        for start in STARTS
        for seed in study.seeds
    ]  # fmt: skip
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
