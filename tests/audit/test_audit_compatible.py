"""Flips, compatible updates, group means and counterfactuals, against brute force."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import linnet
from linnet import audit
from linnet.errors import DataError
from tests.fitting.problems import ALPHA, flat, near, problem, real
from tests.oracles.dense import ridge_oracle

RHO = 0.3
every_solver = pytest.mark.parametrize("solver", ["dual", "primal", "cg"])
P = problem()
S = problem(n=6, hidden=2)  # a small one, for conjugate gradients


# --- flips ----------------------------------------------------------------------------------------


def one_hot(classes: list[int]) -> Tensor:
    return torch.eye(3)[classes]


def test_flips_are_counted() -> None:
    y = [0, 1, 2, 0, 1]
    found = audit.flips(one_hot([0, 1, 0, 0, 2]), one_hot([0, 2, 2, 1, 0]), real(5, 3), y)
    assert found.negative.tolist() == [1, 3]
    assert found.positive.tolist() == [2]
    assert (found.negative_rate, found.positive_rate) == (0.4, 0.2)
    assert (found.accuracy_before, found.accuracy_after) == (0.6, 0.4)
    assert found.accuracy_after - found.accuracy_before == pytest.approx(
        found.positive_rate - found.negative_rate
    )
    assert found.relative_negative_rate == pytest.approx(0.4 / (0.6 * 0.6))
    assert "2 negative flip(s) (40.0%)" in str(found)


def test_predictors_of_every_kind() -> None:
    fit = P.fit(ridge=RHO)
    outputs = fit.predict(P.x_test)
    y = outputs.argmax(1)
    for other in (fit, fit.predict, outputs, fit.module):
        found = audit.flips(other, fit, P.x_test, y)
        assert found.accuracy_before == found.accuracy_after == 1.0
        assert found.relative_negative_rate == 0.0
    network_itself = audit.flips(P.model.eval(), fit, P.x_test, y)
    assert network_itself.accuracy_before == float((P.f0_test.argmax(1) == y).double().mean())


def test_classes_are_found_by_the_index_of_the_rows() -> None:
    rows, y = pd.DataFrame(real(5, 3).numpy()), pd.Series([0, 1, 2, 0, 1])
    old, new = one_hot([0, 1, 0, 0, 2]), one_hot([0, 2, 2, 1, 0])
    assert audit.flips(old, new, rows, y[::-1]).negative.tolist() == [1, 3]
    with pytest.raises(DataError, match="indices"):
        audit.flips(old, new, rows, y.set_axis(range(1, 6)))
    before, fit, x, classes = an_update()
    expected = audit.compatible(fit, x, before, classes)
    found = audit.compatible(fit, pd.DataFrame(x.numpy()), before, pd.Series(classes.numpy())[::-1])
    assert torch.equal(found.pinned, expected.pinned)
    assert len(found.pinned) > 0


def test_a_perfect_update_has_no_relative_rate() -> None:
    assert audit.flips(one_hot([0, 0]), one_hot([0, 1]), real(2, 3), [0, 1]).relative_negative_rate == 0.0


# --- compatible updates -----------------------------------------------------------------------------


def an_update() -> tuple[Any, Any, Tensor, Tensor]:
    """An old fit, a new one of more data, and examples on which the new one takes answers back."""
    p = problem(n=12, seed=3, tests=40)
    old = linnet.fit(p.lin, (p.x[:7], p.y[:7]), ridge=1.0)
    new = old.update((p.x[7:], p.y[7:]))
    y = old.predict(p.x_test).argmax(1)
    y[::4] = (y[::4] + 1) % 3  # the old fit is wrong on these
    return old, new, p.x_test[:12], y[:12]


def objective(fit: Any) -> float:
    """What the fit minimizes."""
    errors = fit.targets - fit.predict(fit.x)
    return float(0.5 * errors.square().sum() + 0.5 * fit.ridge * flat(fit.delta).square().sum())


def test_no_answer_is_taken_back() -> None:
    old, new, x, y = an_update()
    found = audit.compatible(new, x, old, y)
    assert len(found.before.negative) > 0
    assert len(found.after.negative) == 0
    assert set(found.before.negative.tolist()) <= set(found.pinned.tolist())
    near(found.fit.predict(x)[found.pinned], old.predict(x)[found.pinned], 1e-9)
    # only what needs it is held: the rest moves on
    everything = audit.compatible(new, x, old.predict(x), y, pin="correct")
    assert len(everything.after.negative) == 0
    assert len(found.pinned) <= len(everything.pinned) == 9
    assert everything.rounds == 1
    assert objective(new) < objective(found.fit) <= objective(everything.fit)


def test_a_weight_changes_less_and_may_leave_flips() -> None:
    old, new, x, y = an_update()
    before = len(audit.flips(old, new, x, y).negative)
    weak, strong = (audit.compatible(new, x, old, y, weight=w) for w in (1e-9, 1e6))
    assert len(weak.after.negative) == before > 0
    assert len(strong.after.negative) == 0
    hard = audit.compatible(new, x, old, y)
    assert (weak.fit.predict(x) - new.predict(x)).norm() < 1e-6 * (
        hard.fit.predict(x) - new.predict(x)
    ).norm()


def test_nothing_to_do_and_one_round_only() -> None:
    old, new, x, y = an_update()
    same = audit.compatible(new, x, new, y)
    assert same.fit is new
    assert (same.rounds, len(same.pinned)) == (0, 0)
    assert audit.compatible(new, x, old, y, rounds=1).rounds == 1


# --- group means ------------------------------------------------------------------------------------


def test_group_means_before_and_after_a_constraint() -> None:
    fit = P.fit(ridge=RHO)
    x, groups = real(6, 3, seed=8), torch.tensor([5, 2, 5, 2, 2, 5])
    fair = fit.constrain(x, groups=groups)
    table = audit.group_means(fair, x, groups, before=fit)
    assert table.groups.tolist() == [2, 5]
    assert table.counts.tolist() == [3, 3]
    assert table.before is not None
    assert table.gaps_before is not None
    near(table.before, torch.stack([fit.predict(x)[groups == g].mean(0) for g in (2, 5)]))
    near(table.gaps_before, (table.before[0] - table.before[1]).abs())
    assert float(table.gaps.max()) < 1e-10 * float(table.gaps_before.max())
    assert "before: gap" in str(table)
    assert audit.group_means(fit, x, groups).gaps_before is None


# --- counterfactuals ----------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize(("index", "target"), [(2, 1), ([0, 5], [2, 2])])
@pytest.mark.thinned(3)
def test_other_labels_are_a_refit(solver: str, index: Any, target: Any) -> None:
    p = P if solver == "dual" else S
    fit = p.fit(ridge=RHO, solver=solver)
    found = audit.counterfactual(fit, index, target, p.x_test)
    t = p.t.clone()
    t[index] = ALPHA * torch.eye(3, dtype=t.dtype)[target]
    expected = ridge_oracle(p.j, t, p.f0, RHO)
    before = ridge_oracle(p.j, p.t, p.f0, RHO)
    near(flat(found.fit.delta), expected)
    near(flat(found.delta), expected - before, 1e-9)
    assert found.after is not None
    assert found.change is not None
    assert found.flipped is not None
    near(found.after, p.f0_test + p.j_test @ expected)
    near(found.change, p.j_test @ (expected - before), 1e-9)
    assert torch.equal(
        found.flipped,
        ((p.j_test @ expected + p.f0_test).argmax(1) != fit.predict(p.x_test).argmax(1)).nonzero()[:, 0],
    )
    # the first fit is as it was, the other one can be asked anything
    near(flat(fit.delta), before)
    near(found.fit.loo(), linnet.fit(p.lin, (p.x, p.y), targets=t, ridge=RHO).loo(), 1e-8)


def test_the_first_order_is_exact() -> None:
    """A label moved by a hundredth changes predictions by exactly a hundredth of what the whole move does."""
    p = problem(classes=False)
    fit = p.fit(ridge=RHO)
    move = real(1, 3, seed=4)
    whole = audit.counterfactual(fit, [3], p.t[[3]] + move, p.x_test).change
    part = audit.counterfactual(fit, [3], p.t[[3]] + 0.01 * move, p.x_test).change
    assert whole is not None
    assert part is not None
    near(100 * part, whole, 1e-8)


@every_solver
def test_other_labels_under_equations(solver: str) -> None:
    p = P if solver == "dual" else S
    x, held = real(1, 3, seed=9), torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    fit = p.fit(ridge=RHO, solver=solver).constrain(x, held)
    found = audit.counterfactual(fit, 0, 1, x).fit
    near(found.predict(x), held, 1e-10)
    y = p.y.clone()
    y[0] = 1
    near(flat(found.delta), flat(linnet.fit(p.lin, (p.x, y), ridge=RHO).constrain(x, held).delta), 1e-9)


def test_all_labels_at_once() -> None:
    found = audit.counterfactual(P.fit(ridge=RHO), range(7), 2 - P.y)
    assert found.before is None
    assert found.change is None
    assert found.flipped is None
    near(flat(found.fit.delta), flat(linnet.fit(P.lin, (P.x, 2 - P.y), ridge=RHO).delta))


# --- forgetting ---------------------------------------------------------------------------------------


@every_solver
def test_forgetting_is_certified(solver: str) -> None:
    p = P if solver == "dual" else S
    fit = p.fit(ridge=RHO, solver=solver)
    found = audit.forgetting_certificate(fit, fit.forget([1, 4]))
    assert found.relative < 1e-11
    assert (found.retained, found.forgotten) == (len(p.x) - 2, 2)
    assert found.warnings == ()
    assert audit.forgetting_certificate(fit, [1, 4]).relative < 1e-11


def test_the_bound_holds_for_a_fit_that_did_not_forget_quite() -> None:
    fit = P.fit(ridge=RHO)
    kept = [0, 2, 3, 5, 6]
    best = ridge_oracle(P.j[kept], P.t[kept], P.f0[kept], RHO)
    smaller = fit.forget([1, 4])
    off = 1e-3 * real(len(best), seed=6)
    with torch.no_grad():
        for name, value in smaller.module.space.to_params(best + off).items():
            smaller.module.delta[name].copy_(value)
    found = audit.forgetting_certificate(fit, smaller)
    j = P.j[kept].flatten(0, 1)
    gradient = (j.T @ j + RHO * torch.eye(j.shape[1], dtype=j.dtype)) @ off
    assert found.gradient == pytest.approx(float(gradient.norm()), rel=1e-8)
    assert found.distance == pytest.approx(float(gradient.norm()) / RHO, rel=1e-8)
    assert found.distance >= float(off.norm())
    assert found.relative_distance == pytest.approx(found.distance / float((best + off).norm()), rel=1e-8)
    start = j.T @ (P.t - P.f0)[kept].reshape(-1)
    assert found.relative == pytest.approx(float(gradient.norm() / start.norm()), rel=1e-8)


@pytest.mark.parametrize("weight", [None, 2.0])
def test_forgetting_under_equations_is_certified(weight: float | None) -> None:
    x, held = real(2, 3, seed=9), real(2, 3, seed=10)
    fit = P.fit(ridge=RHO).constrain(x, held, weight=weight)
    assert audit.forgetting_certificate(fit, fit.forget([0, 6])).relative < 1e-10
    # against the data as they were, the fit that forgot is not optimal
    free = P.fit(ridge=RHO)
    assert audit.forgetting_certificate(fit, free.forget([0, 6])).relative > 0 or weight is None


def test_a_certificate_says_what_it_does_not_cover() -> None:
    model = linnet.with_head(P.model, 3, data=(P.x, P.y))
    fit = linnet.fit(linnet.linearize(model), (P.x, P.y), ridge="evidence")
    found = audit.forgetting_certificate(fit, [0])
    assert any("the head was fitted on 1 of the forgotten" in line for line in found.warnings)
    assert any("the ridge was chosen by 'evidence'" in line for line in found.warnings)
