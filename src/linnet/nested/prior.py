"""The kernel of an adapted network between any two samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from linnet.nested.features import Features
from linnet.nested.search import Mixture
from linnet.tangent.batch import Inputs


@dataclass(frozen=True, eq=False)
class Prior:
    """Network, features and mixture of a kernel, fixed once the fit is made."""

    features: Features  # the network
    center: Tensor  # mean of the features over the samples that the fit was made on, (D,)
    mixture: Mixture  # how the kernels are added
    memory: str | int | None = None  # budget of kernels formed later

    def phi(self, x: Inputs) -> Tensor:
        """φ̃(x), (N, D)."""
        return self.features.phi(x) - self.center

    def cross(self, x: Inputs, train: Inputs, phi_train: Tensor) -> Tensor:
        """K(x, X), (T, N)."""
        body = self.features.body(x, train, self.memory) if self.mixture.weight else None
        return self.mixture(self.phi(x) @ phi_train.T, body)

    def cross_and_own(self, x: Inputs, train: Inputs, phi_train: Tensor) -> tuple[Tensor, Tensor]:
        """K(x, X), (T, N), and K(x_i, x_i), (T,), with one pass over x."""
        phi = self.phi(x)
        body: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if self.mixture.weight:
            body = self.features.body_and_own(x, train, self.memory)
        return self.mixture(phi @ phi_train.T, body[0]), self.mixture(phi.square().sum(1), body[1])

    def own(self, x: Inputs) -> Tensor:
        """K(x_i, x_i), (T,)."""
        body = self.features.body_own(x, self.memory) if self.mixture.weight else None
        return self.mixture(self.phi(x).square().sum(1), body)

    def square(self, x: Inputs, phi: Tensor) -> Tensor:
        """K(X, X), (N, N)."""
        body = self.features.body(x, None, self.memory) if self.mixture.weight else None
        return self.mixture(phi @ phi.T, body)
