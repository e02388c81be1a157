"""Detection of networks that return probabilities instead of logits."""

from __future__ import annotations

import warnings

from torch import Tensor

from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.likelihoods.likelihood import Likelihood

ROUNDING = 1e-4  # by how much the sum of an example's probabilities may miss one
FEWEST = 8  # outputs that a yes or no must have to be taken for probabilities
SURE = 0.25  # how near zero and one the surest of them must come


def are_probabilities(likelihood: Likelihood, f: Tensor) -> bool:
    """Whether outputs that should be logits are probabilities.

    Of classes: none is negative, and those of an example sum to one. Of a yes or no: none of eight or more is
    outside [0, 1], and some are sure of either answer, as the logits of no trained network are within [0, 1].

    Args:
        likelihood: What the outputs mean.
        f: Outputs (N, ...).

    Returns:
        Whether they are; False for likelihoods without logits.

    Example:
        >>> import torch
        >>> are_probabilities(Categorical(), torch.tensor([[0.25, 0.75]]))
        True
    """
    if bool((f < 0).any()) or bool((f > 1).any()) or not bool(f.isfinite().all()):
        return False
    if isinstance(likelihood, Bernoulli):
        return f.numel() >= FEWEST and float(f.min()) <= SURE and float(f.max()) >= 1 - SURE
    if not isinstance(likelihood, Categorical) or f.ndim < 2 or not -f.ndim < likelihood.axis < f.ndim:
        return False
    return float((f.double().sum(likelihood.axis) - 1).abs().max()) < ROUNDING


def warn_of_probabilities(likelihood: Likelihood, f: Tensor, stacklevel: int = 3) -> None:
    """Warn if outputs that should be logits are probabilities.

    Args:
        likelihood: What the outputs mean.
        f: Outputs (N, ...).
        stacklevel: How far up the caller is whom it concerns.

    Example:
        >>> import torch
        >>> warn_of_probabilities(Categorical(), torch.tensor([[-1.0, 2.0]]))
    """
    if not are_probabilities(likelihood, f):
        return
    classes = isinstance(likelihood, Categorical)
    signs = "not negative, and summing to one" if classes else "all of them between zero and one"
    warnings.warn(
        f"the network's outputs are probabilities: {signs}. {type(likelihood).__name__}() expects logits; "
        f"leave the last {'softmax' if classes else 'sigmoid'} out",
        stacklevel=stacklevel,
    )
