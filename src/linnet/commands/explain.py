"""`linnet explain`: the training samples behind a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def explain(
    *,
    run: Path,
    index: list[int],
    data: Path | None = None,
    top: int = 5,
    out: Path | None = None,
    memory: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Name the training samples that pushed a prediction up and down.

    Args:
        run: The folder that linnet adapt, forget or update wrote.
        index: Positions of the samples to explain, such as 3,17.
        data: Where these samples are; the run's own test samples by default.
        top: Training samples to name on each side.
        out: The folder for the report; explain in the run's folder by default.
        memory: The budget, such as 2GB; half of what is free by default.
        device: The device to compute on, such as cpu or cuda.

    Returns:
        For each sample the training samples with their influence: the predicted output with the sample minus
        without it.
    """
    from linnet.runs.folder import load_run
    from linnet.runs.newdata import read_new
    from linnet.runs.pages import write
    from linnet.runs.place import check_out
    from linnet.runs.queries import explain as explain_samples
    from linnet.runs.settings import check_device
    from linnet.runs.summary import written

    folder = out or run / "explain"
    check_out(folder, run)
    check_device(device)
    saved = load_run(run, device, memory)
    new = None if data is None else read_new(data, saved, prefer="test")
    found = explain_samples(saved, new, index, top, f"Why these predictions: {run.name}")
    result = {**found.result, "out": str(folder)}
    write(folder, result, found.page)
    for line in [*found.lines, *written(folder)]:
        print(line)
    return result
