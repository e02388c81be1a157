"""A solved model: what it was made of, how it changes with its data, and how it is kept."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.files import save
from linnet.fitting.arguments import Choices, checked_inputs, count_in_words, positions
from linnet.fitting.merged import Merged, merged_network
from linnet.fitting.remarks import after_change
from linnet.fitting.sketch import SketchedNetwork, sketch_state
from linnet.linear.constraints import Constraints
from linnet.linear.newton import NewtonSystem
from linnet.linear.saved import newton_state
from linnet.linear.system import System
from linnet.linear.targets import Targets
from linnet.shown import Shown
from linnet.tangent.batch import Inputs, all_but, example_shapes, take
from linnet.tangent.data import Data, require_padding
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.inputs import called_by_numbers
from linnet.tangent.linearized import Linearized
from linnet.tangent.matching import identity
from linnet.tangent.modes import in_exact_mode


class SolvedFit(Shown):
    """Base class of all fits of data: the solved equations, and the same of other data.

    Args:
        module: What the model is made of: a ``Linearized``, whose δ is set to the solution, or a network with
            random heads.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.
    """

    loss: ClassVar[str] = "squared"  # as ``linnet.fit`` calls it
    kind: ClassVar[str] = "linear-fit"  # of the file
    system: System | NewtonSystem

    def __init__(self, module: Any, targets: Targets, system: Any, record: Choices) -> None:
        self.module, self.system, self.x = module, system, system.x
        self._targets, self.record = targets, record
        self.held_out: Tensor | None = None
        if not system.shared:
            with torch.no_grad():
                for name, value in module.space.to_params(system.delta).items():
                    module.delta[name].copy_(value)
            if self.constraints is not None:
                self.constraints.refine(module)

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def _function(self) -> Functional:
        """The network that runs on the examples, in whose type predictions are."""
        found: Functional = self.module.function
        return found

    @property
    def memory(self) -> str | int | None:
        """Budget of what is computed later."""
        return self.system.memory

    @memory.setter
    def memory(self, memory: str | int | None) -> None:
        self.system.memory = memory

    @property
    def trained(self) -> bool:
        """Whether the weights that the model is linear around were trained on the same examples."""
        return False

    @property
    def n(self) -> int:
        """Number of training examples."""
        return self.system.n

    @property
    def ridge(self) -> float:
        """ρ."""
        return self.system.ridge

    @property
    def constraints(self) -> Constraints | None:
        """Equations on outputs that the fit obeys, ``None`` without any."""
        return self.system.constraints

    @property
    def solver(self) -> str:
        """``"dual"``, ``"shared"``, ``"primal"``, ``"sketch"``, ``"cg"`` or ``"sgd"``."""
        return self.record.solver

    @property
    def targets(self) -> Tensor:
        """t, (N, C), not to be written to; label probabilities for the cross-entropy."""
        return self._targets.values

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs, where y was text; otherwise ``None``."""
        return self.record.classes or None

    @property
    def classes(self) -> int | None:
        """Number of classes, ``None`` for regression."""
        return self._targets.classes

    @property
    @abstractmethod
    def noise(self) -> float:
        """The noise variance σ²; 0 for the cross-entropy."""

    @property
    def delta(self) -> Params:
        """δ by parameter name: the fit's own tensors, not to be written to; ``displacement`` gives copies."""
        self._require_one_delta("delta")
        return {name: t.detach() for name, t in self.module.delta.items()}

    def _require_one_delta(self, what: str) -> None:
        """Raise where every output has weights of its own."""
        if self.system.shared:
            raise InputError(
                f"{what} of a fit with one kernel for all outputs",
                expected="a fit whose outputs share their weights: here every output has weights of its own",
                remedy='pass linnet.fit another solver than "shared"; predictive(), and export() without '
                "variance=, work",
            )

    def _summands(self) -> tuple[tuple[Any, float], ...]:
        """Itself, once."""
        return ((self, 1.0),)

    def _examples(self, x: Inputs, name: str = "x") -> Inputs:
        """Examples on the network's device, of which the outputs are those of the fit, or an error."""
        x, function = checked_inputs(self.module, x, name), self.module.function
        shapes, known = example_shapes(x), example_shapes(self.x)
        if self._targets.axis is None and len(shapes) == len(known) and shapes != known:
            found, expected = function.output_shape(x), function.output_shape(self.x)
            if found != expected:
                raise InputError(
                    f"{name} has examples of shape {_listed(shapes)}, of which the network makes outputs of "
                    f"shape {tuple(found)}, not {tuple(expected)}",
                    expected=f"examples such as those of the training, of shape {_listed(known)}",
                    remedy="pass them side by side, the first axis of each tensor the examples",
                )
        return x

    # -- changes ---------------------------------------------------------------------------------

    @in_exact_mode
    def forget(self, indices: Any = None, *, classes: Any = None) -> Self:
        """The fit without some training examples: exactly, or by Newton's method from the present optimum.

        Args:
            indices: Their positions in the training data, each once.
            classes: In place of positions, all examples of these classes: their numbers or names. A fit of
                ``linnet.adapt`` then never predicts them.

        Returns:
            A new fit on the remaining examples, exact to ``summary()["certificate"]``.

        Raises:
            InputError: If an index is out of range or given twice, a class has no example, both or neither
                are given, or nothing would be left.
        """
        if (indices is None) == (classes is None):
            given = "neither indices nor classes=" if indices is None else "indices and classes="
            raise InputError(f"forget() with {given}", "one of them", "say what is to be forgotten")
        chosen = indices if classes is None else self._of_classes(classes)
        index = positions(chosen, self.n).to(self._function.device)
        start = time.perf_counter()
        system, keep = self.system.removed(index), all_but(self.n, index.cpu())
        targets = self._targets.taken(keep)
        made = self._changed(targets, system, f"forgot {count_in_words(len(index))}", start)
        if self.trained and self.held_out is not None:
            made._keep_held_out(self, keep.to(self.held_out.device))
        return made

    def _keep_held_out(self, before: Self, keep: Tensor) -> None:
        """Take the held-out outputs of the examples that were not forgotten."""
        assert before.held_out is not None
        self.held_out = before.held_out[keep]

    @in_exact_mode
    def update(self, data: Any, ridge: float | str | None = None, *, sample_weight: Any = None) -> Self:
        """The fit with more training examples, without refitting.

        Args:
            data: New examples: an (x, y) pair, a Dataset, a DataLoader or batches.
            ridge: Of the squared loss another ρ, or "loo", "gcv" or "evidence" to choose it again on all
                examples; of ``linnet.adapt`` "loo" alone, which chooses the weight of the lower layers too.
                Kept by default, and of the cross-entropy always.
            sample_weight: What each new example counts in the loss, (M,); 1 by default. Others keep theirs.

        Returns:
            A new fit on all examples, old ones first, exact to ``summary()["certificate"]``.

        Raises:
            DataError: If the data are empty, not finite, or have labels out of range.
            InputError: If ``ridge`` is none of these.
        """
        start = time.perf_counter()
        self._check_new_ridge(ridge)
        if isinstance(sample_weight, str):
            raise InputError(
                f"sample_weight={sample_weight!r} in update()",
                expected="a number for each new example: the others keep theirs",
                remedy="pass numbers, or fit all examples again",
            )
        found = self._gathered(data).weighing(sample_weight)
        grown = self._grown(found)
        if sample_weight is not None:
            grown = grown._weighing()
        return grown._updated(*found.pair, ridge, start, found.weights)

    @in_exact_mode
    def relabel(self, indices: Any, y: Any) -> Self:
        """The fit with other labels of some training examples: as if it had been made with these.

        Args:
            indices: Positions of k examples in the training data, each once.
            y: Their classes or targets, k of them, as in the data of the fit; for a fit of ``linnet.adapt``
                also classes that it has not seen.

        Returns:
            A new fit on the same examples, exact to ``summary()["certificate"]``.

        Raises:
            DataError: If labels are out of range, or not one for each example.
            InputError: If an index is out of range or given twice, or there is none.
        """
        start, index = time.perf_counter(), positions(indices, self.n, leave=0)
        if not len(index):
            raise InputError("indices is empty", "at least one position", "say which examples are meant")
        index = index.to(self._function.device)
        data = self._gathered((take(self.x, index), y))
        grown = self._grown(data)
        targets, system = grown._relabelled(index, *data.pair)
        made = grown._changed(targets, system, f"relabelled {count_in_words(len(index))}", start)
        made.held_out = grown.held_out
        return made

    @abstractmethod
    def _relabelled(self, index: Tensor, x: Inputs, y: Tensor) -> tuple[Targets, Any]:
        """Targets and the solved equations with other labels of some examples, which are x."""

    def _of_classes(self, classes: Any) -> Tensor:
        """The positions of all examples of some classes, given by number or name."""
        names, labels = self.class_names or (), self._targets.labels
        given = classes.tolist() if isinstance(classes, Tensor | np.ndarray) else classes
        listed = [*given] if isinstance(given, list | tuple | set) else [given]
        listed = [*map(str, listed)] if called_by_numbers(names) else listed  # which are no places
        found = [names.index(one) if isinstance(one, str) and one in names else one for one in listed]
        known = () if labels is None else labels.unique().tolist()
        if labels is None or not found or not all(type(one) is not bool and one in known for one in found):
            expected = "a fit of classes" if labels is None else "numbers or names of classes with examples"
            raise InputError(f"classes={classes!r}", expected, "pass positions as indices, or see fit.labels")
        return torch.isin(labels, torch.tensor(found, device=labels.device)).nonzero()[:, 0]

    def _gathered(self, data: Any) -> Data:
        """More data, as the network takes them."""
        function, known = self._function, self.record.classes
        found = Data.of(data, function, memory=self.memory, classes=known, text=self._grows and bool(known))
        function.check_runs(take(found.x, slice(0, 1)))
        require_padding(function, self.x, found.x)
        return found

    @property
    def _grows(self) -> bool:
        """Whether an update may bring new classes."""
        return False

    def _grown(self, data: Data) -> Self:
        """The fit with outputs for all classes of new data."""
        return self

    def _check_new_ridge(self, ridge: Any) -> None:
        """Raise unless an update may take this ridge; under the cross-entropy it is kept."""
        if ridge is not None:
            raise InputError(
                f"ridge={ridge!r} in update() of a fit with loss='cross-entropy'",
                expected="no ridge; it is kept",
                remedy="leave ridge= out, or fit all examples again with linnet.fit",
            )

    @abstractmethod
    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float, sample_weight: Any) -> Self:
        """The fit with more examples, which were checked to run."""

    def _weighing(self) -> Self:
        """The same fit, of which every example has a weight."""
        raise InputError(
            f"sample_weight= in update() of a {type(self).__name__}{' with trained layers' * self.trained}",
            expected="a fit with one target or class for each example",
            remedy="leave sample_weight= out",
        )

    def _made(self, system: Any, targets: Targets, record: Choices) -> Self:
        """A fit by another system of the same model."""
        return type(self)(Linearized(self.module.function), targets, system, record)

    def _changed(self, targets: Targets, system: Any, what: str, start: float) -> Self:
        """A fit by another system of the same model, and with what was done."""
        steps = f", {system.described()}" if isinstance(system, NewtonSystem) else ""
        reasons = {**self.record.reasons, "change": what + steps}
        if system.constraints is not None:
            reasons["constraints"] = system.constraints.says()
        warnings = after_change(
            self.record.warnings, self._function.model, system.x, targets, likely=self.loss == "cross-entropy"
        )
        record = replace(self.record, reasons=reasons, warnings=warnings, seconds=dict(self.record.seconds))
        made = self._made(system, targets, record)
        record.seconds["change"] = time.perf_counter() - start
        return made

    # -- elsewhere -------------------------------------------------------------------------------

    def merge(self, x: Inputs | None = None) -> Merged:
        """The network at θ₀ + δ, and how far it is from the linear model.

        Args:
            x: Examples on which the two are compared; by default the training examples.

        Returns:
            The network in evaluation mode, the linearity gap and the share of equal classes.

        Raises:
            DataError: If x is empty or not finite.
            InputError: If no weights of the network have the fit's outputs to first order.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
            >>> x = torch.linspace(-1, 1, 20).view(10, 2)
            >>> merged = linnet.fit(linnet.linearize(net, params="last-layer"), (x, x[:, :1])).merge()
            >>> merged.network(x).shape, merged.gap < 1e-5
            (torch.Size([10, 1]), True)
        """
        return self._merged(self._examples(self.x if x is None else x))

    def _merged(self, x: Inputs) -> Merged:
        """The network at θ₀ + δ, compared on examples."""
        self._require_one_delta("merge()")
        return merged_network(self.module, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load`` reads.
        """
        state = {"record": self.record, "x": self.x, "targets": self._targets, "held_out": self.held_out}
        return save(directory, self.kind, {"network": self._identity(), **state, **self._state()})

    def _identity(self) -> dict[str, Any]:
        """What tells the network from others."""
        function = self._function
        model = function.model
        return identity(function) | {
            "float64": function.source is not None,
            "precision": {} if function.pinned is None else function.pinned.named(),
            # made by the fit, so that nobody else can bring it
            "sketch": sketch_state(model) if isinstance(model, SketchedNetwork) else None,
        }

    def _state(self) -> dict[str, Any]:
        """What a file holds beside the network, the record and the data: the optimum of the cross-entropy."""
        assert isinstance(self.system, NewtonSystem)
        return {"loss": self.loss, "solved": newton_state(self.system)}

    def summary(self) -> dict[str, Any]:
        """Size, solver, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write; ``"certificate"`` is the relative residual of the equations, for
            the cross-entropy ‖∇‖ relative to ‖∇‖ at δ = 0.
        """
        return {
            "loss": self.loss,
            "examples": self.n,
            "outputs": self.system.c,
            "parameters": self.module.space.dim,
            "classes": self.classes,
            "solver": self.solver,
            "ridge": self.ridge,
            "criterion": self.record.criterion,
            "noise": self.noise,
            "certificate": self.system.certificate(),
            "reasons": dict(self.record.reasons),
            "warnings": list(self.record.warnings),
            "seconds": dict(self.record.seconds),
        }

    def _shown(self) -> dict[str, Any]:
        told = self.summary()
        warnings = told.pop("warnings", ())
        return {**told, "warning": "; ".join(warnings)} if warnings else told


def _listed(shapes: tuple[Any, ...]) -> str:
    """Shapes of one example, of the one tensor or of several."""
    return str(shapes[0] if len(shapes) == 1 else shapes)


def unweighed(fit: SolvedFit, what: str) -> None:
    """Raise for a fit of which some examples count more than others."""
    if fit._targets.weights is not None:
        expected = "a fit without sample_weight="
        raise InputError(f"{what} of a fit with sample_weight=", expected, "fit the examples alike")
