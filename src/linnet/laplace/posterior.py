"""A Laplace posterior as a function of its hyper-parameters, and its log evidence.

Everything that depends on the data is summed once: the curvature, decomposed; the log-likelihood at θ*; the
distance of θ* from the prior mean. With prior precisions δ (one a group g), scale s of the data and noise m

    log p(D) ≈ −s L(m) + ½ Σ_g (n_g log δ_g − δ_g ‖θ*_g − μ_g‖²) − ½ log det (s/m G + Δ)

where L is the negative log-likelihood; the factors 2π of the prior and of the integral cancel. It is exact
for a linear model with Gaussian noise when θ* is its posterior mode (MacKay 1992, "Bayesian interpolation").
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.parts import Part
from linnet.curvatures.stream import Batches
from linnet.distributed import Share, gathered
from linnet.errors import InputError
from linnet.laplace.blocks import DAMPINGS, Block, Point, make_block
from linnet.laplace.prior import Groups, make_groups
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.factorize import eigh_bytes
from linnet.linalg.grouped import GroupedKronecker
from linnet.linalg.kronecker import Kronecker
from linnet.linalg.structured import Dense, StructuredOperator
from linnet.memory import Plan, parse_bytes, require
from linnet.params import refuse, tensor
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import Linearized
from linnet.tree import node


@node()
@dataclass(frozen=True)
class DataFit:
    """Sums of the network's loss on the data."""

    nll: float | None  # −log p(D | θ*), or None where the data have no targets
    squares: float = 0.0  # Σ (y − f)² / σ² for a Gaussian likelihood
    targets: float = 0.0  # number of observed target values, for a Gaussian likelihood

    def __add__(self, other: DataFit) -> DataFit:
        nll = None if self.nll is None or other.nll is None else self.nll + other.nll
        return DataFit(nll, self.squares + other.squares, self.targets + other.targets)

    def at(self, noise: Tensor) -> Tensor:
        """−log p(D | θ*) with the noise variance m times as large."""
        if self.nll is None:
            raise InputError(
                "the evidence of a fit to data without targets",
                expected="(x, y) pairs",
                remedy="call fit((x, y)) with targets",
            )
        # ½ S/m + ½ n log m, up to what does not depend on m
        return self.nll + 0.5 * self.squares * (1 / noise - 1) + 0.5 * self.targets * noise.log()


@node()
@dataclass(frozen=True, eq=False)
class Hyper:
    """Hyper-parameters, float64."""

    prior: Tensor  # δ of each group, (G,)
    scale: Tensor  # s, ()
    noise: Tensor  # m, the noise variance over that of the likelihood that was fitted with, ()


def require_memory(curvature: Curvature, memory: str | int | None) -> None:
    """Raise if the posterior of a curvature would not fit."""
    operators = [part.operator for part in curvature.parts]
    held = [value for one in operators for value in vars(one).values()]
    products = [one for one in operators if isinstance(one, Kronecker | GroupedKronecker)]
    factors = [side for one in products for side in (one.left, one.right)]
    factors += [one.matrix for one in operators if isinstance(one, Dense)]
    workspace = (t.shape[:-2].numel() * eigh_bytes(t.shape[-1], t.itemsize) for t in factors)
    function, largest = curvature.function, max(part.layer.size for part in curvature.parts)
    items = (
        ("curvature", sum(t.nbytes for t in held if isinstance(t, Tensor))),
        ("eigenvectors", sum(t.nbytes for t in factors)),
        ("eigenvalues", (1 + bool(products)) * function.space.dim * function.dtype.itemsize),
        ("workspace", max([16 * largest, *workspace])),  # precisions of a block are made in float64
    )
    plan = Plan(f"posterior of {function.space.dim} weights", parse_bytes(memory, function.device), items)
    require(plan, ["raise memory= of passes=", 'pass structure="diagonal", or fewer parameters with params='])


class Posterior:
    """The Gaussian N(θ*, H⁻¹) for any hyper-parameters."""

    def __init__(self, curvature: Curvature, fitted: DataFit, mean: Tensor, damping: str) -> None:
        self.curvature, self.fitted, self.mean, self.damping = curvature, fitted, mean, damping
        kinds = {curvature.made.structure, *(part.structure for part in curvature.parts)}
        if damping != "exact" and not kinds & {"kfac", "kfra"}:
            raise InputError(
                f"damping={damping!r} with structure={curvature.made.structure!r}",
                expected='a Kronecker product in it: structure="kfac" or "kfra"',
                remedy='use damping="exact"',
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The decomposed blocks."""
        made = self.curvature.made
        return tuple(
            make_block(part, self.damping, made.examples, made.matrix != "hessian")
            for part in self.curvature.parts
        )

    @cached_property
    def _squares(self) -> Tensor:
        """(θ* − μ)², (P,), float64."""
        function = self.curvature.function
        theta = function.space.to_flat(function.theta).double()
        return (theta - self.mean.to(theta)).square()

    def groups(self, form: str) -> Groups:
        """The groups of a form of prior."""
        function = self.curvature.function
        return make_groups(form, self.curvature.parts, function.space, function.device)

    def distances(self, groups: Groups) -> Tensor:
        """‖θ*_g − μ_g‖², (G,)."""
        return groups.sums(self._squares)

    def logdet(self, groups: Groups, at: Hyper) -> Tensor:
        """``log det H``, (), differentiable in the hyper-parameters."""
        each = [
            block.logdet(Point(groups.on(i, at.prior), at.scale, at.noise))
            for i, block in enumerate(self.blocks)
        ]
        return torch.stack(each).sum()

    def log_evidence(self, groups: Groups, at: Hyper) -> Tensor:
        """The log evidence, (), differentiable in the hyper-parameters."""
        sizes = groups.sums(torch.ones_like(self._squares))
        fit = -at.scale * self.fitted.at(at.noise)
        prior = 0.5 * (sizes * at.prior.log() - at.prior * self.distances(groups)).sum()
        return fit + prior - 0.5 * self.logdet(groups, at)

    def covariance(self, groups: Groups, at: Hyper) -> Curvature:
        """H⁻¹, layer by layer."""
        return self._with(
            [
                block.covariance(Point(groups.on(i, at.prior), at.scale, at.noise))
                for i, block in enumerate(self.blocks)
            ]
        )

    def slopes(self, groups: Groups, at: Hyper, towards: Hyper, which: int | None) -> Sequence[Part]:
        """H⁻¹ Ḣ H⁻¹ of the blocks that change when the hyper-parameters do."""
        found = []
        for i, (part, block) in enumerate(zip(self.curvature.parts, self.blocks, strict=True)):
            place = groups.places[i]
            if which is None or (place == which if isinstance(place, int) else bool((place == which).any())):
                point = Point(groups.on(i, at.prior), at.scale, at.noise)
                change = Point(groups.on(i, towards.prior), towards.scale, towards.noise)
                found.append(replace(part, operator=block.slope(point, change)))
        return found

    def _with(self, operators: Sequence[StructuredOperator]) -> Curvature:
        """The layers with other blocks."""
        curvature = self.curvature
        parts = tuple(replace(p, operator=o) for p, o in zip(curvature.parts, operators, strict=True))
        return Curvature(parts, curvature.function, curvature.made)


def measure(likelihood: Likelihood, f: Tensor, y: Tensor | None) -> DataFit:
    """Score of outputs against their targets."""
    # f (N, ...)
    if y is None:
        return DataFit(None)
    nll = float(likelihood.nll(f, y).double().sum())
    if not isinstance(likelihood, Gaussian):
        return DataFit(nll)
    # gradient (f − y)/σ², zero where a target is missing; Λ σ² is one where there is one
    variance = likelihood.variance(f)
    squares = (likelihood.gradient(f, y).square() * variance).double().sum()
    counted = (likelihood.product(f, torch.ones_like(f), y) * variance).double().sum()
    return DataFit(nll, float(squares), float(counted))


class Watcher:
    """Score of the network on data, from the outputs of another pass."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.examples = 0
        self.shape: tuple[int, ...] = ()
        self._found: list[DataFit] = []

    def see(self, f: Tensor, y: Tensor | None) -> None:
        """Take in a batch."""
        # f (N, ...)
        self._found.append(measure(self.likelihood, f, y))
        self.examples, self.shape = self.examples + len(f), tuple(f.shape[1:])

    @property
    def fitted(self) -> DataFit:
        """The sums."""
        return reduce(operator.add, self._found)

    def add_others(self) -> None:
        """Add what all other processes have seen."""
        everyone = gathered((self._found, self.examples, self.shape))
        self._found = [one for found, _, _ in everyone for one in found]
        self.examples = sum(examples for _, examples, _ in everyone)
        self.shape = next((shape for _, examples, shape in everyone if examples), ())


def measure_all(
    function: Functional, likelihood: Likelihood, data: Any, block: int | None, share: Share
) -> Watcher:
    """Sums of the network's loss on data, by a separate pass."""
    found = Watcher(likelihood)
    for batch in Batches(data, function, block, share):
        found.see(function.check_runs(batch.x), batch.y)
    if share.world > 1:
        found.add_others()
    return found


def relative_noise(likelihood: Likelihood, variances: Any) -> Tensor | None:
    """Noise variances over that of a likelihood, with the graph of tensors."""
    if variances is None:
        return None
    if not isinstance(likelihood, Gaussian) or likelihood.noise.numel() > 1:
        raise InputError(
            f"noise_variance= with {likelihood!r}",
            expected="a Gaussian likelihood of one variance",
            remedy="leave noise_variance= out",
        )
    given = tensor("noise_variance", variances, "positive numbers").to(torch.float64).flatten()
    if isinstance(variances, bool) or not given.numel() or not bool(((given > 0) & given.isfinite()).all()):
        refuse("noise_variance", variances, "positive numbers")
    return given / float(likelihood.noise)


def with_noise(likelihood: Likelihood, factor: float) -> Likelihood:
    """The likelihood with its noise variance multiplied; only a Gaussian has one."""
    if not isinstance(likelihood, Gaussian) or factor == 1.0:
        return likelihood
    return Gaussian(likelihood.noise * factor, likelihood.axis, likelihood.masked)


def require_origin(model: nn.Module) -> None:
    """Raise if a linearization has moved: curvature and outputs would be those at δ = 0."""
    if isinstance(model, Linearized) and any(bool((t != 0).any()) for t in model.delta.values()):
        raise InputError(
            "model is a Linearized that has been trained: its displacement δ is not zero",
            expected="a network, or a linearization at δ = 0",
            remedy="use linnet.linear_posterior for the linear model, lin.relinearize() for the network at "
            "θ₀ + δ, or lin.model for the one at θ₀",
        )


def check_damping(damping: str) -> None:
    """Raise unless a damping is one of those known."""
    if damping not in DAMPINGS:
        raise InputError(
            f"damping={damping!r}",
            expected=", ".join(f'"{one}"' for one in DAMPINGS),
            remedy='leave damping= out for "exact"',
        )
