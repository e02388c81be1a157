"""Data loaders: an image folder, an ``.npz`` archive or a table becomes a checked task."""

from __future__ import annotations

import os
from pathlib import Path

from linnet import params
from linnet.app.data.arrays import read_arrays
from linnet.app.data.folder import SUFFIXES, check_images, decode_image, read_folder
from linnet.app.data.table import read_table
from linnet.app.data.task import SampleSet, TaskData, draw_shots, split
from linnet.app.data.transforms import (
    PRESETS,
    ImageTransform,
    Standardize,
    image_transform,
    require_default,
)
from linnet.app.options import TEXTS, TaskOptions
from linnet.errors import InputError
from linnet.files import require_file, suggestion

__all__ = [
    "TABLE", "load_data", "kind_of", "read_task", "decode_image", "check_images",
    "TaskData",
    "ImageTransform", "Standardize", "image_transform", "PRESETS",
    "draw_shots", "split", "SampleSet",
]  # fmt: skip

TABLE, TABLES = "table", (".csv", ".tsv")  # the kind, and how its files end
SAVED_AS = "save the table as CSV in UTF-8"
OTHERS = {
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz"), "unpack it first"),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".parquet", ".feather", ".json", ".txt", ".dat"), SAVED_AS),
    **dict.fromkeys(SUFFIXES, "name the folder that it is in, or make one for it"),
}


def load_data(
    path: str | os.PathLike[str],
    transform: ImageTransform | None = None,
    seed: int = 0,
    target: str | None = None,
    damaged: str = "error",
) -> TaskData:
    """Read a task from a folder of images, an ``.npz`` archive or a table."""
    path = params.path("data", path)
    kind = kind_of(path)
    if target is not None and kind != TABLE:
        raise InputError(
            f"target is {target!r}, but {path} is no table", expected="target only with a .csv or .tsv file"
        )
    if kind == "folder":
        return read_folder(path, transform, seed, damaged)
    if kind == ".npz":
        return read_arrays(path, transform, seed)
    require_default(transform, f"{path} is a table")
    return read_table(path, target, seed)


def kind_of(path: Path) -> str:
    """What a path holds: a folder, an archive of arrays or a table."""
    if os.path.isdir(path):  # False for names that no file can have, where pathlib raises
        return "folder"
    kind = path.suffix.lower()
    if kind in (".npz", *TABLES):
        require_file(path, "data")
        return TABLE if kind in TABLES else kind
    is_there = os.path.exists(path)
    if is_there and path.suffix == TEXTS:
        raise InputError(
            f"data {path} has texts",
            expected="a folder of images, an .npz archive, or a table as .csv or .tsv",
            remedy="texts are taken by linnet adapt with a language model, and by the runs that it makes",
        )
    raise InputError(
        f"data {path} {'has an unknown kind' if is_there else 'does not exist'}",
        expected="a folder of images, an .npz archive, or a table as .csv or .tsv",
        remedy=OTHERS.get(kind, "check its ending") if is_there else suggestion(path),
    )


def read_task(options: TaskOptions) -> TaskData:
    """The whole task that a command names, its samples not read yet where they are files."""
    params.integer("seed", options.seed, least=0, most=2**63 - 1)
    mean = "none" if options.mean == "auto" and options.std is None else options.mean
    transform = image_transform(mean, options.std, options.size, options.channels)
    return load_data(
        options.data, transform, seed=options.seed, target=options.target, damaged=options.damaged
    )
