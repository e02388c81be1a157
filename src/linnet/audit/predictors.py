"""Checks shared by the audits: fits, predictors of any kind, labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from linnet.errors import InputError
from linnet.fitting.fitted import Fitted
from linnet.fitting.linear_fit import LinearFit, SquaredFit
from linnet.fitting.position_fit import PositionFit
from linnet.params import shown
from linnet.tangent.batch import Inputs, batch_size, require_dense, split
from linnet.tangent.inputs import known_answers, tensorize

BATCH = 128  # examples predicted at once


def check_fit(fit: Any) -> LinearFit:
    """Raise unless an argument is a linear fit of the squared loss."""
    if not isinstance(fit, LinearFit) or fit.system.shared:
        expected = "a LinearFit: this is about weights δ that solve one system of equations"
        how = 'linnet.fit(lin, data), whose loss is "squared" and whose outputs share their weights'
        _refuse(fit, expected, f'{how}: any solver but "shared"')
    return fit


def check_squared(fit: Any) -> SquaredFit:
    """Raise unless an argument is a fit of the squared loss."""
    if not isinstance(fit, SquaredFit):
        maker = 'linnet.adapt(model, data) or linnet.fit(lin, data), whose loss is "squared"'
        _refuse(fit, "a fit of the squared loss, whose covariances do not depend on labels", maker)
    return fit


def check_fitted(fit: Any) -> Fitted:
    """Raise unless an argument is a fit, of ``linnet.fit`` or ``linnet.adapt``."""
    if isinstance(fit, PositionFit):
        raise InputError(
            f"fit is {type(fit).__name__}, with a class at every position",
            expected="a fit with one class or target for each example",
            remedy="losses(), held_out_losses() and influence() of the fit say which examples are odd",
        )
    if not isinstance(fit, Fitted):
        _refuse(fit, "a fit", "linnet.adapt(model, data) or linnet.fit(lin, data)")
    return fit


def _refuse(fit: Any, expected: str, maker: str) -> NoReturn:
    """Raise the error of an argument that is not the fit that is expected."""
    how = f" of solver={fit.solver!r}" if isinstance(fit, LinearFit) else ""
    remedy = "take its fit_" if hasattr(fit, "fit_") else f"make one with {maker}"
    raise InputError(f"fit is {type(fit).__name__}{how}", expected, remedy)


@torch.no_grad()
def outputs_of(predictor: Any, x: Inputs, name: str) -> Tensor:
    """Outputs of a predictor for some inputs, (N, C)."""
    if isinstance(predictor, Tensor) or hasattr(predictor, "__array__"):
        out = tensorize(predictor, name)
    elif hasattr(predictor, "predict"):
        out = predictor.predict(x)
    elif callable(predictor):
        if isinstance(predictor, nn.Module) and any(map(_varies, predictor.modules())):
            raise InputError(
                f"{name} is a network in training mode with dropout or batch normalization",
                expected="a network in evaluation mode, whose outputs depend on each input alone",
                remedy=f"call {name}.eval() first",
            )
        parts = [predictor(part) for part in split(tensorize(x), BATCH)]
        out = torch.cat(parts) if all(isinstance(part, Tensor) and part.ndim for part in parts) else parts[0]
    else:
        raise InputError(
            f"{name} is {type(predictor).__name__}",
            expected="a fit, a network, a function of x, or its outputs (N, C)",
            remedy="pass fit.predict(x)",
        )
    n = batch_size(tensorize(x))
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != n:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"{name} gives {shape} for {n} examples",
            expected=f"outputs ({n}, C)",
            remedy="pass one row of outputs for each example of x",
        )
    require_dense(out, name)
    out = out.detach().reshape(len(out), -1)
    if out.is_floating_point() and not out.isfinite().all():
        at = int((~out.isfinite().all(1)).nonzero()[0])
        raise InputError(
            f"{name} is not finite at index {at}",
            expected="finite outputs",
            remedy="look for NaN or infinite values in x and in the weights",
        )
    return out


def _varies(module: nn.Module) -> bool:
    """Whether a layer's outputs depend on chance or on the other examples."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    return module.training and isinstance(module, kinds)


def require_same_classes(predictors: Sequence[Any]) -> None:
    """Raise if predictors name their outputs differently; one without names has them as the others."""
    named = [tuple(names) for one in predictors if (names := getattr(one, "class_names", None))]
    other = next((names for names in named if names != named[0]), None)
    if other is not None:
        raise InputError(
            f"the outputs of one predictor are {shown(named[0])}, those of the other {shown(other)}",
            expected="the same classes in the same order",
            remedy="fit both to labels of the same classes, or pass outputs (N, C) of each, arranged alike",
        )


def class_labels(y: Any, n: int, classes: int, *predictors: Any) -> Tensor:
    """Integer classes (N,), text by the names of the predictors' classes."""
    require_same_classes(predictors)
    names = next(filter(None, (getattr(one, "class_names", None) for one in predictors)), ())
    labels = known_answers(y, names).detach()
    kind = labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex()
    if labels.shape != (n,) or kind:
        raise InputError(
            f"y is {type(y).__name__} of shape {tuple(labels.shape)} and type {labels.dtype}",
            expected=f"integer classes ({n},), one for each example of x",
            remedy="pass y.long(), or y.argmax(1) for one-hot labels",
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise InputError(
            f"y holds {int(labels[at])} at index {at}",
            expected=f"classes 0 to {classes - 1}",
            remedy="check that y belongs to these outputs",
        )
    return labels.long()
