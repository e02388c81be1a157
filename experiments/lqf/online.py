"""Figure 5: incremental training against training from scratch whenever data arrive.

The paper (MIT-67) retrains on all data seen so far, from the weights of the step before: LQF stays near the
paragon (plain fine-tuning from scratch on everything) while plain fine-tuning that is continued does not.
Here the linear model is extended by ``fit.update``, which is exact and never trains again; its head, its
features and its ridge stay those of the first batch; a second curve chooses the ridge anew on all examples
at each update. The updated model is compared with that paragon and with linear models that are fitted on
everything at once: from the same θ₀ with a ridge chosen anew, and from a new head. The head is a probe of
the first batch, or with ``--head random`` has seen no label, so that leave-one-out is honest about the
ridge. ``--linear`` leaves plain fine-tuning out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import linnet
from experiments.figures import COLORS, figure, save
from experiments.lqf.tasks import Data, Pair, accuracy, finetune, linear_model, load, options
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, mean_and_error, with_error

PAIR = Pair("resnet20", "flowers_64", 32, 20)
FULL_PAIR = Pair("resnet56", "flowers_64", 64, 100)
BATCHES = 4
STEPS, RATE = 60, 0.01  # of plain fine-tuning
CURVES = (
    "linear, updated",
    "linear, updated, ridge chosen anew",
    "linear, from scratch, same θ₀",
    "linear, from scratch, new head",
    "plain, continued",
    "plain, from scratch",
)
LINEAR = CURVES[:4]
COMPARED = ((0, 2), (0, 3), (1, 2), (1, 3), (0, 5), (2, 5), (4, 5))


def parts(data: Data, batches: int) -> list[Data]:
    """The stream: parts of equal size in the data's random order, the first with every class."""
    x, y = data
    # every class comes once, then every class again, then the rest
    first = torch.stack([(y == label).nonzero()[:2, 0] for label in y.unique()], 1).reshape(-1)
    rest = torch.tensor([i for i in range(len(y)) if i not in set(first.tolist())])
    order = torch.cat([first, rest])
    return [(x[rows], y[rows]) for rows in order.chunk(batches)]


def stream(
    pair: Pair, seed: int, data_dir: str | None, batches: int, steps: int | None, head: str = "probe"
) -> dict[str, Any]:
    """Test accuracy after each batch of data.

    Args:
        pair: The pair.
        seed: Seed of the draw, and of a random head.
        data_dir: Folder of the data.
        batches: Into how many parts the training data come.
        steps: Steps of each run of plain fine-tuning; ``None`` to leave it out.
        head: ``"probe"`` or ``"random"``.

    Returns:
        For each curve a list, and how far an update is from the same linear model fitted at once.
    """
    model, train, (xt, yt) = load(pair, seed, data_dir)
    pieces = parts(train, batches)
    found: dict[str, Any] = {name: [] for name in (LINEAR if steps is None else CURVES)}
    network, fit, anew = model, None, None
    for count in range(1, batches + 1):
        seen = torch.cat([x for x, _ in pieces[:count]]), torch.cat([y for _, y in pieces[:count]])
        # a new random head is another draw
        begun = linear_model(model, seen, head=head, seed=seed + 1000 * (count - 1))
        whole = linnet.fit(begun, seen, ridge="loo")
        fit = whole if fit is None else fit.update(pieces[count - 1])
        anew = whole if anew is None else anew.update(pieces[count - 1], ridge="loo")
        start = linnet.Linearized(fit.module.function)
        alike = whole if count == 1 else linnet.fit(start, seen, ridge="loo")
        made: list[Any] = [fit, anew, alike, whole]
        if steps is not None:
            plain = {**options("nlft", steps), "learning_rate": RATE, "seed": seed}
            again = finetune(model, seen, "nlft", **plain)
            keep = "probe" if count == 1 else "keep"
            onward = finetune(network, seen, "nlft", head=keep, **plain)
            network = onward.module
            made += [onward, again]
        for name, one in zip(found, made, strict=True):
            found[name].append(accuracy(one.predict(xt), yt))
    assert fit is not None
    assert anew is not None
    at_once = linnet.fit(start, seen, ridge=fit.ridge).predict(xt)
    gap = (fit.predict(xt) - at_once).norm() / at_once.norm()
    ridges = {"updated": fit.ridge, "anew": anew.ridge, "same θ₀": alike.ridge, "new head": whole.ridge}
    return {**found, "sizes": [len(piece[1]) for piece in pieces], "update against at once": float(gap),
            "ridges": ridges}  # fmt: skip


def draw(cells: Sequence[Cell], file: Path) -> None:
    """The curves of the first kind of head with their standard errors."""
    drawn, axes = figure()
    sizes = torch.tensor(cells[0]["sizes"]).cumsum(0).tolist()
    own = [cell for cell in cells if cell.get("head", "probe") == cells[0].get("head", "probe")]
    for color, name in zip(COLORS, (name for name in CURVES if name in own[0]), strict=False):
        points = [
            mean_and_error(100 * v for v in column) for column in zip(*(c[name] for c in own), strict=True)
        ]
        style = "-" if "scratch" in name else "--"
        axes.errorbar(sizes, [m for m, _ in points], [e for _, e in points], color=color, linestyle=style,
                      label=name, capsize=2)  # fmt: skip
    axes.set_xlabel("training samples seen")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    save(drawn, file)


def main(argv: Sequence[str] | None = None, pair: Pair | None = None, steps: int = STEPS) -> None:
    """Run the study."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--head", choices=["probe", "random"], default="probe")
    arguments.add_argument("--linear", action="store_true", help="leave plain fine-tuning out")
    given = arguments.parse_args(argv)
    study = Study("lqf/online", given)
    pair = pair or (FULL_PAIR if given.full else PAIR)
    plain = None if given.linear else steps
    shared = {"pair": pair.name, "shots": pair.shots, "batches": BATCHES, "steps": plain, "head": given.head}
    cells = [
        study.cell(
            {**shared, "seed": seed},
            lambda seed=seed: stream(pair, seed, given.data_dir, BATCHES, plain, given.head),
        )
        for seed in study.seeds
    ]
    study.publish(table(cells), cells)
    draw(cells, study.out / "online.svg")


def table(cells: Sequence[Cell]) -> str:
    """Markdown: accuracies and paired differences after each batch, for each kind of head."""
    rows = []
    for head in dict.fromkeys(cell.get("head", "probe") for cell in cells):
        own = [cell for cell in cells if cell.get("head", "probe") == head]
        curves = [name for name in CURVES if name in own[0]]
        for name in curves:
            columns = zip(*(c[name] for c in own), strict=True)
            rows.append([head, name, *(with_error(column, scale=100) for column in columns)])
        compared = [(CURVES[i], CURVES[j]) for i, j in COMPARED]
        for a, b in (names for names in compared if {*names} <= {*curves}):
            pairs = [[100 * (u - v) for u, v in zip(c[a], c[b], strict=True)] for c in own]
            columns = zip(*pairs, strict=True)
            rows.append([head, f"{a} − {b}, points", *(with_error(column) for column in columns)])
    sizes = torch.tensor(cells[0]["sizes"]).cumsum(0).tolist()
    return markdown(["head", "test accuracy, %", *(f"{n} seen" for n in sizes)], rows)


if __name__ == "__main__":
    main()
