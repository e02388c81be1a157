"""Heads that a network applies to all positions of a sequence, or that are not its last layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.fitting.head import features
from tests.fitting.problems import near
from tests.refusals import refused

N, LENGTH, WIDTH = 10, 5, 6
IDS = torch.randint(1, 9, (N, LENGTH), generator=torch.Generator().manual_seed(0))
IDS[::2, 3:] = 0  # padding
X, Y = {"input_ids": IDS}, torch.arange(N) % 2


class Decoder(nn.Module):
    """A classifier that is called like those of text."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.table, self.layer = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 4, bias=pooling != "last")

    def pooled(self, h: Tensor, ids: Tensor) -> Tensor:
        if self.pooling == "mean":
            return h.mean(1)
        return h[torch.arange(len(h)), (ids != 0).sum(1) - 1]

    def forward(self, input_ids: Tensor) -> Any:
        h = self.layer(self.table(input_ids)).tanh().cumsum(1)
        if self.pooling == "before":
            return self.score(self.pooled(h, input_ids))
        out = self.pooled(self.score(h), input_ids)
        return out.softmax(1) if self.pooling == "softmax" else out


def decoder(pooling: str) -> nn.Module:
    torch.manual_seed(1)
    return Decoder(pooling).double()


def expected(net: nn.Module) -> Tensor:
    h = net.layer(net.table(IDS)).tanh().cumsum(1)
    return net.pooled(h, IDS).detach()


@pytest.mark.parametrize("pooling", ["last", "mean", "before"])
def test_features_are_those_at_the_position_that_is_taken(pooling: str) -> None:
    net = decoder(pooling)
    near(features(net, X), expected(net), 1e-12)
    near(features(net, X, batch=3), expected(net), 1e-12)


@pytest.mark.parametrize("pooling", ["last", "mean", "before"])
def test_a_probe_and_what_follows_are_those_of_a_network_that_takes_the_position_first(pooling: str) -> None:
    class First(nn.Module):
        """The same function, its head on pooled features."""

        def __init__(self, of: nn.Module) -> None:
            super().__init__()
            self.table, self.layer, self.score, self.pooled = of.table, of.layer, of.score, of.pooled

        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.layer(self.table(input_ids)).tanh().cumsum(1)
            out: Tensor = self.score(self.pooled(h, input_ids))
            return out

    net = decoder(pooling)
    twin = First(net)
    near(linnet.with_head(net, 2, data=(X, Y))(IDS), linnet.with_head(twin, 2, data=(X, Y))(IDS), 1e-9)
    own, other = (linnet.adapt(one, (X, Y), weight=0.5, ridge=0.1) for one in (net, twin))
    near(own.predict(X), other.predict(X), 1e-8)


def test_what_is_done_to_the_results_of_the_head_is_refused() -> None:
    net = decoder("softmax")
    refused(ModelError, lambda: linnet.with_head(net, 2, data=(X, Y)), "'score'", "'layer'", "head=")


class Early(nn.Module):
    """The head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_a_head_is_named_where_it_is_not_the_last_layer() -> None:
    torch.manual_seed(0)
    net, x = Early(), torch.randn(8, 4)
    data = x, torch.arange(8) % 2
    refused(ModelError, lambda: linnet.with_head(net, 2, data=data), "'body.0'", "'head'")
    for name in ("head", "he.*"):
        new = linnet.with_head(net, 2, data=data, head=name)
        assert new.head.out_features == 2
        near(features(new, x), net.body(x).detach(), 1e-6)
    assert linnet.adapt(new, data).predict(x).shape == (8, 2)


def config(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = getattr(transformers, f"{name}Config")(**sizes, **options)
    torch.manual_seed(0)
    net: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(made)
    return net.double().eval()


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
NETWORKS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "use_cache": False},
    "Llama": {**SMALL, "num_key_value_heads": 1, "use_cache": False},
    "T5": {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "Bert": SMALL,
    "Roberta": {**SMALL, "max_position_embeddings": 12},
    "DistilBert": {"dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2},
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thinned(4)
def test_classifiers_of_text_get_a_head(name: str) -> None:
    net = config(name, **NETWORKS[name])
    ids = torch.randint(3, 12, (6, 5), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 2  # T5 classifies at the end-of-sequence token
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(6) % 2}
    new = linnet.with_head(net, 2, linnet.Probe(ridge=0.1), data=batch)
    phi = features(net, {key: batch[key] for key in ("input_ids", "attention_mask")})
    outputs = linnet.linearize(new)({key: batch[key] for key in ("input_ids", "attention_mask")})
    # what a probe with an intercept returns has the mean of its targets, and lies in the span of the features
    near(outputs.mean(0), torch.full((2,), 7.5, dtype=torch.float64), 1e-9)
    design = torch.cat([phi, torch.ones(6, 1, dtype=torch.float64)], 1)
    near(design @ (torch.linalg.pinv(design, rtol=1e-9) @ outputs.detach()), outputs.detach(), 1e-6)
    assert linnet.adapt(net, batch).predict(batch).shape == (6, 2)
