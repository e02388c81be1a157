"""Checks of the Gauss-Newton optimizer's groups, states, closures and losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from linnet.errors import InputError
from linnet.params import instance, number
from linnet.tangent.linearized import Linearized

# what a state holds since its first version
SAVED = {"version", "tau", "zeta", "steps", "failures", "first", "curvature", "inverse"}


def checked_state(state: Any, version: int, likelihood: str) -> Mapping[str, Any]:
    """The saved state of a Gauss-Newton optimizer beside torch's groups and states."""
    own: Mapping[str, Any] | None = state.get("gauss_newton") if isinstance(state, Mapping) else None
    complete = isinstance(own, Mapping) and own.get("version") == version and set(own) >= SAVED
    if own is None or not complete:
        raise InputError(
            "state_dict lacks what GaussNewton keeps",
            expected=f"a state_dict of GaussNewton, version {version}",
            remedy="pass what state_dict() of a GaussNewton returned",
        )
    if own.get("likelihood", likelihood) != likelihood:
        raise InputError(
            f"state_dict was saved with {own['likelihood']}",
            expected=f"the likelihood of this optimizer, {likelihood}",
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
    if closure is not None and not callable(closure):
        raise InputError(
            f"closure={closure!r}", expected="a function without arguments", remedy="leave it out"
        )
    if loss is not None:
        check_loss("loss", loss)


def check_loss(name: str, loss: Any) -> None:
    """Raise unless a loss is one real number, finite or not."""
    one = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not one and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise InputError(
            f"{name} is {kind}", expected="the mean loss of the batch, one number", remedy="average it"
        )


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
