"""Derivatives that are not finite where the outputs are: an error that names the example and the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import LinnetError, ModelError, NumericalError
from linnet.likelihoods import Categorical, Gaussian
from linnet.tangent.batch import place_of, take

BAD = 7  # the example at which the derivative is infinite
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 4, generator=GENERATOR)
Y, T = torch.arange(12) % 3, torch.randn(12, 3, generator=GENERATOR)
Q = X.clone()
Q[BAD] = 0


class Kinked(nn.Module):
    """A layer, something of it whose derivative at 0 is not finite, and another layer."""

    def __init__(self, kink: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.kink, self.last = nn.Linear(4, 6, bias=False), kink, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.kink(self.first(x)))
        return out


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda h: h.square().sqrt(),
    "norm": lambda h: h * h.square().sum(-1, keepdim=True).sqrt(),
    "power": lambda h: h.abs() ** 0.5,
}


@pytest.fixture(scope="module", params=["root", "norm", "power"])
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return Kinked(KINKS[request.param])


@pytest.fixture(scope="module")
def lin(net: nn.Module) -> linnet.Linearized:
    return linnet.linearize(net)


ASKED: dict[str, Callable[[Any, Any], object]] = {
    "lin()": lambda net, lin: torch.no_grad()(lin)(Q),
    "kernel": lambda net, lin: lin.kernel(Q),
    "kernel of two": lambda net, lin: lin.kernel(X, Q, form="trace"),
    "gram": lambda net, lin: linnet.spectrum.gram(net, Q),
    "jvp": lambda net, lin: lin.jvp(Q, lin.theta0),
    "vjp": lambda net, lin: lin.vjp(Q, torch.ones(12, 3)),
    "jacobian": lambda net, lin: lin.jacobian(Q),
    "predict": lambda net, lin: linnet.fit(lin, (X, T)).predict(Q),
    "predictive": lambda net, lin: linnet.fit(lin, (X, T)).predictive(Q),
    "cg": lambda net, lin: linnet.fit(lin, (X, T), solver="cg").predict(Q),
    "cross-entropy": lambda net, lin: linnet.fit(lin, (X, Y), "cross-entropy").predict(Q),
    "influence": lambda net, lin: linnet.audit.influence(linnet.fit(lin, (X, T)), Q),
    "loss influence": lambda net, lin: linnet.audit.loss_influence(linnet.fit(lin, (X, T)), Q, T),
    "gp": lambda net, lin: linnet.TangentGP(net, Gaussian()).fit(X, T).predictive(Q),
    "laplace": lambda net, lin: linnet.Laplace(net, Categorical()).fit((X, Y)).predictive(Q),
    "fit": lambda net, lin: linnet.fit(lin, (Q, T)),
    "adapt": lambda net, lin: linnet.adapt(net, (Q, Y)),
    "curvature": lambda net, lin: linnet.curvature(net, (Q, Y), Categorical()),
    "variance": lambda net, lin: linnet.curvature(net, (X, Y), Categorical()).output_variance(Q),
    "alignment": lambda net, lin: linnet.spectrum.alignment(net, (Q, Y)),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.thinned(3)
def test_the_example_and_the_layer_are_named(asked: str, net: nn.Module, lin: linnet.Linearized) -> None:
    with torch.no_grad():
        assert bool(net(Q).isfinite().all())
        for value in lin.delta.values():
            value.fill_(0.1)
    with pytest.raises(NumericalError, match=f"example {BAD} .*'first.weight'") as told:
        ASKED[asked](net, lin)
    assert "float64" not in str(told.value)  # which has the same derivative


def test_preflight_is_not_ready(net: nn.Module) -> None:
    for batch in (Q, torch.cat([Q[BAD:], Q[:BAD]])):
        found = linnet.preflight(net, batch)
        assert not found.ok
        assert "'first.weight'" in found.findings[0]


def test_what_was_said_of_one_example_does_not_stay(net: nn.Module) -> None:
    """The rules hold for the next batch, which has a derivative."""
    lin = linnet.linearize(net)
    with pytest.raises(NumericalError):
        lin.kernel(torch.cat([Q[BAD:], Q[:BAD]]))  # the first example of all, which plans are made on
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (X,)))(dict(net.named_parameters()))
    rows = torch.cat([j.reshape(36, -1) for j in J.values()], 1)
    torch.testing.assert_close(lin.kernel(X).reshape(36, 36), rows @ rows.T, rtol=1e-4, atol=1e-4)
    assert not linnet.preflight(lin, X).parameters[0].exact


@pytest.mark.parametrize("scale", [1e20, 1e37])
def test_overflow_is_an_error_with_a_remedy(scale: float, tmp_path: Path) -> None:
    """A product of finite numbers beyond float32; in float64 there is an answer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    lin, big = linnet.linearize(net), X * scale
    asked: list[Callable[[], object]] = [
        lambda: lin.kernel(big),
        lambda: lin.kernel(big, form="trace"),
        lambda: linnet.fit(lin, (X, T)).predictive(big).variance,
        lambda: linnet.spectrum.gram(nn.Linear(4, 2), big, file=tmp_path / "kernel.npy"),
        lambda: linnet.Laplace(net, Categorical()).fit((X, Y)).predictive(big).variance,
    ]
    for ask in asked:
        with pytest.raises(NumericalError, match=r"example 0 .*float64"):
            ask()
    wide = linnet.linearize(net.double()).kernel(big.double())
    assert bool(wide.isfinite().all())
    outputs = linnet.linearize(nn.Linear(4, 2)).base
    with pytest.raises(ModelError, match="example 0"):
        outputs(X * 3e38)


def test_every_answer_to_huge_inputs_is_finite_or_an_error() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    lin = linnet.linearize(net)
    fit = linnet.fit(lin, (X, T))
    for scale in (1e18, 1e20, 1e30, 1e37):
        big = X * scale
        for ask in (
            lambda big=big: lin.vjp(big, torch.ones(12, 3), like="flat"),
            lambda big=big: lin.kernel(big, form="diagonal"),
            lambda big=big: fit.predict(big),
            lambda big=big: fit.predictive(big).variance,
            lambda big=big: linnet.audit.influence(fit, big).outputs,
            lambda big=big: linnet.audit.loss_influence(fit, big, T),
            lambda big=big: linnet.curvature(net, (big, Y), Categorical(), structure="block").dense(),
        ):
            try:
                found = ask()
            except LinnetError:
                continue
            assert bool(found.isfinite().all())


def test_an_example_goes_by_its_place_in_the_whole() -> None:
    x = {"a": torch.arange(40.0)[:, None], "shared": torch.ones(3)}
    part = take(take(x, [30, 4, 17, 9, 2]), slice(1, 4))
    assert [place_of(part, i) for i in range(3)] == [4, 17, 9] == part["a"][:, 0].tolist()


def smooth(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))


LARGE = X[:3].clone()
LARGE[1] *= 1e38
OVERFLOWING: dict[str, Callable[[nn.Module], object]] = {
    "jvp": lambda net: (lin := linnet.linearize(net)).jvp(LARGE, 1e10 * torch.ones(lin.space.dim)),
    "vjp": lambda net: linnet.linearize(net).vjp(LARGE, 1e10 * torch.ones(3, 3)),
    "predict": lambda net: linnet.fit(linnet.linearize(net), (X, Y)).predict(LARGE),
    "counterfactual": lambda net: linnet.audit.counterfactual(
        linnet.fit(linnet.linearize(net), (X, 1e3 * T)), [0], [[1e3, 0.0, 0.0]], LARGE
    ),
    "adapt": lambda net: linnet.adapt(net, (X, 1e3 * T), weight=0.5, ridge=1.0).predict(LARGE),
}


@pytest.mark.parametrize("asked", OVERFLOWING)
def test_products_that_overflow_are_told(asked: str) -> None:
    with pytest.raises(LinnetError, match=r"overflow|finite"):
        OVERFLOWING[asked](smooth(nn.Softplus()))


def test_large_inputs_whose_products_are_finite_are_let_through() -> None:
    net, large = smooth(nn.Tanh()), LARGE.clone()
    large[1] = X[1] * 1e20
    lin = linnet.linearize(net)
    for found in (linnet.fit(lin, (X, Y)).predict(large), lin.vjp(large, torch.ones(3, 3), "flat")):
        assert bool(found.isfinite().all())
