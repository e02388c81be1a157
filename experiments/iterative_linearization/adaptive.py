"""Section 5.2, adaptive K: features updated when they are due, against as many updates at a fixed period.

Goldwaser and Ge leave open whether K should follow how fast the kernel changes. Here a LeNet learns from full
batches of CIFAR-10 with a schedule that linearizes again when the kernel of 32 images has drifted by a given
distance, or when the linear model misses a given share of what the network predicts; then with the fixed
period that makes as many updates in as many steps, from the same weights.

    python -m experiments.iterative_linearization.adaptive --threads 1 --seeds 5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.training import Plan, Split, cifar, train
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet import optim

IMAGES, TESTED, SIDE, CHANNELS, RATE, STEPS = 300, 2000, 16, 10, 0.004, 4000
MEASURED = 32  # images on which a kernel or a gap is measured, every ten steps
DRIFTS, GAPS = (0.002, 0.01), (0.1, 0.3)


def schedule(kind: str, threshold: float, data: Split) -> optim.KernelDrift | optim.OutputGap:
    """When features are due."""
    x = data.x[:MEASURED]
    return optim.KernelDrift(threshold, x) if kind == "drift" else optim.OutputGap(threshold, x)


def compute(kind: str, threshold: float, seed: int, data: Split) -> dict[str, Any]:
    """A run with a schedule, and one with the fixed period of as many updates."""
    runs = {
        "adaptive": train(
            lenet(CHANNELS, SIDE, seed), data, Plan(schedule(kind, threshold, data), STEPS, RATE)
        )
    }
    period = round(STEPS / (runs["adaptive"]["updates"] + 1))
    runs["fixed"] = train(lenet(CHANNELS, SIDE, seed), data, Plan(period, STEPS, RATE))
    first = [step for step in runs["adaptive"]["updated at"] if step <= STEPS // 4]
    found: dict[str, Any] = {"period": period, "updates in the first quarter": len(first)}
    for name, run in runs.items():
        keys = ("updates", "best", "final", "final train", "test", "loss", "diverged")
        found[name] = {key: run[key] for key in keys}
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a schedule, differences paired over seeds."""
    rows = []
    for kind, threshold in dict.fromkeys((cell["schedule"], cell["threshold"]) for cell in cells):
        own = [cell for cell in cells if (cell["schedule"], cell["threshold"]) == (kind, threshold)]
        pairs = list(zip(chosen(own, "adaptive"), chosen(own, "fixed"), strict=True))
        early = [c["updates in the first quarter"] / max(1, c["adaptive"]["updates"]) for c in own]
        differences = [
            with_error((100 * (a["best"] - b["best"]) for a, b in pairs), 1),
            with_error((a["loss"][-1] - b["loss"][-1] for a, b in pairs), 3),
        ]
        one = [a for a, _ in pairs]
        means = [
            with_error((float(a["updates"]) for a in one), 0),
            with_error(early, 0, 100),
            with_error((a["best"] for a in one), 1, 100),
            with_error((a["loss"][-1] for a in one), 3),
        ]
        rows.append([f"{kind} of {threshold:g}", str(len(own)), *means, *differences])
    header = ["linearized again at a", "seeds", "feature updates", "in the first quarter, %", "best test %"]
    return markdown([*header, "loss", "best test less fixed K's", "loss less fixed K's"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = parser(__doc__ or "", seeds=5).parse_args(argv)
    study, splits = Study("iterative_linearization/adaptive", args), list[Split]()

    def run(kind: str, threshold: float, seed: int) -> dict[str, Any]:
        if not splits:
            splits.append(cifar(IMAGES, TESTED, SIDE, args))
        return compute(kind, threshold, seed, splits[0])

    size = {"images": IMAGES, "rate": RATE, "steps": STEPS, "channels": CHANNELS}
    cells = [
        study.cell(
            {"schedule": kind, "threshold": threshold, "seed": seed, **size},
            lambda kind=kind, threshold=threshold, seed=seed: run(kind, threshold, seed),
        )
        for seed in study.seeds
        for kind, values in (("drift", DRIFTS), ("gap", GAPS))
        for threshold in values
    ]
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
