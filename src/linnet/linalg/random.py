"""Random numbers that depend on the generator alone, not on the device."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from linnet.memory import Plan, parse_bytes, require
from linnet.params import refuse
from linnet.params import seed as checked_seed

Seed = torch.Generator | int | None

PLANNED = 1 << 24  # numbers from which a draw is compared with the memory that is free: 64 MB in float32


def make_generator(seed: Seed) -> torch.Generator | None:
    """A generator from whatever the caller gave."""
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool | Tensor) or not hasattr(type(seed), "__index__"):
        refuse("seed", seed, "a torch.Generator, an integer seed or None")
    return torch.Generator().manual_seed(checked_seed("seed", seed))


def require_room(shape: Sequence[int], item: int, device: torch.device, what: str = "random numbers") -> None:
    """Raise if random numbers, and what is made of them, would not fit the memory."""
    count = prod(shape)
    if count >= PLANNED:
        size = " × ".join(map(str, shape))
        plan = Plan(f"{size} {what}", parse_bytes(None, device), (("draws", count * item),))
        require(plan, ["draw fewer at once", "draw for fewer examples at once"])


def normal(shape: Sequence[int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers."""
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    require_room(shape, 2 * dtype.itemsize, source)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=source).to(device)


def signs(shape: Sequence[int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, +1 or -1 with equal probability (Rademacher variables)."""
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    require_room(shape, 16 + dtype.itemsize, source)  # drawn as integers of 8 bytes, and computed with
    bits = torch.randint(2, tuple(shape), generator=generator, device=source)
    return (2 * bits - 1).to(device=device, dtype=dtype)
