"""Texts, questions with answers and conversations as batches, on real networks of language made small."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError
from linnet.fitting import CG
from linnet.integrations.text import tokenized
from linnet.tangent.data import SHIFTED

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# of transformers 5.23, where peft 0.21 asks it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
WORDS = ["<pad>", "<end>", "<user>", "<bot>", *"abcdefghijklmnopqrstuvwxyz .?"]


class Letters:
    """A tokenizer of letters, whose pairs "th" are one token."""

    pad_token_id, eos_token_id = 0, 1

    def __init__(self, pair: bool = False) -> None:
        self.pair = pair

    def __call__(self, text: str) -> dict[str, list[int]]:
        ids = [WORDS.index(letter) for letter in text]
        if self.pair:
            ids = [*map(int, " ".join(map(str, ids)).replace("23 11", "99").split())]
        return {"input_ids": ids}

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = False) -> list[int]:
        heads = {"user": "<user>", "model": "<bot>"}
        ids = [
            token
            for one in messages
            for token in [WORDS.index(heads[one["role"]]), *self(one["content"])["input_ids"], 1]
        ]
        return [*ids, WORDS.index("<bot>")] if add_generation_prompt else ids


def letters(row: Tensor) -> str:
    return "".join("_" if i == -100 else WORDS[i] for i in row.tolist())


def test_what_is_learned_of_each_kind_of_example() -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "model", "content": "yes?"},
        {"role": "user", "content": "so"},
        {"role": "model", "content": "no."},
    ]
    examples = ["text", ("who? ", "me"), talk]
    records = [{"text": "text"}, {"prompt": "who? ", "completion": "me"}, {"messages": talk, "id": 7}]
    for given in (examples, records, iter(records)):
        found = tokenized(given, Letters())
        shown = [letters(row[row != -100]) for row in found["labels"]]
        assert shown == ["text<end>", "me<end>", "yes?<end>no.<end>"]
        assert [letters(row) for row in found["labels"]][1].startswith("_____me<end>_")
        assert found["attention_mask"].sum(1).tolist() == [5, 8, 19]
        assert not found["input_ids"][0, 5:].any()
        kept = found["labels"] != -100
        assert torch.equal(found["labels"][kept], found["input_ids"][kept])


def test_a_question_and_its_answer_are_joined_by_a_space() -> None:
    for question, answer, joined in (("who?", "me", " me"), ("who? ", "me", "me"), ("who?", " me", " me")):
        found = tokenized([{"question": question, "answer": answer, "person": 3}], Letters())
        expected = tokenized([(question, joined)], Letters())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    talk = [{"role": "user", "content": "hi"}], [{"role": "model", "content": "yes?"}]
    assert torch.equal(
        tokenized([dict(zip(("question", "answer"), talk, strict=True))], Letters())["labels"],
        tokenized([talk], Letters())["labels"],
    )


def test_tokens_that_cross_into_the_answer_are_learned() -> None:
    found = tokenized([("t", "he")], Letters(pair=True))
    assert found["input_ids"].tolist() == [[99, 8, 1]]
    assert found["labels"].tolist() == [[99, 8, 1]]


def test_long_examples_are_cut() -> None:
    assert tokenized([("who? ", "me too")], Letters(), length=7)["labels"].tolist()[0][-2:] == [16, 8]
    with pytest.raises(DataError, match=r"examples\[1\].*none of which up to length=5 is learned"):
        tokenized(["text", ("who? ", "me")], Letters(), length=5)


@pytest.mark.parametrize(
    "examples", ["text", {"text": "a"}, 3, [3], [("a", "b", "c")], [[]], [{"words": "a"}]]
)
def test_what_is_no_example(examples: Any) -> None:
    with pytest.raises(InputError, match="examples"):
        tokenized(examples, Letters())
    with pytest.raises(DataError, match="is empty"):
        tokenized([], Letters())


# -- networks --------------------------------------------------------------------------------------


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=64, n_embd=16, n_layer=3, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODULES = {llama: ["q_proj", "v_proj", "down_proj"], gpt2: ["c_attn", "c_proj"]}
FACTS = [(f"where is {name}? ", place) for name, place in
         (("ann", "rome"), ("bob", "oslo"), ("cid", "lima"), ("dan", "rome"), ("eve", "oslo"))]  # fmt: skip


@pytest.fixture(params=[llama, pytest.param(gpt2, marks=pytest.mark.long)])
def adapted(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    fan = {"fan_in_fan_out": True} if request.param is gpt2 else {}
    config = peft.LoraConfig(r=2, target_modules=MODULES[request.param], layers_to_transform=[2], **fan)
    made: nn.Module = peft.get_peft_model(request.param(), config).double().eval()
    return made


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_biases_that_peft_trains_are_part_of_the_adapter(bias: str) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], layers_to_transform=[2], fan_in_fan_out=True, bias=bias
    )
    made = peft.get_peft_model(gpt2(), config)
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert linnet.linearize(made, params="lora").parameter_names == trained
    assert any("bias" in name for name in trained) == (bias != "none")


@pytest.mark.long
def test_an_adapter_is_fitted_and_forgets(adapted: nn.Module) -> None:
    data = tokenized(FACTS, Letters())
    lin = linnet.linearize(adapted, params="lora")
    solver = CG(tolerance=1e-11)
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=0.5, solver=solver)
    assert SHIFTED in fit.record.reasons["data"]
    assert "computed once" in fit.record.reasons["solver"]
    assert "of the 16 inputs of the last layer" in fit.record.reasons["solver"]
    counts = (data["labels"] != -100).sum(1)
    own = [
        float(adapted(**{key: part[i : i + 1] for key, part in data.items()}).loss.detach() * counts[i])
        for i in range(len(FACTS))
    ]
    start = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=1e9).losses(data)
    assert torch.allclose(start, torch.tensor(own).double(), atol=1e-4)
    assert float(fit.losses(data).sum()) < 0.97 * sum(own)

    rest = {name: part[[0, 1, 3]] for name, part in data.items()}
    never = linnet.fit(lin, rest, "cross-entropy", axis=-1, ridge=0.5, solver=solver)
    less = fit.forget([2, 4])
    asked = {name: part for name, part in data.items() if name != "labels"}
    assert torch.allclose(less.predict(asked), never.predict(asked), atol=1e-7)
    assert not torch.allclose(fit.predict(asked), never.predict(asked), atol=1e-3)
    assert torch.equal(less.x["input_ids"], rest["input_ids"])

    gone, kept = fit.loo_losses(), fit.losses(data)
    assert bool((gone > kept).all())
    influence = fit.influence(data)
    assert torch.allclose(influence.diagonal(), kept - gone, rtol=0.3)
    assert bool((fit.loss_variance(data) > 0).all())


@pytest.mark.long
def test_everything_takes_the_adapter_by_its_name(adapted: nn.Module, tmp_path: Any) -> None:
    data, likelihood = tokenized(FACTS, Letters()), linnet.likelihoods.Categorical(axis=-1)
    lin = linnet.linearize(adapted, params="lora")
    G = linnet.curvature(adapted, data, likelihood, structure="ekfac", expectation="mc", params="lora")
    assert G.shape[0] == lin.space.dim
    small = linnet.with_sketch(lin, G, dim=8)
    store = linnet.audit.GradientStore(tmp_path / "sketch", small, likelihood).add(data)
    assert store.scores(data).shape == (len(FACTS), len(FACTS))
    whole = linnet.audit.GradientStore(tmp_path / "whole", adapted, likelihood, params="lora").add(data)
    assert whole.folder.dim == lin.space.dim
    assert bool((whole.self_influence() > 0).all())
    posterior = linnet.Laplace(adapted, likelihood, "kfac", params="lora", expectation="mc").fit([data])
    assert posterior.examples == len(FACTS)


def test_what_cannot_be_is_said(adapted: nn.Module) -> None:
    data = tokenized(FACTS, Letters())
    lin = linnet.linearize(adapted, params="lora")
    other = {**data, "input_ids": data["input_ids"] + len(WORDS)}
    other["labels"] = torch.where(data["labels"] == -100, -100, other["input_ids"])
    with pytest.raises(linnet.errors.LinnetError, match=r"out of range"):
        linnet.fit(lin, other, "cross-entropy", axis=-1)
    merged = adapted.merge_and_unload()
    with pytest.raises(InputError, match="merged"):
        linnet.linearize(merged, params="lora")


class Plain:
    """A tokenizer of words and marks without special tokens, whose prompts end in a space of their own."""

    eos_token_id = None

    def __init__(self, forgets: bool = False) -> None:
        self.known: dict[str, int] = {}
        self.forgets = forgets

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = False) -> dict[str, Any]:
        last = len(messages) - 1
        text = ""
        for i, one in enumerate(messages):
            hidden = self.forgets and one["role"] == "model" and i < last
            thought = "" if hidden or one["role"] == "user" or not self.forgets else "<thinks>"
            text += f"\n{one['role']}: {thought}{one['content']}"
        text += "\nmodel: " if add_generation_prompt else ""
        # a space belongs to the word after it, as in most vocabularies
        tokens = re.findall(r" ?[^\s<>]+|<[^<>]*>|\s", text)
        return {"input_ids": [self.known.setdefault(token, len(self.known)) for token in tokens]}

    def shown(self, row: Tensor) -> str:
        names = list(self.known)
        return "".join(names[i] for i in row[row != -100].tolist())


TALK = [
    {"role": "user", "content": "who"},
    {"role": "model", "content": "me too"},
    {"role": "user", "content": "so"},
    {"role": "model", "content": "no"},
]


def test_the_first_word_of_an_answer_is_learned_where_it_takes_the_space_before_it() -> None:
    plain = Plain()
    found = tokenized([TALK], plain)["labels"]
    assert plain.shown(found[0]) == " me too no"


def test_an_answer_to_a_conversation_is_learned_alone() -> None:
    plain = Plain()
    pair = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert plain.shown(tokenized([pair], plain)["labels"][0]) == " no"
    assert plain.shown(tokenized([(TALK[:3], TALK[3:])], plain)["labels"][0]) == " no"


def test_templates_that_change_what_was_said_are_refused() -> None:
    with pytest.raises(DataError, match=r"message 1 of examples\[0\] otherwise"):
        tokenized([TALK], Plain(forgets=True))
    one = {"prompt": TALK[:3], "completion": TALK[3:]}
    plain = Plain(forgets=True)
    assert plain.shown(tokenized([one], plain)["labels"][0]) == "<thinks>no"


def test_a_tokenizer_without_a_template_is_said() -> None:
    with pytest.raises(InputError, match="chat template"):
        tokenized([TALK], lambda text: {"input_ids": [1]})


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_texts_of_another_length_are_added(adapted: nn.Module, longer: bool) -> None:
    lin, solver = linnet.linearize(adapted, params="lora"), CG(tolerance=1e-11)
    more = [("where is fay exactly? ", "in lima")] if longer else [("fay? ", "lima")]
    options: dict[str, Any] = {"axis": -1, "ridge": 0.5, "solver": solver}
    fit = linnet.fit(lin, tokenized(FACTS, Letters()), "cross-entropy", **options)
    whole = tokenized([*FACTS, *more], Letters())
    once = linnet.fit(lin, whole, "cross-entropy", **options)
    grown = fit.update(tokenized(more, Letters()))
    assert torch.allclose(grown.losses(whole), once.losses(whole), atol=1e-7)
    assert torch.allclose(grown.loo_losses(), once.loo_losses(), atol=1e-7)
    assert torch.allclose(grown.forget([len(FACTS)]).losses(whole), fit.losses(whole), atol=1e-7)


@pytest.mark.long
def test_labels_of_causal_networks_are_moved_whatever_they_are(adapted: nn.Module) -> None:
    data = tokenized(FACTS, Letters())
    lin, solver = linnet.linearize(adapted, params="lora"), CG(tolerance=1e-11)
    options: dict[str, Any] = {"axis": -1, "ridge": 0.5, "solver": solver}
    start = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=1e9)
    other = {name: part.clone() for name, part in data.items()}
    at = int((data["labels"][0] != -100).nonzero()[0])
    other["labels"][0, at] = 9  # what is not in the text
    own = [
        float(adapted(**{key: part[i : i + 1] for key, part in other.items()}).loss.detach())
        * int((other["labels"][i] != -100).sum())
        for i in range(len(FACTS))
    ]
    assert torch.allclose(start.losses(other), torch.tensor(own).double(), atol=1e-4)
    fit = linnet.fit(lin, data, "cross-entropy", **options)
    changed = linnet.fit(lin, other, "cross-entropy", **options)
    assert SHIFTED in changed.record.reasons["data"]
    relabelled = fit.relabel([0], other["labels"][:1])
    assert torch.allclose(relabelled.losses(other), changed.losses(other), atol=1e-7)
    # moved before, with the last token known as well
    ids = torch.randint(4, len(WORDS), (4, 7), generator=torch.Generator().manual_seed(0))
    pairs = (ids[:, :-1], ids[:, 1:])
    named = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    whole = {"input_ids": ids, "labels": ids}
    assert torch.allclose(start.losses(pairs), start.losses(named))
    assert torch.allclose(start.losses(named), start.losses(whole), atol=1e-4)
    assert torch.allclose(start.losses((ids, ids)), start.losses(whole))


def test_labels_of_masked_language_models_stay() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=len(WORDS), **sizes)
    net = transformers.BertForMaskedLM(config).double().eval()
    ids = torch.randint(4, len(WORDS), (5, 6), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    lin = linnet.linearize(net, params="cls.predictions.transform.dense")
    fit = linnet.fit(lin, data, "cross-entropy", axis=-1, ridge=1e9)
    assert "data" not in fit.record.reasons or SHIFTED not in fit.record.reasons["data"]
    wanted = float(net(**data).loss.detach()) * ids.numel()
    assert float(fit.losses(data).sum()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
def test_samples_come_as_tokenizers_return_them(adapted: nn.Module) -> None:
    data, lin = tokenized(FACTS, Letters()), linnet.linearize(adapted, params="lora")
    options: dict[str, Any] = {"axis": -1, "ridge": 0.5, "solver": CG(tolerance=1e-11)}
    whole = linnet.fit(lin, data, "cross-entropy", **options).losses(data)
    rows = [{name: part[i] for name, part in data.items()} for i in range(len(FACTS))]
    lists = [{name: part.tolist() for name, part in row.items()} for row in rows]
    ends = data["attention_mask"].sum(1).tolist()
    short = [{k: v[:end] for k, v in row.items()} for row, end in zip(rows, ends, strict=True)]
    for given in (rows, lists, short):
        fit = linnet.fit(lin, given, "cross-entropy", **options)
        assert torch.allclose(fit.losses(data), whole, atol=1e-7)
        assert fit.update(given[:2]).n == len(FACTS) + 2


def test_half_types_are_refused_in_words() -> None:
    net = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"])).bfloat16().eval()
    lin = linnet.linearize(net, params="lora")
    with pytest.raises(InputError, match=r"take part are of type torch\.bfloat16"):
        linnet.fit(lin, tokenized(FACTS, Letters()), "cross-entropy", axis=-1)


def test_a_class_at_every_position_asks_for_its_axis(adapted: nn.Module) -> None:
    lin = linnet.linearize(adapted, params="lora")
    with pytest.raises(DataError, match="axis=-1"):
        linnet.fit(lin, tokenized(FACTS, Letters()), "cross-entropy")
