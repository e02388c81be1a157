"""`linnet demo`: the main job in half a minute, on digits that come with linnet."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def demo(*, out: Path = Path("runs/demo"), seed: int = 0, overwrite: bool = False) -> dict[str, Any]:
    """Adapt a small network to digits that it has never seen; then find wrong labels and forget them.

    Args:
        out: The folder for the data, the network, the runs and their reports.
        seed: Seed of everything that is random.
        overwrite: Whether to replace a run of other settings there, or to write beside other files.

    Returns:
        Scores of the fit and of what it is compared with, how many flipped labels were found, and scores
        before and after forgetting.
    """
    from linnet.app.runs.demonstration import FLIPPED, adapt_digits, forget_flipped, prepare
    from linnet.app.runs.place import check_out, clear_run
    from linnet.app.runs.summary import print_adaptation, print_change
    from linnet.report import Comparison

    check_out(out)
    if overwrite:
        clear_run(out)
    files, before = prepare(out, seed)
    print(
        f"1. A small network was trained on the digits 0 to 4 in {before['seconds']:.1f} s: "
        f"{100 * before['accuracy']:.1f} % right on others of them."
    )
    print("\n2. It is adapted to the digits 5 to 9 with 10 samples of each, by linear algebra.\n")
    adapted = adapt_digits(files, out, seed)
    for line in print_adaptation(adapted):
        print(line)
    print(f"\n3. The same with {FLIPPED} labels flipped. Leave-one-out finds labels that look wrong.\n")
    recall, forgotten = forget_flipped(files, out, seed)
    print(f"flipped:       {', '.join(recall.wrong)}")
    print(f"most suspicious: {', '.join(recall.inspected)}   ({recall.found} of {FLIPPED} found)\n")
    for line in print_change(forgotten):
        print(line)
    return {
        "command": "demo", "pretrained": before, "scores": adapted["scores"],
        "flipped": list(recall.wrong), "inspected": list(recall.inspected), "found": recall.found,
        "forgetting": {key: forgotten[key] for key in ("scores", "certificate", "difference", "seconds")},
        "best": max((Comparison(**row) for row in adapted["scores"]), key=lambda row: row.accuracy or 0).name,
        "out": str(out),
    }  # fmt: skip
