"""Posteriors of the linear model under any likelihood."""

from __future__ import annotations

from linnet.posterior.posterior import Newton, linear_posterior
from linnet.posterior.svi import SVI

__all__ = ["SVI", "Newton", "linear_posterior"]
