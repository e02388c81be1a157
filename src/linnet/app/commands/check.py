"""`linnet check`: check that a network and its data are supported, without computing anything expensive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal


def check(
    *,
    model: str,
    data: str,
    weights: Path | None = None,
    model_args: dict[str, Any] | None = None,
    params: str | None = None,
    output: str | None = None,
    mean: str = "auto",
    std: str | None = None,
    size: int | None = None,
    channels: int | None = None,
    target: str | None = None,
    damaged: Literal["error", "skip"] = "error",
    batch: int = 8,
    memory: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Check that a network and its data are supported, and estimate what a fit will cost.

    For data with classes that is the network as ``linnet adapt`` takes it: with a new head of an output for
    each class, where it has another number of outputs and ends in a linear layer.

    Args:
        model: The network: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``.
        data: The data: an image folder with one folder per class, an ``.npz`` archive or a ``.csv`` table.
        weights: A file of weights: ``.safetensors``, ``.npz``, or a file of torch's.
        model_args: Keyword arguments of the factory, as a JSON object.
        params: The parameters to linearize in, by name or regular expression; all of them by default.
        output: The part of what the network returns that is taken, such as pooler_output; by default its
            logits, or the mean of last_hidden_state.
        mean: Normalization of images: imagenet, cifar, half, none, or one or three numbers with commas. auto
            is what the network's own configuration says (timm, Hugging Face), or none.
        std: Standard deviations that go with numbers in mean.
        size: Height and width that images are scaled to, in pixels.
        channels: Color channels that the network expects, 1 or 3.
        target: The column of a table to predict; the last by default.
        damaged: What to do with image files that cannot be decoded: error, or skip, which names them.
        batch: Samples to try the network on.
        memory: Memory budget, such as 4GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        seed: Seed of the split into training and test data.

    Returns:
        The preflight: whether all is well, findings, the memory plan, and every parameter with its treatment,
        which is printed with --verbose.

    Raises:
        InputError: ``batch`` is not positive.
    """
    from linnet.app.data import check_images, image_transform, load_data
    from linnet.app.models import load_model
    from linnet.app.runs.normalization import normalized
    from linnet.app.runs.planning import planned
    from linnet.app.runs.summary import print_check
    from linnet.errors import InputError
    from linnet.machine import find_device
    from linnet.tangent.preflight import LEFT_OUT, preflight

    if batch < 1:
        raise InputError(f"batch is {batch}", expected="a positive number of samples", remedy="try --batch 8")
    place = find_device(device)
    transform = image_transform("none" if mean == "auto" and std is None else mean, std, size, channels)
    task = load_data(data, transform, seed=seed, target=target, damaged=damaged)
    check_images(task)
    sample = task.subset("train", range(min(batch, len(task.train))))
    if size is not None:  # of what a few samples take in their own size, the preflight tells
        replace(sample, test=sample.train).require_memory(memory)  # only these are decoded
    old = load_model(model, weights, model_args).to(place)
    sample = normalized(sample, old, mean == "auto")
    x = sample.tensors("train")[0].to(place)
    plan = planned(old, task, x, params, output)
    report = preflight(plan.model, x, params=plan.params, memory=memory)
    if report.memory.peak > report.memory.budget:
        report = replace(report, ok=False)  # the finding says so; nothing could be computed
    if params is None:  # what a nested fit leaves to its heads is no choice of the user
        report = replace(report, findings=tuple(one for one in report.findings if LEFT_OUT not in one))
    if plan.note:
        report = replace(report, findings=(*report.findings, plan.note))
    seconds = plan.seconds(x, task) if report.ok else None
    for line in print_check(report, task, sample.findings, seconds):
        print(line)
    return {
        **report.to_dict(),
        "ok": report.ok,
        "data": {
            "train": len(task.train),
            "test": len(task.test),
            "classes": None if task.classes is None else list(task.classes),
            "findings": list(sample.findings),
        },
        "seconds": None if seconds is None else {"fit": seconds[0], "test": seconds[1]},
    }
