"""Posteriors of the linear model under any likelihood."""
