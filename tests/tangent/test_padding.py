"""Sequences of several lengths: what fills them up, and what hides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, ModelError
from linnet.tangent.batch import with_padding

PAD, WIDTH = 7, 6


class LastToken(nn.Module):
    """A classifier that finds the end of a text by the token of padding, as those of decoders do."""

    def __init__(self, token: int | None = PAD) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=token)
        self.embedding, self.score = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        last = (places * (input_ids != PAD)).argmax(1)
        hidden = self.mix(self.embedding(input_ids)).tanh().cumsum(1)
        return self.score(hidden[torch.arange(len(hidden)), last])


def network(**options: Any) -> LastToken:
    torch.manual_seed(0)
    return LastToken(**options).double().eval()


def texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    lengths[0] = longest
    return [torch.randint(8, 20, (n,), generator=generator).tolist() for n in lengths]


def batch(rows: list[list[int]], fill: int = PAD) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[n < len(r) for n in range(longest)] for r in rows]).long(),
    }


Y = torch.arange(12) % 3
ROWS, NEW = texts(12, 6), texts(5, 6, seed=1)


def near(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-8, atol=1e-8))


def test_lists_are_filled_with_the_networks_own_token() -> None:
    fit = linnet.fit(linnet.linearize(network()), (batch(ROWS), Y), ridge=1.0)
    expected = fit.predict(batch(NEW))
    listed = {"input_ids": NEW, "attention_mask": [[1] * len(row) for row in NEW]}
    assert near(fit.predict(listed), expected)
    assert near(fit.predict([{key: value[n] for key, value in listed.items()} for n in range(5)]), expected)
    ones = {"input_ids": ROWS, "attention_mask": [[1] * len(row) for row in ROWS]}
    assert near(linnet.fit(linnet.linearize(network()), (ones, Y), ridge=1.0).predict(batch(NEW)), expected)


@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
@pytest.mark.parametrize("longest", [4, 9])
def test_more_texts_may_be_of_other_lengths(solver: Any, longest: int) -> None:
    same = {"input_ids": torch.tensor([(row * 6)[:6] for row in ROWS])}  # no position is hidden
    same["attention_mask"] = torch.ones_like(same["input_ids"])
    more, labels = batch(texts(6, longest, seed=2)), torch.arange(6) % 3
    fit = linnet.fit(linnet.linearize(network()), (same, Y), ridge=1.0, solver=solver)
    longer = max(6, longest)
    whole = batch([*same["input_ids"].tolist(), *texts(6, longest, seed=2)])
    assert whole["input_ids"].shape[1] == longer
    expected = linnet.fit(linnet.linearize(network()), (whole, torch.cat([Y, labels])), ridge=1.0)
    found = fit.update((more, labels)).predict(batch(NEW))
    assert torch.allclose(found, expected.predict(batch(NEW)), atol=5e-3 if solver == "cg" else 1e-8)


def test_a_mask_that_is_added_to_scores_hides_no_token_by_zeros() -> None:
    ids = torch.tensor([[0, 8, 0]])
    added = {"input_ids": ids, "attention_mask": torch.tensor([[0.0, 0.0, -1e4]])}
    assert torch.equal(with_padding(added, PAD)["input_ids"], ids)
    counted = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0]])}
    assert with_padding(counted, PAD)["input_ids"].tolist() == [[0, 8, PAD]]


def test_filling_that_changes_outputs_is_refused() -> None:
    same = {"input_ids": torch.tensor([(row * 6)[:6] for row in ROWS])}
    same["attention_mask"] = torch.ones_like(same["input_ids"])
    fit = linnet.fit(linnet.linearize(network(token=None)), (same, Y), ridge=1.0)
    with pytest.raises(DataError, match="changes the network's outputs"):
        fit.update((batch(texts(6, 9, seed=2)), torch.arange(6) % 3))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.full((2, 4), 30), "token ids below 20.*tokenizer of this network"),
        (torch.full((2, 12), 8), "at most 10 tokens.*truncation=True, max_length=10"),
        (torch.tensor([8, 9]), r"several texts.*tokenizer\(\[text\]"),
        (torch.ones(2, 4), r"token ids as integers.*input_ids.long\(\)"),
    ],
)
def test_what_is_no_batch_of_its_tokens_is_named(x: Tensor, says: str) -> None:
    net = network()
    net.config.vocab_size, net.config.max_position_embeddings = 20, 10
    net.places = nn.Parameter(torch.zeros(10, WIDTH).double())
    net.register_forward_pre_hook(lambda m, args: m.places[: args[0].shape[1]] + args[0][..., None])
    with pytest.raises(ModelError, match=says):
        linnet.fit(linnet.linearize(net), (x, torch.arange(2)))


def test_a_token_beyond_the_vocabulary_is_named_wherever_it_stands() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, y = torch.randint(8, 20, (12, 4), generator=generator), torch.arange(12) % 3
    wrong = ids.clone()
    wrong[9, 2] = 20
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(20, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    net.config = SimpleNamespace()  # type: ignore[assignment]
    fit, says = linnet.adapt(net, (ids, y)), "token ids below 20.*tokenizer of this network"
    for made in (
        lambda: linnet.adapt(net, (wrong, y)),
        lambda: fit.predict(wrong),
        lambda: fit.update((wrong, y)),
        lambda: linnet.curvature(net, (wrong, y), linnet.likelihoods.Categorical()),
    ):
        with pytest.raises(ModelError, match=says):
            made()


def test_padding_without_a_mask_is_said() -> None:
    ids = batch(ROWS)["input_ids"]
    with pytest.warns(UserWarning, match="ends in the network's padding, token 7, and has no mask"):
        linnet.fit(linnet.linearize(network()), (ids, Y), ridge=1.0)
    inside = ids.clone()
    inside[:, 1] = PAD
    linnet.fit(linnet.linearize(network()), (inside, Y), ridge=1.0)
    fit = linnet.fit(linnet.linearize(network()), (batch(ROWS), Y), ridge=1.0)
    with pytest.warns(UserWarning, match="x has no mask, and the training data had one"):
        fit.predict(ids)
    fit.predict(ids[:1, :6])  # which ends in no padding


class Positions(nn.Module):
    """The mean of embeddings that a mask shows, with or without those of positions."""

    def __init__(self, absolute: bool) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(20, WIDTH), nn.Embedding(30, WIDTH)
        self.mix, self.head, self.absolute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), absolute

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        hidden = self.embedding(input_ids)
        if self.absolute:
            at = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
            hidden = hidden + 3 * self.places(at)
        shown = attention_mask[..., None].to(hidden)
        return self.head((self.mix(hidden).tanh() * shown).sum(1) / shown.sum(1))


@pytest.mark.parametrize("absolute", [True, False])
def test_padding_in_front_that_counts_is_said(absolute: bool, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    net, behind = Positions(absolute).double(), batch(texts(20, 9))
    count = (behind["attention_mask"] == 0).sum(1)
    front = {
        name: torch.stack([row.roll(int(n)) for row, n in zip(t, count, strict=True)])
        for name, t in behind.items()
    }
    y = torch.arange(20) % 2

    def said() -> bool:
        found = any("padding in front" in str(one.message) for one in recwarn.list)
        recwarn.clear()
        return found

    fit = linnet.adapt(net, (behind, y))
    assert not said()
    fit.predict(behind)
    assert not said()
    fit.predict(front)
    assert said() == absolute
    linnet.adapt(net, (front, y))
    assert said() == absolute
    places = (front["attention_mask"].cumsum(1) - 1).clamp_min(0)
    own = linnet.adapt(net, ({**front, "position_ids": places}, y))
    assert not said()
    kept = {**behind, "position_ids": (behind["attention_mask"].cumsum(1) - 1).clamp_min(0)}
    torch.testing.assert_close(own.predict(kept), own.predict({**front, "position_ids": places}))
