"""Networks drawn at random: a small network in float64 from a seed, and its derivatives by brute force.

Every kind of layer comes up in turn (``featured``), among others drawn at random. What a network is compared
with is plain ``torch.autograd.grad`` on a copy, one example and one output at a time: nothing of linnet.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.hostile.random_layers import FLAT, GRID, LENGTH, SEQUENCE, VECTOR, activation

MOST_PARAMETERS = 80
MOST_OUTPUTS = 6  # of one example, over all axes
LARGEST, SMALLEST = 20.0, 1e-3  # of an output; of the gradient that an output must have
TRIES = 400


def featured() -> list[tuple[str, str]]:
    """Every (kind of input, name of a layer) that a network is made around."""
    found = [("flat", name) for name in (*VECTOR, *FLAT)]
    found += [("sequence", name) for name in SEQUENCE]
    for name in GRID:
        found += [(f"grid {axes}", name) for axes in (1, 2, 3)]
    found += [("tokens", name) for name in ("tied decoder", "padding", "lstm", "attention", "linear")]
    found += [("pair", name) for name in ("linear", "mixture", "late bias", "tied")]
    return found + [("named", name) for name in ("einsum", "linear", "gated", "weight norm")]


@dataclass
class Network:
    """A random network and everything dense about it."""

    seed: int
    kind: str
    feature: str
    model: nn.Module
    x: Any
    x_test: Any
    axis: int = 1  # of the outputs that holds components

    def __str__(self) -> str:
        return f"{self.seed}-{self.kind}-{self.feature}".replace(" ", "_")

    def outputs(self, x: Any) -> Tensor:
        """Outputs in the network's own shape, (N,) as (N, 1)."""
        return outputs(self.model, x)

    @cached_property
    def f(self) -> Tensor:
        """Outputs (N, C), all axes joined."""
        return self.outputs(self.x).flatten(1)

    @cached_property
    def f_test(self) -> Tensor:
        """Outputs of the test inputs."""
        return self.outputs(self.x_test).flatten(1)

    @cached_property
    def j(self) -> Tensor:
        """J (N, C, P)."""
        return jacobian(self.model, self.x)

    @cached_property
    def j_test(self) -> Tensor:
        """J of the test inputs."""
        return jacobian(self.model, self.x_test)

    @cached_property
    def names(self) -> list[str]:
        """The tracked parameters."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.f)

    @cached_property
    def own_shape(self) -> torch.Size:
        """The outputs' own shape, (N, ...)."""
        return self.outputs(self.x).shape

    @cached_property
    def targets(self) -> Tensor:
        """Real targets in the network's own shape."""
        return self.numbers(self.own_shape, 1)

    @cached_property
    def labels(self) -> Tensor:
        """A class for every position."""
        shape = list(self.own_shape)
        classes = shape.pop(self.axis)
        return torch.randint(max(classes, 2), shape, generator=generator(self.seed, 2))

    def numbers(self, shape: Any, which: int) -> Tensor:
        """Standard normal numbers of this network."""
        return torch.randn(tuple(shape), generator=generator(self.seed, which), dtype=torch.float64)

    @property
    def scale(self) -> float:
        """The mean of the kernel's diagonal: ridges are shares of it."""
        return float(self.j.square().sum(2).mean())

    def moved(self, step: Tensor) -> nn.Module:
        """A copy whose tracked parameters are displaced."""
        twin = frozen_copy(self.model)
        start = 0
        with torch.no_grad():
            for p in tracked(twin, self.names):
                p += step[start : start + p.numel()].view(p.shape)
                start += p.numel()
        return twin


# --- drawing --------------------------------------------------------------------------------------


def network(seed: int) -> Network:
    """The network of a seed.

    Args:
        seed: Any number; the kind of input and the featured layer go through all of them in turn.
    """
    everything = featured()
    kind, feature = everything[seed % len(everything)]
    rng = random.Random(seed)
    for attempt in range(TRIES):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + attempt)
            made = _attempt(rng, seed, kind, feature)
        if made is not None:
            return made
    raise AssertionError(f"no network of at most {MOST_PARAMETERS} parameters in {TRIES} tries: {seed}")


def _attempt(rng: random.Random, seed: int, kind: str, feature: str) -> Network | None:
    """One network, or None if it is too large, says nothing, or torch itself cannot run it."""
    n, shape = rng.choice((1, 2, 3, 4, 5, 6)), _shape(rng, kind)
    try:
        model, axis = _built(rng, kind, feature, shape)
        _perturb(model.double())
        x, x_test = _fed(kind, shape, n), _fed(kind, shape, 2)
        if n > 2 and rng.random() < 0.2:
            _repeat(x)
        f = outputs(model, x)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if not 0 < trained <= MOST_PARAMETERS or f[0].numel() > MOST_OUTPUTS:
            return None
        moves = float(jacobian(model, x).abs().amax(dim=2).min())
    except (ValueError, RuntimeError):  # what torch itself cannot build, run or differentiate
        return None
    if not bool(f.isfinite().all()) or float(f.abs().max()) > LARGEST or moves < SMALLEST:
        return None
    model.train(rng.random() < 0.5)  # whatever the mode, linnet takes a copy in evaluation mode
    return Network(seed, kind, feature, model, x, x_test, axis if f.ndim > 2 else 1)


def _shape(rng: random.Random, kind: str) -> tuple[int, ...]:
    """The shape of one example."""
    if kind.startswith("grid"):
        axes = int(kind[-1])
        return (rng.randint(1, 2), *((5,) if axes == 1 else (4, 3) if axes == 2 else (3, 2, 2)))
    return {"sequence": (LENGTH, rng.randint(1, 2)), "tokens": (LENGTH,)}.get(kind, (rng.randint(2, 3),))


def _built(rng: random.Random, kind: str, feature: str, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """A network in evaluation mode, and the axis of its outputs that holds components."""
    if feature == "tied decoder":
        return TiedDecoder(rng.randint(1, 2), rng.random() < 0.5).eval(), 2
    if kind in ("pair", "named"):
        layer, width = VECTOR[feature](rng, shape[0])
        last = nn.Sequential(activation(rng), *_head(rng, 2 * width if kind == "pair" else width))
        return (Pair if kind == "pair" else Named)(layer, nn.Linear(2, width), last).eval(), 1
    body = _grid(rng, int(kind[-1]), shape[0], feature) if kind.startswith("grid") else None
    if kind in ("sequence", "tokens"):
        body = _sequence(rng, kind, shape[-1], feature)
    layers = nn.Sequential(*(body or _vectors(rng, shape[0], feature))).eval()
    with torch.no_grad():
        h = layers(_fed(kind, shape, 2).to(torch.get_default_dtype() if kind != "tokens" else torch.int64))
    if h.ndim == 2:
        return nn.Sequential(*layers, *_head(rng, h.shape[1])).eval(), 1
    if not h.numel():
        raise ValueError("nothing is left of the grid")
    if rng.random() < 0.4 and h[0].numel() <= MOST_OUTPUTS:  # outputs of several axes
        return layers, 2 if h.ndim == 3 and not kind.startswith("grid") else 1
    pool = Reduced(rng.choice(("mean", "last")), -1 if kind.startswith("grid") else 1)
    flat = nn.Flatten() if h[0].numel() <= 12 and rng.random() < 0.6 else pool
    with torch.no_grad():
        width = flat(h).shape[1]
    return nn.Sequential(*layers, flat, *_head(rng, width)).eval(), 1


def _head(rng: random.Random, width: int) -> list[nn.Module]:
    """A last layer for one to three outputs; of one output sometimes without the axis."""
    classes = rng.randint(1, 3)
    layers: list[nn.Module] = [nn.Linear(width, classes, bias=rng.random() < 0.8)]
    return [*layers, nn.Flatten(0)] if classes == 1 and rng.random() < 0.4 else layers


def _vectors(rng: random.Random, width: int, feature: str) -> list[nn.Module]:
    """Layers of (N, D), the featured one among them."""
    names = [feature, *(["linear"] if rng.random() < 0.5 else [])]
    if rng.random() < 0.4:
        names.append(rng.choice([*VECTOR, *FLAT]))
    rng.shuffle(names)
    body: list[nn.Module] = []
    for name in names:
        layer, width = (VECTOR | FLAT)[name](rng, width)
        body += [layer, activation(rng)] if rng.random() < 0.8 else [layer]
    return body


def _sequence(rng: random.Random, kind: str, width: int, feature: str) -> list[nn.Module]:
    """Layers of (N, S, D), or of token ids."""
    body: list[nn.Module] = []
    if kind == "tokens":
        width = 2
        body.append(nn.Embedding(4, width, padding_idx=0 if feature == "padding" else None))
    names = [] if feature == "padding" else [feature]
    if rng.random() < 0.4:
        names.append(rng.choice([*VECTOR, "positions"]))
    for name in names:
        layer, width = (VECTOR | SEQUENCE)[name](rng, width)
        body.append(layer)
        if rng.random() < 0.4:
            body.append(activation(rng))
    return body


def _grid(rng: random.Random, axes: int, width: int, feature: str) -> list[nn.Module]:
    """Layers of (N, D, ...)."""
    names = [feature, rng.choice(["zeros", "reflect", "replicate", "circular", "transposed"])]
    rng.shuffle(names)
    if rng.random() < 0.3:
        names.append(rng.choice([*GRID]))
    body: list[nn.Module] = []
    for name in names:
        layer, width = GRID[name](rng, width, axes)
        body += [layer, activation(rng)] if rng.random() < 0.7 else [layer]
    return body


class Reduced(nn.Module):
    """The mean over places, or the last place; places are all axes after ``axis``, or axis 1.

    Places are not moved before the last axis: for one example, torch 2.13 differentiates BatchNorm in
    evaluation mode wrongly where its result is flattened and transposed.
    """

    def __init__(self, how: str, axis: int) -> None:
        super().__init__()
        self.how, self.axis = how, axis

    def forward(self, x: Tensor) -> Tensor:
        if self.axis < 0:
            x = x.flatten(2)
            return x.mean(2) if self.how == "mean" else x[:, :, -1]
        return x.mean(1) if self.how == "mean" else x[:, -1]


class TiedDecoder(nn.Module):
    """A language model of three words whose decoder is its embedding; one output a place, or their mean."""

    def __init__(self, width: int, places: bool) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(3, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.head.weight, self.places = self.embedding.weight, places

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(self.embedding(ids)))
        return self.head(h[:, :2] if self.places else h.mean(1))


class Pair(nn.Module):
    """Takes two tensors."""

    def __init__(self, left: nn.Module, right: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.last = left, right, last

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(a), self.right(b)], 1))


class Named(nn.Module):
    """Takes two tensors by name; one gates the other."""

    def __init__(self, layer: nn.Module, gate: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.gate, self.last = layer, gate, last

    def forward(self, values: Tensor, context: Tensor) -> Tensor:
        return self.last(self.layer(values) * self.gate(context).sigmoid())


def _fed(kind: str, shape: tuple[int, ...], n: int) -> Any:
    """Inputs of n examples."""
    if kind == "tokens":
        return torch.randint(3, (n, *shape))
    x = torch.randn(n, *shape, dtype=torch.float64)
    if kind == "pair":
        return x, torch.randn(n, 2, dtype=torch.float64)
    return {"values": x, "context": torch.randn(n, 2, dtype=torch.float64)} if kind == "named" else x


def _repeat(x: Any) -> None:
    """Make the second example the first one again."""
    for part in parts(x):
        part[1] = part[0]


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Parameters and running statistics away from the values that they start with."""
    for p in model.parameters():  # biases of zero and scales of one would hide mistakes
        p += 0.2 * torch.randn_like(p)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand_like(buffer))


# --- brute force ----------------------------------------------------------------------------------


def generator(seed: int, which: int) -> torch.Generator:
    """A source of random numbers of its own."""
    return torch.Generator().manual_seed(10 * seed + which)


def parts(x: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]


def rows(x: Any, index: Any) -> Any:
    """Some examples of a batch."""
    if isinstance(x, dict):
        return {name: part[index] for name, part in x.items()}
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


def joined(a: Any, b: Any) -> Any:
    """Two batches as one."""
    if isinstance(a, dict):
        return {name: torch.cat([a[name], b[name]]) for name in a}
    return tuple(map(torch.cat, zip(a, b, strict=True))) if isinstance(a, tuple) else torch.cat([a, b])


def called(model: nn.Module, x: Any) -> Tensor:
    """The network's own call, (N,) as (N, 1)."""
    x = torch.utils._pytree.tree_map(torch.clone, x)  # some networks write to their inputs
    f = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    return f[:, None] if f.ndim == 1 else f


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode."""
    return copy.deepcopy(model).eval()


@torch.no_grad()
def outputs(model: nn.Module, x: Any) -> Tensor:
    """Outputs of a copy in evaluation mode, one example at a time."""
    model, n = frozen_copy(model), len(parts(x)[0])
    return torch.cat([called(model, rows(x, slice(i, i + 1))) for i in range(n)])


def tracked(model: nn.Module, names: list[str] | None = None) -> list[nn.Parameter]:
    """The parameters that require a gradient, or those of the names."""
    return [
        q for name, q in model.named_parameters() if (q.requires_grad if names is None else name in names)
    ]


def flat_gradient(value: Tensor, inputs: list[nn.Parameter], create_graph: bool = False) -> Tensor:
    """∇ of a scalar, flat (P,), zero where it does not depend on a parameter."""
    if not value.requires_grad:
        return torch.zeros(sum(p.numel() for p in inputs), dtype=torch.float64)
    found = torch.autograd.grad(
        value, inputs, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    pairs = zip(found, inputs, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def jacobian(model: nn.Module, x: Any) -> Tensor:
    """J (N, C, P): one example and one output at a time."""
    model, n = frozen_copy(model), len(parts(x)[0])
    inputs = tracked(model)
    found = []
    for i in range(n):
        f = called(model, rows(x, slice(i, i + 1))).reshape(-1)
        found.append(torch.stack([flat_gradient(value, inputs) for value in f]))
    return torch.stack(found)


def hessian(model: nn.Module, x: Any, loss: Any) -> Tensor:
    """∇² of loss(f) in the parameters, (P, P), one row after the other."""
    model = frozen_copy(model)
    inputs = tracked(model)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
        gradient = flat_gradient(loss(called(model, x)), inputs, create_graph=True)
    return torch.stack([flat_gradient(value, inputs) for value in gradient])


def examples(n: int) -> Iterator[tuple[int, list[int]]]:
    """Each example with the list of all others."""
    for i in range(n):
        yield i, [k for k in range(n) if k != i]
