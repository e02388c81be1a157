"""The plan of `linnet adapt` with default settings, and its estimated time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.app.data import TaskData
from linnet.app.runs.adaptation import ended, nests
from linnet.app.runs.settings import Network, Settings, Solving, Source
from linnet.errors import ModelError
from linnet.fitting.head import with_head
from linnet.nested.adapt import HEADS
from linnet.nested.features import Features
from linnet.tangent.functional import Functional


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
        """How long the fit and the test samples will take, by the time of a few samples.

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
        start = time.perf_counter()
        self.nested.body(x)
        each = (time.perf_counter() - start) / len(x)
        return each * len(task.train), 2 * each * len(task.test)  # their kernel, and their own variances


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
        new = with_head(old, outputs, init="random", generator=torch.Generator().manual_seed(0))
    except ModelError as error:
        note = f"its {own} outputs are not the {outputs} classes of the data, and {error.what}"
        return Planned(model, names, note)
    return Planned(new, names, f"planned with a new head of {outputs} outputs for the old one of {own}")
