"""Training steps of a linear model in kernel coordinates: the same iterates without the network.

Steps of SGD on f₀ + Jδ, preconditioned by a constant A = H Hᵀ, never leave the span of A Jᵀ. With the kernel
J A Jᵀ = U S Uᵀ of the training examples and δ = A Jᵀ U S^(−½) z,

    f = f₀ + U S^(½) z,        z ← z − η (U S^(½))_Bᵀ ∇_f,

momentum included: the coordinates z, N·C at most, take the steps that δ would take. Each costs N·C numbers an
output instead of a forward and a backward pass, whatever the learning rate, so a search costs one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linnet.finetuning.augment import Augmentation
from linnet.finetuning.examples import Examples
from linnet.linear.cost import NETWORK_PENALTY, forward_operations
from linnet.memory import parse_bytes
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.tangent.linearized import Linearized

HELD_AT_ONCE = 2**25  # derivatives in one block, whatever the memory, so that a run repeats to the bit
COLUMNS = 2**15  # parameters whose products are summed in the network's own precision
SMALL_DECAY = (
    1e-3  # share of δ that weight decay would take away over a preconditioned run, and may be left out
)
ROOT_OPERATIONS = 1000  # of a Kronecker factored root, for each parameter of each vector


class KernelModel(nn.Module):
    """The linear model in the kernel's coordinates: outputs f₀ + R z of examples given as (f₀, R)."""

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(like.new_zeros(size))

    def forward(self, base: Tensor, rows: Tensor) -> Tensor:
        """Outputs, (N, C)."""
        # base (N, C), rows (N, C, size)
        outputs: Tensor = base + rows @ self.z
        return outputs


@dataclass(frozen=True, eq=False)
class KernelProblem:
    """A linear model on its training examples, in the kernel's coordinates. ``kernel_problem`` makes it."""

    lin: Linearized  # the linearized network
    # the preconditioner, if there is one; its gain is not part of `values`
    before: KroneckerPreconditioner | None
    basis: Tensor  # U, (N·C, size)
    values: Tensor  # S, (size,), of J A Jᵀ with A of gain 1
    base: tuple[Tensor, Tensor]  # f₀ of the training examples and of the held-out ones
    cross: Tensor  # J_held A Jᵀ, (H·C, N·C); with no rows if nothing is held out
    notes: list[str] = field(default_factory=list)  # what is worth knowing, one sentence each

    @property
    def gain(self) -> float:
        """The factor on A."""
        return 1.0 if self.before is None else self.before.gain

    def module(self) -> KernelModel:
        """The model to train, at δ = 0."""
        return KernelModel(len(self.values), self.values)

    def top(self, n: int, steps: int = 12) -> float:
        """Largest eigenvalue of J A Jᵀ / n on n examples, by the iteration that steps would take."""
        c = self.base[0].shape[1]
        rows = self.basis[: n * c]
        u = torch.randn((n, c), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        u, value = u.reshape(-1).to(rows.device), 0.0
        for _ in range(steps):
            u = rows @ (self.values * (rows.T @ (u / u.norm())))  # J A Jᵀ u
            value = float(u.norm())
            if value == 0:
                break
        return value / n

    def features(self, source: Examples) -> Examples:
        """The training examples as (f₀, R) with their targets."""
        rows = self.basis * (self.gain * self.values).sqrt()  # R = U S^½
        return _examples(self.base[0], rows, source)

    def held(self, source: Examples) -> Examples:
        """The held-out examples as (f₀, R) with their targets."""
        # R = J_held A Jᵀ U S^(−½)
        rows = (self.gain / self.values).sqrt() * (self.cross @ self.basis)
        return _examples(self.base[1], rows, source)

    @torch.no_grad()
    def carry(self, trained: nn.Module, whole: Linearized, x: Any) -> None:
        """Put the displacement that trained coordinates stand for into the network's."""
        assert isinstance(trained, KernelModel)
        # δ = A Jᵀ U S^(−½) z
        beta = self.basis @ (trained.z / (self.gain * self.values).sqrt())
        beta = beta.reshape(self.base[0].shape).to(whole.function.dtype)
        flat = whole.vjp(x, beta, like="flat")
        assert isinstance(flat, Tensor)
        flat = flat if self.before is None else self.before.multiply(flat)
        for name, value in whole.space.to_params(flat).items():
            whole.delta[name].copy_(value)


def pays(lin: Linearized, x: Any, sizes: tuple[int, int, int], passes: int, memory: str | int | None) -> bool:
    """Whether the kernel costs less than the steps that it saves, and fits."""
    n, held, c = sizes
    equations, dim, itemsize = n * c, lin.space.dim, lin.function.dtype.itemsize
    rows = (n + held) * c
    needed = equations * dim * itemsize + 3 * max(HELD_AT_ONCE, c * dim) * itemsize + 48 * equations**2
    if needed > parse_bytes(memory, lin.function.device):
        return False
    forward = NETWORK_PENALTY * forward_operations(lin.function, x)
    derivatives = (n + held) * forward * (1 + 2 * c)
    products = 2 * rows * equations * dim + 20 * equations**3
    roots = ROOT_OPERATIONS * rows * dim
    return derivatives + products + roots < passes * 5 * forward  # a JVP costs two passes, its gradient three


@torch.no_grad()
def kernel_problem(
    lin: Linearized,
    before: KroneckerPreconditioner | None,
    data: tuple[Examples, Examples | None],
    view: Augmentation,
) -> KernelProblem:
    """Form the kernel of the training examples and its eigenvectors."""
    examples, held = data
    c = lin.base(view(examples.batch(torch.arange(1))[0])).shape[1]
    phi = torch.empty(examples.n * c, lin.space.dim, dtype=lin.function.dtype, device=lin.function.device)
    base, start = [], 0
    for x in _blocks(examples, view, c * lin.space.dim):
        rows = _rows(lin, before, x)
        phi[start : start + len(rows)] = rows
        start += len(rows)
        base.append(lin.base(x))
    values, vectors = torch.linalg.eigh(_products(phi, phi))
    # what float32 cannot tell from zero does not move
    kept = values > 10 * torch.finfo(phi.dtype).eps * values[-1]
    held_base, cross = [base[0][:0]], [phi.new_zeros(0, len(phi)).double()]
    if held is not None:
        for x in _blocks(held, view, c * lin.space.dim):
            cross.append(_products(_rows(lin, before, x), phi))
            held_base.append(lin.base(x))
    outputs = torch.cat(base).double(), torch.cat(held_base).double()
    note = f"steps taken in the {int(kept.sum())} coordinates of the kernel, not in the weights"
    basis = vectors[:, kept].contiguous()
    return KernelProblem(lin, before, basis, values[kept], outputs, torch.cat(cross), [note])


def _examples(base: Tensor, rows: Tensor, source: Examples) -> Examples:
    """Outputs and rows of R with the targets of the examples."""
    return Examples(((base, rows.reshape(*base.shape, -1)), source.labels()), source.device)


def _blocks(examples: Examples, view: Augmentation, size: int) -> Any:
    """Inputs in blocks of equal size, whatever the memory."""
    for x, _ in examples.batches(max(1, min(32, HELD_AT_ONCE // size))):
        yield view(x)


def _rows(lin: Linearized, before: KroneckerPreconditioner | None, x: Any) -> Tensor:
    """J H of a block, (n·C, P)."""
    rows = lin.jacobian(x).reshape(-1, lin.space.dim)
    return rows if before is None else before.half(rows.T).T


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Left rightᵀ in float64, summed over blocks of columns."""
    result = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for start in range(0, left.shape[1], COLUMNS):
        part = slice(start, start + COLUMNS)
        result += left[:, part] @ right[:, part].T
    return result
