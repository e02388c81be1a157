"""Eigenfunctions of the tangent kernel, and the concentration of a target on the leading ones.

Mercer's decomposition under the empirical distribution of N examples is

    Θ(x, x') = Σ_j λ_j φ_j(x) φ_j(x'),    E φ_i(x) φ_j(x) = δ_ij        (supplement D.1, eq. 2)

so with K u_j = σ_j u_j, uᵀu = 1: λ_j = σ_j / N and φ_j(x_i) = √N u_ij.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linnet.distributed import shared_call
from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import eigh, signed
from linnet.linalg.operator import LinearOperator
from linnet.memory import Plan, parse_bytes, require
from linnet.number_types import wide_type
from linnet.params import choice, flag, integer, optional, tensor
from linnet.progress import waiting
from linnet.shown import Record
from linnet.solvers.lanczos import eigenpairs
from linnet.spectrum.kernel_matrix import (
    FunctionValues,
    KernelOperator,
    check_dense,
    check_inputs,
    check_kernel,
    check_symmetry,
    flat_gram,
    function_values,
    stored_operator,
    tangent_of,
    values_of_one,
)
from linnet.spectrum.plots import EigenfunctionPlots
from linnet.tangent.batch import Inputs, batch_size, check_finite, split
from linnet.tangent.data import Data, owned
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram as _gram
from linnet.tangent.inputs import taken
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Form

Method = Literal["auto", "lanczos", "matrix-free", "eigh"]
METHODS = ("auto", "lanczos", "matrix-free", "eigh")
SMALL = 512  # matrices up to this size are decomposed in full by "auto"
PATIENCE = 0.3  # share of the space that Lanczos may fill before "auto" decomposes in full instead
FINE, COARSE = 1e-9, 2e-6  # Lanczos stops at ‖K u − σ u‖ ≤ this · σ₁, in double and in single precision


@dataclass(frozen=True)
class Pairs:
    """Leading eigenpairs of K."""

    values: Tensor  # σ (k,), decreasing
    vectors: Tensor  # u (R, k)
    method: str  # how they were found
    residual: float  # the largest ‖K u − σ u‖ / σ₁


def _decompose(
    matrix: Tensor, k: int, method: Method, memory: str | int | None, progress: bool | None
) -> Pairs:
    """Leading eigenpairs of a stored matrix."""
    rows = matrix.shape[0]
    if method == "eigh" or (method == "auto" and (rows <= SMALL or 4 * k > rows)):
        return _full(matrix, k, memory, progress)
    if method == "lanczos":
        return _lanczos(stored_operator(matrix), k)
    try:
        return _lanczos(stored_operator(matrix), k, max(2, int(PATIENCE * rows) // k))
    except NumericalError:
        return _full(matrix, k, memory, progress)


def _full(matrix: Tensor, k: int, memory: str | int | None, progress: bool | None) -> Pairs:
    """All eigenpairs, the leading k of them kept."""
    rows = matrix.shape[0]
    bytes_ = 8 * rows * rows
    budget = parse_bytes(memory, matrix.device)
    items = (("matrix in float64", bytes_), ("eigenvectors", bytes_), ("workspace", 2 * bytes_))
    ways = ['pass method="lanczos" with a smaller k', 'pass form="trace"']
    require(Plan(f"eigendecomposition of {rows} rows", budget, items), ways)
    with waiting(f"eigendecomposition of {rows} rows", enabled=progress):
        values, vectors = eigh(matrix, "the Gram matrix")
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    first = float(values[0].abs())
    error = float((matrix @ vectors - vectors * values).norm(dim=0).max())
    return Pairs(values, vectors, "eigh", error / first if first else 0.0)


def _lanczos(operator: LinearOperator, k: int, steps: int | None = None) -> Pairs:
    """Leading eigenpairs by block Lanczos."""
    tolerance = FINE if operator.dtype == torch.float64 else COARSE
    solution = eigenpairs(operator, k, tolerance=tolerance, max_steps=steps, seed=0)
    pairs = solution.require(f"Lanczos for {k} eigenfunctions")
    name = "matrix-free" if isinstance(operator, KernelOperator) else "lanczos"
    return Pairs(pairs.values, pairs.vectors, name, solution.residual)


INDEFINITE = 1e-3  # share of the largest eigenvalue below zero from which a matrix is no kernel's


@dataclass(frozen=True, repr=False)
class Eigenfunctions(Record):
    """Leading eigenfunctions φ_j of the tangent kernel on a data set.

    Args:
        function: The network.
        x: The N examples.
        values: λ_j (k,), decreasing: eigenvalues of K/N; times N they are those of K.
        vectors: u_j, orthonormal: (N, k), or (N, C, k) for vector-valued functions.
        form: Which kernel.
        method: How they were found.
        residual: The largest ‖K u − σ u‖ / σ₁.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> found = eigenfunctions(net, torch.randn(20, 2), k=3)
        >>> torch.allclose(found(found.x), found.functions, atol=1e-3)
        True
    """

    function: Functional
    x: Inputs
    values: Tensor
    vectors: Tensor
    form: Form
    method: str
    residual: float

    def _shown(self) -> dict[str, Any]:
        known = {"k": self.k, "examples": batch_size(self.x), "method": self.method}
        return {**known, "residual": self.residual, "values": self.values}

    @property
    def plot(self) -> EigenfunctionPlots:
        """Plots, which take matplotlib axes: ``functions.plot.energy(y, ax)``."""
        return EigenfunctionPlots(self)

    @property
    def k(self) -> int:
        """Number of eigenfunctions."""
        return self.values.shape[0]

    @property
    def functions(self) -> Tensor:
        """φ_j(x_i) = √N u_ij, of mean square one; (N, k), or (N, C, k)."""
        return self.vectors * math.sqrt(self.vectors.shape[0])

    @property
    def _flat(self) -> Tensor:
        """u_j, (R, k)."""
        return self.vectors.reshape(-1, self.k)

    def __call__(
        self,
        x: Inputs,
        indices: Sequence[int] | Tensor | None = None,
        *,
        memory: str | int | None = None,
    ) -> Tensor:
        """φ_j at new points by Nyström's extension, φ_j(x) = Σ_i Θ(x, x_i) φ_j(x_i) / (N λ_j).

        Args:
            x: M examples.
            indices: Which eigenfunctions, counted from 0; by default all.
            memory: Budget of a block of the kernel between new and old points.

        Returns:
            (M, k), or (M, C, k); at the old points the eigenfunctions themselves.

        Raises:
            InputError: If an index is out of range.
            DataError: If x is empty.
            NumericalError: If an eigenvalue is zero, so that there is no extension.
        """
        chosen = self._chosen(indices)
        x = taken(self.function, x)
        check_dense(x)
        check_inputs(self.function, x)
        n = self.vectors.shape[0]
        weights = self._flat[:, chosen] * (math.sqrt(n) / (n * self._positive(chosen)))
        size = weights.shape[0] * values_of_one(tuple(self.vectors.shape[1:-1]), self.form)
        budget = parse_bytes(memory, self.function.device)
        block = max(1, int(0.25 * budget) // (size * weights.dtype.itemsize))
        parts = []
        for part in split(x, block):
            cross = _gram(self.function, part, self.x, form=self.form, memory=memory, progress=False)
            parts.append(cross.reshape(-1, weights.shape[0]) @ weights.to(cross))
        return torch.cat(parts).reshape(batch_size(x), *self.vectors.shape[1:-1], weights.shape[1])

    def energy_concentration(self, y: Tensor, k: int | None = None, squared: bool = False) -> Tensor:
        """‖Φ_k f‖₂ / ‖f‖₂, the share of a target's norm on the first k eigenvectors.

        Args:
            y: Targets (N,) or (N, T), as for ``spectrum.alignment``.
            k: How many eigenvectors; by default all that are here.
            squared: The share of the squared norm instead.

        Returns:
            Between 0 and 1: () for one target, or (T,).

        Raises:
            DataError: If y holds NaN or infinite values.
            InputError: If k is out of range, or a target is zero.
        """
        flag("squared", squared)
        k = integer("k", self.k if k is None else k, 1, self.k, "compute more eigenfunctions with k=")
        values = self._targets(y)
        flat = values.flat
        # the eigenvectors are orthonormal, so the projection's norm is that of its coefficients
        share = (self._flat[:, :k].T @ flat).norm(dim=0) / flat.norm(dim=0)
        if not torch.isfinite(share).all():
            raise InputError("y holds a target that is zero", "targets with a norm", "leave that target out")
        share = share.clamp(max=1.0)
        return values.shaped(share.square() if squared else share)

    def kernel_norm(self, y: Tensor) -> Tensor:
        """‖f‖²_Θ = Σ_j (E φ_j f)² / λ_j (supplement D.1, eq. 3), on all N·Q eigenfunctions.

        Args:
            y: Targets (N,) or (N, T), as for ``spectrum.alignment``.

        Returns:
            () for one target, or (T,); infinite for a target outside the kernel's range. Equal to fᵀK⁺f.

        Raises:
            InputError: If the decomposition is not full.
        """
        if self.k != self._flat.shape[0]:
            raise InputError(
                f"k is {self.k}: {self._flat.shape[0] - self.k} eigenfunctions are missing",
                expected="a full decomposition",
                remedy="pass k=None to linnet.spectrum.eigenfunctions, or take spectrum.kernel_norm_bound",
            )
        values = self._targets(y)
        squares = (self._flat.T @ values.flat).square()  # (√N E φ_j f)²
        is_zero = self.values <= self._floor()
        outside = squares[is_zero].sum(0) > 1e3 * torch.finfo(squares.dtype).eps * squares.sum(0)
        sigma = self.values[~is_zero, None] * self.vectors.shape[0]
        norm = (squares[~is_zero] / sigma).sum(0)
        return values.shaped(torch.where(outside, torch.inf, norm))

    def binarized(self, index: int, x: Inputs | None = None) -> Tensor:
        """The classification task x ↦ sign(φ_j(x)).

        Args:
            index: j, counted from 0.
            x: New points; by default those of the decomposition.

        Returns:
            Labels −1 and 1, (N,) or (N, C); zero counts as positive.

        Raises:
            InputError: If the index is out of range.

        Source:
            Ortiz-Jimenez et al., NeurIPS 2021, supplement B, "Binarization".
        """
        integer("index", index, 0, self.k - 1, "compute more eigenfunctions with k=")
        phi = (self.vectors[..., [index]] if x is None else self(x, [index]))[..., 0]
        return torch.where(phi >= 0, 1.0, -1.0).to(phi)

    def _targets(self, y: Tensor) -> FunctionValues:
        """Targets as functions on the examples."""
        n, shape = self.vectors.shape[0], tuple(self.vectors.shape[1:-1]) or (1,)
        y = tensor("y", y, "targets of the examples").to(self.vectors.device)
        if y.ndim == 0 or y.shape[0] != n:
            raise InputError(
                f"y has shape {tuple(y.shape)}",
                expected=f"one target for each of the {n} examples",
                remedy="pass the targets of the examples that the eigenfunctions were computed on",
            )
        check_finite(y, "y")
        return function_values(y, shape, self.form, self.vectors.dtype)

    def _chosen(self, indices: Sequence[int] | Tensor | None) -> Tensor:
        """Indices as a tensor, checked."""
        expected = f"integers from 0 to {self.k - 1}"
        chosen = torch.arange(self.k) if indices is None else tensor("indices", indices, expected).flatten()
        wrong = not chosen.numel() or chosen.is_floating_point() or chosen.dtype == torch.bool
        wrong = wrong or bool(((chosen < 0) | (chosen >= self.k)).any())
        if wrong:
            raise InputError(
                f"indices holds {chosen.tolist()}",
                expected=expected,
                remedy="compute more eigenfunctions with k=",
            )
        return chosen.to(self.vectors.device)

    def _floor(self) -> float:
        """The rounding error of an eigenvalue that is zero."""
        rows = self._flat.shape[0]
        return float(self.values.abs().max()) * rows * torch.finfo(self.values.dtype).eps

    def _positive(self, chosen: Tensor) -> Tensor:
        """λ of the chosen eigenfunctions, none of them zero."""
        values = self.values[chosen]
        bad = (values <= self._floor()).nonzero()
        if bad.numel():
            j = int(bad[0, 0])
            raise NumericalError(
                f"eigenvalue {int(chosen[j])} is zero up to rounding ({float(values[j]):.2g})",
                expected="positive eigenvalues: eigenfunctions of others have no extension",
                remedy="pass indices= of the leading ones",
            )
        return values


@shared_call("linnet.spectrum.eigenfunctions")
@in_exact_mode
def eigenfunctions(
    lin_or_model: Linearized | nn.Module,
    x: Inputs,
    k: int | None = 50,
    form: Form = "full",
    *,
    method: Method = "auto",
    gram: Tensor | None = None,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> Eigenfunctions:
    """The leading eigenfunctions of the tangent kernel, from eigenvectors of its Gram matrix.

    Args:
        lin_or_model: A network, or a linearization.
        x: N examples.
        k: How many; None for all (N, or N·C for ``"full"``).
        form: ``"full"`` for vector-valued functions of C outputs, ``"trace"`` or ``"sum"`` for scalar
            ones. With one output all three agree and functions are scalar.
        method: ``"lanczos"`` on the stored Gram matrix, ``"matrix-free"`` (two passes over the data for
            each of k vectors a step), ``"eigh"`` (full decomposition), or ``"auto"``: Lanczos, a full
            decomposition where that is cheaper or Lanczos converges too slowly, matrix-free where the
            Gram matrix does not fit.
        gram: The Gram matrix, where it is known already: (N, N) or (N, C, N, C). One that is kept in a file
            comes from :func:`gram`.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        λ_j and φ_j, largest first; each vector's entry of largest size is positive.

    Raises:
        InputError: If k is out of range, or an argument has a value that is not listed.
        MemoryBudgetError: If the decomposition does not fit.
        NumericalError: If Lanczos was requested and does not converge, or ``gram`` is no kernel's: one of its
            k leading eigenvalues is negative.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, supplement B, "Eigendecompositions".

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> eigenfunctions(net, torch.randn(20, 2), k=3).functions.shape
        torch.Size([20, 3])
    """
    check_kernel(form)
    choice("method", method, METHODS)
    parse_bytes(memory)
    optional(flag, "progress", progress)
    function = tangent_of(lin_or_model)
    x = taken(function, x)
    check_dense(x)
    q, n = values_of_one(check_inputs(function, x), form), batch_size(x)
    rows = n * q
    k = integer("k", rows if k is None else k, 1, rows, f"pass a smaller k=, of {rows} values on x")
    if gram is not None:
        pairs = _decompose(_given(gram, rows, form, method), k, method, memory, progress)
        _check_kernel_values(pairs.values)
    elif method == "matrix-free" or (method == "auto" and not _fits(function, rows, k, memory)):
        pairs = _lanczos(KernelOperator(function, x, form), k)
    else:
        matrix = flat_gram(_gram(function, x, form=form, memory=memory, progress=progress))
        pairs = _decompose(matrix, k, method, memory, progress)
    vectors = signed(pairs.vectors).reshape(n, *([q] if q > 1 else []), -1)
    kept = owned(x, memory)
    return Eigenfunctions(function, kept, pairs.values / n, vectors, form, pairs.method, pairs.residual)


def _fits(function: Functional, rows: int, k: int, memory: str | int | None) -> bool:
    """Whether the Gram matrix fits the memory, or is needed whole."""
    size = rows * rows * wide_type(function.dtype).itemsize
    return size <= 0.8 * parse_bytes(memory, function.device) or 4 * k > rows


def _given(gram: Tensor, rows: int, form: Form, method: Method) -> Tensor:
    """A Gram matrix of the user's own as (R, R)."""
    if method == "matrix-free":
        raise InputError(
            'gram= with method="matrix-free"', "no Gram matrix", 'pass method="lanczos" to use it'
        )
    flat = flat_gram(gram)
    if flat.shape[0] != rows:
        raise InputError(
            f"gram has shape {tuple(gram.shape)}",
            expected=f"{rows} rows: one for each value of a function on x",
            remedy=f"compute it on the same x with form={form!r}",
        )
    check_symmetry(flat, "gram")
    return flat


def _check_kernel_values(values: Tensor) -> None:
    """Raise if eigenvalues are further below zero than rounding, Lanczos and float32 kernels explain."""
    smallest = float(values.min())
    if smallest < -INDEFINITE * float(values.abs().max()):
        raise NumericalError(
            f"gram is not positive semi-definite: it has the eigenvalue {smallest:.3g}",
            expected="the Gram matrix of a kernel, without negative eigenvalues",
            remedy="pass what linnet.spectrum.gram returned, or leave gram= out",
        )


@shared_call("linnet.spectrum.energy_concentration")
@in_exact_mode
def energy_concentration(
    model: Linearized | nn.Module,
    data: Any,
    k: int = 50,
    form: Form = "full",
    *,
    squared: bool = False,
    method: Method = "auto",
    gram: Tensor | None = None,
    memory: str | int | None = None,
) -> Tensor:
    """Energy concentration ‖Φ_k f‖₂ / ‖f‖₂ of targets on the top k eigenvectors of the Gram matrix.

    Args:
        model: A network, or a linearization.
        data: Inputs and targets, as for ``alignment``.
        k: Number of eigenvectors.
        form: Which kernel, as for ``alignment``.
        squared: The share of the squared norm instead; Ortiz-Jimenez et al. have the ratio of norms.
        method: As for ``eigenfunctions``.
        gram: The Gram matrix (N, N), where it is known already.
        memory: Budget such as ``"4GB"``; by default half of what is available.

    Returns:
        Between 0 and 1: () for one target, or (T,).

    Raises:
        DataError: If the data are empty, not finite or out of range.
        InputError: If k is more than the rows of the Gram matrix, or targets do not fit.
        MemoryBudgetError: If the decomposition does not fit.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, supplement E.2, table 1.

    Example:
        >>> x = torch.randn(20, 2)
        >>> net = nn.Linear(2, 1)
        >>> round(float(energy_concentration(net, (x, x[:, 0]), k=3)), 3)
        1.0
    """
    check_kernel(form)
    function = tangent_of(model)
    x, y = Data.of(data, function, memory=memory, keep=False).pair
    function_values(y, check_inputs(function, x), form, function.dtype)  # before the long computation
    found = eigenfunctions(Linearized(function), x, k, form, method=method, gram=gram, memory=memory)
    return found.energy_concentration(y, squared=squared)
