"""The linear fit in the dual: everything follows from M = (K + ρI)⁻¹.

With r = t − f₀(X) the solution is δ = Jᵀβ, β = M r. Index letters: examples i, j; a pair
(example, output) is one row of K. A kernel that all outputs share is K ⊗ I, kept as its (N, N) factor: a row
is then an example, and r has a column an output. With S a set of examples and R the others

    leave-one-out residual            e_i = (M_ii)⁻¹ β_i
    solution without S                β_R − M_RS (M_SS)⁻¹ β_S
    posterior covariance at x         σ²/ρ · [K(x,x) − K(x,X) M K(X,x)]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from linnet.distributed import current
from linnet.errors import NumericalError
from linnet.linalg.factorize import cholesky, eigenvalue_error, eigh, shared_eigh
from linnet.linalg.operator import LinearOperator, unit_columns
from linnet.linalg.random import Seed, make_generator, signs
from linnet.params import choice, number
from linnet.predictive.noise import golden_section
from linnet.shown import Record, frame
from linnet.solvers.lanczos import tridiagonalize
from linnet.solvers.solution import Estimate
from linnet.tangent.batch import all_but

if TYPE_CHECKING:
    from pandas import DataFrame


# -- evidence --------------------------------------------------------------------------------------
#
# The marginal likelihood of a tangent Gaussian process as a function of its hyper-parameters.
#
# With prior precision λ, noise scale s and ρ = λ s, the targets' residuals have the density
#
#     log N(r; 0, J Jᵀ/λ + s diag σ²)
#         = −½ [ q(ρ)/s + log det(K̃/ρ + I) + n log 2πs + Σ log σ_i² ],    q(ρ) = r̃ᵀ (K̃/ρ + I)⁻¹ r̃
#
# (Rasmussen and Williams 2006, eq. 2.30). Both terms are sums over the spectrum of K̃: over its
# eigenvalues, or over quadrature nodes of the Lanczos process (Ubaru, Chen and Saad 2017), which serve
# every λ and s alike.

_CUT = 1e-12  # eigenvalues below this share of the largest carry no mass that can be told from rounding
GRID = 4  # values of ρ a factor of ten


@dataclass(frozen=True)
class Measure:
    """The spectrum of K̃, and how r̃ lies in it."""

    nodes: Tensor  # θ of each sample, (S, m); one sample holds the eigenvalues themselves
    weights: Tensor  # of the nodes in the trace, (S, m); ones for eigenvalues
    residual_nodes: Tensor  # θ, (k,)
    masses: Tensor  # share of ‖r̃‖² at these, (k,)
    outside: float  # share of ‖r̃‖² where K̃ is zero
    count: int  # n, the number of targets
    log_noise: float  # Σ log σ_i²

    @property
    def exact(self) -> bool:
        """Whether the nodes are eigenvalues."""
        return self.nodes.shape[0] == 1

    def quadratic(self, rho: float) -> float:
        """The quadratic form q(ρ)."""
        return float((self.masses * (rho / (self.residual_nodes + rho))).sum()) + self.outside

    def logdet(self, rho: float) -> Tensor:
        """Log det(K̃/ρ + I) of each sample, (S,)."""
        return (self.weights * torch.log1p(self.nodes / rho)).sum(1)

    def evidence(self, rho: float, scale: float) -> Estimate:
        """The log marginal likelihood."""
        rest = self.quadratic(rho) / scale + self.count * math.log(2 * math.pi * scale) + self.log_noise
        values = -0.5 * (self.logdet(rho) + rest)
        return Estimate(float(values[0]), 0.0) if self.exact else Estimate.of(values)

    def best_scale(self, rho: float) -> float:
        """The s of highest evidence at a ρ: q(ρ)/n."""
        return max(self.quadratic(rho) / self.count, torch.finfo(torch.float64).tiny)

    def maximize(self, scale_at: Callable[[float], float], least: float = 0.0) -> float:
        """The ρ of highest evidence, s being a function of it: by a grid, then golden sections."""
        top = float(self.nodes.max()) if self.nodes.numel() else 0.0
        if not top > 0:
            raise NumericalError(
                "the tangent kernel of the data is zero",
                expected="outputs that depend on the parameters",
                remedy="check params=, and check that the model is trained",
            )

        def loss(log_rho: float) -> float:
            rho = math.exp(log_rho)
            return -self.evidence(rho, scale_at(rho)).mean

        steps = 16 * GRID  # sixteen decades around the largest eigenvalue
        low, high = math.log(top) + math.log(1e-12), math.log(top) + math.log(1e4)
        low = max(low, math.log(least)) if least > 0 else low
        high = max(high, low)
        grid = [low + (high - low) * i / steps for i in range(steps + 1)]
        at = min(range(len(grid)), key=lambda i: loss(grid[i]))
        first, last = grid[max(at - 1, 0)], grid[min(at + 1, steps)]
        return math.exp(golden_section(loss, first, last, steps=45))


def at_best_noise(ridge: Tensor, noise: Tensor, count: int, logdet: Tensor) -> Tensor:
    """The log marginal likelihood where the noise is the best one of its ridge, s = q(ρ)/n."""
    # −½ [n (log 2πs/ρ + 1) + log det(K̃ + ρI)], in units of the noise.
    # residuals that vanish leave no noise
    level = 2 * math.pi * noise.clamp_min(1e-300) / ridge
    return -0.5 * (count * (level.log() + 1) + logdet)


def from_eigenvalues(values: Tensor, masses: Tensor, squared: float, count: int, log_noise: float) -> Measure:
    """The measure of a spectrum that is known."""
    values = values.clamp_min(0)
    outside = max(0.0, squared - float(masses.sum()))
    return Measure(values[None], torch.ones_like(values)[None], values, masses, outside, count, log_noise)


def by_primal(values: Tensor, coordinates: Tensor, squared: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues γ of J̃ᵀJ̃ and the coordinates of J̃ᵀr̃ turned into masses of r̃."""
    good = values > _CUT * values.max().clamp_min(torch.finfo(values.dtype).tiny)
    return values[good], (coordinates[good] / values[good]).clamp_max(squared)


def by_matrix(
    operator: LinearOperator, start: Tensor, primal: bool, facts: tuple[float, int, float]
) -> Measure:
    """The measure of a matrix small enough to be formed, from one product with the identity."""
    # start (n,)
    matrix = operator.dense().double()
    values, vectors = eigh((matrix + matrix.T) / 2, "tangent kernel")
    masses, values = (vectors.T @ start.double()) ** 2, values.clamp_min(0)
    if primal:
        values, masses = by_primal(values, masses, facts[0])
    return from_eigenvalues(values, masses, *facts)


def by_quadrature(
    operator: LinearOperator,
    start: Tensor,
    primal: bool,
    facts: tuple[float, int, float],
    samples: int,
    steps: int,
    seed: Seed = None,
) -> Measure:
    """The measure by stochastic Lanczos quadrature, ``steps`` products for all vectors together."""
    # start (n,)
    # Source: Ubaru, Chen and Saad 2017; Dong et al. 2017 for Gaussian processes.
    squared, count, log_noise = facts
    n = operator.shape[0]
    z = signs((n, samples), make_generator(seed), operator.dtype, operator.device)
    b = start.to(z)[:, None]
    own = b if float(b.norm()) > 0 else z[:, :1]
    matrices = tridiagonalize(operator, torch.cat([z, own], 1), steps).matrices().double()
    theta, s = torch.linalg.eigh(matrices)
    theta, weights = theta.clamp_min(0), s[:, 0, :] ** 2
    # breakdown leaves zeros in T, whose nodes have no weight
    weights = torch.where(weights > torch.finfo(z.dtype).eps ** 2, weights, 0.0)
    nodes, masses = theta[-1], weights[-1] * float(b.double().norm()) ** 2
    if primal:
        nodes, masses = by_primal(nodes, masses, squared)
    outside = max(0.0, squared - float(masses.sum())) if primal else 0.0
    return Measure(theta[:-1], n * weights[:-1], nodes, masses, outside, count, log_noise)


# decades of the grid of ridges, relative to the kernel: below, a fit interpolates; above, it does not move
LOWEST, HIGHEST = -7, 2
PER_DECADE = 4
DRIFT = 1e-12  # relative residual above which a solution without some examples is solved for again


class CriteriaByRidge(Record, ABC):
    """A record of criteria along ``ridges``, one number a ridge each."""

    criteria: ClassVar[tuple[str, ...]]  # those that choose a ridge
    ridges: Tensor

    @abstractmethod
    def best(self, criterion: str) -> float:
        """The ridge that a criterion prefers."""

    def to_frame(self) -> DataFrame:
        """A pandas table, one row a ridge.

        Returns:
            The ridge as index, and every criterion.

        Raises:
            DependencyError: If pandas is missing.
        """
        columns = {
            "ridge" if one.name == "ridges" else one.name: getattr(self, one.name) for one in fields(self)
        }
        return frame(columns, "ridge")

    def _shown(self) -> dict[str, Any]:
        return {"ridges": self.ridges, **{f"best by {name}": self.best(name) for name in self.criteria}}

    def _least(self, score: Tensor) -> float:
        """The ridge of the lowest score."""
        return float(self.ridges[int(score.argmin())])


@dataclass(frozen=True, repr=False)
class RidgePath(CriteriaByRidge):
    """Every criterion along a path of ridges.

    Args:
        ridges: ρ, (R,).
        loo_error: Mean squared leave-one-out residual, by the weights, summed over outputs, (R,).
        gcv: Generalized cross-validation score, (R,).
        evidence: Log marginal likelihood at the best noise for this ridge, (R,).
        degrees_of_freedom: tr K(K + ρI)⁻¹, (R,).
        noise: σ² that maximizes the evidence, (R,).
        loo_accuracy: Share of examples whose class is right when left out, (R,); ``None`` for regression.
        target_noise: σ² at which new targets vary about the outputs of a ridge as much as where neither the
            ridge nor the noise is known, on average, (R,); ``None`` for classes.

    Example:
        >>> import linnet
        >>> data = torch.randn(20, 3), torch.randn(20, 1)
        >>> path = linnet.fit(linnet.linearize(torch.nn.Linear(3, 1)), data).path()
        >>> path.best("loo") in path.ridges.tolist()
        True
    """

    criteria = ("loo", "gcv", "evidence")

    ridges: Tensor
    loo_error: Tensor
    gcv: Tensor
    evidence: Tensor
    degrees_of_freedom: Tensor
    noise: Tensor
    loo_accuracy: Tensor | None = None
    target_noise: Tensor | None = None

    def best(self, criterion: str) -> float:
        """The ridge that a criterion prefers.

        Args:
            criterion: ``"loo"``, ``"gcv"`` or ``"evidence"``.

        Returns:
            ρ.

        Raises:
            InputError: The criterion is another.
        """
        choice("criterion", criterion, self.criteria)
        return self._least({"loo": self.loo_error, "gcv": self.gcv, "evidence": -self.evidence}[criterion])

    def noise_factor(self, ridge: float) -> float:
        """``target_noise`` over ``noise`` at the ridge that was chosen; 1 for classes.

        Args:
            ridge: A ridge of the path.

        Returns:
            The factor.
        """
        at = int((self.ridges - number("ridge", ridge, above=0)).abs().argmin())
        if self.target_noise is None or not self.noise[at] > 0:  # nothing is left of the targets
            return 1.0
        return float(self.target_noise[at] / self.noise[at])


def log_target_noise(path: tuple[Tensor, Tensor], count: int, left_out: Tensor, spread: Tensor) -> Tensor:
    """The logarithm of the σ² that each example asks for; its mean is that of ``RidgePath.target_noise``."""
    # path (R,), left_out (R, N, C), spread (R, N)
    # The ridges are averaged over by their evidence p_k. Left out, a target then differs from the output at
    # ridge b by Σ p_k [s_ik σ_k² n/(n − 2) + (f_ik − f_ib)²] in the mean square, where n/(n − 2) is that of a
    # noise which is not known (Student's t). With the noise σ² at ridge b alone it would be s_ib σ². Their
    # ratio is another for every example where b is far from the p_k: hence logarithms, as for intervals the
    # widest must not decide.
    p, noise = path[0].softmax(0), path[1] * (count / max(count - 2, 1))
    c = left_out.shape[2]
    squares = left_out.square().sum(2)
    mean, square = torch.tensordot(p, left_out, 1), p @ (c * noise[:, None] * spread + squares)
    found: Tensor = (square + squares - 2 * (left_out * mean).sum(2)) / (c * spread)
    return found.clamp_min(1e-300).log()


@dataclass(frozen=True)
class Along:
    """Outputs J(x)δ along a path of ridges: R (c/(λ + ρ))."""

    rows: Tensor  # R, (T·C, n)
    values: Tensor  # eigenvalues λ, (n,)
    coordinates: Tensor  # c, (n,)
    masses: Tensor  # m with ‖δ‖² = Σ m (c/(λ + ρ))², (n,)
    least: float = 0.0  # what ‖δ‖² is more than that


def joined(paths: Sequence[RidgePath]) -> RidgePath:
    """Paths one after the other."""
    columns: dict[str, Tensor | None] = {}
    for one in fields(RidgePath):
        parts = [value for path in paths if (value := getattr(path, one.name)) is not None]
        columns[one.name] = torch.cat(parts) if parts else None
    return RidgePath(**columns)  # type: ignore[arg-type]


def ridge_grid_of(scale: float, rounding: float, device: torch.device) -> Tensor:
    """Ridges of nine decades around the scale of a kernel, (R,)."""
    steps = (HIGHEST - LOWEST) * PER_DECADE + 1
    every = scale * torch.logspace(LOWEST, HIGHEST, steps, dtype=torch.float64, device=device)
    sound = every[every >= 10 * rounding]
    return sound if len(sound) else every[-1:]


class DualSystem:
    """K, r and ρ, with the factorizations made when they are first needed."""

    # kernel (N·C, N·C), residual (N, C), beta (N, C)

    def __init__(
        self,
        kernel: Tensor,
        residual: Tensor,
        ridge: float,
        beta: Tensor | None = None,
        factor: Tensor | None = None,
        spectrum: Spectrum | None = None,
    ) -> None:
        self.kernel = kernel
        self.residual = residual.to(kernel.dtype)
        self.ridge = float(ridge)
        self.n, self.c = residual.shape
        self._beta, self._factor, self._spectrum = beta, factor, spectrum
        self._inverse: Tensor | None = None

    @property
    def beta(self) -> Tensor:
        """β, (N, C)."""
        if self._beta is None:
            self._beta = self.solve(_columns(self.residual, self.kernel))
        return self._beta.reshape(self.n, self.c)

    @property
    def shared(self) -> bool:
        """Whether one kernel (N, N) serves all outputs."""
        return self.kernel.shape[0] != self.n * self.c

    @property
    def spectrum(self) -> Spectrum:
        """The eigendecomposition of K, for paths of ridges."""
        if self._spectrum is None:
            self._spectrum = Spectrum(self.kernel, self.residual)
        return self._spectrum

    @property
    def factor(self) -> Tensor:
        """L with L Lᵀ = K + ρI."""
        if self._factor is None:
            damped = self.kernel.clone()
            damped.diagonal().add_(self.ridge)
            self._factor = cholesky(damped, "kernel + ridge")
        return self._factor

    def solve(self, b: Tensor) -> Tensor:
        """M b for columns b, (N·C, k)."""
        return torch.cholesky_solve(b, self.factor)

    @property
    def inverse(self) -> Tensor:
        """M itself, (N·C, N·C)."""
        if self._inverse is None:
            self._inverse = torch.cholesky_inverse(self.factor)
        return self._inverse

    def inverse_blocks(self) -> Tensor:
        """M_ii, (N, C, C)."""
        if self.shared:
            eye = torch.eye(self.c, dtype=self.kernel.dtype, device=self.kernel.device)
            return self.inverse.diagonal()[:, None, None] * eye
        blocks = self.inverse.view(self.n, self.c, self.n, self.c)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def loo_residuals(self) -> Tensor:
        """e_i = (M_ii)⁻¹ β_i, (N, C)."""
        blocks = self.inverse.diagonal()[:, None] if self.shared else self.inverse_blocks()
        return _divided(blocks, self.beta)

    def cross(self, kernel: Tensor) -> Tensor:
        """K(x,X) M for a kernel (T, C, N, C), or (T, N) where the outputs share it, in the same shape."""
        rows = kernel.reshape(-1, self.kernel.shape[0]).to(self.kernel.dtype)
        return self.solve(rows.T).T.reshape(kernel.shape)

    def certificate(self) -> float:
        """‖(K + ρI)β − r‖ / ‖r‖: zero up to rounding."""
        b = _columns(self.beta, self.kernel)
        left = self.kernel @ b + self.ridge * b - _columns(self.residual, self.kernel)
        return float(left.norm() / self.residual.norm().clamp_min(torch.finfo(b.dtype).tiny))

    def noise(self) -> float:
        """σ² of highest evidence: ρ rᵀβ / (N·C)."""
        return float(self.ridge * (self.residual * self.beta).sum() / counted(self.kernel, self.residual))

    def log_evidence(self) -> float:
        """Log N(r; 0, σ²/ρ (K + ρI)) at that σ²."""
        every, n = self.residual.numel(), counted(self.kernel, self.residual)
        logdet = 2 * float(self.factor.diagonal().log().sum()) * (every // self.kernel.shape[0])
        logdet -= (every - n) * math.log(self.ridge)
        ridge, noise, logdets = torch.tensor([self.ridge, self.noise(), logdet], dtype=torch.float64)
        return float(at_best_noise(ridge, noise, n, logdets))

    def at(self, ridge: float) -> DualSystem:
        """The same kernel at another ridge."""
        return DualSystem(self.kernel, self.residual, ridge, spectrum=self._spectrum)

    def _rows(self, examples: Tensor) -> Tensor:
        """Rows of K that belong to some examples."""
        if self.shared:
            return examples
        return (examples[:, None] * self.c + torch.arange(self.c, device=examples.device)).flatten()

    def removed(self, index: Tensor) -> DualSystem:
        """The solution without some examples: β_R − M_RS (M_SS)⁻¹ β_S."""
        # index (k,)
        keep = all_but(self.n, index)
        s, r = self._rows(index), self._rows(keep.nonzero()[:, 0])
        columns = self.solve(unit_columns(len(self.kernel), s, self.kernel))  # M_·S
        b = _columns(self.beta, self.kernel)
        correction = torch.linalg.solve(columns[s], b[s])
        beta = b[r] - columns[r] @ correction
        rest = DualSystem(self.kernel[r][:, r], self.residual[keep], self.ridge, beta.view(-1, self.c))
        if rest.certificate() > DRIFT:
            return DualSystem(rest.kernel, rest.residual, rest.ridge, factor=rest.factor)
        return rest

    def extended(self, cross: Tensor, corner: Tensor, residual: Tensor) -> DualSystem:
        """The solution with more examples, by a bordered Cholesky factor."""
        # cross (N, C, m, C), corner (m, C, m, C), residual (m, C)
        m = residual.shape[0] * self.kernel.shape[0] // self.n
        k12 = cross.reshape(-1, m).to(self.kernel.dtype)
        k22 = corner.reshape(m, m).to(self.kernel.dtype)
        kernel = torch.cat([torch.cat([self.kernel, k12], 1), torch.cat([k12.T, k22], 1)])
        # [L 0; L₂₁ L₂₂] with L₂₁ᵀ = L⁻¹K₁₂ and L₂₂L₂₂ᵀ = K₂₂ + ρI − L₂₁L₂₁ᵀ
        l21 = torch.linalg.solve_triangular(self.factor, k12, upper=False).T
        schur = k22 - l21 @ l21.T
        schur.diagonal().add_(self.ridge)
        l22 = cholesky(schur, "kernel of the new examples + ridge")
        factor = torch.cat([torch.cat([self.factor, torch.zeros_like(k12)], 1), torch.cat([l21, l22], 1)])
        return DualSystem(
            kernel, torch.cat([self.residual, residual.to(self.kernel.dtype)]), self.ridge, factor=factor
        )


def counted(kernel: Tensor, residual: Tensor) -> int:
    """The number of outputs that are fitted: an ignored one has neither derivatives nor a residual."""
    # kernel (N·C, N·C), residual (N, C)
    if kernel.shape[0] != residual.numel():
        return residual.numel()
    return int(((kernel.diagonal() != 0) | (residual.reshape(-1) != 0)).sum()) or residual.numel()


def _columns(values: Tensor, kernel: Tensor) -> Tensor:
    """(N, C) in the rows of a kernel: (N·C, 1), or (N, C) itself where the outputs share the kernel."""
    return values.reshape(kernel.shape[0], -1)


ROWS = 512  # rows of eigenvectors that are squared at once


class Spectrum:
    """One eigendecomposition of K, from which every ridge is free."""

    # kernel (N·C, N·C), residual (N, C)

    def __init__(self, kernel: Tensor, residual: Tensor) -> None:
        self.residual = residual.to(kernel.dtype)
        self.n, self.c = residual.shape
        [(values, self.vectors)] = shared_eigh([kernel], ["kernel"], current())
        self.values = values.clamp_min(0)
        self.counted = counted(kernel, residual)
        # K has no negative eigenvalue: the most negative one found measures its rounding errors
        self.rounding = max(0.0, -float(values.min()), eigenvalue_error(values))
        turned = self.vectors.T @ _columns(self.residual, kernel)
        self.coordinates = turned[:, 0] if turned.shape[1] == 1 else turned  # a column an output, if shared

    def grid(self) -> Tensor:
        """Ridges around the mean of K's diagonal, above its rounding, (R,)."""
        copies = self.residual.numel() // len(self.values)
        scale = copies * float(self.values.sum()) / self.counted or 1.0
        return ridge_grid_of(scale, self.rounding, self.values.device)

    def path(self, ridges: Tensor, classes: bool, targets: Tensor) -> RidgePath:
        """All criteria at each ridge."""
        # ridges (R,), targets (N, C)
        targets = targets.to(self.values.dtype)
        points = [self._point(ridge, classes, targets) for ridge in ridges.to(self.values)]
        columns = torch.stack([point[0] for point in points], 1)
        loo, gcv, evidence, degrees, noise, accuracy = columns.cpu().double()
        known = ridges.double().cpu(), loo, gcv, evidence, degrees, noise
        if classes:
            return RidgePath(*known, accuracy)
        left_out, spread = (torch.stack([point[i] for point in points]) for i in (1, 2))
        asked = log_target_noise((columns[2], columns[4]), self.counted, left_out, spread)
        return RidgePath(*known, None, asked.mean(1).exp().cpu().double())

    def _point(self, ridge: Tensor, classes: bool, targets: Tensor) -> tuple[Tensor, ...]:
        """Loo error, gcv, evidence, degrees of freedom, noise, loo accuracy, (6,); of values e and s too."""
        n, every = self.counted, self.residual.numel()
        weights = 1 / (self.values + ridge)  # eigenvalues of M
        copies = every // len(weights)  # of every eigenvalue: C where the outputs share the kernel, else 1
        coordinates = self.coordinates.reshape(len(weights), -1)
        beta = (self.vectors @ (weights[:, None] * coordinates)).view(self.n, self.c)
        blocks = self._blocks(weights)
        loo = _divided(blocks, beta)
        trace = copies * weights.sum() - (every - n) / ridge
        # I − H = ρM; GCV = n ‖ρMr‖² / (tr ρM)²    (Golub, Heath, Wahba 1979)
        gcv = n * beta.square().sum() / trace.clamp_min(1e-300) ** 2
        noise = ridge * (weights[:, None] * coordinates**2).sum() / n
        logdet = -copies * weights.log().sum() - (every - n) * ridge.log()
        right = torch.full_like(ridge, math.nan)
        if classes:
            right = ((targets - loo).argmax(1) == targets.argmax(1)).to(ridge.dtype).mean()
        evidence, degrees = at_best_noise(ridge, noise, n, logdet), copies * (self.values * weights).sum()
        columns = torch.stack([(loo**2).sum(1).mean(), gcv, evidence, degrees, noise, right])
        return (columns,) if classes else (columns, loo, _mean_inverse(blocks) / ridge)

    def loo_residuals(self, ridges: Sequence[float]) -> Iterator[Tensor]:
        """Leave-one-out residuals at each ridge, (N, C)."""
        weights = 1 / (self.values + self.values.new_tensor(ridges)[:, None])
        diagonals = self._diagonals(weights) if len(self.values) == self.n else None
        for place, own in enumerate(weights):
            turned = own[:, None] * self.coordinates.reshape(len(own), -1)
            blocks = self._blocks(own) if diagonals is None else diagonals[place, :, None]
            yield _divided(blocks, (self.vectors @ turned).view(self.n, self.c))

    def _diagonals(self, weights: Tensor) -> Tensor:
        """The diagonals of M, (R, N), from its eigenvalues at some ridges, (R, N)."""
        return torch.cat([rows**2 @ weights.T for rows in self.vectors.split(ROWS)]).T

    def _blocks(self, weights: Tensor) -> Tensor:
        """M_ii, (N, C, C), or (N, 1) where the outputs share the kernel, from the eigenvalues of M."""
        if len(weights) == self.n:
            return self._diagonals(weights[None])[0, :, None]
        v = self.vectors.view(self.n, self.c, -1)
        return torch.einsum("nik,nk,njk->nij", v, weights.expand(self.n, -1), v)


def _divided(blocks: Tensor, beta: Tensor) -> Tensor:
    """Leave-one-out residuals (M_ii)⁻¹ β_i, (N, C)."""
    found: Tensor = beta / blocks if blocks.ndim == 2 else torch.linalg.solve(blocks, beta)
    return found


def _mean_inverse(blocks: Tensor) -> Tensor:
    """The mean of the diagonal of (M_ii)⁻¹, (N,)."""
    if blocks.ndim == 2:
        return 1 / blocks[:, 0]
    found: Tensor = torch.linalg.inv(blocks).diagonal(dim1=1, dim2=2).mean(1)
    return found
