"""The solved equations of a linear fit, with or without equations on its outputs, and the δ that follows."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.constrained_primal import ConstrainedPrimal
from linnet.fitting.constraints import BATCH, Constraints, impose
from linnet.fitting.dual import DualSystem, RidgePath, joined
from linnet.fitting.equations import Wanted
from linnet.fitting.primal import Primal
from linnet.fitting.targets import Targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import number
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.jacobian import vjp_columns
from linnet.tangent.linearized import Linearized

System = DualSystem | Primal | ConstrainedPrimal
CRITERIA = ("loo", "gcv", "evidence")


def constrained(
    module: Linearized,
    x: Inputs,
    system: System,
    before: Constraints | None,
    asked: Wanted,
    weight: float | None,
    memory: str | int | None,
) -> tuple[System, Constraints]:
    """The solution that obeys equations as well.

    Args:
        module: The network.
        x: Training inputs.
        system: The solution so far.
        before: Equations that it obeys.
        asked: Equations that it is to obey.
        weight: w of a penalty; ``None`` for equations that hold exactly.
        memory: Budget.

    Returns:
        The solution and all its equations.

    Raises:
        MemoryBudgetError: If they do not fit the budget.
    """
    slack = 0.0 if weight is None else system.ridge / weight
    every = asked.equations if before is None else before.equations.joined(asked.equations)
    if not isinstance(system, DualSystem):
        rows = every.jacobian(module.function, memory).double()
        made = impose(module, asked, slack, rows.T @ rows, before, memory)
        free = system.free if isinstance(system, ConstrainedPrimal) else system
        return ConstrainedPrimal(free, made, memory), made
    size = system.kernel.shape[0]
    items = (
        ("kernel given the equations", 2 * 8 * size**2),
        ("equations at the training data", 3 * 8 * size * every.count),
        ("kernel of the equations", 4 * 8 * every.count**2),
    )
    plan = Plan(f"{every.count} equations on outputs", parse_bytes(memory, module.function.device), items)
    require(plan, ["constrain fewer outputs", "raise memory="])
    made = impose(module, asked, slack, every.kernel(module.function, memory), before, memory)
    made = made.extended(made.whitened(module.function, x, memory))
    # K̃ and r̃ lose what the new equations explain; those before them are taken off already
    new = made.design[:, 0 if before is None else before.equations.count :]
    residual = system.residual.reshape(-1) - new @ made.level[made.level.shape[0] - new.shape[1] :]
    kernel = system.kernel - new @ new.T
    return DualSystem(kernel, residual.view(system.n, system.c), system.ridge), made


def at_ridge(
    system: System, ridge: float | str, targets: Targets, held: Constraints | None
) -> tuple[System, Constraints | None, str]:
    """The same problem at another ridge.

    Args:
        system: Equations of a dual fit.
        ridge: ρ, or "loo", "gcv" or "evidence" to choose it by.
        targets: The training targets.
        held: Equations on outputs that it obeys.

    Returns:
        The solution, its equations on outputs, and what was done in words.

    Raises:
        InputError: If the ridge is none of these, or the fit was solved by conjugate gradients.
    """
    if not isinstance(system, DualSystem):
        raise InputError(
            "ridge= in an update of a fit solved by conjugate gradients",
            expected='solver="dual", whose kernel has every ridge',
            remedy="leave ridge= out, or fit again on all data",
        )
    if not isinstance(ridge, str):
        number("ridge", ridge, above=0, remedy='pass ρ > 0, or "loo", "gcv" or "evidence"')
        return *_moved(system, float(ridge), held), f"the ridge set to {float(ridge):.4g}"
    if ridge not in CRITERIA:
        raise InputError(
            f"ridge={ridge!r}",
            expected=f"a number, or one of {', '.join(CRITERIA)}",
            remedy='try ridge="loo"',
        )
    chosen = ridge_path_of(system, targets, held).best(ridge)
    return *_moved(system, chosen, held), f"the ridge chosen by {ridge}"


def ridge_path_of(
    system: DualSystem, targets: Targets, held: Constraints | None, ridges: Tensor | None = None
) -> RidgePath:
    """Every criterion along a path of ridges, penalties on outputs at the same weight all along.

    Args:
        system: The solution.
        targets: The training targets.
        held: Equations on outputs that it obeys.
        ridges: ρ, (R,); by default a grid around the scale of the kernel.

    Returns:
        The path. Penalties take an eigendecomposition for each ridge, everything else takes one in all.
    """
    classes = targets.classes is not None
    grid = system.spectrum.grid() if ridges is None else ridges.to(system.kernel.device)
    if held is None or not held.soft:
        return system.spectrum.path(grid, classes, targets.values)
    each = (_moved(system, float(ridge), held)[0].spectrum for ridge in grid)
    return joined([s.path(grid[i : i + 1], classes, targets.values) for i, s in enumerate(each)])


def _moved(
    system: DualSystem, ridge: float, held: Constraints | None
) -> tuple[DualSystem, Constraints | None]:
    """The solution and its equations at another ridge; K̃ and r̃ depend on it where there are penalties."""
    if held is None or not held.soft:
        return DualSystem(system.kernel, system.residual, ridge, spectrum=system.known_spectrum), held
    there = held.at_ridge(system.ridge, ridge)
    kernel = system.kernel + held.design @ held.design.T - there.design @ there.design.T
    change = held.design @ held.level - there.design @ there.level
    return DualSystem(kernel, system.residual + change.view(system.residual.shape), ridge), there


def without_equations(system: System, constraints: Constraints | None) -> DualSystem | Primal:
    """What a file keeps of a solution beside its equations: r instead of r̃; ``obeying`` undoes it.

    Args:
        system: The solution.
        constraints: Its equations.

    Returns:
        A solution of the residual t − f₀.
    """
    if isinstance(system, ConstrainedPrimal):
        return system.free
    if constraints is None or not isinstance(system, DualSystem):
        return system
    raw = system.residual + (constraints.design @ constraints.level).view(system.residual.shape)
    return DualSystem(system.kernel, raw, system.ridge, beta=system.beta)


def obeying(system: DualSystem | Primal, constraints: Constraints | None) -> System:
    """The solution under equations that ``without_equations`` took apart.

    Args:
        system: What the file kept.
        constraints: The equations.

    Returns:
        The solution.
    """
    if constraints is None:
        return system
    if isinstance(system, Primal):
        return ConstrainedPrimal(system, constraints)
    level = (constraints.design @ constraints.level).view(system.residual.shape)
    return DualSystem(system.kernel, system.residual - level, system.ridge, beta=system.beta)


@torch.no_grad()
def solve_delta(module: Linearized, x: Inputs, system: System, constraints: Constraints | None) -> None:
    """Set δ = Jᵀβ + Aᵀν, in place.

    Args:
        module: The network.
        x: Training inputs.
        system: The solution.
        constraints: Its equations.
    """
    function, nu = module.function, None
    flat = pulled_back(module, x, system.beta) if isinstance(system, DualSystem) else system.delta
    if constraints is not None:
        if isinstance(system, DualSystem):
            nu = constraints.multipliers(system.beta)
            flat = flat + constraints.equations.pull(function, nu)
        else:
            nu = system.multipliers / system.ridge if isinstance(system, ConstrainedPrimal) else None
    for name, value in module.space.to_params(flat).items():
        module.delta[name].copy_(value)
    if constraints is not None and nu is not None:
        constraints.refined(module, nu)


def pulled_back(module: Linearized, x: Inputs, beta: Tensor) -> Tensor:
    """Jᵀβ over many examples, batch by batch.

    Args:
        module: The network.
        x: N examples.
        beta: β, (N, C).

    Returns:
        (P,), in the network's type.
    """
    function = module.function
    flat = torch.zeros(module.space.dim, dtype=function.dtype, device=function.device)
    start = 0
    for part in split(x, BATCH):
        rows = slice(start, start + batch_size(part))
        flat += vjp_columns(function, part, beta[rows].to(flat.dtype))
        start = rows.stop
    return flat
