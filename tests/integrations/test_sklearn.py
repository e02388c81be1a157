"""The estimators of scikit-learn: its own conformance checks, its tools, and linnet's own fits as oracles."""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import linnet
from linnet.errors import DataError, DependencyError, InputError
from linnet.integrations import sklearn as adapter
from linnet.likelihoods import Categorical, Gaussian

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.linear_model import Ridge  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from linnet.integrations.sklearn import LinnetClassifier, LinnetRegressor  # noqa: E402


class Small:
    """Makes small networks in float64; its name is the same in every process."""

    def __call__(self, features: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs)).double()

    def __repr__(self) -> str:
        return "small"


make_network = Small()


def allowed(estimator: Any) -> dict[str, str]:
    """What the estimators do otherwise, and why."""
    why = "probabilities average over the variance of the outputs, so that two of them may change places"
    apart = hasattr(estimator, "predict_proba")
    copies = "the ridge is chosen by leave-one-out, where the copies of an example foretell each other"
    found = {"check_sample_weight_equivalence_on_dense_data": copies}
    return found | ({"check_decision_proba_consistency": why} if apart else {})


@pytest.mark.thinned(50)
@pytest.mark.filterwarnings("default")  # scikit-learn's own
@parametrize_with_checks(
    [
        LinnetRegressor(random_state=3),
        LinnetClassifier(random_state=3),
        LinnetRegressor(make_network, method="fit", random_state=3),
        LinnetClassifier(make_network, method="fit", random_state=3),
        LinnetClassifier(make_network, method="fit", loss="cross-entropy", random_state=3),
    ],
    expected_failed_checks=allowed,
)
def test_conforms(estimator: Any, check: Any) -> None:
    check(estimator)


def numbers(n: int = 40, d: int = 3, seed: int = 0) -> Any:
    """Inputs (n, d)."""
    return np.random.default_rng(seed).normal(size=(n, d))


def values(X: Any) -> Any:
    """A function with a bend."""
    return np.abs(X[:, 0]) + X[:, 1]


def names(X: Any) -> Any:
    """Three classes, of which no line separates the first."""
    return np.select([np.abs(X[:, 0]) < 0.6, X[:, 0] > 0], ["middle", "above"], "below")


def network(outputs: int = 1) -> nn.Module:
    """One of three features, as if it were trained."""
    torch.manual_seed(3)
    return make_network(3, outputs)


class TestRegressor:
    def test_is_the_adapted_network(self) -> None:
        X, new = numbers(), numbers(7, seed=1)
        net, y = network(), values(X)
        model = LinnetRegressor(net, random_state=5).fit(X, y)
        seed = int(np.random.RandomState(5).randint(2**31 - 1))
        fit = linnet.adapt(net, (torch.as_tensor(X), torch.as_tensor(y)[:, None]), seed=seed)
        mean, std = model.predict(new, return_std=True)
        expected = fit.predictive(torch.as_tensor(new)).with_noise()
        np.testing.assert_allclose(mean, expected.mean[:, 0])
        np.testing.assert_allclose(std, expected.variance[:, 0].sqrt())
        np.testing.assert_allclose(model.predict(new), mean)

    @pytest.mark.filterwarnings("error")
    def test_targets_that_cannot_be_written_to(self) -> None:  # as those of a DataFrame are
        X = numbers()
        y = values(X)
        y.setflags(write=False)
        assert np.array_equal(LinnetRegressor(network(), random_state=5).fit(X, y).fit_.targets[:, 0], y)

    @pytest.mark.parametrize("ridge", [0.3, "loo", "gcv"])
    def test_is_the_fitted_network(self, ridge: float | str) -> None:
        X, net = numbers(), network()
        model = LinnetRegressor(net, method="fit", ridge=ridge).fit(X, values(X))
        data = torch.as_tensor(X), torch.as_tensor(values(X))[:, None]
        fit = linnet.fit(linnet.linearize(net), data, ridge=ridge)
        np.testing.assert_allclose(model.predict(X), fit.predict(data[0])[:, 0])

    def test_has_a_metric(self) -> None:
        X, net = numbers(), network()
        data = torch.as_tensor(X), torch.as_tensor(values(X))[:, None]
        G = linnet.curvature(net, data, Gaussian(), structure="kfac")
        fit = linnet.fit(linnet.linearize(linnet.with_metric(net, G)), data, ridge=0.1)
        model = LinnetRegressor(net, method="fit", metric="kfac", ridge=0.1).fit(X, values(X))
        np.testing.assert_allclose(model.predict(X), fit.predict(data[0])[:, 0])
        plain = LinnetRegressor(net, method="fit", ridge=0.1).fit(X, values(X))
        assert abs(plain.predict(X) - model.predict(X)).max() > 1e-3

    def test_without_a_network_it_bends(self) -> None:
        X, new = numbers(120), numbers(200, seed=1)
        score = LinnetRegressor(random_state=0).fit(X, values(X)).score(new, values(new))
        assert score > 0.95 > 0.8 > Ridge().fit(X, values(X)).score(new, values(new))

    def test_units_do_not_matter(self) -> None:
        X = numbers()
        one = LinnetRegressor(random_state=0).fit(X, values(X))
        other = LinnetRegressor(random_state=0).fit(1e3 * X + 1e5, 50 + 1e-3 * values(X))
        new = numbers(9, seed=1)
        np.testing.assert_allclose(other.predict(1e3 * new + 1e5), 50 + 1e-3 * one.predict(new), rtol=1e-6)

    def test_several_targets(self) -> None:
        X = numbers()
        y = np.stack([values(X), -X[:, 2]], 1)
        mean, std = LinnetRegressor(random_state=0).fit(X, y).predict(X[:5], return_std=True)
        assert mean.shape == std.shape == (5, 2)
        assert LinnetRegressor(random_state=0).fit(X, y[:, :1]).predict(X).shape == (40, 1)

    @pytest.mark.filterwarnings("error")
    def test_targets_of_several_units_are_as_sure_as_each_alone_would_be(self) -> None:
        X, new, unit = numbers(), numbers(9, seed=1), np.array([1.0, 1e-4])
        y = np.stack([values(X), 3 - X[:, 2]], 1)
        one = LinnetRegressor(random_state=0).fit(X, y)
        other = LinnetRegressor(random_state=0).fit(X, unit * y)
        for own, scaled in zip(
            one.predict(new, return_std=True), other.predict(new, return_std=True), strict=True
        ):
            np.testing.assert_allclose(scaled, unit * own, rtol=1e-6)
        np.testing.assert_allclose(
            other.predict_interval(new), unit[:, None] * one.predict_interval(new), rtol=1e-6
        )

    def test_times_are_refused(self) -> None:
        X, times = numbers(), np.datetime64("2020-01-01") + np.arange(40)
        with pytest.raises(InputError, match=r"y has times.*timedelta64"):
            LinnetRegressor(random_state=0).fit(X, times)
        with pytest.raises(InputError, match="X has times"):
            LinnetRegressor(random_state=0).fit(times[:, None], values(X))

    def test_intervals_are_those_of_the_fit(self) -> None:
        X = numbers()
        model = LinnetRegressor(random_state=0).fit(X, values(X))
        ends = model.predict_interval(X[:5], coverage=0.8)
        np.testing.assert_allclose(ends, model.fit_.interval(model.inputs(X[:5]), 0.8)[:, 0])
        both = LinnetRegressor(random_state=0).fit(X, np.stack([values(X), X[:, 0]], 1))
        assert both.predict_interval(X[:5]).shape == (5, 2, 2)
        with pytest.raises(NotFittedError):
            LinnetRegressor().predict_interval(X)

    def test_many_examples_are_predicted_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        X = numbers()
        model = LinnetRegressor(random_state=0).fit(X, values(X))
        whole = model.predict(X, return_std=True)
        monkeypatch.setattr(adapter, "BATCH", 7)
        for one, other in zip(whole, model.predict(X, return_std=True), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-7)


class TestClassifier:
    @pytest.mark.parametrize("labels", [["c", "a", "b"], [7, -1, 3], [2.0, 0.0, 1.0]])
    def test_labels_of_any_type(self, labels: list[Any]) -> None:
        X = numbers(60)
        position = np.searchsorted(["above", "below", "middle"], names(X))
        model = LinnetClassifier(random_state=0).fit(X, np.array(labels)[position])
        assert model.classes_.tolist() == sorted(labels)
        assert model.score(X, np.array(labels)[position]) > 0.9
        reference = LinnetClassifier(random_state=0).fit(X, names(X))
        assert reference.fit_.class_names == ("above", "below", "middle")
        columns = [labels.index(label) for label in sorted(labels)]
        np.testing.assert_allclose(model.predict_proba(X), reference.predict_proba(X)[:, columns], rtol=1e-6)

    def test_two_classes(self) -> None:
        X = numbers(60)
        y = names(X) == "middle"
        model = LinnetClassifier(random_state=0).fit(X, y)
        scores = model.decision_function(X)
        assert scores.shape == (60,)
        np.testing.assert_array_equal(scores > 0, model.predict(X))
        np.testing.assert_array_equal(model.predict_proba(X)[:, 1] > 0.5, model.predict(X))

    def test_sets_are_those_of_the_fit(self) -> None:
        X = numbers(60)
        model = LinnetClassifier(random_state=0).fit(X, names(X))
        sets = model.predict_set(X, coverage=0.8)
        np.testing.assert_array_equal(sets, model.fit_.sets(model.inputs(X), 0.8))
        own = model.predict_set(X, coverage=0.8, by_class=True)
        np.testing.assert_array_equal(own, model.fit_.sets(model.inputs(X), 0.8, by_class=True))
        bare = model.predict_set(X, coverage=0.8, empty=True)
        np.testing.assert_array_equal(bare, model.fit_.sets(model.inputs(X), 0.8, empty=True))
        assert sets.dtype == bool
        assert sets[np.arange(60), np.searchsorted(model.classes_, names(X))].mean() > 0.8
        with pytest.raises(NotFittedError):
            LinnetClassifier().predict_set(X)

    def test_the_probabilities_are_those_of_the_fit(self) -> None:
        X, net = numbers(), network(3)
        model = LinnetClassifier(net, method="fit", metric="kfac").fit(X, names(X))
        data = torch.as_tensor(X), torch.as_tensor(np.unique(names(X), return_inverse=True)[1])
        G = linnet.curvature(net, data, Categorical(), structure="kfac")
        fit = linnet.fit(linnet.linearize(linnet.with_metric(net, G)), data, ridge="loo")
        np.testing.assert_allclose(model.predict_proba(X), fit.predictive(data[0]).probs)
        np.testing.assert_allclose(model.decision_function(X), fit.predict(data[0]))

    def test_cross_entropy_with_one_output(self) -> None:
        X, net = numbers(), network()
        y = np.where(X[:, 0] + X[:, 1] > 0, "up", "down")
        model = LinnetClassifier(net, method="fit", loss="cross-entropy", ridge=0.1).fit(X, y)
        data = torch.as_tensor(X), torch.as_tensor(y == "up").long()
        fit = linnet.fit(linnet.linearize(net), data, loss="cross-entropy", ridge=0.1)
        np.testing.assert_allclose(model.decision_function(X), fit.predict(data[0])[:, 0])
        np.testing.assert_allclose(model.predict_proba(X), fit.predictive(data[0]).probs)
        assert model.score(X, y) > 0.9

    def test_images_and_an_encoder(self) -> None:
        X = np.random.default_rng(0).normal(size=(30, 2, 6, 6)).astype(np.float32)
        y = np.where(X[:, 0].mean((1, 2)) > 0, "light", "dark")
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = LinnetClassifier(encoder, random_state=0).fit(X, y)
        assert model.score(X, y) > 0.8
        assert LinnetClassifier(random_state=0).fit(X, y).predict(X).shape == (30,)

    def test_one_class(self) -> None:
        with pytest.raises(DataError, match="one class only"):
            LinnetClassifier().fit(numbers(), np.full(40, "a"))


class TestWithScikitLearn:
    def test_pipeline_and_grid_search(self) -> None:
        X = numbers(60)
        pipeline = make_pipeline(StandardScaler(), LinnetClassifier(network(2), random_state=0))
        own = "linnetclassifier__"
        grid = {own + "ridge": np.array([0.01, 1e3]), own + "network": [network(), make_network]}
        search = GridSearchCV(pipeline, grid, cv=2).fit(X, names(X))
        assert search.best_params_[own + "ridge"] == 0.01
        assert search.best_estimator_[-1].fit_.n == 60

    def test_cross_validation_is_near_leave_one_out(self) -> None:
        X = numbers(80)
        y = values(X) + 0.3 * numbers(80, 1, seed=2)[:, 0]
        model = LinnetRegressor(random_state=0)
        scores = cross_val_score(model, X, y, cv=5, scoring="neg_mean_squared_error")
        left_out = model.fit(X, y).fit_.loo()[:, 0].numpy()
        assert abs(-scores.mean() / np.square(y - left_out).mean() - 1) < 0.3

    def test_clones_have_the_settings_and_no_fit(self) -> None:
        X = numbers()
        model = LinnetRegressor(network(), ridge=0.5, random_state=1).fit(X, values(X))
        copy = clone(model)
        assert not hasattr(copy, "fit_")
        assert copy.network is not model.network
        np.testing.assert_allclose(copy.fit(X, values(X)).predict(X), model.predict(X))


@pytest.mark.parametrize("method", ["adapt", "fit"])
def test_pickled_estimators_answer_as_before(method: str) -> None:
    X = numbers()
    model = LinnetClassifier(network(3), method=method, random_state=0).fit(X, names(X))
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X), rtol=1e-5)
    x = again.inputs(X[:2])
    torch.testing.assert_close(again.fit_.influence(x), model.fit_.influence(x))
    assert again.fit_.forget([0]).n == 39


@pytest.mark.parametrize("tune", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_given_is_changed(tune: bool) -> None:
    X, net = numbers(), network()
    before = [p.clone() for p in net.parameters()]
    y, state = values(X), torch.random.get_rng_state()
    model = LinnetRegressor(net, tune=tune).fit(X, y)
    LinnetRegressor(make_network).fit(X, y)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    X[:] = 0
    assert model.fit_.x.abs().min() > 0


def fails(features: int, outputs: int) -> nn.Module:
    """A factory with a fault."""
    raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "train"}, "method='train'"),
        ({"method": "fit"}, "without a network"),
        ({"solver": "cg"}, "solver='cg' with method='adapt'"),
        ({"metric": "kfac"}, "metric='kfac' with method='adapt'"),
        ({"loss": "cross-entropy"}, "loss='cross-entropy' with method='adapt'"),
        ({"ridge": "gcv"}, "ridge='gcv'"),
        ({"ridge": -1.0}, "ridge"),
        ({"tune": 1}, "tune=1"),
        ({"method": "fit", "network": make_network, "tune": True}, "tune=True with method='fit'"),
        ({"network": 3}, "network=3"),
        ({"network": fails}, "no such layer"),
        ({"network": lambda features, outputs: None}, "return the network"),
        ({"method": "fit", "network": lambda d, c: make_network(d, c + 1)}, "4 outputs for 3 classes"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    X = numbers()
    with pytest.raises(InputError, match=said):
        LinnetClassifier(**settings).fit(X, names(X))


@pytest.mark.parametrize("kind", [LinnetRegressor, LinnetClassifier])
def test_a_column_of_times_is_refused_by_name(kind: Any) -> None:
    X = pd.DataFrame(numbers(), columns=["a", "b", "c"])
    dates = pd.Series(pd.date_range("2024-01-01", periods=40))
    y = pd.Series(np.arange(40) % 2)
    for times in (dates, dates - dates[0], dates.dt.tz_localize("UTC")):
        with pytest.raises(InputError, match=r"^X\['when'\] has times.*days"):
            kind().fit(X.assign(when=times), y)
        with pytest.raises(InputError, match=r"^y\['when'\] has times"):
            kind().fit(X, X[["a"]].assign(when=times))
    days = (dates - dates.min()) / np.timedelta64(1, "D")
    assert kind().fit(X.assign(when=days), y).n_features_in_ == 4


def test_without_scikit_learn_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.__getattr__.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.base", None)
        with pytest.raises(DependencyError, match=r"pip install 'linnet-torch\[sklearn\]'"):
            _ = adapter.LinnetRegressor
    with pytest.raises(AttributeError, match="nothing"):
        _ = adapter.nothing


def test_examples_and_classes_that_count_more() -> None:
    X, y = numbers(n=60), np.where(np.arange(60) % 10 == 0, "rare", "usual")
    plain = LinnetClassifier(random_state=0).fit(X, y)
    balanced = LinnetClassifier(class_weight="balanced", random_state=0).fit(X, y)
    by_hand = np.where(y == "rare", 60 / (2 * 6), 60 / (2 * 54))
    same = LinnetClassifier(random_state=0).fit(X, y, sample_weight=by_hand)
    np.testing.assert_allclose(balanced.decision_function(X), same.decision_function(X), rtol=1e-6)
    assert (balanced.predict(X) == "rare").sum() > (plain.predict(X) == "rare").sum()
    three = np.where(np.arange(60) < 20, "third", y)
    for last in ("usual", "third"):  # of outputs that nothing speaks of
        with pytest.raises(DataError, match="a class has no example"):
            LinnetClassifier(random_state=0).fit(X, three, sample_weight=(three != last).astype(float))
    # no weight: as if it were not there; the random network is made of all samples
    kept, options = np.arange(60) >= 10, {"method": "fit", "ridge": 0.1, "random_state": 0}
    for made, answers in ((LinnetClassifier, y), (LinnetRegressor, values(X))):
        one = made(make_network, **options).fit(X, answers, sample_weight=kept.astype(float))
        two = made(make_network, **options).fit(X[kept], answers[kept])
        ask = made.decision_function if made is LinnetClassifier else made.predict
        np.testing.assert_allclose(ask(one, X), ask(two, X), rtol=1e-6)


def test_classes_that_are_called_by_numbers_are_no_places() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = 1 + (x[:, 0] > 0) + (x[:, 1] > 0.5)
    model = LinnetClassifier(random_state=0).fit(x, y)
    assert model.fit_.class_names == ("1", "2", "3")
    for one in (1, "1"):
        assert model.fit_.forget(classes=one).n == (y != 1).sum()
    with pytest.raises(InputError, match="classes=0"):
        model.fit_.forget(classes=0)
    with pytest.raises(DataError, match=r"y holds numbers, and the classes are called '1'"):
        model.fit_.update((model.inputs(x[:3]), y[:3]))
    more = model.fit_.update((model.inputs(x[:3]), y[:3].astype(str)))
    assert (more.labels[-3:].numpy() == y[:3] - 1).all()
    model.fit_ = model.fit_.update((model.inputs(x[:9] + 9), ["7"] * 9))
    assert model.predict_proba(x[:1]).shape == (1, 4)
    assert (model.predict(x[:3] + 9) == 7).all()
    assert model.classes_.tolist() == [1, 2, 3, 7]


@pytest.mark.parametrize("classes", [2, 4])
def test_a_class_more_of_classes_that_are_numbered_from_zero(classes: int) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % (classes + 1)
    x = 3 * np.eye(classes + 1)[y] + 0.3 * rng.normal(size=(60, classes + 1))
    model = LinnetClassifier(random_state=0).fit(x[y < classes], y[y < classes])
    model.fit_ = model.fit_.update((model.inputs(x[y == classes]), y[y == classes]))
    assert model.predict_set(x).shape == (60, len(model.classes_))
    assert model.score(x, y) > 0.9
    assert model.classes_.tolist() == list(range(classes + 1))
    assert model.predict_proba(x).shape == (60, classes + 1)


def test_names_that_may_be_slips_are_said() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = ["cat" if value > 0 else "dog" for value in x[:, 0]]
    torch.manual_seed(0)
    fit = linnet.adapt(
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), (x, y)
    )
    for name, like in (("Dog", "dog"), ("dgo", "dog")):
        with pytest.warns(UserWarning, match=f"the new class '{name}', and there is '{like}'"):
            fit.relabel([0], [name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.update((x[:2], ["horse"] * 2))
