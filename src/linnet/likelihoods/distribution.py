"""Labels given outputs: their probabilities, their moments, and how outputs and labels are laid out.

Outputs come in the network's own shape (N, ...). One axis holds the C classes or components; the others
are T positions (pixels, words) at which labels are independent given the outputs. Everything is computed
on outputs arranged into (N, T, C), the class axis last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.linalg.random import Seed, make_generator, require_room
from linnet.params import integer, refuse, shown, tensor

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
