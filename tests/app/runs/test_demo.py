"""`linnet demo`: both acts, with measured numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from linnet.app import cli


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The result of the demo and its folder."""
    from linnet.app.commands import demo_command

    out = tmp_path_factory.mktemp("demo")
    return demo_command(out=out), out


def test_the_first_act(demo: tuple[dict[str, Any], Path]) -> None:
    found, out = demo
    assert found["pretrained"]["accuracy"] > 0.95
    scores = {row["name"]: row["accuracy"] for row in found["scores"]}
    assert set(scores) == {"linear fit", "linear probe", "plain fine-tuning", "frozen network"}
    assert all(accuracy > 0.8 for accuracy in scores.values())
    assert scores["linear fit"] > scores["frozen network"]
    assert "Digits 5 to 9" in (out / "report.html").read_text()


def test_the_second_act(demo: tuple[dict[str, Any], Path]) -> None:
    found, out = demo
    assert len(found["flipped"]) == 5
    assert found["found"] == len(set(found["flipped"]) & set(found["inspected"])) >= 4
    after, before = found["forgetting"]["scores"]
    assert after["accuracy"] > before["accuracy"]
    assert found["forgetting"]["certificate"] < 1e-10
    assert found["forgetting"]["difference"] < 1e-2
    report = json.loads((out / "forgotten" / "result.json").read_text())["report"]
    assert report["train"]["flipped"] == 5
    assert report["train"]["forgetting"]["removed"] == found["inspected"]


def test_the_demo_is_a_run(demo: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = demo
    assert cli.main(["predict", "--run", str(out), "--data", str(out / "digits.npz")]) == 0
    assert "448 samples predicted" in capsys.readouterr().out
