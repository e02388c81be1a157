"""The representation of each layer under each structure, and its description.

A Kronecker structure fits layers whose gradients have factors. The others join in with blocks of their own:
exact if small, from the moments of their per-example gradients if they are matrices, else their diagonal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from linnet.curvatures.kfac import KroneckerSums, RowMomentSums
from linnet.curvatures.layers import Layer
from linnet.curvatures.settings import WIDEST
from linnet.curvatures.sums import BlockSums, DiagonalSums, Sums
from linnet.errors import InputError
from linnet.params import choice

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac", "kfra", "low-rank", "matrix-free", "last-layer")
BY_LAYER = ("block", "diagonal", "kfac", "ekfac")  # what a mixture may be made of
SMALL = 512  # parameters of a layer without factors up to which its block is kept exactly

Structure = str | Mapping[str, str]


def resolve(structure: str, expectation: str, default: str = "exact") -> tuple[str, str]:
    """A structure, checked, and the expectation that it takes."""
    choice("structure", structure, STRUCTURES, 'pass structure="kfac" if unsure')
    if structure != "kfra":
        return structure, expectation
    if expectation not in (default, "auto", "recursion"):
        raise InputError(
            f"structure={structure!r} with expectation={expectation!r}",
            expected='expectation="recursion", the only one of this structure',
            remedy='leave expectation= out, or pass structure="kfac"',
        )
    return structure, "recursion"


def sides(layer: Layer) -> dict[str, int]:
    """Rows of the Kronecker factors that a layer can have."""
    if layer.factored:
        return dict(zip(("inputs", "gradients"), layer.widths, strict=True))
    rows = layer.shapes[0][0] if layer.shapes[0] else 1
    return {"left": rows, "right": layer.size // max(1, rows)}


def wide_sides(layer: Layer, widest: int = WIDEST) -> tuple[str, ...]:
    """Sides of a layer whose Kronecker factor is a diagonal."""
    return tuple(side for side, size in sides(layer).items() if size > widest and layer.groups == 1)


def treatment(layer: Layer, structure: str, widest: int = WIDEST) -> tuple[str, str]:
    """The representation of one layer."""
    if structure in ("block", "diagonal"):
        return structure, ""
    wide = wide_sides(layer, widest)
    if layer.factored:
        if len(wide) == 2:
            return "diagonal", f"both sides have more than {widest} rows: exact diagonal"
        return structure, ", ".join(note for note in (_approximations(layer), _halved(layer, wide)) if note)
    if layer.size <= SMALL:
        return "block", f"{layer.why}: exact block"
    if layer.embedding or len(layer.names) > 1 or len(layer.shapes[0]) < 2:
        return "diagonal", f"{layer.why}: exact diagonal"
    if len(wide) == 2:
        return "diagonal", f"{layer.why}, both sides with more than {widest} rows: exact diagonal"
    note = f"{layer.why}: factors from the moments of per-example gradients"
    return structure, ", ".join(part for part in (note, _halved(layer, wide)) if part)


def _halved(layer: Layer, wide: Sequence[str]) -> str:
    """The side that has a diagonal instead of a matrix."""
    return f"the factor of {sides(layer)[wide[0]]} rows is a diagonal" if wide else ""


def _approximations(layer: Layer) -> str:
    """Approximations beyond E[aaᵀ ⊗ ggᵀ] ≈ E[aaᵀ] ⊗ E[ggᵀ]."""
    notes = []
    if layer.groups > 1:
        notes.append(f"{layer.groups} groups taken as independent")
    if layer.form.uses > 1:
        notes.append(f"{layer.form.uses} uses taken as independent")
    return ", ".join(notes)


def by_layer(structure: Structure, layers: Sequence[Layer]) -> dict[str, str]:
    """The structure of each layer, for one structure or a mixture of them."""
    if isinstance(structure, str):
        return {layer.name: structure for layer in layers}
    patterns = []
    for text, wanted in structure.items():
        try:
            patterns.append((re.compile(text), resolve(wanted, "exact")[0]))
        except (re.error, TypeError) as error:
            raise InputError(
                f"structure has the key {text!r}, no regular expression: {error}",
                expected="regular expressions to search in parameter names",
                remedy="escape special characters with a backslash",
            ) from error
        found = patterns[-1][1].replace("full", "block")
        if found not in BY_LAYER:
            raise InputError(
                f"structure[{text!r}]={wanted!r}",
                expected=", ".join(f'"{known}"' for known in BY_LAYER),
                remedy="other structures describe the whole network, not a layer",
            )
        patterns[-1] = (patterns[-1][0], found)
    chosen = {}
    for layer in layers:
        fits = [wanted for pattern, wanted in patterns if any(pattern.search(name) for name in layer.names)]
        if not fits:
            raise InputError(
                f"structure names no structure for {', '.join(layer.names)}",
                expected="an expression that is found in every parameter's name",
                remedy='add a last entry ".*" for all the rest',
            )
        chosen[layer.name] = fits[0]
    return chosen


def make_sums(
    layer: Layer, how: str, sharing: str, dtype: torch.dtype, device: torch.device, widest: int = WIDEST
) -> Sums:
    """Empty statistics of a layer for the first pass."""
    if how == "diagonal":
        return DiagonalSums(layer, dtype, device)
    if how in ("block", "full"):
        return BlockSums(layer, dtype, device)
    wide = wide_sides(layer, widest)
    if layer.factored:
        return KroneckerSums(layer, sharing, dtype, device, wide)
    return RowMomentSums(layer, dtype, device, wide)
