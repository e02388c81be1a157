"""Rows of Jacobians as plain graphs, against dense Jacobians."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.functional import Functional, call_arguments
from linnet.tangent.graph import Prototype
from linnet.tangent.graph_rows import module_with_rows
from linnet.tangent.jacobian import jacobian
from tests import zoo

# animals whose weights enter an operation that has no rule for weights of each example, and what is said
WITHOUT_RULE = {
    "contractions": "derivatives cannot be traced",
    "conv3d": "aten::convolution",
    "transposed-convs": "aten::convolution_transpose",
    "decoder": "aten::convolution_transpose",
    "upsampler": "aten::convolution_transpose",
    "norms": "aten::repeat",
    "weight-norm": "aten::linalg_vector_norm",
    "spectral-norm": "aten::sum",
    "embedding-bag": "aten::_embedding_bag_forward_only",
}


def joined(value: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return value, torch.cat([row.reshape(*value.shape, -1) for row in rows], 2)


@pytest.mark.long
@pytest.mark.parametrize("name", [animal.name for animal in zoo.ZOO])
def test_rows_are_those_of_the_jacobian(name: str) -> None:
    case, function = zoo.case(name), zoo.linearized(name).function
    if name in WITHOUT_RULE:
        with pytest.raises(ModelError, match=WITHOUT_RULE[name]):
            module_with_rows(function, joined, Prototype(case.x1))
        return
    module = module_with_rows(function, joined, Prototype(case.x1)).module
    for x, f, j in ((case.x1, case.f1, case.j1), (case.x2, case.f2, case.j2)):
        args, kwargs = call_arguments(x)
        value, rows = module(*args, **kwargs)
        zoo.assert_near(value, f, 1e-10)
        zoo.assert_near(rows, j.reshape(rows.shape), 1e-10)


class Small(nn.Module):
    """Tokens, a token in front, a grouped convolution and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.randn(1, 1, 4))
        self.conv, self.norm = nn.Conv1d(4, 4, 3, groups=2, stride=2), nn.LayerNorm(4)
        self.position, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids) + self.position(torch.arange(ids.shape[1]))
        h = torch.cat([self.first.expand(ids.shape[0], -1, -1), found], 1)
        return self.head(self.norm(self.conv(h.mT).mT).tanh().mean(1))


@pytest.mark.long
@pytest.mark.parametrize("params", [None, ["table.weight", "conv.bias", "head.bias"]])
def test_rows_of_some_weights_for_batches_and_lengths_of_any_size(params: list[str] | None) -> None:
    torch.manual_seed(0)
    function = Functional(Small().double(), params)
    ids = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    module = module_with_rows(function, joined, Prototype(ids)).module
    for part in (ids, ids[:1], ids[:2].repeat(1, 2)):
        torch.testing.assert_close(module(part)[1], jacobian(function, part))


@pytest.mark.long
@pytest.mark.parametrize(
    "pools",
    [
        (nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((2, 3))),
        (nn.AvgPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(2)),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d(1)),
    ],
)
def test_rows_behind_pools(pools: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), *pools, nn.Flatten())
    function = Functional(nn.Sequential(body, nn.Linear(body(torch.zeros(1, 1, 9, 8)).shape[1], 2)).double())
    x = torch.randn(3, 1, 12, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = module_with_rows(function, joined, Prototype(x[:, :, :9, :8])).module
    for part in (x[:, :, :9, :8], x):
        torch.testing.assert_close(module(part)[1], jacobian(function, part))


def test_weights_without_a_rule_are_named() -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.matrix.cumsum(0).sum(0)

    with pytest.raises(ModelError, match="params="):
        module_with_rows(Functional(Solved()), joined, Prototype(torch.ones(3, 2)))


def test_outputs_of_any_number_are_refused() -> None:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(2)

    like = Prototype(torch.ones(3, 5, 2))
    with pytest.raises(ModelError, match="outputs"):
        module_with_rows(linnet.linearize(Each()).function, joined, like)
