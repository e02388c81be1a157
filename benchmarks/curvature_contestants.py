"""Curvature computations by each peer, run in the peers' environment.

What a peer cannot do is a ``LookupError`` raised here where it has no such operation, and whatever the peer
itself raises otherwise. Scale conventions are in the docstring of ``curvature_peers.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from curvature_networks import Parameters, Problem, in_modules, trainable
from measure import timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FISHER = {"exact": "type-2", "mc": "mc"}
FITTED = 40  # examples that a posterior is fitted on before its predictions are timed


@dataclass(frozen=True)
class Job:
    """Something to time.

    ``run`` computes, ``probe`` turns its result into tensors that can be compared, and ``facts`` measures
    more: "decompose", seconds of the eigenvalue decompositions within ``run``, which do not grow with N.
    """

    run: Callable[[], Any]
    probe: Callable[[Any], Parameters] = lambda result: {}
    facts: Callable[[Any], dict[str, Any]] = lambda result: {}


def named(names: Iterable[str], values: Iterable[torch.Tensor]) -> Parameters:
    """Tensors by the names of their parameters."""
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def curvlinops(task: str, given: Problem, batch: int) -> Job:
    """KFACLinearOperator, EKFACLinearOperator and GGNLinearOperator."""
    from curvlinops import EKFACLinearOperator, GGNLinearOperator, KFACLinearOperator

    tensors = list(given.parameters.values())
    structure, _, kind = task.partition("-")
    common: dict[str, Any] = {"check_deterministic": False, "num_data": len(given.x)}

    def columns(operator: Any, vectors: Parameters) -> Parameters:
        product = operator @ torch.cat([value.flatten(0, -2) for value in vectors.values()])
        parts = product.split([value.numel() for value in tensors])
        shaped = (part.unflatten(0, value.shape) for part, value in zip(parts, tensors, strict=True))
        return named(given.names, shaped)

    if structure == "ggn":
        operator = GGNLinearOperator(given.model, given.loss, tensors, given.batches(batch), **common)
        vectors = given.vectors(int(kind))
        return Job(lambda: columns(operator, vectors), lambda result: result)
    maker = {"kfac": KFACLinearOperator, "ekfac": EKFACLinearOperator}.get(structure)
    if maker is None:
        raise LookupError("only stochastic estimates of the diagonal (Hutchinson, XDiag)")

    def run() -> Any:
        operator = maker(
            given.model,
            given.loss,
            tensors,
            given.batches(batch),
            fisher_type=FISHER[kind],
            separate_weight_and_bias=False,
            num_per_example_loss_terms=1,
            **common,
        )
        operator.compute_kronecker_factors()
        if structure == "ekfac":
            operator.compute_eigenvalue_correction()
        return operator

    def decompose(operator: Any) -> dict[str, Any]:
        if structure != "ekfac":
            return {}
        # the factors themselves are gone: decompose others of their eigenvectors
        kept = (operator._input_covariances_eigenvectors, operator._gradient_covariances_eigenvectors)
        vectors = [matrix for family in kept for matrix in family.values()]
        factors = [(q * torch.arange(1.0, len(q) + 1, dtype=q.dtype)) @ q.T for q in vectors]
        return {"decompose": timed(lambda: [torch.linalg.eigh(factor) for factor in factors])[0]}

    return Job(run, lambda operator: columns(operator, given.vectors(3)), decompose)


def backpack(task: str, given: Problem, batch: int) -> Job:
    """KFLR, KFAC and DiagGGNExact of extended modules, and the autodiff-only product."""
    from backpack import backpack as extended
    from backpack import extend, extensions
    from backpack.custom_module.branching import Parallel
    from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist

    if task.startswith("ggn"):
        vectors = given.vectors(int(task.partition("-")[2]))

        def products() -> Parameters:
            total = {name: torch.zeros_like(value) for name, value in vectors.items()}
            chosen = list(given.parameters.values())
            for x, y in given.batches(batch):
                output = given.model(x)
                loss = given.loss(output, y)
                for index in range(next(iter(vectors.values())).shape[-1]):
                    column = [value[..., index] for value in vectors.values()]
                    product = ggn_vector_product_from_plist(loss, output, chosen, column)
                    for name, value in zip(total, product, strict=True):
                        total[name][..., index] += value.detach()
            return total

        return Job(products, lambda result: result)
    if task.startswith("ekfac"):
        raise LookupError("no eigenvalue-corrected factors")
    kinds = {
        "kfac-exact": ("KFLR", "kflr"),
        "kfac-mc": ("KFAC", "kfac"),
        "diagonal-exact": ("DiagGGNExact", "diag_ggn_exact"),
    }
    extension, attribute = kinds[task]
    model = in_modules(copy.deepcopy(given.model), Parallel)
    model = extend(model, use_converter=not isinstance(model, nn.Sequential))
    loss_function = extend(copy.deepcopy(given.loss))
    once = _extended_pass(model, loss_function, extended, getattr(extensions, extension))

    def run() -> list[Any]:
        total: list[Any] = []
        for x, y in given.batches(batch):
            once(x, y)
            values = [getattr(value, attribute) for value in trainable(model)]
            if isinstance(values[0], list):
                weight = len(x) / len(given.x)
                values = [[pair[0], *(other * weight for other in pair[1:])] for pair in values]
            total = [_sum(*pair) for pair in zip(total, values, strict=True)] if total else values
            for value in trainable(model):
                delattr(value, attribute)
        return total

    def probe(total: list[Any]) -> Parameters:
        if not isinstance(total[0], list):
            return named(given.names, total)
        vectors = given.vectors(3).values()
        return named(given.names, (_kronecker(*pair) for pair in zip(total, vectors, strict=True)))

    return Job(run, probe)


def _extended_pass(model: nn.Module, loss: nn.Module, context: Any, extension: Any) -> Callable[..., None]:
    """One forward and backward pass inside BackPACK's context."""

    def once(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        with context(extension()):
            loss(model(x), y).backward()

    return once


def _sum(left: Any, right: Any) -> Any:
    """The sum of two tensors, or of two lists of factors."""
    return (
        left + right if isinstance(left, torch.Tensor) else [a + b for a, b in zip(left, right, strict=True)]
    )


def _kronecker(factors: list[torch.Tensor], vector: torch.Tensor) -> torch.Tensor:
    """(B ⊗ A) v for a weight (out, ..., columns), or B v for a bias."""
    product = torch.einsum("ij,j...->i...", factors[0], vector)
    if len(factors) == 1:
        return product
    return torch.einsum("kl,ilv->ikv", factors[1], product.flatten(1, -2)).reshape(vector.shape)


def laplace(task: str, given: Problem, batch: int, backend: str | None = None) -> Job:
    """``Laplace(...).fit`` of all weights, or its GLM predictive after a fit."""
    from laplace import Laplace
    from laplace.curvature import AsdlGGN, BackPackGGN

    if task.startswith(("ggn", "ekfac")):
        raise LookupError("has no such operation")
    kind = "diag" if "diagonal" in task else "kron"
    likelihood = "classification" if isinstance(given.loss, nn.CrossEntropyLoss) else "regression"
    options: dict[str, Any] = {"backend_kwargs": {"stochastic": task.endswith("mc")}}
    if backend is not None:
        options["backend"] = {"backpack": BackPackGGN, "asdl": AsdlGGN}[backend]

    def posterior(x: torch.Tensor, y: torch.Tensor) -> Any:
        result = Laplace(copy.deepcopy(given.model), likelihood, "all", kind, **options)
        result.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
        return result

    def decompose(result: Any) -> dict[str, Any]:
        return {"decompose": timed(result.H_facs.decompose)[0]} if kind == "kron" else {}

    def fitted(result: Any) -> Parameters:
        if kind == "diag":
            parts = result.H.split([value.numel() for value in given.parameters.values()])
            return named(
                given.names, (p.view_as(v) for p, v in zip(parts, given.parameters.values(), strict=True))
            )
        vectors = given.vectors(3).values()
        return named(
            given.names, (_kronecker(*pair) for pair in zip(result.H_facs.kfacs, vectors, strict=True))
        )

    if not task.startswith("predictive"):
        return Job(lambda: posterior(given.x, given.y), fitted, decompose)
    known = posterior(given.x[:FITTED], given.y[:FITTED])

    def predict() -> list[torch.Tensor]:
        return [known(x, pred_type="glm", link_approx="probit") for x, _ in given.batches(batch)]

    def variance(_: Any) -> Parameters:
        parts = [known._glm_predictive_distribution(x)[1] for x, _ in given.batches(batch)[:2]]
        return {"variance": torch.cat(parts)}

    return Job(predict, variance)


def kronfluence(task: str, given: Problem, batch: int) -> Job:
    """Covariances, and for EKFAC the decompositions and eigenvalues, without the files between them."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    if task.startswith(("ggn", "diagonal", "predictive")):
        raise LookupError("has no such operation")
    if not task.endswith("-mc"):
        raise LookupError("takes expectations over sampled or observed labels only")

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> torch.Tensor:
            x, y = batch
            output = model(x)
            if sample:
                y = output.detach().softmax(-1).multinomial(1).squeeze(-1)
            return nn.functional.cross_entropy(output, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> torch.Tensor:
            return self.compute_train_loss(batch, model)

    classification = Classification()
    shared = {
        "model": prepare_model(copy.deepcopy(given.model), classification),
        "state": State(),
        "factor_args": FactorArguments(strategy="ekfac"),
        "disable_tqdm": True,
    }

    def run() -> Any:
        loader = DataLoader(TensorDataset(given.x, given.y), batch_size=batch)
        rest = {"task": classification, "loader": loader}
        _, factors = fit_covariance_matrices_with_loader(**shared, **rest)
        if task.startswith("kfac"):
            return factors
        vectors = perform_eigendecomposition(covariance_factors=factors, **shared)
        fit_lambda_matrices_with_loader(eigen_factors=vectors, **shared, **rest)
        return factors

    def decompose(factors: Any) -> dict[str, Any]:
        call = partial(perform_eigendecomposition, covariance_factors=factors, **shared)
        return {"decompose": timed(call)[0]} if task.startswith("ekfac") else {}

    return Job(run, facts=decompose)


MAKERS: dict[str, Callable[[str, Problem, int], Job]] = {
    "curvlinops": curvlinops,
    "backpack": backpack,
    "laplace": laplace,
    "laplace-backpack": lambda task, given, batch: laplace(task, given, batch, "backpack"),
    "laplace-asdl": lambda task, given, batch: laplace(task, given, batch, "asdl"),
    "kronfluence": kronfluence,
}
