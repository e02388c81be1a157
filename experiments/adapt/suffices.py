"""When does one linearization suffice? What is known before training, and what training then gains.

    python -m experiments.adapt.suffices --sets development more
    python -m experiments.adapt.suffices --sets reported

Every draw is fitted by its probe, by ``linnet.adapt``, and at trained weights whatever the folds say. Beside
the three test accuracies a cell has what is known before any training: samples, classes, features, accuracies
and errors by leave-one-out, the effective number of parameters; and what ten steps of it show: the held-out
error, how far the kernel of the features has drifted, and how far the network is from its linearization. A
logistic model of a few of these, fitted to the development tasks, says how probable it is that training gains
a point; it is judged on tasks that had no part in it, and on networks that are left out of its fit, beside
the rule of ``linnet.adapt(tune=True)``, which has to train on folds to decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import linnet
from experiments.adapt.kept import whatever_folds_say
from experiments.adapt.kernels import SETS, suited
from experiments.adapt.nested import drawn as shots_of
from experiments.adapt.rivals import found_of, loaded
from experiments.adapt.tasks import NETWORKS, Network, Task, pools, samples
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.nested import tuning
from linnet.nested.features import kernels_of
from linnet.spectrum.kernel_matrix import kernel_distance
from linnet.tangent.batch import take
from linnet.tangent.jacobian import linearity_gap

POOL, TESTED = 3000, 1000
WORTH = 1.0  # points of test accuracy that training must gain to be worth its time
# What may foretell that training gains, known before any of it and after ten steps.
TERMS: dict[str, Callable[[Cell], float]] = {
    "samples a class": lambda cell: float(np.log(cell["n"] / cell["classes"])),
    "features by samples": lambda cell: float(np.log(cell["width"] / cell["n"])),
    "effective parameters by samples": lambda cell: cell["parameters"] / cell["n"],
    "accuracy left out": lambda cell: cell["adapt left out"] / 100,
    "error left out": lambda cell: cell["error left out"],
    "gain of earlier layers left out": lambda cell: cell["adapt left out"] - cell["probe left out"],
    "ten steps: fall of the held-out error": lambda cell: cell["ten steps gain"],
    "ten steps: held-out points": lambda cell: cell["ten steps points"],
    "ten steps: drift of the kernel": lambda cell: cell["drift"],
    "ten steps: linearity gap": lambda cell: cell["gap"],
}
CHOSEN = ("ten steps: linearity gap",)  # by the development tasks, each left out of the fit
PENALTY = 0.1  # of the squared coefficients, per cell
STEPS, RATES, SEEN = 10, (1e-4, 1e-3), 32  # of the look ahead: of Adam, and samples on which f is compared


def measured(network: Network, task: Task, shots: int, seed: int, data_dir: str | None) -> dict[str, Any]:
    """What is known before training, and test accuracies with and without it."""
    torch.manual_seed(seed)
    model, prepared = loaded(network, data_dir, "cpu")
    found = found_of(task, data_dir)
    pool, test = pools(found, POOL, TESTED)
    at = pool[shots_of(found.train_y[pool], shots, seed)]
    x, xt = (
        samples(part[rows.numpy()], network, prepared)
        for part, rows in ((found.train_x, at), (found.test_x, test))
    )
    data, truth = (x, found.train_y[at]), found.test_y[test]
    begin = time.process_time()
    probe = linnet.adapt(model, data, weight=0, seed=seed)
    fit = linnet.adapt(model, data, seed=seed)
    middle = time.process_time()
    values = torch.linalg.eigvalsh(fit.system.kernel)
    about = {
        "n": len(at), "classes": found.classes, "width": fit.module.width,
        "parameters": float((values / (values + fit.ridge)).sum()),
        "probe left out": _right(probe.loo(), data[1]), "adapt left out": _right(fit.loo(), data[1]),
        "error left out": float((fit.loo() - fit.targets).square().mean() / fit.targets.var()),
        "probe": _right(probe.predict(xt), truth), "adapt": _right(fit.predict(xt), truth),
    }  # fmt: skip
    begun = time.process_time()
    about |= after_steps(fit, seed)
    begin_training = time.process_time()
    with whatever_folds_say():
        trained = tuning.tuned(fit, seed)
    top = trained.rungs[-1]
    return {
        **about, "trained": _right(trained.predict(xt), truth), "folds gain": top.gain,
        "folds error": top.gain_error, "folds points": top.points,
        "fit seconds": middle - begin, "ten steps seconds": begin_training - begun,
        "training seconds": time.process_time() - begin_training,
    }  # fmt: skip


def after_steps(fit: Any, seed: int) -> dict[str, float]:
    """What a few steps of training without a third of the samples show, at the better of two rates."""
    tries = tuning.Tuning(fit, seed)
    tries.steps = STEPS
    parts, targets, some = tries.parts(0), fit.targets.double(), take(fit.x, slice(0, SEEN))
    start = tries.features

    def kernel_of(network: Any) -> Tensor:
        return kernels_of(network.phi(fit.x), network.width).head

    def held(network: Any) -> tuple[float, float]:
        kernel = tries.kernels(network, share=False).mixed(0.0, fit.earlier, tries.bias)[0]
        found = tuning.held_out(kernel, targets, parts, tuning.RIDGES)
        means = (found - targets[parts[1]]).square().sum(2).mean(1)
        best = int(means.argmin())
        return float(means[best]), _right(found[best], fit.labels[parts[1]])

    first, (error, right) = kernel_of(start), held(start)
    ahead = []
    for rate in RATES:
        network = tries.trained(parts[0], rate)
        after = held(network)
        moved = {name: t - start.function.theta[name] for name, t in network.function.theta.items()}
        ahead.append({
            "ten steps gain": 1 - after[0] / error, "ten steps points": after[1] - right,
            "ten steps rate": rate, "drift": kernel_distance(first, kernel_of(network)),
            "gap": linearity_gap(start.function, some, moved),
        })  # fmt: skip
    return max(ahead, key=lambda one: one["ten steps gain"])


def _right(outputs: Tensor, y: Tensor) -> float:
    """Per cent of right classes."""
    return 100 * float((outputs.argmax(1) == y).double().mean())


# -- the predictor ---------------------------------------------------------------------------------


def gained(cell: Cell) -> float:
    """Points of test accuracy that training gains."""
    return float(cell["trained"] - cell["adapt"])


def by_folds(cell: Cell) -> bool:
    """Whether ``linnet.adapt(tune=True)`` keeps training."""
    return bool(cell["folds points"] >= 0 and cell["folds gain"] > -cell["folds error"])


def fitted(cells: Sequence[Cell], terms: Sequence[str] = CHOSEN) -> Callable[[Cell], float]:
    """The probability that training gains a point, by logistic regression on some cells."""
    rows = np.array([[TERMS[name](cell) for name in terms] for cell in cells])
    center, spread = rows.mean(0), rows.std(0) + 1e-9
    x = (rows - center) / spread
    y = np.array([gained(cell) >= WORTH for cell in cells], float)

    def loss(w: np.ndarray) -> float:
        f = x @ w[:-1] + w[-1]
        return float((np.logaddexp(0, f) - y * f).mean() + PENALTY / 2 * w[:-1] @ w[:-1])

    w = minimize(loss, np.zeros(len(terms) + 1), method="BFGS").x

    def probability(cell: Cell) -> float:
        own = (np.array([TERMS[name](cell) for name in terms]) - center) / spread
        return float(1 / (1 + np.exp(-(own @ w[:-1] + w[-1]))))

    return probability


def judged(pairs: Sequence[tuple[Cell, float]]) -> dict[str, float]:
    """Brier score of probabilities, and of a constant; the area under the curve."""
    p = np.array([told for _, told in pairs])
    y = np.array([gained(cell) >= WORTH for cell, _ in pairs], float)
    ahead = [float(a > b) + 0.5 * float(a == b) for a in p[y == 1] for b in p[y == 0]]
    return {
        "brier": float(((p - y) ** 2).mean()),
        "constant": float(((y.mean() - y) ** 2).mean()),
        "area": float(np.mean(ahead)) if ahead else float("nan"),
    }


def left_out(cells: Sequence[Cell], of: str, terms: Sequence[str] = CHOSEN) -> list[tuple[Cell, float]]:
    """Cells with the probability by those of other tasks, or other networks."""
    found = []
    for name in dict.fromkeys(cell[of] for cell in cells):
        told = fitted([cell for cell in cells if cell[of] != name], terms)
        found += [(cell, told(cell)) for cell in cells if cell[of] == name]
    return found


def policies(cells: Sequence[Cell], told: Callable[[Cell], float]) -> dict[str, tuple[list[float], float]]:
    """Points of each way to decide behind the best of the three by hindsight, and seconds a task."""
    found: dict[str, tuple[list[float], float]] = {}
    ways: dict[str, Callable[[Cell], str]] = {
        "always the probe": lambda cell: "probe",
        "always linear": lambda cell: "adapt",
        "always train": lambda cell: "trained",
        "by folds (tune=True)": lambda cell: "trained" if by_folds(cell) else "adapt",
        "by the predictor": lambda cell: "trained" if told(cell) > 0.5 else "adapt",
    }
    for name, way in ways.items():
        best = [max(cell["probe"], cell["adapt"], cell["trained"]) for cell in cells]
        regret = [most - cell[way(cell)] for most, cell in zip(best, cells, strict=True)]
        trains = [
            name == "by folds (tune=True)" or way(cell) == "trained" for cell in cells
        ]  # folds have to train
        looked = "ten steps seconds" if name == "by the predictor" else None
        seconds = [
            cell["fit seconds"] + (cell[looked] if looked else 0.0) + cell["training seconds"] * trained
            for cell, trained in zip(cells, trains, strict=True)
        ]
        found[name] = regret, float(np.mean(seconds))
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a set of tasks and way to decide."""
    known = [cell for cell in cells if cell["set"] != "reported"]
    told = fitted(known)
    rows = []
    for name, own in (("development", known), ("reported", [c for c in cells if c["set"] == "reported"])):
        for way, (regret, seconds) in policies(own, told).items() if own else ():
            rows.append(
                (name, str(len(own)), way, with_error(regret), f"{max(regret):.1f}", f"{seconds:.0f}")
            )
    header = ("tasks", "draws", "way to decide", "points behind the best", "worst draw", "seconds")
    return markdown(header, rows)


def terms_table(cells: Sequence[Cell]) -> str:
    """Markdown: what each term foretells of development tasks left out, alone and with the chosen one."""
    known = [cell for cell in cells if cell["set"] != "reported"]
    every = [(name,) for name in TERMS] + [(*CHOSEN, name) for name in TERMS if name not in CHOSEN]
    rows = []
    for terms in every:
        one = judged(left_out(known, "task", terms))
        rows.append((" and ".join(terms), f"{one['brier']:.3f}", f"{one['area']:.2f}"))
    constant = judged([(cell, 0.5) for cell in known])["constant"]
    rows.append(("nothing (the share of draws)", f"{constant:.3f}", "–"))
    return markdown(("told", "Brier score", "area under the curve"), rows)


def scores(cells: Sequence[Cell]) -> str:
    """Markdown: how well the predictor does on cells that had no part in its fit, and the folds beside it."""
    known = [cell for cell in cells if cell["set"] != "reported"]
    reported, told = [cell for cell in cells if cell["set"] == "reported"], fitted(known)
    parts = [
        ("development tasks, each left out", left_out(known, "task")),
        ("development, each network left out", left_out(known, "network")),
        ("reported tasks", [(cell, told(cell)) for cell in reported]),
    ]
    rows = []
    for name, pairs in (part for part in parts if part[1]):
        one, share = judged(pairs), np.mean([gained(cell) >= WORTH for cell, _ in pairs])
        agree = [
            100 * np.mean([way(cell, p) == (gained(cell) >= WORTH) for cell, p in pairs])
            for way in (lambda _, p: p > 0.5, lambda cell, _: by_folds(cell))
        ]
        numbers = (f"{one['brier']:.2f}", f"{one['constant']:.2f}", f"{one['area']:.2f}")
        rows.append((name, str(len(pairs)), f"{100 * share:.0f}", *numbers, *(f"{a:.0f}" for a in agree)))
    header = ["judged on", "draws", "training gains a point, %", "Brier score", "of a constant"]
    return markdown([*header, "area under the curve", "predictor is right, %", "folds are right, %"], rows)


def each(cells: Sequence[Cell]) -> str:
    """Markdown: a row a draw, ordered by the gap."""
    header = ["tasks", "network", "task", "a class", "linearity gap", "drift", "probe", "adapt", "trained"]
    rows = [
        [
            cell["set"], cell["network"], cell["task"], str(cell["shots"]), f"{cell['gap']:.2f}",
            f"{cell['drift']:.2f}", *(f"{cell[way]:.1f}" for way in ("probe", "adapt", "trained")),
            f"{gained(cell):.1f}",
        ]
        for cell in sorted(cells, key=lambda cell: float(cell["gap"]))
    ]  # fmt: skip
    return markdown([*header, "training gains"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=1)
    options.add_argument("--sets", nargs="+", default=["development", "more"], choices=list(SETS))
    several = ["resnet20", "lite0", "minilm6", "minilm", "mobilenet"]
    options.add_argument("--networks", nargs="+", default=several, choices=list(NETWORKS))
    options.add_argument("--shots", nargs="+", type=int, default=[5, 20])
    options.add_argument("--tasks", nargs="+", help="names of tasks (default: all)")
    given = options.parse_args(arguments)
    study, cells = Study("adapt/suffices", given), []
    for seed in study.seeds:
        for part in given.sets:
            for key in given.networks:
                network = NETWORKS[key]
                for task in (t for t in suited(part, network) if not given.tasks or t.name in given.tasks):
                    found = found_of(task, given.data_dir)
                    fewest = int(found.train_y[pools(found, POOL, TESTED)[0]].bincount().min())
                    for shots in (s for s in given.shots if s < fewest and s * found.classes <= 600):
                        where = {"set": part, "network": network.name, "task": task.name}
                        run = partial(measured, network, task, shots, seed, given.data_dir)
                        cells.append(study.cell({**where, "shots": shots, "seed": seed}, run))
    tables = terms_table(cells), scores(cells), table(cells), each(cells)
    study.publish("\n\n".join(tables), cells)


if __name__ == "__main__":
    main()
