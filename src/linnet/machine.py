"""Machine information: packages, devices and their speed, differentiation modes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet.distribution import APPLICATION, LIBRARY, install_command, namesake
from linnet.errors import InputError, ModelError
from linnet.memory import available_bytes
from linnet.shown import first_line
from linnet.tangent.forward_mode import probe_jvp
from linnet.tangent.modes import differentiable_kernels, has_recurrence

_REQUIRED = (*LIBRARY, *APPLICATION.values())
_TORCHVISION = "install the torchvision made for your torch, in one call with that torch"
_ONNX = "linnet export --out FILE.onnx"
# Distribution -> what linnet does with it, how to get it.
OPTIONAL = {
    "transformers": ("--model hf:NAME", install_command("text")),
    "torchvision": ("--model torchvision:NAME", _TORCHVISION),
    "timm": ("--model timm:NAME", f"{_TORCHVISION}, then pip install timm"),
    "pandas": ("to_frame(), DataFrames", "pip install pandas"),
    "scikit-learn": ("linnet.integrations.sklearn", install_command("sklearn")),
    "linear_operator": ("Gaussian process libraries", install_command("gp")),
    "gpytorch": ("Gaussian process libraries", install_command("gp")),
    "botorch": ("Bayesian optimization", install_command("gp")),
    "onnx": (_ONNX, install_command("onnx")),
    "onnxscript": (_ONNX, install_command("onnx")),
    "onnxruntime": ("the sizes that ONNX files take, and running them", install_command("onnx")),
}
_MODULES = {"scikit-learn": "sklearn"}  # import names, where they are others
_SIZE = 1024  # rows of the square matrices in the speed test


def survey(seconds: float = 0.5) -> dict[str, Any]:
    """Find out what works on this machine, and why the rest does not."""
    if not seconds > 0:
        raise InputError(f"seconds is {seconds}", expected="a positive number", remedy="leave it out")
    packages = {name: _version(name) for name in _REQUIRED}
    derivatives, repair = _derivatives(), namesake()
    works = None not in packages.values() and all(path for path, _ in derivatives.values())
    return {
        "ok": works and repair is None,
        "namesake": repair,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "threads": torch.get_num_threads(),
        "devices": [_device(device, seconds) for device in _devices()],
        "optional": {name: _optional(name) for name in OPTIONAL},
        "derivatives": {name: {"path": path, "reason": why} for name, (path, why) in derivatives.items()},
    }


def find_device(name: str) -> torch.device:
    """A device by name, tried out."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is {name!r}, which does not work here ({first_line(error)})",
            expected=f"one of {', '.join(map(str, _devices()))}",
            remedy="linnet doctor says what works on this machine",
        ) from error
    return device


def fastest_device() -> torch.device:
    """The kind of device that computes fastest here: the first of cuda, mps and cpu that there is."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    """Every device torch can use here."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def _device(device: torch.device, seconds: float) -> dict[str, Any]:
    """A device's name, free memory in bytes, and measured speed of float32 products."""
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    )
    return {
        "device": str(device),
        "name": name,
        "available_bytes": available_bytes(device),
        "sgemm_gflops": _sgemm_rate(device, seconds),
    }


def _sgemm_rate(device: torch.device, seconds: float) -> float:
    """Billions of operations a second in float32 products: the best of the products that fit in the time."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIZE, _SIZE, generator=generator).to(device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    (a @ b).sum().item()  # warm up
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best / 1e9  # a product takes 2 n³ operations


def _optional(name: str) -> dict[str, Any]:
    """Whether an optional package can be imported, else why not and what to do."""
    (use, remedy), module = OPTIONAL[name], _MODULES.get(name, name)
    version = _version(name)
    if importlib.util.find_spec(module) is None:
        return {"works": False, "version": None, "use": use, "reason": "not installed", "remedy": remedy}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        return {
            "works": False,
            "version": version,
            "use": use,
            "reason": first_line(error),
            "remedy": remedy,
        }
    return {"works": True, "version": version, "use": use, "reason": "", "remedy": ""}


def _derivatives() -> dict[str, tuple[str | None, str]]:
    """For each kind of layer, the path by which linnet forms J v here (None where there is none), and why."""

    def probe(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str | None, str]:
        def function(at: dict[str, Tensor]) -> Tensor:
            output: Tensor | tuple[Tensor, ...] = functional_call(layer, at, inputs)
            return output[0] if isinstance(output, tuple) else output

        try:
            with differentiable_kernels(has_recurrence(layer)):
                return probe_jvp(function, {name: p.detach() for name, p in layer.named_parameters()})
        except ModelError as error:
            return None, error.what

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image, sequence, vector = torch.randn(2, 3, 6, 6), torch.randn(2, 5, 8), torch.randn(2, 8)
        layers: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
            "linear": (nn.Linear(8, 3), (vector,)),
            "convolution": (nn.Conv2d(3, 4, 3), (image,)),
            "attention": (nn.MultiheadAttention(8, 2, batch_first=True), (sequence,) * 3),
            "LSTM": (nn.LSTM(8, 8, batch_first=True), (sequence,)),
            "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), (vector,)),
        }
    return {name: probe(layer.eval(), inputs) for name, (layer, inputs) in layers.items()}
