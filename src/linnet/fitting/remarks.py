"""Remarks on the training data of a fit: labels that the head has seen, classes with one example."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linnet.fitting.head import example_hashes
from linnet.fitting.last_layer import what_is_known
from linnet.linear.targets import Targets
from linnet.tangent.batch import Inputs, hash_examples
from linnet.tangent.functional import Functional
from linnet.tangent.independence import unused_remark

HEAD = "the head was fitted on"
CROSS = "the head is cross-fitted"
SINGLE = "class(es) have a single example"
EMPTY = "class(es) have no example"
COPIED = "are copies of others"
MANY = 0.02  # of the samples: fewer copies make leave-one-out better than it is by as many points at most
UNLIKE = 0.1  # of copies of rows of numbers: where more have another label, rows are equal by chance
ROUNDED = "rounding leaves errors in the outputs"
# Means away from f₀, in spreads: 60 values of a network with 32 hidden units are fitted as well at 14 as at
# 1, and seven times worse than by their mean at 140. Few values are 50 away by chance.
FAR = 100
FEW = 10  # values, whose spreads differ by chance
# Between the spreads of two outputs: at 3 the noise of the smaller is taken as 2.2 times its own.
APART = 3.0
LEFT = (
    "the held-out outputs of cross-fitted heads are those of the fit before it was changed: leave-one-out of "
    "this fit uses a fixed head; fit again on its data for unbiased figures"
)
SEEN = f"{HEAD} examples of this fit, so leave-one-out and the quantities chosen by it are optimistic"

GONE = f"{HEAD} examples that this fit no longer has, and keeps what it learned from them"


def rounded(error: float, scale: float) -> str:
    """A remark on rounding errors."""
    return f"{ROUNDED} of about {error:.1g}, where the fit changes outputs by {scale:.2g}"


def head_remarks(model: nn.Module, x: Inputs, y: Tensor) -> tuple[str, ...]:
    """Whether the head has seen the labels that leave-one-out leaves out."""
    seen = what_is_known(model).get("examples", frozenset())
    again = sum(example in seen for example in example_hashes(x, y)) if seen else 0
    if not again:
        return ()
    return (
        f"{HEAD} {again} of these {len(y)} examples, so leave-one-out and the "
        "quantities chosen by it are optimistic, and forgetting an example does not undo its part "
        "in the head",
    )


def unused_remarks(function: Functional) -> tuple[str, ...]:
    """Whether selected parameters move no output."""
    said = unused_remark(function)
    return (said,) if said else ()


def held_remarks(function: Functional) -> tuple[str, ...]:
    """Whether one layer alone varies because the weights of the others require no gradient."""
    layers = {name.rpartition(".")[0] for name in function.names}
    if not function.held or len(layers) > 1:
        return ()
    return (
        f"only the layer {min(layers)} varies: {function.held:,} other weights require no gradient and stay "
        'as they are; linearize(model, params="all") lets them vary too',
    )


def copied_remarks(x: Inputs, targets: Targets) -> tuple[str, ...]:
    """Samples that come more than once, as loaders that draw some more often give them."""
    own = targets.values if targets.labels is None else targets.labels
    inputs = hash_examples(x)
    labeled = [*zip(inputs, hash_examples(own), strict=True)]
    kinds = len(set(labeled))
    copies, contradictions = len(own) - kinds, kinds - len(set(inputs))
    measured = isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()
    said: tuple[str, ...] = ()
    if contradictions and not measured and targets.classes is not None and targets.axis is None:
        first = {name: at for at, name in reversed([*enumerate(inputs)])}
        at = next(row for row, name in enumerate(inputs) if labeled[first[name]] != labeled[row])
        pair = f"{first[inputs[at]]} and {at}"
        said = (f"{contradictions} sample(s) have the inputs of others and another label, first {pair}",)
    if copies < 2 or copies < MANY * len(own):
        return said
    if measured and contradictions > UNLIKE * copies:  # as rows of few values have
        return said
    told = f"{copies} of {len(own)} samples {COPIED}: leave-one-out leaves those in, so that it"
    if targets.axis is not None:
        return (f"{told} says too little of new ones; pass each once",)
    return (
        *said,
        f"{told}, the noise, intervals, sets and what is chosen by it are too sure; pass each once, with "
        "sample_weight= to count some more",
    )


def single_remarks(targets: Targets) -> tuple[str, ...]:
    """Classes that leaving one example out leaves without any."""
    labels = targets.labels
    if labels is None or not (single := int((labels.bincount() == 1).sum())):
        return ()
    return (
        f"{single} {SINGLE}: leaving it out leaves out its class, so "
        "leave-one-out says little; a ridge that is given as a number does without it",
    )


def empty_remarks(targets: Targets) -> tuple[str, ...]:
    """Classes without an example, whose logits the cross-entropy pushes down."""
    counts = targets.values.double().sum(0)
    if targets.values.shape[1] == 1:
        counts = torch.cat([len(targets.values) - counts, counts])
    empty = [str(int(c)) for c in (counts <= 0).nonzero()[:, 0]]
    if not empty:
        return ()
    shown = ", ".join(empty[:8]) + (", ..." if len(empty) > 8 else "")
    return (f"{len(empty)} {EMPTY} ({shown}): their probability falls to what the ridge allows",)


def far_remarks(away: Tensor) -> tuple[str, ...]:
    """Values whose mean is so far from f₀ that the ridge holds the outputs back from it."""
    if len(away) < 2:
        return ()
    spread = away.std(0)
    ratio = float((away.mean(0).abs() / spread)[spread > 0].amax()) if bool((spread > 0).any()) else 0.0
    if not ratio > FAR:
        return ()
    return (
        f"y is {ratio:.2g} times its own spread away from the network's outputs, more than a ridge lets them "
        "move: pass y - y.mean(0), and add the mean to predictions; linnet.adapt does so itself",
    )


def column_remarks(targets: Targets) -> tuple[str, ...]:
    """Columns of values that say nothing, or of which one sets the noise, and the ridge, of all."""
    values = targets.values.double()
    if targets.classes is not None or len(values) < 2:
        return ()
    spread = values.std(0) * (values != values[0]).any(0)
    if not bool(spread.any()):
        return ("y is constant: nothing can be learned from it",)
    spread = spread[spread > 0]
    chance = 1 + 3 * len(values) ** -0.5  # what spreads of few values differ by
    binary = bool(((values == 0) | (values == 1)).all())
    unlike = len(spread) > 1 and float(spread.max() / spread.min()) > APART * chance
    if binary or len(values) < FEW or not unlike:
        return ()
    return (
        f"the columns of y have spreads from {spread.min():.2g} to {spread.max():.2g}, and one noise and one "
        "ridge are found for all: pass y / y.std(0), and multiply predictions by it (fit.interval is right "
        "without)",
    )


def data_remarks(x: Inputs, targets: Targets) -> tuple[str, ...]:
    """What is likely to be a mistake in the data."""
    return (*column_remarks(targets), *copied_remarks(x, targets))


def after_change(
    warnings: tuple[str, ...], model: nn.Module, x: Inputs, targets: Targets, *, likely: bool
) -> tuple[str, ...]:
    """The remarks of a fit whose examples or labels are no longer those that the remarks were made on."""
    crossed = any(CROSS in line for line in warnings)
    before = [line for line in warnings if HEAD in line] or ([SEEN] if crossed else [])
    found = list(empty_remarks(targets) if likely and targets.axis is None else ())
    if what_is_known(model):
        labels = targets.labels
        again = head_remarks(model, x, targets.values if labels is None else labels)
        found += again or ([GONE] if before else [])
    else:
        found += before
    found += single_remarks(targets)
    found += copied_remarks(x, targets) if any(COPIED in line for line in warnings) else ()
    found += [LEFT] if crossed else []
    stale = (HEAD, CROSS, SINGLE, EMPTY, ROUNDED, COPIED)
    return (*found, *(line for line in warnings if not any(phrase in line for phrase in stale)))
