"""Groups parameters into layers and finds the curvature structures that each layer supports.

A layer is a weight with the bias that is added to its product, or the parameters of one normalization, or
a parameter by itself. A layer whose every use is a linear map or a convolution of its weight has gradients
Σ_s g_s [a_s; 1]ᵀ, and so Kronecker factors; all others have per-example gradients only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.distributed import current
from linnet.errors import ModelError
from linnet.linalg.kronecker import Kronecker, eigenbases
from linnet.linalg.operator import ParameterSpace
from linnet.linalg.structured import StructuredOperator
from linnet.tangent.features import sizes
from linnet.tangent.rules import Captured, Use, UseFactors, factors
from linnet.tree import node

_Side = TypeVar("_Side")
UNSEEN = "no gradient seen"  # why a layer has no rule
PRODUCTS = ("linear", "conv", "conv-transposed")


@node()
@dataclass(frozen=True)
class Form:
    """The use of a layer's weight."""

    # "product" (linear maps and convolutions: the gradients are outer products), "embedding" (rows that are
    # looked up) or "rows" (nothing is known but per-example gradients)
    kind: str = "rows"
    groups: int = 1  # R, independent parts of a grouped convolution; 1 otherwise
    transposed: bool = False  # whether the weight is stored (d_in, d_out)
    positions: int = 1  # S, positions of one example that share the weight, all uses together
    uses: int = 1  # how often a pass uses the weight


@node()
@dataclass(frozen=True)
class Layer:
    """Parameters that are used together."""

    name: str  # the common part of their names
    # the parameters with their shapes; of products the weight first, then its bias
    shapes_by_name: Mapping[str, tuple[int, ...]]
    form: Form = Form()  # how the weight is used
    why: str = ""  # what the parameters are used for, or why they have no rule

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(self.shapes_by_name)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Their shapes."""
        return tuple(self.shapes_by_name.values())

    @property
    def factored(self) -> bool:
        """Whether the gradients have the outer-product form."""
        return self.form.kind == "product"

    @property
    def embedding(self) -> bool:
        """Whether the layer is an embedding table."""
        return self.form.kind == "embedding"

    @property
    def groups(self) -> int:
        """R, groups of a convolution."""
        return self.form.groups

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored (d_in, d_out)."""
        return self.form.transposed

    @property
    def size(self) -> int:
        """Number of scalar parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def biased(self) -> bool:
        """Whether a bias rides along with the weight."""
        return self.factored and len(self.names) == 2

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the matrix [W b] of one group, in the order in which it is stored."""
        rows = self.shapes[0][0] // self.groups
        columns = torch.Size(self.shapes[0][1:]).numel()
        return (rows + self.biased, columns) if self.transposed else (rows, columns + self.biased)

    def ordered(self, inputs: _Side, gradients: _Side) -> tuple[_Side, _Side]:
        """What belongs to inputs and gradients in the order of the matrix, or the other way round."""
        return (inputs, gradients) if self.transposed else (gradients, inputs)

    @property
    def widths(self) -> tuple[int, int]:
        """d, with the one of a bias, and c of one group."""
        return self.ordered(*self.matrix)

    def homogeneous(self, a: Tensor) -> Tensor:
        """Inputs with a one for the bias, if the layer has one, (..., d + 1)."""
        # a (..., d)
        return F.pad(a, (0, 1), value=1.0) if self.biased else a

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Weight and bias as one matrix a group."""
        batch = parts[0].shape[: parts[0].ndim - len(self.shapes[0])]
        rows = self.shapes[0][0] // self.groups
        weight = parts[0].reshape(*batch, self.groups, rows, torch.Size(self.shapes[0][1:]).numel())
        if not self.biased:
            return weight
        bias = parts[1].reshape(*batch, self.groups, self.shapes[1][0] // self.groups)
        bias = bias[..., None, :] if self.transposed else bias[..., None]
        return torch.cat([weight, bias], -2 if self.transposed else -1)

    def part(self, matrix: Tensor) -> list[Tensor]:
        """Undo ``join``."""
        batch = matrix.shape[:-3]
        if not self.biased:
            return [matrix.reshape(*batch, *self.shapes[0])]
        axis = -2 if self.transposed else -1
        length = matrix.shape[axis] - 1
        weight, bias = matrix.narrow(axis, 0, length), matrix.select(axis, length)
        return [weight.reshape(*batch, *self.shapes[0]), bias.reshape(*batch, *self.shapes[1])]

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Rows (size, ...) parameter by parameter."""
        pieces: tuple[Tensor, ...] = flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return pieces

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """A vector (size,) in the shapes of the parameters."""
        return [piece.reshape(shape) for piece, shape in zip(self.split(flat), self.shapes, strict=True)]


def find_layers(captured: Captured, names: Sequence[str], reasons: Mapping[str, str]) -> tuple[Layer, ...]:
    """Sort the tracked parameters into layers, from one captured batch."""
    uses = captured.by_parameter()
    left = dict.fromkeys(names)
    layers = []
    while left:
        name = next(iter(left))
        together = _together(name, list(left), uses)
        for member in together:
            del left[member]
        layers.append(_layer(together, captured, uses, reasons))
    often = Counter(layer.name for layer in layers)
    # several layers of one module go by their first parameters
    return tuple(layer if often[layer.name] == 1 else replace(layer, name=layer.names[0]) for layer in layers)


def _together(name: str, names: Iterable[str], uses: Mapping[str, list[Use]]) -> tuple[str, ...]:
    """The parameters whose uses all share their results with those of ``name``; weights come first."""
    places = [use.place for use in uses.get(name, [])]
    if not places:
        return (name,)
    same = [other for other in names if [use.place for use in uses.get(other, [])] == places]
    together = tuple(sorted(same, key=lambda other: uses[other][0].kind == "shift"))
    product = all(use.kind in PRODUCTS for use in uses[together[0]])
    # what is added to a product without being its plain bias is a layer by itself
    return (name,) if product and not _plain_biases(together, uses) else together


def _layer(
    names: tuple[str, ...], captured: Captured, uses: Mapping[str, list[Use]], reasons: Mapping[str, str]
) -> Layer:
    """The layer of parameters that are used together."""
    shapes = {name: tuple(captured.leaves[name].shape) for name in names}
    own = uses.get(names[0], [])
    name = _common(names)
    if any(member in captured.exact for member in names):
        why = next((reasons[member] for member in names if member in reasons), "no rule")
        return Layer(name, shapes, why=why)
    if not own:
        return Layer(name, shapes, why=UNSEEN)
    kinds = sorted({use.kind for use in own})
    count, looked_up = len(own), kinds == ["embedding"] and len(names) == 1
    if not all(use.direct for use in own):
        return Layer(name, shapes, Form(uses=count), "used through a function of it")
    forms = {(use.options.get("groups", 1), _stored_transposed(use)) for use in own}
    if not looked_up and (len(forms) > 1 or not all(use.kind in PRODUCTS for use in own)):
        return Layer(name, shapes, Form(uses=count), " and ".join(kinds))
    positions = sum(sizes(use, captured.n)[0] for use in own)
    if looked_up:
        return Layer(name, shapes, Form("embedding", 1, True, positions, count), "embedding")
    ((groups, transposed),) = forms
    return Layer(name, shapes, Form("product", groups, transposed, positions, count), kinds[0])


def _stored_transposed(use: Use) -> bool:
    """Whether the weight is stored with its input features first."""
    return use.kind == "conv-transposed" or bool(use.options.get("transposed"))


def _plain_biases(names: tuple[str, ...], uses: Mapping[str, list[Use]]) -> bool:
    """Whether what rides along with the weight is one plain bias: one number for each output, added."""
    if len(names) == 1:
        return True
    if len(names) > 2 or any(use.kind == "conv-transposed" for use in uses[names[0]]):
        return False
    weight, biases = uses[names[0]][0], uses[names[1]]
    outputs = weight.target.shape[1 if _stored_transposed(weight) else 0]
    return (
        all(use.kind == "shift" and use.direct and use.options["sign"] == 1 for use in biases)
        and biases[0].target.ndim == 1
        and biases[0].target.numel() == outputs
        and not weight.options.get("left")
    )


def _common(names: tuple[str, ...]) -> str:
    """The module that holds all the parameters, or the parameter's own name."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shared = []
    for pieces in zip(*parts, strict=False):
        if len(set(pieces)) > 1:
            break
        shared.append(pieces[0])
    return ".".join(shared) or names[0]


def as_found(captured: Captured, layer: Layer) -> bool:
    """Whether a layer is used in a batch as it was where it was found."""
    if layer.form.kind == "rows":
        return True
    if any(name in captured.exact for name in layer.names):
        return False
    uses = captured.by_parameter()
    places = [[use.place for use in uses.get(name, [])] for name in layer.names]
    if any(own != places[0] for own in places[1:]):
        return False
    if not places[0]:
        return True
    form = _layer(layer.names, captured, uses, {}).form
    alike = [(f.kind, f.groups, f.transposed) for f in (form, layer.form)]
    return alike[0] == alike[1] and _plain_biases(layer.names, uses)


def require_as_found(captured: Captured, layer: Layer) -> None:
    """Raise if a layer's factors, found on the first batch, are not those of this one."""
    if not as_found(captured, layer):
        raise ModelError(
            f"{layer.name} is used differently for some examples than for those looked at first",
            expected="the same operations for all examples, for Kronecker factors",
            remedy=f'give it another structure: {{"^{layer.name}": "diagonal", ".*": "kfac"}}, or "block"',
        )


def layer_factors(captured: Captured, layer: Layer, keep: bool = False) -> list[UseFactors]:
    """The outer-product form of every use of a layer's weight, (N, R, S, d)."""
    return [factors(use, captured.n, keep) for use in captured.by_parameter().get(layer.names[0], [])]


# -- parts -----------------------------------------------------------------------------------------
# A layer's block of a curvature matrix, and its rows among all parameters.


@node()
@dataclass(frozen=True, eq=False)
class Part:
    """One layer's block."""

    layer: Layer  # the layer
    operator: StructuredOperator  # its block
    structure: str  # what the block is: "kfac", "ekfac", "kfra", "block", "diagonal", "full" or "low-rank"
    note: str = ""  # why it is not what was requested, or what is approximated beyond that; empty otherwise
    # number of inputs that the factor of the inputs is the mean of, where there is such a factor
    terms: float | None = None

    @property
    def joined(self) -> bool:
        """Whether the block's order is that of the matrix [W b]."""
        return self.structure in ("kfac", "ekfac", "kfra") and self.layer.factored

    def gather(self, v: Tensor, space: ParameterSpace) -> Tensor:
        """The rows of v (P, K) that belong to the layer, in the block's order."""
        pieces = [v[space.slices[name]] for name in self.layer.names]
        if not self.joined or not self.layer.biased:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        shaped = [p.T.reshape(v.shape[1], *shape) for p, shape in zip(pieces, self.layer.shapes, strict=True)]
        return self.layer.join(shaped).flatten(1).T

    def scatter(self, rows: Tensor, out: Tensor, space: ParameterSpace) -> None:
        """Undo :meth:`gather`, into ``out`` (P, K)."""
        if self.joined and self.layer.biased:
            rows_, columns = self.layer.matrix
            matrices = rows.T.reshape(rows.shape[1], self.layer.groups, rows_, columns)
            pieces = [piece.flatten(1).T for piece in self.layer.part(matrices)]
        else:
            pieces = list(self.layer.split(rows))
        for name, piece in zip(self.layer.names, pieces, strict=True):
            out[space.slices[name]] = piece


def in_eigenbases(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same blocks with Kronecker products by their eigenvectors."""
    # Inside `linnet.distributed.sharing` each factor is decomposed by one process for all.
    products = [part.operator for part in parts if isinstance(part.operator, Kronecker)]
    made = iter(eigenbases(products, current()))
    return tuple(
        replace(part, operator=next(made)) if isinstance(part.operator, Kronecker) else part for part in parts
    )
