"""One training run: objective, optimizer and length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.fitting.training import SCHEDULES
from linnet.linear.targets import make_targets
from linnet.params import choice, flag, integer, number
from linnet.params import seed as checked_seed

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Objective:
    """The objective: the mean over examples of a loss, plus ½ λ‖δ‖².

    ``"squared"`` is ½ ‖t − f‖² summed over outputs, with α-scaled one-hot t for classes. Its Hessian is
    JᵀJ/N + λI, so the optimum is that of ``linnet.fit`` at ridge ρ = N λ.

    Args:
        loss: ``"squared"`` or ``"cross-entropy"``.
        outputs: C.
        scale: α.
        weight_decay: λ, on the displacement δ of a linear model and on the weights of a plain network.

    Source:
        Achille et al., CVPR 2021, eq. (3), halved and averaged as in section A.3.
    """

    loss: str
    outputs: int
    scale: float
    weight_decay: float

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch, without the weight decay."""
        f = outputs.reshape(outputs.shape[0], -1)
        if self.loss == "cross-entropy":
            return F.cross_entropy(f, y.long().flatten())
        y = make_targets(y, self.outputs, self.scale, varied=False, dtype=f.dtype).values
        # ½ Σᵢ ‖tᵢ − fᵢ‖² / N
        return 0.5 * (y.to(f).reshape(f.shape) - f).square().sum() / f.shape[0]


@dataclass(frozen=True)
class Optimization:
    """Settings of the optimizer.

    Args:
        optimizer: ``"sgd"`` or ``"adam"``.
        learning_rate: η.
        momentum: Of SGD, or β₁ of Adam.
        schedule: ``"constant"``, or ``"cosine"`` down to zero.
        clip: Largest norm of the whole gradient, after preconditioning; ``None`` for no limit.

    Raises:
        InputError: If an argument has a value that does not work.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    schedule: str = "constant"
    clip: float | None = None

    def __post_init__(self) -> None:
        choice("optimizer", self.optimizer, OPTIMIZERS)
        choice("schedule", self.schedule, SCHEDULES)
        _require_number("learning_rate", self.learning_rate, 0.0, math.inf)
        number("momentum", self.momentum, least=0, below=1)
        if self.clip is not None:
            _require_number("clip", self.clip, 0.0, math.inf)

    def build(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The torch optimizer."""
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.learning_rate, betas=(self.momentum, 0.999))
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)

    def rate(self, step: int, steps: int) -> float:
        """η at a step."""
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (1 + math.cos(math.pi * step / steps)) / 2


def _require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless a value is a number strictly between two others."""
    number(name, value, above=low, below=None if high == math.inf else high)


@dataclass(frozen=True)
class Course:
    """Length, validation and checkpoints of a run.

    Args:
        steps: Number of steps.
        batch_size: Examples a step; all of them if there are fewer.
        seed: Seed of everything random.
        evaluate_every: Steps between two validations.
        keep: ``"last"``, or ``"best"`` for the weights of the best validation.
        training_mode: Whether BatchNorm uses the batch and dropout is on.

    Raises:
        InputError: If an argument has a value that does not work.
    """

    steps: int
    batch_size: int = 28
    seed: int = 0
    evaluate_every: int = 100
    keep: str = "last"
    training_mode: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        object.__setattr__(self, "seed", checked_seed("seed", self.seed))
        choice("keep", self.keep, ("last", "best"))
        flag("training_mode", self.training_mode)
