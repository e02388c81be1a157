"""Counted costs of a curvature: passes, products and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import kfac, products
from linnet.curvatures.products import GaussNewtonOperator
from linnet.curvatures.stream import Batches
from linnet.likelihoods import Categorical, Gaussian, Poisson
from linnet.tangent.functional import Findings, Functional
from tests.curvatures.side_by_side import curvature_of, grouped
from tests.zoo import assert_near

# Three examples: a look at them, which is a probe of the plan, too; each alone; reversed; gradients alone.
LOOK = [3, 1, 1, 1, 3, 1, 1]
# The first batch, where more than three examples are together: three of it alone, and reversed.
FIRST = [6, 1, 1, 1, 6]


class Counted(nn.Module):
    """A network that counts its forward passes and their examples."""

    passes: list[int]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor) -> Any:
        Counted.passes.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "block"])
def test_looking_and_proving_take_small_passes(structure: str) -> None:
    model, x = Counted(), torch.randn(12, 5, dtype=torch.float64)
    Counted.passes = []
    curvature_of(model, x, Categorical(), structure=structure, block=6)
    assert Counted.passes == [*LOOK, *FIRST, 6]


def test_a_large_first_batch_is_proved_on_the_pass_that_reverses_a_part_of_it() -> None:
    model, x = Counted(), torch.randn(80, 5, dtype=torch.float64)
    Counted.passes = []
    curvature_of(model, x, Categorical(), structure="kfac", block=40)
    assert Counted.passes == [*LOOK, 40, 32, 1, 1, 1, 40]


def test_a_layer_inside_is_not_tried_as_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Counted(), torch.randn(12, 5, dtype=torch.float64)
    Counted.passes = []
    curvature_of(model, x, Categorical(), structure="kfac", block=6, params="inner.0")
    assert Counted.passes == [*LOOK, *FIRST, 6]
    model.inner[2].requires_grad_(False)
    running = linnet.RunningCurvature(model, Categorical(), "kfac")
    running.add(x)
    running.refresh(model)
    Counted.passes = []
    running.add(x)
    assert Counted.passes[-1] == 12
    assert Counted.passes.count(12) == 1


def test_uses_of_one_input_share_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Projections(nn.Module):
        """Queries, keys and values of one input."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key, self.value = (nn.Linear(4, 3).double() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.query(x) * self.key(x) + self.value(x.square())

    computed: list[Any] = []
    from linnet.curvatures import moments

    original: Callable[..., Any] = moments.input_moment
    monkeypatch.setattr(
        moments, "input_moment", lambda use, *rest: computed.append(use) or original(use, *rest)
    )
    model, x = Projections(), torch.randn(6, 4, dtype=torch.float64)
    G = linnet.curvature(model, x, Categorical(), structure="kfac")
    assert len(computed) == 2  # of x, and of its square
    hatted = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1)
    for part in G.parts:
        a = hatted if part.layer.name != "value" else torch.cat([x.square(), hatted[:, 4:]], 1)
        assert_near(part.operator.right, a.T @ a / 6)
    assert kfac.shared_input_moment is moments.shared_input_moment


@pytest.mark.parametrize("likelihood", [Categorical(), Poisson()])
def test_products_in_parts_are_those_of_the_whole_batch(
    likelihood: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    x = torch.randn(11, 4, dtype=torch.float64)
    y = torch.randint(5, (11,)) if isinstance(likelihood, Categorical) else torch.randint(4, (11, 5)).double()
    function = Functional(net)
    v = torch.randn(function.space.dim, 1, dtype=torch.float64)
    whole = GaussNewtonOperator(function, Batches((x, y), function.device), likelihood) @ v
    sizes: list[int] = []
    original = products._by_tangents

    def watched(f: Functional, part: Any, *rest: Any) -> Tensor:
        sizes.append(len(part))
        return original(f, part, *rest)

    monkeypatch.setattr(products, "_by_tangents", watched)
    monkeypatch.setattr(products, "TANGENT_BYTES", {"cpu": 1})
    monkeypatch.setattr(products, "FEWEST_TANGENTS", 3)
    function.cache = Findings()
    parts = GaussNewtonOperator(function, Batches((x, y), function.device), likelihood) @ v
    assert sizes[-4:] == [3, 3, 3, 2]
    assert_near(parts, whole)


def test_what_was_saved_is_let_go_with_the_last_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    original: Callable[..., Any] = torch.autograd.grad

    def noted(*args: Any, **kwargs: Any) -> Any:
        if len(args[0]) == 6:  # a batch of data
            kept.append(kwargs["retain_graph"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    model, x = Counted(), torch.randn(6, 5, dtype=torch.float64)
    operator = curvature_of(model, x, Categorical(), structure="kfac", expectation="mc", seed=0)
    assert kept == [True, False]  # the rules are proved on the batch before
    assert bool(torch.isfinite(operator.dense()).all())


@pytest.mark.parametrize("formed", [False, True])
def test_wide_networks_are_multiplied_in_large_parts(formed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients of all parameters do not fit, those that are contracted do not count."""

    class Scaled(nn.Module):
        """Linear layers, and a weight that is used through a function of it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.last = nn.Linear(20, 30).double(), nn.Linear(30, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            weight = self.first.weight / 2 if formed else self.first.weight
            f: Tensor = self.last(torch.tanh(nn.functional.linear(x, weight, self.first.bias)))
            return f

    x = torch.randn(40, 20, dtype=torch.float64)
    function, sizes = Functional(Scaled()), []
    original = products.capture

    def noting(f: Functional, part: Any, *rest: Any) -> Any:
        sizes.append(len(part))
        return original(f, part, *rest)

    monkeypatch.setattr(products, "capture", noting)
    monkeypatch.setattr(products, "ROWS_BYTES", 8 * 661 * 10)  # ten examples of all 661 parameters
    v = torch.randn(function.space.dim, 2, dtype=torch.float64)
    product = GaussNewtonOperator(function, Batches(x, function.device, 40), Gaussian()) @ v
    assert sizes == [2, *([10] * 4 if formed else [40])]
    dense = linnet.curvature(function.model, x, Gaussian(), structure="full").dense()
    assert_near(product, dense @ v)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_a_posterior_of_the_last_layer_sees_the_data_once(structure: str) -> None:
    """The likelihood of the labels comes from the pass that sums the curvature."""
    model, x, y = Counted(), torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 3
    Counted.passes = []
    la = linnet.Laplace(model, Categorical(), **grouped(structure, params="last-layer", block=6)).fit((x, y))
    assert Counted.passes == [*LOOK, 6, 6]
    assert_near(la.log_evidence(), _log_evidence(la, -model(x).log_softmax(1)[range(12), y].sum()))
    before = la.log_evidence()
    la.fit((x, y), add=True)
    assert la.log_evidence() < before


def _log_evidence(la: Any, nll: Tensor) -> Tensor:
    """By dense matrices."""
    theta = la.curvature.function.space.to_flat(la.curvature.function.theta)
    precision = la.curvature.dense() + torch.eye(len(theta), dtype=torch.float64)
    return (-nll - 0.5 * theta.square().sum() - 0.5 * torch.logdet(precision)).detach()
