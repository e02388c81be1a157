"""Networks with their tangents as plain graphs: the whole zoo, against dense Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.functional import call_arguments
from linnet.tangent.graph import (
    MOST,
    FreeSize,
    Prototype,
    Traced,
    dimensions,
    in_both,
    plain_module,
    resized,
    that_run,
)
from tests import zoo

NO_DERIVATIVE = {"embedding-bag"}  # animals with an operation that torch does not differentiate twice


class Sum(nn.Module):
    """f₀ + Jδ."""

    def forward(self, value: Tensor, tangents: list[Tensor]) -> Tensor:
        return value + tangents[0]


def module_of(name: str, v: Tensor) -> nn.Module:
    """The plain module of an animal along a direction."""
    lin, case = zoo.linearized(name), zoo.case(name)
    direction = lin.space.to_params(v)
    return plain_module(lin.model, [direction], Sum(), Prototype(case.x1), lin.function.output).module


@pytest.mark.long
@pytest.mark.parametrize("name", [animal.name for animal in zoo.ZOO])
def test_a_graph_is_the_linear_model(name: str) -> None:
    case = zoo.case(name)
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(zoo.linearized(name).space.dim, generator=generator, dtype=torch.float64)
    if name in NO_DERIVATIVE:
        with pytest.raises(ModelError, match="derivatives"):
            module_of(name, v)
        return
    module = module_of(name, v)
    for x, f, j in ((case.x1, case.f1, case.j1), (case.x2, case.f2, case.j2)):
        args, kwargs = call_arguments(x)
        zoo.assert_near(module(*args, **kwargs), f + j @ v, 1e-9)


def test_a_module_needs_no_tangent() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    module = plain_module(net, [], lambda value, _: 2 * value, Prototype(x)).module
    torch.testing.assert_close(module(x), 2 * net(x).detach())


def test_weights_that_have_no_influence_have_no_tangent() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval()
    net.unused = nn.Parameter(torch.ones(2))
    net.forward = lambda x: net[1](net[0](x))
    x = torch.ones(3, 2)
    module = plain_module(net, [{"unused": torch.ones(2)}], Sum(), Prototype(x)).module
    torch.testing.assert_close(module(x), net(x).detach())


def test_an_operation_without_second_derivatives_is_refused() -> None:
    lin = linnet.linearize(nn.EmbeddingBag(4, 2))
    with pytest.raises(ModelError, match="derivatives"):
        plain_module(lin.model, [lin.theta0], Sum(), Prototype(torch.ones(3, 2, dtype=torch.long)))


@pytest.mark.long
def test_layers_whose_derivatives_are_written_for_any_size() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, stride=2), nn.BatchNorm2d(4), nn.Hardsigmoid(), nn.InstanceNorm2d(4),
        nn.ConvTranspose2d(4, 2, 2), nn.GroupNorm(1, 2), nn.GLU(2), nn.Hardswish(), nn.Flatten(),
        nn.Linear(12, 2),
    ).double()  # fmt: skip
    net[1].running_mean.uniform_(), net[1].running_var.uniform_(1, 2)
    lin, x = linnet.linearize(net), X.double()
    direction = {name: torch.randn_like(t) for name, t in lin.theta0.items()}
    module = plain_module(lin.model, [direction], Sum(), Prototype(x[:3]).rigid()).module
    torch.testing.assert_close(module(x), lin.base(x) + lin.jvp(x, direction))


X = torch.randn(4, 2, 8, 6, generator=torch.Generator().manual_seed(0))
AUTO = torch.export.Dim.AUTO


class Through(nn.Module):
    """A network with a function of images behind a convolution."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.then = nn.Conv2d(2, 3, 3, padding=1), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x))


def traced(net: nn.Module, x: Any = X, **fixed: Any) -> Traced:
    return plain_module(net.eval(), [], lambda value, _: value, Prototype(x, **fixed))


def test_images_of_any_size_where_the_layers_take_them() -> None:
    net = Through(lambda h: h.relu().mean((2, 3)))
    made = traced(net)
    assert [(one.axes, one.size) for one in made.free] == [(((0, 2),), 8), (((0, 3),), 6)]
    assert list(made.module.meta["dynamic_shapes"]["x"]) == [0, 2, 3]
    for height, width in ((5, 9), (16, 4)):
        x = torch.randn(1, 2, height, width)
        torch.testing.assert_close(made.module(x), net(x).detach())
    with pytest.raises(RuntimeError, match="dimension 1 of x must have the size 2 of the examples"):
        made.module(torch.ones(2, 3, 8, 6))


@pytest.mark.long
def test_sizes_that_are_asked_to_stay() -> None:
    net = Through(lambda h: h.mean((2, 3)))
    assert [one.axes for one in traced(net, fixed=frozenset({(0, 3)})).free] == [((0, 2),)]
    like = Prototype(X).rigid()
    assert traced(net, fixed=like.fixed).free == []
    assert dimensions(like.only([FreeSize(((0, 2),), 8, 2, 9)]), ["x"])["x"].keys() == {0, 2}


def test_a_branch_holds_on_its_side_alone() -> None:
    net = Through(lambda h: (2 * h if 4 < h.shape[2] < 10 else h).mean((2, 3)))
    made = traced(net)
    assert (made.free[0].least, made.free[0].most) == (5, 9)
    torch.testing.assert_close(made.module(X[:, :, :5]), net(X[:, :, :5]).detach())
    with pytest.raises(RuntimeError, match="dimension 2 of x must be at least 5"):
        made.module(X[:, :, :4])
    with pytest.raises(RuntimeError, match="dimension 2 of x must be at most 9"):
        made.module(torch.ones(1, 2, 10, 6))


class Masked(nn.Module):
    """Tokens under a mask, and numbers that belong to all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, ids: Tensor, given: dict[str, Tensor], shared: Tensor) -> Tensor:
        mask = given["mask"]
        return (self.table(ids) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True) + shared.sum()


def test_lengths_of_several_inputs_are_one() -> None:
    net, shared = Masked(), torch.ones(3)
    ids, mask = torch.arange(8).view(2, 4) % 7, torch.ones(2, 4)
    made = traced(net, (ids, {"mask": mask}, shared))
    assert made.free == [FreeSize(((0, 1), (1, 1)), 4, 2, 2**31 - 1)]
    given = resized((ids, {"mask": mask}, shared), made.free[0], 6)
    assert [t.shape for t in (given[0], given[1]["mask"])] == [torch.Size([2, 6])] * 2
    torch.testing.assert_close(made.module(*given), net(*given).detach())
    with pytest.raises(RuntimeError, match="must equal dimension 1 of ids"):
        made.module(given[0], {"mask": mask}, shared)


def test_what_two_traces_leave_free() -> None:
    first = [FreeSize(((0, 1), (1, 1)), 8, 2, 9), FreeSize(((0, 2),), 8, 2, 9), FreeSize(((0, 3),), 8, 2, 9)]
    second = [FreeSize(((0, 1),), 8, 4, 99), FreeSize(((1, 1),), 8, 2, 7), FreeSize(((0, 2),), 8, 1, 5)]
    assert in_both(first, second) == [FreeSize(((0, 1), (1, 1)), 8, 4, 7), FreeSize(((0, 2),), 8, 2, 5)]
    tied = FreeSize(((0, 2), (0, 3)), 8, 1, 6)
    assert in_both(first[1:], [tied]) == [FreeSize(((0, 2), (0, 3)), 8, 2, 6)]


def test_other_sizes_break_divisibility_and_keep_bounds() -> None:
    assert FreeSize(((0, 1),), 8, 2, 100).others() == [2, 7, 9]
    assert FreeSize(((0, 1),), 8, 8, 8).others() == []
    assert resized(torch.arange(3)[None], FreeSize(((0, 1),), 3, 1, 9), 5).tolist() == [[0, 1, 2, 0, 1]]


def test_sizes_that_a_module_runs_with() -> None:
    free = [FreeSize(((0, 2),), 8, 2, MOST), FreeSize(((0, 3),), 6, 2, MOST)]
    pooled = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d((2, 1)), nn.AdaptiveAvgPool2d(1))
    assert that_run(pooled, X, free) == [free[0]._replace(least=4), free[1]._replace(least=3)]
    counted = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(24, 1))
    assert that_run(counted, X, free) == []  # a height of 7 has as many positions, and no other
    assert that_run(Through(lambda h: h.mean(2) @ torch.ones(6)), X, free) == [free[0]._replace(least=1)]
    ninth = Through(lambda h: h.flatten(2)[..., 8])
    assert that_run(ninth, X, free[:1]) == [free[0]]
    assert that_run(ninth, X, free) == []  # 2 × 6 and 8 × 2 have nine positions, 2 × 2 has not


class Same(nn.Conv2d):
    """A convolution that pads by as much as the size of its input asks for."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = zip(x.shape[2:], self.stride, strict=True)
        extra = [max((-(-size // stride) - 1) * stride + 3 - size, 0) for size, stride in sizes]
        (top, left) = (one // 2 for one in extra)
        return super().forward(nn.functional.pad(x, (left, extra[1] - left, top, extra[0] - top)))


@pytest.mark.parametrize("by_size", [True, False])
def test_images_keep_their_size_where_layers_pad_by_it(by_size: bool) -> None:
    torch.manual_seed(0)
    kind = Same if by_size else partial(nn.Conv2d, padding=1)
    layers = [nn.Sequential(kind(2, 2, 3, stride=1 + (n == 0)), nn.Tanh()) for n in range(8)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).double()
    x = torch.randn(4, 2, 8, 8).double()
    made = plain_module(net, [], lambda value, _: value, Prototype(x))
    free = {axis for one in made.free for axis in one.axes}
    assert free == (set() if by_size else {(0, 2), (0, 3)})
