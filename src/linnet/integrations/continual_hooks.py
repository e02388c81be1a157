"""The methods of ``linnet.continual`` in the loops of Avalanche, Lightning and Hugging Face.

Each adapter only calls the method's own four functions at the right moments; the classes are made when they
are requested, because their bases are in packages that are not required.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.utils.data import Dataset

from linnet.continual.method import ContinualMethod
from linnet.distribution import importing
from linnet.errors import InputError
from linnet.params import number

DIVIDING = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")  # Lightning's, as they are called


class AvalancheHooks:
    """The callbacks of an Avalanche strategy, without Avalanche."""

    def __init__(self, method: ContinualMethod, mean: bool | float = True) -> None:
        self.method, self.mean = require_method(method), _mean(mean)

    def before_backward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Add the penalty to the loss of a mini-batch."""
        strategy.loss = strategy.loss + self.method.penalty(_examples(self.mean, strategy.experience.dataset))

    def after_update(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Take note of the optimizer's step."""
        self.method.after_step()

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Remember the experience that has been learned."""
        self.method.consolidate(Pairs(strategy.experience.dataset, labeled=_takes_labels(strategy)))


class LightningHooks:
    """The callbacks of a Lightning trainer, without Lightning."""

    # One `fit` is one task: the penalty's gradient enters before every optimizer step, when gradients have
    # been unscaled and before they are clipped, and the training data are consolidated when `fit` ends.

    def __init__(self, method: ContinualMethod, mean: bool | float = True) -> None:
        self.method, self.mean = require_method(method), _mean(mean)
        self._stepped = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a network in parts."""
        strategy = type(trainer.strategy).__name__
        _require_whole(None if strategy not in DIVIDING else strategy)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Add the penalty's gradient."""
        self.method.add_grad_(_examples(self.mean, _one(trainer.train_dataloader).dataset))
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take note of the step, if this batch ended with one."""
        if self._stepped:
            self.method.after_step()
        self._stepped = False

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember the task that has been learned."""
        self.method.consolidate(_one(trainer.train_dataloader))

    def state_dict(self) -> dict[str, Any]:
        """The state for Lightning's checkpoint."""
        return self.method.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.method.load_state_dict(state_dict)


class TrainerHooks:
    """The callbacks of a Hugging Face trainer, without transformers."""

    # One `train` is one task: the penalty's gradient enters before every optimizer step, when gradients of
    # all accumulated batches are there, unscaled and clipped, and the training data are consolidated when
    # `train` ends. The loss that the trainer logs is that of the task alone.

    def __init__(self, method: ContinualMethod, mean: bool | float = True) -> None:
        self.method, self.mean = require_method(method), _mean(mean)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse a network in parts."""
        _require_whole(next((how for how in ("fsdp", "deepspeed") if getattr(args, how, None)), None))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **given: Any
    ) -> None:
        """Add the penalty's gradient."""
        self.method.add_grad_(_examples(self.mean, _one(train_dataloader).dataset))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take note of the optimizer's step."""
        self.method.after_step()

    def on_train_end(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **given: Any
    ) -> None:
        """Remember the task that has been learned."""
        self.method.consolidate(_one(train_dataloader))


class Pairs(Dataset[Any]):
    """A data set of (x, y, task label) samples as one of (x, y)."""

    def __init__(self, dataset: Any, labeled: bool = False) -> None:
        self.dataset, self.labeled = dataset, labeled

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample = self.dataset[index]
        return ((sample[0], sample[-1]) if self.labeled else sample[0]), sample[1]


def _takes_labels(strategy: Any) -> bool:
    """Whether the strategy calls its model with task labels, as Avalanche does with a ``MultiTaskModule``."""
    model = getattr(strategy, "model", None)
    return any(kind.__name__ == "MultiTaskModule" for kind in type(model).__mro__)


def avalanche_plugin(method: ContinualMethod, mean: bool | float = True) -> Any:
    """A method of ``linnet.continual`` as a plugin of an Avalanche strategy.

    Args:
        method: The method, made with the strategy's model.
        mean: Whether the strategy's loss is a mean over the samples of an experience; their number where it
            is a mean over other things, such as tokens.

    Returns:
        A ``SupervisedPlugin`` for the strategy's ``plugins``.

    Raises:
        DependencyError: If Avalanche cannot be imported.
        InputError: If ``method`` is none, or ``mean`` no positive number.
    """
    base = ("avalanche.core", "SupervisedPlugin", "pip install avalanche-lib")
    return _hooked(AvalancheHooks, base, method, mean)


def lightning_callback(method: ContinualMethod, mean: bool | float = True) -> Any:
    """A method of ``linnet.continual`` as a callback of a Lightning trainer.

    Args:
        method: The method, made with the trained network.
        mean: Whether the loss is a mean over the samples of the training data; their number where it is a
            mean over other things, such as tokens.

    Returns:
        A ``Callback`` for the trainer's ``callbacks``.

    Raises:
        DependencyError: If Lightning cannot be imported.
        InputError: If ``method`` is none, or ``mean`` no positive number.
    """
    base = ("lightning.pytorch", "Callback", "pip install lightning")
    return _hooked(LightningHooks, base, method, mean)


def trainer_callback(method: ContinualMethod, mean: bool | float = True) -> Any:
    """A method of ``linnet.continual`` as a callback of the Trainer of Hugging Face.

    Args:
        method: The method, made with the trained network.
        mean: Whether the loss is a mean over the samples of the training data; their number where it is a
            mean over other things, such as tokens.

    Returns:
        A ``TrainerCallback`` for the trainer's ``callbacks``.

    Raises:
        DependencyError: If transformers cannot be imported.
        InputError: If ``method`` is none, or ``mean`` no positive number.
    """
    base = ("transformers", "TrainerCallback", "pip install transformers")
    return _hooked(TrainerHooks, base, method, mean)


def _mean(mean: bool | float) -> bool | float:
    """Whether a loss is a mean, or over how many."""
    return mean if isinstance(mean, bool) else number("mean", mean, above=0)


def _examples(mean: bool | float, dataset: Any) -> float | None:
    """What the penalty is divided by: N where the loss is a mean over the samples of a data set."""
    if not isinstance(mean, bool):
        return mean
    try:
        return float(len(dataset)) if mean else None
    except TypeError as error:
        raise InputError(
            f"the training data ({type(dataset).__name__}) do not tell their number",
            expected="the number of examples that the loss is a mean over",
            remedy="pass mean=N",
        ) from error


def _require_whole(divided: str | None) -> None:
    """Raise if something divides parameters over processes: their gradients are not where they are added."""
    if divided is not None:
        raise InputError(
            f"{divided} divides the parameters over processes",
            expected="a network that every process has whole",
            remedy="train it on one device, or by DistributedDataParallel on several",
        )


def _one(loader: Any) -> Any:
    """The loader that a trainer trains on, one of them."""
    if not hasattr(loader, "dataset"):
        raise InputError(
            f"the trainer's training data are {type(loader).__name__}",
            expected="one DataLoader",
            remedy="call method.consolidate(data) yourself for several",
        )
    return loader


def require_method(method: Any) -> ContinualMethod:
    """Raise unless a method is one of ``linnet.continual``."""
    if not isinstance(method, ContinualMethod):
        raise InputError(
            f"method is {type(method).__name__}",
            expected="a method of linnet.continual, such as OnlineLaplace",
            remedy="make it with the model that is trained",
        )
    return method


def _hooked(hooks: type, base: tuple[str, str, str], method: ContinualMethod, mean: bool | float) -> Any:
    """Our hooks before those of a class of an optional package: where it is, its name, how to install it."""
    package, name, remedy = base
    require_method(method)
    with importing(package, f"{name} with a continual penalty", f"{package} with {name}", remedy):
        own: type = getattr(importlib.import_module(package), name)
    begin_hooks: Any = vars(hooks)["__init__"]
    begin_own: Any = getattr(own, "__init__")  # noqa: B009

    def begin(self: Any, method: ContinualMethod, mean: bool | float) -> None:
        begin_own(self)
        begin_hooks(self, method, mean)

    return type(f"Continual{own.__name__}", (hooks, own), {"__init__": begin})(method, mean)
