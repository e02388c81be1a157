"""Linearity of a task for a network: statistics of the kernel, the labels and the fit.

Everything is measured on training data alone: the spectrum of the kernel, how much of the labels its leading
directions hold, how well they are aligned with it, what the fit predicts of each example from all the others,
and how far the network with the fitted weights is from its linear model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.distributed import shared_call
from linnet.errors import DataError, InputError, NumericalError
from linnet.fitting.linear_fit import LinearFit
from linnet.fitting.solved_fit import unweighed
from linnet.linalg.factorize import cholesky
from linnet.linear.kernel_system import KernelSystem
from linnet.memory import parse_bytes
from linnet.params import integer, optional
from linnet.shown import Record
from linnet.spectrum.alignment import alignment
from linnet.spectrum.eigenfunctions import eigenfunctions
from linnet.spectrum.kernel_matrix import check_inputs, flat_gram, gram
from linnet.spectrum.plots import TaskPlots
from linnet.tangent.batch import Inputs, batch_size, split, take
from linnet.tangent.modes import in_exact_mode

# Rules of thumb: the skill of leave-one-out (``HeldOut.skill``) from which a fit does well, and below
# which it does poorly. In experiments/kernels/verdict.py the skill on test samples was 0.45 to 0.83 for the
# tasks in between and at most 0.51 for those below; no task there was above.
WELL, POORLY = 0.75, 0.35
NEAR, FAR = 0.1, 1.0  # relative linearity gaps: as good as the same network, and another network
OPEN = (
    "These numbers do not tell whether plain fine-tuning would do better still: linnet adapt compares the "
    "two on test samples."
)


@dataclass(frozen=True, repr=False)
class Verdict(Record):
    """A judgment in words.

    Args:
        level: ``"well"``, ``"partly"``, ``"poorly"`` or ``"unknown"``.
        text: One sentence.
        reasons: Sentences with the numbers that it rests on.

    Example:
        >>> Verdict("well", "It is likely to do well.", ("Leave-one-out explains 90 %.",)).level
        'well'
    """

    level: str
    text: str
    reasons: tuple[str, ...]


def _percent(share: float) -> str:
    """A share as text."""
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.2g} %"


TOP = 50  # leading eigenvectors, as many as in table 1 of Ortiz-Jimenez et al. 2021
FULL = 1500  # a kernel of at most so many rows is decomposed in full
MOST_ROWS = 6000  # a kernel of more is taken on some of the examples, so that the answer takes seconds
BATCH = 128  # examples predicted at once


@dataclass(frozen=True, repr=False)
class LabelEnergy(Record):
    """The kernel's leading spectrum, and where in it the labels lie.

    Args:
        values: Leading eigenvalues σ_j of the Gram matrix K (k,), decreasing; sums over parameters.
        shares: Share of the labels' squared norm on the first 1, ..., k eigenvectors (k,), increasing.
        top: K, the number of leading eigenvectors requested; there may be more.
        samples: Examples on which the kernel was taken.
        rows: Size of its matrix, samples times outputs.
        trace: Sum of all eigenvalues.

    Example:
        >>> energy = LabelEnergy(torch.tensor([3.0, 1.0]), torch.tensor([0.8, 0.9]), 2, 4, 4, 4.5)
        >>> float(energy.values.sum()) <= energy.trace
        True
    """

    values: Tensor
    shares: Tensor
    top: int
    samples: int
    rows: int
    trace: float

    @property
    def share(self) -> float:
        """Share of the labels' squared norm on the ``top`` eigenvectors."""
        return float(self.shares[self.top - 1])

    @property
    def fair(self) -> float:
        """That share for random labels."""
        return self.top / self.rows


@dataclass(frozen=True, repr=False)
class HeldOut(Record):
    """Leave-one-out predictions of the training examples.

    Args:
        explained: 1 − (squared leave-one-out error) / (that of the mean of the others); 1 is perfect, 0 is
            no better than the mean, and it can be negative.
        accuracy: Share of right classes; None for a regression.
        chance: Share of the most frequent class; None for a regression.

    Example:
        >>> HeldOut(0.7, accuracy=0.95, chance=0.5).accuracy
        0.95
    """

    explained: float
    accuracy: float | None = None
    chance: float | None = None

    @property
    def skill(self) -> float:
        """(accuracy − chance) / (1 − chance) for classes, the share explained for values."""
        if self.accuracy is None or self.chance is None:
            return self.explained
        return (self.accuracy - self.chance) / (1 - self.chance)

    def __str__(self) -> str:
        """Leave-one-out in words."""
        if self.accuracy is not None and self.chance is not None:
            return (
                f"Predicted from all the others, {_percent(self.accuracy)} of the training samples get the "
                f"right class; always naming the most frequent one would get {_percent(self.chance)}."
            )
        if self.explained <= 0:
            return "Predicted from all the others, training samples come out no better than their mean."
        return (
            f"Predicted from all the others, the training samples' values are explained to "
            f"{_percent(self.explained)} of their variance."
        )


@dataclass(frozen=True, repr=False)
class LinearityGap(Record):
    """Distance of the network with the fitted weights from its linear model: E‖f − f_lin‖² / E‖f_lin − f₀‖².

    Args:
        training: The root of that ratio on training examples.
        validation: On other examples; None without.
        agreement: Share of examples (other ones where there are any) on which both name the same class;
            None for a regression.

    Example:
        >>> LinearityGap(0.02).validation is None
        True
    """

    training: float
    validation: float | None = None
    agreement: float | None = None

    def __str__(self) -> str:
        """The gap in words."""
        start = f"The network with the fitted weights is {_percent(self.training)} away from its linear model"
        if self.training < NEAR:
            return (
                f"{start}: the task lies within its linear range, and plain fine-tuning could move there too."
            )
        if self.training < FAR:
            return f"{start}: use the linear model for predictions, not the network with those weights."
        return (
            f"{start}, farther than the fit moved it: only the linear model can be used, not those weights."
        )


@dataclass(frozen=True, repr=False)
class TaskLinearity(Record):
    """Result of ``task_linearity``: statistics of the kernel, the labels and the fit.

    Args:
        energy: The leading spectrum, and the labels' share of it.
        alignment: α(y) = ‖E J(x)ᵀy(x)‖² of the labels with their mean removed.
        lift: That alignment over the mean of random labels of the same norm, their mean removed too.
        effective_dimension: Σ_j σ_j / (σ_j + ρ).
        ridge: ρ of the fit.
        held_out: Leave-one-out; None where the fit has no kernel.
        gap: Of the fitted weights.

    Example:
        >>> energy = LabelEnergy(torch.tensor([3.0, 1.0]), torch.tensor([0.8, 0.9]), 2, 4, 4, 4.5)
        >>> found = TaskLinearity(energy, 2.0, 8.0, 1.5, 0.1, HeldOut(0.7, 0.95, 0.5), LinearityGap(0.05))
        >>> round(found.concentration, 3), found.verdict.level
        (0.949, 'well')
    """

    energy: LabelEnergy
    alignment: float
    lift: float
    effective_dimension: float
    ridge: float
    held_out: HeldOut | None
    gap: LinearityGap

    @property
    def plot(self) -> TaskPlots:
        """Plots, which take matplotlib axes: ``task.plot.energy(ax)``."""
        return TaskPlots(self)

    @property
    def concentration(self) -> float:
        """‖Φ_K y‖₂ / ‖y‖₂ on the K leading eigenvectors, as in table 1 of Ortiz-Jimenez et al. (2021)."""
        return math.sqrt(self.energy.share)

    @property
    def verdict(self) -> Verdict:
        """Whether linear fine-tuning is likely to do well, in words, with the numbers it rests on."""
        held = self.held_out
        said = [str(part) for part in (held, self._aligned(), self.gap, OPEN) if part is not None]
        if held is None:
            level, text = "unknown", (
                "Whether linear fine-tuning does well cannot be said without leave-one-out, which needs the "
                "kernel of all samples; the alignment is the only evidence."
            )  # fmt: skip
        elif held.skill >= WELL:
            level, text = "well", "Linear fine-tuning is likely to do well on this task."
        elif held.skill >= POORLY:
            level = "partly"
            text = "Linear fine-tuning is likely to learn a good part of this task, but not all of it."
        else:
            level = "poorly"
            text = "Linear fine-tuning is likely to do poorly on this task with these samples."
        return Verdict(level, text, tuple(said))

    def _aligned(self) -> str:
        """Alignment in words."""
        lift = f"{self.lift:.2g}" if self.lift < 100 else f"{self.lift:.0f}"
        side = "better than" if self.lift > 1.2 else "worse than" if self.lift < 0.8 else "about as well as"
        return (
            f"The labels are aligned with the kernel {side} random labels ({lift} times their alignment); "
            f"its leading directions hold {_percent(self.energy.share)} of them, and of random ones "
            f"{_percent(self.energy.fair)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON.

        Returns:
            Nested dictionaries of plain values.
        """
        plain = asdict(self)
        plain["energy"]["values"] = self.energy.values.tolist()
        plain["energy"]["shares"] = self.energy.shares.tolist()
        return {**plain, "concentration": self.concentration, "verdict": asdict(self.verdict)}


@shared_call("linnet.spectrum.task_linearity")
@in_exact_mode
def task_linearity(
    fit: LinearFit,
    validation: Inputs | None = None,
    k: int | None = None,
    *,
    samples: int | None = None,
    memory: str | int | None = None,
    progress: bool | None = None,
) -> TaskLinearity:
    """Test how well a linear model suits a task, from a linear fit of it.

    Labels are taken with their mean removed (classes as one-hot vectors), so that what a constant explains
    does not count.

    Args:
        fit: A linear fit, best with a ridge that was chosen (``ridge="loo"``).
        validation: Inputs of other examples, for the gap there; no labels are needed.
        k: How many leading eigenvectors the concentration counts; by default 50, or a fifth of all where
            that is fewer. More are kept where that costs little.
        samples: Examples to take the kernel on, drawn at random; by default all of them where the fit holds
            the kernel or it is small, else as many as the memory and a few seconds allow. The ridge is
            scaled to them, as the eigenvalues are.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        progress: Show progress; by default only when it takes over two seconds.

    Returns:
        Spectrum, energy and alignment of the labels, leave-one-out, linearity gap and a verdict.

    Raises:
        DataError: If all labels are the same, or ``validation`` holds NaN.
        InputError: If ``fit`` is no linear fit of the squared loss, or ``k`` or ``samples`` is out of range.
        MemoryBudgetError: If the memory is too small.
        NumericalError: If the tangent kernel is the same for all examples.

    Source:
        Ortiz-Jimenez, Moosavi-Dezfooli, Frossard, NeurIPS 2021, lemma 1 and supplement E.2.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(40, 2)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1] + x[:, 1:]), ridge="loo")
        >>> found = task_linearity(fit, k=5)
        >>> found.held_out.explained > 0.9, found.verdict.level
        (True, 'well')
    """
    _check_fit(fit)
    if validation is not None and batch_size(validation):
        check_inputs(fit.module.function, validation)
    y = _labels(fit)
    n, c = y.shape
    index = _drawn(fit, n, c, samples, memory)
    matrix = _gram(fit, index, memory, progress)
    rows = matrix.shape[0]
    k = min(TOP, max(1, rows // 5)) if k is None else k
    integer("k", k, 1, rows, "pass at most the rows of the kernel")
    module = fit.module
    part = fit.x if len(index) == n else take(fit.x, index)
    count = rows if rows <= FULL else k
    four = matrix.reshape(len(index), c, len(index), c)
    options: dict[str, Any] = {"gram": four, "memory": memory, "progress": progress}
    found = eigenfunctions(module, part, count, "full", **options)
    f = y[index].reshape(-1, 1).to(found.vectors)
    # (u_jᵀ y)² / ‖y‖²
    shares = ((found.vectors.reshape(rows, -1).T @ f)[:, 0].square() / f.square().sum()).cumsum(0)
    trace = float(matrix.diagonal().sum(dtype=torch.float64))
    energy = LabelEnergy(
        (found.values * len(index)).clamp_min(0).double().cpu(), shares.clamp(max=1).double().cpu(),
        k, len(index), rows, trace,
    )  # fmt: skip
    target = y[:, :, None] if c > 1 else y
    alpha = float(alignment(module, (fit.x, target), memory=memory, progress=progress).reshape(()))
    # fᵀK f / fᵀf over its mean for random f
    lift = alpha * n**2 / float(y.double().square().sum()) / _fair(four)
    dimension = _dimension(energy, matrix, fit.ridge * len(index) / n)
    return TaskLinearity(energy, alpha, lift, dimension, fit.ridge, _held_out(fit), _gap(fit, validation))


def _check_fit(fit: Any) -> None:
    """Raise unless it is a linear fit of the squared loss."""
    if isinstance(fit, LinearFit) and not fit.system.shared:
        unweighed(fit, "task_linearity")
        return
    raise InputError(
        f"fit is {type(fit).__name__}",
        expected="a LinearFit of the squared loss, whose targets the kernel's directions explain",
        remedy='pass linnet.fit(linnet.linearize(model), (x, y), ridge="loo")',
    )


def _labels(fit: LinearFit) -> Tensor:
    """Targets with their mean removed (N, C); classes one-hot."""
    values = fit.targets
    if fit.labels is not None:
        values = F.one_hot(fit.labels, values.shape[1]).to(values)
    centered = values - values.mean(0)
    if not bool(centered.any()):
        raise DataError("all labels are the same", "labels that differ", "give data of two classes or values")
    return centered


def _drawn(fit: LinearFit, n: int, c: int, samples: int | None, memory: str | int | None) -> Tensor:
    """Examples to take the kernel on, in order."""
    device = fit.module.function.device
    optional(integer, "samples", samples, 2, n, "leave samples= out for all training examples")
    most = n
    if not isinstance(fit.system, KernelSystem):
        # a matrix in float64, its eigenvectors and their workspace
        most = int(math.sqrt(parse_bytes(memory, device) / 40))
        most = max(2, min(n, most // c, MOST_ROWS // c))
    count = min(n, most if samples is None else samples)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count]
    return order.sort().values.to(device)


def _gram(fit: LinearFit, index: Tensor, memory: str | int | None, progress: bool | None) -> Tensor:
    """K on some examples (R, R); that of a dual fit is there already."""
    if isinstance(fit.system, KernelSystem):
        kernel, n, c = fit.system.dual.kernel, fit.n, fit.system.c
        if len(index) == n:
            return kernel
        return kernel.view(n, c, n, c)[index][:, :, index].reshape(len(index) * c, -1)
    part = take(fit.x, index)
    return flat_gram(gram(fit.module, part, form="full", memory=memory, progress=progress)).double()


def _fair(kernel: Tensor) -> float:
    """Mean of fᵀK f / fᵀf over random f of mean zero, for a kernel (N, C, N, C)."""
    n, c = kernel.shape[:2]
    own = kernel.diagonal(dim1=1, dim2=3)  # K of each output (N, N, C)
    trace = own.diagonal(dim1=0, dim2=1).sum(dtype=torch.float64)
    # tr HKH with H = I − 11ᵀ/N for each output
    left = float(trace - own.sum(dtype=torch.float64) / n)
    if left <= n * torch.finfo(kernel.dtype).eps * float(trace):
        raise NumericalError(
            f"the tangent kernel is the same for all {n} examples and explains no difference of labels",
            expected="a network whose derivatives tell the examples apart",
            remedy="check that the units before the last layer are not all off for these inputs",
        )
    return left / ((n - 1) * c)


def _dimension(energy: LabelEnergy, matrix: Tensor, ridge: float) -> float:
    """Σ_j σ_j / (σ_j + ρ), from all eigenvalues or as R − ρ tr (K + ρI)⁻¹."""
    if len(energy.values) == energy.rows:
        return float((energy.values / (energy.values + ridge)).sum())
    damped = matrix.double().clone()
    damped.diagonal().add_(ridge)
    factor = cholesky(damped, "kernel + ridge")
    eye = torch.eye(energy.rows, dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return energy.rows - ridge * float(inverse.square().sum())


def _held_out(fit: LinearFit) -> HeldOut | None:
    """Leave-one-out against the mean of the others."""
    if fit.system.factorized is not fit.system or fit.n < 2:
        return None
    outputs = fit._left_out()
    t = fit.targets.to(outputs)
    # t_i − mean of the others = N / (N − 1) (t_i − mean)
    around = (t - t.mean(0)) * fit.n / (fit.n - 1)
    explained = 1 - float((t - outputs).square().sum() / around.square().sum())
    if fit.labels is None:
        return HeldOut(explained)
    labels = fit.labels.to(outputs.device)
    accuracy = float((outputs.argmax(1) == labels).double().mean())
    return HeldOut(explained, accuracy, float(torch.bincount(labels).max()) / fit.n)


@torch.no_grad()
def _gap(fit: LinearFit, validation: Inputs | None) -> LinearityGap:
    """‖f − f_lin‖ relative to ‖f_lin − f₀‖."""
    training, agreement = _distance(fit, fit.x)
    other = None
    if validation is not None and batch_size(validation):
        other, agreement = _distance(fit, validation)
    return LinearityGap(training, other, None if fit.classes is None else agreement)


def _distance(fit: LinearFit, x: Inputs) -> tuple[float, float]:
    """The relative gap, and the share of examples with the same largest output."""
    function = fit.module.function
    weights = {name: value + fit.delta[name] for name, value in function.theta.items()}
    far = moved = 0.0
    same = 0
    for part in split(x, BATCH):
        f = function.flat(weights, part).double()
        linear = fit.module(part).reshape(f.shape).double()
        base = function.flat(function.theta, part).double()
        far += float((f - linear).square().sum())
        moved += float((linear - base).square().sum())
        same += int((f.argmax(1) == linear.argmax(1)).sum())
    return math.sqrt(far / moved) if moved else 0.0, same / batch_size(x)
