"""Curvature of linnet against its peers: seconds, and peak memory. Claims in the table.

    python benchmarks/curvature_speed.py --peer-python peer/bin/python --json curvature_speed.json

The environment of the peers is described in ``curvature_peers.py``. LeNet (N = 1000), ResNet-20 (N = 500) and
a transformer encoder of four layers (N = 256, 64 tokens), ten classes; Kronecker factors with exact and
sampled expectations, EKFAC, the exact diagonal, and products with 1 and 16 vectors. linnet is measured before
and after the peers of every task, each time in a process of its own like every peer, on the same parameters:
for factored and diagonal structures those of linear layers and convolutions, which is all that every peer
knows, for products all. Claims, from the medians:

- at least as fast as the fastest peer that finishes, and twice as fast as laplace-torch's default;
- peak memory no more than that of the leanest peer;
- exact KFAC at most 1.3 times C + 1 backward passes that form no weight gradients (with their forward pass).

What linnet takes for all parameters, normalizations included, stands beside without a claim. Where
definitions coincide the results are compared: exact KFAC and EKFAC with curvlinops' (product with three
vectors), the diagonal with BackPACK's, the products with curvlinops' and BackPACK's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from curvature_contestants import Job
from curvature_networks import LARGE, NETWORKS, Parameters, Problem
from curvature_peers import (
    CONTESTANTS,
    TASKS,
    add_child_options,
    add_curvature_peers,
    child,
    conditions,
    measure_cell,
    run_child,
    skipped,
    whole_seconds,
)
from measure import Row, parser, publish, relative_error
from torch import nn

MEASURED = tuple(task for task in TASKS if task != "reference")
COMPARED = {
    "kfac-exact": ("curvlinops",),
    "ekfac-exact": ("curvlinops",),
    "diagonal-exact": ("backpack", "laplace-asdl"),
    "ggn-1": ("curvlinops", "backpack"),
    "ggn-16": ("curvlinops", "backpack"),
}
PEER_SCRIPT = Path(__file__).with_name("curvature_peers.py")


def linnet_job(task: str, given: Problem, batch: int) -> Job:
    """The contestant of linnet: the same call for every structure."""
    import linnet

    structure, _, kind = task.partition("-")
    classification = isinstance(given.loss, nn.CrossEntropyLoss)
    likelihood = linnet.likelihoods.Categorical() if classification else linnet.likelihoods.Gaussian()
    names = list(given.names)
    data = (given.x, given.y)
    if structure == "ggn":
        operator = linnet.curvature(
            linnet.linearize(given.model, params=names), data, likelihood, structure="matrix-free"
        )
        vectors = given.vectors(int(kind))
        matrix = torch.cat([value.flatten(0, -2) for value in vectors.values()])
        return Job(lambda: operator @ matrix, lambda product: split(product, given))

    def run() -> Any:
        chosen = linnet.linearize(given.model, params=names)  # linnet chooses its batches itself
        return linnet.curvature(chosen, data, likelihood, structure=structure, expectation=kind)

    if structure == "diagonal":
        return Job(run, lambda operator: split(operator.diagonal(), given))
    matrix = torch.cat([value.flatten(0, -2) for value in given.vectors(3).values()])
    return Job(run, lambda operator: split(operator @ matrix, given))


def split(value: Any, given: Problem) -> Parameters:
    """Flat rows (P,) or (P, K) as tensors by parameter; tensors by parameter as they are."""
    if isinstance(value, dict):
        return {name: part.detach() for name, part in value.items()}
    tensors = given.parameters
    parts = value.detach().split([tensor.numel() for tensor in tensors.values()])
    shapes = zip(tensors.items(), parts, strict=True)
    return {name: part.unflatten(0, tensor.shape) for (name, tensor), part in shapes}


MAKERS = {"linnet": linnet_job}


def difference(ours: Path, theirs: Path) -> float | None:
    """Largest relative error over the parameters, or None where one of them left nothing to compare."""
    if not (ours.exists() and theirs.exists()):
        return None
    left, right = (torch.load(path) for path in (ours, theirs))
    return max(relative_error(left[name], right[name]) for name in right)


def measure_linnet(
    options: argparse.Namespace, task: str, network: str, parameters: str, save: Path | None
) -> dict[str, Any]:
    """One task by linnet, in a process of its own."""
    words = ["--batch", str(options.batch), "--parameters", parameters, "--threads", str(options.threads)]
    words += ["--repeats", str(options.repeats), "--limit", str(options.limit)]
    words += [] if save is None else ["--save", str(save)]
    cell = ("linnet", task, network)
    return run_child(sys.executable, Path(__file__), cell, *words, timeout=options.timeout)


def compare(
    options: argparse.Namespace, task: str, network: str, reference: dict[str, Any]
) -> tuple[list[Row], dict[str, Any]]:
    """All contestants of one task on one network, linnet's rows last."""
    parameters = conditions("linnet", task, network)[2]
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, "linnet.pt")
        ours = [measure_linnet(options, task, network, parameters, mine)]
        theirs: dict[str, dict[str, Any]] = {}
        errors: dict[str, float | None] = {}
        for peer in CONTESTANTS:
            if skipped(peer, task, network):
                continue
            kept = Path(folder, f"{peer}.pt") if peer in COMPARED.get(task, ()) else None
            theirs[peer] = measure_cell(options, (peer, task, network), kept, PEER_SCRIPT)
            # a peer that is measured on fewer examples has another sum
            if kept is not None and theirs[peer]["scale"] == 1:
                errors[peer] = difference(mine, kept)
        ours.append(measure_linnet(options, task, network, parameters, None))
    every = measure_linnet(options, task, network, "all", None) if parameters != "all" else None
    details = {"linnet": ours, "linnet_all": every, "peers": theirs, "differences": errors}
    return rows(f"{network}: {task}", details, reference), details


def rows(label: str, details: dict[str, Any], reference: dict[str, Any]) -> list[Row]:
    """The table of one task: the peers with their ratio to linnet, then linnet's claims."""
    failures = [record["error"] for record in details["linnet"] if "error" in record]
    if failures:
        return [Row(f"{label}, linnet", None, float("inf"), "<=", 1.0, failures[0])]
    seconds = sum(record["seconds"] for record in details["linnet"]) / len(details["linnet"])
    peak = max(record["peak_bytes"] for record in details["linnet"])
    result: list[Row] = []
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for peer, record in details["peers"].items():
        if "error" in record:
            result.append(Row(f"{label}, {peer}", note=record["error"]))
            continue
        times[peer] = whole_seconds(record)
        peaks[peer] = record["peak_bytes"]
        note = f"batch {record['batch']}, peak {peaks[peer] / 1e6:.0f} MB"
        if details["differences"].get(peer) is not None:
            note += f", relative difference {details['differences'][peer]:.0e}"
        if record["scale"] != 1:
            note += f", extrapolated from {record['examples']} examples"
        result.append(Row(f"{label}, {peer}", times[peer], times[peer] / seconds, note=note))
    note = f"peak {peak / 1e6:.0f} MB, {seconds / reference['epoch']:.2f} epochs"
    if times:
        best = min(times, key=times.__getitem__)
        claim = f"ratio to the fastest, {best}; {note}"
        result.append(Row(f"{label}, linnet", seconds, times[best] / seconds, ">=", 1.0, claim))
    if "laplace" in times:
        ratio = times["laplace"] / seconds
        result.append(Row(f"{label}, linnet", seconds, ratio, ">=", 2.0, "ratio to laplace-torch's default"))
    if peaks:
        lean = min(peaks, key=peaks.__getitem__)
        claim = f"peak memory over that of the leanest, {lean}"
        result.append(Row(f"{label}, linnet", None, peak / max(peaks[lean], 1), "<=", 1.0, claim))
    if label.endswith("kfac-exact") and "ekfac" not in label:
        ratio = seconds / (reference["passes"] * reference["scale"])
        result.append(Row(f"{label}, linnet", seconds, ratio, "<=", 1.3, "over C + 1 bare backward passes"))
    every = details["linnet_all"]
    if every is not None:
        taken = every.get("seconds")
        result.append(Row(f"{label}, linnet, all parameters", taken, note=every.get("error", "")))
    return result


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=3)
    add_curvature_peers(result)
    add_child_options(result)
    result.add_argument("--networks", nargs="*", choices=LARGE, default=list(LARGE))
    result.add_argument("--tasks", nargs="*", choices=MEASURED, default=list(MEASURED))
    result.add_argument("--timeout", type=float, default=900.0, help="seconds for one measurement")
    options = result.parse_args()
    if not options.peer_python and not options.child:
        result.error("--peer-python is needed: the python of an environment with the peers")
    return options


def main() -> None:
    """Entry point."""
    options = arguments()
    if options.child:
        child(options, MAKERS)
        return
    every: list[Row] = []
    details: dict[str, Any] = {}
    for network in options.networks:
        reference = measure_cell(options, ("torch", "reference", network), None, PEER_SCRIPT)
        if "error" in reference:
            raise SystemExit(f"the reference did not run: {reference['error']}")
        note = f"forward {reference['forward']:.3g} s, C + 1 = {NETWORKS[network].classes + 1} bare backward "
        note += f"passes {reference['passes']:.3g} s, sgemm {reference['sgemm'] / 1e9:.0f} GFLOP/s"
        every.append(Row(f"{network}: one training epoch", reference["epoch"], note=note))
        details[network] = {"reference": reference}
        for task in options.tasks:
            more, details[network][task] = compare(options, task, network, reference)
            every += more
            print(json.dumps({network: {task: details[network][task]}}), file=sys.stderr, flush=True)
    publish("Curvature against its peers; a peer's ratio is to linnet", every, options.json, cells=details)


if __name__ == "__main__":
    main()
