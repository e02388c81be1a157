"""Representation of captured batches (gradients or factors) within a memory budget.

Features that do not fit are captured again for every block that stays in memory. For each parameter
either its gradients or its factors are smaller; each change to the smaller form saves memory for some
more multiplications. The changes that save most for each of them come first, and as many are made as
minimize

    multiplications of the products + captured examples · multiplications of one capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from linnet.tangent.features import Features, Outline, Treatment

CANDIDATES = 32  # treatments that are weighed at most: each takes a moment on a network of many layers


@dataclass(frozen=True)
class Fit:
    """The fit of a treatment into the memory."""

    peak: int  # bytes
    captured: int  # examples that are differentiated, each as often as it is


def treatment_within(
    found: Outline, budget: int, fit: Callable[[Features], Fit], least: int, symmetric: bool
) -> Treatment:
    """The treatment with the fewest multiplications under a budget."""
    cheapest = found.treatment(found.cheapest)
    own = fit(found.features(cheapest))
    if own.captured <= least and own.peak <= budget:
        return cheapest
    best, treatment = _order(own, _work(found, found.cheapest, own, symmetric), budget), cheapest
    for factored in _candidates(found):
        other = found.treatment(factored)
        seen = fit(found.features(other))
        order = _order(seen, _work(found, factored, seen, symmetric), budget)
        if order < best:
            best, treatment = order, other
    return treatment


def _order(fit: Fit, work: float, budget: int) -> tuple[int, float]:
    """The order of treatments: bytes over the budget, then the work."""
    return max(0, fit.peak - budget), work


def _work(found: Outline, factored: frozenset[str], fit: Fit, symmetric: bool) -> float:
    """Multiplications of products and captures; parameters without factors are the same in all treatments."""
    products = forming = 0.0
    for name, choice in found.choices.items():
        costs = choice.costs
        products += costs.contracted if name in factored else costs.formed
        forming += 0.0 if name in factored else costs.form
    return products * (0.5 if symmetric else 1.0) + fit.captured * (found.pass_cost + forming)


def _candidates(found: Outline) -> Iterator[frozenset[str]]:
    """The cheapest parameters to factor, with more and more of the parameters in their smaller form."""
    item = found.hollow.rows.dtype.itemsize
    changes = []
    for name, choice in found.choices.items():
        gradients = found.hollow.n * found.hollow.k * found.widths[name] * item
        saved = (gradients - choice.layer.nbytes) * (-1 if choice.pays else 1)
        if saved > 0:
            price = abs(choice.costs.contracted - choice.costs.formed)
            changes.append((price / saved, name))
    changes.sort()
    factored = set(found.cheapest)
    every = -(-len(changes) // CANDIDATES) if changes else 1
    for i, (_, name) in enumerate(changes, start=1):
        factored ^= {name}
        if i % every == 0 or i == len(changes):
            yield frozenset(factored)
