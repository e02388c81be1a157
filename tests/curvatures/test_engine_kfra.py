"""KFRA: the recursion of expected pre-activation curvatures, where it is exact and what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures.running import RunningRecursion
from linnet.errors import ModelError
from linnet.likelihoods import Bernoulli, Categorical, Gaussian
from linnet.tangent.functional import Functional
from tests.curvatures.curvature_oracles import Expected
from tests.curvatures.side_by_side import curvature_of
from tests.oracles.dense import jacobian_oracle
from tests.zoo import assert_near

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (3, 5, 4, 2)


class Columns(nn.Module):
    """Weights stored with their inputs first, as x @ W + b in one addmm."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(rows, columns) / rows**0.5),
            nn.Parameter(torch.randn(columns)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def chain(
    activation: Callable[[], nn.Module], bias: bool = True, stored_transposed: bool = False
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for rows, columns in pairwise(SIZES):
        linear = Columns(rows, columns) if stored_transposed else nn.Linear(rows, columns, bias=bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def recursion(
    model: nn.Sequential, x: Tensor, hessian: Tensor, slope: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Blocks Ĝ_l ⊗ A_l by eq. 4.7, layer by layer and example by example."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear | Columns)]
    weights = [layer.weight.T if isinstance(layer, Columns) else layer.weight for layer in linear]
    inputs: list[list[Tensor]] = [[] for _ in linear]
    slopes: list[list[Tensor]] = [[] for _ in linear]
    for example in x:
        a = example
        for i, (layer, weight) in enumerate(zip(linear, weights, strict=True)):
            inputs[i].append(a if layer.bias is None else torch.cat([a, torch.ones(1)]))
            h = weight @ a if layer.bias is None else weight @ a + layer.bias
            slopes[i].append(slope(h))
            a = h if i == len(linear) - 1 else model[2 * i + 1](h)
    curvature, blocks = hessian.sum(0), []
    for i in range(len(linear) - 1, -1, -1):
        if i < len(linear) - 1:
            expected = torch.stack([torch.outer(s, s) for s in slopes[i]]).mean(0)
            curvature = (weights[i + 1].T @ curvature @ weights[i + 1]) * expected
        moment = torch.stack([torch.outer(a, a) for a in inputs[i]]).mean(0)
        pair = (moment, curvature) if isinstance(linear[i], Columns) else (curvature, moment)
        blocks.append(torch.kron(*pair).detach())
    return blocks[::-1]


def output_hessian(likelihood: Any, f: Tensor) -> Tensor:
    if isinstance(likelihood, Gaussian):
        return torch.eye(2).expand(len(f), 2, 2) / 0.3
    if isinstance(likelihood, Bernoulli):
        p = f.sigmoid()
        return torch.diag_embed(p * (1 - p))
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical(), Bernoulli()])
@pytest.mark.parametrize("kind", ["tanh", "no bias", "stored transposed", "relu"])
def test_the_recursion_is_that_of_the_thesis(kind: str, likelihood: Any) -> None:
    activation: Callable[[], nn.Module] = nn.ReLU if kind == "relu" else nn.Tanh
    model = chain(activation, kind != "no bias", kind == "stored transposed")
    x = torch.randn(7, 3)

    def slope(h: Tensor) -> Tensor:
        return (h > 0).double() if kind == "relu" else 1 - h.tanh().square()

    G = curvature_of(model, x, likelihood, "kfra", block=3)
    blocks = recursion(model, x, output_hessian(likelihood, model(x).detach()), slope)
    expected = Expected(model, x, jacobian_oracle(model, x), torch.zeros(7, 1, 2))
    total = torch.zeros_like(expected.full)
    for layer, block in zip((0, 2, 4), blocks, strict=True):
        bias = None if kind == "no bias" else f"{layer}.bias"
        (rows,) = expected.joined(f"{layer}.weight", bias, 1, kind == "stored transposed")
        total[rows[:, None], rows] = block
    assert_near(G.dense(), total)
    assert G.made.expectation == "recursion"


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU])
def test_one_example_is_exact(activation: Callable[[], nn.Module]) -> None:
    model, x = chain(activation), torch.randn(1, 3)
    found, exact = (linnet.curvature(model, x, Categorical(), s).dense() for s in ("kfra", "block"))
    assert_near(found, exact)


@pytest.mark.parametrize("stored_transposed", [False, True])
def test_a_deep_linear_network_has_the_exact_gradient_factor(stored_transposed: bool) -> None:
    model, x = chain(nn.Identity, stored_transposed=stored_transposed), torch.randn(9, 3)
    found, kflr = (linnet.curvature(model, x, Gaussian(0.3), s).dense() for s in ("kfra", "kfac"))
    block = linnet.curvature(model, x, Gaussian(0.3), "block").dense()
    assert_near(found, kflr)
    assert_near(found, block)  # Λ is the same for all examples, and so are the gradients


def test_activations_behind_the_last_layer_and_frozen_elementwise_ones_are_slopes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.rand(4) + 0.5, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x)) * self.scale))

    model, x = Scaled(), torch.randn(1, 3)
    found, exact = (linnet.curvature(model, x, Gaussian(), s).dense() for s in ("kfra", "block"))
    assert_near(found, exact)
    x = torch.randn(6, 3)
    assert linnet.curvature(model, x, Gaussian(), "kfra").dense().isfinite().all()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + torch.tanh(self.b(h)))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return torch.cat([self.left(h), self.right(h)], 1)


class SummedHeads(TwoHeads):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.left(h) + self.right(h)


def frozen_between() -> nn.Module:
    model = chain(nn.Tanh)
    model[2].requires_grad_(False)
    return model


def squares() -> nn.Module:
    """A frozen layer of equal sizes in between, which no shape gives away."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    return model


def between(*layers: nn.Module, first: nn.Module | None = None) -> Callable[[], nn.Module]:
    """Layers between a linear layer (or another one) and the last."""
    return lambda: nn.Sequential(first or nn.Linear(3, 4), *layers, nn.Linear(4, 2))


IMPOSSIBLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "residual": (Residual, (6, 3), "not elementwise, or goes more than one way"),
    "shared": (Shared, (6, 3), "used 2 times an example"),
    "two heads": (TwoHeads, (6, 3), "outputs meet"),
    "summed heads": (SummedHeads, (6, 3), "inputs|elementwise"),
    "frozen": (frozen_between, (6, 3), "outputs meet|elementwise"),
    "frozen square": (squares, (6, 3), "not elementwise"),
    "norm": (between(nn.LayerNorm(4)), (6, 3), "scale"),
    "plain norm": (between(nn.LayerNorm(4, elementwise_affine=False)), (6, 3), "not elementwise"),
    "softmax": (between(nn.Softmax(1)), (6, 3), "not elementwise"),
    "conv": (between(nn.Tanh(), nn.Flatten(), first=nn.Conv1d(1, 2, 2)), (6, 1, 3), "conv"),
    "sequence": (between(nn.Tanh()), (6, 5, 3), "5 times an example"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_graphs_that_are_no_chain_are_refused(kind: str) -> None:
    build, shape, why = IMPOSSIBLE[kind]
    with pytest.raises(
        ModelError, match=rf"(?s)KFRA cannot follow the network at .*({why}).*structure=\"kfac\""
    ):
        linnet.curvature(build().double(), torch.randn(shape), Gaussian(), "kfra")


def test_probes_do_not_depend_on_the_seed() -> None:
    model, x, found = chain(nn.Tanh), torch.randn(5, 3), []
    for seed in (0, 7):
        running = RunningRecursion(Functional(model), Gaussian(), 1.0, seed)
        running.add(x)
        found.append(running.curvature().dense())
    assert_near(*found, 1e-9)


def test_single_precision_is_accepted() -> None:
    model, x = chain(nn.Tanh), torch.randn(50, 3)
    expected = linnet.curvature(model, x, Gaussian(), "kfra").dense()
    found = linnet.curvature(model.float(), x.float(), Gaussian(), "kfra").dense()
    assert found.dtype == torch.float32
    assert_near(found, expected, 1e-4)
