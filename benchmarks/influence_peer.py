"""EKFAC influence scores by kronfluence 1.0.1, for ``influence.py``; run in the peers' environment.

Reads a file with weights and images, and prints one line of JSON: the seconds of the covariance matrices,
the eigendecompositions, the corrected eigenvalues and the pairwise scores. The files that kronfluence writes
between these steps are left out in its favor, and all queries go in one batch, so that training gradients are
computed once.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(path: str, state: dict[str, torch.Tensor]) -> nn.Module:
    """The pretrained network with its new head."""
    spec = importlib.util.spec_from_file_location("nets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.CifarResNet(depth=20, classes=10)
    model.load_state_dict(state)
    return model.eval()


def scores(given: dict[str, Any], batch: int) -> dict[str, Any]:
    """Seconds of each step."""
    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.score.pairwise import compute_pairwise_scores_with_loaders
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> torch.Tensor:
            x, y = batch
            output = model(x)
            if sample:
                y = output.detach().softmax(-1).multinomial(1).squeeze(-1)
            return nn.functional.cross_entropy(output, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> torch.Tensor:
            return self.compute_train_loss(batch, model)

    task, arguments = Classification(), FactorArguments(strategy="ekfac")
    model = prepare_model(network(given["networks"], given["state"]), task)
    shared = {"model": model, "state": State(), "factor_args": arguments, "disable_tqdm": True}
    loader = DataLoader(TensorDataset(given["x"], given["y"]), batch_size=batch)
    queries = TensorDataset(given["test_x"], given["test_y"])
    seconds: dict[str, float] = {}
    begin = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[name], begin = now - begin, now

    _, covariances = fit_covariance_matrices_with_loader(**shared, task=task, loader=loader)
    lap("covariances")
    vectors = perform_eigendecomposition(covariance_factors=covariances, **shared)
    lap("decompositions")
    _, values = fit_lambda_matrices_with_loader(eigen_factors=vectors, **shared, task=task, loader=loader)
    lap("eigenvalues")
    found = compute_pairwise_scores_with_loaders(
        loaded_factors={**covariances, **vectors, **values},
        task=task,
        query_loader=DataLoader(queries, batch_size=len(queries)),
        per_device_query_batch_size=len(queries),
        train_loader=loader,
        score_args=ScoreArguments(),
        tracked_module_names=None,
        **shared,
    )
    lap("scores")
    (matrix,) = found.values()
    return {"seconds": seconds, "shape": list(matrix.shape)}


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    given = torch.load(Path(sys.argv[1]), weights_only=True)
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    print(json.dumps(scores(given, int(sys.argv[3]))))


if __name__ == "__main__":
    main()
