"""Everything shown is executed: the README, the pages in docs/, the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from enum import EnumType
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

import docstring_parser
import mktestdocs
import pytest
from mktestdocs.__main__ import grab_code_blocks
from torch import Tensor

import linnet
from linnet.app.cli import COMMANDS, main
from tests.architecture import read_tree
from tests.integrations.botorch_stand_in import botorch_or_stand_in
from tests.integrations.timm_stand_in import timm_or_stand_in

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
MODULES = sorted(read_tree(ROOT / "src" / "linnet", "linnet"))
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def python_blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return list(grab_code_blocks(page.read_text(encoding="utf-8"), lang="python"))


PAGES_WITH_CODE = [page for page in PAGES if python_blocks(page)]


def command_blocks(page: Path) -> list[str]:
    """The commands of a page that are to be run after its Python blocks, which write what they need."""
    text = page.read_text(encoding="utf-8")
    if page.parent.name != "tutorials":
        return []
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


PAGES_WITH_COMMANDS = [page for page in PAGES if command_blocks(page)]


@contextmanager
def at_hand(page: Path) -> Iterator[None]:
    """What a page works on: the folder of its name beside it, in the current one, and optional packages."""
    if (beside := page.with_suffix("")).is_dir():
        shutil.copytree(beside, Path.cwd(), dirs_exist_ok=True)
    text = page.read_text(encoding="utf-8")
    with (
        botorch_or_stand_in() if "botorch" in text else nullcontext(),
        timm_or_stand_in() if "import timm" in "".join(python_blocks(page)) else nullcontext(),
    ):
        yield


def shown_commands(page: Path) -> list[list[str]]:
    """Every call of `linnet` that a page shows, as words; what a comment says is left out."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [words[1:] for words in calls if words[:1] == ["linnet"]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path) -> Iterator[None]:
    """Examples may write files."""
    previous = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(previous)


def test_the_readme_runs() -> None:
    assert python_blocks(ROOT / "README.md")
    mktestdocs.check_md_file(ROOT / "README.md", memory=True)


def test_there_are_pages_with_code() -> None:
    assert PAGES_WITH_CODE


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
@pytest.mark.filterwarnings("ignore:::(gpytorch|botorch|linear_operator|pyro)")  # warnings of their own
def test_pages_run(page: Path) -> None:
    with at_hand(page):
        mktestdocs.check_md_file(page, memory=True)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
def test_commands_of_guides_run(page: Path) -> None:
    with at_hand(page):
        mktestdocs.check_md_file(page, memory=True)
        for line in command_blocks(page):
            words = shlex.split(line)
            assert words[0] == "linnet"
            assert not main([*words[1:], "--quiet"]), line


def test_there_are_guides_with_commands() -> None:
    assert len(PAGES_WITH_COMMANDS) >= 5


@cache
def options(command: str) -> set[str]:
    """The options that the help of a command names."""
    with redirect_stdout(io.StringIO()) as out:
        assert not main([command, "--help"])
    return set(re.findall(r"--[\w-]+", out.getvalue()))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_shown_options_exist(page: Path) -> None:
    for command, *words in shown_commands(page):
        if not command.startswith("-"):
            assert command in COMMANDS
            assert {word for word in words if word.startswith("--")} <= options(command), (command, words)


def test_options_are_read() -> None:
    assert "--weights" in options("adapt")
    assert "--wieghts" not in options("adapt")
    assert ["forget", "--run", "runs/demo"] in [call[:3] for call in shown_commands(ROOT / "README.md")]


def test_a_broken_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    assert len(python_blocks(page)) == 2
    with pytest.raises(AssertionError):
        mktestdocs.check_md_file(page, memory=True)


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """The docstrings of a module that hold examples."""
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    report: list[str] = []
    for test in examples(importlib.import_module(name)):
        count = len(test.examples)
        result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append)
        assert result.attempted == count
        assert not result.failed, "".join(report)


def test_there_are_examples_in_docstrings() -> None:
    assert (
        sum(len(test.examples) for name in MODULES for test in examples(importlib.import_module(name))) > 50
    )


# The public surface is documented in full.


def public_objects() -> dict[str, object]:
    """Everything that users reach from `import linnet`: those of its public modules too."""
    found = {}
    for name in getattr(linnet, "__all__", ()):
        member = getattr(linnet, name)
        if isinstance(member, ModuleType):
            inside = [inner for inner in getattr(member, "__all__", ()) if inner not in linnet.__all__]
            found.update({f"{name}.{inner}": getattr(member, inner) for inner in inside})
        elif callable(member):
            found[name] = member
    return found


PUBLIC = public_objects()


def undocumented(thing: object) -> list[str]:
    """What a public function or class lacks: a docstring, an explanation of a parameter, an example."""
    text = inspect.getdoc(thing) or ""
    described = {parameter.arg_name.lstrip("*") for parameter in docstring_parser.parse(text).params}
    faults = [] if text else ["no docstring"]
    is_error = isinstance(thing, type) and issubclass(thing, BaseException)
    if not is_error:
        given = isinstance(thing, EnumType)  # its members are all there are
        parameters = {} if given else inspect.signature(thing).parameters  # type: ignore[arg-type]
        faults += [f"parameter {name} is not explained" for name in parameters if name not in described]
        members = vars(thing).values() if isinstance(thing, type) else ()
        texts = [text, *(member.__doc__ or "" for member in members if isinstance(member, FunctionType))]
        faults += [] if any(">>> " in t for t in texts) else ["no example"]
    return faults


def test_there_is_a_public_surface() -> None:
    assert len(PUBLIC) >= 8


def reference() -> list[str]:
    """The names in the tables of the reference, each of which gets a page."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^   (linnet\.[\w.]+)$", text, re.MULTILINE)


def test_every_public_name_is_in_the_reference() -> None:
    names = set(reference())
    assert not [name for name in PUBLIC if f"linnet.{name}" not in names]


def test_every_name_in_the_reference_exists() -> None:
    names = reference()
    assert len(names) >= 8
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    assert not undocumented(PUBLIC[name])


def test_missing_documentation_is_found() -> None:
    def f(a: int, b: int) -> None:
        """Do it.

        Args:
            a: The one.
        """

    assert undocumented(f) == ["parameter b is not explained", "no example"]


# A shape such as (N, C), (n, *shape) or (), or words that say the same.
AXES = r"\((?:\)|\.\.\.|\*?(?:[A-Z]\w*|[a-z]|\d+)(?:[ ·]\w+)*[,)]|\w+ [+-] \w+,)"
SHAPE = re.compile(AXES + r"|scalar|number|shape|[Ll]ike \w|Σ")


def without_shape(function: object) -> list[str]:
    """Tensors in the signature of a function whose shape its docstring does not tell."""
    text = inspect.getdoc(function) or ""
    parsed = docstring_parser.parse(text)
    told = {parameter.arg_name.lstrip("*"): parameter.description or "" for parameter in parsed.params}
    signature = inspect.signature(function)  # type: ignore[arg-type]
    names = [name for name, p in signature.parameters.items() if is_tensor(p.annotation) and name in told]
    found = [name for name in names if not SHAPE.search(told[name])]
    returned = text if parsed.returns is None else parsed.returns.description or ""
    return found + (
        ["returns"] if is_tensor(signature.return_annotation) and not SHAPE.search(returned) else []
    )


def is_tensor(annotation: object) -> bool:
    """Whether an annotation is a tensor, or a tensor that may be missing."""
    return str(annotation) in {"Tensor", "Tensor | None", "torch.Tensor", str(Tensor)}


@pytest.mark.parametrize("name", PUBLIC)
def test_tensors_have_shapes(name: str) -> None:
    thing = PUBLIC[name]
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return
    members = vars(thing).items() if isinstance(thing, type) else ()
    functions = {key: getattr(value, "fget", value) for key, value in members if not key.startswith("_")}
    checked = {name: thing, **{k: f for k, f in functions.items() if isinstance(f, FunctionType)}}
    assert not {key: faults for key, f in checked.items() if (faults := without_shape(f))}


def test_a_missing_shape_is_found() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        """Do it.

        Args:
            x: Inputs (N, C).
            y: Labels.

        Returns:
            What comes out.
        """
        return x + y

    assert without_shape(f) == ["y", "returns"]


def test_every_page_can_be_reached() -> None:
    """By a table of contents, as `make docs` demands."""
    listed = {"index"}
    for page in PAGES:
        for block in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / name).relative_to(ROOT / "docs").as_posix() for name in names}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    assert listed == {page for page in pages if not page.startswith("_build")}


def test_the_reference_describes_everything_once() -> None:
    """A second description is a warning of Sphinx, which `make docs` takes for an error."""
    names = reference()
    assert not {name for name in names if names.count(name) > 1}
