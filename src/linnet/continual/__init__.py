"""Continual learning without catastrophic forgetting, as ``linnet.continual``.

Four methods with one interface for a training loop of one's own: ``penalty()`` to add to any loss, or
``add_grad_()`` after ``backward``; ``after_step()`` after the optimizer's step; ``consolidate(data)`` when a
task has been learned; ``state_dict()`` and ``load_state_dict()``.

Source: Botev 2020, sections 5.3 and 5.4; Ritter, Botev and Barber, NeurIPS 2018.
"""

from __future__ import annotations

from linnet.continual.intelligence import SynapticIntelligence
from linnet.continual.laplace import EWC, NonOnlineLaplace, OnlineLaplace
from linnet.continual.method import ContinualMethod, convert_strength
from linnet.continual.metrics import StreamMetrics

__all__ = [
    "ContinualMethod",
    "OnlineLaplace",
    "NonOnlineLaplace",
    "EWC",
    "SynapticIntelligence",
    "StreamMetrics",
    "convert_strength",
]
