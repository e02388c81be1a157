"""Table 2: what bilinear pooling of the last feature map gains, in the linear model and in plain fine-tuning.

Achille et al. put square-root bilinear pooling in the place of the mean of the last feature map (B-LQF) and
find it far ahead of LQF on fine-grained sets (birds, aircraft, cars: 24.0 → 17.1, 34.5 → 29.2, 27.1 → 16.3 %
error), while plain fine-tuning gains little. Here: the same draws of images with and without it, by three
methods: the optimum of the linear model in all weights, its ridge by leave-one-out ("lqf"; behind Leaky ReLU,
but for the larger network, whose features that would ruin), plain fine-tuning with a rate that the first
draw's held-out fifth prefers ("nlft"), and ``linnet.adapt``.
None of the sets is one of theirs, the flowers being the nearest; last maps have 64 channels, those of the
larger network the leading principal components of its 1,280.

    python -m experiments.lqf.bilinear --threads 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.adapt.tasks import NETWORKS, Task, samples, stored
from experiments.lqf.tasks import PAIRS, RATES, Data, Pair, accuracy, finetune, linear_model, load, options
from experiments.sources import shots
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

CHANNELS, SLOPE, SCALE = 64, 0.2, 15.0
STEPS = 60
METHODS = ("lqf", "nlft", "adapt")
LARGER = (  # of EfficientNet-lite0 at 128 pixels, whose last map is 4 × 4
    Pair("lite0", "flowers_160", 128, 10),
)


@lru_cache(maxsize=1)
def _network(name: str, data_dir: str | None) -> tuple[nn.Module, Any]:
    """An encoder and the normalization of its images."""
    return NETWORKS[name].load(data_dir)


def drawn(pair: Pair, seed: int, data_dir: str | None) -> tuple[nn.Module, Data, Data]:
    """The network, a draw of training images, and the test images."""
    if pair.network != "lite0":
        return load(pair, seed, data_dir)
    network = replace(NETWORKS[pair.network], side=pair.side)
    model, prepared = _network(pair.network, data_dir)
    found = stored(Task(pair.target, pair.target), data_dir)
    index = shots(found.train_y, pair.shots, seed)
    test = shots(found.test_y, max(1, 200 // found.classes), 0)
    x = samples(found.train_x[index.numpy()], network, prepared)
    xt = samples(found.test_x[test.numpy()], network, prepared)
    assert isinstance(x, Tensor)
    assert isinstance(xt, Tensor)
    return model, (x, found.train_y[index]), (xt, found.test_y[test])


def pooled(model: nn.Module, train: Data, scale: float | None) -> nn.Module:
    """The network with bilinear pooling and a probe behind it."""
    classes = int(train[1].max()) + 1
    init = linnet.Probe() if scale is None else linnet.Probe(scale=scale)
    settings = linnet.surgery.Bilinear(channels=CHANNELS)
    made: nn.Module = linnet.surgery.with_bilinear_head(model, classes, train, settings, init=init)
    return made


def one(
    pair: Pair, method: str, bilinear: bool, seed: int, rate: float | None, data_dir: str | None
) -> dict[str, Any]:
    """Test accuracy of a method with or without bilinear pooling, and what it chose."""
    torch.manual_seed(seed)
    model, train, (xt, yt) = drawn(pair, seed, data_dir)
    if method == "nlft":
        model = pooled(model, train, None) if bilinear else model
        choice: dict[str, Any] = {"learning_rate": rate}
        if rate is None:
            choice = {"search": {"learning_rate": list(RATES[method])}}
        head = {"head": "keep"} if bilinear else {}
        run = finetune(model, train, method, seed=seed, **options(method, STEPS), **choice, **head)
        return {"accuracy": accuracy(run.predict(xt), yt), "rate": run.settings.values["learning_rate"]}
    if method == "adapt":
        fit = linnet.adapt(pooled(model, train, None) if bilinear else model, train)
        return {"accuracy": accuracy(fit.predict(xt), yt), "shares": [fit.earlier, fit.body_weight]}
    leaky = pair not in LARGER
    if bilinear:
        model = linnet.surgery.leaky_relu(model, SLOPE) if leaky else model
        lin = linnet.linearize(pooled(model, train, SCALE), "all")
    else:
        lin = linear_model(model, train, leaky=leaky, scale=SCALE)
    fit = linnet.fit(lin, train, ridge="loo")
    return {"accuracy": accuracy(fit.predict(xt), yt), "ridge": fit.ridge}


def cells_of(study: Study, pair: Pair, methods: Sequence[str]) -> list[Cell]:
    """Every method with and without pooling; the rate of the first draw is kept for the others."""
    directory, found = study.arguments.data_dir, list[Cell]()
    for method in methods:
        for bilinear in (False, True):
            rate = None
            for seed in study.seeds:
                what = {"pair": pair.name, "shots": pair.shots, "method": method, "bilinear": bilinear,
                        "seed": seed, "rate given": rate}  # fmt: skip
                cell = study.cell(
                    what,
                    lambda method=method, bilinear=bilinear, seed=seed, rate=rate: one(
                        pair, method, bilinear, seed, rate, directory
                    ),
                )
                rate = cell.get("rate")
                found.append(cell)
    return found


def table(cells: Sequence[Cell], methods: Sequence[str] = METHODS) -> str:
    """Test errors without and with pooling, and what it takes away."""
    rows = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        row = [f"{pair}, {next(c['shots'] for c in cells if c['pair'] == pair)} shots"]
        for method in methods:
            plain, other = (
                [1 - a for a in chosen(cells, "accuracy", pair=pair, method=method, bilinear=b)]
                for b in (False, True)
            )
            gains = [a - b for a, b in zip(plain, other, strict=True)]
            row += [with_error(values, scale=100) for values in (plain, other, gains)] if plain else ["–"] * 3
        rows.append(row)
    header = ["test error, %"]
    header += [name for m in methods for name in (m, f"bilinear {m}", f"less by, {m}")]
    return markdown(header, rows)


def main(argv: Sequence[str] | None = None, pairs: Sequence[Pair] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--larger", action="store_true", help="EfficientNet-lite0 as well")
    given = arguments.parse_args(argv)
    study = Study("lqf/bilinear", given)
    taken = pairs or (*PAIRS[:4], *(LARGER if given.larger else ()))
    cells = [cell for pair in taken for cell in cells_of(study, pair, given.methods)]
    study.publish(table(cells, given.methods), cells)


if __name__ == "__main__":
    main()
