"""Iterative linearization: train the linear model for K steps, linearize again, repeat.

    θ_{t+1} = θ_t − η φ_sᵀ L'(f_lin_{s,t}(X)),    φ_s = ∇f_{θ_s}(X),    s = K ⌊t/K⌋       (eq. 3, 4, 7, 8)

K = 1 is plain training, K = ∞ trains the linearization at the first weights. The optimizer works on the
network's own weights θ; the displacement δ = θ − θ_s is read off them. So the network always holds the
current weights, and momentum, Adam's moments, weight decay and schedules of the learning rate know nothing
of the linearizations: they go on through each of them.

Source: Goldwaser, Ge, "Understanding sparse feature updates in deep networks using iterative linearisation".
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from linnet.distributed import all_sum, apart, collective, from_first, world
from linnet.errors import InputError, LinnetError, ModelError, NumericalError, WeightsError
from linnet.fitting.fit import fit
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.solver import Solver
from linnet.optim.gradient_flow import Flow, gradient_flow
from linnet.params import call, flag, instance, integer, number, optional, refuse
from linnet.progress import Log, check_log, tell
from linnet.shown import Record, Shown
from linnet.spectrum.kernel_matrix import check_kernel, kernel_distance
from linnet.tangent.batch import Inputs, check_examples
from linnet.tangent.data import owned
from linnet.tangent.functional import OutputAdapter, check_output, tensors_by_name, without_wrapper
from linnet.tangent.inputs import tensorize
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.rules import Form
from linnet.tangent.selection import Selector, require_no_masks, select_parameters
from linnet.tree import map_tensors


@dataclass(frozen=True, repr=False)
class LinearizationReport(Record):
    """Feature updates and their measurements.

    Args:
        schedule: The schedule in words.
        steps: Optimization steps taken.
        updates: Steps after which the network was linearized again, in order.
        measured: (step, kind, value) of every measurement; kinds are ``"gap"`` (‖f − f_lin‖ / ‖f_lin − f₀‖),
            ``"drift"`` (kernel distance) and ``"gradient"`` (norm).
        notes: What a reader of the numbers must know.

    Example:
        >>> print(LinearizationReport("Every(4)", 9, (4, 8), ((4, "gap", 0.1), (8, "gap", 0.3))))
        Every(4): 9 steps, 2 feature updates, one in 4.0 steps
        gap: 2 measured, mean 0.2, largest 0.3 after step 8
    """

    schedule: str
    steps: int
    updates: Sequence[int]
    measured: tuple[tuple[int, str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def relinearizations(self) -> int:
        """Number of feature updates."""
        return len(self.updates)

    @property
    def gaps(self) -> tuple[tuple[int, float], ...]:
        """(step, linearity gap) of every measurement."""
        return tuple((step, value) for step, kind, value in self.measured if kind == "gap")

    @property
    def drifts(self) -> tuple[tuple[int, float], ...]:
        """(step, kernel distance) of every measurement."""
        return tuple((step, value) for step, kind, value in self.measured if kind == "drift")

    @property
    def mean_period(self) -> float | None:
        """Mean number of steps between updates; ``None`` without one."""
        return self.updates[-1] / len(self.updates) if self.updates else None

    def __str__(self) -> str:
        """A few lines for people."""
        period = self.mean_period
        often = "" if period is None else f", one in {period:.1f} steps"
        lines = [f"{self.schedule}: {self.steps} steps, {self.relinearizations} feature updates{often}"]
        for kind in dict.fromkeys(kind for _, kind, _ in self.measured):
            found = [(value, step) for step, k, value in self.measured if k == kind]
            mean, (largest, step) = sum(value for value, _ in found) / len(found), max(found)
            lines.append(
                f"{kind}: {len(found)} measured, mean {mean:.3g}, largest {largest:.3g} after step {step}"
            )
        return "\n".join([*lines, *self.notes])


# -- when features are updated ---------------------------------------------------------------------

LONGEST = 2**63  # steps; more are "never", which is written as None
Verdict = tuple[bool, float | None]  # whether features are due, and what was measured to find out


class Schedule(ABC):
    """Says after each step whether to linearize again: after ``most`` steps, or by what is measured."""

    # Goldwaser and Ge train with a fixed period K and leave adaptive schedules open (section 5.2).

    kind = ""  # of what is measured
    needs_batch = False  # whether it looks at the batch of the step

    def __init__(self, most: int | None) -> None:
        self.most = None if most is None else integer("most", most)
        self.known: dict[str, Any] = {}  # of the present linearization

    @abstractmethod
    def __repr__(self) -> str:
        """The schedule in words, by which a saved state knows it again."""

    def _judge(self, training: IterativeLinearization, loss: float) -> Verdict:
        """Look at a step."""
        return self.most is not None and training._age >= self.most, None


class Every(Schedule):
    """Linearize again after every K steps: fixed period iterative linearization."""

    # Source: Goldwaser, Ge, algorithm 1.

    def __repr__(self) -> str:
        return f"Every({self.most})"


class _Threshold(Schedule, ABC):
    """Due when something that is measured every so many steps is over a threshold."""

    def __init__(self, threshold: float, every: int, most: int | None) -> None:
        super().__init__(most)
        self.threshold, self.every = threshold, integer("every", every)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.threshold:g}, every={self.every})"

    @abstractmethod
    def _measure(self, training: IterativeLinearization) -> float | None:
        """What is compared with the threshold; ``None`` where it cannot be known."""

    def _judge(self, training: IterativeLinearization, loss: float) -> Verdict:
        """Due when the measure is over the threshold, or ``most`` steps are taken."""
        late, _ = super()._judge(training, loss)
        value = None if training._age % self.every else self._measure(training)
        return late or (value is not None and not value <= self.threshold), value


class OutputGap(_Threshold):
    """Linearize again when the linear model no longer describes the network.

    The measure is ‖f(θ₀ + δ) − f_lin‖ / ‖f_lin − f₀‖: what the linear model misses, as a share of what it
    predicts. A measurement costs about one linearized pass and one plain pass without gradients.

    Args:
        threshold: The largest gap that is put up with; 0.1 to 0.5 is a usual range.
        x: Examples on which it is measured; by default the batch of the step.
        every: Measure after so many steps, and again so many later.
        most: Linearize again after so many steps in any case.

    Raises:
        DataError: If x is not finite.
        InputError: If a number is not positive.

    Example:
        >>> OutputGap(0.2, every=5)
        OutputGap(0.2, every=5)
    """

    kind = "gap"

    def __init__(
        self, threshold: float, x: Inputs | None = None, every: int = 10, most: int | None = None
    ) -> None:
        number("threshold", threshold, above=0, remedy="pass threshold=0.2")
        if x is not None:
            check_examples(x)
        super().__init__(threshold, every, most)
        self.x, self.needs_batch = x, x is None

    def _measure(self, training: IterativeLinearization) -> float | None:
        x = training._batch if self.x is None else self.x
        return None if x is None else training.linearization.gap(x)


class KernelDrift(_Threshold):
    """Linearize again when the network's tangent kernel has moved away from the one in use.

    The measure is the kernel distance 1 − ⟨K₀, K⟩ / (‖K₀‖ ‖K‖) between the kernel at θ₀ and at θ₀ + δ. A
    measurement costs a Gram matrix of x, so a few dozen examples are enough.

    Args:
        threshold: The largest distance that is put up with, below 1; 0.01 to 0.2 is a usual range.
        x: Examples on which the kernels are evaluated.
        every: Measure after so many steps, and again so many later.
        most: Linearize again after so many steps in any case.
        form: Which kernel: ``"trace"``, ``"full"`` or ``"sum"``.

    Raises:
        DataError: If x is not finite.
        InputError: If a number is not positive, or ``outputs`` is something else.

    Source:
        The distance: Fort et al., NeurIPS 2020, section 4, which found that it grows fastest early.

    Example:
        >>> KernelDrift(0.05, torch.ones(4, 2))
        KernelDrift(0.05, every=10)
    """

    kind = "drift"

    def __init__(
        self,
        threshold: float,
        x: Inputs,
        every: int = 10,
        most: int | None = None,
        form: Form = "trace",
    ) -> None:
        # 1 is the distance of orthogonal kernels
        number("threshold", threshold, above=0, below=1, remedy="pass threshold=0.05")
        check_kernel(form)
        x = tensorize(x)
        check_examples(x)
        super().__init__(threshold, every, most)
        self.x, self.form = owned(x), form

    def _measure(self, training: IterativeLinearization) -> float:
        lin = training.linearization
        if "start" not in self.known:
            self.known["start"] = lin.kernel(self.x, form=self.form)
        here = linearize(training.model, lin.parameter_names, training.output)
        return kernel_distance(self.known["start"], here.kernel(self.x, form=self.form))


class Converged(Schedule):
    """Linearize again when training on the present linearization has converged.

    With a convex loss each linearization is a convex problem; this is the "fully optimized"
    variant. The gradient's norm is that of the batch of the step, so use full batches with it, or a
    ``loss`` to be reached.

    Args:
        gradient: Converged when the gradient's norm has fallen to this share of what it was at the first
            step of the linearization (at the last evaluation of a step, for LBFGS); ``None`` not to look
            at it.
        loss: Converged when the loss is at most this.
        most: Linearize again after so many steps in any case.

    Raises:
        InputError: If a number is not positive, or no criterion is given.

    Source:
        Goldwaser, Ge, section 4.2, figure 5.

    Example:
        >>> Converged(gradient=1e-3, most=10_000)
        Converged(gradient=0.001, loss=None, most=10000)
    """

    kind = "gradient"

    def __init__(
        self, gradient: float | None = 1e-3, loss: float | None = None, most: int | None = None
    ) -> None:
        optional(number, "gradient", gradient, above=0, remedy="pass gradient=1e-3")
        optional(number, "loss", loss, remedy="pass the loss to be reached")
        if gradient is None and loss is None:
            raise InputError("gradient and loss are None", "at least one of them", "pass gradient=1e-3")
        super().__init__(most)
        self.gradient, self.loss = gradient, loss

    def __repr__(self) -> str:
        return f"Converged(gradient={self.gradient}, loss={self.loss}, most={self.most})"

    def _judge(self, training: IterativeLinearization, loss: float) -> Verdict:
        """Due when a criterion is met, or ``most`` steps are taken."""
        due, _ = super()._judge(training, loss)
        due = due or (self.loss is not None and loss <= self.loss)
        if self.gradient is None:
            return due, None
        norm = gradient_norm(training._parameters.values())
        due = due or norm <= self.gradient * self.known.setdefault("first", norm)
        return due, norm if due else None


def schedule_of(period: int | float | Schedule | None) -> Schedule:
    """The schedule that a ``period=`` stands for."""
    if isinstance(period, Schedule):
        return period
    if period is None or (isinstance(period, float) and period == math.inf):
        return Every(None)
    whole = isinstance(period, int) or (isinstance(period, float) and period.is_integer())
    if isinstance(period, bool) or not whole or period < 1 or period > LONGEST:
        refuse(
            "period",
            period,
            "a whole number of steps K ≥ 1, None for never, or a schedule such as OutputGap(0.2)",
            "pass period=1 for plain training, period=None for linearized training",
        )
    return Every(int(period))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of all gradients together, 0 where there is none."""
    squares = [p.grad.detach().double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


# -- training --------------------------------------------------------------------------------------

INDEPENDENT = (
    "the loss that closure returned does not depend on its module",
    "a loss of closure(module), computed from module(x) with gradients on",
    "call the module that the closure is given, not the network, and detach nothing",
)


def made_optimizer(
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer], parameters: dict[str, nn.Parameter]
) -> Optimizer:
    """The optimizer of some parameters, once it is known to train exactly these."""
    expected = "a function from a list of parameters to an optimizer"
    remedy = "pass make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
    if not callable(make_optimizer):
        refuse("make_optimizer", make_optimizer, expected, remedy)
    made = call("make_optimizer", make_optimizer, [*parameters.values()], expected=expected, remedy=remedy)
    optimizer: Optimizer = instance("make_optimizer(...)", made, Optimizer, "a torch.optim.Optimizer", remedy)
    used = {id(p): tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p): name for name, p in parameters.items()}
    others = [shape for key, shape in used.items() if key not in ours]
    missing = [name for key, name in ours.items() if key not in used]
    if others or missing:
        found = [f"has {len(others)} others, one of shape {others[0]}"] if others else []
        found += [f"lacks {missing[0]!r} ({len(missing)} in all)"] if missing else []
        raise InputError(
            f"the optimizer that make_optimizer returned {' and '.join(found)}",
            expected=f"exactly the {len(ours)} parameters it was given",
            remedy="make it from its argument, and choose parameters with params=",
        )
    return optimizer


def evaluates(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step needs the closure, as that of LBFGS does."""
    parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in parameters)


def checked_loss(loss: Any, steps: int) -> Tensor:
    """A closure's loss, if it can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"closure returned {kind}",
            expected="the loss, a tensor with one floating point number",
            remedy="end it with return loss, summed or averaged over the batch",
        )
    if not loss.requires_grad:
        raise InputError(*INDEPENDENT)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NumericalError(
            f"the loss is {value:g} after {steps} steps",
            expected="a finite loss",
            remedy="lower the learning rate; the weights are those before this step",
        )
    return loss


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Make the gradients their mean over all processes, zero where one process has none."""
    gradients = []
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients.append(p.grad)
    all_sum(gradients)
    for gradient in gradients:
        gradient /= world()[1]


Closure = Callable[[nn.Module], Tensor]
CLOSURE = "a function from a module to the loss of the batch"
SAVED = {"model", "linearization", "optimizer", "schedule", "steps", "age", "updates", "measured"}
_STOCHASTIC = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


class IterativeLinearization(Shown):
    """Trains a network through a sequence of its linearizations.

    ``step`` hands the module of the step to a closure, takes the loss it returns, differentiates it and
    lets the optimizer move the network's weights. The network's own ``model`` holds the weights θ₀ + δ after
    every step; nothing has to be synchronized.

    Mode. At K = 1 the module is the network itself, used as it is: in training mode BatchNorm takes the
    statistics of the batch and dropout is on, and every bit is that of a plain loop. A linearization is
    deterministic: BatchNorm uses its running statistics and dropout is off, whatever the network's mode, as
    by Goldwaser and Ge (appendix C). To compare K = 1 with larger K on equal terms, call ``model.eval()``. To
    refresh running statistics, pass data through the network in training mode and call ``relinearize``:
    each linearization takes over buffers and untracked parameters of the network.

    Precision. Since θ is what is kept, updates below its rounding are lost at every K alike, as in a plain
    loop; for very small learning rates use float64. A network with outputs (N,) gives (N, 1) once it is
    linearized.

    Processes. A network inside ``DistributedDataParallel`` is trained by all processes, each with batches of
    its own: gradients are their mean over the processes, as at K = 1, and features are updated on all when
    the first says so.

    Args:
        model: The network to train, in place.
        make_optimizer: Makes the optimizer from a list of parameters, for example
            ``lambda p: torch.optim.SGD(p, lr=0.1)``; it must train all of them and no others. ``None`` if
            only ``solve`` is used. The optimizer is at hand as ``optimizer``, for schedulers and hooks
            (``register_step_pre_hook`` sees the gradients of the step: clip or reduce them there).
        period: K ≥ 1; ``None`` or infinity for never; or a schedule: ``OutputGap``, ``KernelDrift`` or
            ``Converged``.
        params: Which parameters are trained, as in ``linnet.linearize``, as a whole: entries of them stay
            where a hook zeroes their gradients and no weight decay moves them.
        output: How to turn the network's result into a tensor, as in ``linnet.linearize``. At K = 1 the
            closure gets the network itself and with it the result as it is.
        record_gap: Measure the linearity gap before each linearization, on the batch of the last step.
        log: Called after every step with a dict of numbers and the step: the loss before it, the feature
            updates so far, and what was measured; of several processes by the first alone.

    Attributes:
        model: The network; it holds the current weights.
        optimizer: The optimizer, over the network's own parameters.
        schedule: When features are updated.
        steps: Steps taken.

    Raises:
        InputError: If an argument is wrong, or the optimizer does not train the selected parameters.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 10)[:, None] * torch.ones(1, 2)
        >>> training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=0.01), period=5)
        >>> for _ in range(20):
        ...     loss = training.step(lambda module: (module(x) - x[:, :1]).square().sum())
        >>> print(training.report)
        Every(5): 20 steps, 4 feature updates, one in 5.0 steps
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
        period: int | float | Schedule | None,
        params: Selector = None,
        output: OutputAdapter = None,
        record_gap: bool = False,
        log: Log | None = None,
    ) -> None:
        if isinstance(model, Linearized):
            raise InputError("model is linearized already", "the network itself", "pass the network")
        check_output(output)
        flag("record_gap", record_gap)
        self.model, self.schedule = model, schedule_of(period)
        self.output, self.record_gap = output, record_gap
        network = without_wrapper(model)
        self._shared = False
        if isinstance(network, nn.parallel.DistributedDataParallel):
            network, self._shared = network.module, world()[1] > 1
        require_no_masks(network, params)
        names = select_parameters(network, params)
        every = dict(network.named_parameters())
        self._network, self._parameters = network, {name: every[name] for name in names}
        for name, p in self._parameters.items():
            if not p.requires_grad:
                raise InputError(
                    f"params selects {name!r}, which does not require a gradient",
                    expected="trainable parameters",
                    remedy="call model.requires_grad_(True), or leave it out with params=",
                )
        self.optimizer = None if make_optimizer is None else made_optimizer(make_optimizer, self._parameters)
        self.steps, self._age, self._log = 0, 0, check_log(log)
        self._batch: Inputs | None = None
        self._updates: list[int] = []
        self._measured: list[tuple[int, str, float]] = []
        self._lin: Linearized | None = None if self._is_plain else self._linearized()
        self._waiting: RemovableHandle | None = None  # for another loop to take a step

    def _shown(self) -> dict[str, Any]:
        known = {"P": sum(p.numel() for p in self._parameters.values()), "schedule": repr(self.schedule)}
        return {**known, "steps": self.steps, "new features": len(self._updates), "report": str(self.report)}

    # -- training --------------------------------------------------------------------------------

    def step(self, closure: Closure) -> Tensor:
        """One step: loss of the current module, gradient, update; then new features if they are due.

        Args:
            closure: Takes the module of this step and returns the loss, a scalar; it need not call
                ``backward``. At K = 1 the module is the network, otherwise the current ``Linearized``,
                the same object at every step. Optimizers that evaluate several times (LBFGS) call it
                several times.

        Returns:
            The loss before the update, detached, a scalar.

        Raises:
            InputError: If the closure returns no scalar, or a loss that does not depend on the module.
            NumericalError: If the loss is not finite; the weights are those of before (of the last
                evaluation, for an optimizer that evaluates several times).
        """
        optimizer = self._ready(closure)
        self._end_waiting()
        with collective("a step of IterativeLinearization", self._shared), self._only_selected():
            if evaluates(optimizer):
                step: Any = optimizer.step
                value = step(lambda: self._evaluate(closure))
            else:
                value = self._evaluate(closure)
                optimizer.step()
        loss = torch.as_tensor(value).detach()
        self._count(float(loss))
        return loss

    def backward(self, closure: Closure) -> Tensor:
        """The first half of a step: gradients for an optimizer that another loop steps.

        They are added to those that are there, as by ``loss.backward()``. When ``optimizer`` takes its step,
        whoever calls it, the step is counted and features are updated if they are due.

        Args:
            closure: As for ``step``.

        Returns:
            The loss, detached, a scalar.

        Raises:
            InputError: If the closure returns no scalar, or a loss that does not depend on the module.
            NumericalError: If the loss is not finite.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            >>> x = torch.linspace(-1, 1, 10)[:, None] * torch.ones(1, 2)
            >>> training = IterativeLinearization(net, lambda p: torch.optim.SGD(p, lr=0.01), period=5)
            >>> for _ in range(10):
            ...     training.optimizer.zero_grad()
            ...     loss = training.backward(lambda module: (module(x) - x[:, :1]).square().sum())
            ...     training.optimizer.step()
            >>> print(training.report)
            Every(5): 10 steps, 2 feature updates, one in 5.0 steps
        """
        optimizer = self._ready(closure)
        with collective("a step of IterativeLinearization", self._shared), self._only_selected():
            loss = self._evaluate(closure, fresh=False)

        def after(*_: Any) -> None:
            self._end_waiting()
            self._count(float(loss))

        self._end_waiting()
        self._waiting = optimizer.register_step_post_hook(after)
        return loss

    def _end_waiting(self) -> None:
        """No step of another loop is waited for any more."""
        if self._waiting is not None:
            self._waiting.remove()
        self._waiting = None

    def _ready(self, closure: Any) -> Optimizer:
        """The optimizer, or an error where there is none or the closure is no function."""
        if self.optimizer is None:
            raise InputError(
                "make_optimizer was None",
                expected="an optimizer to take steps with",
                remedy="pass make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), or use solve(data)",
            )
        if not callable(closure):
            refuse("closure", closure, CLOSURE, "pass step(lambda module: loss(module(x), y))")
        return self.optimizer

    def _count(self, loss: float) -> None:
        """One step more."""
        self.steps += 1
        known = len(self._measured)
        if self._is_plain:
            self._updates.append(self.steps)
        else:
            self._age += 1
            self._finish_step(loss)
        if self._log is not None and not (self._shared and world()[0]):
            measured = {kind: value for _, kind, value in self._measured[known:]}
            values = {"loss": loss, "feature updates": float(len(self._updates)), **measured}
            tell(self._log, values, self.steps, "the step is complete, the weights are the new ones")

    def _evaluate(self, closure: Closure, fresh: bool = True) -> Tensor:
        """Loss and gradients at the present weights; gradients end up on the network's parameters."""
        assert self.optimizer is not None
        if fresh:
            self.optimizer.zero_grad()
        with torch.enable_grad():
            if self._lin is None or self._is_plain:
                loss = checked_loss(call("closure", closure, self.model, expected=CLOSURE), self.steps)
                loss.backward()
                return loss.detach()
            lin = self.linearization
            with self._watched(lin):
                loss = checked_loss(call("closure", closure, lin, expected=CLOSURE), self.steps)
            loss.backward()
        if self._shared:
            average_gradients([delta for delta in lin.delta.values() if delta.requires_grad])
        reached = False
        for name, delta in lin.delta.items():
            # δ = θ − θ₀, so the gradient in θ is the gradient in δ
            gradient, delta.grad, p = delta.grad, None, self._parameters[name]
            reached = reached or gradient is not None
            if gradient is not None and p.requires_grad:
                p.grad = gradient if p.grad is None else p.grad + gradient
        if not reached:
            self.optimizer.zero_grad()
            raise InputError(*INDEPENDENT)
        return loss.detach()

    def _finish_step(self, loss: float) -> None:
        """Ask the schedule, and update the features if it says so."""
        with apart():  # by the batch of this process
            verdict = self.schedule._judge(self, loss)
        if self._shared:
            verdict = from_first(verdict, next(iter(self._parameters.values())).device)
        due, value = verdict
        if value is not None:
            self._measured.append((self.steps, self.schedule.kind, value))
        if due:
            if self.record_gap and self.schedule.kind != "gap" and self._batch is not None:
                self.gap(self._batch)
            self.relinearize()
        self._batch = None

    @torch.no_grad()
    def relinearize(self) -> None:
        """Linearize at the present weights, buffers and untracked parameters: θ₀ ← θ, δ ← 0.

        The schedule calls this; by hand it is for schedules of one's own (with ``period=None``) and after
        the running statistics of the network have changed. At K = 1 there is nothing to do.

        Raises:
            ModelError: If the weights are not finite.
        """
        if self._lin is None:
            return
        self._check_place(self._lin)
        self._lin.relinearize(at=self._network)
        if self._age:
            self._updates.append(self.steps)
        self._age = 0
        self.schedule.known = {}

    def solve(
        self,
        data: Any,
        ridge: float | str = 1.0,
        *,
        learning_rate: float = 1.0,
        targets: Tensor | None = None,
        solver: Solver = "auto",
        memory: str | int | None = None,
    ) -> LinearFit | Flow:
        """Solve the linearization at the present weights exactly for the squared loss; then linearize again.

            θ ← θ − η (φᵀφ + ρI)⁻¹ φᵀ (f_θ(X) − Y)                                     (eq. 6; eq. 5 at ρ = 0)

        This is a step of the damped Gauss-Newton algorithm. It counts as one step and one update of features.

        Args:
            data: An (x, y) pair, a Dataset, a DataLoader or batches, as for ``linnet.fit``.
            ridge: The damping ρ (λ in the source) of ½ Σᵢ ‖tᵢ − f(xᵢ)‖² + ½ ρ‖δ‖²; a criterion that chooses
                it (``"loo"``, ``"gcv"``, ``"evidence"``); or 0 for the solution of smallest ‖δ‖.
            learning_rate: η, the share of the solution that is taken.
            targets: Targets (N, C) to use instead of those made from y.
            solver: As of ``linnet.fit``; not used where ρ = 0.
            memory: Budget such as ``"4GB"``; by default half of what is available.

        Returns:
            The fit of this linearization, with all that a fit knows; for ρ = 0 the gradient flow to its end.

        Raises:
            NumericalError: If the solution is not finite; the weights are those of before.

        Example:
            >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            >>> x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
            >>> newton = IterativeLinearization(net, None, period=1)
            >>> for _ in range(5):
            ...     fit = newton.solve((x, x.abs()), ridge=0.01)
            >>> bool(((net(x) - x.abs()).abs() < 0.2).all())
            True
        """
        number("learning_rate", learning_rate, above=0, remedy="pass learning_rate=1.0")
        if self._lin is None:
            self._lin = self._linearized()
        else:
            self.relinearize()
        lin = self.linearization
        solved: LinearFit | Flow
        if isinstance(ridge, int | float) and not isinstance(ridge, bool) and ridge == 0:
            solved = gradient_flow(lin, data, [float("inf")], targets=targets, memory=memory)
            delta = solved.delta(float("inf"))
        else:
            fitted = fit(lin, data, "squared", ridge=ridge, targets=targets, solver=solver, memory=memory)
            solved, delta = fitted, fitted.delta
        if not all(torch.isfinite(change).all() for change in delta.values()):
            raise NumericalError(
                f"the exact solution at ridge={ridge!r} is not finite",
                expected="finite weights",
                remedy="pass a larger ridge",
            )
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.add_(delta[name], alpha=learning_rate)
        self.steps, self._age = self.steps + 1, 1
        self.relinearize()
        if self._is_plain:
            self._lin = None
        return solved

    # -- what it knows ---------------------------------------------------------------------------

    @property
    def _is_plain(self) -> bool:
        """Whether this is plain training, K = 1."""
        return isinstance(self.schedule, Every) and self.schedule.most == 1

    @property
    @torch.no_grad()
    def linearization(self) -> Linearized:
        """The current linearization, its δ set to θ − θ₀; at K = 1 one at the present weights, made now.

        What is fitted on it keeps its own θ₀ when training goes on; its own δ and θ₀ move along.
        """
        if self._lin is None:
            return self._linearized()
        self._check_place(self._lin)
        theta0 = self._lin.theta0
        for name, delta in self._lin.delta.items():
            torch.sub(self._parameters[name], theta0[name], out=delta)
        return self._lin

    def gap(self, x: Inputs) -> float:
        """The linearity gap ‖f(θ) − f_lin‖ / ‖f_lin − f₀‖ of the present weights; it goes into the report.

        Args:
            x: Examples on which it is measured.

        Returns:
            The gap; 0 right after a linearization.

        Raises:
            ModelError: If the network cannot take x.
        """
        value = self.linearization.gap(x)
        self._measured.append((self.steps, "gap", value))
        return value

    @property
    def report(self) -> LinearizationReport:
        """Feature updates so far, with their measurements."""
        return LinearizationReport(
            repr(self.schedule), self.steps, tuple(self._updates), tuple(self._measured), self._notes()
        )

    def _notes(self) -> tuple[str, ...]:
        """Remarks on what the network's mode means for the numbers."""
        noisy = sorted(
            {type(m).__name__ for m in self._network.modules() if isinstance(m, _STOCHASTIC) and m.training}
        )
        if self._is_plain or not noisy:
            return ()
        return (f"in training mode: {', '.join(noisy)}; linearizations use them in evaluation mode",)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on bit by bit: weights, buffers, θ₀, the optimizer, the report.

        As with torch's own, tensors are not copied; the random state of torch, schedulers and data loaders
        are the caller's. ``torch.load(..., weights_only=True)`` reads it.

        Returns:
            A dict for ``torch.save``.
        """
        point = {} if self._lin is None else tensors_by_name(self._lin.model)
        return {
            "model": self._network.state_dict(),
            "linearization": {name: t.detach() for name, t in point.items()} or None,
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "schedule": {"name": repr(self.schedule), "known": self.schedule.known},
            "steps": self.steps,
            "age": self._age,
            "updates": list(self._updates),
            "measured": list(self._measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave, into a trainer of the same network and optimizer.

        The schedule is this trainer's own: K may be another one than before; the linearization in use
        stays until the schedule replaces it. Weights are loaded to where the network is.

        Args:
            state: From ``state_dict``.

        Raises:
            WeightsError: If the state is of something else.
        """
        missing = sorted(SAVED - set(state if isinstance(state, Mapping) else ()))
        if missing:
            raise WeightsError(
                f"state lacks {missing}",
                expected="a state_dict of IterativeLinearization",
                remedy="pass what state_dict() of a trainer returned",
            )
        if (state["optimizer"] is None) != (self.optimizer is None):
            raise WeightsError(
                f"state has {'no' if state['optimizer'] is None else 'an'} optimizer, unlike this trainer",
                expected="the state of a trainer with the same make_optimizer",
                remedy="make the trainer as the saved one was made",
            )
        kept, known = copy.deepcopy(self.state_dict()), self.schedule.known
        try:
            self._require_groups(state["optimizer"])
            self._load(state)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, LinnetError) as error:
            self._load(kept)
            self.schedule.known = known
            told = (str(error).splitlines() or [""])[-1].strip()
            raise WeightsError(
                f"the state does not fit the trainer: {told or type(error).__name__}",
                expected="the state of a trainer of the same architecture with the same make_optimizer",
                remedy="make the trainer as the saved one was made",
            ) from error

    def _require_groups(self, state: Any) -> None:
        """Raise unless the settings of the saved parameter groups are those of this optimizer's."""
        if self.optimizer is None:
            return
        for own, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=False):
            if lacks := sorted(set(own) - set(saved)):
                raise ValueError(f"its parameter groups have no {', '.join(lacks)}")

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take everything from a state."""
        self._network.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if self._lin is not None:
            self._lin.relinearize(at=state["linearization"] or self._network)
        self.steps, self._age = int(state["steps"]), int(state["age"]) if state["linearization"] else 0
        self._updates, self._measured = list(state["updates"]), list(state["measured"])
        same = state["schedule"]["name"] == repr(self.schedule)
        place = next(iter(self._parameters.values())).device
        self.schedule.known = map_tensors(lambda t: t.to(place), state["schedule"]["known"]) if same else {}

    # -- inside ----------------------------------------------------------------------------------

    def _linearized(self) -> Linearized:
        """A linearization at the network's present weights."""
        return linearize(self._network, list(self._parameters), self.output)

    def _check_place(self, lin: Linearized) -> None:
        """Raise if the network changed type or device since it was linearized."""
        for name, theta in lin.theta0.items():
            p = self._parameters[name]
            if p.dtype != theta.dtype or p.device != theta.device:
                raise ModelError(
                    f"{name} is {p.dtype} on {p.device}, its linearization {theta.dtype} on {theta.device}",
                    expected="a network that stays where it is",
                    remedy="move it first, then make IterativeLinearization; state_dict carries a run over",
                )

    @contextlib.contextmanager
    def _only_selected(self) -> Iterator[None]:
        """Other parameters of the network get no gradient; they are put back as they were."""
        ours = {id(p) for p in self._parameters.values()}
        others = [p for p in self._network.parameters() if p.requires_grad and id(p) not in ours]
        try:
            for p in others:
                p.requires_grad_(False)
            yield
        finally:
            for p in others:
                p.requires_grad_(True)

    @contextlib.contextmanager
    def _watched(self, lin: Linearized) -> Iterator[None]:
        """Note the batch that the closure gives to the module, if it is needed."""
        if not (self.record_gap or self.schedule.needs_batch):
            yield
            return

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._batch = kwargs or (args[0] if len(args) == 1 else args)

        handle = lin.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
