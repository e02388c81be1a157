"""A ReLU autoencoder at full width, against the published curves of KFAC and K-BFGS on it.

784-1000-500-250-30 and back, ReLU, MNIST, binary cross-entropy summed over pixels plus 1e-5 / 2 of the
squared weights, batches of 1,000, 60 updates an epoch. The KFAC of the K-BFGS paper's code (Goldfarb, Ren,
Bahamou, 2020; tuned rate, damping and decay) has training losses 183.2 after 60 updates, 74.0 after 300,
61.65 after 600, 56.72 after 1,200 and 53.75 after 3,000; K-BFGS 59.81 after 600, 53.82 after 3,000.
``GaussNewton`` runs with its defaults, with ``--momentum`` along two directions.

Default: 60 updates of KFRA. ``--full``: 3,000 updates of KFRA and KFAC.

    python -m experiments.optimizer.relu
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.figures import COLORS, figure, save
from experiments.optimizer.problems import WIDTHS, autoencoder
from experiments.sources import images, pixels
from experiments.study import Study, parser
from experiments.tables import markdown, with_error
from linnet import optim
from linnet.likelihoods import Bernoulli

KFAC = {60: 183.2, 300: 74.0, 600: 61.65, 1200: 56.72, 1800: 55.14, 3000: 53.75}
KBFGS = {600: 59.81, 1200: 56.30, 3000: 53.82}
DECAY = 1e-5


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--methods", nargs="+", choices=("KFRA", "KFAC"), default=None)
    found.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    found.add_argument("--images", type=int, default=60000)
    found.add_argument("--batch", type=int, default=1000)
    found.add_argument("--updates", type=int, default=None)
    found.add_argument("--momentum", action="store_true", help="each method with momentum, too")
    return found


@torch.no_grad()
def objective(model: torch.nn.Module, x: Tensor) -> float:
    """Mean loss over images, and the weights' share."""
    total = sum(float(Bernoulli().nll(model(part), part).double().sum()) for part in x.split(2000))
    return total / len(x) + 0.5 * DECAY * sum(float(p.double().square().sum()) for p in model.parameters())


def measure(
    args: argparse.Namespace, way: tuple[str, bool], seed: int, updates: int, data: tuple[Tensor, Tensor]
) -> Any:
    """One run; the training objective at the updates of the published curves and at the end."""
    (method, momentum), (x, test) = way, data
    model = autoencoder(784, args.widths, "relu", seed).to(x.device)
    optimizer = optim.GaussNewton(model, Bernoulli(), method.lower(), weight_decay=DECAY, momentum=momentum)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"update": [], "train": [], "test": [], "clock": []}
    clock = time.perf_counter if x.device.type == "cuda" else time.process_time
    spent, step = 0.0, 0
    while step < updates:
        for chosen in torch.randperm(len(x), generator=generator).split(args.batch):
            begin = clock()
            batch = x[chosen.to(x.device)]
            optimizer.step(batch, batch)
            spent, step = spent + clock() - begin, step + 1
            if step in {*KFAC, *KBFGS, 20, updates}:
                for key, value in zip(
                    found, (step, objective(model, x), objective(model, test), spent), strict=True
                ):
                    found[key].append(value)
            if step == updates:
                break
    return found


def name_of(cell: Any) -> str:
    """The method, with what is not its default."""
    return str(cell["method"]) + (", momentum" if cell.get("momentum") else ", defaults")


def table_rows(cells: Sequence[Any]) -> list[list[str]]:
    """Losses of every run beside the published ones."""
    rows = []
    for cell in cells:
        for step, train, test, seconds in zip(
            cell["update"], cell["train"], cell["test"], cell["clock"], strict=True
        ):
            published = [f"{curve[step]:.2f}" if step in curve else "" for curve in (KFAC, KBFGS)]
            rows.append(
                [
                    name_of(cell),
                    f"{step:,}",
                    f"{train:.2f}",
                    f"{test:.2f}",
                    f"{seconds:.0f}",
                    *published,
                ]
            )
    return rows


def by_seed(cells: Sequence[Any]) -> str:
    """Markdown: training losses of each method at its updates, and momentum's less those without, by seed."""
    updates = cells[0]["update"]
    runs = {
        name: {cell["seed"]: cell["train"] for cell in cells if name_of(cell) == name}
        for name in dict.fromkeys(map(name_of, cells))
    }
    rows = [
        [name, str(len(own)), *(with_error((run[i] for run in own.values()), 2) for i in range(len(updates)))]
        for name, own in runs.items()
    ]
    (_, plain), (_, other) = runs.items()
    shared = [seed for seed in plain if seed in other]
    less = (with_error((other[s][i] - plain[s][i] for s in shared), 2) for i in range(len(updates)))
    rows.append(["momentum less defaults", str(len(shared)), *less])
    return markdown(["training loss", "seeds", *(f"after {step:,} updates" for step in updates)], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/relu", args)
    updates = args.updates or (3000 if args.full else 60)
    ways: list[dict[str, bool]] = [{}, {"momentum": True}] if args.momentum else [{}]
    small = args.widths != list(WIDTHS)
    methods = args.methods or (("KFRA", "KFAC") if args.full or small else ("KFRA",))
    data: tuple[Tensor, Tensor] | None = None

    def compute(method: str, seed: int, momentum: bool = False) -> Any:
        nonlocal data
        if data is None:
            read = images("mnist", args.data_dir)
            x = pixels(read.train_x[: args.images]).flatten(1)
            data = x.to(args.device), pixels(read.test_x).flatten(1).to(args.device)
        return measure(args, (method, momentum), seed, updates, data)

    cells = [
        study.cell(
            {"method": m, "seed": s, "updates": updates, "widths": args.widths, "images": args.images, **way},
            lambda m=m, s=s, way=way: compute(m, s, **way),  # type: ignore[misc]
        )
        for m in methods
        for way in ways
        for s in study.seeds
    ]
    rows = table_rows(cells)
    header = [
        "method",
        "updates",
        "train",
        "test",
        "seconds",
        "published KFAC, train",
        "published K-BFGS, train",
    ]
    study.publish(markdown(header, rows), cells, published={"KFAC": KFAC, "K-BFGS": KBFGS})
    picture, axis = figure()
    for color, cell in zip(COLORS, cells, strict=False):
        axis.plot(cell["update"], cell["train"], "o-", color=color, label=name_of(cell))
    axis.plot(list(KFAC), list(KFAC.values()), "k--", label="published KFAC, tuned")
    axis.set(xscale="log", yscale="log", xlabel="updates", ylabel="training loss")
    axis.legend()
    save(picture, study.out / "relu.svg")


if __name__ == "__main__":
    main()
