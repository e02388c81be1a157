"""Networks in other coordinates, f(θ₀ + H ε): their Jacobian is J H, from the rules for the network itself.

Seen from ε every weight of the network is a computed tensor, so no rule for layers would hold and each
example would be differentiated by itself. J H is instead formed from a captured batch of the network inside.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet.errors import InputError
from linnet.tangent.functional import Functional, padding_rows
from linnet.tangent.rules import Captured
from linnet.tangent.selection import masks_of


class Coordinates(nn.Module, ABC):
    """A network f(θ₀ + H ε) as a module whose one parameter is ε."""

    def __init__(self, network: nn.Module, names: Sequence[str], dim: int) -> None:
        super().__init__()
        self._shapes = {name: network.get_parameter(name).shape for name in names}
        padding = padding_rows(network, list(names))
        self._padding = {name: row for name, (row, tied) in padding.items() if not tied}
        self.network = _with_buffers(network)
        like = network.get_parameter(names[0])
        self.epsilon = nn.Parameter(torch.zeros(dim, dtype=like.dtype, device=like.device))

    @abstractmethod
    def _moved(self, epsilon: Tensor) -> Mapping[str, Tensor]:
        """H ε by the names of the parameters."""

    @abstractmethod
    def pulled(self, captured: Captured) -> Tensor:
        """J H, (N, K, D), from a batch of the network inside."""

    def kernel_rows(self, captured: Captured) -> Tensor:
        """Rows (N, K, D) with the products of those of J H; where others are cheaper, those."""
        return self.pulled(captured)

    def displacement(self, epsilon: Tensor | None = None) -> dict[str, Tensor]:
        """δ = H ε.

        Args:
            epsilon: ε, (D,); by default the module's own. Of a fit, ``fit.module.delta["epsilon"]``.

        Returns:
            The displacement of every parameter by its name in the network.

        Raises:
            InputError: If ε is no vector of D numbers.
        """
        chosen = self.epsilon if epsilon is None else epsilon
        if not isinstance(chosen, Tensor) or chosen.shape != self.epsilon.shape:
            what = f"of shape {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
            raise InputError(
                f"epsilon is {what}",
                expected=f"a tensor {tuple(self.epsilon.shape)}, the coordinates of one displacement",
                remedy='of a fit, pass fit.module.delta["epsilon"]',
            )
        moved = dict(self._moved(chosen))
        for name, mask in masks_of(self.network, self._shapes).items():
            moved[name] = moved[name] * mask
        for name, row in self._padding.items():  # has no gradient, so it does not move
            keep = torch.arange(len(moved[name]), device=chosen.device) != row
            moved[name] = moved[name] * keep[:, None]
        return moved

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the network at θ₀ + H ε.

        Args:
            *args: Of the network.
            **kwargs: Of the network.

        Returns:
            Its outputs.
        """
        delta = self.displacement()
        theta = {name: self.network.get_buffer(name) + piece for name, piece in delta.items()}
        return functional_call(self.network, theta, args, kwargs)

    @torch.no_grad()
    def network_in_place(self) -> tuple[nn.Module, list[str]]:
        """The network with parameters θ₀ + H ε, and the names of those that ε moves.

        Returns:
            A network that is no longer tied to this one, and names in its own order.
        """
        clone, made = copy.deepcopy(self.network), dict[int, nn.Parameter]()
        owners = {id(clone.get_buffer(name)): name for name in self._shapes}
        delta = self.displacement()
        for module in clone.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and id(buffer) in owners:
                    own = owners[id(buffer)]
                    value = made.setdefault(id(buffer), nn.Parameter(buffer + delta[own]))
                    del module._buffers[name]
                    module.register_parameter(name, value)
        return clone, list(self._shapes)


def _with_buffers(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose parameters are buffers, so that none is selected or trained."""
    clone = copy.deepcopy(model).eval()
    kept: dict[int, Tensor] = {}  # tied parameters stay tied
    for module in clone.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                del module._parameters[name]
                module.register_buffer(name, kept.setdefault(id(p), p.detach()))
    return clone


def moved_network(function: Functional) -> Functional | None:
    """The network inside coordinates, at the weights where it stands; ``None`` for any other network."""
    if not isinstance(function.model, Coordinates):
        return None
    if function.cache.inside is None:
        network, names = function.model.network_in_place()
        made = function.cache.inside = Functional(network, names, function.output)
        made.source = None if function.source is None else moved_network(function.source)
    return function.cache.inside


def pulled_parts(function: Functional, parts: Iterator[Captured]) -> Iterator[Captured]:
    """The captured parts of the network inside, in the coordinates."""
    coordinates = function.model
    assert isinstance(coordinates, Coordinates)
    for part in parts:
        rows = coordinates.pulled(part).to(part.outputs.dtype)
        yield Captured(part.n, part.outputs, [], function.theta, {"epsilon": rows}, part.k)


def kernel_part(function: Functional, part: Captured) -> Captured:
    """The captured parts of the network inside, for kernels alone."""
    assert isinstance(function.model, Coordinates)
    rows = function.model.kernel_rows(part).to(part.outputs.dtype)
    return Captured(part.n, part.outputs, [], function.theta, {"epsilon": rows}, part.k)
