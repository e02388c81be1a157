"""Rate of large Gram matrices relative to the machine's matrix-product rate. Target: at least 60 %.

    python benchmarks/gram_rate.py --json gram_rate.json

The rate is (useful FLOPs) / (seconds), against the best of several square float32 products timed in the
same run, before and after. Useful FLOPs are counted here from the network's shapes, not asked of the
library: one forward pass, the backward passes to the layers' inputs, for every weight the cheaper of its
two ways (gradients formed, positions contracted), and of the symmetric product only the half that is
needed. Activations, pooling, additions, copies and anything computed twice count nothing. With
``--threads 1 --cpu-time`` both are of the processor, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from measure import Row, parser, publish, setup, sgemm_rate, time_in_turns
from networks import lenet, mlp
from torch import nn

import linnet


@dataclass(frozen=True)
class Weight:
    """A weight used at ``positions`` positions with ``fan_in`` inputs and ``fan_out`` outputs."""

    positions: int
    fan_in: int
    fan_out: int
    first: bool = False

    def products(self) -> int:
        """FLOPs of one example's forward pass through it: two per multiplication."""
        return 2 * self.positions * self.fan_in * self.fan_out

    def gram(self, n: int, outputs: int) -> int:
        """FLOPs of the kernel of n examples, one side of the diagonal, by the cheaper way."""
        s, d, c, k = self.positions, self.fan_in, self.fan_out, outputs
        pairs = n * (n + 1) // 2
        formed = 2 * n * k * c * d * s + 2 * pairs * k * k * c * d
        contracted = 2 * pairs * s * (s * d + s * k * c + k * k * c)
        if s == 1:  # (A Aᵀ) times (G Gᵀ), entry by entry: no position axis is left to contract
            contracted = 2 * pairs * (d + k * k * c)
        return min(formed, contracted)


@dataclass(frozen=True)
class Problem:
    """One Gram matrix."""

    name: str
    model: nn.Module
    shape: tuple[int, ...]
    outputs: int
    weights: tuple[Weight, ...]
    bound: float | None = 0.6

    def flops(self) -> float:
        """Useful FLOPs."""
        n = self.shape[0]
        total = 0
        for weight in self.weights:
            total += n * weight.products() + weight.gram(n, self.outputs)
            if not weight.first:  # gradients at the layer below, one pass for every output
                total += n * self.outputs * weight.products()
        return float(total)


def convolutional(n: int) -> Problem:
    """LeNet with one output."""
    weights = (
        Weight(784, 75, 50, first=True),
        Weight(100, 1250, 50),
        Weight(1, 1250, 120),
        Weight(1, 120, 84),
        Weight(1, 84, 1),
    )
    return Problem(f"LeNet, C = 1, N = {n}", lenet(1), (n, 3, 32, 32), 1, weights)


def fully_connected(n: int, outputs: int) -> Problem:
    """MLP 784-512-512 with some outputs."""
    widths = (784, 512, 512, outputs)
    pairs = list(pairwise(widths))
    weights = tuple(Weight(1, fan_in, fan_out, first=i == 0) for i, (fan_in, fan_out) in enumerate(pairs))
    # With C outputs K has (N·C)² entries to write for about 1000 multiplications each: a rate to report, and
    # the claim is made for one output and for ten alike.
    return Problem(f"MLP 784-512-512, C = {outputs}, N = {n}", mlp(*widths), (n, 784), outputs, weights)


def measure(problem: Problem, repeats: int, clock: Callable[[], float]) -> tuple[Row, dict[str, float]]:
    """Time one Gram matrix between two measurements of the machine's rate."""
    lin = linnet.linearize(problem.model)
    x = torch.randn(problem.shape)
    before = sgemm_rate(clock=clock)
    calls = {"gram": lambda: linnet.spectrum.gram(lin, x)}
    timing = time_in_turns(calls, repeats, limit=90, clock=clock)["gram"]
    rate = max(before, sgemm_rate(clock=clock))
    achieved = problem.flops() / timing.median
    note = f"{achieved / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s, {problem.flops() / 1e9:.0f} GFLOP, "
    note += f"min {timing.minimum:.3g} s, load {os.getloadavg()[0]:.1f}"
    sense = None if problem.bound is None else ">="
    row = Row(problem.name, timing.median, achieved / rate, sense, problem.bound, note)
    return row, {"flops": problem.flops(), "sgemm": rate, "achieved": achieved}


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    result.add_argument("--lenet", type=int, nargs="*", default=[2000, 5000], help="sizes N for LeNet")
    result.add_argument("--mlp", type=int, nargs="*", default=[10000], help="sizes N for the MLP, C = 1")
    result.add_argument("--mlp-full", type=int, nargs="*", default=[1000], help="sizes N for the MLP, C = 10")
    result.add_argument("--cpu-time", action="store_true", help="seconds of the processor, for one thread")
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    problems = [convolutional(n) for n in options.lenet]
    problems += [fully_connected(n, 1) for n in options.mlp]
    problems += [fully_connected(n, 10) for n in options.mlp_full]
    clock = time.process_time if options.cpu_time else time.perf_counter
    measured = [measure(problem, options.repeats, clock) for problem in problems]
    details = {problem.name: facts for problem, (_, facts) in zip(problems, measured, strict=True)}
    publish("Gram matrices against sgemm", [row for row, _ in measured], options.json, problems=details)


if __name__ == "__main__":
    main()
