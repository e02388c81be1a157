"""The studies of language models: facts, influences and how sure they are, on the smallest of networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.adapt.encoders import read_gguf
from experiments.language import attribution, peers, sure
from experiments.language.facts import made
from experiments.sources import Images
from linnet.errors import DataError


def test_facts_are_drawn_once_and_wrong_answers_are_wrong() -> None:
    facts = made(6, 0)
    assert facts == made(6, 0) != made(6, 1)
    assert len(facts) == 30
    assert len({fact.question for fact in facts}) == 30
    for fact in facts:
        assert len(fact.wrong) == 5
        assert fact.answer not in fact.wrong
        assert fact.question != fact.paraphrase


def test_the_score_of_the_truth_is_one_and_of_its_opposite_minus_one() -> None:
    draw = torch.Generator().manual_seed(0)
    influence = torch.randn(attribution.TEXTS, 3, generator=draw).double()
    parts = attribution.halves(0)
    assert parts.sum(1).tolist() == [attribution.TEXTS // 2] * attribution.HALVES
    truth = parts.double() @ influence
    assert attribution.score(influence, parts, truth) == pytest.approx([1.0] * 3)
    assert attribution.score(-influence, parts, truth) == pytest.approx([-1.0] * 3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    sizes = {"WORDS": 12, "WIDTH": 8, "LENGTH": 5, "STEPS": 40, "DIRECTIONS": (6,)}
    for name, value in sizes.items():
        monkeypatch.setattr(attribution, name, value)
    torch.manual_seed(0)
    ids = torch.randint(2, 12, (14, 6), generator=torch.Generator().manual_seed(1))
    data = ids[:10, :-1], ids[:10, 1:]
    return attribution.trained(attribution.Decoder(), data, 2, 0), data, (ids[10:, :-1], ids[10:, 1:])


@pytest.mark.long
def test_every_method_ascribes_an_influence_to_every_text(small: tuple[Any, Any, Any]) -> None:
    net, data, queries = small
    found = {name: one for name, (one, _) in attribution.of_network(net, data, queries).items()}
    assert len(found) == 5
    assert all(one.shape == (10, 4) and bool(one.isfinite().all()) for one in found.values())
    dot, cosine = found["dot product of gradients"], found["cosine of gradients"]
    assert torch.equal(dot.sign(), cosine.sign())
    own = attribution.of_network(net, data, data)["EKFAC"][0].diagonal()
    assert bool((own < 0).all())  # each text lowers its own loss
    assert torch.allclose(attribution.by_ekfac(net, data, queries), found["EKFAC"], rtol=1e-2, atol=1e-4)


@pytest.mark.long
def test_at_an_optimum_influence_foretells_what_leaving_a_text_out_does(
    small: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "PULL", 30.0)
    start, data, queries = small
    net, keep = attribution.optimum(start, data), torch.arange(10) != 3
    less = attribution.optimum(start, (data[0][keep], data[1][keep]))
    with torch.no_grad():
        change = attribution.losses(net, queries) - attribution.losses(less, queries)
    found = attribution.of_network(net, data, queries, 30.0)["EKFAC and conjugate gradients"][0][3]
    assert torch.corrcoef(torch.stack([change, found.float()]))[0, 1] > 0.9


def test_a_study_with_other_libraries_says_which_are_missing() -> None:
    with pytest.raises(DataError, match="the package no_such_package is not installed"):
        peers.need("no_such_package")


def test_training_does_not_change_the_network_that_it_starts_from(small: tuple[Any, Any, Any]) -> None:
    net, data, _ = small
    before = {name: t.clone() for name, t in net.state_dict().items()}
    after = attribution.trained(net, data, 3, 1)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    with torch.no_grad():
        assert attribution.losses(after, data).sum() < attribution.losses(net, data).sum()


def test_the_table_has_a_row_a_method() -> None:
    methods = {"one": {"scores": [0.5, 0.7], "took": 1.0}}
    cells = [{"of": "network", "seed": seed, "methods": methods} for seed in range(2)]
    assert "| network | one | 0.60 ± 0.06 | 1.0 |" in attribution.table(cells)


# How sure


def by_letters(text: str) -> dict[str, list[int]]:
    """A token a letter."""
    return {"input_ids": [ord(letter) % 50 for letter in text]}


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    hub, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    model = hub.LlamaModel(config).eval()
    monkeypatch.setattr(sure, "smollm", lambda: (model, by_letters))
    monkeypatch.setattr(sure, "package", lambda *names: None)
    return model


def test_the_last_blocks_say_what_the_whole_network_says(decoder: Any) -> None:
    language, asked = sure.Language(), sure.TASKS[0]
    texts = ["one", "a longer text"]
    logits = sure.outputs(language.network(asked), language.below(texts, asked.prompt))
    for text, found in zip(texts, logits, strict=True):
        ids = torch.tensor([by_letters(f"{text}\n{asked.prompt}")["input_ids"]])
        with torch.no_grad():
            last = decoder(input_ids=ids).last_hidden_state[0, -1]
        words = decoder.embed_tokens.weight[[language.word(word) for word in asked.words]]
        torch.testing.assert_close(found, words @ last, atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_every_way_to_be_sure_has_its_scores(
    decoder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stored(task: Any, data_dir: str | None) -> Images:
        count = {one.task.name: len(one.words) for one in sure.TASKS}[task.name]
        y = torch.arange(24 * count) % count
        texts = np.array([f"{label} or {row}" for row, label in enumerate(y.tolist())])
        return Images(texts, y, texts, y, count)

    sizes = {
        "stored": stored,
        "SHOTS": 8,
        "TESTED": 20,
        "STEPS": 2,
        "RATES": (1e-3,),
        "MEMBERS": 2,
        "PASSES": 2,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(sure, name, value)
    sure.main(["--out", str(tmp_path), "--seeds", "1", "--tasks", "film reviews"])
    cells = json.loads((tmp_path / "result.json").read_text())["cells"]
    assert [cell["method"] for cell in cells] == list(sure.METHODS)
    assert all(0 < cell["log loss"] < 5 and 0 <= cell["auroc"] <= 1 for cell in cells)
    assert "| linear model of LoRA |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("kept", [0, 20, 0.5, 0.999])
def test_a_gguf_file_that_is_cut_off_is_refused_in_words(tmp_path: Path, kept: float) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "net.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", np.ones((64, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(read_gguf(path).tensors) == 1
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    with pytest.raises(DataError, match=r"net\.gguf cannot be read as a GGUF file"):
        read_gguf(path)
