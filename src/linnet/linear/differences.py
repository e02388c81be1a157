"""Fisher products by finite differences for many vectors at once.

``FiniteDifferenceFisher`` takes two gradients at weights of its own for every vector. Here those of several
vectors run together, vectorized over the weights; as many at a time as the memory lets, one after the other
where a network cannot be vectorized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.products import (
    PROBED,
    FiniteDifferenceFisher,
    SummedOperator,
    held_fixed,
    require_finite,
)
from linnet.curvatures.stream import Batch, Batches
from linnet.likelihoods.likelihood import Likelihood
from linnet.memory import parse_bytes
from linnet.tangent.batch import take
from linnet.tangent.capture import capture_bytes
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode

SHARE = 0.25  # of the budget that the weights and activations of one chunk of vectors may take
COPIES = 6  # of the weights of a vector: direction, two moved, two gradients, difference


class BatchedDifferences(SummedOperator):
    """The matrix of ``FiniteDifferenceFisher``, with the same steps ε, for several vectors at once."""

    description = FiniteDifferenceFisher.description

    def __init__(self, function: Functional, data: Batches, likelihood: Likelihood) -> None:
        super().__init__(function, data)
        self.likelihood = likelihood
        self.memory: str | int | None = None
        self._single = FiniteDifferenceFisher(function, data, likelihood)
        self._vectorized = True

    def product(self, batch: Batch, v: Tensor) -> Tensor:
        """The differences of a batch, some vectors at a time."""
        size = self._chunk(batch)
        if v.shape[1] == 1 or size < 2 or not self._vectorized or self.function.recurrent:
            return self._single.product(batch, v)
        try:
            return torch.cat([self._together(batch, part) for part in v.split(size, 1)], 1)
        except (RuntimeError, NotImplementedError):  # an operation without a rule for vmap
            self._vectorized = False
            return self._single.product(batch, v)

    def _chunk(self, batch: Batch) -> int:
        """The number of vectors that run together."""
        item = self.function.dtype.itemsize
        one = (
            COPIES * self.function.space.dim * item
            + 2 * capture_bytes(self.function, batch.x, 1) * batch.size
        )
        return int(SHARE * parse_bytes(self.memory, self.function.device)) // max(1, one)

    @in_exact_mode
    def _together(self, batch: Batch, v: Tensor) -> Tensor:
        """F v over a batch for columns v (P, K)."""
        function, likelihood = self.function, self.likelihood
        theta = function.space.to_flat(function.theta)
        held = torch.stack([held_fixed(function, column) for column in v.unbind(1)])
        lengths = torch.linalg.vector_norm(held, dim=1, keepdim=True)
        directions = held / torch.where(lengths > 0, lengths, 1.0)  # (K, P); zeros stay zeros
        with torch.no_grad():
            f = function(function.theta, batch.x)
        require_finite(f, batch.index)
        y = None if batch.y is None else likelihood.check(f, batch.y)

        def divergence(step: Tensor) -> Tensor:
            g = function(function.space.to_params(theta + step), batch.x)
            # in float64, since the gradient is a small difference of probabilities
            return likelihood.kl(f.double(), g.double(), y).sum()

        epsilon = self._step_sizes(batch, f, theta, directions)[:, None]
        gradients = torch.func.vmap(torch.func.grad(divergence))
        change = gradients(epsilon * directions) - gradients(-epsilon * directions)
        scaled: Tensor = change * (lengths / (2 * epsilon))
        return scaled.T

    @torch.no_grad()
    def _step_sizes(self, batch: Batch, f: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
        """ε of each direction, (K,), by the rule of ``_step_size``."""
        few = slice(0, min(PROBED, batch.size))
        x = take(batch.x, few)
        norm = float(torch.linalg.vector_norm(theta.double())) or 1.0
        first = self._single.step * norm
        run = torch.func.vmap(lambda step: self.function(self.function.space.to_params(theta + step), x))
        moved = (run(first * directions).double() - f[few].double()).flatten(1)
        motion = moved.square().mean(1).sqrt()
        size = float(f[few].double().square().mean().sqrt()) or 1.0
        longest = norm * torch.finfo(f.dtype).eps ** (1 / 3)  # for directions that hardly move the outputs
        found = first * self._single.step * size / motion.clamp_min(torch.finfo(torch.float64).tiny)
        return found.clamp_max(longest).to(directions)
