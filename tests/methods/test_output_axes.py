"""Networks whose outputs have several axes, such as a class score at every pixel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from tests.methods.problems import near, real, refused


class Grid(nn.Module):
    """Outputs (N, 3, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Three rows of two."""
        out: Tensor = self.layers(x).view(-1, 3, 2)
        return out


X, Y = real(9, 4, seed=1), real(54, seed=2).view(9, 3, 2)
TURNED = Y.mT.contiguous()


def grid() -> nn.Module:
    """The network, the same each time."""
    torch.manual_seed(0)
    return Grid().double()


def test_targets_are_taken_in_the_order_of_the_outputs_or_not_at_all() -> None:
    lin = linnet.linearize(grid())
    fit = linnet.fit(lin, (X, Y))
    near(fit.predict(X), linnet.fit(lin, (X, Y.flatten(1))).predict(X))
    near(fit.predict(X), linnet.fit(lin, (X, Y[..., None])).predict(X))
    words = "(9, 2, 3)", "outputs (3, 2)", "(N, 3, 2), or (N, 6)"
    refused(InputError, lambda: linnet.fit(lin, (X, TURNED)), *words)
    refused(InputError, lambda: fit.update((X, TURNED)), *words)
    refused(InputError, lambda: linnet.audit.tune_ridge(fit, (X, TURNED)), *words)
    refused(InputError, lambda: linnet.audit.influence(fit, X, labels=TURNED), "labels", *words)
    refused(InputError, lambda: linnet.audit.loss_influence(fit, X, TURNED), "labels", *words)


@pytest.mark.parametrize("method", ["lqf", "gaf", "nlft"])
def test_fine_tuning_takes_them_too(method: str) -> None:
    def tuned(y: Tensor) -> linnet.Finetuned:
        return linnet.finetune(
            grid(), (X, y), method, loss="squared", head="keep", activation="relu", steps=9
        )

    outputs = tuned(Y).predict(X)
    near(outputs.flatten(1), tuned(Y.flatten(1)).predict(X).flatten(1))
    with torch.no_grad():
        before = (grid()(X) - Y).square().sum()
    assert (outputs.flatten(1) - Y.flatten(1)).square().sum() < before
    refused(InputError, lambda: tuned(TURNED), "2, 3) but the network has outputs (3, 2)")
