"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from linnet.errors import DependencyError


def bundled_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """1797 handwritten digits of 8 × 8 pixels, from scikit-learn; nothing is downloaded.

    Returns:
        Images uint8 (1797, 8, 8) with values 0 to 255, and labels int64 (1797,) from 0 to 9.

    Raises:
        DependencyError: scikit-learn is not installed, or does not work.

    Source:
        E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    try:
        from sklearn.datasets import load_digits
    except Exception as error:  # a package that is there but broken raises anything
        raise DependencyError(
            f"scikit-learn cannot be imported ({type(error).__name__}: {str(error).splitlines()[0]})",
            expected="scikit-learn, whose digits the demo uses",
            remedy="pip install 'linnet[sklearn]'",
        ) from error
    digits = load_digits()
    images = np.rint(np.asarray(digits.images) * (255 / 16)).astype(np.uint8)
    return images, np.asarray(digits.target, dtype=np.int64)
