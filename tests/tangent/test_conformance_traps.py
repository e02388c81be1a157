"""Networks made to deceive: each would give a silently wrong number to a plausible implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from tests.grids import grid
from tests.oracles.dense import jacobian_oracle, kernel_oracle, output_oracle
from tests.zoo import assert_near, case, flat, linearize, rows, set_delta


def check(model: nn.Module, *batches: Any, lin: Any = None, tolerance: float = 1e-10) -> Any:
    """Products, rows and kernels on each batch in turn, against the oracles, with one linearization."""
    lin = linnet.linearize(model) if lin is None else lin
    js = [jacobian_oracle(model, x) for x in batches]
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(js[0].shape[2], generator=generator, dtype=torch.float64)
    for x, j in zip(batches, js, strict=True):
        u = torch.randn(j.shape[:2], generator=generator, dtype=torch.float64)
        assert_near(lin.base(x), output_oracle(model, x), 1e-12)
        assert_near(lin.jvp(x, v), j @ v, tolerance)
        assert_near(flat(lin.vjp(x, u)), torch.einsum("ncp,nc->p", j, u), tolerance)
        assert_near(lin.jacobian(x), j, tolerance)
        assert_near(lin.kernel(x), kernel_oracle(j), tolerance)
    for x1, j1 in zip(batches, js, strict=True):
        for x2, j2 in zip(batches, js, strict=True):
            for outputs in ("full", "trace", "diagonal", "sum"):
                assert_near(lin.kernel(x1, x2, form=outputs), kernel_oracle(j1, j2, outputs), tolerance)
    return lin


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(module: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = module().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# --- derivatives that disagree between modes of differentiation ------------------------------------


class Detached(nn.Module):
    """Part of the path is detached; forward mode would differentiate through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + 2.0 * h.detach())


class NoGradPart(nn.Module):
    """Part of the path runs under torch.no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            gate = torch.sigmoid(self.first(2 * x))
        return self.last(h * gate)


class StraightThrough(nn.Module):
    """Rounds, with the gradient of the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = 3 * torch.tanh(self.first(x))
        return self.last(h + (h.round() - h).detach())


class Cube(torch.autograd.Function):
    """x³ with a backward pass only, and out of sight of torch-function modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class CustomFunction(nn.Module):
    """A custom autograd.Function between the layers and before a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(torch.tanh(self.first(x))) @ self.head


@pytest.mark.parametrize("module", [Detached, NoGradPart, StraightThrough, CustomFunction])
@pytest.mark.thinned(2)
def test_derivatives_are_those_of_backward(module: Callable[[], nn.Module]) -> None:
    check(build(module), real(4, 4), real(3, 4, seed=1))


def test_padding_row_is_left_out_even_if_the_first_batch_has_no_padding() -> None:
    """torch's backward skips the padding row of an embedding, its forward mode does not."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids)).mean(1))

    check(build(Bag), torch.tensor([[1, 2, 3], [4, 1, 1]]), torch.tensor([[0, 2, 0], [0, 0, 0], [3, 0, 1]]))


# --- plans made on a first batch that tells little --------------------------------------------------


class Asleep(nn.Module):
    """Sequence first, with gradients that vanish for examples whose gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.relu(x[:, 0, 0])
        h = torch.tanh(self.norm(self.first(x.transpose(0, 1))) * self.scale)  # (S, N, 4)
        return gate[:, None] * self.last(h[-1])


def asleep(n: int, length: int, awake: list[int]) -> Tensor:
    """A batch in which all examples sleep but those given."""
    x = real(n, length, 4, seed=n)
    x[:, 0, 0] = -1.0
    x[awake, 0, 0] = torch.linspace(0.5, 2.0, len(awake), dtype=torch.float64)
    return x


@pytest.mark.parametrize("length", [3, 6])
def test_layouts_found_while_gradients_vanish_are_not_trusted(length: int) -> None:
    model = build(Asleep)
    lin = linnet.linearize(model)
    assert torch.count_nonzero(lin.kernel(asleep(4, length, []))) == 0
    for awake in ([0, 1, 2, 3, 4, 5], [3, 4, 5]):
        x = asleep(6, length, awake)
        assert_near(lin.kernel(x), kernel_oracle(jacobian_oracle(model, x)))


@pytest.mark.parametrize("length", [3, 6])
@pytest.mark.parametrize("awake", [[3, 4, 5], [5], [2]])
@pytest.mark.thinned(3)
def test_layouts_found_on_few_examples_are_proved(length: int, awake: list[int]) -> None:
    """With as many positions as examples, and one example awake, a wrong axis looks right."""
    model = build(Asleep)
    for n in (6, length):
        x = asleep(6, length, awake)[-n:]
        if awake[-1] >= 6 - n:
            assert_near(linnet.linearize(model).kernel(x), kernel_oracle(jacobian_oracle(model, x)))


def test_a_zero_head_hides_layouts_until_relinearization() -> None:
    expected = case("encoder-batch-second")
    model, x = expected.model(), rows(expected.x1, [0, 1, 2, 3, 0, 1])[:, :3]
    nn.init.zeros_(model.head.weight)
    lin = check(model, x)
    j = jacobian_oracle(model, x)
    delta = 0.1 * expected.direction()
    set_delta(lin, delta)
    assert_near(lin(x), output_oracle(model, x) + j @ delta)
    lin.relinearize()
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach() + delta, model.parameters()
    )
    check(model, x, lin=lin)


@pytest.mark.long
def test_batches_without_and_with_padding_take_different_paths_through_the_network() -> None:
    """Hugging Face drops a mask that hides nothing; a plan must not be carried over."""
    for name in ("bert-eager", "bert-sdpa", "gpt2-eager", "gpt2-sdpa"):
        expected = case(name)
        full = {
            "input_ids": expected.x1["input_ids"].clamp(min=1),
            "attention_mask": torch.ones(4, 6, dtype=torch.int64),
        }
        model = expected.model()
        j_full = jacobian_oracle(model, full, output=expected.output)
        for first, second in ((full, expected.x1), (expected.x1, full)):
            lin = linearize(name)
            j1, j2 = (j_full, expected.j1) if first is full else (expected.j1, j_full)
            assert_near(lin.jvp(first, expected.direction()), j1 @ expected.direction())
            assert_near(lin.jvp(second, expected.direction()), j2 @ expected.direction())
            assert_near(lin.kernel(first, second), kernel_oracle(j1, j2))
            assert_near(lin.kernel(second), kernel_oracle(j2))


class Branching(nn.Module):
    """Takes one path or another by the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 5), nn.Parameter(torch.randn(4, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(x) if bool((x[:, 0] > 0).all()) else x @ self.right
        return self.last(torch.tanh(h))


def test_branches_on_the_data() -> None:
    up, down = real(4, 4), real(5, 4, seed=1)
    up[:, 0], down[:, 0] = up[:, 0].abs(), -down[:, 0].abs()
    check(build(Branching), up, down, up[:1])
    check(build(Branching), down, up)


# --- shapes that could be mistaken for one another --------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lstm", "gru", "encoder-batch-first", "encoder-batch-second", "bert-sdpa", "causal-sdpa"]
)
@pytest.mark.thinned(2)
def test_batches_of_different_lengths(name: str) -> None:
    expected, model, lin = case(name), case(name).model(), linearize(name)

    def short(x: Any) -> Any:
        return {key: value[:, :2] for key, value in x.items()} if isinstance(x, dict) else x[:, :2]

    x1, x2 = expected.x1, short(expected.x2)
    j2 = jacobian_oracle(model, x2, output=expected.output)
    assert_near(lin.kernel(x1, x2), kernel_oracle(expected.j1, j2))
    assert_near(lin.kernel(x2, x1), kernel_oracle(j2, expected.j1))
    assert_near(lin.kernel(x2), kernel_oracle(j2))


def test_images_of_different_sizes() -> None:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1)
    model = build(lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2)))
    check(model, real(3, 2, 5, 5), real(2, 2, 8, 4, seed=1), real(2, 2, 4, 9, seed=2))


class Positions(nn.Module):
    """Positions as (1, S, d), heads spread over an axis, scales on every axis but the first."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.positions = nn.Parameter(torch.randn(1, length, 4))
        self.table = nn.Embedding(length, 4)
        self.by_place = nn.Parameter(torch.ones(length, 1))
        self.by_head = nn.Parameter(torch.ones(1))
        self.query = nn.Parameter(torch.randn(1, 1, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        h = self.embed(x) + self.positions + self.table(torch.arange(s))
        h = h * self.by_place * self.by_head.expand(4)
        weights = torch.softmax((self.query.repeat(n, 1, 1) * torch.tanh(h)).sum(-1), -1)
        return self.last((weights[..., None] * h).sum(1))


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_batch_sizes_equal_to_other_axes(length: int) -> None:
    check(build(lambda: Positions(length)), *(real(n, length, 3, seed=n) for n in (1, 2, 3, 4, 6)))


class Spread(nn.Module):
    """Parameters spread over the examples in unusual ways before they meet the data."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.start, self.weight = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        state = torch.cat([self.start] * n)
        bias = torch.zeros(n, 4, dtype=x.dtype) + self.bias
        scale = torch.ones(n, 1, dtype=x.dtype) @ self.rows[None]
        for _ in range(2):
            state = torch.tanh(F.linear(state, self.weight) + scale * x)
        return self.last(state + bias) + self.bias[:2].sum()


class InPlaceUses(nn.Module):
    """Parameters written into activations: slices, masks, where, index_put, stack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.part, self.token = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(6))
        self.scalar, self.rest = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, 1:3] *= self.part
        h += self.rest
        h = torch.tanh(h)
        h = torch.where(x[:, :1] > 0, h, self.token)
        h = h.masked_fill(x[:, 1:2] > 1, 0.3) * self.scalar
        h = torch.stack([h, self.rest.expand_as(h)]).sum(0)
        return self.last(h.sub(self.scalar)) / self.scalar


class Repeated(nn.Module):
    """Two outputs of different uses, a shared scale, subtraction both ways, addition to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.s, self.b = (
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.rand(4)),
            nn.Parameter(torch.randn(4)),
        )
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.s - x @ self.w
        h = (self.b - torch.tanh(h) * self.s).sub(self.b, alpha=3.0)
        h = torch.addmm(self.b, torch.sigmoid(h), self.w, beta=2.0, alpha=0.5) + (self.w @ h.T).T
        return self.last(h.add_(self.b + self.b) + self.w.sum(0))


class DeadBranch(nn.Module):
    """A layer whose output is multiplied by zero, and one that is computed and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.zeroed, self.dropped = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.dropped(h)
        return self.last(h + 0.0 * self.zeroed(h))


class Mapped(nn.Module):
    """torch.func.vmap inside the network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.vmap(lambda row: torch.tanh(self.w @ row))(torch.tanh(self.first(x)))
        return self.last(h)


class Fourier(nn.Module):
    """Complex arithmetic with real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.last = nn.Parameter(torch.randn(3, 2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return self.last(torch.tanh(torch.fft.irfft(spectrum, n=4)))


@pytest.mark.parametrize("module", [Spread, InPlaceUses, Repeated, DeadBranch, Mapped, Fourier])
@pytest.mark.thinned(4)
def test_unusual_uses_of_parameters(module: Callable[[], nn.Module]) -> None:
    check(build(module), real(4, 4), real(3, 4, seed=1), real(2, 4, seed=2))


# --- circumstances of a call ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "weight-norm", "lstm", "vit-mha", "plain-arithmetic"])
@pytest.mark.thinned(2)
def test_calls_under_no_grad_and_inference_mode(name: str) -> None:
    expected = case(name)
    v = expected.direction()
    for mode in (torch.no_grad, torch.inference_mode):
        lin = linearize(name)
        with mode():
            assert_near(lin(expected.x1), expected.f1, 1e-12)
            assert_near(lin.jvp(expected.x1, v), expected.j1 @ v)
            assert_near(lin.kernel(expected.x1), kernel_oracle(expected.j1))
            assert_near(flat(lin.vjp(expected.x1, torch.ones_like(expected.f1))), expected.j1.sum((0, 1)))
        assert_near(lin.kernel(expected.x1, expected.x2), kernel_oracle(expected.j1, expected.j2))


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "vit-mha"])
def test_inputs_that_require_gradients(name: str) -> None:
    expected = case(name)
    x = expected.x1.clone().requires_grad_()
    lin = linearize(name)
    assert_near(lin.kernel(x, expected.x2), kernel_oracle(expected.j1, expected.j2))
    assert_near(lin.jacobian(x), expected.j1)
    assert not lin.kernel(x).requires_grad
    assert x.grad is None


@pytest.mark.parametrize("name", ["mlp-tanh", "lenet", "vit-mha"])
def test_autocast_around_a_call_changes_nothing(name: str) -> None:
    """torch's forward mode under autocast is wrong or fails, and a kernel in bfloat16 is no kernel."""
    expected = case(name)
    lin = linnet.linearize(expected.model().float())
    x, v = expected.x1.float(), expected.direction().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(lin(x), expected.f1, 1e-5)
        assert_near(lin.jvp(x, v), expected.j1 @ expected.direction(), 1e-4)
        assert_near(lin.kernel(x), kernel_oracle(expected.j1), 1e-5)
        assert_near(flat(lin.vjp(x, torch.ones(4, expected.animal.classes))), expected.j1.sum((0, 1)), 1e-5)


def test_complex_parameters_are_not_dropped_in_silence() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.last = (
                nn.Parameter(torch.randn(3, dtype=torch.complex128)),
                nn.Linear(4, 2).double(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))

    with pytest.raises(linnet.errors.LinnetError, match="filter"):
        linnet.linearize(Spectral())
    assert linnet.linearize(Spectral(), params="last").parameter_names == ["last.weight", "last.bias"]


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", "sum"])
@pytest.mark.parametrize(
    "name",
    grid(
        ("lenet", "mobilenet", "vit-mha", "bert-eager", "tied-embedding", "plain-arithmetic"),
        ("lenet", "plain-arithmetic"),
    ),
)
@pytest.mark.thinned(3)
def test_every_memory_budget_gives_the_same_kernel_or_a_clear_refusal(name: str, outputs: Any) -> None:
    expected = case(name)
    left, right = [i % 4 for i in range(13)], [i % 3 for i in range(10)]
    x1, x2 = rows(expected.x1, left), rows(expected.x2, right)
    lin, done = linearize(name), 0
    with pytest.raises(linnet.errors.MemoryBudgetError, match="kernel"):
        lin.kernel(x1, x2, form=outputs, memory=100)
    budgets = [2**power for power in range(8, 25)]
    for budget in budgets:
        try:
            pair, square = (lin.kernel(x1, other, form=outputs, memory=budget) for other in (x2, None))
        except linnet.errors.MemoryBudgetError:
            assert done == 0, "a larger budget was refused after a smaller one was enough"
            continue
        done += 1
        assert_near(pair, kernel_oracle(expected.j1[left], expected.j2[right], outputs))
        assert_near(square, kernel_oracle(expected.j1[left], form=outputs))
        assert torch.equal(
            square, square.permute(2, 3, 0, 1) if outputs == "full" else square.transpose(0, 1)
        )
    assert 2 <= done < len(budgets)


def test_random_networks_and_networks_that_mix_examples_are_found_by_the_preflight() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(x, 0.5, training=True))

    mixing = build(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    )
    for model in (build(Noisy), mixing):
        found = linnet.preflight(model, real(6, 4))
        assert not found.ok
        assert found.findings
    assert linnet.preflight(build(Detached), real(6, 4)).ok
