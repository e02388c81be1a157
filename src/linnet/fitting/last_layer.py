"""The last linear layer of a network: finding it, replacing it, and computing its inputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from linnet.errors import InputError, LinnetError, ModelError
from linnet.params import instance, refuse
from linnet.tangent.batch import MASK, Inputs, mask_of, masked_mean, take
from linnet.tangent.functional import (
    Functional,
    OutputAdapter,
    adapt_outputs,
    check_output,
    copied,
    lies_in,
    without_wrapper,
)
from linnet.tangent.parts import in_parts
from linnet.tangent.selection import Selector, owner, selected

L = TypeVar("L", bound=nn.Module)
HIDDEN, POOLER = "last_hidden_state", "pooler"  # as encoders of transformers call them
PADDING = "_linnet_padding"  # attribute of a network: the token id that is masked
POOLING = "pooling_mode"  # attribute of a part of sentence-transformers: how states become one vector
BELOW = "_linnet_below"  # attribute of a network that was made here: the words for what is below its head
RECORD = "_linnet_head"  # attribute of a network whose head was put there: where, how, on which labels
CANDIDATES = 5  # layers that an error names: the head is among the last that a network registers
FEW = 4  # examples on which the last layer is checked to be the last


class Appended(nn.Module):
    """A network whose result is turned into a tensor, with a linear layer behind it where it has none."""

    # Hidden states (N, T, D), which encoders call `last_hidden_state`, are averaged over the positions that
    # the attention mask counts, as sentence encoders do.

    def __init__(self, body: nn.Module, width: int | None = None, output: OutputAdapter = None) -> None:
        super().__init__()
        self.body, self.width, self.output, self.averaged = body, width, output, False
        self.idle: str | None = None  # a pooler that the outputs are known not to depend on
        weights = next((p for p in body.parameters() if p.is_floating_point()), torch.zeros(1))
        self.head = nn.Identity() if width is None else zero_layer(nn.Linear, width, 1, like=weights)
        names = list(inspect.signature(body.forward).parameters)
        self.mask_place = names.index(MASK) if MASK in names else len(names)
        if width is None and (known := getattr(body, RECORD, None)):  # the head that with_head put there
            setattr(self, RECORD, {**known, "layer": f"body.{known['layer']}"})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of the linear layer, (N, 1) before it is replaced."""
        if PADDING in vars(self.body):
            args, kwargs = masked(self.body, args, kwargs)
        result = self.body(*args, **kwargs)
        mask = kwargs.get(MASK, args[self.mask_place] if self.mask_place < len(args) else None)
        found: Tensor = self.head(taken(result, self.output, mask))
        return found


def mask_padding(model: nn.Module) -> int | None:
    """Let a network of token ids mask those of its configuration's padding where no mask is given."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    names = list(inspect.signature(model.forward).parameters)
    if not isinstance(token, int) or names[:1] != ["input_ids"] or MASK not in names:
        return None
    setattr(model, PADDING, token)
    model.register_forward_pre_hook(masked, with_kwargs=True)
    return token


def masked(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a network, with a mask of padding where token ids are all that there is."""
    if len(args) != 1 or named or not isinstance(args[0], Tensor) or args[0].is_floating_point():
        return args, named
    return args, {MASK: (args[0] != getattr(model, PADDING)).long()}


def taken(result: Any, output: OutputAdapter, mask: Tensor | None = None) -> Tensor:
    """What a network returns as a tensor, hidden states averaged over positions, (N, ...)."""
    # mask (N, T)
    hidden = _hidden(result, output)
    if hidden is None:
        return adapt_outputs(result, output)
    if hidden.ndim == 4:  # maps of a network of images, channels first
        return hidden.mean((2, 3))
    if mask is None:
        return hidden.mean(1)
    if mask.shape != hidden.shape[:2]:
        raise ModelError(
            f"{MASK} has shape {tuple(mask.shape)}, and {HIDDEN} {tuple(hidden.shape)}",
            expected="a number for every position",
            remedy=f"pass output=, for example output=lambda r: r.{HIDDEN}[:, 0]",
        )
    return masked_mean(hidden, mask)


def _hidden(result: Any, output: OutputAdapter) -> Tensor | None:
    """The hidden states in what an encoder returns, where nothing else is asked for or more like outputs."""
    if isinstance(result, Tensor) or callable(output) or output not in (None, HIDDEN):
        return None
    parts = result if isinstance(result, Mapping) else vars(result) if hasattr(result, HIDDEN) else {}
    found = parts.get(HIDDEN) if output or parts.get("logits") is None else None
    return found if isinstance(found, Tensor) and found.ndim in (3, 4) else None


def _encoder(model: nn.Module) -> nn.Module:
    """The network inside a sentence encoder of sentence-transformers, where it averages states as we do."""
    kinds, parts = [kind.__name__ for kind in type(model).__mro__], list(model.children())
    if "SentenceTransformer" not in kinds or not parts:
        return model
    network = getattr(parts[0], "auto_model", None)
    modes = [getattr(part, POOLING, "") for part in parts[1:2]]
    others = [type(part).__name__ for part in parts[2:] if type(part).__name__ != "Normalize"]
    if not isinstance(network, nn.Module) or modes != ["mean"] or others:
        raise ModelError(
            f"model ({kinds[0]}) has parts other than a network and the mean of its states",
            expected="a transformer, or a sentence encoder that averages its states",
            remedy="pass model[0].auto_model, and output= where the states are not to be averaged, such as "
            "output=lambda r: r.last_hidden_state[:, 0]",
        )
    return network


def not_alone(model: nn.Module) -> nn.Module:
    """A network; around a lone linear layer, whose inputs are features already, one that has it inside."""
    return nn.Sequential(model) if isinstance(model, nn.Linear) else model


@torch.no_grad()
def ending_linear(model: nn.Module, x: Inputs, output: OutputAdapter = None) -> nn.Module:
    """A network that ends in a linear layer: the one given, or a linear layer behind what it returns."""
    # Encoders without a head return features, one vector an example; a head is put behind them. Outputs that
    # its last linear layer gives before something else (a softmax, an activation) are no features.
    check_output(output)
    model = _encoder(without_wrapper(model))
    if output is None:
        model = not_alone(model)
    averaged: list[bool] = []

    def take_part(result: Any) -> Tensor:
        averaged.append(_hidden(result, output) is not None)
        return taken(result, output)

    function = Functional(model, output=take_part)
    function.check_runs(take(x, slice(0, 1)))
    few = take(x, slice(0, FEW))
    outputs, call = _last_call(function, few)
    if outputs.ndim == 3 and mask_of(few) is not None:
        raise ModelError(
            f"model ({type(model).__name__}) has outputs {tuple(outputs.shape[1:])} for a text, one a token",
            expected="a classifier of texts, or an encoder, whose states are averaged",
            remedy="for a class a text pass the network below its head, such as model.base_model of "
            "transformers, or output=; for the loss of its own tokens "
            'linnet.fit(linnet.linearize(model, params=...), data, "cross-entropy", axis=-1)',
        )
    if call and not averaged[-1] and (_same(call[1], outputs) or _ends(function, few, outputs)):
        return model if output is None else Appended(model, None, output)
    elsewhere = giving(function, few, outputs)
    # what follows the last layer is no more a feature than its result, unless the user says so
    follows = output is None and outputs.ndim == 2 and call and call[1].shape == outputs.shape
    follows = follows and _depends(function, last_linear(function.model)[1], few, outputs)
    if elsewhere is not None or follows or _probabilities(outputs):
        _refuse(model, elsewhere, _ending(function, few, outputs))
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        axes = "(2, 3)" if outputs.ndim == 4 else "1"  # maps of channels, or tokens
        raise ModelError(
            f"model ({type(model).__name__}) returns outputs of shape {tuple(outputs.shape)} that no "
            "nn.Linear of it gives",
            expected="a network that ends in a linear layer, or one that returns features (N, D)",
            remedy="pass output= to take one vector per example, such as "
            f"output=lambda r: r.mean({axes}), the mean over positions",
        )
    made = Appended(model, outputs.shape[1], output)
    made.averaged = averaged[-1] and output is None
    pooler = getattr(function.model, POOLER, None)
    if isinstance(pooler, nn.Module) and not _depends(function, pooler, few, outputs):
        made.idle = f"body.{POOLER}"
    return made


@torch.no_grad()
def features(model: nn.Module, x: Inputs, batch: int = 256) -> Tensor:
    """Inputs of the last linear layer, (x)."""
    # They are what the network returns with the identity in its place: a classifier of texts that takes the
    # outputs at the last token, or their mean, gives its features there.
    function = Functional(model)
    function.check_runs(take(x, slice(0, 1)))
    few = take(x, slice(0, FEW))
    last_linear(function.model)  # raises where there is none
    outputs, call = _last_call(function, few)
    if call and _same(call[1], outputs):
        return in_parts(function.model, lambda part: _head_inputs(function, part), x, batch)
    if not _ends(function, few, outputs):
        _refuse(model, giving(function, few, outputs), _ending(function, few, outputs))
    function = Functional(bared(model))
    return in_parts(function.model, partial(function.flat, function.theta), x, batch)


def is_head(function: Functional, x: Inputs) -> bool:
    """Whether the weights are those of the last linear layer alone, and outputs what that returns."""
    layers = _linear_layers(function.model)
    if not layers:
        return False
    name, _ = layers[-1]
    if any(owner(one) != name for one in function.names):
        return False
    outputs, call = _last_call(function, take(x, slice(0, FEW)))
    return not name or (call is not None and _same(call[1], outputs))


def _head_inputs(function: Functional, x: Inputs) -> Tensor:
    """Inputs of the last linear layer, (n, D), as the network calls it."""
    call = _last_call(function, x)[1]
    assert call is not None
    return call[0].flatten(1)


def _last_call(function: Functional, x: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Outputs, and input and result of the last call of the last linear layer, where there is one inside."""
    calls: list[tuple[Tensor, Tensor]] = []
    inside = []  # a single layer is no head of a network
    if any(name for name, _ in _linear_layers(function.model)):
        inside = [last_linear(function.model)[1]]
    handles = [
        layer.register_forward_hook(lambda _, args, result: calls.append((args[0], result)))
        for layer in inside
    ]
    try:
        outputs = function.check_runs(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, calls[-1] if calls else None


def _same(result: Tensor, outputs: Tensor) -> bool:
    """Whether the network's outputs are those of the layer."""
    return result.numel() == outputs.numel() and torch.equal(result.reshape(outputs.shape), outputs)


def giving(function: Functional, x: Inputs, outputs: Tensor) -> str | None:
    """The linear layer whose result is the network's outputs, wherever it is registered."""
    return _given_by(function, x, outputs, dict(_linear_layers(function.model)))


def _ending(function: Functional, x: Inputs, outputs: Tensor) -> str | None:
    """The module without parameters whose result is the network's outputs, such as a sigmoid."""
    modules = {name: module for name, module in function.model.named_modules() if not [*module.parameters()]}
    return _given_by(function, x, outputs, modules)


def _given_by(
    function: Functional, x: Inputs, outputs: Tensor, layers: Mapping[str, nn.Module]
) -> str | None:
    """The first of some layers whose result is the network's outputs."""
    results: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _layer, _given, result: results.update({name: result})

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items() if name]
    try:
        function.check_runs(x)
    finally:
        for handle in handles:
            handle.remove()
    every = results.items()
    return next((name for name, t in every if isinstance(t, Tensor) and _same(t, outputs)), None)


def _depends(function: Functional, layer: nn.Module, x: Inputs, outputs: Tensor) -> bool:
    """Whether outputs are made of the result of a layer; an unused pooler leaves them alone."""
    # no activation or norm that may follow gives the same for the cosine
    handle = layer.register_forward_hook(lambda _layer, _given, result: result.cos())
    try:
        return not torch.equal(function.check_runs(x), outputs)
    except LinnetError:  # what follows cannot take it
        return True
    finally:
        handle.remove()


def _probabilities(outputs: Tensor) -> bool:
    """Whether outputs are probabilities of classes, or their logarithms."""
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    slack = max(1e-3, 16 * torch.finfo(outputs.dtype).eps)  # they are rounded one by one, and add up to one
    outputs = outputs.double()
    plain = bool((outputs >= 0).all()) and bool((outputs.sum(1) - 1).abs().max() < slack)
    return plain or bool(outputs.logsumexp(1).abs().max() < slack)


def _refuse(model: nn.Module, elsewhere: str | None, ending: str | None) -> NoReturn:
    """Raise for a network whose outputs are not those of its last linear layer."""
    what = "features, but probabilities"
    if any(name for name, _ in _linear_layers(model)):
        what = f"what its last nn.Linear ({last_linear(model)[0]!r}) gives"
    remedy = "leave out what follows it, such as a softmax"
    named = f"; name the layer with linnet.with_head(..., head=), such as one of {_last_names(model)}"
    if RECORD in vars(model):  # a layer was named
        named = "; pass the network below its heads, where several make the outputs"
    if elsewhere is not None:
        what += f", but what {elsewhere!r} gives"
        remedy = f"name that layer, linnet.with_head(..., head={elsewhere!r}), with the same output="
        named = ""
    elif ending is not None:
        what += f", but what the {type(model.get_submodule(ending)).__name__} {ending!r} behind it gives"
        last = isinstance(model, nn.Sequential) and ending == [*model._modules][-1]
        remedy = "leave that out: " + ("pass model[:-1]" if last else "put torch.nn.Identity() in its place")
    raise ModelError(
        f"model ({type(model).__name__}) does not return {what}",
        expected="a network that ends in a linear layer, takes one of its results, or returns features",
        remedy=f"{remedy}{named}; or pass output=lambda r: r where what it returns are features, as of an "
        "encoder that ends in an activation",
    )


def bared(model: nn.Module) -> nn.Module:
    """The network with the identity in the place of its last linear layer."""
    clone = copied(model)
    name, old = last_linear(clone)
    like = next(old.parameters())  # a weight that is made of others would be made anew
    new = zero_layer(nn.Linear, old.in_features, old.in_features, like=like, bias=False)
    with torch.no_grad():
        new.weight.fill_diagonal_(1)
    replace_module(clone, name, new)
    return clone


def _ends(function: Functional, x: Inputs, outputs: Tensor) -> bool:
    """Whether outputs are those of the last linear layer on what the network returns without it."""
    layer = last_linear(function.model)[1]
    try:
        phi = Functional(bared(function.model), output=function.output).check_runs(x)
    except LinnetError:  # such as one that looks at the number of outputs
        return False
    if phi.shape != (*outputs.shape[:-1], layer.in_features) or outputs.shape[-1] != layer.out_features:
        return False
    bias = 0.0 if layer.bias is None else layer.bias
    error = (phi @ layer.weight.T + bias - outputs).abs().max()
    # a mean over positions is rounded in another order; what is no linear layer is off by more than this
    size = (phi.abs() @ layer.weight.T.abs()).max()
    return bool(error <= torch.finfo(outputs.dtype).eps ** 0.5 * size)


def what_is_known(model: nn.Module) -> dict[str, Any]:
    """What the heads and the coordinates of a network, and of all networks in it, were made of."""
    records = [getattr(module, RECORD) for module in model.modules() if hasattr(module, RECORD)]
    examples: frozenset[str] = frozenset().union(*(record.get("examples", ()) for record in records))
    found: dict[str, Any] = {"examples": examples} if records else {}
    for flag in ("metric", "sketch"):
        found |= {flag: True} if any(record.get(flag) for record in records) else {}
    return found | ({"init": "probe"} if any(record.get("init") == "probe" for record in records) else {})


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer of a network, or the one that ``with_head`` put there."""
    linear = _linear_layers(model)
    known = getattr(model, RECORD, {}).get("layer")
    linear = [entry for entry in linear if entry[0] == known] or linear
    if not linear:
        raise ModelError(
            f"model ({type(model).__name__}) has no nn.Linear to replace",
            expected="a network that ends in a linear layer",
            remedy="replace the head yourself and pass the network to linnet.linearize",
        )
    if linear[-1][0] == "":
        raise ModelError(
            "model is a single nn.Linear",
            expected="a network with a linear last layer inside",
            remedy="wrap it: nn.Sequential(layer)",
        )
    return linear[-1]


def selected_inside(model: nn.Module, params: Selector = None, own: bool = False) -> dict[str, Tensor | None]:
    """Selected parameters by the names that they have in a network that a head may have been put behind."""
    # own: whether the user named them in the network as it is
    if own or not isinstance(model, Appended):
        # Where the head alone requires gradients it was trained alone: that says nothing of the layers below.
        head = last_linear(model)[0]
        free = [name for name, p in model.named_parameters() if p.requires_grad and owner(name) != head]
        return selected(model, params if params is not None or free else "all")
    found = {f"body.{name}": mask for name, mask in selected(model.body, params).items()}
    return {name: mask for name, mask in found.items() if params is not None or not lies_in(model.idle, name)}


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Every linear layer by name, in the order of registration."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def named_linear(model: nn.Module, head: str) -> str:
    """The one linear layer that a user names."""
    instance("head", head, str, "the name of a linear layer, or a regular expression for it")
    linear = dict(_linear_layers(model))
    try:
        found = [head] if head in linear else [name for name in linear if re.fullmatch(head, name)]
    except re.error as error:
        refuse("head", head, f"the name of a linear layer, or a regular expression ({error})")
    if len(found) != 1 or not found[0]:
        raise InputError(
            f"head={head!r} names {len(found)} linear layers" + (f": {', '.join(found)}" if found else ""),
            expected="one linear layer inside the network",
            remedy=f"pass one of {_last_names(model)}",
        )
    return found[0]


def _last_names(model: nn.Module) -> str:
    """The last few linear layers, the likeliest heads first."""
    return ", ".join(repr(name) for name, _ in _linear_layers(model)[::-1][:CANDIDATES])


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module in the place that a dotted path names."""
    *folders, leaf = path.split(".")
    place = model
    for folder in folders:
        place = getattr(place, folder)
    setattr(place, leaf, new)


def zero_layer(kind: type[L], *sizes: int, like: Tensor, **options: Any) -> L:
    """A layer with all parameters zero, made without random numbers."""
    # The constructors of torch's layers draw their first values from the global random stream, which would
    # move it for a layer whose values are set anyway.
    layer: L = skip_init(kind, *sizes, device=like.device, dtype=like.dtype, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    return layer


# -- centered --------------------------------------------------------------------------------------
#
# A head whose outputs start at zero while the layers below keep the derivatives of a probe.
#
# A linear probe fits its own training labels almost perfectly, so what is left of them, t − f₀, is tiny,
# and leave-one-out on it would say that nothing remains to be learned. The head is linear in its weights,
# so
#
#     f₀(x) + J(x) δ  =  J_body(x) δ_body + φ(x)ᵀ(W₀ + δ_W)
#
# is fitted as well with the ridge on W₀ + δ_W in place of δ_W: the head is drawn to zero and not to the
# probe. In the fit this is f₀ ≡ 0 with the same J. The labels enter f₀ no more, but through W₀ they still
# enter the derivatives of the layers below, so leave-one-out stays optimistic where samples are fewer
# than features.


class CenteredLinear(nn.Module):
    """A linear layer less its own value at the start, so that it begins at zero."""

    # W φ + b − (W₀ φ + b₀), where no derivative passes through the second term.

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.register_buffer("weight_origin", layer.weight.detach().clone())
        self.register_buffer("bias_origin", layer.bias.detach().clone())

    def forward(self, phi: Tensor) -> Tensor:
        """The layer's change since the start, (..., C)."""
        # phi (..., D)
        origin = F.linear(phi.detach(), self.weight_origin, self.bias_origin)  # type: ignore[arg-type]
        return F.linear(phi, self.weight, self.bias) - origin


def with_centered_head(model: nn.Module) -> nn.Module:
    """A copy of a network whose outputs are zero, with the derivatives that it has."""
    clone = copied(model)
    name, layer = last_linear(clone)
    replace_module(clone, name, CenteredLinear(layer))
    for module in clone.modules():
        if hasattr(module, RECORD) and "folds" not in getattr(module, RECORD):
            delattr(module, RECORD)  # the labels are in the outputs no more
    return clone
