"""Other tasks, more data, and files: what is shared gives the same process as what is computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
import linnet.tangent.gram as gram_module
from linnet.errors import FileFormatError, InputError
from linnet.likelihoods import Gaussian, HeteroscedasticGaussian
from linnet.linalg.operator import LinearOperator
from linnet.linear import kernel_system, normal_system
from linnet.tangent_gp.tangent_gp import TangentGP
from tests.fitting.problems import network, real
from tests.grids import grid
from tests.tangent_gp.tangent_gp_cases import DENSE, WAYS, dense


def close(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> None:
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()), (a - b).abs().max()


def same(a: TangentGP, b: TangentGP, x: Tensor, tolerance: float = 1e-8) -> None:
    one, two = a.predictive(x, joint=True), b.predictive(x, joint=True)
    close(one.mean, two.mean, tolerance)
    close(one.joint_covariance, two.joint_covariance, tolerance)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(6)
def test_adapting_is_fitting_the_tasks_data(way: dict[str, Any]) -> None:
    oracle = dense()
    options = {"prior_precision": 0.7, **way}
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), **options).fit(oracle.x, oracle.y)
    before = gp.predictive(oracle.x_test).mean
    x, y = real(7, 3, seed=21), real(7, 2, seed=22)
    other = gp.adapt(x, y)
    same(other, TangentGP(oracle.model, Gaussian(variance=0.2), **options).fit(x, y), oracle.x_test)
    torch.testing.assert_close(gp.predictive(oracle.x_test).mean, before)
    assert gp.summary()["examples"] == 9
    assert other.summary()["examples"] == 7


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.thinned(3)
def test_adapting_keeps_what_was_tuned(way: dict[str, Any]) -> None:
    oracle = dense()
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), **way).fit(oracle.x, oracle.y).tune()
    x, y = real(7, 3, seed=21), real(7, 2, seed=22)
    other = gp.adapt(x, y)
    fresh = TangentGP(
        oracle.model, Gaussian(variance=0.2), prior_precision=gp.prior_precision, noise_scale=gp.noise_scale
    )
    same(other, fresh.fit(x, y), oracle.x_test, 1e-7)


@pytest.mark.parametrize("way", DENSE.values(), ids=DENSE)
def test_the_same_inputs_with_other_targets_form_nothing_anew(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = dense()
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, **way)
    y = real(9, 2, seed=22)
    fresh = gp.adapt(oracle.x, y)
    gp.fit(oracle.x, oracle.y)
    monkeypatch.setattr(kernel_system, "gram", None)
    monkeypatch.setattr(normal_system, "summed", None)
    other = gp.adapt(oracle.x, y)
    mean = other.predictive(oracle.x_test).mean
    monkeypatch.undo()
    close(mean, fresh.predictive(oracle.x_test).mean)
    same(other, fresh, oracle.x_test)
    if way["space"] == "function":
        work = other.summary()["work"]
        assert work == {"examples differentiated": 0, "examples known": 9, "factorizations": 0}


def test_inputs_that_come_again_keep_their_part_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = dense()
    way = DENSE["function"]
    gp = TangentGP(oracle.model, Gaussian(0.2, masked=True), prior_precision=0.7, **way)
    y0 = oracle.y.clone()
    y0[3, 1] = torch.nan  # a row of the kernel that is not known
    gp.fit(oracle.x, y0)
    x = torch.cat([real(3, 3, seed=21), oracle.x[[5, 3, 0, 5]]])
    y = real(7, 2, seed=22)
    sizes: list[tuple[int, int]] = []
    plain = gram_module.gram

    def counted(function: Any, x1: Any, x2: Any = None, **rest: Any) -> Tensor:
        sizes.append((len(x1), len(x1 if x2 is None else x2)))
        return plain(function, x1, x2, **rest)

    monkeypatch.setattr(kernel_system, "gram", counted)
    other = gp.adapt(x, y)
    assert sizes == [(4, 4), (4, 3)]  # three new inputs and the one with a missing target
    assert other.summary()["work"]["examples known"] == 3
    monkeypatch.undo()
    fresh = TangentGP(oracle.model, Gaussian(variance=0.2), prior_precision=0.7, **way).fit(x, y)
    same(other, fresh, oracle.x_test)


def test_the_preconditioner_in_parameter_space_is_that_of_the_first_task() -> None:
    oracle = dense(n=30)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), preconditioner="ekfac", tolerance=1e-10)
    gp.fit(oracle.x, oracle.y)
    other = gp.adapt(real(20, 3, seed=21), real(20, 2, seed=22))
    assert other._fitted.reused.preconditioner is gp._fitted.reused.preconditioner  # type: ignore[attr-defined]
    assert other.summary()["certificate"] < 1e-9


def test_one_product_a_step_and_one_pass_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = dense(n=30)
    gp = TangentGP(oracle.model, Gaussian(variance=0.2), "parameter", solver="cg", preconditioner="none")
    gp.fit(oracle.x, oracle.y)
    operator: LinearOperator = gp._fitted.operator  # type: ignore[attr-defined]
    # one product a step, and one for the residual at the end
    assert operator.passes == gp.summary()["work"]["steps"] + 1  # type: ignore[attr-defined]
    passes = operator.passes  # type: ignore[attr-defined]
    first = gp.predictive(oracle.x_test).variance
    assert operator.passes == passes + gp.summary()["work"]["products of the variance cache"]  # type: ignore[attr-defined]
    passes = operator.passes  # type: ignore[attr-defined]
    torch.testing.assert_close(gp.predictive(oracle.x_test).variance, first)
    assert operator.passes == passes  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("heteroscedastic", grid((False, True), (True,)))
def test_a_saved_process_comes_back(way: dict[str, Any], heteroscedastic: bool, tmp_path: Path) -> None:
    model = network(3, 5, 4)
    x, y, x_test = real(9, 3, seed=1), real(9, 2 if heteroscedastic else 4, seed=2), real(4, 3, seed=3)
    likelihood = HeteroscedasticGaussian() if heteroscedastic else Gaussian(variance=0.2)
    gp = TangentGP(model, likelihood, noise_scale=0.5, **way).fit(x, y)
    expected, evidence = gp.predictive(x_test, joint=True).joint_covariance, gp.log_evidence()
    gp.save(tmp_path)
    back = linnet.load(tmp_path, model)
    torch.testing.assert_close(back.predictive(x_test).mean, gp.predictive(x_test).mean)
    close(back.predictive(x_test, joint=True).joint_covariance, expected, 1e-11)
    assert back.log_evidence().mean == pytest.approx(evidence.mean, rel=1e-10)
    assert back.summary()["plan"] == gp.summary()["plan"]
    same(back.adapt(x[:4], y[:4]), gp.adapt(x[:4], y[:4]), x_test)
    close(back.update(x[:2], y[:2]).predictive(x_test).mean, gp.update(x[:2], y[:2]).predictive(x_test).mean)
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(FileFormatError, match="weights differ"):
        linnet.load(tmp_path, model)


def test_files_of_another_network_or_output_are_refused(tmp_path: Path) -> None:
    model, x = network(3, 5, 2), real(6, 3, seed=1)
    gp = TangentGP(model, Gaussian(variance=0.2), output=lambda f: 2 * f).fit(x, real(6, 2, seed=2))
    gp.save(tmp_path)
    with pytest.raises(InputError, match="output is missing"):
        linnet.load(tmp_path, model)
    close(linnet.load(tmp_path, model, output=lambda f: 2 * f).predictive(x).mean, gp.predictive(x).mean)
    with pytest.raises(FileFormatError, match="outputs differ"):
        linnet.load(tmp_path, model, output=lambda f: 3 * f)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FileFormatError):
        linnet.load(tmp_path, model, output=lambda f: 2 * f)


def test_a_task_is_adapted_to_in_closed_form() -> None:
    """Maddox et al. 2021, section 5: a network trained on one sinusoid, ten points of another."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    x = torch.linspace(-3, 3, 60, dtype=torch.float64)[:, None]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        ((net(x) - (1.5 * x).sin()) ** 2).mean().backward()
        optimizer.step()
    gp = TangentGP(net, Gaussian(variance=1e-3)).fit(x, (1.5 * x).sin())
    task = (0.7 * (1.5 * x + 1).sin()).detach()
    some = torch.arange(0, 60, 6)
    found = gp.adapt(x[some], task[some]).predictive(x)
    before = float(((net(x) - task) ** 2).mean().detach())
    assert float(((found.mean - task) ** 2).mean()) < 0.05 * before
    assert float((found.variance[some]).mean()) < float(found.variance.mean())
