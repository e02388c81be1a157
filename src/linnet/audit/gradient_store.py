"""Influence by stored gradients: one row a training example, searched in blocks.

With g_i the gradient of example i's loss, φ_i = Hᵀg_i its D coordinates along directions H, and Ĝ the mean
curvature in these coordinates,

    s(q, i) = φ_qᵀ (Ĝ + λI)⁻¹ φ_i

is what an influence function estimates (Koh and Liang 2017): to first order the loss of q is s/N lower
because i was among the N training examples. Ĝ is the mean of φφᵀ over the store (the empirical Fisher matrix,
as in TRAK and LoGra), or the eigenvalues that came with the directions (those of the Gauss-Newton matrix, as
in EKFAC). With all directions, H square and orthonormal, s is the influence in all weights.

Gradients of the loss of every example of a stream, and the stream itself, batch by batch.

The gradient of example i is J(x_i)ᵀ u_i with u_i that of its negative log-likelihood in the outputs, summed
over the positions that have a label. In the coordinates of a sketched network it is formed along its D
directions from captured inputs and output gradients, Q_Lᵀ (Σ_s g_s a_sᵀ) Q_R, with one backward pass.

The folder of a gradient store: a record, the basis, and rows in shards that are written whole.

Shard s holds the gradients of the examples s·S to (s + 1)·S of the stream, in one checksummed file that is
written completely or not at all. So a process that is killed loses the shard in hand, and any number of
processes can make the shards of one folder without exchanging anything: a shard has one content, whoever
makes it. ``ends.json`` says where each part came to the end of its stream, and ``end.json`` how many examples
there are, once all parts agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from linnet.curvatures.stream import usable
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import as_path, load, locked, read_json, remove_partial, save, write_json
from linnet.fitting.sketch import SketchedNetwork, restored_sketch, sketch_state
from linnet.likelihoods import from_description
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.factorize import cholesky
from linnet.memory import Plan, parse_bytes, require
from linnet.number_types import wide_type
from linnet.params import choice, flag, integer, number, optional, part_of, real_type, refuse
from linnet.progress import track
from linnet.shown import Shown, some
from linnet.tangent.batch import (
    EMPTY,
    Inputs,
    batch_size,
    check_finite,
    example_shapes,
    hash_examples,
    require_some,
    split,
    take,
)
from linnet.tangent.capture import capture, capture_bytes
from linnet.tangent.data import next_tokens, pairs, require_targets
from linnet.tangent.functional import Functional, OutputAdapter, check_output
from linnet.tangent.independence import require_own_rows
from linnet.tangent.inputs import DataNotes, taken
from linnet.tangent.linearized import Linearized, function_of
from linnet.tangent.matching import (
    given_network,
    matching_function,
    require_parameters,
    require_witness,
    witness,
)
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.preflight import warn_of_scale
from linnet.tangent.selection import Selector, check_selector, require_module, select_parameters
from linnet.tree import map_tensors

Pair = tuple[Inputs, Tensor]

LARGEST = 64  # examples differentiated at once, at most
SHARE = 0.5  # of the budget that one captured batch may take


def stream(data: Any, function: Functional) -> Iterator[Pair]:
    """The batches of any kind of data, one after the other; nothing is gathered."""
    said = DataNotes()
    for i, (inputs, y) in enumerate(pairs(data, said)):
        while said.warnings:
            warnings.warn(said.warnings.pop(), stacklevel=2)
        name = f"batch {i} of data"
        x = taken(function, inputs)
        require_some(x, name)
        require_targets(x, y, name)
        y = next_tokens(function, x, y, said)
        check_finite(x, "x")
        check_finite(y, "y")
        yield x, y


class LossGradients:
    """The gradient of the loss of every example, in the parameters of a network."""

    def __init__(self, function: Functional, likelihood: Likelihood, memory: str | int | None = None) -> None:
        self.function, self.likelihood = function, likelihood
        self._budget = parse_bytes(memory, function.device)
        self._sizes: dict[object, int] = {}  # examples at once, by their shapes

    def rows(self, x: Inputs, y: Tensor) -> Tensor:
        """The gradients of a batch, (n, P)."""
        device = self.function.device
        x, y = map_tensors(lambda t: usable(t, device), x), usable(y, device)
        size = self._size(x)
        pieces = zip(split(x, size), y.split(size), strict=True)
        return torch.cat([self._of_piece(part, labels) for part, labels in pieces])

    def _of_piece(self, x: Inputs, y: Tensor) -> Tensor:
        """The gradients of examples that are differentiated at once."""
        function, n = self.function, batch_size(x)
        shape = function.output_shape(x)

        def cotangents(outputs: Tensor) -> Tensor:
            f = outputs.view(n, *shape)
            u: Tensor = self.likelihood.gradient(f, self.likelihood.check(f, y))
            return u.reshape(1, n, -1).to(outputs.dtype)

        captured = capture(function, x, cotangents)
        return torch.cat([captured.rows(name).reshape(n, -1) for name in function.names], 1)

    def _size(self, x: Inputs) -> int:
        """Examples at once; a kind of batch is looked at when it first comes."""
        kind = example_shapes(x)
        if kind not in self._sizes:
            self.function.output_shape(x)  # raises in words where the network cannot run
            require_own_rows(self.function, x)
            if not self._sizes:
                warn_of_scale(self.function, self.likelihood, x)
            own = capture_bytes(self.function, take(x, slice(0, 1)), 1)
            self._sizes[kind] = max(1, min(LARGEST, int(SHARE * self._budget) // max(own, 1)))
        return self._sizes[kind]


RECORD, BASIS, END = "gradient-store", "gradient-store-basis", "gradient-store-end"  # kinds of files
SHARD, WITNESS = "gradient-store-rows", "gradient-store-network"
_OTHER_STREAM = (
    "the same examples in the same order, in every process and after every interruption",
    "turn shuffling and augmentation off, or begin a store in another folder",
)
DTYPES = {str(t).removeprefix("torch."): t
          for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}  # fmt: skip


class StoreFolder:
    """A folder with the gradients of a stream of examples."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path, self.record = path, dict(record)

    @classmethod
    def opened(cls, path: Path) -> StoreFolder | None:
        """The store in a folder."""
        file = path / "store.json"
        return cls(path, read_json(file, RECORD)) if file.is_file() else None

    @classmethod
    def begun(cls, path: Path, record: Mapping[str, Any], basis: Mapping[str, Any] | None) -> StoreFolder:
        """A store in a folder that has none, unless another process is first: then that one's."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("directory", str(path), f"a folder that can be made ({error})", "name another folder")
        with locked(path / "store.lock"):
            found = cls.opened(path)
            if found is not None:
                return found
            if basis is not None:
                save(path, "basis", dict(basis), BASIS)
            write_json(path / "store.json", dict(record), RECORD)
        return cls(path, record)

    def basis(self) -> dict[str, Any]:
        """The directions."""
        found: dict[str, Any] = load(self.path / "basis.safetensors", BASIS)
        return found

    def witness(self, made: Callable[[], dict[str, Any] | None] | None = None) -> dict[str, Any] | None:
        """What the network computes on made-up inputs; the first writes it."""
        file = self.path / f"{WITNESS}.safetensors"
        if made is not None:
            with locked(self.path / "store.lock"):
                if not file.is_file():
                    save(self.path, WITNESS, made())
        found: dict[str, Any] | None = load(file, WITNESS) if file.is_file() else None
        return found

    @property
    def size(self) -> int:
        """S, examples of a shard."""
        return int(self.record["shard_size"])

    @property
    def dim(self) -> int:
        """D, numbers of a row."""
        return int(self.record["dim"])

    @property
    def examples(self) -> int | None:
        """N, or ``None`` where not all parts have come to the same end of the stream."""
        file = self.path / "end.json"
        return int(read_json(file, END)["examples"]) if file.is_file() else None

    def missing(self) -> list[int] | None:
        """The shards that are not there, of a stream whose length is known; else ``None``."""
        n = self.examples
        if n is None:
            return None
        return [s for s in range(math.ceil(n / self.size)) if not self.has(s)]

    def file(self, shard: int) -> Path:
        """The file of a shard."""
        return self.path / f"{_name(shard)}.safetensors"

    def has(self, shard: int) -> bool:
        """Whether a shard is there."""
        return self.file(shard).is_file()

    def write(self, shard: int, rows: Tensor, digest: str) -> None:
        """Write a shard, completely or not at all."""
        # rows (n, D)
        # of length one, so that no type overflows or comes to nothing
        lengths = rows.double().norm(dim=1)
        unit = rows / lengths.clamp_min(torch.finfo(torch.float64).tiny)[:, None].to(rows.dtype)
        content = {"rows": unit.to(DTYPES[self.record["dtype"]]), "lengths": lengths}
        facts = {"shard": shard, "examples": digest, "store": self.record["id"]}
        save(self.path, _name(shard), content | facts, SHARD)

    def read(self, shard: int) -> tuple[Tensor, Tensor, str]:
        """A shard."""
        found = load(self.file(shard), SHARD)
        if (found["store"], found["shard"]) != (self.record["id"], shard):
            raise FileFormatError(
                f"{self.file(shard)} holds shard {found['shard']} of a store with the mark {found['store']}",
                expected=f"shard {shard} with the mark {self.record['id']}, which tells network and settings",
                remedy="remove the file, and call add() again",
            )
        return found["rows"], found["lengths"], str(found["examples"])

    def compare(self, shard: int, digest: str) -> None:
        """Raise if a shard that is there is of other examples."""
        if self.read(shard)[2] != digest:
            raise DataError(f"shard {shard} in {self.path} was made of other examples", *_OTHER_STREAM)

    def finish(self, examples: int, digest: str, part: int, parts: int) -> None:
        """Remember where a part came to the end of the stream."""
        file, unfinished, own = self.path / "end.json", self.path / "ends.json", [examples, digest]
        with locked(self.path / "store.lock"):
            if file.is_file():
                settled = read_json(file, END)
                other = [settled["examples"], settled["digest"]]
            else:
                ends = {**self._ends(parts), str(part): own}
                other = next((end for end in ends.values() if end != own), own)
                if other == own and len(ends) == parts:
                    write_json(file, {"examples": examples, "digest": digest}, END)
                    unfinished.unlink(missing_ok=True)
                else:
                    write_json(unfinished, {"parts": parts, "ends": ends}, END)
            remove_partial(file)
            remove_partial(unfinished)
        if other != own:
            detail = "other examples, or another order"
            if other[0] != examples:
                detail = f"{other[0]} examples, now {examples}"
            raise DataError(f"the data in {self.path} had {detail}", *_OTHER_STREAM)

    def _ends(self, parts: int | None = None) -> dict[str, list[Any]]:
        """Where each part came to the end, while not all agree: of a number of parts, or of the last one."""
        file = self.path / "ends.json"
        found = read_json(file, END) if file.is_file() else {"parts": parts, "ends": {}}
        ends: dict[str, list[Any]] = found["ends"]
        return ends if parts in (None, found["parts"]) else {}

    def _lacking(self, missing: list[int] | None) -> str:
        """What an unfinished store lacks."""
        if missing is not None:
            count = math.ceil((self.examples or 0) / self.size)
            return f"{len(missing)} of {count} shards are missing, first {missing[0]}"
        ends = self._ends()
        lengths = sorted({end[0] for end in ends.values()})
        if not ends:
            return "no process came to the end of its data"
        if len({end[1] for end in ends.values()}) == 1:
            return f"only part {', '.join(sorted(ends, key=int))} came to the end of its data"
        return f"its parts had other data, of {' and '.join(map(str, lengths))} examples"

    def blocks(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """All rows, one shard at a time."""
        missing, start = self.missing(), 0
        if missing is None or missing:
            raise InputError(
                f"the store in {self.path} is not complete: {self._lacking(missing)}",
                expected="a store whose data were added to the end, by all of the parts",
                remedy="call add() with the same data again; what is there is not computed anew",
            )
        for shard in range(math.ceil((self.examples or 0) / self.size)):
            rows, lengths, _ = self.read(shard)
            place = slice(start, start + len(rows))
            yield place, rows.to(device, dtype) * lengths.to(device, dtype)[:, None]
            start = place.stop


def _name(shard: int) -> str:
    """The name of a shard's file, without its suffix."""
    return f"rows-{shard:07d}"


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
        params: Which parameters vary, to begin a store of a network: ``"lora"``, names; see
            :func:`linnet.linearize`. A store that is there has its own.

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
        params: Selector = None,
    ) -> None:
        path = as_path(directory)
        check_output(output)
        check_selector(params)
        self.memory = parse_bytes(memory) if memory is not None else None
        if likelihood is not None:
            check_likelihood(likelihood)
        if dtype is not None and real_type("dtype", dtype) not in DTYPES.values():
            refuse("dtype", dtype, "torch.bfloat16, torch.float16, torch.float32 or torch.float64")
        if shard_size is not None:
            shard_size = integer("shard_size", shard_size)
        require_module(model)
        folder = StoreFolder.opened(path)
        if folder is None:
            folder = _begun(path, model, likelihood, dtype, shard_size, (params, output))
        self.folder = folder
        self.function = _matching(folder, model, output)
        _require_same_selection(folder, model, params)
        self.likelihood = _settled(folder, likelihood, dtype, shard_size)
        self._moment: Tensor | None = None
        self._last: tuple[str, float, Tensor] | None = None  # metric and damping of the last question

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
            raise DataError("data is empty: it yields no example", "at least one example", EMPTY)
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
        factor = self._factor(damping, metric)
        return torch.cat([(_solve(factor, rows) * rows).sum(1) for _, rows in self._blocks()])

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows, shard by shard, in the type that is computed in."""
        return self.folder.blocks(self._dtype, self.function.device)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that is computed in: the network's, and at least float32."""
        return wide_type(self.function.dtype)

    def _solved(self, queries: Any, damping: float | None, metric: str) -> Tensor:
        """(Ĝ + λI)⁻¹ φ of the queries, (Q, D)."""
        gradients = LossGradients(self.function, self.likelihood, self.memory)
        rows = [gradients.rows(x, y) for x, y in stream(queries, self.function)]
        if not rows:
            raise DataError("queries is empty: it yields no example", "at least one example", EMPTY)
        return _solve(self._factor(damping, metric), torch.cat(rows).to(self._dtype))

    def _factor(self, damping: float | None, metric: str) -> Tensor:
        """The Cholesky factor of Ĝ + λI, or its diagonal."""
        choice("metric", metric, METRICS)
        optional(number, "damping", damping, above=0, remedy="leave damping= out for a tenth of the mean")
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
            self._last = used, tau, damped if mean.ndim == 1 else cholesky(damped, "curvature of the store")
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


def _solve(factor: Tensor, rows: Tensor) -> Tensor:
    """(Ĝ + λI)⁻¹ of every row, in their type, by its Cholesky factor (D, D) or its diagonal (D,)."""
    wide = rows.double()
    found = wide / factor if factor.ndim == 1 else torch.cholesky_solve(wide.T, factor).T
    return found.to(rows.dtype)


def _begun(
    path: Path,
    model: nn.Module,
    likelihood: Likelihood | None,
    dtype: torch.dtype | None,
    shard_size: int | None,
    selected: tuple[Selector, OutputAdapter],
) -> StoreFolder:
    """A new store."""
    if likelihood is None:
        raise InputError(
            f"likelihood=None, and there is no store in {path}",
            expected="a likelihood, of which the losses are made",
            remedy="pass likelihood=linnet.likelihoods.Categorical(axis=-1) for a language model",
        )
    function = function_of(model, *selected)
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


def _require_same_selection(folder: StoreFolder, model: nn.Module, params: Selector) -> None:
    """Raise where other parameters are asked for than those that the rows are gradients in."""
    if params is None or folder.record["sketch"] is not None or isinstance(model, Linearized):
        return
    stored, given = set(folder.record["parameters"]), set(select_parameters(model, params))
    if stored != given:
        other = sorted(stored ^ given)
        raise InputError(
            f"params={params!r} of a store that was begun with others: {some(other)}",
            expected="the same parameters, or none",
            remedy="leave params= out, or begin a store in another folder",
        )


def _settled(
    folder: StoreFolder, likelihood: Likelihood | None, dtype: torch.dtype | None, shard_size: int | None
) -> Likelihood:
    """The likelihood; what was passed beside it is that of the store."""
    record = folder.record
    described = None if likelihood is None else json.loads(json.dumps(likelihood.describe()))
    given = {
        "likelihood": (likelihood, described, record["likelihood"]),
        "dtype": (dtype, dtype, DTYPES[record["dtype"]]),
        "shard_size": (shard_size, shard_size, folder.size),
    }
    for name, (value, own, stored) in given.items():
        if value is not None and own != stored:
            raise InputError(
                f"{name}={value!r} of a store that was begun with {stored!r}",
                expected="the same value, or none",
                remedy=f"leave {name}= out, or begin a store in another folder",
            )
    return from_description(record["likelihood"]) if likelihood is None else likelihood
