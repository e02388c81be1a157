"""Tables for pandas: their columns, rows and index; without pandas by a stand-in for it."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.audit import influence, mislabeled, ridge_path
from linnet.errors import DependencyError
from linnet.likelihoods import Bernoulli, Categorical, Gaussian
from linnet.shown import frame

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES, VALUES = (X[:, 0] > 0).long(), torch.cat([X[:, :1].sin(), X[:, 1:]], 1)


class Table:
    """The part of a DataFrame that linnet uses."""

    def __init__(self, arrays: dict[str, Any], index: str | None = None) -> None:
        assert len({len(array) for array in arrays.values()}) == 1
        self.arrays, self.index = arrays, SimpleNamespace(name=index)
        self.columns = [name for name in arrays if name != index]

    def set_index(self, name: str) -> Table:
        return Table(self.arrays, name)

    def rename_axis(self, name: str) -> Table:
        return Table(self.arrays, name)

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def reset_index(self) -> Table:
        return self

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


@pytest.fixture(autouse=True)
def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("pandas") is None:
        module = ModuleType("pandas")
        module.DataFrame = Table  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pandas", module)


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


@cache
def fitted(kind: str) -> Any:
    if kind == "adapted":
        return linnet.adapt(network(), (X, CLASSES))
    if kind == "values":
        return linnet.fit(linnet.linearize(network()), (X, VALUES))
    loss = "cross-entropy" if kind == "cross-entropy" else "squared"
    return linnet.fit(linnet.linearize(network()), (X, CLASSES), loss=loss, ridge=0.5)


def same(table: Any, name: str, values: torch.Tensor) -> bool:
    return bool(np.allclose(np.asarray(table[name]), values.numpy()))


@pytest.mark.parametrize("kind", ["classes", "cross-entropy", "adapted"])
def test_a_fit_of_classes_is_a_table_of_what_is_left_out(kind: str) -> None:
    fit = fitted(kind)
    table, out = fit.to_frame(), fit.loo()
    assert list(table.columns) == ["label", "left out", "right", "output 0", "output 1"]
    assert (len(table), table.index.name) == (30, "example")
    assert same(table, "label", CLASSES)
    assert same(table, "left out", out.argmax(1))
    assert same(table, "right", out.argmax(1) == CLASSES)
    assert same(table, "output 1", out[:, 1])


def test_a_fit_of_values_is_a_table_of_residuals() -> None:
    fit = fitted("values")
    table = fit.to_frame()
    assert list(table.columns) == [
        f"{name} {k}" for name in ("target", "left out", "residual") for k in (0, 1)
    ]
    assert same(table, "target 1", VALUES[:, 1])
    assert same(table, "residual 0", VALUES[:, 0] - fit.loo()[:, 0])


def test_a_path_is_a_table_by_ridge() -> None:
    path = fitted("classes").path()
    table = path.to_frame()
    assert table.index.name == "ridge"
    assert same(table.reset_index(), "ridge", path.ridges)
    assert same(table, "evidence", path.evidence)
    assert "loo_accuracy" in table.columns
    assert "loo_accuracy" not in fitted("values").path().to_frame().columns
    soft = fitted("cross-entropy").path()
    assert same(soft.to_frame(), "loo_error", soft.loo_error)
    validated = ridge_path(fitted("classes"), (X, CLASSES))
    assert list(validated.to_frame().columns) == ["loss", "distance", "accuracy", "gradient"]
    assert same(validated.to_frame(), "loss", validated.loss)


def test_influence_is_a_table_of_examples_and_predictions() -> None:
    found = influence(fitted("classes"), X[:3], labels=CLASSES[:3])
    table = found.to_frame()
    assert list(table.columns) == ["training", "test", "output", "influence", "loss"]
    assert len(table) == 30 * 3 * 2
    rows = zip(
        *(np.asarray(table[name]) for name in ("training", "test", "output", "influence", "loss")),
        strict=True,
    )
    for i, t, c, value, loss in rows:
        assert value == float(found.outputs[i, t, c])
        assert loss == float(found.loss[i, t])
    assert "loss" not in influence(fitted("classes"), X[:3]).to_frame().columns


def test_a_ranking_of_labels_is_a_table_with_the_worst_first() -> None:
    found = mislabeled(fitted("classes"))
    table = found.to_frame()
    assert table.index.name == "example"
    assert same(table.reset_index(), "example", found.order)
    assert same(table, "score", found.scores[found.order])
    assert same(table, "left out", found.predicted[found.order])
    assert np.all(np.diff(np.asarray(table["score"])) <= 0)
    assert same(table, "wrong", found.wrong[found.order])
    assert "LabelErrors(examples=" in repr(found)
    assert "label" not in mislabeled(fitted("values")).to_frame().columns


def test_a_prediction_of_classes_is_a_table_of_probabilities() -> None:
    prediction = fitted("classes").predictive(X[:5])
    table = prediction.to_frame()
    assert list(table.columns) == ["predicted", "probability", "class 0", "class 1"]
    assert same(table, "class 1", prediction.probs[:, 1])
    assert same(table, "probability", prediction.probs.max(1).values)
    one = linnet.Laplace(network(1), Bernoulli()).fit((X, CLASSES[:, None].double())).predictive(X[:5])
    assert same(one.to_frame(), "class 1", one.probs[:, 0])
    sampled = linnet.Laplace(network(), Categorical()).fit((X, CLASSES)).predictive(X[:5], "mc", samples=3)
    assert same(sampled.to_frame(), "class 0", sampled.probs[:, 0])


def test_a_prediction_of_values_is_a_table_of_means_and_deviations() -> None:
    process = linnet.TangentGP(network(1), Gaussian(variance=0.1)).fit(X, VALUES[:, :1])
    prediction = process.predictive(X[:5])
    table = prediction.to_frame()
    assert list(table.columns) == ["mean", "standard deviation"]
    assert same(table, "standard deviation", prediction.variance[:, 0].sqrt())


def test_types_that_numpy_lacks_are_widened() -> None:
    table = frame(
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, requires_grad=True), "c": None}
    )
    assert list(table.columns) == ["a", "b"]
    assert same(table, "a", torch.ones(2))


def test_a_missing_pandas_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DependencyError, match=r"pandas.*Expected: pandas 2.*To fix it: pip install pandas"):
        fitted("classes").to_frame()
