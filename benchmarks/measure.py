"""Shared by all benchmarks: interleaved timing, the machine's sgemm rate, tables and JSON.

Timings of different contestants are taken in turns (one call of each, then again), so that a disturbance
of the machine hits all of them alike, and ratios are ratios of medians taken within one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")
    return int(match.group(1)) * 1024


@dataclass(frozen=True)
class Timing:
    """Seconds a call took over several repeats."""

    median: float
    minimum: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarize raw seconds."""
        return cls(statistics.median(seconds), min(seconds), len(seconds))


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    ``ratio`` is what the claim is about and ``bound`` the claim itself: at least ``bound`` when ``sense`` is
    ">=", at most ``bound`` when it is "<=". Rows without a claim leave both empty.
    """

    name: str
    seconds: float | None = None
    ratio: float | None = None
    sense: str | None = None
    bound: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the claim holds, or None when the row claims nothing."""
        if self.ratio is None or self.bound is None:
            return None
        return self.ratio >= self.bound if self.sense == ">=" else self.ratio <= self.bound


def parser(description: str, *, threads: int = 2, repeats: int = 5) -> argparse.ArgumentParser:
    """Arguments that every benchmark understands."""
    result = argparse.ArgumentParser(description=description.split("\n\n")[0])
    result.add_argument("--threads", type=int, default=threads, help="CPU threads (default %(default)s)")
    result.add_argument("--repeats", type=int, default=repeats, help="timed repeats (default %(default)s)")
    result.add_argument("--json", type=Path, default=None, help="also write the result to this file")
    return result


def add_peer_python(arguments: argparse.ArgumentParser) -> None:
    """The option that names the interpreter of an environment with neural-tangents."""
    arguments.add_argument(
        "--peer-python",
        default=os.environ.get("LINNET_PEER_PYTHON"),
        help="python of an environment with jax 0.4.30, neural-tangents 0.6.5 and tf2jax 0.3.6 "
        "(default: the environment variable LINNET_PEER_PYTHON)",
    )


def setup(threads: int, seed: int = 0) -> None:
    """Fix the number of threads and the seed."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int = 5,
    warmup: int = 1,
    limit: float = 120.0,
    burst: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time several calls in turns.

    Args:
        calls: Name and call of every contestant.
        repeats: Timed rounds, each calling every contestant once.
        warmup: Untimed rounds before.
        limit: Seconds after which no further round is started (at least two rounds are always timed).
        burst: Calls of one contestant in a row. With more than one the first is not timed, so that a short
            call does not pay for the caches that a long one before it has filled.
        clock: What the seconds are of.

    Returns:
        One timing for every name.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(repeats):
        if done >= 2 and time.perf_counter() - start > limit:
            break
        for name, call in calls.items():
            for turn in range(burst):
                begin = clock()
                call()
                if turn or burst == 1:
                    seconds[name].append(clock() - begin)
    return {name: Timing.of(values) for name, values in seconds.items()}


def sgemm_rate(size: int = 3072, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """The machine's own float32 matrix-product rate in FLOP/s: the best of several square products."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = math.inf
    for _ in range(repeats + 1):
        begin = clock()
        torch.mm(left, right, out=out)
        best = min(best, clock() - begin)
    # a product of two n x n matrices takes n³ multiplications and n³ additions
    return 2 * size**3 / best


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute entry of the reference."""
    difference = (value.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def processor_name() -> str:
    """The processor's name as the system gives it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in plain Markdown."""
    lines = ["| what | seconds | ratio | goal | note |", "|---|---:|---:|---|---|"]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        goal = ""
        if row.bound is not None:
            goal = f"{row.sense} {row.bound:g} " + ("reached" if row.met else "missed")
        lines.append(f"| {row.name} | {seconds} | {ratio} | {goal} | {row.note} |")
    return "\n".join(lines)


def publish(title: str, rows: Sequence[Row], path: Path | None, **details: Any) -> None:
    """Print the table and, when asked, write it as JSON."""
    print(f"## {title}\n\n{table(rows)}\n", flush=True)
    facts = environment()
    load = facts["load_average"]
    if load is not None and load > facts["threads"] + 1:
        print(
            f"Load average {load:.1f}: other work disturbs these numbers; repeat when the machine is quiet.\n"
        )
    if path is None:
        return
    payload = {
        "title": title,
        "environment": facts,
        "rows": [asdict(row) | {"met": row.met} for row in rows],
        "details": details,
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(payload, indent=2) + "\n")
    partial.replace(path)
