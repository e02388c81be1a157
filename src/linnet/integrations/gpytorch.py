"""The tangent kernel as a GPyTorch kernel; needs ``pip install 'linnet-torch[gp]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.integrations import classes
from linnet.tangent.batch import check_finite
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.gram import gram, own_kernels
from linnet.tangent.linearized import Linearized
from linnet.tangent.selection import Selector

if TYPE_CHECKING:
    TangentKernel: Any


class _TangentKernel:
    """K(x, x') = J(x) J(x')ᵀ of a trained network, without a hyper-parameter of its own."""

    # Scale it with `gpytorch.kernels.ScaleKernel`, whose output scale is 1/λ, and use the network as the
    # mean. With C outputs rows are those of example 1's outputs first, then example 2's, the layout of
    # `MultitaskMultivariateNormal`. Exact, tile by tile; not differentiable in x.

    _function: Functional
    is_stationary = False
    has_lengthscale = False

    def __init__(
        self,
        model: nn.Module,
        params: Selector = None,
        output: OutputAdapter = None,
        memory: str | int | None = None,
    ) -> None:
        super().__init__()
        linearized = isinstance(model, Linearized)
        function = model.function if linearized else Functional(model, params, output)
        object.__setattr__(self, "_function", function)
        self._memory = memory
        self._outputs = 0

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """C."""
        if not self._outputs:
            one = x1.reshape(-1, x1.shape[-1])[:1].to(self._function.dtype)
            self._outputs = self._function.check_runs(one).numel()
        return self._outputs

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        """The kernel (..., N·C, M·C), or its diagonal (..., N·C)."""
        if last_dim_is_batch:
            raise InputError("last_dim_is_batch=True", "all features of an example together", "leave it out")
        if x1.ndim > 2 or x2.ndim > 2:
            batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
            left = x1.expand(*batch, *x1.shape[-2:]).flatten(0, -3)
            right = x2.expand(*batch, *x2.shape[-2:]).flatten(0, -3)
            each = [self.forward(a, b, diag) for a, b in zip(left, right, strict=True)]
            return torch.stack(each).reshape(*batch, *each[0].shape)
        self.num_outputs_per_input(x1, x2)
        function, dtype = self._function, x1.dtype
        a, b = (t.detach().to(device=function.device, dtype=function.dtype) for t in (x1, x2))
        check_finite(a, "x1")
        same = a.shape == b.shape and torch.equal(a, b)
        if diag and same:
            return own_kernels(function, a, self._memory).diagonal(dim1=1, dim2=2).flatten().to(dtype)
        found = gram(function, a, None if same else b, form="full", memory=self._memory)
        matrix = found.reshape(a.shape[0] * self._outputs, -1).to(dtype)
        return matrix.diagonal() if diag else matrix


def _bases() -> tuple[type, ...]:
    """GPyTorch's kernel."""
    from gpytorch.kernels import Kernel

    return (Kernel,)


__getattr__ = classes(__name__, "gp", "gpytorch", {"TangentKernel": (_TangentKernel, _bases)})
