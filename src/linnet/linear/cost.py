"""Operations of a network, counted, not timed, so that plans are alike on every day."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from linnet.errors import ModelError
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import Functional

NETWORK_PENALTY = 4.0  # a network's operations take about four times as long as those of one large product


def forward_operations(function: Functional, x: Inputs) -> float:
    """Operations of one example's forward pass; at least two for each weight."""
    if function.cache.operations is None:
        counter, one = FlopCounterMode(display=False), take(x, slice(0, 1))
        try:
            with counter:
                function.check_runs(one)
        except ModelError:  # the counter's hooks fail in networks that differentiate themselves
            function.check_runs(one)
        function.cache.operations = max(counter.get_total_flops(), 2 * function.space.dim)
    return float(function.cache.operations)
