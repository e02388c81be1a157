"""What the tangent kernel says: Gram matrices of any size."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from linnet.tangent.batch import Inputs, map_tensors
from linnet.tangent.captured import Outputs
from linnet.tangent.gram import gram as _gram
from linnet.tangent.linearized import Linearized, linearize


def gram(
    lin_or_model: Linearized | nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    outputs: Outputs = "full",
    *,
    memory: str | int | None = None,
    file: str | Path | None = None,
    accumulate: str | None = None,
    progress: bool | None = None,
) -> Tensor:
    """The Gram matrix of the tangent kernel, in tiles under a memory budget.

    Args:
        lin_or_model: A linearized network, or a network that is linearized in all its parameters.
        x: N examples.
        x2: M examples; by default ``x``, and the result is exactly symmetric.
        outputs: ``"full"`` (N, C, M, C), ``"trace"`` (N, M), ``"diagonal"`` (N, M, C) or ``"sum"`` (N, M).
        memory: Budget such as ``"4GB"``; by default half of what is available.
        file: A ``.npy`` file for the result; an interrupted run resumes from it.
        accumulate: ``"float64"`` keeps sums over parameters in double precision.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        The Gram matrix, memory-mapped if ``file`` is given.

    Raises:
        InputError: If an argument has a value that is not listed.
        MemoryBudgetError: If not even the smallest tiles fit.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, supplement A.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> gram(net, torch.ones(4, 2), outputs="trace").shape
        torch.Size([4, 4])
    """
    lin = lin_or_model if isinstance(lin_or_model, Linearized) else linearize(lin_or_model)
    here = lin.function.device
    x = map_tensors(lambda t: t.to(here), x)
    x2 = None if x2 is None else map_tensors(lambda t: t.to(here), x2)
    return _gram(
        lin.function,
        x,
        x2,
        outputs=outputs,
        memory=memory,
        file=file,
        accumulate=accumulate,
        progress=progress,
    )
