"""Options of all commands (-q, -v, --json), choices in help and errors, narrow terminals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

from linnet import progress
from linnet.app import cli
from linnet.app.cli import COMMANDS, Command
from linnet.app.data import load_data
from linnet.app.terminal import accept_any_character, folding, kept
from linnet.errors import InputError
from linnet.files import require_file

DOCTOR = ["doctor", "--seconds", "0.01"]


@pytest.mark.parametrize("words", [["-q", *DOCTOR], [*DOCTOR, "-q"], [*DOCTOR, "--quiet"]])
def test_quiet(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr() == ("", "")


def test_quiet_still_tells_errors_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-q", "--seconds", "-1"]) == 2
    assert "seconds is -1.0" in capsys.readouterr().err
    assert cli.main(["--json", "-q", *DOCTOR]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_verbose_tells_settings_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINNET_PROGRESS", raising=False)
    assert cli.main([*DOCTOR, "-v"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("  seconds: 0.01\n")
    assert output.err.endswith(" in all\n")
    assert "everything that linnet needs works here" in output.out
    assert "LINNET_PROGRESS" not in os.environ


def test_quiet_and_verbose_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-q", "-v"]) == 2
    assert "contradict" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-v"], ["--json", "--help"], ["-q", "--version"]])
def test_flags_alone_answer_as_without_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "linnet" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_speaks_no_python_and_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = Command.load(name).help()
    assert max(map(len, page.splitlines())) <= 80
    assert {"--json", "--quiet", "--verbose", "--traceback"} <= Command.load(name).flags.keys()
    for word in ("class '", "Optional[", "Union[", "Literal[", "null", "None", "()"):
        assert word not in page


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (["--weight", "autp"], "did you mean --weight auto?"),
        (["--ridge", "lo"], "did you mean --ridge loo?"),
        (["--ridge", "xyzzy"], "linnet adapt --help shows every option"),
    ],
)
def test_a_misspelled_choice(given: list[str], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adapt", "--model", "a.py:b", "--data", "c.npz", "--out", "d", *given]) == 2
    what, expected, last = capsys.readouterr().err.splitlines()
    assert f"{given[0]} is {given[1]!r}" in what
    assert "auto" in expected
    assert last == f"to fix it: {remedy}"


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("photo", "did you mean {0}/photos?"),
        ("tsak.npz", "did you mean {0}/task.npz?"),
        ("giv", "check the path; beside it are: photos, task.npz"),
    ],
)
def test_a_misspelled_path(typed: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "task.npz").touch()
    with pytest.raises(InputError) as caught:
        load_data(tmp_path / typed)
    assert caught.value.remedy == remedy.format(tmp_path)
    with pytest.raises(InputError) as caught:
        require_file(tmp_path / typed)
    assert caught.value.remedy == remedy.format(tmp_path)


class Narrow(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("description", ["fit", "plain fine-tuning, 5 runs of 150 steps", "x" * 120])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_fits_a_terminal_of_80_columns(
    description: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Narrow() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("LINNET_PROGRESS", "2")
    monkeypatch.setenv("COLUMNS", "80")
    list(progress.track(range(3), description))
    list(progress.track(iter("ab"), description))
    lines = screen.getvalue().replace("\r", "\n").splitlines()
    assert all(len(line) <= 80 for line in lines)
    if is_terminal:
        bars = [line.split("|")[1] for line in lines if line.count("|") == 2]
        assert bars
        assert min(map(len, bars)) >= 10
    assert any("x" * 9 in line or description in line for line in lines)


def said(words: list[str], encoding: str) -> str:
    """What these words are on a terminal of an encoding."""
    bytes_written = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(bytes_written, encoding)) as screen:
        accept_any_character()
        print(*words)
        screen.flush()
    return bytes_written.getvalue().decode(encoding).removesuffix("\n")


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("−0.5 ± 2.1×10⁻⁵ ü", "cp1252", "-0.5 ± 2.1×10-5 ü"),
        ("−0.5 ± 2.1×10⁻¹⁴ – ü", "ascii", "-0.5 +- 2.1x10-14 - u"),
        ("花 \udcff", "ascii", "? ?"),
        ("−0.5 花", "utf-8", "−0.5 花"),
    ],
)
def test_characters_that_an_encoding_lacks(text: str, encoding: str, shown: str) -> None:
    assert said([text], encoding) == shown


def test_lines_are_folded_at_spaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    path = f"my runs/{'x' * 40}.html"
    row = "  linear fit   90.0 ± 3.0 %   0.312    1.0 s"
    with folding():
        print(f"note: {'twelve words ' * 6}\n\n  report: {kept(path)} and more")
        print("half a ", end="")
        print("line")
        print(row)
        print(" " * 20 + "accuracy")
        print("the end", end="")
    assert capsys.readouterr().out.split("\n") == [
        "note: twelve words twelve",
        *("  words twelve words twelve", "  words twelve words twelve", "  words"),
        "",
        *("  report:", f"    {path}", "    and more"),
        "half a line",
        row,
        " " * 20 + "accuracy",
        "the end",
    ]


def test_what_prints_sees_the_terminal_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Narrow())
    with folding():
        assert sys.stdout.isatty()
