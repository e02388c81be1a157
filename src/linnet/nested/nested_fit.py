"""The result of ``linnet.adapt``: a linear probe and the linearized layers below it.

    f(x) = Σᵢ K(x, xᵢ) βᵢ,        β = (K + ρI)⁻¹ t

with one kernel for all outputs. In weights it is f_c(x) = b_c + W_c φ̃(x) + Σ_h r_hᵀ ∂φ(x) δ_hc: a probe
and H linearizations of the layers below, each with its own δ. Those H·P·C numbers are formed for predictions
where they fit a share of the memory, and not otherwise. Many samples are solved for in these weights, without
derivatives, and with features of earlier layers along some of them (``landmarks.py``).
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet import tree
from linnet.errors import DataError, FileFormatError, InputError
from linnet.fitting.accuracy import TOLERANCE
from linnet.fitting.arguments import Choices, count_in_words
from linnet.fitting.last_layer import HIDDEN, Appended, not_alone
from linnet.fitting.linear_fit import SquaredFit
from linnet.fitting.merged import Merged, compared
from linnet.fitting.remarks import rounded, unused_remarks
from linnet.linear.dual import DualSystem
from linnet.linear.kernel_system import KernelSystem, whitened_kernel
from linnet.linear.normal_system import NormalSystem
from linnet.linear.system import System
from linnet.linear.targets import Targets, understood, weighed_targets
from linnet.nested.export import exported_nested, network_of_probe
from linnet.nested.features import (
    HEAD,
    TOGETHER,
    Prior,
    RandomHeads,
    kernels_of,
    problem_of,
    read_given,
    reads_earlier,
)
from linnet.nested.landmarks import MANY
from linnet.nested.many import errors_in_weights, in_weights
from linnet.nested.search import (
    FREE,
    JUDGES,
    SPREAD,
    Choice,
    Kernels,
    Rung,
    Shares,
    choose,
    intercept,
    remoteness,
    sampled,
)
from linnet.params import flag, no_targets, warn
from linnet.tangent.batch import MASK, Inputs, batch_size, concatenate, hash_examples, take
from linnet.tangent.data import Data
from linnet.tangent.functional import IDLE, Functional, OutputAdapter, copied
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.inputs import KnownInputs
from linnet.tangent.matching import (
    given_network,
    identity,
    require_same_outputs,
    require_weights,
    saved_output,
)

# Weights below the head up to which derivatives are tried where nothing is said, for values and where there
# is no earlier layer. Beside features of earlier layers they add nothing to the classes that are right
# (docs/results/adapt.md), and take a hundred times as long.
TRIED = 1_000_000
TRIAL = 400  # samples on which they are tried where there are more
# Times as many samples N as features D of which the last layer alone is solved in weights, with the same
# answers: N D² + D³/3 operations in place of N³/3 for each ridge.
SLIM = 2
OFF = 0.3  # of the spread of values, by which predictions may be off; often it is much less
AVERAGED = (
    f"the mean of {HIDDEN} over its positions, by {MASK} where it is given; output= takes something else"
)


class NestedFit(SquaredFit):
    """A linear probe and the linearized layers below it, fitted together. ``linnet.adapt`` makes it.

    Args:
        prior: The kernel.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        prior: The kernel: the network, and the weight of its lower layers.
        module: The network with random heads for its last layer, which the fit is made of.
        x: Training inputs.
        system: The solved equations.
        record: What was chosen and why.
        rungs: The models that were compared on held-out folds, where the lower layers were to be trained.
        held_out: Outputs (N, C) by a network trained without the fold of the example, where it was trained.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(20, 2)
        >>> fit = linnet.adapt(net, (x, (x[:, 0] > 0).long()))
        >>> fit.predict(x).shape, fit.loo().shape, fit.forget([0]).n
        (torch.Size([20, 2]), torch.Size([20, 2]), 19)
    """

    module: RandomHeads
    system: KernelSystem | NormalSystem
    kind = "nested-fit"

    def __init__(
        self, prior: Prior, targets: Targets, system: KernelSystem | NormalSystem, record: Choices
    ) -> None:
        super().__init__(prior.network, targets, system, record)
        self.prior = prior
        self.rungs: tuple[Rung, ...] = ()
        self.dropped: dict[str, Tensor] = {}  # held-out outputs of forgotten examples, by their fingerprints

    def _no_sum(self, *_: Any) -> NoReturn:
        """Raise: every fit has features of its own."""
        raise InputError(
            "a sum or multiple of a fit of linnet.adapt",
            expected="fits of linnet.fit, whose displacements of one network add up",
            remedy="linearize one network and fit it to each task; fits of linnet.adapt cannot be added",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _no_sum

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """Whether the lower layers help, in a sentence, or that their weight was given."""
        return self.record.reasons.get("verdict", "")

    @property
    def body_weight(self) -> float:
        """w, the share of the lower layers' derivatives in the kernel."""
        return self.prior.mixture.weight

    @property
    def earlier(self) -> float:
        """e, the share of the features of earlier layers among the features."""
        return self.prior.mixture.earlier

    @property
    def is_probe(self) -> bool:
        """Whether the fit is the linear probe alone."""
        return not (self.body_weight or self.earlier or self.trained)

    @property
    def trained(self) -> bool:
        """Whether the lower layers were trained on the same samples."""
        return self.prior.network.before is not None

    def _evident_noise(self) -> float:
        """σ² of highest evidence with a free intercept, of the classes that have a sample."""
        found, possible = super()._evident_noise(), self._possible
        if possible is not None:  # targets of the others are all zero
            return found * self.system.c / len(possible)
        if self.labels is not None:
            return found
        # What the intercept costs by its prior, (1ᵀβ)²/1ᵀM1, would be taken for noise where values are not
        # about zero.
        system, root = self.system, self._targets.every_weight.sqrt().to(self.system.beta)[:, None]
        if isinstance(system, NormalSystem):
            # its weight comes first; 1ᵀM1 = (1 − ρ H⁻¹₁₁)/κ and ρ rᵀβ = ‖r − f‖² + ρ ‖W‖² leave no difference
            # of large numbers
            free, own = not_carried(self.prior, system, self._targets), system.solution.square().sum(1)
            squares = (self.ridge * system.beta).square().sum() + self.ridge * own[1:].sum()
            return float(squares - self.ridge * free / (1 - free) * own[0]) / self._targets.values.numel()
        dual = system.dual
        if dual.shared:
            cost = (root.T @ dual.beta).square().sum() / (root.T @ dual.solve(root))
        else:  # equations on outputs tie them to one another
            root = torch.kron(root, torch.eye(dual.c).to(root))
            moved = root.T @ dual.beta.reshape(-1, 1)
            cost = moved.T @ torch.linalg.solve(root.T @ dual.solve(root), moved)
        return max(found - self.ridge * float(cost) / self._targets.values.numel(), 0.0)

    @cached_property
    def _possible(self) -> Tensor | None:
        """The classes that have a sample: the head is made for the task."""
        return self._targets.seen

    def _start(self, x: Inputs) -> Tensor:
        """Zero: nothing of a new task is known before the data."""
        return self.system.residual.new_zeros(batch_size(x), self.system.c)

    def _made(self, system: System, targets: Targets, record: Choices) -> NestedFit:
        """A fit by another system, with what held-out folds told: closed forms cannot find that again."""
        assert isinstance(system, KernelSystem | NormalSystem)
        made = NestedFit(self.prior, targets, system, record)
        if made.n == 1:  # which leaves no residual to tell the noise by
            made._noise = self.noise
        if self.held_out is not None:
            made._noise, made.rungs, made.dropped = self._noise, self.rungs, self.dropped
            made._moderation, made._point_temperature = self._moderation, self._point_temperature
        return made

    def _eigenvalues(self) -> Tensor:
        """Eigenvalues of H K H, the kernel without the intercept, which would hide all others; N − 1."""
        if self.constraints is not None:
            return super()._eigenvalues()
        if isinstance(self.system, NormalSystem):
            return self._of_rows()
        kernel = self.system.kernel
        if (w := self.system.problem.weights) is not None:
            kernel = kernel / w[:, :1] / w[:, 0]
        kernel = kernel - self.prior.mixture.bias
        kernel = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
        values: Tensor = torch.linalg.eigvalsh(kernel)
        return values[1:].clamp_min(0)

    def _of_rows(self) -> Tensor:
        """The same of many samples: the eigenvalues that are not zero, of the features' covariance."""
        rows = self.system.problem.examples.rows[HEAD]
        assert rows is not None
        mean = rows.mean(0)
        gram = sum((part.T @ part for part in rows.split(TOGETHER)), -len(rows) * torch.outer(mean, mean))
        found: Tensor = torch.linalg.eigvalsh(gram)
        return found.clamp_min(0)

    def _grid(self) -> Tensor:
        """Seven decades of ridges around the mean of the kernel's diagonal, and the fit's own, (R,)."""
        decades = torch.logspace(-4, 3, 29, dtype=torch.float64)
        own = torch.tensor([self.ridge], dtype=torch.float64)
        found: Tensor = torch.cat([decades, own]).unique()
        return found.to(self.system.residual.device)

    # -- changes ---------------------------------------------------------------------------------

    def _check_new_ridge(self, ridge: Any) -> None:
        """Raise unless it is kept, or chosen again for layers that have seen no label."""
        no_targets("ridge", ridge)
        if ridge not in (None, "loo"):
            raise InputError(
                f"ridge={ridge!r}",
                expected='None or "loo"',
                remedy="leave ridge= out to keep what was chosen",
            )
        if ridge is not None and self.constraints is not None:
            raise InputError(
                "ridge='loo' on a fit whose outputs obey equations",
                expected="the ridge and the weight that were chosen without them",
                remedy="leave ridge= out, or update the fit before constrain() and constrain it again",
            )
        if ridge is not None and self.trained:
            raise InputError(
                "ridge='loo' on a fit whose lower layers were trained",
                expected="weights that have seen no label: leave-one-out would not be honest",
                remedy="leave ridge= out, or call adapt again on all examples",
            )

    @property
    def _grows(self) -> bool:
        """Whether an update may bring new classes: the head is made for the task."""
        return self.classes is not None

    def constrain(
        self, x: Inputs, targets: Any = None, groups: Any = None, *, weight: float | None = None
    ) -> NestedFit:
        """The optimum among outputs that obey linear equations, by the kernel of all samples."""
        if not isinstance(system := self.system, NormalSystem) or self.n > MANY:
            return super().constrain(x, targets, groups, weight=weight)
        problem = replace(system.problem, known=None, formed=None)
        kernel = KernelSystem.solved(problem, self.ridge, self.memory)
        return self._made(kernel, self._targets, self.record).constrain(x, targets, groups, weight=weight)

    @torch.no_grad()
    def recomputed(self, *, scales: bool = False) -> NestedFit:
        """The same fit from the network and the data, with means and scales of its features if asked for."""
        if not flag("scales", scales):
            return super().recomputed()
        if self.constraints is not None:
            raise InputError(
                "recomputed(scales=True) of a fit whose outputs obey equations",
                expected="a fit without equations on its outputs",
                remedy="call it before constrain(), and constrain the result",
            )
        features, shares = self.prior.network, Shares(self.body_weight, self.earlier, self.ridge)
        known = features.function.known  # of all samples, which the fit before has too
        anew = solved(features, self.x, self._targets, self.memory, self.record, shares)
        features.function.known = known
        # what the choice of a ridge is worth in noise was found with the samples that may be gone
        record = replace(self.record, noise_factor=anew.record.noise_factor)
        made = self._made(anew.system, self._targets, record)
        made.prior = anew.prior
        return made

    def _grown(self, data: Data) -> NestedFit:
        """The fit with outputs for classes that it has not seen, whose targets are zero so far."""
        y, before = data.y, self.classes
        if before is None or y.is_floating_point() or y.dtype == torch.bool or not y.numel():
            return self
        found = torch.arange(before, max(int(y.max()) + 1, before), device=y.device)
        if not len(found):
            return self
        if len(found) > y.numel() or not bool(torch.isin(found, y).all()):
            raise DataError(
                f"y holds the class {int(y.max())}, and the fit has {before} classes",
                expected=f"new classes numbered from {before} without gaps",
                remedy="number them so, or check the labels",
            )
        if self.constraints is not None:
            raise InputError(
                "update() with new classes of a fit whose outputs obey equations",
                expected="a fit without equations on its outputs",
                remedy="update the fit before constrain() and constrain it again",
            )
        values = torch.cat([self.targets, self.targets.new_zeros(self.n, len(found))], 1)
        targets = replace(self._targets, values=values, classes=before + len(found))
        named = data.classes if self.record.classes else ()
        if named and len(named) < before + len(found):
            raise DataError(
                f"y holds the class {int(max(found))}, which has no name",
                expected=f"a name, as the classes {', '.join(map(repr, named[:3]))} have",
                remedy="pass y as text",
            )
        made = self._made(self.system.widened(len(found)), targets, replace(self.record, classes=named))
        if self.held_out is not None:
            more = self.held_out.new_zeros(1, len(found))
            made.held_out = torch.cat([self.held_out, more.expand(self.n, -1)], 1)
            made.dropped = {name: torch.cat([row, more[0]]) for name, row in self.dropped.items()}
        return made

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float, sample_weight: Any) -> NestedFit:
        """The fit with more examples, with "loo" solved again on all of them."""
        x, new = self._like(x, y)
        new = weighed_targets(new, sample_weight)
        targets, what = self._targets.joined(new), f"added {count_in_words(batch_size(x))}"
        if ridge == "loo":
            joined = concatenate([self.x, x])
            given = Shares(0.0, None) if self.prior.network.bodiless else FREE
            made = solved(self.prior.network, joined, targets, self.memory, self.record, given)
            reasons = {**made.record.reasons, "change": f"{what}; weight and ridge chosen again"}
            made.record = replace(made.record, reasons=reasons)
            return made
        made = self._changed(targets, self.system.extended(self._more(x, new)), what, start)
        if self.held_out is not None:  # the fit before has not seen the new examples, or training has
            known = self.dropped | dict(zip(hash_examples(self.x), self.held_out, strict=True))
            rows = zip(hash_examples(x), self.predict(x).to(self.held_out), strict=True)
            made.held_out = torch.stack([*self.held_out, *(known.get(name, row) for name, row in rows)])
        return made

    def _keep_held_out(self, before: NestedFit, keep: Tensor) -> None:
        """Those of the forgotten examples as well: the weights have seen them, should they come again."""
        super()._keep_held_out(before, keep)
        assert before.held_out is not None
        names = hash_examples(take(before.x, ~keep.to(before.targets.device)))
        self.dropped = before.dropped | dict(zip(names, before.held_out[~keep], strict=True))

    # -- elsewhere -------------------------------------------------------------------------------

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""
        if variance and self.constraints is not None:
            raise InputError(
                "export(variance=True) of an adapted network whose outputs obey equations",
                expected="its mean, which the exported module has",
                remedy="leave variance= out, or take predictive()",
            )
        if variance and self._targets.weights is not None:
            raise InputError(
                "export(variance=True) of an adapted network with sample_weight=",
                expected="samples that count alike, or the mean, which the exported module has",
                remedy="leave variance= out, or take predictive()",
            )
        noise = self.noise if variance else None
        return exported_nested(self.prior, self.system, like, noise, kind)

    def _merged(self, x: Inputs) -> Merged:
        """The network with the probe for its last layer, compared on examples."""
        network = network_of_probe(self.prior, self.system)
        function = Functional(network, "all", self.prior.network.function.output)

        def both(part: Inputs) -> tuple[Tensor, Tensor, Tensor]:
            linear = self.predict(part)
            return linear, torch.zeros_like(linear), function.flat(function.theta, part)

        return compared(network, both, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """As of every fit, the weight of the lower layers, and the models that were compared on folds.

        Returns:
            A dict that ``json`` can write.
        """
        own = {
            "features": self.module.width,
            "body_weight": self.body_weight,
            "earlier": self.earlier,
            "trained": self.trained,
        }
        return {**super().summary(), **own, "rungs": [asdict(rung) for rung in self.rungs]}

    def _shown(self) -> dict[str, Any]:
        return {**({"verdict": self.verdict} if self.verdict else {}), **self.summary()}

    def __repr__(self) -> str:
        """The verdict, then samples, outputs, and what was chosen."""
        kind, shares = understood(self._targets), f"earlier {self.earlier:g}, weight {self.body_weight:g}"
        made = f"NestedFit({self.n} samples, {kind}, {shares}, ridge {self.ridge:.3g})"
        return "\n".join(filter(None, (self.verdict, made, self.record.reasons.get("data"))))

    def _identity(self) -> dict[str, Any]:
        """What tells the network from others."""
        features = self.prior.network
        model, function = features.model, features.function
        appended = model if isinstance(model, Appended) else None
        output = None if appended is None else appended.output
        return identity(function) | {
            "output": output if isinstance(output, str) else None,
            "custom_output": callable(output),
            "appended": None if appended is None else appended.width,
            "idle": getattr(model, IDLE, None),
            "heads": features.heads,
            "seed": features.seed,
            "stages": None if features.stages is None else list(features.stages),
        }

    def _state(self) -> dict[str, Any]:
        """The kernel and the solution."""
        own = dict(self.module.model.named_parameters()) if self.trained else {}
        known = ("temperature", "point_temperature", "variance_scale", "noise")
        return {
            "trained": {name: own[name] for name in self.module.function.names if own},
            "center": self.prior.center,
            "mixture": self.prior.mixture,
            "ridge": self.ridge,
            **self._solved_state(),
            "landmarks": self.prior.landmarks,
            "constraints": self.constraints,
            "rows": self.system.problem.examples.rows[HEAD],
            "rungs": self.rungs,
            "dropped": self.dropped,
            # closed forms cannot find again what held-out folds told
            "calibration": {} if self.held_out is None else {name: getattr(self, name) for name in known},
        }

    def _solved_state(self) -> dict[str, Any]:
        """The equations and their solution."""
        system = self.system
        if isinstance(system, NormalSystem):
            return {"normal": system.normal, "right": system.right}
        return {"kernel": system.kernel, "beta": system.beta}


def not_carried(prior: Prior, system: KernelSystem | NormalSystem, targets: Targets) -> float:
    """The share of a constant that the prior of the intercept leaves to the features: 1 − κ 1ᵀM1."""
    if isinstance(system, NormalSystem):  # ρ H⁻¹₁₁
        unit = torch.eye(len(system.normal), 1).to(system.solution)
        return system.ridge * float(system.solve(unit)[0, 0])
    root = targets.every_weight.sqrt().to(system.beta)[:, None]
    return 1 - prior.mixture.bias * float(root.T @ system.dual.solve(root))


def offset_remarks(prior: Prior, system: KernelSystem | NormalSystem, targets: Targets) -> tuple[str, ...]:
    """Whether values are so far from zero that predictions are off by what features take of their mean."""
    far = 0.0 if targets.classes is not None else remoteness(targets)
    if not 1 < far < math.inf or (off := far * abs(not_carried(prior, system, targets))) <= OFF:
        return ()
    told = (
        f"the mean of y is {far:.1g} times its spread, more than the intercept carries at the ridge "
        f"{system.ridge:.1g}: predictions may be off by {off:.1g} times the spread; pass y - y.mean(0)"
    )
    warn(told)
    return (told,)


def rounding_remarks(
    prior: Prior, rows: Tensor, kernels: Kernels, system: KernelSystem | NormalSystem, targets: Targets
) -> tuple[str, ...]:
    """Whether the rounding of features and gradients leaves errors in predictions."""
    # rows (N, D) or (N, D + E)
    # An entry of the body's kernel is wrong by ε √(K_aa K_bb), and a feature by ε of its size, independently.
    # What all samples have in common takes part in no prediction, as the sum of β is zero; its rounding does.
    mixture, function = prior.mixture, prior.network.function
    eps = function.precision.eps(function.dtype, function.device)
    if isinstance(system, NormalSystem):
        error = errors_in_weights(prior, rows, system.solution[1:])
    else:
        beta = system.coefficients.square()
        head, early = rows.tensor_split([prior.network.width], 1)
        of_head = head.square() @ (head + prior.center * prior.scale).square().mean(0)
        if mixture.earlier:  # the slope of κ is at most 1
            of_head = of_head + prior.share**2 * (early.square() @ early.square().mean(0))
        error = (1 - mixture.weight) ** 2 * (of_head @ beta + of_head.mean() * beta.sum(0))
        if mixture.weight and kernels.body is not None:
            of_body = kernels.body.diagonal()
            # 2: the kernel that β was solved with is wrong, and so are its rows for the sample predicted
            error = error + (mixture.weight / mixture.body) ** 2 * 2 * of_body.mean() * (of_body @ beta)
    largest = eps * float(error.max().sqrt())
    outputs = system.problem.unscaled(system.residual) - system.left_over
    scale = float((outputs - outputs.mean(0)).square().mean().sqrt())
    values = system.problem.unscaled(system.problem.residual)
    told = size_remarks(values, function.dtype, largest, targets.classes is not None)
    if told or largest <= TOLERANCE * scale:
        return told
    return (f"{rounded(largest, scale)}; model.double() keeps more digits",)


def size_remarks(targets: Tensor, kind: torch.dtype, other: float, classes: bool) -> tuple[str, ...]:
    """Whether predictions, and their variances, are more than the type that they have can hold."""
    # targets (N, C); other: errors of another kind
    numbers, largest = torch.finfo(kind), float(targets.abs().max())
    scale = float((targets - targets.mean(0)).square().mean().sqrt())
    if scale <= SPREAD * largest:
        return ()
    if not numbers.tiny < (1e-3 * scale) ** 2 < (1e3 * scale) ** 2 < numbers.max:
        what = "outputs that classes stand for" if classes else "y"
        said = f"{kind} does not hold the squares of {what}, whose spread is {scale:.1g}, and so no variances"
        told = f"{said}: pass {'' if classes else 'y / y.std(), or '}model.double()"
    elif numbers.eps * largest > max(other, TOLERANCE * scale):
        centered = "" if classes else "y - y.mean(0), or "
        told = f"{rounded(numbers.eps * largest, scale)}; pass {centered}model.double()"
    else:
        return ()
    warn(told)
    return (told,)


@torch.no_grad()
def solved(
    features: RandomHeads,
    x: Inputs,
    targets: Targets,
    memory: str | int | None,
    record: Choices,
    given: Shares = FREE,
    file: Path | None = None,
) -> NestedFit:
    """Form the kernels, or the features of many samples, choose what is not given, solve."""
    if given.weight:
        features.require_body()
    many = _is_many(features, x, targets, given)
    made = (
        in_weights(features, x, targets, memory, given)
        if many
        else _in_samples(features, x, targets, memory, given, file)
    )
    prior, choice, kernels, system, seconds = made
    rows = system.problem.examples.rows[HEAD]
    assert rows is not None
    averaged = {"features": AVERAGED} if getattr(features.model, "averaged", False) else {}
    told = (
        *rounding_remarks(prior, rows, kernels, system, targets),
        *offset_remarks(prior, system, targets),
    )
    told_of = {k: v.replace("lower layers", features.below) for k, v in choice.reasons().items()}
    if many:
        more = f"more than {MANY:,}" if batch_size(x) > MANY else "many more than these"
        told_of["solver"] = f"in the weights of {rows.shape[1]:,} features, as samples are {more}"
        if prior.landmarks is not None:
            landmarks = f"along {len(prior.landmarks.psi):,} of the samples"
            told_of["solver"] += f"; the kernel of earlier layers {landmarks}"
    record = replace(
        record,
        solver="primal" if many else "dual",
        criterion="loo" if given.ridge is None else "given",
        reasons={**record.reasons, **averaged, **told_of},
        warnings=(*record.warnings, *choice.warnings(), *told, *unused_remarks(features.function)),
        seconds=seconds,
        noise_factor=choice.taken.noise_factor,
    )
    features.function.known = KnownInputs.of(x, record.columns, features.function.token)
    return NestedFit(prior, targets, system, record)


def _is_many(features: RandomHeads, x: Inputs, targets: Targets, given: Shares) -> bool:
    """Whether the weights of features are fewer equations than the samples, which are many."""
    n, width = batch_size(x), features.width
    if given.weight or n > max(MANY, width):
        return not given.weight
    if n <= max(JUDGES, SLIM * width):
        return False
    # of the last layer alone no kernel has to be approximated
    derivatives = tries_derivatives(features, given, x, targets.labels is not None)
    return not derivatives and not (reads_earlier(given) and features.earlier(x))


Made = tuple[Prior, Choice, Kernels, KernelSystem | NormalSystem, dict[str, float]]


def _in_samples(
    features: RandomHeads,
    x: Inputs,
    targets: Targets,
    memory: str | int | None,
    given: Shares,
    file: Path | None,
) -> Made:
    """By the kernel of all samples."""
    start = time.perf_counter()
    found = read_given(features, x, given)
    kernels = kernels_of(found, features.width)
    kernels = _with_derivatives(features, x, targets, kernels, given, memory, file)
    seconds = {"kernel": time.perf_counter() - start}
    start = time.perf_counter()
    choice = choose(kernels, targets, given)
    bias = intercept(targets, choice.taken.ridge)
    kernel, mixture = kernels.mixed(choice.taken.weight, choice.taken.earlier, bias)
    prior = Prior(features, found[:, : features.width].mean(0), mixture)
    problem = problem_of(prior, (x, prior.scaled(found)), targets)
    dual = DualSystem(whitened_kernel(kernel, problem), problem.residual, choice.taken.ridge)
    system = KernelSystem(problem, dual, memory)
    return prior, choice, kernels, system, seconds | {"solve": time.perf_counter() - start}


def tries_derivatives(features: RandomHeads, given: Shares, x: Inputs, classes: bool) -> bool:
    """Whether the kernel of the lower layers is formed, at least for some samples."""
    if given.weight is not None:
        return given.weight > 0
    if given.earlier is not None or features.bodiless or features.space.dim > TRIED:
        return False
    return not (classes and features.earlier(x))


def _with_derivatives(
    features: RandomHeads,
    x: Inputs,
    targets: Targets,
    kernels: Kernels,
    given: Shares,
    memory: str | int | None,
    file: Path | None,
) -> Kernels:
    """With the kernel of the lower layers, where derivatives may take part."""
    if not tries_derivatives(features, given, x, targets.labels is not None):
        return kernels
    n = batch_size(x)
    if given.weight is None and n > TRIAL:
        rows = sampled(n, TRIAL)
        some = kernels.taken(rows.to(kernels.head.device))
        some = replace(some, body=features.kernel(take(x, rows), memory))
        if not choose(some, targets.taken(rows), given).taken.weight:
            return kernels
    return replace(kernels, body=features.kernel(x, memory, file))


OTHER = ("made on", "the network that was adapted", "load the same checkpoint into the same network first")


def restored_nested(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> NestedFit:
    """The fit that ``NestedFit.save`` wrote."""
    model, known, record = given_network(model), saved["network"], saved["record"]
    part = saved_output(known, output)
    if known["appended"] is None:
        model = not_alone(model)
    if (known["appended"] is not None or part is not None) and not isinstance(model, Appended):
        model = Appended(model, known["appended"], part)
    if isinstance(model, Appended):
        model.idle = known["idle"]
    stages = None if known["stages"] is None else tuple(known["stages"])
    features = RandomHeads(model, known["heads"], known["seed"], known["parameters"], stages=stages)
    if saved["trained"]:
        features = features.moved(_with(features.model, saved["trained"]))
    require_weights(features.function, known, path, OTHER)
    moved = tree.map_tensors(lambda t: t.to(features.function.device), saved)
    x, targets, rows = moved["x"], moved["targets"], moved["rows"]
    features.function.known = KnownInputs.of(x, record.columns, features.function.token)
    prior = Prior(features, moved["center"], saved["mixture"], moved.get("landmarks"))
    require_same_outputs(prior.rows, x, rows, path, OTHER)
    problem = problem_of(prior, (x, rows), targets)
    if moved["constraints"] is not None:
        problem = problem.given(moved["constraints"], samples=True)
    system: KernelSystem | NormalSystem
    if "normal" in saved:
        system = NormalSystem(problem, (moved["normal"], moved["right"]), saved["ridge"])
    else:
        dual = DualSystem(moved["kernel"], problem.residual, saved["ridge"], beta=moved["beta"])
        system = KernelSystem(problem, dual)
    fit = NestedFit(prior, targets, system, record)
    fit.held_out, fit.rungs, fit.dropped = moved["held_out"], saved["rungs"], moved.get("dropped", {})
    fit.calibrate(**saved["calibration"])
    return fit


def _with(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a network with other weights."""
    clone = copied(model)
    own = dict(clone.named_parameters())
    for name, value in weights.items():
        if name not in own or own[name].shape != value.shape:
            what = f"the fit was made on a network with a parameter {name} of shape {tuple(value.shape)}"
            raise FileFormatError(what, OTHER[1], "pass the network as it was when it was adapted")
        with torch.no_grad():
            own[name].copy_(value)
    return clone
