"""Leave-one-out search for the shares of the kernels that are added, and the ridge.

    K = κ + (1 − w) ((1 − e) K_head/m_head + e K_early/m_early) + w K_body/m_body

with m the mean of each kernel's diagonal over the training samples, after their mean is taken out. At
w = e = 0 the model is ridge regression on the features with an intercept, the linear probe.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linalg.factorize import read
from linnet.linear.dual import DualSystem, Spectrum
from linnet.linear.targets import Targets
from linnet.progress import track
from linnet.tree import node

WEIGHTS = (0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)  # w
EARLIER = (0.2, 0.5, 0.8, 1.0)  # e
# e of classes, unless another has less leave-one-out error by more than so many of its standard errors: on
# development tasks few samples told less than what holds in general (docs/results/adapt.md)
USUAL, AGAINST = 1.0, 2.0
# κ, the prior variance of the intercept beside a kernel whose diagonal is about 1: the intercept is free to
# 1 part in N·10³, and float64 keeps 12 digits of the rest: at 10⁴ updates in two orders differed by 5·10⁻⁸.
# Classes share what a large ridge then holds back. Of values, whose mean may be far from zero, it is 10⁴, and
# so many times more as the ridge is more than 1 and as their mean is more than their spread, up to STRETCH
# times, else it holds predictions back from the mean; but no more times the ridge than it is at the least.
BIAS, OF_VALUES = 1e3, 1e4
STRETCH = 1e4
SPREAD = 1e-12  # of values, of the largest, that rounding alone leaves
CONSTANT = 100.0  # times the sum of the other eigenvalues, about N: such a ridge leaves the mean of values
PER_DECADE = 4  # ridges
LOW, HIGH = -4, 3  # decades of ridges that are looked through first
LOWEST, HIGHEST = (
    -6,
    6,
)  # and at most: at 10⁻⁶ hardly anything is regularized, at 10⁶ nothing is left of the data
MARGIN = (
    100.0  # ridges are at least so many times the kernel's rounding, which then costs a hundredth at the most
)
# Samples on which the shares are chosen where there are more: an eigendecomposition each. Halves of 1,000
# samples chose weights whose error on all was 0.1 % above the best on average, 0.6 % at most (six sets of
# images, two draws).
PILOT = 1000
# Samples whose leave-one-out errors tell near ridges apart, which have most of their noise in common.
JUDGES = 2000
FAR = 1.0  # ridge of some samples that says little of where that of all is: every decade is tried
ERRORS = 1.0  # standard errors by which derivatives must reduce the leave-one-out error
LOO = "squared error on training samples left out of the fit"
LESS = f"less {LOO}"
SAME = "with about the same accuracy"


class Shares(NamedTuple):
    """What was given of the shares and the ridge; None for what is to be chosen."""

    weight: float | None = None  # w
    earlier: float | None = None  # e
    ridge: float | None = None  # ρ


FREE = Shares()


@node()
@dataclass(frozen=True)
class Mixture:
    """Weights and scales of the added kernels."""

    weight: float  # w of the body, 0 to 1
    earlier: float  # e of the features of earlier layers, 0 to 1
    head: float  # m_head
    early: float  # m_early
    body: float  # m_body
    bias: float = BIAS  # κ


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of some samples, each without its scale."""

    head: Tensor  # K_head, (N, N)
    early: Tensor | None = None  # K_early, (N, N), where earlier layers are read
    body: Tensor | None = None  # K_body, (N, N), where derivatives may take part

    @cached_property
    def scales(self) -> tuple[float, float, float]:
        """m_head, m_early and m_body; 1 of one that is missing."""
        head, early, body = (
            1.0 if one is None else scale_of(one) for one in (self.head, self.early, self.body)
        )
        return head, early, body

    def taken(self, rows: Tensor) -> Kernels:
        """Those of some of the samples."""
        early, body = (None if k is None else k[rows][:, rows] for k in (self.early, self.body))
        return Kernels(self.head[rows][:, rows], early, body)

    def mixed(self, weight: float, earlier: float = 0.0, bias: float = BIAS) -> tuple[Tensor, Mixture]:
        """K at two shares, (N, N), and how it was made."""
        head, early, body = self.scales
        total = bias + (1 - weight) * (1 - earlier) / head * self.head
        if earlier:
            assert self.early is not None
            total += (1 - weight) * earlier / early * self.early
        if weight:
            assert self.body is not None
            total += weight / body * self.body
        return total, Mixture(weight, earlier, head, early, body, bias)


@dataclass(frozen=True, eq=False)
class Candidate:
    """Two shares with their best ridge, or the one that was given."""

    # Leave-one-out says nothing of a class with a single sample, so its samples do not count; where no class
    # has more, the ridge is chosen by evidence.

    weight: float  # w
    earlier: float  # e
    ridge: float  # ρ
    errors: Tensor  # squared leave-one-out error of every sample that counts, summed over outputs, (n,)
    right: Tensor | None  # whether its class is right when it is left out, (n,); ``None`` for regression
    edge: str = ""  # the end of all ridges at which it stands: "", "smallest" or "largest"
    noise_factor: float = 1.0  # by what the noise of values is raised since the ridge was chosen
    # whether its class is right when one sample of every class is left out with it, (n,)
    together: Tensor | None = None

    @property
    def score(self) -> float:
        """Mean leave-one-out error."""
        return float(self.errors.mean())


@dataclass(frozen=True, eq=False)
class Choice:
    """Choice by leave-one-out."""

    taken: Candidate  # the candidate that is used
    probe: Candidate  # the linear probe at its best ridge
    best: Candidate  # what stands against the probe: ``taken``, or the best of all where that is the probe
    given: Shares
    tried: bool  # whether derivatives could take part
    pilot: int = 0  # number of samples on which the shares were chosen, 0 for all

    @property
    def gain(self) -> tuple[float, float]:
        """Share of the probe's leave-one-out error that ``best`` takes away, and its standard error."""
        return gained(self.probe.errors, self.best.errors)

    @property
    def points(self) -> tuple[float, float] | None:
        """Gain of right classes over the probe in percentage points, and its error; ``None`` for values."""
        # Where classes have equally many samples, one that is left out alone makes its own class the rarest,
        # and the smoother of two models pays more for that: here one of every class is left out together.
        if self.best.together is None or self.probe.together is None or len(self.best.together) < 2:
            return None
        return _points(self.probe.together, self.best.together)

    @property
    def by_hand(self) -> bool:
        """Whether the shares were given."""
        return self.given.weight is not None or self.given.earlier is not None

    def reasons(self) -> dict[str, str]:
        """One sentence for each choice."""
        taken = self.taken
        body = "the lower layers take part" if taken.weight or taken.earlier else "the linear probe is kept"
        chosen = f"lowest {LOO}" if len(self.probe.errors) else "highest evidence"
        found = {
            "solver": "one kernel for all outputs",
            "body": "set by the user" if self.by_hand else body,
            "shares": f"{taken.earlier:g} of the features from earlier layers, {taken.weight:g} of the kernel"
            f" from derivatives{'' if self.tried or self.by_hand else ', which were not tried'}",
            "ridge": "set by the user" if self.given.ridge is not None else chosen,
        }
        if self.pilot:
            found["shares"] += f"; of lowest {LOO}, on {self.pilot:,} samples"
        return {**found, "verdict": self.verdict()}

    def verdict(self) -> str:
        """Recommendation in one sentence."""
        if self.by_hand:
            shares = " and ".join(f"{share:g}" for share in self.given[:2] if share is not None)
            return f"The share of the lower layers, {shares}, was given: whether they help was not tested."
        if len(self.probe.errors) < 2:
            return "Kept the linear probe: one sample per class cannot tell whether the lower layers help."
        gain, error = self.gain
        share = f"{100 * abs(gain):.0f} ± {100 * error:.0f} %"
        if not (self.taken.weight or self.taken.earlier):
            less = f"the lower layers would give {share} {LESS}"
            why = f"{less}, but no better accuracy"
            if gain <= 0:
                why = f"with the lower layers the {LOO} is not lower"
            elif gain <= ERRORS * error:
                why = f"{less}, which is not significant"
            return f"Kept the linear probe: {why}."
        if gain <= max(ERRORS * error, 0.005):  # shown as 0 %
            sign = "less" if gain > 0 else "more"
            return (
                "The lower layers take part, as they usually help; these samples cannot tell "
                f"({share} {LESS.replace('less', sign, 1)} than the linear probe)."
            )
        less = f"The lower layers give {share} {LESS} than the linear probe"
        if self.points is None or self.probe.together is None:
            return f"{less}."
        points, spread = self.points
        if points <= spread:
            return f"{less}, {SAME}."
        before = 100 * float(self.probe.together.double().mean())
        return (
            f"The lower layers add {points:.1f} ± {spread:.1f} points to the linear probe's {before:.1f} % "
            f"on training samples left out of the fit ({share} less squared error)."
        )

    def warnings(self) -> tuple[str, ...]:
        """Warnings about the choice."""
        if self.taken.edge == "smallest":
            return ("leave-one-out prefers no regularization at all: the training data look free of noise",)
        if self.taken.edge == "largest":
            return ("leave-one-out prefers a constant prediction: these features say nothing of the targets",)
        return ()


def gained(before: Tensor, now: Tensor) -> tuple[float, float]:
    """Share of the errors (n,) of one model that another takes away, and its standard error."""
    gains = (before - now) / max(float(before.mean()), 1e-300) if len(before) > 1 else before.new_zeros(2)
    return float(gains.mean()), float(gains.std()) / len(gains) ** 0.5


def _points(before: Tensor, now: Tensor) -> tuple[float, float]:
    """Gain of right classes (n,) in percentage points, and its standard error."""
    points = 100 * (now.double() - before.double())
    return float(points.mean()), float(points.std()) / len(points) ** 0.5


def choose(kernels: Kernels, targets: Targets, given: Shares = FREE) -> Choice:
    """Choose the shares of the kernels and the ridge."""
    by_hand = given.weight is not None or given.earlier is not None
    judged, own, pilot = kernels, targets, 0
    if not by_hand and len(kernels.head) > PILOT:
        pilot = PILOT
        rows = sampled(len(kernels.head), pilot).to(kernels.head.device)
        judged = kernels.taken(rows)
        own = targets.taken(rows)
    search = _Search(judged, own, given)
    probe = search.at(0.0, 0.0)
    if by_hand:
        taken = search.at(given.weight or 0.0, given.earlier or 0.0)
        best = taken
    else:
        taken, best = search.chosen(probe)
    shares = taken.weight, taken.earlier
    final = taken
    if pilot:
        # values need every ridge for their noise, and classes of one sample each the evidence
        whole = given.ridge is not None or targets.classes is None or taken.edge == "smallest"
        whole |= not bool(counted(targets).any())
        every = kernels.mixed(*shares)[0]
        if whole:
            final = best_ridge(every, targets, shares, given.ridge)
        else:
            final = near_ridge(every, targets, taken)
    if targets.labels is not None and best is not probe:
        probe, best = (replace(one, together=search.right_together(one)) for one in (probe, best))
    return Choice(final, probe, best, given, kernels.body is not None, pilot)


def intercept(targets: Targets, ridge: float = 1.0) -> float:
    """κ, which leaves the intercept as free at a ridge as rounding allows."""
    if targets.classes is not None:
        return BIAS
    free = OF_VALUES * max(1.0, ridge) * min(max(1.0, remoteness(targets)), STRETCH)
    return max(OF_VALUES, min(free, ridge * OF_VALUES / 10.0**LOWEST))


def remoteness(targets: Targets) -> float:
    """How many times their spread the mean of values is, at the most; infinite where none varies."""
    values, w = targets.values.double(), targets.every_weight[:, None] / targets.every_weight.sum()
    mean = (w * values).sum(0)
    spread = (w * (values - mean).square()).sum(0).sqrt()
    varies = spread > SPREAD * mean.abs()
    return float((mean.abs() / spread)[varies].amax()) if bool(varies.any()) else math.inf


def sampled(n: int, count: int) -> Tensor:
    """Positions of so many of n samples, drawn at random, (count,)."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count]


@dataclass(frozen=True, eq=False)
class _Search:
    """Candidates by the kernels of some samples."""

    kernels: Kernels
    targets: Targets
    given: Shares

    def at(self, weight: float, earlier: float) -> Candidate:
        """The candidate of two shares."""
        return best_ridge(
            self.kernels.mixed(weight, earlier)[0], self.targets, (weight, earlier), self.given.ridge
        )

    def right_together(self, one: Candidate) -> Tensor:
        """Whether the class of each sample is right when one sample of every class is left out together."""
        return right_together(self.kernels.mixed(one.weight, one.earlier)[0], self.targets, one.ridge)

    def chosen(self, probe: Candidate) -> tuple[Candidate, Candidate]:
        """The candidate that is taken, and what stands against the probe."""
        if not counted(self.targets).any():  # nothing can tell whether the lower layers help
            return probe, probe
        every, taken = [probe], probe
        if self.kernels.early is not None:
            every += [self.at(0.0, share) for share in track(EARLIER, self._label("features"))]
            taken = self._preferred(every)
        if self.kernels.body is not None:
            moved = []
            for weight in track(WEIGHTS, self._label("derivatives")):
                # the kernel of the lower layers, or so much of it, is rounding; the others may not be
                with contextlib.suppress(NumericalError):
                    moved.append(self.at(weight, taken.earlier))
            every += moved
            best = min(moved, key=lambda one: one.score, default=taken)
            taken = best if helps(taken, best) else taken
        return taken, taken if taken is not probe else min(every, key=lambda one: one.score)

    def _label(self, what: str) -> str:
        """What is looked through, for a meter."""
        return f"shares of the lower layers' {what}, {len(self.targets.values)} samples"

    def _preferred(self, every: list[Candidate]) -> Candidate:
        """The share of features of earlier layers; the probe is the first of all, ``USUAL`` the last."""
        probe, usual = every[0], every[-1]
        best = min(every, key=lambda one: one.score)
        if self.targets.labels is None:
            return best if helps(probe, best) else probe
        gain, error = gained(usual.errors, best.errors)
        return best if gain > AGAINST * error else usual


def helps(before: Candidate, now: Candidate) -> bool:
    """Whether there is less error beyond its error, and more right classes."""
    # Squared error alone falls also where outputs merely move toward 0 and 1; on development tasks the
    # probe was then ahead in 2 of 48 rows, and with both in none.
    gain, error = gained(before.errors, now.errors)
    right = before.right is None or now.right is None or int(now.right.sum()) > int(before.right.sum())
    return gain > ERRORS * error and right


def right_together(kernel: Tensor, targets: Targets, ridge: float) -> Tensor:
    """Whether the class of each sample is right when one sample of every class is left out together."""
    # kernel (N, N)
    labels, counting = targets.values.argmax(1), counted(targets)
    kernel, values = _weighed(kernel, targets)
    system = DualSystem(kernel, values, ridge)
    known = torch.nn.functional.one_hot(labels, targets.values.shape[1])
    turn = (known.cumsum(0) * known).sum(1)  # the how many-th of its class each sample is
    residuals = torch.zeros_like(system.beta)
    for place in range(1, int((turn * counting).max()) + 1):
        out = ((turn == place) & counting).nonzero()[:, 0]
        # residuals of samples S without S: (M_SS)⁻¹ β_S
        residuals[out] = torch.linalg.solve(system.inverse[out][:, out], system.beta[out])
    return ((values.to(residuals) - residuals).argmax(1) == labels)[counting]


def scale_of(kernel: Tensor) -> float:
    """The mean of a kernel's diagonal after the mean of its features is taken out; 1 for a constant one."""
    # kernel (N, N)
    return _spread(float(kernel.diagonal().mean()), float(kernel.mean()))


def scale_of_rows(rows: Tensor) -> float:
    """The same of the kernel that is the products of some rows."""
    # rows (N, D); as the rows are
    square = float(torch.linalg.vector_norm(rows)) ** 2 / len(rows)
    return _spread(square, float(rows.mean(0).square().sum()))


def _spread(square: float, mean: float) -> float:
    """The mean square of features less that of their mean; 1 of constant ones."""
    return square - mean if square - mean > 1e-12 * abs(square) else 1.0


def best_ridge(
    kernel: Tensor, targets: Targets, shares: tuple[float, float], ridge: float | None = None
) -> Candidate:
    """The ridge of lowest leave-one-out error for one kernel."""
    # kernel (N, N)
    kernel, values = _weighed(kernel, targets)
    spectrum, counting = Spectrum(kernel, values), counted(targets)
    smallest = MARGIN * spectrum.rounding
    if ridge is not None:
        if ridge < smallest:
            raise NumericalError(
                f"ridge={ridge!r} is below the rounding of the kernel",
                expected=f"{smallest:.1e} or more, times the mean of the kernel's diagonal",
                remedy="leave ridge= out to have it chosen, or pass the network in float64: model.double()",
            )
        return _candidate(spectrum, targets, shares, ridge)
    lowest = max(LOWEST * PER_DECADE, math.ceil(PER_DECADE * math.log10(max(smallest, 1e-300))))
    if lowest > HIGHEST * PER_DECADE:
        raise NumericalError(
            f"the kernel of the {'features' if shares[0] == 0 else 'lower layers'} is rounding alone",
            expected="a network whose outputs change with its inputs",
            remedy="look whether signals vanish in it, or scale inputs as for its training; model.double() "
            "keeps more digits",
        )
    low, errors = max(LOW * PER_DECADE, lowest), dict[int, float]()
    highest = HIGHEST * PER_DECADE
    if targets.classes is None:
        highest = min(
            highest, math.ceil(PER_DECADE * math.log10(CONSTANT * float(targets.every_weight.sum())))
        )
    highest = max(highest, low)
    high = max(min(HIGH * PER_DECADE, highest), low)
    judged = counting.nonzero()[:, 0]
    while True:
        fresh = [step for step in range(low, high + 1) if step not in errors]
        scores = read(_scores(spectrum, [10 ** (step / PER_DECADE) for step in fresh], judged))
        errors.update(zip(fresh, scores, strict=True))
        best = min(errors, key=errors.__getitem__)
        if best == low and low > lowest:
            low = max(low - PER_DECADE, lowest)
        elif best == high and high < highest:
            high = min(high + PER_DECADE, highest)
        else:
            break
    found = _candidate(spectrum, targets, shares, 10 ** (best / PER_DECADE))
    found = replace(found, edge="smallest" if best == low else "largest" if best == high else "")
    if targets.classes is not None:
        return found
    tried = 10 ** (torch.tensor(sorted(errors), dtype=torch.float64) / PER_DECADE)
    path = spectrum.path(tried, False, values)
    return replace(found, noise_factor=path.noise_factor(found.ridge))


def least_near(known: Candidate, at: Callable[[float], Candidate]) -> Candidate | None:
    """The least leave-one-out error of all ridges, from that of some of the samples on."""
    # The Cholesky factor of one ridge takes a thirtieth of the eigendecomposition that has every ridge; three
    # or four are tried, or a dozen where the known one tells little.
    tried: dict[int, Candidate | None] = {}

    def error(step: int) -> float:
        if not LOWEST * PER_DECADE <= step <= HIGHEST * PER_DECADE:
            return math.inf
        if step not in tried:
            try:
                tried[step] = at(10 ** (step / PER_DECADE))
            except NumericalError:  # below the rounding of the kernel
                tried[step] = None
        one = tried[step]
        return math.inf if one is None else one.score

    starts = [round(PER_DECADE * math.log10(known.ridge))]
    if known.ridge > FAR:
        starts += range(LOW * PER_DECADE, HIGH * PER_DECADE + 1, PER_DECADE)
    best = min(starts, key=error)
    for way in (-1, 1):
        while error(best + way) < error(best):
            best += way
    found = tried[best]
    if found is None or best == HIGHEST * PER_DECADE:
        return found and replace(found, edge="largest")
    return replace(found, edge="smallest" if error(best - 1) == math.inf else "")


def near_ridge(kernel: Tensor, targets: Targets, known: Candidate) -> Candidate:
    """The ridge of lowest leave-one-out error, from that of some of the samples: classes alone."""
    # kernel (N, N). The last block of the inverse needs that of the factor alone, (L_SS L_SSᵀ)⁻¹: so samples
    # drawn at random stand last, and judge.
    (weighed, values), shares = _weighed(kernel, targets), (known.weight, known.earlier)
    order, counting = sampled(len(values), len(values)).to(values.device), counted(targets)
    order = torch.cat([order[~counting[order]], order[counting[order]]])
    judges = order[-min(JUDGES, int(counting.sum())) :]
    weighed, values, labels = weighed[order][:, order], values[order], targets.labels

    def at(ridge: float) -> Candidate:
        system = DualSystem(weighed, values, ridge)
        block = torch.cholesky_inverse(system.factor[-len(judges) :, -len(judges) :])
        residuals = system.beta[-len(judges) :] / block.diagonal()[:, None]
        known = None if labels is None else labels[judges]
        return scored(values[-len(judges) :], residuals, known, shares, ridge)

    found = least_near(known, at)
    return best_ridge(kernel, targets, shares) if found is None else found


def _weighed(kernel: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Kernel and targets in units of the noise, each example's own; values about their mean."""
    # kernel (N, N)
    # The intercept is free: an offset of values is not to be taken for their spread.
    values = targets.values.double()
    if targets.classes is None:
        values = values - (targets.every_weight[:, None] * values).sum(0) / targets.every_weight.sum()
    if targets.weights is None:
        return kernel, values
    w = targets.weights.sqrt()[:, None]
    return kernel * w * w.T, values * w


def counted(targets: Targets) -> Tensor:
    """Which samples leave-one-out can judge: all but those that are the only one of their class, (N,)."""
    labels = targets.labels
    if labels is None:
        return torch.ones(len(targets.values), dtype=torch.bool, device=targets.values.device)
    return labels.bincount()[labels] > 1


def _scores(spectrum: Spectrum, ridges: list[float], judged: Tensor) -> list[Tensor]:
    """Mean leave-one-out errors at some ridges, or evidences, signs turned, where no sample counts."""
    if len(judged):
        return [one[judged].square().sum(1).mean() for one in spectrum.loo_residuals(ridges)]
    return [_lacking(spectrum, ridge) for ridge in ridges]


def _lacking(spectrum: Spectrum, ridge: float) -> Tensor:
    """The evidence of an example with its sign turned, −2/n log N(t; 0, σ²/ρ (K + ρI)), less constants."""
    n = spectrum.residual.numel()
    weights = 1 / (spectrum.values + ridge)
    quadratic = (weights[:, None] * spectrum.coordinates.reshape(len(weights), -1).square()).sum()
    return (quadratic / n).clamp_min(1e-300).log() - weights.log().mean()  # at the best σ²


def _candidate(spectrum: Spectrum, targets: Targets, shares: tuple[float, float], ridge: float) -> Candidate:
    """The scores at one ridge."""
    return _judged(spectrum.residual, next(spectrum.loo_residuals([ridge])), targets, shares, ridge)


def _judged(
    values: Tensor, residuals: Tensor, targets: Targets, shares: tuple[float, float], ridge: float
) -> Candidate:
    """The scores of leave-one-out residuals, (N, C)."""
    counting, labels = counted(targets), targets.labels
    known = None if labels is None else labels[counting]
    return scored(values[counting], residuals[counting], known, shares, ridge)


def scored(
    values: Tensor, residuals: Tensor, labels: Tensor | None, shares: tuple[float, float], ridge: float
) -> Candidate:
    """The scores of leave-one-out residuals (k, C) of samples that count."""
    # in units of the noise, which order outputs alike
    right = None if labels is None else (values - residuals).argmax(1) == labels
    return Candidate(*shares, ridge, residuals.square().sum(1), right)


# -- rungs -----------------------------------------------------------------------------------------
# The stages from a linear probe to a trained network, each with its gain on held-out samples.

_CLEAR = 1.96  # standard errors of a gain that is significant at 5 %


@node()
@dataclass(frozen=True)
class Rung:
    """One model on held-out folds of the training samples."""

    name: str  # what it is
    error: float  # mean squared error of the outputs
    accuracy: float | None = None  # share of right classes, 0 to 1; ``None`` for regression
    gain: float = 0.0  # share of the error of the model before, or the better of those, that it takes away
    gain_error: float = 0.0  # standard error of ``gain``, over samples
    points: float | None = None  # gain of accuracy over that model, in percentage points
    points_error: float | None = None  # its standard error
    taken: bool = False  # whether it is the model that is used
    seconds: float = 0.0  # what it took, on top of the one before; 0 where that is not known apart


def ladder(
    before: Sequence[tuple[str, Tensor]],
    outputs: Tensor,
    targets: Targets,
    seconds: float,
    rows: Tensor | None = None,
) -> tuple[Rung, ...]:
    """Models in order, the trained network last."""
    # before (N, C), outputs (N, C), rows (N,)
    # Of values it is taken where its error is lower by more than a standard error, of classes unless it is
    # higher by as much or fewer are right: on development tasks training helped also where few samples could
    # not tell, and hurt where fewer were right, however much lower the error (docs/results/adapt.md).
    counting = counted(targets) if rows is None else counted(targets) & rows
    truth, labels = targets.values.to(outputs)[counting], targets.labels
    rungs: list[Rung] = []
    errors, right = [], []
    for name, found in [*before, ("trained lower layers", outputs)]:
        errors.append((found[counting] - truth).square().sum(1))
        rung = Rung(name, float(errors[-1].mean()))
        if labels is not None:
            right.append(found[counting].argmax(1) == labels[counting])
            rung = replace(rung, accuracy=float(right[-1].double().mean()))
        if rungs:
            place = rungs.index(_better(rungs)) if len(rungs) == len(before) else len(rungs) - 1
            gain, gain_error = gained(errors[place], errors[-1])
            rung = replace(rung, gain=gain, gain_error=gain_error)
            if labels is not None:
                points, points_error = _points(right[place], right[-1])
                rung = replace(rung, points=points, points_error=points_error)
        rungs.append(rung)
    top = rungs[-1] = replace(rungs[-1], seconds=seconds)
    helps = top.gain > (ERRORS if labels is None else -ERRORS) * top.gain_error
    helps = helps and (top.points is None or top.points >= 0)
    place = len(rungs) - 1 if helps else len(rungs) - 2
    rungs[place] = replace(rungs[place], taken=True)
    return tuple(rungs)


def _better(rungs: Sequence[Rung]) -> Rung:
    """The one with the most right classes, then the least error."""
    return max(rungs, key=lambda rung: (rung.accuracy or 0.0, -rung.error))


def verdict(rungs: Sequence[Rung]) -> str:
    """Recommendation in one sentence."""
    last, kept, base = rungs[-1], rungs[-2], _better(rungs[:-1])
    sign = "more" if last.gain < 0 else "less"
    told = f"{100 * abs(last.gain):.0f} ± {100 * last.gain_error:.0f} % {sign} error on held-out folds"
    is_clear = last.gain > _CLEAR * last.gain_error
    if last.points is not None and last.points_error is not None and base.accuracy is not None:
        sign = "more" if last.points >= 0 else "less"
        told += f" and {abs(last.points):.1f} ± {last.points_error:.1f} points {sign} accuracy"
        told += f" than the {100 * base.accuracy:.1f} % of the {base.name}"
        is_clear = last.points > _CLEAR * last.points_error
    if not last.taken:
        return f"Kept the {kept.name}: training the lower layers gives {told}."
    doubt = "" if is_clear else "; whether that is more than chance cannot be told"
    start = f"Use the {last.name}" if is_clear else "Solved at the trained weights"
    return f"{start}: {told}{doubt}."
