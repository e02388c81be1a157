"""The data sets and networks of the experiments with optimizers (Botev 2020, section 4.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.locate import find_data_dir
from experiments.optimizer.curves import curves
from experiments.sources import images, pixels
from linnet.likelihoods import Bernoulli, Gaussian
from linnet.likelihoods.likelihood import Likelihood

DATA = ("curves", "mnist", "faces")
WIDTHS = (1000, 500, 250, 30)
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


@dataclass(frozen=True)
class Problem:
    """What is to be reconstructed, and how the outputs are read.

    Args:
        x: Training images (N, D).
        likelihood: Of the outputs.
    """

    x: Tensor
    likelihood: Likelihood


def problem(name: str, count: int, data_dir: str | None = None) -> Problem:
    """A data set of the autoencoders.

    Args:
        name: ``"curves"``, ``"mnist"`` or ``"faces"``.
        count: Training images: at most 20,000, 50,000 and 103,500 in the thesis.
        data_dir: Folder of data sets.

    Returns:
        The images; Bernoulli pixels for CURVES and MNIST, squared error for FACES.
    """
    if name == "curves":
        return Problem(curves(count), Bernoulli())
    if name == "mnist":
        return Problem(pixels(images("mnist", data_dir).train_x[:count]).flatten(1), Bernoulli())
    return Problem(faces(count, data_dir), Gaussian())


def faces(count: int, data_dir: str | None = None, seed: int = 0) -> Tensor:
    """FACES: the first 25 people of Olivetti, rotated, scaled and subsampled to 25 x 25.

    The 250 images are taken through the same random pairs of a rotation (-90 to 90 degrees) and a scale
    (1.4 to 1.8), 414 pairs for 103,500 images. As in Hinton and Salakhutdinov 2006 every pixel then has mean
    zero, and one factor makes the average variance one.

    Args:
        count: Images to return; as many pairs as they need are drawn.
        data_dir: Folder of data sets.
        seed: Seed of the pairs.

    Returns:
        (count, 625).
    """
    with np.load(find_data_dir(data_dir, require=["olivetti.npz"]) / "olivetti.npz") as file:
        originals = pixels(file["images"][:250])
    pairs = math.ceil(count / len(originals))
    generator = torch.Generator().manual_seed(seed)
    angle = (torch.rand(pairs, generator=generator) - 0.5) * math.pi
    scale = 1.4 + 0.4 * torch.rand(pairs, generator=generator)
    found = []
    for a, s in zip(angle.tolist(), scale.tolist(), strict=True):
        # output position to input position: the rotation back, and a window of 1/s of the width
        inverse = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
        inverse[:, :2] /= s
        grid = F.affine_grid(inverse.expand(len(originals), 2, 3), [len(originals), 1, 50, 50], False)
        seen = F.grid_sample(originals, grid, padding_mode="border", align_corners=False)
        found.append(F.avg_pool2d(seen, 2).flatten(1))
    x = torch.cat(found)[torch.randperm(pairs * len(originals), generator=generator)[:count]]
    x = x - x.mean(0)
    return x / x.square().mean().sqrt()


def chain(sizes: Sequence[int], activation: str = "tanh", linear: Sequence[int] = ()) -> nn.Sequential:
    """Linear layers with activations between them, Glorot's initialization.

    Args:
        sizes: Inputs, widths, outputs.
        activation: One of ``ACTIVATIONS``.
        linear: Layers, besides the last, that no activation follows.
    """
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers.append(layer)
        if i < len(sizes) - 2 and i not in linear:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def autoencoder(
    inputs: int, widths: Sequence[int] = WIDTHS, activation: str = "tanh", seed: int = 0
) -> nn.Sequential:
    """D-1000-500-250-30-250-500-1000-D, or other widths of the first half."""
    torch.manual_seed(seed)
    return chain([inputs, *widths, *reversed(widths[:-1]), inputs], activation)


def reduced(full: bool) -> tuple[int, ...]:
    """The thesis' widths, or an eighth of them for a CPU."""
    return WIDTHS if full else (125, 62, 31, 15)
