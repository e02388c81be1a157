"""The plan of `linnet adapt`: its network, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.app.data import TaskData
from linnet.app.runs.adaptation import ended, nests
from linnet.app.runs.settings import Network, Settings, Solving, Source
from linnet.errors import InputError, ModelError
from linnet.fitting.head import with_head
from linnet.fitting.last_layer import selected_inside
from linnet.nested.adapt import HEADS
from linnet.nested.features import Features
from linnet.tangent.functional import Functional

TESTED = 2  # passes of a test sample for one of a training sample: the kernel with them, and its own variance
AGAIN = 1.0  # seconds of a few samples below which they are timed again: another process may have been busy


@dataclass(frozen=True, eq=False)
class Planned:
    """A network as ``linnet adapt`` takes it by default; what its head holds is left open."""

    model: nn.Module  # the network
    params: tuple[str, ...] | None  # names of the parameters that are fitted; None for all
    note: str  # A sentence, if its head is not its own
    # its features, where the linear probe and the lower layers are fitted in one solve
    nested: Features | None = None

    def seconds(self, x: Tensor, task: TaskData) -> tuple[float, float] | None:
        """Predicted seconds of the fit and the test samples, by the time of a few samples."""
        # The passes through the network decide, which grow with the samples; the products of pairs of samples
        # are left out.
        if self.nested is None:
            return None
        each = seconds_each(self.nested.body, x)
        return each * len(task.train), TESTED * each * len(task.test)


def planned(
    model: nn.Module, task: TaskData, x: Tensor, params: str | None, output: str | None = None
) -> Planned:
    """The network as a run takes it by default."""
    old = ended(model, task, x, output)
    names = None if params is None else (params,)
    settings = Settings(Network(""), Source(Path()), Solving(params=params))
    own = Functional(old).output_shape(x).numel()
    if nests(settings, task, old, x):
        module = Features(old, HEADS, 0, selected_inside(old, params))
        note = f"its head of {own} outputs is replaced by a new one, as linnet adapt does"
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


def seconds_each(work: Callable[[Tensor], object], x: Tensor) -> float:
    """Seconds for each sample, without what the first call alone takes."""
    work(x[:1])
    found: list[float] = []
    while len(found) < 3 and sum(found) < AGAIN:
        start = time.perf_counter()
        work(x)
        found.append(time.perf_counter() - start)
    return min(found) / len(x)


def network_of_table(task: TaskData) -> tuple[str, dict[str, Any]]:
    """The network of random features that a table has where none is given, by name and arguments."""
    if task.table is None:
        raise InputError(
            "--model must be given",
            expected="a trained network, which only a table can do without",
            remedy="name one, such as --model timm:resnet18 or --model net.py:make_network",
        )
    return "random:features", {"inputs": len(task.table.labels)}
