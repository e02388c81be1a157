"""Kronecker factors count no padding: neither what the attention mask hides nor labels of −100."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.likelihoods import Categorical

LENGTHS, Y = [3, 7, 5, 2, 6, 4, 7, 3], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = [torch.randint(1, 30, (n,), generator=GENERATOR) for n in LENGTHS]


class Text(nn.Module):
    """A classifier of texts: a mean over tokens, or the first token, after one layer of attention or none."""

    def __init__(self, attends: bool = False, strides: bool = False) -> None:
        super().__init__()
        self.e, self.a, self.o = nn.Embedding(30, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        self.q, self.k = (nn.Linear(8, 8), nn.Linear(8, 8)) if attends else (None, None)
        self.c = nn.Conv1d(8, 8, 1, stride=2) if strides else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h, keep = torch.tanh(self.a(self.e(input_ids))), attention_mask.to(self.o.weight.dtype)
        if self.q is not None and self.k is not None:
            scores = (self.q(h) @ self.k(h).mT).masked_fill(keep[:, None] == 0, -torch.inf)
            out: Tensor = self.o((h + scores.softmax(-1) @ h)[:, 0])
            return out
        if self.c is not None:
            h, keep = self.c(h.mT).mT, keep[:, ::2]
        out = self.o((h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))
        return out


class Tagger(nn.Module):
    """Classes of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.o = nn.Embedding(30, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.o(torch.tanh(self.a(self.e(ids))))
        return out


def batch(width: int) -> dict[str, Tensor]:
    ids, mask = torch.zeros(8, width, dtype=torch.long), torch.zeros(8, width, dtype=torch.long)
    for i, tokens in enumerate(TOKENS):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def made(net: nn.Module, data: Any, **options: Any) -> Any:
    return linnet.curvature(net, data, Categorical(axis=options.pop("axis", 1)), **options)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("kind", "structure"),
    # the gradient in the biases of keys vanishes, and with it says nothing of their eigenvectors
    [
        ({}, "kfac"),
        ({}, "ekfac"),
        ({"strides": True}, "kfac"),
        ({"strides": True}, "ekfac"),
        ({"attends": True}, "kfac"),
    ],
)
@pytest.mark.thinned(3)
def test_padding_does_not_change_a_curvature(kind: dict[str, bool], structure: str, sharing: str) -> None:
    torch.manual_seed(0)
    net = Text(**kind).double()
    one, other = (made(net, (batch(w), Y), structure=structure, sharing=sharing) for w in (7, 57))
    torch.testing.assert_close(one.dense(), other.dense(), rtol=1e-9, atol=1e-12)
    # batches padded one by one
    parts = [({k: t[i : i + 2, :n] for k, t in batch(7).items()}, Y[i : i + 2]) for i, n in ((0, 7), (2, 7))]
    wide = [({k: t[i : i + 2] for k, t in batch(30).items()}, Y[i : i + 2]) for i in (0, 2)]
    own, padded = (made(net, data, structure=structure, sharing=sharing) for data in (parts, wide))
    torch.testing.assert_close(own.dense(), padded.dense(), rtol=1e-9, atol=1e-12)


def test_a_mask_that_is_added_to_scores_hides_the_same_positions() -> None:
    torch.manual_seed(0)
    net, x = Text().double(), batch(12)
    twin = copy.deepcopy(net)
    twin.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": kwargs["attention_mask"] == 0}),
        with_kwargs=True,
    )
    added = {**x, "attention_mask": torch.where(x["attention_mask"] == 1, 0.0, -1e4)}
    torch.testing.assert_close(
        made(twin, (added, Y), structure="kfac").dense(), made(net, (x, Y), structure="kfac").dense()
    )
    inverted = {**x, "attention_mask": 1 - batch(7)["attention_mask"], "input_ids": batch(7)["input_ids"]}
    with pytest.raises(InputError, match="attention_mask"):
        made(twin, (inverted, Y), structure="kfac")


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_labels_that_do_not_count_are_no_padding_either(structure: str) -> None:
    torch.manual_seed(0)
    net = Tagger().double()

    def data(width: int) -> tuple[Tensor, Tensor]:
        x = batch(width)
        return x["input_ids"], torch.where(x["attention_mask"] == 1, x["input_ids"] % 3, -100)

    for sharing in ("expand", "reduce"):
        one, other = (made(net, data(w), structure=structure, sharing=sharing, axis=-1) for w in (7, 20))
        torch.testing.assert_close(one.dense(), other.dense(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_factors_are_those_of_the_tokens_alone(sharing: str) -> None:
    """Text by text, none of them padded: A is the mean over tokens or texts, B the sum."""
    torch.manual_seed(0)
    net = Text().double()
    a_sum, b_sum, count = torch.zeros(7, 7).double(), torch.zeros(8, 8).double(), 0
    for tokens in TOKENS:
        a = nn.functional.pad(net.e(tokens), (0, 1), value=1.0).detach()
        h = net.a(net.e(tokens))
        f = net.o(torch.tanh(h).mean(0))
        p = f.softmax(0)
        root = torch.linalg.cholesky(torch.diag(p) - torch.outer(p, p) + 1e-14 * torch.eye(3)).detach()
        g = torch.stack([torch.autograd.grad(f, h, root[:, k], retain_graph=True)[0] for k in range(3)])
        if sharing == "reduce":
            a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
        a_sum, b_sum, count = a_sum + a.T @ a, b_sum + torch.einsum("ksc,ksd->cd", g, g), count + len(a)
    G = made(net, (batch(40), Y), structure="kfac", sharing=sharing)
    part = next(part for part in G.parts if part.layer.names[0] == "a.weight")
    torch.testing.assert_close(part.operator.dense(), torch.kron(b_sum, a_sum / count), rtol=1e-6, atol=1e-9)


def test_exact_blocks_are_those_of_all_positions() -> None:
    """What a network computes at padding is part of its outputs if it lets it be."""
    torch.manual_seed(0)
    net = Text().double()
    with_mask, exact = batch(12), made(net, (batch(12), Y), structure="block")
    lin = linnet.linearize(net)
    J = lin.jacobian(with_mask)
    p = lin.base(with_mask).softmax(1)
    root = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    G = torch.einsum("ncp,ncd,ndq->pq", J, root, J)
    start = lin.space.slices["a.weight"]
    block = next(part for part in exact.parts if part.layer.names[0] == "a.weight").operator.dense()
    torch.testing.assert_close(block[:48, :48].trace(), G[start, start].trace())
