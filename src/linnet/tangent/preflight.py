"""Preflight check: is a network supported, by which method, at what cost, and on which scale are its outputs.

Values alone prove little of a scale (probabilities for logits, rates for their logarithms): the logits of a
network may all lie in [0, 1]. So they are looked at together with what the network does last, which the graph
of its derivatives tells. Probabilities of classes that sum to one are no accident; their logarithms are
logits as good as any others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import ModelError, NumericalError
from linnet.likelihoods.discrete import Bernoulli, Categorical, Poisson
from linnet.likelihoods.gaussian import HeteroscedasticGaussian
from linnet.likelihoods.likelihood import Likelihood
from linnet.memory import Plan, format_bytes
from linnet.params import warn
from linnet.shown import Record
from linnet.tangent.batch import Inputs, observed, require_some, take
from linnet.tangent.capture import proved_plan
from linnet.tangent.coordinates import moved_network
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.gram import GramTask, plan_gram
from linnet.tangent.independence import dependence, is_random, unsteady
from linnet.tangent.inputs import taken
from linnet.tangent.jacobian import jvp_path
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.nonfinite import refuse_derivative
from linnet.tangent.selection import Selector
from linnet.tangent.trace import Trace, trace

LEFT_OUT = "parameter(s) are left out by params="
NAMES = {
    "linear": "linear",
    "conv": "convolution",
    "conv-transposed": "transposed convolution",
    "embedding": "embedding",
    "scale": "scale",
    "shift": "shift",
}


@dataclass(frozen=True, repr=False)
class Coverage(Record):
    """Treatment of one parameter."""

    name: str  # its name
    shape: tuple[int, ...]  # its shape
    uses: int  # how many operations of the forward pass read it
    # the rule, or why it is differentiated example by example, or that it is unused; "not examined" where the
    # network is not ready
    treatment: str
    exact: bool  # whether no rule covers it (slower, equally right)


@dataclass(frozen=True, repr=False)
class Preflight(Record):
    """Result of the preflight check; print it.

    Args:
        model: Name of the network's class.
        outputs: C.
        parameters: Treatment of every tracked parameter.
        jvp: How directional derivatives are formed: ``"forward"`` or ``"double-backward"``.
        findings: Everything a user should know, most serious first.
        ok: Whether results can be trusted.
        memory: Predicted memory of the kernel of the batch.

    Example:
        >>> checked = preflight(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(2, 3))
        >>> checked.total, checked.parameters[0].treatment
        (26, 'linear')
    """

    model: str
    outputs: int
    parameters: tuple[Coverage, ...]
    jvp: str
    findings: tuple[str, ...]
    ok: bool
    memory: Plan

    def _shown(self) -> dict[str, Any]:
        return {
            "network": self.model,
            "parameters": len(self.parameters),
            "P": self.total,
            "outputs": self.outputs,
            "directional derivatives": self.jvp,
            "memory": f"{format_bytes(self.memory.peak)} of {format_bytes(self.memory.budget)}",
            "verdict": "ready" if self.ok else "NOT ready",
            "notes": list(self.findings),
            "treatment": {one.name: one.treatment for one in self.parameters},
        }

    @property
    def total(self) -> int:
        """P, the number of tracked scalars."""
        return sum(torch.Size(p.shape).numel() for p in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON.

        Returns:
            A dict.
        """
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        """The printed report."""
        width = max((len(p.name) for p in self.parameters), default=0)
        shapes = ["×".join(map(str, p.shape)) or "scalar" for p in self.parameters]
        wide = max(map(len, shapes), default=0)
        return "\n".join(
            [
                "ready" if self.ok else "NOT ready",
                *(f"note: {finding}" for finding in self.findings),
                f"{self.model}: {len(self.parameters)} parameters tracked (P = {self.total:,}), "
                f"{self.outputs} outputs",
                f"directional derivatives: {self.jvp}",
                str(self.memory),
                *(
                    f"  {p.name:<{width}}  {s:<{wide}}  {p.treatment}"
                    for p, s in zip(self.parameters, shapes, strict=True)
                ),
            ]
        )


@in_exact_mode
def preflight(
    model: nn.Module | Linearized,
    batch: Inputs,
    params: Selector = None,
    output: OutputAdapter = None,
    memory: str | int | None = None,
) -> Preflight:
    """Check a network on a batch: determinism, derivatives, coverage of every parameter, memory.

    Args:
        model: A network, or its linearization.
        batch: Inputs of N examples, in the form the network takes.
        params: Which parameters vary, as for ``linearize``.
        output: The output adapter, as for ``linearize``.
        memory: Budget that the memory plan is made for.

    Returns:
        The report; ``print`` it.

    Raises:
        ModelError: If the network cannot run on the batch, or has no usable derivative.
        DataError: If the batch is empty.
        InputError: If ``params`` selects nothing, or an argument has the wrong type.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> preflight(net, torch.ones(2, 3)).ok
        True
    """
    function = model.function if isinstance(model, Linearized) else Functional(model, params, output)
    batch = taken(function, batch, "batch")
    require_some(batch, "batch")
    value = function.check_runs(batch)
    fatal = _fatal(function, batch)
    path, why = ("rows", "") if fatal else jvp_path(function, batch)
    notes = [*_mode_findings(model), *([why] if why else [])]
    left_out = sum(1 for _ in function.model.parameters()) - len(function.names)
    notes += [f"{left_out} {LEFT_OUT}"] if left_out else []
    notes += scale_remarks(function, Bernoulli() if value[0].numel() == 1 else Categorical(), batch)
    for name, mask in function.masks.items():
        notes.append(f"{int((~mask).sum()):,} of {mask.numel():,} entries of {name!r} do not vary")
    shapes = function.space.shapes
    coverage = tuple(Coverage(name, tuple(shapes[name]), 0, "not examined", False) for name in function.names)
    plan = Plan("kernel of this batch", 0, ())
    if not fatal:
        coverage = _coverage(function, trace(function, batch), batch)
        plan = plan_gram(GramTask(function, batch, None, "full"), memory).memory
        notes += _coverage_findings(coverage)
        if plan.peak > plan.budget:
            notes.append("the kernel of this batch would not fit the memory budget")
    name = type(function.model).__name__
    return Preflight(name, value[0].numel(), coverage, path, (*fatal, *notes), not fatal, plan)


def _coverage_findings(coverage: tuple[Coverage, ...]) -> list[str]:
    """Findings on the treatment of the parameters."""
    found = []
    unused = [p.name for p in coverage if p.treatment.startswith("unused")]
    if unused:
        found.append(f"the outputs do not depend on {len(unused)} parameter(s), first {unused[0]!r}")
    exact = [p.name for p in coverage if p.exact]
    if exact:
        found.append(
            f"{len(exact)} parameter(s) are differentiated example by example (exact, slower), "
            f"first {exact[0]!r}"
        )
    return found


def _mode_findings(model: nn.Module) -> list[str]:
    """Findings on the network's own mode settings."""
    if isinstance(model, Linearized) or not model.training:
        return []
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    names = ", ".join(sorted({type(m).__name__ for m in model.modules() if isinstance(m, kinds)}))
    about = "it is linearized in evaluation mode, your module is not changed"
    return [f"the network is in training mode with {names}; {about}"] if names else []


def _fatal(function: Functional, batch: Inputs) -> list[str]:
    """A sentence on why examples have no derivatives of their own; none where they have."""
    if is_random(function, batch):
        return ["the network {}; {}".format(*unsteady(function, batch))]
    try:
        if (found := dependence(function, batch)) is not None:
            return [f"{found}, so per-example gradients do not exist"]
        inside = moved_network(function) or function
        proved_plan(inside, batch, trace(inside, batch))
        refuse_derivative(function, batch)
    except NumericalError as error:
        return [f"{error.what}; {error.remedy}"]
    except ModelError as error:
        cause = (str(error.__cause__ or error.what).strip().splitlines() or [""])[0]
        alone = error.__cause__ is not None
        return [f"the network cannot run on one example alone ({cause})" if alone else cause]
    return []


def _coverage(function: Functional, run: Trace, batch: Inputs) -> tuple[Coverage, ...]:
    """Treatment of every tracked parameter."""
    inside = moved_network(function)
    if inside is not None:  # ε is differentiated by the rules for what it moves
        return (_in_coordinates(function, _coverage(inside, trace(inside, batch), batch)),)
    plan = proved_plan(function, batch, run)
    found = []
    for name in function.names:
        uses = [use for use in run.uses if name in use.sources]
        if name in plan.exact:
            text, exact = f"example by example ({plan.exact[name]})", True
        elif name in plan.unused:
            text, exact = "unused: its gradient is zero", False
        elif not uses:
            text, exact = "not seen: its gradient is zero here", False
        else:
            kinds = list(dict.fromkeys(NAMES[use.kind] for use in uses))
            through = "" if all(use.direct for use in uses) else ", through a tensor computed from it"
            text, exact = (
                " and ".join(kinds) + (f", {len(uses)} uses" if len(uses) > 1 else "") + through,
                False,
            )
        found.append(Coverage(name, tuple(function.space.shapes[name]), len(uses), text, exact))
    return tuple(found)


def _in_coordinates(function: Functional, inside: tuple[Coverage, ...]) -> Coverage:
    """The treatment of the coordinates of a network, from that of its parameters."""
    name = function.names[0]
    exact = [p for p in inside if p.exact]
    text = f"coordinates of {len(inside)} parameters, by the rules for each"
    if exact:
        text += f"; {exact[0].name}: {exact[0].treatment}" + (
            f" and {len(exact) - 1} more" if exact[1:] else ""
        )
    uses = sum(p.uses for p in inside)
    return Coverage(name, tuple(function.space.shapes[name]), uses, text, bool(exact))


# -- the scale of outputs ----------------------------------------------------------------------------

FEW = 16  # examples that are looked at
ROUNDING = 1e-4  # by how much the sum of an example's probabilities may miss one
SQUASHING = {
    "Sigmoid": "sigmoid",
    "LogSigmoid": "log-sigmoid",
    "Softmax": "softmax",
    "Hardsigmoid": "sigmoid",
}
SQUASHING["Reciprocal"] = "sigmoid"  # 1 / (1 + exp(−f))
POSITIVE = {"Softplus": "softplus", "Exp": "exponential", "Relu": "ReLU", "Abs": "abs", "Pow": "power"}
# nodes of the graph that keep the scale; sums and products do with constants, that is with one input alone
ALIKE = frozenset(
    {
        "View",
        "ReshapeAlias",
        "UnsafeView",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Permute",
        "T",
        "Slice",
        "Select",
    }
    | {"Clone", "Expand", "Alias", "ToCopy", "Index", "Split", "Unbind", "Clamp", "ClampMin", "ClampMax"}
    | {"Add", "Sub", "Rsub", "Mul", "Div"}
)
JOINED = ("Cat", "Stack")


def scale_remarks(
    function: Functional, likelihood: Likelihood, x: Inputs, f: Tensor | None = None
) -> tuple[str, ...]:
    """Whether outputs are on another scale than the likelihood's."""
    if not isinstance(likelihood, Bernoulli | Categorical | Poisson | HeteroscedasticGaussian):
        return ()
    few = take(observed(x)[0], slice(0, FEW))
    told = _told(function, likelihood, function.check_runs(few) if f is None else f[:FEW], few)
    if told is None:
        return ()
    found, expected, last = told
    return (
        f"the network's outputs are {found}. {type(likelihood).__name__}() expects {expected}; leave the "
        f"last {last} out",
    )


def warn_of_scale(function: Functional, likelihood: Likelihood, x: Inputs, f: Tensor | None = None) -> None:
    """Warn if outputs are on another scale than the likelihood's."""
    for line in scale_remarks(function, likelihood, x, f):
        warn(line)


def _told(function: Functional, likelihood: Likelihood, f: Tensor, x: Inputs) -> tuple[str, str, str] | None:
    """What outputs are, what they should be, and the last operation; ``None`` where nothing is wrong."""
    if not bool(f.isfinite().all()):
        return None
    if isinstance(likelihood, Poisson):
        last = POSITIVE.get(_last(function, x)) if bool((f >= 0).all()) else None
        return None if last is None else ("rates", "their logarithms", last)
    if isinstance(likelihood, HeteroscedasticGaussian):
        axis = likelihood.axis
        variances = f.narrow(axis, f.shape[axis] // 2, f.shape[axis] // 2)
        logs = likelihood.parametrization == "log-variance"
        last = POSITIVE.get(_last(function, x)) if logs and bool((variances >= 0).all()) else None
        return None if last is None else ("means and variances", "means and log-variances", last)
    inside = bool((f >= 0).all()) and bool((f <= 1).all())
    if isinstance(likelihood, Categorical) and inside and _sums_to_one(f, likelihood.axis):
        return "probabilities, not negative and summing to one", "logits", "softmax"
    if not inside and not bool((f <= 0).all()):
        return None
    last = SQUASHING.get(_last(function, x))
    return None if last is None else ("probabilities" if inside else "log-probabilities", "logits", last)


def _sums_to_one(f: Tensor, axis: int) -> bool:
    """Whether the entries along an axis, two or more, sum to one."""
    if not -f.ndim < axis < f.ndim or f.ndim < 2 or f.shape[axis] < 2:
        return False
    return float((f.double().sum(axis) - 1).abs().max()) < ROUNDING


@in_exact_mode
def _last(function: Functional, x: Inputs) -> str:
    """The last operation of a network that is more than another view of its result; empty where none is."""
    with torch.enable_grad():
        params = {name: value.requires_grad_() for name, value in function.theta.items()}
        return _named(function(params, take(x, slice(0, 2))).grad_fn)


def _named(node: Any) -> str:
    """The operation of a node of the graph, or of what it passes on: of joined tensors, the last."""
    while node is not None:
        name = node.name().partition("Backward")[0]
        before = [one for one, _ in node.next_functions if one is not None]
        if not before or not (name in JOINED or (name in ALIKE and len(before) == 1)):
            return str(name)
        node = before[-1]
    return ""
