"""Certificates that forgetting equals a fit that never saw what was forgotten.

The objective is ρ-strongly convex, so that the distance of a fit from its optimum is at most the norm of the
gradient over ρ: a bound that needs no retraining and no trust in how the fit was made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet import __version__
from linnet.audit import verify_certificate as verifier
from linnet.errors import InputError
from linnet.files import as_path, write_atomic, write_text
from linnet.fitting.arguments import BATCH
from linnet.fitting.head import example_hashes
from linnet.fitting.last_layer import what_is_known
from linnet.fitting.position_fit import PositionFit
from linnet.fitting.softmax_fit import SoftmaxFit
from linnet.fitting.solved_fit import SolvedFit, unweighed
from linnet.likelihoods.discrete import Bernoulli, Categorical
from linnet.linear.kernel_system import whitened_kernel
from linnet.linear.normal_system import NormalSystem
from linnet.params import instance
from linnet.shown import Record
from linnet.tangent.batch import hash_examples, take
from linnet.tangent.coordinates import moved_network
from linnet.tangent.jacobian import JacobianOperator
from linnet.tangent.modes import in_exact_mode


@dataclass(frozen=True, repr=False)
class ForgettingCertificate(Record):
    """Bounds on the distance to a fit that never saw the forgotten examples.

    The objective is ρ-strongly convex, so the distance is at most the norm of its gradient over ρ: a bound
    that needs no retraining and no trust in how the fit was made.

    Args:
        gradient: ‖∇F(δ)‖ of the objective on the retained examples at the fit's δ, along its equations.
        relative: The same over ‖∇F(0)‖.
        distance: Bound on ‖δ − δ*‖, δ* the optimum of retraining.
        relative_distance: The same over ‖δ‖.
        retained: Number of retained examples.
        forgotten: Number of forgotten examples.
        warnings: What else of the forgotten examples may be left.
    """

    gradient: float
    relative: float
    distance: float
    relative_distance: float
    retained: int
    forgotten: int
    warnings: tuple[str, ...] = ()


@in_exact_mode
@torch.no_grad()
def forgetting_certificate(
    fit: SolvedFit, forgotten: SolvedFit | Any, folder: str | Path | None = None
) -> ForgettingCertificate:
    """Certify that forgetting equals retraining: the gradient on the retained data vanishes.

    The retained examples are taken from the fit that came before, and the gradient is computed afresh
    from the network: nothing that the forgotten fit says of itself is used but its solution.

    Args:
        fit: The fit before: of ``linnet.fit`` with any loss, or of ``linnet.adapt``.
        forgotten: The fit after ``fit.forget(...)``, or the positions to forget.
        folder: A folder to write for others, for fits in the weights of the network as it came:
            ``certificate.json`` (fingerprints of the network, of the retained and the forgotten examples and
            of δ, the bounds and the warnings), ``displacement.npz`` with δ, and ``verify_certificate.py``,
            which checks them with PyTorch alone, given the network and the retained data.

    Returns:
        The certificate.

    Raises:
        InputError: If the second fit is of another network or ridge, or holds examples of its own, or
            ``folder`` is given where δ is not a displacement of the network's own weights.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        >>> x = torch.ones(5, 2).cumsum(0).double()
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]))
        >>> forgetting_certificate(fit, fit.forget([1, 2])).relative < 1e-12
        True
    """
    instance("fit", fit, SolvedFit, "a fit", "make one with linnet.fit(lin, data) or linnet.adapt(net, data)")
    after = forgotten if isinstance(forgotten, SolvedFit) else fit.forget(forgotten)
    _check_pair(fit, after)
    kept, lost = _retained(fit, after)
    gradient, start, norm = (
        _in_samples(fit, after, kept) if fit.system.shared else _in_weights(fit, after, kept)
    )
    tiny = torch.finfo(torch.float64).tiny
    distance = gradient / fit.ridge
    found = ForgettingCertificate(
        gradient,
        gradient / max(start, tiny),
        distance,
        distance / max(norm, tiny),
        len(kept),
        len(lost),
        _warnings(fit, kept, lost),
    )
    if folder is not None:
        _write(as_path(folder, "folder"), fit, after, (kept, lost), found)
    return found


def _in_weights(fit: SolvedFit, after: SolvedFit, kept: Tensor) -> tuple[float, float, float]:
    """‖∇F(δ)‖, ‖∇F(0)‖ and ‖δ‖ by derivatives of the network."""
    function, delta = fit._function, after.module.space.to_flat(after.delta)
    gradient, start = fit.ridge * delta, torch.zeros_like(delta)
    for rows in kept.split(BATCH):
        x = take(fit.x, rows)
        shape = function.output_shape(x)
        jacobian = JacobianOperator(function, x, shape.numel())
        base = fit.module.base(x).reshape(len(rows), *shape)
        f = base + jacobian.mv(delta).view_as(base)
        gradient = gradient + jacobian.T.mv(_slope(fit, f, rows).to(delta).flatten())
        start = start + jacobian.T.mv(_slope(fit, base, rows).to(delta).flatten())
    gradient, start = (_free(after, one).double() for one in (gradient, start))
    return float(gradient.norm()), float(start.norm()), float(delta.double().norm())


def _slope(fit: SolvedFit, f: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the loss of some training examples in their outputs f (n, ...)."""
    t = fit.targets[rows]
    if isinstance(fit, PositionFit):
        return fit._losses.of_outputs.gradient(f, t)
    slope: Tensor = f.flatten(1) - t.to(f)
    if isinstance(fit, SoftmaxFit):
        likelihood = Bernoulli() if t.shape[1] == 1 else Categorical()
        slope = likelihood.gradient(f.flatten(1).double(), t.double())
    return slope if fit._targets.weights is None else slope * fit._targets.weights[rows, None].to(slope)


def _in_samples(fit: Any, after: Any, kept: Tensor) -> tuple[float, float, float]:
    """The same for features that outputs share: of a gradient Φᵀe the norm is √(eᵀKe), of δ = Φᵀβ √(βᵀKβ)."""
    problem = fit.system.problem.taken(kept)
    if isinstance(fit.system, NormalSystem):  # the features formed anew, the solution that of the samples
        problem, beta = replace(problem, formed=None), after.system.beta.double()
        sums = [(rows.T @ beta[place], rows.T @ problem.residual[place]) for place, rows in problem.rows()]
        delta, right = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        if after.prior is fit.prior:  # whose weights are known to more digits
            delta = after.system.solution
        gradient = fit.ridge * delta - right
        for _, rows in problem.rows():
            gradient += rows.T @ (rows @ delta)
        return float(gradient.norm()), float(right.norm()), float(delta.norm())
    kernel = problem.basis.kernel(problem.basis.examples(problem.x), fit.memory).double()
    kernel = whitened_kernel(kernel, problem)
    # of its own examples in the order of the fit before, which `_retained` compared
    # which has a row for each output where equations tie them to one another
    beta, r = (one.double().reshape(len(kernel), -1) for one in (after.system.beta, problem.residual))
    found = [(one * (kernel @ one)).sum() for one in (kernel @ beta + fit.ridge * beta - r, r, beta)]
    gradient, start, norm = (float(one.clamp_min(0).sqrt()) for one in found)
    return gradient, start, norm


def _check_pair(fit: SolvedFit, after: SolvedFit) -> None:
    """Raise unless both fits solve the same kind of problem."""
    if after._function.fingerprint() != fit._function.fingerprint():
        raise InputError(
            "forgotten is a fit of another network",
            expected="a fit made from this one with forget",
            remedy="pass fit.forget(indices), or the indices",
        )
    if after.ridge != fit.ridge:
        raise InputError(
            f"forgotten has ridge {after.ridge:g}, the fit {fit.ridge:g}",
            expected="the same objective",
            remedy="compare with fit.forget(indices), which keeps the ridge",
        )


def _retained(fit: SolvedFit, after: SolvedFit) -> tuple[Tensor, Tensor]:
    """Positions in the first fit of what the second still has, and of what it has not."""
    left = Counter(example_hashes(after.x, after.targets))
    kept, lost = [], []
    for i, name in enumerate(example_hashes(fit.x, fit.targets)):
        if left[name] > 0:
            left[name] -= 1
            kept.append(i)
        else:
            lost.append(i)
    if foreign := sum(left.values()):
        raise InputError(
            f"forgotten holds {foreign} example(s) that the fit does not have",
            expected="a part of the fit's examples",
            remedy="pass the fit that it was made from",
        )
    device = fit.targets.device
    return (
        torch.tensor(kept, dtype=torch.long, device=device),
        torch.tensor(lost, dtype=torch.long, device=device),
    )


def _free(fit: SolvedFit, gradient: Tensor) -> Tensor:
    """The part of a gradient that the fit's equations leave free; with penalties, their own is added."""
    held = fit.constraints
    if held is None:
        return gradient
    rows = held.equations.jacobian(fit.module.function, fit.memory).double()
    gradient = gradient.double()
    soft = held.slack > 0
    if soft.any():
        # ∇ ½w‖b − Aδ‖² = −w Aᵀ(b − Aδ), w = ρ/τ
        weight = fit.ridge / held.slack[soft]
        gradient = gradient - rows[:, soft] @ (weight * held.errors(fit.module)[soft])
    basis, _ = torch.linalg.qr(rows[:, ~soft])
    free: Tensor = gradient - basis @ (basis.T @ gradient)
    return free


def _warnings(fit: SolvedFit, kept: Tensor, lost: Tensor) -> tuple[str, ...]:
    """Warnings on what the certificate does not cover."""
    found = [] if len(lost) else ["no example was forgotten: there is nothing to certify"]
    record = what_is_known(fit._function.model)
    seen = record.get("examples", frozenset())
    if record.get("metric"):
        found.append(
            "the network has the metric of a curvature: what that was summed over stays in it, forgotten "
            "examples too if they were part of it"
        )
    if record.get("sketch"):
        found.append(
            "the network moves along directions that were made of data, forgotten examples too if they were "
            "part of these: a fit whose directions never saw them can be further away than this says"
        )
    if fit.trained:
        found.append(
            "the network's weights were trained on the forgotten examples, and keep what they learned"
        )
    if seen:
        labels = getattr(fit, "labels", None)
        x, y = take(fit.x, lost), fit.targets[lost] if labels is None else labels[lost]
        again = sum(name in seen for name in example_hashes(x, y)) if len(lost) else 0
        if again:
            found.append(
                f"the head was fitted on {again} of the forgotten examples: it is part of the network before "
                "the fit, and keeps what it learned from them"
            )
    names = hash_examples(fit.x)
    gone = {names[i] for i in lost.tolist()}
    if same := [i for i in kept.tolist() if names[i] in gone]:
        found.append(
            f"{len(same)} of the examples that stay have the same inputs as forgotten ones, first example "
            f"{same[0]} of the fit before: what they say of these is kept"
        )
    if (landmarks := getattr(getattr(fit, "prior", None), "landmarks", None)) is not None:
        found.append(
            f"{len(landmarks.psi):,} of the samples are landmarks, forgotten ones too where they were drawn: "
            "what earlier layers make of their inputs stays in the features, their labels do not"
        )
    if fit.kind == "nested-fit":
        found.append(
            "the mean of the features and the scales of the kernels are those of all examples, forgotten "
            "ones too: the certificate compares with a fit that has the same"
        )
    if fit.record.criterion != "given":
        found.append(
            f"the ridge was chosen by {fit.record.criterion!r} on data that include the forgotten ones"
        )
    return tuple(found)


def _write(
    folder: Path, fit: SolvedFit, after: SolvedFit, rows: tuple[Tensor, Tensor], found: ForgettingCertificate
) -> None:
    """The files that others need to check a certificate."""
    function = fit._function
    unweighed(fit, "folder=")
    output, own = function.output, not fit.system.shared and moved_network(function) is None
    own &= fit._targets.axis is None or isinstance(fit, PositionFit)
    if not own or fit.constraints is not None or not isinstance(output, str | None):
        raise InputError(
            f"folder= with a {type(fit).__name__} whose δ is no displacement of the network's weights alone",
            expected="a fit of linnet.fit in the weights of the network as it came, without equations",
            remedy="leave folder= out: the certificate itself holds for every fit",
        )
    if not len(rows[1]):
        raise InputError(
            "folder= with a fit that has forgotten nothing",
            expected="fit.forget(indices), or the indices",
            remedy="pass the examples to forget",
        )
    data = _data(fit)
    numbers = [part for part in data.values() if part.dtype.kind == "f"]
    floats = "<f4" if all(np.array_equal(part, part.astype("<f4")) for part in numbers) else "<f8"
    names = verifier.fingerprints(data, floats)
    kept, lost = ([names[i] for i in part.tolist()] for part in rows)
    weights: dict[str, Any] = {name: t.detach().cpu().numpy() for name, t in after.delta.items()}
    targets = fit._targets
    about = {
        "format": verifier.FORMAT,
        "linnet": __version__,
        "torch": str(torch.__version__),
        "loss": getattr(fit, "loss", "squared"),
        "ridge": fit.ridge,
        "floats": floats,
        "kinds": {name: part.dtype.kind for name, part in data.items()},
        "axis": targets.axis,
        "scale": targets.scale,
        "output": output,
        "network": verifier.of_network(function.model),
        "displacement": verifier.fingerprint(weights),
        "retained": kept,
        "forgotten": lost,
        "forgotten positions": rows[1].tolist(),
        "gradient": found.gradient,
        "distance": found.distance,
        "relative distance": found.relative_distance,
        "warnings": list(found.warnings),
    }
    write_atomic(folder / "displacement.npz", lambda path: np.savez(path, **weights))
    write_text(folder / "verify_certificate.py", Path(verifier.__file__).read_text(encoding="utf-8"))
    write_text(folder / "certificate.json", json.dumps(about, indent=1))


def _data(fit: SolvedFit) -> dict[str, Any]:
    """Training examples as named arrays, with classes as integers."""
    x, labels, y = fit.x, getattr(fit, "labels", None), fit.targets
    if labels is not None:
        hot = labels[:, None] if y.shape[1] == 1 else torch.nn.functional.one_hot(labels, y.shape[1])
        y = labels if torch.equal(hot * fit._targets.scale, y.to(hot * fit._targets.scale)) else y
    named = x if isinstance(x, Mapping) else {"x": x}
    if not all(isinstance(part, Tensor) for part in named.values()):
        raise InputError(
            f"folder= with a fit whose x is a {type(x).__name__}",
            expected="a tensor, or a mapping of tensors by the names of the network's arguments",
            remedy="fit with a mapping, or leave folder= out",
        )
    return {name: part.cpu().numpy() for name, part in {**named, "y": y}.items()}
