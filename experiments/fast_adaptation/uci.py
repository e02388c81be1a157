"""UCI regression on the usual splits: tangent Gaussian process and Laplace beside published numbers.

The protocol of Hernández-Lobato and Adams 2015: 20 random splits 90 : 10, inputs and targets scaled by the
training part, one hidden layer of 50 ReLU units. The network is trained to its most probable weights; then
only linnet's hyper-parameters are chosen, by evidence, without any validation data. Beside it:
MC dropout as Gal and Ghahramani 2016 report it for these very splits (± standard deviation); its rate and
precision were chosen by Bayesian optimization on a part of the training data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments.locate import find_data_dir
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.likelihoods import Gaussian

# name: (stored as, RMSE of MC dropout, its log density)
SETS = {
    "yacht": ("yacht", "1.11 ± 0.38", "-1.55 ± 0.12"),
    "boston": ("bostonHousing", "2.97 ± 0.85", "-2.46 ± 0.25"),
    "energy": ("energy", "1.66 ± 0.19", "-1.99 ± 0.09"),
    "concrete": ("concrete", "5.23 ± 0.53", "-3.04 ± 0.09"),
    "wine": ("wine_quality_red", "0.62 ± 0.04", "-0.93 ± 0.06"),
}
WAYS = ("network alone", "TangentGP", "TangentGP, without f₀", "Laplace, Kronecker", "Laplace, full")


class Split:
    """One split, scaled by its training part; float64.

    Args:
        name: One of ``SETS``.
        split: Number of the split.
        data_dir: Folder of data sets.
    """

    def __init__(self, name: str, split: int, data_dir: str | None) -> None:
        folder, stored = find_data_dir(data_dir, require=["uci_regression.npz"]), SETS[name][0]
        with np.load(folder / "uci_regression.npz", allow_pickle=False) as file:
            x, y, test = (file[f"{stored}__{part}"] for part in ("X", "y", "test_idx"))
        held_out = np.zeros(len(x), dtype=bool)
        held_out[test[split]] = True
        values = torch.from_numpy(x), torch.from_numpy(y.reshape(-1, 1))
        train, self.test = ([v[torch.from_numpy(which)] for v in values] for which in (~held_out, held_out))
        center, spread = train[0].mean(0), train[0].std(0)
        spread[spread == 0] = 1.0
        self.y_center, self.y_spread = train[1].mean(), train[1].std()
        self.x, self.test_x = ((part - center) / spread for part in (train[0], self.test[0]))
        self.y = (train[1] - self.y_center) / self.y_spread

    def scores(self, mean: Tensor, variance: Tensor) -> dict[str, float]:
        """RMSE and log density in the units of the data; the variance is that of a target."""
        own = mean * self.y_spread + self.y_center
        spread = variance * self.y_spread**2
        errors = self.test[1] - own
        density = -0.5 * (errors.square() / spread + (2 * math.pi * spread).log())
        return {"rmse": float(errors.square().mean().sqrt()), "density": float(density.mean())}


def trained(data: Split, steps: int, decay: float, seed: int) -> nn.Module:
    """One hidden layer of 50 units, by full-batch Adam with its rate annealed to zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(data.x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        loss = F.mse_loss(model(data.x), data.y) + decay / len(data.x) * squares
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def predicted(way: str, model: nn.Module, data: Split) -> dict[str, float]:
    """Scores of one way to predict."""
    residual = F.mse_loss(model(data.x), data.y).item()
    if way == "network alone":
        mean = model(data.test_x).detach()
        return data.scores(mean, torch.full_like(mean, residual))
    likelihood = Gaussian(variance=residual)
    if way.startswith("TangentGP"):
        # the network has seen these very data: f₀ as the mean leaves the kernel little to explain
        mean = "zero" if "without" in way else "network"
        gp = linnet.TangentGP(model, likelihood, mean=mean).fit(data.x, data.y).tune()
        noisy = gp.predictive(data.test_x).with_noise()
        facts = {"noise": float(gp.likelihood.noise), "prior": gp.prior_precision}  # type: ignore[attr-defined]
    else:
        structure = "kfac" if "Kronecker" in way else "full"
        la = linnet.Laplace(model, likelihood, structure).fit((data.x, data.y)).tune("evidence")
        noisy = la.predictive(data.test_x).with_noise()  # type: ignore[assignment,union-attr]
        facts = {"noise": float(la.likelihood.noise), "prior": float(la.prior_precision)}  # type: ignore[attr-defined,arg-type]
    return data.scores(noisy.mean, noisy.variance) | facts


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    options = parser(__doc__ or "", seeds=5)
    options.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    options.add_argument("--steps", type=int, default=2000, help="of training")
    options.add_argument("--decay", type=float, default=0.5, help="λ σ²: weight decay of training")
    given = options.parse_args(arguments)
    study = Study("fast_adaptation/uci", given)
    splits = range(20) if given.full else study.seeds  # a seed is a split
    cells = []
    for name in given.sets:
        for split in splits:
            made: list[tuple[Split, nn.Module]] = []

            def numbers(
                way: str, name: str = name, split: int = split, made: list[Any] = made
            ) -> dict[str, Any]:
                if not made:
                    data = Split(name, split, given.data_dir)
                    made.append((data, trained(data, given.steps, given.decay, split)))
                return predicted(way, made[0][1], made[0][0])

            for way in WAYS:
                what = {"set": name, "split": split, "way": way, "steps": given.steps, "decay": given.decay}
                cells.append(study.cell(what, lambda way=way, run=numbers: run(way)))
    study.publish(table(cells), cells, published={n: v[1:] for n, v in SETS.items()})


def table(cells: Sequence[Cell]) -> str:
    """Markdown: error and log density of each set, means over splits beside the published numbers."""
    rows = []
    for name in dict.fromkeys(cell["set"] for cell in cells):
        for key, title, published in zip(
            ("rmse", "density"), ("RMSE", "log density"), SETS[name][1:], strict=True
        ):
            own = [with_error(chosen(cells, key, set=name, way=way), 2) for way in WAYS]
            rows.append([f"{name}, {title}", *own, published])
    return markdown(["", *WAYS, "MC dropout"], rows)


if __name__ == "__main__":
    main()
