"""A training step of ``Linearized`` against a plain training step. Claim: at most 2.0 times.

    python benchmarks/linearized_step.py --json linearized_step.json

ResNet-20, batch 128 of 32x32 images, cross-entropy, SGD: forward, backward, update. The base is the same
network in evaluation mode (which is what a linearized network is) in the same memory layout; a plain step
in training mode, a plain torch.func.jvp step, channels_last and, with --compile, torch.compile stand
beside it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

import torch
from measure import Row, parser, publish, setup, time_in_turns
from networks import resnet20
from torch import nn
from torch.func import functional_call, jvp
from torch.nn import functional as F

import linnet

Step = Callable[[], None]
Forward = Callable[[torch.Tensor], torch.Tensor]


class FunctionalLinearization:
    """f(x) + J(x) delta as torch.func alone writes it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.primal = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.delta = {name: torch.zeros_like(v, requires_grad=True) for name, v in self.primal.items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(N, ...) to (N, C)."""

        def function(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = functional_call(self.model, parameters, (x,))
            return result

        value, tangent = jvp(function, (self.primal,), (self.delta,))
        return value + tangent


def step(forward: Forward, parameters: Iterable[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Step:
    """One training step as a call."""
    optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return run


def contestants(
    x: torch.Tensor, y: torch.Tensor, layout: torch.memory_format, compiled: bool
) -> dict[str, Step]:
    """All steps in one memory layout."""
    x = x.contiguous(memory_format=layout)

    def network() -> nn.Module:
        return resnet20(10).to(memory_format=layout)

    calls: dict[str, Step] = {}
    plain, training = network(), network().train()
    calls["plain step"] = step(plain, plain.parameters(), x, y)
    calls["plain step, training mode"] = step(training, training.parameters(), x, y)
    functional = FunctionalLinearization(network())
    calls["torch.func.jvp"] = step(functional, functional.delta.values(), x, y)
    lin = linnet.linearize(network())
    calls["linnet"] = step(lin, lin.parameters(), x, y)
    calls |= cached(network(), x, y)
    if compiled:
        fast, fast_lin = network(), linnet.linearize(network())
        calls["plain step, compiled"] = step(torch.compile(fast), fast.parameters(), x, y)
        calls["linnet, compiled"] = step(torch.compile(fast_lin), fast_lin.parameters(), x, y)
    return calls


def cached(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Step]:
    """The step with what does not depend on delta kept from the first pass, where the library offers it."""
    lin = linnet.linearize(model)
    record = getattr(lin, "record", None)
    if record is None:
        return {}
    tape = record(x)
    return {"linnet, activations cached": step(lambda _: lin.replay(tape), lin.parameters(), x, y)}


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=9)
    result.add_argument("--batch", type=int, default=128)
    result.add_argument(
        "--compile", action="store_true", help="also measure torch.compile (minutes to compile)"
    )
    return result.parse_args()


def rows_for(layout: str, calls: dict[str, Step], repeats: int) -> list[Row]:
    """Measure one layout's steps in turns; ratios are to its own plain step."""
    timings = time_in_turns(calls, repeats, warmup=2, limit=240)
    base = timings["plain step"]
    claims = {"linnet": 2.0}
    rows = []
    for name, timing in timings.items():
        sense = "<=" if name in claims else None
        note = f"min {timing.minimum:.3g} s; ratio of minima {timing.minimum / base.minimum:.2f}"
        ratio = timing.median / base.median
        rows.append(Row(f"{layout}: {name}", timing.median, ratio, sense, claims.get(name), note))
    return rows


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    x = torch.randn(options.batch, 3, 32, 32)
    y = torch.randint(0, 10, (options.batch,))
    rows: list[Row] = []
    for name, layout in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
        rows += rows_for(name, contestants(x, y, layout, options.compile), options.repeats)
    publish(f"A training step, ResNet-20, batch {options.batch}", rows, options.json, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
