"""The recipes for Avalanche, Lightning and the Trainer, in loops that call hooks in the packages' order."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from mktestdocs import grab_code_blocks
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from linnet.continual import ContinualMethod
from tests.continual.continual_cases import MAKERS, flat, moved_away, small_network, small_task

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "training-loops.md"


def recipe(package: str, base: str, patch: pytest.MonkeyPatch) -> Any:
    """The class of a recipe, on a stand-in for the class of its package."""
    blocks = grab_code_blocks(PAGE.read_text(encoding="utf-8"), lang="py")
    (code,) = (block for block in blocks if f"class Remember({base})" in block)
    patch.setitem(sys.modules, package.partition(".")[0], ModuleType(package))
    module: Any = ModuleType(package)
    setattr(module, base, type(base, (), {}))
    patch.setitem(sys.modules, package, module)
    known: dict[str, Any] = {"torch": torch, "DataLoader": DataLoader}
    exec(code, known)
    return known["Remember"]


class Labeled(Dataset):  # type: ignore[type-arg]
    """Samples (x, y, task label), as Avalanche has them."""

    def __init__(self, seed: int) -> None:
        self.x, self.y = small_task(seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        return self.x[index], self.y[index], 0


def own_loop(net: nn.Module, method: ContinualMethod, seed: int) -> None:
    """What the adapters have to amount to."""
    x, y = small_task(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x), y) + method.penalty(examples=len(x))).backward()
        optimizer.step()
        method.after_step()
    method.consolidate((x, y))


def avalanche_loop(net: nn.Module, plugin: Any, seed: int) -> None:
    """The order of a SupervisedTemplate: zero_grad, forward, loss, backward, update."""
    strategy = SimpleNamespace(experience=SimpleNamespace(dataset=Labeled(seed)), loss=None)
    x, y = small_task(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        strategy.loss = nn.functional.cross_entropy(net(x), y)
        plugin.before_backward(strategy)
        strategy.loss.backward()
        optimizer.step()
        plugin.after_update(strategy)
    plugin.after_training_exp(strategy)


def lightning_loop(net: nn.Module, callback: Any, seed: int, accumulate: int = 1) -> None:
    """The order of automatic optimization: backward, on_before_optimizer_step, step, on_train_batch_end."""
    x, y = small_task(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=24)
    trainer = SimpleNamespace(train_dataloader=loader, optimizers=[optimizer])
    for batch in range(4 * accumulate):
        if batch % accumulate == 0:
            optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x), y) / accumulate).backward()
        if (batch + 1) % accumulate == 0:
            callback.on_before_optimizer_step(trainer, net, optimizer)
            optimizer.step()
        callback.on_train_batch_end(trainer, net, None, None, batch)
    callback.on_fit_end(trainer, net)


def trainer_loop(net: nn.Module, callback: Any, seed: int, accumulate: int = 1) -> None:
    """The Trainer's order: backward, on_pre_optimizer_step, step, on_optimizer_step, zero_grad."""
    x, y = small_task(seed)
    data = [{"input": x[i], "labels": y[i]} for i in range(len(x))]
    known = {"model": net, "train_dataloader": DataLoader(data, batch_size=7)}  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(accumulate):
            (nn.functional.cross_entropy(net(x), y) / accumulate).backward()
        callback.on_pre_optimizer_step(None, None, None, **known)
        optimizer.step()
        callback.on_optimizer_step(None, None, None, **known)
        net.zero_grad()
    callback.on_train_end(None, None, None, **known)


AVALANCHE = ("avalanche.core", "SupervisedPlugin")
LIGHTNING = ("lightning.pytorch", "Callback")
TRAINER = ("transformers", "TrainerCallback")
LOOPS: dict[str, Any] = {
    "avalanche": (AVALANCHE, avalanche_loop),
    "lightning": (LIGHTNING, lightning_loop),
    "lightning, accumulating": (LIGHTNING, partial(lightning_loop, accumulate=2)),
    "trainer": (TRAINER, trainer_loop),
    "trainer, accumulating": (TRAINER, partial(trainer_loop, accumulate=2)),
}


@pytest.mark.parametrize("name", ["online", "ewc", "si"])
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.thinned(2)
def test_recipes_amount_to_a_loop_of_ones_own(
    name: str, kind: str, float64: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    net, twin = small_network(), small_network()
    twin.load_state_dict(net.state_dict())
    method, other = MAKERS[name](net), MAKERS[name](twin)
    base, loop = LOOPS[kind]
    hooks = recipe(*base, monkeypatch)(other)
    for seed in range(2):
        own_loop(net, method, seed)
        loop(twin, hooks, seed)
    assert other.tasks == 2
    torch.testing.assert_close(flat(net), flat(twin), rtol=1e-9, atol=1e-12)
    moved_away(net)
    moved_away(twin)
    assert method.penalty().item() == pytest.approx(other.penalty().item(), rel=1e-7)


def test_states_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = small_network(), recipe(*LIGHTNING, monkeypatch)
    hooks, other = made(MAKERS["online"](net)), made(MAKERS["online"](net))
    hooks.method.consolidate(small_task(0))
    other.load_state_dict(hooks.state_dict())
    moved_away(net)
    assert other.method.penalty().item() == hooks.method.penalty().item() > 0
