"""``result.plot`` of densities, eigenfunctions, tasks and recorders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from linnet.errors import InputError
from linnet.params import choice
from linnet.plots import panels
from linnet.plots.displays import Display, Plots, array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALES = {"linear": "eigenvalue", "log": "log₁₀ of the eigenvalue"}
OF = {
    "distances": "distance of the kernel",
    "alignment": "alignment",
    "concentration": "concentration",
    "trace": "mean of the kernel's diagonal",
}


class DensityPlots(Plots):
    """``density.plot`` of a spectral density."""

    def density(self, ax: Axes | None = None, *, scale: str = "linear") -> Display:
        """The density of the eigenvalues, or of their log₁₀ with "log", which integrates to one."""
        choice("scale", scale, tuple(SCALES), "leave scale= out for linear")
        points, values = (part.cpu().numpy() for part in self._of.density(scale=scale))
        drawn = Display(
            panels.lines,
            lines={"density": (points, values)},
            xlabel=SCALES[scale],
            ylabel="density",
            title=f"{self._of.dimension:,} eigenvalues",
        )
        return drawn.plot(ax)


class EigenfunctionPlots(Plots):
    """``functions.plot`` of eigenfunctions."""

    def spectrum(self, ax: Axes | None = None) -> Display:
        """Eigenvalues λ_j by rank; means over the examples."""
        return Display(panels.spectrum, eigenvalues=array(self._of.values)).plot(ax)

    def energy(self, y: Tensor, ax: Axes | None = None) -> Display:
        """Share of the squared norm of one target (N,) on the first 1, ..., k eigenvectors."""
        found = self._of
        if found.energy_concentration(y).ndim:
            raise InputError("y holds several targets", "one", "draw one after the other: y[:, 0]")
        shares = [float(found.energy_concentration(y, k + 1, squared=True)) for k in range(found.k)]
        rows = found.vectors[..., 0].numel()
        return Display(panels.energy, shares=np.array(shares), rows=rows, top=found.k).plot(ax)


class TaskPlots(Plots):
    """``task.plot`` of a task and a kernel."""

    def spectrum(self, ax: Axes | None = None) -> Display:
        """Leading eigenvalues of the kernel by rank, with the effective dimension."""
        values, dimension = array(self._of.energy.values), self._of.effective_dimension
        return Display(panels.spectrum, eigenvalues=values, degrees_of_freedom=dimension).plot(ax)

    def energy(self, ax: Axes | None = None) -> Display:
        """Share of the labels' squared norm on the leading eigenvectors, beside that of random labels."""
        found = self._of.energy
        return Display(panels.energy, shares=array(found.shares), rows=found.rows, top=found.top).plot(ax)


class RecorderPlots(Plots):
    """``recorder.plot`` of a kernel over training."""

    def history(self, ax: Axes | None = None, *, of: str = "distances") -> Display:
        """The "distances", "alignment", "concentration" or "trace" of the kernel, over the steps."""
        notes = self._of.notes
        choice("of", of, tuple(OF), "leave of= out for distances")
        found = [_named(getattr(note, of)) for note in notes]
        if not found or not found[0]:
            what = "targets" if found else "notes"
            remedy = "pass y= to the Recorder" if found else "call recorder.note(model, step) while training"
            raise InputError(f"the recorder has no {what}", f"{what}, to draw {of}", remedy)
        steps = np.array([note.step for note in notes])
        lines = {name: (steps, np.array([each[name] for each in found])) for name in found[0]}
        return Display(panels.lines, lines=lines, xlabel="step", ylabel=OF[of]).plot(ax)


def _named(values: Any) -> dict[str, float]:
    """Numbers by name: those of a dict, of each target, or one."""
    if isinstance(values, dict):
        return values
    several = values if isinstance(values, list) else [values]
    return {f"target {index + 1}" if len(several) > 1 else "": value for index, value in enumerate(several)}
