"""Classes that an adapted network has not seen: a column of targets, exact like everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError
from tests.fitting.problems import near


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5)).double()


def drawn(classes: tuple[int, ...], seed: int, each: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(9))
    y = torch.tensor(classes).repeat_interleave(each)
    return (centers[y] + torch.randn(len(y), 4, generator=draw)).double(), y


@pytest.mark.parametrize("options", [{}, {"weight": 0.4, "ridge": 0.1}, {"weight": 0.0}])
def test_a_new_class_is_a_column_of_targets(net: nn.Module, options: dict) -> None:
    old, new = drawn((0, 1), 0), drawn((2, 3, 1), 1)
    fit = linnet.adapt(net, old, **options)
    more = fit.update(new)
    y = torch.cat([old[1], new[1]])
    assert more.classes == 4
    assert fit.classes == 2
    kernel = more.system.kernel + more.ridge * torch.eye(40, dtype=torch.float64)
    targets = 15 * nn.functional.one_hot(y, 4).double()
    near(kernel @ more.system.beta, targets, 1e-6)  # the variance of the intercept takes digits
    right = more.predict(drawn((0, 1, 2, 3), 5)[0]).argmax(1) == drawn((0, 1, 2, 3), 5)[1]
    assert right.double().mean() > 0.6
    assert more.predictive(new[0]).probs.shape == (24, 4)
    assert more.loo().shape == (40, 4)
    again = more.forget(classes=[2, 3])
    near(again.predict(old[0])[:, :2], fit.update(tuple(part[16:] for part in new)).predict(old[0]), 1e-6)
    assert not again.predictive(old[0]).probs[:, 2:].any()


def test_any_order_of_tasks_gives_the_same_fit(net: nn.Module) -> None:
    start, first, second = drawn((0, 1), 0), drawn((2,), 1), drawn((3,), 2)
    fit = linnet.adapt(net, start)
    one = fit.update(first).update(second)
    other = fit.update(tuple(torch.cat(parts) for parts in zip(second, first, strict=True)))
    x = drawn((0, 1, 2, 3), 3)[0]
    near(one.predict(x), other.predict(x), 1e-8)
    near(one.forget(classes=2).predict(x)[:, 3], other.forget(classes=2).predict(x)[:, 3], 1e-8)


def test_names_of_new_classes_come_after_the_old(net: nn.Module, tmp_path: Path) -> None:
    (x, y), (more, _) = drawn((0, 1), 0), drawn((2,), 1)
    fit = linnet.adapt(net, (x, ["pear" if label else "plum" for label in y.tolist()]))
    assert fit.class_names == ("pear", "plum")
    grown = fit.update((more, ["fig"] * len(more)))
    assert grown.class_names == ("pear", "plum", "fig")
    assert grown.labels[-1] == 2
    assert fit.class_names == ("pear", "plum")
    with pytest.raises(DataError, match="class 2, which has no name"):
        fit.update((more, torch.full((len(more),), 2)))
    assert torch.equal(grown.forget(classes="pear").labels, grown.labels[grown.labels != 0])
    grown.save(tmp_path)
    kept = linnet.load(tmp_path, net)
    assert kept.class_names == grown.class_names
    near(kept.predict(x), grown.predict(x), 1e-10)


def test_with_the_ridge_chosen_again(net: nn.Module) -> None:
    old, new = drawn((0, 1), 0), drawn((2,), 1)
    joined = tuple(torch.cat(parts) for parts in zip(old, new, strict=True))
    near(
        linnet.adapt(net, old).update(new, ridge="loo").predict(new[0]),
        linnet.adapt(net, joined).predict(new[0]),
        1e-9,
    )


def test_what_is_refused(net: nn.Module) -> None:
    old, (x, y) = drawn((0, 1), 0), drawn((2,), 1)
    fit = linnet.adapt(net, old)
    for labels, says in ((y + 5, "without gaps"), (y + 1, "without gaps"), (y - 5, "negative")):
        with pytest.raises(DataError, match=says):
            fit.update((x, labels))
    held = fit.constrain(x[:1], torch.zeros(1, 2).double())
    with pytest.raises(InputError, match="before constrain"):
        held.update((x, y))
    for classes, says in ((7, "with examples"), ([], "with examples"), (True, "with examples")):
        with pytest.raises(InputError, match=says):
            fit.forget(classes=classes)
    for given in ({}, {"indices": [0], "classes": 1}):
        with pytest.raises(InputError, match=r"forget\(\) with"):
            fit.forget(**given)
    values = linnet.adapt(net, (x, x[:, :1]))
    with pytest.raises(InputError, match="a fit of classes"):
        values.forget(classes=0)
    with pytest.raises(InputError, match="at least one position"):
        fit.relabel([], [])
    with pytest.raises(DataError, match="without gaps"):
        fit.relabel([0], [3])
    near(values.relabel([1], x[:1, :1]).targets[1], x[0, :1])
    network = linnet.fit(linnet.linearize(net), old)
    with pytest.raises(DataError, match="out of range"):
        network.update((x, y + 7))
