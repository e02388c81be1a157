"""Forgetting and updating: linear algebra that must equal fits that never saw, or always saw, the data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.errors import InputError
from linnet.fitting import OneHot
from linnet.linear.iterative import Iterative
from tests.fitting.problems import flat, near, problem, real
from tests.oracles.dense import jacobian_oracle, leave_one_out_oracle, output_oracle, ridge_oracle
from tests.refusals import refused

RHO = 0.3
every_solver = pytest.mark.parametrize("solver", ["dual", "primal", "cg"])


def without(n: int, left_out: list[int]) -> list[int]:
    return [i for i in range(n) if i not in left_out]


@given(st.sets(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 100))
@pytest.mark.long
def test_forgetting_any_set_in_any_problem(left_out: set[int], seed: int) -> None:
    p = problem(outputs=2, classes=False, seed=seed, hidden=3)
    kept = without(7, list(left_out))
    smaller = p.fit(ridge=RHO).forget(list(left_out))
    near(flat(smaller.delta), ridge_oracle(p.j[kept], p.t[kept], p.f0[kept], RHO))
    near(smaller.loo(), leave_one_out_oracle(p.j[kept], p.t[kept], p.f0[kept], RHO), 1e-9)


@pytest.mark.parametrize("ridge", ["loo", "gcv", "evidence", 2.5])
def test_an_update_may_choose_the_ridge_anew(ridge: float | str) -> None:
    p = problem(n=9, classes=False, outputs=2)
    first = linnet.fit(p.lin, (p.x[:4], p.t[:4]), ridge=RHO)
    larger = first.update((p.x[4:], p.t[4:]), ridge=ridge)
    whole = linnet.fit(p.lin, (p.x, p.t), ridge=ridge)
    assert larger.ridge == pytest.approx(whole.ridge, rel=1e-9)
    near(flat(larger.delta), flat(whole.delta), 1e-8)
    near(larger.loo(), whole.loo(), 1e-8)
    assert larger.record.criterion == (ridge if isinstance(ridge, str) else "given")
    assert "ridge" in larger.summary()["reasons"]["change"]
    assert first.ridge == RHO


def test_conjugate_gradients_without_a_kernel_choose_no_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(classes=False)
    fit, exact = (p.fit(ridge=RHO, solver=solver, tolerance=1e-11) for solver in ("cg", "dual"))
    more = (p.x[:2], p.t[:2])
    assert fit.update(more, ridge="loo").ridge == pytest.approx(exact.update(more, ridge="loo").ridge)
    near(flat(fit.update(more, ridge=0.3).delta), flat(exact.update(more, ridge=0.3).delta), 1e-8)
    monkeypatch.setattr(Iterative, "kernel_form", None)
    refused(InputError, lambda: fit.update(more, ridge="loo"), "dual")


def test_new_data_may_be_of_one_class_and_of_any_kind_of_container() -> None:
    p = problem()
    fit = p.fit(ridge=RHO)
    x, y = real(3, 3, seed=9), torch.tensor([1, 1, 1])
    plain = fit.update((x, y))
    for data in (TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=2)):
        near(flat(fit.update(data).delta), flat(plain.delta), 1e-13)


def test_new_labels_keep_the_scale_of_the_old() -> None:
    p = problem()
    fit = linnet.fit(p.lin, (p.x[:5], p.y[:5]), ridge=RHO, targets=OneHot(4.0)).update((p.x[5:], p.y[5:]))
    near(fit.targets, p.t * 4.0 / 15.0)


def test_targets_given_by_hand_are_kept_through_changes() -> None:
    p = problem()
    t = 2.0 * p.t - 1.0
    fit = linnet.fit(p.lin, (p.x, p.y), targets=t, ridge=RHO)
    near(fit.forget([0]).targets, t[1:])


def test_forgetting_nothing_changes_nothing() -> None:
    p = problem()
    fit = p.fit(ridge=RHO)
    near(flat(fit.forget([]).delta), flat(fit.delta), 1e-14)
    assert fit.forget(torch.tensor([], dtype=torch.long)).n == 7


@pytest.mark.parametrize("indices", [3, [3], (3,), torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_kinds_of_indices(indices: object) -> None:
    p = problem()
    kept = without(7, [3])
    near(flat(p.fit(ridge=RHO).forget(indices).delta), ridge_oracle(p.j[kept], p.t[kept], p.f0[kept], RHO))


def test_a_change_is_noted_in_the_new_fit_alone() -> None:
    p = problem()
    fit = p.fit(ridge=RHO)
    before = fit.summary()
    smaller = fit.forget([0, 1])
    larger = fit.update((p.x[:1], p.y[:1]))
    assert smaller.summary()["reasons"]["change"] == "forgot 2 examples"
    assert larger.summary()["reasons"]["change"] == "added 1 example"
    assert smaller.summary()["seconds"]["change"] > 0
    assert fit.summary() == before


def test_forgetting_does_not_run_the_network_on_what_is_forgotten() -> None:
    """A user who asks to be forgotten leaves nothing in the new fit."""
    p = problem()
    smaller = p.fit(ridge=RHO).forget([6])
    assert smaller.x.untyped_storage().nbytes() == 6 * 3 * 8
    assert smaller.system.dual.kernel.shape == (18, 18)
    assert smaller.targets.untyped_storage().nbytes() == 6 * 3 * 8


@every_solver
def test_the_linearization_of_a_fit_is_its_own(solver: str) -> None:
    """Moving on from one fit must not change another, nor the linearization that both came from."""
    p = problem()
    lin = p.lin
    fit = linnet.fit(lin, (p.x, p.y), ridge=RHO, solver=solver)
    smaller = fit.forget([0])
    expected = fit.predict(p.x_test)
    base = lin.base(p.x_test)
    smaller.module.relinearize()
    torch.testing.assert_close(lin.base(p.x_test), base)
    torch.testing.assert_close(fit.predict(p.x_test), expected)


# --- bad input ------------------------------------------------------------------------------------


def test_a_network_with_several_outputs_and_examples_without_effect() -> None:
    """An example that the network ignores (zero Jacobian) can be forgotten and changes nothing."""
    p = problem(classes=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)).double()
    x = p.x.clone()
    x[2] = 0.0
    fit = linnet.fit(linnet.linearize(model), (x, p.t), ridge=RHO)
    j, f0 = jacobian_oracle(model, x), output_oracle(model, x)
    near(flat(fit.forget([2]).delta), flat(fit.delta))
    near(fit.loo(), leave_one_out_oracle(j, p.t, f0, RHO))
    assert fit.informativeness()[2] == 0
