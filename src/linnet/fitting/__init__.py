"""The linear fit and everything it answers; ``linnet.fit`` makes one, and these say how it is solved."""

from __future__ import annotations

from linnet.fitting.metric import MetricNetwork
from linnet.fitting.sketch import KeptTrace, LayerShare, SketchedNetwork
from linnet.fitting.softmax_path import LeftOut, SoftmaxPath
from linnet.fitting.solver import CG, SGD, Dual, Nystrom, Shared, Sketch
from linnet.linear.dual import RidgePath
from linnet.linear.targets import OneHot

__all__ = [
    "CG", "SGD", "Dual", "KeptTrace", "LayerShare", "LeftOut", "MetricNetwork", "Nystrom", "OneHot",
    "RidgePath", "Shared", "Sketch", "SketchedNetwork", "SoftmaxPath",
]  # fmt: skip
