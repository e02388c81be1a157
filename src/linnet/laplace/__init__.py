"""Laplace posteriors of a network."""

from __future__ import annotations

from linnet.laplace.laplace import Laplace
from linnet.laplace.training import EvidenceSchedule, train_with_evidence
from linnet.laplace.tune import Grid

__all__ = ["EvidenceSchedule", "Grid", "Laplace", "train_with_evidence"]
