r"""Figure 6, top and bottom rows: what the most and the least informative images are.

Achille et al. show that the most informative images are of classes that are easily confused, and the least
informative ones distinct, or near-duplicates of others. Here, of the fifths with the most and the least
information as ``informative.py`` ranks them: the test error of their classes, how far the nearest other image
of the same class is in pixels, over the median of all images, and how often that one is nearer than any image
of another class.

    python -m experiments.lqf.informative_images --target mnist --shots 20 --params 'layer3\.2|fc|linear'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import linnet
from experiments.lqf.informative import PAIR, part_of
from experiments.lqf.tasks import Pair, linear_model, load
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error

FIFTH, TESTED = 0.2, 1000
MEASURES = {  # the columns, with their digits and by what they are multiplied
    "test error of their classes, %": (1, 100),
    "distance to the nearest of the class, of the median": (2, 1),
    "nearest is of another class, %": (1, 100),
    "wrong when left out, %": (1, 100),
}


def described(pair: Pair, seed: int, data_dir: str | None, params: str | None) -> dict[str, Any]:
    """Means of what is measured over the most and the least informative fifth."""
    model, (x, y), (xt, yt) = load(pair, seed, data_dir, tested=TESTED)
    lin = part_of(linear_model(model, (x, y), head="random", seed=seed), params)
    fit = linnet.fit(lin, (x, y), ridge="loo")
    order = fit.informativeness().argsort(descending=True)
    count = round(FIFTH * len(y))
    wrong = (fit.predict(xt).argmax(1) != yt).double()
    by_class = torch.stack([wrong[yt == label].mean() for label in range(int(y.max()) + 1)])
    own, other = nearest(x.flatten(1).double(), y)
    values = [by_class[y], own / own.median(), (other < own).double(), (fit.loo().argmax(1) != y).double()]
    return {
        which: {name: float(value[rows].mean()) for name, value in zip(MEASURES, values, strict=True)}
        for which, rows in (("most", order[:count]), ("least", order[-count:]))
    }


def nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Distance of each image to the nearest other one of its class, and of other classes, (N,)."""
    distances = torch.cdist(x, x).fill_diagonal_(torch.inf)
    same = y[:, None] == y
    return tuple(distances.masked_fill(~part, torch.inf).amin(1) for part in (same, ~same))  # type: ignore[return-value]


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a task and fifth, and the paired differences."""
    rows = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        own = [cell for cell in cells if cell["pair"] == pair]
        name = f"{pair.split(' → ')[1]}, {own[0]['shots']} a class"
        fifths: dict[str, Callable[[Cell, str], float]] = {
            "most informative fifth": lambda cell, key: cell["most"][key],
            "least informative fifth": lambda cell, key: cell["least"][key],
            "difference": lambda cell, key: cell["most"][key] - cell["least"][key],
        }
        for which, of in fifths.items():
            found = [with_error((of(c, key) for c in own), *how) for key, how in MEASURES.items()]
            rows.append([f"{name}: {which}", *found])
    return markdown(["images", *MEASURES], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--target", default="mnist", help="data set")
    arguments.add_argument("--shots", type=int, default=20, help="training images a class")
    arguments.add_argument("--params", default=None, help="regular expression of the weights that vary")
    given = arguments.parse_args(argv)
    study = Study("lqf/informative_images", given)
    pair = replace(PAIR, target=given.target, shots=given.shots)
    cells = [
        study.cell(
            {"pair": pair.name, "shots": pair.shots, "seed": seed, "params": given.params},
            lambda seed=seed: described(pair, seed, given.data_dir, given.params),
        )
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
