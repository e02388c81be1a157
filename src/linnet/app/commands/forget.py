"""`linnet forget`: remove training samples from a fit, exactly and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def forget(
    *,
    run: Path,
    ids: list[str],
    out: Path,
    verify: bool = False,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Forget training samples: the fit without them, exactly and without training.

    Args:
        run: The folder that linnet adapt, forget or update wrote; it stays as it is.
        ids: Ids of the training samples, such as train/3,train/17, or names of image files, as the report
            and result.json have them. Names that hold a comma are given as a JSON list.
        out: The folder for the new run.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
        verify: Also fit from scratch without the samples, kernel included, and compare.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        trust: Whether to run code that a run of another user names.

    Returns:
        Scores before and after, the relative residual of the new fit's own equations ("certificate"), and
        the largest difference from a solution from scratch.
    """
    from linnet.app.runs.changes import forget as forget_samples
    from linnet.app.runs.changes import report_change
    from linnet.app.runs.folder import load_run, save_run
    from linnet.app.runs.pages import write
    from linnet.app.runs.place import check_out, clear_run, made_folder
    from linnet.app.runs.settings import check_device
    from linnet.app.runs.summary import print_change

    check_out(out, run)
    check_device(device)
    change = forget_samples(load_run(run, device, memory, model=model, trust=trust), ids, verify)
    title = f"{run.name} without {len(ids)} training sample{'s' * (len(ids) != 1)}"
    result, page = report_change(change, "forget", out, title)
    with made_folder(out):
        if overwrite:
            clear_run(out)
        save_run(out, change.after)
        write(out, result, page)
    for line in print_change(result):
        print(line)
    return result
