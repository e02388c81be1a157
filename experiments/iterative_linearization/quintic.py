"""Figure 6: larger damping of Gauss-Newton gives a smoother fit and a lower test error.

The quintic x^5/32 - x^3/2 + 2x - 1 from 20 equally spaced points, tested on 1,000; an MLP of 5 layers of 50
with ReLUs; each step solves a linearization exactly with damping lambda (eq. 6). The paper shows the test
RMSE falling in the mean, and its spread over seeds, as lambda grows; runs with a training RMSE over 2.5 are
left out. Points are on [-3.6, 3.6], where the quintic is within [-4, 4], as the paper says of its range.

Default: 3 seeds, 5 values of lambda, 200 steps. ``--full``: 30 seeds, 9 values, 1,000 steps.

    python -m experiments.iterative_linearization.quintic
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import mlp
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet import optim
from linnet.errors import LinnetError

RANGE, OVER = 3.6, 2.5


def quintic(x: Tensor) -> Tensor:
    """The target."""
    return x**5 / 32 - x**3 / 2 + 2 * x - 1


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=3)
    found.add_argument("--damping", type=float, nargs="+", default=None, help="values of lambda")
    found.add_argument("--steps", type=int, default=None)
    found.add_argument("--width", type=int, default=50)
    return found


def measure(damping: float, seed: int, steps: int, width: int) -> dict[str, Any]:
    """Train one network; its errors, and how rough it is."""
    x = torch.linspace(-RANGE, RANGE, 20, dtype=torch.float64)[:, None]
    grid = torch.linspace(-RANGE, RANGE, 1000, dtype=torch.float64)[:, None]
    model = mlp(width, seed=seed)
    newton = optim.IterativeLinearization(model, None, period=1)
    taken = 0
    try:
        while taken < steps:
            newton.solve((x, quintic(x)), ridge=damping)
            taken += 1
    except LinnetError as error:
        return {"train": None, "test": None, "rough": None, "steps taken": taken, "error": str(error)[:200]}
    with torch.no_grad():
        f = model(grid)
        errors = [float((model(p) - quintic(p)).square().mean().sqrt()) for p in (x, grid)]
    spacing = 2 * RANGE / 999
    second = (f[40:] - 2 * f[20:-20] + f[:-40]) / (20 * spacing) ** 2  # over steps as wide as 20 test points
    rough = float(second.square().mean().sqrt())
    return {
        "train": errors[0],
        "test": errors[1],
        "rough": rough,
        "steps taken": taken,
        "curve": f[::10, 0].tolist(),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    if args.full and args.seeds == 3:
        args.seeds = 30
    study = Study("iterative_linearization/quintic", args)
    steps = args.steps or (1000 if args.full else 200)
    values = args.damping or (
        [1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0] if args.full else [1e-2, 0.1, 1.0, 10.0, 100.0]
    )
    cells = []
    for damping in values:
        what = {"damping": damping, "steps": steps, "width": args.width}
        cells += [
            study.cell({**what, "seed": s}, lambda s=s, d=damping: measure(d, s, steps, args.width))  # type: ignore[misc]
            for s in study.seeds
        ]
    grid = torch.linspace(-RANGE, RANGE, 1000, dtype=torch.float64)
    second = (quintic(grid[40:]) - 2 * quintic(grid[20:-20]) + quintic(grid[:-40])) / (40 * RANGE / 999) ** 2
    study.publish(table(cells), cells, target=float(second.square().mean().sqrt()))
    draw(cells, study.out / "quintic.svg")


def fitted(cell: Cell) -> bool:
    """Whether the paper would keep a run."""
    return cell["train"] is not None and cell["train"] <= OVER


def table(cells: Sequence[Cell]) -> str:
    """Markdown: errors and roughness of every damping."""
    rows = []
    for damping in sorted({cell["damping"] for cell in cells}):
        runs = [cell for cell in cells if cell["damping"] == damping]
        good = [cell for cell in runs if fitted(cell)]
        rows.append([
            f"{damping:g}",
            f"{len(runs) - len(good)} of {len(runs)}",
            *(with_error((c[key] for c in good), 2) for key in ("train", "test")),
            f"{median(c['test'] for c in good):.2f}" if good else "–",
            f"{max(c['test'] for c in good):.2f}" if good else "–",
            with_error((c["rough"] for c in good), 1),
        ])  # fmt: skip
    header = ["λ", "left out", "train RMSE", "test RMSE", "median", "largest", "RMS second derivative"]
    return markdown(header, rows)


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Test errors above, functions below."""
    picture, axes = figure(2, 1)
    kept = [c for c in cells if fitted(c)]
    axes[0].plot([c["damping"] for c in kept], [c["test"] for c in kept], "o", ms=3, color=COLORS[0])
    axes[0].set(xscale="log", yscale="log", xlabel="damping λ", ylabel="test RMSE")
    grid = torch.linspace(-RANGE, RANGE, 1000)[::10]
    axes[1].plot(grid, quintic(grid), color="black", lw=2, label="quintic")
    for color, damping in zip(COLORS, sorted({c["damping"] for c in cells}), strict=False):
        found = [c for c in kept if c["damping"] == damping][:1]
        for cell in found:
            axes[1].plot(grid, cell["curve"], color=color, lw=1, label=f"λ = {damping:g}")
    axes[1].set(ylim=(-8, 6), xlabel="x")
    axes[1].legend(fontsize=6)
    save(picture, file)


if __name__ == "__main__":
    main()
