"""Linear fits regularized by a curvature: the network in the coordinates of a metric.

The ridge ρ‖δ‖² treats all weights alike, though a unit of one moves the outputs a thousand times as far as a
unit of another. With the curvature of the network, A = (G/N + τ I)⁻¹ = H Hᵀ and δ = H ε,

    f(θ₀ + H ε),        ρ ‖ε‖² = ρ δᵀ (G/N + τ I) δ,        kernel  J A Jᵀ,

the same network with other coordinates. It is a module like any other: to linearize and fit it is to fit
with this ridge, and leave-one-out, influence, forgetting, updates and variances are exact in the new metric.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linnet.curvatures.curvature import Curvature, default_damping
from linnet.curvatures.variance import root_rows
from linnet.errors import InputError
from linnet.fitting.last_layer import RECORD
from linnet.params import number
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Captured
from linnet.tree import flatten, hash_tensors

HASHED = 8  # bytes of the hash that tells one metric from another


class MetricNetwork(Coordinates):
    """f(θ₀ + H ε) as a module whose one parameter is ε. :func:`with_metric` makes it.

    Args:
        network: f at θ₀; its parameters become buffers.
        curvature: G, summed over N examples.
        damping: τ > 0.

    Attributes:
        network: The network.
        epsilon: ε, (P,), zero at first.
        curvature: G.
        damping: τ.

    Example:
        >>> import linnet
        >>> net, data = torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.randint(2, (20,)))
        >>> G = linnet.curvature(net, data, linnet.likelihoods.Categorical())
        >>> linnet.with_metric(net, G, damping=0.1).epsilon.shape
        torch.Size([8])
    """

    def __init__(self, network: nn.Module, curvature: Curvature, damping: float) -> None:
        super().__init__(network, list(curvature.function.theta), curvature.shape[0])
        self.curvature, self.damping = curvature, damping
        # A = (G/N + τ I)⁻¹ = H Hᵀ
        self._covariance = curvature.scaled(1 / curvature.made.examples).damped(damping).inverse()
        # equal weights do not make equal networks: what is saved of one metric is not another's
        identity = torch.tensor(list(_identity(curvature, damping)), dtype=torch.uint8)
        self.register_buffer("metric", identity)

    def _moved(self, epsilon: Tensor) -> dict[str, Tensor]:
        """H ε, computed in the type of the curvature."""
        # epsilon (P,)
        delta = self._covariance._root(epsilon.to(self._covariance.dtype)[:, None])[:, 0].to(epsilon.dtype)
        pieces = delta.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def pulled(self, captured: Captured) -> Tensor:
        """J H from the rows of J.

        Args:
            captured: A batch of the network in place.

        Returns:
            (N, K, P).
        """
        n, k = captured.n, captured.k
        flat = torch.cat([captured.rows(name).reshape(n * k, -1) for name in self._shapes], 1)
        return self.turned(flat).reshape(n, k, -1)

    def turned(self, rows: Tensor) -> Tensor:
        """J H from rows of J.

        Args:
            rows: In the order of the network's parameters, (M, P).

        Returns:
            (M, P).
        """
        # (J H)ᵀ = Hᵀ Jᵀ
        return self._covariance._root_transposed(rows.to(self._covariance.dtype).T).T.to(rows.dtype)

    def kernel_rows(self, captured: Captured) -> Tensor:
        """Rows with the products of those of J H, of every layer in its eigenbasis.

        Args:
            captured: A batch of the network in place.

        Returns:
            (N, K, P), layer after layer.
        """
        return root_rows(self._covariance.parts, captured)

    def extra_repr(self) -> str:
        """The metric."""
        return f"{self._covariance!r}"


@in_exact_mode
def with_metric(model: nn.Module, curvature: Curvature, damping: float | None = None) -> MetricNetwork:
    """The same network in coordinates in which the ridge is that of a curvature.

    Linearized and fitted as any network, its ridge is ρ δᵀ(G/N + τI)δ in place of ρ‖δ‖²: weights that move
    the outputs far pay for it. Its kernel J A Jᵀ takes about 1.4 times as long on a ResNet-20.

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
    network = network_of(model, curvature)
    tau = default_damping(curvature, 1 / curvature.made.examples) if damping is None else damping
    number("damping", tau, above=0, remedy="leave damping= out for a tenth of the mean eigenvalue")
    made = MetricNetwork(network, curvature, float(tau)).eval()
    head = {key: value for key, value in getattr(network, RECORD, {}).items() if key != "folds"}
    setattr(made, RECORD, {"init": "keep", "layer": "", "examples": frozenset(), **head, "metric": True})
    return made


def _identity(curvature: Curvature, tau: float) -> bytes:
    """A hash of G as it would be saved, and of τ: the same on every machine that loads it."""
    stored = [flatten(part.operator)[1] for part in curvature.parts]
    given = torch.tensor([curvature.made.examples, tau], dtype=torch.float64)
    return bytes.fromhex(hash_tensors([given, *(t for own in stored for _, t in sorted(own.items()))]))[
        :HASHED
    ]


def network_of(model: nn.Module, curvature: Curvature) -> nn.Module:
    """The network that a curvature is of."""
    if not isinstance(model, nn.Module) or isinstance(model, Linearized):
        raise InputError(
            f"model is {type(model).__name__}",
            expected="the network itself",
            remedy="linearize what this returns",
        )
    if not isinstance(curvature, Curvature):
        raise InputError(
            f"curvature is {type(curvature).__name__}",
            expected="a Curvature that can be inverted",
            remedy='make one with linnet.curvature(model, data, likelihood, structure="kfac")',
        )
    network: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    _check_fits(dict(network.named_parameters()), curvature.function.theta)
    return network


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
