"""Adapted networks as plain modules, and merged where they are a probe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, MemoryBudgetError
from linnet.nested.nested_fit import NestedFit
from tests.fitting.test_export import LOAD
from tests.hangs import HANGS
from tests.nested.test_nested import network, samples

MIXED = {"weight": 0.4, "ridge": 0.05}


def agree(found: tuple[Tensor, Tensor], fit: NestedFit, x: Tensor) -> None:
    torch.testing.assert_close(found[0], fit.predict(x))
    torch.testing.assert_close(found[1], fit.predictive(x).variance)


def test_a_probe_has_its_exact_variance() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0)
    x = samples(20)[0]
    agree(fit.export(variance=True)(x), fit, x)


@pytest.mark.parametrize(
    ("n", "weight"),
    [
        pytest.param(12, 0.4, marks=pytest.mark.long),  # fewer training examples than features
        pytest.param(12, 1.0, marks=pytest.mark.long),
        pytest.param(500, 0.4, marks=pytest.mark.long),  # more
    ],
)
def test_the_variance_with_lower_layers_is_exact(n: int, weight: float) -> None:
    fit, x = linnet.adapt(network(), samples(n + 3), weight=weight, ridge=0.05), samples(20)[0]
    less = fit.forget([0, 3, 5])  # whose features have another mean than the center
    agree(less.export(variance=True)(x), less, x)


@pytest.mark.long
def test_the_variance_of_an_image_network_in_float32() -> None:
    fit, x = images()
    mean, variance = fit.export(variance=True)(x)
    torch.testing.assert_close(mean, fit.predict(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(variance, fit.predictive(x).variance, rtol=1e-3, atol=1e-5)
    assert variance.dtype == torch.float32


def images() -> tuple[NestedFit, Tensor]:
    """A convolutional network with norms, and new images."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    x = torch.randn(30, 1, 8, 8)
    return linnet.adapt(net.eval(), (x[:20], torch.arange(20) % 3), **MIXED), x[20:]


@pytest.mark.long
def test_torch_saves_and_compiles_the_variance_with_lower_layers(tmp_path: Path) -> None:
    fit, x = linnet.adapt(network(), samples(12), **MIXED), samples(7)[0]
    module = fit.export(variance=True)
    exported = torch.export.export(module, (x,), dynamic_shapes=module.meta["dynamic_shapes"])
    torch.export.save(exported, tmp_path / "module.pt2")
    torch.save(module, tmp_path / "module.pt")
    torch.save((x[:5], (fit.predict(x)[:5], fit.predictive(x).variance[:5])), tmp_path / "data.pt")
    files = [str(tmp_path / name) for name in ("module.pt2", "module.pt", "data.pt")]
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", LOAD, *files], check=True, timeout=HANGS)
    agree(torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)(x), fit, x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the packages that write the file
def test_another_runtime_gives_the_variance_with_lower_layers(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    fit, x = images()
    module = fit.export(variance=True)
    torch.onnx.export(
        module, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False,
        dynamic_shapes=module.meta["dynamic_shapes"],
    )  # fmt: skip
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    found = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})
    for got, expected in zip(found, (fit.predict(x[:3]), fit.predictive(x[:3]).variance), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_refused_with_its_size() -> None:
    fit = linnet.adapt(network(), samples(12), **MIXED)
    fit.memory = 1000
    with pytest.raises(MemoryBudgetError, match="weight=0"):
        fit.export()
    fit.memory = 60_000
    words = r"variance of 6 features and 4 heads on 108 weights, 12 examples.*adapt with weight=0"
    with pytest.raises(MemoryBudgetError, match=words):
        fit.export(variance=True)


def test_a_probe_merges_into_the_network_and_nothing_else_does() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0)
    x = samples(20)[0]
    merged = fit.merge(x)
    torch.testing.assert_close(merged.network(x), fit.predict(x))
    assert merged.gap < 1e-10
    assert merged.agreement == 1.0
    with pytest.raises(InputError, match=r"0\.4"):
        linnet.adapt(network(), samples(12), **MIXED).merge()
