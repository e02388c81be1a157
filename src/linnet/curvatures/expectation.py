"""Columns u of the outputs' curvature: Σ_k u_k u_kᵀ equals Λ, or has it as its expectation.

Every matrix of the engine is Σ_n Σ_k (J_nᵀ u_nk)(J_nᵀ u_nk)ᵀ for such columns (Botev 2020, section 4.3):

    exact               columns of Λ^½, one for each output: KFLR, the exact diagonal, the exact blocks
    mc                  gradients of the negative log-likelihood at labels drawn from the model: KFAC
    random-projection   Λ^½ v for random v: Botev 2020, section 4.3.4
    empirical           the gradient at the observed label: the empirical Fisher
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from linnet.curvatures.layers import Layer
from linnet.errors import DataError, InputError
from linnet.likelihoods.likelihood import Likelihood

FORMED = 1000  # outputs up to which the columns of one example are formed to count them: 8 MB in float64
MATRICES = ("gauss-newton", "fisher", "hessian")


@dataclass(frozen=True)
class Expectation:
    """Which columns stand for Λ."""

    likelihood: Likelihood  # what the outputs mean
    kind: str = "exact"  # ``"exact"``, ``"mc"``, ``"random-projection"`` or ``"empirical"``
    matrix: str = "gauss-newton"  # ``"gauss-newton"`` or ``"fisher"``
    samples: int = 1  # K of the random ones
    seed: int = 0  # seed; with the batch's place it fixes the samples of a batch

    def columns(self, f: Tensor, y: Tensor | None, index: int) -> Tensor:
        """The columns of a batch, (K, *f.shape)."""
        # f (N, ...)
        likelihood = self.likelihood
        if self.kind == "exact":
            return likelihood.fisher_root(f, y) if self.matrix == "fisher" else likelihood.root(f, y)
        if self.kind == "empirical":
            assert y is not None, "targets() has been asked"
            return likelihood.gradient(f, y)[None]
        generator = batch_generator(self.seed, index, f.device)
        if self.kind == "mc":
            return likelihood.sample_gradients(f, self.samples, generator, y)
        return likelihood.project(f, self.samples, generator, y)

    def parts(self, f: Tensor, y: Tensor | None, size: int) -> list[Callable[[], Tensor]] | None:
        """Exact columns of a batch in parts, each formed when it is called for."""
        # f (N, ...)
        total = self.size(f)
        if total is None:
            return None
        return [
            partial(self.likelihood._root_part, f, start, min(start + size, total), y)
            for start in range(0, total, size)
        ]

    def size(self, f: Tensor) -> int | None:
        """The number of exact columns of an example, where they can be formed in parts."""
        known = self.kind == "exact" and (self.matrix != "fisher" or self.likelihood.canonical)
        return self.likelihood._root_size(f) if known else None

    def count(self, f: Tensor, y: Tensor | None) -> int:
        """The number of columns of an example; of very many outputs the most that they can have."""
        # f (1, ...)
        if self.kind == "empirical":
            return 1
        if self.kind != "exact":
            return self.samples
        known = self.size(f)
        if known is not None:
            return known
        return f.numel() if f.numel() > FORMED else len(self.columns(f, y, 0))

    @property
    def needs_labels(self) -> bool:
        """Whether the columns depend on observed labels."""
        if self.kind == "empirical":
            return True
        return not self.likelihood.canonical and self.matrix == "gauss-newton"

    def targets(self, f: Tensor, y: Tensor | None) -> Tensor | None:
        """Targets, checked."""
        if y is not None:
            return self.likelihood.check(f, y)
        if self.needs_labels:
            raise DataError(
                f"data has no targets, which {self.kind!r} curvature of {self.likelihood!r} needs",
                expected="(x, y) pairs",
                remedy='pass the targets, or expectation="mc" with matrix="fisher"',
            )
        return None

    def count_of_one(self, f: Tensor, y: Tensor | None) -> int:
        """The number of columns of one example; the targets are checked together, so that errors show all."""
        found = self.targets(f if y is None else f.expand(len(y), *f.shape[1:]), y)
        return self.count(f, None if found is None else found[:1])


def batch_generator(seed: int, index: int, device: torch.device) -> torch.Generator:
    """The random numbers of one batch: the same at every pass and on whichever process."""
    return torch.Generator(device=device).manual_seed((seed * 1_000_003 + index) % (1 << 63))


def choose_matrix(likelihood: Likelihood, kind: str, matrix: str) -> str:
    """Which matrix is meant, and whether the expectation can give it."""
    if matrix not in ("auto", *MATRICES):
        raise InputError(
            f"matrix={matrix!r}",
            expected='"auto", "gauss-newton", "fisher" or "hessian"',
            remedy="leave matrix= out",
        )
    if kind == "empirical" and matrix in ("auto", "fisher"):
        return "fisher"
    if matrix == "hessian":
        return matrix
    if matrix == "auto":
        return "gauss-newton" if likelihood.canonical or kind not in ("mc",) else "fisher"
    differs = matrix == "gauss-newton" and not likelihood.canonical
    if (kind == "mc" and differs) or (kind == "empirical" and matrix == "gauss-newton"):
        raise InputError(
            f"expectation={kind!r} with matrix='gauss-newton' and {likelihood!r}",
            expected="matrix='fisher': gradients at sampled or observed labels give the Fisher matrix",
            remedy="pass matrix='fisher', or expectation='exact' for the Gauss-Newton matrix",
        )
    if kind in ("random-projection", "recursion") and matrix == "fisher" and not likelihood.canonical:
        raise InputError(
            f"expectation={kind!r} with matrix='fisher' and {likelihood!r}",
            expected="matrix='gauss-newton': this expectation is made of Λ itself",
            remedy="pass matrix='gauss-newton', or expectation='mc' for the Fisher matrix",
        )
    return matrix


# -- expectation cost ------------------------------------------------------------------------------
#
# Cost of exact columns of the outputs' curvature, and the choice of sampled ones beyond a limit.
#
# An example with K columns takes K backward passes, and K terms g gᵀ at every layer. With S positions, d
# inputs and c outputs of a layer, in multiplications,
#
#     exact       Σ S d c + K Σ S (d c + c²)
#     training    3 Σ S d c: forward, backward, gradients of the weights
#
# where K is about the number of outputs C: the cost grows as C², and as C³ once the last layer's c² = C²
# leads.

# Passes of training that exact columns may take. Few networks are trained for more, and the curvature of a
# trained network is not worth more than the network. Some hundred outputs are within it.
LIMIT = 128
# Labels drawn for each example beyond it: with the forward pass they take about as long as 3 passes of
# training, and their error is that of one label for each of 8 times as many examples.
SAMPLES = 8


def exact_passes(layers: Sequence[Layer], columns: int) -> float:
    """The cost of exact columns in passes of training over the same data."""
    forward = moments = 0.0
    for layer in layers:
        if not layer.factored:
            forward += layer.size
            continue
        d, c = layer.widths
        d -= layer.biased
        forward += layer.form.positions * layer.groups * c * d
        moments += layer.form.positions * layer.groups * c * c
    if not forward:
        return 0.0
    return (forward + columns * (forward + moments)) / (3 * forward)


def by_cost(exact: Expectation, passes: float) -> tuple[Expectation, str]:
    """Exact columns, or samples where they would take too long."""
    if passes <= LIMIT:
        return exact, ""
    # labels drawn from the model give the Fisher matrix, which is Λ's own for canonical likelihoods alone
    labels = exact.likelihood.canonical or exact.matrix == "fisher"
    chosen = replace(exact, kind="mc" if labels else "random-projection", samples=SAMPLES)
    return chosen, f"exact columns would take as long as {passes:,.0f} passes of training, more than {LIMIT}"
