"""Appendix A.2: what Leaky ReLU costs a network that learned with ReLU, and what an epoch more gives back.

Achille et al. replace ReLU by Leaky ReLU, train the network for one more epoch on its pretraining task, and
fine-tune from there; they find the weights good even before that epoch. Here a ResNet of CIFAR-10 on 10,000
of its images: its accuracy there, and the test error of the linear model's optimum, whose ridge is that of
least leave-one-out error, on other tasks. Without labels of the pretraining task the outputs before surgery
are the targets (``linnet.surgery.recover(teacher=)``); an epoch of the ReLU network stands beside them.

    python -m experiments.lqf.recovery --threads 1 --seeds 5
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.lqf.tasks import PAIRS, Pair, accuracy, linear_model, load
from experiments.sources import images, pixels, pretrained
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

WAYS = {  # slope below zero, what the epoch leads to, and whether BatchNorm takes new statistics
    "ReLU": (0.0, None, True),
    "ReLU, an epoch": (0.0, "labels", True),
    "Leaky ReLU": (0.2, None, True),
    "Leaky ReLU, an epoch": (0.2, "labels", True),
    "Leaky ReLU, an epoch towards the outputs before": (0.2, "outputs", True),
    "the same with the statistics before": (0.2, "outputs", False),
}
BATCH, TESTED, SOURCE_TESTED = 64, 500, 2000


@lru_cache(maxsize=1)
def source(
    network: str, data_dir: str | None
) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The network as it comes, and images of its own task to train and to test."""
    model, normalization = pretrained(network, data_dir)
    stored = images("cifar10_10k_5k", data_dir)
    x, xt = (pixels(part, normalization) for part in (stored.train_x, stored.test_x[:SOURCE_TESTED]))
    return model, (x, stored.train_y), (xt, stored.test_y[:SOURCE_TESTED])


@lru_cache(maxsize=1)
def recovered(network: str, way: str, seed: int, data_dir: str | None) -> tuple[nn.Module, float]:
    """A network after surgery, and its accuracy on its own task."""
    model, train, (xt, yt) = source(network, data_dir)
    slope, towards, anew = WAYS[way]
    made = linnet.surgery.leaky_relu(model, slope) if slope else model
    if towards is not None:
        made = linnet.surgery.recover(
            made,
            train,
            model if towards == "outputs" else None,
            training=linnet.Training(steps=-(-len(train[1]) // BATCH), batch_size=BATCH),
            training_mode=anew,
            seed=seed,
        )
    with torch.no_grad():
        outputs = torch.cat([made(part) for part in xt.split(500)])
    return made, accuracy(outputs, yt)


def compute(network: str, pair: Pair, way: str, seed: int, data_dir: str | None) -> dict[str, Any]:
    """The optimum of the linear model at a network's weights on one draw of a task."""
    model, own = recovered(network, way, seed, data_dir)
    _, train, (xt, yt) = load(pair, seed, data_dir, tested=TESTED)
    fit = linnet.fit(linear_model(model, train, leaky=False), train, ridge="loo")
    return {"accuracy": accuracy(fit.predict(xt), yt), "source accuracy": own, "ridge": fit.ridge}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a way; accuracy on the network's own task, test errors, and those less ReLU's."""
    pairs = list(dict.fromkeys(cell["pair"] for cell in cells))
    rows = []
    for way in dict.fromkeys(cell["way"] for cell in cells):
        own = [cell for cell in cells if cell["way"] == way]
        errors = [
            with_error((1 - a for a in chosen(own, "accuracy", pair=pair)), scale=100) for pair in pairs
        ]
        sources = [cell["source accuracy"] for cell in own if cell["pair"] == pairs[0]]
        rows.append([way, with_error(sources, scale=100), *errors, less(cells, way)])
    short = [f"{pair.split(' → ')[1].split(' ')[0]}, error %" for pair in pairs]
    return markdown(["network", "CIFAR-10, accuracy %", *short, "error less that with ReLU"], rows)


def less(cells: Sequence[Cell], way: str, other: str = "ReLU") -> str:
    """Test error less that of another way on the same draws, with its error over pairs and draws."""
    found = {
        which: {(cell["pair"], cell["seed"]): cell["accuracy"] for cell in cells if cell["way"] == which}
        for which in (way, other)
    }
    gains = [found[other][draw] - accuracy for draw, accuracy in found[way].items()]
    return "–" if way == other else with_error(gains, scale=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--network", choices=("resnet20", "resnet56"), default="resnet20")
    given = arguments.parse_args(argv)
    study = Study("lqf/recovery", given)
    pairs = [pair for pair in PAIRS if pair.network == "resnet20" and not pair.coarse]
    cells = [
        study.cell(
            {"network": given.network, "pair": pair.name, "shots": pair.shots, "way": way, "seed": seed},
            lambda pair=pair, way=way, seed=seed: compute(given.network, pair, way, seed, given.data_dir),
        )
        for seed in study.seeds
        for way in WAYS
        for pair in pairs
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
