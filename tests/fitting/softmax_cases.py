"""Dense oracles of the cross-entropy fit: Newton's method on explicit Jacobians, and refits, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from tests.fitting.problems import fit_options, network, real
from tests.oracles.dense import jacobian_oracle, output_oracle


def probabilities_of(f: Tensor) -> Tensor:
    """Softmax, or the sigmoid of one output."""
    return f.sigmoid() if f.shape[-1] == 1 else f.softmax(-1)


def log_losses(f: Tensor, y: Tensor) -> Tensor:
    """−Σ y log p of each example; of both classes for one output."""
    if f.shape[-1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")[..., 0]
    return -(y * f.log_softmax(-1)).sum(-1)


def curvatures(f: Tensor) -> Tensor:
    """Λ_i = diag(p) − p pᵀ, (N, C, C)."""
    p = probabilities_of(f)
    if f.shape[-1] == 1:
        return (p * (1 - p))[:, :, None]
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def hessian(j: Tensor, f: Tensor, rho: float) -> Tensor:
    """JᵀΛJ + ρI, dense."""
    eye = torch.eye(j.shape[2], dtype=j.dtype)
    return torch.einsum("ncp,ncd,ndq->pq", j, curvatures(f), j) + rho * eye


def dense_optimum(j: Tensor, f0: Tensor, y: Tensor, rho: float) -> Tensor:
    """δ by damped Newton steps on the weights until nothing moves."""
    delta = torch.zeros(j.shape[2], dtype=j.dtype)

    def value(d: Tensor) -> Tensor:
        return log_losses(f0 + j @ d, y).sum() + 0.5 * rho * d @ d

    for _ in range(200):
        f = f0 + j @ delta
        gradient = torch.einsum("ncp,nc->p", j, probabilities_of(f) - y) + rho * delta
        step = torch.linalg.solve(hessian(j, f, rho), gradient)
        t = 1.0
        while value(delta - t * step) > value(delta) + 1e-12 and t > 1e-9:
            t /= 2
        delta = delta - t * step
        if step.norm() <= 1e-13 * (1 + delta.norm()):
            break
    return delta


@dataclass(frozen=True)
class Case:
    """A network and labels, with everything dense about them."""

    model: nn.Module
    x: Tensor
    labels: Tensor  # as linnet.fit takes them
    y: Tensor  # probabilities (N, C)
    x_test: Tensor
    f0: Tensor
    f0_test: Tensor
    j: Tensor
    j_test: Tensor

    @property
    def lin(self) -> Any:
        """A fresh linearization."""
        return linnet.linearize(self.model)

    @property
    def scale(self) -> float:
        """The mean of K's diagonal."""
        return self.j.square().sum(2).mean().item()

    def fit(self, **options: Any) -> Any:
        """A cross-entropy fit; conjugate gradients run far enough to be compared exactly."""
        if options.get("solver") == "cg":
            options = {"tolerance": 1e-13, **options}
        return linnet.fit(self.lin, (self.x, self.labels), loss="cross-entropy", **fit_options(**options))

    def optimum(self, rho: float, kept: Any = slice(None)) -> Tensor:
        """Dense δ on some of the examples."""
        return dense_optimum(self.j[kept], self.f0[kept], self.y[kept], rho)

    def left_out(self, rho: float) -> Iterator[tuple[int, Tensor]]:
        """δ of each refit."""
        for i in range(len(self.x)):
            yield i, self.optimum(rho, [k for k in range(len(self.x)) if k != i])


def case(n: int = 9, outputs: int = 3, soft: bool = False, tests: int = 4, seed: int = 0) -> Case:
    """A problem of any size; one output has labels 0 and 1."""
    model = network(3, 5, outputs, seed)
    x, x_test = real(n, 3, seed=seed + 1), real(tests, 3, seed=seed + 2)
    if soft:
        raw = real(n, outputs, seed=seed + 3)
        y = labels = probabilities_of(2 * raw)
    else:
        labels = (torch.arange(n) * 2 + (x[:, 0] > 0)) % max(2, outputs)
        y = labels[:, None].double() if outputs == 1 else nn.functional.one_hot(labels, outputs).double()
    return Case(
        model, x, labels, y, x_test, output_oracle(model, x), output_oracle(model, x_test),
        jacobian_oracle(model, x), jacobian_oracle(model, x_test),
    )  # fmt: skip
