"""Fits of many samples, in the weights of features along landmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.audit import forgetting_certificate
from linnet.errors import InputError, MemoryBudgetError
from linnet.linear.features import angular_kernel
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.nested import many as in_weights
from linnet.nested import nested_fit, tuning
from linnet.nested.features import HEAD
from linnet.nested.landmarks import Landmarks
from linnet.nested.nested_fit import NestedFit

N, TESTED, LANDMARKS = 90, 20, 25


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 10)).to(dtype)


def data(classes: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N + TESTED, 6, generator=generator, dtype=torch.float64)
    if classes:
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0).long()
    else:
        noise = 0.2 * torch.randn(N + TESTED, 2, generator=generator, dtype=torch.float64)
        y = torch.stack([x[:, 0] * x[:, 1] + 3, x[:, 2].square() + 50], 1) + noise
    return x[:N], y[:N], x[N:]


@pytest.fixture(params=["classes", "values"])
def kind(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "classes")


def many(patch: pytest.MonkeyPatch, landmarks: int = LANDMARKS) -> None:
    """Count ten samples as many."""
    patch.setattr(nested_fit, "MANY", 10)
    patch.setattr(in_weights, "LANDMARKS", landmarks)


def near(found: Tensor, expected: Tensor, digits: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=digits * float(expected.abs().max()))


ANSWERS: dict[str, Any] = {
    "predict": lambda fit, x, y, xt: fit.predict(xt),
    "loo": lambda fit, x, y, xt: fit.loo(),
    "variance": lambda fit, x, y, xt: fit.predictive(xt).variance,
    "joint": lambda fit, x, y, xt: fit.system.covariance(xt[:5], True),
    "between": lambda fit, x, y, xt: fit.system.between(xt[:5], xt[5:8]),
    "influence": lambda fit, x, y, xt: fit.influence(xt[:5]),
    "informativeness": lambda fit, x, y, xt: fit.informativeness(),
    "forget": lambda fit, x, y, xt: fit.forget([1, 5, 7]).predict(xt),
    "update": lambda fit, x, y, xt: fit.update((xt[:9], y[:9])).predict(xt),
    "relabel": lambda fit, x, y, xt: fit.relabel([3, 4], y[:2]).predict(xt),
    "left-out variances": lambda fit, x, y, xt: fit.system.loo_variances(),
    "diagonal": lambda fit, x, y, xt: fit.system.diagonal(),
    "path": lambda fit, x, y, xt: torch.stack([fit.path([0.1, 1.0]).loo_error, fit.path([0.1, 1.0]).gcv]),
    "evidence": lambda fit, x, y, xt: fit.path([0.1, 1.0]).evidence,
    "along": lambda fit, x, y, xt: fit.along(xt, [0.1, 1.0]),
    "weights": lambda fit, x, y, xt: next(fit.system.cross(xt)),
    "eigenvalues": lambda fit, x, y, xt: fit._eigenvalues().sort(descending=True).values[:10],
    "exported": lambda fit, x, y, xt: fit.export(xt[:2])(xt),
    "merged": lambda fit, x, y, xt: fit.merge().network(xt).detach(),
}  # fmt: skip


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_probe_in_weights_is_the_probe_by_its_kernel(
    answer: str, weighed: bool, kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, xt = data(kind)
    w = torch.rand(N, generator=torch.Generator().manual_seed(3)) + 0.5 if weighed else None
    given: dict[str, Any] = {"weight": 0.0, "ridge": 0.3, "sample_weight": w}
    plain = linnet.adapt(network(), (x, y), **given)
    many(monkeypatch)
    fit = linnet.adapt(network(), (x, y), **given)
    assert isinstance(plain.system, KernelSystem)
    assert isinstance(fit.system, NormalSystem)
    assert fit.solver == "primal"
    near(ANSWERS[answer](fit, x, y, xt), ANSWERS[answer](plain, x, y, xt))
    assert fit.noise == pytest.approx(plain.noise, rel=1e-6)


@pytest.mark.parametrize("earlier", [0.5, 1.0])
def test_the_fit_is_that_of_dense_algebra(
    earlier: float, kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ridge regression on φ and g(ψ)."""
    x, y, xt = data(kind)
    many(monkeypatch)
    fit = linnet.adapt(network(), (x, y), earlier=earlier)
    prior, landmarks = fit.prior, fit.prior.landmarks
    assert landmarks is not None
    assert len(landmarks.psi) == LANDMARKS
    found, tested = (prior.network.staged(part) for part in (x, xt))
    width = prior.network.width
    phi, psi = found.tensor_split([width], 1)
    kernel = angular_kernel(landmarks.psi, landmarks.psi) + 1e-6 * torch.eye(LANDMARKS, dtype=torch.float64)

    def alike(one: Tensor, other: Tensor) -> Tensor:
        a, b = (angular_kernel(part, landmarks.psi) for part in (one, other))
        return a @ torch.linalg.solve(kernel, b.T)

    center = phi.mean(0)
    early = alike(psi, psi)
    m_head = float((phi - center).square().sum(1).mean())
    m_early = float(early.diagonal().mean() - early.mean())
    a, b = (1 - earlier) / m_head, earlier / m_early

    def between(one: Tensor, other: Tensor) -> Tensor:
        (p, s), (q, t) = (part.tensor_split([width], 1) for part in (one, other))
        return prior.mixture.bias + a * (p - center) @ (q - center).T + b * alike(s, t)

    square = between(found, found) + fit.ridge * torch.eye(N, dtype=torch.float64)
    solved = torch.linalg.solve(square, fit.targets)
    cross = between(tested, found)
    near(fit.predict(xt), cross @ solved)
    own = between(tested, tested).diagonal()
    explained = (cross * torch.linalg.solve(square, cross.T).T).sum(1)
    shared = fit.system.shared_variance(xt)
    assert shared is not None
    near(shared, own - explained, 1e-5)
    inverse = torch.linalg.inv(square)
    near(fit.loo(), fit.targets - solved / inverse.diagonal()[:, None])
    near(fit.forget([2, 3]).predict(xt), _without(square, cross, fit, [2, 3]))


def _without(square: Tensor, cross: Tensor, fit: NestedFit, index: list[int]) -> Tensor:
    """The predictions of dense algebra without some examples."""
    keep = [i for i in range(N) if i not in index]
    return cross[:, keep] @ torch.linalg.solve(square[keep][:, keep], fit.targets[keep])


def test_with_every_sample_a_landmark_it_is_the_fit_by_its_kernel(
    kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, xt = data(kind)
    plain = linnet.adapt(network(), (x, y), earlier=1.0, ridge=0.1)
    many(monkeypatch, N)
    fit = linnet.adapt(network(), (x, y), earlier=1.0, ridge=0.1)
    near(fit.predict(xt), plain.predict(xt), 1e-3)
    near(fit.loo(), plain.loo(), 1e-3)
    near(fit.predictive(x).variance, plain.predictive(x).variance, 1e-3)  # others have less along landmarks


def test_features_along_landmarks_have_the_kernel_at_these() -> None:
    psi = nn.functional.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    landmarks = Landmarks.of(psi.double())
    formed = landmarks(psi.double())
    near(formed @ formed.T, angular_kernel(psi.double(), psi.double()), 1e-5)
    assert formed.square().sum(1).max() < 1 + 1e-9


def test_a_fit_is_kept_and_exported(kind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data(kind)
    many(monkeypatch)
    for earlier in (0.5, 1.0):
        net = network()
        fit = linnet.adapt(net, (x, y), earlier=earlier)
        own, again = fit.predictive(xt), linnet.load(fit.save(tmp_path / str(earlier)), net)
        assert isinstance(again.system, NormalSystem)
        for one in (again, again.forget([0]).update((x[:1], y[:1]))):
            near(one.predictive(xt).mean, own.mean)
            near(one.predictive(xt).variance, own.variance)
        near(fit.merge().network(xt).detach(), fit.predict(xt))
        mean, variance = fit.export(xt[:2], variance=True)(xt)
        near(mean, own.mean)
        near(variance, fit.system.covariance(xt).diagonal(dim1=1, dim2=2) * fit.noise / fit.ridge)


def test_new_classes_and_classes_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data()
    many(monkeypatch)
    first = y < 2
    fit = linnet.adapt(network(), (x[first], y[first]))
    grown = fit.update((x[~first], y[~first]))
    anew = grown.recomputed()
    assert grown.classes == 3
    near(grown.predict(xt), anew.predict(xt))
    near(grown.forget(classes=2).predict(xt)[:, :2], fit.predict(xt))
    again = fit.update((x[~first], y[~first]), ridge="loo")
    assert isinstance(again.system, NormalSystem)
    assert again.n == N


def test_training_ends_in_a_fit_in_weights(kind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data(kind)
    x, xt, y = x.float(), xt.float(), y if kind else y[:, :1].float()
    many(monkeypatch)
    monkeypatch.setattr(tuning, "LANDMARKS", LANDMARKS)
    fit = linnet.adapt(network(torch.float32), (x, y), tune=True)
    assert fit.trained
    assert isinstance(fit.system, NormalSystem)
    rows = fit.system.problem.examples.rows[HEAD]
    assert rows is not None
    near(fit.prior.rows(x), rows, 1e-5)
    # held out: by the network that was trained without the fold, and the ridge of all
    plain = linnet.adapt(network(torch.float32), (x, y))
    runs = tuning.Tuning(plain, 0)
    rest, held = runs.parts(1)
    rate = float(fit.record.reasons["training"].split()[2].rstrip(","))
    root, _ = runs.kernels(runs.trained(rest, rate), False).mixed(0.0, fit.earlier, runs.bias)
    gram = root[rest].T @ root[rest] + fit.ridge * torch.eye(root.shape[1], dtype=torch.float64)
    solved = torch.linalg.solve(gram, root[rest].T @ fit.targets[rest].double())
    assert fit.held_out is not None
    near(fit.held_out[held], root[held] @ solved)
    assert bool((fit.predictive(xt).variance > 0).all())


def test_the_certificate_says_what_landmarks_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = data()
    many(monkeypatch)
    fit = linnet.adapt(network(), (x, y), earlier=1.0)
    found = forgetting_certificate(fit, [0, 1])
    assert found.relative < 1e-10
    assert any("25 of the samples are landmarks" in line for line in found.warnings)
    probe = linnet.adapt(network(), (x, y), weight=0.0)
    assert not any("landmark" in line for line in forgetting_certificate(probe, [0]).warnings)
    # with a fit of its own, which has other landmarks and scales
    keep = [i for i in range(N) if i not in (0, 1)]
    other = linnet.adapt(network(), (x[keep], y[keep]), earlier=1.0, ridge=fit.ridge)
    assert 1e-6 < forgetting_certificate(fit, other).relative < 0.1
    # of which the features are formed anew
    rows = fit.system.problem.examples.rows[HEAD]
    assert rows is not None
    rows.mul_(1.3)
    assert forgetting_certificate(fit, [0, 1]).relative > 1e-6


def test_what_many_samples_cannot_have_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data(classes=False)
    many(monkeypatch)
    fit = linnet.adapt(network(), (x, y))
    with pytest.raises(InputError, match="equations on outputs of a fit of 90 samples"):
        fit.constrain(xt[:1], fit.predict(xt[:1]) + 1)
    with pytest.raises(MemoryBudgetError, match="90 samples and"):
        linnet.adapt(network(), (x, y), memory="1KB")
    derived = linnet.adapt(network(), (x, y), weight=0.5)
    assert isinstance(derived.system, KernelSystem)


@pytest.mark.parametrize("offset", [1e4, 1e7])
def test_an_offset_of_values_changes_no_noise(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data(classes=False)
    many(monkeypatch)
    for earlier in (0.0, 0.5):
        plain, moved = (linnet.adapt(network(), (x, y + c), earlier=earlier) for c in (0.0, offset))
        assert moved.ridge == plain.ridge
        assert moved.noise == pytest.approx(plain.noise, rel=1e-6)
        own, other = plain.predictive(xt), moved.predictive(xt)
        torch.testing.assert_close(other.variance, own.variance, rtol=1e-3, atol=0)
        torch.testing.assert_close(other.mean - offset, own.mean, rtol=0, atol=1e-7 * offset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data()
    many(monkeypatch)
    with pytest.warns(UserWarning, match=r"pass model\.double\(\)"):
        fit = linnet.adapt(network(dtype), (x.to(dtype), y), earlier=1.0)
    expected = linnet.adapt(network(), (x, y), earlier=1.0, ridge=fit.ridge)
    same = fit.predict(xt.to(dtype)).argmax(1) == expected.predict(xt).argmax(1)
    assert same.double().mean() > 0.9


def test_samples_are_selected_and_summarized(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = data()
    plain = linnet.adapt(network(), (x, y), weight=0.0, ridge=0.3)
    many(monkeypatch)
    fit = linnet.adapt(network(), (x, y), weight=0.0, ridge=0.3)
    for criterion in ("predictive-information", "variance"):
        found, expected = (linnet.audit.select(one, xt, 4, criterion=criterion) for one in (fit, plain))
        assert found.indices.tolist() == expected.indices.tolist()


def test_shares_that_are_given_are_not_said_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = data()
    many(monkeypatch)
    assert "of lowest" not in linnet.adapt(network(), (x, y), earlier=0.5).record.reasons["shares"]
    assert "on 90 samples" in linnet.adapt(network(), (x, y)).record.reasons["shares"]


@pytest.mark.long
def test_more_than_ten_thousand_samples() -> None:
    """Without a change of what counts as many."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_400, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0).long()
    fit = linnet.adapt(network(torch.float32), (x[:10_200], y[:10_200]))
    assert isinstance(fit.system, NormalSystem)
    right = float((fit.predict(x[10_200:]).argmax(1) == y[10_200:]).double().mean())
    left_out = float((fit.loo().argmax(1) == y[:10_200]).double().mean())
    assert right > 0.65
    assert abs(left_out - right) < 0.1
    assert fit.forget(range(100)).n == 10_100


def test_features_wider_than_the_samples_are_many_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = data()
    many(monkeypatch)
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, N), nn.ReLU(), nn.Linear(N, 3)).double()
    assert isinstance(linnet.adapt(wide, (x, y), weight=0.0).system, KernelSystem)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("how", ["bodiless", "weight"])
def test_the_last_layer_alone_is_solved_in_weights_where_features_are_few(
    values: bool, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4).double()
    y = x @ torch.randn(4, 3).double() + torch.randn(60, 3).double()
    data = (x, y if values else y.argmax(1))
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    net = nn.Sequential(nn.Identity(), net[2]) if how == "bodiless" else net
    shares = {} if how == "bodiless" else {"weight": 0.0}
    monkeypatch.setattr(nested_fit, "JUDGES", 20)
    by_kernel = linnet.adapt(net, (x[:20], data[1][:20]), **shares)  # as many as 20 are no more
    assert isinstance(by_kernel.system, KernelSystem)
    fit = linnet.adapt(net, data, ridge=0.5, **shares)
    assert isinstance(fit.system, NormalSystem)
    assert linnet.adapt(net, data, **shares).ridge > 0
    monkeypatch.setattr(nested_fit, "SLIM", 100)
    same = linnet.adapt(net, data, ridge=0.5, **shares)
    assert isinstance(same.system, KernelSystem)
    new = torch.randn(5, 4).double()
    for one, other in ((fit, same), (fit.forget([3, 8]), same.forget([3, 8]))):
        near(one.predict(new), other.predict(new), 1e-8)
        near(one.predictive(new).variance, other.predictive(new).variance, 1e-8)
        near(one.loo(), other.loo(), 1e-8)
        near(one.influence(new), other.influence(new), 1e-8)
    held, wanted = new[:1], torch.ones(1, 3).double()
    near(fit.constrain(held, wanted).predict(new), same.constrain(held, wanted).predict(new), 1e-7)
    fit.save(tmp_path / "fit")
    near(linnet.load(tmp_path / "fit", net).predict(new), fit.predict(new), 1e-12)
