"""Every figure draws what it is given, follows the page's colors and leaves matplotlib as it was."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from linnet.plots.panels import brief, class_color
from linnet.report import figures
from linnet.report.figures import draw, label_energy
from linnet.report.html import render
from linnet.report.records import Comparison, Content, FitRecord, KernelSpectrum, RidgeScores, TaskKernel

RNG = np.random.default_rng(0)
RIDGES = np.logspace(-3, 2, 12)
PART = Comparison("fit", confidence=RNG.uniform(size=60), losses=1.0 * (RNG.uniform(size=60) >= 0.7))

DRAWINGS: dict[str, Callable[[], str]] = {
    "reliability": lambda: figures.reliability_diagram(PART, 4),
    "uncertainty": lambda: figures.uncertainty_histogram(RNG.uniform(size=50), RNG.uniform(size=50) < 0.5),
    "ridge": lambda: figures.ridge_curves(
        RidgeScores(RIDGES, RIDGES, 0.1, RIDGES / 100, RIDGES / 200, RIDGES, -RIDGES)
    )[1],
    "spectrum": lambda: figures.kernel_spectrum(KernelSpectrum(1 / np.arange(1, 90.0), 0.1)),
    "informativeness": lambda: figures.informativeness_bars(RNG.uniform(size=900)),
    "confusion": lambda: figures.confusion_matrix(
        np.arange(30), np.arange(30)[::-1], [f"c{i}" for i in range(30)]
    ),
    "predicted": lambda: figures.predicted_against_true(np.arange(9.0), np.arange(9.0), np.ones(9)),
    "coverage": lambda: figures.interval_calibration(np.zeros(20), np.ones(20), RNG.normal(size=20)),
}


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.thinned(6)
def test_figures_are_inline_and_themed(name: str) -> None:
    drawing = DRAWINGS[name]()
    assert drawing.startswith("<svg")
    assert drawing.endswith("</svg>")
    assert re.search(r'aria-label="[^"]{10,}"', drawing)
    assert "var(--ink)" in drawing or "var(--muted)" in drawing
    assert "http" not in drawing
    assert "<style" not in drawing
    assert "#000000" not in drawing  # black would vanish on a dark page
    ids = re.findall(r'id="([^"]+)"', drawing)
    assert len(ids) == len(set(ids))
    assert all(i.startswith(f"{name}-") for i in ids)
    for target in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', drawing):
        assert (target[0] or target[1]) in ids


def test_figures_are_the_same_every_time() -> None:
    assert DRAWINGS["spectrum"]() == DRAWINGS["spectrum"]()


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    DRAWINGS["spectrum"]()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    "text", ["</svg><script>alert(1)</script>", "$\\frac{$", 'a "quoted" & <b>', "\u4e2d\u6587"]
)
def test_names_are_drawn_as_they_are(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing = figures.reliability_diagram(replace(PART, name=text))
    assert "<script" not in drawing
    assert drawing.count("</svg>") == 1
    assert "<text" in drawing


def test_large_scatters_are_pixels() -> None:
    few, many = np.arange(100.0), np.arange(5000.0)
    assert "data:image/png" not in figures.predicted_against_true(few, few)
    drawing = figures.predicted_against_true(many, many)
    assert "data:image/png" in drawing
    assert len(drawing) < 200_000


def test_the_ridge_panels_follow_the_scores_that_are_there() -> None:
    (bare,) = figures.ridge_curves(RidgeScores(RIDGES, RIDGES))
    assert "chosen" not in bare
    error, accuracy, evidence = figures.ridge_curves(
        RidgeScores(RIDGES, RIDGES, 0.1, RIDGES / 100, RIDGES / 200, RIDGES, -RIDGES)
    )
    assert "generalized cross-validation" in error
    assert "Accuracy" in accuracy
    assert "Log evidence" in evidence
    assert all("chosen: 0.100" in drawing for drawing in (error, accuracy, evidence))


def test_the_spectrum_marks_ridge_and_degrees_of_freedom() -> None:
    values = np.array([9.0, 1.0])
    assert "ridge" not in figures.kernel_spectrum(KernelSpectrum(values))
    marked = figures.kernel_spectrum(KernelSpectrum(values, 1.0))
    assert "ridge 1" in marked
    assert "1.40 effective" in marked


def test_degenerate_input_draws() -> None:
    same = np.full(3, 0.5)
    for drawing in (
        figures.uncertainty_histogram(same, np.array([True, True, True])),
        figures.uncertainty_histogram(np.full(3, np.nan)),
        figures.kernel_spectrum(KernelSpectrum(np.zeros(3), 0.1)),
        figures.informativeness_bars(np.array([np.nan, 1.0])),
        *figures.ridge_curves(RidgeScores(np.array([1.0]), np.array([2.0]), 1.0)),
        figures.reliability_diagram(Comparison("fit", confidence=np.array([1.0]), losses=np.array([0.0]))),
    ):
        assert drawing.startswith("<svg")


def test_bars_take_the_colors_of_the_classes() -> None:
    drawing = figures.informativeness_bars(np.array([2.0, 1.0]), np.array([0, 1]), ("a", "b"))
    assert class_color(0) in drawing
    assert class_color(1) in drawing
    assert class_color(0) not in figures.informativeness_bars(np.array([2.0, 1.0]))


def test_long_names_are_shortened_in_the_middle() -> None:
    assert brief("x" * 50, 21) == "x" * 10 + "…" + "x" * 10
    assert brief("two\nlines") == "two lines"


def test_alt_text_is_escaped() -> None:
    assert 'aria-label="&quot;&lt;' in draw("a", '"<', (90, 60), lambda figure: None)


TASK = TaskKernel(
    np.array([9.0, 4.0, 1.0, 0.1]), np.array([0.1, 0.7, 0.8, 0.81]), 40, 2, (0.5, 2.3),
    ("It is <linear>.", "Because of this."), (("lift", "3.4"),),
)  # fmt: skip


def test_the_section_holds_verdict_figures_and_facts() -> None:
    page = render(Content("Digits", fit=FitRecord(task=TASK)))
    assert 'id="linear"' in page
    assert "<li>It is &lt;linear&gt;.</li>" in page
    assert "Because of this." in page
    assert "first 2 of 40 directions hold 70 % of the labels" in page
    assert "of the labels on 2 directions" in page
    assert page.count("<svg") == 2
    assert "3.4" in page


def test_both_figures_have_ids_of_their_own() -> None:
    page = render(Content("Digits", fit=FitRecord(task=TASK)))
    ids = [part.split('"')[0] for part in page.split('id="')[1:]]
    assert len(ids) == len(set(ids))


def test_numbers_reach_the_result() -> None:
    found = Content("Digits", fit=FitRecord(task=TASK)).to_dict()["task"]
    assert found["shares"] == [0.1, 0.7, 0.8, 0.81]
    assert found["rows"] == 40
    assert Content("Digits").to_dict()["task"] is None


@pytest.mark.parametrize("count", [1, 3, 100, 2000])
@pytest.mark.thinned(2)
def test_any_number_of_directions_can_be_drawn(count: int) -> None:
    shares = np.linspace(0.1, 1.0, count)
    task = TaskKernel(np.ones(count), shares, count, max(1, count // 5), (1.0, count / 2), ("Yes.",))
    assert label_energy(task).startswith("<svg")
    assert "linear" in render(Content("x", fit=FitRecord(task=task)))
