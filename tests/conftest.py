"""Strictness for every test: seeded, no leaked global state, data that is there or loudly missing."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

with contextlib.suppress(ImportError):  # a torch without devices made in Python
    import tests.device  # noqa: F401  # before any backward pass: torch starts its threads of devices then

pytest_plugins = ("tests.budget",)

hypothesis.settings.register_profile(
    "linnet", derandomize=True, database=None, deadline=None, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile("linnet")
# Tests run on all cores at once. A second thread, here or in a process that a test starts, waits busily for
# a core that it does not get: the same tests then take up to eight times the processor time.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
torch.manual_seed(0)  # modules built while tests are collected
gc.disable()  # until they are: a quarter of the time of collecting went into looking through what stays

ROOT = Path(__file__).resolve().parents[1]
MISSING_DATA = pytest.StashKey[dict[str, str]]()


def _global_state() -> dict[str, object]:
    """What a test, and any call into linnet, must leave as it was."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "MHA fast path": torch.backends.mha.get_fastpath_enabled(),
        "fused attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "working directory": Path.cwd(),
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as long all but every n-th of the other cases of a thinned grid, chosen by their names alone."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thinned") and not item.get_closest_marker("long"):
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("thinned")
        assert marker is not None
        kept = -(-len(cases) // marker.args[0])
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in cases[kept:]:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Collects garbage from now on, but not among what was made so far, the tests and modules, which stay."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What linnet remembers of a user's runs goes into a folder of the session, for subprocesses too."""
    before = os.environ.get("LINNET_STATE")
    os.environ["LINNET_STATE"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["LINNET_STATE"]
    else:
        os.environ["LINNET_STATE"] = before


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seeds every global generator, and fails a test that leaves global state changed."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for third-party code that draws from the global generator
    torch.manual_seed(0)
    before = _global_state()
    yield
    after = _global_state()
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    torch.set_default_dtype(torch.float32)
    assert not changed, f"the test left global state changed (before, after): {changed}"


@pytest.fixture
def float64(seeded: None) -> Iterator[torch.dtype]:
    """Makes float64 the default floating type of one test, for exactness at 1e-10 relative."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield torch.float64
    torch.set_default_dtype(previous)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator, for code that takes one."""
    return torch.Generator().manual_seed(0)


def find_data_directory() -> tuple[Path | None, str]:
    """The data directory, or None with the reason and what to do."""
    named = os.environ.get("LINNET_DATA")
    if named is not None:
        path = Path(named).expanduser()
        if not path.is_dir():
            raise pytest.UsageError(
                f"LINNET_DATA is {named!r}, which is not a directory; unset it or correct it"
            )
        return path, ""
    beside = ROOT.parent / "shared" / "data"
    if beside.is_dir():
        return beside, ""
    return None, "no data directory: set LINNET_DATA to the folder with the real data sets"


@pytest.fixture(scope="session")
def data_directory(request: pytest.FixtureRequest) -> Path:
    """The folder with the real data sets: LINNET_DATA, or ../shared/data beside the checkout."""
    path, reason = find_data_directory()
    if path is None:
        pytest.skip(reason)
    return path


@pytest.fixture
def data_file(data_directory: Path) -> Callable[[str], Path]:
    """A function from the name of a data file to its path; a file missing from a present directory fails."""

    def find(name: str) -> Path:
        path = data_directory / name
        assert path.exists(), (
            f"{name} is missing from the data directory, which holds {sorted(os.listdir(path.parent))}"
        )
        return path

    return find


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Notes the tests that were skipped, with the reason, for the summary."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        item.config.stash.setdefault(MISSING_DATA, {})[item.nodeid] = reason
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Ends the run by naming everything that was not tested, so that nothing is skipped in silence."""
    skipped = config.stash.get(MISSING_DATA, {})
    if skipped:
        terminalreporter.section(f"NOT TESTED: {len(skipped)} tests did not run", yellow=True)
        for nodeid, reason in skipped.items():
            terminalreporter.line(f"{nodeid}: {reason}")
