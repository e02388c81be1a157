"""`linnet compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def compare(*, runs: list[str], out: Path | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Compare two runs on the same test samples, and name those that one of them gets wrong.

    Args:
        runs: The two folders that linnet adapt, forget or update wrote, the older one first. Their names may
            be typed without --runs.
        out: A file for all samples that one of the runs predicts better, ``.csv`` or ``.json``.
        overwrite: Whether to replace a file that exists.

    Returns:
        Scores of both, the difference with its standard error, settings that differ, and the samples that
        one predicts better.

    Raises:
        InputError: Not two folders are given, or they have no test samples in common.
    """
    from linnet.app.runs.comparing import compare_runs, comparison_rows, print_comparison
    from linnet.app.runs.queries import check_table, write_rows
    from linnet.app.terminal import kept
    from linnet.errors import InputError

    if len(runs) != 2:
        raise InputError(
            f"{len(runs)} run folder{'s' * (len(runs) != 1)} {'is' if len(runs) == 1 else 'are'} given",
            expected="two, as in linnet compare runs/old runs/new",
            remedy="name the older run, then the newer",
        )
    if out is not None:
        check_table(out, overwrite)
    result = compare_runs(*map(Path, runs))
    if out is not None:
        write_rows(out, comparison_rows(result))
    for line in [*print_comparison(result), *([f"samples: {kept(out)}"] if out is not None else [])]:
        print(line)
    return result
