"""Synaptic intelligence: each weight's share in lowering the loss, measured while it is trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from linnet.continual.method import ContinualMethod, Prepare
from linnet.continual.quadratic import (
    Live,
    PenaltyBlock,
    PenaltyPrecision,
    Quadratic,
    require_shape,
)
from linnet.curvatures.layers import Layer
from linnet.errors import InputError
from linnet.linalg.operator import Params
from linnet.linalg.structured import Diagonal
from linnet.number_types import wide_type
from linnet.params import number, optional
from linnet.tangent.functional import OutputAdapter

NOTHING = 0.0  # of the penalty is in the gradients
PARALLEL = 1e-6  # share of the squared length of a gradient that may be rounding of another one's multiple


class SynapticIntelligence(ContinualMethod):
    """The penalty c Σ Ω (θ − θ̃)² with importances Ω from the path of training.

    At every step of task ν, with g the gradient of the loss alone, without this penalty, as the optimizer got
    it (no longer scaled, and clipped if all are clipped together), and Δθ what it did to the weights,

        ω ← ω − g Δθ        and at the task's end        Ω ← max(0, Ω + ω / (Δ² + ξ)),  θ̃ ← θ,  ω ← 0

    where Δ is how far the weight has come during the task. Ω is cumulative over tasks; that it cannot be
    negative is the authors' program's rule. There is no factor ½: ``penalty()`` is ½ δᵀ Λ δ with Λ = 2 c Ω,
    and λ of Botev (2020, eq. 5.27 and 5.28, a term a task) is 2 c.

    ω is measured in the loss that is trained. Its penalty is on that loss's scale already, mean or sum, and
    ``examples`` makes no difference to it. Call :meth:`after_step` after the optimizer's step and before
    gradients are set to zero (``zero_grad()`` that sets them to ``None``, torch's default, may come first).
    Gradients are followed by hooks on the parameters, which go when the method is deleted.

    Args:
        model: The network.
        strength: c ≥ 0; 0.1 is the authors' choice for permuted MNIST; 0 switches the method off.
        damping: ξ > 0.

    Attributes:
        model: The network.
        tasks: Tasks consolidated so far.
        strength: c.
        damping: ξ.

    Raises:
        InputError: If an argument has a value that cannot be used.

    Source:
        Zenke, Poole and Ganguli, ICML 2017, eq. (3) to (5).

    Example:
        >>> net = nn.Linear(2, 1)
        >>> method = SynapticIntelligence(net, strength=1.0)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> loss = net(torch.ones(4, 2)).square().sum() + method.penalty()
        >>> loss.backward()
        >>> optimizer.step()
        >>> method.after_step()
        >>> method.consolidate()
        >>> bool(method.importance["weight"].sum() > 0)
        True
    """

    def __init__(self, model: nn.Module, strength: float = 0.1, damping: float = 0.1) -> None:
        super().__init__(model, strength)
        self.damping = number("damping", damping, above=0)
        self._path: Params = {}  # ω
        self._start: Params = {}  # θ where the task began
        self._before: Params = {}  # parameters before the step under way
        self._gradients: Params = {}
        self._arrived: Params = {}  # the gradients with the penalty's, before they are unscaled or clipped
        self._factor: Tensor | float = NOTHING  # how much of the penalty is in the gradients
        self._penalty: Params = {}  # the penalty's own gradients, where the step began
        self._watched: dict[str, weakref.ref[Tensor]] = {}
        self._watch(Live.of(model))

    @property
    def importance(self) -> Params:
        """Ω by parameter name, in the order of the network; empty before the first task."""
        blocks = [block for term in self._terms for block in term.precision.blocks]
        layers = [(block.layer, block.terms[0].diagonal()) for block in blocks]
        found = {layer.name: values.view(layer.shapes[0]) for layer, values in layers}
        known = [name for name in Live.of(self.model).tensors if name in found]
        return {name: found[name] for name in dict.fromkeys([*known, *found])}

    @torch.no_grad()
    def after_step(self) -> None:
        """Take note of an optimizer step.

        Raises:
            InputError: If the gradients were set to zero before.
        """
        live = Live.of(self.model)
        self._watch(live)
        self._rescale(live)
        first = not self._path
        moved = zeros = False
        for name, before in self._before.items():
            parameter = live.tensors.get(name)
            if parameter is None or parameter.shape != before.shape:
                continue
            gradient = self._gradient(name, parameter)
            if name not in self._start:
                self._start[name] = _theta(live, name, before).clone()
            displacement = _difference(parameter.detach(), before)
            unregularized = self._unregularized(name, gradient.detach().to(displacement.dtype))
            path = self._path.get(name)
            path = torch.zeros_like(displacement) if path is None else _like(path, displacement, name)
            # what has not moved adds nothing, whatever its gradient: a loss scaler skips steps that overflow
            unregularized = unregularized.masked_fill(displacement == 0, 0)
            self._path[name] = path.addcmul_(unregularized, displacement, value=-1)  # ω − g Δθ
            if first:
                moved, zeros = moved or bool(displacement.any()), zeros or bool(gradient.any())
        self._forget_step()
        if first and moved and not zeros:
            self._path, self._start = {}, {}
            raise InputError(
                "all gradients are zero in after_step(), though the parameters have moved",
                expected="the gradients that the optimizer's step was made with",
                remedy="call after_step() before zero_grad(set_to_none=False)",
            )

    @torch.no_grad()
    def _learn(self, data: Any, output: OutputAdapter, prepare: Prepare | None) -> None:
        if not self._path:
            raise InputError(
                "consolidate() without a step of training since the last task",
                expected="after_step() after every optimizer step",
                remedy="call method.after_step() in the training loop",
            )
        live = Live.of(self.model)
        values, old = live.values(), self.importance
        importance: Params = {}
        for name in dict.fromkeys([*old, *self._path]):
            if name not in values:
                importance[name] = old.get(name, self._path.get(name, torch.zeros(0)))
                continue
            value = values[name]
            before = _like(old[name], value, name) if name in old else torch.zeros_like(value)
            if name in self._path:
                path = _like(self._path[name], value, name)
                distance = value - _like(self._start[name], value, name)
                # Ω + ω / (Δ² + ξ) (Zenke et al. 2017, eq. 5)
                before = (before + path / (distance.square() + self.damping)).clamp(min=0)
            importance[name] = before
        kept = {name: mu for term in self._terms for name, mu in term.anchor.items()}
        anchor = {n: values.get(n, kept.get(n, torch.zeros_like(t))) for n, t in importance.items()}
        blocks = tuple(
            PenaltyBlock(Layer(name, {name: tuple(t.shape)}), "diagonal", (Diagonal(t.flatten()),), 0.0)
            for name, t in importance.items()
        )
        # the penalty c Σ Ω δ² as a quadratic with weight 2c
        self._terms = [Quadratic(anchor, PenaltyPrecision(blocks), 2 * self.strength)]
        self._path, self._start = {}, {}
        self._forget_step()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move what is remembered, the path of the task under way included; see :class:`ContinualMethod`."""
        super().to(device, dtype)
        for own in (self._path, self._start):
            own.update({name: t.to(device, dtype or t.dtype) for name, t in own.items()})
        return self

    def _divisor(self, examples: float | None) -> float:
        optional(number, "examples", examples, above=0)
        return 1.0

    def _gradient(self, name: str, parameter: Tensor | None) -> Tensor:
        """The gradient that a step was made with."""
        now = self._gradients.get(name) if parameter is None or parameter.grad is None else parameter.grad
        if now is None:
            raise InputError(
                f"no gradient of {name!r} is left in after_step()",
                expected="gradients that this method sees before the optimizer's step clears them",
                remedy="make the method before hooks that step in backward are registered",
            )
        return now.to_dense() if now.is_sparse else now

    def _observe(self, factor: Tensor, gradients: Params) -> None:
        live = Live.of(self.model)
        if self._is_reset(live):
            self._begin_again()
        for name in self._gradients.keys() & live.tensors.keys():
            grad = live.tensors[name].grad  # data parallelism puts views in their place
            if grad is not None:
                self._gradients[name] = grad
        self._factor = self._factor + factor
        self._penalty = {name: gradient.detach() for name, gradient in gradients.items()}
        for name, gradient in self._gradients.items():
            self._arrived[name] = gradient.detach().clone()

    def _is_reset(self, live: Live) -> bool:
        """Whether gradients that were noted were set to zero or thrown away without a step."""
        noted = [(live.tensors[n], g) for n, g in self._gradients.items() if n in live.tensors]
        if any(parameter.grad is None for parameter, _ in noted):
            return True
        return bool(noted) and self._factor is not NOTHING and not any(bool(g.any()) for _, g in noted)

    def _begin_again(self) -> None:
        """A pass whose gradients were thrown away is done with: a closure's, or one of a loss that is NaN."""
        self._gradients, self._arrived, self._factor = {}, {}, NOTHING

    def _unregularized(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of the step under way without what the penalty has added to it."""
        if name not in self._penalty:
            return gradient
        own = self._penalty[name].to(gradient)
        return torch.addcmul(gradient, own, torch.as_tensor(self._factor).to(own), value=-1)

    def _rescale(self, live: Live) -> None:
        """Multiply what the penalty has added to the gradients by what all gradients were multiplied by."""
        # Unscaling and clipping do it, which leaves them parallel; averages over processes have the penalty's
        # as they were.
        if not self._arrived:
            return
        found, place = [], next(iter(self._arrived.values())).device
        for name, before in self._arrived.items():
            parameter = live.tensors.get(name)
            now = self._gradient(name, parameter)
            a, g = before.double(), now.detach().to(before.device).double()
            found.append(torch.stack([(a * a).sum(), (a * g).sum(), (g * g).sum()]).to(place))
        aa, ag, gg = torch.stack(found).sum(0).tolist()  # read once
        if aa > 0 and ag != aa and gg - ag * ag / aa <= PARALLEL * gg:
            self._factor = self._factor * (ag / aa)

    def _forget_step(self) -> None:
        """Whatever was noted of a step is done with."""
        self._before, self._penalty = {}, {}
        self._begin_again()

    def _watch(self, live: Live, arrived: bool = False) -> None:
        """Follow the gradients of parameters that are not followed yet, and note those that have arrived."""
        if self.strength == 0:
            return
        for name, parameter in live.tensors.items():
            seen = self._watched.get(name)
            if parameter.requires_grad and parameter.is_leaf and (seen is None or seen() is not parameter):
                handle = parameter.register_post_accumulate_grad_hook(_noting(weakref.ref(self), name))
                weakref.finalize(self, handle.remove)
                self._watched[name] = weakref.ref(parameter)
                if arrived and parameter.grad is not None:
                    self._note(name, parameter)

    def _note(self, name: str, parameter: Tensor) -> None:
        """A gradient has arrived: keep where the parameter is before the step, and the gradient itself."""
        if name not in self._before:
            self._before[name] = parameter.detach().clone()
        if self._gradients.get(name, parameter.grad) is not parameter.grad:
            self._begin_again()
        if parameter.grad is not None:
            self._gradients[name] = parameter.grad
            if self._terms:
                self._arrived[name] = parameter.grad.detach().clone()

    def __getstate__(self) -> dict[str, Any]:
        """All but what hangs on the parameters themselves, which a copy has others of."""
        return {**self.__dict__, "_watched": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a method, and follow the gradients of this one's network."""
        self.__dict__.update(state)
        if hasattr(self.model, "_parameters"):  # not of a network that holds it, which is not made yet
            self._watch(Live.of(self.model))

    def _active(self) -> list[Quadratic]:
        self._watch(Live.of(self.model), arrived=True)
        return super()._active()

    def _settings(self) -> dict[str, Any]:
        return {"strength": self.strength, "damping": self.damping}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "path": self._path, "start": self._start}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._path, self._start = state["path"], state["start"]
        self._forget_step()


def _noting(method: weakref.ref[SynapticIntelligence], name: str) -> Callable[[Tensor], None]:
    """A hook that does not keep the method alive."""

    def note(parameter: Tensor) -> None:
        owner = method()
        if owner is not None:
            owner._note(name, parameter)

    return note


def _theta(live: Live, name: str, tensor: Tensor) -> Tensor:
    """θ where the trained tensor had this value."""
    value = tensor.to(wide_type(tensor.dtype))
    return value + live.origins[name].to(value) if name in live.origins else value


def _difference(after: Tensor, before: Tensor) -> Tensor:
    """The change of a parameter by a step, in the memory of the old value where the types agree."""
    kind = wide_type(before.dtype)
    return torch.sub(after, before, out=before) if before.dtype == kind else (after - before).to(kind)


def _like(tensor: Tensor, value: Tensor, name: str) -> Tensor:
    """What is known of a parameter, on its device."""
    require_shape(tuple(value.shape), tuple(tensor.shape), name)
    return tensor.to(value.device)
