"""Failures of the Gauss-Newton optimizer: interrupted steps, and unsupported input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError, ModelError, NumericalError
from linnet.likelihoods import Gaussian
from linnet.optim.gauss_newton import GaussNewton
from linnet.tangent.linearized import linearize
from tests.optim.gauss_newton_cases import classes, classifier, flat, mlp, values, weight_of


def running_mean(net: nn.Sequential) -> Tensor:
    """That of the second module."""
    return net[1].get_buffer("running_mean")


@pytest.mark.parametrize("accident", ["nan", "huge", "closure"])
def test_running_statistics_are_taken_back_with_the_weights(accident: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    x, y = classes()
    x = x.float()
    optimizer = classifier(net)
    for _ in range(3):
        optimizer.step(x, y)
    kept = copy.deepcopy(net)
    twin = classifier(kept)
    twin.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for one in (net, kept):
            weight_of(one, "0").fill_(math.nan) if accident != "huge" else weight_of(one, "0").mul_(1e30)
            weight_of(one, "3").mul_(1e30)
    if accident == "closure":
        report = optimizer.step(x, y, closure=lambda: mean_loss(net, x, y))
    else:
        report = optimizer.step(x, y)
        again = twin.step(x, y)  # a resumed run takes the same back
        assert again == report
        assert torch.equal(flat(net), flat(kept))
        assert torch.equal(running_mean(net), running_mean(kept))
    assert report.rejected
    assert math.isfinite(report.loss)
    assert bool(running_mean(net).isfinite().all())
    assert float(running_mean(net).abs().max()) < 10
    assert int(net[1].get_buffer("num_batches_tracked")) == 4
    assert not optimizer.step(x, y).rejected


def mean_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy, and its gradients in ``.grad``."""
    net.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return loss


def test_wrong_closures_and_losses_are_named() -> None:
    x, y = classes()
    net = mlp()
    optimizer = classifier(net, damping=0.1)
    with pytest.raises(InputError, match="no parameter has a gradient"):
        optimizer.step(x, y, loss=1.0)
    with pytest.raises(InputError, match="result of closure"):
        optimizer.step(x, y, closure=lambda: None)
    with pytest.raises(InputError, match=r"loss is .*\(20,\)"):
        optimizer.step(x, y, loss=torch.ones(20))
    assert optimizer.steps == 0


def test_wrong_networks_groups_and_inputs_are_named() -> None:
    x, y = classes()
    with pytest.raises(InputError, match="linearized already"):
        classifier(linearize(mlp()))
    with pytest.raises(InputError, match="none of the 4 parameters requires a gradient"):
        classifier(mlp().requires_grad_(False))
    optimizer = classifier(mlp(), damping=0.1)
    with pytest.raises(ModelError, match="cannot run on x"):
        optimizer.step(x[:, :2], y)
    narrow = optimizer.step(x.float(), y)  # made the network's type
    assert narrow.loss == pytest.approx(classifier(mlp(), damping=0.1).step(x, y).loss, rel=1e-6)
    state = optimizer.state_dict()
    deep = nn.Sequential(*mlp(), nn.Linear(3, 3)).double()
    with pytest.raises(InputError, match=r"of this optimizer, 3\.weight \(3, 3\)"):
        classifier(deep).load_state_dict(state)
    wide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(InputError, match=r"parameters 0\.weight \(6, 4\).*0\.weight \(8, 4\)"):
        classifier(wide).load_state_dict(state)
    with pytest.raises(InputError, match=r"0\.weight \(6, 4\) float64.*0\.weight \(6, 4\) float32"):
        classifier(mlp().float()).load_state_dict(state)
    grouped = classifier(net := mlp())
    grouped.add_param_group({"params": list(net[0].parameters())})
    with pytest.raises(InputError, match=r"in group 0.*in group 1"):
        grouped.load_state_dict(state)
    diagonal = classifier(mlp(), structure="diagonal")
    with pytest.raises(InputError, match=r"structure 'kfac'.*structure of this optimizer, 'diagonal'"):
        diagonal.load_state_dict(state)
    assert math.isfinite(diagonal.step(x, y).loss)
    for wrong in (None, {"gauss_newton": {"tau": 1.0}}):
        with pytest.raises(InputError, match="lacks what GaussNewton keeps"):
            classifier(mlp()).load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", ["kfac", "kfra"])
def test_batches_without_a_target_that_counts(structure: str) -> None:
    x, y = classes()
    x = x.float()
    optimizer = classifier(mlp().float(), structure=structure)
    with pytest.raises((DataError, NumericalError), match=r"targets are masked|any target counts"):
        optimizer.step(x, torch.full_like(y, -100))
    losses = [optimizer.step(x, y).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert optimizer.step(x, torch.full_like(y, -100)).step_norm == 0.0  # adds nothing
    assert optimizer.step(x, y).loss < losses[-1]


def test_an_easy_first_batch_is_no_measure_of_all_others() -> None:
    x, y = values(40)
    net = mlp()
    y[:1] = net(x[:1]).detach()  # fitted already
    likelihood = Gaussian(variance=1 / (2 * math.pi))  # without a constant
    optimizer = GaussNewton(net, likelihood, damping=10.0)
    reports = [optimizer.step(x[k : k + 1], y[k : k + 1]) for k in range(40)]
    assert reports[0].loss < 1e-12
    assert sum(report.rejected for report in reports) <= 6


def test_a_replaced_layer_is_noticed() -> None:
    net = mlp()
    x, y = classes()
    optimizer = classifier(net)
    optimizer.step(x, y)
    last = str(len(net) - 1)
    kept = net[-1]
    net[-1] = nn.Linear(kept.in_features, kept.out_features).double()
    with pytest.raises(InputError, match=rf"parameter '{last}.weight' of the network is not the one"):
        optimizer.step(x, y)
    del net[-1]
    with pytest.raises(InputError, match=f"parameter '{last}.weight'"):
        optimizer.step(x, y)
    net.append(kept)
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()})
    assert optimizer.step(x, y).step == 2


def test_a_state_of_another_likelihood_is_refused() -> None:
    net = mlp()
    state = classifier(net).state_dict()
    other = GaussNewton(net, Gaussian(variance=0.1))
    with pytest.raises(InputError, match=r"saved with Categorical\(.*Gaussian\(variance=0.1"):
        other.load_state_dict(state)
    assert other.steps == 0
