"""Records the evolution of the kernel over training, from any training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distributed import apart
from linnet.memory import parse_bytes
from linnet.params import integer
from linnet.shown import Record, Shown
from linnet.spectrum.eigenfunctions import eigenfunctions
from linnet.spectrum.kernel_matrix import (
    centered_alignment,
    check_inputs,
    check_kernel,
    flat_gram,
    function_values,
    gram,
    kernel_distance,
    tangent_of,
)
from linnet.spectrum.plots import RecorderPlots
from linnet.tangent.batch import Inputs, batch_size, check_examples
from linnet.tangent.data import Data, owned
from linnet.tangent.inputs import tensorize
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.rules import Form


@dataclass(frozen=True, repr=False)
class KernelNote(Record):
    """The kernel at one moment of training; scales are means over the examples.

    Args:
        step: When.
        trace: Σ_j λ_j, the mean of Θ(x, x) over the examples.
        values: Leading λ_j, decreasing.
        distances: Kernel distance from the ``"first"`` and from the ``"previous"`` kernel.
        alignment: α(f) of each target; empty without targets.
        concentration: ‖Φ_k f‖ / ‖f‖ of each target on the leading eigenvectors; empty without targets.
        centered: Centered alignment with the ``"first"`` kernel, and with the ``"targets"`` if there are any.

    Example:
        >>> KernelNote(0, 2.0, [1.5, 0.5], {"first": 0.0, "previous": 0.0}).trace
        2.0
    """

    step: int
    trace: float
    values: list[float]
    distances: dict[str, float]
    alignment: list[float] = field(default_factory=list)
    concentration: list[float] = field(default_factory=list)
    centered: dict[str, float] = field(default_factory=dict)


class Recorder(Shown):
    """Follows the tangent kernel of a network through training.

    Each ``note`` linearizes the network where it is, computes the Gram matrix on a fixed set of examples
    and writes down its scale, leading eigenvalues, alignment with the targets, and how far it has moved.
    The network is not touched: mode, gradients, buffers and random state stay as they are.

    Args:
        x: N examples, some hundreds to some thousands; each note costs a Gram matrix.
        y: Targets on them (N,) or (N, T), as for ``alignment``; None to follow the kernel alone.
        k: Number of leading eigenvalues and eigenvectors; N at most.
        form: Which kernel of a network with several outputs.
        memory: Budget of a Gram matrix.

    Attributes:
        notes: What was recorded, in order.

    Raises:
        InputError: If an argument is out of range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 2)
        >>> recorder = Recorder(x, x.prod(1), k=4)
        >>> optimizer = torch.optim.SGD(net.parameters(), 0.1)
        >>> for step in range(3):
        ...     _ = recorder.note(net, step)
        ...     optimizer.zero_grad()
        ...     (net(x)[:, 0] - x.prod(1)).square().mean().backward()
        ...     optimizer.step()
        >>> [note.step for note in recorder.notes], recorder.notes[-1].distances["first"] > 0
        ([0, 1, 2], True)
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor | None = None,
        k: int = 10,
        form: Form = "full",
        memory: str | int | None = None,
    ) -> None:
        check_kernel(form)
        integer("k", k)
        x = tensorize(x)
        check_examples(x)
        parse_bytes(memory)
        self.y: Tensor | None = None
        if y is None:
            self.x: Inputs = owned(x)
        else:
            self.x, self.y = Data.of((x, y)).pair
        self.k, self.form, self.memory = k, form, memory
        self.notes: list[KernelNote] = []
        self._kernels: tuple[Tensor, ...] = ()  # the first and the last

    def _shown(self) -> dict[str, Any]:
        known = {"examples": batch_size(self.x), "form": self.form, "notes": len(self.notes)}
        return {**known, "last": self.notes[-1] if self.notes else None}

    @property
    def plot(self) -> RecorderPlots:
        """Plots, which take matplotlib axes: ``recorder.plot.history(ax)``."""
        return RecorderPlots(self)

    @apart()  # training may be on one process, or on batches of its own
    @in_exact_mode
    def note(self, model: Linearized | nn.Module, step: int) -> KernelNote:
        """Record the kernel of a network as it is now.

        Args:
            model: The network in training, or a linearization.
            step: The iteration or epoch; larger than at the last note.

        Returns:
            What was recorded.

        Raises:
            InputError: If the step is no integer or not larger than the last, or y or k do not fit.
        """
        least = self.notes[-1].step + 1 if self.notes else 0
        step = integer("step", step, least, remedy="pass steps that increase; use one Recorder for each run")
        lin = Linearized(tangent_of(model))
        matrix = gram(lin, self.x, form=self.form, memory=self.memory, progress=False)
        pairs = eigenfunctions(
            lin, self.x, self.k, self.form, gram=matrix, memory=self.memory, progress=False
        )
        first, last = self._kernels or (matrix, matrix)
        n, flat = batch_size(self.x), flat_gram(matrix)
        distances = {"first": kernel_distance(first, matrix), "previous": kernel_distance(last, matrix)}
        centered = {"first": centered_alignment(first, matrix)}
        alphas: list[float] = []
        shares: list[float] = []
        if self.y is not None:
            shape = check_inputs(lin.function, self.x)
            f = function_values(self.y.to(flat.device), shape, self.form, flat.dtype).flat
            # α(f) = fᵀK f / N²
            alphas = ((f * (flat @ f)).sum(0, dtype=torch.float64) / n**2).tolist()
            shares = pairs.energy_concentration(self.y).reshape(-1).tolist()
            centered["targets"] = centered_alignment((f @ f.T).reshape(matrix.shape), matrix)
        trace = float(flat.diagonal().sum(dtype=torch.float64)) / n
        found = KernelNote(step, trace, pairs.values.tolist(), distances, alphas, shares, centered)
        self._kernels = first, matrix
        self.notes.append(found)
        return found
