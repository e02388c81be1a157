"""``fit.plot`` and ``model.plot``: what they draw, on which axes, and how they refuse."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from torch import nn

import linnet
from linnet.errors import DataError, DependencyError, InputError
from linnet.likelihoods import Bernoulli, Categorical, Gaussian
from linnet.shown import Shown

G = torch.Generator().manual_seed(0)
X = torch.randn(40, 2, generator=G, dtype=torch.float64)
CLASSES, VALUES = (X[:, 0] + 0.3 * X[:, 1] > 0).long(), X[:, :1].sin()
TEST = torch.randn(30, 2, generator=G, dtype=torch.float64)
TEST_CLASSES, TEST_VALUES = (TEST[:, 0] > 0).long(), TEST[:, :1].sin()


def network(inputs: int = 2, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


@cache
def fitted(kind: str) -> Any:
    if kind == "values":
        return linnet.fit(linnet.linearize(network(outputs=1)), (X, VALUES))
    if kind == "adapted":
        return linnet.adapt(network(), (X, CLASSES))
    if kind == "cross-entropy":
        return linnet.fit(linnet.linearize(network()), (X, CLASSES), loss="cross-entropy", ridge=0.5)
    if kind == "chosen cross-entropy":
        return linnet.fit(linnet.linearize(network()), (X, CLASSES), loss="cross-entropy", ridge="loo")
    if kind == "process":
        return linnet.TangentGP(network(outputs=1), Gaussian(variance=0.01)).fit(X, VALUES)
    if kind == "laplace":
        return linnet.Laplace(network(), Categorical()).fit((X, CLASSES))
    solver = {"classes": "dual", "primal": "primal", "cg": "cg"}[kind]
    return linnet.fit(linnet.linearize(network()), (X, CLASSES), ridge=0.1, solver=solver)


KINDS = ("classes", "primal", "cg", "values", "adapted", "cross-entropy", "chosen cross-entropy")


@pytest.fixture(autouse=True)
def closed_figures() -> Any:
    plt.close("all")
    yield
    plt.close("all")


def test_axes_in_and_a_display_out() -> None:
    figure, axes = plt.subplots(1, 2)
    display = fitted("classes").plot.ridge(axes[1])
    assert display.ax_ is axes[1]
    assert display.figure_ is figure
    assert not axes[0].lines
    assert axes[1].lines
    assert display.plot(axes[0]) is display
    assert display.ax_ is axes[0]
    assert axes[0].lines
    assert len(plt.get_fignums()) == 1


def test_without_axes_there_is_a_new_figure() -> None:
    display = fitted("classes").plot.spectrum()
    assert isinstance(display.ax_, Axes)
    assert plt.get_fignums() == [1]
    assert isinstance(display, Shown)
    assert "degrees_of_freedom" in display._repr_html_()


def test_nothing_global_of_matplotlib_changes() -> None:
    before = dict(mpl.rcParams)
    fitted("classes").plot.influence(TEST[:1])
    fitted("classes").plot.calibration(TEST, TEST_CLASSES)
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_the_ridge_is_marked_on_its_own_curve(kind: str) -> None:
    fit = fitted(kind)
    display = fit.plot.ridge()
    path = fit.path()
    if kind != "chosen cross-entropy":
        assert np.allclose(display.scores["leave-one-out"], path.loo_error.numpy())
    (mark,) = [line for line in display.ax_.lines if line.get_marker() == "o"]
    assert mark.get_xdata()[0] == fit.ridge
    curve = display.ax_.lines[0]
    assert min(curve.get_ydata()) <= mark.get_ydata()[0] <= max(curve.get_ydata())
    assert display.ax_.get_ylabel() == ("log loss" if "cross" in kind else "mean squared error")


def test_a_chosen_path_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitted("chosen cross-entropy")
    monkeypatch.setattr(type(fit), "path", lambda self, ridges=None: pytest.fail("solved again"))
    assert len(fit.plot.ridge().ridges) == len(fit.chosen_path.ridges)


def test_other_scores_of_the_path() -> None:
    fit = fitted("classes")
    path = fit.path()
    cross_validation = fit.plot.ridge().scores["generalized cross-validation"]
    assert np.allclose(cross_validation, 2 * path.gcv)  # summed over two outputs
    # at a large ridge both are the mean squared residual of an example
    assert cross_validation[-1] == pytest.approx(float(path.loo_error[-1]), rel=0.2)
    evidence = fit.plot.ridge(of="evidence")
    assert np.allclose(evidence.scores["evidence"], path.evidence)
    accuracy = fit.plot.ridge(of="accuracy")
    assert np.allclose(accuracy.scores["leave-one-out"], path.loo_accuracy)
    with pytest.raises(InputError, match="of='accuracy' of a regression"):
        fitted("values").plot.ridge(of="accuracy")


@pytest.mark.parametrize("kind", KINDS)
def test_the_spectrum_is_that_of_the_kernel(kind: str) -> None:
    fit = fitted(kind)
    display = fit.plot.spectrum()
    if kind == "adapted":
        free = torch.eye(fit.n, dtype=torch.float64) - 1 / fit.n  # of the intercept
        expected = torch.linalg.eigvalsh(free @ fit.system.kernel @ free)
    else:
        kernel = fit.module.kernel(X)
        size = kernel.shape[0] * kernel.shape[1] if kernel.ndim == 4 else kernel.shape[0]
        expected = torch.linalg.eigvalsh(kernel.reshape(size, size))
    top = torch.as_tensor(display.eigenvalues).sort(descending=True).values[:10]
    assert torch.allclose(top, expected.flip(0)[:10], rtol=1e-8)
    drawn = display.ax_.lines[0].get_ydata()
    assert drawn[0] == pytest.approx(float(expected[-1]))
    if "cross" in kind:
        assert display.degrees_of_freedom is None
    else:
        freedom = float((expected / (expected + fit.ridge)).sum())
        assert display.degrees_of_freedom == pytest.approx(freedom, rel=1e-8)


def test_a_fit_by_iterations_has_a_spectrum_where_its_kernel_has_room() -> None:
    factored = fitted("primal").plot.spectrum().eigenvalues
    assert np.allclose(np.sort(fitted("cg").plot.spectrum().eigenvalues)[-32:], factored)
    small = linnet.fit(linnet.linearize(network()), (X, CLASSES), ridge=0.1, solver="cg", memory=400_000)
    with pytest.raises(InputError, match=r"solver=.dual"):
        small.plot.spectrum()


@pytest.mark.parametrize("kind", KINDS)
def test_influence_draws_the_largest_first(kind: str) -> None:
    fit = fitted(kind)
    display = fit.plot.influence(TEST[3:4], top=5)
    every = fit.influence(TEST[3:4])[:, 0, display.output]
    assert len(display.examples) == 5
    assert np.allclose(display.values, every[torch.as_tensor(display.examples)])
    others = np.delete(np.abs(every.numpy()), display.examples)
    assert np.abs(display.values).min() >= others.max()
    assert list(display.values) == sorted(display.values, reverse=True)
    widths = [bar.get_width() for bar in display.ax_.patches]
    assert np.allclose(widths, display.values)
    named = display.ax_.get_yticklabels()[0].get_text()
    first = int(display.examples[0])
    assert named == (str(first) if fit.labels is None else f"{first} (class {int(CLASSES[first])})")
    if fit.labels is not None:
        assert display.output == int(fit.predict(TEST[3:4]).argmax())


def test_calibration_of_classes_is_that_of_the_report() -> None:
    for kind in ("classes", "adapted", "cross-entropy", "laplace"):
        model = fitted(kind)
        display = model.plot.calibration(TEST, TEST_CLASSES, bins=15)
        report = linnet.evaluate(lambda x, model=model: model.predictive(x), (TEST, TEST_CLASSES))
        assert float(np.mean(display.correct)) == pytest.approx(report.accuracy)
        assert float(np.mean(display.confidence)) == pytest.approx(report.confidence)
        assert display.error == pytest.approx(report.ece, abs=1e-12)


def test_calibration_of_values_is_that_of_the_report() -> None:
    for kind in ("values", "process"):
        model = fitted(kind)
        display = model.plot.calibration(TEST, TEST_VALUES)
        report = linnet.evaluate(lambda x, model=model: model.predictive(x).with_noise(), (TEST, TEST_VALUES))
        assert display.observed[9] == pytest.approx(float(report.coverage(0.5)))
        drawn = model.plot.predicted(TEST, TEST_VALUES[:, 0])
        assert np.sqrt(np.mean((drawn.mean - drawn.target) ** 2)) == pytest.approx(report.rmse)


def test_one_logit_is_two_classes() -> None:
    model = linnet.Laplace(network(outputs=1), Bernoulli()).fit((X, CLASSES[:, None].double()))
    display = model.plot.calibration(TEST, TEST_CLASSES)
    p = model.predictive(TEST).probs[:, 0]
    assert np.allclose(display.confidence, torch.maximum(p, 1 - p))
    assert (display.correct == ((p > 0.5).long() == TEST_CLASSES).numpy()).all()


def test_a_curve_has_two_bands() -> None:
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    process = linnet.TangentGP(network(1, 1), Gaussian(variance=0.04)).fit(x, x.sin())
    display = process.plot.curve(x.flip(0))
    found = process.predictive(x)
    order = np.argsort(display.x)
    assert np.allclose(display.mean[order], found.mean[:, 0])
    assert np.allclose(display.std[order], found.variance[:, 0].sqrt())
    assert np.allclose(display.noise[order], (found.variance[:, 0] + 0.04).sqrt())
    line = display.ax_.lines[-1]
    assert list(line.get_xdata()) == sorted(line.get_xdata())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: p.ridge("axes"), InputError, "ax"),
        (lambda p: p.ridge(of="loss"), InputError, "of"),
        (lambda p: p.influence(TEST), InputError, r"x\[:1\]"),
        (lambda p: p.influence(TEST[:1], output=2), InputError, "output"),
        (lambda p: p.influence(TEST[:1], top=0), InputError, "top"),
        (lambda p: p.influence(TEST[:0]), DataError, "x"),
        (lambda p: p.calibration(TEST, TEST_CLASSES[:3]), InputError, "30"),
        (lambda p: p.calibration(TEST, TEST_CLASSES + 5), DataError, "classes from 0 to 1"),
        (lambda p: p.calibration(TEST, TEST_CLASSES + 0.5), DataError, "classes from 0 to 1"),
        (lambda p: p.calibration(TEST, "labels"), InputError, "y"),
        (lambda p: p.calibration(TEST, TEST_CLASSES, bins=0), InputError, "bins"),
        (lambda p: p.calibration(TEST * float("nan"), TEST_CLASSES), DataError, "x"),
        (lambda p: p.predicted(TEST, TEST_VALUES), InputError, "calibration"),
        (lambda p: p.curve(TEST), InputError, "predicted"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(fitted("classes").plot)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InputError, match="target for each output"):
        fitted("values").plot.calibration(TEST, TEST_VALUES[:4])
    with pytest.raises(DataError, match="y"):
        fitted("values").plot.predicted(TEST, TEST_VALUES / 0)


def test_a_missing_matplotlib_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plots = fitted("classes").plot
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyError, match=r"matplotlib.*Expected: .*To fix it: pip install matplotlib"):
        plots.ridge()
