"""An adapted network in its weights: predictions without the training samples.

    f_c(x) = φ(x)ᵀ W_c + b_c + Σ_h J_h(x) δ_hc,        δ_hc = w/(H m_body) Σ_i J_h(x_i)ᵀ β_ic

The kernel K(x, X) takes the derivatives of all N training samples again for every prediction. The H·C
directions δ take them once; a prediction then costs the derivatives of x alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linnet.linear.dual import DualSystem
from linnet.linear.formed_rows import FormedRows
from linnet.memory import Plan, parse_bytes
from linnet.nested.prior import Prior
from linnet.nested.search import BIAS
from linnet.tangent.batch import Inputs
from linnet.tangent.forward_mode import Params

SHARE = 0.25  # of the memory budget that directions kept for predictions may take


class Weights:
    """The linear layer of an adapted network, and the directions that the layers below it move along.

    Args:
        prior: The kernel.
        train: Training inputs, N examples.
        phi: φ̃ of the training examples, (N, D).
        system: The solved equations.

    Attributes:
        weight: W, (C, D), float64.
        bias: b, (C,), float64.
        directions: δ, (H, P, C), in the network's type; ``None`` where the lower layers have no weight.
    """

    def __init__(self, prior: Prior, train: Inputs, phi: Tensor, system: DualSystem) -> None:
        self._prior = prior
        mixture, beta = prior.mixture, system.beta.double()
        self.weight = (1 - mixture.weight) / mixture.head * (phi.T @ beta).T
        self.bias = BIAS * beta.sum(0) - self.weight @ prior.center.double()
        self.directions = self._summed(train, beta) if mixture.weight else None

    @staticmethod
    def plan(prior: Prior, outputs: int, copies: Sequence[str] = ()) -> Plan:
        """The memory of the directions.

        Args:
            prior: The kernel.
            outputs: C.
            copies: What copies of them are for.

        Returns:
            Bytes, item by item.
        """
        function, count = prior.features.function, prior.features.heads * outputs
        size = count * function.space.dim * function.dtype.itemsize if prior.mixture.weight else 0
        items = tuple((name, size) for name in ("directions", *copies))
        budget = parse_bytes(prior.memory, function.device)
        return Plan(f"{count} directions of {function.space.dim} weights", budget, items)

    @classmethod
    def affordable(cls, prior: Prior, outputs: int) -> bool:
        """Whether the directions take so little of the budget that predictions keep them.

        Args:
            prior: The kernel.
            outputs: C.

        Returns:
            Whether they do.
        """
        plan = cls.plan(prior, outputs)
        return plan.peak <= SHARE * plan.budget

    def outputs(self, x: Inputs) -> Tensor:
        """f(x).

        Args:
            x: T examples.

        Returns:
            (T, C), float64.
        """
        mean = self._prior.features.phi(x) @ self.weight.T + self.bias
        if self.directions is None:
            return mean
        moved = [(rows.transpose(0, 1) @ self.directions).double().sum(0) for _, rows in self._rows(x)]
        return mean + torch.cat(moved)

    def by_output(self) -> list[Params]:
        """The directions by parameter name, for each output c one head h after another."""
        if self.directions is None:
            return []
        space = self._prior.features.function.space
        columns = self.directions.permute(2, 0, 1).flatten(0, 1)
        return [{name: t.clone() for name, t in space.to_params(column).items()} for column in columns]

    def _summed(self, train: Inputs, beta: Tensor) -> Tensor:
        """δ, (H, P, C)."""
        features, mixture = self._prior.features, self._prior.mixture
        function, (_, c) = features.function, beta.shape
        total = beta.new_zeros(features.heads, function.space.dim, c, dtype=function.dtype)
        scaled = (beta * (mixture.weight / (features.heads * mixture.body))).to(total)
        for place, rows in self._rows(train):
            total.baddbmm_(rows.permute(1, 2, 0), scaled[place].expand(features.heads, -1, -1))
        return total

    def _rows(self, x: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """The place of n examples, and J_h of each, (n, H, P)."""
        features = self._prior.features
        for place, rows in FormedRows(features.function, x, features.heads, self._prior.memory, keep=False):
            yield place, rows.view(-1, features.heads, rows.shape[1])
