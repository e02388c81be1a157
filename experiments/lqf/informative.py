"""Figure 6 (right): test accuracy after the most or the least informative training samples are dropped.

The paper (Oxford Flowers, LQF) ranks samples by how much predictions change without them (eq. 9) and
finds that the test accuracy falls faster when the most informative ones go. Here the ranking is exact,
and so is the fit without the samples (``fit.forget``); a random order stands beside the two. The head is
random, as in the paper: it has seen no label, so what a sample tells is all in the linear model. ``--head
probe`` takes a head that was fitted on the samples, and fits it anew on those that are left. ``--target``
and ``--shots`` take another task and more data, ``--params`` a part of the weights, which makes more data
affordable; ``--within-class`` drops the same share of every class, so that no order takes a class away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linnet
from experiments.figures import COLORS, figure, save
from experiments.lqf.tasks import Pair, accuracy, linear_model, load
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

PAIR = Pair("resnet20", "flowers_64", 32, 20)
FULL_PAIR = Pair("resnet56", "flowers_64", 64, 100)
HELD = 20  # images a class whose predictions count, for ``--on held-out``
SHARES = (0.2, 0.4, 0.6, 0.8)
ORDERS = ("most", "least", "random")


def curves(
    pair: Pair,
    seed: int,
    head: str,
    on: str,
    data_dir: str | None,
    params: str | None = None,
    within_class: bool = False,
) -> dict[str, Any]:
    """Test accuracy without growing shares of the samples, for each order of dropping them.

    Args:
        pair: The pair.
        seed: Seed of the draw, of a random head and of the random order.
        head: ``"random"`` or ``"probe"``.
        on: ``"training"`` or ``"held-out"``: the images whose predictions count.
        data_dir: Folder of the data.
        params: Regular expression of the weights that vary; all by default.
        within_class: Whether the same share of every class is dropped.

    Returns:
        The accuracy of the whole fit, a list of accuracies for each order, and how many classes are left.
    """
    model, (x, y), (xt, yt) = load(pair, seed, data_dir)
    fit = linnet.fit(part_of(linear_model(model, (x, y), head=head, seed=seed), params), (x, y), ridge="loo")
    held = None
    if on == "held-out":  # images of the training part that are not trained on; their labels are not used
        _, (more, labels), _ = load(pair, seed, data_dir, pair.shots + HELD, tested=1)
        rows = [(labels == label).nonzero()[pair.shots :, 0] for label in labels.unique()]
        held = more[torch.cat(rows)]
    information = fit.informativeness(held)
    misses = (fit.targets - fit.loo().to(fit.targets)).norm(dim=1)
    order = information.argsort(descending=True)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    orders = {"most": order, "least": order.flip(0), "random": shuffled}
    if within_class:
        orders = {name: evenly(ranked, y) for name, ranked in orders.items()}
    found: dict[str, Any] = {"whole": accuracy(fit.predict(xt), yt)}
    classes = int(y.max()) + 1
    for name, ranked in orders.items():
        found[name], found[f"classes {name}"] = [], []
        for share in SHARES:
            kept = ranked[round(share * len(y)) :].sort().values
            part = x[kept], y[kept]
            if head == "random":
                again = fit.forget(ranked[: round(share * len(y))])
            else:
                lin = part_of(linear_model(model, part, classes=classes), params)
                again = linnet.fit(lin, part, ridge=fit.ridge)
            found[name].append(accuracy(again.predict(xt), yt))
            found[f"classes {name}"].append(len(part[1].unique()))
    ranks = torch.stack([information.argsort().argsort(), misses.argsort().argsort()]).double()
    return {
        **found,
        "ridge": fit.ridge,
        "rank correlation with leave-one-out residuals": float(ranks.corrcoef()[0, 1]),
    }


def evenly(ranked: Tensor, y: Tensor) -> Tensor:
    """The order in which each class loses its samples at the same pace, each in the given order."""
    place = torch.empty(len(y), dtype=torch.float64)
    for label in y.unique():
        own = ranked[y[ranked] == label]
        place[own] = torch.arange(len(own), dtype=torch.float64) / len(own)
    return place.argsort(stable=True)


def part_of(lin: linnet.Linearized, params: str | None) -> linnet.Linearized:
    """The same network, linearized in a part of its weights."""
    return lin if params is None else linnet.linearize(lin.model, params)


def settings(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each task and way of dropping, under its name."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        name = f"{cell['pair'].split(' → ')[1]}, {cell['shots']} a class"
        name += ", the same share of each" if cell["within class"] else ""
        found.setdefault(name, []).append(cell)
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: test accuracies of each order of dropping, a column for each share dropped."""
    rows = []
    for name, own in settings(cells).items():
        for order in ORDERS:
            columns = [chosen(own, "whole"), *zip(*chosen(own, order), strict=True)]
            rows.append([f"{name}: {order}", *(with_error(column, scale=100) for column in columns)])
    return markdown(["dropped first", "0 %", *(f"{100 * share:.0f} %" for share in SHARES)], rows)


def draw(cells: Sequence[Cell], file: Path) -> None:
    """The curves with their standard errors, a panel for each task and way of dropping."""
    panels = settings(cells)
    drawn, axes = figure(len(panels), width=3.4)
    percent = [0.0, *(100 * s for s in SHARES)]
    for axis, (title, own) in zip([axes] if len(panels) == 1 else axes, panels.items(), strict=True):
        for color, name in zip(COLORS, ORDERS, strict=False):
            columns = zip(*([cell["whole"], *cell[name]] for cell in own), strict=True)
            points = [mean_and_error(100 * value for value in column) for column in columns]
            axis.errorbar(
                percent, [m for m, _ in points], [e for _, e in points], color=color, label=name, capsize=2
            )
        axis.set_title(title, fontsize=8)
        axis.set(xlabel="training samples dropped, %", ylabel="test accuracy, %")
        axis.legend(title="dropped first: informative")
    save(drawn, file)


def main(argv: Sequence[str] | None = None, pair: Pair | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--on", choices=["training", "held-out"], default="training")
    arguments.add_argument("--head", choices=["random", "probe"], default="random")
    arguments.add_argument("--target", default=None, help="another data set than flowers")
    arguments.add_argument("--shots", type=int, default=None, help="training images a class")
    arguments.add_argument("--params", default=None, help="regular expression of the weights that vary")
    arguments.add_argument("--within-class", action="store_true", help="drop the same share of every class")
    given = arguments.parse_args(argv)
    study = Study("lqf/informative", given)
    pair = pair or (FULL_PAIR if given.full else PAIR)
    pair = replace(pair, target=given.target or pair.target, shots=given.shots or pair.shots)
    on = {} if given.on == "training" else {"on": given.on}
    on |= {} if given.params is None else {"params": given.params}
    cells = [
        study.cell(
            {
                "pair": pair.name,
                "shots": pair.shots,
                "seed": seed,
                "head": given.head,
                "within class": given.within_class,
                **on,
            },
            lambda seed=seed: curves(
                pair, seed, given.head, given.on, given.data_dir, given.params, given.within_class
            ),
        )
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)
    draw(cells, study.out / "informative.svg")


if __name__ == "__main__":
    main()
