"""One call of every public function and method, for tests of side effects."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.fitting import CG, SGD
from linnet.likelihoods import Categorical, Gaussian
from tests.curvatures.side_by_side import curvature_of

FORWARD = {"calls": 0, "raises at": 0}  # of all copies of the network


class Asked(nn.Module):
    """The user's network: in training mode, with gradients, a hook, BatchNorm, dropout and recurrence.

    Its forward pass raises an error the n-th time that it is run, wherever that is; 0 for never.
    """

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 2, batch_first=True)
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.3))
        self.fixed = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        FORWARD["calls"] += 1
        if FORWARD["calls"] == FORWARD["raises at"]:
            raise ValueError("the user's own mistake")
        h: Tensor = self.head(self.fixed(self.body(self.rnn(x)[0][:, -1])))
        return h


def _hook(module: nn.Module, args: Any, result: Any) -> None:
    """What a user may have registered."""


@dataclass
class Scene:
    """A network with data, and what may be asked of them."""

    seed: int = 2  # of which no layer has all its units off

    @cached_property
    def model(self) -> nn.Module:
        """The user's network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Asked()
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.fill_(0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        model.body.register_forward_hook(_hook)
        return model.train()

    @cached_property
    def x(self) -> Tensor:
        """Inputs."""
        return torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(1))

    @property
    def y(self) -> Tensor:
        """Classes."""
        return torch.arange(8) % 2

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.x, self.y

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """Inputs with real targets."""
        return self.x, self.x[:, 0]

    def lin(self) -> Any:
        """A linearization."""
        return linnet.linearize(self.model)

    def fit(self, **options: Any) -> Any:
        """A fit."""
        return linnet.fit(self.lin(), self.data, **{"solver": "dual", **options})

    def laplace(self, **options: Any) -> Any:
        """A posterior."""
        return linnet.Laplace(self.model, Categorical(), **options).fit(self.data)

    def gp(self, **options: Any) -> Any:
        """A process."""
        return linnet.TangentGP(self.model, Gaussian(0.1), **options).fit(*self.values)


def _saved(kept: Any, load: Callable[..., Any], *more: Any) -> Any:
    """Write to a folder and read again."""
    with tempfile.TemporaryDirectory() as folder:
        kept.save(Path(folder))
        return load(Path(folder), *more)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _running(s: Scene) -> Any:
    running = linnet.RunningCurvature(s.model, Categorical())
    running.add(s.data)
    return running.curvature()


#: Calls that leave the network as it is.
CALLS: dict[str, Callable[[Scene], Any]] = {
    "linearize": lambda s: s.lin(),
    "call": lambda s: s.lin()(s.x),
    "backward": lambda s: s.lin()(s.x).sum().backward(),
    "base": lambda s: s.lin().base(s.x),
    "jvp": lambda s: s.lin().jvp(s.x, torch.ones(s.lin().space.dim, 2)),
    "vjp": lambda s: s.lin().vjp(s.x, torch.ones(8, 2)),
    "jacobian": lambda s: s.lin().jacobian(s.x),
    "kernel": lambda s: s.lin().kernel(s.x, s.x[:2]),
    "kernel trace": lambda s: s.lin().kernel(s.x, form="trace"),
    "gap": lambda s: s.fit().module.gap(s.x),
    "relinearize": lambda s: s.fit().module.relinearize(),
    "preflight": lambda s: linnet.preflight(s.model, s.x),
    "with_head probe": lambda s: linnet.with_head(s.model, 3, data=s.data),
    "with_head cross_fit": lambda s: linnet.with_head(s.model, 3, linnet.Probe(cross_fit=2), data=s.data),
    "with_head zero": lambda s: linnet.with_head(s.model, 3, "zero"),
    "with_head random": lambda s: linnet.with_head(s.model, 3, "random", seed=_generator()),
    "with_metric": lambda s: linnet.with_metric(s.model, linnet.curvature(s.model, s.data, Categorical())),
    "fit auto": lambda s: s.fit(solver="auto"),
    "fit loo": lambda s: s.fit(ridge="loo"),
    "fit evidence": lambda s: s.fit(ridge="evidence"),
    "fit validation": lambda s: linnet.audit.tune_ridge(s.fit(), s.data),
    "fit cg": lambda s: s.fit(solver=CG(preconditioner="nystrom")),
    "fit sgd": lambda s: s.fit(solver=SGD(0.3), ridge=5.0),
    "fit cross-entropy": lambda s: s.fit(loss="cross-entropy"),
    "fit cross-entropy cg": lambda s: s.fit(loss="cross-entropy", solver="cg"),
    "predict": lambda s: s.fit().predict(s.x),
    "predictive": lambda s: s.fit().predictive(s.x).probs,
    "predictive sample": lambda s: s.fit().predictive(s.x).sample(3, _generator()),
    "loo": lambda s: s.fit().loo(),
    "loo cg": lambda s: s.fit(solver="cg").loo(),
    "influence": lambda s: s.fit().influence(s.x),
    "informativeness": lambda s: s.fit().informativeness(),
    "path": lambda s: s.fit().path(),
    "forget": lambda s: s.fit().forget([0, 3]),
    "update": lambda s: s.fit().update((s.x[:2] + 1, s.y[:2])),
    "constrain": lambda s: s.fit().constrain(s.x[:1], s.y[:1]),
    "save fit": lambda s: _saved(s.fit(), linnet.load_fit, s.model),
    "cross-entropy changes": lambda s: s.fit(loss="cross-entropy").forget([0]).update((s.x[:1], s.y[:1])),
    "curvatures": lambda s: linnet.curvature(
        s.model, s.data, Categorical(), ["full", "block", "diagonal", "kfac", "ekfac"]
    ),
    "curvature mc": lambda s: linnet.curvature(s.model, s.data, Categorical(), "kfac", "mc"),
    "curvature empirical": lambda s: linnet.curvature(s.model, s.data, Categorical(), "full", "empirical"),
    "hessian": lambda s: linnet.curvature(s.model, s.data, Categorical(), "full", matrix="hessian"),
    "low rank": lambda s: curvature_of(s.model, s.data, Categorical(), "low-rank", rank=3),
    "matrix-free": lambda s: (
        linnet.curvature(s.model, s.data, Categorical(), "matrix-free") @ torch.ones(s.lin().space.dim)
    ),
    "output covariance": lambda s: s.laplace().precision.inverse().output_covariance(s.x),
    "save curvature": lambda s: _saved(s.laplace().curvature, linnet.load, s.model),
    "running curvature": _running,
    "laplace": lambda s: s.laplace().predictive(s.x).probs,
    "laplace mc": lambda s: s.laplace().predictive(s.x, "mc", samples=3, seed=3).probs,
    "laplace tune": lambda s: s.laplace().tune("evidence").log_evidence(),
    "laplace sample": lambda s: s.laplace().sample(2, 3),
    "save laplace": lambda s: _saved(s.laplace(), linnet.load, s.model),
    "tangent process": lambda s: s.gp().update(*s.values).predictive(s.x).covariance,
    "tangent process cg": lambda s: s.gp(solver="cg").predictive(s.x).covariance,
    "tangent process tune": lambda s: s.gp().tune().log_evidence(),
    "tangent process adapt": lambda s: s.gp().adapt(*s.values),
    "save tangent process": lambda s: _saved(s.gp(), linnet.load, s.model),
    "linear posterior": lambda s: linnet.linear_posterior(s.lin(), s.data, Categorical()),
    "linear posterior svi": lambda s: linnet.linear_posterior(
        s.lin(), s.data, Categorical(), linnet.SVI(training=linnet.Training(epochs=1))
    ),
    "gradient flow": lambda s: linnet.gradient_flow(s.lin(), s.data, [1.0, float("inf")]),
    "evaluate": lambda s: linnet.evaluate(s.fit().predictive, s.data),
    "ood": lambda s: linnet.ood(lambda x: s.fit().predictive(x).probs, s.x, s.x + 1),
    "fgsm": lambda s: linnet.fgsm(lambda x: s.lin()(x).softmax(1), s.data, 0.1),
    **{
        f"finetune {method}": lambda s, method=method: linnet.finetune(
            s.model, s.data, method, training=linnet.Training(steps=2)
        )
        for method in ("lqf", "lqf-fc", "gaf", "fc", "nlft")
    },
    "audit influence": lambda s: linnet.audit.influence(s.fit(), s.x),
    "loss influence": lambda s: linnet.audit.loss_influence(s.fit(), s.x, s.y),
    "weight changes": lambda s: linnet.audit.weight_changes(s.fit()),
    "gradient store": lambda s: (
        linnet.audit.GradientStore(tempfile.mkdtemp(), s.model, Categorical()).add(s.data).top(s.data, 2)
    ),
    "mislabeled": lambda s: linnet.audit.mislabeled(s.fit()),
    "monitor": lambda s: [*s.fit().monitor([s.x, s.x + 1], shifts={"moved": lambda x: x + 1})],
    "stress test": lambda s: linnet.audit.stress_test(s.fit(), {"moved": lambda x: x + 1}),
    "summarize": lambda s: linnet.audit.summarize(s.fit(), 2),
    "tune ridge": lambda s: linnet.audit.tune_ridge(s.fit(), s.data),
    "select": lambda s: linnet.audit.select(s.fit(), s.x + 0.5, 2),
    "flips": lambda s: linnet.audit.flips(s.fit(), s.fit(ridge=9.0), s.x, s.y),
    "group means": lambda s: linnet.audit.group_means(s.fit(), s.x, s.y),
    "certificate": lambda s: linnet.audit.forgetting_certificate(s.fit(), s.fit().forget([0])),
    "release": lambda s: linnet.audit.release(
        s.fit(ridge=20.0), 1.0, 1e-3, clip=(2.0, 1.0), generator=_generator()
    ),
    "spectrum.gram": lambda s: linnet.spectrum.gram(s.model, s.x),
    "eigenfunctions": lambda s: linnet.spectrum.eigenfunctions(s.model, s.x, 2),
    "spectrum.alignment": lambda s: linnet.spectrum.alignment(s.model, s.values),
    "spectral density": lambda s: linnet.spectrum.spectral_density(s.model, s.x, samples=2, steps=4),
    "effective dimension": lambda s: linnet.spectrum.effective_dimension(
        s.model, 1.0, s.x, samples=2, steps=4
    ),
    "condition number": lambda s: linnet.spectrum.condition_number(s.model, s.x, 1.0),
    "kernel distance": lambda s: linnet.spectrum.kernel_distance(s.model, s.lin(), s.x),
    "task linearity": lambda s: linnet.spectrum.task_linearity(s.fit()),
    "leaky relu": lambda s: linnet.surgery.leaky_relu(s.model),
}


def _gauss_newton(s: Scene) -> Any:
    return linnet.optim.GaussNewton(s.model, Categorical()).step(*s.data)


def _iterative(s: Scene) -> Any:
    training = linnet.optim.IterativeLinearization(s.model, lambda p: torch.optim.SGD(p, lr=0.01), 2)
    return [training.step(lambda m: m(s.x).square().sum()) for _ in range(3)]


def _continual(s: Scene) -> Any:
    method = linnet.continual.OnlineLaplace(s.model, Categorical())
    method.consolidate(s.data)
    return method.penalty()


def _elastic(s: Scene) -> Any:
    method = linnet.continual.EWC(s.model, Categorical())
    method.consolidate(s.data)
    return method.add_grad_()


#: Calls that train the network: all but its parameters, gradients and running statistics stays.
TRAINING: dict[str, Callable[[Scene], Any]] = {
    "GaussNewton": _gauss_newton,
    "IterativeLinearization": _iterative,
    "OnlineLaplace": _continual,
    "EWC": _elastic,
}
#: Calls without a generator that draw from torch's global stream, as their documentation says.
DRAWING: dict[str, Callable[[Scene], Any]] = {
    "with_head random": lambda s: linnet.with_head(s.model, 3, "random"),
    "release": lambda s: linnet.audit.release(s.fit(ridge=20.0), 1.0, 1e-3, clip=(2.0, 1.0)),
    "predictive sample": lambda s: s.fit().predictive(s.x).sample(3),
    "laplace sample": lambda s: s.laplace().sample(2),
    "laplace mc": lambda s: s.laplace().predictive(s.x, "mc", samples=3),
}
