"""The linear fit of a linearized network under cross-entropy at every position: tokens of texts, pixels.

    δ = argmin Σᵢ Σ_t ℓ(f_t(xᵢ), yᵢ_t) + ½ ρ‖δ‖²,        f(x) = f₀(x) + J(x)δ

An example is a sequence or an image with all its positions; labels of −100 do not count. It is solved in
the weights by products with J, whose rows are kept where there is space for all of them. Where the network
ends in a linear layer whose weights do not vary, f_t = W h_t + b, the model is linear in the layer's inputs h
as it is in f: D numbers are kept of a position instead of one for each word, with Wᵀg and WᵀΛW for the
gradient and the curvature of the loss.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from linnet.errors import DataError, InputError, LinnetError
from linnet.fitting.arguments import BATCH, Choices, count_in_words, whole_outputs
from linnet.fitting.composed import Summable
from linnet.fitting.head import example_hashes
from linnet.fitting.last_layer import giving
from linnet.fitting.remarks import copied_remarks, held_remarks
from linnet.fitting.solved_fit import SolvedFit
from linnet.fitting.solver import Solving, affordable
from linnet.likelihoods.discrete import Categorical
from linnet.likelihoods.likelihood import Likelihood
from linnet.linear.label_problem import LabelProblem, room_for_rows
from linnet.linear.newton import WeightNewton
from linnet.linear.positions import PositionLosses
from linnet.linear.problem import Memory
from linnet.linear.targets import Targets, position_labels
from linnet.memory import Plan, parse_bytes, require
from linnet.params import integer
from linnet.progress import track
from linnet.tangent.batch import IGNORED, Inputs, padded, split, take
from linnet.tangent.cut import Cut, replaced
from linnet.tangent.data import Data
from linnet.tangent.functional import Findings, Functional
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


def behind_layer(function: Functional, x: Inputs) -> tuple[Functional, nn.Linear] | None:
    """The network without the linear layer that it ends in, and the layer, where its weights do not vary."""
    few = take(x, slice(0, 1))
    f = function.check_runs(few)
    name = giving(function, few, f)
    if name is None:
        return None
    layer = function.model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    own, vary = ({id(p) for p in some} for some in (layer.parameters(), function._members()[0].values()))
    if own & vary or layer.out_features <= layer.in_features:
        return None
    inside = copy.copy(function)
    inside.model, inside.cache = replaced(function.model, name.split("."), nn.Identity()), Findings()
    inside._masked = inside._walked = None
    try:
        h = inside.check_runs(few)
    except LinnetError:  # such as one that looks at the number of outputs
        return None
    if h.shape[:-1] != f.shape[:-1] or h.shape[-1] != layer.in_features:
        return None
    error, size = (layer(h) - f).abs().max(), f.abs().max()
    return (inside, layer) if bool(error <= torch.finfo(f.dtype).eps ** 0.5 * size) else None


def position_problem(whole: Functional, x: Inputs, y: Tensor, axis: int, memory: Memory) -> LabelProblem:
    """The problem of labels (N, ...) at every position, of as few numbers each as the network allows."""
    cut = Cut.of(whole, x)
    headed, inputs = (whole, x) if cut is None else (cut.function, cut.inputs(x))
    found = behind_layer(headed, inputs) if axis in (-1, y.ndim) else None
    function, layer = (headed, None) if found is None else found
    # a problem in weights asks for no more than these losses have
    losses = cast(Likelihood, PositionLosses(headed, Categorical(axis=axis), layer, cut))
    base = whole_outputs(function, inputs).double()
    return LabelProblem(function, inputs, base, losses, y, room_for_rows(whole, memory))


class PositionFit(SolvedFit, Summable):
    """A solved cross-entropy fit with a class at every position. ``linnet.fit(..., axis=)`` makes it.

    An example is a sequence with all its positions, of which those with a label count. Its loss is their sum,
    in nats. What ``SoftmaxFit`` tells of outputs, this tells of losses.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Labels (N, ...), −100 where a position does not count.
        system: The solved problem.
        record: What was chosen and why.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
        >>> words = torch.arange(18).view(3, 6) % 5
        >>> lin = linnet.linearize(net, params="0.weight")
        >>> fit = linnet.fit(lin, (words[:, :-1], words[:, 1:]), "cross-entropy", axis=-1)
        >>> fit.losses((words[:1, :-1], words[:1, 1:])).shape, fit.loo_losses().shape, fit.forget([0]).n
        (torch.Size([1]), torch.Size([3]), 2)
    """

    system: WeightNewton
    loss = "cross-entropy"
    noise = 0.0  # the cross-entropy has its own, the draw of the class

    def __init__(self, module: Any, targets: Targets, system: WeightNewton, record: Choices) -> None:
        super().__init__(module, targets, system, record)
        self.x = self._losses.original(system.x)

    # -- predictions -----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """The outputs f(x).

        Args:
            x: T examples.

        Returns:
            Outputs in the network's own shape, (T, ..., C).

        Raises:
            DataError: If x is empty or not finite.
            NumericalError: If outputs overflow.
        """
        return torch.cat([self.module(part) for part in split(self._examples(x), BATCH)])

    @in_exact_mode
    def losses(self, data: Any) -> Tensor:
        """Loss of each example by the fit.

        Args:
            data: T examples and their labels, as ``linnet.fit`` takes them.

        Returns:
            Σ_t −log p(y_t) over the positions that count, in nats, (T,), float64.

        Raises:
            DataError: If the data are empty, or labels are out of range.
        """
        return self._of(data)[1]

    @in_exact_mode
    def loss_variance(self, data: Any) -> Tensor:
        """Variance of each example's loss under Laplace's posterior of δ, to first order in δ.

        With a label at one position only it is the variance of −log p of that one token.

        Args:
            data: T examples and their labels.

        Returns:
            gᵀJ H⁻¹ Jᵀg with g the gradient of the loss in the outputs, in nats², (T,), float64.

        Raises:
            DataError: If the data are empty, or labels are out of range.
        """
        found = [(slopes * solved).sum(0) for slopes, solved in self._solved(self._of(data)[0], "variances")]
        return torch.cat(found).double()

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
    def loo(self) -> Tensor:
        """Outputs for each training example without it: one exact Newton step from the optimum.

        Returns:
            Leave-one-out outputs in the network's own shape, (N, ..., C).

        Raises:
            MemoryBudgetError: If there are too many; ``loo_losses`` takes a number an example.
        """
        found, function = self._left_out(), self._function
        count = self.n * function.output_shape(self.x).numel()
        items = (("outputs of every position", count * function.dtype.itemsize),)
        plan = Plan("leave-one-out outputs", parse_bytes(self.memory, function.device), items)
        require(plan, ["take loo_losses(), one number an example", "raise memory="])
        outputs: Tensor = self._losses.outputs(found)
        return outputs

    @in_exact_mode
    def loo_losses(self) -> Tensor:
        """Loss of each training example by the fit without it: one exact Newton step from the optimum.

        Takes a solve for each example, many of which share their passes over the data. Near a refit where one
        example of many is left out; where few are fitted closely it can be off by nats, either way, and
        ``held_out_losses`` refits.

        Returns:
            In nats, (N,), float64.

        Source:
            Pregibon 1981; Giordano et al. 2019; Koh and Liang 2017.
        """
        return self.system.problem.losses(self._left_out())

    def _left_out(self) -> Tensor:
        """Outputs without each example, in the problem's own form."""
        # without the only one it is the network as it was
        return self.system.problem.base if self.n == 1 else self.system.loo_outputs()

    def held_out_losses(self, folds: int = 10, seed: int = 0) -> Tensor:
        """Loss of each example by fits without its part of the data, each by Newton's method from this one.

        The ridge stays as it is. Equal examples are in one part.

        Args:
            folds: Parts; with N or more of them each example is left out alone.
            seed: Seed of the parts.

        Returns:
            In nats, (N,), float64.

        Raises:
            InputError: If there are fewer than two parts.
            NumericalError: If a fit does not reach its tolerance.
        """
        folds, seed = integer("folds", folds, least=2), integer("seed", seed, least=0)
        problem, names = self.system.problem, example_hashes(self.x, self.targets)
        place = {name: at for at, name in enumerate(dict.fromkeys(names))}
        order = torch.randperm(len(place), generator=torch.Generator().manual_seed(seed))
        part = order[torch.tensor([place[name] for name in names])] % folds
        found = problem.losses(problem.base)  # without all of them it is the network as it was
        if len(place) > 1:
            for own in track(range(min(folds, len(place))), "refits"):
                rows = (part == own).nonzero()[:, 0]
                less, at = self.forget(rows), rows.to(self.targets.device)
                other = less._others(take(self.x, at), self.targets[at])
                found[at] = other.losses(other.base + other.push(less.system.eta))
        return found

    @in_exact_mode
    def influence(self, data: Any) -> Tensor:
        """Influence of each training example on the loss of others: the loss with it minus without it.

        Negative where the training example helps. The change of the fit is one exact Newton step, what it
        does to the loss of another example is taken to first order.

        Args:
            data: T examples and their labels, as ``linnet.fit`` takes them.

        Returns:
            In nats, (N, T), float64.

        Raises:
            DataError: If the data are empty, or labels are out of range.

        Source:
            Koh and Liang, ICML 2017, with the example's own curvature taken out of the Hessian.
        """
        pulls = self.system.loo_residuals()
        found = []
        for _, solved in self._solved(self._of(data)[0], "influence"):
            moved = self.system.problem.moved(solved.to(self._function.dtype))  # J s, (N·C, k)
            found.append(
                torch.einsum("nck,nc->nk", moved.view(self.n, self.system.c, -1).to(pulls), pulls.flatten(1))
            )
        return torch.cat(found, 1)

    # -- data ------------------------------------------------------------------------------------

    def _of(self, data: Any) -> tuple[LabelProblem, Tensor]:
        """Other data as a problem at the fit's outputs, and their losses."""
        x, y = self._gathered(data).pair
        other = replace(self._others(x, y), room=0)  # asked once: a product takes less than the rows of J
        outputs = other.base + other.push(self.system.eta)
        return replace(other, base=outputs), other.losses(outputs)

    def _others(self, x: Inputs, y: Tensor) -> LabelProblem:
        """The same model on other data, at f₀."""
        labels = position_labels(y, self._function.output_shape(x), self._axis, every=True)
        problem, inputs = self.system.problem, self._losses.inputs(x)
        return problem.of(inputs, whole_outputs(problem.function, inputs).double(), labels)

    def _solved(self, other: LabelProblem, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients of the losses of examples in δ and H⁻¹ times these, (P, k), some at a time."""
        size, n = self.system.settings.columns, other.n
        for first in track(range(0, n, size), what, -(-n // size)):
            one = [other.taken(torch.tensor([i])) for i in range(first, min(n, first + size))]
            slopes = torch.stack([each.pull(each.gradient(each.base)) for each in one], 1)
            yield slopes, self.system.solve(slopes)

    @property
    def _losses(self) -> PositionLosses:
        """The losses, and how the problem was made smaller."""
        found: Any = self.system.problem.likelihood
        assert isinstance(found, PositionLosses)
        return found

    @property
    def _axis(self) -> int:
        """The axis of the outputs that is the classes."""
        assert self._targets.axis is not None
        return self._targets.axis

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float, sample_weight: Any) -> PositionFit:
        """The fit with more examples: Newton's method from the present one."""
        (mine, theirs), (labels, new) = padded([self.x, x]), padded([self.x, x], [self.targets, y])
        if labels.shape[1:] != new.shape[1:]:
            raise DataError(
                f"y of the new data has shape {tuple(y.shape)}, that of the fit {tuple(labels.shape)}",
                expected="examples of one shape, or sequences with an attention_mask, which are filled up",
                remedy="pass a mask with the data of the fit, or sequences of its length",
            )
        more = self._others(theirs, new)
        if labels.shape == self.targets.shape:
            system = self.system.extended(more)
        else:  # the new ones are longer
            system = self.system.on(self._others(mine, labels).joined(more))
        targets = replace(self._targets, values=labels).joined(replace(self._targets, values=more.y))
        made: PositionFit = self._changed(targets, system, f"added {count_in_words(len(y))}", start)
        return made

    def _relabelled(self, index: Tensor, x: Inputs, y: Tensor) -> tuple[Targets, WeightNewton]:
        """Newton's method from the present optimum."""
        labels = self.targets.clone()
        labels[index] = position_labels(y, self._function.output_shape(x), self._axis, every=True).to(labels)
        return replace(self._targets, values=labels), self.system.relabelled(labels)

    def summary(self) -> dict[str, Any]:
        """As of every fit, the objective, the Newton steps that it took, and the positions that count.

        Returns:
            A dict that ``json`` can write.
        """
        counts = int((self.targets != IGNORED).sum())
        outputs = self._function.output_shape(self.x).numel()
        own = {"outputs": outputs, "positions": counts, "objective": self.system.objective[-1]}
        return {**super().summary(), **own, "steps": self.system.steps}


def fit_positions(
    lin: Linearized, data: Data, ridge: float, solving: Solving, axis: int, memory: str | int | None
) -> PositionFit:
    """Solve for the optimum of the cross-entropy at every position."""
    begin, (x, y), function = time.perf_counter(), data.pair, lin.function
    if function.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"the weights that take part are of type {function.dtype}",
            expected="float32 or float64, in which Newton's method ends; the other weights may be coarser",
            remedy="pass model.float(), or an adapter in float32, as peft makes it by default",
        )
    function.check_runs(take(x, slice(0, 1)))
    y = position_labels(y, function.output_shape(x), axis, every=True)
    problem = position_problem(function, x, y, axis, memory)
    seconds = {"network": time.perf_counter() - begin}
    begin = time.perf_counter()
    settings = affordable(function, x, solving.settings, memory)
    system = WeightNewton(problem, float(ridge), settings, None, solving.operator, memory=memory)
    seconds["solve"] = time.perf_counter() - begin
    solved = f"in the weights, by products with J of {int((y != IGNORED).sum())} positions"
    losses: Any = problem.likelihood
    if losses.layer is not None:
        solved += f", of the {problem.base.shape[-1]} inputs of the last layer each"
    if losses.cut is not None:
        solved += "; what comes before the first block that varies is computed once"
    reasons = {
        "solver": solved,
        "newton": f"{system.described()}, gradient {system.certificate():.0e} of that at the start",
        "ridge": "given",
        **data.reasons,
    }
    targets = Targets(y, None, 1.0, axis)
    remarks = (*data.warnings, *held_remarks(function), *copied_remarks(x, targets))
    record = Choices("cg", "given", reasons, remarks, seconds)
    return PositionFit(lin, targets, system, record)
