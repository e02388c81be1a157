r"""Time to within 1 % of the optimal objective: linnet's plans against LQF's own recipe.

    python benchmarks/optimum.py --examples 300 --ridges paper 1 --json optimum.json
    python benchmarks/optimum.py --examples 300 --ridges paper --parts plans --folder runs/optimum

ResNet-20 pretrained on CIFAR-10, EuroSAT at 32 x 32, Leaky ReLU, all parameters, squared loss to α-scaled
targets: one convex objective, ½ Σ ‖t − f‖² + ½ ρ ‖δ‖². ``--ridges paper`` is ρ = N λ with the larger of the
two weight decays of Achille et al. (CVPR 2021, section A.2), λ = 10⁻⁴; a number is ρ over the mean of the
kernel's diagonal, the scale on which leave-one-out chooses.

Their recipe is SGD with momentum 0.9, batches of 28 and a K-FAC preconditioner estimated once, here at each
of ``--rates``. Its steps are timed in stretches; after each stretch the objective is looked at, at no charge,
until it is within 1 % of the optimum or a run's ``--limit`` seconds are spent. linnet's plans are the dual
(kernel, Cholesky factor, weights) and, unless ρ is the paper's, conjugate gradients at the loosest of
``--tolerances`` that ends within 1 %. The preparation of the network counts for everybody, the estimate of
K-FAC for the recipe, the scaling of its learning rates does not.

What is measured is kept in ``--folder``; parts may be run one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eurosat import Task as Images
from eurosat import task
from measure import Row, parser, publish, setup, sgemm_rate, timed
from torch import Tensor

import linnet
from linnet.curvatures.curvature import default_damping
from linnet.errors import NumericalError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.finetune import Call, Prepared, Task, frozen_curvature, largest_eigenvalue
from linnet.finetuning.recipes import Recipe
from linnet.finetuning.trainer import ExampleSet, Objective, Optimization, Trainer
from linnet.fitting import CG
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.tangent.linearized import Linearized

ALPHA, CLASSES = 15.0, 10
CLOSE = 1.01
LARGE = 5000  # N·C up to which the larger factor is claimed
PAPER = 1e-4  # λ
BATCH = 28
PARTS = ("plans", "recipe")
VIEW = Augmentation()
RECIPE = Recipe("lqf", head="keep")


class Setting:
    """One size and one ridge, with what has been measured of it.

    Args:
        examples: N.
        ridge: ``"paper"``, or ρ over the mean diagonal of the kernel.
        options: Of the command line.
    """

    def __init__(self, examples: int, ridge: str, options: argparse.Namespace) -> None:
        self.options, self.n, self.asked = options, examples, ridge
        self.problem: Images = task(examples, 1)
        self.data = self.problem.x, self.problem.y
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{examples}_{ridge}.json"
        self.measured: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        if "ridge" not in self.measured:
            self.keep("ridge", PAPER * examples if ridge == "paper" else float(ridge) * self.diagonal())

    @property
    def ridge(self) -> float:
        """ρ."""
        return float(self.measured["ridge"])

    @property
    def goal(self) -> float:
        """The optimal objective."""
        return float(self.measured["plans"]["optimum"])

    def diagonal(self) -> float:
        """Mean of the kernel's diagonal, from a few images: not part of any plan's time."""
        lin = linnet.linearize(linnet.surgery.leaky_relu(self.problem.model, 0.2), "all")
        return float(lin.kernel(self.problem.x[:20], form="trace").diagonal().mean()) / CLASSES

    def keep(self, name: str, value: Any) -> None:
        """Remember a measurement."""
        self.measured[name] = value
        self.path.write_text(json.dumps(self.measured, indent=2) + "\n")

    def prepared(self) -> Prepared:
        """The network ready, as the recipe has it."""
        return Prepared(self.call, ExampleSet(self.data, torch.device("cpu")), VIEW)

    @property
    def call(self) -> Call:
        """The call that would train it."""
        return Call(self.problem.model, RECIPE, Task(CLASSES, True, self.problem.y))

    def objective(self, predictions: Tensor, delta: dict[str, Tensor]) -> float:
        """½ Σ ‖t − f‖² + ½ ρ ‖δ‖²."""
        targets = ALPHA * torch.nn.functional.one_hot(self.problem.y, predictions.shape[1]).double()
        size = sum(float(value.detach().double().square().sum()) for value in delta.values())
        return 0.5 * float((targets - predictions.double()).square().sum()) + 0.5 * self.ridge * size

    @torch.no_grad()
    def reached(self, module: Linearized) -> float:
        """The objective of a linear model over its optimum."""
        outputs = torch.cat([module(part) for part in self.problem.x.split(100)])
        return self.objective(outputs, dict(module.delta)) / self.goal


def plans(setting: Setting) -> None:
    """The dual, and conjugate gradients."""
    preparing, ready = timed(setting.prepared)
    function, memory = ready.module.function, setting.options.memory
    dual, fit = timed(
        lambda: linnet.fit(
            Linearized(function), setting.data, ridge=setting.ridge, solver="dual", memory=memory
        )
    )
    optimum = setting.objective(fit.predict(setting.problem.x), fit.delta)
    start = setting.objective(torch.cat([ready.module.base(setting.problem.x)]), {}) / optimum
    found = {
        "preparing": preparing,
        "dual": preparing + dual,
        "certificate": fit.summary()["certificate"],
        "parts": fit.summary()["seconds"],
        "optimum": optimum,
        "start": start,
    }
    setting.keep("plans", found)
    if setting.asked == "paper":
        return
    for tolerance in setting.options.tolerances:
        seconds, fit = timed(
            lambda t=tolerance: linnet.fit(
                Linearized(function), setting.data, ridge=setting.ridge, solver=CG(tolerance=t)
            )
        )
        reached = setting.objective(fit.predict(setting.problem.x), fit.delta) / optimum
        found |= {"cg": preparing + seconds, "tolerance": tolerance, "cg reached": reached}
        if reached <= CLOSE:
            break
    setting.keep("plans", found)


def preconditioner(setting: Setting, module: Linearized) -> tuple[float, KroneckerPreconditioner]:
    """K-FAC of the frozen problem, and the seconds of its estimate."""
    examples, decay = ExampleSet(setting.data, torch.device("cpu")), setting.ridge / setting.n
    begin = time.perf_counter()
    curvature = frozen_curvature(module, setting.call, examples, VIEW)
    damping = default_damping(curvature, 1 / setting.n) + decay
    before = KroneckerPreconditioner(curvature, module.delta, damping)
    return time.perf_counter() - begin, before


def trainer_of(setting: Setting, module: Any, examples: ExampleSet, rate: float, decay: float) -> Trainer:
    """SGD of the recipe on a module."""
    objective = Objective("squared", CLASSES, ALPHA, decay)
    return Trainer(module, examples, objective, Optimization(rate, batch_size=BATCH))


def recipe(setting: Setting) -> None:
    """Seconds and steps of the network's own training steps to within 1 %, at each rate."""
    preparing, ready = timed(setting.prepared)
    module = ready.module
    assert isinstance(module, Linearized)
    estimating, before = preconditioner(setting, module)
    before.gain = 1 / max(largest_eigenvalue(module, setting.problem.x[:256], before), 1.0)
    found = dict(setting.measured.get("recipe", {}))
    examples, decay = ExampleSet(setting.data, torch.device("cpu")), setting.ridge / setting.n
    for rate in setting.options.rates:
        fresh = Linearized(module.function)
        trainer = trainer_of(setting, fresh, examples, rate, decay)
        trainer.preconditioner = KroneckerPreconditioner(before.curvature, fresh.delta, before.damping)
        trainer.preconditioner.gain = before.gain
        spent = preparing + estimating
        curve: list[tuple[int, float, float]] = []
        while not curve or spent < setting.options.limit:
            try:
                spent += stretch(trainer, setting.options.stretch)
                curve.append((trainer.step, spent, setting.reached(fresh)))
            except NumericalError:
                curve.append((trainer.step, spent, math.inf))
            if not CLOSE < curve[-1][2] < 1e6:
                break
        found[f"{rate:g}"] = {"estimating": estimating, "curve": curve}
        setting.keep("recipe", found)


def stretch(trainer: Trainer, steps: int) -> float:
    """Seconds of some more steps."""
    trainer.optimization = replace(trainer.optimization, steps=trainer.step + steps)
    return timed(trainer.run)[0]


def table(setting: Setting) -> list[Row]:
    """What has been measured so far."""
    found, name = setting.measured, f"N = {setting.n}, ρ = {setting.ridge:.3g}"
    if "plans" not in found:
        return []
    made = found["plans"]
    ways = {"dual": made["dual"]} | ({"conjugate gradients": made["cg"]} if "cg" in made else {})
    start = f"objective at the start {made['start']:.4g} times the optimum"
    rows = [Row(f"{name}: dual", made["dual"], note=f"{start}, certificate {made['certificate']:.1e}")]
    if "cg" in made:
        note = f"tolerance {made['tolerance']:g}, objective {made['cg reached']:.4f}"
        rows.append(Row(f"{name}: conjugate gradients", made["cg"], note=note))
    best, theirs, arrived = min(ways.values()), math.inf, False
    for rate, run in found.get("recipe", {}).items():
        steps, seconds, at = run["curve"][-1]
        lowest = min(point[2] for point in run["curve"])
        note = f"{steps} steps, objective {at:.4g}, lowest {lowest:.4g}"
        rows.append(Row(f"{name}: recipe, η = {rate}", seconds, note=note))
        if at <= CLOSE:
            theirs, arrived = min(theirs, seconds) if arrived else seconds, True
        elif not arrived and at < 1e6:
            theirs = min(theirs, seconds)
    if found.get("recipe"):
        bound = 5.0 if CLASSES * setting.n <= LARGE else 3.0
        note = "" if arrived else "no rate arrived: a lower bound"
        rows.append(Row(f"{name}: best plan against the best rate", best, theirs / best, ">=", bound, note))
    return rows


def main() -> None:
    """Measure and publish."""
    arguments = parser(__doc__ or "", threads=2)
    arguments.add_argument("--examples", type=int, nargs="+", default=[300, 1000])
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.03, 0.01])
    arguments.add_argument(
        "--ridges",
        nargs="+",
        default=["paper", "1"],
        help='"paper", or ρ over the mean diagonal of the kernel',
    )
    arguments.add_argument("--tolerances", type=float, nargs="+", default=[0.1, 0.03, 0.01, 1e-3, 1e-4])
    arguments.add_argument("--limit", type=float, default=600.0, help="seconds for each rate")
    arguments.add_argument("--stretch", type=int, default=25, help="steps between two looks")
    arguments.add_argument("--memory", default="8GB")
    arguments.add_argument("--folder", default="runs/optimum", help="where figures are kept")
    arguments.add_argument("--parts", nargs="*", choices=PARTS, default=["plans", "recipe"])
    options = arguments.parse_args()
    setup(options.threads)
    rows = []
    for examples in options.examples:
        for ridge in options.ridges:
            setting = Setting(examples, ridge, options)
            for part, call in (("plans", plans), ("recipe", recipe)):
                if part in options.parts:
                    call(setting)
            rows += table(setting)
    title = "Time to within 1 % of the optimal objective, ResNet-20, EuroSAT"
    publish(title, rows, options.json, sgemm=sgemm_rate(2048, 3))


if __name__ == "__main__":
    main()
