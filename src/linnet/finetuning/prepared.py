"""Prepares a network for a recipe: surgery, a new head, linearization, curvature."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from linnet.curvatures import MonteCarlo, Passes
from linnet.curvatures.build import curvature
from linnet.curvatures.curvature import Curvature
from linnet.errors import ModelError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.bilinear import with_bilinear_head
from linnet.finetuning.examples import Examples
from linnet.finetuning.recipes import Recipe
from linnet.fitting.head import Probe, with_head
from linnet.fitting.last_layer import RECORD, features, last_linear
from linnet.likelihoods import Categorical, Gaussian
from linnet.linear.targets import check_arrangement
from linnet.optim.preconditioner import KroneckerPreconditioner
from linnet.tangent.batch import Inputs, concatenate, map_tensors
from linnet.tangent.functional import Functional, OutputAdapter
from linnet.tangent.linearized import Linearized, linearize
from linnet.tangent.selection import Selector, select_parameters
from linnet.tangent.surgery import leaky_relu, report

LOGITS = 5.0  # α of the probe that cross-entropy starts from: 15 would saturate the softmax
UNHELD = 3  # activations in a row whose change no normalization has to hold
NORMALIZATIONS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.instancenorm._InstanceNorm,
)
EXACT_COLUMNS = 32  # outputs up to which a curvature takes all columns


@dataclass(frozen=True)
class Shaping:
    """Settings of surgery, head and preconditioner."""

    params: Selector  # which parameters vary
    output: OutputAdapter  # how to turn the network's result into a tensor
    seed: int  # seed of a random head and of sampled curvature


@dataclass(eq=False)
class Prepared:
    """A network ready to be trained."""

    module: nn.Module  # A ``Linearized``, or the network itself
    outputs: int  # C
    last: str | None  # name of the last linear layer, if the last layer alone is trained
    notes: list[str]  # what was done, one sentence each
    new_head: bool  # whether the head was replaced

    @property
    def network(self) -> nn.Module:
        """The network itself, at θ₀ if it is linearized."""
        return self.module._function.model if isinstance(self.module, Linearized) else self.module

    def fresh(self) -> nn.Module:
        """The module as before any training."""
        if isinstance(self.module, Linearized):
            return Linearized(self.module.function)
        return copy.deepcopy(self.module)


def prepare(
    model: nn.Module, recipe: Recipe, shaping: Shaping, examples: Examples, view: Augmentation, outputs: int
) -> Prepared:
    """Make a network ready."""
    notes: list[str] = []
    network: nn.Module = getattr(model, "_orig_mod", model)
    if recipe.leaky:
        network = leaky_relu(network, recipe.slope)
        notes += _surgery_notes(network, len(report(network).replaced), recipe.slope)
    before, network = network, _with_head(network, recipe, shaping, examples, view, outputs, notes)
    new_head = network is not before
    last = last_linear(network)[0] if recipe.last_layer else None
    wanted = _selected(shaping.params, model)
    if not recipe.linear:
        plain = copy.deepcopy(network) if network is model else network
        chosen = set(select_parameters(plain, wanted))
        for name, p in plain.named_parameters():
            p.requires_grad_(name in chosen)
        return Prepared(plain, outputs, last, notes, new_head)
    params = (
        [f"{last}.{name}" for name, _ in network.get_submodule(last).named_parameters()] if last else None
    )
    lin = linearize(network, params or wanted, shaping.output)
    notes.append(f"linearized in {lin.space.dim} parameters of {len(lin.parameter_names)} tensors")
    return Prepared(lin, outputs, last, notes, new_head)


def _surgery_notes(network: nn.Module, found: int, slope: float) -> list[str]:
    """Remarks on replaced activations and the normalization behind them."""
    if not found:
        return ["the network has no ReLU to replace"]
    notes = [f"ReLU replaced by Leaky ReLU of slope {slope:g} in {found} place(s)"]
    if found > UNHELD and not any(isinstance(module, NORMALIZATIONS) for module in network.modules()):
        notes.append(
            "no normalization layers: Leaky ReLU changes such a network most; compare activation='relu', or "
            "train it first with linnet.surgery.recover"
        )
    return notes


def _selected(params: Selector, model: nn.Module) -> Selector:
    """All parameters unless told: a network may come frozen; where only a part of it is, that stays so."""
    if isinstance(params, nn.Module):
        return select_parameters(model, params)  # by name: what is trained is a copy
    free = {p.requires_grad for p in model.parameters()}
    return "all" if params is None and len(free) == 1 else params


def _with_head(
    network: nn.Module,
    recipe: Recipe,
    shaping: Shaping,
    examples: Examples,
    view: Augmentation,
    outputs: int,
    notes: list[str],
) -> nn.Module:
    """The network with a last layer for the task."""
    probe, y = examples.batch(torch.arange(min(2, examples.n)))
    own = Functional(network, "all", shaping.output).check_runs(view(probe)).shape[1:]
    current = own.numel()
    head = recipe.head
    if head == "auto":
        fitted = hasattr(network, RECORD) and current == outputs and recipe.pooling is None
        head = "keep" if fitted else "probe"
    if head == "keep" and current != outputs:
        raise ModelError(
            f'head="keep", but the network has {current} outputs',
            expected=f"{outputs} outputs, as the data have",
            remedy='leave head= out for a linear probe, or pass head="random"',
        )
    if head == "keep":
        check_arrangement(y, own)
        notes.append("the network's own head was kept")
        return network
    generator = torch.Generator().manual_seed(shaping.seed)
    scale = recipe.scale if recipe.loss == "squared" else LOGITS
    init: str | Probe = Probe(scale=scale) if head == "probe" else head
    data = gathered(examples, view) if head == "probe" or recipe.pooling else None
    if recipe.pooling is not None:
        made = with_bilinear_head(network, outputs, data, recipe.pooling, init=init, seed=generator)
        notes.append("global average pooling replaced by square-root bilinear pooling")
    else:
        made = with_head(network, outputs, init, data, seed=generator)
    words = {
        "probe": f"a linear probe of targets of scale {scale:g}, its ridge by leave-one-out",
        "random": "random",
        "zero": "zero",
    }
    notes.append(f"new head for {outputs} outputs: {words[head]}")
    return made


def gathered(examples: Examples, view: Augmentation) -> tuple[Inputs, Tensor]:
    """All examples in memory, as they are predicted, (x, y)."""
    parts = [(view(x), y) for x, y in examples.batches()]
    return concatenate([x for x, _ in parts]), torch.cat([y for _, y in parts])


class _Viewed(Dataset[Any]):
    """Inputs one at a time, as they are predicted, with a target that says nothing."""

    def __init__(self, examples: Examples, view: Augmentation, target: Tensor) -> None:
        self.examples, self.view, self.target = examples, view, target

    def __len__(self) -> int:
        return self.examples.n

    def __getitem__(self, index: int) -> Any:
        x = self.view(self.examples.batch(torch.tensor([index]))[0])
        return map_tensors(lambda t: t[0], x), self.target


def frozen_curvature(
    lin: Linearized,
    recipe: Recipe,
    examples: Examples,
    view: Augmentation,
    seed: int,
    memory: str | int | None,
) -> Curvature:
    """The Gauss-Newton matrix of the frozen problem, which stays as it is all through training."""
    own = lin.function.output_shape(view(examples.batch(torch.arange(1))[0]))
    expectation = "exact" if own.numel() <= EXACT_COLUMNS else MonteCarlo(seed=seed)
    likelihood = Gaussian() if recipe.loss == "squared" else Categorical()
    # neither curvature depends on the targets; with them, inputs in a tuple are not taken for (x, y)
    blank = torch.zeros(own) if recipe.loss == "squared" else torch.tensor(0)
    data: Any = _Viewed(examples, view, blank)
    if examples.in_memory:
        data = gathered(examples, view)[0], blank.expand(examples.n, *blank.shape).contiguous()
    passes = Passes(memory=memory, shard=None)
    made = curvature(lin, data, likelihood, recipe.preconditioner, expectation, passes=passes)
    assert isinstance(made, Curvature)
    return made


@torch.no_grad()
def largest_eigenvalue(
    lin: Linearized, x: Inputs, before: KroneckerPreconditioner | None = None, steps: int = 12
) -> float:
    """Of A JᵀJ/N, by power iteration; A is the preconditioner, if there is one."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(lin.base(x).shape, generator=generator, dtype=torch.float64).to(lin.function.dtype)
    u, value = u.to(lin.function.device), 0.0
    for _ in range(steps):
        v = lin.vjp(x, u / u.norm(), like="flat")
        assert isinstance(v, Tensor)
        u = lin.jvp(x, v if before is None else before.multiply(v))  # J A Jᵀ u
        value = float(u.norm())
        if value == 0:
            break
    return value / u.shape[0]


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """The last layer on features that are computed once: the same linear model at a fraction of the price."""

    lin: Linearized  # the linearized last layer alone
    layer: str  # its name in the network
    features: Callable[[Examples], Examples]  # of examples, with their targets

    def module(self) -> Linearized:
        """The model to train, at δ = 0."""
        return Linearized(self.lin.function)

    def held(self, source: Examples) -> Examples:
        """Held-out examples as features with their targets."""
        return self.features(source)

    @torch.no_grad()
    def carry(self, small: nn.Module, whole: Linearized) -> None:
        """Put the displacement of the layer alone into the network's."""
        assert isinstance(small, Linearized)
        for name, value in small.delta.items():
            whole.delta[f"{self.layer}.{name.removeprefix('0.')}"].copy_(value)


def head_problem(prepared: Prepared, examples: Examples, augmentation: Augmentation) -> HeadProblem | None:
    """The last layer's own problem, where features do not change from step to step."""
    if prepared.last is None or augmentation.is_random or not isinstance(prepared.module, Linearized):
        return None
    layer = prepared.network.get_submodule(prepared.last)
    view, network = augmentation.evaluation, prepared.network
    try:
        first = features(network, view(examples.batch(torch.arange(1))[0]))
    except ModelError:
        return None
    if not isinstance(layer, nn.Linear) or first.shape[1] != layer.in_features:
        return None

    known: dict[int, tuple[Examples, Examples]] = {}  # by identity; the examples are held, so that it lasts

    def compute(some: Examples) -> Examples:
        if id(some) in known:
            return known[id(some)][1]
        parts = [(features(network, view(x)), y) for x, y in some.batches()]
        pair = torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])
        known[id(some)] = some, Examples(pair, some.device)
        return known[id(some)][1]

    lin = linearize(nn.Sequential(copy.deepcopy(layer)), params="all")
    return HeadProblem(lin, prepared.last, compute)
