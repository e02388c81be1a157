"""Which examples to label next, and which of the labeled ones say what all say.

Active learning takes, one after the other, the examples whose labels say most about those of all others.

In units where a new label has noise ρ (that is, covariances times ρ/σ²), with V the posterior covariance
and S_j = V_jj + ρI, a label of example j takes V_aj S_j⁻¹ V_ja off the covariance of every a, whatever the
label will be. So the posterior after a whole batch is known before any of its labels is. What a label does to
the outputs depends on it, and is known as well before it is asked for: a label with targets t_c moves f_a by
V_aj S_j⁻¹ (t_c − f_j), and the share of wrong answers that it would leave is a mean over the likely ones.

A summary takes the examples whose removal changes predictions most (F-SI). Examples that say the same are
then chosen together; the greedy coreset avoids that, by adding, one after the other, the example whose
addition brings the fit on the chosen ones nearest to the fit on all. With C_S = K − K_XS M_S K_SX the
posterior covariance of all outputs given S (over σ²/ρ), and e = t − f_S,

    f_{S+j} − f_S = C_S[:, j] (C_S[j, j] + ρI)⁻¹ e_j

for every candidate j at once, and C_{S+j} = C_S − C_S[:, j] (C_S[j, j] + ρI)⁻¹ C_S[j, :].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.audit.predictors import check_fit, check_squared
from linnet.errors import InputError
from linnet.fitting.arguments import checked_inputs
from linnet.fitting.linear_fit import LinearFit, SquaredFit
from linnet.fitting.solved_fit import unweighed
from linnet.linalg.factorize import cholesky
from linnet.linear.dual import DualSystem
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, integer
from linnet.predictive.noise import confidence
from linnet.progress import track
from linnet.shown import Record
from linnet.tangent.batch import Inputs, all_but, batch_size, hash_examples, take
from linnet.tangent.modes import in_exact_mode

CRITERIA = ("predictive-information", "variance", "expected-error", "information", "uncertainty")
OF_TARGETS = CRITERIA[:3]  # criteria that depend on other examples
WHOLE = 0.1  # share of the memory budget up to which the covariance of a pool is formed at once
CHUNK = 1 << 22  # numbers formed at once by a score
CACHED = 1 << 16  # the same where each is used a few times and forgotten
LIKELY = 0.9  # labels of an example that are looked at are those that hold so much of its probability


@dataclass(frozen=True, repr=False)
class Selection(Record):
    """The examples to label next.

    Args:
        indices: Positions in the pool, best first, (n,).
        scores: What each was worth when it was chosen, (n,): variance (mean over the examples that count
            of the trace of their covariance) for ``"variance"`` and ``"uncertainty"``, the share of wrong
            answers avoided for ``"expected-error"``, nats otherwise.
        variance: The mean total variance of the examples that count, before and after each choice, (n + 1,).
        criterion: How they were chosen.
    """

    indices: Tensor
    scores: Tensor
    variance: Tensor
    criterion: str


@in_exact_mode
def select(
    fit: SquaredFit,
    pool: Inputs,
    n: int,
    criterion: str = "predictive-information",
    *,
    at: Inputs | None = None,
) -> Selection:
    """Choose the n examples of a pool whose labels would be most informative; their labels are not needed.

    Args:
        fit: The fit so far, of ``linnet.adapt`` or of ``linnet.fit`` with squared loss.
        pool: T unlabeled examples.
        n: How many to choose.
        criterion: ``"predictive-information"``: most information, in nats, about the label of an example of
            ``at`` (Bickford Smith et al. 2023); ``"variance"``: largest fall of the mean total variance over
            ``at`` (Cohn et al. 1996), which is faster where outputs share their weights;
            ``"expected-error"``: fewest wrong answers on ``at``, of classes, a mean over the likeliest labels
            of each example, those with 0.9 of its probability (Roy and McCallum 2001; without a refit here),
            in time that grows with the examples of the pool, of ``at`` and their classes multiplied;
            ``"information"``: most information about the weights (MacKay 1992; Houlsby et al. 2011);
            ``"uncertainty"``: largest variance of its own, which is the same choice for ``linnet.adapt``.
            The first three were ahead of random choices, the others not (docs/results/selection.md).
        at: Examples whose predictions count; by default those of the pool.

    Returns:
        The choice.

    Raises:
        DataError: If the pool is empty or not finite.
        InputError: If n exceeds the pool, or the pool holds training examples, or the criterion is unknown
            or needs classes.
        MemoryBudgetError: If the covariances do not fit the fit's budget.

    Source:
        MacKay, "Information-based objective functions for active data selection", 1992; Cohn, Ghahramani,
        Jordan, "Active learning with statistical models", 1996; Bickford Smith et al., "Prediction-oriented
        Bayesian active learning", AISTATS 2023; Roy and McCallum, "Toward optimal active learning through
        sampling estimation of error reduction", ICML 2001.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.randn(20, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x[:5], x[:5, :1]))
        >>> select(fit, x[5:], 3).indices.shape
        torch.Size([3])
    """
    fit = check_squared(fit)
    choice("criterion", criterion, CRITERIA, 'leave criterion= out for "predictive-information"')
    if criterion == "expected-error" and fit.labels is None:
        remedy = 'pass criterion="variance", which is the expected squared error'
        raise InputError('criterion="expected-error" of a fit of values', "a fit of classes", remedy)
    pool = checked_inputs(fit.module, pool, "pool")
    size = batch_size(pool)
    n = integer("n", n, 1, size, f"pass at most {size}, the size of the pool")
    _check_pool(fit, pool)
    counted = None if at is None else checked_inputs(fit.module, at, "at")
    state = _Covariances(fit, pool, counted, criterion)
    unit = fit.noise / fit.ridge if criterion in ("variance", "uncertainty") else 1.0
    taken = torch.zeros(size, dtype=torch.bool, device=state.own.device)
    indices, scores, variance = [], [], [state.variance()]
    for _ in range(n):
        now = state.scores()
        best = int(now.masked_fill(taken, -torch.inf).argmax())
        indices.append(best)
        scores.append(float(now[best]) * unit)
        taken[best] = True
        state.observe(best)
        variance.append(state.variance())
    scale = fit.noise / fit.ridge
    return Selection(
        torch.tensor(indices, dtype=torch.long),
        torch.tensor(scores, dtype=torch.float64),
        scale * torch.tensor(variance, dtype=torch.float64),
        criterion,
    )


class _Covariances:
    """Covariances of a pool, of the examples that count, and between them, given the choices so far.

    Where one kernel serves all outputs they are those of one output, which every output has.
    """

    def __init__(self, fit: SquaredFit, pool: Inputs, at: Inputs | None, criterion: str) -> None:
        self.fit, self.pool, self.criterion = fit, pool, criterion
        self.n, self.c, self.ridge = batch_size(pool), outputs_apart(fit), fit.ridge
        self.copies = fit.system.c // self.c
        wide = self.n * self.c
        budget = parse_bytes(fit.memory, fit.module.function.device)
        needed = criterion in OF_TARGETS and at is None
        whole = needed or 8 * wide * wide <= WHOLE * budget
        # V between all of the pool, kept up to date; None where its columns are formed when needed
        self.joint = joint_covariance(fit, pool) if whole else None
        self.own = self._blocks(self.joint) if self.joint is not None else own_covariances(fit, pool)
        self.seen: list[Tensor] = []  # what each choice took off: V −= U Uᵀ
        self.between: Tensor | None = None
        self.targets: Tensor | None = None
        if at is not None:
            self.between = joint_covariance(fit, at, pool)
            self.targets = own_covariances(fit, at)
        if criterion == "expected-error":
            # what they are expected to stay at, whatever is chosen
            self.outputs = fit.predict(pool).to(self.own)
            self.counted = self.outputs if at is None else fit.predict(at).to(self.own)

    def _blocks(self, joint: Tensor) -> Tensor:
        """V_jj, (T, C, C)."""
        view = joint.view(self.n, self.c, self.n, self.c)
        return view.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()

    def _column(self, j: int) -> Tensor:
        """V_·j, (T·C, C)."""
        rows = slice(j * self.c, (j + 1) * self.c)
        if self.joint is not None:
            return self.joint[:, rows].clone()
        index = torch.tensor([j], device=self.own.device)
        column = joint_covariance(self.fit, self.pool, take(self.pool, index))
        for u in self.seen:
            column = column - u @ u[rows].T
        return column

    def _noisy(self, blocks: Tensor) -> Tensor:
        """S = V + ρI."""
        return blocks + self.ridge * torch.eye(self.c, dtype=blocks.dtype, device=blocks.device)

    def observe(self, j: int) -> None:
        """Take in a label of example j, whatever it is."""
        rows = slice(j * self.c, (j + 1) * self.c)
        factor = cholesky(self._noisy(self.own[j]), "covariance of a candidate")
        # U = V_·j L⁻ᵀ with LLᵀ = S_j
        u = torch.linalg.solve_triangular(factor, self._column(j).T, upper=False).T
        if self.between is not None and self.targets is not None:
            w = torch.linalg.solve_triangular(factor, self.between[:, rows].T, upper=False).T
            self.between -= w @ u.T
            part = w.view(-1, self.c, self.c)
            self.targets = self.targets - part @ part.mT
        if self.joint is not None:
            self.joint -= u @ u.T
        else:
            self.seen.append(u)
        part = u.view(self.n, self.c, self.c)
        self.own = self.own - part @ part.mT

    def variance(self) -> float:
        """Mean trace of the covariances that count."""
        blocks = self.own if self.targets is None else self.targets
        return self.copies * float(blocks.diagonal(dim1=1, dim2=2).sum(1).mean())

    def scores(self) -> Tensor:
        """Expected value of labeling each example, (T,)."""
        score: dict[str, Callable[[], Tensor]] = {
            "uncertainty": lambda: self.own.diagonal(dim1=1, dim2=2).sum(1),
            # ½ log det(I + V_jj/ρ)
            "information": lambda: 0.5 * torch.logdet(self._noisy(self.own) / self.ridge),
            "variance": self._fall,
            "predictive-information": self._predictive_information,
            "expected-error": self._fall_of_error,
        }
        copies = 1 if self.criterion == "expected-error" else self.copies
        return copies * score[self.criterion]()

    def _across(self) -> tuple[Tensor, Tensor]:
        """V between the examples that count and the pool, (A·C, T·C), and of the former, (A, C, C)."""
        if self.between is not None and self.targets is not None:
            return self.between, self.targets
        assert self.joint is not None
        return self.joint, self.own

    def _fall(self) -> Tensor:
        """Mean over a of tr V_aj S_j⁻¹ V_ja."""
        across, targets = self._across()
        if self.c == 1:
            return across.square().sum(0) / self._noisy(self.own)[:, 0, 0] / len(targets)
        columns = across.view(-1, self.n, self.c)
        inner = torch.einsum("kjc,kjd->jcd", columns, columns)
        halves = torch.linalg.solve(self._noisy(self.own), inner)
        fall: Tensor = halves.diagonal(dim1=1, dim2=2).sum(1) / len(targets)
        return fall

    def _predictive_information(self) -> Tensor:
        """Mean over a of ½ log det S_a − ½ log det (S_a − V_aj S_j⁻¹ V_ja)."""
        across, targets = self._across()
        noisy = self._noisy(targets)
        count = len(targets)
        if self.c == 1:  # ½ log (1 − V_aj² / S_a S_j)
            share = across.square() / noisy[:, 0] / self._noisy(self.own)[:, 0, 0]
            return -0.5 * torch.log1p(-share).mean(0)
        before = torch.logdet(noisy)
        size = max(1, CHUNK // (count * self.c * self.c))
        found = []
        for start in range(0, self.n, size):
            part = slice(start, min(start + size, self.n))
            columns = across.view(count, self.c, self.n, self.c)[:, :, part].transpose(1, 2)  # (A, t, C, C)
            factor = torch.linalg.cholesky(self._noisy(self.own[part]))
            w = torch.linalg.solve_triangular(factor.expand(count, *factor.shape), columns.mT, upper=False)
            after = torch.logdet(noisy[:, None] - w.mT @ w)
            found.append(0.5 * (before[:, None] - after).mean(0))
        return torch.cat(found)

    def _fall_of_error(self) -> Tensor:
        """Mean over a, and over the likely labels of example j, of max p_a after it less that before."""
        across, _ = self._across()
        count, classes = self.counted.shape
        temperature, seen = self.fit.point_temperature, self.fit._possible
        assert temperature is not None
        targets = self.fit._targets.scale * torch.eye(classes, dtype=across.dtype, device=across.device)
        p, order = self.fit._class_probs(self.outputs).sort(1, descending=True)
        ranks = p.cumsum(1) - p < LIKELY
        size = max(1, CACHED // (count * classes))
        found = torch.zeros_like(p[:, 0])
        for rank in range(int(ranks.sum(1).max())):
            for some in ranks[:, rank].nonzero()[:, 0].split(size):
                gap = targets[order[some, rank]] - self.outputs[some]
                columns = across.view(count, self.c, self.n, self.c)[:, :, some].transpose(1, 2)
                # S_j⁻¹ (t_c − f_j), (t, C); where one kernel serves all outputs, S_j is a number
                step = torch.linalg.solve(self._noisy(self.own[some]), gap.unflatten(1, (self.c, -1)))
                moved = columns * step if self.c == 1 else columns @ step
                after = self.counted[:, None] + moved.flatten(2)
                sure = confidence(after.flatten(0, 1), temperature, seen).view(count, -1).mean(0)
                found[some] += p[some, rank] * sure
        return found / (p * ranks).sum(1) - confidence(self.counted, temperature, seen).mean()


def _check_pool(fit: SquaredFit, pool: Inputs) -> None:
    """Raise if a pool holds what is labeled already."""
    known = set(hash_examples(fit.x))
    again = [i for i, name in enumerate(hash_examples(pool)) if name in known]
    if again:
        raise InputError(
            f"pool holds {len(again)} training example(s), first at index {again[0]}",
            expected="examples that the fit has not seen: their labels are known already",
            remedy="drop them from the pool",
        )


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
    memory: str | int | None = None,
) -> Summary:
    """Choose n training examples that represent the whole training set.

    Args:
        fit: A linear fit.
        n: Number of examples, 1 to N − 1.
        method: ``"greedy"``, the coreset whose fit is nearest to the full one, chosen one at a time (dual
            fits); ``"informative"``, the n examples of highest functional information.
        x: Examples whose predictions count in ``"informative"``; by default the training examples.
        memory: Budget; by default half of what is available.

    Returns:
        The summary, with its fit.

    Raises:
        InputError: If n or the method is out of range or does not go with the fit.
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
    unweighed(fit, "summarize")
    choice("method", method, METHODS)
    n = integer("n", n, 1, fit.n - 1, "pass fewer examples than there are")
    if method == "informative":
        scores = fit.informativeness(x)
        indices = scores.argsort(descending=True, stable=True)[:n]
    elif fit.system.dual is None or x is not None:
        what = f"a fit of {fit.n * fit.system.c} equations" if x is None else "x="
        raise InputError(
            f'method="greedy" with {what}',
            expected="a kernel that fits the memory, and the training examples as those that count",
            remedy='pass method="informative"',
        )
    else:
        indices, scores = _greedy(fit.system.dual, n, memory)
    rest = all_but(fit.n, indices).nonzero()[:, 0]
    small = fit.forget(rest)
    distance = (small.predict(fit.x) - fit.predict(fit.x)).double().square().sum(1).mean()
    return Summary(indices, rest, scores, float(distance), small)


def _greedy(dual: DualSystem, n: int, memory: str | int | None) -> tuple[Tensor, Tensor]:
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
    chosen: list[int] = []
    distances = []
    for _ in track(range(n), "summary", n):
        own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1) + eye
        weights = torch.linalg.solve(own, error)  # (C_jj + ρI)⁻¹ e_j
        # what adding j does to every output, (N·C, N): ‖gap − u_j‖² = ‖gap‖² − 2 gap·u_j + ‖u_j‖²
        moves = torch.einsum("ajd,jd->aj", covariance.view(size, dual.n, dual.c), weights)
        distance = gap.square().sum() - 2 * gap.reshape(-1) @ moves + moves.square().sum(0)
        distance[chosen] = float("inf")
        j = int(distance.argmin())
        chosen.append(j)
        distances.append(float(distance[j]) / dual.n)
        step = moves[:, j].view(dual.n, dual.c)
        error, gap = error - step, gap - step
        column = covariance[:, j * dual.c : (j + 1) * dual.c].clone()
        covariance -= column @ torch.linalg.solve(own[j], column.T)
    return torch.tensor(chosen, device=covariance.device), torch.tensor(distances, dtype=torch.float64)


def outputs_apart(fit: SquaredFit) -> int:
    """The outputs whose covariances differ: one where all have the same kernel and weights of their own."""
    return 1 if fit.system.problem.basis.shared else fit.system.c


def joint_covariance(fit: SquaredFit, x1: Inputs, x2: Inputs | None = None) -> Tensor:
    """Cov[f(x1), f(x2)] · ρ/σ²: with noise ρ on a new target, everything else is scale-free, (N·C, M·C)."""
    n, m, c = batch_size(x1), batch_size(x1 if x2 is None else x2), outputs_apart(fit)
    size = 8 * n * m * c * c
    items = [("covariance", size), ("kernel", size)]
    if isinstance(fit.system, KernelSystem):
        items.append(("kernels to the training data", 3 * 8 * (n + m) * c * fit.n * c))
    budget = parse_bytes(fit.memory, fit.module.function.device)
    plan = Plan(f"joint covariance of {n} and {m} examples", budget, tuple(items))
    require(plan, ["use fewer examples in the pool", "name the examples that count with at="])
    system = fit.system
    if isinstance(system, KernelSystem) or (isinstance(system, NormalSystem) and system.shared):
        found = system.covariances(x1, x1 if x2 is None else x2).double()
    elif x2 is None:
        found = fit.system.covariance(x1, joint=True).double()
    else:
        found = fit.system.between(x1, x2)
    found = found.reshape(n * c, m * c)
    return (found + found.T) / 2 if x2 is None else found


def own_covariances(fit: SquaredFit, x: Inputs) -> Tensor:
    """Cov[f(x_i)] · ρ/σ², (T, C, C), float64."""
    c = outputs_apart(fit)
    found = fit.system.covariance(x).double()[:, :c, :c]
    return (found + found.mT) / 2
