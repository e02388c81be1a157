"""Agreement with curvlinops, BackPACK and laplace-torch where definitions coincide.

The peers live in an environment of their own, whose python the variable LINNET_CURVATURE_PEERS names; how to
make one is in ``benchmarks/curvature_peers.py``, whose child processes compute the peers' side in float64.
Everything is a sum over examples on both sides, so that the only conversion is the loss: torch's ``MSELoss``
is twice the negative log-likelihood of a Gaussian with unit variance, which laplace-torch halves itself.

- Exact KFAC (KFLR) and EKFAC: curvlinops with the bias joined to the weight, as linnet does.
- Exact KFAC of weights alone, in linear layers: BackPACK, which keeps biases apart. For convolutions its
  factors are A summed over positions and B of summed gradients, a definition of its own.
- Diagonals and products with the whole matrix: everybody's, on every layer.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

import linnet
from tests.curvatures.side_by_side import curvature_of
from tests.hangs import HANGS

PEERS = os.environ.get("LINNET_CURVATURE_PEERS")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOLERANCE = 1e-5
MSE_OVER_GAUSSIAN = {"curvlinops": 2.0, "backpack": 2.0, "laplace": 1.0}
NETWORKS = ("small-mlp", "small-convolution")

pytestmark = pytest.mark.skipif(
    PEERS is None, reason="LINNET_CURVATURE_PEERS names no python with curvlinops, BackPACK and laplace-torch"
)


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The problems that the child processes build too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("curvature_networks")


def ask(
    peer: str, task: str, network: str, loss: str, parameters: str, folder: Path
) -> dict[str, torch.Tensor]:
    """What a peer computes: a product with fixed vectors, or a diagonal, by parameter."""
    assert PEERS is not None
    path = folder / "peer.pt"
    command = [PEERS, str(BENCHMARKS / "curvature_peers.py"), "--child", peer, task, network, "--loss", loss]
    command += ["--parameters", parameters, "--batch", "5", "--repeats", "1", "--save", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert path.exists(), done.stdout + done.stderr
    result: dict[str, torch.Tensor] = torch.load(path)
    scale = MSE_OVER_GAUSSIAN[peer] if loss == "squared" else 1.0
    return {name: value / scale for name, value in result.items()}


def likelihood(loss: str) -> linnet.likelihoods.Likelihood:
    """Whose negative log-likelihood the loss is, up to the scale above."""
    if loss == "squared":
        return linnet.likelihoods.Gaussian(variance=1.0)
    return linnet.likelihoods.Categorical()


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Every parameter to the tolerance, relative to its largest entry."""
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        assert value.abs().max() > 0, name
        error = ((ours[name] - value).abs().max() / value.abs().max()).item()
        assert error < TOLERANCE, f"{name} differs by {error:.1e}"


def products(matrix: object, given: object, columns: int) -> dict[str, torch.Tensor]:
    """The product with the vectors that the peers multiply with, by parameter."""
    vectors = given.vectors(columns)
    flat = torch.cat([value.flatten(0, -2) for value in vectors.values()])
    parts = (matrix @ flat).split([value.numel() for value in given.parameters.values()])
    return {name: part.view(vectors[name].shape) for name, part in zip(given.names, parts, strict=True)}


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
def test_exact_kronecker_factors_are_those_of_curvlinops(
    structure: str, network: str, loss: str, networks: ModuleType, tmp_path: Path
) -> None:
    given = networks.problem(network, "layers", loss=loss)
    G = curvature_of(given.model, (given.x, given.y), likelihood(loss), structure, params=list(given.names))
    theirs = ask("curvlinops", f"{structure}-exact", network, loss, "layers", tmp_path)
    assert_same(products(G, given, 3), theirs)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
def test_exact_kronecker_factors_of_weights_are_those_of_backpack(
    loss: str, networks: ModuleType, tmp_path: Path
) -> None:
    given = networks.problem("small-mlp", "weights", loss=loss)
    G = curvature_of(given.model, (given.x, given.y), likelihood(loss), "kfac", params=list(given.names))
    theirs = ask("backpack", "kfac-exact", "small-mlp", loss, "weights", tmp_path)
    assert_same(products(G, given, 3), theirs)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("peer", ["backpack", "laplace"])
def test_the_diagonal_is_that_of_the_peers(
    peer: str, network: str, loss: str, networks: ModuleType, tmp_path: Path
) -> None:
    given = networks.problem(network, "all", loss=loss)
    G = linnet.curvature(given.model, (given.x, given.y), likelihood(loss), "diagonal")
    parts = G.diagonal().split([value.numel() for value in given.parameters.values()])
    shapes = [value.shape for value in given.parameters.values()]
    ours = {name: part.view(shape) for name, part, shape in zip(given.names, parts, shapes, strict=True)}
    assert_same(ours, ask(peer, "diagonal-exact", network, loss, "all", tmp_path))


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
@pytest.mark.parametrize(
    ("peer", "network"), [("curvlinops", "small-convolution"), ("backpack", "small-mlp")]
)
def test_products_with_the_whole_matrix_are_those_of_the_peers(
    peer: str, network: str, loss: str, networks: ModuleType, tmp_path: Path
) -> None:
    given = networks.problem(network, "all", loss=loss)
    G = linnet.curvature(given.model, (given.x, given.y), likelihood(loss), "matrix-free")
    assert_same(products(G, given, 1), ask(peer, "ggn-1", network, loss, "all", tmp_path))
