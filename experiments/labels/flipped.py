"""Detection of labels flipped at random: three rules on the same leave-one-out outputs.

A random network of one hidden layer is linearized and fitted in closed form to 150 images, some labels of
which are flipped to another class. "Disagrees" doubts every label that is not the leave-one-out prediction;
"confident learning" is the rule of Northcutt, Jiang and Chuang (JAIR 2021): the off-diagonal of the confident
joint, with the mean leave-one-out probability of each class as its threshold; the last two are the lists of
``linnet.audit.mislabeled``. Orders are compared by their area under the ROC curve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.sources import images, pixels
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

SETS = ("mnist", "fashion_mnist", "sign_digits_64")
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)
SIDE, HIDDEN = 14, 256
RULES = ("disagrees", "confident learning", "suspected", "doubted")
ORDERS = ("self-confidence", "margin")


def flipped(labels: Tensor, share: float, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """The labels with a share of them moved to another class, and which ones."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]] = True
    shift = 1 + torch.randint(classes - 1, (len(labels),), generator=generator)
    return torch.where(wrong, (labels + shift) % classes, labels), wrong


def confident_learning(p: Tensor, labels: Tensor) -> Tensor:
    """Which labels the confident joint counts off its diagonal, (N,)."""
    known = F.one_hot(labels, p.shape[1]).to(p)
    thresholds = (p * known).sum(0) / known.sum(0)
    confident = torch.where(p >= thresholds, p, -1.0).max(1)
    return (confident.values >= 0) & (confident.indices != labels)


def area(score: Tensor, wrong: Tensor) -> float | None:
    """The share of pairs of a wrong and a right label of which the wrong one is the more suspect."""
    if not wrong.any():
        return None
    pairs = score[wrong][:, None] - score[~wrong]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def compared(name: str, share: float, seed: int, count: int, data_dir: str | None) -> dict[str, Any]:
    """Labels found by each rule on one draw."""
    data = images(name, data_dir)
    order = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(seed))[:count]
    x = pixels(data.train_x[order.numpy()], side=SIDE, channels=1).flatten(1)
    labels, wrong = flipped(data.train_y[order], share, data.classes, seed)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, data.classes))
    fit = linnet.fit(linnet.linearize(net), (x, labels), ridge="loo", solver="dual")
    outputs, temperature = fit.loo().double(), fit.point_temperature
    assert temperature is not None
    found = linnet.audit.mislabeled(outputs, labels)
    lists = torch.zeros(2, len(wrong), dtype=torch.bool)
    lists[0, found.suspected()], lists[1, found.doubted()] = True, True
    p = (outputs / temperature).softmax(1)
    rules = (outputs.argmax(1) != labels, confident_learning(p, labels), *lists)
    result: dict[str, Any] = {"wrong": int(wrong.sum()), "expected": found.expected, "rate": found.rate}
    for rule, doubts in zip(RULES, rules, strict=True):
        result[f"{rule}: doubted"] = int(doubts.sum())
        result[f"{rule}: found"] = int((doubts & wrong).sum())
    orders = (1 - p.gather(1, labels[:, None])[:, 0], found.scores)
    return result | {
        f"{order}: area": area(score, wrong) for order, score in zip(ORDERS, orders, strict=True)
    }


def rows(cells: list[Cell]) -> list[list[str]]:
    """A row for each set and share: what each rule doubts, with precision and recall pooled over seeds."""
    made = []
    for name in SETS:
        for share in SHARES:
            where = {"data": name, "share": share}
            wrong = sum(chosen(cells, "wrong", **where))
            row = [f"{name}, {share:.0%}", with_error(chosen(cells, "wrong", **where), 0).split(" ")[0]]
            for rule in RULES:
                doubted = chosen(cells, f"{rule}: doubted", **where)
                found = sum(chosen(cells, f"{rule}: found", **where))
                precision = f"{100 * found / max(sum(doubted), 1):.0f}" if wrong else "–"
                recall = f"{100 * found / wrong:.0f}" if wrong else "–"
                row += [f"{sum(doubted) / len(doubted):.1f}", f"{precision} / {recall}"]
            areas = [chosen(cells, f"{order}: area", **where) for order in ORDERS]
            row += [with_error(one, 2) if wrong else "–" for one in areas]
            made.append([*row, with_error(chosen(cells, "expected", **where))])
    return made


def table(cells: list[Cell]) -> str:
    """Markdown of the rows."""
    header = ["data, share flipped", "flipped"]
    for rule in RULES:
        header += [rule, "precision / recall %"]
    return markdown([*header, *(f"area of {order}" for order in ORDERS), "expected by chance"], rows(cells))


def main() -> None:
    """Run the study."""
    arguments = parser(__doc__ or "").parse_args()
    study = Study("labels/flipped", arguments)
    count = 1000 if arguments.full else 150
    cells = [
        study.cell(
            {"data": name, "share": share, "seed": seed, "count": count},
            lambda name=name, share=share, seed=seed: compared(name, share, seed, count, arguments.data_dir),
        )
        for name in SETS
        for share in SHARES
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
