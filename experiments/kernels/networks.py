"""The three networks with one output, the two data sets and the training of Ortiz-Jimenez et al. (2021).

Supplement A: a multilayer perceptron with two hidden layers of 100, LeNet5 and ResNet18, trained with SGD on
the binary cross-entropy, learning rate 0.05 decaying, momentum 0.9, batches of 128. The default size has a
ResNet18 with 8 channels in the first stage instead of 64, which a processor can train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.sources import CIFAR, Images, images, pixels
from linnet.errors import DataError

CAT, DOG = 3, 5


def mlp(inputs: int = 3072) -> nn.Sequential:
    """Two hidden layers of 100."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
    )


def lenet(
    channels: int = 3,
    side: int = 32,
    activation: Callable[[], nn.Module] = nn.ReLU,
    outputs: int = 1,
    pool: Callable[[int], nn.Module] = nn.MaxPool2d,
) -> nn.Sequential:
    """LeNet5: two 5 × 5 convolutions of 6 and 16 channels, then 120, 84 and the output units."""
    padding = (32 - side) // 2  # images of 28 pixels are padded to 32, as in LeCun et al. 1998
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding), activation(), pool(2),
        nn.Conv2d(6, 16, 5), activation(), pool(2), nn.Flatten(),
        nn.Linear(400, 120), activation(), nn.Linear(120, 84), activation(), nn.Linear(84, outputs),
    )  # fmt: skip


class Block(nn.Module):
    """Two 3 × 3 convolutions with batch normalization beside a shortcut (He et al. 2016)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.inner, self.outer = activation(), activation()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, fan_in, H, W) to (N, fan_out, H / stride, W / stride)."""
        branch = self.norm2(self.conv2(self.inner(self.norm1(self.conv1(x)))))
        return self.outer(branch + self.shortcut(x))


def resnet18(channels: int = 3, width: int = 64, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """ResNet18 for small images: a 3 × 3 stem and four stages of two blocks from ``width`` channels on."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), activation()
    ]  # fmt: skip
    fan_in = width
    for stage in range(4):
        for block in range(2):
            fan_out = width * 2**stage
            layers.append(Block(fan_in, fan_out, 2 if stage and not block else 1, activation))
            fan_in = fan_out
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, 1))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def build(name: str, seed: int, channels: int = 3, side: int = 32, width: int = 8) -> nn.Module:
    """A network of the paper at its initialization.

    Args:
        name: ``"MLP"``, ``"LeNet"`` or ``"ResNet18"``.
        seed: Of the initialization.
        channels: Channels of the images.
        side: Their height and width.
        width: Channels of the first stage of the ResNet; the paper's are 64.
    """
    torch.manual_seed(seed)
    if name == "MLP":
        return mlp(channels * side * side)
    return lenet(channels, side) if name == "LeNet" else resnet18(channels, width)


def cats_and_dogs(data_dir: str | None, full: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CIFAR-2: two classes of CIFAR-10 as −1 and 1; training images and labels, test images and labels.

    The supplement does not name the classes; its 12,000 samples are two classes of 6,000, and its
    accuracies are those of a hard pair, so cats and dogs are taken here.
    """
    found = cifar10(data_dir, full)
    parts: list[Tensor] = []
    for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y)):
        kept = (y == CAT) | (y == DOG)
        parts += [pixels(x[kept.numpy()], CIFAR), torch.where(y[kept] == DOG, 1.0, -1.0)]
    return parts[0], parts[1], parts[2], parts[3]


def cifar10(data_dir: str | None, full: bool) -> Images:
    """CIFAR-10: all of it (``cifar10.npz``) when asked for and there, else a part of 10,000 and 5,000."""
    if full:
        try:
            return images("cifar10", data_dir)
        except DataError:
            print("cifar10.npz is not there: its part cifar10_10k_5k.npz is used")
    return images("cifar10_10k_5k", data_dir)


def sgd(steps: int, rate: float = 0.05) -> tuple[
    Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
]:  # fmt: skip
    """The paper's optimizer, with its learning rate falling to zero along a cosine."""
    return (
        lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, seed: int) -> nn.Module:
    """Train on labels −1 and 1 by the paper's scheme; the network is left in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(x) // batch)
    make_optimizer, make_schedule = sgd(steps)
    optimizer = make_optimizer(network.parameters())
    schedule = make_schedule(optimizer)
    network.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(batch):
            if len(index) == 1:  # batch normalization has no variance of one example
                continue
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(network(x[index])[:, 0], (y[index] + 1) / 2)
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right signs."""
    outputs = torch.cat([network(part)[:, 0] for part in x.split(500)])
    return float(((outputs > 0) == (y > 0)).double().mean())
