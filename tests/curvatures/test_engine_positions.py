"""Sequences and pictures as outputs: positions are independent, and masked ones are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import accumulate
from linnet.likelihoods import Bernoulli, Categorical, Gaussian
from tests.curvatures.curvature_oracles import Expected, gradients_matrix
from tests.curvatures.side_by_side import curvature_of
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.zoo import assert_near

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac")
EXACT = ("full", "block", "diagonal")
MASK = -100

pytestmark = pytest.mark.usefixtures("float64")


def positionwise() -> nn.Module:
    """The same small network at every position of a sequence (N, T, 3)."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def mixing() -> nn.Module:
    """Outputs (N, T, 3) that depend on all positions."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(5, 5), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embed(ids)
            return self.head(torch.tanh(h + self.mix(h.mT).mT))

    return Mixing()


def segmenting() -> nn.Module:
    """A picture of class scores (N, 3, H, W)."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 3, 3, padding=1),
    )  # fmt: skip


def labels(shape: tuple[int, ...], masked: bool) -> Tensor:
    """Class labels; with some positions, one whole example and one last position masked."""
    y = torch.randint(3, shape)
    if masked:
        y[0].flatten()[::2] = MASK
        y[1] = MASK
    return y


def columns_of(f: Tensor, y: Tensor, axis: int) -> Tensor:
    """Columns (N, K, outputs) of Σ over positions of diag(p) − p pᵀ, zero where y is masked."""
    n, classes = len(f), f.shape[axis]
    places = torch.arange(f[0].numel()).view(f.shape[1:]).movedim(axis - 1, -1).reshape(-1, classes)
    found = torch.zeros(n, places.shape[0], classes, f[0].numel())
    for i in range(n):
        flat, own = f[i].flatten(), y[i].flatten()
        for t, outputs in enumerate(places):
            p = flat[outputs].softmax(0)
            values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
            if own[t] != MASK:
                found[i, t][:, outputs] = (vectors * values.clamp(min=0).sqrt()).T
    return found.flatten(1, 2)


KINDS: dict[str, Any] = {
    "sequence": (positionwise, (4, 5, 3), (4, 5), 2),
    "mixed sequence": (mixing, None, (4, 5), 2),
    "picture": (segmenting, (4, 2, 4, 4), (4, 4, 4), 1),
}


def prepare(kind: str, masked: bool) -> tuple[nn.Module, Tensor, Tensor, int]:
    build, x_shape, y_shape, axis = KINDS[kind]
    x = torch.randint(7, (4, 5)) if x_shape is None else torch.randn(x_shape)
    return build(), x, labels(y_shape, masked), axis


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_structures_equal_the_loop_over_positions(kind: str, masked: bool) -> None:
    model, x, y, axis = prepare(kind, masked)
    j, f = jacobian_oracle(model, x), output_oracle(model, x)
    own = model(x).detach()
    assert_near(own.flatten(1), f)
    columns = columns_of(own, y, axis)
    expected = Expected(model, x, j, columns)
    likelihood = Categorical(axis=axis)
    found = curvature_of(model, (x, y), likelihood, STRUCTURES, block=3)
    assert_near(found["full"].dense(), expected.full)
    assert_near(found["block"].dense(), expected.block(found["block"].parts))
    assert_near(found["diagonal"].dense(), expected.full.diagonal().diag())
    assert_near(found["ekfac"].trace(), expected.full.trace())
    if not masked:
        assert_near(found["kfac"].dense(), expected.kfac(found["kfac"]))
        reduced = linnet.curvature(model, (x, y), likelihood, "kfac", sharing="reduce")
        assert_near(reduced.dense(), expected.kfac(reduced, "reduce"))


@pytest.mark.parametrize("expectation", ["empirical", "exact"])
def test_classes_last_equal_classes_first(expectation: str) -> None:
    model, x, y, _ = prepare("sequence", True)
    turned = nn.Sequential(model, nn.Unflatten(2, (3, 1)), nn.Flatten(2))  # the same (N, T, C)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).movedim(-1, 1)

    for structure in STRUCTURES:
        last = linnet.curvature(turned, (x, y), Categorical(axis=-1), structure, expectation)
        first = linnet.curvature(First(), (x, y), Categorical(axis=1), structure, expectation)
        assert_near(first.dense(), last.dense())


@pytest.mark.parametrize("expectation", ["exact", "empirical"])
def test_a_network_at_every_position_sees_positions_as_examples(expectation: str) -> None:
    model, x, y, _ = prepare("sequence", False)
    flat = linnet.curvature(model, (x.flatten(0, 1), y.flatten()), Categorical(), STRUCTURES, expectation)
    found = linnet.curvature(model, (x, y), Categorical(axis=-1), STRUCTURES, expectation)
    for structure in ("diagonal", "block", "full", "kfac", "ekfac"):
        if expectation == "empirical" and structure != "kfac":
            continue  # a sequence has one gradient, the sum over its positions
        if structure in EXACT:
            assert_near(found[structure].dense(), flat[structure].dense())
    if expectation == "exact":
        assert_near(found["kfac"].dense(), flat["kfac"].dense())


@pytest.mark.parametrize("way", ["whole", "one column", "parts"])
@pytest.mark.parametrize("kind", ["sequence", "picture"])
@pytest.mark.thinned(2)
def test_masked_positions_are_as_if_they_were_not_there(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "one column":
        monkeypatch.setattr(accumulate, "LONG", 0)
    if way == "parts":
        monkeypatch.setattr(accumulate, "TARGET", 1)
        monkeypatch.setattr(accumulate, "BUSY", 0)
    model, x, y, axis = prepare(kind, True)
    if kind == "sequence":  # without mixing, the positions that count are a data set of their own
        kept = y != MASK
        there = (x[kept][:, None], y[kept][:, None])
    else:  # whole examples
        y[0] = labels((1, 4, 4), False)[0]
        there = (x[[0, 2, 3]], y[[0, 2, 3]])
    for sharing in ("expand",) if kind == "sequence" else ("expand", "reduce"):
        found = linnet.curvature(model, (x, y), Categorical(axis=axis), STRUCTURES, sharing=sharing)
        expected = linnet.curvature(model, there, Categorical(axis=axis), STRUCTURES, sharing=sharing)
        for structure, G in found.items():
            if structure == "ekfac" and sharing == "reduce":
                assert_near(G.trace(), expected[structure].trace())
            else:
                assert_near(G.dense(), expected[structure].dense())


def test_reduced_sequences_take_the_mean_of_the_positions_that_count() -> None:
    model, x = nn.Linear(3, 2, bias=False), torch.randn(2, 4, 3)
    y = torch.tensor([[0, 1, MASK, MASK], [1, 0, 1, 0]])
    G = linnet.curvature(model, (x, y), Categorical(axis=-1), "kfac", sharing="reduce")
    means = torch.stack([x[0, :2].mean(0), x[1].mean(0)])
    operator: Any = G.parts[0].operator
    assert_near(operator.right, means.T @ means / 2)


def test_missing_numbers_and_missing_labels() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    j = jacobian_oracle(model, x)
    y = torch.randn(5, 2)
    y[1, 0] = y[3, 1] = torch.nan
    G = linnet.curvature(model, (x, y), Gaussian(0.5, masked=True), "full")
    assert_near(G.dense(), gradients_matrix(j, torch.diag_embed((~y.isnan()).double() * 2**0.5)))
    bits = torch.randint(2, (5, 2))
    bits[2, 1] = MASK
    p = model(x).detach().sigmoid()
    scale = (p * (1 - p)).sqrt() * (bits != MASK)
    G = linnet.curvature(model, (x, bits), Bernoulli(), "full")
    assert_near(G.dense(), gradients_matrix(j, torch.diag_embed(scale)))
