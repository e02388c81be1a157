"""Networks that differentiate themselves in their forward pass: forces, differential equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.likelihoods import Gaussian
from tests.fitting.problems import solver_of
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.zoo import assert_near


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = real(6, 4), real(6, 4, seed=1)


class Energy(nn.Module):
    """A scalar for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Force(Energy):
    """Its gradient in the inputs, by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_() if not x.requires_grad else x
            (found,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return found


class FunctionalForce(Energy):
    """The same by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda z: self.energy(z).sum())(x)
        return found


class Residual(Force):
    """u' + u: weights are read in operations that are seen and in a gradient that is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.energy(x)


class Late(Force):
    """Only the last examples have a force."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x[:, :1] > 5) + x


NETWORKS = (Force, FunctionalForce, Residual)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("kind", NETWORKS)
def test_derivatives_are_those_of_the_definition(kind: type[nn.Module]) -> None:
    net = made(kind)
    j, lin = jacobian_oracle(made(Force) if kind is FunctionalForce else net, X), linnet.linearize(net)
    v = real(j.shape[2], seed=2)
    assert_near(lin.kernel(X), kernel_oracle(j))
    assert_near(lin.jacobian(X), j)
    assert_near(lin.jvp(X, v), j @ v)
    assert_near(lin.vjp(X, Y, like="flat"), torch.einsum("ncp,nc->p", j, Y))
    report = linnet.preflight(net, X)
    assert report.ok
    assert any(p.exact for p in report.parameters)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("solver", ["auto", "dual", "cg"])
@pytest.mark.thinned(3)
def test_fits_are_those_of_the_dense_problem(kind: type[nn.Module], solver: str) -> None:
    net = made(kind)
    j = jacobian_oracle(made(Force) if kind is FunctionalForce else net, X).flatten(0, 1)
    f0 = net(X).detach().flatten()
    delta = torch.linalg.solve(j.T @ j + torch.eye(j.shape[1]), j.T @ (Y.flatten() - f0))
    fit = linnet.fit(linnet.linearize(net), (X, Y), ridge=1.0, solver=solver_of(solver, tolerance=1e-12))
    assert_near(fit.predict(X).flatten(), f0 + j @ delta, 1e-4 if solver == "auto" else 1e-8)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_curvature_is_dense_algebra(kind: type[nn.Module]) -> None:
    net = made(kind)
    j = jacobian_oracle(made(Force) if kind is FunctionalForce else net, X).flatten(0, 1)
    full = linnet.curvature(net, (X, Y), Gaussian(), structure="full")
    assert_near(full.mm(torch.eye(j.shape[1]).double()) / 6, j.T @ j / 6)


@pytest.mark.parametrize("n", [12, 40])
def test_a_gradient_that_the_first_examples_do_not_have(n: int) -> None:
    net, x = made(Late), real(n, 4)
    x[11:, 0] = 6.0
    j = jacobian_oracle(net, x)
    assert bool(j[11:].any())
    assert not bool(j[:11].any())
    lin = linnet.linearize(net)
    assert_near(lin.kernel(x), kernel_oracle(j))
