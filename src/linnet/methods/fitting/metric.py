"""A network in the coordinates of a metric: its linear fit is then regularized by a curvature.

The ridge ρ‖δ‖² holds all weights alike, though a unit of one moves the outputs a thousand times as far as a
unit of another. With the curvature of the network, A = (G/N + τ I)⁻¹ = H Hᵀ and δ = H ε,

    f(θ₀ + H ε),        ρ ‖ε‖² = ρ δᵀ (G/N + τ I) δ,        kernel  J A Jᵀ,

the same network with other coordinates. It is a module like any other: to linearize and fit it is to fit
with this ridge, and leave-one-out, influence, forgetting, updates and variances are exact in the new metric.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet.curvatures.curvature import Curvature
from linnet.curvatures.default_damping import default_damping
from linnet.errors import InputError
from linnet.linalg.random import normal
from linnet.methods.fitting.arguments import check_positive
from linnet.methods.fitting.head import RECORD
from linnet.tangent.hashing import hash_tensors
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

HASHED = 8  # bytes of the hash that tells one metric from another


class MetricNetwork(nn.Module):
    """f(θ₀ + H ε) as a module whose one parameter is ε. :func:`with_metric` makes it.

    Args:
        network: f at θ₀; its parameters become buffers.
        covariance: A = H Hᵀ.
        names: The parameters that ε displaces, in the order of A.

    Attributes:
        network: The network.
        epsilon: ε, (P,), zero at first.
    """

    def __init__(self, network: nn.Module, covariance: Curvature, names: list[str]) -> None:
        super().__init__()
        shapes = {name: network.get_parameter(name).shape for name in names}
        dtype, device = covariance.dtype, covariance.device
        self.network, self._covariance, self._shapes = _with_buffers(network), covariance, shapes
        self.epsilon = nn.Parameter(torch.zeros(covariance.shape[0], dtype=dtype, device=device))
        # equal weights do not make equal networks: what is saved of one metric is not another's
        seen = covariance._root(normal((len(self.epsilon), 1), 0, dtype, device)).cpu()
        digest = bytes.fromhex(hash_tensors([seen]))[:HASHED]
        self.register_buffer("metric", torch.tensor(list(digest), dtype=torch.uint8))

    def displacement(self, epsilon: Tensor | None = None) -> dict[str, Tensor]:
        """δ = H ε.

        Args:
            epsilon: ε, (P,); by default the module's own. Of a fit, ``fit.module.delta["epsilon"]``.

        Returns:
            The displacement of every parameter by its name in the network.
        """
        chosen = self.epsilon if epsilon is None else epsilon
        # δ = H ε
        delta = self._covariance._root(chosen.to(self._covariance.dtype)[:, None])[:, 0].to(chosen.dtype)
        pieces = delta.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network gives at θ₀ + H ε.

        Args:
            *args: Of the network.
            **kwargs: Of the network.

        Returns:
            Its outputs.
        """
        delta = self.displacement()
        theta = {name: self.network.get_buffer(name) + piece for name, piece in delta.items()}
        return functional_call(self.network, theta, args, kwargs)

    def extra_repr(self) -> str:
        """The metric."""
        return f"{self._covariance!r}"


@in_exact_mode
def with_metric(model: nn.Module, curvature: Curvature, damping: float | None = None) -> MetricNetwork:
    """The same network in coordinates in which a ridge is the curvature's.

    Linearized and fitted as any network, its ridge is ρ δᵀ(G/N + τI)δ in place of ρ‖δ‖²: weights that move
    the outputs far pay for it. Its kernel J A Jᵀ is formed without the shortcuts for single layers, and took
    two to three times as long on a ResNet-20.

    Args:
        model: The network; it is not touched.
        curvature: G, summed over N examples, of this network or of one with the same parameters.
        damping: τ; by default a tenth of the mean eigenvalue of G/N.

    Returns:
        The network with one parameter ε, in evaluation mode, equal to ``model`` at ε = 0. It can be copied,
        pickled and linearized; move it before it is made, not after.

    Raises:
        InputError: If the curvature is of another network or cannot be inverted, or τ is not positive.
        NumericalError: If the curvature is zero.

    Source:
        The preconditioned metric of Achille et al., CVPR 2021, section 3.3, taken to the optimum.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 40).view(20, 2)
        >>> data = x, x.sin().sum(1, keepdim=True)
        >>> G = linnet.curvature(net, data, linnet.likelihoods.Gaussian(), structure="kfac")
        >>> fit = linnet.fit(linnet.linearize(linnet.with_metric(net, G)), data, ridge="loo")
        >>> fit.predict(x).shape
        torch.Size([20, 1])
    """
    if not isinstance(model, nn.Module) or isinstance(model, Linearized):
        raise InputError(
            f"model is {type(model).__name__}",
            expected="the network itself",
            remedy="linearize what with_metric returns",
        )
    if not isinstance(curvature, Curvature):
        raise InputError(
            f"curvature is {type(curvature).__name__}",
            expected="a Curvature that can be inverted",
            remedy='make one with linnet.curvature(model, data, likelihood, structure="kfac")',
        )
    network: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    names = list(curvature.function.theta)
    _check_fits(dict(network.named_parameters()), curvature.function.theta)
    scale = 1.0 / curvature.made.examples
    tau = default_damping(curvature, scale) if damping is None else damping
    check_positive("damping", tau, "leave damping= out for a tenth of the mean eigenvalue")
    made = MetricNetwork(network, curvature.scaled(scale).damped(float(tau)).inverse(), names).eval()
    head = {key: value for key, value in getattr(network, RECORD, {}).items() if key != "folds"}
    setattr(made, RECORD, {"init": "keep", "layer": "", "examples": frozenset(), **head, "metric": True})
    return made


def _check_fits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise unless a network has the parameters of a curvature."""
    for name, like in wanted.items():
        have = given.get(name)
        if have is None or have.shape != like.shape or have.device != like.device:
            what = "nothing of that name" if have is None else f"{tuple(have.shape)} on {have.device}"
            raise InputError(
                f"model has {what} for the curvature's {name!r}, {tuple(like.shape)} on {like.device}",
                expected="the network that the curvature was made of",
                remedy="make the curvature of this network, on its device",
            )


def _with_buffers(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose parameters are buffers, so that none is selected or trained."""
    clone = copy.deepcopy(model).eval()
    kept: dict[int, Tensor] = {}  # tied parameters stay tied
    for module in clone.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                del module._parameters[name]
                module.register_buffer(name, kept.setdefault(id(p), p.detach().clone()))
    return clone
