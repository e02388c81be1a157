"""Plans of differentiation where gradients vanish on the examples that are looked at."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import linnet
from linnet.tangent.capture import capture


class FromZero(nn.Module):
    """A layer and a head of zeros; a strict one cannot run with any other head."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.first, self.head, self.strict = nn.Linear(3, 4), nn.Linear(4, 2), strict
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) to (N, 2)."""
        if self.strict and bool((self.head.weight != 0).any()):
            raise AssertionError("the head was to be zero")
        out: Tensor = self.head(self.first(x).relu())
        return out


def test_uses_below_a_head_of_zeros_are_proved_at_other_weights(float64: torch.dtype) -> None:
    net, x = FromZero(False), torch.randn(5, 3)
    function = linnet.linearize(net).function
    captured = capture(function, x)
    assert {use.sources for use in captured.uses} == {(name,) for name, _ in net.named_parameters()}
    (plan,) = function.cache.plans.values()
    assert not plan.unproven
    moved = function.moved({"head.weight": torch.randn(2, 4)}, plans=True)
    ours = capture(moved, x)
    rows = {name: ours.rows(name) for name in function.names}
    single = torch.func.jacrev(lambda theta: function(theta, x))(moved.theta)
    for name, jacobian in single.items():
        torch.testing.assert_close(rows[name], jacobian)


def test_weights_that_a_network_cannot_have_leave_them_unproven(float64: torch.dtype) -> None:
    function = linnet.linearize(FromZero(True)).function
    capture(function, torch.randn(5, 3))
    (plan,) = function.cache.plans.values()
    assert {sources for sources, _ in plan.unproven} == {("first.weight",), ("first.bias",)}
