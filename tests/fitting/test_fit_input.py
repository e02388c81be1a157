"""Bad input to a fit: an error of the right class that names the argument, the value and the remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.errors import DataError, InputError, ModelError
from linnet.fitting import Dual, OneHot
from tests.fitting.problems import network, problem, real, refused

P = problem()


def with_value(t: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    """A copy with one entry replaced."""
    t = t.clone()
    t[place] = value
    return t


# --- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0, 0.0, -1.0, math.nan, math.inf, None, "best", True, [1.0, 2.0], "1.0"])
def test_ridges(ridge: Any) -> None:
    refused(InputError, lambda: P.fit(ridge=ridge), f"ridge={ridge!r}", "positive number", "loo")


def test_an_array_of_ridges() -> None:
    refused(InputError, lambda: P.fit(ridge=torch.ones(2).numpy()), "ridge is array", "positive number")


def test_a_ridge_may_be_any_kind_of_number() -> None:
    assert P.fit(ridge=torch.tensor(2.0)).ridge == 2.0
    assert P.fit(ridge=2).ridge == 2.0


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, None, "15"])
def test_scales(scale: Any) -> None:
    refused(InputError, lambda: OneHot(scale), f"scale={scale!r}", "positive number")


@pytest.mark.parametrize("solver", ["lbfgs", "", None, "Dual", "SGD"])
def test_solvers(solver: Any) -> None:
    refused(InputError, lambda: P.fit(solver=solver), f"solver={solver!r}", '"dual"', '"cg"')


@pytest.mark.parametrize("loss", ["logistic", "hinge", None])
def test_losses(loss: Any) -> None:
    refused(InputError, lambda: P.fit(loss=loss), f"loss={loss!r}", "squared")


def test_a_criterion_without_kernel() -> None:
    refused(
        InputError, lambda: P.fit(solver="cg", ridge="loo"), "ridge='loo'", 'solver="cg"', 'solver="dual"'
    )


@pytest.mark.parametrize("memory", ["lots", 0, -5, "2XB", 1.5])
@pytest.mark.parametrize("solver", ["auto", "dual", "cg"])
def test_budgets(memory: Any, solver: str) -> None:
    refused(InputError, lambda: P.fit(memory=memory, solver=solver), "memory", repr(memory), "2GB")


@pytest.mark.parametrize("lin", [network(), None, "resnet", P.x])
def test_what_is_no_linearization(lin: Any) -> None:
    refused(
        InputError, lambda: linnet.fit(lin, (P.x, P.y)), "lin", type(lin).__name__, "linnet.linearize(model)"
    )


@pytest.mark.parametrize("file", ["kernel.pt", "kernel"])
def test_files_of_another_kind(file: str) -> None:
    refused(InputError, lambda: P.fit(solver=Dual(file)), "file", file, ".npy")


def test_a_file_in_no_folder(tmp_path: Any) -> None:
    file = str(tmp_path / "none" / "kernel.npy")
    refused(InputError, lambda: P.fit(solver=Dual(file)), "file", file, "create")


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_explicit_targets_of_other_types(loss: str) -> None:
    """Whether numbers come as booleans or integers does not matter; complex ones are no targets."""
    hot = torch.nn.functional.one_hot(P.y, P.t.shape[1])
    expected = P.fit(loss=loss, targets=hot.double()).predict(P.x)
    for targets in (hot.bool(), hot, hot.to(torch.uint64)):
        torch.testing.assert_close(P.fit(loss=loss, targets=targets).predict(P.x), expected)
    refused(InputError, lambda: P.fit(loss=loss, targets=hot * 1j), "targets", "complex")


# --- data -------------------------------------------------------------------------------------------


class Ragged(Dataset[Any]):
    """Samples of different shapes."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(3 + i), i % 2


class Empty(Dataset[Any]):
    """No samples."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, i: int) -> Any:
        raise IndexError(i)


@pytest.mark.parametrize("solver", ["auto", "dual", "cg"])
@pytest.mark.parametrize(
    "data",
    [
        (P.x[:0], P.y[:0]),
        ([], []),
        TensorDataset(P.x[:0], P.y[:0]),
        DataLoader(TensorDataset(P.x[:0], P.y[:0])),
        Empty(),
    ],
)
def test_empty_data(data: Any, solver: str) -> None:
    refused(
        DataError, lambda: linnet.fit(P.lin, data, solver=solver), "data is empty", "at least one example"
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, ["data", "NoneType"]),
        (P.x, ["data", "Tensor"]),
        ((P.x,), ["data", "tuple of length 1"]),
        ((P.x, P.y, P.y), ["data", "length 3"]),
        ({"x": P.x, "y": P.y}, ["data", "dict"]),
        ("train", ["data", "str"]),
        (7, ["data", "int"]),
        ((P.x, None), ["y", "NoneType"]),
        ((None, P.y), ["x", "NoneType"]),
        ((P.x, [["a"]] * 7), ["y", "list"]),
        ((["a"] * 7, P.y), ["x", "list"]),
        (([[1.0, 2.0, 3.0], [1.0]], [0, 1]), ["x", "list"]),
        (DataLoader(P.x), ["a batch of the DataLoader"]),
        (TensorDataset(P.x), ["sample 0"]),
        (({}, P.y), ["x", "dict"]),
        ((torch.tensor(1.0), torch.tensor(1)), ["x", "axis"]),
    ],
)
def test_what_is_no_data(data: Any, words: list[str]) -> None:
    refused(InputError, lambda: linnet.fit(P.lin, data), *words)


def test_ragged_samples() -> None:
    refused(DataError, lambda: linnet.fit(P.lin, Ragged()), "ragged", "(3,)", "(4,)", "resize")


@pytest.mark.parametrize("y", [P.y[:6], torch.tensor(1), torch.cat([P.y, P.y])])
def test_lengths_that_differ(y: Tensor) -> None:
    refused(
        DataError, lambda: linnet.fit(P.lin, (P.x, y)), "7 inputs", str(tuple(y.shape)), "one target for each"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    bad_x, bad_t = with_value(P.x, (4, 1), value), with_value(P.t, (5, 0), value)
    refused(DataError, lambda: linnet.fit(P.lin, (bad_x, P.y)), "x", "NaN", "1 example", "index 4", "repair")
    refused(DataError, lambda: linnet.fit(P.lin, (P.x, bad_t)), "y", "NaN", "index 5", "repair")
    refused(DataError, lambda: P.fit(targets=bad_t), "targets", "index 5", "repair")


def test_a_later_batch_that_is_not_finite() -> None:
    loader = DataLoader(TensorDataset(with_value(P.x, (6, 0), math.nan), P.y), batch_size=2)
    refused(DataError, lambda: linnet.fit(P.lin, loader), "x", "index 6")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[1, 2] = value  # type: ignore[index]
    refused(ModelError, lambda: linnet.linearize(model), "weights", "2.weight", "(3, 5)", "checkpoint")


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (torch.full((7,), 2), ["one class only", "2"]),
        (with_value(P.y, (3,), 3), ["3", "index 3", "0 to 2", "with_head"]),
        (with_value(P.y, (0,), -1), ["-1", "index 0"]),
    ],
)
def test_labels(y: Tensor, words: list[str]) -> None:
    refused(DataError, lambda: linnet.fit(P.lin, (P.x, y)), "y", *words)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (P.y.double(), ["(7,)", "3 outputs", "y.long()"]),
        (real(7, 2), ["(7, 2)", "3 outputs"]),
        ((P.y > 0)[:, None], ["torch.bool", "y.long()"]),
        (torch.nn.functional.one_hot(P.y), ["(7, 3)", "argmax"]),
    ],
)
def test_labels_of_another_kind(y: Tensor, words: list[str]) -> None:
    refused(InputError, lambda: linnet.fit(P.lin, (P.x, y)), "y", *words)


# --- inputs that the network cannot take -------------------------------------------------------------


@pytest.mark.parametrize("solver", ["dual", "cg"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (P.x > 0, ["bool", "x.float()"]),
        (real(7, 4), ["(1, 4)"]),
        ((P.x, P.x), ["(1, 3)"]),
    ],
)
def test_inputs_of_another_kind(x: Any, words: list[str], solver: str) -> None:
    refused(ModelError, lambda: linnet.fit(P.lin, (x, P.y), solver=solver), "x", "Sequential", *words)
    fit = P.fit(solver=solver)
    for call in (fit.predict, fit.predictive, fit.influence, fit.informativeness):
        refused(ModelError, lambda call=call: call(x), "x", *words)


@pytest.mark.parametrize("method", ["predict", "predictive", "influence", "informativeness"])
def test_nothing_to_predict(method: str) -> None:
    call = getattr(P.fit(), method)
    refused(DataError, lambda: call(P.x[:0]), "x is empty", "at least one example")
    refused(DataError, lambda: call(with_value(P.x, (2, 2), math.nan)), "x", "NaN", "index 2")
    refused(InputError, lambda: call("image.png"), "x", "str")


class Explodes(nn.Module):
    """Finite weights, infinite outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp().exp().exp() * 1e300


def test_outputs_that_are_not_finite() -> None:
    lin = linnet.linearize(Explodes().double())
    refused(
        ModelError, lambda: linnet.fit(lin, (9 * P.x.abs(), P.y)), "NaN or infinite outputs", "scale of x"
    )


def test_a_bad_call_leaves_no_file(tmp_path: Any) -> None:
    file = tmp_path / "kernel.npy"
    bad = with_value(P.x, (0, 0), math.nan)
    refused(DataError, lambda: linnet.fit(P.lin, (bad, P.y), solver=Dual(file)), "x")
    refused(DataError, lambda: linnet.fit(P.lin, (P.x, torch.ones(7).long()), solver=Dual(file)), "y")
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_the_data_is_refused_without_other_processes_too() -> None:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
    loader = DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for call in (
        lambda: linnet.fit(linnet.linearize(net), loader, ridge=0.1),
        lambda: linnet.adapt(net, loader),
    ):
        with pytest.raises(DataError, match="part 0 of 2, about 10 of 20 examples"):
            call()


def test_a_displacement_is_a_copy() -> None:
    fit = linnet.fit(P.lin, (P.x, P.y))
    before = fit.predict(P.x)
    for t in fit.displacement().values():
        t.zero_()
    assert torch.equal(fit.predict(P.x), before)
