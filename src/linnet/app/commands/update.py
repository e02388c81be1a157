"""`linnet update`: add training samples to a fit, exactly and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def update(
    *,
    run: Path,
    data: Path,
    out: Path,
    verify: bool = False,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Add training samples to a fit, exactly and without training.

    Args:
        run: The folder that linnet adapt, forget or update wrote; it stays as it is.
        data: The samples with their answers: folders of images named for the classes, an ``.npz`` archive
            with x and y (or x_train and y_train), or a ``.csv`` table.
        out: The folder for the new run.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
        verify: Also fit from scratch on all samples, kernel included, and compare.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        trust: Whether to run code that a run of another user names.

    Returns:
        Scores before and after, and the relative residual of the new fit's own equations ("certificate").
    """
    from linnet.app.runs.changes import report_change
    from linnet.app.runs.changes import update as update_samples
    from linnet.app.runs.folder import load_run, save_run
    from linnet.app.runs.newdata import read_new, required_answers
    from linnet.app.runs.pages import write
    from linnet.app.runs.place import check_out, clear_run, made_folder
    from linnet.app.runs.settings import check_device
    from linnet.app.runs.summary import print_change

    check_out(out, run)
    check_device(device)
    saved = load_run(run, device, memory, model=model, trust=trust)
    new = read_new(data, saved, prefer="train")
    change = update_samples(saved, new, required_answers(new, data), data.name, verify)
    added = change.after.fit.n - saved.fit.n
    result, page = report_change(change, "update", out, f"{run.name}, {added} training samples added")
    with made_folder(out):
        if overwrite:
            clear_run(out)
        save_run(out, change.after)
        write(out, result, page)
    for line in print_change(result):
        print(line)
    return result
