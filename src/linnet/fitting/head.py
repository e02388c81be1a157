"""A new last layer for a new task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.arguments import check_ridge
from linnet.fitting.last_layer import (
    RECORD,
    Appended,
    ending_linear,
    features,
    last_linear,
    named_linear,
    replace_module,
    zero_layer,
)
from linnet.linalg.random import Seed, make_generator
from linnet.linear.dual import Spectrum, ridge_grid_of
from linnet.linear.targets import ALPHA, Targets, check_names, make_targets
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, integer, number
from linnet.tangent.batch import Inputs, on_device, split
from linnet.tangent.data import Data
from linnet.tangent.functional import Functional, OutputAdapter, check_output, copied, tensors_by_name
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import require_module
from linnet.tree import hash_tensors, tensors_in

# -- folds -----------------------------------------------------------------------------------------
# Heads of a cross-fitted network: one for each fold of the examples, fitted without it.


@dataclass(frozen=True, eq=False)
class Folds:
    """K heads, the head fitted on everything, and the fold of every example."""

    layer: str  # name of the head
    whole: tuple[Tensor, Tensor]  # weight (C, D) and bias (C,) fitted on all examples
    heads: tuple[tuple[Tensor, Tensor], ...]  # the same without each fold
    members: Mapping[str, int]  # fold of an example, by its fingerprint

    @property
    def count(self) -> int:
        """K."""
        return len(self.heads)

    def fits(self, function: Functional) -> bool:
        """Whether a network still has the head that was fitted on everything."""
        tensors = tensors_by_name(function.model)
        found = [tensors.get(f"{self.layer}.{name}") for name in ("weight", "bias")]
        return all(
            a is not None and a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
            for a, b in zip(found, self.whole, strict=True)
        )

    def without(self, function: Functional, fold: int) -> Functional:
        """The network with the head that has not seen a fold."""
        named = zip(("weight", "bias"), self.heads[fold], strict=True)
        mine = tensors_by_name(function.model)
        values = {}
        for name, value in named:
            for key in (f"{self.layer}.{name}", f"{self.layer}.{name}_origin"):  # origin: of a centered head
                if key in mine:
                    values[key] = value.to(mine[key])
        return function.moved(values)

    def of(self, examples: Sequence[str]) -> Tensor:
        """The fold of each example; those that no head has seen are dealt out in turn, (N,)."""
        unseen: dict[str, int] = {}
        found = []
        for example in examples:
            if example not in self.members:
                unseen.setdefault(example, len(unseen) % self.count)
            found.append(self.members.get(example, unseen.get(example, 0)))
        return torch.tensor(found, dtype=torch.long)


def deal(examples: Sequence[str], y: Tensor, count: Any, generator: torch.Generator | None = None) -> Tensor:
    """Deal examples to folds at random, each class evenly; equal examples go to one fold, (N,)."""
    # y (N,)
    distinct = list(dict.fromkeys(examples))
    integer("cross_fit", count, 2, len(distinct), "pass at most one fold for each different example")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    first = {example: place for place, example in reversed(list(enumerate(examples)))}
    labels = torch.zeros(len(y), dtype=torch.long) if y.is_floating_point() else y.long().flatten().cpu()
    fold: dict[str, int] = {}
    for label in labels.unique().tolist():
        members = [example for example in distinct if int(labels[first[example]]) == label]
        for place in torch.randperm(len(members), generator=generator).tolist():
            fold[members[place]] = len(fold) % count
    return torch.tensor([fold[example] for example in examples], dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A linear probe for a head: the ridge regression of the targets on the features.

    Args:
        ridge: A number, ``"loo"``, ``"gcv"`` or ``"evidence"``.
        scale: α of one-hot targets.
        cross_fit: Number of folds K. The head is the same, but the network remembers K more, each fitted
            without one fold: a later fit then leaves out whole procedures (head, linearization and fit)
            instead of the last step alone, and its leave-one-out is honest. 0 for none.

    Raises:
        InputError: If a value does not work.

    Example:
        >>> Probe(cross_fit=5).ridge
        'loo'
    """

    ridge: str | float = "loo"
    scale: float = ALPHA
    cross_fit: int = 0

    def __post_init__(self) -> None:
        check_ridge(self.ridge)
        number("scale", self.scale, above=0, remedy="leave scale= out for α = 15")
        integer("cross_fit", self.cross_fit, 0, remedy="pass cross_fit=5, or 0 for none")


@in_exact_mode
def with_head(
    model: nn.Module,
    classes: int,
    init: str | Probe = "probe",
    data: Any = None,
    *,
    seed: Seed = None,
    head: str | None = None,
    output: OutputAdapter = None,
) -> nn.Module:
    """A copy of the network with a new last linear layer.

    With ``init="probe"`` the new layer is the ridge regression of the targets on the features
    (the *linear probe*), so the linearization starts from there. A zero layer would hide every
    lower layer: the gradient of f in them passes through the head.

    Args:
        model: The network, which ends in a linear layer, or returns features (N, D) where ``data`` is given.
            It is not touched.
        classes: Number of outputs of the new layer, at least 1.
        init: ``"probe"``, ``"random"`` or ``"zero"``; or a :class:`Probe` with a ridge, a scale or folds of
            its own.
        data: The new task, needed for ``"probe"``: an (x, y) pair, a Dataset, a DataLoader or batches.
        seed: Source of randomness for ``"random"``, where it is torch's global stream if left out, and
            for the folds, which are dealt from seed 0 if left out. Nothing else here draws random numbers.
        head: Name of the layer to replace, or a regular expression that matches its whole name alone; by
            default the last linear layer. A probe checks that the outputs are those of this layer, as they
            come or at the one position of a sequence that the network takes.

        output: How to turn what the network returns into a tensor, as for ``linnet.adapt``; what is made
            returns that tensor.

    Returns:
        The copy. A probe remembers which labels it was fitted on, so that a later fit on the same
        data can say that its leave-one-out is optimistic.

    Raises:
        InputError: If an argument has a value that is not listed.
        ModelError: If the network does not end in a linear layer.

    Source:
        Achille et al., CVPR 2021, section 4; linear probes: Alain and Bengio, 2016; leaving out the
        whole procedure: Stone 1974, Hastie, Tibshirani and Friedman 2009, section 7.10.2.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))
        >>> x, y = torch.randn(12, 3), torch.arange(12) % 2
        >>> with_head(net, classes=2, data=(x, y))(x).shape
        torch.Size([12, 2])
    """
    _check(model, classes, init, data)
    probe = init if isinstance(init, Probe) else Probe()
    kind = "probe" if isinstance(init, Probe) else init
    seed = make_generator(seed)
    given = None if data is None else Data.of(data, model, keep=False, text=True)
    check_names(() if given is None else given.classes, classes)
    check_output(output)
    clone = copied(model)
    if head is not None:
        setattr(clone, RECORD, {"layer": named_linear(clone, head)})
        clone = clone if output is None else Appended(clone, None, output)
    elif given is not None:
        clone = ending_linear(clone, given.x, output)
    elif output is not None:
        clone = Appended(clone, None, output)
    name, old = last_linear(clone)
    reference = next(old.parameters())
    _require_room(old, classes, kind, data)
    new = zero_layer(nn.Linear, old.in_features, classes, like=reference)
    record: dict[str, Any] = {"init": kind, "layer": name, "examples": frozenset()}
    with torch.no_grad():
        if kind == "random":
            bound = old.in_features**-0.5  # the uniform distribution of nn.Linear
            for p in (new.weight, new.bias):
                p.copy_((torch.rand(p.shape, generator=seed, dtype=torch.float64) * 2 - 1) * bound)
        elif kind == "probe" and given is not None:
            x, y = given.pair
            phi, examples = features(clone, x), example_hashes(x, y)
            weight, bias = linear_probe(phi, make_targets(y, classes, probe.scale), probe.ridge)
            new.weight.copy_(weight)
            new.bias.copy_(bias)
            record["examples"] = frozenset(examples)
            if probe.cross_fit:
                fold = deal(examples, y, probe.cross_fit, seed)
                heads = _fold_heads(phi, (y, fold.to(y.device)), classes, probe.scale, probe.ridge)
                members = dict(zip(examples, fold.tolist(), strict=True))
                record["folds"] = Folds(name, (new.weight.clone(), new.bias.clone()), heads, members)
    replace_module(clone, name, new)
    setattr(clone, RECORD, record)
    return clone


def _require_room(old: nn.Linear, classes: int, init: str, data: Any) -> None:
    """Raise if the new layer, or the targets of a probe, would not fit."""
    weight = classes * (old.in_features + 1)
    pair = init == "probe" and isinstance(data, list | tuple) and len(data) == 2
    examples = len(data[1]) if pair and isinstance(data[1], Tensor) and data[1].ndim else 0
    items = (
        ("weight and bias", weight * next(old.parameters()).dtype.itemsize),
        ("as drawn or fitted, in float64", 0 if init == "zero" else 8 * weight),
        ("targets, one column per class", 8 * examples * classes),
    )
    plan = Plan(f"a head of {classes} classes", parse_bytes(None, next(old.parameters()).device), items)
    require(plan, ["pass fewer classes=", "free memory"])


def _fold_heads(
    phi: Tensor, labeled: tuple[Tensor, Tensor], classes: int, scale: float, ridge: str | float
) -> tuple[tuple[Tensor, Tensor], ...]:
    """A probe without each fold, its ridge chosen without the fold too."""
    y, fold = labeled
    found = []
    for k in range(int(fold.max()) + 1):
        rest = fold != k
        targets = make_targets(y[rest], classes, scale, varied=False)
        found.append(linear_probe(phi[rest], targets, ridge))
    return tuple(found)


def example_hashes(x: Inputs, y: Tensor) -> list[str]:
    """A fingerprint of every labeled example, whatever integer type or shape its label comes in."""
    x, y = on_device(x, torch.device("cpu")), y.cpu()  # in one copy, not one per example
    one = y[:1].numel() == 1 and not y.is_floating_point()
    labels = y.long().flatten() if one else y.reshape(len(y), -1)
    return [hash_tensors([*tensors_in(part), labels[i]]) for i, part in enumerate(split(x, 1))]


def _check(model: nn.Module, classes: int, init: Any, data: Any) -> None:
    """Raise on arguments that cannot work."""
    require_module(model)
    integer("classes", classes, remedy="pass the number of classes of the new task")
    if not isinstance(init, Probe):
        choice("init", init, ("probe", "random", "zero"), 'leave init= out for "probe"')
    if (isinstance(init, Probe) or init == "probe") and data is None:
        raise InputError(
            'init="probe" without data',
            expected="data=(x, y) of the new task",
            remedy='pass data=, or init="random"',
        )


def linear_probe(phi: Tensor, targets: Targets, ridge: str | float = "loo") -> tuple[Tensor, Tensor]:
    """Ridge regression of the targets on features, intercept not penalized, (C, D)."""
    # phi (N, D)
    check_ridge(ridge)
    f, t = phi.double(), targets.values.double().to(phi.device)
    center, mean = f.mean(0), t.mean(0)
    f, t = f - center, t - mean
    equations = _Equations(f, t)
    rho = float(ridge) if not isinstance(ridge, str) else _probe_ridge(equations, ridge)
    weight = equations.weight(rho)
    return weight.to(phi.dtype), (mean - weight @ center).to(phi.dtype)


class _Equations:
    """(ΦΦᵀ + ρI) β = T at every ρ, from the eigenvalues of ΦΦᵀ or of ΦᵀΦ, whichever is the smaller matrix."""

    # f (N, D), t (N, C)

    def __init__(self, f: Tensor, t: Tensor) -> None:
        self.f, self.t, self.tall = f, t, len(f) > f.shape[1]
        matrix, right = (f.T @ f, f.T @ t) if self.tall else (f @ f.T, t)
        spectrum = Spectrum(matrix, right[:, :1])  # the ridge is chosen for all outputs together
        self.values, self.vectors = spectrum.values, spectrum.vectors
        self.rotated = self.vectors.T @ right
        self.rows = f @ self.vectors if self.tall else self.vectors
        self.grid = ridge_grid_of(float(self.values.sum()) / len(f) or 1.0, spectrum.rounding, f.device)

    def solved(self, rho: float | Tensor) -> tuple[Tensor, Tensor]:
        """β, (N, C), and the diagonal of M = (ΦΦᵀ + ρI)⁻¹, (N,)."""
        weights = 1 / (self.values + rho)
        product, diagonal = self.rows @ (weights[:, None] * self.rotated), self.rows.square() @ weights
        return ((self.t - product) / rho, (1 - diagonal) / rho) if self.tall else (product, diagonal)

    def logdet(self, rho: float | Tensor) -> float:
        """Log det(ΦΦᵀ + ρI)."""
        rest = len(self.t) - len(self.values)
        return float((self.values + rho).log().sum()) + rest * math.log(rho)

    def weight(self, rho: float) -> Tensor:
        """W = TᵀMΦ, (C, D)."""
        turned = self.vectors @ (self.rotated / (self.values + rho)[:, None])
        return turned.T if self.tall else turned.T @ self.f


def _probe_ridge(equations: _Equations, criterion: str) -> float:
    """The ridge that a criterion prefers, over all outputs."""
    t, grid = equations.t, equations.grid
    n, scores = len(t), []
    for rho in grid:
        residual, diagonal = equations.solved(rho)
        # the intercept takes one more degree of freedom: 1/(nρ) of the diagonal of M
        diagonal = (diagonal - 1 / (n * rho)).clamp_min(1e-12 * float(diagonal.mean()))
        if criterion == "loo":
            scores.append(float(((residual / diagonal[:, None]) ** 2).sum()))
        elif criterion == "gcv":
            scores.append(float((residual**2).sum()) / float(diagonal.sum()) ** 2)
        else:  # evidence of what is left of the targets when their mean is taken out: n − 1 of n directions
            m = t.numel() - t.shape[1]
            quadratic = float((t * residual).sum())
            logdet = equations.logdet(rho) - math.log(rho)
            scores.append(m * math.log(max(quadratic / m, 1e-300)) + t.shape[1] * logdet)
    return float(grid[min(range(len(scores)), key=scores.__getitem__)])
