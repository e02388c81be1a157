"""``fit.plot``: what was fitted, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.linear.newton import NewtonSystem
from linnet.linear.system import System
from linnet.params import choice, integer
from linnet.plots import panels
from linnet.plots.displays import Display, array
from linnet.predictive.model import ModelPlots
from linnet.tangent.batch import Inputs, batch_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = ("error", "accuracy", "evidence")


class FitPlots(ModelPlots):
    """``fit.plot``: beside the plots of every model, those of a fit."""

    def ridge(self, ax: Axes | None = None, *, of: str = "error") -> Display:
        """The leave-one-out "error" or "accuracy", or the "evidence", over ridges, that of the fit marked."""
        choice("of", of, SCORES, remedy='leave of= out for "error"')
        known = getattr(self._of, "chosen_path", None)
        path: Any = self._of.path() if known is None else known
        scores = {"leave-one-out": array(path.loo_error)}
        squared = "gcv" in path.criteria
        label = "mean squared error" if squared else "log loss"
        if of == "error" and squared:
            # of an example, as leave-one-out: the score itself is of one output
            scores["generalized cross-validation"] = array(path.gcv * self._of.targets.shape[1])
        elif of == "evidence":
            scores, label = {"evidence": array(path.evidence)}, "log evidence"
        elif of == "accuracy":
            if path.loo_accuracy is None:
                raise InputError("of='accuracy' of a regression", "'error' or 'evidence'", "leave of= out")
            scores, label = {"leave-one-out": array(path.loo_accuracy)}, "accuracy"
        drawn = Display(
            panels.over_ridges, ridges=array(path.ridges), scores=scores, chosen=self._of.ridge, label=label
        )
        return drawn.plot(ax)

    def spectrum(self, ax: Axes | None = None) -> Display:
        """Eigenvalues of the kernel of the training examples by rank, beside the ridge."""
        # for the squared loss with the effective degrees of freedom, Σ λ/(λ + ρ)
        ridge, values = self._of.ridge, self._of._eigenvalues()
        squared = not isinstance(self._of.system, NewtonSystem)
        freedom = float((values / (values + ridge)).sum()) if squared else None
        drawn = Display(
            panels.spectrum, eigenvalues=values.cpu().numpy(), ridge=ridge, degrees_of_freedom=freedom
        )
        return drawn.plot(ax)

    def influence(
        self, x: Inputs, ax: Axes | None = None, *, top: int = 10, output: int | None = None
    ) -> Display:
        """The training examples with the largest influence on an output of x[:1], by default the largest."""
        integer("top", top)
        x = self._of._examples(x)
        if batch_size(x) != 1:
            raise InputError(
                f"x holds {batch_size(x)} examples",
                expected="one, whose prediction is drawn",
                remedy="pass x[:1]",
            )
        found, labels = self._of.influence(x)[:, 0], self._of.labels
        if output is None:
            several = labels is not None and found.shape[1] > 1
            output = int(self._of.predict(x)[0].argmax()) if several else 0
        integer("output", output, 0, found.shape[1] - 1)
        moved = found[:, output].double()
        largest = moved.abs().argsort(descending=True, stable=True)[:top]
        order = largest[moved[largest].argsort(descending=True, stable=True)]
        classes = None if labels is None else labels.to(order.device)[order].cpu().numpy()
        numbers = {"examples": order.cpu().numpy(), "values": array(moved[order])}
        return Display(panels.influences, **numbers, output=output, labels=classes).plot(ax)


def eigenvalues_of(system: System | NewtonSystem) -> Tensor:
    """Eigenvalues of the kernel, or an error where nothing was factorized."""
    if isinstance(system, NewtonSystem):
        if (form := system.factorized) is not None:
            found: Tensor = torch.linalg.eigvalsh(form.gram)
            return found
    elif system.factorized is not None:
        return system.factorized.eigenvalues
    raise InputError(
        "the spectrum of a fit by iterations, whose kernel exceeds the memory budget",
        expected='a fit with solver="dual" or "primal"',
        remedy='raise memory=, fit again with solver="dual", or see linnet.spectrum.spectral_density',
    )
