"""Adapted networks as plain modules, and merged where they are a probe."""

from __future__ import annotations

import pytest
import torch

import linnet
from linnet.errors import InputError, MemoryBudgetError
from tests.nested.test_nested import network, samples


def test_a_probe_has_its_exact_variance() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0)
    x = samples(20)[0]
    mean, variance = fit.export(variance=True)(x)
    torch.testing.assert_close(mean, fit.predict(x))
    torch.testing.assert_close(variance, fit.predictive(x).variance)


def test_lower_layers_take_part_in_every_output() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0.4, ridge=0.05)
    x = samples(20)[0]
    torch.testing.assert_close(fit.export()(x), fit.predict(x))
    with pytest.raises(InputError, match=r"weight 0\.4.*adapt with weight=0"):
        fit.export(variance=True)


def test_directions_that_do_not_fit_are_refused() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0.4, ridge=0.05)
    fit.memory = 1000
    with pytest.raises(MemoryBudgetError, match=r"12 directions of 108 weights.*weight=0"):
        fit.export()


def test_a_probe_merges_into_the_network_and_nothing_else_does() -> None:
    fit = linnet.adapt(network(), samples(12), weight=0)
    x = samples(20)[0]
    merged = fit.merge(x)
    torch.testing.assert_close(merged.network(x), fit.predict(x))
    assert merged.gap < 1e-10
    assert merged.agreement == 1.0
    with pytest.raises(
        InputError, match=r"merge\(\) of a fit in which the lower layers have the weight 0\.4"
    ):
        linnet.adapt(network(), samples(12), weight=0.4, ridge=0.05).merge()
