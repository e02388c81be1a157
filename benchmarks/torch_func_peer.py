"""The standard ways to compute an empirical tangent kernel with torch.func, written from the mathematics.

Novak, Sohl-Dickstein and Schoenholz, "Fast finite width neural tangent kernel" (2022), sections 3.2 and
3.3: Jacobian contraction forms J(x1) and J(x2) and multiplies them; NTK-vector products apply J(x1)
J(x2)^T to the unit vectors of the output space.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

Parameters = dict[str, torch.Tensor]


class TorchFunctionKernel:
    """Kernel (N, C, M, C) of all parameters of a module, by torch.func alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters: Parameters = {name: value.detach() for name, value in model.named_parameters()}

    def one(self, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
        """Outputs (C,) of one example."""
        output: torch.Tensor = functional_call(self.model, parameters, (x.unsqueeze(0),))
        return output.squeeze(0)

    def jacobian(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One (N, C, size) block for every parameter."""
        blocks = vmap(jacrev(self.one), (None, 0))(self.parameters, x)
        return [block.flatten(2) for block in blocks.values()]

    def by_contraction(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        """K = sum over parameters of J1 J2^T."""
        pairs = zip(self.jacobian(x1), self.jacobian(x2), strict=True)
        return torch.stack([torch.einsum("nap,mbp->namb", left, right) for left, right in pairs]).sum(0)

    def by_products(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        """K, one column a unit vector: K e = J1 (J2^T e)."""

        def block(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            def at_first(parameters: Parameters) -> torch.Tensor:
                return self.one(parameters, first)

            def at_second(parameters: Parameters) -> torch.Tensor:
                return self.one(parameters, second)

            output, pull_back = vjp(at_second, self.parameters)

            def column(unit: torch.Tensor) -> torch.Tensor:
                (tangent,) = pull_back(unit)
                result: torch.Tensor = jvp(at_first, (self.parameters,), (tangent,))[1]
                return result

            columns = vmap(column)(torch.eye(output.shape[0], dtype=output.dtype))
            return columns.transpose(0, 1)

        rows = vmap(vmap(block, (None, 0)), (0, None))(x1, x2)
        return rows.permute(0, 2, 1, 3)
