"""Influences of training texts by kronfluence and by TRAK, for ``attribution.py``.

Nothing else needs the two packages: ``pip install kronfluence dattri``.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from linnet.errors import DataError

Data = tuple[Tensor, Tensor]  # words and the words after them
PROJECTED, RIDGE = 1024, 1e-4  # directions of TRAK and what is added to its matrix: best on another seed
BATCH = 50


def need(*packages: str) -> None:
    """Raise if a package is missing, before anything is computed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise DataError(
                f"the package {package} is not installed",
                expected="the package that the study compares with",
                remedy=f"pip install {package}, or leave --peers out",
            )


def loader(data: Data) -> DataLoader[Any]:
    """The texts in their order."""
    return DataLoader(TensorDataset(*data), batch_size=BATCH)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Σ −log p over the words of each text, (N,)."""
    return nn.functional.cross_entropy(logits.mT, y, reduction="none").sum(1)


def by_kronfluence(net: nn.Module, data: Data, queries: Data) -> Tensor:
    """Influence (N, Q) by EKFAC in the linear layers that the package sees, without those of attention."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.score.pairwise import compute_pairwise_scores_with_loaders
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    layers = [
        name for name, layer in net.named_modules() if type(layer) is nn.Linear
    ]  # attention calls its own by their weights

    class Texts(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            logits = model(x)
            if sample:
                drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
                y = torch.where(y == -100, y, drawn)
            return losses(logits, y).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return layers

    task, arguments = Texts(), FactorArguments(strategy="ekfac")
    shared = {
        "model": prepare_model(copy.deepcopy(net), task),
        "state": State(),
        "factor_args": arguments,
        "disable_tqdm": True,
    }
    _, covariances = fit_covariance_matrices_with_loader(**shared, task=task, loader=loader(data))
    vectors = perform_eigendecomposition(covariance_factors=covariances, **shared)
    _, values = fit_lambda_matrices_with_loader(
        eigen_factors=vectors, **shared, task=task, loader=loader(data)
    )
    found = compute_pairwise_scores_with_loaders(
        loaded_factors={**covariances, **vectors, **values},
        task=task,
        query_loader=loader(queries),
        per_device_query_batch_size=BATCH,
        train_loader=loader(data),
        score_args=ScoreArguments(damping_factor=None),  # a tenth of the mean eigenvalue of each layer
        tracked_module_names=layers,
        **shared,
    )
    return -found["all_modules"].T.double()  # its scores say by how much a text lowers a loss


def by_trak(nets: Sequence[nn.Module], data: Data, queries: Data) -> Tensor:
    """Influence (N, Q) by gradients of margins along random directions, the mean over networks."""
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    net = nets[0]

    def likelihood(parameters: Any, example: Any) -> Tensor:  # mean log p of a word
        x, y = example
        logits = torch.func.functional_call(net, parameters, (x[None],))
        counts = (y != -100).sum().clamp_min(1)
        return -losses(logits, y[None])[0] / counts

    def margin(parameters: Any, example: Any) -> Tensor:
        told = likelihood(parameters, example)
        return told - torch.log1p(-told.exp())

    task = AttributionTask(loss_func=margin, model=net, checkpoints=[dict(one.state_dict()) for one in nets])
    trak = TRAKAttributor(
        task=task,
        correct_probability_func=lambda parameters, example: likelihood(parameters, example).exp(),
        projector_kwargs={"proj_dim": PROJECTED, "device": "cpu"},
        regularization=RIDGE,
    )
    trak.cache(loader(data))
    with torch.no_grad():
        return -trak.attribute(loader(queries)).double()  # a margin rises where a loss falls
