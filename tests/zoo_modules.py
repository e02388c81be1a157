"""The networks of the zoo: small, whole, and as unlike each other as networks in use are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# --- fully connected ------------------------------------------------------------------------------


def mlp(activation: Callable[[], nn.Module], inputs: int = 6, hidden: int = 8, classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        activation(),
        nn.Linear(hidden, hidden),
        activation(),
        nn.Linear(hidden, classes),
    )


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def inplace_relu() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )


class InplaceSum(nn.Module):
    """Writes into its own activations: +=, slices, masked_fill_."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += self.second(torch.sin(x))
        h[:, :2] *= 2.0
        return self.last(torch.tanh(h.masked_fill_(x > 1.5, 0.25)))


class Gated(nn.Module):
    """F.glu, whose jvp is not differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.glu(self.first(x), dim=-1))


class TwoInputs(nn.Module):
    """Takes two positional tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(3, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(torch.tanh(self.left(a)) * torch.sigmoid(self.right(b)))


class Regression(nn.Module):
    """One output, of shape (N, 1) or (N,)."""

    def __init__(self, squeeze: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))
        self.squeeze = squeeze

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1) if self.squeeze else self.net(x)


class Structured(nn.Module):
    """Outputs of shape (N, 2, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).reshape(-1, 2, 4))


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.SiLU)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        return OrderedDict(probabilities=scores.softmax(-1), scores=scores)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank correction."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.lora_a.T) @ self.lora_b.T


def lora() -> nn.Module:
    return nn.Sequential(LoraLinear(6, 8), nn.GELU(), LoraLinear(8, 8), nn.GELU(), LoraLinear(8, 3))


# --- parameters outside of layers -----------------------------------------------------------------


class PlainArithmetic(nn.Module):
    """Parameters used by operators only: matmul, addition, scale, power, a scalar, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5) / 6**0.5)
        self.b = nn.Parameter(torch.zeros(5))
        self.scale = nn.Parameter(torch.ones(5))
        self.power = nn.Parameter(torch.full((5,), 1.5))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.heads = nn.ParameterList([nn.Parameter(torch.randn(5) / 5**0.5) for _ in range(3)])
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w + self.b) * self.scale
        h = (h.square() + 0.5) ** self.power
        return torch.stack([h @ head for head in self.heads], dim=-1) / self.temperature


class Contractions(nn.Module):
    """Parameters in einsum, bmm, baddbmm, F.bilinear and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 3, 5) / 3)
        self.batched = nn.Parameter(torch.randn(2, 5, 4) / 3)
        self.shift = nn.Parameter(torch.randn(2, 1, 4) / 3)
        self.form = nn.Parameter(torch.randn(3, 4, 4) / 4)
        self.form_bias = nn.Parameter(torch.zeros(3))
        self.slope = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nsi,kij->nskj", x, self.mix).sum(2)  # (n, s, 5)
        pair = torch.stack([h[:, 0], h[:, 1]])  # (2, n, 5)
        pair = torch.baddbmm(self.shift, pair, self.batched) + torch.bmm(pair, self.batched.flip(0))
        left, right = self.slope(pair[0]), torch.tanh(pair[1])
        return F.bilinear(left, right, self.form, self.form_bias)


class TiedEmbedding(nn.Module):
    """A language-model head that is its own embedding, with two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids)).mean(1)))


class TiedLinears(nn.Module):
    """Two linear layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedTranspose(nn.Module):
    """An autoencoder: W going in, Wᵀ coming out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4) / 2)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t(), self.bias)


class SharedModule(nn.Module):
    """One linear layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block(torch.tanh(self.block(x)))))


class SharedConv(nn.Module):
    """One convolution and one normalization applied at two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.block(self.stem(x))))
        h = torch.tanh(self.norm(self.block(F.avg_pool2d(h, 2))))
        return self.head(h.mean((2, 3)))


class SlicedWeight(nn.Module):
    """Views of one parameter used as several weights, as in fused q, k, v projections."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(12, 6) / 6**0.5)
        self.bias = nn.Parameter(torch.zeros(12))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused.chunk(3)
        bq, bk, bv = self.bias.chunk(3)
        gate = torch.sigmoid(F.linear(x, q, bq) * F.linear(x, k, bk))
        return self.last(gate * F.linear(x, v, bv))


# --- convolutions ---------------------------------------------------------------------------------


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two normalized convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        BasicBlock(4, 4, 1), BasicBlock(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class DenseNet(nn.Module):
    """Every layer sees the concatenation of all before it."""

    def __init__(self, growth: int = 3, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        widths = [4 + growth * i for i in range(layers)]
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for width in widths])
        self.convs = nn.ModuleList([nn.Conv2d(width, growth, 3, padding=1, bias=False) for width in widths])
        self.head = nn.Linear(4 + growth * layers, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = torch.cat([h, conv(F.relu(norm(h)))], dim=1)
        return self.head(F.avg_pool2d(h, 2).flatten(2).mean(-1))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, grouped projection."""

    def __init__(self, width: int, expanded: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, expanded, 1, bias=False), nn.BatchNorm2d(expanded), nn.ReLU6(),
            nn.Conv2d(expanded, expanded, 3, 1, 1, groups=expanded, bias=False), nn.BatchNorm2d(expanded),
            nn.ReLU6(),
            nn.Conv2d(expanded, width, 1, groups=2, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), InvertedResidual(4, 8),
        nn.Conv2d(4, 8, 3, groups=4), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over channels, GELU, a scale for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.layer_scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.layer_scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 2, 2), ConvNextBlock(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(6),
        nn.Linear(6, 3),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.Conv1d(4, 6, 3, groups=2), nn.ELU(),
        nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 3, (2, 3, 3), padding=(0, 1, 1)), nn.Softplus(),
        nn.Conv3d(3, 4, 2, stride=2, bias=False), nn.Tanh(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def padding_modes() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(),
        nn.Conv2d(3, 3, 3, padding=2, dilation=2, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(3, 3, 3, padding="same", padding_mode="replicate"), nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding="same", dilation=(1, 2)), nn.Tanh(), nn.Conv2d(4, 4, 2, padding="valid"),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1, groups=2), nn.Tanh(),
        nn.Flatten(2), nn.ConvTranspose1d(4, 2, 2), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def decoder() -> nn.Module:
    """From a code to a small picture, as the second half of an autoencoder."""
    return nn.Sequential(
        nn.Linear(5, 24), nn.Unflatten(1, (6, 2, 2)), nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.BatchNorm2d(4),
        nn.SiLU(), nn.ConvTranspose2d(4, 4, (2, 3), (1, 2), (0, 1), groups=4, bias=False), nn.Tanh(),
        nn.ConvTranspose2d(4, 1, 2, dilation=(2, 1), output_padding=(1, 0)), nn.Sigmoid(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def upsampler() -> nn.Module:
    """Transposed convolutions in one and three dimensions."""
    return nn.Sequential(
        nn.ConvTranspose1d(2, 4, 4, stride=2, padding=1), nn.GELU(),
        nn.ConvTranspose1d(4, 4, 2, stride=3, output_padding=2, groups=2), nn.Tanh(),
        nn.AdaptiveAvgPool1d(8), nn.Unflatten(2, (2, 2, 2)),
        nn.ConvTranspose3d(4, 2, 2, stride=(1, 2, 1), output_padding=(0, 1, 0)), nn.Tanh(),
        nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(approximate="tanh"), nn.Conv2d(4, 4, 3),
        nn.InstanceNorm2d(4, affine=True), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.GroupNorm(1, 4, affine=False),
        nn.LayerNorm([4, 4, 4]), nn.Flatten(2), nn.RMSNorm(16), nn.AdaptiveAvgPool1d(3), nn.Flatten(),
        nn.LayerNorm(12, elementwise_affine=False), nn.Linear(12, 3),
    )  # fmt: skip


def weight_norm() -> nn.Module:
    wrap = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        wrap(nn.Conv2d(2, 4, 3)),
        nn.Tanh(),
        nn.Flatten(),
        wrap(nn.Linear(64, 6)),
        nn.Tanh(),
        wrap(nn.Linear(6, 3)),
    )


def spectral_norm() -> nn.Module:
    wrap = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 3)))


class Checkpointed(nn.Module):
    """Recomputes its middle block in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=False)
        return self.last(h)
