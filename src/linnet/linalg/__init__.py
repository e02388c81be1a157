"""Matrices without networks: parameter spaces, linear operators, structured matrices, factorizations."""

from linnet.linalg.factorize import cholesky as cholesky
from linnet.linalg.factorize import eigh as eigh
from linnet.linalg.kronecker import Kronecker as Kronecker
from linnet.linalg.kronecker import KroneckerEigen as KroneckerEigen
from linnet.linalg.kronecker import factored_damping as factored_damping
from linnet.linalg.kronecker import merge as merge
from linnet.linalg.lowrank import LowRankMatrix as LowRankMatrix
from linnet.linalg.operator import FunctionOperator as FunctionOperator
from linnet.linalg.operator import LinearOperator as LinearOperator
from linnet.linalg.operator import ParameterSpace as ParameterSpace
from linnet.linalg.operator import Params as Params
from linnet.linalg.operator import Sum as Sum
from linnet.linalg.operator import Vector as Vector
from linnet.linalg.structured import Dense as Dense
from linnet.linalg.structured import Diagonal as Diagonal
from linnet.linalg.structured import StructuredOperator as StructuredOperator
