"""The ridge by validation data: the loss along a path, its exact derivative in log ρ, and its minimum.

With L(ρ) = mean over the validation data of ‖y − f₀ − Jᵥ δ(ρ)‖² and G = JᵀJ over the training data,

    dδ/dρ = −(G + ρI)⁻¹ δ,        dL/d log ρ = −ρ ∇L · (G + ρI)⁻¹ δ

(Achille et al., CVPR 2021, eq. 10-12, whose λ is a mean's: dL/d log λ is the same number). In the dual one
eigendecomposition K = V diag(λ) Vᵀ serves every ridge: f(ρ) = f₀ + K_vX V (λ + ρ)⁻¹ Vᵀ r. Beyond it one
Krylov space serves them all (shifted conjugate gradients), which is continuation in weight decay (figure 8)
without fine-tuning.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import ridge_grid
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.remarks import after_change
from linnet.linear.constrained_system import ConstrainedSystem
from linnet.linear.iterative import Iterative
from linnet.linear.system import System
from linnet.shown import Record, frame
from linnet.solvers.cg import shifted_cg
from linnet.tangent.batch import Inputs
from linnet.tangent.jacobian import jvp_columns
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

if TYPE_CHECKING:
    from pandas import DataFrame

DECADES = 4  # of the grid of a primal fit, to each side of its ridge
ACCURACY = 1e-3  # of log ρ


@dataclass(frozen=True, repr=False)
class ValidationPath(Record):
    """The fit on validation data along a path of ridges.

    Args:
        ridges: ρ, (R,).
        loss: Mean ‖y − f(x)‖² over the validation data, (R,).
        distance: ‖δ‖, (R,).
        outputs: Predictions (R, T, C).
        accuracy: Share of right classes, (R,); ``None`` for regression.
        gradient: dL/d log ρ, (R,); ``None`` where it takes a solve for each ridge (primal fits).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> fit = linnet.fit(linnet.linearize(net), (x[::2], 2 * x[::2]))
        >>> linnet.audit.ridge_path(fit, (x[1::2], 2 * x[1::2]), [0.01, 1.0, 100.0]).loss.shape
        torch.Size([3])
    """

    ridges: Tensor
    loss: Tensor
    distance: Tensor
    outputs: Tensor
    accuracy: Tensor | None = None
    gradient: Tensor | None = None

    def _shown(self) -> dict[str, Any]:
        return {"ridges": self.ridges, "best": self.best(), "least loss": float(self.loss.min())}

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a ridge.

        Returns:
            The ridge as index, and every criterion.

        Raises:
            DependencyError: If pandas is missing.
        """
        columns = {"ridge": self.ridges, "loss": self.loss, "distance": self.distance}
        return frame({**columns, "accuracy": self.accuracy, "gradient": self.gradient}, "ridge")

    def best(self) -> float:
        """The ridge of lowest loss."""
        return float(self.ridges[int(self.loss.argmin())])


@in_exact_mode
@torch.no_grad()
def ridge_path(fit: LinearFit, validation: Any, ridges: Any = None) -> ValidationPath:
    """Predictions, their loss and the size of δ at many ridges, from one solve.

    Args:
        fit: A linear fit; a primal one must be free of constraints, a dual one of penalties.
        validation: An (x, y) pair, a Dataset, a DataLoader or batches.
        ridges: ρ, (R,); by default a grid around the scale of the kernel, or around the fit's own ridge.

    Returns:
        The path.

    Raises:
        DataError: If the validation data are empty, not finite or out of range.
        InputError: If a ridge is not positive, or the fit is primal with constraints or has penalties.

    Source:
        Achille et al., CVPR 2021, appendix A.1, figure 8; Jegerlehner 1996 (shifted conjugate gradients).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> fit = linnet.fit(linnet.linearize(net), (x[::2], 2 * x[::2]))
        >>> path = ridge_path(fit, (x[1::2], 2 * x[1::2]), [0.01, 1.0, 100.0])
        >>> path.best()
        0.01
    """
    curve = _curve(fit, validation)
    grid = curve.grid() if ridges is None else ridge_grid(ridges)
    outputs, distance, gradient = curve.many(grid)
    loss = (curve.targets - outputs).square().sum(2).mean(1)
    accuracy = None
    if curve.labels is not None:
        accuracy = (outputs.argmax(2) == curve.labels).double().mean(1)
    return ValidationPath(grid, loss, distance, outputs, accuracy, gradient)


@in_exact_mode
@torch.no_grad()
def ridge_gradient(fit: LinearFit, x: Inputs, y: Any) -> float:
    """D L/d log ρ of the validation loss L at the fit's own ridge, exactly.

    Args:
        fit: A linear fit; a primal one must be free of constraints. One solve.
        x: T validation examples.
        y: Their classes (T,) or targets (T, C).

    Returns:
        The derivative of the mean of ‖y − f(x)‖²; a positive one asks for a smaller ridge.

    Raises:
        DataError: If the validation data are empty, not finite or out of range.
        InputError: If the fit is primal with constraints or has penalties.

    Source:
        Achille et al., CVPR 2021, eq. (12).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> fit = linnet.fit(linnet.linearize(net), (x, 2 * x), ridge=10.0)
        >>> ridge_gradient(fit, x, 2 * x) > 0
        True
    """
    return _curve(fit, (x, y)).at(fit.ridge)[1]


@in_exact_mode
@torch.no_grad()
def tune_ridge(fit: LinearFit, validation: Any) -> LinearFit:
    """The same fit at the ridge of lowest validation loss.

    A grid finds the valley, then the zero of the exact derivative in log ρ is found by the secant method
    between its walls. In the dual no step costs more than products with validation outputs; a primal fit
    starts each solve from the one before.

    Args:
        fit: A linear fit without constraints.
        validation: An (x, y) pair, a Dataset, a DataLoader or batches.

    Returns:
        A new fit; ``summary()["reasons"]["ridge"]`` says what was found.

    Raises:
        DataError: If the validation data are empty, not finite or out of range.
        InputError: If the fit has constraints.

    Source:
        Achille et al., CVPR 2021, appendix A.1, eq. (10) to (12).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> noisy = 2 * x + torch.tensor([[0.5], [-0.5]]).repeat(4, 1)
        >>> fit = linnet.fit(linnet.linearize(net), (x, noisy), ridge=100.0)
        >>> tune_ridge(fit, (x, 2 * x)).ridge < 100.0
        True
    """
    _check_squared(fit)
    if fit.constraints is not None:
        raise InputError(
            "tune_ridge of a fit with constraints",
            expected="a fit without constraints",
            remedy="tune the ridge first, and constrain the fit that comes out",
        )
    start = time.perf_counter()
    curve = _curve(fit, validation)
    grid = curve.grid()
    loss = (curve.targets - curve.many(grid)[0]).square().sum(2).mean(1)
    i = int(loss.argmin())
    ridge, edge = float(grid[i]), i in (0, len(grid) - 1)
    if not edge:
        ridge = _root(curve, float(grid[i - 1]), float(grid[i + 1]))
    where = "; it is at the edge of the grid" if edge else ""
    value, slope, _ = curve.at(ridge)
    said = f"lowest validation loss, {value:.4g} with derivative {slope:.1e} in log ρ{where}"
    reasons = {**fit.record.reasons, "ridge": said}
    warnings = after_change(fit.record.warnings, fit.module.model, fit.x, fit._targets, likely=False)
    seconds = dict(fit.record.seconds)
    kept = replace(fit.record, warnings=warnings, seconds=seconds)
    record = replace(kept, criterion="validation", reasons=reasons, noise_factor=1.0)
    system = curve.system(ridge)
    tuned = LinearFit(Linearized(fit.module.function), fit._targets, system, record)
    tuned.record.seconds["ridge"] = time.perf_counter() - start
    return tuned


@torch.no_grad()
def _check_squared(fit: Any) -> None:
    """Raise unless it is a fit of the squared loss."""
    if not isinstance(fit, LinearFit) or fit.system.shared:
        raise InputError(
            f"fit is {type(fit).__name__}" + (' with solver="shared"' if isinstance(fit, LinearFit) else ""),
            expected='a LinearFit, whose loss is "squared"',
            remedy="call fit.path() of another fit, or choose its ridge with ridge='loo'",
        )


def _root(curve: _Curve, low: float, high: float) -> float:
    """The zero of dL/d log ρ between two ridges, by regula falsi (Illinois)."""
    a, b = math.log(low), math.log(high)
    da, db = curve.at(low)[1], curve.at(high)[1]
    if da >= 0 or db <= 0:  # the valley of the grid has its walls elsewhere
        return low if da >= 0 else high
    side, before = 0, math.inf
    for _ in range(30):
        c = (a * db - b * da) / (db - da)
        if abs(c - before) < ACCURACY:
            break
        before, dc = c, curve.at(math.exp(c))[1]
        if dc < 0:
            a, da, db = c, dc, db / 2 if side < 0 else db
        else:
            b, db, da = c, dc, da / 2 if side > 0 else da
        side = -1 if dc < 0 else 1
    return math.exp(c)


class _Curve(Protocol):
    """The validation outputs as a function of ρ."""

    targets: Tensor
    labels: Tensor | None

    def grid(self) -> Tensor:
        """Ridges to try."""

    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs (R, T, C), ‖δ‖ (R,) and dL/d log ρ (R,) where it is free."""

    def at(self, ridge: float) -> tuple[float, float, Tensor]:
        """Loss, dL/d log ρ and outputs at one ridge."""

    def system(self, ridge: float) -> System:
        """The solved equations at one ridge."""


def _curve(fit: LinearFit, validation: Any) -> _Curve:
    """The curve of a fit."""
    _check_squared(fit)
    x, made = fit._like(*fit._gathered(validation), "the validation data")
    targets = made.values.to(fit.module.function.device).double()
    labels = None if made.labels is None or fit.system.c == 1 else made.labels.to(targets.device)
    if fit.constraints is not None and fit.constraints.soft:
        raise InputError(
            "the ridge of a fit with penalties on outputs (weight=), whose kernel depends on it",
            expected="a fit without constraints, or with equations that hold exactly",
            remedy="ask the fit before fit.constrain, or call fit.path",
        )
    if fit.system.factorized is fit.system and not isinstance(fit.system, ConstrainedSystem):
        return _EigenCurve(fit, x, targets, labels)
    if not isinstance(fit.system, Iterative):
        raise InputError(
            "the ridge of a primal fit with constraints",
            expected='a fit without constraints, or one with solver="dual"',
            remedy="ask the fit before fit.constrain",
        )
    return _PrimalCurve(fit, fit.system, x, targets, labels)


class _EigenCurve:
    """By eigenvalues, of the kernel or of JᵀJ."""

    def __init__(self, fit: LinearFit, x: Inputs, targets: Tensor, labels: Tensor | None) -> None:
        self.solved, self.targets, self.labels = fit.system, targets, labels
        self.along = fit.system.along_path(x)
        fitted = self.along.rows @ (self.along.coordinates / (self.along.values + fit.ridge))
        self.base = fit.predict(x).double() - fitted.view(targets.shape)

    def grid(self) -> Tensor:
        """Ridges in steps of a decade's parts."""
        return self.solved.grid()

    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs, ‖δ‖, dL/d log ρ."""
        along = self.along
        rho = ridges.to(along.rows)
        weights = 1 / (along.values[:, None] + rho)  # (n, R)
        turned = weights * along.coordinates[:, None]
        outputs = self.base + (along.rows @ turned).T.view(len(rho), *self.targets.shape)
        distance = ((along.masses[:, None] * turned.square()).sum(0) + along.least).sqrt()
        slope = -(along.rows @ (weights * turned)).T.view_as(outputs)  # df/dρ
        gradient = 2 * rho * ((outputs - self.targets) * slope).sum(2).mean(1)
        return outputs, distance, gradient

    def at(self, ridge: float) -> tuple[float, float, Tensor]:
        """Loss, derivative, outputs."""
        outputs, _, gradient = self.many(torch.tensor([ridge], dtype=torch.float64))
        assert gradient is not None
        loss = (self.targets - outputs[0]).square().sum(1).mean()
        return float(loss), float(gradient[0]), outputs[0]

    def system(self, ridge: float) -> System:
        """The solution at another ridge, with the same eigendecomposition."""
        return self.solved.at(ridge)


class _PrimalCurve:
    """By conjugate gradients: shifted for a grid, started from the last solution for single ridges."""

    def __init__(
        self, fit: LinearFit, primal: Iterative, x: Inputs, targets: Tensor, labels: Tensor | None
    ) -> None:
        self.primal, self.targets, self.labels, self.x = primal, targets, labels, x
        self.base = fit.predict(x).double() - self._along(primal.delta)
        self.last = primal

    def _along(self, delta: Tensor) -> Tensor:
        """J(x) δ, (T, C) or (T, C, R)."""
        return jvp_columns(self.primal.function, self.x, delta).double()

    def grid(self) -> Tensor:
        """Ridges around the present one."""
        steps = torch.linspace(-DECADES, DECADES, 4 * DECADES + 1, dtype=torch.float64)
        return self.primal.ridge * 10**steps

    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs and ‖δ‖ from one Krylov space."""
        primal, settings = self.primal, self.primal.settings
        found = shifted_cg(
            primal.operator, primal.right[:, 0], ridges, settings.tolerance, settings.max_steps
        )
        delta = found.value
        if found.residual > 100 * settings.tolerance:  # its recursions drift where steps are many
            found.require("the path of ridges by shifted conjugate gradients")
        outputs = self.base + self._along(delta).movedim(2, 0)
        return outputs, delta.double().norm(dim=0), None

    def at(self, ridge: float) -> tuple[float, float, Tensor]:
        """Loss, derivative, outputs."""
        solved = self.system(ridge)
        outputs = self.base + self._along(solved.delta)
        # dδ/dρ = −(G + ρI)⁻¹ δ
        slope = -self._along(solved.solve(solved.delta[:, None])[:, 0])
        gap = outputs - self.targets
        return float(gap.square().sum(1).mean()), float(2 * ridge * (gap * slope).sum(1).mean()), outputs

    def system(self, ridge: float) -> Iterative:
        """The solution at another ridge, from the last one."""
        if ridge != self.last.ridge:
            self.last = self.last.at(ridge)
        return self.last
