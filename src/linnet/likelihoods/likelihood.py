"""Derivatives of negative log-likelihoods in the outputs: Λ, its square root, the Fisher information.

Λ is the Hessian of −log p(y | f) in the outputs f. The Gauss-Newton matrix of a network with Jacobian J is
the sum over examples of Jᵀ Λ J; with the Fisher information of the outputs in place of Λ it is the Fisher
matrix. The two are equal for canonical families only.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from linnet.errors import DataError, InputError, NumericalError
from linnet.linalg.factorize import eigh, lies_within
from linnet.linalg.random import Seed, make_generator, require_room, signs
from linnet.params import choice, instance, integer, refuse, shown, tensor

# -- distribution ----------------------------------------------------------------------------------
#
# Labels given outputs: their probabilities, their moments, and how outputs and labels are laid out.
#
# Outputs come in the network's own shape (N, ...). One axis holds the C classes or components; the others
# are T positions (pixels, words) at which labels are independent given the outputs. Everything is
# computed on outputs arranged into (N, T, C), the class axis last.

Moments = tuple[Tensor, Tensor]
OUTPUTS = "a dense floating-point tensor (N, ...) of outputs"


def uniform(shape: Sequence[int], seed: Seed, like: Tensor) -> Tensor:
    """Numbers in [0, 1), drawn where the generator lives, with the type and device of a tensor."""
    generator = make_generator(seed)
    source = generator.device if generator else torch.device("cpu")
    return torch.rand(tuple(shape), generator=generator, dtype=like.dtype, device=source).to(like.device)


def first_of(bad: Tensor, name: str = "y") -> str:
    """The name of the first element that is marked, for example "y[3, 1]"."""
    return f"{name}{bad.nonzero()[0].tolist()}"


def require_none(bad: Tensor, y: Tensor, expected: str, remedy: str, form: str = "") -> None:
    """Raise for the first target that is marked."""
    if bool(bad.any()):
        raise DataError(f"{first_of(bad)} is {y[bad][0].item():{form}}", expected, remedy)


def require_axis(axis: Any) -> int:
    """The class axis as given, or an error when it cannot be one."""
    if isinstance(axis, bool) or not isinstance(axis, int) or axis == 0 or abs(axis) > 64:  # torch's most
        refuse(
            "axis",
            axis,
            "the axis of the outputs that holds classes; axis 0 holds examples",
            "pass axis=1 for (N, C) and (N, C, H, W), axis=-1 for sequences (N, T, C)",
        )
    return axis


def require_tensor(y: Any) -> Tensor:
    """Labels as a tensor that can be computed with; anything but a tensor is refused."""
    if isinstance(y, Tensor) and y.is_complex():
        raise DataError(f"y has type {y.dtype}", expected="real targets", remedy="pass y.real")
    return tensor("y", y, "a dense tensor of labels", convert=False)


def require_numbers(f: Tensor, name: str = "f") -> None:
    """Raise if outputs hold NaN or +inf; −inf is the logit of what is impossible. One pass over them."""
    hidden = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(f)
    if hidden or f.numel() == 0 or float(f.detach().amax()) < math.inf:
        return
    bad = ~(f.detach() < math.inf)
    raise DataError(
        f"{first_of(bad, name)} is {float(f.detach()[bad][0])}, and {int(bad.sum())} of {f.numel()} are so",
        expected="finite outputs",
        remedy="look for divergence of the training, or for overflow in the network",
    )


def require_outputs(f: Any, name: str = "f") -> None:
    """Raise unless outputs, or what has their type, are a tensor that can be computed with."""
    if not tensor(name, f, OUTPUTS, convert=False).is_floating_point():
        refuse(name, f, OUTPUTS, f"pass {name}.float()")


def flatten_positions(y: Tensor) -> Tensor:
    """Labels (N, ...) as (N, T), for empty batches, too."""
    return y.reshape(len(y), math.prod(y.shape[1:]))


class Distribution(ABC):
    """Distribution of labels given the outputs f of a network."""

    # the axis of f that holds the C classes or components. One-dimensional outputs (N,) count as (N, 1)
    axis: int
    # whether the Hessian of the negative log-likelihood in f is independent of labels, as for exponential
    # families in their natural parameters; it is then the Fisher information
    canonical: bool

    def check(self, f: Tensor, y: Tensor) -> Tensor:
        """Validate labels and convert them to the type that is computed with.

        Args:
            f: Outputs (N, ...).
            y: Labels, as the family wants them.

        Returns:
            The labels, on the device of f.

        Raises:
            DataError: The outputs hold NaN or +inf, or the labels are none of the family's.
            InputError: The outputs do not fit the family, or y is no tensor.
        """
        self._arrange(f)
        y = require_tensor(y)
        require_numbers(f)
        return self._check(f, y.to(f.device))

    def mask(self, y: Tensor) -> Tensor | None:
        """Positions that have a label.

        Args:
            y: Labels.

        Returns:
            (N, T) booleans, or None when all have one.
        """
        y = require_tensor(y)
        if y.ndim == 0:
            refuse("y", y, "labels (N, ...)", "give them an axis of examples, as in y[None] for one")
        present = self._present(y)
        return present.any(-1) if present is not None and present.ndim == 3 else present

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood −log p(y | f), with all constants.

        Args:
            f: Outputs (N, ...).
            y: Labels; missing ones count 0.

        Returns:
            (N,), summed over positions.
        """
        require_tensor(y)
        rows, labels, counts = self._prepare(f, y)
        return _masked_sum(self._nll(rows, labels), counts)

    def sample(self, f: Tensor, n: int, seed: Seed = None) -> Tensor:
        """Draw labels from p(y | f).

        Args:
            f: Outputs (N, ...).
            n: Number of draws for each example.
            seed: Source of randomness: a generator, an integer seed or None.

        Returns:
            (n, *shape of y).
        """
        rows = self._prepare(f, None)[0]
        require_draws(n, rows.shape[:1], rows)  # a label an example, at the least
        drawn = self._sample(rows.detach(), n, make_generator(seed))
        return self._restore_labels(drawn, f.shape, lead=1)

    def kl(self, f: Tensor, g: Tensor, y: Tensor | None = None) -> Tensor:
        """Kullback-Leibler divergence KL(p(· | f) ‖ p(· | g)), differentiable in both.

        Args:
            f: Outputs (N, ...).
            g: Outputs of the same shape.
            y: Labels, where positions without one are to count 0.

        Returns:
            (N,), summed over positions.

        Raises:
            InputError: The shapes differ.
        """
        require_outputs(f)
        require_outputs(g, "g")
        if f.shape != g.shape:
            raise InputError(
                f"f has shape {tuple(f.shape)} and g {tuple(g.shape)}",
                expected="outputs of one shape",
                remedy="pass the outputs of two networks for the same inputs",
            )
        rows, _, counts = self._prepare(f, y)
        return _masked_sum(self._kl(rows, self._prepare(g, None)[0]), counts)

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]; class probabilities for Categorical.

        Args:
            f: Outputs (N, ...).

        Returns:
            In the layout of f.
        """
        return self._restore_labels(self._moments(self._prepare(f, None)[0])[0], f.shape)

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f] of each component; for Categorical, of the indicator of each class.

        Args:
            f: Outputs (N, ...).

        Returns:
            In the layout of f.
        """
        return self._restore_labels(self._moments(self._prepare(f, None)[0])[1], f.shape)

    def predictive(self, mean: Tensor, covariance: Tensor) -> Tensor | Moments:
        """The distribution of a new label when the outputs are uncertain, f ~ N(mean, covariance).

        Args:
            mean: (N, C).
            covariance: (N, C, C), or only its diagonals (N, C).

        Returns:
            Class probabilities (N, C) (Categorical, Bernoulli), or the mean and the variance of y.

        Raises:
            InputError: The shapes do not fit.
        """
        require_outputs(mean, "mean")
        require_outputs(covariance, "covariance")
        require_numbers(mean, "mean")
        require_numbers(covariance, "covariance")
        alike = mean.dtype == covariance.dtype
        if not alike or mean.ndim != 2 or covariance.shape not in (mean.shape, (*mean.shape, mean.shape[-1])):
            raise InputError(
                f"mean is {shown(mean)} and covariance {shown(covariance)}",
                expected="(N, C) with (N, C, C) or (N, C), of one type",
                remedy="make each position a separate example",
            )
        variance = covariance.diagonal(dim1=-2, dim2=-1) if covariance.ndim == 3 else covariance
        return self._predictive(mean, variance, covariance)

    def describe(self) -> dict[str, Any]:
        """Kind and settings, in types that JSON knows.

        Returns:
            A dictionary with "kind" and the arguments of the constructor.
        """
        return {"kind": type(self).__name__, **self._settings(), "axis": self.axis}

    def _compared(self) -> str:
        """What processes that work with it together must have alike."""
        return repr(self)

    def __repr__(self) -> str:
        described = self.describe()
        kind = described.pop("kind")
        given = (f"{name}={value!r}" for name, value in described.items() if value is not None)
        return f"{kind}({', '.join(given)})"

    # Layout

    def _class_axis(self, ndim: int) -> int:
        """The class axis counted from the front; 1 for outputs that lack it."""
        axis = self.axis if self.axis > 0 else ndim + self.axis
        if ndim == 1:
            return 1
        if not 1 <= axis < ndim:
            raise InputError(
                f"axis={self.axis} does not fit outputs of {ndim} dimensions",
                expected=f"an axis from 1 to {ndim - 1}, or from {1 - ndim} to -1",
                remedy="pass axis=1 for (N, C) and (N, C, H, W), axis=-1 for sequences (N, T, C)",
            )
        return axis

    def _arrange(self, f: Tensor, lead: int = 0) -> Tensor:
        """Outputs (*lead, N, ...) as (*lead, N, T, C)."""
        require_outputs(f)
        if f.ndim - lead < 1:
            refuse("f", f, OUTPUTS, "give it an axis of examples, as in f[None] for one")
        return self._arranged(f, lead)

    def _arranged(self, values: Tensor, lead: int = 0) -> Tensor:
        """Values of any type in the layout of the outputs, as (*lead, N, T, C)."""
        ndim = values.ndim - lead
        if ndim == 1:
            return values[..., None, None]
        last = values.movedim(lead + self._class_axis(ndim), -1)
        return last.unsqueeze(-2) if ndim == 2 else last.flatten(lead + 1, -2)

    def _restore(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """(*lead, N, T, D) in the layout of outputs of a shape, with D in place of C."""
        lead = rows.ndim - 3
        if len(shape) == 1:
            return rows.reshape(*rows.shape[:-2]) if rows.shape[-1] == 1 else rows.squeeze(-2)
        axis = self._class_axis(len(shape))
        rest = [size for i, size in enumerate(shape) if i not in (0, axis)]
        return rows.reshape(*rows.shape[:-2], *rest, rows.shape[-1]).movedim(-1, lead + axis)

    def _restore_labels(self, labels: Tensor, shape: Sequence[int], lead: int = 0) -> Tensor:
        """Labels (*lead, N, T) or (*lead, N, T, D) in the layout that outputs of a shape have."""
        if labels.ndim == lead + 2:
            return labels.reshape(*labels.shape[:-1], *self._label_shape(shape)[1:])
        return self._restore(labels, shape)

    def _label_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of outputs less the class axis."""
        axis = self._class_axis(len(shape))
        return tuple(size for i, size in enumerate(shape) if i != axis)

    def _prepare(self, f: Tensor, y: Tensor | None) -> tuple[Tensor, Any, Tensor | None]:
        """Outputs and labels arranged, and which components count; None for no labels and for all."""
        rows = self._arrange(f)
        if y is None:
            require_numbers(f)
            return rows, None, None
        return rows, *self._labels(f, self.check(f, y))

    # What a family defines, on arranged outputs

    @abstractmethod
    def _check(self, f: Tensor, y: Tensor) -> Tensor:
        """Labels validated and converted, in their own shape."""

    @abstractmethod
    def _present(self, y: Tensor) -> Tensor | None:
        """Which labels are there, (N, T) or (N, T, D), None for all."""

    @abstractmethod
    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels arranged, missing ones replaced, and which components of the outputs count."""

    @abstractmethod
    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        """−log p in terms of (N, T, any)."""

    @abstractmethod
    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Labels (n, N, T) or (n, N, T, D)."""

    @abstractmethod
    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        """Divergence in terms of (N, T, any)."""

    @abstractmethod
    def _moments(self, rows: Tensor) -> Moments:
        """Mean and variance of y given the outputs."""

    @abstractmethod
    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Tensor | Moments:
        """The predictive distribution of a label."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Arguments of the constructor, less the axis."""


def require_draws(n: int, shape: Sequence[int], f: Tensor) -> None:
    """Check a number of draws, and that so many of a shape would fit the memory; f has their type."""
    integer("n", n, remedy="pass n=1 or more")
    require_room((n, *shape), 2 * f.dtype.itemsize, f.device, "draws")


def _masked_sum(terms: Tensor, counts: Tensor | None) -> Tensor:
    """Terms (N, T, any) summed over all but examples, less those that do not count."""
    if counts is not None:
        terms = terms.masked_fill(~counts[..., : terms.shape[-1]], 0)
    return terms.sum((-2, -1))


def require_shape(y: Tensor, expected: Sequence[int], remedy: str) -> None:
    """Check the shape of labels."""
    if y.shape != torch.Size(expected):
        raise DataError(f"y has shape {tuple(y.shape)}", expected=f"shape {tuple(expected)}", remedy=remedy)


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
    expected = "one of linnet.likelihoods, such as Categorical() or Gaussian(variance=0.1)"
    instance(
        "likelihood", likelihood, Likelihood, expected, "call the class: linnet.likelihoods.Categorical()"
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


# -- components ------------------------------------------------------------------------------------
# Canonical likelihoods whose components are independent: one number describes the curvature of each.


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
    require_none(y.isinf(), y, "finite targets", "look for overflow in the data")


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


# -- definite --------------------------------------------------------------------------------------
# Curvature matrices at each output: checks and repair of positive semi-definiteness.

Psd = Literal["raise", "clip"]


def require_psd(psd: Any) -> Psd:
    """The way to treat indefinite matrices as given, or an error when it is none."""
    choice(
        "psd", psd, ("raise", "clip"), 'pass psd="clip" to keep the positive part of an indefinite Hessian'
    )
    return "clip" if psd == "clip" else "raise"


def require_semidefinite(smallest: Tensor, largest: Tensor, name: str) -> None:
    """Check that no eigenvalue is more negative than rounding explains."""
    # smallest (N, T)
    if smallest.numel() == 0:
        return
    eps = torch.finfo(smallest.dtype).eps
    # curvatures below that of one nat and unit outputs by a factor of eps are rounding, too
    tolerance = 1000 * eps * float(largest.max()) + 10 * eps
    if float(smallest.min()) < -tolerance:
        example, position = (smallest == smallest.min()).nonzero()[0].tolist()[:2]
        raise NumericalError(
            f"the Hessian of {name} has the eigenvalue {float(smallest.min()):.4g} at example {example} "
            f"of the batch, position {position}",
            expected="a positive semi-definite Hessian, which alone has a square root",
            remedy='pass psd="clip" to keep its positive part, or use the Fisher information',
        )


def positive_root(matrix: Tensor, psd: Psd, name: str) -> Tensor:
    """R with R Rᵀ = M, or its positive part, (N, T, C, C)."""
    # matrix (N, T, C, C)
    values, vectors = eigh(matrix, f"the Hessian of {name}")
    if psd == "raise":
        require_semidefinite(values[..., 0], values.abs().amax(-1), name)
    # Q diag(√λ), λ ≥ 0
    return vectors * values.clamp_min(0).sqrt()[..., None, :]
