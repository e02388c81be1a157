"""Products with the Jacobian, its rows, and the operators over a data set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet.errors import MemoryBudgetError
from linnet.tangent import jacobian as jacobian_module
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import (
    JacobianOperator,
    NormalOperator,
    find_folds,
    jacobian,
    jvp_columns,
    jvp_path,
    vjp_columns,
)
from tests.fitting.problems import near, network, peak_bytes, real
from tests.oracles.conformance import check_operator
from tests.oracles.dense import jacobian_oracle
from tests.refusals import refused

MODEL = network()
FUNCTION = Functional(MODEL)
X = real(7, 3, seed=1)
J = jacobian_oracle(MODEL, X)  # (7, 3, 38)


@given(st.integers(1, 7), st.integers(0, 4), st.integers(0, 99))
def test_products_with_columns(n: int, k: int, seed: int) -> None:
    columns = () if k == 0 else (k,)
    v, u = real(38, *columns, seed=seed), real(n, 3, *columns, seed=seed + 1)
    near(jvp_columns(FUNCTION, X[:n], v), torch.einsum("ncp,p...->nc...", J[:n], v))
    near(vjp_columns(FUNCTION, X[:n], u), torch.einsum("ncp,nc...->p...", J[:n], u))


def test_products_with_parameters_by_name() -> None:
    for columns in ((), (3,)):
        v = real(38, *columns)
        named = FUNCTION.space.to_params(v)
        near(jvp_columns(FUNCTION, X, named), torch.einsum("ncp,p...->nc...", J, v))


@pytest.mark.parametrize("memory", [None, 12_000, "1MB"])
def test_rows_in_any_budget(memory: int | str | None) -> None:
    near(jacobian(FUNCTION, X, memory), J)


def test_a_jacobian_that_does_not_fit() -> None:
    error = refused(
        MemoryBudgetError, lambda: jacobian(FUNCTION, X, 5000), "7 examples × 3 outputs × 38", "5.00 kB"
    )
    assert "lin.jvp" in str(error)
    assert "lin.kernel" in str(error)


def test_memory_of_the_rows_was_planned() -> None:
    model = nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 4))
    function, x = Functional(model), real(100, 20, dtype=torch.float32)
    size = 100 * 4 * function.space.dim * 4
    peak = peak_bytes(lambda: jacobian(function, x, 2 * size))
    assert size <= peak <= 1.2 * 2 * size


@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.thinned(2)
def test_the_operator_over_a_data_set(block: int) -> None:
    operator = JacobianOperator(FUNCTION, X, 3, block)
    near(operator.dense(), J.flatten(0, 1))
    near(operator.T.dense(), J.flatten(0, 1).T)
    assert operator.T.T is operator
    check_operator(operator, J.flatten(0, 1))
    normal = NormalOperator(operator)
    near(normal.dense(), J.flatten(0, 1).T @ J.flatten(0, 1))
    assert normal.T is normal
    check_operator(normal, J.flatten(0, 1).T @ J.flatten(0, 1))


def test_a_product_with_the_normal_matrix_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    own_parts = jacobian_module.own_parts
    monkeypatch.setattr(jacobian_module, "own_parts", lambda *a: passes.append(1) or own_parts(*a))
    normal = NormalOperator(JacobianOperator(FUNCTION, X, 3, 2))
    normal.mv(real(38))
    normal.mm(real(38, 4))
    assert len(passes) == 2


def test_operators_take_parameters_by_name() -> None:
    operator = JacobianOperator(FUNCTION, X, 3)
    v = real(38)
    near(operator @ FUNCTION.space.to_params(v), J.flatten(0, 1) @ v)
    product = NormalOperator(operator) @ FUNCTION.space.to_params(v)
    assert list(product) == FUNCTION.names


class Counted(nn.Module):
    """Counts how often it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.runs = network(), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        return self.net(x)


def test_each_product_runs_the_network_once() -> None:
    function = Functional(Counted())
    jvp_columns(function, X, real(38))  # which way works is found out once
    JacobianOperator(function, X, 3)  # and that no example depends on another
    runs = function.model.runs  # type: ignore[union-attr]
    for call, expected in (
        (lambda: jvp_columns(function, X, real(38)), 1),
        (lambda: vjp_columns(function, X, real(7, 3)), 1),
        (lambda: vjp_columns(function, X, real(7, 3, 5)), 1),
        (lambda: NormalOperator(JacobianOperator(function, X, 3)).mv(real(38)), 2),
        (lambda: NormalOperator(JacobianOperator(function, X, 3, block=3)).mv(real(38)), 6),
    ):
        before = runs[0]
        call()
        assert runs[0] - before == expected


def test_the_way_is_found_once_and_remembered() -> None:
    function = Functional(MODEL)
    assert jvp_path(function, X) == ("forward", "")
    function.cache.jvp = ("double-backward", "told to")
    assert jvp_path(function, X) == ("double-backward", "told to")
    v = real(38)
    near(jvp_columns(function, X, v), J @ v)
    function.cache.jvp = ("rows", "told to")
    near(jvp_columns(function, X, v), J @ v)


def test_a_network_that_does_not_depend_on_its_parameters() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2]

    function = Functional(Constant())
    assert not vjp_columns(function, X, real(7, 2)).any()
    assert not jvp_columns(function, X, real(2)).any()
    assert not jacobian(function, X).any()


class Net(nn.Module):
    """Two convolutions with normalization; ``shared`` also uses the first map before it is normalized."""

    def __init__(self, shared: bool = False, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, bias=bias), nn.BatchNorm2d(3, affine=affine)
        self.conv2, self.bn2 = nn.Conv2d(3, 4, 3, groups=1, bias=bias), nn.BatchNorm2d(4, affine=affine)
        self.head, self.shared = nn.Linear(4, 2), shared
        self.detour = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        z = torch.relu(self.bn1(h))
        z = z + h if self.shared or self.detour else z
        return self.head(torch.relu(self.bn2(self.conv2(z))).mean((2, 3)))


def trained(net: Net) -> Net:
    """Running statistics that are not the initial ones, in double precision."""
    net = net.double().train()
    with torch.no_grad():
        net(torch.randn(16, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    return net.eval()


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "folds"),
    [
        ({}, 2),
        ({"bias": False}, 2),
        ({"affine": False}, 2),
        ({"shared": True}, 1),
    ],
)
def test_folded_derivatives_are_exact(options: dict[str, bool], folds: int) -> None:
    torch.manual_seed(0)
    net, x = trained(Net(**options)), images(3)
    lin = linnet.linearize(net)
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert len(lin.function.cache.folds) == folds


def test_parameters_that_are_not_tracked_are_folded_too() -> None:
    torch.manual_seed(0)
    net, x = trained(Net()), images(3)
    lin = linnet.linearize(net, params="conv")
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x, lin.parameter_names), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert len(lin.function.cache.folds) == 2


def test_a_pass_that_takes_another_way_is_run_without_folding() -> None:
    torch.manual_seed(0)
    net, x = trained(Net()), images(3)
    lin = linnet.linearize(net)
    v = torch.randn(lin.space.dim, dtype=torch.float64)
    lin.jvp(x, v)
    assert lin.function.cache.folds
    lin.model.detour = net.detour = True  # now the first map is used before it is normalized
    wanted = torch.einsum("ncp,p->nc", jacobian_oracle(net, x), v)
    torch.testing.assert_close(lin.jvp(x, v), wanted, rtol=1e-10, atol=1e-12)
    assert lin.function.cache.folds == {}


def test_training_statistics_are_not_folded() -> None:
    net = Net().double()
    function = linnet.linearize(net).function
    function.model.train()
    assert find_folds(function, images(4)) == {}
