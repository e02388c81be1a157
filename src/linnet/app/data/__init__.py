"""Data loaders: an image folder, an ``.npz`` archive or a ``.csv`` table becomes a checked task."""

from __future__ import annotations

import os
from typing import Literal

from linnet import params
from linnet.app.data.arrays import read_arrays
from linnet.app.data.folder import check_images, decode_image, read_folder
from linnet.app.data.table import read_table
from linnet.app.data.task import SampleSet, TaskData, draw_shots, split_at_random, split_by_class
from linnet.app.data.transforms import (
    PRESETS,
    ImageTransform,
    Standardize,
    image_transform,
    require_default,
)
from linnet.app.options import TaskOptions
from linnet.errors import InputError
from linnet.files import require_file, suggestion

__all__ = [
    "load_data", "read_task", "read_folder", "read_arrays", "read_table", "decode_image", "check_images",
    "TaskData",
    "ImageTransform", "Standardize", "image_transform", "PRESETS",
    "draw_shots", "split_at_random", "split_by_class", "SampleSet",
]  # fmt: skip

KINDS = "a folder of images, an .npz archive or a .csv table"


def load_data(
    path: str | os.PathLike[str],
    transform: ImageTransform | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    target: str | None = None,
    damaged: str = "error",
    links: Literal["inside", "follow"] = "inside",
) -> TaskData:
    """Read a task from a folder of images, an ``.npz`` archive or a ``.csv`` table."""
    path = params.path("data", path)
    if target is not None and path.suffix.lower() != ".csv":
        raise InputError(
            f"target is {target!r}, but {path} is no table", expected="target only with a .csv file"
        )
    if path.suffix.lower() in (".npz", ".csv") and not os.path.exists(path):
        require_file(path, "data")
    if os.path.isdir(path):  # False for names that no file can have, where pathlib raises
        return read_folder(path, transform, seed, test_fraction, damaged, links)
    if path.suffix.lower() == ".npz":
        return read_arrays(path, transform, seed, test_fraction)
    if path.suffix.lower() == ".csv":
        require_default(transform, f"{path} is a table")
        return read_table(path, target, seed, test_fraction)
    if os.path.exists(path):
        raise InputError(f"data {path} has an unknown kind", expected=KINDS, remedy="check its ending")
    raise InputError(f"data {path} does not exist", expected=KINDS, remedy=suggestion(path))


def read_task(options: TaskOptions) -> TaskData:
    """The whole task that a command names, its samples not read yet where they are files."""
    mean = "none" if options.mean == "auto" and options.std is None else options.mean
    transform = image_transform(mean, options.std, options.size, options.channels)
    return load_data(
        options.data, transform, seed=options.seed, target=options.target, damaged=options.damaged
    )
