"""Traces every use of a tracked parameter in one forward pass.

Uses are caught where torch functions are called, not where modules are defined: custom modules,
tied weights and plain arithmetic are seen like ``nn.Linear``. Three marks travel with tensors:
*data* (depends on the inputs), *from* (computed from tracked parameters alone, such as ``w.t()``
or a normalized weight) and *transpose of*. A call that mixes data with a tracked tensor is a use.

CPUs convolve and pool images faster whose channels are side by side in memory. Only strides change, and
operations pass them on: the numbers are those of the plain pass up to rounding. It is used where the outputs
and what the last layer reads are wanted, and no derivative goes further back.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from linnet.tangent.batch import Inputs, batch_size, example_shapes
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import STRIDES_KEPT, Functional
from linnet.tangent.modes import CallMode, first_order, in_exact_mode
from linnet.tangent.operations import REPEATING, describe
from linnet.tangent.rules import Operand, Result, Use
from linnet.tree import map_tensors, tensors_in


@dataclass(eq=False)
class Trace:
    """Trace of one forward pass."""

    n: int  # number of examples
    outputs: Tensor  # f₀(x), (N, C), with its autograd history
    leaves: Params  # the tracked parameters as leaves of that history
    uses: list[Use]  # every understood use, in order
    # parameters with a use that no rule covers, and the operations that did it
    unhandled: dict[str, set[str]]
    moved: bool = False  # whether rows were put where the data say: routed, sorted, unpadded
    # parameters whose examples are not where their plan has them in this pass, once that is known
    lost: set[str] | None = None
    # bytes of one example that autograd keeps, parameters apart, if they were counted
    saved_bytes: int | None = field(default=None, init=False)
    # the operation whose result the outputs are, as it came; `None` if they have no history
    place: tuple[Any, int] | None = field(default=None, init=False)

    @property
    def signature(self) -> tuple[Any, ...]:
        """The part of the trace that must repeat for a plan made on one batch to hold on another."""
        return (*(use.signature for use in self.uses), tuple(sorted(self.unhandled)), self.moved)


@in_exact_mode
def trace(function: Functional, x: Inputs, theta: Params | None = None) -> Trace:
    """Run the network once on ``x``, at θ₀ or other weights, and note every use of its tracked parameters."""
    given = function.theta if theta is None else theta
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    for name, leaf in leaves.items():
        leaf._linnet_from = (name,)  # type: ignore[attr-defined]
        leaf._linnet_leaf = True  # type: ignore[attr-defined]
    recorder = _UseRecorder(batch_size(x))
    with function.inputs(x) as own, torch.enable_grad(), first_order(), recorder:
        value = function.run(leaves, map_tensors(_as_data, own))
        outputs = value.reshape(value.shape[0], -1)
    function.cache.output_shapes[example_shapes(x)] = value.shape[1:]
    found = Trace(recorder.n, outputs, leaves, recorder.uses, recorder.unhandled, recorder.moved)
    if value.requires_grad:
        edge = get_gradient_edge(value)
        found.place = (edge.node, edge.output_nr)
    return found


def weighed_trace(function: Functional, x: Inputs) -> Trace:
    """The same for a few examples, with the bytes counted that autograd keeps of each of them."""
    try:
        with weighing(function) as kept:
            run = trace(function, x)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            function.check_runs(x)  # says what is wrong with x, if x is what is wrong
            raise
        # torch.func.grad inside the network forbids to look; what uses read is about what autograd keeps
        run = trace(function, x)
        run.saved_bytes = sum(use.a.nbytes for use in run.uses if use.a is not None) // run.n
        return run
    run.saved_bytes = sum(kept.values()) // run.n
    return run


@contextmanager
def weighing(function: Functional) -> Iterator[dict[int, int]]:
    """Count what autograd keeps, parameters apart."""
    own = {t.untyped_storage().data_ptr() for t in function.theta.values()}
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen = kept.get(storage.data_ptr(), 0)  # of x, which may be a slice, only what is read
            kept[storage.data_ptr()] = max(seen, min(storage.nbytes(), t.numel() * t.element_size()))
        return t.detach()  # an operation that kept its own result, history and all, would never be freed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield kept


def _as_data(t: Tensor) -> Tensor:
    """A marked alias; the user's tensor is left without the mark."""
    alias = t.detach()
    alias._linnet_data = True  # type: ignore[attr-defined]
    return alias


# Operations that put rows where the data say, and how many of their operands must then be data.
_MOVING = {
    **dict.fromkeys(("getitem", "index_select", "gather", "take_along_dim", "take"), 2),
    **dict.fromkeys(("masked_select", "nonzero", "argwhere", "unique", "pack_padded_sequence"), 1),
}


class _UseRecorder(CallMode):
    """Notes uses while the network runs."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.uses: list[Use] = []
        self.unhandled: dict[str, set[str]] = {}
        self.moved = False

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, marked, and a use noted."""
        if func is F.multi_head_attention_forward:
            with self:  # a composite: look inside
                return _attention_body(*args, **kwargs)
        result = _as_no_view(func(*args, **kwargs), _tensors((*args, *kwargs.values())))
        produced = _tensors((result,))
        if produced:
            self._note(func, args, kwargs, produced)
        return result

    def _note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], produced: list[Tensor]
    ) -> None:
        """Mark the results, and record a use where data meet a tracked tensor."""
        operands = _tensors((*args, *kwargs.values()))
        tracked = [t for t in operands if hasattr(t, "_linnet_from") and t.requires_grad]
        has_data = any(hasattr(t, "_linnet_data") for t in operands)
        name = _name(func)
        if name in _MOVING and sum(hasattr(t, "_linnet_data") for t in operands) >= _MOVING[name]:
            self.moved = True
        if tracked and not has_data and not self._repeats_for_examples(name, tracked, produced):
            self._mark_derived(tracked, produced)
            return
        if tracked:
            self._record(name, args, kwargs, tracked, produced)
        if tracked or has_data or self._begins_states(name, produced):
            for t in produced:
                t._linnet_data = True  # type: ignore[attr-defined]

    def _begins_states(self, name: str, produced: list[Tensor]) -> bool:
        """Whether these are zeros for every example: the state that a recurrent network begins with."""
        found = produced[0]
        if name != "zeros" or found.ndim < 2 or not found.is_floating_point():
            return False
        return found.shape[0] == self.n or (found.ndim > 2 and found.shape[1] == self.n)  # (layers, N, width)

    def _repeats_for_examples(self, name: str, tracked: list[Tensor], produced: list[Tensor]) -> bool:
        """Whether a parameter is spread over the examples here (a class token, a query)."""
        source, result = tracked[0], produced[0]
        if name == "embedding":  # a table looked up alike for every example
            return result.ndim > 2 and result.shape[0] == self.n
        if name not in REPEATING:
            return False
        grows = result.ndim > source.ndim or (source.ndim > 0 and source.shape[0] == 1)
        return result.ndim > 0 and result.shape[0] == self.n and grows

    def _mark_derived(self, tracked: list[Tensor], produced: list[Tensor]) -> None:
        """Results that depend on parameters alone remember which."""
        names = tuple(dict.fromkeys(n for t in tracked for n in t._linnet_from))  # type: ignore[attr-defined]
        for t in produced:
            if hasattr(t, "_linnet_leaf") or not t.requires_grad:
                continue
            t._linnet_from = names  # type: ignore[attr-defined]
            if hasattr(tracked[0], "_linnet_leaf") and _is_transpose(t, tracked[0]):
                t._linnet_transpose_of = tracked[0]  # type: ignore[attr-defined]

    def _record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tracked: list[Tensor],
        produced: list[Tensor],
    ) -> None:
        """Turn the call into uses, or list its parameters as unhandled."""
        result = produced[0]
        found = describe(name, args, kwargs, result, self.n)
        # what an operation writes into a view of something else is read through that something later on
        overwritten = result._is_view() and any(result is t for t in _tensors(args))
        overwritten |= found is not None and any(a is not None and a is result for _, _, a, _ in found)
        if found is None or overwritten or len(produced) != 1 or not result.requires_grad:
            for t in tracked:
                for source in t._linnet_from:  # type: ignore[attr-defined]
                    self.unhandled.setdefault(source, set()).add(name)
            return
        edge = get_gradient_edge(result)
        for kind, operand, a, options in found:
            table = getattr(operand, "_linnet_rows", None)
            if table is not None and kind == "embedding" and _by_rows(table[1]):
                operand, options = table[0], {**options, "rows": table[1][:, 0]}
            leaf = getattr(operand, "_linnet_transpose_of", None)
            if leaf is not None and kind == "linear":
                operand, options = leaf, {**options, "transposed": not options.get("transposed", False)}
            direct = hasattr(operand, "_linnet_leaf")
            a = None if a is None else a.detach()
            read = Operand(operand, operand._linnet_from, direct)  # type: ignore[attr-defined]
            self.uses.append(Use(kind, read, Result(result.shape, edge), a, options))


def _by_rows(mask: Tensor) -> bool:
    """Whether whole rows of a table vary, or do not."""
    return bool((mask == mask[:, :1]).all())


def _as_no_view(result: Any, operands: list[Tensor]) -> Any:
    """The result of an operation on tracked tensors, without being a view where only torch knows of what."""
    # Some operations (a linear layer with bias on a sequence, einsum, instance norm) return a view of a
    # tensor of their own. When the network writes into such a result, autograd gives it another history, and
    # its gradient never passes the place that it had when it was made.
    if not isinstance(result, Tensor) or not result.requires_grad or not result._is_view():
        return result
    places = {t.untyped_storage().data_ptr() for t in operands}
    if result.untyped_storage().data_ptr() in places or not any(hasattr(t, "_linnet_from") for t in operands):
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


def _name(func: Callable[..., Any]) -> str:
    """The plain name of a torch function; a property goes by its own name."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name.strip("_")


def _tensors(items: Iterable[Any]) -> list[Tensor]:
    """The tensors among the items, lists and tuples searched."""
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(_tensors(item))
    return found


def _is_transpose(view: Tensor, leaf: Tensor) -> bool:
    """Whether ``view`` is ``leaf.t()`` under whatever name it was taken."""
    return (
        view.ndim == leaf.ndim == 2
        and not torch._C._functorch.is_functorch_wrapped_tensor(view)  # has no place in memory
        and view.data_ptr() == leaf.data_ptr()
        and view.shape == leaf.shape[::-1]
        and view.stride() == leaf.stride()[::-1]
        and view.dtype == leaf.dtype
    )


# the same Python function, but its own call is not intercepted; the calls inside it are
_attention_body = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def channels_last(x: Tensor) -> Tensor:
    """Images with their channels last in memory, also where there is one; other tensors as they are."""
    if not _is_image(x):
        return x
    _, c, h, w = x.shape
    # one channel lies in memory as if it were first: only strides say that it is last
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, w * c, c))


def forward_trace(function: Functional, x: Inputs) -> Trace:
    """A traced pass, with channels last where there are images and convolutions and the network runs so."""
    if not _helps(function, x):
        return trace(function, x)
    kept = STRIDES_KEPT.set(True)
    try:
        return trace(function, map_tensors(channels_last, x))
    except RuntimeError:  # a view of what is no longer in one piece
        function.cache.channels_last = False
    finally:
        STRIDES_KEPT.reset(kept)
    return trace(function, x)


def _helps(function: Functional, x: Inputs) -> bool:
    """Whether convolutions may see images, on a CPU."""
    if function.device.type != "cpu" or not any(map(_is_image, tensors_in(x))):
        return False
    if function.cache.channels_last is None:
        function.cache.channels_last = any(isinstance(m, nn.Conv2d) for m in function.model.modules())
    return function.cache.channels_last


def _is_image(x: Tensor) -> bool:
    """Whether a tensor may hold images."""
    return x.ndim == 4 and x.dtype == torch.float32
