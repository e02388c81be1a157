"""Gauss-Newton, Fisher and Hessian products without matrices, against dense float64 oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from linnet.curvatures import products
from linnet.curvatures.products import FisherOperator, GaussNewtonOperator, HessianOperator, SummedOperator
from linnet.curvatures.stream import Batches
from linnet.errors import DataError, ModelError
from linnet.likelihoods import Categorical, Custom, Gaussian
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels
from tests.curvatures.matrix_free_cases import (
    BY_TANGENTS,
    CPU,
    FEW,
    VARIANCE,
    batches,
    families,
    function_of,
    likelihood_of,
    output_hessian,
    own_shape,
    targets_of,
)
from tests.oracles.conformance import check_operator
from tests.oracles.dense import fisher_oracle, ggn_oracle, hessian_oracle
from tests.zoo import BY_NAME, assert_near, case, every_animal, rows


@pytest.fixture
def by_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in forward mode, however many outputs and vectors there are."""
    monkeypatch.setattr(products, "_rows_pay", lambda f, x, c, k: products.jvp_path(f, x)[0] == "rows")


@every_animal
@pytest.mark.thinned(2)
def test_gauss_newton_is_right_for_every_network(name: str) -> None:
    v = case(name).direction(1, columns=3)
    for family in families(name):
        expected = ggn_oracle(case(name).j1, output_hessian(name, family))
        operator = GaussNewtonOperator(
            function_of(name), batches(name, family, 3), likelihood_of(name, family)
        )
        assert_near(operator @ v, expected @ v)
        assert operator.passes == 1


@every_animal
@pytest.mark.usefixtures("by_tangents")
@pytest.mark.thinned(3)
def test_gauss_newton_by_tangents_is_right_for_every_network(name: str) -> None:
    v = case(name).direction(1, columns=2)
    family = families(name)[-1]
    expected = ggn_oracle(case(name).j1, output_hessian(name, family))
    operator = GaussNewtonOperator(function_of(name), batches(name, family), likelihood_of(name, family))
    assert_near(operator @ v, expected @ v)


@pytest.mark.parametrize("contract", [True, False])
@every_animal
@pytest.mark.thinned(3)
def test_contracted_equals_formed(name: str, contract: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_contracting_pays", lambda *_: contract)
    monkeypatch.setattr(products, "_part_size", lambda *_: 3)
    v = case(name).direction(2, columns=2)
    expected = torch.einsum("ncp,ncq,qk->pk", case(name).j1, case(name).j1, v)
    found = products.weighted(function_of(name), case(name).x1, v, lambda f, t, place: t)
    if case(name).f1.shape[1] > 4:  # tangents would be taken
        monkeypatch.setattr(products, "_rows_pay", lambda *_: True)
        found = products.weighted(function_of(name), case(name).x1, v, lambda f, t, place: t)
    assert_near(found, expected)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.thinned(6)
def test_operators_conform(name: str) -> None:
    for family in families(name):
        function, likelihood = function_of(name), likelihood_of(name, family)
        expected = ggn_oracle(case(name).j1, output_hessian(name, family))
        check_operator(GaussNewtonOperator(function, batches(name, family), likelihood), expected)
        check_operator(FisherOperator(function, batches(name, family), likelihood), expected)


@pytest.mark.parametrize("name", FEW)
def test_fisher_is_its_definition(name: str) -> None:
    expected, v = case(name), case(name).direction(1, columns=2)
    for family in ("gaussian", "categorical"):
        oracle = fisher_oracle(expected.j1, expected.f1, family, VARIANCE)  # type: ignore[arg-type]
        operator = FisherOperator(function_of(name), batches(name, family, 3), likelihood_of(name, family))
        assert_near(operator @ v, oracle @ v)


def test_fisher_needs_no_targets() -> None:
    name, v = "mlp-tanh", case("mlp-tanh").direction()
    operator = FisherOperator(function_of(name), Batches(case(name).x1, CPU), Categorical())
    assert_near(operator @ v, fisher_oracle(case(name).j1, case(name).f1, "categorical") @ v)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("name", BY_TANGENTS)
@pytest.mark.thinned(2)
def test_empirical_fisher_is_the_sum_of_squared_gradients(name: str, block: int) -> None:
    family, expected = "categorical", case(name)
    f, y = expected.f1.view(own_shape(name)), targets_of(name, "categorical")
    slopes = likelihood_of(name, family).gradient(f, y).reshape(4, -1)
    gradients = torch.einsum("ncp,nc->np", expected.j1, slopes)
    operator = FisherOperator(
        function_of(name), batches(name, family, block), likelihood_of(name, family), "empirical"
    )
    check = expected.direction(3, columns=2)
    assert_near(operator @ check, gradients.T @ (gradients @ check))
    assert_near(operator @ check[:, 0], gradients.T @ (gradients @ check[:, 0]))


# --- Hessian --------------------------------------------------------------------------------------


def loss_of(family: str) -> Any:
    if family == "gaussian":
        return lambda f, t: 0.5 * (f - t.reshape(-1)).square().sum() / VARIANCE
    return lambda f, t: nn.functional.cross_entropy(f.view(t.numel(), -1), t.reshape(-1), reduction="sum")


TWICE = [name for name in BY_TANGENTS if name not in ("embedding-bag", "weight-norm")]


@pytest.mark.parametrize("name", [*TWICE, "structured-output", "two-inputs", "regression-vector"])
@pytest.mark.thinned(6)
def test_hessian_is_right(name: str) -> None:
    family = families(name)[-1]
    small = case(name).parameters <= 200
    x, y = rows(case(name).x1, [0, 1]), targets_of(name, family)[:2]
    operator = HessianOperator(function_of(name), Batches((x, y), CPU, 1), likelihood_of(name, family))
    if not small:  # the dense oracle takes P backward passes: compare with differences of gradients
        differences(operator, name, x, y, family)
        return
    model, output = case(name).model(), BY_NAME[name].output
    with differentiable_kernels(recurrent=True):  # torch's default ones have no second derivative
        expected = hessian_oracle(model, x, y, loss_of(family), output=output)
    assert_near(operator.dense(), expected)
    check_operator(operator, expected)


def differences(operator: HessianOperator, name: str, x: Any, y: Tensor, family: str) -> None:
    """H v against the central difference of gradients along v."""
    v = case(name).direction(7) * 1e-2
    function, likelihood = function_of(name), likelihood_of(name, family)

    def gradient(step: float) -> Tensor:
        moved = function.space.to_params(step * v)
        leaves = {n: (t + moved[n]).requires_grad_() for n, t in function.theta.items()}
        loss = likelihood.nll(function(leaves, x), y).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        parts = zip(found, leaves.values(), strict=True)
        return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in parts])

    size = 1e-3 if "relu" not in name else 1e-6
    wanted = (gradient(size) - gradient(-size)) / (2 * size)
    assert_near(operator @ v, wanted, 1e-3)


def test_a_second_derivative_that_is_wrong_in_torch_is_refused() -> None:
    operator = HessianOperator(
        Functional(case("weight-norm").model()), batches("weight-norm", "categorical"), Categorical()
    )
    with pytest.raises(ModelError, match="not symmetric"):
        operator @ case("weight-norm").direction()


class Once(torch.autograd.Function):
    """x², which can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class OnceNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Once.apply(self.inner(x))
        return found


def test_networks_without_a_second_derivative_are_refused() -> None:
    embedding = HessianOperator(
        function_of("embedding-bag"), batches("embedding-bag", "categorical"), Categorical()
    )
    with pytest.raises(ModelError, match="derivative"):
        embedding @ case("embedding-bag").direction()
    data = Batches((torch.randn(4, 3), torch.zeros(4, 2)), CPU)
    with pytest.raises(ModelError, match="derivative"):
        HessianOperator(Functional(OnceNetwork()), data, Gaussian()) @ torch.ones(8)


def test_gauss_newton_of_a_network_that_is_differentiated_once() -> None:
    net, x = OnceNetwork().double(), torch.randn(4, 3, dtype=torch.float64)
    # f = (W x + b)²: J = 2 (W x + b) (x, 1)
    z, inputs = net.inner(x).detach(), torch.cat([x, torch.ones(4, 1)], 1)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for n in range(4):
        for c in range(2):
            j = torch.zeros(2, 4, dtype=torch.float64)
            j[c] = 2 * z[n, c] * inputs[n]
            row = torch.cat([j[:, :3].reshape(-1), j[:, 3]])
            expected += torch.outer(row, row)
    operator = GaussNewtonOperator(Functional(net), Batches(x, CPU), Gaussian())
    assert_near(operator.dense(), expected)
    assert_near(operator @ torch.ones(8, dtype=torch.float64), expected.sum(1))


# --- sums over data -------------------------------------------------------------------------------


def operators(name: str, data: Batches) -> list[SummedOperator]:
    function = function_of(name)
    likelihood = Categorical()
    found = [
        GaussNewtonOperator(function, data, likelihood),
        FisherOperator(function, data, likelihood),
        FisherOperator(function, data, likelihood, "empirical"),
    ]
    twice = [HessianOperator(function, data, likelihood)] if name != "weight-norm" else []
    return [*found, *twice]


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "vit-mha", "weight-norm"])
@pytest.mark.thinned(2)
def test_columns_equal_a_loop_and_take_one_pass(name: str) -> None:
    for operator in operators(name, batches(name, "categorical", 2)):
        v = case(name).direction(4, columns=5)
        together = operator @ v
        assert operator.passes == 1
        assert_near(together, torch.stack([operator @ v[:, k] for k in range(5)], 1))
        assert operator.passes == 6
        assert_near(operator @ v.T.contiguous().T, together)
        assert (operator @ v[:, :0]).shape == (case(name).parameters, 0)
        assert operator.passes == 7


class Counted(nn.Module):
    """Counts the times that it runs."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        found: Tensor = self.layers(x)
        return found


@pytest.mark.parametrize(("columns", "runs"), [(1, 1), (2, 2), (3, 1), (8, 1)])
def test_the_network_runs_once_a_batch_or_once_a_vector(columns: int, runs: int) -> None:
    function = Functional(Counted())
    operator = GaussNewtonOperator(function, Batches(torch.randn(6, 4), CPU, 3), Categorical())
    v = torch.randn(function.space.dim, columns)
    _ = operator @ v  # probes
    Counted.calls = 0
    _ = operator @ v
    assert Counted.calls == 2 * runs


# --- Fisher and Gauss-Newton differ ---------------------------------------------------------------


def student(f: Tensor, y: Tensor) -> Tensor:
    """−log of a logistic density, whose Λ depends on y."""
    d = y - f[:, 0]
    return -nn.functional.logsigmoid(d) - nn.functional.logsigmoid(-d)


def test_a_likelihood_that_is_not_canonical() -> None:
    def draw(f: Tensor, generator: torch.Generator | None) -> Tensor:
        u = torch.rand(f.shape[0], generator=generator, dtype=f.dtype)
        return f[:, 0] + (u / (1 - u)).log()

    name = "regression-column"
    y = torch.randn(4, 1, dtype=torch.float64)
    likelihood = Custom(student, sample=draw)
    function, f, v = function_of(name), case(name).f1, case(name).direction(1)
    d = (y - f).sigmoid()
    # −∂² log p = 2 σ(d) σ(−d)
    expected = ggn_oracle(case(name).j1, (2 * d * (1 - d))[:, :, None])
    data = Batches((case(name).x1, y[:, 0]), CPU, 3)
    assert_near(GaussNewtonOperator(function, data, likelihood) @ v, expected @ v)
    with pytest.raises(DataError, match="no targets"):
        GaussNewtonOperator(function, Batches(case(name).x1, CPU), likelihood) @ v


# --- bad input ------------------------------------------------------------------------------------


def test_a_loader_that_changes_is_found() -> None:
    x, y = case("mlp-tanh").x1, targets_of("mlp-tanh", "categorical")

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            first, label = super().__getitem__(index)
            return first + torch.randn_like(first), label

    data = Batches(DataLoader(Noisy(x, y), batch_size=2), CPU)
    operator = GaussNewtonOperator(function_of("mlp-tanh"), data, Categorical())
    v = case("mlp-tanh").direction()
    _ = operator @ v
    with pytest.raises(DataError, match="changes"):
        _ = operator @ v


def test_missing_targets_are_named() -> None:
    v = case("mlp-tanh").direction()
    data = Batches(case("mlp-tanh").x1, CPU)
    with pytest.raises(DataError, match="no targets"):
        FisherOperator(function_of("mlp-tanh"), data, Categorical(), "empirical") @ v
    with pytest.raises(DataError, match="no targets"):
        HessianOperator(function_of("mlp-tanh"), data, Categorical()) @ v


class Blows(nn.Module):
    """Infinite where an input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + torch.where(x.abs().sum(1, keepdim=True) > 1e3, torch.inf, 0.0)
        return found


@pytest.mark.parametrize("columns", [1, 4])
def test_outputs_that_are_not_finite_are_named(columns: int) -> None:
    x = torch.zeros(5, 2)
    x[4] = 1e6
    data = Batches((x, torch.zeros(5, dtype=torch.long)), CPU, 3)
    function = Functional(Blows())
    for operator in (
        GaussNewtonOperator(function, data, Categorical()),
        FisherOperator(function, data, Categorical(), "mc"),
        HessianOperator(function, data, Categorical()),
    ):
        with pytest.raises(ModelError, match="example"):
            _ = operator @ torch.ones(6, columns)


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_the_caller_change_nothing(mode: str) -> None:
    for operator in operators("mlp-tanh", batches("mlp-tanh", "categorical")):
        v = case("mlp-tanh").direction()
        expected = operator @ v
        context = torch.inference_mode() if mode == "inference" else torch.autocast("cpu", torch.bfloat16)
        with context:
            found = operator @ v
        assert_near(found.clone(), expected)
