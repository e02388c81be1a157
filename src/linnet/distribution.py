"""Metadata of the installed distribution: its name, extras and requirements.

The distribution is called linnet-torch. On the registry the name linnet belongs to an unrelated project,
which would install a package of the same import name over this one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from linnet.errors import DependencyError

NAME = "linnet-torch"
LIBRARY = ("torch", "numpy", "scipy", "safetensors", "tqdm")
# Import name -> distribution, for what linnet.app alone needs. They are installed with the library, which
# works without them.
APPLICATION = {
    "yaml": "pyyaml",
    "jinja2": "jinja2",
    "PIL": "pillow",
    "matplotlib": "matplotlib",
}
_NAMESAKE = "linnet"  # the unrelated project


def install_command(extra: str = "") -> str:
    """The command that installs linnet."""
    return f"pip install '{NAME}[{extra}]'" if extra else f"pip install {NAME}"


def require_application(*names: str) -> None:
    """Check that the packages of the command line are there; none is imported."""
    missing = [APPLICATION[name] for name in names or APPLICATION if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise DependencyError(
            f"the command line needs {' and '.join(missing)}, which {verb} not installed",
            remedy=install_command(),
            expected="the packages of the command line",
        )


@contextmanager
def importing(package: str, what: str, expected: str, remedy: str) -> Iterator[None]:
    """Explain why an optional package cannot be imported, which the block does; the cause is chained."""
    try:
        yield
    # RuntimeError: a torchvision for another torch; AttributeError: a version without what is taken from it
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise DependencyError(
            f"{package}, which {what} needs, cannot be imported ({type(error).__name__}: {error})",
            expected=expected,
            remedy=remedy,
        ) from error


def require_own_package() -> None:
    """Check that ``linnet`` is this package, and not a namesake that was installed over it."""
    if "linearize" not in getattr(sys.modules["linnet"], "__all__", ()):
        raise DependencyError(
            "the package 'linnet' is another project's, installed over this one",
            remedy=_repair(),
            expected="the package linnet-torch",
        )


def namesake() -> str | None:
    """Advice about an unrelated distribution called linnet, which writes into the same folder."""
    try:
        found = metadata.distribution(_NAMESAKE)
    except metadata.PackageNotFoundError:
        return None
    # A checkout that was installed with pip install --editable under that name has no files in the folder.
    replaces = any(file.parts[0] == "linnet" for file in found.files or ())
    return _repair() if replaces else None


def _repair() -> str:
    """The commands that remove the namesake and put back what it replaced."""
    return f"pip uninstall --yes {_NAMESAKE}, then pip install --force-reinstall --no-deps {NAME}"
