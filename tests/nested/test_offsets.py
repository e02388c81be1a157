"""Values with an offset, and weights in what is calibrated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.predictive.conformal import Counts, held, jackknife
from linnet.predictive.noise import fit_moderation, fit_temperature


def noisy(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x = torch.randn(260, 4, dtype=torch.float64)
    return net, x, (x[:, :1] + x[:, 1:2].sin()) + 0.2 * torch.randn(260, 1, dtype=torch.float64)


@pytest.mark.parametrize("weighed", [False, True])
def test_noise_does_not_depend_on_an_offset(weighed: bool) -> None:
    net, x, y = noisy()
    more = {"sample_weight": torch.rand(80) + 0.5} if weighed else {}
    plain, moved = (linnet.adapt(net, (x[:80], y[:80] + offset), **more) for offset in (0.0, 1e4))
    assert moved.ridge == plain.ridge
    assert moved.noise == pytest.approx(plain.noise, rel=1e-6)
    own, other = (fit.predictive(x[80:]) for fit in (plain, moved))
    torch.testing.assert_close(other.variance, own.variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(other.mean - 1e4, own.mean, rtol=0, atol=1e-4)


def test_a_mean_that_the_intercept_cannot_carry_is_said(recwarn: pytest.WarningsRecorder) -> None:
    net, x, y = noisy()
    cases = (1e9, 1e-6, True), (1e5, 1.0, False), (1e4, 1e-6, False), (0.0, 1e-6, False)
    for offset, ridge, told in cases:
        fit = linnet.adapt(net, (x[:20], y[:20] + offset), ridge=ridge)  # fewer than features
        off = float((fit.predict(x[20:]) - offset - y[20:]).abs().mean() / y.std())
        assert off < 1.0 or told
        assert any("pass y - y.mean(0)" in one for one in fit.record.warnings) == told
        assert any("pass y - y.mean(0)" in str(one.message) for one in recwarn.list) == told
        recwarn.clear()
    classes = linnet.adapt(net, (x[:20], (y[:20, 0] > 0).long()), ridge=1e-6)
    assert not any("pass y - y.mean(0)" in one for one in classes.record.warnings)


@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_features_that_say_nothing_leave_the_mean(offset: float) -> None:
    """A large ridge holds back what features say, and not the intercept."""
    for seed in range(4):
        net, x, _ = noisy(seed)
        y = torch.randn(40, 1, dtype=torch.float64)
        plain, moved = (linnet.adapt(net, (x[:40], y + c)) for c in (0.0, offset))
        assert moved.ridge == pytest.approx(plain.ridge)
        torch.testing.assert_close(moved.predict(x[40:]) - offset, plain.predict(x[40:]), rtol=0, atol=0.02)
        torch.testing.assert_close(moved.loo() - offset, plain.loo(), rtol=0, atol=0.02)
    constant = linnet.adapt(net, (torch.ones(10, 4, dtype=torch.float64), torch.arange(10.0)[:, None]))
    assert float(constant.predict(torch.ones(1, 4, dtype=torch.float64))) == pytest.approx(4.5, abs=1e-3)


def test_doubted_targets_hardly_widen_intervals() -> None:
    net, x, y = noisy()
    y[:30] += 30 * torch.randn(30, 1, dtype=torch.float64)
    w = torch.ones(110)
    w[:30] = 1e-4
    lin = linnet.linearize(nn.Sequential(*net[:2], nn.Linear(30, 1)).double())
    for clean, all_of_them in (
        (linnet.adapt(net, (x[30:110], y[30:110])), linnet.adapt(net, (x[:110], y[:110]), sample_weight=w)),
        (
            linnet.fit(lin, (x[30:110], y[30:110]), ridge="loo"),
            linnet.fit(lin, (x[:110], y[:110]), ridge="loo", sample_weight=w),
        ),
    ):
        widths = [float(fit.interval(x[110:]).diff(dim=2).mean()) for fit in (clean, all_of_them)]
        assert widths[1] == pytest.approx(widths[0], rel=0.2)


@pytest.mark.parametrize("make", ["adapt", "squared", "cross-entropy"])
def test_doubted_labels_hardly_count_in_probabilities(make: str) -> None:
    net, x, _ = noisy()
    y = x[:, :3].argmax(1)
    y[:30] = (y[:30] + 1) % 3
    w = torch.ones(110)
    w[:30] = 1e-4

    def made(rows: slice, **options: Any) -> Any:
        data = x[rows], y[rows]
        if make == "adapt":
            return linnet.adapt(net, data, **options)
        return linnet.fit(linnet.linearize(net), data, make, ridge=0.05, **options)

    clean, every = made(slice(30, 110)), made(slice(0, 110), sample_weight=w)
    assert every.variance_scale == clean.variance_scale
    assert every.temperature == pytest.approx(clean.temperature, rel=0.15)
    sizes = [float(fit.sets(x[110:]).sum(1).double().mean()) for fit in (clean, every)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


def test_an_example_of_weight_two_is_two_examples() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(20, 6, 3, generator=generator, dtype=torch.float64)
    own, labels = torch.rand(20, generator=generator).double(), torch.arange(20) % 3
    errors = torch.rand(20, 3, generator=generator).double()
    w = torch.ones(20).double()
    w[:7] = 2
    twice = torch.arange(20).repeat_interleave(w.long())
    for coverage in (0.5, 0.8, 0.9):
        torch.testing.assert_close(
            jackknife(left, errors, coverage, Counts(w, w.new_ones(1))),
            jackknife(left[twice], errors[twice], coverage),
        )
        ones = Counts(torch.ones_like(w), w.new_ones(1))
        torch.testing.assert_close(jackknife(left, errors, coverage, ones), jackknife(left, errors, coverage))
        for by_class in (False, True):
            found = held(left, own, labels, coverage, by_class, Counts(w, w.new_ones(1)))
            assert torch.equal(found, held(left[twice], own[twice], labels[twice], coverage, by_class))
    outputs = left[:, 0] + 2 * nn.functional.one_hot(labels, 3)
    variance = left[:, 1].square()
    given = outputs[twice], labels[twice]
    assert fit_temperature(outputs, labels, None, w) == pytest.approx(fit_temperature(*given), rel=1e-4)
    both = fit_moderation(outputs, labels, variance, w), fit_moderation(*given, variance[twice])
    assert both[0] == pytest.approx(both[1], rel=1e-4)


def test_one_sample_that_is_left_has_probabilities() -> None:
    net, x, _ = noisy()
    fit = linnet.adapt(net, (x[:4], torch.tensor([0, 0, 0, 1]))).forget(classes=[0])
    assert fit.predictive(x[:3]).probs.tolist() == [[0.0, 1.0]] * 3


def test_equations_on_several_values_have_every_answer() -> None:
    """Two outputs that equations tie to one another have a noise, variances, a monitor and a certificate."""
    net, x, y = noisy()
    values = torch.cat([y + 3, x[:, 2:3].square()], 1)
    fit = linnet.adapt(net, (x[:60], values[:60]), ridge=0.1)
    held = fit.constrain(x[200:202], torch.full((2, 2), torch.nan, dtype=torch.float64).fill_(4.0))
    torch.testing.assert_close(held.predict(x[200:202]), torch.full((2, 2), 4.0, dtype=torch.float64))
    free = fit.constrain(x[200:201], torch.tensor([[torch.nan, 4.0]]), weight=1e-9)  # asks for nothing
    assert free.noise == pytest.approx(fit.noise, rel=1e-5)
    assert float(held.predictive(x[200:202]).variance.abs().max()) < 1e-8
    assert 0 <= next(iter(held.monitor([x[100:120]]))).p_value <= 1
    assert linnet.audit.forgetting_certificate(held, held.forget([0])).relative < 1e-8


@pytest.mark.filterwarnings("ignore:y is constant")
def test_constant_outputs_raise_no_alarm() -> None:
    net, x, _ = noisy()
    fit = linnet.adapt(net.float(), (x[:40].float(), torch.full((40, 1), 5.0)))
    assert not any(one.drifted for one in fit.monitor([x[k : k + 30].float() for k in (50, 100, 150)]))


@pytest.mark.long
def test_training_does_not_depend_on_the_unit_of_values() -> None:
    net, x, y = noisy()
    fits = [
        linnet.adapt(net.float(), (x[:60].float(), c * y[:60].float()), tune=True) for c in (1.0, 1e-3, 1e3)
    ]
    assert len({fit.trained for fit in fits}) == 1
    shares = [[rung.error / fit.rungs[0].error for rung in fit.rungs] for fit in fits]
    assert shares[1] == pytest.approx(shares[0], rel=1e-2)
    assert shares[2] == pytest.approx(shares[0], rel=1e-2)
