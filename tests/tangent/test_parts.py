"""Many images go through convolutions in parts that memory can be kept for, with the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.tangent import parts
from linnet.tangent.batch import Inputs, batch_size, masked_mean
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels
from linnet.tangent.parts import in_parts

IMAGES = torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
EACH = 4 * 3 * 8 * 8
FLAT = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))


def sizes_of(net: nn.Module, x: Any, size: int) -> tuple[list[int], Tensor]:
    """How many examples each part has, and the outputs."""
    found: list[int] = []

    def run(part: Any) -> Tensor:
        found.append(batch_size(part))
        return net(part["x"] if isinstance(part, dict) else part)  # type: ignore[no-any-return]

    return found, in_parts(net, run, x, size)


@pytest.mark.parametrize(("net", "expected"), [(CONVOLUTIONS, 7), (FLAT, 20)])
@pytest.mark.parametrize("named", [False, True])
def test_images_for_convolutions_come_in_smaller_parts(
    net: nn.Module, expected: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "IMAGES", 7 * EACH + 1)
    found, outputs = sizes_of(net, {"x": IMAGES, "keys": torch.zeros(43, 3, 8, 8)} if named else IMAGES, 20)
    assert found[:2] == [expected, expected]
    assert sum(found) == len(IMAGES)
    torch.testing.assert_close(outputs, net(IMAGES))


def test_an_image_larger_than_a_part_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "IMAGES", 1)
    assert sizes_of(CONVOLUTIONS, IMAGES, 20)[0] == [1] * 50


def test_small_images_and_other_inputs_are_taken_together() -> None:
    assert sizes_of(CONVOLUTIONS, IMAGES, 64)[0] == [50]
    rows = torch.randn(50, 192)
    assert sizes_of(nn.Linear(192, 5), rows, 20)[0] == [20, 20, 10]


class Attention(nn.Module):
    """Causal attention among positions that a mask shows; padding on the left hides whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.out = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        states, t = self.states(x)[:, None], x.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None]
        attended = nn.functional.scaled_dot_product_attention(states, states, states, seen)
        return self.out(attended[:, 0, -1])


def test_attention_by_the_fused_kernel_is_that_with_derivatives() -> None:
    torch.manual_seed(0)
    net = Attention().double()
    mask = (torch.arange(9) >= torch.randint(0, 8, (40, 1))).long()
    x = {"x": torch.randn(40, 9, 3, dtype=torch.float64), "attention_mask": mask}
    function = Functional(net)
    with differentiable_kernels(False):
        expected = function.flat(function.theta, x)
    kernels: list[str] = []

    def run(part: Inputs) -> Tensor:
        with torch.profiler.profile() as seen:
            found = function.flat(function.theta, part)
        kernels.extend(event.key for event in seen.key_averages())
        return found

    found = in_parts(net, run, x, 16)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert any("flash" in name for name in kernels)


def test_the_mean_of_what_a_mask_shows() -> None:
    mask = (torch.arange(9) >= torch.randint(0, 8, (40, 1))).long()
    states = torch.randn(40, 9, 3, dtype=torch.float64)
    each = torch.stack([row[shown.bool()].mean(0) for row, shown in zip(states, mask, strict=True)])
    torch.testing.assert_close(masked_mean(states, mask), each)
