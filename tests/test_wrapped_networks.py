"""Networks in torch's wrappers for several processes: trained like one, exact, or refused with a reason.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import linnet
from linnet.continual import EWC, OnlineLaplace, SynapticIntelligence
from linnet.distributed import world
from linnet.errors import LinnetError
from linnet.likelihoods import Categorical
from linnet.optim import GaussNewton, IterativeLinearization, KernelDrift, OutputGap
from tests.curvatures.side_by_side import grouped
from tests.ranks import one_of_ranks, run_ranks

N = 24
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=G, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=G)
Wrap = Callable[[nn.Module], nn.Module]


def net() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def told_on(wrapped: nn.Module, steps: int) -> list[int]:
    """The steps that this process hears of: all, unless it shares the network and is not the first."""
    shares = isinstance(wrapped, nn.parallel.DistributedDataParallel) and world()[0] > 0
    return [] if shares else list(range(1, steps + 1))


def iterated(wrap: Wrap, part: slice, period: Any) -> Tensor:
    """Weights after seven steps of iterative linearization, and when features changed."""
    told: list[int] = []
    wrapped = wrap(model := net())
    training = IterativeLinearization(
        wrapped, sgd, period, record_gap=True, log=lambda _, step: told.append(step)
    )
    for _ in range(7):
        training.step(lambda module: nn.functional.cross_entropy(module(X[part]), Y[part]))
    assert told == told_on(wrapped, 7)
    return torch.cat([flat(model), torch.tensor(training.report.updates).double()])


def stepped(wrap: Wrap, part: slice, structure: str) -> Tensor:
    """Weights after four Gauss-Newton steps."""
    told: list[int] = []
    wrapped, log = wrap(model := net()), lambda _, step: told.append(step)
    optimizer = GaussNewton(wrapped, Categorical(), structure, "exact", damping=0.1, log=log)
    for _ in range(4):
        optimizer.step(X[part], Y[part])
    assert told == told_on(wrapped, 4)
    return flat(model)


def learned(wrap: Wrap, part: slice, kind: str) -> Tensor:
    """The penalty and weights after two tasks, the second trained with the penalty of the first."""
    inner = wrap(model := net())
    method: Any = {"ewc": EWC, "si": SynapticIntelligence}.get(kind, OnlineLaplace)(
        inner, *([] if kind == "si" else [Categorical()])
    )
    optimizer = sgd(inner.parameters())
    for x, y in ((X, Y), (X.flip(1), Y)):
        for _ in range(3):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(inner(x[part]), y[part]) + 0.01 * method.penalty()).backward()
            optimizer.step()
            if kind == "si":
                method.after_step()
        method.consolidate((x, y))
    with torch.no_grad():
        model[0].weight.add_(0.1)  # type: ignore[operator, union-attr, index]
    return torch.cat([flat(model), method.penalty().detach().reshape(1)])


def numbers(wrap: Wrap, part: slice) -> dict[str, Tensor]:
    """What processes with a part of the data each must find as one with all."""
    found = {f"iterated, {period}": iterated(wrap, part, period) for period in (1, 3, None)}
    found["iterated, by the gap"] = iterated(wrap, part, OutputGap(0.02))
    found["iterated, by the kernel"] = iterated(wrap, part, KernelDrift(0.01, X[:6]))
    found |= {f"stepped, {structure}": stepped(wrap, part, structure) for structure in ("kfac", "diagonal")}
    found |= {f"learned, {kind}": learned(wrap, part, kind) for kind in ("ewc", "laplace", "si")}
    found["kernel"] = linnet.linearize(wrap(net())).kernel(X[:5])
    whole = linnet.curvature(wrap(net()), (X, Y), Categorical(), **grouped("full"))
    found["curvature"] = whole.dense()
    return found


def trained(wrap: Callable[[nn.Module], nn.Module]) -> tuple[Tensor, Tensor]:
    """Outputs of a linearization after three steps, and δ."""
    lin = linnet.linearize(net())
    module = wrap(lin)
    optimizer = sgd(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(X), Y).backward()
        optimizer.step()
    deltas = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    with torch.no_grad():
        return module(X).detach(), torch.cat([d.detach().flatten() for d in deltas])


def refusals() -> dict[str, Callable[[], object]]:
    """Calls with networks of which each process has a part."""
    mesh = init_device_mesh("cpu", (2,))
    sharded: Any = fully_shard(net(), mesh=mesh)
    parallel = parallelize_module(net(), mesh, {"0": ColwiseParallel()})
    return {
        "linearize": lambda: linnet.linearize(sharded),
        "curvature": lambda: linnet.curvature(sharded, (X, Y), Categorical(), **grouped("kfac")),
        "tensor parallel": lambda: linnet.linearize(parallel),
        "adapt": lambda: linnet.adapt(sharded, (X, Y)),
        "gram": lambda: linnet.spectrum.gram(sharded, X),
    }


def said_by(act: Callable[[], object]) -> str:
    try:
        act()
    except LinnetError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder, torchs_own=True):
        found = numbers(nn.parallel.DistributedDataParallel, slice(rank, None, size))
        mesh = init_device_mesh("cpu", (size,))
        outputs, delta = trained(lambda module: fully_shard(module, mesh=mesh))
        torch.save({**found, "outputs": outputs, "delta": delta}, folder / f"rank{rank}.pt")
        said = {name: said_by(act) for name, act in refusals().items()}
        (folder / f"said{rank}.json").write_text(json.dumps(said))


@pytest.mark.long
@pytest.mark.dist
def test_two_processes_train_like_one_and_refuse_networks_in_parts(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    expected = numbers(lambda module: module, slice(None))
    outputs, delta = trained(lambda module: module)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert torch.equal(found.pop("outputs"), outputs)
        assert torch.equal(found.pop("delta"), delta)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-8, atol=1e-10), f"{name} on rank {rank}"
        said = json.loads((tmp_path / f"said{rank}.json").read_text())
        for name, text in said.items():
            assert text.startswith("ModelError"), f"{name}: {text}"
            assert "of which each process has a part" in text
            assert "get_model_state_dict" in text


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
