"""The cross-entropy optimum of a linearized network in the weights, and what follows from its Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator
from linnet.linear.iteration import STAGNATED, CGSettings, accepted
from linnet.linear.kernel_system import kernel_fits
from linnet.linear.label_problem import LabelProblem
from linnet.linear.primal_newton import PrimalNewton
from linnet.linear.softmax_dual import STALLED, SoftmaxDual, one_newton_step
from linnet.linear.softmax_loss import ClassLoss
from linnet.linear.system import require_digits
from linnet.progress import track
from linnet.tangent.batch import Inputs, batch_size, concatenate, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
from linnet.tangent.jacobian import jvp_columns, vjp_columns


class SoftmaxPrimal:
    """The optimal δ found by Newton's method with conjugate gradients, and solves with its Hessian."""

    # base (N, C)

    def __init__(
        self,
        function: Functional,
        x: Inputs,
        base: Tensor,
        loss: ClassLoss,
        ridge: float,
        settings: CGSettings,
        start: tuple[Tensor | None, LinearOperator | None] = (None, None),
    ) -> None:
        self.function, self.x, self.base, self.loss = function, x, base.double(), loss
        self.ridge, self.settings = float(ridge), settings
        self.n, self.c = base.shape
        self._given = start[1]
        self._own: Tensor | None = None
        self._dual: SoftmaxDual | None = None
        self.memory: str | int | None = None
        problem = LabelProblem(function, x, self.base, loss.likelihood, loss.y, keep=False)
        self._newton = PrimalNewton(problem, ridge, settings, *start)
        self._require_optimum()
        self.jacobian = problem.jacobian
        self.beta = -self.gradient / self.ridge

    def _require_optimum(self) -> None:
        """Raise where the steps ended before the gradient was small."""
        newton = self._newton
        enough = STALLED if self.function.dtype == torch.float64 else STAGNATED
        if newton.stalled and newton.reached > enough:
            raise NumericalError(
                f"Newton's method for the cross-entropy stopped after {newton.steps} steps and "
                f"{newton.products} of conjugate gradients with a gradient of {newton.reached:.1e} of the "
                "one at the start",
                expected=f"at most {self.settings.tolerance:g}",
                remedy=f'take solver="dual", a ridge larger than {self.ridge:g}, or raise max_steps=',
            )

    @property
    def delta(self) -> Tensor:
        """δ, (P,)."""
        return self._newton.delta

    @property
    def outputs(self) -> Tensor:
        """The outputs f on the training examples, (N, C)."""
        return self._newton.outputs

    @property
    def steps(self) -> int:
        """Newton steps taken."""
        return self._newton.steps

    @property
    def products(self) -> int:
        """Conjugate gradient steps taken in all."""
        return self._newton.products

    @property
    def objective(self) -> list[float]:
        """Its value after each Newton step."""
        return self._newton.objective

    @property
    def gradient(self) -> Tensor:
        """Gradient of the losses in the outputs, g = p − y, (N, C)."""
        return self.loss.gradient(self.outputs)

    @property
    def tolerance(self) -> float:
        """The gradient, relative to that at δ = 0, that the solution may leave."""
        return self.settings.tolerance

    def certificate(self) -> float:
        """‖∇‖ at the solution over ‖∇‖ at δ = 0."""
        return self._newton.reached

    # -- the Hessian at the optimum --------------------------------------------------------------

    def solve(self, b: Tensor) -> Tensor:
        """(JᵀΛJ + ρI)⁻¹ b for columns (P, K)."""
        solution = self.settings.run(self._newton.hessian, b, self._newton.preconditioner, None)
        return accepted(solution, "a solve by conjugate gradients")

    def _solved_rows(self, x: Inputs, what: str) -> Iterator[tuple[Inputs, Tensor]]:
        """H⁻¹ J(x)ᵀ block by block: the block and (P, n·C)."""
        for part in track(list(split(x, max(1, self.settings.columns // self.c))), what):
            n = batch_size(part)
            unit = torch.eye(n * self.c, dtype=self.function.dtype, device=self.function.device)
            yield part, self.solve(vjp_columns(self.function, part, unit.view(n, self.c, n * self.c)))

    def covariances(self, x: Inputs, what: str = "predictive covariance") -> Tensor:
        """A(x, x) = J(x) H⁻¹ J(x)ᵀ of each example."""
        found: list[Tensor] = []
        for part, solved in self._solved_rows(x, what):
            n = batch_size(part)
            product = jvp_columns(self.function, part, solved).view(n, self.c, n, self.c)
            found.extend(product[i, :, i] for i in range(n))
        stacked = torch.stack(found)
        return (stacked + stacked.mT) / 2

    def cross(self, x: Inputs) -> Tensor:
        """A(x, X) = J(x) H⁻¹ Jᵀ."""
        if self.dual is not None:
            rows = gram(self.function, x, self.x, form="full", memory=self.memory).double()
            whole = self.dual.weighted(torch.eye(self.n * self.c, dtype=rows.dtype, device=rows.device))
            found = rows.reshape(-1, self.n * self.c) @ whole / self.ridge
            return found.view(batch_size(x), self.c, self.n, self.c)
        columns = [self.jacobian.mm(solved) for _, solved in self._solved_rows(x, "influence")]
        return torch.cat(columns, 1).T.reshape(batch_size(x), self.c, self.n, self.c)

    @property
    def dual(self) -> SoftmaxDual | None:
        """The same problem by its kernel, from the present solution; ``None`` beyond the budget."""
        # It takes fewer operations than N·C solves, and I − ΛA keeps its digits where the ridge is small.
        size = self.n * self.c
        if self._dual is None and kernel_fits(self.function, size, self.memory):
            kernel = gram(self.function, self.x, form="full", memory=self.memory).reshape(size, size)
            self._dual = SoftmaxDual(kernel.double(), self.base, self.loss, self.ridge, self.beta)
        return self._dual

    def own_covariances(self) -> Tensor:
        """A_ii, (N, C, C), in float64; by the kernel, or N·C solves, done once."""
        if self.dual is not None:
            return self.dual.own_covariances()
        if self._own is None:
            self._own = self.covariances(self.x, "leave-one-out").double()
        return self._own

    def one_step(self) -> Tensor:
        """e, (N, C), by which one Newton step leaves each example out."""
        if self.dual is not None:
            return self.dual.one_step()
        own, roots = self.own_covariances(), self.loss.roots(self.outputs)
        eye = torch.eye(roots.shape[2], dtype=own.dtype, device=own.device)
        rest = eye - roots.mT @ own @ roots
        error = self.settings.tolerance + 16 * torch.finfo(self.function.dtype).eps
        require_digits(rest, error, self.ridge)
        return one_newton_step(own, rest, roots, self.gradient)

    def loo_outputs(self) -> Tensor:
        """f_i + A_ii e_i, one Newton step from the optimum, (N, C)."""
        if self.dual is not None:
            return self.dual.loo_outputs()
        return self.outputs + (self.own_covariances() @ self.one_step()[:, :, None])[:, :, 0]

    # -- changes ---------------------------------------------------------------------------------

    def removed(self, index: Tensor) -> SoftmaxPrimal:
        """The solution without some examples, from the present one."""
        # index (k,)
        keep = torch.ones(self.n, dtype=torch.bool, device=self.base.device)
        keep[index] = False
        rest = take(self.x, keep.nonzero()[:, 0])
        return self._changed(rest, self.base[keep], self.loss.taken(keep))

    def extended(self, x: Inputs, base: Tensor, loss: ClassLoss) -> SoftmaxPrimal:
        """The solution with more examples, from the present one."""
        # base (m, C)
        joined = torch.cat([self.base, base.double()])
        return self._changed(concatenate([self.x, x]), joined, self.loss.joined(loss))

    def _changed(self, x: Inputs, base: Tensor, loss: ClassLoss) -> SoftmaxPrimal:
        """The solution on other examples, from the present one."""
        start = self.delta, self._given
        found = SoftmaxPrimal(self.function, x, base, loss, self.ridge, replace(self.settings), start)
        found.memory = self.memory
        return found
