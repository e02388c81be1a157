"""Weights of examples in the loss, against dense algebra and refits."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError

RIDGE = 0.3


def data(classes: bool, n: int = 14) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, inputs, answers and weights."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3 if classes else 2)).double()
    x = torch.randn(n, 3).double()
    y = torch.arange(n) % 3 if classes else torch.randn(n, 2).double()
    return net, x, y, 0.2 + 3 * torch.rand(n).double()


def rows_of(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """f₀ (T, C) and J (T, C, P) by derivatives one at a time."""
    theta = [p for p in net.parameters()]
    outputs = net(x)
    rows = [[torch.cat([g.flatten() for g in torch.autograd.grad(f, theta, retain_graph=True)]) for f in out]
            for out in outputs]  # fmt: skip
    return outputs.detach(), torch.stack([torch.stack(out) for out in rows])


def dense(net: nn.Module, x: Tensor, t: Tensor, w: Tensor, query: Tensor, ridge: float = RIDGE) -> Tensor:
    """Outputs (T, C) of the optimum of ½ Σ w ‖t − f‖² + ½ ρ‖δ‖²."""
    (f0, j), (g0, q) = rows_of(net, x), rows_of(net, query)
    p = j.shape[2]
    h = torch.einsum("n,ncp,ncq->pq", w, j, j) + ridge * torch.eye(p).double()
    delta = torch.linalg.solve(h, torch.einsum("n,ncp,nc->p", w, j, t - f0))
    return g0 + q @ delta


def made(net: nn.Module, x: Tensor, y: Tensor, w: Any, solver: Any, ridge: Any = RIDGE) -> Any:
    """The fit."""
    if solver == "adapt":
        return linnet.adapt(net, (x, y), weight=0.4, ridge=ridge, sample_weight=w)
    if solver == "cg":
        solver = linnet.fitting.CG(tolerance=1e-12)
    return linnet.fit(linnet.linearize(net), (x, y), ridge=ridge, solver=solver, sample_weight=w)


SOLVERS = ("dual", "primal", "cg", "shared", "adapt")


@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
def test_the_optimum_is_that_of_dense_algebra(solver: str) -> None:
    net, x, y, w = data(classes=False)
    fit, query = made(net, x, y, w, solver), torch.randn(4, 3).double()
    torch.testing.assert_close(fit.predict(query), dense(net, x, y, w, query), rtol=1e-7, atol=1e-8)
    j, q = rows_of(net, x)[1], rows_of(net, query)[1]
    h = torch.einsum("n,ncp,ncq->pq", w, j, j) + RIDGE * torch.eye(j.shape[2]).double()
    covariance = fit.noise * torch.einsum(
        "tcp,tdp->tcd", q, torch.linalg.solve(h, q.flatten(0, 1).T).T.view(q.shape)
    )
    torch.testing.assert_close(fit.predictive(query).covariance, covariance, rtol=1e-6, atol=1e-9)
    # σ² of highest evidence: the mean of ρ r̃ᵀβ̃ is that of the whitened problem
    f0, wide = rows_of(net, x)[0], (w.sqrt()[:, None, None] * j).flatten(0, 1)
    r = (w.sqrt()[:, None] * (y - f0)).flatten()
    k = wide @ wide.T + RIDGE * torch.eye(len(r)).double()
    assert fit.noise == pytest.approx(float(RIDGE * r @ torch.linalg.solve(k, r) / len(r)), rel=1e-6)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("classes", [True, False])
def test_leaving_out_forgetting_and_adding_are_refits(solver: str, classes: bool) -> None:
    net, x, y, w = data(classes)
    fit, query = made(net, x, y, w, solver), torch.randn(4, 3).double()
    near = {"rtol": 1e-5, "atol": 1e-6}
    loo, influence = fit.loo(), fit.influence(query)
    told = fit.informativeness(query)
    own = fit.informativeness()
    keep = torch.ones(len(x), dtype=torch.bool)
    for i in (0, 5, 11):
        keep[:] = True
        keep[i] = False
        # the scale of features and their mean are those of all samples: so forget, which keeps them
        other = fit.forget([i])
        if solver != "adapt":
            again = made(net, x[keep], y[keep], w[keep], solver)
            torch.testing.assert_close(other.predict(query), again.predict(query), **near)
            torch.testing.assert_close(other.loo(), again.loo(), **near)
        torch.testing.assert_close(loo[i], other.predict(x[i : i + 1])[0].to(loo), **near)
        change = fit.predict(query) - other.predict(query)
        torch.testing.assert_close(influence[i], change.to(influence), **near)
        assert float(told[i]) == pytest.approx(float(change.square().sum(1).mean()), rel=1e-4)
        change = fit.predict(x) - other.predict(x)
        torch.testing.assert_close(fit.system.own_changes()[i], change[i].to(loo), **near)
        assert float(own[i]) == pytest.approx(float(change.square().sum(1).mean()), rel=1e-4)
    grown = fit.forget([4, 9]).update((x[[4, 9]], y[[4, 9]]), sample_weight=w[[4, 9]])
    torch.testing.assert_close(grown.predict(query), fit.predict(query), **near)
    alike = fit.forget([4]).update((x[4:5], y[4:5]))
    one = w.clone()
    one[4] = 1.0
    if solver != "adapt":
        torch.testing.assert_close(alike.predict(query), made(net, x, y, one, solver).predict(query), **near)
    new = y.flip(0)[:3] + (0 if classes else 1.0)
    values = y.clone()
    values[:3] = new
    if solver != "adapt":
        found = fit.relabel([0, 1, 2], new).predict(query)
        torch.testing.assert_close(found, made(net, x, values, w, solver).predict(query), **near)
    again = fit.recomputed() if solver != "cg" else fit
    torch.testing.assert_close(again.predict(query), fit.predict(query), **near)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_of_one_change_nothing_and_copies_count_as_weights(solver: str) -> None:
    net, x, y, _ = data(classes=True)
    query, ones = torch.randn(4, 3).double(), torch.ones(len(x))
    plain, same = made(net, x, y, None, solver), made(net, x, y, ones, solver)
    torch.testing.assert_close(same.predict(query), plain.predict(query), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(same.loo(), plain.loo(), rtol=1e-5, atol=1e-7)
    assert same.temperature == pytest.approx(plain.temperature, rel=1e-3)
    grown = plain.forget([2]).update((x[2:3], y[2:3]), sample_weight=[2.0])
    weighed = ones.clone()
    weighed[2] = 2
    if solver != "adapt":
        twice = made(net, torch.cat([x, x[2:3]]), torch.cat([y, y[2:3]]), None, solver)
        torch.testing.assert_close(grown.predict(query), twice.predict(query), rtol=1e-5, atol=1e-6)
        once = made(net, x, y, weighed.numpy(), solver)
        torch.testing.assert_close(once.predict(query), twice.predict(query), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", ["dual", "primal", "shared", "adapt"])
def test_the_ridge_is_chosen_by_weighted_errors_left_out(solver: str) -> None:
    net, x, y, w = data(classes=True, n=30)
    y = torch.where(torch.arange(30) < 24, torch.arange(30) % 2, 2)  # six of one class
    fit = made(net, x, y, "balanced", solver, "loo" if solver != "adapt" else None)
    counts = torch.tensor([12.0, 12.0, 6.0]).double()
    torch.testing.assert_close(fit._targets.weights, (30 / (3 * counts))[y])
    path = fit.path()
    place = int((path.ridges - fit.ridge).abs().argmin())
    errors = (fit._targets.weights * (fit.loo() - fit.targets).square().sum(1)).mean()
    assert float(path.loo_error[place]) == pytest.approx(float(errors), rel=1e-3)
    right = (fit.loo().argmax(1) == y).double().mean()
    assert float(path.loo_accuracy[place]) == pytest.approx(float(right))
    if solver != "adapt":
        # no ridge of the path has less weighted error when each is left out by refits of the same ridge
        other = made(net, x, y, "balanced", solver, float(path.ridges[max(place - 8, 0)]))
        worse = (other._targets.weights * (other.loo() - other.targets).square().sum(1)).mean()
        assert float(errors) <= float(worse) * (1 + 1e-6)
    del w


@pytest.mark.parametrize("classes", [False, True])
def test_errors_along_a_path_are_those_of_any_scale_of_the_weights(classes: bool) -> None:
    net, x, y, _ = data(classes)
    w = torch.rand(len(x), generator=torch.Generator().manual_seed(0)).double() + 0.3
    fits = [made(net, x, y, k * w, "dual", k * 0.5) for k in (1.0, 100.0)]
    paths = [fit.path([fit.ridge]) for fit in fits]
    errors = (w[:, None] * (fits[0].targets - fits[0].loo()).square()).sum() / w.sum()
    for fit, path in zip(fits, paths, strict=True):
        assert float(path.loo_error) == pytest.approx(float(errors))
        assert float(path.gcv) == pytest.approx(float(paths[0].gcv))
        with pytest.raises(InputError, match="sample_weight"):
            linnet.spectrum.task_linearity(fit)
    soft = [
        linnet.fit(linnet.linearize(net), (x, y), "cross-entropy", ridge=k * 0.5, sample_weight=k * w)
        for k in (1.0, 100.0)
        if classes
    ]
    losses = [float(fit.path([fit.ridge]).loo_error) for fit in soft]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-4)


@pytest.mark.parametrize("solver", ["dual", "primal"])
def test_the_evidence_is_that_of_targets_as_they_are(solver: str) -> None:
    """log N(t; f₀, σ² (JJᵀ/ρ + W⁻¹)) at the best σ², so that fits with other weights compare."""
    net, x, y, w = data(classes=False)
    f0, j = rows_of(net, x)
    j, r = j.flatten(0, 1), (y - f0).flatten()
    covariance = j @ j.T / RIDGE + torch.diag(1 / w.repeat_interleave(2))
    variance = float(r @ torch.linalg.solve(covariance, r)) / len(r)
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(r), variance * covariance)
    found = made(net, x, y, w, solver).path([RIDGE]).evidence
    assert float(found) == pytest.approx(float(normal.log_prob(r)), rel=1e-8)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_variance_of_a_weighted_last_layer_is_exported(outputs: int) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x, y, w = torch.randn(14, 3).double(), torch.randn(14, outputs).double(), 0.2 + torch.rand(14).double()
    fit = linnet.fit(linnet.linearize(net, "last-layer"), (x, y), ridge=RIDGE, sample_weight=w)
    torch.testing.assert_close(fit.export(variance=True)(x)[1], fit.predictive(x).variance)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.long
def test_saved_exported_and_merged(solver: str, tmp_path: Any) -> None:
    net, x, y, w = data(classes=True)
    fit, query = made(net, x, y, w, solver), torch.randn(4, 3).double()
    again = linnet.load(fit.save(tmp_path / "fit"), net)
    for of in (
        lambda one: one.predict(query),
        lambda one: one.loo(),
        lambda one: one.forget([1]).predict(query),
    ):
        torch.testing.assert_close(of(again), of(fit), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(fit.export(query)(query), fit.predict(query), rtol=1e-5, atol=1e-6)
    if solver in ("shared", "adapt"):
        with pytest.raises(InputError):
            fit.export(query, variance=True)
    else:
        variance = fit.export(query, variance=True)(query)[1]
        near = {"rtol": 1e-4, "atol": 1e-8}
        torch.testing.assert_close(variance, fit.predictive(query).variance.to(variance), **near)
    assert fit.sets(query, coverage=0.9).shape == (4, 3)
    assert linnet.audit.mislabeled(fit).scores.isfinite().all()
    assert linnet.audit.forgetting_certificate(fit, fit.forget([0, 3])).relative < 1e-7
    torch.testing.assert_close(linnet.audit.influence(fit, query).outputs, fit.influence(query).to(x))


@pytest.mark.long
def test_the_head_is_cross_fitted_by_the_same_weights() -> None:
    net, x, y, w = data(classes=True, n=40)
    lin = linnet.linearize(linnet.with_head(net, 3, linnet.Probe(ridge=0.3, cross_fit=3), data=(x, y)))
    plain = linnet.fit(lin, (x, y), ridge="loo", sample_weight=torch.ones(40))
    torch.testing.assert_close(plain.held_out, linnet.fit(lin, (x, y), ridge="loo").held_out)
    fit = linnet.fit(lin, (x, y), ridge=RIDGE, sample_weight=w)
    by_cg = linnet.fit(lin, (x, y), ridge=RIDGE, sample_weight=w, solver=linnet.fitting.CG(tolerance=1e-12))
    torch.testing.assert_close(fit.held_out, by_cg.held_out, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fit.held_out, linnet.fit(lin, (x, y), ridge=RIDGE).held_out, atol=1e-3)


@pytest.mark.long
def test_intervals_hold_what_they_promise_whatever_the_weights() -> None:
    torch.manual_seed(0)
    net, held = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double(), []
    for _ in range(40):
        x = torch.randn(60, 2).double()
        y = x.sum(1, keepdim=True) + 0.3 * torch.randn(60, 1).double()
        fit = made(net, x[:20], y[:20], 0.3 + torch.rand(20), "dual", "loo")
        low, high = fit.interval(x[20:], coverage=0.9).unbind(-1)
        held.append(((low <= y[20:]) & (y[20:] <= high)).double().mean())
    assert 0.85 < float(torch.stack(held).mean()) < 0.96


@pytest.mark.parametrize("solver", ["dual", "adapt"])
def test_weights_are_found_by_the_index_of_the_rows(solver: str) -> None:
    net, x, y, w = data(classes=False)
    frame, answers, weights = pd.DataFrame(x.numpy()), pd.DataFrame(y.numpy()), pd.Series(w.numpy())
    expected, mixed = made(net, x, y, w, solver), torch.randperm(14).tolist()
    for rows, of, given, said in (
        (frame, answers.loc[mixed], weights.loc[mixed], "of x"),
        (frame, answers, weights.loc[mixed], "of x"),
        (frame, y, weights.loc[mixed], "of x"),
        (frame.loc[mixed], answers, weights, "of x"),
        (x, answers, weights.loc[mixed], "of y"),  # the rows of x are those of y
        (frame, answers, weights, None),
        (frame, answers, weights.to_numpy(), None),
    ):
        fit = made(net, rows, of, given, solver)
        torch.testing.assert_close(fit.predict(x), expected.predict(x), rtol=1e-8, atol=1e-8)
        note = f"sample_weight was put in the order of the index {said}"
        assert (note in fit.record.reasons.get("data", "")) == (said is not None)
    more = expected.update((x[:4], y[:4]), sample_weight=w[:4])
    found = expected.update((frame[:4], answers[:4]), sample_weight=weights[:4][::-1])
    torch.testing.assert_close(found.predict(x), more.predict(x), rtol=1e-8, atol=1e-8)
    with pytest.raises(DataError, match=r"x and sample_weight have different indices.*sample_weight\.to_n"):
        made(net, frame, answers, weights.set_axis(range(1, 15)), solver)


def test_wrong_weights_are_refused_in_words() -> None:
    net, x, y, w = data(classes=True)
    lin = linnet.linearize(net)
    wrong: list[tuple[Any, str]] = [
        (w[:3], r"shape \(3,\)"), (-w, "at index 0"), (torch.zeros(14), "holds 0 at index 0"),
        ("equal", "equal"), (w * torch.inf, "inf"), (w > 0, "bool"), ("balancd", "balancd"),
    ]  # fmt: skip
    for given, words in wrong:
        with pytest.raises(InputError, match=words):
            linnet.fit(lin, (x, y), sample_weight=given)
        with pytest.raises(InputError, match=words):
            linnet.adapt(net, (x, y), sample_weight=given)
    with pytest.raises(InputError, match="balanced"):
        linnet.fit(lin, (x, torch.randn(14, 3).double()), sample_weight="balanced")
    with pytest.raises(InputError, match="sample_weight"):
        linnet.fit(lin, (x, y), sample_weight=w, solver="sgd")
    with pytest.raises(InputError, match="tune"):
        linnet.adapt(net, (x, y), sample_weight=w, tune=True)
    fit = linnet.fit(lin, (x, y), sample_weight=w)
    for ask in (
        lambda: linnet.audit.weight_changes(fit),
        lambda: linnet.audit.loss_influence(fit, x, y),
        lambda: linnet.audit.summarize(fit, 3),
    ):
        with pytest.raises(InputError, match="sample_weight"):
            ask()
    with pytest.raises(InputError, match="balanced"):
        fit.update((x[:2], y[:2]), sample_weight="balanced")
    of_positions = linnet.fit(lin, (x, y[:, None].float()), targets=torch.randn(14, 3).double())
    assert of_positions.update((x[:2], torch.randn(2, 3).double()), sample_weight=[1.0, 2.0]).n == 16


@pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
@pytest.mark.parametrize("one_output", [True, False])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_the_cross_entropy_counts_examples_alike(solver: str, one_output: bool, tmp_path: Any) -> None:
    net, x, y, w = data(classes=True)
    if one_output:
        net, y = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double(), y % 2
    settings: Any = linnet.fitting.CG(tolerance=1e-10) if solver == "cg" else solver

    def likely(x: Tensor, y: Tensor, w: Any) -> Any:
        lin = linnet.linearize(net)
        return linnet.fit(lin, (x, y), "cross-entropy", ridge=RIDGE, solver=settings, sample_weight=w)

    query, near = torch.randn(4, 3).double(), {"rtol": 1e-5, "atol": 1e-6}
    fit = likely(x, y, w)
    # Σ w Jᵀ(p − y) + ρδ = 0
    f, j = fit.predict(x), rows_of(net, x)[1]
    p = f.sigmoid() if one_output else f.softmax(1)
    slope = p - (y[:, None] if one_output else nn.functional.one_hot(y, 3))
    delta = torch.cat([t.flatten() for t in fit.delta.values()])
    left = torch.einsum("n,ncp,nc->p", w, j, slope) + RIDGE * delta
    assert float(left.norm()) < 1e-5 * float(delta.norm())
    rest = torch.arange(14) != 5
    torch.testing.assert_close(
        fit.forget([5]).predict(query), likely(x[rest], y[rest], w[rest]).predict(query), **near
    )
    grown = fit.forget([5]).update((x[5:6], y[5:6]), sample_weight=w[5:6])
    torch.testing.assert_close(grown.predict(query), fit.predict(query), **near)
    ones = torch.ones(14)
    plain, twice = likely(x, y, None), likely(x[[*range(14), 3]], y[[*range(14), 3]], None)
    torch.testing.assert_close(likely(x, y, ones).predict(query), plain.predict(query), **near)
    torch.testing.assert_close(likely(x, y, ones).loo(), plain.loo(), **near)
    added = plain.forget([3]).update((x[3:4], y[3:4]), sample_weight=[2.0])
    torch.testing.assert_close(added.predict(query), twice.predict(query), **near)
    torch.testing.assert_close(added.predictive(query).covariance, twice.predictive(query).covariance, **near)
    # one Newton step from the optimum: H − w J_iᵀΛ_iJ_i, with the example's own weight
    spread = (
        torch.diag_embed(p) - torch.einsum("nc,nd->ncd", p, p) if not one_output else (p * (1 - p))[:, None]
    )
    h = torch.einsum("n,ncp,ncd,ndq->pq", w, j, spread, j) + RIDGE * torch.eye(j.shape[2]).double()
    own = w[5] * j[5].T @ spread[5] @ j[5]
    step = torch.linalg.solve(h - own, w[5] * j[5].T @ slope[5])
    torch.testing.assert_close(fit.loo()[5], f[5] + j[5] @ step, rtol=1e-4, atol=1e-5)
    again = linnet.load(fit.save(tmp_path / "fit"), net)
    torch.testing.assert_close(again.loo(), fit.loo(), **near)
    assert linnet.audit.forgetting_certificate(fit, fit.forget([1])).relative < 1e-5
    assert linnet.audit.mislabeled(fit).scores.isfinite().all()
    other = fit.relabel([0], y[1:2]).predict(query)
    values = y.clone()
    values[0] = y[1]
    torch.testing.assert_close(other, likely(x, values, w).predict(query), **near)
    if solver == "dual":
        chosen = linnet.fit(
            linnet.linearize(net), (x, y), "cross-entropy", ridge="loo", sample_weight="balanced"
        )
        assert chosen.ridge > 0
