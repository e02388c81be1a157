"""Wrong arguments that no kind of the grid covers: in combination, of rare types, or of extreme size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.errors import LinnetError
from tests.hostile import small


def narrow() -> nn.Module:
    """A teacher for other inputs."""
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def short(kind: torch.dtype) -> Callable[[], Any]:
    """Directions of a network in half precision, which torch does not factorize."""
    return lambda: linnet.spectrum.anisotropy_directions(
        small.conv_net().to(kind), small.images()[0].to(kind), k=2
    )


def recovered() -> nn.Module:
    """A network taught by another that takes other inputs."""
    training = linnet.Training(steps=2, batch_size=5)
    leaky = linnet.surgery.leaky_relu(small.relu_net())
    return linnet.surgery.recover(leaky, small.classes(), narrow(), training=training)


REFUSED: dict[str, Callable[[], Any]] = {
    "teacher of other inputs": recovered,
    "float16 directions": short(torch.float16),
    "bfloat16 directions": short(torch.bfloat16),
    "prior mean beyond the type": lambda: linnet.continual.OnlineLaplace(
        small.net().float(), small.likelihood(), prior_mean=1e300
    ),
    "file /": lambda: linnet.spectrum.gram(small.lin(), small.x(), file="/"),
    "file .": lambda: linnet.spectrum.gram(small.lin(), small.x(), file="."),
    "file ..": lambda: linnet.spectrum.gram(small.lin(), small.x(), file=".."),
    "entries of another network": lambda: linnet.spectrum.condition_number(
        small.lin(), {"a": small.x(), "b": small.x()}
    ),
    "entries of another network beside its own": lambda: linnet.spectrum.gram_part(
        small.lin(), small.x(), file="kernel.npy", part=(0, 1), x2={"a": small.x(), "b": small.x()}
    ),
    "a target for two": lambda: linnet.audit.counterfactual(small.fit(), [0, 1], 1),
    "x0 of another shape": lambda: linnet.solvers.cg(
        small.operator(), small.normal(3, 2), x0=small.normal(3)
    ),
    "rank 2.0": lambda: linnet.solvers.nystrom(small.operator(), rank=2.0),  # type: ignore[arg-type]
    "a fit as an operator": lambda: linnet.solvers.cg(small.fit(), small.normal(3)),  # type: ignore[type-var]
    "a function of another shape": lambda: linnet.solvers.slq(small.operator(), torch.sum, 2, 2),
    "probabilities of three for two": lambda: (
        small.laplace().predictive(small.x()).log_density(torch.ones(5, 3))
    ),
    "six labels of five": lambda: small.fit().predictive(small.x()).log_density(torch.zeros(6).long()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(name: str) -> None:
    with pytest.raises(LinnetError) as raised:
        REFUSED[name]()
    assert raised.value.expected
    assert raised.value.remedy


@pytest.mark.parametrize("size", [np.int64(2), np.int32(2), torch.tensor(2)])
def test_any_integer_is_a_size(size: Any, tmp_path: Path) -> None:
    model = small.sketched()
    store = linnet.audit.GradientStore(tmp_path / "store", model, small.likelihood(), shard_size=size)
    store.add(small.classes())
    assert len(linnet.audit.GradientStore(tmp_path / "store", model)) == 5


@pytest.mark.parametrize("solver", ["primal", "sketch"])
def test_a_ridge_whose_square_overflows(solver: str) -> None:
    """The fit is the network itself."""
    fit = linnet.fit(small.lin(), small.regression(), ridge=1e200, solver=solver)
    torch.testing.assert_close(fit.predict(small.x()), small.net()(small.x()).detach())
