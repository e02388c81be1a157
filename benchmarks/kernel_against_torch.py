"""Compare ``lin.kernel`` with the standard torch.func kernels on one network."""

from __future__ import annotations

import argparse
import time

import torch
from measure import Row, publish, relative_error, time_in_turns
from torch import nn
from torch_func_peer import TorchFunctionKernel

import linnet


def compare(title: str, model: nn.Module, x: torch.Tensor, bound: float, options: argparse.Namespace) -> None:
    """Measure, check that the numbers agree, and print.

    Both of torch.func's ways are called once; the faster is then timed in turns with linnet.

    Args:
        title: Heading of the table.
        model: The network.
        x: A batch of N examples.
        bound: The claimed ratio to the faster of torch.func's ways.
        options: Parsed command line.
    """
    lin = linnet.linearize(model)
    peer = TorchFunctionKernel(model)
    contestants = {"Jacobian contraction": peer.by_contraction, "NTK-vector products": peer.by_products}
    once: dict[str, float] = {}
    for name, contestant in contestants.items():
        begin = time.perf_counter()
        contestant(x, x)
        once[name] = time.perf_counter() - begin
    best, worst = sorted(once, key=lambda name: once[name])
    calls = {best: lambda: contestants[best](x, x), "linnet": lambda: lin.kernel(x)}
    timings = time_in_turns(calls, options.repeats, warmup=2, burst=3)
    ours, theirs = timings["linnet"], timings[best]
    ratio = theirs.median / ours.median
    error = relative_error(lin.kernel(x), peer.by_contraction(x, x))
    note = f"min {ours.minimum:.4g} s; ratio of minima {theirs.minimum / ours.minimum:.3g}; "
    note += f"relative difference {error:.0e}"
    rows = [
        Row(f"torch.func {worst}", once[worst], once[worst] / ours.median, note="a single call"),
        Row(f"torch.func {best}", theirs.median, ratio, note=f"min {theirs.minimum:.4g} s"),
        Row("linnet lin.kernel", ours.median, ratio, ">=", bound, note),
    ]
    publish(title, rows, options.json, relative_difference=error, examples=len(x))
