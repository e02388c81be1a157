"""Contents of an installation, import cost, and agreement of both with the requirements."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import linnet
from linnet import distribution, machine
from linnet.app import cli
from linnet.errors import DependencyError
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Requirements of packages that some extras bring and the development environment lacks.
RECORDED = json.loads((ROOT / "tests" / "recorded_requirements.json").read_text())

Requires = Callable[[str], list[str]]


def requirements_of(name: str) -> list[str]:
    """The requirements of a distribution, from its installed metadata or from the record."""
    if name == distribution.NAME:
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
@pytest.mark.thinned(3)
def test_nothing_reaches_torchvision(extra: str) -> None:
    reached = closure([f"linnet-torch[{extra}]"])
    assert {"torch", "numpy", "pyyaml"} <= reached.keys()
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
    assert set(EXTRAS) == {"text", "gp", "sklearn", "onnx", "dev", "docs", "experiments"}
    assert "transformers" in closure(["linnet-torch[text]"])
    assert {"gpytorch", "botorch", "linear-operator"} <= closure(["linnet-torch[gp]"]).keys()
    assert "scikit-learn" in closure(["linnet-torch[sklearn]"])
    assert {"onnx", "onnxscript", "onnxruntime"} <= closure(["linnet-torch[onnx]"]).keys()


def test_doctor_names_what_every_extra_brings() -> None:
    extras = {name: lines for name, lines in EXTRAS.items() if name not in ("dev", "docs", "experiments")}
    brought = {canonicalize_name(Requirement(line).name) for lines in extras.values() for line in lines}
    assert brought <= {canonicalize_name(name) for name in machine.OPTIONAL}


def test_one_place_knows_the_distribution() -> None:
    assert PROJECT["name"] == distribution.NAME
    required = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert required == {*distribution.LIBRARY, *distribution.APPLICATION.values()}
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "pip install linnet " not in text, path
        assert "linnet[" not in text, path
        if path.name != "distribution.py":
            assert not re.search(r"""remedy=.*["']pip install '?linnet""", text), path


def test_the_pages_install_this_project() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    pattern = r"pip install[^`\n]*?[ '\"](linnet(?:-\w+)?)\b"
    found = {name for page in pages for name in re.findall(pattern, page.read_text(encoding="utf-8"))}
    assert found == {distribution.NAME}


def test_installations_of_others_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Metadata as pip leaves them for an unrelated project, and for an editable checkout of that name."""
    folder = tmp_path / "linnet-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: linnet\nVersion: 0.1.0\n")
    record = folder / "RECORD"
    record.write_text("linnet/__init__.py,,\nlinnet-0.1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    remedy = distribution.namesake()
    assert remedy is not None
    assert remedy.startswith("pip uninstall --yes linnet,")
    assert remedy.endswith(distribution.NAME)
    record.write_text("_linnet.pth,,\nlinnet-0.1.0.dist-info/METADATA,,\n")
    assert distribution.namesake() is None


def test_doctor_names_a_namesake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "linnet-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: linnet\n")
    (folder / "RECORD").write_text("linnet/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["doctor", "--seconds", "0.01"]) == 1
    assert "pip uninstall --yes linnet" in capsys.readouterr().out


def test_a_package_that_was_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linnet, "__all__", ["hello"])
    with pytest.raises(DependencyError, match="another project's"):
        distribution.require_own_package()
    assert cli.main(["doctor"]) == 2
    assert "pip install --force-reinstall --no-deps linnet-torch" in capsys.readouterr().err


def test_the_record_of_how_to_cite_agrees() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == linnet.__version__
    assert [author["name"] for author in cited["authors"]] == [who["name"] for who in PROJECT["authors"]]
    assert cited["license"] in PROJECT["license"]


def test_a_release_is_checked_before_it_is_published() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert any("python -m build" in step for step in steps)
    assert any("twine check --strict" in step for step in steps)
    assert set(jobs["publish"]["needs"]) == {"build", "try"}
    lowest = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert all(entry["torch"] in ("", "2.6.0") for entry in jobs["try"]["strategy"]["matrix"]["include"])
    assert lowest.specifier.contains("2.6.0")
    assert not lowest.specifier.contains("2.5.1")
    pythons = {entry["python"] for entry in jobs["try"]["strategy"]["matrix"]["include"]}
    assert {f"Programming Language :: Python :: {python}" for python in pythons} <= set(
        PROJECT["classifiers"]
    )


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
    assert importlib.metadata.version(distribution.NAME) == linnet.__version__


def modules_after(statement: str) -> set[str]:
    """The top-level modules loaded in a fresh process after a statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {"scipy", "matplotlib", "jinja2", "PIL", "transformers", "yaml", "sklearn", "tqdm", "pandas"}


def test_importing_linnet_and_all_its_names_loads_nothing_heavy_but_torch() -> None:
    """Touches every public name, so that what is loaded on first use counts."""
    plain = modules_after("import torch")
    names = "; ".join(f"linnet.{name}" for name in getattr(linnet, "__all__", ()))
    ours = modules_after(f"import torch, linnet; {names}")
    assert "linnet" in ours
    assert not (ours - plain) & HEAVY


def test_public_packages_are_loaded_on_first_use_and_export_their_classes() -> None:
    code = "; ".join([
        "import linnet, sys",
        "assert {name for name in sys.modules if name.startswith('linnet.')} == {'linnet.pages'}",
        "linnet.errors.InputError, linnet.solvers.cg, linnet.examples.load_digits",
        "linnet.distributed.sharing, linnet.integrations",
        "from linnet.laplace import Laplace",
        "from linnet.finetuning import finetune",
        "assert linnet.Laplace is Laplace and linnet.finetune is finetune",
    ])  # fmt: skip
    modules_after(code)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_command_line_starts_without_torch(word: str) -> None:
    code = f"from linnet.app.cli import main; main(['{word}'])"
    loaded = modules_after(f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {code}")
    assert "linnet" in loaded
    assert not loaded & {"torch", "numpy", *HEAVY}


def test_the_help_of_a_command_loads_no_torch() -> None:
    code = "from linnet.app.cli import Command, COMMANDS\nfor name in COMMANDS: Command.load(name).help()"
    loaded = modules_after(code)
    assert "argparse" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "matplotlib", "PIL", "transformers"}


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
"""


def test_the_library_works_without_the_packages_of_the_application() -> None:
    loaded = modules_after(
        ABSENT.format(names=tuple(distribution.APPLICATION)) + "import torch, linnet\n"
        "net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))\n"
        "x, y = torch.randn(8, 3), torch.arange(8) % 2\n"
        "fit = linnet.fit(linnet.linearize(net), (x, y), ridge=1.0)\n"
        "fit.predictive(x).probs; fit.loo(); fit.forget([1])"
    )
    assert "linnet" in loaded
    assert not loaded & distribution.APPLICATION.keys()


def test_the_command_line_says_in_one_sentence_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    absent = {"matplotlib", "PIL"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in absent else real(name, *rest)
    )
    assert cli.main(["adapt"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error:     the command line needs pillow and matplotlib, which are not installed",
        "expected:  the packages of the command line",
        "to fix it: pip install linnet-torch",
    ]
    assert (
        cli.main(["--help"]) == 0
    )  # as does help without a command, and doctor, which says it in its own way
    capsys.readouterr()
    assert cli.main(["doctor", "--help"]) == 0


def test_types_are_shipped() -> None:
    assert (ROOT / "src" / "linnet" / "py.typed").exists()
