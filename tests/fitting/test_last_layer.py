"""The last linear layer: heads behind encoders, and features at the position that a classifier takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from linnet.fitting.last_layer import Appended, ending_linear, features

transformers = pytest.importorskip("transformers")

N, LENGTH = 12, 7
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def tokens(seed: int = 0, n: int = N) -> dict[str, Tensor]:
    """Texts of different lengths, padded with zeros on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (n, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (n, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classifier(kind: str) -> nn.Module:
    """A small classifier of texts with 5 classes."""
    torch.manual_seed(0)
    kind, _, _ = kind.partition(" ")
    made: dict[str, Any] = {
        "gpt2": lambda: transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(
                vocab_size=40, n_embd=16, n_layer=2, n_head=2, num_labels=5, pad_token_id=0,
                bos_token_id=1, eos_token_id=1,
            )
        ),
        "llama": lambda: transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**SIZES, intermediate_size=24, num_labels=5, pad_token_id=0)
        ),
        "bert": lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(**SIZES, intermediate_size=24, num_labels=5)
        ),
        "distilbert": lambda: transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(
                vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24, num_labels=5
            )
        ),
    }  # fmt: skip
    return made[kind]().double().eval()


def hidden(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """The features of a decoder: the last layer's state at the last token that is not padding."""
    body = model.transformer if hasattr(model, "transformer") else model.model
    states = body(**x).last_hidden_state
    return states[torch.arange(len(states)), x["attention_mask"].sum(1) - 1]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_gives_its_features_at_the_last_token(kind: str) -> None:
    model, x = classifier(kind), tokens()
    assert ending_linear(model, x) is model
    assert torch.allclose(features(model, x), hidden(model, x), atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "distilbert"])
@pytest.mark.thinned(2)
def test_a_classifier_of_texts_is_adapted(kind: str, tmp_path: Path) -> None:
    model, x, y = classifier(kind), tokens(), torch.arange(N) % 3
    fit = linnet.adapt(model, (x, y), weight=0.5)
    phi = features(
        model, {k: torch.cat([v, w]) for (k, v), w in zip(x.items(), tokens(1).values(), strict=True)}
    )
    probe = linnet.adapt(model, (x, y), weight=0.0, ridge=0.1)
    phi = phi - phi[:N].mean(0)
    kernel = 1e4 + phi @ phi[:N].T / phi[:N].square().sum(1).mean()
    targets = torch.nn.functional.one_hot(y).double() * 15
    expected = kernel[N:] @ torch.linalg.solve(kernel[:N] + 0.1 * torch.eye(N, dtype=torch.float64), targets)
    assert torch.allclose(probe.predict(tokens(1)), expected, atol=1e-6)
    fit.save(tmp_path)
    back = linnet.load_adapted(tmp_path, classifier(kind))
    assert torch.allclose(back.predict(tokens(1)), fit.predict(tokens(1)), atol=1e-8)
    headed = linnet.with_head(model, 3, data=(x, y))
    assert linnet.linearize(headed)(x).shape == (N, 3)


class Encoder(nn.Module):
    """Images to features, without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)).mean((2, 3))


class Mean(nn.Module):
    """Texts to the mean of the states of a text encoder that has no head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, intermediate_size=24)
        self.encoder = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(states)
        found: Tensor = (states * mask).sum(1) / mask.sum(1)
        return found


def images(seed: int = 0) -> Tensor:
    return torch.randn(N, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("kind", ["images", "texts"])
@pytest.mark.thinned(2)
def test_an_encoder_without_a_head_is_adapted(kind: str, tune: bool, tmp_path: Path) -> None:
    made, x, new = (
        (Encoder, images(), images(1)) if kind == "images" else (Mean, tokens(), tokens(1))
    )  # fmt: skip
    y = torch.arange(N) % 3
    fit = linnet.adapt(made().double(), (x, y), tune=tune)
    known = nn.Sequential(made().double(), nn.Linear(6, 9).double()) if kind == "images" else None
    if known is not None and not tune:
        same = linnet.adapt(known, (x, y))
        assert torch.allclose(fit.predict(new), same.predict(new), atol=1e-8)
    fit.save(tmp_path)
    back = linnet.load_adapted(tmp_path, made().double())
    assert torch.allclose(back.predict(new), fit.predict(new), atol=1e-6)
    assert torch.allclose(back.forget([0]).predict(new), fit.forget([0]).predict(new), atol=1e-5)
    headed = linnet.with_head(made().double(), 3, data=(x, y))
    assert linnet.fit(linnet.linearize(headed), (x, y), ridge=0.1).predict(new).shape == (N, 3)


def test_the_body_of_an_encoder_is_not_copied_or_touched() -> None:
    encoder = Encoder().double()
    before = encoder.conv.weight.clone()
    made = ending_linear(encoder, images())
    assert isinstance(made, Appended)
    assert made.body is encoder
    linnet.adapt(encoder, (images(), torch.arange(N) % 2))
    assert torch.equal(encoder.conv.weight, before)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Softmax(1)),
            r"not return what its last nn.Linear \(1\)",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU()),
            r"not return what its last nn.Linear \(1\)",
        ),
        (nn.Conv2d(1, 3, 3), r"outputs of shape \(4, 3, 4, 4\) that no nn.Linear of it gives"),
    ],
)
def test_what_is_neither_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        linnet.adapt(model.double(), (images(), torch.arange(N) % 2))


def test_an_object_of_states_is_refused_with_a_way_out() -> None:
    config = transformers.BertConfig(**SIZES, intermediate_size=24)
    model = transformers.BertModel(config, add_pooling_layer=False)
    with pytest.raises(ModelError, match=r"last_hidden_state.mean\(1\)"):
        linnet.adapt(model, (tokens(), torch.arange(N) % 2))
