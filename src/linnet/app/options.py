"""The options that commands share: each field of a record is an option of the commands that take it.

Nothing here imports torch, for types either, so that a page of help appears at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TEXTS = ".jsonl"  # what files of texts end in


def listed(given: str | list[str] | None) -> list[str]:
    """The names that are given, by an option that takes one or more."""
    return given if isinstance(given, list) else [] if given is None else [given]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """A network, and how samples are given to it.

    Args:
        model: The network: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``.
            A table needs none: by default it is one hidden layer of 256 random units beside its columns.
        weights: A file of weights for the network with its old head: ``.safetensors``, ``.npz``, or torch's.
        model_args: Keyword arguments of the factory, as a JSON object.
        params: The parameters below the head that take part, by name or regular expression (default: all).
        output: The part of what the network returns that is taken, such as pooler_output; by default its
            logits, or the mean of last_hidden_state.
        shots: Training samples per class, or in all for a regression (default: all).
        tests: Test samples to evaluate on, drawn at random (default: all).
        mean: Normalization of images: imagenet, cifar, half, none, or one or three numbers with commas. auto
            is what the network's own configuration says (timm, Hugging Face), or none.
        std: Standard deviations that go with numbers in mean.
        size: Height and width that images are scaled to, in pixels.
        channels: Color channels that the network expects, 1 or 3.
        target: The column of a table to predict; the last by default.
        damaged: What to do with image files that cannot be decoded: error, or skip, which names them.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        seed: Seed of the split, of the draws and of random heads.
    """

    model: str | None = None
    weights: Path | None = None
    model_args: dict[str, Any] | None = None
    params: str | None = None
    output: str | None = None
    shots: int | None = None
    tests: int | None = None
    mean: str = "auto"
    std: str | None = None
    size: int | None = None
    channels: int | None = None
    target: str | None = None
    damaged: Literal["error", "skip"] = "error"
    memory: str | None = None
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskOptions(NetworkOptions):
    """A network and the data of a task.

    Args:
        data: The data: an image folder with one folder per class, an ``.npz`` archive, a table, or a
            ``.jsonl`` file of texts for a language model, ``hf:FOLDER``.
    """

    data: Path


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(TaskOptions):
    """What ``linnet.adapt`` takes, and what the fit is compared with.

    Args:
        data: The data: an image folder with one folder per class, an ``.npz`` archive, a table, or a
            ``.jsonl`` file of texts for a language model, ``hf:FOLDER``.
        model_args: Keyword arguments of the factory, as a JSON object; for texts the settings of a fresh
            LoRA adapter (default: {"r": 8, "lora_alpha": 16, "layers": 1}, of the last blocks).
        ridge: The ridge relative to the mean of the kernel's diagonal, of texts as it stands in the
            objective; a positive number, or loo, which chooses it by leave-one-out, as by default.
        weight: Share of the lower layers' derivatives in the kernel, from 0 (the linear probe) to 1 (default:
            chosen for values and where there is no earlier layer, in networks of up to a million weights).
        earlier: Share of earlier layers in the features, from 0 to 1 (default: chosen, and 0 where weight is
            given).
        tune: Train the lower layers as well, solve the fit again at the trained weights, and keep the result
            unless cross-validation has more error or fewer right classes. It takes five to eight short
            training runs.
        compare: What the fit is compared with on the test samples: probe (the linear probe), or finetune,
            which adds plain fine-tuning and takes most of the time.
        finetune_steps: Steps of each run of plain fine-tuning.
        model: The network: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``.
            Where it is given more than once, the network with the least leave-one-out error is taken. A table
            needs none: by default it is one hidden layer of 256 random units beside its columns.
    """

    model: str | list[str] | None = None  # type: ignore[assignment]
    ridge: float | Literal["auto", "loo"] = "auto"
    weight: float | Literal["auto"] = "auto"
    earlier: float | Literal["auto"] = "auto"
    tune: bool = False
    compare: Literal["probe", "finetune"] = "probe"
    finetune_steps: int = 150


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run, and how it is opened.

    Args:
        run: The folder that linnet adapt, forget or update wrote; it stays as it is.
        model: The network's factory, where the run's own is not here or not to be run.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        trust: Whether to run code that a run of another user names.
    """

    run: Path
    model: str | None = None
    memory: str | None = None
    device: str = "cpu"
    trust: bool = False
