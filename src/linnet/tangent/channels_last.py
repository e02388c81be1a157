"""Passes over images whose channels are side by side in memory, which CPUs convolve and pool faster.

Only strides change, and operations pass them on: the numbers are those of the plain pass up to rounding. It
is used where the outputs and what the last layer reads are wanted, and no derivative goes further back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linnet.tangent.batch import Inputs, map_tensors, tensors_in
from linnet.tangent.functional import STRIDES_KEPT, Functional
from linnet.tangent.trace import Trace, trace

KEY = "channels last"


def channels_last(x: Tensor) -> Tensor:
    """Images with their channels last in memory, also where there is one; other tensors as they are."""
    if not _is_image(x):
        return x
    _, c, h, w = x.shape
    # one channel lies in memory as if it were first: only strides say that it is last
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, w * c, c))


def forward_trace(function: Functional, x: Inputs) -> Trace:
    """A traced pass, with channels last where there are images and convolutions and the network runs so."""
    if not _helps(function, x):
        return trace(function, x)
    kept = STRIDES_KEPT.set(True)
    try:
        return trace(function, map_tensors(channels_last, x))
    except RuntimeError:  # a view of what is no longer in one piece
        function.cache[KEY] = False
    finally:
        STRIDES_KEPT.reset(kept)
    return trace(function, x)


def _helps(function: Functional, x: Inputs) -> bool:
    """Whether convolutions may see images, on a CPU."""
    if function.device.type != "cpu" or not any(map(_is_image, tensors_in(x))):
        return False
    if KEY not in function.cache:
        function.cache[KEY] = any(isinstance(module, nn.Conv2d) for module in function.model.modules())
    found: bool = function.cache[KEY]
    return found


def _is_image(x: Tensor) -> bool:
    """Whether a tensor may hold images."""
    return x.ndim == 4 and x.dtype == torch.float32
