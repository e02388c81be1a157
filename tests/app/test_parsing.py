"""Files of settings that grow, nest or never end when they are read: refused in one sentence each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from linnet.app import cli
from linnet.app.cli import Command
from linnet.errors import InputError

HOSTILE = {
    "seconds: " + "9" * 5000: "a number of 5,000 digits",
    "seconds: -" + "9" * 500: "a number of 500 digits",
    "seconds: " + "[" * 3000: "more than 50 lists or mappings inside each other",
    "seconds: " + "[" * 60 + "]" * 60: "more than 50 lists or mappings inside each other",
    "? " * 3000: "more than 50 lists or mappings inside each other",
    "a: &a [1]\nb: [*a, *a]": "repeats a value by the alias *a",
    "a: &a [*a]": "repeats a value by the alias *a",
    "seconds: " + "x" * 300_000: "has 300,009 bytes",
}


@pytest.mark.parametrize("text", HOSTILE, ids=list(HOSTILE.values()))
def test_hostile_settings(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert cli.main(["doctor", "--config", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"error:     --config {file} ")
    assert HOSTILE[text] in lines[0]


@pytest.mark.parametrize(
    "content", [b"seconds: \xff", b"seconds: 1\0", b"- 1\n", b"seconds: [1\n", b"\0" * 99]
)
def test_what_is_no_settings(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    assert cli.main(["doctor", "--config", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seconds: 0.5\n")
    assert Command.load("doctor").parse(["--config", str(file)]).values == {"seconds": 0.5}
    with pytest.raises(InputError, match="is a folder"):
        Command.load("adapt").parse(["--config", str(tmp_path)])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    assert cli.main(["doctor", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "is a named pipe" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, "[" * 3000, "9" * 400])
def test_values_on_the_command_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--seconds", value]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 3
    assert len(error) < 1500


def test_settings_of_another_command_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# linnet 0.1.0. To run this again:\n#   linnet demo --config run.yaml\nseed: 0\n")
    assert cli.main(["adapt", "--config", str(file)]) == 2
    told = capsys.readouterr().err
    assert "holds the settings of linnet demo" in told
    assert f"run linnet demo --config {file}" in told


@pytest.mark.parametrize("text", ["target: yes", "target: 1.50"])
def test_words_that_a_settings_file_takes_for_values_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{text}\nmodel-args: {{}}\n")
    assert cli.main(["adapt", "--config", str(file)]) == 2
    assert "--target is" in capsys.readouterr().err
