"""The ridge of the linear model: one for all weights, or in the metric of a curvature.

LQF takes its steps in the metric of K-FAC and stops early. Here the metric is kept and the optimum is taken:
the ridge ρ δᵀ(G/N + τI)δ of ``linnet.with_metric`` beside ρ‖δ‖², from outputs of zero with the derivatives of
a probe's head, or behind a random head.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.lqf.tasks import PAIRS, Data, Pair, accuracy, load, log_loss, loo_log_loss
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.fitting import Dual
from linnet.fitting.last_layer import with_centered_head
from linnet.likelihoods import Gaussian
from linnet.report.reading import predict, temperatures_of

SHOTS = 10
HEADS = ("probe", "random")
METRICS = ("none", "kfac", "ekfac", "diagonal")
CRITERIA = ("loo", "gcv", "evidence")
DECADES = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5)  # ridges over the mean diagonal of the kernel


def with_ridge(model: nn.Module, train: Data, metric: str, head: str) -> nn.Module:
    """The network with a new head, a probe's centered, in a metric."""
    x, y = train
    classes = int(y.max()) + 1
    data, generator = (train if head == "probe" else None), torch.Generator().manual_seed(0)
    headed = linnet.with_head(model, classes, head, data, seed=generator)
    start = with_centered_head(headed) if head == "probe" else headed
    if metric == "none":
        return start
    targets = torch.zeros(len(y), classes)
    return linnet.with_metric(
        start, linnet.curvature(headed, (x, targets), Gaussian(variance=1.0), structure=metric)
    )


def compared(
    pair: Pair, seed: int, way: tuple[str, str], leaky: bool, data_dir: str | None
) -> dict[str, Any]:
    """Test accuracy at the ridge of each criterion, and along a path of ridges.

    Args:
        pair: The pair.
        seed: Seed of the draw.
        way: One of ``METRICS`` and one of ``HEADS``.
        leaky: Whether ReLU becomes Leaky ReLU.
        data_dir: Folder of the data.

    Returns:
        Test accuracy by criterion and along the path; ridges over the mean diagonal of the kernel; for each
        criterion the test log loss and what the training images say: leave-one-out log loss and evidence.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir)
    network = linnet.surgery.leaky_relu(model, 0.2) if leaky else model
    lin = linnet.linearize(with_ridge(network, train, *way))
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "kernel.npy")  # the kernel is formed once and read again by every fit
        chosen_by = {c: linnet.fit(lin, train, ridge=c, solver=Dual(file)) for c in CRITERIA}
        scale = _scale(lin, train, file)
        fits = [linnet.fit(lin, train, ridge=scale * 10**decade, solver=Dual(file)) for decade in DECADES]
    along = [accuracy(fit.predict(xt), yt) for fit in fits]
    return {
        **{c: accuracy(fit.predict(xt), yt) for c, fit in chosen_by.items()},
        "ridges": {c: fit.ridge / scale for c, fit in chosen_by.items()},
        "judged": {c: _judged(fit, xt, yt) for c, fit in chosen_by.items()},
        "along": along,
        "best": max(along),
    }


def _judged(fit: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Log loss on the test images and by leave-one-out, and the evidence of an image."""
    p = predict(fit, x, temperatures=temperatures_of(fit), std=False).probs
    assert p is not None
    evidence = float(fit.system.log_evidence()) / fit.n
    return {"log loss": log_loss(p, y), "loo": loo_log_loss(fit), "evidence": evidence}


def _scale(lin: linnet.Linearized, train: Data, file: str) -> float:
    """The mean diagonal of the kernel."""
    rows = len(train[1]) * (int(train[1].max()) + 1)
    return float(linnet.spectrum.gram(lin, train[0], file=file).reshape(rows, rows).diagonal().mean())


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--pairs", type=int, nargs="*", default=[1, 0, 3], help="numbers of the pairs")
    arguments.add_argument("--metrics", nargs="+", default=["none", "kfac"], choices=METRICS)
    arguments.add_argument("--heads", nargs="+", default=["probe"], choices=HEADS)
    arguments.add_argument("--shots", type=int, default=SHOTS, help="training images a class")
    arguments.add_argument("--leaky", action="store_true", help="Leaky ReLU instead of ReLU")
    given = arguments.parse_args(argv)
    study = Study("lqf/metric", given)
    taken = pairs or [
        Pair(p.network, p.target, p.side, given.shots, p.coarse) for p in (PAIRS[i] for i in given.pairs)
    ]
    ways = [(metric, head) for head in given.heads for metric in given.metrics]
    cells: list[Cell] = [
        study.cell(
            {
                "pair": pair.name, "shots": pair.shots, "metric": way[0], "head": way[1],
                "leaky": given.leaky, "seed": seed,
            },
            lambda pair=pair, seed=seed, way=way: compared(pair, seed, way, given.leaky, given.data_dir),
        )
        for pair in taken
        for way in ways
        for seed in study.seeds
    ]  # fmt: skip
    study.publish("\n\n".join(table(cells, ways, head) for head in given.heads), cells)


def table(cells: Sequence[Cell], ways: Sequence[tuple[str, str]], head: str) -> str:
    """Test accuracy by pair, criterion and metric behind one head."""
    metrics = [metric for metric, own in ways if own == head]
    tasks = dict.fromkeys((cell["pair"], cell["shots"]) for cell in cells)
    rows = [
        [
            f"{pair}, {shots} shots",
            *(
                with_error(chosen(cells, key, pair=pair, shots=shots, metric=metric, head=head), scale=100)
                for key in ("loo", "evidence", "best")
                for metric in metrics
            ),
        ]
        for pair, shots in tasks
    ]
    named = [f"{m}, {what}" for what in ("leave-one-out", "evidence", "best of the path") for m in metrics]
    return markdown([f"test accuracy, %, {head} head", *named], rows)


if __name__ == "__main__":
    main()
