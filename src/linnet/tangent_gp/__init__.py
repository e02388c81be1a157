"""The tangent Gaussian process."""

from __future__ import annotations

from linnet.tangent_gp.load import load_gp
from linnet.tangent_gp.tangent_gp import TangentGP

__all__ = ["TangentGP", "load_gp"]
