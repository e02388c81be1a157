"""Schedules of iterative linearization: fixed periods, and criteria that adapt the period.

Goldwaser and Ge train with a fixed period K and leave adaptive schedules open ("Understanding
sparse feature updates in deep networks using iterative linearisation", section 5.2). A ``Schedule`` looks
at each step and says whether the network is to be linearized again at the weights it has reached.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.params import instance, integer, number, refuse
from linnet.spectrum.kernel_matrix import check_kernel, kernel_distance
from linnet.tangent.batch import Inputs, check_examples
from linnet.tangent.door import tensorize
from linnet.tangent.gather import owned
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.rules import Form
from linnet.tree import node

LONGEST = 2**63  # steps; more are "never", which is written as None


@dataclass(frozen=True)
class Moment:
    """State of training after a step.

    Args:
        lin: The current linearization, its δ up to date.
        model: The network at the weights reached, θ₀ + δ.
        x: The batch that the step's closure gave to the module last; ``None`` if nothing needed it.
        age: Steps since the features were updated, the present one included.
        loss: The step's loss, before the update.
        gradient: Computes the norm of the step's gradient.
        output: How to turn the network's result into a tensor, as in ``linnet.linearize``.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> Moment(linearize(net), net, None, age=3, loss=0.5, gradient=lambda: 0.1).age
        3
    """

    lin: Linearized
    model: nn.Module
    x: Inputs | None
    age: int
    loss: float
    gradient: Callable[[], float]
    output: Any = None


@node()
@dataclass(frozen=True)
class Decision:
    """Decision of a schedule after a step.

    Args:
        due: Whether to linearize again now.
        kind: What was measured, ``""`` for nothing.
        value: Its value.

    Example:
        >>> Decision(due=True, kind="gap", value=0.3).due
        True
    """

    due: bool
    kind: str = ""
    value: float = math.nan


class Schedule(abc.ABC):
    """Decides after each step whether to linearize again.

    Attributes:
        needs_batch: Whether it wants ``Moment.x``.

    Example:
        >>> class EveryTen(Schedule):
        ...     def judge(self, moment):
        ...         return Decision(moment.age >= 10)
    """

    needs_batch: bool = False

    @abc.abstractmethod
    def judge(self, moment: Moment) -> Decision:
        """Look at a step.

        Args:
            moment: Where training stands.

        Returns:
            Whether to linearize again, and what was measured to find out.
        """

    def restart(self) -> None:
        """Forget what was known of the last linearization; called whenever there is a new one."""
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume a run; by default empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave; an empty state stands for a new linearization."""
        instance("state", state, Mapping, "what state_dict() returned", "pass that")


class Every(Schedule):
    """Linearize again after every K steps: fixed period iterative linearization."""

    # Source: Goldwaser, Ge, algorithm 1.

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def __repr__(self) -> str:
        return f"Every({self.steps})"

    def judge(self, moment: Moment) -> Decision:
        """Due when K steps are taken."""
        return Decision(self.steps is not None and moment.age >= self.steps)


class _Measured(Schedule):
    """Due when something is over a threshold, measured every so many steps, or when ``most`` are taken."""

    kind: str

    def __init__(self, threshold: float, every: int, most: int | None) -> None:
        self.threshold, self.every, self.most = threshold, integer("every", every), _checked_most(most)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.threshold:g}, every={self.every})"

    @abc.abstractmethod
    def _measure(self, moment: Moment) -> float | None:
        """What is compared with the threshold; ``None`` where it cannot be known."""

    def judge(self, moment: Moment) -> Decision:
        """Due when the measure is over the threshold, or ``most`` steps are taken."""
        require_moment(moment)
        late = self.most is not None and moment.age >= self.most
        value = None if moment.age % self.every else self._measure(moment)
        if value is None:
            return Decision(late)
        return Decision(late or not value <= self.threshold, self.kind, value)


class OutputGap(_Measured):
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

    def _measure(self, moment: Moment) -> float | None:
        """The gap on the examples, or on the batch of the step."""
        x = moment.x if self.x is None else self.x
        return None if x is None else moment.lin.gap(x)


class KernelDrift(_Measured):
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
        self._start: Tensor | None = None

    def _measure(self, moment: Moment) -> float:
        """The distance of the kernels at θ₀ and at the weights reached."""
        if self._start is None:
            self._start = moment.lin.kernel(self.x, form=self.form)
        here = linearize(moment.model, moment.lin.parameter_names, moment.output)
        return kernel_distance(self._start, here.kernel(self.x, form=self.form))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget the kernel at the last θ₀; it is computed again when it is needed."""
        instance("state", state, Mapping, "what state_dict() returned", "pass that")
        self._start = None


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

    def __init__(
        self, gradient: float | None = 1e-3, loss: float | None = None, most: int | None = None
    ) -> None:
        if gradient is not None:
            number("gradient", gradient, above=0, remedy="pass gradient=1e-3")
        if loss is not None:
            number("loss", loss, remedy="pass the loss to be reached")
        if gradient is None and loss is None:
            raise InputError("gradient and loss are None", "at least one of them", "pass gradient=1e-3")
        self.gradient, self.loss, self.most = gradient, loss, _checked_most(most)
        self._first: float | None = None

    def __repr__(self) -> str:
        return f"Converged(gradient={self.gradient}, loss={self.loss}, most={self.most})"

    def judge(self, moment: Moment) -> Decision:
        """Due when a criterion is met, or ``most`` steps are taken."""
        require_moment(moment)
        done = self.most is not None and moment.age >= self.most
        done = done or (self.loss is not None and moment.loss <= self.loss)
        if self.gradient is None:
            return Decision(done)
        norm = moment.gradient()
        if self._first is None:
            self._first = norm
        done = done or norm <= self.gradient * self._first
        return Decision(done, "gradient", norm) if done else Decision(done)

    def state_dict(self) -> dict[str, Any]:
        """The gradient's norm at the first step of the present linearization."""
        return {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that norm back."""
        instance("state", state, Mapping, "what state_dict() returned", "pass that")
        first = state.get("first")
        self._first = None if first is None else number("state['first']", first, least=0)


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


def require_moment(moment: Any) -> None:
    """Raise unless it is where training stands."""
    instance("moment", moment, Moment, "a linnet.optim.Moment", "let IterativeLinearization.step make it")


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """The norm of all gradients together, 0 where there is none."""
    squares = [p.grad.detach().double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _checked_most(most: int | None) -> int | None:
    """A largest number of steps, if there is one."""
    return None if most is None else integer("most", most)
