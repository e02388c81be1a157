"""Networks whose operations or weights cannot be seen are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import FileFormatError, InputError, ModelError
from linnet.likelihoods import Categorical

X = torch.linspace(-1, 1, 18).view(6, 3).sin()
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def network(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.trace(network(nn.Tanh()), X)  # type: ignore[no-untyped-call]
    return nn.Sequential(made)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return network(nn.Tanh())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (scripted, "TorchScript"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "no shape yet"),
        (on_meta, "meta device"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [linnet.linearize, lambda m: linnet.curvature(m, (X, Y), Categorical())],
    ids=["linearize", "curvature"],
)
def test_they_are_refused(
    make: Callable[[], nn.Module], words: str, use: Callable[[nn.Module], object]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    with pytest.raises(ModelError, match=words) as told:
        use(model)
    assert "To fix it" in str(told.value)


def test_a_lazy_network_that_has_run_is_a_network() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyLinear(2))
    model(X)
    assert linnet.linearize(model).space.dim == 8


def test_a_curvature_knows_the_modules_of_its_network(tmp_path: Path) -> None:
    linnet.curvature(network(nn.ReLU()), (X, Y), Categorical()).save(tmp_path)
    assert linnet.load_curvature(tmp_path, network(nn.ReLU())).shape == (26, 26)
    with pytest.raises(FileFormatError, match="its module '1' is Tanh, and was ReLU"):
        linnet.load_curvature(tmp_path, network(nn.Tanh()))


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac", "ekfac"])
def test_wrong_numbers_are_called_what_they_are(structure: str) -> None:
    G = linnet.curvature(network(nn.Tanh()), (X, Y), Categorical(), structure=structure)
    with pytest.raises(InputError, match="multiplier is -2"):
        G.scaled(-2)
    with pytest.raises(InputError, match="damping is nan"):
        G.damped(float("nan"))


class Named(nn.Module):
    """Returns its outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.layer(x)}


@pytest.mark.parametrize("output", [3, ["scores"], 0.5])
def test_an_output_that_is_none_is_refused(output: Any) -> None:
    with pytest.raises(InputError, match="output="):
        linnet.linearize(nn.Linear(3, 2), output=output)


def test_a_missing_part_of_the_outputs_is_named() -> None:
    lin = linnet.linearize(Named(), output="logits")
    with pytest.raises(ModelError, match="'scores'"):
        lin(torch.zeros(1, 3))
    assert linnet.linearize(Named(), output="scores")(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(ModelError, match="without a part 'nothing'"):
        linnet.linearize(nn.Linear(3, 2), output="nothing")(torch.zeros(1, 3))
