"""Small tasks for the commands: pictures of stripes, a table, and the factories of their networks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from linnet.app import cli

NETS = """
import torch
from torch import nn

def conv(classes=3, width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(9 * width, classes)
    )

def deep(width=6):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * width, 3),
    )

def mlp(in_features=3, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(in_features, 16), nn.Tanh(), nn.Linear(16, outputs))

def noisy():
    return nn.Sequential(nn.Flatten(), Noise(), nn.Linear(64, 3))

def broken():
    raise RuntimeError("no weights today")

class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)
"""


def write_nets(folder: Path) -> Path:
    """A file of factories."""
    path = folder / "nets.py"
    path.write_text(NETS)
    return path


def pictures(labels: np.ndarray, seed: int) -> np.ndarray:
    """Gray pictures of 8 x 8 pixels: stripes whose direction is the class, under noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:8, :8]
    waves = [np.sin(rows * 1.5), np.sin(columns * 1.5), np.sin((rows + columns) * 1.1)]
    found = [127 + 50 * waves[label] + 40 * rng.standard_normal((8, 8)) for label in labels]
    return np.clip(found, 0, 255).astype(np.uint8)


def write_pictures(path: Path, train: int = 8, test: int = 10, seed: int = 0) -> Path:
    """An archive of three classes with some pictures of each."""
    y_train, y_test = np.repeat(np.arange(3), train), np.repeat(np.arange(3), test)
    x_train, x_test = pictures(y_train, seed), pictures(y_test, seed + 1)
    names = np.array(["across", "along", "slanted"])
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, class_names=names)
    return path


def write_table(path: Path, lines: int = 60, seed: int = 0) -> Path:
    """A table of three features and a target."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((lines, 3))
    y = 100 + 20 * x[:, 0] - 10 * x[:, 1] * x[:, 2] + rng.standard_normal(lines)
    rows = [",".join(f"{v:.6f}" for v in (*features, target)) for features, target in zip(x, y, strict=True)]
    path.write_text("\n".join(["a,b,c,price", *rows]) + "\n")
    return path


def write_folder(root: Path, labels: list[int], names: list[str], seed: int = 5) -> Path:
    """Picture files in folders named for their class, or all in one folder where names are empty."""
    from PIL import Image

    for i, picture in enumerate(pictures(np.array(labels), seed)):
        folder = root / names[labels[i]] if names else root
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{i:02}.png")
    return root


def linnet(*words: object, code: int = 0) -> None:
    """Run a command in this process."""
    assert cli.main([str(word) for word in words]) == code


def result(folder: Path) -> dict[str, Any]:
    """What a command wrote."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
