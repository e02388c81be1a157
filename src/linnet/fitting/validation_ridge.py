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
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import ridge_grid
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.remarks import after_change
from linnet.linear.iterative import Iterative
from linnet.linear.system import System
from linnet.linear.targets import Targets
from linnet.shown import Record, frame
from linnet.solvers.cg import shifted_cg
from linnet.tangent.batch import Inputs
from linnet.tangent.jacobian import jvp_columns
from linnet.tangent.modes import in_exact_mode

if TYPE_CHECKING:
    from pandas import DataFrame

DECADES = 4  # of the grid of a primal fit, to each side of its ridge
ACCURACY = 1e-3  # of log ρ


@dataclass(frozen=True, repr=False)
class ValidationPath(Record):
    """The fit on validation data along a path of ridges."""

    ridges: Tensor  # ρ, (R,)
    loss: Tensor  # mean ‖y − f(x)‖² over the validation data, (R,)
    distance: Tensor  # ‖δ‖, (R,)
    outputs: Tensor  # predictions (R, T, C)
    accuracy: Tensor | None = None  # share of right classes, (R,); ``None`` for regression
    gradient: Tensor | None = None  # dL/d log ρ, (R,); ``None`` where it takes a solve for each ridge

    def _shown(self) -> dict[str, Any]:
        return {"ridges": self.ridges, "best": self.best(), "least loss": float(self.loss.min())}

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a ridge."""
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
        fit: A linear fit; one by iterations must be free of constraints, others of penalties.
        validation: An (x, y) pair, a Dataset, a DataLoader or batches.
        ridges: ρ, (R,); by default a grid around the scale of the kernel, or around the fit's own ridge.

    Returns:
        The path.

    Raises:
        DataError: If the validation data are empty, not finite or out of range.
        InputError: If a ridge is not positive, or the fit has penalties, or constraints and iterations.

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
    labels = curve.labels
    accuracy = None if labels is None else (outputs.argmax(2) == labels).double().mean(1)
    return ValidationPath(grid, curve.loss(outputs), distance, outputs, accuracy, gradient)


@in_exact_mode
@torch.no_grad()
def ridge_gradient(fit: LinearFit, x: Inputs, y: Any) -> float:
    """D L/d log ρ of the validation loss L at the fit's own ridge, exactly.

    Args:
        fit: A linear fit; one by iterations must be free of constraints. One solve.
        x: T validation examples.
        y: Their classes (T,) or targets (T, C).

    Returns:
        The derivative of the mean of ‖y − f(x)‖²; a positive one asks for a smaller ridge.

    Raises:
        DataError: If the validation data are empty, not finite or out of range.
        InputError: If the fit has penalties, or constraints and iterations.

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
    start = time.perf_counter()
    curve = _curve(fit, validation)
    if fit.constraints is not None:
        raise InputError(
            "tune_ridge of a fit with constraints",
            expected="a fit without constraints",
            remedy="tune the ridge first, and constrain the fit that comes out",
        )
    grid = curve.grid()
    i = int(curve.loss(curve.many(grid)[0]).argmin())
    ridge, edge = float(grid[i]), i in (0, len(grid) - 1)
    if not edge:
        ridge = _root(curve, *(float(grid[i + step]) for step in (-1, 0, 1)))
    where = "; it is at the edge of the grid" if edge else ""
    value, slope = curve.at(ridge)
    said = f"lowest validation loss, {value:.4g} with derivative {slope:.1e} in log ρ{where}"
    reasons = {**fit.record.reasons, "ridge": said}
    warnings = after_change(fit.record.warnings, fit.module.model, fit.x, fit._targets, likely=False)
    if edge:
        end = "smallest" if i == 0 else "largest"
        warnings = (
            *warnings,
            f"The validation loss is lowest at the {end} ridge that was tried, {ridge:.3g}.",
        )
    kept = replace(fit.record, warnings=warnings, seconds=dict(fit.record.seconds))
    record = replace(kept, criterion="validation", reasons=reasons, noise_factor=1.0)
    tuned = fit._made(curve.system(ridge), fit._targets, record)
    tuned.record.seconds["ridge"] = time.perf_counter() - start
    return tuned


def _root(curve: _Curve, low: float, middle: float, high: float) -> float:
    """The zero of dL/d log ρ beside the best of three ridges, by regula falsi (Illinois)."""
    least, slope = curve.at(middle)
    low, high = (low, middle) if slope > 0 else (middle, high)
    a, b = math.log(low), math.log(high)
    da, db = curve.at(low)[1], curve.at(high)[1]
    if da >= 0 or db <= 0:  # the curve turns more than once between two of them
        return middle
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
    return math.exp(c) if curve.at(math.exp(c))[0] <= least else middle


class _Curve(ABC):
    """The validation outputs as a function of ρ."""

    def __init__(self, fit: LinearFit, x: Inputs, made: Targets) -> None:
        self.last, self.x = fit.system, x  # the solved equations at the last single ridge
        self.targets = made.values.to(fit.module.function.device).double()
        several = made.labels is not None and fit.system.c > 1
        self.labels = made.labels.to(self.targets.device) if several and made.labels is not None else None

    @abstractmethod
    def grid(self) -> Tensor:
        """Ridges to try."""

    @abstractmethod
    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs (R, T, C), ‖δ‖ (R,) and dL/d log ρ (R,) where it is free."""

    @abstractmethod
    def at(self, ridge: float) -> tuple[float, float]:
        """Loss and dL/d log ρ at one ridge."""

    def loss(self, outputs: Tensor) -> Tensor:
        """Mean ‖y − f‖² of outputs (R, T, C), (R,)."""
        return (self.targets - outputs).square().sum(2).mean(1)

    def system(self, ridge: float) -> System:
        """The solved equations at one ridge, from the last ones."""
        self.last = self.last if ridge == self.last.ridge else self.last.at(ridge)
        return self.last


def _curve(fit: LinearFit, validation: Any) -> _Curve:
    """The curve of a fit."""
    if not isinstance(fit, LinearFit) or fit.system.shared:
        shared, has_path = isinstance(fit, LinearFit), hasattr(fit, "path")
        by_path = "call fit.path(), or choose the ridge with ridge='loo'"
        by_refits = "fit at several ridges and compare the sums of fit.losses() on the validation data"
        raise InputError(
            f"fit is {type(fit).__name__}" + (' with solver="shared"' if shared else ""),
            expected='a LinearFit of the loss "squared" by another solver than "shared"',
            remedy=by_path if has_path else by_refits,
        )
    x, made = fit._like(*fit._gathered(validation).pair, "the validation data")
    held, by_values = fit.constraints, fit.system.factorized is fit.system
    if held is not None and (held.soft or not by_values):
        raise InputError(
            "the ridge of a fit with penalties on outputs (weight=), or with constraints by iterations",
            expected='a fit without constraints, or solver="dual" with equations that hold exactly',
            remedy="ask the fit before fit.constrain",
        )
    return (_EigenCurve if by_values else _PrimalCurve)(fit, x, made)


class _EigenCurve(_Curve):
    """By eigenvalues, of the kernel or of JᵀJ."""

    def __init__(self, fit: LinearFit, x: Inputs, made: Targets) -> None:
        super().__init__(fit, x, made)
        self.along = fit.system.along_path(x)
        fitted = self.along.rows @ (self.along.coordinates / (self.along.values + fit.ridge))
        self.base = fit.predict(x).double() - fitted.view(self.targets.shape)

    def grid(self) -> Tensor:
        """Ridges in steps of a decade's parts."""
        return self.last.grid()

    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs, ‖δ‖, dL/d log ρ."""
        return self._free(ridges)

    def _free(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, all of which are products."""
        along = self.along
        rho = ridges.to(along.rows)
        weights = 1 / (along.values[:, None] + rho)  # (n, R)
        turned = weights * along.coordinates[:, None]
        outputs = self.base + (along.rows @ turned).T.view(len(rho), *self.targets.shape)
        distance = ((along.masses[:, None] * turned.square()).sum(0) + along.least).sqrt()
        slope = -(along.rows @ (weights * turned)).T.view_as(outputs)  # df/dρ
        gradient = 2 * rho * ((outputs - self.targets) * slope).sum(2).mean(1)
        return outputs, distance, gradient

    def at(self, ridge: float) -> tuple[float, float]:
        """Loss and derivative."""
        outputs, _, gradient = self._free(torch.tensor([ridge], dtype=torch.float64))
        return float(self.loss(outputs)), float(gradient)


class _PrimalCurve(_Curve):
    """By conjugate gradients: shifted for a grid, started from the last solution for single ridges."""

    last: Iterative

    def __init__(self, fit: LinearFit, x: Inputs, made: Targets) -> None:
        super().__init__(fit, x, made)
        self.start = self.last
        self.base = fit.predict(x).double() - self._moved(self.start.delta)

    def _moved(self, delta: Tensor) -> Tensor:
        """J(x) δ, (T, C) or (T, C, R)."""
        return jvp_columns(self.start.function, self.x, delta).double()

    def grid(self) -> Tensor:
        """Ridges around the present one."""
        steps = torch.linspace(-DECADES, DECADES, 4 * DECADES + 1, dtype=torch.float64)
        return self.start.ridge * 10**steps

    def many(self, ridges: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs and ‖δ‖ from one Krylov space."""
        solved, settings = self.start, self.start.settings
        found = shifted_cg(
            solved.operator, solved.right[:, 0], ridges, settings.tolerance, settings.max_steps
        )
        if found.residual > 100 * settings.tolerance:  # its recursions drift where steps are many
            found.require("the path of ridges by shifted conjugate gradients")
        outputs = self.base + self._moved(found.value).movedim(2, 0)
        return outputs, found.value.double().norm(dim=0), None

    def at(self, ridge: float) -> tuple[float, float]:
        """Loss and derivative, with dδ/dρ = −(G + ρI)⁻¹ δ."""
        solved = self.system(ridge)
        gap = self.base + self._moved(solved.delta) - self.targets
        slope = -self._moved(solved.solve(solved.delta[:, None])[:, 0])
        return float(gap.square().sum(1).mean()), float(2 * ridge * (gap * slope).sum(1).mean())
