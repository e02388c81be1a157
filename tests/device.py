"""A pretend accelerator: numbers of the CPU that say another device, refuse to mix with it, and are counted.

``PRETEND`` is a device like ``cuda:0``: networks and data move to it by ``.to``, every kernel runs, and one
that gets tensors of both devices raises the error of CUDA. ``counted()`` tells how many kernels a call
starts, where it waits for one of them (a number read back), and how many bytes each line carries there.

Torch starts one thread a device with its first backward pass, so that this file has to be imported before it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
MEMORY = 8 << 30  # what the device says it has left

# Kernels whose result has a size or a value that the host must know before it goes on.
WAITS = frozenset({
    "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "bincount",
    "_unique2", "unique_consecutive", "unique_dim",
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_lstsq",
})  # fmt: skip
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
MIXED = "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu"


@dataclass
class Counts:
    """What happened on the device.

    Args:
        kernels: Kernels started.
        waits: Times that the host waited for one, by the line of linnet.
        carried: Bytes carried to the device, by the line.
        largest: Bytes of the largest tensor carried there.
    """

    kernels: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    carried: Counter[str] = field(default_factory=Counter)
    largest: int = 0

    @property
    def syncs(self) -> int:
        """Times that the host waited."""
        return sum(self.waits.values())

    def __str__(self) -> str:
        """The lines, those that wait most first."""
        lines = [f"{self.kernels} kernels, {self.syncs} waits"]
        return "\n".join([*lines, *(f"  {n:5d}  {where}" for where, n in self.waits.most_common())])


_counting: list[Counts] = []


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what happens on the device inside the block.

    Yields:
        The counts, complete at the end of the block.
    """
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def _line() -> str:
    """The two innermost lines of linnet that are being run."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if "/src/linnet/" in file:
            found.append(f"{file.split('/src/linnet/')[-1]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "elsewhere"


def _waited() -> None:
    """Note that the host waits for the device."""
    for counts in _counting:
        counts.waits[_line()] += 1


def _carry(size: int) -> None:
    """Note bytes carried to the device."""
    for counts in _counting:
        counts.carried[_line()] += size
        counts.largest = max(counts.largest, size)


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """Generators that torch made are of the class that stands for theirs."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A generator that remembers its device, with the numbers of the CPU; for ``torch.Generator``."""

    ours: ClassVar[set[int]] = set()  # those of the device; torch hands on their address, not the object

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = torch._C.Generator.__new__(cls, "cpu")
        made.place = torch.device(device)
        Generator.ours.discard(made._cdata)  # of one that is gone
        if made.place.type == NAME:
            Generator.ours.add(made._cdata)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device it was made for."""
        return self.place  # type: ignore[no-any-return]


class Backend:
    """What torch asks the module of a device for."""

    class device(contextlib.nullcontext):
        """The current device is always this one."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass  # numbers are drawn from the CPU's stream, which was seeded already

    manual_seed = manual_seed_all

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *device: Any) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def mem_get_info(self, *device: Any) -> tuple[int, int]:
        return MEMORY, 2 * MEMORY

    def memory_allocated(self, *device: Any) -> int:
        return 0

    memory_reserved = memory_allocated


_setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
PRETEND = torch.device(NAME, 0)


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device, over the memory of one on the CPU.

    Args:
        values: The tensor on the CPU.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        return torch.Tensor._make_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, values, False, dispatch_device=True, device_for_backend_keys=PRETEND
        )

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()

    @property
    def values(self) -> torch.Tensor:
        """The numbers, as a tensor on the CPU over the same memory."""
        place = self.untyped_storage(), self.storage_offset(), self.shape, self.stride()
        return torch.empty(0, dtype=self.dtype).set_(*place)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy: Any = DeviceTensor(self.values.detach().clone())
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if parameter else copy
            if not parameter:
                copy.requires_grad_(self.requires_grad)
            if self.grad is not None:
                memo[id(self)].grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"{self.values!r} on {PRETEND}"


def _is_ours(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _values(value: Any) -> Any:
    """What the CPU computes with."""
    return value.values if isinstance(value, DeviceTensor) else value


def _there(value: Any) -> Any:
    """A result of the CPU on the device; zeros that stand for themselves without memory are written out."""
    if type(value) is not torch.Tensor:
        return value
    return DeviceTensor(torch.zeros_like(value) if value._is_zerotensor() else value)


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    """Where and how a tensor lies in memory."""
    return t.shape, t.stride(), t.data_ptr()


def _refuse_mixing(name: str, args: Any, flat: list[Any]) -> None:
    """Raise where CUDA would: tensors of the CPU with an axis among those of the device."""
    there = [v for v in flat if isinstance(v, torch.Tensor) and not _is_ours(v) and v.ndim > 0]
    if name in INDEXING and _is_ours(args[0]):
        there = [v for v in there if not any(v is one for one in args[1])]  # indices may come from the CPU
    if there:
        raise RuntimeError(f"{MIXED}! ({name} at {_line()})")
    if any(isinstance(v, torch._C.Generator) and v._cdata not in Generator.ours for v in flat):
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found 'cpu' ({name} at {_line()})"
        )


def _waits(name: str, args: Any) -> bool:
    """Whether the host waits for a kernel."""
    if name in INDEXING:
        given = [i for i in args[1] if i is not None]
        return any(not _is_ours(i) or i.dtype in (torch.bool, torch.uint8) for i in given)
    return name in WAITS or (name == "repeat_interleave" and len(args) == 1)


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel on the device: the CPU's, with tensors of the device around it."""
    if func is torch.ops.prim.device.default:
        return PRETEND
    if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
        return all(map(_is_ours, args))
    name = func._schema.name.removeprefix("aten::")
    flat = list(tree_iter((args, kwargs)))
    wanted = kwargs.get("device")
    here = wanted is None or torch.device(wanted).type == NAME
    if name in ("copy_", "_to_copy"):
        source, arrives = (args[1], _is_ours(args[0])) if name == "copy_" else (args[0], here)
        if arrives and not _is_ours(source):
            _carry(source.nbytes)
        elif not arrives:
            _waited()
    elif any(map(_is_ours, flat)):
        _refuse_mixing(name, args, flat)
    if not func.is_view:
        for counts in _counting:
            counts.kernels += 1
    if _waits(name, args):
        _waited()
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    plain = tree_map(_values, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if func._schema.is_mutable:
        for one, values in zip(flat, tree_iter(plain), strict=True):
            if _is_ours(one) and _layout(one) != _layout(values):  # it was resized
                one.data = DeviceTensor(values)
    if func._schema.is_mutable and len(func._schema.returns) == 1:  # in place: the same tensor is returned
        return kwargs.get("out", args[0]) if func._schema.returns[0].alias_info is not None else result
    if not here:
        return result
    return tree_map(_there, result)


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(_run, "PrivateUse1")
_copies = torch.library.Library("aten", "IMPL")
for _copy in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
    # torch has them for every device, by kernels that this one lacks
    _copies.impl(_copy._schema.name, functools.partial(_run, _copy), "PrivateUse1")
