"""Short training that recovers the accuracy lost by surgery."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.finetuning.finetune import RETRIES, device_of, largest_eigenvalue
from linnet.finetuning.trainer import (
    ExampleSet,
    Objective,
    Optimization,
    Run,
    Trainer,
    checked_run,
    warn_of_large_steps,
    without_rise,
)
from linnet.fitting.descent import outputs_of
from linnet.linear.targets import make_targets
from linnet.params import call, flag, instance, optional
from linnet.params import seed as checked_seed
from linnet.tangent.batch import Inputs, concatenate
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import linearize
from linnet.training import Training, filled

RATE = 0.01  # for networks like the paper's
DEFAULTS: dict[str, Any] = {
    "steps": 200, "batch_size": 64, "momentum": 0.9, "weight_decay": 1e-4, "schedule": "cosine",
}  # fmt: skip
PROBED = 32  # examples that the largest eigenvalue is estimated on


def recover(
    model: nn.Module,
    data: Any,
    teacher: nn.Module | None = None,
    *,
    training: Training | None = None,
    training_mode: bool = True,
    output: OutputAdapter = None,
    seed: int = 0,
    run: Run | None = None,
) -> nn.Module:
    """Train a copy of a network after its activations were replaced.

    On the pretraining task, as Achille et al. (2021) did for one epoch; or, where its labels are not at hand,
    towards the outputs of the network before surgery.

    Args:
        model: The network after surgery; it is not touched.
        data: Data of the pretraining task, (x, y) or a ``Dataset``; y does not matter with a teacher.
        teacher: The network before surgery, whose outputs are then the targets of a squared loss.
        training: Settings of the training steps; by default 200 steps of 64 examples, momentum 0.9, weight
            decay 1e-4 and a cosine schedule. A learning rate that is given is kept, with a warning if the
            training loss goes up again. By default it is 0.01, with a teacher at most half of 1/λ_max of the
            Hessian, and taken anew with a third where the loss goes up.
        training_mode: Whether BatchNorm takes new statistics, which shift with the activations: towards a
            teacher's outputs the accuracy of a ResNet-20 came back to 84 % with them, to 71 % without.
        output: How to turn the networks' result into a tensor.
        seed: Seed of the order.
        run: Checkpoints, logs and progress.

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
        >>> better = recover(leaky, (x, torch.zeros(32)), teacher=net, training=Training(steps=50))
        >>> bool((better(x) - net(x)).norm() < (leaky(x) - net(x)).norm())
        True
    """
    device = device_of(model)
    optional(instance, "teacher", teacher, nn.Module, "a torch.nn.Module", "pass the network itself")
    flag("training_mode", training_mode)
    seed = checked_seed("seed", seed)
    settings = filled(training, "recover", **DEFAULTS, learning_rate=None, epochs=None, clip=None)
    run = checked_run(run, "recover", ("evaluate_every", "keep", "memory"))
    clone = copy.deepcopy(model).requires_grad_(True)
    examples = ExampleSet(data, device, clone)
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
    objective = Objective(loss, outputs, 1.0, settings.weight_decay or 0.0)
    n, size = examples.n, min(settings.batch_size or examples.n, examples.n)
    steps = settings.steps or math.ceil((settings.epochs or 1) * n / size)
    momentum, schedule = settings.momentum or 0.0, settings.schedule or "cosine"

    def trainer(rate: float | None, folder: str) -> Trainer:
        assert rate is not None
        place = None if run.checkpoint is None else Path(run.checkpoint) / folder
        how = Optimization(rate, steps, size, momentum, schedule, settings.clip, "sgd", training_mode)
        made = Trainer(copy.deepcopy(clone), examples, objective, how, seed, replace(run, checkpoint=place))
        made.output, made.description = output, "recovery after surgery"
        return made

    given = settings.learning_rate
    first = _own_rate(clone, examples, loss, output) if given is None else given
    made, _ = without_rise(trainer, first, "", RETRIES if given is None else 0)
    if made.curve.rises:
        warn_of_large_steps(made.optimization.learning_rate, given is not None)
    trained = made.module
    for p, before in zip(trained.parameters(), model.parameters(), strict=True):
        p.requires_grad_(before.requires_grad)
        p.grad = None
    return trained


def _own_rate(network: nn.Module, examples: ExampleSet, loss: str, output: OutputAdapter) -> float:
    """A rate that gradient descent would not grow with, as far as can be known at the start."""
    if loss != "squared":
        return RATE
    some = torch.arange(min(PROBED, examples.n))
    lin = linearize(network, "all", output)
    # steps of gradient descent grow beyond 2/λ_max
    return min(RATE, 0.5 / max(largest_eigenvalue(lin, examples.batch(some)[0]), 1e-30))


@torch.no_grad()
def _taught(examples: ExampleSet, teacher: nn.Module, output: OutputAdapter, outputs: int) -> ExampleSet:
    """The examples with the outputs of a network as targets."""
    frozen = copy.deepcopy(teacher).eval()
    same = "the network before surgery, with the same inputs and outputs"

    def taught(x: Inputs) -> Tensor:
        found: Tensor = call("teacher", lambda part: outputs_of(frozen, part, output), x, expected=same)
        return found

    parts: list[tuple[Any, Tensor]] = [(x, taught(x)) for x, _ in examples.batches()]
    x = concatenate([part for part, _ in parts])
    targets = torch.cat([own for _, own in parts]).flatten(1)
    if targets.shape[1] != outputs:
        raise InputError(
            f"teacher has {targets.shape[1]} outputs and the network {outputs}",
            expected=same,
            remedy="pass the network that was given to linnet.surgery.leaky_relu",
        )
    return ExampleSet((x, targets), examples.device)
