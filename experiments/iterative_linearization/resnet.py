"""Figures 7 and 8: ResNet-18 on CIFAR-10, without BatchNorm and with frozen statistics.

The paper compares K = 1 with K = 10^6 at rate 7e-7 without BatchNorm, and with K = 10^5 at 1e-5 with
BatchNorm, whose statistics are frozen for the linearization: the runs go along, less stably with BatchNorm.

Default: 8 channels in the first stage, 16 x 16 pixels, 500 images, mini-batches of 64, rate 0.02, 100
steps, K = 1, 10 and 50; the frozen statistics are those of the training images at the first weights.
``--full``: 64 channels, 32 x 32, 10,000 images, the paper's rates and K.

    python -m experiments.iterative_linearization.resnet
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import resnet18
from experiments.iterative_linearization.training import Plan, Split, cifar, train
from experiments.study import Study, parser
from experiments.tables import markdown, with_error

SMALL = {"without BatchNorm": (0.02, 100, (1, 10, 50)), "frozen BatchNorm": (0.02, 100, (1, 10, 50))}
FULL = {"without BatchNorm": (7e-7, 10**8, (1, 10**6)), "frozen BatchNorm": (1e-5, 10**7, (1, 10**5))}


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--width", type=int, default=None, help="channels of the first stage")
    found.add_argument("--images", type=int, default=None)
    found.add_argument("--test", type=int, default=None)
    found.add_argument("--steps", type=int, default=None)
    found.add_argument("--periods", type=int, nargs="+", default=None)
    return found


@torch.no_grad()
def freeze(model: nn.Module, data: Split) -> nn.Module:
    """Set the running statistics to those of the training images, averaged over batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.to(data.x.device).train()
    for x in data.x[:2000].split(250):
        model(x)
    return model.eval()


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("iterative_linearization/resnet", args)
    full = args.full
    width, side = args.width or (64 if full else 8), 32 if full else 16
    count = args.images or (10000 if full else 500)
    data: Split | None = None
    rows, cells, drawn = [], [], {}
    for name, (rate, steps, periods) in (FULL if full else SMALL).items():
        steps, norm = args.steps or steps, name == "frozen BatchNorm"
        for period in args.periods or periods:
            what = {
                "network": name,
                "period": period,
                "rate": rate,
                "steps": steps,
                "width": width,
                "images": count,
            }

            plan = Plan(period, steps, rate, 256 if full else 64)

            def compute(seed: int, norm: bool = norm, plan: Plan = plan) -> dict[str, Any]:
                nonlocal data
                data = data or cifar(count, args.test or (5000 if full else 500), side, args)
                model: nn.Module = resnet18(width, norm, seed)
                return train(freeze(model, data) if norm else model, data, plan)

            runs = [study.cell({**what, "seed": s}, lambda s=s: compute(s)) for s in study.seeds]  # type: ignore[misc]
            cells += runs
            drawn[name, period] = runs[0]
            rows.append(
                [
                    name,
                    f"{period:,}",
                    f"{runs[0]['step'][-1]:,}",
                    f"{runs[0]['updates']:,}",
                    *(with_error((c[key] for c in runs), 1, 100) for key in ("final", "best", "final train")),
                ]
            )
    header = ["network", "K", "steps", "feature updates", "test %", "best test %", "train %"]
    study.publish(markdown(header, rows), cells)
    picture, axes = figure(2, 1)
    for axis, name in zip(axes, SMALL, strict=True):
        for color, ((_, period), cell) in zip(
            COLORS, [item for item in drawn.items() if item[0][0] == name], strict=False
        ):
            axis.plot(cell["step"], [100 * v for v in cell["test"]], color=color, label=f"K = {period:,}")
        axis.set(title=name, xlabel="step", ylabel="test accuracy, %")
    axes[0].legend()
    save(picture, study.out / "resnet.svg")


if __name__ == "__main__":
    main()
