"""The streams of tasks, read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.sources import Images, images, pixels

Examples = tuple[Tensor, Tensor]
PARTS = ("train", "validation", "test")
FIVE = ("mnist", "notmnist_test10k", "fashion_mnist", "eurosat_1000_500", "cifar10_10k_5k")


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        name: Its name.
        read: Inputs and labels of a part: "train", "validation" or "test".
        head: Which output layer serves it.
        order: The order of its pixels, of a permutation.
    """

    name: str
    read: Callable[[str], Examples]
    head: int = 0
    order: Tensor | None = None


def flat_parts(data: Images, train: int | None, test: int | None, seed: int = 0) -> dict[str, Examples]:
    """Gray images as uint8 rows (N, H W): training and validation from the training set, and the test set.

    Args:
        data: The images.
        train: Training examples, drawn with the seed; all but those of the validation set by default.
        test: Test and validation examples at most; the validation set has a tenth of the training set.
        seed: Seed of the split.
    """
    x = torch.from_numpy(data.train_x).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    held = min(len(x) // 10, test or len(x))
    known, fresh = order[:held], order[held:][:train]
    test_x = torch.from_numpy(data.test_x).flatten(1)
    asked = torch.randperm(len(test_x), generator=generator)[:test]
    return {
        "train": (x[fresh], data.train_y[fresh]),
        "validation": (x[known], data.train_y[known]),
        "test": (test_x[asked], data.test_y[asked]),
    }


def mnist(data_dir: str | None, train: int | None, test: int | None) -> dict[str, Examples]:
    """MNIST as rows of uint8."""
    return flat_parts(images("mnist", data_dir), train, test)


def permuted(parts: dict[str, Examples], count: int, seed: int = 0) -> list[Task]:
    """``count`` tasks with the pixels in an order of their own; the first as they are."""

    def make(index: int) -> Task:
        generator = torch.Generator().manual_seed(1000 * seed + index)
        size = parts["train"][0].shape[1]
        order = torch.randperm(size, generator=generator) if index else torch.arange(size)

        def read(part: str) -> Examples:
            x, y = parts[part]
            return x[:, order].float() / 255, y

        return Task(f"permutation {index}", read, order=order)

    return [make(index) for index in range(count)]


def classes(parts: dict[str, Examples], groups: list[list[int]], heads: bool) -> list[Task]:
    """Tasks that hold some classes each; with heads the labels of a task begin at 0."""

    def make(index: int, group: list[int]) -> Task:
        def read(part: str) -> Examples:
            x, y = parts[part]
            rows = torch.isin(y, torch.tensor(group))
            labels = y[rows]
            if heads:
                labels = torch.searchsorted(torch.tensor(sorted(group)), labels)
            return x[rows].float() / 255, labels

        return Task("digits " + ", ".join(map(str, group)), read, index if heads else 0)

    return [make(index, group) for index, group in enumerate(groups)]


def five(data_dir: str | None, train: int, test: int, names: tuple[str, ...] = FIVE) -> list[Task]:
    """Color images of 32 × 32 of five sets, with a head for each; smaller and gray ones are fitted."""

    def make(index: int, name: str) -> Task:
        data = images(name, data_dir)
        order = np.random.default_rng(0).permutation(len(data.train_x))
        held = len(order) // 10
        asked = np.random.default_rng(1).permutation(len(data.test_x))[:test]
        known, fresh = order[:held][:test], order[held:][:train]
        rows = {
            "train": (data.train_x[fresh], data.train_y[fresh]),
            "validation": (data.train_x[known], data.train_y[known]),
            "test": (data.test_x[asked], data.test_y[asked]),
        }

        def read(part: str) -> Examples:
            x, y = rows[part]
            return fitted(pixels(x)), y

        return Task(name, read, index)

    return [make(index, name) for index, name in enumerate(names)]


def fitted(x: Tensor) -> Tensor:
    """Images (N, C, H, W) as (N, 3, 32, 32): padded with zeros, or averaged; gray is tripled."""
    if x.shape[-1] > 32:
        x = torch.nn.functional.interpolate(x, size=(32, 32), mode="area")
    if (missing := 32 - x.shape[-1]) > 0:
        x = torch.nn.functional.pad(x, (missing // 2, missing - missing // 2) * 2)
    return x.expand(-1, 3, -1, -1).contiguous()
