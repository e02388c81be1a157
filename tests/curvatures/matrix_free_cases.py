"""Networks of the zoo with data, likelihoods and dense Λ, for tests of sums over data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.curvatures.stream import Batches
from linnet.likelihoods import Categorical, Gaussian
from linnet.tangent.functional import Functional
from tests.zoo import case, linearized

CPU = torch.device("cpu")
VARIANCE = 0.7
FEW = ("mlp-relu", "lenet", "padding-index", "lstm", "tied-transpose", "weight-norm", "gated", "checkpointed")
BY_TANGENTS = (*FEW, "resnet-batchnorm", "vit-mha", "bert-sdpa", "embedding-bag", "sliced-weight", "norms")


def function_of(name: str) -> Functional:
    """The network of an animal, shared by the tests."""
    found: Functional = linearized(name).function
    return found


def own_shape(name: str) -> torch.Size:
    return function_of(name).check_runs(case(name).x1).shape


def likelihood_of(name: str, family: str) -> Any:
    """Gaussian, or Categorical with the classes last, whatever the shape of the outputs."""
    return Gaussian(VARIANCE) if family == "gaussian" else Categorical(axis=len(own_shape(name)) - 1)


def targets_of(name: str, family: str, n: int = 4) -> Tensor:
    shape = (n, *own_shape(name)[1:])
    generator = torch.Generator().manual_seed(5)
    if family == "gaussian":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(shape[-1], shape[:-1], generator=generator)


def output_hessian(name: str, family: str) -> Tensor:
    """Λ of the flattened outputs, from the definition."""
    f, classes = case(name).f1, own_shape(name)[-1]
    if family == "gaussian":
        return torch.eye(f.shape[1], dtype=torch.float64).expand(4, -1, -1) / VARIANCE
    blocks = []
    for example in f:
        p = example.view(-1, classes).softmax(-1)
        blocks.append(torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)))
    return torch.stack(blocks)


def families(name: str) -> list[str]:
    return ["gaussian", "categorical"] if own_shape(name)[-1] > 1 else ["gaussian"]


def batches(name: str, family: str, block: int | None = None) -> Batches:
    return Batches((case(name).x1, targets_of(name, family)), CPU, block)
