"""A fit at its limits: rounding of the kernel, single examples, outputs without variance, foreign folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import linnet
from linnet.linear.dual import Spectrum
from linnet.predictive.noise import fit_temperature


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(n) % 3


def test_the_ridge_grid_stays_above_the_rounding_of_the_kernel() -> None:
    noise = torch.diag(torch.tensor([1e6, 1.0, -3.0], dtype=torch.float64))
    spectrum = Spectrum(noise, torch.ones(3, 1, dtype=torch.float64))
    assert spectrum.rounding == pytest.approx(3.0)
    assert float(spectrum.grid().min()) >= 30.0
    clean = Spectrum(noise.abs(), torch.ones(3, 1, dtype=torch.float64))
    assert float(clean.grid().min()) < 1.0


def test_a_class_with_one_example_is_named() -> None:
    x, y = data(7)
    y = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    (warning,) = linnet.fit(linnet.linearize(network()), (x, y)).summary()["warnings"]
    assert "1 class(es)" in warning
    assert "a ridge that is given as a number" in warning


def test_the_temperature_without_variance_is_a_temperature_of_its_own() -> None:
    fit = linnet.fit(linnet.linearize(network()), data(30), ridge="loo")
    held, labels = fit.loo(), fit.labels
    assert labels is not None

    def loss(t: float) -> float:
        log_p = torch.log_softmax(held / t, 1)  # one more example, of no class in particular
        return -float(log_p[torch.arange(len(labels)), labels].sum() + log_p.mean())

    best = fit.point_temperature
    assert best is not None
    assert best != fit.temperature
    assert loss(best) <= min(loss(best * 1.05), loss(best / 1.05)) + 1e-12


def test_right_predictions_alone_do_not_make_certainty() -> None:
    labels = torch.arange(30) % 3
    outputs = 15.0 * torch.nn.functional.one_hot(labels, 3).double()
    confident = (outputs / fit_temperature(outputs, labels)).softmax(1).max(1).values
    assert 0.9 < float(confident.min()) < 1 - 1 / 1000


def test_a_fit_loads_onto_the_linearization_too(tmp_path: Path) -> None:
    lin = linnet.linearize(network())
    fit = linnet.fit(lin, data(9))
    fit.save(tmp_path)
    x, _ = data(4, seed=5)
    torch.testing.assert_close(linnet.load_fit(tmp_path, lin).predict(x), fit.predict(x))
