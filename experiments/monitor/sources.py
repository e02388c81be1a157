"""Shifts of images and texts, made from samples at hand, and the samples of a task under each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.adapt.tasks import DEVELOPMENT, MORE, NETWORKS, REPORTED, Task, stored
from experiments.locate import find_data_dir
from experiments.sources import Images, pixels

SEVERITIES = ("mild", "strong")
NONE, LABELS, OTHER = "none", "class shares", "another data set"
EVERY = {task.name: task for task in (*DEVELOPMENT, *MORE, *REPORTED)}
# network and task; the first four are those that choices were made on
SETS = {
    "development": (
        ("resnet20", "Fashion-MNIST"),
        ("mobilenet", "EuroSAT"),
        ("resnet20", "scenes"),
        ("minilm", "film reviews"),
    ),
    "reported": (
        ("resnet20", "Kannada digits"),
        ("mobilenet", "aerial views"),
        ("mobilenet", "trash"),
        ("minilm", "product reviews"),
        ("minilm", "emotions"),
    ),
}
# shifts that nobody made: samples of other people, beside their own set's; speakers are left out in turn
WRITERS = "Kannada digits, others' hands"
SPEAKERS = tuple(f"spoken digits, speaker {k + 1}" for k in range(6))
SETS["natural"] = (("resnet20", WRITERS), *(("mobilenet", name) for name in SPEAKERS))
# sets with the classes of another one
OTHERS = {"film reviews": "film grades", "product reviews": "opinions"}


# -- images in [0, 1], (N, C, H, W) ----------------------------------------------------------------


def noise(x: Tensor, strong: bool, generator: torch.Generator) -> Tensor:
    """Gaussian noise on every pixel."""
    return (x + (0.15 if strong else 0.06) * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def blur(x: Tensor, strong: bool, _: torch.Generator) -> Tensor:
    """A Gaussian filter."""
    deviation = x.shape[-1] / (24 if strong else 64)
    reach = int(3 * deviation + 1)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / deviation) ** 2)
    kernel = (kernel / kernel.sum()).repeat(x.shape[1], 1, 1, 1)
    for turned in (kernel, kernel.mT):
        sides = (reach, reach, 0, 0) if turned.shape[-1] > 1 else (0, 0, reach, reach)
        x = F.conv2d(F.pad(x, sides, "replicate"), turned, groups=x.shape[1])
    return x


def contrast(x: Tensor, strong: bool, _: torch.Generator) -> Tensor:
    """Differences from an image's mean made smaller."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (0.3 if strong else 0.6) * (x - mean)


def brightness(x: Tensor, strong: bool, _: torch.Generator) -> Tensor:
    """Every pixel made brighter, and cut."""
    return (x + (0.35 if strong else 0.15)).clamp(0, 1)


def pixelation(x: Tensor, strong: bool, _: torch.Generator) -> Tensor:
    """Blocks of one color."""
    side = x.shape[-1]
    small = F.interpolate(x, size=side // (4 if strong else 2), mode="area")
    return F.interpolate(small, size=side, mode="nearest")


def rotation(x: Tensor, strong: bool, generator: torch.Generator) -> Tensor:
    """A turn to the left or right."""
    sign = 2 * torch.randint(2, (len(x),), generator=generator) - 1
    angle = sign * torch.deg2rad(torch.tensor(40.0 if strong else 15.0))
    zero = torch.zeros_like(angle)
    turn = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def occlusion(x: Tensor, strong: bool, generator: torch.Generator) -> Tensor:
    """A gray square at a random place."""
    side = x.shape[-1]
    size, found = side // (2 if strong else 4), x.clone()
    corners = torch.randint(side - size + 1, (len(x), 2), generator=generator).tolist()
    for one, (top, left) in zip(found, corners, strict=True):
        one[:, top : top + size, left : left + size] = 0.5
    return found


IMAGES: dict[str, Callable[[Tensor, bool, torch.Generator], Tensor]] = {
    "noise": noise, "blur": blur, "contrast": contrast, "brightness": brightness,
    "pixelation": pixelation, "rotation": rotation, "occlusion": occlusion,
}  # fmt: skip


# -- texts -----------------------------------------------------------------------------------------


def typos(text: str, strong: bool, draw: random.Random) -> str:
    """Letters replaced at random."""
    share = 0.1 if strong else 0.03
    letters = [
        draw.choice("abcdefghijklmnopqrstuvwxyz") if c.isalpha() and draw.random() < share else c
        for c in text
    ]
    return "".join(letters)


def dropped(text: str, strong: bool, draw: random.Random) -> str:
    """Words left out at random, but for one."""
    words = text.split() or [text]
    kept = [word for word in words if draw.random() >= (0.5 if strong else 0.2)]
    return " ".join(kept or words[:1])


def order(text: str, strong: bool, draw: random.Random) -> str:
    """Words in another order: in threes, or all of them."""
    words = text.split()
    size = len(words) if strong else 3
    parts = [words[i : i + size] for i in range(0, len(words), max(size, 1))]
    return " ".join(word for part in parts for word in draw.sample(part, len(part)))


def beginning(text: str, strong: bool, _: random.Random) -> str:
    """The first half or quarter of the words."""
    words = text.split() or [text]
    return " ".join(words[: max(1, len(words) // (4 if strong else 2))])


TEXTS: dict[str, Callable[[str, bool, random.Random], str]] = {
    "typos": typos, "dropped words": dropped, "order of words": order, "beginning alone": beginning,
}  # fmt: skip


# -- tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Samples of a task that fits are made of, and others under each shift, as a network takes them."""

    pool: Any
    pool_y: Tensor
    shifted: Mapping[tuple[str, str], Any]  # by shift and severity
    test_y: Tensor
    other_y: Tensor | None  # of another data set
    altered: Mapping[tuple[str, str], Any]  # the pool by shift and severity


def together(found: Images) -> tuple[np.ndarray, Tensor]:
    """All samples of a set: splits may differ in where they are from, and batches must not."""
    return np.concatenate([found.train_x, found.test_x]), torch.cat([found.train_y, found.test_y])


def of_each(y: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """As many positions of every class, at random."""
    every = torch.randperm(len(y), generator=draw)
    return torch.cat([every[y[every] == label][:count] for label in y.unique()])


def apart(y: Tensor, pool: int, tested: int, draw: torch.Generator, third: bool) -> tuple[Tensor, Tensor]:
    """Positions of test samples, a third of all at most if asked for, and of the others."""
    some = of_each(y, (pool + tested) // (int(y.max()) + 1), draw)
    some = some[torch.randperm(len(some), generator=draw)]
    if third:  # so that small sets have training samples too
        tested = min(tested, len(some) // 3)
    return some[:tested], some[tested:]


def normalized(x: Tensor, by: Any) -> Tensor:
    """Images as a network takes them."""
    mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in by)
    return (x - mean) / deviation


def altered(
    x: np.ndarray, task: Task, network: Any, prepared: Any, seed: int, severities: Sequence[str] = SEVERITIES
) -> dict[tuple[str, str], Any]:
    """Samples as they are and under each shift, as a network takes them."""
    found: dict[tuple[str, str], Any] = {}
    if task.text:
        from experiments.adapt.encoders import tokens

        found[NONE, ""] = tokens(x, prepared, network.side)
        for shift, change in TEXTS.items():
            for severity in severities:
                by = random.Random(seed)
                made = [change(str(text), severity == "strong", by) for text in x]
                found[shift, severity] = tokens(np.array(made), prepared, network.side)
        return found
    images = pixels(x, None, network.side, 3)
    found[NONE, ""] = normalized(images, prepared)
    for shift, alter in IMAGES.items():
        for severity in severities:
            by_pixel = torch.Generator().manual_seed(seed)
            found[shift, severity] = normalized(alter(images, severity == "strong", by_pixel), prepared)
    return found


def drawn(
    key: str, name: str, pool: int, tested: int, data_dir: str | None, alter: bool = False
) -> tuple[Any, Drawn]:
    """A network, and the samples of a task: about so many in all, the same number of each class."""
    network = NETWORKS[key]
    model, prepared = network.load(data_dir)
    if name in (WRITERS, *SPEAKERS):
        return model, natural(name, network, prepared, pool, tested, data_dir)
    task = EVERY[name]
    x, y = together(stored(task, data_dir))
    draw = torch.Generator().manual_seed(0)
    test, rest = apart(y, pool, tested, draw, alter)
    shifted, other_y = altered(x[test.numpy()], task, network, prepared, 0), None
    if name in OTHERS:
        more, other_y = binary(EVERY[OTHERS[name]], data_dir)
        at = of_each(other_y, tested // 2, draw)
        found = altered(more[at.numpy()], task, network, prepared, 0, ())
        shifted[OTHER, "strong"], other_y = found[NONE, ""], other_y[at]
    tried = altered(x[rest.numpy()], task, network, prepared, 1, SEVERITIES if alter else ())
    own = tried.pop((NONE, ""))
    return model, Drawn(own, y[rest], shifted, y[test], other_y, tried)


def natural(name: str, network: Any, prepared: Any, pool: int, tested: int, data_dir: str | None) -> Drawn:
    """Samples of a set, and those of people that are none of those of the set."""
    if name == WRITERS:
        x, y = together(stored(EVERY["Kannada digits"], data_dir))
        other, other_y = together(stored(Task("", "fresh/dig_mnist"), data_dir))
    else:
        x, y = together(stored(EVERY["spoken digits"], data_dir))
        with np.load(find_data_dir(data_dir) / "spoken_digits_mel64.npz", allow_pickle=False) as file:
            speaker = torch.from_numpy(np.concatenate([file["speaker_train"], file["speaker_test"]]))
        left = speaker == SPEAKERS.index(name)
        other, other_y, x, y = x[left.numpy()], y[left], x[~left.numpy()], y[~left]
    draw = torch.Generator().manual_seed(0)
    test, rest = apart(y, pool, tested, draw, True)
    at = of_each(other_y, len(test) // (int(y.max()) + 1), draw)
    own, asked, more = (
        normalized(pixels(given, None, network.side, 3), prepared)
        for given in (x[rest.numpy()], x[test.numpy()], other[at.numpy()])
    )
    shifted = {(NONE, ""): asked, (OTHER, "strong"): more}
    return Drawn(own, y[rest], shifted, y[test], other_y[at], {})


def binary(task: Task, data_dir: str | None) -> tuple[np.ndarray, Tensor]:
    """Texts that are negative or positive, of two or five grades."""
    found = stored(replace(task), data_dir)
    x, y = together(found)
    if found.classes == 2:
        return x, y
    clear = y != 2
    return x[clear.numpy()], (y[clear] > 2).long()
