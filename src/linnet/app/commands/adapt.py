"""`linnet adapt`: fit a trained network to a new task in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal


def task_adaptation(
    *,
    data: Path,
    out: Path,
    model: str | None = None,
    weights: Path | None = None,
    model_args: dict[str, Any] | None = None,
    shots: int | None = None,
    tests: int | None = None,
    quick: bool = False,
    ridge: float | Literal["auto", "loo", "gcv", "evidence"] = "auto",
    solver: Literal["auto", "dual", "shared", "primal", "sketch", "cg"] = "auto",
    loss: Literal["auto", "squared", "cross-entropy"] = "squared",
    metric: Literal["auto", "none", "kfac"] = "auto",
    method: Literal["auto", "nested", "linear"] = "auto",
    weight: float | Literal["auto"] = "auto",
    tune: bool = False,
    params: str | None = None,
    output: str | None = None,
    head: Literal["auto", "probe", "random", "zero", "keep"] = "auto",
    cross_fit: int = 0,
    mean: str = "auto",
    std: str | None = None,
    size: int | None = None,
    channels: int | None = None,
    target: str | None = None,
    damaged: Literal["error", "skip"] = "error",
    compare: Literal["probe", "finetune"] = "probe",
    finetune_steps: int = 150,
    memory: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Fit a trained network to a new task in closed form, and report how good and how sure it is.

    Args:
        model: The network: ``path/to/file.py:factory``, ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME``.
            A table needs none: by default it is one hidden layer of 256 random units.
        data: The data: an image folder with one folder per class, an ``.npz`` archive or a ``.csv`` table.
        out: The run folder to write. After an interruption the same command continues there.
        overwrite: Whether to replace a finished run of other settings there, or to write beside other files.
        weights: A file of weights for the network with its old head: ``.safetensors``, ``.npz``, or torch's.
        model_args: Keyword arguments of the factory, as a JSON object.
        shots: Training samples per class, or in all for a regression (default: all).
        tests: Test samples to evaluate on, drawn at random (default: all).
        quick: Give a first answer in about half a minute: a linear probe of all samples, and whether the
            lower layers help, tried on as many as the time allows, at least five per class.
        ridge: The ridge, a positive number, or how to choose it: auto (by leave-one-out, or by evidence where
            a class has one sample), loo, gcv, evidence. For nested a number is relative to the mean of the
            kernel's diagonal.
            Where the kernel is too large for the memory, auto chooses it on some of the samples.
        solver: How to solve: dual (the kernel), shared (one kernel for all outputs, for many), primal (the
            matrix of the weights), sketch (the same along 2,048 directions of the weights), cg (conjugate
            gradients), or auto.
        loss: What is fitted: squared (one-hot targets), cross-entropy (a few Newton steps on the same
            kernel), or auto, which solves both and keeps the one whose leave-one-out log loss on the training
            samples is lower, or squared where solver is shared, primal or sketch.
        metric: Penalty of linear: none is one ridge for all weights, kfac penalizes weights more that
            strongly affect the outputs, by the curvature of the network. auto is kfac for classes where no
            ridge is given, unless solver is shared, sketch or cg; ridge auto is then by evidence behind a
            probe.
        method: What is fitted: nested (a linear probe and the lower layers in one solve, how much of them is
            chosen by leave-one-out), linear (one linearization of the whole network at a head), or auto:
            nested, unless head, cross_fit, metric, loss, solver or a criterion is given that only linear has,
            or the old head is kept.
        weight: Share of the lower layers in the kernel of nested, from 0 (the linear probe) to 1, or auto.
        tune: Train the lower layers as well, solve the nested fit again at the trained weights, and keep the
            result only if cross-validation improves. It takes five or six training runs.
        params: The parameters to fit, by name or regular expression; all of them by default.
        output: The part of what the network returns that is taken, such as pooler_output; by default its
            logits, or the mean of last_hidden_state.
        head: The head that linear starts from: probe (a linear probe), random, zero or keep. auto keeps it
            where a regression fits the network's outputs; else it is a probe, or random where there are fewer
            samples than features, because a probe would overfit. Where params fits its weights too, a probe
            only gives the derivatives, and the fit starts from outputs of zero; else it starts from the
            probe's.
        cross_fit: Folds of a linear probe, such as 5. Leave-one-out then leaves out the sample's part in the
            probe too, for one more kernel per fold. 0 for none.
        mean: Normalization of images: imagenet, cifar, half, none, or one or three numbers with commas. auto
            is what the network's own configuration says (timm, Hugging Face), or none.
        std: Standard deviations that go with numbers in mean.
        size: Height and width that images are scaled to, in pixels.
        channels: Color channels that the network expects, 1 or 3.
        target: The column of a table to predict; the last by default.
        damaged: What to do with image files that cannot be decoded: error, or skip, which names them.
        compare: What the fit is compared with on the test samples: probe (the linear probe, or the network as
            it is), or finetune, which adds plain fine-tuning and takes most of the time.
        finetune_steps: Steps of each run of plain fine-tuning.
        memory: Memory budget, such as 2GB (default: half of the free memory).
        device: The device to compute on, such as cpu or cuda; auto is the first of cuda, mps, cpu here.
        seed: Seed of the split, of the draws and of plain fine-tuning.

    Returns:
        Scores of the fit and of what it is compared with, what was chosen and why, and where it was written.
    """
    from functools import partial

    from linnet.app.data import image_transform, load_data
    from linnet.app.runs.adaptation import adapt as run_adaptation
    from linnet.app.runs.folder import keep_fit
    from linnet.app.runs.planning import network_of_table
    from linnet.app.runs.quick import first_answer
    from linnet.app.runs.settings import Network, Settings, Solving, Source
    from linnet.app.runs.summary import keep_adaptation, print_adaptation

    title = data.stem if model is None else f"{data.stem} from {model.rpartition(':')[2]}"
    if model is None:
        model, model_args = network_of_table(load_data(data, seed=seed, target=target))
    transform = image_transform("none" if mean == "auto" and std is None else mean, std, size, channels)
    settings = Settings(
        Network(model, weights, model_args or {}, head, cross_fit, output),
        Source(data, transform, shots, tests, seed, target, damaged, mean == "auto"),
        Solving(ridge, solver, params, memory, device, loss, metric, method, weight, tune),
        compare, finetune_steps,
    )  # fmt: skip
    run = first_answer if quick else run_adaptation
    found = run(settings, out, partial(keep_fit, out, overwrite=overwrite))
    result = keep_adaptation(found, out, title, replay=True)
    for line in print_adaptation(result):
        print(line)
    return result
