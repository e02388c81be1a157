"""Sphinx settings: MyST Markdown, the API from Google docstrings, the furo theme; needs no network.

``docs/api.md`` lists what is public. Each name gets a page of its own in ``docs/api``, which is made anew by
every build. Formulas become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import inspect
import pydoc
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import linnet

project = "linnet"
author = "the linnet authors"
copyright = "the linnet authors"
version = release = linnet.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"linnet {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Params": "Params"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]


def _public_names() -> list[str]:
    """What the tables of the reference list."""
    text = (Path(__file__).parent / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^   (linnet\.[\w.]+)$", text, re.MULTILINE)


def _methods(name: str) -> list[tuple[str, str]]:
    """Documented methods and properties of a class and of its bases in linnet, in the order of the source."""
    thing = pydoc.locate(name)
    found: dict[str, str] = {}
    for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
        if base.__module__.split(".")[0] != "linnet" or issubclass(base, BaseException):
            continue
        for key, value in vars(base).items():
            if (key.startswith("_") and key != "__call__") or not inspect.getdoc(getattr(thing, key, None)):
                continue
            if isinstance(value, property | cached_property):
                found.setdefault(key, "property")
            elif inspect.isfunction(value) or isinstance(value, classmethod | staticmethod):
                found.setdefault(key, "method")
    return list(found.items())


# ``Curvature`` and ``curvature`` are two pages, also where names of files do not tell upper from lower case.
_NAMES = _public_names()
_LOWER = [name.lower() for name in _NAMES]
autosummary_filename_map = {
    name: f"{name}-class" for name in _NAMES if _LOWER.count(name.lower()) > 1 and name.lower() != name
}
autosummary_context = {"methods_of": {name: _methods(name) for name in _NAMES}}


def _mark_shapes(*event: Any) -> None:
    """Escape the star of a shape such as (N, *input shape), which reStructuredText takes for emphasis."""
    lines = event[-1]
    for index, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[index] = re.sub(r"(?:(?<=\()|(?<=, ))\*(?=\w)", r"\\*", line)


def _mathml(node: Any, as_block: bool) -> str:
    """A formula as MathML; the index of an accented letter stands beside it, where docutils has it below."""
    if re.search(r"frac(?!{)", node.astext()):
        raise ValueError(f"write \\frac with braces, which docutils needs: {node.astext()}")
    formula = re.sub(r"\\(hat|tilde) (\w)", r"{\\\1 \2{}}", node.astext())
    return str(tex2mathml(formula, as_block=as_block))


def _formula(writer: Any, node: Any) -> None:
    """Write a formula inside a line."""
    writer.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _formula_block(writer: Any, node: Any) -> None:
    """Write a formula on lines of its own."""
    writer.body.append(f'<div class="formula">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _mark_shapes)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula_block, None))
