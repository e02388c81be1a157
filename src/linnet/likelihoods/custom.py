"""Likelihoods given by a function, differentiated automatically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.errors import DataError, InputError
from linnet.likelihoods.discrete import draw_classes
from linnet.likelihoods.likelihood import (
    Likelihood,
    Moments,
    Psd,
    first_of,
    flatten_positions,
    positive_root,
    require_axis,
    require_psd,
)
from linnet.params import call, flag, function, refuse, tensor

_PROBED = 4  # positions on which a claim of canonicity is tested


class Custom(Likelihood):
    """Any negative log-likelihood, as a function of the outputs and the label of each position.

    Λ is the Hessian of the function, found by one backward pass for each of the C outputs, over all
    positions at once. The Fisher information is computed from what defines it, by a sum over
    ``support`` or by ``sample``, and is never taken for Λ unless ``canonical`` says so.

    Labels y are (N, ...): in the shape of the outputs without the class axis, or with another size
    along it. Predictive distributions are of first order in the outputs.

    Args:
        nll: From outputs (M, C) and labels (M, ...) to −log p(y | f) (M,), normalized, each entry a
            function of its own row alone.
        sample: From outputs (M, C) and a generator (or None) to labels (M, ...).
        support: All labels that there are, where they are few.
        moments: From outputs (M, C) to the mean and the variance of the labels, each (M, ...); by default
            sums over ``support``.
        canonical: Whether Λ is independent of y; tested on the first few positions with a ``support``.
        psd: What to do where Λ is indefinite: "raise" leaves Λ as it is and makes its root an error,
            "clip" replaces Λ by its positive part everywhere.
        axis: The axis of the outputs that holds the C components.

    Raises:
        InputError: An argument is not what it should be.

    Example:
        >>> laplace = Custom(lambda f, y: (y - f[:, 0]).abs() + 0.6931)
        >>> laplace.gradient(torch.zeros(1, 1), torch.tensor([3.0]))
        tensor([[-1.]])
    """

    def __init__(
        self,
        nll: Callable[[Tensor, Tensor], Tensor],
        *,
        sample: Callable[[Tensor, torch.Generator | None], Tensor] | None = None,
        support: Iterable[Any] | None = None,
        moments: Callable[[Tensor], Moments] | None = None,
        canonical: bool = False,
        psd: Psd = "raise",
        axis: int = 1,
    ) -> None:
        for name, value in (("nll", nll), ("sample", sample), ("moments", moments)):
            if name == "nll" or value is not None:
                function(name, value, "a function", f"see help(Custom): {name}")
        self._function, self._sampler, self._given_moments = nll, sample, moments
        self._support = None if support is None else _label_tensor(support)
        self.canonical, self.psd, self.axis = (
            flag("canonical", canonical),
            require_psd(psd),
            require_axis(axis),
        )
        self._doubtful = self.canonical and self._support is not None

    # Labels

    def _check(self, f: Tensor, y: Tensor) -> Tensor:
        labels = self._lay_out(f, y)
        if y.is_floating_point() and bool(y.isnan().any()):
            raise DataError(
                f"{first_of(y.isnan())} is nan", expected="labels without nan", remedy="fill them"
            )
        if self._support is not None:
            support = self._support.to(y.device)
            if labels.shape[2:] != support.shape[1:]:
                raise DataError(
                    f"labels of a position have shape {tuple(labels.shape[2:])}, those of support "
                    f"{tuple(support.shape[1:])}",
                    expected="labels of one kind",
                    remedy="check y and support",
                )
            same = (
                (labels[:, :, None] == support).flatten(3).all(-1)
                if support.ndim > 1
                else (labels[:, :, None] == support)
            )
            outside = ~same.any(-1)
            if bool(outside.any()):
                example, position = outside.nonzero()[0].tolist()
                raise DataError(
                    f"the label y of example {example}, position {position}, is "
                    f"{labels[example, position].tolist()}",
                    expected=f"one of the {len(support)} labels of support",
                    remedy="correct the label, or complete support",
                )
        return y

    def _lay_out(self, f: Tensor, y: Tensor) -> Tensor:
        """Labels (N, T, ...)."""
        expected, axis = self._label_shape(f.shape), self._class_axis(f.ndim)
        if y.shape == torch.Size(expected):
            return flatten_positions(y)
        if y.ndim == f.ndim and all(
            a == b for i, (a, b) in enumerate(zip(y.shape, f.shape, strict=True)) if i != axis
        ):
            return self._arranged(y)
        if f.ndim <= 2 and y.ndim and len(y) == len(f):
            return y.unsqueeze(1)
        raise DataError(
            f"y has shape {tuple(y.shape)}, for outputs of shape {tuple(f.shape)}",
            expected=f"shape {expected}, or this with an axis of components in place {axis}",
            remedy="check y and axis",
        )

    def _present(self, y: Tensor) -> Tensor | None:
        return None

    def _labels(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._lay_out(f, y), None

    def _restore_labels(self, labels: Tensor, shape: Any, lead: int = 0) -> Tensor:
        if labels.ndim > lead + 3:
            return labels.squeeze(lead + 1)
        return super()._restore_labels(labels, shape, lead)

    def _given_or_any(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        """The labels, or some label for each position where Λ is independent of it."""
        if self._doubtful and rows.numel():
            self._probe(rows)
            self._doubtful = False
        if labels is not None:
            return labels
        if self._support is not None:
            return self._at(self._support[0], rows)
        if self._sampler is not None:
            return self._sample(rows, 1, torch.Generator().manual_seed(0))[0]
        raise self._lacks("the Hessian without labels", "labels y, sample= or support=")

    def _probe(self, rows: Tensor) -> None:
        """Test on a few positions that Λ is the same at all labels of the support."""
        few = rows.detach().flatten(0, 1)[:_PROBED, None]
        each = [self._exact(few, self._at(label, few)) for label in self._table()]
        largest = max(float(h.abs().max()) for h in each)
        for label, h in zip(self._table(), each, strict=True):
            gap = float((h - each[0]).abs().max())
            if gap > 1e3 * torch.finfo(h.dtype).eps * max(largest, 1.0):
                raise InputError(
                    f"canonical=True, but the Hessian at label {label.tolist()} differs from that at "
                    f"{self._table()[0].tolist()} by {gap:.3g}",
                    expected="a Hessian that is independent of labels",
                    remedy="leave canonical=True out",
                )

    def _table(self) -> Tensor:
        """All labels (L, ...)."""
        if self._support is None:
            raise self._lacks("a sum over labels", "support=, all labels that there are")
        return self._support

    def _lacks(self, what: str, remedy: str) -> InputError:
        """The error for something that the arguments do not define."""
        return InputError(
            f"{self!r} cannot compute {what}",
            expected="a likelihood that does",
            remedy=f"pass {remedy}",
        )

    @staticmethod
    def _at(label: Tensor, rows: Tensor) -> Tensor:
        """One label at each position of rows (*lead, N, T, C)."""
        return label.to(rows.device).expand(*rows.shape[:-1], *label.shape)

    # Derivatives

    def _values(self, flat: Tensor, labels: Tensor) -> Tensor:
        """The function's values (M,), checked."""
        expected = "a function from outputs (M, C) and labels (M, ...) to numbers (M,)"
        values = call("nll", self._function, flat, labels, expected=expected)
        if not isinstance(values, Tensor) or values.shape != flat.shape[:1]:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"nll returned {got} for outputs {tuple(flat.shape)} and labels {tuple(labels.shape)}",
                expected=f"one value for each row, {(len(flat),)}",
                remedy="sum over components, not over rows",
            )
        return values

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        lead = rows.shape[:-1]
        flat = self._values(rows.flatten(0, -2), labels.flatten(0, len(lead) - 1))
        return flat.reshape(*lead, 1)

    def _gradient(self, rows: Tensor, labels: Tensor) -> Tensor:
        keep = rows.requires_grad and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            point, at = _differentiable(rows, keep), _usable(labels)
            total = self._nll(point, at).sum()
            return _grad(total, point, keep)

    def _exact(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Λ by one backward pass for each output, (N, T, C, C)."""
        keep = rows.requires_grad and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            point, at = _differentiable(rows, keep), _usable(labels)
            slope = _grad(self._nll(point, at).sum(), point, True)
            # positions are independent: the gradient of a sum over them is the row of each one's Hessian
            columns = [_grad(slope[..., c].sum(), point, keep, retain=True) for c in range(rows.shape[-1])]
        matrix = torch.stack(columns, -1)
        return 0.5 * (matrix + matrix.mT)

    def _hessian(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        matrix = self._exact(rows, self._given_or_any(rows, labels))
        if self.psd == "raise":
            return matrix
        root = positive_root(matrix, "clip", repr(self))
        return root @ root.mT

    def _product(self, rows: Tensor, v: Tensor, labels: Tensor | None) -> Tensor:
        if self.psd == "clip":
            return torch.einsum("ntij,...ntj->...nti", self._hessian(rows, labels), v)
        at = self._given_or_any(rows, labels)
        keep = rows.requires_grad and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            point = _differentiable(rows, keep)
            slope = _grad(self._nll(point, _usable(at)).sum(), point, True)
            flat = _usable(v.reshape(-1, *rows.shape))
            products = [_grad((slope * column).sum(), point, keep, retain=True) for column in flat]
        return torch.stack(products).reshape(v.shape) if products else torch.zeros_like(v)

    def _root(self, rows: Tensor, labels: Tensor | None) -> Tensor:
        at = self._given_or_any(rows, labels)
        return positive_root(self._exact(rows, at), self.psd, repr(self))

    # Sums over labels

    def _log_probabilities(self, rows: Tensor) -> Tensor:
        """Log p of each label of the support, (N, T, L)."""
        table = self._table()
        every = rows.expand(len(table), *rows.shape)
        labels = torch.stack([self._at(label, rows) for label in table])
        log_p = -self._nll(every, labels)[..., 0].movedim(0, -1)
        totals = log_p.detach().exp().sum(-1)
        wrong = ~((totals - 1).abs() < 1e-3)
        if bool(wrong.any()):
            example, position = wrong.nonzero()[0].tolist()
            raise InputError(
                f"the probabilities of the {len(table)} labels of support sum to "
                f"{float(totals[example, position]):.4g} at example {example}, position {position}",
                expected="1",
                remedy="complete support, or add the normalizing constant to nll",
            )
        return log_p

    def _fisher_root(self, rows: Tensor) -> Tensor:
        if self._support is None and self.canonical:
            return self._root(rows, None)
        if self._support is None:
            raise self._lacks("the exact Fisher information", "support=, all labels that there are")
        weights = (0.5 * self._log_probabilities(rows)).exp()
        every = rows.expand(len(self._support), *rows.shape)
        slopes = self._gradient(every, torch.stack([self._at(label, rows) for label in self._support]))
        # Σ_y p(y) g(y) g(y)ᵀ
        columns = slopes.movedim(0, -1) * weights[..., None, :]
        if columns.shape[-1] <= columns.shape[-2]:
            return columns
        return positive_root(columns @ columns.mT, "clip", repr(self))

    def _fisher(self, rows: Tensor) -> Tensor:
        root = self._fisher_root(rows)
        return root @ root.mT

    def _sample(self, rows: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        if self._sampler is not None:
            many = rows.expand(n, *rows.shape).flatten(0, -2)
            drawn = self._sampler(many, generator)
            if not isinstance(drawn, Tensor) or len(drawn) != len(many):
                got = tuple(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
                raise InputError(
                    f"sample returned {got} for outputs {tuple(many.shape)}",
                    expected="one label for each row",
                    remedy="return a tensor whose first axis is that of the outputs",
                )
            return drawn.to(rows.device).reshape(n, *rows.shape[:-1], *drawn.shape[1:])
        if self._support is None:
            raise self._lacks("a sample of labels", "sample= or support=")
        drawn = draw_classes(self._log_probabilities(rows).exp(), n, generator)
        return self._support.to(rows.device)[drawn]

    def _kl(self, f: Tensor, g: Tensor) -> Tensor:
        if self._support is None:
            raise self._lacks("the divergence from itself", "support=, all labels that there are")
        log_f, log_g = self._log_probabilities(f), self._log_probabilities(g)
        p = log_f.exp()
        return p * (log_f - log_g).masked_fill(p == 0, 0)

    def _moments(self, rows: Tensor) -> Moments:
        lead = rows.shape[:-1]
        if self._given_moments is not None:
            mean, variance = self._given_moments(rows.flatten(0, -2))
            return mean.reshape(*lead, *mean.shape[1:]), variance.reshape(*lead, *variance.shape[1:])
        if self._support is None:
            raise self._lacks("the mean of labels", "moments= or support=")
        p, table = self._log_probabilities(rows).exp(), self._support.to(rows)
        mean = torch.tensordot(p, table, 1)
        squares = (table - mean.unsqueeze(len(lead))) ** 2
        weights = p.reshape(*p.shape, *[1] * (table.ndim - 1))
        return mean, (weights * squares).sum(len(lead))

    def _predictive(self, mean: Tensor, variance: Tensor, covariance: Tensor) -> Moments:
        with torch.inference_mode(False), torch.enable_grad():
            point = _differentiable(mean, False)
            center, noise = (x[:, 0] for x in self._moments(point.unsqueeze(1)))
            columns = center.reshape(len(center), -1).unbind(1)
            slopes = torch.stack([_grad(c.sum(), point, False, retain=True) for c in columns], 1)
        # Var[y] ≈ Var[y | E f] + gᵀ Σ g with g = ∂E[y | f]/∂f
        spread = (
            torch.einsum("aki,aij,akj->ak", slopes, covariance, slopes)
            if covariance.ndim == 3
            else torch.einsum("aki,ai->ak", slopes**2, variance)
        )
        return center.detach(), noise.detach() + spread.reshape(noise.shape)

    def _settings(self) -> dict[str, Any]:
        return {
            "nll": _name(self._function),
            "sample": self._sampler and _name(self._sampler),
            "support": None if self._support is None else self._support.tolist(),
            "moments": self._given_moments and _name(self._given_moments),
            "canonical": self.canonical,
            "psd": self.psd,
        }


def mixture_of_classifiers(psd: Psd = "raise", axis: int = 1) -> Custom:
    """Two classifiers of a yes-or-no question and a gate between them, from three outputs.

    p(y | f) = σ(f₁) σ(f₂)^y (1 − σ(f₂))^(1−y) + (1 − σ(f₁)) σ(f₃)^y (1 − σ(f₃))^(1−y), for y = 0 or 1:
    Botev, *The Gauss-Newton matrix for deep learning models and its applications*, 2020, equation 4.28.
    It is no exponential family in f, so its Fisher and Gauss-Newton matrices differ, and Λ can be indefinite.

    Args:
        psd: What to do where Λ is indefinite, as for ``Custom``.
        axis: The axis of the outputs that holds the three.

    Returns:
        The likelihood.

    Example:
        >>> likelihood = mixture_of_classifiers()
        >>> likelihood.mean(torch.zeros(1, 3))
        tensor([0.5000])
    """
    return Custom(_mixture_nll, support=(0, 1), psd=psd, axis=axis)


def _mixture_nll(f: Tensor, y: Tensor) -> Tensor:
    """−log of a gated sum of two Bernoulli probabilities."""
    if f.shape[-1] != 3:
        raise InputError(
            f"outputs have {f.shape[-1]} components",
            expected="three: a gate and two classifiers",
            remedy="give the network three outputs, or check axis",
        )
    gate, first, second = f.unbind(-1)
    sign = 2 * y.to(f.dtype) - 1
    a, b = F.logsigmoid(gate) + F.logsigmoid(sign * first), F.logsigmoid(-gate) + F.logsigmoid(sign * second)
    # log(eᵃ + eᵇ) = a − log σ(a − b), from the larger: the second derivative of logaddexp overflows
    return -torch.where(a >= b, a - F.logsigmoid(a - b), b - F.logsigmoid(b - a))


def _label_tensor(support: Iterable[Any]) -> Tensor:
    """All labels in one tensor (L, ...)."""
    single = isinstance(support, Tensor) and support.ndim == 0
    if single or isinstance(support, str | bytes | Mapping) or not isinstance(support, Iterable):
        refuse("support", support, "all labels that there are, in a list", "leave support= out")
    labels = list(support)
    if not labels:
        raise InputError(
            "support is empty", expected="all labels that there are", remedy="leave support= out"
        )
    try:
        table = torch.stack([torch.as_tensor(label) for label in labels])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"support={labels!r} cannot be made a tensor: {error}",
            expected="numbers or tensors of one shape",
            remedy="pass numbers such as support=[0, 1]",
        ) from error
    found = tensor("support", table, "finite numbers")
    if not bool(found.isfinite().all()):
        refuse("support", support, "finite numbers", "leave out labels that are not finite")
    return found


def _name(function: Callable[..., Any]) -> str:
    """Where a function comes from."""
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{home}.{name}" if home and name else type(function).__qualname__


def _usable(values: Tensor) -> Tensor:
    """The tensor, or a copy where it was made in inference mode, which autograd cannot use."""
    return values.clone() if values.is_inference() else values


def _differentiable(rows: Tensor, keep: bool) -> Tensor:
    """A point to differentiate at: rows themselves where their graph is kept, else apart from it."""
    return rows if keep else _usable(rows).detach().requires_grad_()


def _grad(total: Tensor, point: Tensor, create: bool, retain: bool = False) -> Tensor:
    """The derivative of a number, zero where it does not depend on the point."""
    if not total.requires_grad:
        return torch.zeros_like(point)
    (slope,) = torch.autograd.grad(
        total,
        point,
        create_graph=create,
        retain_graph=create or retain,
        allow_unused=True,
        materialize_grads=True,
    )
    return slope
