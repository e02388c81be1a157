"""Divergence of iterative linearization with small mini-batches, where plain training is stable.

Gradient descent with rate η on a linear model is unstable along eigenvectors of its Gauss-Newton matrix G
whose eigenvalues exceed 2/η. A network can hold itself there: where η λ_max(G) > 2, its steps move the
features to flatter places (Cohen et al. 2021, the edge of stability). A linear model has no features to move,
so K steps at η λ_max > 2 grow. Measured here, along the mini-batch runs of ``period``: η λ_max(G) on training
images every few steps, and whether a smaller rate for as long a training time, another order of the batches,
or new features whenever the linearity gap asks for them change the outcome.

    python -m experiments.iterative_linearization.stability
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.figures import COLORS, figure, save
from experiments.iterative_linearization.networks import lenet
from experiments.iterative_linearization.training import Split, accuracy, cifar
from experiments.study import Study, parser
from experiments.tables import markdown
from linnet import curvature, optim
from linnet.errors import NumericalError
from linnet.likelihoods import Categorical

# name: (what sets K, K or the gap, rate, batch, seed of the order of the batches)
RUNS: dict[str, tuple[str, float, float, int, int]] = {
    "K = 1": ("every", 1, 0.02, 64, 0),
    "K = 10": ("every", 10, 0.02, 64, 0),
    "K = 10, another order of the batches": ("every", 10, 0.02, 64, 1),
    "K = 10, half the rate": ("every", 10, 0.01, 64, 0),
    "K = 20, half the rate": ("every", 20, 0.01, 64, 0),
    "K = 100": ("every", 100, 0.02, 64, 0),
    "new features at a gap of 0.1": ("gap", 0.1, 0.02, 64, 0),
}
TIME = 14.0  # rate x steps
EVERY = 0.4  # rate x steps between two measurements


def arguments() -> argparse.ArgumentParser:
    """What the script takes."""
    found = parser(__doc__ or "", seeds=1)
    found.add_argument("--runs", nargs="+", choices=[*RUNS], default=[*RUNS])
    found.add_argument("--images", type=int, default=1000)
    found.add_argument("--test", type=int, default=500)
    found.add_argument("--channels", type=int, default=10)
    found.add_argument("--time", type=float, default=TIME, help="rate x steps (default %(default)s)")
    found.add_argument("--looked-at", type=int, default=256, help="images that λ_max is measured on")
    return found


def sharpness(model: nn.Module, x: Tensor, start: Tensor | None, steps: int) -> tuple[float, Tensor]:
    """λ_max of the Gauss-Newton matrix of the mean cross-entropy, by power iteration.

    Args:
        model: The network.
        x: Images.
        start: A direction to begin with.
        steps: Products.

    Returns:
        The eigenvalue and its vector.
    """
    labels = torch.zeros(len(x), dtype=torch.long, device=x.device)  # the matrix does not depend on them
    G = curvature(model, (x, labels), Categorical(), structure="matrix-free")
    v = torch.randn(G.shape[0], generator=torch.Generator().manual_seed(0)).to(x) if start is None else start
    value = 0.0
    for _ in range(steps):
        v = v / v.norm()
        product = G.mv(v) / len(x)
        value, v = float(v @ product), product
    return value, v


def run(name: str, seed: int, data: Split, args: argparse.Namespace) -> dict[str, Any]:
    """One run with what was measured on the way."""
    kind, period, rate, batch, order = RUNS[name]
    batch = min(batch, len(data.y))
    model = lenet(args.channels, 16, seed).eval()
    schedule: Any = int(period) if kind == "every" else optim.OutputGap(period, every=2)
    training = optim.IterativeLinearization(
        model, lambda parameters: torch.optim.SGD(parameters, lr=rate), schedule
    )
    generator, queue = torch.Generator().manual_seed(order), list[Tensor]()
    steps, every = round(args.time / rate), max(1, round(EVERY / rate))
    found: dict[str, Any] = {"step": [], "sharpness": [], "loss": [], "test": []}
    vector, recent, ended = None, math.nan, False
    for step in range(1, steps + 1):
        if not queue:
            drawn = torch.randperm(len(data.y), generator=generator)
            queue.extend(drawn[: len(drawn) // batch * batch].split(batch))
        chosen = queue.pop()
        x, y = data.x[chosen], data.y[chosen]
        try:
            loss = float(training.step(lambda module, x=x, y=y: F.cross_entropy(module(x), y)))  # type: ignore[misc]
        except NumericalError:
            loss = math.inf
        recent = loss if step == 1 else recent + (loss - recent) / min(step, 20)
        ended = not loss < 100 or not all(bool(p.isfinite().all()) for p in model.parameters())
        if step == 1 or step % every == 0 or ended:
            if not ended:
                value, vector = sharpness(model, data.x[: args.looked_at], vector, 20 if step == 1 else 6)
            known = None if ended else rate * value
            now = accuracy(model, data.test_x, data.test_y)
            for key, one in zip(
                found, (step, known, recent if recent < math.inf else None, now), strict=True
            ):
                found[key].append(one)
        if ended:
            break
    return {**found, "diverged": ended, "updates": training.report.relinearizations}


def main(given: Sequence[str] | None = None) -> None:
    """Run the study."""
    args = arguments().parse_args(given)
    study = Study("iterative_linearization/stability", args)
    data = cifar(args.images, args.test, 16, args)
    rows, cells = [], []
    picture, axis = figure()
    for color, name in zip(COLORS * 2, args.runs, strict=False):
        for seed in study.seeds:
            what = {"run": name, "how": list(RUNS[name]), "seed": seed, "images": args.images,
                    "channels": args.channels, "time": args.time, "looked at": args.looked_at}  # fmt: skip
            cell = study.cell(what, lambda n=name, s=seed: run(n, s, data, args))  # type: ignore[misc]
            cells.append(cell)
            known = [(s, v) for s, v in zip(cell["step"], cell["sharpness"], strict=True) if v is not None]
            rate = cell["how"][2]
            label = name if seed == 0 else None
            axis.plot([rate * s for s, _ in known], [v for _, v in known], color=color, label=label)
            end = f"diverged after {cell['step'][-1]:,}" if cell["diverged"] else f"{cell['loss'][-1]:.3f}"
            tail = [v for _, v in known][-5:]
            rows.append([name, f"{rate:g}", seed, f"{cell['updates']:,}", f"{max(v for _, v in known):.2f}",
                         f"{sum(tail) / len(tail):.2f}", end, f"{100 * max(cell['test']):.1f}"])  # fmt: skip
    axis.axhline(2, color="black", linestyle=":", label="2")
    axis.set(yscale="log", xlabel="rate × steps", ylabel="rate × λ_max(G)")
    axis.legend(fontsize=6)
    save(picture, study.out / "stability.svg")
    header = [
        "run", "rate", "seed", "feature updates", "largest η λ_max", "η λ_max, last five", "loss at the end",
        "best test %",
    ]  # fmt: skip
    study.publish(markdown(header, rows), cells)


if __name__ == "__main__":
    main()
