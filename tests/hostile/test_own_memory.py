"""Whatever an object keeps is its own: nothing that a public call returns lies in the caller's memory."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import LinnetError
from tests.hostile import doors, small

# What returns its argument, checked or as a view of it, and the artists of matplotlib.
ECHOES = ("check", "mean", "to_params", "in_kind", "Gaussian.predictive")
P = sum(p.numel() for p in small.net().parameters())
RIDGES = torch.tensor([0.1, 1.0]).double()
# Arguments that have a default.
OPTIONAL: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "targets": (linnet.fit, {"lin": small.lin(), "data": small.classes(), "targets": small.targets()}),
    "probabilities": (
        linnet.fit,
        {
            "lin": small.lin(), "data": small.classes(), "loss": "cross-entropy",
            "targets": small.targets().softmax(1),
        },
    ),
    "flow": (
        linnet.gradient_flow,
        {
            "lin": small.lin(), "data": small.classes(), "times": torch.ones(1), "learning_rate": 0.1,
            "targets": small.targets(),
        },
    ),
    "noise": (linnet.likelihoods.Gaussian, {"variance": torch.ones(2)}),
    "wide noise": (linnet.likelihoods.Gaussian, {"variance": torch.ones(2).double()}),
    "noise array": (linnet.likelihoods.Gaussian, {"variance": torch.from_numpy(np.ones(2))}),
    "support": (linnet.likelihoods.Custom, {"nll": small.custom_nll, "support": torch.arange(3.0).double()}),
    "prior": (
        linnet.Laplace,
        {
            "model": small.net(), "likelihood": small.likelihood(), "structure": "diagonal",
            "prior_precision": torch.ones(P).double(), "prior_mean": torch.zeros(P).double(),
            "params": {name: p > 0 for name, p in small.net().named_parameters()},
        },
    ),
    "prior by name": (
        linnet.Laplace,
        {
            "model": small.net(), "likelihood": small.likelihood(), "structure": "diagonal",
            "prior_precision": {name: torch.ones(p.shape) for name, p in small.net().named_parameters()},
            "prior_mean": {name: np.zeros(p.shape) for name, p in small.net().named_parameters()},
        },
    ),
    "grid": (
        linnet.Grid,
        {name: torch.ones(2).double() for name in ("prior_precision", "data_scale", "noise_variance")},
    ),
    "path": (lambda **options: small.fit().path(**options), {"ridges": RIDGES}),
    "softmax path": (
        lambda **options: linnet.fit(small.lin(), small.classes(), "cross-entropy").path(**options),
        {"ridges": RIDGES},
    ),
    "ridge path": (
        linnet.audit.ridge_path, {"fit": small.fit(), "validation": small.classes(), "ridges": RIDGES}
    ),
    "prior mean": (
        linnet.continual.OnlineLaplace,
        {"model": small.net(), "likelihood": small.likelihood(), "prior_mean": small.params()},
    ),
    "batches": (
        linnet.curvature,
        {
            "model": small.net(), "data": [small.classes()], "likelihood": small.likelihood(),
            "structure": "kfac",
        },
    ),
}  # fmt: skip
LEFT_OUT = (types.ModuleType, type, str, bytes, int, float, torch.dtype, torch.device, torch.Generator)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls write files where they are made."""
    monkeypatch.chdir(tmp_path)


def inside(found: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Every tensor that an object reaches by its attributes, items and closures."""
    if id(found) in seen or isinstance(found, LEFT_OUT):
        return
    seen[id(found)] = found
    if isinstance(found, Tensor | np.ndarray):
        yield torch.as_tensor(found)
        return
    parts: list[Any] = []
    if isinstance(found, Mapping):
        parts += found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        parts += found
    if isinstance(found, types.FunctionType):
        parts += [cell.cell_contents for cell in found.__closure__ or ()]
    if isinstance(found, types.MethodType):
        parts += [found.__self__]
    parts += vars(found).values() if hasattr(found, "__dict__") else ()
    parts += [getattr(found, name) for name in getattr(type(found), "__slots__", ()) if hasattr(found, name)]
    for part in parts:
        yield from inside(part, seen)


def memory(tensors: Iterator[Tensor] | list[Tensor]) -> set[int]:
    """Where tensors lie."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided and t.numel()} - {0}


def given(value: Any) -> list[Tensor]:
    """The tensors that a caller hands over, and may write to afterwards."""
    if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
        return [torch.as_tensor(value)]
    if isinstance(value, Mapping):
        return [t for part in value.values() for t in given(part)]
    return [t for part in value for t in given(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("name", [name for name in doors.NAMES if "Plots" not in name])
@pytest.mark.thinned(6)
def test_nothing_is_kept_in_the_memory_of_the_caller(name: str) -> None:
    for door in doors.doors(name):
        if not door.name.endswith(ECHOES):
            own_memory(*door.make())


@pytest.mark.parametrize("name", OPTIONAL)
def test_nothing_is_kept_of_what_may_be_left_out(name: str) -> None:
    own_memory(*OPTIONAL[name])


def own_memory(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make the object and look where its tensors lie."""
    mine = {name: given(value) for name, value in arguments.items()}
    if not any(mine.values()):
        return
    try:
        result = call(**arguments)
    except LinnetError:  # what the object of the table cannot do
        return
    kept = memory(inside((result, getattr(call, "__self__", None)), {}))
    assert [name for name, tensors in mine.items() if memory(tensors) & kept] == []


# -- the same with numbers ---------------------------------------------------------------------------

T = small.normal(3, 3, seed=7)
MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda x, y: linnet.fit(small.lin(), (x, y)),
    "primal": lambda x, y: linnet.fit(small.lin(), (x, y), solver="primal"),
    "cg": lambda x, y: linnet.fit(small.lin(), (x, y), solver="cg"),
    "sketch": lambda x, y: linnet.fit(small.lin(), (x, y), solver=linnet.fitting.Sketch(dim=5)),
    "shared": lambda x, y: linnet.fit(small.lin(), (x, y), solver=linnet.fitting.Shared(combinations=1)),
    "cross-entropy": lambda x, y: linnet.fit(small.lin(), (x, y), "cross-entropy"),
    "update": lambda x, y: small.fit().update((x, y)),
    "adapt": lambda x, y: linnet.adapt(small.net(), (x, y), weight=0.5, ridge=0.1),
    "TangentGP": lambda x, y: linnet.TangentGP(small.net(), linnet.likelihoods.Gaussian()).fit(
        (x, np.eye(2)[np.asarray(y)])
    ),
    "Laplace": lambda x, y: linnet.Laplace(small.net(), small.likelihood()).fit((x, y)),
}
ASKED: dict[str, Callable[[Any], Tensor]] = {
    "predict": lambda fit: fit.predict(T),
    "variance": lambda fit: fit.predictive(T).variance,
    "loo": lambda fit: fit.loo(),
    "influence": lambda fit: fit.influence(T),
    "forget": lambda fit: fit.forget([1]).predict(T),
    "update": lambda fit: fit.update((T, torch.tensor([0, 1, 1]))).predict(T),
}


@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.thinned(6)
def test_answers_do_not_follow_what_is_written_into_the_data(name: str, kind: str) -> None:
    x, y = small.x(), small.labels()
    given_data = (x, y) if kind == "tensor" else (x.numpy(), y.numpy())
    fit, kept = MAKERS[name](*given_data), MAKERS[name](x.clone(), y.clone())
    x.normal_()
    y.zero_()
    asked = {word: ask for word, ask in ASKED.items() if hasattr(fit, word) or word == "variance"}
    asked = {word: ask for word, ask in asked.items() if not (name == "TangentGP" and word == "update")}
    for ask in asked.values():
        torch.testing.assert_close(ask(fit), ask(kept))
