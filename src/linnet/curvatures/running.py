"""Running averages of a curvature, updated batch by batch during training.

After batches 1 ... t with weights w_s = decay^(t−s), every statistic is Σ_s w_s (statistic of batch s) and so
is the number of examples it stands for. Nothing starts from zero or from an identity, so that there is no
bias to correct: constant batches give the curvature of one of them at every step, for any decay.

EKFAC takes its eigenvalues in a basis that is renewed now and then. What has been averaged in the old basis
is carried over: the new eigenvalues are the old matrix' diagonal in the new basis,
(Q′_Bᵀ Q_B)² Λ ((Q′_Aᵀ Q_A)²)ᵀ with squares by element, which keeps the trace.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.accumulate import Accumulator, require_columns, sized_chunks
from linnet.curvatures.chain import ChainPass
from linnet.curvatures.curvature import Curvature, Provenance
from linnet.curvatures.engine import everything, layers_of
from linnet.curvatures.expectation import Expectation, choose_matrix
from linnet.curvatures.kfac import (
    EigenvalueSums,
    KroneckerSums,
    RowEigenvalueSums,
    RowMomentSums,
    shared_eigenvalue_sums,
)
from linnet.curvatures.kfra import RecursionSums, counted
from linnet.curvatures.layers import Layer, Part
from linnet.curvatures.settings import EXPECTATIONS
from linnet.curvatures.stream import Batch, Batches
from linnet.curvatures.sums import Sums
from linnet.curvatures.treatments import BY_LAYER, Structure, by_layer, make_sums, treatment
from linnet.distributed import Share, all_sum, collective, world
from linnet.errors import DataError, InputError
from linnet.likelihoods.likelihood import Likelihood, check_likelihood
from linnet.linalg.operator import require_params
from linnet.memory import parse_bytes
from linnet.params import choice, flag, instance, integer, number, optional
from linnet.params import seed as checked_seed
from linnet.shown import Shown
from linnet.tangent.batch import Inputs, batch_size, example_shapes, take
from linnet.tangent.functional import Functional, tensors_by_name
from linnet.tangent.inputs import taken
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode
from linnet.tree import from_plain, tensors_in, to_plain

RENEWAL = 10  # batches between two bases of EKFAC
LOOKED_AT = 32  # examples on which a network is proved to be a chain
UNCOUNTED = (  # an error: what was wrong, expected, to do
    "all targets are masked or ignored",
    "at least one example that counts",
    "leave such batches out",
)


class RunningAverage(Shown, ABC):
    """A curvature as an exponential average over batches: what is the same for all structures."""

    def __init__(
        self,
        model: nn.Module | Functional,
        structure: Structure,
        expectation: Expectation,
        sharing: str,
        decay: float,
    ) -> None:
        if isinstance(model, Functional):
            self.function = model.copy()
        else:
            self.function = model.function.copy() if isinstance(model, Linearized) else Functional(model)
        self.structure, self.expectation, self.sharing, self.decay = structure, expectation, sharing, decay
        self.batches = 0
        self.examples = torch.zeros((), dtype=torch.float64, device=self.function.device)

    def _shown(self) -> dict[str, Any]:
        known = {"structure": self.structure, "P": self.function.space.dim, "batches": self.batches}
        return {**known, "examples": float(self.examples), "decay": self.decay}

    @abstractmethod
    def _prepare(self, batch: Batch) -> None:
        """Find the layers, on the first batch."""

    @abstractmethod
    def _take(self, batch: Batch, processes: int, seen: ChainPass | None) -> None:
        """Fade the statistics and add a batch; one that fails changes nothing."""

    @abstractmethod
    def _parts(self, scale: float | None) -> list[Part]:
        """The blocks of the average, or of a multiple of it."""

    @abstractmethod
    def _statistics(self) -> Sequence[tuple[str, Sums | RecursionSums]]:
        """All statistics, by name."""

    @abstractmethod
    def _restart(self, state: Mapping[str, Tensor], first: Batch | None) -> None:
        """Make the statistics that a state was saved of, or none."""

    # -- averaging -------------------------------------------------------------------------------

    @in_exact_mode
    @torch.no_grad()
    def add(
        self, x: Inputs, y: Tensor | None = None, shared: bool = False, seen: ChainPass | None = None
    ) -> None:
        """Fade what was added before, and add a batch.

        Args:
            x: N examples.
            y: Targets (N, ...), where the expectation needs them.
            shared: Whether every process of ``torch.distributed`` adds a batch of its own now, and all get
                the sum.
            seen: A forward pass over x at the weights of the last :meth:`refresh`, where there is one.

        Raises:
            DataError: If the batch is empty, not finite, or lacks targets.
            ModelError: If the outputs are not finite.
        """
        flag("shared", shared)
        optional(instance, "seen", seen, ChainPass, "a forward pass of linnet's own")
        with collective(f"{type(self).__name__}.add", shared):
            rank, processes = world() if shared else (0, 1)
            batch = replace(self._batch(x, y), index=self.batches * processes + rank)
            self._prepare(batch)
            self._take(batch, processes, seen)
            self.batches += 1

    def _batch(self, x: Inputs, y: Tensor | None = None) -> Batch:
        """Examples, checked, on the network's device."""
        x = taken(self.function, x)
        return Batches(x if y is None else (x, y), self.function, max(1, batch_size(x))).first()

    # -- reading ---------------------------------------------------------------------------------

    @in_exact_mode
    def curvature(self, examples: float | None = None) -> Curvature:
        """The average as an operator with closed forms.

        It is a copy: batches added later do not change it. Its ``output_covariance`` runs the network as
        :meth:`refresh` last left it.

        Args:
            examples: Number of examples to scale the sum to, such as the size of the training set; by
                default the number that it stands for, ``examples``.

        Returns:
            The curvature.

        Raises:
            DataError: If no batch has been added.
            InputError: If ``examples`` is no positive number.
        """
        if self.batches == 0:
            raise DataError(
                "no batch has been added", expected="at least one", remedy="call add(x, y) before curvature()"
            )
        own = float(self.examples)
        if own == 0:
            raise DataError(*UNCOUNTED)
        wanted = number("examples", own if examples is None else examples, above=0)
        parts = tuple(self._parts(None if examples is None else wanted / own))
        name = self.structure if isinstance(self.structure, str) else "mixture"
        made = Provenance.of(self.expectation, name, self.sharing, float(wanted))
        return Curvature(parts, self.function, made)

    # -- following the network -------------------------------------------------------------------

    def refresh(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Take over the weights and buffers of a network that has been trained on.

        Tensors are copied, nothing else is: layers, plans of differentiation and averages stay.

        Args:
            model: The network, of the same architecture, or tensors by name.

        Raises:
            WeightsError: If a tensor has another shape.
            ModelError: If a value is not finite.
        """
        if isinstance(model, nn.Module):
            model = tensors_by_name(model)
        require_params(model, "model")
        self.function.moved(model, in_place=True, plans=True)

    # -- keeping ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All averages, for ``torch.save`` or safetensors; copies.

        Returns:
            Tensors by name.
        """
        counts = {"examples": self.examples, "batches": torch.tensor(self.batches)}
        tensors = {**counts, **self._layers(), **self._tensors()}
        return {name: tensor.clone() for name, tensor in tensors.items()}

    @in_exact_mode
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], x: Inputs) -> None:
        """Go on from saved averages, of the same network and settings.

        Args:
            state: From :meth:`state_dict`.
            x: A few examples, to run the network on, and to find the layers on where the state has none.

        Raises:
            InputError: If the averages belong to another network or structure.
        """
        require_params(state, "state")
        begun = integer("state['batches']", state.get("batches", 1), 0) > 0
        self._restart(state, self._batch(x) if begun else None)
        own = self._tensors()
        layers = self._layers() if "layers" in state else {}
        _match({"examples", "batches", *layers, *own}, set(state))
        _fill(own, state)
        self.examples.fill_(number("state['examples']", state["examples"], least=0))
        self.batches = integer("state['batches']", state["batches"], 0)

    def _layers(self) -> dict[str, Tensor]:
        """The layers that were found, by name, as bytes; those of another batch could differ."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of all statistics, by name."""
        return {f"{own}/{name}": t for own, sums in self._statistics() for name, t in sums.tensors.items()}


class RunningCurvature(RunningAverage):
    """A curvature as an exponential average over batches, for optimizers and continual learners.

    Args:
        model: The network, a ``Linearized`` or a ``Functional``; it is copied, :meth:`refresh` follows it.
        likelihood: What the outputs mean.
        structure: ``"kfac"``, ``"ekfac"``, ``"diagonal"``, ``"block"``, ``"full"``, or a mapping that mixes
            them, as in :func:`linnet.curvature`.
        expectation: ``"exact"``, ``"mc"``, ``"random-projection"`` or ``"empirical"``.
        sharing: ``"expand"`` or ``"reduce"``.
        decay: How much older batches count when one is added; 1 for plain sums.
        seed: Seed of everything random.

    Attributes:
        function: The frozen copy of the network.
        examples: Number of examples that the sums stand for, each faded like its batch.
        batches: Number of batches added.

    Raises:
        InputError: If an argument has a value that is not listed.

    Source:
        Martens and Grosse 2015, section 5 (averages); George et al. 2018, section 4.2 (bases).

    Example:
        >>> from linnet.likelihoods import Categorical
        >>> net = nn.Linear(3, 2)
        >>> running = RunningCurvature(net, Categorical(), "kfac", decay=0.9)
        >>> for _ in range(3):
        ...     running.add(torch.ones(4, 3))
        >>> running.batches, running.curvature(examples=100).made.examples
        (3, 100.0)
    """

    def __init__(
        self,
        model: nn.Module | Functional,
        likelihood: Likelihood,
        structure: Structure = "kfac",
        expectation: str = "exact",
        sharing: str = "expand",
        decay: float = 0.95,
        seed: int = 0,
    ) -> None:
        check_likelihood(likelihood)
        if not isinstance(structure, Mapping) or not structure:
            elsewhere = "use linnet.curvature for what needs all the data at once"
            choice("structure", structure, (*BY_LAYER, "full"), elsewhere)
        taken_one_by_one = [kind for kind in EXPECTATIONS if kind != "recursion"]
        choice("expectation", expectation, taken_one_by_one, 'pass expectation="mc" if unsure')
        choice("sharing", sharing, ("expand", "reduce"))
        number("decay", decay, above=0, most=1, remedy="pass decay=1.0 for plain sums")
        matrix = choose_matrix(likelihood, expectation, "auto")
        columns = Expectation(likelihood, expectation, matrix, 1, checked_seed("seed", seed))
        super().__init__(model, structure, columns, sharing, float(decay))
        self._assigned: list[tuple[Layer, str, str]] = []
        self._first: list[Sums] = []
        self._second: dict[int, EigenvalueSums | RowEigenvalueSums] = {}
        self._sizes: dict[Any, tuple[int, int]] = {}
        self._kinds: set[Any] = set()
        self._basis: dict[int, Sums] = {}  # the factors that the bases were made of

    def _take(self, batch: Batch, processes: int, seen: ChainPass | None) -> None:
        """Fade what was added before, and add a batch; EKFAC's basis is renewed now and then."""
        self._check_kind(batch)
        corrected = [i for i, (_, how, _) in enumerate(self._assigned) if how == "ekfac"]
        if corrected and self._second and self.batches % RENEWAL == 0:
            self._renew(processes > 1)
        begun = bool(self._second) or not corrected
        size = self._add(batch, [*self._first, *self._second.values()], processes, seen)
        if not begun:  # a basis needs factors first: the first batch is taken twice
            self._renew(processes > 1)
            self._add(batch, list(self._second.values()), processes, seen)
        self.examples.mul_(self.decay).add_(size)

    @in_exact_mode
    @torch.no_grad()
    def renew_basis(self) -> None:
        """Turn EKFAC's eigenvalues into the eigenbasis of the present factors; done every 10 batches."""
        self._renew(shared=False)

    def _renew(self, shared: bool) -> None:
        """Renew the basis, to the same one on all processes that add up."""
        firsts: dict[int, KroneckerSums | RowMomentSums] = {}
        for i, (_, how, _) in enumerate(self._assigned):
            if how == "ekfac":
                first = _snapshot(self._first[i])
                assert isinstance(first, KroneckerSums | RowMomentSums)
                firsts[i] = first
        share = Share(*world()) if shared else Share()
        fresh = shared_eigenvalue_sums(list(firsts.values()), share)
        for (i, first), new in zip(firsts.items(), fresh, strict=True):
            if i in self._second:
                _carry(self._second[i], new)
            self._second[i], self._basis[i] = new, first

    def _check_kind(self, batch: Batch) -> None:
        """Raise if a batch of another shape or type than any before it cannot be run on."""
        kind = tuple((t.shape[1:], t.dtype) for t in tensors_in(batch.x))
        if kind not in self._kinds:
            self.function.check_runs(take(batch.x, slice(0, 1)))
            self._kinds.add(kind)

    def _layers(self) -> dict[str, Tensor]:
        """The layers as bytes of JSON."""
        layers = json.dumps(to_plain([layer for layer, _, _ in self._assigned])).encode()
        return {"layers": torch.tensor(list(layers), dtype=torch.uint8)} if self._assigned else {}

    def _prepare(self, batch: Batch, known: Tensor | None = None) -> None:
        """Take the layers from a state, or find them on the first batch."""
        if self._first:
            return
        self.function.check_runs(take(batch.x, slice(0, 1)))
        if self.structure == "full":
            self._assigned = [(everything(self.function), "full", "")]
        else:
            layers = layers_of(self.function, batch) if known is None else self._saved_layers(known)
            chosen = by_layer(self.structure, layers)
            self._assigned = [(layer, *treatment(layer, chosen[layer.name])) for layer in layers]
        function = self.function
        self._first = [
            make_sums(layer, how, self.sharing, function.dtype, function.device)
            for layer, how, _ in self._assigned
        ]

    def _saved_layers(self, known: Tensor) -> list[Layer]:
        """The layers of a state, which must be of this network."""
        try:
            layers: list[Layer] = from_plain(json.loads(bytes(known.tolist())))
            shapes = {name: tuple(shape) for layer in layers for name, shape in layer.shapes_by_name.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise _other_state("holds no layers under 'layers'") from error
        if shapes != {name: tuple(shape) for name, shape in self.function.space.shapes.items()}:
            raise _other_state("has layers of other parameters")
        return layers

    def _add(self, batch: Batch, sums: Sequence[Sums], processes: int, seen: ChainPass | None) -> float:
        """Fade sums and add a batch to them; the number of examples, those of all processes."""
        new = [_snapshot(s, empty=True) for s in sums]
        size, columns = self._chunks(batch)
        accumulator = Accumulator(self.function, self.expectation, new, columns)
        starts = range(0, batch.size, size)
        # one column of the whole batch takes no more memory than the pass that is kept already
        whole = seen if columns == 1 or len(starts) == 1 else None
        if whole is not None:
            accumulator.add(replace(batch, index=batch.index * len(starts)), whole)
        for k, start in enumerate(starts if whole is None else ()):
            accumulator.add(batch.part(slice(start, start + size), batch.index * len(starts) + k))
        if processes > 1:
            accumulator.share()
        for statistic, own in zip(sums, new, strict=True):  # only now: a batch that fails changes nothing
            statistic.fade(self.decay)
            for name, tensor in statistic.tensors.items():
                tensor += own.tensors[name]
        return float(accumulator.examples)

    def _chunks(self, batch: Batch) -> tuple[int, int]:
        """Examples and columns at once; found for each shape of an example once."""
        key = example_shapes(batch.x)
        if key not in self._sizes:
            f = self.function.check_runs(take(batch.x, slice(0, 1)))
            formed = [a.size for a, how, _ in self._assigned if how in ("block", "full") or not a.factored]
            budget = parse_bytes(None, self.function.device)
            require_columns(self.function, batch, f, self.expectation, budget)
            chunks = sized_chunks(self.function, batch, f, self.expectation, max(formed, default=0), budget)
            self._sizes[key] = chunks.examples, chunks.columns
        return self._sizes[key]

    def _parts(self, scale: float | None) -> list[Part]:
        """The blocks of the average, or of a multiple of it."""
        parts = []
        for i, (layer, how, note) in enumerate(self._assigned):
            block = _snapshot(self._second[i] if how == "ekfac" else self._first[i]).block()
            parts.append(Part(layer, block if scale is None else block.scaled(scale), how, note))
        return parts

    def _restart(self, state: Mapping[str, Tensor], first: Batch | None) -> None:
        """Make the statistics that a state was saved of; a basis is made of its factors."""
        self._assigned, self._first, self._second, self._basis = [], [], {}, {}
        if first is not None:
            self._prepare(first, state.get("layers"))
            corrected = {i: s for i, s in enumerate(self._first) if self._assigned[i][1] == "ekfac"}
            factors = {f"basis/{i}/{name}": t for i, s in corrected.items() for name, t in s.tensors.items()}
            _fill(factors, state)
            self.renew_basis()

    def _statistics(self) -> Sequence[tuple[str, Sums]]:
        """All statistics, by kind and layer."""
        kinds = ("first", dict(enumerate(self._first))), ("second", {**self._second}), ("basis", self._basis)
        return [(f"{kind}/{i}", statistic) for kind, sums in kinds for i, statistic in sums.items()]


class RunningRecursion(RunningAverage):
    """The :class:`RunningCurvature` of KFRA, whose recursion runs with the weights at the time of reading."""

    def __init__(
        self, function: Functional, likelihood: Likelihood, decay: float = 0.95, seed: int = 0
    ) -> None:
        matrix = choose_matrix(likelihood, "recursion", "auto")
        columns = Expectation(likelihood, "recursion", matrix, 1, seed)
        self._sums: RecursionSums | None = None
        super().__init__(function, "kfra", columns, "expand", decay)

    @in_exact_mode
    @torch.no_grad()
    def look(self, x: Inputs) -> ChainPass | None:
        """A forward pass at the weights of the last ``refresh``, for ``add`` and for other uses."""
        return None if self._sums is None else ChainPass.of(self.function, self._sums.layers, x)

    def _prepare(self, batch: Batch) -> None:
        """Find and prove the chain, on the first batch."""
        if self._sums is None:
            few = batch.part(slice(0, LOOKED_AT))
            proving = RecursionSums(self.function, self.expectation, few)
            own, f, y = counted(self.function, self.expectation, few)
            if not len(f):
                raise DataError(*UNCOUNTED)
            proving.add(own, f, y)
            self._sums = RecursionSums(self.function, self.expectation, few, probes=1)

    def _take(self, batch: Batch, processes: int, seen: ChainPass | None) -> None:
        """Fade the sums and add a batch, in one forward pass where all its examples count."""
        sums = self._sums
        assert sums is not None, "the chain has been found"
        fresh = {name: torch.zeros_like(t) for name, t in sums.tensors.items()}
        kept, sums.tensors = sums.tensors, fresh
        try:
            mask = None if batch.y is None else self.expectation.likelihood.mask(batch.y)
            if mask is not None and not bool(mask.any()):
                pass  # nothing counts: the averages only fade
            elif mask is not None and not bool(mask.all()):
                sums.add(*counted(self.function, self.expectation, batch))
            elif (chain := seen or self.look(batch.x)) is not None and bool(chain.outputs.isfinite().all()):
                sums.add_pass(chain, self.expectation.targets(chain.outputs, batch.y))
            else:
                sums.add(batch, None, batch.y)
        finally:
            sums.tensors = kept
        if processes > 1:
            all_sum(list(fresh.values()))
        for name, tensor in kept.items():
            tensor.mul_(self.decay).add_(fresh[name])
        self.examples.copy_(kept["count"])

    def _parts(self, scale: float | None) -> list[Part]:
        """The blocks of the average, or of a multiple of it."""
        assert self._sums is not None, "a batch has been added"
        parts = self._sums.parts()
        if scale is None:
            return parts
        return [replace(part, operator=part.operator.scaled(scale)) for part in parts]

    def _statistics(self) -> Sequence[tuple[str, RecursionSums]]:
        """The sums, once the chain has been found."""
        return [] if self._sums is None else [("recursion", self._sums)]

    def _restart(self, state: Mapping[str, Tensor], first: Batch | None) -> None:
        """Find the chain again; it has been proved."""
        self._sums = None
        if first is not None:
            few = first.part(slice(0, LOOKED_AT))
            self._sums = RecursionSums(self.function, self.expectation, few, probes=1)


def _fill(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into statistics."""
    for key, tensor in own.items():
        _match({key}, {key} & set(state))
        if state[key].shape != tensor.shape:
            raise InputError(
                f"state[{key!r}] has shape {tuple(state[key].shape)}",
                expected=f"{tuple(tensor.shape)}",
                remedy="load averages of the same network with the same structure",
            )
        tensor.copy_(state[key])


def _match(wanted: set[str], found: set[str]) -> None:
    """Raise unless saved tensors have the right names."""
    if wanted != found:
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        what = f"lacks {missing[0]!r}" if missing else f"holds {extra[0]!r}"
        raise _other_state(what)


def _other_state(what: str) -> InputError:
    """The state is of averages that these cannot go on from."""
    return InputError(
        f"state {what}",
        expected="averages of the same network with the same structure",
        remedy="make the network, and what averages its curvature, with the arguments of those saved",
    )


def _snapshot(statistic: Sums, empty: bool = False) -> Sums:
    """A statistic with tensors of its own."""
    twin = copy.copy(statistic)
    twin.tensors = {
        name: torch.zeros_like(t) if empty else t.clone() for name, t in statistic.tensors.items()
    }
    return twin


def _carry(old: EigenvalueSums | RowEigenvalueSums, new: EigenvalueSums | RowEigenvalueSums) -> None:
    """The eigenvalues of one basis as the diagonal in another: (Q′_Bᵀ Q_B)² Λ ((Q′_Aᵀ Q_A)²)ᵀ."""
    block = old.block()
    values = block.values
    if new.basis.left_vectors is not None and block.left_vectors is not None:
        values = (new.basis.left_vectors.mT @ block.left_vectors).square() @ values
    if new.basis.right_vectors is not None and block.right_vectors is not None:
        values = values @ (new.basis.right_vectors.mT @ block.right_vectors).square().mT
    if isinstance(new, EigenvalueSums) and new.layer.transposed:
        values = values.mT
    target = new.tensors["values"]
    target.copy_(values.reshape(target.shape))
