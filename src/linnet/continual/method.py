"""The interface of the methods, for use in any training loop.

for task in tasks:
    for x, y in loader(task):
        loss = cross_entropy(net(x), y) + method.penalty(examples=len(task))
        loss.backward()
        optimizer.step()
        method.after_step()
        optimizer.zero_grad()
    method.consolidate(task)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from linnet.continual.quadratic import (
    Live,
    Quadratic,
    own_name,
    penalty,
    unwrapped,
    value_and_gradient,
)
from linnet.errors import InputError, ModelError
from linnet.linalg.operator import Params
from linnet.number_types import wide_type
from linnet.params import choice, instance, number, optional, real_type
from linnet.params import device as checked_device
from linnet.shown import Shown, some
from linnet.tangent.functional import OutputAdapter, require_values
from linnet.tree import from_plain, map_tensors, to_plain

SCALES = ("linnet", "averaged", "mammoth", "avalanche")


def convert_strength(
    strength: float, source: str, to: str = "linnet", *, old: float, new: float, batch: float = 1.0
) -> float:
    """A penalty's strength λ in another library's scale.

    Everyone adds a quadratic to the loss of the new task and calls its factor λ; what differs is whether
    loss and Fisher matrix are sums or means, and the factor ½. On a loss that is a mean over N new examples,
    with F summed and F̄ averaged over the N₀ old ones, the same penalty is

        "linnet"      λ/N · ½ δᵀ F δ            λ = 1 is Bayes' rule (Botev 2020, eq. 5.25)
        "averaged"    λ ½ δᵀ F̄ δ               Kirkpatrick et al. 2017, van de Ven:  λ_linnet · N₀/N
        "mammoth"     λ δᵀ F̄ δ                 no ½:                                  λ_linnet · N₀/(2N)
        "avalanche"   λ δᵀ F_b δ, F_b ≈ F̄/b     squared gradients of batches of b:     λ_linnet · b N₀/(2N)

    The last holds in expectation, for gradients of examples that are uncorrelated and have mean zero, and
    Mammoth also weights examples by their probability: both are orders of magnitude, not identities.

    Args:
        strength: λ in the scale of ``source``.
        source: "linnet", "averaged", "mammoth" or "avalanche".
        to: The scale that is wanted.
        old: N₀, examples behind the Fisher matrix.
        new: N, examples of the new task.
        batch: b, for "avalanche".

    Returns:
        λ in the scale of ``to``.

    Raises:
        InputError: If a scale is unknown or a number is not positive.

    Example:
        >>> convert_strength(1.0, "linnet", "averaged", old=60000, new=10000)
        6.0
        >>> convert_strength(6.0, "averaged", old=60000, new=10000)
        1.0
    """
    strength = number("strength", strength, least=0)
    ratio = number("old", old, above=0) / number("new", new, above=0)
    factors = {
        "linnet": 1.0,
        "averaged": ratio,
        "mammoth": ratio / 2,
        "avalanche": number("batch", batch, above=0) * ratio / 2,
    }
    for name, scale in (("source", source), ("to", to)):
        choice(name, scale, SCALES, "pass one of these")
    return strength * factors[to] / factors[source]


Prepare = Callable[[nn.Module], object]


class ContinualMethod(Shown, ABC):
    """A quadratic penalty that remembers the tasks before.

    Attributes:
        model: The network, as it was given.
        tasks: Number of tasks consolidated so far.
        strength: Factor of the penalty; 0 switches the method off.

    Example:
        What is the same for all of them in a loop of one's own:

        >>> import linnet
        >>> net = nn.Linear(2, 2)
        >>> method = linnet.continual.EWC(net, linnet.likelihoods.Categorical())
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> for task in range(2):
        ...     x, y = torch.randn(8, 2), torch.randint(2, (8,))
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         loss = nn.functional.cross_entropy(net(x), y) + method.penalty(examples=8)
        ...         loss.backward()
        ...         optimizer.step()
        ...         method.after_step()
        ...     method.consolidate((x, y))
        >>> method.tasks
        2
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        require_values(unwrapped(model))
        if not Live.of(model).tensors:
            raise ModelError(
                f"model ({type(unwrapped(model)).__name__}) has no floating-point parameter",
                expected="a network to train",
                remedy="pass the network that holds the weights",
            )
        self.model, self.tasks = model, 0
        self._strength = number("strength", strength, least=0)
        self._terms: list[Quadratic] = []  # of the penalty

    @property
    def strength(self) -> float:
        """Factor of the penalty, which is in what is remembered of each task."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        raise InputError(
            f"strength={value!r} of a method that is made",
            expected=f"the strength that it was made with, {self._strength:g}",
            remedy="make another method with that strength, and consolidate the tasks with it",
        )

    def penalty(self, examples: float | None = None) -> Tensor:
        """The penalty at the current parameters, to be added to the loss.

        It is exactly 0, a constant without history, as long as there is nothing to remember and when the
        strength is 0, so that such a run has the bits of the naive one.

        Args:
            examples: N of the current task, if the loss is a mean over examples rather than their sum.

        Returns:
            A scalar: ½ δᵀ Λ δ in the sum of the curvatures, divided by ``examples``.

        Raises:
            InputError: If ``examples`` is not a positive number.
            ModelError: If none of the parameters that are remembered is in the network any more.
        """
        quadratics, live = self._ready()
        value = penalty(quadratics, live, self._observe if quadratics else None)
        divisor = self._divisor(examples)
        return value if divisor == 1.0 or not quadratics else value / divisor

    @torch.no_grad()
    def add_grad_(self, examples: float | None = None) -> Tensor:
        """Add the penalty's gradient to ``.grad`` of the parameters; call it after ``backward``.

        The same as differentiating :meth:`penalty`, without a graph. Under a ``GradScaler`` call it after
        ``unscale_``.

        Args:
            examples: N of the current task, if the loss is a mean over examples.

        Returns:
            The penalty's value, a scalar without history.

        Raises:
            InputError: If ``examples`` is not a positive number.
            ModelError: If none of the parameters that are remembered is in the network any more.
        """
        quadratics, live = self._ready()
        divisor = self._divisor(examples)
        if not quadratics:
            return penalty(quadratics, live)
        some = next(iter(live.tensors.values()))
        with torch.autocast(some.device.type, enabled=False):
            value, gradients = value_and_gradient(quadratics, live)
        for name, gradient in gradients.items():
            tensor = live.tensors[name]
            if not tensor.requires_grad:
                continue
            if tensor.grad is None:
                tensor.grad = gradient / divisor
            elif tensor.grad.is_sparse:  # of an embedding, whose rows all have a penalty
                tensor.grad = torch.add(gradient / divisor, tensor.grad)
            else:
                tensor.grad.add_(gradient, alpha=1 / divisor)
        self._observe(torch.full((), 1 / divisor), gradients)
        return value / divisor

    def after_step(self) -> None:
        """Take note of an optimizer step, before the gradients are cleared; only some methods need it."""

    def consolidate(
        self, data: Any = None, *, output: OutputAdapter = None, prepare: Prepare | None = None
    ) -> None:
        """Remember a task that has been learned; parameters, buffers and random state stay as they are.

        What requires no gradient now is not remembered, unless that is all of the network.

        Args:
            data: The task's training data: an (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches.
            output: How to take this task's outputs from what the network returns, as in
                :func:`linnet.linearize`; for instance ``lambda heads: heads[task]``. By default as the
                method was told when it was made.
            prepare: Called with a copy of the network to make it serve this task, for networks that hold
                the task as a state; for instance ``lambda net: net.select(task)``. A network that it
                returns, with the same parameters, is taken in place of the copy.

        Raises:
            InputError: If the method lacks what it needs to know of the task.
        """
        if self.strength > 0:
            self._learn(data, output, prepare)
        self.tasks += 1

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move what is remembered; it also follows the network by itself when that has moved.

        Args:
            device: Where.
            dtype: Type; by default as it is.

        Returns:
            Itself.
        """
        place = checked_device("device", device)
        optional(real_type, "dtype", dtype)
        kinds = [dtype or next((mu.dtype for mu in t.anchor.values()), torch.float32) for t in self._terms]
        self._terms = [term.to(place, kind) for term, kind in zip(self._terms, kinds, strict=True)]
        return self

    def nbytes(self) -> int:
        """Memory of what is remembered, in bytes.

        Returns:
            Bytes of the matrices Λ and the means μ.
        """
        anchors = sum(mu.nbytes for term in self._terms for mu in term.anchor.values())
        return anchors + sum(term.precision.nbytes() for term in self._terms)

    @abstractmethod
    def _learn(self, data: Any, output: OutputAdapter, prepare: Prepare | None) -> None:
        """Bring the terms of the penalty up to date with a task."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The settings that a state belongs to."""

    def _state(self) -> dict[str, Any]:
        """The learned state: tensors, numbers, names and terms of the penalty."""
        return {"terms": self._terms}

    def _load(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`_state`."""
        self._terms = list(state["terms"])

    def _shown(self) -> dict[str, Any]:
        return {**self._settings(), "tasks": self.tasks}

    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered, for ``torch.save``; readable with ``weights_only=True``.

        Returns:
            Tensors, numbers and names; the tensors are the method's own, as of a module's ``state_dict``.
        """
        return {
            "method": type(self).__name__,
            "settings": self._settings(),
            "tasks": self.tasks,
            "state": to_plain(self._state()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, on the device of the network.

        Args:
            state: The state.

        Raises:
            InputError: If it is of another method, or was made with other settings.
        """
        instance("state", state, Mapping, "what state_dict() returned", "pass that")
        mine = {"method": type(self).__name__, "settings": self._settings()}
        for key, own in mine.items():
            theirs = state.get(key)
            if theirs != own:
                raise InputError(
                    f"the state has {key} {theirs!r}",
                    expected=f"{own!r}, as here",
                    remedy="make the method with the arguments of the run that saved the state",
                )
        if missing := [key for key in ("tasks", "state") if key not in state]:
            raise InputError(
                f"the state has no {some(missing)}",
                expected="what state_dict() returned, whole",
                remedy="save it again; torch.save(method.state_dict(), path) keeps all of it",
            )
        device = next(iter(Live.of(self.model).tensors.values())).device
        learned = from_plain(state["state"])
        kept = dict(self.__dict__)
        try:
            self._load(map_tensors(lambda t: t.detach().to(device, copy=True), learned))
            self.tasks = int(state["tasks"])
        except (KeyError, TypeError, ValueError) as error:
            self.__dict__.update(kept)
            raise InputError(
                f"the state is not whole: {type(error).__name__} {error}",
                expected="what state_dict() returned, whole",
                remedy="save it again; torch.save(method.state_dict(), path) keeps all of it",
            ) from error

    def _observe(self, factor: Tensor, gradients: Params) -> None:
        """The penalty's gradient, by parameter, has entered ``.grad`` times a factor."""
        del factor, gradients

    def _divisor(self, examples: float | None) -> float:
        """The divisor of the summed penalty."""
        return 1.0 if examples is None else number("examples", examples, above=0)

    def _active(self) -> list[Quadratic]:
        """The terms that add anything."""
        return [term for term in self._terms if self.strength > 0 and term.precision.names]

    def _require_kept(self, missing: Collection[str]) -> None:
        """Raise if parameters have other names now in modules that are still there; heads may go."""
        modules = dict(unwrapped(self.model).named_modules()) if missing else {}
        modules = {own_name(name): module for name, module in modules.items()}
        for name in sorted(missing):
            owner, _, own = name.rpartition(".")
            if owner in modules and any(True for _ in modules[owner].parameters()):
                raise ModelError(
                    f"parameter {name!r}, which is remembered, is not in the network any more, whose module "
                    f"{owner!r} ({type(modules[owner]).__name__}) has parameters without {own!r}",
                    expected="parameters that keep their names",
                    remedy="parametrize or replace a module before the first task is consolidated, or give "
                    "what replaces it another name",
                )

    def _ready(self) -> tuple[list[Quadratic], Live]:
        """The terms and the parameters, in one place."""
        live = Live.of(self.model)
        some = next(iter(live.tensors.values()))
        quadratics = self._active()
        mu = next((m for term in quadratics for m in term.anchor.values()), None)
        kind = wide_type(some.dtype)
        if mu is not None and (mu.device != some.device or mu.dtype != kind):
            self.to(some.device, kind)
            quadratics = self._active()
        known = {name for term in quadratics for name in term.precision.names}
        self._require_kept(known - set(live.tensors))
        if known and not known & set(live.tensors):
            raise ModelError(
                f"none of the {len(known)} parameters that are remembered is in the network, such as "
                f"{min(known)!r}",
                expected="the network that was consolidated, perhaps with heads added or removed",
                remedy="keep the names of the parameters that tasks share",
            )
        return quadratics, live
