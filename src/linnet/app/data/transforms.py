"""Preprocessing: images to normalized tensors, table columns to unit scale.

A transform is a few numbers: it can be saved beside a fit (``dataclasses.asdict``) and applied to new data.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.params import integer, optional, refuse

PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "half": ((0.5,), (0.5,)),
    "none": ((0.0,), (1.0,)),
}
"""Mean and standard deviation of pixels in [0, 1], as the usual pretrained networks expect them."""

LUMA = (0.299, 0.587, 0.114)  # gray from RGB, ITU-R BT.601
_MOST_PIXELS = 1 << 28  # of an image being scaled; a strip of 1 x 1000 makes 50 million at 224
_CHUNK = 512  # images converted at a time


@dataclass(frozen=True)
class ImageTransform:
    """Bytes to normalized images: (pixel / 255 − mean) / std, resized and with the channels requested."""

    # mean of each channel, for pixels in [0, 1]; one number serves all channels
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)  # standard deviation of each channel
    # height and width in pixels: the shorter side is scaled to it and the middle is kept. None keeps the
    # images' own size
    size: int | None = None
    channels: int | None = None  # 3 repeats a gray image, 1 makes one gray; None keeps what there is

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))  # lists, when they come from JSON
        object.__setattr__(self, "std", tuple(map(float, self.std)))
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise InputError(
                f"mean {self.mean} and std {self.std} do not belong together",
                expected="one number each, or one for each of three channels",
            )
        if not all(map(math.isfinite, self.mean)) or not all(0 < s < math.inf for s in self.std):
            raise InputError(
                f"mean is {self.mean} and std {self.std}", expected="finite means, positive stds"
            )
        optional(integer, "size", self.size, remedy="try size=224")
        if self.channels not in (None, 1, 3):
            refuse("channels", self.channels, "1 or 3")

    def __call__(self, images: np.ndarray[Any, Any], dtype: torch.dtype = torch.float32) -> Tensor:
        """Convert images, (N, C', H', W')."""
        channels = self.channels or images.shape[-1]
        if len(self.mean) > channels:
            raise InputError(
                f"mean has {len(self.mean)} numbers, but the images have one channel",
                expected="one mean, or images of three channels",
                remedy="ask for three channels (channels=3), which repeats the gray one",
            )
        chunks = range(0, len(images), _CHUNK)
        height, width = (self.size, self.size) if self.size else images.shape[1:3]
        result = torch.empty(len(images), channels, height, width, dtype=dtype)
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
        for start in chunks:
            pixels = torch.from_numpy(images[start : start + _CHUNK]).permute(0, 3, 1, 2).float() / 255
            pixels = self._resize(_with_channels(pixels, channels))
            result[start : start + _CHUNK] = (pixels - mean) / std
        return result

    def _resize(self, pixels: Tensor) -> Tensor:
        """The shorter side scaled to the size requested, and the middle kept."""
        height, width = pixels.shape[2:]
        if self.size is None or (height, width) == (self.size, self.size):
            return pixels
        rows, columns = scaled_size(height, width, self.size)
        if (rows, columns) != (height, width):
            pixels = F.interpolate(
                pixels, (rows, columns), mode="bilinear", antialias=True, align_corners=False
            )
        top, left = (rows - self.size) // 2, (columns - self.size) // 2
        return pixels[:, :, top : top + self.size, left : left + self.size]


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Images (N, C, H, W) with one or three channels."""
    if pixels.shape[1] == channels:
        return pixels
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1)
    return (pixels * torch.tensor(LUMA).view(-1, 1, 1)).sum(1, keepdim=True)


def scaled_size(height: int, width: int, size: int) -> tuple[int, int]:
    """The size of an image once its shorter side is scaled."""
    shorter = min(height, width)
    rows, columns = round(height * size / shorter), round(width * size / shorter)
    if rows * columns > _MOST_PIXELS:
        raise DataError(
            f"an image of {height} x {width} pixels would become one of {rows} x {columns}",
            expected=f"at most {_MOST_PIXELS:,} pixels on the way to {size} x {size}",
            remedy="cut it into pieces, or scale to fewer pixels with size=",
        )
    return rows, columns


def image_transform(
    mean: str = "none", std: str | None = None, size: int | None = None, channels: int | None = None
) -> ImageTransform:
    """The transform for a mean and a standard deviation given by name or in numbers with commas."""
    if std is None and mean in PRESETS:
        return ImageTransform(*PRESETS[mean], size, channels)
    if std is None:
        close = difflib.get_close_matches(mean, PRESETS, n=1)
        raise InputError(
            f"mean is {mean!r} without a std",
            expected=f"one of {', '.join(PRESETS)}, or numbers for mean and std",
            remedy=f"did you mean {close[0]}?" if close else "give std= too; none takes pixels as they are",
        )
    means, stds = _numbers("mean", mean), _numbers("std", std)
    longest = max(len(means), len(stds))
    means, stds = (values * longest if len(values) == 1 else values for values in (means, stds))
    return ImageTransform(means, stds, size, channels)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise InputError(
            f"{name} is {text!r} where numbers are needed",
            expected="one number or three, with commas, for mean as for std",
            remedy=f"leave std out for a mean by name: {', '.join(PRESETS)}",
        ) from error


def require_default(transform: ImageTransform | None, why: str) -> None:
    """Refuse a transform of images for data that are none."""
    if transform not in (None, ImageTransform()):
        raise InputError(
            f"{why}, and is not scaled or normalized as images are",
            expected="images where a size, channels, a mean or a std is given",
            remedy="leave out size, channels, mean, std",
        )


@dataclass(frozen=True)
class Standardize:
    """Columns to zero mean and unit standard deviation, and back."""

    mean: tuple[float, ...]  # mean of each column
    # standard deviation of each column, in the column's own unit; 1 for a constant column
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Standardize:
        """The statistics of columns."""
        std = values.std(axis=0)
        # Rounding leaves a constant column with a deviation of some eps times its magnitude.
        constant = std <= 1e-12 * np.abs(values).max(axis=0)
        return cls(tuple(values.mean(axis=0)), tuple(np.where(constant, 1.0, std)))

    def __call__(self, values: np.ndarray[Any, Any], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standardize values, (N, D)."""
        return torch.from_numpy((values - np.array(self.mean)) / np.array(self.std)).to(dtype)

    def inverse(self, values: Tensor) -> Tensor:
        """Undo it, for predictions in the units of the data, (N, D)."""
        # values (N, D)
        return values * values.new_tensor(self.std) + values.new_tensor(self.mean)

    def inverse_variance(self, values: Tensor) -> Tensor:
        """Undo it for variances, (N, D)."""
        # values (N, D)
        return values * values.new_tensor(self.std).square()
