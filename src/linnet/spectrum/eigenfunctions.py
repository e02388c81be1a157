"""Eigenfunctions of the tangent kernel, and the concentration of a target on the leading ones.

Mercer's decomposition under the empirical distribution of N examples is

    Θ(x, x') = Σ_j λ_j φ_j(x) φ_j(x'),    E φ_i(x) φ_j(x) = δ_ij        (supplement D.1, eq. 2)

so with K u_j = σ_j u_j, uᵀu = 1: λ_j = σ_j / N and φ_j(x_i) = √N u_ij.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from linnet.errors import InputError, NumericalError
from linnet.linalg.factorize import eigh
from linnet.linalg.operator import LinearOperator
from linnet.linalg.random import Seed, make_generator
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, flag, instance, integer, number, refuse, tensor
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
from linnet.tangent.alike import require_same_arguments, shared_call
from linnet.tangent.batch import Inputs, batch_size, check_examples, check_finite, split
from linnet.tangent.door import taken, tensorize
from linnet.tangent.functional import Functional
from linnet.tangent.gather import gather_data, owned
from linnet.tangent.gram import gram as _gram
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Form
from linnet.tree import map_tensors

# -- kernel eigenpairs -----------------------------------------------------------------------------
# Eigenpairs of a kernel on a data set, with a method that fits the memory.

Method = Literal["auto", "lanczos", "matrix-free", "eigh"]
METHODS = ("auto", "lanczos", "matrix-free", "eigh")
SMALL = 512  # matrices up to this size are decomposed in full by "auto"
PATIENCE = 0.3  # share of the space that Lanczos may fill before "auto" decomposes in full instead


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The method that finds the leading eigenpairs of a kernel.

    Args:
        method: ``"lanczos"`` on the stored Gram matrix, ``"matrix-free"`` (two passes over the data for each
            of k vectors a step), ``"eigh"`` (full decomposition), or ``"auto"``: Lanczos, a full
            decomposition where that is cheaper or Lanczos converges too slowly, matrix-free where the Gram
            matrix does not fit.
        tolerance: Lanczos stops at ‖K u − σ u‖ ≤ tolerance · σ₁; by default 1e-9 in double precision and 2e-6
            in single.
        seed: Generator or seed of the start vectors.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Decomposition(tolerance=1e-4).method
        'auto'
    """

    method: Method = "auto"
    tolerance: float | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        if self.tolerance is not None:
            number("tolerance", self.tolerance, above=0, remedy="leave tolerance= out")
        make_generator(self.seed)


def decomposition(method: str | Decomposition) -> Decomposition:
    """The settings, or those of a method by its name."""
    if isinstance(method, str):
        return Decomposition(method=cast("Method", choice("method", method, METHODS)))
    return instance("method", method, Decomposition, "the name of a method, or a Decomposition")


@dataclass(frozen=True)
class EigenRequest:
    """The kernel to decompose, and the accuracy."""

    function: Functional  # the network
    x: Inputs  # N examples
    form: Form  # which kernel
    rows: int  # R, the size of the kernel's matrix
    k: int  # number of eigenpairs
    how: Decomposition  # the method and its settings


@dataclass(frozen=True)
class Pairs:
    """Leading eigenpairs of K."""

    values: Tensor  # σ (k,), decreasing
    vectors: Tensor  # u (R, k)
    method: str  # how they were found
    residual: float  # the largest ‖K u − σ u‖ / σ₁


def kernel_eigenpairs(
    request: EigenRequest,
    given: Tensor | None = None,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> Pairs:
    """Leading eigenpairs of the kernel."""
    check_count(request.k, request.rows, "the values of a function on x")
    chosen = _choose(request, given, memory)
    if chosen == "matrix-free":
        return _lanczos(request, KernelOperator(request.function, request.x, request.form), None)
    matrix = _matrix(request, given, memory, progress)
    return _decompose(request, matrix, chosen, memory, progress)


def check_count(k: Any, limit: int, what: str) -> None:
    """Raise unless 1 ≤ k ≤ limit."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limit:
        raise InputError(
            f"k is {k!r}",
            expected=f"an integer from 1 to {limit}, {what}",
            remedy="pass a smaller k=, or more examples" if isinstance(k, int) and k > 0 else "leave k= out",
        )


def _choose(request: EigenRequest, given: Tensor | None, memory: str | int | None) -> Method:
    """The method, matrix-free where the Gram matrix would not fit."""
    method = request.how.method
    if method == "matrix-free" and given is not None:
        raise InputError(
            'gram= with method="matrix-free"', "no Gram matrix", 'pass method="lanczos" to use it'
        )
    if method != "auto" or given is not None:
        return method
    rows = request.rows
    size = rows * rows * torch.promote_types(request.function.dtype, torch.float32).itemsize
    fits = size <= 0.8 * parse_bytes(memory, request.function.device)
    return "auto" if fits or 4 * request.k > rows else "matrix-free"


def _matrix(
    request: EigenRequest,
    given: Tensor | None,
    memory: str | int | None,
    progress: bool | None,
) -> Tensor:
    """The Gram matrix (R, R)."""
    if given is None:
        options: dict[str, Any] = {"form": request.form, "memory": memory}
        return flat_gram(_gram(request.function, request.x, progress=progress, **options))
    flat = flat_gram(given)
    if flat.shape[0] != request.rows:
        raise InputError(
            f"gram has shape {tuple(given.shape)}",
            expected=f"{request.rows} rows: one for each value of a function on x",
            remedy=f"compute it on the same x with form={request.form!r}",
        )
    check_symmetry(flat, "gram")
    return flat


def _decompose(
    request: EigenRequest, matrix: Tensor, method: Method, memory: str | int | None, progress: bool | None
) -> Pairs:
    """Leading eigenpairs of a stored matrix."""
    rows = matrix.shape[0]
    if method == "eigh" or (method == "auto" and (rows <= SMALL or 4 * request.k > rows)):
        return _full(request, matrix, memory, progress)
    if method == "lanczos":
        return _lanczos(request, stored_operator(matrix), None)
    steps = max(2, int(PATIENCE * rows) // request.k)
    try:
        return _lanczos(request, stored_operator(matrix), steps)
    except NumericalError:
        return _full(request, matrix, memory, progress)


def _full(request: EigenRequest, matrix: Tensor, memory: str | int | None, progress: bool | None) -> Pairs:
    """All eigenpairs, the leading k of them kept."""
    rows = matrix.shape[0]
    bytes_ = 8 * rows * rows
    budget = parse_bytes(memory, matrix.device)
    items = (("matrix in float64", bytes_), ("eigenvectors", bytes_), ("workspace", 2 * bytes_))
    ways = ['pass method="lanczos" with a smaller k', 'pass form="trace"']
    require(Plan(f"eigendecomposition of {rows} rows", budget, items), ways)
    with waiting(f"eigendecomposition of {rows} rows", enabled=progress):
        values, vectors = eigh(matrix, "the Gram matrix")
    values, vectors = values.flip(0)[: request.k], vectors.flip(1)[:, : request.k]
    first = float(values[0].abs())
    error = float((matrix @ vectors - vectors * values).norm(dim=0).max())
    return Pairs(values, vectors, "eigh", error / first if first else 0.0)


def _lanczos(request: EigenRequest, operator: LinearOperator, steps: int | None) -> Pairs:
    """Leading eigenpairs by block Lanczos."""
    default = 1e-9 if operator.dtype == torch.float64 else 2e-6
    tolerance = default if request.how.tolerance is None else request.how.tolerance
    name = "matrix-free" if isinstance(operator, KernelOperator) else "lanczos"
    solution = eigenpairs(operator, request.k, tolerance=tolerance, max_steps=steps, seed=request.how.seed)
    pairs = solution.require(f"Lanczos for {request.k} eigenfunctions")
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
        k = self.k if k is None else k
        check_count(k, self.k, "the eigenfunctions that were computed")
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

    def binarized(self, index: int, x: Inputs | None = None, labels: str = "signs") -> EigenfunctionTargets:
        """The classification task x ↦ sign(φ_j(x)) as a data set.

        Args:
            index: j, counted from 0.
            x: New points; by default those of the decomposition.
            labels: ``"signs"`` for float −1 and 1, ``"classes"`` for integers 0 and 1.

        Returns:
            A data set of (example, label); zero counts as positive.

        Raises:
            InputError: If the index is out of range or ``labels`` is neither.

        Source:
            Ortiz-Jimenez et al., NeurIPS 2021, supplement B, "Binarization".
        """
        choice("labels", labels, ("signs", "classes"), "leave labels= out for signs")
        integer("index", index, 0, self.k - 1, "compute more eigenfunctions with k=")
        chosen = self._chosen([index])
        phi = (self.vectors[..., chosen] if x is None else self(x, chosen))[..., 0]
        is_positive = phi >= 0
        y = is_positive.long() if labels == "classes" else torch.where(is_positive, 1.0, -1.0).to(phi)
        return EigenfunctionTargets(self.x if x is None else x, y, index)

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


class EigenfunctionTargets(torch.utils.data.Dataset[tuple[Any, Tensor]]):
    """A binary task whose labels are the signs of an eigenfunction.

    Args:
        x: N examples.
        y: Labels (N,) or (N, C).
        index: Which eigenfunction.

    Example:
        >>> data = EigenfunctionTargets(torch.zeros(3, 2), torch.tensor([1.0, -1.0, 1.0]), index=4)
        >>> len(data), data[1][1]
        (3, tensor(-1.))
    """

    def __init__(self, x: Inputs, y: Tensor, index: int) -> None:
        x = tensorize(x)
        check_examples(x)
        tensor("y", y, "labels (N,) or (N, C)", convert=False)
        if y.ndim == 0 or len(y) != batch_size(x):
            refuse("y", y, f"one label for each of the {batch_size(x)} examples", "take both from one split")
        check_finite(y, "y")
        self.x, self.y, self.index = owned(x), y.clone(), integer("index", index, 0)

    def __len__(self) -> int:
        return self.y.shape[0]

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"example {i} of {n}")
        return _example(self.x, i, n), self.y[i]


def _example(x: Inputs, i: int, n: int) -> Any:
    """One example, without the example axis."""
    return map_tensors(lambda t: t[i] if t.ndim and t.shape[0] == n else t, x)


@shared_call("linnet.spectrum.eigenfunctions")
@in_exact_mode
def eigenfunctions(
    lin_or_model: Linearized | nn.Module,
    x: Inputs,
    k: int | None = 50,
    form: Form = "full",
    *,
    method: Method | Decomposition = "auto",
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
            Gram matrix does not fit; or a :class:`Decomposition`, with a tolerance and a seed of its own.
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
    how = decomposition(method)
    parse_bytes(memory)
    if progress is not None:
        flag("progress", progress)
    function = tangent_of(lin_or_model)
    x = taken(function, x)
    check_dense(x)
    q, n = values_of_one(check_inputs(function, x), form), batch_size(x)
    request = EigenRequest(function, x, form, n * q, n * q if k is None else k, how)
    pairs = kernel_eigenpairs(request, gram, memory, progress)
    vectors = _signed(pairs.vectors).reshape(n, *([q] if q > 1 else []), -1)
    if gram is not None:
        _check_kernel_values(pairs.values)
    kept = owned(x, memory)
    return Eigenfunctions(function, kept, pairs.values / n, vectors, form, pairs.method, pairs.residual)


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
    method: Method | Decomposition = "auto",
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
    x, y = gather_data(data, function, memory=memory, keep=False)
    require_same_arguments({"x": x, "y": y})
    function_values(y, check_inputs(function, x), form, function.dtype)  # before the long computation
    found = eigenfunctions(Linearized(function), x, k, form, method=method, gram=gram, memory=memory)
    return found.energy_concentration(y, squared=squared)


def _signed(vectors: Tensor) -> Tensor:
    """Each column with its entry of largest size positive."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors)
