"""Derivatives that are not finite where the outputs are: which example, behind which layer, and what to do.

The derivative of a root, a norm or a logarithm at 0 is infinite, and products of large gradients overflow.
All derivatives pass ``capture``, ``jvp`` and ``vjp_columns``, and their products ``gram``; these look at what
they return, at the cost of one sum, and come here when it is not finite.

Types and shapes of inputs and vectors are looked at before a pass. Whether numbers are finite is read from
the result, which tells it at the cost of one sum: a network may turn an infinite input (a mask) into finite
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from linnet.errors import LinnetError, NumericalError
from linnet.linalg.factorize import is_finite
from linnet.params import refuse, tensor
from linnet.tangent.batch import Inputs, batch_size, check_finite, place_of, require_some, split, take
from linnet.tangent.coordinates import moved_network
from linnet.tangent.functional import Functional
from linnet.tangent.gradients import batched_grad, random_cotangent, recorded, use_gradients
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.trace import trace

BLOCK = 64  # examples differentiated at once, in search of the one
SMOOTH = (
    "add a small number where forward takes a root, a norm, a logarithm or a quotient of what can be 0, as "
    "in sqrt(s + 1e-12), or leave the example out"
)
WIDER = "divide the inputs by their scale, or pass the network in float64: model.double()"


def require_finite_derivative(function: Functional, x: Inputs, *found: Tensor) -> None:
    """Raise if derivatives on a batch are not finite because those of an example are not."""
    if torch.compiler.is_compiling() or any(map(unread, found)) or all(map(is_finite, found)):
        return
    refuse_derivative(function, x)


def unread(t: Tensor) -> bool:
    """Whether a tensor has no numbers, or those of many calls."""
    return t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t)


@in_exact_mode
def refuse_derivative(function: Functional, x: Inputs) -> None:
    """Raise if the derivative of an example is not finite; a batch whose derivatives are is let through."""
    function = moved_network(function) or function
    check_finite(x, "x")
    function.check_runs(x)
    for part in split(x, BLOCK):
        i = _first(function, part)
        if i is None:
            continue
        function.cache.forget_derivatives()
        layer = _layer(function, take(part, [i]))
        wide = _in_float64(function, take(part, [i]))
        raise NumericalError(
            f"the derivative of the outputs is not finite at example {place_of(part, i)} of x, though the "
            f"outputs are: it is lost behind {layer!r}" + (" by overflow" if wide else ""),
            expected="finite derivatives at every example",
            remedy=WIDER if wide else SMOOTH,
        )


def refuse_overflow(function: Functional, pair: Sequence[tuple[Inputs, int]]) -> NoReturn:
    """The error of a product of two examples' derivatives that is not finite."""
    found = []
    for x, i in pair:
        one = take(x, slice(i, i + 1))
        refuse_derivative(function, one)
        found.append((*_largest(moved_network(function) or function, one), place_of(one, 0)))
    size, name, place = max(found)
    raise NumericalError(
        f"products of derivatives overflow {str(function.dtype).removeprefix('torch.')} at example {place} "
        f"of x, where inputs and gradients of {name!r} reach {size:.1g}",
        expected="derivatives whose squares are finite",
        remedy=WIDER,
    )


def require_finite_products(function: Functional, x: Inputs, found: Tensor) -> None:
    """Raise if what was computed of single examples from products of derivatives is not finite."""
    # found (N, ...)
    if not (unread(found) or is_finite(found)):
        refuse_overflow(function, [(x, int((~found.isfinite()).nonzero()[0, 0]))])


def _largest(function: Functional, example: Inputs) -> tuple[float, str]:
    """The largest number among what layers read and the gradients at what they give, and the parameter."""
    run = trace(function, example)
    gradients = use_gradients(run.outputs, run.uses, random_cotangent(run.outputs.detach()))
    sizes = [
        (float(t.abs().max()), use.sources[0])
        for use, g in zip(run.uses, gradients, strict=True)
        for t in (use.a, g)
        if t is not None and t.is_floating_point() and t.numel()
    ]
    return max(sizes, default=(0.0, function.names[0]))


def _gradients(function: Functional, x: Inputs) -> dict[str, Tensor]:
    """The gradient of a random combination of all outputs, by parameter."""
    value, leaves = recorded(function, x)
    if not value.requires_grad:
        return {}
    grads = batched_grad(value, list(leaves.values()), random_cotangent(value.detach()), keep=False)
    return {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}


def _sound(function: Functional, x: Inputs) -> bool:
    """Whether all gradients are finite."""
    return all(map(is_finite, _gradients(function, x).values()))


def _first(function: Functional, x: Inputs) -> int | None:
    """The first example whose gradient is not finite, by halves."""
    start, n = 0, batch_size(x)
    if _sound(function, x):
        return None
    while n > 1:
        half = n // 2
        if _sound(function, take(x, slice(start, start + half))):
            start, n = start + half, n - half
        else:
            n = half
    return None if _sound(function, take(x, slice(start, start + 1))) else start


def _layer(function: Functional, example: Inputs) -> str:
    """The last parameter whose own gradient, or that of what it gives, is not finite."""
    run = trace(function, example)
    gradients = use_gradients(run.outputs, run.uses, random_cotangent(run.outputs.detach()))
    lost = [use for use, g in zip(run.uses, gradients, strict=True) if not is_finite(g)]
    if lost:
        return lost[-1].sources[0]
    bad = [name for name, g in _gradients(function, example).items() if not is_finite(g)]
    return bad[-1] if bad else function.names[-1]


def _in_float64(function: Functional, example: Inputs) -> bool:
    """Whether the derivative is finite in float64, where it is not in a narrower type."""
    if function.dtype == torch.float64:
        return False
    try:
        return _sound(function.in_float64(), example)
    except (LinnetError, RuntimeError):  # a network that casts by itself
        return False


@contextmanager
def explained(function: Functional, x: Inputs) -> Iterator[None]:
    """Say what is wrong with x where a pass over it fails."""
    if torch.compiler.is_compiling():
        yield
        return
    require_some(x)
    try:
        yield
    except LinnetError:
        check_finite(x, "x")  # the likelier cause, where it is there
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        function.check_runs(x)  # says what is wrong with x, if x is what is wrong
        raise


def check_result(function: Functional, x: Inputs, result: Tensor, given: Iterable[Tensor] = ()) -> None:
    """Raise if a result is not finite, unless a vector that was given is not."""
    if torch.compiler.is_compiling() or unread(result) or is_finite(result):
        return
    refuse_derivative(function, x)
    if all(map(is_finite, given)):
        raise NumericalError(
            f"products of derivatives and vectors overflow {str(result.dtype).removeprefix('torch.')}",
            expected="finite products",
            remedy=WIDER,
        )


def finite_numbers(name: str, value: Any, expected: str, remedy: str) -> Tensor:
    """A dense tensor of finite real numbers."""
    found = tensor(name, value, expected, remedy)
    wrapped = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(found)
    if not wrapped and not is_finite(found):
        refuse(f"{name}, which holds NaN or infinite values,", value, expected, remedy)
    return found
