"""Input checks and batched evaluation shared by all fits."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.distributed import all_rows
from linnet.tangent.batch import Inputs, batch_size, own_parts, split, take
from linnet.tangent.gather import examples
from linnet.tangent.linearized import Linearized

BATCH = 128  # examples predicted at once


def checked_inputs(module: Linearized, x: Inputs, name: str = "x") -> Inputs:
    """Examples that the network runs on, or an error."""
    x = examples(module.function, x, name)
    module.function.check_runs(take(x, slice(0, 1)))
    return x


@torch.no_grad()
def base_outputs(module: Linearized, x: Inputs) -> Tensor:
    """f₀(x), batch by batch; each process of several has its share of them."""
    parts = [module.base(part) for _, part in own_parts(x, BATCH)]
    return all_rows(torch.cat(parts or [module.base(take(x, slice(0, 1)))[:0]]), batch_size(x))


@torch.no_grad()
def linear_outputs(module: Linearized, x: Inputs) -> Tensor:
    """f₀(x) + J(x)δ, batch by batch."""
    parts = [module(part) for part in split(checked_inputs(module, x), BATCH)]
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts])


def count_in_words(n: int) -> str:
    """A number of examples in words."""
    return f"{n} example" if n == 1 else f"{n} examples"
