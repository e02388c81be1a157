"""The data of a linear model with any convex loss: Σᵢ ℓ(fᵢ, yᵢ) with outputs f = m + Jδ.

The loss is the negative logarithm of a likelihood that is canonical in f, so that Σᵢ Jᵢᵀ Λᵢ Jᵢ is the
Gauss-Newton matrix, the Fisher information and the Hessian in one.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from linnet.curvatures.products import weighted
from linnet.distributed import current, share_sum
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.operator import LinearOperator
from linnet.memory import parse_bytes
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import JacobianOperator, jacobian

SHARE = 0.25  # of the memory budget that J may take: kept, a product costs what it takes to read it
MOST = 4 << 30  # bytes that it may take


class LabelProblem:
    """A linear model, its training data and what its outputs mean."""

    # base (N, ...)

    def __init__(
        self, function: Functional, x: Inputs, base: Tensor, likelihood: Likelihood, y: Tensor, keep: bool
    ) -> None:
        self.function, self.x, self.base = function, x, base
        self.likelihood, self.y, self.keep = likelihood, y, keep
        self.jacobian = JacobianOperator(function, x, base[0].numel())

    @cached_property
    def rows(self) -> Tensor | None:
        """J, (N, C, P), where it is to be kept and there is space for it; ``None`` elsewhere."""
        if not self.keep:
            return None
        function = self.function
        size = self.base.numel() * function.space.dim * function.dtype.itemsize
        room = min(MOST, int(SHARE * parse_bytes(None, function.device)))
        return jacobian(function, self.x) if size <= room else None

    def push(self, delta: Tensor) -> Tensor:
        """J δ on the data, (N, ...), float64."""
        moved = self.jacobian.mv(delta) if self.rows is None else self.rows @ delta
        return moved.double().reshape(self.base.shape)

    def pull(self, slopes: Tensor) -> Tensor:
        """Jᵀ u for u (N, ...), (P,), in the network's type."""
        u = slopes.to(self.function.dtype).reshape(-1)
        return self.jacobian.T.mv(u) if self.rows is None else self.rows.flatten(0, 1).T @ u

    def loss(self, f: Tensor) -> float:
        """Σᵢ ℓ(fᵢ, yᵢ) at outputs f (N, ...)."""
        return float(self.likelihood.nll(f.double(), self.y).sum())

    def slopes(self, f: Tensor) -> Tensor:
        """The gradient of the loss in the outputs, (N, ...), float64."""
        return self.likelihood.gradient(f.double(), self.y)

    def hessian(self, f: Tensor) -> OutputHessian:
        """JᵀΛJ with Λ at outputs f (N, ...)."""
        return OutputHessian(self, f)


class OutputHessian(LinearOperator):
    """Σᵢ Jᵢᵀ Λᵢ Jᵢ over the data, P × P: the Hessian of the loss in δ."""

    # outputs (N, ...)

    def __init__(self, problem: LabelProblem, outputs: Tensor) -> None:
        function = problem.function
        self.problem, self.outputs = problem, outputs.to(function.dtype)
        self.shape = (function.space.dim, function.space.dim)
        self.dtype, self.device, self.space = function.dtype, function.device, function.space

    def mm(self, v: Tensor) -> Tensor:
        """JᵀΛJ v: (P, K) to (P, K)."""
        problem, f = self.problem, self.outputs
        if (rows := problem.rows) is None:
            return self._differentiated(v)
        flat = rows.flatten(0, 1)
        moved = (flat @ v).T.reshape(v.shape[1], *f.shape)
        return flat.T @ problem.likelihood.product(f, moved, problem.y).reshape(v.shape[1], -1).T

    def _differentiated(self, v: Tensor) -> Tensor:
        """The product from derivatives; each process of several takes its share of the examples."""
        problem = self.problem
        share = current()
        own = share.part(len(self.outputs))
        f, y = self.outputs[own], problem.y[own]

        def weigh(_: Tensor, t: Tensor, place: slice) -> Tensor:
            """Λ t of some examples, at the outputs that are given."""
            at = f[place]
            return problem.likelihood.product(at, t.reshape(len(t), *at.shape), y[place]).reshape(t.shape)

        if share.world == 1:
            return weighted(problem.function, problem.x, v, weigh)
        total = v.new_zeros(v.shape)
        if len(f):
            total += weighted(problem.function, take(problem.x, own), v, weigh)
        share_sum([total])
        return total

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self
