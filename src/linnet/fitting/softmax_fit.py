"""The linear fit of a linearized network under cross-entropy.

    δ = argmin Σᵢ ℓ(f₀(xᵢ) + Jᵢδ, yᵢ) + ½ ρ‖δ‖²

It offers what ``LinearFit`` offers, under the same names. The solution, forgetting and updates are exact up
to their certificate, ‖∇‖ relative to ‖∇‖ at δ = 0. What concerns leaving one example out takes one exact
Newton step from the optimum: ``check_loo`` measures how far that is from refitting. Uncertainty is Laplace's
approximation of the linear model, with the prior precision ρ and no noise to estimate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.accuracy import answerable, sound_change
from linnet.fitting.arguments import (
    base_outputs,
    count_in_words,
    linear_outputs,
    positions,
    ridge_grid,
)
from linnet.fitting.fitted import Fitted, joined_targets
from linnet.fitting.softmax_path import (
    LeftOut,
    SoftmaxPath,
    compare_left_out,
    followed,
    softmax_grid,
)
from linnet.linear.label_problem import class_problem, class_targets
from linnet.linear.newton import KernelNewton, NewtonSystem
from linnet.linear.saved import newton_state
from linnet.tangent.batch import Inputs
from linnet.tangent.linearized import Linearized
from linnet.tangent.modes import in_exact_mode

CHECKED = 3  # examples that are refitted where a ridge is chosen by leave-one-out


class SoftmaxFit(Fitted):
    """A solved cross-entropy fit. ``linnet.fit(..., loss="cross-entropy")`` makes it.

    Args:
        module: The linearized network; its δ is set to the solution.
        targets: Label probabilities.
        system: The solved problem.
        record: What was chosen and why.

    Attributes:
        module: The trained ``Linearized``.
        system: The solved problem, in samples or in weights.
        record: What was chosen and why.
        held_out: Outputs by a procedure that has not seen the example, where the head was cross-fitted.
        noise: 0; temperature, point_temperature and variance_scale are 1.
        chosen_path: The path that the ridge was chosen from; ``None`` where it was given.

    Example:
        >>> import linnet
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.linspace(-1, 1, 6)[:, None] * torch.ones(1, 2)
        >>> fit = linnet.fit(linnet.linearize(net), (x, (x[:, 0] > 0).long()), loss="cross-entropy")
        >>> fit.loo().shape, fit.forget([0]).n, fit.summary()["certificate"] < 1e-8
        (torch.Size([6, 2]), 5, True)
    """

    module: Linearized
    system: NewtonSystem
    loss = "cross-entropy"
    noise = 0.0  # the cross-entropy has its own, the draw of the class
    temperature = 1.0  # outputs are logits of the classes as they are
    point_temperature = 1.0  # and without their variance alike
    variance_scale = 1.0  # the variance of the logits counts as it is
    _unit = 1.0  # ρ is the precision of the prior

    def _outputs(self, x: Inputs) -> Tensor:
        """f₀(x) + J(x)δ, (T, C): logits."""
        return linear_outputs(self.module, x)

    # -- audits ----------------------------------------------------------------------------------

    @in_exact_mode
    def loo(self) -> Tensor:
        """Outputs for each training example without it: one exact Newton step from the optimum.

        Where the head was cross-fitted they are the held-out outputs of ``held_out`` instead.

        Returns:
            Leave-one-out outputs (N, C), approximate; ``check_loo`` says how far from refitting.

        Source:
            Pregibon 1981 (logistic regression); Giordano et al. 2019, Koh and Liang 2017.
        """
        return self.system.loo_outputs() if self.held_out is None else self.held_out

    @in_exact_mode
    def check_loo(self, examples: Any = None) -> LeftOut:
        """Refit without some examples and compare with the one Newton step of ``loo``.

        Args:
            examples: Their positions; by default the few whose outputs change most.

        Returns:
            Both outputs, and ``.error`` and ``.loss_error``.

        Raises:
            InputError: There is no position, or one is out of range or given twice.
        """
        system = self.system
        if examples is None:
            change = (system.loo_outputs() - system.outputs).norm(dim=1)
            index = change.argsort(descending=True)[: min(CHECKED, self.n - 1)]
        else:
            index = positions(examples, self.n, leave=0).to(self.module.function.device)
            if not len(index):
                raise InputError("examples is empty", "at least one position", "leave examples= out")
        again = [system.outputs_without(i) for i in index.tolist()]
        return compare_left_out(system, index, torch.stack(again))

    def path(self, ridges: Tensor | list[float] | None = None) -> SoftmaxPath:
        """Leave-one-out log loss, evidence and degrees of freedom along a path of ridges.

        Each ridge takes a few Newton steps from the one before; nothing is free here as it is for squares.

        Args:
            ridges: ρ, (R,), all positive; by default six decades around the scale of the kernel.

        Returns:
            The table, its ridges descending.

        Raises:
            InputError: If a ridge is not positive, or the fit was solved by conjugate gradients.
            NumericalError: If a ridge is below what rounding lets be answered.
        """
        system = self.system
        if not isinstance(system, KernelNewton):
            raise InputError(
                f"path needs the kernel, but the fit was solved by {self.solver!r}",
                expected='solver="dual"',
                remedy='fit again with solver="dual", or fit at each ridge',
            )
        if ridges is None:
            grid = softmax_grid(system.kernel, self.module.function.dtype)
        else:
            grid = answerable(self, ridge_grid(ridges)).sort(descending=True).values
        return followed(system, grid, self._targets)[0]

    # -- changes and files -----------------------------------------------------------------------

    def _check_new_ridge(self, ridge: Any) -> None:
        """Raise unless it is kept."""
        if ridge is not None:
            raise InputError(
                f"ridge={ridge!r} in update() of a fit with loss='cross-entropy'",
                expected="no ridge; it is kept",
                remedy="leave ridge= out, or fit all examples again with linnet.fit",
            )

    def _updated(self, x: Inputs, y: Tensor, ridge: Any, start: float) -> SoftmaxFit:
        """The fit with more examples: Newton's method from the present one."""
        new = class_targets(y, self.system.c, self.targets.dtype)
        more = class_problem(self._function, x, base_outputs(self.module, x), new.values)
        targets, what = joined_targets(self._targets, new), f"added {count_in_words(len(new.values))}"
        return sound_change(self._changed(targets, self.system.extended(more), what, start))

    @property
    def _roots(self) -> Tensor:
        """L with Λ = LLᵀ at the optimum, (N, C, D)."""
        return self.system.roots

    def summary(self) -> dict[str, Any]:
        """As of every fit, the objective and the Newton steps that it took.

        Returns:
            A dict that ``json`` can write.
        """
        return {**super().summary(), "objective": self.system.objective[-1], "steps": self.system.steps}

    def _state(self) -> dict[str, Any]:
        """The optimum."""
        return {"loss": self.loss, "solved": newton_state(self.system)}
