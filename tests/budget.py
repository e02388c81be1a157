"""``--budget SECONDS``: as many tests as fit, in an order of the commit's own.

No test is started after that time, which is no failure; a test that fails is one. Tests come in small groups
of one file, shuffled by the commit: other ones fit for every commit, so that in time all are run.
"""

from __future__ import annotations

import random
import subprocess
import time

import pytest

DEADLINE = pytest.StashKey[float]()  # of the clock that all processes of a machine share
TOTAL = pytest.StashKey[int]()  # tests that were selected
TOGETHER = 25  # tests of one file that stay side by side, so that most of what they share is made once


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option itself."""
    parser.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="start no test after so many seconds; the commit decides which ones come first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts the clock, in every process that runs tests."""
    budget = config.getoption("--budget")
    if budget is not None:
        config.stash[DEADLINE] = time.monotonic() + budget


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests that are left in the order of this commit."""
    if DEADLINE in config.stash:
        items[:] = in_turn(items, _commit(config))


def in_turn(items: list[pytest.Item], commit: str) -> list[pytest.Item]:
    """Groups of tests of one file, shuffled; the same in all processes.

    Args:
        items: Tests.
        commit: What decides the order.

    Returns:
        The same tests.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], []).append(item)
    shuffle = random.Random(commit).shuffle
    groups = []
    for own in files.values():
        shuffle(own)
        groups += [own[i : i + TOGETHER] for i in range(0, len(own), TOGETHER)]
    shuffle(groups)
    return [item for group in groups for item in group]


def _commit(config: pytest.Config) -> str:
    """The commit that is checked out; where there is none, always the same text."""
    command = ["git", "-C", str(config.rootpath), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:  # no git
        return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Passes over a test whose turn comes too late; pytest-xdist takes it for done."""
    return True if time.monotonic() > item.config.stash.get(DEADLINE, float("inf")) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keeps the number of tests for the summary; with pytest-xdist it is the workers' own."""
    session.config.stash[TOTAL] = session.testscollected


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how far the run came."""
    if DEADLINE not in config.stash:
        return
    taken = {r.nodeid for found in terminalreporter.stats.values() for r in found if hasattr(r, "when")}
    total, budget = config.stash[TOTAL], config.getoption("--budget")
    terminalreporter.section(f"{len(taken)} of {total} tests were run in the budget of {budget:g} seconds")
