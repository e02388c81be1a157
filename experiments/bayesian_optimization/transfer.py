"""Bayesian optimization of a new task after earlier ones: what a network of those adds.

Sixteen earlier tasks of a family have left 40 random evaluations each. A search of a new task sees two random
evaluations, the same for all ways, and takes the candidate of highest expected improvement (its logarithm;
Ament et al. 2023) until it has made twenty: with BoTorch's process, which knows the new task alone; with a
Matérn process around a network trained on twelve of the earlier tasks, whose hyper-parameters come from the
new task or from the other four; and with the tangent process of that network, whose two hyper-parameters come
from those four. Beside them stand candidates in the order of the network's outputs, and at random. Costs are
exact and all known, so that regret is: the best cost found less the best there is, in % of what the median
candidate has. Sizes and rules were chosen on the development tasks (``--split development``).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from experiments.bayesian_optimization import surrogates
from experiments.bayesian_optimization.surrogates import Earlier, Surrogate
from experiments.bayesian_optimization.tasks import FAMILIES, candidates, costs
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error

EARLIER, POINTS, START = 16, 40, 2
AFTER = (5, 10, 20)
OURS = "tangent process"
WAYS = (
    "random",
    "order of the network",
    "GP",
    "GP around the network, own",
    "GP around the network, earlier",
    OURS,
)
OTHERS = WAYS[1:-1]


def first_points(seed: int) -> Tensor:
    """All candidates in random order: the first ``START`` of it begin every search."""
    return torch.randperm(len(candidates()), generator=torch.Generator().manual_seed(seed))


def searched(surrogate: Surrogate, cost: Tensor, seed: int) -> Tensor:
    """The candidates that a search evaluates, in its order.

    Args:
        surrogate: Makes a model from points and costs.
        cost: (M,) of all candidates.
        seed: Of the first points.
    """
    from botorch.acquisition import LogExpectedImprovement

    points, made = candidates(), first_points(seed)[:START].tolist()
    while len(made) < max(AFTER):
        at = torch.tensor(made)
        model = surrogate(points[at], cost[at, None])
        with torch.no_grad():
            value = LogExpectedImprovement(model, cost[at].min(), maximize=False)(points[:, None])
        value[at] = -torch.inf
        made.append(int(value.argmax()))
    return torch.tensor(made)


def regrets(cost: Tensor, order: Tensor) -> list[float]:
    """What a search has left after 5, 10 and 20 evaluations, in %."""
    best = cost[order].cummin(0).values
    share = 100 * (best - cost.min()) / (cost.median() - cost.min())
    return [float(share[n - 1]) for n in AFTER]


@cache
def learned(family: str, seed: int) -> tuple[Earlier, Mapping[str, Surrogate], Tensor]:
    """What the earlier tasks give: their costs, the ways to go on, and the order of the network's outputs."""
    points = candidates()
    earlier = Earlier.drawn(points, tables(family, "earlier", EARLIER), POINTS, seed)
    network = surrogates.trained(earlier, seed)
    own, known = (surrogates.around(network, earlier, fixed=fixed) for fixed in (False, True))
    order = network(points).detach()[:, 0].argsort()
    process = surrogates.tangent_process(network, earlier)
    models = (surrogates.plain, own, known, surrogates.from_tangents(process))
    return earlier, dict(zip(WAYS[2:], models, strict=True)), order


@cache
def tables(family: str, split: str, tasks: int) -> Tensor:
    """The costs of some tasks, once a run."""
    return costs(family, split, tasks)


@cache
def compared(family: str, split: str, tasks: int, task: int, seeds: int) -> dict[str, list[float]]:
    """The regrets of all ways on one task, each the mean over seeds."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        earlier, models, order = learned(family, seed)
        cost = earlier.scaled(tables(family, split, tasks)[task])
        random = first_points(1000 * seed + task)
        found["random"].append(regrets(cost, random))
        found["order of the network"].append(regrets(cost, torch.cat([random[:START], order])))
        for way, model in models.items():
            found[way].append(regrets(cost, searched(model, cost, 1000 * seed + task)))
    return {way: torch.tensor(each, dtype=torch.float64).mean(0).tolist() for way, each in found.items()}


def tables_of(cells: list[Cell]) -> str:
    """Regrets, and paired differences of the tangent process from the other ways, over tasks."""
    regret, difference = [], []
    for family in FAMILIES:
        for after in AFTER:
            where = {"family": family, "after": after}
            own = {way: chosen(cells, way, **where) for way in WAYS}
            if own[OURS]:
                regret.append([f"{family}, {after}", *(with_error(own[way], 1) for way in WAYS)])
                pairs = [zip(own[OURS], own[way], strict=True) for way in OTHERS]
                less = [with_error([a - b for a, b in each], 1) for each in pairs]
                difference.append([f"{family}, {after}", *less])
    first = markdown(["family, evaluations", *WAYS], regret)
    return f"{first}\n\n{markdown([f'{OURS} less', *OTHERS], difference)}"


def main(arguments: list[str] | None = None) -> None:
    """Run the study, if BoTorch is there."""
    options = parser(__doc__ or "", seeds=2)
    options.add_argument("--tasks", type=int, default=10, help="new tasks of a family")
    options.add_argument("--split", default="reported", choices=["development", "reported"])
    options.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    given = options.parse_args(arguments)
    if importlib.util.find_spec("botorch") is None:
        print("Nothing was run. This comparison needs BoTorch: pip install botorch")
        return
    warnings.filterwarnings("ignore", module="(botorch|gpytorch|linear_operator).*")
    study = Study("bayesian_optimization/transfer", given)
    cells = []
    for task in range(given.tasks):
        for family in given.families:
            for place, after in enumerate(AFTER):

                def found(family: str = family, task: int = task, place: int = place) -> dict[str, Any]:
                    all_ways = compared(family, given.split, given.tasks, task, given.seeds)
                    return {way: values[place] for way, values in all_ways.items()}

                what = {"family": family, "part": given.split, "draw": task, "after": after,
                        "sizes": {"seeds": given.seeds, "earlier": EARLIER, "points": POINTS}}  # fmt: skip
                cells.append(study.cell(what, found))
    study.publish(tables_of(cells), cells)


if __name__ == "__main__":
    main()
