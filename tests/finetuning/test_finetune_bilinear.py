"""Square-root bilinear pooling: against plain matrix square roots, and linearized exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, ModelError
from linnet.finetuning.bilinear import (
    Bilinear,
    BilinearNetwork,
    SquareRootPooling,
    eigen_root,
    newton_schulz_root,
    upper_triangle,
    with_bilinear_head,
)
from tests.fitting.problems import near
from tests.refusals import refused


def spd(values: list[float], seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64))
    return (q * torch.tensor(values, dtype=torch.float64)) @ q.T


SPECTRA = {"distinct": [4.0, 2.0, 1.0, 0.5], "repeated": [2.0, 2.0, 1.0, 1.0], "equal": [1.0] * 4}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("root", [eigen_root, lambda m: newton_schulz_root(m, 30)], ids=["eigen", "schulz"])
def test_roots_and_their_derivatives(root, spectrum: str) -> None:  # type: ignore[no-untyped-def]
    matrix, direction = spd(SPECTRA[spectrum]), spd([1.0, -2.0, 0.5, 3.0], seed=1)
    value, tangent = torch.func.jvp(root, (matrix,), (direction,))
    near(value @ value, matrix, 1e-9)
    # √Σ D + D √Σ = E, solved as one linear system
    eye = torch.eye(4, dtype=torch.float64)
    system = torch.kron(value, eye) + torch.kron(eye, value)
    near(tangent, torch.linalg.solve(system, direction.reshape(-1)).reshape(4, 4), 1e-8)
    cotangent = spd([1.0, 0.3, -1.0, 2.0], seed=2)
    _, pull = torch.func.vjp(root, matrix)
    near((pull(cotangent)[0] * direction).sum()[None], (cotangent * tangent).sum()[None], 1e-8)


def test_equation_14_holds_where_matrices_commute_and_not_elsewhere() -> None:
    matrix = spd([4.0, 2.0, 1.0])
    half = 0.5 * torch.linalg.inv(eigen_root(matrix))
    _, along = torch.func.jvp(eigen_root, (matrix,), (matrix @ matrix,))
    near(along, half @ matrix @ matrix)
    other = spd([1.0, -1.0, 0.5], seed=3)
    _, across = torch.func.jvp(eigen_root, (matrix,), (other,))
    assert (across - half @ other).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["newton-schulz", "eigen"])
def test_pooling_is_the_root_of_the_covariance(kind: str) -> None:
    z = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    pool = SquareRootPooling(kind, iterations=40, eps=1e-12)
    for vector, example in zip(pool(z), z, strict=True):
        rows = example.flatten(1).T
        s = len(rows)
        a = (torch.eye(s) - torch.ones(s, s) / s).double() / s
        values, vectors = torch.linalg.eigh(rows.T @ a @ rows)  # eq. 13
        wanted = (vectors * values.sqrt()) @ vectors.T
        near(vector, upper_triangle(wanted[None])[0], 1e-6)
        near(vector.norm()[None], wanted.norm()[None], 1e-6)


@pytest.mark.parametrize("kind", ["newton-schulz", "eigen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stable_where_the_covariance_is_singular(kind: str, dtype: torch.dtype) -> None:
    maps = [torch.randn(2, 16, 2, 2, dtype=dtype), torch.zeros(1, 4, 3, 3, dtype=dtype)]
    for z in [*maps, 1e4 * maps[0], 1e-6 * maps[0]]:
        z = z.clone()
        z.requires_grad_()
        value = SquareRootPooling(kind, iterations=20)(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


class Net(nn.Module):
    """Convolutions, a pooling spelled in one of several ways, a linear layer."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.conv, self.spelling = nn.Conv2d(1, 4, 3), spelling
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.conv(x))
        if self.spelling == "mean":
            return self.fc(z.mean((2, 3)))
        if self.spelling == "module":
            return self.fc(self.pool(z).flatten(1))
        if self.spelling == "avg_pool2d":
            return self.fc(F.avg_pool2d(z, z.shape[-1]).view(len(z), -1))
        gate = z.mean((2, 3), keepdim=True).sigmoid()  # a pooling on the way, as in squeeze and excitation
        return self.fc(F.adaptive_avg_pool2d(z * gate, (1, 1))[:, :, 0, 0])


@pytest.mark.parametrize("kind", ["newton-schulz", "eigen"])
@pytest.mark.parametrize("spelling", ["mean", "module", "avg_pool2d", "gated"])
@pytest.mark.thinned(2)
def test_any_spelling_of_the_pooling_is_found_and_linearized_exactly(spelling: str, kind: str) -> None:
    model = Net(spelling).double()
    x, y = torch.randn(9, 1, 7, 7, dtype=torch.float64), torch.arange(9) % 3
    before = model(x)
    network = with_bilinear_head(model, 3, (x, y), Bilinear(root=kind))
    assert isinstance(network, BilinearNetwork)
    torch.testing.assert_close(model(x), before)
    z = torch.tanh(model.conv(x))
    z = z * z.mean((2, 3), keepdim=True).sigmoid() if spelling == "gated" else z
    near(network(x), network.head(SquareRootPooling(kind)(z)).detach())
    lin = linnet.linearize(network)
    v = {name: torch.randn_like(t) for name, t in lin.delta.items()}
    step = 1e-5
    base = {n: p.detach() for n, p in network.named_parameters()}
    up, down = (
        torch.func.functional_call(network, {n: p + s * v[n] for n, p in base.items()}, (x,))
        for s in (step, -step)
    )
    near(lin.jvp(x, v), ((up - down) / (2 * step)).detach(), 1e-6)
    j = lin.jacobian(x).flatten(0, 1)
    near(lin.kernel(x).reshape(len(j), -1), j @ j.T, 1e-8)
    lin(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lin.parameters())


def test_fewer_channels_are_the_principal_ones() -> None:
    model, x, y = Net("mean").double(), torch.randn(9, 1, 7, 7, dtype=torch.float64), torch.arange(9) % 3
    network = with_bilinear_head(model, 3, (x, y), Bilinear(channels=2))
    assert network.head.in_features == 3
    weight = network.reduce.weight[:, :, 0, 0]
    near(weight @ weight.T, torch.eye(2, dtype=torch.float64), 1e-9)
    z = torch.tanh(model.conv(x)).flatten(2)
    z = z - z.mean(2, keepdim=True)
    total = (z @ z.transpose(1, 2)).sum(0)
    kept = (weight @ total @ weight.T).diagonal().sum()
    near(kept[None], torch.linalg.eigvalsh(total)[-2:].sum()[None], 1e-9)


def test_the_map_can_be_named() -> None:
    model, x, y = Net("mean"), torch.randn(6, 1, 7, 7), torch.arange(6) % 2
    network = with_bilinear_head(model, 2, (x, y), Bilinear(layer="conv"))
    assert torch.equal(network.maps(x), model.conv(x))


def test_bad_input() -> None:
    x, y = torch.randn(6, 1, 7, 7), torch.arange(6) % 2
    refused(InputError, lambda: SquareRootPooling("svd"), "root=")
    refused(InputError, lambda: SquareRootPooling(iterations=0), "iterations=")
    refused(InputError, lambda: SquareRootPooling(eps=0.0), "eps=")
    refused(InputError, lambda: SquareRootPooling()(torch.ones(2, 3, 1, 1)), "(2, 3, 1, 1)")
    refused(InputError, lambda: with_bilinear_head("net", 2, (x, y)), "model")
    refused(
        InputError, lambda: with_bilinear_head(Net("mean"), 2, (x, y), Bilinear(channels=9)), "channels=9"
    )
    refused(InputError, lambda: with_bilinear_head(Net("mean"), 2, (x, y), Bilinear(layer="conv9")), "layer=")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(49, 4), nn.ReLU(), nn.Linear(4, 3))
    refused(ModelError, lambda: with_bilinear_head(flat, 2, (x, y)), "layer=")
