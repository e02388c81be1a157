"""Sequences of several lengths go through a network without the padding that they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.functional import Functional
from linnet.tangent.sequences import ignores_padding, in_parts, shortened


class Words(nn.Module):
    """Token ids to outputs by the mean of their states, which notes how many positions it has seen."""

    def __init__(self, masked: bool = True, length: int | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)
        self.masked, self.length, self.seen = masked, length, 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.length is not None and input_ids.shape[1] != self.length:
            raise ValueError("one length alone")
        self.seen += input_ids.numel()
        weights = attention_mask if self.masked else torch.ones_like(attention_mask)
        states = self.table(input_ids) * weights[..., None]
        return self.head(states.sum(1) / weights.sum(1, keepdim=True))


def texts(n: int = 40, width: int = 50, longest: int = 20) -> dict[str, Tensor]:
    """Sequences of 1 to ``longest`` tokens in ``width`` positions."""
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) < torch.randint(1, longest + 1, (n, 1), generator=draw)).long()
    return {"input_ids": torch.randint(1, 30, (n, width), generator=draw) * mask, "attention_mask": mask}


def test_sequences_cost_their_own_length_and_come_back_in_order() -> None:
    net, x = Words(), texts()
    run = lambda part: net(**part)  # noqa: E731
    expected = run(x)
    net.seen = 0
    torch.testing.assert_close(in_parts(run, x, 8), expected)
    assert net.seen < 0.35 * x["input_ids"].numel()


@pytest.mark.parametrize("options", [{"masked": False}, {"length": 50}])
def test_networks_to_which_padding_matters_see_it(options: dict[str, Any]) -> None:
    net, x = Words(**options), texts()
    assert not ignores_padding(lambda part: net(**part), x)
    torch.testing.assert_close(in_parts(lambda part: net(**part), x, 8), net(**x))


@pytest.mark.parametrize(
    "x",
    [
        texts(longest=1, width=1),  # nothing to cut
        {"input_ids": texts()["input_ids"]},  # no mask
        {**texts(), "attention_mask": (texts()["attention_mask"] - 1) * 1e4},  # added to scores
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_others_stay_as_they_are(x: object) -> None:
    assert not ignores_padding(lambda part: torch.ones(1, 1), x)


def test_padding_on_the_left_stays() -> None:
    x = {name: part.flip(1) for name, part in texts().items()}
    assert shortened(x)["input_ids"].shape == (40, 50)


def test_entries_beside_the_tokens_keep_their_size() -> None:
    x = {**texts(), "prices": torch.ones(40, 50), "kinds": torch.ones(40, 50, dtype=torch.long)}
    cut = shortened(x)
    longest = int(x["attention_mask"].sum(1).max())
    assert [cut[name].shape[1] for name in x] == [longest, longest, 50, longest]


def test_fits_are_those_of_the_padded_texts() -> None:
    torch.manual_seed(0)
    net, x = Words().double(), texts()
    y = x["input_ids"].sum(1) % 3
    short = {name: part[:, :20] for name, part in x.items()}
    long, cut = linnet.adapt(net, (x, y)), linnet.adapt(net, (short, y))
    torch.testing.assert_close(long.predict(x), cut.predict(short))


def test_errors_name_examples_by_their_place_in_all() -> None:
    x, function = texts(), Functional(Words())
    x["input_ids"] %= 29
    x["input_ids"][7, 0] = 29
    function.model.table.weight.data[29] = torch.nan
    with pytest.raises(ModelError, match="first at example 7"):
        in_parts(function.check_runs, x, 8)
