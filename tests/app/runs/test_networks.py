"""One of several networks, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from linnet.app import cli
from tests.app.runs.small_tasks import NETS, linnet, result, write_pictures, write_table

# the second reads only what hangs together with no class: the brightness of one corner
MORE = """
class Corner(nn.Module):
    def forward(self, x):
        return x[..., :1, :1].flatten(1)

def blind():
    torch.manual_seed(0)
    return nn.Sequential(Corner(), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3))
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    """A file of factories, one of them of little use."""
    path = tmp_path / "nets.py"
    path.write_text(NETS + MORE)
    write_pictures(tmp_path / "pictures.npz")
    return path


@pytest.mark.long
def test_the_best_of_several_networks(nets: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures.npz"
    both = "--model", f"{nets}:blind", "--model", f"{nets}:conv"
    linnet("adapt", "--data", pictures, *both, "--out", tmp_path / "both")
    linnet("adapt", "--data", pictures, "--model", f"{nets}:conv", "--out", tmp_path / "alone")
    found, alone = (result(tmp_path / name) for name in ("both", "alone"))
    assert "Network 2 (nets.py:conv) of 2 gives" in " ".join(found["verdict"]["sentences"])
    assert found["scores"][0]["accuracy"] == alone["scores"][0]["accuracy"]
    assert found["title"] == alone["title"] == "pictures from conv"
    settings = yaml.safe_load((tmp_path / "both" / "run.yaml").read_text())
    assert settings["model"] == [f"{nets}:blind", f"{nets}:conv"]
    # the run knows its network, and its settings make it again
    linnet("predict", "--run", tmp_path / "both", "--data", pictures)
    linnet("adapt", "--config", tmp_path / "both" / "run.yaml", "--out", tmp_path / "again")
    assert result(tmp_path / "again")["verdict"] == found["verdict"]


def test_a_run_that_was_interrupted_keeps_its_choice(
    nets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linnet.app.runs import adaptation

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = ["adapt", "--data", str(tmp_path / "pictures.npz"), "--out", str(tmp_path / "both")]
    words += ["--model", f"{nets}:conv", "--model", f"{nets}:blind"]
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "evaluated", stopped)
        assert cli.main(words) == 130
    solved = adaptation.solved
    monkeypatch.setattr(adaptation, "solved", stopped)  # nothing is fitted again
    assert cli.main(words) == 0
    monkeypatch.setattr(adaptation, "solved", solved)
    assert (
        " ".join(result(tmp_path / "both")["verdict"]["sentences"]).count("Network 1 (nets.py:conv) of 2")
        == 1
    )


def test_an_interrupted_run_of_other_settings_is_not_continued(nets: Path, tmp_path: Path) -> None:
    words = [
        "adapt",
        "--data",
        tmp_path / "pictures.npz",
        "--out",
        tmp_path / "run",
        "--model",
        f"{nets}:conv",
    ]
    linnet(*words, "--ridge", 0.1)
    (tmp_path / "run" / "result.json").unlink()  # as if it had been stopped before its end
    linnet(*words, "--ridge", 10, "--overwrite")
    assert result(tmp_path / "run")["fit"]["ridge"] == 10


def test_no_network_or_one_in_a_list(nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "mine.yaml"
    settings.write_text(f"model: []\ndata: {tmp_path / 'pictures.npz'}\n")
    assert cli.main(["adapt", "--config", str(settings), "--out", str(tmp_path / "run")]) == 2
    assert "is an empty list" in capsys.readouterr().err
    settings.write_text(f"data: {tmp_path / 'pictures.npz'}\n")
    words = ["adapt", "--config", str(settings), "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--model", f"{nets}:conv", "--model-args", '{"width": 4}']) == 0
    assert cli.main(["check", "--model", "a.py:a", "--model", "b.py:b", "--data", "x.npz"]) == 2
    assert "--model is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--quick"], "--quick True with several networks"),
        (["--weights", "net.pt"], "--weights with several networks"),
        (["--model-args", '{"width": 3}'], "--model-args with several networks"),
    ],
)
def test_what_describes_one_network_is_refused(
    nets: Path, tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--model", f"{nets}:conv", "--model", f"{nets}:blind"]
    data = ["--data", str(tmp_path / "pictures.npz"), "--out", str(tmp_path / "run")]
    assert cli.main(["adapt", *data, *both, *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_of_others_run_none_of_several_networks(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINNET_STATE", str(tmp_path / "state"))
    file = tmp_path / "theirs.yaml"
    file.write_text(f"model: ['timm:resnet18', '{nets}:conv']\ndata: {tmp_path / 'pictures.npz'}\n")
    assert cli.main(["adapt", "--config", str(file), "--out", str(tmp_path / "run")]) == 2
    assert f"would run {nets}:conv" in capsys.readouterr().err


def test_a_lone_linear_layer_on_features(tmp_path: Path) -> None:
    nets = tmp_path / "nets.py"
    nets.write_text(NETS + "\ndef lone():\n    torch.manual_seed(0)\n    return nn.Linear(3, 1)\n")
    table = write_table(tmp_path / "prices.csv")
    linnet("adapt", "--data", table, "--model", f"{nets}:lone", "--out", tmp_path / "run")
    linnet("forget", "--run", tmp_path / "run", "--ids", "line 2", "--out", tmp_path / "without")
    linnet("predict", "--run", tmp_path / "without", "--data", table)
