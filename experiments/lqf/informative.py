"""Figure 6 (right): test accuracy after the most or the least informative training samples are dropped.

The paper (Oxford Flowers, LQF) ranks samples by how much predictions change without them (eq. 9) and
finds that the test accuracy falls faster when the most informative ones go. Here the ranking is exact,
and so is the fit without the samples (``fit.forget``); a random order stands beside the two. The head is
random, as in the paper: it has seen no label, so what a sample tells is all in the linear model. ``--head
probe`` takes a head that was fitted on the samples, and fits it anew on those that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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


def curves(pair: Pair, seed: int, head: str, on: str, data_dir: str | None) -> dict[str, Any]:
    """Test accuracy without growing shares of the samples, for each order of dropping them.

    Args:
        pair: The pair.
        seed: Seed of the draw, of a random head and of the random order.
        head: ``"random"`` or ``"probe"``.
        on: ``"training"`` or ``"held-out"``: the images whose predictions count.
        data_dir: Folder of the data.

    Returns:
        The accuracy of the whole fit, a list of accuracies for each order, and how many classes are left.
    """
    model, (x, y), (xt, yt) = load(pair, seed, data_dir)
    fit = linnet.fit(linear_model(model, (x, y), head=head, seed=seed), (x, y), ridge="loo")
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
    found: dict[str, Any] = {"whole": accuracy(fit.predict(xt), yt)}
    classes = int(y.max()) + 1
    for name, ranked in orders.items():
        found[name], found[f"classes {name}"] = [], []
        for share in SHARES:
            kept = ranked[round(share * len(y)) :].sort().values
            part = x[kept], y[kept]
            again = (
                fit.forget(ranked[: round(share * len(y))])
                if head == "random"
                else linnet.fit(linear_model(model, part, classes=classes), part, ridge=fit.ridge)
            )
            found[name].append(accuracy(again.predict(xt), yt))
            found[f"classes {name}"].append(len(part[1].unique()))
    ranks = torch.stack([information.argsort().argsort(), misses.argsort().argsort()]).double()
    return {
        **found,
        "ridge": fit.ridge,
        "rank correlation with leave-one-out residuals": float(ranks.corrcoef()[0, 1]),
    }


def draw(study: Study, cells: Sequence[Cell]) -> None:
    """The curves with their standard errors."""
    drawn, axes = figure()
    percent = [0.0, *(100 * s for s in SHARES)]
    for color, name in zip(COLORS, ORDERS, strict=False):
        columns = zip(*([cell["whole"], *cell[name]] for cell in cells), strict=True)
        points = [mean_and_error(100 * value for value in column) for column in columns]
        axes.errorbar(
            percent, [m for m, _ in points], [e for _, e in points], color=color, label=name, capsize=2
        )
    axes.set_xlabel("training samples dropped, %")
    axes.set_ylabel("test accuracy, %")
    axes.legend(title="dropped first: informative")
    save(drawn, study.out / "informative.svg")


def main(argv: Sequence[str] | None = None, pair: Pair | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--on", choices=["training", "held-out"], default="training")
    arguments.add_argument("--head", choices=["random", "probe"], default="random")
    given = arguments.parse_args(argv)
    study = Study("lqf/informative", given)
    pair = pair or (FULL_PAIR if given.full else PAIR)
    on = {} if given.on == "training" else {"on": given.on}
    cells = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "seed": seed, "head": given.head, **on},
            lambda seed=seed: curves(pair, seed, given.head, given.on, given.data_dir),
        )
        for seed in study.seeds
    ]
    rows = []
    for name in ORDERS:
        columns = zip(*chosen(cells, name), strict=True)
        rows.append(
            [
                name,
                with_error(chosen(cells, "whole"), scale=100),
                *(with_error(c, scale=100) for c in columns),
            ]
        )
    header = ["dropped first", "0 %", *(f"{100 * share:.0f} %" for share in SHARES)]
    study.publish(markdown(header, rows), cells, network=pair.name, shots=pair.shots)
    draw(study, cells)


if __name__ == "__main__":
    main()
