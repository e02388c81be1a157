"""Gradients of parameters that are looked at as a backward pass comes to them: one is held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

PIECE = 1 << 20  # numbers of a gradient that are read at once where reading copies them
SMALL = 1 << 16  # numbers of a gradient that is kept as it is
COLUMNS = 16  # of a sketch: its norm is a tenth of what it stands for in one of 10¹¹ matrices of rank one
# Largest relative change that rounding makes: a batch of another size takes other kernels.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
# The same for gradients: where a unit is switched over by rounding, its part of the gradient jumps.
SWITCHING = {torch.float64: 1e-6, torch.float32: 3e-2}
COARSE = 1e-1  # for either in half precision, where three digits are kept


@contextmanager
def handed_over(leaves: Mapping[str, Tensor], take: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Backward passes give each parameter's gradient to a function once it is whole, and let go of it."""
    looking = False

    def seen(name: str, g: Tensor) -> Tensor:
        nonlocal looking
        if looking:  # a pass that the function makes itself
            return g
        looking = True
        try:
            take(name, g)
        finally:
            looking = False
        return g.new_zeros(()).expand_as(g)

    handles = [leaf.register_hook(partial(seen, name)) for name, leaf in leaves.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hand_over(
    outputs: Tensor, leaves: Mapping[str, Tensor], cotangent: Tensor, take: Callable[[str, Tensor], object]
) -> None:
    """One backward pass whose parameter gradients are handed on one at a time, never all held."""
    # outputs (N, C), cotangent (N, C)
    if outputs.requires_grad and leaves:
        with handed_over(leaves, take):
            torch.autograd.grad(outputs, [*leaves.values()], cotangent, retain_graph=True, allow_unused=True)


def pieces(t: Tensor) -> Sequence[Tensor]:
    """A tensor in parts of about a million numbers, split along its first axis; views of it."""
    return t.split(max(1, PIECE // max(1, t[:1].numel()))) if t.ndim else (t,)


def largest(t: Tensor) -> Tensor:
    """The largest absolute entry, zero where there is none; NaN stays NaN."""
    found: Tensor = torch.linalg.vector_norm(t, torch.inf) if t.numel() else t.sum()
    return found


def largest_difference(a: Tensor, b: Tensor) -> Tensor:
    """The largest entry of ``a - b``, which is not formed whole."""
    found = a.new_zeros(len(pieces(a)))
    room = torch.empty_like(pieces(a)[0])  # once: what is freed between small tensors is not taken again
    for i, (left, right) in enumerate(zip(pieces(a), pieces(b), strict=True)):
        place = room[: len(left)] if left.ndim else room
        found[i] = largest(torch.sub(left, right, out=place))
    return largest(found)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b in double precision."""
    found = torch.zeros(len(pieces(a)), dtype=torch.float64, device=a.device)
    room = torch.empty_like(pieces(a)[0], dtype=torch.float64)
    for i, (left, right) in enumerate(zip(pieces(a), pieces(b), strict=True)):
        place = room[: len(left)] if left.ndim else room
        found[i] = place.copy_(left).mul_(right).sum()
    return found.sum()


def sketch(g: Tensor) -> Tensor:
    """A gradient times a fixed random matrix: as long as it is and linear in it, in 16 numbers a row."""
    g = g.detach().squeeze()
    g = g.to(torch.promote_types(g.dtype, torch.float32)).reshape(len(g) if g.ndim else 1, -1)
    if g.shape[1] <= COLUMNS or g.numel() <= SMALL:
        return g.clone()
    # the numbers of its entries, hashed where the gradient is: numbers from -1 to 1, of variance 1/3
    mixed = torch.arange(g.shape[1] * COLUMNS, device=g.device) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 % 2**32
    random = (mixed ^ (mixed >> 16)).to(g.dtype) / 2**31 - 1
    found: Tensor = g @ (random.view(-1, COLUMNS) * (3 / COLUMNS) ** 0.5)
    return found
