"""One rule per kind of use, each against autograd one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor, nn

from linnet.tangent import features
from linnet.tangent.capture import capture
from linnet.tangent.functional import Functional
from linnet.tangent.gram import gram
from linnet.tangent.rules import PLAIN, Layout, factors, find_layout, fits, outer_rows, patches, use_rows
from tests.fitting.problems import near, real
from tests.oracles.dense import jacobian_oracle


class Net(nn.Module):
    """One parameter, read in one way, between smooth layers without parameters."""

    def __init__(self, shape: tuple[int, ...], body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(real(*shape, seed=7))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.body(x, self.w)).flatten(1)[:, :5]


Spec = tuple[str, tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]
SPECS: dict[str, Spec] = {
    "linear": ("linear", (4, 3), (3,), lambda x, w: F.linear(x, w)),
    "linear over positions": ("linear", (4, 3), (6, 3), lambda x, w: F.linear(x, w)),
    "linear, examples second": (
        "linear",
        (4, 3),
        (6, 3),
        lambda x, w: F.linear(x.transpose(0, 1), w).transpose(0, 1),
    ),
    "linear, merged axes": (
        "linear",
        (4, 3),
        (6, 3),
        lambda x, w: F.linear(x.flatten(0, 1), w).unflatten(0, (-1, 6)),
    ),
    "linear, merged inside": (
        "linear",
        (4, 3),
        (6, 3),
        lambda x, w: F.linear(x.transpose(0, 1).flatten(0, 1), w).unflatten(0, (6, -1)).transpose(0, 1),
    ),
    "matmul": ("linear", (3, 4), (3,), lambda x, w: x @ w),
    "matmul from the left": ("linear", (4, 6), (6, 3), lambda x, w: w @ x),
    "transposed by hand": ("linear", (4, 3), (3,), lambda x, w: x @ w.t()),
    "einsum": ("linear", (4, 3), (6, 3), lambda x, w: torch.einsum("...i,oi->...o", x, w)),
    "einsum, weight first": ("linear", (3, 4), (6, 3), lambda x, w: torch.einsum("io, nsi -> nso", [w, x])),
    "einsum, axes in another order": (
        "linear",
        (4, 3),
        (6, 3, 2),
        lambda x, w: torch.einsum("nsia,oi->anso", x, w).transpose(0, 1),
    ),
    "einsum, numbered axes": (
        "linear",
        (3, 4),
        (3,),
        lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]),
    ),
    "conv1d": ("conv", (4, 2, 3), (2, 9), lambda x, w: F.conv1d(x, w, stride=2, padding=1)),
    "conv2d": ("conv", (4, 2, 3, 3), (2, 6, 5), lambda x, w: F.conv2d(x, w, padding=(1, 0))),
    "conv2d, dilated": (
        "conv",
        (4, 2, 2, 3),
        (2, 7, 7),
        lambda x, w: F.conv2d(x, w, dilation=(2, 3), stride=(1, 2)),
    ),
    "conv2d, grouped": ("conv", (4, 1, 3, 3), (2, 5, 5), lambda x, w: F.conv2d(x, w, groups=2)),
    "conv2d, depthwise": (
        "conv",
        (3, 1, 2, 2),
        (3, 4, 4),
        lambda x, w: F.conv2d(x, w, groups=3, padding="same"),
    ),
    "conv2d, even kernel kept in size": (
        "conv",
        (4, 2, 2, 4),
        (2, 5, 5),
        lambda x, w: F.conv2d(x, w, padding="same"),
    ),
    "conv3d": ("conv", (2, 1, 2, 2, 2), (1, 3, 4, 3), lambda x, w: F.conv3d(x, w, padding=1)),
    "transposed conv1d": (
        "conv-transposed",
        (2, 3, 4),
        (2, 5),
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1),
    ),
    "transposed conv2d": ("conv-transposed", (2, 3, 3, 2), (2, 4, 3), lambda x, w: F.conv_transpose2d(x, w)),
    "transposed conv2d, grouped": (
        "conv-transposed",
        (4, 3, 3, 3),
        (4, 3, 4),
        lambda x, w: F.conv_transpose2d(x, w, None, 2, (1, 0), (1, 0), 2),
    ),
    "transposed conv2d, depthwise": (
        "conv-transposed",
        (3, 1, 2, 2),
        (3, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, stride=(2, 3), groups=3),
    ),
    "transposed conv2d, dilated, with rows that nothing reaches": (
        "conv-transposed",
        (2, 2, 2, 2),
        (2, 3, 3),
        lambda x, w: F.conv_transpose2d(
            x, w, dilation=(3, 2), stride=1, padding=(1, 0), output_padding=(2, 1)
        ),
    ),
    "transposed conv2d, kernel smaller than the stride": (
        "conv-transposed",
        (2, 3, 1, 1),
        (2, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, stride=3, output_padding=2),
    ),
    "transposed conv3d": (
        "conv-transposed",
        (2, 1, 2, 2, 2),
        (2, 2, 3, 2),
        lambda x, w: F.conv_transpose3d(x, w, stride=(1, 2, 1), padding=1),
    ),
    "transposed conv over frames": (
        "conv-transposed",
        (1, 2, 2, 2),
        (3, 1, 3, 3),
        lambda x, w: F.conv_transpose2d(x.flatten(0, 1), w).unflatten(0, (-1, 3)).sum(1),
    ),
    "conv over frames": (
        "conv",
        (2, 1, 2, 2),
        (3, 1, 4, 4),
        lambda x, w: F.conv2d(x.flatten(0, 1), w).unflatten(0, (-1, 3)).sum(1),
    ),
    "scale": ("scale", (3,), (4, 3), lambda x, w: x * w),
    "scale of channels": ("scale", (3, 1, 1), (3, 2, 2), lambda x, w: w * x),
    "scale by one number": ("scale", (), (4,), lambda x, w: x * w),
    "layer norm": ("scale", (3,), (4, 3), lambda x, w: F.layer_norm(x, (3,), w)),
    "rms norm": ("scale", (3,), (4, 3), lambda x, w: F.rms_norm(x, (3,), w)),
    "group norm": ("scale", (4,), (4, 3), lambda x, w: F.group_norm(x, 2, w)),
    "batch norm": (
        "scale",
        (4,),
        (4, 3),
        lambda x, w: F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double(), w),
    ),
    "shift": ("shift", (3,), (4, 3), lambda x, w: x + w),
    "shift, subtracted": ("shift", (3,), (4, 3), lambda x, w: w - x),
    "shift, taken away": ("shift", (3,), (4, 3), lambda x, w: x - w),
    "shift of positions": ("shift", (4, 1), (4, 3), lambda x, w: x + w),
    "shift of channels": (
        "shift",
        (4,),
        (2, 5, 5),
        lambda x, w: F.conv2d(x, torch.ones(4, 2, 2, 2).double(), w),
    ),
    "shift of channels after a transposed conv": (
        "shift",
        (3,),
        (2, 3, 3),
        lambda x, w: F.conv_transpose2d(x, torch.ones(2, 3, 2, 2).double(), w, stride=3),
    ),
    "shift in addmm": ("shift", (2,), (3,), lambda x, w: torch.addmm(w, x, torch.ones(3, 2).double())),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's own, once
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.thinned(3)
def test_gradients_of_every_example(name: str, n: int) -> None:
    kind, shape, inputs, body = SPECS[name]
    model, x = Net(shape, body), real(n, *inputs, seed=3)
    captured = capture(Functional(model), x)
    assert captured.exact == {}, "no rule was found for it"
    (use,) = captured.uses
    assert use.kind == kind
    expected = jacobian_oracle(model, x).unflatten(2, shape) if shape else jacobian_oracle(model, x)[:, :, 0]
    near(captured.rows("w"), expected)
    near(use_rows(use, n).reshape(expected.shape), expected)


class Table(nn.Module):
    """An embedding, with or without a padding row."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, padding_idx=padding_idx).double()

    def forward(self, ids: Tensor) -> Tensor:
        return torch.sin(self.table(ids)).sum(1)


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_embedding(padding_idx: int | None) -> None:
    model = Table(padding_idx)
    ids = torch.tensor([[0, 1, 1], [5, 2, 0], [3, 3, 3]])
    captured = capture(Functional(model), ids)
    (use,) = captured.uses
    assert use.kind == "embedding"
    near(captured.rows("table.weight"), jacobian_oracle(model, ids).unflatten(2, (6, 3)))
    found = factors(use, 3)
    assert found.is_embedding
    near(outer_rows(found, torch.Size((6, 3))), captured.rows("table.weight"), 1e-14)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (3, 2, 2)])
def test_patches_are_those_of_unfold(padding: int, stride: int, dilation: int, groups: int) -> None:
    x = real(2, 4, 9, 8)
    options = {
        "groups": groups,
        "stride": (stride, stride),
        "dilation": (dilation, dilation),
        "padding": [(padding, padding)] * 2,
    }
    expected = F.unfold(x, (3, 2), dilation, padding, stride).unflatten(1, (groups, -1))
    assert torch.equal(patches(x, torch.Size((3, 2)), options), expected)


def test_one_parameter_read_twice_sums_its_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(real(3, 3, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.w) @ self.w.t() + x * self.w[0]

    model, x = Twice(), real(4, 3)
    captured = capture(Functional(model), x)
    near(captured.rows("w"), jacobian_oracle(model, x).unflatten(2, (3, 3)))
    assert len(captured.uses) == 3
    assert [use.direct for use in captured.uses] == [True, True, False]


class Autoencoder(nn.Module):
    """One kernel for a convolution and for the transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(real(3, 2, 3, 3, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.conv2d(x, self.w, stride=2, padding=1))
        again = F.conv_transpose2d(hidden, self.w, stride=2, padding=1, output_padding=1)
        return torch.sin(again).flatten(2).mean(2)


class TwoGroupings(nn.Module):
    """One kernel for convolutions with two and with four groups."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(real(4, 1, 3, 3, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.conv2d(x, self.w, groups=2))
        return torch.sin(F.conv2d(hidden, self.w, groups=4)).flatten(2).mean(2)


@pytest.mark.parametrize("build", [Autoencoder, TwoGroupings])
def test_one_kernel_of_two_kinds_of_convolution(build: Callable[[], nn.Module]) -> None:
    model, x = build(), real(4, 2, 6, 6)
    function = Functional(model)
    captured = capture(function, x)
    assert len(captured.uses) == 2
    j = jacobian_oracle(model, x)
    near(captured.rows("w").flatten(2), j)
    near(gram(function, x), torch.einsum("ncp,mdp->ncmd", j, j))


@pytest.mark.parametrize(("stride", "length"), [(1, 3), (2, 2)])
def test_a_bias_does_not_ride_with_a_transposed_convolution(
    stride: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are not those of the weight with a = 1: some pixels are reached by no position."""
    monkeypatch.setattr(features, "_pays", lambda *_: True)
    model = nn.Sequential(
        nn.ConvTranspose1d(8, 6, 1, stride), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
    ).double()
    function, x = Functional(model), real(3, 8, length)
    found = features.outline(capture(function, x), function.names, (3, 3), "full")
    treatment = found.treatment(found.cheapest)
    assert set(treatment.factored) == {"0.weight", "3.weight"}
    assert treatment.riding == {"3.bias": "3.weight"}
    j = jacobian_oracle(model, x)
    near(gram(function, x), torch.einsum("ncp,mdp->ncmd", j, j))


UNRULED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "power": lambda x, w: x ** w.exp()[:3],
    "division": lambda x, w: x / (2 + w[:3].sin()),
    "both sides": lambda x, w: (x @ w[:3, None]) * w[0],
    "maximum": lambda x, w: torch.maximum(x, w[:3]),
    "einsum": lambda x, w: torch.einsum("ij,j->i", x, w[:3])[:, None],
}


EINSUMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "outputs not last": ((4, 3), (5, 3), lambda x, w: torch.einsum("nsi,oi->nos", x, w)),
    "diagonal": ((3, 3), (5, 3), lambda x, w: torch.einsum("nsd,dd->nsd", x, w)),
    "weight summed": ((4, 3), (5, 3), lambda x, w: torch.einsum("nsi,oi->ns", x, w)),
    "data summed": ((4, 3), (5, 3), lambda x, w: torch.einsum("nsi,oi->no", x, w)),
    "trace of the data": ((4, 3), (5, 5, 3), lambda x, w: torch.einsum("nssi,oi->no", x, w)),
    "scale": ((3, 4), (5, 3), lambda x, w: torch.einsum("nsi,io->nsio", x, w)),
    "matrices": ((2, 3, 4), (2, 3), lambda x, w: torch.einsum("nri,rio->nro", x, w)),
    "no arrow": ((3, 4), (3,), lambda x, w: torch.einsum("ni,io", x, w)),
    "three operands": ((3, 4), (3,), lambda x, w: torch.einsum("ni,io,op->np", x, w, w.mT)),
    "stretched axis": ((4, 1), (5, 3), lambda x, w: torch.einsum("nsi,oi->nso", x, w)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_other_einsums_are_exact_without_a_rule(name: str) -> None:
    shape, inputs, body = EINSUMS[name]
    model, x = Net(shape, body), real(4, *inputs)
    captured = capture(Functional(model), x)
    assert set(captured.exact) == {"w"}
    near(captured.rows("w").flatten(2), jacobian_oracle(model, x))


@pytest.mark.parametrize("name", UNRULED)
def test_what_no_rule_covers_is_exact_all_the_same(name: str) -> None:
    model, x = Net((3,), UNRULED[name]), real(4, 3).abs() + 0.1
    captured = capture(Functional(model), x)
    near(captured.rows("w"), jacobian_oracle(model, x))


@pytest.mark.parametrize("cotangents", ["sum", "given"])
def test_other_cotangents(cotangents: str) -> None:
    model, x = Net((4, 3), SPECS["linear"][3]), real(3, 3)
    j = jacobian_oracle(model, x)
    u: Any = real(2, 3, 4) if cotangents == "given" else "sum"
    captured = capture(Functional(model), x, u)
    weights = u if cotangents == "given" else torch.ones(1, 3, 4, dtype=torch.float64)
    near(captured.rows("w").flatten(2), torch.einsum("knc,ncp->nkp", weights, j))
    assert captured.k == weights.shape[0]


def test_an_example_whose_units_are_all_dead_does_not_unsettle_the_plan() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        net[0].bias.zero_()
    x = torch.tensor([[-1.0, -1.0], [1.0, 2.0], [0.5, 0.1], [2.0, 1.0]], dtype=torch.float64)
    function = Functional(net)
    captured = capture(function, x)  # the first of three probes has no gradient in the first layer
    assert not captured.exact
    near(captured.rows("0.weight").flatten(2), jacobian_oracle(net, x, ["0.weight"]))


class Routed(nn.Module):
    """Two experts; the data say which tokens go to which."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = flat[:, 0] > 0
        h = flat.new_zeros(len(flat), 4)
        for expert, chosen in zip(self.experts, (first, ~first), strict=True):
            h = h.index_put((chosen.nonzero()[:, 0],), expert(flat[chosen]))
        return self.head(torch.tanh(h.view(len(x), -1, 4)).mean(1))


class Sorted(nn.Module):
    """Works on its batch in the order of the data, and puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        h = torch.tanh(self.body(x[order]))
        return self.head(h[order.argsort()])


@pytest.mark.parametrize(("build", "shape"), [(Routed, (6, 5, 3)), (Sorted, (7, 3))])
def test_rows_that_the_data_move_are_found(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, function = build().double(), None
    function = Functional(net)
    x = real(*shape, seed=3)
    if build is Sorted:
        x = x[x[:, 0].argsort()]  # in order, the probes show nothing
        capture(function, x)
        x = x.flip(0)
    captured = capture(function, x)
    rows = torch.cat([captured.rows(name).flatten(2) for name in function.names], 2)
    near(rows, jacobian_oracle(net, x))


def place(t: Tensor, layout: Layout) -> Tensor:
    """(N, m, *rest) put where the layout says: the examples on its axis, m merged with them."""
    parts = t if layout.outer else t.transpose(0, 1)
    return parts.flatten(0, 1).movedim(0, layout.axis)


@given(
    n=st.integers(1, 4), m=st.integers(1, 3), rest=st.lists(st.integers(1, 3), max_size=3),
    axis=st.integers(0, 3), outer=st.booleans(), skip=st.integers(0, 2),
)  # fmt: skip
def test_examples_first_undoes_the_placing(
    n: int, m: int, rest: list[int], axis: int, outer: bool, skip: int
) -> None:
    layout = Layout(min(axis, len(rest)), outer)
    leading = [2, 3][:skip]
    t = real(*leading, n, m, *rest)
    placed = torch.stack([place(part, layout) for part in t.reshape(-1, n, m, *rest)])
    placed = placed.reshape(*leading, *placed.shape[1:])
    assert torch.equal(layout.examples_first(placed, n, skip), t)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("m", [1, 2])
def test_the_layout_is_found_by_its_gradients(axis: int, outer: bool, m: int) -> None:
    """Gradients of example i alone are zero but in i's own part."""
    n, layout = 3, Layout(axis, outer)
    own = real(n, m, 6, 3)
    causes = [place(own * (torch.arange(n) == i)[:, None, None, None], layout) for i in range(n)]
    found = find_layout(torch.stack(causes), range(3), n)
    assert found is not None
    assert found.axis == axis
    assert found.outer == outer or m == 1  # nothing merged: both say the same


def test_mixed_examples_have_no_layout() -> None:
    assert find_layout(torch.ones(3, 6, 3), range(2), 3) is None


def test_axes_that_cannot_hold_the_examples() -> None:
    assert find_layout(real(3, 4, 5), range(2), 3) is None
    assert fits(Size([4, 6]), 1, 3)
    assert not fits(Size([4, 6]), 0, 3)
    assert not fits(Size([4, 6]), 2, 2)
    assert not fits(Size([0]), 0, 3)


def test_only_candidates_are_considered() -> None:
    gradients = torch.eye(3)[:, None, :].expand(3, 3, 3)  # the examples are on the second axis
    assert find_layout(gradients, [1], 3) == Layout(1)
    assert find_layout(gradients, [0], 3) is None
    assert Layout() == PLAIN
