"""Derivatives of negative log-likelihoods in the outputs: Λ, its square root, the Fisher information.

Λ is the Hessian of −log p(y | f) in the outputs f. The Gauss-Newton matrix of a network with Jacobian J is
the sum over examples of Jᵀ Λ J; with the Fisher information of the outputs in place of Λ it is the Fisher
matrix. The two are equal for canonical families only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from linnet.errors import DataError, InputError, NumericalError
from linnet.likelihoods.distribution import (
    Distribution,
    require_draws,
    require_numbers,
    require_outputs,
    require_tensor,
)
from linnet.linalg.random import Seed, make_generator, signs
from linnet.params import refuse

FORMED = 1 << 22  # numbers in the matrices Λ of several examples that are formed at once


class Likelihood(Distribution, ABC):
    """A negative log-likelihood and the derivatives that curvature needs.

    Sums, never means: over the examples that a caller adds up, and over positions. Labels that are
    missing contribute nothing to anything.

    Example:
        >>> from linnet.likelihoods import Categorical
        >>> likelihood = Categorical()
        >>> f = torch.zeros(1, 2)
        >>> likelihood.hessian(f)[0, 0]
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
        >>> likelihood.root(f)
        tensor([[[ 0.5000, -0.5000]]])
    """

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Derivative of the negative log-likelihood in the outputs.

        Args:
            f: Outputs (N, ...).
            y: Labels, (N, ...).

        Returns:
            Like f.
        """
        require_tensor(y)
        rows, labels, counts = self._prepare(f, y)
        return self._restore(_masked(self._gradient(rows, labels), counts), f.shape)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Λ of each position.

        Args:
            f: Outputs (N, ...).
            y: Labels, (N, ...); needed when the likelihood is not canonical, or to leave out missing ones.

        Returns:
            (N, T, C, C).
        """
        rows, labels, counts = self._prepare_second(f, y)
        return _masked_both(self._hessian(rows, labels), counts)

    def hessian_sum(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Σ Λ over all examples and positions; Λ of each is formed for a few at a time, or for none.

        Args:
            f: Outputs (N, ...).
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            (C, C), symmetric.
        """
        return self._hessian_sum(*self._prepare_second(f, y))

    def hessian_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The diagonal of Λ.

        Args:
            f: Outputs (N, ...).
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            Like f.
        """
        rows, labels, counts = self._prepare_second(f, y)
        return self._restore(_masked(self._hessian_diagonal(rows, labels), counts), f.shape)

    def product(self, f: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        """Λ v, without forming Λ where it has structure.

        Args:
            f: Outputs (N, ...).
            v: (..., *shape of f).
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            Like v.

        Raises:
            InputError: v does not end in the shape of f.
        """
        require_outputs(f)
        require_outputs(v, "v")
        require_numbers(v, "v")
        lead = v.ndim - f.ndim
        if lead < 0 or v.shape[lead:] != f.shape:
            raise InputError(
                f"v has shape {tuple(v.shape)} and f {tuple(f.shape)}",
                expected="(..., *shape of f)",
                remedy="give v the axes of f, after any of its own",
            )
        rows, labels, counts = self._prepare_second(f, y)
        return self._restore(_masked(self._product(rows, self._arrange(v, lead), labels), counts), f.shape)

    def position_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """R of each position with R Rᵀ = Λ.

        Args:
            f: Outputs (N, ...).
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            (N, T, C, R): R columns at each position, as few as the family's closed form has.
        """
        rows, labels, counts = self._prepare_second(f, y)
        return _masked_rows(self._root(rows, labels), counts)

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Columns s_k with Σ_k s_k s_kᵀ = Λ over all outputs of an example.

        Args:
            f: Outputs (N, ...).
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            (K, *shape of f) with K = T · R; column t · R + r is the r-th of position t, and zero elsewhere.
        """
        return self._spread(self.position_root(f, y), f)

    def _root_size(self, f: Tensor) -> int | None:
        """The number K of columns of ``root``, where it is known without forming them."""
        # f (N, ...)
        rows = self._arrange(f)
        each = self._rank(rows.shape[2])
        return None if each is None else rows.shape[1] * each

    def _root_part(self, f: Tensor, start: int, stop: int, y: Tensor | None = None) -> Tensor:
        """Some columns of ``root``, without the others, where ``_root_size`` is known."""
        # f (N, ...), y (N, ...)
        rows, labels, counts = self._prepare_second(f, y)
        (n, t, c), each = rows.shape, self._rank(rows.shape[2])
        assert each is not None, "_root_size() has been asked"
        found = []
        for position in range(start // each, -(-stop // each)):
            own = slice(position, position + 1)
            first, last = max(0, start - position * each), min(each, stop - position * each)
            columns = self._root_columns(
                rows[:, own], None if labels is None else labels[:, own], first, last
            )
            columns = _masked_rows(columns, None if counts is None else counts[:, own])
            placed = rows.new_zeros(last - first, n, t, c)
            placed[:, :, position] = columns[:, 0].permute(2, 0, 1)
            found.append(placed)
        return self._restore(torch.cat(found), f.shape)

    def project(self, f: Tensor, n: int, seed: Seed = None, y: Tensor | None = None) -> Tensor:
        """Random columns s_i = Λ^½ v_i / √n with E[Σ_i s_i s_iᵀ] = Λ.

        The v_i are independent random signs. Botev, *The Gauss-Newton matrix for deep learning models
        and its applications*, 2020, section 4.3.4.

        Args:
            f: Outputs (N, ...).
            n: Number of columns.
            seed: Source of randomness: a generator, an integer seed or None.
            y: Labels (N, ...), as for ``hessian``.

        Returns:
            (n, *shape of f).
        """
        require_outputs(f)
        require_draws(n, f.shape, f)
        rows, labels, counts = self._prepare_second(f, y)
        drawn = self._project(rows, n, make_generator(seed), labels) / n**0.5
        return self._restore(_masked(drawn, counts), f.shape)

    def sample_gradients(self, f: Tensor, n: int, seed: Seed = None, y: Tensor | None = None) -> Tensor:
        """Gradients at labels drawn from p(y | f), over √n: their outer products sum to Fisher's expectation.

        Args:
            f: Outputs (N, ...).
            n: Number of draws.
            seed: Source of randomness: a generator, an integer seed or None.
            y: Labels (N, ...), only to leave out those positions that have none.

        Returns:
            (n, *shape of f).
        """
        require_outputs(f)
        require_draws(n, f.shape, f)
        rows, _, counts = self._prepare(f, y)
        labels = self._sample(rows.detach(), n, make_generator(seed))
        drawn = self._gradient(rows.expand(n, *rows.shape), labels) / n**0.5
        return self._restore(_masked(drawn, counts), f.shape)

    def fisher(self, f: Tensor) -> Tensor:
        """Fisher information of the outputs, E[∇ log p ∇ log pᵀ] over labels drawn from p(y | f).

        Args:
            f: Outputs (N, ...).

        Returns:
            (N, T, C, C), equal to ``hessian`` for canonical families.
        """
        return self._fisher(self._prepare(f, None)[0])

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Columns whose outer products sum to the Fisher information of the outputs.

        Args:
            f: Outputs (N, ...).
            y: Labels (N, ...), only to leave out those positions that have none.

        Returns:
            (K, *shape of f), laid out as those of ``root``.
        """
        rows, _, counts = self._prepare(f, y)
        return self._spread(_masked_rows(self._fisher_root(rows), counts), f)

    def _prepare_second(self, f: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As ``_prepare``, with an error when Λ depends on labels that are not given."""
        if y is None and not self.canonical:
            raise InputError(
                f"y=None, but the Hessian of {self!r} depends on labels",
                expected="labels",
                remedy="pass y, or use the Fisher information (fisher, fisher_root), which needs none",
            )
        return self._prepare(f, y)

    def _spread(self, root: Tensor, f: Tensor) -> Tensor:
        """Columns of positions (N, T, C, R) as columns of examples (T · R, *shape of f)."""
        positions = root.shape[1]
        columns = root.permute(1, 3, 0, 2)  # (T, R, N, C)
        if positions == 1:
            return self._restore(columns[0].unsqueeze(-2), f.shape)
        own = torch.eye(positions, dtype=root.dtype, device=root.device)
        # s_{tr}[n, t', c] = R[n, t, c, r] where t' = t, else 0
        spread = columns[:, :, :, None, :] * own[:, None, None, :, None]
        return self._restore(spread.flatten(0, 1), f.shape)

    # What a family defines, on arranged outputs

    @abstractmethod
    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Like rows (*lead, N, T, C), for labels (*lead, N, T, ...)."""

    @abstractmethod
    def _hessian(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        """Λ, (N, T, C, C)."""

    @abstractmethod
    def _product(self, rows: Tensor, v: Tensor, labels: Tensor | None) -> Tensor:
        """Λ v for v (*lead, N, T, C)."""

    @abstractmethod
    def _root(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        """(N, T, C, R)."""

    def _rank(self, c: int) -> int | None:
        """R for C components, where it has a closed form and so have single columns."""
        return None

    def _root_columns(self, rows: Tensor, labels: Tensor | None, start: int, stop: int) -> Tensor:
        """Columns of the root from start to stop, (N, T, C, stop − start)."""
        return self._root(rows, labels)[..., start:stop]

    def _hessian_sum(self, rows: Tensor, labels: Tensor | None, counts: Tensor | None) -> Tensor:
        """Σ Λ, (C, C)."""
        total = rows.new_zeros(rows.shape[-1], rows.shape[-1])
        for part in _few(rows):
            own = None if counts is None else counts[part]
            each = self._hessian(rows[part], None if labels is None else labels[part])
            total += _masked_both(each, own).sum((0, 1))
        return total

    def _hessian_diagonal(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        """The diagonal of Λ, like rows."""
        found = [
            self._hessian(rows[part], None if labels is None else labels[part]).diagonal(dim1=-2, dim2=-1)
            for part in _few(rows)
        ]
        return torch.cat([each.clone() for each in found]) if found else torch.zeros_like(rows)

    def _project(
        self, rows: Tensor, n: int, generator: torch.Generator | None, labels: Tensor | None
    ) -> Tensor:
        """Λ^½ v for n random v, (n, N, T, C)."""
        root = self._root(rows, labels)
        v = signs((n, *root.shape[:2], root.shape[-1]), generator, rows.dtype, rows.device)
        return torch.einsum("ntcr,kntr->kntc", root, v)

    def _fisher(self, rows: Tensor) -> Tensor:
        """Fisher information of canonical families; others define it."""
        return self._hessian(rows, None)

    def _fisher_root(self, rows: Tensor) -> Tensor:
        """Its root for canonical families; others define it."""
        return self._root(rows, None)


def training_nll(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """The loss of a training step, whose outputs are not finite once the training diverges, (N,)."""
    # f (N, ...)
    try:
        return likelihood.nll(f, y)
    except DataError as error:
        if bool((f.detach() < math.inf).all()):
            raise
        raise NumericalError(
            "the training diverged: the network's outputs are not finite",
            expected="finite outputs at every step",
            remedy="pass a smaller learning rate, or check the data and the network's scale",
        ) from error


def check_likelihood(likelihood: object) -> None:
    """Raise unless it is a likelihood."""
    if not isinstance(likelihood, Likelihood):
        refuse(
            "likelihood",
            likelihood,
            "one of linnet.likelihoods, such as Categorical() or Gaussian(variance=0.1)",
            "call the class: linnet.likelihoods.Categorical()",
        )


def takes_missing(likelihood: Likelihood) -> bool:
    """Whether targets that are nan count as missing."""
    return bool(getattr(likelihood, "masked", False))


def _few(rows: Tensor) -> list[slice]:
    """Examples (N, T, C) in parts whose matrices C x C are formed at once."""
    n, t, c = rows.shape
    size = max(1, FORMED // max(1, t * c * c))
    return [slice(start, start + size) for start in range(0, n, size)]


def _masked(values: Tensor, counts: Tensor | None) -> Tensor:
    """Values (*lead, N, T, C), zero where components do not count."""
    return values if counts is None else values.masked_fill(~counts, 0)


def _masked_rows(root: Tensor, counts: Tensor | None) -> Tensor:
    """(N, T, C, R) with the rows zero of components that do not count."""
    return root if counts is None else root.masked_fill(~counts[..., None], 0)


def _masked_both(matrix: Tensor, counts: Tensor | None) -> Tensor:
    """(N, T, C, C) with the rows and columns zero of components that do not count."""
    return matrix if counts is None else matrix.masked_fill(~(counts[..., None] & counts[..., None, :]), 0)
