"""Steps of the fast gradient sign method in units of each pixel (Botev 2020, eqs. 5.15 and 5.16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]  # probabilities (N, C) of inputs (N, ...), differentiable
BATCH = 500


def ascent(predict: Predict, x: Tensor, aim: Tensor) -> Tensor:
    """∇ log p(aim | x), of the shape of x."""
    parts = []
    for part, classes in zip(x.split(BATCH), aim.split(BATCH), strict=True):
        variable = part.clone().requires_grad_()
        own = predict(variable).gather(1, classes[:, None])[:, 0]
        # Probabilities that underflowed to 0 have no direction: log is cut off there, with gradient 0.
        log_p = own.clamp_min(torch.finfo(own.dtype).tiny).log()
        parts.append(torch.autograd.grad(log_p.sum(), variable)[0])
    return torch.cat(parts)


def untargeted(predict: Predict, x: Tensor, steps: Sequence[float], span: Tensor) -> tuple[list[Tensor], int]:
    """X − η span sign ∇ log p(ŷ | x) for each η, and the number of examples without a gradient."""
    gradient = ascent(predict, x, probabilities(predict, x).argmax(1))
    unmoved = int((gradient.flatten(1) == 0).all(1).sum())
    return [x - step * span * gradient.sign() for step in steps], unmoved


def targeted(
    predict: Predict, x: Tensor, size: float, span: Tensor, target: int, iterations: int
) -> tuple[list[Tensor], int]:
    """The inputs after each of several steps x ← x + η span sign ∇ log p(target | x), and as above."""
    aim, points, unmoved = torch.full((len(x),), target), list[Tensor](), 0
    for iteration in range(iterations):
        gradient = ascent(predict, x, aim)
        if iteration == 0:
            unmoved = int((gradient.flatten(1) == 0).all(1).sum())
        x = x + size * span * gradient.sign()
        points.append(x)
    return points, unmoved


def probabilities(predict: Predict, x: Tensor) -> Tensor:
    """The probabilities (N, C), without a gradient."""
    with torch.no_grad():
        return torch.cat([predict(part) for part in x.split(BATCH)])


def curves(predict: Predict, points: Sequence[Tensor], **classes: Tensor) -> dict[str, list[float]]:
    """At each of several sets of inputs the share predicted as some classes (N,), and the mean entropy."""
    found: dict[str, list[float]] = {name: [] for name in (*classes, "entropy")}
    for x in points:
        p = probabilities(predict, x).double()
        for name, wanted in classes.items():
            found[name].append(float((p.argmax(1) == wanted).double().mean()))
        found["entropy"].append(float(torch.special.entr(p).sum(1).mean()))
    return found
