"""Posteriors of the linear model under any likelihood."""

from __future__ import annotations

from linnet.posterior.posterior import LinearPosterior, Newton, linear_posterior
from linnet.posterior.svi import SVI

__all__ = ["SVI", "LinearPosterior", "Newton", "linear_posterior"]
