"""Compare ``lin.kernel`` with the standard torch.func kernels on one network."""

from __future__ import annotations

import argparse

import torch
from measure import Row, publish, relative_error, time_in_turns
from torch import nn
from torch_func_peer import TorchFunctionKernel

import linnet


def compare(title: str, model: nn.Module, x: torch.Tensor, bound: float, options: argparse.Namespace) -> None:
    """Measure, check that the numbers agree, and print.

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
    # Slow contestants first and on their own: their size would push the fast one's data out of the caches.
    peers = time_in_turns(
        {name: lambda f=f: f(x, x) for name, f in contestants.items()}, options.repeats, limit=60
    )
    ours = time_in_turns({"linnet": lambda: lin.kernel(x)}, 4 * options.repeats, warmup=3)["linnet"]
    best = min(peers, key=lambda name: peers[name].median)
    error = relative_error(lin.kernel(x), peer.by_contraction(x, x))
    rows = [
        Row(
            f"torch.func {name}",
            timing.median,
            timing.median / ours.median,
            note=f"min {timing.minimum:.4g} s",
        )
        for name, timing in peers.items()
    ]
    note = f"min {ours.minimum:.4g} s; ratio to {best}; relative difference {error:.0e}"
    rows.append(Row("linnet lin.kernel", ours.median, peers[best].median / ours.median, ">=", bound, note))
    publish(title, rows, options.json, relative_difference=error, examples=len(x))
