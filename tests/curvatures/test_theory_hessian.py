"""The Hessian of feed-forward networks, by the engine and by hand: Botev 2020, sections 3.4 and 3.5.

The engine's Hessian comes from differentiating the network; the theory's side is made of layers' inputs,
pre-activations and weights alone (``feedforward.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import linnet
from tests.curvatures.feedforward import (
    CANONICAL,
    EXACT,
    LOG_VARIANCE,
    LOSSES,
    MIXTURE,
    NATURAL,
    PIECEWISE_LINEAR,
    SMOOTH,
    FeedForward,
    Loss,
    first_order_component,
    gauss_newton_recursion,
    hessian_recursion,
    input_products,
    inputs,
    khatri_rao,
    output_jacobian,
    preactivation_hessian,
    problem,
    relative_error,
)
from tests.oracles.dense import hessian_oracle

ALL_ACTIVATIONS = (*SMOOTH, *PIECEWISE_LINEAR)


def engine(
    network: FeedForward, xs: Tensor, ys: Tensor, loss: Loss, matrix: str, structure: str = "full"
) -> Tensor:
    """A matrix by linnet, in the theory's order."""
    found: Any = linnet.curvature(network.module(), (xs, ys), loss.likelihood, structure, matrix=matrix)
    return network.theory(found.dense())


def blocks_of(network: FeedForward, matrix: Tensor) -> list[Tensor]:
    """The diagonal blocks, one for each layer."""
    return [matrix[part, part] for part in network.slices]


# The ground that the other tests stand on


@pytest.mark.parametrize("name", CANONICAL)
def test_the_explicit_network_and_its_losses_are_those_of_the_engine(name: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 4, "tanh")
    f = network.module()(xs).detach()
    assert relative_error(network.outputs(xs), f) < EXACT
    ours = torch.stack([loss.gradient(a, b) for a, b in zip(f, ys, strict=True)])
    assert relative_error(loss.likelihood.gradient(f, ys), ours) < EXACT
    values = torch.stack([loss.nll(a, b) for a, b in zip(f, ys, strict=True)])
    steps = loss.likelihood.nll(f, ys) - values  # up to what is constant in f
    again = loss.likelihood.nll(2 * f, ys) - torch.stack(
        [loss.nll(2 * a, b) for a, b in zip(f, ys, strict=True)]
    )
    assert float((steps - again).abs().max()) < EXACT


# Lemma 3.15


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "softplus", "leaky-relu"])
@pytest.mark.parametrize("name", ["gaussian", "categorical"])
@pytest.mark.thinned(2)
def test_lemma_3_15_khatri_rao_form_of_the_sample_hessian(name: str, activation: str, biased: bool) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, activation=activation, biased=biased)
    state = network.run(xs[0])
    second = preactivation_hessian(network, xs[0], lambda f: loss.nll(f, ys[0]))
    first_order = first_order_component(network, state, loss.gradient(state.h[-1], ys[0]))
    # H = (ã ãᵀ) * ∂²L/∂h̃² + Hᶠᴼ
    theory = khatri_rao(input_products(state), second) + first_order
    found = engine(network, xs, ys, loss, "hessian")
    assert relative_error(found, theory) < EXACT
    oracle = network.theory(hessian_oracle(network.module(), xs, ys, loss.nll))
    assert relative_error(found, oracle) < EXACT
    assert float(first_order.abs().max()) > 1e-2 * float(theory.abs().max())  # or nothing was tested


def test_lemma_3_15_first_order_component_has_no_diagonal_blocks_and_depends_on_the_residual() -> None:
    loss = LOSSES["gaussian"]
    network, xs, ys = problem(loss, activation="tanh")
    state = network.run(xs[0])
    gradient = loss.gradient(state.h[-1], ys[0])
    first_order = first_order_component(network, state, gradient)
    assert all(not block.any() for block in blocks_of(network, first_order))
    assert relative_error(first_order_component(network, state, 2 * gradient), 2 * first_order) < EXACT
    # where the loss has no slope the Hessian is the Gauss-Newton matrix
    f = network.outputs(xs)
    assert (
        relative_error(engine(network, xs, f, loss, "hessian"), engine(network, xs, f, loss, "auto")) < EXACT
    )


# Lemma 3.16


@pytest.mark.parametrize("activation", ALL_ACTIVATIONS)
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(2)
def test_lemma_3_16_recursion_of_preactivation_hessians(name: str, activation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, activation=activation)
    state = network.run(xs[0])
    f = state.h[-1]
    # H_l = B_l W_{l+1}ᵀ H_{l+1} W_{l+1} B_l + D_l, eq. 3.23
    recursion = hessian_recursion(network, state, loss.gradient(f, ys[0]), loss.curvature(f, ys[0]))
    second = preactivation_hessian(network, xs[0], lambda at: loss.nll(at, ys[0]))
    found = blocks_of(network, engine(network, xs, ys, loss, "hessian"))
    for i, own in enumerate(recursion):
        assert relative_error(own, second[i][i]) < EXACT
        # ∂²L/∂w_l² = A_{l,l} ⊗ H_l, eq. 3.17
        a = state.inputs[i]
        assert relative_error(found[i], torch.kron(torch.outer(a, a), own)) < EXACT


def test_lemma_3_16_sums_over_the_examples_are_the_blocks_of_the_data_set() -> None:
    loss = LOSSES["categorical"]
    network, xs, ys = problem(loss, 5, "softplus")
    total = [torch.zeros(w.numel(), w.numel(), dtype=torch.float64) for w in network.weights]
    for x, y in zip(xs, ys, strict=True):
        state = network.run(x)
        f = state.h[-1]
        own = hessian_recursion(network, state, loss.gradient(f, y), loss.curvature(f, y))
        for block, a, h in zip(total, state.inputs, own, strict=True):
            block += torch.kron(torch.outer(a, a), h)
    found = engine(network, xs, ys, loss, "hessian", "block")
    assert relative_error(found, torch.block_diag(*total)) < EXACT


# Lemmas 3.17 and 3.18


@st.composite
def piecewise_linear_problems(draw: st.DrawFn) -> tuple[FeedForward, Tensor, Tensor, Loss]:
    """A random network of piecewise linear activations at a point where it is differentiable."""
    loss = LOSSES[draw(st.sampled_from(CANONICAL))]
    hidden = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    seed = draw(st.integers(0, 10_000))
    network = FeedForward.random(
        (2, *hidden, loss.outputs), draw(st.sampled_from(PIECEWISE_LINEAR)), draw(st.booleans()), seed
    )
    xs = inputs(draw(st.integers(1, 4)), 2, seed + 1)
    assume(network.away_from_corners(xs))
    f = network.outputs(xs)
    # labels that the model does not expect, so that residuals are large
    return network, xs, loss.draw(3 * f.clamp(-0.7, 0.7).flip(0), seed), loss


@given(piecewise_linear_problems())
@pytest.mark.long
def test_lemma_3_17_diagonal_blocks_are_positive_semidefinite_for_piecewise_linear_networks(
    case: tuple[FeedForward, Tensor, Tensor, Loss],
) -> None:
    network, xs, ys, loss = case
    for block in blocks_of(network, engine(network, xs, ys, loss, "hessian", "block")):
        values = torch.linalg.eigvalsh(block)
        assert values.min() >= -1e-10 * (1 + values.max())


@given(piecewise_linear_problems(), st.integers(0, 2))
def test_lemma_3_17_the_objective_is_locally_convex_in_each_layer(
    case: tuple[FeedForward, Tensor, Tensor, Loss], layer: int
) -> None:
    network, xs, ys, loss = case
    layer %= network.depth
    step = inputs(*network.weights[layer].shape, seed=7)

    def objective(t: float) -> Tensor:
        weights = [w + t * step if i == layer else w for i, w in enumerate(network.weights)]
        moved = FeedForward(tuple(weights), network.activation, network.biased)
        f = moved.outputs(xs)
        return torch.stack([loss.nll(a, b) for a, b in zip(f, ys, strict=True)]).sum()

    # Then one of two opposite steps does not lower it: no strict maximum, even where H is zero
    t, middle = 1e-5, objective(0.0)  # too small a step to cross a corner
    assert objective(t) + objective(-t) - 2 * middle >= -1e-14 * (1 + middle.abs())


@given(piecewise_linear_problems(), st.floats(0, 1))
def test_lemma_3_18_no_differentiable_strict_local_maxima(
    case: tuple[FeedForward, Tensor, Tensor, Loss], weight_decay: float
) -> None:
    network, xs, ys, loss = case
    found: Any = linnet.curvature(network.module(), (xs, ys), loss.likelihood, "full", matrix="hessian")
    hessian = found.dense()
    # tr H ≥ 0, with any convex regularizer: not all eigenvalues can be negative
    trace = hessian.trace() + weight_decay * len(hessian)
    assert trace >= -1e-10 * (1 + hessian.abs().max())
    assert torch.linalg.eigvalsh(hessian).max() >= -1e-10 * (1 + hessian.abs().max())


def test_lemmas_3_17_and_3_18_need_piecewise_linear_activations() -> None:
    # a label far below f = 3 tanh(1): D_l outweighs everything else
    network = FeedForward(
        tuple(torch.tensor([[w]], dtype=torch.float64) for w in (1.0, 3.0)),
        FeedForward.random((1, 1), "tanh").activation,
        biased=False,
    )
    one, label = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), -100.0, dtype=torch.float64)
    scalar = Loss(linnet.likelihoods.Gaussian(), 1, LOSSES["gaussian"].nll, LOSSES["gaussian"].labels)
    found = engine(network, one, label, scalar, "hessian")
    assert found.trace() < -10
    assert found[0, 0] < -10


def test_lemma_3_17_needs_a_convex_loss() -> None:
    network, xs, ys = problem(MIXTURE, 1, "relu")
    state = network.run(xs[0])
    assert torch.linalg.eigvalsh(MIXTURE.curvature(state.h[-1], ys[0])).min() < -1e-3
    found = blocks_of(network, engine(network, xs, ys, MIXTURE, "hessian"))
    assert min(float(torch.linalg.eigvalsh(block).min()) for block in found) < -1e-3


# Lemma 3.20


def expected_hessian(network: FeedForward, xs: Tensor, loss: Loss) -> Tensor:
    """Σ_n E[H(x_n, y)] over the labels of the model, each Hessian by the engine."""
    total = torch.zeros(network.slices[-1].stop, network.slices[-1].stop, dtype=torch.float64)
    for x, f in zip(xs, network.outputs(xs), strict=True):
        for weight, y in loss.labels(f):
            total += weight * engine(network, x[None], y[None], loss, "hessian")
    return total


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(6)
def test_lemma_3_20_gauss_newton_is_the_expected_hessian_for_labels_of_the_model(
    name: str, activation: str
) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, 1 if name == "poisson" else 2, activation)
    # E[G] = E[∂²L/∂θ²] for y ~ p(y | f): sums over all labels, or quadrature
    expected = expected_hessian(network, xs, loss)
    found = engine(network, xs, ys, loss, "gauss-newton")
    assert relative_error(found, expected) < EXACT
    # with the labels as they are the two differ
    assert relative_error(engine(network, xs, ys, loss, "hessian"), found) > 1e-2


@pytest.mark.parametrize("loss", [MIXTURE, LOG_VARIANCE, NATURAL], ids=["mixture", "log-variance", "natural"])
def test_lemma_3_20_holds_where_output_curvature_depends_on_labels(loss: Loss) -> None:
    network, xs, ys = problem(loss, 2, "tanh")
    expected = expected_hessian(network, xs, loss)
    total = torch.zeros_like(expected)
    for x in xs:
        state = network.run(x)
        j = output_jacobian(network, state)
        for weight, y in loss.labels(state.h[-1]):
            total += weight * j.T @ loss.curvature(state.h[-1], y) @ j
    assert relative_error(total, expected) < EXACT
    # eq. 3.33: and both are the Fisher matrix
    assert relative_error(engine(network, xs, ys, loss, "fisher"), expected) < EXACT


# Lemma 3.23


@pytest.mark.parametrize("activation", PIECEWISE_LINEAR)
@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(2)
def test_lemma_3_23_hessian_is_gauss_newton_plus_first_order_component(name: str, activation: str) -> None:
    loss = LOSSES[name]
    network, xs, ys = problem(loss, activation=activation)
    assert network.away_from_corners(xs)
    state = network.run(xs[0])
    f = state.h[-1]
    gradient, curvature = loss.gradient(f, ys[0]), loss.curvature(f, ys[0])
    hessians = hessian_recursion(network, state, gradient, curvature)
    for ours, theirs in zip(gauss_newton_recursion(network, state, curvature), hessians, strict=True):
        assert relative_error(ours, theirs) < EXACT
    # H = G + Hᶠᴼ
    difference = engine(network, xs, ys, loss, "hessian") - engine(network, xs, ys, loss, "gauss-newton")
    assert relative_error(difference, first_order_component(network, state, gradient)) < 1e-9


@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.thinned(2)
def test_lemma_3_23_blocks_of_the_data_set_are_equal_for_piecewise_linear_networks(name: str) -> None:
    loss = LOSSES[name]
    for activation, equal in (("relu", True), ("leaky-relu", True), ("tanh", False)):
        network, xs, ys = problem(loss, 6, activation)
        hessian = engine(network, xs, ys, loss, "hessian", "block")
        error = relative_error(engine(network, xs, ys, loss, "gauss-newton", "block"), hessian)
        assert error < EXACT if equal else error > 1e-2
