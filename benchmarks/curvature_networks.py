"""The problems of the curvature benchmarks: a network, data, and a loss, the same in every process.

LeNet on 28x28 images, ResNet-20 on 32x32 images, a transformer encoder on 64 tokens, and two small networks
in float64 for the checks of agreement. Everything follows from a seed, so that linnet and its peers, each in
an interpreter of its own, meet the same numbers as long as both have the same version of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from networks import Block, ResNet, resnet20
from torch import nn

CLASSES = 10
Parameters = dict[str, torch.Tensor]


def lenet(channels: int = 1) -> nn.Sequential:
    """LeNet with 50, 50, 120 and 84 units on (channels, 28, 28) images: 5x5 convolutions without padding."""
    return nn.Sequential(
        nn.Conv2d(channels, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(50, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


class Attention(nn.Module):
    """Multi-head self-attention from four linear layers and plain matrix products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to (N, heads, T, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to (N, T, width)."""
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network of ReLU, each after a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to (N, T, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Encoder(nn.Module):
    """Transformer encoder on sequences of vectors, with mean pooling and a linear head.

    Positions are the fixed sines of Vaswani et al., "Attention is all you need" (2017), section 3.5, so that
    linear layers and normalizations are all that has parameters.
    """

    def __init__(self, tokens: int = 64, width: int = 64, heads: int = 4, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, width)
        position = torch.arange(tokens).unsqueeze(1)
        angle = position / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.cat([angle.sin(), angle.cos()], 1))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, hidden) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, tokens, width) to (N, classes)."""
        x = self.layers(self.embedding(x) + self.position)
        return self.head(self.norm(x).mean(1))


def small_mlp() -> nn.Sequential:
    """Three layers with biases."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))


def small_convolution() -> nn.Sequential:
    """Two convolutions, one of them strided and padded, and a head."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def in_modules(model: nn.Module, parallel: Callable[..., nn.Module]) -> nn.Module:
    """A ``ResNet`` as a sequence of modules around the same layers, other networks as they are.

    Shortcuts that change their shape become 1x1 convolutions with fixed weights of zeros and ones.

    Args:
        model: Any network.
        parallel: Module that adds the results of the modules it is made of.

    Returns:
        A network that computes the same function.
    """
    if not isinstance(model, ResNet):
        return model
    layers: list[nn.Module] = [model.conv1, model.bn1, nn.ReLU()]
    for block in model.blocks:
        inner = nn.Sequential(block.conv1, block.bn1, nn.ReLU(), block.conv2, block.bn2)
        layers += [parallel(_shortcut(block), inner), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), model.linear).eval()


def _shortcut(block: Block) -> nn.Module:
    """The shortcut of a block as a module."""
    if block.stride == 1:
        return nn.Identity()
    fan_in, fan_out = block.conv1.in_channels, block.conv1.out_channels
    result = nn.Conv2d(fan_in, fan_out, 1, block.stride, bias=False).requires_grad_(False)
    result.weight.zero_()
    result.weight[block.padding : block.padding + fan_in, :, 0, 0] = torch.eye(fan_in)
    return result


@dataclass(frozen=True)
class Problem:
    """A network in evaluation mode, N examples, and which parameters the curvature is about.

    ``loss`` is torch's own with reduction "sum": ``nn.CrossEntropyLoss``, or ``nn.MSELoss`` whose Hessian is
    twice that of a Gaussian with unit variance.
    """

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: nn.Module
    names: tuple[str, ...]

    def batches(self, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The data in parts of at most ``size`` examples."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    @property
    def parameters(self) -> Parameters:
        """The chosen parameters by name."""
        every = dict(self.model.named_parameters())
        return {name: every[name] for name in self.names}

    def vectors(self, columns: int) -> Parameters:
        """The same unit-variance directions in every process: with columns last."""
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(*value.shape, columns, generator=generator, dtype=value.dtype)
            for name, value in self.parameters.items()
        }


@dataclass(frozen=True)
class Network:
    """How a problem is made; ``shape`` is that of one example."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    examples: int
    classes: int = CLASSES
    dtype: torch.dtype = torch.float32


NETWORKS: dict[str, Network] = {
    "lenet": Network(lenet, (1, 28, 28), 1000),
    "resnet20": Network(lambda: resnet20(CLASSES), (3, 32, 32), 500),
    "transformer": Network(Encoder, (64, 64), 256),
    "small-mlp": Network(small_mlp, (5,), 12, 3, torch.float64),
    "small-convolution": Network(small_convolution, (2, 8, 8), 12, 3, torch.float64),
}
LARGE = ("lenet", "resnet20", "transformer")


def layer_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights and biases of linear layers and convolutions, the layers that every peer knows."""
    return tuple(
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        for name, _ in module.named_parameters()
    )


def problem(
    network: str, parameters: str = "layers", examples: int | None = None, loss: str = "cross-entropy"
) -> Problem:
    """One problem.

    Args:
        network: A name of ``NETWORKS``.
        parameters: "layers" (linear layers and convolutions; the others are frozen), "weights" (the same
            without biases) or "all".
        examples: N; fewer than the network's own are the first of them.
        loss: "cross-entropy" or "squared".

    Returns:
        The problem, the same for the same arguments.
    """
    entry = NETWORKS[network]
    torch.manual_seed(0)
    model = entry.make().to(entry.dtype).eval()
    kept = entry.examples if examples is None else examples
    made = max(kept, entry.examples)
    x = torch.randn(made, *entry.shape, dtype=entry.dtype)
    y = torch.randint(entry.classes, (made,))
    if loss == "squared":
        y = torch.randn(made, entry.classes, dtype=entry.dtype)
    names = tuple(dict(model.named_parameters())) if parameters == "all" else layer_parameters(model)
    if parameters == "weights":
        names = tuple(name for name in names if name.endswith(".weight"))
    for name, value in model.named_parameters():
        value.requires_grad_(name in names)
    function = (
        nn.CrossEntropyLoss(reduction="sum") if loss == "cross-entropy" else nn.MSELoss(reduction="sum")
    )
    return Problem(model, x[:kept], y[:kept], function, names)


def trainable(model: nn.Module) -> Sequence[nn.Parameter]:
    """Parameters that require a gradient."""
    return [value for value in model.parameters() if value.requires_grad]
