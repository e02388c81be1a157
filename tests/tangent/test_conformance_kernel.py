"""For every network of the zoo: the four kernels, their symmetry, and identities they must obey."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

import linnet
from tests.oracles.dense import kernel_oracle
from tests.zoo import assert_near, case, every_animal, joined, linearize, linearized, rows, set_delta

Outputs = Literal["full", "trace", "diagonal", "sum"]
OUTPUTS: tuple[Outputs, ...] = ("full", "trace", "diagonal", "sum")


def mirrored(kernel: torch.Tensor, outputs: Outputs) -> torch.Tensor:
    """The transpose over examples (and outputs)."""
    return kernel.permute(2, 3, 0, 1) if outputs == "full" else kernel.transpose(0, 1)


@every_animal
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.thinned(3)
def test_kernel_between_two_batches(name: str, outputs: Outputs) -> None:
    expected = case(name)
    actual = linearized(name).kernel(expected.x1, expected.x2, form=outputs)
    assert_near(actual, kernel_oracle(expected.j1, expected.j2, outputs))
    assert not actual.requires_grad


@every_animal
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.thinned(3)
def test_kernel_of_one_batch_is_exactly_symmetric(name: str, outputs: Outputs) -> None:
    expected = case(name)
    actual = linearized(name).kernel(expected.x1, form=outputs)
    assert_near(actual, kernel_oracle(expected.j1, form=outputs))
    assert torch.equal(actual, mirrored(actual, outputs))


@every_animal
@pytest.mark.parametrize("outputs", ["full", "trace"])
@pytest.mark.thinned(3)
def test_kernel_of_any_batch_size(name: str, outputs: Outputs) -> None:
    """Batches as large as a sequence, a number of heads or of channels must not be taken for them."""
    expected = case(name)
    for n, m in ((1, 4), (2, 6), (8, 5)):
        left, right = [i % 4 for i in range(n)], [i % 3 for i in range(m)]
        actual = linearized(name).kernel(rows(expected.x1, left), rows(expected.x2, right), form=outputs)
        assert_near(actual, kernel_oracle(expected.j1[left], expected.j2[right], outputs))


@every_animal
@pytest.mark.thinned(3)
def test_kernel_of_joined_batches_is_made_of_blocks(name: str) -> None:
    lin, expected = linearized(name), case(name)
    whole = lin.kernel(joined(expected.x1, expected.x2))
    assert_near(whole[:4, :, :4], lin.kernel(expected.x1))
    assert_near(whole[4:, :, 4:], lin.kernel(expected.x2))
    assert_near(whole[:4, :, 4:], lin.kernel(expected.x1, expected.x2))
    assert torch.equal(whole, whole.permute(2, 3, 0, 1))


@every_animal
def test_permuted_and_duplicated_examples(name: str) -> None:
    lin, expected, index = linearized(name), case(name), [3, 0, 0, 2]
    whole = lin.kernel(expected.x1)
    assert_near(lin.kernel(rows(expected.x1, index)), whole[index][:, :, index])
    twins = lin.kernel(rows(expected.x1, [1, 1]))
    assert_near(twins[0, :, 1], twins[0, :, 0])


@every_animal
def test_kernel_is_positive_semidefinite(name: str) -> None:
    expected = case(name)
    size = 4 * expected.animal.classes
    values = torch.linalg.eigvalsh(linearized(name).kernel(expected.x1).reshape(size, size))
    assert values[-1] > 0
    assert values[0] > -1e-12 * values[-1]


@every_animal
@pytest.mark.thinned(3)
def test_kernel_is_the_same_wherever_delta_is(name: str) -> None:
    lin, expected = linearize(name), case(name)
    before = lin.kernel(expected.x1)
    set_delta(lin, expected.direction())
    assert torch.equal(lin.kernel(expected.x1), before)


@every_animal
@pytest.mark.parametrize("outputs", ["full", "trace"])
@pytest.mark.thinned(2)
def test_gram_in_ragged_tiles_equals_the_kernel(name: str, outputs: Outputs) -> None:
    """Eleven examples against seven, in the small tiles that a small budget dictates."""
    expected = case(name)
    left, right = [i % 4 for i in range(11)], [i % 3 for i in range(7)]
    x1, x2 = rows(expected.x1, left), rows(expected.x2, right)
    gram = linnet.spectrum.gram(linearized(name), x1, x2, form=outputs)
    assert_near(gram, kernel_oracle(expected.j1[left], expected.j2[right], outputs))
    square = linnet.spectrum.gram(linearized(name), x1, form=outputs)
    assert_near(square, kernel_oracle(expected.j1[left], form=outputs))
    assert torch.equal(square, mirrored(square, outputs))


@pytest.mark.long
def test_kernel_of_a_loaded_first_batch_does_not_depend_on_what_was_asked_before() -> None:
    """Plans are made on the first batch; later batches of another size must not inherit its shapes."""
    for name in ("vit-mha", "encoder-batch-second", "bert-eager", "gru", "plain-arithmetic"):
        expected: Any = case(name)
        first = linearize(name)
        first.kernel(rows(expected.x1, [0]))
        second = linearize(name)
        second.kernel(rows(expected.x1, [0, 1, 2, 3, 0, 1]))
        for lin in (first, second):
            assert_near(lin.kernel(expected.x1), kernel_oracle(expected.j1))
