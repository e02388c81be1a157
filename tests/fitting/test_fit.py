"""The fit and its audits against dense refits, in float64 at 1e-10."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import linnet
from tests.fitting.problems import Problem, flat, near, network, problem, real, rho_for, solver_of
from tests.oracles.dense import (
    influence_oracle,
    jacobian_oracle,
    leave_one_out_oracle,
    linearized_oracle,
    output_oracle,
    posterior_oracle,
    ridge_oracle,
)

SOLVERS = ["dual", "primal", "cg"]
every_solver = pytest.mark.parametrize("solver", SOLVERS)


def check_against_oracles(p: Problem, rho: float, solver: str, relative: float = 1e-10) -> None:
    """Solution, predictions, posterior, leave-one-out and influence, each by its definition."""
    fit = p.fit(ridge=rho, solver=solver)
    arguments = p.j, p.t, p.f0, rho
    delta = ridge_oracle(*arguments)
    near(flat(fit.delta), delta, relative)
    near(fit.predict(p.x_test), linearized_oracle(p.f0_test, p.j_test, delta), relative)
    mean, covariance = posterior_oracle(*arguments, fit.noise, p.j_test, p.f0_test)
    near(fit.predictive(p.x_test).mean, mean, relative)
    near(fit.predictive(p.x_test).covariance, covariance, relative)
    near(fit.loo(), leave_one_out_oracle(*arguments), relative)
    near(fit.influence(p.x_test), influence_oracle(*arguments, p.j_test), relative)


@every_solver
@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("share", [1e-3, 0.1, 30.0])
@pytest.mark.thinned(4)
def test_fit_against_the_oracles(solver: str, classes: bool, share: float) -> None:
    p = problem(classes=classes)
    # conjugate gradients lose what the condition number takes
    check_against_oracles(p, rho_for(p, share), solver, 1e-10 if solver == "dual" or share > 1e-2 else 1e-8)


@given(
    n=st.integers(3, 9),
    outputs=st.integers(1, 3),
    hidden=st.integers(1, 4),
    share=st.floats(1e-2, 10.0),
    seed=st.integers(0, 1000),
)
@pytest.mark.long
def test_any_small_problem_dual(n: int, outputs: int, hidden: int, share: float, seed: int) -> None:
    """More equations than parameters and fewer."""
    p = problem(n, outputs, classes=False, tests=2, seed=seed, hidden=hidden)
    check_against_oracles(p, rho_for(p, share), "dual")


@settings(max_examples=6)
@given(n=st.integers(3, 6), outputs=st.integers(1, 2), share=st.floats(0.05, 10.0), seed=st.integers(0, 1000))
def test_any_small_problem_cg(n: int, outputs: int, share: float, seed: int) -> None:
    p = problem(n, outputs, classes=False, tests=2, seed=seed, hidden=3)
    check_against_oracles(p, rho_for(p, share), "cg", 1e-9)


@every_solver
def test_module_and_predictions_agree(solver: str) -> None:
    p = problem()
    lin = p.lin
    fit = linnet.fit(lin, (p.x, p.y), ridge=0.3, solver=solver)
    torch.testing.assert_close(fit.module(p.x_test), fit.predict(p.x_test))
    assert fit.module is not lin
    assert all(not v.any() for v in lin.delta.values())
    assert {name: v.shape for name, v in fit.delta.items()} == {
        name: v.shape for name, v in lin.delta.items()
    }
    assert not any(v.requires_grad for v in fit.delta.values())


@every_solver
def test_a_moved_linearization_is_fitted_from_its_base(solver: str) -> None:
    p, lin = problem(), problem().lin
    with torch.no_grad():
        for v in lin.delta.values():
            v.add_(3.0)
    near(flat(linnet.fit(lin, (p.x, p.y), ridge=0.3, solver=solver_of(solver, tolerance=1e-13)).delta),
         ridge_oracle(p.j, p.t, p.f0, 0.3))  # fmt: skip
    assert all((v == 3.0).all() for v in lin.delta.values())


def test_what_a_fit_says_about_itself() -> None:
    p = problem()
    fit = p.fit(ridge=0.5)
    assert (fit.n, fit.ridge, fit.classes, fit.solver) == (7, 0.5, 3, fit.record.solver)
    near(fit.targets, p.t)
    assert torch.equal(fit.labels, p.y)
    summary = json.loads(json.dumps(fit.summary()))
    assert summary["examples"] == 7
    assert summary["parameters"] == p.j.shape[2]
    assert summary["ridge"] == 0.5
    assert summary["criterion"] == "given"
    assert 0 <= summary["certificate"] < 1e-12
    assert summary["noise"] == fit.noise
    assert set(summary["seconds"]) == {"network", "kernel", "solve"}
    assert all(seconds >= 0 for seconds in summary["seconds"].values())
    regression = problem(classes=False).fit()
    assert regression.classes is None
    assert regression.labels is None
    assert regression.temperature is None


@every_solver
def test_certificate_is_the_residual_of_the_solution(solver: str) -> None:
    p = problem()
    fit = p.fit(ridge=0.3, solver=solver_of(solver, tolerance=1e-4))
    j, r = p.j.flatten(0, 1), p.residual
    right = j.T @ r
    residual = (right - j.T @ (j @ flat(fit.delta)) - 0.3 * flat(fit.delta)).norm() / right.norm()
    if solver == "cg":
        assert fit.summary()["certificate"] == pytest.approx(residual.item(), rel=1e-6)
        assert 1e-12 < residual < 1e-4
    else:
        assert max(fit.summary()["certificate"], residual.item()) < 1e-12


@every_solver
def test_noise_has_the_highest_evidence(solver: str) -> None:
    """σ² maximizes the density of the residual under N(0, σ²/ρ (K + ρI))."""
    p, rho = problem(), 0.7
    fit = p.fit(ridge=rho, solver=solver)
    covariance = p.kernel + rho * torch.eye(21, dtype=torch.float64)

    def density(noise: float) -> float:
        normal = torch.distributions.MultivariateNormal(
            torch.zeros(21, dtype=torch.float64), noise / rho * covariance
        )
        return normal.log_prob(p.residual).item()

    assert density(fit.noise) > max(density(0.99 * fit.noise), density(1.01 * fit.noise))
    slope = (density(1.0001 * fit.noise) - density(0.9999 * fit.noise)) / 2e-4
    assert abs(slope) < 1e-4


# --- informativeness ------------------------------------------------------------------------------


@every_solver
def test_informativeness_is_the_mean_squared_influence(solver: str) -> None:
    p, rho = problem(), 0.4
    fit = p.fit(ridge=rho, solver=solver)
    relative = 1e-10 if solver == "dual" else 1e-9
    for x, j in ((None, p.j), (p.x, p.j), (p.x_test, p.j_test)):
        influence = influence_oracle(p.j, p.t, p.f0, rho, j)  # (N, T, C)
        near(fit.informativeness(x), (influence**2).sum(2).mean(1), relative)


# --- what theory says must not change -------------------------------------------------------------


def test_one_output_is_scalar_kernel_regression() -> None:
    """With C = 1 every block is a number: leave-one-out is t − β/M_ii."""
    p, rho = problem(outputs=1, classes=False), 0.2
    fit = p.fit(ridge=rho)
    m = torch.linalg.inv(p.kernel + rho * torch.eye(7, dtype=torch.float64))
    beta = m @ p.residual
    near(fit.loo()[:, 0], p.t[:, 0] - beta / m.diag())
    cross = p.j_test[:, 0] @ p.j[:, 0].T
    near(fit.influence(p.x_test)[:, :, 0], (m @ cross.T) * (beta / m.diag())[:, None])
    vector = linnet.fit(p.lin, (p.x, p.t[:, 0]), ridge=rho)
    assert torch.equal(flat(vector.delta), flat(fit.delta))


@every_solver
def test_a_linear_network_is_ridge_regression_whatever_its_weights(solver: str) -> None:
    """f is linear in its weights, so θ₀ + δ minimizes ‖T − XW‖² + ρ‖W − W₀‖²."""
    model = nn.Sequential(nn.Linear(4, 2)).double()
    x, t, rho = real(9, 4, seed=1), real(9, 2, seed=2), 0.8
    fit = linnet.fit(linnet.linearize(model), (x, t), ridge=rho, solver=solver_of(solver, tolerance=1e-13))
    design = torch.cat([x, torch.ones(9, 1, dtype=torch.float64)], 1)
    start = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().T  # type: ignore[arg-type, union-attr]
    step = torch.linalg.solve(
        design.T @ design + rho * torch.eye(5, dtype=torch.float64), design.T @ (t - design @ start)
    )
    near(fit.predict(x), design @ (start + step))


@every_solver
def test_targets_that_the_network_already_gives(solver: str) -> None:
    p = problem(classes=False)
    fit = linnet.fit(p.lin, (p.x, p.lin.base(p.x)), ridge=0.3, solver=solver)
    assert not flat(fit.delta).any()
    assert fit.noise > 0
    predictive = fit.predictive(p.x_test)
    near(predictive.mean, p.f0_test)
    assert torch.isfinite(predictive.sample(3)).all()
    assert torch.isfinite(torch.tensor(fit.summary()["certificate"]))


@every_solver
def test_parameter_subsets_fit_their_columns_alone(solver: str) -> None:
    p = problem()
    names = ["2.weight", "2.bias"]
    lin = linnet.linearize(p.model, params="last-layer")
    fit = linnet.fit(lin, (p.x, p.y), ridge=0.3, solver=solver_of(solver, tolerance=1e-13))
    j = jacobian_oracle(p.model, p.x, names)
    near(flat(fit.delta), ridge_oracle(j, p.t, p.f0, 0.3))
    near(fit.loo(), leave_one_out_oracle(j, p.t, p.f0, 0.3), 1e-9)


class TwoInputs(nn.Module):
    """Takes two inputs, by position or by name, and a scale shared by all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 11), nn.Linear(2, 11)
        self.head = nn.Linear(11, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.first(a) + self.second(b))
        return self.head(h if scale is None else h * scale)


@every_solver
@pytest.mark.parametrize("form", ["tuple", "dict", "list", "shared"])
@pytest.mark.thinned(3)
def test_inputs_of_any_structure(solver: str, form: str) -> None:
    torch.manual_seed(3)
    model = TwoInputs().double()
    a, b, y = real(6, 3, seed=1), real(6, 2, seed=2), torch.arange(6) % 2
    x: Any = {"tuple": (a, b), "list": [a, b], "dict": {"b": b, "a": a}}.get(
        form, {"a": a, "b": b, "scale": real(11)}
    )
    j, f0 = jacobian_oracle(model, x), output_oracle(model, x)
    t = 15.0 * nn.functional.one_hot(y, 2).double()
    fit = linnet.fit(linnet.linearize(model), (x, y), ridge=0.3, solver=solver_of(solver, tolerance=1e-13))
    near(flat(fit.delta), ridge_oracle(j, t, f0, 0.3))
    near(fit.loo(), leave_one_out_oracle(j, t, f0, 0.3), 1e-9)
    near(fit.influence(x), influence_oracle(j, t, f0, 0.3, j), 1e-9)
    kept = [0, 2, 3, 5]
    without = ridge_oracle(j[kept], t[kept], f0[kept], 0.3)
    smaller = fit.forget([1, 4])
    near(flat(smaller.delta), without, 1e-9)
    pick = lambda index: (  # noqa: E731
        {k: v if k == "scale" else v[index] for k, v in x.items()}
        if isinstance(x, dict)
        else [v[index] for v in x]
    )
    order = [*kept, 1, 4]
    again = smaller.update((pick([1, 4]), y[[1, 4]]))
    near(flat(again.delta), flat(fit.delta), 1e-9)
    near(again.loo(), fit.loo()[order], 1e-8)
    near(again.predict(x), fit.predict(x), 1e-9)


@every_solver
def test_float32_networks(solver: str) -> None:
    """The same problem in float32 agrees with the float64 oracle to float32's precision."""
    p = problem()
    lin = linnet.linearize(network().float())
    fit = linnet.fit(lin, (p.x.float(), p.y), ridge=1.0, solver=solver)
    delta = ridge_oracle(p.j, p.t, p.f0, 1.0)
    near(flat(fit.delta), delta, 2e-5 if solver == "dual" else 2e-4)
    assert fit.predict(p.x_test.float()).dtype == torch.float32
    near(fit.loo(), leave_one_out_oracle(p.j, p.t, p.f0, 1.0), 1e-3)
    predictive = fit.predictive(p.x_test.float())
    _, covariance = posterior_oracle(p.j, p.t, p.f0, 1.0, fit.noise, p.j_test, p.f0_test)
    near(predictive.covariance, covariance, 1e-3)
    near(predictive.probs.sum(1), torch.ones(4), 1e-6)


def test_variance_never_falls_below_zero_in_float32() -> None:
    """Where the posterior is nearly certain, rounding must not make variances negative."""
    p = problem(n=8)
    fit = linnet.fit(linnet.linearize(network().float()), (p.x[:8].float(), p.y), ridge=1e-5)
    predictive = fit.predictive(fit.x)
    assert (predictive.variance >= 0).all()
    assert torch.isfinite(predictive.probs).all()
    assert torch.isfinite(predictive.sample(2)).all()


# --- probabilities --------------------------------------------------------------------------------


@every_solver
def test_temperature_is_fitted_to_left_out_predictions(solver: str) -> None:
    """No other temperature makes the leave-one-out predictions, uncertain as they are, likelier."""
    torch.manual_seed(1)
    n, rho = 12, 2.0
    p = problem(n=n)
    y = (p.x[:, 0] > 0).long() + torch.randint(0, 2, (n,))
    fit = linnet.fit(p.lin, (p.x, y), ridge=rho, solver=solver_of(solver, tolerance=1e-12))
    t = 15.0 * nn.functional.one_hot(y, 3).double()
    loo = leave_one_out_oracle(p.j, t, p.f0, rho)
    variance = torch.empty(n, 3, dtype=torch.float64)
    for i in range(n):
        kept = [k for k in range(n) if k != i]
        _, covariance = posterior_oracle(
            p.j[kept], t[kept], p.f0[kept], rho, fit.noise, p.j[i : i + 1], p.f0[i : i + 1]
        )
        variance[i] = covariance[0].diag()

    def loss(temperature: float) -> float:
        """Of the labels, and of one more example that is of no class in particular."""
        shared = fit.variance_scale * variance.mean(1, keepdim=True)
        scaled = loo / temperature / torch.sqrt(1 + torch.pi / 8 * shared / temperature**2)
        log_p = scaled.log_softmax(1)
        return -(log_p.gather(1, y[:, None]).sum() + log_p.mean()).item()

    best = loss(fit.temperature)
    assert all(best <= loss(f * fit.temperature) + 1e-10 for f in (0.3, 0.8, 0.98, 1.02, 1.25, 3.0))
    assert fit.predictive(p.x_test).targets.temperature == fit.temperature


def test_probabilities_are_calibrated_better_than_raw_outputs() -> None:
    """α = 15 makes the raw softmax sure of itself; with noisy labels the fitted temperature is not."""
    generator = torch.Generator().manual_seed(3)
    x, x_test = real(60, 3, seed=1), real(200, 3, seed=2)

    def label(z: torch.Tensor) -> torch.Tensor:
        return torch.multinomial((2 * z).softmax(1), 1, generator=generator)[:, 0]

    y, y_test = label(x), label(x_test)
    fit = linnet.fit(linnet.linearize(network()), (x, y), ridge="loo")
    predictive = fit.predictive(x_test)
    calibrated = -predictive.probs[torch.arange(200), y_test].log().mean()
    raw = nn.functional.cross_entropy(predictive.mean, y_test)
    assert calibrated < 1.1 < raw
    assert torch.equal(predictive.probs.argmax(1).bincount(minlength=3) > 0, torch.ones(3, dtype=torch.bool))
