"""`linnet explain`: the training samples behind a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def explain(
    *,
    run: Path,
    ids: list[str],
    data: Path | None = None,
    top: int = 5,
    out: Path | None = None,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> dict[str, Any]:
    """Show the training samples that pushed a prediction up and down.

    Args:
        run: The folder that linnet adapt, forget or update wrote.
        ids: Ids of the samples to explain, such as test/3,test/17, or names of image files. Names that hold
            a comma are given as a JSON list.
        data: Where these samples are; the run's own test samples by default.
        top: Training samples to name on each side.
        out: The folder for the report; explain in the run's folder by default.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        trust: Whether to run code that a run of another user names.

    Returns:
        For each sample the training samples with their influence: the predicted output with the sample minus
        without it.
    """
    from dataclasses import replace

    from linnet.app.runs.folder import load_run
    from linnet.app.runs.newdata import read_new
    from linnet.app.runs.pages import place_of, write
    from linnet.app.runs.place import check_out
    from linnet.app.runs.queries import explain as explain_samples
    from linnet.app.runs.settings import check_device
    from linnet.app.runs.summary import written

    folder = out or run / "explain"
    check_out(folder, run)
    check_device(device)
    saved = load_run(run, device, memory, model=model, trust=trust)
    new = None if data is None else read_new(data, saved, prefer="test")
    found = explain_samples(saved, new, ids, top, f"Why these predictions: {run.name}")
    result = {**found.result, "out": str(folder)}
    write(folder, result, replace(found.page, folder=place_of(run)))
    for line in [*found.lines, *written(folder)]:
        print(line)
    return result
