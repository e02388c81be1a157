"""Kronecker factors with a side that is too wide for a matrix: its diagonal, against dense oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import Passes
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import NARROW
from linnet.curvatures.layers import Part
from linnet.curvatures.running import RunningCurvature
from linnet.curvatures.settings import WIDEST
from linnet.errors import InputError, MemoryBudgetError
from linnet.likelihoods import Categorical
from linnet.linalg import Dense, Diagonal, Kronecker, KroneckerEigen
from tests.curvatures.curvature_oracles import Problem
from tests.oracles.conformance import check_curvature
from tests.oracles.dense import jacobian_oracle
from tests.zoo import assert_near

ANIMALS = (("mlp-tanh", "categorical"), ("lenet", "categorical"), ("gpt2-eager", "categorical"),
           ("tied-linears", "gaussian"), ("upsampler", "gaussian"), ("mobilenet", "categorical"))  # fmt: skip


def is_halved(operator: object) -> bool:
    """Whether one of the factors is a diagonal."""
    return isinstance(operator, KroneckerEigen) and operator.halved


def basis_of(M: KroneckerEigen) -> Tensor:
    """Q_L ⊗ Q_R, with I on the side that is a diagonal."""
    pairs = zip(M.sides, M.values.shape, strict=True)
    left, right = (torch.eye(n, dtype=M.dtype) if q is None else q.contiguous() for q, n in pairs)
    return torch.kron(left, right)


def selection(G: Curvature, part: Part) -> Tensor:
    """The rows of a layer among all parameters, (size, P)."""
    return part.gather(torch.eye(G.shape[0], dtype=G.dtype), G.function.space)


def limit(G: Curvature, share: float) -> int:
    """Fewer rows than a share of the sides of Kronecker factors have."""
    products = [part.operator for part in G.parts if isinstance(part.operator, Kronecker)]
    rows = sorted(factor.shape[0] for product in products for factor in (product.left, product.right))
    return rows[round((1 - share) * (len(rows) - 1))] - 1


def half_of(product: Kronecker, widest: int) -> Tensor | None:
    """The dense product with the diagonals of wide factors; None if both are wide."""
    factors = product.left, product.right
    wide = [product.left.ndim == 2 and factor.shape[0] > widest for factor in factors]
    if all(wide):
        return None
    if not any(wide):
        return product.dense()
    return torch.kron(*(f.diagonal().diag() if w else f for f, w in zip(factors, wide, strict=True)))


@pytest.mark.parametrize(("name", "family"), ANIMALS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("expectation", ["exact", "mc"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.thinned(6)
def test_wide_factors_are_the_diagonals_of_the_factors(
    name: str, family: str, sharing: str, expectation: str, share: float
) -> None:
    problem = Problem(name, family)
    options: dict[str, Any] = {"sharing": sharing, "expectation": expectation}
    whole = problem.curvature("kfac", **options)
    exact = problem.curvature("diagonal", **options)
    widest = limit(whole, share)
    found = problem.curvature("kfac", passes=Passes(widest=widest), **options)
    kinds = set()
    for before, part in zip(whole.parts, found.parts, strict=True):
        rows = selection(whole, before)
        expected = before.operator.dense()
        if isinstance(before.operator, Kronecker):
            half = half_of(before.operator, widest)
            expected = expected if half is None else half
            if half is None:
                assert isinstance(part.operator, Diagonal)
                expected = (selection(exact, part) @ exact.diagonal()).diag()
        kinds.add(type(part.operator))
        assert_near(part.operator.dense(), expected)
        assert rows.shape[0] == part.layer.size
        assert (part.structure == before.structure) or "exact diagonal" in part.note
    assert KroneckerEigen in kinds or share
    assert "diagonal" in found.coverage()


@pytest.mark.parametrize(("name", "family"), ANIMALS)
@pytest.mark.parametrize("expectation", ["exact", "mc"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.thinned(4)
def test_corrected_eigenvalues_are_the_exact_blocks_diagonal_in_the_basis(
    name: str, family: str, expectation: str, share: float
) -> None:
    problem = Problem(name, family)
    block = problem.curvature("block", expectation=expectation).dense()
    widest = limit(problem.curvature("kfac"), share)
    found = problem.curvature("ekfac", expectation=expectation, passes=Passes(widest=widest))
    seen = 0
    for part in found.parts:
        if not is_halved(part.operator):
            continue
        rows, M = selection(found, part), part.operator
        basis = basis_of(M)
        expected = (basis.T @ rows @ block @ rows.T @ basis).diagonal()
        assert_near(M.values.flatten(), expected)
        seen += 1
    assert seen or share


def classifier(c: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, c)).double()
    return net, (torch.randn(20, 4).double(), torch.randint(c, (20,)))


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_every_operation_agrees_with_the_dense_matrix(structure: str, tmp_path: Path) -> None:
    net, data = classifier()
    G = linnet.curvature(net, data, Categorical(), structure, passes=Passes(widest=6))
    assert [is_halved(p.operator) for p in G.parts] == [False, True]
    expected = torch.zeros(G.shape).double()
    for part in G.parts:
        rows, M = selection(G, part), part.operator
        if is_halved(M):
            basis = basis_of(M)
            expected += rows.T @ (basis * M.values.flatten()) @ basis.T @ rows
        else:
            expected += rows.T @ M.dense() @ rows
    check_curvature(G, expected, data[0], jacobian_oracle(net, data[0]))
    damped = G.damped(0.3)
    assert_near(damped.dense(), G.dense() + 0.3 * torch.eye(G.shape[0]).double())
    M = damped.inverse()
    assert_near(M.dense(), torch.linalg.inv(damped.dense()))
    rows = jacobian_oracle(net, data[0]).flatten(2)
    assert_near(M.output_covariance(data[0]), rows @ M.dense() @ rows.mT)
    loaded = linnet.load(G.save(tmp_path), net)
    assert_near(loaded.dense(), G.dense())
    assert loaded.coverage() == G.coverage()


def test_the_output_layer_by_itself_needs_no_columns() -> None:
    """The closed form of a last layer, its gradient factor kept as a diagonal."""
    net, data = classifier()
    lin = linnet.linearize(net, params="last-layer")
    for structure in ("kfac", "ekfac"):
        alone = linnet.curvature(lin, data, Categorical(), structure, passes=Passes(widest=6))
        both = linnet.curvature(net, data, Categorical(), structure, passes=Passes(widest=6))
        assert is_halved(alone.parts[0].operator)
        assert_near(
            alone.dense(), both.parts[1].operator.dense().new_tensor(both.dense()[-72:, -72:].tolist())
        )


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_a_posterior_with_a_wide_side(structure: str, tmp_path: Path) -> None:
    net, (x, y) = classifier()
    la = linnet.Laplace(net, Categorical(), structure, 2.0, passes=Passes(widest=6)).fit((x, y))
    H = la.curvature.dense() + 2.0 * torch.eye(la.curvature.shape[0]).double()
    assert_near(la.covariance.dense(), torch.linalg.inv(H))
    rows = jacobian_oracle(net, x).flatten(2)
    assert_near(la.predictive(x).covariance, rows @ torch.linalg.inv(H) @ rows.mT)
    before = la.log_evidence()
    other = linnet.Laplace(net, Categorical(), structure, 1.0, passes=Passes(widest=6)).fit((x, y))
    expected = before + 0.5 * (torch.logdet(H) - torch.logdet(H - torch.eye(len(H)).double()))
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    expected = expected + 0.5 * theta @ theta - 0.5 * len(H) * torch.tensor(2.0).double().log()
    assert_near(other.log_evidence(), expected)
    la.save(tmp_path)
    torch.testing.assert_close(linnet.load(tmp_path, net).predictive(x).probs, la.predictive(x).probs)
    if structure == "kfac":
        balanced = linnet.Laplace(
            net, Categorical(), "kfac", 2.0, damping="factored", passes=Passes(widest=6)
        )
        wide = balanced.fit((x, y)).covariance.parts[1].operator
        assert_near(wide.dense(), la.covariance.parts[1].operator.dense())
    refused = "one factor of which is a diagonal" if structure == "kfac" else "ekfac"
    with pytest.raises(InputError, match=f"add=True .*{refused}"):
        la.fit((x, y), add=True)


def test_memory_makes_diagonals_of_the_widest_sides_first() -> None:
    """Between what does not fit and an error; narrow factors are never touched."""
    torch.manual_seed(0)
    c, d = NARROW + 300, NARROW + 100
    net = nn.Sequential(nn.Linear(d, 2), nn.Linear(2, c))
    data = torch.randn(4, d), torch.randint(c, (4,))
    options: dict[str, Any] = {"expectation": "mc"}
    ask = lambda memory: linnet.curvature(net, data, Categorical(), passes=Passes(memory=memory), **options)  # noqa: E731
    every = ask("100MB")
    assert [type(p.operator) for p in every.parts] == [Kronecker, Kronecker]
    assert [type(p.operator) for p in ask("20MB").parts] == [Kronecker, KroneckerEigen]
    least = ask("2MB")
    assert [type(p.operator) for p in least.parts] == [KroneckerEigen, KroneckerEigen]
    assert f"the factor of {c} rows is a diagonal" in least.coverage()
    left, half = every.parts[1].operator, least.parts[1].operator
    assert isinstance(left, Kronecker)
    assert is_halved(half)
    assert_near(half.diagonal(), left.diagonal(), 1e-5)
    narrow = nn.Linear(600, 600)
    with pytest.raises(MemoryBudgetError, match=r"kfac of (weight|all)"):
        linnet.curvature(
            narrow, torch.randn(4, 600), Categorical(), "kfac", "mc", passes=Passes(memory="1MB")
        )


def test_the_default_keeps_matrices_up_to_its_limit() -> None:
    net = nn.Linear(2, WIDEST + 1)
    data = torch.randn(3, 2), torch.randint(WIDEST, (3,))
    G = linnet.curvature(net, data, Categorical(), expectation="mc")
    assert is_halved(G.parts[0].operator)
    assert G.damped(0.1).logdet().isfinite()


def test_two_tasks_with_wide_sides_add_up() -> None:
    """One term a layer: the diagonal of the sum in the basis of the sum, which keeps the trace."""
    from linnet.continual.quadratic import summed

    net, (x, y) = classifier()
    for structure in ("kfac", "ekfac"):
        one, two = (
            linnet.curvature(net, part, Categorical(), structure, passes=Passes(widest=6)).parts[1].operator
            for part in ((x[:9], y[:9]), (x[9:], y[9:]))
        )
        total = summed(one, two, "svd", (9, 11))
        assert isinstance(total, KroneckerEigen)
        both = one.dense() + two.dense()
        assert_near(total.trace(), both.trace())
        basis = basis_of(total)
        assert_near(total.values.flatten(), (basis.T @ both @ basis).diagonal())
        same = summed(one, one, "svd", (9, 9))
        assert same is not None
        assert_near(same.dense(), 2 * one.dense())


def test_a_running_average_carries_over_to_a_new_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """EKFAC with a wide side, on equal batches: the average is the curvature of one, in any basis."""
    from linnet.curvatures import treatments

    monkeypatch.setattr(treatments.wide_sides, "__defaults__", (6,))
    monkeypatch.setattr(treatments.treatment, "__defaults__", (6,))
    monkeypatch.setattr(treatments.make_sums, "__defaults__", (6,))
    net, (x, y) = classifier()
    running = RunningCurvature(net, Categorical(), "ekfac", decay=0.5)
    for _ in range(12):
        running.add(x, y)
    expected = linnet.curvature(net, (x, y), Categorical(), "ekfac", passes=Passes(widest=6))
    G = running.curvature(examples=20)
    assert is_halved(G.parts[1].operator)
    assert_near(G.dense(), expected.dense(), 1e-8)


@pytest.mark.long
def test_an_optimizer_steps_with_a_wide_head() -> None:
    """Beyond the default limit; the sampled curvature is damped and inverted without a matrix of its size."""
    net = nn.Linear(3, WIDEST + 8)
    x, y = torch.randn(8, 3), torch.randint(WIDEST, (8,))
    optimizer = linnet.optim.GaussNewton(net, Categorical())
    losses = [optimizer.step(x, y).loss for _ in range(2)]
    assert losses[-1] < losses[0]


def test_every_dense_kind_is_left_alone() -> None:
    """Blocks and diagonals have no factors: the limit changes nothing."""
    net, data = classifier()
    for structure, kind in (("block", Dense), ("diagonal", Diagonal)):
        G = linnet.curvature(net, data, Categorical(), structure, passes=Passes(widest=1))
        assert {type(p.operator) for p in G.parts} == {kind}
