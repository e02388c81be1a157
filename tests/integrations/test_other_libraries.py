"""Fits in the libraries that their answers are for, each where it is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet

pytest.importorskip("sklearn")
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut

from linnet.integrations.sklearn import LinnetClassifier, LinnetRegressor

PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "photographs"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Array = np.ndarray[Any, Any]


def real_timm() -> Any:
    """timm where it is installed: other tests leave modules of its name."""
    try:
        importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("timm is not installed")
    if not hasattr(sys.modules.get("timm"), "__file__"):
        sys.modules.pop("timm", None)
    return importlib.import_module("timm")


def values(count: int, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 5))
    return x, x @ np.arange(5.0) + rng.standard_t(3, size=count)


def classes(count: int, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 5))
    return x, (x[:, :3] + rng.normal(size=(count, 3))).argmax(1)


def test_intervals_are_those_of_mapie_by_as_many_fits() -> None:
    mapie: Any = pytest.importorskip("mapie.regression")
    (x, y), (new, _) = values(30, 0), values(4, 1)
    layer = nn.Linear(5, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    data = torch.as_tensor(x), torch.as_tensor(y)[:, None]
    found = linnet.fit(linnet.linearize(layer), data, ridge=2.0).interval(torch.as_tensor(new), 0.9)[:, 0]
    ridge = Ridge(alpha=2.0, fit_intercept=False)
    rival = mapie.CrossConformalRegressor(ridge, confidence_level=0.9, method="plus", cv=LeaveOneOut())
    _, expected = rival.fit_conformalize(x, y).predict_interval(new)
    np.testing.assert_allclose(found, expected[:, :, 0], rtol=1e-6)


def test_mapie_takes_the_estimators() -> None:
    regression: Any = pytest.importorskip("mapie.regression")
    classification: Any = pytest.importorskip("mapie.classification")
    (x, y), (more, own) = values(60, 0), values(60, 1)
    model = LinnetRegressor(random_state=0).fit(x, y)
    split = regression.SplitConformalRegressor(model, confidence_level=0.9, prefit=True)
    _, ends = split.conformalize(more, own).predict_interval(values(20, 2)[0])
    assert np.isfinite(ends).all()
    (x, y), (more, own) = classes(60, 0), classes(60, 1)
    chosen = LinnetClassifier(random_state=0).fit(x, y)
    sets = classification.SplitConformalClassifier(chosen, confidence_level=0.9, prefit=True)
    _, held = sets.conformalize(more, own).predict_set(classes(20, 2)[0])
    assert held.shape[:2] == (20, 3)


def test_crepes_is_calibrated_by_samples_left_out() -> None:
    crepes: Any = pytest.importorskip("crepes")
    (x, y), (new, own) = values(60, 0), values(400, 1)
    model = LinnetRegressor(random_state=0).fit(x, y)
    residuals = y - model.fit_.loo()[:, 0].numpy()
    calibrated = crepes.ConformalRegressor().fit(residuals)
    ends = calibrated.predict_int(model.predict(new), confidence=0.9)
    assert 0.84 < np.mean((ends[:, 0] <= own) & (own <= ends[:, 1])) < 0.97


def test_cleanlab_takes_probabilities_and_features() -> None:
    filters: Any = pytest.importorskip("cleanlab.filter")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = torch.as_tensor(4.0 * np.eye(3)[y] + rng.normal(size=(120, 3)))
    given = y.copy()
    given[[5, 40, 77]] = (given[[5, 40, 77]] + 1) % 3
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    fit = linnet.adapt(net, (x, torch.as_tensor(given)))
    found = filters.find_label_issues(given, fit.loo_probs().numpy())
    assert found[[5, 40, 77]].all()
    assert found.sum() < 12
    pytest.importorskip("datasets")
    lab: Any = pytest.importorskip("cleanlab").Datalab({"y": given}, label_name="y", verbosity=0)
    lab.find_issues(pred_probs=fit.loo_probs().numpy(), features=fit.module.phi(x).numpy())
    assert lab.get_issues("label")["is_label_issue"][[5, 40, 77]].all()


def test_a_sentence_encoder_is_taken_as_it_is() -> None:
    sentence: Any = pytest.importorskip("sentence_transformers")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    network = transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).eval()

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = network

    def encoder(mode: str) -> nn.Module:
        modules: Any = pytest.importorskip("sentence_transformers.models")
        found = sentence.SentenceTransformer.__new__(sentence.SentenceTransformer)
        pooling = modules.Pooling(16, pooling_mode=mode)
        nn.Sequential.__init__(found, Transformer(), pooling, modules.Normalize())
        return found  # type: ignore[no-any-return]

    ids = torch.randint(1, 30, (30, 6), generator=torch.Generator().manual_seed(0))
    batch, y = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (ids == 7).any(1).long()
    y[:2] = torch.tensor([0, 1])
    expected = linnet.adapt(network, (batch, y)).predict(batch)
    torch.testing.assert_close(linnet.adapt(encoder("mean"), (batch, y)).predict(batch), expected)
    with pytest.raises(linnet.errors.ModelError, match=r"model\[0\].auto_model"):
        linnet.adapt(encoder("cls"), (batch, y))


def test_batches_that_are_watched_are_a_table() -> None:
    pandas: Any = pytest.importorskip("pandas")
    x, y = (torch.as_tensor(part) for part in classes(80, 0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    fit = linnet.adapt(net, (x, y))
    batches: list[Tensor] = [torch.as_tensor(classes(40, seed)[0]) for seed in (1, 2)]
    watched = list(fit.monitor(batches))
    table = pandas.read_json(io.StringIO("\n".join(one.to_json() for one in watched)), lines=True)
    assert len(table) == 2
    np.testing.assert_allclose(table["accuracy"], [one.accuracy for one in watched])


def test_a_body_that_setfit_trained_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setfit: Any = pytest.importorskip("setfit")
    datasets: Any = pytest.importorskip("datasets")
    tokenizers: Any = pytest.importorskip("tokenizers")
    sentence: Any = pytest.importorskip("sentence_transformers")
    transformers: Any = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", *(f"w{place}" for place in range(28))]
    written = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    written.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=written, pad_token="[PAD]", unk_token="[UNK]"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    body = sentence.SentenceTransformer(str(tmp_path), device="cpu")
    head = setfit.modeling.LogisticRegression()
    model = setfit.SetFitModel(model_body=body, model_head=head, labels=["no", "yes"])
    ids = np.random.default_rng(0).integers(2, 30, (40, 6))
    texts = [" ".join(words[place] for place in row) for row in ids]
    labels = np.where((ids < 12).sum(1) > 1, "yes", "no").tolist()
    settings = setfit.TrainingArguments(
        output_dir=str(tmp_path / "runs"), batch_size=8, max_steps=3, report_to="none", save_strategy="no"
    )
    given = datasets.Dataset.from_dict({"text": texts, "label": labels})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which the tests' device lacks
    setfit.Trainer(model=model, args=settings, train_dataset=given).train()
    batch = model.model_body.tokenizer(texts, padding=True, return_tensors="pt")
    with pytest.raises(linnet.errors.InputError, match=r"pass the network that it holds: model.model_body"):
        linnet.adapt(model, (batch, labels))
    fit = linnet.adapt(model.model_body, (batch, labels))
    np.testing.assert_allclose(fit.module.phi(batch).numpy(), model.encode(texts), atol=1e-6)
    assert fit.class_names == ("no", "yes")
    assert fit.forget([3]).n == 39


def test_batches_that_are_watched_are_compared_by_evidently() -> None:
    evidently: Any = pytest.importorskip("evidently")
    presets: Any = pytest.importorskip("evidently.presets")
    pandas: Any = pytest.importorskip("pandas")
    x, y = (torch.as_tensor(part) for part in classes(80, 0))
    torch.manual_seed(0)
    fit = linnet.adapt(nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)).double(), (x, y))

    def watched(shift: float, seeds: range) -> Any:
        batches = [torch.as_tensor(classes(40, seed)[0]) + shift for seed in seeds]
        lines = "\n".join(one.to_json() for one in fit.monitor(batches))
        table = pandas.read_json(io.StringIO(lines), lines=True)[["accuracy", "p_value"]]
        return evidently.Dataset.from_pandas(table, data_definition=evidently.DataDefinition())

    report = evidently.Report([presets.DataDriftPreset()])
    found = report.run(watched(3.0, range(10, 30)), watched(0.0, range(30, 50))).dict()
    drifted = [float(one["value"]) for one in found["metrics"] if "ValueDrift" in one["metric_name"]]
    assert len(drifted) == 2
    assert min(drifted) < 0.05


def photographs(folder: Path, transform: Any) -> tuple[Tensor, list[str]]:
    """Photographs as a transformation of timm makes them, and the names of their folders."""
    image: Any = pytest.importorskip("PIL.Image")
    files = sorted(folder.glob("*/*.jpg"))[::3]
    x = torch.stack([transform(image.open(file).convert("RGB")) for file in files])
    return x, [file.parent.name for file in files]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet10t", {}),
        ("tf_efficientnet_lite0", {"num_classes": 0}),
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 4}),
        ("levit_128s", {"num_classes": 0}),
    ],
)
def test_photographs_go_through_a_network_of_timm(name: str, arguments: dict[str, Any]) -> None:
    timm: Any = real_timm()
    torch.manual_seed(0)
    net = timm.create_model(name, pretrained=False, **arguments).eval()
    config = timm.data.resolve_model_data_config(net)
    if name != "levit_128s":  # which takes one size
        config |= {"input_size": (3, 64, 64)}
    transform = timm.data.create_transform(**config)
    x, labels = photographs(PHOTOGRAPHS / "photos", transform)
    fit = linnet.adapt(net, x, labels)
    assert fit.n == 50
    assert fit.class_names == ("AnnualCrop", "Forest", "Highway", "Industrial", "River")
    new, own = photographs(PHOTOGRAPHS / "new", transform)
    prediction, sets = fit.predictive(new), fit.sets(new, coverage=0.9)
    assert prediction.probs.shape == sets.shape == (len(new), 5)
    influence = fit.influence(new[:1])
    less = fit.forget([3])
    change = fit.predict(new[:1]) - less.predict(new[:1])
    torch.testing.assert_close(influence[3], change.to(influence.dtype), atol=1e-3, rtol=1e-3)
    assert len(linnet.audit.mislabeled(fit)) == 50
    assert less.update((new, own)).n == 49 + len(new)


def test_two_heads_of_timm_are_refused_by_name() -> None:
    timm: Any = real_timm()
    net = timm.create_model("deit_tiny_distilled_patch16_224", pretrained=False, depth=2).eval()
    x = torch.randn(6, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with pytest.raises(linnet.errors.ModelError, match="head_dist"):
        linnet.adapt(net, (x, torch.arange(6) % 2))


def test_the_command_line_takes_photographs_and_a_network_of_timm(tmp_path: Path) -> None:
    timm: Any = real_timm()
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", pretrained=False).state_dict(), tmp_path / "net.pt")
    shutil.copytree(PHOTOGRAPHS, tmp_path, dirs_exist_ok=True)

    def command(*words: str) -> Any:
        every = [sys.executable, "-m", "linnet", *words, "--json"]
        done = subprocess.run(every, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    network = ["--model", "timm:resnet10t", "--weights", "net.pt", "--data", "photos"]
    told = json.dumps(command("check", *network))
    assert "its pretrained_cfg says; --size 176" in told
    found = command("adapt", *network, "--size", "32", "--shots", "8", "--out", "run")
    assert found["train"] == 40
    assert len(found["data"]["findings"]) == 1  # the normalization; the size was chosen
    samples = json.loads((tmp_path / "run" / "result.json").read_text())["report"]
    assert command("explain", "--run", "run", "--ids", samples["test"]["ids"][0])
    trained = samples["test"]["explanations"][0]["up"][0]["id"]
    assert command("forget", "--run", "run", "--ids", trained, "--out", "less")["train"] == 39
    assert command("update", "--run", "less", "--data", "new", "--out", "more")["train"] == 79
    assert command("predict", "--run", "run", "--data", "new", "--coverage", "0.9")
    assert (tmp_path / "run" / "predictions.csv").read_text().count("\n") == 41
