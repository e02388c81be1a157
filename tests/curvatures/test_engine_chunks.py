"""The sizes of batches and parts of columns change memory and time, and no result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import Passes, accumulate, kfac, sums, variance
from linnet.curvatures.accumulate import Accumulator, plan_chunks
from linnet.curvatures.engine import layers_of
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.stream import Batch, Batches
from linnet.curvatures.treatments import make_sums
from linnet.distributed import Share
from linnet.likelihoods import Categorical
from linnet.tangent.capture import capture_bytes
from linnet.tangent.functional import Functional
from linnet.tangent.plan import expected_plan
from linnet.tangent.rules import Captured
from tests.curvatures.curvature_oracles import Problem, families
from tests.zoo import assert_near, linearized

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac")
NETWORKS = ("lenet", "mobilenet", "upsampler", "vit-mha", "padding-index", "shared-module")


class Spy:
    """Notes the sizes of what is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: set[tuple[int, int]] = set()
        original = accumulate.capture_parts

        def watched(*arguments: Any) -> Iterator[Captured]:
            for captured in original(*arguments):
                self.sizes.add((captured.n, captured.k))
                yield captured

        monkeypatch.setattr(accumulate, "capture_parts", watched)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Make the plan take one of its ways."""
    if way == "one column":
        monkeypatch.setattr(accumulate, "LONG", 0)
    elif way == "smallest":
        monkeypatch.setattr(accumulate, "TARGET", 1)
        monkeypatch.setattr(accumulate, "BUSY", 0)
    elif way == "parts of columns":
        monkeypatch.setattr(accumulate, "plan_chunks", lambda *_, **__: accumulate.Chunks(3, 2))
    elif way == "rows one by one":
        monkeypatch.setattr(sums, "ROWS_AT_ONCE", 1)
        monkeypatch.setattr(kfac, "ROWS_AT_ONCE", 1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("way", ["one column", "smallest", "parts of columns", "rows one by one"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thinned(12)
def test_parts_add_up_to_the_whole(
    name: str, way: str, sharing: str, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(name, families(name)[-1])
    monkeypatch.setattr(accumulate, "LONG", 1 << 60)
    whole = problem.curvature(STRUCTURES, sharing=sharing)
    columns = max(k for _, k in spy.sizes)
    assert {n for n, _ in spy.sizes} == {4}
    spy.sizes.clear()
    force(monkeypatch, way)
    parts = problem.curvature(STRUCTURES, sharing=sharing)
    taken = {
        "one column": {(4, 1)},
        "smallest": {(1, 1)},  # examples first, then columns
        "parts of columns": {(n, k) for n in (3, 1) for k in (min(2, columns), columns % 2) if k},
        "rows one by one": {(4, columns)},
    }
    assert spy.sizes == taken[way]
    for structure, G in parts.items():
        if structure == "ekfac" and sharing == "reduce":  # its eigenbasis is open where mean inputs are few
            assert_near(G.trace(), whole[structure].trace())
        else:
            assert_near(G.dense(), whole[structure].dense())


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize("name", ["lenet", "lstm", "tied-linears"])
@pytest.mark.thinned(3)
def test_the_size_of_batches_does_not_matter(name: str, block: int, spy: Spy) -> None:
    problem = Problem(name, "categorical")
    whole = problem.curvature(STRUCTURES)
    spy.sizes.clear()
    for structure, G in problem.curvature(STRUCTURES, block=block).items():
        assert_near(G.dense(), whole[structure].dense())
    assert max(n for n, _ in spy.sizes) == min(block, 4)


@pytest.mark.parametrize("budget", [40_000, 400_000, 4_000_000])
def test_plans_stay_within_their_budget(budget: int) -> None:
    function = linearized("lenet").function
    x = Problem("lenet", "categorical").case.x1
    batch = Batch(0, x, None)
    chunks = plan_chunks(function, batch, 3, 0, budget)
    inputs = capture_bytes(function, x, 0)
    column = capture_bytes(function, x, 1) - inputs
    assert chunks.examples >= 1
    assert 1 <= chunks.columns <= 3
    assert chunks.examples == 1 or chunks.examples * (inputs + chunks.columns * column) <= budget // 4


def accumulated(expectation: Expectation, structure: str, batches: list[Tensor], decay: float) -> Accumulator:
    """Statistics of several batches, the older ones faded."""
    function = linearized("lenet").function
    layers = layers_of(function, Batch(0, batches[0], None))
    sums = [make_sums(one, structure, "expand", function.dtype, function.device) for one in layers]
    accumulator = Accumulator(function, expectation, sums)
    for i, x in enumerate(batches):
        accumulator.fade(decay)
        accumulator.add(Batch(i, x, None))
    return accumulator


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "block"])
def test_fading_weighs_batches_and_has_no_bias_from_the_start(structure: str) -> None:
    problem = Problem("lenet", "categorical")
    expectation, x = Expectation(problem.likelihood), problem.case.x1
    decay = 0.6
    # a constant stream: the mean over examples is that of one batch, from the first step on
    for steps in (1, 2, 5):
        faded = accumulated(expectation, structure, [x] * steps, decay)
        once = accumulated(expectation, structure, [x], decay)
        weight = sum(decay**i for i in range(steps))
        assert_near(faded.examples, torch.tensor(4 * weight, dtype=torch.float64))
        for mine, its in zip(faded.sums, once.sums, strict=True):
            assert_near(mine.block().dense() / faded.examples, its.block().dense() / once.examples)
    both = accumulated(expectation, structure, [x[:2], x[2:]], decay)
    first = accumulated(expectation, structure, [x[:2]], decay)
    second = accumulated(expectation, structure, [x[2:]], decay)
    for mine, old, new in zip(both.sums, first.sums, second.sums, strict=True):
        for key, tensor in mine.tensors.items():
            assert_near(tensor, decay * old.tensors[key] + new.tensors[key])


def test_output_covariance_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lenet", "upsampler", "padding-index"):
        problem = Problem(name, "categorical")
        found = {s: g.damped(1.0).inverse() for s, g in problem.curvature(STRUCTURES).items()}
        whole = {s: g.output_covariance(problem.case.x1) for s, g in found.items()}
        with monkeypatch.context() as patched:
            patched.setattr(variance, "ROWS_AT_ONCE", 1)
            patched.setattr(variance, "TARGET", 1)
            for structure, covariance in found.items():
                assert_near(covariance.output_covariance(problem.case.x1), whole[structure])


def test_one_capture_serves_all_structures(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    original = Accumulator.add

    def counting(self: Accumulator, batch: Batch) -> None:
        counted.append(batch.index)
        original(self, batch)

    monkeypatch.setattr(Accumulator, "add", counting)
    Problem("lenet", "categorical").curvature(["kfac", "diagonal", "block", "full"], block=2)
    assert counted == [0, 1]
    Problem("lenet", "categorical").curvature(["kfac", "diagonal", "ekfac"], block=2)
    assert counted == [0, 1, 0, 1, 0, 1], "the eigenvalues take one more pass"


def test_batches_know_their_number() -> None:
    x = torch.zeros(7, 2)
    assert Batches(x, None, 3).length() == 3
    assert Batches(x, None, 3, Share(rank=1, world=2)).length() == 1
    assert Batches(x, None, 3, Share(rank=0, world=2)).length() == 2


def test_receptive_fields_are_counted_where_they_are_held(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten())
    function, x = (
        Functional(nn.Sequential(*net, nn.Linear(50, 4)).double()),
        torch.randn(64, 2, 6, 6).double(),
    )
    plan = expected_plan(function, x)
    assert plan.bytes.fields == 8 * (36 * 2 * 9 + 25 * 3 * 4)
    monkeypatch.setattr(accumulate, "LONG", 0)
    monkeypatch.setattr(accumulate, "TARGET", 32 * plan.bytes.fields)
    monkeypatch.setattr(accumulate, "BUSY", 0)
    sizes = {}
    for structure in ("kfac", "diagonal", "ekfac"):
        spy.sizes.clear()
        linnet.curvature(function.model, x, Categorical(), structure=structure)
        sizes[structure] = max(n for n, _ in spy.sizes)
        assert {k for _, k in spy.sizes} == {1}
    assert sizes["kfac"] > sizes["diagonal"] > sizes["ekfac"]
    assert sizes["diagonal"] < 32
    assert sizes["ekfac"] < 16


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "ekfac"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_exact_columns_of_many_outputs_are_never_formed_together(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 outputs in a budget that their C² columns are far beyond, as 50,000 are beyond any."""
    c = 300
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c)).double()
    x = torch.randn(4, 3).double()
    whole = linnet.curvature(net, x, Categorical(), structure, "exact", passes=Passes(widest=10))
    formed: list[int] = []
    original = Categorical._root_part

    def noting(self: Any, f: torch.Tensor, start: int, stop: int, y: Any = None) -> torch.Tensor:
        formed.append((stop - start) * f.numel())
        return original(self, f, start, stop, y)

    monkeypatch.setattr(Categorical, "_root_part", noting)
    monkeypatch.setattr(Categorical, "root", lambda *_: pytest.fail("all columns at once"))
    budget = c * c * 8 // 4
    found = linnet.curvature(
        net, x, Categorical(), structure, "exact", passes=Passes(memory=budget, widest=10)
    )
    assert_near(found.diagonal(), whole.diagonal())
    assert max(formed) * 8 <= budget
    assert sum(formed) >= (c - 1) * c * len(x)
