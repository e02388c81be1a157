"""Input and vector checks of a linearization.

Types and shapes are looked at before a pass. Whether numbers are finite is read from the result, which tells
it at the cost of one sum: a network may turn an infinite input (a mask) into finite outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from linnet.errors import DataError, LinnetError
from linnet.linalg.finite import is_finite
from linnet.params import refuse, tensor
from linnet.tangent.batch import EMPTY, Inputs, batch_size, check_finite, map_tensors
from linnet.tangent.functional import Functional
from linnet.tangent.nonfinite import require_finite_derivative


def check_given(x: Inputs) -> None:
    """Raise unless x holds examples.

    Args:
        x: A batch.

    Raises:
        InputError: If it holds no dense tensor with an example axis.
        DataError: If it is empty.

    Example:
        >>> check_given(torch.ones(2, 3))
    """
    if batch_size(x) == 0:
        raise DataError("x is empty: it holds 0 examples", expected="at least one example", remedy=EMPTY)


@contextmanager
def explained(function: Functional, x: Inputs) -> Iterator[None]:
    """Say what is wrong with x where a pass over it fails.

    Args:
        function: The network.
        x: A batch.

    Yields:
        Nothing.

    Raises:
        InputError: If x holds no dense tensor with an example axis.
        DataError: If x is empty, or the pass fails and x is not finite.
        ModelError: If the network cannot run on x.
        LinnetError: As the pass raised it.
        RuntimeError: As torch raised it, like the other built-in exceptions, where x is not the cause.
        ArithmeticError: As above.
        AttributeError: As above.
        LookupError: As above.
        TypeError: As above.
        ValueError: As above.
    """
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


def check_result(function: Functional, x: Inputs, result: Tensor) -> None:
    """Raise if a result is not finite because x, the network's outputs or their derivatives are not.

    Args:
        function: The network.
        x: A batch.
        result: What was computed from it.

    Raises:
        DataError: If x is not finite.
        ModelError: If the outputs are not.
        NumericalError: If the derivatives are not.
    """
    require_finite_derivative(function, x, result)


def finite_numbers(name: str, value: Any, expected: str, remedy: str) -> Tensor:
    """A dense tensor of finite real numbers.

    Args:
        name: The parameter's name.
        value: Its value.
        expected: What is accepted, in words.
        remedy: What to do.

    Returns:
        The tensor.

    Raises:
        InputError: It is none.

    Example:
        >>> finite_numbers("v", torch.ones(2), "numbers", "pass two")
        tensor([1., 1.])
    """
    found = tensor(name, value, expected, remedy)
    wrapped = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(found)
    if not wrapped and not is_finite(found):
        refuse(f"{name}, which holds NaN or infinite values,", value, expected, remedy)
    return found
