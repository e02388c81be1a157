"""A zoo of tiny architectures, for tests that must hold for any network.

Every animal is built from a seed in float64 with fewer than 4000 parameters, so that dense Jacobians
take milliseconds, and comes with batches of any size. `traits` says what torch cannot do with it, as
far as known for torch 2.6 to 2.13; tests read the traits only to know what to expect, never to skip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from tests import zoo_modules, zoo_sequences
from tests.grids import grid
from tests.oracles.dense import jacobian_oracle, output_oracle

#: torch.func.jvp fails on the network as it is built.
NO_FORWARD_AD = "no forward-mode differentiation"
#: torch.func.jvp works but its result cannot be differentiated again.
NO_JVP_GRADIENT = "the jvp cannot be differentiated"
#: torch.func.vmap of the network fails.
NO_VMAP = "no vmap"
#: The factory returns the network in train mode, where its outputs are random or depend on the batch.
TRAIN_MODE = "left in train mode"
#: Some parameters do not require gradients.
FROZEN = "has frozen parameters"
#: Some parameters have no influence on the output.
UNUSED = "has an unused parameter"
#: Some parameters are used more than once in a pass, or under several names.
SHARED = "shares parameters"
#: Outputs are not smooth in the parameters (ReLU, max-pooling).
KINKS = "has kinks"


@dataclass(frozen=True)
class Animal:
    """One architecture: how to build it, how to feed it, what it returns."""

    name: str
    build: Callable[[], nn.Module]
    feed: Callable[[int], Any]
    classes: int
    output: Callable[[Any], Tensor] | None = None
    traits: frozenset[str] = field(default_factory=frozenset)

    def factory(self, seed: int = 0) -> nn.Module:
        """The network in float64, every parameter away from its special initial value."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().double()
            with torch.no_grad():
                for parameter in model.parameters():
                    # zero biases, unit scales and zero position embeddings would hide mistakes
                    parameter.add_(0.1 * torch.randn_like(parameter))
            self._fill_statistics(model)
        return model

    def make_batch(self, n: int = 4, seed: int = 0) -> Any:
        """Inputs of n examples, float64 where they are real."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            return self.feed(n)

    def _fill_statistics(self, model: nn.Module) -> None:
        """Running averages of normalization layers, from a few passes in train mode."""
        was_training = model.training
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            model.train()
            with torch.no_grad():
                for _ in range(3):
                    _call(model, self.feed(8))
        model.train(was_training and TRAIN_MODE in self.traits)

    def __str__(self) -> str:
        return self.name


def _call(model: nn.Module, x: Any) -> Any:
    """The network applied to a tensor, tuple or dict."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def outputs(animal: Animal, model: nn.Module, x: Any) -> Tensor:
    """Outputs (N, C) of a plain call."""
    result = _call(model, x)
    result = result if animal.output is None else animal.output(result)
    return result.reshape(result.shape[0], -1)


def rows(x: Any, index: Any) -> Any:
    """The examples of a batch at the given indices (a list, a slice or a tensor)."""
    if isinstance(x, dict):
        return {name: value[index] for name, value in x.items()}
    return type(x)(value[index] for value in x) if isinstance(x, (tuple, list)) else x[index]


def size(x: Any) -> int:
    """Number of examples in a batch."""
    first = next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, (tuple, list)) else x
    return first.shape[0]


def joined(x1: Any, x2: Any) -> Any:
    """Two batches as one."""
    if isinstance(x1, dict):
        return {name: torch.cat([x1[name], x2[name]]) for name in x1}
    if isinstance(x1, (tuple, list)):
        return type(x1)(torch.cat(pair) for pair in zip(x1, x2, strict=True))
    return torch.cat([x1, x2])


def cast(x: Any, dtype: torch.dtype) -> Any:
    """A batch with its real parts in another precision."""
    if isinstance(x, dict):
        return {name: cast(value, dtype) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(cast(value, dtype) for value in x)
    return x.to(dtype) if x.is_floating_point() else x


# --- inputs ---------------------------------------------------------------------------------------


def _real(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def _tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(vocabulary, (n, length))


def _pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)


def _text(length: int, mask_dtype: torch.dtype = torch.int64) -> Callable[[int], dict[str, Tensor]]:
    """Token ids with padding on the right: the first sentence is full, the others are shorter."""

    def feed(n: int) -> dict[str, Tensor]:
        lengths = torch.randint(2, length + 1, (n,))
        lengths[0] = length
        mask = torch.arange(length)[None, :] < lengths[:, None]
        ids = torch.randint(1, 20, (n, length)) * mask
        return {"input_ids": ids, "attention_mask": mask.to(mask_dtype)}

    return feed


def _logits(result: Any) -> Tensor:
    return result.logits


def _scores(result: Any) -> Tensor:
    return result["scores"]


def _traits(*names: str) -> frozenset[str]:
    return frozenset(names)


ZOO: tuple[Animal, ...] = (
    Animal("mlp-tanh", lambda: zoo_modules.mlp(nn.Tanh), _real(6), 3),
    Animal("mlp-relu", lambda: zoo_modules.mlp(nn.ReLU), _real(6), 3, traits=_traits(KINKS)),
    Animal("lenet", zoo_modules.lenet, _real(1, 14, 14), 4, traits=_traits(KINKS)),
    Animal("resnet-batchnorm", zoo_modules.resnet, _real(3, 6, 6), 3, traits=_traits(KINKS)),
    Animal("densenet", zoo_modules.DenseNet, _real(2, 4, 4), 3, traits=_traits(KINKS)),
    Animal("mobilenet", zoo_modules.mobilenet, _real(3, 8, 8), 4, traits=_traits(KINKS)),
    Animal("convnext", zoo_modules.convnext, _real(3, 8, 8), 3),
    Animal("vit-mha", zoo_sequences.VisionTransformer, _real(3, 8, 8), 3, traits=_traits(NO_FORWARD_AD)),
    Animal("encoder-batch-first", lambda: zoo_sequences.Encoder(True), _real(4, 6), 3,
           traits=_traits(NO_FORWARD_AD, KINKS)),
    Animal("encoder-batch-second", lambda: zoo_sequences.Encoder(False), _real(4, 6), 3,
           traits=_traits(NO_FORWARD_AD, KINKS)),
    Animal("causal-sdpa", zoo_sequences.CausalAttention, _tokens(10, 5), 4, traits=_traits(NO_FORWARD_AD)),
    Animal("padding-index", lambda: zoo_sequences.CausalAttention(padding_idx=0), _tokens(10, 5), 4,
           traits=_traits(NO_FORWARD_AD)),
    Animal("bert-eager", lambda: zoo_sequences.bert("eager"), _text(6), 3, _logits, _traits(NO_VMAP)),
    Animal("bert-sdpa", lambda: zoo_sequences.bert("sdpa"),
           _text(6), 3, _logits, _traits(NO_VMAP, NO_FORWARD_AD)),
    Animal("gpt2-eager", lambda: zoo_sequences.gpt2("eager"), _text(6), 3, _logits, _traits(NO_VMAP)),
    Animal("gpt2-sdpa", lambda: zoo_sequences.gpt2("sdpa"),
           _text(6), 3, _logits, _traits(NO_VMAP, NO_FORWARD_AD)),
    Animal("lstm", lambda: zoo_sequences.Recurrent(nn.LSTM(3, 5, batch_first=True), 5), _real(4, 3), 3),
    Animal("lstm-bidirectional",
           lambda: zoo_sequences.Recurrent(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), 8),
           _real(4, 3), 3),
    Animal("gru", lambda: zoo_sequences.Recurrent(nn.GRU(3, 5, batch_first=True), 5), _real(4, 3), 3,
           traits=_traits(NO_VMAP)),
    Animal("tied-embedding", zoo_modules.TiedEmbedding, _tokens(4, 3), 4, traits=_traits(SHARED)),
    Animal("tied-linears", zoo_modules.TiedLinears, _real(5), 3, traits=_traits(SHARED)),
    Animal("tied-transpose", zoo_modules.TiedTranspose, _real(4), 4, traits=_traits(SHARED)),
    Animal("shared-module", zoo_modules.SharedModule, _real(6), 3, traits=_traits(SHARED)),
    Animal("shared-conv", zoo_modules.SharedConv, _real(2, 6, 6), 3, traits=_traits(SHARED)),
    Animal("sliced-weight", zoo_modules.SlicedWeight, _real(6), 3, traits=_traits(SHARED)),
    Animal("plain-arithmetic", zoo_modules.PlainArithmetic, _real(6), 3, traits=_traits(UNUSED)),
    Animal("contractions", zoo_modules.Contractions, _real(2, 3), 3, traits=_traits(KINKS)),
    Animal("conv1d", zoo_modules.conv1d, _real(2, 12), 3, traits=_traits(KINKS)),
    Animal("conv3d", zoo_modules.conv3d, _real(1, 4, 4, 4), 2),
    Animal("padding-modes", zoo_modules.padding_modes, _real(2, 6, 6), 3),
    Animal("transposed-convs", zoo_modules.transposed, _real(2, 5, 5), 3),
    Animal("decoder", zoo_modules.decoder, _real(5), 4),
    Animal("upsampler", zoo_modules.upsampler, _real(2, 4), 3),
    Animal("norms", zoo_modules.norms, _real(2, 6, 6), 3),
    Animal("weight-norm", zoo_modules.weight_norm, _real(2, 6, 6), 3, traits=_traits(NO_FORWARD_AD)),
    Animal("spectral-norm", zoo_modules.spectral_norm, _real(6), 3),
    Animal("lora", zoo_modules.lora, _real(6), 3, traits=_traits(FROZEN)),
    Animal("inplace-relu", zoo_modules.inplace_relu, _real(6), 3, traits=_traits(KINKS)),
    Animal("inplace-sum", zoo_modules.InplaceSum, _real(6), 3),
    Animal("dropout-train", zoo_modules.dropout, _real(6), 3, traits=_traits(TRAIN_MODE, KINKS)),
    Animal("checkpointed", zoo_modules.Checkpointed, _real(6), 3, traits=_traits(NO_VMAP)),
    Animal("embedding-bag", zoo_sequences.Bag, _tokens(10, 4), 3, traits=_traits(NO_FORWARD_AD)),
    Animal("gated", zoo_modules.Gated, _real(6), 3, traits=_traits(NO_JVP_GRADIENT)),
    Animal("two-inputs", zoo_modules.TwoInputs, _pair, 3),
    Animal("regression-column", lambda: zoo_modules.Regression(False), _real(6), 1),
    Animal("regression-vector", lambda: zoo_modules.Regression(True), _real(6), 1),
    Animal("structured-output", zoo_modules.Structured, _real(6), 4),
    Animal("dict-output", zoo_modules.Named, _real(6), 3, _scores),
)  # fmt: skip

#: One animal a mechanism, and every trait: what each run takes of a grid over the zoo.
OFTEN = (
    "mlp-tanh",
    "lenet",
    "resnet-batchnorm",
    "mobilenet",
    "encoder-batch-second",
    "causal-sdpa",
    "gpt2-eager",
    "lstm",
    "tied-linears",
    "sliced-weight",
    "plain-arithmetic",
    "weight-norm",
    "lora",
    "dropout-train",
    "gated",
    "structured-output",
)

every_animal = pytest.mark.parametrize("name", grid([animal.name for animal in ZOO], OFTEN))

BY_NAME: dict[str, Animal] = {animal.name: animal for animal in ZOO}


@dataclass(frozen=True)
class Case:
    """An animal with two batches (4 and 3 examples) and their dense outputs and Jacobians."""

    animal: Animal
    x1: Any
    x2: Any
    f1: Tensor  # (4, C)
    f2: Tensor  # (3, C)
    j1: Tensor  # (4, C, P)
    j2: Tensor  # (3, C, P)

    @property
    def output(self) -> Callable[[Any], Tensor] | None:
        return self.animal.output

    @property
    def parameters(self) -> int:
        """P, the number of linearized parameters."""
        return self.j1.shape[2]

    def model(self) -> nn.Module:
        """A fresh copy of the network."""
        return self.animal.factory(0)

    def direction(self, seed: int = 0, columns: int | None = None) -> Tensor:
        """A random parameter vector (P,), or a matrix (P, K)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.parameters,) if columns is None else (self.parameters, columns)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


@cache
def case(name: str) -> Case:
    """The case of one animal, computed once; treat its tensors as read-only."""
    animal = BY_NAME[name]
    model, x1, x2 = animal.factory(0), animal.make_batch(4, 0), animal.make_batch(3, 1)
    f1, f2 = (output_oracle(model, x, animal.output) for x in (x1, x2))
    j1, j2 = (jacobian_oracle(model, x, output=animal.output) for x in (x1, x2))
    return Case(animal, x1, x2, f1, f2, j1, j2)


def assert_near(actual: Tensor, expected: Tensor, relative: float = 1e-10) -> None:
    """The largest error is at most `relative` times the largest entry, and the shapes are equal."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    scale = expected.abs().max().item()
    error = (actual.detach().double() - expected).abs().max().item()
    assert error <= relative * scale, f"relative error {error / scale if scale else error:.2e}"


def linearize(name: str, **options: Any) -> Any:
    """A fresh linearization of an animal."""
    return linnet.linearize(case(name).model(), output=BY_NAME[name].output, **options)


@cache
def linearized(name: str) -> Any:
    """One linearization of each animal, shared by the tests that only read from it."""
    return linearize(name)


def flat(v: Any) -> Tensor:
    """A parameter vector as a flat tensor, whether it came flat or by name."""
    return torch.cat([value.reshape(-1) for value in v.values()]) if isinstance(v, dict) else v


def named(lin: Any, v: Tensor) -> dict[str, Tensor]:
    """A flat parameter vector by name."""
    shapes = {name: lin.delta[name].shape for name in lin.parameter_names}
    pieces = v.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def set_delta(lin: Any, v: Tensor) -> None:
    """Moves a linearization to a flat displacement."""
    with torch.no_grad():
        for name, value in named(lin, v).items():
            lin.delta[name].copy_(value)
