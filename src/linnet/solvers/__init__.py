"""Iterative algorithms for any linear operator; each returns its error estimates with the result."""

from linnet.solvers.cg import block_cg, cg, shifted_cg
from linnet.solvers.lanczos import eigenpairs, tridiagonalize
from linnet.solvers.nystrom import nystrom, nystrom_preconditioner
from linnet.solvers.solution import Status
from linnet.solvers.trace import hutchinson, logdet, slq

__all__ = [
    "Status",
    "block_cg",
    "cg",
    "eigenpairs",
    "hutchinson",
    "logdet",
    "nystrom",
    "nystrom_preconditioner",
    "shifted_cg",
    "slq",
    "tridiagonalize",
]
