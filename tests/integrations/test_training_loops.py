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
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "training-loops.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = list(grab_code_blocks(TEXT, lang="py"))
OPENING, *_, STREAM = grab_code_blocks(TEXT, lang="python")


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


class Callback:
    """Stands in for Lightning's."""


class LightningTrainer:
    """Stands in for Lightning's Trainer."""

    def __init__(self, max_epochs: int, callbacks: Any = (), **_: Any) -> None:
        self.epochs, self.callbacks = max_epochs, callbacks

    def fit(self, module: Any, loader: Any) -> None:
        self.train_dataloader, self.strategy = loader, None
        for callback in self.callbacks:
            callback.on_fit_start(self, module)
        made = module.configure_optimizers()
        (optimizer,), schedules = made if isinstance(made, tuple) else ([made], [])
        module.wrapped = Wrapped(optimizer)

        def closure() -> Any:
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()
            for callback in self.callbacks:
                callback.on_before_optimizer_step(self, module, optimizer)
            return loss.detach()

        for _ in range(self.epochs):
            for index, batch in enumerate(loader):
                if module.automatic_optimization:
                    module.wrapped.step(closure)
                else:
                    module.training_step(batch, index)
                for callback in self.callbacks:
                    callback.on_train_batch_end(self, module, None, batch, index)
            for schedule in schedules:
                schedule.step()
        for callback in self.callbacks:
            callback.on_fit_end(self, module)
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


class TrainerCallback:
    """Stands in for that of transformers: any event may be left out."""

    def __getattr__(self, event: str) -> Any:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *_, **given: None


class Trainer:
    """Stands in for that of transformers, which calls ``step`` without anything."""

    def __init__(
        self, model: Any, args: Any, train_dataset: Any, optimizers: Any = None, callbacks: Any = ()
    ) -> None:
        self.model, self.args, self.callbacks = model, args, callbacks
        self.data = DataLoader(train_dataset, args.per_device_train_batch_size, shuffle=True)
        own, _ = optimizers or (torch.optim.AdamW(model.parameters(), args.learning_rate), None)
        self.optimizer = Prepared(own, types.SimpleNamespace(complete=True))
        steps, constant = args.num_train_epochs * len(self.data), "lr_scheduler_type" in vars(args)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda k: 1 if constant else 1 - k / steps)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()

    def _tell(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(
                self.args, None, None, model=self.model, optimizer=self.optimizer, train_dataloader=self.data
            )

    def train(self) -> None:
        self._tell("on_train_begin")
        for _ in range(self.args.num_train_epochs):
            for inputs in self.data:
                self.model.train()
                self.training_step(self.model, inputs, len(inputs))
                self._tell("on_pre_optimizer_step")
                self.optimizer.step()
                self._tell("on_optimizer_step")
                self.schedule.step()
                self.model.zero_grad()
            self._tell("on_epoch_end")
        self._tell("on_train_end")


def arguments(folder: str, **settings: Any) -> Any:
    """Stand in for ``TrainingArguments``."""
    return types.SimpleNamespace(**settings)


LIGHTNING = {"LightningModule": LightningModule, "Trainer": LightningTrainer}
TRAINER = {"Trainer": Trainer, "TrainingArguments": arguments, "TrainerCallback": TrainerCallback}


class SupervisedPlugin:
    """Stands in for Avalanche's."""


class Naive:
    """Stands in for Avalanche's strategy, with the order of its templates."""

    def __init__(
        self, model: Any, optimizer: Any, criterion: Any, train_mb_size: int, train_epochs: int,
        evaluator: Any, plugins: Any,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self._criterion, self.plugins = model, optimizer, criterion, plugins
        self.size, self.epochs = train_mb_size, train_epochs

    def _tell(self, event: str) -> None:
        for plugin in self.plugins:
            getattr(plugin, event)(self)

    def train(self, experience: Any) -> None:
        self.experience = experience
        for _ in range(self.epochs):
            for x, y, _ in DataLoader(experience.dataset, self.size, shuffle=True):
                self.optimizer.zero_grad()
                self.loss = self._criterion(self.model(x), y)
                self._tell("before_backward")
                self.loss.backward()
                self.optimizer.step()
                self._tell("after_update")
        self._tell("after_training_exp")


def tensors_benchmark(train_tensors: Any, test_tensors: Any, task_labels: Any) -> Any:
    """Stands in for Avalanche's: samples (x, y, task label)."""
    labeled = [
        TensorDataset(x, y, torch.full((len(x),), t))
        for (x, y), t in zip(train_tensors, task_labels, strict=True)
    ]
    return types.SimpleNamespace(train_stream=[types.SimpleNamespace(dataset=one) for one in labeled])


def has(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the scripts of the page share, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    names: dict[str, Any] = {"__name__": "page"}
    exec(OPENING, names)
    return names


@pytest.fixture
def stream(page: dict[str, Any]) -> dict[str, Any]:
    """With the tasks of continual learning."""
    exec(STREAM, page)
    return page


def stand_in(patch: pytest.MonkeyPatch, needs: str, **modules: dict[str, Any]) -> None:
    """Put modules, their names with _ for dots, where a package is not installed that is needed."""
    if not has(needs):
        for name, things in modules.items():
            stub = types.ModuleType(name.replace("_", "."))
            vars(stub).update(things)
            patch.setitem(sys.modules, stub.__name__, stub)


def block(word: str) -> str:
    """The script that has a word of its own."""
    (found,) = [text for text in BLOCKS if word in text]
    return found


SCRIPTS = (
    "class Classifier",
    "import Accelerator",
    "class GaussNewtonTrainer",
    "avalanche_plugin",
    "lightning_callback",
    "trainer_callback",
)


def test_every_script_is_run() -> None:
    assert [block(word) for word in SCRIPTS] == BLOCKS


@pytest.mark.filterwarnings("default")
def test_lightning(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "lightning", lightning=LIGHTNING)
    exec(block("class Classifier"), page)


@pytest.mark.filterwarnings("default")
def test_accelerate(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "accelerate", accelerate={"Accelerator": Accelerator})
    exec(block("import Accelerator"), page)


@pytest.mark.filterwarnings("default")
def test_penalties_in_avalanche(stream: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        "avalanche",
        avalanche={},
        avalanche_core={"SupervisedPlugin": SupervisedPlugin},
        avalanche_benchmarks={"tensors_benchmark": tensors_benchmark},
        avalanche_training={"Naive": Naive},
    )
    exec(block("avalanche_plugin"), stream)


@pytest.mark.filterwarnings("default")
def test_penalties_in_lightning(stream: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "lightning", lightning=LIGHTNING, lightning_pytorch={"Callback": Callback})
    exec(block("lightning_callback"), stream)


@pytest.mark.filterwarnings("default")
def test_penalties_in_the_trainer(stream: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "accelerate", transformers=TRAINER)
    exec(block("trainer_callback"), stream)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_transformers(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name: getattr(transformers, name) for name in ("BertConfig", "BertForSequenceClassification")}
    stand_in(monkeypatch, "accelerate", transformers={**theirs, **TRAINER})
    exec(block("class GaussNewtonTrainer"), page)
