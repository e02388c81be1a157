"""``Linearized``: a network to first order in its weights, as a module.

    lin(x) = f₀(x) + J(x) δ                    (Achille et al., CVPR 2021, eq. 1; Maddox et al. 2021, eq. 1)

δ is the only trainable tensor and starts at exactly zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from linnet.errors import InputError, WeightsError
from linnet.linalg.operator import ParameterSpace, Vector
from linnet.number_types import Precision
from linnet.params import choice, instance, refuse, tensor
from linnet.tangent.batch import Inputs, require_some
from linnet.tangent.data import examples
from linnet.tangent.forward_mode import Params
from linnet.tangent.functional import Functional, OutputAdapter, tensors_by_name
from linnet.tangent.gram import gram
from linnet.tangent.inputs import taken
from linnet.tangent.jacobian import jacobian, jvp, jvp_columns, linearity_gap, vjp_columns
from linnet.tangent.modes import import_compiler
from linnet.tangent.nonfinite import check_result, explained, finite_numbers
from linnet.tangent.rules import Form
from linnet.tangent.selection import Selector


class Linearized(nn.Module):
    """A network linearized in its weights; a module that any optimizer can train.

    The network is copied and frozen in evaluation mode: BatchNorm uses its running statistics,
    dropout is off, and the user's own module is never touched. Use it inside
    ``DistributedDataParallel`` or under ``torch.compile`` like any module. Its ``state_dict`` holds
    δ only.

    Args:
        function: The network as a function of the tracked parameters; ``linearize`` makes it.

    Attributes:
        function: The same.

    Example:
        >>> lin = linearize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        >>> x = torch.ones(5, 3)
        >>> torch.equal(lin(x), lin.base(x)), lin.kernel(x, form="trace").shape
        (True, torch.Size([5, 5]))
    """

    def __init__(self, function: Functional) -> None:
        super().__init__()
        object.__setattr__(self, "_function", function)
        self._owned = False  # whether nobody else can hold the function
        with torch.inference_mode(False):
            zero = {name: torch.zeros_like(t) for name, t in function.theta.items()}
            self._modules["delta"] = as_modules(zero)

    _function: Functional

    @property
    def function(self) -> Functional:
        """Internal: the network as a function of the tracked parameters."""
        self._owned = False
        return self._function

    @property
    def delta(self) -> Params:
        """δ = θ − θ₀ by parameter name: the trainable parameters themselves, not copies."""
        named = dict(cast(nn.Module, self._modules["delta"]).named_parameters())
        return {name: named[name] for name in self._function.names}

    @property
    def theta0(self) -> Params:
        """θ₀, the point of linearization, by parameter name."""
        return self._function.theta

    @property
    def model(self) -> nn.Module:
        """The frozen copy of the network at θ₀."""
        return self.function.model

    @property
    def parameter_names(self) -> list[str]:
        """Names of the tracked parameters, in the order of ``named_parameters()``."""
        return list(self._function.names)

    @property
    def space(self) -> ParameterSpace:
        """The space that δ lives in."""
        return self._function.space

    def _compared(self) -> str:
        """What processes that work with it together must have alike."""
        return self._function._compared()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """f₀(x) + J(x) δ.

        Args:
            *args: One batch x, as a tensor, tuple or dict; or the network's own positional arguments.
            **kwargs: The network's own keyword arguments.

        Returns:
            Outputs (N, ...), in the network's shape; (N, 1) where the network gives (N,).

        Raises:
            InputError: If x holds no tensor with an example axis.
            DataError: If x is empty, or not finite and so are the outputs. That is looked for only where the
                result records no gradient: in training it would make the processor wait at every step.
            ModelError: If the network cannot take x, or its outputs are not finite (where x is looked at).
            NumericalError: If their derivatives are not.
            RuntimeError: If torch fails for another reason.
        """
        x = taken(self._function, _one(args, kwargs))
        delta = self.delta
        with explained(self._function, x):
            value, tangent = jvp(self._function, x, delta, False)
        result = value + tangent
        if not result.requires_grad:  # training does not wait for the device to tell
            check_result(self._function, x, result, delta.values())
        return result

    def base(self, x: Inputs) -> Tensor:
        """f₀(x).

        Args:
            x: A batch of N examples.

        Returns:
            Outputs of the network at θ₀, (N, C).

        Raises:
            InputError: If x holds no tensor with an example axis.
            DataError: If x is empty.
            ModelError: If the network cannot take x, or returns values that are not finite.
        """
        x = taken(self._function, x)
        require_some(x)
        value = self._function.check_runs(x)
        return value.reshape(value.shape[0], -1)

    @torch.no_grad()
    def jvp(self, x: Inputs, v: Vector) -> Tensor:
        """J(x) v.

        Args:
            x: A batch of N examples.
            v: Params, or flat (P,) or (P, K).

        Returns:
            (N, C), or (N, C, K) for K columns.

        Raises:
            InputError: If v does not fit the parameters, is complex or not finite, or x holds no tensor with
                an example axis.
            DataError: If x is empty or not finite.
            ModelError: If the network cannot take x, or gives an example other outputs in another batch.
            NumericalError: If the product overflows.
        """
        direction = _moved(v, self._function)
        x = taken(self._function, x)
        with explained(self._function, x):
            result = jvp_columns(self._function, x, direction)
        check_result(self._function, x, result)
        return result

    def vjp(self, x: Inputs, u: Tensor, like: str = "params") -> Vector:
        """J(x)ᵀ u.

        Args:
            x: A batch of N examples.
            u: Cotangents (N, C), or (N, C, K).
            like: ``"params"`` for a dict by name, ``"flat"`` for (P,) or (P, K).

        Returns:
            A vector in parameter space, of the kind requested.

        Raises:
            InputError: If u does not have the shape of the outputs, is complex or not finite, ``like`` is
                neither, or x holds no tensor with an example axis.
            DataError: If x is empty or not finite.
            ModelError: If the network cannot take x, or gives an example other outputs in another batch.
            NumericalError: If the product overflows.
        """
        choice("like", like, ("params", "flat"))
        expected = "cotangents (N, C) or (N, C, K), finite real numbers"
        u = finite_numbers("u", u, expected, "pass one for each output of lin.base(x)")
        x = taken(self._function, x)
        with explained(self._function, x):
            flat = vjp_columns(self._function, x, u.to(self._function.device, self._function.dtype))
        check_result(self._function, x, flat)
        return flat if like == "flat" else self.space.to_params(flat)

    def jacobian(self, x: Inputs, memory: str | int | None = None) -> Tensor:
        """J(x), for batches small enough to hold it.

        Args:
            x: A batch of N examples.
            memory: Budget such as ``"2GB"``; by default half of what is available.

        Returns:
            (N, C, P), parameters in the order of ``parameter_names``.

        Raises:
            InputError: If x holds no tensor with an example axis.
            DataError: If x is empty or not finite.
            ModelError: If the network cannot take x, or gives an example other outputs in another batch.
            MemoryBudgetError: If it would not fit; ``jvp``, ``vjp`` and ``kernel`` never form it.
        """
        x = examples(self._function, x)
        with explained(self._function, x):
            return jacobian(self._function, x, memory)

    def kernel(
        self, x1: Inputs, x2: Inputs | None = None, form: Form = "full", memory: str | int | None = None
    ) -> Tensor:
        """The empirical tangent kernel J(x₁) J(x₂)ᵀ.

        Args:
            x1: N examples.
            x2: M examples; by default ``x1``, and the result is exactly symmetric.
            form: ``"full"``, ``"trace"``, ``"diagonal"`` or ``"sum"``.
            memory: Budget; by default half of what is available.

        Returns:
            (N, C, M, C) for full, (N, M, C) for diagonal, (N, M) for trace and sum.

        Raises:
            InputError: If ``form`` is something else.
            MemoryBudgetError: If not even the smallest tiles fit.
        """
        x1, x2 = taken(self._function, x1, "x1"), taken(self._function, x2, "x2")
        return gram(self._function, x1, x2, form=form, memory=memory)

    def gap(self, x: Inputs) -> float:
        """The linearity gap ‖f(θ₀ + δ) − f_lin‖ / ‖f_lin − f₀‖ on a batch: how far the model holds.

        Args:
            x: A batch of N examples.

        Returns:
            0 where the network is linear between θ₀ and θ₀ + δ (and at δ = 0), 1 where what the model
            neglects is as large as what it predicts.

        Raises:
            InputError: If x holds no tensor with an example axis.
            DataError: If x is empty or not finite.
            ModelError: If the network cannot take x.
            RuntimeError: If torch fails for another reason.
        """
        x = examples(self._function, x)
        with explained(self._function, x):
            return linearity_gap(self._function, x, self.delta)

    @torch.no_grad()
    def relinearize(self, at: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        """θ₀ ← θ₀ + δ and δ ← 0, in place.

        Fits and curvatures that were made from this linearization keep theirs: the frozen network is
        copied first if ``function`` or ``model`` has been accessed. Otherwise its weights are
        replaced, which takes no copy of the network and keeps what is known of its derivatives.

        Args:
            at: Where to linearize instead of θ₀ + δ: a network of the same architecture, or tensors
                by the names of parameters and buffers. Its buffers and untracked parameters are taken
                over as well.

        Raises:
            WeightsError: If a tensor is missing or does not fit.
            ModelError: If the new weights are not finite.
        """
        delta = self.delta
        if at is None:
            tensors: Mapping[str, Tensor] = {name: t + delta[name] for name, t in self.theta0.items()}
        elif isinstance(at, nn.Module):
            tensors = tensors_by_name(at)
        else:
            expected = "a network, or tensors by name"
            tensors = instance("at", at, Mapping, expected, "leave at= out for θ₀ + δ")
            for name, given in tensors.items():
                tensor(f"at[{name!r}]", given, "a dense tensor of real numbers", convert=False)
        missing = [name for name in self._function.names if name not in tensors]
        if missing:
            raise WeightsError(
                f"at has no tensor for {missing[0]!r} and {len(missing) - 1} more tracked parameters",
                expected="a network of the same architecture, or all its tensors by name",
                remedy="pass the network that was linearized, or leave at= out for θ₀ + δ",
            )
        object.__setattr__(self, "_function", self._function.moved(tensors, in_place=self._owned))
        self._owned = True
        for value in delta.values():
            value.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linearized:
        """Move the frozen network along with δ; fits made from this linearization keep theirs."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "_function", self._function.copy())
        self._function.model._apply(fn)
        self._owned = True
        return self

    def extra_repr(self) -> str:
        """The extra line of ``print``."""
        tracked = f"{len(self.parameter_names)} parameters tracked"
        return f"{type(self._function.model).__name__}, {tracked}, P = {self.space.dim}"


def function_of(model: nn.Module, params: Selector = None, output: OutputAdapter = None) -> Functional:
    """A network as a function of the selected parameters; a ``Linearized`` has its own."""
    if not isinstance(model, Linearized):
        return Functional(model, params, output)
    if params is not None or output is not None:
        raise InputError(
            "params= or output= with a Linearized",
            expected="neither: a linearization has its own",
            remedy="pass them to linnet.linearize",
        )
    return model.function


def pinned(lin: Linearized, types: Precision) -> Linearized:
    """The same linearization, whose derivatives keep types of numbers of their own; δ is shared."""
    twin = copy.copy(lin)
    object.__setattr__(twin, "_function", copy.copy(lin.function.under(types)))
    return twin


def linearize(model: nn.Module, params: Selector = None, output: OutputAdapter = None) -> Linearized:
    """Linearize a network in its weights, around their present values.

    Args:
        model: Any network that takes a tensor, a tuple ``model(*x)`` or a dict ``model(**x)``.
        params: Which parameters vary: ``None`` (all that require a gradient), ``"all"``,
            ``"last-layer"``, ``"bias"``, ``"lora"``, a regular expression, a list of names, a dict
            of names and masks (True where an entry varies: the rows of new tokens, say), a module of
            the network, or a predicate ``(name, parameter) -> bool``. Hooks on parameters that zero
            entries of the gradient are such masks. Hooks that clip, and leave small gradients as they are,
            are passed over: a derivative is that of the outputs. Other hooks are refused.
        output: How to turn the network's result into a tensor: a callable, the key or attribute
            to take, or ``None`` (tensors as they are, otherwise ``.logits``).

    Returns:
        The module lin with lin(x) = f₀(x) + J(x) δ, δ = 0.

    Raises:
        InputError: If ``model`` is no module, or ``params`` selects nothing.
        ModelError: If the network cannot be copied, or its weights are not finite.

    Source:
        Achille, Golatkar, Ravichandran, Polito, Soatto, CVPR 2021, eq. (1).

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> lin = linearize(net, params="last-layer")
        >>> lin.parameter_names
        ['2.weight', '2.bias']
    """
    if isinstance(model, Linearized):
        raise InputError(
            "model is already linearized",
            expected="a network",
            remedy="use it as it is, or call model.relinearize()",
        )
    import_compiler()
    return Linearized(Functional(model, params, output))


def _one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """One batch from the ways a module may be called."""
    if kwargs:
        if args:
            raise InputError(
                "positional and keyword inputs are mixed",
                expected="one batch x, or keywords alone",
                remedy="pass all inputs by name, or one tuple of them",
            )
        return kwargs
    return args[0] if len(args) == 1 else args


def _moved(v: Vector, function: Functional) -> Vector:
    """V on the device and in the type of the parameters."""
    expected = "a dict of tensors by parameter name, or a flat tensor (P,) or (P, K), finite real numbers"
    remedy = "pass lin.delta, or a vector of lin.space.dim numbers"
    if isinstance(v, Mapping):
        parts = {name: finite_numbers(f"v[{name!r}]", t, expected, remedy) for name, t in v.items()}
        return {name: t.to(function.device, function.dtype) for name, t in parts.items()}
    if not isinstance(v, Tensor):
        refuse("v", v, expected, remedy)
    return finite_numbers("v", v, expected, remedy).to(function.device, function.dtype)


def as_modules(values: Params) -> nn.Module:
    """Parameters in nested modules, so that ``state_dict`` shows the network's own names."""
    root = nn.Module()
    for path, value in values.items():
        *folders, leaf = path.split(".")
        place = root
        for folder in folders:
            if folder not in place._modules:
                place.add_module(folder, nn.Module())
            place = cast(nn.Module, place._modules[folder])
        place.register_parameter(leaf, nn.Parameter(value))
    return root
