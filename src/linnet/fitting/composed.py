"""Fits of one network added up: what several tasks moved its weights by, in one model.

A linear model f₀ + Jδ takes displacements of other tasks as they are: f₀ + J(δ_a + δ_b) does on each task
what its own fit does, as far as J of its inputs and the displacement of the other are orthogonal. That
they are can be asked of a fit: with the curvature of the other tasks as its metric (``linnet.with_metric``),
a displacement is dear where it would move their outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import BATCH, checked_inputs
from linnet.fitting.export import own_network
from linnet.fitting.merged import Merged, merged_network
from linnet.params import number
from linnet.shown import Shown, some
from linnet.tangent.batch import Inputs, split
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import owner

Part = tuple[Any, float]  # a fit and its factor


class Summable:
    """What can be added, subtracted and multiplied: fits, and what they were added up to."""

    @abstractmethod
    def _summands(self) -> tuple[Part, ...]:
        """Fits and their factors."""

    def __add__(self, other: Summable) -> Composed:
        if not isinstance(other, Summable):
            return NotImplemented
        return Composed((*self._summands(), *other._summands()))

    def __sub__(self, other: Summable) -> Composed:
        return self + -other if isinstance(other, Summable) else NotImplemented

    def __mul__(self, factor: float) -> Composed:
        c = number("factor", factor, remedy="multiply a fit by a finite number, and add fits")
        return Composed(tuple((fit, own * c) for fit, own in self._summands()))

    __rmul__ = __mul__

    def __neg__(self) -> Composed:
        return -1.0 * self


class Composed(Summable, Shown):
    """Displacements of several fits of one network, each times a factor: ``fit_a + 0.5 * fit_b - fit_c``.

    The fit that stands first is the one that answers: its network and its last layer, displaced by its own δ
    and by those of the others in all weights that they share. Layers behind which the networks differ, such
    as heads of other tasks, keep what they are.

    Args:
        parts: Fits and their factors.

    Attributes:
        parts: The same.
        module: The ``Linearized`` network of the first fit, its δ set to the sum.

    Source:
        Ortiz-Jiménez, Favero, Frossard, NeurIPS 2023, eq. (5), with δ at the optimum of each task.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> lin, x = linnet.linearize(net), torch.linspace(-1, 1, 20).view(10, 2)
        >>> fit_a, fit_b = (linnet.fit(lin, (part, part[:, :1])) for part in (x[:5], x[5:]))
        >>> both = fit_a + fit_b
        >>> torch.allclose(both.predict(x) - fit_a.predict(x), fit_b.predict(x) - lin.base(x), atol=1e-5)
        True
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        function, total = _displaced(*parts[0])
        for fit, factor in parts[1:]:
            other, delta = _displaced(fit, factor)
            for name in _shared(function, other):
                total[name] = total[name] + delta[name].to(total[name])
        self.module = Linearized(function)
        with torch.no_grad():
            for name, value in self.module.delta.items():
                value.copy_(total[name])

    @in_exact_mode
    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)(c_a δ_a + c_b δ_b + …).

        Args:
            x: Inputs, T examples.

        Returns:
            Outputs, (T, C), of the first fit's network.
        """
        x = checked_inputs(self.module, x)
        return torch.cat([self.module(part).flatten(1) for part in split(x, BATCH)])

    def displacement(self) -> Params:
        """The sum of displacements, by parameter name; copies."""
        return {name: t.detach().clone() for name, t in self.module.delta.items()}

    def merge(self, x: Inputs | None = None) -> Merged:
        """The network with displaced weights, and how far it is from the linear model.

        Args:
            x: Examples on which the two are compared; by default the first fit's training examples.

        Returns:
            The network in evaluation mode, the linearity gap and the share of equal classes.
        """
        first = self.parts[0][0]
        x = checked_inputs(self.module, first.x if x is None else x)
        return merged_network(self.module, x, first.classes)

    def _summands(self) -> tuple[Part, ...]:
        return self.parts

    def _shown(self) -> dict[str, Any]:
        every = [f"{factor:g} × {fit.n} examples" for fit, factor in self.parts]
        return {"network": type(self.module.model).__name__, "displacements": some(every)}


def _displaced(fit: Any, factor: float) -> tuple[Functional, Params]:
    """The network of a fit in its own weights, and its displacement times a factor."""
    fit._require_one_delta("a sum with")
    function, delta = own_network(fit.module)
    return function, {name: factor * value for name, value in delta.items()}


def _shared(first: Functional, other: Functional) -> list[str]:
    """The tracked parameters that two networks have alike, where no more than one layer tells them apart."""
    own, others = first.model.state_dict(), other.model.state_dict()
    apart = {
        owner(name)
        for name in own.keys() | others.keys()
        if name not in own or name not in others or not _alike(own[name], others[name])
    }
    shared = [name for name in first.names if name in other.names and owner(name) not in apart]
    if len(apart) > 1 or not shared:
        raise InputError(
            f"networks of two fits that differ in {some(sorted(apart), 4)}"
            if apart
            else f"fits of {some(first.names, 2)} and of {some(other.names, 2)}",
            expected="displacements of the same weights from the same start, and other heads at most",
            remedy="linearize one network for all tasks, each with its linnet.with_head",
        )
    return shared


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their types."""
    return a.shape == b.shape and torch.equal(a.to(b), b)
