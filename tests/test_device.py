"""Every public call with its network on a device that refuses to mix with the CPU: same numbers, few waits.

The device is the pretend one of ``tests/device.py``, so that no accelerator is needed; ``LINNET_DEVICE=cuda``
takes a real one, where only the counts cannot be seen.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import curvature
from linnet.curvatures import Passes
from linnet.fitting import CG, Sketch
from linnet.likelihoods import Categorical
from linnet.memory import available_bytes
from linnet.tangent.batch import concatenate, take
from tests.hostile.public_calls import CALLS, DRAWING, TRAINING, Scene

device = pytest.importorskip(
    "tests.device", reason="torch has no devices made in Python yet", exc_type=ImportError
)
PRETEND, counted = device.PRETEND, device.counted
DEVICE = torch.device(os.environ.get("LINNET_DEVICE", PRETEND))
# products of float32 are rounded otherwise on a real device, to ten bits by some
DTYPE = torch.float32 if DEVICE.type in (PRETEND.type, "mps") else torch.float64
#: Calls that draw from a stream of the device, which is another one than the CPU's.
DRAWN = {"curvature mc", "laplace mc", "laplace sample", "fit sgd", "linear posterior svi"}
pretended = pytest.mark.skipif(DEVICE.type != PRETEND.type, reason="a real device counts nothing")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generators of the device can be made; warnings of so few examples are not what is tested here."""
    if DEVICE.type == PRETEND.type:
        monkeypatch.setattr(torch, "Generator", device.Generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Placed(Scene):
    """The scene of the public calls on a device: a convolution, normalization, two linear layers.

    Args:
        network: Where the network is.
        data: Where the data are.
    """

    def __init__(self, network: torch.device | str, data: torch.device | str) -> None:
        super().__init__()
        self.places = network, data

    @cached_property
    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            made = nn.Sequential(
                nn.Conv1d(3, 4, 2), nn.Flatten(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4),
                nn.LeakyReLU(), nn.Linear(4, 2),
            )  # fmt: skip
        return made.to(self.places[0], DTYPE).train()

    @cached_property
    def x(self) -> Tensor:
        return super().x.to(self.places[1], DTYPE)

    @property
    def y(self) -> Tensor:
        return super().y.to(self.places[1])


def _of_loader(s: Scene) -> Any:
    return linnet.fit(s.lin(), DataLoader(TensorDataset(*s.data), batch_size=3))


def _penalized(s: Scene, kind: str, **options: Any) -> Any:
    method = getattr(linnet.continual, kind)(s.model, **options)
    if kind == "SynapticIntelligence":
        s.model(s.x.to(next(s.model.parameters()).device)).square().sum().backward()
        torch.optim.SGD(s.model.parameters(), lr=0.1).step()
        method.after_step()
        method.consolidate()
    else:
        method.consolidate(s.data)
    return method.penalty()


def _typed(call: Callable[[], Any], **types: str) -> Any:
    with linnet.precision(**types):
        return call()


def _preconditioned(s: Scene) -> Any:
    s.model.eval()
    curvature = linnet.curvature(s.model, s.data, Categorical(), "kfac")
    optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    linnet.KroneckerPreconditioner(curvature, s.model, 0.1).attach(optimizer)
    s.model(s.x.to(next(s.model.parameters()).device)).square().sum().backward()
    optimizer.step()
    return list(s.model.parameters())


#: What the calls of the other suites leave out.
MORE: dict[str, Callable[[Scene], Any]] = {
    "adapt": lambda s: linnet.adapt(s.model, s.data).predict(s.x),
    "adapt changed": lambda s: linnet.adapt(s.model, s.data).forget([0]).update((s.x[:2] + 1, s.y[:2])).loo(),
    "fit shared": lambda s: s.fit(solver="shared", ridge="loo").forget([0]).update((s.x[:1], s.y[:1])).loo(),
    "fit shared predictive": lambda s: s.fit(solver="shared").predictive(s.x).probs,
    "fit sketch": lambda s: s.fit(solver=Sketch(dim=6)).predict(s.x),
    "fit of a loader": lambda s: _of_loader(s).predict(s.x),
    "fit primal": lambda s: s.fit(solver="primal").predict(s.x),
    "fit cg ekfac": lambda s: s.fit(solver=CG(preconditioner="ekfac")).predict(s.x),
    "matrix-free": lambda s: linnet.curvature(s.model, s.data, Categorical(), "matrix-free")
    @ torch.ones(s.lin().space.dim).to(next(s.model.parameters())),
    **{
        f"laplace {structure}": lambda s, kind=structure: s.laplace(structure=kind).predictive(s.x).probs
        for structure in ("ekfac", "diagonal", "block", "full", "last-layer")
    },
    "EWC twice": lambda s: [_penalized(s, "EWC", likelihood=Categorical()) for _ in range(2)],
    "NonOnlineLaplace": lambda s: _penalized(s, "NonOnlineLaplace", likelihood=Categorical()),
    "SynapticIntelligence": lambda s: _penalized(s, "SynapticIntelligence"),
    "KroneckerPreconditioner": _preconditioned,
    **{
        f"kernel in {kind}": lambda s, kind=kind: _typed(lambda: s.lin().kernel(s.x), capture=kind)
        for kind in ("bfloat16", "tf32", "float32")
    },
    "curvature summed in float64": lambda s: _typed(
        lambda: linnet.curvature(s.model, s.data, Categorical(), "ekfac").dense(), sums="float64"
    ),
    "fit primal in float32": lambda s: _typed(
        lambda: s.fit(solver="primal").predict(s.x), sums="float32", decompositions="float32"
    ),
    "process in function space": lambda s: s.gp(space="function").predictive(s.x).variance,
}  # fmt: skip
# Calls of the other suites that need a layer of their own, or a vector on the device of a matrix.
WITHOUT = {"matrix-free"}
EVERY = {name: call for name, call in {**CALLS, **DRAWING, **TRAINING}.items() if name not in WITHOUT} | MORE


def numbers(found: Any) -> list[Tensor]:
    """The tensors of a result, on the CPU."""
    if isinstance(found, Tensor):
        return [found.detach().cpu().double()]
    if isinstance(found, nn.Module):
        return numbers(list(found.parameters()))
    if isinstance(found, Mapping):
        return numbers(list(found.values()))
    if isinstance(found, list | tuple):
        return [t for one in found for t in numbers(one)]
    return numbers(found.module) if hasattr(found, "module") else []


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.thinned(40)
def test_a_call_gives_the_numbers_of_the_cpu_wherever_the_data_are(name: str) -> None:
    expected = numbers(EVERY[name](Placed("cpu", "cpu")))
    for data in (DEVICE, torch.device("cpu")):
        torch.manual_seed(0)
        found = numbers(EVERY[name](Placed(DEVICE, data)))
        assert len(found) == len(expected)
        if name not in DRAWING and (name not in DRAWN or DEVICE == PRETEND):
            for one, other in zip(found, expected, strict=True):
                # gradients are rounded where the device has rounded them before
                coarse = "bfloat16" in name or (DEVICE.type == "cuda" and "tf32" in name)
                torch.testing.assert_close(one, other, rtol=1e-2 if coarse else 1e-4, atol=1e-5)


@pytest.mark.long
def test_a_fit_takes_more_data_from_another_device() -> None:
    scene = Placed(DEVICE, "cpu")
    x, y = scene.data
    for first, second in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        fit = linnet.fit(scene.lin(), (x.to(first), y.to(first)), solver="dual", ridge=1.0)
        more = fit.update((x.to(second) + 1, y.to(second)))
        whole = linnet.fit(scene.lin(), (torch.cat([x, x + 1]), torch.cat([y, y])), solver="dual", ridge=1.0)
        torch.testing.assert_close(more.predict(x).cpu(), whole.predict(x).cpu(), rtol=1e-4, atol=1e-5)


def test_batches_of_two_devices_are_joined_and_taken_from() -> None:
    x = torch.arange(6.0).view(3, 2)
    joined = concatenate([x, x.to(DEVICE)])
    assert joined.device.type == "cpu"
    assert torch.equal(take(x, torch.tensor([2, 0]).to(DEVICE)), x[[2, 0]])
    assert torch.equal(take(x.to(DEVICE), torch.tensor([2, 0])).cpu(), x[[2, 0]])


def test_the_memory_of_the_device_is_known() -> None:
    assert available_bytes(DEVICE) > 0


# --- what is counted, on the pretend device ---------------------------------------------------------


def network() -> nn.Module:
    """A small convolutional network on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.Tanh(), nn.Linear(16, 3)
        )
    return made.to(DEVICE).eval()


def data(n: int) -> tuple[Tensor, Tensor]:
    """Images and classes on the CPU."""
    return torch.randn(n, 1, 8, 8), torch.arange(n) % 3


def counts(call: Callable[[], Any]) -> Any:
    """What a call does on the device."""
    with counted() as found:
        call()
    return found


IN_BLOCKS = Passes(block=8)
#: A call on n examples, the examples of a batch, and the waits that each further batch may take; one of them
#: is whether the gradients of a pass are finite.
PASSES: dict[str, tuple[Callable[[Any, int], Any], int, int]] = {
    "base outputs": (lambda s, n: s.fit.module.base(data(n)[0]), 10**6, 0),
    "predictions": (lambda s, n: s.fit.predict(data(n)[0]), 128, 1),
    "variances": (lambda s, n: s.laplace.predictive(data(n)[0]).probs, 256, 2),
    "curvatures": (
        lambda s, n: curvature(s.model, data(n), Categorical(), ["kfac", "diagonal"], passes=IN_BLOCKS), 8, 9,
    ),
    "ekfac": (lambda s, n: curvature(s.model, data(n), Categorical(), "ekfac", passes=IN_BLOCKS), 8, 18),
}  # fmt: skip


@cache
class Made:
    """What the passes ask: a network that was linearized and fitted once."""

    def __init__(self) -> None:
        self.model = network()
        self.fit = linnet.fit(linnet.linearize(self.model), data(12), solver="dual")
        self.laplace = linnet.Laplace(self.model, Categorical()).fit(data(12))


@pretended
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.thinned(2)
def test_a_pass_waits_for_the_device_a_few_times_a_batch(name: str) -> None:
    call, size, waits = PASSES[name]
    made, few, many = Made(), 2 * min(size, 256), 4 * min(size, 256)
    call(made, few)  # what is found out once about a network
    found = counts(lambda: call(made, many)).syncs - counts(lambda: call(made, few)).syncs
    assert found <= waits * 2


@pretended
@pytest.mark.parametrize("name", [name for name in PASSES if name != "base outputs"])
@pytest.mark.thinned(2)
def test_data_go_to_the_device_one_batch_at_a_time(name: str) -> None:
    call, size, _ = PASSES[name]
    made = Made()
    found = counts(lambda: call(made, 2 * size))
    assert 0 < found.largest <= size * 64 * 4


@pretended
def test_what_a_call_waits_for_besides() -> None:
    scene = Placed(DEVICE, DEVICE)
    # five of the moderation's waits are whether derivatives and their products are finite
    lin, most = scene.lin(), {"path": 47, "moderation": 24, "mislabeled": 9, "hashes": 1}
    fit = linnet.fit(lin, scene.data, solver="dual")
    fit.loo()
    calls: dict[str, Callable[[], Any]] = {
        "path": fit.path,
        "moderation": lambda: fit.predictive(scene.x).probs,
        "mislabeled": lambda: linnet.audit.mislabeled(fit),
        "hashes": lambda: linnet.tangent.batch.hash_examples(scene.x),
    }
    found = {name: counts(call).syncs for name, call in calls.items()}
    assert {name: n for name, n in found.items() if n > most[name]} == {}


@pretended
@pytest.mark.long
def test_what_a_step_waits_for() -> None:
    model, (x, y) = network(), data(24)
    lin = linnet.linearize(model)

    def solved(tolerance: float) -> tuple[int, int]:
        with counted() as found:
            fit = linnet.fit(lin, (x, y), solver=CG(tolerance=tolerance), ridge=100.0)
        (steps,) = re.findall(r"(\d+) steps", fit.record.reasons["preconditioner"])
        return found.syncs, int(steps)

    solved(1e-2)
    few, many = solved(1e-1), solved(1e-6)
    assert many[1] > few[1]
    # the residual, the curvature along the direction, and whether the pass over the data gave finite numbers
    assert many[0] - few[0] <= 4 * (many[1] - few[1])
    optimizer = linnet.optim.GaussNewton(model, Categorical())
    steps = [counts(lambda: optimizer.step(x, y)).syncs for _ in range(7)]
    assert min(steps) <= 30


@pretended
def test_the_pretend_device_refuses_and_counts() -> None:
    there, here = torch.ones(3, device=PRETEND), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator().manual_seed(0), device=PRETEND)
    drawn = torch.randn(3, generator=torch.Generator(PRETEND).manual_seed(0), device=PRETEND)
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(0)))

    def work() -> None:
        there.to(PRETEND)  # is there: nothing
        here.to(PRETEND)
        (there > 0).any().item()
        there[there > 0]
        there[torch.tensor([0])]
        torch.linalg.eigh(torch.eye(2, device=PRETEND))
        there.cpu(), there.tolist()

    found = counts(work)
    assert found.syncs == 7 - 1
    assert sum(found.carried.values()) == here.nbytes
    leaf = torch.ones(3, device=PRETEND, requires_grad=True)
    (leaf * there).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device == PRETEND
