"""``linnet.curvature`` with the fields of its settings as keywords, for tests over many of them."""

from __future__ import annotations

from typing import Any

import linnet
from linnet.curvatures import LowRank, MatrixFree, MonteCarlo, Passes, RandomProjection

FIELDS = {
    LowRank: ("rank", "method"),
    MatrixFree: ("derivative",),
    MonteCarlo: ("samples", "seed"),
    Passes: ("block", "memory", "file", "shard"),
}


def grouped(structure: Any = "kfac", expectation: Any = "exact", **options: Any) -> dict[str, Any]:
    """Keywords of ``linnet.curvature``; settings that the structure or expectation does not have go."""
    made: dict[Any, Any] = {}
    for kind, names in FIELDS.items():
        given = {name: options.pop(name) for name in names if name in options}
        made[kind] = kind(**given) if given else None
    if structure in ("low-rank", "matrix-free"):
        structure = made[LowRank if structure == "low-rank" else MatrixFree] or structure
    drawn = made[MonteCarlo]
    if drawn is not None and expectation == "mc":
        expectation = drawn
    if drawn is not None and expectation == "random-projection":
        expectation = RandomProjection(drawn.samples, drawn.seed)
    if made[Passes] is not None:
        options["passes"] = made[Passes]
    return {"structure": structure, "expectation": expectation, **options}


def curvature_of(
    model: Any,
    data: Any,
    likelihood: Any,
    structure: Any = "kfac",
    expectation: Any = "exact",
    params: Any = None,
    output: Any = None,
    **options: Any,
) -> Any:
    """``linnet.curvature``, of a linearization where parameters or outputs are chosen."""
    if params is not None or output is not None:
        model = linnet.linearize(model, params, output)
    return linnet.curvature(model, data, likelihood, **grouped(structure, expectation, **options))
