"""The expectation that is chosen by its cost: exact for few outputs, sampled labels for many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import LowRank, MonteCarlo, Passes
from linnet.curvatures import expectation as expectation_module
from linnet.curvatures.expectation import LIMIT, SAMPLES, exact_passes
from linnet.curvatures.layers import Form, Layer
from linnet.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from tests.zoo import assert_near

MANY = 300


def problem(c: int, n: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, c)).double()
    return net, (torch.randn(n, 4).double(), torch.randint(c, (n,)))


def counted(net: nn.Sequential, columns: int) -> float:
    """Multiplications of exact columns and of a pass of training, counted layer by layer."""
    linear = [m for m in net if isinstance(m, nn.Linear)]
    forward = sum(m.weight.numel() for m in linear)
    moments = sum(m.out_features**2 for m in linear)
    return (forward + columns * (forward + moments)) / (3 * forward)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block"])
def test_few_outputs_are_exact_to_the_bit(structure: str) -> None:
    net, data = problem(5)
    chosen = linnet.curvature(net, data, Categorical(), structure)
    exact = linnet.curvature(net, data, Categorical(), structure, "exact")
    torch.testing.assert_close(chosen.dense(), exact.dense())
    assert chosen.made == exact.made
    assert chosen.made.reason == ""
    assert "exact" in repr(chosen)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
def test_many_outputs_are_sampled_and_it_is_said(structure: str, tmp_path: Path) -> None:
    net, data = problem(MANY)
    chosen = linnet.curvature(net, data, Categorical(), structure)
    drawn = linnet.curvature(net, data, Categorical(), structure, MonteCarlo(SAMPLES))
    torch.testing.assert_close(chosen.diagonal(), drawn.diagonal())
    assert (chosen.made.expectation, chosen.made.samples) == ("mc", SAMPLES)
    assert f"mc with {SAMPLES} samples" in repr(chosen)
    assert drawn.made.reason == ""
    passes = counted(net, MANY - 1)
    assert passes > LIMIT
    assert f"as long as {passes:,.0f} passes of training, more than {LIMIT}" in chosen.coverage()
    assert linnet.load(chosen.save(tmp_path), net).coverage() == chosen.coverage()


def test_the_choice_falls_where_the_counted_cost_crosses_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = problem(20)
    passes = counted(net, 19)
    assert passes < LIMIT
    for limit, expected in ((passes + 0.1, "exact"), (passes - 0.1, "mc")):
        monkeypatch.setattr(expectation_module, "LIMIT", limit)
        assert linnet.curvature(net, data, Categorical()).made.expectation == expected


def test_the_cost_counts_positions_and_groups() -> None:
    plain = Layer("c", {"c.weight": (8, 4, 3, 3), "c.bias": (8,)}, Form("product", positions=10))
    assert exact_passes([plain], 0) == pytest.approx(1 / 3)
    assert exact_passes([plain], 7) == pytest.approx((1 + 7 * (1 + 64 / 288)) / 3)
    grouped = Layer("c", {"c.weight": (8, 2, 3, 3)}, Form("product", groups=4, positions=10))
    assert exact_passes([grouped], 7) == pytest.approx((1 + 7 * (1 + 4 * 4 / 144)) / 3)
    turned = Layer("t", {"t.weight": (5, 9), "t.bias": (9,)}, Form("product", transposed=True))
    assert exact_passes([turned], 1) == pytest.approx((45 + 45 + 81) / 135)
    norm = Layer("n", {"n.weight": (5,), "n.bias": (5,)})
    assert exact_passes([norm], 2) == pytest.approx(1.0)
    assert exact_passes([], 3) == 0.0


def test_positions_are_columns_too() -> None:
    """A label at each of 60 positions of 8 classes: 420 columns."""
    torch.manual_seed(0)
    net = nn.Linear(6, 8)
    deep = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), net)
    data = torch.randn(3, 60, 6), torch.randint(8, (3, 60))
    assert linnet.curvature(deep, data, Categorical(axis=2)).made.expectation == "mc"
    few = data[0][:, :4], data[1][:, :4]
    assert linnet.curvature(deep, few, Categorical(axis=2)).made.expectation == "exact"


def test_labels_are_drawn_only_where_they_give_the_same_matrix() -> None:
    net, (x, _) = problem(MANY)
    y = torch.randn(12, MANY).double()

    def made(likelihood: Any, **options: Any) -> Any:
        targets = y if isinstance(likelihood, Gaussian) else y[:, ::2]
        return linnet.curvature(net, (x, targets), likelihood, **options).made

    assert made(Gaussian()).expectation == "mc"
    heavy = made(HeteroscedasticGaussian(psd="clip"))
    assert (heavy.expectation, heavy.matrix, heavy.samples) == ("random-projection", "gauss-newton", SAMPLES)
    assert (made(HeteroscedasticGaussian(), matrix="fisher").expectation) == "mc"


def test_what_takes_no_columns_stays_exact() -> None:
    net, data = problem(MANY)
    head = linnet.linearize(net, params="last-layer")
    alone = linnet.curvature(head, data, Categorical())
    assert alone.made.expectation == "exact"
    torch.testing.assert_close(
        alone.diagonal(), linnet.curvature(head, data, Categorical(), "kfac", "exact").diagonal()
    )
    low = linnet.curvature(net, data, Categorical(), LowRank(2))
    assert low.made.expectation == "exact"
    v = torch.randn(low.shape[0]).double()
    free = linnet.curvature(net, data, Categorical(), "matrix-free")
    assert_near(free @ v, linnet.curvature(net, data, Categorical(), "matrix-free", "exact") @ v)
    hessian = linnet.curvature(*problem(4), Categorical(), "full", matrix="hessian")
    assert hessian.made.expectation == "exact"
    few = problem(4)
    assert linnet.curvature(few[0], few[1], Categorical(), "kfra").made.expectation == "recursion"


def test_a_posterior_says_how_it_was_made_and_adds_other_labels() -> None:
    net, (x, y) = problem(MANY)
    la = linnet.Laplace(net, Categorical(), "diagonal").fit((x, y))
    assert f"mc with {SAMPLES} samples" in repr(la)
    first = la.curvature.diagonal().clone()
    la.fit((x, y), add=True)
    second = la.curvature.diagonal() - first
    assert la.curvature.made.expectation == "mc"
    assert not torch.allclose(first, second), "the same labels were drawn twice"
    assert (first.sum() / second.sum() - 1).abs() < 0.5


def test_more_samples_come_nearer_to_the_exact_matrix() -> None:
    net, data = problem(MANY, 40)
    exact = linnet.curvature(net, data, Categorical(), "diagonal", "exact").diagonal()
    errors = [
        float((linnet.curvature(net, data, Categorical(), "diagonal", how).diagonal() - exact).norm())
        for how in ("mc", "auto")
    ]
    assert errors[1] < 0.7 * errors[0]


def test_the_choice_does_not_depend_on_memory() -> None:
    net, data = problem(MANY)
    made = [
        linnet.curvature(net, data, Categorical(), passes=Passes(memory=memory)).made
        for memory in ("20MB", "2GB")
    ]
    assert made[0] == made[1]
