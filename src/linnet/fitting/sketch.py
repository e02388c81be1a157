"""Sketched networks: only D directions of the weights move, the leading eigenvectors of a curvature.

    f(θ₀ + H ε),        H (P, D),        kernel  K̂ = J H HᵀJᵀ

The directions are orthonormal, so that K̂ ≤ K, and those of a curvature G̃ ≈ JᵀJ keep most of its trace. A
sketched network is a network like any other, with D parameters however many weights it has: D × D matrices
take the place of those of P weights or of N·C samples, and one pass over the data is enough for every ridge,
leave-one-out, influence, forgetting, update and variance of the sketched model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature, default_damping, require_as_made
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.leading import LayerBasis, leading_basis, random_basis, restored_basis
from linnet.curvatures.variance import root_rows
from linnet.errors import InputError, MemoryBudgetError
from linnet.fitting.last_layer import RECORD
from linnet.fitting.solver import Sketch, sketch_bytes
from linnet.likelihoods.gaussian import Gaussian
from linnet.linalg.operator import ParameterSpace, SymmetricOperator
from linnet.linear.iterative import Reused
from linnet.linear.normal_system import NormalSystem
from linnet.linear.preconditioner import frozen_curvature
from linnet.linear.problem import Memory, Problem
from linnet.memory import parse_bytes
from linnet.params import integer, number, refuse
from linnet.params import seed as checked_seed
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.capture import Cotangents, capture
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.functional import Functional, OutputAdapter, without_wrapper
from linnet.tangent.inputs import taken
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Captured
from linnet.tree import flatten, hash_tensors

# -- metric ----------------------------------------------------------------------------------------
#
# Linear fits regularized by a curvature: the network in the coordinates of a metric.
#
# The ridge ρ‖δ‖² treats all weights alike, though a unit of one moves the outputs a thousand times as far
# as a unit of another. With the curvature of the network, A = (G/N + τ I)⁻¹ = H Hᵀ and δ = H ε,
#
#     f(θ₀ + H ε),        ρ ‖ε‖² = ρ δᵀ (G/N + τ I) δ,        kernel  J A Jᵀ,
#
# the same network with other coordinates. It is a module like any other: to linearize and fit it is to
# fit with this ridge, and leave-one-out, influence, forgetting, updates and variances are exact in the
# new metric.

HASHED = 8  # bytes of the hash that tells one metric from another


class MetricNetwork(Coordinates):
    """f(θ₀ + H ε) as a module whose one parameter is ε, (P,). :func:`with_metric` makes it."""

    def __init__(self, network: nn.Module, curvature: Curvature, damping: float) -> None:
        super().__init__(network, list(curvature.function.theta), curvature.shape[0])
        self.curvature, self.damping = curvature, damping
        # A = (G/N + τ I)⁻¹ = H Hᵀ
        self._covariance = curvature.scaled(1 / curvature.made.examples).damped(damping).inverse()
        # equal weights do not make equal networks: what is saved of one metric is not another's
        identity = torch.tensor(list(_identity(curvature, damping)), dtype=torch.uint8)
        self.register_buffer("metric", identity)

    def _moved(self, epsilon: Tensor) -> dict[str, Tensor]:
        """H ε, computed in the type of the curvature."""
        # epsilon (P,)
        delta = self._covariance._root(epsilon.to(self._covariance.dtype)[:, None])[:, 0].to(epsilon.dtype)
        pieces = delta.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def pulled(self, captured: Captured) -> Tensor:
        """J H from the rows of J of a batch of the network in place, (N, K, P)."""
        n, k = captured.n, captured.k
        flat = torch.cat([captured.rows(name).reshape(n * k, -1) for name in self._shapes], 1)
        return self.turned(flat).reshape(n, k, -1)

    def turned(self, rows: Tensor) -> Tensor:
        """J H from rows of J in the order of the network's parameters, (M, P)."""
        # (J H)ᵀ = Hᵀ Jᵀ
        return self._covariance._root_transposed(rows.to(self._covariance.dtype).T).T.to(rows.dtype)

    def kernel_rows(self, captured: Captured) -> Tensor:
        """Rows with the products of those of J H, of every layer in its eigenbasis, (N, K, P)."""
        return root_rows(self._covariance.parts, captured)

    def extra_repr(self) -> str:
        """The metric."""
        return f"{self._covariance!r}"


@in_exact_mode
def with_metric(model: nn.Module, curvature: Curvature, damping: float | None = None) -> MetricNetwork:
    """The same network in coordinates in which the ridge is that of a curvature.

    Linearized and fitted as any network, its ridge is ρ δᵀ(G/N + τI)δ in place of ρ‖δ‖²: weights that move
    the outputs far pay for it. Its kernel J A Jᵀ takes about 1.4 times as long on a ResNet-20.

    Args:
        model: The network, or a ``Linearized`` of it; it is not touched.
        curvature: G, summed over N examples, of this network or of one with the same parameters.
        damping: τ; by default a tenth of the mean eigenvalue of G/N.

    Returns:
        The network with one parameter ε, in evaluation mode, equal to ``model`` at ε = 0. It can be copied,
        pickled and linearized; move it before it is made, not after.

    Raises:
        InputError: If the curvature is of another network or cannot be inverted, or τ is not positive.
        NumericalError: If the curvature is zero.

    Source:
        The preconditioned metric of Achille et al., CVPR 2021, section 3.3, taken to the optimum.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 40).view(20, 2)
        >>> data = x, x.sin().sum(1, keepdim=True)
        >>> G = linnet.curvature(net, data, linnet.likelihoods.Gaussian(), structure="kfac")
        >>> fit = linnet.fit(linnet.linearize(linnet.with_metric(net, G)), data, ridge="loo")
        >>> fit.predict(x).shape
        torch.Size([20, 1])
    """
    network = network_of(model, curvature)
    tau = default_damping(curvature, 1 / curvature.made.examples) if damping is None else damping
    number("damping", tau, above=0, remedy="leave damping= out for a tenth of the mean eigenvalue")
    made = MetricNetwork(network, curvature, float(tau)).eval()
    head = {key: value for key, value in getattr(network, RECORD, {}).items() if key != "folds"}
    setattr(made, RECORD, {"init": "keep", "layer": "", "examples": frozenset(), **head, "metric": True})
    return made


def _identity(curvature: Curvature, tau: float) -> bytes:
    """A hash of G as it would be saved, and of τ: the same on every machine that loads it."""
    stored = [flatten(part.operator)[1] for part in curvature.parts]
    given = torch.tensor([curvature.made.examples, tau], dtype=torch.float64)
    return bytes.fromhex(hash_tensors([given, *(t for own in stored for _, t in sorted(own.items()))]))[
        :HASHED
    ]


def network_of(model: nn.Module, curvature: Curvature) -> nn.Module:
    """The network that a curvature is of."""
    if not isinstance(model, nn.Module):
        refuse("model", model, "a network, or a Linearized", "pass the network itself")
    model = model.model if isinstance(model, Linearized) else model
    network = without_wrapper(model)
    _check_fits(dict(network.named_parameters()), require_as_made(curvature).function.theta)
    return network


def _check_fits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise unless a network has the parameters of a curvature."""
    for name, like in wanted.items():
        have = given.get(name)
        if have is None or have.shape != like.shape or have.device != like.device:
            what = "nothing of that name" if have is None else f"{tuple(have.shape)} on {have.device}"
            raise InputError(
                f"model has {what} for the curvature's {name!r}, {tuple(like.shape)} on {like.device}",
                expected="the network that the curvature was made of",
                remedy="make the curvature of this network, on its device",
            )


SAMPLE = 64  # examples on which the kept trace is measured; 256 were 38 % of a sketched fit of 1,000 images
COLUMNS = 16  # outputs up to which all are differentiated to measure; beyond, as many random combinations
# Columns of the outputs' curvature, over all examples, that the basis is made of. On 1,000 images of ten
# classes a ResNet-20 keeps no less of the trace by one random combination each, not all ten outputs.
DRAWN = 1000
BLOCK = 64  # examples differentiated at once where the trace is measured


@dataclass(frozen=True, repr=False)
class LayerShare(Record):
    """What a sketch keeps of one layer."""

    layer: str
    directions: int  # of the D directions, those of this layer
    parameters: int  # its parameters
    trace: float  # mean over the examples of tr J_l J_lᵀ
    kept: float  # the part of it along the directions


@dataclass(frozen=True, repr=False)
class KeptTrace(Record):
    """The share of the kernel's trace that a sketch keeps, layer by layer, exact on some examples."""

    layers: tuple[LayerShare, ...]
    examples: int

    @property
    def share(self) -> float:
        """Of all layers together, between 0 and 1."""
        return sum(one.kept for one in self.layers) / max(sum(one.trace for one in self.layers), 1e-300)

    def _shown(self) -> dict[str, Any]:
        layers = {one.layer: f"{one.directions:,} of {one.parameters:,}" for one in self.layers}
        return {"share": self.share, "examples": self.examples, "directions": layers}

    def __str__(self) -> str:
        directions = sum(one.directions for one in self.layers)
        whole = sum(one.parameters for one in self.layers)
        return f"{100 * self.share:.1f} % of the kernel's trace in {directions:,} of {whole:,} directions"

    def table(self) -> str:
        """One line for each layer."""
        width = max(len(one.layer) for one in self.layers)
        lines = [
            f"  {one.layer:<{width}}  {one.directions:>7,} of {one.parameters:>11,}  "
            f"{100 * one.kept / max(one.trace, 1e-300):5.1f} %"
            for one in self.layers
        ]
        return "\n".join([str(self), *lines])


class SketchedNetwork(Coordinates):
    """f(θ₀ + H ε) as a module whose one parameter is ε, (D,). :func:`linnet.with_sketch` makes it."""

    # λ of the mean curvature, Hᵀ(G/N)H = diag(λ), where the directions are its eigenvectors; random ones are
    # orthonormal only in expectation
    eigenvalues: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        names: Sequence[str],
        bases: Sequence[LayerBasis],
        eigenvalues: Tensor | None = None,
    ) -> None:
        super().__init__(network, names, sum(basis.size for basis in bases))
        self._layers = [(type(basis).__name__, basis.layer) for basis in bases]
        # buffers move, convert and are compared with the network
        for i, basis in enumerate(bases):
            for name, tensor in basis.tensors.items():
                own = tensor.to(self.epsilon.dtype) if tensor.is_floating_point() else tensor
                self.register_buffer(f"basis_{i}_{name}", own.to(self.epsilon.device))
        known = None if eigenvalues is None else eigenvalues.to(self.epsilon)
        self.register_buffer("eigenvalues", known)

    @property
    def orthonormal(self) -> bool:
        """Whether the directions have length one and are at right angles."""
        return self.eigenvalues is not None

    @property
    def bases(self) -> list[LayerBasis]:
        """The directions of every layer that has any."""
        return [
            restored_basis(kind, layer, self._tensors(f"basis_{i}_"))
            for i, (kind, layer) in enumerate(self._layers)
        ]

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        """The buffers whose names begin with a prefix, by the rest of their names."""
        own = dict(self.named_buffers(recurse=False))
        return {name.removeprefix(prefix): t for name, t in own.items() if name.startswith(prefix)}

    def _moved(self, epsilon: Tensor) -> dict[str, Tensor]:
        """H ε."""
        # epsilon (D,)
        moved = {name: epsilon.new_zeros(shape) for name, shape in self._shapes.items()}
        bases = self.bases
        for basis, own in zip(bases, epsilon.split([basis.size for basis in bases]), strict=True):
            moved |= zip(basis.layer.names, basis.displacement(own), strict=True)
        return moved

    def pulled(self, captured: Captured) -> Tensor:
        """J H, every layer's factors turned before they are multiplied, (N, K, D)."""
        dtype: torch.dtype = self.epsilon.dtype
        return torch.cat([basis.rows(captured).to(dtype) for basis in self.bases], 2)

    def projected(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Hᵀ v for columns v (*shape, M) by the names of the parameters, (D, M)."""
        parts = [basis.projected([columns[name] for name in basis.layer.names]) for basis in self.bases]
        return torch.cat(parts)

    @in_exact_mode
    @torch.no_grad()
    def kept(self, x: Inputs, output: OutputAdapter = None) -> KeptTrace:
        """The share of the kernel's trace that the directions keep, exactly, on some examples.

        Args:
            x: N examples.
            output: How to turn the network's result into a tensor, as for :func:`linnet.linearize`.

        Returns:
            The trace of every layer, and the part of it that is kept.

        Example:
            >>> import linnet
            >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
            >>> x = torch.linspace(-1, 1, 40).view(20, 2)
            >>> G = linnet.curvature(net, (x, x), linnet.likelihoods.Gaussian(), structure="ekfac")
            >>> linnet.with_sketch(net, G, dim=42).kept(x).share > 0.9999
            True
        """
        function = Functional(*self.network_in_place(), output)
        return _kept(function, self, taken(function, x))

    def extra_repr(self) -> str:
        """The number of directions."""
        return f"{len(self.epsilon)} directions of {sum(s.numel() for s in self._shapes.values())} weights"


def _kept(function: Functional, small: SketchedNetwork, x: Inputs, memory: Memory = None) -> KeptTrace:
    """The trace of JᵀJ and of its part along the directions, for the network inside."""
    n, outputs = batch_size(x), function.check_runs(take(x, slice(0, 1))).numel()
    curvature = frozen_curvature("diagonal", function, x, _expectation(outputs), memory)
    traces: dict[str, float] = {}
    for part in curvature.parts:
        widths = [torch.Size(shape).numel() for shape in part.layer.shapes]
        squares = part.operator.diagonal().split(widths)
        for name, own in zip(part.layer.names, squares, strict=True):
            traces[name] = float(own.sum(dtype=torch.float64)) / n
    bases = {basis.layer.name: basis for basis in small.bases}
    moved = {name for basis in bases.values() for name in basis.layer.names}
    layers = [basis.layer for basis in bases.values()]
    layers += [part.layer for part in curvature.parts if not moved & set(part.layer.names)]
    kept = {layer.name: 0.0 for layer in layers}
    for batch in split(x, BLOCK):
        captured = capture(function, batch, _cotangents(outputs))
        for name, basis in bases.items():
            kept[name] += float(basis.rows(captured).double().square().sum()) / n
    shares = []
    for layer in layers:
        trace = sum(traces[name] for name in layer.names)
        size = bases[layer.name].size if layer.name in bases else 0
        shares.append(LayerShare(layer.name, size, layer.size, trace, kept[layer.name]))
    return KeptTrace(tuple(shares), n)


def _expectation(outputs: int, columns: int = COLUMNS) -> Expectation:
    """All outputs, or random combinations of many."""
    if outputs <= columns:
        return Expectation(Gaussian(variance=1.0))
    return Expectation(Gaussian(variance=1.0), "random-projection", samples=columns)


def _cotangents(outputs: int) -> Cotangents:
    """The same as cotangents."""
    if outputs <= COLUMNS:
        return "full"

    def random(f: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        drawn: Tensor = torch.randn(COLUMNS, *f.shape, generator=generator).to(f) / COLUMNS**0.5
        return drawn

    return random


@in_exact_mode
def with_sketch(
    model: nn.Module,
    curvature: Curvature,
    dim: int = 2048,
    seed: int | None = None,
) -> SketchedNetwork:
    """The same network moved along D directions only, the leading eigenvectors of a curvature.

    It is a module with one parameter of D numbers: everything that takes a network takes it. Linearized and
    fitted, D × D matrices are decomposed however many weights and examples there are. ``linnet.fit(...,
    solver="sketch")`` makes one by itself.

    Args:
        model: The network, or a ``Linearized`` of it; it is not touched.
        curvature: G, of this network or one with the same parameters, made of blocks that have eigenvectors:
            "kfac", "ekfac" (whose eigenvalues are exact in its basis), "diagonal", "block" or "full".
            With a Gaussian likelihood the directions are those of the tangent kernel.
        dim: D, the number of directions, of all layers together; eigenvalues that are zero take none.
        seed: Takes random directions in place of eigenvectors, of each layer as many as is its share of the
            trace.

    Returns:
        The network with one parameter ε, in evaluation mode, equal to ``model`` at ε = 0;
        ``displacement()`` gives the weights' δ = H ε, and ``kept(x)`` the share of the kernel's trace.

    Raises:
        InputError: If the curvature is of another network or has no eigenvectors, or a number cannot be.

    Source:
        The eigenbasis of EKFAC, George et al. 2018; projections of captured factors as in LoGra,
        Choe et al. 2024.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        >>> x = torch.linspace(-1, 1, 40).view(20, 2)
        >>> G = linnet.curvature(net, (x, x[:, :1]), linnet.likelihoods.Gaussian(), structure="ekfac")
        >>> small = linnet.with_sketch(net, G, dim=30)
        >>> fit = linnet.fit(linnet.linearize(small), (x, x.prod(1, keepdim=True)), ridge="loo")
        >>> fit.displacement()["0.weight"].shape
        torch.Size([64, 2])
    """
    network = network_of(model, curvature)
    integer("dim", dim, least=1)
    names = list(curvature.function.theta)
    if seed is None:
        return _leading(network, names, curvature, dim)
    return _made(network, names, random_basis(curvature, dim, checked_seed("seed", seed)))


def _leading(network: nn.Module, names: Sequence[str], curvature: Curvature, dim: int) -> SketchedNetwork:
    """The network along leading directions."""
    bases, values = leading_basis(curvature, dim)
    return _made(network, names, bases, values / curvature.made.examples)


def _made(
    network: nn.Module,
    names: Sequence[str],
    bases: Sequence[LayerBasis],
    eigenvalues: Tensor | None = None,
) -> SketchedNetwork:
    """The sketched network, with what is known of its head."""
    made = SketchedNetwork(network, names, bases, eigenvalues).eval()
    head = {key: value for key, value in getattr(network, RECORD, {}).items() if key != "folds"}
    setattr(made, RECORD, {"init": "keep", "layer": "", "examples": frozenset(), **head, "sketch": True})
    return made


def sketched(lin: Linearized, x: Inputs, settings: Sketch, memory: Memory = None) -> tuple[Linearized, str]:
    """A linearized network in a sketch of its own, made of some of the training inputs."""
    function, n = lin.function, batch_size(x)
    if isinstance(function.model, Coordinates):
        raise InputError(
            f"solver=Sketch with a {type(function.model).__name__}, which has coordinates of its own",
            expected="the network itself",
            remedy="pass linnet.linearize(network)",
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(settings.seed)).to(function.device)
    given, chosen = settings.basis, order[: settings.examples]
    outputs = function.check_runs(take(x, slice(0, 1))).numel()
    # of the budget, what the sketched network takes beside the curvature
    rest = parse_bytes(memory, function.device) - sketch_bytes(function)
    if isinstance(given, Curvature):
        network_of(function.model, given)
        curvature = given
    else:
        columns = _expectation(outputs, min(COLUMNS, math.ceil(DRAWN / len(chosen))))
        try:
            curvature = frozen_curvature(given, function, take(x, chosen), columns, max(rest, 1))
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"a sketch of this network: {error.what}",
                expected=error.expected,
                remedy="raise memory=, or use fewer parameters with params=",
            ) from error
    # a network in float64 converts its inputs because it knows where it comes from
    model = (function.source or function).model
    small = _leading(model, function.names, curvature, settings.dim)
    # others than the basis was made of, if there are any: it was chosen to keep much of those
    others = order[settings.examples :][:SAMPLE]
    sample = others if len(others) >= SAMPLE // 4 else order[:SAMPLE]
    del curvature
    kept = _kept(function, small, take(x, sample), max(rest, 1))
    made = Functional(small, None, function.output)
    made.known = function.known
    return Linearized(made if function.source is None else made.in_float64()), str(kept)


def sketch_state(small: SketchedNetwork) -> dict[str, Any]:
    """A sketch, the network apart."""
    return {"parameters": list(small._shapes), "bases": small.bases, "eigenvalues": small.eigenvalues}


def restored_sketch(network: nn.Module, state: Mapping[str, Any]) -> SketchedNetwork:
    """The sketched network of ``sketch_state``."""
    return _made(network, state["parameters"], state["bases"], state["eigenvalues"])


class DeflatedInverse(SymmetricOperator):
    """H (ΦᵀΦ + ρI)⁻¹ Hᵀ + (I − H Hᵀ)/(μ + ρ): (JᵀJ + ρI)⁻¹ along H, a multiple of I elsewhere."""

    # μ is the least ‖J v‖² of the directions v: those that were left out have about that much and less.

    def __init__(self, system: NormalSystem, space: ParameterSpace) -> None:
        self.system, self.space = system, space
        self.shape = (space.dim, space.dim)
        self.dtype, self.device = system.function.dtype, system.function.device
        self._rest = 1 / (float(system.normal.diagonal().min()) + system.ridge)

    def mm(self, v: Tensor) -> Tensor:
        """The product with columns (P, M)."""
        assert self.space is not None
        small = self.system.function.model
        assert isinstance(small, SketchedNetwork)
        along = small.projected(self.space.to_params(v))
        solved = self.system.solve(along).to(along) - self._rest * along
        columns = [self.space.to_flat(small._moved(column)) for column in solved.T]
        return self._rest * v + torch.stack(columns, 1)


def deflated(
    lin: Linearized, problem: Problem, settings: Sketch, ridge: float, memory: Memory = None
) -> Reused:
    """A sketch as preconditioner of conjugate gradients in all weights, its solution as their start."""
    # Source: The preconditioner of Rudi, Carratino and Rosasco 2017 (FALKON), with directions in place of
    # samples.
    small, _ = sketched(lin, problem.x, settings, memory)
    system = NormalSystem.solved(replace(problem, function=small.function, known=None), ridge, memory)
    network = small.model
    assert isinstance(network, SketchedNetwork)
    start = lin.space.to_flat(network.displacement(system.delta))
    return Reused(preconditioner=DeflatedInverse(system, lin.space), start=start)
