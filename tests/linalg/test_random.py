"""Random numbers depend on the generator alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linnet.linalg.random import normal, signs

CPU = torch.device("cpu")


@pytest.mark.parametrize("draw", [normal, signs])
def test_the_same_seed_gives_the_same_numbers(draw: Callable[..., Tensor]) -> None:
    first = draw((5, 2), 3, torch.float64, CPU)
    assert first.shape == (5, 2)
    assert first.dtype == torch.float64
    assert torch.equal(first, draw((5, 2), torch.Generator().manual_seed(3), torch.float64, CPU))
    assert not torch.equal(first, draw((5, 2), 4, torch.float64, CPU))


@pytest.mark.parametrize("draw", [normal, signs])
def test_a_generator_moves_on_and_none_is_the_global_one(draw: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(*(draw((64,), generator, torch.float32, CPU) for _ in range(2)))
    torch.manual_seed(7)
    first = draw((64,), None, torch.float32, CPU)
    torch.manual_seed(7)
    assert torch.equal(first, draw((64,), None, torch.float32, CPU))


def test_a_seed_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    normal((9,), 1, torch.float32, CPU)
    signs((9,), 1, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_signs_are_fair() -> None:
    drawn = signs((10_000,), 0, torch.float32, CPU)
    assert set(drawn.tolist()) == {-1.0, 1.0}
    assert abs(float(drawn.mean())) < 5 / 100
