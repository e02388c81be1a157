"""Every rule of forward mode on graphs, against torch's own forward mode, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from linnet.tangent.graph import Duals
from linnet.tangent.graph_rules import RULES

SEED = 5
CORE = torch._decomp.core_aten_decompositions()
# as few decompositions as there may be
WHOLE = {op: how for op, how in CORE.items() if op._schema.name.removeprefix("aten::") not in RULES}
A, B, IMAGE = (3, 4), (3, 4), (2, 4, 6, 6)
INDEX = torch.tensor([[0, 2], [1, 1], [2, 0]])
IDS = torch.tensor([[0, 2, 1], [1, 0, 2]])
Case = tuple[Callable[..., Tensor], list[tuple[int, ...]]]

CASES: dict[str, Case] = {
    "products": (lambda a, b: (a @ b.T) * (b @ a.T) + torch.addmm(a[0, :3], a, b.T, beta=2, alpha=3), [A, B]),
    "three at once": (F.bilinear, [A, (3, 5), (2, 4, 5), (2,)]),
    "batched": (lambda a, b: torch.baddbmm(a, b, a.mT, beta=0.5) + torch.bmm(a, b), [(2, 3, 3), (2, 3, 3)]),
    "vectors": (lambda a, b: torch.mv(a, b) * torch.dot(b, b) + torch.addmv(b[:3], a, b), [A, (4,)]),
    "sum of products": (
        lambda a, b, c: torch.addbmm(c, a, b, beta=2, alpha=3),
        [(2, 3, 4), (2, 4, 3), (3, 3)],
    ),
    "sums": (
        lambda a, b: (
            torch.sub(a, b[0], alpha=3) + torch.rsub(a, b, alpha=2) + (1 - b) + a.sum(0) + b.mean(1, True)
        ),
        [A, B],
    ),
    "quotients": (
        lambda a, b: a / (2 + b * b) + 1 / (3 + a * a) + torch.div(a, 0.3, rounding_mode="floor"),
        [A, B],
    ),
    "views": (
        lambda a: torch.cat(
            [
                a.T.reshape(2, 6).unsqueeze(0).expand(2, 2, 6).flatten(0, 1),
                torch.stack([a.flip(1).reshape(-1)[:6], a.roll(1).reshape(-1)[6:]]),
            ]
        ).squeeze(),
        [A],
    ),
    "pieces": (
        lambda a: sum(
            p.sum() * i for i, p in enumerate([*a.split(2, 1), *a.split([1, 2]), *a.unbind(), *a.chunk(2)])
        ),
        [A],
    ),
    "picked": (
        lambda a: (
            a[INDEX[:, 0]].sum()
            + a.gather(1, INDEX).square().sum()
            + a.index_select(1, INDEX[0]).sum() * a[:, 1::2].sum()
        ),
        [A],
    ),
    "triangles": (
        lambda a: a.tril() @ a.triu().T + a[:, :3].diagonal() + a.cumsum(1)[:, :3] + a.repeat(1, 2)[:, :3],
        [A],
    ),
    "windows": (
        lambda a: F.fold(F.unfold(a, 3, padding=1), (6, 6), 3, padding=1) * a.unfold(2, 2, 2).sum(),
        [IMAGE],
    ),
    "moved": (lambda a: torch.movedim(a, 0, 1)[:2, :2] + a.clone()[:2, :2], [A]),
    "shuffled": (
        lambda a: (
            F.pixel_shuffle(a, 2).sum(1) * F.pixel_unshuffle(a, 2).sum() + F.channel_shuffle(a, 2).sum()
        ),
        [IMAGE],
    ),
    "padded": (
        lambda a: (
            F.pad(a, (1, 1, 0, 2), value=3.0) * F.pad(a, (1, 1, 0, 2), "reflect")
            + F.pad(a, (1, 1, 0, 2), "replicate")
        ),
        [IMAGE],
    ),
    "padded volumes": (
        lambda a: F.pad(a[:, None], (1,) * 6, "reflect") * F.pad(a[:, None], (1,) * 6, "replicate"),
        [IMAGE],
    ),
    "padded rows": (lambda a: F.pad(a, (1, 1), "reflect") * F.pad(a, (1, 1), "replicate"), [A]),
    "filled": (
        lambda a, b: torch.where(a > 0, a, b) + a.masked_fill(b > 0, 2.0) + torch.where(b > 0, a * a, 0.0),
        [A, B],
    ),
    "placed": (
        lambda a, b: (
            torch.slice_scatter(a, b[:, :2], 1, 0, 2) * torch.select_scatter(b, a[0], 0, 1)
            + a.index_put((INDEX[:, 0],), b)
            + a.scatter_add(1, INDEX, b[:, :2])
            + a.scatter(1, INDEX[:, :1], b[:, :1])
            + a.index_add(0, INDEX[:, 0], b)
        ),
        [A, B],
    ),
    "embedding": (lambda w: F.embedding(IDS, w).square(), [A]),
    "typed": (lambda a: a.float().double() * a + a.round() + (a > 0).double(), [A]),
    "powers": (
        lambda a, b: (a * a + 1).pow(b) + a.pow(3) + (a * a + 1) ** -0.5 + 2.0**b + a.square() + a**2,
        [A, B],
    ),
    "clamped": (
        lambda a, b: a.clamp(-0.5, 0.7) + a.clamp_min(0.1) * a.clamp_max(0.4) + torch.clamp(a, b, b + 1),
        [A, B],
    ),
    "extremes": (
        lambda a, b: (
            torch.maximum(a, b) * torch.minimum(a, b)
            + a.amax(1, keepdim=True)
            + b.amin(0)
            + a.max(1).values.sum()
            + b.min()
            + a.max(0, keepdim=True)[0]
        ),
        [A, B],
    ),
    "sorted": (
        lambda a: (
            a.sort(1).values * a.topk(4, 0 if a.shape[0] > 3 else 1).values + a.median(1, keepdim=True).values
        ),
        [A],
    ),
    "variances": (
        lambda a: (
            a.var(1)
            + a.std(0, unbiased=False).sum()
            + torch.var_mean(a, 0, keepdim=True)[1].sum()
            + a.var()
            + torch.var_mean(a, 1)[0]
        ),
        [A],
    ),
    "softmax": (lambda a: a.softmax(1) * a.log_softmax(0) + a.logsumexp(1, keepdim=True), [A]),
    "norms": (
        lambda a: (
            a / a.norm(dim=1, keepdim=True)
            + F.normalize(a, dim=0)
            + a.norm(1)
            + torch.linalg.vector_norm(a, 3, 1, True)
            + torch.linalg.vector_norm(a, float("inf"))
        ),
        [A],
    ),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (4,), w, b) + F.layer_norm(a, (4,)), [A, (4,), (4,)]),
    "group norm": (lambda a, w, b: F.group_norm(a, 2, w, b), [IMAGE, (4,), (4,)]),
    "instance norm": (lambda a, w, b: F.instance_norm(a, None, None, w, b), [IMAGE, (4,), (4,)]),
    "batch norm": (
        lambda a, w, b: F.batch_norm(a, torch.arange(4.0).double(), 1 + torch.arange(4.0).double(), w, b),
        [IMAGE, (4,), (4,)],
    ),
    "convolution": (lambda a, w, b: F.conv2d(a, w, b, 2, 1), [IMAGE, (3, 4, 3, 3), (3,)]),
    "transposed": (lambda a, w, b: F.conv_transpose2d(a, w, b, 2, groups=2), [IMAGE, (4, 3, 3, 3), (6,)]),
    "pools": (
        lambda a: (
            F.max_pool2d(a, 2) * F.avg_pool2d(a, 2)
            + F.adaptive_avg_pool2d(a, 3)
            + F.adaptive_max_pool2d(a, 3)
        ),
        [IMAGE],
    ),
    "pools of rows": (lambda a: F.max_pool1d(a, 2) + F.avg_pool1d(a, 2) + F.adaptive_avg_pool1d(a, 2), [A]),
    "pools of volumes": (
        lambda a: (
            F.max_pool3d(a[:, None], 2)
            + F.avg_pool3d(a[:, None], 2)
            + F.adaptive_avg_pool3d(a[:, None], (2, 3, 3))
            + F.adaptive_max_pool3d(a[:, None], (2, 3, 3))
        ),
        [IMAGE],
    ),
    "resized": (
        lambda a: (
            F.interpolate(a, scale_factor=2)
            + F.interpolate(a, size=(12, 12), mode="bilinear")
            + F.interpolate(a, size=(12, 12), mode="bicubic")
            + F.interpolate(a, size=(12, 12), mode="nearest-exact")
            + F.interpolate(a, size=(12, 12), mode="bilinear", antialias=True)
        ),
        [IMAGE],
    ),
    "resized rows": (lambda a: F.interpolate(a[:, 0], 9) + F.interpolate(a[:, 0], 9, mode="linear"), [IMAGE]),
    "resized volumes": (
        lambda a: F.interpolate(a[None], (5, 7, 7)) + F.interpolate(a[None], (5, 7, 7), mode="trilinear"),
        [IMAGE],
    ),
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "sinh": torch.sinh,
    "cosh": torch.cosh, "asinh": torch.asinh, "atan": torch.atan, "erf": torch.erf, "abs": torch.abs,
    "gelu": F.gelu, "gelu tanh": lambda a: F.gelu(a, approximate="tanh"), "silu": F.silu, "mish": F.mish,
    "elu": lambda a: F.elu(a, 0.7), "celu": lambda a: F.celu(a, 0.7), "selu": F.selu, "relu6": F.relu6,
    "leaky": F.leaky_relu, "hardtanh": F.hardtanh, "hardsigmoid": lambda a: F.hardsigmoid(3 * a),
    "hardswish": lambda a: F.hardswish(3 * a), "softplus": lambda a: F.softplus(a, 3, 2),
    "logsigmoid": F.logsigmoid, "softsign": F.softsign, "tanhshrink": F.tanhshrink, "prelu":
    lambda a: F.prelu(a, a[0, :1]), "glu": F.glu, "neg": torch.neg,
    "roots": lambda a: torch.sqrt(1 + a * a) + torch.rsqrt(1 + a * a) + torch.reciprocal(2 + a * a),
    "logarithms": lambda a: sum(f(1 + a * a) for f in (torch.log, torch.log2, torch.log10, torch.log1p)),
}  # fmt: skip
CASES |= {name: (f, [A]) for name, f in UNARY.items()}


@functools.cache
def graph_of(name: str, core: bool) -> tuple[torch.fx.GraphModule, list[Tensor], list[Tensor]]:
    """The graph of a case, its inputs and a direction."""
    f, shapes = CASES[name]
    g = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    direction = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return (
        make_fx(lambda *given: f(*given), decomposition_table=CORE if core else WHOLE)(*inputs),
        inputs,
        direction,
    )


@pytest.mark.parametrize("core", [True, False], ids=["core", "whole"])
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_the_derivative(name: str, core: bool) -> None:
    graph, inputs, direction = graph_of(name, core)
    value, expected = torch.func.jvp(CASES[name][0], tuple(inputs), tuple(direction))
    nodes = list(graph.graph.nodes)
    places = [n.target for n in nodes if n.op == "placeholder"]
    duals = Duals(graph, [dict(zip(places, direction, strict=True)), {}])
    found = duals.run(*inputs)
    tangent = duals.moved[0][nodes[-1]]
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(tangent, expected, rtol=1e-7, atol=1e-7)
    assert duals.moved[1][nodes[-1]] is None  # nothing moves along no direction


def test_every_rule_is_tried() -> None:
    """But for those of operations that only traced networks have, or not all versions of torch."""
    elsewhere = {"_native_batch_norm_legit_no_training", "alias", "copy", "t"}
    elsewhere |= {"native_batch_norm", "_native_batch_norm_legit"}  # one or the other
    elsewhere |= {f"upsample_nearest{n}d" for n in (1, 2, 3)} | {"_upsample_nearest_exact2d"}  # torch 2.6
    ops = {n.target for name in CASES for core in (True, False) for n in graph_of(name, core)[0].graph.nodes}
    tried = {op._schema.name.removeprefix("aten::") for op in ops if isinstance(op, torch._ops.OpOverload)}
    assert RULES.keys() - tried <= elsewhere
