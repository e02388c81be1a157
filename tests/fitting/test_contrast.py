"""The loss that makes features alike within a class."""

from __future__ import annotations

import math

import torch

from linnet.fitting.descent import TEMPERATURE, contrast_of


def test_it_is_the_mean_over_pairs_of_a_class() -> None:
    phi = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 2, 1, 0])  # the class of the fourth has no other
    cosine = torch.nn.functional.cosine_similarity(phi[:, None], phi[None], dim=2) / TEMPERATURE
    terms = []
    for i in (0, 1, 2, 4, 5):
        others = [j for j in range(6) if j != i]
        total = math.log(sum(math.exp(cosine[i, j]) for j in others))
        same = [total - float(cosine[i, j]) for j in others if y[j] == y[i]]
        terms.append(sum(same) / len(same))
    assert abs(float(contrast_of(phi, y)) - sum(terms) / len(terms)) < 1e-12
    assert abs(float(contrast_of(3 * phi, y) - contrast_of(phi, y))) < 1e-12


def test_it_falls_as_classes_come_together_and_apart() -> None:
    y = torch.tensor([0, 0, 1, 1])
    mixed, parted = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]]), torch.eye(2)[y]
    assert contrast_of(parted, y) < 0.01 < contrast_of(mixed, y)


def test_a_batch_without_a_pair_moves_nothing() -> None:
    phi = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = contrast_of(phi, torch.arange(3))
    loss.backward()
    assert float(loss.detach()) == 0
    assert phi.grad is not None
    assert bool((phi.grad == 0).all())
