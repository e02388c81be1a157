"""Curvature matrices: Gauss-Newton, Fisher and Hessian, whole or approximated."""

from __future__ import annotations

from linnet.curvatures.settings import LowRank, MatrixFree, MonteCarlo, Passes, RandomProjection

__all__ = ["LowRank", "MatrixFree", "MonteCarlo", "Passes", "RandomProjection"]
