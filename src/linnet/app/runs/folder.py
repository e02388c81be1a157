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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet import params
from linnet.app.data import ImageTransform, Standardize
from linnet.app.data.task import Table
from linnet.app.models import apply_weights, load_model
from linnet.app.options import RunOptions
from linnet.app.runs.place import RECORD, REPLAY, check_free, clear_run, writing
from linnet.app.runs.trust import absolute_spec, check_run, remember_run
from linnet.errors import FileFormatError, InputError, LinnetError
from linnet.files import load as load_tree
from linnet.files import read_json, save, write_json
from linnet.fitting.last_layer import Appended, not_alone
from linnet.machine import find_device
from linnet.nested.features import RandomHeads, with_random_heads
from linnet.nested.nested_fit import NestedFit
from linnet.report.reading import Fit, Predictions, predict, temperatures_of
from linnet.report.records import Samples
from linnet.saved import READERS, load
from linnet.tangent.batch import hash_examples
from linnet.tangent.functional import check_output

Array = np.ndarray[Any, Any]
_KIND = "run"
ADAPTER = "adapter"  # what the record of a run on texts says beside the rest
_MOST = 2**31  # outputs and positions: beyond what a run in memory can have
_DIGITS, _AT_ONCE = 16, 64  # of a fingerprint, in hexadecimal; samples that are hashed together
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
class SavedRun:
    """Contents of a run folder."""

    origin: Origin  # where the network came from
    fit: Fit  # the solved fit; linnet.adapt's, but for linnet spectrum
    samples: Samples  # the training samples
    classes: tuple[str, ...] | None  # names of the classes; None for a regression
    # from stored samples to inputs, and the scale of regression targets
    transforms: tuple[ImageTransform | Standardize | None, Standardize | None]
    test: TestSource | None  # where the test samples are; None when there are none
    held: tuple[str, ...] = ()  # fingerprints of what it was tested on first, whatever became of its source
    forgotten: tuple[str, ...] = ()  # and of what it forgot, with the answers

    @property
    def measured(self) -> bool:
        """Whether samples are rows of numbers, which may be equal and have different answers."""
        return bool(self.fit.x.ndim == 2)

    def fingerprints(self, x: Array | None = None, y: Array | None = None) -> list[str]:
        """Names of stored samples, by default of the training, by their content, and by answers if given."""
        if x is None:
            names = hash_examples(self.fit.x)
        else:
            parts = [x[start : start + _AT_ONCE] for start in range(0, len(x), _AT_ONCE)]
            names = [name for part in parts for name in hash_examples(self.inputs(part))]
        names = [name[:_DIGITS] for name in names]
        return names if y is None else answered(names, y)

    @property
    def temperatures(self) -> tuple[float, float, float] | None:
        """T of the softmax with variances and without, and their scale; None for a regression."""
        return temperatures_of(self.fit) if isinstance(self.fit, NestedFit) else None

    @property
    def scale(self) -> Standardize | None:
        """The scale of regression targets."""
        return self.transforms[1]

    @property
    def columns(self) -> Table | None:
        """How the columns of a table become features; None for other data."""
        return None if self.test is None else self.test.columns

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
        dtype, scale = self.fit.module.function.dtype, self.scale
        return scale(y, dtype) if scale else torch.from_numpy(y).to(dtype)

    def pictured(self, x: Array, y: Array | None, ids: tuple[str, ...]) -> Samples:
        """Stored samples as people see them."""
        return Samples(x if isinstance(self.transforms[0], ImageTransform) else None, y, ids)

    def predict(self, x: Array, std: bool = True) -> Predictions:
        """Predictions for stored samples."""
        return predict(self.fit, self.inputs(x), self.scale, self.temperatures, std)


def answered(names: Sequence[str], answers: Array) -> list[str]:
    """Fingerprints of samples with their answers."""
    return [f"{name} {answer.tolist()}" for name, answer in zip(names, answers, strict=True)]


def save_run(folder: Path, run: SavedRun) -> None:
    """Write a run; the record last, so that an interruption leaves no run that looks finished."""
    write_run(folder, lambda: _write_tensors(folder, run), _TENSORS)


def write_run(folder: Path, write: Callable[[], dict[str, Any]], names: Sequence[str]) -> None:
    """Write the files of a run of these names, then the record that is made of them, or nothing."""
    with writing(folder):
        try:
            (folder / RECORD).unlink(missing_ok=True)
            record = write()
            digests = {name: checksum(folder / f"{name}.safetensors") for name in names}
            write_json(folder / RECORD, {**record, "files": digests}, kind=_KIND)
        except BaseException:
            for name in names:
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


def _write_tensors(folder: Path, run: SavedRun) -> dict[str, Any]:
    """Write the files of a run: what its record says of the rest."""
    module, samples = run.fit.module, run.samples
    before = module.before if isinstance(module, RandomHeads) else None
    function = (before or module).function  # as it was before training, if there was any
    network = (function.source or function).model  # in the type that it came in
    save(folder, "model", network.state_dict())
    run.fit.save(folder)
    arrays = {"answers": samples.labels, "images": samples.images}
    tensors = {name: torch.from_numpy(found) for name, found in arrays.items() if found is not None}
    save(folder, "samples", {**tensors, "ids": samples.ids, "held": run.held, "forgotten": run.forgotten})
    transform, scale = run.transforms
    return {
        "origin": asdict(run.origin),
        "classes": run.classes,
        "transform": None if transform is None else {"kind": type(transform).__name__, **asdict(transform)},
        "scale": None if scale is None else asdict(scale),
        "test": None if run.test is None else asdict(run.test),
        "temperatures": run.temperatures,
    }


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
    record, known = _read_record(folder)
    origin = known.origin
    if not trust:
        check_run(folder, record, origin.spec, origin.arguments, named=model is not None)
    if model is not None:
        origin = replace(origin, spec=absolute_spec(model))
    fit = load(folder / f"{NestedFit.kind}.safetensors", _build(folder, origin).to(device))
    fit.memory = memory
    kept = load_tree(folder / "samples.safetensors", "samples")
    images = kept["images"].numpy() if "images" in kept else None
    samples = Samples(images, kept["answers"].numpy(), kept["ids"])
    _check_inputs(folder, fit, known)
    if known.temperatures is not None:
        fit.calibrate(*known.temperatures)
    if trust:
        remember_run(folder)
    rest = known.transforms, known.test, kept.get("held", ()), kept.get("forgotten", ())
    return SavedRun(origin, fit, samples, known.classes, *rest)


def opened(options: RunOptions) -> SavedRun:
    """Read the run that a command names."""
    find_device(options.device)
    return load_run(options.run, options.device, options.memory, model=options.model, trust=options.trust)


def tested(folder: Path) -> tuple[tuple[str, ...] | None, TestSource | None]:
    """What a run was scored on, from its record alone."""
    _, known = _read_record(folder)
    return known.classes, known.test


@dataclass(frozen=True)
class _Known:
    """What the record of a run says, in its own types."""

    origin: Origin
    classes: tuple[str, ...] | None
    transforms: tuple[ImageTransform | Standardize | None, Standardize | None]
    test: TestSource | None
    temperatures: tuple[float, float, float] | None

    @classmethod
    def of(cls, record: Any) -> _Known:
        """A record that has all that is read from it, of the right kinds, and no number too large."""
        origin, test, temperatures = Origin(**record["origin"]), record["test"], record["temperatures"]
        if origin.heads is None or len(origin.heads) != 2:
            raise ValueError("heads must be their number and a seed")
        params.integer("heads", origin.heads[0], most=_MOST)
        params.integer("heads", origin.heads[1], least=0, most=_MOST)
        params.instance("arguments", origin.arguments, dict, "a dictionary")
        params.instance("spec", origin.spec, str, "a string")
        check_output(origin.output)
        names = [*(record["classes"] or ()), *record["files"].values()]
        if not all(isinstance(name, str) for name in names) or not set(record["files"]) <= set(_TENSORS):
            raise ValueError("classes and files must be names")
        if temperatures is not None:
            moderated, point, share = map(float, temperatures)
            temperatures = moderated, point, share
        scale = None if record["scale"] is None else Standardize(**record["scale"])
        transforms = _transform(record["transform"]), scale
        classes = None if record["classes"] is None else tuple(record["classes"])
        return cls(origin, classes, transforms, None if test is None else _source(test), temperatures)


def _source(record: dict[str, Any]) -> TestSource:
    """The source of test samples that a record describes."""
    source = TestSource(**record)
    params.instance("path", source.path, str, "a string")
    columns = None if record["columns"] is None else Table.of(record["columns"])
    positions = None if source.positions is None else tuple(source.positions)
    for position in positions or ():
        params.integer("positions", position, least=0, most=_MOST)
    return replace(source, columns=columns, positions=positions)


def _transform(record: dict[str, Any] | None) -> ImageTransform | Standardize | None:
    """The transform that a record describes."""
    if record is None:
        return None
    values = {key: value for key, value in record.items() if key != "kind"}
    return ImageTransform(**values) if record["kind"] == "ImageTransform" else Standardize(**values)


def _read_record(folder: Path) -> tuple[dict[str, Any], _Known]:
    """The record of a finished run whose files are its own, as it stands and as it is understood."""
    record = read_record(folder)
    if ADAPTER in record:
        raise InputError(
            f"run is {folder}, of a language model's adapter",
            expected="a run of images or rows",
            remedy="linnet predict, explain, forget, update and serve take runs on texts",
        )
    with understood(folder):
        known = _Known.of(record)
    check_files(folder, record)
    return record, known


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run of either kind."""
    if not folder.is_dir():
        raise InputError(
            f"there is no run folder {folder}",
            expected="a folder written by linnet adapt, forget or update",
            remedy="name the folder that was --out of linnet adapt",
        )
    if not (folder / RECORD).is_file():
        saved = [file.stem for file in folder.glob("*.safetensors")]
        if len(saved) == 1 and saved[0] in READERS:  # a run has other files beside its fit
            raise InputError(
                f"run is {folder}, which holds {saved[0]}.safetensors alone, as save of Python writes it",
                expected="a folder written by linnet adapt, forget or update",
                remedy=f"open it in Python with its network: linnet.load({str(folder)!r}, net)",
            )
        raise FileFormatError(
            f"{folder} holds no finished run: {RECORD} is missing",
            expected="a folder written by linnet adapt, forget or update",
            remedy="run linnet adapt again with the same --out; an interrupted run continues there",
        )
    record = read_json(folder / RECORD, _KIND)
    return record if isinstance(record, dict) else {}


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Read a record, or say that it is no record of a run."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        cause = f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
        raise _altered(folder, f"does not describe a run ({cause})") from error


def check_files(folder: Path, record: dict[str, Any]) -> None:
    """Require that the files of a run are those that its record was written for."""
    for name, digest in record["files"].items():
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            raise FileFormatError(
                f"{path} is missing", expected="all files of the run", remedy="copy the whole folder"
            )
        if checksum(path) != digest:
            raise FileFormatError(
                f"{path} is truncated, altered or of another run: its content does not match {RECORD}",
                expected="the file exactly as linnet wrote it",
                remedy="restore it from a copy, or run linnet adapt again",
            )


def _build(folder: Path, origin: Origin) -> nn.Module:
    """The network with its random heads."""
    state = load_tree(folder / "model.safetensors", "model")
    widest = max((size for tensor in state.values() for size in tensor.shape), default=1)
    for width in (origin.appended, *(origin.heads or ())[:1]):
        if width is not None and width > widest:
            raise _altered(folder, f"describes a layer of {width:,} outputs; the largest has {widest:,}")
    model = load_model(origin.spec, None, origin.arguments, pretrained=False)
    if origin.appended is None:
        model = not_alone(model)
    if origin.appended is not None or origin.output is not None:
        model = Appended(model, origin.appended, origin.output)
    assert origin.heads is not None
    model = with_random_heads(model, *origin.heads)
    apply_weights(model, state)
    return model.eval()


def _check_inputs(folder: Path, fit: NestedFit, known: _Known) -> None:
    """Require that images are scaled to what the fit was made of, and that its classes have a name each."""
    transform, fits = known.transforms[0], known.classes is None or len(known.classes) == fit.classes
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


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
