"""The report page of a fit that was made in Python."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.errors import DataError, InputError, LinnetError
from linnet.pages import Page
from linnet.report.numbers import number, percent
from linnet.report.of_fit import page as report_of
from linnet.report.of_fit import pictures
from linnet.report.reading import suspects

G = torch.Generator().manual_seed(0)
Y = torch.arange(24) % 3
X = torch.randn(24, 1, 6, 6, generator=G) + Y[:, None, None, None]
TEST_Y = torch.arange(30) % 3
TEST = torch.randn(30, 1, 6, 6, generator=G) + TEST_Y[:, None, None, None]
VALUES, TEST_VALUES = X.mean((1, 2, 3))[:, None], TEST.mean((1, 2, 3))


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, outputs))


@cache
def fitted(kind: str) -> Any:
    if kind == "adapted":
        return linnet.adapt(network(), (X, Y))
    if kind == "values":
        return linnet.fit(linnet.linearize(network(1)), (X, VALUES))
    options: dict[str, Any] = {"loss": "cross-entropy", "ridge": "loo"} if kind == "cross-entropy" else {}
    options |= {"solver": kind, "ridge": 1.0} if kind in ("primal", "sketch", "shared", "cg") else {}
    return linnet.fit(linnet.linearize(network()), (X, Y), **options)


@pytest.fixture(autouse=True)
def without_drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn where a test is marked with ``drawings``."""
    if request.node.get_closest_marker("drawings") is None:
        monkeypatch.setattr("linnet.report.figures.draw", lambda name, alt, *_: alt)


@pytest.mark.parametrize("kind", ["classes", "adapted", "cross-entropy", "primal", "sketch", "shared", "cg"])
@pytest.mark.thinned(3)
def test_the_page_of_classes_holds_the_numbers_of_the_fit(kind: str) -> None:
    fit = fitted(kind)
    page = report_of(fit, (TEST, TEST_Y), classes=("low", "middle", "high"), title="Three levels")
    shown = page.numbers
    probs = fit.predictive(TEST).probs
    accuracy = float((probs.argmax(1) == TEST_Y).double().mean())
    (row,) = shown["comparison"]
    assert row["accuracy"] == pytest.approx(accuracy)
    assert row["nll"] == pytest.approx(-float(probs[torch.arange(30), TEST_Y].log().mean()), rel=1e-4)
    assert shown["test"]["predicted"] == probs.argmax(1).tolist()
    assert shown["train"]["count"] == 24
    assert shown["facts"]["network"] == "Sequential"
    chosen = {choice["what"]: choice["chosen"] for choice in shown["choices"]}
    assert chosen["ridge"] == number(fit.ridge)
    assert ("head" in chosen) == (kind == "adapted")
    assert 'src="data:image/png' in page.html
    assert "<h1>Three levels</h1>" in page.html
    assert "middle" in page.html
    sets = fit.sets(TEST, 0.9)
    held = percent(float(sets.gather(1, TEST_Y[:, None]).double().mean()))
    assert (
        f"hold it for {held} of 30 test samples; they are of {sets.sum(1).double().mean():.1f}" in page.html
    )
    if kind != "cg":
        first = shown["test"]["explanations"][0]
        influence = fit.influence(TEST[first["position"]][None])[:, 0, first["predicted"]]
        assert first["up"][0]["influence"] == pytest.approx(float(influence.max()), rel=1e-4)
        assert shown["train"]["informativeness"] == pytest.approx(fit.informativeness().tolist())


def test_labels_that_are_worth_a_look_are_those_of_the_list() -> None:
    fit, found = fitted("adapted"), linnet.audit.mislabeled(fitted("adapted"))
    doubted, _, limits, unsure = suspects(fit)
    assert limits == found.limits != ""
    listed = [i for i in found.suspected().tolist() if fit.loo()[i].argmax() != Y[i]]
    assert list(unsure) == listed
    assert f"the {len(listed)} that" in limits
    assert bool(doubted) == bool(found.doubted().tolist())
    values = suspects(fitted("values"))
    assert values == ((), None, "", ())


def test_one_output_of_two_classes_is_pushed_towards_the_predicted_one() -> None:
    fit = linnet.fit(linnet.linearize(network(1)), (X, (Y > 0).long()), "cross-entropy", ridge=1.0)
    shown = report_of(fit, (TEST, (TEST_Y > 0).long())).numbers["test"]["explanations"]
    assert {one["predicted"] for one in shown} == {0, 1}
    for one in shown:
        influence = fit.influence(TEST[one["position"]][None])[:, 0, 0] * (1 if one["predicted"] else -1)
        assert one["up"][0]["influence"] == pytest.approx(float(influence.max()), rel=1e-4)


def test_the_page_of_values_holds_their_error() -> None:
    fit = fitted("values")
    page = report_of(fit, (TEST, TEST_VALUES))
    low, high = fit.interval(TEST, 0.9)[:, 0].unbind(1)
    held = percent(float(((low <= TEST_VALUES) & (high >= TEST_VALUES)).double().mean()))
    assert f"each training sample, hold {held} of those of 30 test samples" in page.html
    shown = page.numbers
    rmse = float((fit.predict(TEST)[:, 0] - TEST_VALUES).square().mean().sqrt())
    assert shown["comparison"][0]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert shown["classes"] is None
    deviation = (fit.predictive(TEST).with_noise().variance[:, 0]).sqrt()
    assert np.allclose(np.ravel(shown["test"]["std"]), deviation, rtol=1e-4)


def test_the_share_of_the_variance_has_the_error_of_a_bootstrap() -> None:
    """Errors and spreads are of the same samples: those far from the mean have both larger."""
    torch.manual_seed(0)
    x = torch.randn(400, 36)
    y = x[:, :1] * 3 + 0.5 * torch.randn(400, 1) * (1 + x[:, :1].abs())
    fit = linnet.fit(linnet.linearize(network(1)), (x[:300], y[:300]), ridge="loo")
    text = re.sub(r"<[^>]*>|\s|&nbsp;", "", report_of(fit, (x[300:], y[300:])).html)
    shown = re.search(r"ofthevarianceexplained100%isperfect([\d.]+)±([\d.]+)%", text)
    assert shown is not None
    value, error = (float(part) for part in shown.groups())
    truth, missed = y[300:, 0], (fit.predict(x[300:]) - y[300:])[:, 0].square()

    def share(index: torch.Tensor) -> float:
        return 100 * (1 - float(missed[index].mean() / truth[index].var(correction=0)))

    draws = torch.tensor([share(torch.randint(100, (100,))) for _ in range(500)])
    assert value == pytest.approx(share(torch.arange(100)), abs=0.6)
    assert error == pytest.approx(float(draws.std()), rel=0.3)


def test_soft_labels_of_test_samples_are_shown_by_their_likeliest() -> None:
    soft = torch.nn.functional.one_hot(Y, 3).to(X) * 0.8 + 0.2 / 3
    fit = linnet.fit(linnet.linearize(network()), (X, soft), "cross-entropy", ridge=1.0)
    hard = torch.nn.functional.one_hot(TEST_Y, 3).to(X)
    own, other = (report_of(fit, (TEST, y)).numbers["comparison"][0] for y in (TEST_Y, hard))
    assert own["accuracy"] == other["accuracy"]


def test_test_samples_may_be_a_dictionary_of_tensors() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, pixels: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return self.body(pixels * factor[:, None, None, None])

    def named(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pixels": x, "factor": torch.ones(len(x))}

    plain, found = fitted("classes"), linnet.fit(linnet.linearize(Named()), (named(X), Y))
    expected = report_of(plain, (TEST, TEST_Y)).numbers
    numbers = report_of(found, (named(TEST), TEST_Y)).numbers
    for each in (numbers, report_of(plain, (TEST.double(), TEST_Y)).numbers):
        assert each["comparison"][0]["accuracy"] == expected["comparison"][0]["accuracy"]
        assert each["ridge_path"]["test_accuracy"] == expected["ridge_path"]["test_accuracy"]
        for own, other in zip(each["test"]["explanations"], expected["test"]["explanations"], strict=True):
            assert [own["position"], own["up"][0]["position"]] == [
                other["position"],
                other["up"][0]["position"],
            ]


def test_without_test_samples_the_page_is_of_the_training_examples() -> None:
    page = report_of(fitted("classes"))
    assert page.numbers["test"] is None
    assert page.numbers["classes"] == ["0", "1", "2"]
    assert page.numbers["ridge_path"] is not None
    assert "<h1>Linear fit</h1>" in page.html


def test_a_page_is_saved_and_shows_itself_in_a_frame(tmp_path: Path) -> None:
    page = report_of(fitted("classes"), (TEST, TEST_Y), title='<"&">')
    assert isinstance(page, Page)
    file = page.save(tmp_path / "new" / "page.html")
    assert file.read_text(encoding="utf-8") == page.html
    assert repr(page) == "Page('<\"&\">')"
    with pytest.raises(LinnetError):
        page.save(tmp_path)

    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed(page._repr_html_())
    ((tag, attributes),) = tags
    assert tag == "iframe"
    assert attributes["srcdoc"] == page.html
    assert "allow-same-origin" not in (attributes["sandbox"] or "")


@pytest.mark.drawings
def test_the_figures_are_drawn() -> None:
    assert report_of(fitted("classes"), (TEST, TEST_Y)).html.count('<svg class="figure"') >= 4


def test_pictures_are_inputs_that_look_like_some() -> None:
    x = torch.zeros(2, 3, 5, 4)
    x[0, 0], x[1, 1] = -2.0, 7.0
    found = pictures(x)
    assert found is not None
    assert found.shape == (2, 5, 4, 3)
    assert found[0, 0, 0].tolist() == [0, 0, 0]
    assert found[1, 0, 0].tolist() == [255, 255, 0]
    for other in (
        torch.zeros(2, 2, 5, 5),
        torch.zeros(2, 3, 2, 5),
        torch.zeros(2, 5, 5),
        torch.zeros(2, 1, 5, 5, dtype=torch.int64),
        {"x": torch.zeros(2, 1, 5, 5)},
    ):
        assert pictures(other) is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: report_of(network()), InputError, "fit"),
        (lambda: report_of(fitted("classes"), title=3), InputError, "title"),
        (lambda: report_of(fitted("classes"), classes=("a", "b")), InputError, "3 texts"),
        (lambda: report_of(fitted("classes"), classes="abc"), InputError, "3 texts"),
        (lambda: report_of(fitted("values"), classes=("a",)), InputError, "regression"),
        (lambda: report_of(fitted("classes"), (TEST, TEST_Y + 1)), DataError, "classes from 0 to 2"),
        (lambda: report_of(fitted("classes"), (TEST, TEST_Y + 0.5)), DataError, "classes from 0 to 2"),
        (lambda: report_of(fitted("values"), (TEST, torch.ones(30, 2))), DataError, "like those of the fit"),
        (lambda: report_of(fitted("classes"), (TEST, TEST_Y[:4])), DataError, "target"),
        (lambda: report_of(fitted("classes"), ({"a": TEST, "b": TEST}, TEST_Y)), LinnetError, "mapping"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
