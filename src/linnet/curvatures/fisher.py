"""Fisher matrices as operators: exact, sampled, empirical, and by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.curvatures.ggn import ColumnOperator, SummedOperator
from linnet.curvatures.products import require_finite
from linnet.curvatures.stream import Batch, Batches
from linnet.errors import InputError, ModelError
from linnet.likelihoods.likelihood import Likelihood
from linnet.tangent.batch import Inputs, take
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels, in_exact_mode

PROBED = 8  # examples from which the length of a difference is found


class FisherOperator(ColumnOperator):
    """The Fisher matrix F = Σ_n E[s sᵀ] of the scores s = Jᵀ ∇_f log p(y | f), summed over examples."""

    # "exact" takes the expectation over the model's own labels in closed form, "mc" over labels drawn from
    # it, once for all products, and "empirical" takes the observed labels instead. The empirical Fisher is
    # another matrix: Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural
    # gradient descent", 2019.

    description = "product with the Fisher matrix"
    matrix = "fisher"
    taken = ("exact", "mc", "empirical")
    elsewhere = "for random projections of Λ take GaussNewtonOperator"

    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        if self.likelihood.canonical:  # the Fisher information of the outputs is Λ
            return self.likelihood.product(f, t, y)
        s = self.likelihood.fisher_root(f, y).flatten(2)
        # Σ_j s_j (s_jᵀ t)
        return torch.einsum("jnc,jnk->knc", s, torch.einsum("jnc,knc->jnk", s, t.flatten(2))).reshape(t.shape)


class FiniteDifferenceFisher(SummedOperator):
    """The Fisher matrix by the directional derivative of the gradient of KL(p_θ ‖ p_θ'), by differences."""

    # Maddox, Tang, Moreno, Wilson, Damianou, "Fast adaptation with linearized neural networks", 2021, section
    # 3.2 and appendix C.2. The divergence has its minimum, zero, at θ' = θ, and its Hessian there is F, so
    # that
    #
    #     F v ≈ [∇_θ' KL(p_θ ‖ p_{θ+εu}) − ∇_θ' KL(p_θ ‖ p_{θ−εu})] ‖v‖ / (2 ε),   u = v / ‖v‖.
    #
    # It needs first derivatives alone: two gradients a product. Its relative error is about 1e-8 in float64
    # and 3e-4 in float32, or 2e-3 for a network with kinks. `FisherOperator` is exact.

    description = "product with the Fisher matrix by finite differences"

    def __init__(
        self,
        function: Functional,
        data: Batches,
        likelihood: Likelihood,
        step: float | None = None,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        if step is not None and not step > 0:
            raise InputError(f"step={step!r}", expected="a positive number", remedy="leave step= out")
        super().__init__(function, data, on_pass)
        tied = [name for name, (_, shared) in function.padding.items() if shared]
        if tied:
            raise ModelError(
                f"{tied[0]} has a padding row and is the table of another layer too",
                expected="padding rows used for nothing else: a difference cannot hold half of a use",
                remedy="take FisherOperator, which differentiates",
            )
        self.likelihood = likelihood
        self.step: float = torch.finfo(function.dtype).eps ** 0.5 / 3 if step is None else step

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """The difference of two gradients over a batch, one vector after the other."""
        with torch.no_grad():
            f = _outputs(self.function, self.function.theta, batch.x)
        require_finite(f, batch.index)
        # Λ may need labels, this matrix does not: they only say which positions count
        y = None if batch.y is None else self.likelihood.check(f, batch.y)
        return torch.stack([self._column(batch, f, y, v[:, k]) for k in range(v.shape[1])], 1)

    def _column(self, batch: Batch, f: Tensor, y: Tensor | None, v: Tensor) -> Tensor:
        """F v over a batch for one vector."""
        v = held_fixed(self.function, v)
        length = torch.linalg.vector_norm(v)
        if not length > 0:
            return torch.zeros_like(v)
        direction = v / length
        epsilon = self._step_size(batch, f, direction)
        change = self._gradient(batch, f, y, epsilon * direction)
        change = change - self._gradient(batch, f, y, -epsilon * direction)
        scaled: Tensor = change * (length / (2 * epsilon))
        return scaled

    @torch.no_grad()
    def _step_size(self, batch: Batch, f: Tensor, direction: Tensor) -> float:
        """ε that moves the outputs by the fraction ``step`` of their size, from a few examples."""
        # Rounding costs u/κ of the product, where κ is how far the outputs move for their size, and the
        # third derivative κ². They would balance at κ = ∛u, but a network with kinks (ReLU, max-pooling)
        # also loses those of its units whose kink lies within the step: a share of about κ, whose parts
        # add up at random, so √κ over the root of the number of examples. √u / 3 serves both, for directions
        # that hardly move the outputs and for the stiffest, which a step in units of ‖θ‖ alone does not.
        theta = self.function.theta
        norm = float(torch.stack([t.double().square().sum() for t in theta.values()]).sum().sqrt()) or 1.0
        first = self.step * norm
        moved = self.function.space.to_params(first * direction)
        few = slice(0, min(PROBED, batch.size))
        g = _outputs(self.function, {name: t + moved[name] for name, t in theta.items()}, take(batch.x, few))
        motion = _root_mean_square(g.double() - f[few].double())
        size = _root_mean_square(f[few]) or 1.0
        longest: float = norm * torch.finfo(f.dtype).eps ** (
            1 / 3
        )  # for directions that hardly move the outputs
        return min(longest, first * self.step * size / motion) if motion > 0 else longest

    def _gradient(self, batch: Batch, f: Tensor, y: Tensor | None, step: Tensor) -> Tensor:
        """∇_θ' Σ_n KL(p_θ ‖ p_θ') at θ' = θ + step, flat."""
        moved = self.function.space.to_params(step)
        leaves = {name: (t + moved[name]).requires_grad_() for name, t in self.function.theta.items()}
        with torch.enable_grad():
            g = _outputs(self.function, leaves, batch.x)
            # in float64, since the gradient is a small difference of probabilities
            divergence = self.likelihood.kl(f.double(), g.double(), y).sum()
        if not divergence.requires_grad:  # the outputs depend on no parameter
            return torch.zeros_like(step)
        grads = torch.autograd.grad(divergence, list(leaves.values()), allow_unused=True)
        pairs = zip(grads, leaves.values(), strict=True)
        return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in pairs])


@in_exact_mode
def _outputs(function: Functional, params: Params, x: Inputs) -> Tensor:
    """f(θ, x) in the network's own shape."""
    with differentiable_kernels(function.recurrent):
        value = function(params, x)
    return value


def held_fixed(function: Functional, v: Tensor) -> Tensor:
    """The vector without its part in padding rows of embeddings, which have no gradient."""
    if not function.padding:
        return v
    held = v.clone()
    for name, (row, _) in function.padding.items():
        held[function.space.slices[name]].view(function.space.shapes[name])[row] = 0
    return held


def _root_mean_square(t: Tensor) -> float:
    """√ of the mean of squares."""
    return float(t.double().square().mean().sqrt())
