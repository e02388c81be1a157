"""The last linear layer: heads behind encoders, and features at the position that a classifier takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, ModelError
from linnet.fitting.last_layer import Appended, _probabilities, ending_linear, features
from linnet.nested.search import BIAS

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
@pytest.mark.long
def test_a_classifier_of_texts_is_adapted(kind: str, tmp_path: Path) -> None:
    model, x, y = classifier(kind), tokens(), torch.arange(N) % 3
    fit = linnet.adapt(model, (x, y), weight=0.5)
    phi = features(
        model, {k: torch.cat([v, w]) for (k, v), w in zip(x.items(), tokens(1).values(), strict=True)}
    )
    probe = linnet.adapt(model, (x, y), weight=0.0, ridge=0.1)
    phi = phi - phi[:N].mean(0)
    kernel = BIAS + phi @ phi[:N].T / phi[:N].square().sum(1).mean()
    targets = torch.nn.functional.one_hot(y).double() * 15
    expected = kernel[N:] @ torch.linalg.solve(kernel[:N] + 0.1 * torch.eye(N, dtype=torch.float64), targets)
    assert torch.allclose(probe.predict(tokens(1)), expected, atol=1e-6)
    fit.save(tmp_path)
    back = linnet.load(tmp_path, classifier(kind))
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


def text_encoder(kind: str) -> nn.Module:
    """A small encoder of texts, without a head."""
    torch.manual_seed(0)
    bert = transformers.BertConfig(**SIZES, intermediate_size=24)
    made: dict[str, Any] = {
        "bert": lambda: transformers.BertModel(bert, add_pooling_layer=False),
        "pooler": lambda: transformers.BertModel(bert),
        "distilbert": lambda: transformers.DistilBertModel(
            transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        ),
    }
    return made[kind]().double().eval()


class Mean(nn.Module):
    """Texts to the mean of the states of a text encoder that has no head."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder or text_encoder("bert")

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
    back = linnet.load(tmp_path, made().double())
    assert torch.allclose(back.predict(new), fit.predict(new), atol=1e-6)
    assert torch.allclose(back.forget([0]).predict(new), fit.forget([0]).predict(new), atol=1e-5)
    headed = linnet.with_head(made().double(), 3, data=(x, y))
    assert linnet.fit(linnet.linearize(headed), (x, y), ridge=0.1).predict(new).shape == (N, 3)


class Named(nn.Module):
    """A network whose last module has a name, and another below it."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), last)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Softmax(1), nn.LogSoftmax(-1)])
def test_what_follows_the_last_layer_is_named_with_how_to_leave_it_out(last: nn.Module) -> None:
    data = torch.randn(20, 4), torch.arange(20) % 3
    kind = type(last).__name__
    with pytest.raises(ModelError, match=rf"{kind} '3'.*model\[:-1\]"):
        linnet.adapt(Named(last).layers, data)
    with pytest.raises(ModelError, match=rf"{kind} 'layers.3'.*Identity"):
        linnet.adapt(Named(last), data)
    assert linnet.adapt(Named(last).layers[:-1], data).n == 20  # type: ignore[arg-type]


@pytest.mark.long
def test_a_pooler_that_is_not_used_has_no_part_in_a_fit(tmp_path: Path) -> None:
    encoder, bare, x = text_encoder("pooler"), text_encoder("bert"), tokens()
    bare.load_state_dict({n: t for n, t in encoder.state_dict().items() if not n.startswith("pooler")})
    fits = [linnet.adapt(model, (x, torch.arange(N) % 3), weight=0.5) for model in (encoder, bare)]
    assert fits[0].module.function.names == fits[1].module.function.names
    assert torch.allclose(fits[0].predict(x), fits[1].predict(x))
    one, other = (linnet.nested.features.RandomHeads(fit.module.model, 4, 0, None).earlier(x) for fit in fits)
    assert one == other != ()
    fits[0].save(tmp_path)
    for model in (encoder, bare):
        assert torch.allclose(linnet.load(tmp_path, model).predict(x), fits[0].predict(x))
    pooled = linnet.adapt(encoder, (x, torch.arange(N) % 3), output="pooler_output", weight=0.5)
    assert "body.pooler.dense.weight" in pooled.module.function.names


def test_the_body_of_an_encoder_is_not_copied_or_touched() -> None:
    encoder = Encoder().double()
    before = encoder.conv.weight.clone()
    made = ending_linear(encoder, images())
    assert isinstance(made, Appended)
    assert made.body is encoder
    linnet.adapt(encoder, (images(), torch.arange(N) % 2))
    assert torch.equal(encoder.conv.weight, before)


@pytest.mark.parametrize("kind", ["bert", "pooler", "distilbert", "t5"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_hidden_states_are_averaged_over_the_attention_mask(kind: str) -> None:
    encoder, x, y = text_encoder(kind), tokens(), torch.arange(N) % 3
    fit = linnet.adapt(encoder, (x, y), weight=0.5, ridge=0.1)
    assert "last_hidden_state" in fit.record.reasons["features"]
    asked = linnet.adapt(Mean(encoder), (x, y), weight=0.5, ridge=0.1)  # the pooler is not used there either
    assert "features" not in asked.record.reasons
    assert torch.allclose(fit.predict(tokens(1)), asked.predict(tokens(1)), atol=1e-8)
    padded = {name: nn.functional.pad(value, (0, 3)) for name, value in tokens(1).items()}
    assert torch.allclose(fit.predict(padded), fit.predict(tokens(1)), atol=1e-8)
    headed = linnet.with_head(encoder, 3, data=(x, y))
    assert torch.allclose(headed(**tokens(1)), linnet.with_head(Mean(encoder), 3, data=(x, y))(**tokens(1)))


class States(nn.Module):
    """An encoder whose states do not depend on the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(40, 5), nn.Linear(5, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.layer(self.table(input_ids)).tanh()}


FORMS: dict[str, Any] = {
    "bool": lambda m: m.bool(),
    "float": lambda m: m.float(),
    "added": lambda m: torch.where(m > 0, 0.0, -1e4),
    "least": lambda m: torch.where(m > 0, 0.0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(2)
def test_what_a_mask_keeps_is_read_in_every_form(form: str) -> None:
    torch.manual_seed(0)
    encoder, y = States().double(), torch.arange(N) % 3

    def found(form: Any, **options: Any) -> tuple[Tensor, Tensor]:
        x, new = ({**t, "attention_mask": form(t["attention_mask"])} for t in (tokens(), tokens(1)))
        halves = [({k: t[i : i + N // 2] for k, t in x.items()}, y[i : i + N // 2]) for i in (0, N // 2)]
        halves[1][0].update({k: t[:, :-1] for k, t in halves[1][0].items()} if options else {})
        fit = linnet.adapt(encoder, halves, weight=0.5, ridge=0.1)
        one = {name: t[:1, :3] for name, t in new.items()}  # without padding
        return fit.predict(new), fit.predict(one)

    for options in ({}, {"ragged": True}):
        torch.testing.assert_close(found(FORMS[form], **options), found(lambda m: m, **options))


@pytest.mark.parametrize(
    "form",
    [lambda m: 1 - m, lambda m: m * 2, lambda m: m - 1, lambda m: m * 0.5, lambda m: torch.zeros_like(m)],
)
def test_a_mask_that_cannot_be_read_is_refused(form: Any) -> None:
    x = tokens()
    x["attention_mask"][0] = 1  # a text without padding: inverted, it has no position
    x["attention_mask"] = form(x["attention_mask"])
    with pytest.raises(InputError, match="attention_mask"):
        linnet.adapt(States().double(), (x, torch.arange(N) % 3), weight=0.5, ridge=0.1)


def test_the_mask_counts_wherever_it_is_given() -> None:
    encoder, x, y = text_encoder("bert"), tokens(), torch.arange(N) % 3
    named = linnet.adapt(encoder, (x, y), weight=0.5, ridge=0.1)
    placed = linnet.adapt(encoder, (tuple(x.values()), y), weight=0.5, ridge=0.1)
    assert torch.allclose(placed.predict(tuple(tokens(1).values())), named.predict(tokens(1)), atol=1e-8)
    whole = {"input_ids": tokens(1)["input_ids"].clamp_min(1)}
    ones = {**whole, "attention_mask": torch.ones(N, LENGTH, dtype=torch.long)}
    assert torch.allclose(named.predict(whole), named.predict(ones), atol=1e-8)


class Strided(nn.Module):
    """Frames of a sound, of which two samples each make a hidden state; or maps of an image."""

    def __init__(self, maps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv: nn.Module = nn.Conv2d(1, 4, 2, 2) if maps else nn.Conv1d(1, 4, 2, 2)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        found = self.conv(x.double())
        return {"last_hidden_state": found if found.ndim == 4 else found.transpose(1, 2)}


def test_maps_are_averaged_and_a_mask_of_other_positions_is_refused() -> None:
    y = torch.arange(N) % 3
    fit = linnet.adapt(Strided(maps=True).double(), (images(), y))
    assert torch.allclose(fit.module.phi(images()), Strided(True).double().conv(images()).mean((2, 3)))
    sounds = {"x": images().flatten(2), "attention_mask": torch.ones(N, 36)}
    with pytest.raises(ModelError, match="attention_mask"):
        linnet.adapt(Strided(maps=False).double(), (sounds, y))


@pytest.mark.parametrize(
    "output",
    ["pooler_output", pytest.param(lambda result: result.last_hidden_state[:, 0], marks=pytest.mark.long)],
)
def test_an_output_is_taken_and_kept(output: Any, tmp_path: Path) -> None:
    encoder, x, y = text_encoder("pooler"), tokens(), torch.arange(N) % 3
    fit = linnet.adapt(encoder, (x, y), weight=0.5, ridge=0.1, output=output)
    result = encoder(**tokens(1))
    features = result.pooler_output if isinstance(output, str) else output(result)
    assert torch.allclose(fit.module.phi(tokens(1)), features.detach())
    fit.save(tmp_path)
    if callable(output):
        exported = fit.export()(**tokens(1))
        assert torch.allclose(exported, fit.predict(tokens(1)).to(features), atol=1e-8)
        with pytest.raises(InputError, match="output"):
            linnet.load(tmp_path, encoder)
    back = linnet.load(tmp_path, encoder, output=output if callable(output) else None)
    assert torch.allclose(back.predict(tokens(1)), fit.predict(tokens(1)), atol=1e-8)
    headed = linnet.with_head(encoder, 3, data=(x, y), output=output)
    assert torch.allclose(headed(**tokens(1)), features @ headed.head.weight.T + headed.head.bias)


class Several(nn.Module):
    """A classifier that returns its logits among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier("bert")

    def forward(self, **x: Tensor) -> tuple[str, Tensor]:
        return "logits", self.inner(**x).logits


@pytest.mark.long
def test_the_head_below_an_output_is_replaced(tmp_path: Path) -> None:
    x, y = tokens(), torch.arange(N) % 3
    with pytest.raises(ModelError, match="output="):
        linnet.adapt(Several(), (x, y))
    fit = linnet.adapt(Several(), (x, y), weight=0.5, ridge=0.1, output=lambda result: result[1])
    plain = linnet.adapt(classifier("bert"), (x, y), weight=0.5, ridge=0.1)
    assert torch.allclose(fit.predict(tokens(1)), plain.predict(tokens(1)), atol=1e-8)
    fit.save(tmp_path)
    back = linnet.load(tmp_path, Several(), output=lambda result: result[1])
    assert torch.allclose(back.predict(tokens(1)), fit.predict(tokens(1)), atol=1e-8)
    probe = linnet.adapt(Several(), (x, y), weight=0.0, output=lambda result: result[1])
    merged = probe.merge().network(**tokens(1))
    assert torch.allclose(merged.double(), probe.predict(tokens(1)), atol=1e-6)


def test_remedies_for_features_can_be_followed() -> None:
    x, y = torch.randn(N, 5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
    states = nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # one vector per position
    with pytest.raises(ModelError, match="output="):
        linnet.adapt(states, (x, y))
    fit = linnet.adapt(states, (x, y), weight=0.5, output=lambda result: result.mean(1))
    assert torch.allclose(fit.module.phi(x), states(x).mean(1).double(), atol=1e-6)
    with pytest.raises(ModelError, match="output="):
        linnet.adapt(states, (x[:, 0], y))
    fit = linnet.adapt(states, (x[:, 0], y), weight=0.5, output=lambda result: result)
    assert torch.allclose(fit.module.phi(x[:, 0]), states(x[:, 0]).double(), atol=1e-6)


def test_parameters_of_an_encoder_go_by_its_own_names() -> None:
    encoder, y = Encoder().double(), torch.arange(N) % 3
    every = linnet.adapt(encoder, (images(), y), weight=0.5, ridge=0.1)
    for params in (["conv.weight", "conv.bias"], r"^conv\.", encoder.conv):
        fit = linnet.adapt(encoder, (images(), y), weight=0.5, ridge=0.1, params=params)
        assert torch.allclose(fit.predict(images(1)), every.predict(images(1)), atol=1e-8)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 64, 384])
def test_features_of_a_coarse_type_are_no_probabilities(kind: torch.dtype, classes: int) -> None:
    z = torch.randn(20, classes, generator=torch.Generator().manual_seed(0))
    assert not _probabilities(z.to(kind))
    assert _probabilities(z.softmax(1).to(kind))
    assert _probabilities(z.to(kind).log_softmax(1))


@pytest.mark.parametrize(("last", "axes"), [(nn.Conv2d(3, 4, 1), r"\(2, 3\)"), (nn.Flatten(2), "1")])
def test_what_is_no_vector_is_told_how_to_become_one(last: nn.Module, axes: str) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), last)
    with pytest.raises(linnet.errors.ModelError, match=rf"output=lambda r: r\.mean\({axes}\)"):
        linnet.adapt(net, (torch.randn(6, 2, 4, 4), torch.arange(6) % 2))


def test_a_large_fit_of_a_head_names_the_solver_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 4).double(), torch.arange(20) % 3
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    head = linnet.linearize(net, params=r"2\.")
    linnet.fit(head, (x, y), ridge=1.0)  # of few equations nothing is said
    monkeypatch.setattr("linnet.fitting.fit.MANY", 10)
    with pytest.warns(UserWarning, match="3 outputs of the last layer share one kernel"):
        found = linnet.fit(head, (x, y), ridge=1.0)
    same = linnet.fit(head, (x, y), ridge=1.0, solver="shared")
    torch.testing.assert_close(same.predict(x), found.predict(x))
    torch.testing.assert_close(same.predictive(x).variance, found.predictive(x).variance)
    whole = nn.Sequential(*net, nn.Tanh())
    for lin in (linnet.linearize(net), linnet.linearize(whole, params=r"2\.")):
        linnet.fit(lin, (x, y), ridge=1.0)  # warnings are errors here


class Teacher(nn.Module):
    """Two heads whose mean is the output, by name, as in a distilled network of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"mean": (self.one(h) + self.two(h)) / 2, "first": self.one(h)}


def test_remedies_for_several_heads_lead_on() -> None:
    torch.manual_seed(0)
    net, data = Teacher(), (torch.randn(N, 4), torch.arange(N) % 3)
    with pytest.raises(ModelError, match=r"output='mean', one of 'mean', 'first'"):
        linnet.adapt(net, data)
    with pytest.raises(ModelError, match=r"with_head\(\.\.\., head='one'\), with the same output="):
        linnet.with_head(net, 3, data=data, output="first")
    made = linnet.with_head(net, 3, data=data, output="first", head="one")
    assert made(data[0]).shape == (N, 3)
    with pytest.raises(ModelError, match="several make the outputs"):
        linnet.with_head(net, 3, data=data, output="mean", head="one")


def test_texts_with_other_numbers_of_ends_are_told_of() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": 40, "pad_token_id": 0, "eos_token_id": 39}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    net = transformers.BartForSequenceClassification(transformers.BartConfig(**sizes, num_labels=3)).eval()
    x, y = {"input_ids": torch.randint(3, 39, (N, LENGTH))}, torch.arange(N) % 3
    with pytest.raises(ModelError, match="end each text in one") as error:
        linnet.adapt(net, (x, y))
    assert "decoder_input_ids" not in error.value.remedy
    x["input_ids"][:, -1] = 39
    fit = linnet.adapt(net, (x, y), weight=0.0)
    x["input_ids"][0, 2] = 39
    with pytest.raises(ModelError, match="end each text in one"):
        fit.predict(x)
