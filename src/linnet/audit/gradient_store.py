"""Influence by stored gradients: one row a training example, searched in blocks.

With g_i the gradient of example i's loss, φ_i = Hᵀg_i its D coordinates along directions H, and Ĝ the mean
curvature in these coordinates,

    s(q, i) = φ_qᵀ (Ĝ + λI)⁻¹ φ_i

is what an influence function estimates (Koh and Liang 2017): to first order the loss of q is s/N lower
because i was among the N training examples. Ĝ is the mean of φφᵀ over the store (the empirical Fisher matrix,
as in TRAK and LoGra), or the eigenvalues that came with the directions (those of the Gauss-Newton matrix, as
in EKFAC). With all directions, H square and orthonormal, s is the influence in all weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from linnet.audit.loss_gradients import LossGradients, stream
from linnet.audit.store_folder import DTYPES, StoreFolder
from linnet.errors import DataError, InputError
from linnet.files import as_path
from linnet.fitting.sketch import SketchedNetwork, restored_sketch, sketch_state
from linnet.likelihoods import from_description
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.factorize import cholesky
from linnet.memory import Plan, parse_bytes, require
from linnet.params import choice, flag, integer, number, part_of, real_type
from linnet.progress import track
from linnet.shown import Shown
from linnet.tangent.batch import EMPTY, batch_size, hash_examples, take
from linnet.tangent.functional import Functional, OutputAdapter, check_output
from linnet.tangent.linearized import Linearized
from linnet.tangent.matching import (
    given_network,
    matching_function,
    require_parameters,
    require_witness,
    witness,
)
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import require_module

METRICS = ("auto", "curvature", "gradients")
SHARE_OF_MEAN = 0.1  # the damping by default, of the mean of the eigenvalues
SHARD_SIZE = 256  # examples of a shard by default: what a killed process loses at the most
_OTHER = (
    "begun with",
    "the network that the store was begun with, with the same weights, or its sketch",
    "load the same checkpoint, or begin a store in another folder",
)


@dataclass(frozen=True)
class TopExamples:
    """The training examples with the largest or smallest scores of each query.

    Args:
        indices: Their places in the stream, (Q, k), the most extreme first.
        scores: Their scores, (Q, k).

    Example:
        >>> TopExamples(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.2]])).indices[0].tolist()
        [3, 1]
    """

    indices: Tensor
    scores: Tensor


class GradientStore(Shown):
    """Gradients of the losses of training examples in a folder, and their influence on queries.

    One row an example, or a sequence of a language model: the gradient of its loss, summed over the positions
    that have a label, along the directions of a sketched network (:func:`linnet.with_sketch`), or in all
    weights of a small one. ``add`` makes the rows in one pass over a stream; processes that know nothing of
    each other make one store together, and a killed one goes on where it was. ``scores`` and ``top`` read the
    rows shard by shard, so that the store may be larger than the memory.

    Args:
        directory: The folder. A store that is there is opened, otherwise one is begun.
        model: The sketched network, or a network or ``Linearized`` for the gradients in its own parameters.
            To open a store, the network itself is enough: the directions are in the folder.
        likelihood: What the outputs mean, such as ``Categorical(axis=-1)`` for logits (N, T, C) with labels
            (N, T): the token after each position, −100 where there is none. Needed to begin a store, and to
            open one of a ``Custom``.
        dtype: The type in which rows are stored, their lengths apart: ``torch.bfloat16`` by default, or
            float16, float32 or float64.
        shard_size: Examples in a file, 256 by default.
        output: How to turn the network's result into a tensor, as for :func:`linnet.linearize`.
        memory: Budget such as ``"4GB"``; by default half of what is available.

    Raises:
        FileFormatError: If the store is of another network or other directions, or a file was altered.
        InputError: If an argument has a value that cannot be, or is not that of the store.

    Source:
        Koh and Liang 2017 (influence functions); Grosse et al. 2023 (EKFAC); Park et al. 2023 (TRAK); Choe et
        al. 2024 (LoGra).

    Example:
        >>> import linnet, tempfile
        >>> net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))  # the next token from the last
        >>> ids = torch.randint(9, (20, 5), generator=torch.Generator().manual_seed(0))
        >>> data = ids[:, :-1], ids[:, 1:]
        >>> likelihood = linnet.likelihoods.Categorical(axis=-1)
        >>> G = linnet.curvature(net, data, likelihood, structure="ekfac")
        >>> folder = tempfile.mkdtemp()
        >>> store = GradientStore(folder, linnet.with_sketch(net, G, dim=100), likelihood).add(data)
        >>> store.top((ids[:2, :-1], ids[:2, 1:]), k=3).indices[:, 0]
        tensor([0, 1])
        >>> len(GradientStore(folder, net))
        20
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module,
        likelihood: Likelihood | None = None,
        dtype: torch.dtype | None = None,
        shard_size: int | None = None,
        output: OutputAdapter = None,
        memory: str | int | None = None,
    ) -> None:
        path = as_path(directory)
        check_output(output)
        self.memory = parse_bytes(memory) if memory is not None else None
        if likelihood is not None:
            check_likelihood(likelihood)
        if dtype is not None and real_type("dtype", dtype) not in DTYPES.values():
            _refuse_type(dtype)
        if shard_size is not None:
            shard_size = integer("shard_size", shard_size)
        require_module(model)
        folder = StoreFolder.opened(path)
        if folder is None:
            folder = _begun(path, model, likelihood, dtype, shard_size, output)
        self.folder = folder
        self.function = _matching(folder, model, output)
        self.likelihood = _settled(folder, likelihood, dtype, shard_size)
        self._moment: Tensor | None = None
        self._last: tuple[str, float, _Inverse] | None = None  # metric and damping of the last question

    def __len__(self) -> int:
        return self.folder.examples or 0

    def _shown(self) -> dict[str, Any]:
        missing = self.folder.missing()
        state = "unfinished" if missing is None or missing else len(self)
        return {"examples": state, "directions": self.folder.dim, "dtype": self.folder.record["dtype"]}

    @property
    def complete(self) -> bool:
        """Whether all parts came to the same end of the data, and the rows of all examples are there."""
        return self.folder.missing() == []

    @in_exact_mode
    @torch.no_grad()
    def add(self, data: Any, part: tuple[int, int] = (0, 1)) -> Self:
        """Store the gradient of every example, in one pass; shards that are there are not computed again.

        Every process passes the same data and makes each n-th shard. How many there are may change when they
        are taken up again. The store is complete when all parts of the last number have come to one end.

        Args:
            data: An (x, y) pair, or a dict with ``"labels"``; a ``Dataset``, a ``DataLoader`` that does not
                shuffle, or any other iterable of batches. Batches may differ in the length of their
                sequences.
            part: Which part, from 0, and their number: ``(3, 64)`` for the fourth of 64; of a process group
                its rank and size.

        Returns:
            The store.

        Raises:
            DataError: If there is no example, one is not finite, targets are none of the likelihood's, or the
                data are not those of before, or of the other parts.
            InputError: If the data or the part cannot be.
            ModelError: If the network cannot run, or its examples influence each other.
        """
        index, parts = part_of(part)
        gradients = LossGradients(self.function, self.likelihood, self.memory)
        whole, shard, count = hashlib.sha256(), _Shard(0), 0
        self._moment = self._last = None
        for x, y in track(stream(data, self.function), "gradients"):
            start, n = 0, batch_size(x)
            while start < n:
                rows = slice(start, min(n, start + self.folder.size - shard.count))
                piece, labels = take(x, rows), y[rows]
                mine = shard.number % parts == index
                shard.hashes += hash_examples((piece, labels))
                shard.count += len(labels)
                if mine and not self.folder.has(shard.number):
                    shard.rows.append(gradients.rows(piece, labels).cpu())
                if shard.count == self.folder.size:
                    self._close(shard, whole, mine)
                    shard = _Shard(shard.number + 1)
                count, start = count + len(labels), rows.stop
        if count == 0:
            raise DataError(
                "data is empty: it yields no example", expected="at least one example", remedy=EMPTY
            )
        if shard.count:
            self._close(shard, whole, shard.number % parts == index)
        self.folder.witness(partial(witness, self.function.check_runs, self.function.cache.probe))
        self.folder.finish(count, whole.hexdigest(), index, parts)
        return self

    def _close(self, shard: _Shard, whole: Any, mine: bool) -> None:
        """Write a shard of this process, or compare the one that is there."""
        digest = hashlib.sha256("".join(shard.hashes).encode()).hexdigest()
        whole.update(digest.encode())
        if mine and sum(map(len, shard.rows)) == shard.count:
            self.folder.write(shard.number, torch.cat(shard.rows), digest)
        elif mine:
            self.folder.compare(shard.number, digest)

    @in_exact_mode
    @torch.no_grad()
    def scores(self, queries: Any, damping: float | None = None, metric: str = "auto") -> Tensor:
        """φ_qᵀ(Ĝ + λI)⁻¹φ_i of every query and training example.

        Args:
            queries: Q examples with their targets, in any form that ``add`` takes.
            damping: λ, beside a mean over the examples; by default a tenth of the mean of Ĝ's eigenvalues.
            metric: Ĝ: ``"curvature"``, the eigenvalues that came with the directions of a sketched network;
                ``"gradients"``, the mean of φφᵀ over the store; ``"auto"``, the first where there are some.

        Returns:
            (Q, N). Positive where the training example helped: to first order the query's loss is 1/N of it
            lower than it were without.

        Raises:
            DataError: If the queries are empty or not finite, or their targets do not fit.
            FileFormatError: If a shard was altered.
            InputError: If the store is not complete, or an argument has a value that cannot be.
            MemoryBudgetError: If Ĝ or the scores do not fit.
        """
        solved = self._solved(queries, damping, metric)
        self._require("scores", (("scores", len(solved) * len(self) * solved.element_size()),))
        found = solved.new_empty(len(solved), len(self))
        for place, rows in self._blocks():
            found[:, place] = solved @ rows.T
        return found

    @in_exact_mode
    @torch.no_grad()
    def top(
        self,
        queries: Any,
        k: int = 10,
        damping: float | None = None,
        metric: str = "auto",
        lowest: bool = False,
    ) -> TopExamples:
        """The k training examples with the largest scores of each query; all scores are never held at once.

        Args:
            queries: Q examples with their targets, in any form that ``add`` takes.
            k: How many; all where the store has fewer.
            damping: As for :meth:`scores`.
            metric: As for :meth:`scores`.
            lowest: Whether to take the smallest scores: the examples that did harm.

        Returns:
            Their places in the stream and their scores.

        Raises:
            DataError: If the queries are empty or not finite, or their targets do not fit.
            FileFormatError: If a shard was altered.
            InputError: If the store is not complete, or an argument has a value that cannot be.
            MemoryBudgetError: If Ĝ does not fit.
        """
        integer("k", k)
        flag("lowest", lowest)
        solved = self._solved(queries, damping, metric)
        q = len(solved)
        best, at = solved.new_empty(q, 0), torch.empty(q, 0, dtype=torch.long, device=solved.device)
        for place, rows in self._blocks():
            own = torch.arange(place.start, place.stop, device=at.device).expand(q, -1)
            every, places = torch.cat([best, solved @ rows.T], 1), torch.cat([at, own], 1)
            best, chosen = every.topk(min(k, every.shape[1]), largest=not lowest)
            at = places.gather(1, chosen)
        return TopExamples(at, best)

    @in_exact_mode
    @torch.no_grad()
    def self_influence(self, damping: float | None = None, metric: str = "auto") -> Tensor:
        """φ_iᵀ(Ĝ + λI)⁻¹φ_i of every training example: how far its own loss depends on its being there.

        Args:
            damping: As for :meth:`scores`.
            metric: As for :meth:`scores`.

        Returns:
            (N,), not negative. Wrong labels and rare examples have large ones.

        Raises:
            FileFormatError: If a shard was altered.
            InputError: If the store is not complete, or an argument has a value that cannot be.
            MemoryBudgetError: If Ĝ does not fit.
        """
        inverse = self._inverse(damping, metric)
        return torch.cat([(inverse(rows) * rows).sum(1) for _, rows in self._blocks()])

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows, shard by shard, in the type that is computed in."""
        return self.folder.blocks(self._dtype, self.function.device)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that is computed in: the network's, and at least float32."""
        return torch.promote_types(self.function.dtype, torch.float32)

    def _solved(self, queries: Any, damping: float | None, metric: str) -> Tensor:
        """(Ĝ + λI)⁻¹ φ of the queries, (Q, D)."""
        gradients = LossGradients(self.function, self.likelihood, self.memory)
        rows = [gradients.rows(x, y) for x, y in stream(queries, self.function)]
        if not rows:
            raise DataError("queries is empty: it yields no example", "at least one example", EMPTY)
        return self._inverse(damping, metric)(torch.cat(rows).to(self._dtype))

    def _inverse(self, damping: float | None, metric: str) -> _Inverse:
        """(Ĝ + λI)⁻¹."""
        choice("metric", metric, METRICS)
        if damping is not None:
            number("damping", damping, above=0, remedy="leave damping= out for a tenth of the mean")
        model = self.function.model
        values = model.eigenvalues if isinstance(model, SketchedNetwork) else None
        if metric == "curvature" and values is None:
            raise InputError(
                'metric="curvature" of a store without eigenvalues',
                expected="directions that are eigenvectors of a curvature: linnet.with_sketch without seed=",
                remedy='pass metric="gradients"',
            )
        used = "gradients" if metric == "gradients" or values is None else "curvature"
        mean = self._gradient_moment() if values is None or used == "gradients" else values.double()
        spread = float((mean.diagonal() if mean.ndim == 2 else mean).mean())
        tau = SHARE_OF_MEAN * spread if damping is None else damping
        if self._last is None or self._last[:2] != (used, tau):
            damped = mean + (tau if mean.ndim == 1 else tau * torch.eye(len(mean)).to(mean))
            factor = damped if mean.ndim == 1 else cholesky(damped, "the curvature of the store")
            self._last = used, tau, _Inverse(factor)
        return self._last[2]

    def _gradient_moment(self) -> Tensor:
        """The mean of φφᵀ, (D, D) in float64, computed once."""
        if self._moment is None:
            d = self.folder.dim
            self._require(f"the {d:,} x {d:,} curvature of the store", (("matrix and factor", 24 * d * d),))
            total = torch.zeros(d, d, dtype=torch.float64, device=self.function.device)
            for _, rows in track(self._blocks(), "curvature of the store"):
                total += (rows.T @ rows).double()
            self._moment = total / len(self)
        return self._moment

    def _require(self, what: str, items: tuple[tuple[str, int], ...]) -> None:
        """Raise where something does not fit the budget."""
        budget = parse_bytes(self.memory, self.function.device)
        require(Plan(what, budget, items), ['use metric="curvature"', "ask for top() instead of scores()"])


class _Shard:
    """The shard that is being filled."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0
        self.hashes: list[str] = []
        self.rows: list[Tensor] = []


class _Inverse:
    """(Ĝ + λI)⁻¹ by a Cholesky factor, or a diagonal."""

    # of (D, D)

    def __init__(self, of: Tensor) -> None:
        self.of = of

    def __call__(self, rows: Tensor) -> Tensor:
        """The product with every row, in their type."""
        wide = rows.double()
        found = wide / self.of if self.of.ndim == 1 else torch.cholesky_solve(wide.T, self.of).T
        return found.to(rows.dtype)


def _begun(
    path: Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    dtype: torch.dtype | None,
    shard_size: int | None,
    output: OutputAdapter,
) -> StoreFolder:
    """A new store."""
    if likelihood is None:
        raise InputError(
            f"likelihood=None, and there is no store in {path}",
            expected="a likelihood, of which the losses are made",
            remedy="pass likelihood=linnet.likelihoods.Categorical(axis=-1) for a language model",
        )
    function = _functional(model, output)
    adapter, small = function.output, function.model
    basis = sketch_state(small) if isinstance(small, SketchedNetwork) else None
    record = {
        "weights": function.fingerprint(),
        "modules": function.modules(),
        "parameters": function.names,
        "output": None if callable(adapter) else adapter,
        "custom_output": callable(adapter),
        "likelihood": likelihood.describe(),
        "dtype": str(dtype or torch.bfloat16).removeprefix("torch."),
        "shard_size": SHARD_SIZE if shard_size is None else shard_size,
        "dim": function.space.dim,
        "sketch": basis and basis["parameters"],
    }
    record["id"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
    return StoreFolder.begun(path, record, basis)


def _functional(model: nn.Module, output: OutputAdapter) -> Functional:
    """The network as a function."""
    if not isinstance(model, Linearized):
        return Functional(model, None, output)
    if output is not None:
        raise InputError(
            "output= with a Linearized", "none: it has its own", "pass output= to linnet.linearize"
        )
    return model.function


def _matching(folder: StoreFolder, model: nn.Module, output: OutputAdapter) -> Functional:
    """The network as a function of what the rows are gradients in."""
    record, path = folder.record, folder.path
    if isinstance(model, Linearized):
        function: Functional = model.function
        model, output = function.model, function.output
    model = given_network(model)
    if record["sketch"] is not None and not isinstance(model, SketchedNetwork):
        require_parameters(model, record["sketch"], path, _OTHER)
        model = restored_sketch(model, folder.basis())
    function = matching_function(model, record, output, path, _OTHER)
    require_witness(function.check_runs, folder.witness(), path, _OTHER)
    return function


def _settled(
    folder: StoreFolder, likelihood: Likelihood | None, dtype: torch.dtype | None, shard_size: int | None
) -> Likelihood:
    """The likelihood; what was passed beside it is that of the store."""
    record = folder.record
    if likelihood is not None and json.loads(json.dumps(likelihood.describe())) != record["likelihood"]:
        _refuse_other("likelihood", likelihood, record["likelihood"])
    if dtype is not None and DTYPES[record["dtype"]] != dtype:
        _refuse_other("dtype", dtype, record["dtype"])
    if shard_size is not None and shard_size != folder.size:
        _refuse_other("shard_size", shard_size, folder.size)
    return from_description(record["likelihood"]) if likelihood is None else likelihood


def _refuse_other(name: str, given: Any, stored: Any) -> NoReturn:
    """The error of an argument that is not that of the store."""
    raise InputError(
        f"{name}={given!r} of a store that was begun with {stored!r}",
        expected="the same value, or none",
        remedy=f"leave {name}= out, or begin a store in another folder",
    )


def _refuse_type(dtype: torch.dtype) -> NoReturn:
    """The error of a type that rows are not stored in."""
    raise InputError(
        f"dtype={dtype!r}",
        expected="torch.bfloat16, torch.float16, torch.float32 or torch.float64",
        remedy="leave dtype= out for bfloat16",
    )
