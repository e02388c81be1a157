"""How many new targets the intervals of a fit cover: nominal 90 %, few samples, ridge chosen by the fit.

Simulated tasks, and UCI sets of which few samples are taken. A random network is fitted to N samples; the
interval of a new target is mean ± 1.645 standard deviations of ``predictive(x).with_noise()``. Beside it is
the interval where the ridge and its noise of highest evidence are taken as known. Widths are relative to the
interval that the root mean squared error of the same predictions asks for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from experiments.locate import find_data_dir
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, mean_and_error, with_error

WAYS = ("adapt", "loo", "gcv", "evidence")
NOISES = ("Gaussian", "Student's t with 3 degrees", "growing with x")
TEACHERS = ("Friedman 1", "Gaussian process", "ReLU network", "linear")
UCI = ("yacht", "bostonHousing", "energy", "concrete", "wine_quality_red")
COUNTS = (20, 40, 120)
NORMAL = 1.6449  # 95 % of a normal distribution lie below
TESTS = 300


def simulated(teacher: str, noise: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """N + 300 inputs and targets of a random task, the noise 0.1 to 1 times as large as what is learned."""
    draw = np.random.default_rng([TEACHERS.index(teacher), NOISES.index(noise), n, seed])
    inputs, count = (10 if teacher == "Friedman 1" else int(draw.integers(2, 9))), n + TESTS
    x = draw.normal(size=(count, inputs))
    if teacher == "Friedman 1":  # Friedman 1991: five inputs of ten matter
        u = 1 / (1 + np.exp(-1.7 * x))
        f = 10 * np.sin(math.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    elif teacher == "Gaussian process":
        distance = ((x[:, None] - x) ** 2).sum(2)
        kernel = np.exp(-distance / (4 * inputs)) + 1e-8 * np.eye(count)
        f = np.linalg.cholesky(kernel) @ draw.normal(size=count)
    elif teacher == "ReLU network":
        hidden = np.maximum(x @ draw.normal(size=(inputs, 12)) + draw.normal(size=12), 0)
        f = np.maximum(hidden @ draw.normal(size=(12, 12)), 0) @ draw.normal(size=12)
    else:
        f = x @ draw.normal(size=inputs)
    e = draw.standard_t(3, size=count) / math.sqrt(3) if noise == NOISES[1] else draw.normal(size=count)
    if noise == NOISES[2]:
        growing = np.exp(0.7 * x[:, 0])
        e *= growing / np.sqrt((growing**2).mean())
    y = (f - f.mean()) / f.std() + 10 ** draw.uniform(-1, 0) * e
    return torch.from_numpy(x), torch.from_numpy(y)


def measured(name: str, n: int, seed: int, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """N training samples of a UCI set and at most 300 others, scaled by the former."""
    folder = find_data_dir(data_dir, require=["uci_regression.npz"])
    with np.load(folder / "uci_regression.npz", allow_pickle=False) as file:
        x, y = (torch.from_numpy(file[f"{name}__{part}"]) for part in ("X", "y"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[
        : n + min(TESTS, len(x) - n)
    ]
    x, y = x[order], y[order].flatten()
    spread = x[:n].std(0)
    spread[spread == 0] = 1.0
    return (x - x[:n].mean(0)) / spread, (y - y[:n].mean()) / y[:n].std()


def network(inputs: int, seed: int) -> nn.Module:
    """A random network of two hidden layers."""
    torch.manual_seed(seed)
    layers = (nn.Linear(inputs, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    return nn.Sequential(*layers).double()


def fitted(way: str, net: nn.Module, data: tuple[Any, Tensor]) -> Any:
    """A fit, its ridge chosen in one of the ``WAYS``."""
    return linnet.adapt(net, data) if way == "adapt" else linnet.fit(linnet.linearize(net), data, ridge=way)


def covered(way: str, data: tuple[Tensor, Tensor], n: int, seed: int) -> dict[str, Any]:
    """Coverage and widths of the intervals of one fit."""
    x, y = data[0], data[1][:, None]
    fit = fitted(way, network(x.shape[1], seed), (x[:n], y[:n]))
    prediction = fit.predictive(x[n:])
    errors = (prediction.mean - y[n:]).abs()
    asked = NORMAL * float(errors.square().mean().sqrt())
    found: dict[str, Any] = {"noise factor": fit.record.noise_factor}
    half = NORMAL * prediction.with_noise().variance.sqrt()
    for name, width in (("", half), (" ridge known", half / fit.record.noise_factor**0.5)):
        found[f"covered{name}"] = float((errors <= width).double().mean())
        found[f"width{name}"] = float(width.mean()) / asked
    return found


def row(cells: list[Cell], **where: Any) -> list[str]:
    """Per cent covered for each number of samples: as it is, where the ridge is taken as known, and width."""
    made = []
    for n in COUNTS:
        known, own, width = (
            chosen(cells, key, n=n, **where) for key in ("covered ridge known", "covered", "width")
        )
        mean = mean_and_error(known)[0]
        made += [f"{100 * mean:.1f}", with_error(own, 1, 100), f"{mean_and_error(width)[0]:.2f}"]
    return made


def table(cells: list[Cell]) -> str:
    """Markdown: a row for each way to choose the ridge, and of leave-one-out for each kind of noise."""
    header = ["ridge by"]
    for n in COUNTS:
        header += [f"N = {n}: ridge known", "covered %", "width"]
    rows = [[f"simulated, {way}", *row(cells, way=way, real=False)] for way in WAYS]
    rows += [[f"UCI, {way}", *row(cells, way=way, real=True)] for way in WAYS]
    rows += [[f"simulated, loo, noise {noise}", *row(cells, way="loo", noise=noise)] for noise in NOISES]
    return markdown(header, rows)


def main() -> None:
    """Run the study."""
    arguments = parser(__doc__ or "", seeds=8).parse_args()
    study = Study("coverage/intervals", arguments)
    tasks = [(teacher, noise) for teacher in TEACHERS for noise in NOISES] + [(name, "") for name in UCI]
    cells = []
    for name, noise in tasks:
        for n in COUNTS:
            for seed in study.seeds:
                for way in WAYS:

                    def numbers(
                        name: str = name, noise: str = noise, n: int = n, seed: int = seed, way: str = way
                    ) -> dict[str, Any]:
                        given = measured(name, n, seed, arguments.data_dir) if not noise else None
                        return covered(way, given or simulated(name, noise, n, seed), n, seed)

                    what = {"task": name, "noise": noise, "n": n, "seed": seed, "way": way}
                    cells.append({**study.cell(what, numbers), "real": not noise})
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
