"""A run as one file that needs nothing of linnet: from pixels or rows to probabilities or values."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from linnet.app.data import ImageTransform, Standardize
from linnet.app.data.transforms import LUMA
from linnet.app.runs.folder import SavedRun
from linnet.app.runs.place import check_file
from linnet.distribution import install_command
from linnet.errors import DependencyError, InputError, ModelError
from linnet.files import write_atomic
from linnet.memory import format_bytes
from linnet.predictive.noise import probabilities
from linnet.progress import waiting
from linnet.tangent.batch import take
from linnet.tangent.graph import (
    MOST,
    FreeSize,
    Prototype,
    dimensions,
    free_sizes,
    plain_module,
    that_run,
)

RECORD = "linnet.json"  # the name of the description in a .pt2 file
_NEEDED = {".onnx": ("onnx", "onnxscript"), ".pt2": ()}
_LARGEST = 2**31 - 2**24  # bytes of weights that one ONNX file holds


class RunModule(nn.Module):
    """A run's model from raw samples to answers."""

    mean: Tensor
    std: Tensor
    origin: Tensor
    unit: Tensor
    possible: Tensor | None

    def __init__(self, model: nn.Module, run: SavedRun) -> None:
        super().__init__()
        self.model = model
        self.before, self.after = run.transforms
        self.temperatures, self.noise = run.temperatures, run.fit.noise
        x = run.fit.x  # a fit in float64 keeps the inputs of its network, and takes such
        self.dtype = x.dtype if x.is_floating_point() else run.fit.module.function.dtype
        self.channels = x.shape[1]
        self.register_buffer("possible", run.fit._possible)
        for name, values in _constants(run).items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Answers to raw samples."""
        # x (N, H, W, C)
        found = self.model(self._inputs(x))
        mean, *variance = found if isinstance(found, tuple) else (found,)
        if self.temperatures is None:
            return tuple(self._in_units(mean, variance))
        moderated, point, share = self.temperatures
        known = share * variance[0] if variance else None
        return mean, *variance, probabilities(mean, known, moderated if variance else point, self.possible)

    def _inputs(self, x: Tensor) -> Tensor:
        """What the network takes."""
        if isinstance(self.before, Standardize):
            return ((x.double() - self.mean) / self.std).to(self.dtype)
        if self.before is None:
            return x.to(self.dtype) if x.is_floating_point() else x  # ids of tokens stay whole numbers
        pixels = x.permute(0, 3, 1, 2).to(self.dtype) / 255
        if pixels.shape[1] != self.channels:
            luma = torch.tensor(LUMA, dtype=self.dtype).view(-1, 1, 1)
            gray = self.channels == 1
            pixels = (pixels * luma).sum(1, keepdim=True) if gray else pixels.expand(-1, 3, -1, -1)
        shape = (-1, 1, 1)
        return (pixels - self.mean.view(shape).to(self.dtype)) / self.std.view(shape).to(self.dtype)

    def _in_units(self, mean: Tensor, variance: list[Tensor]) -> list[Tensor]:
        """Values and the variance of a new answer, noise included, in the units of the data."""
        spread = [v + self.noise for v in variance]
        if self.after is None:
            return [mean, *spread]
        unit = self.unit.to(mean.dtype)
        return [mean * unit + self.origin.to(mean.dtype), *(v * unit**2 for v in spread)]


def _constants(run: SavedRun) -> dict[str, tuple[float, ...]]:
    """Means and standard deviations of inputs and answers."""
    before, after = run.transforms
    found = {} if before is None else {"mean": before.mean, "std": before.std}
    return found if after is None else found | {"origin": after.mean, "unit": after.std}


def check_export(path: Path, overwrite: bool) -> None:
    """Require a name that says what to write, and the packages for it."""
    kind = path.suffix.lower()
    check_file(path, tuple(_NEEDED), overwrite)
    missing = [name for name in _NEEDED[kind] if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"ONNX files are written with {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed",
            expected="the packages that torch.onnx.export needs",
            remedy=f"{install_command('onnx')}, or write --out model.pt2",
        )


def write_export(run: SavedRun, path: Path, variance: bool, merge: bool = False) -> dict[str, Any]:
    """Write a run as one file."""
    if merge and variance:
        raise InputError(
            "variance is given with merge",
            expected="one of the two: a network with merged weights has no variance",
            remedy="leave variance= or merge= out",
        )
    same: float | None = None
    before = run.transforms[0]
    scaled = isinstance(before, ImageTransform) and before.size is not None  # to one size, which stays
    with waiting("building the model"):
        if merge:
            merged = run.fit.merge()
            same = merged.agreement if run.classes else None
            like = Prototype(take(run.fit.x, slice(0, 4)))
            like = like.rigid() if scaled else like
            module = plain_module(merged.network, [], _same, like, run.fit.module.function.output).module
        else:
            module = run.fit.export(variance=variance, other_sizes=not scaled)
    whole = RunModule(module, run).eval()
    held = sum(t.numel() * t.itemsize for t in [*whole.parameters(), *whole.buffers()])
    if path.suffix.lower() == ".onnx" and held > _LARGEST:
        raise InputError(
            f"the model holds {format_bytes(held)}, and an ONNX file at most 2 GB",
            expected="a model that fits one file",
            remedy="write --out model.pt2",
        )
    example = _example(run)
    outputs = ["outputs" if run.classes else "values", *(["variance"] if variance else [])]
    outputs += ["probabilities"] if run.classes else []
    with warnings.catch_warnings(), waiting(f"writing {path.name}"):
        warnings.simplefilter("ignore")  # of torch's own tracing
        if path.suffix.lower() == ".pt2":
            exported, free = _traced(whole, _sized(example, run))
        else:
            made, free = _in_onnx(whole, _sized(example, run), outputs)
        columns = None if run.columns is None else list(run.columns.labels)
        told: dict[str, Any] = {
            "input": _told_input(example, run, free),
            "columns": columns,
            "outputs": outputs,
        }
        told["encoding"] = None if run.columns is None else [vars(one) for one in run.columns.features]
        told["classes"] = None if run.classes is None else list(run.classes)
        if path.suffix.lower() == ".pt2":
            extra = {RECORD: json.dumps(told, indent=1)}
            write_atomic(path, lambda place: torch.export.save(exported, place, extra_files=extra))
        else:
            made.model.metadata_props["linnet"] = json.dumps(told)
            write_atomic(path, made.save)
    made_of = {"merged": merge, "agreement": same}
    return {"file": str(path), "bytes": path.stat().st_size, **told, **made_of}


def _same(value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
    """The network's own outputs."""
    return value


def _traced(whole: nn.Module, like: Prototype) -> tuple[torch.export.ExportedProgram, list[FreeSize]]:
    """The model as a graph that refuses sizes at which the network does not run, and those it takes."""
    example, shapes = cast(Tensor, like.x), dimensions(like, ["x"])
    exported = torch.export.export(whole, (example,), dynamic_shapes=shapes, strict=False)
    free = free_sizes(exported)
    taken = that_run(exported.module(), example, free)
    if len(taken) == len(free):
        return exported, taken
    return _traced(whole, Prototype(example, like.only(taken).fixed))


def _in_onnx(
    whole: nn.Module, like: Prototype, outputs: list[str]
) -> tuple[torch.onnx.ONNXProgram, list[FreeSize]]:
    """The same in ONNX, whose exporter may hold a size for fixed that torch leaves free."""
    exported, free = _traced(whole, like)
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        made = torch.onnx.export(
            exported, (like.x,), dynamo=True, verbose=False, input_names=["x"], output_names=outputs
        )
    except RuntimeError as error:  # of which torch's OnnxExporterError is one
        raise ModelError(
            f"the ONNX exporter of torch {torch.__version__} cannot write this network "
            f"({str(error).strip().partition(chr(10))[0]})",
            expected="a network whose operations it translates",
            remedy="write --out model.pt2, or update torch and onnxscript",
        ) from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
    assert made is not None
    taken: list[FreeSize] = []  # without onnxruntime nobody knows
    if importlib.util.find_spec("onnxruntime") is not None:
        taken = that_run(_in_onnxruntime(made, exported.module(), like), like.x, free)
    return (made, taken) if len(taken) == len(free) else _in_onnx(whole, like.only(taken), outputs)


def _in_onnxruntime(made: torch.onnx.ONNXProgram, module: nn.Module, like: Prototype) -> _OnnxRuntime:
    """An ONNX model that runs, and answers as the module does."""
    try:
        check = _OnnxRuntime(made, module)
        check(like.x)
    except Exception as error:  # onnxruntime's errors have no class in common but this
        first = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"onnxruntime does not run what torch's exporter writes of this network ({first})",
            expected="operations that it has in the type of the fit",
            remedy="write --out model.pt2",
        ) from error
    return check


class _OnnxRuntime(nn.Module):
    """An ONNX model that must answer as a module does."""

    def __init__(self, made: torch.onnx.ONNXProgram, module: nn.Module) -> None:
        super().__init__()
        self.module, onnxruntime = module, importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # its refusals are ours to tell
        self.session = onnxruntime.InferenceSession(made.model_proto.SerializeToString(), options)

    def forward(self, x: Tensor) -> None:
        """Require the same answers."""
        try:
            found = self.session.run(None, {"x": x.cpu().numpy()})
        except Exception as error:
            raise ValueError(str(error)) from error
        for given, expected in zip(found, self.module(x), strict=True):
            torch.testing.assert_close(
                torch.from_numpy(given), expected.cpu(), rtol=1e-2, atol=1e-2 * float(expected.abs().max())
            )


def _example(run: SavedRun) -> Tensor:
    """Raw samples like those that the run's inputs are made of."""
    x, device = run.fit.x, run.fit.module.function.device
    if isinstance(run.transforms[0], ImageTransform):
        channels = x.shape[1] if run.samples.images is None else run.samples.images.shape[-1]
        noise = torch.Generator().manual_seed(0)
        return torch.randint(256, (2, *x.shape[2:], channels), generator=noise).to(device, torch.uint8)
    kind = torch.float32 if x.is_floating_point() else x.dtype
    few: Tensor = x[torch.arange(2) % len(x)]
    return few.to(device, kind)


def _sized(example: Tensor, run: SavedRun) -> Prototype:
    """Raw samples, with the sizes that stay: those that the run scaled its images to, and the channels."""
    before, like = run.transforms[0], Prototype(example)
    if not isinstance(before, ImageTransform):
        return like
    return like.rigid() if before.size else Prototype(example, frozenset({(0, 3)}))


def _told_input(example: Tensor, run: SavedRun, free: Sequence[FreeSize]) -> str:
    """The input in words."""
    told = {d: _told_size(one) for one in free for _, d in one.axes}
    sizes = " × ".join(told.get(d, str(size)) for d, size in enumerate(example.shape[1:], start=1))
    if isinstance(run.transforms[0], ImageTransform):
        return f"images, uint8 (N, H, W, C), each {sizes}"
    return f"rows, {str(example.dtype).removeprefix('torch.')}, each {sizes}"


def _told_size(free: FreeSize) -> str:
    """Between what bounds a size is free."""
    if free.most < MOST:
        return f"{free.least}–{free.most}"
    return "any" if free.least == 1 else f"≥{free.least}"
