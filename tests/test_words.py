"""Wording of the repository: no machine paths, no unfinished work.

Spelling is checked by `make check`. The patterns are written so that they do not match themselves.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".html", ".css", ".js", ".cfg", ".ini", ""}
EVERYWHERE = {
    "a path of some machine": r"(?<![\w.~])/(?:work|root|tmp|home|Users|opt|mnt)/[\w.]",
    "a tool that writes text": r"\b(?:clau[d]e|anthr[o]pic|chatg[p]t|op[e]nai|cop[i]lot|c[o]dex|gem[i]ni)\b",
    "how the work is organized": r"\b(?:sub-?ag[e]nt|ag[e]ntic|ass[i]stant|the br[i]ef|acceptance ch[e]ck)",
    "the tracker": r"\b(?:this|later|earlier|next) iss[u]e\b|\biss[u]e \d",
}
IN_SOURCE = {"unfinished work": r"\b(?:TO[D]O|FIX[M]E|X[X]X|HAC[K]|NotImplementedErr[o]r\()"}


def listed_files() -> list[Path]:
    """Tracked files and those about to be; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        paths = [ROOT / line for line in done.stdout.splitlines()]
    else:
        hidden = {".venv", ".git", "runs", "build", "dist", "__pycache__"}
        paths = [path for path in ROOT.rglob("*") if not hidden & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and path.suffix in TEXT and path.name != "LICENSE"]


def hits(text: str, patterns: dict[str, str]) -> list[str]:
    """Each line that a pattern matches, with what it is."""
    return [
        f"{number}: {what}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in patterns.items()
        if re.search(pattern, line, re.IGNORECASE if patterns is EVERYWHERE else 0)
    ]


def test_files_are_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in listed_files()}
    assert {
        "README.md",
        "pyproject.toml",
        "Makefile",
        "src/linnet/__init__.py",
        "tests/test_words.py",
    } <= names


def test_no_forbidden_words() -> None:
    found = {}
    for path in listed_files():
        text = path.read_text(encoding="utf-8")
        patterns = [EVERYWHERE, IN_SOURCE] if path.is_relative_to(ROOT / "src") else [EVERYWHERE]
        if lines := [line for group in patterns for line in hits(text, group)]:
            found[path.relative_to(ROOT).as_posix()] = lines
    assert not found


def test_no_forbidden_paths() -> None:
    assert not [path for path in listed_files() if hits(path.relative_to(ROOT).as_posix(), EVERYWHERE)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("see /" + "tmp/results.json", 1),
        ("open('/" + "work/data')", 1),
        ("written with Cla" + "ude", 1),
        ("as the {}ant said".format("assist"), 1),
        ("comes in a later is" + "sue", 1),
        ("see https://example.org/a/page and ../shared/data and ~/tmp/x", 0),
        ("a session-scoped fixture of the agent's environment", 0),
    ],
)
def test_finds_words(text: str, count: int) -> None:
    assert len(hits(text, EVERYWHERE)) == count


def test_finds_unfinished_work() -> None:
    assert (
        len(
            hits("# TO" + "DO: all\nraise NotImplementedErr" + "or()\nexcept NotImplementedError:", IN_SOURCE)
        )
        == 2
    )
