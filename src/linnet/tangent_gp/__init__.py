"""The tangent Gaussian process."""

from __future__ import annotations

from linnet.tangent_gp.tangent_gp import TangentGP

__all__ = ["TangentGP"]
