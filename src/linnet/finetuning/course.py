"""One training run: objective, optimizer and length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.linear.targets import make_targets
from linnet.params import choice, flag, integer, number
from linnet.params import seed as checked_seed
from linnet.training import SCHEDULES

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Objective:
    """The objective: the mean over examples of a loss, plus ½ λ‖δ‖²."""

    # `"squared"` is ½ ‖t − f‖² summed over outputs, with α-scaled one-hot t for classes. Its Hessian is JᵀJ/N
    # + λI, so the optimum is that of `linnet.fit` at ridge ρ = N λ.
    #
    # Source: Achille et al., CVPR 2021, eq. (3), halved and averaged as in section A.3.

    loss: str  # ``"squared"`` or ``"cross-entropy"``
    outputs: int  # C
    scale: float  # α
    weight_decay: float  # λ, on the displacement δ of a linear model and on the weights of a plain network

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
    """Settings of the optimizer."""

    optimizer: str = "sgd"  # ``"sgd"`` or ``"adam"``
    learning_rate: float = 0.01  # η
    momentum: float = 0.9  # of SGD, or β₁ of Adam
    schedule: str = "constant"  # ``"constant"``, or ``"cosine"`` down to zero
    # largest norm of the whole gradient, after preconditioning; `None` for no limit
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
    """Length, validation and checkpoints of a run."""

    steps: int  # number of steps
    batch_size: int = 28  # examples a step; all of them if there are fewer
    seed: int = 0  # seed of everything random
    evaluate_every: int = 100  # steps between two validations
    keep: str = "last"  # ``"last"``, or ``"best"`` for the weights of the best validation
    training_mode: bool = False  # whether BatchNorm uses the batch and dropout is on

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        object.__setattr__(self, "seed", checked_seed("seed", self.seed))
        choice("keep", self.keep, ("last", "best"))
        flag("training_mode", self.training_mode)
