"""Variances of 1,000 predictions without Jacobians, against laplace-torch. Claim: at least 10 times as fast.

    python benchmarks/curvature_predictive.py --peer-python peer/bin/python --json curvature_predictive.json

The environment of the peer is described in ``curvature_peers.py``. LeNet and ResNet-20, ten classes;
posteriors of precision G + 1 with G diagonal, Kronecker-factored or eigenvalue-corrected (of the last the
peer has none; it is compared with the peer's Kronecker posterior), on all linear layers and convolutions,
fitted beforehand on 40 examples. The peer is laplace-torch's GLM predictive with the probit link in batches
of 10, which form the Jacobians (N, C, P); it is measured on 40 points (100 with its BackPACK backend) and
extrapolated, as linnet is on ResNet-20, from 500. Diagonal posteriors are the same matrix, and their
variances are compared; the Kronecker factors of the peer keep weights and biases apart, where linnet joins
them. Peak memory stands beside the size of the Jacobians of all points, which linnet must stay far below.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from curvature_contestants import FITTED, Job
from curvature_networks import NETWORKS, Problem, problem
from curvature_peers import add_child_options, add_curvature_peers, child, measure_cell, run_child
from measure import Row, parser, publish, relative_error

POINTS = 1000
TASKS = {
    "predictive-diagonal": "predictive-diagonal",
    "predictive-kfac": "predictive-kfac",
    "predictive-ekfac": "predictive-kfac",
}
PEERS = ("laplace", "laplace-backpack")
PEER_SCRIPT = Path(__file__).with_name("curvature_peers.py")


def linnet_job(task: str, given: Problem, batch: int) -> Job:
    """Output covariances and probabilities of all points under a posterior that is fitted before."""
    import linnet

    likelihood = linnet.likelihoods.Categorical()
    data = given.x[:FITTED], given.y[:FITTED]
    structure = task.partition("-")[2]
    chosen = linnet.linearize(given.model, params=list(given.names))
    fitted = linnet.curvature(chosen, data, likelihood, structure=structure)
    posterior = fitted.damped(1.0).inverse()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        covariance = posterior.output_covariance(given.x)
        with torch.no_grad():
            mean = torch.cat([given.model(x) for x, _ in given.batches(batch)])
        return covariance, likelihood.predictive(mean, covariance)

    return Job(run, lambda result: {"variance": result[0]})


MAKERS = {"linnet": linnet_job}


def measure_linnet(options: argparse.Namespace, task: str, network: str, save: Path) -> dict[str, Any]:
    """One task by linnet, in a process of its own."""
    words = ["--threads", str(options.threads), "--repeats", str(options.repeats), "--save", str(save)]
    cell = ("linnet", task, network)
    return run_child(sys.executable, Path(__file__), cell, *words, timeout=options.timeout)


def compare(options: argparse.Namespace, task: str, network: str) -> tuple[list[Row], dict[str, Any]]:
    """The peer's ways and linnet's, before and after them."""
    label = f"{network}: {task}"
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, "linnet.pt")
        ours = [measure_linnet(options, task, network, mine)]
        theirs: dict[str, dict[str, Any]] = {}
        errors: dict[str, float] = {}
        for peer in PEERS:
            kept = Path(folder, f"{peer}.pt")
            theirs[peer] = measure_cell(options, (peer, TASKS[task], network), kept, PEER_SCRIPT)
            if task == "predictive-diagonal" and mine.exists() and kept.exists():
                reference = torch.load(kept)["variance"]
                errors[peer] = relative_error(torch.load(mine)["variance"][: len(reference)], reference)
        ours.append(measure_linnet(options, task, network, mine))
    details = {"linnet": ours, "peers": theirs, "differences": errors}
    failures = [record["error"] for record in ours if "error" in record]
    if failures:
        return [Row(f"{label}, linnet", None, 0.0, ">=", 10.0, failures[0])], details
    scale = POINTS / ours[0]["examples"]
    seconds = scale * sum(record["seconds"] for record in ours) / len(ours)
    result: list[Row] = []
    for peer, record in theirs.items():
        if "error" in record:
            result.append(Row(f"{label}, {peer}", note=record["error"]))
            continue
        taken = record["seconds"] * record["scale"]
        note = f"from {record['examples']} points, peak {record['peak_bytes'] / 1e6:.0f} MB"
        if peer in errors:
            note += f", relative difference {errors[peer]:.0e}"
        result.append(Row(f"{label}, {peer}", taken, taken / seconds, note=note))
    given = problem(network)
    jacobians = (
        given.x.shape[0] * NETWORKS[network].classes * sum(v.numel() for v in given.parameters.values())
    )
    note = f"peak {max(record['peak_bytes'] for record in ours) / 1e6:.0f} MB; the Jacobians of the "
    note += f"{len(given.x)} points would take {4 * jacobians / 1e6:.0f} MB"
    default = next((row.seconds for row in result if row.name.endswith(", laplace")), None)
    if default is None:
        return [*result, Row(f"{label}, linnet", seconds, note=note)], details
    claim = f"ratio to laplace-torch's default; {note}"
    return [*result, Row(f"{label}, linnet", seconds, default / seconds, ">=", 10.0, claim)], details


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    add_curvature_peers(result)
    add_child_options(result)
    result.add_argument("--networks", nargs="*", choices=("lenet", "resnet20"), default=["lenet", "resnet20"])
    result.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    result.add_argument("--timeout", type=float, default=900.0, help="seconds for one measurement")
    options = result.parse_args()
    if not options.peer_python and not options.child:
        result.error("--peer-python is needed: the python of an environment with laplace-torch")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options, MAKERS)
        return
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for network in options.networks:
        for task in options.tasks:
            more, details[f"{network} {task}"] = compare(options, task, network)
            rows += more
            print(json.dumps(details[f"{network} {task}"]), file=sys.stderr, flush=True)
    publish(f"Variances of {POINTS} predictions; ratios are to linnet", rows, options.json, cells=details)


if __name__ == "__main__":
    main()
