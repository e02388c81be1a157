"""The page says which score chose the ridge, and no other."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from linnet.report.html import render
from linnet.report.records import RidgeChoice
from linnet.report.verdict import loo_name, ridge_choice
from tests.report.material import digits_run

CHOSEN = {
    "loo": "It was chosen by leave-one-out",
    "gcv": "It was chosen by generalized cross-validation",
    "evidence": "It was chosen by the evidence",
    "validation": "It was chosen by the loss on validation data",
    "given": "It was set by the user",
}


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize("criterion", CHOSEN)
def test_one_criterion_is_named(criterion: str, loss: str) -> None:
    text = ridge_choice(RidgeChoice(criterion, loss))
    assert text.startswith(CHOSEN[criterion])
    assert text.count("chosen by") == int(criterion != "given")
    assert ("was not used for the choice" in text) == (criterion != "loo")
    assert ("Newton step" in text) == (loss == "cross-entropy")
    assert "without training again" not in text or loss == "squared"


def test_a_cross_fitted_head() -> None:
    squared, softmax = (RidgeChoice("loo", loss, crossed=True) for loss in ("squared", "cross-entropy"))
    for choice in (squared, softmax):
        assert "smallest held-out" in ridge_choice(choice)
        assert "by leave-one-out" not in ridge_choice(choice)
    assert "curve shown is for a fixed head" in ridge_choice(squared)
    assert (loo_name(squared), loo_name(softmax)) == ("Leave-one-out error", "Held-out log loss")
    assert loo_name(RidgeChoice("evidence", "cross-entropy")) == "Leave-one-out log loss"


@pytest.mark.parametrize("criterion", [None, "evidence", "given"])
def test_on_the_page(criterion: str | None) -> None:
    run = digits_run()
    choice = None if criterion is None else RidgeChoice(criterion)
    page = render(replace(run, fit=replace(run.fit, ridge=choice)))
    section = re.search(r'<section id="ridge".*?</section>', page, re.DOTALL)
    assert section is not None
    heading = "The ridge beside others" if criterion == "given" else "How the ridge was chosen"
    assert section[0].count(heading) == 1
    assert page.count(heading) == 2  # in the list of sections too
    said = [name for name, text in CHOSEN.items() if text in section[0]]
    assert said == ([] if criterion is None else [criterion])
