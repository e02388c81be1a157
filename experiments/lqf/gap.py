"""The gap between the linear optimum and plain fine-tuning on a far domain, and ways to close it.

From CIFAR-10 to EuroSAT the optimum of the linear model under the squared loss trails plain fine-tuning.
One table of what might close it: Leaky ReLU, the head (random, or a probe of another scale), the cross-
entropy optimum, a few linearizations under cross-entropy, larger images, augmentation, and the paper's
early-stopped K-FAC trajectory. All learning rates are chosen on a fifth of the training images of seed 0
held out; ridges by leave-one-out, of which a head that has seen the labels makes an optimistic judge: the
rows with ridge/10 and ridge·10 show what that costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import linnet
from experiments.lqf.tasks import RATES, Data, Pair, accuracy, finetune, linear_model, load
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

NETWORK, TARGET = "resnet20", "eurosat_1000_500"
LARGE = 64  # side of the larger images
SHOTS = (10,)
FULL_SHOTS = (10, 30)
PLAIN = {"steps": 90, "batch_size": 16, "clip": 1.0, "schedule": "cosine"}
LINEAR = {"steps": 300, "batch_size": 16}
PERIODS = (90, 30, 10)  # steps between two linearizations: never, three and nine in 90 steps
Setting = tuple[nn.Module, Data, Data]
Compute = Callable[[Setting, int, float | None], dict[str, Any]]


def solved(setting: Setting, loss: str = "squared", factor: float = 1.0, **made: Any) -> dict[str, Any]:
    """The optimum, at the ridge of leave-one-out times a factor."""
    model, train, (xt, yt) = setting
    lin = linear_model(model, train, **made)
    fit = linnet.fit(lin, train, loss, ridge="loo")
    if factor != 1:
        fit = linnet.fit(lin, train, loss, ridge=factor * fit.ridge)
    return {"accuracy": accuracy(fit.predict(xt), yt), "value": fit.ridge}


def random_head(setting: Setting, seed: int) -> dict[str, Any]:
    """The squared optimum from a random head."""
    model, train, (xt, yt) = setting
    generator = torch.Generator().manual_seed(seed)
    network = linnet.with_head(model, int(train[1].max()) + 1, "random", seed=generator)
    fit = linnet.fit(linnet.linearize(network, "all"), train, ridge="loo")
    return {"accuracy": accuracy(fit.predict(xt), yt), "value": fit.ridge}


def probe(setting: Setting) -> dict[str, Any]:
    """The linear probe."""
    model, train, (xt, yt) = setting
    network = linnet.with_head(model, int(train[1].max()) + 1, "probe", train).eval()
    with torch.no_grad():
        return {"accuracy": accuracy(network(xt), yt)}


def trained(setting: Setting, method: str, seed: int, rate: float | None, **given: Any) -> dict[str, Any]:
    """A run of fine-tuning, its learning rate chosen unless given."""
    model, train, (xt, yt) = setting
    choice: dict[str, Any] = {"learning_rate": rate}
    if rate is None:
        choice = {"search": {"learning_rate": list(RATES[method])}}
    run = finetune(model, train, method, seed=seed, **given, **choice)
    return {"accuracy": accuracy(run.predict(xt), yt), "value": run.settings.values["learning_rate"]}


def relinearized(setting: Setting, period: int, seed: int, rate: float) -> dict[str, Any]:
    """Plain fine-tuning's own steps through linearizations that are renewed every ``period`` steps."""
    model, (x, y), (xt, yt) = setting
    network = linnet.with_head(model, int(y.max()) + 1, linnet.Probe(scale=5.0), (x, y)).eval()
    network = copy.deepcopy(network).requires_grad_(True)
    training = linnet.optim.IterativeLinearization(
        network, lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9), period
    )
    weights = list(network.parameters())
    training.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(weights, PLAIN["clip"]) and None
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, PLAIN["steps"])
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(y), generator=generator) for _ in range(PLAIN["steps"])])
    for rows in order.split(PLAIN["batch_size"])[: PLAIN["steps"]]:
        training.step(lambda module, rows=rows: F.cross_entropy(module(x[rows]), y[rows]))
        schedule.step()
    with torch.no_grad():
        return {"accuracy": accuracy(training.linearization(xt), yt), "value": rate,
                "network": accuracy(network(xt), yt)}  # fmt: skip


def rows_of(study: Study, shots: int) -> list[tuple[str, list[Cell]]]:
    """Every row of the table: its name and one cell a seed."""
    directory, found = study.arguments.data_dir, []

    def add(
        name: str, compute: Callable[[Setting, int, float | None], dict[str, Any]], side: int = 32
    ) -> list[Cell]:
        pair, cells = Pair(NETWORK, TARGET, side, shots), []
        for seed in study.seeds:
            first = cells[0].get("value") if cells else None
            cells.append(
                study.cell(
                    {"row": name, "shots": shots, "seed": seed, "side": side},
                    lambda seed=seed, first=first: compute(load(pair, seed, directory), seed, first),
                )
            )
        found.append((name, cells))
        return cells

    add("linear probe", lambda s, seed, _: probe(s))
    plain = add("plain fine-tuning", lambda s, seed, r: trained(s, "nlft", seed, r, **PLAIN))
    rate = plain[0]["value"]
    add("optimum, squared", lambda s, seed, _: solved(s, leaky=False))
    add("… Leaky ReLU", lambda s, seed, _: solved(s))
    add("… ridge / 10", lambda s, seed, _: solved(s, factor=0.1, leaky=False))
    add("… ridge · 10", lambda s, seed, _: solved(s, factor=10.0, leaky=False))
    add("… random head", lambda s, seed, _: random_head(s, seed))
    add("K-FAC trajectory, squared (lqf)", lambda s, seed, r: trained(s, "lqf", seed, r, **LINEAR))
    relu = {**LINEAR, "activation": "relu"}
    add("K-FAC trajectory, ReLU", lambda s, seed, r: trained(s, "lqf", seed, r, **relu))
    add("K-FAC trajectory, cross-entropy",
        lambda s, seed, r: trained(s, "lqf", seed, r, loss="cross-entropy", **LINEAR))  # fmt: skip
    add("SGD trajectory, cross-entropy (gaf)", lambda s, seed, r: trained(s, "gaf", seed, r, **LINEAR))
    for period in PERIODS:
        name = f"plain fine-tuning's steps, {max(0, PLAIN['steps'] // period - 1)} relinearizations"
        add(name, lambda s, seed, _, period=period: relinearized(s, period, seed, rate))
    if study.arguments.cross_entropy:
        for scale in (1.0, 5.0, 15.0):
            made = {"leaky": False, "scale": scale}
            add(f"optimum, cross-entropy, head scale {scale:g}",
                lambda s, seed, _, made=made: solved(s, "cross-entropy", **made))  # fmt: skip
    if study.arguments.large:
        size = f", {LARGE} × {LARGE}"
        add("linear probe" + size, lambda s, seed, _: probe(s), LARGE)
        add("optimum, squared" + size, lambda s, seed, _: solved(s, leaky=False), LARGE)
        add("K-FAC trajectory" + size, lambda s, seed, r: trained(s, "lqf", seed, r, **LINEAR), LARGE)
        add(
            "plain fine-tuning" + size, lambda s, seed, r: trained(s, "nlft", seed, r or rate, **PLAIN), LARGE
        )
    if study.arguments.augmented:
        crops = {**PLAIN, "augmentation": "random-crop"}
        add("plain fine-tuning, random crops", lambda s, seed, _: trained(s, "nlft", seed, rate, **crops))
    return found


def main(argv: Sequence[str] | None = None, shots: Sequence[int] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=2)
    arguments.add_argument("--large", action="store_true", help="images at 64 × 64 too")
    arguments.add_argument("--augmented", action="store_true", help="random crops too")
    arguments.add_argument("--cross-entropy", action="store_true", help="the cross-entropy optimum too")
    given = arguments.parse_args(argv)
    study = Study("lqf/gap", given)
    if given.full:
        given.large = given.augmented = given.cross_entropy = True
    counts = list(shots or (FULL_SHOTS if given.full else SHOTS))
    cells: list[Cell] = []
    names: dict[str, None] = {}
    for count in counts:
        for name, found in rows_of(study, count):
            names[name] = None
            cells += found
    rows = [
        [name, *(with_error(chosen(cells, "accuracy", row=name, shots=n), scale=100) for n in counts)]
        for name in names
    ]
    study.publish(markdown(["test accuracy, %", *(f"{n} shots a class" for n in counts)], rows), cells)


if __name__ == "__main__":
    main()
