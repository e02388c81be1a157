r"""Curvatures by linnet and by a peer in turns, in one process, for machines whose speed varies.

    PYTHONPATH=src PEER benchmarks/curvature_turns.py transformer kfac-mc kronfluence --repeats 21

PEER is the python of the peers' environment (see ``curvature_peers.py``), which needs nothing of linnet but
its source. Every contestant is called once in each turn, and ratios are taken turn by turn: a machine that is
slow for a second is slow for all. "passes" as a peer stands for C + 1 backward passes that form no weight
gradients. What processes of their own show, such as memory, is in ``curvature_speed.py``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median, quantiles

from curvature_contestants import MAKERS
from curvature_networks import LARGE, NETWORKS, problem
from curvature_peers import TASKS, conditions, passes
from curvature_speed import linnet_job
from measure import Row, parser, publish, setup

WARM = 8  # examples of the call that nobody is charged for


def contestant(name: str, task: str, network: str, batch: int, examples: int | None) -> Callable[[], object]:
    """One call of a contestant, made and warmed up on few examples first."""
    parameters = conditions("linnet", task, network)[2]

    def make(count: int | None) -> Callable[[], object]:
        given = problem(network, parameters, count)
        if name == "passes":
            return passes(given, batch, NETWORKS[network].classes + 1)
        if name == "linnet":
            return linnet_job(task, given, batch).run
        return MAKERS[name](task, given, conditions(name, task, network)[0]).run

    make(WARM)()
    return make(examples)


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and processor seconds of every call in every turn."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin, spent = time.perf_counter(), time.process_time()
            call()
            found[name].append((time.perf_counter() - begin, time.process_time() - spent))
    return found


def rows(label: str, found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Medians, and the ratio of every peer to linnet turn by turn."""
    ours = found["linnet"]
    result = []
    for name, theirs in found.items():
        ratios = [[b[i] / a[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1)]
        low, _, high = quantiles(ratios[0], n=4) if len(ours) > 1 else [ratios[0][0]] * 3
        note = (
            f"of linnet's time, quartiles {low:.2f} to {high:.2f}; by processor time {median(ratios[1]):.2f}"
        )
        result.append(Row(f"{label}, {name}", median(t for t, _ in theirs), median(ratios[0]), note=note))
    return result


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__ or "", repeats=9)
    result.add_argument("network", choices=LARGE)
    result.add_argument("task", choices=[task for task in TASKS if task != "reference"])
    result.add_argument("peers", nargs="+", choices=["passes", *MAKERS])
    result.add_argument("--batch", type=int, default=128, help="examples a pass of the peers")
    result.add_argument("--examples", type=int, default=None, help="examples, if not all of the network's")
    return result.parse_args()


def main() -> None:
    """Entry point."""
    options = arguments()
    setup(options.threads)
    warnings.simplefilter("ignore")
    names = ["linnet", *options.peers]
    size = (options.batch, options.examples)
    calls = {name: contestant(name, options.task, options.network, *size) for name in names}
    found = in_turns(calls, options.repeats)
    told = rows(f"{options.network}: {options.task}", found)
    publish("Curvature in turns with its peers; ratios are to linnet", told, options.json)


if __name__ == "__main__":
    main()
