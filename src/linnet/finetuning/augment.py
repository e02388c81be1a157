"""Augmentation of images as tensors: center crops, random crops and resized crops, with random flips.

Every random number comes from a generator, so that a training run repeats to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import InputError
from linnet.linalg.random import Seed, make_generator
from linnet.params import choice, flag, integer, number, optional
from linnet.tangent.batch import Inputs, require_dense
from linnet.tree import node

KINDS = ("none", "center", "random-crop", "resized-crop")
MARGIN = 8 / 7  # images are resized to 256 pixels and cropped to 224


@node()
@dataclass(frozen=True)
class Augmentation:
    """Transforms of images for training and for prediction.

    Args:
        kind: ``"none"``; ``"center"``: resize by 8/7 and keep the middle; ``"random-crop"``: resize
            likewise, crop anywhere and flip half of the images; ``"resized-crop"``: crop a random share at a
            random aspect, resize and flip. Predictions are made from center crops (as they are for
            ``"none"``).
        size: Height and width of the result in pixels; by default those of the images.
        flip: Whether random kinds mirror half of the images left to right.
        area: Smallest share of the image's area that ``"resized-crop"`` takes.

    Raises:
        InputError: If an argument has a value that does not work.

    Source:
        Achille et al., CVPR 2021, section A.2 (data augmentation).

    Example:
        >>> crop = Augmentation("random-crop")
        >>> crop(torch.ones(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape, crop.is_random
        (torch.Size([2, 3, 32, 32]), True)
    """

    kind: str = "none"
    size: int | None = None
    flip: bool = True
    area: float = 0.08

    def __post_init__(self) -> None:
        choice("augmentation", self.kind, KINDS, 'pass "none" for data that are no images')
        optional(integer, "size", self.size, remedy="try 224")
        flag("flip", self.flip)
        number("area", self.area, above=0, most=1, remedy="leave area= out for 0.08")

    @property
    def is_random(self) -> bool:
        """Whether two passes give different images."""
        return self.kind in ("random-crop", "resized-crop")

    @property
    def evaluation(self) -> Augmentation:
        """The transform for prediction."""
        return self if self.kind == "none" else replace(self, kind="center")

    def __call__(self, x: Inputs, seed: Seed = None) -> Inputs:
        """Transform a batch.

        Args:
            x: Images (N, C, H, W); anything for ``"none"``.
            seed: Source of randomness, a generator on the CPU or a number; needed for random kinds.

        Returns:
            Images (N, C, size, size), or x itself.

        Raises:
            InputError: If x are no images, or randomness is needed and there is none.
        """
        if self.kind == "none":
            return x
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            kind = f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"x is {kind} with augmentation={self.kind!r}",
                expected="images as one float tensor (N, C, H, W)",
                remedy='leave augmentation= out, or pass "none"',
            )
        height, width = (self.size, self.size) if self.size else (x.shape[2], x.shape[3])
        if self.kind == "center":
            return _center(_enlarged(x, height, width), height, width)
        generator = make_generator(seed)
        require_dense(x, "x")
        if generator is None:
            raise InputError(
                f"augmentation={self.kind!r} without a seed",
                expected="a source of randomness",
                remedy="pass seed=0",
            )
        if self.kind == "random-crop":
            x = _crop_anywhere(_enlarged(x, height, width), height, width, generator)
        else:
            x = _resized_crops(x, height, width, self.area, generator)
        return _flipped(x, generator) if self.flip else x


def _resize(x: Tensor, height: int, width: int) -> Tensor:
    """Images of another size, bilinear, smoothed where they shrink."""
    if x.shape[2:] == (height, width):
        return x
    shrinks = height < x.shape[2] or width < x.shape[3]
    return F.interpolate(x, (height, width), mode="bilinear", antialias=shrinks, align_corners=False)


def _enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """The images so resized that they cover 8/7 of the result's size in both directions."""
    factor = max(math.ceil(height * MARGIN) / x.shape[2], math.ceil(width * MARGIN) / x.shape[3])
    return _resize(x, round(x.shape[2] * factor), round(x.shape[3] * factor))


def _center(x: Tensor, height: int, width: int) -> Tensor:
    """The middle."""
    top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
    return x[:, :, top : top + height, left : left + width]


def _crop_anywhere(x: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """A crop at a random position of each image."""
    n = x.shape[0]
    tops = torch.randint(x.shape[2] - height + 1, (n,), generator=generator)
    lefts = torch.randint(x.shape[3] - width + 1, (n,), generator=generator)
    rows = (tops[:, None] + torch.arange(height)).to(x.device)
    columns = (lefts[:, None] + torch.arange(width)).to(x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    # an index on either side of the channel axis puts that axis last
    return x[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _resized_crops(x: Tensor, height: int, width: int, area: float, generator: torch.Generator) -> Tensor:
    """A random share of each image at a random aspect, resized."""
    h, w = x.shape[2:]
    crops = []
    for image in x.split(1):
        share, aspect, down, right = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        # area uniform in [area, 1], log aspect uniform in ±log(4/3)
        pixels = h * w * (area + (1 - area) * share)
        ratio = math.exp((2 * aspect - 1) * math.log(4 / 3))
        rows = min(max(round(math.sqrt(pixels / ratio)), 1), h)
        columns = min(max(round(math.sqrt(pixels * ratio)), 1), w)
        top, left = int(down * (h - rows + 1)), int(right * (w - columns + 1))
        crops.append(_resize(image[:, :, top : top + rows, left : left + columns], height, width))
    return torch.cat(crops)


def _flipped(x: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images mirrored left to right."""
    mirrored = (torch.rand(x.shape[0], generator=generator) < 0.5).to(x.device)
    return torch.where(mirrored[:, None, None, None], x.flip(3), x)
