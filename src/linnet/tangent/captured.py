"""A captured batch: the uses of every parameter with their inputs and output gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from linnet.tangent.forward_mode import Params
from linnet.tangent.rules import Use, example_row, pull_back, use_rows

Form = Literal["full", "trace", "diagonal", "sum"]


@dataclass(eq=False)
class Captured:
    """One batch, differentiated."""

    n: int  # number of examples
    outputs: Tensor  # f₀(x), (N, C)
    uses: list[Use]  # uses with their gradients g, those that the plan takes
    leaves: Params  # the tracked parameters
    exact: Params  # per-example gradients (N, K, *shape) of the parameters outside every rule
    k: int  # number of cotangents

    @cached_property
    def _by_parameter(self) -> dict[str, list[Use]]:
        """The uses of each parameter, sorted once."""
        found: dict[str, list[Use]] = {}
        for use in self.uses:
            for name in use.sources:
                found.setdefault(name, []).append(use)
        return found

    def by_parameter(self) -> dict[str, list[Use]]:
        """The uses of each parameter."""
        return self._by_parameter

    def rows(self, name: str, only: int | None = None) -> Tensor:
        """Gradient of every example, or of one alone, and cotangent in one parameter, (N, K, *shape)."""
        if name in self.exact:
            return self.exact[name] if only is None else self.exact[name][only : only + 1]
        leaf = self.leaves[name]
        total: Tensor | None = None
        for use in self._by_parameter.get(name, []):
            part = use_rows(use, self.n) if only is None else example_row(use, self.n, only)
            part = part if use.direct else pull_back(part, use.target, leaf)
            total = part if total is None else total + part
        if total is None:  # the gradient vanishes here
            return leaf.new_zeros(self.n if only is None else 1, self.k, *leaf.shape)
        return total
