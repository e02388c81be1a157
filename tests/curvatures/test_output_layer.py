"""The layer whose result is the output: sums over Λ against the dense Jacobian and against columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.curvatures import accumulate, engine
from linnet.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from linnet.linalg.kronecker import KroneckerEigen
from tests.curvatures.side_by_side import curvature_of
from tests.oracles.dense import jacobian_oracle
from tests.zoo import assert_near

STRUCTURES = ["kfac", "ekfac", "diagonal", "block", "full"]
LABELS: dict[str, tuple[Any, Tensor]] = {
    "categorical": (Categorical(), torch.tensor([0, 3, 1, 2, 2, 0, 1, 3, 3])),
    "ignored": (Categorical(), torch.tensor([0, -100, 1, 2, -100, 0, 1, 3, 3])),
    "soft": (
        Categorical(),
        torch.rand(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    ),
    "bernoulli": (Bernoulli(), (torch.arange(36).reshape(9, 4) % 3 == 0).double()),
    "poisson": (Poisson(), (torch.arange(36).reshape(9, 4) % 5).double()),
    "gaussian": (Gaussian(variance=0.7), torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(9, 4)),
    "missing": (
        Gaussian(variance=0.7, masked=True),
        torch.where(torch.arange(36).reshape(9, 4) % 7 == 0, torch.nan, 0.3).double(),
    ),
}


class Headed(nn.Module):
    """A network with a linear layer at its end, and what a test puts after it."""

    def __init__(self, outputs: int = 4, bias: bool = True, after: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Linear(5, outputs, bias=bias)
        self.after = after
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.head(self.body(x))
        return f if self.after is None else self.after(f)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def normal(y: Any) -> Any:
    """Soft labels that sum to one; others as they are."""
    return y / y.sum(1, keepdim=True) if y.is_floating_point() and float(y.min()) > 0 and y.max() < 1 else y


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of examples of the batches that are added without columns."""
    sizes: list[int] = []
    original = accumulate.add_output_layer

    def noting(sums: Any, own: Any) -> None:
        sizes.append(len(own.f))
        original(sums, own)

    monkeypatch.setattr(accumulate, "add_output_layer", noting)
    return sizes


def by_columns(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Tensor:
    """The same curvature by the columns of Λ, dense."""
    with monkeypatch.context() as patch:
        for module in (accumulate, engine):
            patch.setattr(module, "has_closed_form", lambda *_: False)
        found: Tensor = curvature_of(*args, **options).dense()
        return found


def head_jacobian(model: Headed, x: Tensor) -> Tensor:
    """J of the head's parameters, the last of all, (N, K, p)."""
    size = sum(p.numel() for p in model.head.parameters())
    return jacobian_oracle(model, x)[..., -size:]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", list(LABELS))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.thinned(6)
def test_sums_over_lambda(structure: str, case: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (likelihood, y), x, model = LABELS[case], inputs(9, 3), Headed(bias=bias)
    y = normal(y)
    options: dict[str, Any] = {"structure": structure, "params": "last-layer", "block": 4}
    expected = by_columns(monkeypatch, model, (x, y), likelihood, **options)
    sizes = watched(monkeypatch)
    monkeypatch.setattr(accumulate, "FORMED", 40)
    monkeypatch.setattr("linnet.likelihoods.likelihood.FORMED", 40)
    found = curvature_of(model, (x, y), likelihood, **options)
    assert sizes == [4, 4, 1] * (2 if structure == "ekfac" else 1)
    assert_near(found.dense(), expected)
    j = head_jacobian(model, x)
    curved = likelihood.hessian(model(x).detach(), likelihood.check(model(x).detach(), y))[:, 0]
    exact = torch.einsum("nkp,nkl,nlq->pq", j, curved, j)
    if structure in ("block", "full"):
        assert_near(found.dense(), exact)
        assert torch.equal(found.parts[0].operator.dense(), found.parts[0].operator.dense().mT)
    if structure == "diagonal":
        assert_near(found.diagonal(), exact.diagonal())
    if structure == "ekfac":
        own = found.parts[0].operator
        assert isinstance(own, KroneckerEigen)
        assert_near(own.trace(), exact.trace())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.thinned(3)
def test_positions_are_examples_of_their_own(
    structure: str, sharing: str, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences (N, T, C), the class axis last; reduced factors take columns."""
    likelihood, x, model = Categorical(axis=-1), inputs(6, 2, 3), Headed()
    y = torch.arange(12).reshape(6, 2) % 4
    y = y.masked_fill(torch.arange(12).reshape(6, 2) % 5 == 1, -100) if ignored else y
    options: dict[str, Any] = {"structure": structure, "params": "last-layer", "sharing": sharing}
    expected = by_columns(monkeypatch, model, (x, y), likelihood, **options)
    sizes = watched(monkeypatch)
    found = curvature_of(model, (x, y), likelihood, **options)
    # the second pass of ekfac sums exact squares, whatever its basis
    assert bool(sizes) == (sharing == "expand" or structure != "kfac")
    assert_near(found.dense(), expected)


@pytest.mark.parametrize(
    ("after", "options"),
    [
        (torch.tanh, {}),
        (lambda f: f + 1, {}),
        (lambda f: f.flip(1), {}),
        (lambda f: f[:, :3], {}),
        (None, {"expectation": "mc"}),
        (None, {"params": "all"}),
        (None, {"params": ["head.bias"]}),
        (None, {"likelihood": HeteroscedasticGaussian()}),
    ],
)
def test_what_is_not_the_output_takes_columns(
    after: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    likelihood, model, x = options.pop("likelihood", Categorical()), Headed(after=after), inputs(9, 3)
    canonical = likelihood.canonical
    y = torch.arange(9) % 3 if canonical else model(x).detach()[:, :2]
    options = {"structure": "block", "params": "last-layer"} | options
    options["params"] = None if options["params"] == "all" else options["params"]
    expected = by_columns(monkeypatch, model, (x, y), likelihood, **options)
    sizes = watched(monkeypatch)
    assert_near(curvature_of(model, (x, y), likelihood, **options).dense(), expected)
    assert not sizes


def test_tied_heads_take_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Headed):
        """The head's weight is read in the body as well."""

        def forward(self, x: Tensor) -> Tensor:
            inner = self.body(x)
            f: Tensor = self.head(inner + torch.tanh(inner @ self.head.weight.T @ self.head.weight))
            return f

    model, x, y = Twice(), inputs(9, 3), torch.arange(9) % 4
    sizes = watched(monkeypatch)
    found = curvature_of(model, (x, y), Categorical(), "block", params=["head.weight", "head.bias"])
    assert not sizes
    j = head_jacobian(model, x)
    curved = Categorical().hessian(model(x).detach())[:, 0]
    exact = torch.einsum("nkp,nkl,nlq->pq", j, curved, j)
    weights = found.parts[0].operator.dense()
    assert_near(weights, exact[: len(weights), : len(weights)])


def test_a_batch_that_leaves_by_another_way_takes_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of later batches pass through something else, which is the identity in value."""

    class Changing(Headed):
        """Something follows the head where an input is large."""

        def forward(self, x: Tensor) -> Tensor:
            f: Tensor = self.head(self.body(x))
            return 1 * f if bool((x > 10).any()) else f

    model, x, y = Changing(), inputs(12, 3), torch.arange(12) % 4
    x[6, 0] = 11
    options: dict[str, Any] = {"structure": "diagonal", "params": "last-layer"}
    sizes = watched(monkeypatch)
    monkeypatch.setattr(engine, "DEFAULT_BLOCK", 6)
    found = curvature_of(model, (x, y), Categorical(), **options)
    assert sizes == [6]
    halves = [
        by_columns(monkeypatch, model, (part, labels), Categorical(), **options)
        for part, labels in zip(x.split(6), y.split(6), strict=True)
    ]
    assert_near(found.dense(), sum(halves))


def test_no_columns_are_formed_of_a_thousand_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of N C² numbers, and no backward pass."""
    model, x, y = Headed(1000).float(), inputs(40, 3).float(), torch.arange(40)
    largest: list[int] = []
    original = accumulate.forward_trace

    def noting(*args: Any) -> Any:
        largest.append(len(args[1]))
        return original(*args)

    monkeypatch.setattr(accumulate, "forward_trace", noting)
    monkeypatch.setattr(accumulate, "capture_parts", lambda *_: pytest.fail("columns"))
    found = curvature_of(model, (x, y), Categorical(), "kfac", params="last-layer")
    assert largest == [40]
    p = model(x).detach().double().softmax(1)
    assert_near(found.parts[0].operator.left.double(), p.sum(0).diag() - p.mT @ p, 1e-5)


@pytest.mark.parametrize("case", list(LABELS))
def test_lambda_summed_and_its_diagonal(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, y = LABELS[case]
    f = inputs(9, 4)
    f[0] *= 1e3  # certain outputs
    f = f if case != "poisson" else f / 1e3
    y = likelihood.check(f, normal(y))
    each = likelihood.hessian(f, y)
    monkeypatch.setattr("linnet.likelihoods.likelihood.FORMED", 40)
    assert_near(likelihood.hessian_sum(f, y), each.sum((0, 1)))
    assert_near(likelihood.hessian_diagonal(f, y), each[:, 0].diagonal(dim1=1, dim2=2))
    two = HeteroscedasticGaussian(psd="clip")
    f = inputs(9, 4)
    each = two.hessian(f, f[:, :2])
    assert_near(two.hessian_sum(f, f[:, :2]), each.sum((0, 1)))
    assert_near(two.hessian_diagonal(f, f[:, :2]), each[:, 0].diagonal(dim1=1, dim2=2))
