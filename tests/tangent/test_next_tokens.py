"""Labels of causal networks: those of the own token are moved, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError, ModelError
from linnet.likelihoods import Categorical
from linnet.tangent.data import ALONE, SHIFTED, Data

WORDS = 11


class Causal(nn.Module):
    """A network as those of Hugging Face are called."""

    def __init__(self, encodes: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)
        self.config = SimpleNamespace(is_encoder_decoder=encodes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids).cumsum(1))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(WORDS, (6, 5), generator=torch.Generator().manual_seed(0))


def moved(y: Tensor, by: int) -> Tensor:
    return nn.functional.pad(y[:, by:], (0, by), value=-100)


@pytest.mark.parametrize("hidden", [0, 2])
def test_labels_of_the_own_token_are_moved_once(ids: Tensor, hidden: int) -> None:
    own = ids.clone()
    own[:, :hidden] = -100
    found = Data.of({"input_ids": ids, "labels": own}, Causal())
    assert torch.equal(found.y, moved(own, 1))
    assert SHIFTED in found.notes
    again = Data.of({"input_ids": ids, "labels": moved(own, 1)}, Causal())
    assert torch.equal(again.y, moved(own, 1))
    assert SHIFTED not in again.notes


class PreTrainedModel(nn.Module):
    """What networks of Hugging Face are recognized by."""


@pytest.mark.parametrize("name", ["OwnForCausalLM", "SeesForConditionalGeneration"])
@pytest.mark.parametrize("inherits", [False, True])
@pytest.mark.parametrize("encodes", [False, True])
def test_networks_that_move_labels_are_known_by_their_classes(
    ids: Tensor, name: str, inherits: bool, encodes: bool
) -> None:
    kind: type[nn.Module] = type(name, (Causal, PreTrainedModel), {})
    net = (type("Mine", (kind,), {}) if inherits else kind)(encodes)
    found = Data.of({"input_ids": ids, "labels": ids}, net)
    assert torch.equal(found.y, ids if encodes else moved(ids, 1))


@pytest.mark.parametrize("own", [False, True])
def test_labels_that_say_nothing_are_read_as_those_of_the_fit(ids: Tensor, own: bool, tmp_path) -> None:
    class OwnForCausalLM(Causal, PreTrainedModel):
        pass

    torch.manual_seed(0)
    net = OwnForCausalLM().double()
    y = ids if own else moved(ids, 1)
    lin = linnet.linearize(net)
    fit = linnet.fit(lin, {"input_ids": ids, "labels": y}, "cross-entropy", axis=-1, ridge=1e9)
    fit.save(tmp_path)

    def expected(x: Tensor, labels: Tensor) -> Tensor:
        logits = net(x).detach().transpose(1, 2)
        return nn.functional.cross_entropy(logits, labels, reduction="none").sum(1)

    x, alone = ids[:, :-1], torch.full_like(ids[:, 1:], -100)
    alone[:, -1] = (ids[:, -2] + 1) % WORDS  # of the last position, and not the token there
    same = torch.full((1, 4), 3)
    for one in (fit, linnet.load(tmp_path, lin)):
        query = {"input_ids": x, "labels": alone}
        by_position = expected(x, moved(alone, 1) if own else alone)
        torch.testing.assert_close(one.losses(query).detach(), by_position, rtol=1e-5, atol=1e-5)
        repeated = expected(same, moved(same, 1) if own else same)
        found = one.losses({"input_ids": same, "labels": same}).detach()
        torch.testing.assert_close(found, repeated, rtol=1e-5, atol=1e-5)


def test_labels_of_the_last_position_are_those_of_the_token_behind(ids: Tensor) -> None:
    class OwnForCausalLM(Causal, PreTrainedModel):
        pass

    alone = torch.full_like(ids, -100)
    alone[:, -1] = (ids[:, -1] + 1) % WORDS
    found = Data.of({"input_ids": ids, "labels": alone}, OwnForCausalLM())
    assert torch.equal(found.y, alone)
    assert ALONE in found.notes
    alone[:, -1] = ids[:, -1]
    assert torch.equal(Data.of({"input_ids": ids, "labels": alone}, OwnForCausalLM()).y, moved(alone, 1))


def test_labels_moved_twice_are_refused(ids: Tensor) -> None:
    with pytest.raises(DataError, match="shifted twice"):
        Data.of({"input_ids": ids, "labels": moved(ids, 2)}, Causal())


def test_other_labels_stay(ids: Tensor) -> None:
    tags = (ids + 1) % WORDS
    assert torch.equal(Data.of({"input_ids": ids, "labels": tags}, Causal()).y, tags)
    copied = Data.of({"input_ids": ids, "labels": ids}, Causal(encodes=True))
    assert torch.equal(copied.y, ids)


def test_fits_curvatures_and_stores_agree(ids: Tensor, tmp_path) -> None:
    torch.manual_seed(0)
    net, likelihood = Causal().double(), Categorical(axis=-1)
    own, next_one = ({"input_ids": ids, "labels": y} for y in (ids, moved(ids, 1)))
    fits = [linnet.fit(linnet.linearize(net), data, "cross-entropy", axis=-1) for data in (own, next_one)]
    assert torch.equal(fits[0].losses(own), fits[1].losses(next_one))
    assert SHIFTED in fits[0].record.reasons["data"]
    one, other = (linnet.curvature(net, [data], likelihood, structure="diagonal") for data in (own, next_one))
    assert torch.equal(one.diagonal(), other.diagonal())
    stores = [
        linnet.audit.GradientStore(tmp_path / name, net, likelihood).add([data])
        for name, data in (("own", own), ("next", next_one))
    ]
    assert torch.equal(stores[0].self_influence(), stores[1].self_influence())


class Prompted(Causal):
    """With a prompt that is trained before every text, as that of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.active_peft_config = SimpleNamespace(peft_type="PeftType.PROMPT_TUNING", num_virtual_tokens=2)
        self.prompt = nn.Parameter(torch.zeros(2, 4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        prompt = self.prompt.expand(len(input_ids), 2, 4)
        return self.head(torch.cat([prompt, self.words(input_ids)], 1).cumsum(1))


def test_a_prompt_has_no_labels_and_foretells_the_first_token(ids: Tensor) -> None:
    whole = torch.cat([torch.full((6, 2), -100), ids], 1)
    for labels in (ids, whole):  # as they are given to peft, and as it fills them up
        found = Data.of({"input_ids": ids, "labels": labels}, Prompted())
        assert torch.equal(found.y, moved(whole, 1))
    torch.manual_seed(0)
    net = Prompted().double()
    fit = linnet.fit(
        linnet.linearize(net, params="prompt"),
        {"input_ids": ids, "labels": ids},
        "cross-entropy",
        axis=-1,
        ridge=1e9,
    )
    logits = net(ids)[:, 1:-1]  # the last of the prompt is before the first token
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").sum(1)
    found_losses = fit.losses({"input_ids": ids, "labels": ids})
    torch.testing.assert_close(found_losses.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_class_for_each_text_is_no_class_of_a_token(ids: Tensor) -> None:
    with pytest.raises(
        InputError, match=r"y has one class for each example, and the network outputs \(5, 11\)"
    ):
        linnet.fit(linnet.linearize(Causal()), (ids, torch.arange(6) % 3))
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for call in (linnet.adapt, lambda net, data: linnet.with_head(net, 3, data=data)):
        with pytest.raises(ModelError, match=r"outputs \(5, 11\) for a text.*model.base_model"):
            call(Causal(), (texts, torch.arange(6) % 3))


def test_fits_of_the_squared_loss_know_how_their_labels_were_read(ids: Tensor, tmp_path) -> None:
    class OwnForCausalLM(Causal, PreTrainedModel):
        pass

    torch.manual_seed(0)
    lin = linnet.linearize(OwnForCausalLM().double())
    fit = linnet.fit(lin, {"input_ids": ids, "labels": ids}, axis=2, ridge=1.0)
    assert fit._function.known.moved
    fit.save(tmp_path)
    assert linnet.load(tmp_path, lin)._function.known.moved


def test_nothing_is_said_where_no_label_counts(ids: Tensor) -> None:
    class OwnForCausalLM(Causal, PreTrainedModel):
        pass

    for net, labels in ((OwnForCausalLM(), torch.full_like(ids, -100)), (Causal(), (ids + 1) % WORDS)):
        assert ALONE not in Data.of({"input_ids": ids[:, :1], "labels": labels[:, :1]}, net).notes
