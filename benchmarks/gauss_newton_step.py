"""A step of the Gauss-Newton optimizer, and of iterative linearization, against plain steps and peers.

    python benchmarks/gauss_newton_step.py --json gauss_newton_step.json

Claims: a step of KFRA on the MNIST autoencoder (784-1000-500-250-30-250-500-1000-784, batch 1,000) takes at
most 4 times a step of Adam, inverses every 5 steps and both searches for dampings included; a step of KFAC
is no slower than the nearest of singd and asdfghjkl; a step of ``IterativeLinearization`` takes at most twice
a plain step (ResNet-20, batch 128), as any linearized step. Each call is 20 steps, so that everything that
happens now and then is in it; seconds are those of one step.

The peers are measured where they can be imported; put them aside, not into this environment:

    pip install --no-deps --target peers singd==0.0.5 asdfghjkl==0.1a5 einops unfoldNd einconv opt_einsum
    PYTHONPATH=peers python benchmarks/gauss_newton_step.py

singd takes the gradients of the loss for its factors (empirical Fisher), here every step like all others, and
has no inverse to compute; asdfghjkl samples one label (Gaussian outputs, so that loss and likelihood are
squared error for it and for the KFAC beside it) and inverts every 5 steps. Neither chooses a step size or a
damping; linnet's J d and its searches are in the time. "KFAC before SGD" is linnet without them, the work
that asdfghjkl does: a ``RunningCurvature`` and a ``KroneckerPreconditioner`` before SGD. "Separate passes" is
linnet without the forward pass that loss, gradient, curvature and J d of a chain share.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from measure import Row, parser, publish, setup
from networks import resnet20
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.curvatures.running import RunningRecursion
from linnet.likelihoods import Bernoulli, Gaussian

WIDTHS = (1000, 500, 250, 30)
BURST = 20  # steps of a call
Step = Callable[[], object]


def autoencoder(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with tanh between."""
    torch.manual_seed(0)
    sizes = [784, *widths, *reversed(widths[:-1]), 784]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def strokes(count: int) -> Tensor:
    """Images in [0, 1] with about as much ink as digits have."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(count, 1, 28, 28, generator=generator)
    return (F.avg_pool2d(noise, 5, 1, 2) > 0.56).float().flatten(1) * torch.rand(
        count, 784, generator=generator
    )


def cross_entropy(f: Tensor, x: Tensor) -> Tensor:
    """Summed over pixels, mean over images."""
    return F.binary_cross_entropy_with_logits(f, x, reduction="sum") / len(x)


def squared(f: Tensor, x: Tensor, reduction: str = "mean") -> Tensor:
    """Half the squared error, mean over images or summed."""
    each = 0.5 * (f - x).square().flatten(1).sum(1)
    return each.sum() if reduction == "sum" else each.mean() if reduction == "mean" else each


def plain(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A step of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()

    return step


def autoencoder_steps(x: Tensor, widths: tuple[int, ...]) -> dict[str, Step]:
    """Adam, KFRA, KFAC, and the peers that are there."""
    calls: dict[str, Step] = {"Adam": plain(autoencoder(widths), x, cross_entropy)}
    for name, likelihood in (
        ("KFRA", Bernoulli()),
        ("KFAC", Bernoulli()),
        ("KFAC, squared error", Gaussian()),
    ):
        optimizer = linnet.optim.GaussNewton(autoencoder(widths), likelihood, name[:4].lower())
        calls[name] = lambda optimizer=optimizer: optimizer.step(x, x)  # type: ignore[misc]
    for name in ("KFRA, separate passes", "KFAC, separate passes"):
        optimizer = separated(linnet.optim.GaussNewton(autoencoder(widths), Bernoulli(), name[:4].lower()))
        calls[name] = lambda optimizer=optimizer: optimizer.step(x, x)  # type: ignore[misc]
    calls["KFAC before SGD"] = preconditioned_step(x, widths)
    if importlib.util.find_spec("singd") is not None:
        calls["singd"] = singd_step(x, widths)
    if importlib.util.find_spec("asdl") is not None:
        calls["asdfghjkl"] = asdl_step(x, widths)
    return calls


def separated(optimizer: linnet.optim.GaussNewton) -> linnet.optim.GaussNewton:
    """The optimizer as for networks that are no chain: gradient, curvature and J d each by its own pass."""
    optimizer._once._look = lambda parts: None  # type: ignore[method-assign]
    if isinstance(optimizer._running, RunningRecursion):
        optimizer._running.look = lambda x: None  # type: ignore[method-assign]
    return optimizer


def preconditioned_step(x: Tensor, widths: tuple[int, ...]) -> Step:
    """A step of SGD after KFAC, one sampled label, inverses every 5 steps; no step size is chosen."""
    model, count = autoencoder(widths), itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    running = linnet.RunningCurvature(model, Gaussian(), "kfac", "mc", decay=0.95)
    running.add(x)
    options: dict[str, Any] = {"damping": 1e-2, "inversion": "factored"}
    preconditioner = linnet.KroneckerPreconditioner(running.curvature(), model, **options)

    def step() -> None:
        optimizer.zero_grad()
        squared(model(x), x).backward()
        running.refresh(model)
        running.add(x)
        if next(count) % 5 == 0:
            preconditioner.refresh(running.curvature(), 1e-2)
        preconditioner.step()
        optimizer.step()

    return step


def singd_step(x: Tensor, widths: tuple[int, ...]) -> Step:
    """A step of singd's IKFAC, dense factors, every step."""
    from singd.optim.optimizer import SINGD

    model = autoencoder(widths)
    optimizer = SINGD(model, lr=1e-4, T=1, damping=1e-2, lr_cov=1e-3, kfac_like=True, normalize_lr_cov=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), x).backward()
        optimizer.step()

    return step


def asdl_step(x: Tensor, widths: tuple[int, ...]) -> Step:
    """A step of asdfghjkl's KFAC, one sampled label, inverses every 5 steps, then SGD."""
    from asdl import FISHER_MC, LOSS_MSE, KfacGradientMaker, PreconditioningConfig

    if not torch.cuda.is_available():  # it marks its ranges for a profiler that CPU builds of torch lack
        nvtx: Any = torch.cuda.nvtx
        nvtx.range = lambda *_, **__: contextlib.nullcontext()
        nvtx.range_push = nvtx.range_pop = lambda *_: None
    model = autoencoder(widths)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    config = PreconditioningConfig(
        data_size=len(x),
        damping=1e-2,
        ema_decay=0.05,
        curvature_upd_interval=1,
        preconditioner_upd_interval=5,
    )
    maker = KfacGradientMaker(model, config, fisher_type=FISHER_MC, loss_type=LOSS_MSE)

    def step() -> None:
        optimizer.zero_grad()
        maker.setup_loss_call(squared, maker.setup_model_call(model, x), x)
        maker.forward_and_backward()
        optimizer.step()

    return step


def linearized_steps(batch: int) -> dict[str, Step]:
    """A plain step, and steps of iterative linearization with and without new features in them."""
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    calls: dict[str, Step] = {}
    for name, period in (("K = 1", 1), ("K = 10", 10), ("K never", None)):
        training = linnet.optim.IterativeLinearization(
            resnet20(10).eval(), lambda p: torch.optim.SGD(p, lr=1e-4), period
        )
        calls[f"iterative linearization, {name}"] = lambda training=training: training.step(  # type: ignore[misc]
            lambda module: F.cross_entropy(module(x), y)
        )
    model = resnet20(10).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return {"plain step, ResNet-20": step, **calls}


def timed(
    calls: dict[str, Step], repeats: int, burst: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of a step of every contestant, in turns; the first turn is not timed."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = clock()
            for _ in range(burst):
                call()
            if turn:
                found[name].append((clock() - begin) / burst)
    return found


def rows_of(found: dict[str, list[float]]) -> list[Row]:
    """Medians, with the claims."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    against = {"KFRA": ("Adam", 4.0), "KFAC": ("singd", 1.0), "KFAC, squared error": ("asdfghjkl", 1.0),
               "KFAC before SGD": ("asdfghjkl", 1.0),
               "iterative linearization, K = 10": ("plain step, ResNet-20", 2.0),
               "iterative linearization, K never": ("plain step, ResNet-20", 2.0)}  # fmt: skip
    rows = []
    for name, seconds in middle.items():
        base, bound = against.get(name, (next(iter(middle)), None))
        note = f"min {min(found[name]):.3g} s"
        if name in against and base in middle:
            rows.append(Row(name, seconds, seconds / middle[base], "<=", bound, f"{note}; against {base}"))
        else:
            rows.append(Row(name, seconds, note=note))
    if {"KFAC", "Adam"} <= set(middle):
        rows.append(Row("KFAC against Adam", None, middle["KFAC"] / middle["Adam"]))
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    result.add_argument("--batch", type=int, default=1000)
    result.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    result.add_argument("--burst", type=int, default=BURST, help="steps of a call (default %(default)s)")
    result.add_argument(
        "--cpu-time", action="store_true", help="seconds of CPU; with --threads 1 other work disturbs less"
    )
    result.add_argument("--only", nargs="+", default=None, help="names of contestants")
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    warnings.simplefilter("ignore")  # the peers'
    clock = time.process_time if options.cpu_time else time.perf_counter
    rows: list[Row] = []
    for steps in (
        lambda: autoencoder_steps(strokes(options.batch), tuple(options.widths)),
        lambda: linearized_steps(128),
    ):
        calls = {k: v for k, v in steps().items() if options.only is None or k in options.only}
        if calls:
            rows += rows_of(timed(calls, options.repeats, options.burst, clock))
    kind = "CPU seconds" if options.cpu_time else "seconds"
    publish(
        f"Steps of the optimizers, {kind} a step", rows, options.json, batch=options.batch,
        widths=options.widths, burst=options.burst, load=os.getloadavg()[0],
    )  # fmt: skip


if __name__ == "__main__":
    main()
