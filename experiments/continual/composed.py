"""Eight tasks in one network by adding what each moved the weights by.

Each task has a head of its own, the linear probe of its samples, and moves the weights below it: by the fit
of the linearized network; by the same with a curvature as its metric, its own or that of the other tasks,
whose outputs it then leaves alone; or by fine-tuning (task arithmetic: Ilharco et al., ICLR 2023; on
linearized networks: Ortiz-Jiménez et al., NeurIPS 2023). The displacements of all are added, times a factor
for all that validation samples choose, and every task is tested with its head on the one network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.adapt.nested import drawn
from experiments.adapt.tasks import DEVELOPMENT, NETWORKS, REPORTED, Task, pools, samples, stored
from experiments.continual.class_stream import right
from experiments.study import Cell, Study, parser
from experiments.tables import chosen, markdown, with_error
from linnet.continual.quadratic import summed as summed_blocks
from linnet.curvatures.curvature import Curvature
from linnet.fitting.composed import Composed
from linnet.fitting.descent import HEAD_SCALE, RATES, Descent, outputs_of, score_of
from linnet.fitting.last_layer import last_linear
from linnet.likelihoods import Gaussian
from linnet.linear.targets import ALPHA
from linnet.tangent.batch import Inputs, split

NAMES = (  # sets of images of ten classes or fewer: kernels grow with the square of the classes
    "food", "aerial views", "trash", "textures", "monkeys", "groceries", "Kannada digits", "EuroSAT",
)  # fmt: skip
TASKS = tuple(task for task in (*REPORTED, *DEVELOPMENT) if task.name in NAMES)
POOL, TESTED = 3000, 500
FACTORS = tuple(round(0.1 * k, 1) for k in range(11))
# Metrics: whether the curvature is that of the other tasks, and its damping by its mean eigenvalue.
METRICS = {
    "linear, own metric": (False, 0.1),
    "linear, metric of the others": (True, 0.1),
    "linear, metric of the others, less damping": (True, 0.01),
}
STEPS = 150
METHODS = ("linear", *METRICS, "fine-tuned")
ROLES = ("own", "sum", "sum times the factor")
Displacement = dict[str, Tensor]
Part = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class Given:
    """A task as a draw has it.

    Args:
        net: The network with the task's head.
        train: Samples of the fit.
        validation: As many others, which choose ridges, learning rates and the factor.
        test: Samples that are tested.
    """

    net: nn.Module
    train: Part
    validation: Part
    test: Part

    @property
    def body(self) -> list[str]:
        """Names of the weights below the head."""
        head, _ = last_linear(self.net)
        return [name for name, _ in self.net.named_parameters() if not name.startswith(f"{head}.")]


def given(task: Task, network: str, shots: int, seed: int, data_dir: str | None) -> Given:
    """A draw of a task."""
    described = NETWORKS[network]
    model, prepared = described.load(data_dir)
    found = stored(task, data_dir)
    pool, test = pools(found, POOL, TESTED)
    both = drawn(found.train_y[pool], 2 * shots, seed)
    y = found.train_y[pool][both]
    rank = torch.cat([torch.arange(int((y == label).sum())) for label in y.unique()])
    rows = [pool[both[rank < shots]], pool[both[rank >= shots]]]
    train, validation = (
        (samples(found.train_x[at.numpy()], described, prepared), found.train_y[at]) for at in rows
    )
    tested = samples(found.test_x[test.numpy()], described, prepared), found.test_y[test]
    net = linnet.with_head(model, classes=found.classes, data=train)
    return Given(net, train, validation, tested)


def curvature(one: Given) -> Any:
    """K-FAC of a task's squared loss below its head, the mean over its samples."""
    made = linnet.curvature(one.net, one.train[0], Gaussian(), structure="kfac", params=one.body)
    return made.scaled(1 / made.made.examples)


def together(every: list[Curvature]) -> Curvature:
    """The Kronecker factors nearest to the sum of several tasks' curvatures."""
    first, parts = every[0], []
    for own in zip(*(G.parts for G in every), strict=True):
        operator: Any = own[0].operator
        for part in own[1:]:
            operator = summed_blocks(operator, part.operator, "svd", (1.0, 1.0))
        parts.append(replace(own[0], operator=operator))
    return Curvature(tuple(parts), first.function, first.made)


def linear(one: Given, metric: Any = None, tau: float = 0.0) -> Any:
    """The fit of the linearized weights below the head, its ridge chosen by validation samples."""
    if metric is None:
        lin = linnet.linearize(one.net, params=one.body)
    else:
        lin = linnet.linearize(linnet.with_metric(one.net, metric, tau))
    return linnet.audit.tune_ridge(linnet.fit(lin, one.train), one.validation)


def fine_tuned(one: Given, seed: int) -> Displacement:
    """The displacement by Adam at the rate that is best on validation samples, the head kept."""
    net = copy.deepcopy(one.net)
    head = last_linear(net)[1]
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.mul_(HEAD_SCALE / ALPHA)
    names = one.body
    runs = [
        Descent(rate, STEPS, seed=seed, optimizer="adam")(net, *one.train, iter(()), names)
        for rate in RATES["adam"]
    ]
    best = max(runs, key=lambda run: score_of(run, *one.validation))
    before = dict(net.named_parameters())
    return {name: (best.get_parameter(name) - before[name]).detach() for name in names}


@torch.no_grad()
def outputs(one: Given, x: Inputs, moved: Displacement, straight: bool) -> Callable[[float], Tensor]:
    """Outputs of a task's head as a function of the factor."""
    if straight:
        lin = linnet.linearize(one.net, params=one.body)
        parts = [(lin.base(part), lin.jvp(part, moved)) for part in split(x, 250)]
        base, tangent = (torch.cat(column) for column in zip(*parts, strict=True))
        return lambda factor: base + factor * tangent

    def at(factor: float) -> Tensor:
        net = copy.deepcopy(one.net)
        for name, change in moved.items():
            net.get_parameter(name).data.add_(factor * change)
        return torch.cat([outputs_of(net, part) for part in split(x, 250)])

    return at


def displacements(tasks: dict[str, Given], method: str, seed: int) -> dict[str, Any]:
    """What each task moves the weights by: fits, or tensors."""
    if method == "fine-tuned":
        return {name: fine_tuned(one, seed) for name, one in tasks.items()}
    if method == "linear":
        return {name: linear(one) for name, one in tasks.items()}
    curvatures = {name: curvature(one) for name, one in tasks.items()}
    others, relative = METRICS[method]
    found = {}
    for name, one in tasks.items():
        taken = [G for other, G in curvatures.items() if (other != name) == others]
        total = together(taken)
        mean = float(total.trace()) / total.shape[0] / total.made.examples
        found[name] = linear(one, total, relative * mean)
    return found


def summed(own: dict[str, Any], body: list[str]) -> Displacement:
    """The sum of displacements."""
    if not isinstance(next(iter(own.values())), dict):
        fits = list(own.values())
        total: Composed = fits[0] + fits[1]
        for fit in fits[2:]:
            total = total + fit
        return total.displacement()
    return {name: sum(moved[name] for moved in own.values()) for name in body}  # type: ignore[misc]


def measured(tasks: dict[str, Given], method: str, seed: int) -> dict[str, Any]:
    """Accuracies of every task by its own displacement and by the sum of all, at factors of the sum."""
    straight = method != "fine-tuned"
    own = displacements(tasks, method, seed)
    total = summed(own, next(iter(tasks.values())).body)
    found: dict[str, Any] = {"own": {}, "validation": {}, "test": {}}
    for name, one in tasks.items():
        alone = own[name] if isinstance(own[name], dict) else own[name].displacement()
        found["own"][name] = right(outputs(one, one.test[0], alone, straight)(1.0), one.test[1])
        for role in ("validation", "test"):
            x, y = getattr(one, role)
            at = outputs(one, x, total, straight)
            found[role][name] = [right(at(factor), y) for factor in FACTORS]
    return found


# -- tables ----------------------------------------------------------------------------------------


def scores(cell: Cell) -> dict[str, float]:
    """Means over tasks: of each by itself, of the sum, and of the sum times the best factor of validation."""
    mean = {role: torch.tensor(list(cell[role].values())).mean(0) for role in ("own", "validation", "test")}
    factor = int(mean["validation"].argmax())
    return {
        "probe": float(mean["test"][0]), "own": float(mean["own"]), "sum": float(mean["test"][-1]),
        "sum times the factor": float(mean["test"][factor]), "factor": FACTORS[factor],
    }  # fmt: skip


def table(cells: list[Cell]) -> str:
    """Markdown: a row a method, means over tasks with errors over draws."""
    rows = []
    for method in METHODS:
        every = [scores(cell) for cell in cells if cell["method"] == method]
        if every:
            kept = [100 * (one["sum times the factor"] - one["probe"]) / (one["own"] - one["probe"])
                    for one in every]  # fmt: skip
            rows.append([
                method, *(with_error(chosen(every, key)) for key in ("probe", *ROLES)),
                with_error(kept, 0), f"{sum(one['factor'] for one in every) / len(every):.1f}",
            ])  # fmt: skip
    header = ["displacements", "probe, nothing added", "own alone", "sum of eight", "sum times the factor"]
    return markdown([*header, "share of the gain kept, %", "factor"], rows)


def main() -> None:
    """Run the study."""
    make = parser(__doc__ or "")
    make.add_argument("--network", default="resnet20", choices=sorted(NETWORKS))
    make.add_argument("--shots", type=int, default=10, help="samples a class, and as many for validation")
    arguments = make.parse_args()
    study, cells = Study("continual/composed", arguments), []
    for seed in study.seeds:

        @cache
        def tasks(seed: int = seed) -> dict[str, Given]:
            make = (arguments.network, arguments.shots, seed, arguments.data_dir)
            return {task.name: given(task, *make) for task in TASKS}

        for method in METHODS:
            what = {
                "network": NETWORKS[arguments.network].name, "shots": arguments.shots, "seed": seed,
                "method": method, "tested": TESTED,
            }  # fmt: skip
            cells.append(study.cell(what, lambda method=method, seed=seed: measured(tasks(), method, seed)))
    study.publish(table(cells), cells)


if __name__ == "__main__":
    main()
