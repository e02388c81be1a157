"""Runs and settings of somebody else: no code of theirs runs unless it was named or trusted."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from linnet.app.models import load_model
from linnet.app.runs.folder import load_run, save_run
from linnet.app.runs.trust import check_settings, factory_file, state_folder
from linnet.errors import InputError, ModelError
from linnet.files import read_json, write_json
from linnet.integrations.pretrained import code_arguments
from tests.app.runs.small_tasks import linnet

MARK = "\nimport pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.fixture
def received(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that somebody else made, with its factory in it, for a user who knows nothing of it."""
    run = tmp_path / "got"
    ignored = shutil.ignore_patterns("predict", "explain", "spectrum")
    shutil.copytree(workshop / "pictures", run, ignore=ignored)
    (run / "net.py").write_text((workshop / "nets.py").read_text() + MARK)
    record = read_json(run / "run.json", "run")
    record["origin"]["spec"] = f"{run / 'net.py'}:conv"
    write_json(run / "run.json", record, kind="run")
    monkeypatch.setenv("LINNET_STATE", str(tmp_path / "state"))
    return run


def ran(run: Path) -> bool:
    """Whether the code in a run folder ran since this was last asked."""
    mark = run / "ran"
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def explain(run: Path, out: Path, *more: object, code: int = 0) -> None:
    """Run one of the commands that open a run."""
    linnet("explain", "--run", run, "--ids", "test/3", "--out", out, *more, code=code)


def test_a_received_run_is_refused_until_it_is_trusted(
    received: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", "--run", received, "--ids", "test/3", "--out", tmp_path / "why"]
    linnet(*words, code=2)
    what, _, remedy = capsys.readouterr().err.splitlines()
    assert f"opening {received} would run {received}/net.py:conv, which you have not" in what
    assert "--trust" in remedy
    assert "--model FILE:FACTORY" in remedy
    assert not ran(received)
    linnet(*words, "--trust")
    assert ran(received)
    linnet(*words)  # remembered
    assert ran(received)
    (received / "net.py").write_text((received / "net.py").read_text() + "\n# more\n")
    linnet(*words, code=2)
    assert "which has changed since" in capsys.readouterr().err
    assert not ran(received)


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "--data", "{pictures}"],
        ["forget", "--ids", "train/3", "--out", "{out}"],
        ["update", "--data", "{pictures}", "--out", "{out}"],
        ["spectrum", "--out", "{out}"],
    ],
)
def test_every_command_asks(
    received: Path, workshop: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [w.format(pictures=workshop / "pictures.npz", out=tmp_path / "out") for w in words]
    linnet(*given, "--run", received, code=2)
    assert "which you have not named" in capsys.readouterr().err
    assert not ran(received)
    assert not (tmp_path / "out").exists()


def test_a_factory_that_the_user_names(received: Path, workshop: Path, tmp_path: Path) -> None:
    explain(received, tmp_path / "why", "--model", f"{workshop / 'nets.py'}:conv")
    assert not ran(received)
    explain(received, tmp_path / "why", code=2)  # for that call alone
    (received / "net.py").unlink()
    explain(received, tmp_path / "why", code=2)
    out = tmp_path / "less"
    words = ["--run", received, "--model", f"{workshop / 'nets.py'}:conv"]
    linnet("forget", *words, "--ids", "train/3", "--out", out)
    explain(out, tmp_path / "why")  # a run of one's own, and with the factory that was named


def test_in_python(received: Path, workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which you have not named"):
        load_run(received)
    assert not ran(received)
    run = load_run(received, model=f"{workshop / 'nets.py'}:conv")
    assert not ran(received)
    save_run(tmp_path / "own", run)
    load_run(tmp_path / "own")
    load_run(received, trust=True)
    load_run(received)
    shutil.copytree(tmp_path / "own", tmp_path / "moved")
    load_run(tmp_path / "moved")  # what is in the folder counts, not where it is


def test_what_others_could_have_written_is_not_believed(received: Path, tmp_path: Path) -> None:
    load_run(received, trust=True)
    known = tmp_path / "state" / "trusted"
    assert known.stat().st_mode & 0o777 == 0o700
    known.chmod(0o777)
    with pytest.raises(InputError, match="which you have not named"):
        load_run(received)
    known.chmod(0o700)
    load_run(received)


def test_where_nothing_can_be_remembered(
    received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LINNET_STATE", str(tmp_path / "file"))
    load_run(received, trust=True)
    with pytest.raises(InputError, match="which you have not named"):
        load_run(received)


def test_where_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINNET_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "linnet"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which XDG says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "linnet"


def rewrite(run: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change the origin of a run, and seal it again as anybody can."""
    record = read_json(run / "run.json", "run")
    change(record["origin"])
    write_json(run / "run.json", record, kind="run")


def test_arguments_that_run_code_are_not_taken_from_a_run(received: Path, workshop: Path) -> None:
    rewrite(received, lambda origin: origin.update(spec="hf:nothing", arguments={"trust_remote_code": True}))
    with pytest.raises(InputError, match="passes trust_remote_code to hf:nothing"):
        load_run(received)
    with pytest.raises(InputError, match="passes trust_remote_code"):  # the network, but not this, was named
        load_run(received, model=f"{workshop / 'nets.py'}:conv")


MODEL_CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path(__file__).with_name("ran").touch()
class Config(PretrainedConfig):
    model_type = "vit"
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for hf: with code of its own, beside a settings file that asks for that code."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "mod.py").write_text(MODEL_CODE.replace("__file__", repr(str(folder / "mod.py"))))
    config = {"model_type": "vit", "auto_map": {"AutoConfig": "mod.Config"}, "architectures": ["None"]}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "got.yaml").write_text(f"model: hf:{folder}\nmodel_args:\n  trust_remote_code: true\n")
    return folder


def test_a_models_own_code_runs_only_where_it_is_asked_for(remote: Path) -> None:
    with pytest.raises(ModelError):  # it has no weights
        load_model(f"hf:{remote}")
    assert not ran(remote)
    with pytest.raises(ModelError):
        load_model(f"hf:{remote}", model_args={"trust_remote_code": True})
    assert ran(remote)


def test_arguments_that_run_code_are_not_taken_from_settings(
    remote: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "--data", workshop / "pictures.npz"]
    for more in ([], ["--trust"], ["--model", f"hf:{remote}"], ["--model-args.num_labels", "3"]):
        linnet(*words, "--config", tmp_path / "got.yaml", *more, code=2)
        assert "passes trust_remote_code to hf:" in capsys.readouterr().err
    typed = ["--model-args", '{"trust_remote_code": false}']
    linnet(*words, *typed, "--config", tmp_path / "got.yaml", code=2)  # what is typed has the last word
    assert "passes" not in capsys.readouterr().err
    assert not ran(remote)


def test_settings_that_name_a_factory(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINNET_STATE", str(tmp_path / "state"))
    nets, file = tmp_path / "net.py", tmp_path / "got.yaml"
    nets.write_text((workshop / "nets.py").read_text() + MARK)
    file.write_text(f"model: {nets}:conv\ndata: {workshop / 'pictures.npz'}\ntrust: true\n")
    linnet("check", "--config", file, code=2)
    assert "there is no option --trust" in capsys.readouterr().err
    file.write_text(f"model: {nets}:conv\ndata: {workshop / 'pictures.npz'}\n")
    linnet("check", "--config", file, code=2)
    assert f"the settings file would run {nets}:conv, which you have not named" in capsys.readouterr().err
    linnet("check", "--model", f"{workshop / 'nets.py'}:conv", "--config", file)
    assert not ran(tmp_path)
    linnet("check", "--config", file, code=2)
    linnet("check", "--config", file, "--trust")
    assert ran(tmp_path)
    linnet("check", "--config", file)
    nets.write_text(nets.read_text() + "\n")
    linnet("check", "--config", file, code=2)
    assert "which has changed since" in capsys.readouterr().err
    linnet("check", "--config", file, "--model", f"{nets}:conv")
    linnet("check", "--config", file)


def test_settings_of_ones_own_run_are_taken(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINNET_STATE", str(tmp_path / "state"))
    words = ["--data", workshop / "pictures.npz", "--ridge", 1, "--out", tmp_path / "run"]
    linnet("adapt", "--model", f"{workshop / 'nets.py'}:conv", *words)
    linnet("adapt", "--config", tmp_path / "run" / "run.yaml")
    explain(tmp_path / "run", tmp_path / "why")
    assert "trust" not in (tmp_path / "run" / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"num_labels": 3, "trust_remote_code": False, "weights_only": True, "pretrained": True}, ()),
        ({"trust_remote_code": 1}, ("trust_remote_code",)),
        ({"trust_remote_code": "yes", "code_revision": "x"}, ("trust_remote_code", "code_revision")),
        ({"weights_only": False}, ("weights_only",)),
        ({"weights_only": 0}, ("weights_only",)),
        ({"a": [{"b": {"class_path": "os.system"}}]}, ("a.b.class_path",)),
        ({"_class_path": "x"}, ("_class_path",)),
        ({"attn_implementation": "sdpa"}, ()),
        ({"attn_implementation": "someone/kernels"}, ("attn_implementation",)),
        ({"checkpoint_path": "w.pth"}, ("checkpoint_path",)),
        ({"allow_pickle": True}, ("allow_pickle",)),
        (None, ()),
    ],
)
def test_which_arguments_run_code(arguments: object, names: tuple[str, ...]) -> None:
    assert code_arguments(arguments) == names


def test_what_was_typed_counts_by_its_whole_name() -> None:
    nested = {"model": "timm:x", "model_args": {"kwargs": {"weights_only": False}}}
    for typed in ({"model_args": {"weights_only": False}}, {"shots": "weights_only"}):
        with pytest.raises(InputError, match=r"passes kwargs\.weights_only"):
            check_settings(nested, typed, trust=True)
    check_settings(nested, {"model_args": {"kwargs": {"weights_only": False}}}, trust=False)
    check_settings(nested, None, trust=False)  # without a file everything was typed


def test_which_networks_are_files() -> None:
    assert factory_file("nets.py:conv") == Path("nets.py")
    assert factory_file("hf:a/b") is factory_file("timm:a") is factory_file("torchvision:a") is None
