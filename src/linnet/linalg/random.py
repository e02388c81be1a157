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


def make_generator(seed: Seed, name: str = "seed") -> torch.Generator | None:
    """A generator from whatever the caller gave.

    Args:
        seed: A generator (used as it is), an integer seed, or None for torch's global generator.
        name: What the argument is called.

    Returns:
        The generator, or None for torch's global one.

    Raises:
        InputError: The seed is none of these.

    Example:
        >>> make_generator(3).initial_seed()
        3
    """
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if isinstance(seed, bool | Tensor) or not hasattr(type(seed), "__index__"):
        refuse(name, seed, "a torch.Generator, an integer seed or None")
    return torch.Generator().manual_seed(checked_seed(name, seed))


def require_room(shape: Sequence[int], item: int, device: torch.device, what: str = "random numbers") -> None:
    """Raise if random numbers, and what is made of them, would not fit the memory.

    Args:
        shape: Shape of the numbers.
        item: Bytes that are held for each of them.
        device: Where they are drawn.
        what: What they are, in words.

    Raises:
        MemoryBudgetError: They take more than half of what is free.

    Example:
        >>> require_room((2, 3), 8, torch.device("cpu"))
    """
    count = prod(shape)
    if count >= PLANNED:
        size = " × ".join(map(str, shape))
        plan = Plan(f"{size} {what}", parse_bytes(None, device), (("draws", count * item),))
        require(plan, ["draw fewer at once", "draw for fewer examples at once"])


def normal(shape: Sequence[int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers.

    Args:
        shape: Shape of the result.
        seed: Generator, seed or None.
        dtype: Type of the result.
        device: Where the result is wanted; numbers are drawn where the generator lives.

    Returns:
        A tensor of the given shape.

    Raises:
        MemoryBudgetError: The numbers, and as many made of them, would take more than half of what is free.

    Example:
        >>> normal((2, 3), 0, torch.float64, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    require_room(shape, 2 * dtype.itemsize, source)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=source).to(device)


def signs(shape: Sequence[int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, +1 or -1 with equal probability (Rademacher variables).

    Args:
        shape: Shape of the result.
        seed: Generator, seed or None.
        dtype: Type of the result.
        device: Where the result is wanted; numbers are drawn where the generator lives.

    Returns:
        A tensor of the given shape.

    Raises:
        MemoryBudgetError: The numbers, and as many made of them, would take more than half of what is free.

    Example:
        >>> signs((4,), 0, torch.float32, torch.device("cpu")).abs()
        tensor([1., 1., 1., 1.])
    """
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    require_room(shape, 16 + dtype.itemsize, source)  # drawn as integers of 8 bytes, and computed with
    bits = torch.randint(2, tuple(shape), generator=generator, device=source)
    return (2 * bits - 1).to(device=device, dtype=dtype)
