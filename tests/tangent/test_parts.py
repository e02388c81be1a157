"""Many examples go through a network in parts that its results leave room for, with the same outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.tangent import parts
from linnet.tangent.batch import batch_size
from linnet.tangent.parts import FEW, MORE, in_parts

X = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)).double()


class Wide(nn.Module):
    """A layer of ``width`` numbers an example on the way, beside a matrix that is made anew in every pass."""

    def __init__(self, width: int, made: int = 1) -> None:
        super().__init__()
        self.made, self.layer = made, nn.Linear(4, width).double()

    def forward(self, x: Tensor) -> Tensor:
        """The mean over the width."""
        return self.layer(x).mean(1, keepdim=True) + torch.ones(self.made, dtype=x.dtype).sum()


def sizes_of(net: nn.Module, size: int) -> tuple[list[int], Tensor]:
    """How many examples each part has, and the outputs."""
    found: list[int] = []

    def run(x: Tensor) -> Tensor:
        found.append(batch_size(x))
        return net(x)  # type: ignore[no-any-return]

    return found, in_parts(net, run, X, size)


@pytest.mark.parametrize(("width", "expected"), [(1000, 20), (100_000, 1), (10, 64)])
def test_parts_are_as_large_as_the_largest_result_allows(
    width: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "KEPT", 20 * 8 * 1000)
    net = Wide(width)
    found, outputs = sizes_of(net, 64)
    assert found[:3] == [FEW, MORE, expected]
    assert sum(found) == len(X)
    torch.testing.assert_close(outputs, net(X))


def test_what_every_pass_makes_is_no_example_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KEPT", 1000)
    found, _ = sizes_of(Wide(1, made=10_000), 64)
    assert found == [FEW, MORE, 64, 26]


def test_few_examples_and_compiled_networks_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KEPT", 1)
    assert sizes_of(Wide(9), 8)[0] == [8] * 12 + [4]
    net = Wide(9)
    net.layer._compiled_call_impl = net.layer.forward
    assert sizes_of(net, 64)[0] == [64, 36]


class Refused(TorchDispatchMode):
    """What some operations say under a mode that they do not know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_operations_that_refuse_to_be_looked_at_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_Largest", Refused)
    net = Wide(9)
    found, outputs = sizes_of(net, 64)
    assert found == [FEW, FEW, MORE, MORE, 64, 26]
    torch.testing.assert_close(outputs, net(X))


def test_the_error_of_a_network_is_its_own() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        in_parts(Wide(9), fails, X, 64)
