"""Reference curvatures from definitions: dense Jacobians, watched layers, explicit loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.layers import Part
from tests.curvatures.side_by_side import curvature_of
from tests.oracles.factors import kfac_oracle, watched_layers_oracle
from tests.zoo import BY_NAME, Case, case

VARIANCE = 0.7
SMALL = 512  # parameters of a layer up to which a Kronecker fit keeps an exact block
#: Weights of modules whose uses are not all of one outer-product form with a plain bias.
EXACT_INSTEAD = {
    ("tied-embedding", "embedding.weight"),  # a table too
}


@dataclass(frozen=True)
class Problem:
    """An animal with four examples, labels and a likelihood."""

    name: str
    family: str

    @property
    def case(self) -> Case:
        return case(self.name)

    @property
    def classes_last(self) -> int:
        """Size of the last axis of the outputs."""
        return own_shape(self.name)[-1]

    @property
    def likelihood(self) -> Any:
        if self.family == "gaussian":
            return linnet.likelihoods.Gaussian(VARIANCE)
        return linnet.likelihoods.Categorical(axis=len(own_shape(self.name)) - 1)

    @property
    def targets(self) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        shape = own_shape(self.name)
        if self.family == "gaussian":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.randint(shape[-1], shape[:-1], generator=generator)

    @property
    def data(self) -> tuple[Any, Tensor]:
        return self.case.x1, self.targets

    def output_hessian(self) -> Tensor:
        """Λ of the flattened outputs (N, C, C), from the definition."""
        f = self.case.f1
        if self.family == "gaussian":
            return torch.eye(f.shape[1], dtype=torch.float64).expand(len(f), -1, -1) / VARIANCE
        blocks = []
        for example in f:
            p = example.view(-1, self.classes_last).softmax(-1)
            blocks.append(torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)))
        return torch.stack(blocks)

    def columns(self) -> Tensor:
        """Columns u (N, C, C) with Σ_k u_k u_kᵀ = Λ, other ones than the closed forms."""
        values, vectors = torch.linalg.eigh(self.output_hessian())
        return (vectors * values.clamp(min=0).sqrt()[:, None]).mT

    def curvature(self, structure: Any, **options: Any) -> Any:
        model, output = self.case.model(), self.case.output
        return curvature_of(model, self.data, self.likelihood, structure, output=output, **options)


@cache
def own_shape(name: str) -> torch.Size:
    """Shape of the outputs of four examples."""
    model, x, output = case(name).model().eval(), case(name).x1, case(name).output
    result = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    result = result if output is None else output(result)
    return (result[:, None] if result.ndim == 1 else result).shape  # linnet takes (N,) as one column


def families(name: str) -> list[str]:
    return ["gaussian", "categorical"] if BY_NAME[name].classes > 1 else ["gaussian"]


def gradients_matrix(j: Tensor, columns: Tensor) -> Tensor:
    """Σ_n Σ_k (Jᵀu)(Jᵀu)ᵀ, one outer product after the other."""
    total = torch.zeros(j.shape[2], j.shape[2], dtype=torch.float64)
    for jacobian, directions in zip(j, columns, strict=True):
        rows = directions @ jacobian  # (K, P)
        total += rows.T @ rows
    return total


def indices(model: nn.Module) -> dict[str, Tensor]:
    """Where each parameter that requires gradients is among all of them, in its own shape."""
    found, start = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = torch.arange(start, start + parameter.numel()).view(parameter.shape)
            start += parameter.numel()
    return found


def place(total: Tensor, block: Tensor, rows: Tensor) -> None:
    """Write a block to its rows and columns."""
    total[rows[:, None], rows[None, :]] = block


class Expected:
    """The matrices of one problem under every structure, given the columns of each example."""

    def __init__(self, model: nn.Module, x: Any, j: Tensor, columns: Tensor, output: Any = None) -> None:
        self.model, self.x, self.output = model, x, output
        self.columns, self.places = columns, indices(model)
        self.full = gradients_matrix(j, columns)
        self.j = j

    @classmethod
    def of(cls, problem: Problem, columns: Tensor | None = None) -> Expected:
        """Of a problem, with exact columns unless others are given."""
        own = problem.columns() if columns is None else columns
        return cls(problem.case.model(), problem.case.x1, problem.case.j1, own, problem.case.output)

    def rows(self, part: Part) -> Tensor:
        """The indices of a part's parameters, one after the other."""
        return torch.cat([self.places[name].flatten() for name in part.layer.names])

    def joined(self, weight: str, bias: str | None, groups: int, transposed: bool) -> list[Tensor]:
        """The indices of [W b] of every group, flattened."""
        matrix = self.places[weight].reshape(groups, self.places[weight].shape[0] // groups, -1)
        if bias is not None:
            own = self.places[bias].reshape(groups, -1)
            matrix = torch.cat(
                [matrix, own[:, None] if transposed else own[..., None]], 1 if transposed else 2
            )
        return [one.flatten() for one in matrix]

    def block(self, parts: tuple[Part, ...]) -> Tensor:
        """The exact blocks of the parts."""
        total = torch.zeros_like(self.full)
        for part in parts:
            rows = self.rows(part)
            place(total, self.full[rows[:, None], rows], rows)
        return total

    def kronecker(self, sharing: str = "expand") -> dict[str, list[tuple[Tensor, Tensor]]]:
        """By weight: the indices and the Kronecker product of every group."""
        layers = watched_layers_oracle(self.model, self.x, self.columns, self.output)
        found = {}
        for name, (a, b) in kfac_oracle(self.model, self.x, self.columns, sharing, self.output).items():
            layer = layers[name]
            places = self.joined(name, layer.bias, len(a), layer.transposed)
            products = [(b_, a_) if not layer.transposed else (a_, b_) for a_, b_ in zip(a, b, strict=True)]
            found[name] = [(rows, torch.kron(*pair)) for rows, pair in zip(places, products, strict=True)]
        return found

    def moments(self, part: Part) -> Tensor:
        """L ⊗ R of a parameter from its per-example gradients alone."""
        rows = self.rows(part)
        shape = (part.layer.shapes[0][0], -1)
        own = [(u @ jac)[rows].view(shape) for jac, us in zip(self.j, self.columns, strict=True) for u in us]
        left, right = sum(g @ g.T for g in own), sum(g.T @ g for g in own)
        return torch.kron(left, right / left.trace())

    def kfac(self, G: Curvature, sharing: str = "expand", name: str = "") -> Tensor:
        """KFAC of the layers as ``G`` has them, except factored layers that hooks do not see: those of G."""
        total, products, seen = torch.zeros_like(self.full), self.kronecker(sharing), set()
        for part in G.parts:
            rows, weight = self.rows(part), part.layer.names[0]
            if part.structure == "kfac" and weight in products:
                seen.add(weight)
                for places, product in products[weight]:
                    place(total, product, places)
            elif part.structure == "kfac" and part.layer.factored:
                place(total, G.dense()[rows[:, None], rows], rows)
            elif part.structure == "kfac":
                place(total, self.moments(part), rows)
            elif part.structure == "block":
                assert part.note, part.layer.name
                assert len(rows) <= SMALL
                place(total, self.full[rows[:, None], rows], rows)
            else:
                assert part.structure == "diagonal", part.structure
                assert part.note, part.layer.name
                place(total, self.full.diagonal()[rows].diag(), rows)
        missed = {weight for weight in products if weight in self.places} - seen
        assert missed == {weight for animal, weight in EXACT_INSTEAD if animal == name}
        return total

    def corrected(self, part: Part) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of every group: its indices, the eigenvectors Q of the finished block, and Q diag(QᵀHQ) Qᵀ."""
        operator: Any = part.operator
        left, right = operator.left_vectors, operator.right_vectors
        groups = left.shape[0] if left.ndim == 3 else 1
        places = [self.rows(part)]
        if part.layer.factored:
            bias = part.layer.names[1] if part.layer.biased else None
            places = self.joined(part.layer.names[0], bias, groups, part.layer.transposed)
        left, right = (m.reshape(groups, *m.shape[-2:]) for m in (left, right))
        found = []
        for rows, q_left, q_right in zip(places, left, right, strict=True):
            q = torch.kron(q_left, q_right)
            values = (q.T @ self.full[rows[:, None], rows] @ q).diagonal()
            found.append((rows, q, (q * values) @ q.T))
        return found


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest entry."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def by_name(parts: tuple[Part, ...]) -> Mapping[str, Part]:
    return {part.layer.name: part for part in parts}
