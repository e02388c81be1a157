"""``Laplace.tune``: hyper-parameter search by a chosen criterion."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.laplace.evidence import HIGHEST, LOWEST, Tuned, maximize_evidence
from linnet.laplace.posterior import Hyper
from linnet.laplace.scores import Scorer, grid_points
from linnet.params import choice, integer, own, refuse, tensor
from linnet.params import seed as checked_seed
from linnet.solvers.lbfgs import minimize

METHODS = ("evidence", "validation", "grid", "loo")
PRIORS = 10.0 ** torch.linspace(-4, 4, 21, dtype=torch.float64)  # the grid, where none is given
_FLAT = 0.01  # nats of all data together: they are no more likely than 1.01 to 1
VALUES = "a number or a list of numbers, all positive"


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Values to try, and the predictions that they are compared by.

    Args:
        prior_precision: Values, 1e-4 to 1e4 by default; of several precisions, the geometric mean.
        data_scale: Values.
        noise_variance: Values, of a Gaussian likelihood of one variance.
        predict: "glm", or "mc" for held-out data.
        samples: Networks of "mc".
        seed: Seed of "mc".

    Raises:
        InputError: If a setting does not work.

    Example:
        >>> Grid(prior_precision=[0.1, 1.0, 10.0]).predict
        'glm'
    """

    prior_precision: Any = None
    data_scale: Any = None
    noise_variance: Any = None
    predict: str = "glm"
    samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        choice("predict", self.predict, ("glm", "mc"))
        integer("samples", self.samples)
        checked_seed("seed", self.seed)
        for name in ("prior_precision", "data_scale", "noise_variance"):
            value = getattr(self, name)
            if value is None:
                continue
            found = tensor(name, value, VALUES).to(torch.float64).flatten()
            if (
                isinstance(value, bool)
                or not found.numel()
                or not bool(((found > 0) & found.isfinite()).all())
            ):
                refuse(name, value, VALUES)
            object.__setattr__(self, name, own(value))


@dataclass(frozen=True)
class Search:
    """Settings of a search."""

    kind: str  # "gradient", "fixed-point" or "grid"
    steps: int  # most evaluations of the gradient or the fixed point
    scale: bool  # whether the scale of the data is searched by gradient, too
    noise: bool  # whether the noise variance is, too
    predict: str  # "glm" or "mc": the predictions that a grid compares
    samples: int  # networks of "mc"
    seed: int  # seed of "mc"


def tuned(method: str, scorer: Scorer, at: Hyper, search: Search, grids: dict[str, Any]) -> Tuned:
    """Find hyper-parameters."""
    integer("steps", search.steps)
    if method == "evidence":
        if search.scale or any(values is not None for values in grids.values()):
            raise InputError(
                "tune('evidence') with a grid, or of the scale of the data",
                expected="prior precisions and noise alone: duplicated data have an evidence of their own",
                remedy='use method="grid" or method="validation"',
            )
        found = maximize_evidence(
            scorer.posterior, scorer.groups, at, search.noise, search.kind, search.steps
        )
        return found
    if search.kind == "grid":
        return _by_grid(scorer, at, search, grids)
    if search.kind != "gradient":
        raise InputError(
            f"search={search.kind!r} with method={method!r}",
            expected='"gradient" or "grid"',
            remedy="leave search= out",
        )
    if any(values is not None for values in grids.values()) or search.predict != "glm":
        raise InputError(
            f"search='gradient' with a grid, or with predict={search.predict!r}",
            expected="a search by gradient of the closed-form predictions",
            remedy='pass search="grid"',
        )
    return _by_gradient(scorer, at, search)


def _by_gradient(scorer: Scorer, start: Hyper, search: Search) -> Tuned:
    """L-BFGS on the logarithms of the hyper-parameters."""
    g = scorer.groups.count

    def unpacked(eta: Tensor) -> Hyper:
        positive = eta.clamp(LOWEST, HIGHEST).exp()
        at = replace(start, prior=positive[:g])
        at = replace(at, scale=positive[g]) if search.scale else at
        return replace(at, noise=positive[-1]) if search.noise else at

    def objective(eta: Tensor) -> tuple[float, Tensor]:
        value, slope = scorer.gradient(unpacked(eta), search.scale, search.noise)
        inside = (eta > LOWEST) & (eta < HIGHEST)
        return -value, torch.where(inside, -slope.to(eta), 0.0)

    logs = [start.prior.log()]
    logs += [start.scale.log()[None]] if search.scale else []
    logs += [start.noise.log()[None]] if search.noise else []
    eta, value, count, converged = minimize(objective, torch.cat(logs), search.steps)
    found = unpacked(eta)
    certain = replace(found, prior=torch.full_like(found.prior, math.exp(HIGHEST)))
    gain = -value - float(scorer.values([certain])[0])
    if gain > _FLAT:
        return Tuned(found, -value, count, converged)
    warnings.warn(
        "the network alone predicts the data of tune() as well as any posterior around it, so the prior "
        f"precision ended at {float(found.prior.max()):.1e}, where variances are near 0. Tune on data that "
        "the network was not trained or chosen on, or set prior_precision= yourself",
        stacklevel=4,
    )
    return Tuned(found, -value, count, converged, edges=("prior_precision",))


def _by_grid(scorer: Scorer, at: Hyper, search: Search, grids: dict[str, Any]) -> Tuned:
    """The best of all combinations."""
    if search.scale or (search.noise and grids["noise"] is None):
        name = "data_scale" if search.scale else "noise"
        raise InputError(
            f"{name}=True in a grid, which tries the values that it is given",
            expected="values",
            remedy=f"pass {'noise_variance' if name == 'noise' else name}=[...], or search by gradient",
        )
    device = at.prior.device
    values = {
        "prior_precision": _values(grids["prior"], PRIORS),
        "data_scale": _values(grids["scale"], at.scale[None]),
        "noise_variance": _values(grids["noise"], at.noise[None]),
    }
    points = grid_points(at, *(grid.to(device) for grid in values.values()))
    by_prediction: dict[str, Callable[[], Tensor]] = {
        "glm": lambda: scorer.values(points),
        "mc": lambda: scorer.sampled_values(points, search.samples, search.seed),
    }
    if search.predict not in by_prediction or (search.predict == "mc" and scorer.left_out):
        raise InputError(
            f"predict={search.predict!r}",
            expected='"glm", or "mc" for held-out data',
            remedy='pass predict="glm"',
        )
    scores = by_prediction[search.predict]()
    best = int(scores.nan_to_num(-torch.inf).argmax())
    edges = _at_edges(values, best)
    return Tuned(points[best], float(scores[best]), len(points), converged=True, edges=edges)


def _at_edges(values: Mapping[str, Tensor], best: int) -> tuple[str, ...]:
    """Which grids have the best combination at an end of theirs."""
    found = []
    places = torch.unravel_index(torch.tensor(best), tuple(map(len, values.values())))
    for (name, grid), place in zip(values.items(), places, strict=True):
        if len(grid) > 1 and float(grid[place]) in (float(grid.min()), float(grid.max())):
            found.append(name)
    return tuple(found)


def _values(given: Any, default: Tensor) -> Tensor:
    """Values to try."""
    return default if given is None else torch.as_tensor(given, dtype=torch.float64).flatten()
