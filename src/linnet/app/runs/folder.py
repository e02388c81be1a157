"""A run folder: the files that predict, explain, forget and update need.

``model.safetensors``       the network, its random heads included
``nested-fit.safetensors``  the solved fit, training inputs included
``samples.safetensors``     the training samples as people see them
``run.json``                how to build the network, what the data were, and the checksums of the above

Each file is written whole or not at all, and ``run.json`` last: a folder without it is no finished run.
"""

from __future__ import annotations

import hashlib
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet import params
from linnet.app.data import ImageTransform, Standardize, TaskData, load_data
from linnet.app.data.columns import Table
from linnet.app.models import apply_weights, load_model
from linnet.app.options import RunOptions
from linnet.app.runs.place import RECORD, REPLAY, check_free, clear_run, writing
from linnet.app.runs.trust import absolute_spec, check_run, remember_run
from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.files import load as load_tree
from linnet.files import read_json, save, write_json
from linnet.fitting.last_layer import Appended
from linnet.machine import find_device
from linnet.nested.features import with_random_heads
from linnet.nested.nested_fit import NestedFit
from linnet.report.reading import Fit, temperatures_of
from linnet.report.records import Samples
from linnet.saved import load
from linnet.tangent.batch import take
from linnet.tangent.functional import check_output

Array = np.ndarray[Any, Any]
_KIND = "run"
_KNOWN_SAMPLES, _KNOWN_NUMBERS = 4, 64  # training samples whose outputs, and how many, tell a network again
_MOST = 2**31  # outputs and positions: beyond what a run in memory can have
_TENSORS = ("model", NestedFit.kind, "samples")


@dataclass(frozen=True)
class Origin:
    """Origin of a run's network."""

    spec: str  # the network's name; a file's path is absolute
    arguments: dict[str, Any]  # keyword arguments of the factory
    weights: str | None = None  # the weights that it started from, for the reader
    heads: tuple[int, int] | None = None  # number and seed of the random heads; None before there are any
    appended: int | None = None  # number of features that the network returns, where a head was put behind it
    output: str | None = None  # the part of what the network returns that is taken


@dataclass(frozen=True)
class TestSource:
    """Source of a run's test samples."""

    path: str  # the data's absolute path
    seed: int  # seed of the split
    target: str | None  # column of a table
    columns: Table | None  # how the columns of a table become features; None for other data
    positions: tuple[int, ...] | None  # positions of the test samples that were used; None for all
    digest: str  # hash of their names and answers, so that changed data are noticed
    damaged: str = "error"  # what is done with image files that cannot be decoded, ``"error"`` or ``"skip"``


@dataclass(frozen=True, eq=False)
class TrainingSamples:
    """Training samples as people see them."""

    images: Array | None  # bytes (N, H, W, C), or None when samples are no images
    answers: Array  # labels int64 (N,), or targets in their own units (N, T)
    ids: tuple[str, ...]  # A stable name for each sample

    @classmethod
    def of(cls, task: TaskData) -> TrainingSamples:
        """Those of a task."""
        images = np.ascontiguousarray(task.train.x) if task.image_mode else None
        return cls(images, np.ascontiguousarray(task.train.y), task.train.ids)

    def take(self, positions: Array) -> TrainingSamples:
        """Some of the samples."""
        images = None if self.images is None else self.images[positions]
        return TrainingSamples(images, self.answers[positions], tuple(self.ids[p] for p in positions))

    def joined(self, other: TrainingSamples) -> TrainingSamples:
        """These samples, then others."""
        images = None
        if (
            self.images is not None
            and other.images is not None
            and self.images.shape[1:] == other.images.shape[1:]
        ):
            images = np.concatenate([self.images, other.images])
        return TrainingSamples(images, np.concatenate([self.answers, other.answers]), self.ids + other.ids)


@dataclass(frozen=True, eq=False)
class SavedRun:
    """Contents of a run folder."""

    origin: Origin  # where the network came from
    fit: Fit  # the solved fit
    samples: TrainingSamples  # the training samples
    classes: tuple[str, ...] | None  # names of the classes; None for a regression
    # from stored samples to inputs, and the scale of regression targets
    transforms: tuple[ImageTransform | Standardize | None, Standardize | None]
    test: TestSource | None  # where the test samples are; None when there are none
    # T of the softmax of outputs with and without their variance, and the scale of that variance; None for a
    # regression
    temperatures: tuple[float, float, float] | None

    def changed(self, fit: Fit, samples: TrainingSamples) -> SavedRun:
        """The run after its training samples changed."""
        return replace(self, fit=fit, samples=samples, temperatures=temperatures_of(fit))

    @property
    def shown(self) -> Samples:
        """The training samples, for a page."""
        return Samples(self.samples.images, self.samples.answers, self.samples.ids)

    @property
    def scale(self) -> Standardize | None:
        """The scale of regression targets."""
        return self.transforms[1]

    @property
    def network(self) -> str:
        """Name of the network."""
        return Path(self.origin.spec).name

    def inputs(self, x: Array) -> Tensor:
        """Stored samples as the network's inputs, on its device, (N, ...)."""
        transform, function = self.transforms[0], self.fit.module.function
        if transform is not None:
            return transform(x, function.dtype).to(function.device)
        value = torch.from_numpy(x)
        return value.to(function.device, function.dtype if value.is_floating_point() else value.dtype)

    def answers(self, y: Array) -> Tensor:
        """Stored answers as the fit takes them, (N,)."""
        if self.classes is not None:
            return torch.from_numpy(y)
        dtype, scale = self.fit.module.function.dtype, self.transforms[1]
        return scale(y, dtype) if scale else torch.from_numpy(y).to(dtype)


def save_run(folder: Path, run: SavedRun) -> None:
    """Write a run; the record last, so that an interruption leaves no run that looks finished."""
    with writing(folder):
        try:
            _write_run(folder, run)
        except BaseException:
            for name in _TENSORS:
                (folder / f"{name}.safetensors").unlink(missing_ok=True)
            raise
        remember_run(folder)


def keep_fit(folder: Path, run: SavedRun, overwrite: bool = False) -> None:
    """Write a run before it is evaluated; its report comes later."""
    if overwrite:
        clear_run(folder)
    for name in ("result.json", "report.html"):  # without them a run is known to be interrupted
        (folder / name).unlink(missing_ok=True)
    save_run(folder, run)


def interrupted_run(folder: Path, device: str, memory: str | None) -> SavedRun | None:
    """The fit of a run that was interrupted while it was evaluated."""
    if not all((folder / name).is_file() for name in (RECORD, REPLAY)) or (folder / "result.json").exists():
        return None
    try:
        return load_run(folder, device, memory)
    except LinnetError:
        return None


def _write_run(folder: Path, run: SavedRun) -> None:
    """The files of a run, in the order that matters."""
    (folder / RECORD).unlink(missing_ok=True)
    function = run.fit.module.function
    network = (function.source or function).model  # in the type that it came in
    save(folder, "model", network.state_dict())
    run.fit.save(folder)
    arrays = {"answers": torch.from_numpy(run.samples.answers)}
    if run.samples.images is not None:
        arrays["images"] = torch.from_numpy(run.samples.images)
    save(folder, "samples", {**arrays, "ids": tuple(run.samples.ids)})
    transform, scale = run.transforms
    record = {
        "origin": asdict(run.origin),
        "classes": run.classes,
        "transform": None if transform is None else {"kind": type(transform).__name__, **asdict(transform)},
        "scale": None if scale is None else asdict(scale),
        "test": None if run.test is None else asdict(run.test),
        "temperatures": run.temperatures,
        "computed": _computed(run.fit),
        "files": {name: _checksum(folder / f"{name}.safetensors") for name in _TENSORS},
    }
    write_json(folder / RECORD, record, kind=_KIND)


def load_run(
    folder: Path,
    device: str = "cpu",
    memory: str | None = None,
    *,
    model: str | None = None,
    trust: bool = False,
) -> SavedRun:
    """Read a run, which builds its network: code runs that the user made the run with, named or trusts."""
    check_free(folder)
    record = _read_record(folder)
    origin = Origin(**record["origin"])
    if not trust:
        check_run(folder, record, origin.spec, origin.arguments, named=model is not None)
    if model is not None:
        origin = replace(origin, spec=absolute_spec(model))
    network = _build(folder, origin).to(device)
    fit = load(folder / f"{NestedFit.kind}.safetensors", network)
    fit.memory = memory
    kept = load_tree(folder / "samples.safetensors", "samples")
    images = kept["images"].numpy() if "images" in kept else None
    samples = TrainingSamples(images, kept["answers"].numpy(), kept["ids"])
    classes, test = _task_of(record)
    transforms = (
        _transform(record["transform"]),
        None if record["scale"] is None else Standardize(**record["scale"]),
    )
    _check_inputs(folder, fit, transforms[0], classes)
    _check_network(folder, fit, origin, record["computed"])
    known = record["temperatures"]
    temperatures = None if known is None else (known[0], known[1], known[2])
    if temperatures is not None:
        fit.calibrate(*temperatures)
    if trust:
        remember_run(folder)
    return SavedRun(origin, fit, samples, classes, transforms, test, temperatures)


def opened(options: RunOptions) -> SavedRun:
    """Read the run that a command names."""
    find_device(options.device)
    return load_run(options.run, options.device, options.memory, model=options.model, trust=options.trust)


def tested(folder: Path) -> tuple[tuple[str, ...] | None, TestSource | None]:
    """What a run was scored on, from its record alone."""
    return _task_of(_read_record(folder))


def _task_of(record: dict[str, Any]) -> tuple[tuple[str, ...] | None, TestSource | None]:
    """Classes and test samples of a record."""
    classes = None if record["classes"] is None else tuple(record["classes"])
    test = record["test"]
    if test is None:
        return classes, None
    columns = None if test["columns"] is None else Table.of(test["columns"])
    positions = None if test["positions"] is None else tuple(test["positions"])
    return classes, TestSource(**{**test, "columns": columns, "positions": positions})


def load_test(run: SavedRun) -> tuple[TaskData | None, str]:
    """Read a run's test samples again."""
    if run.test is None:
        return None, "the run has no test samples"
    transform = run.transforms[0] if isinstance(run.transforms[0], ImageTransform) else None
    try:
        task = load_data(
            run.test.path, transform, run.test.seed, target=run.test.target, damaged=run.test.damaged
        )
        if run.test.positions is not None:
            task = task.subset("test", run.test.positions)
    except LinnetError as error:
        return None, f"the test samples cannot be read again: {error.what}"
    if test_digest(task) != run.test.digest:
        return None, f"the test samples in {run.test.path} are not those of the run any more"
    if run.test.columns is not None and task.table != run.test.columns:
        return None, f"other columns of {run.test.path} would be features now than those of the run"
    if isinstance(run.transforms[0], Standardize):
        task = replace(task, transform=run.transforms[0], targets=run.transforms[1])
    return task, ""


def test_digest(task: TaskData) -> str:
    """A hash of the test samples' names and answers."""
    digest = hashlib.sha256("\0".join(task.test.ids).encode())
    digest.update(np.ascontiguousarray(task.test.y).tobytes())
    return digest.hexdigest()


def _read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run whose files are its own."""
    if not folder.is_dir():
        raise InputError(
            f"there is no run folder {folder}",
            expected="a folder written by linnet adapt, forget or update",
            remedy="name the folder that was --out of linnet adapt",
        )
    if not (folder / RECORD).is_file():
        raise FileFormatError(
            f"{folder} holds no finished run: {RECORD} is missing",
            expected="a folder written by linnet adapt, forget or update",
            remedy="run linnet adapt again with the same --out; an interrupted run continues there",
        )
    record: dict[str, Any] = read_json(folder / RECORD, _KIND)
    _check_record(folder, record)
    for name, checksum in record["files"].items():
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            raise FileFormatError(
                f"{path} is missing", expected="all files of the run", remedy="copy the whole folder"
            )
        if _checksum(path) != checksum:
            raise FileFormatError(
                f"{path} is truncated, altered or of another run: its content does not match {RECORD}",
                expected="the file exactly as linnet wrote it",
                remedy="restore it from a copy, or run linnet adapt again",
            )
    return record


def _check_record(folder: Path, record: Any) -> None:
    """Require that a record has all that is read from it, of the right kinds, and no number too large."""
    try:
        origin = Origin(**record["origin"])
        if origin.heads is None or len(origin.heads) != 2:
            raise ValueError("heads must be their number and a seed")
        params.integer("heads", origin.heads[0], most=_MOST)
        params.integer("heads", origin.heads[1], least=0, most=_MOST)
        params.instance("arguments", origin.arguments, dict, "a dictionary")
        params.instance("spec", origin.spec, str, "a string")
        check_output(origin.output)
        _transform(record["transform"])
        if record["scale"] is not None:
            Standardize(**record["scale"])
        if record["test"] is not None:
            test = TestSource(**record["test"])
            params.instance("path", test.path, str, "a string")
            if record["test"]["columns"] is not None:
                Table.of(record["test"]["columns"])
            for position in test.positions or ():
                params.integer("positions", position, least=0, most=_MOST)
        if record["temperatures"] is not None:
            _, _, _ = map(float, record["temperatures"])
        torch.tensor(record["computed"], dtype=torch.float64)
        names = [*(record["classes"] or ()), *record["files"].values()]
        if not all(isinstance(name, str) for name in names) or not set(record["files"]) <= set(_TENSORS):
            raise ValueError("classes and files must be names")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        cause = f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
        raise _altered(folder, f"does not describe a run ({cause})") from error


def _build(folder: Path, origin: Origin) -> nn.Module:
    """The network with its random heads."""
    state = load_tree(folder / "model.safetensors", "model")
    widest = max((size for tensor in state.values() for size in tensor.shape), default=1)
    for width in (origin.appended, *(origin.heads or ())[:1]):
        if width is not None and width > widest:
            raise _altered(folder, f"describes a layer of {width:,} outputs; the largest has {widest:,}")
    model = load_model(origin.spec, None, origin.arguments, pretrained=False)
    if origin.appended is not None or origin.output is not None:
        model = Appended(model, origin.appended, origin.output)
    assert origin.heads is not None
    model = with_random_heads(model, *origin.heads)
    apply_weights(model, state)
    return model.eval()


@torch.no_grad()
def _computed(fit: Fit) -> list[float]:
    """What a fit's network computes of some training samples, by which it is known again."""
    few = take(fit.x, slice(0, _KNOWN_SAMPLES))
    found: list[float] = fit.module.function.check_runs(few).double().flatten()[:_KNOWN_NUMBERS].tolist()
    return found


def _check_network(folder: Path, fit: Fit, origin: Origin, known: list[float]) -> None:
    """Require that the network still computes what it computed when it was fitted."""
    now, then = torch.tensor(_computed(fit)), torch.tensor(known)
    # float32 outputs on another machine or device may differ in the last digits
    atol = 1e-3 * (1e-3 + float(then.abs().max())) if len(then) else 0.0
    if now.shape != then.shape or not torch.allclose(now, then, rtol=1e-2, atol=atol):
        raise FileFormatError(
            f"the network that {origin.spec} makes does not compute what it did when {folder} was written",
            expected="the same factory",
            remedy="restore the factory's file, or run linnet adapt again",
        )


def _check_inputs(
    folder: Path, fit: Fit, transform: ImageTransform | Standardize | None, classes: tuple[str, ...] | None
) -> None:
    """Require that images are scaled to what the fit was made of, and that its classes have a name each."""
    fits = classes is None or len(classes) == fit.classes
    if isinstance(transform, ImageTransform) and isinstance(fit.x, Tensor):
        made = (transform.channels or fit.x.shape[1], *([transform.size or n for n in fit.x.shape[2:]]))
        fits = fits and fit.x.ndim == 4 and made == tuple(fit.x.shape[1:])
    if not fits:
        raise _altered(folder, "describes other images or classes than those of its fit")


def _altered(folder: Path, what: str) -> FileFormatError:
    """The error of a record that is not what was written."""
    return FileFormatError(
        f"{folder / RECORD} {what}",
        expected="the record exactly as linnet wrote it",
        remedy="restore it from a copy, or run linnet adapt again",
    )


def _transform(record: dict[str, Any] | None) -> ImageTransform | Standardize | None:
    """The transform that a record describes."""
    if record is None:
        return None
    values = {key: value for key, value in record.items() if key != "kind"}
    return ImageTransform(**values) if record["kind"] == "ImageTransform" else Standardize(**values)


def _checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
