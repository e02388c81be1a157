"""What curvatures, likelihoods and posteriors refuse, beyond single values of the wrong kind."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.curvatures import LowRank, MonteCarlo
from linnet.curvatures.running import RunningCurvature
from linnet.errors import DataError, InputError, MemoryBudgetError, ModelError, NumericalError, WeightsError
from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_description,
    mixture_of_classifiers,
)
from tests.curvatures.side_by_side import curvature_of
from tests.fitting.problems import real
from tests.laplace.laplace_problems import classes, numbers
from tests.refusals import Row, holds, table

NAN, CPU = math.nan, torch.device("cpu")
X, Y = real(6, 3), torch.arange(6) % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def call(**options: Any) -> Any:
    """A curvature that would be right, but for what is given."""
    return curvature_of(**{"model": network(), "data": (X, Y), "likelihood": Categorical(), **options})


def quartic() -> Custom:
    return Custom(lambda f, y: (f - y).pow(4).sum(-1))


class Logarithm(nn.Module):
    """NaN where the first layer is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).log())
        return out


FREE, MIXED, FISHER = {"structure": "matrix-free"}, ["kfac", "kfra"], {"matrix": "fisher"}
CURVATURES: list[Row] = [
    (InputError, "'matrix-free'", lambda: call(structure=["kfac", "matrix-free"])),
    (InputError, "'low-rank'", lambda: call(structure=["low-rank", "kfac"])),
    (InputError, "Hessian", lambda: call(structure=["kfac", "full"], matrix="hessian")),
    (InputError, "recursion", lambda: call(structure=MIXED)),
    (InputError, "'recursion'", lambda: call(expectation="recursion")),
    (InputError, "hessian", lambda: call(matrix="hessian")),
    (InputError, "hessian", lambda: call(structure={".*": "kfac"}, matrix="hessian")),
    (InputError, "hessian", lambda: call(structure="low-rank", matrix="hessian")),
    (InputError, "'mc'", lambda: call(**FREE, expectation="mc", matrix="hessian")),
    (InputError, "last-layer", lambda: call(structure="last-layer", params=["0.weight"])),
    (InputError, "last-layer", lambda: call(structure=["last-layer", "kfac"])),
    (InputError, "'empirical'", lambda: call(expectation="empirical", matrix="gauss-newton")),
    (InputError, "'mc'", lambda: call(likelihood=quartic(), expectation="mc", matrix="gauss-newton")),
    (InputError, "projection", lambda: call(likelihood=quartic(), expectation="random-projection", **FISHER)),
    (InputError, "finite", lambda: call(**FREE, expectation="mc", derivative="finite-difference")),
    (InputError, "'kfra'", lambda: call(structure="kfra", file="a.safetensors")),
    (InputError, "'low-rank'", lambda: call(structure="low-rank", file="a.safetensors")),
    (InputError, "sums.pt", lambda: call(file="sums.pt")),
    (InputError, "expectation", lambda: call(expectation=LowRank(3))),
    (InputError, "structure", lambda: call(structure=MonteCarlo(3))),
    (InputError, "passes", lambda: call(passes={"memory": "4GB"})),
    (InputError, "2.weight", lambda: call(structure={"0": "kfac"})),
    (InputError, "0.weight", lambda: call(structure={})),
    (InputError, "'('", lambda: call(structure={"(": "kfac"})),
    (InputError, "3", lambda: call(structure={3: "kfac"})),
    (InputError, "'kfra'", lambda: call(structure={".*": "kfra"})),
    (InputError, "'nope'", lambda: call(structure={".*": "nope"})),
    (InputError, "'nope'", lambda: call(params=["0.weight", "nope"])),
    (InputError, "call the class", lambda: call(likelihood=Categorical)),
    (
        InputError,
        "linearize",
        lambda: linnet.curvature(linnet.linearize(network()), (X, Y), Categorical(), "last-layer"),
    ),
    (
        InputError,
        "linearize",
        lambda: linnet.Laplace(linnet.linearize(network()), Categorical(), params="all").fit((X, Y)),
    ),
    (DataError, "(6, 1, 1)", lambda: call(data=(X, torch.zeros(6, 1, 1, dtype=torch.long)))),
    (DataError, "no targets", lambda: call(data=X, expectation="empirical")),
    (DataError, "no targets", lambda: call(data=DataLoader(TensorDataset(X), 2), likelihood=quartic())),
    (DataError, "index 4", lambda: call(data=(put(X, 13), Y))),
    (DataError, "empty", lambda: call(data=(X[:0], Y[:0]))),
    (DataError, "empty", lambda: call(data=DataLoader([], 2), structure="kfra")),
    (DataError, "empty", lambda: call(data=DataLoader(TensorDataset(X[:0], Y[:0]), 2))),
    (DataError, "(4,)", lambda: call(data=(X, Y[:4]))),
    (ModelError, "b.weight", lambda: call(model=Logarithm())),
    (ModelError, "b.weight", lambda: call(model=Logarithm(), structure="kfra")),
    (ModelError, "shape", lambda: call(data=(X[:, :2], Y))),
    (ModelError, "bool", lambda: call(data=(X > 0, Y), structure="kfra")),
    (ModelError, "parameter", lambda: call(model=nn.Tanh())),
    (
        ModelError,
        "complex",
        lambda: call(model=nn.Linear(3, 2, dtype=torch.complex128), data=(X.cfloat(), Y)),
    ),
    (
        ModelError,
        "model.float()",
        lambda: call(model=network().half(), data=(X.half(), Y), structure="low-rank"),
    ),
    (
        MemoryBudgetError,
        "output_variance()",
        lambda: call().damped(1.0).inverse().output_covariance(X, memory=100),
    ),
    (DataError, "empty", lambda: call().output_variance(X[:0])),
    (DataError, "empty", lambda: call().damped(1.0).inverse().output_covariance(X[:0])),
    (DataError, "x", lambda: call().output_covariance(X * NAN)),
    (InputError, "damping", lambda: call().factored_damped(-1.0)),
    (InputError, "multiplier", lambda: call().scaled(-2)),
    (InputError, "26", lambda: call() @ torch.ones(25).double()),
    (InputError, "float64", lambda: call() @ torch.ones(26)),
]


def put(x: Tensor, place: int) -> Tensor:
    """A copy with an infinite number."""
    x = x.clone()
    x.view(-1)[place] = math.inf
    return x


def running(*batches: tuple[Any, ...], **options: Any) -> Any:
    """An average over batches."""
    made = RunningCurvature(network(), Categorical(), **options)
    for batch in batches:
        made.add(*batch)
    return made


RUNNING: list[Row] = [
    (InputError, "kfra", lambda: running(structure="kfra")),
    (InputError, "low-rank", lambda: running(structure="low-rank")),
    (InputError, "recursion", lambda: running(expectation="recursion")),
    (InputError, "'auto'", lambda: running(expectation="auto")),
    (InputError, "'auto'", lambda: linnet.optim.GaussNewton(network(), Categorical(), expectation="auto")),
    (InputError, "decay=1.5", lambda: running(decay=1.5)),
    (DataError, "no batch", lambda: running().curvature()),
    (DataError, "empty", lambda: running((X[:0], Y[:0]))),
    (DataError, "finite", lambda: running((X * NAN, Y))),
    (DataError, "targets", lambda: running((X,), expectation="empirical")),
    (ModelError, "cannot run", lambda: running((X[:, :1], Y))),
    (InputError, "examples=0", lambda: running((X, Y)).curvature(examples=0)),
    (WeightsError, "0.weight", lambda: running((X, Y)).refresh({"0.weight": torch.ones(1)})),
    (ModelError, "NaN", lambda: running((X, Y)).refresh(broken())),
    (
        InputError,
        "state",
        lambda: running(structure="ekfac").load_state_dict(running((X, Y)).state_dict(), X),
    ),
]


def broken() -> nn.Module:
    """A network with NaN among its weights."""
    model = network()
    model[0].weight.data.fill_(NAN)  # type: ignore[index, operator, union-attr]
    return model


F = torch.zeros(4, 3)
LONG = torch.zeros(4, dtype=torch.long)


def nll(likelihood: Likelihood, y: Any, f: Tensor = F) -> object:
    """−log p of labels."""
    return likelihood.nll(f, y)


def at(place: int, value: float, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    """Zeros but for one entry."""
    y = torch.zeros(shape)
    y.view(-1)[place] = value
    return y


LABELS: list[Row] = [
    (InputError, "torch.as_tensor", lambda: nll(Categorical(), [0, 1, 2, 0])),
    (DataError, "y.long()", lambda: nll(Categorical(), torch.zeros(4))),
    (DataError, "torch.bool", lambda: nll(Categorical(), LONG.bool())),
    (DataError, "y.argmax(1)", lambda: nll(Categorical(), F.long())),
    (DataError, "(4, 1, 1)", lambda: nll(Categorical(), LONG[:, None, None])),
    (DataError, "(3,)", lambda: nll(Categorical(), LONG[:3])),
    (DataError, "axis=-1", lambda: nll(Categorical(), torch.zeros(2, 5).long(), torch.zeros(2, 5, 3))),
    (DataError, "y[2] is 3", lambda: nll(Categorical(), torch.tensor([0, 1, 3, 7]))),
    (DataError, "y[1] is -1", lambda: nll(Categorical(), torch.tensor([0, -1, 1, 2]))),
    (DataError, "y[1, 2]", lambda: nll(Categorical(), at(5, -0.5))),
    (DataError, "nan", lambda: nll(Categorical(), at(3, NAN))),
    (DataError, "sum to 1", lambda: nll(Categorical(), torch.ones(4, 3))),
    (InputError, "Bernoulli", lambda: nll(Categorical(), LONG, torch.zeros(4, 1))),
    (InputError, "axis=2", lambda: nll(Categorical(axis=2), LONG)),
    (InputError, "int64", lambda: nll(Categorical(), LONG, F.long())),
    (DataError, "(4,)", lambda: nll(Bernoulli(), torch.zeros(4))),
    (DataError, "Categorical", lambda: nll(Bernoulli(), LONG)),
    (DataError, "y[2, 1] is 1.5", lambda: nll(Bernoulli(), at(7, 1.5))),
    (DataError, "1 of 12", lambda: nll(Bernoulli(), at(2, NAN))),
    (DataError, "whole numbers", lambda: nll(Poisson(), at(9, -2))),
    (DataError, "masked=True", lambda: nll(Poisson(), at(9, NAN))),
    (DataError, "y[3, 0] is -2", lambda: nll(Poisson(masked=True), at(9, -2))),
    (DataError, "masked=True", lambda: nll(Gaussian(), at(5, NAN))),
    (DataError, "finite", lambda: nll(Gaussian(masked=True), at(5, -math.inf))),
    (DataError, "Categorical()", lambda: nll(Gaussian(), LONG)),
    (DataError, "y.real", lambda: nll(Gaussian(), F.cfloat())),
    (InputError, "3 components", lambda: nll(Gaussian([1.0, 2.0]), F)),  # type: ignore[arg-type]
    (InputError, "even", lambda: nll(HeteroscedasticGaussian(), torch.zeros(4, 1))),
    (DataError, "(4, 1)", lambda: nll(HeteroscedasticGaussian(), F[:, :2], F[:, :2])),
    (DataError, "masked=True", lambda: nll(HeteroscedasticGaussian(), at(2, NAN, (4, 1)), F[:, :2])),
    (InputError, "log-variance", lambda: nll(HeteroscedasticGaussian("natural"), F[:, :1], F[:, :2] + 0.5)),
    (DataError, "example 2", lambda: nll(mixture_of_classifiers(), torch.tensor([0, 1, 2, 0]))),
    (InputError, "a gate", lambda: nll(mixture_of_classifiers(), torch.zeros(4), F[:, :2])),
    (DataError, "(3,)", lambda: nll(mixture_of_classifiers(), torch.zeros(3))),
    (DataError, "nan", lambda: nll(mixture_of_classifiers(), at(0, NAN, (4,)))),
    (DataError, "support", lambda: nll(mixture_of_classifiers(), torch.zeros(4, 2))),
    (InputError, "nll", lambda: nll(Custom(lambda f, y: f.sum()), torch.zeros(4))),
    (InputError, "float", lambda: nll(Custom(lambda f, y: 0.0), torch.zeros(4))),  # type: ignore[arg-type, return-value]
    (InputError, "v has", lambda: Categorical().product(F, torch.zeros(4, 2))),
    (InputError, "g (3, 3)", lambda: Categorical().kl(F, F[:3])),
    (InputError, "covariance", lambda: Categorical().predictive(F, torch.zeros(4, 3, 2))),
    (DataError, "0.0", lambda: Gaussian.fitted(F, F)),
    (
        DataError,
        "nan",
        lambda: Gaussian.fitted(F, torch.tensor([1.0, NAN, 1.0]).expand(4, 3), per_output=True, masked=True),
    ),
    (InputError, "variance", lambda: Gaussian(torch.tensor([1.0, -1.0]))),
    (InputError, "holds examples", lambda: Gaussian(axis=0)),
    (InputError, "is a label", lambda: Bernoulli(ignore_index=1)),
    (InputError, "empty", lambda: Custom(lambda f, y: y, support=[])),
    (InputError, "['a']", lambda: Custom(lambda f, y: y, support=["a"])),
    (InputError, "'Laplace'", lambda: from_description({"kind": "Laplace"})),
    (InputError, "n=0", lambda: Gaussian().sample_gradients(F, 0)),
]


def softmax_nll(f: Tensor, y: Tensor) -> Tensor:
    return -f.log_softmax(-1).gather(-1, y.long()[..., None])[..., 0]


def lacking(**settings: Any) -> Custom:
    """A likelihood with a density and nothing else but the settings."""
    return Custom(softmax_nll, **settings)


LACKING: list[Row] = [
    (InputError, "support=", lambda: lacking().fisher(F)),
    (InputError, "support=", lambda: lacking().fisher_root(F)),
    (InputError, "sample=", lambda: lacking().sample(F, 2)),
    (InputError, "sample=", lambda: lacking().sample_gradients(F, 2)),
    (InputError, "support=", lambda: lacking().kl(F, F)),
    (InputError, "moments=", lambda: lacking().mean(F)),
    (InputError, "moments=", lambda: lacking().variance(F)),
    (InputError, "moments=", lambda: lacking().predictive(F, torch.ones(4, 3))),
    (InputError, "sample=", lambda: lacking(canonical=True).hessian(F)),
    (InputError, "sum to 0.6667", lambda: lacking(support=(0, 1)).fisher(F)),
    (InputError, "int", lambda: lacking(sample=lambda f, g: 0).sample(F, 2)),
    (InputError, "(1, 3)", lambda: lacking(sample=lambda f, g: f[:1]).sample(F, 2)),
]


@cache
def known() -> Any:
    """A posterior of a classifier."""
    return laplace()


def laplace(structure: Any = "kfac", data: Any = None, likelihood: Any = None, **options: Any) -> Any:
    """A posterior."""
    model, x, y = classes() if likelihood is None else numbers()
    return linnet.Laplace(model, likelihood or Categorical(), structure, **options).fit(
        (x, y) if data is None else data
    )


def changed() -> Any:
    """A posterior whose network moved on."""
    model, x, y = classes()
    la = linnet.Laplace(model, Categorical()).fit((x, y))
    model[0].weight.data.add_(0.1)  # type: ignore[index, operator, union-attr]
    return la.fit((x, y), add=True)


def in_many_precisions() -> Any:
    """A posterior with a prior precision for every parameter."""
    return linnet.Laplace(nn.Linear(20, 15).double(), Categorical(), "diagonal", torch.ones(315)).fit(WIDE)


WIDE = real(9, 20), torch.arange(9)
_, XS, YS = classes()
GAUSSIAN = Gaussian(variance=0.5)
POSTERIORS: list[Row] = [
    (InputError, "-2", lambda: laplace(prior_precision=torch.tensor([1.0, -2.0]))),
    (InputError, "['2']", lambda: laplace(prior_precision={"0": 1.0, "2": 0.0})),
    (InputError, "315", lambda: in_many_precisions().tune("validation", WIDE)),
    (InputError, "expectancy", lambda: laplace(expectancy="mc")),
    (InputError, "Kronecker", lambda: laplace(prior_precision=torch.ones(31))),
    (InputError, "matrix-free", lambda: laplace("matrix-free")),
    (InputError, "structure", lambda: laplace(["kfac", "full"])),
    (InputError, "'classification'", lambda: laplace(likelihood="classification")),
    (InputError, "names", lambda: laplace("diagonal", prior_precision={"0": 1.0})),
    (InputError, "7 entries", lambda: laplace("diagonal", prior_precision=torch.ones(7))),
    (InputError, "['0']", lambda: laplace("diagonal", prior_precision={"0": torch.ones(2), "2": 1.0})),
    (InputError, "prior_precision", lambda: laplace("diagonal", prior_precision=torch.tensor(True))),
    (InputError, "(3,)", lambda: laplace(prior_mean=torch.zeros(3))),
    (InputError, "prior_mean", lambda: laplace(prior_mean=NAN)),
    (InputError, "'zero'", lambda: laplace(prior_mean="zero")),
    (InputError, "damping", lambda: laplace("diagonal", damping="matrix-normal")),
    (InputError, "add=True", lambda: laplace("ekfac").fit((XS, YS), add=True)),
    (InputError, "weights", changed),
    (DataError, "NaN", lambda: laplace(data=(XS * NAN, YS))),
    (ModelError, "cannot run", lambda: known().predictive(XS[:, :2])),
    (DataError, "NaN", lambda: known().predictive(XS * NAN)),
    (DataError, "x is empty", lambda: known().predictive(XS[:0])),
    (DataError, "x is empty", lambda: known().predictive(XS[:0], joint=True)),
    (DataError, "x is empty", lambda: known().predictive(XS[:0], method="mc")),
    (InputError, "y", lambda: known().predictive(XS).log_density(YS.numpy())),
    (InputError, "y=None", lambda: known().predictive(XS, "mc", samples=2).log_density(None)),
    (InputError, "joint", lambda: known().predictive(XS).joint_covariance),
    (InputError, "without targets", lambda: laplace(data=XS).log_evidence()),
    (InputError, "noise=True", lambda: known().tune(noise=True)),
    (InputError, "grid", lambda: known().tune(search=linnet.Grid(prior_precision=[1.0, 2.0]))),
    (InputError, "noise_variance", lambda: known().tune(search=linnet.Grid(noise_variance=[1.0, 2.0]))),
    (InputError, "without data", lambda: known().tune(method="validation")),
    (InputError, "with data", lambda: known().tune(data=(XS, YS))),
    (InputError, "data_scale=True", lambda: known().tune("grid", (XS, YS), data_scale=True)),
    (InputError, "grid", lambda: known().tune("grid", (XS, YS), search="gradient")),
    (InputError, "search", lambda: known().tune("validation", (XS, YS), search="fixed-point")),
    (InputError, "noise", lambda: known().tune("validation", (XS, YS), noise=True)),
    (InputError, "predict", lambda: known().tune("loo", (XS, YS), search=linnet.Grid(predict="mc"))),
    (InputError, "no targets", lambda: known().tune("grid", XS)),
    (
        InputError,
        "noise=True",
        lambda: laplace("full", likelihood=GAUSSIAN).tune("loo", numbers()[1:], noise=True),
    ),
    (
        InputError,
        "noise_variance=",
        lambda: laplace("full", likelihood=GAUSSIAN).log_evidence(noise_variance=[0.5, 1.0]),
    ),
    (
        InputError,
        "low-rank",
        lambda: laplace("low-rank", prior_precision={"0": 1.0, "2": 2.0}).tune("validation", (XS, YS)),
    ),
]


@table([*CURVATURES, *RUNNING, *LABELS, *LACKING, *POSTERIORS])
@pytest.mark.thinned(3)
def test_what_is_refused(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holds(row)


def test_keywords_that_are_misspelled_are_named() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(60, 3).double()
    data = x, torch.arange(60) % 3
    for name in ("structures", "expectations", "param", "memory"):
        with pytest.raises(InputError, match=f"has no parameter {name}"):
            linnet.curvature(net, data, Categorical(), **{name: "kfac"})


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "low-rank"])
def test_a_singular_curvature_has_no_inverse(structure: Any) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(60, 3).double()
    found = linnet.curvature(net, (x, torch.arange(60) % 3), Categorical(), structure)
    for call in (found.inverse, found.logdet):
        with pytest.raises(NumericalError, match="singular"):
            call()
    assert bool(found.damped(0.1).logdet().isfinite())
