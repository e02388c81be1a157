"""Intervals and sets of finite samples, against fits that were made again without each example."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.predictive import conformal


def network(outputs: int, inputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)
    return nn.Sequential(*layers).double()


def values(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=g, dtype=torch.float64)
    return x, torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.3 * noise


def classes(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = values(n, seed)
    return x, (y[:, 0] > 0.4).long() + (y[:, 0] > -0.4).long()


def without_each(fit: linnet.LinearFit | linnet.SoftmaxFit, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of fits without one example, for it (N, C) and for others (N, T, C)."""
    fits = [fit.forget([i]) for i in range(fit.n)]
    own = torch.stack([one.predict(fit.x[i : i + 1])[0] for i, one in enumerate(fits)])
    return own, torch.stack([one.predict(x) for one in fits])


KINDS = {
    "fit": lambda net, data: linnet.fit(linnet.linearize(net), data, ridge=0.3),
    "last layer": lambda net, data: linnet.fit(
        linnet.linearize(net, params="last-layer"), data, ridge=0.3, solver="shared"
    ),
    "primal": lambda net, data: linnet.fit(linnet.linearize(net), data, ridge=0.3, solver="primal"),
    "adapt": lambda net, data: linnet.adapt(net, data, weight=0.5, ridge=0.1),
    "earlier": lambda net, data: linnet.adapt(net, data, earlier=0.5, ridge=0.1),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.thinned(2)
def test_intervals_are_those_of_fits_made_again(kind: str) -> None:
    data, (x, _) = values(19), values(5, 7)
    fit = KINDS[kind](network(2), data)
    own, left = without_each(fit, x)
    off = (data[1] - own).abs()
    found = fit.interval(x, coverage=0.85)
    for t in range(len(x)):
        for c in range(2):
            # of 20 places, 3 on each side: the third smallest, and the third largest
            low = np.sort((left[:, t, c] - off[:, c]).numpy())[2]
            high = np.sort((left[:, t, c] + off[:, c]).numpy())[-3]
            assert found[t, c].tolist() == pytest.approx([low, high], abs=1e-8)


@pytest.mark.parametrize("kind", ["fit", "adapt"])
def test_a_ridge_that_was_chosen_makes_intervals_wider(kind: str) -> None:
    data, (x, _) = values(19), values(5, 7)
    net = network(2)
    fit = linnet.adapt(net, data) if kind == "adapt" else linnet.fit(linnet.linearize(net), data, ridge="loo")
    own, left = without_each(fit, x)
    factor = fit.record.noise_factor
    assert factor > 1  # of one below, the errors are as they are
    expected = conformal.jackknife(left, factor**0.25 * (data[1] - own).abs(), 0.85)
    torch.testing.assert_close(fit.interval(x, coverage=0.85), expected, atol=1e-8, rtol=0)


def unusual(p: Tensor, u: float) -> Tensor:
    """What is likelier than each class, and a share of its own."""
    return torch.stack([p[p > one].sum() + u * one for one in p])


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.thinned(3)
def test_sets_are_those_of_fits_made_again(kind: str, by_class: bool) -> None:
    data, (x, _) = classes(24), classes(9, 7)
    fit = KINDS[kind](network(3), data)
    own, left = without_each(fit, x)
    assert fit.point_temperature is not None
    p, q = ((one / fit.point_temperature).softmax(-1) for one in (own, left))
    u = conformal.drawn(torch.cat([data[0], x]), 5)
    mine = [float(unusual(p[i], u[i])[data[1][i]]) for i in range(24)]
    best = fit.predict(x).argmax(1)
    found = fit.sets(x, coverage=0.8, by_class=by_class, seed=5)
    bare = fit.sets(x, coverage=0.8, by_class=by_class, seed=5, empty=True)
    for t in range(9):
        theirs = torch.stack([unusual(q[i, t], u[24 + t]) for i in range(24)])
        for c in range(3):
            counted = [i for i in range(24) if not by_class or data[1][i] == c]
            above = sum(mine[i] < float(theirs[i, c]) for i in counted)
            expected = above < math.ceil(0.8 * (len(counted) + 1)) or c == best[t]
            assert bool(found[t, c]) == expected
            assert bool(bare[t, c]) == (above < math.ceil(0.8 * (len(counted) + 1)))


def test_sets_may_be_empty() -> None:
    fit, x = linnet.adapt(network(3), classes(40)), classes(200, 7)[0]
    bare = fit.sets(x, coverage=0.3, empty=True)
    assert not bare.any(1).all()
    assert fit.sets(x, coverage=0.3).any(1).all()


def test_sets_of_the_cross_entropy_are_those_of_one_newton_step() -> None:
    data, (x, y) = classes(40), classes(300, 7)
    fit = linnet.fit(linnet.linearize(network(3)), data, loss="cross-entropy", ridge=0.5)
    found = fit.sets(x, coverage=0.8)
    assert found.shape == (300, 3)
    assert float(found.gather(1, y[:, None]).double().mean()) == pytest.approx(0.8, abs=0.08)


def test_arrays_are_taken_as_predictions_take_them() -> None:
    data, (x, _) = classes(24), classes(5, 7)
    net = network(3).float()
    fit = linnet.adapt(net, (data[0].float(), data[1]))
    assert torch.equal(fit.sets(x.numpy(), 0.8), fit.sets(x.float(), 0.8))
    regression = linnet.adapt(net, (data[0].float(), values(24)[1].float()))
    ends = regression.interval(x.numpy(), 0.8)
    assert torch.equal(ends, regression.interval(x.float(), 0.8))
    assert ends.dtype == regression.predict(x).dtype == torch.float32


def test_one_output_for_two_classes() -> None:
    x, y = classes(40)
    data, net = (x, (y > 0).long()), network(1)
    fit = linnet.fit(linnet.linearize(net), data, loss="cross-entropy", ridge=0.3)
    found = fit.sets(classes(50, 7)[0])
    assert found.shape == (50, 2)
    assert found.any(1).all()


def test_a_part_at_a_time_gives_the_same() -> None:
    data, (x, _) = classes(40), classes(30, 7)
    whole = linnet.adapt(network(3), data)
    sets = whole.sets(x)
    whole.memory = "20KB"
    assert torch.equal(whole.sets(x), sets)
    fit = linnet.adapt(network(2), values(40))
    ends = fit.interval(x)
    fit.memory = "20KB"
    torch.testing.assert_close(fit.interval(x), ends)


def draws(seed: int, n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and new samples whose noise grows with x and has heavy tails."""
    g = np.random.default_rng(seed)
    x = g.standard_normal((n + 100, 4))
    y = x[:, :1] + x[:, :1].clip(0) * g.standard_t(3, (n + 100, 1))
    first, second = torch.from_numpy(x), torch.from_numpy(y)
    return (first[:n], first[n:]), (second[:n], second[n:])


@pytest.mark.parametrize("n", [20, 60])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_intervals_hold_what_they_promise(n: int) -> None:
    net = nn.Linear(4, 1).double()
    held: dict[float, list[float]] = {0.9: [], 0.6: []}
    for seed in range(30):
        (x, new), (y, truth) = draws(seed, n)
        fit = linnet.fit(linnet.linearize(net), (x, y), ridge=1.0)
        for coverage, each in held.items():
            ends = fit.interval(new, coverage)[:, 0]
            each.append(float(((ends[:, :1] <= truth) & (truth <= ends[:, 1:])).double().mean()))
    for coverage, each in held.items():
        assert np.mean(each) == pytest.approx(coverage, abs=4 * np.std(each) / 30**0.5 + 0.01)


@pytest.mark.long
def test_sets_hold_what_they_promise_and_each_class_by_itself() -> None:
    held: list[list[float]] = [[], [], [], []]
    for seed in range(20):
        (x, y), (new, truth) = classes(60, seed), classes(200, 1000 + seed)
        fit = linnet.adapt(network(3), (x, y))
        for place, by_class in enumerate([False, True]):
            right = fit.sets(new, 0.8, by_class=by_class).gather(1, truth[:, None])[:, 0].double()
            held[place].append(float(right.mean()))
            if by_class:
                held[2].append(float(right[truth == 1].mean()))
        bare = fit.sets(new, 0.5, empty=True).gather(1, truth[:, None])[:, 0].double()
        held[3].append(float(bare.mean()) + 0.3)  # as if of 80 %: more than half of the classes are right
    for each in held[:1] + held[2:]:
        assert np.mean(each) == pytest.approx(0.8, abs=4 * np.std(each) / 20**0.5 + 0.02)
    assert np.mean(held[1]) > 0.78


def test_a_class_without_a_sample_is_in_no_set() -> None:
    x, y = classes(40)
    with pytest.warns(UserWarning, match="1 of them without a sample"):
        adapted = linnet.adapt(network(4), (x, torch.where(y == 1, 3, y)))
    assert adapted.classes == 4
    data, fits = (x, torch.where(y == 1, 3, y)), [adapted]
    fits += [
        linnet.fit(linnet.linearize(network(4)), data, loss=loss) for loss in ("squared", "cross-entropy")
    ]
    for fit in fits:
        for by_class in (False, True):
            assert not fit.sets(x, 0.95, by_class=by_class)[:, 1].any()


def test_a_rare_class_is_in_every_set_however_sure_the_fit_is() -> None:
    x, y = classes(40)
    y = torch.where(torch.arange(40) < 3, 2, y.clamp(max=1))
    fit = linnet.fit(linnet.linearize(nn.Linear(3, 3).double()), (x, y), ridge=0.3)
    assert fit.sets(1e4 * x, by_class=True)[:, 2].all()


def test_a_class_counts_as_its_samples_however_they_are_weighed() -> None:
    x, y = classes(60)
    y = torch.where(torch.arange(60) < 4, 2, y.clamp(max=1))
    fit = linnet.adapt(nn.Linear(3, 3).double(), (x, y), sample_weight="balanced", ridge=0.3)
    counts = fit._unseen().counts_of_class
    torch.testing.assert_close(counts, torch.ones_like(counts))
    assert fit.sets(1e4 * x, by_class=True)[:, 2].all()
    uneven = linnet.adapt(nn.Linear(3, 3).double(), (x, y), sample_weight=torch.rand(60) + 0.1, ridge=0.3)
    w, counts = uneven._targets.weights.flatten(), uneven._unseen().counts_of_class
    for label in range(3):
        own = w[y == label]
        torch.testing.assert_close(counts[y == label].sum(), own.sum() ** 2 / own.square().sum())


def test_draws_belong_to_examples() -> None:
    data, (x, _) = classes(24), classes(400, 7)
    fit = linnet.adapt(network(3), data)
    whole = fit.sets(x, 0.7)
    assert torch.equal(torch.cat([fit.sets(x[i : i + 1], 0.7) for i in range(30)]), whole[:30])
    u = torch.tensor(conformal.drawn(x, 0))
    assert 0.4 < float(u.mean()) < 0.6
    assert 0.25 < float(u.std()) < 0.33
    assert conformal.drawn(x, 1) != conformal.drawn(x, 0)


def test_trained_layers_take_the_errors_of_held_out_folds() -> None:
    data, (x, y) = classes(60), classes(400, 7)
    fit = linnet.adapt(network(3), data, tune=True)
    if not fit.trained:
        fit.held_out = fit.loo()
    found = fit.sets(x, 0.85)
    assert float(found.gather(1, y[:, None]).double().mean()) > 0.75
    assert fit.held_out is not None
    assert fit.point_temperature is not None
    own, p = ((one.double() / fit.point_temperature).softmax(1) for one in (fit.held_out, fit.predict(x)))
    u = conformal.drawn(torch.cat([data[0], x]), 0)
    mine = torch.stack([unusual(own[i], u[i])[data[1][i]] for i in range(60)])
    limit = mine.sort().values[math.ceil(0.85 * 61) - 1]
    expected = torch.stack([unusual(p[t], u[60 + t]) for t in range(400)]) <= limit
    assert torch.equal(found, expected.scatter(1, p.argmax(1, keepdim=True), True))


def test_intervals_of_held_out_folds_are_their_errors_about_the_output() -> None:
    data, (x, _) = values(19), values(5, 7)
    fit = linnet.adapt(network(2), data)
    fit.held_out = fit.loo()
    half = (data[1] - fit.loo()).abs().sort(0).values[-3]  # of 20 places, the 17th
    expected = torch.stack([fit.predict(x) - half, fit.predict(x) + half], 2)
    torch.testing.assert_close(fit.interval(x, coverage=0.85), expected)


def test_the_network_sees_a_new_example_once() -> None:
    net, (x, _) = network(3), classes(30, 7)
    fit = linnet.adapt(net, classes(40), weight=0.0, earlier=1.0)
    _ = fit.point_temperature
    seen = []
    layer = fit.prior.network.reader.model.get_submodule("body.0")
    layer.register_forward_hook(lambda module, given, made: seen.append(len(made)))
    fit.sets(x)
    assert sum(seen) == 30


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda fit, x: fit.interval(x), "interval() of a fit of classes"),
        (lambda fit, x: fit.sets(x, coverage=1.0), "coverage"),
        (lambda fit, x: fit.sets(x, coverage=0), "coverage"),
        (lambda fit, x: fit.sets(x, coverage=0.97), "coverage=0.97 from 24 examples"),
        (lambda fit, x: fit.sets(x, by_class=1), "by_class"),
        (lambda fit, x: fit.sets(x, seed=-1), "seed"),
        (lambda fit, x: fit.sets(x, empty=1), "empty"),
    ],
)
def test_what_is_refused(call: object, told: str) -> None:
    data = classes(24)
    fit = linnet.adapt(network(3), data)
    with pytest.raises(InputError) as raised:
        call(fit, data[0])  # type: ignore[operator]
    assert told in str(raised.value)


def test_too_few_examples_say_how_many_are_needed() -> None:
    fit = linnet.adapt(network(2), values(12))
    with pytest.raises(InputError) as raised:
        fit.interval(values(3)[0], coverage=0.95)
    assert "19 examples or more" in str(raised.value)
    assert "coverage=0.923" in str(raised.value)
    assert fit.interval(values(3)[0], coverage=12 / 13).isfinite().all()
    assert fit.interval(values(3)[0], coverage=1e-12).isfinite().all()
    with pytest.raises(InputError, match="sets"):
        fit.sets(values(3)[0])


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_number_of_examples_that_a_coverage_needs(coverage: float) -> None:
    n = conformal.needed(coverage)
    assert conformal.rank(n, coverage) == n
    assert conformal.rank(n - 1, coverage) > n - 1


# -- inputs that are distributed otherwise ---------------------------------------------------------


def weighted_place(values: Tensor, weights: Tensor, new: float, share: float) -> float:
    """The least value that enough weight does not exceed, with a point of weight ``new`` at infinity."""
    total = float(weights.sum()) + new
    for place in values.argsort():
        if float(weights[values <= values[place]].sum()) >= share * total - 1e-9:
            return float(values[place])
    return math.inf


@pytest.mark.parametrize("kind", ["fit", "adapt"])
def test_intervals_for_other_inputs(kind: str) -> None:
    data, (x, _) = values(19), values(5, 7)
    fit = KINDS[kind](network(2), data)
    own, left = without_each(fit, x)
    off, known = (data[1] - own).abs(), data[0][:, 0].exp()
    new = torch.cat([x[:4, 0].exp(), torch.tensor([1e3]).double()])
    found = fit.interval(x, 0.7, shift=(7 * known, 7 * new))
    for t in range(5):
        for c in range(2):
            high = weighted_place(left[:, t, c] + off[:, c], known, float(new[t]), 0.7)
            low = -weighted_place(off[:, c] - left[:, t, c], known, float(new[t]), 0.7)
            assert found[t, c].tolist() == pytest.approx([low, high], abs=1e-8)
    assert found[4].isinf().all()  # nothing is like it
    same = torch.ones(19), torch.ones(5)
    torch.testing.assert_close(fit.interval(x, 0.7, shift=same), fit.interval(x, 0.7))


@pytest.mark.parametrize("by_class", [False, True])
def test_sets_for_other_inputs(by_class: bool) -> None:
    data, (x, _) = classes(40), classes(60, 7)
    fit = linnet.adapt(network(3), data)
    shift = torch.ones(40), torch.ones(60)
    plain = fit.sets(x, 0.8, by_class=by_class)
    assert torch.equal(fit.sets(x, 0.8, by_class=by_class, shift=shift), plain)
    fit.memory = "20KB"  # some at a time
    shift = data[0][:, 0].exp(), torch.cat([x[:59, 0].exp(), torch.tensor([1e6]).double()])
    found = fit.sets(x, 0.8, by_class=by_class, shift=shift)
    fit.memory = None
    assert torch.equal(fit.sets(x, 0.8, by_class=by_class, shift=shift), found)
    assert found[59].all()  # nothing is like it
    assert not torch.equal(found[:59], plain[:59])


@pytest.mark.long
def test_what_is_known_of_other_inputs_keeps_the_promise() -> None:
    layer, held = nn.Linear(4, 1).double(), {"plain": [], "shifted": []}  # type: ignore[var-annotated]
    for seed in range(60):
        (x, new), (y, truth) = draws(seed, 60)
        fit = linnet.fit(linnet.linearize(layer), (x, y), ridge=1.0)
        known, ratio = x[:, 0].exp(), new[:, 0].exp()  # the new inputs are those of larger x, where noise is
        drawn = torch.multinomial(ratio, 100, True, generator=torch.Generator().manual_seed(seed))
        new, truth, ratio = new[drawn], truth[drawn], ratio[drawn]
        for name, shift in (("plain", None), ("shifted", (known, ratio))):
            ends = fit.interval(new, 0.8, shift=shift)[:, 0]
            held[name].append(float(((ends[:, :1] <= truth) & (truth <= ends[:, 1:])).double().mean()))
    assert np.mean(held["plain"]) < 0.75
    assert np.mean(held["shifted"]) == pytest.approx(0.8, abs=4 * np.std(held["shifted"]) / 60**0.5 + 0.01)


@pytest.mark.parametrize(
    "shift",
    [
        1.0, (torch.ones(19),), (torch.ones(18), torch.ones(5)), (torch.ones(19), torch.zeros(5)),
        (torch.ones(19), "b"), (torch.ones(19), torch.full((5,), math.nan)),
        (torch.ones(19).bool(), torch.ones(5)), (torch.ones(19), torch.ones(5, 1)),
    ],
)  # fmt: skip
def test_a_shift_that_cannot_be(shift: object) -> None:
    fit = linnet.adapt(network(2), values(19))
    with pytest.raises(InputError, match=r"shift.*a pair of positive numbers"):
        fit.interval(values(5, 7)[0], 0.7, shift=shift)
