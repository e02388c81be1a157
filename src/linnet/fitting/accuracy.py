"""Error estimates of a fit from the rounding errors of the kernel's entries.

Let E be the error of K, whose entries are about s √(K_aa K_bb) for one s of the network and its type, and g
that of f₀. To first order, with Rᵢ = (M_ii)⁻¹ M_i· (the identity at i, minus the weights that the other
examples have in the prediction of i) and β₋ᵢ the solution without i,

    error of the leave-one-out output of i:   Rᵢ (E β₋ᵢ + g)
    error of the fit at an input x:           (1, −K(x, X) M) (E β + g)

An input that the fit has not seen is like an example that is left out, so that Rᵢ stands for (1, −K(x, X) M).
For independent errors of the entries the standard deviation of Rᵢ E β is s √(Σ Rᵢₐ² K_aa) √(Σ β_b² K_bb).
The cross-entropy has (I − A_ii Λᵢ)⁻¹ (I + KΛ/ρ)⁻¹ for Rᵢ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from linnet.curvatures.products import root_mean_square
from linnet.distributed import share_sum
from linnet.errors import LinnetError, MemoryBudgetError, ModelError, NumericalError, ProcessGroupError
from linnet.fitting.remarks import rounded
from linnet.linalg.operator import unit_columns
from linnet.linear.dual import DualSystem
from linnet.linear.newton import FactorNewton, KernelNewton, WeightNewton
from linnet.linear.normal_newton import NormalNewton
from linnet.linear.normal_system import NormalSystem
from linnet.linear.system import System
from linnet.memory import parse_bytes
from linnet.number_types import Precision
from linnet.shown import Record
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.functional import Functional, tensors_by_name
from linnet.tangent.gram import gram
from linnet.tangent.linearized import Linearized

# -- rounding --------------------------------------------------------------------------------------
# Rounding errors of a network's outputs and kernel, assumed or measured.

ASSUMED = 16.0  # units of roundoff of a kernel's entry, several times what networks show
PROBED = 4  # examples that are computed in float64 as well


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of a network."""

    kernel: float  # relative error of an entry of the kernel, root mean square
    outputs: float  # error of an output f₀, root mean square
    dtype: torch.dtype  # type in which it is computed
    base: float  # largest output f₀


def assumed_rounding(function: Functional, base: float) -> Rounding:
    """Rounding errors larger than those of most networks."""
    outputs = Precision().eps(function.dtype, function.device)
    kernel = function.precision.eps(function.dtype, function.device)
    return Rounding(ASSUMED * kernel, ASSUMED * outputs * base, function.dtype, base)


@torch.no_grad()
def measured_rounding(
    function: Functional, x: Inputs, base: float, memory: str | int | None = None
) -> Rounding:
    """Rounding errors of a network on a few examples, by computing them in float64 as well."""
    # Kernels are those of the types of `linnet.precision` that the network has.
    low, types = function.source if function.source is not None else function, function.precision
    if low.dtype == torch.float64 and not types.coarser(low.dtype):
        return assumed_rounding(function, base)
    budget = parse_bytes(memory, low.device)
    copies = 3 * sum(t.nbytes for t in tensors_by_name(low.model).values())  # the network, and in float64
    if copies > budget // 2:
        return assumed_rounding(function, base)
    n = batch_size(x)
    # as many whose kernels and their difference, six matrices in float64, take an eighth of the budget
    fitting = math.isqrt(budget // (8 * 6 * 8)) // low.output_shape(x).numel()
    count = max(1, min(PROBED, fitting))
    few = take(x, torch.arange(min(n, count)) * (n // min(n, count)))
    try:
        high = low.in_float64()
        right = gram(high, few, memory=budget // 2)
        near = gram(low.under(types), few, memory=budget // 2)
        size = right.shape[0] * right.shape[1]
        f = high.flat(high.theta, few).double() - low.flat(low.theta, few).double()
    except ProcessGroupError:  # the other processes have it as well
        raise
    except (ModelError, MemoryBudgetError, RuntimeError, TypeError):
        return assumed_rounding(function, base)
    right, near = right.reshape(size, size).double(), near.reshape(size, size).double()
    root = right.diagonal().clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    relative = ((near - right) / (root[:, None] * root)).square().mean().sqrt()
    eps = torch.finfo(low.dtype).eps
    finer = torch.finfo(function.dtype).eps / eps
    kernel, outputs = max(float(relative), eps / 4), max(float(f.square().mean().sqrt()), eps / 4 * base)
    return Rounding(kernel * finer, outputs * finer, function.dtype, base)


TOLERANCE = 1e-3  # error, relative to what the fit changes, up to which a fit is returned as it is
FAMILIAR = 1e-2  # share of f₀ that counts as changed where the targets are what the network gives already
MOVING = 2.0  # times the estimate for the cross-entropy, whose Λ moves along with f
SAFETY = 6.0  # standard deviations: the largest of many errors, and entries that are not independent
SUMMED = 4 * torch.finfo(torch.float32).eps  # of an entry of a Gram matrix of rows in float32, at most
ROWS = 4096  # of J that are multiplied at once
COLUMNS = 128  # of M that an estimate looks at while fitting
ITERATED = 1e-5  # tolerance of conjugate gradients up to which their error counts as rounding's does
SMALL = 512  # equations up to which the kernel of a fit by conjugate gradients is formed to check it
WORST = 1e-2  # and up to which a fit that was changed is returned, with a remark
STEP = 10**0.5  # from one ridge to the next, when the smallest one is looked for


@dataclass(frozen=True, repr=False)
class Accuracy(Record):
    """Estimated largest absolute errors of a fit by rounding, in units of the outputs.

    Args:
        predictions: Of ``predict`` at inputs like the training inputs.
        leave_one_out: Of ``loo``.
        influence: Of ``influence`` on such inputs.
        scale: Size of what the fit changes: root mean square of t − f₀, or of the leave-one-out residuals
            where that is larger; for the cross-entropy of the change of the logits, at least 1.
        rounding: Relative error of an entry of the kernel, as measured or assumed.
        dtype: Type in which the network was computed.

    Example:
        >>> Accuracy(1e-5, 2e-5, 3e-5, scale=1.0, rounding=1e-7, dtype="float32").sound
        True
    """

    predictions: float
    leave_one_out: float
    influence: float
    scale: float
    rounding: float
    dtype: str

    @property
    def sound(self) -> bool:
        """Whether predictions and leave-one-out are right to a thousandth of the scale."""
        return max(self.predictions, self.leave_one_out) <= TOLERANCE * self.scale


def squared_accuracy(
    system: System, rounding: Rounding, index: Tensor, gap: Tensor | None = None
) -> Accuracy:
    """The estimate for a fit of the squared loss."""
    # index (k,), gap (N, C)
    c, beta = system.c, system.beta.double()
    columns = system.columns(index)
    blocks = torch.stack([columns[k, :, i * c : (i + 1) * c] for k, i in enumerate(index.tolist())])
    e = torch.linalg.solve(blocks, beta[index])
    weights = torch.linalg.solve(blocks, columns)
    left = beta.reshape(-1) - torch.einsum("kcn,kc->kn", columns, e)
    off = 0.0 if gap is None else float(weights.norm(dim=2).max()) * float(gap.norm())
    scale = max(root_mean_square(system.residual), root_mean_square(e), FAMILIAR * rounding.base)
    return _accuracy(weights, (beta.reshape(-1), left), system.diagonal(), rounding, (scale, off))


def shared_accuracy(system: DualSystem, rounding: Rounding, index: Tensor) -> Accuracy:
    """The estimate for a kernel that all outputs share: that of the output with the largest error."""
    # index (k,)
    beta, diagonal = system.beta, system.kernel.diagonal().clamp_min(0)
    unit = torch.zeros(system.n, len(index), dtype=beta.dtype, device=beta.device)
    unit[index, torch.arange(len(index), device=beta.device)] = 1
    columns = system.solve(unit).T  # M_i·, (k, N)
    own = columns[torch.arange(len(index), device=beta.device), index]
    e = beta[index] / own[:, None]
    left = beta - columns[:, :, None] * e[:, None]  # (k, N, C)
    sizes = (left.square() * diagonal[:, None]).sum(1)
    worst = sizes.argmax(1)[:, None, None].expand(-1, system.n, 1)
    most = (beta.square() * diagonal[:, None]).sum(0).argmax()
    scale = max(root_mean_square(system.residual), root_mean_square(e), FAMILIAR * rounding.base)
    solutions = beta[:, most], left.gather(2, worst)[:, :, 0]
    return _accuracy((columns / own[:, None])[:, None], solutions, diagonal, rounding, (scale, 0.0))


def normal_accuracy(system: NormalSystem | NormalNewton, rounding: Rounding, index: Tensor) -> Accuracy:
    """The estimate for a fit in weights, whose rows φ have errors of s |φ| in every entry."""
    # index (k,)
    # With H = ΦᵀΛΦ + ρI, Λ = I for squares, dδ = H⁻¹(ρ dΦᵀβ − ΦᵀΛ dΦ δ), so that φᵀδ varies by s² times
    #
    #     ρ² Σ_d (H⁻¹φ)_d² Σ_a β_a² φ_ad²  +  Σ_a (φᵀH⁻¹ΦᵀΛ)_a² Σ_d φ_ad² δ_d²  +  Σ_d φ_d² δ_d²
    newton = isinstance(system, NormalNewton)
    c, beta = system.c, system.beta.double()
    delta = system.eta if isinstance(system, NormalNewton) else system.solution
    if delta.ndim == 2:  # of shared features that of the output with the largest weights
        c, most = 1, int(delta.square().sum(0).argmax())
        delta, beta = delta[:, most], beta[:, most : most + 1]
    example = 32 * c * (len(delta) + ROWS)  # bytes of its rows, of what is solved and multiplied
    index = index[: max(1, parse_bytes(system.memory, beta.device) // (2 * example))]
    if isinstance(system, NormalNewton):
        part_of = system.problem.taken(index)
        phi = torch.cat([rows for _, rows in part_of.form(part_of.x, system.memory)]).double()
    else:
        phi = torch.cat([rows for _, rows in system.problem.taken(index).rows(system.memory)]).double()
    solved = system.solve(phi.T)  # H⁻¹φ, (P, k·C)
    weighted = torch.zeros_like(delta)
    products, reach = torch.zeros_like(phi[:, 0]), torch.zeros_like(phi[:, 0])
    for part, weights, roots in _row_blocks(system, beta):
        squares, cross = part.double().square(), part.double() @ solved
        weighted += squares.T @ weights.square()
        if roots is not None:
            cross = (roots @ (roots.mT @ cross.view(len(roots), c, -1))).view(cross.shape)
        cross = cross.square_()
        products += cross.T @ (squares @ delta.square())
        reach += cross.sum(0)
    if not newton:  # where every process has a share of the examples
        share_sum([weighted, products, reach])
    variance = (system.ridge * solved).square().T @ weighted + products + phi.square() @ delta.square()
    if isinstance(system, NormalSystem):
        variance = variance + _of_sums(system, solved, rounding.kernel)
    solver = math.sqrt(len(delta)) * torch.finfo(torch.float64).eps
    own = math.hypot(rounding.kernel, solver) * variance.sqrt() + rounding.outputs * (1 + reach.sqrt())
    each = phi.view(len(index), c, -1)
    hat = each @ solved.T.reshape(each.shape).mT
    if isinstance(system, NormalNewton):
        roots = system.roots[index]
        hat = hat @ roots @ roots.mT
    rest = torch.eye(c, dtype=phi.dtype, device=phi.device) - hat
    gain = torch.linalg.matrix_norm(torch.linalg.inv(rest), 2)  # (I − h)⁻¹ of an example left out
    if isinstance(system, NormalNewton):
        own = MOVING * own + float(system.next_change().norm())
        scale = max(1.0, root_mean_square(system.outputs - system.base))
    else:
        left_out = torch.linalg.solve(rest, system.ridge * beta[index])
        sizes = root_mean_square(system.residual), root_mean_square(left_out)
        scale = max(*sizes, FAMILIAR * rounding.base)
    shown = torch.finfo(rounding.dtype).eps * scale + rounding.outputs
    predictions = SAFETY * float(own.max()) + shown
    without = SAFETY * float((own.view(-1, c).amax(1) * gain).max()) + shown
    name = str(rounding.dtype).removeprefix("torch.")
    found = (value if math.isfinite(value) else math.inf for value in (predictions, without))
    predictions, without = found
    return Accuracy(predictions, without, predictions + without, scale, rounding.kernel, name)


def _row_blocks(
    system: NormalSystem | NormalNewton, beta: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Rows of J, β of theirs, and the roots of Λ of their examples where it is not the identity."""
    # beta (N, C)
    if isinstance(system, NormalNewton):
        roots = system.roots
        for place, rows in system.own_rows():
            yield rows, beta[place].reshape(-1), roots[place]
        return
    for place, rows in system.problem.own_rows(system.memory):
        for part, weights in zip(rows.split(ROWS), beta[place].reshape(-1).split(ROWS), strict=True):
            yield part, weights, None


def _of_sums(system: NormalSystem, solved: Tensor, unit: float) -> Tensor:
    """What products of rows add that are summed in float32, in units of the errors of rows."""
    # an error t √(N_dd N_ee) of every entry of N = ΦᵀΦ adds t² Σ_d (H⁻¹φ)_d² N_dd Σ_e N_ee δ_e²
    if system.function.precision.sums != "float32":
        return torch.zeros_like(solved[0])
    size = system.normal.diagonal()
    summed = (solved.square().T @ size) * (size @ system.solution.square())
    return (SUMMED / unit) ** 2 * summed


def softmax_accuracy(
    dual: KernelNewton, rounding: Rounding, index: Tensor, gap: Tensor | None = None
) -> Accuracy:
    """The estimate for a fit of the cross-entropy."""
    # index (k,), gap (N, C)
    c, size = dual.c, len(dual.kernel)
    rows = (index[:, None] * c + torch.arange(c, device=index.device)).flatten()
    columns = dual.weighted(unit_columns(size, rows, dual.kernel))
    own = (dual.kernel[rows] @ columns / dual.ridge).view(len(index), c, len(index), c)
    own = own.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    roots = dual.roots[index]
    eye = torch.eye(c, dtype=own.dtype, device=own.device)
    weights = torch.linalg.solve(eye - own @ roots @ roots.mT, columns.T.reshape(len(index), c, size))
    beta = dual.beta.reshape(-1)
    left = beta.expand(len(index), size).clone()
    reach = float(weights.norm(dim=2).max())
    left_over = SAFETY * reach * float(dual.next_change().norm())
    off = left_over if gap is None else left_over + reach * float(gap.norm())
    scale = max(1.0, root_mean_square(dual.outputs - dual.base))
    found = _accuracy(weights, (beta, left), dual.kernel.diagonal().clamp_min(0), rounding, (scale, 0.0))
    predictions, without = MOVING * found.predictions, MOVING * found.leave_one_out + left_over
    influence = predictions + without + left_over
    return replace(found, predictions=predictions + off, leave_one_out=without, influence=influence)


def _accuracy(
    weights: Tensor,
    beta: tuple[Tensor, Tensor],
    diagonal: Tensor,
    rounding: Rounding,
    sizes: tuple[float, float],
) -> Accuracy:
    """The estimate from R (k, C, N·C), β and β₋ᵢ (k, N·C), K's diagonal, the scale and the known error."""
    scale, off = sizes
    # Cholesky's backward error of an entry grows as the root of the dimension, for independent roundings
    solver = math.sqrt(weights.shape[2]) * torch.finfo(torch.float64).eps
    entry = math.hypot(rounding.kernel, solver)
    reach = (weights.square() * diagonal).sum(2).sqrt().amax(1)
    plain = weights.norm(dim=2).amax(1) * rounding.outputs
    whole = float((beta[0].square() * diagonal).sum().sqrt())
    left = (beta[1].square() * diagonal).sum(1).sqrt()
    shown = torch.finfo(rounding.dtype).eps * scale + rounding.outputs
    predictions = SAFETY * float((entry * reach * whole + plain).max()) + off + shown
    without = SAFETY * float((entry * reach * left + plain).max()) + shown
    found = (predictions, without, predictions + without)
    predictions, without, influence = (value if math.isfinite(value) else math.inf for value in found)
    name = str(rounding.dtype).removeprefix("torch.")
    return Accuracy(predictions, without, influence, scale, rounding.kernel, name)


@torch.no_grad()
def estimated(fit: Any, rounding: Rounding, index: Tensor, iterations: bool = True) -> Accuracy | None:
    """The estimate for any fit whose kernel there is, or is small enough to form."""
    # index (k,)
    system = fit.system
    iterated = _iterated(system)
    counted = iterations or not (iterated and system.tolerance > ITERATED)
    if isinstance(system, WeightNewton):
        dual = system.kernel_form
        gap = None if dual is None or not counted else system.outputs - dual.outputs
        return None if dual is None else softmax_accuracy(dual, rounding, index, gap)
    if iterated:
        same = system.factorized
        gap = None
        if same is not None and counted:
            gap = system.ridge * (same.beta - system.beta.double())
        return None if same is None else squared_accuracy(same, rounding, index, gap)
    if isinstance(system, KernelNewton):
        found, outputs = softmax_accuracy(system, rounding, index), system.outputs
    elif isinstance(system, NormalNewton):
        found, outputs = normal_accuracy(system, rounding, index), system.outputs
    elif system.problem.basis.shared:  # in weights δ is summed in float64 and predicts no worse than K
        return _shared_accuracy(system, rounding, index)
    elif isinstance(system, NormalSystem):
        found = normal_accuracy(system, rounding, index)
        outputs = fit.targets.to(system.beta) - system.left_over
    elif isinstance(system, System):
        found = squared_accuracy(system, rounding, index)
        outputs = fit.targets.to(system.beta) - system.left_over
    else:
        return None
    # δ = Jᵀβ is rounded once more; a few examples show by how much the outputs move
    few = index[:PROBED]
    off = float((fit.predict(take(fit.x, few)).to(outputs) - outputs[few]).abs().max())
    return replace(found, predictions=found.predictions + SAFETY / 2 * off)


def _shared_accuracy(system: Any, rounding: Rounding, index: Tensor) -> Accuracy:
    """The estimate for features that all outputs share, in samples or in weights."""
    if isinstance(system, NormalSystem):
        return normal_accuracy(system, rounding, index)
    return shared_accuracy(system.dual, rounding, index)


def _memory(fit: Any) -> str | int | None:
    """The budget of what a fit forms later, where it keeps one."""
    memory: str | int | None = getattr(fit.system, "memory", None)
    return memory


def _iterated(system: Any) -> bool:
    """Whether a solution was found by conjugate gradients."""
    if isinstance(system, System):
        return system.factorized is not system
    return isinstance(system, WeightNewton)


def observed(fit: Any, count: int | None = None) -> Tensor:
    """The examples that an estimate leaves out: those of the largest β and others evenly between, (k,)."""
    beta: Tensor = fit.system.beta
    columns = min(COLUMNS, max(COLUMNS // 2, beta.numel() // 8))
    count = min(len(beta), max(PROBED, columns // beta.shape[1]) if count is None else count)
    largest = beta.norm(dim=1).topk(count - count // 2).indices
    even = (torch.arange(count // 2, device=beta.device) * len(beta)) // max(count // 2, 1)
    chosen: Tensor = torch.cat([largest, even]).unique()
    return chosen


def checked(fit: Any) -> Accuracy | None:
    """An estimate at small cost: with assumed roundings, measured ones where those are too coarse."""
    large = len(fit.system.beta) * fit.system.c > SMALL
    if fit.solver == "sgd" or (large and _iterated(fit.system)):
        return None
    index, base = observed(fit), largest_base(fit)
    function = fit.module.function
    found = estimated(fit, assumed_rounding(function, base), index, False)
    if found is None or (found.sound and not function.precision.coarser(function.dtype)):
        return found
    return estimated(fit, measured_rounding(function, fit.x, base, _memory(fit)), index, False)


Fit = TypeVar("Fit")


def sound_fit(lin: Linearized, make: Callable[[Linearized], Fit], factorized: bool) -> Fit:
    """A fit that rounding leaves right: as it is made, or made again in float64."""
    types = lin.function.precision
    coarse = types.coarser(lin.function.dtype)
    double = lin.function.dtype == torch.float64 and not coarse
    found, first = None, None
    try:
        first = make(lin)
        found = checked(first)
        if found is None or found.sound:
            return _told(first, found)
    except NumericalError:
        if double or not factorized:
            raise
    if double and first is not None and not _iterated(cast(Any, first).system):
        assert found is not None
        return _judged(first, found)
    try:
        second: Any = make(Linearized(lin.function.in_float64()))
        better = checked(second)
    except ProcessGroupError:  # the other processes have it as well
        raise
    except (ModelError, MemoryBudgetError, RuntimeError, TypeError) as error:
        if first is None:
            raise
        assert found is not None
        # a network may hold tensors that do not follow .double()
        return _judged(first, found, error)
    if better is not None and not better.sound:
        return _judged(cast(Fit, second), better)
    if double:
        second.record.reasons["precision"] = f"a tolerance of {second.system.settings.tolerance:.0e}"
        return cast(Fit, second)
    known = str(lin.function.dtype).removeprefix("torch.")
    used = types if first is None else cast(Any, first).module.function.precision
    known = str(used) if used.coarser(lin.function.dtype) else known
    second.record.reasons["precision"] = f"float64: {known} cannot answer a ridge of {second.ridge:.3g}"
    return cast(Fit, second)


def _told(fit: Fit, found: Accuracy | None) -> Fit:
    """A fit that says which types of numbers were asked for, and how exact its kernel is in them."""
    own: Any = fit
    types = own.module.function.precision
    if types.named():
        entry = ""
        if found is not None and types.exact(own.module.function.dtype) != types and types.capture:
            entry = f"; an entry of the kernel is off by {found.rounding:.0e} of √(K_aa K_bb)"
        own.record.reasons["precision"] = f"{types}{entry}"
    return fit


def _judged(fit: Fit, found: Accuracy, cause: Exception | None = None) -> Fit:
    """A fit that cannot be made better: with a remark where the ridge was chosen or two digits are right."""
    own: Any = fit
    if own.record.criterion == "given" and _worst(found) > WORST * found.scale:
        _refuse(fit, found, cause)
    return _remarked(fit, found)


def sound_change(fit: Fit) -> Fit:
    """A fit that was changed, if rounding leaves it right."""
    changed: Any = fit
    found = checked(changed)
    if found is None or found.sound:
        return fit
    if _worst(found) > WORST * found.scale:
        _refuse(changed, found)
    return _remarked(fit, found)


def _worst(found: Accuracy) -> float:
    """The larger error of predictions and leave-one-out."""
    return max(found.predictions, found.leave_one_out)


def _remarked(fit: Fit, found: Accuracy) -> Fit:
    """A fit with a remark on its rounding errors."""
    changed: Any = fit
    said = rounded(_worst(found), found.scale)
    changed.record = replace(changed.record, warnings=(*changed.record.warnings, said))
    return fit


def answerable(fit: Any, ridges: Tensor) -> Tensor:
    """Ridges of a path, if rounding leaves the solution at the smallest right to a hundredth."""
    # ridges (R,)
    least = float(ridges.min())
    if least < fit.ridge:
        base, function = largest_base(fit), fit.module.function
        found = _at(fit, least, assumed_rounding(function, base))
        if found is None or not found.sound:
            found = _at(fit, least, measured_rounding(function, fit.x, base, _memory(fit)))
        if found is None or max(found.predictions, found.leave_one_out) > WORST * found.scale:
            smallest = _smallest(fit, least)
            raise NumericalError(
                f"ridges holds {least:g}, where rounding in {str(function.dtype).removeprefix('torch.')} "
                "leaves no two digits",
                expected="ridges" + (f" of at least {smallest:.2g}" if smallest else " that are larger"),
                remedy="leave the smaller ones out, or fit the network in float64",
            )
    return ridges


def _at(fit: Any, ridge: float, rounding: Rounding) -> Accuracy | None:
    """The estimate for the kernel of a fit at another ridge; ``None`` where it cannot be factorized."""
    form: System | FactorNewton | None = fit.system.factorized
    assert form is not None
    try:
        moved = form.at(ridge)
        if isinstance(moved, KernelNewton):
            return softmax_accuracy(moved, rounding, observed(fit))
        if isinstance(moved, FactorNewton):
            assert isinstance(moved, NormalNewton)
            return normal_accuracy(moved, rounding, observed(fit))
        if moved.problem.basis.shared:
            return _shared_accuracy(moved, rounding, observed(fit))
        return squared_accuracy(moved, rounding, observed(fit))
    except NumericalError:
        return None


def _wider(function: Functional, x: Inputs) -> str:
    """How to have a network in float64; one that casts by itself cannot run there."""
    try:
        function.in_float64().check_runs(take(x, slice(0, 1)))
    except LinnetError:
        return "take the casts to half precision out of the network's forward"
    return "the network in float64"


def _refuse(fit: Any, found: Accuracy | None, cause: Exception | None = None) -> NoReturn:
    """Raise the error of a ridge too small for the precision, with the smallest one that can be answered."""
    assert found is not None
    least = _smallest(fit, fit.ridge)
    remedy = f"pass ridge={least:.2g}" if least is not None else "take a larger ridge"
    if found.dtype != "float64":
        remedy += ", or " + _wider(fit.module.function, fit.x)
    raise NumericalError(
        f"ridge={fit.ridge:g} is too small for a network in {found.dtype}: predictions may be off "
        f"by {found.predictions:.1g} and leave-one-out by {found.leave_one_out:.1g}, "
        f"where the fit changes outputs by {found.scale:.2g}",
        expected="errors of at most a thousandth" + (f", from ridge={least:.2g} on" if least else ""),
        remedy=remedy,
    ) from cause


def _smallest(fit: Any, ridge: float) -> float | None:
    """The smallest ridge of a ladder upward whose estimate is sound."""
    form: System | FactorNewton | None = fit.system.factorized
    if form is None:
        return None
    trace = float((form.diagonal() if isinstance(form, System) else form.gram.diagonal()).sum())
    rounding = measured_rounding(fit.module.function, fit.x, largest_base(fit), _memory(fit))
    while ridge < trace:
        ridge *= STEP
        found = _at(fit, ridge, rounding)
        if found is not None and found.sound:
            return ridge
    return None


def largest_base(fit: Any) -> float:
    """The largest output f₀ on the training examples, about where equations on outputs are held."""
    system = fit.system
    if not isinstance(system, System):
        return float(system.base.abs().max())
    residual = system.problem.unscaled(system.residual)
    return float((fit.targets.to(residual) - residual).abs().max())
