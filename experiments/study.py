"""Shared by all studies: arguments, resumable cells, the written result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
Cell = dict[str, Any]


def parser(description: str, seeds: int = 3) -> argparse.ArgumentParser:
    """Arguments that every study understands.

    Args:
        description: The script's docstring; its first paragraph is the help.
        seeds: Seeds of the default run.
    """
    result = argparse.ArgumentParser(description=description.split("\n\n")[0])
    result.add_argument("--full", action="store_true", help="the paper's size, for a GPU or a long night")
    result.add_argument("--seeds", type=int, default=seeds, help="seeds 0 to SEEDS - 1 (default %(default)s)")
    result.add_argument("--data-dir", default=None, help="folder of data sets (default: LINNET_DATA)")
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own)")
    result.add_argument(
        "--out", type=Path, default=None, help="folder of the results (default runs/experiments/...)"
    )
    result.add_argument(
        "--published", type=Path, default=None, help="a result.json: its cells are not computed again"
    )
    return result


class Study:
    """One run of a script: cells computed once, appended to a file as they come, and read back when resumed.

    Args:
        name: Folder and script, such as ``"lqf/pairs"``.
        arguments: What ``parser`` returned, parsed.

    Attributes:
        out: Folder of the results.
        seeds: Seeds to run.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self.out: Path = arguments.out or ROOT / "runs" / "experiments" / name
        self.out.mkdir(parents=True, exist_ok=True)
        self.seeds = range(arguments.seeds)
        self._file = self.out / "cells.jsonl"
        self._done = {_key(cell["what"]): cell for cell in _read_lines(self._file)}
        self._published = [] if arguments.published is None else read_cells(arguments.published)
        if arguments.threads:
            torch.set_num_threads(arguments.threads)

    def cell(self, what: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> Cell:
        """One cell of a table: read back when it is known or published, else computed and appended.

        Args:
            what: Everything that the numbers depend on (method, data, seed, sizes); JSON values.
            compute: Returns the numbers; JSON values.

        Returns:
            ``what`` and the numbers in one dictionary, with ``seconds``.
        """
        what = {**what, "full": bool(self.arguments.full)}
        known = next((cell for cell in self._published if what.items() <= cell.items()), None)
        if known is not None:
            return known
        if _key(what) not in self._done:
            begin = time.perf_counter()
            numbers = dict(compute())
            done = {"what": what, "numbers": numbers, "seconds": time.perf_counter() - begin}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._done[_key(what)] = done
            print("  ".join(f"{k}={_short(v)}" for k, v in {**what, **numbers}.items()), flush=True)
        done = self._done[_key(what)]
        return {**done["what"], **done["numbers"], "seconds": done["seconds"]}

    def publish(self, table: str, cells: Sequence[Mapping[str, Any]], **facts: Any) -> None:
        """Print the table; write ``table.md`` and ``result.json`` with everything that the numbers depend on.

        Args:
            table: Markdown.
            cells: What ``cell`` returned, the rows behind the table.
            facts: Anything else to keep: verdicts, figures of the paper.
        """
        print(f"\n## {self.name}\n\n{table}\n", flush=True)
        (self.out / "table.md").write_text(table + "\n", encoding="utf-8")
        result = {"study": self.name, "environment": environment(), **facts}
        (self.out / "result.json").write_text(_as_text(result, cells), encoding="utf-8")


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the script."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _as_text(result: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """A result as JSON with one cell a line."""
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in cells)
    return json.dumps(result, indent=1).removesuffix("\n}") + f',\n "cells": [\n{lines}\n ]\n}}\n'


def read_cells(file: Path) -> list[Cell]:
    """The cells that a study has found.

    Args:
        file: Its ``result.json`` or its ``cells.jsonl``.

    Returns:
        What ``cell`` returned, but for the seconds of a ``cells.jsonl``.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return list(json.loads(text)["cells"])
    return [{**line["what"], **line["numbers"]} for line in map(json.loads, text.splitlines())]


def _key(what: Mapping[str, Any]) -> str:
    """A cell's name."""
    return json.dumps(what, sort_keys=True)


def _short(value: object) -> str:
    """A value on a line of progress."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "[...]" if isinstance(value, list) or len(str(value)) > 60 else str(value)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The cells of an earlier run; a last line that a kill cut short is dropped from the file too."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):  # otherwise left alone: another process may be appending to it
        file.write_text("".join(whole), encoding="utf-8")
    return [json.loads(line) for line in whole]
