"""`linnet predict`: predictions of an adapted network for new samples, with confidences."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def predict(
    *,
    run: Path,
    data: Path,
    out: Path | None = None,
    std: bool = True,
    model: str | None = None,
    memory: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Predict new samples with an adapted network, with probabilities and standard deviations.

    Args:
        run: The folder that linnet adapt, forget or update wrote.
        data: The samples: a folder of images, an ``.npz`` archive with x or x_test, or a ``.csv`` table with
            the run's columns. Answers are used to score the predictions where there are any.
        out: The file to write, ``.csv`` or ``.json``; predictions.csv in the run's folder by default.
        std: Whether to compute standard deviations, which takes longer than the predictions themselves.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        overwrite: Whether to replace a file that exists, where one is named by out.
        trust: Whether to run code that a run of another user names.

    Returns:
        How many samples were predicted as what, their scores where answers are known, and the files written.
    """
    from linnet.app.runs.folder import load_run
    from linnet.app.runs.newdata import read_new
    from linnet.app.runs.pages import write
    from linnet.app.runs.queries import (
        check_table,
        predict_new,
        prediction_page,
        prediction_rows,
        told_rows,
        write_rows,
    )
    from linnet.app.runs.settings import check_device
    from linnet.app.runs.summary import print_prediction

    table = out or run / "predictions.csv"
    if out is not None:
        check_table(out, overwrite)
    check_device(device)
    saved = load_run(run, device, memory, model=model, trust=trust)
    new = read_new(data, saved, prefer="test")
    found = predict_new(saved, new, std)
    result, page = prediction_page(saved, new, found, f"Predictions for {data.name}", run)
    result |= {"predictions": str(table), "out": str(run / "predict")}
    rows = prediction_rows(saved, new, found)
    write_rows(table, rows)
    write(run / "predict", result, page)
    for line in print_prediction(result, told_rows(saved, new, rows)):
        print(line)
    return result
