"""Features of earlier layers: what goes into some layers with weights in the second half of a network.

    ψ(x) = (ψ_1(x), …, ψ_L(x)) / √L,    ψ_l(x) = pool(a_l(x)) / |pool(a_l(x))|,    a_l: the input of layer l

Maps are averaged over a grid of 2 parts in each direction, the tokens of images likewise, those of texts over
their positions. ψ_L is φ(x)/|φ(x)|, of the network's own features. A random ReLU layer of infinite width on
ψ, and a linear one behind it, read the network at several depths; no derivative is taken.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from linnet.fitting.last_layer import PADDING, Appended, bared, last_linear, masked
from linnet.linear.features import arc_cosine
from linnet.tangent.batch import MASK, Inputs, masked_mean, take
from linnet.tangent.functional import FAILURES, IDLE, Functional, adapt_outputs, lies_in
from linnet.tree import tensors_in

# Decided on development tasks (docs/results/adapt.md, "What was tried").
STAGES = 12  # layers that are read, at most: the one with the narrowest input of each part of the rest
SKIPPED = 0.5  # of the layers, the first ones: they see edges and words, and not what is shown
GRID = 2  # parts in each direction of a map
WIDEST = 4096  # numbers of a layer's grid; beyond, its maps are averaged whole
EXTRA = 5  # tokens of an image that are no part of it, at most: a class, a distillation, four registers
FEW = (3, 2)  # examples by which the axis of examples is told


def earlier_layers(function: Functional, x: Inputs) -> tuple[str, ...]:
    """Names of the layers that are read, in the order in which they run."""
    # function: a network that ends in a linear layer
    try:
        first, second = (_inputs_of_layers(function, take(x, slice(0, n))) for n in FEW)
    except FAILURES:  # a single example, or a network that takes no two
        return ()
    found = [
        name
        for name, shape in first.items()
        if len(shape) > 1 and shape[0] == FEW[0] and second.get(name, (0,))[0] == FEW[1]
    ]
    late = found[math.ceil(SKIPPED * (len(found) - 1)) :]
    parts = [part for part in _split(late, STAGES) if part]
    return tuple(min(part, key=lambda name: _channels(function.model, name, first[name])) for part in parts)


def _split(names: list[str], count: int) -> list[list[str]]:
    """Names in order as so many parts of about equal lengths."""
    ends = [round(place * len(names) / count) for place in range(count + 1)]
    return [names[a:b] for a, b in pairwise(ends)]


def _channels(model: nn.Module, name: str, shape: torch.Size) -> int:
    """The width of what goes into a layer."""
    return shape[1] if isinstance(model.get_submodule(name), _ConvNd) else shape[-1]


def _inputs_of_layers(function: Functional, x: Inputs) -> dict[str, torch.Size]:
    """Shapes of what goes into layers with weights, but for the last, an idle one, and what x itself is."""
    seen: dict[str, Tensor] = {}
    known: list[Tensor] = []
    layer, idle = last_linear(function.model)[1], getattr(function.model, IDLE, None)

    def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known.extend(tensors_in([*args, *kwargs.values()]))

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            a = args[0] if args else None
            if isinstance(a, Tensor) and a.is_floating_point() and not any(_same(a, one) for one in known):
                known.append(a)
                seen[name] = a

        return hook

    handles = [function.model.register_forward_pre_hook(given, with_kwargs=True)]
    for name, module in function.model.named_modules():
        if module is not layer and _has_weights(module) and not lies_in(idle, name):
            handles.append(module.register_forward_pre_hook(keep(name)))
    try:
        function.check_runs(x)
    finally:
        for handle in handles:
            handle.remove()
    return {name: a.shape for name, a in seen.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place, however they are arranged."""
    return a is b or (a.numel() == b.numel() > 0 and a.data_ptr() == b.data_ptr())


def _has_weights(module: nn.Module) -> bool:
    """Whether a module is a layer with a matrix of weights, and takes the examples first."""
    own = any(p.ndim > 1 for p in module.parameters(recurse=False)) or hasattr(module, "parametrizations")
    return own and getattr(module, "batch_first", True)


class Staged(nn.Module):
    """A network that returns its features and those of earlier layers side by side, (N, D + E)."""

    def __init__(self, model: nn.Module, stages: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.stages, self.width = bared(model), stages, last_linear(model)[1].in_features
        names = list(inspect.signature(self._inner.forward).parameters)
        self.mask_place = names.index(MASK) if MASK in names else len(names)

    @property
    def _inner(self) -> nn.Module:
        """The network that takes the mask."""
        return self.body.body if isinstance(self.body, Appended) else self.body

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(φ, ψ), (N, D + E)."""
        if PADDING in vars(self._inner):
            args, kwargs = masked(self._inner, args, kwargs)
        mask = kwargs.get(MASK, args[self.mask_place] if self.mask_place < len(args) else None)
        first = next(iter((*args, *kwargs.values())))
        image = isinstance(first, Tensor) and first.ndim == 4
        read: dict[str, Tensor] = {}
        with self._reading(read, mask, image):
            phi = adapt_outputs(self.body(*args, **kwargs), None).flatten(1)
        parts = [*(read[name] for name in self.stages), phi]
        psi = torch.cat([F.normalize(part, dim=1) for part in parts], 1)
        return torch.cat([phi, psi * len(parts) ** -0.5], 1)

    @contextmanager
    def _reading(self, read: dict[str, Tensor], mask: Tensor | None, image: bool) -> Iterator[None]:
        """Keep what goes into each layer, pooled, while the network runs."""

        def keep(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
            read[name] = pooled(args[0], isinstance(layer, _ConvNd), mask, image)

        layers = {name: self.body.get_submodule(name) for name in self.stages}
        handles = [layer.register_forward_pre_hook(partial(keep, name)) for name, layer in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Alike(nn.Module):
    """A network that returns φ, and the kernel of its ψ with those of some examples, (N, D + M)."""

    psi: Tensor

    def __init__(self, reader: nn.Module, psi: Tensor) -> None:
        super().__init__()
        self.reader = reader
        self.register_buffer("psi", psi)  # (M, E)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """φ (N, D) and κ(ψᵀψ') (N, M), in the type of those examples."""
        found = self.reader(*args, **kwargs).to(self.psi.dtype)
        phi, psi = found.tensor_split([found.shape[1] - self.psi.shape[1]], 1)
        return torch.cat([phi, arc_cosine(psi @ self.psi.T)], 1)


class Beside(nn.Module):
    """A network that returns its features, and those of earlier layers beside the ones of another network."""

    def __init__(self, own: Staged, other: Staged) -> None:
        super().__init__()
        self.own, self.other = own, other

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(φ, (ψ, ψ')/√2), (N, D + 2 E)."""
        (phi, psi), (_, other) = (
            found.tensor_split([width], 1)
            for found, width in ((one(*args, **kwargs), one.width) for one in (self.own, self.other))
        )
        return torch.cat([phi, psi * 0.5**0.5, other * 0.5**0.5], 1)


class Headed(nn.Module):
    """A network and a layer behind it, whose outputs are of one type."""

    def __init__(self, body: nn.Module, head: nn.Module, kind: torch.dtype) -> None:
        super().__init__()
        self.body, self.head, self.kind = body, head, kind

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the layer gives of what the network returns."""
        found: Tensor = self.head(self.body(*args, **kwargs))
        return found.to(self.kind)


def pooled(a: Tensor, channels_first: bool, mask: Tensor | None, image: bool) -> Tensor:
    """What goes into a layer as one vector for each example, (N, D)."""
    # a (N, C), (N, C, ...) or (N, ..., C), mask (N, T)
    if a.ndim == 2:
        return a
    if not channels_first:
        if a.ndim == 3 and image:
            a = _as_map(a)
        if a.ndim == 3 and mask is not None and mask.shape == a.shape[:2]:
            return masked_mean(a, mask)
        a = a.movedim(-1, 1)
    # as wide for images of every size: the grid of a map of one place has that place in all its parts
    if a.ndim == 4 and a.shape[1] * GRID**2 <= WIDEST:
        return F.adaptive_avg_pool2d(a, GRID).flatten(1)
    return a.flatten(2).mean(2)


def _as_map(tokens: Tensor) -> Tensor:
    """The tokens of a square image as a map (N, H, W, D); those of others as their mean, one place."""
    # tokens (N, T, D)
    count = tokens.shape[1]
    side = math.isqrt(count)
    if count - side**2 > EXTRA:
        return tokens.mean(1)[:, None, None]
    found: Tensor = tokens[:, count - side**2 :].unflatten(1, (side, side))
    return found
