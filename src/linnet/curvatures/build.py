"""``linnet.curvature``: every curvature approximation by one function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from linnet.curvatures import settings
from linnet.curvatures.accumulate import Watch
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.engine import Request, by_structure, everything, layers_of
from linnet.curvatures.expectation import MATRICES, Expectation, choose_matrix
from linnet.curvatures.layers import Layer, Part
from linnet.curvatures.products import (
    FiniteDifferenceFisher,
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    SummedOperator,
)
from linnet.curvatures.settings import (
    CurvatureOptions,
    Drawn,
    LowRank,
    MatrixFree,
    Passes,
    Selected,
    Structure,
    check_structure,
    drawn,
    passes_of,
    word_of,
)
from linnet.curvatures.stream import FEW, Batches
from linnet.curvatures.treatments import resolve
from linnet.distributed import Share, agree, collective, least
from linnet.errors import InputError, ModelError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.lowrank import LowRankMatrix
from linnet.linalg.operator import LinearOperator, unit_columns
from linnet.linalg.structured import Dense
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, known, no_targets, refuse_first
from linnet.solvers.lanczos import eigenpairs
from linnet.solvers.nystrom import nystrom
from linnet.solvers.solution import solved_by_first
from linnet.tangent.functional import Functional, check_output
from linnet.tangent.linearized import Linearized, function_of
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.preflight import warn_of_scale
from linnet.tangent.selection import Selector, check_selector

# -- operators -------------------------------------------------------------------------------------
# Structures computed from products with the whole matrix: low rank, and dense Hessians.

COLUMNS = 64  # columns of a dense Hessian computed at once
MORE = 10  # random vectors beyond the rank of a randomized decomposition (Halko and others 2011, section 4.2)
LANCZOS_TOLERANCE = 1e-4


def matrix_free(
    function: Functional, batches: Batches, expectation: Expectation, derivative: str
) -> SummedOperator:
    """Products with the whole matrix, one pass over the data each."""
    likelihood, kind = expectation.likelihood, expectation.kind
    if derivative == "finite-difference":
        return FiniteDifferenceFisher(function, batches, likelihood)
    if expectation.matrix == "hessian":
        return HessianOperator(function, batches, likelihood)
    taken = FisherOperator if expectation.matrix == "fisher" else GaussNewtonOperator
    return taken(function, batches, likelihood, kind, expectation.samples, expectation.seed)


def whole(
    product: SummedOperator,
    batches: Batches,
    request: Request,
    structure: str,
    low: settings.LowRank,
) -> Curvature:
    """A matrix with closed forms from products with the whole one."""
    function, kept = product.function, request.expectation.matrix
    if function.dtype.itemsize < 4:
        raise ModelError(
            f"model is {function.dtype} with structure={structure!r} and matrix={kept!r}",
            expected="float32 or float64: the matrix is made from whole products with it",
            remedy="pass model.float(), or use a structure that sums in float32, such as kfac or diagonal",
        )
    for _ in batches:  # counts the examples of all processes, and checks them
        pass
    made = request.provenance(structure, float(batches.examples))
    if structure == "low-rank" and kept != "hessian":
        found = _low_rank(product, low, request)
        return Curvature((Part(everything(function), found, "low-rank"),), function, made)
    layers = [everything(function)] if structure == "full" else layers_of(function, batches.first())
    largest = sum(layer.size**2 for layer in layers) * function.dtype.itemsize
    budget = parse_bytes(request.memory, function.device)
    require(
        Plan(f"{structure} Hessian of {function.space.dim} parameters", budget, (("matrix", largest),)),
        ['use structure="matrix-free"', "select fewer parameters with linnet.linearize(model, params=...)"],
    )
    parts = tuple(Part(layer, Dense(_dense(product, layer)), structure) for layer in layers)
    return Curvature(parts, function, made)


def _low_rank(product: SummedOperator, low: settings.LowRank, request: Request) -> LowRankMatrix:
    """The leading eigenpairs."""
    p = product.shape[0]
    rank, method, seed = min(low.rank, p), low.method, low.seed
    held = {"lanczos": 2 * rank * 20, "randomized": 3 * (rank + MORE)}[method] * p * product.dtype.itemsize
    budget = parse_bytes(request.memory, product.device)
    require(
        Plan(f"{rank} eigenpairs of {p} parameters", budget, (("basis", held),)),
        ["lower the rank of LowRank(rank)", 'use LowRank(rank, method="randomized")'],
    )

    def solve(matrix: LinearOperator) -> tuple[Tensor, ...]:
        if method == "randomized":
            near = nystrom(matrix, min(rank + MORE, p), seed)
            order = near.values.argsort(descending=True)[:rank]
            return near.basis[:, order], near.values[order]
        pairs = eigenpairs(matrix, rank, tolerance=LANCZOS_TOLERANCE, seed=seed)
        found = pairs.require("the leading eigenpairs of the curvature")
        return found.vectors, found.values.clamp(min=0)

    basis, values = solved_by_first(product, solve, product.data.share)
    return LowRankMatrix(basis, values, space=product.space, name="low-rank curvature")


def _dense(product: SummedOperator, layer: Layer) -> Tensor:
    """A layer's diagonal block, column by column."""
    space = product.function.space
    rows = torch.cat([torch.arange(space.dim)[space.slices[name]] for name in layer.names])
    rows = rows.to(product.device)
    matrix = torch.empty(len(rows), len(rows), dtype=product.dtype, device=product.device)
    for start in range(0, len(rows), COLUMNS):
        own = rows[start : start + COLUMNS]
        unit = unit_columns(space.dim, own, matrix)
        matrix[:, start : start + len(own)] = product.mm(unit)[rows]
    return (matrix + matrix.T) / 2


OPERATORS = ("matrix-free", "low-rank")


def curvature(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structure: Structure | Sequence[Structure] = "kfac",
    expectation: str | Drawn = "auto",
    sharing: str = "expand",
    *,
    matrix: str = "auto",
    passes: Passes | None = None,
    **selected: Unpack[Selected],
) -> Any:
    """The Gauss-Newton, Fisher or Hessian matrix of a network over a data set, whole or approximated.

    Everything is summed over the examples (and output positions) and divided by nothing.

    Args:
        model: The network, with all parameters that require a gradient (all, where none does), or a
            ``Linearized``, which says which parameters vary and how outputs are taken: the matrix is that of
            its network, at δ = 0.
        data: An (x, y) pair, inputs alone where no targets are needed, a Dataset, a DataLoader, a list of
            batches or any other object that yields them. It is read batch by batch, and nothing is kept of
            it; an iterator, which can be read only once, is gathered first.
        likelihood: What the outputs mean, one of ``linnet.likelihoods``.
        structure: ``"kfac"``, ``"ekfac"``, ``"kfra"``, ``"diagonal"``, ``"block"`` (exact layer by layer),
            ``"full"``, ``"low-rank"`` (or a :class:`~linnet.curvatures.LowRank`), ``"last-layer"``, or
            ``"matrix-free"`` (products only; or a :class:`~linnet.curvatures.MatrixFree`). A mapping from
            regular expressions, searched in parameter names, to structures mixes them: the first that is
            found in any parameter of a layer decides for the layer, weight and bias alike. A list of
            structures computes them all from one pass over the data and returns a dict; "kfra", "low-rank",
            "last-layer" and "matrix-free" take calls of their own.
        expectation: How the outputs' curvature Λ is taken: ``"exact"`` (all columns of its root),
            ``"mc"`` (labels drawn from the model), ``"random-projection"``, ``"empirical"`` (observed
            labels), ``"recursion"`` (of "kfra" alone). By default, ``"auto"``, it is exact unless that
            would take longer than 128 passes of training, as it does from some hundred outputs on, and
            then 8 labels drawn for each example, or random projections where labels would give another
            matrix; ``made.expectation`` and ``coverage()`` say which it was. Published as KFLR is "kfac"
            with "exact", as KFAC
            (Martens and Grosse 2015) "kfac" with "mc", and as KFRA "kfra". More than one random column:
            a :class:`~linnet.curvatures.MonteCarlo` or :class:`~linnet.curvatures.RandomProjection`.
        sharing: Weights shared over positions: ``"expand"`` takes positions as examples of their own,
            ``"reduce"`` takes their mean input and summed gradient.
        matrix: ``"gauss-newton"``, ``"fisher"``, ``"hessian"``, or ``"auto"``: Gauss-Newton, except where
            sampled or observed labels give the Fisher matrix and the two differ.
        passes: A :class:`~linnet.curvatures.Passes`: examples at once, the memory budget, a file to resume
            from, and how several processes share the data.
        **selected: ``params``, which parameters vary (``"lora"``, names; all that require a gradient by
            default), and ``output``, how to turn the network's result into a tensor: see
            :func:`linnet.linearize`.

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
        2023 (weight sharing).

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
    own = set(inspect.signature(curvature).parameters) - {"model", "data", "likelihood", "selected"}
    known("linnet.curvature", selected, [*own, *settings.Selected.__annotations__])
    return watched(
        None, model, data, likelihood, structure,
        expectation=expectation, sharing=sharing, matrix=matrix, passes=passes, **selected,
    )  # fmt: skip


def watched(
    watch: Watch | None,
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structure: Any,
    **options: Unpack[CurvatureOptions],
) -> Any:
    """Compute a curvature and call ``watch(outputs, labels)`` for each batch."""
    share = Share.of(passes_of(options.get("passes")).shard)
    with collective("linnet.curvature", share.world > 1):
        return _computed(watch, share, model, data, likelihood, structure, options)


@in_exact_mode
def _computed(
    watch: Watch | None,
    share: Share,
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    structure: Any,
    options: CurvatureOptions,
) -> Any:
    """A curvature, or several."""
    passes = passes_of(options.get("passes"))
    no_targets("likelihood", likelihood)
    check_likelihood(likelihood)
    several = isinstance(structure, list | tuple)
    wanted: list[Any] = [*structure] if several else [structure]
    if not wanted or not all(isinstance(one, str | Mapping | LowRank | MatrixFree) for one in wanted):
        raise InputError(
            f"structure={structure!r}",
            expected="a structure, a mapping of them or a list of them",
            remedy='pass structure="kfac" if unsure',
        )
    low: LowRank = next((one for one in wanted if isinstance(one, LowRank)), LowRank())
    free: MatrixFree = next((one for one in wanted if isinstance(one, MatrixFree)), MatrixFree())
    wanted = [word_of(one) for one in wanted]
    names = _names(wanted)
    expectation, samples, seed = drawn(options.get("expectation", "auto"))
    kinds, expectation = _resolve(wanted, expectation)
    sharing = choice("sharing", options.get("sharing", "expand"), ("expand", "reduce"))
    params = options.get("params")
    if "last-layer" in kinds:
        params, kinds = _last_layer(model, params, kinds)
    function = function_of(model, params, options.get("output"))
    taken = choose_matrix(likelihood, expectation, options.get("matrix", "auto"))
    if expectation == "auto" and (taken == "hessian" or any(kind in OPERATORS for kind in kinds)):
        expectation = "exact"  # products with Λ, which take no columns
    columns = Expectation(likelihood, expectation, taken, samples, seed)
    _require_together(kinds, columns, free.derivative, passes.file)
    batches = Batches(data, function, passes.block, share, passes.memory)
    memory = passes.memory
    if share.world > 1:
        settings = {"structure": wanted, "expectation": expectation, "sharing": sharing, "shard": share.cut}
        settings |= {"block": passes.block, "memory": memory, "file": passes.file is not None}
        settings |= {"widest": passes.widest, "linnet.precision": str(function.precision)}
        _require_alike(function, columns, {**settings, **asdict(low), **asdict(free)})
        memory = least(parse_bytes(memory, function.device))  # what it decides, all decide alike
    file = None if passes.file is None else Path(passes.file)
    seen: list[Tensor] = []

    def look(f: Tensor, y: Tensor | None) -> None:
        """Keep a few outputs of the first batch."""
        if not seen:
            seen.append(f[:FEW].detach())
        if watch is not None:
            watch(f, y)

    request = Request(columns, sharing, memory, file, look, passes.widest)
    if any(kind in OPERATORS for kind in kinds) or taken == "hessian":
        found: list[Any] = [matrix_free(function, batches, columns, free.derivative)]
        if kinds[0] != "matrix-free":
            found = [whole(found[0], batches, request, kinds[0], low)]
    else:
        found = by_structure(function, batches, request, list(zip(names, kinds, strict=True)))
    few = batches.first().x if kinds[0] == "matrix-free" else batches.few
    if few is not None:  # a process may have no batch of its own
        warn_of_scale(function, likelihood, few, *seen)
    return dict(zip(names, found, strict=True)) if several else found[0]


def _require_alike(function: Functional, columns: Expectation, settings: Mapping[str, Any]) -> None:
    """Raise on all processes unless they ask for the same matrix of the same network."""
    e = columns
    likelihood = f"{type(e.likelihood).__name__} {e.likelihood.describe()}"
    chosen = {"matrix": e.matrix, "samples": e.samples, "seed": (e.seed, settings["seed"])}
    agree(
        InputError,
        {**settings, **chosen, "likelihood": likelihood},
        "pass the same arguments on all processes",
    )
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
    """Names of the structures: strings as they are; mixtures are counted."""
    mixtures = 0
    names = []
    for one in wanted:
        mixtures += not isinstance(one, str)
        names.append(one if isinstance(one, str) else f"mixture {mixtures}" if mixtures > 1 else "mixture")
    return names


def _resolve(wanted: Sequence[Any], expectation: str) -> tuple[list[Any], str]:
    """Structures, checked, and the expectation that goes with all of them."""
    implied = expectation
    kinds: list[Any] = []
    for one in wanted:
        if isinstance(one, str):
            kind, implied = resolve(one, implied)
            kinds.append(kind)
        else:
            kinds.append(one)
    return kinds, implied


def check_options(caller: type, structure: Any, options: Mapping[str, Any]) -> None:
    """Raise on keywords of ``curvature`` that cannot work, before there are data to try them on."""
    own = set(inspect.signature(caller).parameters) - {"model", "likelihood", "options"}
    known(f"linnet.{caller.__name__}", options, [*own, *CurvatureOptions.__annotations__])
    check_structure(structure)
    expectation = drawn(options.get("expectation", "auto"))[0]
    if not isinstance(structure, Mapping):
        resolve(word_of(structure), expectation)
    choice("sharing", options.get("sharing", "expand"), ("expand", "reduce"))
    choice("matrix", options.get("matrix", "auto"), ("auto", *MATRICES))
    passes_of(options.get("passes"))
    check_output(options.get("output"))
    check_selector(options.get("params"))


def _require_together(kinds: Sequence[Any], columns: Expectation, derivative: str, file: Any) -> None:
    """Raise unless structures, expectation, matrix and file go together."""
    hessian, recursion = columns.matrix == "hessian", columns.kind == "recursion"
    exact_fisher = columns.kind == "exact" and (
        columns.matrix == "fisher" or (columns.likelihood.canonical and not hessian)
    )
    products = hessian or any(kind in OPERATORS for kind in kinds)
    structure = [*kinds] if len(kinds) > 1 else kinds[0]
    asked = f"structure={structure!r} with matrix={columns.matrix!r}, expectation={columns.kind!r}"
    table = (
        (
            ("kfra" in kinds) != recursion or ("kfra" in kinds and len(kinds) > 1),
            'structure="kfra" alone with expectation="recursion": the two belong together',
            "leave expectation= out, and ask for other structures in a call of their own",
        ),
        (
            file is not None and (products or recursion),
            "a structure whose sums can be resumed from file=: full, block, diagonal, kfac or ekfac",
            "leave file= out",
        ),
        (
            products and len(kinds) > 1,
            "structures that share one pass over the data",
            "ask for 'matrix-free', 'low-rank' and Hessian matrices in calls of their own",
        ),
        (
            derivative == "finite-difference" and not exact_fisher,
            'matrix="fisher" with expectation="exact" for derivative="finite-difference"',
            'pass structure="matrix-free" for the other matrices',
        ),
        (
            hessian and columns.kind != "exact",
            'expectation="exact": a Hessian has no columns to draw',
            "leave expectation= out",
        ),
        (
            hessian and kinds[0] not in ("matrix-free", "full", "block"),
            '"matrix-free", "full" or "block" for a Hessian',
            'take the diagonal() of "block", or the Gauss-Newton matrix, which is positive semi-definite',
        ),
    )
    refuse_first((wrong, asked, expected, remedy) for wrong, expected, remedy in table)


def _last_layer(model: nn.Module, params: Selector, kinds: Sequence[Any]) -> tuple[Selector, list[Any]]:
    """The last layer's full matrix."""
    if params is not None or len(kinds) > 1 or isinstance(model, Linearized):
        raise InputError(
            f"structure='last-layer' with params={params!r}, structures {list(kinds)!r} and "
            f"a {type(model).__name__}",
            expected="a network and nothing else: it selects the parameters itself",
            remedy='pass linnet.linearize(model, params="last-layer") with any other structure',
        )
    return "last-layer", ["full"]
