"""A Hub in memory behind the calls of huggingface_hub that linnet makes; nothing is asked over a network."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Files = dict[str, bytes]


class Hub:
    """Repositories with their commits."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.folder, self.commits, self.public = folder, dict[str, list[Files]](), set[str]()
        self.asked: list[str] = []
        patch.setattr(huggingface_hub, "HfApi", lambda **_: self)
        patch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def files(self, name: str) -> Files:
        """What stands in a repository now."""
        return self.commits[name][-1]

    def edit(self, name: str, file: str, text: bytes) -> None:
        """A commit by hand."""
        self.commits[name].append({**self.files(name), file: text})

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.asked.append("create_repo")
        if repo_id not in self.commits:
            self.commits[repo_id] = [{}]
            if not private:
                self.public.add(repo_id)

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=repo_id not in self.public)

    def file_exists(self, repo_id: str, filename: str) -> bool:
        return filename in self.files(repo_id)

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        path = self.folder / "downloaded" / filename
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.files(repo_id)[filename])
        return str(path)

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: Path,
        commit_message: str,
        ignore_patterns: list[str] | None,
        delete_patterns: list[str] | None,
    ) -> Any:
        self.asked.append(commit_message)
        new = {
            path.relative_to(folder_path).as_posix(): path.read_bytes()
            for path in folder_path.rglob("*")
            if path.is_file() and path.name not in (ignore_patterns or [])
        }
        gone = delete_patterns or []
        kept = {
            name: content
            for name, content in self.files(repo_id).items()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in gone)
        }
        self.commits[repo_id].append({**kept, **new})
        return SimpleNamespace(
            commit_url=f"https://hub.example/{repo_id}/commit/{len(self.commits[repo_id])}"
        )

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], **_: str
    ) -> str:
        """As the cache of the client keeps it: links into a folder of contents."""
        if repo_id not in self.commits:
            raise OSError("404 Client Error")
        at = len(self.commits[repo_id]) - 1 if revision is None else int(revision)
        place = self.folder / "cache" / repo_id / str(at)
        shutil.rmtree(place, ignore_errors=True)
        for name, content in self.commits[repo_id][at].items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                blob, link = place / "blobs" / name, place / "snapshot" / name
                for path in (blob, link):
                    path.parent.mkdir(parents=True, exist_ok=True)
                blob.write_bytes(content)
                link.symlink_to(blob)
        return str(place / "snapshot")
