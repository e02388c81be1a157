"""The settings of torch that derivatives need, and the kernels that they allow."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from math import inf
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import linnet
from linnet.likelihoods import Categorical
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


class PaddedOnTheLeft(nn.Module):
    """Causal attention over tokens of which the first may be padding, which sees nothing."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.tokens, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        length = ids.shape[1]
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keep = (ids != 0)[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        if self.style == "written":
            scores = (q @ k.mT / 2).masked_fill(~keep, -1e9).softmax(-1)
            mixed = (scores * keep.any(-1, keepdim=True)) @ v
        elif self.style == "positional":
            mixed = scaled_dot_product_attention(q, k, v, keep)
        else:
            mask = (
                keep
                if self.style == "bool"
                else torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, -inf)
            )
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return cast(Tensor, self.out((x + mixed.transpose(1, 2).flatten(-2))[:, -2:].mean(1)))


@pytest.mark.parametrize(
    ("style", "exports"),
    [
        ("bool", False),
        ("float", False),
        ("positional", False),
        pytest.param("bool", True, marks=pytest.mark.long),
    ],
)
@pytest.mark.thinned(2)
def test_rows_that_see_nothing(style: str, exports: bool) -> None:
    torch.manual_seed(0)
    net, written = PaddedOnTheLeft(style).double(), PaddedOnTheLeft("written").double()
    written.load_state_dict(net.state_dict())
    x, y = torch.randint(1, 11, (6, 5)), torch.randint(3, (6,))
    x[:3, :2] = 0
    x[3, :4] = 0
    direction = torch.randn(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    products, gradients, predictions, variances = [], [], [], []
    for model in (net, written):
        products.append(linnet.curvature(model, (x, y), Categorical(), structure="matrix-free") @ direction)
        lin = linnet.linearize(model)
        lin(x).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in lin.parameters() if p.grad is not None]))
        lin = linnet.linearize(model)
        predictions.append(linnet.fit(lin, (x, y), loss="cross-entropy", ridge=1.0, solver="cg").predict(x))
        fit = linnet.fit(lin, (x, torch.eye(3, dtype=torch.float64)[y]), ridge=1.0)
        variances.append(fit.predictive(x).variance)
        if exports and model is net:  # an export takes ten seconds
            variances.append(fit.export(x, variance=True)(x)[1])
    for found in (products, gradients, predictions):
        torch.testing.assert_close(found[0], found[1])
    for found in variances[1:]:
        torch.testing.assert_close(found, variances[0])
