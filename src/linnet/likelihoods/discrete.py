"""Likelihoods of classes and counts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.likelihoods.likelihood import (
    IndependentComponents,
    Likelihood,
    Moments,
    flatten_positions,
    require_axis,
    require_none,
    require_shape,
    uniform,
)
from linnet.linalg.factorize import lies_within
from linnet.linalg.random import signs
from linnet.params import flag, integer

_LEAST_LOG = -3e4  # below it every square root of a probability is zero in any type


class Categorical(Likelihood):
    """One of C classes, with probabilities softmax(f): classification with cross-entropy.

    Labels are integers in the shape of the outputs without the class axis, or probabilities in the shape
    of the outputs.

    Args:
        ignore_index: The integer label of positions that do not count.
        axis: The axis of the outputs that holds classes.

    Example:
        >>> likelihood = Categorical()
        >>> likelihood.gradient(torch.zeros(1, 2), torch.tensor([1]))
        tensor([[ 0.5000, -0.5000]])
    """

    canonical = True

    def __init__(self, ignore_index: int = -100, axis: int = 1) -> None:
        self.ignore_index, self.axis = _require_index(ignore_index), require_axis(axis)

    def _arrange(self, f: Tensor, lead: int = 0) -> Tensor:
        rows = super()._arrange(f, lead)
        if rows.shape[-1] < 2:
            raise InputError(
                f"outputs of shape {tuple(f.shape)} have {rows.shape[-1]} class along axis {self.axis}",
                expected="two classes or more",
                remedy="use Bernoulli() for one logit of a yes-or-no question, or check axis",
            )
        return rows

    def _check(self, f: Tensor, y: Tensor) -> Tensor:
        expected = self._label_shape(f.shape)
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            return self._check_soft(f, y, expected)
        y = y[..., 0] if y.shape == (*expected, 1) else y  # a column of labels
        if y.shape != torch.Size(expected):
            require_shape(y, expected, self._shape_remedy(f, y))
        y, classes = y.long(), f.shape[self._class_axis(f.ndim)]
        bad = ((y < 0) | (y >= classes)) & (y != self.ignore_index)
        known = f"classes from 0 to {classes - 1}, or ignore_index={self.ignore_index}"
        require_none(bad, y, known, "number the classes from 0, or give the network more outputs")
        return y

    def _shape_remedy(self, f: Tensor, y: Tensor) -> str:
        """The remedy for integer labels of another shape."""
        if y.shape == f.shape:
            return f"pass y.argmax({self.axis}) for one-hot labels"
        if y.numel() == math.prod(self._label_shape(f.shape)):
            return f"pass y.reshape{(-1, *self._label_shape(f.shape)[1:])}"
        if f.ndim > 2 and y.shape == f.shape[:-1]:
            return "pass axis=-1 for outputs (N, T, C)"
        return "give one label for each position; axis names the axis of classes"

    def _check_soft(self, f: Tensor, y: Tensor, expected: tuple[int, ...]) -> Tensor:
        """Class probabilities as labels."""
        if y.shape != f.shape or not y.is_floating_point():
            raise DataError(
                f"y has type {y.dtype} and shape {tuple(y.shape)}",
                expected=f"integer classes {expected}, or floating-point probabilities {tuple(f.shape)}",
                remedy="pass y.long() for classes; for other targets use Bernoulli() or Gaussian()",
            )
        remedy = "pass integer classes, or use Gaussian() for real targets"
        require_none(~(y >= 0), y, "probabilities of classes, none negative", remedy, ".4g")
        totals = self._arranged(y).double().sum(-1)
        wrong = (totals - 1).abs() > 1e-2 if y.element_size() < 4 else (totals - 1).abs() > 1e-4
        if bool(wrong.any()):
            example, position = wrong.nonzero()[0].tolist()
            raise DataError(
                f"the probabilities y of example {example}, position {position}, sum to "
                f"{float(totals[example, position]):.4g}",
                expected="probabilities of classes that sum to 1",
                remedy="normalize them, or use Bernoulli() where several classes can hold at once",
            )
        return y.to(f.dtype)

    def _present(self, y: Tensor) -> Tensor | None:
        if y.is_floating_point():
            return None
        present = flatten_positions(y != self.ignore_index)
        return None if bool(present.all()) else present

    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        if y.is_floating_point():
            return self._arranged(y), None
        present, labels = self._present(y), flatten_positions(y)
        if present is None:
            return labels, None
        return labels.masked_fill(~present, 0), present[..., None]

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        log_p = rows.log_softmax(-1)
        if labels.is_floating_point():
            # −Σ_c y_c log p_c, with 0 · log 0 = 0
            return -(labels * log_p.masked_fill(labels == 0, 0)).sum(-1, keepdim=True)
        return -log_p.gather(-1, labels[..., None])

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        p = rows.softmax(-1)
        if labels.is_floating_point():
            return p - labels
        # p − e_y; the entry of y as minus the sum of the others, which is exact where p_y rounds to 1
        return _balanced(p, labels[..., None])

    def _hessian(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        p = rows.softmax(-1)
        # diag(p) − p pᵀ; rows sum to zero, which gives p (1 − p) exactly where p rounds to 1
        matrix = -p[..., :, None] * p[..., None, :]
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal.zero_()
        diagonal.copy_(-matrix.sum(-1))
        return matrix

    def _hessian_sum(self, rows: Tensor, labels: Tensor | None, counts: Tensor | None) -> Tensor:
        p = rows.softmax(-1)
        p = (p if counts is None else p.masked_fill(~counts, 0)).flatten(0, 1)
        # Σ diag(p) − p pᵀ, one product; rows sum to zero, as those of each term do
        matrix = -(p.mT @ p)
        matrix = (matrix + matrix.mT) / 2
        diagonal = matrix.diagonal()
        diagonal.zero_()
        diagonal.copy_(-matrix.sum(-1))
        return matrix

    def _hessian_diagonal(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        p, top = rows.softmax(-1), rows.argmax(-1, keepdim=True)
        # p (1 − p), where 1 − p of the likeliest is the sum of the others: exact where p rounds to 1
        others = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        return p * (1 - p).scatter(-1, top, others)

    def _product(self, rows: Tensor, v: Tensor, labels: Tensor | None) -> Tensor:
        p, top = rows.softmax(-1), rows.argmax(-1, keepdim=True)
        # p ∘ v − p (pᵀ v); Λ 1 = 0 lets v be shifted, so that nothing cancels where p is nearly certain
        shifted = v - v.gather(-1, top.expand(*v.shape[:-1], 1))
        return p * (shifted - (p * shifted).sum(-1, keepdim=True))

    def _root(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        return self._root_columns(rows, labels, 0, rows.shape[-1] - 1)

    def _rank(self, c: int) -> int | None:
        return c - 1

    def _root_columns(self, rows: Tensor, labels: Tensor | None, start: int, stop: int) -> Tensor:
        # Cholesky factor of diag(p) − p pᵀ: Tanabe & Sagae, "An exact Cholesky decomposition and the
        # generalized inverse of the variance-covariance matrix of the multinomial distribution", 1992.
        # With tails q_j = Σ_{i≥j} p_i: L_jj = √(p_j q_{j+1} / q_j), L_ij = −p_i √(p_j / (q_j q_{j+1})).
        log_p = rows.log_softmax(-1).clamp_min(_LEAST_LOG)
        log_q = log_p.flip(-1).logcumsumexp(-1).flip(-1)
        here, after = log_q[..., start:stop], log_q[..., start + 1 : stop + 1]
        own = log_p[..., start:stop]
        diagonal, below = 0.5 * (own + after - here), 0.5 * (own - here - after)
        # p_i ≤ q_{j+1}, so that a factor that would overflow meets a p_i that is zero
        below = below.clamp_max(math.log(torch.finfo(rows.dtype).max) - 1)
        factor = log_p.exp()[..., :, None] * -below.exp()[..., None, :]
        factor.tril_(-1 - start).diagonal(-start, dim1=-2, dim2=-1).copy_(diagonal.exp())
        return factor

    def _project(
        self, rows: Tensor, n: int, generator: torch.Generator | None, labels: Tensor | None
    ) -> Tensor:
        v = signs((n, *rows.shape), generator, rows.dtype, rows.device)
        p, deviation = rows.softmax(-1), (0.5 * rows.log_softmax(-1)).exp()
        # (diag(√p) − p √pᵀ) v, whose square is Λ too; its entries sum to zero
        columns = deviation * v - p * (deviation * v).sum(-1, keepdim=True)
        return _balanced(columns, rows.argmax(-1, keepdim=True))

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        return draw_classes(rows.softmax(-1), n, generator)

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        log_f, log_g = f.log_softmax(-1), g.log_softmax(-1)
        p = log_f.exp()
        # Σ_c p_c (log p_c − log q_c), with 0 · log 0 = 0
        return p * (log_f - log_g).masked_fill(p == 0, 0)

    def _moments(self, rows: Tensor) -> Moments:
        p = rows.softmax(-1)
        return p, p * (1 - p)

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Tensor:
        # extended probit: MacKay, "The evidence framework applied to classification networks", 1992
        return (mean * (1 + math.pi / 8 * variance).rsqrt()).softmax(-1)

    def _settings(self) -> dict[str, Any]:
        return {"ignore_index": self.ignore_index}


class Bernoulli(IndependentComponents):
    """Yes or no for each output, with probability σ(f): binary or multi-label classification.

    Labels have the shape of the outputs: booleans, 0 and 1, or probabilities between.

    Args:
        ignore_index: The label of entries that do not count.
        axis: The axis of the outputs that holds components.

    Example:
        >>> Bernoulli().mean(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """

    masked = False

    def __init__(self, ignore_index: int = -100, axis: int = 1) -> None:
        self.ignore_index, self.axis = _require_index(ignore_index), require_axis(axis)
        if self.ignore_index in (0, 1):
            raise InputError(
                f"ignore_index={ignore_index} is a label",
                expected="an integer other than 0 and 1",
                remedy="pass ignore_index=-100",
            )

    def _check_values(self, y: Tensor, missing: Tensor) -> None:
        bad = ((y < 0) | (y > 1)) & (y != self.ignore_index)
        remedy = "use Categorical() for one of several classes, Poisson() for counts"
        require_none(bad, y, f"labels from 0 to 1, or ignore_index={self.ignore_index}", remedy, ".6g")

    def _plain(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _missing_remedy(self) -> str:
        return f"set missing labels to ignore_index={self.ignore_index}"

    def _absent(self, y: Tensor) -> Tensor | None:
        return None if y.is_floating_point() and lies_within(y, 0, 1) else y == self.ignore_index

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        # −y log σ(f) − (1 − y) log σ(−f)
        return -labels * F.logsigmoid(rows) - (1 - labels) * F.logsigmoid(-rows)

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        # σ(f) − y, without cancellation
        return (1 - labels) * rows.sigmoid() - labels * (-rows).sigmoid()

    def _curvature(self, rows: Tensor) -> Tensor:
        return rows.sigmoid() * (-rows).sigmoid()

    def _deviation(self, rows: Tensor) -> Tensor:
        return (0.5 * (F.logsigmoid(rows) + F.logsigmoid(-rows))).exp()

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        return (uniform((n, *rows.shape), generator, rows) < rows.sigmoid()).to(rows.dtype)

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        yes = f.sigmoid() * (F.logsigmoid(f) - F.logsigmoid(g))
        return yes + (-f).sigmoid() * (F.logsigmoid(-f) - F.logsigmoid(-g))

    def _moments(self, rows: Tensor) -> Moments:
        return rows.sigmoid(), self._curvature(rows)

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Tensor:
        # probit: MacKay, "The evidence framework applied to classification networks", 1992
        return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()

    def _settings(self) -> dict[str, Any]:
        return {"ignore_index": self.ignore_index}


class Poisson(IndependentComponents):
    """Counts with rates exp(f), independently for each output.

    Args:
        axis: The axis of the outputs that holds components.
        masked: Whether counts that are nan are missing, each on its own; otherwise they are errors.

    Example:
        >>> Poisson().gradient(torch.zeros(1, 1), torch.tensor([[3]]))
        tensor([[-2.]])
    """

    def __init__(self, axis: int = 1, masked: bool = False) -> None:
        self.axis, self.masked = require_axis(axis), flag("masked", masked)

    def _plain(self) -> tuple[float, float]:
        return math.inf, -math.inf  # whether numbers are whole is not said by their range

    def _check_values(self, y: Tensor, missing: Tensor) -> None:
        bad = ((y < 0) | (y != y.round()) | y.isinf()) & ~missing
        remedy = "use Gaussian() for real targets, or do not normalize counts"
        require_none(bad, y, "counts: whole numbers, none negative", remedy, ".6g")

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        # e^f − y f + log y!
        return rows.exp() - labels * rows + torch.lgamma(labels + 1)

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        return rows.exp() - labels

    def _curvature(self, rows: Tensor) -> Tensor:
        return rows.exp()

    def _deviation(self, rows: Tensor) -> Tensor:
        return (0.5 * rows).exp()

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        source = generator.device if generator else torch.device("cpu")
        rates = rows.exp().expand(n, *rows.shape).to(source)
        return torch.poisson(rates, generator=generator).to(rows)

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        # e^f (e^d − 1 − d), d = g − f: by expm1 where d is small, term by term where it may overflow
        d = g - f
        near = f.exp() * (torch.expm1(d.clamp(-1, 1)) - d.clamp(-1, 1))
        return torch.where(d.abs() < 1, near, g.exp() - f.exp() * (1 + d))

    def _moments(self, rows: Tensor) -> Moments:
        return rows.exp(), rows.exp()

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Moments:
        # the rate is log-normal: E[y] = E[e^f], Var[y] = E[e^f] + Var[e^f]
        rate = (mean + variance / 2).exp()
        return rate, rate + rate**2 * torch.expm1(variance)

    def _settings(self) -> dict[str, Any]:
        return {"masked": self.masked}


def _require_index(ignore_index: Any) -> int:
    """The ignored label as given, or an error when it is no integer."""
    return integer("ignore_index", ignore_index, -(2**63), remedy="pass ignore_index=-100")


def draw_classes(p: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw n classes from each row of probabilities, (n, ...)."""
    # p (..., C)
    # the first class whose cumulative probability exceeds a uniform number
    levels = p.cumsum(-1)
    u = uniform((n, *p.shape[:-1]), generator, p).movedim(0, -1) * levels[..., -1:]
    drawn = torch.searchsorted(levels.contiguous(), u.contiguous(), right=True)
    return drawn.clamp_max(p.shape[-1] - 1).movedim(-1, 0)


def _balanced(values: Tensor, at: Tensor) -> Tensor:
    """Values whose entry ``at`` along the last axis is replaced so that they sum to zero."""
    chosen = torch.arange(values.shape[-1], device=values.device) == at
    rest = values.masked_fill(chosen, 0)
    return torch.where(chosen, -rest.sum(-1, keepdim=True), rest)
