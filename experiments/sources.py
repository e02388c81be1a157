"""The data sets and pretrained networks of the studies, as tensors and modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.locate import find_data_dir
from linnet.app.models import load_model

# Per-channel mean and standard deviation that the pretrained networks were trained with.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

# name: (weights, factory, its arguments, normalization of its images)
NETWORKS = {
    "resnet20": ("resnet20-12fca82f.th", "CifarResNet", {"depth": 20}, IMAGENET),
    "resnet56": ("resnet56-4bfd9763.th", "CifarResNet", {"depth": 56}, IMAGENET),
    "densenet": ("densenetbc100_cifar100.pth.tar", "DenseNetBC", {"classes": 100}, CIFAR),
    "mobilenet": (
        "mobilenetv2_1.0_224_imagenet_tf2ptq_folded.npz",
        "MobileNetV2Folded",
        {"classes": 1000},
        HALF,
    ),
}


@dataclass(frozen=True)
class Images:
    """A set of images as it is stored: uint8 (N, H, W) or (N, H, W, 3), with labels (N,)."""

    train_x: np.ndarray
    train_y: Tensor
    test_x: np.ndarray
    test_y: Tensor
    classes: int


def images(name: str, data_dir: str | None = None) -> Images:
    """Read ``NAME.npz``; a set without a training part is split 80 : 20 at random with seed 0."""
    folder = find_data_dir(data_dir, require=[f"{name}.npz"])
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        x, y = file["x_test"], file["y_test"]
        if "x_train" in file:
            train = (file["x_train"], file["y_train"])
        else:
            order = np.random.default_rng(0).permutation(len(x))
            cut = len(x) * 4 // 5
            train = (x[order[:cut]], y[order[:cut]])
            x, y = x[order[cut:]], y[order[cut:]]
    labels = torch.from_numpy(train[1].astype(np.int64)), torch.from_numpy(y.astype(np.int64))
    return Images(train[0], labels[0], x, labels[1], int(max(labels[0].max(), labels[1].max())) + 1)


def pixels(
    x: np.ndarray,
    normalization: tuple[Sequence[float], Sequence[float]] | None = None,
    side: int | None = None,
    channels: int | None = None,
) -> Tensor:
    """Stored images as float32 (N, C, H, W) in [0, 1], resized and normalized when asked.

    Args:
        x: uint8 (N, H, W) or (N, H, W, 3).
        normalization: Mean and standard deviation of each channel.
        side: New height and width, by area or bilinearly with antialiasing.
        channels: 3 repeats a gray image; 1 averages the colors.
    """
    values = torch.from_numpy(np.ascontiguousarray(x)).float() / 255
    values = values.unsqueeze(1) if values.ndim == 3 else values.permute(0, 3, 1, 2).contiguous()
    if channels == 3 and values.shape[1] == 1:
        values = values.expand(-1, 3, -1, -1).contiguous()
    if channels == 1 and values.shape[1] == 3:
        values = values.mean(1, keepdim=True)
    if side is not None and side != values.shape[-1]:
        values = F.interpolate(
            values, size=(side, side), mode="bilinear", antialias=True, align_corners=False
        )
    if normalization is not None:
        mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in normalization)
        values = (values - mean) / deviation
    return values


def pretrained(
    name: str, data_dir: str | None = None
) -> tuple[nn.Module, tuple[Sequence[float], Sequence[float]]]:
    """A pretrained network of ``NETWORKS`` in evaluation form, and the normalization of its images."""
    weights, factory, arguments, normalization = NETWORKS[name]
    folder = find_data_dir(data_dir, require=["weights"]) / "weights"
    model = load_model(f"{folder / 'nets.py'}:{factory}", weights=folder / weights, model_args=arguments)
    return model.eval(), normalization


def shots(labels: Tensor, per_class: int, seed: int) -> Tensor:
    """Positions of ``per_class`` examples of every class, drawn with a seed, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    picked = [order[labels[order] == label][:per_class] for label in labels.unique()]
    together = torch.cat(picked)
    return together[torch.randperm(len(together), generator=generator)]
