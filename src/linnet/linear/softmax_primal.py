"""The cross-entropy optimum of a linearized network in the weights: Newton's method with conjugate gradients.

    (JᵀΛJ + ρI) d = −(Jᵀg + ρδ)

JᵀΛJ is the Gauss-Newton matrix and, the network being linear in δ, the Hessian itself. Its product takes
one JVP and one VJP of a batch. Each system is solved only as far as the gradient has fallen (Dembo,
Eisenstat and Steihaug 1982), and a line search needs no pass over the data: f is linear along d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from linnet.curvatures.engine import Request, by_structure
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.stream import Batches
from linnet.errors import NumericalError
from linnet.linalg.operator import LinearOperator
from linnet.linear.kernel_system import kernel_fits
from linnet.linear.newton import FORCING, STEPS, Direction, NewtonMethod
from linnet.linear.preconditioner import FEW, RANK, TRIAL, Cast
from linnet.linear.primal import (
    STAGNATED,
    CGSettings,
    accepted,
    solve_columns,
)
from linnet.linear.softmax_dual import STALLED, SoftmaxDual, one_newton_step
from linnet.linear.softmax_loss import ClassLoss
from linnet.linear.system import require_digits
from linnet.progress import track
from linnet.solvers.nystrom import nystrom_preconditioner
from linnet.tangent.batch import Inputs, batch_size, concatenate, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
from linnet.tangent.jacobian import JacobianOperator, jvp_columns, vjp_columns


class SoftmaxHessian(LinearOperator):
    """JᵀΛJ over a data set, P × P: one JVP and one VJP of each batch.

    Args:
        jacobian: J.
        loss: The labels.
        outputs: f, where Λ is taken, (N, C).
    """

    def __init__(self, jacobian: JacobianOperator, loss: ClassLoss, outputs: Tensor) -> None:
        self.jacobian, self.loss, self.outputs = jacobian, loss, outputs.to(jacobian.dtype)
        self.shape = (jacobian.shape[1], jacobian.shape[1])
        self.dtype, self.device, self.space = jacobian.dtype, jacobian.device, jacobian.space

    def mm(self, v: Tensor) -> Tensor:
        """JᵀΛJ v: (P, K) to (P, K)."""
        total, start, function = torch.zeros_like(v), 0, self.jacobian.function
        for part in split(self.jacobian.x, self.jacobian.block):
            f = self.outputs[start : start + batch_size(part)]
            change = jvp_columns(function, part, v).movedim(2, 0)  # (K, n, C)
            total += vjp_columns(function, part, self.loss.likelihood.product(f, change).movedim(0, 2))
            start += len(f)
        return total

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


class SoftmaxPrimal(NewtonMethod):
    """The optimal δ found by Newton's method with conjugate gradients, and solves with its Hessian.

    Args:
        function: The network.
        x: N training examples.
        base: f₀, (N, C).
        loss: The labels.
        ridge: ρ > 0.
        settings: How to iterate; the tolerance is that of the gradient, the steps those of all systems.
        start: δ to start from, and an approximation of (JᵀΛJ + ρI)⁻¹ as preconditioner; each may be ``None``.

    Attributes:
        delta: δ, (P,).
        beta: β = (y − p)/ρ, (N, C).
        outputs: f on the training examples, (N, C).
        steps: Newton steps taken.
        products: Conjugate gradient steps taken in all.
        objective: Its value after each step.
    """

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
        self._preconditioner, self._given = start[1], start[1]
        self._own: Tensor | None = None
        self._dual: SoftmaxDual | None = None
        self.memory: str | int | None = None
        self.jacobian = JacobianOperator(function, x, self.c)
        self._scale = float(self._pull(loss.gradient(self.base)).double().norm())
        self.delta = torch.zeros(function.space.dim, dtype=function.dtype, device=function.device)
        if start[0] is not None:
            self.delta = start[0].clone()
        self.outputs = self._evaluate()
        self.steps = self.products = 0
        penalty = 0.5 * self.ridge * float(self.delta.double().square().sum())
        self.objective = [self._total_loss(self.outputs) + penalty]
        self._pulled = self.delta
        self._relative = self._solve()
        self.beta = -self.gradient / self.ridge

    @property
    def tolerance(self) -> float:
        """The gradient, relative to that at δ = 0, that the solution may leave."""
        return self.settings.tolerance

    # -- Newton's method -------------------------------------------------------------------------

    def _pull(self, u: Tensor) -> Tensor:
        """Jᵀu for u (N, C)."""
        return self.jacobian.T.mv(u.to(self.function.dtype).reshape(-1))

    def _push(self, v: Tensor) -> Tensor:
        """J v, (N, C), in float64."""
        return self.jacobian.mv(v).double().view(self.n, self.c)

    def _evaluate(self) -> Tensor:
        """Outputs f = f₀ + Jδ."""
        return self.base + self._push(self.delta) if bool(self.delta.any()) else self.base.clone()

    def _total_loss(self, outputs: Tensor) -> float:
        """Σ ℓ_i at outputs."""
        return float(self.loss.losses(outputs).sum())

    @property
    def gradient(self) -> Tensor:
        """Gradient of the losses in the outputs, g = p − y, (N, C)."""
        return self.loss.gradient(self.outputs)

    @property
    def hessian(self) -> LinearOperator:
        """JᵀΛJ + ρI at the present outputs."""
        return SoftmaxHessian(self.jacobian, self.loss, self.outputs).damped(self.ridge)

    def certificate(self) -> float:
        """‖∇‖ at the solution over ‖∇‖ at δ = 0."""
        return self._relative

    def _spent(self) -> bool:
        """Whether no further step may be taken."""
        return self.steps >= STEPS or self.products >= self.settings.max_steps

    def _reached(self) -> float:
        """The norm of the gradient, which is kept for the direction, over that at δ = 0."""
        self._pulled = self._pull(self.gradient) + self.ridge * self.delta
        return float(self._pulled.double().norm()) / self._scale

    def _towards(self, reached: float) -> Direction:
        """Newton's direction by conjugate gradients."""
        d = self._direction(self._pulled, reached)
        wide, along = self.delta.double(), d.double()
        squares = float(wide.square().sum()), float(wide @ along), float(along.square().sum())
        slope = float(self._pulled.double() @ along)
        rounding = 16 * torch.finfo(self.function.dtype).eps * abs(self.objective[-1])
        return Direction(d, self._push(d), slope, squares, rounding)

    def _move(self, t: float, direction: Direction, value: float) -> None:
        """Go t of the direction."""
        self.delta = self.delta + t * direction.step
        self.outputs = self.outputs + t * direction.change
        self.objective.append(value)

    def _solve(self) -> float:
        """Newton steps until the gradient is below the tolerance; its relative norm."""
        if self._scale == 0:
            return 0.0
        reached, stalled = self.descend(self.settings.tolerance)
        enough = STALLED if self.function.dtype == torch.float64 else STAGNATED
        if stalled and reached > enough:
            raise NumericalError(
                f"Newton's method for the cross-entropy stopped after {self.steps} steps and "
                f"{self.products} of conjugate gradients with a gradient of {reached:.1e} of the one at "
                "the start",
                expected=f"at most {self.settings.tolerance:g}",
                remedy=f'take solver="dual", a ridge larger than {self.ridge:g}, or raise max_steps=',
            )
        return reached

    def _direction(self, gradient: Tensor, reached: float) -> Tensor:
        """The Newton direction, as precise as the gradient deserves; the preconditioner is made at need."""
        settings, hessian = self.settings, self.hessian
        tolerance = max(min(FORCING, reached**0.5), 0.3 * settings.tolerance / reached)
        left = max(1, settings.max_steps - self.products)
        open_choice = settings.preconditioner == "auto" and self._preconditioner is None
        if settings.preconditioner not in ("none", "auto", "given") and self._preconditioner is None:
            self._make(settings.preconditioner)
        trial = min(left, TRIAL) if open_choice and min(self.jacobian.shape) > FEW else left
        found = solve_columns(hessian, -gradient, self._preconditioner, None, tolerance, trial)
        self.products += found.steps
        if found.residual > tolerance and trial < left:
            self._make("nystrom")
            rest = max(1, left - trial)
            found = solve_columns(hessian, -gradient, self._preconditioner, found.value, tolerance, rest)
            self.products += found.steps
        elif found.steps > RANK and self._given is None and settings.preconditioner in ("auto", "nystrom"):
            self._preconditioner = None  # Λ has moved away from where it was made
        return found.value

    def _make(self, name: str) -> None:
        """The preconditioner of a name, at the present Λ (Nyström) or at that of the network (curvatures)."""
        if name == "nystrom":
            matrix = SoftmaxHessian(self.jacobian, self.loss, self.outputs)
            rank = self.settings.rank or min(RANK, *self.jacobian.shape)
            generator = torch.Generator(device=self.function.device).manual_seed(0)
            self._preconditioner = nystrom_preconditioner(matrix, self.ridge, rank, generator)
            return
        own = self.function.check_runs(take(self.x, slice(0, 1))).shape[1:]
        batches = Batches((self.x, self.loss.y.to(self.function.dtype).view(-1, *own)), self.function.device)
        request = Request(Expectation(self.loss.likelihood))
        (curvature,) = by_structure(self.function, batches, request, [(name, name)])
        # τ = ρ + tr G̃ / P
        tau = self.ridge + float(curvature.trace()) / self.function.space.dim
        self._preconditioner = Cast(curvature.damped(tau).inverse(), self.function.dtype)

    # -- the Hessian at the optimum --------------------------------------------------------------

    def solve(self, b: Tensor) -> Tensor:
        """(JᵀΛJ + ρI)⁻¹ b for columns (P, K).

        Args:
            b: Right-hand sides.

        Returns:
            (P, K).

        Raises:
            NumericalError: Conjugate gradients do not converge.
        """
        solution = self.settings.run(self.hessian, b, self._preconditioner, None)
        return accepted(solution, "a solve by conjugate gradients")

    def _solved_rows(self, x: Inputs, what: str) -> Iterator[tuple[Inputs, Tensor]]:
        """H⁻¹ J(x)ᵀ block by block: the block and (P, n·C)."""
        for part in track(list(split(x, max(1, self.settings.columns // self.c))), what):
            n = batch_size(part)
            unit = torch.eye(n * self.c, dtype=self.function.dtype, device=self.function.device)
            yield part, self.solve(vjp_columns(self.function, part, unit.view(n, self.c, n * self.c)))

    def covariances(self, x: Inputs, what: str = "predictive covariance") -> Tensor:
        """A(x, x) = J(x) H⁻¹ J(x)ᵀ of each example.

        Args:
            x: T examples.
            what: The name of this in the progress.

        Returns:
            (T, C, C).
        """
        found: list[Tensor] = []
        for part, solved in self._solved_rows(x, what):
            n = batch_size(part)
            product = jvp_columns(self.function, part, solved).view(n, self.c, n, self.c)
            found.extend(product[i, :, i] for i in range(n))
        stacked = torch.stack(found)
        return (stacked + stacked.mT) / 2

    def cross(self, x: Inputs) -> Tensor:
        """A(x, X) = J(x) H⁻¹ Jᵀ.

        Args:
            x: T examples.

        Returns:
            (T, C, N, C).
        """
        if self.dual is not None:
            rows = gram(self.function, x, self.x, form="full", memory=self.memory).double()
            whole = self.dual.weighted(torch.eye(self.n * self.c, dtype=rows.dtype, device=rows.device))
            found = rows.reshape(-1, self.n * self.c) @ whole / self.ridge
            return found.view(batch_size(x), self.c, self.n, self.c)
        columns = [self.jacobian.mm(solved) for _, solved in self._solved_rows(x, "influence")]
        return torch.cat(columns, 1).T.reshape(batch_size(x), self.c, self.n, self.c)

    @property
    def dual(self) -> SoftmaxDual | None:
        """The same problem by its kernel, from the present solution; ``None`` where that exceeds the budget.

        It takes fewer operations than N·C solves, and I − ΛA keeps its digits where the ridge is small.
        """
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
        """The solution without some examples, from the present one.

        Args:
            index: Examples to remove, (k,), distinct.

        Returns:
            The solution on the remaining examples.
        """
        keep = torch.ones(self.n, dtype=torch.bool, device=self.base.device)
        keep[index] = False
        rest = take(self.x, keep.nonzero()[:, 0])
        return self._changed(rest, self.base[keep], self.loss.taken(keep))

    def extended(self, x: Inputs, base: Tensor, loss: ClassLoss) -> SoftmaxPrimal:
        """The solution with more examples, from the present one.

        Args:
            x: The new examples.
            base: Their f₀, (m, C).
            loss: Their labels.

        Returns:
            The solution on all examples, old ones first.
        """
        joined = torch.cat([self.base, base.double()])
        return self._changed(concatenate([self.x, x]), joined, self.loss.joined(loss))

    def _changed(self, x: Inputs, base: Tensor, loss: ClassLoss) -> SoftmaxPrimal:
        """The solution on other examples, from the present one."""
        start = self.delta, self._given
        found = SoftmaxPrimal(self.function, x, base, loss, self.ridge, replace(self.settings), start)
        found.memory = self.memory
        return found
