"""Evaluation mode as another function of the weights, and parameters that nothing depends on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet.errors import ModelError
from linnet.likelihoods import Categorical, Gaussian

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(12) % 3


class Merging(nn.Linear):
    """A low-rank update that eval() adds to the weight, as loralib's does."""

    def __init__(self, d: int, c: int, merges: bool = True) -> None:
        super().__init__(d, c)
        self.a, self.b = nn.Parameter(torch.randn(2, d)), nn.Parameter(torch.randn(c, 2))
        self.merges, self.merged = merges, False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.merges and mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.b.data @ self.a.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.a.T @ self.b.T


class Merged(Merging):
    """The same after the user has merged it: train() leaves the update where it is, as in peft."""

    def __init__(self, d: int, c: int) -> None:
        super().__init__(d, c, merges=False)
        self.merged = True


class Spare(nn.Module):
    """A network with a layer that nothing reads, such as the pooler of a text encoder."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.spare, self.body = nn.Linear(2, 2).double(), body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Caching(nn.Linear):
    """A weight of unit rows that is computed once in eval()."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.kept is None:
            unit = self.weight / self.weight.norm(dim=1, keepdim=True)
            self.kept = None if self.training else unit.detach()
            return F.linear(x, unit, self.bias)
        return F.linear(x, self.kept, self.bias)


class Detached(nn.Linear):
    """A layer through which eval() lets half of the gradient pass."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.training else torch.cat([self.weight[:3], self.weight[3:].detach()])
        return F.linear(x, weight, self.bias)


class Tied(nn.Module):
    """A weight that is used twice, the second time as a copy that eval() makes."""

    kept: Tensor | None = None

    def __init__(self, d: int, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, d))

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.kept = None if mode else self.weight.detach().clone()
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.kept is None else self.kept
        return ((x @ self.weight.T).tanh() @ weight).tanh() @ self.weight.T


class Chained(nn.Module):
    """Code that knows the mode and makes no difference of it, with dropout that is drawn in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(6, 6), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), self.p, self.training)


class LayerDrop(nn.Module):
    """A layer that is left out at random in training, and dropout without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return x + F.dropout(self.layer(x), 0.5, self.training)


def network(first: Callable[[], nn.Module], *between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first(), *between, nn.Tanh(), nn.Linear(6, 3)).double()


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "kernel": lambda net: linnet.linearize(net).kernel(X),
    "jacobian": lambda net: linnet.linearize(net).jacobian(X),
    "fit": lambda net: linnet.fit(linnet.linearize(net), (X, Y)),
    "cg": lambda net: linnet.fit(linnet.linearize(net), (X, Y), solver="cg"),
    "adapt": lambda net: linnet.adapt(net, (X, Y)),
    "laplace": lambda net: linnet.Laplace(net, Categorical()).fit((X, Y)),
    "curvature": lambda net: linnet.curvature(net, (X, Y), Categorical(), structure="block"),
    "gp": lambda net: linnet.TangentGP(net, Gaussian()).fit(X, X[:, :3]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("layer", "named"), [(Merging, "a"), (Caching, "weight"), (Detached, "weight"), (Tied, "weight")]
)
@pytest.mark.thinned(3)
def test_what_matters_in_training_alone_is_refused(
    layer: type[nn.Linear], named: str, mode: bool, call: str
) -> None:
    net = network(lambda: layer(4, 6)).train(mode)
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(ModelError, match=rf"'0\.{named}' of a {layer.__name__}.*params="):
        CALLS[call](net)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


def test_a_layer_that_does_not_merge_has_its_derivative() -> None:
    net = network(lambda: Merging(4, 6, merges=False))
    theta = {name: p for name, p in net.named_parameters() if p.requires_grad}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (X,)))(theta)
    rows = torch.cat([j.reshape(36, -1) for j in J.values()], 1)
    torch.testing.assert_close(linnet.linearize(net).kernel(X).reshape(36, 36), rows @ rows.T)


@pytest.mark.parametrize("call", CALLS)
def test_what_nothing_depends_on_is_said_by_every_call(call: str) -> None:
    net = Spare(network(lambda: nn.Linear(4, 6)))
    with pytest.warns(UserWarning, match=r"2 selected .*'spare.weight'"):
        found = CALLS[call](net)
    if hasattr(found, "record"):
        assert any("spare.weight" in line for line in found.record.warnings)


def test_a_fit_says_it_again() -> None:
    net = network(lambda: Merged(4, 6))
    lin = linnet.linearize(net)
    with pytest.warns(UserWarning, match="unmerge"):
        first = linnet.fit(lin, (X, Y))
    second = linnet.fit(lin, (X, Y))
    assert first.record.warnings == second.record.warnings != ()


@pytest.mark.parametrize("call", CALLS)
def test_merged_adapters_alone_are_refused(call: str) -> None:
    net = network(lambda: Merged(4, 6))
    for name, p in net.named_parameters():
        p.requires_grad_(name in ("0.a", "0.b"))
    with pytest.raises(ModelError, match=r"merged into the weights.*unmerge_adapter"):
        CALLS[call](net)


@pytest.mark.parametrize(
    "between", [(LayerDrop(),), (Chained(0.0),), (Chained(0.5),), (nn.BatchNorm1d(6), nn.Dropout(0.5))]
)
def test_ordinary_networks_are_let_through(between: tuple[nn.Module, ...]) -> None:
    net = network(lambda: nn.Linear(4, 6), *between).train()
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("kernel", "fit", "curvature"):
            CALLS[name](net)
    assert torch.equal(before, torch.get_rng_state())


class Faint(nn.Module):
    """Dropout without a module of what outputs hardly show, as in the attention of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-13 * F.dropout(self.layer(x), 0.5, self.training)


def test_dropout_that_outputs_hardly_show_is_no_other_mode() -> None:
    net = network(lambda: nn.Linear(4, 6), Faint())
    assert bool(linnet.linearize(net, params=r"1\.layer\..*").kernel(X).any())


def test_random_numbers_and_unused_heads_stay_as_they_were() -> None:
    """A parameter without a use is looked at in training mode, where dropout must not draw."""
    net = network(lambda: nn.Linear(4, 6), nn.Dropout(0.5), LayerDrop())
    net[0].register_parameter("spare", nn.Parameter(torch.ones(2).double()))
    before = torch.get_rng_state()
    linnet.linearize(net).kernel(X)
    assert torch.equal(before, torch.get_rng_state())


class Cut(nn.Module):
    """A network that runs without gradients, as a whole or below its head."""

    def __init__(self, mode: Callable[[], Any], whole: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.mode, self.whole = mode, whole

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            h = self.body(x).tanh()
            out = self.head(h)
        return out if self.whole else self.head(h.clone())


def product(net: nn.Module, matrix: str = "gauss-newton") -> Tensor:
    """Of a curvature that is never formed."""
    G = linnet.curvature(net, (X, Y), Categorical(), structure="matrix-free", matrix=matrix)
    return G.mv(torch.ones(G.shape[1], dtype=G.dtype))


DIFFERENTIATING: dict[str, Callable[[nn.Module], Any]] = {
    **CALLS,
    "vjp": lambda net: linnet.linearize(net).vjp(X, torch.ones(len(X), 3)),
    "product": product,
    "hessian": lambda net: product(net, "hessian"),
}


@pytest.mark.parametrize("call", DIFFERENTIATING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.thinned(3)
def test_a_network_that_runs_without_gradients_is_refused(mode: Callable[[], Any], call: str) -> None:
    with pytest.raises(ModelError, match=r"without a gradient in any parameter.*let the caller do that"):
        DIFFERENTIATING[call](Cut(mode, whole=True))


def test_a_body_that_runs_without_gradients_is_said() -> None:
    with pytest.warns(UserWarning, match=r"2 selected parameter\(s\), first 'body.weight'"):
        fit = linnet.adapt(Cut(torch.no_grad, whole=False), (X, Y), weight=0.5)
    assert any("body.weight" in line for line in fit.record.warnings)


class Masking(nn.Module):
    """A vector that stands for what is hidden in training, as in networks of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.layer = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.mask.expand(len(x), -1)[:, :2], x[:, 2:]], 1) if self.training else x
        return self.layer(x)


def test_what_training_alone_uses_is_named_with_how_to_leave_it_out() -> None:
    net = network(lambda: nn.Linear(4, 6), Masking())
    with pytest.raises(ModelError) as error:
        CALLS["kernel"](net)
    remedy = str(error.value).partition("params=")[2].removesuffix(".")
    kernel = linnet.linearize(net, params=eval(remedy)).kernel(X)
    names = [name for name, _ in net.named_parameters() if name != "1.mask"]
    assert torch.equal(kernel, linnet.linearize(net, params=names).kernel(X))
