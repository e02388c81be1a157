"""An adapted network in its weights: predictions without the training samples.

    f_c(x) = φ(x)ᵀ W_c + b_c + Σ_h J_h(x) δ_hc,        δ_hc = w/(H m_body) Σ_i J_h(x_i)ᵀ β_ic

A prediction costs the features and the derivatives of x alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from linnet.linear.directions import Directions
from linnet.linear.dual import DualSystem
from linnet.memory import Plan
from linnet.nested.prior import Prior
from linnet.nested.search import BIAS
from linnet.tangent.batch import Inputs
from linnet.tangent.forward_mode import Params


class Weights:
    """The linear layer of an adapted network, and the directions that the layers below it move along."""

    # phi (N, D)

    def __init__(self, prior: Prior, train: Inputs, phi: Tensor, system: DualSystem) -> None:
        self._prior = prior
        features, mixture, beta = prior.features, prior.mixture, system.beta.double()
        self.weight = (1 - mixture.weight) / mixture.head * (beta.T @ phi)
        self.bias = BIAS * beta.sum(0) - self.weight @ prior.center.double()
        self.directions: Directions | None = None
        if mixture.weight:
            scale = mixture.weight / (features.heads * mixture.body)
            self.directions = Directions(features.function, features.heads, train, beta, scale, prior.memory)

    @staticmethod
    def plan(prior: Prior, outputs: int, copies: Sequence[str] = ()) -> Plan:
        """The memory of the directions."""
        features = prior.features
        heads = features.heads if prior.mixture.weight else 0
        return Directions.plan(features.function, heads, outputs, prior.memory, copies)

    def outputs(self, x: Inputs) -> Tensor:
        """f(x)."""
        mean = self._prior.features.phi(x) @ self.weight.T + self.bias
        return mean if self.directions is None else mean + self.directions.moved(x)

    def by_output(self) -> list[Params]:
        """The directions by parameter name, for each output c one head h after another."""
        return [] if self.directions is None else self.directions.by_output()
