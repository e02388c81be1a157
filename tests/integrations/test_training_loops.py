"""The scripts of docs/tutorials/training-loops.md, with the packages or with stand-ins that call alike."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mktestdocs.__main__ import grab_code_blocks
from torch import nn
from torch.utils.data import DataLoader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "training-loops.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = list(grab_code_blocks(TEXT, lang="py"))


class LightningModule(nn.Module):
    """Stands in for Lightning's."""

    automatic_optimization = True

    def optimizers(self) -> Any:
        return self.wrapped


class Wrapped:
    """Lightning's wrapper of an optimizer: its step always passes a closure, by its name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.zero_grad, self.steps = optimizer, optimizer.zero_grad, 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optimizer.step(closure=closure or (lambda: None))


class LightningTrainer:
    """Stands in for Lightning's Trainer."""

    def __init__(self, max_epochs: int, **_: Any) -> None:
        self.epochs = max_epochs

    def fit(self, module: Any, loader: Any) -> None:
        made = module.configure_optimizers()
        (optimizer,), schedules = made if isinstance(made, tuple) else ([made], [])
        module.wrapped = Wrapped(optimizer)

        def closure() -> Any:
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        for _ in range(self.epochs):
            for index, batch in enumerate(loader):
                if module.automatic_optimization:
                    module.wrapped.step(closure)
                else:
                    module.training_step(batch, index)
            for schedule in schedules:
                schedule.step()
        self.global_step = module.wrapped.steps


class Prepared(torch.optim.Optimizer):
    """Accelerate's wrapper of an optimizer: it moves the state, and steps when a batch is complete."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Any) -> None:
        self.optimizer, self.accelerator = optimizer, accelerator
        optimizer.load_state_dict(optimizer.state_dict())

    def step(self, closure: Any = None) -> None:
        if self.accelerator.complete:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.complete:
            self.optimizer.zero_grad(set_to_none)


class Accelerator:
    """Stands in for Accelerate's."""

    def __init__(self, cpu: bool, gradient_accumulation_steps: int) -> None:
        self.parts, self.seen, self.complete = gradient_accumulation_steps, 0, False

    def prepare(self, *given: Any) -> Any:
        return tuple(Prepared(one, self) if isinstance(one, torch.optim.Optimizer) else one for one in given)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        self.seen += 1
        self.complete = self.seen % self.parts == 0
        yield

    def backward(self, loss: Any) -> None:
        (loss / self.parts).backward()


class Trainer:
    """Stands in for that of transformers, which calls ``step`` without anything."""

    def __init__(
        self, model: Any, args: Any, train_dataset: Any, optimizers: Any, callbacks: Any = ()
    ) -> None:
        self.model, self.args, self.data, self.callbacks = model, args, train_dataset, callbacks
        self.optimizer = Prepared(optimizers[0], types.SimpleNamespace(complete=True))
        steps = args.num_train_epochs * len(train_dataset) / args.per_device_train_batch_size
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1 - step / steps)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def train(self) -> None:
        loader = DataLoader(self.data, self.args.per_device_train_batch_size, shuffle=True)
        for _ in range(self.args.num_train_epochs):
            for inputs in loader:
                self.model.train()
                self.training_step(self.model, inputs, len(inputs))
                self.optimizer.step()
                self.schedule.step()
                self.model.zero_grad()
            for callback in self.callbacks:
                callback.on_epoch_end(self.args, None, None)


def has(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's first block, run, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(next(iter(grab_code_blocks(TEXT, lang="python"))), names)
    return names


def block(package: str) -> str:
    """The script that imports a package."""
    (found,) = [text for text in BLOCKS if f"import {package}\n" in text or f"from {package} " in text]
    return found


def test_every_script_is_run() -> None:
    assert [block(name) for name in ("lightning", "accelerate", "transformers")] == BLOCKS


@pytest.mark.filterwarnings("default")
def test_lightning(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not has("lightning"):
        stub: Any = types.ModuleType("lightning")
        stub.LightningModule, stub.Trainer = LightningModule, LightningTrainer
        monkeypatch.setitem(sys.modules, "lightning", stub)
    exec(block("lightning"), page)


@pytest.mark.filterwarnings("default")
def test_accelerate(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not has("accelerate"):
        stub: Any = types.ModuleType("accelerate")
        stub.Accelerator = Accelerator
        monkeypatch.setitem(sys.modules, "accelerate", stub)
    exec(block("accelerate"), page)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_transformers(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    if not has("accelerate"):

        def arguments(folder: str, **settings: Any) -> Any:
            return types.SimpleNamespace(**settings)

        stub: Any = types.ModuleType("transformers")
        for name in ("BertConfig", "BertForSequenceClassification", "TrainerCallback"):
            setattr(stub, name, getattr(transformers, name))
        stub.Trainer, stub.TrainingArguments = Trainer, arguments
        monkeypatch.setitem(sys.modules, "transformers", stub)
    exec(block("transformers"), page)
