"""Networks in other coordinates, f(θ₀ + H ε): their Jacobian is J H, from the rules for the network itself.

Seen from ε every weight of the network is a computed tensor, so no rule for layers would hold and each
example would be differentiated by itself. J H is instead formed from the rows of J.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from linnet.tangent.captured import Captured
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional


class Coordinates(nn.Module, ABC):
    """A network f(θ₀ + H ε) whose one parameter is ε.

    Attributes:
        epsilon: ε, (P,).
    """

    epsilon: nn.Parameter

    @abstractmethod
    def network_in_place(self) -> tuple[nn.Module, list[str]]:
        """The network with parameters θ₀ + H ε, and the names of those that ε moves."""

    @abstractmethod
    def pulled(self, rows: Params) -> Tensor:
        """J H from the rows of J: gradients (N, K, *shape) by name to (N, K, P)."""

    @abstractmethod
    def kernel_rows(self, captured: Captured) -> Tensor:
        """Rows (N, K, P) with the products of those of J H, from a batch of the network inside."""


def moved_network(function: Functional) -> Functional | None:
    """The network inside coordinates, at the weights where it stands; ``None`` for any other network.

    Args:
        function: A linearized network.

    Returns:
        A function of the network's own parameters.
    """
    if not isinstance(function.model, Coordinates):
        return None
    if "in coordinates" not in function.cache:
        network, names = function.model.network_in_place()
        made = function.cache["in coordinates"] = Functional(network, names, function.output)
        made.source = None if function.source is None else moved_network(function.source)
    found: Functional = function.cache["in coordinates"]
    return found


def pulled_parts(function: Functional, parts: Iterator[Captured]) -> Iterator[Captured]:
    """The captured parts of the network inside, in the coordinates.

    Args:
        function: A network in coordinates.
        parts: Captured batches of the network inside.

    Yields:
        Captured batches whose one parameter is ε.
    """
    coordinates = function.model
    assert isinstance(coordinates, Coordinates)
    for part in parts:
        rows = coordinates.pulled({name: part.rows(name) for name in part.leaves})
        yield Captured(part.n, part.outputs, [], function.theta, {"epsilon": rows}, part.k)


def kernel_part(function: Functional, part: Captured) -> Captured:
    """The captured parts of the network inside, for kernels alone.

    Args:
        function: A network in coordinates.
        part: A captured batch of the network inside.

    Returns:
        A captured batch whose one parameter is ε, in coordinates that may be turned.
    """
    assert isinstance(function.model, Coordinates)
    rows = function.model.kernel_rows(part).to(part.outputs.dtype)
    return Captured(part.n, part.outputs, [], function.theta, {"epsilon": rows}, part.k)
