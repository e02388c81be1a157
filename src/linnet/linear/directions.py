"""A kernel that all outputs share, in weights: one direction for each derivative and each output.

    Σ_i s Σ_h J_h(x) J_h(x_i)ᵀ β_ic = Σ_h J_h(x) δ_hc,        δ_hc = s Σ_i J_h(x_i)ᵀ β_ic

The kernel takes the derivatives of all N training samples again for every prediction. The H·C directions δ
take them once; a prediction then costs the derivatives of x alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linnet.linear.formed_rows import FormedRows
from linnet.memory import Plan, parse_bytes
from linnet.tangent.batch import Inputs
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.modes import in_exact_mode


class Directions:
    """The directions δ that the outputs of a shared kernel move along."""

    # beta (N, C)

    @in_exact_mode
    def __init__(
        self,
        function: Functional,
        heads: int,
        train: Inputs,
        beta: Tensor,
        scale: float,
        memory: str | int | None = None,
    ) -> None:
        self.function, self.heads, self.memory = function, heads, memory
        scaled = (scale * beta).to(function.dtype)
        self.values = scaled.new_zeros(heads, function.space.dim, beta.shape[1])
        for place, rows in self._rows(train):
            self.values.baddbmm_(rows.permute(1, 2, 0), scaled[place].expand(heads, -1, -1))

    @staticmethod
    def plan(
        function: Functional, heads: int, outputs: int, memory: str | int | None, copies: Sequence[str] = ()
    ) -> Plan:
        """The memory of the directions."""
        size = heads * outputs * function.space.dim * function.dtype.itemsize
        items = tuple((item, size) for item in ("directions", *copies))
        name = f"{heads * outputs} directions of {function.space.dim} weights"
        return Plan(name, parse_bytes(memory, function.device), items)

    @in_exact_mode
    def moved(self, x: Inputs) -> Tensor:
        """Σ_h J_h(x) δ_hc."""
        parts = [(rows.transpose(0, 1) @ self.values).double().sum(0) for _, rows in self._rows(x)]
        return torch.cat(parts)

    def by_output(self) -> list[Params]:
        """The directions by parameter name, for each output c one h after another."""
        columns = self.values.permute(2, 0, 1).flatten(0, 1)
        space = self.function.space
        return [{name: t.clone() for name, t in space.to_params(column).items()} for column in columns]

    def _rows(self, x: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """The place of n examples, and J_h of each, (n, H, P)."""
        for place, rows in FormedRows(self.function, x, self.heads, self.memory, keep=False):
            yield place, rows.view(-1, self.heads, rows.shape[1])
