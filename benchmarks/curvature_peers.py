r"""Curvature by laplace-torch, curvlinops, BackPACK and kronfluence: seconds and peak memory of each.

    python -m venv peer
    peer/bin/pip install torch==2.13.0 numpy scipy tqdm opt-einsum torchmetrics einops einconv \
        linear_operator unfoldNd accelerate safetensors
    peer/bin/pip install --no-deps laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 \
        backpack-for-pytorch==1.7.1 kronfluence==1.0.1 asdfghjkl==0.1a4
    python benchmarks/curvature_peers.py --peer-python peer/bin/python --json curvature_peers.json

``--no-deps`` keeps torchvision out: laplace-torch, BackPACK and kronfluence require it on paper, none of them
imports it for what is measured here, and the wheel of the package index can replace torch. torchmetrics works
as long as torchvision is absent. The peers' environment may be named once and for all by the environment
variable LINNET_CURVATURE_PEERS.

Every measurement is a process of its own (``--child``) that prints one line of JSON: the seconds of each call
over the whole data set, how far the first call raised the resident memory over what model and data take, and
the time of one training epoch (forward and backward passes) of the same network in the same process. Scales,
N examples, all losses being sums:

- linnet sums over examples; torch's ``MSELoss`` has twice the Hessian of a Gaussian with unit variance;
- curvlinops with reduction "sum" is a sum over examples too; its factors are A = Σ aaᵀ / (N S) and
  B = Σ ggᵀ for S shared positions, with the bias joined when ``separate_weight_and_bias=False``;
- BackPACK's factors of one batch of M examples average A over the M examples; they add up to those of the
  whole data when A is weighted by M / N. Weight and bias are separate blocks. For linear layers they are
  curvlinops' own; for convolutions A = Σ aaᵀ / N is S times as large and B is formed of gradients summed over
  positions (that of KFAC-reduce), so that they are no multiple of anyone's. DiagGGNExact is a sum;
- laplace-torch is a sum, with half of MSELoss, and keeps weights and biases apart; its fit of a Kronecker
  structure ends with the eigenvalue decomposition of every factor (seconds in ``decompose``), and its
  functional variance is that of f itself;
- kronfluence keeps sums and counts (of examples times positions for both factors) and samples labels.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from curvature_contestants import MAKERS, Job, timed
from curvature_networks import LARGE, NETWORKS, Problem, layer_parameters, problem
from measure import Row, parser, publish, resident, setup, sgemm_rate
from torch import nn

TASKS = ("reference", "kfac-exact", "kfac-mc", "ekfac-exact", "ekfac-mc", "diagonal-exact", "ggn-1", "ggn-16")
PREDICTIVES = ("predictive-kfac", "predictive-diagonal")
CONTESTANTS = ("curvlinops", "backpack", "laplace", "laplace-backpack", "laplace-asdl", "kronfluence")


def epoch(given: Problem, batch: int) -> Callable[[], None]:
    """One training epoch without the steps: forward and backward passes over the data."""

    def run() -> None:
        for x, y in given.batches(batch):
            given.model.zero_grad()
            given.loss(given.model(x), y).backward()
        given.model.zero_grad()

    return run


def forward(given: Problem, batch: int) -> Callable[[], None]:
    """One forward pass over the data, without a graph."""

    def run() -> None:
        with torch.no_grad():
            for x, _ in given.batches(batch):
                given.model(x)

    return run


def passes(given: Problem, batch: int, columns: int) -> Callable[[], None]:
    """A forward pass and ``columns`` backward passes to the outputs of the layers; no weight gradients."""
    model = copy.deepcopy(given.model).requires_grad_(False)
    layers = {name.rpartition(".")[0] for name in layer_parameters(model)}
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        outputs.append(output if output.requires_grad else output.requires_grad_())

    for name, module in model.named_modules():
        if name in layers:
            module.register_forward_hook(keep)

    def run() -> None:
        for x, _ in given.batches(batch):
            outputs.clear()
            output = model(x)
            for index in range(columns):
                column = torch.full_like(output, 0.1).roll(index, 1)
                torch.autograd.grad(output, outputs, column, retain_graph=index + 1 < columns)

    return run


@contextlib.contextmanager
def peak_memory(into: dict[str, Any]) -> Iterator[None]:
    """Write how far the resident memory rose inside over what was resident before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    into["peak_bytes"] = resident("VmHWM") - before


def measure_job(
    make: Callable[[Problem], Job], given: Problem, few: Problem, options: argparse.Namespace
) -> dict[str, Any]:
    """Time a job in turns with the epoch, and take its peak memory on the first call."""
    make(few).run()
    job = make(given)  # only now: BackPACK's jobs share global state
    plain = epoch(given, options.batch)
    epoch(few, options.batch)()
    record: dict[str, Any] = {"load": os.getloadavg()[0]}
    seconds: list[float] = []
    epochs: list[float] = []
    epochs.append(timed(plain)[0])
    begin = time.perf_counter()
    while len(seconds) < options.repeats and (not seconds or time.perf_counter() - begin < options.limit):
        with peak_memory(record) if not seconds else contextlib.nullcontext():
            taken, result = timed(job.run)
        seconds.append(taken)
        if len(seconds) == 1:
            record |= job.facts(result)
            if options.save:
                torch.save(job.probe(result), options.save)
        del result
        epochs.append(timed(plain)[0])
    record |= {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "minimum": min(seconds),
        "repeats": len(seconds),
    }
    record |= {"epoch": sorted(epochs)[len(epochs) // 2], "epoch_minimum": min(epochs)}
    return record


def measure_reference(given: Problem, classes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Forward pass, epoch and C + 1 backward passes without weight gradients, in turns; the sgemm rate."""
    calls = {
        "forward": forward(given, options.batch),
        "epoch": epoch(given, options.batch),
        "passes": passes(given, options.batch, classes + 1),
        "one_pass": passes(given, options.batch, 1),
    }
    record: dict[str, Any] = {"load": os.getloadavg()[0], "sgemm": sgemm_rate(2048, 3)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats + 1):
        for name, call in calls.items():
            seconds[name].append(timed(call)[0])
    medians = {name: sorted(values[1:])[(len(values) - 1) // 2] for name, values in seconds.items()}
    return record | medians | {"seconds": medians["passes"], "repeats": options.repeats}


def child(options: argparse.Namespace, makers: dict[str, Callable[[str, Problem, int], Job]]) -> None:
    """Measure one cell and print it as one line of JSON."""
    peer, task, network = options.child
    if options.memory_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory_limit, options.memory_limit))
    setup(options.threads)
    warnings.simplefilter("ignore")
    given = problem(network, options.parameters, options.examples, options.loss)
    record: dict[str, Any]
    try:
        if peer == "torch":
            record = measure_reference(given, NETWORKS[network].classes, options)
        else:
            few = problem(network, options.parameters, min(8, options.batch), options.loss)
            maker = makers[peer]
            record = measure_job(lambda data: maker(task, data, options.batch), given, few, options)
    except Exception as problem_met:  # whatever a peer raises is what it cannot do
        lines = str(problem_met).strip().splitlines() or [""]
        record = {"error": f"{type(problem_met).__name__}: {lines[0]}"[:300]}
    print(json.dumps(record | {"examples": len(given.x), "torch": torch.__version__}))


def add_child_options(arguments: argparse.ArgumentParser) -> None:
    """What one measurement depends on."""
    arguments.add_argument("--child", nargs=3, metavar=("PEER", "TASK", "NETWORK"), help=argparse.SUPPRESS)
    arguments.add_argument("--parameters", choices=("layers", "weights", "all"), default="layers")
    arguments.add_argument("--loss", choices=("cross-entropy", "squared"), default="cross-entropy")
    arguments.add_argument("--batch", type=int, default=128, help="examples a pass (default %(default)s)")
    arguments.add_argument("--examples", type=int, default=None, help="fewer examples, for extrapolation")
    arguments.add_argument("--fraction", type=float, default=1.0, help="share of the examples to measure on")
    arguments.add_argument("--limit", type=float, default=60.0, help="seconds after which no repeat starts")
    arguments.add_argument("--memory-limit", type=int, default=0, help="bytes that a process may allocate")
    arguments.add_argument("--save", default=None, help="file for the tensors of the agreement check")


def run_child(
    python: str, script: Path, cell: tuple[str, str, str], *options: str, timeout: float = 600.0
) -> dict[str, Any]:
    """One measurement in a process of its own; a failure is a record with ``error``."""
    command = [python, str(script), "--child", *cell, *options]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not finish in {timeout:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {
            "error": (done.stderr.strip().splitlines() or [f"killed, status {done.returncode}"])[-1][:300]
        }
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def add_curvature_peers(arguments: argparse.ArgumentParser) -> None:
    """The option that names the interpreter of the peers' environment."""
    arguments.add_argument(
        "--peer-python",
        default=os.environ.get("LINNET_CURVATURE_PEERS"),
        help="python of an environment with the peers (default: the variable LINNET_CURVATURE_PEERS)",
    )


def conditions(peer: str, task: str, network: str) -> tuple[int, int | None, str]:
    """Batch size, examples if fewer than all, and parameters, such that a peer finishes and does its best.

    laplace-torch's diagonal and predictive form Jacobians, for all outputs of a batch at once with one
    backward pass of the whole batch each: batches of 10, and few examples. What takes minutes is measured on
    fewer examples, unless it decomposes matrices, whose cost does not grow with them.
    """
    every = "all" if task.startswith("ggn") else "layers"
    if task == "diagonal-exact" and network == "resnet20" and peer != "laplace":
        return 32, 64, every
    if peer == "laplace" and (task == "diagonal-exact" or task in PREDICTIVES):
        return 10, 40, every
    if peer.startswith("laplace") and task in PREDICTIVES:
        return 10, 100, every
    if peer == "curvlinops" and task == "ggn-16":
        return 32, None, every
    return 128, None, every


def skipped(peer: str, task: str, network: str) -> bool:
    """Whether a cell is asked of nobody: predictions are laplace-torch's alone."""
    if task in PREDICTIVES:
        return not peer.startswith("laplace") or peer == "laplace-asdl" or network == "transformer"
    return peer == "laplace-backpack"


def row(cell: tuple[str, str, str], record: dict[str, Any]) -> Row:
    """One line of the table; ratios are to one training epoch in the same process."""
    peer, task, network = cell
    name = f"{network}: {task}, {peer}"
    if "error" in record:
        return Row(name, note=record["error"])
    seconds = whole_seconds(record)
    notes = [f"batch {record['batch']}", f"load {record['load']:.1f}"]
    if "peak_bytes" in record:
        notes.insert(0, f"peak {record['peak_bytes'] / 1e6:.0f} MB")
    if record["scale"] != 1:
        notes.append(f"extrapolated from {record['examples']} examples")
    return Row(name, seconds, seconds / (record["epoch"] * record["scale"]), note=", ".join(notes))


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    add_curvature_peers(result)
    add_child_options(result)
    result.add_argument("--networks", nargs="*", choices=LARGE, default=list(LARGE))
    result.add_argument("--tasks", nargs="*", choices=TASKS + PREDICTIVES, default=list(TASKS + PREDICTIVES))
    result.add_argument("--peers", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    result.add_argument("--timeout", type=float, default=600.0, help="seconds for one measurement")
    options = result.parse_args()
    if not options.peer_python and not options.child:
        result.error("--peer-python is needed: the python of an environment with the peers")
    return options


def measure_cell(
    options: argparse.Namespace,
    cell: tuple[str, str, str],
    save: Path | None = None,
    script: Path = Path(__file__),
) -> dict[str, Any]:
    """One cell under the conditions that suit the peer."""
    peer, task, network = cell
    batch, examples, parameters = conditions(peer, task, network)
    total = 1000 if task in PREDICTIVES else NETWORKS[network].examples
    if options.fraction < 1 and task not in PREDICTIVES:
        fewer = max(batch, round(total * options.fraction))
        examples = min(fewer, examples or fewer)
    words = ["--batch", str(batch), "--parameters", parameters, "--threads", str(options.threads)]
    words += ["--repeats", str(options.repeats), "--limit", str(options.limit)]
    words += ["--memory-limit", str(options.memory_limit)]
    if examples is not None:
        words += ["--examples", str(examples)]
    if save is not None:
        words += ["--save", str(save)]
    record = run_child(options.peer_python, script, cell, *words, timeout=options.timeout)
    record |= {"peer": peer, "task": task, "network": network, "batch": batch, "parameters": parameters}
    return record | {"scale": total / record.get("examples", total)}


def whole_seconds(record: dict[str, Any]) -> float:
    """Seconds on all examples: what grows with N scaled up, decompositions once."""
    fixed = min(record.get("decompose", 0.0), record["seconds"])
    result: float = (record["seconds"] - fixed) * record["scale"] + fixed
    return result


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options, MAKERS)
        return
    records = []
    rows = []
    for network in options.networks:
        for task in options.tasks:
            peers = ["torch"] if task == "reference" else options.peers
            for peer in peers:
                if skipped(peer, task, network):
                    continue
                records.append(measure_cell(options, (peer, task, network)))
                rows.append(row((peer, task, network), records[-1]))
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    publish("Curvature by the peers; ratios are to one training epoch", rows, options.json, cells=records)


if __name__ == "__main__":
    main()
