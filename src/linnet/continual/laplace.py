"""Laplace's method along a stream of tasks, and elastic weight consolidation.

Online, the posterior of the tasks so far is the prior of the next (Botev 2020, section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from linnet.continual.curvature import CurvatureMethod
from linnet.continual.method import Prepare
from linnet.continual.quadratic import (
    Live,
    PenaltyPrecision,
    Quadratic,
    require_shape,
    unwrapped,
    value_and_gradient,
)
from linnet.curvatures.curvature import Curvature, Provenance
from linnet.curvatures.settings import CurvatureOptions, Structure, drawn, passes_of
from linnet.curvatures.stream import Batches, held
from linnet.distributed import Share, collective, sum_numbers
from linnet.errors import DataError, InputError, ModelError
from linnet.likelihoods.likelihood import Likelihood
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.params import choice, function, number, optional, refuse
from linnet.tangent.batch import Inputs, is_data_set
from linnet.tangent.data import Data, in_pieces
from linnet.tangent.functional import Functional, OutputAdapter, check_output
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import random_kept
from linnet.tangent.selection import Selector, select_parameters

PriorMean = float | str | Mapping[str, Tensor] | None


class OnlineLaplace(CurvatureMethod):
    """A Gaussian posterior over the weights that takes in one task after the other, at constant memory.

    After task t the mean is where training ended, μ_t, and the precision grows by the task's curvature,

        Λ_t = λ G_t(μ_t) + Λ_{t-1},   Λ_0 = p I              (Botev 2020, eq. 5.25; eq. 5.23 for λ = 1)

    and the next task is trained with the penalty ½ (θ − μ_t)ᵀ Λ_t (θ − μ_t) (eq. 5.21). All of it is a
    sum over examples: to a loss that is a mean over the N examples of the new task, add
    ``penalty(examples=N)``. A parameter that no task has reached yet, such as a new head, joins without a
    penalty.

    λ = 1 is Bayes' rule. Other libraries scale differently: with N₀ examples of old tasks and N of the new
    one, on a loss that is a mean over examples, the λ here is written as λ N₀/N where the Fisher matrix is a
    mean and there is a factor ½ (Kirkpatrick et al. 2017; van de Ven), as λ N₀/(2N) without the ½ (Mammoth),
    and as λ b N₀/(2N) with squared gradients of batches of b (Avalanche); :func:`convert_strength` goes back.

    Args:
        model: The network; training goes on with it, and wrappers are looked through. For a ``Linearized``
            the posterior of a stream of squared losses is exact under structure="full".
        likelihood: What the outputs mean, one of ``linnet.likelihoods``.
        structure: Structure of G, as in :func:`linnet.curvature`; Botev (2020) has "kfac" and "diagonal".
        prior_precision: p ≥ 0 of the first prior. It applies to parameters that a task has reached.
        strength: λ ≥ 0; 0 switches the method off, the prior included.
        merge: How sums of Kronecker products are kept: "svd" (nearest product), "kl" (nearest Gaussian),
            "count" (averaged factors), "exact" (a list, one term a task). Other structures add exactly, but
            "ekfac" merges in a common eigenbasis and "low-rank" is cut to its rank.
        prior_mean: Where the first prior is centered. ``None``: there is no penalty before the first task,
            and its weight decay is up to you. "initial": where the parameters are now. A number (0.0), or
            tensors by name. Of a ``Linearized`` these are weights θ = θ₀ + δ: "initial" is what means δ = 0.
        **options: Keywords of :func:`linnet.curvature`: expectation, sharing, matrix, passes; and of
            :func:`linnet.linearize`: params, output.

    Attributes:
        model: The network.
        tasks: Tasks consolidated so far.
        strength: λ.

    Raises:
        InputError: If an argument has a value that cannot be used.

    Source:
        Botev 2020, section 5.3.1; Ritter, Botev and Barber, NeurIPS 2018.

    Example:
        >>> import linnet
        >>> net = nn.Linear(3, 2)
        >>> method = OnlineLaplace(net, linnet.likelihoods.Categorical())
        >>> method.penalty().item()
        0.0
        >>> method.consolidate((torch.randn(20, 3), torch.randint(2, (20,))))
        >>> with torch.no_grad():
        ...     _ = net.weight.add_(0.1)
        >>> method.penalty().item() > 0
        True
    """

    KEPT: ClassVar = ("strength", "prior_precision", "merge")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure = "kfac",
        prior_precision: float = 1.0,
        strength: float = 1.0,
        merge: str = "svd",
        prior_mean: PriorMean = None,
        **options: Unpack[CurvatureOptions],
    ) -> None:
        super().__init__(model, likelihood, structure, strength, merge, options)
        self.prior_precision = number("prior_precision", prior_precision, least=0)
        start = _prior_anchor(model, prior_mean, options.get("params"), self.prior_precision)
        posterior = Quadratic({}, PenaltyPrecision(prior=self.prior_precision))
        self._terms = [posterior, *([] if start is None else [start])]

    @property
    def _posterior(self) -> Quadratic:
        """What is known of the tasks so far; behind it stands the first prior, if it has a mean."""
        return self._terms[0]

    def _learn(self, data: Any, output: OutputAdapter, prepare: Prepare | None) -> None:
        live = Live.of(self.model)
        live.difference(self._posterior.anchor)  # refuses parameters of another shape
        blocks = self._measured(data, output, prepare, self.strength)
        known = self._posterior.after(blocks, live, self.merge)
        # the first prior still holds for what no task has reached
        self._terms = [known, *(term.without(known.precision.reached) for term in self._terms[1:])]

    def precision(self) -> Curvature:
        """Λ at μ as an operator, over the parameters that tasks have reached.

        ``precision().inverse().output_covariance(x)`` is the covariance of the outputs, which tells how
        much the network still knows about a task along the stream; ``logdet``, ``solve`` and ``sample``
        work as for every curvature.

        Returns:
            The precision, prior included.

        Raises:
            ModelError: If no task has been consolidated, or sums of products are kept as lists.
        """
        blocks = self._posterior.precision.blocks
        if not blocks:
            raise ModelError(
                "no task has been consolidated",
                expected="a posterior",
                remedy="call consolidate(data) first",
            )
        names = {name for block in blocks for name in block.layer.names}
        network = unwrapped(self.model)
        inner, adapter, anchor = network, self._options.get("output"), self._posterior.anchor
        if isinstance(network, Linearized):
            inner, adapter, anchor = network.model, network.function.output, {}
        known = [name for name, _ in inner.named_parameters() if name in names]
        if len(known) < len(names):
            raise ModelError(
                f"the network lacks parameters that are remembered, such as {min(names - set(known))!r}",
                expected="the network whose tasks are remembered",
                remedy="pass that network",
            )
        function = Functional(inner, known, adapter)
        if anchor:
            for name in known:
                require_shape(tuple(function.theta[name].shape), tuple(anchor[name].shape), name)
            function = function.moved({name: anchor[name] for name in known})
        made = Provenance(
            self._word,
            "gauss-newton",
            drawn(self._options.get("expectation", "auto"))[0],
            self._options.get("sharing", "expand"),
            self._likelihood.describe(),
            max(block.examples for block in blocks),
        )
        return Curvature(self._posterior.precision.parts(), function, made)

    def preconditioner(self, examples: int, damping: float = 1.0) -> KroneckerPreconditioner:
        """Preconditioner by the posterior precision, for the optimizer of the next task.

        The penalty grows with every task until no learning rate suits both it and the new task's loss.
        Gradients g become

            τ (Λ / N + τ I)⁻¹ g,

        of length at most ‖g‖: as they are where the past says nothing, and smaller the more it says. Plain
        gradient steps with momentum then need no rate that falls along the stream.

        Args:
            examples: N of the next task; its loss is a mean over them, like in :meth:`add_grad_`.
            damping: τ > 0, about the curvature of the loss in the directions that it is to be learned in.

        Returns:
            The preconditioner; ``preconditioner(N).attach(optimizer)`` for one task, made again for the next.

        Raises:
            ModelError: If no task has been consolidated, or sums of products are kept as lists.
            InputError: If an argument is not positive.

        Example:
            >>> import linnet
            >>> net, x, y = nn.Linear(3, 2), torch.randn(20, 3), torch.randint(2, (20,))
            >>> method = OnlineLaplace(net, linnet.likelihoods.Categorical())
            >>> method.consolidate((x, y))
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            >>> handle = method.preconditioner(examples=20).attach(optimizer)
        """
        number("examples", examples, above=0, remedy="pass the number of examples of the next task")
        past = self.precision().scaled(1.0 / examples)
        made = KroneckerPreconditioner(past, self.model, damping, reduction="sum")
        made.gain = made.damping
        return made

    @torch.no_grad()
    def log_evidence(
        self, data: Any, *, output: OutputAdapter = None, prepare: Prepare | None = None
    ) -> float:
        """Log evidence of a task given the previous ones; call it between training and :meth:`consolidate`.

        Added up over a stream it is the evidence of the whole, by which strengths, prior precisions and
        structures can be compared without a validation set. It is exact for a ``Linearized`` with squared
        loss, structure="full" and a ``prior_mean``; without one, the first prior is centered where the task
        ends. In practice λ ≠ 1 means that the approximation is off, and so is the evidence then.

        Args:
            data: The task, not consolidated yet.
            output: This task's output adapter.
            prepare: Called with a copy of the network to make it serve this task.

        Returns:
            log p(D_{t+1} | D_{1:t}), in nats.

        Raises:
            DataError: If the task has no targets.
            ModelError: If the prior precision is 0.
        """
        # ≈ log p(D_{t+1} | θ) − ½ δᵀ Λ_t δ + ½ log det Λ_t − ½ log det (G_{t+1} + Λ_t)
        #
        # Source: Botev 2020, eq. 5.18 and section 5.1; MacKay 1992.
        quadratics, live = self._ready()
        if self.prior_precision <= 0:
            raise ModelError(
                "the evidence of a model with prior_precision=0",
                expected="a proper prior",
                remedy="pass a positive prior_precision",
            )
        network, adapter = self._network(output, prepare)
        outputs: Callable[[Inputs], Tensor] = network
        if not isinstance(network, Linearized):
            outputs = Functional(network, self._options.get("params"), adapter).check_runs
        device, nll = next(iter(live.tensors.values())).device, 0.0
        passes = passes_of(self._options.get("passes"))
        share = Share.of(passes.shard)
        with collective("the likelihood of a task", share.world > 1), random_kept(data):
            data = held(data, passes.memory)
            for batch in Batches(data, device, passes.block, share):
                if batch.y is None:
                    raise DataError("data have no targets", expected="(x, y) pairs", remedy="pass (x, y)")
                f = outputs(batch.x)
                nll += float(self._likelihood.nll(f, self._likelihood.check(f, batch.y)).double().sum())
            if share.world > 1:
                nll = sum_numbers([nll])[0]
        blocks = self._measured(data, output, prepare)
        distance = float(value_and_gradient(quadratics, live)[0])
        after, before = self._posterior.after(blocks, live, self.merge).precision, self._posterior.precision
        fresh = sum(b.layer.size for b in after.blocks) - sum(b.layer.size for b in before.blocks)
        gained = _logdet(after) - _logdet(before) - fresh * math.log(self.prior_precision)
        return -nll - distance - 0.5 * gained


def _logdet(precision: PenaltyPrecision) -> float:
    """Σ log det of the blocks, the prior included."""
    return sum(float(part.operator.logdet()) for part in precision.parts())


class NonOnlineLaplace(CurvatureMethod):
    """Laplace with the curvature of every task measured again at the end of the last, one term for each task.

        Λ_t = p I + λ Σ_i G_i(μ_t),   i = 1 ... t             (Botev 2020, eq. 5.24)

    It needs the data of all tasks, which it holds on to, and so breaks the rules of continual learning: it
    shows how much :class:`OnlineLaplace` loses by measuring each curvature once. A pair or a list of batches
    is copied; a data set or a loader is read again, and must give the same then. After ``load_state_dict``
    the data have to be handed back (:meth:`remember`).

    Args:
        model: The network.
        likelihood: What the outputs mean.
        structure: Structure of G, as in :func:`linnet.curvature`.
        prior_precision: p ≥ 0.
        strength: λ ≥ 0; 0 switches the method off.
        merge: How sums of Kronecker products are kept: "exact" (a list, one term a task), "svd", "kl", or
            "count".
        **options: Keywords of :func:`linnet.curvature`.

    Attributes:
        model: The network.
        tasks: Tasks consolidated so far.
        strength: λ.

    Raises:
        InputError: If an argument has a value that cannot be used.

    Source:
        Botev 2020, section 5.3.1.

    Example:
        >>> import linnet
        >>> method = NonOnlineLaplace(nn.Linear(3, 2), linnet.likelihoods.Categorical())
        >>> for seed in range(2):
        ...     method.consolidate((torch.randn(9, 3), torch.randint(2, (9,))))
        >>> method.tasks, method.penalty().item()
        (2, 0.0)
    """

    KEPT: ClassVar = ("strength", "prior_precision", "merge")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure = "kfac",
        prior_precision: float = 1.0,
        strength: float = 1.0,
        merge: str = "exact",
        **options: Unpack[CurvatureOptions],
    ) -> None:
        super().__init__(model, likelihood, structure, strength, merge, options)
        self.prior_precision = number("prior_precision", prior_precision, least=0)
        self._past: list[tuple[Any, OutputAdapter, Prepare | None]] = []

    def _learn(self, data: Any, output: OutputAdapter, prepare: Prepare | None) -> None:
        if len(self._past) != self.tasks:
            raise InputError(
                f"{self.tasks} tasks were consolidated, and the data of {len(self._past)} are at hand",
                expected="the data of all past tasks",
                remedy="hand them back in order with remember(data) after load_state_dict",
            )
        past = [*self._past, (self._held(data), output, prepare)]
        live, anchor = Live.of(self.model), self._terms[0].anchor if self._terms else {}
        term = Quadratic(anchor, PenaltyPrecision(prior=self.prior_precision))
        for task in past:
            term = term.after(self._measured(*task, self.strength), live, self.merge)
        self._terms, self._past = [term], past

    def _held(self, data: Any) -> Any:
        """The data of a task, to be read again."""
        return held(data, passes_of(self._options.get("passes")).memory, keep=True)

    def remember(self, data: Any, output: OutputAdapter = None, prepare: Prepare | None = None) -> None:
        """Hand back the data of a past task, in order, after a state has been loaded.

        Args:
            data: The task's training data.
            output: Its output adapter.
            prepare: What makes the network serve it.

        Raises:
            InputError: If the data of all past tasks are at hand already.
        """
        if len(self._past) >= self.tasks:
            raise InputError(
                f"remember() with the data of all {self.tasks} past tasks at hand",
                expected="a task that was consolidated before the state was saved",
                remedy="call consolidate(data) for a new task",
            )
        check_output(output)
        optional(function, "prepare", prepare, "a function that makes a network serve the task")
        data = self._held(data)
        if isinstance(data, tuple | list | Mapping):
            Data.of(data, keep=False)
        elif not (in_pieces(data) or is_data_set(data)):
            refuse(
                "data", data, "an (x, y) pair, a Dataset or a DataLoader of such pairs", "pass data=(x, y)"
            )
        self._past.append((data, output, prepare))

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._past = []


class EWC(CurvatureMethod):
    """One quadratic penalty around the end of every task, weighted by that task's Fisher matrix.

        λ/2 Σ_i (θ − μ_i)ᵀ F_i(μ_i) (θ − μ_i)                 (offline; Botev 2020, eq. 5.26)
        λ/2 (θ − μ_t)ᵀ F̃_t (θ − μ_t),  F̃_t = γ F̃_{t-1} + F_t     (online; Schwarz et al. 2018)

    F is summed over the examples of its task, so that λ = 1 is the natural value on a summed loss, and
    ``penalty(examples=N)`` goes with a mean. :func:`convert_strength` gives λ in other libraries' scales.
    Which Fisher matrix is a visible choice: expectation "exact" (over all labels), "mc" (labels drawn from
    the network) or "empirical" (the observed labels; gradients of single examples, never of batches).

    Args:
        model: The network.
        likelihood: What the outputs mean.
        structure: "diagonal" as published, or any structure of :func:`linnet.curvature`, such as "kfac".
        strength: λ ≥ 0; 0 switches the method off.
        variant: "offline" (a term a task) or "online" (one term at constant memory).
        decay: γ of the online variant, between 0 and 1.
        merge: How the online variant keeps sums of Kronecker products; as in :class:`OnlineLaplace`.
        **options: Keywords of :func:`linnet.curvature`.

    Attributes:
        model: The network.
        tasks: Tasks consolidated so far.
        strength: λ.

    Raises:
        InputError: If an argument has a value that cannot be used.

    Source:
        Kirkpatrick et al., PNAS 2017; Huszár, PNAS 2018; Schwarz et al., ICML 2018.

    Example:
        >>> import linnet
        >>> method = EWC(nn.Linear(3, 2), linnet.likelihoods.Categorical(), strength=10.0)
        >>> method.consolidate((torch.randn(9, 3), torch.randint(2, (9,))))
        >>> method.penalty().item(), method.tasks
        (0.0, 1)
    """

    KEPT: ClassVar = ("strength", "variant", "decay", "merge")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure = "diagonal",
        strength: float = 1.0,
        variant: str = "offline",
        decay: float = 1.0,
        merge: str = "svd",
        **options: Unpack[CurvatureOptions],
    ) -> None:
        super().__init__(model, likelihood, structure, strength, merge, options)
        self.variant = choice("variant", variant, ("offline", "online"), "leave variant= out")
        self.decay = number("decay", decay, least=0)
        if self.decay > 1 or (variant == "offline" and self.decay != 1):
            raise InputError(
                f"decay={decay!r} with variant={variant!r}",
                expected="a number between 0 and 1 for the online variant",
                remedy='leave decay= out, or pass variant="online"',
            )

    def _learn(self, data: Any, output: OutputAdapter, prepare: Prepare | None) -> None:
        live, online = Live.of(self.model), self.variant == "online"
        for known in self._terms:
            live.difference(known.anchor)  # refuses parameters of another shape
        blocks = self._measured(data, output, prepare)
        before = (
            self._terms[0] if online and self._terms else Quadratic({}, PenaltyPrecision(), self.strength)
        )
        term = before.after(blocks, live, self.merge, self.decay)
        self._terms = [term] if online else [*self._terms, term]


def _prior_anchor(model: nn.Module, mean: PriorMean, params: Selector, prior: float) -> Quadratic | None:
    """The prior before the first task, if it has a mean."""
    if mean is None:
        return None
    live, network = Live.of(model), unwrapped(model)
    names = network.parameter_names if isinstance(network, Linearized) else select_parameters(network, params)
    values = {name: value for name, value in live.values().items() if name in names}
    if isinstance(mean, Mapping):
        unknown = sorted(set(mean) - set(values))
        wrong = [n for n, m in mean.items() if n in values and m.shape != values[n].shape]
        if unknown or wrong:
            raise InputError(
                f"prior_mean has {(unknown + wrong)[0]!r}, which is no parameter or of another shape",
                expected="tensors by the names of parameters",
                remedy="see dict(model.named_parameters())",
            )
        anchor = {name: m.detach().to(values[name], copy=True) for name, m in mean.items()}
    elif mean == "initial":
        anchor = values
    elif isinstance(mean, int | float) and not isinstance(mean, bool):
        widest = min(torch.finfo(value.dtype).max for value in values.values())
        center = number("prior_mean", mean, least=-widest, most=widest)
        anchor = {name: torch.full_like(value, center) for name, value in values.items()}
    else:
        refuse("prior_mean", mean, 'None, "initial", a number, or tensors by name')
    reached = {name: tuple(value.shape) for name, value in anchor.items()}
    return Quadratic(anchor, PenaltyPrecision(prior=prior, reached=reached))
