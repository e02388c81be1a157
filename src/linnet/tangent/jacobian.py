"""The Jacobian J of the outputs in the parameters: products, rows, and an operator over a data set.

Batch normalization is folded into the convolution before it, for the tangent of a pass: in evaluation mode,
with r = 1/√(var + ε) and s = γ r, the directional derivative of z = bn(conv(x, W) + c) along (dx, dW, dc, dγ,
dβ) is

    dz = conv(dx, s W) + conv(x, s dW + r W dγ) + dβ + s dc + r (c − mean) dγ,

so dγ and dβ act on weights (kilobytes) instead of on maps (megabytes), and the normalized map is
never differentiated. The pass itself is left as it is, so outputs and derivatives belong to the same
activations to the bit. Only a convolution whose result goes to one normalization and nowhere else is
folded; should a later pass break that, it is run again without folding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from linnet.distributed import all_rows, share_sum
from linnet.errors import InputError
from linnet.linalg.factorize import is_finite
from linnet.linalg.operator import Bidirectional, SymmetricOperator, Vector
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.batch import Inputs, batch_size, own_parts, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.forward_mode import (
    JvpPath,
    Params,
    jvp_double_backward,
    jvp_forward,
    probe_jvp,
    random_direction,
)
from linnet.tangent.functional import Functional
from linnet.tangent.gradients import pulled_back
from linnet.tangent.independence import require_history, require_independence, require_own_rows
from linnet.tangent.modes import CallMode, differentiable_kernels, first_order, in_exact_mode
from linnet.tangent.nonfinite import refuse_derivative, require_finite_derivative
from linnet.tree import tensors_in

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
Dual = tuple[Tensor | None, Tensor | None]  # a value and its tangent, None for zero
PARTS = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class Normalization:
    """The buffers and weights of a batch normalization."""

    # mean, variance, weight and bias: the name of a parameter of the pass, a fixed tensor, or `None`
    tensors: dict[str, str | Tensor | None]
    eps: float  # ε

    def tangents(
        self, params: Params, weight: Dual, bias: Dual
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weights s W and s dW + r W dγ, and the bias dβ + s dc + r (c − mean) dγ; ``None`` is zero."""
        mean, variance = (self._value(params, part) for part in PARTS[:2])
        (gamma, d_gamma), (_, d_beta) = (_dual(self._value(params, part)) for part in PARTS[2:])
        assert mean is not None
        assert variance is not None
        assert weight[0] is not None
        r = torch.rsqrt(variance + self.eps)
        s = r if gamma is None else gamma * r
        centered = -mean if bias[0] is None else bias[0] - mean
        d_weight = _sum(
            _times(_column(s, weight[0]), weight[1]), _times(_column(r, weight[0]) * weight[0], d_gamma)
        )
        d_bias = _sum(_sum(d_beta, _times(s, bias[1])), _times(r * centered, d_gamma))
        return _column(s, weight[0]) * weight[0], d_weight, d_bias

    def _value(self, params: Params, part: str) -> Tensor | None:
        """The tensor of this pass."""
        found = self.tensors[part]
        return params[found] if isinstance(found, str) else found


def _dual(t: Tensor | None) -> Dual:
    """Value and tangent of a tensor in forward mode."""
    if t is None:
        return None, None
    pair = forward_ad.unpack_dual(t)
    return pair.primal, pair.tangent


def _primal(argument: Any) -> Any:
    """The value of a tensor, anything else as it is."""
    return _dual(argument)[0] if isinstance(argument, Tensor) else argument


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum where ``None`` is zero."""
    return b if a is None else a if b is None else a + b


def _times(a: Tensor, b: Tensor | None) -> Tensor | None:
    """The product where ``None`` is zero; a vector scales the first axis of a weight."""
    return None if b is None else a * (_column(b, a) if b.ndim < a.ndim else b)


def _column(scale: Tensor, like: Tensor) -> Tensor:
    """(c,) as (c, 1, ..., 1), to scale the first axis."""
    return scale.view(-1, *[1] * (like.ndim - 1))


class Unfoldable(Exception):
    """A pass used a folded convolution's result elsewhere."""


def find_folds(function: Functional, x: Inputs) -> dict[int, Normalization]:
    """Convolutions that can be folded, by their order in the pass."""
    watcher = _FoldWatcher(function.theta)
    with torch.no_grad(), watcher:
        output = function(watcher.params, x)
    return {
        index: consumers[0]
        for index, consumers in watcher.consumers.items()
        if len(consumers) == 1 and isinstance(consumers[0], Normalization) and index not in _marks(output)
    }


class _FoldWatcher(CallMode):
    """Notes what becomes of the results of convolutions."""

    def __init__(self, theta: Params) -> None:
        super().__init__()
        self.params = {name: t.view_as(t) for name, t in theta.items()}
        self.names = {id(t): name for name, t in self.params.items()}
        self.consumers: dict[int, list[Normalization | None]] = {}

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, and who reads the results of convolutions."""
        result = func(*args, **kwargs)
        if not tensors_in(result):
            return result  # a property such as the shape
        read = _marks((*args, *kwargs.values()))
        normalization = self._normalization(func, args, kwargs)
        for index in read:
            self.consumers[index].append(normalization)
        if getattr(func, "__name__", "") in CONVOLUTIONS:
            result._linnet_fold = len(self.consumers)
            self.consumers[len(self.consumers)] = []
        return result

    def _normalization(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Normalization | None:
        """The call as a batch normalization on running statistics, if it is one."""
        if getattr(func, "__name__", "") != "batch_norm":
            return None
        call = batch_norm_call(args, kwargs)
        if call["training"] or call["running_mean"] is None or call["running_var"] is None:
            return None
        return Normalization({part: self._known(call[part]) for part in PARTS}, call["eps"])

    def _known(self, t: Tensor | None) -> str | Tensor | None:
        """The name of a parameter of the pass, or the tensor itself."""
        return None if t is None else self.names.get(id(t), t)


def batch_norm_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``F.batch_norm`` by name."""
    names = ("input", *PARTS, "training", "momentum", "eps")
    defaults = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@dataclass(frozen=True)
class _Pending:
    """A convolution whose tangent waits for its normalization."""

    index: int
    convolve: Callable[..., Tensor]
    inputs: tuple[Dual, Dual, Dual]  # input, weight, bias


class Folding(CallMode):
    """Runs a pass in forward mode with the tangents of normalizations folded."""

    def __init__(self, folds: dict[int, Normalization], params: Params) -> None:
        super().__init__()
        self.folds, self.params, self.seen, self.closed = folds, params, 0, 0

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, with the tangent of a normalization folded."""
        name = getattr(func, "__name__", "")
        if name in CONVOLUTIONS:
            return self._convolve(func, *args, **kwargs)
        if name == "batch_norm" and hasattr(args[0], "_linnet_fold"):
            return self._normalize(func, args, kwargs)
        result = func(*args, **kwargs)
        if (
            isinstance(result, Tensor | tuple | list)
            and _marks((*args, *kwargs.values()))
            and tensors_in(result)
        ):
            raise Unfoldable(name)
        return result

    def _convolve(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The convolution; its tangent is left to its normalization, if it has one."""
        index, self.seen = self.seen, self.seen + 1
        if index not in self.folds:
            return func(input, weight, bias, *args, **kwargs)
        inputs = _dual(input), _dual(weight), _dual(bias)

        def convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return func(x, w, b, *args, **kwargs)

        assert inputs[0][0] is not None
        assert inputs[1][0] is not None
        result = convolve(inputs[0][0], inputs[1][0], inputs[2][0])
        result._linnet_fold = index  # type: ignore[attr-defined]
        result._linnet_pending = _Pending(index, convolve, inputs)  # type: ignore[attr-defined]
        return result

    def _normalize(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The normalization of a pending convolution, and the tangent of both."""
        self.closed += 1
        pending: _Pending = args[0]._linnet_pending
        (x, d_x), weight, bias = pending.inputs
        with torch.no_grad():
            value = func(*map(_primal, args), **{key: _primal(arg) for key, arg in kwargs.items()})
        scaled, d_weight, d_bias = self.folds[pending.index].tangents(self.params, weight, bias)
        assert x is not None
        tangent = None if d_x is None else pending.convolve(d_x, scaled, None)
        if d_weight is not None:
            tangent = _sum(tangent, pending.convolve(x, d_weight, d_bias))
        elif d_bias is not None:
            tangent = _sum(tangent, _column(d_bias, value[0]).expand_as(value))
        return value if tangent is None else forward_ad.make_dual(value, tangent)

    def finish(self, output: Tensor) -> None:
        """Make sure that every folded convolution met its normalization."""
        if self.closed != len(self.folds) or hasattr(output, "_linnet_fold"):
            raise Unfoldable("the pass took another way")


def _marks(items: Any) -> list[int]:
    """Order numbers of the convolutions whose results are among the items."""
    return [t._linnet_fold for t in tensors_in(items) if hasattr(t, "_linnet_fold")]


def jvp_path(function: Functional, x: Inputs) -> tuple[JvpPath, str]:
    """Which directional derivative works for this network; probed once, then remembered."""
    if function.cache.jvp is None:
        function.cache.jvp = _found_path(function, take(x, slice(0, min(2, batch_size(x)))))
    return function.cache.jvp


def _found_path(function: Functional, probe: Inputs) -> tuple[JvpPath, str]:
    """The way that works on a few examples."""
    function.check_runs(probe)
    if any(tied for _, tied in function.padding.values()):
        reason = "an embedding with a padding row shares its table with another layer; using double-backward"
        return "double-backward", reason
    with differentiable_kernels(function.recurrent):
        at = function.theta
        path, why = probe_jvp(lambda p: function(_padded(function, p, at), probe), at)
    if path == "rows":  # no way agrees with one that is not finite
        refuse_derivative(function, probe)
    return path, why


def _padded(function: Functional, params: Params, at: Params) -> Params:
    """Padding rows held at θ₀: torch gives them no gradient in reverse mode, but does in forward mode."""
    held = dict(params)
    for name, (row, _) in function.padding.items():
        keep = torch.ones(at[name].shape[0], 1, dtype=at[name].dtype, device=at[name].device)
        keep[row] = 0
        held[name] = at[name] + keep * (params[name] - at[name])
    return held


@in_exact_mode
def jvp(function: Functional, x: Inputs, direction: Params, checked: bool = True) -> tuple[Tensor, Tensor]:
    """f₀(x) and J(x) v in the outputs' own shape (N, ...); differentiable in v."""
    value, tangent = _jvp(function, x, direction)
    if checked and not tangent.requires_grad:  # others look at the sum, where a device need not be waited for
        require_finite_product(function, x, tangent, direction.values())
    return value, tangent


def require_finite_product(function: Functional, x: Inputs, found: Tensor, given: Iterable[Tensor]) -> None:
    """Raise if a product of J with finite vectors is not finite because J is not."""
    if torch.compiler.is_compiling() or found.is_meta or is_functorch_wrapped_tensor(found):
        return
    if not is_finite(found) and all(map(is_finite, given)):
        refuse_derivative(function, x)


def _jvp(function: Functional, x: Inputs, direction: Params) -> tuple[Tensor, Tensor]:
    """The two by the way that works for the network."""
    path, _ = jvp_path(function, x)
    if path == "rows":
        return _jvp_rows(function, x, direction)
    with differentiable_kernels(function.recurrent):
        if path == "double-backward":
            return jvp_double_backward(lambda p: function(p, x), function.theta, direction)
        folds = _folds(function, x)
        if folds:
            try:
                return _jvp_folded(function, x, direction, folds)
            except Unfoldable:
                function.cache.folds = {}
        return _jvp_plain(function, x, direction)


def _jvp_plain(function: Functional, x: Inputs, direction: Params) -> tuple[Tensor, Tensor]:
    """Forward mode through the network as it is, padding rows held."""
    at = function.theta
    hold = bool(function.padding)
    return jvp_forward(lambda p: function(_padded(function, p, at) if hold else p, x), at, direction)


def _folds(function: Functional, x: Inputs) -> dict[int, Normalization]:
    """Convolutions that take their normalization in; found and proved on two examples, then remembered."""
    if torch.compiler.is_compiling() or function.padding:
        return {}
    if function.cache.folds is None:
        function.cache.folds = {}
        probe = take(x, slice(0, min(2, batch_size(x))))
        folds = find_folds(function, probe)
        if folds and _proved(function, probe, folds):
            function.cache.folds = folds
    return function.cache.folds


@torch.no_grad()
def _proved(function: Functional, probe: Inputs, folds: dict[int, Normalization]) -> bool:
    """Whether folding changes neither outputs nor their derivative."""
    direction = random_direction(function.theta)
    plain = _jvp_plain(function, probe, direction)
    try:
        folded = _jvp_folded(function, probe, direction, folds)
    except Unfoldable:
        return False
    tolerance = 1e-9 if function.dtype == torch.float64 else 1e-3
    return all(
        bool((a - b).abs().max() <= tolerance * (a.abs().max() + 1e-12))
        for a, b in zip(plain, folded, strict=True)
    )


def _jvp_folded(
    function: Functional, x: Inputs, direction: Params, folds: dict[int, Normalization]
) -> tuple[Tensor, Tensor]:
    """Forward mode with the tangents of normalizations inside the convolutions before them."""
    with forward_ad.dual_level():
        params = {name: forward_ad.make_dual(t, direction[name]) for name, t in function.theta.items()}
        folding = Folding(folds, params)
        with folding:
            output = function(params, x)
        folding.finish(output)
        value, tangent = forward_ad.unpack_dual(output)
    return value, torch.zeros_like(value) if tangent is None else tangent


def _jvp_rows(function: Functional, x: Inputs, direction: Params) -> tuple[Tensor, Tensor]:
    """J v from the gradients of every example, where no directional derivative exists."""
    with torch.no_grad():
        value = function(function.theta, x)
    captured = capture(function, x)
    n, c = captured.outputs.shape
    parts = [captured.rows(name).reshape(n, c, -1) @ v.reshape(-1) for name, v in direction.items()]
    return value, torch.stack(parts).sum(0).reshape(value.shape)


def jvp_columns(function: Functional, x: Inputs, v: Vector, checked: bool = True) -> Tensor:
    """J(x) v for one vector or K columns."""
    require_independence(function, x)
    params = function.space.to_params(v)
    first = next(iter(params))
    if params[first].ndim == function.theta[first].ndim:
        return _flat(jvp(function, x, params, checked)[1])
    columns = range(params[first].shape[-1])
    if not columns:
        value = function.check_runs(x)
        return value.new_zeros(*_flat(value).shape, 0)
    every = [{n: t[..., k] for n, t in params.items()} for k in columns]
    return torch.stack([_flat(jvp(function, x, one, checked)[1]) for one in every], -1)


@in_exact_mode
def vjp_columns(function: Functional, x: Inputs, u: Tensor, checked: bool = True) -> Tensor:
    """Jᵀu for one cotangent or K columns, flat, (P,)."""
    # u (N, C)
    require_independence(function, x)
    leaves = {name: t.detach().requires_grad_() for name, t in function.theta.items()}
    with torch.enable_grad(), first_order():
        value = function.flat(leaves, x)
    if u.shape[:2] != value.shape or u.ndim > 3:
        raise InputError(
            f"u has shape {tuple(u.shape)}",
            expected=f"{tuple(value.shape)} or {(*value.shape, 'K')}",
            remedy="pass one cotangent for each output of lin.base(x)",
        )
    columns = u[None] if u.ndim == 2 else u.movedim(2, 0)
    if not value.requires_grad:
        require_history(function, x)
    if not value.requires_grad or not u.numel():
        return u.new_zeros(function.space.dim, *u.shape[2:])
    flat = pulled_back(value, list(leaves.values()), columns)
    if checked:
        require_finite_product(function, x, flat, [u])
    return flat[0] if u.ndim == 2 else flat.T


@in_exact_mode
def jacobian(function: Functional, x: Inputs, memory: str | int | None = None) -> Tensor:
    """J(x), (N, C, P), in the order of ``named_parameters()``."""
    n, c = batch_size(x), function.check_runs(take(x, slice(0, 1))).numel()
    p = function.space.dim
    budget = parse_bytes(memory, function.device)
    size = n * c * p * function.dtype.itemsize
    per_example = capture_bytes(function, x, c) + 2 * size // n
    block = max(1, min(n, 64, (budget - size) // max(per_example, 1)))
    plan = Plan(
        f"Jacobian of {n} examples × {c} outputs × {p} parameters",
        budget,
        (("Jacobian", size), ("derivatives of one block", block * per_example)),
    )
    require(
        plan, ["use lin.jvp and lin.vjp, which never form it", "use lin.kernel, or fewer examples at once"]
    )
    out = torch.empty(n, c, p, dtype=function.dtype, device=function.device)
    start = 0
    for part in split(x, block):
        captured = capture(function, part)
        for name, place in function.space.slices.items():
            out[start : start + captured.n, :, place] = captured.rows(name).reshape(captured.n, c, -1)
        start += captured.n
    require_finite_derivative(function, x, out)
    return out


@in_exact_mode
@torch.no_grad()
def linearity_gap(function: Functional, x: Inputs, delta: Params) -> float:
    """‖f(θ₀ + δ) − f_lin‖ / ‖f_lin − f₀‖ on a batch; 0 at δ = 0."""
    value, tangent = jvp(function, x, delta)
    reached = function({name: t + delta[name] for name, t in function.theta.items()}, x)
    missed = torch.linalg.vector_norm((reached - value - tangent).double())
    predicted = torch.linalg.vector_norm(tangent.double())
    return 0.0 if float(missed) == 0 else float(missed / predicted)


def _flat(value: Tensor) -> Tensor:
    """Output axes joined, (N, C)."""
    return value.reshape(value.shape[0], -1)


class JacobianOperator(Bidirectional):
    """J over a data set, (N·C) × P: one JVP a pass, one VJP for the transpose."""

    # Inside `linnet.distributed.sharing` each process differentiates its share of the examples, and the
    # product is the same on all of them.

    def __init__(self, function: Functional, x: Inputs, outputs: int, block: int = 128) -> None:
        require_own_rows(function, x)
        self.function, self.x, self.outputs, self.block = function, x, outputs, block
        self.shape = (batch_size(x) * outputs, function.space.dim)
        self.dtype, self.device, self.space = function.dtype, function.device, function.space

    def mm(self, v: Tensor) -> Tensor:
        """J v: (P, K) to (N·C, K)."""
        none = v.new_empty(0, self.outputs, v.shape[1], dtype=self.dtype)
        parts = [jvp_columns(self.function, part, v) for _, part in own_parts(self.x, self.block)]
        return all_rows(torch.cat(parts or [none]), self.shape[0] // self.outputs).flatten(0, 1)

    def transposed_mm(self, w: Tensor) -> Tensor:
        """Jᵀ u: (N·C, K) to (P, K)."""
        u = w.reshape(-1, self.outputs, w.shape[1])
        total = w.new_zeros(self.shape[1], w.shape[1])
        for place, part in own_parts(self.x, self.block):
            total += vjp_columns(self.function, part, u[place])
        share_sum([total])
        return total


class NormalOperator(SymmetricOperator):
    """JᵀJ over a data set, P × P: one JVP and one VJP a batch, in one pass over the data."""

    def __init__(self, jacobian: JacobianOperator) -> None:
        self.jacobian = jacobian
        self.shape = (jacobian.shape[1], jacobian.shape[1])
        self.dtype, self.device, self.space = jacobian.dtype, jacobian.device, jacobian.space

    def mm(self, v: Tensor) -> Tensor:
        """JᵀJ v: (P, K) to (P, K)."""
        total = torch.zeros_like(v, memory_format=torch.contiguous_format)
        function = self.jacobian.function
        for _, part in own_parts(self.jacobian.x, self.jacobian.block):
            total += vjp_columns(function, part, jvp_columns(function, part, v, False), False)
        if not is_finite(total):  # in one wait for the device
            for _, part in own_parts(self.jacobian.x, self.jacobian.block):
                require_finite_product(function, part, total, [v])
        share_sum([total])
        return total
