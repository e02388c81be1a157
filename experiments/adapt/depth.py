"""``linnet.adapt`` on what earlier layers compute, beside every plain probe of the last layer.

    python -m experiments.adapt.depth --sets development
    python -m experiments.adapt.depth --sets reported

What a network computes of a task's samples is kept (``--features``), so that every draw is rows of it. A
draw is fitted by the functions that ``linnet.adapt`` calls; a test holds it to the call itself. Where a
network has up to a million weights, ``linnet.adapt`` tries derivatives too: here it does not (``nested.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from experiments.adapt.kernels import suited
from experiments.adapt.nested import drawn
from experiments.adapt.tasks import NETWORKS, Network, Task, pools, samples, stored
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.files import load, save
from linnet.fitting.last_layer import ending_linear
from linnet.linear.dual import DualSystem
from linnet.linear.features import angular_kernel
from linnet.linear.targets import make_targets
from linnet.nested.adapt import HEADS
from linnet.nested.features import RandomHeads, kernels_of
from linnet.nested.search import BIAS, FREE, Shares, choose

SHOTS = (5, 20, 50)
MOST = 3000  # training samples to draw from
PENALTIES = tuple(10.0**power for power in range(-6, 2))  # of logistic regression, by folds
RANDOM = 2000  # random ReLU features
METHODS = ("adapt", "ridge", "logistic", "logistic, unit length", "random features")
PLAIN = METHODS[1:4]  # what readers compare with
BOOTSTRAPS = 1000


def computed(network: Network, task: Task, folder: Path, data_dir: str | None) -> dict[str, Tensor]:
    """φ and ψ of the pool and all test samples of a task, computed once."""
    name = f"{network.name} {task.name}".replace(" ", "-").lower()
    if not (folder / f"{name}.safetensors").exists():
        begin = time.perf_counter()
        model, prepared = network.load(data_dir)
        found = stored(task, data_dir)
        pool, test = pools(found, MOST, len(found.test_y))
        every = np.concatenate([found.train_x[pool.numpy()], found.test_x[test.numpy()]])
        x = samples(every[:8], network, prepared)
        reader = RandomHeads(ending_linear(model, x), HEADS, 0, None)
        rows = [
            reader.staged(samples(every[at], network, prepared)).float()
            for at in np.array_split(np.arange(len(every)), math.ceil(len(every) / 256))
        ]
        kept = {"rows": torch.cat(rows), "pool": found.train_y[pool], "test": found.test_y[test]}
        save(folder, name, {**kept, "width": reader.width, "stages": list(reader.stages or ())})
        print(f"{name}: {len(every)} samples, {time.perf_counter() - begin:.0f} s", flush=True)
    return load(folder / f"{name}.safetensors", name)


def fitted(rows: Tensor, y: Tensor, test: Tensor, width: int, given: Shares = FREE) -> tuple[Tensor, Any]:
    """Outputs (T, C) for test samples as ``linnet.adapt`` gives them, and its choice."""
    classes = int(y.max()) + 1
    targets, kernels = make_targets(y, classes, dtype=torch.float32), kernels_of(rows, width)
    choice = choose(kernels, targets, given)
    share = choice.taken.earlier
    kernel, mixture = kernels.mixed(0.0, share)
    system = DualSystem(kernel, targets.values, choice.taken.ridge)
    (phi, psi), (other, theirs) = (part.tensor_split([width], 1) for part in (rows, test))
    center = phi.mean(0)
    cross = BIAS + (1 - share) / mixture.head * (other - center) @ (phi - center).T
    if share:
        cross += share / mixture.early * angular_kernel(theirs, psi)
    return cross @ system.beta, choice


def logistic(rows: Tensor, y: Tensor, test: Tensor, seed: int) -> Tensor:
    """Outputs (T, C) of logistic regression, its penalty by cross-validation in up to five folds."""
    # In the coordinates of the training samples: a penalty on the length of the weights leaves no others.
    center = rows.mean(0)
    _, values, turn = torch.linalg.svd(rows - center, full_matrices=False)
    keep = values > 1e-9 * values[0]
    x, xt = ((part - center) @ turn[keep].T for part in (rows, test))
    folds = max(2, min(5, int(y.bincount()[y.unique()].min())))
    fold = torch.empty_like(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    for label in y.unique():
        own = order[y[order] == label]
        fold[own] = torch.arange(len(own)) % folds
    losses = torch.zeros(len(PENALTIES), dtype=torch.float64)
    for k in range(folds):
        inside, held = fold != k, fold == k
        for place, found in enumerate(_path(x[inside], y[inside], int(y.max()) + 1)):
            losses[place] += F.cross_entropy(_outputs(found, x[held]), y[held], reduction="sum")
    best = int(losses.argmin())
    return _outputs(_path(x, y, int(y.max()) + 1, last=best)[best], xt)


def _path(x: Tensor, y: Tensor, classes: int, last: int | None = None) -> list[Tensor]:
    """Weights (D + 1, C) at each penalty, from the largest to the smallest, each from the one before."""
    found, start = [], np.zeros((x.shape[1] + 1) * classes)
    goal = F.one_hot(y, classes).double()

    def loss(flat: np.ndarray, penalty: float) -> tuple[float, np.ndarray]:
        w = torch.from_numpy(flat).view(-1, classes)
        outputs = _outputs(w, x)
        residual = (outputs.softmax(1) - goal) / len(x)
        gradient = torch.cat([x.T @ residual + penalty * w[:-1], residual.sum(0, keepdim=True)])
        value = F.cross_entropy(outputs, y) + penalty / 2 * w[:-1].square().sum()
        return float(value), gradient.flatten().numpy()

    for penalty in sorted(PENALTIES, reverse=True)[: None if last is None else last + 1]:
        result = minimize(loss, start, (penalty,), "L-BFGS-B", jac=True, options={"maxiter": 200})
        start = result.x
        found.append(torch.from_numpy(start.copy()).view(-1, classes))
    return found


def _outputs(weights: Tensor, x: Tensor) -> Tensor:
    """Outputs (N, C) of a linear layer with its intercept in the last row."""
    return x @ weights[:-1] + weights[-1]


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1."""
    return F.normalize(rows, dim=1)


def standardized(rows: Tensor, y: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features of mean 0 and variance 1/D over the training samples, so that penalties mean the same."""
    spread = rows.std(0)
    spread = torch.where(spread > 1e-9, spread, 1.0) * rows.shape[1] ** 0.5
    return (rows - rows.mean(0)) / spread, y, (test - rows.mean(0)) / spread


def random_features(rows: Tensor, seed: int) -> Tensor:
    """Random ReLU features of the last layer's."""
    draws = torch.randn(rows.shape[1], RANDOM, generator=torch.Generator().manual_seed(seed)).double()
    return (rows @ draws).relu()


def compared(kept: Mapping[str, Any], shots: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Accuracies of every method on every draw, paired differences with their errors, and what was chosen."""
    n, width = len(kept["pool"]), int(kept["width"])
    rows, truth = kept["rows"].double(), kept["test"]
    right: dict[str, list[Tensor]] = {name: [] for name in METHODS}
    told: dict[str, list[Any]] = {name: [] for name in ("earlier", "points", "gain", "seconds")}
    for seed in seeds:
        at = drawn(kept["pool"], shots, seed)
        y, own, test = kept["pool"][at], rows[:n][at], rows[n:]
        phi, other = own[:, :width], test[:, :width]
        begin = time.perf_counter()
        outputs, choice = fitted(own, y, test, width)
        told["seconds"].append(time.perf_counter() - begin)
        told["earlier"].append(choice.taken.earlier)
        told["points"].append(choice.points)
        told["gain"].append(choice.gain)
        found = {
            "adapt": outputs,
            "ridge": fitted(phi, y, other, width, Shares(0.0))[0],
            "logistic": logistic(*standardized(phi, y, other), seed),
            "logistic, unit length": logistic(unit(phi), y, unit(other), seed),
            "random features": fitted(
                random_features(phi, seed), y, random_features(other, seed), RANDOM, Shares(0.0)
            )[0],
        }
        for name, each in found.items():
            right[name].append(each.argmax(1) == truth)
    scores = {name: torch.stack(each) for name, each in right.items()}
    best = max(PLAIN, key=lambda name: float(scores[name].double().mean()))
    ahead = {name: resampled(scores["adapt"], scores[name]) for name in ("ridge", "random features")}
    return {
        "n": len(at), "classes": int(kept["pool"].max()) + 1, "width": width, "tested": len(truth),
        "pool": n, "single": shots >= int(kept["pool"].bincount().min()),
        "accuracy": {name: each.double().mean(1).tolist() for name, each in scores.items()},
        "best": best, "ahead": {**ahead, "best": resampled(scores["adapt"], scores[best])}, **told,
    }  # fmt: skip


def resampled(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Points by which one is ahead of another, with the error over draws and test samples, by bootstrap."""
    # first (R, T), second (R, T)
    difference = 100 * (first.double() - second.double())
    draws, tests = difference.shape
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(BOOTSTRAPS):
        a = torch.randint(draws, (draws,), generator=generator)
        b = torch.randint(tests, (tests,), generator=generator)
        means.append(difference[a].mean(0)[b].mean())
    return float(difference.mean()), float(torch.stack(means).std())


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network and task; the best plain probe by hindsight, adapt, and the difference."""
    header = ["network", "task", "classes"]
    for shots in SHOTS:
        header += [f"plain, {shots} a class", "adapt", "ahead"]
    rows = []
    for network, task in dict.fromkeys((cell["network"], cell["task"]) for cell in cells):
        own = {cell["shots"]: cell for cell in cells if (cell["network"], cell["task"]) == (network, task)}
        row = [network, task, str(next(iter(own.values()))["classes"])]
        for shots in SHOTS:
            row += _columns(own[shots]) if shots in own else ["–", "–", "–"]
        rows.append(row)
    return markdown(header, rows)


def _columns(cell: Cell) -> list[str]:
    """Accuracies of the best plain probe and of adapt in percent, and their paired difference."""
    plain, taken = (100 * float(np.mean(cell["accuracy"][name])) for name in (cell["best"], "adapt"))
    ahead, error = cell["ahead"]["best"]
    return [f"{plain:.1f}", f"{taken:.1f}", f"{ahead:.1f} ± {error:.1f}"]


def means(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network and number of shots; means over tasks."""
    header = (
        "network",
        "a class",
        "tasks",
        *METHODS,
        "ahead of the best plain probe",
        "rows behind by 2 errors",
    )
    rows = []
    for network in dict.fromkeys(cell["network"] for cell in cells):
        for shots in SHOTS:
            own = [cell for cell in cells if (cell["network"], cell["shots"]) == (network, shots)]
            if not own:
                continue
            scores = [100 * float(np.mean([np.mean(c["accuracy"][m]) for c in own])) for m in METHODS]
            ahead = [cell["ahead"]["best"] for cell in own]
            rows.append(
                (
                    network,
                    str(shots),
                    str(len(own)),
                    *(f"{score:.1f}" for score in scores),
                    with_error(gain for gain, _ in ahead),
                    str(sum(gain < -2 * error for gain, error in ahead)),
                )
            )
    return markdown(header, rows)


def brief(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network of 300 features or more and number of shots; means over tasks."""
    header = ("encoder", "tasks", "samples a class", "best plain probe", "`linnet.adapt(net, data)`", "ahead")
    rows = []
    for network in dict.fromkeys(cell["network"] for cell in cells if cell["width"] >= 300):
        for shots in SHOTS:
            own = [cell for cell in cells if (cell["network"], cell["shots"]) == (network, shots)]
            columns = [_columns(cell) for cell in own]
            plain, taken = (f"{np.mean([float(one[k]) for one in columns]):.1f}" for k in (0, 1))
            ahead = with_error(cell["ahead"]["best"][0] for cell in own)
            rows.append((network, str(len(own)), str(shots), plain, taken, ahead))
    return markdown(header, rows)


def summary(cells: Sequence[Cell]) -> str:
    """Means by number of shots and by network, and the rows that are behind."""
    lines = []
    networks = dict.fromkeys(cell["network"] for cell in cells)
    for shots in dict.fromkeys(cell["shots"] for cell in cells):
        for network in (None, *networks):
            own = [c for c in cells if c["shots"] == shots and network in (None, c["network"])]
            if own:
                lines.append(f"{network or 'all'}, {shots} a class: {' points over '.join(_mean_gain(own))}")
    for cell in cells:
        ahead, error = cell["ahead"]["best"]
        if ahead < 0:
            where = f"{cell['network']}, {cell['task']}, {cell['shots']}"
            lines.append(f"behind: {where}: {ahead:.1f} ± {error:.1f} ({cell['best']})")
    return "\n".join(lines)


def gain(cells: Sequence[Cell], shots: int, wide: bool = True) -> str:
    """Points ahead of the best plain probe behind networks with or without 300 features, over tasks."""
    return _mean_gain([c for c in cells if c["shots"] == shots and (c["width"] >= 300) == wide])[0]


def _mean_gain(cells: Sequence[Cell]) -> tuple[str, str]:
    """Points ahead of the best plain probe in the mean of tasks, and of how many; rows that are behind."""
    tasks: dict[str, list[float]] = {}
    for cell in cells:
        tasks.setdefault(cell["task"], []).append(cell["ahead"]["best"][0])
    behind = sum(cell["ahead"]["best"][0] < -2 * cell["ahead"]["best"][1] for cell in cells)
    rows = f"{len(tasks)} tasks, {len(cells)} rows, {behind} behind by more than two errors"
    return with_error(float(np.mean(gains)) for gains in tasks.values()), rows


def promise(cells: Sequence[Cell]) -> str:
    """Points ahead of ridge regression as the verdict tells them, less those on the test samples."""
    off: dict[str, list[float]] = {}
    held = []
    for cell in cells:
        for told, ours, ridge in zip(
            cell["points"], cell["accuracy"]["adapt"], cell["accuracy"]["ridge"], strict=True
        ):
            if told is not None:
                excess = told[0] - 100 * (ours - ridge)
                off.setdefault(cell["task"], []).append(excess)
                held.append(abs(excess) < 2 * told[1])
    mean, share = with_error(float(np.mean(one)) for one in off.values()), 100 * np.mean(held)
    return f"{mean} points too many, within two of its errors in {share:.0f} % of {len(held)} draws"


def main() -> None:
    """Run what is asked for."""
    arguments = parser(__doc__ or "", seeds=5)
    arguments.add_argument("--sets", nargs="+", default=["development"])
    arguments.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    arguments.add_argument("--tasks", nargs="+", default=None, help="names of tasks (default: all)")
    arguments.add_argument("--shots", nargs="+", type=int, default=list(SHOTS))
    arguments.add_argument("--features", type=Path, default=Path("runs/experiments/adapt/features"))
    given = arguments.parse_args()
    study, cells = Study("adapt/depth", given), []
    given.features.mkdir(parents=True, exist_ok=True)
    for part in given.sets:
        for key in given.networks:
            for task in suited(part, NETWORKS[key]):
                if given.tasks and task.name not in given.tasks:
                    continue
                read = lru_cache(1)(partial(computed, NETWORKS[key], task, given.features, given.data_dir))
                fewest = int(stored(task, given.data_dir).train_y.bincount().min())
                for shots in (s for s in given.shots if s <= fewest):
                    where = {"set": part, "network": NETWORKS[key].name, "task": task.name, "shots": shots}
                    what = {**where, "seeds": given.seeds}
                    cells.append(study.cell(what, lambda r=read, s=shots: compared(r(), s, study.seeds)))
    study.publish(table(cells), cells)
    print(summary(cells))
    print(f"The verdict's points: {promise(cells)}")


if __name__ == "__main__":
    main()
