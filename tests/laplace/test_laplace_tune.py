"""Tuning by predictive likelihoods: held-out data, grids, leave-one-out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.curvatures.curvature import Curvature
from linnet.errors import NumericalError
from linnet.laplace.laplace import Laplace
from linnet.laplace.outputs import Draws
from linnet.laplace.posterior import Hyper
from linnet.laplace.tune import Scorer, left_out
from linnet.predictive.sampled import Labels, Link
from tests.curvatures.side_by_side import grouped
from tests.fitting.problems import near, real
from tests.laplace.laplace_problems import CATEGORICAL, LinearModel, classes, numbers
from tests.refusals import refused

L = linnet.likelihoods


def posterior(structure: str = "kfac", kind: str = "classes", **options: Any) -> tuple[Laplace, Any, Any]:
    """A trained network, its data and held-out data."""
    if kind == "classes":
        model, x, y = classes(n=24)
        likelihood: Any = CATEGORICAL
        held = real(20, 3, seed=30)
        truth: Any = (held[:, 0] > 0).long() + (held[:, 1] > 0.5).long()
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    else:
        model, x, y = numbers(n=24)
        likelihood, held = L.Gaussian(variance=0.5), real(20, 3, seed=30)
        y = torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1) + 0.3 * real(24, 2, seed=31)
        truth = torch.stack([held.sum(1), held[:, 0] * held[:, 1]], 1) + 0.3 * real(20, 2, seed=32)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        likelihood.nll(model(x), y).mean().backward()
        optimizer.step()
    return Laplace(model, likelihood, **grouped(structure, **options)).fit((x, y)), (x, y), (held, truth)


def density(la: Laplace, data: Any) -> float:
    """The summed predictive density."""
    return float(la.predictive(data[0]).log_density(data[1]).sum())


def says_that_the_network_does(certain: bool) -> AbstractContextManager[Any]:
    """A warning where data want no posterior around the network."""
    return pytest.warns(UserWarning, match="the network alone predicts") if certain else nullcontext()


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("structure", ["kfac", "full", "diagonal", "low-rank"])
@pytest.mark.thinned(6)
def test_grid_finds_the_best_of_all_values(kind: str, structure: str) -> None:
    la, data, held = posterior(structure, kind)
    values = [0.01, 0.1, 1.0, 10.0, 100.0]
    scores = [
        density(
            Laplace(la.curvature.function.model, la.likelihood, structure, v, params="all").fit(data), held
        )
        for v in values
    ]
    la.tune("grid", held, search=linnet.Grid(prior_precision=values))
    assert la.prior_precision == pytest.approx(values[scores.index(max(scores))])
    assert la.tuned is not None
    assert la.tuned.value == pytest.approx(max(scores), rel=1e-8)
    assert la.tuned.steps == 5


def test_grid_over_scale_and_noise() -> None:
    la, _, held = posterior("kfac", "numbers", damping="matrix-normal")
    la.tune(
        "grid",
        held,
        search=linnet.Grid(
            prior_precision=[0.1, 1, 10], data_scale=[1, 5, 25], noise_variance=[0.05, 0.2, 0.5]
        ),
    )
    assert la.tuned is not None
    assert la.tuned.steps == 27
    assert density(la, held) == pytest.approx(la.tuned.value, rel=1e-9)
    assert la.data_scale in (1.0, 5.0, 25.0)
    best = la.tuned.value
    assert best >= density(posterior("kfac", "numbers", damping="matrix-normal")[0], held)


def test_grid_of_several_precisions_keeps_their_ratios() -> None:
    la, _, held = posterior(prior_precision={"0": 1.0, "2": 4.0})
    la.tune("grid", held, search=linnet.Grid(prior_precision=[8.0]))
    assert la.prior_precision == pytest.approx({"0": 4.0, "2": 16.0})


def test_grid_with_sampled_weights() -> None:
    """The same seed for every value: the winner is that of predictions made one by one."""
    la, _, held = posterior("kfac")
    values = [0.5, 5.0, 500.0]
    la.tune("grid", held, search=linnet.Grid(prior_precision=values, predict="mc", samples=50, seed=3))
    assert la.tuned is not None
    again = la.predictive(held[0], "mc", samples=50, seed=3).log_density(held[1])
    assert la.tuned.value == pytest.approx(float(again.sum()), rel=1e-9)
    assert any(la.prior_precision == pytest.approx(v) for v in values)


def test_one_set_of_networks_serves_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    la, _, held = posterior("kfac")
    drawn: list[int] = []
    sample = Curvature.sample

    def counted(self: Curvature, n: int, generator: Any = None) -> torch.Tensor:
        drawn.append(n)
        return sample(self, n, generator)

    monkeypatch.setattr(Curvature, "sample", counted)
    values = [0.5, 5.0]
    la.tune("grid", held, search=linnet.Grid(prior_precision=values, predict="mc", samples=20, seed=3))
    assert la.tuned is not None
    whole, in_one = la.tuned.value, sum(drawn)
    drawn.clear()
    batches = DataLoader(TensorDataset(*held), 5)
    la.tune("grid", batches, search=linnet.Grid(prior_precision=values, predict="mc", samples=20, seed=3))
    assert sum(drawn) == in_one == len(values) * 20  # four batches: no further draws
    assert la.tuned.value == pytest.approx(whole, rel=1e-9)


def test_draws_are_the_same_at_every_pass_kept_or_not() -> None:
    la, _, _ = posterior("diagonal")
    kept, again = (Draws(la.covariance, 20, 3, memory) for memory in ("1GB", "1KB"))
    assert kept.kept
    assert not again.kept
    passes = [torch.cat(list(draws)) for draws in (kept, kept, again, again)]
    assert passes[0].shape == (20, la.covariance.shape[0])
    assert all(torch.equal(passes[0], other) for other in passes[1:])


@pytest.mark.parametrize("structure", ["kfac", "full", "diagonal", "low-rank", "matrix-normal"])
@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("criterion", ["validation", "loo"])
@pytest.mark.parametrize("link", ["probit", "pairwise"])
@pytest.mark.thinned(6)
def test_gradient_of_predictive_likelihoods_by_finite_differences(
    structure: str, kind: str, criterion: str, link: str
) -> None:
    if kind == "numbers" and link == "pairwise":
        link = "probit"
    damping = "matrix-normal" if structure == "matrix-normal" else "exact"
    form = 2.0 if structure == "low-rank" else {"0": 0.5, "2": 3.0}
    la, data, held = posterior(
        "kfac" if damping != "exact" else structure, kind, prior_precision=form, damping=damping
    )
    state = la._fitted
    labels = Labels(la.likelihood, state.labels.shape, Link(link))
    left, noise = criterion == "loo", criterion == "validation" and kind == "numbers"
    scorer = Scorer(state.posterior, state.groups, la.likelihood, data if left else held, labels, left)
    value, slope = scorer.gradient(state.hyper, True, noise)
    assert value == pytest.approx(float(scorer.values([state.hyper])[0]), rel=1e-10)
    g, at = state.groups.count, state.hyper

    def moved(i: int, step: float) -> float:
        factor = torch.ones(g + 2, dtype=torch.float64)
        factor[i] = torch.tensor(step).double().exp()
        prior, scale, level = factor[:g], factor[g], factor[g + 1]
        return float(scorer.values([Hyper(at.prior * prior, at.scale * scale, at.noise * level)])[0])

    for i in range(g + 1 + noise):
        expected = (moved(i, 1e-4) - moved(i, -1e-4)) / 2e-4
        assert float(slope[i]) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_validation_by_gradient_beats_the_grid(kind: str) -> None:
    la, _, held = posterior("kfac", kind)
    by_grid = la.tune("grid", held).tuned
    with says_that_the_network_does(kind == "classes"):
        by_gradient = la.tune("validation", held, data_scale=True).tuned
    assert by_grid is not None
    assert by_gradient is not None
    assert by_gradient.value >= by_grid.value - 1e-9
    assert density(la, held) == pytest.approx(by_gradient.value, rel=1e-8)
    assert by_gradient.edges == (("prior_precision",) if kind == "classes" else ())
    with says_that_the_network_does(kind == "classes"):
        layers = la.tune("validation", held, prior="layer").tuned
    assert layers is not None
    assert layers.value >= by_gradient.value - 1e-6


def test_validation_finds_the_noise() -> None:
    la, _, held = posterior("kfac", "numbers")
    free = density(la.tune("validation", held), held)
    noise = la.likelihood.describe()["variance"]
    assert noise != 0.5
    fixed = density(posterior("kfac", "numbers")[0].tune("validation", held, noise=False), held)
    assert free > fixed


@pytest.mark.parametrize("structure", ["full", "kfac", "block"])
def test_leave_one_out_of_a_linear_model_is_refitting(structure: str) -> None:
    problem = LinearModel()
    la = problem.laplace(structure)
    prediction = la.predictive(problem.x)
    mean, spread = left_out(la.likelihood, prediction.mean, prediction.covariance, problem.y, (1,))
    for i in range(len(problem.x)):
        expected_mean, expected_variance = problem.left_out(i)
        near(mean[i], expected_mean, 1e-8)
        near(spread[i, 0], expected_variance[None], 1e-8)


def test_leave_one_out_of_classes_is_near_refitting() -> None:
    """A logistic regression, fitted again without each example: the predictive density agrees to 2 %."""
    x = real(15, 2, seed=1)
    y = (x.sum(1) > 0).long()

    def optimum(keep: torch.Tensor) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = CATEGORICAL.nll(model(x[keep]), y[keep]).sum() + 0.5 * model.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return model

    everything = torch.arange(15)
    la = Laplace(optimum(everything), CATEGORICAL, "full", 1.0).fit((x, y))
    value = la.tune("loo", (x, y), search=linnet.Grid(prior_precision=[1.0])).tuned
    exact = 0.0
    for i in range(15):
        keep = everything[everything != i]
        other = Laplace(optimum(keep), CATEGORICAL, "full", 1.0).fit((x[keep], y[keep]))
        exact += density(other, (x[i : i + 1], y[i : i + 1]))
    assert value is not None
    assert value.value == pytest.approx(exact, rel=0.02)
    assert density(la, (x, y)) > exact * 0.98  # not the same as scoring what has been seen


def test_leverage_above_one_is_scaled_down() -> None:
    """A covariance that no data can have left gives a large, finite, positive definite one."""
    mean, spread = left_out(L.Gaussian(), torch.zeros(1, 2), 3 * torch.eye(2)[None], torch.ones(1, 2), (2,))
    assert spread.isfinite().all()
    assert mean.isfinite().all()
    assert float(torch.linalg.eigvalsh(spread).min()) > 1.0


def test_leave_one_out_by_gradient_beats_the_grid() -> None:
    la, data, _ = posterior("kfac")
    by_grid = la.tune("loo", data).tuned
    with says_that_the_network_does(True):
        by_gradient = la.tune("loo", data, search="gradient").tuned
    assert by_grid is not None
    assert by_gradient is not None
    assert by_gradient.value >= by_grid.value - 1e-9


def test_a_grid_says_where_it_was_too_short() -> None:
    la, _, held = posterior("kfac", "numbers")
    wide = la.tune(
        "grid", held, search=linnet.Grid(prior_precision=[1e-6, *torch.logspace(-3, 3, 25).tolist(), 1e6])
    ).tuned
    assert wide is not None
    assert wide.edges == ()
    best = float(la.prior_precision)
    for grid in ([best, 10 * best, 100 * best], [100 * best, 10 * best, best]):
        short = la.tune("grid", held, search=linnet.Grid(prior_precision=grid)).tuned
        assert short is not None
        assert short.edges == ("prior_precision",)
    one = la.tune("grid", held, search=linnet.Grid(prior_precision=best)).tuned
    assert one is not None
    assert one.edges == ()


def test_networks_that_overflow_are_never_the_best() -> None:
    """A prior so wide that sampled weights overflow has no likelihood; the others are compared."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40), torch.nn.ReLU()
    )
    net.append(torch.nn.Linear(40, 2))
    x = torch.randn(30, 3)
    data = x, (x[:, 0] > 0).long()
    la = Laplace(net, CATEGORICAL, structure="diagonal").fit(data)
    wide = linnet.Grid(prior_precision=[1e-30, 1.0, 100.0], data_scale=[1e-30], predict="mc", samples=5)
    assert float(la.tune("grid", data, search=wide).prior_precision) in (1.0, 100.0)
    only = linnet.Grid(prior_precision=[1e-30, 1e-29], data_scale=[1e-30], predict="mc", samples=5)
    refused(NumericalError, lambda: la.tune("grid", data, search=only), "all 2 points")
