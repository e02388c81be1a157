"""What an installation brings, what importing costs, and that the two agree with what is promised."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import linnet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Requirements of packages that some extras bring and the development environment lacks.
RECORDED = json.loads((ROOT / "tests" / "recorded_requirements.json").read_text())

Requires = Callable[[str], list[str]]


def requirements_of(name: str) -> list[str]:
    """The requirements of a distribution, from its installed metadata or from the record."""
    if name == "linnet":
        optional = [f"{line}; extra == '{extra}'" for extra, lines in EXTRAS.items() for line in lines]
        return [*PROJECT["dependencies"], *optional]
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        assert name in RECORDED, f"{name} is neither installed nor in tests/recorded_requirements.json"
        return list(RECORDED[name]["requires"])


def closure(start: Iterable[str], requires: Requires = requirements_of) -> dict[str, str]:
    """Every distribution that requirements reach, each with the one that asked for it."""
    reached: dict[str, str] = {}
    seen = set[tuple[str, frozenset[str]]]()
    queue = [(Requirement(line), "") for line in start]
    while queue:
        requirement, parent = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        reached.setdefault(name, parent)
        for line in requires(name):
            inner = Requirement(line)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in {"", *extras}
            ):
                queue.append((inner, name))
    return reached


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_nothing_reaches_torchvision(extra: str) -> None:
    reached = closure([f"linnet[{extra}]"])
    assert {"torch", "numpy", "jsonargparse", "docstring-parser"} <= reached.keys()
    assert "torchvision" not in reached, f"torchvision is required by {reached.get('torchvision')}"


def test_the_closure_finds_torchvision_behind_markers_and_extras() -> None:
    graph = {
        "linnet": ["a[fast]>=1", "c; python_version < '3'"],
        "a": ["b; extra == 'fast'", "d; extra == 'slow'"],
        "b": ["torchvision>=0.1"],
        "torchvision": [],
    }
    assert closure(["linnet"], lambda name: graph[name]) == {
        "linnet": "", "a": "linnet", "b": "a", "torchvision": "b",
    }  # fmt: skip


def test_extras_bring_what_they_promise() -> None:
    assert set(EXTRAS) == {"text", "gp", "sklearn", "vision", "report", "dev", "docs"}
    assert "transformers" in closure(["linnet[vision]"])
    assert {"gpytorch", "botorch", "linear-operator"} <= closure(["linnet[gp]"]).keys()
    assert "scikit-learn" in closure(["linnet[sklearn]"])
    assert closure(["linnet[report]"]).keys() == closure(["linnet"]).keys()


def test_the_constraints_hold_here() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                version = RECORDED[name]["version"]
            assert requirement.specifier.contains(version), f"{line}, but {version} is installed"


def test_the_version_is_one() -> None:
    assert importlib.metadata.version("linnet") == linnet.__version__


def modules_after(statement: str) -> set[str]:
    """The top-level modules loaded in a fresh process after a statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {"scipy", "matplotlib", "jinja2", "PIL", "transformers", "jsonargparse", "sklearn", "tqdm", "pandas"}


def test_importing_linnet_and_all_its_names_loads_nothing_heavy_but_torch() -> None:
    """Touches every public name, so that what is loaded on first use counts."""
    plain = modules_after("import torch")
    names = "; ".join(f"linnet.{name}" for name in getattr(linnet, "__all__", ()))
    ours = modules_after(f"import torch, linnet; {names}")
    assert "linnet" in ours
    assert not (ours - plain) & HEAVY


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_command_line_starts_without_torch(word: str) -> None:
    code = f"from linnet.app.cli import main; main(['{word}'])"
    loaded = modules_after(f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {code}")
    assert "linnet" in loaded
    assert not loaded & {"torch", "numpy", *HEAVY}


def test_the_help_of_a_command_loads_no_torch() -> None:
    code = "from linnet.app.cli import Command, COMMANDS\nfor name in COMMANDS: Command.load(name).help()"
    loaded = modules_after(code)
    assert "jsonargparse" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "matplotlib", "PIL", "transformers"}


def test_types_are_shipped() -> None:
    assert (ROOT / "src" / "linnet" / "py.typed").exists()
