"""The loss of a linear model: squared, cross-entropy, or the better by leave-one-out.

Both optima (the same head, a ridge and a temperature chosen on the training images), from the same draws:
test accuracy and log loss, and which of the two leave-one-out would have taken ("auto"). The paper has no
such table; it takes the squared loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

import linnet
from experiments.lqf.tasks import PAIRS, Pair, accuracy, load, log_loss, loo_log_loss
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.fitting.last_layer import features, with_centered_head
from linnet.report.reading import predict, temperatures_of

LOSSES = ("squared", "cross-entropy")
SHOTS = 10


def adapted(pair: Pair, seed: int, shots: int, data_dir: str | None) -> dict[str, Any]:
    """Both losses on one draw.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        shots: Training images a class.
        data_dir: Folder of the data.

    Returns:
        For each loss the test accuracy, log loss, ridge and leave-one-out log loss; and what "auto" takes.
    """
    model, (x, y), (xt, yt) = load(pair, seed, data_dir, shots)
    # a linear probe of fewer samples than features fits any labels, and the derivatives behind it hold them
    init = "probe" if len(x) >= features(model, x[:1]).shape[1] else "random"
    generator = torch.Generator().manual_seed(0)
    given = (x, y) if init == "probe" else None
    network = linnet.with_head(model, int(y.max()) + 1, init=init, data=given, seed=generator)
    lin = linnet.linearize(with_centered_head(network) if init == "probe" else network)
    found: dict[str, Any] = {"head": init}
    criterion = "evidence" if init == "probe" else "loo"
    for loss in LOSSES:
        fit = linnet.fit(lin, (x, y), loss, ridge=criterion, solver="dual")
        probs = predict(fit, xt, temperatures=temperatures_of(fit), std=True).probs
        assert probs is not None
        found[f"{loss} accuracy"] = accuracy(torch.as_tensor(probs), yt)
        found[f"{loss} log loss"] = log_loss(probs, yt)
        found[f"{loss} ridge"] = fit.ridge
        found[f"{loss} leave-one-out"] = loo_log_loss(fit)
    taken = min(LOSSES, key=lambda loss: found[f"{loss} leave-one-out"])
    return {**found, "auto": taken, **{f"auto {m}": found[f"{taken} {m}"] for m in ("accuracy", "log loss")}}


def table(cells: Sequence[Cell]) -> str:
    """Accuracy and log loss of each, by pair; means over pairs below."""
    ways = (*LOSSES, "auto")
    rows: list[list[str]] = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        own = [cell for cell in cells if cell["pair"] == pair]
        rows.append(
            [
                f"{pair}, {own[0]['shots']} shots ({own[0]['head']} head)",
                *(with_error(chosen(own, f"{way} accuracy"), scale=100) for way in ways),
                *(with_error(chosen(own, f"{way} log loss"), digits=3) for way in ways),
                f"{sum(cell['auto'] == 'cross-entropy' for cell in own)} of {len(own)}",
            ]
        )
    mean = [
        f"{scale * statistics.fmean(chosen(cells, f'{way} {what}')):.{digits}f}"
        for what, scale, digits in (("accuracy", 100, 1), ("log loss", 1, 3))
        for way in ways
    ]
    rows.append(["mean", *mean, ""])
    head = [*(f"{way}, accuracy %" for way in ways), *(f"{way}, log loss" for way in ways)]
    return markdown(["", *head, "auto takes cross-entropy"], rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 3])
    arguments.add_argument("--shots", type=int, nargs="*", default=[SHOTS])
    given = arguments.parse_args(argv)
    study = Study("lqf/loss", given)
    cells = [
        study.cell(
            {"pair": pair.name, "shots": shots, "seed": seed},
            lambda pair=pair, shots=shots, seed=seed: adapted(pair, seed, shots, given.data_dir),
        )
        for shots in given.shots
        for pair in (pairs or [PAIRS[i] for i in given.pairs])
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
