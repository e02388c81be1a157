"""Which ridge the optimum of the linear model should have: one for all weights, or the curvature's.

LQF takes its steps in the metric of K-FAC and stops early. Here the metric is kept and the optimum is taken:
the ridge ρ δᵀ(G/N + τI)δ of ``linnet.with_metric`` beside ρ‖δ‖², each with ρ by leave-one-out, both from
outputs of zero with the derivatives of a probe's head, as ``linnet adapt`` starts. The prototype that this
project began with had found no difference between metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import linnet
from experiments.lqf.tasks import PAIRS, Data, Pair, accuracy, load
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.likelihoods import Gaussian
from linnet.methods.fitting.centered import with_centered_head

SHOTS = 10
METRICS = ("none", "kfac", "ekfac", "diagonal")
CRITERIA = ("loo", "gcv", "evidence")
DECADES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5)  # ridges over the mean diagonal of the kernel


def with_ridge(model: nn.Module, train: Data, metric: str) -> nn.Module:
    """The network with a head whose outputs are zero, in a metric."""
    x, y = train
    classes = int(y.max()) + 1
    probe = linnet.with_head(model, classes, "probe", train)
    start = with_centered_head(probe)
    if metric == "none":
        return start
    targets = torch.zeros(len(y), classes)
    return linnet.with_metric(
        start, linnet.curvature(probe, (x, targets), Gaussian(variance=1.0), structure=metric)
    )


def compared(pair: Pair, seed: int, metric: str, leaky: bool, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy at the ridge of each criterion, and along a path of ridges.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        metric: One of ``METRICS``.
        leaky: Whether ReLU becomes Leaky ReLU.
        data_dir: Folder of the data.

    Returns:
        Test accuracy by criterion and along the path; ridges over the mean diagonal of the kernel.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir)
    network = linnet.surgery.leaky_relu(model, 0.2) if leaky else model
    lin = linnet.linearize(with_ridge(network, train, metric))
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "kernel.npy")  # the kernel is formed once and read again by every fit
        chosen_by = {c: linnet.fit(lin, train, ridge=c, file=file) for c in CRITERIA}
        scale = _scale(lin, train, file)
        fits = [linnet.fit(lin, train, ridge=scale * 10**decade, file=file) for decade in DECADES]
    along = [accuracy(fit.predict(xt), yt) for fit in fits]
    return {
        **{c: accuracy(fit.predict(xt), yt) for c, fit in chosen_by.items()},
        "ridges": {c: fit.ridge / scale for c, fit in chosen_by.items()},
        "along": along,
        "best": max(along),
    }


def _scale(lin: linnet.Linearized, train: Data, file: str) -> float:
    """The mean diagonal of the kernel."""
    rows = len(train[1]) * (int(train[1].max()) + 1)
    return float(linnet.spectrum.gram(lin, train[0], file=file).reshape(rows, rows).diagonal().mean())


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 3], help="numbers of the pairs")
    arguments.add_argument("--metrics", nargs="+", default=["none", "kfac"], choices=METRICS)
    arguments.add_argument("--leaky", action="store_true", help="Leaky ReLU instead of ReLU")
    given = arguments.parse_args(argv)
    study = Study("lqf/metric", given)
    taken = pairs or [Pair(p.network, p.target, p.side, SHOTS) for p in (PAIRS[i] for i in given.pairs)]
    cells: list[Cell] = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "metric": metric, "leaky": given.leaky, "seed": seed},
            lambda pair=pair, seed=seed, metric=metric: compared(
                pair, seed, metric, given.leaky, given.data_dir
            ),
        )
        for pair in taken
        for metric in given.metrics
        for seed in study.seeds
    ]
    rows = [
        [
            f"{pair.name}, {pair.shots} shots",
            *(
                with_error(chosen(cells, key, pair=pair.name, metric=metric), scale=100)
                for key in ("loo", "evidence", "best")
                for metric in given.metrics
            ),
        ]
        for pair in taken
    ]
    head = [
        f"{metric}, {what}"
        for what in ("leave-one-out", "evidence", "best of the path")
        for metric in given.metrics
    ]
    study.publish(markdown(["test accuracy, %", *head], rows), cells)


if __name__ == "__main__":
    main()
