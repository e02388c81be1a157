"""Every cell of structure x expectation x sharing on the zoo, against dense float64 oracles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.expectation import batch_generator
from tests.curvatures.curvature_oracles import Expected, Problem, families
from tests.grids import grid
from tests.oracles.conformance import check_curvature
from tests.zoo import OFTEN, ZOO, assert_near, case, every_animal

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac")
CELLS = [
    *((animal.name, families(animal.name)[-1]) for animal in ZOO),
    *(
        (name, "gaussian")
        for name in ("lenet", "vit-mha", "gpt2-eager", "tied-linears", "decoder", "structured-output")
    ),
]
FEW = (
    "mlp-tanh",
    "lenet",
    "mobilenet",
    "gpt2-eager",
    "tied-linears",
    "upsampler",
    "norms",
    "structured-output",
)


def assert_structures(found: dict[str, Curvature], expected: Expected, sharing: str, name: str) -> None:
    """All structures of one list against the oracle."""
    for G in found.values():
        names = [n for part in G.parts for n in part.layer.names]
        assert sorted(names) == sorted(expected.places), "every parameter is in exactly one part"
    assert_near(found["full"].dense(), expected.full)
    assert_near(found["block"].dense(), expected.block(found["block"].parts))
    assert_near(found["diagonal"].dense(), expected.full.diagonal().diag())
    kfac = expected.kfac(found["kfac"], sharing, name)
    assert_near(found["kfac"].dense(), kfac)
    assert_corrected(found["ekfac"], found["kfac"], expected)


def assert_corrected(ekfac: Curvature, kfac: Curvature, expected: Expected) -> None:
    """The basis diagonalizes the Kronecker factors; the values are the exact block's diagonal in it."""
    total, factors = torch.zeros_like(expected.full), kfac.dense()
    scale = expected.full.abs().max()
    for part in ekfac.parts:
        rows = expected.rows(part)
        if part.structure != "ekfac":
            total[rows[:, None], rows] = factors[rows[:, None], rows]
            continue
        for own, q, matrix in expected.corrected(part):
            total[own[:, None], own] = matrix
            assert_near(q.T @ q, torch.eye(len(q), dtype=torch.float64))
            turned = q.T @ factors[own[:, None], own] @ q
            assert (turned - turned.diagonal().diag()).abs().max() <= 1e-10 * scale
    assert_near(ekfac.dense(), total)
    # the correction is exact in trace
    assert_near(ekfac.trace(), expected.block(ekfac.parts).trace())


@pytest.mark.parametrize(("name", "family"), grid(CELLS, OFTEN))
@pytest.mark.thinned(3)
def test_exact_structures_are_right_for_every_network(name: str, family: str) -> None:
    problem = Problem(name, family)
    found = problem.curvature(STRUCTURES, block=3)
    assert_structures(found, Expected.of(problem), "expand", name)


@every_animal
@pytest.mark.thinned(6)
def test_reduced_factors_are_right_for_every_network(name: str) -> None:
    problem = Problem(name, families(name)[-1])
    found = problem.curvature(STRUCTURES, sharing="reduce", block=3)
    assert_structures(found, Expected.of(problem), "reduce", name)


def drawn_columns(problem: Problem, expectation: str, samples: int, seed: int, f: Tensor) -> Tensor:
    """The columns (N, K, C) of one batch, by the likelihood's own definitions."""
    likelihood, y = problem.likelihood, problem.targets
    if expectation == "empirical":
        u = likelihood.gradient(f, y)[None]
    elif expectation == "mc":
        u = likelihood.sample_gradients(f, samples, batch_generator(seed, 0, f.device), y)
    else:
        u = likelihood.project(f, samples, batch_generator(seed, 0, f.device), y)
    return u.flatten(2).transpose(0, 1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("expectation", ["mc", "random-projection", "empirical"])
@pytest.mark.parametrize("name", grid(FEW, ("mlp-tanh", "lenet", "tied-linears")))
@pytest.mark.thinned(4)
def test_drawn_and_observed_columns(name: str, expectation: str, sharing: str) -> None:
    problem = Problem(name, families(name)[-1])
    options = {"expectation": expectation, "samples": 3, "seed": 7}
    found = problem.curvature(STRUCTURES, sharing=sharing, **options)
    f = found["full"].function.check_runs(problem.case.x1)
    expected = Expected.of(problem, drawn_columns(problem, expectation, 3, 7, f))
    assert_structures(found, expected, sharing, name)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "name",
    grid(
        ("mlp-tanh", "mobilenet", "plain-arithmetic", "tied-linears", "decoder"), ("mlp-tanh", "tied-linears")
    ),
)
@pytest.mark.thinned(6)
def test_operators_conform(name: str, structure: str) -> None:
    G = Problem(name, "gaussian").curvature(structure)
    check_curvature(G, G.dense(), case(name).x2, case(name).j2)


@pytest.mark.parametrize("structure", ["low-rank", "kfra"])
def test_other_structures_conform(structure: str) -> None:
    G = Problem("mlp-tanh", "categorical").curvature(structure, rank=60)
    check_curvature(G, G.dense(), case("mlp-tanh").x2, case("mlp-tanh").j2)


def test_conformance_finds_what_is_wrong() -> None:
    G, expected = Problem("mlp-tanh", "gaussian").curvature("kfac"), case("mlp-tanh")
    for wrong in (G.scaled(1.001), G.damped(0.01)):
        with pytest.raises(AssertionError, match="off by"):
            check_curvature(wrong, G.dense(), expected.x2, expected.j2)
    with pytest.raises(AssertionError, match="output_covariance"):
        check_curvature(G, G.dense(), expected.x2, 1.01 * expected.j2)


def test_last_layer_is_the_last_layers_full_matrix() -> None:
    problem = Problem("mlp-relu", "categorical")
    expected = Expected.of(problem)
    rows = torch.cat([expected.places["4.weight"].flatten(), expected.places["4.bias"].flatten()])
    assert_near(problem.curvature("last-layer").dense(), expected.full[rows[:, None], rows])


@pytest.mark.parametrize("expectation", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("method", ["lanczos", "randomized"])
def test_low_rank_keeps_the_leading_eigenpairs(method: str, expectation: str) -> None:
    problem = Problem("mlp-tanh", "gaussian")
    full = problem.curvature("full", expectation=expectation).dense()
    rank = 12  # N · C columns, or N · 1: the matrix has no more
    G = problem.curvature("low-rank", expectation=expectation, rank=rank, method=method)
    assert torch.linalg.matrix_rank(full) <= rank
    assert_near(G.dense(), full, 1e-6)


def test_random_vectors_find_what_stands_out() -> None:
    problem = Problem("mlp-relu", "categorical")
    leading = torch.linalg.eigvalsh(problem.curvature("full").dense()).flip(0)[:3]
    found = problem.curvature("low-rank", rank=3, method="randomized").parts[0].operator
    assert len(found.values) == 3
    assert ((found.values > 0.9 * leading) & (found.values < 1.001 * leading)).all()


def test_a_hessian_full_and_by_blocks() -> None:
    from tests.oracles.dense import hessian_oracle

    problem = Problem("mlp-tanh", "categorical")
    x, y = problem.data
    H = hessian_oracle(case("mlp-tanh").model(), x, y, lambda f, t: torch.nn.functional.cross_entropy(f, t))
    full = problem.curvature("full", matrix="hessian")
    assert_near(full.dense(), H)
    block = problem.curvature("block", matrix="hessian")
    expected = Expected.of(problem)
    expected.full = H
    assert_near(block.dense(), expected.block(block.parts))
