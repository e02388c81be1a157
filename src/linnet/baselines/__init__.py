"""Baselines for uncertainty: dropout, deep ensembles, factorized Gaussians, a Bayesian last layer."""

from __future__ import annotations

from linnet.baselines.factorized import factorized_gaussian
from linnet.baselines.last_layer import last_layer
from linnet.baselines.sampled import deep_ensemble, mc_dropout, trained

__all__ = ["deep_ensemble", "factorized_gaussian", "last_layer", "mc_dropout", "trained"]
