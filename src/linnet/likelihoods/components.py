"""Canonical likelihoods whose components are independent: one number describes the curvature of each."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from linnet.errors import DataError
from linnet.likelihoods.distribution import first_of, require_shape
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.finite import lies_within
from linnet.linalg.random import signs


def require_targets(
    y: Tensor, dtype: torch.dtype, masked: bool, kind: str, remedy: str = "fill them, or pass masked=True"
) -> Tensor:
    """Targets of a type, or an error when some are nan and may not be."""
    if y.is_complex():
        raise DataError(f"y has type {y.dtype}", expected=f"real targets for {kind}", remedy="pass y.real")
    y = y.to(dtype)
    missing = y.isnan()
    if not masked and bool(missing.any()):
        raise DataError(
            f"{first_of(missing)} is nan, and {int(missing.sum())} of {y.numel()} targets are",
            expected=f"targets without nan for {kind}",
            remedy=remedy,
        )
    return y


def require_finite_targets(y: Tensor) -> None:
    """Check that no target is infinite."""
    infinite = y.isinf()
    if bool(infinite.any()):
        raise DataError(
            f"{first_of(infinite)} is {float(y[infinite][0])}",
            expected="finite targets",
            remedy="look for overflow in the data",
        )


class IndependentComponents(Likelihood, ABC):
    """A canonical likelihood with one label for each output, independent given the outputs."""

    # Labels have the shape of the outputs, and Λ is diagonal.

    canonical = True
    masked: bool

    def _check(self, f: Tensor, y: Tensor) -> Tensor:
        kind = type(self).__name__
        if f.ndim == 2 and f.shape[1] == 1 and y.shape == f.shape[:1]:
            y = y[:, None]  # one output: the targets may come without its axis
        require_shape(y, f.shape, self._shape_remedy(f, y))
        if not y.is_complex() and lies_within(converted := y.to(f.dtype), *self._plain()):
            return converted  # one pass says that nothing is wrong
        y = require_targets(y, f.dtype, self.masked, kind, self._missing_remedy())
        missing = y.isnan()
        self._check_values(y, missing)
        return y

    def _shape_remedy(self, f: Tensor, y: Tensor) -> str:
        """The remedy for targets of another shape than the outputs."""
        if not y.is_floating_point() and y.shape == self._label_shape(f.shape):
            return "for class labels use Categorical()"
        return "give each output its own target"

    def _plain(self) -> tuple[float, float]:
        """A range in which every real number is a target, and none stands for a missing one."""
        return -sys.float_info.max, sys.float_info.max

    def _missing_remedy(self) -> str:
        """The remedy for targets that are nan."""
        return "fill them, or pass masked=True"

    def _check_values(self, y: Tensor, missing: Tensor) -> None:
        """Check targets other than the missing ones."""
        require_finite_targets(y)

    def _absent(self, y: Tensor) -> Tensor | None:
        """Which targets are missing, in the shape of y."""
        return y.isnan() if self.masked else None

    def _present(self, y: Tensor) -> Tensor | None:
        absent = self._absent(y)
        if absent is None or not bool(absent.any()):
            return None
        return ~self._arranged(absent)

    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        present, labels = self._present(y), self._arranged(y)
        return (labels, None) if present is None else (labels.masked_fill(~present, 0), present)

    @abstractmethod
    def _curvature(self, rows: Tensor) -> Tensor:
        """The diagonal of Λ, like rows."""

    @abstractmethod
    def _deviation(self, rows: Tensor) -> Tensor:
        """Its square root."""

    def _hessian(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        return torch.diag_embed(self._curvature(rows))

    def _hessian_sum(self, rows: Tensor, labels: Tensor | None, counts: Tensor | None) -> Tensor:
        each = self._curvature(rows)
        each = each if counts is None else each.masked_fill(~counts, 0)
        return torch.diag_embed(each.sum((0, 1)))

    def _hessian_diagonal(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        return self._curvature(rows)

    def _product(self, rows: Tensor, v: Tensor, labels: Tensor | None) -> Tensor:
        return self._curvature(rows) * v

    def _root(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        return torch.diag_embed(self._deviation(rows))

    def _rank(self, c: int) -> int | None:
        return c

    def _root_columns(self, rows: Tensor, labels: Tensor | None, start: int, stop: int) -> Tensor:
        columns = rows.new_zeros(*rows.shape, stop - start)
        columns.diagonal(-start, dim1=-2, dim2=-1).copy_(self._deviation(rows)[..., start:stop])
        return columns

    def _project(
        self, rows: Tensor, n: int, generator: torch.Generator | None, labels: Tensor | None
    ) -> Tensor:
        return self._deviation(rows) * signs((n, *rows.shape), generator, rows.dtype, rows.device)
