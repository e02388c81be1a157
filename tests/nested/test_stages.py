"""Features of earlier layers: what is read of a network, and the fit on them against dense algebra."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.errors import InputError, ModelError
from linnet.nested import stages
from linnet.nested.search import BIAS
from linnet.nested.stages import Staged, earlier_layers, pooled
from linnet.tangent.functional import Functional

N, T, RIDGE = 14, 6, 0.2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1), nn.Tanh(),
        nn.Conv2d(5, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(54, 7), nn.Tanh(), nn.Linear(7, 3),
    ).double()  # fmt: skip


NET = network()
X = torch.randn(N + T, 1, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(N + T) % 3
GOAL = 15.0 * F.one_hot(Y).double()


def read(x: Tensor) -> Tensor:
    """φ and ψ by hand: the inputs of the layers 4 and 7, and φ itself, of length one."""
    maps, flat, phi = NET[:4](x), NET[:7](x), NET[:9](x)
    grid = F.adaptive_avg_pool2d(maps, 2).flatten(1)
    psi = [F.normalize(part, dim=1) / 3**0.5 for part in (grid, flat, phi)]
    return torch.cat([phi, *psi], 1).detach()


def reference(share: float) -> Tensor:
    phi, psi = read(X).tensor_split([7], 1)
    phi = phi - phi[:N].mean(0)
    head, angles = phi @ phi.T, (psi @ psi.T).clamp(-1, 1).acos()
    early = (angles.sin() + (math.pi - angles) * angles.cos()) / math.pi
    scales = [float(k[:N, :N].diagonal().mean() - k[:N, :N].mean()) for k in (head, early)]
    return BIAS + (1 - share) * head / scales[0] + share * early / scales[1]


def solution(kernel: Tensor, at: Tensor) -> Tensor:
    square = kernel[at][:, at] + RIDGE * torch.eye(len(at), dtype=torch.float64)
    return kernel[:, at] @ torch.linalg.solve(square, GOAL[at])


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.thinned(2)
def test_every_answer_is_that_of_the_dense_kernel(share: float, tmp_path: Path) -> None:
    fit = linnet.adapt(NET, (X[:N], Y[:N]), earlier=share, ridge=RIDGE)
    assert fit.module.stages == ("4", "7")
    kernel, train = reference(share), torch.arange(N)
    expected = solution(kernel, train)
    assert torch.allclose(fit.predict(X), expected, atol=1e-7)
    own = kernel[:N, :N] + RIDGE * torch.eye(N, dtype=torch.float64)
    explained = (kernel[N:, :N] @ torch.linalg.solve(own, kernel[:N, N:])).diagonal()
    variance = fit.noise / RIDGE * (kernel.diagonal()[N:] - explained)
    assert torch.allclose(fit.predictive(X[N:]).variance[:, 0], variance, rtol=1e-5)
    left_out = torch.stack([solution(kernel, train[train != i])[i] for i in range(N)])
    assert torch.allclose(fit.loo(), left_out, atol=1e-6)
    assert torch.allclose(fit.forget([0, 5]).predict(X), solution(kernel, train[(train != 0) & (train != 5)]))
    more = fit.update((X[N:], Y[N:]))
    assert torch.allclose(more.predict(X), solution(kernel, torch.arange(N + T)), atol=1e-7)
    fit.save(tmp_path)
    assert torch.allclose(linnet.load(tmp_path, NET).predict(X), expected, atol=1e-7)
    assert torch.allclose(fit.merge().network(X), expected, atol=1e-7)
    mean, found = fit.export(X[:2], variance=True)(X[N:])
    assert torch.allclose(mean, expected[N:], atol=1e-6)
    assert torch.allclose(found[:, 0], variance, rtol=1e-4)


@pytest.mark.long
def test_a_module_rounds_no_more_than_the_fit() -> None:
    net = network().float()
    x = X.float()
    line = torch.linspace(0, 1, N + T)[:, None, None, None] * X[:1].float()  # samples that are much alike
    x = line + 0.01 * x
    fit = linnet.adapt(net, (x, x.flatten(1)[:, :2].sin()), earlier=1.0, ridge=1e-5)
    assert fit.system.beta.abs().max() > 10 * float(fit.targets.abs().max())  # large terms that cancel
    expected = fit.predict(x)
    spread = float(expected.std(0).max())
    for found in (fit.export(x[:2])(x), fit.merge().network(x)):
        assert found.dtype == torch.float32
        assert torch.allclose(found, expected, rtol=0, atol=1e-3 * spread)


def test_derivatives_stand_beside_earlier_layers() -> None:
    both = linnet.adapt(NET, (X[:N], Y[:N]), earlier=0.5, weight=0.5, ridge=RIDGE)
    alone = linnet.adapt(NET, (X[:N], Y[:N]), weight=1.0, ridge=RIDGE)
    body = alone.prior.network.body
    early, train = reference(0.5), both.system.problem.examples
    kernel = 0.5 * (early[:, :N] + BIAS) + 0.5 / both.prior.mixture.body * body.cross(X, train)
    square = kernel[:N] + RIDGE * torch.eye(N, dtype=torch.float64)
    expected = kernel @ torch.linalg.solve(square, GOAL[:N])
    assert torch.allclose(both.predict(X), expected, atol=1e-6)


@pytest.mark.long
def test_derivatives_beside_earlier_layers_are_exported() -> None:
    both = linnet.adapt(NET, (X[:N], Y[:N]), earlier=0.5, weight=0.5, ridge=RIDGE)
    expected = both.predict(X)
    assert torch.allclose(both.export(X[:2])(X), expected, atol=1e-6)
    mean, variance = both.export(X[:2], variance=True)(X[N:])
    assert torch.allclose(mean, expected[N:], atol=1e-6)
    assert torch.allclose(variance, both.predictive(X[N:]).variance, rtol=1e-4)


def test_maps_and_tokens_are_pooled() -> None:
    maps = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    parts = [maps[:, :, a : a + 2, b : b + 3].mean((2, 3)) for a in (0, 2) for b in (0, 3)]
    grid = torch.stack(parts, 2).flatten(1)
    assert torch.allclose(pooled(maps, True, None, True), grid)
    assert torch.allclose(pooled(maps.movedim(1, -1), False, None, True), grid)  # channels last
    tokens = torch.randn(2, 1 + 16, 3)  # a class token before an image of 4 × 4 patches
    square = tokens[:, 1:].unflatten(1, (4, 4)).movedim(-1, 1)
    assert torch.allclose(pooled(tokens, False, None, True), F.adaptive_avg_pool2d(square, 2).flatten(1))
    mask = (torch.arange(17) < torch.tensor([[5], [9]])).long()
    expected = torch.stack([tokens[0, :5].mean(0), tokens[1, :9].mean(0)])
    assert torch.allclose(pooled(tokens, False, mask, False), expected, atol=1e-6)
    assert torch.allclose(pooled(tokens, False, None, False), tokens.mean(1))
    # images of every size give as many numbers
    one = torch.randn(2, 3, 1, 1)
    assert torch.equal(pooled(one, True, None, True), one.flatten(1).repeat_interleave(4, 1))
    odd = pooled(torch.randn(2, 23, 3), False, None, True)
    assert odd.shape == grid.shape
    wide = torch.randn(2, stages.WIDEST // 2, 4, 4)  # a grid of it would be too wide
    assert torch.allclose(pooled(wide, True, None, True), wide.mean((2, 3)))


class Odd(nn.Module):
    """Layers whose inputs have no axis of examples, the same twice, or are the network's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.again = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.flat, self.query, self.head = nn.Linear(4, 4), nn.Linear(3, 8), nn.Linear(8, 2)
        self.learned = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.twice(h) + self.again(h)
        h = h + self.flat(h.reshape(-1, 4)).reshape(h.shape) + self.query(self.learned).mean(0)
        return self.head(torch.tanh(h))


def test_only_inputs_of_the_examples_are_read() -> None:
    assert earlier_layers(Functional(Odd()), torch.randn(9, 6)) == ("twice",)


@pytest.mark.parametrize("kind", ["tokens", "dict", "encoder", "padding"])
@pytest.mark.thinned(2)
def test_texts_are_averaged_over_their_words(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16
    )
    made = transformers.BertModel if kind == "encoder" else transformers.BertForSequenceClassification
    net = made(config).double().eval()
    ids = torch.randint(1, 30, (12, 7), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7) < torch.randint(2, 8, (12, 1), generator=torch.Generator().manual_seed(1))).long()
    x: Any = {"input_ids": ids, "attention_mask": mask}
    if kind == "tokens":
        x = ids
    y = torch.arange(12) % 2
    fit = linnet.adapt(net, (x, y), earlier=1.0)
    assert fit.module.stages
    merged = fit.merge().network
    found = merged(x) if kind == "tokens" else merged(**x)
    assert torch.allclose(found, fit.predict(x), atol=1e-7)
    if kind == "tokens":
        return
    # what stands at padding takes no part
    other = {**x, "input_ids": torch.where(mask > 0, ids, 3)}
    assert torch.allclose(fit.predict(x), fit.predict(other), atol=1e-8)
    assert torch.allclose(fit.loo(), linnet.adapt(net, (other, y), earlier=1.0).loo(), atol=1e-6)


def test_a_network_without_earlier_layers_is_a_probe() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 3)).double()
    assert linnet.adapt(net, (X[:N], Y[:N])).is_probe
    with pytest.raises(ModelError, match="earlier"):
        linnet.adapt(net, (X[:N], Y[:N]), earlier=0.5)


def test_shares_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="earlier"):
        linnet.adapt(NET, (X[:N], Y[:N]), earlier=1.5)
    with pytest.raises(InputError, match="earlier"):
        linnet.adapt(NET, (X[:N], Y[:N]), earlier=0.5, tune=True)


def test_the_network_is_left_as_it_was() -> None:
    hooks = [len(module._forward_pre_hooks) for module in NET.modules()]
    network = Staged(NET, ("4",))
    network(X[:2])
    linnet.adapt(NET, (X[:N], Y[:N]))
    assert [len(module._forward_pre_hooks) for module in NET.modules()] == hooks
    assert all(not module._forward_pre_hooks for module in network.modules())
