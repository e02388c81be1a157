"""Directional derivatives by forward mode, or by double backward where torch lacks it.

``modes.differentiable_kernels`` switches the known kernels without a forward-mode formula to paths
that have one; what still fails is differentiated twice in reverse mode, and what cannot be
differentiated twice is left to per-example gradients (``"rows"``).

Gradients of parameters are looked at as a backward pass comes to them, so that one is held at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from linnet.number_types import wide_type
from linnet.shown import first_line

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
    g = g.to(wide_type(g.dtype)).reshape(len(g) if g.ndim else 1, -1)
    if g.shape[1] <= COLUMNS or g.numel() <= SMALL:
        return g.clone()
    # the numbers of its entries, hashed where the gradient is: numbers from -1 to 1, of variance 1/3
    mixed = torch.arange(g.shape[1] * COLUMNS, device=g.device) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 % 2**32
    random = (mixed ^ (mixed >> 16)).to(g.dtype) / 2**31 - 1
    found: Tensor = g @ (random.view(-1, COLUMNS) * (3 / COLUMNS) ** 0.5)
    return found


Params = dict[str, Tensor]
Function = Callable[[Params], Tensor]
JvpPath = Literal["forward", "double-backward", "rows"]


def jvp_forward(function: Function, at: Params, direction: Params) -> tuple[Tensor, Tensor]:
    """f(θ) and J v by one dual-number pass."""
    pair: tuple[Tensor, Tensor] = torch.func.jvp(function, (at,), (direction,))  # type: ignore[assignment]
    return pair


def jvp_double_backward(function: Function, at: Params, direction: Params) -> tuple[Tensor, Tensor]:
    """f(θ) and J v as the derivative of u ↦ Jᵀu along v: two reverse passes."""
    value, (tangent,) = jvps_double_backward(function, at, [direction])
    return value, tangent


def jvps_double_backward(
    function: Function, at: Params, directions: Sequence[Params]
) -> tuple[Tensor, list[Tensor]]:
    """f(θ) and J v for several directions; those of which a parameter is not named do not move it."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
        value = function(leaves)
        zero = [torch.zeros_like(value, requires_grad=False)] * len(directions)
        if not (leaves and value.requires_grad):  # the outputs depend on no parameter
            return value.detach(), zero
        u = torch.zeros_like(value, requires_grad=True)  # the value does not matter: Jᵀu is linear in u
        pulled = torch.autograd.grad(value, [*leaves.values()], u, create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(leaves, pulled, strict=True) if g is not None and g.requires_grad}
        # J v = ∂/∂u ⟨Jᵀu, v⟩
        for i, direction in enumerate(directions):
            moved = [name for name in used if name in direction]
            if moved:
                (zero[i],) = torch.autograd.grad(
                    [used[name] for name in moved],
                    u,
                    [direction[name] for name in moved],
                    retain_graph=_tracked(direction) or i + 1 < len(directions),
                    create_graph=_tracked(direction),
                )
    return value.detach(), zero


def _tracked(direction: Params) -> bool:
    """Whether the result must itself be differentiable in the direction."""
    return torch.is_grad_enabled() and any(v.requires_grad for v in direction.values())


def probe_jvp(function: Function, at: Params) -> tuple[JvpPath, str]:
    """Find out which path gives J v for this network, and prove it right."""
    # The value is compared with ⟨Jᵀu, v⟩ from reverse mode, so a formula that is silently wrong is not
    # accepted.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at the first forward-mode pass of a process
        direction = random_direction(at)
        reference = _reverse_reference(function, at, direction)
        causes: list[str] = []
        for path, jvp in _PATHS:
            cause = _try(jvp, function, at, direction, reference)
            if cause is None:
                return path, f"forward mode is missing ({causes[0]}); using {path}" if causes else ""
            causes.append(f"{path}: {cause}")
    return "rows", "directional derivatives are formed from per-example gradients (" + "; ".join(causes) + ")"


def _try(
    jvp: Callable[[Function, Params, Params], tuple[Tensor, Tensor]],
    function: Function,
    at: Params,
    direction: Params,
    reference: tuple[Tensor, float] | None,
) -> str | None:
    """Why this way does not work, or ``None`` if it does."""
    try:
        _, tangent = jvp(function, at, direction)
        # training differentiates J v in v: that must work as well
        _differentiable_in_direction(jvp, function, at, direction)
    except RuntimeError as error:
        return first_line(error)[:160]
    agrees = reference is None or _agrees(tangent, *reference)
    return None if agrees else "disagrees with reverse mode"


def random_direction(at: Params) -> Params:
    """A fixed random direction in parameter space; the global generator is not touched."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.empty_like(t, requires_grad=False) for name, t in at.items()}
    for name, direction in found.items():
        for part in pieces(direction):  # the numbers are drawn in double precision
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
        direction *= at[name].detach().abs().mean() + 1e-3
    return found


def _reverse_reference(function: Function, at: Params, direction: Params) -> tuple[Tensor, float] | None:
    """A cotangent u and ⟨Jᵀu, v⟩, from one reverse pass."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
        value = function(leaves)
        generator = torch.Generator().manual_seed(1)
        u = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        if not value.requires_grad:
            return None
        products: list[Tensor] = []

        hand_over(value, leaves, u, lambda name, g: products.append(product(g, direction[name])))
    return u, float(sum(products))


def _agrees(tangent: Tensor, u: Tensor, reference: float) -> bool:
    """⟨u, J v⟩ = ⟨Jᵀu, v⟩ up to rounding."""
    terms = u.double() * tangent.double()
    tolerance = 1e-3 if tangent.dtype in (torch.float32, torch.float64) else 5e-2
    return bool(abs(float(terms.sum()) - reference) <= tolerance * (float(terms.abs().sum()) + 1e-12))


def _differentiable_in_direction(
    jvp: Callable[[Function, Params, Params], tuple[Tensor, Tensor]],
    function: Function,
    at: Params,
    direction: Params,
) -> None:
    """Run one backward pass through J v, as training does."""
    with torch.enable_grad():
        leaves = {n: v.detach().requires_grad_() for n, v in direction.items()}
        _, tangent = jvp(function, at, leaves)
        hand_over(tangent, leaves, torch.ones_like(tangent), lambda *_: None)


_PATHS: tuple[tuple[JvpPath, Callable[[Function, Params, Params], tuple[Tensor, Tensor]]], ...] = (
    ("forward", jvp_forward),
    ("double-backward", jvp_double_backward),
)
