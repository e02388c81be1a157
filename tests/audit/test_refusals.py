"""What audits refuse, beyond single values of the wrong kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.errors import DataError, InputError, MemoryBudgetError
from tests.fitting.problems import problem, real
from tests.refusals import Row, holds, table

P, ONE = problem(n=8, tests=5), problem(n=9, outputs=1, classes=False)
FIT, BY_CG, OF_VALUES = P.fit(ridge=1.0), P.fit(ridge=1.0, solver="cg"), ONE.fit(ridge=0.5)
HELD = FIT.constrain(P.x_test[:1], P.f0_test[:1])
ADAPTED = linnet.adapt(P.model, (P.x, P.y), ridge=0.3)
SOFTMAX = linnet.fit(P.lin, (P.x, P.y), "cross-entropy")
NAMED, RENAMED = (linnet.adapt(P.model, (P.x, [names[i] for i in P.y.tolist()])) for names in ("abc", "bcd"))
X, NEW, LABELS, NAN = P.x, P.x_test, P.y[:5], float("nan")
NOISY = nn.Sequential(nn.Dropout(), nn.Linear(3, 3)).double().train()


def one_hot(*classes: int) -> Tensor:
    """Outputs of three classes."""
    return torch.eye(3)[list(classes)]


def flipped(before: Any, y: Any) -> Any:
    """Flips from one predictor to outputs of two examples."""
    return audit.flips(before, one_hot(0, 1), real(2, 3), y)


def means(groups: list[int], before: Any = None) -> Any:
    """Means of groups."""
    return audit.group_means(FIT, real(max(3, len(groups)), 3), groups, before)


def other(index: Any, target: Any) -> Any:
    """The fit with another label."""
    return audit.counterfactual(FIT, index, target)


def certified(forgotten: Any, fit: Any = FIT) -> Any:
    """Of forgetting."""
    return audit.forgetting_certificate(fit, forgotten)


def influence(*words: Any, fit: Any = FIT, x: Any = NEW, **options: Any) -> Any:
    """Of all examples on new ones."""
    return audit.influence(fit, x, *words, **options)


def chosen(n: Any = 2, pool: Any = NEW, **options: Any) -> Any:
    """Of a pool."""
    return audit.select(FIT, pool, n, **options)


def drawn_directions() -> Any:
    """A fit in random coordinates."""
    curvature = linnet.curvature(P.model, (X, P.y), linnet.likelihoods.Categorical(), structure="ekfac")
    drawn = linnet.with_sketch(P.model, curvature, dim=30, seed=0)
    return linnet.fit(linnet.linearize(drawn), (X, P.y))


ROWS: list[Row] = [
    (InputError, "before gives (1, 3)", lambda: flipped(one_hot(0), [0, 1])),
    (InputError, "(2, 2)", lambda: flipped(torch.eye(2), [0, 1])),
    (InputError, "not finite at index 0", lambda: flipped(one_hot(0, 1) * NAN, [0, 1])),
    (InputError, "before is str", lambda: flipped("old", [0, 1])),
    (InputError, "(1,)", lambda: flipped(one_hot(0, 1), [0])),
    (InputError, "float", lambda: flipped(one_hot(0, 1), [0.0, 1.0])),
    (InputError, "0 to 2", lambda: flipped(one_hot(0, 1), [0, 3])),
    (InputError, "text", lambda: flipped(one_hot(0, 1), "ab")),
    (InputError, "training mode", lambda: flipped(NOISY, [0, 1])),
    (InputError, "one group only", lambda: means([0, 0, 0])),
    (InputError, "single member in group 1", lambda: means([0, 0, 1])),
    (InputError, "(2,)", lambda: means([0, 1])),
    (InputError, "before has 2 outputs", lambda: means([0, 0, 1, 1], torch.zeros(4, 2))),
    (InputError, "2 example(s)", lambda: other([0, 1], 2)),
    (InputError, "target", lambda: other([0, 1], torch.tensor(2.0))),
    (InputError, "0 to 7", lambda: other(8, 0)),
    (InputError, "twice", lambda: other([1, 1], [0, 0])),
    (InputError, "no example", lambda: other([], [])),
    (InputError, "(2,)", lambda: other(0, [0, 1])),
    (InputError, "(1, 2)", lambda: other(0, [[1.0, 2.0]])),
    (InputError, "text", lambda: other(0, "cat")),
    (DataError, "0 to 2", lambda: other(0, 3)),
    (DataError, "not finite", lambda: other(0, [NAN, 0.0, 0.0])),
    (InputError, "twice", lambda: certified(FIT.forget([1]).forget([0, 0]))),
    (InputError, "0 to 7", lambda: certified([8])),
    (InputError, "fit='fit'", lambda: certified([0], "fit")),
    (InputError, "ridge 2", lambda: certified(P.fit(ridge=2.0).forget([0]))),
    (InputError, "1 example(s)", lambda: certified(FIT, FIT.forget([0]))),
    (InputError, "another network", lambda: certified(problem(n=8, seed=1).fit(ridge=1.0))),
    (InputError, "lissa", lambda: influence("lissa")),
    (InputError, "exact", lambda: influence("exact", fit=BY_CG)),
    (InputError, "fit", lambda: influence(fit=P.model)),
    (InputError, "directions", lambda: influence(directions=torch.ones(3))),
    (DataError, "empty", lambda: influence(x=NEW[:0])),
    (DataError, "9", lambda: influence(labels=[9, 0, 0, 0, 0])),
    (InputError, "one label", lambda: influence(labels=LABELS[:1])),
    (InputError, "labels", lambda: influence(labels=LABELS[:2])),
    (InputError, "labels", lambda: audit.loss_influence(FIT, NEW, LABELS[:2])),
    (MemoryBudgetError, "100 B", lambda: influence(memory="100B")),
    (MemoryBudgetError, "weight changes", lambda: audit.weight_changes(FIT, memory="100B")),
    (InputError, "8", lambda: audit.weight_changes(FIT, [8])),
    (InputError, "constraints", lambda: influence("cg", fit=HELD)),
    (InputError, "constraints", lambda: audit.weight_changes(HELD)),
    (InputError, "constraints", lambda: audit.tune_ridge(HELD, (NEW, LABELS))),
    (InputError, "NestedFit", lambda: influence("cg", fit=ADAPTED)),
    (InputError, "NestedFit", lambda: influence("ekfac", fit=ADAPTED)),
    (InputError, "one label", lambda: influence(fit=ADAPTED, labels=LABELS[:2])),
    (InputError, "SoftmaxFit", lambda: audit.select(SOFTMAX, NEW, 2)),
    (InputError, "n=0", lambda: chosen(0)),
    (InputError, "n=True", lambda: chosen(True)),
    (InputError, "n=2.0", lambda: chosen(2.0)),
    (InputError, "1 to 5", lambda: chosen(6)),
    (InputError, "margin", lambda: chosen(criterion="margin")),
    (InputError, "2 training example(s)", lambda: chosen(pool=torch.cat([NEW, X[1:3]]))),
    (InputError, "n=8", lambda: audit.summarize(FIT, 8)),
    (InputError, "x=", lambda: audit.summarize(FIT, 2, x=NEW)),
    (InputError, "classes", lambda: audit.mislabeled(OF_VALUES).flagged()),
    (InputError, "classes", lambda: audit.mislabeled(OF_VALUES).doubted()),
    (InputError, "margin", lambda: audit.mislabeled(OF_VALUES, score="margin")),
    (InputError, "loss", lambda: audit.mislabeled(OF_VALUES, score="loss")),
    (InputError, "self-influence", lambda: audit.mislabeled(FIT.loo(), P.y, score="self-influence")),
    (InputError, "labels", lambda: audit.mislabeled(FIT, P.y)),
    (InputError, "1e+100", lambda: audit.mislabeled(1e200 * torch.randn(len(P.y), 3).double(), P.y)),
    (InputError, "the same classes", lambda: audit.flips(NAMED, RENAMED, NEW, ["b"] * 5)),
    (InputError, "the same classes", lambda: audit.group_means(NAMED, X, [0, 1] * 4, RENAMED)),
    (InputError, "labels", lambda: audit.mislabeled(torch.zeros(3, 2), torch.zeros(2))),
    (InputError, "orthonormal", lambda: audit.sketch_error(FIT)),
    (InputError, "orthonormal", lambda: audit.sketch_error(drawn_directions())),
]


@table(ROWS)
def test_what_is_refused(row: Row) -> None:
    holds(row)
