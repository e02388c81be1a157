"""Sequences of several lengths, which cost their own length and not that of the longest.

Tokenizers fill texts up on the right, to the longest of all or further, and a mask hides what is added. A
network that minds the mask gives the same without it; so many examples go through it in the order of their
lengths, each batch cut to its longest. Whether the network minds is asked of the example with most padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from linnet.tangent.batch import MASK, Inputs, counted, same_places, split, take
from linnet.tangent.functional import FAILURES

Run = Callable[[Inputs], Tensor]  # outputs (n, ...) of a batch


def lengths(x: Inputs) -> Tensor | None:
    """Positions up to the last one that counts, (N,), where a mask of whole numbers says which count."""
    mask = x.get(MASK) if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point() or 0 in mask.shape:
        return None
    return mask.shape[1] - counted(mask).flip(1).byte().argmax(1)  # of equals the first is taken


def shortened(x: Inputs) -> Inputs:
    """Sequences without the positions that are padding in all of them."""
    length = lengths(x)
    if length is None:
        return x
    mask, longest = x[MASK], int(length.max())

    def part(t: object) -> object:
        ids = isinstance(t, Tensor) and t.shape == mask.shape and not t.is_floating_point()
        return same_places(t[:, :longest], t) if isinstance(t, Tensor) and ids else t

    return {name: part(t) for name, t in x.items()}


@torch.no_grad()
def ignores_padding(run: Run, x: Inputs) -> bool:
    """Whether there is padding behind sequences, and the outputs are the same without it."""
    length = lengths(x)
    if length is None or int(length.min()) == x[MASK].shape[1]:
        return False
    one = take(x, length.argmin()[None])
    whole = run(one)
    try:
        cut = run(shortened(one))
    except FAILURES:  # it takes sequences of one length
        return False
    if cut.shape != whole.shape:
        return False
    # half of the digits: batches of other shapes round otherwise, and padding that counts changes more
    tolerance = torch.finfo(whole.dtype).eps ** 0.5 if whole.is_floating_point() else 0.0
    return bool((cut - whole).abs().max() <= tolerance * whole.abs().max())


@torch.no_grad()
def in_parts(run: Run, x: Inputs, size: int) -> Tensor:
    """Outputs of many examples, which go through a network some at a time."""
    length = lengths(x)
    if length is None or not ignores_padding(run, x):
        return torch.cat([run(part) for part in split(x, size)])
    # the longest first: memory that does not suffice fails at once
    order = length.argsort(descending=True, stable=True)
    found = torch.cat([run(shortened(take(x, rows))) for rows in order.split(size)])
    return torch.empty_like(found).index_copy_(0, order.to(found.device), found)
