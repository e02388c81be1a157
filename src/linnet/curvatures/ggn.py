"""The Gauss-Newton matrix as an operator, and the base class of sums over a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from linnet.curvatures.expectation import Expectation
from linnet.curvatures.products import factored, require_finite, weighted
from linnet.curvatures.stream import Batch, Batches
from linnet.distributed import all_sum, together
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.operator import LinearOperator, require_fit
from linnet.params import choice
from linnet.progress import track
from linnet.tangent.functional import Functional


class SummedOperator(LinearOperator, ABC):
    """A symmetric P x P matrix that is a sum over the examples of a data set."""

    # A product, with however many vectors, is one pass over the data; under `torch.distributed` each process
    # passes over its share, and the product is the same on all of them.

    description: str

    def __init__(
        self, function: Functional, data: Batches, on_pass: Callable[[], None] | None = None
    ) -> None:
        self.function, self.data, self.on_pass = function, data, on_pass
        self.shape = (function.space.dim, function.space.dim)
        self.dtype, self.device, self.space = function.dtype, function.device, function.space
        self.passes = 0

    @abstractmethod
    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """A batch's part of the product, (P, K)."""
        # v (P, K)

    def mm(self, v: Tensor) -> Tensor:
        """A v: (P, K) to (P, K), in one pass over the data."""
        require_fit(self, v, 2)
        total = torch.zeros_like(v, memory_format=torch.contiguous_format)
        if v.shape[1] == 0:
            return total
        shared = self.data.share.world > 1
        shown = None if self.data.share.rank == 0 else False
        with together(self.description, shared):
            for batch in track(self.data, self.description, total=self.data.length(), enabled=shown):
                total += self.product(batch, v)
            if shared:
                all_sum([total])
        self.passes += 1
        if self.on_pass is not None:
            self.on_pass()
        return total

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


class ColumnOperator(SummedOperator):
    """Σ_n J_nᵀ Λ_n J_n with Λ, or random columns that stand for it, from the likelihood."""

    matrix: ClassVar[str]  # "gauss-newton" or "fisher"
    taken: ClassVar[tuple[str, ...]]
    elsewhere: ClassVar[str]  # the operator for other expectations, in words

    def __init__(
        self,
        function: Functional,
        data: Batches,
        likelihood: Likelihood,
        expectation: str = "exact",
        samples: int = 1,
        seed: int = 0,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        choice("expectation", expectation, self.taken, self.elsewhere)
        super().__init__(function, data, on_pass)
        self.likelihood = likelihood
        self.expectation = Expectation(likelihood, expectation, self.matrix, samples, seed)

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """A batch's part of the product."""
        if self.expectation.kind != "exact":
            return sampled_product(self.function, batch, v, self.expectation)
        return exact_product(self.function, batch, v, self.expectation, self._weigh)

    @abstractmethod
    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        """Λ t at outputs f."""


class GaussNewtonOperator(ColumnOperator):
    """The Gauss-Newton matrix G = Σ_n J_nᵀ Λ_n J_n of a negative log-likelihood, summed over examples."""

    # Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", 2002.

    description = "product with the Gauss-Newton matrix"

    description = "product with the Gauss-Newton matrix"
    matrix = "gauss-newton"
    taken = ("exact", "random-projection")
    elsewhere = "for sampled or observed labels take FisherOperator"

    def _weigh(self, f: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        return self.likelihood.product(f, t, y)


def exact_product(
    function: Functional,
    batch: Batch,
    v: Tensor,
    expectation: Expectation,
    weigh: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Σ Jᵀ Λ J v over a batch, Λ given by what it does, (P, K)."""
    # v (P, K), weigh (N, ...)

    def checked(f: Tensor, t: Tensor, place: slice) -> Tensor:
        require_finite(f, batch.index, place.start)
        y = None if batch.y is None else batch.y[place]
        return weigh(f, t, expectation.targets(f, y))

    return weighted(function, batch.x, v, checked)


def sampled_product(function: Functional, batch: Batch, v: Tensor, expectation: Expectation) -> Tensor:
    """Σ_s (Jᵀ s)(Jᵀ s)ᵀ v over a batch, for the columns s of an expectation."""
    # v (P, K)

    def columns(f: Tensor) -> Tensor:
        require_finite(f, batch.index)
        return expectation.columns(f, expectation.targets(f, batch.y), batch.index)

    count = 1 if expectation.kind == "empirical" else expectation.samples
    return factored(function, batch.x, v, columns, count)
