"""Images as a network was trained on them: its own configuration, and its first batch norm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from linnet.app.data import ImageTransform, image_transform
from linnet.app.data.task import InMemory, SampleSet, TaskData
from linnet.app.runs.adaptation import ending
from linnet.app.runs.folder import load_run
from linnet.app.runs.normalization import UNKNOWN, distance, normalized
from linnet.errors import ModelError
from linnet.integrations.pretrained import own_normalization

TIMM = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
NETS = """
import torch
from torch import nn

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

def net():
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )
    made[1].momentum = 1.0
    x = torch.rand(200, 3, 8, 8) * 0.4 + 0.2 * torch.rand(200, 1, 1, 1)
    with torch.no_grad():
        made.train()((x - MEAN) / STD)
    return made.eval()

def configured():
    made = net()
    made.default_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    return made
"""


def task(channels: int = 3, transform: ImageTransform | None = None) -> TaskData:
    """Images that are as bright as those that the batch norm was trained on."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 0.4, (80, 8, 8, channels)) + rng.uniform(0, 0.2, (80, 1, 1, 1))
    images = (255 * x).round().astype(np.uint8)
    part = SampleSet(InMemory(images), np.arange(80), np.arange(80) % 2, tuple(map(str, range(80))))
    return TaskData(part, part, ("a", "b"), transform or ImageTransform())


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    images = task().train
    np.savez(tmp_path / "data.npz", x_train=images.x, y_train=images.y)
    return tmp_path


def built(name: str) -> Any:
    space: dict[str, Any] = {}
    exec(NETS, space)
    return space[name]()


@pytest.mark.parametrize("name", ["default_cfg", "pretrained_cfg"])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_timm(name: str, kind: Any) -> None:
    model = nn.Linear(1, 1)
    setattr(model, name, kind(**TIMM))
    assert own_normalization(model) == (TIMM["mean"], TIMM["std"], f"its {name}")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5]}, ((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))),
        ({"image_mean": 0.5, "image_std": 0.25}, ((0.5,), (0.25,))),
        ({"image_mean": [0.5], "image_std": [0.25], "do_normalize": False}, ((0.0,), (1.0,))),
        ({"image_mean": [0.5], "image_std": [0.25], "do_rescale": False}, None),
        ({"image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]}, None),
        ({"image_mean": [0.5], "image_std": [0]}, None),
        ({"image_mean": ["half"], "image_std": [1]}, None),
        ([1, 2], None),
        ({}, None),
    ],
)
def test_hugging_face_folder(tmp_path: Path, values: Any, expected: Any) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))  # type: ignore[assignment]
    found = own_normalization(model)
    assert found == (None if expected is None else (*expected, "preprocessor_config.json"))


def test_hugging_face_configuration_and_nothing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    assert own_normalization(model) is None
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))  # type: ignore[assignment]
    assert own_normalization(model) is None
    (tmp_path / "preprocessor_config.json").write_text("{broken")
    assert own_normalization(model) is None
    model.config = SimpleNamespace(image_mean=[0.1] * 3, image_std=[0.2] * 3)  # type: ignore[assignment]
    assert own_normalization(model) == ((0.1,) * 3, (0.2,) * 3, "its configuration")


def test_a_network_of_transformers_keeps_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    values = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    from linnet.app.models import load_model

    for pretrained in (True, False):
        found = own_normalization(load_model(f"hf:{tmp_path}", pretrained=pretrained))
        assert found == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3), "preprocessor_config.json")


def test_distance_is_the_divergence_of_its_definition() -> None:
    norm = nn.BatchNorm2d(3, eps=1e-5).eval()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(torch.tensor([0.0, 1.0, -2.0]))
    norm.running_var.copy_(torch.tensor([1.0, 4.0, 0.5]))
    x = torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    now = torch.distributions.Normal(mean, (var + 1e-5).sqrt())
    known = torch.distributions.Normal(norm.running_mean.double(), (norm.running_var.double() + 1e-5).sqrt())
    expected = torch.distributions.kl_divergence(now, known).median().item()
    assert distance(nn.Sequential(nn.Identity(), norm), x) == pytest.approx(expected, rel=1e-9)
    assert distance(nn.Sequential(nn.Flatten(), nn.Linear(48, 1).double()), x) is None


def test_the_first_batch_norm_in_the_forward_pass_counts() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(100 * self.first(x))  # type: ignore[no-any-return]

    x = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = distance(Backwards().eval(), x)
    assert found is not None
    assert found < 0.1


def test_own_mean_and_std_are_taken_or_their_absence_told() -> None:
    model = built("configured")
    own = normalized(task(), model, own=True)
    assert own.transform == ImageTransform((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    assert own.findings == (
        "images are normalized by mean 0.5, 0.4, 0.3 and std 0.2, 0.2, 0.1, as its default_cfg says",
    )
    given = normalized(task(transform=image_transform("half")), model, own=False)
    assert given.transform == image_transform("half")
    assert "but the network was trained with mean 0.5, 0.4, 0.3" in given.findings[0]
    gray = normalized(task(1), model, own=True).transform
    assert isinstance(gray, ImageTransform)
    assert (*gray.mean, *gray.std) == pytest.approx((0.4, 0.5 / 3))


def test_another_size_than_that_of_the_training_is_told_where_none_is_given() -> None:
    model = built("net")
    model.pretrained_cfg = {**TIMM, "input_size": (3, 224, 224)}
    told = normalized(task(), model, own=True).findings[-1]
    assert told.startswith(
        "images are taken at their own 8 x 8 pixels, but the network was trained at 224 x 224"
    )
    assert "its pretrained_cfg says; --size 224" in told
    chosen = normalized(task(transform=image_transform(size=16)), model, own=True).findings
    assert not [note for note in chosen if "--size" in note]
    for shape in ((3, 8, 8), (3, 8, 16), (3, None, None), [3], None):
        model.pretrained_cfg = {**TIMM, "input_size": shape}
        assert len(normalized(task(), model, own=True).findings) == 1


def test_a_network_that_takes_no_other_size_names_its_own() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    with pytest.raises(ModelError, match="mat1") as plain:
        ending(model, task(), torch.zeros(4, 3, 8, 8))
    assert "--size" not in str(plain.value)
    model.default_cfg = {"input_size": (3, 16, 16)}  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"images of 16 x 16 pixels.*its default_cfg says.*--size 16\)"):
        ending(model, task(), torch.zeros(4, 3, 8, 8))


def test_doubt_by_the_first_batch_norm() -> None:
    model = built("net")
    (found,) = normalized(task(), model, own=True).findings
    assert "images seem to be normalized unlike" in found
    assert "with --mean imagenet" in found
    assert normalized(task(transform=image_transform("imagenet")), model, own=False).findings == ()
    assert normalized(task(1), model, own=True).findings == ()  # what runs it says that it takes no gray
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    assert normalized(task(), plain, own=True).findings == (UNKNOWN,)
    assert normalized(task(), plain, own=False).findings == ()
    assert normalized(task(1), plain, own=True).findings == ()


@pytest.mark.long
def test_the_command_takes_the_networks_own(factory: Path) -> None:
    words = [sys.executable, "-m", "linnet", "adapt", "--data", "data.npz", "--out", "run"]
    done = subprocess.run(
        [*words, "--model", "nets.py:configured"], cwd=factory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "std 0.2, 0.2, 0.1, as its default_cfg says" in done.stdout
    assert load_run(factory / "run", trust=True).transforms[0] == ImageTransform(*TIMM.values())
    words = [sys.executable, "-m", "linnet", "check", "--data", "data.npz", "--model", "nets.py:net"]
    done = subprocess.run(words, cwd=factory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "with --mean imagenet" in done.stdout
