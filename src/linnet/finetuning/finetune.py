"""``linnet.finetune``: the recipes of linear and plain fine-tuning, one call each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnet.errors import InputError, ModelError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.course import Course, Log, Optimization, Reporting
from linnet.finetuning.examples import Examples
from linnet.finetuning.finetuned import Finetuned
from linnet.finetuning.plan import Plan, Problem
from linnet.finetuning.prepared import Shaping
from linnet.finetuning.recipe_runs import exact, searched
from linnet.finetuning.recipes import (
    BATCH_SIZE,
    MOMENTUM,
    PLAIN_RATE,
    WEIGHT_DECAY,
    Candidate,
    Recipe,
    candidates_for,
    recipe_for,
)
from linnet.fitting.arguments import check_count, check_positive, check_ridge
from linnet.fitting.targets import ALPHA
from linnet.params import flag, function, instance, integer, number
from linnet.params import path as checked_path
from linnet.params import seed as checked_seed
from linnet.tangent.functional import OutputAdapter
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector

SLOPE = 0.2
BILINEAR = ("root", "iterations", "channels", "layer")


@in_exact_mode
def finetune(
    model: nn.Module,
    data: Any,
    method: str = "lqf",
    validation: Any = None,
    *,
    loss: str | None = None,
    activation: str | None = None,
    preconditioner: str | None = None,
    optimizer: str | None = None,
    augmentation: str | Augmentation = "none",
    search: str | Mapping[str, Sequence[Any]] | None = None,
    solver: str = "sgd",
    ridge: float | str | None = None,
    learning_rate: float | None = None,
    weight_decay: float = WEIGHT_DECAY,
    batch_size: int = BATCH_SIZE,
    steps: int | None = None,
    momentum: float | None = None,
    damping: float | None = None,
    schedule: str = "constant",
    clip: float | None = None,
    scale: float = ALPHA,
    slope: float = SLOPE,
    head: str = "auto",
    classes: int | None = None,
    params: Selector = None,
    output: OutputAdapter = None,
    bilinear: Mapping[str, Any] | None = None,
    training_mode: bool = False,
    keep: str = "last",
    evaluate_every: int | None = None,
    seed: int = 0,
    memory: str | int | None = None,
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    log: Log | None = None,
    log_every: int = 10,
    progress: bool | None = None,
) -> Finetuned:
    """Fine-tune a pretrained network on a new task.

    ========  ==========================================================================================
    lqf       Leaky ReLU, linearized, squared loss to α-scaled targets, K-FAC preconditioner estimated once
    lqf-fc    the same for the last layer alone
    gaf       linearized, cross-entropy, nothing else changed
    fc        the last layer alone, cross-entropy
    nlft      plain fine-tuning of all weights, cross-entropy
    b-lqf     lqf on square-root bilinear pooling of the last feature map
    ========  ==========================================================================================

    Any part can be changed: ``loss="cross-entropy"``, ``activation="relu"`` or ``preconditioner="none"`` take
    one out of lqf, ``optimizer="adam"`` takes Adam instead of SGD with K-FAC. BatchNorm keeps its running
    statistics. With preconditioner the learning rate follows the batch size at one effective learning rate
    η/((1 − m) b), the same for every task; without it, squared loss starts from the largest eigenvalue of
    its Hessian. Step, order and augmentation are functions of the seed: the same call gives the same bits.

    Steps of SGD on a linear model whose images do not change are taken in the coordinates of its kernel where
    that costs less and fits ``memory``: the same iterates, at a price that does not depend on the network. A
    weight decay that would take less than a thousandth of δ is then left out of preconditioned steps.

    Where the loss is squared and augmentation is not random the optimum has a closed form:
    ``solver="exact"`` goes there at once, through :func:`linnet.fit` at ridge ρ = N λ, or at ``ridge``.

    Args:
        model: The pretrained network; it is not touched.
        data: The new task: an (x, y) pair, a map-style ``Dataset`` or a ``DataLoader`` over one. Integer y
            are classes, float y (N, C) values.
        method: One of the table.
        validation: Data to score on the way, and to choose by. Without them a search holds a fifth of each
            class out, and trains again on everything with the values it took.
        loss: ``"squared"`` or ``"cross-entropy"``.
        activation: ``"leaky-relu"`` or ``"relu"`` (as it is; better for deep networks without normalization
            layers, or with them folded away, unless :func:`linnet.surgery.recover` trains them first).
        preconditioner: ``"kfac"``, ``"ekfac"``, ``"diagonal"``, ``"block"`` or ``"none"``.
        optimizer: ``"sgd"`` or ``"adam"``.
        augmentation: ``"none"``, ``"center"``, ``"random-crop"``, ``"resized-crop"``, or an ``Augmentation``.
        search: ``"paper"``, ``"wide"``, or lists to try by name: ``learning_rate``, ``weight_decay``,
            ``batch_size``, ``augmentation``. For ``"paper"`` images are cropped where ``augmentation`` is one
            of the crops.
        solver: ``"sgd"`` for training steps, ``"exact"`` for the closed form.
        ridge: ρ of the closed form, or the criterion that chooses it; by default N λ.
        learning_rate: η. One that is given is kept, with a warning if the training loss goes up again; the
            recipe's own, and one that a search chose on fewer examples, is then divided by three.
        weight_decay: λ: ½ λ‖δ‖² is added to the mean loss.
        batch_size: b.
        steps: Steps; by default 30 epochs, at least 300 steps.
        momentum: m of SGD or β₁ of Adam; by default 0.9, and 0.5 for gaf with Adam.
        damping: τ added to the curvature of the mean loss before it is inverted; by default a tenth of its
            mean eigenvalue. λ is added as well.
        schedule: ``"constant"`` or ``"cosine"``.
        clip: Largest norm of the gradient.
        scale: α of one-hot targets.
        slope: Slope of Leaky ReLU below zero.
        head: ``"probe"``, ``"random"``, ``"zero"`` or ``"keep"``; ``"auto"`` keeps a head that
            ``linnet.with_head`` made with the right number of outputs, and fits a probe otherwise.
        classes: Number of classes; by default the largest label plus one.
        params: Which parameters of the network vary; by default all, apart from what is frozen in part of it.
        output: How to turn the network's result into a tensor.
        bilinear: Options of b-lqf: ``root``, ``iterations``, ``channels``, ``layer``.
        training_mode: Whether BatchNorm uses the batch and dropout is on, for nlft.
        keep: ``"last"``, or ``"best"`` for the weights of the best validation.
        evaluate_every: Steps between two validations; by default an epoch.
        seed: Seed of everything random.
        memory: Budget such as ``"4GB"``, of the curvature and the closed form.
        checkpoint: A folder; an interrupted call resumes from it, to the same bits.
        save_every: Steps between two states kept there; by default a twentieth of the run.
        log: Called with a dict of numbers and the step; for TensorBoard, with a ``SummaryWriter`` w,
            ``lambda values, step: [w.add_scalar(name, v, step) for name, v in values.items()]``.
        log_every: Steps between two of these calls.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The trained module with history, validation scores and what was done.

    Raises:
        DataError: If the data are empty, not finite, or have labels out of range.
        InputError: If an argument has a value that is not listed or does not go with another.
        ModelError: If an activation, the pooling or the head cannot be replaced.
        NumericalError: If the loss is not finite with any of the values tried.

    Source:
        Achille, Golatkar, Ravichandran, Polito, Soatto, CVPR 2021, sections 3, 4 and A.2; gaf: Mu, Liang, Li,
        ICLR 2020.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 5))
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> tuned = finetune(net, (x, (x[:, 0] > 0).long()), steps=50)
        >>> tuned.predict(x).shape
        torch.Size([40, 2])
    """
    number("weight_decay", weight_decay, least=0)
    recipe = recipe_for(method, loss, activation, preconditioner, optimizer)
    device = _device(model)
    examples = Examples(data, device)
    crop = Augmentation(augmentation) if isinstance(augmentation, str) else augmentation
    instance("augmentation", crop, Augmentation, "a kind of augmentation, or an Augmentation")
    flag("training_mode", training_mode)
    seed = checked_seed("seed", seed)
    integer("log_every", log_every)
    if log is not None:
        function("log", log, "a function of a dict of numbers and a step")
    if checkpoint is not None:
        checked_path("checkpoint", checkpoint)
    first = Candidate(learning_rate, weight_decay, batch_size, crop)
    candidates = candidates_for(search, recipe, first)
    _check_solver(solver, ridge, recipe, candidates, training_mode)
    steps_only = {
        "learning_rate": learning_rate,
        "steps": steps,
        "momentum": momentum,
        "damping": damping,
        "clip": clip,
    }
    _check_used(solver, recipe, steps_only, slope)
    check_positive("scale", scale, "leave scale= out for α = 15")
    for name, count in (("steps", steps), ("evaluate_every", evaluate_every)):
        if count is not None:
            check_count(name, count)
    if keep == "best" and validation is None and search is None:
        raise InputError(
            'keep="best" without validation data',
            expected="data by which weights are compared",
            remedy="pass validation=(x, y), or leave keep= out",
        )
    if momentum is None:
        momentum = 0.5 if method == "gaf" and recipe.optimizer == "adam" else MOMENTUM
    plan = Plan(
        recipe,
        Shaping(slope, scale, head, params, output, _bilinear_options(bilinear, recipe), seed),
        Problem.of(examples, classes, recipe),
        Optimization(recipe.optimizer, learning_rate or PLAIN_RATE, momentum, schedule, clip),
        Course(1, 1, seed, 1, keep, training_mode),
        {"steps": steps, "evaluate_every": evaluate_every, "damping": damping, "memory": memory},
        Reporting(log, log_every, checkpoint, save_every, progress, f"fine-tuning by {method}"),
    )
    held = None if validation is None else Examples(validation, device)
    if held is not None:
        plan.problem.check(held)
    # whatever the caller has switched off. New layers draw from torch's own generator before they are set
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        if solver == "exact":
            return exact(plan, model, method, (examples, held), candidates[0], ridge)
        return searched(plan, model, method, (examples, held), candidates)


def _bilinear_options(options: Any, recipe: Recipe) -> dict[str, Any]:
    """Options of bilinear pooling, or an error where there are others or no such pooling."""
    if options is None or (isinstance(options, Mapping) and not options):
        return {}
    if not isinstance(options, Mapping) or not set(options) <= set(BILINEAR) or not recipe.bilinear:
        raise InputError(
            f"bilinear={options!r}" + ("" if recipe.bilinear else " without bilinear pooling"),
            expected=f"options of b-lqf by name: {', '.join(BILINEAR)}",
            remedy='leave bilinear= out, or pass method="b-lqf"',
        )
    return dict(options)


def _device(model: nn.Module) -> torch.device:
    """Where the network lives."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is {type(model).__name__}", expected="a torch.nn.Module", remedy="pass the network itself"
        )
    first = next(model.parameters(), None)
    if first is None:
        raise ModelError(
            f"model ({type(model).__name__}) has no parameter",
            expected="a network with weights to train",
            remedy="pass the network that holds the weights",
        )
    return first.device


def _check_used(solver: str, recipe: Recipe, steps_only: Mapping[str, Any], slope: float) -> None:
    """Raise where a value is given that nothing would use."""
    given = [name for name, value in steps_only.items() if value is not None]
    if solver == "exact" and given:
        raise InputError(
            f'{given[0]}={steps_only[given[0]]!r} with solver="exact"',
            expected="values of the closed form: weight_decay= or ridge=",
            remedy=f"leave {given[0]}= out, or leave solver= out for training steps",
        )
    if recipe.preconditioner == "none" and "damping" in given:
        raise InputError(
            f"damping={steps_only['damping']!r} without a preconditioner",
            expected="a method whose steps a curvature preconditions",
            remedy='leave damping= out, or pass preconditioner="kfac"',
        )
    if not (isinstance(slope, int | float) and slope == SLOPE) and not recipe.leaky:
        raise InputError(
            f"slope={slope!r} without Leaky ReLU",
            expected="a method that replaces the activations",
            remedy='leave slope= out, or pass activation="leaky-relu"',
        )


def _check_solver(
    solver: str, ridge: float | str | None, recipe: Recipe, candidates: list[Candidate], training_mode: bool
) -> None:
    """Raise where the closed form is requested and there is none."""
    if solver not in ("sgd", "exact"):
        raise InputError(f"solver={solver!r}", expected='"sgd" or "exact"', remedy='leave it out for "sgd"')
    if training_mode and recipe.linear:
        raise InputError(
            "training_mode=True with a linear model",
            expected="BatchNorm with its running statistics: a linear model has no others",
            remedy='leave training_mode= out, or pass method="nlft"',
        )
    if solver == "sgd":
        if ridge is not None:
            raise InputError(
                f'ridge={ridge!r} with solver="sgd"',
                expected="weight_decay=, λ = ρ/N",
                remedy='pass solver="exact" for the optimum at a ridge',
            )
        return
    if ridge is not None:
        check_ridge(ridge)
    why = ""
    if not recipe.linear:
        why = "the model is not linear"
    elif len(candidates) > 1:
        why = "a search tries values of training steps"
    elif candidates[0].augmentation.is_random:
        why = "random augmentation makes data without end"
    elif ridge is None and candidates[0].weight_decay == 0:
        why = "without weight decay there are many optima"
    if why:
        raise InputError(
            f'solver="exact", but {why}',
            expected="a linear model, one set of values, no random augmentation, λ > 0",
            remedy='leave solver= out for training steps, or choose the ridge with ridge="loo"',
        )
