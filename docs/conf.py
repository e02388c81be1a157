"""Sphinx settings: MyST Markdown, the API from Google docstrings, the furo theme; needs no network."""

from __future__ import annotations

import re
from typing import Any

import linnet

project = "linnet"
author = "the linnet authors"
copyright = "the linnet authors"
version = release = linnet.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"linnet {version}"

myst_heading_anchors = 3
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


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _mark_shapes)
