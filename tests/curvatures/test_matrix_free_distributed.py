"""Processes that share the data multiply with the same matrix as one process alone.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from linnet.curvatures.products import FisherOperator, GaussNewtonOperator
from linnet.curvatures.stream import Batches
from linnet.distributed import Share, all_sum, world
from linnet.likelihoods import Categorical
from tests.ranks import one_of_ranks, run_ranks
from tests.zoo import assert_near, case, linearize

NAME = "mlp-tanh"


def multiplied(rank: int, size: int) -> dict[str, Tensor]:
    """Products with an exact and a sampled matrix; a batch of three, so that shares are unequal."""
    function, v = linearize(NAME).function, case(NAME).direction(1, columns=2)
    data = Batches(case(NAME).x1, torch.device("cpu"), 3, Share(rank, size))
    likelihood = Categorical()
    return {
        "exact": GaussNewtonOperator(function, data, likelihood) @ v,
        "mc": FisherOperator(function, data, likelihood, "mc", 2, seed=5) @ v,
    }


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder):
        assert world() == (rank, size)
        strided = torch.ones(2, 3).T * (rank + 1)
        all_sum([strided])
        assert bool((strided == sum(range(1, size + 1))).all())
        torch.save(multiplied(rank, size), folder / f"rank{rank}.pt")


def test_a_process_alone() -> None:
    ones = torch.ones(2)
    all_sum([ones])
    assert world() == (0, 1)
    assert bool((ones == 1).all())


@pytest.mark.long
@pytest.mark.dist
def test_two_ranks_multiply_like_one(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    alone = multiplied(0, 1)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for kind, product in alone.items():
            assert_near(found[kind], product)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
