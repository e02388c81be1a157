"""Tables hold the numbers behind their texts, and a page of many test samples stays small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from linnet.report.html import render
from linnet.report.records import Content, HeldOutSet, Samples, TrainingSet
from linnet.report.tables import PageTable, tables
from tests.report.material import digits_run, regression_run

EVERY = {
    "scores", "classes", "confusions", "ridges", "spectrum", "label-errors", "forgetting", "choices",
    "memory", "parameters", "timings", "predictions",
}  # fmt: skip


def column(table: PageTable, heading: str) -> list[tuple[str, float | None]]:
    """The texts and values of a column."""
    at = [name for name, _ in table.columns].index(heading)
    return [(row[at].text, row[at].value) for row in table.rows]


def test_every_row_has_a_cell_for_every_column() -> None:
    found = tables(digits_run())
    assert set(found) == EVERY
    for run in (digits_run(), regression_run()):
        for table in tables(run).values():
            assert all(len(row) == len(table.columns) for row in table.rows)
            assert table.caption.endswith(".")


def test_values_are_those_of_the_run() -> None:
    run = digits_run()
    found = tables(run)
    accuracy = [value for _, value in column(found["scores"], "Accuracy")]
    assert accuracy == [row.accuracy for row in run.scores]
    assert run.test is not None
    assert run.test.probs is not None
    order = np.argsort(run.test.probs.max(1), kind="stable")
    assert column(found["predictions"], "Sample")[0][0] == run.test.samples.name(int(order[0]))
    sure = [value for _, value in column(found["predictions"], "Probability")]
    assert sure == pytest.approx(np.sort(run.test.probs.max(1)).tolist())
    verdicts = [text for text, _ in column(found["predictions"], "Verdict")]
    correct = run.test.correct()
    assert correct is not None
    assert verdicts.count("right") == correct.sum()
    right = [value or 0.0 for _, value in column(found["classes"], "Precision")]
    counts = [value or 0.0 for _, value in column(found["classes"], "Predictions")]
    assert sum(share * count for share, count in zip(right, counts, strict=True)) == pytest.approx(
        correct.sum()
    )


def test_a_regression_has_its_values() -> None:
    run = regression_run()
    found = tables(run)["predictions"]
    assert run.test is not None
    assert run.test.std is not None
    spread = [value for _, value in column(found, "± standard deviation")]
    assert spread == pytest.approx(np.sort(run.test.std)[::-1].tolist())


def photographs(count: int, side: int = 224) -> np.ndarray:
    """Pictures that compress as badly as photographs: smooth shapes under noise, one stored many times."""
    rng = np.random.default_rng(0)
    waves = np.sin(np.linspace(0, 20, side))[:, None, None] * np.cos(np.linspace(0, 14, side))[:, None]
    image = (128 + 70 * waves + 12 * rng.normal(size=(side, side, 3))).clip(0, 255).astype(np.uint8)
    return np.broadcast_to(image, (count, side, side, 3))


@pytest.mark.long
def test_a_page_of_two_thousand_photographs_is_under_five_megabytes() -> None:
    assert 2_000_000 < len(render(large_run(2000))) < 5_000_000


def test_rows_are_limited() -> None:
    run = large_run(6000, side=8)
    table = tables(run)["predictions"]
    assert len(table.rows) == 5000
    assert "5,000 least certain of 6,000" in table.caption


def large_run(count: int, side: int = 224) -> Content:
    """The digits' run with many photographs in the place of the digits."""
    run = digits_run()
    assert run.test is not None
    assert run.train is not None
    assert run.test.probs is not None
    rows = np.arange(count) % len(run.test.samples)
    probs = run.test.probs[rows]
    labels = run.test.samples.labels
    samples = Samples(
        photographs(count, side), None if labels is None else labels[rows],
        tuple(f"test/a-folder/photograph-{i:05d}.jpeg" for i in range(count)),
    )  # fmt: skip
    test = HeldOutSet(samples, probs, None, None, 1 - probs.max(1), run.test.explanations, "%")
    trained = run.train.samples
    train: TrainingSet = replace(run.train, samples=replace(trained, images=photographs(len(trained), side)))
    return replace(run, test=test, train=train)
