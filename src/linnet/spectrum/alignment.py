"""Alignment of a target with the tangent kernel, in one pass and without forming the kernel.

Expectations are means over the N examples, so with the Gram matrix K (sums over parameters)

    α(f) = E E f(x) Θ(x, x') f(x') = fᵀK f / N² = ‖E f(x) ∇f₀(x)‖²        (lemma 1)
    ‖f‖₂² = fᵀf / N        ‖f‖²_Θ = fᵀK⁺f ≥ ‖f‖₂⁴ / α(f)                  (lemma 1, eq. 5)

where no factor N is left in the kernel norm. For C outputs f is vector-valued and α(f) = ‖E J(x)ᵀf(x)‖²
(``"full"``), or scalar: Σ_c ‖E f ∇f_c‖² (``"trace"``) and ‖E f ∇Σ_c f_c‖² (``"sum"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distributed import shared_call
from linnet.memory import Plan, parse_bytes, require
from linnet.number_types import wide_type
from linnet.progress import track
from linnet.spectrum.kernel_matrix import (
    FunctionValues,
    check_inputs,
    check_kernel,
    function_values,
    tangent_of,
)
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional
from linnet.tangent.jacobian import vjp_columns
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import OUTER, Captured, Form, factors

BLOCK = 256  # rows of a product of gradients and targets, memory permitting
CHUNK = 2**27  # bytes of derivatives held at once: 2**26 keeps threads waiting, 2**29 takes a quarter more
ROWS = 256  # parameters squared at once: a part that stays in the cache


@shared_call("linnet.spectrum.alignment")
@in_exact_mode
def alignment(
    model: Linearized | nn.Module,
    data: Any,
    form: Form = "full",
    *,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> Tensor:
    """Target alignment α(f) = ‖E f(x) ∇f₀(x)‖², for any number of targets in one pass over the data.

    The targets share the pass; each further one costs its product with the gradients alone. Where the
    averaged Jacobians of all targets, T · P numbers, exceed the memory, targets are taken in groups
    with one pass each.

    Args:
        model: A network or a linearization; of the latter only the tracked parameters count.
        data: Inputs and targets: an (x, y) pair, a Dataset, a DataLoader or batches. Float y (N,) or (N, C)
            is one target, (N, T) (scalar-valued functions) or (N, C, T) is T of them. Integer y are
            classes: two of them become −1 and 1; c of C becomes e_c − 1/C.
        form: Which kernel of a network with C outputs: ``"full"`` for vector-valued targets,
            ``"trace"`` or ``"sum"`` for scalar ones. Ortiz-Jimenez et al. have one output, for which
            all three agree.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        α, () for one target or (T,), float64. In terms of the Gram matrix: fᵀK f / N².

    Raises:
        DataError: If the data are empty, not finite or out of range.
        InputError: If targets do not fit the kernel.
        MemoryBudgetError: If not even one target fits.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, lemma 1 (supplement D.1, eq. 6).

    Example:
        The network w · x has the gradient x; with f = x₁ the mean of f ∇f is (1, 0).

        >>> x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
        >>> alignment(nn.Linear(2, 1, bias=False), (x, x[:, 0]))
        tensor(1., dtype=torch.float64)
    """
    task, values = _prepare(model, data, form, memory)
    return values.shaped(_alpha(task, values, memory, progress))


@shared_call("linnet.spectrum.kernel_norm_bound")
@in_exact_mode
def kernel_norm_bound(
    model: Linearized | nn.Module,
    data: Any,
    form: Form = "full",
    *,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> Tensor:
    """A lower bound ‖f‖₂⁴ / α(f) of the squared kernel norm ‖f‖²_Θ, in one pass over the data.

    A large norm means a target that the linearized network learns slowly and from many samples; the
    norm itself, fᵀK⁺f, takes a full eigendecomposition (``Eigenfunctions.kernel_norm``).

    Args:
        model: A network or a linearization.
        data: Inputs and targets, as for ``alignment``.
        form: Which kernel, as for ``alignment``.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The bound, () for one target or (T,), float64: infinite for a target that the kernel cannot
        represent at all (α = 0), zero for the zero function.

    Raises:
        DataError: If the data are empty, not finite or out of range.
        InputError: If targets do not fit the kernel.
        MemoryBudgetError: If not even one target fits.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, lemma 1 (supplement D.1, eq. 5).

    Example:
        >>> x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
        >>> kernel_norm_bound(nn.Linear(2, 1, bias=False), (x, x[:, 0]))
        tensor(1., dtype=torch.float64)
    """
    task, values = _prepare(model, data, form, memory)
    square = values.mean_square()
    # ‖f‖²_Θ ≥ ‖f‖₂⁴ / α(f)
    bound = square.square() / _alpha(task, values, memory, progress).to(square)
    return values.shaped(torch.where(square == 0, 0.0, bound))


@dataclass(frozen=True)
class _Task:
    """The function to differentiate, and its targets."""

    function: Functional  # the network
    x: Inputs  # N examples
    c: int  # number of its outputs
    form: Form  # which kernel

    @property
    def copies(self) -> int:
        """The number of averaged Jacobians of a target: one for each output under ``"trace"``."""
        return self.c if self.form == "trace" else 1

    @property
    def backward(self) -> int:
        """Cotangents sent back for the gradients of every example."""
        return 1 if self.form == "sum" else self.c

    def is_few(self, count: int) -> bool:
        """Whether targets are fewer than the gradients of an example, so that sums are differentiated."""
        return count * self.copies <= self.backward


def _prepare(
    model: Linearized | nn.Module, data: Any, form: Form, memory: str | int | None
) -> tuple[_Task, FunctionValues]:
    """The network, the inputs and the targets, checked."""
    check_kernel(form)
    function = tangent_of(model)
    x, y = Data.of(data, function, memory=memory, keep=False).pair
    shape = check_inputs(function, x)
    wide = wide_type(function.dtype)
    values = function_values(y, shape, form, wide)
    return _Task(function, x, torch.Size(shape).numel(), form), values


def _alpha(task: _Task, values: FunctionValues, memory: str | int | None, progress: bool | None) -> Tensor:
    """α of every target, (T,)."""
    sizes = _sizes(task, values, memory)
    n, block = batch_size(task.x), sizes.block
    steps = [
        (targets, start)
        for targets in values.values.split(sizes.group, dim=2)
        for start in range(0, n, block)
    ]
    gradients = _Gradients(task, sizes.chunk, block)
    results: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for targets, start in track(
        steps, f"alignment of {values.values.shape[2]} targets", len(steps), progress
    ):
        part = task.x if block >= n else take(task.x, slice(start, start + block))
        for name, rows, t in _terms(task, part, targets[start : start + block], gradients):
            if name not in total:
                total[name] = t.new_zeros(rows.shape[1], t.shape[1])
            total[name].addmm_(rows.T, t)  # Σ_i ∇f₀(x_i) f(x_i)ᵀ
        if start + block >= n:
            # α = ‖Σ_i ∇f₀(x_i) f(x_i)‖² / N²
            results.append(torch.stack([_squares(sums) for sums in total.values()]).sum(0) / n**2)
            total = {}
    return torch.cat(results)


def _squares(sums: Tensor) -> Tensor:
    """Squared norms of the columns, (T,), in float64 without a copy of the whole."""
    total = sums.new_zeros(sums.shape[1], dtype=torch.float64)
    for part in sums.split(ROWS):
        total += part.double().square().sum(0)
    return total


def _terms(task: _Task, x: Inputs, t: Tensor, gradients: _Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Contributions of a block to the sums: pairs (rows, weights) of one parameter at a time."""
    if task.is_few(t.shape[2]):  # differentiate the sums of the targets at once
        pulled = vjp_columns(task.function, x, _cotangents(task, t).to(task.function.dtype)).to(t.dtype)
        # the columns (copies, T) of one target belong together, as rows of the sum
        rows = pulled.unflatten(1, (task.copies, t.shape[2])).flatten(0, 1).T
        yield "all", rows, torch.eye(t.shape[2]).to(t)
        return
    for name, rows in gradients(x, t.dtype).items():  # (n, K, parameter)
        if task.form == "full":
            yield name, rows.flatten(0, 1), t.flatten(0, 1)
        else:
            yield name, rows.flatten(1), t[:, 0]


class _Gradients:
    """Per-example gradients of a block of examples, differentiated a few examples at a time."""

    # The product with the targets wants many rows, since it reads and writes all their sums; derivatives want
    # few, so that their memory is small enough to be used again rather than asked of the system anew.

    def __init__(self, task: _Task, chunk: int, block: int) -> None:
        self.task, self.chunk, self.block = task, chunk, block
        self._rows: dict[str, Tensor] = {}

    def __call__(self, x: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """Gradients (n, K, parameter) by name; they are overwritten by the next call."""
        task, done = self.task, 0
        for part in split(x, self.chunk):
            captured = capture(task.function, part, "sum" if task.form == "sum" else "full")
            for name in task.function.names:
                if name not in self._rows:
                    size = captured.leaves[name].numel()
                    self._rows[name] = torch.empty(
                        self.block, captured.k, size, dtype=dtype, device=task.function.device
                    )
                _fill(self._rows[name][done : done + captured.n], captured, name)
            done += captured.n
        return {name: rows[:done] for name, rows in self._rows.items()}


def _fill(room: Tensor, captured: Captured, name: str) -> None:
    """Write the gradients of some examples in one parameter to their place (n, K, parameter)."""
    uses = captured.by_parameter().get(name, [])
    known = name in captured.exact or len(uses) != 1 or not uses[0].direct or uses[0].kind not in OUTER
    f = None if known else factors(uses[0], captured.n)
    if f is None or f.is_embedding or f.transposed or f.g.shape[2] > 1 or f.g.dtype != room.dtype:
        room.copy_(captured.rows(name).reshape(room.shape))
        return
    k, n, _, s, c = f.g.shape  # one group: Σ_s g_ns a_nsᵀ is written where it belongs, without a copy
    if s == 1:
        torch.mul(f.g[:, :, 0, 0].transpose(0, 1)[..., None], f.a[:, 0, None], out=room.view(n, k, c, -1))
    else:
        g = f.g[:, :, 0].permute(1, 0, 3, 2).reshape(n, k * c, s)
        torch.bmm(g, f.a[:, 0], out=room.view(n, k * c, -1))


def _cotangents(task: _Task, t: Tensor) -> Tensor:
    """Cotangents (n, C, copies · T) whose pulled-back sums are the averaged Jacobians of the targets."""
    n, _, count = t.shape
    if task.form == "full":
        return t
    if task.form == "sum":
        return t.expand(n, task.c, count)
    identity = torch.eye(task.c, dtype=t.dtype, device=t.device)
    return torch.einsum("cd,nt->ncdt", identity, t[:, 0]).flatten(2)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of blocks and chunks."""

    group: int  # targets in one pass
    block: int  # examples in one product with the targets
    chunk: int  # examples differentiated at once


def _sizes(task: _Task, values: FunctionValues, memory: str | int | None) -> _Sizes:
    """Sizes that fit the memory; at best a block of about 256 rows, in chunks whose memory is reused."""
    n, _, count = values.values.shape
    budget = parse_bytes(memory, task.function.device)
    size = values.values.dtype.itemsize
    p, k = task.function.space.dim, task.backward
    largest = max(t.numel() for t in task.function.theta.values())
    one_target = task.copies * p * size
    is_few = task.is_few(count)
    derived = capture_bytes(task.function, task.x, k) + (0 if is_few else 2 * k * largest * size)
    kept = 0 if is_few else k * p * size  # gradients of one example
    held = (3 if is_few else 1) * one_target  # a pass for few targets holds what it adds as well
    group = max(1, min(count, (budget - derived - kept) // (2 * held)))
    left = max(0, budget - group * held)
    if is_few:
        block = chunk = max(1, min(BLOCK, n, left // max(derived, 1)))
    else:
        chunk = max(1, min(n, max(1, CHUNK // derived), left // (derived + kept), -(-BLOCK // k)))
        block = max(chunk, min(n, -(-BLOCK // k), (left - chunk * derived) // max(kept, 1)))
    items = (
        ("averaged Jacobians", group * held),
        ("derivatives of some examples", chunk * derived),
        ("their gradients", block * kept),
    )
    require(
        Plan(f"alignment of {count} targets on {n} examples", budget, items),
        ["linearize fewer parameters with linnet.linearize(model, params=...)", "raise memory="],
    )
    return _Sizes(group, block, chunk)
