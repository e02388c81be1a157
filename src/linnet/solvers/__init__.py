"""Iterative algorithms for any linear operator; each returns its error estimates with the result."""

from linnet.solvers.block_cg import block_cg as block_cg
from linnet.solvers.cg import cg as cg
from linnet.solvers.lanczos import Eigenpairs as Eigenpairs
from linnet.solvers.lanczos import Tridiagonal as Tridiagonal
from linnet.solvers.lanczos import eigenpairs as eigenpairs
from linnet.solvers.lanczos import tridiagonalize as tridiagonalize
from linnet.solvers.nystrom import nystrom as nystrom
from linnet.solvers.nystrom import nystrom_preconditioner as nystrom_preconditioner
from linnet.solvers.shifted_cg import shifted_cg as shifted_cg
from linnet.solvers.solution import Estimate as Estimate
from linnet.solvers.solution import Solution as Solution
from linnet.solvers.solution import Status as Status
from linnet.solvers.trace import hutchinson as hutchinson
from linnet.solvers.trace import hutchpp as hutchpp
from linnet.solvers.trace import logdet as logdet
from linnet.solvers.trace import slq as slq
