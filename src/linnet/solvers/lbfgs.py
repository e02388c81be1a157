"""L-BFGS for smooth functions of few numbers, such as hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# of the gradient and of a step: below, log evidences in float64 change by rounding alone
GRADIENT, CHANGE = 1e-8, 1e-12
HISTORY = 20  # pairs kept: as many as there are hyper-parameters in most priors


def minimize(
    objective: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, steps: int
) -> tuple[Tensor, float, int, bool]:
    """Minimize a smooth function by L-BFGS with a line search by the strong Wolfe conditions."""
    point = start.detach().clone().requires_grad_()
    best: tuple[float, Tensor] = (math.inf, point.detach().clone())
    count = 0

    def closure() -> Tensor:
        nonlocal best, count
        count += 1
        value, slope = objective(point.detach())
        point.grad = slope.detach().clone()
        if value < best[0]:
            best = (value, point.detach().clone())
        return torch.tensor(value, dtype=torch.float64)

    optimizer = torch.optim.LBFGS(
        [point],
        max_iter=steps,
        max_eval=steps,
        tolerance_grad=GRADIENT,
        tolerance_change=CHANGE,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    return best[1], best[0], count, count < steps
