"""``linnet.fgsm``: predictions after a step of the fast gradient sign method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError, NumericalError
from linnet.metrics.evaluate import Predict, ask, batches_of, class_probabilities, same_classes
from linnet.metrics.reports import Judged, Report, join, judge
from linnet.params import refuse, tensor
from linnet.progress import track
from linnet.shown import Record


@dataclass(frozen=True, eq=False, repr=False)
class Attack(Record):
    """Predictions before and after adversarial steps."""

    steps: Tensor  # η of each report, (K,)
    clean: Report  # predictions on the examples as they are
    reports: tuple[Report, ...]  # predictions after each of the steps
    # Examples whose gradient is exactly zero: predictions so certain that they round to 0 or 1. They seem
    # robust and are not; predictions in float64 have a gradient.
    unmoved: int
    inputs: Tensor | None  # the inputs after the step, (N, ...), of data in tensors and one step

    @property
    def accuracy(self) -> Tensor:
        """Share that is predicted as its true class, (K,); needs labels."""
        return torch.tensor([report.accuracy for report in self.reports], dtype=torch.float64)

    @property
    def entropy(self) -> Tensor:
        """Mean entropy, (K,), in nats."""
        return torch.tensor([report.entropy for report in self.reports], dtype=torch.float64)

    @property
    def kept(self) -> Tensor:
        """Share that is still predicted as before, (K,)."""
        before = self.clean.examples.predicted
        same = [report.examples.predicted == before for report in self.reports]
        return torch.stack(same).double().mean(1)


def fgsm(
    predict: Predict, data: Any, step: float | Sequence[float], *, batch_size: int | None = None
) -> Attack:
    """Take a step of the fast gradient sign method, and score the predictions there.

    x ← x − η sign ∇ log p(ŷ | x) for the class ŷ that is predicted at x. p is what predict returns, averaged
    over samples where it returns samples: the attack is on the predictive distribution, not on one network.

    Args:
        predict: Called with a tensor of inputs (N, ...); returns probabilities (N, C), S samples of them
            (S, N, C), or an object with ``.probs``, differentiable in the inputs.
        data: Inputs, an (x, y) pair, a ``Dataset`` or a ``DataLoader``; inputs are one floating tensor, and
            stay on their device.
        step: Step size η, or several for a curve over step sizes; 0 is the clean input.
        batch_size: Largest number of examples in a call; by default a loader's own batches, otherwise 128.

    Returns:
        The predictions: ``clean`` and ``reports``, and of these ``accuracy``, ``entropy`` and ``kept``, (K,)
        each; for one step and data in tensors also ``inputs``.

    Raises:
        DataError: If the data are empty.
        InputError: If predict is not differentiable or does not return probabilities, or a step is negative.
        NumericalError: If a gradient is not finite.

    Source:
        I. Goodfellow et al., Explaining and harnessing adversarial examples, ICLR 2015; with the predicted
        instead of the true class, Botev 2020, eq. 5.15.

    Example:
        >>> predict = lambda x: torch.cat([-x, x], 1).softmax(1)
        >>> attack = fgsm(predict, (torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])), step=0.5)
        >>> attack.inputs.T, attack.accuracy
        (tensor([[ 0.5000, -0.5000]]), tensor([1.], dtype=torch.float64))
    """
    expected = "one or more step sizes, 0 or more"
    sizes = tensor("step", step, expected, "pass step=0.1").double()
    positive = bool((torch.isfinite(sizes) & (sizes >= 0)).all())
    if isinstance(step, bool) or sizes.ndim > 1 or sizes.numel() == 0 or not positive:
        refuse("step", step, expected, "pass step=0.1")
    steps = sizes.reshape(-1)
    keep = len(steps) == 1 and isinstance(data, Tensor | tuple | list)
    clean: list[Judged] = []
    after: list[list[Judged]] = [[] for _ in steps]
    inputs, unmoved, classes, start = [], 0, 0, 0
    for batch in track(batches_of(predict, data, batch_size, None), "attacking"):
        x = _one_tensor(batch.x)
        p, gradient = _gradient(predict, x)
        classes = same_classes(classes, p)
        clean.append(judge(p, batch.y, start))
        unmoved += int((gradient.flatten(1) == 0).all(1).sum())
        for size, judged in zip(steps.tolist(), after, strict=True):
            moved = x - size * gradient.sign()
            with torch.no_grad():
                judged.append(judge(class_probabilities(ask(predict, moved), len(x)), batch.y, start))
            if keep:
                inputs.append(moved)
        start += batch.size
    reports = tuple(Report(join(judged), classes) for judged in after)
    kept = torch.cat(inputs) if keep else None
    return Attack(steps, Report(join(clean), classes), reports, unmoved, kept)


def _gradient(predict: Predict, x: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and ∇ log p of the class that is predicted, in x."""
    with torch.inference_mode(False), torch.enable_grad():
        variable = x.detach().clone().requires_grad_()
        p = class_probabilities(ask(predict, variable), len(x))
        mean = p.mean(0) if p.ndim == 3 else p
        own = mean.gather(1, mean.argmax(1)[:, None]).log().sum()
        gradient = torch.autograd.grad(own, variable, allow_unused=True)[0] if p.requires_grad else None
    if gradient is None:
        raise InputError(
            "predict returns probabilities without a gradient in its inputs",
            expected="a differentiable computation in torch",
            remedy="remove torch.no_grad(), .detach() and .numpy() from predict; what a fit predicts has no "
            "gradient, what its module returns has: lambda x: fit.module(x).softmax(1)",
        )
    finite = torch.isfinite(gradient.flatten(1)).all(1)
    if not finite.all():
        raise NumericalError(
            f"the gradient of log p is not finite for example {int((~finite).nonzero()[0])} of its batch",
            expected="a finite gradient",
            remedy="compute in float64, or use log-softmax inside predict",
        )
    return p.detach(), gradient


def _one_tensor(x: Any) -> Tensor:
    """The inputs, if they can take a small step."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1:
        return x
    what = f"of type {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    raise InputError(
        f"x is {what}",
        expected="one floating-point tensor (N, ...), for only such inputs can take a small step",
        remedy="scale integers to floats first; let predict add inputs that shall stay as they are",
    )
