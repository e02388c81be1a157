"""The test samples of a run, read again from data that may have grown since."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from linnet.app.data import ImageTransform, SampleSet, Standardize, TaskData, load_data
from linnet.app.data.task import InMemory
from linnet.app.runs.folder import SavedRun, TestSource
from linnet.app.runs.samples import read_new
from linnet.errors import LinnetError


def load_test(run: SavedRun) -> tuple[TaskData | None, str]:
    """Read a run's test samples again."""
    source, (transform, scale) = run.test, run.transforms
    if source is None:
        return None, "the run has no test samples"
    if source.positions == ():
        return None, "the run was trained on all its test samples since: none is left to score on"
    images = transform if isinstance(transform, ImageTransform) else None
    try:
        task = load_data(source.path, images, source.seed, target=source.target, damaged=source.damaged)
        if source.positions is not None:
            task = task.subset("test", source.positions)
    except LinnetError as error:
        return None, f"the test samples cannot be read again: {error.what}"
    if test_digest(task) != source.digest or (source.columns is not None and task.table != source.columns):
        found, why = _found_again(run, source, task)
        if found is None:
            return None, why
        task = found
    if isinstance(transform, Standardize):
        task = replace(task, transform=transform, targets=scale)
    return task, ""


def _found_again(run: SavedRun, source: TestSource, task: TaskData) -> tuple[TaskData | None, str]:
    """The test samples of a run in data that have changed since, by their content, in the order they had."""
    why, wanted = f"the test samples in {source.path} are not those of the run any more", run.held
    fewer = source.positions is not None and len(source.positions) < len(run.held)
    if fewer:  # than those that it was tested on first, which positions count
        wanted = tuple(run.held[at] for at in source.positions or () if at < len(run.held))
    try:
        new = read_new(Path(source.path), run, prefer="test")
    except LinnetError as error:
        return None, f"{why}: {error.what}"
    if new.y is None or not wanted:
        return None, why
    places = places_of(run.fingerprints(new.x, new.y if run.measured else None))
    rows = np.array([places[name].pop(0) for name in wanted if places.get(name)], dtype=np.int64)
    if len(rows) < len(wanted):
        return None, f"{why}: {len(wanted) - len(rows)} of {len(wanted)} are gone"
    test = SampleSet(InMemory(new.x), np.arange(len(new.ids)), new.y, new.ids).take(rows)
    found = replace(task, test=test, classes=run.classes, table=source.columns)
    if (fewer or not run.measured) and test_digest(found) != source.digest:  # an image says no answer
        return None, why
    return found, ""


def places_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Where each name stands, in order."""
    found: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        found.setdefault(name, []).append(at)
    return found


def test_digest(task: TaskData) -> str:
    """A hash of the test samples' names and answers."""
    digest = hashlib.sha256("\0".join(task.test.ids).encode())
    digest.update(np.ascontiguousarray(task.test.y).tobytes())
    return digest.hexdigest()
