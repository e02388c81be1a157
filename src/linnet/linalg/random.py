"""Random numbers that depend on their generator alone, not on the device that uses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.params import refuse
from linnet.params import seed as checked_seed

Seed = torch.Generator | int | None


def make_generator(seed: Seed, name: str = "generator") -> torch.Generator | None:
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


def normal(shape: Sequence[int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers.

    Args:
        shape: Shape of the result.
        seed: Generator, seed or None.
        dtype: Type of the result.
        device: Where the result is wanted; numbers are drawn where the generator lives.

    Returns:
        A tensor of the given shape.

    Example:
        >>> normal((2, 3), 0, torch.float64, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
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

    Example:
        >>> signs((4,), 0, torch.float32, torch.device("cpu")).abs()
        tensor([1., 1., 1., 1.])
    """
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    bits = torch.randint(2, tuple(shape), generator=generator, device=source)
    return (2 * bits - 1).to(device=device, dtype=dtype)
