"""Dense reference values of Kronecker factors in float64, from layers watched one example at a time.

The inputs and output gradients of linear and convolutional modules are noted by hooks; the receptive fields
of a convolution are its results under one-hot kernels. This file imports torch alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLVE: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


@dataclass
class WatchedLayer:
    """The uses of one weight."""

    weight: str  # its name
    bias: str | None  # name of the bias that is part of every use, or ``None``
    transposed: bool  # whether the weight is stored with its inputs first
    # for each example, the inputs of each use (R, S, d), with R groups and S positions
    inputs: list[list[Tensor]] = field(default_factory=list)
    # for each example, the output gradients of each use (K, R, S, c)
    gradients: list[list[Tensor]] = field(default_factory=list)


def watched_layers_oracle(
    model: nn.Module, x: Any, columns: Tensor, output: Callable[[Any], Tensor] | None = None
) -> dict[str, WatchedLayer]:
    """Inputs and output gradients of linear and convolutional modules, example by example."""
    # columns (N, K, C)
    model = copy.deepcopy(model).double().eval()
    tracked = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    names = {id(parameter): name for name, parameter in tracked}
    modules = {
        module: names[id(module.weight)]
        for module in model.modules()
        if _is_watched(module) and id(getattr(module, "weight", None)) in names
    }
    layers: dict[str, WatchedLayer] = {}
    for example, directions in zip(_examples(x), columns.double(), strict=True):
        f, calls = _watch(model, list(modules), example, output)
        for name in dict.fromkeys(modules.values()):
            own = [call for call in calls if modules[call[0]] == name]
            if not own:
                continue
            layer = layers.setdefault(name, _layer(name, [call[0] for call in own], names))
            layer.inputs.append([_inputs(module, a) for module, a, _ in own])
            layer.gradients.append([_gradients(call, f, directions) for call in own])
    return layers


def kfac_oracle(
    model: nn.Module,
    x: Any,
    columns: Tensor,
    sharing: str = "expand",
    output: Callable[[Any], Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Kronecker factors A (a mean over inputs) and B (a sum over output gradients) of each layer."""
    # columns (N, K, C)
    if sharing not in ("expand", "reduce"):
        raise ValueError(f"sharing is {sharing!r}. Expected: 'expand' or 'reduce'.")
    found = {}
    masks = x["attention_mask"].bool() if isinstance(x, Mapping) and "attention_mask" in x else None
    for name, layer in watched_layers_oracle(model, x, columns, output).items():
        second: list[Tensor] = []
        outer: list[Tensor] = []
        for n, (uses, slopes) in enumerate(zip(layer.inputs, layer.gradients, strict=True)):
            a, g = torch.cat(uses, 1), torch.cat(slopes, 2)  # (R, S, d) and (K, R, S, c), uses as positions
            if masks is not None and a.shape[1] == masks.shape[1]:  # padding does not count
                a, g = a[:, masks[n]], g[:, :, masks[n]]
            if layer.bias is not None:
                a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
            if sharing == "reduce":
                a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
            second += [torch.einsum("rd,re->rde", a[:, s], a[:, s]) for s in range(a.shape[1])]
            outer += [
                torch.einsum("rc,re->rce", g[k, :, s], g[k, :, s])
                for k in range(g.shape[0])
                for s in range(g.shape[2])
            ]
        found[name] = torch.stack(second).mean(0), torch.stack(outer).sum(0)
    return found


def _is_watched(module: nn.Module) -> bool:
    """Whether the module's weight multiplies its input; Conv1D is a linear layer of language models."""
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)) or type(module).__name__ == "Conv1D"


def _layer(name: str, modules: Sequence[nn.Module], names: Mapping[int, str]) -> WatchedLayer:
    """The layer of one weight; a bias belongs to it if it is part of every use."""
    biases = {names.get(id(getattr(module, "bias", None))) for module in modules}
    transposed = isinstance(modules[0], _TRANSPOSED)
    joined = next(iter(biases)) if len(biases) == 1 and not transposed else None
    return WatchedLayer(name, joined, transposed or type(modules[0]).__name__ == "Conv1D")


def _watch(
    model: nn.Module, modules: Sequence[nn.Module], example: Any, output: Callable[[Any], Tensor] | None
) -> tuple[Tensor, list[tuple[Any, Tensor, Tensor]]]:
    """Outputs (C,) of one example, and each call of a module with its input and result."""
    calls: list[tuple[Any, Tensor, Tensor]] = []
    watching = True

    def note(module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> Tensor:
        if watching:
            calls.append((module, inputs[0].detach().clone(), result))
        return result.clone()  # what follows may write into it

    hooks = [module.register_forward_hook(note) for module in modules]
    result = model(**example) if isinstance(example, Mapping) else model(*example)
    watching = False
    for hook in hooks:
        hook.remove()
    f: Tensor = (result if output is None else output(result)).reshape(-1)
    return f, calls


def _inputs(module: Any, a: Tensor) -> Tensor:
    """Inputs of one call, (R, S, d)."""
    if isinstance(module, _CONVOLUTIONS):
        fields = _one_hot(module, module.in_channels)
        return _grouped(module._conv_forward(a, fields, None), module.groups)
    if isinstance(module, _TRANSPOSED):
        return _grouped(a, module.groups)
    return a.reshape(1, -1, a.shape[-1])


def _gradients(call: tuple[Any, Tensor, Tensor], f: Tensor, directions: Tensor) -> Tensor:
    """Gradients of one call's result in every direction, (K, R, S, c)."""
    module, a, result = call
    rows = []
    for direction in directions:
        (g,) = torch.autograd.grad(f @ direction, result, retain_graph=True, allow_unused=True)
        g = torch.zeros_like(result) if g is None else g
        if isinstance(module, _TRANSPOSED):
            convolve = _CONVOLVE[a.ndim - 3]
            fields = _one_hot(module, module.out_channels)
            options = (module.stride, module.padding, module.dilation, module.groups)
            g = convolve(g, fields, None, *options)
            for axis, size in enumerate(a.shape[2:], start=2):
                g = g.narrow(axis, 0, size)  # what output_padding adds is reached by no input
        convolution = isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED))
        rows.append(_grouped(g, module.groups) if convolution else g.reshape(1, -1, g.shape[-1]))
    return torch.stack(rows)


def _one_hot(module: Any, channels: int) -> Tensor:
    """One-hot kernels, one for each number in a receptive field of each group."""
    shape = (channels // module.groups, *module.kernel_size)
    size = torch.Size(shape).numel()
    return torch.eye(size, dtype=torch.float64).view(size, *shape).repeat(module.groups, *[1] * len(shape))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(1, R · d, *positions) as (R, S, d)."""
    return x.reshape(groups, x.shape[1] // groups, -1).mT


def _examples(x: Any) -> Iterator[Any]:
    """The examples of a batch one by one, each a batch of one in float64."""
    named = isinstance(x, Mapping)
    parts = list(x.values()) if named else list(x) if isinstance(x, (tuple, list)) else [x]
    for i in range(parts[0].shape[0]):
        picked = [part[i : i + 1] for part in parts]
        picked = [part.double() if part.is_floating_point() else part for part in picked]
        yield dict(zip(x, picked, strict=True)) if named else picked
