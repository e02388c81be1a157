"""Averages over batches: weights, bias, bases, state, and a network that changes meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures import accumulate
from linnet.curvatures.accumulate import Accumulator
from linnet.curvatures.engine import layers_of
from linnet.curvatures.expectation import Expectation
from linnet.curvatures.running import RunningCurvature
from linnet.curvatures.stream import Batch
from linnet.curvatures.treatments import make_sums
from linnet.errors import DataError
from linnet.likelihoods import Categorical, Gaussian
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import linearize
from tests.curvatures.side_by_side import curvature_of
from tests.ranks import one_of_ranks, run_ranks
from tests.zoo import assert_near

STRUCTURES = ("kfac", "ekfac", "diagonal", "block", "full")
DECAYS = (1.0, 0.9, 0.3)


def network(seed: int = 0) -> nn.Module:
    """Convolutions with groups and without bias, a normalization and a linear layer, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2, bias=False), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
            nn.ConvTranspose2d(4, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 3),
        )  # fmt: skip
    return model.double().eval()


def batch(seed: int, n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def running(structure: Any = "kfac", decay: float = 0.9, **options: Any) -> RunningCurvature:
    return RunningCurvature(network(), Categorical(), structure, decay=decay, **options)


def once(data: tuple[Tensor, Tensor], structure: Any, **options: Any) -> Tensor:
    """The curvature of one batch by itself."""
    found: Tensor = curvature_of(network(), data, Categorical(), structure, **options).dense()
    return found


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.thinned(6)
def test_constant_batches_have_no_bias(structure: str, decay: float) -> None:
    """From the first step on, whatever the decay: the same curvature for each example."""
    data, average = batch(0), running(structure, decay)
    expected = once(data, structure)
    for step in range(13):  # past a renewal of the basis
        average.add(*data)
        if step in (0, 1, 9, 10, 12):
            assert_near(average.curvature(examples=4).dense(), expected, 1e-9)
    weights = sum(decay**k for k in range(13))
    assert average.curvature().made.examples == pytest.approx(4 * weights)
    assert_near(average.curvature().dense(), weights * expected, 1e-9)


@pytest.mark.parametrize("structure", ["diagonal", "block", "full"])
def test_the_average_is_the_weighted_sum_of_the_batches(structure: str) -> None:
    sizes, decay, average = (4, 1, 3), 0.7, running(structure, 0.7)
    parts = [once(batch(seed, n), structure) for seed, n in enumerate(sizes)]
    for seed, n in enumerate(sizes):
        average.add(*batch(seed, n))
    weights = [decay ** (len(sizes) - 1 - k) for k in range(len(sizes))]
    expected = sum(w * part for w, part in zip(weights, parts, strict=True))
    assert_near(average.curvature().dense(), expected, 1e-10)
    examples = sum(w * n for w, n in zip(weights, sizes, strict=True))
    assert float(average.examples) == pytest.approx(examples)
    assert_near(average.curvature(examples=50).dense(), 50 / examples * expected, 1e-10)


def test_factors_are_weighted_each_by_itself() -> None:
    """A = Σ w Σ a aᵀ / Σ w M and B = Σ w Σ g gᵀ, of a linear layer by hand."""
    layer = nn.Linear(3, 2).double()
    average = RunningCurvature(layer, Gaussian(variance=1.0), "kfac", decay=0.5)
    xs = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 5)]
    for x in xs:
        average.add(x)
    hats = [torch.cat([x, torch.ones(len(x), 1).double()], 1) for x in xs]
    a = (0.5 * hats[0].T @ hats[0] + hats[1].T @ hats[1]) / (0.5 * 2 + 5)
    b = (0.5 * 2 + 5) * torch.eye(2).double()  # the Gauss-Newton matrix of squared error
    block = average.curvature().parts[0].operator
    assert_near(block.dense(), torch.kron(b, a), 1e-12)


@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_without_decay_it_is_the_curvature_of_all_batches(structure: str) -> None:
    """EKFAC in the basis of the first factors differs in eigenvalues alone: the trace is exact."""
    average = running(structure, 1.0)
    data = [batch(seed) for seed in range(3)]
    for one in data:
        average.add(*one)
    joined = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    expected = once(joined, structure)
    found = average.curvature()
    if structure == "kfac":
        assert_near(found.dense(), expected, 1e-10)
    exact = once(joined, "block")
    trace = found.trace() if structure == "ekfac" else expected.trace()
    reference = exact.trace() if structure == "ekfac" else expected.trace()
    assert float(trace) == pytest.approx(float(reference), rel=1e-10)


def test_a_new_basis_keeps_the_trace_and_helps() -> None:
    """Carried eigenvalues have the same sum, and after the data change the new basis is the nearer one."""
    average = running("ekfac", 0.5)
    average.add(*batch(0))
    data = batch(5, 8)
    for _ in range(4):
        average.add(*data)
    before = average.curvature()
    average.renew_basis()
    after = average.curvature()
    assert float(after.trace()) == pytest.approx(float(before.trace()), rel=1e-10)
    assert all(a.trace().isclose(b.trace()) for a, b in zip(_blocks(before), _blocks(after), strict=True))
    for _ in range(20):
        average.add(*data)
    assert_near(average.curvature(examples=8).dense(), once(data, "ekfac"), 1e-5)


def _blocks(curvature: Any) -> list[Any]:
    return [part.operator for part in curvature.parts]


def test_curvatures_are_copies() -> None:
    for structure in STRUCTURES:
        average = running(structure)
        average.add(*batch(0))
        kept = average.curvature()
        before = kept.dense().clone()
        average.add(*batch(1))
        assert torch.equal(kept.dense(), before), structure


@pytest.mark.parametrize("structure", ["kfac", "ekfac", {"0": "block", ".*": "ekfac"}])
def test_state_goes_round(structure: Any, tmp_path: Path) -> None:
    average = running(structure, expectation="mc", seed=3)
    for seed in range(3):
        average.add(*batch(seed))
    torch.save(average.state_dict(), tmp_path / "state.pt")
    other = running(structure, expectation="mc", seed=3)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), batch(9)[0])
    torch.testing.assert_close(other.curvature().dense(), average.curvature().dense())
    for seed in range(3, 13):  # the same random labels, and the same new basis
        average.add(*batch(seed))
        other.add(*batch(seed))
    torch.testing.assert_close(other.curvature().dense(), average.curvature().dense())
    assert other.batches == average.batches == 13


def test_state_before_the_first_batch() -> None:
    average = running("ekfac")
    average.add(*batch(3))
    average.load_state_dict(running("ekfac").state_dict(), batch(0)[0])
    average.add(*batch(0))
    assert_near(average.curvature().dense(), once(batch(0), "ekfac"), 1e-10)


@pytest.mark.long
def test_random_labels_differ_from_batch_to_batch() -> None:
    data, average = batch(0), running("diagonal", 1.0, expectation="mc")
    average.add(*data)
    first = average.curvature().diagonal().clone()
    average.add(*data)
    second = average.curvature().diagonal() - first
    assert not torch.allclose(first, second)
    many = running("diagonal", 1.0, expectation="mc")
    for _ in range(300):
        many.add(*data)
    exact = once(data, "diagonal").trace()
    assert float(many.curvature(examples=4).trace() / exact) == pytest.approx(1, abs=0.15)


def test_it_follows_the_network() -> None:
    """After refresh: the curvature of the new weights; nothing is planned or found again."""
    data, average = batch(0), running("kfac", 0.5)
    average.add(*data)
    plans = dict(average.function.cache.plans)
    trained = network(seed=1)
    average.refresh(trained)
    for name, tensor in average.function.theta.items():
        assert torch.equal(tensor, dict(trained.named_parameters())[name])
    assert average.function.cache.plans == plans
    assert all(average.function.cache.plans[key] is plan for key, plan in plans.items())
    for _ in range(60):
        average.add(*data)
    expected = linnet.curvature(trained, data, Categorical(), "kfac").dense()
    assert_near(average.curvature(examples=4).dense(), expected, 1e-9)
    with torch.no_grad():
        next(trained.parameters()).add_(1.0)
    assert not torch.equal(next(iter(average.function.theta.values())), next(trained.parameters()))


def test_the_models_it_takes() -> None:
    model = network()
    lin = linearize(model)
    found = []
    for one in (model, lin, Functional(model)):
        average = RunningCurvature(one, Categorical())
        average.add(*batch(0))
        average.refresh(network(seed=1))
        found.append(average.curvature().dense())
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert all(torch.equal(lin.theta0[n], p.detach()) for n, p in model.named_parameters())  # untouched


def test_buffers_are_followed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double().eval()
    average = RunningCurvature(model, Gaussian(), "diagonal", decay=1e-12)
    x = torch.randn(5, 2, dtype=torch.float64)
    average.add(x)
    model.train()(x)
    model.eval()
    average.refresh(model)
    average.add(x)
    expected = linnet.curvature(model, x, Gaussian(), "diagonal").diagonal()
    assert_near(average.curvature().diagonal(), expected, 1e-9)


@pytest.mark.parametrize(("structure", "count"), [("kfac", 3), ("block", 3), ("ekfac", 1)])
def test_large_batches_are_taken_in_parts(
    structure: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EKFAC once only: where fewer examples than inputs leave the basis open, rounding decides on it."""
    whole, parts = running(structure), running(structure)
    for seed in range(count):
        whole.add(*batch(seed, 9))
    size = whole._chunks(Batch(0, *batch(0, 9)))[0]
    monkeypatch.setattr(accumulate, "TARGET", 40_000)
    monkeypatch.setattr(accumulate, "BUSY", 0)
    for seed in range(count):
        parts.add(*batch(seed, 9))
    assert parts._chunks(Batch(0, *batch(0, 9)))[0] < 9 <= size
    assert_near(parts.curvature().dense(), whole.curvature().dense(), 1e-10)


# --- the accumulator itself ----------------------------------------------------------------------------


def accumulator(structure: str = "kfac") -> Accumulator:
    function = Functional(network())
    layers = layers_of(function, Batch(0, *batch(0)))
    kinds = [structure if a.factored else "diagonal" for a in layers]
    cpu = torch.device("cpu")
    sums = [make_sums(a, how, "expand", torch.float64, cpu) for a, how in zip(layers, kinds, strict=True)]
    return Accumulator(function, Expectation(Categorical()), sums)


def test_fading_scales_sums_and_counts_alike() -> None:
    one = accumulator()
    one.add(Batch(0, *batch(0)))
    before = {name: tensor.clone() for name, tensor in one.state().items()}
    one.fade(0.25)
    assert before["examples"] == 4
    assert any(name.endswith("count") for name in before)
    for name, tensor in one.state().items():
        assert torch.equal(tensor, 0.25 * before[name]), name
    assert all(b.dense().isfinite().all() for b in (s.block() for s in one.sums))


def test_state_of_an_accumulator_goes_round() -> None:
    one, other = accumulator(), accumulator()
    one.add(Batch(0, *batch(0)))
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    for each in (one, other):
        each.fade(0.5)
        each.add(Batch(1, *batch(1)))
    assert all(torch.equal(a, b) for a, b in zip(one.state().values(), other.state().values(), strict=True))
    assert float(other.examples) == 6


# --- input that cannot be ------------------------------------------------------------------------------


def test_a_failed_batch_leaves_the_average_as_it_was() -> None:
    average = running()
    average.add(*batch(0))
    before = average.state_dict()
    x, y = batch(1)
    with pytest.raises(DataError):
        average.add(x, torch.cat([y[:-1], y[-1:] + 7]))
    after = average.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- several processes ---------------------------------------------------------------------------------


def shared_average(structure: str, rank: int, size: int) -> Tensor:
    """Two rounds of averages over batches of two examples for each process."""
    average = running(structure, 0.5)
    for step in range(2):
        x, y = batch(step, 4)
        average.add(x[rank::size], y[rank::size], shared=size > 1)
    return average.curvature().dense()


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One process."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder):
        found = {structure: shared_average(structure, rank, size) for structure in ("kfac", "diagonal")}
        alone = running("diagonal", 1.0)
        alone.add(*batch(rank))  # not shared: nobody waits for anybody
        found["alone"] = alone.curvature().diagonal()
        torch.save(found, folder / f"rank{rank}.pt")


@pytest.mark.long
@pytest.mark.dist
def test_two_processes_average_like_one(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for structure in ("kfac", "diagonal"):
            assert_near(found[structure], shared_average(structure, 0, 1), 1e-10)
        expected = running("diagonal", 1.0)
        expected.add(*batch(rank))
        assert_near(found["alone"], expected.curvature().diagonal(), 1e-12)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
