"""The page end to end: written, parsed, complete, self-contained, and whole with any part missing."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.errors import InputError
from linnet.report import figures
from linnet.report.html import render, write_report
from linnet.report.numbers import duration, measured_share, number, share_error
from linnet.report.records import (
    Comparison,
    Content,
    DoubtedLabel,
    FitRecord,
    HeldOutSet,
    Notes,
    Samples,
    TrainingSet,
)
from linnet.report.verdict import summary, verdict
from tests.report.material import digits_run, regression_run

VOID = {"meta", "img", "br", "hr", "input", "link"}
SECTIONS = (
    "next", "good", "sure", "ridge", "kernel", "mattered", "why",
    "doubtful", "forgetting", "choices", "coverage", "timings", "predictions",
)  # fmt: skip


class Page(HTMLParser):
    """Tags, texts and their nesting; raises when tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" in self.open:
            self.styles.append(data)
        else:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u202f", " ").split())

    @property
    def sections(self) -> tuple[str | None, ...]:
        return tuple(attributes.get("id") for attributes in self.all("section"))


@cache
def full() -> Content:
    return digits_run()


@cache
def full_page() -> str:
    return render(full())


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    path = write_report(tmp_path / "new" / "report.html", full())
    assert path == tmp_path / "new" / "report.html"
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]  # nothing half-written beside it
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "xlink:href", "action", "poster"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:image/")), (tag, address)
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(text) < 1_000_000


def test_the_page_is_accessible() -> None:
    page = Page(full_page())
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == 1
    images = page.all("img")
    assert len(images) > 40
    assert all("alt" in image for image in images)
    figures_ = [tag for tag in page.all("svg") if tag.get("role") == "img"]
    assert len(figures_) == len(page.all("svg")) == 10
    assert all(figure.get("aria-label") for figure in figures_)
    tables = page.all("table")
    assert len(page.all("caption")) == len(tables) >= 8
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert all((link["href"] or "")[1:] in ids for link in page.all("a"))
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_the_page_says_what_the_run_holds() -> None:
    run, page = full(), Page(full_page())
    assert page.sections == SECTIONS
    for row in run.scores:
        assert row.name in page.text
        shown = measured_share(row.accuracy or 0.0, share_error(row.accuracy or 0.0, run.tested()))
        assert page.text.count(shown.replace("\xa0", " ")) >= 2  # its bar, and its row
    assert run.notes.warnings[0] in page.text
    assert run.train is not None
    assert run.test is not None
    assert run.train.informativeness is not None
    most = run.train.samples.name(int(np.argmax(run.train.informativeness)))
    assert most.rsplit("/", 1)[-1] in page.text
    strongest = run.test.explanations[0].up[0]
    assert "+" + number(strongest.influence) in page.text
    assert page.text.count("known wrong") == sum(s.flipped is True for s in run.train.suspects) > 0
    assert run.fit.preflight is not None
    assert all(row.name in page.text for row in run.fit.preflight.parameters)


def test_both_themes_are_there() -> None:
    style = Page(full_page()).styles[0]
    colors = re.findall(r"--(?:paper|card|ink|muted|line|quiet|accent|up|down): light-dark\(", style)
    assert len(colors) == 9
    assert '[data-theme="dark"]' in style
    assert "@media print" in style


def test_a_browser_runs_the_page_s_own_script_alone() -> None:
    page = Page(full_page())
    policies = [tag["content"] or "" for tag in page.all("meta") if tag.get("http-equiv")]
    assert len(policies) == len(page.scripts) == len(page.styles) == 1
    rules = dict(rule.split(" ", 1) for rule in policies[0].split("; "))
    for name, text in (("script-src", page.scripts[0]), ("style-src-elem", page.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert (
        rules["default-src"]
        == rules["base-uri"]
        == rules["form-action"]
        == rules["trusted-types"]
        == "'none'"
    )
    assert rules["img-src"] == "data:"
    assert "innerHTML" not in page.scripts[0]


def drop(part: str) -> Callable[[Content], Content]:
    """Leave out one part, named by its path in the run."""

    def without(record: Any, names: list[str]) -> Any:
        name, rest = names[0], names[1:]
        value = getattr(record, name)
        if rest:
            return replace(record, **{name: without(value, rest)})
        empty = type(value)() if isinstance(value, tuple | dict) else None
        return replace(record, **{name: empty})

    return lambda run: without(run, part.split("."))


@pytest.mark.parametrize(
    ("part", "gone"),
    [
        ("scores", set()),
        ("fit.path", {"ridge"}),
        ("fit.spectrum", {"kernel"}),
        ("fit.choices", {"choices"}),
        ("fit.preflight", {"coverage"}),
        ("fit.timings", {"timings"}),
        ("train.samples.images", set()),
        ("train.samples.labels", set()),
        ("train.samples.ids", set()),
        ("train.informativeness", {"mattered"}),
        ("train.suspects", {"doubtful"}),
        ("train.forgetting", {"forgetting"}),
        ("test.samples.images", set()),
        ("test.samples.labels", set()),
        ("test.probs", {"predictions"}),
        ("test.uncertainty", set()),
        ("test.explanations", {"why"}),
        ("notes.warnings", set()),
        ("notes.facts", set()),
        ("train", {"mattered", "doubtful", "forgetting"}),
        ("test", {"why", "predictions"}),
        ("fit.path.loo_accuracy", set()),
        ("fit.path.test_accuracy", set()),
        ("fit.path.evidence", set()),
        ("fit.path.chosen", set()),
        ("fit.spectrum.ridge", set()),
    ],
)
@pytest.mark.thinned(6)
def test_any_part_may_be_missing(part: str, gone: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "draw", cached_draw)
    page = Page(render(drop(part)(full())))
    assert page.sections == tuple(name for name in SECTIONS if name not in gone)
    assert all("alt" in image for image in page.all("img"))
    assert "None" not in page.text
    assert " nan" not in page.text


DRAWN: dict[tuple[Any, ...], str] = {}
real_draw = figures.draw


def cached_draw(name: str, alt: str, size: tuple[float, float], paint: Any) -> str:
    """Each figure once: what it shows is tested elsewhere, and a dropped part changes its description."""
    key = (name, alt, size)
    if key not in DRAWN:
        DRAWN[key] = real_draw(name, alt, size, paint)
    return DRAWN[key]


def test_a_title_is_enough() -> None:
    page = Page(render(Content("Only <b>this</b>")))
    assert page.sections == ()
    assert "Only <b>this</b>" in page.text
    assert not page.all("b")


def test_empty_sets_render() -> None:
    nothing = Samples(images=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, int), ids=())
    test = HeldOutSet(nothing, np.zeros((0, 2)), uncertainty=np.zeros(0))
    run = Content("x", ("a", "b"), train=TrainingSet(nothing, np.zeros(0)), test=test)
    assert Page(render(run)).all("h1")


def test_regression_without_pictures() -> None:
    page = Page(render(regression_run()))
    assert page.sections == ("good", "sure", "kernel", "mattered", "why", "predictions")
    assert not page.all("img")
    labels = [figure["aria-label"] or "" for figure in page.all("svg")]
    assert any("predicted values" in text for text in labels)
    assert any("coverage" in text for text in labels)
    assert "Pushed the prediction up" in page.text
    assert "RMSE" in page.text
    assert "accuracy" not in page.text.lower()


def test_regression_with_several_targets() -> None:
    targets = np.arange(12.0).reshape(6, 2)
    test = HeldOutSet(
        Samples(labels=targets), mean=targets + 0.1, std=np.ones((6, 2)), uncertainty=np.ones(6)
    )
    assert "±" in Page(render(Content("x", test=test))).text


def test_hostile_names_stay_text() -> None:
    bad = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    images, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    samples = Samples(images, labels, (bad, bad))
    run = Content(
        bad, (bad, "$b"), Notes((bad,), (bad,), ((bad, bad),)), (Comparison(bad, 0.5, note=bad),),
        FitRecord(), TrainingSet(samples, np.ones(2), (DoubtedLabel(0, 0, 1, 0.9),)),
        HeldOutSet(samples, np.eye(2), uncertainty=np.ones(2)), bad,
    )  # fmt: skip
    page = Page(render(run))
    assert page.scripts == Page(full_page()).scripts
    assert all("onerror" not in attributes for attributes in page.all("img"))


def test_a_folder_is_no_place_for_a_page(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        write_report(tmp_path, Content("x"))


def test_a_page_that_cannot_be_drawn_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(tmp_path / "report.html", Content("first"))
    monkeypatch.setattr("linnet.report.html._figures", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(path, Content("second"))
    assert "first" in path.read_text(encoding="utf-8")


def test_the_summary_is_short_and_true() -> None:
    run = full()
    sentences = summary(run)
    assert len(sentences) == 4
    assert all(sentence.endswith(".") and not sentence[0].islower() for sentence in sentences)
    text = " ".join(sentences).replace("\u202f", " ")
    assert sentences[:2] == list(verdict(run).sentences)
    assert "apart" in sentences[0]
    assert "5 of the 5 that are known to be wrong" in text
    assert "5 training samples were forgotten" in text


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (0.5, {}, "0.500"), (0.5, {"trim": True}, "0.5"), (-1.25, {"digits": 2}, "−1.2"),
        (1e-7, {}, "1.00×10⁻⁷"), (2e9, {}, "2.00×10⁹"), (float("nan"), {}, "–"), (12, {}, "12"),
        (True, {}, "True"), (999.6, {}, "1,000"), (34653.2, {}, "34,653"),
    ],
)  # fmt: skip
def test_numbers_read_well(value: object, options: dict[str, Any], text: str) -> None:
    assert number(value, **options) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0001, "under 1 ms"),
        (0.05, "50 ms"),
        (59.94, "59.9 s"),
        (59.99, "1 min 0 s"),
        (3599.8, "1 h 0 min"),
    ],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds).replace("\u202f", " ") == text


def test_importing_the_report_draws_nothing_in() -> None:
    heavy = "('matplotlib', 'jinja2', 'PIL', 'scipy')"
    code = f"import sys, linnet.report.html; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
