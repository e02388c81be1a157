"""The preconditioned direction: products with the inverse, layer by layer, and when it is made anew."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from linnet.curvatures.build import curvature
from linnet.likelihoods import Gaussian
from linnet.optim.gauss_newton_inverse import Undamped
from tests.optim.gauss_newton_cases import classes, classifier, mlp


class Transposed(nn.Module):
    """A linear layer whose weight is stored (d_in, d_out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        """W ᵀ x + b."""
        return torch.addmm(self.bias, x, self.weight)


NETWORKS = {
    "biases": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)
    ),
    "transposed": Transposed,
}  # fmt: skip


@pytest.mark.parametrize("inversion", ["factored", "exact"])
@pytest.mark.parametrize("name", NETWORKS)
def test_times_is_the_blocks_inverse(name: str, inversion: str) -> None:
    """However weight and bias are multiplied, the result is the damped block's inverse times the gradient."""
    torch.manual_seed(0)
    net, x = NETWORKS[name]().double(), torch.randn(30, 5, dtype=torch.float64)
    made = curvature(net, x, Gaussian(), "kfac", "exact")
    undamped = Undamped(made, inversion, shared=False)
    inverse = undamped.inverse(0.3, dict.fromkeys(made.function.names, 0.1))
    g = torch.randn(made.shape[0], dtype=torch.float64)
    expected = torch.zeros_like(g)[:, None]
    for part, block in inverse.blocks:
        dense = block.mm(torch.eye(part.layer.size, dtype=torch.float64))
        part.scatter(dense @ part.gather(g[:, None], made.space), expected, made.space)
    torch.testing.assert_close(inverse.times(g), expected[:, 0], rtol=1e-12, atol=1e-12)


def test_times_is_not_for_half_precision() -> None:
    """Autocast leaves the direction alone."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)), torch.randn(40, 20)
    made = curvature(net, x, Gaussian(), "kfac", "exact")
    inverse = Undamped(made, "factored", shared=False).inverse(0.1, dict.fromkeys(made.function.names, 0.0))
    g = torch.randn(made.shape[0])
    with torch.autocast("cpu", torch.bfloat16):
        under = inverse.times(g)
    torch.testing.assert_close(under, inverse.times(g))


def test_a_search_for_zeta_is_the_inversion_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step while the average is young, then every fifth; the search at step 20 needs none besides."""
    when: list[int] = []
    inverse = Undamped.inverse

    def counted(self: Undamped, zeta: float, decays: dict[str, float]) -> object:
        when.append(optimizer.steps)
        return inverse(self, zeta, decays)

    monkeypatch.setattr(Undamped, "inverse", counted)
    optimizer = classifier(mlp(), damping=0.1)
    for _ in range(26):
        optimizer.step(*classes())
    assert Counter(when) == Counter([1, 2, 3, 4, 5, 10, 15, 20, 20, 20, 25])
