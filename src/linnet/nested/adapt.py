"""``linnet.adapt``: fits a trained network to a new task."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from linnet import params as check
from linnet.distributed import require_same_arguments, sharing
from linnet.errors import InputError
from linnet.fitting.arguments import Choices
from linnet.fitting.last_layer import Appended, ending_linear, last_linear, selected_inside
from linnet.fitting.remarks import single_remarks
from linnet.linear.targets import doubts, task_targets, understood
from linnet.nested.features import RandomHeads
from linnet.nested.nested_fit import NestedFit, solved
from linnet.nested.tuning import tuned
from linnet.progress import Log
from linnet.tangent.batch import take
from linnet.tangent.data import Data
from linnet.tangent.functional import OutputAdapter, check_output, without_wrapper
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector, selected

# random heads: the kernel's cost grows with them, its noise falls; 4 were enough in experiments/adapt
HEADS = 4


@in_exact_mode
def adapt(
    model: nn.Module,
    data: Any,
    y: Any = None,
    *,
    weight: float | None = None,
    ridge: float | str | None = None,
    params: Selector = None,
    output: OutputAdapter = None,
    seed: int = 0,
    memory: str | int | None = None,
    tune: bool | Log = False,
) -> NestedFit:
    """Fit a trained network to a new task: its linear probe and its linearized lower layers, in one solve.

    How much the lower layers take part, and the ridge, are chosen by leave-one-out: no feature has seen a
    label, so that each sample is predicted without its own. Where they do not reduce its error by more than a
    standard error, the fit is the linear probe.

    With ``tune=True`` the lower layers are trained as well, and the fit is solved again at the trained
    weights, where that has less error on held-out folds; ``fit.rungs`` has what each step gains.

    Args:
        model: A trained network that ends in a linear layer, which is replaced, or that returns features
            (N, D), as an encoder without a head does. The ``last_hidden_state`` of an encoder is averaged
            over the positions that ``attention_mask`` counts. It is not touched.
        data: The new task: an (x, y) pair, a Dataset, a DataLoader or batches, x in any form that
            ``linnet.fit`` takes. Integer y and text are classes, float y (N, C) are values;
            ``fit.record.reasons["targets"]`` says what was understood, and a warning says where it is
            improbable. Classes without a sample have no probability.
        y: The targets, where ``data`` are inputs alone: ``adapt(net, X, y)``.
        weight: Share w of the lower layers in the kernel, 0 (the linear probe) to 1; by default chosen.
        ridge: ρ > 0, relative to the mean of the kernel's diagonal; by default, or with ``"loo"``, chosen.
        params: Parameters below the head that take part; see ``linnet.linearize``. All by default.
        output: How to turn what the network returns into a tensor: a function, or the name of a part such
            as ``"pooler_output"``. By default a tensor as it is, ``logits``, or ``last_hidden_state``.
        seed: Seed of the four random heads whose tangent kernels are averaged.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        tune: Whether to train the lower layers where it helps: five or six runs of 150 steps or more. Or a
            callback ``f(metrics, step)``, which also turns tuning on; it receives the training loss of each
            epoch and the held-out error of each run.

    Returns:
        The fit.

    Raises:
        DataError: If the data are empty, not finite, of one class only, have a single example, or labels
            with more than 1,000 gaps between them.
        InputError: If an argument has a value that is not listed.
        MemoryBudgetError: If the kernel does not fit the budget.
        ModelError: If the network neither ends in a linear layer nor returns features.

    Source:
        Tangent kernels of features: Maddox et al., AISTATS 2021; leave-one-out of a kernel ridge regression:
        Rifkin and Lippert, MIT-CSAIL-TR-2007-025.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> x = torch.randn(40, 2)
        >>> linnet.adapt(net, (x, (x[:, 0] > 0).long())).predict(x).shape
        torch.Size([40, 2])
    """
    check.instance("model", model, nn.Module, "a torch.nn.Module", "pass the network itself")
    check_output(output)
    model = without_wrapper(model)
    seed = check.integer("seed", seed, least=0, most=2**63 - 1)
    log = tune if callable(tune) else None
    tunes = log is not None or check.flag("tune", tune)
    weight, ridge = requested(weight, ridge, tunes)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with sharing("linnet.adapt", device):
        data = Data.of(data if y is None else (data, y), model, memory=memory, text=True)
        arguments = {"model": model, "params": params, "weight": weight, "ridge": ridge, "seed": seed}
        require_same_arguments({**arguments, "memory": memory, "tune": tunes})
        fit = _adapted((model, output), data, params, (weight, ridge), seed, memory)
        if tunes and fit.prior.network.function.masks:
            raise InputError(
                f"tune={tune!r} with parameters of which some entries do not vary",
                expected="parameters that vary as a whole: training moves all of them",
                remedy="leave tune= out",
            )
        return tuned(fit, seed, log) if tunes else fit


def requested(
    weight: float | None, ridge: float | str | None, tunes: bool = False
) -> tuple[float | None, float | None]:
    """The weight and the ridge that are given; None for one that leave-one-out or held-out folds choose."""
    if weight is not None:
        check.number("weight", weight, least=0, most=1)
    if ridge == "loo":
        ridge = None
    if isinstance(ridge, str):
        expected = (
            'a positive number or "loo", the one criterion by which adapt chooses the share and the ridge'
        )
        check.refuse("ridge", ridge, expected, "leave ridge= out to have it chosen")
    if ridge is not None:
        check.number("ridge", ridge, above=0)
    if tunes and (weight is not None or ridge is not None):
        raise InputError(
            f"tune={tunes} with {'weight' if weight is not None else 'ridge'} given",
            expected="both free: held-out folds choose them",
            remedy="leave weight= and ridge= out, or tune=",
        )
    return weight, ridge


def _adapted(
    network: tuple[nn.Module, OutputAdapter],
    data: Data,
    params: Selector,
    chosen: tuple[float | None, float | None],
    seed: int,
    memory: str | int | None,
) -> NestedFit:
    """The fit of a network and its output; ``chosen`` are the weight and the ridge that were given."""
    begin = time.perf_counter()
    x, y = data.pair
    model = ending_linear(network[0], x, network[1])
    names = (selected if model is network[0] else selected_inside)(model, params)
    features = RandomHeads(model, HEADS, seed, names)
    targets = task_targets(y, features.function.dtype)
    headless = isinstance(model, Appended) and model.width is not None
    outputs = None if headless else last_linear(model)[1].out_features
    said = () if data.classes else doubts(y, targets, outputs)
    for line in said:
        check.warn(line)
    features.function.check_runs(take(x, slice(0, 1)))
    remarks = (*data.warnings, *said, *single_remarks(targets))
    reasons, seconds = {"targets": understood(targets)}, {"network": time.perf_counter() - begin}
    record = Choices("dual", "loo", {**data.reasons, **reasons}, remarks, seconds, data.classes, data.columns)
    return solved(features, x, targets, memory, record, chosen)
