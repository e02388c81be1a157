"""Memory plans: sizes read and written, what is free, and the error of a plan that does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnet import memory
from linnet.errors import InputError, MemoryBudgetError
from linnet.memory import Plan, available_bytes, format_bytes, parse_bytes, require


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("2GB", 2 * 10**9),
        ("2 gib", 2**31),
        ("1.5MB", 1_500_000),
        (".5k", 500),
        ("3T", 3 * 10**12),
        ("7B", 7),
    ],
)
def test_parse_bytes_reads_text(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_parse_bytes_keeps_a_number() -> None:
    assert parse_bytes(12345) == 12345


def test_parse_bytes_takes_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: {"cpu": 1000, "cuda:1": 64}[str(device)])
    assert parse_bytes(None) == 500
    assert parse_bytes(None, "cuda:1") == 32


@pytest.mark.parametrize("amount", ["", "two", "2 gallons", "-1GB", "0", 0, -5, True, 1.5, "0.1"])
def test_parse_bytes_names_a_bad_amount(amount: Any) -> None:
    with pytest.raises(InputError, match=r"memory is .*To fix it"):
        parse_bytes(amount)


@given(st.integers(min_value=0, max_value=10**15))
def test_format_bytes_keeps_three_digits(n: int) -> None:
    number, unit = format_bytes(n).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * scale == pytest.approx(n, rel=0.006, abs=0)
    assert len(number) <= 4


def test_available_bytes_is_below_what_the_machine_has() -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes("cpu") <= installed


def test_available_bytes_respects_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {
        "memory.max": "5000\n",
        "memory.current": "4000\n",
        "memory.stat": "anon 1\ninactive_file 300\n",
    }
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [(tmp_path, "memory.max", "memory.current")])
    assert available_bytes("cpu") == 5000 - (4000 - 300)


def test_a_control_group_without_limit_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [(tmp_path, "memory.max", "memory.current")])
    assert memory._cgroup_available() == []


LIMITED = """
import resource
from pathlib import Path
from linnet.memory import available_bytes, parse_bytes
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
used = int(status["{used}"].split()[0]) * 1024
resource.setrlimit(resource.{limit}, (used + {room}, resource.getrlimit(resource.{limit})[1]))
print(available_bytes(), parse_bytes(None))
"""


@pytest.mark.parametrize(("limit", "used"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_available_bytes_respects_the_limits_of_the_process(limit: str, used: str) -> None:
    room = 200_000_000
    code = LIMITED.format(limit=limit, used=used, room=room)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    free, budget = map(int, ran.stdout.split())
    assert 0.9 * room < free <= room
    assert budget == pytest.approx(free / 2, rel=0.05)


def test_require_names_what_helps_against_the_largest_item() -> None:
    plan = Plan("the kernel", 100, (("rows", 500), ("K", 40), ("tile", 900)))
    ways = {"rows": ["select fewer parameters"], "K": ["keep it on disk"]}
    with pytest.raises(MemoryBudgetError, match="To fix it: select fewer parameters") as error:
        require(plan, ways)
    assert "disk" not in str(error.value)


def test_every_group_above_the_process_is_asked() -> None:
    folders = memory._ancestors(Path("/sys/fs/cgroup"), "/batch/job")
    assert [str(folder) for folder in folders] == [
        f"/sys/fs/cgroup{tail}" for tail in ("", "/batch", "/batch/job")
    ]


def test_available_bytes_on_cuda_counts_what_the_allocator_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert available_bytes("cuda:0") == 850


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(InputError, match="'meta'"):
        available_bytes("meta")


def test_plan_prints_every_item() -> None:
    plan = Plan("gram", 1000, (("tile", 600), ("rows", 300)))
    assert plan.peak == 900
    assert str(plan).splitlines() == [
        "gram: peak 900 B of a budget of 1.00 kB",
        "  tile    600 B",
        "  rows    300 B",
    ]


def test_require_passes_a_plan_that_just_fits() -> None:
    plan = Plan("gram", 900, (("tile", 600), ("rows", 300)))
    assert plan.peak == plan.budget
    require(plan, ["never mentioned"])


def test_require_names_the_figure_and_the_two_best_alternatives() -> None:
    plan = Plan("the kernel", 2 * 10**9, (("rows", 10**6), ("K", 7 * 10**12)))
    with pytest.raises(MemoryBudgetError) as error:
        require(plan, ["use outputs='trace'", "use solver='cg'", "buy memory"])
    text = str(error.value)
    for part in (
        "the kernel",
        "7.00 TB",
        "K 7.00 TB, rows 1.00 MB",
        "2.00 GB",
        "outputs='trace', or use solver='cg'",
    ):
        assert part in text
    assert "buy memory" not in text
