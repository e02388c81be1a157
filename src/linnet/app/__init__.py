"""The application: the command line, its data, runs on disk and their reports.

From Python, :func:`report_of` makes the report page of a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet.app.runs.fit_pages import Page

__all__ = ["report_of"]


def report_of(
    fit: Any, test: Any = None, *, classes: Sequence[str] | None = None, title: str = "Linear fit"
) -> Page:
    """The report page of a fit, as the command line writes it: how good, how sure, which examples mattered.

    Test samples are scored and some of their predictions explained. Inputs (N, C, H, W) with one or three
    channels are shown as pictures.

    Args:
        fit: What ``linnet.fit`` or ``linnet.adapt`` returned.
        test: Test samples: an (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches; by default none.
        classes: Names of the classes; by default their numbers.
        title: Title of the page.

    Returns:
        The page: ``save("page.html")`` writes it, a notebook shows it inline.

    Raises:
        DataError: If the test samples cannot be used.
        DependencyError: If matplotlib, Jinja2 or Pillow is missing.
        InputError: If ``fit`` is something else, or the names do not fit its classes.

    Example:
        >>> import torch, linnet
        >>> from linnet.app import report_of
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.randn(40, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x[:20], (x[:20, 0] > 0).long()))
        >>> page = report_of(fit, (x[20:], (x[20:, 0] > 0).long()), classes=("left", "right"))
        >>> page.save("page.html").name, "<h1>Linear fit</h1>" in page.html
        ('page.html', True)
    """
    from linnet.app.runs.fit_pages import fit_page
    from linnet.distribution import require_application

    require_application("jinja2", "PIL", "matplotlib")
    return fit_page(fit, test, classes, title)
