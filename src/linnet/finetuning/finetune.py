"""``linnet.finetune``: the recipes of linear and plain fine-tuning, one call each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from linnet.errors import InputError, ModelError
from linnet.finetuning.finetuned import Finetuned
from linnet.finetuning.recipes import (
    BATCH_SIZE,
    MOMENTUM,
    WEIGHT_DECAY,
    ClosedForm,
    Recipe,
    Trial,
    candidates_for,
)
from linnet.finetuning.search import Call, Task, exact, searched
from linnet.finetuning.trainer import ExampleSet, Run, checked_run
from linnet.fitting.last_layer import RECORD
from linnet.params import instance, no_targets
from linnet.params import seed as checked_seed
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector, require_module, selected
from linnet.training import Training, filled


@in_exact_mode
def finetune(
    model: nn.Module,
    data: Any,
    recipe: str | Recipe = "lqf",
    *,
    validation: Any = None,
    search: str | Mapping[str, Sequence[Any]] | None = None,
    training: Training | ClosedForm | str | None = None,
    seed: int = 0,
    run: Run | None = None,
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

    Any part can be changed: ``Recipe("lqf", loss="cross-entropy")``, with ``activation="relu"`` or
    ``preconditioner="none"``, takes one out of lqf; ``optimizer="adam"`` takes Adam instead of SGD with
    K-FAC. BatchNorm keeps its running statistics. With preconditioner the learning rate follows the batch
    size at one effective learning rate η/((1 − m) b), the same for every task; without it, squared loss
    starts from the largest eigenvalue of its Hessian. Step, order and augmentation are functions of the
    seed: the same call gives the same bits.

    Where the loss is squared and augmentation is not random the optimum has a closed form, which
    ``training="closed-form"`` goes to at once.

    Args:
        model: The pretrained network; it is not touched. Or a linearization of it, as
            ``linearize(net, params=..., output=...)``, whose parameters vary and whose outputs are taken; of
            a network all parameters vary, apart from what is frozen in part of it.
        data: The new task: an (x, y) pair, a map-style ``Dataset`` or a ``DataLoader`` over one. Integer y
            are classes, float y (N, C) values. Classes that have no example need a head of their own:
            ``linnet.with_head(net, classes)``.
        recipe: One of the table, or a :class:`Recipe` for one with parts of it changed.
        validation: Data to score on the way, and to choose by. Without them a search holds a fifth of each
            class out, and trains again on everything with the values it took.
        search: ``"paper"``, ``"wide"``, or lists to try by name: ``learning_rate``, ``weight_decay``,
            ``batch_size``, ``augmentation``. For ``"paper"`` images are cropped where the recipe's
            ``augmentation`` is one of the crops.
        training: Settings of the training steps. A learning rate that is given is kept, with a warning if the
            training loss goes up again; the recipe's own, and one that a search chose on fewer examples, is
            then divided by three. By default λ = 1e-5, batches of 28, momentum 0.9 (0.5 for gaf with Adam), a
            constant rate, and 30 epochs, at least 300 steps. Or ``"closed-form"``, or a :class:`ClosedForm`.
        seed: Seed of everything random.
        run: Checkpoints, logs, the weights that are kept, and the memory that may be used.

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
        >>> tuned = finetune(net, (x, (x[:, 0] > 0).long()), training=Training(steps=50))
        >>> tuned.predict(x).shape
        torch.Size([40, 2])
    """
    no_targets("recipe", recipe)
    recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
    instance("recipe", recipe, Recipe, "the name of a recipe, or a linnet.Recipe")
    closed, steps = _training(training, recipe)
    run = checked_run(run, "linnet.finetune")
    seed = checked_seed("seed", seed)
    model, params, output = _split(model)
    device = _device(model)
    examples = ExampleSet(data, device, model)
    assert steps.weight_decay is not None
    assert steps.batch_size is not None
    first = Trial(steps.learning_rate, steps.weight_decay, steps.batch_size, recipe.view)
    candidates = candidates_for(search, recipe, first)
    if closed is not None:
        _check_closed_form(recipe, candidates)
    if run.keep == "best" and validation is None and search is None:
        raise InputError(
            'keep="best" without validation data',
            expected="data by which weights are compared",
            remedy="pass validation=(x, y), or leave keep= out",
        )
    kept = _outputs_to_keep(model, recipe, output, examples)
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    own = linear[-1].out_features if linear else None
    task = Task.of(examples, kept, recipe, own)
    call = Call(model, recipe, task, params, output, seed, steps, run)
    scored = None if validation is None else ExampleSet(validation, device, model)
    if scored is not None:
        task.check(scored)
    # whatever the caller has switched off. New layers draw from torch's own generator before they are set
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        if closed is not None:
            return exact(call, (examples, scored), candidates[0], closed)
        return searched(call, (examples, scored), candidates)


def _training(training: Any, recipe: Recipe) -> tuple[ClosedForm | None, Training]:
    """The closed form, if it is asked for, and the settings of training steps."""
    if isinstance(training, str) and training == "closed-form":
        training = ClosedForm()
    momentum = 0.5 if recipe.name == "gaf" and recipe.optimizer == "adam" else MOMENTUM
    steps = filled(
        None if isinstance(training, ClosedForm) else training,
        "linnet.finetune",
        learning_rate=None,
        weight_decay=WEIGHT_DECAY,
        batch_size=BATCH_SIZE,
        steps=None,
        epochs=None,
        momentum=momentum,
        schedule="constant",
        clip=None,
    )
    return (training if isinstance(training, ClosedForm) else None), steps


def _split(model: Any) -> tuple[nn.Module, Selector, OutputAdapter]:
    """The network, and what a linearization of it says: which parameters vary, what its outputs are."""
    if not isinstance(model, Linearized):
        return model, None, None
    network, names = model.model, model.parameter_names
    every = len(names) == len(list(network.parameters()))
    return network, "all" if every else names, model.function.output


def _outputs_to_keep(
    model: nn.Module, recipe: Recipe, output: OutputAdapter, examples: ExampleSet
) -> int | None:
    """Number of outputs of a head that may be kept; ``None`` where there will be a new one."""
    made = recipe.head == "auto" and hasattr(model, RECORD)
    if recipe.pooling is not None or not (made or recipe.head == "keep"):
        return None
    x, _ = examples.batch(torch.arange(min(2, examples.n)))
    own = Functional(model, "all", output).check_runs(recipe.view.evaluation(x)).shape[1:]
    return own[0] if len(own) == 1 else None


def _device(model: nn.Module) -> torch.device:
    """Where the network lives."""
    require_module(model)
    first = next(model.parameters(), None)
    if first is None:
        raise ModelError(
            f"model ({type(model).__name__}) has no parameter",
            expected="a network with weights to train",
            remedy="pass the network that holds the weights",
        )
    masked = [name for name, mask in selected(model, "all").items() if mask is not None]
    if masked and not isinstance(model, Linearized):
        raise ModelError(
            f"parameter {masked[0]!r} has a hook that zeroes entries of its gradient",
            expected="a network without hooks, or its linearization, which obeys them",
            remedy="pass linnet.linearize(model)",
        )
    return first.device


def _check_closed_form(recipe: Recipe, candidates: list[Trial]) -> None:
    """Raise where there is no closed form."""
    why = ""
    if not recipe.linear:
        why = "the model is not linear"
    elif len(candidates) > 1:
        why = "a search tries values of training steps"
    elif candidates[0].augmentation.is_random:
        why = "random augmentation makes data without end"
    if why:
        raise InputError(
            f'training="closed-form", but {why}',
            expected="a linear model, one set of values, no random augmentation",
            remedy="leave training= out for training steps",
        )
