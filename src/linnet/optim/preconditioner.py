"""A curvature preconditioner for any torch optimizer: multiplies gradients by (G + τI)⁻¹ in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linnet.curvatures.curvature import Curvature, default_damping, require_as_made
from linnet.errors import InputError
from linnet.linalg.operator import require_params
from linnet.params import choice, instance, number, refuse, tensor
from linnet.shown import Shown
from linnet.tangent.functional import without_wrapper
from linnet.tangent.linearized import Linearized

# of each optimizer, what is attached to it: the identities of its parameters, and the handle
_ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[set[int], RemovableHandle]]] = (
    WeakKeyDictionary()
)


class KroneckerPreconditioner(Shown):
    """Multiplies gradients by (s G + τ I)⁻¹ before an optimizer takes its step.

    The inverse is formed once; each step then costs two small matrix products a layer. A layer's weight and
    bias are preconditioned together, in whatever parameter groups of the optimizer they are. Weight decay
    that belongs to the objective must be in the gradient already, not in the optimizer. Parameters that the
    curvature does not cover, and groups with ``precondition=False``, keep their gradients.

    Args:
        curvature: G, summed over its examples; from :func:`linnet.curvature`.
        module: The network that is trained, or its ``Linearized``, or its parameters by the curvature's
            names.
        damping: τ, in units of the mean gradient's curvature; by default a tenth of the mean eigenvalue.
        reduction: ``"mean"`` for gradients of a mean over examples (s = 1/N), ``"sum"`` for s = 1.
        inversion: ``"exact"``: τ is added to the products' eigenvalues; ``"factored"``: it is put into the
            Kronecker factors, two Cholesky decompositions a layer instead of two eigendecompositions.

    Attributes:
        damping: τ.
        gain: What preconditioned gradients are multiplied by, 1 unless set.
        inversion: How τ is put in.
        parameters: The parameters that are preconditioned, by name.

    Raises:
        InputError: If parameters do not fit the curvature, or an argument has a wrong value.

    Source:
        Achille et al., CVPR 2021, eq. (5); Martens and Grosse 2015.

    Example:
        >>> import linnet
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> G = linnet.curvature(net, (x, y), linnet.likelihoods.Gaussian(), structure="kfac")
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> handle = KroneckerPreconditioner(G, net).attach(optimizer)
        >>> ((net(x) - y) ** 2).mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        curvature: Curvature,
        module: nn.Module | Mapping[str, Tensor],
        damping: float | None = None,
        reduction: str = "mean",
        inversion: str = "exact",
    ) -> None:
        require_as_made(curvature)
        choice("reduction", reduction, ("mean", "sum"))
        choice("inversion", inversion, ("exact", "factored"))
        self.inversion = inversion
        self.parameters = _fitting(curvature, module)
        self._scale = 1.0 / curvature.made.examples if reduction == "mean" else 1.0
        self.gain = 1.0
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.refresh(curvature, damping)

    def _shown(self) -> dict[str, Any]:
        known = {"P": self.curvature.shape[0], "parameters": len(self.parameters), "damping": self.damping}
        return {**known, "inversion": self.inversion, "gain": self.gain, "curvature": str(self.curvature)}

    def refresh(self, curvature: Curvature, damping: float | None = None) -> None:
        """Take another curvature of the same network, or another damping.

        Args:
            curvature: G.
            damping: τ; by default a tenth of the mean eigenvalue.

        Raises:
            InputError: If the damping is not a positive number.
        """
        _fitting(require_as_made(curvature), self.parameters)
        self.damping = default_damping(curvature, self._scale) if damping is None else damping
        number(
            "damping", self.damping, above=0, remedy="leave damping= out for a tenth of the mean eigenvalue"
        )
        self.curvature = curvature
        scaled, tau = curvature.scaled(self._scale), float(self.damping)
        damped = scaled.damped(tau) if self.inversion == "exact" else scaled.factored_damped(tau)
        self._inverse = damped.inverse()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Replace gradients g by (s G + τ I)⁻¹ g, in place.

        Args:
            optimizer: Only parameters in its groups without ``precondition=False`` take part; by default
                every parameter that has a gradient. A gradient that is missing counts as zero.
        """
        taken = self._taken(optimizer)
        grads = [
            p.grad if p.grad is not None and name in taken else torch.zeros_like(p)
            for name, p in self.parameters.items()
        ]
        flat = torch.cat([g.reshape(-1) for g in grads])
        solved = self.multiply(flat)
        start = 0
        for name, p in self.parameters.items():
            piece = solved[start : start + p.numel()].view_as(p)
            start += p.numel()
            if p.grad is not None and name in taken:  # entries that the curvature does not cover keep theirs
                mask = self.curvature.function.masks.get(name)
                p.grad.copy_(piece if mask is None else torch.where(mask.to(p.device), piece, p.grad))

    def multiply(self, v: Tensor) -> Tensor:
        """The preconditioner times a vector.

        Args:
            v: Flat, (P,), in the order of ``parameters``.

        Returns:
            gain · (s G + τ I)⁻¹ v, of the shape of v.
        """
        self._require_vector(v)
        return self.gain * self._inverse.mm(v.to(self._inverse.dtype)[:, None])[:, 0].to(v)

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Precondition before every ``optimizer.step()``.

        It takes the place of a preconditioner of the same parameters that the optimizer has from before, such
        as that of an earlier task: gradients are multiplied once.

        Args:
            optimizer: Any optimizer. Where its step takes a closure, the gradients are preconditioned each
                time that the closure has made them.

        Returns:
            A handle; ``handle.remove()`` ends it.

        Raises:
            InputError: If no parameter of the optimizer is covered by the curvature.
        """
        instance("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer", "pass the optimizer")
        if not self._taken(optimizer):
            raise InputError(
                "optimizer has none of the parameters that the curvature covers",
                expected=f"parameters such as {next(iter(self.parameters))!r}",
                remedy="pass the network whose parameters the optimizer has as module=",
            )

        def before(taking: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            if not any(callable(one) for one in (*args, kwargs.get("closure"))):
                self.step(taking)
                return None

            def preconditioned(closure: Any) -> Any:
                if not callable(closure):
                    return closure

                def evaluate() -> Any:
                    loss = closure()
                    self.step(taking)
                    return loss

                return evaluate

            named = {k: preconditioned(v) if k == "closure" else v for k, v in kwargs.items()}
            return tuple(preconditioned(one) for one in args), named

        own = {id(p) for p in self.parameters.values()}
        others = _ATTACHED.get(optimizer, [])
        for known, handle in others:
            if known & own:
                handle.remove()
        handle = optimizer.register_step_pre_hook(before)
        _ATTACHED[optimizer] = [*(one for one in others if not one[0] & own), (own, handle)]
        return handle

    def _require_vector(self, v: Any) -> None:
        """Raise unless v is a vector in parameter space."""
        size = self._inverse.shape[0]
        expected = f"a dense floating-point tensor (P,) with P = {size}"
        tensor("v", v, expected, convert=False)
        if v.shape != (size,) or not v.is_floating_point():
            refuse("v", v, expected, "flatten the tensors of .parameters in their order")

    def _taken(self, optimizer: torch.optim.Optimizer | None) -> set[str]:
        """Names of the parameters that take part."""
        if optimizer is None:
            return set(self.parameters)
        instance("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer or None")
        groups = [group for group in optimizer.param_groups if group.get("precondition", True)]
        return {self._names[id(p)] for group in groups for p in group["params"] if id(p) in self._names}


def _fitting(curvature: Curvature, module: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a network in the curvature's order, or an error."""
    if isinstance(module, Linearized):
        given: Mapping[str, Tensor] = module.delta
    elif isinstance(module, nn.Module):
        given = dict(without_wrapper(module).named_parameters())
    else:
        require_params(module, "module")
        given = module
    shapes = {name: t.shape for name, t in curvature.function.theta.items()}
    for name, shape in shapes.items():
        if name not in given or given[name].shape != shape:
            have = tuple(given[name].shape) if name in given else "nothing of that name"
            raise InputError(
                f"module has {have} for the curvature's {name!r} of shape {tuple(shape)}",
                expected="the network that the curvature was made of",
                remedy="pass that network, or its parameters by the curvature's names",
            )
    return {name: given[name] for name in shapes}
