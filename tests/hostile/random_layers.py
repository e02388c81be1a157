"""Layers that a random network is made of: those of torch.nn, and parameters used in every other form.

A factory takes a source of random choices and the width of what it is given, and returns a module with the
width of what it returns. Factories of ``VECTOR`` treat the last axis alone, so that they serve (N, D) and
(N, S, D) alike; those of ``SEQUENCE`` take (N, S, D), those of ``GRID`` (N, D, ...) with one to three axes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Made = tuple[nn.Module, int]
Factory = Callable[[random.Random, int], Made]
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Sigmoid,
    lambda: nn.ReLU(inplace=True), lambda: nn.ELU(inplace=True), nn.Mish, nn.Softsign, nn.PReLU,
)  # fmt: skip


def activation(rng: random.Random) -> nn.Module:
    """Any nonlinear function."""
    return rng.choice(ACTIVATIONS)()


class Skip(nn.Module):
    """x + layer(x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Joined(nn.Module):
    """x and layer(x), one after the other along an axis."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)], self.axis)


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Two layers with one weight, or with a weight and its transpose."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(width, hidden, bias=hidden != width) if hidden == width else None
        if self.second is not None:
            self.second.weight = self.first.weight
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h) if self.second is not None else F.linear(h, self.first.weight.T, self.bias)


class InPlace(nn.Module):
    """Writes into its own activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += self.second(x.sin())
        h[..., :1] *= 2.0
        return h.masked_fill_(x > 1.2, 0.25).tanh_()


class LowRank(nn.Module):
    """A frozen layer with a trainable correction of rank one."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(1, width)), nn.Parameter(torch.randn(out, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Own(nn.Module):
    """Parameters of one's own, used in one of many forms.

    Args:
        form: A key of ``FORMS``.
        width: Width of the input.
        out: Width of the output, for forms that can change it.
    """

    def __init__(self, form: str, width: int, out: int) -> None:
        super().__init__()
        self.form = form
        for name, shape in FORMS[form][0](width, out).items():
            setattr(self, name, nn.Parameter(0.6 * torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return FORMS[self.form][1](self, x)


def _sliced(m: Any, x: Tensor) -> Tensor:
    """One parameter as two weights."""
    left, right = m.w.chunk(2)
    return torch.tanh(F.linear(x, left)) * F.linear(x, right)


#: Form: shapes of its parameters for a width d going in and k going out, and what it does with them.
FORMS: dict[str, tuple[Callable[[int, int], dict[str, tuple[int, ...]]], Callable[[Any, Tensor], Tensor]]] = {
    "scale": (lambda d, k: {"w": (d,)}, lambda m, x: m.w * x),
    "transposed product": (lambda d, k: {"w": (k, d)}, lambda m, x: x @ m.w.T),
    "product": (lambda d, k: {"w": (d, k), "b": (k,)}, lambda m, x: x @ m.w + m.b),
    "computed weight": (
        lambda d, k: {"u": (k, 1), "v": (1, d), "b": (k,)},
        lambda m, x: F.linear(x, (m.u @ m.v).tanh() + 0.1, m.b.exp()),
    ),
    "outer product": (lambda d, k: {"u": (d,), "v": (d,)}, lambda m, x: x + x @ torch.outer(m.u, m.v)),
    "scalar gate": (
        lambda d, k: {"w": (d, d), "gate": ()},
        lambda m, x: m.gate.sigmoid() * (x @ m.w) + (1 - m.gate.sigmoid()) * x,
    ),
    "late bias": (lambda d, k: {"w": (k, d), "b": (k,)}, lambda m, x: torch.tanh(F.linear(x, m.w)) + 2 * m.b),
    "einsum": (
        lambda d, k: {"w": (2, d, k)},
        lambda m, x: torch.einsum("...i,rij->...rj", x, m.w).tanh_().sum(-2),
    ),
    "bilinear": (lambda d, k: {"w": (k, d, d)}, lambda m, x: torch.einsum("...i,kij,...j->...k", x, m.w, x)),
    "power": (lambda d, k: {"p": (d,)}, lambda m, x: (x.square() + 0.5) ** m.p),
    "slices": (lambda d, k: {"w": (2 * k, d)}, _sliced),
    "rows": (lambda d, k: {"w": (k, d)}, lambda m, x: torch.stack([x @ row for row in m.w.unbind()], -1)),
    "mixture": (
        lambda d, k: {"choice": (2,), "w": (2, k, d)},
        lambda m, x: F.linear(x, torch.einsum("r,rkd->kd", m.choice.softmax(0), m.w)),
    ),
    "normalized": (lambda d, k: {"w": (k, d)}, lambda m, x: F.linear(x, F.normalize(m.w, dim=1))),
    "distance": (
        lambda d, k: {"c": (k, d)},
        lambda m, x: (x[..., None, :] - m.c).square().sum(-1).neg().exp(),
    ),
    "doubled": (lambda d, k: {"w": (k, d)}, lambda m, x: torch.tanh(x @ m.w.T) + F.linear(x.square(), m.w)),
    "division": (lambda d, k: {"w": (k, d), "t": ()}, lambda m, x: F.linear(x, m.w) / (1 + m.t.square())),
    "cumulative": (lambda d, k: {"w": (d,)}, lambda m, x: x * m.w.cumsum(0)),
}  # fmt: skip
KEEP_WIDTH = {"scale", "outer product", "scalar gate", "power", "cumulative"}


def own(form: str) -> Factory:
    """A factory of one form."""

    def make(rng: random.Random, width: int) -> Made:
        out = width if form in KEEP_WIDTH else rng.randint(1, 3)
        return Own(form, width, out), out

    return make


def _linear(rng: random.Random, width: int) -> Made:
    out = rng.randint(1, 4)
    return nn.Linear(width, out, bias=rng.random() < 0.8), out


def _frozen(rng: random.Random, width: int) -> Made:
    layer, out = _linear(rng, width)
    layer.weight.requires_grad_(False)  # type: ignore[union-attr]
    return layer, out


def _normed(kind: Callable[[nn.Module], nn.Module]) -> Factory:
    """A linear layer under a parametrization."""

    def make(rng: random.Random, width: int) -> Made:
        out = rng.randint(2, 3)
        return kind(nn.Linear(width, out)), out

    return make


def _grouped(rng: random.Random, width: int) -> Made:
    return nn.Sequential(nn.Linear(width, 4), nn.GroupNorm(rng.choice((1, 2, 4)), 4)), 4


def _gated(rng: random.Random, width: int) -> Made:
    return nn.Sequential(nn.Linear(width, 4), nn.GLU()), 2


def _tied(rng: random.Random, width: int) -> Made:
    return Tied(width, rng.choice((width, 2, 3))), width


VECTOR: dict[str, Factory] = {
    "linear": _linear,
    "frozen": _frozen,
    "skip": lambda rng, d: (Skip(nn.Sequential(nn.Linear(d, d), activation(rng))), d),
    "joined": lambda rng, d: (Joined(nn.Sequential(nn.Linear(d, 1), activation(rng)), -1), d + 1),
    "used twice": lambda rng, d: (Twice(nn.Linear(d, d)), d),
    "tied": _tied,
    "layer norm": lambda rng, d: (nn.LayerNorm(d, elementwise_affine=True, bias=rng.random() < 0.7), d),
    "rms norm": lambda rng, d: (nn.RMSNorm(d), d),
    "weight norm": _normed(lambda m: parametrizations.weight_norm(m)),
    "spectral norm": _normed(lambda m: parametrizations.spectral_norm(m)),
    "orthogonal": _normed(lambda m: parametrizations.orthogonal(m)),
    "in place": lambda rng, d: (InPlace(d), d),
    "low rank": lambda rng, d: (LowRank(d, 2), 2),
    "gated": _gated,
    "prelu": lambda rng, d: (nn.PReLU(), d),
    "dropout": lambda rng, d: (nn.Sequential(nn.Linear(d, 3), nn.Dropout(0.5)), 3),
    **{form: own(form) for form in FORMS},
}
FLAT: dict[str, Factory] = {  # for (N, D) only
    "batch norm": lambda rng, d: (nn.BatchNorm1d(d, affine=rng.random() < 0.8), d),
    "group norm": _grouped,
}


# --- sequences ------------------------------------------------------------------------------------


class First(nn.Module):
    """What a recurrent layer returns first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    """nn.MultiheadAttention of a sequence to itself, with or without returning weights."""

    def __init__(self, width: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(width, heads, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.weights)[0]


class Causal(nn.Module):
    """scaled_dot_product_attention with projections of its own."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(width, 6), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Positions(nn.Module):
    """A learned vector for every place, added."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.5 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Along(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, 2, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


LENGTH = 3  # of every sequence


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Factory:
    def make(rng: random.Random, width: int) -> Made:
        both = rng.random() < 0.3
        layer = kind(width, 2, batch_first=True, bidirectional=both, bias=rng.random() < 0.8, **options)
        return First(layer), 4 if both else 2

    return make


def _encoder(rng: random.Random, width: int) -> Made:
    layer = nn.TransformerEncoderLayer(
        2, rng.choice((1, 2)), 2, dropout=0.1, batch_first=True, norm_first=rng.random() < 0.5
    )
    return nn.Sequential(nn.Linear(width, 2), layer), 2


SEQUENCE: dict[str, Factory] = {
    "rnn": _recurrent(nn.RNN),
    "relu rnn": _recurrent(nn.RNN, nonlinearity="relu"),
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "attention": lambda rng, d: (
        nn.Sequential(nn.Linear(d, 2), Attention(2, rng.choice((1, 2)), rng.random() < 0.5)),
        2,
    ),
    "dot product": lambda rng, d: (Causal(d, rng.random() < 0.5), 2),
    "encoder": _encoder,
    "positions": lambda rng, d: (Positions(LENGTH, d), d),
    "along": lambda rng, d: (Along(d), 2),
}


# --- grids ----------------------------------------------------------------------------------------

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
MEAN_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
PADDINGS = ("zeros", "reflect", "replicate", "circular")
GridFactory = Callable[[random.Random, int, int], Made]


def _padded(mode: str) -> GridFactory:
    def make(rng: random.Random, width: int, axes: int) -> Made:
        out = rng.randint(1, 2)
        size = 2 if axes == 3 else 3
        pad: Any = "same" if rng.random() < 0.3 and size == 3 else 1
        options: dict[str, Any] = {"padding": pad, "padding_mode": mode, "bias": rng.random() < 0.7}
        stride = 1 if pad == "same" else rng.choice((1, 2))
        return CONVOLUTIONS[axes](width, out, size, stride, **options), out

    return make


def _dilated(rng: random.Random, width: int, axes: int) -> Made:
    return CONVOLUTIONS[axes](width, 2, 2, padding=1, dilation=2), 2


def _grouped_convolution(rng: random.Random, width: int, axes: int) -> Made:
    out = width * rng.choice((1, 2))
    return CONVOLUTIONS[axes](width, out, 2, padding=1, groups=width), out


def _transposed(rng: random.Random, width: int, axes: int) -> Made:
    stride = rng.choice((1, 2))
    return TRANSPOSED[axes](width, 2, 2, stride, padding=1, output_padding=stride - 1), 2


GRID: dict[str, GridFactory] = {
    **{mode: _padded(mode) for mode in PADDINGS},
    "dilated": _dilated,
    "groups": _grouped_convolution,
    "transposed": _transposed,
    "batch norm": lambda rng, d, axes: (BATCH_NORMS[axes](d), d),
    "group norm": lambda rng, d, axes: (nn.GroupNorm(1, d), d),
    "instance norm": lambda rng, d, axes: (
        INSTANCE_NORMS[axes](d, affine=True, track_running_stats=rng.random() < 0.5),
        d,
    ),
    "max pool": lambda rng, d, axes: (MAX_POOLS[axes](2, stride=1), d),
    "mean pool": lambda rng, d, axes: (MEAN_POOLS[axes](2, stride=1, padding=1), d),
    "adaptive pool": lambda rng, d, axes: (ADAPTIVE[axes](2), d),
    "skip": lambda rng, d, axes: (
        Skip(nn.Sequential(CONVOLUTIONS[axes](d, d, 1), activation(rng))),
        d,
    ),
    "joined": lambda rng, d, axes: (Joined(CONVOLUTIONS[axes](d, 1, 1), 1), d + 1),
    "used twice": lambda rng, d, axes: (Twice(CONVOLUTIONS[axes](d, d, 1)), d),
    "weight norm": lambda rng, d, axes: (parametrizations.weight_norm(CONVOLUTIONS[axes](d, 2, 1)), 2),
}
