"""The adapters inside small loops that call hooks in the packages' own order."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from linnet.continual import ContinualMethod
from linnet.errors import DependencyError, InputError
from linnet.integrations.continual_hooks import (
    AvalancheHooks,
    LightningHooks,
    Pairs,
    TrainerHooks,
    avalanche_plugin,
    lightning_callback,
    trainer_callback,
)
from tests.continual.continual_cases import MAKERS, flat, moved_away, small_network, small_task

NAMES = ("online", "ewc", "si")


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
    trainer = SimpleNamespace(train_dataloader=DataLoader(TensorDataset(x, y), batch_size=24))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
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


LOOPS: dict[str, Any] = {
    "avalanche": (AvalancheHooks, avalanche_loop),
    "lightning": (LightningHooks, lightning_loop),
    "lightning, accumulating": (LightningHooks, partial(lightning_loop, accumulate=2)),
    "trainer": (TrainerHooks, trainer_loop),
    "trainer, accumulating": (TrainerHooks, partial(trainer_loop, accumulate=2)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.thinned(2)
def test_adapters_amount_to_a_loop_of_ones_own(name: str, kind: str, float64: torch.dtype) -> None:
    torch.manual_seed(2)
    net, twin = small_network(), small_network()
    twin.load_state_dict(net.state_dict())
    method, other = MAKERS[name](net), MAKERS[name](twin)
    make, loop = LOOPS[kind]
    hooks = make(other)
    for seed in range(2):
        own_loop(net, method, seed)
        loop(twin, hooks, seed)
    assert other.tasks == 2
    torch.testing.assert_close(flat(net), flat(twin), rtol=1e-9, atol=1e-12)
    moved_away(net)
    moved_away(twin)
    assert method.penalty().item() == pytest.approx(other.penalty().item(), rel=1e-7)


def test_sums_are_not_divided() -> None:
    net = small_network()
    method = MAKERS["online"](net)
    method.consolidate(small_task(0))
    moved_away(net)
    strategy = SimpleNamespace(experience=SimpleNamespace(dataset=Labeled(1)), loss=torch.zeros(()))
    for mean, divisor in ((False, 1), (True, 24), (48, 48)):
        strategy.loss = torch.zeros(())
        AvalancheHooks(method, mean).before_backward(strategy)
        assert strategy.loss.item() == pytest.approx(method.penalty().item() / divisor)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples without an end that is known."""

    def __iter__(self) -> Any:
        return iter([])


def test_streams_need_their_number() -> None:
    method, loader = MAKERS["online"](small_network()), DataLoader(Stream())
    with pytest.raises(InputError, match="mean=N"):
        TrainerHooks(method).on_pre_optimizer_step(None, None, None, train_dataloader=loader)
    TrainerHooks(method, mean=100).on_pre_optimizer_step(None, None, None, train_dataloader=loader)


def test_networks_in_parts_are_refused() -> None:
    method = MAKERS["online"](small_network())
    for strategy in (type("FSDPStrategy", (), {}), type("DeepSpeedStrategy", (), {})):
        with pytest.raises(InputError, match=f"{strategy.__name__} divides the parameters"):
            LightningHooks(method).on_fit_start(SimpleNamespace(strategy=strategy()), None)
    LightningHooks(method).on_fit_start(SimpleNamespace(strategy=type("DDPStrategy", (), {})()), None)
    for how, value in (("fsdp", True), ("deepspeed", "settings.json")):
        with pytest.raises(InputError, match=f"{how} divides the parameters"):
            TrainerHooks(method).on_train_begin(SimpleNamespace(**{how: value}), None, None)
    TrainerHooks(method).on_train_begin(SimpleNamespace(fsdp=None, deepspeed=None), None, None)


@pytest.mark.parametrize("mean", [0, -1.0, float("nan"), "tokens", None])
@pytest.mark.parametrize("hooks", [AvalancheHooks, LightningHooks, TrainerHooks])
def test_wrong_numbers_are_refused(hooks: Any, mean: Any) -> None:
    with pytest.raises(InputError, match="mean"):
        hooks(MAKERS["online"](small_network()), mean)


def test_callback_states_go_round() -> None:
    net = small_network()
    hooks = LightningHooks(MAKERS["online"](net))
    hooks.method.consolidate(small_task(0))
    other = LightningHooks(MAKERS["online"](net))
    other.load_state_dict(hooks.state_dict())
    moved_away(net)
    assert other.method.penalty().item() == hooks.method.penalty().item() > 0


class Base:
    """Stands for the packages' base classes."""

    def __init__(self) -> None:
        self.ready = True

    def before_backward(self, strategy: Any) -> None:
        """Overridden."""
        raise AssertionError


@pytest.mark.parametrize(
    ("package", "name", "make"),
    [
        ("avalanche.core", "SupervisedPlugin", avalanche_plugin),
        ("lightning.pytorch", "Callback", lightning_callback),
        ("transformers", "TrainerCallback", trainer_callback),
    ],
)
def test_classes_are_made_on_the_packages_bases(
    package: str, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = MAKERS["online"](small_network())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyError, match=package):
        make(method)
    with pytest.raises(InputError, match="method"):
        make("online")
    stand_in = ModuleType(package)
    setattr(stand_in, name, Base)
    monkeypatch.setitem(sys.modules, package.split(".")[0], ModuleType(package.split(".")[0]))
    monkeypatch.setitem(sys.modules, package, stand_in)
    made = make(method, mean=False)
    assert isinstance(made, Base)
    assert made.ready
    assert made.method is method
    assert not made.mean
    assert type(made).__name__ == f"Continual{Base.__name__}"


def test_several_loaders_are_refused() -> None:
    hooks = LightningHooks(MAKERS["online"](small_network()))
    with pytest.raises(InputError, match="DataLoader"):
        hooks.on_fit_end(SimpleNamespace(train_dataloader=[1, 2]), None)


def test_pairs_leave_task_labels_out() -> None:
    pairs = Pairs(Labeled(0))
    assert len(pairs) == 24
    assert len(pairs[0]) == 2


class MultiTaskModule(nn.Module):
    """Named as Avalanche's base of networks that take task labels."""


class TakesLabels(MultiTaskModule):
    """A head for each of two tasks, by label, filled in as Avalanche's ``MultiTaskModule`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor, task_labels: torch.Tensor) -> torch.Tensor:
        inner = self.body(x)
        out = torch.zeros(len(x), 3, dtype=inner.dtype, device=inner.device)
        for label in task_labels.unique():
            mask = task_labels == label
            out[mask] = self.heads[int(label)](inner[mask])
        return out


def test_networks_that_take_task_labels_get_them(float64: torch.dtype) -> None:
    torch.manual_seed(2)
    net = TakesLabels()
    single = nn.Sequential(*net.body, net.heads[0])  # the same tensors, without the other head
    method, plain = MAKERS["online"](net), MAKERS["online"](single)
    strategy = SimpleNamespace(experience=SimpleNamespace(dataset=Labeled(0)), model=net)
    AvalancheHooks(method).after_training_exp(strategy)
    plain.consolidate(small_task(0))
    moved_away(net)
    assert method.penalty().item() == pytest.approx(plain.penalty().item(), rel=1e-8)
    gradients = torch.autograd.grad(method.penalty(), list(net.heads[1].parameters()), allow_unused=True)
    assert all(g is None or g.abs().max() == 0 for g in gradients)
