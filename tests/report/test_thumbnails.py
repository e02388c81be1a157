"""Thumbnails: sizes, crispness, encodings."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from linnet.report.tiles import thumbnail


def decoded(address: str) -> Image.Image:
    """The picture behind an address."""
    head, content = address.split(",", 1)
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3), (8, 8, 4)])
def test_tiny_pictures_keep_every_pixel(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    shown = np.asarray(decoded(thumbnail(image, 100)))
    assert np.array_equal(shown, image.squeeze())  # the page enlarges it, as squares


@pytest.mark.parametrize(
    ("height", "width", "size"), [(300, 200, (85, 128)), (20, 900, (128, 3)), (100, 90, (90, 100))]
)
def test_size_follows_the_longer_side(height: int, width: int, size: tuple[int, int]) -> None:
    assert decoded(thumbnail(np.zeros((height, width, 3), dtype=np.uint8))).size == size


def test_pixels_sets_the_size() -> None:
    image = np.zeros((50, 50), dtype=np.uint8)
    assert decoded(thumbnail(image, 25)).size == (25, 25)
    assert decoded(thumbnail(image, 200)).size == (50, 50)


def test_photographs_stay_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3)).astype(np.uint8)
    assert thumbnail(noise).startswith("data:image/jpeg")
    flat = np.full((256, 256, 3), 80, dtype=np.uint8)
    assert thumbnail(flat).startswith("data:image/png")
    opaque = np.dstack([noise, np.full((256, 256), 255, dtype=np.uint8)])
    assert thumbnail(opaque).startswith("data:image/jpeg")
    glass = np.dstack([noise, np.full((256, 256), 9, dtype=np.uint8)])
    assert thumbnail(glass).startswith("data:image/png")  # JPEG has no transparency
