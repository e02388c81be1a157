"""Few-shot sinusoids by the tangent process of one network (Maddox et al. 2021, figures A.5 and A.6).

y = A sin(w x + b) + ε with A ~ U(0.1, 5), w, b ~ U(0, 2π), ε ~ N(0, (0.01 A)²), x ~ N(0, 1), ten points a
task (after Kim et al. 2018). A 1-40-40-1 network is trained on one task (batches of 3, 2500 epochs of SGD
at 10⁻³ with momentum 0.9) and adapted to others from ten points each: in function space by Jacobian
products, in parameter space by exact products with the Fisher matrix, and by differences of gradients
(figure A.6: "nearly identical"); with tanh, and with ReLU, which the paper calls a poor inductive bias for
this task (A.5); beside Bayesian regression on the last layer's features (ABLR). σ² is the training error on
the first task, as in the paper, unless hyper-parameters are tuned. The paper shows curves, no numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.baselines.last_layer import last_layer
from experiments.figures import COLORS, figure, save
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.likelihoods import Gaussian

POINTS, BATCH = 10, 3
GRID = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None]
WAYS: dict[str, dict[str, Any]] = {
    "Jacobian products": {"space": "function"},
    "Fisher products": {"space": "parameter", "solver": "cg", "variance": "exact", "tolerance": 1e-9},
    # differences take one vector at a time: variances from the cache of directions, not one solve each
    "Fisher differences": {"space": "parameter", "derivative": "finite-difference", "tolerance": 1e-6},
}  # fmt: skip


class Sinusoid:
    """A task.

    Args:
        seed: Seed.
    """

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)
        uniform = torch.rand(3, generator=self.source, dtype=torch.float64)
        self.amplitude = 0.1 + 4.9 * float(uniform[0])
        self.frequency, self.phase = (2 * math.pi * float(u) for u in uniform[1:])

    def curve(self, x: Tensor) -> Tensor:
        """Without noise."""
        return self.amplitude * torch.sin(self.frequency * x + self.phase)

    def drawn(self, n: int) -> tuple[Tensor, Tensor]:
        """Points with noise, (n, 1) each."""
        x = torch.randn(n, 1, generator=self.source, dtype=torch.float64)
        noise = torch.randn(n, 1, generator=self.source, dtype=torch.float64)
        return x, self.curve(x) + 0.01 * self.amplitude * noise


def trained(activation: str, task: Sinusoid, points: int, epochs: int, seed: int) -> tuple[nn.Module, float]:
    """The network of the first task in float64, and its training error σ²."""
    torch.manual_seed(seed)
    kind = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    model = nn.Sequential(nn.Linear(1, 40), kind(), nn.Linear(40, 40), kind(), nn.Linear(40, 1)).double()
    x, y = task.drawn(points)
    size = BATCH * points // POINTS
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(epochs):
        for index in torch.randperm(points).split(size):
            loss = F.mse_loss(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, F.mse_loss(model(x), y).item()


def scores(prediction: Any, y: Tensor, scale: float) -> dict[str, float]:
    """Error relative to the amplitude, and log density; of outputs with the noise of a target."""
    noisy = prediction.with_noise()
    variance = noisy.variance.double().clamp_min(1e-12)
    density = -0.5 * ((y - noisy.mean).square() / variance + (2 * math.pi * variance).log())
    return {
        "error": float((prediction.mean - y).square().mean().sqrt()) / scale,
        "density": float(density.mean()),
        "covered": float(((prediction.mean - y).abs() <= 1.96 * variance.sqrt()).double().mean()),
    }


def curve_of(prediction: Any) -> dict[str, list[float]]:
    """What is drawn."""
    deviation = prediction.variance.clamp_min(0).sqrt()
    return {"mean": prediction.mean[:, 0].tolist(), "deviation": deviation[:, 0].tolist()}


def adapted(model: nn.Module, noise: float, tasks: int, first: int) -> dict[str, Any]:
    """All ways on all tasks: scores a way, curves of the first task, and how far the ways are apart."""
    likelihood = Gaussian(variance=noise)
    made = {name: linnet.TangentGP(model, likelihood, **options) for name, options in WAYS.items()}
    tuned = linnet.TangentGP(model, likelihood, space="function")
    found: dict[str, list[dict[str, float]]] = {}
    curves: dict[str, Any] = {}
    apart = {name: 0.0 for name in WAYS}
    for t in range(tasks):
        task = Sinusoid(first + t)
        x, y = task.drawn(POINTS)
        test_x, test_y = task.drawn(200)
        predictions, exact = {}, None
        for name, gp in made.items():
            fitted = gp.fit(x, y)
            predictions[name] = fitted.predictive(test_x)
            drawn = fitted.predictive(GRID)
            exact = drawn if exact is None else exact
            deviation = exact.variance.sqrt()
            gap = (drawn.mean - exact.mean).abs().max() / exact.mean.std()
            wide = (drawn.variance.sqrt() - deviation).abs().max() / deviation.max()
            apart[name] = max(apart[name], float(gap), float(wide))
            if t == 0:
                curves[name] = curve_of(drawn)
        # the formulas of Maddox et al. 2021 leave the network's own output out
        without: dict[str, Any] = {"mean": "zero", **WAYS["Jacobian products"]}
        bare = linnet.TangentGP(model, likelihood, **without).fit(x, y)
        predictions["Jacobian products, without f₀"] = bare.predictive(test_x)
        predictions["Jacobian products, tuned, without f₀"] = bare.tune().predictive(test_x)
        predictions["Jacobian products, tuned"] = tuned.fit(x, y).tune().predictive(test_x)
        if t == 0:
            curves["Jacobian products, tuned"] = curve_of(tuned.predictive(GRID))
        ablr = last_layer(model, (x, y))
        predictions["last layer (ABLR)"] = ablr.predictive(test_x)
        if t == 0:
            curves["last layer (ABLR)"] = curve_of(ablr.predictive(GRID))
        for name, prediction in predictions.items():
            found.setdefault(name, []).append(scores(prediction, test_y, task.amplitude))
    means = {  # over tasks
        name: {k: sum(one[k] for one in each) / tasks for k in each[0]} for name, each in found.items()
    }
    return {"scores": means, "apart": apart, "curves": curves}


def draw(study: Study, cells: list[dict[str, Any]]) -> None:
    """Figures A.5 and A.6 on the first task of seed 0."""
    shown = ("Jacobian products", "Fisher differences", "Jacobian products, tuned", "last layer (ABLR)")
    drawn, axes = figure(columns=4, rows=2, width=2.7, height=2.3)
    x = GRID[:, 0]
    task = Sinusoid(1000)
    points = task.drawn(POINTS)
    for row, activation in zip(axes, ("tanh", "relu"), strict=True):
        own = (c for c in cells if c["activation"] == activation and c["seed"] == 0)
        cell = next((c for c in own if "curves" in c), None)
        if cell is None:  # published cells are without their curves
            continue
        for ax, name in zip(row, shown, strict=True):
            mean, deviation = (torch.tensor(cell["curves"][name][k]) for k in ("mean", "deviation"))
            ax.plot(x, task.curve(x), color="black", lw=0.8)
            ax.plot(x, mean, color=COLORS[0], lw=1.2)
            ax.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color=COLORS[0], alpha=0.2, lw=0)
            ax.plot(points[0], points[1], ".", color=COLORS[1], ms=5)
            limit = 2.5 * task.amplitude
            ax.set(ylim=(-limit, limit))
            ax.set_title(f"{activation}: {name}", fontsize=8)
    save(drawn, study.out / "sinusoids.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--tasks", type=int, default=10, help="tasks adapted to, for each network")
    options.add_argument("--epochs", type=int, default=2500)
    options.add_argument("--first", type=int, nargs="+", default=[10, 100], help="points of the first task")
    given = options.parse_args(arguments)
    if given.full:
        given.tasks = 100
    study = Study("fast_adaptation/sinusoids", given)
    cells = []
    for points in given.first:
        for activation in ("tanh", "relu"):
            for seed in study.seeds:

                def run(
                    points: int = points, activation: str = activation, seed: int = seed
                ) -> dict[str, Any]:
                    model, noise = trained(activation, Sinusoid(seed), points, given.epochs, seed)
                    return {"noise": noise, **adapted(model, noise, given.tasks, 1000 * (seed + 1))}

                what = {"activation": activation, "first": points, "seed": seed, "epochs": given.epochs,
                        "tasks": given.tasks}  # fmt: skip
                cells.append(study.cell(what, run))
    study.publish(table(cells), [{k: v for k, v in cell.items() if k != "curves"} for cell in cells])
    draw(study, cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each way behind each kind of network, means over networks."""
    rows = []
    for activation, points in dict.fromkeys((cell["activation"], cell["first"]) for cell in cells):
        own = [cell for cell in cells if (cell["activation"], cell["first"]) == (activation, points)]
        title = f"{activation.replace('relu', 'ReLU')}, {points}"
        for name in own[0]["scores"]:
            numbers = [
                with_error((cell["scores"][name][key] for cell in own), digits, scale)
                for key, digits, scale in (("error", 2, 1), ("density", 2, 1), ("covered", 1, 100))
            ]
            gaps = [cell["apart"][name] for cell in own] if name in WAYS else []
            apart = f"{statistics.median(gaps):.1e}, {max(gaps):.1e}" if any(gaps) else "–"
            rows.append([title, name, *numbers, apart])
            title = ""
    header = ["network, points of the first task", "way", "RMSE / A", "log density (nats)"]
    return markdown([*header, "in 95 % interval, %", "apart: median, largest"], rows)


if __name__ == "__main__":
    main()
