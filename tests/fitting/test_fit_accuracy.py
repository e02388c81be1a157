"""Small ridges: every number within its estimated error, in float64 where float32 cannot, or refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.errors import InputError, NumericalError
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linear.iterative import Iterative
from linnet.linear.kernel_system import KernelSystem
from linnet.tangent.jacobian import jacobian
from tests.refusals import refused

N, T = 12, 5
RIDGES = [1e2, 1e-2, 1e-5, 1e-7, 1e-9]


class Case:
    """A small network and data; one input comes three times with three labels where asked."""

    def __init__(self, c: int = 1, dtype: torch.dtype = torch.float32, repeated: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, c)).to(dtype)
        self.x = torch.randn(N, 4, generator=generator, dtype=torch.float64).to(dtype)
        self.x_test = torch.randn(T, 4, generator=generator, dtype=torch.float64).to(dtype)
        if repeated:
            self.x[1:3] = self.x[0]
        self.c, self.y = c, torch.arange(N) % 3 if c > 1 else 15 * torch.rand(N, 1, generator=generator)
        self.y = self.y if c > 1 else self.y.to(dtype)
        lin = linnet.linearize(copy.deepcopy(self.net).double())
        self.f0, self.f0_test = lin.base(self.x.double()), lin.base(self.x_test.double())
        self.j, self.j_test = (jacobian(lin.function, x.double()) for x in (self.x, self.x_test))

    def fit(self, ridge: float | str, solver: str = "dual", loss: str = "squared") -> LinearFit | SoftmaxFit:
        fit: LinearFit | SoftmaxFit = linnet.fit(
            linnet.linearize(self.net), (self.x, self.y), loss, ridge=ridge, solver=solver
        )
        return fit

    def delta(self, rows: Tensor, r: Tensor, ridge: float) -> Tensor:
        """The optimum by a singular value decomposition of J, which small ridges do not hurt."""
        u, s, v = torch.linalg.svd(self.j[rows].reshape(-1, self.j.shape[-1]), full_matrices=False)
        found: Tensor = v.T @ (s / (s**2 + ridge) * (u.T @ r[rows].reshape(-1)))
        return found

    def truth(self, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, leave-one-out outputs and influence in float64."""
        r, every = targets.double() - self.f0, torch.arange(N)
        delta = self.delta(every, r, ridge)
        left = [self.delta(every[every != i], r, ridge) for i in range(N)]
        loo = torch.stack([self.f0[i] + self.j[i] @ left[i] for i in range(N)])
        influence = torch.stack([self.j_test @ (delta - d) for d in left])
        return self.f0_test + self.j_test @ delta, loo, influence


def off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max())


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("c", "repeated"), [(1, True), (3, True), (1, False)])
@pytest.mark.thinned(6)
def test_nothing_is_off_by_more_than_its_estimate(
    solver: str, dtype: torch.dtype, c: int, repeated: bool
) -> None:
    case = Case(c, dtype, repeated)
    for ridge in RIDGES:
        fit = case.fit(ridge, solver)
        assert fit.solver == solver
        estimate = audit.accuracy(fit)
        assert max(estimate.predictions, estimate.leave_one_out) < 1e-2 * estimate.scale
        predictions, loo, influence = case.truth(fit.targets, ridge)
        assert off(fit.predict(case.x_test), predictions) <= estimate.predictions, ridge
        assert off(fit.loo(), loo) <= estimate.leave_one_out, ridge
        assert off(fit.influence(case.x_test), influence) <= estimate.influence, ridge
        asked = audit.influence(fit, case.x_test, "cg" if solver == "cg" else "exact").outputs
        assert off(asked, influence) <= estimate.influence, ridge


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.thinned(2)
def test_the_cross_entropy_alike(solver: str, c: int) -> None:
    case = Case(c)
    if c == 1:
        case.y = torch.arange(N) % 2
    exact = Case(c, torch.float64)
    exact.net, exact.x, exact.y = copy.deepcopy(case.net).double(), case.x.double(), case.y
    for ridge in (1.0, 1e-4, 1e-7) if solver == "dual" else (1e-3,):
        fit, right = case.fit(ridge, solver, "cross-entropy"), exact.fit(ridge, "dual", "cross-entropy")
        estimate, own = audit.accuracy(fit), audit.accuracy(right)
        x = case.x_test
        predicted = right.predict(x.double())
        assert off(fit.predict(x), predicted) <= estimate.predictions + own.predictions
        assert off(fit.loo(), right.loo()) <= estimate.leave_one_out + own.leave_one_out
        assert off(fit.influence(x), right.influence(x.double())) <= estimate.influence + own.influence


def test_float32_takes_one_pass_where_the_ridge_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.fitting import accuracy

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the network was computed in float64")

    monkeypatch.setattr(accuracy, "measured_rounding", never)
    case = Case(repeated=False)
    for ridge in (1.0, 30.0):
        fit = case.fit(ridge)
        assert fit.predict(case.x_test).dtype == torch.float32
        assert "precision" not in fit.summary()["reasons"]


def test_a_fit_in_float64_says_so_and_goes_on(tmp_path: Path) -> None:
    case = Case()
    fit = case.fit(1e-6)
    assert isinstance(fit, LinearFit)
    assert "float64" in fit.summary()["reasons"]["precision"]
    assert fit.module.function.dtype == torch.float64
    assert fit.predict(case.x_test).dtype == torch.float64  # of float32 inputs
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, case.net)
    torch.testing.assert_close(loaded.predict(case.x_test), fit.predict(case.x_test))
    grown = fit.forget([4, 5]).update((case.x[4:6], case.y[4:6]))
    order = [0, 1, 2, 3, *range(6, N), 4, 5]
    bound = 2 * audit.accuracy(fit).leave_one_out
    assert off(grown.predict(case.x_test), fit.predict(case.x_test)) < bound
    assert off(grown.loo(), fit.loo()[order]) < bound


def test_the_error_names_a_ridge_that_can_be_answered() -> None:
    case = Case()
    with pytest.raises(NumericalError, match="ridge=1e-13") as refusal:
        case.fit(1e-13)
    assert refusal.value.remedy is not None
    least = float(refusal.value.remedy.removeprefix("pass ridge="))
    assert audit.accuracy(case.fit(least)).sound
    with pytest.raises(NumericalError, match="1e-09") as refusal:
        case.fit(1.0).path([1.0, 1e-9])
    assert refusal.value.expected is not None
    least = float(refusal.value.expected.split()[-1])
    assert 1e-9 < least < 1
    case.fit(1.0).path([1.0, least])
    with pytest.raises(NumericalError, match="float32"):
        case.fit(1.0).update((case.x_test, torch.zeros(T, 1)), ridge=1e-9)


def test_thirty_rounds_of_forgetting_and_adding_leave_no_drift() -> None:
    case = Case(dtype=torch.float64, repeated=False)
    first = case.fit(1e-7)
    fit = first
    for k in range(30):
        i = k % fit.n
        back = fit.x[i : i + 1], fit.targets[i : i + 1]
        fit = fit.forget([i]).update(back)
    assert off(fit.predict(case.x_test), first.predict(case.x_test)) < 1e-8
    assert fit.summary()["certificate"] < 1e-9
    a, b = fit.loo().sort(0).values, first.loo().sort(0).values
    assert off(a, b) < 1e-7


def test_audits_of_a_primal_fit_go_by_its_kernel() -> None:
    case = Case(3)
    primal, dual = case.fit(1e-4, "cg"), case.fit(1e-4)
    assert isinstance(primal, LinearFit)
    assert isinstance(dual, LinearFit)
    for one, other in (
        (audit.mislabeled(primal).scores, audit.mislabeled(dual).scores),
        (audit.weight_changes(primal), audit.weight_changes(dual)),
        (
            audit.loss_influence(primal, case.x_test, torch.arange(T) % 3),
            audit.loss_influence(dual, case.x_test, torch.arange(T) % 3),
        ),
        (primal.predictive(case.x_test).covariance, dual.predictive(case.x_test).covariance),
    ):
        assert off(one, other.double()) < 1e-6 * float(other.abs().max())


def test_iterations_without_a_kernel_are_refused_where_digits_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Iterative, "kernel_form", None)
    case = Case(repeated=False)
    assert case.fit(10.0, "cg").loo().isfinite().all()
    error = refused(NumericalError, lambda: case.fit(1e-5, "cg").loo(), "leave-one-out at ridge")
    assert "ridge of about" in str(error)
    with pytest.raises(InputError, match="kernel"):
        audit.accuracy(case.fit(10.0, "cg"))


def test_the_estimate_of_the_rounding_is_that_of_the_kernel() -> None:
    case = Case(3, repeated=False)
    fit = case.fit(1.0)
    assert isinstance(fit.system, KernelSystem)
    j = case.j.reshape(3 * N, -1)
    right = j @ j.T
    root = right.diagonal().sqrt()
    relative = ((fit.system.dual.kernel - right) / root / root[:, None]).square().mean().sqrt()
    assert 0.2 * relative < audit.accuracy(fit).rounding < 5 * relative


def test_equations_on_outputs_keep_their_digits() -> None:
    case = Case(repeated=False)
    for ridge in (1.0, 1e-4):
        primal, dual = case.fit(ridge, "cg"), case.fit(ridge)
        assert isinstance(primal, LinearFit)
        assert isinstance(dual, LinearFit)
        one, other = (fit.constrain(case.x_test[:2], torch.ones(2, 1)) for fit in (primal, dual))
        bound = audit.accuracy(one), audit.accuracy(other)
        assert off(one.loo(), other.loo().double()) <= sum(b.leave_one_out for b in bound)
        x = case.x_test[2:]
        assert off(one.predict(x), other.predict(x).double()) <= sum(b.predictions for b in bound)
        assert off(one.influence(x), other.influence(x).double()) <= sum(b.influence for b in bound)
