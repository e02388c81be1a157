"""Locates the data sets of the experiments and of some tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from linnet.errors import DataError

_CHECKOUT = Path(__file__).resolve().parents[1]


def find_data_dir(data_dir: str | os.PathLike[str] | None = None, require: Sequence[str] = ()) -> Path:
    """Find the folder of data sets.

    It is the argument, else the environment variable ``LINNET_DATA``, else ``../shared/data`` beside the
    checkout.

    Args:
        data_dir: The folder, when the user has named it (``--data-dir``).
        require: Files that must lie in it.

    Returns:
        The folder.

    Raises:
        DataError: The folder or a required file is missing; the error says which and where it was looked for.

    Example:
        >>> find_data_dir("/nowhere", require=["mnist.npz"])
        Traceback (most recent call last):
        linnet.errors.DataError: there is no folder /nowhere (from --data-dir). ...
    """
    named = [(data_dir, "--data-dir"), (os.environ.get("LINNET_DATA") or None, "LINNET_DATA")]
    default = (_CHECKOUT.parent / "shared" / "data", "../shared/data beside the checkout")
    place, origin = next(((Path(place), origin) for place, origin in named if place is not None), default)
    remedy = "name the folder with --data-dir or in the environment variable LINNET_DATA"
    if not place.is_dir():
        raise DataError(f"there is no folder {place} (from {origin})", "the folder of data sets", remedy)
    missing = [name for name in require if not (place / name).exists()]
    if missing:
        raise DataError(f"{', '.join(missing)} is not in {place} (from {origin})", "all files needed", remedy)
    return place
