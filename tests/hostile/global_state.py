"""Snapshots of the process-wide state that a call into linnet must leave unchanged."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

HOOKS = (
    "_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks",
    "_global_forward_hooks", "_global_module_registration_hooks", "_global_buffer_registration_hooks",
    "_global_parameter_registration_hooks",
)  # fmt: skip


def global_state() -> dict[str, Any]:
    """Random streams, environment, modes, hooks and flags of the process."""
    backends = torch.backends
    return {
        "torch's random stream": torch.get_rng_state().tolist(),
        "numpy's random stream": [np.asarray(part).tolist() for part in np.random.get_state()],  # noqa: NPY002
        "python's random stream": random.getstate(),
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autograd's threads": torch.autograd.is_multithreading_enabled()
        if hasattr(torch.autograd, "is_multithreading_enabled")
        else None,
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "flush denormal": float(torch.tensor([1e-310], dtype=torch.float64).mul(1.0)) != 0.0,
        "mkldnn": (backends.mkldnn.enabled, backends.mkldnn.deterministic, backends.mkldnn.allow_tf32),
        "cudnn": (
            backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
        ),
        "tf32": (backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()),
        "attention": (
            backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "hooks of all modules": {name: len(getattr(modules, name)) for name in HOOKS},
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "checkpointing": (
            id(torch.utils.checkpoint.CheckpointFunction), id(torch.utils.checkpoint.checkpoint),
            id(getattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", None)),
        ),
        "warnings": list(warnings.filters),
        "display of warnings": warnings.showwarning,
        "numpy's errors": np.geterr(),
        "printing": vars(torch._tensor_str.PRINT_OPTS).copy(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "recursion limit": sys.getrecursionlimit(),
        "import path": list(sys.path),
        "signals": {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)},
        "python threads": threading.active_count(),
        "directory": Path.cwd(),
    }  # fmt: skip


def module_state(model: nn.Module) -> dict[str, Any]:
    """A network, down to the identity of its tensors, its gradients, its hooks and its attributes."""
    found: dict[str, Any] = {}
    for name, m in model.named_modules():
        for key, value in vars(m).items():
            if key in ("_parameters", "_buffers"):
                value = {place: _tensor_state(t) for place, t in value.items()}
            elif key == "_modules":
                value = {place: id(child) for place, child in value.items()}
            elif isinstance(value, dict):
                value = {place: id(entry) for place, entry in value.items()}
            elif isinstance(value, Tensor):
                value = _tensor_state(value)
            found[f"{name}.{key}"] = value
        found[f"{name} is a"] = type(m)
    return found


def _tensor_state(t: Tensor | None) -> Any:
    """A tensor's identity, values, gradient and hooks."""
    if t is None:
        return None
    gradient = None if t.grad is None else (id(t.grad), t.grad.tolist())
    hooks = len(t._backward_hooks or ())
    return id(t), t.data_ptr(), str(t.dtype), t.tolist(), t.requires_grad, gradient, hooks, type(t)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has changed, in words."""
    missing = object()
    return [
        name for name in dict.fromkeys([*before, *after])
        if before.get(name, missing) != after.get(name, missing)
    ]  # fmt: skip
