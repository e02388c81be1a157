"""Gauss-Newton, Fisher and Hessian products without matrices, against dense float64 oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from linnet.curvatures import products
from linnet.curvatures.fisher import FiniteDifferenceFisher, FisherOperator
from linnet.curvatures.ggn import GaussNewtonOperator, SummedOperator
from linnet.curvatures.hessian import HessianOperator
from linnet.curvatures.likelihoods import Categorical, Custom, Gaussian
from linnet.curvatures.stream import Batches
from linnet.errors import DataError, InputError, ModelError
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels
from linnet.testing.conformance import check_operator
from linnet.testing.oracles import fisher_oracle, ggn_oracle, hessian_oracle
from tests.zoo import BY_NAME, ZOO, assert_near, case, joined, linearized, rows
from tests.zoo_modules import lenet

CPU = torch.device("cpu")
VARIANCE = 0.7
FEW = ("mlp-relu", "lenet", "padding-index", "lstm", "tied-transpose", "weight-norm", "gated", "checkpointed")
BY_TANGENTS = (*FEW, "resnet-batchnorm", "vit-mha", "bert-sdpa", "embedding-bag", "sliced-weight", "norms")


def function_of(name: str) -> Functional:
    """The network of an animal, shared by the tests."""
    found: Functional = linearized(name).function
    return found


def own_shape(name: str) -> torch.Size:
    return function_of(name).check_runs(case(name).x1).shape


def likelihood_of(name: str, family: str) -> Any:
    """Gaussian, or Categorical with the classes last, whatever the shape of the outputs."""
    return Gaussian(VARIANCE) if family == "gaussian" else Categorical(axis=len(own_shape(name)) - 1)


def targets_of(name: str, family: str, n: int = 4) -> Tensor:
    shape = (n, *own_shape(name)[1:])
    generator = torch.Generator().manual_seed(5)
    if family == "gaussian":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(shape[-1], shape[:-1], generator=generator)


def output_hessian(name: str, family: str) -> Tensor:
    """Λ of the flattened outputs, from the definition."""
    f, classes = case(name).f1, own_shape(name)[-1]
    if family == "gaussian":
        return torch.eye(f.shape[1], dtype=torch.float64).expand(4, -1, -1) / VARIANCE
    blocks = []
    for example in f:
        p = example.view(-1, classes).softmax(-1)
        blocks.append(torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)))
    return torch.stack(blocks)


def families(name: str) -> list[str]:
    return ["gaussian", "categorical"] if own_shape(name)[-1] > 1 else ["gaussian"]


def batches(name: str, family: str, block: int | None = None) -> Batches:
    return Batches((case(name).x1, targets_of(name, family)), CPU, block)


@pytest.fixture
def by_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in forward mode, however many outputs and vectors there are."""
    monkeypatch.setattr(products, "_rows_pay", lambda f, x, c, k: products.jvp_path(f, x)[0] == "rows")


@pytest.mark.parametrize("name", [animal.name for animal in ZOO])
def test_gauss_newton_is_right_for_every_network(name: str) -> None:
    v = case(name).direction(1, columns=3)
    for family in families(name):
        expected = ggn_oracle(case(name).j1, output_hessian(name, family))
        operator = GaussNewtonOperator(
            function_of(name), batches(name, family, 3), likelihood_of(name, family)
        )
        assert_near(operator @ v, expected @ v)
        assert operator.passes == 1


@pytest.mark.parametrize("name", [animal.name for animal in ZOO])
@pytest.mark.usefixtures("by_tangents")
def test_gauss_newton_by_tangents_is_right_for_every_network(name: str) -> None:
    v = case(name).direction(1, columns=2)
    family = families(name)[-1]
    expected = ggn_oracle(case(name).j1, output_hessian(name, family))
    operator = GaussNewtonOperator(function_of(name), batches(name, family), likelihood_of(name, family))
    assert_near(operator @ v, expected @ v)


@pytest.mark.parametrize("contract", [True, False])
@pytest.mark.parametrize("name", [animal.name for animal in ZOO])
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


TWICE = [name for name in BY_TANGENTS if name != "embedding-bag"]


@pytest.mark.parametrize("name", [*TWICE, "structured-output", "two-inputs", "regression-vector"])
def test_hessian_is_right(name: str) -> None:
    family = families(name)[-1]
    small = case(name).parameters <= 250
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
    with pytest.raises(ModelError, match="no second derivative"):
        embedding @ case("embedding-bag").direction()
    data = Batches((torch.randn(4, 3), torch.zeros(4, 2)), CPU)
    with pytest.raises(ModelError, match="no second derivative"):
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
    return [
        GaussNewtonOperator(function, data, likelihood),
        FisherOperator(function, data, likelihood),
        FisherOperator(function, data, likelihood, "empirical"),
        HessianOperator(function, data, likelihood),
    ]


@pytest.mark.parametrize("name", ["mlp-tanh", "vit-mha"])
def test_order_blocks_and_repetition(name: str) -> None:
    x, y, v = case(name).x1, targets_of(name, "categorical"), case(name).direction(1)
    order = torch.tensor([2, 0, 3, 1])
    whole = operators(name, Batches((x, y), CPU))
    small = operators(name, Batches((x, y), CPU, 1))
    permuted = operators(name, Batches((rows(x, order), y[order]), CPU, 3))
    twice = operators(name, Batches((joined(x, x), torch.cat([y, y])), CPU, 3))
    for one, two, three, four in zip(whole, small, permuted, twice, strict=True):
        assert_near(two @ v, one @ v)
        assert_near(three @ v, one @ v)
        assert_near(four @ v, 2 * (one @ v))


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "vit-mha", "weight-norm"])
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


def test_on_pass_is_called_after_every_pass() -> None:
    calls: list[int] = []
    operator = GaussNewtonOperator(
        function_of("mlp-tanh"), batches("mlp-tanh", "gaussian"), Gaussian(), on_pass=lambda: calls.append(1)
    )
    _ = operator @ case("mlp-tanh").direction(columns=3), operator @ case("mlp-tanh").direction()
    assert len(calls) == 2


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


# --- randomness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mc", "random-projection"])
@pytest.mark.parametrize("name", ["mlp-tanh", "structured-output"])
def test_sampled_matrices_are_fixed_and_unbiased(name: str, kind: str) -> None:
    function, expected = function_of(name), case(name)
    likelihood = likelihood_of(name, "categorical")
    exact = ggn_oracle(expected.j1, output_hessian(name, "categorical"))
    kernel = GaussNewtonOperator if kind == "random-projection" else FisherOperator
    v = expected.direction(1)
    drawn = []
    for seed in range(60):
        operator = kernel(function, batches(name, "categorical", 3), likelihood, kind, 4, seed)
        drawn.append(operator @ v)
        if seed == 0:
            assert_near(operator @ v, drawn[0], 1e-12)
            check_operator(operator, operator.dense())
            assert_near(
                operator @ torch.stack([v, 2 * v, -v], 1), torch.stack([drawn[0], 2 * drawn[0], -drawn[0]], 1)
            )
    found = torch.stack(drawn)
    stderr = found.std(0) / 60**0.5
    error = (found.mean(0) - exact @ v).abs()
    assert bool((error <= 5 * stderr + 1e-12).all())
    assert float(found.std(0).max()) > 1e-6


def test_more_samples_are_closer() -> None:
    name, v = "mlp-tanh", case("mlp-tanh").direction(1)
    exact = fisher_oracle(case(name).j1, case(name).f1, "categorical") @ v

    def error(samples: int) -> float:
        operator = FisherOperator(
            function_of(name), Batches(case(name).x1, CPU), Categorical(), "mc", samples
        )
        return float((operator @ v - exact).norm() / exact.norm())

    assert error(4000) < 0.1 < error(1) * 4


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


# --- finite differences ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "categorical"])
@pytest.mark.parametrize("name", FEW)
def test_finite_differences_are_close_to_the_exact_product(name: str, family: str) -> None:
    exact = ggn_oracle(case(name).j1, output_hessian(name, family))
    operator = FiniteDifferenceFisher(
        function_of(name), batches(name, family, 3), likelihood_of(name, family)
    )
    v = case(name).direction(1)
    stiff = exact @ v  # moves the outputs as much as any direction of its length
    assert_near(operator @ v, stiff, 1e-6)
    assert_near(operator @ stiff, exact @ stiff, 1e-6)
    assert operator.passes == 2


def test_finite_differences_in_single_precision() -> None:
    net, x = lenet(), torch.randn(100, 1, 14, 14)
    exact = FisherOperator(Functional(net.double()), Batches(x.double(), CPU), Categorical())
    operator = FiniteDifferenceFisher(Functional(net.float()), Batches(x, CPU), Categorical())
    v = torch.randn(operator.shape[0])
    for u in (v, operator @ v):
        expected = exact @ u.double()
        assert float(((operator @ u).double() - expected).norm() / expected.norm()) < 3e-3


def test_finite_differences_are_exact_in_the_length_of_v() -> None:
    name = "mlp-tanh"
    operator = FiniteDifferenceFisher(function_of(name), Batches(case(name).x1, CPU), Categorical())
    v = case(name).direction()
    product = operator @ v
    for scale in (1e-12, -1e-3, 1e6):
        assert_near((operator @ (scale * v)) / scale, product, 1e-6)
    found = operator @ torch.stack([v, torch.zeros_like(v), 3 * v], 1)
    assert_near(found, torch.stack([product, torch.zeros_like(v), 3 * product], 1), 1e-6)


def test_finite_differences_along_a_parameter_without_effect() -> None:
    name = "plain-arithmetic"  # has an unused parameter
    operator = FiniteDifferenceFisher(function_of(name), Batches(case(name).x1, CPU), Categorical())
    useless = (case(name).j1.abs().sum((0, 1)) == 0).double()
    assert useless.any()
    assert not (operator @ useless).any()


def test_steps_must_be_positive() -> None:
    with pytest.raises(InputError, match="step=0"):
        FiniteDifferenceFisher(function_of("mlp-tanh"), batches("mlp-tanh", "gaussian"), Gaussian(), 0)


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
    with pytest.raises(DataError, match="changes between passes"):
        _ = operator @ v


def test_missing_targets_are_named() -> None:
    v = case("mlp-tanh").direction()
    data = Batches(case("mlp-tanh").x1, CPU)
    with pytest.raises(DataError, match="no targets"):
        FisherOperator(function_of("mlp-tanh"), data, Categorical(), "empirical") @ v
    with pytest.raises(DataError, match="no targets"):
        HessianOperator(function_of("mlp-tanh"), data, Categorical()) @ v


def test_unknown_expectations_are_refused() -> None:
    data = Batches(case("mlp-tanh").x1, CPU)
    with pytest.raises(InputError, match="expectation='mc'"):
        GaussNewtonOperator(function_of("mlp-tanh"), data, Categorical(), "mc")
    with pytest.raises(InputError, match="expectation='random-projection'"):
        FisherOperator(function_of("mlp-tanh"), data, Categorical(), "random-projection")


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
        with pytest.raises(ModelError, match="example 1 of batch 1"):
            _ = operator @ torch.ones(6, columns)


def test_wrong_vectors_are_refused() -> None:
    operator = GaussNewtonOperator(function_of("mlp-tanh"), batches("mlp-tanh", "gaussian"), Gaussian())
    with pytest.raises(InputError, match="shape"):
        _ = operator @ torch.ones(3, dtype=torch.float64)
    with pytest.raises(InputError, match="float32"):
        _ = operator @ case("mlp-tanh").direction().float()


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_the_caller_change_nothing(mode: str) -> None:
    for operator in operators("mlp-tanh", batches("mlp-tanh", "categorical")):
        v = case("mlp-tanh").direction()
        expected = operator @ v
        context = torch.inference_mode() if mode == "inference" else torch.autocast("cpu", torch.bfloat16)
        with context:
            found = operator @ v
        assert_near(found.clone(), expected)
