"""The types in which derivatives are kept, sums are made and matrices are decomposed: ``linnet.precision``.

What is left out keeps the type that linnet takes by itself. The choice is a context variable: threads do not
share it, and it ends with its ``with`` statement, whatever is raised inside.

``capture`` decides how exact an entry of a kernel is. Gradients J that are rounded to J̃, each number
by at most u of itself (2⁻⁹ in bfloat16, 2⁻²⁴ in float32), give the kernel J̃J̃ᵀ of features a little beside the
true ones: it is positive semi-definite like the true one, and |J̃J̃ᵀ − JJᵀ| ≤ (2u + u²) |J||J|ᵀ. Where a layer
keeps inputs a and output gradients g instead, both are rounded, and u stands for 2u + u².
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from linnet.params import choice, holding

CAPTURE = ("bfloat16", "tf32", "float32", "float64")
SUMS = ("float32", "float64")
DECOMPOSITIONS = ("float32", "float64")
TF32_EPS = 2.0**-10  # spacing of TF32's numbers at 1
_TYPES = {
    "bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32, "float64": torch.float64
}  # fmt: skip


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums and penalties are computed: the given one, and at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Precision:
    """Types of numbers; ``None`` where linnet chooses."""

    capture: str | None = None  # of inputs a, output gradients g and gradients that kernels are made of
    sums: str | None = None  # of sums
    decompositions: str | None = None  # of eigenvalues and eigenvectors

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients are kept."""
        return wide_type(dtype) if self.capture is None else _TYPES[self.capture]

    def added(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which an entry of a kernel is summed over parameters."""
        wide = torch.promote_types(wide_type(dtype), self.kept(dtype))
        return torch.float64 if self.sums == "float64" else wide

    def coarser(self, dtype: torch.dtype) -> bool:
        """Whether kernels or normal equations are less exact than the network is."""
        return self._keeps_less(dtype) or self.sums == "float32"

    def _keeps_less(self, dtype: torch.dtype) -> bool:
        """Whether gradients are kept or multiplied in numbers of fewer digits."""
        return self.capture == "tf32" or torch.finfo(self.kept(dtype)).eps > torch.finfo(dtype).eps

    def exact(self, dtype: torch.dtype) -> Precision:
        """The same for equations whose rounding nobody checks."""
        capture = None if self._keeps_less(dtype) else self.capture
        return replace(self, capture=capture, sums=None if self.sums == "float32" else self.sums)

    def eps(self, dtype: torch.dtype, device: torch.device) -> float:
        """The spacing at 1 of the coarsest numbers that an entry of a kernel is made of."""
        own = max(torch.finfo(dtype).eps, torch.finfo(self.kept(dtype)).eps)
        tf32 = self.capture == "tf32" or (
            self.capture != "float32" and dtype == torch.float32 and _in_force()
        )
        return max(own, TF32_EPS) if tf32 and device.type == "cuda" else own

    def named(self) -> dict[str, str]:
        """The types that were asked for, by what for."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """In words."""
        return ", ".join(f"{name} in {value}" for name, value in self.named().items()) or "linnet's own types"


_OWN = Precision()
_chosen: ContextVar[Precision] = ContextVar("linnet_precision", default=_OWN)


def current() -> Precision:
    """The types in force."""
    return _chosen.get()


def precision(
    *, capture: str | None = None, sums: str | None = None, decompositions: str | None = None
) -> contextlib.AbstractContextManager[Precision]:
    """Choose the types of numbers for what is computed inside a ``with`` statement.

    A fit keeps the types that it was made with for all its later answers, saved and loaded too. Where they
    leave its predictions or leave-one-out less than right to a thousandth, ``linnet.fit`` makes it again in
    float64, as it does for a small ridge; ``fit.record.reasons["precision"]`` says which. ``linnet.adapt``,
    ``solver="shared"`` and ``TangentGP``, whose rounding is not checked, take no coarser kernel and no
    coarser sums.

    Args:
        capture: Type in which kernels keep and multiply gradients; products are summed in float32 at least.
            ``"bfloat16"`` takes half of the memory of float32. ``"tf32"`` and ``"float32"`` switch the TF32
            products of NVIDIA's processors on or off (torch's own switches, for the whole process, while
            gradients are formed and multiplied); elsewhere both are float32. Curvatures, which keep no
            gradients, take TF32's products with ``"bfloat16"``, too. ``"float64"`` keeps more digits than a
            network in float32 has. The network runs in its own type.
        sums: Type of sums over parameters in kernels and over examples in curvatures (``"float64"`` costs
            memory; they are float32 for a network in float32), and of products of rows in normal equations,
            float64 by default: ``"float32"`` is for processors that are slow in float64.
        decompositions: Type of eigenvalues and eigenvectors of matrices of 1024 rows or more, float64 by
            default. In ``"float32"`` eigenvalues below 10⁻⁶ of the largest are lost, and no ridge near them
            is tried. The equations at the chosen ridge are solved in float64 all the same.

    Returns:
        A context manager, which gives the types in force; what is left out is as outside.

    Raises:
        InputError: If a type is not one of these.

    Example:
        >>> import linnet
        >>> x = torch.ones(4, 2).cumsum(0)
        >>> with linnet.precision(capture="bfloat16"):
        ...     kernel = linnet.linearize(torch.nn.Linear(2, 1)).kernel(x)
        >>> kernel.dtype
        torch.float32
    """
    given: dict[str, Any] = {"capture": capture, "sums": sums, "decompositions": decompositions}
    for name, allowed in (("capture", CAPTURE), ("sums", SUMS), ("decompositions", DECOMPOSITIONS)):
        if given[name] is not None:
            choice(name, given[name], allowed, f"leave {name}= out for the type that linnet takes by itself")
    return _in_effect({name: value for name, value in given.items() if value is not None})


@contextlib.contextmanager
def _in_effect(wanted: dict[str, Any]) -> Iterator[Precision]:
    """Types in force, beside those of the ``with`` statements around."""
    types = replace(_chosen.get(), **wanted)
    with holding(_chosen, types):
        yield types


# -- NVIDIA's TF32 -----------------------------------------------------------------------------------

_LOCK = threading.Lock()
_opened: list[bool] = []  # what the scopes that are open ask for
_before: list[tuple[Any, ...]] = []  # what torch was set to before the first of them


@contextlib.contextmanager
def products_in(types: Precision, device: torch.device) -> Iterator[None]:
    """Torch's TF32 switches as ``capture`` asks for, while gradients are formed and multiplied."""
    # The switches are of the whole process. Scopes may overlap in several threads: the last one that was
    # opened decides, and when all are closed torch is as it was.
    if types.capture in (None, "float64") or device.type != "cuda":
        yield
        return
    on = types.capture != "float32"
    with _LOCK:
        if not _opened:
            _before.append(_switches())
        _opened.append(on)
        _switch(on)
    try:
        yield
    finally:
        with _LOCK:
            _opened.remove(on)
            if _opened:
                _switch(_opened[-1])
            else:
                _restore(_before.pop())


def _owners() -> list[Any]:
    """What has a switch of its own, from torch 2.9 on."""
    backends = torch.backends
    owners = [
        backends.cuda.matmul,
        getattr(backends.cudnn, "conv", None),
        getattr(backends.cudnn, "rnn", None),
    ]
    return [owner for owner in owners if hasattr(owner, "fp32_precision")]


def _switches() -> tuple[Any, ...]:
    """All that is switched: by torch's older names, where they can be read, and by its newer ones."""
    try:
        products = torch.get_float32_matmul_precision()
        old = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set by the newer names alone
        products, old = "", None
    return products, old, [owner.fp32_precision for owner in _owners()]


def _switch(on: bool) -> None:
    """TF32 in products, convolutions and recurrent layers."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def _restore(state: tuple[Any, ...]) -> None:
    """As it was."""
    products, old, newer = state
    if old is not None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = old
    for owner, value in zip(_owners(), newer, strict=True):
        owner.fp32_precision = value
    if products == "medium":  # which allow_tf32 does not tell from "high"
        torch.set_float32_matmul_precision(products)


def _in_force() -> bool:
    """Whether torch takes TF32 in some products by itself: it does in convolutions unless told otherwise."""
    owners = _owners()
    if owners:
        return any(owner.fp32_precision == "tf32" for owner in owners)
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
