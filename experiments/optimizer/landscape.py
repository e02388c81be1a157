"""Botev 2020, lemmas 3.17, 3.18 and figure 3.1: losses of networks with piecewise linear activations.

With a convex loss of the outputs the Hessian's block of each layer is positive semi-definite, and the loss
has no differentiable strict local maximum: its maxima lie on ridges, where a unit changes its regime. At
random weights of small networks with squared error this counts layers whose block has a negative eigenvalue,
Hessians with a negative trace and Hessians with a negative eigenvalue at all. On planes through the weights,
as in the figure, it counts the points of a grid that are above their eight neighbors, and in how many of
them all units keep their regime on those nine points: smooth maxima. Tanh and GELU, whose second derivative
is not zero, stand beside.

    python -m experiments.optimizer.landscape --threads 1 --seeds 5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.likelihoods import Gaussian

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "ReLU": nn.ReLU,
    "leaky ReLU": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "GELU": nn.GELU,
}
PIECEWISE = ("ReLU", "leaky ReLU")
SIZES, EXAMPLES, DRAWS, PLANES = (3, 6, 5, 2), 10, 100, 30
POINTS, REACH = 81, 4.0  # of a grid in each direction, and the largest coordinate
ROUNDING = 1e-9  # of the largest eigenvalue: below it an eigenvalue is zero
PLANES_OF = ("first layer", "last layer", "both")


def network(activation: str, generator: torch.Generator) -> nn.Sequential:
    """Linear layers and activations between them, with standard normal weights."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(SIZES):
        layers += [nn.Linear(fan_in, fan_out, dtype=torch.float64), ACTIVATIONS[activation]()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(generator=generator)
    return model


def hessians(activation: str, seed: int) -> dict[str, Any]:
    """Shares of random weights at which the Hessian has what the lemmas exclude, in %."""
    generator = torch.Generator().manual_seed(seed)
    blocks = traces = indefinite = 0.0
    for _ in range(DRAWS):
        model = network(activation, generator)
        x = torch.randn(EXAMPLES, SIZES[0], generator=generator, dtype=torch.float64)
        y = torch.randn(EXAMPLES, SIZES[-1], generator=generator, dtype=torch.float64)
        matrix = linnet.curvature(model, (x, y), Gaussian(), "full", matrix="hessian").dense()
        largest = float(torch.linalg.eigvalsh(matrix).abs().max())
        sizes = [
            sum(w.numel() for w in layer.parameters()) for layer in model if isinstance(layer, nn.Linear)
        ]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        own = [matrix[a : a + n, a : a + n] for a, n in zip(starts, sizes, strict=True)]
        blocks += sum(least(block) < -ROUNDING * largest for block in own) / len(own)
        traces += float(matrix.trace()) < 0
        indefinite += least(matrix) < -ROUNDING * largest
    return {
        "blocks": 100 * blocks / DRAWS,
        "traces": 100 * traces / DRAWS,
        "indefinite": 100 * indefinite / DRAWS,
    }


def least(matrix: Tensor) -> float:
    """The smallest eigenvalue."""
    return float(torch.linalg.eigvalsh(matrix)[0])


def surface(activation: str, of: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Loss on a plane of weights, and the regimes of all units at each point; a smooth activation has one.

    A network of two layers without biases, as in the figure: W₁ = x U + y V, or W₂, or W₁ = x U and W₂ = y V.
    """
    inputs, hidden, outputs = SIZES[0], SIZES[1], SIZES[-1]
    x, y, u1, v1, u2, v2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [
            (EXAMPLES, inputs),
            (EXAMPLES, outputs),
            *[(hidden, inputs)] * 2,
            *[(outputs, hidden)] * 2,
        ]
    )
    line = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    a, b = (grid[..., None, None] for grid in torch.meshgrid(line, line, indexing="ij"))
    first = {"first layer": a * u1 + b * v1, "last layer": u1.expand(POINTS, POINTS, -1, -1), "both": a * u1}[
        of
    ]
    last = {"first layer": u2.expand(POINTS, POINTS, -1, -1), "last layer": a * u2 + b * v2, "both": b * v2}[
        of
    ]
    sums = x @ first.mT
    out = ACTIVATIONS[activation]()(sums) @ last.mT
    loss = 0.5 * (out - y).square().sum((-2, -1)) / EXAMPLES
    return loss, ((sums > 0) & (activation in PIECEWISE)).flatten(-2)


def maxima(loss: Tensor, regimes: Tensor) -> tuple[int, int]:
    """Points above their eight neighbors, and those of them around which no unit changes its regime."""
    inner = loss[1:-1, 1:-1]
    above = torch.ones_like(inner, dtype=torch.bool)
    alike = torch.ones_like(above)
    here = regimes[1:-1, 1:-1]
    for i in range(3):
        for j in range(3):
            part = slice(i, i + len(inner)), slice(j, j + len(inner))
            if (i, j) != (1, 1):
                above &= inner > loss[part]
            alike &= (regimes[part] == here).all(-1)
    return int(above.sum()), int((above & alike).sum())


def planes(activation: str, seed: int) -> dict[str, Any]:
    """Maxima on random planes: all, and those where no unit changes its regime."""
    generator = torch.Generator().manual_seed(1000 + seed)
    found = {of: [maxima(*surface(activation, of, generator)) for _ in range(PLANES)] for of in PLANES_OF}
    return {
        key: {of: sum(pair[i] for pair in pairs) for of, pairs in found.items()}
        for i, key in enumerate(("maxima", "smooth maxima"))
    }


def compute(activation: str, seed: int) -> dict[str, Any]:
    """A cell."""
    return {**hessians(activation, seed), **planes(activation, seed)}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row an activation."""
    rows = []
    for activation in dict.fromkeys(cell["activation"] for cell in cells):
        own = [cell for cell in cells if cell["activation"] == activation]
        shares = [with_error(chosen(own, key), 1) for key in ("blocks", "traces", "indefinite")]
        counts = [sum(sum(cell[key].values()) for cell in own) for key in ("maxima", "smooth maxima")]
        rows.append([activation, str(len(own)), *shares, *map(str, counts)])
    header = ["activation", "seeds", "layers with a negative eigenvalue, %", "negative traces, %"]
    header += ["Hessians with a negative eigenvalue, %", "maxima on planes", "of these smooth"]
    return markdown(header, rows)


def draw(path: Path) -> None:
    """The three surfaces of the figure, for ReLU."""
    picture, axes = figure(3, 1, width=2.6, height=2.6)
    generator = torch.Generator().manual_seed(1000)
    for axis, of in zip(axes, PLANES_OF, strict=True):
        loss, _ = surface("ReLU", of, generator)
        axis.imshow(loss.log().T.numpy(), origin="lower", extent=(-REACH, REACH, -REACH, REACH))
        axis.set(title=of, xlabel="x", ylabel="y")
    save(picture, path)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = parser(__doc__ or "", seeds=5).parse_args(given)
    study = Study("optimizer/landscape", args)
    cells = [
        study.cell({"activation": activation, "seed": seed}, lambda a=activation, s=seed: compute(a, s))  # type: ignore[misc]
        for activation in ACTIVATIONS
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)
    draw(study.out / "landscape.svg")


if __name__ == "__main__":
    main()
