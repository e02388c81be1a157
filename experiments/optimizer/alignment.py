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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.figures import COLORS, figure, save
from experiments.optimizer.alignment_study import alignment
from experiments.optimizer.problems import DATA, WIDTHS, autoencoder, problem
from experiments.study import Cell, Study, parser
from experiments.tables import markdown
from linnet import optim

STRUCTURES = ("kfac", "kfra")
SIXTEENTH = (62, 31, 16, 8)
SHOWN = {"kfac": "KFAC", "kfac*": "KFAC*", "kfra": "KFRA", "kfra*": "KFRA*", "block-diagonal": "exact blocks"}


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
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
                options={"steps": args.steps or (250 if full else 100)},
                tolerance=1e-3,
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
    rows = []
    for cell in cells:
        for key, shown in SHOWN.items():
            whole = sum(found[key] for found in cell["whole"]) / len(cell["whole"])
            layers: list[str] = []
            if key in cell["layers"][0]:
                columns = zip(*(found[key] for found in cell["layers"]), strict=True)
                layers = [f"{sum(column) / len(column):.2f}" for column in columns]
            rows.append([cell["data"], shown, f"{whole:.2f}", *layers])
    count = len(cells[0]["layers"][0]["kfac"])
    rows = [row + [""] * (count + 3 - len(row)) for row in rows]
    header = ["data", "update", "whole", *(f"layer {i + 1}" for i in range(count))]
    study.publish(markdown(header, rows), cells, structures=list(STRUCTURES))
    _draw([cell for cell in cells if cell["seed"] == 0], study.out)


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
