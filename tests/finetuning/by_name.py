"""``finetune`` and ``recover`` with every setting by its name alone, as grids of tests list them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

import linnet
from linnet.finetuning.finetune import finetune as finetune_in_full
from linnet.finetuning.finetuned import Finetuned
from linnet.finetuning.recovery import recover as recover_in_full

KINDS: tuple[Any, ...] = (linnet.Recipe, linnet.Training, linnet.Run)


def sorted_out(given: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The settings of a recipe, a training and a run, and what is left."""
    known = [{field.name for field in fields(kind)} for kind in KINDS]
    parts = [{name: value for name, value in given.items() if name in names} for names in known]
    return parts, {name: value for name, value in given.items() if not any(name in own for own in known)}


def finetune(model: Any, data: Any, recipe: str = "lqf", validation: Any = None, **given: Any) -> Finetuned:
    """The call, its settings in the objects that they belong to."""
    (made, training, run), rest = sorted_out(given)
    selected = {name: rest.pop(name) for name in ("params", "output") if name in rest}
    return finetune_in_full(
        linnet.linearize(model, **selected) if selected else model,
        data,
        linnet.Recipe(recipe, **made) if made else recipe,
        validation=validation,
        training=rest.pop("training", linnet.Training(**training) if training else None),
        run=linnet.Run(**run) if run else None,
        **rest,
    )


def recover(model: Any, data: Any, teacher: Any = None, **given: Any) -> nn.Module:
    """Likewise."""
    (mode, training, run), rest = sorted_out(given)
    return recover_in_full(
        model, data, teacher, training=linnet.Training(**training), run=linnet.Run(**run), **mode, **rest
    )
