"""Botev 2020, figure 5.6: λ moves the mode between what a new task wants and what the past was.

The thesis draws a Gaussian likelihood and a Gaussian prior, that of the tasks before, and the mode of their
product where the prior is multiplied by λ. Here both are least-squares problems of a linear network, so that
online Laplace with the full matrix is exact: the first task is consolidated at its optimum with strength λ,
the second is solved with the penalty. Beside it are Kronecker factors and the diagonal. Distances are in each
task's own metric, ‖μ - μ_t‖ in G_t, over the distance of the two optima in it: 0 is the task's optimum, 1 the
other's.

    python -m experiments.continual.two_gaussians --threads 1 --seeds 10
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.continual import OnlineLaplace
from linnet.likelihoods import Gaussian

STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
STRUCTURES = ("full", "kfac", "diagonal")
INPUTS, EXAMPLES = 3, 50
PRIOR = 1e-9  # precision of the first prior: none, but for the inverse of the sum


def task(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Correlated inputs, and targets of random weights with noise."""
    mixed = torch.randn(INPUTS, INPUTS, generator=generator, dtype=torch.float64)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator, dtype=torch.float64) @ mixed
    w = torch.randn(INPUTS, 1, generator=generator, dtype=torch.float64)
    return x, x @ w + 0.1 * torch.randn(EXAMPLES, 1, generator=generator, dtype=torch.float64)


def optimum(data: tuple[Tensor, Tensor]) -> Tensor:
    """Least squares of one task."""
    return torch.linalg.lstsq(*data).solution.flatten()


def solve(model: nn.Linear, method: OnlineLaplace, data: tuple[Tensor, Tensor]) -> Tensor:
    """The minimum of the second task's loss with the penalty: a Newton step, for both are quadratic."""

    def objective(w: Tensor) -> Tensor:
        model.weight.data.copy_(w.view_as(model.weight))
        return 0.5 * (model(data[0]) - data[1]).square().sum() + method.penalty()

    def gradient(w: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(objective(w), model.weight)
        return found.flatten()

    zero = torch.zeros(INPUTS, dtype=torch.float64)
    start = gradient(zero)
    matrix = torch.stack([gradient(row) - start for row in torch.eye(INPUTS, dtype=torch.float64)])
    return -torch.linalg.solve(matrix, start)


def compute(structure: str, strength: float, seed: int) -> dict[str, Any]:
    """Where the mode lies between the two optima, and how far it is from the product's in closed form."""
    generator = torch.Generator().manual_seed(seed)
    first, second = task(generator), task(generator)
    own, new = optimum(first), optimum(second)
    model = nn.Linear(INPUTS, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(own.view_as(model.weight))
    method = OnlineLaplace(model, Gaussian(), structure, prior_precision=PRIOR, strength=strength)  # type: ignore[arg-type]
    method.consolidate(first)
    mode = solve(model, method, second)
    past, present = (data[0].T @ data[0] for data in (first, second))
    product = torch.linalg.solve(strength * past + present, strength * past @ own + present @ new)

    def length(v: Tensor, matrix: Tensor) -> float:
        return float((v @ matrix @ v).sqrt())

    return {
        "from the past": length(mode - own, past) / length(new - own, past),
        "from the new task": length(mode - new, present) / length(new - own, present),
        "from the product": float((mode - product).norm() / (new - own).norm()),
    }


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a structure and strength."""
    rows = []
    for structure, strength in dict.fromkeys((cell["structure"], cell["strength"]) for cell in cells):
        own = [cell for cell in cells if (cell["structure"], cell["strength"]) == (structure, strength)]
        distances = [with_error(chosen(own, f"from the {of}"), 3) for of in ("past", "new task")]
        exact = f"{max(chosen(own, 'from the product')):.1e}"
        rows.append([structure, f"{strength:g}", *distances, exact])
    header = ["structure", "λ", "distance from the past's optimum", "from the new task's"]
    return markdown([*header, "from the product's mode, largest"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = parser(__doc__ or "", seeds=10).parse_args(given)
    study = Study("continual/two_gaussians", args)
    cells = [
        study.cell(
            {"structure": structure, "strength": strength, "seed": seed},
            lambda structure=structure, strength=strength, seed=seed: compute(structure, strength, seed),  # type: ignore[misc]
        )
        for structure in STRUCTURES
        for strength in STRENGTHS
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)
    picture, axis = figure()
    for color, structure in zip(COLORS, STRUCTURES, strict=False):
        points = [
            [
                sum(chosen(cells, f"from the {of}", structure=structure, strength=s)) / len(study.seeds)
                for s in STRENGTHS
            ]
            for of in ("past", "new task")
        ]
        axis.plot(*points, "o-", color=color, label=structure)
    axis.set(xlabel="distance from the past's optimum", ylabel="from the new task's")
    axis.legend()
    save(picture, study.out / "two_gaussians.svg")


if __name__ == "__main__":
    main()
