"""The features of a network, of its last layer and earlier ones, and the tangent kernel of its lower layers.

With φ(x) the D inputs of the last linear layer, ψ(x) those of earlier layers (``stages.py``) and r_h random
heads, h = 1 .. H,

    K_head(x, x') = φ̃(x)ᵀ φ̃(x')                         φ̃: features less their mean over the training samples
    K_early(x, x') = κ(ψ(x)ᵀ ψ(x'))                      κ: the kernel of random ReLU features
    K_body(x, x') = 1/H Σ_h ⟨∂ r_hᵀφ(x), ∂ r_hᵀφ(x')⟩    derivatives in all weights below the head

For r_h ~ N(0, I/D) the expectation of K_body is 1/D Σ_d ⟨∂φ_d(x), ∂φ_d(x')⟩, the tangent kernel of the
features. It is the same for every class: the kernel of C outputs is K ⊗ I, N × N instead of N·C × N·C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.errors import ModelError
from linnet.fitting.last_layer import BELOW, RECORD, features, last_linear, replace_module, zero_layer
from linnet.linalg.operator import ParameterSpace
from linnet.linear.features import (
    Angles,
    Constant,
    Examples,
    Explicit,
    Features,
    Heads,
    WeightedSum,
    Weights,
    angular_kernel,
)
from linnet.linear.kernel_system import KernelSystem
from linnet.linear.normal_system import NormalSystem
from linnet.linear.problem import Problem
from linnet.linear.targets import Targets
from linnet.nested.landmarks import Landmarks
from linnet.nested.search import Kernels, Mixture, Shares
from linnet.nested.stages import Beside, Staged, earlier_layers
from linnet.tangent.batch import Inputs, batch_size, split
from linnet.tangent.functional import IDLE, Functional, copied
from linnet.tangent.parts import in_parts
from linnet.tangent.selection import Selector, owner, selected


def with_random_heads(model: nn.Module, heads: int, seed: int) -> nn.Module:
    """A copy of a network whose last linear layer is H random heads, without a bias."""
    clone = copied(model)
    name, old = last_linear(clone)
    new = zero_layer(nn.Linear, old.in_features, heads, like=next(old.parameters()), bias=False)
    draws = torch.randn(new.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        new.weight.copy_(draws * old.in_features**-0.5)
    replace_module(clone, name, new)
    for module in clone.modules():  # the head that was there is gone, and what it was fitted on
        if known := getattr(module, RECORD, None):
            kept = {key: value for key, value in known.items() if key in ("layer", "metric", "sketch")}
            setattr(module, RECORD, kept)
    return clone


class RandomHeads:
    """A network with random heads for its last layer: its features, and the kernel of the layers below."""

    def __init__(
        self,
        model: nn.Module,
        heads: int,
        seed: int,
        names: Selector,
        *,
        before: RandomHeads | None = None,
        stages: tuple[str, ...] | None = None,
    ) -> None:
        name, old = last_linear(model)
        probe = [f"{name}.weight"]  # what a file names where nothing below varies; a norm may hold its place
        chosen = {} if names == probe else selected(model, names)
        body = {key: mask for key, mask in chosen.items() if owner(key) != name}
        self.heads, self.seed, self.width = heads, seed, old.in_features
        self.layer, self.bodiless = name, not body
        self.before = before  # what it was before it was trained on the same samples
        clone = with_random_heads(model, heads, seed)
        setattr(clone, IDLE, getattr(model, "idle", None))
        self.below = getattr(model, BELOW, "lower layers")
        function = Functional(clone, body or probe)
        self.function = function.under(function.precision.exact(function.dtype))
        self.model = self.function.model
        self.stages = stages  # the layers that are read, once they are known

    def require_body(self) -> None:
        """Raise if there is nothing but the linear probe."""
        if self.bodiless:
            every = [name for name, _ in self.model.named_parameters() if owner(name) != self.layer]
            others = f', or params="all" for {len(every)} that require no gradient or were not chosen'
            raise ModelError(
                f"all chosen parameters are in the last layer ({self.layer})",
                expected="a network with weights below its head",
                remedy="pass weight=0 for the linear probe alone" + (others if every else ""),
            )

    @property
    def space(self) -> ParameterSpace:
        """The weights below the head."""
        return self.function.space

    def moved(self, model: nn.Module) -> RandomHeads:
        """The same features at trained weights."""
        return RandomHeads(model, self.heads, self.seed, self.function.names, before=self, stages=self.stages)

    def phi(self, x: Inputs) -> Tensor:
        """φ(x), (N, D), in float64."""
        return features(self.function.model, x).double()

    def earlier(self, x: Inputs) -> tuple[str, ...]:
        """The layers that are read, found once."""
        if self.stages is None:
            self.stages = earlier_layers(self.function, x)
        return self.stages

    def staged(self, x: Inputs) -> Tensor:
        """φ(x) and ψ(x) side by side, (N, D + E), in float64."""
        self.earlier(x)
        reader = self.reader
        return in_parts(reader.model, partial(reader.flat, reader.theta), x, BATCH).double()

    @property
    def reading(self) -> Staged:
        """The network that returns φ and ψ, its own alone."""
        return Staged(self.function.model, self.stages or ())

    @cached_property
    def reader(self) -> Functional:
        """The network that returns φ and ψ; where it was trained, with the ψ that it had before."""
        # The contrast of few samples forgets what sets other samples apart (docs/results/adapt.md).
        return Functional(self.reading if self.before is None else Beside(self.reading, self.before.reading))

    @property
    def read_names(self) -> list[str]:
        """The names that the weights below the head have in ``reader``."""
        start = "body." if self.before is None else "own.body."
        return [f"{start}{name}" for name in self.function.names]

    @property
    def body(self) -> Heads:
        """The features of the layers below the head."""
        return Heads(self.function, self.heads)

    def kernel(self, x: Inputs, memory: str | int | None = None, file: Path | None = None) -> Tensor:
        """K_body(x, x), (N, N), float64; from a file, and into it, where there is one."""
        return self.body.kernel(Examples(x), memory, file)


def kernels_of(found: Tensor, width: int) -> Kernels:
    """The kernels of features of samples, φ less its mean and ψ."""
    # found (N, D) or (N, D + E)
    head, early = found.tensor_split([width], 1)
    head = head - head.mean(0)
    return Kernels(head @ head.T, angular_kernel(early, early) if early.shape[1] else None)


def read(features: RandomHeads, x: Inputs, earlier: bool) -> Tensor:
    """φ(x), and ψ(x) beside it where earlier layers may take part and are there, (N, D) or (N, D + E)."""
    found = features.staged(x) if earlier else features.phi(x)
    # the features of the last layer, divided by their lengths, are no other layer's
    return found if features.stages else found[:, : features.width]


def reads_earlier(given: Shares) -> bool:
    """Whether features of earlier layers may take part: one share that is given makes the other zero."""
    return bool(given.earlier) or (given.earlier is None and given.weight is None)


def read_given(features: RandomHeads, x: Inputs, given: Shares) -> Tensor:
    """φ(x), and ψ(x) beside it where it may take part, (N, D) or (N, D + E)."""
    found = read(features, x, reads_earlier(given))
    if given.earlier and not features.stages:
        raise ModelError(
            f"earlier={given.earlier!r} for a network without a layer before the last that can be read",
            expected="layers that take the examples on the first axis",
            remedy="leave earlier= out",
        )
    return found


# -- prior -----------------------------------------------------------------------------------------
# What an adapted network is linear in: an intercept, the features of its last layer, the layers below.


BATCH = 64  # samples at a time, whose maps at several layers are held
TOGETHER = 2048  # samples at a time, whose ψ are held where only their kernel with landmarks is kept
HEAD = 1  # the place of the computed features among the terms


@dataclass(frozen=True, eq=False)
class Prior:
    """Network and mixture of a kernel, fixed once the fit is made."""

    network: RandomHeads
    center: Tensor  # mean of φ over the samples that the fit was made on, (D,)
    mixture: Mixture  # how the kernels are added
    landmarks: Landmarks | None = None  # samples along which earlier layers take part, where samples are many

    @property
    def scale(self) -> float:
        """By what φ is multiplied."""
        return float(((1 - self.mixture.earlier) / self.mixture.head) ** 0.5)

    @property
    def share(self) -> float:
        """By what the kernel of earlier layers is multiplied."""
        return self.mixture.earlier / self.mixture.early

    def rows(self, x: Inputs) -> Tensor:
        """φ, scaled and less its mean, and behind it ψ where it takes part, (N, D) or (N, D + E)."""
        if self.landmarks is not None:
            return self.in_blocks(x)
        return self.scaled(self.network.staged(x) if self.mixture.earlier else self.network.phi(x))

    def in_blocks(self, x: Inputs) -> Tensor:
        """The same, so many samples at a time."""
        start, made = 0, self.center.new_empty(0)
        for part in split(x, TOGETHER):
            network = self.network
            block = self.scaled(network.staged(part) if self.mixture.earlier else network.phi(part))
            made = made if start else block.new_empty(batch_size(x), block.shape[1])
            made[start : start + len(block)] = block
            start += len(block)
        return made

    @property
    def width(self) -> int:
        """How many of the rows' columns are φ: none of many samples where earlier layers alone take part."""
        return 0 if self.landmarks is not None and not self.scale else self.network.width

    def scaled(self, found: Tensor) -> Tensor:
        """The same of features as the network gives them."""
        # found (N, D) or (N, D + E)
        phi, psi = found.tensor_split([self.network.width], 1)
        phi = (phi - self.center) * self.scale
        if self.landmarks is None:
            return torch.cat([phi, psi], 1) if self.mixture.earlier else phi
        alike = self.landmarks(psi).mul_(self.share**0.5)
        return torch.cat([phi, alike], 1) if self.width else alike

    @property
    def features(self) -> WeightedSum:
        """κ + (1 − w) ((1 − e)/m_head K_head + e/m_early K_early) + w/m_body K_body."""
        mixed = self.mixture
        head: Features = Explicit(self.rows)
        if mixed.earlier and self.landmarks is None:
            head = Angles(self.rows, self.network.width, self.share)
        terms = [(mixed.bias, Constant(self.center.device)), (1 - mixed.weight, head)]
        if mixed.weight:
            terms.append((mixed.weight / mixed.body, self.network.body))
        return WeightedSum(tuple(terms))

    def weights(self, system: KernelSystem | NormalSystem) -> Weights:
        """A solution as a model in weights of the rows and of the layers below."""
        if isinstance(system, NormalSystem):
            first, rest = system.solution.double().tensor_split([1])
            return Weights(self.mixture.bias**0.5 * first[0], [(self.rows, rest.T)])
        problem = system.problem
        return problem.basis.weights(problem.examples, system.coefficients.double(), system.memory)


def problem_of(prior: Prior, data: tuple[Inputs, Tensor], targets: Targets) -> Problem:
    """The problem of examples, their features and targets, with the network that made them."""
    x, found = data
    features = prior.features
    rows = tuple(found if place == HEAD else None for place in range(len(features.terms)))
    function, values = prior.network.function, targets.values.double()
    problem = Problem(function, x, values, features=features, formed=Examples(x, rows))
    return problem.weighing(targets.weights)
