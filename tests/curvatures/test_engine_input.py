"""Wrong arguments, wrong data and wrong networks: each is an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import linnet
from linnet.curvatures import LowRank, MatrixFree, MonteCarlo, RandomProjection, accumulate
from linnet.errors import DataError, LinnetError, MemoryBudgetError, ModelError, NumericalError
from linnet.likelihoods import (
    Categorical,
    Custom,
)
from tests.curvatures.side_by_side import curvature_of

pytestmark = pytest.mark.usefixtures("float64")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randint(2, (n,))


def call(**options: Any) -> Any:
    """A call that would be right, but for what is given."""
    given = {"model": network(), "data": data(), "likelihood": Categorical(), **options}
    return curvature_of(**given)


def concave(psd: str = "raise") -> Custom:
    return Custom(lambda f, y: -(f - y).square().sum(-1), psd=psd)


def test_the_hessian_of_a_linearization_is_that_of_its_network() -> None:
    model, given = network(), data()
    whole = linnet.curvature(model, given, Categorical(), "full", matrix="hessian").dense()
    lin = linnet.linearize(model, params="last-layer")
    part = linnet.curvature(lin, given, Categorical(), "full", matrix="hessian").dense()
    assert torch.allclose(part, whole[-len(part) :, -len(part) :], rtol=1e-12, atol=1e-14)


def test_a_word_is_its_settings_with_their_defaults() -> None:
    model, given = network(), data()
    for words, settings in (
        (("low-rank", "exact"), (LowRank(), "exact")),
        (("kfac", "mc"), ("kfac", MonteCarlo())),
        (("kfac", "random-projection"), ("kfac", RandomProjection())),
    ):
        one, other = (linnet.curvature(model, given, Categorical(), *way) for way in (words, settings))
        torch.testing.assert_close(one.dense(), other.dense())
    free = linnet.curvature(model, given, Categorical(), MatrixFree())
    v = torch.ones(free.shape[1])
    torch.testing.assert_close(free @ v, linnet.curvature(model, given, Categorical(), "matrix-free") @ v)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block", "full", "kfra"])
def test_an_indefinite_hessian_is_named(structure: str) -> None:
    given = (data()[0], torch.zeros(6, 2))
    if structure != "kfra":
        with pytest.raises(NumericalError, match='psd="clip"'):
            call(data=given, likelihood=concave(), structure=structure)
    clipped = call(data=given, likelihood=concave("clip"), structure=structure)
    assert float(clipped.trace()) == 0.0


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra", "full", "low-rank", "diagonal"])
def test_a_batch_of_one_is_enough(structure: str) -> None:
    x, y = data(1)
    G = call(data=(x, y), structure=structure)
    assert G.made.examples == 1
    assert float(G.trace()) > 0


class Drifting(Dataset[Any]):
    """Other numbers at every read."""

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3), torch.tensor(i % 2)


def test_data_that_change_between_passes_are_found() -> None:
    for changing in (Drifting(), DataLoader(Drifting(), 2)):
        with pytest.raises(DataError, match="augmentation"):
            call(data=changing, structure="ekfac")
        call(data=changing, structure="kfac")  # one pass is enough

    class Growing(Drifting):
        def __len__(self) -> int:
            self.length += 1
            return self.length

    class Fixed(Growing):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.ones(3), torch.tensor(0)

    with pytest.raises(DataError, match="drop_last"):
        call(data=Fixed(), structure="ekfac")


@pytest.mark.parametrize("structure", ["kfac", "kfra"])
def test_an_overflow_is_named_by_layer(structure: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.mul_(1e308)
        model[0].weight.mul_(1e6)
    with pytest.raises(ModelError, match=r"2\.weight"):
        call(model=model, structure=structure)


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "diagonal", "kfra", "low-rank"])
def test_too_little_memory_is_an_error_with_alternatives(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(accumulate, "plan_chunks", never)
    with pytest.raises(MemoryBudgetError, match="100"):
        call(structure=structure, memory=100)


def test_memory_is_asked_for_before_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(3000, 2000), nn.Tanh(), nn.Linear(2000, 2))
    x = torch.randn(2, 3000)
    with pytest.raises(MemoryBudgetError, match="6006002"):
        call(model=model, data=(x, data(2)[1]), structure="full", memory="1GB")


@pytest.mark.parametrize("structure", ["ekfac", "low-rank", "kfac", "block", "full", "kfra", "diagonal"])
def test_singular_matrices_are_named_by_layer(structure: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = network(), data(40)
    x[:, 1] = x[:, 0]
    if structure == "diagonal":
        x[:, 1] = 0.0
    if structure == "ekfac":  # nothing reaches the first layer
        with torch.no_grad():
            model[2].weight.zero_()
    G = call(model=model, data=(x, y), structure=structure, rank=5)
    layer = {"full": "curvature of all", "low-rank": "low-rank curvature"}.get(structure, "curvature of 0")
    for question in (lambda: G.solve(torch.ones(26)), lambda: G.logdet(), lambda: G.inverse()):
        try:
            question()
            said = caplog.text  # solved with a little damping, and a warning the first time
        except NumericalError as error:
            said = str(error)
        # the last layer of a softmax is singular too
        assert layer in said or "curvature of 2" in said
        assert "singular" in said or "positive definite" in said
    assert G.damped(0.1).logdet().isfinite()


def test_all_errors_are_linnets_own() -> None:
    assert issubclass(DataError, LinnetError)
    assert issubclass(MemoryBudgetError, MemoryError)


class Routed(torch.nn.Module):
    """Two experts, of which a router takes one for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 2) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken, out = self.router(x).argmax(-1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            if (taken == i).any():
                out[taken == i] = expert(x[taken == i])
        return out


def test_experts_are_found_in_whatever_order_examples_come() -> None:
    torch.manual_seed(0)
    net, x = Routed().double(), torch.randn(80, 4, dtype=torch.float64)
    sorted_ = net.router(x).argmax(-1).argsort()
    found = [
        linnet.curvature(net, (x[rows], torch.zeros(80, 2)), linnet.likelihoods.Gaussian())
        for rows in (torch.arange(80), sorted_, sorted_.flip(0))
    ]
    whole = [one.diagonal() for one in found]
    torch.testing.assert_close(whole[1], whole[0])
    torch.testing.assert_close(whole[2], whole[0])


def test_parameters_without_elements_take_no_part() -> None:
    class Empty(torch.nn.Module):
        """An adapter of rank 0."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)
            self.a, self.b = (torch.nn.Parameter(torch.zeros(s)) for s in ((0, 3), (2, 0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + x @ self.a.T @ self.b.T

    net, x = Empty(), torch.randn(5, 3)
    assert linnet.linearize(net).parameter_names == ["layer.weight", "layer.bias"]
    assert torch.equal(linnet.linearize(net).kernel(x), linnet.linearize(net.layer).kernel(x))
    data = x, torch.zeros(5, 2)
    one, other = (linnet.curvature(part, data, linnet.likelihoods.Gaussian()) for part in (net, net.layer))
    torch.testing.assert_close(one.diagonal(), other.diagonal())


def test_parameters_without_elements_may_be_named() -> None:
    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.empty = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    net = Empty()
    every = [name for name, _ in net.named_parameters()]
    assert linnet.linearize(net, params=every).parameter_names == ["layer.weight", "layer.bias"]
    with pytest.raises(LinnetError, match="selects none"):
        linnet.linearize(net, params=["empty"])
