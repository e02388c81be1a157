"""Rows of a kernel that were computed already, found by their samples."""

from __future__ import annotations

from torch import Tensor

from linnet.tangent.batch import Inputs, split, tensors_in
from linnet.tangent.hashing import hash_tensors


class Rows:
    """K(x, X) of the last samples that were asked for.

    Example:
        >>> import torch
        >>> rows, x = Rows(), torch.randn(3, 2)
        >>> rows.keep(x, torch.eye(3))
        >>> rows.known(x[1:2])
        tensor([[0., 1., 0.]])
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._kernel: Tensor | None = None

    def known(self, x: Inputs) -> Tensor | None:
        """The rows of samples, (T, N), if all are there.

        Args:
            x: T samples.

        Returns:
            Their rows; None where one is not known.
        """
        places = [self._places.get(name) for name in _names(x)]
        if self._kernel is None or None in places:
            return None
        return self._kernel[places]

    def keep(self, x: Inputs, kernel: Tensor) -> None:
        """Keep rows in the place of those before.

        Args:
            x: T samples.
            kernel: Their rows, (T, N).
        """
        self._places = {name: row for row, name in enumerate(_names(x))}
        self._kernel = kernel


def _names(x: Inputs) -> list[str]:
    """A hash of each sample."""
    return [hash_tensors(tensors_in(one)) for one in split(x, 1)]
