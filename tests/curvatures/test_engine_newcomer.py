"""Frequent mistakes with curvatures: modes of torch, half precision, many outputs of few examples, slips."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import linnet
from linnet.curvatures import accumulate
from linnet.curvatures.accumulate import Chunks, plan_chunks
from linnet.curvatures.stream import Batches
from linnet.errors import InputError, ModelError, NumericalError

P = 51
CATEGORICAL = linnet.likelihoods.Categorical()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4), torch.randint(3, (8,))


@pytest.mark.parametrize("structure", ["full", "block", "diagonal", "kfac", "ekfac", "low-rank"])
def test_closed_forms_do_not_lose_digits_under_autocast(
    structure: str, net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> None:
    v, rows = torch.randn(P, 2), torch.randn(2, P)

    def answers() -> list[torch.Tensor]:
        made = linnet.curvature(net, data, CATEGORICAL, structure)
        damped = made.damped(0.1)
        posterior = damped.inverse()
        return [
            made @ v,
            made.dense(),
            damped.solve(v),
            damped.logdet(),
            made.trace(),
            posterior.diagonal(),
            posterior.quadratic(rows),
            posterior.sample(3, 0),
            posterior.output_covariance(data[0]),
        ]

    expected = answers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = answers()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", ["full", "kfac", "matrix-free"])
def test_data_from_inference_mode(structure: str, net: nn.Module) -> None:
    with torch.inference_mode():
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
    made = linnet.curvature(net, (x, y), CATEGORICAL, structure)
    same = linnet.curvature(net, (x.clone(), y.clone()), CATEGORICAL, structure)
    torch.testing.assert_close(made @ torch.ones(P), same @ torch.ones(P))
    if structure != "matrix-free":
        assert made.damped(1.0).inverse().output_covariance(x).shape == (8, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("structure", ["kfac", "ekfac"])
@pytest.mark.thinned(2)
def test_factors_of_half_precision_networks_are_semidefinite(
    dtype: torch.dtype, structure: str, net: nn.Module
) -> None:
    conv = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(32, 3)
    )
    y = torch.randint(3, (8,))
    for model, x in ((net, torch.randn(8, 4)), (conv, torch.randn(8, 1, 4, 4))):
        whole = linnet.curvature(model, (x, y), CATEGORICAL, structure)
        half = linnet.curvature(deepcopy(model).to(dtype), (x.to(dtype), y), CATEGORICAL, structure)
        assert half.dtype == torch.float32
        assert torch.linalg.eigvalsh(half.dense().double()).min() > -1e-6 * half.trace()
        assert (half.dense() - whole.dense()).norm() < 0.05 * whole.dense().norm()
        assert half.damped(0.1).inverse().output_covariance(x.to(dtype)).isfinite().all()


def test_columns_go_together_where_there_are_few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Chunks] = []

    def noted(*args: Any, **options: Any) -> Chunks:
        taken.append(plan_chunks(*args, **options))
        return taken[-1]

    monkeypatch.setattr(accumulate, "plan_chunks", noted)
    data = torch.randn(4, 5), torch.randint(600, (4,))
    net = nn.Linear(5, 600)
    made = linnet.curvature(net, data, CATEGORICAL, "kfac")
    # one column of 512 examples would be long, one of the four that there are is not
    assert taken[-1].columns > 100
    p = net(data[0]).softmax(1).double()
    expected = torch.diag(p.sum(0)) - p.T @ p
    torch.testing.assert_close(made.parts[0].operator.left.double(), expected, rtol=1e-4, atol=1e-6)


class OtherwiseIfLong(nn.Module):
    """The same layer by an operation without a rule where sequences are long."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(3, 4, bias=bias), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.shared(x) if x.shape[1] < 4 else torch.stack([self.shared(one) for one in x])
        out: torch.Tensor = self.head(inner.tanh().mean(1))
        return out


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_are_used_otherwise_in_a_later_batch(bias: bool) -> None:
    torch.manual_seed(0)
    net, gaussian = OtherwiseIfLong(bias), linnet.likelihoods.Gaussian()
    short, long = torch.randn(3, 2, 3), torch.randn(3, 5, 3)
    loader: DataLoader[torch.Tensor] = DataLoader([*short, *long], batch_size=3)  # type: ignore[arg-type]
    whole = linnet.curvature(net, loader, gaussian, "full").dense()
    for structure in ("block", "diagonal"):
        made = linnet.curvature(net, loader, gaussian, structure)
        torch.testing.assert_close(made.diagonal(), whole.diagonal())
    for structure in ("kfac", "ekfac"):
        for sharing in ("expand", "reduce"):
            with pytest.raises(ModelError, match="differently"):
                linnet.curvature(net, loader, gaussian, structure, sharing=sharing)
        posterior = linnet.curvature(net, short, gaussian, structure).damped(1.0).inverse()
        rows = linnet.linearize(net).jacobian(long)
        expected = rows @ posterior.dense() @ rows.mT
        torch.testing.assert_close(posterior.output_covariance(long), expected)


def test_most_examples_of_a_batch() -> None:
    x, y = torch.randn(7, 2), torch.randn(7, 1)
    whole = TensorDataset(x, y)
    for data, most in (((x, y), 7), (whole, 7), (DataLoader(whole, 3), 3), (list_of(x, y), 7)):
        batches = Batches(data, None)
        assert batches.most(batches.first()) == most


def list_of(x: torch.Tensor, y: torch.Tensor) -> Subset[tuple[torch.Tensor, ...]]:
    """A data set that is no TensorDataset."""
    return Subset(TensorDataset(x, y), range(len(x)))


def test_load_takes_what_save_returned(
    tmp_path: Path, net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> None:
    made = linnet.curvature(net, data, CATEGORICAL)
    file = made.save(tmp_path)
    for path in (file, str(file), tmp_path):
        torch.testing.assert_close(linnet.load(path, net).dense(), made.dense())


def test_a_number_is_no_operator(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    made = linnet.curvature(net, data, CATEGORICAL)
    with pytest.raises(InputError, match=r"1\.0"):
        made + 1.0
    torch.testing.assert_close((made + made) @ torch.ones(P), 2 * (made @ torch.ones(P)))


def test_a_precision_and_a_covariance_look_different(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    G = linnet.curvature(net, (torch.randn(5, 2), torch.arange(5) % 3), linnet.likelihoods.Categorical())
    posterior = G.damped(2.0).inverse()
    assert posterior.applied == ("damped 2", "inverted")
    assert "damped 2, inverted" in repr(posterior)
    assert repr(linnet.load(posterior.save(tmp_path), net)) == repr(posterior)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "block", "full"])
def test_a_solution_of_a_singular_matrix_is_refused(structure: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    data = torch.randn(5, 6, dtype=dtype), torch.arange(5) % 4
    G = linnet.curvature(net, data, linnet.likelihoods.Categorical(), structure=structure)
    with pytest.raises(NumericalError, match=r"singular|not positive definite"):
        G.solve(torch.ones(G.shape[0], dtype=dtype))
    b = torch.ones(G.shape[0], dtype=dtype)
    assert (G.damped(1e-2) @ G.damped(1e-2).solve(b) - b).norm() < 1e-2 * b.norm()
