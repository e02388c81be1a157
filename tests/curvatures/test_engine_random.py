"""Drawn columns: unbiased, averaged over samples, and the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import linnet
from linnet.likelihoods import Categorical, Custom, Gaussian
from tests.curvatures.curvature_oracles import Problem
from tests.curvatures.side_by_side import curvature_of
from tests.zoo import assert_near, case

DRAWS = 80
STRUCTURES = ("kfac", "diagonal", "block", "full")


def statistics(G: dict[str, Any]) -> dict[str, Tensor]:
    """What is linear in u uᵀ: gradient factors, diagonals, blocks."""
    products = [part for part in G["kfac"].parts if part.structure == "kfac"]
    found = {f"B {part.layer.name}": part.operator.left for part in products}
    found |= {f"A {part.layer.name}": part.operator.right for part in products}
    found |= {name: G[name].dense() for name in ("diagonal", "block", "full") if name in G}
    return found


def draws(problem: Problem, expectation: str, samples: int) -> dict[str, Tensor]:
    found = []
    for seed in range(DRAWS):
        G = problem.curvature(STRUCTURES[:3], expectation=expectation, samples=samples, seed=seed)
        found.append(statistics(G))
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("expectation", ["mc", "random-projection"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_estimates_are_unbiased_and_samples_are_averaged(expectation: str) -> None:
    problem = Problem("tied-linears", "categorical")  # small, with a reused weight
    exact = statistics(problem.curvature(STRUCTURES[:3]))
    few, many = draws(problem, expectation, 1), draws(problem, expectation, 4)
    for name, value in exact.items():
        for found in (few, many):
            stderr = found[name].std(0) / DRAWS**0.5
            error = (found[name].mean(0) - value).abs()
            assert bool((error <= 5 * stderr + 1e-12).all()), f"{name}: {(error / stderr).max():.1f} errors"
        if not name.startswith("A"):
            ratio = float(few[name].var(0).sum() / many[name].var(0).sum())
            assert 2.7 < ratio < 6.0, f"{name}: four samples have a {ratio:.2f} times smaller variance"


@pytest.mark.parametrize("structure", [*STRUCTURES, "ekfac", "matrix-free", "low-rank"])
@pytest.mark.parametrize("expectation", ["mc", "random-projection"])
@pytest.mark.thinned(4)
def test_the_same_seed_gives_the_same_bits(structure: str, expectation: str) -> None:
    problem = Problem("lenet", "categorical")
    first, again, other = (
        problem.curvature(structure, expectation=expectation, seed=seed, samples=2, block=3)
        @ torch.ones(614).double()
        for seed in (11, 11, 12)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("expectation", ["mc", "random-projection"])
def test_drawing_leaves_the_global_generator_alone(expectation: str) -> None:
    before = torch.random.get_rng_state()
    Problem("mlp-tanh", "categorical").curvature(["kfac", "ekfac"], expectation=expectation)
    assert torch.equal(before, torch.random.get_rng_state())


def test_batches_draw_different_numbers() -> None:
    problem = Problem("mlp-tanh", "categorical")
    model, x = problem.case.model(), problem.case.x1
    same = torch.cat([x[:1], x[:1]])
    G = curvature_of(model, same, Categorical(), "full", "mc", seed=1, block=1)
    # two draws for one example: twice the same would have rank one
    ranks = [
        int(
            torch.linalg.matrix_rank(
                curvature_of(model, same, Categorical(), "full", "mc", seed=s, block=1).dense()
            )
        )
        for s in range(12)
    ]
    assert max(ranks) == 2, ranks
    assert G.made.expectation == "mc"


def test_sampled_labels_of_a_non_canonical_likelihood_give_its_fisher_matrix() -> None:
    expected = case("mlp-tanh")

    def cauchy(f: Tensor, y: Tensor) -> Tensor:
        return torch.log1p((f - y).square()).sum(-1)

    likelihood = Custom(cauchy, psd="clip")
    y = torch.zeros(4, 3, dtype=torch.float64)
    G = linnet.curvature(expected.model(), (expected.x1, y), likelihood, "full")
    assert G.made.matrix == "gauss-newton"
    residual = expected.f1
    curved = (2 - 2 * residual**2) / (1 + residual**2) ** 2
    hessian = torch.diag_embed(curved.clamp(min=0))
    assert_near(G.dense(), torch.einsum("ncp,ncd,ndq->pq", expected.j1, hessian, expected.j1))
    empirical = linnet.curvature(expected.model(), (expected.x1, y), likelihood, "full", "empirical")
    assert empirical.made.matrix == "fisher"
    rows = torch.einsum("nc,ncp->np", 2 * residual / (1 + residual**2), expected.j1)
    assert_near(empirical.dense(), rows.T @ rows)


def test_empirical_and_sampled_gaussian_scale_with_the_variance() -> None:
    expected = case("mlp-tanh")
    y = torch.randn(4, 3, dtype=torch.float64)
    for expectation, power in (("exact", 1), ("empirical", 2), ("mc", 1), ("random-projection", 1)):
        one, four = (
            linnet.curvature(expected.model(), (expected.x1, y), Gaussian(v), "diagonal", expectation).dense()
            for v in (1.0, 4.0)
        )
        assert_near(four, one / 4.0**power)
