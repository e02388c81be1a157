"""The Hessian of a negative log-likelihood in the parameters, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linnet.curvatures.ggn import SummedOperator
from linnet.curvatures.products import require_finite
from linnet.curvatures.stream import Batch, Batches
from linnet.errors import DataError, ModelError
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.random import normal
from linnet.tangent.batch import take
from linnet.tangent.functional import Functional
from linnet.tangent.modes import differentiable_kernels, in_exact_mode

PROBED = "second derivative"  # in the cache of a function: it was looked at


class HessianOperator(SummedOperator):
    """H = ∇²_θ Σ_n −log p(y_n | f(θ, x_n)): Gauss-Newton and the network's own curvature."""

    # It may be indefinite. A product differentiates the gradient along v: Pearlmutter, "Fast exact
    # multiplication by the Hessian", 1994; the gradient with its graph is shared by all vectors.

    description = "product with the Hessian"

    def __init__(
        self,
        function: Functional,
        data: Batches,
        likelihood: Likelihood,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(function, data, on_pass)
        self.likelihood = likelihood

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """∇(gᵀ v) over a batch, g = ∇ Σ −log p."""
        if batch.y is None:
            raise DataError(
                f"data has no targets, which the Hessian of {self.likelihood!r} needs",
                expected="(x, y) pairs",
                remedy="pass the targets, or take the Gauss-Newton matrix",
            )
        try:
            _probe(self.function, batch, self.likelihood)
            return _hessian_product(self.function, batch, self.likelihood, v)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"{type(self.function.model).__name__} has no usable second derivative in torch: {first}",
                expected="operations that can be differentiated twice",
                remedy="take the Gauss-Newton matrix, which needs first derivatives alone",
            ) from error


def _probe(function: Functional, batch: Batch, likelihood: Likelihood) -> None:
    """Raise where torch's second derivative is not symmetric, hence wrong; tried once, on two examples."""
    # That of `torch.nn.utils.parametrizations.weight_norm` is such a one in torch 2.13.
    if PROBED in function.cache.others:
        return
    assert batch.y is not None
    few = slice(0, min(2, batch.size))
    part = Batch(batch.index, take(batch.x, few), batch.y[few])
    generator = torch.Generator().manual_seed(0)
    v = normal((function.space.dim, 2), generator, function.dtype, function.device)
    # ⟨u, H w⟩ and ⟨w, H u⟩, term by term
    terms = v.double().flip(1) * _hessian_product(function, part, likelihood, v).double()
    difference, size = (terms[:, 0].sum() - terms[:, 1].sum()).abs(), torch.linalg.vector_norm(terms)
    if difference > (1e-6 if function.dtype == torch.float64 else 1e-2) * size:
        raise RuntimeError("the second derivative of one of its operations is wrong: it is not symmetric")
    function.cache.others[PROBED] = True


@in_exact_mode
def _hessian_product(function: Functional, batch: Batch, likelihood: Likelihood, v: Tensor) -> Tensor:
    """One gradient with its graph, then one backward pass through it for each vector."""
    leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
    inputs = list(leaves.values())
    with torch.enable_grad(), differentiable_kernels(function.recurrent):
        f = function(leaves, batch.x)
        require_finite(f, batch.index)
        assert batch.y is not None
        loss = likelihood.nll(f, batch.y).sum()
        if not loss.requires_grad:  # the outputs depend on no parameter
            return torch.zeros_like(v)
        found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        used = [(g, name) for g, name in zip(found, leaves, strict=True) if g is not None and g.requires_grad]
        if not used:  # linear in every parameter
            return torch.zeros_like(v)
        if PROBED not in function.cache.others:
            _require_second(used)
        return torch.stack([_along(function, inputs, used, v[:, k]) for k in range(v.shape[1])], 1)


def _along(
    function: Functional, inputs: Sequence[Tensor], gradient: list[tuple[Tensor, str]], v: Tensor
) -> Tensor:
    """∇(gᵀ v) for one vector, flat."""
    named = function.space.to_params(v)
    second = torch.autograd.grad(
        [g for g, _ in gradient],
        inputs,
        [named[name] for _, name in gradient],
        retain_graph=True,
        allow_unused=True,
    )
    pairs = zip(second, inputs, strict=True)
    return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in pairs])


def _require_second(gradient: list[tuple[Tensor, str]]) -> None:
    """Raise if an operation of the gradient refuses to be differentiated: torch leaves it out silently."""
    waiting = [g.grad_fn for g, _ in gradient]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("an operation is marked as differentiable once (once_differentiable)")
        waiting.extend(following for following, _ in node.next_functions)
