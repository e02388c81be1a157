"""What networks, data, inputs and vectors a linearization refuses, beyond single values of the wrong kind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.errors import DataError, InputError, ModelError
from linnet.likelihoods import Categorical
from linnet.tangent.batch import batch_size, check_finite, concatenate
from linnet.tangent.data import Data
from linnet.tangent.selection import select_parameters
from linnet.tangent.store import GramFile
from linnet.tangent.surgery import leaky_relu
from tests.fitting.problems import network, real
from tests.refusals import Row, holds, table

A, B, Y = real(5, 2), real(5, 3, seed=1), torch.tensor([0, 1, 0, 1, 0])
X, LIN = real(4, 3), linnet.linearize(network())
V, U = torch.ones(LIN.space.dim).double(), torch.ones(4, 3).double()


class Samples(Dataset[Any]):
    """Samples made by a function."""

    def __init__(self, n: int, sample: Any) -> None:
        self.n, self.sample = n, sample

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.sample(i)


class Failing(nn.Module):
    """Raises, or returns no tensor."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.layer, self.result = nn.Linear(3, 2), result

    def forward(self, x: Tensor) -> Any:
        self.layer(x.float())
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.script(nn.ReLU())
    return nn.Sequential(nn.Linear(3, 2), made)


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.LazyLinear(2))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return network()


def returning(result: Any) -> object:
    """Outputs of a network that returns something else."""
    return linnet.linearize(Failing(result)).base(X.float())


def texts(x: Any) -> object:
    """A fit to texts that no tokenizer has seen."""
    return linnet.adapt(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), x, [0, 1])


NAN, GROUPS = torch.nan, np.array(["owl", "ant", "bee"])[torch.arange(6) % 3]


def labeled(y: Any) -> object:
    """A fit to labels of any kind."""
    return linnet.adapt(network(), X[[0, 1, 2, 3, 0, 1]], y)


def batches(*each: Any) -> object:
    """Data as a list of batches."""
    return Data.of(list(each)).pair


DATA: list[Row] = [
    (InputError, "x[None]", lambda: batch_size(torch.tensor(1.0))),
    (InputError, "torch.as_tensor", lambda: batch_size(np.ones((4, 3)))),
    (InputError, "torch.as_tensor", lambda: batch_size({})),
    (DataError, "ragged", lambda: concatenate([real(2, 3), real(2, 4)])),
    (InputError, "structure", lambda: concatenate([A, (A, B)])),
    (InputError, "keys", lambda: concatenate([{"a": A}, {"b": A}])),
    (DataError, "index 3", lambda: check_finite((A, put(B, 9, NAN)), "x2")),
    (DataError, "index 0", lambda: check_finite(torch.tensor(NAN), "x")),
    (DataError, "empty", lambda: Data.of((A[:0], Y[:0])).pair),
    (DataError, "empty", lambda: Data.of(Samples(0, None)).pair),
    (DataError, "5 inputs", lambda: Data.of((A, Y[:4])).pair),
    (DataError, "index 4", lambda: Data.of((A, put(Y.float(), 4, NAN))).pair),
    (DataError, "ragged", lambda: Data.of(Samples(3, lambda i: (torch.zeros(2 + i), 0))).pair),
    (DataError, "(2,)", lambda: Data.of(Samples(3, lambda i: (A[0], torch.zeros(1 + i)))).pair),
    (InputError, "to_dense()", lambda: Data.of((A.to_sparse(), Y)).pair),
    (InputError, "to_dense()", lambda: Data.of((A, Y.to_sparse())).pair),
    (InputError, "length 3", lambda: Data.of((A, Y, Y)).pair),
    (InputError, "x is dict", lambda: linnet.fit(LIN, ({}, Y))),
    (InputError, "sample 0", lambda: Data.of(Samples(2, lambda i: A[i])).pair),
    (InputError, "x is str", lambda: Data.of(Samples(2, lambda i: ("a", 0))).pair),
    (InputError, "text", lambda: Data.of(Samples(2, lambda i: (A[i], "cat"))).pair),
    (InputError, "structure", lambda: Data.of(Samples(2, lambda i: (A[i] if i else (A[i], A[i]), 0))).pair),
    (InputError, "length 3", lambda: batches(A, A, Y)),
    (InputError, "batch 1", lambda: batches((A, Y), (A,), (A, Y))),
    (InputError, "batch 0", lambda: Data.of(iter([A, Y])).pair),
    (InputError, "collate_fn", lambda: batches((A, A, A), (A, A, A))),
    (InputError, "without targets", lambda: batches({"input": A}, {"input": A})),
    (DataError, "batch 1", lambda: batches((A, Y), (A, Y[:4]))),
    (DataError, "no example", lambda: batches()),
    (DataError, "mask", lambda: batches(*((torch.ones(1, n).long(), Y[:1]) for n in (5, 9)))),
    (InputError, "a batch at a time", lambda: LIN.kernel(iter([X]))),
    (InputError, "a batch at a time", lambda: LIN.kernel(DataLoader(TensorDataset(X)))),
    (InputError, "padding=True", lambda: texts(["a b", "c"])),
    (InputError, "padding=True", lambda: texts(np.array(["a b", "c"]))),
    (InputError, "padding=True", lambda: texts([[1, 2], [3]])),
    (DataError, "index 0", lambda: labeled([None, *GROUPS[1:]])),
    (DataError, "index 0", lambda: labeled(pd.Series([None, *GROUPS[1:]]))),
    (DataError, "NaN", lambda: labeled(pd.Series([None, 1, 2] * 2, dtype="Int64"))),
]


def put(t: Tensor, place: int, value: float) -> Tensor:
    """A copy with one entry replaced."""
    t = t.clone()
    t.view(-1)[place] = value
    return t


NETWORKS: list[Row] = [
    (ModelError, "TorchScript", lambda: linnet.linearize(scripted())),
    (ModelError, "torch.jit", lambda: leaky_relu(scripted())),
    (ModelError, "shape", lambda: linnet.linearize(lazy())),
    (ModelError, "meta", lambda: linnet.linearize(on_meta())),
    (ModelError, "meta", lambda: linnet.curvature(on_meta(), (X, Y[:4]), Categorical())),
    (ModelError, "model.module", lambda: linnet.linearize(nn.DataParallel(network()))),
    (ModelError, "parameter", lambda: select_parameters(nn.ReLU())),
    (InputError, "'encoder'", lambda: select_parameters(network(), "encoder")),
    (InputError, "none of the", lambda: select_parameters(network(), [])),
    (InputError, "none of the", lambda: select_parameters(network(), lambda *_: False)),
    (InputError, "none of the", lambda: select_parameters(network(), nn.Linear(2, 2))),
    (InputError, "'tail.bias'", lambda: select_parameters(network(), ["2.bias", "tail.bias"])),
    (InputError, "regular expression", lambda: select_parameters(network(), "(")),
    (InputError, "output=", lambda: linnet.linearize(network(), output=3)),  # type: ignore[arg-type]
    (ModelError, "list", lambda: returning([1.0])),
    (ModelError, "vocabulary", lambda: returning(KeyError("vocabulary"))),
    (ModelError, "check x's shape", lambda: LIN.base(real(4, 5))),
    (ModelError, "x.float()", lambda: linnet.preflight(network(), X > 0)),
    (DataError, "empty", lambda: linnet.preflight(network(), X[:0])),
    (DataError, "index 2", lambda: LIN.gap(put(X, 7, NAN))),
    (InputError, "nuclear", lambda: LIN.kernel(X, form="nuclear")),
    (InputError, "(4, 2)", lambda: LIN.vjp(X, U[:, :2])),
    (InputError, "like='dict'", lambda: LIN.vjp(X, U, like="dict")),
    (InputError, "0.weight", lambda: LIN.jvp(X, {**LIN.theta0, "0.weight": None})),
    (InputError, "37", lambda: LIN.jvp(X, V[:-1])),
    (InputError, "create", lambda: GramFile(Path("no") / "k.npy", (3, 2), torch.float64, {})),
]


@table([*DATA, *NETWORKS])
def test_what_is_refused(row: Row) -> None:
    holds(row)
