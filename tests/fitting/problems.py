"""Small fitting problems with their dense Jacobians, for tests of the linear fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.fitting import CG, SGD, Dual, Nystrom
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.refusals import refused as refused

ALPHA = 15.0


def real(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def network(inputs: int = 3, hidden: int = 5, outputs: int = 3, seed: int = 0) -> nn.Module:
    """A network with one hidden layer, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    return model.double()


@dataclass(frozen=True)
class Problem:
    """A network, training and test data, and everything dense about them."""

    model: nn.Module
    x: Tensor
    y: Tensor  # classes (N,) or targets (N, C)
    x_test: Tensor
    t: Tensor  # targets (N, C)
    f0: Tensor
    f0_test: Tensor
    j: Tensor
    j_test: Tensor

    @property
    def lin(self) -> Any:
        """A fresh linearization."""
        return linnet.linearize(self.model)

    @property
    def kernel(self) -> Tensor:
        """K (N·C, N·C)."""
        rows = self.j.flatten(0, 1)
        return rows @ rows.T

    @property
    def residual(self) -> Tensor:
        """t − f₀, flat (N·C,)."""
        return (self.t - self.f0).reshape(-1)

    def fit(self, **options: Any) -> Any:
        """A fit; conjugate gradients run far enough to be compared exactly."""
        if options.get("solver") == "cg":
            options = {"tolerance": 1e-13, **options}
        return linnet.fit(self.lin, (self.x, self.y), **fit_options(**options))


def fit_options(**options: Any) -> dict[str, Any]:
    """Arguments of ``linnet.fit`` with the settings of its solver side by side with the others."""
    settings = {key: options.pop(key) for key in SETTINGS if key in options}
    if settings or "solver" in options:
        options["solver"] = solver_of(options.get("solver", "auto"), **settings)
    return options


SETTINGS = ("file", "tolerance", "max_steps", "rank", "preconditioner")


def solver_of(name: str, rank: int = 0, **settings: Any) -> Any:
    """A solver by its name, with those of the settings that it has."""
    if rank:
        settings["preconditioner"] = Nystrom(rank)
    if name == "dual":
        return Dual(**{key: value for key, value in settings.items() if key in ("file", "max_steps")})
    if name in ("cg", "sgd"):
        return (CG if name == "cg" else SGD)(**settings)
    return name  # a solver that is chosen has settings of its own


def problem(
    n: int = 7, outputs: int = 3, classes: bool = True, tests: int = 4, seed: int = 0, hidden: int = 5
) -> Problem:
    """A problem of any size; every class occurs."""
    model = network(3, hidden, outputs, seed)
    x, x_test = real(n, 3, seed=seed + 1), real(tests, 3, seed=seed + 2)
    if classes:
        y = (torch.arange(n) * 2) % outputs if outputs % 2 else torch.arange(n) % outputs
        t = torch.zeros(n, outputs, dtype=torch.float64)
        t[torch.arange(n), y] = ALPHA
    else:
        t = real(n, outputs, seed=seed + 3)
        y = t
    f0, f0_test = output_oracle(model, x), output_oracle(model, x_test)
    return Problem(
        model, x, y, x_test, t, f0, f0_test, jacobian_oracle(model, x), jacobian_oracle(model, x_test)
    )


def near(actual: Tensor, expected: Tensor, relative: float = 1e-10) -> None:
    """Equal up to a share of the largest expected entry, in shape too."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    scale = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual.detach().double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= relative * scale, f"relative error {error / scale if scale else error:.2e}"


def flat(params: dict[str, Tensor]) -> Tensor:
    """Parameters as one vector, in their own order."""
    return torch.cat([value.reshape(-1) for value in params.values()])


def rho_for(p: Problem, share: float = 0.1) -> float:
    """A ridge that matters: a share of the mean of K's diagonal."""
    return share * p.kernel.diagonal().mean().item()


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that a call holds at once, by the profiler's record of allocations."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = call()
    del kept
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
