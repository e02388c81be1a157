"""Toy regression: Laplace's method against Hamiltonian Monte Carlo (Botev 2020, figure 5.1).

20 points x ~ U[-4, 4], y ~ N(x³, 3²); a network with two layers of seven units (78 weights); diagonal,
Kronecker-factored and full Laplace, as the theory gives them and regularized ([R]): N and λ of eq. 5.14
chosen by the likelihood of 20 validation points. Networks are sampled (eq. 5.9). The thesis shows pictures
and no numbers: all approximations are too uncertain near the data unless they are regularized, the full one
most of all, and the diagonal one has a higher variance than the Kronecker-factored one. Here each is
measured by the log predictive density of 500 held-out points beside that of HMC; the target is a
regularized Kronecker factorization within 0.1 nats of HMC.

For this figure the thesis names neither the activation function nor λ: here they are those of its MNIST
network, ReLU and 10⁻², for inputs and targets scaled to unit variance (``--activation``, ``--precision``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.figures import COLORS, figure, save
from experiments.laplace.hmc import hmc
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.likelihoods import Gaussian

NOISE = 3.0
STRUCTURES = ("diagonal", "kfac", "full")
NAMES = {"diagonal": "diagonal", "kfac": "Kronecker", "full": "full"}
PRIORS = tuple(10.0**e for e in torch.linspace(-2, 3, 11).tolist())
SCALES = tuple(10.0**e for e in torch.linspace(-1, 3, 9).tolist())
STARTS, STEPS = 8, 300  # runs of L-BFGS for the most probable weights, and their length
GRID = torch.linspace(-6, 6, 121, dtype=torch.float64)[:, None]


class Task:
    """The data of a seed, scaled to unit variance.

    Args:
        seed: Seed.
        held_out: Number of held-out points.
    """

    def __init__(self, seed: int, held_out: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.train, self.validation, self.test = (self._drawn(n, generator) for n in (20, 20, held_out))
        self.x_scale, self.y_scale = self.train[0].std(), self.train[1].std()
        self.likelihood = Gaussian(variance=float((NOISE / self.y_scale) ** 2))

    @staticmethod
    def _drawn(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """N points."""
        x = 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 4
        return x, x**3 + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)

    def scaled(self, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Points in the network's units."""
        return part[0] / self.x_scale, part[1] / self.y_scale

    def density(self, outputs: Tensor) -> float:
        """Mean log 1/S Σ_s p(y | f_s) of the held-out points, in nats, in the units of y.

        Args:
            outputs: (S, N, 1).
        """
        y = self.scaled(self.test)[1]
        each = torch.stack([-self.likelihood.nll(f, y) for f in outputs])
        return float((each.logsumexp(0) - math.log(len(each))).mean() - self.y_scale.log())


def network(activation: str, seed: int) -> nn.Module:
    """1-7-7-1 in float64."""
    torch.manual_seed(seed)
    kind = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    layers = [nn.Linear(1, 7), kind(), nn.Linear(7, 7), kind(), nn.Linear(7, 1)]
    return nn.Sequential(*layers).double()


def most_probable(
    task: Task, activation: str, precision: float, seed: int, starts: int, steps: int
) -> nn.Module:
    """The best of several runs of L-BFGS on the log posterior."""
    x, y = task.scaled(task.train)
    found: list[tuple[float, nn.Module]] = []
    for start in range(starts):
        model = network(activation, 1000 * seed + start)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            loss: Tensor = task.likelihood.nll(model(x), y).sum() + precision / 2 * squares
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append((closure().item(), model))
    return min(found, key=lambda pair: pair[0])[1]


def summary(task: Task, outputs: Tensor, curve: Tensor) -> dict[str, Any]:
    """The numbers of one method: outputs at the held-out points (S, N, 1) and on the grid (S, G, 1)."""
    near = (GRID[:, 0].abs() <= 4)[:, None]
    deviation = curve.std(0) * task.y_scale
    return {
        "density": task.density(outputs),
        "deviation_inside": float(deviation[near].mean()),
        "deviation_outside": float(deviation[~near].mean()),
        "mean": (curve.mean(0) * task.y_scale)[:, 0].tolist(),
        "deviation": deviation[:, 0].tolist(),
    }


def batched(model: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """The outputs (S, N, 1) of the network with the weights (S, 78), all at once."""
    kind = model[1]  # type: ignore[index]
    f, at = x.expand(len(theta), -1, -1), 0
    for layer in (m for m in model if isinstance(m, nn.Linear)):  # type: ignore[attr-defined]
        wide, narrow = layer.weight.shape
        weight = theta[:, at : at + wide * narrow].view(-1, wide, narrow)
        at += wide * narrow
        f = torch.baddbmm(theta[:, None, at : at + wide], kind(f) if at > wide * narrow else f, weight.mT)
        at += wide
    return f


def monte_carlo(task: Task, model: nn.Module, precision: float, seed: int, sizes: Any) -> dict[str, Any]:
    """Hamiltonian Monte Carlo from chains that start at draws around the prior."""
    x, y = task.scaled(task.train)
    outputs = partial(batched, model)
    noise = float(task.likelihood.noise)

    def density(theta: Tensor) -> Tensor:
        # log p(y | θ) + log p(θ) up to a constant
        errors = (outputs(theta, x) - y).square().sum((1, 2))
        return -0.5 * (errors / noise + precision * theta.square().sum(1))

    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in model.parameters())
    start = 0.5 * torch.randn(sizes.chains, size, generator=generator, dtype=torch.float64)
    chains = hmc(
        density, start, draws=sizes.draws, warmup=sizes.warmup, leapfrog=30, step_size=0.01,
        generator=generator,
    )  # fmt: skip
    thin = chains.flat[:: max(1, len(chains.flat) // 5000)]
    rhat = chains.rhat(lambda theta: outputs(theta, task.scaled(task.test)[0][:50])[..., 0])
    numbers = summary(task, outputs(thin, task.scaled(task.test)[0]), outputs(thin, GRID / task.x_scale))
    return numbers | {
        "samples": len(chains.flat), "acceptance": float(chains.acceptance.mean()),
        "rhat": float(rhat.median()), "rhat_max": float(rhat.max()), "divergences": chains.divergences,
    }  # fmt: skip


def laplace(
    task: Task, model: nn.Module, precision: float, structure: str, regularized: bool, sizes: Any, how: str
) -> dict[str, Any]:
    """One approximation: the thesis draws a label a point for diagonal and full, and has KFLR otherwise."""
    expectation = "exact" if structure == "kfac" else "mc"
    damping = "matrix-normal" if structure == "kfac" else "exact"
    la = linnet.Laplace(
        model, task.likelihood, structure, precision, damping=damping, expectation=expectation
    )
    la.fit(task.scaled(task.train))
    if regularized:
        grid = linnet.Grid(prior_precision=PRIORS, data_scale=SCALES, predict=how, samples=sizes.tuning)
        la.tune("grid", task.scaled(task.validation), search=grid, noise=False)
    points = torch.cat([task.scaled(task.test)[0], GRID / task.x_scale])
    if how == "mc":
        outputs = la.predictive(points, "mc", samples=sizes.samples, seed=1).outputs
    else:
        outputs = la.predictive(points, "glm").sample(sizes.samples, 1)
    cut = len(task.test[0])
    numbers = summary(task, outputs[:, :cut], outputs[:, cut:])
    return numbers | {"prior": float(la.prior_precision), "scale": la.data_scale}  # type: ignore[arg-type]


def draw(study: Study, cells: list[dict[str, Any]], seed: int) -> None:
    """Figure 5.1 of one seed."""
    methods = [m for m in dict.fromkeys(cell["method"] for cell in cells) if "linearized" not in m]
    drawn, axes = figure(columns=4, rows=2, width=2.6, height=2.3)
    task, x = Task(seed, 1), GRID[::3, 0].numpy()
    order = [*[m for m in methods if m != "HMC"], "HMC", "MAP"]
    for ax, method in zip(axes.flat, order, strict=False):
        found = next((c for c in cells if c["method"] == method and c["seed"] == seed), None)
        ax.set_title(method, fontsize=9)
        ax.set_ylim(-130, 130)
        ax.plot(x, x**3, color="black", lw=1)
        ax.plot(*(part[:, 0].numpy() for part in task.train), ".", color="black", ms=4)
        if found is None or "mean" not in found:  # published cells are without their curves
            continue
        mean = torch.tensor(found["mean"])[::3]
        ax.plot(x, mean, color=COLORS[0], lw=1.2)
        for k in (1, 2, 3):
            spread = (k * torch.tensor(found["deviation"])[::3]).clamp_max(300)
            ax.fill_between(x, mean - spread, mean + spread, color=COLORS[0], alpha=0.15, lw=0)
    save(drawn, study.out / "toy_regression.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=3)
    options.add_argument("--activation", default="relu", choices=["tanh", "relu"])
    options.add_argument("--precision", type=float, default=0.01, help="λ of the prior")
    options.add_argument("--chains", type=int, default=50, help="chains of HMC")
    options.add_argument("--draws", type=int, default=1000, help="draws of a chain")
    options.add_argument("--warmup", type=int, default=1000)
    options.add_argument("--samples", type=int, default=1000, help="networks sampled for predictions")
    options.add_argument("--tuning", type=int, default=100, help="networks sampled for validation")
    options.add_argument("--held-out", type=int, default=500)
    sizes = options.parse_args(arguments)
    study = Study("laplace/toy_regression", sizes)
    cells = []
    for seed in study.seeds:
        task = Task(seed, sizes.held_out)
        shared = {
            "seed": seed, "activation": sizes.activation, "precision": sizes.precision,
            "samples": sizes.samples, "held_out": sizes.held_out,
        }  # fmt: skip
        model = network(sizes.activation, 0)
        file = study.out / f"map-{sizes.activation}-{sizes.precision:g}-{seed}.pt"
        if not file.exists():
            found = most_probable(task, sizes.activation, sizes.precision, seed, STARTS, STEPS)
            torch.save(found.state_dict(), file)
        model.load_state_dict(torch.load(file, weights_only=True))
        chains = {"chains": sizes.chains, "draws": sizes.draws, "warmup": sizes.warmup}
        run = partial(monte_carlo, task, model, sizes.precision, seed, sizes)
        cells.append(study.cell({"method": "HMC", **shared, **chains}, run))
        point = lambda task=task, model=model: summary(  # noqa: E731
            task, *(f.detach().expand(2, -1, -1) for f in (
                model(task.scaled(task.test)[0]), model(GRID / task.x_scale)
            )))  # fmt: skip
        cells.append(study.cell({"method": "MAP", **shared}, point))
        for how in ("mc", "glm"):
            for structure in STRUCTURES:
                for regularized in (False, True):
                    name = f"{NAMES[structure]}{' [R]' if regularized else ''}"
                    name += "" if how == "mc" else ", linearized"
                    run = partial(laplace, task, model, sizes.precision, structure, regularized, sizes, how)
                    cells.append(study.cell({"method": name, **shared}, run))
    study.publish(table(cells), cells, target=0.1)
    draw(study, cells, min(study.seeds))


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line for each method, its distance from HMC paired over seeds."""
    reference = {cell["seed"]: cell["density"] for cell in cells if cell["method"] == "HMC"}
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        rows.append([
            method, with_error([c["density"] for c in own], 3),
            with_error([reference[c["seed"]] - c["density"] for c in own], 3),
            with_error(chosen(own, "deviation_inside"), 2), with_error(chosen(own, "deviation_outside"), 2),
            ", ".join(f"{c['rhat']:.2f}" for c in own if "rhat" in c) or "–",
        ])  # fmt: skip
    header = [
        "method", "log predictive density (nats)", "below HMC", "deviation of f, -4 to 4", "beyond, to ±6",
        "median R̂",
    ]  # fmt: skip
    return markdown(header, rows)


if __name__ == "__main__":
    main()
