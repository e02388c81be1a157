"""The interface of all fitted models: ``predict``, ``predictive``, ``summary``, ``save``, ``repr``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Categorical, Gaussian
from linnet.predictive.gaussian import Predictive
from linnet.predictive.model import PredictiveModel

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES, VALUES = (X[:, 0] > 0).long(), X.sin()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)).double().eval()


MODELS: dict[str, Callable[[], PredictiveModel]] = {
    "fit": lambda: linnet.fit(linnet.linearize(network()), (X, CLASSES)),
    "softmax fit": lambda: linnet.fit(
        linnet.linearize(network()), (X, CLASSES), loss="cross-entropy", ridge=1.0
    ),
    "adapt": lambda: linnet.adapt(network(), (X, CLASSES)),
    "laplace": lambda: linnet.Laplace(network(), Categorical()).fit((X, CLASSES)),
    "process": lambda: linnet.TangentGP(network(), Gaussian()).fit(X, VALUES),
    "linear posterior": lambda: linnet.linear_posterior(
        linnet.linearize(network()), (X, CLASSES), Categorical()
    ),
    "factorized": lambda: linnet.linear_posterior(
        linnet.linearize(network()),
        (X, CLASSES),
        Categorical(),
        linnet.SVI(training=linnet.Training(epochs=2)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_mean_of_their_distribution(name: str) -> None:
    model = MODELS[name]()
    assert isinstance(model, PredictiveModel)
    prediction = model.predictive(X)
    assert isinstance(prediction, Predictive)
    mean = model.predict(X)
    assert isinstance(mean, Tensor)
    assert torch.allclose(mean, prediction.mean, atol=1e-12)
    assert prediction.variance.shape == mean.shape == (20, 2)
    assert prediction.covariance.shape == (20, 2, 2)
    assert torch.allclose(prediction.covariance.diagonal(dim1=1, dim2=2), prediction.variance)
    assert prediction.sample(3, 0).shape == (3, 20, 2)
    target = VALUES if name == "process" else CLASSES
    assert bool(prediction.log_density(target).isfinite().all())


@pytest.mark.parametrize("name", MODELS)
def test_models_show_what_they_are(name: str) -> None:
    model = MODELS[name]()
    summary = model.summary()
    assert json.loads(json.dumps(summary)) == summary
    *verdict, line = repr(model).splitlines()
    assert type(model).__name__ in line
    page = model._repr_html_()
    assert page.startswith("<table>")
    assert type(model).__name__ in page
    if name == "adapt":
        assert page.index(model.verdict) < page.index("examples")
    assert verdict == ([model.verdict] if name == "adapt" else [])


@pytest.mark.parametrize("name", MODELS)
def test_models_are_saved_or_say_that_they_cannot_be(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    if name in ("linear posterior", "factorized"):
        with pytest.raises(InputError, match=f"of a {type(model).__name__}"):
            model.save(tmp_path)
        assert not list(tmp_path.iterdir())
    else:
        file = model.save(tmp_path / "saved")
        for place in (file, tmp_path / "saved"):
            again = linnet.load(place, network())
            assert type(again) is type(model)
            assert torch.allclose(again.predict(X), model.predict(X), atol=1e-10)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    net = network()
    for place, said in ((tmp_path, "none of the files"), (tmp_path / "gone", "no such folder")):
        with pytest.raises(InputError, match=said):
            linnet.load(place, net)
    fit = MODELS["fit"]()
    fit.save(tmp_path)
    with pytest.raises(InputError, match="likelihood="):
        linnet.load(tmp_path, net, likelihood=Gaussian())
    linnet.curvature(net, (X, CLASSES), Categorical()).save(tmp_path)
    with pytest.raises(InputError, match="safetensors"):
        linnet.load(tmp_path, net)
    assert isinstance(linnet.load(tmp_path / "curvature.safetensors", net), linnet.Curvature)


def test_markup_in_a_summary_is_escaped() -> None:
    class Odd(PredictiveModel):
        def predictive(self, x: object) -> Predictive:  # type: ignore[override]
            raise AssertionError

        def summary(self) -> dict[str, object]:
            return {"<b>": "<script>", "numbers": {"a": 0.123456}, "lines": ["x", "y"]}

    page = Odd()._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a: 0.1235" in page
    assert "x<br>y" in page
