"""The stream on a linearized network, where the online posterior is exact.

With f(x) = f₀(x) + J(x) δ, squared loss and a full curvature matrix, Bayes' rule one task after the other
(Botev 2020, eq. 5.21 to 5.23) is the joint posterior: nothing is lost but rounding. So whatever a structured
curvature loses here, it loses by compression alone, and not by curvature that is measured where later tasks
have moved away from. Each task's minimum is found to solver tolerance, the posterior after it is compared
with that of all data so far, λ and the prior precision are chosen by the evidence of the stream, without
validation data or a second run through the stream, and the predictive uncertainty on every task is followed
along it.

Tasks are permutations of MNIST, averaged down to 5 × 5 pixels; the network 25-10-10 is trained on the first
order of pixels on images that no task has, and then linearized. Targets are ±1 codes of the classes.
``--full`` has more images, and 14 × 14 pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.continual.networks import multilayer
from experiments.continual.streams import mnist
from experiments.figures import figure, save
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

STRUCTURES = (("full", "svd"), ("kfac", "exact"), ("kfac", "svd"), ("kfac", "kl"), ("kfac", "count"),
              ("ekfac", "svd"), ("diagonal", "svd"))  # fmt: skip
STRENGTHS = (0.3, 1.0, 3.0)
PRIORS = (0.1, 1.0, 10.0)
FIRST = 2000  # images that the network is trained on


@dataclass(frozen=True)
class Problem:
    """The network and the tasks in double precision."""

    net: nn.Module
    train: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]
    noise: float


def problem(
    data_dir: str | None, side: int, hidden: int, tasks: int, train: int, test: int, seed: int, noise: float
) -> Problem:
    """A network that was trained on other images, and permuted tasks."""
    parts = mnist(data_dir, FIRST + tasks * train, test)
    small = {
        part: nn.functional.adaptive_avg_pool2d(
            x.view(len(x), 1, *[math.isqrt(x.shape[1])] * 2).double() / 255, side
        ).flatten(1)
        for part, (x, _) in parts.items()
    }
    labels = {part: y for part, (_, y) in parts.items()}
    net = multilayer([hidden], inputs=side * side, seed=seed)
    sequential = nn.Sequential(*net.trunk, net.heads[0]).double()  # type: ignore[misc]
    optimizer = torch.optim.Adam(sequential.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(150):
        rows = torch.randint(FIRST, (250,), generator=generator)
        optimizer.zero_grad()
        targets = coded(labels["train"][rows])
        nn.functional.mse_loss(sequential(small["train"][rows]), targets).backward()
        optimizer.step()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "test": []}
    for index in range(tasks):
        order = torch.randperm(side * side, generator=generator) if index else torch.arange(side * side)
        rows = slice(FIRST + index * train, FIRST + (index + 1) * train)
        found["train"].append((small["train"][rows][:, order], labels["train"][rows]))
        found["test"].append((small["test"][:, order], labels["test"]))
    return Problem(sequential, found["train"], found["test"], noise)


def coded(labels: Tensor) -> Tensor:
    """±1 codes (N, 10)."""
    return 2 * nn.functional.one_hot(labels, 10).double() - 1


def minimize(lin: Any, method: linnet.continual.OnlineLaplace, x: Tensor, y: Tensor, noise: float) -> float:
    """The minimum of ½/σ² |y − f|² + penalty by conjugate gradients; returns the gradient's relative norm.

    The objective is quadratic: products with its Hessian are differences of gradients, exact up to rounding.
    """
    parameters = list(lin.parameters())
    likelihood = linnet.likelihoods.Gaussian(noise)

    def gradient(at: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at, parameters)
        for p in parameters:
            p.grad = None
        likelihood.nll(lin(x), y).sum().backward()
        method.add_grad_()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    at = nn.utils.parameters_to_vector(parameters).detach().clone()
    zero = gradient(torch.zeros_like(at))
    residual = -gradient(at)
    direction, first = residual.clone(), residual.norm()
    square = residual.dot(residual)
    for _ in range(3 * len(at)):
        if float(square.sqrt()) <= 1e-9 * float(first):
            break
        product = gradient(direction) - zero
        step = square / direction.dot(product)
        at += step * direction
        residual -= step * product
        square, before = residual.dot(residual), square
        direction = residual + (square / before) * direction
    return float(gradient(at).norm() / first)


def joint(
    lin: Any, tasks: Sequence[tuple[Tensor, Tensor]], prior: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Mean and precision of the posterior of all tasks at once, by dense algebra."""
    precision = prior * torch.eye(sum(p.numel() for p in lin.parameters()), dtype=torch.float64)
    right = torch.zeros(len(precision), dtype=torch.float64)
    for x, y in tasks:
        for a, b in zip(x.split(250), y.split(250), strict=True):
            j = jacobian(lin, a).flatten(0, 1)
            precision.addmm_(j.T, j, alpha=1 / noise)
            right += j.T @ (coded(b) - lin.base(a)).detach().flatten() / noise
    return torch.linalg.solve(precision, right), precision


def jacobian(lin: Any, x: Tensor) -> Tensor:
    """J (N, C, P) in the order of ``lin.parameters()``."""
    found: Tensor = lin.jacobian(x).detach()
    return found


def accuracies(lin: Any, tasks: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Accuracy on each task."""
    with torch.no_grad():
        return [float((lin(x).argmax(1) == y).double().mean()) for x, y in tasks]


def stream(given: Problem, structure: str, merge: str, strength: float, prior: float) -> dict[str, Any]:
    """One run along the stream."""
    lin = linnet.linearize(given.net)
    method = linnet.continual.OnlineLaplace(
        lin, linnet.likelihoods.Gaussian(given.noise), structure, prior, strength, merge, prior_mean="initial"
    )
    distances, residuals, rows, spread = [], [], [], []
    evidence: float | None = 0.0
    for index, (x, y) in enumerate(given.train):
        residuals.append(minimize(lin, method, x, coded(y), given.noise))
        if merge == "exact":
            evidence = None  # a list has no determinant in closed form
        elif evidence is not None:
            evidence += method.log_evidence((x, coded(y)))
        method.consolidate((x, coded(y)))
        want, precision = joint(linnet.linearize(given.net), given.train[: index + 1], prior, given.noise)
        delta = nn.utils.parameters_to_vector(lin.parameters()).detach()
        # error in the metric of the joint posterior: √((δ − δ*)ᵀ Λ (δ − δ*) / δ*ᵀ Λ δ*)
        error = delta - want
        distances.append(float((error.dot(precision @ error) / want.dot(precision @ want)).sqrt()))
        rows.append(accuracies(lin, given.test[: index + 1]))
        if merge != "exact":
            inverse = method.precision().inverse()
            spread.append([
                float(inverse.output_covariance(x[:100]).diagonal(dim1=1, dim2=2).mean().sqrt())
                for x, _ in given.test
            ])  # fmt: skip
    return {
        "distance": distances[-1], "distances": distances, "residual": max(residuals), "rows": rows,
        "average": sum(rows[-1]) / len(rows[-1]), "spread": spread,
        "evidence": None if evidence is None else evidence / sum(len(y) for _, y in given.train),
    }  # fmt: skip


def jointly(given: Problem, prior: float) -> dict[str, Any]:
    """Training on all tasks at once: the mean, and the uncertainty on every task."""
    lin = linnet.linearize(given.net)
    delta, precision = joint(lin, given.train, prior, given.noise)
    nn.utils.vector_to_parameters(delta, list(lin.parameters()))
    factor = torch.linalg.cholesky(precision)
    spread = []
    for x, _ in given.test:
        half = torch.linalg.solve_triangular(factor, jacobian(lin, x[:100]).flatten(0, 1).T, upper=False)
        spread.append(float(half.square().sum(0).mean().sqrt()))
    rows = accuracies(lin, given.test)
    return {"average": sum(rows) / len(rows), "rows": [rows], "spread": [spread]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    make = parser(__doc__ or "", seeds=1)
    make.add_argument("--side", type=int, default=None, help="pixels of a side (default 5; 14 if full)")
    make.add_argument("--hidden", type=int, default=10, help="hidden units")
    make.add_argument("--tasks", type=int, default=5, help="permutations")
    make.add_argument("--train", type=int, default=None, help="images a task (default 300; 2000 if full)")
    make.add_argument("--test", type=int, default=1000, help="test images")
    make.add_argument("--noise", type=float, default=0.25, help="variance of the targets in the model")
    make.add_argument("--further", type=int, default=0, help="more seeds, with the first one's prior and λ")
    options = make.parse_args(arguments)
    options.side = options.side or (14 if options.full else 5)
    options.train = options.train or (2000 if options.full else 300)
    study = Study("continual/linear_stream", options)
    torch.set_default_dtype(torch.float32)
    cells: list[Cell] = []
    prior = 1.0
    for seed in range(options.seeds + options.further):
        given = problem(
            options.data_dir,
            options.side,
            options.hidden,
            options.tasks,
            options.train,
            options.test,
            seed,
            options.noise,
        )
        sizes = {"seed": seed, "side": options.side, "hidden": options.hidden, "tasks": options.tasks,
                 "train": options.train, "test": options.test, "noise": options.noise}  # fmt: skip

        def cell(structure: str, merge: str, strength: float, prior: float, g: Problem = given,
                 z: dict[str, int] = sizes) -> Cell:  # fmt: skip
            what = {"structure": structure, "merge": merge, "strength": strength, "prior": prior, **z}
            return study.cell(what, lambda: stream(g, structure, merge, strength, prior))

        if seed in study.seeds:
            by_prior = [cell("full", "svd", 1.0, one) for one in PRIORS]
            prior = max(by_prior, key=lambda c: c["evidence"])["prior"]
            cells += [{**c, "role": "prior"} for c in by_prior]
            cells += [
                {**cell(structure, "svd", strength, prior), "role": f"strength {structure}"}
                for structure in ("full", "kfac")
                for strength in STRENGTHS
            ]
        cells += [{**cell(s, m, 1.0, prior), "role": "structure"} for s, m in STRUCTURES]
        what = {"structure": "joint", "prior": prior, **sizes}
        cells.append({**study.cell(what, lambda g=given, p=prior: jointly(g, p)), "role": "joint"})  # type: ignore[misc]
    study.publish(f"{table(cells)}\n\n{hyper_parameters(cells)}", cells)
    draw(cells, study)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: each structure beside joint training."""
    rows = []
    for structure, merge in STRUCTURES:
        where = {"role": "structure", "structure": structure, "merge": merge}
        name = structure if structure in ("full", "diagonal") else f"{structure}, {merge}"
        evidence = [one for one in chosen(cells, "evidence", **where) if one is not None]
        rows.append([
            name, f"{statistics.fmean(chosen(cells, 'distance', **where)):.1e}",
            with_error(chosen(cells, "average", **where), 1, 100), with_error(evidence, 3),
        ])  # fmt: skip
    rows.append(["joint training", "0", with_error(chosen(cells, "average", role="joint"), 1, 100), "–"])
    return markdown(
        ["curvature", "distance from joint training", "mean accuracy, %", "log evidence of an example"], rows
    )


def hyper_parameters(cells: Sequence[Cell]) -> str:
    """Markdown: the stream with other prior precisions and strengths."""
    rows = []
    for role, key, values, label in (
        ("prior", "prior", PRIORS, "full, prior precision"),
        ("strength full", "strength", STRENGTHS, "full, λ"),
        ("strength kfac", "strength", STRENGTHS, "kfac, svd, λ"),
    ):
        for value in values:
            where = {"role": role, key: value}
            rows.append([
                f"{label} {value:g}", with_error(chosen(cells, "evidence", **where), 3),
                f"{statistics.fmean(chosen(cells, 'distance', **where)):.1e}",
                with_error(chosen(cells, "average", **where), 1, 100),
            ])  # fmt: skip
    return markdown(
        ["hyper-parameter", "log evidence of an example", "distance from joint training", "mean accuracy, %"],
        rows,
    )


def draw(cells: Sequence[Cell], study: Study) -> None:
    """The distance from joint training, and the uncertainty on every task, along the stream."""
    drawn, axes = figure(2)
    for structure, merge in STRUCTURES:
        c = next(
            c
            for c in cells
            if c["role"] == "structure" and (c["structure"], c["merge"]) == (structure, merge)
        )
        name = structure if structure in ("full", "diagonal") else f"{structure}, {merge}"
        axes[0].plot(range(1, len(c["distances"]) + 1), c["distances"], "o-", markersize=3, label=name)
    axes[0].set(xlabel="tasks seen", ylabel="distance from joint training", yscale="log")
    axes[0].legend(fontsize=6)
    full = next(c for c in cells if c["role"] == "structure" and c["structure"] == "full")
    kron = next(
        c for c in cells if c["role"] == "structure" and c["structure"] == "kfac" and c["merge"] == "svd"
    )
    for task in range(len(full["spread"])):
        seen = range(1, len(full["spread"]) + 1)
        axes[1].plot(seen, [row[task] for row in full["spread"]], f"C{task}-", label=f"task {task + 1}")
        axes[1].plot(seen, [row[task] for row in kron["spread"]], f"C{task}:")
    axes[1].set(xlabel="tasks seen", ylabel="standard deviation of the outputs", yscale="log")
    axes[1].legend(fontsize=6, title="full; kfac dotted", title_fontsize=6)
    save(drawn, study.out / "linear_stream.svg")


if __name__ == "__main__":
    main()
