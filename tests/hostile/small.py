"""The smallest objects to try every public callable with: 5 examples, 3 inputs, 2 outputs, P = 26."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.linalg import Dense, Diagonal
from tests.curvatures.side_by_side import curvature_of

likelihoods = linnet.likelihoods


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def net() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def relu_net() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


def conv_net() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)))


def pooled_net() -> nn.Module:
    return _seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
        )
    )


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def x() -> Tensor:
    return normal(5, 3)


def images() -> Tensor:
    return normal(5, 1, 3, 3)


def labels() -> Tensor:
    return torch.tensor([0, 1, 0, 1, 1])


def targets() -> Tensor:
    return normal(5, 2, seed=2)


def classes() -> tuple[Tensor, Tensor]:
    return x(), labels()


def regression() -> tuple[Tensor, Tensor]:
    return x(), targets()


def pictures() -> tuple[Tensor, Tensor]:
    return images(), labels()


@cache
def lin() -> Any:
    return linnet.linearize(net())


def params() -> dict[str, Tensor]:
    return {name: torch.ones_like(p) for name, p in net().named_parameters()}


@cache
def fit() -> Any:
    return linnet.fit(lin(), classes())


@cache
def sketched_fit() -> Any:
    return linnet.fit(lin(), classes(), solver=linnet.fitting.Sketch(dim=5))


@cache
def gradient_store() -> Any:
    small = linnet.with_sketch(net(), curvature("kfac"), dim=10)
    return linnet.audit.GradientStore(mkdtemp(), small, likelihood(), shard_size=2).add(classes())


@cache
def regression_fit() -> Any:
    return linnet.fit(lin(), regression())


@cache
def softmax() -> Any:
    return linnet.fit(lin(), classes(), loss="cross-entropy")


def sequences() -> tuple[Tensor, Tensor]:
    words = torch.arange(15).view(5, 3) % 4
    return words, (words + 1) % 4


@cache
def words() -> Any:
    net = _seeded(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 4)))
    return linnet.fit(linnet.linearize(net), sequences(), "cross-entropy", ridge=0.1, axis=-1)


def adapted() -> Any:
    return linnet.adapt(net(), classes(), weight=0.5, ridge=0.1)


@cache
def metric() -> Any:
    return linnet.with_metric(net(), curvature("kfac"))


@cache
def sketched() -> Any:
    return linnet.with_sketch(net(), curvature("kfac"), dim=5)


def likelihood() -> Any:
    return likelihoods.Categorical()


@cache
def operator() -> Any:
    """A symmetric positive definite matrix as an operator."""
    factor = normal(3, 3, seed=5)
    return Dense(factor @ factor.T + torch.eye(3, dtype=factor.dtype))


@cache
def curvature(structure: str, **options: Any) -> Any:
    return curvature_of(net(), classes(), likelihood(), structure, **options)


def running() -> Any:
    made = linnet.RunningCurvature(net(), likelihood())
    made.add(x(), labels())
    return made


@cache
def laplace() -> Any:
    return linnet.Laplace(net(), likelihood()).fit(classes())


@cache
def laplace_regression() -> Any:
    return linnet.Laplace(net(), likelihoods.Gaussian()).fit(regression())


@cache
def gp(space: str = "function") -> Any:
    return linnet.TangentGP(net(), likelihoods.Gaussian(), space).fit(*regression())


@cache
def posterior() -> Any:
    return linnet.linear_posterior(
        lin(), classes(), likelihood(), linnet.SVI(training=linnet.Training(epochs=1))
    )


@cache
def flow() -> Any:
    return linnet.gradient_flow(lin(), classes(), [0.5, 1.0])


def axes() -> Any:
    """Axes of a figure that pyplot does not know."""
    from matplotlib.figure import Figure

    return Figure().subplots()


def places() -> Tensor:
    return torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]


@cache
def on_a_line() -> Any:
    net = _seeded(lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    return linnet.TangentGP(net, linnet.likelihoods.Gaussian()).fit(places(), places())


def probabilities(inputs: Any) -> Tensor:
    """A predictor of the user's own."""
    with torch.no_grad():
        found: Tensor = net()(inputs).softmax(1)
    return found


def differentiable(inputs: Any) -> Tensor:
    found: Tensor = net()(inputs).softmax(1)
    return found


@cache
def report() -> Any:
    return linnet.evaluate(probabilities, classes())


@cache
def regression_report() -> Any:
    return linnet.evaluate(regression_fit().predictive, regression())


@cache
def separation() -> Any:
    return linnet.ood(probabilities, x(), 3 * x())


@cache
def finetuned() -> Any:
    return linnet.finetune(
        relu_net(), classes(), training=linnet.Training(steps=2, learning_rate=0.01, batch_size=5)
    )


def preconditioner(module: nn.Module) -> Any:
    return linnet.KroneckerPreconditioner(curvature("kfac"), module, 0.1)


def sgd(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or net()).parameters(), lr=0.1)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def learned(kind: str) -> Any:
    """A continual method that has learned one task."""
    options = {} if kind == "SynapticIntelligence" else {"likelihood": likelihood()}
    made = getattr(linnet.continual, kind)(net(), **options)
    if kind != "SynapticIntelligence":
        made.consolidate(classes())
    else:
        model = made.model
        optimizer = sgd(model)
        model(x()).square().sum().backward()
        optimizer.step()
        made.after_step()
    return made


def restored() -> Any:
    """A method that was loaded, without the data of its past task."""
    made = linnet.continual.NonOnlineLaplace(net(), likelihood())
    made.load_state_dict(learned("NonOnlineLaplace").state_dict())
    return made


def metrics() -> Any:
    found = linnet.continual.StreamMetrics(baseline=[0.5, 0.5])
    found.record([0.9, 0.5])
    found.record([0.8, 0.7])
    return found


def gauss_newton() -> Any:
    return linnet.optim.GaussNewton(net(), likelihood())


def step_report() -> Any:
    return gauss_newton().step(x(), labels())


def relinearized() -> Any:
    return linnet.optim.IterativeLinearization(net(), make_optimizer, 2)


def solving() -> Any:
    return linnet.optim.IterativeLinearization(net(), None, None)


@cache
def eigenfunctions() -> Any:
    return linnet.spectrum.eigenfunctions(lin(), x(), k=3)


@cache
def density() -> Any:
    return linnet.spectrum.spectral_density(lin(), x(), samples=2, steps=4)


def recorder() -> Any:
    return linnet.spectrum.Recorder(x(), labels(), k=3)


def recorded() -> Any:
    found = recorder()
    found.note(net(), 0)
    return found


@cache
def directions() -> Any:
    return linnet.spectrum.anisotropy_directions(conv_net(), images()[:1][0], k=2)


@cache
def release() -> Any:
    return linnet.audit.release(
        regression_fit(), 1.0, 1e-3, clip=(1.0, 10.0), generator=torch.Generator().manual_seed(0)
    )


@cache
def surgery_report() -> Any:
    return linnet.surgery.report(linnet.surgery.leaky_relu(relu_net()))


@cache
def tangent_predictive() -> Any:
    return gp().predictive(x())


@cache
def ridge_path() -> Any:
    return linnet.audit.ridge_path(fit(), classes())


def diagonal() -> Diagonal:
    return Diagonal(torch.ones(26, dtype=torch.float64))


@cache
def saved(kind: str) -> Path:
    """A folder of something that was saved."""
    folder = Path(mkdtemp(prefix="linnet-")) / kind
    made = {"fit": fit, "laplace": laplace}
    made[kind]().save(folder)
    return folder


def custom_nll(f: Tensor, y: Tensor) -> Tensor:
    return -f.log_softmax(-1).gather(-1, y.long()[..., None])[..., 0]


def custom() -> Any:
    return likelihoods.Custom(custom_nll, support=[0, 1])
