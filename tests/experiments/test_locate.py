"""Search paths of the data sets."""

from pathlib import Path

import pytest

from experiments.locate import find_data_dir
from linnet.errors import DataError


def test_argument_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.npz").touch()
    monkeypatch.setenv("LINNET_DATA", str(tmp_path / "b"))
    assert find_data_dir() == tmp_path / "b"
    assert find_data_dir(require=["x.npz"]) == tmp_path / "b"
    assert find_data_dir(tmp_path / "a") == tmp_path / "a"


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"x\.npz, y\.npz is not in .*from --data-dir.*LINNET_DATA"):
        find_data_dir(tmp_path, require=["x.npz", "y.npz"])
    monkeypatch.setenv("LINNET_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"there is no folder .*gone \(from LINNET_DATA\)"):
        find_data_dir()
    monkeypatch.delenv("LINNET_DATA")
    monkeypatch.setattr("experiments.locate._CHECKOUT", tmp_path / "checkout")
    with pytest.raises(DataError, match=r"no folder .*\(from \.\./shared/data beside the checkout\)"):
        find_data_dir()
