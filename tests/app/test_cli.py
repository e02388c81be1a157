"""The command line, run as people run it: as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from linnet import __version__
from linnet.app import cli, commands
from linnet.app.cli import COMMANDS, Command, main
from linnet.errors import InputError, MemoryBudgetError
from tests.hangs import HANGS


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "linnet", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
    assert done.stdout == f"linnet {__version__}\n"


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command_with_its_purpose(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 0
    page = capsys.readouterr().out
    assert all(len(line) <= 80 for line in page.splitlines())
    for name in COMMANDS:
        assert f" {name} {Command.load(name).summary}" in " ".join(page.split())
        assert Command.load(name).summary.endswith(".")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    command = Command.load(name)
    page = command.help()
    for option in [*command.options, "config", "json", "traceback", "print_config"]:
        spelled = "--" + (option if option == "print_config" else option.replace("_", "-"))
        line = page[max(page.rfind(f"  {spelled} "), page.rfind(f"  {spelled}\n")) :]
        assert len(line.split(".")[0].split()) > 3, f"{spelled} of {name} has no help"
    assert "``" not in page


def test_errors_are_three_short_lines_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctr"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "error:     there is no command 'doctr'",
        f"expected:  one of {', '.join(COMMANDS)}",
        "to fix it: did you mean `linnet doctor`?",
    ]


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (["doctor", "--second", "1"], "there is no option --second", "did you mean --seconds?"),
        (["doctor", "--seconds"], "--seconds has no value", "linnet doctor --help"),
        (["doctor", "--seconds", "soon"], "--seconds is 'soon'", "linnet doctor --help"),
        (["doctor", "--seconds", "-1"], "seconds is -1.0", "leave it out"),
        (["doctor", "now"], "unexpected word 'now'", "linnet doctor --help"),
        (["doctor", "--config", "absent.yaml"], "absent.yaml", "--print_config"),
        (["--seconds", "1"], "unknown option --seconds before the command", "linnet --help"),
        (["check"], "--data", "linnet check --help"),
        (["check", "--data", "x.npz", "--size", "large"], "--size is 'large'", "linnet check --help"),
        (["check", "--data", "x.npz", "--model-args", "[1]"], "--model-args is '[1]'", "linnet check --help"),
        (["check", "--data", "x.npz", "--batch", "0"], "--batch 0", "batch"),
        (["xyzzy"], "there is no command 'xyzzy'", "linnet --help"),
    ],
)
def test_bad_input(words: list[str], what: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == ""
    assert 2 <= len(lines) <= 3
    assert what in lines[0]
    assert remedy in lines[-1]


def test_traceback_on_request() -> None:
    with pytest.raises(InputError):
        cli.main(["doctor", "--seconds", "-1", "--traceback"])


def test_doctor_for_people_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "0.01"]) == 0
    people = capsys.readouterr().out
    assert f"linnet {__version__}, Python" in people
    assert "everything that linnet needs works here" in people
    assert main(["doctor", "--seconds", "0.01", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert result["packages"]["torch"].startswith("2.")
    assert result["devices"][0]["sgemm_gflops"] > 0.1
    assert result["devices"][0]["available_bytes"] > 1e6
    assert result["derivatives"]["weight norm"]["path"] == "double-backward"
    assert all(package["works"] or package["reason"] for package in result["optional"].values())


def test_doctor_names_a_broken_optional_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.machine import survey

    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)  # another test may have left one
    found = survey(seconds=0.01)["optional"]["timm"]
    assert found["works"] is False
    assert found["reason"] == "operator torchvision::nms does not exist"
    assert "torchvision" in found["remedy"]


def test_settings_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "0.25", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert printed == "seconds: 0.25\n"
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    assert Command.load("doctor").parse(["--config", str(file)]).values == {"seconds": 0.25}
    file.write_text("second: 0.25\n")
    assert cli.main(["doctor", "--config", str(file)]) == 2
    assert "--second" in capsys.readouterr().err
    assert cli.main(["doctor", "--config", str(tmp_path / "absent.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.fixture
def small_task(tmp_path: Path) -> list[str]:
    """Options for a small network and six images of two classes."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def small(width=2):\n"
        "    layers = nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, 2)\n"
        "    return nn.Sequential(*layers)\n"
    )
    images = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
    labels = np.array([0, 1] * 3)
    np.savez(tmp_path / "task.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return ["check", "--model", f"{tmp_path / 'nets.py'}:small", "--data", str(tmp_path / "task.npz")]


def test_check_names_every_parameter(small_task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*small_task, "--json", "--model-args", '{"width": 3}']) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert [tuple(p["shape"]) for p in result["parameters"]] == [(3, 1, 3, 3), (3,)]
    assert result["data"] == {"train": 6, "test": 6, "classes": ["0", "1"], "findings": []}
    assert cli.main([*small_task, "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "0.weight" in printed
    assert "is replaced" in printed


# A command made for the purpose, to test what all commands share.


def paint(
    *,
    out: Path | None = None,
    where: list[int] | None = None,
    names: list[str] | None = None,
    dry: bool = False,
    coat_args: dict[str, float] | None = None,
    fail: str = "",
    device: str = "cpu",
) -> dict[str, object]:
    """Paint a folder.

    Args:
        out: The folder.
        where: Places.
        names: Names.
        dry: Whether to wait.
        coat_args: Thickness by coat.
        fail: How to fail.
        device: Where.
    """
    if fail == "memory":
        raise MemoryBudgetError("the plan needs 8 GB", expected="4 GB", remedy="use memory='9GB'")
    if fail == "half":
        raise InputError("nothing to paint")
    if out is not None:
        out.mkdir(exist_ok=True)
    if fail == "interrupt":
        raise KeyboardInterrupt
    if fail == "pipe":
        raise BrokenPipeError
    print("painted")
    return {"ok": fail != "check", "loss": float("nan"), "where": where, "out": out, "device": device}


@pytest.fixture
def with_paint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (*COMMANDS, "paint"))
    monkeypatch.setattr(commands, "paint_command", paint, raising=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--where", "3", "5", "8"], {"where": [3, 5, 8]}),
        (["--where", "3,5,8"], {"where": [3, 5, 8]}),
        (["--where=3,5"], {"where": [3, 5]}),
        (["--where", "[3, 5]"], {"where": [3, 5]}),
        (["--names", "a", "1"], {"names": ["a", "1"]}),
        (["--dry"], {"dry": True}),
        (["--no-dry"], {"dry": False}),
        (["--dry", "false"], {"dry": False}),
        (["--coat-args", '{"first": 0.5}'], {"coat_args": {"first": 0.5}}),
        (["--coat_args.first", "0.5"], {"coat_args": {"first": 0.5}}),
        (["--out", "wall"], {"out": Path("wall")}),
    ],
)
def test_what_people_type(with_paint: None, words: list[str], expected: dict[str, object]) -> None:
    values = Command.load("paint").parse(words).values
    assert {name: values[name] for name in expected} == expected


def test_json_is_alone_on_standard_output(with_paint: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paint", "--json", "--where", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True, "loss": None, "where": [1], "out": None, "device": "cpu",
    }  # fmt: skip
    assert cli.main(["paint"]) == 0
    assert capsys.readouterr().out == "painted\n"


def test_a_negative_answer_ends_with_status_1(with_paint: None) -> None:
    assert cli.main(["paint", "--fail", "check"]) == 1


def test_the_command_that_replays_a_run_can_be_pasted(with_paint: None, tmp_path: Path) -> None:
    wall = tmp_path / "my wall ü"
    assert cli.main(["paint", "--out", str(wall)]) == 0
    words = shlex.split((wall / "run.yaml").read_text(encoding="utf-8").splitlines()[1].strip("# "))
    assert words == ["linnet", "paint", "--config", str(wall / "run.yaml")]


@pytest.mark.parametrize(
    ("here", "taken"), [((True, True), "cuda"), ((False, True), "mps"), ((False, False), "cpu")]
)
def test_the_device_of_a_machine_that_is_not_known(
    with_paint: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    here: tuple[bool, bool], taken: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: here[0])
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: here[1])
    wall = tmp_path / "wall"
    assert cli.main(["paint", "--out", str(wall), "--device", "auto"]) == 0
    assert capsys.readouterr().out == f"device: {taken}\npainted\n"
    assert cli.main(["paint", "--device", "auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == taken
    assert "device: auto" in (wall / "run.yaml").read_text()  # repeated elsewhere, it is that machine's


def test_run_folder_replays(with_paint: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wall = tmp_path / "wall"
    assert cli.main(["paint", "--out", str(wall), "--where", "3", "5", "--dry"]) == 0
    text = (wall / "run.yaml").read_text()
    assert f"linnet paint --config {wall}" in text
    first = Command.load("paint").parse(["--out", str(wall), "--where", "3", "5", "--dry"]).values
    assert Command.load("paint").parse(["--config", str(wall / "run.yaml")]).values == first
    # Another command that writes into the same folder leaves the first one's settings alone.
    (wall / "run.yaml").write_text(text.replace("linnet paint", "linnet print"))
    assert cli.main(["paint", "--out", str(wall)]) == 0
    assert "linnet print" in (wall / "run.yaml").read_text()
    assert "linnet paint" in (wall / "run-paint.yaml").read_text()


def test_a_failed_run_writes_no_settings(
    with_paint: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["paint", "--out", str(tmp_path / "wall"), "--fail", "half"]) == 2
    assert not list(tmp_path.iterdir())
    assert cli.main(["paint", "--fail", "memory"]) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "error:     the plan needs 8 GB",
        "expected:  4 GB",
        "to fix it: use --memory 9GB",
    ]


def test_an_interrupted_run_keeps_its_settings(
    with_paint: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wall = tmp_path / "wall"
    assert cli.main(["paint", "--out", str(wall), "--fail", "interrupt"]) == 130
    assert capsys.readouterr().err == "linnet: interrupted\n"
    assert (wall / "run.yaml").exists()


def test_a_reader_that_goes_away_takes_no_settings_along(with_paint: None, tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w") as screen, contextlib.redirect_stdout(screen):
        assert cli.main(["paint", "--out", str(tmp_path), "--fail", "pipe"]) == 0
    assert (tmp_path / "run.yaml").exists()


INTERRUPTED = """
import sys
from linnet import machine
from linnet.app import cli, commands
survey = machine.survey
def watched(seconds):
    print("at work", flush=True)
    return survey(seconds)
machine.survey = watched
sys.exit(cli.main(["doctor", "--seconds", "3600"]))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "linnet: interrupted"
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_closed_pipe_is_no_error() -> None:
    script = textwrap.dedent(f"""
        "{sys.executable}" -m linnet.app.cli doctor --seconds 0.01 | true
        echo "${{PIPESTATUS[0]}}"
    """)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("said", "here"),
    [
        ("memory is 'banana'", "--memory is 'banana'"),
        ("pass memory='2GB', or memory=None for half", "pass --memory 2GB, or no --memory for half"),
        ("weight=-2.5, model_args=", "--weight -2.5, --model-args"),
        ("numpy.savez(file, memory=array)", "numpy.savez(file, memory=array)"),
        ("the model is large, out of memory; pass n=3", "the model is large, out of memory; pass n=3"),
    ],
)
def test_arguments_are_options(said: str, here: str) -> None:
    assert cli.in_options(said, Command.load("adapt").types) == here
