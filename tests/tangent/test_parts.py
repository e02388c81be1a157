"""Many images go through convolutions in parts that memory can be kept for, with the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.tangent import parts
from linnet.tangent.batch import batch_size
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
