"""Recipes that fine-tune a network."""

from __future__ import annotations

from linnet.finetuning.augment import Augmentation
from linnet.finetuning.finetune import finetune
from linnet.finetuning.recipes import Recipe
from linnet.finetuning.trainer import Run
from linnet.training import Training

__all__ = [
    "Augmentation", "Recipe", "Run", "Training", "finetune",
]  # fmt: skip
