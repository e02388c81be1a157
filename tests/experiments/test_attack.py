"""Targeted and untargeted gradient signs of the study, by hand and by definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linnet
from experiments.laplace import attack
from tests.fitting.problems import near, network, real

MODEL = network(inputs=3, outputs=4)
X, ONE = 2 * real(12, 3, seed=3), torch.ones(3).double()


def predict(x: Tensor) -> Tensor:
    return (8 * MODEL(x)).softmax(1)


def logistic(x: Tensor) -> Tensor:
    """p(1 | x) = σ(2x), for inputs (N, 1)."""
    return torch.cat([-x, x], 1).softmax(1)


def test_untargeted_steps_are_those_of_the_library() -> None:
    points, unmoved = attack.untargeted(predict, X, (0.1, 0.5), ONE)
    for step, found in zip((0.1, 0.5), points, strict=True):
        near(found, linnet.fgsm(predict, X, step).inputs, 1e-12)
    assert unmoved == 0
    hidden = attack.untargeted(logistic, torch.tensor([[500.0], [0.5]]), (0.1,), torch.ones(1))
    assert hidden[1] == 1  # a prediction that rounds to 1 has no gradient


def test_targeted_steps_climb_to_the_target() -> None:
    (near_by, far), _ = attack.targeted(logistic, torch.tensor([[-0.2], [-0.7]]), 0.5, torch.ones(1), 1, 2)
    near(near_by[:, 0], torch.tensor([0.3, -0.2]), 1e-6)
    near(far[:, 0], torch.tensor([0.8, 0.3]), 1e-6)
    points, _ = attack.targeted(predict, X, 0.1, ONE, 2, 8)
    aims = torch.full((12,), 2)
    found = attack.curves(predict, points, reached=aims, kept=predict(X).argmax(1))
    assert found["reached"][-1] > float((predict(X).argmax(1) == 2).double().mean())
    p = predict(points[3])
    assert found["entropy"][3] == pytest.approx(torch.special.entr(p).sum(1).mean().item(), rel=1e-10)
    assert found["reached"][3] == pytest.approx((p.argmax(1) == aims).double().mean().item())
