"""Kernel features of a captured batch: per-example gradients, or their factors.

For weight sharing over S positions the kernel of a layer between N and M examples costs

    (i)  with gradients formed      (N + M)·K·c·d·S + N·M·K²·c·d
    (ii) with positions contracted  N·M·S·(S·d + S·K·c + K²·c)

multiplications, and (i) holds (N + M)·K·c·d numbers where (ii) holds (N + M)·S·(d + K·c). The
cheaper is taken for each parameter by counting. Without sharing (S = 1) way (ii) is the product
(A₁A₂ᵀ + 1) ∘ (G₁G₂ᵀ) with the 1 for a bias; an embedding has A₁A₂ᵀ = [id₁ = id₂].

KernelFeatures that do not fit are captured again for every block that stays in memory. For each parameter
either its gradients or its factors are smaller; each change to the smaller form saves memory for some
more multiplications. The changes that save most for each of them come first, and as many are made as
minimize

    multiplications of the products + captured examples · multiplications of one capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linnet.number_types import wide_type
from linnet.tangent.rules import OUTER, Captured, Form, Use, UseFactors, factors

SMALL_PRODUCT_PENALTY = 3.0  # batched small products reach about a third of the rate of one large one


@dataclass(frozen=True)
class FactoredWeight:
    """The factors of one weight, and of a bias that shares its use."""

    factors: UseFactors  # a (N, R, S, d) and g (K, N, R, S, c)
    bias: bool  # whether a bias rides along: its gradient is the same with a = 1

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.factors.a.nbytes + self.factors.g.nbytes


@dataclass(frozen=True)
class KernelFeatures:
    """A captured batch, ready for kernels."""

    n: int  # number of examples
    k: int  # number of cotangents
    rows: Tensor  # gradients (N, K, Q) of all parameters that are formed, side by side
    layers: dict[str, FactoredWeight]  # factors of the others, by parameter name
    outputs: Tensor  # f₀(x), (N, C)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.nbytes + sum(layer.nbytes for layer in self.layers.values())

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        factors = [t for layer in self.layers.values() for t in (layer.factors.a, layer.factors.g)]
        return [self.rows, *factors, self.outputs]

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs a of one example, which all cotangents share."""
        return sum(layer.factors.a.nbytes for layer in self.layers.values()) // self.n

    def part(self, start: int, stop: int) -> KernelFeatures:
        """The features of some of the examples, without a copy."""
        layers = {
            name: FactoredWeight(
                UseFactors(old.factors.a[start:stop], old.factors.g[:, start:stop], old.factors.transposed),
                old.bias,
            )
            for name, old in self.layers.items()
        }
        stop = min(stop, self.n)
        return KernelFeatures(stop - start, self.k, self.rows[start:stop], layers, self.outputs[start:stop])

    def columns(self, start: int, stop: int) -> KernelFeatures:
        """The features for some of the cotangents, without a copy; inputs a are those of all."""
        layers = {
            name: replace(old, factors=replace(old.factors, g=old.factors.g[start:stop]))
            for name, old in self.layers.items()
        }
        return replace(self, k=stop - start, rows=self.rows[:, start:stop], layers=layers)

    def hollow(self) -> KernelFeatures:
        """The same shapes without the numbers."""
        layers = {
            name: FactoredWeight(
                UseFactors(old.factors.a.to("meta"), old.factors.g.to("meta"), old.factors.transposed),
                old.bias,
            )
            for name, old in self.layers.items()
        }
        return KernelFeatures(self.n, self.k, self.rows.to("meta"), layers, self.outputs.to("meta"))

    def room_for(self, n: int, device: torch.device) -> KernelFeatures:
        """Empty features of the same kind for n examples; what is of one example lies together."""

        def empty(t: Tensor) -> Tensor:
            return t.new_empty((n, *t.shape[1:]), device=device)

        layers = {
            name: FactoredWeight(
                UseFactors(
                    empty(old.factors.a),
                    empty(old.factors.g.transpose(0, 1)).transpose(0, 1),
                    old.factors.transposed,
                ),
                old.bias,
            )
            for name, old in self.layers.items()
        }
        return KernelFeatures(n, self.k, empty(self.rows), layers, empty(self.outputs))


@dataclass(frozen=True)
class Treatment:
    """Which parameters keep factors (the others are formed), and which biases ride along."""

    factored: dict[str, int]  # weights whose positions are contracted, with the number of their uses
    riding: dict[str, str]  # bias name to the weight whose use it shares


class TreatmentChanged(Exception):
    """A batch uses a factored parameter unlike the batch that the treatment was chosen on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Costs:
    """Multiplications that one parameter takes either way."""

    form: float  # to form the gradients of one example
    formed: float  # of all products with the gradients
    contracted: float  # of all products with the factors


@dataclass(frozen=True)
class Factorable:
    """A parameter whose factors could be kept."""

    layer: FactoredWeight  # its factors, no bias riding along
    uses: int  # how often it is used
    costs: Costs  # multiplications either way
    pays: bool  # whether the factors take fewer


@dataclass(frozen=True)
class Outline:
    """Shapes of all that could be kept of a batch: enough to weigh every treatment."""

    hollow: KernelFeatures  # features with no parameter in them
    widths: dict[str, int]  # numbers in each tracked parameter
    choices: dict[str, Factorable]  # the parameters that have factors
    rides: dict[str, tuple[str, ...]]  # by the name of a bias, the weights that it could ride along with
    pass_cost: float  # multiplications that differentiate one example, gradients of weights apart

    @property
    def cheapest(self) -> frozenset[str]:
        """The parameters whose factors take fewer multiplications than their gradients."""
        return frozenset(name for name, choice in self.choices.items() if choice.pays)

    def treatment(self, factored: Collection[str]) -> Treatment:
        """Factors for some parameters, gradients for the others; every bias rides that can."""
        riding = {}
        for bias, weights in self.rides.items():
            weight = next((weight for weight in weights if weight in factored), None)
            if weight is not None:
                riding[bias] = weight
        counts = {name: self.choices[name].uses for name in self.widths if name in factored}
        return Treatment(counts, riding)

    def features(self, treatment: Treatment) -> KernelFeatures:
        """The features under a treatment, without numbers."""
        away = {*treatment.factored, *treatment.riding}
        biased = set(treatment.riding.values())
        layers = {name: replace(self.choices[name].layer, bias=name in biased) for name in treatment.factored}
        width = sum(width for name, width in self.widths.items() if name not in away)
        old = self.hollow
        return replace(old, rows=old.rows.new_empty(old.n, old.k, width), layers=layers)


def outline(
    captured: Captured,
    names: Sequence[str],
    pairs: tuple[int, int],
    form: Form,
    formed: Collection[str] = (),
    kept: torch.dtype | None = None,
) -> Outline:
    """Outline of what a kernel could keep of its examples, and the cost."""
    uses = captured.by_parameter()
    able = [name for name in names if name not in formed and _can_factor(uses.get(name, []))]
    rides = {
        name: tuple(weight for weight in sorted(able) if _weight_of_bias(name, uses, [weight]))
        for name in names
        if uses.get(name) and uses[name][0].kind == "shift"
    }
    kept = kept or wide_type(captured.outputs.dtype)
    hollow = KernelFeatures(
        captured.n,
        captured.k,
        torch.empty(captured.n, captured.k, 0, dtype=kept, device="meta"),
        {},
        captured.outputs.to("meta"),
    )
    choices = {}
    for name in able:
        own, joined = uses[name], [_hollow_use(use) for use in uses[name]]
        layer = FactoredWeight(_joined(joined, captured.n, kept), bias=False)
        case = own, captured.n, pairs, form
        choices[name] = Factorable(layer, len(own), _costs(*case), _pays(*case))
    return Outline(
        hollow,
        {name: captured.leaves[name].numel() for name in names},
        choices,
        {name: weights for name, weights in rides.items() if weights},
        (1 + captured.k) * _multiplications(captured),
    )


def _hollow_use(use: Use) -> Use:
    """The same use without numbers."""
    assert use.a is not None
    assert use.g is not None
    return replace(use, a=torch.empty_like(use.a, device="meta"), g=use.g.to("meta"))


def _multiplications(captured: Captured) -> float:
    """Multiplications of all weights with the activations of one example."""
    total = 0.0
    for use in {use.place: use for use in captured.uses if use.kind in OUTER}.values():
        if use.kind != "embedding":
            s, d, c, r = sizes(use, captured.n)
            total += s * d * c * r
    return total


def _can_factor(uses: list[Use]) -> bool:
    """Whether all uses have the outer-product form in one orientation, with the same groups."""
    if not uses or not all(use.kind in OUTER and use.direct for use in uses):
        return False
    forms = {
        (use.kind == "embedding", bool(use.options.get("transposed")), use.options.get("groups"))
        for use in uses
    }
    return len(forms) == 1


def _pays(uses: list[Use], n: int, pairs: tuple[int, int], form: Form) -> bool:
    """Whether contracting positions is cheaper than forming gradients."""
    costs = _costs(uses, n, pairs, form)
    return costs.contracted < sum(pairs) * costs.form + costs.formed


def _costs(uses: list[Use], n: int, pairs: tuple[int, int], form: Form) -> Costs:
    """Multiplications of a parameter, formed and contracted."""
    product = pairs[0] * pairs[1]
    s = d = c = r = 0
    for use in uses:
        s_u, d_u, c_u, r = sizes(use, n)
        s, d, c = s + s_u, d_u, c_u
    assert uses[0].g is not None
    k = uses[0].g.shape[0]
    square = k * k if form == "full" else k
    width = 1 if uses[0].kind == "embedding" else d
    formed_features = uses[0].target.shape[0] * c if uses[0].kind == "embedding" else c * d
    contract = product * s * r * (s * width + s * k * c + (square * c if s > 1 else 0))
    return Costs(
        float(k * c * d * s * r),
        float(product * square * formed_features * r),
        contract * (SMALL_PRODUCT_PENALTY if s > 1 else 1.0),
    )


def sizes(use: Use, n: int) -> tuple[int, int, int, int]:
    """Positions s, input features d, output features c and groups r of one use."""
    target = use.target.shape
    if use.kind == "conv":
        groups = use.options["groups"]
        s = use.shape[0] // n * use.shape[2:].numel()
        return s, target[1:].numel(), target[0] // groups, groups
    if use.kind == "conv-transposed":
        assert use.a is not None
        groups = use.options["groups"]
        s = use.a.shape[0] // n * use.a.shape[2:].numel()
        return s, target[0] // groups, target[1:].numel(), groups
    c = use.shape[-2] if use.options.get("left") else use.shape[-1]
    return use.shape.numel() // (c * n), target.numel() // c, c, 1


def _weight_of_bias(name: str, uses: dict[str, list[Use]], factored: Collection[str]) -> str | None:
    """The factored weight that has all its uses in common with this bias, if any."""
    own = uses.get(name, [])
    if not own or not all(use.kind == "shift" and use.direct and use.options["sign"] == 1 for use in own):
        return None
    edges = [use.place for use in own]
    for weight in sorted(factored):
        if uses[weight][0].kind in ("embedding", "conv-transposed"):  # g of the bias is another one
            continue
        c = sizes(uses[weight][0], 1)[2] * sizes(uses[weight][0], 1)[3]
        same = [use.place for use in uses[weight]] == edges
        if (
            same
            and own[0].target.numel() == c
            and own[0].target.ndim == 1
            and not uses[weight][0].options.get("left")
        ):
            return weight
    return None


def reduce(
    captured: Captured,
    names: Sequence[str],
    treatment: Treatment,
    room: KernelFeatures | None = None,
    kept: torch.dtype | None = None,
) -> KernelFeatures:
    """Keep of a captured batch what its kernels need."""
    _require_same(captured, treatment)
    formed = [name for name in names if name not in treatment.factored and name not in treatment.riding]
    uses = captured.by_parameter()
    biased = set(treatment.riding.values())
    kept = kept or wide_type(captured.outputs.dtype)
    layers = {
        name: FactoredWeight(_joined(uses[name], captured.n, kept), name in biased)
        for name in names
        if name in treatment.factored
    }
    widths = [captured.leaves[name].numel() for name in formed]
    k, start = captured.k, 0
    rows = captured.outputs.new_empty(captured.n, k, sum(widths), dtype=kept) if room is None else room.rows
    for name, width in zip(formed, widths, strict=True):
        rows[:, :, start : start + width] = captured.rows(name).reshape(captured.n, k, width)
        start += width
    if room is None:
        return KernelFeatures(captured.n, k, rows, layers, captured.outputs)
    room.outputs.copy_(captured.outputs)
    for name, layer in room.layers.items():
        layer.factors.a.copy_(layers[name].factors.a)
        layer.factors.g.copy_(layers[name].factors.g)
    return room


def _require_same(captured: Captured, treatment: Treatment) -> None:
    """Factored parameters must be used as often and as directly as when the treatment was chosen."""
    uses = captured.by_parameter()
    for name, count in treatment.factored.items():
        own = uses.get(name, [])
        if name in captured.exact or len(own) != count or not _can_factor(own):
            raise TreatmentChanged(name)
    for name, weight in treatment.riding.items():
        if name in captured.exact or _weight_of_bias(name, uses, [weight]) is None:
            raise TreatmentChanged(weight)


def _joined(uses: list[Use], n: int, kept: torch.dtype) -> UseFactors:
    """All uses of one parameter as one: their positions side by side, so all pairs of uses count."""
    parts = [factors(use, n) for use in uses]
    a = parts[0].a if len(parts) == 1 else torch.cat([part.a for part in parts], 2)
    g = parts[0].g if len(parts) == 1 else torch.cat([part.g for part in parts], 3)
    a = a.to(kept) if a.is_floating_point() else a
    return UseFactors(a.contiguous(), g.to(kept).contiguous(), parts[0].transposed)


CANDIDATES = 32  # treatments that are weighed at most: each takes a moment on a network of many layers


@dataclass(frozen=True)
class Footprint:
    """What a treatment takes."""

    peak: int  # bytes
    captured: int  # examples that are differentiated, each as often as it is


def treatment_within(
    found: Outline, budget: int, fit: Callable[[KernelFeatures], Footprint], least: int, symmetric: bool
) -> Treatment:
    """The treatment with the fewest multiplications under a budget."""
    cheapest = found.treatment(found.cheapest)
    own = fit(found.features(cheapest))
    if own.captured <= least and own.peak <= budget:
        return cheapest
    best, treatment = _order(own, _work(found, found.cheapest, own, symmetric), budget), cheapest
    for factored in _candidates(found):
        other = found.treatment(factored)
        seen = fit(found.features(other))
        order = _order(seen, _work(found, factored, seen, symmetric), budget)
        if order < best:
            best, treatment = order, other
    return treatment


def _order(fit: Footprint, work: float, budget: int) -> tuple[int, float]:
    """The order of treatments: bytes over the budget, then the work."""
    return max(0, fit.peak - budget), work


def _work(found: Outline, factored: frozenset[str], fit: Footprint, symmetric: bool) -> float:
    """Multiplications of products and captures; parameters without factors are the same in all treatments."""
    products = forming = 0.0
    for name, choice in found.choices.items():
        costs = choice.costs
        products += costs.contracted if name in factored else costs.formed
        forming += 0.0 if name in factored else costs.form
    return products * (0.5 if symmetric else 1.0) + fit.captured * (found.pass_cost + forming)


def _candidates(found: Outline) -> Iterator[frozenset[str]]:
    """The cheapest parameters to factor, with more and more of the parameters in their smaller form."""
    item = found.hollow.rows.dtype.itemsize
    changes = []
    for name, choice in found.choices.items():
        gradients = found.hollow.n * found.hollow.k * found.widths[name] * item
        saved = (gradients - choice.layer.nbytes) * (-1 if choice.pays else 1)
        if saved > 0:
            price = abs(choice.costs.contracted - choice.costs.formed)
            changes.append((price / saved, name))
    changes.sort()
    factored = set(found.cheapest)
    every = -(-len(changes) // CANDIDATES) if changes else 1
    for i, (_, name) in enumerate(changes, start=1):
        factored ^= {name}
        if i % every == 0 or i == len(changes):
            yield frozenset(factored)
