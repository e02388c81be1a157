"""``linnet.adapt``: fits a trained network to a new task."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from linnet import params as check
from linnet.distributed import require_same_arguments, sharing
from linnet.errors import InputError, ModelError
from linnet.fitting.arguments import Choices
from linnet.fitting.last_layer import Appended, ending_linear, last_linear, selected_inside
from linnet.fitting.remarks import data_remarks, single_remarks
from linnet.linear.targets import doubts, task_targets, understood, weighed_targets
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.search import LESS, Shares, counted, gained
from linnet.nested.tuning import tuned
from linnet.progress import Log
from linnet.tangent.batch import take
from linnet.tangent.data import Data
from linnet.tangent.functional import OutputAdapter, check_output, without_wrapper
from linnet.tangent.independence import require_independence
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector

FAR_WEIGHTS = 1e4  # and one by it: means of weights up to which a search of ridges gives the same fit
# random heads: the kernel's cost grows with them, its noise falls; 4 were enough in experiments/adapt
HEADS = 4


@in_exact_mode
def adapt(
    model: nn.Module | Sequence[nn.Module],
    data: Any,
    y: Any = None,
    *,
    weight: float | None = None,
    earlier: float | None = None,
    ridge: float | str | None = None,
    params: Selector = None,
    output: OutputAdapter = None,
    seed: int = 0,
    memory: str | int | None = None,
    tune: bool | Log = False,
    sample_weight: Any = None,
) -> NestedFit:
    """Fit a trained network to a new task: a linear model of what all its layers compute, in one solve.

    It reads the features of the last layer, as a linear probe does, those of layers in the second half of the
    network, through a random ReLU layer of infinite width, and for values the derivatives of networks of up
    to a million weights. How much each takes part, and the ridge, are chosen by leave-one-out: no feature has
    seen a label, so that each sample is predicted without its own. Where the last layer alone is clearly
    better, the fit is the linear probe. More than 10,000 samples are fitted in the weights of features,
    those of earlier layers along 4,096 of the samples.

    With ``tune=True`` the lower layers are trained as well, and the fit is solved again at the trained
    weights, unless held-out folds show more error or fewer right classes there; ``fit.rungs`` has what each
    step gains.

    Args:
        model: A trained network that ends in a linear layer, which is replaced, or that returns features
            (N, D), as an encoder without a head does. The ``last_hidden_state`` of an encoder is averaged
            over the positions that ``attention_mask`` counts. It is not touched. Of a list of networks the
            one with the least squared error on samples left out of its fit is taken; ``fit.verdict`` says by
            how much.
        data: The new task: an (x, y) pair, a Dataset, a DataLoader or batches, x in any form that
            ``linnet.fit`` takes. Integer y and text are classes, float y (N, C) are values;
            ``fit.record.reasons["targets"]`` says what was understood, and a warning says where it is
            improbable. Classes without a sample have no probability.
        y: The targets, where ``data`` are inputs alone: ``adapt(net, X, y)``.
        weight: Share w of the lower layers' derivatives in the kernel, 0 to 1. By default chosen for values
            and where there is no earlier layer, in networks of up to a million weights and for up to 10,000
            samples; otherwise 0. The linear probe is ``weight=0``.
        earlier: Share e of earlier layers in the features, 0 to 1; by default chosen, and 0 where ``weight``
            is given.
        ridge: ρ > 0, relative to the mean of the kernel's diagonal; by default, or with ``"loo"``, chosen.
        params: Parameters below the head that take part; see ``linnet.linearize``. By default those that
            require gradients, or all where none below the head does.
        output: How to turn what the network returns into a tensor: a function, or the name of a part such
            as ``"pooler_output"``. By default a tensor as it is, ``logits``, or ``last_hidden_state``.
        seed: Seed of the four random heads whose tangent kernels are averaged.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        tune: Whether to train the lower layers as well: five to eight runs of 20 steps or ten
            epochs, of 150 steps at least for values. Or a callback ``f(metrics, step)``, which also turns
            tuning on; it receives the training loss of each epoch and the held-out error of each run.
        sample_weight: What each sample counts in the squared error, (N,), positive numbers of about 1;
            ``"balanced"`` for classes that count as much as each other. 1 by default.

    Returns:
        The fit.

    Raises:
        DataError: If the data are empty, not finite, of one class only, have a single example, or labels
            with more than 1,000 gaps between them.
        InputError: If an argument has a value that is not listed.
        MemoryBudgetError: If the kernel, or the features of many samples, do not fit the budget.
        ModelError: If the network neither ends in a linear layer nor returns features.

    Source:
        Tangent kernels of features: Maddox et al., AISTATS 2021; features of all layers: Evci et al., ICML
        2022; the kernel of random ReLU layers: Cho and Saul, NeurIPS 2009, equation 6; leave-one-out of a
        kernel ridge regression: Rifkin and Lippert, MIT-CSAIL-TR-2007-025; kernels along some of the samples:
        Williams and Seeger, NIPS 2000.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> x = torch.randn(40, 2)
        >>> linnet.adapt(net, (x, (x[:, 0] > 0).long())).predict(x).shape
        torch.Size([40, 2])
    """
    several = isinstance(model, list | tuple)
    models: list[nn.Module] = [*model] if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    networks = [one for one in models if isinstance(one, nn.Module)]
    device = next((p.device for one in networks for p in one.parameters()), torch.device("cpu"))
    with sharing("linnet.adapt", device):  # what is wrong on one process ends all
        for place, one in enumerate(models):
            name = f"model[{place}]" if several else "model"
            check.instance(name, one, nn.Module, "a torch.nn.Module", "pass the network itself")
        if not models:
            check.refuse("model", model, "a network, or a list of some", "pass the network itself")
        models = [without_wrapper(one) for one in models]
        check_output(output)
        seed = check.integer("seed", seed, least=0, most=2**63 - 1)
        log = tune if callable(tune) else None
        tunes = log is not None or check.flag("tune", tune)
        given = requested(weight, earlier, ridge, tunes)
        if tunes and sample_weight is not None:
            raise InputError(
                f"tune={tune!r} with sample_weight=",
                "samples that count alike in training",
                "leave one of them out",
            )
        data = Data.of(data if y is None else (data, y), models[0], memory=memory, text=True)
        data = data.weighing(sample_weight)
        arguments: dict[str, Any] = {
            "model": models if several else models[0],
            "params": params,
            "given": [*given],
        }
        arguments |= {"seed": seed, "memory": memory, "tune": tunes, "sample_weight": sample_weight}
        require_same_arguments(arguments)
        fits = [_adapted((one, output), data, params, given, seed, memory) for one in models]
        fit = fits[0] if len(fits) == 1 else best_of(fits)
        if tunes and fit.prior.network.function.masks:
            raise InputError(
                f"tune={tune!r} with parameters of which some entries do not vary",
                expected="parameters that vary as a whole: training moves all of them",
                remedy="leave tune= out",
            )
        return tuned(fit, seed, log) if tunes else fit


def _require_about_one(weights: Tensor | None) -> None:
    """Raise if weights of samples are far from 1, around which ridges are searched."""
    mean = 1.0 if weights is None else float(weights.double().mean())
    if not 1 / FAR_WEIGHTS <= mean <= FAR_WEIGHTS:
        raise InputError(
            f"sample_weight has the mean {mean:.3g}",
            "weights of about 1: a sample of weight 2 counts as two",
            "pass sample_weight / sample_weight.mean()",
        )


def requested(
    weight: float | None, earlier: float | None, ridge: float | str | None, tunes: bool = False
) -> Shares:
    """The shares and the ridge that are given; None for one that leave-one-out or held-out folds choose."""
    if weight is not None:
        check.number("weight", weight, least=0, most=1)
    if earlier is not None:
        check.number("earlier", earlier, least=0, most=1)
    if ridge == "loo":
        ridge = None
    if isinstance(ridge, str):
        expected = (
            'a positive number or "loo", the one criterion by which adapt chooses the shares and the ridge'
        )
        check.refuse("ridge", ridge, expected, "leave ridge= out to have it chosen")
    if ridge is not None:
        check.number("ridge", ridge, above=0)
    given = Shares(weight, earlier, None if ridge is None else float(ridge))
    named = [name for name, value in given._asdict().items() if value is not None]
    if tunes and named:
        raise InputError(
            f"tune={tunes} with {named[0]} given",
            expected="all of them free: held-out folds choose them",
            remedy=f"leave {named[0]}= out, or tune=",
        )
    return given


def best_of(fits: Sequence[NestedFit], names: Sequence[str] = ()) -> NestedFit:
    """The fit of the network with the least squared error on samples left out of its fit."""
    counting = counted(fits[0]._targets)
    errors = [(fit.loo() - fit.targets).square().sum(1)[counting] for fit in fits]
    if not len(errors[0]):
        raise InputError(
            f"model is a list of {len(fits)} networks, and no class has two samples",
            expected="samples that tell which network is best",
            remedy="pass one network",
        )
    first, second = sorted(range(len(fits)), key=lambda place: float(errors[place].mean()))[:2]
    gain, error = gained(errors[second], errors[first])
    names = names or [type(fit.module.model).__name__ for fit in fits]
    names = [f"{place + 1} ({names[place]})" for place in (first, second)]
    told = f"{100 * gain:.0f} ± {100 * error:.0f} % {LESS} than with network {names[1]}, the next best"
    fit = fits[first]
    seconds = sum((Counter(one.record.seconds) for one in fits), Counter[str]())
    reasons = {**fit.record.reasons, "network": f"number {names[0]} of {len(fits)}: {told}"}
    reasons["verdict"] = f"{fit.verdict} Network {names[0]} of {len(fits)} gives {told}."
    fit.record = replace(fit.record, reasons=reasons, seconds=dict(seconds))
    return fit


def require_chosen(features: RandomHeads, params: Selector, given: Shares) -> None:
    """Raise where the user chose parameters of the last layer alone, but not the linear probe."""
    if params is not None and given.weight is None and given.earlier is None:
        features.require_body()


def _adapted(
    network: tuple[nn.Module, OutputAdapter],
    data: Data,
    params: Selector,
    given: Shares,
    seed: int,
    memory: str | int | None,
) -> NestedFit:
    """The fit of a network and its output, by a seed."""
    begin = time.perf_counter()
    x, y = data.pair
    model = ending_linear(network[0], x, network[1])
    names = selected_inside(model, params, own=model is network[0])
    features = RandomHeads(model, HEADS, seed, names)
    require_chosen(features, params, given)
    targets = weighed_targets(task_targets(y, features.function.dtype), data.weights)
    if given.ridge is None:
        _require_about_one(targets.weights)
    headless = isinstance(model, Appended) and model.width is not None
    outputs = None if headless else last_linear(model)[1].out_features
    said = (*(() if data.classes else doubts(y, targets, outputs)), *data_remarks(x, targets))
    for line in said:
        check.warn(line)
    try:
        features.function.check_runs(take(x, slice(0, 1)))
    except (InputError, ModelError) as error:  # the network itself has run on x above
        if not error.what.startswith("model ("):
            raise
        raise ModelError(
            f"model ({type(network[0]).__name__}) cannot run with other outputs of its last layer "
            f"({features.layer}): {error.what}",
            expected="a network that returns what its last nn.Linear gives",
            remedy="pass the network below that layer, which returns features, or output= for a part of them",
        ) from error
    require_independence(features.function, take(x, slice(0, 4)))
    remarks = (*data.warnings, *said, *single_remarks(targets))
    reasons, seconds = {"targets": understood(targets)}, {"network": time.perf_counter() - begin}
    record = Choices("dual", "loo", {**data.reasons, **reasons}, remarks, seconds, data.classes, data.columns)
    return solved(features, x, targets, memory, record, given)
