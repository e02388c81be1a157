"""Errors on the command line: options, and nothing that only Python understands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from linnet.app import cli
from linnet.app.cli import Command
from linnet.app.remedies import in_options

SOURCE = Path(__file__).resolve().parents[2] / "src" / "linnet"
PYTHON = re.compile(r"\w=|\blinnet\.\w|\bNone\b|\bTrue\b|\bFalse\b|\.\w+\(\)|\bx\.")
ADAPT = tuple(Command.load("adapt").parameters)
EXPORT = tuple(Command.load("export").parameters)

# What the library says, as it stands there, and how it is said here.
SAID = {
    "keep it on disk with linnet.spectrum.gram(..., file='kernel.npy')": None,
    'fit with linnet.linearize(model, params="last-layer")': "fit with --params last-layer",
    "check x's shape, dtype (x.float() for images) and device": "give the network samples of its own shape; "
    "for images --channels, --size and --mean make it",
    "pass a list of names to have them taken literally": "put a backslash before what is no pattern, as in "
    r"--params 0\.weight",
    "where you trust whoever made the run, pass --trust (in Python: trust=True)": "where you trust whoever "
    "made the run, pass --trust",
    "export without variance=, and keep the fit in linnet for it": "export without --variance, and take the "
    "spread of each prediction from linnet predict",
    "adapt with weight=0, whose variance takes the features alone": "adapt with --weight 0, whose variance "
    "takes the features alone",
}


@pytest.mark.parametrize("said", SAID)
def test_what_only_python_does_is_said_otherwise(said: str) -> None:
    text = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py") if path.name != "remedies.py")
    assert said in re.sub(r'"\n\s+"', "", text)
    if SAID[said] is None:
        assert in_options(f"{said}, or raise memory=", ADAPT) == "raise --memory"
    else:
        assert in_options(said, {*ADAPT, *EXPORT}) == SAID[said]


@pytest.mark.parametrize(
    ("said", "here"),
    [
        ("variance=True of a fit", "--variance true of a fit"),
        ("memory is 'banana'", "--memory is 'banana'"),
        ("pass memory='2GB', or memory=None for half", "pass --memory 2GB, or no --memory for half"),
        ('pass solver="dual" or "cg"', "pass --solver dual or cg of linnet adapt"),
        ("weight=-2.5", "--weight -2.5 of linnet adapt"),
        (
            "the network (see model_args), its head",
            "the network (see --model-args of linnet adapt), its head",
        ),
        ("leave memory, device out", "leave --memory, --device out"),
        ("leave out memory and device", "leave out --memory and --device"),
        ("leave variance out to take none", "leave --variance out to take none"),
        ("numpy.savez(file, memory=array)", "numpy.savez(file, memory=array)"),
        ("pass --trust (in a folder memory=1)", "pass --trust (in a folder --memory 1)"),
        ("the model is large, out of memory", "the model is large, out of memory"),
        ("pass n=3", "pass n=3"),
    ],
)
def test_arguments_are_options(said: str, here: str) -> None:
    assert in_options(said, EXPORT, ADAPT) == here


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with networks and data."""
    monkeypatch.chdir(tmp_path)
    lines = [
        "from torch import nn",
        "def mlp(): return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))",
    ]
    lines += ["def encoder(): return nn.Sequential(nn.Linear(4, 3), nn.Tanh())"]
    lines += ["def image(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 2))"]
    Path("net.py").write_text("\n".join(lines))
    drawn = np.random.default_rng(0)
    y = np.arange(20) % 2
    np.savez("rows.npz", x_train=drawn.normal(size=(20, 4)).astype("float32"), y_train=y)
    np.savez("gray.npz", x_train=drawn.integers(0, 255, (20, 4, 4), dtype=np.uint8), y_train=y)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("mlp --data rows.npz --memory banana", "pass --memory 2GB, or no --memory for half"),
        ("mlp --data rows.npz --shots 0", "leave --shots out"),
        ("mlp --data rows.npz --weight 2", "--weight 2.0"),
        ("mlp --data rows.npz --size 8", "leave out --size, --channels, --mean, --std"),
        ("mlp --data rows.npz --params ((", r"as in --params 0\.weight"),
        ("mlp --data rows.npz --metric kfac --solver sketch", "pass --metric none"),
        ("mlp --data rows.npz --loss cross-entropy --ridge gcv", "--ridge gcv with --loss cross-entropy"),
        ("mlp --data rows.npz --cross-fit 1", "pass --cross-fit 5"),
        ('mlp --data rows.npz --model-args {"a":1}', "check --model-args"),
        ("image --data gray.npz", "for images --channels, --size and --mean make it"),
        ("image --data gray.npz --channels 2", "1 or 3"),
        ("image --data gray.npz --std 2", "leave --std out for a mean by name"),
        ("encoder --data rows.npz --method linear", "put a layer of your own behind an encoder"),
    ],
)
def test_wrong_input_is_answered_in_options(
    task: None, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["adapt", "-q", "--model", *f"net.py:{words}".split(), "--out", "run"]) == 2
    answer = capsys.readouterr().err
    assert told in answer
    assert not PYTHON.findall(answer)
