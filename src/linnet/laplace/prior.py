"""Gaussian priors on the weights: one precision, one per layer, or one per parameter.

The prior is N(μ, Δ⁻¹) with Δ diagonal. Its precisions come in groups: every parameter belongs to one group,
and each block of the posterior sees either one number or one for each of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.parts import Part
from linnet.errors import InputError
from linnet.linalg.factorize import is_finite
from linnet.linalg.operator import ParameterSpace
from linnet.params import refuse, shown, tensor

FORMS = ("isotropic", "layer", "parameter")
VECTOR_STRUCTURES = ("full", "block", "diagonal", "low-rank")  # exact with a precision for each parameter


@dataclass(frozen=True, eq=False)
class Groups:
    """Which parameters share a prior precision."""

    form: str  # "isotropic", "layer" or "parameter"
    names: tuple[str, ...]  # names of the groups; empty for "parameter"
    members: Tensor  # the group of every parameter, (P,)
    # for every block of the posterior its group, or that of each of its rows (p,)
    places: tuple[int | Tensor, ...]

    @property
    def count(self) -> int:
        """G, the number of groups."""
        return len(self.names) if self.form != "parameter" else len(self.members)

    def on(self, block: int, values: Tensor) -> Tensor:
        """The precisions that a block sees, ()."""
        # values (G,)
        return values[self.places[block]]

    def sums(self, each: Tensor) -> Tensor:
        """Numbers of the parameters, added up in each group, (G,)."""
        # each (P,)
        return each.new_zeros(self.count).index_add(0, self.members, each)


def make_groups(form: str, parts: Sequence[Part], space: ParameterSpace, device: torch.device) -> Groups:
    """The groups of a form."""
    # A layer is the module that owns a parameter; modules whose parameters share one Kronecker product, as a
    # weight and a bias that another module adds, are one layer.
    if form not in FORMS:
        raise InputError(
            f"prior={form!r}", expected=", ".join(f'"{one}"' for one in FORMS), remedy="leave prior= out"
        )
    if form == "isotropic":
        every = torch.zeros(1, dtype=torch.long, device=device).expand(space.dim)
        return Groups(form, ("all",), every, (0,) * len(parts))
    if form == "layer":
        owners = _owners(parts, space)
        names = tuple(dict.fromkeys(owners.values()))
        sizes = [space.shapes[name].numel() for name in space.names]
        each = torch.tensor([names.index(owners[name]) for name in space.names])
        members = each.repeat_interleave(torch.tensor(sizes)).to(device)
    else:
        names, members = (), torch.arange(space.dim, device=device)
    places = tuple(_place(part, members, space, form) for part in parts)
    return Groups(form, names, members, places)


def _owners(parts: Sequence[Part], space: ParameterSpace) -> dict[str, str]:
    """The layer of each parameter."""
    owners = {name: name.rpartition(".")[0] or name for name in space.names}
    for part in parts:
        if part.structure not in VECTOR_STRUCTURES:
            first = owners[part.layer.names[0]]
            merged = {owners[name] for name in part.layer.names}
            owners = {name: first if owner in merged else owner for name, owner in owners.items()}
    return owners


def _place(part: Part, members: Tensor, space: ParameterSpace, form: str) -> int | Tensor:
    """The group of a block, or of each of its rows."""
    rows = part.gather(members[:, None].double(), space)[:, 0].long()
    if rows.numel() and bool((rows == rows[0]).all()):
        return int(rows[0])
    if part.structure not in VECTOR_STRUCTURES:
        raise InputError(
            f"a prior precision for each {form} with the {part.structure} block of {part.layer.name}",
            expected="one precision for a Kronecker block: others would destroy its structure",
            remedy='use structure="diagonal", "full", "block" or "low-rank", or prior="layer"',
        )
    return rows


def prior_values(
    given: Any, parts: Sequence[Part], space: ParameterSpace, device: torch.device
) -> tuple[Groups, Tensor]:
    """Prior precisions as the user gave them, (G,)."""
    if isinstance(given, Mapping):
        return _by_name(given, parts, space, device)
    values = torch.as_tensor(given, dtype=torch.float64, device=device).flatten()
    form = "isotropic" if len(values) == 1 else "parameter" if len(values) == space.dim else "layer"
    groups = make_groups(form, parts, space, device)
    if len(values) != groups.count:
        raise InputError(
            f"prior_precision has {len(values)} entries",
            expected=f"1, {groups.count} (one per layer) or {space.dim} (one per parameter)",
            remedy="pass a number, or a dict by layer name",
        )
    return groups, values


def _by_name(
    given: Mapping[str, Any], parts: Sequence[Part], space: ParameterSpace, device: torch.device
) -> tuple[Groups, Tensor]:
    """Precisions by the names of layers, or of parameters."""
    by_layer = make_groups("layer", parts, space, device)
    if set(given) == set(by_layer.names):
        each = [_shaped(given[name], torch.Size(()), name, device) for name in by_layer.names]
        return by_layer, torch.stack(each)
    if set(given) == set(space.names):
        pieces = {name: _shaped(given[name], shape, name, device) for name, shape in space.shapes.items()}
        return make_groups("parameter", parts, space, device), space.to_flat(pieces).clone()
    raise InputError(
        f"prior_precision has the names {sorted(given)[:8]}",
        expected=f"a precision for each of the layers {', '.join(by_layer.names[:8])}"
        + (" ..." if by_layer.count > 8 else ""),
        remedy="name all layers, or pass one number",
    )


def _shaped(value: Any, shape: torch.Size, name: str, device: torch.device) -> Tensor:
    """Precisions under one name: as many as there are to be, or one for all."""
    found = torch.as_tensor(value, dtype=torch.float64, device=device)
    if found.numel() == 1:
        return found.reshape(()).expand(shape)
    try:
        return found.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"prior_precision[{name!r}] has shape {tuple(found.shape)}",
            expected=f"one number, or the shape {tuple(shape)}" if len(shape) else "one number for a layer",
            remedy="see dict(model.named_parameters()) for the shapes",
        ) from error


def check_prior(given: Any) -> None:
    """Raise unless prior precisions are positive finite numbers, whatever they come in."""
    if isinstance(given, Mapping) and not given:
        refuse("prior_precision", given, "positive numbers", "name a layer or a parameter")
    for name, value in given.items() if isinstance(given, Mapping) else [("", given)]:
        where = f"prior_precision[{name!r}]" if name else "prior_precision"
        expected = (
            "positive numbers: with a precision of zero the prior has no density, and what the data leave "
            "undetermined would be infinitely uncertain"
        )
        remedy = 'pass a small positive number, or tune it: .tune("evidence")'
        found = tensor(where, value, expected, remedy).detach()
        numbers = found.double()
        good = found.numel() > 0 and found.dtype != torch.bool
        if not good or not bool((numbers > 0).all() & numbers.isfinite().all()):
            what = f"holds {float(numbers.min()):.4g}" if numbers.numel() > 1 else f"is {shown(value)}"
            raise InputError(f"{where} {what}", expected, remedy)


def check_mean(given: Any) -> None:
    """Raise unless prior means are finite numbers, whatever they come in; shapes are looked at later."""
    for name, value in given.items() if isinstance(given, Mapping) else [("", given)]:
        where = f"prior_mean[{name!r}]" if name else "prior_mean"
        found = tensor(where, value, "finite numbers")
        if not found.numel() or found.dtype == torch.bool or not is_finite(found):
            refuse(where, value, "finite numbers", "leave prior_mean= out for zero")


def make_mean(given: Any, space: ParameterSpace, device: torch.device) -> Tensor:
    """The prior mean of every parameter, (P,)."""
    try:
        if isinstance(given, Mapping):
            flat = space.to_flat({n: torch.as_tensor(v, dtype=torch.float64) for n, v in given.items()})
        else:
            flat = torch.as_tensor(given, dtype=torch.float64)
        shown = f"has shape {tuple(flat.shape)}"
    except (TypeError, RuntimeError):
        flat, shown = torch.empty(0), f"is {given!r}"
    if flat.numel() and not bool(flat.isfinite().all()):
        shown = "holds NaN or infinite values"
    elif flat.ndim <= 1 and flat.numel() in (1, space.dim):
        return flat.detach().clone().to(device).expand(space.dim)  # one number takes the memory of one
    raise InputError(
        f"prior_mean {shown}",
        expected=f"a finite number, ({space.dim},), or tensors by parameter name",
        remedy="leave prior_mean= out for zero",
    )
