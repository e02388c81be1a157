"""Neural anisotropy directions of a network.

They are the right singular vectors of the mixed derivative ∇²_{x,θ} f, n × d for n parameters and d
input numbers: for standard normal inputs the alignment of the linear predictor u·x with the kernel is

    α(u·x) = ‖E ∇²_{x,θ} f₀(x) u‖²                                       (theorem 1, supplement D.2, eq. 7)

The matrix is never formed. M u differentiates ⟨∇_x f, u⟩ in the weights, Mᵀw differentiates ⟨∇_θ f, w⟩ in
the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.linalg.factorize import signed
from linnet.linalg.operator import Bidirectional
from linnet.linalg.random import Seed, normal
from linnet.params import choice, integer
from linnet.shown import Record
from linnet.solvers.lanczos import eigenpairs
from linnet.spectrum.kernel_matrix import KERNELS, tangent_of
from linnet.tangent.batch import EMPTY, check_finite, require_dense, split
from linnet.tangent.functional import Functional
from linnet.tangent.gradients import pulled_back
from linnet.tangent.jacobian import vjp_columns
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Form

BLOCK = 64  # examples of an average differentiated at once
COLUMNS = 16  # directions multiplied at once
STEP = 1e-8  # of differences: so short that next to no unit of a wide network crosses a kink
WRONG = 0.5  # relative difference beyond which a derivative is not one


@dataclass(frozen=True, repr=False)
class AnisotropyDirections(Record):
    """Neural anisotropy directions, strongest first.

    Args:
        singular_values: s_j (k,); the alignment α of the linear predictor u_j · x is s_j².
        directions: u_j (k, *input shape), orthonormal; each one's entry of largest size is positive.
            For vector-valued predictors (``form="full"``) (k, C, *input shape).
        residual: The largest ‖MᵀM u − s² u‖ / s₁².
        mismatch: How far M v is from the central difference of gradients along a random v, relative to its
            norm. Near zero where the network is smooth; of order one at a kink (ReLU or ties in
            max-pooling at the origin), where the directions depend on how torch breaks the tie. NaN if the
            network does not run in double precision, in which it is measured.

    Example:
        >>> one = torch.zeros(1, 3, 8, 8)
        >>> one[0, 0, 0, 0] = 1.0
        >>> AnisotropyDirections(torch.ones(1), one, 0.0, 0.0).fourier_magnitudes()[0, 0, 3, 5].item()
        1.0
    """

    singular_values: Tensor
    directions: Tensor
    residual: float
    mismatch: float

    def images(self) -> Tensor:
        """The directions as pictures.

        Returns:
            The directions (k, *input shape), each scaled to [0, 1] with zero at 0.5.
        """
        axes = tuple(range(1, self.directions.ndim))
        return 0.5 + self.directions / (2 * self.directions.abs().amax(axes, keepdim=True))

    def fourier_magnitudes(self) -> Tensor:
        """Magnitudes of the Fourier transform over the last two axes, frequency zero in the middle.

        Returns:
            Magnitudes, (k, *input shape).

        Raises:
            InputError: If inputs are no images.
        """
        if self.directions.ndim < 3:
            raise InputError(
                f"directions have shape {tuple(self.directions.shape)}",
                expected="inputs with two axes or more, such as (channels, height, width)",
                remedy="reshape .directions to images first",
            )
        found: Tensor = torch.fft.fftshift(torch.fft.fft2(self.directions), dim=(-2, -1)).abs()
        return found


@in_exact_mode
def anisotropy_directions(
    model: Linearized | nn.Module,
    at: Tensor,
    k: int = 10,
    form: Form = "trace",
    *,
    tolerance: float | None = None,
    max_steps: int | None = 500,
    seed: Seed = 0,
) -> AnisotropyDirections:
    """Neural anisotropy directions (NADs): leading singular vectors of the mixed derivative ∇²_{x,θ} f₀.

    At a point (the origin in Ortiz-Jimenez et al. 2020), or averaged over data. Block Lanczos on MᵀM, then a
    singular value decomposition of M on the directions found, so singular values keep their full
    precision.

    Args:
        model: A network or a linearization; smooth activations (GELU, tanh) are wanted, since those with
            kinks have no derivative exactly at the origin (see ``.mismatch``).
        at: One input without the example axis, or a batch (N, *input shape) over which the derivative is
            averaged.
        k: How many directions.
        form: For a network with C outputs, ``"trace"`` stacks the derivatives of the outputs, so that
            s² = Σ_c α_c; ``"sum"`` takes the summed output; ``"full"`` takes vector-valued linear
            predictors, whose directions are (C, *input shape). With one output all three agree.
        tolerance: Lanczos stops at ‖MᵀM u − s² u‖ ≤ tolerance · s₁²; by default 1e-10 in double precision
            and 1e-5 in single.
        max_steps: Largest number of steps, each with k products with M and Mᵀ.
        seed: Generator or seed of the start vectors.

    Returns:
        Singular values and directions.

    Raises:
        InputError: If ``at`` is empty or no float tensor, or k is more than the numbers of an input.
        ModelError: If the network has no mixed second derivative, or it vanishes here.
        NumericalError: If Lanczos does not converge.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, theorem 1 and supplement C.2;
        Ortiz-Jimenez, Modas, Moosavi-Dezfooli, Frossard, "Neural Anisotropy Directions", NeurIPS 2020.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
        >>> found = anisotropy_directions(net, torch.zeros(6), k=3)
        >>> found.singular_values.shape, found.directions.shape
        (torch.Size([3]), torch.Size([3, 6]))
    """
    choice("form", form, KERNELS)
    function = tangent_of(model)
    points = _points(function, at)
    mixed = MixedDerivative(function, points, form)
    columns = mixed.shape[1]
    k = integer("k", k, 1, columns, f"an input has {columns} numbers: pass k={min(columns, 5)}")
    mixed.check()
    mismatch = _mismatch(mixed)
    default = 1e-10 if mixed.dtype == torch.float64 else 1e-5
    solution = eigenpairs(
        mixed.T @ mixed,
        k,
        tolerance=default if tolerance is None else tolerance,
        max_steps=max_steps,
        seed=seed,
    )
    found = solution.require(f"Lanczos for {k} anisotropy directions").vectors
    # M V = U S Wᵀ: singular values of M itself on the space that was found, and its own basis V W
    _, values, w = torch.linalg.svd(mixed.mm(found), full_matrices=False)
    directions = signed(found @ w.T).T
    copies = [mixed.outputs] if form == "full" and mixed.outputs > 1 else []
    shaped = directions.reshape(k, *copies, *points.shape[1:])
    return AnisotropyDirections(values, shaped, solution.residual, mismatch)


class MixedDerivative(Bidirectional):
    """M = E ∇²_{x,θ} f₀(x), from input space to parameter space, as products in both directions."""

    # points (N, *shape)

    def __init__(self, function: Functional, points: Tensor, kind: Form) -> None:
        self.function, self.points, self.kind = function, points, kind
        self.outputs = function.check_runs(points[:1]).numel()
        self.width = points[0].numel()
        p = function.space.dim
        rows = self.outputs * p if kind == "trace" else p
        self.shape = (rows, self.outputs * self.width if kind == "full" else self.width)
        self.dtype, self.device, self.space = function.dtype, function.device, None

    def mm(self, v: Tensor) -> Tensor:
        """M v, (D, K) to (P, K)."""
        return torch.cat([self._forward(part) for part in v.split(COLUMNS, dim=1)], 1)

    def transposed_mm(self, w: Tensor) -> Tensor:
        """Mᵀw, (P, K) to (D, K)."""
        return torch.cat([self._backward(part) for part in w.split(COLUMNS, dim=1)], 1)

    def check(self) -> None:
        """Raise if the derivative does not exist, or vanishes on a random vector."""
        v = normal((self.shape[1], 1), 0, self.dtype, self.device)
        name = f"model ({type(self.function.model).__name__})"
        try:
            product = self.mm(v)
            self.transposed_mm(product)
        except RuntimeError as error:
            _refuse(name, str(error).strip().splitlines()[0], error)
        if not bool(product.isfinite().all()) or not bool(product.any()):
            state = "vanishes" if bool(product.isfinite().all()) else "is not finite"
            raise ModelError(
                f"the mixed derivative of {name} in input and weights {state} at the given point",
                expected="a derivative that is finite and not zero",
                remedy="use smooth activations such as GELU, or take at= away from a kink",
            )

    def mismatch(self) -> float:
        """Distance of M v from central differences of gradients, for a random v, in double precision."""
        v = normal((self.shape[1], 1), 0, self.dtype, self.device)
        n = self.points.shape[0]
        parts = [v.new_zeros(self.function.space.dim) for _ in range(self.outputs)]
        for points in split(self.points, BLOCK):
            for c in range(self.outputs):
                u = v.new_zeros(points.shape[0], self.outputs)
                u[:, c] = 1 / (2 * STEP * n)
                shift = STEP * self._column_block(v, c).reshape(1, *points.shape[1:])
                parts[c] += vjp_columns(self.function, points + shift, u)
                parts[c] -= vjp_columns(self.function, points - shift, u)
        difference = torch.cat(parts) if self.kind == "trace" else torch.stack(parts).sum(0)
        product = self.mv(v[:, 0])
        return float((product - difference).norm() / product.norm())

    @in_exact_mode
    def _forward(self, v: Tensor) -> Tensor:
        """M v for few columns: the derivative of ⟨∇_x f_c, v⟩ in the weights."""
        k = v.shape[1]
        parts = [v.new_zeros(self.function.space.dim, k) for _ in range(self._blocks)]
        for points in split(self.points, BLOCK):
            with torch.enable_grad():
                x, leaves, values = self._run(points)
            for c, f in enumerate(values):
                (g,) = torch.autograd.grad(f, x, create_graph=True, allow_unused=True, retain_graph=True)
                u = self._column_block(v, c).T.reshape(k, 1, *points.shape[1:]).expand(k, *points.shape)
                target = c if self.kind == "trace" else 0
                parts[target] += pulled_back(g, list(leaves.values()), u, keep=True).T
        return torch.cat(parts) / self.points.shape[0]

    @in_exact_mode
    def _backward(self, w: Tensor) -> Tensor:
        """Mᵀw for few columns: the derivative of ⟨∇_θ f_c, w⟩ in the input."""
        k, p = w.shape[1], self.function.space.dim
        parts = [w.new_zeros(self.width, k) for _ in range(self.outputs if self.kind == "full" else 1)]
        for points in split(self.points, BLOCK):
            with torch.enable_grad():
                x, leaves, values = self._run(points)
            for c, f in enumerate(values):
                own = w[c * p : (c + 1) * p] if self.kind == "trace" else w
                directions = self.function.space.to_params(own)
                gradients = torch.autograd.grad(
                    f, list(leaves.values()), create_graph=True, allow_unused=True, retain_graph=True
                )
                target = c if self.kind == "full" else 0
                for g, direction in zip(gradients, directions.values(), strict=True):
                    pulled = pulled_back(g, [x], direction.movedim(-1, 0), keep=True)
                    parts[target] += pulled.reshape(k, points.shape[0], -1).sum(1).T
        return torch.cat(parts) / self.points.shape[0]

    @property
    def _blocks(self) -> int:
        """Blocks of P rows."""
        return self.outputs if self.kind == "trace" else 1

    def _column_block(self, v: Tensor, c: int) -> Tensor:
        """The part of v that meets output c, (D, K)."""
        return v[c * self.width : (c + 1) * self.width] if self.kind == "full" else v

    def _run(self, points: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """Inputs and weights as leaves, and the outputs to differentiate, each summed over examples."""
        x = points.detach().clone().requires_grad_()
        leaves = {name: t.detach().requires_grad_() for name, t in self.function.theta.items()}
        values = self.function.flat(leaves, x).sum(0)
        if not values.requires_grad:  # the outputs depend on nothing: their derivatives are zero
            values = values + 0 * x.sum()
        return x, leaves, [values.sum()] if self.kind == "sum" else list(values.unbind())


def _mismatch(mixed: MixedDerivative) -> float:
    """The mismatch at the points, in double precision; NaN where the network does not run in it."""
    twin = mixed.function.copy()
    device = torch.device("cpu") if mixed.device.type == "mps" else mixed.device
    twin.model = twin.model.to(device, torch.float64)
    points = mixed.points.to(device, torch.float64)
    try:
        found = MixedDerivative(twin, points, mixed.kind).mismatch()
        if found <= WRONG:
            return found
        # a kink, or wrong everywhere? Torch drops the second derivative of some operations without a word.
        noise = normal(points[:1].shape, 1, points.dtype, device)
        elsewhere = MixedDerivative(twin, points[:1] + noise, mixed.kind).mismatch()
    except (RuntimeError, ModelError):
        return math.nan
    if elsewhere > WRONG:
        name = f"model ({type(twin.model).__name__})"
        _refuse(name, "what torch returns is not the derivative of its gradient")
    return found


def _refuse(name: str, why: str, cause: Exception | None = None) -> NoReturn:
    """Raise for a network that torch cannot differentiate twice."""
    raise ModelError(
        f"{name} has no second derivative: {why}",
        expected="a network that torch can differentiate twice",
        remedy="replace the operation that has no second derivative",
    ) from cause


def _points(function: Functional, at: Any) -> Tensor:
    """The point or points as a batch (N, *input shape)."""
    if not isinstance(at, Tensor) or not at.is_floating_point() or at.ndim == 0:
        kind = (
            f"a tensor of type {at.dtype} and shape {tuple(at.shape)}"
            if isinstance(at, Tensor)
            else type(at).__name__
        )
        raise InputError(
            f"at is {kind}",
            expected="one float tensor: an input, or a batch of inputs",
            remedy="pass x.float(); directions exist for real inputs only, not for token ids",
        )
    if at.numel() == 0:
        raise InputError(f"at is empty, of shape {tuple(at.shape)}", "at least one input", EMPTY)
    require_dense(at, "at")
    check_finite(at, "at")
    one: Tensor = at.to(function.device, function.dtype)
    # a vector is one input if the network takes it so; anything else is a batch if the network takes it so
    candidates = (one[None], one) if one.ndim == 1 else (one, one[None])
    failures: list[ModelError] = []
    for points in candidates:
        try:
            function.check_runs(points[:1])
            function.check_runs(points[:2])
        except ModelError as failure:
            failures.append(failure)
        else:
            return points
    raise failures[0]
