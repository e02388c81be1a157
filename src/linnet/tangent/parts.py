"""Outputs of many examples, which go through a network some at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.modes import first_order
from linnet.tangent.sequences import Run, ignores_padding, lengths, shortened
from linnet.tree import tensors_in

# Bytes of images, as float32, that go through convolutions on a CPU at a time. Their results are up to eight
# times as large (EfficientNet-lite0 7.8, ResNet-50 5.3), and beyond 32 MB for one, or 64 MB in all, the C
# library gives memory back to the system, which clears it when the next part asks for it: that was two thirds
# of the time of EfficientNet-lite0 for 256 images of 96 x 96, and three quarters for those of 224 x 224.
IMAGES = 2 << 20


@first_order()
@torch.no_grad()
def in_parts(network: nn.Module, run: Run, x: Inputs, size: int) -> Tensor:
    """Outputs of many examples, at most ``size`` of them at a time."""
    length, size = lengths(x), min(size, _of_images(network, x))
    if length is None or not ignores_padding(network, run, x):
        return torch.cat([run(part) for part in split(x, size)])
    # the longest first: memory that does not suffice fails at once
    order = length.argsort(descending=True, stable=True)
    found = torch.cat([run(shortened(take(x, rows))) for rows in order.split(size)])
    return torch.empty_like(found).index_copy_(0, order.to(found.device), found)


def _of_images(network: nn.Module, x: Inputs) -> int:
    """How many examples a part may have: all, where they are no images, or not on a CPU."""
    n = batch_size(x)
    images = [t for t in tensors_in(x) if t.ndim == 4 and t.shape[0] == n and t.device.type == "cpu"]
    each = 4 * sum(math.prod(t.shape[1:]) for t in images)
    if n * each <= IMAGES or not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        return max(n, 1)
    return max(1, IMAGES // each)
