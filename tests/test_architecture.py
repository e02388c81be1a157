"""Architecture: one-way layers, no cycles, small files, final classes, fast imports, seeded tests.

To add a layer, or a part to a layer, edit FLOORS. An exception needs its reason beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import architecture as check
from tests.architecture import Source, Tree, make_tree, read_tree

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. Parts of one floor do not import each other; files inside one part may, without cycles.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("distribution", "params", "shown", "tree"),
    ("memory", "number_types", "plots", "progress", "training"),
    ("distributed",),
    ("files",),
    ("npz", "pages", "unfinished"),
    ("linalg",),
    ("solvers",),
    ("likelihoods",),
    ("tangent",),
    ("curvatures",),
    ("predictive",),
    ("linear",),
    ("fitting", "metrics"),
    ("audit", "laplace", "nested", "spectrum"),
    ("optim", "posterior", "report", "tangent_gp"),
    ("continual", "finetuning"),
    ("saved", "surgery"),
    ("examples",),
    ("integrations",),
    ("machine",),
    # The application, which stands on the library.
    ("app.options",),
    ("app.data", "app.models", "app.terminal"),
    ("app.runs",),
    ("app.serve",),
    ("app.commands",),
    ("app.parsing",),
    ("app.cli",),
    ("__main__",),
    ("__init__", "app"),
)
FORBIDDEN_NAMES = ("utils", "util", "core", "base", "common", "helpers", "misc")
# Imported inside the function that needs them, so that `import linnet` costs what torch costs.
HEAVY = ("scipy", "matplotlib", "pandas", "jinja2", "PIL", "tqdm", "yaml")
# Imported by integrations/ alone, lazily.
OPTIONAL = (
    "transformers", "timm", "torchvision", "sklearn", "gpytorch", "botorch", "linear_operator",
    "lightning", "pytorch_lightning", "avalanche", "datasets", "huggingface_hub", "peft", "tensorboard",
    "wandb", "mlflow",
)  # fmt: skip
# What the command line loads before it knows the command.
LIGHT = ("__init__", "errors", "app.commands", "app.cli")
# Dotted names of classes that may extend a concrete class of the package, each with its reason.
MAY_EXTEND_CONCRETE: dict[str, str] = {
    "linnet.app.options.TaskOptions": "options, to which those of the data are added",
    "linnet.app.options.AdaptOptions": "the same, to which those of one command are added",
    "linnet.laplace.training.LaplaceOptions": "keywords, to which others are added",
    "linnet.fitting.plots.FitPlots": "the plots of every model, to which those of a fit are added",
}
# Dotted names of records with a wide constructor, each with its reason.
MAY_BE_WIDE: dict[str, str] = {
    "linnet.audit.monitor.Watched": "the columns of a log",
    "linnet.audit.mislabel.LabelErrors": "the columns of a table, and the numbers under it",
    "linnet.finetuning.recipes.Recipe": "the parts of a method that are changed one by one",
    "linnet.integrations.sklearn._Classifier": "the settings that searches of scikit-learn go through",
    "linnet.nested.search.Rung": "one column of a table each",
    "linnet.report.records.Comparison": "the columns of a table, and what they are of",
    "linnet.report.records.Content": "the parts of a page",
    "linnet.app.options.NetworkOptions": "the options of the command line that belong together",
}

# Dotted names of public functions with more parameters than the limit, each with its reason.
MAY_TAKE_MORE: dict[str, str] = {
    "linnet.fitting.fit.fit": "the data of a fit, their weights, and how it is solved",
    "linnet.nested.adapt.adapt": "the first call of most users: network, data, and what else all calls take",
}

# Dotted names of classes with more methods than the limit, each with its reason.
MAY_ANSWER_MORE: dict[str, str] = {
    "linnet.linear.system.System": "every formula of the posterior of a linear model, stated once",
    "linnet.linear.kernel_system.KernelSystem": "the same, for which it has a shorter way",
    "linnet.linear.normal_system.NormalSystem": "the same in weights, of one network and of features",
}

PARAMETERS_A_CONSTRUCTOR = 8
PARAMETERS_A_CALL = 8
METHODS_A_CLASS = 15


@pytest.fixture(scope="module")
def package() -> Tree:
    return read_tree(ROOT / "src" / "linnet", "linnet")


@pytest.fixture(scope="module")
def everything(package: Tree) -> Tree:
    tree = dict(package)
    for folder in ("tests", "benchmarks", "experiments"):
        tree.update(read_tree(ROOT / folder, folder))
    return tree


def test_the_package_was_read(package: Tree) -> None:
    assert {"linnet", "linnet.errors", "linnet.app.cli"} <= package.keys()
    assert any(check.graph(package).values())


def test_every_part_has_a_floor(package: Tree) -> None:
    assert not check.undeclared_floors(package, FLOORS)


def test_the_page_draws_the_layers() -> None:
    """docs/architecture.md has each layer in a row, the ground at the bottom, and names files that exist."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.split("```text\n")[1].split("```")[0].splitlines()
    parts = [tuple(name for name in floor if name not in ("__init__", "app")) for floor in FLOORS]
    known = {name for floor in parts for name in floor}
    # the left column says what a row is for; names of packages stand from column 36 on
    rows = [tuple(word for word in line[36:].split() if word in known) for line in drawing]
    assert [row for row in reversed(rows) if row] == [floor for floor in parts if floor]
    files = re.findall(r"\b[a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py\b|\bmemory\.py\b", page)
    assert len(files) > 20
    assert not [f for f in files if not any((ROOT / d / f).exists() for d in ("", "src/linnet", "tests"))]


def test_errors_say_what_was_expected_and_what_to_do(package: Tree) -> None:
    """Those of the library; the application puts some together from parts."""
    library = {name: source for name, source in package.items() if not name.startswith("linnet.app")}
    assert not check.bare_errors(library)


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src" / "linnet").rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_imports_go_one_way(package: Tree) -> None:
    assert not check.upward_imports(package, FLOORS)


def test_no_import_cycles(package: Tree) -> None:
    assert not check.cycles(package)


def test_heavy_packages_are_imported_lazily(package: Tree) -> None:
    assert not check.eager_heavies(package, (*HEAVY, *OPTIONAL))


def test_optional_packages_stay_in_integrations(package: Tree) -> None:
    assert not check.optional_outside(package, OPTIONAL, home="integrations")


def test_the_command_line_starts_without_torch(package: Tree) -> None:
    assert not check.not_free_of(package, LIGHT, ("torch", "numpy", "safetensors"))


def test_oracles_import_torch_only(everything: Tree) -> None:
    assert not check.other_imports(everything["tests.oracles.dense"], ["torch"])


def test_no_file_is_named_for_nothing(everything: Tree) -> None:
    assert not check.forbidden_names(everything, FORBIDDEN_NAMES)


def test_constructors_are_narrow(package: Tree) -> None:
    assert not check.wide_constructors(package, PARAMETERS_A_CONSTRUCTOR, MAY_BE_WIDE)


def test_public_calls_are_narrow(package: Tree) -> None:
    """Options of the command line are no parameters that somebody has to pass."""
    wide = check.wide_callables(package, PARAMETERS_A_CALL, ("linnet.app",))
    assert sorted(line.split(":")[0] for line in wide) == sorted(MAY_TAKE_MORE)
    assert not check.wide_callables(package, PARAMETERS_A_CALL, ("linnet.app",), MAY_TAKE_MORE)


def test_classes_are_small(package: Tree) -> None:
    big = check.big_classes(package, METHODS_A_CLASS)
    assert not [line for line in big if line.split(":")[0] not in MAY_ANSWER_MORE]


def test_no_concrete_class_is_extended(package: Tree) -> None:
    assert not check.concrete_bases(package, MAY_EXTEND_CONCRETE)


def test_exceptions_are_still_needed(package: Tree) -> None:
    wide = check.wide_constructors(package, PARAMETERS_A_CONSTRUCTOR)
    assert all(any(line.startswith(name + ":") for line in wide) for name in MAY_BE_WIDE)
    big = check.big_classes(package, METHODS_A_CLASS)
    assert all(any(line.startswith(name + ":") for line in big) for name in MAY_ANSWER_MORE)
    extending = check.concrete_bases(package)
    assert all(any(line.startswith(name + " ") for line in extending) for name in MAY_EXTEND_CONCRETE)


def test_tests_draw_seeded_random_numbers(everything: Tree) -> None:
    sources = [source for name, source in everything.items() if name.startswith("tests.")]
    assert sources
    assert not [line for source in sources for line in check.unseeded_draws(source)]


# Each check finds a planted breach, and only it.

LOW_HIGH = (("low",), ("high", "side"), ("__init__",))


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (make_tree(low="import linnet.high", high=""), 1),
        (make_tree(low="def f():\n    from linnet.high import g", high=""), 1),
        (make_tree(low="from . import high", high=""), 1),
        (make_tree(low__a="from ..high.b import c", high__b=""), 1),
        (make_tree(low="import importlib\nimportlib.import_module('linnet.high')", high=""), 1),
        (make_tree(high="import linnet.side", side=""), 1),
        (make_tree(low="import linnet"), 1),
        (make_tree(low="from linnet import fit"), 1),
        (make_tree(low="from linnet import __version__"), 0),
        (make_tree(low="", high="from linnet.low import f"), 0),
        (make_tree(low__a="from linnet.low.b import f", low__b=""), 0),
    ],
)
def test_finds_upward_imports(tree: Tree, found: int) -> None:
    assert len(check.upward_imports(tree, LOW_HIGH)) == found


def test_finds_parts_without_a_floor() -> None:
    assert check.undeclared_floors(make_tree(low="", attic=""), LOW_HIGH) == [
        "linnet.attic: `attic` is in no floor"
    ]


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (make_tree(a="import linnet.b", b="import linnet.a"), 1),
        (make_tree(a="import linnet.b", b="def f():\n    import linnet.c", c="from linnet.a import g"), 1),
        (make_tree(p__a="from .b import f", p__b="from . import a"), 1),
        (make_tree(a="import linnet.b\nimport linnet.c", b="import linnet.c", c=""), 0),
    ],
)
def test_finds_cycles(tree: Tree, found: int) -> None:
    assert len(check.cycles(tree)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import scipy.linalg", 1),
        ("from scipy import linalg", 1),
        ("try:\n    import scipy\nexcept ImportError:\n    scipy = None", 1),
        ("class A:\n    import scipy", 1),
        ("def f():\n    import scipy", 0),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import scipy", 0),
    ],
)
def test_finds_eager_heavies(text: str, found: int) -> None:
    assert len(check.eager_heavies(make_tree(a=text), ["scipy"])) == found


def test_finds_optional_packages_outside_their_home() -> None:
    tree = make_tree(a="def f():\n    import timm", integrations__b="def f():\n    import timm")
    assert check.optional_outside(tree, ["timm"], "integrations") == [
        "linnet.a:2 imports timm, which only integrations may"
    ]


def test_finds_torch_behind_a_light_module() -> None:
    tree = make_tree(cli="import linnet.a", a="import linnet.b", b="import torch")
    assert check.not_free_of(tree, ["cli"], ["torch"]) == ["linnet.cli reaches torch through linnet.b:1"]
    lazy = make_tree(cli="import linnet.a", a="def f():\n    import linnet.b", b="import torch")
    assert not check.not_free_of(lazy, ["cli"], ["torch"])
    typed = make_tree(commands__a="if TYPE_CHECKING:\n    import linnet.b", b="import torch")
    assert check.not_free_of(typed, ["commands"], ["torch"]) == [
        "linnet.commands.a reaches torch through linnet.b:1"
    ]
    elsewhere = make_tree(cli="if TYPE_CHECKING:\n    import linnet.a", a="import torch")
    assert not check.not_free_of(elsewhere, ["cli"], ["torch"])


def test_finds_other_imports() -> None:
    source = Source(
        "tests.oracles.dense", "import math\nimport torch\ndef f():\n    from linnet import linalg"
    )
    assert check.other_imports(source, ["torch"]) == ["tests.oracles.dense:4 imports linnet.linalg"]


def test_finds_names_for_nothing() -> None:
    assert check.forbidden_names(make_tree(a__utils="", utils__a="", basement=""), ["utils"]) == [
        "linnet.a.utils", "linnet.utils", "linnet.utils.a",
    ]  # fmt: skip


def test_finds_bare_errors() -> None:
    head = "from linnet.errors import InputError\n"
    bare = make_tree(a=head + "InputError('x')", b=head + "InputError('x', expected='y')")
    assert len(check.bare_errors(bare)) == 2
    assert not check.bare_errors(make_tree(a=head + "InputError('x', 'y', remedy='z')", b="InputError('x')"))


def test_finds_wide_constructors() -> None:
    written = "class A:\n    def __init__(self, a, b, *, c): ..."
    made = "@dataclass(frozen=True)\nclass A:\n    a: int\n    b: int\n    c: int\n    d: ClassVar[int] = 1"
    for text in (written, made):
        assert check.wide_constructors(make_tree(m=text), 2) == ["linnet.m.A: 3 parameters"]
        assert not check.wide_constructors(make_tree(m=text), 3)
        assert not check.wide_constructors(make_tree(m=text), 2, ["linnet.m.A"])


def test_finds_big_classes() -> None:
    text = "class A:\n def a(self): ...\n def b(self): ...\n def _c(self): ...\n @property\n def d(self): ..."
    assert check.big_classes(make_tree(m=text), 1) == ["linnet.m.A: 2 public methods"]
    assert not check.big_classes(make_tree(m=text), 2)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (make_tree(m="def f(a, b, *, c): ..."), 1),
        (make_tree(m="class A:\n    def f(self, a, b, c): ..."), 1),
        (make_tree(m="class A:\n    def f(self, a, b): ..."), 0),
        (make_tree(m="def f(a, b, *args, **options): ..."), 0),
        (make_tree(m="def _f(a, b, c): ..."), 0),
        (make_tree(app__m="def f(a, b, c): ..."), 0),
    ],
)
def test_finds_wide_callables(tree: Tree, found: int) -> None:
    assert len(check.wide_callables(tree, 2, ("linnet.app",))) == found
    assert not check.wide_callables(tree, 2, ("linnet.app",), ("linnet.m.f", "linnet.m.A.f"))


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (make_tree(m="class A: ...\nclass B(A): ..."), 1),
        (make_tree(m="class A: ...", n="from linnet.m import A\nclass B(A[int]): ..."), 1),
        (make_tree(m="class A: ...", n="from linnet import m\nclass B(m.A): ..."), 1),
        (make_tree(p__m="class A: ...", n="from linnet.p import A\nclass B(A): ..."), 1),
        (make_tree(m="class A(ABC): ...\nclass B(A): ...\nclass C(B): ..."), 1),
        (make_tree(m="class A(ABC): ...\nclass B(A): ..."), 0),
        (make_tree(m="class A(metaclass=ABCMeta): ...\nclass B(A): ..."), 0),
        (make_tree(m="class A(Module):\n    @abstractmethod\n    def f(self): ...\nclass B(A): ..."), 0),
        (make_tree(m="class A(Protocol): ...\nclass B(A): ..."), 0),
        (make_tree(m="class A(StrEnum): ...\nclass B(A): ..."), 0),
        (make_tree(m="class A(ValueError): ...\nclass B(A): ...\nclass C(B): ..."), 0),
        (make_tree(m="from torch.nn import Module\nclass A(Module): ..."), 0),
    ],
)
def test_finds_concrete_bases(tree: Tree, found: int) -> None:
    assert len(check.concrete_bases(tree)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("X = torch.randn(3)", 1),
        ("def f(x=torch.rand(3)): ...", 1),
        ("@pytest.mark.parametrize('x', [torch.randn(3)])\ndef test(x): ...", 1),
        ("@pytest.fixture(scope='module')\ndef data():\n    return torch.randn(3)", 1),
        ("def test():\n    rng = np.random.default_rng()", 1),
        ("def test():\n    g = torch.Generator()", 1),
        ("def test():\n    torch.seed()", 1),
        ("def test():\n    x = torch.randn(3)", 0),
        ("X = torch.randn(3, generator=G)", 0),
        ("def test():\n    g = torch.Generator().manual_seed(0)", 0),
        ("def test():\n    rng = np.random.default_rng(0)", 0),
        (
            "@pytest.fixture(scope='module')\ndef data():\n torch.manual_seed(0)\n return torch.randn(3)",
            0,
        ),
    ],
)
def test_finds_unseeded_draws(text: str, found: int) -> None:
    assert len(check.unseeded_draws(Source("tests.test_a", text))) == found
