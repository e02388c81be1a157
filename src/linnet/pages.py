"""Pages that are shown in a notebook or written to a file, and how that of a fit is made.

The layers that make pages and watch fits are above that of fits; ``linnet/__init__.py`` says which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_HEIGHT = 640  # pixels of the page inside a notebook
of_fit: Callable[..., Page]  # from a fit, test samples, classes= and title=
of_batches: Callable[..., Iterator[Any]]  # from a fit, batches, level= and top=: a record for each


@dataclass(frozen=True, eq=False, repr=False)
class Page:
    """A report: in a notebook it shows itself, and ``save`` writes it.

    Args:
        title: Its title.
        html: The page as text; it loads nothing from elsewhere.
        numbers: Every number on it, ready for ``json.dump``.
    """

    title: str
    html: str
    numbers: Mapping[str, Any]

    def save(self, file: str | Path) -> Path:
        """Write the page.

        Args:
            file: The file, such as ``"page.html"``.

        Returns:
            The file.

        Raises:
            InputError: If ``file`` is a folder.
        """
        from linnet.files import write_text  # with torch, and this module comes with `import linnet`

        return write_text(file, self.html)

    def __repr__(self) -> str:
        return f"Page({self.title!r})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither its style nor the notebook's reaches the other."""
        return (
            f'<iframe srcdoc="{escape(self.html, quote=True)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
        )
