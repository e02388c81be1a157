"""Memory: available memory, estimates for operations, and errors when they exceed it.

Every operation of linnet that can be large first writes down a :class:`Plan`, the bytes of each
tensor it will hold at once, and compares it with a budget before it allocates anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from linnet.errors import InputError, MemoryBudgetError
from linnet.params import holding, shown

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]i?)?b?\s*", re.IGNORECASE)

_DIGITS = 40  # of a number in a text; none that is longer is a size

_CGROUP = Path("/sys/fs/cgroup")
_LARGEST_KEPT = (32 << 20) - (64 << 10)  # just below glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits


def available_bytes(device: torch.device | str = "cpu") -> int:
    """The memory that can still be allocated on a device."""
    # On the CPU this is the least of what the operating system reports, what the control group of the process
    # (a container, a batch job) still allows, and what the limits of the process itself on its address space
    # and data (`ulimit -v`, `ulimit -d`) leave it.
    device = torch.device(device)
    if device.type in ("cpu", "mps"):  # mps shares the main memory
        return min([_system_available(), *_cgroup_available(), *_limits_available()])
    module: Any = getattr(torch, device.type, None)  # torch.cuda, torch.xpu, ...: one module a kind of device
    if not hasattr(module, "mem_get_info"):
        raise InputError(
            f"device is {str(device)!r}, whose free memory linnet cannot query",
            expected="a cpu or mps device, or one of which torch tells the free memory, such as cuda",
            remedy="pass the budget as a number, for example memory='4GB'",
        )
    free, _ = module.mem_get_info(device)
    # and what torch's allocator has reserved from the driver and can hand out again
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


@cache
def reuse_freed_memory() -> None:
    """Let the C library keep the memory of one batch for the next, once in a process."""
    # glibc returns the end of the heap to the system when more of it is free than twice the largest block
    # that was ever mapped by itself and freed (mallopt(3), M_TRIM_THRESHOLD), and the next batch then faults
    # every page in anew. Taking and freeing one block, of which no page is touched, raises that threshold to
    # its greatest value, 64 MB. Other C libraries do nothing with it.
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def _system_available() -> int:
    """Memory that the operating system can hand out without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    return int(match.group(1)) * 1024


def _cgroup_available() -> list[int]:
    """Memory that the control groups of this process still allow, one figure for each limit found."""
    limits = [(_read_number(folder / limit), folder, used) for folder, limit, used in _cgroup_files()]
    return [max(limit - _cgroup_used(folder, used), 0) for limit, folder, used in limits if limit is not None]


def _cgroup_files() -> list[tuple[Path, str, str]]:
    """Folder, limit file and usage file of the process's memory group and of every group above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one group for all controllers
            files += [(folder, "memory.max", "memory.current") for folder in _ancestors(_CGROUP, path)]
        elif "memory" in controllers.split(","):
            folders = _ancestors(_CGROUP / "memory", path)
            files += [(folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in folders]
    return files


def _ancestors(root: Path, path: str) -> list[Path]:
    """The folder root/path and every folder between it and the root, which is included."""
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _cgroup_used(folder: Path, name: str) -> int:
    """Bytes used by a control group, less the file cache that it gives back under pressure."""
    used = _read_number(folder / name) or 0
    try:
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return used
    match = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
    return used - int(match.group(1)) if match else used


def _limits_available() -> list[int]:
    """Memory that the limits of this process leave it, one figure for each that is set."""
    try:
        import resource  # not on every system
    except ImportError:
        return []
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # a system without it; its limits are taken as they stand
        status = ""
    left = []
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            match = re.search(rf"^{used}:\s+(\d+) kB", status, re.MULTILINE)
            left.append(max(soft - int(match.group(1)) * 1024 if match else soft, 0))
    return left


def _read_number(path: Path) -> int | None:
    """The number in a control group file; None when there is no file or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


_assumed: ContextVar[int | None] = ContextVar("linnet_assumed_memory", default=None)


def assumed(amount: int) -> AbstractContextManager[None]:
    """A budget to take where none is given, such as that of the process of several that has the least."""
    return holding(_assumed, amount)


def parse_bytes(amount: str | int | None, device: torch.device | str = "cpu") -> int:
    """A memory budget in bytes."""
    if amount is None and (given := _assumed.get()) is not None:
        return given
    if amount is None:
        return max(available_bytes(device) // 2, 1)
    size = _text_to_bytes(amount) if isinstance(amount, str) else amount
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**63:
        raise InputError(
            f"memory is {shown(amount)}",
            expected="a positive number of bytes, or text such as '2GB' or '512MiB'",
            remedy="pass memory='2GB', or memory=None for half of what is available",
        )
    return size


def _text_to_bytes(text: str) -> int | None:
    """'2 GB' -> 2 000 000 000; None when the text is not a size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    units = _DECIMAL | _BINARY
    if len(match["number"]) > _DIGITS:
        return None
    return round(float(match["number"]) * units[(match["unit"] or "").lower()])


def format_bytes(n: int) -> str:
    """A number of bytes for people, in powers of 1000."""
    if n < 1000:
        return f"{n} B"
    value, unit = n / 1e3, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 999.5:
            value, unit = value / 1000, larger
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


@dataclass(frozen=True)
class Plan:
    """The memory that an operation will hold at its peak, item by item."""

    operation: str  # what is planned, in words
    budget: int  # the bytes that may be used
    items: tuple[tuple[str, int], ...]  # name and bytes of everything that lives at the same time

    @property
    def peak(self) -> int:
        """Bytes of all items together."""
        return sum(size for _, size in self.items)

    def __str__(self) -> str:
        """One line for the operation, one for each item."""
        head = f"{self.operation}: peak {format_bytes(self.peak)} of a budget of {format_bytes(self.budget)}"
        width = max((len(name) for name, _ in self.items), default=0)
        return "\n".join([head, *(f"  {name:<{width}} {format_bytes(size):>8}" for name, size in self.items)])


def require(plan: Plan, alternatives: Sequence[str] | Mapping[str, Sequence[str]]) -> None:
    """Stop before allocating when a plan does not fit its budget."""
    if plan.peak <= plan.budget:
        return
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in _largest(plan, 3))
    if isinstance(alternatives, Mapping):
        every = _largest(plan, len(plan.items))
        alternatives = next((alternatives[name] for name, _ in every if name in alternatives), [])
    raise MemoryBudgetError(
        f"{plan.operation} would need {format_bytes(plan.peak)} ({largest})",
        expected=f"at most {format_bytes(plan.budget)}, the memory budget",
        remedy=", or ".join(alternatives[:2]) or "give it a larger budget with memory=",
    )


def _largest(plan: Plan, count: int) -> list[tuple[str, int]]:
    """The largest items of a plan, largest first."""
    return sorted(plan.items, key=lambda item: item[1], reverse=True)[:count]
