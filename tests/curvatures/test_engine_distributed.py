"""Processes that share the data have the sums of one process alone.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.likelihoods import Categorical
from tests.curvatures.curvature_oracles import relative
from tests.curvatures.side_by_side import curvature_of
from tests.ranks import one_of_ranks, run_ranks
from tests.zoo import assert_near, case, joined

STRUCTURES = ["kfac", "ekfac", "diagonal", "block", "full"]


def data_of(name: str) -> tuple[Any, Tensor]:
    """Seven examples, so that shares are unequal."""
    return joined(case(name).x1, case(name).x2), torch.tensor([0, 2, 1, 0, 1, 1, 2])


def summed(file: Path | None) -> dict[str, Tensor]:
    """Everything at once on a convolutional network, and KFRA on another."""
    found: dict[str, Tensor] = {}
    for expectation in ("exact", "mc"):
        options = {"seed": 4, "block": 2, "file": file}
        net, data = case("lenet").model(), data_of("lenet")
        G = curvature_of(net, data, Categorical(), STRUCTURES, expectation, **options)
        found |= {f"{structure} {expectation}": one.dense() for structure, one in G.items()}
        found["examples"] = torch.tensor([one.made.examples for one in G.values()], dtype=torch.float64)
    net, data = case("mlp-tanh").model(), data_of("mlp-tanh")
    found["kfra"] = curvature_of(net, data, Categorical(), "kfra", block=2).dense()
    found["low-rank"] = curvature_of(net, data, Categorical(), "low-rank", rank=5, block=2).dense()
    return found


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One rank: shared data, and then data of its own."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder):
        found = summed(folder / "sums.safetensors")
        x, y = data_of("lenet")
        own = (x[rank::size], y[rank::size])
        file = folder / "own.safetensors"
        apart = curvature_of(case("lenet").model(), own, Categorical(), "diagonal", shard=False, file=file)
        found["apart"] = apart.dense()
        (x, y), net = data_of("mlp-tanh"), case("mlp-tanh").model().float()
        rounded = curvature_of(net, (x.float(), y), Categorical(), "ekfac")
        found["rounded"] = rounded.damped(1.0).inverse().diagonal()
        torch.save(found, folder / f"rank{rank}.pt")


@pytest.mark.long
@pytest.mark.dist
def test_two_ranks_have_the_sums_of_one(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    alone = summed(None)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(ranks[0]["rounded"], ranks[1]["rounded"])  # to the last bit
    for found in ranks:
        for kind, matrix in alone.items():
            error = relative(found[kind], matrix)
            assert error < (1e-6 if kind == "low-rank" else 1e-10), f"{kind}: {error:.1e}"
        assert_near(found["apart"], alone["diagonal exact"])
    assert not list(tmp_path.glob("*.safetensors"))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
