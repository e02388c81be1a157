"""Networks whose first operation writes to the inputs: the user's data stay, and every pass sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.laplace.laplace import Laplace
from linnet.metrics.adversarial import fgsm
from linnet.metrics.evaluate import evaluate
from linnet.metrics.ood import ood
from linnet.tangent.functional import Functional
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import near, real

L = linnet.likelihoods
Y, T = torch.arange(8) % 2, real(8, 2, seed=5)


class Centered(nn.Module):
    """Takes something off its inputs, in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        """The body's outputs."""
        x -= 0.5
        out: Tensor = self.body(x)
        return out


def of_laplace(net: nn.Module, x: Tensor) -> Tensor:
    """Numbers of a posterior over weights."""
    la = Laplace(net, L.Categorical()).fit((x, Y)).tune("validation", (x, Y))
    found = la.predictive(x, joint=True).joint_covariance.flatten()
    return torch.cat([found, la.predictive(x, "mc", samples=2, seed=0).mean.flatten()])


def of_gradients(net: nn.Module, x: Tensor) -> Tensor:
    """Derivatives of predictions in x."""
    la, gp = Laplace(net, L.Categorical()).fit((x, Y)), TangentGP(net, L.Gaussian()).fit(x, T)
    point = x.clone().requires_grad_()
    predictions = la.predictive(point), gp.predictive(point)
    total = sum(p.mean.sum() + p.covariance.sum() for p in predictions)
    return torch.autograd.grad(total, point)[0]


def of_attack(net: nn.Module, x: Tensor) -> Tensor:
    """How far an attack on the network itself, of two steps, moves the inputs."""
    attack = fgsm(lambda z: net(z).softmax(1), (x, Y), step=0.1)
    assert attack.inputs is not None
    return attack.inputs - x


def of_scores(net: nn.Module, x: Tensor) -> Tensor:
    """Scores of the network itself."""

    def predict(z: Tensor) -> Tensor:
        return net(z).softmax(1)

    report = evaluate(predict, (x, Y))
    return torch.tensor(
        [report.nll, report.entropy, ood(predict, x, x + 1).auroc, evaluate(predict, (x, Y)).nll]
    )


USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "outputs": lambda net, x: linnet.linearize(net).base(x),
    "jacobian": lambda net, x: linnet.linearize(net).jacobian(x),
    "kernel": lambda net, x: linnet.linearize(net).kernel(x),
    "curvature": lambda net, x: linnet.curvature(net, x, L.Categorical()).dense(),
    "laplace": of_laplace,
    "function": lambda net, x: (
        TangentGP(net, L.Gaussian(), space="function").fit(x, T).predictive(x).covariance
    ),
    "cg": lambda net, x: TangentGP(net, L.Gaussian(), solver="cg").fit(x, T).predictive(x).covariance,
    "linear": lambda net, x: (
        linnet.linear_posterior(linnet.linearize(net), (x, Y), L.Categorical()).predictive(x).mean
    ),
    "gradients": of_gradients,
    "attack": of_attack,
    "scores": of_scores,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.thinned(4)
def test_data_are_not_written_to(use: str) -> None:
    net, x = Centered(), real(8, 3)
    before = x.clone()
    found = USES[use](net, x)
    assert torch.equal(x, before)
    near(found, USES[use](net.body, x - 0.5), 1e-9)


def test_networks_that_do_not_write_get_the_inputs_themselves() -> None:
    seen: list[int] = []

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.data_ptr())
            return super().forward(input)

    function, x = Functional(Noting(3, 2).double()), real(8, 3)
    for _ in range(3):
        function.check_runs(x)
    assert seen[0] != x.data_ptr()
    assert seen[1:] == [x.data_ptr()] * 2
