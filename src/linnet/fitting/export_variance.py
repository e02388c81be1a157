"""The variance of exported outputs in all weights, or along the directions of a sketch.

With A = (JᵀΛJ + ρI)⁻¹ over the training examples, J̃ = SᵀJ for Λ = S Sᵀ, and the rows j of a new example,

    Var f_c(x) = σ² j A jᵀ = σ² ‖Rᵀ j‖²,  A = R Rᵀ                          where the weights are fewer,
               = σ²/ρ (‖j‖² − ‖Vᵀ j‖²),  V = J̃ᵀ L⁻ᵀ,  J̃J̃ᵀ + ρI = L Lᵀ      where the training outputs are,

both exact. A module holds R or V, the weights times the fewer of the two; along D directions R is D × D.
Equations on outputs, with B the rows of their combinations, W = ABᵀ and T = BW + τ/ρ I, take σ² j W T⁻¹ Wᵀ jᵀ
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linnet.curvatures.leading import restored_basis
from linnet.fitting.arguments import BATCH
from linnet.fitting.sketch import MetricNetwork, SketchedNetwork
from linnet.linalg.factorize import cholesky
from linnet.linear.constraints import Constraints
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import jacobian


@dataclass(frozen=True, eq=False)
class Posterior:
    """What variances are made of, beside the network."""

    x: Inputs  # training inputs, N examples
    ridge: float  # ρ
    noise: float  # σ²
    roots: Tensor | None = None  # S with Λ = S Sᵀ, (N, C, C); ``None`` for the identity
    memory: str | int | None = None  # budget
    held: Constraints | None = None  # equations that the outputs obey


class RowsOutputs(nn.Module):
    """f₀ + Jδ and its variance, from f₀ and the rows of J."""

    # delta (P,), factor (P, P)

    delta: Tensor  # δ, (P,), in the order of the rows
    factor: Tensor  # σR (P, P), or σ/√ρ V (P, N·C), and σ W T^(−½) (P, q) beside it

    def __init__(self, delta: Tensor, factor: Tensor, prior: float, along: Along | None = None) -> None:
        super().__init__()
        self.register_buffer("delta", delta)
        self.register_buffer("factor", factor)
        self.prior, self.along = prior, along

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and their variances, (N, C)."""
        # value (N, C), rows (N, C, *shape)
        if self.along is None:
            j = torch.cat([row.reshape(value.numel(), -1) for row in rows], 1)
        else:
            j = self.along(value, rows)
        # by a column: onnxruntime multiplies a transposed matrix by a vector wrongly
        mean = value + (j @ self.delta[:, None]).reshape(value.shape)
        j = j.to(self.factor.dtype)
        held = (j @ self.factor).square().sum(1)
        variance = self.prior * j.square().sum(1) - held if self.prior else held
        return mean, variance.clamp_min(0).to(mean.dtype).reshape(value.shape)


class AlongDirections(nn.Module):
    """J H from the rows of J, layer by layer."""

    def __init__(self, small: SketchedNetwork, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.kinds = list(names), [(type(basis).__name__, basis.layer) for basis in small.bases]
        for i, basis in enumerate(small.bases):
            for name, tensor in basis.tensors.items():
                self.register_buffer(f"basis_{i}_{name}", tensor)
        self.register_buffer(
            "scales", torch.ones_like(small.epsilon) if small.scales is None else small.scales
        )

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """J H, (N·C, D)."""
        # value (N, C), rows (N, C, *shape)
        columns = {name: row.flatten(0, 1).movedim(0, -1) for name, row in zip(self.names, rows, strict=True)}
        parts = []
        for i, (kind, layer) in enumerate(self.kinds):
            prefix = f"basis_{i}_"
            own = {
                name.removeprefix(prefix): t for name, t in self.named_buffers() if name.startswith(prefix)
            }
            parts.append(restored_basis(kind, layer, own).projected([columns[name] for name in layer.names]))
        along: Tensor = torch.cat(parts).T * self.get_buffer("scales")
        return along.to(value.dtype)


class AlongMetric(nn.Module):
    """J H from the rows of J, H the root of a metric."""

    def __init__(self, network: MetricNetwork) -> None:
        super().__init__()
        self.turned = network.turned

    def forward(self, value: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """J H, (N·C, P)."""
        # value (N, C), rows (N, C, *shape)
        turned: Tensor = self.turned(torch.cat([row.reshape(value.numel(), -1) for row in rows], 1))
        return turned


Along = AlongDirections | AlongMetric


def rows_outputs(
    function: Functional,
    delta: Tensor,
    posterior: Posterior,
    kind: torch.dtype,
    along: Along | None = None,
) -> RowsOutputs:
    """The outputs of a fit and their variance, from the rows of J."""
    # delta (P,)
    n, p = batch_size(posterior.x), function.space.dim
    c = function.check_runs(take(posterior.x, slice(0, 1))).numel()
    what = f"variance of {c} outputs: a factor of {p} weights × {min(p, n * c)}"
    remedies = [
        'fit with solver="sketch", whose factor has the size of the sketch alone',
        'fit with linnet.linearize(model, params="last-layer")',
        "export without variance=, and keep the fit in linnet for it",
    ]
    budget = parse_bytes(posterior.memory, function.device)
    require(Plan(what, budget, held_by_factor(p, n * c, c)), remedies)
    few = p <= n * c
    matrix = torch.zeros(p, p, dtype=torch.float64, device=function.device) if few else None
    kept, start = [], 0
    for part in split(posterior.x, BATCH):
        rows = jacobian(function, part, posterior.memory).double()  # (n, C, P)
        if posterior.roots is not None:
            rows = posterior.roots[start : start + len(rows)].to(rows).mT @ rows
        start += len(rows)
        rows = rows.flatten(0, 1)
        if matrix is None:
            kept.append(rows)
        else:
            matrix += rows.T @ rows
    found = in_examples(torch.cat(kept), posterior) if matrix is None else in_weights(matrix, posterior)
    factor, prior = found if posterior.held is None else _given(function, posterior.held, found, posterior)
    return RowsOutputs(delta.to(function.dtype), factor.to(kind), prior, along)


def held_by_factor(p: int, count: int, each: int) -> tuple[tuple[str, int], ...]:
    """Bytes that a factor of the posterior takes while it is made."""
    rank = min(p, count)
    return ("factor and its copy", 16 * p * rank), ("matrices", 24 * rank**2), ("rows", 16 * p * BATCH * each)


def in_weights(matrix: Tensor, posterior: Posterior) -> tuple[Tensor, float]:
    """The posterior where the weights are fewer than the training outputs, (P, P)."""
    # matrix (P, P)
    return root_of_inverse(matrix, posterior.ridge) * posterior.noise**0.5, 0.0


def in_examples(rows: Tensor, posterior: Posterior) -> tuple[Tensor, float]:
    """The posterior where the training outputs are fewer than the weights, (P, N·C)."""
    # rows (N·C, P)
    prior = posterior.noise / posterior.ridge
    return rows.T @ root_of_inverse(rows @ rows.T, posterior.ridge) * prior**0.5, prior


def _given(
    function: Functional, held: Constraints, found: tuple[Tensor, float], posterior: Posterior
) -> tuple[Tensor, float]:
    """The posterior given equations on outputs, from that without them."""
    factor, prior = found
    b = held.equations.jacobian(function, posterior.memory).double()  # Bᵀ
    reach = factor.T @ b
    total = (prior * b.T @ b if prior else 0) + (-1 if prior else 1) * reach.T @ reach
    # σ² T, L its root
    slack = torch.diag(held.slack) * (posterior.noise / posterior.ridge)
    root = root_of_inverse(total + slack, 0.0)
    if prior:
        return torch.cat([factor, (prior * b - factor @ reach) @ root], 1), prior
    # R Q, Q² = I − Z Zᵀ, with the singular values s of Z in [0, 1]
    u, s, _ = torch.linalg.svd(reach @ root, full_matrices=False)
    less = 1 - (1 - s.square()).clamp_min(0).sqrt()
    return factor - (factor @ u) * less @ u.T, 0.0


def root_of_inverse(matrix: Tensor, ridge: float) -> Tensor:
    """L⁻ᵀ with L Lᵀ a matrix and its ridge, (P, P)."""
    # matrix (P, P)
    damped = matrix.clone()
    damped.diagonal().add_(ridge)
    factor = cholesky(damped, "features + ridge")
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return inverse.T
