"""Outputs of many examples, which go through a network some at a time.

On a CPU a part is no larger than its largest intermediate result allows. The C library gives memory beyond
32 MB for a result, or 64 MB in all, back to the system, which clears it when the next part asks for it: two
thirds of the time of EfficientNet-lite0 for 256 images of 96 x 96, and three quarters for those of 224 x 224.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.sequences import Run, ignores_padding, lengths, shortened

KEPT = 16 << 20  # bytes of the largest result of a part: a few of them are there at a time
FEW, MORE = 2, 8  # examples of the two parts that are looked at
PAYS = 16  # examples from which on they are


class _Largest(TorchDispatchMode):
    """The bytes of the largest result of an operation so far, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at its result."""
        found = func(*args, **(kwargs or {}))
        new = [one.alias_info is None for one in func._schema.returns]
        results = found if isinstance(found, tuple | list) else (found,)
        if all(new):
            own = [t.numel() * t.element_size() for t in results if isinstance(t, Tensor)]
            self.bytes = max(self.bytes, *own, 0)
        return found


@torch.no_grad()
def in_parts(network: nn.Module, run: Run, x: Inputs, size: int) -> Tensor:
    """Outputs of many examples, at most ``size`` of them at a time."""
    length = lengths(x)
    if length is None or not ignores_padding(network, run, x):
        return torch.cat(_outputs(network, run, x, size))
    # the longest first: memory that does not suffice fails early
    order = length.argsort(descending=True, stable=True)
    found = torch.cat(_outputs(network, lambda part: run(shortened(part)), take(x, order), size))
    return torch.empty_like(found).index_copy_(0, order.to(found.device), found)


def _outputs(network: nn.Module, run: Run, x: Inputs, size: int) -> list[Tensor]:
    """Outputs of parts, the first two of which tell how large the others should be."""
    if min(batch_size(x), size) < PAYS or any(_is_compiled(module) for module in network.modules()):
        return [run(part) for part in split(x, size)]
    (first, few), (second, more) = (
        _looked_at(run, take(x, slice(begin, begin + count))) for begin, count in ((0, FEW), (FEW, MORE))
    )
    each = (more - few) // (MORE - FEW)  # what does not grow with the examples is none of theirs
    size = min(size, max(1, KEPT // each)) if each > 0 and first.device.type == "cpu" else size
    rest = split(take(x, slice(FEW + MORE, None)), size)
    return [first, second, *(run(part) for part in rest)]


def _looked_at(run: Run, x: Inputs) -> tuple[Tensor, int]:
    """Outputs, and the bytes of the largest result on the way; 0 where that cannot be seen."""
    try:
        with _Largest() as largest:
            return run(x), largest.bytes
    except Exception:  # operations that know no such mode; the network's own errors come again
        return run(x), 0


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has it, which would compile it again to be looked at."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
