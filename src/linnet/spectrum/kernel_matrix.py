"""The kernel of a data set as a matrix in memory, in a file, or as an operator.

Everything spectral starts from one of three things: a network and inputs, a Gram matrix that was
computed before, or any symmetric operator. Here each becomes a matrix or a ``LinearOperator``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from linnet.distributed import shared_call
from linnet.errors import DataError, InputError, NumericalError
from linnet.linalg.operator import FunctionOperator, LinearOperator, SymmetricOperator
from linnet.params import choice
from linnet.tangent.batch import Inputs, batch_size, check_examples, require_dense, take
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram as _gram
from linnet.tangent.gram import gram_part as _gram_part
from linnet.tangent.inputs import taken, tensorize
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Form
from linnet.tree import tensors_in

KERNELS = ("full", "trace", "sum")  # "diagonal" is C kernels, not one
COLUMNS = 8  # vectors in parameter space held at once
LOOKED_AT = 64  # rows of a given matrix that are compared with its columns

Source: TypeAlias = Linearized | nn.Module | Tensor | LinearOperator


@shared_call("linnet.spectrum.gram")
@in_exact_mode
def gram(
    lin_or_model: Linearized | nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    form: Form = "full",
    *,
    memory: str | int | None = None,
    file: str | Path | None = None,
    accumulate: str | None = None,
    progress: bool | None = None,
) -> Tensor:
    """The Gram matrix of the tangent kernel, in tiles under a memory budget.

    Args:
        lin_or_model: A linearized network, or a network that is linearized in all its parameters.
        x: N examples.
        x2: M examples; by default ``x``, and the result is exactly symmetric.
        form: ``"full"`` (N, C, M, C), ``"trace"`` (N, M), ``"diagonal"`` (N, M, C) or ``"sum"`` (N, M).
        memory: Budget such as ``"4GB"``; by default half of what is available.
        file: A ``.npy`` file for the result. An interrupted run resumes from it, and a finished file of the
            same weights, examples and settings is taken as it is; any other is refused.
        accumulate: ``"float64"`` keeps sums over parameters in double precision.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The Gram matrix, (N, M) or as ``form`` says, memory-mapped if ``file`` is given.

    Raises:
        InputError: If an argument has a value that is not listed, or the file is that of another run.
        MemoryBudgetError: If not even the smallest tiles fit.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, supplement B.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> gram(net, torch.ones(4, 2), form="trace").shape
        torch.Size([4, 4])
    """
    function = tangent_of(lin_or_model)
    x, x2 = taken(function, x), taken(function, x2, "x2")
    check_dense(x, x2)
    return _gram(
        function,
        x,
        x2,
        form=form,
        memory=memory,
        file=file,
        accumulate=accumulate,
        progress=progress,
    )


@in_exact_mode
def gram_part(
    lin_or_model: Linearized | nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    form: Form = "full",
    *,
    file: str | Path,
    part: tuple[int, int],
    memory: str | int | None = None,
    accumulate: str | None = None,
) -> Tensor | None:
    """One part of a Gram matrix, such as a task of an array job; all parts write to one file.

    Parts run at any time, on one machine or several that share the folder, and need no process group. Each
    has about as much to do as the others and keeps a record of what it has finished: a part that was killed
    goes on if it is started again, and :func:`gram` with the same ``file`` does what is missing of all.

    Args:
        lin_or_model: A linearized network, or a network that is linearized in all its parameters.
        x: N examples.
        x2: M examples; by default ``x``, and the result is exactly symmetric.
        form: As for :func:`gram`.
        file: The ``.npy`` file of all parts.
        part: Which part, from 0, and their number: ``(3, 64)`` for the fourth of 64.
        memory: Budget such as ``"4GB"``. The first part plans for all.
        accumulate: ``"float64"`` keeps sums over parameters in double precision.

    Returns:
        The Gram matrix (N, M), memory-mapped, from the part that finishes last, and those that come later;
        ``None`` from the others.

    Raises:
        InputError: If an argument has a value that is not listed, or the file belongs to other examples,
            weights or settings.
        MemoryBudgetError: If not even the smallest tiles fit.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = f"{folder}/kernel.npy"
        ...     for index in range(2):
        ...         found = gram_part(net, torch.ones(4, 2), form="trace", file=file, part=(index, 2))
        ...         print(None if found is None else found.shape)
        None
        torch.Size([4, 4])
    """
    function = tangent_of(lin_or_model)
    x, x2 = taken(function, x), taken(function, x2, "x2")
    check_dense(x, x2)
    return _gram_part(function, x, x2, file, part, form=form, memory=memory, accumulate=accumulate)


def tangent_of(lin_or_model: Linearized | nn.Module) -> Functional:
    """The frozen network behind a linearization, or behind a network linearized in all its parameters."""
    return (lin_or_model if isinstance(lin_or_model, Linearized) else linearize(lin_or_model)).function


def check_dense(*batches: Inputs) -> None:
    """Raise on inputs whose examples cannot be taken one by one."""
    for t in tensors_in(batches):
        require_dense(t, "x")


def check_kernel(form: str) -> None:
    """Raise unless ``form`` names one kernel."""
    remedy = 'leave form= out for "full"; "diagonal" is one kernel for each output, not one in all'
    choice("form", form, KERNELS, remedy)


def check_inputs(function: Functional, x: Inputs) -> tuple[int, ...]:
    """The shape of the outputs of one example, after checking that the network can take ``x``."""
    check_examples(x)
    return tuple(function.check_runs(take(x, slice(0, 1))).shape[1:])


def values_of_one(shape: tuple[int, ...], form: str) -> int:
    """Q, the numbers that a function of this kernel's space has for one example: C for ``"full"``, else 1."""
    return torch.Size(shape).numel() if form == "full" else 1


def flat_gram(matrix: Tensor, name: str = "gram") -> Tensor:
    """A Gram matrix with the axes of examples and outputs joined, (N·C, N·C)."""
    # matrix (N, N)
    if not isinstance(matrix, Tensor):
        raise InputError(
            f"{name} is {type(matrix).__name__}", "a torch tensor", "convert it with torch.as_tensor"
        )
    require_dense(matrix, name)
    shape = tuple(matrix.shape)
    if matrix.ndim not in (2, 4) or shape[: matrix.ndim // 2] != shape[matrix.ndim // 2 :] or not all(shape):
        raise InputError(
            f"{name} has shape {shape}",
            expected="a square Gram matrix, (N, N) or (N, C, N, C)",
            remedy='compute it with linnet.spectrum.gram(model, x, form="trace" or "full")',
        )
    if not matrix.is_floating_point():
        raise InputError(
            f"{name} has type {matrix.dtype}",
            expected="a floating point matrix",
            remedy="convert it with .double()",
        )
    return matrix if matrix.ndim == 2 else matrix.reshape(shape[0] * shape[1], -1)


def check_symmetry(matrix: Tensor, name: str) -> None:
    """Raise where some rows of a matrix are not its columns."""
    rows = torch.arange(0, matrix.shape[0], max(1, matrix.shape[0] // LOOKED_AT), device=matrix.device)
    some, same = matrix[rows], matrix[:, rows].T
    apart, largest = float((some - same).abs().max()), float(some.abs().max())
    if apart > 1e-3 * largest:  # NaN passes, and is named by what follows
        raise InputError(
            f"{name} is not symmetric: entries differ by {apart:.2g} across its diagonal, the largest is "
            f"{largest:.2g}",
            expected="the Gram matrix of x with itself",
            remedy="compute it with linnet.spectrum.gram(model, x)",
        )


@in_exact_mode
def kernel_matrix(
    source: Source,
    x: Inputs | None = None,
    form: Form = "full",
    memory: str | int | None = None,
    name: str = "source",
) -> Tensor:
    """The kernel as a matrix (R, R), with R = N, or N·C for ``"full"``."""
    check_kernel(form)
    _check_source(source, x, name)
    if isinstance(source, Tensor):
        flat = flat_gram(source, name)
        check_symmetry(flat, name)
        return flat
    if isinstance(source, LinearOperator):
        return source.dense()
    return flat_gram(gram(source, x, form=form, memory=memory))


def kernel_operator(
    source: Source, x: Inputs | None = None, form: Form = "full", memory: str | int | None = None
) -> LinearOperator:
    """The kernel of a source as an operator; the Gram matrix of a network is computed and stored."""
    if isinstance(source, LinearOperator):
        _check_source(source, x, "source")
        if source.shape[0] != source.shape[1]:
            raise InputError(
                f"source is {source!r}", expected="a square, symmetric operator", remedy="pass A.T @ A"
            )
        return source
    return stored_operator(kernel_matrix(source, x, form, memory))


def stored_operator(matrix: Tensor) -> LinearOperator:
    """A stored symmetric matrix as an operator, without copies or checks that would read it all."""
    shape = (matrix.shape[0], matrix.shape[1])
    return FunctionOperator(lambda v: matrix @ v, shape, matrix.dtype, matrix.device, symmetric=True)


def _check_source(source: object, x: Inputs | None, name: str) -> None:
    """Raise if x is missing for a network, or given for something else."""
    if not isinstance(source, Tensor | LinearOperator | nn.Module):
        raise InputError(
            f"{name} is {type(source).__name__}",
            expected="a network, a Gram matrix or a LinearOperator",
            remedy="pass a torch.nn.Module with x, or linnet.spectrum.gram(...)",
        )
    needs = isinstance(source, nn.Module)
    if needs and x is None:
        raise InputError(
            f"x is missing, and {name} is a network",
            expected="the inputs on which its kernel is evaluated",
            remedy="pass x=",
        )
    if not needs and x is not None:
        raise InputError(
            f"x is given, but {name} is a {type(source).__name__} already",
            expected="x with a network only",
            remedy="leave x= out",
        )


class KernelOperator(SymmetricOperator):
    """K = JJᵀ on a data set without forming it: vector-Jacobian products, then Jacobian-vector products."""

    # A product with one vector costs two passes over the data (2 C for `"trace"`) and no memory for K.

    def __init__(self, function: Functional, x: Inputs, form: Form = "full", block: int = 128) -> None:
        check_kernel(form)
        x = taken(function, x)
        self.function, self.x, self.form, self.block = function, x, form, block
        self.c = torch.Size(check_inputs(function, x)).numel()
        rows = batch_size(x) * (self.c if form == "full" else 1)
        self.shape = (rows, rows)
        self.jacobian = JacobianOperator(function, x, self.c, block)
        self.dtype, self.device, self.space = function.dtype, function.device, None

    def mm(self, v: Tensor) -> Tensor:
        """K v."""
        return torch.cat([self._product(part) for part in v.split(COLUMNS, dim=1)], 1)

    def _product(self, v: Tensor) -> Tensor:
        """K v for few columns."""
        if self.form == "full":
            return self._tangent(v.reshape(-1, self.c, v.shape[1])).reshape(v.shape)
        if self.form == "sum":
            return self._tangent(v[:, None].expand(-1, self.c, -1)).sum(1)
        total = torch.zeros_like(v)
        for c in range(self.c):  # Σ_c J_c J_cᵀ v
            u = v.new_zeros(v.shape[0], self.c, v.shape[1])
            u[:, c] = v
            total += self._tangent(u)[:, c]
        return total

    def _tangent(self, u: Tensor) -> Tensor:
        """J Jᵀ u, (N, C, K) to (N, C, K)."""
        pulled = self.jacobian.T.mm(u.flatten(0, 1))
        with torch.no_grad():
            return self.jacobian.mm(pulled).view(u.shape)


# -- function values -------------------------------------------------------------------------------
#
# Targets as elements of the kernel's function space: values of f on the examples.
#
# With one output, or the kernels ``"trace"`` and ``"sum"``, f is scalar-valued; with ``"full"`` and C
# outputs it has C values for each example.


@dataclass(frozen=True)
class FunctionValues:
    """T functions on N examples."""

    values: Tensor  # (N, Q, T), Q = C for vector-valued functions and 1 for scalar ones
    single: bool  # whether the caller gave one function without an axis of functions

    @property
    def flat(self) -> Tensor:
        """(N·Q, T), rows in the order of a Gram matrix."""
        return self.values.flatten(0, 1)

    def mean_square(self) -> Tensor:
        """‖f‖₂² = E ‖f(x)‖², (T,), float64."""
        return self.values.double().square().sum((0, 1)) / self.values.shape[0]

    def shaped(self, result: Tensor) -> Tensor:
        """One number for each function, () for a single one."""
        # result (T,)
        return result[0] if self.single else result


def function_values(y: Tensor, shape: tuple[int, ...], form: str, dtype: torch.dtype) -> FunctionValues:
    """Targets of the user as functions of the kernel's space."""
    # y (N,)
    c = torch.Size(shape).numel()
    is_vector = form == "full" and c > 1
    if y.is_complex():
        raise InputError(f"y has type {y.dtype}", "real values", "pass real and imaginary parts apart")
    if not y.is_floating_point():
        y = _classes(y, c) if is_vector else _signs(y)
    y = y.to(dtype)
    if y.ndim > 1 and form == "full" and tuple(y.shape[1:]) == shape:  # as the outputs themselves
        return FunctionValues(y.reshape(y.shape[0], c, 1), True)
    if is_vector and y.ndim == 3 and y.shape[1] == c and y.shape[2]:
        return FunctionValues(y, False)
    if not is_vector and y.ndim <= 2 and y[0].numel():
        columns = y.reshape(y.shape[0], 1, -1)
        return FunctionValues(columns, columns.shape[2] == 1)
    if not is_vector and y.ndim == 3 and y.shape[1] == 1 and y.shape[2]:
        return FunctionValues(y, False)
    raise InputError(
        f"y has shape {tuple(y.shape)} for a network with {c} outputs and form={form!r}",
        expected=f"(N, {c}), or (N, {c}, T) for T functions"
        if is_vector
        else "(N,), or (N, T) for T functions",
        remedy='pass form="trace" for scalar functions of a network with several outputs'
        if is_vector
        else 'pass form="full" for targets with one column for each output',
    )


def _signs(y: Tensor) -> Tensor:
    """Two classes as −1 and 1."""
    found = y.unique().tolist()
    if set(found) <= {-1, 1}:
        return y.double()
    if set(found) <= {0, 1}:
        return 2 * y.double() - 1
    some = ", ".join(str(value) for value in found[:5])
    raise InputError(
        f"y holds the integers {some}{', …' if len(found) > 5 else ''} for a scalar-valued function",
        expected="two classes, 0 and 1 or −1 and 1",
        remedy='pass float targets, or form="full" with a network that has one output for each class',
    )


def _classes(y: Tensor, c: int) -> Tensor:
    """Classes (N,) as e_y − 1/C, (N, C)."""
    labels = y[:, 0].long() if y.ndim == 2 and y.shape[1] == 1 else y.long()
    if labels.ndim != 1:
        raise InputError(
            f"y has integers of shape {tuple(y.shape)}",
            expected="one class for each example, (N,)",
            remedy="convert values with y.float()",
        )
    wrong = (labels < 0) | (labels >= c)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise DataError(
            f"y holds {int(wrong.sum())} label(s) out of range, first {int(labels[i])} at index {i}",
            expected=f"classes 0 to {c - 1}, because the network has {c} outputs",
            remedy="give the network a head of the right size with linnet.with_head(model, classes)",
        )
    return torch.nn.functional.one_hot(labels, c).double() - 1 / c


# -- kernel distance -------------------------------------------------------------------------------
#
# Distances between tangent kernels of two checkpoints, or of a network and a task.
#
# Both measures do not change when a kernel is scaled or the examples are permuted alike in both.

ROWS = 1024  # rows of a matrix taken to float64 at once


@shared_call("linnet.spectrum.kernel_matrix")
def kernel_distance(
    first: Source,
    second: Source,
    x: Inputs | None = None,
    form: Form = "full",
    *,
    memory: str | int | None = None,
) -> float:
    """Kernel distance 1 − ⟨K₁, K₂⟩ / (‖K₁‖ ‖K₂‖) in the Frobenius inner product, between 0 and 1.

    Args:
        first: A network, or a Gram matrix (N, N) or (N, C, N, C).
        second: The other one; a network and a matrix may be mixed.
        x: N examples on which the kernels of networks are evaluated.
        form: Which kernel of networks with several outputs.
        memory: Budget of each Gram matrix.

    Returns:
        The distance: 0 for kernels equal up to scale, 1 for orthogonal ones.

    Raises:
        InputError: If the matrices differ in size, x is missing, or a kernel is zero.
        NumericalError: If a matrix holds NaN or Inf.

    Source:
        Fort, Dziugaite, Paul, Kharaghani, Roy, Ganguli, NeurIPS 2020, section 4.

    Example:
        >>> kernel_distance(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        0.292893...
    """
    k1, k2 = _pair(first, second, x, form, memory)
    return 1.0 - _cosine(k1, k2)


@shared_call("linnet.spectrum.centered_alignment")
def centered_alignment(
    first: Source,
    second: Source,
    x: Inputs | None = None,
    form: Form = "full",
    *,
    memory: str | int | None = None,
) -> float:
    """Centered kernel alignment (CKA) of two kernels, ⟨H K₁ H, H K₂ H⟩ / (‖H K₁ H‖ ‖H K₂ H‖).

    H = I − 11ᵀ/N removes the mean over examples (of each output apart, for ``"full"``), so constant
    functions do not count. With ``second = y @ y.T`` this is the centered alignment with a task.

    Args:
        first: A network, or a Gram matrix (N, N) or (N, C, N, C).
        second: The other one; a network and a matrix may be mixed.
        x: N examples on which the kernels of networks are evaluated.
        form: Which kernel of networks with several outputs.
        memory: Budget of each Gram matrix.

    Returns:
        The alignment, between 0 and 1 for positive semi-definite kernels.

    Raises:
        InputError: If the matrices differ in size, x is missing, or a centered kernel is zero.
        NumericalError: If a matrix holds NaN or Inf.

    Source:
        Cortes, Mohri, Rostamizadeh, JMLR 2012, definition 4; Kornblith et al., ICML 2019.

    Example:
        >>> round(centered_alignment(torch.eye(4), torch.eye(4) + 3.0), 6)
        1.0
    """
    k1, k2 = (_centered(k) for k in _pair(first, second, x, form, memory))
    return _cosine(k1, k2)


def _pair(
    first: Source, second: Source, x: Inputs | None, form: Form, memory: str | int | None
) -> tuple[Tensor, Tensor]:
    """Both kernels as (N, N) or (N, C, N, C)."""
    check_kernel(form)
    x = None if x is None else tensorize(x)
    sources = {"first": first, "second": second}
    if x is not None and all(isinstance(source, Tensor) for source in sources.values()):
        raise InputError(
            "x is given, but first and second are matrices", "x with networks only", "leave x= out"
        )
    k1, k2 = (_kernel(source, x, form, memory, name) for name, source in sources.items())
    if k1.shape != k2.shape:
        raise InputError(
            f"first is a kernel of shape {tuple(k1.shape)}, second of {tuple(k2.shape)}",
            expected="kernels of the same examples",
            remedy="evaluate both on the same x, with the same form=",
        )
    return k1, k2


def _kernel(source: Source, x: Inputs | None, form: Form, memory: str | int | None, name: str) -> Tensor:
    """A kernel with its axes apart."""
    if isinstance(source, Tensor):
        kernel_matrix(source, name=name)  # only to be checked
        return source
    flat = kernel_matrix(source, x, form, memory, name)
    if form != "full" or x is None:
        return flat
    n = batch_size(x)
    c = flat.shape[0] // n
    return flat if c == 1 else flat.reshape(n, c, n, c)


def _centered(k: Tensor) -> Tensor:
    """H K H over the example axes, in float64."""
    k = k.double()
    axes = (0, 1) if k.ndim == 2 else (0, 2)
    for axis in axes:
        k = k - k.mean(axis, keepdim=True)
    return k


def _cosine(k1: Tensor, k2: Tensor) -> float:
    """Cosine of the angle between two matrices, summed in float64."""
    product = first = second = 0.0
    for a, b in zip(k1.split(ROWS), k2.split(ROWS), strict=True):
        a, b = a.double(), b.double().to(a.device)
        product, first, second = (
            product + float((a * b).sum()),
            first + float(a.square().sum()),
            second + float(b.square().sum()),
        )
    if not torch.isfinite(torch.tensor([first, second])).all():
        raise NumericalError(
            "a kernel holds NaN or infinite values", "finite kernels", "look for NaN in the network's weights"
        )
    if first == 0 or second == 0:
        raise InputError(
            f"{'first' if first == 0 else 'second'} is a kernel that is zero, centered or not",
            expected="a kernel with an angle to others",
            remedy="use other examples, or parameters that the outputs depend on",
        )
    return min(product / math.sqrt(first * second), 1.0)
