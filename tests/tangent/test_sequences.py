"""Sequences of several lengths go through a network without the padding that they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.tangent.functional import Functional
from linnet.tangent.parts import in_parts
from linnet.tangent.sequences import ignores_padding, shortened


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


def texts(n: int = 200, width: int = 50, longest: int = 20) -> dict[str, Tensor]:
    """Sequences of 1 to ``longest`` tokens in ``width`` positions."""
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(width) < torch.randint(1, longest + 1, (n, 1), generator=draw)).long()
    return {"input_ids": torch.randint(1, 30, (n, width), generator=draw) * mask, "attention_mask": mask}


def test_sequences_cost_their_own_length_and_come_back_in_order() -> None:
    net, x = Words(), texts()
    run = lambda part: net(**part)  # noqa: E731
    expected = run(x)
    net.seen = 0
    torch.testing.assert_close(in_parts(net, run, x, 8), expected)
    assert net.seen < 0.35 * x["input_ids"].numel()


@pytest.mark.parametrize("options", [{"masked": False}, {"length": 50}])
def test_networks_to_which_padding_matters_see_it(options: dict[str, Any]) -> None:
    net, x = Words(**options), texts()
    assert not ignores_padding(net, lambda part: net(**part), x)
    torch.testing.assert_close(in_parts(net, lambda part: net(**part), x, 8), net(**x))


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
    assert not ignores_padding(Words(), lambda part: torch.ones(1, 1), x)


def test_padding_on_the_left_stays() -> None:
    x = {name: part.flip(1) for name, part in texts().items()}
    assert shortened(x)["input_ids"].shape == (200, 50)


def test_entries_beside_the_tokens_keep_their_size() -> None:
    mask = texts()["attention_mask"]
    x = {**texts(), "token_type_ids": mask, "prices": torch.ones(200, 49), "kind": torch.ones(200)}
    longest = int(mask.sum(1).max())
    assert [cut.shape[1:] for cut in shortened(x).values()] == [(longest,)] * 3 + [(49,), ()]


def beside(name: str, t: Tensor) -> dict[str, Tensor]:
    return {**texts(), name: t}


@pytest.mark.parametrize(
    "x",
    [
        beside("tags", torch.ones(200, 50, dtype=torch.long)),  # may be padded at other places
        beside("decoder_attention_mask", torch.ones(200, 9, dtype=torch.long)),  # a second text
        beside("attention_mask", torch.ones(50, 50, dtype=torch.long).tril()),  # of all examples
        beside("attention_mask", texts()["attention_mask"] * 2),  # numbers of segments
        beside("attention_mask", texts()["attention_mask"] * (torch.arange(200) != 7).long()[:, None]),
    ],
)
def test_where_a_doubt_is_left_nothing_is_cut(x: dict[str, Tensor]) -> None:
    assert shortened(x) is x
    assert not ignores_padding(Words(), lambda part: torch.ones(1, 1), x)


def test_an_offset_hides_no_padding_and_constant_outputs_tell_nothing() -> None:
    x, net = texts(), Words(masked=False)
    assert not ignores_padding(net, lambda part: 290 + 0.05 * net(**part), x)
    assert not ignores_padding(net, lambda part: torch.cat([net(**part), 0 * net(**part) + 2020], 1), x)
    assert not ignores_padding(net, lambda part: 0 * net(**part), x)
    net = Words()
    assert ignores_padding(net, lambda part: torch.cat([net(**part), 0 * net(**part)], 1), x)  # dead units
    net.attention_type = "block_sparse"  # BigBird's, which a short input would turn off
    assert not ignores_padding(net, lambda part: net(**part), x)


def test_long_texts_are_asked_about_too() -> None:
    def run(part: dict[str, Tensor]) -> Tensor:
        mask = part["attention_mask"]  # padding behind ten words and more is seen
        return net(**part) + (mask.sum(1, keepdim=True) > 10) * mask.shape[1]

    x, net = texts(), Words()
    assert not ignores_padding(net, run, x)
    torch.testing.assert_close(in_parts(net, run, x, 8), run(x))


def test_few_texts_are_not_asked_about() -> None:
    net, x = Words(), texts(3)
    net.seen = 0
    in_parts(net, lambda part: net(**part), x, 8)
    assert net.seen == x["input_ids"].numel()


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
        in_parts(function.model, function.check_runs, x, 8)
