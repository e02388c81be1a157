"""Wrong values of some forty kinds, made afresh for every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[], Any]


def _sparse(t: Tensor) -> Tensor:
    return t.detach().to_sparse()


GENERIC: dict[str, Make] = {
    "None": lambda: None,
    "empty text": lambda: "",
    "text": lambda: "nonsense",
    "text with NUL": lambda: "a\0b",
    "long text": lambda: "x" * 5000,
    "bytes": lambda: b"x",
    "empty list": lambda: [],
    "empty dict": lambda: {},
    "list of text": lambda: ["nonsense"],
    "object": object,
    "class": lambda: torch.utils.data.TensorDataset,
    "lambda": lambda: lambda *_, **__: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "huge": lambda: 10**400,
    "minus huge": lambda: -(10**400),
    "true": lambda: True,
    "false": lambda: False,
    "half": lambda: 0.5,
    "three": lambda: 3.0,
    "complex": lambda: 1 + 2j,
    "missing file": lambda: Path("no") / "such" / "place",
    "module": lambda: nn.Linear(3, 2).double(),
    "tensor": lambda: torch.ones(4, 3, dtype=torch.float64),
    "empty tensor": lambda: torch.empty(0, dtype=torch.float64),
    "scalar tensor": lambda: torch.tensor(3.0),
    "integer tensor": lambda: torch.tensor(3),
    "tensor of nan": lambda: torch.full((4, 3), float("nan"), dtype=torch.float64),
    "tensor of inf": lambda: torch.full((4, 3), float("inf"), dtype=torch.float64),
    "complex tensor": lambda: torch.ones(4, 3, dtype=torch.complex128),
    "meta tensor": lambda: torch.ones(4, 3, device="meta"),
    "sparse tensor": lambda: torch.eye(4).to_sparse(),
    "meta scalar": lambda: torch.ones((), device="meta"),
}


def _with(t: Tensor, value: float) -> Tensor:
    changed = t.detach().clone() if t.is_floating_point() else t.detach().double()
    changed.view(-1)[:1] = value
    return changed


def of_tensor(t: Tensor) -> dict[str, Make]:
    """What a valid tensor can be bent into."""
    found: dict[str, Make] = {
        "~nan": lambda: _with(t, float("nan")),
        "~inf": lambda: _with(t, float("inf")),
        "~extra axis": lambda: t[..., None],
        "~first example": lambda: t[0],
        "~shorter": lambda: t[:-1],
        "~longer": lambda: torch.cat([t, t]),
        "~no example": lambda: t[:0],
        "~complex": lambda: t.to(torch.complex128),
        "~bool": lambda: t.bool(),
        "~integer": lambda: t.to(torch.int64),
        "~float32": lambda: t.to(torch.float32),
        "~float64": lambda: t.to(torch.float64),
        "~meta": lambda: t.to("meta"),
        "~sparse": lambda: _sparse(t),
        "~list": lambda: t.tolist(),
    }
    if t.ndim > 1:
        found["~wider"] = lambda: torch.cat([t, t], -1)
    if t.is_floating_point():
        found["~requires grad"] = lambda: t.detach().clone().requires_grad_()
    return (
        {name: make for name, make in found.items() if name != f"~{str(t.dtype).removeprefix('torch.')}"}
        if t.ndim
        else {"~meta": found["~meta"], "~complex": found["~complex"]}
    )


def wrong_for(valid: Any) -> dict[str, Make]:
    """Everything to be tried in the place of a valid value."""
    found = dict(GENERIC)
    if isinstance(valid, Tensor):
        found.update(of_tensor(valid))
    elif isinstance(valid, tuple) and valid and all(isinstance(part, Tensor) for part in valid):
        for place, name in enumerate(("x", "y")[: len(valid)]):
            for kind, make in {**of_tensor(valid[place]), **GENERIC}.items():
                found[f"{name}: {kind}"] = _placed(valid, place, make)
    elif isinstance(valid, Mapping) and valid and all(isinstance(part, Tensor) for part in valid.values()):
        first = next(iter(valid))
        for kind, make in {**of_tensor(valid[first]), **GENERIC}.items():
            found[f"entry: {kind}"] = _entered(valid, first, make)
        found["entry missing"] = lambda: {k: v for k, v in valid.items() if k != first}
        found["entry unknown"] = lambda: {**valid, "no such name": valid[first]}
    return found


def _placed(valid: tuple[Any, ...], place: int, make: Make) -> Make:
    return lambda: tuple(make() if at == place else part for at, part in enumerate(valid))


def _entered(valid: Mapping[str, Any], key: str, make: Make) -> Make:
    return lambda: {**valid, key: make()}
