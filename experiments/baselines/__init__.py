"""Rivals that the studies compare with: dropout, factorized Gaussians, a Bayesian last layer."""
