"""Random networks: steps of optimizers and penalties against forgetting, against dense float64 algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.continual import EWC, OnlineLaplace, SynapticIntelligence
from linnet.optim import Damping, GaussNewton, IterativeLinearization
from tests.hostile.cases import (
    drawn,
    every_network,
    families,
    gauss_newton,
    labels,
    likelihood,
    near,
    nll,
    output_derivatives,
    ridge_solution,
    untouched,
)
from tests.hostile.random_networks import (
    Network,
    called,
    flat_gradient,
    frozen_copy,
    jacobian,
    outputs,
    tracked,
)

# what is drawn may end in a sigmoid, or have a layer that nothing depends on
pytestmark = pytest.mark.filterwarnings(
    "ignore:the network's outputs are",
    "ignore:the outputs do not depend on",
    "ignore:y is constant",
    "ignore:.*are copies of others",
    "ignore:.*have the inputs of others",
)


def weights(model: nn.Module) -> Tensor:
    """All parameters that are trained, copied."""
    return torch.cat([p.detach().reshape(-1) for p in tracked(model)])


def trainee(net: Network) -> nn.Module:
    """A copy to train, in evaluation mode, where a linearization and the network are the same function."""
    return frozen_copy(net.model)


def move(model: nn.Module, step: Tensor) -> None:
    """Displace the parameters."""
    start = 0
    with torch.no_grad():
        for p in tracked(model):
            p += step[start : start + p.numel()].view(p.shape)
            start += p.numel()


def exact_matrix(net: Network, model: nn.Module, family: str, x: Any, y: Tensor) -> Tensor:
    """Σ JᵀΛJ at the weights that a copy has now."""
    return gauss_newton(jacobian(model, x), output_derivatives(net, family, outputs(model, x), y)[1])


# --- Gauss-Newton ---------------------------------------------------------------------------------

TAU, ZETA, DECAY = 0.3, 0.1, 0.05


@every_network
@pytest.mark.parametrize("structure", ["full", "block", "diagonal"])
@pytest.mark.thinned(2)
def test_gauss_newton_step(seed: int, structure: str) -> None:
    """The direction −(G̃ + (λ + ζ)I)⁻¹∇E, and α from the exact matrix, at two steps in a row."""
    with untouched(drawn(seed)) as net:
        family = families(net)[-1]
        model, y, given = trainee(net), labels(net, family), likelihood(net, family)
        fixed = Damping(tau=TAU, zeta=ZETA, tau_period=0, zeta_period=0, inversion="exact")
        optimizer = GaussNewton(model, given, structure, "exact", fixed, DECAY, average=0.5)
        mask = _mask(net, structure)
        average: Tensor | None = None
        for _ in range(2):
            theta = weights(model)
            G = exact_matrix(net, model, family, net.x, y) / net.n
            loss = nll(net, family, called(model, net.x), y) / net.n
            g = flat_gradient(loss, tracked(model)).detach() + DECAY * theta
            average = G if average is None else _averaged(average, G)
            eye = torch.eye(len(G), dtype=torch.float64)
            d = torch.linalg.solve(average * mask + (DECAY + ZETA) * eye, -g)
            C = G + (DECAY + TAU) * eye
            alpha = -(d @ g) / (d @ C @ d)
            report = optimizer.step(net.x, y)
            if report.rejected:
                return
            near(weights(model) - theta, alpha * d, share=1e-7)
            near(report.alpha, alpha, share=1e-7)
            near(report.model_reduction, alpha * (d @ g) / 2, share=1e-7)
            near(report.loss, loss)
            near(report.objective, loss + DECAY / 2 * theta @ theta)


def _averaged(before: Tensor, new: Tensor) -> Tensor:
    """The bias-free exponential average with decay ½ after two batches: (½ before + new) / 1½."""
    return (0.5 * before + new) / 1.5


def _mask(net: Network, structure: str) -> Tensor:
    """Ones where a structure keeps the matrix: all of it, its diagonal, or the blocks of layers.

    The blocks are those that the first batch shows at the first weights, which the average keeps: where a
    step has switched off every unit of a layer, its weight and bias would no longer be seen together.
    """
    size = net.j.shape[2]
    if structure == "full":
        return torch.ones(size, size, dtype=torch.float64)
    if structure == "diagonal":
        return torch.eye(size, dtype=torch.float64)
    found = linnet.curvature(net.model, (net.x, net.targets), likelihood(net, "gaussian"), "block")
    pieces = torch.arange(size).split([p.numel() for p in tracked(net.model)])
    places = dict(zip(net.names, pieces, strict=True))
    mask = torch.zeros(size, size, dtype=torch.float64)
    for part in found.parts:
        rows = torch.cat([places[name] for name in part.layer.names])
        mask[rows[:, None], rows] = 1.0
    return mask


# --- iterative linearization ----------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@every_network
def test_iterative_linearization(seed: int) -> None:
    """K = 1 is the plain loop to the bit, K = 2 and K = ∞ the loop on the dense linearization."""
    with untouched(drawn(seed)) as net:
        make = MAKERS["adam" if seed % 2 else "momentum"]

        def closure(module: nn.Module) -> Tensor:
            return (called(module, net.x) - net.targets).square().mean()

        model, plain = trainee(net), trainee(net)
        training, optimizer = IterativeLinearization(model, make, 1), make(tracked(plain))
        for _ in range(4):
            training.step(closure)
            optimizer.zero_grad()
            closure(plain).backward()
            optimizer.step()
        assert torch.equal(weights(model), weights(plain))
        for period in (2, None):
            model = trainee(net)
            training = IterativeLinearization(model, make, period)
            losses = [float(training.step(closure)) for _ in range(5)]
            wanted, theta = _dense_loop(net, make, period, 5)
            near(losses, wanted)
            near(weights(model), theta)


def _dense_loop(net: Network, make: Any, period: int | None, steps: int) -> tuple[list[float], Tensor]:
    """The same optimizer on the weights of f_s + J_s (θ − θ_s), tensor by tensor.

    As in a plain loop, a tensor that the network never reads has no gradient: optimizers leave it alone, and
    do not even let it decay.
    """
    theta = [nn.Parameter(p.detach().clone()) for p in tracked(net.model)]
    read = [g is not None for g in _gradients(net)]
    optimizer, losses, at = make(theta), [], trainee(net)
    for step in range(steps):
        flat = torch.cat([t.reshape(-1) for t in theta])
        if step == 0 or (period is not None and step % period == 0):
            at = trainee(net)
            move(at, flat.detach() - weights(at))
            f, j, anchor = outputs(at, net.x).flatten(1), jacobian(at, net.x), flat.detach().clone()
        loss = (f + j @ (flat - anchor) - net.targets.flatten(1)).square().mean()
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, theta)
        for t, g, counts in zip(theta, gradients, read, strict=True):
            t.grad = g if counts else None
        optimizer.step()
    return losses, torch.cat([t.detach().reshape(-1) for t in theta])


def _gradients(net: Network) -> tuple[Tensor | None, ...]:
    """Autograd's gradients of the sum of the outputs; None for parameters that are never read."""
    model = trainee(net)
    return torch.autograd.grad(called(model, net.x).sum(), tracked(model), allow_unused=True)


@every_network
def test_iterative_solutions(seed: int) -> None:
    with untouched(drawn(seed)) as net:
        model, rho = trainee(net), 0.5 * net.scale
        training = IterativeLinearization(model, None, period=1)
        theta = weights(model)
        for _ in range(2):
            at = trainee(net)
            move(at, theta - weights(at))
            f, j = outputs(at, net.x).flatten(1), jacobian(at, net.x)
            theta = theta + 0.5 * ridge_solution(j, net.targets.flatten(1) - f, rho)
            training.solve((net.x, net.targets), ridge=rho, learning_rate=0.5)
            near(weights(model), theta)


# --- penalties ------------------------------------------------------------------------------------


def check_penalty(model: nn.Module, method: Any, terms: list[tuple[Tensor, Tensor]], step: Tensor) -> None:
    """½ Σ (θ − μ)ᵀΛ(θ − μ) and its gradient, by both ways, at displaced weights; dividing is exact."""
    move(model, step)
    theta = weights(model)
    wanted = sum(0.5 * (theta - mu) @ precision @ (theta - mu) for mu, precision in terms)
    slope = sum(precision @ (theta - mu) for mu, precision in terms)
    near(method.penalty(), wanted)
    near(method.penalty(examples=4), wanted / 4)
    near(flat_gradient(method.penalty(), tracked(model)), slope)
    for p in model.parameters():
        p.grad = None
    near(method.add_grad_(), wanted)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in tracked(model)]
    near(torch.cat([g.reshape(-1) for g in found]), slope)
    move(model, -step)


@every_network
@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
@pytest.mark.thinned(2)
def test_laplace_over_two_tasks(seed: int, structure: str) -> None:
    with untouched(drawn(seed)) as net:
        family, prior, strength = families(net)[seed % 2], 0.4, 1.5
        model, y = trainee(net), labels(net, family)
        given = likelihood(net, family)
        method = OnlineLaplace(model, given, structure, prior, strength, "exact")
        near(method.penalty(), 0.0)
        clear = _clear(model, exact_matrix(net, model, family, net.x, y))
        step = clear * net.numbers((net.j.shape[2],), 7)
        curvature = torch.zeros(len(step), len(step), dtype=torch.float64)
        for x in (net.x, net.x_test):
            own = y if x is net.x else y[:1].expand(2, *y.shape[1:])
            curvature = curvature + strength * _task_matrix(net, model, family, (x, own), structure)
            reached = _reached(model, curvature)  # the prior holds what tasks say something about
            precision = curvature + prior * reached.diag()
            method.consolidate((x, own))
            check_penalty(model, method, [(weights(model), precision)], 0.2 * step)
            move(model, 0.1 * step)


def _clear(model: nn.Module, matrix: Tensor) -> Tensor:
    """Zero for parameters whose derivatives are rounding alone, as below a norm of one feature, else one."""
    pieces = matrix.diagonal().split([p.numel() for p in tracked(model)])
    least = 1e-20 * float(matrix.diagonal().max())
    return torch.cat([torch.full_like(p, float(not 0 < float(p.max()) < least)) for p in pieces])


def _reached(model: nn.Module, matrix: Tensor) -> Tensor:
    """One for every number of a parameter whose curvature is not all zero, else zero."""
    pieces = matrix.diagonal().split([p.numel() for p in tracked(model)])
    return torch.cat([torch.full_like(p, float((p != 0).any())) for p in pieces])


def _task_matrix(
    net: Network, model: nn.Module, family: str, data: tuple[Any, Tensor], structure: str
) -> Tensor:
    """The curvature of a task; Kronecker products are those that test_random_curvatures checks by hand."""
    if structure == "kfac":
        found: Tensor = linnet.curvature(model, data, likelihood(net, family), "kfac").dense()
        return found
    full = exact_matrix(net, model, family, *data)
    return full if structure == "full" else full.diagonal().diag()


@every_network
@pytest.mark.parametrize("expectation", ["exact", "empirical"])
@pytest.mark.thinned(2)
def test_elastic_weights_over_two_tasks(seed: int, expectation: str) -> None:
    with untouched(drawn(seed)) as net:
        family, strength = families(net)[-1], 3.0
        model, y = trainee(net), labels(net, family)
        given = likelihood(net, family)
        methods = {
            "offline": EWC(model, given, strength=strength, expectation=expectation),
            "online": EWC(model, given, "full", strength, "online", 0.9, expectation=expectation),
        }
        step = net.numbers((net.j.shape[2],), 7)
        terms: list[tuple[Tensor, Tensor]] = []
        running = torch.zeros(len(step), len(step), dtype=torch.float64)
        for x in (net.x, net.x_test):
            own = y if x is net.x else y[:1].expand(2, *y.shape[1:])
            j = jacobian(model, x)
            slopes, hessians = output_derivatives(net, family, outputs(model, x), own)
            rows = torch.einsum("nc,ncp->np", slopes, j)
            fisher = rows.T @ rows if expectation == "empirical" else gauss_newton(j, hessians)
            terms.append((weights(model), strength * fisher.diagonal().diag()))
            running = 0.9 * running + fisher
            for method in methods.values():
                method.consolidate((x, own))
            check_penalty(model, methods["offline"], terms, 0.2 * step)
            check_penalty(model, methods["online"], [(weights(model), strength * running)], 0.2 * step)
            move(model, 0.1 * step)


@every_network
def test_synaptic_intelligence(seed: int) -> None:
    """Ω from its recursion over two tasks: the gradient is that of the loss alone."""
    with untouched(drawn(seed)) as net:
        strength, damping = 0.7, 0.05
        model = trainee(net)
        method = SynapticIntelligence(model, strength, damping)
        theta = weights(model)
        omega, anchor = torch.zeros_like(theta), theta
        for x, t in ((net.x, net.targets), (net.x_test, net.targets[:1])):
            optimizer = torch.optim.SGD(tracked(model), lr=0.01, momentum=0.9)
            path, start = torch.zeros_like(theta), weights(model)
            for _ in range(3):
                before = weights(model)
                loss = (called(model, x) - t).square().mean()
                g = flat_gradient(loss, tracked(model)).detach()
                near(method.penalty(), strength * (omega * (before - anchor).square()).sum())
                optimizer.zero_grad()
                (loss + method.penalty()).backward()
                optimizer.step()
                method.after_step()
                path -= g * (weights(model) - before)
            method.consolidate()
            anchor = weights(model)
            omega = (omega + path / ((anchor - start).square() + damping)).clamp(min=0)
            found = {name: method.importance[name].reshape(-1) for name in method.importance}
            own = [name for name, p in model.named_parameters() if p.requires_grad]
            pieces = omega.split([p.numel() for p in tracked(model)])
            for name, piece in zip(own, pieces, strict=True):
                near(found.get(name, torch.zeros_like(piece)), piece, float(omega.max()))
