"""The covariance of outputs, against J M Jᵀ, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import linnet
from linnet.curvatures import kfac, sums, variance
from linnet.errors import MemoryBudgetError
from linnet.likelihoods import Categorical, Gaussian
from tests.curvatures.curvature_oracles import Problem, families
from tests.curvatures.side_by_side import curvature_of
from tests.oracles.dense import jacobian_oracle
from tests.zoo import assert_near, case

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac")
NETWORKS = (
    "mlp-tanh", "lenet", "mobilenet", "convnext", "encoder-batch-first", "padding-index", "tied-embedding",
    "tied-linears", "shared-conv", "plain-arithmetic", "upsampler", "decoder", "lstm", "norms", "weight-norm",
    "lora", "structured-output", "regression-vector", "embedding-bag", "conv1d", "conv3d",
)  # fmt: skip


class Allocations(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            views = any(
                isinstance(a, Tensor) and a.untyped_storage().data_ptr() == storage.data_ptr() for a in args
            )
            owned = 0 if views else storage.nbytes() // tensor.itemsize
            if owned > self.largest:
                self.largest, self.where = owned, str(func)
        return result


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thinned(12)
def test_it_is_the_jacobians_around_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(name, families(name)[-1])
    expected = case(name)
    for structure, G in problem.curvature(STRUCTURES).items():
        matrices = [G, G.damped(1.0), G.damped(0.3).inverse()]
        if structure == "kfac":
            matrices += [G.factored_damped(0.3).inverse(), G.scaled(2.0)]
        for M in matrices:
            found = M.output_covariance(expected.x2)
            assert_near(found, expected.j2 @ M.dense() @ expected.j2.mT, 1e-9)
            assert torch.equal(found, found.mT)
            own = found.diagonal(dim1=1, dim2=2)
            assert_near(M.output_variance(expected.x2), own, 1e-9)
            with monkeypatch.context() as patch:  # one output after the other
                patch.setattr(variance, "TARGET", 1)
                assert_near(M.output_variance(expected.x2), own, 1e-9)


@pytest.mark.parametrize("structure", ["low-rank", "last-layer", "kfra"])
def test_the_other_structures_too(structure: str) -> None:
    problem, expected = Problem("mlp-tanh", "categorical"), case("mlp-tanh")
    G = problem.curvature(structure)
    names = G.function.names
    j = jacobian_oracle(expected.model(), expected.x2, names)
    for M in (G, G.damped(0.3), G.damped(0.3).inverse()):
        assert_near(M.output_covariance(expected.x2), j @ M.dense() @ j.mT, 1e-9)


def test_mixtures_subsets_and_quadratic_agree() -> None:
    problem, expected = Problem("lenet", "categorical"), case("lenet")
    G = problem.curvature({"^0": "diagonal", "^3": "ekfac", "7.weight": "block", ".*": "kfac"}).damped(1.0)
    assert_near(G.output_covariance(expected.x2), expected.j2 @ G.dense() @ expected.j2.mT)
    assert_near(G.quadratic(expected.j2), G.output_covariance(expected.x2))
    G = problem.curvature("ekfac", params=["3.weight", "9.bias"])
    j = jacobian_oracle(expected.model(), expected.x2, ["3.weight", "9.bias"])
    assert_near(G.output_covariance(expected.x2), j @ G.dense() @ j.mT)


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac", "block"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_variances_form_no_matrix_between_outputs(structure: str) -> None:
    """Two thousand outputs: C² would be 4 million numbers, a thousand times what the budget has."""
    c = 2000
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, c))
    inner = linnet.linearize(net, params=["0.weight", "0.bias", "2.weight"])
    x = torch.randn(3, 3)
    M = linnet.curvature(inner, x, Categorical(), structure, "mc").damped(1.0).inverse()
    expected = jacobian_oracle(net, x, M.function.names)
    expected = torch.einsum("ncp,pq,ncq->nc", expected, M.dense().double(), expected)
    M.output_variance(x)
    with Allocations() as seen:
        found = M.output_variance(x, memory="600kB")
    assert_near(found, expected, 1e-4)
    assert seen.largest < c * c / 10, f"{seen.where} makes {seen.largest} numbers"
    with pytest.raises(MemoryBudgetError, match="2000"):
        M.output_variance(x, memory="10kB")


def wide_mlp() -> tuple[nn.Module, Tensor, int, int]:
    net = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 5))
    return net, torch.randn(64, 50), 60 * 60, 5


def convolutional() -> tuple[nn.Module, Tensor, int, int]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(24, 4),
    )  # fmt: skip
    return net, torch.randn(64, 3, 8, 8), 24 * 8 * 9, 4


def language() -> tuple[nn.Module, Tensor, int, int]:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(3000, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(torch.tanh(self.embed(ids)).mean(1))

    return Bag(), torch.randint(3000, (64, 5)), 24_000, 3


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize("build", [wide_mlp, convolutional, language])
def test_nothing_as_large_as_the_jacobians_is_held(
    build: Any, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, layer, classes = build()
    M = linnet.curvature(model, x, Categorical(), structure).damped(1.0).inverse()
    formed = 1 << 15
    monkeypatch.setattr(variance, "ROWS_AT_ONCE", formed)
    M.output_covariance(x[:2])  # plans are made on the first call
    with Allocations() as seen:
        M.output_covariance(x)
    weights = sum(p.numel() for p in model.parameters())
    eigen = max(t.numel() for part in M.parts for t in vars(part.operator).values() if isinstance(t, Tensor))
    activations = 64 * classes * max(a.shape[1:].numel() for a in every_activation(model, x))
    allowed = max(formed, classes * layer, eigen, 3 * activations)
    assert seen.largest <= allowed, f"{seen.where} makes {seen.largest} numbers"
    assert allowed < 64 * classes * layer < 64 * classes * weights


def every_activation(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Results of all modules, and receptive fields of convolutions."""
    found: list[Tensor] = [x] if x.is_floating_point() else []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        found.append(result)
        if isinstance(module, nn.Conv2d):
            # shared by all columns: one field for each position
            found.append(torch.empty(len(x), -(-inputs[0].shape[1] * 9 * result[0, 0].numel() // 4)))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def accumulated(structure: str, n: int) -> tuple[int, str]:
    model, x, _, _ = convolutional()
    linnet.curvature(model, x[:2], Categorical(), structure)
    x = torch.randn(n, 3, 8, 8)
    with Allocations() as seen:
        curvature_of(model, x, Categorical(), structure, block=8)
    return seen.largest, seen.where


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
@pytest.mark.thinned(2)
def test_memory_of_sums_does_not_grow_with_the_number_of_examples(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kfac, "ROWS_AT_ONCE", 1 << 14)
    monkeypatch.setattr(sums, "ROWS_AT_ONCE", 1 << 14)
    few, many = accumulated(structure, 16), accumulated(structure, 128)
    assert few[0] == many[0], (few, many)


def test_single_precision_agrees() -> None:
    model, x = case("lenet").model().float(), case("lenet").x2.float()
    for structure in STRUCTURES:
        G = linnet.curvature(model, case("lenet").x1.float(), Gaussian(), structure).damped(1.0).inverse()
        found = G.output_covariance(x)
        assert found.dtype == torch.float32
        assert_near(found, case("lenet").j2 @ G.dense().double() @ case("lenet").j2.mT, 1e-4)
