"""What holds of every fit, of whatever features, system and likelihood: permuted, doubled, split, forgotten.

The solutions themselves are compared with dense algebra where each kind of fit has its tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import linnet
from linnet.errors import FileFormatError
from linnet.fitting import CG, Shared
from linnet.likelihoods import Gaussian
from tests.fitting.problems import near, network, problem, real

P = problem(n=9)
X, Y, T = P.x, torch.arange(9) % 3, P.x_test
RHO, EXACT = 0.3, CG(tolerance=1e-13)
FREE = float("nan")
AT, HELD = real(2, 3, seed=11), torch.tensor([[1.0, FREE, -2.0], [FREE, FREE, 3.0]]).double()
CURVATURE = linnet.curvature(P.model, (X, P.t), Gaussian(), "kfac")
NETWORKS = {
    "metric": linnet.with_metric(P.model, CURVATURE, damping=0.1),
    "sketch": linnet.with_sketch(P.model, CURVATURE, dim=20),
}


def squared(x: Tensor, y: Tensor, ridge: float, of: str = "", **options: Any) -> Any:
    """The squared loss in the weights of a network, or in other coordinates."""
    return linnet.fit(linnet.linearize(NETWORKS.get(of, P.model)), (x, y), ridge=ridge, **options)


def softmax(x: Tensor, y: Tensor, ridge: float, **options: Any) -> Any:
    """The cross-entropy."""
    return linnet.fit(P.lin, (x, y), "cross-entropy", ridge=ridge, **options)


def process(x: Tensor, y: Tensor, variance: float, **options: Any) -> Any:
    """A tangent process on values."""
    values = torch.nn.functional.one_hot(y, 3).double()
    return linnet.TangentGP(P.model, Gaussian(variance=variance), **options).fit(x, values)


FITS: dict[str, Callable[[Tensor, Tensor, float], Any]] = {
    "dual": lambda x, y, ridge: squared(x, y, ridge, solver="dual"),
    "primal": lambda x, y, ridge: squared(x, y, ridge, solver="primal"),
    "cg": lambda x, y, ridge: squared(x, y, ridge, solver=EXACT),
    "shared": lambda x, y, ridge: squared(x, y, ridge, solver=Shared(2)),
    "metric": lambda x, y, ridge: squared(x, y, ridge, "metric", solver="dual"),
    "sketch": lambda x, y, ridge: squared(x, y, ridge, "sketch", solver="primal"),
    "constrained": lambda x, y, ridge: squared(x, y, ridge, solver="dual").constrain(AT, HELD),
    "constrained primal": lambda x, y, ridge: squared(x, y, ridge, solver="primal").constrain(AT, HELD),
    "constrained cg": lambda x, y, ridge: squared(x, y, ridge, solver=EXACT).constrain(AT, HELD),
    "penalized": lambda x, y, ridge: squared(x, y, ridge).constrain(AT, HELD, weight=7 * ridge),
    "softmax": lambda x, y, ridge: softmax(x, y, ridge, solver="dual"),
    "softmax cg": lambda x, y, ridge: softmax(x, y, ridge, solver=EXACT),
    "constrained shared": lambda x, y, ridge: squared(x, y, ridge, solver=Shared(2)).constrain(AT, HELD),
    "constrained softmax": lambda x, y, ridge: softmax(x, y, ridge, solver="dual").constrain(AT, HELD),
    "constrained softmax cg": lambda x, y, ridge: softmax(x, y, ridge, solver=EXACT).constrain(AT, HELD),
    "penalized softmax": lambda x, y, ridge: softmax(x, y, ridge).constrain(AT, HELD, weight=7 * ridge),
    "adapt": lambda x, y, ridge: linnet.adapt(P.model, (x, y), weight=0.5, ridge=ridge),
    "constrained adapt": lambda x, y, ridge: FITS["adapt"](x, y, ridge).constrain(AT, HELD),
    "process": lambda x, y, ridge: process(x, y, ridge, space="function"),
    "process in weights": lambda x, y, ridge: process(x, y, ridge, space="parameter"),
}
every = pytest.mark.parametrize("name", FITS)
FORGET = [name for name in FITS if not name.startswith("process")]
#: The features of ``adapt`` are centered and scaled by the data of the first fit, and stay so.
REFIT = [name for name in FITS if not name.endswith("adapt")]


def values(name: str, y: Tensor) -> Tensor:
    """Targets as the fit takes them."""
    return torch.nn.functional.one_hot(y, 3).double() if name.startswith("process") else y


def agree(one: Any, other: Any, order: Any = slice(None), tolerance: float = 1e-7) -> None:
    """All answers of two fits, whose examples are in another order."""
    near(one.predict(T), other.predict(T), tolerance)
    near(one.predictive(T).covariance, other.predictive(T).covariance, tolerance)
    if isinstance(one, linnet.TangentGP):
        assert one.log_evidence().mean == pytest.approx(other.log_evidence().mean, rel=tolerance)
        return
    near(one.loo(), other.loo()[order], tolerance)
    near(one.influence(T), other.influence(T)[order], tolerance)
    near(one.informativeness(), other.informativeness()[order], tolerance)
    assert one.n == other.n


@every
@pytest.mark.thinned(6)
def test_the_order_of_examples(name: str) -> None:
    order = torch.tensor([4, 2, 8, 6, 0, 1, 7, 5, 3])
    agree(FITS[name](X[order], Y[order], RHO), FITS[name](X, Y, RHO), order)


@every
@pytest.mark.thinned(6)
@pytest.mark.filterwarnings("ignore:.*are copies of others", "ignore:.*have the inputs of others")
def test_data_twice_are_twice_the_ridge(name: str) -> None:
    once, twice = FITS[name](X, Y, RHO), FITS[name](torch.cat([X, X]), torch.cat([Y, Y]), 2 * RHO)
    near(twice.predict(T), once.predict(T), 1e-8)
    if name in FORGET:  # one twin forgotten counts once
        fit = FITS[name](torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]), RHO)
        near(fit.forget([0]).predict(T), fit.forget([9]).predict(T), 1e-8)


@pytest.mark.parametrize("name", sorted({*FORGET} & {*REFIT}))
@pytest.mark.thinned(6)
def test_forgetting_is_never_having_seen(name: str) -> None:
    kept = [0, 2, 3, 5, 6, 7, 8]
    fit = FITS[name](X, Y, RHO)
    before = fit.predict(T)
    agree(fit.forget([4, 1]), FITS[name](X[kept], Y[kept], RHO))
    assert torch.equal(fit.predict(T), before)


@pytest.mark.parametrize("name", FORGET)
@pytest.mark.thinned(6)
def test_forgetting_step_by_step_and_learning_again(name: str) -> None:
    fit = FITS[name](X, Y, RHO)
    gone, order = [2, 5], [0, 1, 3, 4, 6, 7, 8, 2, 5]
    less = fit.forget(gone)
    agree(fit.forget([2]).forget([4]), less)
    agree(less.update((X[gone], Y[gone])), fit, order)


@pytest.mark.parametrize("name", REFIT)
@pytest.mark.thinned(6)
def test_learning_in_two_halves_is_learning_at_once(name: str) -> None:
    first = FITS[name](X[:5], Y[:5], RHO)
    before = first.predict(T)
    agree(first.update((X[5:], values(name, Y[5:]))), FITS[name](X, Y, RHO))
    assert torch.equal(first.predict(T), before)


@every
@pytest.mark.thinned(6)
def test_a_saved_fit_gives_the_same_answers_and_knows_its_network(name: str, tmp_path: Path) -> None:
    fit = FITS[name](X, Y, RHO)
    fit.save(tmp_path)
    back = linnet.load(tmp_path, NETWORKS.get(name, P.model))
    assert type(back) is type(fit)
    agree(back, fit)
    more = X[:2] + 1, values(name, Y[:2])
    near(back.update(more).predict(T), fit.update(more).predict(T), 1e-8)
    if name in FORGET:
        near(back.forget([1]).predict(T), fit.forget([1]).predict(T), 1e-8)
        assert back.summary()["reasons"] == fit.summary()["reasons"]
    other = network(seed=9)
    with pytest.raises(FileFormatError):
        linnet.load(tmp_path, linnet.with_metric(other, CURVATURE) if name in NETWORKS else other)


@pytest.mark.parametrize("name", FORGET)
@pytest.mark.thinned(6)
def test_other_labels_are_those_of_a_fit_with_them(name: str) -> None:
    fit, other = FITS[name](X, Y, RHO), Y.clone()
    other[[1, 6]] = torch.tensor([2, 1])
    before, changed = fit.predict(T), fit.relabel([6, 1], [1, 2])
    agree(changed, FITS[name](X, other, RHO))
    assert torch.equal(changed.labels, other)
    agree(changed.relabel([1, 6], Y[[1, 6]]), fit)
    near(fit.predict(T), before, 1e-10)


@pytest.mark.parametrize("name", FORGET)
@pytest.mark.thinned(6)
def test_a_class_forgotten_is_all_its_examples(name: str) -> None:
    fit = FITS[name](X, Y, RHO)
    agree(fit.forget(classes=1), fit.forget([1, 4, 7]))
    agree(fit.forget(classes=[0, torch.tensor(2)]), fit.forget([0, 2, 3, 5, 6, 8]))
