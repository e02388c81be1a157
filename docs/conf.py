"""Sphinx settings: MyST Markdown, executed notebooks, the API from Google docstrings; needs no network."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import linnet

project = "linnet"
author = "the linnet authors"
copyright = "the linnet authors"
version = release = linnet.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"linnet {version}"
html_static_path = ["_static"]
html_css_files = ["notebooks.css"]

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


def _mark_shapes(*event: Any) -> None:
    """Escape the star of a shape such as (N, *input shape), which reStructuredText takes for emphasis."""
    lines = event[-1]
    for index, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[index] = re.sub(r"(?:(?<=\()|(?<=, ))\*(?=\w)", r"\\*", line)


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
