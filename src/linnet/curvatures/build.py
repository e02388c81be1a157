"""``linnet.curvature``: every curvature approximation by one function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from linnet.curvatures.accumulate import Watch
from linnet.curvatures.engine import Request, by_structure
from linnet.curvatures.expectation import EXPECTATIONS, MATRICES, Expectation, choose_matrix
from linnet.curvatures.operators import matrix_free, whole
from linnet.curvatures.stream import Batches
from linnet.curvatures.treatments import resolve
from linnet.distributed import Share, agree, least, together
from linnet.errors import InputError, ModelError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.memory import parse_bytes
from linnet.params import choice, flag, integer, refuse
from linnet.params import path as checked_path
from linnet.params import seed as checked_seed
from linnet.tangent.functional import Functional, OutputAdapter, check_output
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector, check_selector

OPERATORS = ("matrix-free", "low-rank")


def curvature(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structure: str | Mapping[str, str] | Sequence[str] = "kfac",
    expectation: str = "exact",
    sharing: str = "expand",
    *,
    matrix: str = "auto",
    params: Selector = None,
    output: OutputAdapter = None,
    samples: int = 1,
    rank: int = 32,
    seed: int = 0,
    block: int | None = None,
    memory: str | int | None = None,
    file: str | Path | None = None,
    shard: bool | None = True,
    derivative: str = "exact",
    method: str = "lanczos",
) -> Any:
    """The Gauss-Newton, Fisher or Hessian matrix of a network over a data set, whole or approximated.

    Everything is summed over the examples (and output positions) and divided by nothing.

    Args:
        model: The network, or a ``Linearized``, whose outputs are taken at δ = 0.
        data: An (x, y) pair, inputs alone where no targets are needed, a Dataset or a DataLoader.
        likelihood: What the outputs mean, one of ``linnet.likelihoods``.
        structure: ``"kfac"``, ``"ekfac"``, ``"kfra"``, ``"diagonal"``, ``"block"`` (exact layer by layer),
            ``"full"``, ``"low-rank"``, ``"last-layer"``, or ``"matrix-free"`` (products only). A mapping from
            regular expressions, searched in parameter names, to structures mixes them: the first that is
            found in any parameter of a layer decides for the layer, weight and bias alike. A list of
            structures computes them all from one pass over the data and returns a dict; "kfra", "low-rank",
            "last-layer" and "matrix-free" take calls of their own.
        expectation: How the outputs' curvature Λ is taken: ``"exact"`` (all columns of its root),
            ``"mc"`` (labels drawn from the model), ``"random-projection"``, ``"empirical"`` (observed
            labels), ``"recursion"`` (of "kfra" alone). Published as KFLR is "kfac" with "exact", as KFAC
            (Martens and Grosse 2015) "kfac" with "mc", and as KFRA "kfra".
        sharing: Weights shared over positions: ``"expand"`` takes positions as examples of their own,
            ``"reduce"`` takes their mean input and summed gradient.
        matrix: ``"gauss-newton"``, ``"fisher"``, ``"hessian"``, or ``"auto"``: Gauss-Newton, except where
            sampled or observed labels give the Fisher matrix and the two differ.
        params: Which parameters; see :func:`linnet.linearize`.
        output: How to turn the network's result into a tensor.
        samples: Random columns for each example, for "mc" and "random-projection".
        rank: Number of eigenpairs of "low-rank".
        seed: Seed of everything random.
        block: Examples differentiated at once; chosen by memory if left out. Random columns are drawn batch
            by batch, so that another block draws others.
        memory: Budget such as ``"4GB"``; by default half of what is available.
        file: A ``.safetensors`` file for unfinished sums, written every 15 seconds and between passes: an
            interrupted call resumes from it. Removed at the end.
        shard: Under torch.distributed, ``True`` if all processes pass the same ``data``, which are then
            shared out; ``False`` if each passes its own; ``None`` for a process that computes alone. The
            first two add up over all processes, which must all make the call; an error on one is raised on
            all.
        derivative: ``"finite-difference"`` takes matrix-free Fisher products by the directional derivative
            of the gradient of a KL divergence, two backward passes and no forward mode.
        method: Of "low-rank": ``"lanczos"`` (to convergence) or ``"randomized"`` (one product).

    Returns:
        A :class:`Curvature`; an operator with products only for "matrix-free"; a dict for a list.

    Raises:
        DataError: If the data are empty, not finite, change between passes, lack targets, or are not counted
            once by the processes together.
        InputError: If an argument has a value that is not listed, or does not go with another.
        MemoryBudgetError: If the matrix does not fit.
        ModelError: If the network cannot be treated in this way, or is another one on another process.
        ProcessGroupError: If another process has gone, or is elsewhere.

    Source:
        Botev 2020, chapters 3 and 4; Martens and Grosse 2015; George et al. 2018 (EKFAC); Eschenhagen et al.
        2023 (weight sharing); Maddox et al. 2021 (finite differences).

    Example:
        >>> import linnet, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
        >>> data = torch.randn(10, 2), torch.randint(3, (10,))
        >>> G = curvature(net, data, linnet.likelihoods.Categorical(), structure="ekfac")
        >>> G.damped(0.1).logdet().isfinite().item()
        True
        >>> print(G.coverage())
        Curvature(ekfac gauss-newton, exact, 2 layers, P = 27)
          0  4x2 + 4              ekfac
          2  3x4 + 3              ekfac
    """
    return _made(
        None, Share.of(shard), model, data, likelihood, structure, expectation, sharing, matrix, params,
        output, samples, rank, seed, block, memory, file, derivative, method,
    )  # fmt: skip


def watched(
    watch: Watch, model: nn.Module, data: Any, likelihood: Likelihood, structure: Any, **options: Any
) -> Any:
    """Compute a curvature and call ``watch(outputs, labels)`` for each batch.

    Args:
        watch: Is shown outputs (N, ...) and checked labels (``None`` where the data have none) of every batch
            that this process sums. Nothing is shown by structures that pass over the data in another way:
            "kfra", "low-rank", "matrix-free" and Hessian matrices.
        model: As for :func:`curvature`, like all that follows.
        data: The data.
        likelihood: The likelihood.
        structure: The structure.
        **options: All others.

    Returns:
        The curvature.
    """
    given = inspect.signature(curvature).bind(model, data, likelihood, structure, **options)
    given.apply_defaults()
    share = Share.of(given.arguments.pop("shard"))
    return _made(watch, share, **given.arguments)


def _made(watch: Watch | None, share: Share, *given: Any, **options: Any) -> Any:
    """A curvature, or several; together with the other processes, if there are any."""
    with together("linnet.curvature", share.world > 1):
        return _computed(watch, share, *given, **options)


@in_exact_mode
def _computed(
    watch: Watch | None,
    share: Share,
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structure: Any,
    expectation: str,
    sharing: str,
    matrix: str,
    params: Selector,
    output: OutputAdapter,
    samples: int,
    rank: int,
    seed: int,
    block: int | None,
    memory: str | int | None,
    file: str | Path | None,
    derivative: str,
    method: str,
) -> Any:
    """A curvature, or several."""
    check_likelihood(likelihood)
    several = isinstance(structure, list | tuple)
    wanted: list[Any] = [*structure] if several else [structure]
    if not wanted or not all(isinstance(one, str | Mapping) for one in wanted):
        raise InputError(
            f"structure={structure!r}",
            expected="a structure, a mapping of them or a list of them",
            remedy='pass structure="kfac" if unsure',
        )
    names = _names(wanted)
    kinds, expectation = _resolve(wanted, expectation)
    words = {"expectation": expectation, "sharing": sharing, "derivative": derivative, "method": method}
    _check_words(words, {"samples": samples, "rank": rank})
    _check_seed(seed)
    if "last-layer" in kinds:
        params, kinds = _last_layer(params, kinds)
    function = _functional(model, params, output)
    taken = choose_matrix(likelihood, expectation, matrix)
    if taken == "hessian" and isinstance(model, Linearized):
        raise InputError(
            "matrix='hessian' of a Linearized",
            expected="a network: the Hessian of a linear model is its Gauss-Newton matrix",
            remedy="pass matrix='gauss-newton', or model.model for the Hessian of the network",
        )
    _check_file(file, kinds, taken)
    columns = Expectation(likelihood, expectation, taken, samples, seed)
    batches = Batches(data, function.device, block, share)
    if share.world > 1:
        settings = {"structure": wanted, "block": block, "memory": memory, "rank": rank, "shard": share.cut}
        _require_alike(function, columns, {**settings, **words, "file": file is not None})
        memory = least(parse_bytes(memory, function.device))  # what it decides, all decide alike
    request = Request(columns, sharing, memory, None if file is None else Path(file), watch)
    if any(kind in OPERATORS for kind in kinds) or taken == "hessian":
        if len(names) > 1:
            raise InputError(
                f"structure={names!r}",
                expected="structures that share one pass over the data",
                remedy="ask for 'matrix-free', 'low-rank' and Hessian matrices in calls of their own",
            )
        product = matrix_free(function, batches, columns, derivative)
        if kinds[0] == "matrix-free":
            return {names[0]: product} if several else product
        made = whole(product, batches, request, kinds[0], rank, method)
        return {names[0]: made} if several else made
    found = by_structure(function, batches, request, list(zip(names, kinds, strict=True)))
    return dict(zip(names, found, strict=True)) if several else found[0]


def _require_alike(function: Functional, columns: Expectation, settings: Mapping[str, Any]) -> None:
    """Raise on all processes unless they ask for the same matrix of the same network."""
    e = columns
    likelihood = f"{type(e.likelihood).__name__} {e.likelihood.describe()}"
    chosen = {"matrix": e.matrix, "samples": e.samples, "seed": e.seed, "likelihood": likelihood}
    agree(InputError, {**settings, **chosen}, "pass the same arguments on all processes")
    weights = {
        "the names of the parameters": ", ".join(function.names),
        "the hash of weights and buffers": function.fingerprint()[:12],
    }
    agree(
        ModelError,
        weights,
        "load one state_dict on all processes; running statistics of BatchNorm differ after training with "
        "DistributedDataParallel, too: broadcast them",
    )


def _names(wanted: Sequence[Any]) -> list[str]:
    """What the structures are called: strings as they are; mixtures are counted."""
    mixtures = 0
    names = []
    for one in wanted:
        mixtures += not isinstance(one, str)
        names.append(one if isinstance(one, str) else f"mixture {mixtures}" if mixtures > 1 else "mixture")
    return names


def _resolve(wanted: Sequence[Any], expectation: str) -> tuple[list[Any], str]:
    """Structures, checked, and the expectation that goes with all of them."""
    choice("expectation", expectation, EXPECTATIONS)
    implied = expectation
    kinds: list[Any] = []
    for one in wanted:
        if isinstance(one, str):
            kind, implied = resolve(one, implied)
            kinds.append(kind)
        else:
            kinds.append(one)
    if ("kfra" in kinds) != (implied == "recursion") or ("kfra" in kinds and len(kinds) > 1):
        raise InputError(
            f"structure={kinds!r} with expectation={implied!r}",
            expected='structure="kfra" alone with expectation="recursion": the two belong together',
            remedy="leave expectation= out, and ask for other structures in a call of their own",
        )
    return kinds, implied


WORDS = {
    "expectation": EXPECTATIONS,
    "sharing": ("expand", "reduce"),
    "derivative": ("exact", "finite-difference"),
    "method": ("lanczos", "randomized"),
}


def check_options(structure: Any, options: Mapping[str, Any]) -> None:
    """Raise on keywords of :func:`curvature` that cannot work, before there are data to try them on.

    Args:
        structure: The structure.
        options: Other keywords, those of them that are given.

    Raises:
        InputError: If a value is not one of those listed, or of another kind.

    Example:
        >>> check_options("kfac", {"samples": 2})
    """
    if not isinstance(structure, str | Mapping) or not structure:
        refuse("structure", structure, "a structure, or a mapping of them", 'pass structure="kfac"')
    expectation = options.get("expectation", "exact")
    choice("expectation", expectation, EXPECTATIONS)
    if isinstance(structure, str):
        resolve(structure, expectation)
    _check_words({name: options[name] for name in ("sharing", "method") if name in options}, {})
    choice("matrix", options.get("matrix", "auto"), ("auto", *MATRICES))
    for name in ("samples", "rank", "block"):
        if name in options and not (name == "block" and options[name] is None):
            integer(name, options[name])
    _check_seed(options.get("seed", 0))
    flag("shard", options.get("shard", True))
    parse_bytes(options.get("memory"))
    check_output(options.get("output"))
    check_selector(options.get("params"))
    if options.get("file") is not None:
        checked_path("file", options["file"])


def _check_words(words: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    """Raise on values that are not listed."""
    for name, value in words.items():
        choice(name, value, WORDS[name])
    for name, number in numbers.items():
        integer(name, number)


def _check_seed(seed: Any) -> None:
    """Raise unless the seed is an integer."""
    checked_seed("seed", seed)


def _check_file(file: Any, kinds: Sequence[Any], matrix: str) -> None:
    """Raise on a file that is none, or that nothing would be written to."""
    if file is None:
        return
    checked_path("file", file, 'pass file="sums.safetensors"')
    if matrix == "hessian" or any(kind in (*OPERATORS, "kfra") for kind in kinds):
        raise InputError(
            f"file={str(file)!r} with structure={[*kinds]!r} and matrix={matrix!r}",
            expected="a structure whose sums can be resumed: full, block, diagonal, kfac or ekfac",
            remedy="leave file= out",
        )


def _last_layer(params: Selector, kinds: Sequence[Any]) -> tuple[Selector, list[Any]]:
    """The last layer's full matrix."""
    if params is not None or len(kinds) > 1:
        raise InputError(
            f"structure='last-layer' with params={params!r} and structures {list(kinds)!r}",
            expected="nothing else: it selects the parameters itself",
            remedy='pass params="last-layer" with any other structure',
        )
    return "last-layer", ["full"]


def _functional(model: nn.Module, params: Selector, output: OutputAdapter) -> Functional:
    """The network as a function of the selected parameters."""
    if isinstance(model, Linearized):
        if params is not None or output is not None:
            raise InputError(
                "params= or output= with a Linearized",
                expected="neither: a linearization has its own",
                remedy="pass them to linnet.linearize",
            )
        return model.function
    return Functional(model, params, output)
