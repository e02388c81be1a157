"""The study of earlier layers: its draws are those of ``linnet.adapt``, its regression scikit-learn's."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import linnet
from experiments.adapt.depth import PENALTIES, _outputs, _path, fitted, resampled
from experiments.adapt.names import compared
from experiments.adapt.nested import drawn
from experiments.adapt.zoo import choices, left_out, table
from linnet.nested.search import Shares


def test_a_draw_is_fitted_as_adapt_does() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 20),
        nn.Tanh(),
        nn.Linear(20, 20),
        nn.Tanh(),
        nn.Linear(20, 9),
        nn.Tanh(),
        nn.Linear(9, 2),
    )
    x = torch.randn(60, 6, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    net = net.double()
    for params, given in ((None, Shares(0.0)), ("6", Shares(0.0)), (None, Shares(None, 0.7))):
        fit = linnet.adapt(net, (x[:40], y[:40]), weight=given.weight, earlier=given.earlier, params=params)
        rows = fit.module.staged(x)
        outputs, choice = fitted(rows[:40], y[:40], rows[40:], fit.module.width, given)
        assert torch.allclose(outputs, fit.predict(x[40:]), atol=1e-6)
        assert choice.taken.ridge == fit.ridge


def test_logistic_regression_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.3 * torch.randn(50, generator=generator) > 0).long() + (x[:, 1] > 1).long()
    for penalty, weights in zip(sorted(PENALTIES, reverse=True), _path(x, y, 3), strict=True):
        if penalty < 1e-3:  # both stop before the optimum
            continue
        known = LogisticRegression(C=1 / (penalty * 50), max_iter=5000, tol=1e-8).fit(x.numpy(), y.numpy())
        found = _outputs(weights, x).softmax(1).numpy()
        assert np.allclose(found, known.predict_proba(x.numpy()), atol=5e-3)


def test_errors_are_over_draws_and_test_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(5, 400, generator=generator) < 0.8
    ahead, error = resampled(first, torch.zeros(5, 400, dtype=torch.bool))
    assert abs(ahead - 80) < 3
    assert 0.5 < error < 2.5  # 100 √(0.8 · 0.2 / 2000) = 0.9 and a little more
    same = first[:1].expand(5, -1)
    assert 1.5 < resampled(same, torch.zeros(5, 400, dtype=torch.bool))[1] < 2.5  # 100 √(0.8 · 0.2 / 400) = 2


def test_names_that_lie_at_the_middle_of_their_class_help() -> None:
    generator = torch.Generator().manual_seed(0)
    names = torch.nn.functional.normalize(torch.randn(3, 30, generator=generator), dim=1)
    labels = torch.arange(360) % 3
    rows = names[labels] + 0.5 * torch.randn(360, 30, generator=generator)
    kept = {"rows": rows.repeat(1, 2), "pool": labels[:60], "test": labels[60:], "width": 30}
    helped = compared(kept, names.double().repeat(1, 2), 2, range(4))
    misled = compared(kept, names.double().roll(1, 0).repeat(1, 2), 2, range(4))
    assert helped["accuracy"]["without"] == misled["accuracy"]["without"]
    assert misled["gain"][0] < -3 < 3 < helped["gain"][0]


def test_the_network_of_least_left_out_error_is_taken() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 2
    fit = linnet.adapt(net, (x, y))
    told = {"accuracy": {"adapt": [0.5]}}
    found = left_out((fit.module.staged(x), y, fit.module.width), 20, [0], told)
    at = drawn(y, 20, 0)
    again = linnet.adapt(net, (x[at], y[at]))
    error = (again.loo() - again.targets).square().sum(1).mean()
    assert np.isclose(found["left out"][0], float(error), rtol=1e-6)
    cells = [
        {"kind": "images", "network": network, "task": task, "shots": 5, "left out": out, "accuracy": right}
        for network, task, out, right in (
            ("a", "x", [0.2, 0.4], [0.8, 0.6]), ("b", "x", [0.3, 0.3], [0.7, 0.5]),
            ("a", "y", [0.2, 0.2], [0.5, 0.5]), ("b", "y", [0.3, 0.1], [0.4, 0.9]),
        )
    ]  # fmt: skip
    one, other = choices(cells, "images", 5)
    assert one["networks"] == other["networks"] == ["a", "b"]
    assert np.isclose(one["taken"], 65)  # 0.8 and 0.5
    assert np.isclose(one["best"], 70)
    assert np.isclose(one["fixed"], 60)  # b, the best on the other task
    assert np.isclose(other["fixed"], 50)
    assert table(cells).count("\n") == 2
