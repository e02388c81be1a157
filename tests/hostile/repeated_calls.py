"""Memory growth over hundreds of repeated calls, counted in a separate process.

Run as ``python -m tests.hostile.repeated_calls NAME CALLS``; prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import linnet
import linnet.errors
from linnet.likelihoods import Categorical, Gaussian

WARM_UP = 12  # calls after which everything that is kept once is there

Call = Callable[[Tensor, Tensor], object]


def network() -> nn.Module:
    """A small network in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _fit() -> Call:
    lin = linnet.linearize(network())
    return lambda x, y: linnet.fit(lin, (x, y)).predictive(x).probs


def _cross_entropy() -> Call:
    lin = linnet.linearize(network())
    return lambda x, y: linnet.fit(lin, (x, y), loss="cross-entropy").predict(x)


def _kernel() -> Call:
    lin = linnet.linearize(network())
    return lambda x, y: (lin.kernel(x), lin.jvp(x, torch.ones(lin.space.dim)), lin(x).sum().backward())


def _curvature() -> Call:
    model = network()
    return lambda x, y: linnet.curvature(model, (x, y), Categorical(), ["full", "kfac", "ekfac"])


def _laplace() -> Call:
    la = linnet.Laplace(network(), Categorical())
    return lambda x, y: la.fit((x, y)).predictive(x).probs


def _process() -> Call:
    gp = linnet.TangentGP(network(), Gaussian(0.1))
    return lambda x, y: gp.fit(x, x[:, :3]).update(x, x[:, :3]).predictive(x).covariance


def _changes() -> Call:
    held = [linnet.fit(linnet.linearize(network()), (torch.eye(6, 4).double(), torch.arange(6) % 3))]

    def change(x: Tensor, y: Tensor) -> None:
        held[0] = held[0].update((x, y)).forget(range(len(x)))
        held[0].influence(x)

    return change


def _gauss_newton() -> Call:
    optimizer = linnet.optim.GaussNewton(network(), Categorical(), damping=1.0)
    return optimizer.step


def _consolidate() -> Call:
    model = network()
    method = linnet.continual.OnlineLaplace(model, Categorical())

    def task(x: Tensor, y: Tensor) -> None:
        (nn.functional.cross_entropy(model(x), y) + method.penalty()).backward()
        method.consolidate((x, y))

    return task


def _linearization() -> Call:
    model = network()
    return lambda x, y: linnet.preflight(linnet.with_head(model, 3, data=(x, y)), x).ok


def _hostile() -> Call:
    """Calls that fail."""
    model = network()

    def wrong(x: Tensor, y: Tensor) -> None:
        for call in (lambda: linnet.linearize(model).kernel(x[:, :2]), lambda: linnet.fit(model, (x, y))):
            with contextlib.suppress(linnet.errors.LinnetError):
                call()

    return wrong


OPERATIONS: dict[str, Callable[[], Call]] = {
    "fit": _fit,
    "cross-entropy": _cross_entropy,
    "kernel": _kernel,
    "curvature": _curvature,
    "laplace": _laplace,
    "process": _process,
    "forget and update": _changes,
    "gauss-newton": _gauss_newton,
    "consolidate": _consolidate,
    "linearize": _linearization,
    "refused": _hostile,
}


def resident() -> int:
    """Bytes of memory that the process holds, 0 where the system does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def measured() -> tuple[int, int, int, int]:
    """Objects, tensors among them, bytes of Python objects, bytes of the process."""
    gc.collect()
    found = gc.get_objects()
    tensors = sum(isinstance(one, Tensor) for one in found)
    return len(found), tensors, tracemalloc.get_traced_memory()[0], resident()


def growth(name: str, calls: int) -> dict[str, int]:
    """What is left of so many calls, by what is counted."""
    call, generator = OPERATIONS[name](), torch.Generator().manual_seed(1)

    def once() -> None:
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)  # never the same data twice
        call(x, torch.arange(6) % 3)

    for _ in range(WARM_UP):
        once()
    tracemalloc.start()
    before = measured()
    for _ in range(calls):
        once()
    after = measured()
    tracemalloc.stop()
    names = "objects", "tensors", "bytes of objects", "bytes of the process"
    return {what: new - old for what, old, new in zip(names, before, after, strict=True)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(growth(sys.argv[1], int(sys.argv[2]))))
