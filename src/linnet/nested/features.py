"""The features of a network and the tangent kernel of the layers below them.

With φ(x) the D inputs of the last linear layer and r_h random heads, h = 1 .. H,

    K_head(x, x') = φ̃(x)ᵀ φ̃(x')                         φ̃: features less their mean over the training samples
    K_body(x, x') = 1/H Σ_h ⟨∂ r_hᵀφ(x), ∂ r_hᵀφ(x')⟩    derivatives in all weights below the head

For r_h ~ N(0, I/D) the expectation of K_body is 1/D Σ_d ⟨∂φ_d(x), ∂φ_d(x')⟩, the tangent kernel of the
features. It is the same for every class: the kernel of C outputs is K ⊗ I, N × N instead of N·C × N·C.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.errors import ModelError
from linnet.fitting.last_layer import features, last_linear, replace_module, zero_layer
from linnet.linalg.space import ParameterSpace
from linnet.tangent.batch import Inputs
from linnet.tangent.functional import Functional, without_wrapper
from linnet.tangent.gram import gram, gram_and_own, own_kernels
from linnet.tangent.modes import in_exact_mode
from linnet.tangent.selection import Selector, select_parameters


def with_random_heads(model: nn.Module, heads: int, seed: int) -> nn.Module:
    """A copy of a network whose last linear layer is H random heads, without a bias.

    Args:
        model: The network; it is not touched.
        heads: H.
        seed: Seed of their weights, drawn from N(0, 1/D).

    Returns:
        The copy.
    """
    clone = copy.deepcopy(model)
    name, old = last_linear(clone)
    new = zero_layer(nn.Linear, old.in_features, heads, like=old.weight, bias=False)
    draws = torch.randn(new.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        new.weight.copy_(draws * old.in_features**-0.5)
    replace_module(clone, name, new)
    return clone


class Features:
    """The two kernels of a network between any samples.

    Args:
        model: A network that ends in a linear layer; it is not touched.
        heads: H, random heads that are averaged.
        seed: Seed of their weights.
        params: Parameters below the head that take part; all of them by default.
        trained: Whether those parameters were trained on the samples of the fit.

    Raises:
        ModelError: If the network does not end in a linear layer, or no parameter below it is chosen.

    Attributes:
        model: The network, its last layer replaced by the random heads, in evaluation mode.
        function: Its linearization in the weights below the head.
        layer: Name of the last layer.
    """

    def __init__(
        self, model: nn.Module, heads: int, seed: int, params: Selector = None, *, trained: bool = False
    ) -> None:
        model = without_wrapper(model)
        name, old = last_linear(model)
        body = [key for key in select_parameters(model, params) if key.rpartition(".")[0] != name]
        if not body:
            raise ModelError(
                f"all chosen parameters are in the last layer ({name})",
                expected="a network with weights below its head",
                remedy=(
                    'pass params="all", since weights that require no gradient are left out; or weight=0 '
                    "for the linear probe alone"
                    if params is None
                    else "leave params= out, or pass weight=0 for the linear probe alone"
                ),
            )
        self.heads, self.seed, self.width = heads, seed, old.in_features
        self.layer, self.trained = name, trained
        function = Functional(with_random_heads(model, heads, seed), body)
        self.function = function.under(function.precision.exact(function.dtype))
        self.model = self.function.model

    @property
    def space(self) -> ParameterSpace:
        """The weights below the head."""
        return self.function.space

    def moved(self, model: nn.Module) -> Features:
        """The same features at trained weights.

        Args:
            model: The network after training.

        Returns:
            Its features, with the same random heads.
        """
        return Features(model, self.heads, self.seed, self.function.names, trained=True)

    def phi(self, x: Inputs) -> Tensor:
        """φ(x), (N, D), in float64."""
        return features(self.function.model, x).double()

    @in_exact_mode
    def body(
        self, x1: Inputs, x2: Inputs | None = None, memory: str | int | None = None, file: Path | None = None
    ) -> Tensor:
        """K_body(x1, x2), (N, M), in float64.

        Args:
            x1: N samples.
            x2: M samples; those of x1 by default.
            memory: Budget of its tiles.
            file: A ``.npy`` file that holds it while it grows; an interrupted run resumes from it.

        Returns:
            The kernel.
        """
        found = gram(self.function, x1, x2, form="trace", memory=memory, file=file)
        return found.double() / self.heads

    @in_exact_mode
    def body_and_own(self, x1: Inputs, x2: Inputs, memory: str | int | None = None) -> tuple[Tensor, Tensor]:
        """K_body(x1, x2), (N, M), and K_body of every example of x1 with itself, (N,), in the same passes."""
        found, own = gram_and_own(self.function, x1, x2, memory)
        return found.double() / self.heads, own / self.heads

    @in_exact_mode
    def body_own(self, x: Inputs, memory: str | int | None = None) -> Tensor:
        """K_body(x_i, x_i), (N,), in float64."""
        own = own_kernels(self.function, x, memory)
        return own.diagonal(dim1=1, dim2=2).double().sum(1) / self.heads
