"""The result of fine-tuning, and its files."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError, WeightsError
from linnet.files import save
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import Bilinear, assemble
from linnet.fitting.descent import outputs_of
from linnet.fitting.head import with_head
from linnet.params import integer
from linnet.predictive.gaussian import Predictive
from linnet.predictive.model import PredictiveModel
from linnet.tangent.batch import Inputs, on_device, split
from linnet.tangent.data import examples
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.matching import given_network, require_witness, saved_output, witness
from linnet.tangent.surgery import leaky_relu
from linnet.tree import node

KIND = "finetuned"
_OTHER = (
    "made on",
    "a network of the architecture that was fine-tuned",
    "pass the network that was given to linnet.finetune",
)


@node()
@dataclass(frozen=True)
class FinetunedSettings:
    """Settings of a result, as plain values."""

    recipe: str  # the recipe's name
    parts: dict[str, Any]  # its parts: loss, activation, preconditioner, optimizer, head and so on
    # the learning rate and the like that were taken, and whether the run diverged with them
    values: dict[str, Any]
    augmentation: Augmentation  # what was done to training images
    outputs: int  # C
    classes: bool  # whether the targets are classes


@dataclass(frozen=True, eq=False, repr=False)
class Finetuned(PredictiveModel):
    """A fine-tuned network. ``linnet.finetune`` makes it.

    Args:
        module: The trained ``Linearized``, or the trained network for nlft.
        settings: What decided it.
        history: What was logged: ``step``, ``loss``, ``validation_accuracy`` and so on.
        candidates: Every set of values that was tried, with its validation scores.
        notes: What was done and what is worth knowing, one sentence each.
        output: How to turn the network's result into a tensor.
        probe: Made-up inputs, by which a saved result knows its network again.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 5))
        >>> x, y = torch.randn(24, 2), torch.arange(24) % 2
        >>> tuned = linnet.finetune(net, (x, y), training=linnet.Training(steps=5))
        >>> tuned.predict(x).shape, tuned.recipe
        (torch.Size([24, 2]), 'lqf')
    """

    module: nn.Module
    settings: FinetunedSettings
    history: list[dict[str, float]]
    candidates: list[dict[str, Any]]
    notes: tuple[str, ...]
    output: OutputAdapter = None
    probe: Inputs = None

    def __repr__(self) -> str:
        s, loss = self.settings, self.summary()["final_loss"]
        shown = "" if loss is None else f", final loss {loss:.4g}"
        return f"Finetuned({s.recipe}, {s.outputs} {'classes' if s.classes else 'outputs'}{shown})"

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.settings.recipe

    @property
    def diverged(self) -> bool:
        """Whether the training loss went up again at the end: the steps were too large."""
        return bool(self.settings.values.get("diverged", False))

    @property
    def validation(self) -> dict[str, float]:
        """The validation scores of what was taken; empty without validation."""
        taken = [c for c in self.candidates if c.get("taken")]
        return dict(taken[0].get("scores", {})) if taken else {}

    @torch.no_grad()
    def predict(self, x: Inputs, batch: int = 256) -> Tensor:
        """Outputs, from center crops where training images were cropped.

        Args:
            x: T examples.
            batch: Examples at once.

        Returns:
            (T, C).

        Raises:
            DataError: If there is no example.
        """
        integer("batch", batch)
        x = examples(self.module.function if isinstance(self.module, Linearized) else self.module, x)
        view, device = self.settings.augmentation.evaluation, next(self.module.parameters()).device
        adapter = None if isinstance(self.module, Linearized) else self.output  # it has the adapter inside
        was_training = self.module.training
        self.module.eval()
        parts = [on_device(view(part), device) for part in split(x, batch)]
        found = torch.cat([outputs_of(self.module, part, adapter) for part in parts])
        self.module.train(was_training)
        return found

    def predictive(self, x: Inputs) -> Predictive:
        """Not known: training leaves one network.

        Args:
            x: N examples.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "predictive(x) of a Finetuned",
            expected="a model with a distribution over its outputs",
            remedy="linnet.fit(linnet.linearize(model), data), whose predictive(x) is in closed form",
        )

    def summary(self) -> dict[str, Any]:
        """Settings, search and scores as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        return {
            **asdict(self.settings),
            "validation": self.validation,
            "candidates": self.candidates,
            "final_loss": next((h["loss"] for h in reversed(self.history) if "loss" in h), None),
            "notes": list(self.notes),
        }

    def save(self, directory: str | Path) -> Path:
        """Write weights, history and settings to one checksummed file; see :func:`linnet.load`.

        Args:
            directory: The folder; made if it is missing.

        Returns:
            The file's path.
        """
        linear = self.module if isinstance(self.module, Linearized) else None
        network = self.module if linear is None else linear.model
        state = {
            "network": {name: t for name, t in network.state_dict().items() if isinstance(t, Tensor)},
            "modules": _kinds(network),
            "delta": None if linear is None else dict(linear.delta),
            "settings": self.settings,
            "history": self.history,
            "candidates": self.candidates,
            "notes": self.notes,
            "output": None if callable(self.output) else self.output,
            "custom_output": callable(self.output),
            "witness": witness(self.predict, self.probe),
        }
        return save(directory, KIND, state)


def restored_finetuned(
    saved: dict[str, Any], path: Path, model: nn.Module, output: OutputAdapter = None
) -> Finetuned:
    """The result that ``Finetuned.save`` wrote."""
    model = given_network(model)
    adapter = saved_output(saved, output)
    network = _rebuilt(model, saved["settings"], saved["network"])
    try:
        network.load_state_dict(saved["network"])
    except RuntimeError as error:
        raise WeightsError(
            f"{path} does not fit the network ({str(error).splitlines()[-1].strip()})", *_OTHER[1:]
        ) from error
    _check_kinds(network, saved["modules"], path)
    module: nn.Module = network.to(next(model.parameters()).device)
    if saved["delta"] is not None:
        module = lin = linearize(module, list(saved["delta"]), adapter)
        with torch.no_grad():
            for name, value in lin.delta.items():
                value.copy_(saved["delta"][name])
    found = Finetuned(
        module, saved["settings"], saved["history"], saved["candidates"], saved["notes"], output=adapter
    )
    return replace(found, probe=require_witness(found.predict, saved["witness"], path, _OTHER))


def _kinds(network: nn.Module) -> dict[str, str]:
    """The type of every module by its name: equal weights do not make equal networks."""
    return {name: type(module).__name__ for name, module in network.named_modules() if name}


def _check_kinds(network: nn.Module, saved: dict[str, str] | None, path: Path) -> None:
    """Raise if a layer is of another kind than the one that was trained."""
    found = _kinds(network)
    names = [name for name in {**(saved or {}), **found} if saved and saved.get(name) != found.get(name)]
    if saved and names:
        was, now = saved.get(names[0], "missing"), found.get(names[0], "missing")
        raise WeightsError(f"{path} does not fit the network: {names[0]} was {was} and is {now}", *_OTHER[1:])


def _rebuilt(model: nn.Module, settings: FinetunedSettings, tensors: dict[str, Tensor]) -> nn.Module:
    """The architecture that the weights belong to."""
    network, parts = model, settings.parts
    if parts["activation"] == "leaky-relu":
        network = leaky_relu(network, parts["slope"])
    if parts["pooling"] is not None:
        reduce = tensors.get("reduce.weight")
        channels = None if reduce is None else (reduce.shape[1], reduce.shape[0])
        network = assemble(network, tensors["head.weight"].shape, Bilinear(**parts["pooling"]), channels)
    elif parts["new_head"]:
        network = with_head(network, settings.outputs, "zero")
    return _in_type_of(network, tensors)


def _in_type_of(network: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A copy of the network in the type of saved weights."""
    kinds = {t.dtype for t in tensors.values() if t.is_floating_point()}
    clone = copy.deepcopy(network)
    return clone.to(kinds.pop()) if len(kinds) == 1 else clone
