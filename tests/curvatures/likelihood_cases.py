"""Likelihoods with outputs, labels and an independent formula of their density, for tests of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    mixture_of_classifiers,
)

Shape = tuple[int, ...]
VARIANCES = torch.tensor([0.5, 1.0, 2.0, 0.25])


@dataclass(frozen=True)
class Case:
    """A likelihood, how its labels are made and what torch calls the distribution, both on rows (M, C)."""

    make: Callable[..., Likelihood]
    classes: int
    labels: Callable[[Tensor], Tensor]
    density: Callable[[Tensor], Any]
    outputs: Callable[[Tensor], Tensor] = lambda f: f
    missing: float | None = None

    def problem(self, shape: Shape = (5, 0), axis: int = 1) -> tuple[Likelihood, Tensor, Tensor]:
        """The likelihood with random outputs of a shape (0 stands for C) and labels."""
        generator = torch.Generator().manual_seed(len(shape))
        shape = tuple(self.classes if size == 0 else size for size in shape)
        place = axis if axis > 0 else len(shape) + axis
        rest = [size for i, size in enumerate(shape) if i != place]
        rows = self.outputs(torch.randn(*rest, self.classes, generator=generator, dtype=torch.float64))
        labels = self.labels(rows.flatten(0, -2))
        labels = labels.reshape(*rest, *labels.shape[1:])
        if labels.ndim == rows.ndim:
            labels = labels.movedim(-1, place)
        return self.make(axis=axis), rows.movedim(-1, place), labels

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Of rows (M, C), by torch.distributions: (M,)."""
        value = self.density(f).log_prob(y)
        return value.reshape(len(f), -1).sum(1)


class Mixture:
    """Equation 4.28 as it is written, and as a torch distribution has it."""

    def __init__(self, f: Tensor) -> None:
        gate, first, second = f.sigmoid().unbind(-1)
        self.p = gate * first + (1 - gate) * second

    def log_prob(self, y: Tensor) -> Tensor:
        return torch.where(y == 1, self.p, 1 - self.p).log()


def student_nll(f: Tensor, y: Tensor) -> Tensor:
    """Student's t with 3 degrees of freedom about f₁, with log scale f₂."""
    return -D.StudentT(3.0, f[:, 0], f[:, 1].exp()).log_prob(y)


def student_sample(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """A normal number over the root of a mean square of three."""
    z = torch.randn(4, len(f), generator=generator, dtype=f.dtype)
    return f[:, 0] + f[:, 1].exp() * z[0] / (z[1:] ** 2).mean(0).sqrt()


def softmax_nll(f: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy as any user would write it."""
    return torch.nn.functional.cross_entropy(f, y, reduction="none")


def _classes(count: int) -> Callable[[Tensor], Tensor]:
    return lambda f: torch.arange(len(f)) * 7 % count


def _natural(f: Tensor) -> Tensor:
    first, second = f.chunk(2, -1)
    return torch.cat([first, -second.exp()], -1)


def _normal_of_logs(f: Tensor) -> D.Normal:
    mean, log_variance = f.chunk(2, -1)
    return D.Normal(mean, (0.5 * log_variance).exp())


def _normal_of_natural(f: Tensor) -> D.Normal:
    first, second = f.chunk(2, -1)
    return D.Normal(-first / (2 * second), (-0.5 / second).sqrt())


def _ramp(divisor: int, shift: float) -> Callable[[Tensor], Tensor]:
    def labels(f: Tensor) -> Tensor:
        width = f.shape[1] // divisor
        return (torch.arange(len(f) * width) * 5 % 7).reshape(len(f), width).to(f.dtype) / 2 - shift

    return labels


CASES: dict[str, Case] = {
    "gaussian": Case(Gaussian, 3, _ramp(1, 1.0), lambda f: D.Normal(f, 1.0)),
    "gaussian-masked": Case(
        lambda **kw: Gaussian(VARIANCES, masked=True, **kw),
        4,
        _ramp(1, 1.0),
        lambda f: D.Normal(f, VARIANCES.to(f).sqrt()),
        missing=float("nan"),
    ),
    "log-variance": Case(
        lambda **kw: HeteroscedasticGaussian(masked=True, **kw),
        4,
        _ramp(2, 1.0),
        _normal_of_logs,
        missing=float("nan"),
    ),
    "natural": Case(
        lambda **kw: HeteroscedasticGaussian("natural", masked=True, **kw),
        4,
        _ramp(2, 1.0),
        _normal_of_natural,
        outputs=_natural,
        missing=float("nan"),
    ),
    "categorical": Case(Categorical, 4, _classes(4), lambda f: D.Categorical(logits=f), missing=-100),
    "two-classes": Case(
        lambda **kw: Categorical(ignore_index=255, **kw),
        2,
        _classes(2),
        lambda f: D.Categorical(logits=f),
        missing=255,
    ),
    "bernoulli": Case(
        Bernoulli, 3, lambda f: _ramp(1, 0.0)(f) % 1 * 2, lambda f: D.Bernoulli(logits=f), missing=-100
    ),
    "poisson": Case(
        lambda **kw: Poisson(masked=True, **kw),
        2,
        lambda f: _ramp(1, 0.0)(f) * 2,
        lambda f: D.Poisson(f.exp()),
        missing=float("nan"),
    ),
    "mixture": Case(mixture_of_classifiers, 3, _classes(2), Mixture),
    "custom-softmax": Case(
        lambda **kw: Custom(softmax_nll, support=range(3), canonical=True, **kw),
        3,
        _classes(3),
        lambda f: D.Categorical(logits=f),
    ),
    "student": Case(
        lambda **kw: Custom(student_nll, sample=student_sample, **kw),
        2,
        lambda f: _ramp(2, 1.0)(f)[:, 0],
        lambda f: D.StudentT(3.0, f[:, 0], f[:, 1].exp()),
    ),
}
SHAPES: tuple[tuple[Shape, int], ...] = (((5, 0), 1), ((2, 0, 2, 2), 1), ((2, 3, 0), -1), ((2, 2, 0, 2), 2))
CANONICAL: Sequence[str] = (
    "gaussian", "gaussian-masked", "natural", "categorical", "two-classes", "bernoulli", "poisson",
    "custom-softmax",
)  # fmt: skip
INDEFINITE: Sequence[str] = ("log-variance", "mixture", "student")


def blocks(likelihood: Likelihood, columns: Tensor) -> Tensor:
    """Σ_k s_k s_kᵀ of columns (K, N, ...), over all outputs of an example in the order (T, C)."""
    rows = torch.stack([arranged(likelihood, column) for column in columns]).flatten(2)
    return torch.einsum("kni,knj->nij", rows, rows)


def joined(matrix: Tensor) -> Tensor:
    """(N, T, C, C) as block-diagonal (N, TC, TC)."""
    return torch.stack([torch.block_diag(*example) for example in matrix])


def arranged(likelihood: Likelihood, f: Tensor) -> Tensor:
    """(N, T, C), by a way of its own."""
    axis = likelihood.axis if likelihood.axis > 0 else f.ndim + likelihood.axis
    order = [i for i in range(f.ndim) if i != axis] + [axis]
    return f.permute(order).reshape(len(f), -1, f.shape[axis])


def flat_labels(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Labels of each position, (M,) or (M, D)."""
    return y.reshape(-1) if y.ndim < f.ndim else arranged(likelihood, y).flatten(0, 1)
