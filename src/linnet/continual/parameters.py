"""The parameters of a network in training, as the methods of continual learning use them.

A penalty acts on the tensors that the optimizer moves. Wrappers (``torch.compile``, data parallelism) are
looked through, so that names are those of the network itself, and a ``Linearized`` counts with θ = θ₀ + δ,
whose δ is what is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from linnet.errors import ModelError
from linnet.linalg.operator import Params
from linnet.tangent.linearized import Linearized
from linnet.tangent.selection import require_module


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of ``torch.compile`` and data parallelism."""
    require_module(model)
    while True:
        inner = model.module if isinstance(model, DataParallel | DistributedDataParallel) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@dataclass(frozen=True, eq=False)
class Live:
    """The parameters as they are now."""

    tensors: Mapping[str, Tensor]  # the parameters themselves, by name; what an optimizer moves
    # what is added to get θ, by name: θ₀ of a `Linearized`; empty otherwise
    origins: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Live:
        """The parameters of a network."""
        network = unwrapped(model)
        if isinstance(network, Linearized):
            return cls(network.delta, network.theta0)
        return cls({n: p for n, p in network.named_parameters() if p.is_floating_point()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Live:
        """The same with other tensors in place of some."""
        return Live({**self.tensors, **tensors}, self.origins)

    def theta(self, name: str) -> Tensor:
        """θ of one parameter, with its history."""
        tensor = self.tensors[name]
        return tensor + self.origins[name] if name in self.origins else tensor

    def values(self) -> Params:
        """Copies of all θ, without history, at least float32."""
        return {
            name: self.theta(name).detach().to(computing_type(t.dtype), copy=True)
            for name, t in self.tensors.items()
        }

    def difference(self, anchor: Mapping[str, Tensor]) -> Params:
        """θ − μ for the parameters that are there and have an anchor."""
        # Of a parameter that has grown since, the leading rows and columns that the anchor knows count.
        return {
            name: corner(self.theta(name), mu.shape, name).to(mu.dtype) - mu
            for name, mu in anchor.items()
            if name in self.tensors
        }


def computing_type(dtype: torch.dtype) -> torch.dtype:
    """The type that penalties are computed in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def corner(tensor: Tensor, shape: torch.Size | tuple[int, ...], name: str) -> Tensor:
    """The leading part of a tensor, a view."""
    if tensor.shape == torch.Size(shape):
        return tensor
    if tensor.ndim != len(shape) or any(a < b for a, b in zip(tensor.shape, shape, strict=True)):
        raise ModelError(
            f"parameter {name!r} has shape {tuple(tensor.shape)}, and had {tuple(shape)} when it was "
            "consolidated",
            expected="parameters that keep their shape or grow",
            remedy="use a new name for what replaces a parameter",
        )
    return tensor[tuple(slice(0, size) for size in shape)]


@contextlib.contextmanager
def same_random_state(data: Any) -> Iterator[None]:
    """Random generators as they were, once the block is left: reading a loader draws from them."""
    generators: list[torch.Generator] = []
    if isinstance(data, DataLoader):
        own = (data.generator, getattr(data.sampler, "generator", None))
        generators = [g for g in own if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
