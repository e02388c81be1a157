"""What a prompt and a notebook show of everything that a user holds."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor

from linnet.shown import Record, Shown, in_line
from tests.hostile import doors

# Objects of torch's kinds, which show themselves, and settings, which are shown as they were written.
THEIR_OWN = (
    "Linearized",
    "MetricNetwork",
    "SketchedNetwork",
    "GaussNewton",
    "CappedLeakyReLU",
    "SquareRootPooling",
    "OutputGap",
    "KernelDrift",
    "Converged",
)
SETTINGS = (
    "likelihoods",
    "finetuning.augment",
    "linalg.operator",
    "continual.metrics",
)


class Table(HTMLParser):
    """Reads a table, and fails where tags do not close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "br":
            return
        self.open.append(tag)
        if tag in ("th", "td", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


@pytest.mark.parametrize("name", doors.OBJECTS)
@pytest.mark.thinned(3)
def test_everything_that_a_user_holds_shows_itself(name: str) -> None:
    held = doors.OBJECTS[name]()
    assert "object at 0x" not in repr(held)
    assert "tensor(" not in repr(held)
    kind = type(held)
    if kind.__name__ in THEIR_OWN or kind.__module__.removeprefix("linnet.").startswith(SETTINGS):
        return
    assert isinstance(held, Shown)
    table = Table(held._repr_html_())
    assert table.cells[0] == kind.__name__
    assert table.tags <= {"table", "caption", "tr", "th", "td", "br"}
    assert len(table.cells) >= 5
    assert len(held._repr_html_()) < 20_000


class Named(Shown):
    """Shows what it is given."""

    def __init__(self, told: dict[str, object]) -> None:
        self.told = told

    def _shown(self) -> dict[str, object]:
        return self.told


def test_names_and_values_are_escaped() -> None:
    page = Named({"<b>": "<script>alert(1)</script>", "list": ["&", {"<i>": 1}]})._repr_html_()
    table = Table(page)
    assert "script" not in table.tags
    assert table.cells == ["Named", "<b>", "<script>alert(1)</script>", "list", "&<i>: 1"]


def test_what_is_missing_or_empty_has_no_row() -> None:
    shown = Named({"a": None, "b": "", "c": [], "d": {}, "e": 0, "f": False, "g": torch.zeros(0, 2)})
    assert Table(shown._repr_html_()).cells == ["Named", "e", "0", "f", "False", "g", "(0, 2)"]
    assert repr(shown) == "Named(b=, e=0, f=False, g=(0, 2))"


def test_long_lists_end_in_their_number() -> None:
    page = Named({"layers": {f"layer {i}": i for i in range(40)}})._repr_html_()
    assert "layer 11: 11" in page
    assert "layer 12" not in page
    assert "… 28 more" in page


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (torch.tensor(0.123456), "0.1235"),
        (torch.tensor([3, 1]), "[3, 1]"),
        (torch.arange(12.0).view(3, 4), "(3, 4) from 0 to 11"),
        (torch.arange(7), "(7,) from 0 to 6"),
        (torch.tensor([True, False] * 9), "(18,) from False to True"),
        (torch.zeros(3, 3, dtype=torch.complex64), "(3, 3)"),
        ((1, 2.5), "(1, 2.5)"),
        (torch.nn.Linear(2, 2), "Linear"),
        (torch.float64, "torch.float64"),
    ],
)
def test_values_in_a_line(value: object, line: str) -> None:
    assert in_line(value) == line


def test_a_prediction_computes_nothing_to_be_shown() -> None:
    from linnet.predictive.gaussian import GaussianPredictive
    from linnet.predictive.noise import Noise

    def covariance() -> Tensor:
        raise AssertionError("computed")

    page = GaussianPredictive(torch.zeros(3, 2), covariance, Noise(1.0))._repr_html_()
    assert "standard deviation" not in page
    known = GaussianPredictive(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2), Noise(1.0))._repr_html_()
    assert "standard deviation" in known


def test_a_process_shows_itself_before_it_is_fitted() -> None:
    import linnet

    process = linnet.TangentGP(torch.nn.Linear(2, 1), linnet.likelihoods.Gaussian())
    assert "prior_precision" in process._repr_html_()
    assert "not fitted" in repr(process)


def test_records_are_told_within_records() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True, repr=False)
    class Inner(Record):
        share: float

    @dataclass(frozen=True, repr=False)
    class Outer(Record):
        inner: Inner
        network: torch.nn.Module

    held = Outer(Inner(0.5), torch.nn.Tanh())
    assert repr(held) == "Outer(inner=Inner(share=0.5), network=Tanh)"
    assert Table(held._repr_html_()).cells == ["Outer", "inner", "", "share", "0.5", "network", "Tanh"]
