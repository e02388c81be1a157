"""The spectrum of a large kernel: its Gram matrix, alignment of many targets, leading eigenpairs.

    python benchmarks/spectrum.py --json spectrum.json
    python benchmarks/spectrum.py --only gram --keep gram.npy      # the parts one by one
    python benchmarks/spectrum.py --only eigenpairs --keep gram.npy
    python benchmarks/spectrum.py --only alignment

LeNet with one output on N = 10,000 images of 32 x 32, two threads. Claims:

* the Gram matrix within a budget of 8 GiB: at least 10 times faster than torch.func, whose time on 1,000
  examples is scaled by the number of tiles of 1,000 on and above the diagonal, and at least 0.6 of the
  machine's own matrix-product rate (useful FLOPs as counted in gram_rate.py);
* the alignment of 1,000 targets in at most 1.5 passes over the data besides its products. A pass is a
  forward and a backward pass with the gradients of all weights; the products are the matrix products of
  gradients and targets of the same sizes, timed by themselves;
* the 50 leading eigenpairs of that matrix at least 5 times faster than its full decomposition.

Ratios are of wall-clock time; beside them stands the ratio of processor time, which other work on the machine
disturbs less (and which does not see threads that wait).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gram_rate import convolutional
from measure import Row, parser, publish, setup, sgemm_rate
from networks import lenet
from torch_func_peer import TorchFunctionKernel

from linnet import linearize, spectrum

BLOCK = 256  # examples in a pass and in a product
PARTS = ("gram", "eigenpairs", "alignment")


def seconds(call: Callable[[], object]) -> tuple[float, Any, float]:
    """Wall-clock time of one call, what it returned, and its processor time."""
    begin, used = time.perf_counter(), time.process_time()
    found = call()
    return time.perf_counter() - begin, found, time.process_time() - used


def peak_gibibytes() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_gram(n: int, peer: int, budget: str) -> tuple[list[Row], torch.Tensor]:
    """The Gram matrix against torch.func and against the machine."""
    problem = convolutional(n)
    x = torch.randn(n, 3, 32, 32)
    lin = linearize(problem.model)
    spectrum.gram(lin, x[:256], progress=False)  # warm up
    rate = sgemm_rate()
    own, matrix, own_cpu = seconds(lambda: spectrum.gram(lin, x, memory=budget, progress=False))
    peak = peak_gibibytes()
    rate = max(rate, sgemm_rate())
    few = TorchFunctionKernel(problem.model)
    tile, part, tile_cpu = seconds(lambda: few.by_contraction(x[:peer], x[:peer]))
    assert isinstance(matrix, torch.Tensor)
    assert isinstance(part, torch.Tensor)
    matrix = matrix.reshape(n, n)
    difference = float((part.reshape(peer, peer) - matrix[:peer, :peer]).abs().max() / matrix.abs().max())
    tiles = n / peer * (n / peer + 1) / 2
    share = problem.flops() / own / rate
    rows = [
        Row(f"Gram of {n}", own, note=f"peak {peak:.1f} GiB resident, budget {budget}"),
        Row(f"torch.func on {peer}, scaled by {tiles:g} tiles", tile * tiles, tile * tiles / own, ">=", 10.0,
            f"{tile:.3g} s a tile; processor time {tile_cpu * tiles / own_cpu:.3g}; "
            f"relative difference {difference:.0e}"),
        Row("share of the sgemm rate", own, share, ">=", 0.6, f"sgemm {rate / 1e9:.0f} GFLOP/s"),
        Row("peak in GiB", None, peak, "<=", 8.0, "largest resident size of the process"),
    ]  # fmt: skip
    return rows, matrix


def measure_alignment(n: int, targets: int, repeats: int) -> list[Row]:
    """Alignment of many targets against passes and products."""
    model = lenet(1)
    x, y = torch.randn(n, 3, 32, 32), torch.randn(n, targets)
    weights = list(model.parameters())
    gradients = [torch.randn(BLOCK, weight.numel()) for weight in weights]

    def one_pass() -> None:
        for part in x.split(BLOCK):
            torch.autograd.grad(model(part).sum(), weights)

    def products() -> None:
        sums = [torch.zeros(g.shape[1], targets) for g in gradients]
        for part in y.split(BLOCK):
            for g, total in zip(gradients, sums, strict=True):
                total.addmm_(g[: len(part)].T, part)

    calls = {
        "alignment": lambda: spectrum.alignment(model, (x, y), progress=False),
        "pass": one_pass,
        "products": products,
    }
    turns = [{name: seconds(call) for name, call in calls.items()} for _ in range(repeats)]
    found, used = (
        {name: statistics.median(turn[name][clock] for turn in turns) for name in calls} for clock in (0, 2)
    )
    passes, own = ((t["alignment"] - t["products"]) / t["pass"] for t in (found, used))
    return [
        Row(f"one pass over {n}", found["pass"], note="forward, and backward to all weights"),
        Row(f"products for {targets} targets", found["products"]),
        Row(f"alignment of {targets} targets", found["alignment"], passes, "<=", 1.5,
            f"passes, not products; processor time {own:.3g}"),
    ]  # fmt: skip


def measure_eigenpairs(matrix: torch.Tensor, k: int) -> list[Row]:
    """Lanczos against a full decomposition, in the precision of the matrix."""
    n = matrix.shape[0]
    model, x = lenet(1), torch.zeros(n, 3, 32, 32)
    options = {"k": k, "gram": matrix, "progress": False}
    some, found, _ = seconds(lambda: spectrum.eigenfunctions(model, x, method="lanczos", **options))
    assert isinstance(found, spectrum.Eigenfunctions)
    every, full, _ = seconds(lambda: torch.linalg.eigh(matrix))
    values = full[0].flip(0)[:k]  # type: ignore[index]
    error = float((found.values * n - values).abs().max() / values[0])
    return [
        Row(f"full eigh of {n}", every),
        Row(f"top {k} by Lanczos", some, every / some, ">=", 5.0,
            f"difference {error:.0e} of the first, residual {found.residual:.0e}"),
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    result.add_argument("--examples", type=int, default=10_000, help="N (default %(default)s)")
    result.add_argument(
        "--peer-examples", type=int, default=1000, help="for torch.func (default %(default)s)"
    )
    result.add_argument("--targets", type=int, default=1000, help="for the alignment (default %(default)s)")
    result.add_argument("--budget", default="6GB", help="memory of the Gram matrix (default %(default)s)")
    result.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to measure")
    result.add_argument("--keep", type=Path, default=None, help="a .npy file that keeps the Gram matrix")
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    rows: list[Row] = []
    matrix: torch.Tensor | None = None
    if "gram" in options.only:
        rows, matrix = measure_gram(options.examples, options.peer_examples, options.budget)
        if options.keep is not None:
            np.save(options.keep, matrix.numpy())
    if "eigenpairs" in options.only:
        if matrix is None:
            if options.keep is None or not options.keep.exists():
                raise SystemExit("eigenpairs need the Gram matrix: name gram too, or the file with --keep")
            matrix = torch.from_numpy(np.load(options.keep))
        rows += measure_eigenpairs(matrix, 50)
    del matrix
    if "alignment" in options.only:
        rows += measure_alignment(options.examples, options.targets, options.repeats)
    publish("The spectrum of a large kernel", rows, options.json, examples=options.examples)


if __name__ == "__main__":
    main()
