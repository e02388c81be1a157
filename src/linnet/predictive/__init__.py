"""Predictive distributions: a mean, covariances, class probabilities, samples and densities of outputs."""

from __future__ import annotations

from linnet.predictive.distribution import Predictive
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.sampled import SampledPredictive

__all__ = ["GaussianPredictive", "Predictive", "SampledPredictive"]
