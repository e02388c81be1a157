"""Distances between tangent kernels of two checkpoints, or of a network and a task.

Both measures do not change when a kernel is scaled or the examples are permuted alike in both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.spectrum.kernel_matrix import Source, check_kernel, kernel_matrix
from linnet.tangent.alike import in_shares
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.door import tensorize
from linnet.tangent.rules import Form

ROWS = 1024  # rows of a matrix taken to float64 at once


@in_shares("linnet.spectrum.kernel_distance")
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


@in_shares("linnet.spectrum.centered_alignment")
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
