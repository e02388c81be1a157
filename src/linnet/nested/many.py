"""Fits of many samples, in the weights of features: those of earlier layers along some of the samples."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from linnet.errors import NumericalError
from linnet.linear.dual import log_target_noise
from linnet.linear.features import Examples
from linnet.linear.normal_system import NormalSystem, evidence_and_noise, summed
from linnet.linear.targets import Targets
from linnet.memory import Plan, parse_bytes, require
from linnet.nested.features import (
    TOGETHER,
    Prior,
    RandomHeads,
    kernels_of,
    problem_of,
    read_given,
    reads_earlier,
)
from linnet.nested.landmarks import LANDMARKS, Landmarks
from linnet.nested.search import (
    BIAS,
    JUDGES,
    PER_DECADE,
    PILOT,
    Candidate,
    Choice,
    Kernels,
    Mixture,
    Shares,
    choose,
    counted,
    intercept,
    least_near,
    sampled,
    scale_of_rows,
    scored,
)
from linnet.tangent.batch import Inputs, batch_size, take

Left = tuple[Tensor, Tensor, float, float]  # of the judges e and s, (k, C) and (k,), the evidence, the noise
SHOWN = 64  # landmarks whose outputs show what rounding does


def in_weights(
    features: RandomHeads, x: Inputs, targets: Targets, memory: str | int | None, given: Shares
) -> tuple[Prior, Choice, Kernels, NormalSystem, dict[str, float]]:
    """In the weights of the features: those of earlier layers along some of the samples."""
    start, n = time.perf_counter(), batch_size(x)
    order = sampled(n, n).to(targets.values.device)
    reads = reads_earlier(given) and bool(features.earlier(take(x, order[:PILOT])))
    some = order[: LANDMARKS if reads else PILOT]
    found = read_given(features, take(x, some), given)
    kernels = kernels_of(found[:PILOT], features.width)
    choice = choose(kernels, targets.taken(some[:PILOT]), given)
    choice = choice if choice.by_hand else replace(choice, pilot=min(PILOT, n))
    earlier = choice.taken.earlier
    width = features.width * (earlier < 1) + len(some) * (earlier > 0)
    items = (
        ("features of the samples", 8 * n * width),
        ("their products", 4 * 8 * width**2),
        ("features of earlier layers", 2 * 8 * len(some) * found.shape[1]),
    )
    plan = Plan(f"{n:,} samples and {width:,} features", parse_bytes(memory, found.device), items)
    require(plan, ["adapt with earlier=0, the linear probe", "adapt to fewer samples", "raise memory="])
    prior, rows = prior_of_many(features, x, found, earlier)
    seconds = {"kernel": time.perf_counter() - start}
    start = time.perf_counter()
    # a landmark has an error that is a little less than that of others
    judges = order[LANDMARKS:] if prior.landmarks is not None else order
    judges = judges[counted(targets)[judges]][:JUDGES]
    taken, system = _least(prior, (x, rows), targets, choice, given, judges, memory)
    prior = replace(prior, mixture=replace(prior.mixture, bias=intercept(targets, taken.ridge)))
    system = _with_intercept(system, prior, targets)
    seconds["solve"] = time.perf_counter() - start
    return prior, replace(choice, taken=taken), kernels, system, seconds


def _least(
    prior: Prior,
    data: tuple[Inputs, Tensor],
    targets: Targets,
    choice: Choice,
    given: Shares,
    judges: Tensor,
    memory: str | int | None,
) -> tuple[Candidate, NormalSystem]:
    """The ridge of least error on samples left out, and the solution there, of values about their mean."""
    values, labels = targets.values.double(), targets.taken(judges).labels
    if targets.classes is None:
        w = targets.every_weight[:, None].to(values)
        values = values - (w * values).sum(0) / w.sum()
    problem = problem_of(prior, data, replace(targets, values=values))
    system = NormalSystem(problem, summed(problem, memory), choice.taken.ridge, memory)
    rows = problem.basis.root(Examples(judges, (None, data[1][judges])))
    if problem.weights is not None:
        rows = rows * problem.weights[judges, :1]
    known = problem.residual[judges]
    left: dict[float, Left] = {}

    def at(ridge: float) -> Candidate:
        moved = system.at(ridge)
        half = torch.linalg.solve_triangular(moved.factor, rows.T, upper=False)
        rest = 1 - half.square().sum(0)
        residuals = (known - rows @ moved.solution) / rest[:, None]
        left[ridge] = residuals, 1 / rest, *evidence_and_noise(moved)
        return scored(known, residuals, labels, (0.0, choice.taken.earlier), ridge)

    if given.ridge is not None:
        taken = at(given.ridge)
    else:
        found = least_near(choice.taken, at) if len(judges) else choice.taken
        if found is None:
            raise NumericalError(
                "the products of the features are rounding alone",
                expected="a network whose outputs change with its inputs",
                remedy="look whether signals vanish in it, or scale inputs as for its training",
            )
        taken = found
    if targets.classes is None and given.ridge is None:
        middle = round(PER_DECADE * math.log10(taken.ridge))
        for step in range(middle - PER_DECADE, middle + PER_DECADE + 1):
            with suppress(NumericalError):
                ridge = 10 ** (step / PER_DECADE)
                _ = ridge in left or at(ridge)
        taken = replace(taken, noise_factor=_noise_factor(left, taken.ridge, problem.count))
    return taken, system.at(taken.ridge)


def _noise_factor(left: dict[float, Left], ridge: float, count: int) -> float:
    """By what the noise of values is raised since the ridge was chosen, by what is left at several ridges."""
    every = [left[one] for one in sorted(left)]
    evidence, noise = torch.tensor([one[2:] for one in every], dtype=torch.float64).T
    if not bool((noise > 0).all()) or not len(every[0][1]):
        return 1.0
    residuals, spread = torch.stack([one[0] for one in every]), torch.stack([one[1] for one in every])
    asked = log_target_noise((evidence.to(spread), noise.to(spread)), count, residuals, spread)
    place = sorted(left).index(ridge)
    return float(asked[place].mean().exp()) / float(noise[place])


def _with_intercept(system: NormalSystem, prior: Prior, targets: Targets) -> NormalSystem:
    """The same features with another prior variance of the intercept, fitted to the values as they are."""
    problem = replace(system.problem, features=prior.features)
    if (factor := (prior.mixture.bias / BIAS) ** 0.5) != 1:
        normal, right = system.normal.clone(), system.right.clone()
        normal[0] *= factor
        normal[:, 0] *= factor
        right[0] *= factor
        system = NormalSystem(problem, (normal, right), system.ridge, system.memory)
    if targets.classes is not None:
        return system
    return system.with_residual(problem.scaled(targets.values.double()))


def prior_of_many(
    features: RandomHeads, x: Inputs, found: Tensor, earlier: float, bias: float = BIAS
) -> tuple[Prior, Tensor]:
    """The prior of many samples at a share of earlier layers, and their rows (N, D + M)."""
    # found (M, D + E): φ and ψ of the landmarks
    center = torch.zeros_like(found[0, : features.width])
    landmarks = Landmarks.of(found[:, features.width :]) if earlier else None
    plain = Mixture(0.0, earlier, 1 - earlier or 1.0, earlier or 1.0, 1.0, bias)
    prior = Prior(features, center, plain, landmarks)
    rows = prior.in_blocks(x)
    head, early = rows.tensor_split([prior.width], 1)
    if prior.width:
        prior = replace(prior, center=head.mean(0))
        head -= prior.center
    of_head, of_early = (scale_of_rows(part) if part.shape[1] else 1.0 for part in (head, early))
    prior = replace(prior, mixture=replace(plain, head=of_head, early=of_early))
    head *= prior.scale
    early *= prior.share**0.5
    return prior, rows


def errors_in_weights(prior: Prior, rows: Tensor, solution: Tensor) -> Tensor:
    """Mean square errors of outputs in units of ε, by features of the sample and of all others, (C,)."""
    # rows (N, D + M), solution (D + M, C)
    head, early = solution.tensor_split([prior.width])
    error = solution.new_zeros(solution.shape[1])
    if prior.width:
        parts = rows[:, : prior.width].split(TOGETHER)
        squares = sum((part + prior.center * prior.scale).square().sum(0) for part in parts) / len(rows)
        error = error + squares @ head.square()
    if (landmarks := prior.landmarks) is not None:
        each = prior.share**0.5 * (landmarks.root @ early)
        most = int(each.square().sum(0).argmax())
        few = landmarks.psi[:SHOWN]
        # by the derivatives of f in ψ, with κ'(t) = 1 − arccos(t)/π, of the output with the largest weights
        slope = (1 - (few @ landmarks.psi.T).clamp(-1, 1).acos() / math.pi) * each[:, most]
        error[most] += (few * (slope @ landmarks.psi)).square().sum(1).mean()
    return 2 * error
