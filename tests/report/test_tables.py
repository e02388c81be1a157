"""Tables, pictures and JSON hold the numbers behind the texts, and a page of many samples stays small."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linnet.report.html import render
from linnet.report.records import (
    Comparison,
    Content,
    FitRecord,
    HeldOutSet,
    KernelSpectrum,
    Samples,
    TrainingSet,
)
from linnet.report.tables import PageTable, tables
from linnet.report.tiles import thumbnail
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


def decoded(address: str) -> Image.Image:
    """The picture behind an address."""
    head, content = address.split(",", 1)
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3), (8, 8, 4)])
def test_tiny_pictures_keep_every_pixel(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    shown = np.asarray(decoded(thumbnail(image, 100)))
    assert np.array_equal(shown, image.squeeze())  # the page enlarges it, as squares


@pytest.mark.parametrize(
    ("height", "width", "size"), [(300, 200, (85, 128)), (20, 900, (128, 3)), (100, 90, (90, 100))]
)
def test_size_follows_the_longer_side(height: int, width: int, size: tuple[int, int]) -> None:
    assert decoded(thumbnail(np.zeros((height, width, 3), dtype=np.uint8))).size == size


def test_pixels_sets_the_size() -> None:
    image = np.zeros((50, 50), dtype=np.uint8)
    assert decoded(thumbnail(image, 25)).size == (25, 25)
    assert decoded(thumbnail(image, 200)).size == (50, 50)


def test_photographs_stay_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3)).astype(np.uint8)
    assert thumbnail(noise).startswith("data:image/jpeg")
    flat = np.full((256, 256, 3), 80, dtype=np.uint8)
    assert thumbnail(flat).startswith("data:image/png")
    opaque = np.dstack([noise, np.full((256, 256), 255, dtype=np.uint8)])
    assert thumbnail(opaque).startswith("data:image/jpeg")
    glass = np.dstack([noise, np.full((256, 256), 9, dtype=np.uint8)])
    assert thumbnail(glass).startswith("data:image/png")  # JPEG has no transparency


PICTURES = np.zeros((3, 8, 8, 1), dtype=np.uint8)
LABELS = np.array([0, 1, 1])


def test_degrees_of_freedom_come_from_the_eigenvalues_unless_given() -> None:
    values = np.array([3.0, 1.0, -1e-9])
    assert KernelSpectrum(values, ridge=1.0).effective() == pytest.approx(0.75 + 0.5)
    assert KernelSpectrum(values, ridge=1.0, degrees_of_freedom=7.0).effective() == 7.0
    assert KernelSpectrum(values).effective() is None


def test_number_of_tested_samples_has_three_sources() -> None:
    scores = (Comparison("fit", losses=np.zeros(5)),)
    test = HeldOutSet(Samples(PICTURES))
    assert Content("x").tested() is None
    assert Content("x", scores=scores).tested() == 5
    assert Content("x", scores=scores, test=test).tested() == 3
    assert Content("x", count=9).tested() == 9


def test_loss_is_wrongness_or_absolute_error() -> None:
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    classified = HeldOutSet(Samples(labels=LABELS), probs)
    assert classified.correct() is not None
    np.testing.assert_array_equal(np.asarray(classified.loss()), [0.0, 1.0, 0.0])
    regressed = HeldOutSet(Samples(labels=np.array([1.0, 2.0])), mean=np.array([[1.5], [1.0]]))
    np.testing.assert_array_equal(np.asarray(regressed.loss()), [0.5, 1.0])
    assert HeldOutSet(Samples(PICTURES), np.ones((3, 2))).loss() is None


@pytest.mark.parametrize("build", [digits_run, regression_run, lambda: Content("bare")])
def test_to_dict_survives_strict_json(build: Any) -> None:
    numbers = build().to_dict()
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_to_dict_holds_what_the_page_shows() -> None:
    run = digits_run()
    numbers = run.to_dict()
    path, train, test = run.fit.path, run.train, run.test
    assert path is not None
    assert train is not None
    assert test is not None
    assert numbers["ridge_path"]["chosen"] == path.chosen
    assert len(numbers["ridge_path"]["loo_error"]) == len(path.ridges)
    assert numbers["reliability"][0]["calibration_error"] == pytest.approx(run.scores[0].ece)
    assert numbers["train"]["suspects"][0]["id"] == train.samples.name(train.suspects[0].sample)
    explained = numbers["test"]["explanations"][0]
    assert explained["id"] == test.samples.name(test.explanations[0].sample)
    assert explained["up"][0]["influence"] == test.explanations[0].up[0].influence
    assert "images" not in json.dumps(numbers)


def test_to_dict_turns_what_is_not_finite_into_none() -> None:
    run = Content("x", scores=(Comparison("fit", accuracy=float("nan")),),
              fit=FitRecord(spectrum=KernelSpectrum(np.array([np.inf, 1.0]))))  # fmt: skip
    numbers = run.to_dict()
    assert numbers["comparison"][0]["accuracy"] is None
    assert numbers["spectrum"]["eigenvalues"] == [None, 1.0]
