"""Cached rows of a kernel, looked up by sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class KnownRows:
    """K(x, X) of the last samples that were asked for, by their fingerprints."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._kernel: Tensor | None = None

    def find(self, names: Sequence[str]) -> Tensor | None:
        """The rows of samples, (T, ...), if all are there."""
        places = [self._places.get(name) for name in names]
        if self._kernel is None or None in places:
            return None
        return self._kernel[places]

    def keep(self, names: Sequence[str], kernel: Tensor) -> None:
        """Keep rows in the place of those before."""
        # kernel (T, ...)
        self._places = {name: row for row, name in enumerate(names)}
        self._kernel = kernel
