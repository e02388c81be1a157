"""``push_to_hub`` and ``hf:`` names, on a Hub in memory and on the real client's own cache."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import linnet
from linnet.errors import DependencyError, FileFormatError, InputError
from linnet.files import LABELS
from linnet.hub.card import CARD
from linnet.saved import READERS
from tests.fitting.problems import network, problem, refused
from tests.hub.hub_stand_in import Hub
from tests.laplace.laplace_problems import classes, fitted

P = problem(tests=2)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path, monkeypatch)


@cache
def fit() -> Any:
    return P.fit(ridge=0.3)


def load(name: str) -> Any:
    return linnet.load(name, P.model)


def test_what_is_pushed_is_read(hub: Hub) -> None:
    address = fit().push_to_hub("me/fit", card={"license": "mit"})
    assert address == "https://hub.example/me/fit/commit/2"
    assert set(hub.files("me/fit")) == {CARD, "linear-fit.safetensors", LABELS}
    assert hub.asked == ["create_repo", "LinearFit of linnet"]
    page = hub.files("me/fit")[CARD].decode()
    assert 'license: "mit"' in page
    assert 'linnet.load("hf:me/fit", network)' in page
    torch.testing.assert_close(load("hf:me/fit").predict(P.x), fit().predict(P.x))
    la, x, _ = fitted("kfac")
    la.push_to_hub("me/posterior")
    again = linnet.load("hf:me/posterior", classes()[0])
    assert torch.allclose(again.predictive(x).variance, la.predictive(x).variance)  # type: ignore[union-attr]


def test_older_commits_are_read_by_their_revision(hub: Hub) -> None:
    fit().push_to_hub("me/fit")
    fit().forget([0]).push_to_hub("me/fit")
    assert (load("hf:me/fit").n, load("hf:me/fit@1").n, load("hf:me/fit@2").n) == (6, 7, 6)


def test_files_of_another_kind_go_with_the_commit(hub: Hub) -> None:
    fit().push_to_hub("me/fit")
    hub.edit("me/fit", "model.safetensors", b"weights")
    fitted("kfac")[0].push_to_hub("me/fit")
    assert set(hub.files("me/fit")) == {
        CARD,
        LABELS,
        "laplace.safetensors",
        "curvature.safetensors",
        "model.safetensors",
    }


def test_only_files_of_linnet_are_downloaded(hub: Hub) -> None:
    """A repository may hold more: weights, pickles, code."""
    fit().push_to_hub("me/fit")
    for name in ("model.safetensors", "pytorch_model.bin", "modeling.py", "a/linear-fit.safetensors"):
        hub.edit("me/fit", name, b"x")
    place = Path(hub.snapshot_download("me/fit", revision=None, allow_patterns=["*"]))
    assert (place / "modeling.py").exists()
    assert load("hf:me/fit").n == 7
    assert sorted(path.name for path in place.iterdir()) == ["linear-fit.safetensors", LABELS]


def test_a_page_that_was_edited_on_the_hub_stays(hub: Hub) -> None:
    fit().push_to_hub("me/fit")
    fit().forget([0]).push_to_hub("me/fit")
    assert b"| examples | 6 |" in hub.files("me/fit")[CARD]
    hub.edit("me/fit", CARD, b"mine")
    fit().push_to_hub("me/fit")
    assert hub.files("me/fit")[CARD] == b"mine"
    assert load("hf:me/fit").n == 7


def test_what_should_be_private_is_not_published(hub: Hub) -> None:
    fit().push_to_hub("me/open", private=False)
    assert hub.public == {"me/open"}
    before = hub.commits["me/open"][:]
    refused(InputError, lambda: fit().push_to_hub("me/open"), "is public", "private=False")
    assert hub.commits["me/open"] == before
    fit().push_to_hub("me/open", False)
    assert len(hub.commits["me/open"]) == len(before) + 1
    fit().push_to_hub("me/closed")
    assert hub.public == {"me/open"}


@pytest.mark.parametrize(
    "name", [None, 3, "", "fit", "a/b/c", "a/b--c", "a/..", "../b", "a b/c", "a/é", "a/b\0", Path("a/b")]
)
def test_what_is_no_name(name: Any, hub: Hub) -> None:
    refused(InputError, lambda: fit().push_to_hub(name), "repo_id", "user/name")
    assert not hub.asked
    if isinstance(name, str):
        refused(InputError, lambda: load(f"hf:{name}"), "directory", "user/name")


@pytest.mark.parametrize("revision", ["", "-x", "../a", "a/../b", "a b", "x" * 300])
def test_what_is_no_revision(revision: str, hub: Hub) -> None:
    fit().push_to_hub("me/fit")
    refused(InputError, lambda: load(f"hf:me/fit@{revision}"), "directory", "branch, tag or commit")


def test_nothing_is_asked_where_nothing_can_be_written(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = linnet.linear_posterior(P.lin, (P.x, P.y), linnet.likelihoods.Categorical())
    refused(InputError, lambda: posterior.push_to_hub("me/fit"), "LinearPosterior")
    refused(InputError, lambda: posterior.save_pretrained("a"), "LinearPosterior")
    process = linnet.TangentGP(P.model, linnet.likelihoods.Gaussian())
    with pytest.raises(linnet.errors.LinnetError, match="fit"):
        process.push_to_hub("me/fit")
    refused(InputError, lambda: fit().push_to_hub("me/fit", card={"a b": 1}), "card")
    refused(InputError, lambda: fit().push_to_hub("me/fit", private="yes"), "private='yes'")
    assert not hub.asked


def test_what_the_hub_says_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InputError, lambda: load("hf:me/none"), "hf:me/none", "404 Client Error", "hf auth login")

    def denied(**_: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "upload_folder", denied)
    refused(
        InputError,
        lambda: fit().push_to_hub("me/fit"),
        "me/fit",
        "ConnectionError: no route to host",
        "log in",
    )


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: fit().push_to_hub("me/fit"), lambda: load("hf:me/fit")):
        refused(DependencyError, call, "huggingface_hub", "pip install 'linnet-torch[hub]'")
    fit().save_pretrained(tmp_path)
    assert load(str(tmp_path)).n == 7


def test_a_repository_without_a_model(hub: Hub) -> None:
    hub.commits["me/other"] = [{"config.json": b"{}", LABELS: b"{}"}]
    refused(FileFormatError, lambda: load("hf:me/other"), LABELS, "not written by linnet")
    fit().push_to_hub("me/fit")
    hub.commits["me/fit"].append({n: c for n, c in hub.files("me/fit").items() if n == LABELS})
    refused(FileFormatError, lambda: load("hf:me/fit"), "lacks linear-fit.safetensors")
    refused(FileFormatError, lambda: linnet.load("hf:me/fit@1", network(seed=5)), "weights differ")


def test_the_client_reads_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ``snapshot_download``, offline: contents in ``blobs``, links to them in ``snapshots``."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, place = "0123456789" * 4, tmp_path / "cache" / "models--me--fit"
    fit().save_pretrained(tmp_path / "folder")
    for file in (tmp_path / "folder").iterdir():
        blob, link = place / "blobs" / file.name, place / "snapshots" / commit / file.name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link.symlink_to(Path("..") / ".." / "blobs" / file.name)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    for name in ("hf:me/fit", f"hf:me/fit@{commit}"):
        assert load(name).n == 7
    refused(InputError, lambda: load("hf:me/none"), "hf:me/none", "connection")
    (place / "snapshots" / commit / "linear-fit.safetensors").unlink()
    with pytest.raises((FileFormatError, InputError)):
        load("hf:me/fit")


def test_a_local_folder_of_that_name_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit().save_pretrained("hf:me/fit")
    assert load("./hf:me/fit").n == 7
    assert linnet.load(Path("hf:me/fit"), P.model).n == 7  # type: ignore[union-attr]


def test_every_kind_can_be_in_a_folder() -> None:
    """Curvatures come with a posterior."""
    assert set(READERS) - {"curvature"} == {"linear-fit", "nested-fit", "laplace", "tangent-gp", "finetuned"}
