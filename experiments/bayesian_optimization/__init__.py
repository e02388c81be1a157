"""Bayesian optimization where a network was trained on earlier tasks of the same kind."""
