"""Likelihoods given by a function: what they compute, and what they refuse to pretend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from linnet.errors import DataError, InputError, NumericalError
from linnet.likelihoods import (
    Categorical,
    Custom,
    HeteroscedasticGaussian,
    Likelihood,
    mixture_of_classifiers,
)
from tests.curvatures.likelihood_cases import CASES, blocks, joined, softmax_nll, student_nll

close = torch.testing.assert_close
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def positive_part(matrix: Tensor) -> Tensor:
    """Without the negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT


@pytest.mark.parametrize(
    ("name", "clipped"),
    [
        ("mixture", mixture_of_classifiers("clip", axis=-1)),
        ("student", Custom(student_nll, psd="clip", axis=-1)),
        ("log-variance", HeteroscedasticGaussian(psd="clip", axis=-1)),
    ],
)
def test_clipping_keeps_the_positive_part_in_everything(name: str, clipped: Likelihood) -> None:
    likelihood, f, y = CASES[name].problem((2, 3, 0), -1)
    matrix = likelihood.hessian(f, y)
    assert float(torch.linalg.eigvalsh(matrix).min()) < -0.01
    expected = positive_part(matrix)
    close(clipped.hessian(f, y), expected, **EXACT)
    close(blocks(clipped, clipped.root(f, y)), joined(expected), **EXACT)
    v = torch.randn(2, *f.shape, dtype=f.dtype)
    close(clipped.product(f, v, y), torch.einsum("ntij,kntj->knti", expected, v), **EXACT)


def test_an_indefinite_root_names_the_smallest_eigenvalue_and_its_example() -> None:
    likelihood, f, y = CASES["mixture"].problem((40, 0), 1)
    values = torch.linalg.eigvalsh(likelihood.hessian(f, y))[:, 0, 0]
    where, least = int(values.argmin()), float(values.min())
    for ask in (likelihood.root, likelihood.position_root):
        with pytest.raises(NumericalError, match=f"mixture_nll.*eigenvalue {least:.4g} at example {where} "):
            ask(f, y)


def test_one_indefinite_example_is_enough_and_rounding_is_not() -> None:
    likelihood = Custom(lambda f, y: 0.5 * (f[:, 0] ** 2 + y * f[:, 1] ** 2), axis=-1)
    f, y = torch.randn(2, 3, 2), torch.tensor([[1.0, 2.0, -1e-6], [3.0, 0.0, 1.0]])
    root = likelihood.root(f, y)
    close(blocks(likelihood, root), joined(likelihood.hessian(f, y)), rtol=0, atol=1e-5)
    y[1, 1] = -0.25
    with pytest.raises(NumericalError, match=r"-0\.25"):
        likelihood.root(f, y)
    close(likelihood.hessian(f, y)[1, 1], torch.tensor([[1.0, 0.0], [0.0, -0.25]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mixture_is_finite_at_any_output(dtype: torch.dtype) -> None:
    grid = torch.tensor([-1e4, -50.0, 0.0, 3.0, 1e4], dtype=dtype)
    f = torch.cartesian_prod(grid, grid, grid)
    likelihood = mixture_of_classifiers("clip")
    for y in (torch.zeros(len(f)), torch.ones(len(f), dtype=torch.long)):
        for value in (likelihood.nll(f, y), likelihood.gradient(f, y), likelihood.hessian(f, y)):
            assert bool(value.isfinite().all())
        assert bool((likelihood.nll(f, y) >= 0).all())
    assert bool(likelihood.kl(f, f.flip(0)).isfinite().all())
    assert bool(likelihood.fisher(f).isfinite().all())


def test_the_fisher_information_of_the_mixture_sums_over_both_labels() -> None:
    likelihood, f, _ = CASES["mixture"].problem((4, 0), 1)
    expected = torch.zeros(4, 3, 3, dtype=f.dtype)
    weighted = torch.zeros_like(expected)
    for label in (0, 1):
        y = torch.full((4,), label)
        p = (-likelihood.nll(f, y)).exp()[:, None, None]
        slope = likelihood.gradient(f, y)
        expected += p * slope[:, :, None] * slope[:, None, :]
        weighted += p * likelihood.hessian(f, y)[:, 0]
    close(likelihood.fisher(f)[:, 0], expected, **EXACT)
    close(weighted, expected, **EXACT)  # equal in expectation over labels, not label by label
    assert likelihood.fisher_root(f).shape == (2, 4, 3)


def test_a_function_agrees_with_the_closed_form() -> None:
    custom, f, y = CASES["custom-softmax"].problem((3, 0, 4), 1)
    closed = Categorical()
    for method in ("nll", "gradient", "hessian"):
        close(getattr(custom, method)(f, y), getattr(closed, method)(f, y), **EXACT)
    close(custom.fisher(f), closed.fisher(f), **EXACT)
    close(custom.kl(f, f.flip(0)), closed.kl(f, f.flip(0)), **EXACT)
    assert custom.root(f).shape == (12, *f.shape)


def test_many_labels_still_make_as_few_columns_as_outputs() -> None:
    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -D.Binomial(6, logits=f[:, 0]).log_prob(y.to(f.dtype))

    likelihood = Custom(nll, support=range(7), canonical=True)
    f = torch.randn(5, 1, dtype=torch.float64)
    assert likelihood.fisher_root(f).shape == (1, 5, 1)
    p = f.sigmoid()
    close(likelihood.fisher(f)[:, 0], (6 * p * (1 - p))[:, :, None], **EXACT)
    close(likelihood.hessian(f), likelihood.fisher(f), **EXACT)
    close(likelihood.mean(f), 6 * p[:, 0], **EXACT)
    close(likelihood.variance(f), (6 * p * (1 - p))[:, 0], **EXACT)


def test_labels_of_several_components() -> None:
    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -D.Bernoulli(logits=f).log_prob(y.to(f.dtype)).sum(1)

    support = [torch.tensor(pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
    likelihood = Custom(nll, support=support)
    for shape in ((3, 2), (3, 2, 5)):
        f = torch.randn(shape, dtype=torch.float64)
        y = (torch.rand(shape, dtype=torch.float64) < 0.5).long()
        p = f.sigmoid()
        close(likelihood.nll(f, y), -D.Bernoulli(p).log_prob(y.to(p)).flatten(1).sum(1), **EXACT)
        close(likelihood.mean(f), p, **EXACT)
        close(likelihood.variance(f), p * (1 - p), **EXACT)
        assert likelihood.sample(f, 6, 0).shape == (6, *shape)
        close(likelihood.fisher(f), likelihood.hessian(f, y), **EXACT)
    with pytest.raises(DataError, match="position"):
        likelihood.check(torch.zeros(1, 2), torch.tensor([[2, 0]]))


def test_any_form_of_label_goes_with_plain_outputs() -> None:
    def nll(f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((f[:, :, None] - y) ** 2).sum((1, 2))

    def sample(f: Tensor, generator: torch.Generator | None) -> Tensor:
        return f[:, :, None] + torch.randn(*f.shape, 4, generator=generator, dtype=f.dtype)

    likelihood = Custom(nll, sample=sample)
    f, y = torch.randn(3, 2), torch.randn(3, 2, 4)
    close(likelihood.hessian(f, y)[:, 0], 4 * torch.eye(2).expand(3, 2, 2))
    assert likelihood.sample(f, 5, 0).shape == (5, 3, 2, 4)
    assert likelihood.sample_gradients(f, 5, 0).shape == (5, 3, 2)


def test_a_linear_function_has_no_curvature() -> None:
    likelihood = Custom(lambda f, y: f.sum(1) * 2)
    f, y = torch.randn(3, 2), torch.zeros(3)
    assert not likelihood.hessian(f, y).any()
    assert not likelihood.product(f, f, y).any()
    assert not likelihood.root(f, y).any()
    close(likelihood.gradient(f, y), torch.full((3, 2), 2.0))
    assert not Custom(lambda f, y: y).gradient(f, y).any()


def lacking(**settings: Any) -> Custom:
    """A likelihood with a density and nothing else but the settings."""
    return Custom(softmax_nll, **settings)


def test_a_false_claim_of_canonicity_is_found() -> None:
    likelihood = Custom(CASES["mixture"].make()._function, support=(0, 1), canonical=True)  # type: ignore[attr-defined]
    f, y = torch.randn(3, 3), torch.tensor([0, 1, 1])
    for labels in (None, y):
        with pytest.raises(InputError, match="canonical=True"):
            likelihood.hessian(f, labels)


def test_a_canonical_function_needs_no_labels_for_its_curvature() -> None:
    def sample(f: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.multinomial(f.softmax(1), 1, generator=generator)[:, 0]

    f = torch.randn(3, 3, dtype=torch.float64)
    expected = Categorical().hessian(f)
    for settings in ({"sample": sample}, {"support": range(3)}):
        likelihood = lacking(canonical=True, **settings)
        close(likelihood.hessian(f), expected, **EXACT)
        close(likelihood.fisher(f), expected, **EXACT)
        v = torch.randn_like(f)
        close(likelihood.product(f, v), Categorical().product(f, v), **EXACT)


def test_moments_that_are_given_are_used() -> None:
    def moments(f: Tensor) -> tuple[Tensor, Tensor]:
        return f[:, 0], 3 * (2 * f[:, 1]).exp()  # variance of Student's t: 3 / (3 − 2)

    likelihood = Custom(student_nll, moments=moments, axis=-1)
    f = torch.randn(2, 5, 2)
    close(likelihood.mean(f), f[..., 0])
    close(likelihood.variance(f), 3 * (2 * f[..., 1]).exp())
