"""A network and its linearization, trained by the same procedure on the same targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.errors import InputError, NumericalError
from linnet.params import call, flag, function, integer, number, refuse
from linnet.params import seed as checked_seed
from linnet.progress import track
from linnet.spectrum.kernel_matrix import check_inputs
from linnet.tangent.batch import Inputs, split, take
from linnet.tangent.batch import batch_size as count_examples
from linnet.tangent.data import Data
from linnet.tangent.linearized import Linearized, linearize

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
EVALUATED = 512  # examples evaluated at once


@dataclass(frozen=True)
class TrainingRun:
    """How one of the two models learned.

    Args:
        module: The trained model.
        iterations: The iteration at which the training loss was first seen at or below the target, or
            None if it never was; known up to the interval between evaluations.
        losses: Training loss over the whole set in evaluation mode, by iteration, 0 included.
        distance: ‖θ − θ₀‖₂ at the end.
        cosine: cos(θ, θ₀) at the end; the paper draws 1 − cos.
        accuracy: Share of right classes on ``"training"`` and ``"validation"`` data; empty for regression.
        validation_loss: Loss on the validation data, None without.

    Example:
        >>> run = TrainingRun(nn.Linear(1, 1), 3, {0: 0.7, 3: 0.1}, 0.5, 0.9, {"training": 1.0}, None)
        >>> run.final_loss
        0.1
    """

    module: nn.Module
    iterations: int | None
    losses: dict[int, float]
    distance: float
    cosine: float
    accuracy: dict[str, float] = field(default_factory=dict)
    validation_loss: float | None = None

    @property
    def final_loss(self) -> float:
        """Training loss at the end."""
        return list(self.losses.values())[-1]


@dataclass(frozen=True)
class Advantage:
    """A network against its linearization.

    Args:
        network: The network, trained as it is.
        linear: Its linearization, trained the same way.
        gap: Root mean square of f(x) − f_lin(x) between the two trained models, on the validation data
            where there are any.

    Example:
        >>> run = TrainingRun(nn.Linear(1, 1), 1, {1: 0.1}, 0.5, 0.9, {"training": 1.0, "validation": 0.75})
        >>> Advantage(run, run, gap=0.0).linear_advantage
        0.0
    """

    network: TrainingRun
    linear: TrainingRun
    gap: float

    @property
    def linear_advantage(self) -> float | None:
        """Accuracy of the linearization less that of the network, on validation data where there are any."""
        first, second = self.linear.accuracy, self.network.accuracy
        which = "validation" if "validation" in first else "training"
        return first[which] - second[which] if which in first else None


def linear_advantage(
    model: nn.Module,
    data: Any,
    make_optimizer: MakeOptimizer,
    *,
    validation: Any = None,
    loss: Loss | None = None,
    epochs: int = 100,
    batch_size: int = 128,
    target_loss: float = 0.01,
    every: int | None = None,
    stop: bool = False,
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    params: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Advantage:
    """Train a network and its linearization on the same targets, alike, and compare.

    Both see the same batches in the same order. The network trains in training mode; the linearization
    keeps BatchNorm and dropout in evaluation mode, as in the paper. The model passed in is not touched.

    Args:
        model: The network at initialization.
        data: Training data: an (x, y) pair, a Dataset or a DataLoader. Integer y are classes (for one
            output 0 and 1, or −1 and 1); float y of −1 and 1 are classes of a network with one output;
            other float y are regression targets of the shape of the outputs.
        make_optimizer: From parameters to an optimizer, called once for each of the two.
        validation: More data of the same kind.
        loss: From outputs (n, C) and targets to a mean loss; by default binary cross-entropy for one
            output, cross-entropy for classes, half the mean squared error for regression. A loss of
            one's own gets targets as they are in ``data``.
        epochs: Passes over the data; the paper's are 100, with 200 on CIFAR-2.
        batch_size: Examples in a batch; the paper's is 128.
        target_loss: The training loss to which iterations are counted; the paper's is 0.01.
        every: Iterations between two evaluations of the training loss; by default an epoch.
        stop: End a training when it has reached the target loss.
        make_schedule: From an optimizer to a learning rate scheduler, stepped at every iteration.
        params: Which parameters are trained and linearized, as for ``linnet.linearize``.
        seed: Of the order of batches, and of dropout.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        Both runs, and the gap between the trained models.

    Raises:
        DataError: If data are empty or not finite.
        InputError: If an argument is out of range or targets do not fit.
        NumericalError: If a training diverges.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, section 3 and supplement A, E.1.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 2)
        >>> net = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1))
        >>> found = linear_advantage(net, (x, x[:, 0].sign()), lambda p: torch.optim.SGD(p, 0.3), epochs=20)
        >>> found.linear.final_loss < found.linear.losses[0], found.network.distance > 0
        (True, True)
    """
    plan = _Plan(epochs, batch_size, target_loss, every, stop, checked_seed("seed", seed))
    plan.check()
    if loss is not None:
        function("loss", loss, "a function from outputs and targets to their mean loss")
    lin = linearize(model, params=params)
    task = _task(lin, Data.of(data, lin.function).pair, loss)
    tests = None if validation is None else _task(lin, Data.of(validation, lin.function).pair, loss)
    network = copy.deepcopy(model).requires_grad_(False)
    trained = set(lin.parameter_names)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    runs = []
    for module, name in ((network, "network"), (Linearized(lin.function.copy()), "linearization")):
        runs.append(_train(module, name, task, tests, plan, make_optimizer, make_schedule, progress))
    on = task if tests is None else tests
    first, second = (_outputs(run.module, on.x) for run in runs)
    gap = float((first - second).double().square().sum(1).mean().sqrt())
    return Advantage(runs[0], runs[1], gap)


@dataclass(frozen=True)
class _Plan:
    """How long to train."""

    epochs: int
    batch_size: int
    target_loss: float
    every: int | None
    stop: bool
    seed: int

    def check(self) -> None:
        """Raise on numbers that cannot work."""
        every = 1 if self.every is None else self.every
        for name, value in (("epochs", self.epochs), ("batch_size", self.batch_size), ("every", every)):
            integer(name, value)
        flag("stop", self.stop)
        number("target_loss", self.target_loss, above=0, remedy="leave target_loss= out")


@dataclass(frozen=True)
class _Task:
    """Data with a loss.

    Args:
        x: N examples.
        y: Targets as the loss takes them.
        labels: Classes (N,), or None for regression.
        loss: From outputs (n, C) and targets to their mean loss.
    """

    x: Inputs
    y: Tensor
    labels: Tensor | None
    loss: Loss


def _task(lin: Linearized, data: tuple[Inputs, Tensor], loss: Loss | None) -> _Task:
    """Targets in the form of the loss."""
    x, y = data
    c = torch.Size(check_inputs(lin.function, x)).numel()
    column = y.reshape(y.shape[0], -1)
    is_column = column.shape[1] == 1
    signs = set(column.unique().tolist()) if c == 1 and is_column else {None}
    if c == 1 and (signs <= {-1, 1} or (signs <= {0, 1} and not y.is_floating_point())):
        positive = (column > 0).to(lin.function.dtype)
        own = positive if loss is None else y
        return _Task(x, own, positive[:, 0].long(), loss or F.binary_cross_entropy_with_logits)
    if not y.is_floating_point():
        labels = column[:, 0].long()
        if not is_column or c == 1 or bool(((labels < 0) | (labels >= c)).any()):
            raise InputError(
                f"y holds integers from {int(y.min())} to {int(y.max())} of shape {tuple(y.shape)}",
                expected=f"one class from 0 to {max(c, 2) - 1} for each example",
                remedy="give the network one output for each class, or pass float targets",
            )
        return _Task(x, labels if loss is None else y, labels, loss or F.cross_entropy)
    if loss is None and column.shape[1] != c:
        raise InputError(
            f"y has shape {tuple(y.shape)} for a network with {c} outputs",
            expected=f"float targets (N, {c}), or integer classes (N,)",
            remedy="pass loss= for targets of another kind",
        )
    return _Task(x, column.to(lin.function.dtype) if loss is None else y, None, loss or _half_square)


def _loss(task: _Task, f: Tensor, y: Tensor) -> Tensor:
    """The mean loss, one number."""
    expected = "a function from outputs and targets to their mean loss"
    found = call("loss", task.loss, f, y, expected=expected)
    if not isinstance(found, Tensor) or found.numel() != 1:
        refuse("loss(outputs, y)", found, "a tensor with one number", "return the mean over the examples")
    return found


def _half_square(outputs: Tensor, y: Tensor) -> Tensor:
    """½ E ‖f − t‖²."""
    return (outputs - y).square().sum(1).mean() / 2


def _forward(module: nn.Module, x: Inputs) -> Tensor:
    """Outputs (n, C)."""
    if isinstance(x, Mapping):
        result = module(**x)
    else:
        result = module(*x) if isinstance(x, list | tuple) else module(x)
    outputs: Tensor = getattr(result, "logits", result)
    return outputs.reshape(outputs.shape[0], -1)


@torch.no_grad()
def _outputs(module: nn.Module, x: Inputs) -> Tensor:
    """Outputs on all examples in evaluation mode."""
    was = module.training
    module.eval()
    found = torch.cat([_forward(module, part).detach() for part in split(x, EVALUATED)])
    module.train(was)
    return found


def _evaluate(module: nn.Module, task: _Task) -> tuple[float, float | None]:
    """Loss and accuracy on a whole data set."""
    f = _outputs(module, task.x)
    accuracy = None
    if task.labels is not None:
        predicted = (f[:, 0] > 0).long() if f.shape[1] == 1 else f.argmax(1)
        accuracy = float((predicted == task.labels).double().mean())
    return float(_loss(task, f, task.y)), accuracy


def _batches(n: int, plan: _Plan) -> Iterator[Tensor]:
    """Indices of every batch of every epoch; a last batch of one example joins the one before it."""
    generator = torch.Generator().manual_seed(plan.seed)
    for _ in range(plan.epochs):
        parts = list(torch.randperm(n, generator=generator).split(min(plan.batch_size, n)))
        if len(parts) > 1 and parts[-1].numel() == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from parts


def _train(
    module: nn.Module,
    name: str,
    task: _Task,
    tests: _Task | None,
    plan: _Plan,
    make_optimizer: MakeOptimizer,
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None,
    progress: bool | None,
) -> TrainingRun:
    """Train one of the two models."""
    n = count_examples(task.x)
    start = _weights(module)
    optimizer = _optimizer(make_optimizer, [p for p in module.parameters() if p.requires_grad])
    schedule = None if make_schedule is None else _schedule(make_schedule, optimizer)
    batches = list(_batches(n, plan))
    every = plan.every or len(batches) // plan.epochs
    losses = {0: _evaluate(module, task)[0]}
    reached: int | None = 0 if losses[0] <= plan.target_loss else None
    with _seeded(plan.seed):
        for step, index in enumerate(track(batches, f"training the {name}", len(batches), progress), start=1):
            if plan.stop and reached is not None:
                break
            _step(module.train(), name, task, index, optimizer, step)
            if schedule is not None:
                schedule.step()
            if step % every == 0 or step == len(batches):
                losses[step] = _evaluate(module, task)[0]
                if reached is None and losses[step] <= plan.target_loss:
                    reached = step
    module.eval()
    end = _weights(module)
    distance = float((end - start).norm())
    cosine = float(F.cosine_similarity(end, start, dim=0))
    accuracy = {"training": _evaluate(module, task)[1]}
    validation_loss = None
    if tests is not None:
        validation_loss, accuracy["validation"] = _evaluate(module, tests)
    known = {key: value for key, value in accuracy.items() if value is not None}
    return TrainingRun(module, reached, losses, distance, cosine, known, validation_loss)


def _schedule(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    """What the caller's function makes, which must have steps."""
    expected = "a function from an optimizer to a learning rate schedule"
    remedy = "pass lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)"
    if not callable(make):
        refuse("make_schedule", make, expected, remedy)
    schedule = call("make_schedule", make, optimizer, expected=expected, remedy=remedy)
    if not callable(getattr(schedule, "step", None)):
        refuse("make_schedule(optimizer)", schedule, "a schedule with .step()", remedy)
    return schedule


def _optimizer(make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What the caller's function makes, which must be an optimizer of these parameters."""
    remedy = "pass lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9)"
    expected = "a function from parameters to an optimizer: it is called for each of the two models"
    if not callable(make):
        refuse("make_optimizer", make, expected, remedy)
    optimizer = call("make_optimizer", make, parameters, expected=expected, remedy=remedy)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"make_optimizer returned {type(optimizer).__name__}", expected, remedy)
    return optimizer


def _step(
    module: nn.Module, name: str, task: _Task, index: Tensor, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """One step of the optimizer."""
    index = index.to(task.y.device)
    optimizer.zero_grad()
    loss = _loss(task, _forward(module, take(task.x, index)), task.y[index])
    if not torch.isfinite(loss):
        raise NumericalError(
            f"training of the {name} diverged at iteration {step}: the loss is {float(loss.detach())}",
            expected="a finite loss",
            remedy="use a smaller learning rate in make_optimizer",
        )
    loss.backward()
    optimizer.step()


def _weights(module: nn.Module) -> Tensor:
    """θ of what is trained, one vector in float64; θ₀ + δ of a linearization."""
    if isinstance(module, Linearized):
        origin = module.theta0
        parts = [origin[name] + delta for name, delta in module.delta.items()]
    else:
        parts = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([part.detach().reshape(-1).double() for part in parts])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeded global generators inside, the caller's state after."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
