"""Checks on source text, as pure functions from sources to breaches; tests/test_architecture.py applies them.

A source tree is a dictionary from dotted module names to `Source`. Each check returns one line a breach, so
that it can be proven able to fail on a synthetic tree of a few lines.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

Function = ast.FunctionDef | ast.AsyncFunctionDef
When = Literal["eager", "lazy", "typing"]


@dataclass(frozen=True)
class Source:
    """One file: its dotted name, its text, whether it is a package's __init__; parsed and walked once."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file: eager, lazy, under TYPE_CHECKING, or through import_module("...")."""
        return list(_imports(self, self.tree.body, "eager"))


@dataclass(frozen=True)
class Import:
    """One imported dotted name, the line that says so, when it runs: at once, later, for types."""

    name: str
    line: int
    when: When


Tree = dict[str, Source]


def read_tree(folder: Path, package: str) -> Tree:
    """All python files under a folder, by dotted name."""
    tree = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree[name] = Source(name, path.read_text(encoding="utf-8"), is_package)
        for depth in range(1, len(parts)):
            folder_name = ".".join(parts[:depth])
            tree.setdefault(folder_name, Source(folder_name, "", True))
    return tree


def make_tree(**texts: str) -> Tree:
    """A synthetic tree: a__b="..." is the module linnet.a.b, and folders become packages."""
    tree = {"linnet": Source("linnet", "", True)}
    for key, text in texts.items():
        parts = ["linnet", *key.split("__")]
        for depth in range(2, len(parts)):
            package = ".".join(parts[:depth])
            tree.setdefault(package, Source(package, "", True))
        tree[".".join(parts)] = Source(".".join(parts), text)
    return tree


# Imports


def _imports(source: Source, nodes: Iterable[ast.AST], when: When) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = _absolute(source, node)
            # `from package import name` may import the module package.name; `resolve` decides.
            yield from (Import(f"{package}.{alias.name}", node.lineno, when) for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(str(name), node.lineno, when) for name in names)
        inside = when
        if when == "eager" and isinstance(node, (Function, ast.Lambda)):
            inside = "lazy"
        elif when == "eager" and _is_type_checking(node):
            inside = "typing"
        yield from _imports(source, ast.iter_child_nodes(node), inside)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """The package that `from ... import` names, relative imports made absolute."""
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    kept = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING")


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute, the function of a call or subscript; "" for anything else."""
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def resolve(name: str, tree: Tree) -> str | None:
    """The module of the tree that an imported name loads, or None for other packages."""
    while name not in tree:
        name, _, last = name.rpartition(".")
        if name == "linnet" and last == "__version__":
            return None  # a constant that is set before anything else of the package runs
        if not name:
            return None
    return name


def graph(tree: Tree, when: Collection[When] = ("eager", "lazy", "typing")) -> dict[str, set[str]]:
    """Module -> modules of the tree that it imports, lazy imports included unless told."""
    edges: dict[str, set[str]] = {}
    for source in tree.values():
        found = (resolve(i.name, tree) for i in source.imports if i.when in when)
        edges[source.name] = {target for target in found if target is not None and target != source.name}
    return edges


# Checks on imports


def floor_of(module: str) -> str:
    """`linnet.tangent.kernel` -> `tangent`; `linnet.app.runs.x` -> `app.runs`; the package -> `__init__`."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] == ["app"] else 1
    return ".".join(parts[:depth]) or "__init__"


def undeclared_floors(tree: Tree, floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Parts of the package that the declared order does not know."""
    known = {name for floor in floors for name in floor}
    return [
        f"{module}: `{floor_of(module)}` is in no floor" for module in tree if floor_of(module) not in known
    ]


def upward_imports(tree: Tree, floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports of the same floor (another part of it) or of a floor above."""
    rank = {name: level for level, floor in enumerate(floors) for name in floor}
    return [
        f"{module} imports {target}, which is not below it"
        for module, targets in graph(tree).items()
        for target in sorted(targets)
        if floor_of(module) != floor_of(target)
        and rank.get(floor_of(target), len(floors)) >= rank.get(floor_of(module), -1)
    ]


def cycles(tree: Tree) -> list[str]:
    """Import cycles, found by depth-first search."""
    edges, done, found = graph(tree), set[str](), list[str]()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())
    return found


def eager_heavies(tree: Tree, heavy: Iterable[str]) -> list[str]:
    """Heavy packages imported when the file is, rather than inside the function that needs them."""
    wanted = set(heavy)
    return [
        f"{source.name}:{i.line} imports {i.name} eagerly"
        for source in tree.values()
        for i in source.imports
        if i.when == "eager" and i.name.split(".")[0] in wanted
    ]


def optional_outside(tree: Tree, optional: Iterable[str], home: str) -> list[str]:
    """Optional packages imported, even lazily, anywhere but in one part of the package."""
    wanted = set(optional)
    return [
        f"{source.name}:{i.line} imports {i.name}, which only {home} may"
        for source in tree.values()
        for i in source.imports
        if i.name.split(".")[0] in wanted and floor_of(source.name) != home
    ]


def not_free_of(tree: Tree, light: Iterable[str], heavy: Iterable[str]) -> list[str]:
    """Modules that must start fast and yet reach a heavy package through imports that run at once.

    What a command imports under TYPE_CHECKING counts: what reads the types of options runs it.
    """
    parts, wanted, breaches = set(light), set(heavy), []
    moments: dict[str, tuple[When, ...]] = dict.fromkeys(("app.commands", "commands"), ("eager", "typing"))
    eager = graph(tree, ("eager",))
    for start in (module for module in tree if floor_of(module) in parts):
        at_start = moments.get(floor_of(start), ("eager",))
        reached, queue = {start}, list(graph(tree, at_start)[start])
        while queue:
            module = queue.pop()
            if module not in reached:
                reached.add(module)
                queue += eager[module]
        for module in sorted(reached):
            counted = at_start if module == start else ("eager",)
            for i in tree[module].imports:
                if i.when in counted and i.name.split(".")[0] in wanted:
                    breaches.append(f"{start} reaches {i.name} through {module}:{i.line}")
    return breaches


def other_imports(source: Source, allowed: Iterable[str]) -> list[str]:
    """Imports of anything but the named packages and the standard library."""
    fine = set(allowed) | sys.stdlib_module_names
    return [
        f"{source.name}:{i.line} imports {i.name}" for i in source.imports if i.name.split(".")[0] not in fine
    ]


# Checks on size and shape


def bare_errors(tree: Tree) -> list[str]:
    """Errors of ``linnet.errors`` that are made without what was expected, or without what to do."""
    found = []
    for source in tree.values():
        names = {
            alias.asname or alias.name
            for node in source.nodes
            if isinstance(node, ast.ImportFrom) and node.module == "linnet.errors"
            for alias in node.names
        }
        for call in source.nodes:
            if not isinstance(call, ast.Call) or _dotted(call.func) not in names:
                continue
            given = {keyword.arg for keyword in call.keywords}
            spread = None in given or any(isinstance(one, ast.Starred) for one in call.args)
            told = [
                len(call.args) > place or name in given for place, name in ((1, "expected"), (2, "remedy"))
            ]
            if not spread and not all(told):
                found.append(f"{source.name}:{call.lineno}: {_dotted(call.func)}")
    return found


def forbidden_names(tree: Tree, forbidden: Iterable[str]) -> list[str]:
    """Files and folders named for nothing in particular."""
    return [name for name in tree if set(name.split(".")) & set(forbidden)]


def _classes(tree: Tree) -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in tree.values():
        yield from ((source, node) for node in source.nodes if isinstance(node, ast.ClassDef))


def wide_constructors(tree: Tree, limit: int, allowed: Iterable[str] = ()) -> list[str]:
    """Constructors, written or made by @dataclass, of more parameters than the limit."""
    breaches, fine = [], set(allowed)
    for source, node in _classes(tree):
        count = 0
        for item in node.body:
            if isinstance(item, Function) and item.name == "__init__":
                count = len(item.args.posonlyargs + item.args.args + item.args.kwonlyargs) - 1
            elif isinstance(item, ast.AnnAssign) and any(
                "dataclass" in _dotted(d) for d in node.decorator_list
            ):
                count += "ClassVar" not in ast.unparse(item.annotation) and "init=False" not in ast.unparse(
                    item
                )
        if count > limit and f"{source.name}.{node.name}" not in fine:
            breaches.append(f"{source.name}.{node.name}: {count} parameters")
    return breaches


def wide_callables(tree: Tree, limit: int, outside: Iterable[str], allowed: Iterable[str] = ()) -> list[str]:
    """Public functions and methods of more parameters than the limit, in modules that are not left out."""
    breaches, fine, left_out = [], set(allowed), tuple(outside)
    for source in tree.values():
        if source.name.startswith(left_out):
            continue
        classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
        for owner in (source.tree, *classes):
            within = f"{source.name}.{owner.name}" if isinstance(owner, ast.ClassDef) else source.name
            for node in owner.body:
                if not isinstance(node, Function) or node.name.startswith("_"):
                    continue
                if any(_dotted(decorator).endswith("overload") for decorator in node.decorator_list):
                    continue
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                if count > limit and f"{within}.{node.name}" not in fine:
                    breaches.append(f"{within}.{node.name}: {count} parameters")
    return breaches


def big_classes(tree: Tree, limit: int) -> list[str]:
    """Classes of more public methods than the limit; properties are attributes, overloads count once."""
    breaches = []
    for source, node in _classes(tree):
        methods = {
            item.name
            for item in node.body
            if isinstance(item, Function)
            and not item.name.startswith("_")
            and not any(
                _dotted(d).split(".")[-1].endswith(("property", "setter")) for d in item.decorator_list
            )
        }
        if len(methods) > limit:
            breaches.append(f"{source.name}.{node.name}: {len(methods)} public methods")
    return breaches


class Hierarchy:
    """The classes of a tree, each with its bases, those of the package by their dotted name."""

    def __init__(self, tree: Tree) -> None:
        self.nodes = {f"{source.name}.{node.name}": node for source, node in _classes(tree)}
        self.bases = {
            f"{source.name}.{node.name}": [self._resolve(source, _dotted(base)) for base in node.bases]
            for source, node in _classes(tree)
        }

    def _resolve(self, source: Source, base: str) -> str:
        """The dotted name of the package's class that a base names in a file, else the base as written."""
        if f"{source.name}.{base}" in self.nodes:
            return f"{source.name}.{base}"
        first, _, rest = base.partition(".")
        imported = [i.name for i in source.imports if i.name.split(".")[-1] == first]
        full = [name + ("." + rest if rest else "") for name in imported if name.startswith("linnet.")]
        # A re-export (`from linnet.linalg import Dense`) names the package; the class is in one of its files.
        candidates = [
            name
            for target in full
            for name in self.nodes
            if name == target
            or (
                name.startswith(target.rpartition(".")[0] + ".")
                and name.split(".")[-1] == target.split(".")[-1]
            )
        ]
        return candidates[0] if candidates else base

    def is_error(self, name: str) -> bool:
        """Whether a class derives from a built-in exception."""
        if name in self.nodes:
            return any(self.is_error(base) for base in self.bases[name])
        builtin = getattr(builtins, name, None)
        return isinstance(builtin, type) and issubclass(builtin, BaseException)

    def is_open(self, name: str) -> bool:
        """Whether a class may be extended: abstract, a protocol, an enum or an error."""
        node = self.nodes[name]
        marks = [_dotted(base).split(".")[-1] for base in node.bases] + [
            ast.unparse(k) for k in node.keywords
        ]
        decorators = [d for item in node.body if isinstance(item, Function) for d in item.decorator_list]
        return (
            any(mark in ("ABC", "Protocol") or "ABCMeta" in mark or mark.endswith("Enum") for mark in marks)
            or any(_dotted(decorator).endswith("abstractmethod") for decorator in decorators)
            or self.is_error(name)
        )


def concrete_bases(tree: Tree, allowed: Iterable[str] = ()) -> list[str]:
    """Classes that extend a concrete class of the package, less the ones allowed by their dotted name."""
    hierarchy, fine = Hierarchy(tree), set(allowed)
    return [
        f"{name} extends the concrete class {base}"
        for name, bases in hierarchy.bases.items()
        for base in bases
        if base in hierarchy.nodes and not hierarchy.is_open(base) and name not in fine
    ]


# Checks on random numbers in tests

DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "rand_like",
    "randn_like",
}
SEEDABLE = {"Generator", "default_rng", "RandomState", "Random", "seed", "Sobol"}
RANDOM_MODULES = ("torch", "np.random", "numpy.random", "random")
WIDE_SCOPES = ("module", "session", "package", "class")


def unseeded_draws(source: Source) -> list[str]:
    """Draws that the fixture which seeds each test cannot reach, and generators made without a seed."""
    breaches = []
    for owner, node in _calls(source.tree, owner=None):
        name, keywords = _dotted(node.func), {k.arg for k in node.keywords}
        module, _, function = name.rpartition(".")
        if module not in RANDOM_MODULES:
            continue
        seeded = "generator" in keywords or (owner is not None and _seeds(owner))
        if function in DRAWS and not seeded:
            if owner is None:
                breaches.append(f"{source.name}:{node.lineno} {name} draws while tests are collected")
            elif _is_shared_fixture(owner):
                breaches.append(f"{source.name}:{node.lineno} {name} draws in a fixture shared by tests")
        unseeded = not node.args and not keywords - {"device"}
        if function in SEEDABLE and unseeded and not _seeds(owner or source.tree):
            breaches.append(f"{source.name}:{node.lineno} {name} has no seed")
    return breaches


@cache
def _seeds(node: ast.AST) -> bool:
    """Whether a seed is set anywhere in it."""
    return "manual_seed(" in ast.unparse(node)


def _calls(node: ast.AST, owner: Function | None) -> Iterator[tuple[Function | None, ast.Call]]:
    """Every call with the outermost function it is in, None where it runs when the file is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield owner, child
        if isinstance(child, Function) and owner is None:
            # Decorators and default values run at import.
            for early in [*child.decorator_list, child.args]:
                yield from _calls(ast.Expression(body=early), None)  # type: ignore[arg-type]
            yield from _calls(ast.Module(body=child.body, type_ignores=[]), child)
        elif isinstance(child, ast.Lambda) and owner is None:
            continue
        else:
            yield from _calls(child, owner)


def _is_shared_fixture(node: Function) -> bool:
    text = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "fixture" in text and any(f"scope='{scope}'" in text for scope in WIDE_SCOPES)
