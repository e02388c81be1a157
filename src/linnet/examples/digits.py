"""Handwritten digits of 8 × 8 pixels; source and license of the data are in NOTICE.md beside this file."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

_LARGEST = 16  # the value of a pixel that is all ink


def load_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """1,797 handwritten digits, which come with linnet: nothing is downloaded, no other package is needed.

    Returns:
        Images uint8 (1797, 8, 8) with values 0 to 255, and labels int64 (1797,) from 0 to 9.

    Source:
        E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
        1998, https://doi.org/10.24432/C50P49, license CC BY 4.0.

    Example:
        >>> images, labels = load_digits()
        >>> images.shape, labels[:5].tolist()
        ((1797, 8, 8), [0, 1, 2, 3, 4])
    """
    place = resources.files("linnet.examples").joinpath("digits.npz")
    with place.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    return np.rint(images * (255 / _LARGEST)).astype(np.uint8), labels.astype(np.int64)
