"""Loss, gradient, curvature and J d from one forward pass, where the network is a chain.

KFRA has proved the chain; for other structures the same proof is tried on a few examples. What it cannot know
is whether the network that is trained, in its own mode and with its hooks, is the frozen one that the pass is
of. So each mode of the network is first measured both ways, and the pass is taken only if loss and gradient
agree and no random numbers were drawn. All structures take their averages from the pass: KFRA what it needs
forwards, the others with one backward pass for each of their columns.

It stays because it pays: with separate passes a step takes 1.5 times as long for KFRA and 1.3 times for KFAC
on the autoencoder of Botev (2020), and 1.7 and 1.4 times on an MLP of 64 units (docs/benchmarks.md, from
``benchmarks/gauss_newton_step.py``). Only by it a step of KFRA costs less than four of Adam's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation, choose_matrix
from linnet.curvatures.kfra import RecursionSums
from linnet.curvatures.layers import Layer
from linnet.curvatures.running_recursion import RunningRecursion
from linnet.curvatures.stream import Batches
from linnet.errors import LinnetError, ModelError
from linnet.likelihoods.likelihood import Likelihood
from linnet.optim.gauss_newton_average import Average
from linnet.optim.gauss_newton_model import Examples, Network, joined
from linnet.tangent.batch import Inputs, take
from linnet.tangent.functional import Functional

LOOKED_AT = 32  # examples on which a chain is proved
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OnePass:
    """Measures a network, by the short way where there is one."""

    def __init__(self, network: Network, running: Average, raw: nn.Module) -> None:
        self.network, self.running, self.raw = network, running, raw
        self.seen: ChainPass | None = None
        self._layers: tuple[Layer, ...] | None = None  # of the chain; () where there is none
        self._proved: dict[tuple[bool, tuple[bool, ...]], bool] = {}

    def gradient(self, parts: list[Examples]) -> tuple[float, Tensor, int]:
        """Mean loss, its gradient (P,) with zeros for frozen parameters, and N."""
        try:
            return self._measured(parts)
        except (RuntimeError, TypeError):
            self.running.function.check_runs(take(parts[0][0], slice(0, 1)))  # may say better what is wrong
            raise

    def _measured(self, parts: list[Examples]) -> tuple[float, Tensor, int]:
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

    def add(self, parts: list[Examples]) -> None:
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

    def _look(self, parts: list[Examples]) -> ChainPass | None:
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
        wide = f.to(torch.promote_types(f.dtype, torch.float32))
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
