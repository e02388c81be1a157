"""Images in folders, one folder per class.

Classes and files come in the order of torchvision's ImageFolder (sorted folders; files sorted within each),
save that hidden files are left out. Large JPEGs are decoded at a reduced scale (Pillow's ``draft``), and the
camera's orientation tag is applied.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from linnet import params
from linnet.app.data.task import TESTED, TRAINED, SampleSet, TaskData, check_classes
from linnet.app.data.transforms import ImageTransform, scaled_size
from linnet.errors import DataError, LinnetError
from linnet.files import special_file
from linnet.progress import track
from linnet.shown import some

Array = np.ndarray[Any, Any]
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
_DEEP_MODES = ("I", "F")  # more than 8 bits a channel, which conversion would clip
# Pillow knows others, of which some start programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
_MOST_PIXELS = (
    178_956_970  # Pillow's own limit: half a gigabyte as RGB, more than a 150-megapixel camera takes
)
_LARGE_PIXELS = 1 << 25  # larger ones are decoded one at a time, so that the threads hold 2 GB at most
_LARGE = Lock()
_CHUNK = 256  # images decoded between two reports of progress
NAMED = "put the images of each class into a folder that is named for the class"


def read_folder(
    root: str | os.PathLike[str],
    transform: ImageTransform | None = None,
    seed: int = 0,
    damaged: str = "error",
) -> TaskData:
    """Read a classification from folders of images."""
    # Either `root/train/CLASS/...` with `root/test` or `root/val` beside it, or `root/CLASS/...`, of which a
    # part of each class is held out. Images are named by their path below `root`, and decoded when they are
    # first used.
    root = Path(root)
    params.choice("damaged", damaged, ("error", "skip"))
    transform = transform or ImageTransform()
    trained, held = split_folders(root)
    classes = _class_folders(trained)
    train, findings = _list_part(root, trained, classes, transform, damaged)
    if held is None:
        train, test = train.split(True, seed)
    else:
        _check_same_classes(held, classes)
        test, more = _list_part(root, held, classes, transform, damaged)
        findings += more
    findings += check_classes(train.y, classes)
    return TaskData(train, test, classes, transform, findings=tuple(findings))


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """The folders to train and to test on; one is the root itself where no split was made."""
    train = root / TRAINED
    if not train.is_dir() or not _folders(train):  # a class may be called "train"
        return root, None
    return train, next((root / name for name in TESTED if (root / name).is_dir()), None)


def _folders(folder: Path) -> list[str]:
    """The visible folders in a folder, sorted."""
    return sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")
    )


def _class_folders(folder: Path) -> tuple[str, ...]:
    """The classes: one a folder."""
    classes = _folders(folder)
    if len(classes) < 2:
        found = f"one class folder only, {classes[0]!r}" if classes else "no class folders"
        raise DataError(f"{folder} has {found}", "one folder of images for each class, at least two", NAMED)
    return tuple(classes)


def _check_same_classes(folder: Path, classes: tuple[str, ...]) -> None:
    """Require that nothing is tested that was not trained."""
    unknown = [name for name in _folders(folder) if name not in classes]
    if unknown:
        raise DataError(
            f"{folder} has classes that are not in train: {some(unknown)}", f"among {some(classes)}"
        )


def _list_part(
    root: Path, folder: Path, classes: tuple[str, ...], transform: ImageTransform, damaged: str
) -> tuple[SampleSet, list[str]]:
    """The images below a folder, not yet decoded, and what was noticed."""
    found = [(label, file) for label, name in enumerate(classes) for file in files_below(folder / name, root)]
    names = [file.relative_to(root).as_posix() for _, file in found]
    is_image = [file.suffix.lower() in SUFFIXES for _, file in found]
    ids = tuple(compress(names, is_image))
    if not ids:
        raise DataError(f"{folder} has no images", f"files ending in {', '.join(SUFFIXES)}")
    others = [name for name, image in zip(names, is_image, strict=True) if not image]
    labels = np.array([label for label, _ in compress(found, is_image)])
    images = ImageFiles(root, ids, transform)
    part = SampleSet(images, np.arange(len(ids)), labels, ids)
    faults = images.faults() if damaged == "skip" else {}
    if len(faults) == len(ids):
        raise DataError(f"no image in {folder} can be decoded, first {ids[0]} ({faults[ids[0]]})")
    if faults:
        good = np.array([row for row, name in enumerate(ids) if name not in faults])
        kept = tuple(ids[row] for row in good)
        part = SampleSet(ImageFiles(root, kept, transform), np.arange(len(kept)), labels[good], kept)
    left_out = {"no images": others, "damaged": list(faults)}
    return part, [f"left out, {why}: {some(names)}" for why, names in left_out.items() if names]


def files_below(folder: Path, root: Path) -> list[Path]:
    """The visible files at any depth, in ImageFolder's order."""
    # A folder that is reached twice through links is read once, so links in a circle end.
    home = os.path.realpath(root)
    found: list[tuple[str, list[str]]] = []
    pending, seen = [str(folder)] if folder.is_dir() else [], set()
    while pending:
        at = pending.pop()
        real = os.path.realpath(at)
        _check_inside(at, real, home)
        if real in seen:
            continue
        seen.add(real)
        names = []
        with os.scandir(at) as entries:
            for entry in entries:
                if entry.is_symlink():
                    _check_inside(entry.path, os.path.realpath(entry.path), home)
                if entry.is_dir():
                    pending.append(entry.path)
                elif not entry.name.startswith("."):
                    names.append(entry.name)
        found.append((at, sorted(names)))
        pending.sort(reverse=True)
    return [Path(at, name) for at, names in sorted(found) for name in names]


def _check_inside(link: str, target: str, home: str) -> None:
    """Require that a link leads to a place in a folder."""
    if target != home and not target.startswith(os.path.join(home, "")):
        raise DataError(
            f"{link} is a link that leads out of the data folder, to {target}",
            expected="a folder that holds its own files",
            remedy="copy the folder with what its links lead to (cp -rL)",
        )


UNDAMAGED = "replace or remove these files; linnet adapt, and it alone, leaves them out with damaged='skip'"


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in files, decoded when they are read."""

    root: Path  # the folder that the names start from
    names: tuple[str, ...]  # the files' paths below it
    transform: ImageTransform  # says to which size and to how many channels to decode
    remedy: str = "scale them to one size, as linnet adapt does with --size 224"  # where their sizes differ

    @cached_property
    def sample_shape(self) -> tuple[int, ...]:
        """Height, width and channels of the first image, as decoded."""
        return tuple(self.read(np.arange(1)).shape[1:])

    def read(self, indices: Array) -> Array:
        """Decode images, (K, H, W, C)."""
        names = [self.names[index] for index in indices]
        result: Array | None = None
        faults: dict[str, str] = {}
        for row, image in enumerate(self._decode_all(names)):
            if isinstance(image, Exception):
                faults[names[row]] = _fault(image)
                continue
            if result is None:
                first = names[row]
                result = np.empty((len(names), *image.shape), np.uint8)
            if image.shape != result.shape[1:]:
                raise DataError(
                    f"images differ in size: {names[row]} has {_pixels(image.shape)} pixels, "
                    f"{first} has {_pixels(result.shape[1:])}",
                    expected="images of one size",
                    remedy=self.remedy,
                )
            result[row] = image
        if faults or result is None:
            _refuse(self.root, len(names), faults)
        return result

    def faults(self) -> dict[str, str]:
        """Decode every file and forget the pixels."""
        images = zip(self.names, self._decode_all(list(self.names)), strict=True)
        return {name: _fault(image) for name, image in images if isinstance(image, Exception)}

    def _decode_all(self, names: list[str]) -> Iterator[Array | Exception]:
        """Each image's bytes, or the exception that decoding it raised."""
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for start in track(range(0, len(names), _CHUNK), f"decoding {len(names)} images"):
                yield from pool.map(self._decode, names[start : start + _CHUNK])

    def _decode(self, name: str) -> Array | Exception:
        """One image's bytes (H, W, C), or the exception that decoding it raised."""
        try:
            return decode_image(self.root / name, self.transform)
        except Exception as error:  # what decoders raise on damaged bytes has no common type
            return error


def check_images(task: TaskData) -> None:
    """Read the header of every image file of a task, so that nothing is missing hours later."""
    # Decoding them takes many times as long.
    sources = [(part.source, part.indices) for part in (task.train, task.test)]
    files = [
        (one.root, one.names[row]) for one, rows in sources if isinstance(one, ImageFiles) for row in rows
    ]
    faults = {}
    for root, name in track(files, f"reading the headers of {len(files)} images"):
        try:
            with _opened(root / name):
                pass
        except Exception as error:  # what decoders raise on damaged bytes has no common type
            faults[name] = _fault(error)
    if faults:
        _refuse(files[0][0], len(files), faults)


def _fault(error: Exception) -> str:
    """What is wrong with a file, in words where they are linnet's own."""
    return error.what if isinstance(error, LinnetError) else f"{type(error).__name__}: {error}"


def _refuse(root: Path, count: int, faults: dict[str, str]) -> NoReturn:
    """Raise the error for files that are no images."""
    named = some([f"{name} ({fault})" for name, fault in faults.items()])
    raise DataError(
        f"{len(faults)} of {count} images in {root} cannot be decoded: {named}",
        expected="complete images of 8 bits a channel",
        remedy=UNDAMAGED,
    )


def _pixels(shape: tuple[int, ...]) -> str:
    """Height and width for people."""
    return f"{shape[0]}x{shape[1]}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Pillow image whose header says that it can be decoded; its pixels are not read yet."""
    from PIL import Image

    status = path.stat().st_mode
    if not stat.S_ISREG(status):  # opening a pipe would wait for a writer
        raise DataError(f"it is {special_file(status)}")
    with Image.open(path, formats=_FORMATS) as image:
        if image.mode.startswith(_DEEP_MODES):
            deep = f"it has more than 8 bits a channel (mode {image.mode})"
            raise DataError(f"{deep}: save it with 8 bits, scaled as the network saw such images")
        yield image


def decode_image(path: Path, transform: ImageTransform) -> Array:
    """Decode one image to the size and channels that a transform asks for, (H, W, C)."""
    from PIL import ImageOps

    mode = "L" if transform.channels == 1 else "RGB"
    with _opened(path) as image:
        if transform.size is not None:
            image.draft(
                mode, (2 * transform.size, 2 * transform.size)
            )  # at least this size, for a clean resize
        pixels = image.width * image.height
        if pixels > _MOST_PIXELS:
            raise DataError(f"it has {pixels:,} pixels, more than {_MOST_PIXELS:,}")
        with _LARGE if pixels > _LARGE_PIXELS else nullcontext():
            upright = ImageOps.exif_transpose(image)
            if "transparency" in upright.info:
                upright = upright.convert("RGBA")
            upright = upright.convert(mode)
    if transform.size is not None:
        upright = _scale_and_crop(upright, transform.size)
    return np.asarray(upright).reshape(upright.height, upright.width, -1)


def _scale_and_crop(image: Any, size: int) -> Any:
    """A Pillow image with its shorter side scaled and its middle kept."""
    from PIL import Image

    rows, columns = scaled_size(image.height, image.width, size)
    scaled = image.resize((columns, rows), Image.Resampling.BILINEAR, reducing_gap=2.0)
    top, left = (rows - size) // 2, (columns - size) // 2
    return scaled.crop((left, top, left + size, top + size))
