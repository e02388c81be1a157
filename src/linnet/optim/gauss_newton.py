"""The Gauss-Newton optimizer of Botev (2020): curvature by layers, step sizes from the exact matrix.

    d = −(G̃ + (λ + ζ)I)⁻¹ ∇E,    α = −dᵀ∇E / dᵀ(G + (λ + τ)I)d,    θ ← θ + α d        (eq. 4.16 to 4.23)

Source: Botev, "The Gauss-Newton matrix for deep learning models and its applications", 2020, section 4.4;
Botev, Ritter, Barber, ICML 2017; Martens and Grosse, ICML 2015.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from linnet.curvatures.treatments import Structure
from linnet.distributed import collective, world
from linnet.errors import InputError, NumericalError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.factorize import is_finite
from linnet.optim.gauss_newton_inverse import DampingSearch, Inverse, Undamped, adapted, hopeless
from linnet.optim.gauss_newton_model import (
    LinearizedBatch,
    Network,
    OnePass,
    Pair,
    QuadraticModel,
    average_of,
    combined,
    evaluated,
    given_gradient,
    in_parts,
    norm_of,
    put,
    remember,
    require_alike,
    require_mean,
    with_pending,
)
from linnet.optim.gauss_newton_settings import (
    Damping,
    GaussNewtonOptions,
    StepReport,
    check_given,
    checked_damping,
    checked_group,
    checked_settings,
    checked_state,
    parameters_of,
)
from linnet.params import number, tensor
from linnet.progress import tell
from linnet.tangent.batch import Inputs, batch_size, concatenate
from linnet.tangent.data import examples, owned
from linnet.tangent.functional import Functional, tensors_by_name, without_wrapper
from linnet.tangent.inputs import taken
from linnet.tangent.modes import environment_kept
from linnet.tangent.preflight import warn_of_scale
from linnet.tangent.selection import require_no_masks

RAISE = 4.0  # what a rejected step multiplies τ and ζ by
Closure = Callable[[], Any]
Measured = tuple[float, Tensor, int]


class GaussNewton(torch.optim.Optimizer):
    """Trains a network with curvature; its defaults need no tuning.

    Each step takes the gradient of the mean loss, adds the batch to an exponential average of the curvature
    G̃, and goes along d = −(G̃ + (λ + ζ)I)⁻¹∇E as far as the exact Gauss-Newton matrix of the batch says
    (one product J d). Every 5 steps ρ = ΔE / Δq is measured, and τ falls by ω if ρ > ¾ and rises by 1/ω if
    ρ < ¾ (Botev 2020 prints ρ where τ is meant); every 20 steps ζ moves to whichever of ωζ, ζ, ζ/ω gives
    the lowest q.

    It is a ``torch.optim.Optimizer``: ``param_groups`` (each with ``lr``, a factor on the step, and
    ``weight_decay``), schedulers of ``lr``, ``add_param_group`` and ``state_dict`` work as ever. Only
    ``step`` takes the batch: the curvature needs inputs and targets, not just gradients. Loops that call
    ``step()`` or ``step(closure)`` themselves name it by ``accumulate(x, y)`` where they compute the loss.
    Weight decay is the objective's: E = mean loss + ½ λ‖θ‖². It is in gradient, step size and curvature;
    where groups have several λ, a layer's block is inverted with the mean of its own.

    Mode. Loss and gradient use the network in the mode it is in: in training mode BatchNorm takes the
    statistics of the batch and dropout is on. Curvature, step size and noise use a frozen copy in evaluation
    mode, which follows weights and buffers. ρ is measured with the same random numbers, and leaves running
    statistics as they were.

    Precision. The curvature and J d are computed in the parameters' own type whatever autocast says, factors
    and inner products in float32 or wider. Run under ``torch.autocast`` and loss and gradient are computed
    in its type. With a ``GradScaler`` pass gradients in: ``scaler.scale(loss).backward();
    scaler.step(optimizer, x, y, loss=float(loss))``.

    Large batches. ``accumulate(x, y)`` adds examples to the batch of the next step; ``examples=`` bounds how
    many are differentiated at once.

    Several processes. Given a ``DistributedDataParallel``, losses, gradients, factors and products are summed
    over the processes, and each inverts some of the layers and applies them for all.

    A step that leads to a loss that is not finite, or absurdly high, is taken back with its buffers, τ and ζ
    are quadrupled, and training goes on; the report says so. Parameters frozen on the way stay as they are;
    those that were frozen when the optimizer was made are not trained.

    Args:
        model: The network to train, in place.
        likelihood: What its outputs mean; the loss is its mean negative log-likelihood.
        structure: ``"kfac"``, ``"kfra"``, ``"ekfac"``, ``"diagonal"``, ``"block"``, ``"full"`` (tiny
            networks), or a mapping, as in :func:`linnet.curvature`.
        expectation: As in :func:`linnet.curvature`. By default it is ``"exact"`` for "block" and "full", and
            otherwise ``"mc"``: one backward pass a step, however many outputs there are. With "kfac" that is
            KFAC (Martens and Grosse 2015), and ``"exact"`` is KFLR; "kfra" has a recursion of its own.
        damping: τ and ζ at the start, as one number or a :class:`~linnet.optim.Damping`; by default the best
            of a grid at the first step. They move on from there; 0 stays 0.
        weight_decay: λ.
        **options: What follows, by name.
        lr: Factor on the step that the quadratic model calls best; for schedulers.
        momentum: Whether each step is the best combination of the new direction and the step before.
        average: Decay of the curvature's exponential average from batch to batch, 0.95.
        inverse_period: Steps between two inversions of the curvature, once as many have been taken; 5.
        sharing: How weights shared over positions are counted, as in :func:`linnet.curvature`.
        params: Which parameters are trained, as in :func:`linnet.linearize`, as a whole: entries of them stay
            where a hook zeroes their gradients and no weight decay moves them.
        output: How to turn the network's result into a tensor.
        seed: Seed of everything random.
        rejections: Rejected steps in a row after which training ends with an error, 5.
        limit: A mean loss that exceeds the first one by more than so many times its size rejects the step; 2.
        examples: Examples differentiated at once for the loss and the step size; all by default.
        log: Called after every step with the numbers of its report and the step; of several processes by the
            first alone.

    Attributes:
        damping: How τ and ζ move.
        tau: τ now; ``None`` before the first step if it is to be found.
        zeta: ζ now.
        steps: Steps taken.

    Raises:
        InputError: If an argument is wrong.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.randn(64, 2)
        >>> y = x.prod(1, keepdim=True)
        >>> optimizer = GaussNewton(net, linnet.likelihoods.Gaussian(variance=0.01), structure="kfra")
        >>> losses = [optimizer.step(x, y).loss for _ in range(30)]
        >>> losses[-1] < 0.1 * losses[0]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure = "kfac",
        expectation: str | None = None,
        damping: float | Damping | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[GaussNewtonOptions],
    ) -> None:
        check_likelihood(likelihood)
        self.damping, self.settings = checked_damping(damping), checked_settings(options)
        number("weight_decay", weight_decay, least=0)
        shared = isinstance(model, nn.parallel.DistributedDataParallel)
        called = cast(nn.Module, model.module) if shared else model
        network = without_wrapper(called)
        require_no_masks(network, self.settings.params)
        function = Functional(network, self.settings.params, self.settings.output)
        parameters = parameters_of(network, function.names)
        self._raw = network
        self._network = Network(called, parameters, self.settings.output, likelihood, shared)
        self._running = average_of(function, likelihood, structure, expectation, self.settings)
        self._once = OnePass(self._network, self._running, self._raw)
        self.tau, self.zeta = self.damping.tau, self.damping.zeta
        self.steps, self._failures, self._first = 0, 0, math.nan
        self._pending: list[Pair] = []
        self._left: dict[str, Tensor] = {}  # the parameters after the last step
        self._buffers: dict[str, Tensor] = {}  # of the last good loss, such as running statistics
        self._inverse: Inverse | None = None
        self._saved: Mapping[str, Any] | None = None
        self._fresh = True  # other processes have not been heard of yet
        groups = {"lr": self.settings.lr, "weight_decay": float(weight_decay)}
        with environment_kept():
            super().__init__(list(parameters.values()), groups)

    # -- as an optimizer -------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give some of the trained parameters settings of their own.

        Args:
            param_group: ``params``, and ``lr`` or ``weight_decay``. The parameters must be trained already;
                they leave the group they were in.

        Raises:
            InputError: If a parameter is not among the trained ones.
        """
        given = checked_group(param_group, list(self._network.parameters.values()))
        taken = {id(p) for p in given}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in taken]
        super().add_param_group({**param_group, "params": given})

    def accumulate(self, x: Inputs, y: Tensor) -> None:
        """Add examples to the batch of the next step, which differentiates them one part after the other.

        Args:
            x: Some examples.
            y: Their targets, (N, ...).

        Raises:
            DataError: If x is not finite.
        """
        x = examples(self._network.model, x)
        self._pending.append((owned(x), tensor("y", y, "targets (N, ...)", convert=False).clone()))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        x: Inputs = None,
        y: Tensor | None = None,
        *,
        closure: Closure | None = None,
        loss: float | Tensor | None = None,
    ) -> StepReport:
        """One update of the parameters.

        Args:
            x: A batch of N examples; what was accumulated belongs to it. Or the closure, as for torch's
                optimizers: ``step(closure)``.
            y: Targets, (N, ...).
            closure: Computes the mean loss of the N examples and its gradients, in ``.grad``, as for torch's
                optimizers; of several labels each the sum, and zero without one. By default the likelihood
                does. Weight decay is not to be part of it. It may call ``accumulate`` itself, as in loops of
                other libraries: then it is called once, and the likelihood says what the loss is after the
                step.
            loss: The mean loss of the batch, a scalar, where its gradients are in ``.grad`` already.

        Returns:
            What was done.

        Raises:
            DataError: If the batch is not finite or does not fit the likelihood.
            InputError: If there is no batch, or closure and loss are both given.
            NumericalError: If the loss is not finite where training starts, or too many steps in a row had to
                be taken back; the weights are those of before.
            ProcessGroupError: If another process has gone; an error on one is raised on all.
        """
        if closure is None and y is None and callable(x):
            x, closure = None, x
        with collective("GaussNewton.step", self._network.shared):
            if self._network.shared and self._fresh:
                require_alike(self._running, self.settings, (self.damping, self.defaults, self.steps))
            self._fresh = False
            try:
                report = self._step(x, y, closure, loss)
            finally:  # after an error too: examples that cannot be differentiated would stop all later steps
                self._pending = []
        if self.settings.log is not None and not (self._network.shared and world()[0]):
            known = report._asdict()
            values = {k: float(v) for k, v in known.items() if k != "step" and isinstance(v, int | float)}
            tell(self.settings.log, values, report.step, "the step is complete, the weights are the new ones")
        return report

    def _step(self, x: Inputs, y: Tensor | None, closure: Closure | None, loss: Any) -> StepReport:
        """One update of the parameters, of all processes together."""
        check_given(closure, loss)
        rng, first = self._network.random_state(), loss
        if closure is not None and x is None:
            known = len(self._pending)
            first = evaluated(closure)
            if len(self._pending) > known:  # the closure names the batch: it is not asked again
                closure, loss = None, first
        parts = self._batch(taken(self._network.model, x), y)
        self._resume(parts)
        if self.steps == 0:
            warn_of_scale(self._running.function, self._network.likelihood, parts[0][0])
        value, gradient, n = self._measure(parts, closure if first is None else None, first)
        rejected = not self._acceptable(value, gradient)
        if rejected and math.isfinite(value) and is_finite(gradient) and self._moved_by_others():
            rejected, self._first = False, value
        if rejected:
            self._take_back(value)
            rng = self._network.random_state()
            value, gradient, n = self._measure(parts, closure, None)
            if not (math.isfinite(value) and is_finite(gradient)):
                raise NumericalError(*hopeless(value))
            if self._failures and not self._acceptable(value):  # twice in a row: the batches are hard
                self._first = value
        self._failures += rejected
        self._network.remember_buffers(self._buffers)
        objective = value + self._penalty()
        decay = self._spread(lambda p: float(self._group(p)["weight_decay"]))
        if isinstance(decay, Tensor) or decay:
            gradient = gradient + decay * parameters_to_vector(self._network.parameters.values())
        function, shared = self._running.function, self._network.shared
        batch = LinearizedBatch(function, self._network.likelihood, parts, decay, shared, self._once.seen)
        self._follow(parts)
        self.steps += 1

        def score() -> float:
            return self._after(parts, closure if loss is None else None, rng)

        direction, model, alpha = self._directions(batch, gradient, score)
        self._first = value if math.isnan(self._first) else self._first
        assert self.tau is not None
        assert self.zeta is not None
        rate = self._rate()
        step, reduction = combined(direction, rate * alpha), model.change(rate * alpha, self.tau)
        due = self.damping.tau_period and self.steps % self.damping.tau_period == 0
        reference = score() if due and loss is not None else objective  # the same measure before and after
        zeta, rho = self.zeta, None
        self._apply(step)
        if due:
            rho = self._adapt(reference, reduction, score())
            rejected = rejected or rho == -math.inf
        self._failures = self._failures if rejected else 0
        return StepReport(
            self.steps, n, value, objective, rho, self.tau, zeta,
            float(alpha[0]), float(alpha[1]) if len(alpha) > 1 else 0.0, reduction,
            norm_of(gradient), norm_of(direction[0]), norm_of(step),
            rejected,
        )  # fmt: skip

    # -- loss ------------------------------------------------------------------------------------

    def _batch(self, x: Inputs, y: Tensor | None) -> list[Pair]:
        """The examples of the step, in the parts in which they are differentiated."""
        self._network.check_parameters(self._raw)
        if self.settings.params is None:
            self._network.tell_unfrozen(self._raw)
        return in_parts(with_pending(self._pending, x, y), self.settings.examples)

    def _measure(self, parts: list[Pair], closure: Closure | None, loss: Any) -> Measured:
        """Mean loss and its gradient at the present weights, and N."""
        if closure is None and loss is None:
            return self._once.gradient(parts)
        found = given_gradient(self._network, closure, loss, sum(batch_size(x) for x, _ in parts))
        if not self.steps:
            with self._network.replayed(self._network.random_state()):
                require_mean(self._network, parts, found[0])
        return found

    def _after(self, parts: list[Pair], closure: Closure | None, rng: Tensor | None) -> float:
        """The objective at the present weights, with the random numbers of the gradient."""
        with self._network.replayed(rng):
            if closure is None:
                value = self._network.loss(parts)
            else:
                value = given_gradient(self._network, closure, None, 1)[0]
        return value + self._penalty()

    def _acceptable(self, value: float, gradient: Tensor | None = None) -> bool:
        """Whether training can go on from a loss."""
        finite = math.isfinite(value) and (gradient is None or is_finite(gradient))
        return finite and (
            math.isnan(self._first) or value <= self._first + self.settings.limit * abs(self._first)
        )

    def _take_back(self, value: float) -> None:
        """Restore the weights of before the last step and raise τ and ζ."""
        parameters = list(self._network.parameters.values())
        if not all("before" in self.state[p] for p in parameters):
            raise NumericalError(*hopeless(value))
        put(parameters, [self.state[p]["before"] for p in parameters])
        self._network.restore_buffers(self._buffers)
        for p in parameters:
            self.state[p].pop("step", None)
        if self._failures + 1 >= self.settings.rejections:
            raise NumericalError(
                f"{self.settings.rejections} steps in a row were rolled back; the last loss was {value:.6g}",
                expected="steps that lead to finite losses",
                remedy="pass larger damping=, or check the data and the network's scale",
            )
        assert self.tau is not None
        assert self.zeta is not None
        self.tau, self.zeta, self._inverse = RAISE * self.tau, RAISE * self.zeta, None

    def _moved_by_others(self) -> bool:
        """Whether others have moved the weights further since the last step than that step had."""
        # Loaded weights are not to be taken back; a step that went wrong is, though a mask was put on it.
        if not self._left:
            return False
        others = own = 0.0
        for name, p in self._network.parameters.items():
            left = self._left[name]
            others += float((p.detach() - left).double().square().sum())
            own += float((left - self.state[p]["before"]).double().square().sum())
        return others > own

    def _adapt(self, objective: float, reduction: float, after: float) -> float | None:
        """ρ (eq. 4.21), and τ moved by it; −∞ if the step was taken back."""
        if not self._acceptable(after):
            self._take_back(after)
            self._failures += 1
            return -math.inf
        if reduction == 0:
            return None
        rho = (after - objective) / reduction
        assert self.tau is not None
        self.tau = adapted(self.tau, rho, self.damping.decay)
        return rho

    # -- direction -------------------------------------------------------------------------------

    def _follow(self, parts: list[Pair]) -> None:
        """Add the batch to the average of the curvature at the present weights."""
        if self._once.seen is None:
            self._running.refresh(self._raw)
        self._once.add(parts)

    def _resume(self, parts: list[Pair]) -> None:
        """Take over what was loaded, once there is a batch to run the network on."""
        if self._saved is None:
            return
        named = self._network.parameters.items()
        good = {name: self.state[p]["before"] for name, p in named if "before" in self.state[p]}
        self._running.refresh({**tensors_by_name(self._raw), **self._buffers, **good})
        self._running.load_state_dict(self._saved["curvature"], concatenate([one for one, _ in parts]))
        saved, self._saved = self._saved["inverse"], None
        self._inverse = None if saved is None else self._undamped().restored(saved)

    def _undamped(self) -> Undamped:
        """The curvature of the mean loss, as it is averaged now."""
        return Undamped(self._running.curvature(examples=1.0), self.damping.inversion, self._network.shared)

    def _directions(
        self, batch: LinearizedBatch, gradient: Tensor, score: Callable[[], float]
    ) -> tuple[list[Tensor], QuadraticModel, Tensor]:
        """The new direction (and the step before, for momentum), the model along them and its minimum."""
        decays = {name: self._group(p)["weight_decay"] for name, p in self._network.parameters.items()}

        def proposal(inverse: Inverse) -> tuple[list[Tensor], QuadraticModel]:
            directions = [inverse.times(gradient).mul_(-self._scale()), *self._before()]
            return directions, batch.quadratic(gradient, directions)

        if self.tau is None or self.zeta is None:
            search = DampingSearch(self.damping, self._undamped(), decays, proposal)
            curvature = self._running.curvature(examples=1.0)
            self.tau, self.zeta, self._inverse = search.first(
                float(curvature.trace()) / curvature.shape[0],
                lambda ways, alpha: self._reached(combined(ways, alpha), score),
            )
        elif self.damping.zeta_period and self.steps % self.damping.zeta_period == 0:
            search = DampingSearch(self.damping, self._undamped(), decays, proposal)
            self.zeta, self._inverse, (directions, model) = search.nearby(self.tau, self.zeta)
            return directions, model, model.best(self.tau)
        elif self._inverse is None or self._is_stale():
            self._inverse = self._undamped().inverse(self.zeta, decays)
        directions, model = proposal(self._inverse)
        assert self.tau is not None
        return directions, model, model.best(self.tau)

    def _is_stale(self) -> bool:
        """Whether to invert now: while the average is young, and every so often (as a search for ζ does)."""
        return self.steps <= self.settings.inverse_period or self.steps % self.settings.inverse_period == 0

    def _reached(self, step: Tensor, score: Callable[[], float]) -> float:
        """The objective after a step, which is not taken."""
        parameters = list(self._network.parameters.values())
        kept = [p.clone() for p in parameters]
        self._move(step)
        try:
            return score()
        finally:
            put(parameters, kept)

    # -- parameters ------------------------------------------------------------------------------

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        """The group of a parameter."""
        return next(g for g in self.param_groups if any(p is parameter for p in g["params"]))

    def _spread(self, value: Callable[[nn.Parameter], float]) -> Tensor | float:
        """A number for every parameter as one for every entry, or as one number if all are equal."""
        values = [value(p) for p in self._network.parameters.values()]
        if len(set(values)) == 1:
            return values[0]
        sized = zip(values, self._network.parameters.values(), strict=True)
        return torch.cat([p.new_full((p.numel(),), v) for v, p in sized])

    def _rate(self) -> float:
        """The largest learning rate of a parameter that moves."""
        moving = (g for g in self.param_groups if any(p.requires_grad for p in g["params"]))
        return max((float(group["lr"]) for group in moving), default=0.0)

    def _scale(self) -> Tensor | float:
        """Learning rates relative to the largest, 0 for frozen parameters; alike where all are 0."""
        # a warm-up that begins at 0 takes no step yet, and its dampings are searched for all the same
        rate = self._rate()
        return self._spread(
            lambda p: (float(self._group(p)["lr"]) / rate if rate else 1.0) if p.requires_grad else 0.0
        )

    def _penalty(self) -> float:
        """½ Σ λ θ²."""
        decayed = [(float(g["weight_decay"]), p) for g in self.param_groups for p in g["params"]]
        return 0.5 * sum(decay * float(p.double().square().sum()) for decay, p in decayed if decay)

    def _before(self) -> list[Tensor]:
        """The step before, where momentum is on and there was one."""
        parameters = list(self._network.parameters.values())
        if not self.settings.momentum or not all("step" in self.state[p] for p in parameters):
            return []
        flat = torch.cat([self.state[p]["step"].reshape(-1) for p in parameters])
        flat = flat * (self._scale() != 0) if isinstance(self._scale(), Tensor) else flat
        return [flat] if bool(flat.any()) else []

    def _apply(self, step: Tensor) -> None:
        """Move the parameters and remember where they were."""
        for name, piece in self._running.function.space.to_params(step).items():
            p = self._network.parameters[name]
            remember(self.state[p], "before", p.detach())
            if self.settings.momentum:
                remember(self.state[p], "step", piece)
        self._move(step)
        for name, p in self._network.parameters.items():
            remember(self._left, name, p.detach())

    def _move(self, step: Tensor) -> None:
        """θ ← θ + δ."""
        pieces = self._running.function.space.to_params(step)
        put([self._network.parameters[name] for name in pieces], list(pieces.values()), add=True)

    # -- keeping ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """All of it, where torch's keep groups and state alone: for ``copy.deepcopy((model, optimizer))``."""
        # a schedule wraps the step of this optimizer, which is not that of a copy
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def _describe(self) -> dict[str, list[str]]:
        """What a state belongs to: the curvature's structure, and the parameters with their shapes."""
        group = {id(p): i for i, one in enumerate(self.param_groups) for p in one["params"]}
        parameters = [
            f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')} in group {group[id(p)]}"
            for name, p in self._network.parameters.items()
        ]
        return {"structure": [repr(self._running.structure)], "parameters": parameters}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: groups, dampings, averages, the inverse in use, and the step before.

        Returns:
            A dictionary of tensors, numbers and lists, which ``torch.load`` takes with ``weights_only=True``.
        """
        saved = self._saved
        return {
            **super().state_dict(),
            "gauss_newton": {
                "likelihood": repr(self._network.likelihood),
                "network": self._describe(),
                "tau": self.tau,
                "zeta": self.zeta,
                "steps": self.steps,
                "failures": self._failures,
                "first": self._first,
                "buffers": {name: b.clone() for name, b in self._buffers.items()},
                "modes": self._once.modes(),
                "curvature": self._running.state_dict() if saved is None else dict(saved["curvature"]),
                "inverse": (self._inverse and self._inverse.state()) if saved is None else saved["inverse"],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another optimizer of the same network and settings was.

        Averages are taken over at the next step, with the layers that they are of.

        Args:
            state_dict: From :meth:`state_dict`; the weights are the network's own, to be loaded apart.

        Raises:
            InputError: If the state is of another optimizer.
        """
        own = checked_state(state_dict, repr(self._network.likelihood), self._describe())
        try:
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "gauss_newton"})
        except ValueError as error:
            raise InputError(str(error), "groups as here", "make it as the saved one was") from error
        self.tau, self.zeta = own["tau"], own["zeta"]
        self.steps, self._failures, self._first = own["steps"], own["failures"], own["first"]
        self._inverse, self._pending, self._saved, self._left = None, [], copy.deepcopy(own), {}
        self._buffers = {name: b.clone() for name, b in own["buffers"].items()}
        self._once.load_modes(own["modes"])
