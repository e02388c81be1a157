"""Sphinx settings: MyST Markdown, executed notebooks, the API from Google docstrings; needs no network.

``docs/api.md`` lists what is public. Each name gets a page of its own in ``docs/api``, which is made anew by
every build. Formulas become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import inspect
import os
import pydoc
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes

import linnet

project = "linnet"
author = "the linnet authors"
copyright = "the linnet authors"
version = release = linnet.__version__

extensions = [
    "myst_nb",
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
html_css_files = ["pages.css", "notebooks.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Pages that name a kernel are notebooks; each is executed, and an error in a cell ends the build.
# While writing other pages: python -m sphinx -D nb_execution_mode=off docs docs/_build/html
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True  # what a cell prints stands in one piece
os.environ["LINNET_PROGRESS"] = "0"  # of their kernels

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


def _offer_notebook(app: Any, doctree: nodes.document) -> None:
    """Put a link to the executed notebook under its title."""
    page = app.env.docname
    if "kernelspec" not in app.env.metadata[page]:
        return
    file = Path(app.env.mystnb_config.output_folder, f"{page}.ipynb")
    target = f"/{os.path.relpath(file, app.srcdir)}"
    link = addnodes.download_reference("", "Download this page as a notebook", reftarget=target)
    doctree.next_node(nodes.title).parent.insert(1, nodes.paragraph("", "", link))


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("doctree-read", _offer_notebook, priority=400)  # before files to download are collected
    app.connect("autodoc-process-docstring", _mark_shapes)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula_block, None))
