"""Faces and their angles: a regressor adapted to other people (Maddox et al. 2021, Olivetti faces, E.2).

A LeNet-like network (45 x 45 pixels; convolutions of 20 and 50 channels, linear layers 3200-500-2) is
trained with a heteroscedastic loss (Adam at 10⁻³, batches of 32, 150 epochs) and adapted to another task by
the tangent Gaussian process with the network's own noise, in function space; beside it: the network as it
is, its last layer retrained, all of it retrained, and Bayesian regression on the last layer's features. The
supplement gives the networks and the training but not the task; after Wilson et al. 2016, whose set-up it
names, the target here is the angle by which a face was turned, uniform in [-90, 90] degrees. First task: 20
people. Second: people never seen, and with ``--shift``, angles measured from another zero, which a mean
that was carried over gets wrong. The 45 x 45 pixels in the middle are those that no turn of a 64 x 64 image
brings in from outside.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.baselines.last_layer import last_layer
from experiments.fast_adaptation.networks import face_network
from experiments.figures import COLORS, figure, save
from experiments.locate import find_data_dir
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.likelihoods import HeteroscedasticGaussian

UNIT = 45.0  # degrees in a unit of the target
SIDE = 45
PEOPLE = 20  # of the first task
WAYS = ("network as it is", "TangentGP", "last layer (ABLR)", "last layer retrained", "all retrained")


def turned(faces: Tensor, copies: int, seed: int, shift: float) -> tuple[Tensor, Tensor]:
    """Each face turned by ``copies`` random angles, (N, 1, 45, 45); the angle in units, (N, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = faces.repeat(copies, 1, 1, 1)
    angle = math.pi * (torch.rand(len(x), generator=generator) - 0.5)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(len(x))
    matrix = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    rotated = F.grid_sample(x, grid, align_corners=False)
    edge = (x.shape[-1] - SIDE) // 2
    cut = rotated[:, :, edge : edge + SIDE, edge : edge + SIDE]
    return cut, (torch.rad2deg(angle) / UNIT + shift)[:, None]


def loss_of(likelihood: HeteroscedasticGaussian, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean heteroscedastic loss."""
    return likelihood.nll(model(x), y).mean()


def trained(
    model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, only: nn.Module | None = None
) -> nn.Module:
    """Adam at 10⁻³ on batches of 32."""
    likelihood = HeteroscedasticGaussian()
    optimizer = torch.optim.Adam((only or model).parameters(), lr=1e-3)
    x, y = data
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(32):
            loss = loss_of(likelihood, model, x[index], y[index])
            model.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    """RMSE in degrees and log density in nats of an angle in degrees."""
    variance = variance.double().clamp_min(1e-9)
    density = -0.5 * ((y - mean).double().square() / variance + (2 * math.pi * variance).log()) - math.log(
        UNIT
    )
    return {"rmse": UNIT * float((mean - y).square().mean().sqrt()), "density": float(density.mean())}


def by_network(model: nn.Module, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Scores of a network's own mean and variance."""
    likelihood = HeteroscedasticGaussian()
    with torch.no_grad():
        f = model(test[0])
        return scores(likelihood.mean(f), likelihood.variance(f), test[1])


def adapted(
    way: str, model: nn.Module, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], epochs: int
) -> dict[str, Any]:
    """One way to adapt, with the seconds that it took to adapt and predict."""
    begin = time.perf_counter()
    if way == "network as it is":
        found = by_network(model, test)
    elif way == "TangentGP":
        gp = linnet.TangentGP(model, HeteroscedasticGaussian(), space="function").fit(*data).tune()
        noisy = gp.predictive(test[0]).with_noise()
        found = scores(noisy.mean, noisy.variance, test[1])
        found |= {"prior": gp.prior_precision, "noise_scale": gp.noise_scale}
    elif way == "last layer (ABLR)":
        noisy = last_layer(model, data).predictive(test[0]).with_noise()  # type: ignore[assignment]
        found = scores(noisy.mean.float(), noisy.variance, test[1])
    else:
        own = copy.deepcopy(model)
        trained(own, data, epochs, own[-1] if way == "last layer retrained" else None)  # type: ignore[index]
        found = by_network(own, test)
    return found | {"took": time.perf_counter() - begin}


def draw(study: Study, cells: list[dict[str, Any]], sizes: list[int]) -> None:
    """Error and log density against the number of faces of the second task."""
    drawn, axes = figure(columns=2, width=3.6, height=3.0)
    for ax, key, label in zip(
        axes, ("rmse", "density"), ("RMSE (degrees)", "log density (nats)"), strict=True
    ):
        for color, way in zip(COLORS, WAYS, strict=False):
            means = [
                float(np.mean([c[key] for c in cells if c["way"] == way and c["points"] == n])) for n in sizes
            ]
            ax.plot(sizes, means, "o-", color=color, label=way, ms=3)
        ax.set(xlabel="faces of the second task", ylabel=label)
    axes[1].set_ylim(bottom=-12)
    axes[0].legend(fontsize=7)
    save(drawn, study.out / "olivetti.svg")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--copies", type=int, default=3, help="turns of each face of the first task")
    options.add_argument("--epochs", type=int, default=30, help="of the first task (the paper: 150)")
    options.add_argument("--retrain", type=int, default=30, help="epochs of retraining on the second task")
    options.add_argument("--points", type=int, nargs="+", default=[10, 40, 100])
    options.add_argument("--held-out", type=int, default=200, help="faces that adaptation is judged by")
    options.add_argument(
        "--shift", type=float, default=0.0, help="zero of the second task's angle, / 45 degrees"
    )
    given = options.parse_args(arguments)
    if given.full:
        given.copies, given.epochs, given.retrain, given.points = 10, 150, 150, [10, 50, 100, 200, 400]
    study = Study("fast_adaptation/olivetti", given)
    folder = find_data_dir(given.data_dir, require=["olivetti.npz"])
    with np.load(folder / "olivetti.npz", allow_pickle=False) as file:
        faces = torch.from_numpy(file["images"]).float()[:, None] / 255 - 0.5
        subject = torch.from_numpy(file["subject"].astype(np.int64))
    cells = []
    for seed in study.seeds:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        first = torch.isin(subject, order[:PEOPLE])
        second = order[PEOPLE:]
        near, far = (torch.isin(subject, part) for part in second.split(10))
        made: list[nn.Module] = []

        def network(seed: int = seed, first: Tensor = first, made: list[nn.Module] = made) -> nn.Module:
            if not made:
                torch.manual_seed(seed)
                made.append(
                    trained(face_network(), turned(faces[first], given.copies, seed, 0.0), given.epochs)
                )
            return made[0]

        pool = turned(faces[near], 4, 100 + seed, given.shift)
        mixed = torch.randperm(len(pool[0]), generator=torch.Generator().manual_seed(seed))
        test = tuple(t[: given.held_out] for t in turned(faces[far], 2, 200 + seed, given.shift))
        for points in given.points:
            data = tuple(t[mixed[:points]] for t in pool)
            for way in WAYS:
                what = {"way": way, "points": points, "seed": seed, "copies": given.copies,
                        "epochs": given.epochs, "retrain": given.retrain, "shift": given.shift,
                        "held_out": given.held_out}  # fmt: skip
                run = lambda w=way, d=data, t=test, n=network: adapted(w, n(), d, t, given.retrain)  # noqa: E731
                cells.append(study.cell(what, run))
    study.publish(table(cells), cells)
    draw(study, cells, given.points)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: errors and log densities of each way, a column for each number of faces."""
    sizes = list(dict.fromkeys(cell["points"] for cell in cells))
    rows = []
    for way in WAYS:
        errors, densities = (
            [with_error(chosen(cells, key, way=way, points=n), digits) for n in sizes]
            for key, digits in (("rmse", 1), ("density", 2))
        )
        rows.append(
            [way, *errors, *densities, with_error(chosen(cells, "took", way=way, points=sizes[-1]), 1)]
        )
    header = ["", *(f"RMSE (degrees), {n} faces" for n in sizes), *(f"log density, {n}" for n in sizes)]
    return markdown([*header, f"seconds, {sizes[-1]}"], rows)


if __name__ == "__main__":
    main()
