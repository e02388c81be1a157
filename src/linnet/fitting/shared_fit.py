"""The linear fit by one kernel for all outputs: ``linnet.fit`` with ``solver="shared"``.

    f(x) = f₀(x) + Σᵢ K̄(x, xᵢ) βᵢ,        β = (K̄ + ρI)⁻¹ (t − f₀(X)),        K̄ = 1/M Σ_m J_m J_mᵀ

with J_m the derivatives of M combinations of the C outputs (``combinations.py``). In weights every output has
its own M displacements, f_c = f₀_c + Σ_m J_m δ_mc: exact for the kernel K̄ ⊗ I, which stands for the tangent
kernel of all outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import CRITERIA
from linnet.fitting.combinations import combined
from linnet.fitting.evaluation import base_outputs
from linnet.fitting.export import exported_directions
from linnet.fitting.fit_files import write_fit
from linnet.fitting.fitted import more_data
from linnet.fitting.kernel_fit import KernelFit
from linnet.fitting.merged import Merged
from linnet.fitting.record import Record
from linnet.fitting.remarks import after_change
from linnet.fitting.ridge_choice import chosen_ridge
from linnet.linear.directions import Directions
from linnet.linear.dual import DualSystem
from linnet.linear.targets import Targets
from linnet.memory import Plan
from linnet.params import choice, number
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram, gram_and_own, own_kernels
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.linearized import Linearized


@dataclass(frozen=True, eq=False)
class SharedKernel:
    """K̄ of a network between any samples."""

    module: Linearized  # the linearized network, at δ = 0
    weights: Tensor  # V, (C, M), float64
    memory: str | int | None = None  # budget of kernels formed later

    @cached_property
    def function(self) -> Functional:
        """The M combinations of the outputs."""
        return combined(self.module.function, self.weights)

    @property
    def heads(self) -> int:
        """M."""
        return self.weights.shape[1]

    def cross(self, x1: Inputs, x2: Inputs | None = None) -> Tensor:
        """K̄(x1, x2), (N, M), float64; of x1 with itself by default."""
        return gram(self.function, x1, x2, form="trace", memory=self.memory).double() / self.heads

    def cross_and_own(self, x1: Inputs, x2: Inputs) -> tuple[Tensor, Tensor]:
        """K̄(x1, x2), and of every example of x1 with itself, with one pass over x1."""
        found, own = gram_and_own(self.function, x1, x2, self.memory)
        return found.double() / self.heads, own / self.heads

    def own(self, x: Inputs) -> Tensor:
        """K̄(x_i, x_i), (N,), float64."""
        blocks = own_kernels(self.function, x, self.memory)
        return blocks.diagonal(dim1=1, dim2=2).double().sum(1) / self.heads

    def plan(self, outputs: int, copies: Sequence[str] = ()) -> Plan:
        """The memory of the fit in weights."""
        return Directions.plan(self.function, self.heads, outputs, self.memory, copies)

    def directions(self, train: Inputs, system: DualSystem) -> Directions:
        """The displacements of every output, (M, P, C)."""
        beta = system.beta.double()
        return Directions(self.function, self.heads, train, beta, 1 / self.heads, self.memory)


class SharedFit(KernelFit):
    """A linear fit by one kernel for all outputs. ``linnet.fit`` with ``solver="shared"`` makes it.

    Args:
        kernel: The kernel.
        x: Training inputs, N examples.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        kernel: The kernel: the network and the combinations of its outputs.
        x: Training inputs.
        system: The solved equations.
        record: What was chosen and why; ``record.reasons["outputs"]`` says how far the kernel is from that of
            each output.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
        >>> x = torch.randn(30, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x, torch.arange(30) % 6), solver="shared")
        >>> fit.system.kernel.shape, fit.predict(x).shape, fit.loo().shape, fit.forget([0]).n
        (torch.Size([30, 30]), torch.Size([30, 6]), torch.Size([30, 6]), 29)
    """

    def __init__(
        self, kernel: SharedKernel, x: Inputs, targets: Targets, system: DualSystem, record: Record
    ) -> None:
        super().__init__(x, targets, system, record)
        self.kernel = kernel

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def module(self) -> Linearized:
        """The linearized network, at δ = 0: every output has displacements of its own."""
        return self.kernel.module

    @property
    def combinations(self) -> Tensor:
        """V, (C, M), whose columns are the combinations of outputs that make the kernel."""
        return self.kernel.weights

    @property
    def memory(self) -> str | int | None:
        """Budget of kernels formed later."""
        return self.kernel.memory

    @memory.setter
    def memory(self, budget: str | int | None) -> None:
        self.kernel = replace(self.kernel, memory=budget)

    # -- the kernel ------------------------------------------------------------------------------

    @property
    def _function(self) -> Functional:
        """The network."""
        return self.module.function

    def _start(self, x: Inputs) -> Tensor:
        """f₀(x)."""
        return base_outputs(self.module, x).double()

    def _cross(self, x: Inputs) -> Tensor:
        """K̄(x, X), (T, N)."""
        return self.kernel.cross(x, self.x)

    def _own(self, x: Inputs) -> Tensor:
        """K̄(x_i, x_i), (T,)."""
        return self.kernel.own(x)

    def _cross_and_own(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """K̄(x, X) and K̄(x_i, x_i), with one pass over x."""
        return self.kernel.cross_and_own(x, self.x)

    def _square(self, x: Inputs) -> Tensor:
        """K̄(x, x), (T, T)."""
        return self.kernel.cross(x)

    def _weights_plan(self) -> Plan:
        """The memory of the displacements of every output."""
        return self.kernel.plan(self.system.c)

    def _by_weights(self) -> Callable[[Inputs], Tensor]:
        """F₀ and the displacements of every output."""
        found = self.kernel.directions(self.x, self.system)
        return lambda x: self._start(x) + found.moved(x)

    def _made(self, x: Inputs, targets: Targets, system: DualSystem, record: Record) -> SharedFit:
        """A fit of another system with the same kernel."""
        return SharedFit(self.kernel, x, targets, system, record)

    def _answerable(self, ridges: Tensor) -> Tensor:
        """Ridges of a path, or an error where rounding leaves nothing of the solution."""
        return answerable(self, ridges)

    def ridges(self) -> Tensor:
        """Nine decades of ridges around the mean of the kernel's diagonal, and the fit's own, (R,)."""
        grid = self.system.spectrum.grid()
        found: Tensor = torch.cat([grid, grid.new_tensor([self.ridge])]).unique()
        return found

    # -- changes ---------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, data: Any, ridge: float | str | None = None) -> SharedFit:
        """The fit with more training examples, without refitting.

        Args:
            data: New examples: an (x, y) pair, a Dataset, a DataLoader or batches.
            ridge: ρ, or "loo", "gcv", "evidence": chosen again on all examples; kept by default.

        Returns:
            A new fit on all examples, old ones first.

        Raises:
            DataError: If the data are empty, not finite, or have labels out of range.
            InputError: If ``ridge`` is neither a positive number nor a criterion.
            NumericalError: If rounding leaves less than two digits of it.
        """
        start = time.perf_counter()
        if isinstance(ridge, str):
            choice("ridge", ridge, CRITERIA, remedy='try ridge="loo"')
        elif ridge is not None:
            number("ridge", ridge, above=0, remedy='pass ρ > 0, or "loo", "gcv" or "evidence"')
        x, new = more_data(self, self.module.function, data)
        made = self._more(x, new, start)
        if ridge is not None:
            made._resolve(ridge)
        return sound_change(made)

    def _resolve(self, ridge: float | str) -> None:
        """Take another ridge, or choose it."""
        what = self.record.reasons["change"]
        if isinstance(ridge, str):
            path = self.system.spectrum.path(
                self.system.spectrum.grid(), self.classes is not None, self.targets
            )
            taken = chosen_ridge(path, ridge, self._targets)
            self.system = self.system.at(taken.ridge)
            self.record.reasons["change"] = f"{what}; the ridge chosen by {ridge}"
            self.record = replace(self.record, criterion=ridge, noise_factor=taken.noise_factor)
        else:
            self.system = self.system.at(ridge)
            self.record.reasons["change"] = f"{what}; the ridge set to {float(ridge):.4g}"
            self.record = replace(self.record, noise_factor=1.0)

    def _changed(self, x: Inputs, targets: Targets, system: DualSystem, what: str, start: float) -> SharedFit:
        """A new fit of another system with the same kernel, and the remarks of its own examples."""
        made = super()._changed(x, targets, system, what, start)
        warnings = after_change(self.record.warnings, self.module.model, x, targets, likely=False)
        made.record = replace(made.record, warnings=warnings)
        return made

    # -- elsewhere -------------------------------------------------------------------------------

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module."""
        if variance:
            raise InputError(
                "variance=True of a fit by one kernel for all outputs",
                expected="a fit whose outputs share their weights, as of the other solvers",
                remedy="export without variance=, and keep the fit in linnet, whose predictive() has it",
            )
        kernel = self.kernel
        return exported_directions(
            self.module.function,
            kernel.plan(self.system.c, ["the same in the module"]),
            lambda: kernel.directions(self.x, self.system).by_output(),
            kernel.weights.T.to(kernel.function.device, kernel.function.dtype),
            like,
        )

    def _merged(self, x: Inputs) -> Merged:
        """Refused: no weights of the network have the fit's outputs."""
        raise InputError(
            "merge() of a fit by one kernel for all outputs",
            expected="a fit whose outputs share their weights: here every output has weights of its own",
            remedy="fit with another solver, or export() the linear model",
        )

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Size, combinations, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        return {**self._summary(self.module.space.dim), "combinations": self.kernel.heads}

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load_fit`` reads.
        """
        system = self.system
        tensors = {"kernel": system.kernel, "beta": system.beta, "residual": system.residual}
        solved = tensors | {"combinations": self.kernel.weights}, {"kind": "shared", "ridge": system.ridge}
        told = {"loss": "squared", "record": asdict(self.record)}
        return write_fit(
            directory, self.module.function, (self.x, self._targets), solved, told, self.held_out
        )


def restored_shared(
    function: Functional, x: Inputs, targets: Targets, state: tuple[dict[str, Tensor], dict[str, Any]],
    record: Record,
) -> SharedFit:  # fmt: skip
    """The fit that ``SharedFit.save`` wrote."""
    tensors, how = state
    system = DualSystem(tensors["kernel"], tensors["residual"], how["ridge"], beta=tensors["beta"])
    return SharedFit(SharedKernel(Linearized(function), tensors["combinations"]), x, targets, system, record)
