"""Elastic weight consolidation, diagonal as published or with any other curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from linnet.continual.curvature import make_recipe
from linnet.continual.method import ContinualMethod, Prepare, check_network
from linnet.continual.quadratic import (
    Live,
    PenaltyPrecision,
    Quadratic,
    check_merge,
    moved_anchor,
    moved_term,
)
from linnet.curvatures.settings import CurvatureOptions, Structure
from linnet.errors import InputError
from linnet.likelihoods.likelihood import Likelihood
from linnet.params import number
from linnet.tangent.functional import OutputAdapter

VARIANTS = ("offline", "online")


class EWC(ContinualMethod):
    """One quadratic penalty around the end of every task, weighted by that task's Fisher matrix.

        λ/2 Σ_i (θ − μ_i)ᵀ F_i(μ_i) (θ − μ_i)                 (offline; Botev 2020, eq. 5.26)
        λ/2 (θ − μ_t)ᵀ F̃_t (θ − μ_t),  F̃_t = γ F̃_{t-1} + F_t     (online; Schwarz et al. 2018)

    F is summed over the examples of its task, so that λ = 1 is the natural value on a summed loss, and
    ``penalty(examples=N)`` goes with a mean. :func:`convert_strength` gives λ in other libraries' scales.
    Which Fisher matrix is a visible choice: expectation "exact" (over all labels), "mc" (labels drawn from
    the network) or "empirical" (the observed labels; gradients of single examples, never of batches).

    Args:
        model: The network.
        likelihood: What the outputs mean.
        structure: "diagonal" as published, or any structure of :func:`linnet.curvature`, such as "kfac".
        strength: λ ≥ 0; 0 switches the method off.
        variant: "offline" (a term a task) or "online" (one term at constant memory).
        decay: γ of the online variant, between 0 and 1.
        merge: How the online variant keeps sums of Kronecker products; as in :class:`OnlineLaplace`.
        **options: Keywords of :func:`linnet.curvature`.

    Attributes:
        model: The network.
        tasks: Tasks consolidated so far.
        strength: λ.

    Raises:
        InputError: If an argument has a value that cannot be used.

    Source:
        Kirkpatrick et al., PNAS 2017; Huszár, PNAS 2018; Schwarz et al., ICML 2018.

    Example:
        >>> import linnet
        >>> method = EWC(nn.Linear(3, 2), linnet.likelihoods.Categorical(), strength=10.0)
        >>> method.consolidate((torch.randn(9, 3), torch.randint(2, (9,))))
        >>> method.penalty().item(), method
        (0.0, EWC(diagonal, strength=10, offline, 1 tasks))
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure = "diagonal",
        strength: float = 1.0,
        variant: str = "offline",
        decay: float = 1.0,
        merge: str = "svd",
        **options: Unpack[CurvatureOptions],
    ) -> None:
        check_merge(merge)
        if variant not in VARIANTS:
            raise InputError(
                f"variant={variant!r}", expected='"offline" or "online"', remedy="leave variant= out"
            )
        self.model, self.tasks = check_network(model), 0
        self._recipe = make_recipe(type(self), likelihood, structure, options)
        self.strength, self.variant, self.merge = number("strength", strength, least=0), variant, merge
        self.decay = number("decay", decay, least=0)
        if self.decay > 1 or (variant == "offline" and self.decay != 1):
            raise InputError(
                f"decay={decay!r} with variant={variant!r}",
                expected="a number between 0 and 1 for the online variant",
                remedy='leave decay= out, or pass variant="online"',
            )
        self._terms: list[Quadratic] = []

    def after_step(self) -> None:
        """Nothing: the curvature of a task is measured when it has been learned."""

    def consolidate(
        self, data: Any = None, *, output: OutputAdapter = None, prepare: Prepare | None = None
    ) -> None:
        """Remember a task that has been learned.

        Args:
            data: The task's training data: an (x, y) pair, a ``Dataset``, a ``DataLoader`` or batches.
            output: This task's output adapter.
            prepare: Called with a copy of the network to make it serve this task.
        """
        if self.strength > 0:
            live = Live.of(self.model)
            online = self.variant == "online" and bool(self._terms)
            before = self._terms[0] if online else Quadratic({}, PenaltyPrecision())
            for known in self._terms:
                live.difference(known.anchor)  # refuses parameters of another shape
            task = self._recipe.task(self.model, data, output, prepare)
            before = before.to(task.device, task.dtype)
            precision = before.precision.plus(task.blocks, self.merge, self.decay if online else 1.0)
            term = Quadratic(moved_anchor(before.anchor, live, precision), precision, self.strength)
            self._terms = [term] if self.variant == "online" else [*self._terms, term]
        self.tasks += 1

    def nbytes(self) -> int:
        """Memory of what is remembered, in bytes.

        Returns:
            Bytes of all Fisher matrices and anchors.
        """
        anchors = sum(mu.nbytes for term in self._terms for mu in term.anchor.values())
        return anchors + sum(term.precision.nbytes() for term in self._terms)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> EWC:
        """Move what is remembered to another device or type."""
        self._terms = [moved_term(term, device, dtype) for term in self._terms]
        return self

    def __repr__(self) -> str:
        return f"EWC({self._recipe.word}, strength={self.strength:g}, {self.variant}, {self.tasks} tasks)"

    def _quadratics(self) -> Sequence[Quadratic]:
        return self._terms

    def _settings(self) -> dict[str, Any]:
        words = {"strength": self.strength, "variant": self.variant, "decay": self.decay, "merge": self.merge}
        return {**self._recipe.settings(), **words}

    def _state(self) -> dict[str, Any]:
        return {"terms": self._terms}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._terms = list(state["terms"])
