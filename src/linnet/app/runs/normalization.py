"""Input normalization: from the network's configuration, checked against its batch norm statistics.

The first batch norm that an image meets remembers mean μ and variance σ² of each channel from the training.
With m and v those of the images at hand, the distance of a normalization is the median over the channels of

    KL(N(m, v) ‖ N(μ, σ²)) = ½ (v/σ² + (m − μ)²/σ² − 1 − log(v/σ²)).

Other subjects move m and v too, so that a distance alone says little: the usual normalizations are tried on
the same images, and the one in use is doubted where another is much nearer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import PRESETS, ImageTransform, TaskData
from linnet.fitting.last_layer import PADDING
from linnet.integrations.pretrained import own_normalization, own_size
from linnet.report.numbers import number

SAMPLES = 64  # images that mean and variance are taken of
# On two residual networks, a DenseNet and an EfficientNet with sixteen sets of images each, the right
# normalization is doubted in none of 64 pairs; pixels in [0, 1] in its place are doubted in 53, and pixels
# from 0 to 255 in all. Another subject alone has brought another normalization 2.0 times as near.
FAR, TIMES = 0.4, 2.5
_RANGE_255 = ((0.0,), (1 / 255,))
_CANDIDATES = {**PRESETS, "0 --std 0.00392157": _RANGE_255}
UNKNOWN = (
    "nothing says how images were normalized when the network was trained: pixels in [0, 1] are taken as "
    "they are; give --mean imagenet, half, cifar or numbers if it learned from others, or --mean none"
)


class _Seen(Exception):
    """Mean and variance of the channels that a batch norm was given."""


@torch.no_grad()
def distance(model: nn.Module, x: Tensor) -> float | None:
    """Distance of images from those that a network's first batch norm was trained on."""
    # x (N, C, H, W)
    norms = [
        layer for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_var is not None
    ]  # fmt: skip

    def stop(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0].transpose(0, 1).flatten(1).double()
        raise _Seen(layer, values.mean(1), values.var(1, correction=0))

    hooks = [layer.register_forward_pre_hook(stop) for layer in norms]
    try:
        if norms:
            model(x)
    except _Seen as seen:
        layer, mean, var = seen.args
        scale = layer.running_var.double() + layer.eps
        ratio = (var + layer.eps) / scale
        shift = (mean - layer.running_mean.double()).square() / scale
        return float((0.5 * (ratio + shift - 1 - ratio.log())).median())
    finally:
        for hook in hooks:
            hook.remove()
    return None


def normalized(task: TaskData, model: nn.Module, own: bool) -> TaskData:
    """The data as a network takes them; remarks on images normalized unlike those of its training."""
    transform = task.transform
    if not isinstance(transform, ImageTransform):
        token = getattr(model, PADDING, None)
        if token is None or not (task.train.x == token).any():
            return task
        told = [f"token {token} is padding, as the network's configuration says, and is masked"]
        return replace(task, findings=(*task.findings, *told))
    known = own_normalization(model)
    told = []
    if known is not None:
        mean, std = _for_channels(known[:2], transform.channels or task.train.source.sample_shape[-1])
        said = f"mean {_shown(mean)} and std {_shown(std)}, as {known[2]} says"
        if own:
            transform = replace(transform, mean=mean, std=std)
            told.append(f"images are normalized by {said}")
        elif (transform.mean, transform.std) != (mean, std):
            told.append(
                f"images are normalized by mean {_shown(transform.mean)} and std {_shown(transform.std)}, "
                f"but the network was trained with {said}; leave --mean out to take these"
            )
    else:
        told += _doubt(task, model, transform, own)
    told += _size_remark(task, model, transform)
    return replace(task, transform=transform, findings=(*task.findings, *told))


def _size_remark(task: TaskData, model: nn.Module, transform: ImageTransform) -> list[str]:
    """A remark where nobody chose a size, and the images have another than those of the training."""
    known = own_size(model)
    if known is None or transform.size is not None:
        return []
    size, said = known
    height, width = task.train.source.sample_shape[:2]
    if (height, width) == (size, size):
        return []
    return [
        f"images are taken at their own {height} x {width} pixels, but the network was trained at {size} x "
        f"{size}, as {said} says; --size {size} scales them"
    ]


def _for_channels(
    known: tuple[tuple[float, ...], tuple[float, ...]], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation for images of so many channels; gray ones take the averages."""
    mean, std = known
    if channels == 1 and len(mean) > 1:
        return (float(np.mean(mean)),), (float(np.mean(std)),)
    return mean, std


def _doubt(task: TaskData, model: nn.Module, transform: ImageTransform, own: bool) -> list[str]:
    """A remark where nothing says how images were normalized, and another way suits the network better."""
    rows = np.unique(np.linspace(0, len(task.train) - 1, SAMPLES).astype(int))
    images, weight = task.train.x[rows], next(model.parameters(), torch.zeros(0))
    try:
        now, others = [
            {
                name: distance(model, form(images, weight.dtype).to(weight.device))
                for name, form in forms.items()
            }
            for forms in ({"": transform}, _alternatives(transform, images.shape[-1]))
        ]
    except Exception:  # a network that does not take these images: what runs it next says so
        return []
    at = now[""]
    if at is None:
        colored = (transform.channels or images.shape[-1]) == 3  # gray networks mostly take plain pixels
        return [UNKNOWN] if own and colored else []
    name, least = min(((name, d) for name, d in others.items() if d is not None), key=lambda pair: pair[1])
    if at < FAR or at < TIMES * least:
        return []
    return [
        f"images seem to be normalized unlike those that the network was trained on: they do not match "
        f"its training statistics (mismatch {number(at, 2)}; with --mean {name} {number(least, 2)})"
    ]


def _alternatives(transform: ImageTransform, channels: int) -> dict[str, ImageTransform]:
    """The usual normalizations, for images of these channels."""
    channels = transform.channels or channels
    every = {name: _for_channels(values, channels) for name, values in _CANDIDATES.items()}
    return {name: replace(transform, mean=mean, std=std) for name, (mean, std) in every.items()}


def _shown(values: tuple[float, ...]) -> str:
    """Numbers for people."""
    return ", ".join(f"{value:g}" for value in values)
