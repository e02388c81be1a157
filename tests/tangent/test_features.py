"""Kernel features: gradients or factors, whichever is cheaper, with the same result."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.tangent import features as features_module
from linnet.tangent.capture import capture
from linnet.tangent.features import KernelFeatures, Treatment, TreatmentChanged, outline, reduce
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
from linnet.tangent.tiles import kernel_tile
from tests.fitting.problems import near, real
from tests.oracles.dense import kernel_oracle
from tests.zoo import case

assert features_module is sys.modules["linnet.tangent.features"]
OUTPUTS: tuple[Any, ...] = ("full", "trace", "diagonal", "sum")
NETS = [
    "mlp-tanh", "lenet", "mobilenet", "conv1d", "conv3d", "vit-mha", "encoder-batch-second", "bert-eager",
    "tied-embedding", "tied-linears", "tied-transpose", "shared-module", "shared-conv", "padding-modes",
    "contractions", "gpt2-eager", "padding-index", "decoder", "upsampler", "transposed-convs",
]  # fmt: skip


def cheapest(captured: Any, names: list[str], pairs: tuple[int, int], form: Any) -> Treatment:
    found = outline(captured, names, pairs, form)
    return found.treatment(found.cheapest)


TWO_WAYS = ("tied-transpose", "contractions")  # weights read as they are and transposed have no common form


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("factors", [True, False])
@pytest.mark.thinned(12)
def test_both_ways_give_the_same_kernel(name: str, factors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients formed for everything, and factors kept for everything that has them."""
    monkeypatch.setattr(features_module, "_pays", lambda *_: factors)
    animal = case(name)
    function = Functional(animal.model(), output=animal.output)
    captured = capture(function, animal.x1)
    treatment = cheapest(captured, function.names, (4, 3), "full")
    if name not in TWO_WAYS:
        assert bool(treatment.factored) == factors
    assert not treatment.riding or factors
    for outputs in OUTPUTS:
        near(
            gram(function, animal.x1, animal.x2, form=outputs),
            kernel_oracle(animal.j1, animal.j2, outputs),
        )


def chosen(model: nn.Module, x: Tensor, pairs: tuple[int, int], outputs: Any = "full") -> Treatment:
    function = Functional(model)
    return cheapest(capture(function, x, outputs), function.names, pairs, outputs)


def test_the_cheaper_way_is_taken() -> None:
    """A wide layer without sharing keeps factors; many positions and few features form gradients."""
    wide = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 2))
    assert "0.weight" in chosen(wide, real(3, 50, dtype=torch.float32), (100, 100)).factored
    long = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Flatten(), nn.Linear(2 * 198, 2))
    assert "0.weight" not in chosen(long, real(3, 2, 200, dtype=torch.float32), (100, 100)).factored
    few = nn.Sequential(
        nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64, 2)
    )  # one position, 64 · 9 · 64 gradients
    assert "0.weight" in chosen(few, real(3, 64, 3, 3, dtype=torch.float32), (100, 100)).factored


def test_a_bias_rides_with_its_weight_and_alone_without_it() -> None:
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 2))
    x = real(3, 50, dtype=torch.float32)
    assert chosen(model, x, (9, 9)).riding["0.bias"] == "0.weight"
    function = Functional(model, ["0.bias"])
    treatment = cheapest(capture(function, x), function.names, (9, 9), "full")
    assert treatment == Treatment({}, {})


def test_a_bias_shared_by_two_layers_rides_with_neither() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(40, 30), nn.Linear(40, 30)
            self.second.bias = self.first.bias

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x)) + self.second(x).sin()

    torch.manual_seed(0)
    model = Shared().double()
    x = real(3, 40)
    treatment = chosen(model, x, (50, 50))
    assert set(treatment.factored) == {"first.weight", "second.weight"}
    assert treatment.riding == {}
    from tests.oracles.dense import jacobian_oracle

    near(gram(Functional(model), x), kernel_oracle(jacobian_oracle(model, x)))


def reduced(name: str) -> tuple[Functional, Any, Treatment, KernelFeatures]:
    animal = case(name)
    function = Functional(animal.model(), output=animal.output)
    captured = capture(function, animal.x1)
    treatment = cheapest(captured, function.names, (100, 100), "full")
    return function, captured, treatment, reduce(captured, function.names, treatment)


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "bert-eager", "tied-embedding"])
def test_parts_rooms_and_bytes(name: str) -> None:
    function, captured, treatment, whole = reduced(name)
    animal = case(name)
    tensors = [
        whole.rows,
        *(t for layer in whole.layers.values() for t in (layer.factors.a, layer.factors.g)),
    ]
    assert whole.nbytes == sum(t.nbytes for t in tensors)
    assert whole.hollow().nbytes == whole.nbytes
    assert whole.hollow().rows.device.type == "meta"
    part = whole.part(1, 3)
    near(kernel_tile(part, whole, "full"), kernel_oracle(animal.j1[1:3], animal.j1))
    assert part.rows.data_ptr() == whole.rows[1:].data_ptr()
    room = whole.hollow().room_for(6, torch.device("cpu"))
    assert room.n == 6
    assert room.nbytes == whole.nbytes // 4 * 6
    reduce(captured, function.names, treatment, room.part(2, 6))
    near(kernel_tile(room.part(2, 6), whole, "full"), kernel_oracle(animal.j1))


class Toggles(nn.Module):
    """A layer that is used once or twice, as the width of the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(40, 40), nn.Linear(40, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x[:, :40]))
        return self.head(torch.tanh(self.layer(h)) if x.shape[1] > 40 else h)


def test_a_use_that_comes_later_is_noticed() -> None:
    torch.manual_seed(0)
    function = Functional(Toggles().double())
    treatment = cheapest(capture(function, real(3, 40)), function.names, (9, 9), "full")
    assert treatment.factored["layer.weight"] == 1
    with pytest.raises(TreatmentChanged) as change:
        reduce(capture(function, real(2, 41)), function.names, treatment)
    assert change.value.name == "layer.weight"
