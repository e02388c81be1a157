"""The settings of torch that derivatives need, and the kernels that they allow."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import linnet
from linnet.tangent.modes import differentiable_kernels
from linnet.tangent.trace import trace
from tests.zoo_sequences import CausalAttention


class OlderBackend:
    """torch.backends.mkldnn as it is in torch 2.6, without allow_tf32."""

    def __init__(self) -> None:
        self.enabled, self.deterministic = True, True

    @contextlib.contextmanager
    def flags(self, enabled: bool = False, deterministic: bool = False) -> Iterator[None]:
        before = self.enabled, self.deterministic
        self.enabled, self.deterministic = enabled, deterministic
        yield
        self.enabled, self.deterministic = before


def test_recurrent_layers_on_the_lowest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = OlderBackend()
    monkeypatch.setattr(torch.backends, "mkldnn", backend)
    with differentiable_kernels(recurrent=True):
        assert (backend.enabled, backend.deterministic) == (False, True)
    assert (backend.enabled, backend.deterministic) == (True, True)


def kernels_of(edge: Any) -> set[str]:
    """Names of the nodes before an edge of a graph of autograd."""
    found: set[str] = set()
    open_ = [edge]
    while open_:
        node = open_.pop()
        if node is not None and node not in found:
            found.add(node.name())
            open_.extend(before for before, _ in node.next_functions)
    return found


def test_attention_differentiated_once_takes_fused_kernels() -> None:
    torch.manual_seed(0)
    lin = linnet.linearize(CausalAttention())
    x = torch.randint(10, (4, 32))
    run = trace(lin.function, x)
    assert any("Flash" in name for name in kernels_of(run.outputs.grad_fn))
    with torch.enable_grad():
        leaves = {name: t.detach().requires_grad_() for name, t in lin.function.theta.items()}
        assert not any("Flash" in name for name in kernels_of(lin.function.flat(leaves, x).grad_fn))
    exact = copy.deepcopy(lin.model).double()
    with sdpa_kernel(SDPBackend.MATH):
        rows = torch.func.jacrev(lambda p: torch.func.functional_call(exact, p, (x,)))(
            dict(exact.named_parameters())
        )
    jacobian = torch.cat([rows[name].flatten(2) for name in lin.parameter_names], 2)
    kernel = torch.einsum("ncp,mdp->ncmd", jacobian, jacobian)
    assert torch.allclose(lin.kernel(x).double(), kernel, rtol=1e-4, atol=1e-5)
    u = torch.randn(4, 4)
    pulled = lin.vjp(x, u, like="flat")
    assert isinstance(pulled, Tensor)
    assert torch.allclose(pulled.double(), torch.einsum("nc,ncp->p", u.double(), jacobian), atol=1e-5)
    pushed = lin.jvp(x, pulled)  # forward mode, which the fused kernels do not have
    assert torch.allclose(pushed.double(), jacobian @ pulled.double(), rtol=1e-4, atol=1e-4)
