"""Linear operators: matrices defined by their products with vectors.

An operator A (m x n) is used as ``A @ v``, where v is (n,), (n, K) or, when the operator knows its
parameter space, Params. Sums, multiples, products and transposes of operators are operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Self, overload

import torch
from torch import Tensor

from linnet.errors import InputError
from linnet.params import instance, number, refuse, shown, tensor
from linnet.shown import Shown, some
from linnet.tree import node, parts

# -- space -----------------------------------------------------------------------------------------
#
# Parameter space: the names and shapes behind a flat vector of P numbers.
#
# A vector in parameter space is either ``Params``, a dict of tensors by parameter name, or a flat tensor
# (P,) in the order of the names. K vectors at once are a flat (P, K), or Params whose tensors have one
# more dimension ``(*shape, K)`` at the end. Everything that takes one kind returns the same kind.

Params = dict[str, Tensor]
Vector = Params | Tensor


@node("shapes")
class ParameterSpace:
    """The parameters of a network as one vector space of dimension P."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        if not shapes:
            raise InputError("shapes is empty", "at least one parameter", "pass a shape for each name")
        for name, shape in shapes.items():
            if any(size < 0 for size in shape):
                raise InputError(f"shapes has {name!r} of shape {tuple(shape)}", "sizes from 0", "check it")
        self.names = tuple(shapes)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        ends = list(accumulate((prod(shape) for shape in self.shapes.values()), initial=0))
        self.slices = {name: slice(*ends) for name, ends in zip(self.names, pairwise(ends), strict=True)}
        self.dim = ends[-1]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> ParameterSpace:
        """The space that given parameters live in."""
        require_params(params, "params")
        return cls({name: tensor.shape for name, tensor in params.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterSpace) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        return f"ParameterSpace({len(self.names)} parameters, P = {self.dim})"

    def select(self, names: Iterable[str]) -> ParameterSpace:
        """The subspace of some parameters."""
        if isinstance(names, str | bytes | Tensor) or not isinstance(names, Iterable):
            refuse("names", names, "several parameter names", f"pass a list such as [{self.names[0]!r}]")
        listed = list(names)
        if wrong := [name for name in listed if not isinstance(name, str)]:
            refuse("names", listed, "several parameter names", f"{shown(wrong[0])} is no name")
        chosen = set(listed)
        if unknown := chosen - set(self.names):
            raise InputError(
                f"names has {_listed(unknown)}",
                expected=f"some of {_listed(self.names)}",
                remedy="see .names, which are those of named_parameters()",
            )
        return ParameterSpace({name: shape for name, shape in self.shapes.items() if name in chosen})

    def to_flat(self, vector: Vector) -> Tensor:
        """A vector as a flat tensor; a flat one is returned as it is, (P,)."""
        if isinstance(vector, Tensor):
            return self._checked(vector)
        self._check_params(vector)
        first = self.names[0]
        columns = vector[first].shape[len(self.shapes[first]) :]  # () or (K,)
        parts = [vector[name].reshape(shape.numel(), *columns) for name, shape in self.shapes.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_params(self, vector: Vector) -> Params:
        """A vector as tensors by name; those made from a flat tensor are views of it."""
        if not isinstance(vector, Tensor):
            self._check_params(vector)
            return vector
        columns = self._checked(vector).shape[1:]
        return {name: vector[rows].reshape(self.shapes[name] + columns) for name, rows in self.slices.items()}

    def in_kind(self, flat: Tensor, like: Vector) -> Vector:
        """A flat vector in the same kind as another one."""
        # flat (P,)
        if not isinstance(like, Tensor):
            require_params(like, "like")
        return flat if isinstance(like, Tensor) else self.to_params(flat)

    def _checked(self, flat: Tensor) -> Tensor:
        """The flat vector, if it fits."""
        tensor("the parameter vector", flat, f"a dense tensor ({self.dim},)", convert=False)
        if flat.ndim not in (1, 2) or flat.shape[0] != self.dim:
            raise InputError(
                f"the parameter vector has shape {tuple(flat.shape)}",
                expected=f"({self.dim},), ({self.dim}, K) or a dict with the {len(self.names)} parameters",
                remedy="make one with .to_flat(dict of parameters)",
            )
        return flat

    def _check_params(self, params: Mapping[str, Tensor]) -> None:
        """Names and shapes fit, and all tensors have the same number of columns."""
        require_params(params, "the parameter vector")
        missing, unknown = set(self.names) - set(params), set(params) - set(self.names)
        if missing or unknown:
            told = [
                f"{what} {_listed(names)}"
                for what, names in (("lacks", missing), ("has unknown", unknown))
                if names
            ]
            raise InputError(
                f"the parameter vector {' and '.join(told)}",
                expected=f"exactly {_listed(self.names)}",
                remedy="the names are those of named_parameters(); of those that stay give zeros",
            )
        first = self.names[0]
        columns = params[first].shape[len(self.shapes[first]) :]
        for name, shape in self.shapes.items():
            if len(columns) > 1 or params[name].shape != shape + columns:
                raise InputError(
                    f"parameter {name!r} has shape {tuple(params[name].shape)}",
                    expected=f"{tuple(shape)}, or {(*shape, 'K')} for K vectors, with equal K",
                    remedy="give every parameter its own shape",
                )


def require_params(params: Any, name: str) -> None:
    """Raise unless it is a mapping from names to tensors that have values."""
    instance(name, params, Mapping, "tensors by parameter name, or a flat tensor", "pass a dict of tensors")
    for key, value in params.items():
        if not isinstance(key, str):
            refuse(name, params, "tensors by parameter name", f"{shown(key)} is no name")
        tensor(f"{name}[{key!r}]", value, "a dense tensor of real numbers", convert=False)


def _listed(names: Iterable[str]) -> str:
    """The first few names, quoted, for an error."""
    return some(list(map(repr, sorted(names))), 5)


class LinearOperator(Shown):
    """A linear map from n to m numbers."""

    # A subclass sets the attributes, and defines `mm` and `T`.

    shape: tuple[int, int]  # (m, n)
    dtype: torch.dtype  # type of the vectors it takes and gives
    device: torch.device  # where these vectors live
    # the parameter space of its n columns, if that is what they are. A square operator has the same space for
    # its rows, so `A @ params` is Params; a rectangular one gives a tensor (m,)
    space: ParameterSpace | None

    @abstractmethod
    def mm(self, v: Tensor) -> Tensor:
        """The product with K vectors at once, without checks.

        Args:
            v: (n, K).

        Returns:
            A v (m, K).
        """

    @property
    @abstractmethod
    def T(self) -> LinearOperator:
        """The transposed operator (n x m)."""

    def _compared(self) -> tuple[Any, ...]:
        """What processes that work with it together must have alike: of a user's own class its matrices."""
        if (found := parts(self)) is None:
            held = {name: part for name, part in vars(self).items() if not name.startswith("_")}
            found = {k: part for k, part in held.items() if isinstance(part, Tensor | LinearOperator)}
        return self.shape, found

    def mv(self, v: Tensor) -> Tensor:
        """The product with one vector.

        Args:
            v: (n,).

        Returns:
            A v (m,).

        Raises:
            InputError: Shape, type or device do not fit.
        """
        return self.mm(require_fit(self, v, 1).unsqueeze(1)).squeeze(1)

    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: dict[str, Tensor]) -> Vector: ...

    def __matmul__(self, other: LinearOperator | Vector) -> LinearOperator | Vector:
        """A v for a vector or several, or the composition with another operator."""
        if isinstance(other, LinearOperator):
            return Composition(self, other)
        flat = flatten(self, other)
        product = self.mv(flat) if flat.ndim == 1 else self.mm(flat)
        keeps_kind = self.space is not None and self.shape[0] == self.shape[1]
        return self.space.in_kind(product, other) if self.space is not None and keeps_kind else product

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """A + B."""
        return Sum((self, _require_operator(other)))

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        """A − B."""
        return Sum((self, -1.0 * _require_operator(other)))

    def __neg__(self) -> LinearOperator:
        """−A."""
        return -1.0 * self

    def __mul__(self, scalar: float) -> LinearOperator:
        """A times a number."""
        return Scaled(self, scalar)

    def __rmul__(self, scalar: float) -> LinearOperator:
        """A number times A."""
        return self * scalar

    def __truediv__(self, scalar: float) -> LinearOperator:
        """A by a number."""
        if not require_scalar(scalar):
            raise InputError("division of an operator by 0", "a number other than 0", "pass such as len(x)")
        return self * (1 / float(scalar))

    def damped(self, tau: float) -> LinearOperator:
        """A + τ I, for a square operator.

        Args:
            tau: The damping τ, not negative.

        Returns:
            The damped operator.

        Raises:
            InputError: τ is negative or the operator is not square.
        """
        return Damped(self, tau)

    def dense(self) -> Tensor:
        """The operator as a matrix.

        Returns:
            (m, n).
        """
        return self.mm(torch.eye(self.shape[1], dtype=self.dtype, device=self.device))

    def to_scipy(self) -> Any:
        """The operator as a ``scipy.sparse.linalg.LinearOperator`` of numpy arrays.

        Returns:
            A SciPy operator of the same shape; its arrays are copied to and from the device.
        """
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        return ScipyOperator(
            shape=self.shape,
            dtype=torch.empty(0, dtype=self.dtype).numpy().dtype,
            matvec=lambda v: _on_numpy(self.mv, self, v.reshape(-1)),
            matmat=lambda v: _on_numpy(self.mm, self, v),
            rmatvec=lambda v: _on_numpy(self.T.mv, self, v.reshape(-1)),
            rmatmat=lambda v: _on_numpy(self.T.mm, self, v),
        )

    def _shown(self) -> dict[str, Any]:
        shape = f"{self.shape[0]} x {self.shape[1]}"
        return {"shape": shape, "dtype": str(self.dtype), "device": str(self.device)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._shown().values())})"


def _on_numpy(function: Callable[[Tensor], Tensor], operator: LinearOperator, array: Any) -> Any:
    """Apply a function of tensors to a numpy array."""
    vector = torch.as_tensor(array, dtype=operator.dtype, device=operator.device)
    return function(vector).detach().cpu().numpy()


def flatten(operator: LinearOperator, vector: Vector) -> Tensor:
    """A vector for an operator as a flat tensor, after checking that it fits, (n,)."""
    if operator.space is not None:
        flat = operator.space.to_flat(vector)
    elif isinstance(vector, Tensor):
        flat = vector
    else:
        refuse(f"the vector for {operator!r}", vector, "a tensor", "this operator has no parameter space")
    return require_fit(operator, flat)


def require_fit(operator: LinearOperator, flat: Tensor, axes: int | None = None) -> Tensor:
    """A flat vector that an operator can multiply, or an error."""
    # flat (n,)
    n = operator.shape[1]
    shapes = {1: f"({n},)", 2: f"({n}, K)", None: f"({n},) or ({n}, K)"}[axes]
    if not isinstance(flat, Tensor) or flat.layout != torch.strided:
        refuse(
            "the vector", flat, f"a dense tensor {shapes}, to multiply {operator!r}", "pass a dense tensor"
        )
    if flat.ndim not in ((1, 2) if axes is None else (axes,)) or flat.shape[0] != n:
        raise InputError(
            f"the vector has shape {tuple(flat.shape)}",
            expected=f"{shapes}, to multiply {operator!r}",
            remedy="see .shape",
        )
    if flat.dtype != operator.dtype or flat.device != operator.device:
        raise InputError(
            f"the vector is {flat.dtype} on {flat.device}",
            expected=f"{operator.dtype} on {operator.device}, as {operator!r}",
            remedy="convert one of the two with .to(dtype) or .to(device)",
        )
    return flat


def unflatten(operator: LinearOperator, flat: Tensor, like: Vector) -> Vector:
    """Undo ``flatten``: a flat vector (n,) or (n, K) in the kind of another vector."""
    # flat (n,)
    return flat if operator.space is None else operator.space.in_kind(flat, like)


class SymmetricOperator(LinearOperator, ABC):
    """An operator that is its own transpose."""

    @property
    def T(self) -> Self:
        """Itself."""
        return self


def unit_columns(n: int, index: Tensor, like: Tensor) -> Tensor:
    """Some columns of the identity matrix, (n, k)."""
    unit = like.new_zeros(n, len(index))
    unit[index, torch.arange(len(index), device=index.device)] = 1
    return unit


class Bidirectional(LinearOperator):
    """An operator with a product of its own in each direction."""

    @abstractmethod
    def transposed_mm(self, w: Tensor) -> Tensor:
        """Aᵀ w, (n, K)."""
        # w (m, K)

    @property
    def T(self) -> LinearOperator:
        """Aᵀ."""
        return Transposed(self)


class Transposed(LinearOperator):
    """The transpose of an operator with a product in each direction."""

    def __init__(self, forward: Bidirectional) -> None:
        self.forward = forward
        self.shape = (forward.shape[1], forward.shape[0])
        self.dtype, self.device, self.space = forward.dtype, forward.device, None

    def mm(self, v: Tensor) -> Tensor:
        """Aᵀ v."""
        return self.forward.transposed_mm(v)

    @property
    def T(self) -> LinearOperator:
        """A."""
        return self.forward


class FunctionOperator(LinearOperator):
    """An operator from a function that multiplies."""

    # function (n, K), adjoint (m, K)

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        adjoint: Callable[[Tensor], Tensor] | None = None,
        symmetric: bool = False,
        space: ParameterSpace | None = None,
    ) -> None:
        if symmetric and shape[0] != shape[1]:
            raise InputError(
                f"symmetric is True for the shape {shape}",
                "a square shape",
                "leave symmetric= out",
            )
        self.shape, self.dtype, self.device, self.space = shape, dtype, torch.device(device), space
        self._function, self._adjoint, self._symmetric = function, adjoint, symmetric

    def mm(self, v: Tensor) -> Tensor:
        """The function's value."""
        return self._function(v)

    @property
    def T(self) -> LinearOperator:
        """The operator of the adjoint function."""
        if self._symmetric:
            return self
        if self._adjoint is None:
            raise InputError(
                "the function operator has no transpose",
                expected="the adjoint function",
                remedy="pass adjoint=, or symmetric=True if it is its own transpose",
            )
        m, n = self.shape
        return FunctionOperator(self._adjoint, (n, m), self.dtype, self.device, adjoint=self._function)


@node("terms")
class Sum(LinearOperator):
    """A₁ + A₂ + ..."""

    def __init__(self, terms: Sequence[LinearOperator]) -> None:
        if not terms:
            raise InputError("the sum has no terms", "at least one operator", "pass a list of operators")
        for term in terms[1:]:
            _require_alike(terms[0], term, terms[0].shape == term.shape, "added")
        opened = [term.terms if isinstance(term, Sum) else (term,) for term in terms]
        self.terms: tuple[LinearOperator, ...] = tuple(term for group in opened for term in group)
        self.shape, self.dtype, self.device = terms[0].shape, terms[0].dtype, terms[0].device
        self.space = _first_space(self.terms)

    def mm(self, v: Tensor) -> Tensor:
        """A₁ v + A₂ v + ..."""
        return reduce(torch.add, (term.mm(v) for term in self.terms))

    @property
    def T(self) -> LinearOperator:
        """A₁ᵀ + A₂ᵀ + ..."""
        return Sum([term.T for term in self.terms])


@node("operator", "scalar")
class Scaled(LinearOperator):
    """A number times an operator, c A."""

    def __init__(self, operator: LinearOperator, scalar: float) -> None:
        self.operator, self.scalar = operator, require_scalar(scalar)
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self.space = operator.space

    def mm(self, v: Tensor) -> Tensor:
        """``c (A v)``."""
        return self.scalar * self.operator.mm(v)

    @property
    def T(self) -> LinearOperator:
        """``c Aᵀ``."""
        return Scaled(self.operator.T, self.scalar)


class Damped(LinearOperator):
    """A + τ I."""

    def __init__(self, operator: LinearOperator, tau: float) -> None:
        if operator.shape[0] != operator.shape[1]:
            raise InputError(f"{operator!r} cannot be damped", "a square operator", "damp A.T @ A instead")
        self._operator, self._tau = operator, require_damping(tau)
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self.space = operator.space

    def mm(self, v: Tensor) -> Tensor:
        """A v + τ v."""
        return self._operator.mm(v) + self._tau * v

    @property
    def T(self) -> LinearOperator:
        """Aᵀ + τ I."""
        return Damped(self._operator.T, self._tau)


class Composition(LinearOperator):
    """A B: first B, then A."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        _require_alike(left, right, left.shape[1] == right.shape[0], "composed")
        self._left, self._right = left, right
        self.shape = (left.shape[0], right.shape[1])
        self.dtype, self.device, self.space = left.dtype, left.device, right.space

    def mm(self, v: Tensor) -> Tensor:
        """A (B v)."""
        return self._left.mm(self._right.mm(v))

    @property
    def T(self) -> LinearOperator:
        """Bᵀ Aᵀ."""
        return Composition(self._right.T, self._left.T)


def require_square(operator: Any, name: str = "operator", factored: bool = False) -> LinearOperator:
    """A square operator, or an error."""
    remedy = "wrap a matrix, linnet.linalg.Dense(A), or a function, linnet.linalg.FunctionOperator(f, shape)"
    found = instance(name, operator, LinearOperator, "a linear operator", remedy)
    if found.shape[0] != found.shape[1]:
        raise InputError(
            f"{found!r} is not square", "a symmetric operator", "pass AᵀA, with Aᵀb for least squares"
        )
    if factored and found.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"{found!r} is of {found.dtype}", "float32 or float64", "convert it, or its network with .float()"
        )
    return found


def _require_operator(other: Any) -> LinearOperator:
    """The other operator of a sum."""
    return instance("the other term", other, LinearOperator, "a linear operator", "sum operators only")


def _require_alike(left: LinearOperator, right: LinearOperator, fits: bool, verb: str) -> None:
    """Two operators fit in shape, type and device."""
    if not fits or left.dtype != right.dtype or left.device != right.device:
        raise InputError(
            f"{left!r} and {right!r} cannot be {verb}",
            expected="fitting shapes, one dtype, one device",
            remedy="see .shape, and convert one of the two with .to(dtype) or .to(device)",
        )


def _first_space(operators: Sequence[LinearOperator]) -> ParameterSpace | None:
    """The parameter space of the operators that have one."""
    spaces = [operator.space for operator in operators if operator.space is not None]
    if any(space != spaces[0] for space in spaces):
        raise InputError(
            "the terms of the sum live in different parameter spaces",
            expected="one parameter space",
            remedy="make all terms on the same network with the same params=",
        )
    return spaces[0] if spaces else None


def require_scalar(scalar: float | Tensor) -> float:
    """A finite real number, or an error."""
    return number("the operator's multiplier", scalar, remedy="pass a number such as 0.1")


def require_damping(tau: float, name: str = "the damping") -> float:
    """A damping that is a finite number and not negative, or an error."""
    return number(name, tau, least=0, remedy="pass a number such as 0.1")


def require_factor(scalar: float) -> float:
    """A multiplier that keeps a matrix positive semi-definite, or an error."""
    return require_damping(scalar, "the operator's multiplier")
