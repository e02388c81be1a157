"""The plan of `linnet adapt`: its network, how long it takes, and how few samples a first answer needs."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.app.data import TaskData, load_data
from linnet.app.models import load_model
from linnet.app.runs.adaptation import ended, nests
from linnet.app.runs.normalization import normalized
from linnet.app.runs.settings import Network, Settings, Solving, Source
from linnet.errors import ModelError
from linnet.fitting.head import with_head
from linnet.nested.adapt import HEADS
from linnet.nested.features import Features
from linnet.tangent.functional import Functional
from linnet.tangent.linearized import linearize

Array = np.ndarray[Any, Any]
QUICK = 15.0  # seconds of passes through the network for --quick, about the time that torch takes to start
TESTED = 2  # passes of a test sample for one of a training sample: the kernel with them, and its own variance
FEW = 8  # samples that are timed
LEAST = 32  # test samples, whose accuracy has a standard error of at most 9 points


@dataclass(frozen=True, eq=False)
class Planned:
    """A network as ``linnet adapt`` takes it by default; what its head holds is left open.

    Args:
        model: The network.
        params: Names of the parameters that are fitted; None for all.
        note: A sentence, if its head is not its own.
        nested: Its features, where the linear probe and the lower layers are fitted in one solve.
    """

    model: nn.Module
    params: tuple[str, ...] | None
    note: str
    nested: Features | None = None

    def seconds(self, x: Tensor, task: TaskData) -> tuple[float, float] | None:
        """Predicted seconds of the fit and the test samples, by the time of a few samples.

        The passes through the network decide, which grow with the samples; the products of pairs of samples
        are left out.

        Args:
            x: A few samples.
            task: The data.

        Returns:
            Seconds of the fit and of the test samples; None where no nested fit is made.
        """
        if self.nested is None:
            return None
        each = _seconds_each(self.nested.body, x)
        return each * len(task.train), TESTED * each * len(task.test)


def planned(model: nn.Module, task: TaskData, x: Tensor, params: str | None) -> Planned:
    """The network as a run takes it by default.

    Args:
        model: The network.
        task: The data.
        x: A few samples.
        params: The parameters to fit.

    Returns:
        The network with its new head.
    """
    old = ended(model, task, x)
    names = None if params is None else (params,)
    settings = Settings(Network(""), Source(Path()), Solving(params=params))
    own = Functional(old).output_shape(x).numel()
    if nests(settings, task, old, x):
        module = Features(old, HEADS, 0, params)
        note = f"planned as linnet adapt takes it: {HEADS} random heads for its head of {own} outputs"
        return Planned(module.model, tuple(module.function.names), note, module)
    outputs = own if task.classes is None else len(task.classes)
    if own == outputs:
        return Planned(model, names, "")
    try:
        new = with_head(old, outputs, init="random", seed=torch.Generator().manual_seed(0))
    except ModelError as error:
        note = f"its {own} outputs are not the {outputs} classes of the data, and {error.what}"
        return Planned(model, names, note)
    return Planned(new, names, f"planned with a new head of {outputs} outputs for the old one of {own}")


def quickened(settings: Settings) -> Settings:
    """The settings with so few samples that a first answer takes seconds.

    The time is shared between training and test samples, by the time of a few. Of classes as many samples
    each are taken as it allows, of a smaller class all. Samples that were asked for by number are kept.

    Args:
        settings: What is asked for.

    Returns:
        The settings with a number of shots and of test samples, unless all of them are few enough.

    Raises:
        LinnetError: Whatever is wrong with the network or the data.
    """
    source, network, solving = settings.source, settings.network, settings.solving
    task = load_data(
        source.path, source.transform, seed=source.seed, target=source.target, damaged=source.damaged
    )
    few = task if task.classes is None else task.shots(1, at_most=True)
    few = few.subset("train", range(min(FEW, len(few.train))))
    model = load_model(network.spec, network.weights, network.arguments).to(solving.device)
    few = normalized(few, model, source.normalizes)
    x = few.tensors("train")[0].to(solving.device)
    names = solving.params if solving.params is None or isinstance(solving.params, str) else None
    plan = planned(model, task, x, names)
    work = plan.nested.body if plan.nested else linearize(plan.model, params=plan.params).kernel
    each = _seconds_each(work, x)
    counts = np.array([len(task.train)]) if task.classes is None else np.bincount(task.train.y)
    least = 16 if task.classes is None else 2  # leave-one-out compares nothing with fewer
    shots = max(least, _most_shots(counts, int(QUICK / 2 / each)))
    tests = max(LEAST, int(QUICK / 2 / each / TESTED))
    if source.shots is None and shots < counts.max():
        source = replace(source, shots=shots, at_most=bool(shots > counts.min()))
    if source.tests is None and tests < len(task.test):
        source = replace(source, tests=tests)
    return replace(settings, source=source)


def _most_shots(counts: Array, room: int) -> int:
    """The most samples of each class, or all of a smaller one, that are not more than ``room`` together."""
    every = range(int(counts.max()) + 1)
    return bisect(every, room, key=lambda shots: int(np.minimum(counts, shots).sum())) - 1


def few_samples(source: Source) -> str:
    """The number of samples taken, in words.

    Args:
        source: The data.

    Returns:
        A phrase.

    Example:
        >>> few_samples(Source(Path("leaves"), shots=3))
        '3 shots, all test samples'
    """
    most = "at most " * source.at_most
    many = "all training samples" if source.shots is None else f"{most}{source.shots} shots"
    return f"{many}, {'all' if source.tests is None else source.tests} test samples"


def _seconds_each(work: Callable[[Tensor], object], x: Tensor) -> float:
    """Seconds for each sample, without what the first call alone takes."""
    work(x[:1])
    start = time.perf_counter()
    work(x)
    return (time.perf_counter() - start) / len(x)
