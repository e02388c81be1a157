"""What fits, processes and linear posteriors refuse, beyond single values of the wrong kind.

``tests/hostile/test_bad_input.py`` gives every parameter forty wrong values; here stands what is wrong in
itself: data, combinations, questions that a fit has no answer to.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import linnet
from linnet.errors import DataError, InputError, MemoryBudgetError, ModelError, NumericalError
from linnet.fitting import Dual, OneHot, Shared, Sketch
from linnet.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from linnet.linalg import Dense
from linnet.linear.targets import make_targets
from tests.fitting.problems import network, problem, real
from tests.fitting.softmax_cases import case
from tests.refusals import Row, holds, table

P, LARGE, VALUES = problem(), problem(n=40), problem(classes=False)
SOFT, BINARY = case(), case(outputs=1)
NAN = math.nan
X, Y = real(12, 4, seed=1), torch.arange(12) % 3


class Ragged(Dataset[Any]):
    """Samples of different shapes."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(3 + i), i % 2


class Explodes(nn.Module):
    """Finite weights, infinite outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp().exp().exp() * 1e300


class Gated(nn.Module):
    """Its last linear layer is not its output; at every position of its inputs, where they have several."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gate = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.sigmoid(self.gate(x))


class Grid(nn.Module):
    """Outputs (N, 3, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).view(-1, 3, 2)
        return out


def put(t: Tensor, place: int, value: float) -> Tensor:
    """A copy with one entry replaced."""
    t = t.clone()
    t.view(-1)[place] = value
    return t


def fit(x: Any = P.x, y: Any = P.y, loss: Any = "squared", lin: Any = None, **options: Any) -> Any:
    """A fit to data."""
    return linnet.fit(lin or P.lin, (x, y), loss, **options)


@cache
def fitted() -> Any:
    """One that is asked."""
    return P.fit(ridge=0.3)


def of_data(data: Any) -> Any:
    """A fit to data of any kind."""
    return linnet.fit(P.lin, data)


def not_finite() -> Any:
    """A linearization of a network with NaN among its weights."""
    model = network()
    model[2].weight.data[1, 2] = NAN  # type: ignore[index, operator]
    return linnet.linearize(model)


def body() -> nn.Module:
    """A network whose last layer has ten outputs."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 10)).double()


def head(x: Tensor = X, y: Tensor = Y, model: nn.Module | None = None) -> nn.Module:
    """A new head for three classes."""
    return linnet.with_head(model or body(), 3, data=(x, y))


def part_of_data() -> Any:
    """The loader of one of two processes."""
    data = TensorDataset(P.x, P.y)
    return DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=0))


ARGUMENTS: list[Row] = [
    (InputError, "ridge='loo'", lambda: P.fit(ridge="loo", solver="cg")),
    (InputError, 'solver="sgd"', lambda: P.fit(ridge="loo", solver="sgd")),
    (InputError, "cross-entropy", lambda: P.fit(loss="cross-entropy", solver="sgd")),
    (InputError, "kernel.pt", lambda: P.fit(solver=Dual("kernel.pt"))),
    (InputError, "kernel.npy", lambda: P.fit(solver=Dual(Path("no") / "such" / "kernel.npy"))),
    (InputError, "complex", lambda: P.fit(targets=P.t * 1j)),
    (InputError, "(7, 2)", lambda: P.fit(targets=real(7, 2))),
    (InputError, "rank", lambda: P.fit(solver="cg", rank=10_000)),
    (InputError, "preconditioner", lambda: P.fit(solver="cg", preconditioner=Dense(torch.eye(3)))),
    (InputError, "basis", lambda: Sketch(basis="random")),
    (InputError, 'solver="shared"', lambda: P.fit(solver="shared", loss="cross-entropy")),
    (InputError, "axis=1", lambda: fit(solver="shared", axis=1)),
    (MemoryBudgetError, "120 equations", lambda: LARGE.fit(memory=40_000, solver="dual")),
    (MemoryBudgetError, "38 weights", lambda: LARGE.fit(memory=40_000, ridge="loo")),
    (MemoryBudgetError, "params=", lambda: LARGE.fit(memory=500)),
    (MemoryBudgetError, "500 B", lambda: LARGE.fit(memory=500, solver="cg")),
    (MemoryBudgetError, "share", lambda: P.fit(solver="shared", memory=700)),
    (NumericalError, "2 steps", lambda: P.fit(solver="cg", max_steps=2)),
    (NumericalError, "step limit", lambda: problem(n=60).fit(solver="sgd", max_steps=3)),
]
DATA: list[Row] = [
    (DataError, "empty", lambda: of_data((P.x[:0], P.y[:0]))),
    (DataError, "empty", lambda: of_data(Subset(TensorDataset(P.x, P.y), []))),
    (DataError, "empty", lambda: of_data(DataLoader(TensorDataset(P.x[:0], P.y[:0])))),
    (InputError, "length 3", lambda: of_data((P.x, P.y, P.y))),
    (InputError, "batch 0", lambda: of_data(DataLoader(P.x))),  # type: ignore[arg-type]
    (InputError, "tuple of length 1", lambda: of_data(TensorDataset(P.x))),
    (InputError, "axis", lambda: of_data((torch.tensor(1.0), torch.tensor(1)))),
    (DataError, "ragged", lambda: of_data(Ragged())),
    (DataError, "7 inputs", lambda: fit(y=P.y[:6])),
    (DataError, "index 4", lambda: fit(x=put(P.x, 12, math.inf))),
    (DataError, "index 5", lambda: fit(y=put(P.t, 15, NAN))),
    (DataError, "targets", lambda: P.fit(targets=put(P.t, 15, NAN))),
    (DataError, "index 6", lambda: of_data(DataLoader(TensorDataset(put(P.x, 18, NAN), P.y), 2))),
    (ModelError, "2.weight", not_finite),
    (DataError, "one class", lambda: fit(y=torch.full((7,), 2))),
    (DataError, "0 to 2", lambda: fit(y=put(P.y, 3, 3))),
    (DataError, "negative", lambda: fit(y=put(P.y, 0, -1))),
    (DataError, "return_inverse", lambda: fit(y=10**6 * P.y)),
    (InputError, "y.long()", lambda: fit(y=P.y.double())),
    (InputError, "(7, 2)", lambda: fit(y=real(7, 2))),
    (InputError, "torch.bool", lambda: fit(y=(P.y > 0)[:, None])),
    (InputError, "argmax", lambda: fit(y=nn.functional.one_hot(P.y))),
    (ModelError, "x.float()", lambda: fit(x=P.x > 0)),
    (ModelError, "(1, 4)", lambda: fit(x=real(7, 4), solver="cg")),
    (ModelError, "(1, 3)", lambda: fit(x=(P.x, P.x))),
    (ModelError, "NaN or infinite", lambda: fit(x=9 * P.x.abs(), lin=linnet.linearize(Explodes()))),
    (DataError, "index 0", lambda: fit(x=put(P.x, 0, NAN), solver=Dual("kernel.npy"))),
    (DataError, "one class", lambda: fit(y=0 * P.y, solver=Dual("kernel.npy"))),
    (DataError, "part 0 of 2", lambda: of_data(part_of_data())),
    (DataError, "part 0 of 2", lambda: linnet.adapt(network(), part_of_data())),
    (InputError, "(9, 3)", lambda: of_grid(LABELS)),
    (DataError, "position", lambda: of_grid(torch.full_like(LABELS, -100), axis=-1)),
    (DataError, "[0, 1]", lambda: of_grid(put(LABELS, 1, -1), axis=-1)),
    (InputError, "axis=1", lambda: of_grid(LABELS, axis=1)),
    (InputError, "axis=3", lambda: of_grid(LABELS, axis=3)),
    (InputError, "examples", lambda: of_grid(LABELS, axis=0)),
    (InputError, "a number", lambda: of_grid(LABELS, loss="cross-entropy", axis=-1, ridge="loo")),
    (InputError, "(9, 2, 3)", lambda: of_grid(real(9, 2, 3))),
    (InputError, "(3, 2)", lambda: make_targets(torch.zeros(3, 2, dtype=torch.long), outputs=2)),
    (InputError, "(4, 2, 2)", lambda: make_targets(torch.zeros(4, 2, 2), outputs=3)),
    (DataError, "index 2", lambda: make_targets(put(torch.zeros(4, 2), 5, NAN), outputs=2)),
    (DataError, "0 examples", lambda: make_targets(torch.zeros(0, dtype=torch.long), outputs=2)),
    (MemoryBudgetError, "classes", lambda: make_targets(torch.tensor([0, 1, 2]), 10**12)),
]
LABELS = torch.arange(27).view(9, 3) % 2


def of_grid(y: Tensor, **options: Any) -> Any:
    """A fit of a network with a grid of outputs."""
    return fit(real(9, 4), y, lin=linnet.linearize(Grid()), **options)


QUESTIONS: list[Row] = [
    *[
        row
        for call in ("predict", "predictive", "influence", "informativeness")
        for row in (
            (DataError, "x is empty", lambda call=call: getattr(fitted(), call)(P.x[:0])),
            (DataError, "index 2", lambda call=call: getattr(fitted(), call)(put(P.x, 8, NAN))),
            (ModelError, "(1, 4)", lambda call=call: getattr(fitted(), call)(real(7, 4))),
        )
    ],
    (InputError, "0 to 6", lambda: fitted().forget([7])),
    (InputError, "twice", lambda: fitted().forget([1, 2, 1])),
    (InputError, "all 7", lambda: fitted().forget(range(7))),
    (InputError, "torch.float", lambda: fitted().forget([1.0])),
    (InputError, "nonzero", lambda: fitted().forget([True] * 7)),
    (InputError, "[3]", lambda: fitted().forget([[1, 2], [3]])),
    (DataError, "empty", lambda: fitted().update((P.x[:0], P.y[:0]))),
    (DataError, "index 1", lambda: fitted().update((P.x[:2], put(P.y[:2], 1, 3)))),
    (DataError, "torch.float64", lambda: fitted().update((P.x[:2], P.t[:2]))),
    (DataError, "torch.int64", lambda: VALUES.fit().update((P.x[:2], P.y[:2]))),
    (ModelError, "(1, 4)", lambda: fitted().update((real(2, 4), P.y[:2]))),
    (InputError, "(2, 3)", lambda: fitted().update((P.x[:2], torch.zeros(2, 3, dtype=torch.long)))),
    (InputError, "ridge", lambda: fitted().update((P.x[:2], P.y[:2]), ridge=-1.0)),
    (InputError, "small", lambda: fitted().path("small")),
    (InputError, "0.0", lambda: fitted().path([1.0, 0.0])),
    (InputError, "n=0", lambda: fitted().predictive(P.x).sample(0)),
    (InputError, "variance", lambda: VALUES.fit().predictive(P.x).probs),
    (InputError, "labels", lambda: fitted().predictive(P.x[:2]).log_density(torch.tensor([0, 3]))),
    (InputError, "variance", lambda: fitted().export(variance="yes")),
    (InputError, "cannot be written", lambda: fitted().save(__file__)),
    (MemoryBudgetError, "directions", lambda: small_shared().export()),
    (InputError, "variance=True", lambda: fit(solver=Shared(2)).export(variance=True)),
    (InputError, "merge", lambda: fit(solver=Shared(2)).merge()),
    (DataError, "float", lambda: fit(solver=Shared(2)).update((P.x, P.t))),
    (InputError, "shared", lambda: linnet.audit.ridge_path(fit(solver=Shared(2)), (P.x, P.y))),
    (InputError, "LinearFit", lambda: linnet.spectrum.task_linearity(fit(solver=Shared(2)))),
]


def small_shared() -> Any:
    """A fit whose budget has shrunk."""
    found = fit(solver=Shared(2))
    found.memory = 300
    return found


HOLD, OLD = real(2, 3, seed=11), real(2, 3, seed=12)
CONSTRAINTS: list[Row] = [
    (InputError, "targets and groups", lambda: fitted().constrain(HOLD)),
    (InputError, "(1, 3)", lambda: fitted().constrain(HOLD, OLD[:1])),
    (InputError, "nothing but NaN", lambda: fitted().constrain(HOLD, OLD * NAN)),
    (InputError, "index 0", lambda: fitted().constrain(HOLD, OLD / 0.0)),
    (InputError, "torch.bool", lambda: fitted().constrain(HOLD, OLD > 0)),
    (InputError, "one group", lambda: fitted().constrain(HOLD, groups=[0, 0])),
    (InputError, "single member", lambda: fitted().constrain(HOLD, groups=[0, 1])),
    (InputError, "(3,)", lambda: fitted().constrain(HOLD, groups=[0, 1, 1])),
    (InputError, "float", lambda: fitted().constrain(HOLD, groups=[0.0, 1.0])),
    (InputError, "weight=0.0", lambda: fitted().constrain(HOLD, OLD, weight=0.0)),
    (DataError, "index 1", lambda: fitted().constrain(put(HOLD, 3, NAN), OLD)),
    (DataError, "0 to 2", lambda: fitted().constrain(HOLD, torch.tensor([0, 3]))),
    (InputError, "contradict", lambda: fitted().constrain(HOLD, OLD).constrain(HOLD, OLD + 2)),
    (InputError, "torch.int64", lambda: SOFT.fit(ridge=1.0).constrain(HOLD, torch.tensor([0, 1]))),
]
HEADS: list[Row] = [
    (InputError, "data=", lambda: linnet.with_head(body(), 3)),
    (DataError, "index 3", lambda: head(put(X, 12, NAN))),
    (DataError, "empty", lambda: head(X[:0], Y[:0])),
    (DataError, "0 to 2", lambda: head(X, Y + 1)),
    (DataError, "one class", lambda: head(X, 0 * Y + 1)),
    (DataError, "12 inputs", lambda: head(X, Y[:5])),
    (ModelError, "(1, 5)", lambda: head(real(12, 5))),
    (DataError, "with_head", lambda: linnet.with_head(body(), 1, data=(X, Y))),
    (DataError, "names", lambda: linnet.with_head(body(), 5, data=(X, ["a", "b", "c"] * 4))),  # type: ignore[arg-type]
    (ModelError, "Conv2d", lambda: linnet.with_head(nn.Conv2d(1, 2, 3), 3, "zero")),
    (ModelError, "nn.Sequential", lambda: linnet.with_head(nn.Linear(4, 2), 3, "zero")),
    (ModelError, "gate", lambda: head(model=Gated())),
    (ModelError, "0.2", lambda: head(model=nn.Sequential(body(), nn.Softmax(1)))),
    (InputError, "head=", lambda: linnet.with_head(Gated(), 2, "zero", head=".*")),
    (InputError, "head=", lambda: linnet.with_head(Gated(), 2, "zero", head="(")),
    (
        InputError,
        "cross_fit=19",
        lambda: linnet.with_head(body(), 3, linnet.Probe(cross_fit=19), data=(X, Y)),
    ),
    (ModelError, "model[:-1]", lambda: linnet.adapt(nn.Sequential(body(), nn.Softmax(1)), (X, Y))),
]


def of_labels(y: Tensor, **options: Any) -> Any:
    """A cross-entropy fit."""
    return linnet.fit(SOFT.lin, (SOFT.x, y), "cross-entropy", **options)


SOFTMAX: list[Row] = [
    (InputError, "no probability", lambda: of_labels(real(9, 3))),
    (InputError, "(9, 2)", lambda: of_labels(real(9, 2))),
    (InputError, "(9,)", lambda: of_labels(real(9))),
    (InputError, "sum to one", lambda: of_labels(torch.full((9, 3), 0.5))),
    (DataError, "NaN", lambda: of_labels(torch.full((9, 3), NAN))),
    (DataError, "axis=-1", lambda: of_labels(torch.tensor([0, 1, -100] * 3))),
    (DataError, "3 outputs", lambda: of_labels(torch.tensor([0, 1, 3] * 3))),
    (InputError, "torch.bool", lambda: of_labels(torch.ones(9, 1, dtype=torch.bool))),
    (InputError, "(9, 3)", lambda: of_labels(torch.ones(9, 3, dtype=torch.long))),
    (DataError, "range", lambda: linnet.fit(BINARY.lin, (BINARY.x, BINARY.labels + 1), "cross-entropy")),
    (InputError, "0 to 1", lambda: linnet.fit(BINARY.lin, (BINARY.x, real(9)), "cross-entropy")),
    (InputError, "OneHot(scale=3.0)", lambda: SOFT.fit(targets=OneHot(3.0))),
    (InputError, "(9, 3)", lambda: SOFT.fit(targets=SOFT.y[:, :2])),
    (InputError, "gcv", lambda: SOFT.fit(ridge="gcv")),
    (InputError, "ridge='loo'", lambda: SOFT.fit(ridge="loo", solver="cg")),
    (InputError, "gcv", lambda: SOFT.fit(ridge=1.0).path().best("gcv")),
    (InputError, "path", lambda: SOFT.fit(ridge=1.0, solver="cg").path()),
    (InputError, "14", lambda: SOFT.fit(ridge=1.0).check_loo([14])),
    (InputError, "examples", lambda: SOFT.fit(ridge=1.0).check_loo([])),
    (InputError, "ridge='loo'", lambda: SOFT.fit(ridge=1.0).update((SOFT.x, SOFT.labels), ridge="loo")),
    (DataError, "range", lambda: SOFT.fit(ridge=1.0).update((SOFT.x, SOFT.labels + 5))),
    (NumericalError, "max_steps=", lambda: SOFT.fit(ridge=1e-3, solver="dual", max_steps=1)),
    (NumericalError, "dual", lambda: SOFT.fit(ridge=1e-3, solver="cg", max_steps=3, tolerance=1e-12)),
]
ADAPT: list[Row] = [
    (ModelError, "parameter", lambda: linnet.adapt(nn.ReLU(), (X, Y))),
    (DataError, "single example", lambda: linnet.adapt(body(), (X[:1], Y[:1]))),
    (DataError, "one class", lambda: linnet.adapt(body(), (X, 0 * Y))),
    (DataError, "negative", lambda: linnet.adapt(body(), (X, Y - 1))),
    (DataError, "return_inverse", lambda: linnet.adapt(body(), (X, 10**12 * Y))),
    (InputError, "63", lambda: linnet.adapt(body(), (X, (Y - 1).to(torch.uint64)))),
    (DataError, "text", lambda: linnet.adapt(body(), (X, ["a", "b", None] * 4))),
    (DataError, "NaN", lambda: linnet.adapt(body(), (X * NAN, Y))),
    (InputError, "weight", lambda: linnet.adapt(body(), (X, Y), tune=True, weight=0.5)),
    (InputError, "ridge", lambda: linnet.adapt(body(), (X, Y), tune=True, ridge=0.1)),
    (InputError, "ridge=", lambda: adapted().update((X, Y), ridge="best")),
    (InputError, "indices", lambda: adapted().forget([12])),
    (DataError, "float", lambda: adapted().update((X, X[:, :3]))),
]


@cache
def adapted() -> Any:
    """A nested fit."""
    return linnet.adapt(body(), (X, Y), weight=0.5, ridge=0.1)


NOISE = Gaussian(variance=0.2)
IN, OUT = real(4, 3), real(4, 2, seed=1)


def process(y: Tensor = OUT, x: Tensor = IN, likelihood: Any = NOISE, **options: Any) -> Any:
    """A tangent process on data."""
    return linnet.TangentGP(network(3, 5, 2), likelihood, **options).fit(x, y)


PROCESSES: list[Row] = [
    (InputError, "linnet.Laplace", lambda: linnet.TangentGP(network(), Categorical())),
    (InputError, "precision", lambda: linnet.TangentGP(network(), NOISE, precision=1.0)),
    (InputError, "function space", lambda: process(space="function", preconditioner="ekfac")),
    (InputError, "parameter space", lambda: process(space="parameter", preconditioner="pivoted-cholesky")),
    (InputError, "rank=", lambda: process(solver="cholesky", rank=5)),
    (InputError, "finite-difference", lambda: process(space="function", derivative="finite-difference")),
    (InputError, "params=", lambda: linnet.TangentGP(P.lin, NOISE, params="last-layer")),
    (InputError, "even", lambda: linnet.TangentGP(P.model, HeteroscedasticGaussian()).fit(IN, OUT[:, :1])),
    (InputError, "fitted", lambda: linnet.TangentGP(network(), NOISE).predictive(IN)),
    (InputError, "plan", lambda: linnet.TangentGP(network(), NOISE).plan),
    (DataError, "empty", lambda: process(OUT[:0], IN[:0])),
    (DataError, "4 inputs", lambda: process(OUT[:3])),
    (DataError, "index 2", lambda: process(x=put(IN, 7, NAN))),
    (DataError, "y", lambda: process(OUT * NAN)),
    (DataError, "missing", lambda: process(OUT * NAN, likelihood=Gaussian(masked=True))),
    (DataError, "empty", lambda: process().predictive(IN[:0])),
    (ModelError, "cannot run", lambda: process().predictive(real(4, 5))),
    (InputError, "joint=True", lambda: process().predictive(IN).joint_covariance),
    (InputError, "shape", lambda: process().predictive(IN).log_density(OUT[:, :1])),
    (DataError, "y", lambda: process().predictive(IN).log_density(OUT * NAN)),
    (InputError, "y", lambda: process().predictive(IN).log_density(OUT.numpy())),
    (InputError, "prior=False", lambda: process().tune(prior=False, noise=False)),
    (InputError, "noise='all'", lambda: process().tune(noise="all")),
    (InputError, "noise", lambda: process(space="parameter").tune(noise="per-output")),
    (InputError, "noise_scale=0", lambda: process().log_evidence(noise_scale=0)),
    (InputError, "least_noise", lambda: process().tune(least_noise=1.0)),
    (NumericalError, "zero", lambda: dead().tune()),
    (NumericalError, "2 steps", lambda: process(solver="cg", preconditioner="none", max_steps=2)),
]


def dead() -> Any:
    """A process of a network that nothing moves."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    net[0].bias.data.fill_(-1e3)
    return linnet.TangentGP(net, NOISE, params=["0.weight"]).fit(IN, OUT)


def posterior(y: Tensor = P.y, x: Tensor = P.x, likelihood: Any = None, method: Any = "map") -> Any:
    """A linear posterior."""
    return linnet.linear_posterior(P.lin, (x, y), likelihood or Categorical(), method)


POSTERIORS: list[Row] = [
    (InputError, "canonical", lambda: posterior(likelihood=HeteroscedasticGaussian())),
    (DataError, "finite", lambda: posterior(x=P.x * NAN)),
    (InputError, "svi", lambda: posterior().bound()),
    (InputError, "svi", lambda: posterior().deviation),
    (InputError, "map", lambda: posterior().sample(3)),
    (DataError, "x is empty", lambda: posterior().predictive(P.x[:0])),
    (NumericalError, "max_steps", lambda: posterior(method=linnet.Newton(max_steps=1, tolerance=1e-12))),
]
EVERY = [
    *ARGUMENTS, *DATA, *QUESTIONS, *CONSTRAINTS, *HEADS, *SOFTMAX, *ADAPT, *PROCESSES, *POSTERIORS,
]  # fmt: skip


@table(EVERY)
@pytest.mark.thinned(3)
def test_what_is_refused(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holds(row)
    assert list(tmp_path.iterdir()) == []  # no half of a file stays
