"""Targets as elements of the kernel's function space: values of f on the examples.

With one output, or the kernels ``"trace"`` and ``"sum"``, f is scalar-valued; with ``"full"`` and C
outputs it has C values for each example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.errors import DataError, InputError


@dataclass(frozen=True)
class FunctionValues:
    """T functions on N examples."""

    values: Tensor  # (N, Q, T), Q = C for vector-valued functions and 1 for scalar ones
    single: bool  # whether the caller gave one function without an axis of functions

    @property
    def flat(self) -> Tensor:
        """(N·Q, T), rows in the order of a Gram matrix."""
        return self.values.flatten(0, 1)

    def mean_square(self) -> Tensor:
        """‖f‖₂² = E ‖f(x)‖², (T,), float64."""
        return self.values.double().square().sum((0, 1)) / self.values.shape[0]

    def shaped(self, result: Tensor) -> Tensor:
        """One number for each function, () for a single one."""
        # result (T,)
        return result[0] if self.single else result


def function_values(
    y: Tensor, shape: tuple[int, ...], form: str, dtype: torch.dtype, name: str = "y"
) -> FunctionValues:
    """Targets of the user as functions of the kernel's space."""
    # y (N,)
    c = torch.Size(shape).numel()
    is_vector = form == "full" and c > 1
    if y.is_complex():
        raise InputError(f"{name} has type {y.dtype}", "real values", "pass real and imaginary parts apart")
    if not y.is_floating_point():
        y = _classes(y, c, name) if is_vector else _signs(y, name)
    y = y.to(dtype)
    if y.ndim > 1 and form == "full" and tuple(y.shape[1:]) == shape:  # as the outputs themselves
        return FunctionValues(y.reshape(y.shape[0], c, 1), True)
    if is_vector and y.ndim == 3 and y.shape[1] == c and y.shape[2]:
        return FunctionValues(y, False)
    if not is_vector and y.ndim <= 2 and y[0].numel():
        columns = y.reshape(y.shape[0], 1, -1)
        return FunctionValues(columns, columns.shape[2] == 1)
    if not is_vector and y.ndim == 3 and y.shape[1] == 1 and y.shape[2]:
        return FunctionValues(y, False)
    raise InputError(
        f"{name} has shape {tuple(y.shape)} for a network with {c} outputs and form={form!r}",
        expected=f"(N, {c}), or (N, {c}, T) for T functions"
        if is_vector
        else "(N,), or (N, T) for T functions",
        remedy='pass form="trace" for scalar functions of a network with several outputs'
        if is_vector
        else 'pass form="full" for targets with one column for each output',
    )


def _signs(y: Tensor, name: str) -> Tensor:
    """Two classes as −1 and 1."""
    found = y.unique().tolist()
    if set(found) <= {-1, 1}:
        return y.double()
    if set(found) <= {0, 1}:
        return 2 * y.double() - 1
    some = ", ".join(str(value) for value in found[:5])
    raise InputError(
        f"{name} holds the integers {some}{', …' if len(found) > 5 else ''} for a scalar-valued function",
        expected="two classes, 0 and 1 or −1 and 1",
        remedy='pass float targets, or form="full" with a network that has one output for each class',
    )


def _classes(y: Tensor, c: int, name: str) -> Tensor:
    """Classes (N,) as e_y − 1/C, (N, C)."""
    labels = y[:, 0].long() if y.ndim == 2 and y.shape[1] == 1 else y.long()
    if labels.ndim != 1:
        raise InputError(
            f"{name} has integers of shape {tuple(y.shape)}",
            expected="one class for each example, (N,)",
            remedy=f"convert values with {name}.float()",
        )
    wrong = (labels < 0) | (labels >= c)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise DataError(
            f"{name} holds {int(wrong.sum())} label(s) out of range, first {int(labels[i])} at index {i}",
            expected=f"classes 0 to {c - 1}, because the network has {c} outputs",
            remedy="give the network a head of the right size with linnet.with_head(model, classes)",
        )
    return torch.nn.functional.one_hot(labels, c).double() - 1 / c
