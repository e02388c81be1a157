"""Cost of continual learning penalties: gradient per training step, memory, and consolidation.

    python benchmarks/continual_penalty.py --peer-python peer/bin/python --json continual_penalty.json

Claims:

- the gradient of a penalty of merged Kronecker factors adds at most 25 % to a step of the network
  784-100-100-10 at batch 128, and at most 10 % to a step of ResNet-20;
- the memory of merged factors does not grow with the number of tasks;
- consolidating elastic weight consolidation takes a fifth of the time of Avalanche, at the same empirical
  Fisher matrix (without ``--peer-python``: of a loop of the same steps, one example at a time).

The first cannot hold on any machine whose time is that of its floating-point operations, and the table has
the count beside the measurement: for a layer of m outputs and n inputs the product L δ R takes 2 m n (m + n)
operations and a step on B examples 6 m n B (4 m n B in the first layer), so that a layer adds (m + n) / (3 B)
of its step, and a first one (m + n) / (2 B). Only batches of several times m + n examples bring that below a
quarter. The time is that of the process (``time.process_time``), in turns, so that other work on the
machine does not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from continual_peer import network, task
from measure import Row, Timing, parser, publish, relative_error, setup
from networks import resnet20
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import linnet

Steps = Mapping[str, Callable[[], object]]


def process_times(calls: Steps, repeats: int, burst: int) -> dict[str, Timing]:
    """Seconds of the process for one call of each, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            call()
            begin = time.process_time()
            for _ in range(burst):
                call()
            if turn:
                seconds[name].append((time.process_time() - begin) / burst)
    return {name: Timing.of(values) for name, values in seconds.items()}


def steps(net: nn.Module, x: torch.Tensor, y: torch.Tensor, structure: str) -> Steps:
    """A training step without a method and with one, on one network."""
    method = linnet.continual.OnlineLaplace(net, linnet.likelihoods.Categorical(), structure)
    method.consolidate((x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

    def step(way: str) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        (loss + method.penalty(examples=60000) if way == "penalty" else loss).backward()
        if way == "add_grad_":
            method.add_grad_(examples=60000)
        optimizer.step()

    def alone() -> None:
        method.add_grad_(examples=60000)

    return {
        "plain": lambda: step("plain"), "add_grad_": lambda: step("add_grad_"),
        "penalty": lambda: step("penalty"), "alone": alone,
    }  # fmt: skip


def operations(net: nn.Sequential, batch: int) -> tuple[float, float]:
    """Floating-point operations of the penalty's products and of a step, of linear layers."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    products = step = 0.0
    for index, layer in enumerate(layers):
        m, n = layer.out_features, layer.in_features + 1
        products += 2.0 * m * n * (m + n)
        step += (6.0 if index else 4.0) * m * n * batch
    return products, step


def small_rows(repeats: int) -> list[Row]:
    """The network of two hidden layers of 100."""
    rows = []
    for batch in (128, 1024):
        net, (x, y) = network(784, 100), task(784, batch)
        products, plain = operations(net, batch)
        for structure in ("kfac", "diagonal"):
            found = process_times(steps(net, x, y, structure), repeats, 30)
            bare = found["plain"].median
            rows.append(Row(f"784-100-100-10, batch {batch}, {structure}: a step", bare))
            for way in ("add_grad_", "penalty"):
                added = found[way].median / bare - 1
                target = ("<=", 0.25) if batch == 128 and structure == "kfac" else (None, None)
                note = "what it adds to a step"
                if structure == "kfac":
                    note += f"; operations of the products over those of the step: {products / plain:.2f}"
                rows.append(Row(f"... with {way}", found[way].median, added, *target, note))
    return rows


def large_rows(repeats: int, batch: int) -> list[Row]:
    """ResNet-20 on 32 × 32 images."""
    torch.manual_seed(0)
    net = resnet20()
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    found = process_times(steps(net, x, y, "kfac"), repeats, 1)
    bare = found["plain"].median
    rows = [Row(f"ResNet-20, batch {batch}, kfac: a step", bare)]
    note = "add_grad_ alone over a step"
    rows.append(
        Row("... add_grad_ alone", found["alone"].median, found["alone"].median / bare, "<=", 0.10, note)
    )
    for way in ("add_grad_", "penalty"):
        rows.append(Row(f"... with {way}", found[way].median, found[way].median / bare - 1, note="adds"))
    return rows


def memory_rows() -> list[Row]:
    """Bytes after one task and after twenty."""
    rows = []
    for merge, target in (("svd", ("<=", 1.0)), ("exact", (None, None))):
        net = network(784, 100)
        method = linnet.continual.OnlineLaplace(net, linnet.likelihoods.Categorical(), merge=merge)
        sizes = []
        for _ in range(20):
            method.consolidate(task(784, 64))
            sizes.append(method.nbytes())
        note = f"bytes after 20 tasks over those after one, {sizes[0] / 1e6:.2f} MB"
        rows.append(Row(f"memory, merge {merge}", None, sizes[-1] / sizes[0], *target, note))
    return rows


def plain_loop(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The empirical Fisher matrix's diagonal as Avalanche computes it with batches of one example."""
    found = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for a, b in DataLoader(TensorDataset(x, y), batch_size=1):
        net.zero_grad()
        nn.functional.cross_entropy(net(a), b).backward()
        for name, p in net.named_parameters():
            if p.grad is not None:
                found[name] += p.grad.square()
    return {name: value / len(x) for name, value in found.items()}


def consolidation_rows(options: argparse.Namespace) -> list[Row]:
    """Elastic weight consolidation of one task."""
    rows = []
    for hidden, examples in ((100, 1000), (400, 1000)):
        net, (x, y) = network(784, hidden), task(784, examples)
        likelihood = linnet.likelihoods.Categorical()
        method = linnet.continual.EWC(net, likelihood, expectation="empirical", matrix="fisher")
        call = partial(method.consolidate, (x, y))
        mine = process_times({"linnet": call}, options.repeats, 1)["linnet"].median
        theirs, fisher, label = peer(options, hidden, examples, net, x, y)
        curvature = linnet.curvature(
            net, (x, y), likelihood, structure="diagonal", expectation="empirical", matrix="fisher"
        )
        flat = curvature.diagonal() / examples
        error = relative_error(
            flat, torch.cat([fisher[name].flatten() for name, _ in net.named_parameters()])
        )
        note = f"{label} {theirs:.3g} s; relative difference of the Fisher matrices {error:.0e}"
        name = f"EWC consolidation, 784-{hidden}-{hidden}-10, {examples} examples"
        rows.append(Row(name, mine, theirs / mine, ">=", 5.0, note))
    return rows


def peer(
    options: argparse.Namespace, hidden: int, examples: int, net: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor], str]:
    """Seconds, the Fisher matrix, and who computed it."""
    if not options.peer_python:
        begin = time.process_time()
        fisher = plain_loop(net, x, y)
        return time.process_time() - begin, fisher, "plain loop"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "fisher.pt")
        script = Path(__file__).with_name("continual_peer.py")
        command = [options.peer_python, str(script), "--hidden", str(hidden), "--examples", str(examples)]
        done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the peer did not run: {done.stderr.strip().splitlines()[-1]}")
        facts = json.loads(done.stdout.strip().splitlines()[-1])
        return min(facts["seconds"]), torch.load(out), f"Avalanche {facts['version']}"


def main() -> None:
    """Entry point."""
    result = parser(__doc__ or "", threads=1)
    result.add_argument("--peer-python", default=None, help="python of an environment with avalanche-lib")
    result.add_argument("--batch", type=int, default=128, help="examples of a step of ResNet-20")
    result.add_argument("--only", nargs="*", choices=("small", "large", "memory", "consolidation"))
    options = result.parse_args()
    setup(options.threads)
    parts = {
        "small": lambda: small_rows(options.repeats),
        "large": lambda: large_rows(max(2, options.repeats // 2), options.batch),
        "memory": memory_rows,
        "consolidation": lambda: consolidation_rows(options),
    }
    rows: list[Row] = []
    for name, part in parts.items():
        rows += part() if options.only is None or name in options.only else []
        print(name, "done", file=sys.stderr, flush=True)
    publish("What remembering costs", rows, options.json)


if __name__ == "__main__":
    main()
