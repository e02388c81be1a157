r"""Exact influence of N training on T test images against kronfluence's EKFAC scores.

    python benchmarks/influence.py --peer-python peer/bin/python --json influence.json
    python benchmarks/influence.py --parts scores changes --folder runs/influence

A ResNet-20 pretrained on CIFAR-10 is fitted to EuroSAT at 32 x 32. kronfluence 1.0.1 gives one number a pair,
the derivative of the test loss along its EKFAC approximation; linnet the same number with the exact change of
the weights, or the change of every output of every test image when a training image is left out, (N, T, C).
Both start from trained weights, linnet from a fit with its Cholesky factor; the inverse of the kernel counts
as part of the answer. kronfluence's time is that of its factors and its scores, in the environment of
``curvature_peers.py``. With ``--peer-share`` below 1 it is measured on a share of the training images; its
covariances, eigenvalues and scores are proportional to them, its decompositions are not.

What is measured is kept in ``--folder``, so that ``--parts`` may be run one after the other: the fit, the
peer, scores of the test loss, the weight changes and answers from them, all outputs from nothing, EKFAC,
all outputs of ``linnet.adapt``, whose kernel is N × N, and the agreement with brute force: the
linear system solved again without an example, from its own Cholesky factor, for ``--brute`` examples at
``--brute-tests`` test images.

Floors are operation counts at the rate of float32 products of the same run: scores need at least one product
of T gradients with the N·C rows of J, 2 T·N·C·P.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from curvature_peers import add_curvature_peers
from eurosat import task
from measure import Row, parser, publish, setup, sgemm_rate, timed
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.app.models import load_model
from linnet.linear.dual import DualSystem

CLAIM, EXACT, NEAR = 10.0, 0.9999, 0.98
ALPHA = 15.0
PARTS = ("fit", "peer", "scores", "changes", "outputs", "ekfac", "adapted", "agreement")


class Kept:
    """The problem, the fit and what has been measured, in a folder.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path, self.problem = self.folder / "measured.json", self.folder / "problem.pt"
        self.measured: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        if not self.problem.exists():
            made = task(options.examples, options.tests)
            given = {
                "networks": str(made.networks),
                "state": made.model.state_dict(),
                "x": made.x.clone(),
                "y": made.y.clone(),
                "test_x": made.test_x.clone(),
                "test_y": made.test_y.clone(),
            }
            torch.save(given, self.problem)
        self.given = torch.load(self.problem, weights_only=True)
        self.n, self.t = len(self.given["y"]), len(self.given["test_y"])

    def keep(self, name: str, value: Any) -> None:
        """Remember a measurement."""
        self.measured[name] = value
        self.path.write_text(json.dumps(self.measured, indent=2) + "\n")

    def save(self, name: str, value: Tensor) -> None:
        """Keep a tensor for the agreement."""
        torch.save(value.clone(), self.folder / f"{name}.pt")

    def tensor(self, name: str) -> Tensor | None:
        """A tensor that was kept, ``None`` if it was not."""
        path = self.folder / f"{name}.pt"
        found: Tensor | None = torch.load(path, weights_only=True) if path.exists() else None
        return found

    def model(self) -> nn.Module:
        """The network with its head."""
        made = load_model(f"{self.given['networks']}:CifarResNet", model_args={"depth": 20, "classes": 10})
        made.load_state_dict(self.given["state"])
        return made.eval()

    def fit(self) -> Any:
        """The fit, with its factor."""
        made = linnet.load_fit(self.folder / "fit", self.model())
        assert isinstance(made.system, DualSystem)
        assert made.system.factor is not None
        return made


def fit(kept: Kept) -> None:
    """Fit and save."""
    given, options = kept.given, kept.options
    ridge = "loo" if options.ridge == "loo" else float(options.ridge)
    lin = linnet.linearize(kept.model())
    data = given["x"], given["y"]
    seconds, made = timed(lambda: linnet.fit(lin, data, ridge=ridge, solver="dual", memory=options.memory))
    made.save(kept.folder / "fit")
    kept.keep("fit", {"seconds": seconds, "ridge": made.ridge, "parameters": lin.space.dim})


def peer(kept: Kept) -> None:
    """Seconds of kronfluence's steps for all N, extrapolated from its share."""
    options, given = kept.options, dict(kept.given)
    count = round(kept.n * options.peer_share)
    given["x"], given["y"] = given["x"][:count].clone(), given["y"][:count].clone()
    path = kept.folder / "share.pt"
    torch.save(given, path)
    script = str(Path(__file__).with_name("influence_peer.py"))
    command = [options.peer_python, script, str(path), str(options.threads), "128"]
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    seconds: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    factor = kept.n / count
    every = {name: value * (1 if name == "decompositions" else factor) for name, value in seconds.items()}
    kept.keep("peer", {"seconds": every, "share": options.peer_share})


def scores(kept: Kept) -> None:
    """Scores of the test loss, from nothing."""
    given, made = kept.given, kept.fit()
    seconds, found = timed(
        lambda: audit.loss_influence(made, given["test_x"], given["test_y"], memory=kept.options.memory)
    )
    kept.save("scores", found)
    kept.keep("scores", {"seconds": seconds})


def changes(kept: Kept) -> None:
    """The weight changes, and what they answer."""
    given, made, memory = kept.given, kept.fit(), kept.options.memory
    x, y = given["test_x"], given["test_y"]
    seconds, known = timed(lambda: audit.weight_changes(made, memory=memory))
    kept.keep("changes", {"seconds": seconds, "bytes": known.numel() * known.element_size()})
    scoring, same = timed(lambda: audit.loss_influence(made, x, y, directions=known, memory=memory))
    kept.save("known scores", same)
    kept.keep("known scores", {"seconds": scoring})
    asking, outputs = timed(lambda: audit.influence(made, x, directions=known, memory=memory))
    kept.save("known outputs", outputs.outputs[:, : kept.options.brute_tests])
    kept.keep("known outputs", {"seconds": asking})


def outputs(kept: Kept) -> None:
    """All outputs, from nothing."""
    made = kept.fit()
    seconds, found = timed(lambda: audit.influence(made, kept.given["test_x"], memory=kept.options.memory))
    kept.save("outputs", found.outputs[:, : kept.options.brute_tests])
    kept.keep("outputs", {"seconds": seconds, "residual": found.residual})


def ekfac(kept: Kept) -> None:
    """All outputs of the first test images by EKFAC and some steps."""
    made, few = kept.fit(), kept.given["test_x"][: kept.options.brute_tests]
    seconds, near = timed(lambda: audit.influence(made, few, "ekfac", memory=kept.options.memory))
    kept.save("EKFAC", near.outputs)
    kept.keep("EKFAC", {"seconds": seconds, "residual": near.residual})


def adapted(kept: Kept) -> None:
    """All outputs of the nested model, which is another one; from its fit alone."""
    given, memory = kept.given, kept.options.memory
    seconds, made = timed(lambda: linnet.adapt(kept.model(), (given["x"], given["y"]), memory=memory))
    kept.keep("adapt", {"seconds": seconds})
    seconds, found = timed(lambda: made.influence(given["test_x"]))
    right = float((made.predict(given["test_x"]).argmax(1) == given["test_y"]).double().mean())
    kept.keep("adapted outputs", {"seconds": seconds, "accuracy": right})
    few = given["test_x"][: kept.options.brute_tests]
    cross, dual, truth = torch.cat(list(made.system.kernel_to_train(few))), made.system.dual, []
    picked = torch.linspace(0, kept.n - 1, kept.options.brute).long().tolist()
    for i in picked:
        keep = torch.ones(dual.n, dtype=torch.bool)
        keep[i] = False
        beta = torch.zeros_like(dual.beta)
        beta[keep] = DualSystem(dual.kernel[keep][:, keep], dual.residual[keep], dual.ridge).beta
        truth.append(cross @ (dual.beta - beta))
    near = correlation(found[picked][:, : len(few)], torch.stack(truth))
    kept.keep("agreement: adapted outputs", near)


def agreement(kept: Kept) -> None:
    """Correlations with F − f₋ᵢ by solving again without each example."""
    made, few = kept.fit(), kept.given["test_x"][: kept.options.brute_tests]
    picked = torch.linspace(0, kept.n - 1, kept.options.brute).long().tolist()
    truth = brute_force(made, few, picked)
    t = len(few)
    y = torch.nn.functional.one_hot(kept.given["test_y"][:t], made.system.c)
    true_scores = torch.einsum("ktc,tc->kt", truth, made.predict(few).double() - ALPHA * y)
    for name in ("scores", "known scores"):
        found = kept.tensor(name)
        if found is not None:
            kept.keep(f"agreement: {name}", correlation(found[picked][:, :t], true_scores))
    for name in ("outputs", "known outputs", "EKFAC"):
        found = kept.tensor(name)
        if found is not None:
            kept.keep(f"agreement: {name}", correlation(found[picked], truth))


def brute_force(made: Any, x: Tensor, examples: list[int]) -> Tensor:
    """F − f₋ᵢ by solving again without each example, (k, T, C)."""
    dual: DualSystem = made.system
    size = dual.n * dual.c
    cross = linnet.spectrum.gram(made.module, x, made.x).reshape(-1, size).double()
    found = []
    for i in examples:
        keep = torch.ones(dual.n, dtype=torch.bool)
        keep[i] = False
        rows = keep.repeat_interleave(dual.c)
        beta = torch.zeros(size, dtype=torch.float64)
        beta[rows] = DualSystem(dual.kernel[rows][:, rows], dual.residual[keep], dual.ridge).beta.reshape(-1)
        found.append((cross @ (dual.beta.reshape(-1) - beta)).view(len(x), dual.c))
    return torch.stack(found)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's."""
    pair = torch.stack([a.reshape(-1).double(), b.reshape(-1).double()])
    return float(torch.corrcoef(pair)[0, 1])


def table(kept: Kept, rate: float) -> list[Row]:
    """What has been measured so far."""
    found, n, t = kept.measured, kept.n, kept.t
    theirs = found.get("peer", {}).get("seconds", {})
    total = sum(theirs.values())
    rows = [Row(f"kronfluence 1.0.1, {name}", seconds) for name, seconds in theirs.items()]
    share = found.get("peer", {}).get("share", 1.0)
    rows += [Row("kronfluence 1.0.1, all", total, note=f"{share:.0%} measured")] if theirs else []
    if "fit" in found:
        note = f"ρ = {found['fit']['ridge']:.3g}; both start after it"
        rows.append(Row("linnet, the fit", found["fit"]["seconds"], note=note))
        p, size = found["fit"]["parameters"], n * (int(kept.given["y"].max()) + 1)
        floor = 2 * t * size * p / rate
        note = f"{2 * t * size * p:.3g} operations at {rate / 1e9:.0f} GFLOP/s"
        ratio = total / floor if theirs else None
        rows.append(Row("floor of exact scores that know only the fit", floor, ratio, note=note))
    if "adapt" in found:
        rows.append(Row("linnet.adapt", found["adapt"]["seconds"]))
    names = {
        "scores": "scores of the test loss, as kronfluence's but exact",
        "changes": "weight changes δ − δ₋ᵢ, once a fit",
        "known scores": "scores of the test loss, weight changes known",
        "outputs": "all outputs (N, T, C)",
        "known outputs": "all outputs (N, T, C), weight changes known",
        "adapted outputs": "all outputs (N, T, C) of adapt, knowing its fit",
    }
    for key, name in names.items():
        if key in found:
            seconds = found[key]["seconds"]
            bound = None if key == "changes" else CLAIM
            note = f"test accuracy {100 * found[key]['accuracy']:.1f} %" if "accuracy" in found[key] else ""
            rows.append(Row(name, seconds, total / seconds if theirs else None, ">=", bound, note))
    for key, value in found.items():
        if key.startswith("EKFAC"):
            note = f"{kept.options.brute_tests} test images, residual {value['residual']:.1e}"
            rows.append(Row(f"{key}, all outputs", value["seconds"], note=note))
    for key, value in found.items():
        if key.startswith("agreement: "):
            bound = NEAR if "EKFAC" in key else EXACT
            name = f"correlation with {kept.options.brute} retrainings, {key.removeprefix('agreement: ')}"
            rows.append(Row(name, None, value, ">=", bound))
    return rows


def main() -> None:
    """Measure and publish."""
    arguments = parser(__doc__ or "", threads=2)
    add_curvature_peers(arguments)
    arguments.add_argument("--examples", type=int, default=1000)
    arguments.add_argument("--tests", type=int, default=500)
    arguments.add_argument("--ridge", default="loo", help="a number, or loo for leave-one-out")
    arguments.add_argument("--peer-share", type=float, default=1.0, help="of the training images")
    arguments.add_argument("--brute", type=int, default=4, help="examples left out by brute force")
    arguments.add_argument("--brute-tests", type=int, default=20, help="test images of brute force and EKFAC")
    arguments.add_argument("--memory", default="8GB")
    arguments.add_argument("--folder", default="runs/influence", help="where fits and figures are kept")
    arguments.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = arguments.parse_args()
    setup(options.threads)
    kept = Kept(options)
    calls = {"fit": fit, "peer": peer, "scores": scores, "changes": changes, "outputs": outputs,
             "ekfac": ekfac, "adapted": adapted, "agreement": agreement}  # fmt: skip
    for part in PARTS:
        if part in options.parts and (part != "peer" or options.peer_python):
            calls[part](kept)
    rate = sgemm_rate(2048, 3)
    sizes = f"{kept.n} training and {kept.t} test images"
    publish(f"Influence, ResNet-20, {sizes}", table(kept, rate), options.json, sgemm=rate)


if __name__ == "__main__":
    main()
