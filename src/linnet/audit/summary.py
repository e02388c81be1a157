"""Data set summaries: the most informative training examples of a fit.

The most informative examples are those whose removal changes predictions most (F-SI). Examples that say the
same are then chosen together; the greedy coreset avoids that, by adding, one after the other, the example
whose addition brings the fit on the chosen ones nearest to the fit on all. With C_S = K − K_XS M_S K_SX the
posterior covariance of all outputs given S (over σ²/ρ), and e = t − f_S,

    f_{S+j} − f_S = C_S[:, j] (C_S[j, j] + ρI)⁻¹ e_j

for every candidate j at once, and C_{S+j} = C_S − C_S[:, j] (C_S[j, j] + ρI)⁻¹ C_S[j, :].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit
from linnet.errors import InputError
from linnet.fitting.linear_fit import LinearFit
from linnet.linear.dual import DualSystem
from linnet.memory import Plan, parse_bytes, require
from linnet.progress import track
from linnet.shown import Record
from linnet.tangent.batch import Inputs, named_tensor
from linnet.tangent.modes import in_exact_mode

METHODS = ("greedy", "informative")


@dataclass(frozen=True, repr=False)
class Summary(Record):
    """A few training examples that represent all.

    Args:
        indices: Their positions; for ``"greedy"`` in the order of choice, for ``"informative"`` from the
            most informative on, (n,).
        rest: All other positions, ascending, (N - n,).
        scores: For ``"informative"`` the functional information of each training example, (N,); for
            ``"greedy"`` the distance of the fits after each choice, (n,).
        distance: Mean squared distance of the outputs on all training examples to those of the full fit.
        fit: The fit on these examples alone, at the same ridge.
    """

    indices: Tensor
    rest: Tensor
    scores: Tensor
    distance: float
    fit: LinearFit

    def _shown(self) -> dict[str, Any]:
        chosen, left = len(self.indices), len(self.rest)
        return {"chosen": chosen, "of": chosen + left, "indices": self.indices, "distance": self.distance}


@in_exact_mode
@torch.no_grad()
def summarize(
    fit: LinearFit,
    n: int,
    method: str = "greedy",
    *,
    x: Inputs | None = None,
    candidates: Sequence[int] | Tensor | None = None,
    memory: str | int | None = None,
) -> Summary:
    """Choose n training examples that represent the whole training set.

    Args:
        fit: A linear fit.
        n: Number of examples, 1 to N − 1.
        method: ``"greedy"``, the coreset whose fit is nearest to the full one, chosen one at a time (dual
            fits); ``"informative"``, the n examples of highest functional information.
        x: Examples whose predictions count in ``"informative"``; by default the training examples.
        candidates: Positions (k,) to choose from; all by default.
        memory: Budget; by default half of what is available.

    Returns:
        The summary, with its fit.

    Raises:
        InputError: If n, the method or the candidates are out of range or do not go with the fit.
        MemoryBudgetError: If the greedy choice does not fit the budget.

    Source:
        Achille et al., CVPR 2021, eq. (9) and section 4.6 (figure 6); the greedy choice is forward selection
        (Smola and Bartlett 2000, for Gaussian processes).

    Example:
        >>> import linnet
        >>> net = torch.nn.Linear(1, 1).double()
        >>> x = torch.tensor([[0.0], [0.01], [1.0]]).double()
        >>> fit = linnet.fit(linnet.linearize(net), (x, 2 * x), ridge=0.1)
        >>> sorted(summarize(fit, 2).indices.tolist()) == [0, 1]
        False
    """
    fit = check_fit(fit)
    allowed = _checked(fit, n, method, x, candidates)
    if method == "informative":
        scores = fit.informativeness(x)
        inside = torch.full_like(scores, float("-inf"))
        inside[allowed] = scores[allowed]
        indices = inside.argsort(descending=True, stable=True)[:n]
    else:
        assert fit.system.dual is not None
        indices, scores = _greedy(fit, fit.system.dual, n, allowed, memory)
    left = torch.ones(fit.n, dtype=torch.bool, device=indices.device)
    left[indices] = False
    rest = left.nonzero()[:, 0]
    small = fit.forget(rest)
    distance = (small.predict(fit.x) - fit.predict(fit.x)).double().square().sum(1).mean()
    return Summary(indices, rest, scores, float(distance), small)


def _greedy(
    fit: LinearFit, dual: DualSystem, n: int, allowed: Tensor, memory: str | int | None
) -> tuple[Tensor, Tensor]:
    """Forward selection, and the distance after each choice."""
    size = dual.n * dual.c
    budget = parse_bytes(memory, dual.kernel.device)
    plan = Plan(f"greedy summary of {dual.n} examples", budget, (("covariance", 3 * 8 * size * size),))
    require(plan, ['pass method="informative"', "raise memory="])
    covariance = dual.kernel.clone()
    blocks = covariance.view(dual.n, dual.c, dual.n, dual.c)
    error = dual.residual.clone()  # t − f_S
    gap = dual.residual - dual.ridge * dual.beta  # f − f_S
    eye = dual.ridge * torch.eye(dual.c, dtype=covariance.dtype, device=covariance.device)
    open_ = torch.zeros(dual.n, dtype=torch.bool, device=covariance.device)
    open_[allowed] = True
    chosen, distances = [], []
    for _ in track(range(n), "summary", n):
        own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1) + eye
        weights = torch.linalg.solve(own, error)  # (C_jj + ρI)⁻¹ e_j
        # what adding j does to every output, (N·C, N): ‖gap − u_j‖² = ‖gap‖² − 2 gap·u_j + ‖u_j‖²
        moves = torch.einsum("ajd,jd->aj", covariance.view(size, dual.n, dual.c), weights)
        distance = gap.square().sum() - 2 * gap.reshape(-1) @ moves + moves.square().sum(0)
        distance[~open_] = float("inf")
        j = int(distance.argmin())
        open_[j] = False
        chosen.append(j)
        distances.append(float(distance[j]) / dual.n)
        step = moves[:, j].view(dual.n, dual.c)
        error, gap = error - step, gap - step
        column = covariance[:, j * dual.c : (j + 1) * dual.c].clone()
        covariance -= column @ torch.linalg.solve(own[j], column.T)
    return torch.tensor(chosen, device=covariance.device), torch.tensor(distances, dtype=torch.float64)


def _checked(fit: LinearFit, n: Any, method: Any, x: Inputs | None, candidates: Any) -> Tensor:
    """The positions to choose from, after checking everything."""
    if method not in METHODS:
        expected = ", ".join(f'"{name}"' for name in METHODS)
        raise InputError(f"method={method!r}", expected=expected, remedy="leave method= out")
    if method == "greedy" and (fit.system.dual is None or x is not None):
        what = f"a fit of {fit.n * fit.system.c} equations" if x is None else "x="
        raise InputError(
            f'method="greedy" with {what}',
            expected="a kernel that fits the memory, and the training examples as those that count",
            remedy='pass method="informative"',
        )
    index = torch.arange(fit.n) if candidates is None else named_tensor(candidates, "candidates").flatten()
    broken = index.dtype == torch.bool or index.is_floating_point() or index.is_complex()
    if broken or len(index.unique()) != len(index):
        raise InputError(
            f"candidates of type {index.dtype}",
            expected="distinct integer positions in the training data",
            remedy="leave candidates= out for all",
        )
    if len(index) and not bool(((index >= 0) & (index < fit.n)).all()):
        raise InputError(
            f"candidates={candidates}",
            expected=f"positions 0 to {fit.n - 1} in the training data",
            remedy="leave candidates= out for all",
        )
    most = min(len(index), fit.n - 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
        raise InputError(
            f"n={n!r}",
            expected=f"an integer from 1 to {most}",
            remedy="pass fewer examples than there are",
        )
    return index.to(fit.module.function.device)
