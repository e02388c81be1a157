"""Short training that recovers the accuracy lost by surgery."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError, ModelError, NumericalError
from linnet.finetuning.course import Course, Log, Objective, Optimization, Reporting
from linnet.finetuning.examples import Examples
from linnet.finetuning.loss_curve import warn_of_large_steps
from linnet.finetuning.prepared import largest_eigenvalue
from linnet.finetuning.recipe_runs import RETRIES
from linnet.finetuning.trainer import Trainer
from linnet.fitting.descent import outputs_of
from linnet.fitting.targets import make_targets
from linnet.params import flag, function, number
from linnet.params import path as checked_path
from linnet.tangent.batch import concatenate
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import linearize

RATE = 0.01  # for ResNets like those of Achille et al. 2021
PROBED = 32  # examples that the largest eigenvalue is estimated on


def recover(
    model: nn.Module,
    data: Any,
    teacher: nn.Module | None = None,
    *,
    steps: int = 200,
    batch_size: int = 64,
    learning_rate: float | None = None,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    schedule: str = "cosine",
    training_mode: bool = True,
    output: OutputAdapter = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    log: Log | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Train a copy of a network after its activations were replaced.

    On the pretraining task, as Achille et al. (2021) did for one epoch; or, where its labels are not at hand,
    towards the outputs of the network before surgery.

    Args:
        model: The network after surgery; it is not touched.
        data: Data of the pretraining task, (x, y) or a ``Dataset``; y does not matter with a teacher.
        teacher: The network before surgery, whose outputs are then the targets of a squared loss.
        steps: Number of steps.
        batch_size: Examples a step.
        learning_rate: η at the start; a warning if the training loss goes up again. By default 0.01, with
            a teacher at most half of 1/λ_max of the Hessian; taken again with a third where the loss goes up.
        momentum: Of SGD.
        weight_decay: λ, on the weights.
        schedule: ``"cosine"`` or ``"constant"``.
        training_mode: Whether BatchNorm takes new statistics; they shift with the activations.
        output: How to turn the networks' result into a tensor.
        seed: Seed of the order.
        checkpoint: A folder; an interrupted training resumes from it.
        log: Called with a dict of numbers and the step.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The trained copy, in the mode that the network was in.

    Raises:
        DataError: If the data are empty or not finite, or labels are out of range.
        InputError: If an argument has a value that does not work, or labels are needed and are not classes.
        ModelError: If the network has no parameter.
        NumericalError: If the loss is not finite.

    Source:
        Achille et al., CVPR 2021, section A.2 (pre-training).

    Example:
        >>> from linnet.tangent.surgery import leaky_relu
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> x, leaky = torch.randn(32, 2), leaky_relu(net)
        >>> better = recover(leaky, (x, torch.zeros(32)), teacher=net, steps=50)
        >>> bool((better(x) - net(x)).norm() < (leaky(x) - net(x)).norm())
        True
    """
    _check(model, teacher, weight_decay)
    flag("training_mode", training_mode)
    if checkpoint is not None:
        checked_path("checkpoint", checkpoint)
    if log is not None:
        function("log", log, "a function of a dict of numbers and a step")
    clone = copy.deepcopy(model).requires_grad_(True)
    examples = Examples(data, next(clone.parameters()).device)
    x, y = examples.batch(torch.arange(1))
    outputs = Functional(clone, "all", output).check_runs(x).flatten(1).shape[1]
    if teacher is not None:
        examples = _taught(examples, teacher, output, outputs)
    elif y.is_floating_point():
        raise InputError(
            f"y has type {y.dtype} and there is no teacher",
            expected="integer classes of the pretraining task",
            remedy="pass teacher=, the network before surgery",
        )
    elif examples.in_memory:
        make_targets(examples.labels(), outputs, varied=False)
    loss = "cross-entropy" if teacher is None else "squared"
    run = _Run(
        clone,
        examples,
        Objective(loss, outputs, 1.0, weight_decay),
        Optimization("sgd", RATE, momentum, schedule),
        Course(steps, batch_size, seed, evaluate_every=steps, training_mode=training_mode),
        Reporting(log, 10, checkpoint, None, progress, "recovery after surgery"),
        output,
    )
    if learning_rate is None:
        trained = run.result(run.own_rate(), RETRIES)
    else:
        trained = run.result(learning_rate, retries=0)
    for p, before in zip(trained.parameters(), model.parameters(), strict=True):
        p.requires_grad_(before.requires_grad)
        p.grad = None
    return trained


def _check(model: Any, teacher: Any, weight_decay: Any) -> None:
    """Raise on arguments that cannot work."""
    for name, network in (("model", model), ("teacher", teacher)):
        if not isinstance(network, nn.Module) and (name == "model" or network is not None):
            raise InputError(
                f"{name} is {type(network).__name__}",
                expected="a torch.nn.Module",
                remedy="pass the network itself",
            )
    if next(model.parameters(), None) is None:
        raise ModelError(
            f"model ({type(model).__name__}) has no parameter",
            expected="a network with weights to train",
            remedy="pass the network that holds the weights",
        )
    number("weight_decay", weight_decay, least=0)


@dataclass(frozen=True, eq=False)
class _Run:
    """A training whose rate is still open.

    Args:
        network: The network to start from, which stays as it is.
        examples: What it learns from.
        objective: The loss.
        optimization: The optimizer; its rate does not count.
        course: The steps.
        reporting: Where it reports.
        output: How to turn the network's result into a tensor.
    """

    network: nn.Module
    examples: Examples
    objective: Objective
    optimization: Optimization
    course: Course
    reporting: Reporting
    output: OutputAdapter

    def own_rate(self) -> float:
        """A rate that gradient descent would not grow with, as far as can be told at the start."""
        if self.objective.loss != "squared":
            return RATE
        some = torch.arange(min(PROBED, self.examples.n))
        lin = linearize(self.network, "all", self.output)
        # steps of gradient descent grow beyond 2/λ_max
        return min(RATE, 0.5 / max(largest_eigenvalue(lin, self.examples.batch(some)[0]), 1e-30))

    def result(self, rate: float, retries: int, folder: str = "") -> nn.Module:
        """The trained network; if the loss rises, restart with a third of it, or warn."""
        place = self.reporting.checkpoint
        own = replace(self.reporting, checkpoint=None if place is None else Path(place) / folder)
        try:
            trained, rises = self._trained(rate, own)
        except NumericalError:
            if not retries:
                raise
            rises = True
        if rises and retries:
            return self.result(rate / 3, retries - 1, f"{folder}-slower".removeprefix("-"))
        if rises:
            warn_of_large_steps(rate)
        return trained

    def _trained(self, rate: float, reporting: Reporting) -> tuple[nn.Module, bool]:
        """A trained copy, and whether the loss went up again."""
        clone = copy.deepcopy(self.network)
        optimization = replace(self.optimization, learning_rate=rate)
        trainer = Trainer(clone, self.examples, self.objective, optimization, self.course, reporting)
        trainer.output = self.output
        return clone, trainer.run().curve.rises


@torch.no_grad()
def _taught(examples: Examples, teacher: nn.Module, output: OutputAdapter, outputs: int) -> Examples:
    """The examples with the outputs of a network as targets."""
    frozen = copy.deepcopy(teacher).eval()
    parts: list[tuple[Any, Tensor]] = [(x, outputs_of(frozen, x, output)) for x, _ in examples.batches()]
    x = concatenate([part for part, _ in parts])
    targets = torch.cat([own for _, own in parts]).flatten(1)
    if targets.shape[1] != outputs:
        raise InputError(
            f"teacher has {targets.shape[1]} outputs and the network {outputs}",
            expected="the network before surgery, with the same outputs",
            remedy="pass the network that was given to linnet.surgery.leaky_relu",
        )
    return Examples((x, targets), examples.device)
