"""The exact variance of exported fits in all weights, against the fits' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import MemoryBudgetError
from linnet.fitting import Sketch
from tests.fitting.test_export import IMAGES, Images, data, network, of_images

CROSS = {"loss": "cross-entropy", "ridge": 0.1}


def agree(fit: Any, x: torch.Tensor) -> None:
    mean, variance = fit.export(variance=True)(x)
    torch.testing.assert_close(mean, fit.predict(x))
    torch.testing.assert_close(variance, fit.predictive(x).variance, rtol=1e-6, atol=1e-9)


def fitted(n: int, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    x, y = data(n)
    return linnet.fit(linnet.linearize(network().to(dtype)), (x.to(dtype), y), **options)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (12, {}),  # fewer outputs of training examples than weights
        (12, {"solver": Sketch(16)}),
        pytest.param(30, CROSS, marks=pytest.mark.long),  # more
        pytest.param(12, CROSS, marks=pytest.mark.long),
        pytest.param(30, {}, marks=pytest.mark.long),
        pytest.param(30, {"solver": "cg", "ridge": 1.0}, marks=pytest.mark.long),
        pytest.param(30, {**CROSS, "solver": Sketch(16)}, marks=pytest.mark.long),
    ],
)
@pytest.mark.thinned(2)
def test_the_variance_in_all_weights_is_exact(n: int, options: dict[str, Any]) -> None:
    agree(fitted(n, **options), data(40)[0].double())


@pytest.mark.long
@pytest.mark.parametrize("options", [{"ridge": 1e-3}, CROSS, {"solver": Sketch(16)}])
def test_the_variance_in_the_networks_own_type(options: dict[str, Any]) -> None:
    fit, x = fitted(40, torch.float32, **options), data(30)[0]
    mean, variance = fit.export(variance=True)(x)
    torch.testing.assert_close(mean, fit.predict(x), rtol=1e-4, atol=1e-4)
    found = fit.predictive(x).variance
    assert float((variance - found).abs().max() / found.max()) < 1e-3


@pytest.mark.long
def test_the_variance_at_other_sizes_of_images() -> None:
    fit = of_images(nn.AdaptiveAvgPool2d((1, 1)))
    module = fit.export(variance=True)
    for height, width in ((8, 6), (5, 11)):
        x = torch.randn(2, 2, height, width, generator=torch.Generator().manual_seed(height))
        mean, variance = module(x)
        torch.testing.assert_close(mean, fit.predict(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variance, fit.predictive(x).variance, rtol=1e-3, atol=1e-5)


POOLED = nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d((2, 1)))


def in_a_metric() -> Any:
    given, net = (IMAGES, torch.arange(len(IMAGES)) % 3), Images(POOLED, 6)
    curvature = linnet.curvature(net, given, linnet.likelihoods.Categorical())
    return linnet.fit(linnet.linearize(linnet.with_metric(net, curvature, damping=0.1)), given, ridge=0.1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the packages that write the file
@pytest.mark.parametrize("options", [{}, {"solver": Sketch(20)}, {"metric": True}])
def test_another_runtime_gives_the_variance(options: dict[str, Any], tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    fit = in_a_metric() if options.get("metric") else of_images(POOLED, 6, **options)
    module = fit.export(variance=True)
    torch.onnx.export(
        module, (IMAGES,), tmp_path / "m.onnx", dynamo=True, verbose=False,
        dynamic_shapes=module.meta["dynamic_shapes"],
    )  # fmt: skip
    x = torch.randn(1, 2, 11, 7, generator=torch.Generator().manual_seed(8))
    found = runtime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})
    for got, expected in zip(found, (fit.predict(x), fit.predictive(x).variance), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-5)


def test_a_factor_that_does_not_fit_names_its_size_and_the_sketch() -> None:
    fit = fitted(12)
    fit.memory = 1000
    with pytest.raises(MemoryBudgetError, match='solver="sketch"'):
        fit.export(variance=True)


@pytest.mark.parametrize(
    ("n", "structure", "options"),
    [
        (12, "kfac", {}),
        pytest.param(30, "kfac", {}, marks=pytest.mark.long),
        pytest.param(12, "ekfac", CROSS, marks=pytest.mark.long),
        pytest.param(12, "diagonal", {}, marks=pytest.mark.long),
        pytest.param(12, "full", {}, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_variance_in_the_coordinates_of_a_metric(n: int, structure: str, options: dict[str, Any]) -> None:
    (x, y), net = data(n), network().double()
    given = x.double(), y
    curvature = linnet.curvature(net, given, linnet.likelihoods.Categorical(), structure=structure)
    lin = linnet.linearize(linnet.with_metric(net, curvature, damping=0.1))
    agree(linnet.fit(lin, given, **options), data(40)[0].double())


FREE = float("nan")
HELD = torch.tensor([[1.0, FREE, -2.0], [0.0, 0.0, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("n", "params", "weight"),
    [
        (12, None, None),  # fewer outputs of training examples than weights
        pytest.param(30, None, 0.7, marks=pytest.mark.long),  # more, and a penalty
        pytest.param(30, None, None, marks=pytest.mark.long),
        pytest.param(12, None, 0.7, marks=pytest.mark.long),
        pytest.param(30, "last-layer", None, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_variance_under_equations_on_outputs(n: int, params: Any, weight: float | None) -> None:
    (x, y), new = data(n), data(40)[0].double()
    fit = linnet.fit(linnet.linearize(network().double(), params=params), (x.double(), y))
    held = fit.constrain(new[:2], HELD, weight=weight)
    agree(held, new)


@pytest.mark.long
@pytest.mark.parametrize("params", [None, "last-layer"])
def test_the_variance_where_some_positions_have_no_target(params: Any) -> None:
    (x, _), labels = data(9), torch.arange(27).view(9, 3) % 2
    labels[4, 1] = labels[7] = -100
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Unflatten(1, (3, 2))).double()
    fit = linnet.fit(linnet.linearize(net, params=params), (x.double(), labels), axis=-1)
    agree(fit, x.double())
