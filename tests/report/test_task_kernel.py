"""The part of a report that says whether a task is linear."""

from __future__ import annotations

import numpy as np
import pytest

from linnet.report.figures import label_energy
from linnet.report.html import render
from linnet.report.records import Content, FitRecord, TaskKernel

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
def test_any_number_of_directions_can_be_drawn(count: int) -> None:
    shares = np.linspace(0.1, 1.0, count)
    task = TaskKernel(np.ones(count), shares, count, max(1, count // 5), (1.0, count / 2), ("Yes.",))
    assert label_energy(task).startswith("<svg")
    assert "linear" in render(Content("x", fit=FitRecord(task=task)))
