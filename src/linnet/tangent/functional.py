"""A network as a pure function f(θ, x) of some of its parameters, everything else frozen."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from linnet.errors import InputError, LinnetError, ModelError, WeightsError
from linnet.linalg.factorize import is_finite, read
from linnet.linalg.operator import ParameterSpace
from linnet.memory import reuse_freed_memory
from linnet.number_types import Precision, current
from linnet.shown import first_line
from linnet.tangent.batch import (
    SHARED,
    TARGETS,
    TOKENS,
    Inputs,
    ambiguity,
    batch_size,
    example_shapes,
    observed,
    on_device,
    padding_token,
    place_of,
    take,
    with_padding,
)
from linnet.tangent.forward_mode import JvpPath, Params
from linnet.tangent.modes import alone, differentiable_kernels, has_recurrence, in_exact_mode
from linnet.tangent.selection import Selector, masks_of, selected, set_masks
from linnet.tree import hash_tensors, map_tensors, tensors_in

# Set where a pass takes no derivative that could reach the inputs: they keep their strides.
STRIDES_KEPT: ContextVar[bool] = ContextVar("strides kept", default=False)
# What errors of a wrong shape, type or device say.
_OF_SHAPE = (
    "shape", "size", "dim", "channel", "dtype", "scalar type", "same type", "device", "expected", "mat1",
    "out of range", "broadcast", "float", "must be tensor",
)  # fmt: skip
RUNNING = (
    "give layer {!r} running statistics (track_running_stats=True, and some batches in training mode before "
    "eval()), or use GroupNorm or LayerNorm in its place"
)
OWN_SHAPE = "inputs of the network's own shape"  # what the error of such a network expects
SMALL = 1 << 16  # entries of a buffer that is remembered as it was, whatever passes write to it
IDLE = "_linnet_idle"  # attribute of a network: a place in it that its outputs do not depend on
OutputAdapter = str | Callable[[Any], Tensor] | None


class Findings:
    """What has been found out about a network, each once."""

    def __init__(self) -> None:
        # what other weights do not change
        self.jvp: tuple[JvpPath, str] | None = None  # how J v is formed, and why not by forward mode
        self.folds: dict[int, Any] | None = None  # normalizations that convolutions take in
        self.operations: float | None = None  # of one example's forward pass
        self.inner_layers: set[tuple[str, ...]] = set()  # whose result is not the output
        self.keeps_inputs: bool | None = None  # whether no pass writes to its inputs
        self.independent: dict[Any, int] = {}  # how far examples are, by kind of batch
        self.own_rows: dict[Any, int] = {}  # whether gradients are their own, by shapes
        self.probe: Inputs = None  # made-up inputs
        # plans of derivatives, which few other weights change
        self.plans: dict[Any, Any] = {}  # by kind of pass
        self.plans_by_shape: dict[Any, Any] = {}
        self.output_shapes: dict[Any, torch.Size] = {}
        # what holds for these weights
        self.proved: dict[Any, int] = {}  # on how many examples a plan was
        self.kernels: dict[Any, Any] = {}  # what kernels could keep of examples
        self.formed: set[str] = set()  # parameters that batches use differently
        self.admitted: dict[Any, Any] = {}  # what is done with inputs
        self.unused: tuple[str, ...] = ()  # parameters that the outputs do not depend on
        self.one_function: bool | None = None  # whether it was compared with itself in training mode
        self.channels_last: bool | None = None  # whether passes over images are faster so
        self.inside: Functional | None = None  # the network inside coordinates
        self.others: dict[Any, Any] = {}  # of packages above

    def forget_derivatives(self) -> None:
        """What was found on an example that has no derivative holds for no other."""
        for found in (self.plans, self.plans_by_shape, self.proved):
            found.clear()
        self.jvp = None

    def of_other_weights(self, folds: bool, plans: bool) -> Findings:
        """What holds for other weights as well."""
        kept = ["jvp", "operations", "inner_layers", "keeps_inputs", "independent", "own_rows", "probe"]
        kept += ["folds"] * folds + ["plans", "plans_by_shape", "output_shapes"] * plans
        found = Findings()
        vars(found).update({name: getattr(self, name) for name in kept})
        return found


class Functional:
    """f(θ, x) of the selected parameters θ, in evaluation mode, on a private copy of the network."""

    # The copy makes sure that the user's model leaves every call as it came: mode, gradients, buffers, hooks
    # and random state; and that later training of it does not move θ₀.

    def __init__(self, model: nn.Module, params: Selector = None, output: OutputAdapter = None) -> None:
        check_output(output)
        model = without_wrapper(model)
        chosen = selected(model, params)
        self.names = list(chosen)
        self.held = _held(model, self.names) if params is None else 0
        self.model = _frozen_copy(model)
        set_masks(self.model, chosen)
        buffers = self.model.named_buffers(remove_duplicate=False)
        self._buffers = {name: t.clone() for name, t in buffers if t.numel() <= SMALL}
        self.output = output
        self.recurrent = has_recurrence(model)
        self.token = padding_token(model)
        self.source: Functional | None = None  # the same network in the type that it came in
        self.known: Any = None  # `KnownInputs` of a fit, where this is the network of one
        self.pinned: Precision | None = None  # the types of numbers that a fit was made with
        self.padding = padding_rows(self.model, self.names)
        self.cache = Findings()
        self._takes_targets = _takes_targets(model)
        self._masked: tuple[nn.Module, tuple[str, ...]] | None = None
        self._walked: tuple[nn.Module, dict[str, nn.Parameter], dict[str, tuple[str, ...]]] | None = None
        theta = self.theta
        self._kind = self.dtype  # of its weights when the buffers were remembered
        _check_finite(tensors_by_name(self.model))
        self.space = ParameterSpace.of(theta)
        reuse_freed_memory()

    def copy(self) -> Functional:
        """The same function on a network of its own, with nothing remembered."""
        twin = copy.copy(self)
        with alone():
            twin.model, twin.cache = copied(self.model), Findings()
        return twin

    @property
    def precision(self) -> Precision:
        """The types of numbers of its derivatives: those of a fit or in force; a float64 twin has its own."""
        if self.source is not None:
            return Precision()
        return current() if self.pinned is None else self.pinned

    def under(self, types: Precision) -> Functional:
        """The same function and network, its types of numbers independent of the place of a call."""
        if types == self.pinned:
            return self
        twin = copy.copy(self)
        twin.pinned = types
        return twin

    def arranged(self, output: OutputAdapter) -> Functional:
        """The same network with its result turned into a tensor otherwise; weights are shared, not copied."""
        check_output(output)
        twin = copy.copy(self)
        twin.output, twin.cache = output, Findings()
        return twin

    def in_float64(self) -> Functional:
        """The same function computed in float64, on a copy of the network, which converts its inputs."""
        if self.dtype == torch.float64 and not self.precision.coarser(self.dtype):
            return self
        twin = self.copy()
        twin.model.double()
        twin.space = ParameterSpace.of(twin.theta)
        twin.source = self.source or self
        return twin

    @in_exact_mode
    @torch.no_grad()
    def moved(self, tensors: Mapping[str, Tensor], in_place: bool = False, plans: bool = False) -> Functional:
        """The same function with other weights; what is known of the network's structure stays known."""
        mine = tensors_by_name(self.model)
        given = {name: (mine[name], t.detach()) for name, t in tensors.items() if name in mine}
        for name, (old, new) in given.items():
            if old.shape != new.shape:
                raise WeightsError(
                    f"{name} has shape {tuple(new.shape)}",
                    expected=f"{tuple(old.shape)}",
                    remedy="pass the weights of the network that was linearized",
                )
        _check_finite({name: new for name, (_, new) in given.items()})
        fixed = {name for name in given if name not in self.names}
        same = all(torch.equal(given[name][0], given[name][1].to(given[name][0])) for name in fixed)
        twin = self if in_place else self.copy()
        # How J v is formed depends on the architecture; folds also hold the network's fixed tensors.
        twin.cache = self.cache.of_other_weights(in_place and same, plans)
        theirs = tensors_by_name(twin.model)
        for name, (_, new) in given.items():
            if name in self.names or not same:
                target = theirs[name]
                target.data = new.to(device=target.device, dtype=target.dtype, copy=True)
        if not same:
            begun = {name: theirs[name].clone() for name in given if name in twin._buffers}
            twin._buffers = {**twin._buffers, **begun}
        return twin

    @property
    def theta(self) -> Params:
        """θ₀: the selected parameters of the frozen copy."""
        tracked, _ = self._members()
        return {name: parameter.detach() for name, parameter in tracked.items()}

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(iter(self._members()[0].values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return next(iter(self._members()[0].values())).dtype

    def __call__(self, params: Params, x: Inputs) -> Tensor:
        """f(θ, x), shape (N, ...); a network with outputs (N,) gives (N, 1)."""
        with self.inputs(x) as own:
            return self.run(params, own)

    @contextlib.contextmanager
    def inputs(self, x: Inputs) -> Iterator[Inputs]:
        """Inputs on the network's device, which it may write to: copies of x, until it is known not to."""
        x = on_device(x, self.device)
        if self.source is not None:
            x = map_tensors(lambda t: t.to(self.dtype) if t.is_floating_point() else t, x)
        if not torch.compiler.is_compiling() and not STRIDES_KEPT.get():
            x = map_tensors(_in_order, x)
        if self.cache.keeps_inputs:
            yield x
            return
        own = map_tensors(torch.clone, x)
        before = _versions(own)
        yield own
        if before is not None and self.cache.keeps_inputs is None:
            self.cache.keeps_inputs = _versions(own) == before

    def run(self, params: Params, x: Inputs) -> Tensor:
        """f(θ, x) on inputs that may be overwritten, (N, ...)."""
        x, mask = observed(x)
        args, kwargs = call_arguments(with_padding(x, self.token))
        if not self._takes_targets:  # a labeled batch, as loaders give it, is a batch all the same
            kwargs = {name: value for name, value in kwargs.items() if name not in TARGETS}
        _, places = self._members()
        masks = {name: own for name, own in self.masks.items() if name in params}
        params = {**params, **{name: self._held(name, params[name], own) for name, own in masks.items()}}
        everywhere = {place: value for name, value in params.items() for place in places.get(name, (name,))}
        try:
            with differentiable_kernels(self.recurrent):
                result = torch.func.functional_call(self.model, everywhere, args, kwargs, tie_weights=False)
        except (IndexError, ValueError) as error:  # such as a token beyond the vocabulary, in any batch
            if _of_tokens(self.model, x, error) is None:
                raise
            raise _cannot_run(self, x, error) from error
        outputs = adapt_outputs(result, self.output)
        return outputs if mask is None else outputs * mask

    def _members(self) -> tuple[dict[str, nn.Parameter], dict[str, tuple[str, ...]]]:
        """The tracked parameters, and all names that each tensor goes by; the network is walked once."""
        if self._walked is None or self._walked[0] is not self.model:
            places: dict[int, list[str]] = {}
            every = list(self.model.named_parameters(remove_duplicate=False))
            for name, parameter in every:
                places.setdefault(id(parameter), []).append(name)
            named = dict(every)
            ties = {name: tuple(places[id(parameter)]) for name, parameter in every}
            self._walked = (self.model, {name: named[name] for name in self.names}, ties)
        return self._walked[1], self._walked[2]

    @property
    def masks(self) -> dict[str, Tensor]:
        """The entries that vary, of parameters of which not all do."""
        if self._masked is None or self._masked[0] is not self.model:
            self._masked = self.model, tuple(masks_of(self.model, self.names))
        return masks_of(self.model, self._masked[1]) if self._masked[1] else {}

    def _held(self, name: str, value: Tensor, mask: Tensor) -> Tensor:
        """A parameter whose masked entries are those of θ₀."""
        at = self._members()[0][name].detach()
        moved = torch.where(mask, value, at)
        if hasattr(value, "_linnet_leaf"):  # a trace looks rows of a table up in the parameter itself
            moved._linnet_rows = value, mask  # type: ignore[attr-defined]
        return moved

    def flat(self, params: Params, x: Inputs) -> Tensor:
        """f(θ, x) with all output axes joined, shape (N, C)."""
        value = self(params, x)
        return value.reshape(value.shape[0], -1)

    def varying(self, flat: Tensor) -> Tensor:
        """Vectors over the parameters, (..., P), with zeros for entries that do not vary."""
        found = flat.clone() if self.masks else flat
        for name, mask in self.masks.items():
            found[..., self.space.slices[name]] *= mask.flatten().to(found)
        return found

    def output_shape(self, x: Inputs) -> torch.Size:
        """The shape of the outputs of one example, remembered for every shape of inputs."""
        shapes, key = self.cache.output_shapes, example_shapes(x)
        if key not in shapes:
            shapes[key] = self.check_runs(take(x, slice(0, 1))).shape[1:]
        return shapes[key]

    def fingerprint(self) -> str:
        """A hash of the network's weights, buffers and selected names; equal for equal linearizations."""
        if self.source is not None:
            return self.source.fingerprint()
        with alone():
            state = self.model.state_dict()
        # passes may write to buffers, and the network that is given next time has made none
        for name, t in self._buffers.items():
            if name in state:
                cast = self.dtype != self._kind and t.is_floating_point()  # as lin.float() does
                state[name] = t.to(self.dtype) if cast else t
        idle = getattr(self.model, IDLE, None)
        held = [key for key in sorted(state) if key in self.names or not lies_in(idle, key)]
        tensors = [state[key] for key in held if isinstance(state[key], Tensor)]
        values = hash_tensors([*tensors, *self.masks.values()])
        return hashlib.sha256(f"{values} {self.names}".encode()).hexdigest()[:32]

    def _compared(self) -> str:
        """What processes that work with it together must have alike."""
        return f"{len(self.names)} parameters with the hash {self.fingerprint()[:12]}"

    def modules(self) -> dict[str, str]:
        """The type of every module by its name: equal weights do not make equal networks."""
        idle, named = getattr(self.model, IDLE, None), self.model.named_modules()
        return {name: type(module).__name__ for name, module in named if not lies_in(idle, name)}

    @in_exact_mode
    def check_runs(self, x: Inputs) -> Tensor:
        """f₀(x) without gradients, or an error that says why the network cannot take ``x``."""
        try:
            with torch.no_grad():
                value = self(self.theta, x)
        except LinnetError:  # says what is wrong: the outputs, not the inputs
            raise
        except FAILURES as error:
            raise _cannot_run(self, x, error) from error
        if value.shape[0] != batch_size(x):
            raise ModelError(
                f"model returns outputs of shape {tuple(value.shape)} for {batch_size(x)} examples",
                expected="the example axis first",
                remedy="pass output= to pick and arrange the outputs",
            )
        if not is_finite(value):
            bad = int((~torch.isfinite(value).reshape(len(value), -1).all(1)).nonzero()[0])
            raise not_finite(f"x, first at example {place_of(x, bad)}")
        return value


def not_finite(where: str) -> ModelError:
    """The error of outputs that are NaN or infinite."""
    what, remedy = f"model returns NaN or infinite outputs on {where}", "check the weights and the scale of x"
    return ModelError(what, expected="finite outputs", remedy=remedy)


def lies_in(place: str | None, name: str) -> bool:
    """Whether a module or a parameter is that of a place in a network, or inside of it."""
    return place is not None and f"{name}.".startswith(f"{place}.")


DECODED = "decoder_input_ids"  # what encoder-decoder networks of transformers take beside their tokens
# What a network may raise on inputs that are not for it.
FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


def _cannot_run(function: Functional, x: Inputs, error: Exception) -> ModelError:
    """The error of a network that fails on x, by how it fails."""
    kinds = ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)} on {t.device}" for t in tensors_in(x)
    )
    first = first_line(error)
    shared = ambiguity(x)
    told = f"model ({type(function.model).__name__}) cannot run on x ({kinds or type(x).__name__}): {first}"
    together = batch_statistics(function.model)
    if of_tokens := _of_tokens(function.model, x, error):
        return ModelError(told, *of_tokens)
    if together and "value per channel" in first:
        expected, remedy = "normalization by running statistics", RUNNING.format(together[0])
    elif any(words in first.lower() for words in _OF_SHAPE):
        expected = f"{OWN_SHAPE} on {function.device}; its weights are {function.dtype}"
        remedy = "check x's shape, dtype (x.float() for images) and device"
    else:
        expected = "a network that runs on x in evaluation mode, without gradients"
        remedy = "call model.eval()(x) under torch.no_grad() and mend what it raises"
    if shared:
        remedy += f"; {SHARED}"
    return ModelError(f"{told}; {shared}" if shared else told, expected, remedy)


def _of_tokens(model: nn.Module, x: Inputs, error: Exception) -> tuple[str, str] | None:
    """What a network of tokens expects, and how to get it, where its inputs are not that."""
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    ids = x.get(TOKENS) if isinstance(x, Mapping) else x
    if config is None or not tables or not isinstance(ids, Tensor) or not ids.numel() or ids.ndim > 2:
        return None
    if ids.ndim < 2:
        return "token ids of several texts, (N, T)", 'pass tokenizer([text], return_tensors="pt")'
    if ids.is_floating_point():
        return "token ids as integers", f"pass {TOKENS}.long()"
    words, most = getattr(config, "vocab_size", max(tables)), getattr(config, "max_position_embeddings", None)
    if isinstance(words, int) and int(ids.max()) >= words:
        return f"token ids below {words}, the size of its vocabulary", "use the tokenizer of this network"
    if isinstance(most, int) and ids.shape[1] > most:
        return f"at most {most} tokens", f"pass tokenizer(..., truncation=True, max_length={most})"
    if "<eos>" in str(error):
        return "as many <eos> tokens in each text", "end each text in one, and leave no other in it"
    decodes = getattr(config, "is_encoder_decoder", False) and "decoder" in str(error)
    if decodes and isinstance(x, Mapping) and DECODED not in x:
        made = f"model.prepare_{DECODED}_from_labels(labels)"
        return f"{TOKENS} and {DECODED}", f"pass {DECODED}={made} beside them, or the encoder alone"
    return None


def batch_statistics(model: nn.Module) -> list[str]:
    """Layers of batch normalization that take the statistics of the batch, with their type."""
    kind = nn.modules.batchnorm._BatchNorm
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, kind)]
    return [f"{name}: {type(m).__name__}" for name, m in found if m.training or m.running_mean is None]


def _in_order(t: Tensor) -> Tensor:
    """Images with channels last in memory, copied to channels first; other tensors as they are."""
    # torch 2.13's backward pass of group normalization reads outside such an input if it needs no gradient
    if t.ndim not in (4, 5) or t.layout != torch.strided or t.is_contiguous():
        return t
    last = torch.channels_last if t.ndim == 4 else torch.channels_last_3d
    return t.contiguous() if t.is_contiguous(memory_format=last) else t


def without_wrapper(model: nn.Module) -> nn.Module:
    """The network that torch.compile was given; any other as it is."""
    plain: nn.Module = getattr(model, "_orig_mod", model)
    return plain


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a network, the tensors themselves; names as in ``named_parameters()``."""
    model = without_wrapper(model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _versions(x: Inputs) -> list[int] | None:
    """The write counter of each tensor; None where there is none."""
    tensors = tensors_in(x)
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return None
    return [t._version for t in tensors]


def padding_rows(model: nn.Module, names: list[str]) -> dict[str, tuple[int, bool]]:
    """Embedding tables with a padding row, which has no gradient."""
    every = list(model.named_parameters(remove_duplicate=False))
    found = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            owners = [name for name, p in every if p is module.weight]
            tracked = [name for name in owners if name in names]
            if tracked:
                found[tracked[0]] = (module.padding_idx, len(owners) > 1)
    return found


def _held(model: nn.Module, names: list[str]) -> int:
    """Weights beside the chosen ones that require no gradient."""
    chosen = set(names)
    return sum(p.numel() for n, p in model.named_parameters() if n not in chosen and not p.requires_grad)


def copied(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy of a network, out of torch.compile's wrapper, that shares some of its tensors."""
    model = without_wrapper(model)
    # Norms and masks of torch.nn.utils that are no parametrizations keep the weight that the last pass made,
    # with the history that forbids copying it; a hook makes it anew before each pass.
    made = {
        id(value): value.detach().clone()
        for module in model.modules()
        if any(
            type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values()
        )
        for value in vars(module).values()
        if isinstance(value, Tensor)
    }
    clone = copy.deepcopy(model, made | {id(t): t for t in shared})
    for module in clone.modules():
        if (part := without_wrapper(module)) is not module:  # a compiled part is run as it was
            vars(module)["forward"] = part
    return clone


@in_exact_mode
def _frozen_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without gradients; the original is not touched."""
    _require_usable(model)
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in grads:
            p.grad = None
        with torch.inference_mode(False):  # a copy that is made in that mode could never be differentiated
            clone = copied(model)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"model ({type(model).__name__}) cannot be copied: {error}",
            expected="a network that copy.deepcopy can copy",
            remedy="remove tensors with a gradient history and open handles from the module's attributes",
        ) from error
    finally:
        for p, grad in grads:
            p.grad = grad
    for module in clone.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # a sparse gradient has the same values, and few operations take it
    if any(isinstance(module, nn.GroupNorm) for module in clone.modules()):
        # weights with channels last would make activations so: see _in_order
        for p in clone.parameters():
            p.data = p.data.contiguous()
    return clone.eval().requires_grad_(False)


def require_whole_weights(model: nn.Module) -> None:
    """Raise on weights of which each process has a part: derivatives need all of them in one place."""
    wrapped = any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules())
    split = [name for name, t in tensors_by_name(model).items()
             if any(kind.__name__ == "DTensor" for kind in type(t).__mro__)]  # fmt: skip
    if not (wrapped or split):
        return
    about = f"weights: {split[0]} is a DTensor" if split else "model is wrapped in FullyShardedDataParallel"
    raise ModelError(
        f"{about}, of which each process has a part (fully_shard, tensor parallelism)",
        expected="a network whose weights are whole on every process",
        remedy="load torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) into the plain network and pass that; to train in "
        "parts, fully_shard(linnet.linearize(network))",
    )


def _require_usable(model: nn.Module) -> None:
    """Raise on networks whose operations or weights cannot be seen: scripted, lazy, or on the meta device."""
    if isinstance(model, nn.DataParallel):
        raise ModelError(
            "model is wrapped in DataParallel, which spreads a batch over devices",
            expected="the network itself, on one device",
            remedy="pass model.module",
        )
    require_whole_weights(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            f"model ({type(model).__name__}) is compiled TorchScript, whose operations cannot be traced",
            expected="a network of Python modules",
            remedy="pass the network that torch.jit.script or torch.jit.trace was given",
        )
    require_values(model)


def require_values(model: nn.Module) -> None:
    """Raise on a parameter or buffer without a shape or without numbers."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(
                f"weights: {name} has no shape yet",
                expected="a network that has run once, where it has lazy modules",
                remedy="call model(x) on a batch first",
            )
        if tensor.device.type == "meta":
            raise ModelError(
                f"weights: {name} is on the meta device and holds no numbers",
                expected="weights with values",
                remedy="model.to_empty(device='cpu'), then load_state_dict",
            )


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a parameter or buffer is not finite, naming the first."""
    floating = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    # a sum is finite only if all its terms are; all sums are read together, in one wait for the device
    if all(map(math.isfinite, read([t.sum() for t in floating.values()]))):
        return
    for name, tensor in floating.items():
        if not is_finite(tensor):
            raise ModelError(
                f"weights: {name} of shape {tuple(tensor.shape)} holds NaN or infinite values",
                expected="finite weights",
                remedy="load an intact checkpoint",
            )


def _takes_targets(model: nn.Module) -> bool:
    """Whether the network cannot run without an input that is called like the targets of a batch."""
    # a classifier that can takes them for its loss, which is one for the head that it had before
    try:
        known = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled forward without a signature
        return False
    return any(p.name in TARGETS and p.default is p.empty for p in known)


def call_arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments by which x is handed to the network."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, list | tuple):
        return tuple(x), {}
    return (x,), {}


def called(module: nn.Module, x: Inputs, output: OutputAdapter = None) -> Tensor:
    """What a network returns for a batch on its device, as a tensor (N, ...)."""
    args, kwargs = call_arguments(x)
    return adapt_outputs(module(*args, **kwargs), output)


def check_output(output: Any) -> None:
    """Raise unless it says how to take outputs from what a network returns."""
    if not (output is None or isinstance(output, str) or callable(output)):
        raise InputError(
            f"output={output!r}",
            expected="a function of what the network returns, or the name of a part of it",
            remedy="pass output=lambda r: r[0], or leave it out for a network that returns a tensor",
        )


def _part(result: Any, name: str) -> Any:
    """A part of what a network returns, by its name."""
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    known = [*result] if isinstance(result, Mapping) else []
    if found is None:
        raise ModelError(
            f"model returns {type(result).__name__} without a part {name!r}",
            expected=f"one of {', '.join(map(repr, known))}" if known else "an object with that part",
            remedy="pass output= the name of a part, or a function of what the network returns",
        )
    return found


def adapt_outputs(result: Any, output: OutputAdapter) -> Tensor:
    """The network's result as a tensor (N, ...)."""
    if callable(output):
        result = output(result)
    elif isinstance(output, str):
        result = _part(result, output)
    elif not isinstance(result, Tensor):
        result = (
            result["logits"]
            if isinstance(result, Mapping) and "logits" in result
            else getattr(result, "logits", result)
        )
    if not isinstance(result, Tensor):
        parts = result if isinstance(result, Mapping) else {}
        names = [repr(name) for name, part in parts.items() if isinstance(part, Tensor)]
        one = f"output={names[0]}, one of {', '.join(names)}" if names else "output=lambda r: r[0]"
        raise ModelError(
            f"model returns {type(result).__name__}, not a tensor",
            expected="a tensor (N, C), or an object with .logits",
            remedy=f"pass output=, for example {one}; linnet.with_head puts a head behind the "
            "last_hidden_state of an encoder",
        )
    if result.ndim == 0:
        raise ModelError(
            "model returns one number for the whole batch" + ("" if output is None else ", after output="),
            expected="a tensor (N, ...) with a row for every example",
            remedy="return the sum or mean of each example, as in output=lambda r: r.sum(-1)",
        )
    if 0 in result.shape[1:]:
        raise ModelError(
            f"model returns outputs of shape {tuple(result.shape)}"
            + (", without a number" if output is None else ", without a number after output="),
            expected="at least one output of every example",
            remedy="take outputs that are there; output= is a function of what the network returns",
        )
    return result[:, None] if result.ndim == 1 else result
