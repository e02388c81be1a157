"""``plot`` of reports, comparisons, streams and spectra: what is drawn, and how they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import spectrum
from linnet.errors import InputError
from linnet.plots.displays import Display, Plots

G = torch.Generator().manual_seed(0)
X = torch.randn(40, 2, generator=G, dtype=torch.float64)
Y = (X[:, 0] + X[:, 1] + 0.5 * torch.randn(40, generator=G, dtype=torch.float64) > 0).long()
ROWS = [[0.9, 0.3, 0.2], [0.7, 0.8, 0.1], [0.6, 0.7, 0.95]]


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def sure(x: Tensor) -> Tensor:
    return torch.cat([-x[:, :1], x[:, :1]], 1).softmax(1)


@cache
def result(kind: str) -> Any:
    if kind == "report":
        return linnet.evaluate(sure, (X, Y))
    if kind == "values":
        normal = torch.distributions.Normal(X[:, :1], 0.5)
        return linnet.evaluate(lambda x: normal, (X, X[:, :1] + X[:, 1:] / 2), batch_size=40)
    if kind == "separation":
        return linnet.ood(sure, X, X / 3)
    if kind == "stream":
        return linnet.continual.StreamMetrics(ROWS)
    if kind == "density":
        return spectrum.spectral_density(torch.diag(torch.arange(1.0, 51.0)), samples=4, steps=8)
    if kind == "functions":
        return spectrum.eigenfunctions(network(), X, k=5)
    if kind == "task":
        fit = linnet.fit(linnet.linearize(network(2)), (X, Y), ridge=0.1)
        return spectrum.task_linearity(fit, k=4)
    recorder = spectrum.Recorder(X, torch.stack([X[:, 0], X[:, 1]], 1), k=3)
    net = network()
    for step in (0, 10, 30):
        recorder.note(net, step)
        with torch.no_grad():
            net[0].weight *= 1.5
    return recorder


DRAWINGS: dict[str, tuple[str, Callable[[Any, Any], Display]]] = {
    "report.calibration": ("report", lambda p, ax: p.calibration(ax)),
    "report.risk_coverage": ("report", lambda p, ax: p.risk_coverage(ax)),
    "values.calibration": ("values", lambda p, ax: p.calibration(ax)),
    "values.predicted": ("values", lambda p, ax: p.predicted(ax)),
    "separation.scores": ("separation", lambda p, ax: p.scores(ax)),
    "separation.roc": ("separation", lambda p, ax: p.roc(ax)),
    "stream.accuracy": ("stream", lambda p, ax: p.accuracy(ax)),
    "density.density": ("density", lambda p, ax: p.density(ax)),
    "functions.spectrum": ("functions", lambda p, ax: p.spectrum(ax)),
    "functions.energy": ("functions", lambda p, ax: p.energy(X[:, 0], ax)),
    "task.spectrum": ("task", lambda p, ax: p.spectrum(ax)),
    "task.energy": ("task", lambda p, ax: p.energy(ax)),
    "recorder.history": ("recorder", lambda p, ax: p.history(ax)),
}


@pytest.fixture(autouse=True)
def closed_figures() -> Any:
    plt.close("all")
    yield
    plt.close("all")


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.thinned(3)
def test_axes_in_and_a_display_out(name: str) -> None:
    kind, draw = DRAWINGS[name]
    plots, (_, axes) = result(kind).plot, plt.subplots(1, 2)
    assert isinstance(plots, Plots)
    assert name.split(".")[1] in plots._repr_html_()
    display = draw(plots, axes[1])
    assert display.ax_ is axes[1]
    assert axes[1].lines or axes[1].patches
    assert axes[1].get_xlabel()
    assert axes[1].get_ylabel()
    assert not axes[0].lines
    assert "array" not in repr(display) + display._repr_html_()
    assert draw(plots, None).figure_ is plt.gcf()
    with pytest.raises(InputError, match="ax"):
        draw(plots, "axes")


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in DRAWINGS.values()}))
def test_everything_that_is_drawn_is_tried(kind: str) -> None:
    drawn = [name for name in dir(result(kind).plot) if not name.startswith("_")]
    assert drawn == sorted(name.split(".")[1] for name in DRAWINGS if name.startswith(f"{kind}."))


def test_a_report_is_drawn_as_it_says() -> None:
    report = result("report")
    assert report.plot.calibration().error == pytest.approx(report.ece, abs=1e-12)
    curve = report.plot.risk_coverage(score="entropy")
    x, y = curve.ax_.lines[0].get_data()
    expected = report.risk_coverage("entropy")
    assert np.array_equal(x, expected.coverage)
    assert np.array_equal(y, expected.risk)
    assert curve.title == f"area {expected.area:.3g}"
    assert y[-1] == pytest.approx(1 - report.accuracy)
    values = result("values")
    drawn = values.plot.predicted()
    assert np.sqrt(np.mean((drawn.mean - drawn.target) ** 2)) == pytest.approx(values.rmse)
    assert values.plot.calibration().observed[9] == pytest.approx(float(values.coverage(0.5)))
    with pytest.raises(InputError, match="score"):
        report.plot.risk_coverage(score="distance")


def test_a_separation_is_drawn_as_it_says() -> None:
    apart = result("separation")
    roc = apart.plot.roc(score="max-probability")
    (flagged, found), detection = roc.ax_.lines[0].get_data(), apart.detection("max-probability")
    assert np.trapezoid(found, flagged) == pytest.approx(detection.auroc)
    scores = apart.plot.scores()
    assert np.allclose(scores.values["outside"], apart.outside.entropy)
    assert scores.title == f"AUROC {apart.auroc:.3g}"
    heights = np.array([bar.get_height() * bar.get_width() for bar in scores.ax_.patches])
    assert heights.sum() == pytest.approx(2)  # two distributions
    with pytest.raises(InputError, match="score"):
        apart.plot.roc(score="distance")


def test_a_stream_is_drawn_from_when_a_task_was_learned() -> None:
    stream = result("stream")
    display = stream.plot.accuracy()
    assert [line.get_label() for line in display.ax_.lines] == ["average", "task 1", "task 2", "task 3"]
    assert display.ax_.lines[0].get_ydata().tolist() == stream.averages()
    assert display.ax_.lines[2].get_data()[0].tolist() == [2, 3]
    assert display.ax_.lines[2].get_data()[1].tolist() == [0.8, 0.7]
    assert all(tick == round(tick) for tick in display.ax_.get_xticks())
    with pytest.raises(InputError, match="record"):
        linnet.continual.StreamMetrics().plot.accuracy()


def test_spectra_are_drawn_as_they_are() -> None:
    density, functions, task = result("density"), result("functions"), result("task")
    for scale in ("linear", "log"):
        x, y = density.plot.density(scale=scale).ax_.lines[0].get_data()
        assert np.trapezoid(y, x) == pytest.approx(1, abs=0.01)
    drawn = functions.plot.spectrum()
    assert np.allclose(drawn.ax_.lines[0].get_ydata(), functions.values)
    energy = functions.plot.energy(X[:, 0])
    assert energy.shares[-1] == pytest.approx(float(functions.energy_concentration(X[:, 0], squared=True)))
    assert energy.rows == 40
    assert (np.diff(energy.shares) >= 0).all()
    assert task.plot.energy().shares[task.energy.top - 1] == pytest.approx(task.concentration**2)
    assert np.array_equal(task.plot.spectrum().eigenvalues, task.energy.values)
    assert task.plot.spectrum().degrees_of_freedom == task.effective_dimension
    with pytest.raises(InputError, match="one after the other"):
        functions.plot.energy(X)
    with pytest.raises(InputError, match="scale"):
        density.plot.density(scale="square")


def test_a_recorder_is_drawn_over_its_steps() -> None:
    recorder = result("recorder")
    distance = recorder.plot.history().lines["first"]
    assert distance[0].tolist() == [0, 10, 30]
    assert distance[1].tolist() == [note.distances["first"] for note in recorder.notes]
    targets = recorder.plot.history(of="concentration").lines
    assert targets["target 2"][1].tolist() == [note.concentration[1] for note in recorder.notes]
    assert len(recorder.plot.history(of="trace").ax_.lines) == 1
    bare = spectrum.Recorder(X, k=2)
    with pytest.raises(InputError, match="no notes"):
        bare.plot.history()
    bare.note(network(), 0)
    with pytest.raises(InputError, match="pass y="):
        bare.plot.history(of="alignment")
    with pytest.raises(InputError, match="of"):
        bare.plot.history(of="loss")
