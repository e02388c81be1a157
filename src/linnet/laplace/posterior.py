"""A Laplace posterior as a function of its hyper-parameters, and its log evidence.

Everything that depends on the data is summed once: the curvature, decomposed; the log-likelihood at θ*; the
distance of θ* from the prior mean. With prior precisions δ (one a group g), scale s of the data and noise m

    log p(D) ≈ −s L(m) + ½ Σ_g (n_g log δ_g − δ_g ‖θ*_g − μ_g‖²) − ½ log det (s/m G + Δ)

where L is the negative log-likelihood; the factors 2π of the prior and of the integral cancel. It is exact
for a linear model with Gaussian noise when θ* is its posterior mode (MacKay 1992, "Bayesian interpolation").
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Part
from linnet.curvatures.stream import Batches
from linnet.distributed import Share, gathered
from linnet.errors import InputError
from linnet.laplace.blocks import Block, Point, make_block
from linnet.likelihoods.gaussian import Gaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.linalg.factorize import eigh_bytes, is_finite
from linnet.linalg.kronecker import Kronecker
from linnet.linalg.operator import ParameterSpace
from linnet.linalg.structured import Dense, StructuredOperator
from linnet.memory import Plan, parse_bytes, require
from linnet.params import positive_numbers, refuse, shown, tensor
from linnet.predictive.sampled import Labels
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import Linearized
from linnet.tree import node

# -- prior -----------------------------------------------------------------------------------------
#
# Gaussian priors on the weights: one precision, one per layer, or one per parameter.
#
# The prior is N(μ, Δ⁻¹) with Δ diagonal. Its precisions come in groups: every parameter belongs to one
# group, and each block of the posterior sees either one number or one for each of its rows.

FORMS = ("isotropic", "layer", "parameter")
VECTOR_STRUCTURES = ("full", "block", "diagonal", "low-rank")  # exact with a precision for each parameter


@dataclass(frozen=True, eq=False)
class Groups:
    """Which parameters share a prior precision."""

    form: str  # "isotropic", "layer" or "parameter"
    names: tuple[str, ...]  # names of the groups; empty for "parameter"
    members: Tensor  # the group of every parameter, (P,)
    # for every block of the posterior its group, or that of each of its rows (p,)
    places: tuple[int | Tensor, ...]

    @property
    def count(self) -> int:
        """G, the number of groups."""
        return len(self.names) if self.form != "parameter" else len(self.members)

    def on(self, block: int, values: Tensor) -> Tensor:
        """The precisions that a block sees, ()."""
        # values (G,)
        return values[self.places[block]]

    def sums(self, each: Tensor) -> Tensor:
        """Numbers of the parameters, added up in each group, (G,)."""
        # each (P,)
        return each.new_zeros(self.count).index_add(0, self.members, each)


def make_groups(form: str, parts: Sequence[Part], space: ParameterSpace, device: torch.device) -> Groups:
    """The groups of a form."""
    # A layer is the module that owns a parameter; modules whose parameters share one Kronecker product, as a
    # weight and a bias that another module adds, are one layer.
    if form == "isotropic":
        every = torch.zeros(1, dtype=torch.long, device=device).expand(space.dim)
        return Groups(form, ("all",), every, (0,) * len(parts))
    if form == "layer":
        owners = _owners(parts, space)
        names = tuple(dict.fromkeys(owners.values()))
        sizes = [space.shapes[name].numel() for name in space.names]
        each = torch.tensor([names.index(owners[name]) for name in space.names])
        members = each.repeat_interleave(torch.tensor(sizes)).to(device)
    else:
        names, members = (), torch.arange(space.dim, device=device)
    places = tuple(_place(part, members, space, form) for part in parts)
    return Groups(form, names, members, places)


def _owners(parts: Sequence[Part], space: ParameterSpace) -> dict[str, str]:
    """The layer of each parameter."""
    owners = {name: name.rpartition(".")[0] or name for name in space.names}
    for part in parts:
        if part.structure not in VECTOR_STRUCTURES:
            first = owners[part.layer.names[0]]
            merged = {owners[name] for name in part.layer.names}
            owners = {name: first if owner in merged else owner for name, owner in owners.items()}
    return owners


def _place(part: Part, members: Tensor, space: ParameterSpace, form: str) -> int | Tensor:
    """The group of a block, or of each of its rows."""
    rows = part.gather(members[:, None].double(), space)[:, 0].long()
    if rows.numel() and bool((rows == rows[0]).all()):
        return int(rows[0])
    if part.structure not in VECTOR_STRUCTURES:
        raise InputError(
            f"a prior precision for each {form} with the {part.structure} block of {part.layer.name}",
            expected="one precision for a Kronecker block: others would destroy its structure",
            remedy='use structure="diagonal", "full", "block" or "low-rank", or prior="layer"',
        )
    return rows


def prior_values(
    given: Any, parts: Sequence[Part], space: ParameterSpace, device: torch.device
) -> tuple[Groups, Tensor]:
    """Prior precisions as the user gave them, (G,)."""
    if isinstance(given, Mapping):
        return _by_name(given, parts, space, device)
    values = torch.as_tensor(given, dtype=torch.float64, device=device).flatten()
    form = "isotropic" if len(values) == 1 else "parameter" if len(values) == space.dim else "layer"
    groups = make_groups(form, parts, space, device)
    if len(values) != groups.count:
        raise InputError(
            f"prior_precision has {len(values)} entries",
            expected=f"1, {groups.count} (one per layer) or {space.dim} (one per parameter)",
            remedy="pass a number, or a dict by layer name",
        )
    return groups, values


def _by_name(
    given: Mapping[str, Any], parts: Sequence[Part], space: ParameterSpace, device: torch.device
) -> tuple[Groups, Tensor]:
    """Precisions by the names of layers, or of parameters."""
    by_layer = make_groups("layer", parts, space, device)
    if set(given) == set(by_layer.names):
        each = [_shaped(given[name], torch.Size(()), name, device) for name in by_layer.names]
        return by_layer, torch.stack(each)
    if set(given) == set(space.names):
        pieces = {name: _shaped(given[name], shape, name, device) for name, shape in space.shapes.items()}
        return make_groups("parameter", parts, space, device), space.to_flat(pieces).clone()
    raise InputError(
        f"prior_precision has the names {sorted(given)[:8]}",
        expected=f"a precision for each of the layers {', '.join(by_layer.names[:8])}"
        + (" ..." if by_layer.count > 8 else ""),
        remedy="name all layers, or pass one number",
    )


def _shaped(value: Any, shape: torch.Size, name: str, device: torch.device) -> Tensor:
    """Precisions under one name: as many as there are to be, or one for all."""
    found = torch.as_tensor(value, dtype=torch.float64, device=device)
    if found.numel() == 1:
        return found.reshape(()).expand(shape)
    try:
        return found.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"prior_precision[{name!r}] has shape {tuple(found.shape)}",
            expected=f"one number, or the shape {tuple(shape)}" if len(shape) else "one number for a layer",
            remedy="see dict(model.named_parameters()) for the shapes",
        ) from error


def check_prior(given: Any) -> None:
    """Raise unless prior precisions are positive finite numbers, whatever they come in."""
    if isinstance(given, Mapping) and not given:
        refuse("prior_precision", given, "positive numbers", "name a layer or a parameter")
    for name, value in given.items() if isinstance(given, Mapping) else [("", given)]:
        where = f"prior_precision[{name!r}]" if name else "prior_precision"
        expected = (
            "positive numbers: with a precision of zero the prior has no density, and what the data leave "
            "undetermined would be infinitely uncertain"
        )
        remedy = 'pass a small positive number, or tune it: .tune("evidence")'
        found = tensor(where, value, expected, remedy).detach()
        numbers = found.double()
        good = found.numel() > 0 and found.dtype != torch.bool
        if not good or not bool((numbers > 0).all() & numbers.isfinite().all()):
            what = f"holds {float(numbers.min()):.4g}" if numbers.numel() > 1 else f"is {shown(value)}"
            raise InputError(f"{where} {what}", expected, remedy)


def check_mean(given: Any) -> None:
    """Raise unless prior means are finite numbers, whatever they come in; shapes are looked at later."""
    for name, value in given.items() if isinstance(given, Mapping) else [("", given)]:
        where = f"prior_mean[{name!r}]" if name else "prior_mean"
        found = tensor(where, value, "finite numbers")
        if not found.numel() or found.dtype == torch.bool or not is_finite(found):
            refuse(where, value, "finite numbers", "leave prior_mean= out for zero")


def make_mean(given: Any, space: ParameterSpace, device: torch.device) -> Tensor:
    """The prior mean of every parameter, (P,)."""
    try:
        if isinstance(given, Mapping):
            flat = space.to_flat({n: torch.as_tensor(v, dtype=torch.float64) for n, v in given.items()})
        else:
            flat = torch.as_tensor(given, dtype=torch.float64)
        shown = f"has shape {tuple(flat.shape)}"
    except (TypeError, RuntimeError):
        flat, shown = torch.empty(0), f"is {given!r}"
    if flat.numel() and not bool(flat.isfinite().all()):
        shown = "holds NaN or infinite values"
    elif flat.ndim <= 1 and flat.numel() in (1, space.dim):
        return flat.detach().clone().to(device).expand(space.dim)  # one number takes the memory of one
    raise InputError(
        f"prior_mean {shown}",
        expected=f"a finite number, ({space.dim},), or tensors by parameter name",
        remedy="leave prior_mean= out for zero",
    )


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
    products = [one for one in operators if isinstance(one, Kronecker)]
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
        return function.varying((theta - self.mean.to(theta)).square())  # the others have no prior

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
    given = positive_numbers("noise_variance", variances, "positive numbers")
    return given.to(torch.float64).flatten() / float(likelihood.noise)


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


# -- state -----------------------------------------------------------------------------------------
# The state of a fitted Laplace approximation: posterior, hyper-parameters, type of output.


@dataclass(frozen=True, eq=False)
class State:
    """A fitted posterior."""

    posterior: Posterior  # the posterior for any hyper-parameters
    groups: Groups  # groups of the prior
    hyper: Hyper  # the hyper-parameters
    labels: Labels  # how targets are distributed, with the likelihood that the curvature was computed with


def expanded(state: State, form: str) -> tuple[Groups, Hyper]:
    """The same prior in another form: as it is in a finer one, at its geometric mean in a coarser one."""
    groups = state.posterior.groups(form)
    logs = state.hyper.prior.log()[state.groups.members]
    sizes = groups.sums(torch.ones_like(logs))
    return groups, Hyper((groups.sums(logs) / sizes).exp(), state.hyper.scale, state.hyper.noise)
