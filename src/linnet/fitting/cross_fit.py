"""Cross-fitting: held-out outputs of head, linearization and fit together.

A head fitted on the labels makes θ₀ depend on the label that leave-one-out leaves out: f₀(xᵢ) has learned
it, and so have the derivatives of the layers below. Only a procedure that never saw the example is honest:
for each fold, the head without it, J and f₀ there, a fit on the other folds, predictions for the fold.
The price is one kernel a fold; the estimate is that of a procedure with the share 1 − 1/K of the examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.fitting.arguments import base_outputs
from linnet.fitting.combinations import combined
from linnet.fitting.head import Folds, example_hashes
from linnet.fitting.last_layer import RECORD
from linnet.fitting.softmax_fit import SoftmaxPath, solutions
from linnet.linear.dual import RidgePath, Spectrum
from linnet.linear.iterative import CGSettings, Iterative
from linnet.linear.label_problem import class_problem
from linnet.linear.newton import FactorNewton, KernelNewton, WeightNewton
from linnet.linear.normal_newton import NormalNewton
from linnet.linear.problem import Problem
from linnet.linear.targets import Targets
from linnet.progress import track
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.linearized import Linearized


@dataclass(frozen=True, eq=False)
class CrossFit:
    """A network with cross-fitted heads and the training data of a fit."""

    function: Functional  # the network with the head fitted on everything
    folds: Folds  # its other heads
    x: Inputs  # N training examples
    fold: Tensor  # the fold of each, (N,)
    goal: Targets  # t, or label probabilities
    memory: str | int | None = None  # budget of the kernels
    # V, (C, M), of the outputs whose kernel all share; `None` for that of each output
    combinations: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """t, or label probabilities, (N, C)."""
        return self.goal.values

    @property
    def said(self) -> str:
        """The remark for readers of leave-one-out figures."""
        return (
            f"the head is cross-fitted: leave-one-out outputs are those of {self.folds.count} procedures of "
            "head, linearization and fit without the example's fold, each on the share "
            f"{1 - 1 / self.folds.count:.2f} of the examples; influence, forgetting and path() "
            "use a fixed head"
        )

    def squared(self, ridges: Tensor) -> Tensor:
        """Held-out outputs of squared-loss fits, (R, N, C)."""
        # ridges (R,)
        found = self._empty(len(ridges))
        for function, rest, held, base in self._each():
            kernel, cross = self._kernels(function, rest, held)
            residual = self.targets[rest].double() - base[rest]
            if self.goal.weights is not None:
                w = self.goal.weights[rest].sqrt()
                residual, each = residual * w[:, None], w.repeat_interleave(len(kernel) // len(rest))
                kernel, cross = kernel * each[:, None] * each, cross * each
            spectrum = Spectrum(kernel, residual)
            # β(ρ) = V (Λ + ρ)⁻¹ Vᵀ r
            turned, coordinates = cross @ spectrum.vectors, spectrum.coordinates.reshape(len(kernel), -1)
            for place, ridge in enumerate(ridges.tolist()):
                change = (turned / (spectrum.values + ridge)) @ coordinates
                found[place, held] = base[held] + change.reshape(len(held), -1)
        return found

    def classified(self, ridges: Tensor, in_samples: bool = True) -> Tensor:
        """Held-out outputs of cross-entropy fits, by kernels or in the weights."""
        # ridges (R,)
        found = self._empty(len(ridges)).fill_(torch.nan)
        for function, rest, held, base in self._each():
            problem = class_problem(function, take(self.x, rest), base[rest], self.goal.taken(rest))
            kernel = self._kernels(function, rest, held) if in_samples else None
            moved = JacobianOperator(function, take(self.x, held), found.shape[2])
            system: FactorNewton
            if kernel is None:
                system = NormalNewton(problem, float(ridges[0]), memory=self.memory)
            else:
                system = KernelNewton(problem, kernel[0], float(ridges[0]))
            for place, solved in enumerate(solutions(system, ridges)):
                if kernel is None:
                    change = moved.mv(solved.delta).double()
                else:
                    change = kernel[1] @ solved.beta.reshape(-1)
                found[place, held] = base[held] + change.view(len(held), -1)
        return found

    def iterated(self, ridge: float, settings: CGSettings, squared: bool) -> Tensor:
        """Held-out outputs of fits by conjugate gradients, (N, C)."""
        found = self._empty(1)[0]
        for function, rest, held, base in self._each():
            x, targets = take(self.x, rest), self.targets[rest].double()
            system: Iterative | WeightNewton
            if squared:
                residual = (targets - base[rest]).to(function.dtype)
                squares = Problem(function, x, residual).weighing(self.goal.taken(rest).weights)
                system = Iterative(squares, ridge, replace(settings))
            else:
                problem = class_problem(function, x, base[rest], self.goal.taken(rest))
                system = WeightNewton(problem, ridge, settings)
            change = JacobianOperator(function, take(self.x, held), found.shape[1]).mv(system.delta)
            found[held] = base[held] + change.double().view(len(held), -1)
        return found

    def _empty(self, ridges: int) -> Tensor:
        """Room for outputs at each ridge."""
        return torch.zeros(ridges, *self.targets.shape, dtype=torch.float64, device=self.targets.device)

    def _each(self) -> Iterator[tuple[Functional, Tensor, Tensor, Tensor]]:
        """For each fold: the network without it, the positions of the others and its own, and f₀ of all."""
        device = self.targets.device
        for k in track(range(self.folds.count), "leave-fold-out", self.folds.count):
            held = (self.fold == k).nonzero()[:, 0].to(device)
            rest = (self.fold != k).nonzero()[:, 0].to(device)
            if len(held) and len(rest):
                function = self.folds.without(self.function, k)
                yield function, rest, held, base_outputs(Linearized(function), self.x).double()

    def _kernels(self, function: Functional, rest: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """K of the rest and K(fold, rest) as matrices, or what all outputs share of them."""
        x, c = take(self.x, rest), self.targets.shape[1]
        if self.combinations is not None:
            few, scale = combined(function, self.combinations), 1 / self.combinations.shape[1]
            kernel = gram(few, x, form="trace", memory=self.memory).double()
            cross = gram(few, take(self.x, held), x, form="trace", memory=self.memory).double()
            return scale * kernel, scale * cross
        kernel = gram(function, x, form="full", memory=self.memory).double()
        cross = gram(function, take(self.x, held), x, form="full", memory=self.memory).double()
        return kernel.reshape(len(rest) * c, -1), cross.reshape(len(held) * c, -1)


def find_cross_fit(
    lin: Linearized, x: Inputs, y: Tensor, targets: Targets, memory: str | int | None
) -> CrossFit | None:
    """The cross-fitted heads of a network, if it has any and still has the head that goes with them."""
    folds = getattr(lin.model, RECORD, {}).get("folds")
    if folds is None or not folds.fits(lin.function):
        return None
    fold = folds.of(example_hashes(x, y))
    if len(fold.unique()) < 2:
        return None
    return CrossFit(lin.function, folds, x, fold, targets, memory)


# -- ridge choice ----------------------------------------------------------------------------------
# The ridge that a criterion prefers, with one sentence that says so.


class Chosen(NamedTuple):
    """A ridge and why, what cross-fitted heads say of it, the factor of the noise, and the path."""

    ridge: float
    why: str
    held_out: Tensor | None = None  # outputs of cross-fitted heads, (N, C)
    noise_factor: float = 1.0
    path: SoftmaxPath | None = None  # of the cross-entropy, whose points are not free


def given_ridge(ridge: float, folds: CrossFit | None) -> Chosen:
    """A ridge that was given."""
    return Chosen(ridge, "given", None if folds is None else folds.squared(torch.tensor([ridge]))[0])


def chosen_ridge(path: RidgePath, criterion: str, targets: Targets, folds: CrossFit | None = None) -> Chosen:
    """The ridge that a criterion prefers."""
    held: Tensor | None
    if folds is not None and criterion == "loo":
        every = folds.squared(path.ridges)
        errors = (targets.values.double() - every).square().sum(2)
        at = int((errors * targets.every_weight).mean(1).argmin())
        ridge, held = float(path.ridges[at]), every[at]
    else:
        ridge = path.best(criterion)
        held = given_ridge(ridge, folds).held_out
    return Chosen(ridge, explained(path, criterion, ridge, folds), held, path.noise_factor(ridge))


def explained(path: RidgePath | SoftmaxPath, criterion: str, ridge: float, folds: CrossFit | None) -> str:
    """One sentence about a chosen ridge."""
    at = int((path.ridges - ridge).abs().argmin())
    error = "log loss" if isinstance(path, SoftmaxPath) else "error"
    words = {
        "loo": f"lowest leave-one-out {error}",
        "gcv": "lowest generalized cross-validation score",
        "evidence": "highest evidence",
    }[criterion]
    if folds is not None and criterion == "loo":
        words = f"lowest held-out {error} over {folds.folds.count} folds"
    edge = "; it is at the edge of the grid" if at in (0, len(path.ridges) - 1) else ""
    degrees = float(path.degrees_of_freedom[at])
    return f"{words} of {len(path.ridges)} values, {degrees:.0f} effective parameters{edge}"
