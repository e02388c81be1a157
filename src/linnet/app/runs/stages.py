"""Timing of the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stages:
    """Seconds of each step, in the order in which they were taken."""

    seconds: dict[str, float] = field(default_factory=dict)  # what is known already

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Measure a step; a step that is taken twice is added up."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
