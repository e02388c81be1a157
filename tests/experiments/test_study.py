"""Cells of a study are computed once, also across processes and from what has been published."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.study import Study, parser


def study(out: Path, *more: str) -> Study:
    return Study("a/b", parser("A study.").parse_args(["--out", str(out), *more]))


def test_a_cell_is_computed_once(tmp_path: Path) -> None:
    first = study(tmp_path).cell({"seed": 0}, lambda: {"value": 3.0})
    again = study(tmp_path).cell({"seed": 0}, lambda: pytest.fail("computed again"))
    assert first == again
    assert first["value"] == 3.0


def test_a_line_that_a_kill_cut_short_is_computed_again(tmp_path: Path) -> None:
    study(tmp_path).cell({"seed": 0}, lambda: {"value": 3.0})
    with (tmp_path / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"what": {"seed": 1')
    second = study(tmp_path)
    assert second.cell({"seed": 1}, lambda: {"value": 4.0})["value"] == 4.0
    assert study(tmp_path).cell({"seed": 0}, dict)["value"] == 3.0


def test_a_published_cell_is_not_computed_again(tmp_path: Path) -> None:
    one = study(tmp_path / "one")
    one.publish("", [one.cell({"seed": 0, "network": "MLP"}, lambda: {"value": 3.0})])
    known = ["--published", str(tmp_path / "one" / "result.json")]
    two = study(tmp_path / "two", *known)
    assert two.cell({"seed": 0, "network": "MLP"}, lambda: pytest.fail("computed"))["value"] == 3.0
    assert two.cell({"seed": 0, "network": "LeNet"}, lambda: {"value": 5.0})["value"] == 5.0
    full = study(tmp_path / "three", "--full", *known)
    assert "value" not in full.cell({"seed": 0, "network": "MLP"}, dict)
