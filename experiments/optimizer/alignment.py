"""Botev 2020, figures 4.2 and 4.3: how well approximate updates agree with the exact one.

Along a run of KFRA on each autoencoder, the cosine of KFAC's and KFRA's updates with that of the exact block
of every layer (figure 4.2), and of the whole updates, with the exact block diagonal's among them, with that
of the full Gauss-Newton matrix by conjugate gradients (figure 4.3). A star marks exact inversion of the
Kronecker product plus a multiple of the identity. The thesis shows curves: KFRA above KFAC in general, early
layers lower than late ones, the layers at the bottleneck always high; on MNIST the exact block diagonal
unexpectedly low; factored inversion better on MNIST and FACES, worse on CURVES for KFRA's layers.

Default: a sixteenth of the widths, 1,000 images, batch 500, 40 updates. ``--full``: the thesis' sizes and
batch 1,000, 2,000 updates.

    python -m experiments.optimizer.alignment
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.figures import COLORS, figure, save
from experiments.optimizer.alignment_study import alignment
from experiments.optimizer.problems import DATA, WIDTHS, autoencoder, problem
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet import optim

STRUCTURES = ("kfac", "kfra")
SIXTEENTH = (62, 31, 16, 8)
EVERY = slice(None)  # layer
STEPS, TOLERANCE = 3000, 1e-2  # of conjugate gradients: cosines are then right to about 0.01
SHOWN = {"kfac": "KFAC", "kfac*": "KFAC*", "kfra": "KFRA", "kfra*": "KFRA*", "block-diagonal": "exact blocks"}


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=3)
    found.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    found.add_argument("--widths", type=int, nargs="+", default=None, help="of the first half")
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--batch", type=int, default=None)
    found.add_argument(
        "--at", type=int, nargs="+", default=None, help="updates at which the cosines are taken"
    )
    found.add_argument("--steps", type=int, default=None, help="most steps of conjugate gradients")
    return found


def measure(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """One run, and the cosines on the way."""
    full = args.full
    widths = tuple(args.widths or (WIDTHS if full else SIXTEENTH))
    images = args.images or (20000 if full else 1000)
    batch = args.batch or (1000 if full else 500)
    at = sorted(args.at or ([0, 10, 50, 100, 200, 500, 1000, 2000] if full else [0, 10, 40]))
    data = problem(name, images, args.data_dir)
    x = data.x.to(args.device)
    model = autoencoder(x.shape[1], widths, seed=seed).to(x.device)
    optimizer = optim.GaussNewton(model, data.likelihood, "kfra")
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"at": at, "layers": [], "whole": [], "residuals": []}
    for step in range(at[-1] + 1):
        chosen = torch.randperm(len(x), generator=generator)[:batch].to(x.device)
        report = optimizer.step(x[chosen], x[chosen])
        if step in at:  # the dampings are those that training has come to
            cosines = alignment(
                model,
                (x[chosen], x[chosen]),
                data.likelihood,
                STRUCTURES,
                damping=report.tau,
                options={"steps": args.steps or STEPS},
                tolerance=TOLERANCE,
            )
            found["layers"].append({k: v.tolist() for k, v in cosines.by_layer.items()})
            found["whole"].append(cosines.whole)
            found["residuals"].append(cosines.residuals)
            found.setdefault("tau", []).append(report.tau)
            found.setdefault("loss", []).append(report.loss)
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("optimizer/alignment", args)
    sizes = {
        "widths": args.widths,
        "images": args.images,
        "batch": args.batch,
        "at": args.at,
        "steps": args.steps,
    }
    cells = [
        study.cell(
            {"data": name, "seed": seed, **sizes}, lambda name=name, seed=seed: measure(args, name, seed)
        )  # type: ignore[misc]
        for name in args.data
        for seed in study.seeds
    ]
    study.publish(table(cells), cells, structures=list(STRUCTURES))
    _draw([cell for cell in cells if cell["seed"] == 0], study.out)


def mean_cosine(cell: Cell, update: str, layer: int | slice | None = None) -> float:
    """Of a run: over the places where it was measured, of the whole update, of a layer's or of several."""
    if layer is None:
        return statistics.fmean(found[update] for found in cell["whole"])
    if isinstance(layer, slice):
        return statistics.fmean(statistics.fmean(found[update][layer]) for found in cell["layers"])
    return statistics.fmean(found[update][layer] for found in cell["layers"])


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a data set and update, means over places and seeds; and KFRA's less KFAC's."""
    rows = []
    count = len(cells[0]["layers"][0]["kfac"])
    for name in dict.fromkeys(cell["data"] for cell in cells):
        own = [cell for cell in cells if cell["data"] == name]
        for key, shown in SHOWN.items():
            places = [None, EVERY, *range(count)] if key in own[0]["layers"][0] else [None]
            values = [with_error((mean_cosine(cell, key, at) for cell in own), 2) for at in places]
            rows.append([name, shown, *values, *[""] * (count + 2 - len(values))])
        for mark in ("", "*"):
            pair = f"kfra{mark}", f"kfac{mark}"
            less = [
                with_error((mean_cosine(c, pair[0], at) - mean_cosine(c, pair[1], at) for c in own), 2)
                for at in (None, EVERY, *range(count))
            ]
            rows.append([name, f"KFRA{mark} less KFAC{mark}", *less])
    header = ["data", "update", "whole", "layers, mean", *(f"layer {i + 1}" for i in range(count))]
    return markdown(header, rows)


def _draw(cells: Sequence[Cell], folder: Path) -> None:
    """Figure 4.3, and figure 4.2 of every data set."""
    picture, axes = figure(len(cells), 1, width=3.0, height=2.5)
    for axis, cell in zip([axes] if len(cells) == 1 else axes, cells, strict=True):
        for color, (key, shown) in zip(COLORS, SHOWN.items(), strict=False):
            axis.plot(cell["at"], [found[key] for found in cell["whole"]], color=color, label=shown, lw=1.2)
        axis.set(title=cell["data"].upper(), xlabel="update", ylabel="cosine, whole")
    (axes if len(cells) == 1 else axes[0]).legend(fontsize=6)
    save(picture, folder / "whole.svg")
    for cell in cells:
        count = len(cell["layers"][0]["kfac"])
        columns = min(4, count)
        picture, axes = figure(columns, -(-count // columns), width=2.2, height=1.8)
        for layer, axis in enumerate(axes.ravel()[:count]):
            for color, key in zip(COLORS, list(SHOWN)[:4], strict=False):
                axis.plot(
                    cell["at"],
                    [found[key][layer] for found in cell["layers"]],
                    color=color,
                    lw=1.2,
                    label=SHOWN[key],
                )
            axis.set(title=f"layer {layer + 1}", ylim=(0, 1.02))
        axes.ravel()[0].legend(fontsize=6)
        save(picture, folder / f"layers_{cell['data']}.svg")


if __name__ == "__main__":
    main()
