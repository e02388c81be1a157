"""What an adapted network is linear in: an intercept, the features of its last layer, the layers below."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from linnet.linear.features import Constant, Explicit, Features, Sum
from linnet.nested.features import RandomHeads
from linnet.nested.search import BIAS, Mixture


@dataclass(frozen=True, eq=False)
class Prior:
    """Network and mixture of a kernel, fixed once the fit is made."""

    network: RandomHeads
    center: Tensor  # mean of the features over the samples that the fit was made on, (D,)
    mixture: Mixture  # how the kernels are added

    @property
    def features(self) -> Sum:
        """κ + (1 − w)/m_head K_head + w/m_body K_body."""
        mixed, center = self.mixture, self.center.double()
        head: Features = Explicit(self.network.phi, center)
        terms = [(BIAS, Constant(center.device)), ((1 - mixed.weight) / mixed.head, head)]
        if mixed.weight:
            terms.append((mixed.weight / mixed.body, self.network.body))
        return Sum(tuple(terms))
