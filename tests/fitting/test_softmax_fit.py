"""The cross-entropy fit against dense Newton, refits and the explicit Laplace posterior, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import linnet
from linnet.errors import InputError
from linnet.fitting import CG
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.linalg.operator import LinearOperator
from linnet.predictive.noise import fit_moderation, probabilities
from tests.fitting.problems import flat, near, network, real, solver_of
from tests.fitting.softmax_cases import Case, case, hessian, log_losses, probabilities_of
from tests.refusals import refused
from tests.zoo import ZOO, Animal

every_solver = pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
CASES = {"classes": case(), "binary": case(outputs=1), "soft": case(soft=True), "two": case(8, 2)}
every_case = pytest.mark.parametrize("c", CASES.values(), ids=CASES.keys())


# --- the optimum -----------------------------------------------------------------------------------


@every_solver
@every_case
@pytest.mark.parametrize("share", [1e-3, 0.05, 20.0])
@pytest.mark.thinned(6)
def test_the_optimum_is_that_of_dense_newton(c: Case, solver: str, share: float) -> None:
    rho = share * c.scale
    fit, delta = c.fit(ridge=rho, solver=solver), c.optimum(rho)
    near(flat(fit.delta), delta, 1e-8)
    near(fit.predict(c.x_test), c.f0_test + c.j_test @ delta, 1e-8)
    assert fit.summary()["certificate"] < 1e-11
    assert isinstance(fit, SoftmaxFit)
    assert fit.solver == solver


@every_solver
def test_a_general_optimizer_finds_nothing_better(solver: str) -> None:
    c = CASES["classes"]
    rho = 0.02 * c.scale
    delta = torch.zeros(c.j.shape[2], dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS(
        [delta], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        value = log_losses(c.f0 + c.j @ delta, c.y).sum() + 0.5 * rho * delta @ delta
        value.backward()
        return value

    lbfgs.step(closure)
    near(flat(c.fit(ridge=rho, solver=solver).delta), delta.detach(), 1e-6)
    assert c.fit(ridge=rho, solver=solver).summary()["objective"] <= closure().item() + 1e-12


@every_solver
def test_the_objective_falls_at_every_step(solver: str) -> None:
    """Also where the full Newton step overshoots: logits far from the labels, a small ridge."""
    c = CASES["classes"]
    model = network(3, 5, 3)
    with torch.no_grad():
        model[2].weight *= 40
    lin = linnet.linearize(model)
    fit = linnet.fit(
        lin, (c.x, c.labels), loss="cross-entropy", ridge=1e-3, solver=solver_of(solver, tolerance=1e-9)
    )
    values = fit.system.objective
    assert len(values) == fit.summary()["steps"] + 1 > 4
    assert all(b <= a + 1e-12 * abs(a) for a, b in itertools.pairwise(values))
    assert fit.summary()["certificate"] <= 1e-9


def test_the_certificate_is_the_gradient_over_that_at_the_start() -> None:
    c = CASES["classes"]
    fit = c.fit(ridge=0.3, solver=CG(tolerance=1e-2))
    delta = flat(fit.delta)

    def gradient(d: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ncp,nc->p", c.j, probabilities_of(c.f0 + c.j @ d) - c.y) + 0.3 * d

    expected = gradient(delta).norm() / gradient(torch.zeros_like(delta)).norm()
    assert fit.summary()["certificate"] == pytest.approx(expected.item(), rel=1e-6)
    assert 1e-6 < fit.summary()["certificate"] <= 1e-2


def test_outputs_shifted_together_do_not_matter() -> None:
    """Softmax does not see a shift: the same probabilities from a network with shifted logits."""
    c = CASES["classes"]
    shifted = network(3, 5, 3)
    with torch.no_grad():
        shifted[2].bias += 7.0
    fit = c.fit(ridge=0.1)
    other = linnet.fit(linnet.linearize(shifted), (c.x, c.labels), loss="cross-entropy", ridge=0.1)
    near(other.predict(c.x_test), fit.predict(c.x_test) + 7.0, 1e-9)


def test_float32_reaches_its_own_precision() -> None:
    c = CASES["classes"]
    model = network(3, 5, 3).float()
    found = [
        linnet.fit(
            linnet.linearize(model), (c.x.float(), c.labels), loss="cross-entropy", ridge=0.1, solver=s
        )
        for s in ("dual", "cg")
    ]
    expected = c.f0_test + c.j_test @ c.optimum(0.1)
    for fit in found:
        near(fit.predict(c.x_test.float()), expected, 1e-4)
        assert fit.predict(c.x_test.float()).dtype == torch.float32
        assert fit.summary()["certificate"] <= 1e-5


@pytest.mark.parametrize("name", ["nystrom", "ekfac", "kfac", "diagonal", "none", "auto"])
@pytest.mark.thinned(4)
def test_any_preconditioner_gives_the_same(name: str) -> None:
    c = CASES["classes"]
    fit = c.fit(ridge=0.1, solver="cg", preconditioner=name, rank=5 if name == "nystrom" else 0)
    near(flat(fit.delta), c.optimum(0.1), 1e-8)


def test_a_good_preconditioner_saves_steps_and_a_given_one_is_used() -> None:
    c = CASES["classes"]
    rho = 1e-3 * c.scale
    plain = c.fit(ridge=rho, solver="cg", preconditioner="none")
    nystrom = c.fit(ridge=rho, solver="cg", rank=20)
    assert nystrom.system.products < plain.system.products

    class Newton(LinearOperator):
        """The inverse Hessian at the optimum."""

        def __init__(self) -> None:
            self.inverse = torch.linalg.inv(hessian(c.j, plain.system.outputs, rho))
            self.shape, self.dtype = tuple(self.inverse.shape), torch.float64  # type: ignore[assignment]
            self.device, self.space = torch.device("cpu"), None
            self.calls = 0

        def mm(self, v: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inverse @ v

        @property
        def T(self) -> LinearOperator:
            return self

    given = Newton()
    fit = c.fit(ridge=rho, solver="cg", preconditioner=given)
    assert given.calls > 0
    assert fit.system.products < plain.system.products
    near(flat(fit.delta), flat(plain.delta), 1e-8)


ANIMALS = {animal.name: animal for animal in ZOO}


@pytest.mark.parametrize("name", sorted(ANIMALS)[::6])
@pytest.mark.thinned(6)
def test_any_network(name: str) -> None:
    """Dual and conjugate gradients agree, and the gradient vanishes by the network's own derivatives."""
    animal: Animal = ANIMALS[name]
    x = animal.make_batch(6)
    lin = linnet.linearize(animal.factory(), output=animal.output)
    base = lin.base(x)
    labels = torch.arange(6) % max(2, base.shape[1])
    rho = 0.1 * float(lin.kernel(x, form="trace").diagonal().mean()) / base.shape[1]
    dual = linnet.fit(lin, (x, labels), loss="cross-entropy", ridge=rho, solver="dual")
    primal = linnet.fit(lin, (x, labels), loss="cross-entropy", ridge=rho, solver=CG(tolerance=1e-11))
    near(primal.predict(x), dual.predict(x), 1e-7)
    near(dual.system.outputs, dual.predict(x), 1e-8)
    y = labels[:, None].double() if base.shape[1] == 1 else nn.functional.one_hot(labels, base.shape[1])
    # δ = Jᵀ(y − p)/ρ
    expected = dual.module.vjp(x, (y - probabilities_of(dual.predict(x))) / rho, like="flat")
    near(flat(dual.delta), expected, 1e-7)


# --- the posterior ---------------------------------------------------------------------------------


@every_solver
@every_case
@pytest.mark.thinned(2)
def test_the_posterior_is_laplaces(c: Case, solver: str) -> None:
    rho = 0.05 * c.scale
    fit, delta = c.fit(ridge=rho, solver=solver), c.optimum(rho)
    inverse = torch.linalg.inv(hessian(c.j, c.f0 + c.j @ delta, rho))
    found = fit.predictive(c.x_test)
    near(found.covariance, torch.einsum("tcp,pq,tdq->tcd", c.j_test, inverse, c.j_test), 1e-8)
    joint = fit.predictive(c.x_test, joint=True).joint_covariance
    near(joint, torch.einsum("tcp,pq,sdq->tcsd", c.j_test, inverse, c.j_test), 1e-8)
    rows = c.j_test.flatten(0, 1).T
    near(fit.system.solve(rows), inverse @ rows, 1e-8)
    near(found.mean, fit.predict(c.x_test), 1e-12)
    probs = found.probs
    assert probs.shape == (4, max(2, c.y.shape[1]))
    near(probs.sum(1), torch.ones(4, dtype=torch.float64), 1e-12)
    near(found.with_noise().covariance, found.covariance, 1e-12)
    certain = fit.predict(c.x_test)
    if c.y.shape[1] == 1:
        plain = certain.sigmoid()[:, 0]
        assert (((probs[:, 1] - 0.5) * (plain - 0.5)) >= 0).all()
        assert ((probs[:, 1] - 0.5).abs() <= (plain - 0.5).abs() + 1e-12).all()
    else:
        assert torch.equal(probs.argmax(1), certain.argmax(1))


@every_solver
@every_case
@pytest.mark.thinned(2)
def test_probabilities_make_left_out_examples_likely(c: Case, solver: str) -> None:
    """The scale of the variance is the likeliest where each is left out by a Newton step."""
    rho = 0.05 * c.scale
    fit = c.fit(ridge=rho, solver=solver)
    f, labels, everyone = c.f0 + c.j @ c.optimum(rho), c.y.argmax(1), range(len(c.x))
    if c.y.shape[1] == 1:
        labels = (c.y[:, 0] > 0.5).long()
    rest = [[k for k in everyone if k != i] for i in everyone]
    inverses = [torch.linalg.inv(hessian(c.j[kept], f[kept], rho)) for kept in rest]
    covariances = torch.stack([c.j[i] @ inverses[i] @ c.j[i].T for i in everyone])
    near(fit.system.loo_variances(), covariances, 1e-7)
    without_kernel = c.fit(ridge=rho, solver="cg", memory=3000)
    assert without_kernel.system.kernel_form is None
    near(without_kernel.system.loo_variances(), covariances, 1e-7)
    variances = covariances.diagonal(dim1=1, dim2=2)
    _, scale = expected = fit_moderation(fit.loo(), labels, variances, temperature=1.0)
    assert (fit.temperature, fit.variance_scale) == expected
    found = fit.predictive(c.x_test)
    near(found.probs, probabilities(found.mean, scale * found.variance, 1.0), 1e-12)


def test_a_wide_posterior_does_not_hide_what_is_right() -> None:
    """A prior of many weights makes logits vary by far more than they differ; left-out examples know."""
    torch.manual_seed(0)
    x = torch.randn(400, 10, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    fit = linnet.fit(linnet.linearize(net), (x[:100], y[:100]), "cross-entropy", ridge=0.05)
    found, truth = fit.predictive(x[100:]), y[100:]
    plain = found.mean.softmax(1), probabilities(found.mean, found.variance, 1.0)
    without, whole, scaled = (float(-p[range(300), truth].log().mean()) for p in (*plain, found.probs))
    assert scaled < min(without, whole) - 0.15
    assert fit.variance_scale < 0.1


def test_without_a_kernel_probabilities_take_the_variance_as_it_is() -> None:
    c = CASES["classes"]
    fit = c.fit(ridge=c.scale, solver="cg", memory=3000)
    assert fit.system.kernel_form is None
    assert (fit.temperature, fit.variance_scale) == (1.0, 1.0)


def test_certain_examples_do_not_break_the_posterior() -> None:
    """Λ = 0 to rounding: nothing is inverted."""
    model = network(3, 5, 3)
    with torch.no_grad():
        model[2].bias[0] = 2000.0
    x = real(5, 3)
    fit = linnet.fit(
        linnet.linearize(model), (x, torch.zeros(5, dtype=torch.long)), loss="cross-entropy", ridge=0.1
    )
    own = fit.module.kernel(x).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    near(fit.predictive(x).covariance, own / 0.1, 1e-9)
    assert fit.loo().isfinite().all()
    assert fit.influence(x).abs().max() < 1e-9


# --- leaving out -----------------------------------------------------------------------------------


def one_newton_step(c: Case, rho: float, i: int) -> torch.Tensor:
    """δ after one Newton step from the optimum on the objective without example i, dense."""
    delta = c.optimum(rho)
    kept = [k for k in range(len(c.x)) if k != i]
    f = c.f0[kept] + c.j[kept] @ delta
    gradient = torch.einsum("ncp,nc->p", c.j[kept], probabilities_of(f) - c.y[kept]) + rho * delta
    return delta - torch.linalg.solve(hessian(c.j[kept], f, rho), gradient)


@every_solver
@every_case
@pytest.mark.thinned(2)
def test_leaving_out_is_exactly_one_newton_step(c: Case, solver: str) -> None:
    rho = 0.05 * c.scale
    fit = c.fit(ridge=rho, solver=solver)
    steps = torch.stack([one_newton_step(c, rho, i) for i in range(len(c.x))])
    near(fit.loo(), c.f0 + torch.einsum("ncp,np->nc", c.j, steps), 1e-7)
    delta = c.optimum(rho)
    expected = torch.einsum("tcp,np->ntc", c.j_test, delta - steps)
    near(fit.influence(c.x_test), expected, 1e-7)
    near(fit.informativeness(c.x_test), expected.square().sum(2).mean(1), 1e-6)
    own = torch.einsum("tcp,np->ntc", c.j, delta - steps)
    near(fit.informativeness(), own.square().sum(2).mean(1), 1e-6)


@pytest.mark.parametrize(("share", "most"), [(20.0, 1e-3), (1.0, 0.1), (0.05, 0.5)])
def test_how_far_one_step_is_from_refitting(share: float, most: float) -> None:
    """The error of the approximation against N refits: small where the ridge matters."""
    c = case(n=14)
    rho = share * c.scale
    exact = torch.stack([c.f0[i] + c.j[i] @ delta for i, delta in c.left_out(rho)])
    fit = c.fit(ridge=rho)
    change = exact - fit.predict(c.x)
    error = (fit.loo() - exact).abs().max() / change.abs().max()
    assert error < most
    assert (fit.loo() - exact).norm() < 0.5 * change.norm()  # better than to do nothing
    checked = fit.check_loo(list(range(14)))
    near(checked.refitted, exact, 1e-7)
    assert checked.error == pytest.approx((fit.loo() - exact).abs().max().item(), rel=1e-5)
    losses = (log_losses(fit.loo(), c.y) - log_losses(exact, c.y)).abs().max().item()
    assert checked.loss_error == pytest.approx(losses, rel=1e-4)


def test_the_check_takes_the_examples_that_matter_most() -> None:
    c = case(n=14)
    fit = c.fit(ridge=0.05 * c.scale)
    change = (fit.loo() - fit.predict(c.x)).norm(dim=1)
    assert set(fit.check_loo().examples.tolist()) == set(change.argsort()[-3:].tolist())
    refused(InputError, lambda: fit.check_loo([14]), "14")
    refused(InputError, lambda: fit.forget(list(range(1, 14))).check_loo(), "one example")
    beyond = c.fit(ridge=fit.ridge, solver=CG(tolerance=1e-10)).check_loo([0, 5])
    near(beyond.one_step, fit.check_loo([0, 5]).one_step, 1e-6)
    near(beyond.refitted, fit.check_loo([0, 5]).refitted, 1e-6)


# --- the ridge -------------------------------------------------------------------------------------


by_factors = pytest.mark.parametrize("solver", ["dual", "primal"])


@by_factors
def test_leave_one_out_chooses_nearly_what_refitting_would(solver: str) -> None:
    c = case(n=14)
    fit = c.fit(ridge="loo", solver=solver)
    path = fit.path()
    assert fit.ridge == path.best("loo")
    exact = []
    for rho in path.ridges[:9].tolist():
        outputs = torch.stack([c.f0[i] + c.j[i] @ delta for i, delta in c.left_out(rho)])
        exact.append(log_losses(outputs, c.y).mean().item())
    near(path.loo_error[:5], torch.tensor(exact[:5], dtype=torch.float64), 0.05)
    best = min(exact)
    chosen = exact[int((path.ridges[:9] - fit.ridge).abs().argmin())]
    assert chosen <= 1.02 * best
    said = fit.summary()["reasons"]
    assert "leave-one-out" in said["ridge"]
    assert "one Newton step; refitted without the 3 examples" in said["leave-one-out"]
    assert fit.summary()["criterion"] == "loo"


@by_factors
def test_evidence_is_laplaces(solver: str) -> None:
    c = CASES["classes"]
    path = c.fit(ridge=1.0, solver=solver).path([1.0, 0.1, 3.0])
    assert path.ridges.tolist() == [3.0, 1.0, 0.1]
    for at, rho in enumerate(path.ridges.tolist()):
        delta = c.optimum(rho)
        f = c.f0 + c.j @ delta
        h = hessian(c.j, f, rho)
        # log p(y|δ) + log N(δ; 0, I/ρ) + ½ log det 2πH⁻¹, where the 2π cancel
        value = -log_losses(f, c.y).sum() - 0.5 * rho * delta @ delta
        value = value + 0.5 * len(h) * math.log(rho) - 0.5 * torch.logdet(h)
        assert path.evidence[at].item() == pytest.approx(value.item(), rel=1e-9)
        degrees = len(h) - rho * torch.linalg.inv(h).trace().item()
        assert path.degrees_of_freedom[at].item() == pytest.approx(degrees, rel=1e-9)
    fit = c.fit(ridge="evidence", solver=solver)
    assert fit.ridge == fit.path().best("evidence")
    assert "evidence" in fit.summary()["reasons"]["ridge"]


@by_factors
def test_the_path_is_warm_and_certified(solver: str) -> None:
    path = CASES["classes"].fit(ridge=1.0, solver=solver).path()
    assert (path.certificate < 1e-10).all()
    assert path.steps.max() <= 10
    assert (path.ridges[:-1] > path.ridges[1:]).all()
    assert (path.degrees_of_freedom.diff() > -0.5).all()
    assert ((path.loo_accuracy >= 0) & (path.loo_accuracy <= 1)).all()


# --- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1e-3, 1.0])
def test_a_warm_start_saves_steps(share: float) -> None:
    """An example that was predicted already moves the optimum little; so does the next ridge."""
    c = case(n=30)
    fit = c.fit(ridge=share * c.scale)
    expected = fit.predict(c.x_test[:1]).argmax(1)
    assert fit.update((c.x_test[:1], expected)).system.steps < fit.system.steps
    assert fit.system.at(fit.ridge * 1.01).steps < fit.system.steps
    assert fit.system.at(fit.ridge).steps <= 1
