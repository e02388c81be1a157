"""Sequences of several lengths, which cost their own length and not that of the longest.

Tokenizers fill texts up on the right, to the longest of all or further, and a mask hides what is added. A
network that minds the mask gives the same without it; so many examples go through it in the order of their
lengths, each batch cut to its longest. Whether the network minds is asked of some examples; where they leave
a doubt, or where something else goes along with the texts, all stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from linnet.tangent.batch import MASK, TOKENS, Inputs, batch_size, same_places, take

Run = Callable[[Inputs], Tensor]  # outputs (n, ...) of a batch
ALONG = (TOKENS, MASK, "token_type_ids", "position_ids")  # what is cut with the text
ASKED = 4  # examples that are asked
PAYS = 8  # times what the question costs must be saved
# What may differ of a column: rounding units of its size, where encoders of six layers need up to 160, and a
# share of its spread, where they need 2e-5.
DIGITS, SPREAD = 1000.0, 1e-3


def lengths(x: Inputs) -> Tensor | None:
    """Positions up to the last one that counts, (N,), of texts with a mask of 0 and 1 and no other mask."""
    mask = x.get(MASK) if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point() or mask.shape[1] < 2:
        return None
    others = {name: t for name, t in x.items() if name not in ALONG and isinstance(t, Tensor)}
    if any("mask" in str(name) or t.shape[1:2] == mask.shape[1:] for name, t in others.items()):
        return None
    if len(mask) != batch_size(x) or not bool(((mask == 0) | (mask == 1)).all()) or not mask.any(1).all():
        return None
    return mask.shape[1] - mask.flip(1).byte().argmax(1)  # of equals the first is taken


def shortened(x: Inputs) -> Inputs:
    """Sequences without the positions that are padding in all of them."""
    length = lengths(x)
    if length is None:
        return x
    shape, longest = x[MASK].shape, int(length.max())
    cut = {name: x[name] for name in ALONG if isinstance(x.get(name), Tensor) and x[name].shape == shape}
    return {**x, **{name: same_places(t[:, :longest], t) for name, t in cut.items()}}


@torch.no_grad()
def ignores_padding(network: nn.Module, run: Run, x: Inputs) -> bool:
    """Whether outputs are the same without the padding behind sequences, and leaving it out pays."""
    length = lengths(x)
    if length is None or int((x[MASK].shape[1] - length).sum()) < PAYS * 2 * ASKED * x[MASK].shape[1]:
        return False
    # BigBird leaves its sparse attention for good at its first short input
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in network.modules()):
        return False
    # short and long ones, each cut to its own length: Longformer is the same without padding for short ones
    places = torch.linspace(0, len(length) - 1, ASKED, device=length.device).round().long()
    rows = length.argsort(stable=True)[places]
    whole = run(take(x, rows))
    try:
        found = torch.cat([run(shortened(take(x, row[None]))) for row in rows])
    except Exception:  # it takes sequences of one length
        return False
    if found.shape != whole.shape or not whole.is_floating_point():
        return False
    # Column by column, or by the median column where one is small beside the others, whose rounding it has:
    # an offset, or one large feature, hides nothing. Where all columns are constant nothing is told.
    size, spread = whole.abs().amax(0), whole.amax(0) - whole.amin(0)
    off, digits = (found - whole).abs().amax(0), min(DIGITS * torch.finfo(whole.dtype).eps, SPREAD)
    bound = torch.minimum(digits * size.clamp_min(size.median()), SPREAD * spread.clamp_min(spread.median()))
    return bool((spread > 0).any() and (off <= bound).all())
