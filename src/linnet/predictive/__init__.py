"""Predictive distributions: a mean, covariances, class probabilities, samples and densities of outputs."""
