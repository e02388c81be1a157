"""Networks whose operations or weights cannot be seen are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import FileFormatError, InputError, ModelError, NumericalError
from linnet.likelihoods import Categorical

X = torch.linspace(-1, 1, 18).view(6, 3).sin()
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def network(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2))


def test_a_lazy_network_that_has_run_is_a_network() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyLinear(2))
    model(X)
    assert linnet.linearize(model).space.dim == 8


def test_a_curvature_knows_the_modules_of_its_network(tmp_path: Path) -> None:
    linnet.curvature(network(nn.ReLU()), (X, Y), Categorical()).save(tmp_path)
    assert linnet.load(tmp_path, network(nn.ReLU())).shape == (26, 26)
    with pytest.raises(FileFormatError, match="its module '1' is Tanh, and was ReLU"):
        linnet.load(tmp_path, network(nn.Tanh()))


class Named(nn.Module):
    """Returns its outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.layer(x)}


def test_a_missing_part_of_the_outputs_is_named() -> None:
    lin = linnet.linearize(Named(), output="logits")
    with pytest.raises(ModelError, match="'scores'"):
        lin(torch.zeros(1, 3))
    assert linnet.linearize(Named(), output="scores")(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(ModelError, match="without a part 'nothing'"):
        linnet.linearize(nn.Linear(3, 2), output="nothing")(torch.zeros(1, 3))


class Stateful(nn.Module):
    """Something that is kept from pass to pass, in a buffer, a number or a hidden state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.count = nn.Linear(3, 2), kind, 0
        self.hidden: Tensor | None = None
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.layer(x - self.mean)
        if self.kind == "count":
            self.count += 1
            return self.layer(x) * (1 + self.count)
        self.hidden = x.detach() if self.hidden is None or len(self.hidden) != len(x) else self.hidden + x
        return self.layer(self.hidden)


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    *((lambda kind=kind: Stateful(kind), kind) for kind in ("mean", "count", "hidden")),
    (lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)), "BatchNorm1d"),
    (lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1, track_running_stats=False),
                           nn.Flatten(), nn.Linear(3, 2)), "BatchNorm1d"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_state_and_batch_statistics_are_named(make: Callable[[], nn.Module], named: str) -> None:
    """Neither is random, and neither has to do with the shape of x."""
    model = make()
    for use in (
        lambda: linnet.linearize(model).kernel(X),
        lambda: linnet.fit(linnet.linearize(model), (X, Y)),
        lambda: linnet.curvature(model, (X, Y), Categorical()),
    ):
        with pytest.raises(ModelError, match=named) as told:
            use()
        assert "random" not in str(told.value)
        assert "dtype" not in str(told.value)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(3, 3), torch.ones(2, 3)], layout=layout)
    lin = linnet.linearize(network(nn.Tanh()))
    uses: list[Callable[[], object]] = [
        lambda: lin(x),
        lambda: lin.kernel(x),
        lambda: linnet.fit(lin, (x, torch.tensor([0, 1]))),
        lambda: linnet.adapt(network(nn.Tanh()), (x, torch.tensor([0, 1]))),
        lambda: linnet.preflight(lin, (X[:2], x)),
    ]
    for use in uses:
        with pytest.raises(InputError, match="nested"):
            use()


def test_outputs_without_a_number_are_refused() -> None:
    lin = linnet.linearize(network(nn.Tanh()), output=lambda o: o[:, :0])
    for use in (lambda: lin.kernel(X), lambda: lin(X), lambda: linnet.preflight(lin, X)):
        with pytest.raises(ModelError, match="output="):
            use()


class Casting(nn.Module):
    """A body that casts to bfloat16 by itself, under a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8).bfloat16(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x.bfloat16())).float())
        return out


def test_no_remedy_that_cannot_run() -> None:
    torch.manual_seed(0)
    with pytest.raises(NumericalError, match="casts"):
        linnet.fit(linnet.linearize(Casting()), (X, Y), ridge=1e-3)
