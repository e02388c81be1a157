"""The Gauss-Newton matrix and its approximations, by the engine and by hand: Botev 2020, 3.5 to 4.3.

The theory's side is made of layers' inputs, pre-activations and weights alone (``feedforward.py``), one
example at a time; the engine's side is ``linnet.curvature``.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import jacobian

from tests.curvatures.feedforward import (
    ACTIVATIONS,
    CANONICAL,
    EXACT,
    LOG_VARIANCE,
    LOSSES,
    MIXTURE,
    NATURAL,
    FeedForward,
    Loss,
    chain,
    gauss_newton_recursion,
    input_products,
    inputs,
    khatri_rao,
    output_jacobian,
    problem,
    relative_error,
)
from tests.curvatures.side_by_side import curvature_of

STANDARD_ERRORS = 5.0


def engine(network: FeedForward, data: Any, loss: Loss, structure: Any = "full", **settings: Any) -> Any:
    return curvature_of(network.module(), data, loss.likelihood, structure, **settings)


def preactivation_gauss_newton(network: FeedForward, xs: Tensor, ys: Tensor, loss: Loss) -> list[Tensor]:
    """Σ_n G_l^n of every layer, by the recursion of each example."""
    total = [torch.zeros(len(w), len(w), dtype=torch.float64) for w in network.weights]
    for x, y in zip(xs, ys, strict=True):
        state = network.run(x)
        for block, own in zip(
            total, gauss_newton_recursion(network, state, loss.curvature(state.h[-1], y)), strict=True
        ):
            block += own
    return total


def input_moments(network: FeedForward, xs: Tensor) -> list[Tensor]:
    """1/N Σ_n â âᵀ of every layer, eq. 4.3."""
    states = [network.run(x) for x in xs]
    stacked = [torch.stack([state.inputs[i] for state in states]) for i in range(network.depth)]
    return [a.T @ a / len(xs) for a in stacked]


def output_fisher(f: Tensor, loss: Loss) -> Tensor:
    """E[∇ log p ∇ log pᵀ] over the labels of p(y | f)."""
    scores = [(weight, loss.gradient(f, y)) for weight, y in loss.labels(f)]
    return torch.stack([weight * torch.outer(score, score) for weight, score in scores]).sum(0)


def fisher(network: FeedForward, xs: Tensor, loss: Loss) -> Tensor:
    """Σ_n Jᵀ F_L J, eq. 3.36."""
    total = torch.zeros(network.slices[-1].stop, network.slices[-1].stop, dtype=torch.float64)
    for x in xs:
        state = network.run(x)
        j = output_jacobian(network, state)
        total += j.T @ output_fisher(state.h[-1], loss) @ j
    return total


# Lemmas 3.21 and 3.22


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_lemma_3_21_khatri_rao_form_of_the_sample_gauss_newton_matrix(activation: str, biased: bool) -> None:
    loss = LOSSES["categorical"]
    network, xs, ys = problem(loss, 1, activation, biased)
    state = network.run(xs[0])
    curvature = loss.curvature(state.h[-1], ys[0])
    chains = [chain(network, state, network.depth - 1, i) for i in range(network.depth)]
    # G = (ã ãᵀ) * (∂h_L/∂h̃ᵀ G_L ∂h_L/∂h̃)
    theory = khatri_rao(input_products(state), [[a.T @ curvature @ b for b in chains] for a in chains])
    assert relative_error(network.theory(engine(network, (xs, ys), loss).dense()), theory) < EXACT


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(3)
def test_lemma_3_22_recursion_of_preactivation_gauss_newton_matrices(name: str, activation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 1, activation)
    state = network.run(xs[0])
    curvature = loss.curvature(state.h[-1], ys[0])
    # G_l = B_l W_{l+1}ᵀ G_{l+1} W_{l+1} B_l, eq. 3.30
    recursion = gauss_newton_recursion(network, state, curvature)
    shifts = tuple(torch.zeros_like(h) for h in state.h)
    slopes = jacobian(lambda *shift: network.run(xs[0], shift).h[-1], shifts)
    found = engine(network, (xs, ys), loss, "block")
    for part, a, own, slope in zip(found.parts, state.inputs, recursion, slopes, strict=True):
        assert relative_error(own, slope.T @ curvature @ slope) < EXACT
        # G_{l,l} = A_{l,l} ⊗ G_l, eq. 4.1
        places = network.order[network.slices[found.parts.index(part)]]
        places = places - places.min()
        block = part.operator.dense()[places][:, places]
        assert relative_error(block, torch.kron(torch.outer(a, a), own)) < EXACT


# Section 3.5.1


@pytest.mark.parametrize("loss", [*LOSSES.values(), NATURAL], ids=[*LOSSES, "natural"])
def test_section_3_5_1_fisher_is_gauss_newton_for_natural_parameters_of_exponential_families(
    loss: Loss,
) -> None:
    network, xs, ys = problem(loss, 4)
    # F = Σ_n Jᵀ E[∇ log p ∇ log pᵀ] J, by all labels or quadrature
    theory = fisher(network, xs, loss)
    for matrix in ("fisher", "gauss-newton"):
        found = engine(network, (xs, ys), loss, matrix=matrix).dense()
        assert relative_error(network.theory(found), theory) < EXACT


def products(network: FeedForward, xs: Tensor, ys: Tensor, loss: Loss) -> Tensor:
    """The Gauss-Newton matrix from products: Λ may be indefinite, and then has no root."""
    operator = engine(network, (xs, ys), loss, "matrix-free", matrix="gauss-newton")
    return network.theory(operator @ torch.eye(operator.shape[1], dtype=torch.float64))


@pytest.mark.parametrize("loss", [MIXTURE, LOG_VARIANCE], ids=["mixture", "log-variance"])
def test_section_3_5_1_fisher_differs_from_gauss_newton_elsewhere(loss: Loss) -> None:
    network, xs, ys = problem(loss, 4)
    theory = fisher(network, xs, loss)
    found = network.theory(engine(network, (xs, ys), loss, matrix="fisher").dense())
    assert relative_error(found, theory) < EXACT
    gauss_newton = products(network, xs, ys, loss)
    naive = torch.zeros_like(theory)
    for x, y in zip(xs, ys, strict=True):
        state = network.run(x)
        j = output_jacobian(network, state)
        naive += j.T @ loss.curvature(state.h[-1], y) @ j
    assert relative_error(gauss_newton, naive) < EXACT
    # eq. 4.28: not a matter of rounding
    assert float((found - gauss_newton).norm() / found.norm()) > 0.2


# Section 3.6


@pytest.mark.parametrize(
    ("name", "rank"), [("gaussian", 2), ("categorical", 2), ("bernoulli", 2), ("poisson", 1)]
)
@pytest.mark.parametrize("n", [1, 3, 6])
def test_eq_3_39_rank_is_at_most_the_number_of_outputs_of_all_examples(name: str, rank: int, n: int) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, n)
    found = engine(network, (xs, ys), loss).dense()
    assert n * loss.outputs < len(found)
    # rank G ≤ Σ_n rank Λ_n ≤ N·C, where Λ of C classes has rank C − 1; here nothing is lost
    assert int(torch.linalg.matrix_rank(found, hermitian=True)) == n * rank


# Lemma 4.1

LINEAR = "identity"


def deep_linear(depth: int, seed: int, orthogonal: bool = False) -> tuple[FeedForward, Tensor, Tensor]:
    """A linear network under the conditions of lemma 4.1, inputs of full rank, and targets."""
    network = FeedForward.random([3] * (depth + 1), LINEAR, biased=False, seed=seed)
    if orthogonal:
        weights = tuple(torch.linalg.qr(w).Q for w in network.weights)
        network = FeedForward(weights, network.activation, biased=False)
    return network, inputs(8, 3, seed + 1), inputs(8, 3, seed + 2)


def well_conditioned(network: FeedForward) -> bool:
    return all(float(torch.linalg.cond(w)) < 30 for w in network.weights)


def squared_loss_gradient(network: FeedForward, xs: Tensor, ys: Tensor) -> Tensor:
    """The gradient of ½ Σ |f − y|² over the module's parameters."""
    module = network.module()
    (0.5 * (module(xs) - ys).square().sum()).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@given(st.integers(1, 4), st.integers(0, 1000))
def test_lemma_4_1_block_diagonal_preconditioning_is_exact_up_to_the_depth(depth: int, seed: int) -> None:
    network, xs, ys = deep_linear(depth, seed)
    if not well_conditioned(network):
        return
    gradient = squared_loss_gradient(network, xs, ys)
    found = engine(network, (xs, ys), LOSSES["gaussian"], ["full", "block", "kfac"])
    # G⁻¹V = 1/L G_diag⁻¹V: it solves G u = V
    step = found["block"].solve(gradient) / depth
    assert relative_error(found["full"] @ step, gradient) < 1e-7
    # The Kronecker factors are exact here, eq. 4.2, and solve it as well
    assert relative_error(found["kfac"].dense(), found["block"].dense()) < EXACT
    assert relative_error(found["kfac"].solve(gradient) / depth, step) < 1e-7


def test_lemma_4_1_solves_a_system_of_rank_d_squared() -> None:
    network, xs, ys = deep_linear(3, 6)
    gradient = squared_loss_gradient(network, xs, ys)
    found = engine(network, (xs, ys), LOSSES["gaussian"], ["full", "block"])
    full = found["full"].dense()
    # f = W_3 W_2 W_1 x has d² degrees of freedom and L d² parameters: G⁻¹ is any solution
    assert int(torch.linalg.matrix_rank(full, hermitian=True)) == 9
    step, least = found["block"].solve(gradient) / 3, torch.linalg.pinv(full, hermitian=True) @ gradient
    assert relative_error(step, least) > 1e-2
    # and all solutions move the outputs alike
    jacobians = torch.cat([output_jacobian(network, network.run(x)) for x in xs])
    assert relative_error(jacobians @ network.theory(step), jacobians @ network.theory(least)) < 1e-8


def test_lemma_4_1_is_the_solution_of_least_norm_for_orthogonal_weights() -> None:
    network, xs, ys = deep_linear(3, 6, orthogonal=True)
    gradient = squared_loss_gradient(network, xs, ys)
    found = engine(network, (xs, ys), LOSSES["gaussian"], ["full", "block"])
    least = torch.linalg.pinv(found["full"].dense(), hermitian=True) @ gradient
    assert relative_error(found["block"].solve(gradient) / 3, least) < 1e-8


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_lemma_4_1_holds_with_biases_and_with_output_curvature_that_varies(name: str, biased: bool) -> None:
    # ∂f/∂w_l = (â_0ᵀ ⊗ I) T_l with T_l constant and invertible: nothing else is needed, whatever Λ_n is
    network, xs, ys = FeedForward.random((3, 3, 3, 3), LINEAR, biased, seed=6), inputs(8, 3), inputs(8, 3, 2)
    data = (xs, (ys > 0).double()) if name == "bernoulli" else (xs, ys)
    gradient = squared_loss_gradient(network, xs, ys)
    found = engine(network, data, LOSSES[name], ["full", "block", "kfac"])
    assert relative_error(found["full"] @ (found["block"].solve(gradient) / 3), gradient) < 1e-8
    # but the Kronecker factors are exact for constant Λ alone
    error = relative_error(found["kfac"].dense(), found["block"].dense())
    assert error < EXACT if name == "gaussian" else error > 1e-3


@pytest.mark.parametrize("broken", ["activation", "gradient"])
def test_lemma_4_1_needs_linearity_and_a_gradient(broken: str) -> None:
    network, xs, ys = deep_linear(3, 6)
    if broken == "activation":
        network = FeedForward(network.weights, ACTIVATIONS["tanh"], biased=False)
    gradient = squared_loss_gradient(network, xs, ys)
    if broken == "gradient":
        gradient = inputs(1, len(gradient), 3)[0]
    found = engine(network, (xs, ys), LOSSES["gaussian"], ["full", "block"])
    assert relative_error(found["full"] @ (found["block"].solve(gradient) / 3), gradient) > 1e-2


# Equation 4.2


@pytest.mark.parametrize("widths", [(3, 3, 3), (3, 5, 2, 4)])
@pytest.mark.parametrize("biased", [True, False])
def test_eq_4_2_kronecker_factors_are_exact_for_linear_networks_and_constant_curvature(
    widths: tuple[int, ...], biased: bool
) -> None:
    network = FeedForward.random(widths, LINEAR, biased, seed=4)
    data = inputs(7, 3), inputs(7, widths[-1], 2)
    found = engine(network, data, LOSSES["gaussian"], ["kfac", "block", "ekfac"])
    assert relative_error(found["kfac"].dense(), found["block"].dense()) < EXACT
    assert relative_error(found["ekfac"].dense(), found["block"].dense()) < EXACT


@pytest.mark.parametrize("name", CANONICAL)
def test_eq_4_2_kronecker_factors_are_exact_for_one_example_only(name: str) -> None:
    loss = LOSSES[name]
    for n, exact in ((1, True), (6, False)):
        network, xs, ys = problem(loss, n)
        found = engine(network, (xs, ys), loss, ["kfac", "block"])
        error = relative_error(found["kfac"].dense(), found["block"].dense())
        assert error < EXACT if exact else error > 1e-2


# Section 4.3.1: KFLR


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(3)
def test_section_4_3_1_factors_of_kflr_are_exact(name: str, activation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 5, activation)
    found = engine(network, (xs, ys), loss, "kfac", expectation="exact")
    # B = Σ_n G_l^n and A = 1/N Σ_n â âᵀ: the engine sums where the thesis averages
    expected = zip(preactivation_gauss_newton(network, xs, ys, loss), input_moments(network, xs), strict=True)
    for part, (gradients, moments) in zip(found.parts, expected, strict=True):
        assert relative_error(part.operator.left, gradients) < EXACT
        assert relative_error(part.operator.right, moments) < EXACT


@pytest.mark.parametrize("name", CANONICAL)
def test_eq_4_6_square_root_vectors_propagate_like_gradients(name: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 1)
    state = network.run(xs[0])
    root = loss.likelihood.root(network.outputs(xs), ys)[:, 0].T  # c_L^k in columns
    for i, own in reversed(
        list(enumerate(gauss_newton_recursion(network, state, loss.curvature(state.h[-1], ys[0]))))
    ):
        # Σ_k c_l^k c_l^kᵀ = G_l, eq. 4.5
        assert relative_error(root @ root.T, own) < EXACT
        if i:
            # c_l = B_l W_{l+1}ᵀ c_{l+1}
            root = network.activation.first(state.h[i - 1])[:, None] * (network.weight(i).T @ root)


# Section 4.3.2: KFRA


def recursive_means(network: FeedForward, xs: Tensor, ys: Tensor, loss: Loss) -> list[Tensor]:
    """Σ_n Ĝ_l: the recursion of eq. 4.7 with its expectations written out, from Σ_n Λ_n."""
    states = [network.run(x) for x in xs]
    curvatures = [loss.curvature(state.h[-1], y) for state, y in zip(states, ys, strict=True)]
    found = [torch.stack(curvatures).sum(0)]
    for i in range(network.depth - 2, -1, -1):
        w = network.weight(i + 1)
        slopes = [torch.diag(network.activation.first(state.h[i])) for state in states]
        found.insert(0, torch.stack([b @ w.T @ found[0] @ w @ b for b in slopes]).mean(0))
    return found


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(3)
def test_eq_4_7_kfra_passes_expectations_back(name: str, activation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 5, activation)
    found = engine(network, (xs, ys), loss, "kfra")
    expected = zip(recursive_means(network, xs, ys, loss), input_moments(network, xs), strict=True)
    for part, (gradients, moments) in zip(found.parts, expected, strict=True):
        assert relative_error(part.operator.left, gradients) < EXACT
        assert relative_error(part.operator.right, moments) < EXACT


def test_eq_4_7_kfra_weighs_with_slopes_and_not_with_activations() -> None:
    # Ĝ_l = (W_{l+1}ᵀ Ĝ_{l+1} W_{l+1}) ∘ E[φ' φ'ᵀ]; the thesis' algorithm 1 prints E[a aᵀ] in its place
    loss = LOSSES["categorical"]
    network, xs, ys = problem(loss, 5)
    found = engine(network, (xs, ys), loss, "kfra").parts
    w, hidden = network.weight(2), torch.stack([network.run(x).h[1] for x in xs])
    behind = w.T @ found[2].operator.left @ w
    slopes, activations = network.activation.first(hidden), network.activation.value(hidden)
    own = found[1].operator.left
    assert relative_error(own, behind * (slopes.T @ slopes) / len(xs)) < EXACT
    assert relative_error(own, behind * (activations.T @ activations) / len(xs)) > 0.1


@pytest.mark.parametrize(
    ("activation", "n", "exact"),
    [("tanh", 1, True), ("relu", 1, True), (LINEAR, 6, True), ("tanh", 6, False), ("relu", 6, False)],
)
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(2)
def test_section_4_3_2_kfra_is_exact_for_one_example_and_for_linear_networks(
    name: str, activation: str, n: int, exact: bool
) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, n, activation)
    kfra = engine(network, (xs, ys), loss, "kfra").dense()
    kflr = engine(network, (xs, ys), loss, "kfac", expectation="exact").dense()
    error = relative_error(kfra, kflr)
    assert error < EXACT if exact else error > 1e-3


# Sections 4.3.3 and 4.3.4: KFAC and random projections

SEEDS, SAMPLES = 24, 40


def deviations(draws: Tensor, expected: Tensor) -> Tensor:
    """How many standard errors the mean of draws (S, ...) is away, where there is any variance."""
    error = draws.std(0) / len(draws) ** 0.5
    assert float(error.norm() / expected.norm()) < 0.05, "too few draws to tell"
    return (draws.mean(0) - expected).abs() / (error + 1e-9 * expected.abs().max())


@pytest.mark.parametrize("expectation", ["mc", "random-projection"])
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(6)
def test_sections_4_3_3_and_4_3_4_sampled_factors_are_unbiased(name: str, expectation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 3)
    expected = preactivation_gauss_newton(network, xs, ys, loss)
    full = engine(network, (xs, ys), loss).dense()
    draws = [
        engine(network, (xs, ys), loss, ["kfac", "full"], expectation=expectation, samples=SAMPLES, seed=seed)
        for seed in range(SEEDS)
    ]
    for i, own in enumerate(expected):
        lefts = torch.stack([draw["kfac"].parts[i].operator.left for draw in draws])
        assert float(deviations(lefts, own).max()) < STANDARD_ERRORS
        assert float(deviations(lefts, 1.3 * own).max()) > STANDARD_ERRORS  # a wrong scale would show
    assert (
        float(deviations(torch.stack([draw["full"].dense() for draw in draws]), full).max()) < STANDARD_ERRORS
    )


@pytest.mark.parametrize("name", CANONICAL)
def test_eq_4_10_random_signs_have_the_curvature_as_second_moment(name: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 1)
    f = network.outputs(xs)
    root = loss.likelihood.root(f, ys)[:, 0].T
    # M = E[(L v)(L v)ᵀ]: the mean over all vectors of signs
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=root.shape[1])), dtype=torch.float64)
    projected = signs @ root.T
    assert relative_error(projected.T @ projected / len(signs), loss.curvature(f[0], ys[0])) < EXACT


@pytest.mark.parametrize("method", ["project", "sample_gradients"])
@pytest.mark.parametrize("name", CANONICAL)
def test_eq_4_9_and_4_11_columns_sum_to_the_curvature_in_expectation(name: str, method: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 2)
    f = network.outputs(xs)
    count = 4000
    columns = getattr(loss.likelihood, method)(f, count, torch.Generator().manual_seed(0), ys)
    expected = torch.stack([loss.curvature(a, b) for a, b in zip(f, ys, strict=True)])
    draws = count * torch.einsum("knc,knd->kncd", columns, columns)  # they carry 1/√K
    assert float(deviations(draws, expected).max()) < STANDARD_ERRORS
