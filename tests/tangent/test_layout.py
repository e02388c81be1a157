"""Where the examples are inside a tensor of activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor

from linnet.tangent.rules import PLAIN, Layout, find_layout, fits
from tests.fitting.problems import real


def place(t: Tensor, layout: Layout) -> Tensor:
    """(N, m, *rest) put where the layout says: the examples on its axis, m merged with them."""
    parts = t if layout.outer else t.transpose(0, 1)
    return parts.flatten(0, 1).movedim(0, layout.axis)


@given(
    n=st.integers(1, 4), m=st.integers(1, 3), rest=st.lists(st.integers(1, 3), max_size=3),
    axis=st.integers(0, 3), outer=st.booleans(), skip=st.integers(0, 2),
)  # fmt: skip
def test_examples_first_undoes_the_placing(
    n: int, m: int, rest: list[int], axis: int, outer: bool, skip: int
) -> None:
    layout = Layout(min(axis, len(rest)), outer)
    leading = [2, 3][:skip]
    t = real(*leading, n, m, *rest)
    placed = torch.stack([place(part, layout) for part in t.reshape(-1, n, m, *rest)])
    placed = placed.reshape(*leading, *placed.shape[1:])
    assert torch.equal(layout.examples_first(placed, n, skip), t)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("m", [1, 2])
def test_the_layout_is_found_by_its_gradients(axis: int, outer: bool, m: int) -> None:
    """Gradients of example i alone are zero but in i's own part."""
    n, layout = 3, Layout(axis, outer)
    own = real(n, m, 6, 3)
    causes = [place(own * (torch.arange(n) == i)[:, None, None, None], layout) for i in range(n)]
    found = find_layout(torch.stack(causes), range(3), n)
    assert found is not None
    assert found.axis == axis
    assert found.outer == outer or m == 1  # nothing merged: both say the same


def test_mixed_examples_have_no_layout() -> None:
    assert find_layout(torch.ones(3, 6, 3), range(2), 3) is None


def test_axes_that_cannot_hold_the_examples() -> None:
    assert find_layout(real(3, 4, 5), range(2), 3) is None
    assert fits(Size([4, 6]), 1, 3)
    assert not fits(Size([4, 6]), 0, 3)
    assert not fits(Size([4, 6]), 2, 2)
    assert not fits(Size([0]), 0, 3)


def test_only_candidates_are_considered() -> None:
    gradients = torch.eye(3)[:, None, :].expand(3, 3, 3)  # the examples are on the second axis
    assert find_layout(gradients, [1], 3) == Layout(1)
    assert find_layout(gradients, [0], 3) is None
    assert Layout() == PLAIN
