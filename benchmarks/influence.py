r"""Exact influence of N training on T test images against kronfluence's EKFAC scores.

    python benchmarks/influence.py --peer-python peer/bin/python --json influence.json

A ResNet-20 pretrained on CIFAR-10 is fitted to EuroSAT at 32 x 32. linnet gives the change of every output
of every test image when a training image is left out, (N, T, C), exactly; kronfluence 1.0.1 one number a
pair, the derivative of the test loss along its EKFAC approximation. Both start from trained weights;
kronfluence's time is that of its factors and its scores, in the environment of ``curvature_peers.py``. It is
measured on a share of the training images (``--peer-share``); its covariances, eigenvalues and scores are
proportional to them, its decompositions are not.

Correlations are with brute force: the linear system solved again without an example, from its own Cholesky
factor, for ``--brute`` examples.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from curvature_peers import add_curvature_peers
from eurosat import Task, task
from measure import Row, parser, publish, setup, sgemm_rate
from torch import Tensor

import linnet
from linnet.methods import audit
from linnet.methods.fitting.dual import Dual

CLAIM, EXACT, NEAR = 10.0, 0.9999, 0.98


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def peer(problem: Task, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of kronfluence's steps for all N, extrapolated from its share."""
    count = max(options.tests // 4, round(options.examples * options.peer_share))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.pt"
        given = {
            "networks": str(problem.networks),
            "state": problem.model.state_dict(),
            "x": problem.x[:count].clone(),
            "y": problem.y[:count].clone(),
            "test_x": problem.test_x,
            "test_y": problem.test_y,
        }
        torch.save(given, path)
        script = str(Path(__file__).with_name("influence_peer.py"))
        command = [options.peer_python, script, str(path), str(options.threads), "128"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        )
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    seconds: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    factor = options.examples / count
    return {name: value * (1 if name == "decompositions" else factor) for name, value in seconds.items()}


def brute_force(fit: Any, x: Tensor, examples: list[int]) -> Tensor:
    """F − f₋ᵢ by solving again without each example, (k, T, C)."""
    dual: Dual = fit.system
    size = dual.n * dual.c
    cross = linnet.spectrum.gram(fit.module, x, fit.x).reshape(-1, size).double()
    found = []
    for i in examples:
        keep = torch.ones(dual.n, dtype=torch.bool)
        keep[i] = False
        rows = keep.repeat_interleave(dual.c)
        beta = torch.zeros(size, dtype=torch.float64)
        beta[rows] = Dual(dual.kernel[rows][:, rows], dual.residual[keep], dual.ridge).beta.reshape(-1)
        found.append((cross @ (dual.beta.reshape(-1) - beta)).view(len(x), dual.c))
    return torch.stack(found)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's."""
    pair = torch.stack([a.reshape(-1).double(), b.reshape(-1).double()])
    return float(torch.corrcoef(pair)[0, 1])


def measure(options: argparse.Namespace) -> list[Row]:
    """Everything, peer first and in the same run."""
    problem = task(options.examples, options.tests)
    theirs = peer(problem, options) if options.peer_python else {}
    total = sum(theirs.values())
    lin = linnet.linearize(problem.model)
    fitting, fit = timed(
        lambda: linnet.fit(lin, (problem.x, problem.y), ridge="loo", solver="dual", memory=options.memory)
    )
    x, memory = problem.test_x, options.memory
    whole, exact = timed(lambda: audit.influence(fit, x, "exact", memory=memory))
    changing, changes = timed(lambda: audit.weight_changes(fit, memory=memory))
    asking, again = timed(lambda: audit.influence(fit, x, directions=changes, memory=memory))
    y = problem.test_y
    scoring, scores = timed(lambda: audit.loss_influence(fit, x, y, memory=memory))
    known, same = timed(lambda: audit.loss_influence(fit, x, y, directions=changes, memory=memory))
    picked = torch.linspace(0, options.examples - 1, options.brute).long().tolist()
    truth = brute_force(fit, x, picked)
    slope = fit.predict(x).double() - 15.0 * torch.nn.functional.one_hot(y, fit.system.c)
    true_scores = torch.einsum("ktc,tc->kt", truth, slope)

    def row(name: str, seconds: float, note: str = "", bound: float | None = CLAIM) -> Row:
        return Row(name, seconds, total / seconds if theirs else None, ">=", bound, note)

    def agreement(name: str, found: Tensor, bound: float) -> Row:
        reference = truth if found.ndim == 3 else true_scores
        ratio = correlation(found[picked], reference)
        return Row(f"correlation with {options.brute} retrainings, {name}", None, ratio, ">=", bound)

    rows = [Row(f"kronfluence 1.0.1, {name}", seconds) for name, seconds in theirs.items()]
    rows += [Row("kronfluence 1.0.1, all", total)] if theirs else []
    rows += [
        Row("linnet, the fit with its ridge (both start after it)", fitting, note=f"ρ = {fit.ridge:.3g}"),
        row("exact change of the weights, scores of the test loss as kronfluence's", scoring),
        row("the same, weight changes known", known),
        row("exact influence, all outputs", whole, f"residual {exact.residual:.1e}"),
        row("weight changes δ − δ₋ᵢ, once a fit", changing, bound=None),
        row("exact influence from them, all outputs", asking),
        agreement("scores of the test loss", scores, EXACT),
        agreement("scores, weight changes known", same, EXACT),
        agreement("exact", exact.outputs, EXACT),
        agreement("from weight changes", again.outputs, EXACT),
    ]
    few = x[: options.ekfac_tests]
    for steps in options.steps if len(few) else ():
        name = f"EKFAC and {steps} steps" if steps else "EKFAC alone"
        seconds, near = timed(lambda n=steps: audit.influence(fit, few, "ekfac", steps=n, memory=memory))
        note = f"{len(few)} test images, residual {near.residual:.1e}"
        rows.append(Row(f"{name}, all outputs", seconds, note=note))
        ratio = correlation(near.outputs[picked], truth[:, : len(few)])
        rows.append(Row(f"correlation with {options.brute} retrainings, {name}", None, ratio, ">=", NEAR))
    return rows


def main() -> None:
    """Measure and publish."""
    arguments = parser(__doc__ or "", threads=1)
    add_curvature_peers(arguments)
    arguments.add_argument("--examples", type=int, default=1000)
    arguments.add_argument("--tests", type=int, default=500)
    arguments.add_argument("--peer-share", type=float, default=0.25, help="of the training images")
    arguments.add_argument("--brute", type=int, default=4, help="examples left out by brute force")
    arguments.add_argument("--steps", type=int, nargs="*", default=[0, 8], help="after EKFAC")
    arguments.add_argument("--ekfac-tests", type=int, default=20, help="test images for EKFAC, 0 for none")
    arguments.add_argument("--memory", default="8GB")
    options = arguments.parse_args()
    setup(options.threads)
    rows = measure(options)
    sizes = f"{options.examples} training and {options.tests} test images"
    publish(f"Influence, ResNet-20, {sizes}", rows, options.json, sgemm=sgemm_rate(2048, 3))


if __name__ == "__main__":
    main()
