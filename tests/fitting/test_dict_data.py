"""Batches that are dicts, as loaders and data sets of text networks give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.errors import InputError
from linnet.laplace.laplace import Laplace
from linnet.likelihoods import Categorical
from linnet.tangent.data import Data
from tests.refusals import refused

N = 12
IDS = torch.randint(9, (N, 4), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(N, 4, dtype=torch.long)
MASK[::3, 3] = 0
Y = torch.arange(N) % 3


class Bag(nn.Module):
    """A classifier that is called by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(9, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.hidden(self.table(input_ids)).tanh() * attention_mask[..., None]
        return self.head(h.sum(1))  # type: ignore[no-any-return]


class Rows:
    """What a data set of columns gives: a dict of lists and numbers for each position."""

    def __init__(self, name: str = "label", text: bool = False) -> None:
        self.name, self.text = name, text

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        row: dict[str, Any] = {"input_ids": IDS[i].tolist(), "attention_mask": MASK[i].tolist()}
        return row | {self.name: int(Y[i])} | ({"text": "words"} if self.text else {})


def batch(rows: list[Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor([row[key] for row in rows]) for key in rows[0]}


X = {"input_ids": IDS, "attention_mask": MASK}
KINDS: dict[str, Any] = {
    "loader": lambda: DataLoader(Rows("labels"), batch_size=5, collate_fn=batch),  # type: ignore[arg-type]
    "set": Rows,
    "batch": lambda: {**X, "labels": Y},
}


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Bag().double()


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_targets_and_the_rest_is_x(kind: str) -> None:
    x, y = Data.of(KINDS[kind]()).pair
    assert set(x) == set(X)
    assert all(torch.equal(x[key], X[key]) for key in X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_takes_them_as_it_takes_a_pair(net: nn.Module, kind: str) -> None:
    lin = linnet.linearize(net)

    def answers(data: Any) -> list[Tensor]:
        laplace = Laplace(net, Categorical(), structure="kfac").fit(data)
        empirical = linnet.curvature(net, data, Categorical(), "diagonal", "empirical")
        return [
            linnet.fit(lin, data, ridge=0.1).predict(X),
            linnet.adapt(net, data, ridge=0.1, weight=0.5).predict(X),
            laplace.predictive(X).probs,
            empirical.diagonal(),
        ]

    for own, pair in zip(answers(KINDS[kind]()), answers((X, Y)), strict=True):
        torch.testing.assert_close(own, pair, rtol=1e-9, atol=1e-12)


def test_kernels_and_predictions_take_a_labeled_batch(net: nn.Module) -> None:
    lin, labeled = linnet.linearize(net), {**X, "labels": Y}
    torch.testing.assert_close(lin.kernel(labeled), lin.kernel(X))
    fit = linnet.fit(lin, labeled, ridge=0.1)
    torch.testing.assert_close(fit.predict(labeled), fit.predict(X))


@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_take_them(net: nn.Module, kind: str) -> None:
    data = KINDS[kind]()
    short = linnet.Training(steps=3, batch_size=4, learning_rate=1e-2)
    tuned = linnet.finetune(net, data, training=short)
    pair = linnet.finetune(net, (X, Y), training=short)
    torch.testing.assert_close(tuned.predict(X), pair.predict(X))


def test_a_network_that_asks_for_labels_gets_them() -> None:
    class Conditional(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, attention_mask) * labels[:, None]

    lin = linnet.linearize(Conditional())
    assert not lin.kernel({**X, "labels": torch.zeros(N)}).any()
    assert lin.kernel({**X, "labels": torch.ones(N)}).any()


def test_data_without_labels_and_with_two(net: nn.Module) -> None:
    lin = linnet.linearize(net)
    refused(InputError, lambda: linnet.fit(lin, X), "'input_ids'", "'attention_mask'", '"labels"')
    both = {**X, "labels": Y, "label": Y}
    refused(InputError, lambda: linnet.fit(lin, both), "'labels'", "'label'", "remove one")


def test_a_column_of_text_that_the_network_does_not_take_is_left_out(net: nn.Module) -> None:
    fit = linnet.fit(linnet.linearize(net), Rows(text=True))
    torch.testing.assert_close(fit.predict(X), linnet.fit(linnet.linearize(net), (X, Y)).predict(X))
    assert "'text'" in fit.record.reasons["data"]


def test_curvature_without_targets_takes_inputs_alone(net: nn.Module) -> None:
    class Unlabeled(Rows):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {key: value for key, value in super().__getitem__(i).items() if key != "label"}

    own = linnet.curvature(net, Unlabeled(), Categorical(), "diagonal").diagonal()
    plain = linnet.curvature(net, X, Categorical(), "diagonal").diagonal()
    torch.testing.assert_close(own, plain)


def test_a_pair_may_hold_an_input_called_label() -> None:
    x, y = Data.of(({"label": IDS}, Y)).pair
    assert torch.equal(x["label"], IDS)
    assert torch.equal(y, Y)
    assert Data.of(TensorDataset(IDS, Y)).pair[0].shape == IDS.shape
