"""Fits of one network added up: what several tasks moved its weights by, in one model.

A linear model f₀ + Jδ takes displacements of other tasks as they are: f₀ + J(δ_a + δ_b) does on each task
what its own fit does, as far as J of its inputs and the displacement of the other are orthogonal. That
they are can be asked of a fit: with the curvature of the other tasks as its metric (``linnet.with_metric``),
a displacement is dear where it would move their outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from linnet.errors import InputError, ModelError
from linnet.fitting.arguments import BATCH, checked_inputs
from linnet.fitting.export import own_network
from linnet.fitting.fitted import Fitted
from linnet.fitting.last_layer import last_linear
from linnet.fitting.merged import Merged, merged_network
from linnet.params import number, refuse
from linnet.shown import Shown, some
from linnet.tangent.batch import Inputs, split
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import owner

Part = tuple[Any, float]  # a fit and its factor


class Summable(ABC):
    """What can be added, subtracted and multiplied: fits, and what they were added up to."""

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> Any:
            """An error that says what there is, where other fits have more."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(Fitted, name) and not isinstance(self, Fitted):
                there = [own for own in dir(type(self)) if not own.startswith("_")]
                message += f", which other fits have; it has {', '.join(there)}"
            raise AttributeError(message, name=name, obj=self)

    @abstractmethod
    def _summands(self) -> tuple[Part, ...]:
        """Fits and their factors."""

    def __add__(self, other: Any) -> Composed:
        return Composed((*self._summands(), *_checked(other)._summands()))

    def __radd__(self, other: Any) -> Composed:
        return 1.0 * self if other == 0 else _checked(other) + self  # sum([fit_a, fit_b]) begins with 0

    def __sub__(self, other: Any) -> Composed:
        return self + -_checked(other)

    def __mul__(self, scalar: float) -> Composed:
        c = number("scalar", scalar, remedy="multiply a fit by a finite number, and add fits")
        return Composed(tuple((fit, own * c) for fit, own in self._summands()))

    __rmul__ = __mul__

    def __truediv__(self, scalar: float) -> Composed:
        c = number("scalar", scalar, remedy="divide a fit by a finite number that is not zero")
        if not c:
            refuse("scalar", scalar, "a number that is not zero", "divide a fit by one")
        return self * (1 / c)

    def __neg__(self) -> Composed:
        return -1.0 * self


def _checked(other: Any) -> Summable:
    """What can be added, or an error."""
    if isinstance(other, Summable):
        return other
    refuse(
        "other", type(other).__name__, "a fit of linnet.fit, or a sum of fits",
        "linearize one network and fit it to each task; fits of linnet.adapt cannot be added",
    )  # fmt: skip


class Composed(Summable, Shown):
    """Displacements of several fits of one network, each times a factor: ``fit_a + 0.5 * fit_b - fit_c``.

    The fit that stands first is the one that answers: its network and its last layer, displaced by its own δ
    and by those of the others in all weights below it. Fits are added that move the same weights from the
    same start; their networks may differ in the last linear layer, the heads of the tasks, alone.

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
            Outputs of the first fit's network, (T, C), or in its own shape as those of a ``PositionFit`` are.
        """
        x = checked_inputs(self.module, x)
        found = torch.cat([self.module(part) for part in split(x, BATCH)])
        return found if self.parts[0][0]._targets.axis is not None else found.flatten(1)

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
        """Its own parts."""
        return self.parts

    def _shown(self) -> dict[str, Any]:
        every = [f"{factor:g} × {fit.n} examples" for fit, factor in self.parts]
        return {"network": type(self.module.model).__name__, "displacements": some(every)}


def _displaced(fit: Any, factor: float) -> tuple[Functional, Params]:
    """The network of a fit in its own weights, and its displacement times a factor."""
    if fit.system.shared:
        raise InputError(
            "a sum with a fit whose outputs have weights of their own",
            expected='fits of linnet.fit, by another solver than "shared"',
            remedy="leave solver= out",
        )
    function, delta = own_network(fit.module)
    return function, {name: factor * value for name, value in delta.items()}


def _shared(first: Functional, other: Functional) -> list[str]:
    """The tracked parameters that two networks move alike, all but those of heads that differ."""
    own, others = first.model.state_dict(), other.model.state_dict()
    apart = {
        owner(name)
        for name in own.keys() | others.keys()
        if name not in own or name not in others or not _alike(own[name], others[name])
    }
    if not apart <= {_head(first), _head(other)}:
        _refuse(f"networks of two fits that differ in {some(sorted(apart), 4)}")
    moved = [{name for name in one.names if owner(name) not in apart} for one in (first, other)]
    masks = [{name: mask for name, mask in one.masks.items() if name in moved[0]} for one in (first, other)]
    same = masks[0].keys() == masks[1].keys() and all(_alike(m, masks[1][n]) for n, m in masks[0].items())
    if moved[0] != moved[1] or not same:
        _refuse(f"fits that move other weights, {some(first.names, 3)} and {some(other.names, 3)}")
    if not moved[0]:
        _refuse("fits that move their heads alone")
    return [name for name in first.names if name in moved[0]]


def _head(function: Functional) -> str:
    """The name of the last linear layer, "" where there is none."""
    try:
        return last_linear(function.model)[0]
    except ModelError:
        return ""


def _refuse(what: str) -> NoReturn:
    """Raise on fits that cannot be added."""
    raise InputError(
        what,
        expected="displacements of the same weights from the same start, behind which heads alone may differ",
        remedy="linearize one network for all tasks, with the same params= and for each its linnet.with_head",
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their types."""
    return a.shape == b.shape and torch.equal(a.to(b), b)
