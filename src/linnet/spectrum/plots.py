"""``result.plot`` of densities, eigenfunctions, tasks and recorders. matplotlib axes in, a display out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from linnet.errors import InputError
from linnet.params import choice
from linnet.plots.displays import EnergyDisplay, LinesDisplay, Plots, SpectrumDisplay, axes_of
from linnet.plots.measures import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALES = {"linear": "eigenvalue", "log": "log₁₀ of the eigenvalue"}
OF = {
    "distances": "distance of the kernel",
    "alignment": "alignment",
    "concentration": "concentration",
    "trace": "mean of the kernel's diagonal",
}


class Dense(Protocol):
    """A spectral density."""

    @property
    def dimension(self) -> int:
        """Number of eigenvalues."""

    def density(
        self, points: Tensor | None = None, width: float | None = None, scale: str = "linear"
    ) -> tuple[Tensor, Tensor]:
        """The density at points."""


class DensityPlots(Plots[Dense]):
    """Plots of a spectral density; ``density.plot`` makes it.

    Args:
        of: A :class:`linnet.spectrum.SpectralDensity`.

    Example:
        >>> import torch, linnet
        >>> found = linnet.spectrum.spectral_density(torch.diag(torch.arange(1.0, 9.0)), samples=2)
        >>> found.plot.density(scale="log").xlabel
        'log₁₀ of the eigenvalue'
    """

    def density(self, ax: Axes | None = None, *, scale: str = "linear") -> LinesDisplay:
        """The density of the eigenvalues, which integrates to one.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            scale: ``"log"`` for the density of log₁₀ λ.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If there is no such scale.
        """
        axes = axes_of(ax)
        choice("scale", scale, tuple(SCALES), "leave scale= out for linear")
        points, values = (part.cpu().numpy() for part in self._of.density(scale=scale))
        title = f"{self._of.dimension:,} eigenvalues"
        return LinesDisplay({"density": (points, values)}, SCALES[scale], "density", title).plot(axes)


class Decomposed(Protocol):
    """Eigenfunctions."""

    @property
    def k(self) -> int:
        """Their number."""

    @property
    def values(self) -> Tensor:
        """Eigenvalues (k,)."""

    @property
    def vectors(self) -> Tensor:
        """Eigenvectors (N, k) or (N, C, k)."""

    def energy_concentration(self, y: Tensor, k: int | None = None, squared: bool = False) -> Tensor:
        """Share of a target on the first k."""


class EigenfunctionPlots(Plots[Decomposed]):
    """Plots of eigenfunctions; ``functions.plot`` makes it.

    Args:
        of: :class:`linnet.spectrum.Eigenfunctions`.

    Example:
        >>> import torch, linnet
        >>> x = torch.randn(20, 2)
        >>> found = linnet.spectrum.eigenfunctions(torch.nn.Linear(2, 1), x, k=3)
        >>> round(found.plot.energy(x[:, 0]).share, 3)
        1.0
    """

    def spectrum(self, ax: Axes | None = None) -> SpectrumDisplay:
        """Eigenvalues λ_j by rank; means over the examples.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
        """
        return SpectrumDisplay(_array(self._of.values)).plot(axes_of(ax))

    def energy(self, y: Tensor, ax: Axes | None = None) -> EnergyDisplay:
        """Share of a target's squared norm on the first 1, ..., k eigenvectors.

        Args:
            y: One target (N,), as for ``spectrum.alignment``.
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DataError: If y holds NaN or infinite values.
            DependencyError: If matplotlib is missing.
            InputError: If y holds several targets, or one that is zero.
        """
        axes, found = axes_of(ax), self._of
        if found.energy_concentration(y).ndim:
            raise InputError("y holds several targets", "one", "draw one after the other: y[:, 0]")
        shares = [float(found.energy_concentration(y, k + 1, squared=True)) for k in range(found.k)]
        rows = found.vectors[..., 0].numel()
        return EnergyDisplay(np.array(shares), rows, found.k).plot(axes)


class Energy(Protocol):
    """The labels on the eigenvectors."""

    @property
    def values(self) -> Tensor:
        """Eigenvalues (k,)."""

    @property
    def shares(self) -> Tensor:
        """Shares (k,)."""

    @property
    def top(self) -> int:
        """Leading eigenvectors that were asked for."""

    @property
    def rows(self) -> int:
        """All of them."""


class Compared(Protocol):
    """A task and a kernel."""

    @property
    def energy(self) -> Any:
        """The labels on the eigenvectors: an :class:`Energy`."""

    @property
    def effective_dimension(self) -> float:
        """Σ_j σ_j / (σ_j + ρ)."""


class TaskPlots(Plots[Compared]):
    """Plots of a task and a kernel; ``task.plot`` makes it.

    Args:
        of: What ``linnet.spectrum.task_linearity`` returned.

    Example:
        >>> import torch
        >>> from linnet.spectrum import HeldOut, LabelEnergy, LinearityGap, TaskLinearity
        >>> energy = LabelEnergy(torch.tensor([3.0, 1.0]), torch.tensor([0.8, 0.9]), 2, 4, 4, 4.5)
        >>> task = TaskLinearity(energy, 2.0, 8.0, 1.5, 0.1, HeldOut(0.7, 0.95, 0.5), LinearityGap(0.05))
        >>> round(task.plot.energy().share, 3)
        0.9
    """

    def spectrum(self, ax: Axes | None = None) -> SpectrumDisplay:
        """Leading eigenvalues of the kernel by rank, with the effective dimension.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
        """
        values, dimension = _array(self._of.energy.values), self._of.effective_dimension
        return SpectrumDisplay(values, degrees_of_freedom=dimension).plot(axes_of(ax))

    def energy(self, ax: Axes | None = None) -> EnergyDisplay:
        """Share of the labels' squared norm on the leading eigenvectors, beside that of random labels.

        Args:
            ax: matplotlib axes; by default those of a new figure.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
        """
        energy: Energy = self._of.energy
        return EnergyDisplay(_array(energy.shares), energy.rows, energy.top).plot(axes_of(ax))


class Noted(Protocol):
    """A recorder."""

    @property
    def notes(self) -> Sequence[Any]:
        """What it has recorded."""


class RecorderPlots(Plots[Noted]):
    """Plots of a kernel over training; ``recorder.plot`` makes it.

    Args:
        of: A :class:`linnet.spectrum.Recorder`.

    Example:
        >>> import torch, linnet
        >>> recorder, net = linnet.spectrum.Recorder(torch.randn(8, 2), k=2), torch.nn.Linear(2, 1)
        >>> _ = recorder.note(net, 0), recorder.note(net, 5)
        >>> list(recorder.plot.history().lines)
        ['first', 'previous']
    """

    def history(self, ax: Axes | None = None, *, of: str = "distances") -> LinesDisplay:
        """What was recorded, over the steps of training.

        Args:
            ax: matplotlib axes; by default those of a new figure.
            of: ``"distances"`` from the first kernel and the one before, ``"alignment"`` and
                ``"concentration"`` of each target, or the ``"trace"``.

        Returns:
            The display.

        Raises:
            DependencyError: If matplotlib is missing.
            InputError: If nothing was recorded, or nothing of this kind.
        """
        axes, notes = axes_of(ax), self._of.notes
        choice("of", of, tuple(OF), "leave of= out for distances")
        found = [_named(getattr(note, of)) for note in notes]
        if not found or not found[0]:
            what = "targets" if found else "notes"
            remedy = "pass y= to the Recorder" if found else "call recorder.note(model, step) while training"
            raise InputError(f"the recorder has no {what}", f"{what}, to draw {of}", remedy)
        steps = np.array([note.step for note in notes])
        lines = {name: (steps, np.array([each[name] for each in found])) for name in found[0]}
        return LinesDisplay(lines, "step", OF[of]).plot(axes)


def _named(values: Any) -> dict[str, float]:
    """Numbers by name: those of a dict, of each target, or one."""
    if isinstance(values, dict):
        return values
    several = values if isinstance(values, list) else [values]
    return {f"target {index + 1}" if len(several) > 1 else "": value for index, value in enumerate(several)}


def _array(values: Tensor) -> Array:
    """Numbers as an array."""
    found: Array = values.detach().double().cpu().numpy()
    return found
