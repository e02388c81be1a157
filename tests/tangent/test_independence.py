"""Networks whose examples see each other are refused everywhere, and no others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.curvatures import Passes
from linnet.errors import ModelError
from linnet.likelihoods import Gaussian
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.zoo import assert_near


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = real(6, 3, 4), real(6, 2, seed=1)


class Sequences(nn.Module):
    """A recurrent layer that takes the batch for the sequence: batch_first=True is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


class Mixed(nn.Module):
    """Hidden activations (N, d), and what is done to them across the batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(12, 5), nn.Linear(5, 2), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(torch.tanh(self.first(x.flatten(1)))))


def running(h: Tensor) -> Tensor:
    return h.cumsum(0)


def by_place(h: Tensor) -> Tensor:
    return h[torch.arange(len(h)) % 2]


def in_gradient(h: Tensor) -> Tensor:
    """The same outputs as without the others, but not the same gradients."""
    mean = h.mean(0)
    return h + mean - mean.detach()


MIXING = {
    "sequence-first": Sequences,
    "cumsum": lambda: Mixed(running),
    "by place": lambda: Mixed(by_place),
    "beyond the third": lambda: Mixed(lambda h: h[torch.arange(len(h)) % 4]),
    "after the fourth": lambda: Mixed(lambda h: torch.cat([h[:4], h[4:].cumsum(0)])),
    "flip": lambda: Mixed(lambda h: h.flip(0)),
    "mean": lambda: Mixed(lambda h: h - h.mean(0)),
    "in the gradient": lambda: Mixed(in_gradient),
}


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory().double()


USES: dict[str, Callable[[nn.Module], Any]] = {
    "kernel": lambda net: linnet.linearize(net).kernel(X),
    "jacobian": lambda net: linnet.linearize(net).jacobian(X),
    "dual fit": lambda net: linnet.fit(linnet.linearize(net), (X, Y), ridge=1.0, solver="dual"),
    "cg fit": lambda net: linnet.fit(linnet.linearize(net), (X, Y), ridge=1.0, solver="cg"),
    "curvature": lambda net: linnet.curvature(net, (X, Y), Gaussian(), structure="full"),
    "kfac": lambda net: linnet.curvature(net, (X, Y), Gaussian(), structure="kfac"),
    "laplace": lambda net: linnet.Laplace(net, Gaussian(), "full").fit((X, Y)),
    "function-space gp": lambda net: linnet.TangentGP(net, Gaussian(0.5), "function").fit(X, Y),
    "parameter-space gp": lambda net: linnet.TangentGP(net, Gaussian(0.5), "parameter").fit(X, Y),
}


PAIRS = [
    pytest.param(factory, use, id=f"{name}-{kind}")
    for name, factory in MIXING.items()
    for kind, use in USES.items()
    if kind in ("kernel", "cg fit") or name in ("sequence-first", "by place", "in the gradient")
]


@pytest.mark.parametrize(("factory", "use"), PAIRS)
@pytest.mark.thinned(3)
def test_networks_whose_examples_see_each_other(
    factory: Callable[[], nn.Module], use: Callable[[nn.Module], Any]
) -> None:
    with pytest.raises(ModelError, match="changes") as told:
        use(made(factory))
    assert "To fix it" in str(told.value)


@pytest.mark.parametrize("factory", MIXING.values(), ids=MIXING)
def test_the_preflight_finds_them(factory: Callable[[], nn.Module]) -> None:
    report = linnet.preflight(made(factory), X)
    assert not report.ok
    assert str(report).startswith("NOT ready")


def test_recurrent_layers_are_told_of_batch_first() -> None:
    with pytest.raises(ModelError, match="batch_first=True"):
        linnet.linearize(made(Sequences)).kernel(X)


@pytest.mark.parametrize("name", ["sequence-first", "cumsum"])
def test_one_example_is_put_after_itself(name: str) -> None:
    assert not linnet.preflight(made(MIXING[name]), X[:1]).ok
    with pytest.raises(ModelError, match="changes"):
        linnet.linearize(made(MIXING[name])).kernel(X[:1])


def test_one_example_is_put_after_its_half() -> None:
    assert not linnet.preflight(made(lambda: Mixed(lambda h: h[torch.zeros(len(h)).long()])), X[:1]).ok


def test_what_one_example_does_not_show_is_found_in_the_first_larger_batch() -> None:
    lin = linnet.linearize(made(MIXING["after the fourth"]))
    lin.kernel(X[:1])
    lin.kernel(X[:3])
    for use in (lin.kernel, lin.jacobian, lambda x: lin.vjp(x, Y)):
        with pytest.raises(ModelError, match="changes"):
            use(X)


def at_one_place(h: Tensor) -> Tensor:
    """An example in the second half of a batch of more than 32 is moved, no matter which one it is."""
    return h + (torch.arange(len(h)) == 20)[:, None] if len(h) > 30 else h


def in_descending_order(h: Tensor) -> Tensor:
    """What packing of sequences asks for: an order of the batch."""
    if len(h) > 1 and not bool((h[1:, 0] <= h[:-1, 0]).all()):
        raise RuntimeError("examples must be sorted")
    return h


@pytest.mark.parametrize("mix", [at_one_place, in_descending_order])
def test_the_order_of_a_large_batch_matters(mix: Callable[[Tensor], Tensor]) -> None:
    model = Mixed(mix).double()
    x = real(40, 3, 4)
    x = x[torch.tanh(model.first(x.flatten(1)))[:, 0].argsort(descending=True)]
    with pytest.raises(ModelError):
        linnet.curvature(model, x, Gaussian(), passes=Passes(block=40))


class Tokens(nn.Module):
    """Integers that are looked up, and a scale that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 5), nn.Linear(5, 2)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        h = self.table(ids) * mask[..., None]
        return self.last(h.sum(1) / mask.sum(1, keepdim=True) * scale)


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("kind", [tuple, dict])
def test_tokens_and_shared_inputs_raise_no_alarm(n: int, kind: type) -> None:
    ids = torch.randint(0, 7, (n, 4), generator=torch.Generator().manual_seed(0))
    mask, scale = (ids > 0).double(), real(1, 5) if n > 1 else real(5)
    mask[:, 0] = 1
    x: Any = (ids, mask, scale) if kind is tuple else {"ids": ids, "mask": mask, "scale": scale}
    net = made(Tokens)
    assert linnet.preflight(net, x).ok
    assert_near(linnet.linearize(net).kernel(x), kernel_oracle(jacobian_oracle(net, x)))


@pytest.mark.parametrize("seed", range(5))
def test_an_output_near_zero_raises_no_alarm_in_single_precision(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 200), nn.ReLU(inplace=True), nn.BatchNorm1d(200), nn.Linear(200, 1))
    x = real(40, 12, seed=seed).float()
    with torch.no_grad():
        net.eval()[-1].bias.sub_(net(x)[0])  # type: ignore[operator, union-attr, arg-type]
    assert linnet.preflight(net, x).ok
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=7)
    assert linnet.fit(linnet.linearize(net), loader, ridge=1.0).predict(x).shape == (40, 1)


def test_a_shared_input_as_long_as_the_batch_is_told() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return self.last(x * w)

    net, w = made(Weighted), real(4, seed=2)
    for use in (linnet.linearize(net).kernel, linnet.linearize(net).jacobian, linnet.linearize(net).base):
        x = real(4, 4)
        if use.__name__ == "base":
            assert_near(use((x, w)), net(x, w).detach())  # the batch is not cut
            continue
        with pytest.raises(ModelError, match="None"):
            use((x, w))
        assert use((x, w[None])) is not None
    one = linnet.linearize(net)
    assert_near(one.kernel((real(5, 4), w)), kernel_oracle(jacobian_oracle(net, (real(5, 4), w))))


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("each", [False, True])
def test_random_networks_are_refused(n: int, each: bool) -> None:
    net = Mixed(lambda h: h + torch.rand(h.shape if each else ()))
    for call in (
        lambda: linnet.linearize(net.double()).kernel(X[:n]),
        lambda: linnet.adapt(net.double(), (X, Y)),
    ):
        with pytest.raises(ModelError, match="is random in evaluation mode"):
            call()
    assert not linnet.preflight(net, X[:n]).ok
