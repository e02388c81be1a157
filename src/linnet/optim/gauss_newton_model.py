"""The objective on a batch, and its quadratic model along given directions.

    E(θ) = 1/N Σ_n ℓ(y_n, f(θ, x_n)) + ½ Σ_p λ_p θ_p²
    q(δ) = E + δᵀ∇E + ½ δᵀ C δ,    δᵀ C δ' = 1/N Σ_n (J_n δ)ᵀ Λ_n (J_n δ') + Σ_p (λ_p + τ) δ_p δ'_p

(Botev 2020, eq. 4.17 and 4.20). A direction costs one product J δ; no transpose is needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation, choose_matrix
from linnet.curvatures.kfra import RecursionSums
from linnet.curvatures.layers import Layer
from linnet.curvatures.running import RunningCurvature, RunningRecursion
from linnet.curvatures.settings import EXPECTATIONS
from linnet.curvatures.stream import Batches
from linnet.curvatures.treatments import Structure, resolve
from linnet.distributed import agree, all_sum
from linnet.errors import InputError, LinnetError, ModelError, NumericalError
from linnet.likelihoods.likelihood import Likelihood, training_nll
from linnet.number_types import wide_type
from linnet.optim.gauss_newton_settings import Settings, check_gradients, check_loss
from linnet.params import call, choice, warn
from linnet.tangent.batch import Inputs, batch_size, check_finite, concatenate, on_device, split, take
from linnet.tangent.functional import (
    Functional,
    OutputAdapter,
    called,
    without_wrapper,
)
from linnet.tangent.jacobian import jvp
from linnet.tangent.modes import in_exact_mode


def norm_of(v: Tensor) -> float:
    """‖v‖, in float32 or wider."""
    return float(v.to(wide_type(v.dtype)).norm())


def remember(state: dict[str, Any], key: str, value: Tensor) -> None:
    """Keep a copy where the last one was: large memory is costly to come by."""
    kept = state.get(key)
    if kept is None:
        state[key] = value.clone()
    else:
        kept.copy_(value)


def put(parameters: Sequence[Tensor], values: Sequence[Tensor], add: bool = False) -> None:
    """Change weights, also for a loss that is measured next under the same autocast."""
    for p, value in zip(parameters, values, strict=True):
        p.add_(value) if add else p.copy_(value)
    torch.clear_autocast_cache()  # it holds cast copies of the weights of before


Pair = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class Network:
    """The network that is trained, in its own mode."""

    model: nn.Module  # what is called
    parameters: dict[str, nn.Parameter]  # the trained parameters by name
    output: OutputAdapter  # how to turn the result into a tensor
    likelihood: Likelihood  # what it means
    shared: bool  # whether sums are taken over all processes

    def check_parameters(self, network: nn.Module) -> None:
        """Raise if a trained parameter is no longer the network's own."""
        for name, p in self.parameters.items():
            path, _, own = name.rpartition(".")
            try:
                found = getattr(network.get_submodule(path), own, None)
            except AttributeError:
                found = None
            if found is not p:
                raise InputError(
                    f"parameter {name!r} of the network is not the one that is trained",
                    expected="the network unchanged since the optimizer was created",
                    remedy="make a new optimizer where layers were replaced, or load weights into them",
                )

    def tell_unfrozen(self, network: nn.Module) -> None:
        """Warn of parameters that require a gradient and are not trained: frozen or not there before."""
        trained = {id(p) for p in self.parameters.values()}
        for name, p in network.named_parameters():
            if p.requires_grad and id(p) not in trained:
                warn(
                    f"parameter {name!r} was frozen or not there when the optimizer was made, and is not "
                    "trained: make a new optimizer, or name with params= what each of several trains"
                )
                return

    def losses(self, x: Inputs, y: Tensor) -> Tensor:
        """ℓ of every example, (N,); NaN where the outputs are not finite."""
        f = called(self.model, on_device(x, next(iter(self.parameters.values())).device), self.output)
        try:
            return training_nll(self.likelihood, f.to(wide_type(f.dtype)), y)
        except NumericalError:  # a step too far, which the optimizer takes back
            return torch.full((len(f),), math.nan, device=f.device)

    def loss(self, parts: Sequence[Pair]) -> float:
        """Mean loss, without a gradient."""
        with torch.no_grad():
            total = torch.stack([self.losses(x, y).double().sum() for x, y in parts]).sum()
        return self._mean(total, parts)[0]

    def gradient(self, parts: Sequence[Pair]) -> tuple[float, Tensor, int]:
        """Mean loss, its gradient (P,) with zeros for frozen parameters, and N."""
        free = [p for p in self.parameters.values() if p.requires_grad]
        sums, total = [torch.zeros_like(p) for p in free], torch.zeros(())
        for x, y in parts:
            with torch.enable_grad():
                value = self.losses(x, y).sum()
            grads = torch.autograd.grad(value, free, allow_unused=True) if value.requires_grad else []
            for total_p, g in zip(sums, grads, strict=False):
                if g is not None:
                    total_p += g
            total = total.to(value.device) + value.detach().double()
        found = dict(zip([id(p) for p in free], sums, strict=True))
        flat = torch.cat(
            [found.get(id(p), torch.zeros_like(p)).reshape(-1) for p in self.parameters.values()]
        )
        loss, n = self._mean(total, parts, flat)
        return loss, flat.div_(n), n

    def _mean(self, total: Tensor, parts: Sequence[Pair], flat: Tensor | None = None) -> tuple[float, int]:
        """A sum over examples as a mean, over all processes where data are shared."""
        count = torch.tensor([float(total), sum(batch_size(x) for x, _ in parts)], dtype=torch.float64)
        if self.shared:
            count = count.to(next(iter(self.parameters.values())).device)
            all_sum([count] if flat is None else [count, flat])
        return float(count[0] / count[1]), int(count[1])

    def remember_buffers(self, kept: dict[str, Tensor]) -> None:
        """Copy all buffers into a dictionary."""
        for name, b in without_wrapper(self.model).named_buffers():
            remember(kept, name, b)

    def restore_buffers(self, kept: Mapping[str, Tensor]) -> None:
        """Put buffers back: statistics that saw outputs of bad weights are as bad as these."""
        for name, b in without_wrapper(self.model).named_buffers():
            if name in kept:
                b.copy_(kept[name])

    def random_state(self) -> Tensor | None:
        """The random numbers ahead, where the network may use them."""
        if not self.model.training:
            return None
        device = next(iter(self.parameters.values())).device
        own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return torch.cat([torch.random.get_rng_state(), *own])

    @contextlib.contextmanager
    def replayed(self, state: Tensor | None) -> Iterator[None]:
        """The random numbers of an earlier pass again, and buffers put back afterwards."""
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        device = next(iter(self.parameters.values())).device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=state is not None):
            if state is not None:
                size = len(torch.random.get_rng_state())
                torch.random.set_rng_state(state[:size])
                if len(state) > size:
                    torch.cuda.set_rng_state(state[size:], device)
            yield
        with torch.no_grad():
            for b, old in buffers:
                b.copy_(old)


@dataclass(frozen=True)
class QuadraticModel:
    """q on a batch, along some directions."""

    slopes: Tensor  # ∇Eᵀ d_i, (K,), float64
    curved: Tensor  # d_iᵀ (G + diag λ) d_j, (K, K), float64
    squared: Tensor  # d_iᵀ d_j, (K, K), float64

    def best(self, tau: float) -> Tensor:
        """The coefficients that minimize q (eq. 4.18; with two directions its 2 x 2 system), (K,)."""
        matrix = self.curved + tau * self.squared
        if len(self.slopes) > 1:
            scale = matrix.diagonal().clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
            scaled = scale[:, None] * matrix * scale
            if float(torch.linalg.det(scaled)) > 1e-10:
                best: Tensor = -scale * torch.linalg.solve(scaled, scale * self.slopes)
                return best
        alpha = torch.zeros_like(self.slopes)
        curvature = float(matrix[0, 0])
        alpha[0] = -self.slopes[0] / curvature if curvature > 0 else 0.0
        return alpha

    def change(self, alpha: Tensor, tau: float) -> float:
        """q(Σ α_i d_i) − q(0)."""
        # alpha (K,)
        matrix = self.curved + tau * self.squared
        return float(alpha @ self.slopes + 0.5 * alpha @ matrix @ alpha)


@dataclass
class LinearizedBatch:
    """A batch at the present weights, as the frozen network sees it."""

    function: Functional  # the frozen network, in evaluation mode
    likelihood: Likelihood  # what its outputs mean
    parts: list[Pair]  # the examples
    decay: Tensor | float  # λ of every entry, (P,), or one number for all
    shared: bool  # whether sums are taken over all processes
    seen: ChainPass | None = None  # A forward pass over the one part there is, where it is at hand
    products: int = 0  # J d so far

    @in_exact_mode
    def quadratic(self, gradient: Tensor, directions: Sequence[Tensor]) -> QuadraticModel:
        """The model along directions, one product J d each."""
        # gradient (P,), directions (P,)
        k = len(directions)
        bent, n = torch.zeros(k, k, dtype=torch.float64, device=gradient.device), 0
        for x, y in self.parts:
            f, tangents = self._tangents(x, directions)
            weighed = self.likelihood.product(f, tangents, y)
            for i, j in product(range(k), repeat=2):
                bent[i, j] += (tangents[i] * weighed[j]).sum(dtype=torch.float64)
            n += batch_size(x)
        self.products += k
        total = torch.cat([bent.flatten(), bent.new_tensor([n])])
        if self.shared:
            all_sum([total])
        # two directions may be nearly parallel, and the determinant of their Gram matrix cancels
        exact = torch.float64 if k > 1 else wide_type(gradient.dtype)
        stacked = torch.stack([d.to(exact) for d in directions]) if k > 1 else directions[0].to(exact)[None]
        squared = (stacked @ stacked.T).double()
        if isinstance(self.decay, Tensor):
            decayed = ((stacked * self.decay) @ stacked.T).double()
        else:
            decayed = self.decay * squared
        curved = total[:-1].view(k, k) / total[-1] + decayed
        return QuadraticModel((stacked @ gradient.to(exact)).double(), (curved + curved.T) / 2, squared)

    def _tangents(self, x: Inputs, directions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """F (N, ...) and J d_i, (K, N, ...)."""
        if self.seen is not None:
            params = [self.function.space.to_params(d) for d in directions]
            return self.seen.outputs, torch.stack([self.seen.tangent(v) for v in params])
        found = [jvp(self.function, x, self.function.space.to_params(d)) for d in directions]
        return found[0][0].detach(), torch.stack([t.detach() for _, t in found])


def in_parts(pairs: Sequence[Pair], size: int | None) -> list[Pair]:
    """Batches cut to at most ``size`` examples."""
    if size is None:
        return list(pairs)
    return [part for x, y in pairs for part in zip(split(x, size), split(y, size), strict=True)]


def with_pending(pending: Sequence[Pair], x: Inputs, y: Tensor | None) -> list[Pair]:
    """The batch of a step: what was accumulated, and what the step was given."""
    if x is not None and y is None:
        raise InputError("y is None", expected="targets", remedy="call step(x, y)")
    if x is not None and y is not None:
        check_finite(x, "x")
    pairs = [*pending, *([] if x is None or y is None else [(x, y)])]
    if not any(batch_size(one) for one, _ in pairs):
        raise InputError(
            "step got no examples",
            expected="a batch",
            remedy="call accumulate(x, y) in the closure, or before step(); or call step(x, y)",
        )
    return pairs


def joined(parts: Sequence[Pair]) -> Pair:
    """One batch of all parts; a part by itself is not copied."""
    if len(parts) == 1:
        return parts[0]
    return concatenate([x for x, _ in parts]), torch.cat([y for _, y in parts])


def combined(directions: Sequence[Tensor], alpha: Tensor) -> Tensor:
    """Σ α_i d_i, (P,)."""
    # directions (P,), alpha (K,)
    weights = alpha.tolist()
    total: Tensor = weights[0] * directions[0]
    for w, d in zip(weights[1:], directions[1:], strict=True):
        total.add_(d, alpha=w)
    return total


def evaluated(closure: Callable[[], Any]) -> Any:
    """The loss that a closure computes, with gradients left in ``.grad``."""
    with torch.enable_grad():
        loss = call("closure", closure, expected="a function without arguments that gives the loss")
    check_loss("the result of closure", loss)
    return loss


def given_gradient(
    network: Network, closure: Callable[[], Any] | None, loss: Any, n: int
) -> tuple[float, Tensor, int]:
    """Loss and gradient that the user computed, from ``.grad``."""
    if closure is not None:
        loss = evaluated(closure)
    check_gradients(network.parameters)
    grads = [
        torch.zeros_like(p) if p.grad is None or not p.requires_grad else p.grad
        for p in network.parameters.values()
    ]
    flat = torch.cat([g.detach().reshape(-1) for g in grads])
    sums = torch.tensor([float(loss) * n, n], dtype=torch.float64, device=flat.device)
    if network.shared:  # means over processes of equal weight are what DistributedDataParallel makes
        all_sum([sums])
    return float(sums[0] / sums[1]), flat, int(sums[1])


APART = 1e-2  # of two losses or counts that are taken for the same


def require_mean(network: Network, parts: Sequence[Pair], loss: float) -> None:
    """Raise if the user's loss is a sum, or a mean over labels, where curvatures are means over examples."""
    n = sum(batch_size(x) for x, _ in parts)
    masks = [(y, network.likelihood.mask(y)) for _, y in parts]
    counted = sum(y.numel() if mask is None else int(mask.sum()) for y, mask in masks)
    if network.shared or not counted:
        return
    own = network.loss(parts)
    for times, what in ((n, f"a sum over {n} examples"), (n / counted, f"a mean over {counted} labels")):
        if abs(times - 1) >= APART and abs(loss - times * own) < APART * abs(times * own):
            raise InputError(
                f"the loss is {what}",
                expected=f"a mean over the {n} examples, of which each is a sum over its labels",
                remedy="divide the sum of all losses by the number of examples, reduction='sum' and / len(y)",
            )


EXPECTATION = "mc"  # of the factored structures: one backward pass a batch, however many outputs there are
Average = RunningCurvature | RunningRecursion


def average_of(
    function: Functional,
    likelihood: Likelihood,
    structure: Structure,
    expectation: str | None,
    settings: Settings,
) -> Average:
    """An empty average."""
    if expectation is None:
        expectation = "exact" if structure in ("block", "full") else EXPECTATION
    choice("expectation", expectation, EXPECTATIONS, 'pass "mc" if unsure')
    if isinstance(structure, str):
        known = ("kfac", "ekfac", "kfra", "diagonal", "block", "full")
        choice("structure", structure, known, "use linnet.curvature for what needs all the data at once")
    if structure == "kfra":
        resolve("kfra", expectation, default=EXPECTATION)
        return RunningRecursion(function, likelihood, settings.average, settings.seed)
    return RunningCurvature(
        function, likelihood, structure, expectation, settings.sharing, settings.average, settings.seed
    )


def require_alike(running: Average, settings: Settings, others: Any) -> None:
    """Raise on all processes of ``torch.distributed`` unless their optimizers were made alike."""
    e, structure = running.expectation, running.structure
    # these are of each process, or compared by names
    alike = settings._replace(params=None, output=None, examples=None, log=None)
    found = {
        "structure": structure,
        "expectation": e.kind,
        "likelihood": f"{type(e.likelihood).__name__} {e.likelihood.describe()}",
        "the trained parameters": ", ".join(running.function.names),
        "settings": alike,
        "damping, lr, weight_decay or steps": others,
    }
    agree(InputError, found, "make the optimizer with the same arguments on all processes")


LOOKED_AT = 32  # examples on which a chain is proved
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OnePass:
    """Loss, gradient, curvature and J d from one forward pass, where the network is a chain of layers."""

    # KFRA has proved the chain; for other structures the same proof is tried on a few examples. What it
    # cannot know is whether the network that is trained, in its own mode and with its hooks, is the frozen
    # one that the pass is of. So each mode of the network is first measured both ways, and the pass is taken
    # only if loss and gradient agree and no random numbers were drawn.
    #
    # With separate passes a step takes 1.5 times as long for KFRA and 1.3 times for KFAC on the autoencoder
    # of Botev (2020) (benchmarks/README.md, from benchmarks/gauss_newton_step.py); only by it a step of KFRA
    # costs less than four of Adam's.

    def __init__(self, network: Network, running: Average, raw: nn.Module) -> None:
        self.network, self.running, self.raw = network, running, raw
        self.seen: ChainPass | None = None
        self._layers: tuple[Layer, ...] | None = None  # of the chain; () where there is none
        self._proved: dict[tuple[bool, tuple[bool, ...]], bool] = {}

    def gradient(self, parts: list[Pair]) -> tuple[float, Tensor, int]:
        """Mean loss, its gradient (P,) with zeros for frozen parameters, and N."""
        try:
            return self._measured(parts)
        except (RuntimeError, TypeError):
            self.running.function.check_runs(take(parts[0][0], slice(0, 1)))  # may say better what is wrong
            raise

    def _measured(self, parts: list[Pair]) -> tuple[float, Tensor, int]:
        """The same by the way that the network's mode is known to allow."""
        self.seen = None
        mode = self._mode()
        chain = self._look(parts) if self._proved.get(mode, not mode[0]) else None
        if chain is None:
            return self.network.gradient(parts)
        short = self._short(chain, parts[0][1])
        if mode not in self._proved:
            before = self.network.random_state()
            long = self.network.gradient(parts)
            after = self.network.random_state()
            drawn = before is not None and after is not None and not torch.equal(before, after)
            self._proved[mode] = not drawn and _agree(short, long)
            return long
        self.seen = chain
        return short

    def add(self, parts: list[Pair]) -> None:
        """Add the batch to the curvature, with the pass if there is one."""
        x, y = joined(parts)
        self.running.add(x, y, shared=self.network.shared, seen=self.seen)
        self.seen = None

    def modes(self) -> list[tuple[bool, list[bool], bool]]:
        """In which modes the network was measured both ways, and whether they agreed."""
        return [(hooked, list(training), good) for (hooked, training), good in self._proved.items()]

    def load_modes(self, modes: Sequence[tuple[bool, Sequence[bool], bool]]) -> None:
        """Take back what :meth:`modes` gave."""
        self.seen = None
        self._proved = {(hooked, tuple(training)): good for hooked, training, good in modes}

    def _look(self, parts: list[Pair]) -> ChainPass | None:
        """The pass at the present weights, if it can be taken and is finite."""
        if len(parts) != 1 or self.network.shared:
            return None
        x, y = parts[0]
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")) or self.running.batches == 0:
            return None
        if self.network.likelihood.mask(y) is not None:
            return None
        function = self.running.function
        if self._layers is None and not isinstance(self.running, RunningRecursion):
            few = slice(0, LOOKED_AT)
            self._layers = chain_layers(function, self.network.likelihood, take(x, few), y[few])
        if self._layers == ():
            return None
        try:
            self.running.refresh(self.raw)
        except ModelError:  # weights that are not finite: their loss says so
            return None
        if isinstance(self.running, RunningRecursion):
            chain = self.running.look(x)
        else:
            chain = None if self._layers is None else ChainPass.of(function, self._layers, x)
        return None if chain is None or not bool(chain.outputs.isfinite().all()) else chain

    def _short(self, chain: ChainPass, y: Tensor) -> tuple[float, Tensor, int]:
        """The result of :meth:`Network.gradient`, from the pass."""
        likelihood, f = self.network.likelihood, chain.outputs
        wide = f.to(wide_type(f.dtype))
        n = len(f)
        loss = float(likelihood.nll(wide, y).double().sum()) / n
        found = chain.gradient(likelihood.gradient(wide, y).to(f.dtype))
        pieces = [
            found[name].reshape(-1) if p.requires_grad else p.new_zeros(p.numel())
            for name, p in self.network.parameters.items()
        ]
        return loss, torch.cat(pieces).div_(n), n

    def _mode(self) -> tuple[bool, tuple[bool, ...]]:
        """The settings that may make the network another function than its frozen copy."""
        modules = list(self.raw.modules())
        hooked = any(getattr(m, name, None) for m in modules for name in HOOKS)
        return hooked, tuple(m.training for m in modules)


def chain_layers(function: Functional, likelihood: Likelihood, x: Inputs, y: Tensor) -> tuple[Layer, ...]:
    """The layers of a feed-forward chain, proved on some examples."""
    try:
        matrix = choose_matrix(likelihood, "recursion", "auto")
        expectation = Expectation(likelihood, "recursion", matrix, 1, 0)
        batch = Batches((x, y), function, LOOKED_AT).first()
        sums = RecursionSums(function, expectation, batch)
        f = function.check_runs(batch.x)
        sums.add(batch, f, expectation.targets(f, batch.y))
    except LinnetError:
        return ()
    return sums.layers


def _agree(short: tuple[float, Tensor, int], long: tuple[float, Tensor, int]) -> bool:
    """Whether two measurements are the same up to rounding."""
    tolerance = 1e-8 if long[1].dtype == torch.float64 else 1e-4
    same = abs(short[0] - long[0]) <= tolerance * abs(long[0])
    return same and bool((short[1] - long[1]).norm() <= tolerance * long[1].norm())
