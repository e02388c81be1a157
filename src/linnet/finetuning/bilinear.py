"""Square-root bilinear pooling: the square root of the features' covariance instead of their mean.

    Σ = zᵀ (I − 11ᵀ/S) z / S,  h(z) = √Σ          (Achille et al., CVPR 2021, eq. 13)

Both square roots are differentiable in forward and reverse mode to first order, so a network with this
pooling can be linearized exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import last_linear, replace_module, zero_layer
from linnet.linalg.factorize import signed
from linnet.linalg.random import Seed
from linnet.params import call, choice, instance, integer, number, optional, refuse, tensor
from linnet.tangent.batch import split, take
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional
from linnet.tangent.modes import CallMode
from linnet.tangent.selection import require_module

ROOTS = ("newton-schulz", "eigen")
BATCH = 64  # examples whose channels are compared at once
_POOLS = frozenset({"adaptive_avg_pool2d", "avg_pool2d", "mean"})


class SquareRootPooling(nn.Module):
    """√Σ of a feature map over its positions, as a vector.

    A share ``eps`` of the mean eigenvalue is added to Σ, so that its root has a derivative where Σ has
    none of full rank (fewer positions than channels). Only the upper triangle is kept, off-diagonal entries
    times √2: inner products of vectors are those of matrices.

    The derivative D of √Σ in a direction E solves √Σ D + D √Σ = E. (Eq. 14 of Achille et al. 2021,
    D = ½ √Σ⁻¹ E, is the special case of E that commute with Σ.) ``"eigen"`` solves this equation in the
    eigenbasis and is exact, with repeated eigenvalues too; ``"newton-schulz"`` differentiates its
    own iterations.

    Args:
        root: ``"newton-schulz"``, products of matrices only, or ``"eigen"``.
        iterations: Steps of Newton-Schulz; 5 is usual, about 15 agree with ``"eigen"``.
        eps: Share of Σ's mean eigenvalue added to its diagonal.

    Raises:
        InputError: If an argument has a value that does not work.

    Source:
        Achille et al., CVPR 2021, eq. (13), (14); Li et al., CVPR 2018 (iSQRT-COV); Lin and Maji 2017.

    Example:
        >>> SquareRootPooling("eigen")(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 10])
    """

    def __init__(self, root: str = "newton-schulz", iterations: int = 5, eps: float = 1e-3) -> None:
        super().__init__()
        self.root = choice("root", root, tuple(ROOTS))
        # each step squares the error of the root: fewer than a hundred reach float64 from any start
        self.iterations = integer("iterations", iterations, 1, 1000)
        self.eps = number("eps", eps, above=0, below=1)

    def forward(self, z: Tensor) -> Tensor:
        """Pool.

        Args:
            z: Feature maps, (N, C, H, W), or (N, C, S).

        Returns:
            (N, C (C + 1) / 2).

        Raises:
            InputError: If z has another number of axes, or a single position.
        """
        if z.ndim < 3 or z.shape[2:].numel() < 2:
            raise InputError(
                f"features have shape {tuple(z.shape)}",
                expected="(N, C, H, W) with at least two positions: a covariance over positions",
                remedy="use larger images, or a feature map from an earlier layer",
            )
        matrix = self.covariance(z)
        root = (
            newton_schulz_root(matrix, self.iterations)
            if self.root == "newton-schulz"
            else eigen_root(matrix)
        )
        result: Tensor = upper_triangle(root)
        return result

    def covariance(self, z: Tensor) -> Tensor:
        """Σ of each example, with the share added that makes it regular.

        Args:
            z: Feature maps, (N, C, ...).

        Returns:
            (N, C, C), positive definite.
        """
        expected = "feature maps (N, C, H, W) or (N, C, S), of a floating-point type"
        if tensor("z", z, expected, convert=False).ndim < 3 or not z.is_floating_point():
            refuse("z", z, expected)
        z = z.flatten(2)
        centered = z - z.mean(2, keepdim=True)
        # Σ = zᵀ (I − 11ᵀ/S) z / S  (eq. 13)
        matrix = centered @ centered.transpose(1, 2) / z.shape[2]
        mean = matrix.diagonal(dim1=1, dim2=2).mean(1)
        floor = torch.finfo(z.dtype).tiny ** 0.5  # a constant map has Σ = 0
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        regular: Tensor = matrix + (self.eps * mean + floor)[:, None, None] * eye
        return regular

    def extra_repr(self) -> str:
        """The extra line of ``print``."""
        steps = f", iterations={self.iterations}" if self.root == "newton-schulz" else ""
        return f"{self.root}{steps}, eps={self.eps}"


def newton_schulz_root(matrix: Tensor, iterations: int = 15) -> Tensor:
    """√Σ by the coupled Newton-Schulz iteration; differentiable as it stands, (..., C, C)."""
    # matrix (..., C, C)
    # Source: Higham 2008, eq. (6.35), scaled by the trace as in Li et al., CVPR 2018.
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    y = matrix / trace  # eigenvalues in (0, 1]: the iteration converges
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    z = eye.expand_as(y)
    for _ in range(iterations):
        # T = (3 I − Z Y)/2,  Y ← Y T → √A,  Z ← T Z → √A⁻¹
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    root: Tensor = y * trace.sqrt()
    return root


def eigen_root(matrix: Tensor) -> Tensor:
    """√Σ by eigendecomposition, with its exact first derivative whatever the multiplicities."""
    # matrix (..., C, C)
    # Source: Higham 2008, section 6.1 (the derivative as a Sylvester equation).
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(matrix.detach())
        tiny = torch.finfo(matrix.dtype).tiny ** 0.5
        roots = values.clamp_min(tiny).sqrt()
        at = (vectors * roots[..., None, :]) @ vectors.transpose(-1, -2)
    # one Newton step from the root S, held constant: S + L⁻¹(Σ − S²), where L(D) = S D + D S. Its value is
    # √Σ, its derivative in Σ is L⁻¹, the derivative of the root.
    rotated = vectors.transpose(-1, -2) @ (matrix - at @ at) @ vectors
    solved = rotated / (roots[..., :, None] + roots[..., None, :])
    root: Tensor = at + vectors @ solved @ vectors.transpose(-1, -2)
    return root


def upper_triangle(matrix: Tensor) -> Tensor:
    """A symmetric matrix as a vector of the same norm."""
    # matrix (N, C, C)
    c = matrix.shape[-1]
    row, column = torch.triu_indices(c, c, device=matrix.device)
    weight = torch.where(row == column, 1.0, 2.0**0.5).to(matrix.dtype)
    return matrix[:, row, column] * weight


class BilinearNetwork(nn.Module):
    """A network whose last global average pooling is replaced; ``with_bilinear_head`` makes it."""

    def __init__(
        self, body: nn.Module, pool: SquareRootPooling, reduce: nn.Module, head: nn.Module, layer: str | None
    ) -> None:
        super().__init__()
        self.body, self.reduce, self.pool, self.head, self.layer = body, reduce, pool, head, layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of the head on the pooled features, (N, C)."""
        result: Tensor = self.head(self.pool(self.reduce(self.maps(*args, **kwargs))))
        return result

    def maps(self, *args: Any, **kwargs: Any) -> Tensor:
        """The feature maps that are pooled, (N, C, H, W)."""
        if self.layer is not None:
            seen: list[Tensor] = []
            handle = self.body.get_submodule(self.layer).register_forward_hook(
                lambda _, inputs, result: seen.append(result)
            )
            try:
                self.body(*args, **kwargs)
            finally:
                handle.remove()
            found = seen[-1] if seen else None
        else:
            with _Tap() as tap:
                self.body(*args, **kwargs)
            found = tap.found
        if not isinstance(found, Tensor) or found.ndim != 4:
            kind = tuple(found.shape) if isinstance(found, Tensor) else "nothing"
            raise ModelError(
                f"the network ({type(self.body).__name__}) has {kind} where feature maps are pooled",
                expected="feature maps (N, C, H, W) that an average over all positions follows",
                remedy="name the module whose output is the last feature map: layer='layer4'",
            )
        return found


class _Tap(CallMode):
    """Keeps the input of the last global average pooling."""

    found: Tensor | None = None

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; the input of a pooling is kept."""
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        x = args[0] if args else None
        if name in _POOLS and isinstance(x, Tensor) and x.ndim == 4 and x.shape[2:].numel() > 1:
            pooled = isinstance(result, Tensor) and result.shape[:2] == x.shape[:2]
            if pooled and result.shape[2:].numel() == 1:
                self.found = x
        return result


@dataclass(frozen=True)
class Bilinear:
    """Settings of square-root bilinear pooling in a network.

    Args:
        root: ``"newton-schulz"`` or ``"eigen"``.
        iterations: Steps of Newton-Schulz.
        channels: Channels to keep before pooling, the leading principal components of the features; by
            default all. The head has C (C + 1) / 2 inputs.
        layer: Name of the module whose output is the last feature map; found if left out.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Bilinear(channels=16).root
        'newton-schulz'
    """

    root: str = "newton-schulz"
    iterations: int = 5
    channels: int | None = None
    layer: str | None = None

    def __post_init__(self) -> None:
        choice("root", self.root, ROOTS)
        integer("iterations", self.iterations, 1, 1000)
        optional(integer, "channels", self.channels)
        optional(instance, "layer", self.layer, str, "the name of a module of the network")


def with_bilinear_head(
    model: nn.Module,
    classes: int,
    data: Any,
    pooling: Bilinear | None = None,
    *,
    init: str | Probe = "probe",
    seed: Seed = None,
) -> nn.Module:
    """A copy of a convolutional network with square-root bilinear pooling and a new last layer.

    Args:
        model: The network: convolutions, an average over all positions, a linear layer. Not touched.
        classes: Number of outputs.
        data: The new task; its first examples find the pooling, all of them fit the probe.
        pooling: Settings of the pooling.
        init: Of the head, see :func:`linnet.with_head`.
        seed: Source of randomness for ``init="random"``; torch's global stream if left out.

    Returns:
        The copy. Its parameters are named ``body.…``, ``reduce.…`` and ``head.…``.

    Raises:
        InputError: If an argument has a value that does not work.
        ModelError: If no pooling of feature maps is found.

    Source:
        Achille et al., CVPR 2021, sections 4.2 and A.2 (B-LQF).

    Example:
        >>> net = nn.Sequential(
        ...     nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)
        ... )
        >>> x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 2
        >>> with_bilinear_head(net, classes=2, data=(x, y)).head
        Linear(in_features=6, out_features=2, bias=True)
    """
    require_module(model)
    integer("classes", classes)
    pooling = Bilinear() if pooling is None else pooling
    instance(
        "pooling", pooling, Bilinear, "settings of the pooling", "pass pooling=linnet.surgery.Bilinear()"
    )
    channels = pooling.channels
    network = _tapped(model, SquareRootPooling(pooling.root, pooling.iterations), pooling.layer)
    reference = next(model.parameters())
    x, y = Data.of(data, model, keep=False).pair
    maps = _maps(network, take(x, slice(0, 2)))
    c = maps.shape[1]
    if channels is not None:
        integer("channels", channels, 1, c, "leave channels= out to keep all channels of the feature map")
    if channels is not None and channels < c:
        network.reduce = _principal_channels(network, x, channels)
        c = channels
    network.head = zero_layer(nn.Linear, c * (c + 1) // 2, classes, like=reference)
    network.train(model.training)
    return with_head(network, classes, init, (x, y), seed=seed)


def assemble(
    model: nn.Module,
    head: torch.Size,
    pooling: Bilinear,
    channels: tuple[int, int] | None = None,
) -> nn.Module:
    """The architecture that ``with_bilinear_head`` makes, its new layers without values."""
    network = _tapped(model, SquareRootPooling(pooling.root, pooling.iterations), pooling.layer)
    like = torch.empty((), dtype=torch.get_default_dtype())
    if channels is not None:
        network.reduce = zero_layer(nn.Conv2d, *channels, 1, like=like, bias=False)
    network.head = zero_layer(nn.Linear, head[1], head[0], like=like)
    return network


def _tapped(model: nn.Module, pool: SquareRootPooling, layer: str | None) -> BilinearNetwork:
    """A copy of a network without its last linear layer, its feature maps pooled."""
    names = dict(model.named_modules())
    if layer is not None and not (isinstance(layer, str) and layer in names):
        remedy = "see dict(model.named_modules()) for all of them"
        refuse("layer", layer, "the name of a module of the network", remedy)
    body = copy.deepcopy(model)
    replace_module(body, last_linear(body)[0], nn.Identity())
    return BilinearNetwork(body, pool, nn.Identity(), nn.Identity(), layer)


@torch.no_grad()
def _maps(network: BilinearNetwork, x: Any) -> Tensor:
    """Feature maps of a batch, in evaluation mode."""
    frozen = Functional(network, params="all")
    arguments = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    assert isinstance(frozen.model, BilinearNetwork)
    maps = partial(frozen.model.maps, *arguments[0], **arguments[1])
    return cast("Tensor", call("model", maps, expected="a network that can run on x"))


@torch.no_grad()
def _principal_channels(network: BilinearNetwork, x: Any, channels: int) -> nn.Module:
    """A 1 x 1 convolution to the leading principal components of the channels."""
    total: Tensor | float = 0.0
    for part in split(x, BATCH):
        z = _maps(network, part).flatten(2).double()
        centered = z - z.mean(2, keepdim=True)
        total = total + (centered @ centered.transpose(1, 2)).sum(0)
    assert isinstance(total, Tensor)
    vectors = signed(torch.linalg.eigh(total).eigenvectors[:, -channels:].flip(1))
    weight = next(network.body.parameters())
    layer = zero_layer(nn.Conv2d, total.shape[0], channels, 1, like=weight, bias=False)
    layer.weight.data = vectors.T.reshape(channels, -1, 1, 1).to(weight)
    return layer
