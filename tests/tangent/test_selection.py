"""``params=``: by keyword, name, regular expression, module or predicate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.tangent.selection import select_parameters
from tests.refusals import refused


class Block(nn.Module):
    """Linear layers, a norm, a LoRA pair, a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.lora_A = nn.Parameter(torch.zeros(4, 2))
        self.lora_B = nn.Parameter(torch.zeros(2, 4))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)


class Net(nn.Module):
    """Two blocks and a head; the embedding is tied to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head_bias = nn.Parameter(torch.zeros(2))
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.embed.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


NET = Net()
ALL = [name for name, p in NET.named_parameters() if p.is_floating_point()]
BLOCK = ["norm.weight", "norm.bias", "fc.weight", "fc.bias", "lora_A", "lora_B"]


def ordered(names: list[str]) -> list[str]:
    return sorted(names, key=ALL.index)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, ALL),
        ("all", ALL),
        ("last-layer", ["head.weight", "head.bias"]),
        ("last_layer", ["head.weight", "head.bias"]),
        ("lora", [f"blocks.{i}.{n}" for i in (0, 1) for n in ("lora_A", "lora_B")]),
        ("bias", [n for n in ALL if n.endswith("bias")]),
        ("biases", [n for n in ALL if n.endswith("bias")]),
        (r"^blocks\.1\.", [f"blocks.1.{n}" for n in BLOCK]),
        (r"fc\.weight$", ["blocks.0.fc.weight", "blocks.1.fc.weight"]),
        (["head.bias", "embed.weight"], ["embed.weight", "head.bias"]),
        (("head.bias", "head.bias"), ["head.bias"]),
        (["decoder.weight"], ["embed.weight"]),  # tied: the second name stands for the first
        (NET.blocks[0], [f"blocks.0.{n}" for n in BLOCK]),
        (NET.decoder, ["embed.weight", "decoder.bias"]),
        (NET, ALL),
        (
            lambda name, p: p.ndim == 2 and "lora" not in name,
            [n for n in ALL if n.endswith("weight") and "norm" not in n],
        ),
    ],
)
def test_selections(params: Any, expected: list[str]) -> None:
    assert select_parameters(NET, params) == ordered(expected)


def test_no_integer_is_ever_selected() -> None:
    assert "blocks.0.steps" in dict(NET.named_parameters())
    assert not any("steps" in name for name in select_parameters(NET, lambda *_: True))


def test_frozen_parameters_are_left_out_unless_all_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert select_parameters(model) == ["1.weight", "1.bias"]
    assert select_parameters(model, "all") == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert select_parameters(model, ["0.bias"]) == ["0.bias"]
    model.requires_grad_(False)
    assert select_parameters(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_last_layer_of_a_network_that_ends_in_a_norm_or_a_bare_parameter() -> None:
    assert select_parameters(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "last-layer") == [
        "0.weight",
        "0.bias",
    ]
    assert select_parameters(nn.Conv1d(1, 2, 3), "last-layer") == ["weight", "bias"]


def test_many_names_are_cut_short() -> None:
    error = refused(InputError, lambda: select_parameters(NET, "encoder"), "and ")
    assert str(error).count("'") < 25


def test_complex_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    refused(ModelError, lambda: select_parameters(model), "'phase'", "complex", "params=")
    assert select_parameters(model, "0") == ["0.weight", "0.bias"]
