"""Kronecker factors by the recursion of expected pre-activation curvatures (KFRA).

For a feed-forward network h_l = W_l â_{l−1}, a_l = φ(h_l), the pre-activation Gauss-Newton matrices of one
example satisfy G_l = B_l W_{l+1}ᵀ G_{l+1} W_{l+1} B_l with B_l = diag φ'(h_l) (Botev 2020, lemma 3.22). KFRA
passes expectations back instead (eq. 4.7):

    Ĝ_l = E[B_l W_{l+1}ᵀ Ĝ_{l+1} W_{l+1} B_l] = (W_{l+1}ᵀ Ĝ_{l+1} W_{l+1}) ∘ E[φ'(h_l) φ'(h_l)ᵀ]

which needs no backward pass for each output, and is exact for one example and for linear networks.

That a network is such a chain is not read off its modules but proved on the data: with random cotangents,
the gradients must satisfy g_l = φ'(h_l) ∘ W_{l+1}ᵀ g_{l+1} with one vector φ'(h_l) for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.curvatures.accumulate import require_finite_pass
from linnet.curvatures.chain import ChainPass
from linnet.curvatures.expectation import Expectation, batch_generator
from linnet.curvatures.layers import UNSEEN, Layer, Part, find_layers
from linnet.curvatures.moments import input_moment
from linnet.curvatures.stream import Batch
from linnet.curvatures.sums import second_moment
from linnet.errors import ModelError
from linnet.likelihoods.likelihood import IndependentComponents, Likelihood
from linnet.linalg.kronecker import Kronecker
from linnet.number_types import wide_type
from linnet.tangent.batch import take
from linnet.tangent.capture import capture
from linnet.tangent.functional import Functional
from linnet.tangent.rules import Captured, factors

HESSIANS = 1 << 22  # numbers in the Λ of some examples at once
PROBES = 4  # random cotangents from which φ' is found, and on which it is proved


class RecursionSums:
    """Sums of the recursion for every layer: Σ â âᵀ and Σ φ' φ'ᵀ, and Σ Λ at the end."""

    def __init__(
        self, function: Functional, expectation: Expectation, batch: Batch, probes: int = PROBES
    ) -> None:
        self.function, self.expectation, self.probes = function, expectation, probes
        captured = capture(function, batch.x, "sum")
        self.layers = _chain(captured, find_layers(captured, function.names, {}))
        kind = wide_type(function.dtype)
        self.tensors = {"count": torch.zeros((), dtype=torch.float64, device=function.device)}
        for i, layer in enumerate(self.layers):
            d, c = layer.widths
            zeros = torch.zeros(d, d, dtype=kind, device=function.device)
            self.tensors |= {f"inputs {i}": zeros, f"slopes {i}": zeros.new_zeros(c, c)}
        self._last = len(self.layers) - 1

    def add(self, batch: Batch, f: Tensor | None, y: Tensor | None) -> None:
        """Add a batch."""
        size, index = batch.size, batch.index
        c = self.function.output_shape(batch.x).numel()
        own = self.function.theta[self.layers[-1].names[0]]
        generator = batch_generator(self.expectation.seed, index, own.device)
        u = torch.randn(self.probes, size, c, generator=generator, dtype=own.dtype, device=own.device)
        captured = capture(self.function, batch.x, u)
        require_finite_pass(captured)
        if f is None:
            f = captured.outputs.view(size, *self.function.output_shape(batch.x))
            y = self.expectation.targets(f, y)
        behind = u  # the gradient at the activations of the layer in hand
        for i in range(self._last, -1, -1):
            layer = self.layers[i]
            g = factors(captured.by_parameter()[layer.names[0]][0], captured.n).g[:, :, 0, 0]  # (K, N, c)
            slopes = self._slopes(layer, g, behind)
            if i == self._last:
                self._require_one_position(f)
                self.tensors[f"slopes {i}"] += _outer_curvature(self.expectation.likelihood, f, y, slopes)
            else:
                self.tensors[f"slopes {i}"] += second_moment(slopes.T)
            moment = input_moment(captured.by_parameter()[layer.names[0]][0])
            self.tensors[f"inputs {i}"] += (moment.hatted() if layer.biased else moment.second)[0]
            behind = g @ self._weight(layer)
        self.tensors["count"] += batch.size

    def add_pass(self, chain: ChainPass, y: Tensor | None) -> None:
        """Add a batch whose forward pass is at hand."""
        self._require_one_position(chain.outputs)
        for i, (layer, a, slopes) in enumerate(zip(self.layers, chain.inputs, chain.slopes, strict=True)):
            own = self.tensors[f"slopes {i}"]
            if i == self._last:
                own += _outer_curvature(self.expectation.likelihood, chain.outputs, y, slopes)
            else:
                own += second_moment(slopes.to(own.dtype).T)
            a = a.to(own.dtype)
            self.tensors[f"inputs {i}"] += second_moment(layer.homogeneous(a).T)
        self.tensors["count"] += len(chain.outputs)

    def parts(self) -> list[Part]:
        """Ĝ_l ⊗ A_l of every layer, in the parameters' order (A_l ⊗ Ĝ_l for weights stored inputs first)."""
        count = float(self.tensors["count"])
        found = {}
        curvature = self.tensors[f"slopes {self._last}"]
        for i in range(self._last, -1, -1):
            layer = self.layers[i]
            if i < self._last:
                weight = self._weight(self.layers[i + 1]).to(curvature.dtype)
                # eq. 4.7, summed over the examples
                curvature = (weight.T @ curvature @ weight) * self.tensors[f"slopes {i}"] / count
            curvature = (curvature + curvature.T) / 2
            inputs = self.tensors[f"inputs {i}"] / count
            left, right = layer.ordered(inputs, curvature)
            found[layer.names[0]] = Part(
                layer, Kronecker(left, right, name=f"curvature of {layer.name}"), "kfra"
            )
        return [found[name] for name in self.function.names if name in found]

    def _weight(self, layer: Layer) -> Tensor:
        """W (c, d)."""
        weight = self.function.theta[layer.names[0]]
        return weight.T if layer.transposed else weight

    def _slopes(self, layer: Layer, g: Tensor, behind: Tensor) -> Tensor:
        """φ'(h) (N, c), by least squares over the probes; proved by what is left over."""
        if g.shape != behind.shape:
            raise _not_a_chain(layer, f"{g.shape[-1]} outputs meet {behind.shape[-1]} inputs")
        power = behind.square().sum(0)
        slopes = torch.where(power > 0, (g * behind).sum(0) / power.clamp(min=torch.finfo(g.dtype).tiny), 0)
        tolerance = max(1e-8 if g.dtype == torch.float64 else 1e-3, 16 * torch.finfo(g.dtype).eps)
        if (g - slopes * behind).abs().max() > tolerance * g.abs().max():
            raise _not_a_chain(layer, "what follows it is not elementwise, or goes more than one way")
        return slopes

    def _require_one_position(self, f: Tensor) -> None:
        """Outputs with extra dimensions have no single last layer."""
        positions = f.numel() // max(1, f.shape[:2].numel())
        if positions != 1:
            raise _not_a_chain(self.layers[-1], f"its outputs have {positions} positions")


def _outer_curvature(likelihood: Likelihood, f: Tensor, y: Tensor | None, slopes: Tensor) -> Tensor:
    """Σ_n φ'_n Λ_n φ'_nᵀ, (C, C), with nothing averaged yet and never one Λ for each example at once."""
    if isinstance(likelihood, IndependentComponents):  # Λ is diagonal
        return torch.diag((likelihood.product(f, slopes.view_as(f), y).flatten(1) * slopes).sum(0))
    total = slopes.new_zeros(slopes.shape[1], slopes.shape[1])
    size = max(1, HESSIANS // slopes.shape[1] ** 2)
    for start in range(0, len(f), size):
        few = slice(start, start + size)
        hessian = likelihood.hessian(f[few], None if y is None else y[few])[:, 0]
        total += (slopes[few, :, None] * hessian * slopes[few, None]).sum(0)
    return total


def _chain(captured: Captured, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers in the order of their use, if all are plain linear layers."""
    for layer in layers:
        if layer.why == UNSEEN:
            raise _not_a_chain(layer, "no example has a gradient there, as where units are dead")
        if not layer.factored or layer.why != "linear":
            raise _not_a_chain(layer, f"it is used by {layer.why}")
        if layer.form.uses > 1 or layer.form.positions > 1:
            raise _not_a_chain(
                layer, f"its weight is used {max(layer.form.uses, layer.form.positions)} times an example"
            )
    order = {use.sources[0]: i for i, use in reversed(list(enumerate(captured.uses)))}
    return tuple(sorted(layers, key=lambda layer: order[layer.names[0]]))


def _not_a_chain(layer: Layer, why: str) -> ModelError:
    """The graph cannot be taken, and where."""
    return ModelError(
        f"KFRA cannot follow the network at {layer.name}: {why}",
        expected="a feed-forward chain of linear layers with elementwise activations between them",
        remedy='use structure="kfac" with expectation="exact" or "mc", which take any network',
    )


def counted(
    function: Functional, expectation: Expectation, batch: Batch
) -> tuple[Batch, Tensor, Tensor | None]:
    """The examples of a batch that are not masked, their outputs and checked targets."""
    f = function.check_runs(batch.x)
    y = expectation.targets(f, batch.y)
    mask = None if y is None else expectation.likelihood.mask(y)
    if y is None or mask is None or bool(mask.all()):
        return batch, f, y
    kept = mask.any(1)
    return Batch(batch.index, take(batch.x, kept), y[kept]), f[kept], y[kept]
