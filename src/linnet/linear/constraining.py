"""Makes a solution obey equations on its outputs."""

from __future__ import annotations

from linnet.linear.constrained_system import ConstrainedSystem
from linnet.linear.constraints import impose
from linnet.linear.dual import DualSystem
from linnet.linear.equations import Wanted
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.problem import Memory
from linnet.linear.system import System
from linnet.memory import Plan, parse_bytes, require
from linnet.tangent.linearized import Linearized


def constrained(
    module: Linearized, system: System, asked: Wanted, weight: float | None, memory: Memory
) -> System:
    """The solution that obeys equations, on top of those that it obeys already."""
    slack = 0.0 if weight is None else system.ridge / weight
    before = system.constraints
    every = asked.equations if before is None else before.equations.joined(asked.equations)
    if not isinstance(system, KernelSystem):
        rows = every.jacobian(module.function, memory).double()
        made = impose(module, asked, slack, rows.T @ rows, before, memory)
        free = system.free if isinstance(system, ConstrainedSystem) else system
        return ConstrainedSystem(free, made, memory)
    dual = system.dual
    size = len(dual.kernel)
    items = (
        ("kernel given the equations", 2 * 8 * size**2),
        ("equations at the training data", 3 * 8 * size * every.count),
        ("kernel of the equations", 4 * 8 * every.count**2),
    )
    plan = Plan(f"{every.count} equations on outputs", parse_bytes(memory, module.function.device), items)
    require(plan, ["constrain fewer outputs", "raise memory="])
    made = impose(module, asked, slack, every.kernel(module.function, memory), before, memory)
    made = made.extended(made.whitened(module.function, system.x, memory))
    # K̃ and r̃ lose what the new equations explain; those before them are taken off already
    new = made.design[:, 0 if before is None else before.equations.count :]
    residual = dual.residual.reshape(-1) - new @ made.level[made.level.shape[0] - new.shape[1] :]
    kernel = dual.kernel - new @ new.T
    solved = DualSystem(kernel, residual.view(dual.residual.shape), system.ridge)
    return KernelSystem(system.problem, solved, system.memory, made)
