"""The past's precision before the optimizer of the next task."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import linnet
from tests.zoo import assert_near


def stream(structure: str) -> tuple[nn.Module, linnet.continual.OnlineLaplace]:
    """A network that two tasks have been learned with."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    method = linnet.continual.OnlineLaplace(net, linnet.likelihoods.Categorical(), structure, strength=3.0)
    for _ in range(2):
        method.consolidate((torch.randn(12, 3).double(), torch.randint(2, (12,))))
    return net, method


@pytest.mark.parametrize("structure", ["full", "kfac", "ekfac", "diagonal"])
def test_gradients_are_divided_by_the_damped_precision(structure: str) -> None:
    net, method = stream(structure)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    method.preconditioner(examples=40, damping=0.5).attach(optimizer)
    grads = [torch.randn_like(p) for p in net.parameters()]
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    for p, g in zip(net.parameters(), grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    flat, precision = torch.cat([g.flatten() for g in grads]), method.precision().dense()
    damped = precision / 40 + 0.5 * torch.eye(len(flat), dtype=torch.float64)
    want = 0.5 * torch.linalg.solve(damped, flat)
    assert_near(before - nn.utils.parameters_to_vector(net.parameters()).detach(), want)
    assert want.norm() < flat.norm()


def test_the_penalty_has_no_steep_direction_left() -> None:
    _, method = stream("kfac")
    steep = torch.linalg.eigvalsh(method.precision().dense() / 2)[-1]
    left = method.preconditioner(examples=2, damping=1e-3)
    product = torch.stack([left.multiply(row) for row in method.precision().dense() / 2])
    assert float(torch.linalg.eigvals(product).real.max()) <= 1e-3 < float(steep)


def test_that_of_the_next_task_takes_the_place_of_the_last_ones() -> None:
    net, method = stream("kfac")
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters()}, {"params": net[2].parameters()}],
        lr=1.0,
    )
    old = method.preconditioner(examples=40, damping=0.5).attach(optimizer)
    method.consolidate((torch.randn(12, 3).double(), torch.randint(2, (12,))))
    new = method.preconditioner(examples=12, damping=0.5)
    handle = new.attach(optimizer)
    grads = [torch.randn_like(p) for p in net.parameters()]
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()

    def moved() -> torch.Tensor:
        for p, g in zip(net.parameters(), grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        return before - nn.utils.parameters_to_vector(net.parameters()).detach()

    flat = torch.cat([g.flatten() for g in grads])
    assert_near(moved(), new.multiply(flat))
    old.remove()  # gone already
    nn.utils.vector_to_parameters(before.clone(), net.parameters())
    assert_near(moved(), new.multiply(flat))
    handle.remove()
    nn.utils.vector_to_parameters(before.clone(), net.parameters())
    assert_near(moved(), flat)
