"""Curvature by laplace-torch, curvlinops, BackPACK and kronfluence: seconds and peak memory of each.

    python -m venv peer
    peer/bin/pip install torch==2.13.0 numpy scipy tqdm opt-einsum torchmetrics einops einconv \\
        linear_operator unfoldNd accelerate safetensors
    peer/bin/pip install --no-deps laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 \\
        backpack-for-pytorch==1.7.1 kronfluence==1.0.1 asdfghjkl==0.1a4
    OMP_WAIT_POLICY=PASSIVE python benchmarks/curvature_peers.py --peer-python peer/bin/python --json peers.json

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
  whole data when A is weighted by M / N. Weight and bias are separate blocks. For convolutions A is summed
  and B averaged over positions, whose product is the same; DiagGGNExact is a sum;
- laplace-torch is a sum, with half of MSELoss; its fit of a Kronecker structure ends with the eigenvalue
  decomposition of every factor (seconds in ``decompose``), its functional variance is that of f itself;
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
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from curvature_networks import LARGE, NETWORKS, Parameters, Problem, layer_parameters, problem, trainable
from measure import Row, parser, publish, setup, sgemm_rate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TASKS = ("reference", "kfac-exact", "kfac-mc", "ekfac-exact", "ekfac-mc", "diagonal-exact", "ggn-1", "ggn-16")
PREDICTIVES = ("predictive-kfac", "predictive-diagonal")
CONTESTANTS = ("curvlinops", "backpack", "laplace", "laplace-backpack", "laplace-asdl", "kronfluence")
FISHER = {"exact": "type-2", "mc": "mc"}
FITTED = 100  # examples that a posterior is fitted on before its predictions are timed


@dataclass(frozen=True)
class Job:
    """Something to time: ``run`` computes, ``probe`` turns its result into tensors that can be compared."""

    run: Callable[[], Any]
    probe: Callable[[Any], Parameters] = lambda result: {}
    facts: Callable[[Any], dict[str, Any]] = lambda result: {}


def named(names: Iterable[str], values: Iterable[torch.Tensor]) -> Parameters:
    """Tensors by the names of their parameters."""
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def curvlinops(task: str, given: Problem, batch: int) -> Job:
    """KFACLinearOperator, EKFACLinearOperator and GGNLinearOperator."""
    from curvlinops import EKFACLinearOperator, GGNLinearOperator, KFACLinearOperator

    tensors = list(given.parameters.values())
    structure, _, kind = task.partition("-")
    common: dict[str, Any] = {"check_deterministic": False, "num_data": len(given.x)}

    def columns(operator: Any, vectors: Parameters) -> Parameters:
        product = operator @ torch.cat([value.flatten(0, -2) for value in vectors.values()])
        parts = product.split([value.numel() for value in tensors])
        shaped = (part.unflatten(0, value.shape) for part, value in zip(parts, tensors, strict=True))
        return named(given.names, shaped)

    if structure == "ggn":
        operator = GGNLinearOperator(given.model, given.loss, tensors, given.batches(batch), **common)
        vectors = given.vectors(int(kind))
        return Job(lambda: columns(operator, vectors), lambda result: result)
    maker = {"kfac": KFACLinearOperator, "ekfac": EKFACLinearOperator}.get(structure)
    if maker is None:
        raise LookupError("only stochastic estimates of the diagonal (Hutchinson, XDiag)")

    def run() -> Any:
        operator = maker(
            given.model,
            given.loss,
            tensors,
            given.batches(batch),
            fisher_type=FISHER[kind],
            separate_weight_and_bias=False,
            num_per_example_loss_terms=1,
            **common,
        )
        operator.compute_kronecker_factors()
        if structure == "ekfac":
            operator.compute_eigenvalue_correction()
        return operator

    return Job(run, lambda operator: columns(operator, given.vectors(3)))


def backpack(task: str, given: Problem, batch: int) -> Job:
    """KFLR, KFAC and DiagGGNExact of extended modules, and the autodiff-only product."""
    from backpack import backpack as extended
    from backpack import extend
    from backpack import extensions
    from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist

    if task.startswith("ggn"):
        vectors = given.vectors(int(task.partition("-")[2]))

        def products() -> Parameters:
            total = {name: torch.zeros_like(value) for name, value in vectors.items()}
            chosen = list(given.parameters.values())
            for x, y in given.batches(batch):
                output = given.model(x)
                loss = given.loss(output, y)
                for index in range(next(iter(vectors.values())).shape[-1]):
                    column = [value[..., index] for value in vectors.values()]
                    product = ggn_vector_product_from_plist(loss, output, chosen, column)
                    for name, value in zip(total, product, strict=True):
                        total[name][..., index] += value.detach()
            return total

        return Job(products, lambda result: result)
    if task.startswith("ekfac"):
        raise LookupError("no eigenvalue-corrected factors")
    kinds = {
        "kfac-exact": ("KFLR", "kflr"),
        "kfac-mc": ("KFAC", "kfac"),
        "diagonal-exact": ("DiagGGNExact", "diag_ggn_exact"),
    }
    extension, attribute = kinds[task]
    plain = isinstance(given.model, nn.Sequential)
    model = extend(copy.deepcopy(given.model), use_converter=not plain)
    loss_function = extend(copy.deepcopy(given.loss))
    once = _extended_pass(model, loss_function, extended, getattr(extensions, extension))

    def run() -> list[Any]:
        total: list[Any] = []
        for x, y in given.batches(batch):
            once(x, y)
            values = [getattr(value, attribute) for value in trainable(model)]
            if isinstance(values[0], list):
                weight = len(x) / len(given.x)
                values = [[pair[0], *(other * weight for other in pair[1:])] for pair in values]
            total = [_sum(*pair) for pair in zip(total, values, strict=True)] if total else values
            for value in trainable(model):
                delattr(value, attribute)
        return total

    def probe(total: list[Any]) -> Parameters:
        if not isinstance(total[0], list):
            return named(given.names, total)
        vectors = given.vectors(3).values()
        return named(given.names, (_kronecker(*pair) for pair in zip(total, vectors, strict=True)))

    return Job(run, probe)


def _extended_pass(model: nn.Module, loss: nn.Module, context: Any, extension: Any) -> Callable[..., None]:
    """One forward and backward pass inside BackPACK's context."""

    def once(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        with context(extension()):
            loss(model(x), y).backward()

    return once


def _sum(left: Any, right: Any) -> Any:
    """The sum of two tensors, or of two lists of factors."""
    return left + right if isinstance(left, torch.Tensor) else [a + b for a, b in zip(left, right, strict=True)]


def _kronecker(factors: list[torch.Tensor], vector: torch.Tensor) -> torch.Tensor:
    """(B ⊗ A) v for a weight (out, ..., columns), or B v for a bias."""
    product = torch.einsum("ij,j...->i...", factors[0], vector)
    if len(factors) == 1:
        return product
    return torch.einsum("kl,ilv->ikv", factors[1], product.flatten(1, -2)).reshape(vector.shape)


def laplace(task: str, given: Problem, batch: int, backend: str | None = None) -> Job:
    """``Laplace(...).fit`` of all weights, or its GLM predictive after a fit."""
    from laplace import Laplace
    from laplace.curvature import AsdlGGN, BackPackGGN

    if task.startswith(("ggn", "ekfac")):
        raise LookupError("has no such operation")
    kind = "diag" if "diagonal" in task else "kron"
    likelihood = "classification" if isinstance(given.loss, nn.CrossEntropyLoss) else "regression"
    options: dict[str, Any] = {"backend_kwargs": {"stochastic": task.endswith("mc")}}
    if backend is not None:
        options["backend"] = {"backpack": BackPackGGN, "asdl": AsdlGGN}[backend]
    def posterior(x: torch.Tensor, y: torch.Tensor) -> Any:
        result = Laplace(copy.deepcopy(given.model), likelihood, "all", kind, **options)
        result.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
        return result

    def decompose(result: Any) -> dict[str, Any]:
        return {"decompose": timed(result.H_facs.decompose)[0]} if kind == "kron" else {}

    def fitted(result: Any) -> Parameters:
        if kind == "diag":
            parts = result.H.split([value.numel() for value in given.parameters.values()])
            return named(given.names, (p.view_as(v) for p, v in zip(parts, given.parameters.values(), strict=True)))
        vectors = given.vectors(3).values()
        return named(given.names, (_kronecker(*pair) for pair in zip(result.H_facs.kfacs, vectors, strict=True)))

    if not task.startswith("predictive"):
        return Job(lambda: posterior(given.x, given.y), fitted, decompose)
    known = posterior(given.x[:FITTED], given.y[:FITTED])

    def predict() -> list[torch.Tensor]:
        return [known(x, pred_type="glm", link_approx="probit") for x, _ in given.batches(batch)]

    def variance(_: Any) -> Parameters:
        parts = [known._glm_predictive_distribution(x)[1] for x, _ in given.batches(batch)[:2]]
        return {"variance": torch.cat(parts)}

    return Job(predict, variance)


def kronfluence(task: str, given: Problem, batch: int) -> Job:
    """Covariances, and for EKFAC the decompositions and eigenvalues, without the files between them."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    if task.startswith(("ggn", "diagonal", "predictive")):
        raise LookupError("has no such operation")
    if not task.endswith("-mc"):
        raise LookupError("takes expectations over sampled or observed labels only")

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> torch.Tensor:
            x, y = batch
            output = model(x)
            if sample:
                y = output.detach().softmax(-1).multinomial(1).squeeze(-1)
            return nn.functional.cross_entropy(output, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> torch.Tensor:
            return self.compute_train_loss(batch, model)

    classification = Classification()
    model = prepare_model(copy.deepcopy(given.model), classification)
    state, options = State(), FactorArguments(strategy="ekfac")

    def run() -> Any:
        loader = DataLoader(TensorDataset(given.x, given.y), batch_size=batch)
        shared = {"model": model, "state": state, "factor_args": options, "disable_tqdm": True}
        rest = {"task": classification, "loader": loader}
        _, factors = fit_covariance_matrices_with_loader(**shared, **rest)
        if task.startswith("kfac"):
            return factors
        vectors = perform_eigendecomposition(covariance_factors=factors, **shared)
        return fit_lambda_matrices_with_loader(eigen_factors=vectors, **shared, **rest)

    return Job(run)


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


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"/proc/self/status has no {name}: this benchmark needs Linux")
    return int(match.group(1)) * 1024


@contextlib.contextmanager
def peak_memory(into: dict[str, Any]) -> Iterator[None]:
    """Write how far the resident memory rose inside over what was resident before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    into["peak_bytes"] = resident("VmHWM") - before


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure_job(
    make: Callable[[Problem], Job], given: Problem, few: Problem, options: argparse.Namespace
) -> dict[str, Any]:
    """Time a job in turns with the epoch, and take its peak memory on the first call."""
    job, small = make(given), make(few)
    small.run()
    plain = epoch(given, options.batch)
    epoch(few, options.batch)()
    record: dict[str, Any] = {"load": os.getloadavg()[0]}
    seconds: list[float] = []
    epochs: list[float] = []
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
    record |= {"seconds": sorted(seconds)[len(seconds) // 2], "minimum": min(seconds), "repeats": len(seconds)}
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


MAKERS: dict[str, Callable[[str, Problem, int], Job]] = {
    "curvlinops": curvlinops,
    "backpack": backpack,
    "laplace": laplace,
    "laplace-backpack": lambda task, given, batch: laplace(task, given, batch, "backpack"),
    "laplace-asdl": lambda task, given, batch: laplace(task, given, batch, "asdl"),
    "kronfluence": kronfluence,
}


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
    arguments.add_argument("--limit", type=float, default=60.0, help="seconds after which no repeat starts")
    arguments.add_argument("--memory-limit", type=int, default=0, help="bytes that a process may allocate")
    arguments.add_argument("--save", default=None, help="file for the tensors of the agreement check")


def run_child(python: str, script: Path, cell: tuple[str, str, str], *options: str, timeout: float = 600.0) -> dict[str, Any]:
    """One measurement in a process of its own; a failure is a record with ``error``."""
    command = [python, str(script), "--child", *cell, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"did not finish in {timeout:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"killed, status {done.returncode}"])[-1][:300]}
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
    backward pass of the whole batch each: batches of 10, and few examples.
    """
    every = "all" if task.startswith("ggn") else "layers"
    if peer == "laplace" and (task == "diagonal-exact" or task in PREDICTIVES):
        return 10, 40, every
    if peer.startswith("laplace") and task in PREDICTIVES:
        return 10, 100, every
    if peer == "curvlinops" and task == "ggn-16":
        return 32, None, every
    return 128, None, every


def row(cell: tuple[str, str, str], record: dict[str, Any]) -> Row:
    """One line of the table; ratios are to one training epoch in the same process."""
    peer, task, network = cell
    name = f"{network}: {task}, {peer}"
    if "error" in record:
        return Row(name, note=record["error"])
    seconds = record["seconds"] * record["scale"]
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


def measure_cell(options: argparse.Namespace, cell: tuple[str, str, str]) -> dict[str, Any]:
    """One cell under the conditions that suit the peer."""
    peer, task, network = cell
    batch, examples, parameters = conditions(peer, task, network)
    words = ["--batch", str(batch), "--parameters", parameters, "--threads", str(options.threads)]
    words += ["--repeats", str(options.repeats), "--limit", str(options.limit)]
    words += ["--memory-limit", str(options.memory_limit)]
    if examples is not None:
        words += ["--examples", str(examples)]
    record = run_child(options.peer_python, Path(__file__), cell, *words, timeout=options.timeout)
    total = 1000 if task in PREDICTIVES else NETWORKS[network].examples
    record |= {"peer": peer, "task": task, "network": network, "batch": batch, "parameters": parameters}
    return record | {"scale": total / record.get("examples", total)}


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
                if task in PREDICTIVES and (not peer.startswith("laplace") or network == "transformer"):
                    continue
                records.append(measure_cell(options, (peer, task, network)))
                rows.append(row((peer, task, network), records[-1]))
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    publish("Curvature by the peers; ratios are to one training epoch", rows, options.json, cells=records)


if __name__ == "__main__":
    main()
