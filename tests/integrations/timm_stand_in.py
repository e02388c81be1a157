"""What the guide on photographs takes from timm, for environments without it, and without a download.

Only the interface: a small network that says how its images were normalized, and the transformation that
belongs to it. Where timm is installed it is used, with random weights in place of those that it would fetch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

INSTALLED = importlib.util.find_spec("timm") is not None
CONFIG = {"input_size": (3, 224, 224), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


class Network(nn.Sequential):
    """A small network with the configuration that timm's networks carry.

    Args:
        classes: Outputs.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, classes),
        )  # fmt: skip
        self.pretrained_cfg = CONFIG


def create_model(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """The network, the same for every name."""
    torch.manual_seed(0)
    return Network(**arguments)


def create_transform(**config: Any) -> Callable[[Any], Tensor]:
    """From a picture to normalized pixels of the size that the network was trained at."""

    def transform(picture: Any) -> Tensor:
        side = config["input_size"][1]
        pixels = torch.from_numpy(np.asarray(picture.resize((side, side)), np.float32) / 255)
        mean, std = (torch.tensor(config[key]) for key in ("mean", "std"))
        return ((pixels - mean) / std).permute(2, 0, 1)

    return transform


@contextmanager
def timm_or_stand_in() -> Iterator[None]:
    """Networks of timm without a download, while this lasts."""
    if INSTALLED:
        timm: Any = importlib.import_module("timm")
        real = timm.create_model
        timm.create_model = lambda name, pretrained=False, **arguments: real(name, **arguments)
        try:
            yield
        finally:
            timm.create_model = real
        return
    modules: dict[str, Any] = {"timm": ModuleType("timm"), "timm.data": ModuleType("timm.data")}
    modules["timm"].create_model = create_model
    modules["timm"].data = modules["timm.data"]
    modules["timm.data"].resolve_model_data_config = lambda network: network.pretrained_cfg
    modules["timm.data"].create_transform = create_transform
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
