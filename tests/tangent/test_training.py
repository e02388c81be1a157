"""A linearization trains like any module: with any optimizer, distributed, and compiled.

Run as a script (``RANK WORLD FOLDER``) this file is one rank of the distributed test.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests.grids import grid
from tests.oracles.dense import ridge_oracle
from tests.ranks import one_of_ranks, run_ranks
from tests.zoo import assert_near, case, flat, linearize, named, rows, set_delta

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def loss_of(lin: Any, x: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(lin(x), y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["resnet-batchnorm", "vit-mha", "weight-norm", "lora"])
@pytest.mark.thinned(6)
def test_any_optimizer_reduces_the_loss(name: str, optimizer: str) -> None:
    lin, x, y = linearize(name), case(name).x1, torch.tensor([0, 2, 1, 0])
    steps = OPTIMIZERS[optimizer](lin.parameters())
    before = {n: p.clone() for n, p in lin.model.state_dict().items()}
    losses = []
    for _ in range(12):
        steps.zero_grad()
        loss = loss_of(lin, x, y)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[n]) for n, value in lin.model.state_dict().items())
    assert_near(lin(x), case(name).f1 + case(name).j1 @ flat({n: d.detach() for n, d in lin.delta.items()}))


@pytest.mark.parametrize("name", ["mlp-tanh", "tied-transpose", "lstm", "bert-eager", "gated"])
@pytest.mark.thinned(4)
def test_training_to_the_end_reaches_the_ridge_solution(name: str) -> None:
    lin, expected, ridge = linearize(name), case(name), 0.5
    targets = torch.randn_like(expected.f1)
    optimizer = torch.optim.LBFGS(
        lin.parameters(), max_iter=400, history_size=50, tolerance_grad=1e-13, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        fit = 0.5 * (lin(expected.x1) - targets).square().sum()
        loss = fit + 0.5 * ridge * sum(p.square().sum() for p in lin.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    reached = flat({n: d.detach() for n, d in lin.delta.items()})
    assert_near(reached, ridge_oracle(expected.j1, targets, expected.f1, ridge), 1e-6)


def test_frozen_parts_of_delta_stay_where_they_are() -> None:
    lin, x = linearize("mlp-tanh"), case("mlp-tanh").x1
    lin.delta["0.weight"].requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in lin.parameters() if p.requires_grad), lr=0.1)
    loss_of(lin, x, torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    assert torch.count_nonzero(lin.delta["0.weight"]) == 0
    assert torch.count_nonzero(lin.delta["4.weight"]) > 0


def test_optimizers_keep_their_tensors_through_relinearization() -> None:
    lin, x, y = linearize("mlp-tanh"), case("mlp-tanh").x1, torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(lin.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_of(lin, x, y)
        loss.backward()
        optimizer.step()
        lin.relinearize()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert torch.count_nonzero(lin.delta["0.weight"]) == 0


# --- distributed ----------------------------------------------------------------------------------

STEPS = 3


def train(module: Callable[[Any], Tensor], parameters: list[Tensor], x: Any, y: Tensor) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


LABELS = torch.tensor([0, 2, 1, 0])


DISTRIBUTED = ("resnet-batchnorm", "vit-mha", "weight-norm")


def run_rank(rank: int, world: int, folder: Path) -> None:
    """One rank: every second example, gradients averaged by DistributedDataParallel."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, world, folder, torchs_own=True):
        shard, reached = list(range(rank, 4, world)), {}
        for name in DISTRIBUTED:
            lin = linearize(name)
            wrapped = nn.parallel.DistributedDataParallel(lin)
            train(wrapped, list(wrapped.parameters()), rows(case(name).x1, shard), LABELS[shard])
            reached[name] = flat({n: d.detach() for n, d in lin.delta.items()})
            reached[name + " kernel"] = lin.kernel(case(name).x1)
        torch.save(reached, folder / f"rank{rank}.pt")


@pytest.mark.dist
@pytest.mark.long
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    reached = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name in DISTRIBUTED:
        lin, expected = linearize(name), case(name)
        train(lin, list(lin.parameters()), expected.x1, LABELS)
        alone = flat({n: d.detach() for n, d in lin.delta.items()})
        assert torch.count_nonzero(alone) > 0
        for found in reached:
            # the mean over two equal shards is the mean over all
            assert_near(found[name], alone)
            assert_near(found[name + " kernel"], torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1))


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    grid(
        [("mlp-tanh", "inductor"), ("resnet-batchnorm", "aot_eager"), ("causal-sdpa", "aot_eager")],
        ("causal-sdpa",),
    ),
)
@pytest.mark.thinned(2)
@pytest.mark.long
def test_compiled_equals_eager(name: str, backend: str) -> None:
    expected = case(name)
    lin, twin = linearize(name), linearize(name)
    delta = expected.direction(3)
    set_delta(lin, delta)
    set_delta(twin, delta)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(lin, backend=backend)
        value = compiled(expected.x1)
        value.square().sum().backward()
        assert_near(value, expected.f1 + expected.j1 @ delta, 1e-9)
        assert_near(compiled(expected.x2), expected.f2 + expected.j2 @ delta, 1e-9)
    twin(expected.x1).square().sum().backward()
    for n, gradient in named(lin, expected.direction()).items():
        assert lin.delta[n].grad is not None
        assert lin.delta[n].grad.shape == gradient.shape
        assert_near(lin.delta[n].grad, twin.delta[n].grad, 1e-8)
    torch.compiler.reset()


def test_linearization_of_a_compiled_network_is_that_of_the_network() -> None:
    expected = case("mlp-tanh")
    lin = linnet.linearize(torch.compile(expected.model(), backend="eager"))
    assert_near(lin.jvp(expected.x1, expected.direction()), expected.j1 @ expected.direction())
    assert_near(lin.kernel(expected.x1), torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
