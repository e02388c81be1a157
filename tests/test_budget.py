"""A run with a budget of time: what fits is run, in an order that the commit decides."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import in_turn
from tests.grids import grid
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
from tests.budget import DEADLINE

TAKEN = []

@pytest.mark.parametrize("n", range(40))
def test_a_case(n, request):
    TAKEN.append(n)
    if len(TAKEN) == {stop}:
        request.config.stash[DEADLINE] = 0.0  # the time is over
    assert n != {wrong}
"""


def run(folder: Path, *words: str, stop: int = 0, wrong: int = -1) -> tuple[int, str]:
    """Exit status and output of a run of forty tests, in which time is over after some."""
    (folder / "test_cases.py").write_text(TESTS.format(stop=stop, wrong=wrong))
    own = ["-m", "pytest", "-q", "-p", "tests.budget", "--rootdir", str(folder), "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *own, *words, str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", grid((1, 2), (1,)))
def test_tests_that_come_too_late_are_not_run(tmp_path: Path, workers: int) -> None:
    status, told = run(tmp_path, "--budget", "1000", *(["-n", "2"] if workers == 2 else []), stop=6)
    assert status == 0, told
    taken = int(told.split(" of 40 tests were run in the budget of 1000 seconds")[0].split()[-1])
    assert 6 <= taken <= 6 * workers, told
    assert f"{taken} passed" in told.splitlines()[-1]


@pytest.mark.long
def test_no_time_and_enough_of_it(tmp_path: Path) -> None:
    status, told = run(tmp_path, "--budget", "0")
    assert status == 0, told
    assert " 0 of 40 tests were run in the budget of 0 seconds" in told
    status, told = run(tmp_path, "--budget", "1000", wrong=7)
    assert status == 1, told
    assert " 40 of 40 tests were run" in told
    assert "1 failed, 39 passed" in told


class Named:
    """As much of a test as its place depends on."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_the_commit_decides_the_order() -> None:
    tests = [Named(f"{file}.py::test[{n}]") for file in "abc" for n in range(60)]
    first, again, other = (in_turn(tests, commit) for commit in ("1", "1", "2"))  # type: ignore[type-var,arg-type]
    assert first == again != other
    assert {test.nodeid for test in first} == {test.nodeid for test in tests}
    # tests of one file come in groups: at most three for sixty tests, so nine stretches in all
    files = [test.nodeid[0] for test in first]
    assert sum(a != b for a, b in itertools.pairwise(files)) < 9
