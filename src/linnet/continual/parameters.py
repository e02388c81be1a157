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
        found = {}
        for name, mu in anchor.items():
            if name in self.tensors:
                require_shape(tuple(self.tensors[name].shape), tuple(mu.shape), name)
                found[name] = self.theta(name).to(mu.dtype) - mu
        return found


def computing_type(dtype: torch.dtype) -> torch.dtype:
    """The type that penalties are computed in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def require_shape(shape: tuple[int, ...], before: tuple[int, ...], name: str) -> None:
    """Raise unless a parameter has the shape that it was consolidated with."""
    if shape != before:
        raise ModelError(
            f"parameter {name!r} has shape {shape}, and had {before} when it was consolidated",
            expected="parameters that keep their shape",
            remedy="give new classes a head of their own, and what replaces a parameter a new name",
        )


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
