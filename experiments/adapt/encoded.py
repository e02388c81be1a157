"""Features of the last layer of an encoder, kept in files: a draw of a study is then rows of them."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.adapt.tasks import NETWORKS, Network, Task, pools, samples, stored
from linnet.files import load, save
from linnet.fitting.last_layer import ending_linear, features

BATCH = 256
IMAGES = replace(NETWORKS["lite"], name="EfficientNet-lite0 at 96", side=96)
TEXTS = NETWORKS["minilm"]


@torch.no_grad()
def encoded(
    network: Network, task: Task, most: int, tested: int, folder: Path, data_dir: str | None
) -> dict[str, Tensor]:
    """Features and labels of a task's pool and test samples, computed once.

    Args:
        network: The encoder.
        task: Labeled images or texts.
        most: Samples in the pool.
        tested: Test samples.
        folder: Where they are kept.
        data_dir: Folder of the data.

    Returns:
        ``"pool"`` (N, D) and ``"test"`` (T, D) in float64, and ``"pool labels"``, ``"test labels"``.
    """
    name = f"{network.name} {task.name} {most} {tested}".replace(" ", "-").lower()
    if not (folder / f"{name}.safetensors").exists():
        begin = time.perf_counter()
        model, prepared = network.load(data_dir)
        found = stored(task, data_dir)
        pool, test = pools(found, most, tested)
        first = samples(found.train_x[:2], network, prepared)
        model = ending_linear(model, first).eval()
        kept: dict[str, Any] = {"pool labels": found.train_y[pool], "test labels": found.test_y[test]}
        for part, x, at in (("pool", found.train_x, pool), ("test", found.test_x, test)):
            rows = [
                features(model, samples(x[some], network, prepared)).float()
                for some in np.array_split(at.numpy(), math.ceil(len(at) / BATCH))
            ]
            kept[part] = torch.cat(rows)
        save(folder, name, kept)
        print(f"{name}: {len(pool) + len(test)} samples, {time.perf_counter() - begin:.0f} s", flush=True)
    read = load(folder / f"{name}.safetensors", name)
    return {key: value.double() if value.is_floating_point() else value for key, value in read.items()}
