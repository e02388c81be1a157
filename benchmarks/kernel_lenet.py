"""Kernels of LeNet and ResNet-20 against neural-tangents. Claims: at least 10 and 5 times faster.

    python -m venv peer
    peer/bin/pip install jax==0.4.30 jaxlib==0.4.30 neural-tangents==0.6.5 tf2jax==0.3.6 "numpy<2"
    python benchmarks/kernel_lenet.py --peer-python peer/bin/python --json kernel_lenet.json

LeNet (5x5 convolutions with 50 and 50 channels, 120 and 84 units) on (3, 32, 32), N = 200, C = 1;
ResNet-20 on (3, 32, 32), N = 100, C = 1 and C = 10. The peer runs on the same weights and inputs,
compiled by jax.jit with the compilation left out, each implementation in a process of its own and each
both ways that it is used: the whole kernel in one compiled call (memory grows with N) and through
``nt.batch`` (its way to bound the memory). The kernels are compared entry by entry. NTK-vector products
take N² forward passes; they are measured on a tenth of the examples and scaled by 100 for LeNet, and are
left out where even that could never be the best.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from measure import Row, add_peer_python, parser, publish, relative_error, setup, time_in_turns
from networks import lenet, resnet20
from peers import NeuralTangents, PeerError, PeerResult
from torch import nn

import linnet


@dataclass(frozen=True)
class Problem:
    """One kernel: a network, how the peer builds it, and the claims."""

    name: str
    model: nn.Module
    examples: int
    peer: tuple[str, ...]
    bound: float | None
    batches: tuple[int, ...] = (0, 20)
    products: bool = False


def problems() -> dict[str, Problem]:
    """Everything that can be asked for by --only."""
    return {
        "lenet": Problem("LeNet, N = 200, C = 1", lenet(1), 200, ("--network", "lenet"), 10.0, products=True),
        "lenet-average": Problem(
            "LeNet with average pooling, N = 200, C = 1",
            lenet(1, "average"),
            200,
            ("--network", "lenet", "--pool", "average"),
            None,
        ),
        "resnet": Problem("ResNet-20, N = 100, C = 1", resnet20(1), 100, ("--network", "resnet"), 5.0),
        "resnet-10": Problem(
            "ResNet-20, N = 100, C = 10", resnet20(10), 100, ("--network", "resnet"), 5.0, batches=(0,)
        ),
    }


def measure_peer(
    peer: NeuralTangents, problem: Problem, x: torch.Tensor
) -> tuple[list[Row], list[PeerResult]]:
    """All ways of the peer that finish; the failures become rows too."""
    rows: list[Row] = []
    results: list[PeerResult] = []
    for batch in problem.batches:
        for implementation in ("contraction", "structured"):
            way = f"nt.batch({batch})" if batch else "one compiled call"
            label = f"{problem.name}: neural-tangents {implementation}, {way}"
            try:
                result = peer.run(problem.model, x, implementation, *problem.peer, "--batch", str(batch))
            except PeerError as failure:
                rows.append(Row(label, note=str(failure)))
                continue
            results.append(result)
            note = f"min {result.minimum:.4g} s, peak {result.peak_bytes / 1e9:.2f} GB"
            rows.append(Row(label, result.median, note=note))
    if problem.products:
        few = len(x) // 10
        result = peer.run(problem.model, x, "products", *problem.peer, "--examples", str(few))
        label = f"{problem.name}: neural-tangents products, from {few} examples"
        rows.append(Row(label, 100 * result.median, note=f"{result.median:.4g} s for {few}, times 100"))
    return rows, results


def measure(problem: Problem, peer: NeuralTangents, repeats: int) -> tuple[list[Row], dict[str, float]]:
    """One problem's rows, the last of them linnet's."""
    x = torch.randn(problem.examples, 3, 32, 32)
    lin = linnet.linearize(problem.model)
    before = time_in_turns({"linnet": lambda: lin.kernel(x)}, repeats, limit=60)["linnet"]
    peer_rows, results = measure_peer(peer, problem, x)
    after = time_in_turns({"linnet": lambda: lin.kernel(x)}, repeats, warmup=0, limit=60)["linnet"]
    ours = (before.median + after.median) / 2
    rows = [
        Row(row.name, row.seconds, None if row.seconds is None else row.seconds / ours, note=row.note)
        for row in peer_rows
    ]
    best = min(results, key=lambda result: result.median, default=None)
    if best is None:
        return [*rows, Row(f"{problem.name}: linnet", ours, note="no peer finished")], {}
    error = relative_error(lin.kernel(x), best.kernel)
    note = f"min {min(before.minimum, after.minimum):.4g} s; ratio to the peer's best; "
    note += f"relative difference {error:.0e}"
    sense = None if problem.bound is None else ">="
    rows.append(Row(f"{problem.name}: linnet", ours, best.median / ours, sense, problem.bound, note))
    return rows, {"relative_difference": error, "peer_best": best.median, "linnet": ours}


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=5)
    add_peer_python(result)
    result.add_argument("--only", nargs="*", choices=list(problems()), default=list(problems()))
    result.add_argument("--timeout", type=float, default=600.0, help="seconds for one run of the peer")
    options = result.parse_args()
    if not options.peer_python:
        result.error("--peer-python is needed: the python of an environment with neural-tangents")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    peer = NeuralTangents(options.peer_python, options.threads, 3, options.timeout)
    rows: list[Row] = []
    details: dict[str, dict[str, float]] = {}
    for name in options.only:
        more, details[name] = measure(problems()[name], peer, options.repeats)
        rows += more
    publish("Kernels against neural-tangents 0.6.5", rows, options.json, problems=details)


if __name__ == "__main__":
    main()
