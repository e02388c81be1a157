"""The result of ``linnet.adapt``: a linear probe and the linearized layers below it.

    f(x) = Σᵢ K(x, xᵢ) βᵢ,        β = (K + ρI)⁻¹ t

with one kernel for all outputs. In weights it is f_c(x) = b_c + W_c φ̃(x) + Σ_h r_hᵀ ∂φ(x) δ_hc: a probe
and H linearizations of the layers below, each with its own δ. Those H·P·C numbers are formed for predictions
where they fit a share of the memory (``weights.py``), and not otherwise.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.fitting.arguments import positions, ridge_grid
from linnet.fitting.evaluation import count_in_words
from linnet.fitting.fitted import SquaredFit, more_data
from linnet.fitting.merged import Merged, compared
from linnet.fitting.record import Record
from linnet.linear.dual import DualSystem, RidgePath
from linnet.linear.targets import Targets
from linnet.nested.export import exported_nested, network_of_probe
from linnet.nested.features import Features
from linnet.nested.nested_files import write_nested
from linnet.nested.prior import Prior
from linnet.nested.rows import Rows
from linnet.nested.rungs import Rung
from linnet.nested.search import choose
from linnet.nested.weights import Weights
from linnet.params import flag, no_targets
from linnet.predictive.gaussian import GaussianPredictive
from linnet.predictive.noise import Noise
from linnet.tangent.batch import (
    Inputs,
    batch_size,
    check_examples,
    concatenate,
    take,
)
from linnet.tangent.functional import Functional
from linnet.tangent.hashing import hash_examples
from linnet.tangent.sizes import Prototype, Traced


class NestedFit(SquaredFit):
    """A linear probe and the linearized layers below it, fitted together. ``linnet.adapt`` makes it.

    Args:
        prior: The kernel.
        x: Training inputs, N examples.
        targets: Training targets.
        system: The solved equations.
        record: What was chosen and why.

    Attributes:
        prior: The kernel: the network, and the weight of its lower layers.
        x: Training inputs.
        system: The solved equations.
        record: What was chosen and why.
        rungs: The models that were compared on held-out folds, where the lower layers were to be trained.
        held_out: Outputs (N, C) by a network trained without the fold of the example, where it was trained.

    Example:
        >>> import linnet
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(20, 2)
        >>> fit = linnet.adapt(net, (x, (x[:, 0] > 0).long()))
        >>> fit.predict(x).shape, fit.loo().shape, fit.forget([0]).n
        (torch.Size([20, 2]), torch.Size([20, 2]), 19)
    """

    def __init__(self, prior: Prior, x: Inputs, targets: Targets, system: DualSystem, record: Record) -> None:
        super().__init__(targets, record)
        self.prior, self.x, self.system = prior, x, system
        self._phi: Tensor | None = None
        self._rows = Rows()
        self.rungs: tuple[Rung, ...] = ()

    @property
    def _solved(self) -> DualSystem:
        """The solved equations."""
        return self.system

    # -- what was fitted -------------------------------------------------------------------------

    @property
    def body_weight(self) -> float:
        """w, the share of the lower layers in the kernel: 0 for the linear probe alone."""
        return self.prior.mixture.weight

    @property
    def module(self) -> Features:
        """The network with random heads for its last layer, whose features and kernel the fit is made of."""
        return self.prior.features

    @property
    def memory(self) -> str | int | None:
        """Budget of kernels formed later."""
        return self.prior.memory

    @memory.setter
    def memory(self, budget: str | int | None) -> None:
        self.prior = replace(self.prior, memory=budget)

    @property
    def trained(self) -> bool:
        """Whether the lower layers were trained on the same samples."""
        return self.prior.features.trained

    @property
    def training_targets(self) -> Targets:
        """Targets of the fit, with their scale."""
        return self._targets

    @property
    def phi(self) -> Tensor:
        """φ̃ of the training examples, (N, D), computed when it is first needed."""
        if self._phi is None:
            self._phi = self.prior.phi(self.x)
        return self._phi

    # -- predictions -----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """f(x).

        Args:
            x: T examples.

        Returns:
            Outputs (T, C); for classes, the largest is the prediction.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = self._checked(x)
        cross = self._rows.known(hash_examples(x))
        if cross is None and (weights := self._weights) is not None:
            return weights.outputs(x).to(self.prior.features.function.dtype)
        return self._mean(self._to_train(x) if cross is None else cross)

    @cached_property
    def _weights(self) -> Weights | None:
        """The fit in its weights; ``None`` where its directions exceed a share of the memory."""
        if not Weights.affordable(self.prior, self.system.c):
            return None
        return Weights(self.prior, self.x, self.phi, self.system)

    @torch.no_grad()
    def predictive(self, x: Inputs, joint: bool = False) -> GaussianPredictive:
        """The posterior of the outputs: mean f and variance σ²/ρ [K(x,x) − K(x,X) M K(X,x)], M = (K + ρI)⁻¹.

        Args:
            x: T examples.
            joint: Whether covariances between examples are wanted, (T, C, T, C).

        Returns:
            A Gaussian for each example, or of all together; outputs are independent and of one variance.

        Raises:
            DataError: If x is empty or not finite.
        """
        x = self._checked(x)
        if flag("joint", joint):
            return self._joint(x)
        names = hash_examples(x)
        cross = self._rows.known(names)
        if cross is None:
            cross, own = self.prior.cross_and_own(x, self.x, self.phi)
            self._rows.keep(names, cross)
        else:
            own = self.prior.own(x)
        explained = (self.system.cross(cross) * cross).sum(1)
        variance = self.noise / self.ridge * (own - explained).clamp_min(0)
        mean = self._mean(cross)
        eye = torch.eye(self.system.c, dtype=mean.dtype, device=mean.device)
        spread = variance.to(mean.dtype)[:, None, None] * eye
        targets = Noise(self.noise, self.temperature, self.variance_scale)
        return GaussianPredictive(mean, spread, targets)

    def _joint(self, x: Inputs) -> GaussianPredictive:
        """The posterior of the outputs for all examples together."""
        cross = self._to_train(x)
        kernel = self.prior.square(x, self.prior.phi(x))
        covariance = self.noise / self.ridge * (kernel - self.system.cross(cross) @ cross.T)
        mean = self._mean(cross)
        eye = torch.eye(self.system.c, dtype=mean.dtype, device=mean.device)
        spread = torch.einsum("ij,cd->icjd", ((covariance + covariance.T) / 2).to(mean.dtype), eye)
        targets = Noise(self.noise, self.temperature, self.variance_scale)
        return GaussianPredictive(mean, spread, targets, joint=True)

    def _checked(self, x: Inputs) -> Inputs:
        """Examples, or an error."""
        check_examples(x)
        self.prior.features.function.check_runs(take(x, slice(0, 1)))
        return x

    def _to_train(self, x: Inputs) -> Tensor:
        """K(x, X), (T, N)."""
        names = hash_examples(x)
        cross = self._rows.known(names)
        if cross is None:
            cross = self.prior.cross(x, self.x, self.phi)
            self._rows.keep(names, cross)
        return cross

    def _mean(self, cross: Tensor) -> Tensor:
        """K(x, X) β in the network's type."""
        return (cross @ self.system.beta).to(self.prior.features.function.dtype)

    # -- audits ----------------------------------------------------------------------------------

    def loo(self) -> Tensor:
        """Outputs for each training example by the fit without it: exactly, without refitting.

        Where the lower layers were trained they are the held-out outputs of ``held_out`` instead.

        Returns:
            Leave-one-out outputs (N, C). No feature has seen a label; weight and ridge are kept.
        """
        if self.held_out is not None:
            return self.held_out
        residuals = self.system.loo_residuals()
        return self.targets.to(residuals) - residuals

    @torch.no_grad()
    def influence(self, x: Inputs) -> Tensor:
        """Influence of each training example on each prediction: prediction with it minus without it.

        Args:
            x: T examples.

        Returns:
            (N, T, C), in units of the outputs.

        Raises:
            DataError: If x is empty or not finite.
        """
        solved = self.system.cross(self._to_train(self._checked(x)))
        return torch.einsum("tn,nc->ntc", solved, self.system.loo_residuals())

    @torch.no_grad()
    def informativeness(self, x: Inputs | None = None) -> Tensor:
        """Change of predictions without each training example.

        Args:
            x: The examples whose predictions count; by default the training examples.

        Returns:
            Mean over x of ‖f(x) − f₋ᵢ(x)‖², (N,).

        Raises:
            DataError: If x is empty or not finite.
        """
        if x is None:  # K M = I − ρM
            solved = -self.ridge * self.system.inverse
            solved.diagonal().add_(1)
        else:
            solved = self.system.cross(self._to_train(self._checked(x)))
        return solved.square().mean(0) * self.system.loo_residuals().square().sum(1)

    def path(self, ridges: Tensor | list[float] | None = None) -> RidgePath:
        """Leave-one-out error, GCV, evidence and degrees of freedom along a path of ridges.

        Args:
            ridges: ρ, (R,), all positive; by default seven decades around the one that was chosen.

        Returns:
            The table, at the weight of the lower layers that the fit has.

        Raises:
            InputError: If a ridge is not positive.
        """
        given = self.ridges() if ridges is None else ridge_grid(ridges)
        return self.system.spectrum.path(given, self.classes is not None, self.targets)

    @torch.no_grad()
    def along(self, x: Inputs, ridges: Tensor) -> Tensor:
        """Outputs along a path of ridges.

        Args:
            x: T examples.
            ridges: ρ, (R,).

        Returns:
            (R, T, C).

        Raises:
            InputError: If a ridge is not positive.
        """
        grid = ridge_grid(ridges)
        cross, spectrum = self._to_train(self._checked(x)), self.system.spectrum
        coordinates = spectrum.coordinates.reshape(len(spectrum.values), -1)
        turned = cross @ spectrum.vectors
        return torch.stack([(turned / (spectrum.values + ridge)) @ coordinates for ridge in grid])

    def ridges(self) -> Tensor:
        """Seven decades of ridges around the mean of the kernel's diagonal, and the fit's own, (R,)."""
        decades = torch.logspace(-4, 3, 29, dtype=torch.float64)
        own = torch.tensor([self.ridge], dtype=torch.float64)
        found: Tensor = torch.cat([decades, own]).unique()
        return found.to(self.system.kernel.device)

    # -- changes ---------------------------------------------------------------------------------

    @torch.no_grad()
    def forget(self, indices: Any) -> NestedFit:
        """The fit without some training examples, exactly and without refitting.

        The scales of the two kernels, the weight of the lower layers and the ridge stay as they are.

        Args:
            indices: Their positions in the training data, each once.

        Returns:
            A new fit on the remaining examples.

        Raises:
            InputError: If an index is out of range or given twice, or nothing would be left.
        """
        start = time.perf_counter()
        index = positions(indices, self.n).to(self.system.kernel.device)
        keep = torch.ones(self.n, dtype=torch.bool, device=index.device)
        keep[index] = False
        targets = replace(self._targets, values=self.targets[keep])
        system = self.system.removed(index)
        what = f"forgot {count_in_words(len(index))}"
        made = self._changed(take(self.x, keep.nonzero()[:, 0]), targets, system, what, start)
        made._phi = None if self._phi is None else self._phi[keep]
        made.held_out = None if self.held_out is None else self.held_out[keep]
        return made

    @torch.no_grad()
    def update(self, data: Any, ridge: str | None = None) -> NestedFit:
        """The fit with more training examples, without refitting.

        Args:
            data: New examples: an (x, y) pair, a Dataset or a DataLoader.
            ridge: ``"loo"`` to choose the weight of the lower layers and the ridge again on all examples.

        Returns:
            A new fit on all examples, old ones first.

        Raises:
            DataError: If the data are empty, not finite, or have labels out of range.
            InputError: If ``ridge`` is neither.
        """
        start = time.perf_counter()
        no_targets("ridge", ridge)
        if ridge not in (None, "loo"):
            raise InputError(
                f"ridge={ridge!r}",
                expected='None or "loo"',
                remedy="leave ridge= out to keep what was chosen",
            )
        if ridge is not None and self.trained:
            raise InputError(
                "ridge='loo' on a fit whose lower layers were trained",
                expected="weights that have seen no label: leave-one-out would not be honest",
                remedy="leave ridge= out, or call adapt again on all examples",
            )
        x, new = more_data(self, self.prior.features.function, data)
        joined = concatenate([self.x, x])
        targets = replace(self._targets, values=torch.cat([self.targets, new.values.to(self.targets)]))
        what = f"added {count_in_words(batch_size(x))}"
        if ridge == "loo":
            made = solved(self.prior.features, joined, targets, self.prior.memory, self.record)
            reasons = {**made.record.reasons, "change": f"{what}; weight and ridge chosen again"}
            made.record = replace(made.record, reasons=reasons)
            return made
        phi = self.prior.phi(x)
        cross = self.prior.cross(x, self.x, self.phi).T
        system = self.system.extended(cross, self.prior.square(x, phi), new.values.to(self.system.residual))
        made = self._changed(joined, targets, system, what, start)
        made._phi = torch.cat([self.phi, phi])
        if self.held_out is not None:  # the fit before has not seen the new examples
            made.held_out = torch.cat([self.held_out, (cross.T @ self.system.beta).to(self.held_out)])
        return made

    def _changed(self, x: Inputs, targets: Targets, system: DualSystem, what: str, start: float) -> NestedFit:
        """A new fit of another system with the same kernel."""
        reasons = {**self.record.reasons, "change": what}
        seconds = {**self.record.seconds, "change": time.perf_counter() - start}
        made = NestedFit(
            self.prior, x, targets, system, replace(self.record, reasons=reasons, seconds=seconds)
        )
        return self._kept(made)

    def _kept(self, made: NestedFit) -> NestedFit:
        """A fit made from this one, with what held-out folds told: closed forms cannot find that again."""
        if self.held_out is not None:
            made._noise, made.rungs = self._noise, self.rungs
            made._moderation, made._point_temperature = self._moderation, self._point_temperature
            made.held_out = self.held_out if made.n == self.n else None
        return made

    @torch.no_grad()
    def recomputed(self) -> NestedFit:
        """The same fit from the network and the training data alone: nothing but the prior is kept.

        Returns:
            A fit to compare with, after many changes.
        """
        phi = self.prior.phi(self.x)
        kernel = self.prior.square(self.x, phi)
        system = DualSystem(kernel, self.targets, self.ridge)
        made = NestedFit(self.prior, self.x, self._targets, system, self.record)
        return self._kept(made)

    # -- elsewhere -------------------------------------------------------------------------------

    @property
    def _training_inputs(self) -> Inputs:
        """Training inputs."""
        return self.x

    def _examples(self, x: Inputs) -> Inputs:
        """Examples on the network's device, or an error."""
        return self._checked(x)

    def _plain(self, like: Prototype, variance: bool, kind: torch.dtype | None) -> Traced:
        """The model as a plain module, its variances computed in a type, or in the network's."""
        noise = self.noise if variance else None
        return exported_nested(self.prior, self.phi, self.system, (self.x, like), noise, kind)

    def _merged(self, x: Inputs) -> Merged:
        """The network with the probe for its last layer, compared on examples."""
        network = network_of_probe(self.prior, self.x, self.phi, self.system)
        function = Functional(network, "all", self.prior.features.function.output)

        def both(part: Inputs) -> tuple[Tensor, Tensor, Tensor]:
            linear = self.predict(part)
            return linear, torch.zeros_like(linear), function.flat(function.theta, part)

        return compared(network, both, x, self.classes)

    # -- keeping ---------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Size, weights, ridge and the reasons for choices, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """
        features = self.prior.features
        own = {"features": features.width, "body_weight": self.body_weight, "trained": self.trained}
        return {**self._summary(features.space.dim), **own, "rungs": [asdict(rung) for rung in self.rungs]}

    def __repr__(self) -> str:
        """Samples, outputs, and what was chosen."""
        kind = f"{self.classes} classes" if self.classes is not None else f"{self.system.c} value(s)"
        return (
            f"NestedFit({self.n} samples, {kind}, body weight {self.body_weight:g}, ridge {self.ridge:.3g})"
        )

    def save(self, directory: str | Path) -> Path:
        """Write the fit to a folder: safetensors and JSON, atomically.

        Args:
            directory: The folder; made if missing.

        Returns:
            The file that ``linnet.load_adapted`` reads.
        """
        tensors = {
            "targets": self.targets, "beta": self.system.beta, "kernel": self.system.kernel, "phi": self.phi
        }  # fmt: skip
        told: dict[str, Any] = {
            "ridge": self.ridge,
            "classes": self.classes,
            "scale": self._targets.scale,
            "record": asdict(self.record),
            "rungs": [asdict(rung) for rung in self.rungs],
        }
        if self.held_out is not None:  # closed forms cannot find again what held-out folds told
            tensors["held_out"] = self.held_out
            told["calibration"] = {
                "temperature": self.temperature,
                "point_temperature": self.point_temperature,
                "variance_scale": self.variance_scale,
                "noise": self.noise,
            }
        return write_nested(directory, self.prior, self.x, tensors, told)


@torch.no_grad()
def solved(
    features: Features,
    x: Inputs,
    targets: Targets,
    memory: str | int | None,
    record: Record,
    given: tuple[float | None, float | None] = (None, None),
    file: Path | None = None,
) -> NestedFit:
    """Form the kernels, choose what is not given, solve.

    Args:
        features: The network.
        x: Training inputs.
        targets: Training targets.
        memory: Budget of kernels.
        record: Solver and warnings; the rest is filled in.
        given: Weight of the body and ridge, ``None`` where leave-one-out is to choose.
        file: File of the body's kernel while it grows.

    Returns:
        The fit.
    """
    weight, ridge = given
    start = time.perf_counter()
    phi = features.phi(x)
    center = phi.mean(0)
    phi = phi - center
    head = phi @ phi.T
    body = torch.zeros_like(head) if weight == 0 else features.body(x, None, memory, file)
    seconds = {"kernel": time.perf_counter() - start}
    start = time.perf_counter()
    choice = choose(head, body, targets, weight, ridge)
    system = DualSystem(choice.mixture(head, body), targets.values, choice.taken.ridge)
    seconds["solve"] = time.perf_counter() - start
    record = replace(
        record,
        criterion="loo" if ridge is None else "given",
        reasons={**record.reasons, **choice.reasons()},
        warnings=(*record.warnings, *choice.warnings()),
        seconds=seconds,
    )
    fit = NestedFit(Prior(features, center, choice.mixture, memory), x, targets, system, record)
    fit._phi = phi
    return fit
