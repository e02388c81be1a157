"""``Laplace.fit(data, add=True)`` where examples do not weigh alike in the means behind a Kronecker block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.laplace.laplace import Laplace
from tests.curvatures.side_by_side import grouped
from tests.fitting.problems import near, real
from tests.laplace.laplace_problems import CATEGORICAL, classes

L = linnet.likelihoods


def added(model: nn.Module, likelihood: Any, parts: list[tuple[Tensor, Tensor]], **options: Any) -> Laplace:
    """A posterior of several data sets, one after the other."""
    la = Laplace(model, likelihood, **grouped(**options))
    for i, part in enumerate(parts):
        la.fit(part, add=i > 0)
    return la


@pytest.mark.parametrize("structure", ["kfac", "last-layer"])
def test_examples_without_a_label_weigh_nothing(structure: str, tmp_path: Path) -> None:
    model, x, y = classes(n=14)
    y[:6] = -100
    whole = Laplace(model, CATEGORICAL, structure).fit((x, y))
    halves = [(x[:8], y[:8]), (x[8:], y[8:])]
    near(added(model, CATEGORICAL, halves, structure=structure).covariance.dense(), whole.covariance.dense())
    first = Laplace(model, CATEGORICAL, structure).fit(halves[0])
    again = linnet.load(first.save(tmp_path), model).fit(halves[1], add=True)
    near(again.covariance.dense(), whole.covariance.dense())
    assert float(again.log_evidence()) == pytest.approx(float(whole.log_evidence()), rel=1e-10)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_without_a_label_weigh_nothing(sharing: str) -> None:
    torch.manual_seed(0)
    model, likelihood = (
        nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
        L.Categorical(axis=-1),
    )
    x, y = real(9, 4, 2), torch.randint(3, (9, 4))
    y[0], y[1, 2], y[6:, 1:] = -100, -100, -100
    whole = Laplace(model, likelihood, sharing=sharing).fit((x, y))
    parts = [(x[:1], y[:1]), (x[1:5], y[1:5]), (x[5:], y[5:])]
    near(added(model, likelihood, parts, sharing=sharing).covariance.dense(), whole.covariance.dense())


def test_images_of_two_sizes() -> None:
    """A larger image has more positions, and counts for more of the mean over positions."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    )
    model.double()
    parts = [(real(4, 1, 5, 5), torch.arange(4) % 3), (real(3, 1, 9, 9, seed=1), torch.arange(3))]
    first, second = (Laplace(model, CATEGORICAL).fit(part).curvature.parts[0].operator for part in parts)
    both = added(model, CATEGORICAL, parts).curvature.parts[0].operator
    # 9 positions in each of 4 images, 49 in each of 3
    near(both.right, (36 * first.right + 147 * second.right) / 183)
