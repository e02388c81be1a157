"""The problem of two benchmarks: a ResNet-20 pretrained on CIFAR-10, and EuroSAT images at 32 x 32."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from linnet.app.models import load_model

# Python puts a script's own folder on its path, and experiments/ lies beside it.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from experiments.locate import find_data_dir

ARCHIVE = "eurosat_1000_500.npz"
WEIGHTS = "resnet20-12fca82f.th"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the network's own training


@dataclass(frozen=True)
class Task:
    """A network with a new head, training and test images.

    ``networks`` is the file that defines the network's class, for processes without linnet.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    networks: Path


def task(examples: int, tests: int, side: int = 32) -> Task:
    """Training examples in equal shares of the classes, the first test images, and a linear probe as head.

    Args:
        examples: N, at most 1,000.
        tests: T, at most 500.
        side: Height and width.

    Returns:
        The problem.
    """
    folder = find_data_dir(None, require=[ARCHIVE, "weights"])
    with np.load(folder / ARCHIVE, allow_pickle=False) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    y, test_y = (torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y_train", "y_test"))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    share = -(-examples // int(y.max() + 1))
    picked = torch.cat([order[y[order] == label][:share] for label in y.unique()]).sort().values[:examples]
    if examples >= len(y):
        picked = torch.arange(len(y))
    x, test_x = _images(arrays["x_train"], side)[picked], _images(arrays["x_test"], side)[:tests]
    weights = folder / "weights"
    model = load_model(
        f"{weights / 'nets.py'}:CifarResNet", weights=weights / WEIGHTS, model_args={"depth": 20}
    )
    y, test_y = y[picked], test_y[:tests]
    model = linnet.with_head(model.eval(), 10, init="probe", data=(x, y))
    return Task(model, x, y, test_x, test_y, weights / "nets.py")


def _images(stored: np.ndarray, side: int) -> Tensor:
    """Normalized float32 (N, 3, side, side)."""
    values = torch.from_numpy(np.ascontiguousarray(stored)).float().permute(0, 3, 1, 2) / 255
    values = nn.functional.interpolate(values, (side, side), mode="bilinear", antialias=True)
    mean, deviation = (torch.tensor(part).view(1, 3, 1, 1) for part in (MEAN, DEVIATION))
    return ((values - mean) / deviation).contiguous()
