"""Networks and their weights by name: a factory in a file, Hugging Face, timm or torchvision.

Weights are read without running code from them: safetensors, ``.npz``, or torch's own format restricted to
tensors.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import FileFormatError, InputError, LinnetError, ModelError, WeightsError
from linnet.files import read_safetensors, require_file, require_room
from linnet.fitting.last_layer import mask_padding
from linnet.integrations.pretrained import BUILDERS
from linnet.npz import read_npz
from linnet.shown import some

_TORCH_SUFFIXES = (".pt", ".pth", ".th", ".tar", ".bin", ".ckpt")
_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
_WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name
_SPECS = "path/to/file.py:factory, hf:NAME, timm:NAME or torchvision:NAME"
_DEPTH = 8  # dictionaries inside dictionaries that are looked into


def load_model(
    spec: str,
    weights: str | os.PathLike[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool | None = None,
) -> nn.Module:
    r"""Build a network from its name and put weights into it."""
    arguments = dict(model_args or {})
    source, colon, name = spec.partition(":")
    if not colon or not name:
        raise ModelError(
            f"model {spec!r} names no factory",
            expected=_SPECS,
            remedy=f"say which of its functions makes the network: {spec.rstrip(':')}:FUNCTION",
        )
    build = BUILDERS.get(source)
    published = weights is None if pretrained is None else pretrained
    model = build(name, published, arguments) if build else _from_file(spec, arguments)
    if weights is not None:
        apply_weights(model, load_weights(weights))
    if source == "hf":
        mask_padding(model)
    return model.eval()


def _from_file(spec: str, arguments: dict[str, Any]) -> nn.Module:
    """Call a factory that a Python file defines."""
    location, _, name = spec.rpartition(":")
    try:
        path = require_file(location)
    except InputError as error:
        remedy = error.remedy
        if Path(f"{location}.py").is_file():
            remedy = f"did you mean {location}.py:{name}?"
        raise ModelError(f"model {spec!r} cannot be built: {error.what}", _SPECS, remedy) from error
    with _importable(path.parent):
        module = _execute(path)
        factory = getattr(module, name, None)
        if not callable(factory) or isinstance(factory, nn.Module):
            raise ModelError(
                f"{path} has no factory {name!r}",
                expected=f"a function or class that returns a network; it defines: {_definitions(path)}",
                remedy=f"name one of these, such as {path}:FUNCTION",
            )
        try:
            model = factory(**arguments)
        except Exception as error:
            raise ModelError(
                f"the factory {name} of {path} raised {type(error).__name__}: {error}",
                expected="a network",
                remedy=f"check model_args, now {json.dumps(arguments, default=str)}, and the factory itself",
            ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the factory {name} of {path} returned an object of type {type(model).__name__}",
            expected="a torch.nn.Module",
            remedy="return the network itself",
        )
    return model


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a file import its neighbors while it runs."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


class _FromText(SourceFileLoader):
    """Runs the text of a file: bytecode beside it may be of another text, which nobody has looked at."""

    def get_code(self, fullname: str) -> CodeType:
        """The text of the file, compiled."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _execute(path: Path) -> ModuleType:
    """The module that a Python file makes."""
    name = f"_linnet_model_{path.stem}_{abs(hash(path.resolve()))}"
    if path.suffix != ".py":
        raise ModelError(f"{path} is no Python file", expected="a file that ends in .py")
    module_spec = importlib.util.spec_from_file_location(name, path, loader=_FromText(name, str(path)))
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickling look themselves up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelError(
            f"{path} raised {type(error).__name__} while it was imported: {error}",
            expected="a Python file that defines the factory",
            remedy=f"run it alone to see the cause: python {path}",
        ) from error
    return module


def _definitions(path: Path) -> str:
    """The public functions and classes of a file, for an error."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]
    return ", ".join(names) or "none"


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a network's weights from a file, without running code from it."""
    # Damage is found by the archive's checksums in `.npz` and in torch's zip format; safetensors and torch's
    # format before 1.6 have none, and there only truncation and NaN show.
    path = require_file(path, "weights")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        weights = read_safetensors(path)
    elif suffix == ".npz":
        weights = {name: _as_tensor(path, name, array) for name, array in read_npz(path).items()}
    elif suffix in _TORCH_SUFFIXES:
        weights = _find_state_dict(path, _read_torch(path))
    else:
        raise InputError(
            f"weights {path} have the unknown suffix {suffix!r}",
            expected=f".safetensors, .npz, {', '.join(_TORCH_SUFFIXES)}",
            remedy="rename the file for what it holds, or save the weights again",
        )
    if not weights:
        raise FileFormatError(
            f"{path} holds no tensors", expected="a network's weights", remedy="save model.state_dict()"
        )
    return _without_wrappers(weights)


def _as_tensor(path: Path, name: str, array: Any) -> Tensor:
    """The tensor of a NumPy array."""
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise FileFormatError(
            f"array {name} of {path} has the type {array.dtype}",
            expected="arrays of numbers only",
            remedy="save the weights alone",
        ) from error


def _read_torch(path: Path) -> object:
    """The content of a torch file of tensors and plain containers."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                require_room(path, sum(member.file_size for member in archive.infolist()), "its members")
                damaged = archive.testzip()  # torch.load does not compare the checksums
            if damaged:
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about old formats do not matter to a reader
            return torch.load(path, map_location="cpu", weights_only=True)
    except LinnetError:
        raise
    except pickle.UnpicklingError as error:
        raise FileFormatError(
            f"{path} holds more than weights, or is no torch file{_found_in(error)}",
            expected="a dictionary of tensors, which can be read without running code",
            remedy="where you trust it, load it and save model.state_dict() with torch.save or safetensors",
        ) from error
    except Exception as error:  # what the decoders raise on damaged bytes has no common type
        raise FileFormatError(
            f"{path} is truncated, altered or no torch file ({type(error).__name__}: {error})",
            expected="a complete file written by torch.save",
            remedy="download or save it again",
        ) from error


def _found_in(error: Exception) -> str:
    """The name of the object that torch refused to load."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    match = re.search(r"(?:GLOBAL|global|class) '?([\w.]+)'?", text)
    return f" (it holds a {match[1]})" if match and "." in match[1] else ""


def _find_state_dict(path: Path, content: object) -> dict[str, Tensor]:
    """The dictionary of tensors in a checkpoint."""
    for _ in range(_DEPTH):  # a dictionary may hold itself
        if not isinstance(content, Mapping):
            break
        inner = [content[key] for key in _NESTED if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping):
        raise FileFormatError(
            f"{path} holds a {type(content).__name__}",
            expected="a dictionary of tensors",
            remedy="save model.state_dict()",
        )
    others = [str(key) for key, value in content.items() if not _is_dense(value)]
    if others:
        raise FileFormatError(
            f"{path} holds other things than tensors: {some(others)}",
            expected=f"dense tensors by name, or such a dictionary under one of: {', '.join(_NESTED)}",
            remedy="save model.state_dict() alone",
        )
    size = sum(value.numel() * value.element_size() for value in content.values())
    require_room(path, size, "its tensors")  # a view can repeat one number any number of times
    return {str(key): value for key, value in content.items()}


def _is_dense(value: object) -> bool:
    """Whether a value is a tensor with a number for each of its places."""
    if not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and not value.is_nested and value.device.type != "meta"


def _without_wrappers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the prefixes that wrappers put before every name."""
    for prefix in (*_WRAPPERS, *_WRAPPERS):  # in any order, at most two of them
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def apply_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a network, all of them or none."""
    # A name may be missing only where it cannot matter: a tensor tied to one that is given, and the batch
    # counters that old files lack.
    own = model.state_dict(keep_vars=True)
    findings = {
        "missing": _missing(own, weights),
        "unexpected": [name for name in weights if name not in own],
        "of another shape or type": _misfits(own, weights),
        "not finite": [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()],
    }
    found = {what: names for what, names in findings.items() if names}
    if found:
        remedy = (
            "build the network that was trained (see model_args), its old head included; "
            "the head for a new task is put on afterwards"
        )
        if set(found) == {"not finite"}:
            remedy = "load an intact checkpoint: training diverged, or the file is damaged"
        counts = "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in found.items())
        raise WeightsError(
            f"the weights do not fit {type(model).__name__}: {counts}",
            expected=f"finite values for exactly its {len(own)} tensors",
            remedy=remedy,
        )
    model.load_state_dict(dict(weights), strict=False)  # strict has been checked, ties included


def _missing(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """The names that a network has, that are not given, and that matter."""
    given = {id(tensor) for name, tensor in own.items() if name in weights}
    return [
        name
        for name, tensor in own.items()
        if name not in weights and id(tensor) not in given and not name.endswith("num_batches_tracked")
    ]


def _misfits(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """The names whose tensor has another shape, or integers for real numbers."""
    found = []
    for name in own.keys() & weights.keys():
        ours, given = own[name], weights[name]
        if ours.shape != given.shape or ours.is_floating_point() != given.is_floating_point():
            found.append(f"{name} (network: {_describe(ours)}, weights: {_describe(given)})")
    return sorted(found)


def _describe(tensor: Tensor) -> str:
    """Shape and type in few characters."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
