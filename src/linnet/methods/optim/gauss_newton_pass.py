"""Loss, gradient, curvature and J d from one forward pass, where the network is a chain.

KFRA has proved the chain. What it cannot know is whether the network that is trained, in its own mode and
with its hooks, is the frozen one that the pass is of. So each mode of the network is first measured both
ways, and the pass is taken only if loss and gradient agree and no random numbers were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linnet.curvatures.chain import ChainPass
from linnet.curvatures.running_recursion import RunningRecursion
from linnet.errors import ModelError
from linnet.methods.optim.gauss_newton_average import Average
from linnet.methods.optim.gauss_newton_model import Examples, Network
from linnet.tangent.batch import Inputs

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OnePass:
    """Measures a network, by the short way where there is one.

    Args:
        network: The network that is trained.
        running: The averaged curvature, which knows a chain when there is one.
        raw: The network without wrappers.

    Attributes:
        seen: The pass of the last measurement, at the weights of the moment.
    """

    def __init__(self, network: Network, running: Average, raw: nn.Module) -> None:
        self.network, self.running, self.raw = network, running, raw
        self.seen: ChainPass | None = None
        self._proved: dict[tuple[bool, tuple[bool, ...]], bool] = {}

    def gradient(self, parts: list[Examples]) -> tuple[float, Tensor, int]:
        """Mean loss, its gradient (P,) with zeros for frozen parameters, and N.

        Args:
            parts: The batch.

        Returns:
            All three.
        """
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

    def add(self, x: Inputs, y: Tensor) -> None:
        """Add the batch to the curvature, with the pass if there is one.

        Args:
            x: The examples.
            y: Their targets.
        """
        if isinstance(self.running, RunningRecursion):
            self.running.add(x, y, shared=self.network.shared, seen=self.seen)
        else:
            self.running.add(x, y, shared=self.network.shared)
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
        if not isinstance(self.running, RunningRecursion) or len(parts) != 1 or self.network.shared:
            return None
        x, y = parts[0]
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")) or self.running.batches == 0:
            return None
        if self.network.likelihood.mask(y) is not None:
            return None
        try:
            self.running.refresh(self.raw)
        except ModelError:  # weights that are not finite: their loss says so
            return None
        chain = self.running.look(x)
        return None if chain is None or not bool(chain.outputs.isfinite().all()) else chain

    def _short(self, chain: ChainPass, y: Tensor) -> tuple[float, Tensor, int]:
        """What :meth:`Network.gradient` gives, from the pass."""
        likelihood, f = self.network.likelihood, chain.outputs
        wide = f.to(torch.promote_types(f.dtype, torch.float32))
        labels, n = likelihood.check(wide, y), len(f)
        loss = float(likelihood.nll(wide, labels).double().sum()) / n
        found = chain.gradient(likelihood.gradient(wide, labels).to(f.dtype))
        pieces = [
            found[name].reshape(-1) if p.requires_grad else p.new_zeros(p.numel())
            for name, p in self.network.parameters.items()
        ]
        return loss, torch.cat(pieces).div_(n), n

    def _mode(self) -> tuple[bool, tuple[bool, ...]]:
        """What may make the network another function than its frozen copy."""
        modules = list(self.raw.modules())
        hooked = any(getattr(m, name, None) for m in modules for name in HOOKS)
        return hooked, tuple(m.training for m in modules)


def _agree(short: tuple[float, Tensor, int], long: tuple[float, Tensor, int]) -> bool:
    """Whether two measurements are the same up to rounding."""
    tolerance = 1e-8 if long[1].dtype == torch.float64 else 1e-4
    same = abs(short[0] - long[0]) <= tolerance * abs(long[0])
    return same and bool((short[1] - long[1]).norm() <= tolerance * long[1].norm())
