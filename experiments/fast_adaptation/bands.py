"""Bands of the tangent process in one dimension (Maddox et al. 2021, figures 3a and 3b).

The supplement has the setting alone. 3a: a network trained on 300 points of 0.1 x² + |x| + ε, ε ~ N(0, 0.9²),
x ~ N(±5, 0.8²). 3b: three tanh networks of about 21,000 parameters on 150 points of sin(3 x) + 1.5 sin(0.5 x)
+ 0.8 |x| − 4 with noise of standard deviation 0.1 · 0.1². 250 epochs of SGD at 10⁻⁴ with momentum 0.9; σ² is
the training error. Not given, and chosen here: the network of 3a (three layers of 100, tanh), batches of 10.
Bands are of 95 % and judged by new targets: where the training points are, in the gap between them, and
outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.figures import COLORS, figure, save
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.likelihoods import Gaussian

BATCH, TESTED = 10, 500
GRID = torch.linspace(-12, 12, 121, dtype=torch.float64)[:, None]
NETWORKS = {"3a": ((100, 100, 100),), "3b": ((2110, 3, 2110), (10, 1000, 10), (100, 100, 100))}
POINTS = {"3a": 300, "3b": 150}
NOISE = {"3a": 0.9, "3b": 0.1 * 0.1**2}
# mean, and whether the hyper-parameters are those of highest evidence
WAYS: dict[str, tuple[Any, bool]] = {
    "without f₀": ("zero", False),
    "without f₀, tuned": ("zero", True),
    "f₀ as the mean": ("network", False),
}
PLACES = ("at the points", "in the gap", "outside")


def curve(name: str, x: Tensor) -> Tensor:
    """The true function of a figure."""
    if name == "3a":
        return 0.1 * x.square() + x.abs()
    return (3 * x).sin() + 1.5 * (0.5 * x).sin() + 0.8 * x.abs() - 4


def drawn(name: str, place: str, n: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of a figure with noise, (n, 1) each: as for training, in |x| < 2, or in 8 < |x| < 11."""
    side = torch.randint(2, (n, 1), generator=source, dtype=torch.float64) * 2 - 1
    spread = {"dtype": torch.float64, "generator": source}
    if place == PLACES[0]:
        x = 5 * side + 0.8 * torch.randn(n, 1, **spread)  # type: ignore[call-overload]
    else:
        low, high = (0, 2) if place == PLACES[1] else (8, 11)
        x = side * (low + (high - low) * torch.rand(n, 1, **spread))  # type: ignore[call-overload]
    return x, curve(name, x) + NOISE[name] * torch.randn(n, 1, **spread)  # type: ignore[call-overload]


def trained(hidden: Sequence[int], x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """A tanh network in float64."""
    torch.manual_seed(seed)
    widths, layers = (1, *hidden), list[nn.Module]()
    for fan_in, fan_out in zip(widths, hidden, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(hidden[-1], 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(BATCH):
            loss = F.mse_loss(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def measured(name: str, hidden: Sequence[int], epochs: int, seed: int) -> dict[str, Any]:
    """For each way and place coverage of new targets and deviation of the outputs; the bands on a grid."""
    source = torch.Generator().manual_seed(seed)
    x, y = drawn(name, PLACES[0], POINTS[name], source)
    tests = {place: drawn(name, place, TESTED, source) for place in PLACES}
    model = trained(hidden, x, y, epochs, seed)
    noise = F.mse_loss(model(x), y).item()
    scores: dict[str, dict[str, dict[str, float]]] = {}
    bands: dict[str, dict[str, list[float]]] = {}
    for way, (mean, tuned) in WAYS.items():
        gp = linnet.TangentGP(model, Gaussian(variance=noise), mean=mean).fit(x, y)
        if tuned:
            gp.tune()
        scores[way] = {}
        for place, (test_x, test_y) in tests.items():
            found = gp.predictive(test_x)
            noisy = found.with_noise()
            missed = (found.mean - test_y).abs()
            scores[way][place] = {
                "covered": float((missed <= 1.96 * noisy.variance.sqrt()).double().mean()),
                "deviation": float(found.variance.clamp_min(0).sqrt().mean()),
            }
        shown = gp.predictive(GRID)
        bands[way] = {
            "mean": shown.mean[:, 0].tolist(),
            "deviation": shown.with_noise().variance[:, 0].sqrt().tolist(),
        }
    return {"parameters": sum(p.numel() for p in model.parameters()), "noise": noise, "scores": scores,
            "bands": bands, "x": x[:, 0].tolist(), "y": y[:, 0].tolist()}  # fmt: skip


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a network and way, means over seeds."""
    rows = []
    for name, network in dict.fromkeys((cell["figure"], cell["network"]) for cell in cells):
        own = [cell for cell in cells if (cell["figure"], cell["network"]) == (name, network)]
        title = f"{name}, {network}"
        for way in WAYS:
            columns = [
                with_error((cell["scores"][way][place][key] for cell in own), digits, scale)
                for key, digits, scale in (("covered", 1, 100), ("deviation", 2, 1))
                for place in PLACES
            ]
            rows.append([title, way, with_error((cell["noise"] ** 0.5 for cell in own), 2), *columns])
            title = ""
    covered = (f"in 95 % bands, {place}, %" for place in PLACES)
    wide = (f"deviation, {place}" for place in PLACES)
    return markdown(["figure, hidden units", "way", "σ", *covered, *wide], rows)


def draw(study: Study, cells: Sequence[Cell]) -> None:
    """The bands of some networks."""
    picture, axes = figure(columns=len(cells), rows=len(WAYS), width=2.7, height=2.2)
    for column, cell in enumerate(cells):
        for row, way in enumerate(WAYS):
            ax, band = axes[row][column], cell["bands"][way]
            mean, deviation = torch.tensor(band["mean"]), torch.tensor(band["deviation"])
            ax.plot(GRID[:, 0], curve(cell["figure"], GRID)[:, 0], color="black", lw=0.8)
            ax.plot(cell["x"], cell["y"], ".", color=COLORS[1], ms=2)
            ax.plot(GRID[:, 0], mean, color=COLORS[0], lw=1.2)
            ax.fill_between(
                GRID[:, 0], mean - 1.96 * deviation, mean + 1.96 * deviation, color=COLORS[0], alpha=0.2, lw=0
            )
            ax.set(ylim=(-10, 30))
            ax.set_title(f"{cell['figure']}, {cell['network']}: {way}", fontsize=7)
    save(picture, study.out / "bands.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--epochs", type=int, default=250)
    given = options.parse_args(arguments)
    study, cells = Study("fast_adaptation/bands", given), list[Cell]()
    for name, networks in NETWORKS.items():
        for hidden in networks:
            for seed in study.seeds:
                what = {"figure": name, "network": "-".join(map(str, hidden)), "seed": seed,
                        "epochs": given.epochs}  # fmt: skip
                run = lambda n=name, h=hidden, s=seed: measured(n, h, given.epochs, s)  # noqa: E731
                cells.append(study.cell(what, run))
    drawn_alone = ("bands", "x", "y")
    study.publish(table(cells), [{k: v for k, v in c.items() if k not in drawn_alone} for c in cells])
    draw(study, [cell for cell in cells if cell["seed"] == 0])


if __name__ == "__main__":
    main()
