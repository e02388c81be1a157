"""Botev 2020, figure 5.9: disjoint MNIST, digits 0 to 4 and then 5 to 9, one classifier of ten classes.

The thesis finds that both Laplace approximations beat synaptic intelligence at their best hyper-parameters,
that Kronecker factors give a small improvement over the diagonal and need a smaller λ, and that all need much
larger values than on permuted MNIST. Network 784-100-100-10; Nesterov's momentum 0.9 at rate 0.1, batches of
250, the rate divided by 10 every 1000 updates, means of ten runs; the second task begins at a rate divided by
λ/10 (Kronecker) or λ/1000 (diagonal). On this scale of λ those rates diverge for λ ≥ 10 (KF), 1000 (diagonal)
and c ≥ 10 (SI). So ``--full`` takes the smaller of 0.1 and 1 over the largest eigenvalue of the penalty,
and the default is Adam for few epochs. ``--precondition`` divides the gradients of the second task by the
precision of the first, damped, so that no rate has to fall. Test accuracies are of all ten digits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import linnet
from experiments import tables
from experiments.continual.networks import Heads, multilayer
from experiments.continual.streams import Task, classes, mnist
from experiments.continual.training import METHODS, Method, Training, accuracy, learn
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser

KF, DIAGONAL, SI = "Online Laplace (KF)", "Online Laplace (D)", "SI"
GRID = {KF: [1, 10, 100, 1e3, 1e4], DIAGONAL: [1e2, 1e3, 1e4, 1e5, 1e6], SI: [1, 10, 100, 1e3, 1e4]}
GRID_FULL = {
    KF: [a * 10.0**b for b in range(6) for a in (1, 3)] + [1e6],
    DIAGONAL: [a * 10.0**b for b in range(6) for a in (1, 3)] + [1e6],
    SI: [a * 10.0**b for b in range(-1, 5) for a in (1, 3)] + [1e5],
}


def stiffness(net: Heads, method: Method, examples: int, steps: int = 20) -> float:
    """The largest eigenvalue of the penalty's Hessian divided by ``examples``, by power iteration."""
    parameters = list(net.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach().clone()
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).to(start)
    found = 0.0
    for _ in range(steps):
        direction /= direction.norm()
        nn.utils.vector_to_parameters(start + direction, parameters)
        net.zero_grad()
        method.add_grad_(examples=examples)
        product = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        direction = nn.utils.parameters_to_vector(product).clone()
        found = float(direction.norm())
    nn.utils.vector_to_parameters(start, parameters)
    net.zero_grad()
    return found


def second(net: Heads, method: Method, how: Training, examples: int) -> torch.optim.Optimizer:
    """The optimizer of the second task: one that the penalty does not make diverge."""
    if how.precondition and isinstance(method, linnet.continual.OnlineLaplace):
        optimizer = how.make(net, 1)
        method.preconditioner(examples, how.precondition).attach(optimizer)
        return optimizer
    if how.optimizer == "adam":
        return how.make(net, 0)
    return replace(how, rate=min(how.rate, 1 / max(stiffness(net, method, examples), 1e-9))).make(net, 0)


def run(method: str, tasks: list[Task], how: Training, seed: int, grid: Sequence[float]) -> dict[str, Any]:
    """The first task once, and then the second with every strength."""
    device, found = how.device, []
    data = [tuple(tensor.to(device) for tensor in task.read("train")) for task in tasks]
    net = multilayer((100, 100), data[0][0].shape[1], seed=seed).to(device)
    watch = METHODS[SI](net, 1.0, 1.0) if method == SI else None
    generator = torch.Generator().manual_seed(seed)
    learn(net, data[0], watch, how.make(net, 0), how, generator)
    alone = accuracy(net, tasks[0], "test", device)
    if watch is not None:
        watch.consolidate()
    pick = torch.randperm(len(data[0][0]), generator=generator)[: how.measured]
    for strength in grid:
        twin: Heads = copy.deepcopy(net)
        other = METHODS[method](twin, float(strength), len(data[0][0]) / len(pick))
        if watch is None:
            other.consolidate((data[0][0][pick], data[0][1][pick]))
        else:
            # the same path of the first task, with another strength
            state = watch.state_dict()
            state["settings"] = other.state_dict()["settings"]
            ((term,),) = (kept.values() for kept in state["state"]["terms"])
            term["weight"] = 2 * float(strength)
            other.load_state_dict(state)
        optimizer = second(twin, other, how, len(data[1][0]))
        learn(twin, data[1], other, optimizer, how, torch.Generator().manual_seed(100 + seed))
        scores = [accuracy(twin, task, part, device) for part in ("test", "validation") for task in tasks]
        finite = all(bool(p.isfinite().all()) for p in twin.parameters())
        found.append([float(strength), *scores[:2], sum(scores[2:]) / 2, finite])
    return {"first alone": alone, "found": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=10)
    make.add_argument("--train", type=int, default=None, help="training images (default 10,000; all if full)")
    make.add_argument("--test", type=int, default=None, help="test images (default all)")
    make.add_argument("--epochs", type=int, default=None, help="passes over a task (default 6; 20 if full)")
    make.add_argument("--rate", type=float, default=None, help="learning rate (default 0.003; 0.1 if full)")
    make.add_argument(
        "--precondition", type=float, default=0.0,
        help="momentum at rate 0.1, for Laplace with τ (Λ / N + τ I)⁻¹ before it; 0: neither (default)",
    )  # fmt: skip
    options = make.parse_args(arguments)
    options.epochs = options.epochs or (20 if options.full else 6)
    options.train = options.train or (None if options.full else 10_000)
    study = Study("continual/disjoint_mnist", options)
    tasks = classes(
        mnist(options.data_dir, options.train, options.test), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], False
    )
    sizes = len(tasks[0].read("train")[0])
    how = Training(
        epochs=options.epochs, rate=options.rate or 3e-3, device=options.device,
        measured=sizes if options.full else min(4000, sizes),
    )  # fmt: skip
    if options.full:
        how = replace(how, optimizer="nesterov", rate=options.rate or 0.1, drop=1000)
    if options.precondition:
        rate = options.rate or 0.1
        last = max(1, 3 * options.epochs * (sizes // how.batch) // 4)
        how = replace(how, optimizer="momentum", rate=rate, drop=last, precondition=options.precondition)
    grid = GRID_FULL if options.full else GRID
    cells = []
    for method, values in grid.items():
        for seed in study.seeds:
            what = {"method": method, "seed": seed, "grid": list(values), "train": sizes, **how.words()}
            cells.append(
                study.cell(what, lambda m=method, s=seed, v=values: run(m, tasks, how, s, v))  # type: ignore[misc]
            )
    table = report(cells, grid, study)
    study.publish(table, cells)


def report(cells: list[dict[str, Any]], grid: dict[str, list[float]], study: Study) -> str:
    """The figure, and the table of the best strengths by validation."""
    drawn, axis = figure()
    lines = []
    for method, values in grid.items():
        runs = [dict((row[0], row[1:]) for row in c["found"]) for c in cells if c["method"] == method]
        means = {
            v: [tables.mean_and_error(r[float(v)][i] for r in runs)[0] for i in (0, 1, 2)] for v in values
        }
        axis.plot(list(values), [50 * (a + b) for a, b, _ in means.values()], "o-", label=method)
        chosen = max(means, key=lambda v: means[v][2])
        both = [100 * (r[float(chosen)][0] + r[float(chosen)][1]) / 2 for r in runs]
        first = tables.with_error((r[float(chosen)][0] for r in runs), 1, 100)
        second = tables.with_error((r[float(chosen)][1] for r in runs), 1, 100)
        lines.append([method, f"{chosen:g}", tables.with_error(both, 2), first, second])
    axis.set(xscale="log", xlabel="λ, or c of SI", ylabel="mean test accuracy, %")
    axis.legend()
    save(drawn, study.out / "disjoint_mnist.svg")
    header = ["method", "λ or c", "mean of both tasks, %", "digits 0 to 4", "digits 5 to 9"]
    return tables.markdown(header, lines)


def strengths(cells: Sequence[Cell]) -> str:
    """Markdown: a row a method and strength, the mean accuracies on the test images."""
    rows = []
    for method in GRID:
        runs = [{row[0]: row[1:3] for row in cell["found"]} for cell in cells if cell["method"] == method]
        for strength in runs[0]:
            first, second = ([100 * run[strength][k] for run in runs] for k in (0, 1))
            both = tables.with_error([(a + b) / 2 for a, b in zip(first, second, strict=True)])
            alone = [f"{sum(each) / len(each):.1f}" for each in (first, second)]
            rows.append([method, f"{strength:g}", str(len(runs)), both, *alone])
    return tables.markdown(
        ["method", "λ or c", "runs", "mean of both, %", "digits 0 to 4", "digits 5 to 9"], rows
    )


if __name__ == "__main__":
    main()
