"""The notebooks in docs/: what they call exists, and each runs to its end and holds what its text says."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?::[\w-]+:[^\n]*\n)*(.*?)^```$", re.DOTALL | re.MULTILINE)
NOTEBOOKS = [
    page for page in sorted((ROOT / "docs").glob("**/*.md")) if "\nkernelspec:" in page.read_text("utf-8")
]
WIDEST = 88  # characters of a line of code that a page shows without scrolling

by_name = pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)


def cells(text: str) -> list[str]:
    """The code cells of a text notebook."""
    return CELL.findall(text)


def missing_names(code: str) -> list[str]:
    """Names of linnet that the code imports or reaches from a module of linnet, and that do not exist."""
    tree = ast.parse(code)
    known: dict[str, Any] = {}
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.name: importlib.import_module(a.name) for a in node.names if a.name == "linnet"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "linnet":
            module = importlib.import_module(node.module or "")
            known |= {a.name: getattr(module, a.name, None) for a in node.names}
            missing += [a.name for a in node.names if not hasattr(module, a.name)]
    for node in ast.walk(tree):
        path: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id in known:
            found = known[inner.id]
            for name in path:
                found = getattr(found, name, None)
            if found is None:
                missing.append(".".join([inner.id, *path]))
    return missing


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 7
    assert {page.parent.name for page in NOTEBOOKS} == {"notebooks"}


@by_name
def test_what_a_notebook_calls_exists(page: Path) -> None:
    code = cells(page.read_text("utf-8"))
    assert len(code) > 5
    assert not missing_names("\n".join(code))
    assert not [line for line in "\n".join(code).splitlines() if len(line) > WIDEST]


def test_a_name_that_is_gone_is_found() -> None:
    text = "```{code-cell}\n:tags: [remove-cell]\n\nimport linnet\nlinnet.fit, linnet.audit.nothing\n```\n"
    (code,) = cells(text)
    assert missing_names(code) == ["linnet.audit.nothing"]
    assert missing_names("from linnet.examples import load_letters") == ["load_letters"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of torch's tensors
@by_name
def test_a_notebook_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINNET_PROGRESS", "0")
    with mpl.rc_context({"backend": "Agg"}):
        scope: dict[str, Any] = {}
        for number, code in enumerate(cells(page.read_text("utf-8"))):
            exec(compile(code, f"{page.name}, cell {number}", "exec"), scope)
            plt.close("all")
