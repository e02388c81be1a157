"""Context managers that set torch's global modes for correct derivatives.

Inference mode, autocast, kernels without forward-mode formulas and checkpointing each make some
derivative fail or, worse, come out wrong without a word. Here each is put aside and put back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from linnet.params import holding
from linnet.tree import map_tensors, tensors_in

F = TypeVar("F", bound=Callable[..., Any])
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_ALONE = threading.RLock()
_FIRST_ORDER: ContextVar[bool] = ContextVar("linnet_first_order", default=False)
# Where torch's compiler keeps its files. Torch imports that compiler with the first derivative, optimizer or
# count of operations of a process, and writes this variable then, which child processes would inherit.
_COMPILER_FILES = "TORCHINDUCTOR_CACHE_DIR"


def has_recurrence(model: nn.Module) -> bool:
    """Whether any module of the network is recurrent."""
    return any(isinstance(module, _RECURRENT) for module in model.modules())


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """The environment of the process as it was, whatever torch imports for the first time meanwhile."""
    if torch.compiler.is_compiling():
        yield
        return
    before = os.environ.get(_COMPILER_FILES)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_COMPILER_FILES, None)
        elif os.environ.get(_COMPILER_FILES) != before:
            os.environ[_COMPILER_FILES] = before


@functools.cache
def import_compiler() -> None:
    """Let torch import, once in a process, what it would with the first derivative: 75 MB, in no budget."""
    with environment_kept():
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread at a time: who runs a network with other parameters in its place shares it with nobody."""
    # `functional_call` puts tensors into the module itself, and levels of forward mode, like the switches of
    # this file, are those of the whole process. Threads that answer requests from one fit would mix them up.
    if torch.compiler.is_compiling():
        yield
        return
    with _ALONE:
        yield


@contextlib.contextmanager
def first_order() -> Iterator[None]:
    """Passes that are differentiated once, backward, or not: attention may take its fused kernels."""
    # Those have no forward mode and no second derivative, but neither form nor keep the (T, T) matrix
    # (`benchmarks/attention.py`).
    if torch.compiler.is_compiling():
        yield
        return
    with holding(_FIRST_ORDER, True):
        yield


@contextlib.contextmanager
def differentiable_kernels(recurrent: bool) -> Iterator[None]:
    """Kernels with derivatives of every order, for the duration of the block; one thread at a time."""
    with alone(), environment_kept():
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with contextlib.ExitStack() as stack:
                if torch.compiler.is_compiling() or not _FIRST_ORDER.get():
                    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                    stack.enter_context(_HiddenRows())
                if recurrent:
                    stack.enter_context(_without_fused_recurrence())
                if not torch.compiler.is_compiling():
                    stack.enter_context(without_recomputation())
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


class CallMode(TorchFunctionMode, ABC):
    """Sees every call of a torch function inside its block."""

    @abstractmethod
    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(func, args, kwargs or {})


class _HiddenRows(CallMode):
    """Attention whose derivatives are right where a mask hides every position from a row."""

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, of attention with its derivatives right."""
        if func is scaled_dot_product_attention:
            func = _attention_without_nan
        return func(*args, **kwargs)


def _attention_without_nan(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Torch's attention, with the rows that see nothing uniform, and then zero."""
    # they are zero in torch too, but from a softmax that is NaN, and the derivative of its directional
    # derivative stays NaN
    if attn_mask is None:
        return scaled_dot_product_attention(query, key, value, None, *rest, **options)
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -math.inf
    hidden = ~seen.any(-1, keepdim=True)
    mask = attn_mask.masked_fill(hidden, 1)  # one number in the whole row, or "seen"
    return scaled_dot_product_attention(query, key, value, mask, *rest, **options).masked_fill(hidden, 0.0)


@contextlib.contextmanager
def _without_fused_recurrence() -> Iterator[None]:
    """The mkldnn and cuDNN recurrent kernels switched off."""
    mkldnn = torch.backends.mkldnn
    # flags() resets what it is not told; torch 2.6 does not know allow_tf32 yet
    names = [name for name in ("deterministic", "allow_tf32") if hasattr(mkldnn, name)]
    settings = {name: getattr(mkldnn, name) for name in names}
    with mkldnn.flags(enabled=False, **settings), torch.backends.cudnn.flags(enabled=False):
        yield


class _Direct:
    """Stands for the function of a reentrant checkpoint: runs it as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """The function's value, with its history."""
        del preserve
        return function(*args)


def _plain_run(*_: Any, **__: Any) -> Iterator[None]:
    """A checkpoint's run of its function when nothing is to be recomputed."""
    yield


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Checkpoints keep their activations: a recomputation would run with other parameters."""
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    old = {key: getattr(module, key) for key in (name, "CheckpointFunction") if hasattr(module, key)}
    new = {name: _plain_run, "CheckpointFunction": _Direct}
    try:
        for key in old:
            setattr(module, key, new[key])
        yield
    finally:
        for key, value in old.items():
            setattr(module, key, value)


def in_exact_mode(function: F) -> F:
    """Run a function outside inference mode and autocast; inference tensors among its inputs are cloned."""
    # They are cloned outside that mode too, where autograd refuses them.

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        cast = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
        inference = torch.is_inference_mode_enabled()
        if any(t.is_inference() for t in tensors_in((args, kwargs))) and not inference:
            args, kwargs = (_usable(arg) for arg in (args, kwargs))
        if not cast and not inference:
            with environment_kept():
                return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(environment_kept())
            for kind in cast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if inference:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                args, kwargs = (_usable(arg) for arg in (args, kwargs))
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _usable(x: Any) -> Any:
    """Inference tensors cloned, wherever they are in a batch."""
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, x)


@contextlib.contextmanager
def random_kept(*sources: Any, device: torch.device | None = None) -> Iterator[None]:
    """The random streams of the process, of a device, and of samplers and loaders, as they were."""
    every = (*sources, *(getattr(source, "sampler", None) for source in sources))
    own = [g for g in (getattr(source, "generator", None) for source in every) if g is not None]
    mine = [(g, g.get_state()) for g in own if isinstance(g, torch.Generator)]
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - samplers draw from it
    try:
        with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        for generator, state in mine:
            generator.set_state(state)
