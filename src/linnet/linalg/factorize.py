"""Robust factorizations: retries with jitter, then an error that states the cause.

The ladder: the matrix's own precision, then float64, then (Cholesky only) a little added to the
diagonal, then a :class:`~linnet.errors.NumericalError` with the name of the matrix and its smallest
eigenvalue. NaN and Inf are looked for first: a decomposition of them fails in unhelpful ways.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from linnet.distributed import Share, all_filled, owners
from linnet.errors import InputError, NumericalError
from linnet.number_types import current
from linnet.progress import waiting

# -- finite ----------------------------------------------------------------------------------------
# Checks that tensors are finite, in one pass.


def is_finite(t: Tensor) -> bool:
    """Whether all entries are finite."""
    # A sum is finite only if all its terms are, and needs one pass and no memory. One that overflows says
    # nothing: then the terms are looked at.
    if not (t.is_floating_point() or t.is_complex()):
        return True
    t = t.detach()
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())


def lies_within(t: Tensor, low: float, high: float) -> bool:
    """Whether all entries are in [low, high]; NaN is not."""
    if t.numel() == 0:
        return True
    least, largest = t.detach().aminmax()  # NaN if any entry is
    return low <= float(least) and float(largest) <= high


# -- host ------------------------------------------------------------------------------------------
# Few waits for a device: many numbers read back at once, and small searches done by the processor itself.

SMALL = 1 << 18  # numbers that the processor works through in less time than a device takes to be asked


def read(values: Sequence[Tensor]) -> list[float]:
    """Several numbers in one copy from the device, which has to finish what it was given only once."""
    if not values:
        return []
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in values))
    like = values[0].new_empty((), dtype=dtype)
    return [float(v) for v in torch.stack([v.detach().reshape(()).to(like) for v in values]).tolist()]


def searched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors where a search that reads each value is quickest: small ones on the processor."""
    small = sum(t.numel() for t in tensors) <= SMALL
    return tuple(t.cpu() for t in tensors) if small else tensors


_JITTERS = (1e-12, 1e-10, 1e-8, 1e-6)  # relative to the mean of the diagonal
_LARGE = 1024  # from this size on, eigh works in float64: float32 LAPACK fails or loses accuracy
_OFF = 100  # units of roundoff that a float32 decomposition may be off, as two random vectors tell
_EIGENVALUE = 16  # units of roundoff of the largest eigenvalue by which eigenvalues in float32 may be off

_PROBE = 200  # rows of the matrix that tells how fast the machine is

_logger = logging.getLogger("linnet")


def decomposing(size: int) -> AbstractContextManager[None]:
    """Say how far an eigendecomposition is, and about how long it takes on this machine."""
    seconds = None
    if size >= _LARGE:  # smaller ones are done before anything is said
        matrix = torch.ones(_PROBE, _PROBE, dtype=torch.float64).tril()
        start = time.perf_counter()
        torch.linalg.eigh(matrix + matrix.T)
        seconds = (time.perf_counter() - start) * (size / _PROBE) ** 3
    return waiting(f"eigenvalues of {size} equations", seconds)


def require_square(matrix: Tensor, name: str) -> None:
    """Check that a matrix, or each of a batch, is square and of floating point type."""
    # matrix (..., n, n)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise InputError(
            f"{name} has shape {tuple(matrix.shape)}",
            "a square matrix",
            "pass one of shape (n, n)",
        )
    if not matrix.is_floating_point():
        raise InputError(f"{name} has type {matrix.dtype}", "a floating point type", "pass .double() of it")


def require_finite(matrix: Tensor, name: str) -> None:
    """Check that a tensor holds no NaN and no infinity."""
    if is_finite(matrix):
        return
    nan, inf = int(matrix.isnan().sum()), int(matrix.isinf().sum())
    raise NumericalError(
        f"{name} has {nan} NaN and {inf} infinite of {matrix.numel()} entries",
        expected="finite numbers",
        remedy="look for NaN or Inf in the data and in the network's weights and outputs",
    )


def cholesky(matrix: Tensor, name: str = "matrix") -> Tensor:
    """The lower Cholesky factor L of a positive definite matrix, M = L Lᵀ, (..., n, n)."""
    # matrix (..., n, n)
    # Tries the matrix's own precision, then float64, then adds 1e-12 to 1e-6 of the mean diagonal (which is
    # logged as a warning of the logger "linnet").
    require_square(matrix, name)
    require_finite(matrix, name)
    factor = _try_cholesky(matrix)
    if factor is None:
        factor = _try_cholesky(_double(matrix))
    if factor is None:
        factor = _jittered_cholesky(_double(matrix), name)
    return factor.to(matrix)


def _try_cholesky(matrix: Tensor) -> Tensor | None:
    """The Cholesky factor, or None when a pivot is not positive."""
    if matrix.dtype in (torch.float16, torch.bfloat16):
        return None  # not supported by LAPACK; the next rung is float64
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if bool((info != 0).any()) else factor


def _jittered_cholesky(matrix: Tensor, name: str) -> Tensor:
    """The Cholesky factor of M + jitter · mean(diag M) · I for the first jitter that works for it."""
    batch = matrix.reshape(-1, *matrix.shape[-2:])
    mean = batch.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, info = _factor_and_info(batch)
    for jitter in _JITTERS:
        bad = info != 0
        factor[bad], info[bad] = _factor_and_info(batch[bad] + jitter * mean[bad] * identity)
        if not info.any():
            _logger.warning("%s is nearly singular: added %.0e of its mean diagonal", name, jitter)
            return factor.reshape(matrix.shape)
    worst = int(info.ne(0).nonzero()[0])
    smallest = float(torch.linalg.eigvalsh(batch[worst]).min())
    member = name if matrix.ndim == 2 else f"matrix {worst} of {name}"
    raise NumericalError(
        f"{member} is not positive definite: "
        f"its smallest eigenvalue is {smallest:.3g}, its mean diagonal {float(mean[worst]):.3g}",
        expected="a positive definite matrix",
        remedy=f"add a damping or ridge of more than {max(-smallest, 0.0):.1g}",
    )


def _factor_and_info(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors, and for each a number that is zero where it is right."""
    factor, info = torch.linalg.cholesky_ex(batch)
    return factor, info


def eigh(matrix: Tensor, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors of a symmetric matrix, M = Q diag(λ) Qᵀ, or of a batch."""
    # matrix (..., n, n)
    # Matrices of 1024 rows or more are decomposed in float64, as are those on which the first try fails. With
    # `linnet.precision(decompositions="float32")` they are decomposed in float32, and kept if random vectors
    # find M Q = Q diag(λ) and QᵀQ = I to hold to rounding. Eigenvalues are then right to about 10⁻⁶ of the
    # largest; smaller ones carry no digit, and negative ones of that size are set to zero.
    require_square(matrix, name)
    require_finite(matrix, name)
    is_low = matrix.dtype in (torch.float16, torch.bfloat16)
    if matrix.shape[-1] >= _LARGE:
        pair = _coarse_eigh(matrix) if _in_float32(matrix.shape[-1]) else None
    else:
        pair = None if is_low else _try_eigh(matrix)
    if pair is None:
        pair = _try_eigh(_double(matrix))
    if pair is None:
        raise NumericalError(
            f"the eigenvalues of {name} cannot be computed, not even in float64",
            expected="a matrix whose eigenvalues LAPACK finds",
            remedy="scale it so that its entries are near 1, or add a damping to its diagonal",
        )
    return pair[0].to(matrix), pair[1].to(matrix)


def signed(vectors: Tensor) -> Tensor:
    """Each column with its entry of largest size positive."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors)


def eigh_bytes(n: int, item: int) -> int:
    """Bytes that ``eigh`` takes beside the matrix of n rows and what it finds."""
    return n * n * (3 * item if n < _LARGE else 24 if item == 8 else 32)


def _try_eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """The eigendecomposition, or None when the iteration does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    # LAPACK has been seen to call NaN a success, on singular matrices in float32
    sound = bool(torch.isfinite(values).all()) and bool(torch.isfinite(vectors).all())
    return (values, vectors) if sound else None


def _in_float32(n: int) -> bool:
    """Whether eigenvalues of matrices of n rows are asked for in float32."""
    return n >= _LARGE and current().decompositions == "float32"


def _coarse_eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """The eigendecomposition in float32, or None where it is not right to rounding."""
    single = matrix.float()
    pair = _try_eigh(single)
    if pair is None:
        return None
    values, vectors = pair
    single = single.tril() + single.tril(-1).mT  # what was read
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(*single.shape[:-1], 2, generator=generator).to(single)
    size, turned = values.abs().amax(-1)[..., None, None], vectors @ probe
    off = _OFF * torch.finfo(torch.float32).eps * probe.norm(dim=-2, keepdim=True)
    eigen = (single @ turned - vectors @ (values[..., None] * probe)).norm(dim=-2, keepdim=True)
    unit = (vectors.mT @ turned - probe).norm(dim=-2, keepdim=True)
    if not bool(((eigen <= off * size) & (unit <= off)).all()):
        return None
    rounding = _OFF * torch.finfo(torch.float32).eps * size[..., 0]
    return torch.where((values < 0) & (values >= -rounding), 0.0, values), vectors


def eigenvalue_error(values: Tensor) -> float:
    """How far eigenvalues may be off because ``eigh`` was asked to find them in float32."""
    # values (n,)
    if not _in_float32(len(values)):
        return 0.0
    return _EIGENVALUE * torch.finfo(torch.float32).eps * float(values.abs().max())


def _double(matrix: Tensor) -> Tensor:
    """The matrix in float64, on the CPU where its own device has none."""
    return matrix.to("cpu" if matrix.device.type == "mps" else matrix.device, torch.float64)


def nonnegative(values: Tensor, name: str = "matrix") -> Tensor:
    """Eigenvalues of a positive semi-definite matrix, with rounding errors below zero removed."""
    if values.numel() == 0:
        return values
    smallest, largest = float(values.min()), float(values.abs().max())
    kind = torch.finfo(values.dtype)
    # below the smallest normal number rounding errors are no longer relative
    tolerance = 100 * max(values.shape[-1], 10) * max(kind.eps * largest, kind.tiny)
    if smallest < -tolerance:
        raise NumericalError(
            f"{name} is not positive semi-definite: its smallest eigenvalue is {smallest:.3g}",
            expected="no negative eigenvalue",
            remedy="use a positive semi-definite curvature (Gauss-Newton, Fisher), or damp it",
        )
    return values.clamp(min=0.0)


def nonnegative_each(values: Tensor, name: str = "matrix") -> Tensor:
    """Like ``nonnegative`` for a batch of matrices, each judged by its own largest eigenvalue."""
    # values (..., n)
    if values.numel() == 0 or values.ndim == 1:
        return nonnegative(values, name)
    each = values.reshape(-1, values.shape[-1])
    relative = each.amin(1) / each.abs().amax(1).clamp(min=torch.finfo(values.dtype).tiny)
    worst = int(relative.argmin())
    nonnegative(each[worst], f"matrix {worst} of {name}")
    return values.clamp(min=0.0)


def root(matrix: Tensor, name: str = "matrix") -> Tensor:
    """A square root S of a positive semi-definite matrix, M = S Sᵀ, or of each of a batch, (..., n, n)."""
    # matrix (..., n, n)
    # The Cholesky factor when there is one, else the symmetric root Q diag(√λ) Qᵀ.
    require_square(matrix, name)
    require_finite(matrix, name)
    factor = _try_cholesky(matrix)
    if factor is not None:
        return factor
    values, vectors = eigh(matrix, name)
    return (vectors * nonnegative_each(values, name).sqrt()[..., None, :]) @ vectors.mT


# -- several processes -----------------------------------------------------------------------------
#
# A decomposition costs some ten times n³ operations, and its copy n² numbers, so that each of several has
# one owner and the others take what it found. All then have one basis to the bit, also where eigenvalues
# coincide and another machine would find another.


def shared_eigh(
    matrices: Sequence[Tensor], names: Sequence[str], share: Share
) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues and eigenvectors of symmetric matrices, or batches of them, on all processes, (..., n)."""
    # matrices (..., n, n)
    ranks = owners([float(matrix.numel() * matrix.shape[-1]) for matrix in matrices], share.world)
    found = [
        eigh(matrix, name)
        if owner == share.rank
        else (matrix.new_empty(matrix.shape[:-1]), torch.empty_like(matrix))
        for matrix, name, owner in zip(matrices, names, ranks, strict=True)
    ]
    if share.world > 1:
        # of one layout in memory on all processes, since products round by it
        found = [(values, vectors.contiguous()) for values, vectors in found]
        pairs = list(zip(found, ranks, strict=True))
        all_filled([[t for pair, own in pairs if own == rank for t in pair] for rank in range(share.world)])
    return found
