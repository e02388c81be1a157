"""Ridge paths of a cross-entropy fit, and the error of its one-step leave-one-out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linear.dual import CriteriaByRidge
from linnet.linear.newton import KernelNewton, NewtonSystem
from linnet.linear.targets import Targets
from linnet.params import choice
from linnet.progress import track
from linnet.shown import Record

DECADES = (-5, 1)  # ridges of a path, relative to the mean diagonal of the kernel
ROUNDING = 4.0  # units of roundoff of the kernel's largest eigenvalue, below which a ridge is no ridge


@dataclass(frozen=True, repr=False)
class SoftmaxPath(CriteriaByRidge):
    """Every criterion along a path of ridges, (R,) each."""

    criteria = ("loo", "evidence")

    ridges: Tensor  # ρ, descending
    loo_error: Tensor  # mean leave-one-out log loss of an example, by one Newton step
    evidence: Tensor  # log evidence in Laplace's approximation
    degrees_of_freedom: Tensor  # tr ΛA = tr JᵀΛJ (JᵀΛJ + ρI)⁻¹
    loo_accuracy: Tensor  # share of examples whose likeliest class is right when left out
    certificate: Tensor  # gradient relative to that at δ = 0
    steps: Tensor  # Newton steps from the ridge before

    def best(self, criterion: str) -> float:
        """The ridge that a criterion prefers, "loo" or "evidence"."""
        choice("criterion", criterion, self.criteria)
        return self._least({"loo": self.loo_error, "evidence": -self.evidence}[criterion])


@dataclass(frozen=True, repr=False)
class LeftOut(Record):
    """Leave-one-out by one Newton step beside refitting, for some examples."""

    examples: Tensor  # their positions, (k,)
    one_step: Tensor  # outputs by one Newton step from the optimum, (k, C)
    refitted: Tensor  # outputs of fits without the example, solved to their certificate, (k, C)
    losses: Tensor  # log losses of the two, (k, 2)

    @property
    def error(self) -> float:
        """The largest difference of an output."""
        return float((self.one_step - self.refitted).abs().max())

    @property
    def loss_error(self) -> float:
        """The largest difference of a log loss."""
        return float((self.losses[:, 0] - self.losses[:, 1]).abs().max())


def softmax_grid(kernel: Tensor, dtype: torch.dtype, per_decade: int = 2) -> Tensor:
    """Ridges in steps of a decade's parts, relative to the mean of K's diagonal, above its rounding."""
    # kernel (N·C, N·C)
    scale = float(kernel.diagonal().mean()) or 1.0
    low, high = DECADES
    count = (high - low) * per_decade + 1
    every = scale * torch.logspace(high, low, count, dtype=torch.float64)
    sound = every[every >= ROUNDING * torch.finfo(dtype).eps * _largest(kernel)]
    return sound if len(sound) else every[:1]


def _largest(kernel: Tensor, steps: int = 20) -> float:
    """The largest eigenvalue, from below, by the power method."""
    v = torch.ones(kernel.shape[0], dtype=kernel.dtype, device=kernel.device)
    v[1::2] = 0.5
    size = 0.0
    for _ in range(steps):
        v = kernel @ v
        size = float(v.norm())
        if size == 0 or not math.isfinite(size):
            return 0.0
        v = v / size
    return size


def solutions(system: KernelNewton, ridges: Tensor) -> Iterator[KernelNewton]:
    """The solutions along a path, each from the one before; where the precision ends, so does the path."""
    first = True
    for ridge in track(ridges.tolist(), f"cross-entropy: {len(ridges)} ridges", len(ridges)):
        try:
            system = system.at(ridge)
        except NumericalError:
            if first:
                raise
            return
        first = False
        yield system


def point(system: KernelNewton, labels: Tensor, exact: Tensor | None = None) -> tuple[float, ...]:
    """All criteria at one ridge."""
    # labels (N,), exact (N, C)
    outputs = system.loo_outputs() if exact is None else exact
    chosen = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    return (
        system.ridge,
        float(system.problem.losses(outputs).mean()),
        system.log_evidence(),
        system.degrees_of_freedom(),
        float((chosen == labels).double().mean()),
        system.certificate(),
        float(system.steps),
    )


def followed(
    system: KernelNewton,
    ridges: Tensor,
    targets: Targets,
    criterion: str = "loo",
    exact: Tensor | None = None,
) -> tuple[SoftmaxPath, KernelNewton]:
    """Every criterion along a path, by held-out outputs where there are any, and the solution of the best."""
    # ridges (R,) descending, exact (R, N, C)
    labels, points = targets.labels, []
    assert labels is not None
    best = system
    for place, solved in enumerate(solutions(system, ridges)):
        held = None if exact is None else exact[place]
        if held is not None and not bool(held.isfinite().all()):
            break
        points.append(point(solved, labels, held))
        if as_path(points).best(criterion) == solved.ridge:
            best = solved
    return as_path(points), best


def as_path(points: list[tuple[float, ...]]) -> SoftmaxPath:
    """A table of the points of a path."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True)]
    ridges, loo, evidence, degrees, accuracy, certificate, steps = columns
    return SoftmaxPath(ridges, loo, evidence, degrees, accuracy, certificate, steps.long())


def compare_left_out(system: NewtonSystem, examples: Tensor, refitted: Tensor) -> LeftOut:
    """Leave some examples out by one Newton step, compared with refitting."""
    # examples (k,), refitted (k, C)
    quick, problem = system.loo_outputs()[examples], system.problem
    losses = [problem.likelihood.nll(f.to(quick), problem.y[examples]) for f in (quick, refitted)]
    return LeftOut(examples, quick, refitted, torch.stack(losses, 1))
