"""Alignment of approximate updates with the exact Gauss-Newton update (Botev 2020, figures 4.2 and 4.3).

Compared are updates δ = (G̃ + (λ + τ)I)⁻¹ ∇E of several approximations, by the cosine with δ of the exact
matrix, found by conjugate gradients on products J and Jᵀ: layer by layer with the exact block of each layer
(figure 4.2), and as a whole with the full matrix (figure 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import layers_of
from linnet.curvatures.layers import Layer
from linnet.curvatures.products import GaussNewtonOperator
from linnet.curvatures.stream import Batches
from linnet.errors import InputError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.operator import LinearOperator
from linnet.optim.gauss_newton_inverse import Undamped
from linnet.optim.gauss_newton_model import Network, average_of
from linnet.optim.gauss_newton_settings import Settings
from linnet.params import instance, number, refuse
from linnet.solvers.cg import cg
from linnet.tangent.batch import take
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional

PUBLISHED = {"kflr": ("kfac", "exact"), "block": ("block", "exact"), "full": ("full", "exact")}
EXACT = "block-diagonal"  # the name of the update of the exact blocks


@dataclass(frozen=True)
class Alignment:
    """Cosines between updates.

    Attributes:
        layers: Names of the layers, in order.
        by_layer: For each approximation the cosine with the update of the exact block, layer by layer, (L,).
        whole: For each approximation, and for the exact block diagonal, the cosine of the whole update with
            that of the full Gauss-Newton matrix.
        residuals: Relative residuals of the conjugate gradients: the full system and the worst block.

    Args:
        layers: See above.
        by_layer: See above.
        whole: See above.
        residuals: See above.

    Example:
        >>> print(Alignment(("0",), {"kfra": torch.tensor([0.9])}, {"kfra": 0.8}, (0.0, 0.0)))
              whole  0
        kfra  0.800  0.900
    """

    layers: tuple[str, ...]
    by_layer: dict[str, Tensor]
    whole: dict[str, float]
    residuals: tuple[float, float]

    def __str__(self) -> str:
        width = max(len(name) for name in self.whole)
        lines = [f"{'':{width}}  whole  " + "  ".join(self.layers)]
        for name, cosine in self.whole.items():
            rows = self.by_layer.get(name, torch.ones(len(self.layers)))
            own = "  ".join(f"{float(c):{max(5, len(n))}.3f}" for c, n in zip(rows, self.layers, strict=True))
            lines.append(f"{name:{width}}  {cosine:5.3f}  {own}")
        return "\n".join(lines)


def alignment(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structures: Sequence[str] = ("kfac", "kflr", "kfra"),
    *,
    damping: float = 1e-2,
    weight_decay: float = 0.0,
    inversions: Sequence[str] = ("factored", "exact"),
    options: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
) -> Alignment:
    """Cosines between approximate updates and the exact Gauss-Newton ones, per layer and whole.

    Args:
        model: The network; it is treated in evaluation mode.
        data: One batch: an (x, y) pair, or a small data set.
        likelihood: What the outputs mean.
        structures: Approximations: structures of :class:`~linnet.optim.GaussNewton` with sampled labels, save
            "block" and "full", which are exact, and "kflr", "kfac" with exact outputs.
        damping: τ of the exact matrices and ζ of the approximations, for the mean loss.
        weight_decay: λ.
        inversions: How Kronecker products are damped; ``"kfra"`` stands for the factored form (eq. 4.25) and
            ``"kfra*"`` for the exact one in the result, as in the thesis.
        options: ``expectation``, ``params``, ``output``, ``seed`` and ``steps`` (largest number of CG steps,
            500).
        tolerance: Relative residual at which the conjugate gradients stop.

    Returns:
        The cosines.

    Raises:
        InputError: If a structure or inversion is unknown.
        ModelError: If an approximation cannot take the network.

    Source:
        Botev 2020, section 4.5.2.

    Example:
        >>> from linnet.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> data = torch.randn(20, 3), torch.randn(20, 2)
        >>> found = alignment(net, data, Gaussian(), ["block", "kfra"])
        >>> found.layers, list(found.whole), round(float(found.by_layer["block"][0]), 3)
        (('0', '2'), ['block', 'kfra', 'kfra*', 'block-diagonal'], 1.0)
    """
    if options is not None:
        instance("options", options, Mapping, "a dict of options")
    given = {"expectation": None, "params": None, "output": None, "seed": 0, "steps": 500, **(options or {})}
    _check(given, inversions, damping, weight_decay, tolerance)
    check_likelihood(likelihood)
    _check_words("structures", structures)
    function = Functional(model, given["params"], given["output"])
    x, y = Data.of(data, function).pair
    function.check_runs(take(x, slice(0, 1)))
    study = _Study(function, likelihood, (x, y), damping, weight_decay, given["steps"], tolerance)
    whole, residual = study.full()
    blocks, worst = study.blocks()
    by_layer, cosines = {}, {}
    for structure in structures:
        curvature = _curvature(function, likelihood, structure, (x, y), given["expectation"], given["seed"])
        kronecker = any(part.joined and part.structure != "ekfac" for part in curvature.parts)
        for inversion in inversions if kronecker else inversions[:1]:
            name = f"{structure}*" if kronecker and inversion == "exact" else structure
            decays = dict.fromkeys(function.names, weight_decay)
            update = Undamped(curvature, inversion, False).inverse(damping, decays).times(study.gradient)
            by_layer[name] = torch.tensor(
                [_cosine(update[rows], blocks[rows]) for rows in study.rows], dtype=torch.float64
            )
            cosines[name] = _cosine(update, whole)
    cosines[EXACT] = _cosine(blocks, whole)
    names = tuple(layer.name for layer in study.layers)
    return Alignment(names, by_layer, cosines, (residual, worst))


class _Study:
    """The exact side: the gradient, the layers and the updates of the exact matrices."""

    def __init__(
        self,
        function: Functional,
        likelihood: Likelihood,
        data: tuple[Any, Tensor],
        damping: float,
        weight_decay: float,
        steps: int,
        tolerance: float,
    ) -> None:
        self.shift, self.steps, self.tolerance = damping + weight_decay, steps, tolerance
        self.n = len(data[1])
        batches = Batches(data, function.device, self.n)
        self.product = GaussNewtonOperator(function, batches, likelihood)
        self.layers: tuple[Layer, ...] = layers_of(function, batches.first())
        space = function.space
        self.rows = [
            torch.cat([torch.arange(space.dim)[space.slices[name]] for name in layer.names]).to(
                function.device
            )
            for layer in self.layers
        ]
        parameters = {name: nn.Parameter(t.clone()) for name, t in function.theta.items()}
        network = Network(_Bound(function, parameters), parameters, None, likelihood, False)
        theta = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        self.gradient = network.gradient([data])[1] + weight_decay * theta
        kronecker = _curvature(function, likelihood, "kfac", data, "random-projection", seed=1)
        self.approximate = Undamped(kronecker, "exact", False).inverse(
            damping, dict.fromkeys(function.names, weight_decay)
        )

    def full(self) -> tuple[Tensor, float]:
        """(G + (λ + τ)I)⁻¹∇E and the residual."""
        every = torch.arange(len(self.gradient), device=self.gradient.device)
        return self._solve(_Damped(self.product.mm, len(self.gradient), self), every)

    def blocks(self) -> tuple[Tensor, float]:
        """The same with the exact block of every layer, each solved by itself, and the worst residual."""
        out, worst = torch.zeros_like(self.gradient), 0.0
        for rows in self.rows:

            def product(v: Tensor, rows: Tensor = rows) -> Tensor:
                whole = v.new_zeros(len(self.gradient), v.shape[1])
                whole[rows] = v
                return self.product.mm(whole)[rows]

            out[rows], residual = self._solve(_Damped(product, len(rows), self), rows)
            worst = max(worst, residual)
        return out, worst

    def _solve(self, operator: LinearOperator, rows: Tensor) -> tuple[Tensor, float]:
        """Conjugate gradients, preconditioned by the damped Kronecker factors."""
        b, inverse = self.gradient[rows], _Preconditioner(rows, self)
        solution = cg(operator, b, inverse, tolerance=self.tolerance, max_steps=self.steps)
        assert isinstance(solution.value, Tensor)
        return solution.value, float(solution.residual)


class _Damped(LinearOperator):
    """A product with a sum over N examples as one with the damped mean."""

    def __init__(self, product: Callable[[Tensor], Tensor], size: int, study: _Study) -> None:
        self.product, self.study = product, study
        self.shape, self.space = (size, size), None
        self.dtype, self.device = study.gradient.dtype, study.gradient.device

    def mm(self, v: Tensor) -> Tensor:
        """(G/N + (λ + τ)I) v."""
        return self.product(v) / self.study.n + self.study.shift * v

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


class _Preconditioner(LinearOperator):
    """The damped Kronecker factors' inverse, for some of the parameters."""

    def __init__(self, rows: Tensor, study: _Study) -> None:
        self.rows, self.study = rows, study
        self.shape, self.space = (len(rows), len(rows)), None
        self.dtype, self.device = study.gradient.dtype, study.gradient.device

    def mm(self, v: Tensor) -> Tensor:
        """Its product, column by column."""
        whole = v.new_zeros(len(self.study.gradient), v.shape[1])
        whole[self.rows] = v
        times = self.study.approximate.times
        return torch.stack([times(column) for column in whole.T], 1)[self.rows]

    @property
    def T(self) -> LinearOperator:
        """Itself."""
        return self


class _Bound(nn.Module):
    """The frozen network as a module of given parameters."""

    def __init__(self, function: Functional, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function, self.held = function, dict(parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """F(θ, x)."""
        return self.function(self.held, kwargs or args)


def _curvature(
    function: Functional,
    likelihood: Likelihood,
    structure: str,
    data: tuple[Any, Tensor],
    expectation: str | None,
    seed: int,
) -> Curvature:
    """An approximation of the mean loss' curvature on one batch."""
    settings = Settings(average=1.0, seed=seed)
    kind, usual = PUBLISHED.get(structure, (structure, "mc"))
    running = average_of(function, likelihood, kind, usual if expectation is None else expectation, settings)
    running.add(*data)
    return running.curvature(examples=1.0)


def _cosine(a: Tensor, b: Tensor) -> float:
    """Aᵀb / ‖a‖‖b‖; 0 if one of them is zero."""
    a, b = a.double(), b.double()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else 0.0


def _check_words(name: str, words: Any) -> None:
    """Raise unless it is a list of words, and not empty."""
    if not isinstance(words, list | tuple) or not words or not all(isinstance(one, str) for one in words):
        refuse(name, words, "a list of names, one or more", f'pass {name}=["factored"], or leave it out')


def _check(
    given: Mapping[str, Any],
    inversions: Sequence[str],
    damping: float,
    weight_decay: float,
    tolerance: float,
) -> None:
    """Raise on values that are not listed."""
    unknown = sorted(set(map(str, given)) - {"expectation", "params", "output", "seed", "steps"})
    if unknown:
        raise InputError(
            f"options[{unknown[0]!r}]", expected="expectation, params, output, seed, steps", remedy="drop it"
        )
    _check_words("inversions", inversions)
    if not set(inversions) <= {"factored", "exact"}:
        raise InputError(f"inversions={inversions!r}", expected='"factored" and "exact"', remedy="drop it")
    number("weight_decay", weight_decay, least=0)
    number("damping", damping, above=0, remedy="leave damping= out")
    number("tolerance", tolerance, above=0, remedy="leave tolerance= out")
