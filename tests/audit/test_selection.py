"""Active learning and summaries: variances are those of refits, greedy choices those of brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.audit import selection
from tests.fitting.problems import near, network, problem, real, rho_for
from tests.oracles.dense import jacobian_oracle

RHO = 0.4
P = problem(n=5, outputs=2, hidden=3)
POOL = real(6, 3, seed=21)
AT = real(3, 3, seed=22)
J = P.j.flatten(0, 1)
J_POOL = jacobian_oracle(P.model, POOL)
J_AT = jacobian_oracle(P.model, AT)


def blocks(j: Tensor, extra: list[int]) -> Tensor:
    """Cov · ρ/σ² of each example, (k, C, C)."""
    full = covariance(j.flatten(0, 1), extra)
    return full.view(len(j), 2, len(j), 2).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def covariance(rows: Tensor, extra: list[int]) -> Tensor:
    """Cov · ρ/σ² of rows of outputs, (k, k), given the data and labels of pool examples."""
    seen = torch.cat([J, *(J_POOL[i] for i in extra)])
    h = seen.T @ seen + RHO * torch.eye(J.shape[1], dtype=J.dtype)
    return RHO * rows @ torch.linalg.solve(h, rows.T)


def total(j: Tensor, extra: list[int]) -> float:
    """Mean trace over examples."""
    return float(blocks(j, extra).diagonal(dim1=1, dim2=2).sum(1).mean())


def log_det(j: Tensor, extra: list[int]) -> float:
    """Mean over examples of ½ log det of the covariance of a new label."""
    eye = RHO * torch.eye(2, dtype=J.dtype)
    return float(0.5 * torch.logdet(blocks(j, extra) + eye).mean())


def worth(criterion: str, j: Tensor, chosen: list[int], i: int) -> float:
    """What a label of pool example i is worth, from dense matrices."""
    if criterion == "variance":
        return total(j, chosen) - total(j, [*chosen, i])
    if criterion == "predictive-information":
        return log_det(j, chosen) - log_det(j, [*chosen, i])
    own = covariance(J_POOL[i], chosen)
    if criterion == "uncertainty":
        return float(own.trace())
    return 0.5 * float(torch.logdet(own / RHO + torch.eye(2, dtype=J.dtype)))


@pytest.mark.parametrize("at", [None, AT])
@pytest.mark.parametrize("criterion", ["variance", "information", "predictive-information", "uncertainty"])
@pytest.mark.thinned(3)
def test_greedy_choices_are_those_of_brute_force(criterion: str, at: Tensor | None) -> None:
    fit = P.fit(ridge=RHO)
    found = audit.select(fit, POOL, 4, criterion, at=at)
    j = J_POOL if at is None else J_AT
    unit = fit.noise / RHO if criterion in ("variance", "uncertainty") else 1.0
    chosen: list[int] = []
    for k in range(4):
        values = {i: worth(criterion, j, chosen, i) for i in range(6) if i not in chosen}
        best = max(values, key=lambda i: values[i])
        assert int(found.indices[k]) == best
        assert float(found.scores[k]) == pytest.approx(unit * values[best], rel=1e-8)
        chosen.append(best)
    curve = [fit.noise / RHO * total(j, chosen[:k]) for k in range(5)]
    near(found.variance, torch.tensor(curve, dtype=torch.float64), 1e-9)
    assert found.criterion == criterion


def test_the_predicted_variance_is_that_of_an_update_with_any_label() -> None:
    fit = P.fit(ridge=RHO)
    found = audit.select(fit, POOL, 3, at=AT)
    for labels in (torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])):
        after = fit.update((POOL[found.indices], labels)).predictive(AT)
        # in units of the noise, which the labels do change
        mean = float(after.variance.sum(1).mean()) / after.noise
        assert float(found.variance[-1]) / fit.noise == pytest.approx(mean, rel=1e-9)


def of_one_kernel(kind: str) -> Any:
    """A fit whose outputs have one kernel, and weights of their own."""
    if kind == "shared":
        return P.fit(ridge=RHO, solver="shared")
    if kind == "earlier":
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), network(8, 6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return linnet.adapt(net, (P.x, P.y), ridge=RHO, earlier=0.3)
    fit = linnet.adapt(P.model, (P.x, P.y), ridge=RHO, weight=0.4)
    return fit.constrain(POOL[:1], fit_targets()[:1]) if kind == "constrained" else fit


@pytest.mark.parametrize("at", [None, AT])
@pytest.mark.parametrize("criterion", ["variance", "information", "predictive-information", "uncertainty"])
@pytest.mark.parametrize("kind", ["shared", "weight", "earlier", "constrained"])
@pytest.mark.thinned(6)
def test_fits_of_one_kernel_choose_as_their_updates_say(kind: str, criterion: str, at: Tensor | None) -> None:
    fit, x = of_one_kernel(kind), POOL if at is None else at
    found = audit.select(fit, POOL, 3, criterion, at=at)
    eye = torch.eye(fit.system.c, dtype=torch.float64)

    def spread(extra: list[int], x: Tensor) -> Tensor:
        labels = torch.zeros(len(extra), dtype=torch.long)
        after = fit.update((POOL[extra], labels)) if extra else fit
        return after.system.covariance(x).double()

    def worth(i: int) -> float:
        if criterion in ("information", "uncertainty"):
            (own,) = spread(chosen, POOL[[i]])
            return float(own.trace() if criterion == "uncertainty" else 0.5 * (own / RHO + eye).logdet())
        before, after = spread(chosen, x), spread([*chosen, i], x)
        if criterion == "variance":
            return float((before - after).diagonal(dim1=1, dim2=2).sum(1).mean())
        return 0.5 * float(((before + RHO * eye).logdet() - (after + RHO * eye).logdet()).mean())

    chosen: list[int] = []
    unit = fit.noise / RHO if criterion in ("variance", "uncertainty") else 1.0
    for k in range(3):
        values = {i: worth(i) for i in range(6) if i not in chosen}
        best = max(values, key=lambda i: values[i])
        assert int(found.indices[k]) == best
        assert float(found.scores[k]) == pytest.approx(unit * values[best], rel=1e-4)
        chosen.append(best)
    last = float(spread(chosen, x).diagonal(dim1=1, dim2=2).sum(1).mean())
    assert float(found.variance[-1]) == pytest.approx(fit.noise / RHO * last, rel=1e-4)


def wrong_after(fit: Any, twin: Any, chosen: list[int], i: int, x: Tensor) -> float:
    """The share of wrong answers on x that a fit expects after a label of pool example i."""
    # twin: the same fit of float targets, which can take in that an output is what it is
    p = fit._class_probs(fit.predict(POOL[[i]]))[0]
    likely = p.argsort(descending=True)
    likely = likely[: int((p[likely].cumsum(0) < selection.LIKELY).sum()) + 1]
    for one in chosen:  # a label that is the mean of its outputs moves none of them
        twin = twin.update((POOL[[one]], twin.predict(POOL[[one]])))
    found = 0.0
    for label in likely:
        target = fit._targets.scale * torch.eye(2, dtype=torch.float64)[label][None]
        after = twin.update((POOL[[i]], label[None] if twin is fit else target)).predict(x)
        found += float(p[label]) * float(1 - fit._class_probs(after).amax(1).mean())
    return found / float(p[likely].sum())


@pytest.mark.parametrize("at", [None, AT])
@pytest.mark.parametrize("kind", ["whole", "shared", "weight", "earlier"])
def test_expected_errors_are_those_of_refits_with_each_likely_label(kind: str, at: Tensor | None) -> None:
    fit, x = P.fit(ridge=RHO) if kind == "whole" else of_one_kernel(kind), POOL if at is None else at
    twin, count = fit, 1
    if kind in ("whole", "shared"):
        twin, count = replace(P, y=P.t).fit(ridge=RHO, solver="dual" if kind == "whole" else "shared"), 3
        near(twin.predict(x), fit.predict(x), 1e-9)
    found = audit.select(fit, POOL, count, "expected-error", at=at)
    now = float(1 - fit._class_probs(fit.predict(x)).amax(1).mean())
    chosen: list[int] = []
    for k in range(count):
        falls = {i: now - wrong_after(fit, twin, chosen, i, x) for i in range(6) if i not in chosen}
        best = max(falls, key=lambda i: falls[i])
        assert int(found.indices[k]) == best
        assert float(found.scores[k]) == pytest.approx(falls[best], rel=1e-6)
        chosen.append(best)


def test_expected_errors_need_classes_and_are_the_same_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = P.fit(ridge=RHO)
    whole = audit.select(fit, POOL, 4, "expected-error")
    monkeypatch.setattr(selection, "CACHED", 1)
    near(audit.select(fit, POOL, 4, "expected-error").scores, whole.scores, 1e-12)
    values = replace(P, y=P.t).fit(ridge=RHO)
    with pytest.raises(linnet.errors.InputError, match='pass criterion="variance"'):
        audit.select(values, POOL, 2, "expected-error")


def test_columns_of_one_kernel_formed_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = of_one_kernel("weight")
    whole = audit.select(fit, POOL, 4, at=AT)
    monkeypatch.setattr("linnet.audit.selection.WHOLE", 0.0)
    lean = audit.select(fit, POOL, 4, at=AT)
    assert torch.equal(whole.indices, lean.indices)
    near(lean.scores, whole.scores, 1e-6)


def test_a_fit_by_conjugate_gradients_chooses_alike() -> None:
    dual, primal = P.fit(ridge=RHO), P.fit(ridge=RHO, solver="cg")
    one, other = audit.select(dual, POOL, 2, at=AT), audit.select(primal, POOL, 2, at=AT)
    assert torch.equal(one.indices, other.indices)
    near(other.scores, one.scores, 1e-7)


def test_equations_count_as_knowledge() -> None:
    """Outputs that are held have no variance left: nothing is gained from labels there."""
    fit = P.fit(ridge=RHO).constrain(POOL[:2], fit_targets())
    found = audit.select(fit, POOL, 6, "uncertainty")
    assert set(found.indices[-2:].tolist()) == {0, 1}
    assert float(found.scores[-1]) < 1e-9 * float(found.scores[0])


def fit_targets() -> Tensor:
    return torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("criterion", ["information", "variance"])
def test_columns_formed_when_needed_give_the_same_choice(
    criterion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = P.fit(ridge=RHO)
    whole = audit.select(fit, POOL, 4, criterion, at=AT)
    monkeypatch.setattr("linnet.audit.selection.WHOLE", 0.0)
    lean = audit.select(fit, POOL, 4, criterion, at=AT)
    assert torch.equal(whole.indices, lean.indices)
    near(lean.scores, whole.scores, 1e-9)
    near(lean.variance, whole.variance, 1e-9)


def test_scores_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = P.fit(ridge=RHO)
    whole = audit.select(fit, POOL, 2, "predictive-information")
    monkeypatch.setattr("linnet.audit.selection.CHUNK", 1)
    near(audit.select(fit, POOL, 2, "predictive-information").scores, whole.scores, 1e-12)


def test_information_falls_with_every_choice_of_its_kind() -> None:
    """Greedy information gains are those of a submodular function: they never rise."""
    scores = audit.select(P.fit(ridge=RHO), POOL, 6, "information").scores
    assert bool((scores.diff() <= 1e-12).all())
    assert math.isclose(
        float(scores.sum()),
        0.5 * float(torch.logdet(covariance(J_POOL.flatten(0, 1), []) / RHO + torch.eye(12).double())),
        rel_tol=1e-9,
    )


def test_other_kinds_of_inputs() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(3, 3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.net(a * b)

    lin = linnet.linearize(Two())
    fit = linnet.fit(lin, ((P.x, P.x), P.y), ridge=RHO)
    assert audit.select(fit, (POOL, POOL), 2).indices.shape == (2,)


# --- summaries of the training data -------------------------------------------------------------------


def test_the_greedy_choice_is_that_of_refitting_every_candidate() -> None:
    p = problem(n=7)
    rho = rho_for(p)
    fit = p.fit(ridge=rho)
    goal = fit.predict(p.x)
    chosen: list[int] = []
    distances = []
    for _ in range(3):
        tried: dict[int, float] = {}
        for j in set(range(7)) - set(chosen):
            keep = [*chosen, j]
            rows = p.j[keep].flatten(0, 1)
            right = rows.T @ (p.t - p.f0)[keep].reshape(-1)
            delta = torch.linalg.solve(rows.T @ rows + rho * torch.eye(rows.shape[1]).double(), right)
            tried[j] = float((p.f0 + p.j @ delta - goal).square().sum(1).mean())
        chosen.append(min(tried, key=lambda j: tried[j]))
        distances.append(tried[chosen[-1]])
    found = audit.summarize(fit, 3)
    assert found.indices.tolist() == chosen
    near(found.scores, torch.tensor(distances, dtype=torch.float64), 1e-9)
    assert abs(found.distance - distances[-1]) < 1e-8 * distances[-1]
    assert sorted([*found.indices.tolist(), *found.rest.tolist()]) == list(range(7))
    near(found.fit.predict(p.x_test), fit.forget(found.rest).predict(p.x_test), 1e-12)


def test_informativeness_is_the_definition() -> None:
    p = problem(n=8, tests=5)
    rho = rho_for(p)
    for solver in ("dual", "cg"):
        fit = p.fit(ridge=rho, solver=solver)
        expected = torch.stack(
            [
                (fit.predict(p.x_test) - fit.forget([i]).predict(p.x_test)).square().sum(1).mean()
                for i in range(8)
            ]
        )  # E over validation inputs of ‖f(x) − f₋ᵢ(x)‖², eq. (9)
        near(fit.informativeness(p.x_test), expected, 1e-7)
        found = audit.summarize(fit, 3, "informative", x=p.x_test)
        near(found.scores, expected, 1e-7)
        assert found.indices.tolist() == expected.argsort(descending=True)[:3].tolist()


def digits(file: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on some digits, and other digits, 12 x 12 pixels apart by class for half of them."""
    with np.load(file, allow_pickle=False) as stored:
        x = torch.from_numpy(stored["x_test"][:700].astype(np.float32)) / 255
        y = torch.from_numpy(stored["y_test"][:700].astype(np.int64))
    x = nn.functional.avg_pool2d(x[:, None], 2).flatten(1)
    net = nn.Sequential(nn.Linear(196, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[600:]), y[600:]).backward()
        optimizer.step()
    return net, x[:600], y[:600]


@pytest.mark.long
def test_dropping_informative_examples_hurts_more(data_file: Callable[[str], Path]) -> None:
    net, x, y = digits(data_file("mnist.npz"))
    fit = linnet.fit(linnet.linearize(net), (x[:120], y[:120]), ridge="loo", solver="dual")
    order = fit.informativeness().argsort(descending=True)

    def error(dropped: Tensor) -> float:
        return float((fit.forget(dropped).predict(x[200:]).argmax(1) != y[200:]).double().mean())

    most, least = error(order[:60]), error(order[60:])
    assert most > least + 0.02, (most, least)


def test_a_greedy_summary_stands_for_the_whole_better_than_chance(data_file: Callable[[str], Path]) -> None:
    net, x, y = digits(data_file("mnist.npz"))
    fit = linnet.fit(linnet.linearize(net), (x[:80], y[:80]), ridge="loo", solver="dual")
    found = audit.summarize(fit, 20)
    assert bool((found.scores[1:] <= found.scores[:-1] * (1 + 1e-9)).all())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rest = torch.randperm(80, generator=generator)[20:]
        gap = (fit.forget(rest).predict(x[:80]) - fit.predict(x[:80])).square().sum(1).mean()
        assert found.distance < 0.7 * float(gap)
