"""Peak memory of large operations against what their plans said. Claim: at most 1.2 times the plan.

    python benchmarks/memory.py --json memory.json

Every operation runs in a process of its own: the same operation on a few examples first (thread pools,
kernels, lazy imports), then the kernel's high-water mark of resident memory is reset, and the peak is how
far the operation raised it over what was resident before. The plan is the largest of the
``linnet.memory.Plan`` that the operation wrote down on its way, which is what it compares with its budget
and what the preflight prints. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Row, parser, publish, resident, setup
from networks import lenet, mlp, resnet20
from torch import nn

import linnet
from linnet.memory import Plan

Operation = Callable[[int], object]
BOUND = 1.2


def images(n: int) -> torch.Tensor:
    """(n, 3, 32, 32)."""
    return torch.randn(n, 3, 32, 32)


def gram(model: nn.Module, *, outputs: str = "full", memory: str | None = None) -> Operation:
    """The kernel of n images."""
    lin = linnet.linearize(model)
    return lambda n: linnet.spectrum.gram(lin, images(n), form=outputs, memory=memory)


def gram_of_vectors(n_in: int) -> Operation:
    """The full kernel of n vectors."""
    lin = linnet.linearize(mlp(n_in, 512, 512, 10))
    return lambda n: linnet.spectrum.gram(lin, torch.randn(n, n_in))


def jacobian() -> Operation:
    """The Jacobian of n images."""
    lin = linnet.linearize(resnet20(10))
    return lambda n: lin.jacobian(images(n))


def dual_fit(then: Callable[[Any, int], object] | None = None) -> Operation:
    """A dual fit on n images, and perhaps something asked of it."""
    lin = linnet.linearize(resnet20(10))

    def run(n: int) -> object:
        fit = linnet.fit(lin, (images(n), torch.arange(n) % 10), ridge=1.0, solver="dual")
        return fit if then is None else (fit, then(fit, n))

    return run


def operations() -> dict[str, tuple[int, Callable[[], Operation]]]:
    """Name, examples and maker of every operation measured."""
    return {
        "gram LeNet, C = 1": (3000, lambda: gram(lenet(1))),
        "gram LeNet, C = 1, budget 400MB": (3000, lambda: gram(lenet(1), memory="400MB")),
        "gram MLP, C = 10": (1000, lambda: gram_of_vectors(784)),
        "gram ResNet-20, C = 10, full": (150, lambda: gram(resnet20(10))),
        "gram ResNet-20, C = 10, trace": (150, lambda: gram(resnet20(10), form="trace")),
        "gram ResNet-20, C = 10, budget 500MB": (150, lambda: gram(resnet20(10), memory="500MB")),
        "Jacobian ResNet-20, C = 10": (150, jacobian),
        "fit dual ResNet-20, C = 10": (300, dual_fit),
        "fit dual, then influence": (300, lambda: dual_fit(lambda fit, n: fit.influence(images(100)))),
        "fit dual, then predictive": (300, lambda: dual_fit(lambda fit, n: fit.predictive(images(100)))),
    }


def give_back_free_memory() -> None:
    """Return what the C allocator holds free to the system, so that it hides nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PlanRecord:
    """All plans made while it is entered."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def __enter__(self) -> PlanRecord:
        original, plans = Plan.__init__, self.plans

        def recording(plan: Plan, *values: Any, **named: Any) -> None:
            original(plan, *values, **named)
            plans.append(plan)

        self._restore = original
        Plan.__init__ = recording  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Plan.__init__ = self._restore  # type: ignore[method-assign]


def child(name: str, threads: int) -> None:
    """Run one operation and print what it took as JSON."""
    setup(threads)
    n, make = operations()[name]
    run = make()
    run(20)
    give_back_free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with PlanRecord() as record:
        kept = run(n)
    peak = resident("VmHWM") - before
    del kept
    largest = max(record.plans, key=lambda plan: plan.peak, default=None)
    facts = {"peak": peak, "plan": 0 if largest is None else largest.peak, "examples": n}
    print(json.dumps(facts | {"text": str(largest), "plans": len(record.plans)}))


def measure(name: str, threads: int) -> tuple[Row, dict[str, Any]]:
    """One operation in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return Row(name, note=f"failed: {reason[:200]}", ratio=float("inf"), sense="<=", bound=BOUND), {}
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not facts["plan"]:
        return Row(name, note="made no plan", ratio=float("inf"), sense="<=", bound=BOUND), facts
    note = f"N = {facts['examples']}: peak {facts['peak'] / 1e6:.0f} MB, plan {facts['plan'] / 1e6:.0f} MB"
    return Row(name, None, facts["peak"] / facts["plan"], "<=", BOUND, note), facts


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "")
    result.add_argument("--only", nargs="*", choices=list(operations()), default=list(operations()))
    result.add_argument("--child", choices=list(operations()), help=argparse.SUPPRESS)
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options.child, options.threads)
        return
    measured = {name: measure(name, options.threads) for name in options.only}
    publish(
        "Peak memory against the plan",
        [row for row, _ in measured.values()],
        options.json,
        operations={name: facts for name, (_, facts) in measured.items()},
    )


if __name__ == "__main__":
    main()
