"""Sinusoids again: the tangent process beside a transferred deep kernel (Maddox et al. 2021, figure A.7).

A deep-kernel Gaussian process (an RBF kernel on the 40 features of the 1-40-40 network, trained by marginal
likelihood on the first task) conditioned on ten points of other tasks with the same hyper-parameters: the
two-task version of Patacchiola et al. 2019. The paper shows that it underfits, as does adaptive deep kernel
learning (ADKL), which has no published code for PyTorch and is left out. Needs GPyTorch; without it the
script says so and ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.fast_adaptation.sinusoids import POINTS, Sinusoid, scores, trained
from experiments.study import Cell, Study, parser
from experiments.tables import markdown, with_error
from linnet.likelihoods import Gaussian

WAYS = (
    "TangentGP",
    "TangentGP, tuned",
    "TangentGP, without f₀",
    "TangentGP, tuned, without f₀",
    "deep kernel",
)


class Moments:
    """Mean and variance of targets, in the form that ``scores`` wants.

    Args:
        mean: (N, 1).
        variance: (N, 1).
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self.mean, self.variance = mean, variance

    def with_noise(self) -> Moments:
        """Itself: the noise is in."""
        return self


def deep_kernel(first: tuple[Tensor, Tensor], steps: int, seed: int) -> tuple[Any, Any]:
    """The process trained on the first task, and its likelihood."""
    import gpytorch

    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()).double()

    class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
        """A constant mean and an RBF kernel on features."""

        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.body, self.mean = body, gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            """The prior."""
            features = self.body(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(features))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    process = Process(first[0], first[1][:, 0], likelihood).double()
    process.train()
    optimizer = torch.optim.Adam(process.parameters(), lr=1e-2)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -evidence(process(first[0]), first[1][:, 0])
        loss.backward()
        optimizer.step()
    return process.eval(), likelihood.eval()


def compared(points: int, epochs: int, steps: int, tasks: int, seed: int) -> dict[str, Any]:
    """Scores of all ways, averaged over tasks."""
    model, noise = trained("tanh", Sinusoid(seed), points, epochs, seed)
    process, likelihood = deep_kernel(Sinusoid(seed).drawn(points), steps, seed)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for t in range(tasks):
        task = Sinusoid(1000 * (seed + 1) + t)
        x, y = task.drawn(POINTS)
        test_x, test_y = task.drawn(200)
        gp = linnet.TangentGP(model, Gaussian(variance=noise), space="function").fit(x, y)
        found["TangentGP"].append(scores(gp.predictive(test_x), test_y, task.amplitude))
        found["TangentGP, tuned"].append(scores(gp.tune().predictive(test_x), test_y, task.amplitude))
        # the formulas of Maddox et al. 2021 leave the network's own output out
        bare = linnet.TangentGP(model, Gaussian(variance=noise), space="function", mean="zero").fit(x, y)
        found["TangentGP, without f₀"].append(scores(bare.predictive(test_x), test_y, task.amplitude))
        found["TangentGP, tuned, without f₀"].append(
            scores(bare.tune().predictive(test_x), test_y, task.amplitude)
        )
        process.set_train_data(x, y[:, 0], strict=False)
        with torch.no_grad():
            answer = likelihood(process(test_x))
        moments = Moments(answer.mean[:, None], answer.variance[:, None])
        found["deep kernel"].append(scores(moments, test_y, task.amplitude))
    return {
        f"{way}, {k}": sum(one[k] for one in each) / tasks for way, each in found.items() for k in each[0]
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the study, if GPyTorch is there."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--tasks", type=int, default=10)
    options.add_argument("--epochs", type=int, default=2500, help="of the network's training")
    options.add_argument("--steps", type=int, default=300, help="of the deep kernel's")
    options.add_argument("--first", type=int, default=100, help="points of the first task")
    given = options.parse_args(arguments)
    if importlib.util.find_spec("gpytorch") is None:
        print("Nothing was run. This comparison needs GPyTorch: pip install gpytorch")
        return
    study = Study("fast_adaptation/deep_kernel", given)
    cells = [
        study.cell(
            {"seed": seed, "first": given.first, "epochs": given.epochs, "steps": given.steps,
             "tasks": given.tasks},
            lambda seed=seed: compared(given.first, given.epochs, given.steps, given.tasks, seed),
        )
        for seed in study.seeds
    ]  # fmt: skip
    study.publish(table(cells), cells)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: the scores of each way."""
    rows = [
        [way, *(with_error([c[f"{way}, {k}"] for c in cells], 2) for k in ("error", "density", "covered"))]
        for way in WAYS
    ]
    return markdown(["", "RMSE / A", "log density (nats)", "share in 95 % interval"], rows)


if __name__ == "__main__":
    main()
