"""Small pictures as ``data:`` addresses, so that the page needs no other file."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np

from linnet.errors import InputError
from linnet.plots.measures import Array

if TYPE_CHECKING:
    from PIL import Image

# A photograph of more bytes as PNG is sent as JPEG instead: a page holds a hundred of them.
_LARGE_PNG = 9000
_QUALITY = 84


def thumbnail(image: Array, pixels: int = 128, png: int = _LARGE_PNG) -> str:
    """One picture as a ``data:`` address, of at most the given size."""
    # Large pictures are reduced with a Lanczos filter, others stay as they are: the page enlarges them. The
    # encoding is PNG, or JPEG where a PNG would be large (photographs).
    if pixels < 1:
        raise InputError(f"pixels is {pixels}", expected="a positive number", remedy="pass pixels=128")
    picture = _resized(_picture(np.asarray(image)), pixels)
    exact = _encode(picture, "PNG", optimize=True)
    if len(exact) <= png or picture.mode == "RGBA":
        return _address("png", exact)
    jpeg = _encode(picture, "JPEG", quality=_QUALITY, optimize=True)
    return _address("jpeg", jpeg) if len(jpeg) < len(exact) else _address("png", exact)


def _picture(image: Array) -> Image.Image:
    """The array as a Pillow image."""
    from PIL import Image

    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    known = image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in (3, 4))
    if image.dtype != np.uint8 or not known or 0 in image.shape:
        raise InputError(
            f"image has shape {tuple(image.shape)} and type {image.dtype}",
            expected="uint8 of shape (H, W) or (H, W, C) with 1, 3 or 4 channels",
            remedy="scale to 0...255, convert to uint8 and move the channels last",
        )
    if image.shape[-1] == 4 and image.ndim == 3 and (image[..., 3] == 255).all():
        image = image[..., :3]
    return Image.fromarray(np.ascontiguousarray(image))


def _resized(picture: Image.Image, pixels: int) -> Image.Image:
    """The picture reduced, or as it is."""
    from PIL import Image

    longest = max(picture.size)
    if longest <= pixels:
        return picture
    scale = pixels / longest
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _encode(picture: Image.Image, kind: str, **options: int) -> bytes:
    """The bytes of the picture's file."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _address(kind: str, content: bytes) -> str:
    """The ``data:`` address of a file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
