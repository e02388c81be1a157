"""The linear fit of a linearized network under squared loss: what ``linnet.fit`` returns.

    f(x) = f₀(x) + J(x) δ,    δ = argmin ½ Σᵢ ‖tᵢ − f(xᵢ)‖² + ½ ρ‖δ‖²

With ``solver="shared"`` the features are those of a few combinations of the outputs (``combinations.py``):
every output has displacements of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.accuracy import sound_change
from linnet.fitting.arguments import Choices as Choices
from linnet.fitting.arguments import base_outputs, count_in_words, linear_outputs
from linnet.fitting.export import ExportedPosterior, exported_directions, exported_fit
from linnet.fitting.fit_files import write_fit
from linnet.fitting.merged import Merged, merged_network
from linnet.fitting.squared_fit import SquaredFit
from linnet.linear.constrained_system import constrained
from linnet.linear.constraints import Constraints, wanted
from linnet.linear.features import Heads
from linnet.linear.saved import system_state
from linnet.linear.system import System
from linnet.linear.targets import Targets
from linnet.params import number
from linnet.tangent.batch import Inputs, batch_size
from linnet.tangent.coordinates import Coordinates
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional
from linnet.tangent.gather import owned
from linnet.tangent.graph import Prototype, Traced
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode


class LinearFit(SquaredFit):
    """A solved linear fit. ``linnet.fit`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        module: The trained ``Linearized``; at δ = 0 with ``solver="shared"``.
        system: The solved equations, in samples or in weights.
        record: What was chosen and why.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.ones(3, 2).cumsum(0)
        >>> fit = linnet.fit(linnet.linearize(net), (x, x[:, :1]))
        >>> fit.loo().shape, fit.forget([0]).n
        (torch.Size([3, 1]), 2)
    """

    def __init__(self, module: Linearized, targets: Targets, system: System, record: Choices) -> None:
        super().__init__(system, targets, record)
        self.module = module
        if not system.shared:
            self._set_delta()

    @torch.no_grad()
    def _set_delta(self) -> None:
        """Give the module the solution, δ = Jᵀβ + Aᵀν."""
        module, nu = self.module, self.system.multipliers
        for name, value in module.space.to_params(self.system.delta).items():
            module.delta[name].copy_(value)
        if self.constraints is not None and nu is not None:
            self.constraints.refined(module, nu)

    def _compared(self) -> tuple[Any, ...]:
        """What processes that ask it together must have alike; each may have rounded its δ by itself."""
        return self.module.function, self.x, self.targets, f"{self.ridge:.4g}"

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def _function(self) -> Functional:
        """The network."""
        return self.module.function

    @property
    def constraints(self) -> Constraints | None:
        """Equations on outputs that the fit obeys, ``None`` without any."""
        return self.system.constraints

    @property
    def combinations(self) -> Tensor | None:
        """V, (C, M), whose columns are the combinations of outputs that make a shared kernel."""
        basis = self.system.problem.basis
        return basis.combinations if isinstance(basis, Heads) else None

    @property
    def delta(self) -> Params:
        """δ by parameter name: the fit's own tensors, not to be written to; ``displacement`` gives copies."""
        self._require_own_weights("delta")
        return {name: t.detach() for name, t in self.module.delta.items()}

    @torch.no_grad()
    def displacement(self) -> dict[str, Tensor]:
        """δ of every weight of the network, also where the fit has other coordinates.

        Returns:
            Copies, by parameter name; of a sketched network or one with a metric δ = H ε.

        Raises:
            InputError: If every output has displacements of its own (``solver="shared"``).
        """
        model, delta = self.module.model, self.delta
        found = model.displacement(delta["epsilon"]) if isinstance(model, Coordinates) else delta
        return {name: t.clone() for name, t in found.items()}

    def _require_own_weights(self, what: str) -> None:
        """Raise where every output has weights of its own."""
        if self.system.shared:
            raise InputError(
                f'{what} of a fit with solver="shared"',
                expected="a fit whose outputs share their weights: here every output has weights of its own",
                remedy="fit with another solver; predictive(), and export() without variance= work",
            )

    def _start(self, x: Inputs) -> Tensor:
        """f₀(x)."""
        base = base_outputs(self.module, x)
        return base.double() if self.system.shared else base

    def _outputs(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ."""
        return super()._outputs(x) if self.system.shared else linear_outputs(self.module, x)

    # -- changes ---------------------------------------------------------------------------------

    @in_exact_mode
    def constrain(
        self, x: Inputs, targets: Any = None, groups: Any = None, *, weight: float | None = None
    ) -> LinearFit:
        """The optimum among outputs that obey linear equations, on top of those that hold already.

        Outputs are held at old predictions (backward compatibility) or other values; groups get equal
        mean outputs (linear fairness). ``forget`` and ``update`` keep the equations, and leave-one-out,
        influence and covariances are those of the fit that obeys them.

        Args:
            x: M examples.
            targets: Outputs (M, C) to hold, NaN where an output is free; integer classes (M,) stand for
                their training targets.
            groups: (M,) integers: every output has the same mean over each of the groups.
            weight: w, to add ½w‖S f − v‖² to the objective instead of requiring S f = v, at any ridge.

        Returns:
            A new fit; ``summary()["reasons"]["constraints"]`` says what holds and what was redundant.

        Raises:
            InputError: If equations contradict each other, an argument does not fit the inputs, or every
                output has weights of its own (``solver="shared"``).
            MemoryBudgetError: If there are too many equations for the budget.

        Example:
            >>> import linnet
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> x = torch.eye(3, 2).double()
            >>> fit = linnet.fit(linnet.linearize(net.double()), (x, x[:, :1]))
            >>> fit.constrain(x[:1], torch.tensor([[0.25]])).predict(x[:1])
            tensor([[0.2500]], dtype=torch.float64)
        """
        start = time.perf_counter()
        self._require_own_weights("constrain()")
        if weight is not None:
            number("weight", weight, above=0, remedy="leave weight= out for equations that hold exactly")
        x = owned(self._examples(x), self.memory)
        asked = wanted(x, targets, groups, self._targets, self.module.function.device)
        system = constrained(self.module, self.system, asked, weight, self.memory)
        what = f"constrained {count_in_words(batch_size(x))}"
        return sound_change(self._changed(self._targets, system, what, start))

    def _made(self, system: System, targets: Targets, record: Choices) -> LinearFit:
        """A fit by another system on the same network."""
        if system.constraints is not None:
            record = replace(record, reasons={**record.reasons, "constraints": system.constraints.says()})
        return LinearFit(Linearized(self.module.function), targets, system, record)

    # -- elsewhere -------------------------------------------------------------------------------

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""
        if self.system.shared:
            return self._plain_shared(like, variance)
        if not variance:
            return exported_fit(self.module, like, None, kind)
        weights = self.system.problem.weights
        roots = None if weights is None else weights.diag_embed()
        posterior = ExportedPosterior(self.x, self.ridge, self.noise, roots, self.memory, self.constraints)
        return exported_fit(self.module, like, posterior, kind)

    def _plain_shared(self, like: Prototype, variance: bool) -> Traced:
        """The model with displacements of every output."""
        if variance:
            self._require_own_weights("export(variance=True)")
        problem, function = self.system.problem, self.module.function
        beta, combinations = self.system.beta.double(), self.combinations
        assert combinations is not None
        return exported_directions(
            function,
            problem.basis.plan(self.system.c, self.memory, ["the same in the module"]),
            lambda: problem.basis.weights(problem.examples, beta, self.memory).directions[0].by_output(),
            combinations.T.to(function.device, function.dtype),
            like,
        )

    def _merged(self, x: Inputs) -> Merged:
        """The network at θ₀ + δ, compared on examples."""
        self._require_own_weights("merge()")
        return merged_network(self.module, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Size, solver, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        shared = {} if self.combinations is None else {"combinations": self.combinations.shape[1]}
        return self._summary(self.module.space.dim) | shared

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load`` reads.
        """
        state = {
            "loss": "squared",
            "record": self.record,
            "x": self.x,
            "targets": self._targets,
            "solved": system_state(self.system),
            "residual": self.system.problem.residual,
            "combinations": self.combinations,
            "held_out": self.held_out,
        }
        return write_fit(directory, self.module.function, state)
