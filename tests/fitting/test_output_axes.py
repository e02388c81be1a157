"""Networks whose outputs have several axes, such as a class score at every pixel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.finetuning.finetuned import Finetuned
from tests.fitting.problems import flat, near, real, solver_of
from tests.oracles.dense import jacobian_oracle
from tests.refusals import refused


class Grid(nn.Module):
    """Outputs (N, 3, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Three rows of two."""
        out: Tensor = self.layers(x).view(-1, 3, 2)
        return out


X, Y = real(9, 4, seed=1), real(54, seed=2).view(9, 3, 2)
TURNED = Y.mT.contiguous()


def grid() -> nn.Module:
    """The network, the same each time."""
    torch.manual_seed(0)
    return Grid().double()


def test_targets_are_taken_in_the_order_of_the_outputs_or_not_at_all() -> None:
    lin = linnet.linearize(grid())
    fit = linnet.fit(lin, (X, Y))
    near(fit.predict(X), linnet.fit(lin, (X, Y.flatten(1))).predict(X))
    near(fit.predict(X), linnet.fit(lin, (X, Y[..., None])).predict(X))
    words = "(9, 2, 3)", "outputs (3, 2)", "(N, 3, 2), or (N, 6)"
    refused(InputError, lambda: linnet.fit(lin, (X, TURNED)), *words)
    refused(InputError, lambda: fit.update((X, TURNED)), *words)
    refused(InputError, lambda: linnet.audit.tune_ridge(fit, (X, TURNED)), *words)
    refused(InputError, lambda: linnet.audit.influence(fit, X, labels=TURNED), "labels", *words)
    refused(InputError, lambda: linnet.audit.loss_influence(fit, X, TURNED), "labels", *words)


@pytest.mark.parametrize("method", ["lqf", "gaf", "nlft"])
def test_fine_tuning_takes_them_too(method: str) -> None:
    def tuned(y: Tensor) -> Finetuned:
        recipe = linnet.Recipe(method, loss="squared", head="keep", activation="relu")
        return linnet.finetune(grid(), (X, y), recipe, training=linnet.Training(steps=9))

    outputs = tuned(Y).predict(X)
    near(outputs.flatten(1), tuned(Y.flatten(1)).predict(X).flatten(1))
    with torch.no_grad():
        before = (grid()(X) - Y).square().sum()
    assert (outputs.flatten(1) - Y.flatten(1)).square().sum() < before
    refused(InputError, lambda: tuned(TURNED), "2, 3) but the network has outputs (3, 2)")


LABELS = torch.arange(27).view(9, 3) % 2


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_a_class_at_every_position_is_a_one_hot_target_there(solver: str) -> None:
    lin = linnet.linearize(grid())
    dense = 15.0 * nn.functional.one_hot(LABELS, 2).double()
    expected = linnet.fit(lin, (X, dense), ridge=0.3, solver=solver)
    for axis in (-1, 2):
        near(
            linnet.fit(lin, (X, LABELS), ridge=0.3, solver=solver, axis=axis).predict(X), expected.predict(X)
        )
    turned = linnet.linearize(grid(), output=lambda f: f.mT)
    other = linnet.fit(turned, (X, LABELS), ridge=0.3, solver=solver, axis=1).predict(X)
    near(other.view(9, 2, 3).mT.flatten(1), expected.predict(X))


def test_classes_at_positions_are_kept_by_changes_and_files(tmp_path: Path) -> None:
    lin = linnet.linearize(grid())
    whole = linnet.fit(lin, (X, LABELS), ridge=0.3, axis=-1)
    part = linnet.fit(lin, (X[:6], LABELS[:6]), ridge=0.3, axis=-1)
    part.save(tmp_path)
    near(linnet.load_fit(tmp_path, grid()).update((X[6:], LABELS[6:])).predict(X), whole.predict(X))
    near(whole.forget([6, 7, 8]).predict(X), part.predict(X))
    missing = LABELS.clone()
    missing[0, 0] = -100
    without = linnet.fit(lin, (X, missing), ridge=0.3, axis=-1).forget([0])  # the only one that misses any
    near(without.loo(), linnet.fit(lin, (X[1:], LABELS[1:]), ridge=0.3, axis=-1).loo())
    held = X[6:], LABELS[6:]
    dense = 15.0 * nn.functional.one_hot(held[1], 2).double()
    chosen = linnet.audit.tune_ridge(part, held)
    near(chosen.predict(X), linnet.audit.tune_ridge(part, (held[0], dense)).predict(X))


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_ignored_positions_are_rows_that_are_not_there(solver: str, tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[4, 1] = labels[0, 2] = -100
    labels[7] = -100
    model, ridge = grid(), 0.3
    lin = linnet.linearize(model)

    def fitted(index: slice | list[int]) -> Any:
        way = solver_of(solver, tolerance=1e-13)
        return linnet.fit(lin, (X[index], labels[index]), ridge=ridge, solver=way, axis=-1)

    fit, counts = fitted(slice(None)), (labels != -100)[..., None].expand(9, 3, 2).reshape(9, 6)
    j = jacobian_oracle(model, X).flatten(0, 1)
    f0 = model(X).detach().flatten(1)
    t = 15.0 * nn.functional.one_hot(labels.clamp_min(0), 2).double().reshape(-1)
    rows, r = j[counts.flatten()], (t - f0.flatten())[counts.flatten()]
    kernel = rows @ rows.T + ridge * torch.eye(len(rows)).double()
    beta = torch.linalg.solve(kernel, r)
    near(flat(fit.delta), rows.T @ beta)
    near(fit.predict(X), f0 + (j @ (rows.T @ beta)).view(9, -1))
    assert fit.noise == pytest.approx(float(ridge * r @ beta) / len(r), rel=1e-9)
    spread = (j @ j.T - j @ rows.T @ torch.linalg.solve(kernel, rows @ j.T)).view(9, 6, 9, 6)
    expected = fit.noise / ridge * spread.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    near(fit.predictive(X).covariance, expected, 1e-8)
    left = fit.loo()
    for i in range(9):  # at positions that do not count too
        near(left[i], fitted([k for k in range(9) if k != i]).predict(X[i : i + 1])[0], 1e-7)
    near(fit.forget([0, 7]).predict(X), fitted([1, 2, 3, 4, 5, 6, 8]).predict(X), 1e-7)
    for cut in (3, 5):
        near(fitted(slice(cut, None)).update((X[:cut], labels[:cut])).predict(X), fit.predict(X), 1e-7)
    grown = fitted(slice(1, 4)).update((X[4:], labels[4:])).update((X[:1], labels[:1]))
    near(grown.predict(X), fit.predict(X), 1e-7)  # nothing was ignored at first
    near(grown.update((X[7:8], labels[7:8])).predict(X), fit.predict(X), 1e-7)  # nothing to learn from
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, grid())
    near(loaded.predictive(X[:2]).variance, fit.predictive(X[:2]).variance, 1e-9)


def test_criteria_count_the_positions_that_are_there() -> None:
    labels = LABELS.clone()
    labels[4, 1] = labels[0, 2] = -100
    model, ridge = grid(), 0.3
    fit = linnet.fit(linnet.linearize(model), (X, labels), ridge=ridge, solver="dual", axis=-1)
    counts = (labels != -100)[..., None].expand(9, 3, 2).reshape(-1)
    j = jacobian_oracle(model, X).flatten(0, 1)[counts]
    t = 15.0 * nn.functional.one_hot(labels.clamp_min(0), 2).double().reshape(-1)
    r = (t - model(X).detach().flatten())[counts]
    kernel = j @ j.T + ridge * torch.eye(len(j)).double()
    inverse, path = torch.linalg.inv(kernel), fit.path(torch.tensor([ridge], dtype=torch.float64))
    logdet = float(torch.linalg.slogdet(kernel).logabsdet)
    evidence = -0.5 * (len(r) * (math.log(2 * math.pi * fit.noise / ridge) + 1) + logdet)
    gcv = len(r) * float((inverse @ r).square().sum()) / float(inverse.trace()) ** 2
    degrees = float((j @ j.T @ inverse).trace())
    for found, expected in ((path.evidence, evidence), (path.gcv, gcv), (path.degrees_of_freedom, degrees)):
        assert float(found) == pytest.approx(expected, rel=1e-9)
    assert fit.system.dual.log_evidence() == pytest.approx(evidence, rel=1e-9)


def test_losses_at_positions_take_the_labels_of_the_fit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4)).double()
    draw = torch.Generator().manual_seed(1)
    ids, query = (torch.randint(0, 7, (n, 3), generator=draw) for n in (12, 2))
    labels, asked = (torch.randint(0, 4, (n, 3), generator=draw) for n in (12, 2))
    fit = linnet.fit(linnet.linearize(net), (ids, labels), axis=2, ridge=0.5)
    found = linnet.audit.loss_influence(fit, query, asked)
    now, less = fit.predict(query), fit.forget([3]).predict(query)
    targets = 15 * nn.functional.one_hot(asked, 4).flatten(1)
    assert torch.allclose(found[3], -((targets - now) * (now - less)).sum(1))
    linnet.audit.influence(fit, query, labels=asked)
    with pytest.raises(InputError, match="leaves positions out"):
        linnet.audit.loss_influence(fit, query, asked.masked_fill(asked == 0, -100))
    with pytest.raises(InputError, match="classes at positions by squared loss"):
        _ = fit.predictive(query).probs
