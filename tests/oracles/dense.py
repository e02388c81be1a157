"""Dense reference values in float64 by the most direct algorithm.

Every function here follows a definition and nothing else: one example at a time, one call of
``torch.autograd.grad`` for each output, explicit matrices, refits instead of update formulas. The
fast parts of linnet are tested against these numbers, and so can be your own extensions. Use small
networks: the cost is N · C backward passes and matrices with P columns.

Networks are copied, moved to float64 and put in eval mode; the one passed in is never touched.
Outputs are flattened to (N, C), parameters to P entries in the order of ``named_parameters()``. An
input ``x`` is a tensor, a tuple or list (``model(*x)``) or a dict (``model(**x)``); its first tensor
says the number of examples N, and what does not have N as its first dimension belongs to all examples.

The linear fit behind the ridge, posterior, leave-one-out and influence oracles minimizes
½ Σᵢ‖tᵢ − f₀(xᵢ) − Jᵢδ‖² + ½ ρ‖δ‖². Reference for the formulas: any text on linear models, for
instance Bishop, "Pattern Recognition and Machine Learning", sections 3.1, 3.3 and 4.5.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Form = Literal["full", "trace", "diagonal", "sum"]


def output_oracle(model: nn.Module, x: Any, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Outputs of a network in eval mode, one example at a time, (x)."""
    model = _double_copy(model)
    return torch.stack([_forward(model, example, output).detach() for example in _examples(x)])


def jacobian_oracle(
    model: nn.Module,
    x: Any,
    names: Iterable[str] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """Jacobian of the outputs in the parameters, one backward pass for each example and output."""
    model, parameters = _tracked_copy(model, names)
    rows = []
    for example in _examples(x):
        f = _forward(model, example, output)
        rows.append(torch.stack([_gradient(f[c], parameters) for c in range(f.numel())]))
    return torch.stack(rows)


def kernel_oracle(j1: Tensor, j2: Tensor | None = None, form: Form = "full") -> Tensor:
    """Empirical tangent kernel K = J₁J₂ᵀ from two Jacobians."""
    # j1 (N, C, P), j2 (M, C, P)
    j1, j2 = j1.double(), (j1 if j2 is None else j2).double()
    full = torch.einsum("ncp,mdp->ncmd", j1, j2)
    if form == "full":
        return full
    if form == "diagonal":
        return torch.einsum("ncmc->nmc", full)
    if form == "trace":
        return torch.einsum("ncmc->nm", full)
    if form == "sum":
        return full.sum(dim=(1, 3))
    raise ValueError(f"outputs is {form!r}. Expected: 'full', 'trace', 'diagonal' or 'sum'.")


def linearized_oracle(f0: Tensor, j: Tensor, delta: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Outputs of the linearized network, f₀ + Jδ, (N, C)."""
    # f0 (N, C), j (N, C, P), delta (P,)
    if isinstance(delta, Mapping):
        delta = torch.cat([value.detach().reshape(-1) for value in delta.values()])
    return f0.double() + j.double() @ delta.double()


def ridge_oracle(j: Tensor, targets: Tensor, f0: Tensor, ridge: float) -> Tensor:
    """Displacement that minimizes ½ Σᵢ‖tᵢ − f₀ᵢ − Jᵢδ‖² + ½ ρ‖δ‖², by least squares in parameter space."""
    # j (N, C, P), targets (N, C), f0 (N, C)
    residual = (targets.double() - f0.double()).reshape(-1)
    if ridge == 0:
        return _least_squares(_rows(j), residual, driver="gelsd")
    # ½ |r - J d|² + ½ rho |d|² = ½ |(r, 0) - (J, sqrt(rho) I) d|²
    stacked = _ridge_rows(j, ridge)
    padded = torch.cat([residual, residual.new_zeros(stacked.shape[1])])
    return _least_squares(stacked, padded, driver="gels")


def posterior_oracle(
    j: Tensor, targets: Tensor, f0: Tensor, ridge: float, noise: float, j_test: Tensor, f0_test: Tensor
) -> tuple[Tensor, Tensor]:
    """Posterior of the outputs f for a linear model with the prior N(0, (σ²/ρ) I) over δ."""
    # j (N, C, P), targets (N, C), f0 (N, C), j_test (M, C, P), f0_test (M, C)
    # The observations are f₀ + Jδ + ε with ε ~ N(0, σ²), so that the mean is the ridge solution and the
    # covariance of δ is σ² (JᵀJ + ρI)⁻¹.
    mean = linearized_oracle(f0_test, j_test, ridge_oracle(j, targets, f0, ridge))
    # JᵀJ + rho I = RᵀR, hence J* (JᵀJ + rho I)⁻¹ J*ᵀ = |R⁻ᵀ J*ᵀ|²
    triangle = torch.linalg.qr(_ridge_rows(j, ridge), mode="r").R
    half = torch.linalg.solve_triangular(triangle.T, _rows(j_test).T, upper=False)
    half = half.reshape(half.shape[0], *j_test.shape[:2])
    return mean, noise * torch.einsum("pmc,pmd->mcd", half, half)


def leave_one_out_oracle(j: Tensor, targets: Tensor, f0: Tensor, ridge: float) -> Tensor:
    """Prediction for each training example by a fit that never saw it: N refits, (N, C)."""
    # j (N, C, P), targets (N, C), f0 (N, C)
    predictions = []
    for i, kept in _left_out(j.shape[0]):
        delta = ridge_oracle(j[kept], targets[kept], f0[kept], ridge)
        predictions.append(linearized_oracle(f0[i], j[i], delta))
    return torch.stack(predictions)


def influence_oracle(j: Tensor, targets: Tensor, f0: Tensor, ridge: float, j_test: Tensor) -> Tensor:
    """Prediction with all training examples minus prediction without each of them: N refits, (N, M, C)."""
    # j (N, C, P), targets (N, C), f0 (N, C), j_test (M, C, P)
    delta = ridge_oracle(j, targets, f0, ridge)
    effects = []
    for _, kept in _left_out(j.shape[0]):
        without = ridge_oracle(j[kept], targets[kept], f0[kept], ridge)
        effects.append(j_test.double() @ (delta - without))
    return torch.stack(effects)


def hessian_oracle(
    model: nn.Module,
    x: Any,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    names: Iterable[str] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """Hessian of a loss, summed over the examples, in the parameters: one backward pass a row, (P, P)."""
    # loss (C,)
    model, parameters = _tracked_copy(model, names)
    size = sum(parameter.numel() for parameter in parameters)
    total = torch.zeros(size, size, dtype=torch.float64)
    for example, target in zip(_examples(x), y, strict=True):
        target = target.double() if target.is_floating_point() else target
        value = loss(_forward(model, example, output), target)
        gradient = _gradient(value, parameters, create_graph=True)
        if gradient.requires_grad:
            total += torch.stack([_gradient(gradient[p], parameters) for p in range(size)])
    return total


def ggn_oracle(j: Tensor, output_hessian: Tensor) -> Tensor:
    """Gauss-Newton matrix G = Σᵢ JᵢᵀΛᵢJᵢ, (P, P)."""
    # j (N, C, P), output_hessian (N, C, C)
    return torch.einsum("ncp,ncd,ndq->pq", j.double(), output_hessian.double(), j.double())


def fisher_oracle(
    j: Tensor, f: Tensor, likelihood: Literal["categorical", "gaussian"], variance: float = 1.0
) -> Tensor:
    """Fisher information F = Σᵢ E[ssᵀ] of the score s = ∇ log p(y | f(xᵢ)) under the model's own labels."""
    # j (N, C, P), f (N, C)
    # The expectation is a finite sum: over the C classes with their probabilities, or, for a Gaussian
    # likelihood, over the 2C points f ± √(C σ²) e_c, which have its mean and its covariance.
    j, f = j.double(), f.double()
    classes = f.shape[1]
    identity = torch.eye(classes, dtype=torch.float64)
    total = torch.zeros(j.shape[2], j.shape[2], dtype=torch.float64)
    for i in range(j.shape[0]):
        if likelihood == "categorical":
            weights = torch.softmax(f[i], 0)
            # gradient of log p(y = c | f) in f: e_c - p
            scores = identity - weights
        elif likelihood == "gaussian":
            weights = torch.full((2 * classes,), 0.5 / classes, dtype=torch.float64)
            # gradient of log N(y | f, s2 I) in f: (y - f) / s2
            scores = torch.cat([identity, -identity]) * math.sqrt(classes * variance) / variance
        else:
            raise ValueError(f"likelihood is {likelihood!r}. Expected: 'categorical' or 'gaussian'.")
        for weight, score in zip(weights, scores, strict=True):
            gradient = j[i].T @ score
            total += weight * torch.outer(gradient, gradient)
    return total


def _double_copy(model: nn.Module) -> nn.Module:
    """A copy in float64 and eval mode."""
    return copy.deepcopy(model).double().eval()


def _tracked_copy(model: nn.Module, names: Iterable[str] | None) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy that tracks only the named parameters, and these in the order of named_parameters()."""
    model = _double_copy(model)
    everything = dict(model.named_parameters())
    wanted = set(names) if names is not None else {n for n, p in everything.items() if p.requires_grad}
    unknown = sorted(wanted - everything.keys())
    if unknown:
        raise KeyError(f"names holds {unknown}. Expected: names out of {sorted(everything)}.")
    for name, parameter in everything.items():
        parameter.requires_grad_(name in wanted)
    return model, [parameter for name, parameter in everything.items() if name in wanted]


def _examples(x: Any) -> Iterator[Any]:
    """The examples of a batch one by one, each a batch of one."""
    named = isinstance(x, Mapping)
    parts = list(x.values()) if named else list(x) if isinstance(x, (tuple, list)) else [x]
    sizes = [part.shape[0] for part in parts if isinstance(part, Tensor) and part.ndim]
    if not sizes:
        raise TypeError(f"x is {type(x).__name__}. Expected: a tensor (N, ...), or a tuple or dict of them.")
    for i in range(sizes[0]):
        picked = [_pick(part, i, sizes[0]) for part in parts]
        yield dict(zip(x, picked, strict=True)) if named else picked


def _pick(part: Any, i: int, n: int) -> Any:
    """Example i of one part of the input, in float64 if it is real; what has no n examples stays whole."""
    if not isinstance(part, Tensor):
        return part
    chosen = part[i : i + 1] if part.ndim and part.shape[0] == n else part
    return chosen.detach().double() if part.is_floating_point() else chosen


def _forward(model: nn.Module, example: Any, output: Callable[[Any], Tensor] | None) -> Tensor:
    """Outputs (C,) of one example."""
    result = model(**example) if isinstance(example, Mapping) else model(*example)
    if output is not None:
        result = output(result)
    if not isinstance(result, Tensor):
        what = f"the network returned {type(result).__name__}"
        raise TypeError(f"{what}. Expected: a tensor, or output= that turns it into one.")
    return result.reshape(-1)


def _gradient(value: Tensor, parameters: Sequence[nn.Parameter], create_graph: bool = False) -> Tensor:
    """Gradient of a scalar in the parameters, flat (P,); zero where it does not depend on them."""
    if not value.requires_grad:
        return torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    gradients = torch.autograd.grad(
        value, parameters, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def _rows(j: Tensor) -> Tensor:
    """J as a matrix, shape (N C, P), float64."""
    return j.double().reshape(-1, j.shape[-1])


def _least_squares(matrix: Tensor, right: Tensor, driver: str) -> Tensor:
    """The vector v that minimizes |right - matrix v|; "gelsd" also minimizes |v| among several."""
    solution: Tensor = torch.linalg.lstsq(matrix, right[:, None], driver=driver).solution
    return solution[:, 0]


def _ridge_rows(j: Tensor, ridge: float) -> Tensor:
    """The matrix (J, √ρ I), shape (N C + P, P)."""
    identity = torch.eye(j.shape[-1], dtype=torch.float64)
    return torch.cat([_rows(j), math.sqrt(ridge) * identity])


def _left_out(n: int) -> Iterator[tuple[int, list[int]]]:
    """Each index with the list of all the others."""
    for i in range(n):
        yield i, [k for k in range(n) if k != i]
