"""Networks of Goldwaser and Ge (LeNet with wider convolutions, ResNet-18, MLP), and a transformer."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lenet(channels: int = 50, side: int = 32, seed: int = 0) -> nn.Sequential:
    """LeNet-50: two 5 x 5 convolutions of ``channels``, then layers of 120 and 84 (appendix D).

    Images of 16 x 16 are padded, so that there is something left of them, and the layers are half as wide.
    """
    torch.manual_seed(seed)
    small = side < 32
    padding, dense = (2, (60, 42)) if small else (0, (120, 84))
    left = (side // 4 if small else (side // 2 - 2) // 2 - 2) ** 2
    network = nn.Sequential(
        nn.Conv2d(3, channels, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * left, dense[0]),
        nn.ReLU(),
        nn.Linear(dense[0], dense[1]),
        nn.ReLU(),
        nn.Linear(dense[1], 10),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):  # LeCun's initialization
            nn.init.normal_(layer.weight, 0, layer.weight[0].numel() ** -0.5)
            nn.init.zeros_(layer.bias)
    return network


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=not norm)
        self.second = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=not norm)
        self.norms = nn.ModuleList(nn.BatchNorm2d(fan_out) if norm else nn.Identity() for _ in range(2))
        changes = stride > 1 or fan_in != fan_out
        self.around = nn.Conv2d(fan_in, fan_out, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Its result."""
        h = F.relu(self.norms[0](self.first(x)))
        around: Tensor = self.around(x)
        return F.relu(self.norms[1](self.second(h)) + around)


def resnet18(width: int = 64, norm: bool = False, seed: int = 0) -> nn.Sequential:
    """ResNet-18 for CIFAR: four stages of two blocks.

    Args:
        width: Channels of the first stage.
        norm: Whether there is BatchNorm; without it the second convolution of each block starts at a tenth
            of its size, so that sums over blocks do not grow.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    stem: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=not norm), nn.ReLU()]
    if norm:
        stem.insert(1, nn.BatchNorm2d(width))
    blocks: list[Block] = []
    fan_in = width
    for stage in range(4):
        for k in range(2):
            blocks.append(Block(fan_in, width << stage, 2 if stage and k == 0 else 1, norm))
            fan_in = width << stage
    if not norm:
        for block in blocks:
            with torch.no_grad():
                block.second.weight.mul_(0.1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, 10))


def mlp(width: int = 50, layers: int = 5, seed: int = 0) -> nn.Sequential:
    """An MLP of one input and one output with ReLUs, in double precision."""
    torch.manual_seed(seed)
    sizes = [1, *[width] * (layers - 1), 1]
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).double()


class Patches(nn.Module):
    """The squares of an image as a sequence: (N, C, H, W) to (N, number of squares, numbers in each)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Row after row."""
        squares = x.unfold(2, self.side, self.side).unfold(3, self.side, self.side)
        return squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class Transformer(nn.Module):
    """A pre-norm transformer with learned positions, whose mean over tokens is classified.

    Args:
        tokens: Of a sequence.
        inputs: Numbers of a token.
        width: Of the network; feed-forward layers are twice as wide.
        heads: Of attention.
        blocks: How many.
    """

    def __init__(self, tokens: int, inputs: int, width: int = 32, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        each = (
            nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.blocks = nn.Sequential(*each, nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.blocks(self.embed(x) + self.positions).mean(1))
        return scores


def vision_transformer(side: int = 16, patch: int = 4, width: int = 32, seed: int = 0) -> nn.Sequential:
    """Two blocks of four heads on the squares of a color image."""
    torch.manual_seed(seed)
    return nn.Sequential(Patches(patch), Transformer((side // patch) ** 2, 3 * patch**2, width))
