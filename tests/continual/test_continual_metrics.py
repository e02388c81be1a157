"""The accuracy matrix and its summaries, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from linnet.continual import StreamMetrics
from linnet.errors import InputError

R = [[0.9, 0.2, 0.3], [0.8, 0.7, 0.4], [0.85, 0.5, 0.6]]


def test_summaries_are_the_formulas() -> None:
    metrics = StreamMetrics(R, baseline=[0.1, 0.15, 0.25])
    assert metrics.tasks == 3
    assert metrics.average_accuracy() == pytest.approx((0.85 + 0.5 + 0.6) / 3)
    assert metrics.averages() == pytest.approx([0.9, 0.75, 0.65])
    assert metrics.forgetting() == pytest.approx(((0.9 - 0.85) + (0.7 - 0.5)) / 2)
    assert metrics.backward_transfer() == pytest.approx(((0.85 - 0.9) + (0.5 - 0.7)) / 2)
    assert metrics.forward_transfer() == pytest.approx(((0.2 - 0.15) + (0.4 - 0.25)) / 2)


def test_forgetting_is_from_the_best_since_the_task_was_learned() -> None:
    rows = [[0.5, 0.9, 0.0], [0.8, 0.6, 0.0], [0.7, 0.6, 0.9]]
    # task 2 had 0.9 before it was learned, which does not count
    assert StreamMetrics(rows).forgetting() == pytest.approx((0.1 + 0.0) / 2)


def test_rows_may_stop_at_the_tasks_seen() -> None:
    metrics = StreamMetrics(baseline=[0.1, 0.1])
    metrics.record([0.9])
    metrics.record([0.7, 0.8])
    assert metrics.average_accuracy() == pytest.approx(0.75)
    with pytest.raises(InputError, match="forward_transfer"):
        metrics.forward_transfer()
    found = metrics.to_dict()
    assert found["forward_transfer"] is None
    assert found["backward_transfer"] == pytest.approx(-0.2)


def test_to_dict_is_json_at_every_length() -> None:
    for n in range(4):
        found = json.loads(json.dumps(StreamMetrics(R[:n], [0.1] * 3).to_dict()))
        assert found["accuracy"] == R[:n]
        assert (found["average_accuracy"] is None) == (n == 0)
        assert (found["forgetting"] is None) == (n < 2)
        assert (found["forward_transfer"] is None) == (n < 2)


@pytest.mark.parametrize("rows", [[[]], [[0.5], [0.5]], [0.5]])
def test_rows_that_cannot_be(rows: Any) -> None:
    with pytest.raises(InputError, match="accuracies"):
        StreamMetrics(rows)


def test_too_few_tasks() -> None:
    with pytest.raises(InputError, match="recorded"):
        StreamMetrics().average_accuracy()
    for name in ("forgetting", "backward_transfer", "forward_transfer"):
        with pytest.raises(InputError, match="at least 2"):
            getattr(StreamMetrics(R[:1]), name)()
