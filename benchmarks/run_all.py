"""Run every benchmark one after the other, and write one JSON file and one Markdown page.

    python benchmarks/run_all.py --peer-python peer/bin/python --out results

Each benchmark is a process of its own. One whose peers, packages or data are not there is skipped and the
reason shown; one that fails is reported and does not stop the others. The exit status is 1 if any failed: a
goal that is missed is a finding, shown in the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import Row, add_peer_python, environment, table

FOLDER = Path(__file__).resolve().parent
STARTED = "curvature_turns"  # compares one network, one task and the peers that its user names
MISSING = (
    "linnet.errors.DataError", "linnet.errors.DependencyError", "ModuleNotFoundError", "FileNotFoundError"
)  # fmt: skip
USAGE = 2  # the exit status of argparse: here, that an option for peers or data was not given


def scripts() -> tuple[str, ...]:
    """Names of the benchmarks: files that can be run by themselves, and not in the environment of a peer."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        name = path.stem
        if name not in {STARTED, Path(__file__).stem} and not name.endswith("_peer"):
            found += [name] * ('if __name__ == "__main__":' in path.read_text())
    return tuple(found)


def run(script: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One benchmark: its JSON, with the command and how long it all took."""
    command = [f"benchmarks/{script}.py", "--threads", str(options.threads)]
    if script == "linearized_step" and options.compile:
        command.append("--compile")
    path = out / f"{script}.json"
    path.unlink(missing_ok=True)
    actual = [sys.executable, str(FOLDER / f"{script}.py"), *command[1:], "--json", str(path)]
    if script == "kernel_lenet" and options.peer_python:  # other peers have environments of their own
        actual += ["--peer-python", options.peer_python]
        command += ["--peer-python", "peer/bin/python"]
    begin = time.perf_counter()
    done = subprocess.run(actual, stderr=subprocess.PIPE, text=True)
    result: dict[str, Any] = {"title": script, "rows": [], "environment": {}}
    if done.returncode == 0 and path.exists():
        result = json.loads(path.read_text())
    else:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        is_missing = done.returncode == USAGE or reason.startswith(MISSING)
        result["skipped" if is_missing else "failed"] = reason
        print(f"## {script}\n\n{'skipped' if is_missing else 'failed'}: {reason}\n", flush=True)
    result["command"] = shlex.join(["python", *command])
    result["total_seconds"] = time.perf_counter() - begin
    return result


def page(results: dict[str, dict[str, Any]]) -> str:
    """All tables as one Markdown page."""
    facts = environment()
    parts = [
        "# Benchmarks",
        f"{facts['processor']}, {facts['cpu_capability']}, torch {facts['torch']}, Python {facts['python']}.",
    ]
    for result in results.values():
        parts.append(f"## {result['title']}\n\n`{result['command']}`")
        if reason := result.get("failed") or result.get("skipped"):
            parts.append(f"Did not run: {reason}")
            continue
        fields = ("name", "seconds", "ratio", "sense", "bound", "note")
        parts.append(table([Row(**{key: row[key] for key in fields}) for row in result["rows"]]))
        load = result["environment"].get("load_average")
        if load is not None:
            parts.append(f"Load average at the end: {load:.1f}.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Entry point."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument(
        "--out", type=Path, default=Path("benchmark-results"), help="folder for the results"
    )
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--only", nargs="*", choices=scripts(), default=scripts())
    arguments.add_argument("--compile", action="store_true", help="also measure torch.compile")
    add_peer_python(arguments)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {script: run(script, options.out, options) for script in options.only}
    (options.out / "benchmarks.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "benchmarks.md").write_text(page(results))
    if any("failed" in result for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
