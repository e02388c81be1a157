"""The result of fine-tuning, and its files."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import FileFormatError, InputError, WeightsError
from linnet.files import as_path, load_tensors, save_tensors
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import Bilinear, assemble
from linnet.fitting.descent import outputs_of
from linnet.fitting.head import with_head
from linnet.fitting.linear_fit import LinearFit
from linnet.params import integer
from linnet.predictive.distribution import Predictive
from linnet.predictive.model import PredictiveModel
from linnet.tangent.batch import Inputs, on_device, split
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.gather import examples
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.matching import given_network, require_witness, saved_output, witness
from linnet.tangent.surgery import leaky_relu

KIND = "finetuned"
_OTHER = (
    "made on",
    "a network of the architecture that was fine-tuned",
    "pass the network that was given to linnet.finetune",
)


@dataclass(frozen=True)
class Settings:
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
        fit: The closed-form fit, for ``training="closed-form"``.
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
    settings: Settings
    history: list[dict[str, float]]
    candidates: list[dict[str, Any]]
    notes: tuple[str, ...]
    fit: LinearFit | None = None
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
        was_training = self.module.training
        self.module.eval()
        parts = [on_device(view(part), device) for part in split(x, batch)]
        found = torch.cat([outputs_of(self.module, part, self._adapter) for part in parts])
        self.module.train(was_training)
        return found

    @property
    def _adapter(self) -> OutputAdapter:
        """A linearized network has the adapter inside."""
        return None if isinstance(self.module, Linearized) else self.output

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
        """Write weights, history and settings to one checksummed file; see :func:`load_finetuned`.

        Args:
            directory: The folder; made if it is missing.

        Returns:
            The file's path.
        """
        linear = isinstance(self.module, Linearized)
        network = self.module.model if isinstance(self.module, Linearized) else self.module
        tensors = {f"network/{name}": t for name, t in network.state_dict().items() if isinstance(t, Tensor)}
        names: list[str] = []
        if isinstance(self.module, Linearized):
            names = self.module.parameter_names
            tensors |= {f"delta/{name}": t.detach() for name, t in self.module.delta.items()}
        seen, layout = witness(self.predict, self.probe)
        metadata = {
            "settings": asdict(self.settings),
            "history": self.history,
            "candidates": self.candidates,
            "notes": list(self.notes),
            "linear": linear,
            "parameters": names,
            "output": None if callable(self.output) else self.output,
            "custom_output": callable(self.output),
            "modules": _kinds(network),
            "witness": layout,
        }
        return save_tensors(directory, KIND, tensors | seen, metadata)


def load_finetuned(directory: str | Path, model: nn.Module, output: OutputAdapter = None) -> Finetuned:
    """Read what ``Finetuned.save`` wrote.

    Args:
        directory: The folder.
        model: A network of the architecture that was fine-tuned; its weights do not matter.
        output: The output adapter, if there was a callable one.

    Returns:
        The result, without its closed-form fit (``linnet.load_fit`` keeps those).

    Raises:
        FileFormatError: If the file is truncated, altered or of another kind.
        InputError: If there is no such file, or ``output`` is needed and not given.
        WeightsError: If the network has another architecture.

    Example:
        >>> import tempfile
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 5))
        >>> x, y, folder = torch.randn(24, 2), torch.arange(24) % 2, tempfile.mkdtemp()
        >>> tuned = linnet.finetune(net, (x, y), training=linnet.Training(steps=5))
        >>> _ = tuned.save(folder)
        >>> torch.equal(load_finetuned(folder, net).predict(x), tuned.predict(x))
        True
    """
    model = given_network(model)
    path = as_path(directory) / f"{KIND}.safetensors"
    tensors, metadata = load_tensors(path, KIND)
    adapter = saved_output(metadata, output)
    told = dict(metadata["settings"])
    settings = Settings(**{**told, "augmentation": Augmentation(**told["augmentation"])})
    own = {name.removeprefix("network/"): t for name, t in tensors.items() if name.startswith("network/")}
    network = _rebuilt(model, settings, own)
    reference = next(model.parameters())
    try:
        network.load_state_dict(own)
    except RuntimeError as error:
        raise WeightsError(
            f"{path} does not fit the network ({str(error).splitlines()[-1].strip()})",
            expected="a network of the architecture that was fine-tuned",
            remedy="pass the network that was given to linnet.finetune",
        ) from error
    _check_kinds(network, metadata.get("modules"), path)
    network = network.to(reference.device)
    module: nn.Module = network
    if metadata["linear"]:
        module = lin = linearize(network, metadata["parameters"], adapter)
        with torch.no_grad():
            for name, value in lin.delta.items():
                if f"delta/{name}" not in tensors:
                    raise FileFormatError(
                        f"{path} has no displacement of {name!r}",
                        "a complete file",
                        remedy="save the fine-tuned network again",
                    )
                value.copy_(tensors[f"delta/{name}"])
    found = Finetuned(
        module,
        settings,
        metadata["history"],
        metadata["candidates"],
        tuple(metadata["notes"]),
        output=adapter,
    )
    return replace(
        found, probe=require_witness(found.predict, tensors, metadata.get("witness"), path, _OTHER)
    )


def _kinds(network: nn.Module) -> dict[str, str]:
    """The type of every module by its name: equal weights do not make equal networks."""
    return {name: type(module).__name__ for name, module in network.named_modules() if name}


def _check_kinds(network: nn.Module, saved: dict[str, str] | None, path: Path) -> None:
    """Raise if a layer is of another kind than the one that was trained."""
    found = _kinds(network)
    names = [name for name in {**(saved or {}), **found} if saved and saved.get(name) != found.get(name)]
    if saved and names:
        was, now = saved.get(names[0], "missing"), found.get(names[0], "missing")
        raise WeightsError(
            f"{path} does not fit the network: {names[0]} was {was} and is {now}",
            expected="a network of the architecture that was fine-tuned",
            remedy="pass the network that was given to linnet.finetune",
        )


def _rebuilt(model: nn.Module, settings: Settings, tensors: dict[str, Tensor]) -> nn.Module:
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
