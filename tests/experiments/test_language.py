"""The studies of language models: made-up facts, influences and their score, on the smallest of networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.language import attribution
from experiments.language.facts import made


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
