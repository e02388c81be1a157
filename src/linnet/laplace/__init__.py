"""Laplace posteriors of a network."""
