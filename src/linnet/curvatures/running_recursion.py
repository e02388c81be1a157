"""Running averages of KFRA, updated batch by batch during training.

The statistics of :class:`~linnet.curvatures.kfra.RecursionSums` (Σ â âᵀ, Σ φ' φ'ᵀ, Σ Λ at the end, and the
number of examples) are faded and added to; the recursion (Botev 2020, eq. 4.7) then runs with the weights
that the network has at the time of reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.curvature import Curvature, Provenance
from linnet.curvatures.expectation import Expectation, choose_matrix
from linnet.curvatures.kfra import RecursionSums
from linnet.curvatures.parts import Part
from linnet.curvatures.stream import Batch, Batches
from linnet.distributed import all_sum, together, world
from linnet.errors import DataError, InputError
from linnet.likelihoods.likelihood import Likelihood
from linnet.tangent.batch import Inputs, batch_size, take
from linnet.tangent.door import taken
from linnet.tangent.functional import Functional, tensors_by_name
from linnet.tangent.modes import in_exact_mode

LOOKED_AT = 32  # examples on which the network is proved to be a chain
UNCOUNTED = (  # an error: what was wrong, expected, to do
    "all targets are masked or ignored",
    "at least one example that counts",
    "leave such batches out",
)


class RunningRecursion:
    """The ``linnet.curvatures.running.RunningCurvature`` of KFRA."""

    def __init__(
        self, function: Functional, likelihood: Likelihood, decay: float = 0.95, seed: int = 0
    ) -> None:
        self.function, self.decay = function.copy(), decay
        matrix = choose_matrix(likelihood, "recursion", "auto")
        self.expectation = Expectation(likelihood, "recursion", matrix, 1, seed)
        self.batches = 0
        self._sums: RecursionSums | None = None

    @property
    def examples(self) -> Tensor:
        """Number of examples that the sums stand for."""
        return torch.zeros((), dtype=torch.float64) if self._sums is None else self._sums.tensors["count"]

    @in_exact_mode
    @torch.no_grad()
    def look(self, x: Inputs) -> ChainPass | None:
        """A forward pass at the weights of the last ``refresh``, for ``add`` and for other uses."""
        return None if self._sums is None else ChainPass.of(self.function, self._sums.layers, x)

    @in_exact_mode
    @torch.no_grad()
    def add(
        self, x: Inputs, y: Tensor | None = None, shared: bool = False, seen: ChainPass | None = None
    ) -> None:
        """Fade what was added before, and add a batch."""
        with together("RunningRecursion.add", shared):
            self._add_all(x, y, shared, seen)

    def _add_all(self, x: Inputs, y: Tensor | None, shared: bool, seen: ChainPass | None) -> None:
        """Fade what was added before, and add a batch; all processes together, if they are to."""
        rank, processes = world() if shared else (0, 1)
        x = taken(self.function, x)
        whole = Batches(x if y is None else (x, y), self.function, max(1, batch_size(x))).first()
        batch = replace(whole, index=self.batches * processes + rank)
        sums = self._prepared(batch)
        fresh = {name: torch.zeros_like(t) for name, t in sums.tensors.items()}
        kept, sums.tensors = sums.tensors, fresh
        try:
            mask = None if batch.y is None else self.expectation.likelihood.mask(batch.y)
            if mask is not None and not bool(mask.any()):
                pass  # nothing counts: the averages only fade
            elif mask is not None and not bool(mask.all()):
                sums.add(*self._counted(batch))
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
        self.batches += 1

    def _prepared(self, batch: Batch) -> RecursionSums:
        """The sums; on the first batch the chain is found and proved."""
        if self._sums is None:
            few = replace(
                batch,
                x=take(batch.x, slice(0, LOOKED_AT)),
                y=None if batch.y is None else batch.y[:LOOKED_AT],
            )
            proving = RecursionSums(self.function, self.expectation, few)
            proving.add(*self._counted(few))
            self._sums = RecursionSums(self.function, self.expectation, few, probes=1)
        return self._sums

    def _counted(self, batch: Batch) -> tuple[Batch, Tensor, Tensor | None]:
        """The examples of a batch that are not masked, their outputs and checked targets."""
        f = self.function.check_runs(batch.x)
        y = self.expectation.targets(f, batch.y)
        mask = None if y is None else self.expectation.likelihood.mask(y)
        if y is None or mask is None or bool(mask.all()):
            return batch, f, y
        kept = mask.any(1)
        if not bool(kept.any()):
            raise DataError(*UNCOUNTED)
        return replace(batch, x=take(batch.x, kept), y=y[kept]), f[kept], y[kept]

    @in_exact_mode
    def curvature(self, examples: float | None = None) -> Curvature:
        """The average as an operator with closed forms; a copy."""
        if self._sums is None:
            raise DataError(
                "no batch has been added", expected="at least one", remedy="call add(x, y) before curvature()"
            )
        own = float(self.examples)
        if own == 0:
            raise DataError(*UNCOUNTED)
        wanted = own if examples is None else float(examples)
        blocks, order = self._sums.blocks(), self.function.names
        layers = sorted(self._sums.layers, key=lambda layer: order.index(layer.names[0]))
        parts = tuple(Part(one, blocks[one.name].scaled(wanted / own), "kfra") for one in layers)
        e = self.expectation
        made = Provenance("kfra", e.matrix, e.kind, "expand", e.likelihood.describe(), wanted)
        return Curvature(parts, self.function, made)

    def refresh(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Take over the weights and buffers of a network that has been trained on."""
        tensors = tensors_by_name(model) if isinstance(model, nn.Module) else model
        self.function.moved(tensors, in_place=True, plans=True)

    def state_dict(self) -> dict[str, Tensor]:
        """All averages; copies."""
        tensors = {} if self._sums is None else self._sums.tensors
        return {"batches": torch.tensor(self.batches), **{name: t.clone() for name, t in tensors.items()}}

    @in_exact_mode
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], x: Inputs) -> None:
        """Go on from saved averages, of the same network."""
        self._sums, self.batches = None, int(state.get("batches", 0))
        if self.batches == 0:
            return
        few = Batches(x, self.function, LOOKED_AT).first()
        self._sums = RecursionSums(self.function, self.expectation, few, probes=1)
        for name, tensor in self._sums.tensors.items():
            if name not in state or state[name].shape != tensor.shape:
                raise InputError(
                    f"state lacks {name!r} of shape {tuple(tensor.shape)}",
                    expected="averages of KFRA of the same network",
                    remedy="build it with the arguments that the saved one had",
                )
            tensor.copy_(state[name])
