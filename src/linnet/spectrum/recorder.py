"""Records the evolution of the kernel over training, from any training loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linnet.distributed import apart
from linnet.errors import InputError
from linnet.memory import parse_bytes
from linnet.params import integer
from linnet.params import path as checked_path
from linnet.shown import Record, Shown
from linnet.spectrum.eigenfunctions import Eigenfunctions, eigenfunctions
from linnet.spectrum.kernel_matrix import (
    FunctionValues,
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
from linnet.tangent.door import taken, tensorize
from linnet.tangent.gather import gather_data, owned
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
        every: ``note`` passes over steps that are not multiples of this.
        keep: True to keep every Gram matrix in memory, or a folder to keep them in files, one for each
            training: files of other weights are refused; False for the first and the last only.
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
        every: int = 1,
        keep: bool | str | Path = False,
        memory: str | int | None = None,
    ) -> None:
        check_kernel(form)
        for name, value in (("k", k), ("every", every)):
            integer(name, value)
        x = tensorize(x)
        check_examples(x)
        parse_bytes(memory)
        self.y: Tensor | None = None
        if y is None:
            self.x: Inputs = owned(x)
        else:
            self.x, self.y = gather_data((x, y))
        self.k, self.form, self.every, self.memory = k, form, every, memory
        self.folder = None if isinstance(keep, bool) else checked_path("keep", keep)
        if self.folder is not None and not self.folder.is_dir():
            raise InputError(
                f"keep={str(keep)!r} is no folder", "True, False or an existing folder", "create the folder"
            )
        self.keep = bool(keep)
        self.notes: list[KernelNote] = []
        self._grams: dict[int, Tensor] = {}
        self._first: Tensor | None = None
        self._last: Tensor | None = None

    def _shown(self) -> dict[str, Any]:
        known = {"examples": batch_size(self.x), "form": self.form, "every": self.every, "kept": self.keep}
        return {**known, "notes": len(self.notes), "last": self.notes[-1] if self.notes else None}

    @property
    def plot(self) -> RecorderPlots:
        """Plots, which take matplotlib axes: ``recorder.plot.history(ax)``."""
        return RecorderPlots(self)

    @apart()  # training may be on one process, or on batches of its own
    @in_exact_mode
    def note(self, model: Linearized | nn.Module, step: int) -> KernelNote | None:
        """Record the kernel of a network as it is now.

        Args:
            model: The network in training, or a linearization.
            step: The iteration or epoch; larger than at the last note.

        Returns:
            What was recorded, or None for a step that is passed over.

        Raises:
            InputError: If the step is no integer or not larger than the last, or y or k do not fit.
        """
        integer("step", step, 0, remedy="pass the number of the iteration or epoch")
        if step % self.every:
            return None
        if self.notes and step <= self.notes[-1].step:
            raise InputError(
                f"step is {step} after a note at step {self.notes[-1].step}",
                expected="steps that increase",
                remedy="use one Recorder for each run",
            )
        function = tangent_of(model)
        x = taken(function, self.x)
        shape = check_inputs(function, x)
        targets = None
        if self.y is not None:
            targets = function_values(self.y.to(function.device), shape, self.form, function.dtype)
        file = None if self.folder is None else self.folder / f"kernel-{step}.npy"
        matrix = gram(Linearized(function), x, form=self.form, memory=self.memory, file=file, progress=False)
        options: dict[str, Any] = {"gram": matrix, "memory": self.memory, "progress": False}
        pairs = eigenfunctions(Linearized(function), x, self.k, self.form, **options)
        found = self._measured(step, matrix, pairs, targets)
        self._first = matrix if self._first is None else self._first
        self._last = matrix
        if self.keep:
            self._grams[step] = matrix
        self.notes.append(found)
        return found

    def _measured(
        self, step: int, matrix: Tensor, pairs: Eigenfunctions, targets: FunctionValues | None
    ) -> KernelNote:
        """All measures of one kernel."""
        n, flat = batch_size(self.x), flat_gram(matrix)
        first = matrix if self._first is None else self._first
        last = matrix if self._last is None else self._last
        distances = {"first": kernel_distance(first, matrix), "previous": kernel_distance(last, matrix)}
        centered = {"first": centered_alignment(first, matrix)}
        alphas: list[float] = []
        shares: list[float] = []
        if targets is not None:
            f = targets.flat.to(flat)
            # α(f) = fᵀK f / N²
            alphas = ((f * (flat @ f)).sum(0, dtype=torch.float64) / n**2).tolist()
            assert self.y is not None
            shares = pairs.energy_concentration(self.y).reshape(-1).tolist()
            centered["targets"] = centered_alignment((f @ f.T).reshape(matrix.shape), matrix)
        trace = float(flat.diagonal().sum(dtype=torch.float64)) / n
        return KernelNote(step, trace, pairs.values.tolist(), distances, alphas, shares, centered)

    @property
    def grams(self) -> dict[int, Tensor]:
        """Gram matrices (N, N) by step, where they were kept."""
        return dict(self._grams)

    @apart()
    def distances(self) -> Tensor:
        """Kernel distances between all moments.

        Returns:
            (S, S), zero on the diagonal, in the order of ``notes``.

        Raises:
            InputError: If the Gram matrices were not kept.

        Source:
            Fort et al., NeurIPS 2020, figure 5.
        """
        if len(self._grams) != len(self.notes):
            raise InputError(
                "keep=False: the Gram matrices are gone", "keep=True or a folder", "pass keep=True"
            )
        kept = list(self._grams.values())
        table = torch.zeros(len(kept), len(kept), dtype=torch.float64)
        for i, a in enumerate(kept):
            for j in range(i):
                table[i, j] = table[j, i] = kernel_distance(a, kept[j])
        return table

    def to_dict(self) -> dict[str, list[Any]]:
        """Everything recorded as columns, for JSON or a table.

        Returns:
            One list for each field of ``KernelNote``.
        """
        rows = [asdict(note) for note in self.notes]
        return {name: [row[name] for row in rows] for name in KernelNote.__dataclass_fields__}
