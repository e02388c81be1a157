"""Every likelihood against torch's distributions and autograd, in float64."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as D

from linnet.errors import InputError, NumericalError
from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_description,
)
from tests.curvatures.likelihood_cases import (
    CANONICAL,
    CASES,
    INDEFINITE,
    SHAPES,
    arranged,
    blocks,
    flat_labels,
    joined,
)

close = torch.testing.assert_close
CLIPPED = {
    "log-variance": replace(
        CASES["log-variance"], make=lambda **kw: HeteroscedasticGaussian(psd="clip", masked=True, **kw)
    ),
}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def reference(name: str, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """−log p summed over positions, by torch.distributions."""
    rows = arranged(likelihood, f)
    each = -CASES[name].log_prob(rows.flatten(0, 1), flat_labels(likelihood, f, y))
    return each.reshape(rows.shape[:2]).sum(1)


def with_missing(name: str, y: Tensor) -> Tensor:
    """Labels, some of them missing."""
    hidden = y.clone()
    hidden.view(-1)[::3] = CASES[name].missing
    return hidden


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_nll_gradient_and_hessian_are_those_of_the_density(
    name: str, shape: tuple[int, ...], axis: int
) -> None:
    likelihood, f, y = CASES[name].problem(shape, axis)
    f.requires_grad_()
    expected = reference(name, likelihood, f, y)
    close(likelihood.nll(f, y), expected, **EXACT)
    (slope,) = torch.autograd.grad(expected.sum(), f, create_graph=True)
    close(likelihood.gradient(f, y), slope, **EXACT)

    matrix = joined(likelihood.hessian(f, y))
    rows = arranged(likelihood, slope).flatten(1)
    for i in range(rows.shape[1]):
        second = torch.zeros_like(f)
        if rows.requires_grad:
            (second,) = torch.autograd.grad(
                rows[:, i].sum(), f, retain_graph=True, materialize_grads=True, allow_unused=True
            )
        close(matrix[:, i], arranged(likelihood, second).flatten(1), **EXACT)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_product_multiplies_by_the_hessian(name: str, shape: tuple[int, ...], axis: int) -> None:
    likelihood, f, y = CASES[name].problem(shape, axis)
    v = torch.randn(2, 3, *f.shape, dtype=f.dtype)
    matrix = likelihood.hessian(f, y)
    product = likelihood.product(f, v, y)
    assert product.shape == v.shape
    for i, j in ((0, 0), (1, 2)):
        expected = torch.einsum("ntij,ntj->nti", matrix, arranged(likelihood, v[i, j]))
        close(arranged(likelihood, product[i, j]), expected, **EXACT)
    assert likelihood.product(f, v[:0, 0], y).shape == (0, *f.shape)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", [*CANONICAL, *CLIPPED])
def test_root_squares_to_the_hessian(name: str, shape: tuple[int, ...], axis: int) -> None:
    likelihood, f, y = CLIPPED.get(name, CASES[name]).problem(shape, axis)
    root, matrix = likelihood.root(f, y), likelihood.hessian(f, y)
    own = likelihood.position_root(f, y)
    assert root.shape == (matrix.shape[1] * own.shape[-1], *f.shape)
    close(blocks(likelihood, root), joined(matrix), **EXACT)
    close(own @ own.mT, matrix, **EXACT)
    # column t R + r is the r-th of position t
    last = arranged(likelihood, root[-1])
    close(last[:, -1], own[:, -1, :, -1], rtol=0, atol=0)
    assert not last[:, :-1].any()


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", [*CANONICAL, *CLIPPED])
def test_columns_of_the_root_by_themselves(name: str, shape: tuple[int, ...], axis: int) -> None:
    """To the bit those of the whole root, also across positions, where their number is known."""
    likelihood, f, y = CLIPPED.get(name, CASES[name]).problem(shape, axis)
    size, root = likelihood._root_size(f), likelihood.root(f, y)
    if not isinstance(likelihood, Bernoulli | Categorical | Gaussian | Poisson):
        assert size is None
        return
    assert size == len(root)
    for part in (1, 2, 5, size):
        found = [likelihood._root_part(f, i, min(i + part, size), y) for i in range(0, size, part)]
        assert torch.equal(torch.cat(found), root)


@pytest.mark.parametrize("name", CANONICAL)
def test_fisher_of_a_canonical_likelihood_is_its_hessian(name: str) -> None:
    likelihood, f, y = CASES[name].problem((2, 3, 0), -1)
    assert likelihood.canonical
    close(likelihood.fisher(f), likelihood.hessian(f, y), **EXACT)
    close(likelihood.hessian(f), likelihood.hessian(f, y), **EXACT)
    close(blocks(likelihood, likelihood.fisher_root(f)), joined(likelihood.fisher(f)), **EXACT)


@pytest.mark.parametrize("name", INDEFINITE)
def test_fisher_of_another_likelihood_is_not_its_hessian(name: str) -> None:
    likelihood, f, y = CASES[name].problem()
    assert not likelihood.canonical
    if name == "student":
        with pytest.raises(InputError, match="support="):
            likelihood.fisher(f)
        return
    assert float((likelihood.fisher(f) - likelihood.hessian(f, y)).abs().max()) > 0.1
    close(blocks(likelihood, likelihood.fisher_root(f)), joined(likelihood.fisher(f)), **EXACT)
    for method in (likelihood.hessian, likelihood.root):
        with pytest.raises(InputError, match="depends"):
            method(f)


def within_five_errors(samples: Tensor, expected: Tensor) -> None:
    """Means over the first axis within five standard errors of what they estimate."""
    error = samples.std(0) / len(samples) ** 0.5
    assert bool(((samples.mean(0) - expected).abs() <= 5 * error + 1e-12).all())


def outer(rows: Tensor) -> Tensor:
    """(n, N, T, C) to (n, N, T, C, C)."""
    return rows[..., :, None] * rows[..., None, :]


@pytest.mark.parametrize("name", [n for n in CASES if n != "student"])
def test_sampled_gradients_square_to_the_fisher_information(name: str) -> None:
    likelihood, f, _ = CASES[name].problem((2, 2, 0), -1)
    n = 4000
    columns = likelihood.sample_gradients(f, n, 0)
    assert columns.shape == (n, *f.shape)
    within_five_errors(outer(columns * n**0.5), likelihood.fisher(f))
    within_five_errors(columns, torch.zeros_like(f))


@pytest.mark.parametrize("name", [*CANONICAL, *CLIPPED])
def test_projections_square_to_the_hessian(name: str) -> None:
    likelihood, f, y = CLIPPED.get(name, CASES[name]).problem((2, 2, 0), -1)
    n = 4000
    columns = likelihood.project(f, n, 0, y)
    within_five_errors(outer(columns * n**0.5), likelihood.hessian(f, y))
    assert torch.equal(columns, likelihood.project(f, n, torch.Generator().manual_seed(0), y))


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_samples_are_labels_with_the_mean_and_variance(name: str, shape: tuple[int, ...], axis: int) -> None:
    likelihood, f, y = CASES[name].problem(shape, axis)
    drawn = likelihood.sample(f, 2000, 0)
    assert drawn.shape == (2000, *y.shape)
    assert likelihood.check(f, drawn[0]).shape == y.shape
    assert torch.equal(drawn[:3], likelihood.sample(f, 2000, 0)[:3])
    if name == "student":
        with pytest.raises(InputError, match="moments="):
            likelihood.mean(f)
        return
    mean, variance = likelihood.mean(f), likelihood.variance(f)
    values = drawn.to(f.dtype)
    if drawn.dtype == torch.int64 and isinstance(likelihood, Categorical):
        values = (
            torch.nn.functional.one_hot(drawn, mean.shape[axis]).movedim(-1, axis + (axis > 0)).to(f.dtype)
        )
    within_five_errors(values, mean)
    within_five_errors((values - mean) ** 2, variance)


@pytest.mark.parametrize("name", [n for n in CASES if n != "student"])
def test_kl_is_that_of_torch(name: str) -> None:
    likelihood, f, _ = CASES[name].problem((2, 3, 0), -1)
    g = CASES[name].outputs(torch.randn(f.shape, dtype=f.dtype))
    p, q = (CASES[name].density(arranged(likelihood, x)) for x in (f, g))
    if name == "mixture":
        p, q = D.Bernoulli(p.p), D.Bernoulli(q.p)
    expected = torch.distributions.kl_divergence(p, q).flatten(1).sum(1)
    close(likelihood.kl(f, g), expected, **EXACT)
    close(likelihood.kl(f, f), torch.zeros(2, dtype=f.dtype), **EXACT)


@pytest.mark.parametrize("name", [n for n in CASES if n != "student"])
def test_the_curvature_of_the_divergence_is_the_fisher_information(name: str) -> None:
    likelihood, f, _ = CASES[name].problem((2, 3, 0), -1)
    g = f.clone().requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.kl(f, g).sum(), g, create_graph=True)
    close(slope, torch.zeros_like(f), **EXACT)
    v = torch.randn_like(f)
    (second,) = torch.autograd.grad(slope, g, v)
    expected = torch.einsum("ntij,ntj->nti", likelihood.fisher(f), v)
    close(second, expected, **EXACT)
    # KL(f, f + εv) ≈ ε²/2 vᵀ F v
    step = 1e-4
    close(2 * likelihood.kl(f, f + step * v) / step**2, (v * expected).sum((1, 2)), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.missing is not None])
def test_missing_labels_contribute_nothing(name: str) -> None:
    case = CLIPPED.get(name, CASES[name])
    likelihood, f, y = case.problem((2, 3, 0), -1)
    hidden = with_missing(name, y)
    gone = hidden.isnan() if y.is_floating_point() and name != "bernoulli" else hidden == case.missing
    by_position = gone if y.ndim < f.ndim else gone.all(-1)
    mask = likelihood.mask(hidden)
    assert mask is not None
    assert torch.equal(mask, ~by_position.reshape(2, -1))
    assert likelihood.mask(y) is None
    # outputs that no longer matter
    doubled = torch.cat([gone, gone], -1) if name in ("natural", "log-variance") else gone
    silent = doubled if y.ndim == f.ndim else gone[..., None].expand(f.shape)

    full, kept = f.clone().requires_grad_(), likelihood.nll(f, hidden)
    (slope,) = torch.autograd.grad(likelihood.nll(full, hidden).sum(), full)
    close(likelihood.gradient(f, hidden), slope, **EXACT)
    assert not slope[silent].any()
    close(slope[~silent], likelihood.gradient(f, y)[~silent], **EXACT)
    assert bool(kept.isfinite().all())

    keep = (~silent).to(f.dtype)
    expected = likelihood.hessian(f, y) * keep[..., :, None] * keep[..., None, :]
    close(likelihood.hessian(f, hidden), expected, **EXACT)
    root = likelihood.root(f, hidden)
    close(blocks(likelihood, root), joined(expected), **EXACT)
    if likelihood._root_size(f) is not None:
        assert torch.equal(likelihood._root_part(f, 1, len(root), hidden), root[1:])
    v = torch.randn_like(f)
    close(likelihood.product(f, v, hidden), torch.einsum("ntij,ntj->nti", expected, v), **EXACT)
    drawn = (
        likelihood.project(f, 3, 0, hidden),
        likelihood.sample_gradients(f, 3, 0, hidden),
        likelihood.fisher_root(f, hidden),
    )
    for columns in drawn:
        assert not columns[:, silent].any()
        assert columns[:, ~silent].any()
    g = f + 0.01
    close(likelihood.kl(f, g, hidden), likelihood.kl(f, torch.where(silent, f, g)), **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_no_examples_have_no_curvature(name: str) -> None:
    likelihood, f, y = CLIPPED.get(name, CASES[name]).problem((2, 0), 1)
    f, y = f[:0], y[:0]
    assert likelihood.nll(f, y).shape == (0,)
    assert likelihood.gradient(f, y).shape == f.shape
    assert likelihood.root(f, y).shape[1:] == likelihood.project(f, 2, 0, y).shape[1:] == f.shape
    assert likelihood.sample(f, 2).shape == (2, *y.shape)


@pytest.mark.parametrize("name", CASES)
def test_positions_are_examples_of_their_own(name: str) -> None:
    likelihood, f, y = CASES[name].problem((2, 0, 3), 1)
    single = CASES[name].make(axis=1)
    for t in range(3):
        at = y[..., t]
        close(likelihood.gradient(f, y)[:, :, t], single.gradient(f[:, :, t], at), **EXACT)
        close(likelihood.hessian(f, y)[:, t], single.hessian(f[:, :, t], at)[:, 0], **EXACT)
    total = sum(single.nll(f[:, :, t], y[..., t]) for t in range(3))
    close(likelihood.nll(f, y), total, **EXACT)


@pytest.mark.parametrize("family", [Gaussian, Bernoulli, Poisson])
def test_outputs_without_a_class_axis_are_of_one_component(family: type[Likelihood]) -> None:
    likelihood, f, y = family(), torch.randn(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert likelihood.gradient(f, y).shape == likelihood.mean(f).shape == (4,)
    assert likelihood.root(f, y).shape == (1, 4)
    assert likelihood.sample(f, 2).shape == (2, 4)
    close(likelihood.nll(f, y), likelihood.nll(f[:, None], y[:, None]))


def test_soft_labels_are_expectations_over_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64).softmax(1)
    likelihood = Categorical()
    each = [torch.full((3, 2), c) for c in range(4)]
    nll = sum(
        (y[:, c] * -D.Categorical(logits=f.movedim(1, -1)).log_prob(label)).sum(1)
        for c, label in enumerate(each)
    )
    close(likelihood.nll(f, y), nll, **EXACT)
    close(likelihood.gradient(f, y), f.softmax(1) - y, **EXACT)
    close(likelihood.hessian(f, y), likelihood.hessian(f), **EXACT)
    assert likelihood.mask(y) is None
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    g = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    mean = (Bernoulli().nll(g, half * 0) + Bernoulli().nll(g, half * 2)) / 2
    close(Bernoulli().nll(g, half), mean, **EXACT)


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_categorical_is_finite_and_accurate_at_any_logits(
    logits: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    f = torch.tensor([logits], dtype=dtype)
    y = torch.tensor([data.draw(st.integers(0, len(logits) - 1))])
    likelihood, eps = Categorical(), torch.finfo(dtype).eps
    root = likelihood.root(f)
    assert root.shape == (len(logits) - 1, *f.shape)
    exact = Categorical().hessian(f.double())[0, 0]
    for matrix in (blocks(likelihood, root)[0], likelihood.hessian(f)[0, 0]):
        close(matrix.double(), exact, rtol=0, atol=20 * eps)
    v = torch.linspace(-1, 1, len(logits), dtype=dtype)[None]
    close(likelihood.product(f, v)[0].double(), exact @ v[0].double(), rtol=0, atol=20 * eps)
    nll = likelihood.nll(f, y)
    assert float(nll) >= 0
    close(nll.double(), -f.double().log_softmax(1)[0, y], rtol=10 * eps, atol=10 * eps)
    for value in (
        likelihood.gradient(f, y),
        likelihood.project(f, 2, 0),
        likelihood.sample_gradients(f, 2, 0),
        likelihood.kl(f, f.flip(1)),
        likelihood.predictive(f, f.abs()),
    ):
        assert bool(value.isfinite().all())  # type: ignore[union-attr]


def test_categorical_keeps_its_relative_accuracy_where_a_class_is_nearly_certain() -> None:
    f = torch.tensor([[0.0, 25.0, -3.0, 2.0]])
    exact = Categorical().hessian(f.double())[0, 0]
    assert float(exact.diagonal().max()) < 1e-9  # far less than float32 resolves beside one
    likelihood = Categorical()
    scale = exact.diagonal().sqrt()
    for matrix in (likelihood.hessian(f)[0, 0], blocks(likelihood, likelihood.root(f))[0]):
        relative = (matrix.double() - exact) / scale / scale[:, None]
        assert float(relative.abs().max()) < 1e-5
    v = torch.tensor([[1.0, 2.0, -1.0, 3.0]])
    close(likelihood.product(f, v)[0].double(), exact @ v[0].double(), rtol=1e-5, atol=0)
    slope = f.double().softmax(1) - torch.tensor([0.0, 1.0, 0.0, 0.0])
    close(likelihood.gradient(f, torch.tensor([1])).double(), slope, rtol=1e-5, atol=0)


def test_a_class_ruled_out_by_an_infinite_logit_has_no_curvature() -> None:
    f = torch.tensor([[0.5, -math.inf, 1.0, -math.inf]], dtype=torch.float64)
    rest, likelihood = f[:, [0, 2]], Categorical()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[::2, ::2] = likelihood.hessian(rest)[0, 0]
    close(likelihood.hessian(f)[0, 0], expected, **EXACT)
    close(blocks(likelihood, likelihood.root(f))[0], expected, **EXACT)
    close(
        likelihood.kl(f, f + torch.tensor([0.0, 0.0, 1.0, 0.0])),
        likelihood.kl(rest, rest + torch.tensor([0.0, 1.0])),
    )
    assert set(likelihood.sample(f, 200, 0).flatten().tolist()) == {0, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bernoulli_is_finite_at_any_logit(dtype: torch.dtype) -> None:
    f = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4]], dtype=dtype, requires_grad=True)
    y = torch.tensor([[1, 0, 1, 1, 0]])
    likelihood = Bernoulli()
    close(
        likelihood.nll(f, y)[0],
        torch.tensor(2e4 + math.log(2) + 2 * math.log1p(math.exp(-30)), dtype=dtype),
    )
    root = likelihood.root(f)
    assert bool(root.isfinite().all())
    (slope,) = torch.autograd.grad(root.sum(), f)
    assert bool(slope.isfinite().all())
    # σ(30) rounds to 1 in float32, but the curvature is e⁻³⁰
    close(likelihood.hessian(f)[0, 0, 3, 3].item(), math.exp(-30), rtol=1e-5, atol=0)
    close(likelihood.gradient(f, y)[0, 3].item(), -math.exp(-30), rtol=1e-5, atol=0)
    assert bool(likelihood.kl(f, f.flip(1)).isfinite().all())


def test_poisson_divergence_between_far_rates_is_finite() -> None:
    f, g = torch.tensor([[-200.0, 3.0]]), torch.tensor([[4.0, -200.0]])
    expected = math.exp(4) + math.exp(3) * (3 + 200 - 1)
    close(Poisson().kl(f, g), torch.tensor([expected]))


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("student", "mixture", "log-variance")])
def test_curvature_is_differentiable_in_the_outputs(name: str) -> None:
    likelihood, f, y = CASES[name].problem((1, 0), 1)
    f.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: likelihood.hessian(x, y), f)
    assert torch.autograd.gradcheck(lambda x: likelihood.gradient(x, y), f)
    if not name.startswith("custom"):
        assert torch.autograd.gradcheck(lambda x: likelihood.root(x, y), f)


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_alone_in_any_grad_mode(name: str) -> None:
    likelihood, f, y = CASES[name].problem((2, 0), 1)
    before, labels = f.clone(), y.clone()
    expected = likelihood.hessian(f, y)
    with torch.no_grad():
        close(likelihood.hessian(f, y), expected)
    with torch.inference_mode():
        made = f.clone()
        close(likelihood.hessian(made, y), expected)
        close(likelihood.product(made, made, y), likelihood.product(f, f, y))
        close(likelihood.gradient(made, y), likelihood.gradient(f, y))
        likelihood.sample(made, 2)
    assert torch.equal(f, before)
    assert torch.equal(y, labels)
    assert likelihood.gradient(f.float(), y).dtype == torch.float32
    if name in CANONICAL:
        assert likelihood.root(f.float(), y).dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_descriptions_are_json_and_rebuild_the_families(name: str) -> None:
    likelihood = CASES[name].make(axis=-1)
    described = json.loads(json.dumps(likelihood.describe()))
    assert described["kind"] in repr(likelihood)
    assert described["axis"] == -1
    if described["kind"] == "Custom":
        with pytest.raises(InputError, match="'Custom'"):
            from_description(described)
        return
    assert repr(from_description(described)) == repr(likelihood)


def test_the_fitted_variance_is_the_mean_squared_residual() -> None:
    f, y = torch.zeros(2, 2, 2), torch.tensor([[[1.0, 3.0], [2.0, math.nan]], [[1.0, 1.0], [2.0, 4.0]]])
    shared = Gaussian.fitted(f, y, masked=True)
    close(shared.noise, torch.tensor(36 / 7, dtype=torch.float64))
    each = Gaussian.fitted(f, y, per_output=True, masked=True)
    close(each.noise, torch.tensor([3.0, 8.0], dtype=torch.float64))
    better, worse = (Gaussian(float(shared.noise) * c, masked=True) for c in (1.01, 0.99))
    least = float(shared.nll(f, y).sum())
    assert least < min(float(x.nll(f, y).sum()) for x in (better, worse))
    last = Gaussian.fitted(f, y, per_output=True, masked=True, axis=-1)
    close(last.noise, torch.tensor([10 / 4, 26 / 3], dtype=torch.float64))


def test_an_indefinite_hessian_names_its_eigenvalue_and_example() -> None:
    f = torch.zeros(3, 2, dtype=torch.float64)
    y = torch.tensor([[0.0], [0.0], [2.0]], dtype=torch.float64)
    likelihood = HeteroscedasticGaussian()
    # [[1, 2], [2, 2]]: (3 − √17) / 2
    with pytest.raises(NumericalError, match='psd="clip"'):
        likelihood.root(f, y)
    with pytest.raises(NumericalError, match=r"-0\.5616"):
        likelihood.project(f, 1, 0, y)
    smallest = float(torch.linalg.eigvalsh(likelihood.hessian(f, y)).min())
    assert smallest == pytest.approx((3 - 17**0.5) / 2)
    # semi-definite at the mean
    root = likelihood.root(f, torch.zeros_like(y))
    torch.testing.assert_close(
        torch.einsum("kni,knj->nij", root, root), likelihood.hessian(f, torch.zeros_like(y))[:, 0]
    )


def test_missing_targets_do_not_make_a_hessian_indefinite() -> None:
    f, y = torch.tensor([[5.0, 0.0]]), torch.tensor([[math.nan]])
    assert not HeteroscedasticGaussian(masked=True).root(f, y).any()


def test_one_output_takes_targets_without_its_axis() -> None:
    f, y = torch.randn(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0])
    for likelihood in (Bernoulli(), Gaussian()):
        assert torch.equal(likelihood.nll(f, y), likelihood.nll(f, y[:, None]))
        assert likelihood.gradient(f, y).shape == f.shape


def test_labels_of_classes_may_be_a_column() -> None:
    for shape in ((4, 3), (4, 3, 5)):
        f, y = torch.randn(shape), torch.randint(3, (4, *shape[2:]))
        assert torch.equal(Categorical(axis=1).nll(f, y), Categorical(axis=1).nll(f, y[..., None]))
