"""Cross-fitted heads: leave-one-out is that of the whole procedure, by brute force, and honest on noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.fitting.head import RECORD, deal, example_hashes
from linnet.fitting.last_layer import with_centered_head
from tests.fitting.problems import fit_options, near, real
from tests.grids import grid

X, Y = real(18, 4, seed=1), torch.arange(18) % 3


def body(inputs: int = 4, width: int = 6) -> nn.Module:
    """A network whose last layer has ten outputs."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 10)).double()


def crossed(folds: int = 3, **options: Any) -> nn.Module:
    """A network with a cross-fitted head."""
    return linnet.with_head(body(), 3, linnet.Probe(ridge=0.3, cross_fit=folds), data=(X, Y), **options)


def procedure(rest: Tensor, held: Tensor, centered: bool = False, **options: Any) -> Tensor:
    """Head, linearization and fit on some examples; outputs for others."""
    model = linnet.with_head(body(), 3, linnet.Probe(ridge=0.3), data=(X[rest], Y[rest]))
    model = with_centered_head(model) if centered else model
    return linnet.fit(linnet.linearize(model), (X[rest], Y[rest]), **fit_options(**options)).predict(X[held])


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("solver", grid(("dual", "primal", "cg"), ("dual", "primal")))
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.thinned(2)
def test_leave_one_out_is_that_of_the_whole_procedure(loss: str, solver: str, centered: bool) -> None:
    model = crossed()
    fold = deal(example_hashes(X, Y), Y, 3)
    lin = linnet.linearize(with_centered_head(model) if centered else model)
    options: dict[str, Any] = {"loss": loss, "ridge": 0.5, "solver": solver, "tolerance": 1e-12}
    fit = linnet.fit(lin, (X, Y), **fit_options(**options))
    for k in range(3):
        held, rest = fold == k, fold != k
        assert held.sum() == 6
        near(fit.loo()[held], procedure(rest, held, centered, **fit_options(**options)), 1e-7)
    assert "cross-fitted" in fit.summary()["warnings"][0]
    assert "optimistic" not in "".join(fit.summary()["warnings"])
    # the fit itself is the usual one
    plain = linnet.with_head(body(), 3, linnet.Probe(ridge=0.3), data=(X, Y))
    plain_lin = linnet.linearize(with_centered_head(plain) if centered else plain)
    near(fit.predict(X), linnet.fit(plain_lin, (X, Y), **fit_options(**options)).predict(X), 1e-9)


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.thinned(2)
def test_the_ridge_is_chosen_by_held_out_outputs(loss: str) -> None:
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    lin = linnet.linearize(linnet.with_head(body(), 3, linnet.Probe(ridge=10.0, cross_fit=3), data=(X, y)))
    fit = linnet.fit(lin, (X, y), loss=loss, ridge="loo")
    assert "held-out" in fit.summary()["reasons"]["ridge"]
    assert "edge" not in fit.summary()["reasons"]["ridge"]

    def score(ridge: float) -> float:
        outputs = linnet.fit(lin, (X, y), loss=loss, ridge=ridge).loo()
        if loss == "squared":
            return (15.0 * nn.functional.one_hot(y, 3) - outputs).square().sum().item()
        return nn.functional.cross_entropy(outputs, y).item()

    step = 10**0.25 if loss == "squared" else 10**0.5
    assert score(fit.ridge) <= min(score(fit.ridge * step), score(fit.ridge / step)) * (1 + 1e-9)
    again = linnet.fit(lin, (X, y), loss=loss, ridge=fit.ridge)
    near(again.loo(), fit.loo(), 1e-7)
    by_evidence = linnet.fit(lin, (X, y), loss=loss, ridge="evidence")
    assert by_evidence.held_out is not None
    assert by_evidence.summary()["criterion"] == "evidence"


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_labels_that_mean_nothing_cannot_be_predicted(loss: str) -> None:
    """Random labels, more features than samples: leave-one-out behind a probe believes, held-out does not."""
    x, y = real(60, 40, seed=5), torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(6))
    believed, honest = [], []
    for cross_fit, found in ((0, believed), (5, honest)):
        model = linnet.with_head(body(40, 100), 3, linnet.Probe(ridge=1e-3, cross_fit=cross_fit), data=(x, y))
        fit = linnet.fit(linnet.linearize(model), (x, y), loss=loss, ridge=3.0)
        found.append((fit.loo().argmax(1) == y).double().mean().item())
        assert ("leave-one-out and the quantities chosen by it are optimistic" in repr(fit)) == (
            not cross_fit
        )
    assert believed[0] > 0.55
    assert honest[0] < 1 / 3 + 2 * (2 / 9 / 60) ** 0.5  # chance, and two standard errors


def test_equal_examples_share_a_fold_and_classes_are_spread() -> None:
    examples = ["a", "b", "a", "c", "d", "e", "a", "f"]
    y = torch.tensor([0, 0, 0, 0, 1, 1, 0, 1])
    fold = deal(examples, y, 3)
    assert fold[0] == fold[2] == fold[6]
    distinct = [0, 1, 3, 4, 5, 7]
    assert fold[distinct].bincount().tolist() == [2, 2, 2]
    generator = torch.Generator().manual_seed(1)
    other = [deal([str(i) for i in range(30)], torch.zeros(30), 3, generator).tolist() for _ in range(2)]
    assert other[0] != other[1]


def test_examples_that_the_head_has_not_seen_are_dealt_too() -> None:
    extra = real(6, 4, seed=8)
    x, y = torch.cat([X, extra]), torch.cat([Y, torch.arange(6) % 3])
    fit = linnet.fit(linnet.linearize(crossed()), (x, y), ridge=0.5)
    assert fit.held_out is not None
    assert fit.loo().shape == (24, 3)
    assert fit.loo()[18:].abs().sum(1).min() > 0


def test_another_head_goes_without() -> None:
    model = crossed()
    with torch.no_grad():
        model[2].weight[0, 0] += 1.0
    fit = linnet.fit(linnet.linearize(model), (X, Y), ridge=0.5)
    assert fit.held_out is None
    assert "optimistic" in "".join(fit.summary()["warnings"])
    one_fold = deal(example_hashes(X, Y), Y, 3) == 0
    assert linnet.fit(linnet.linearize(crossed()), (X[one_fold], Y[one_fold]), ridge=0.5).held_out is None


def test_changes_keep_the_head_and_say_so() -> None:
    fit = linnet.fit(linnet.linearize(crossed()), (X, Y), ridge=0.5)
    assert fit.forget([0]).held_out is None
    assert fit.forget([0]).loo().shape == (17, 3)


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_a_saved_fit_keeps_its_held_out_outputs(loss: str, tmp_path: Path) -> None:
    model = crossed()
    fit = linnet.fit(linnet.linearize(model), (X, Y), loss=loss, ridge=0.5)
    fit.save(tmp_path)
    near(linnet.load_fit(tmp_path, model).loo(), fit.loo(), 1e-12)


def test_the_temperature_is_that_of_held_out_outputs() -> None:
    crossed_fit = linnet.fit(linnet.linearize(crossed()), (X, Y), ridge=0.5)
    plain = linnet.with_head(body(), 3, linnet.Probe(ridge=0.3), data=(X, Y))
    fit = linnet.fit(linnet.linearize(plain), (X, Y), ridge=0.5)
    assert crossed_fit.temperature != fit.temperature


def test_a_probe_has_no_folds_unless_it_is_told() -> None:
    assert "folds" not in getattr(linnet.with_head(body(), 3, data=(X, Y)), RECORD)


def test_centering_keeps_what_is_needed_and_no_more() -> None:
    assert hasattr(with_centered_head(crossed()), RECORD)
    assert not hasattr(with_centered_head(linnet.with_head(body(), 3, data=(X, Y))), RECORD)


@pytest.mark.long
def test_leave_one_out_is_honest_on_photographs(data_directory: Path) -> None:
    """MobileNetV2 features of 100 flowers, 1280 for each: a probe knows them by heart, its folds do not."""
    from experiments.sources import images, pixels, pretrained, shots

    flowers = images("flowers_64", str(data_directory))
    model, normalization = pretrained("mobilenet", str(data_directory))
    rows = shots(flowers.train_y, 20, 0)
    x, y = pixels(flowers.train_x[rows.numpy()], normalization), flowers.train_y[rows]
    x_test, y_test = pixels(flowers.test_x[::6], normalization), flowers.test_y[::6]

    def fit(cross_fit: int) -> Any:
        head = linnet.with_head(model, flowers.classes, linnet.Probe(cross_fit=cross_fit), data=(x, y))
        return linnet.fit(linnet.linearize(head, params="classifier"), (x, y), ridge=1000.0, solver="dual")

    def rate(outputs: Tensor, labels: Tensor) -> float:
        return (outputs.argmax(1) == labels).double().mean().item()

    believed, crossed_fit = rate(fit(0).loo(), y), fit(5)
    test = rate(crossed_fit.predict(x_test), y_test)
    assert believed > test + 0.25
    assert abs(rate(crossed_fit.loo(), y) - test) < 0.12
