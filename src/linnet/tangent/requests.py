"""Input and vector checks of a linearization.

Types and shapes are looked at before a pass. Whether numbers are finite is read from the result, which tells
it at the cost of one sum: a network may turn an infinite input (a mask) into finite outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, LinnetError, NumericalError
from linnet.linalg.finite import is_finite
from linnet.params import refuse, tensor
from linnet.tangent.batch import EMPTY, Inputs, batch_size, check_finite, map_tensors
from linnet.tangent.functional import Functional
from linnet.tangent.nonfinite import WIDER, refuse_derivative, unread


def check_given(x: Inputs) -> None:
    """Raise unless x holds examples."""
    if batch_size(x) == 0:
        raise DataError("x is empty: it holds 0 examples", expected="at least one example", remedy=EMPTY)


@contextmanager
def explained(function: Functional, x: Inputs) -> Iterator[None]:
    """Say what is wrong with x where a pass over it fails."""
    if torch.compiler.is_compiling():
        yield
        return
    check_given(x)
    try:
        yield
    except LinnetError:
        check_finite(map_tensors(lambda t: t.detach(), x), "x")  # the likelier cause, where it is there
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
