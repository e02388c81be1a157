"""Folders that go to the Hugging Face Hub and come from it, by huggingface_hub: ``linnet-torch[hub]``.

Who is asked, under which name and from which cache, is huggingface_hub's own: ``hf auth login``,
``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` hold as everywhere.
"""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from linnet import __version__, params
from linnet.distribution import importing, install_command
from linnet.errors import InputError, LinnetError
from linnet.files import LABELS
from linnet.hub.card import CARD, is_own_card
from linnet.hub.folder import named_files

PREFIX = "hf:"
_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_CALLER = {"library_name": "linnet", "library_version": __version__}


def push(repo_id: str, write: Callable[[Path, str], object], private: bool, message: str) -> str:
    """Write a folder, and put it into a repository in one commit; what only its old one named goes."""
    hub = _package("push_to_hub")
    _check_name("repo_id", repo_id)
    params.flag("private", private)
    with tempfile.TemporaryDirectory(prefix="linnet-") as parent:
        folder = Path(parent) / "folder"
        write(folder, f"{PREFIX}{repo_id}")
        with _asking(f"repo_id={repo_id!r} cannot be written", "a repository that you may write to"):
            api = hub.HfApi(**_CALLER)
            api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise InputError(
                    f"the repository {repo_id} is public",
                    expected="a private one, since private=True",
                    remedy="make it private on the Hub, or publish what the folder holds by private=False",
                )
            edited = api.file_exists(repo_id, CARD) and not is_own_card(
                Path(api.hf_hub_download(repo_id, CARD))
            )
            labels = api.file_exists(repo_id, LABELS) and api.hf_hub_download(repo_id, LABELS)
            old = [glob.escape(name) for name in named_files(Path(labels))] if labels else None
            done = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=message,
                ignore_patterns=[CARD] if edited else None,
                delete_patterns=old,  # but for what comes anew
            )
    return str(done.commit_url)


def fetch(name: str, files: Sequence[str]) -> Path:
    """A folder of the Hub, from the cache where it is there."""
    hub = _package(f"{PREFIX}{name}")
    repo_id, at, revision = name.partition("@")
    _check_name("directory", repo_id)
    if at and not _REVISION.fullmatch(revision):
        params.refuse("directory", f"{PREFIX}{name}", "a branch, tag or commit after the @", "name one")
    wanted = [LABELS, *files]
    with _asking(f"{PREFIX}{name} cannot be downloaded", "a repository of the Hub that you may read"):
        found = hub.snapshot_download(repo_id, revision=revision or None, allow_patterns=wanted, **_CALLER)
    return Path(found)


def _package(what: str) -> ModuleType:
    """huggingface_hub itself."""
    with importing("huggingface_hub", what, "huggingface_hub beside linnet", install_command("hub")):
        import huggingface_hub
    return huggingface_hub


def _check_name(argument: str, repo_id: Any) -> None:
    """Raise unless a text can be the full name of a repository; the client knows the finer rules."""
    if not isinstance(repo_id, str) or not _NAME.fullmatch(repo_id):
        expected = "the name of a repository on the Hub, with its owner"
        params.refuse(argument, repo_id, expected, 'write "user/name"')


@contextmanager
def _asking(what: str, expected: str) -> Iterator[None]:
    """Tell what the Hub or its client said, whichever of their errors it is."""
    try:
        yield
    except LinnetError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or "no reason given"
        raise InputError(
            f"{what} ({type(error).__name__}: {said})",
            expected=expected,
            remedy="check the name and the connection, and log in with: hf auth login",
        ) from error
