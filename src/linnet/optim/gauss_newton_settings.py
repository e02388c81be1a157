"""Settings and step report of GaussNewton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from torch import Tensor, nn

from linnet.errors import InputError
from linnet.params import choice, flag, function, instance, integer, known, number, optional, refuse
from linnet.params import seed as checked_seed
from linnet.progress import Log, check_log
from linnet.tangent.functional import OutputAdapter, check_output
from linnet.tangent.linearized import Linearized
from linnet.tangent.selection import Selector, check_selector


class Damping(NamedTuple):
    """Initial values and schedules of the two dampings of GaussNewton (Botev 2020, section 4.4.1).

    τ belongs to the quadratic model, ζ to the approximate curvature that is inverted. Both are in units of
    the curvature of the mean loss.

    Args:
        tau: τ at the start; ``None`` takes the best of a grid at the first step.
        zeta: ζ at the start; ``None`` takes the best of a grid at the first step.
        decay: ω, the factor by which τ and ζ move.
        tau_period: Steps between two looks at ρ; 0 leaves τ as it is.
        zeta_period: Steps between two searches for ζ; 0 leaves ζ as it is.
        inversion: ``"factored"``: ζ is put into the Kronecker factors (eq. 4.25 to 4.27), two Cholesky
            decompositions a layer; ``"exact"``: by the factors' eigendecompositions.

    Example:
        >>> Damping(tau=1.0, zeta=0.1).decay
        0.95
    """

    tau: float | None = None
    zeta: float | None = None
    decay: float = 0.95
    tau_period: int = 5
    zeta_period: int = 20
    inversion: str = "factored"


class Settings(NamedTuple):
    """Further settings of GaussNewton, which says what each is."""

    lr: float = 1.0
    momentum: bool = False
    average: float = 0.95
    inverse_period: int = 5
    sharing: str = "expand"
    params: Selector = None
    output: OutputAdapter = None
    seed: int = 0
    rejections: int = 5
    limit: float = 2.0
    examples: int | None = None
    log: Log | None = None


class GaussNewtonOptions(TypedDict, total=False):
    """Keywords of ``GaussNewton``: the fields of ``Settings``."""

    lr: float
    momentum: bool
    average: float
    inverse_period: int
    sharing: str
    params: Selector
    output: OutputAdapter
    seed: int
    rejections: int
    limit: float
    examples: int | None
    log: Log | None


class StepReport(NamedTuple):
    """Report of one step of GaussNewton.

    Args:
        step: Number of the step, from 1.
        examples: N, the examples of the batch, of all processes.
        loss: Mean loss of the batch before the step, without weight decay.
        objective: The same with ½ λ ‖θ‖².
        rho: ρ, the reduction of the objective over that of its model (eq. 4.21); ``None`` at steps where it
            is not measured.
        tau: τ after the step.
        zeta: ζ that the direction was computed with.
        alpha: α of the step (eq. 4.18), before the learning rate.
        mu: Share of the step before, where momentum is on; else 0.
        model_reduction: q(δ) − q(0) of the step δ that was taken; negative.
        gradient_norm: ‖∇E‖.
        direction_norm: ‖(G̃ + (λ + ζ)I)⁻¹ ∇E‖.
        step_norm: ‖δ‖.
        rejected: Whether the step before, or this one, was taken back.

    Example:
        >>> import linnet, torch
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = linnet.optim.GaussNewton(net, linnet.likelihoods.Gaussian(), "full", "exact", 0.0)
        >>> report = optimizer.step(torch.randn(9, 2), torch.randn(9, 1))
        >>> report.step, round(report.alpha, 3)  # Newton's step, taken whole
        (1, 1.0)
    """

    step: int
    examples: int
    loss: float
    objective: float
    rho: float | None
    tau: float
    zeta: float
    alpha: float
    mu: float
    model_reduction: float
    gradient_norm: float
    direction_norm: float
    step_norm: float
    rejected: bool


def checked_damping(damping: Any) -> Damping:
    """A damping from what the user gave."""
    if damping is None:
        return Damping()
    if not isinstance(damping, Damping):
        number("damping", damping, least=0)
        return Damping(float(damping), float(damping))
    for name in ("tau", "zeta"):
        optional(number, f"damping.{name}", getattr(damping, name), least=0)
    number("damping.decay", damping.decay, above=0, below=1, remedy="leave it out for 0.95")
    for name in ("tau_period", "zeta_period"):
        integer(f"damping.{name}", getattr(damping, name), 0)
    choice("damping.inversion", damping.inversion, ("factored", "exact"))
    return damping


def checked_settings(given: GaussNewtonOptions) -> Settings:
    """Settings from keyword arguments."""
    known("GaussNewton", given, Settings._fields)
    settings = Settings(**given)
    number("lr", settings.lr, above=0, remedy="leave lr= out for 1")
    number("limit", settings.limit, above=0, remedy="leave limit= out for 2")
    flag("momentum", settings.momentum)
    checked_seed("seed", settings.seed)
    check_output(settings.output)
    check_selector(settings.params)
    choice("sharing", settings.sharing, ("expand", "reduce"))
    number("average", settings.average, above=0, below=1)
    for name in ("inverse_period", "rejections"):
        integer(name, getattr(settings, name), 1)
    optional(integer, "examples", settings.examples, 1)
    check_log(settings.log)
    return settings


# what the state of a GaussNewton holds beside torch's groups and states
SAVED = {
    "likelihood", "network", "tau", "zeta", "steps", "failures", "first", "buffers", "modes", "curvature",
    "inverse",
}  # fmt: skip


def checked_state(state: Any, likelihood: str, network: Mapping[str, list[str]]) -> Mapping[str, Any]:
    """The saved state of a Gauss-Newton optimizer beside torch's groups and states."""
    own = state.get("gauss_newton") if isinstance(state, Mapping) else None
    if not (isinstance(own, Mapping) and set(own) == SAVED):
        raise InputError(
            "state_dict lacks what GaussNewton keeps",
            expected="a state_dict of GaussNewton",
            remedy="pass what state_dict() of a GaussNewton returned",
        )
    if own["likelihood"] != likelihood:
        raise InputError(
            f"state_dict was saved with {own['likelihood']}",
            expected=f"the likelihood of this optimizer, {likelihood}",
            remedy="make the optimizer as the saved one was, or start without its state",
        )
    for what, here in network.items():
        there = own["network"][what]
        if there != here:
            saved, wanted = (
                [one for one in these if one not in those] for these, those in ((there, here), (here, there))
            )
            raise InputError(
                f"state_dict was saved with {what} {', '.join(saved[:3]) or 'in another order'}",
                expected=f"{what} of this optimizer, {', '.join((wanted or here)[:3])}",
                remedy="make the optimizer as the saved one was, or start without its state",
            )
    return own


def checked_group(group: Mapping[str, Any], trained: Sequence[nn.Parameter]) -> list[Tensor]:
    """The parameters of a new group."""
    remedy = "name the group's parameters"
    instance("param_group", group, Mapping, "a dict with 'params'", remedy)
    if "params" not in group:
        raise InputError(f"param_group has {sorted(map(str, group))}", expected="'params'", remedy=remedy)
    instance("param_group['params']", group["params"], Iterable, "parameters of the network", remedy)
    given = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    ours = {id(p) for p in trained}
    if not all(id(p) in ours for p in given):
        raise InputError(
            "param_group holds a parameter that is not trained",
            expected="parameters of the network, selected by params=",
            remedy="select them with params= when the optimizer is made",
        )
    for name in {"lr", "weight_decay"} & set(group):
        number(name, group[name], least=0)
    return given


def check_given(closure: Any, loss: Any) -> None:
    """Raise unless at most one of closure and loss is given, and it can be used."""
    if closure is not None and loss is not None:
        raise InputError("closure and loss are both given", expected="one of them", remedy="drop loss=")
    optional(function, "closure", closure, "a function without arguments")
    if loss is not None:
        check_loss("loss", loss)


def check_loss(name: str, loss: Any) -> None:
    """Raise unless a loss is one real number, finite or not."""
    one = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not one and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        refuse(name, loss, "the mean loss of the batch, one number", "average it")


def parameters_of(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters of a network that can be trained."""
    if isinstance(model, Linearized):
        raise InputError(
            "model is linearized already", "the network itself", "pass the network, or use linnet.fit"
        )
    parameters = {name: model.get_parameter(name) for name in names}
    if not any(p.requires_grad for p in parameters.values()):
        raise InputError(
            f"none of the {len(parameters)} parameters requires a gradient",
            expected="at least one that is to be trained",
            remedy="call model.requires_grad_(True), or select others with params=",
        )
    return parameters


def check_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if none of the parameters that are trained has a gradient."""
    free = [p for p in parameters.values() if p.requires_grad]
    if free and all(p.grad is None for p in free):
        raise InputError(
            "no parameter has a gradient",
            expected="gradients of the loss in .grad",
            remedy="call loss.backward() first, or let step(x, y) compute loss and gradient itself",
        )
