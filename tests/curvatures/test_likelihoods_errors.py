"""Errors of likelihoods: the argument, its value, what was expected, what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.errors import DataError, InputError, LinnetError, NumericalError
from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_description,
    mixture_of_classifiers,
)

F32 = torch.zeros(4, 3)
NAN, INF = math.nan, math.inf


def at(
    shape: tuple[int, ...], index: tuple[int, ...], value: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Zeros but for one entry."""
    y = torch.zeros(shape, dtype=dtype)
    y[index] = value
    return y


LABELS: list[tuple[Likelihood, Tensor, Any, type[LinnetError], str]] = [
    # Categorical
    (
        Categorical(),
        F32,
        [0, 1, 2, 0],
        InputError,
        r"y=\[0, 1, 2, 0\]\. Expected: a dense tensor.*torch\.as_tensor",
    ),
    (Categorical(), F32, torch.zeros(4), DataError, r"type torch\.float32 and shape \(4,\).*y\.long\(\)"),
    (Categorical(), F32, torch.zeros(4, dtype=torch.bool), DataError, r"torch\.bool.*integer classes \(4,\)"),
    (Categorical(), F32, torch.zeros(4, 3, dtype=torch.long), DataError, r"shape \(4, 3\).*y\.argmax\(1\)"),
    (
        Categorical(),
        F32,
        torch.zeros(4, 1, 1, dtype=torch.long),
        DataError,
        r"shape \(4, 1, 1\).*y\.reshape\(-1,\)",
    ),
    (
        Categorical(),
        F32,
        torch.zeros(5, dtype=torch.long),
        DataError,
        r"shape \(5,\).*shape \(4,\).*each pos",
    ),
    (Categorical(), torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.long), DataError, "pass axis=-1"),
    (
        Categorical(),
        F32,
        torch.tensor([0, 1, 3, 7]),
        DataError,
        r"y\[2\] is 3.*0 to 2.*ignore_index=-100.*from 0",
    ),
    (Categorical(), F32, torch.tensor([0, -1, 1, 2]), DataError, r"y\[1\] is -1\. Expected: classes from 0"),
    (Categorical(), F32, at((4, 3), (1, 2), -0.5), DataError, r"y\[1, 2\] is -0\.5.*none negative.*Gaussian"),
    (Categorical(), F32, at((4, 3), (1, 0), NAN), DataError, r"y\[1, 0\] is nan"),
    (
        Categorical(),
        F32,
        torch.ones(4, 3),
        DataError,
        r"example 0, position 0, sum to 3.*sum to 1.*Bernoulli",
    ),
    (
        Categorical(),
        torch.zeros(4, 1),
        torch.zeros(4, dtype=torch.long),
        InputError,
        r"\(4, 1\) have 1 class.*Bern",
    ),
    (
        Categorical(axis=2),
        F32,
        torch.zeros(4),
        InputError,
        r"axis=2 does not fit outputs of 2 dimensions.*1 to 1",
    ),
    (Categorical(axis=-2), F32, torch.zeros(4), InputError, r"axis=-2 does not fit"),
    (Categorical(), F32.long(), torch.zeros(4), InputError, r"f is an int64 tensor.*floating-point"),
    # Bernoulli
    (Bernoulli(), F32, torch.zeros(4), DataError, r"y has shape \(4,\).*shape \(4, 3\).*own target"),
    (Bernoulli(), F32, torch.zeros(4, dtype=torch.long), DataError, r"for class labels use Categorical"),
    (
        Bernoulli(),
        F32,
        at((4, 3), (2, 1), 1.5),
        DataError,
        r"y\[2, 1\] is 1\.5.*0 to 1.*ignore_index=-100.*Cat",
    ),
    (Bernoulli(), F32, at((4, 3), (0, 2), -1), DataError, r"y\[0, 2\] is -1"),
    (
        Bernoulli(),
        F32,
        at((4, 3), (0, 2), NAN),
        DataError,
        r"y\[0, 2\] is nan, and 1 of 12.*ignore_index=-100",
    ),
    # Poisson
    (Poisson(), F32, at((4, 3), (3, 0), -2), DataError, r"y\[3, 0\] is -2.*whole numbers.*Gaussian"),
    (Poisson(), F32, at((4, 3), (3, 0), 0.5), DataError, r"y\[3, 0\] is 0\.5.*whole numbers"),
    (Poisson(), F32, at((4, 3), (3, 0), INF), DataError, r"y\[3, 0\] is inf"),
    (Poisson(), F32, at((4, 3), (3, 0), NAN), DataError, r"y\[3, 0\] is nan.*masked=True"),
    (Poisson(masked=True), F32, at((4, 3), (3, 0), -2), DataError, r"y\[3, 0\] is -2"),
    # Gaussians
    (Gaussian(), F32, at((4, 3), (1, 2), NAN), DataError, r"y\[1, 2\] is nan, and 1 of 12.*masked=True"),
    (Gaussian(masked=True), F32, at((4, 3), (1, 2), -INF), DataError, r"y\[1, 2\] is -inf.*finite"),
    (Gaussian(), F32, torch.zeros(4, dtype=torch.long), DataError, r"use Categorical\(\)"),
    (
        Gaussian(),
        F32,
        torch.zeros(4, 3, dtype=torch.complex64),
        DataError,
        r"complex64.*real targets.*y\.real",
    ),
    (Gaussian([1.0, 2.0]), F32, torch.zeros(4, 3), InputError, r"2 entries.*3 components.*check axis"),  # type: ignore[arg-type]
    (
        HeteroscedasticGaussian(),
        F32,
        torch.zeros(4, 1),
        InputError,
        r"3 components.*even number.*two outputs",
    ),
    (
        HeteroscedasticGaussian(),
        F32[:, :2],
        torch.zeros(4, 2),
        DataError,
        r"\(4, 2\).*\(4, 1\).*pair of outputs",
    ),
    (
        HeteroscedasticGaussian(),
        F32[:, :2],
        at((4, 1), (2, 0), NAN),
        DataError,
        r"y\[2, 0\] is nan.*masked=True",
    ),
    (
        HeteroscedasticGaussian("natural"),
        at((4, 2), (1, 1), 0.5) - torch.tensor([0.0, 0.1]),
        torch.zeros(4, 1),
        InputError,
        r"η₂\[1, 0, 0\].* is 0\.4.*negative.*-softplus.*log-variance",
    ),
    # Custom
    (
        mixture_of_classifiers(),
        F32,
        torch.tensor([0, 1, 2, 0]),
        DataError,
        r"example 2, position 0, is 2.*2 labels",
    ),
    (
        mixture_of_classifiers(),
        F32[:, :2],
        torch.zeros(4),
        InputError,
        r"2 components.*three: a gate.*check axis",
    ),
    (
        mixture_of_classifiers(),
        F32,
        torch.zeros(3),
        DataError,
        r"shape \(3,\), for outputs of shape \(4, 3\)",
    ),
    (mixture_of_classifiers(), F32, torch.full((4,), NAN), DataError, r"y\[0\] is nan"),
    (mixture_of_classifiers(), F32, torch.zeros(4, 2), DataError, r"shape \(2,\), those of support \(\)"),
    (
        Custom(lambda f, y: f.sum()),
        F32,
        torch.zeros(4),
        InputError,
        r"nll returned \(\).*one value for each row, \(4,\)",
    ),
    (Custom(lambda f, y: 0.0), F32, torch.zeros(4), InputError, r"nll returned float"),  # type: ignore[arg-type, return-value]
]


@pytest.mark.parametrize(("likelihood", "f", "y", "error", "message"), LABELS)
def test_labels_that_do_not_fit(
    likelihood: Likelihood, f: Tensor, y: Any, error: type[LinnetError], message: str
) -> None:
    for method in (likelihood.nll, likelihood.gradient):
        with pytest.raises(error, match=message):
            method(f, y)


MAKING: list[tuple[Callable[[], Any], str]] = [
    (lambda: Gaussian(0.0), r"variance=0\.0\. Expected: a positive number.*Gaussian\.fitted"),
    (lambda: Gaussian(torch.tensor([1.0, -1.0])), "variance is a float32 tensor"),
    (lambda: Gaussian(INF), "variance=inf"),
    (lambda: Gaussian(axis=0), r"axis=0.*axis 0 holds examples.*axis=-1 for sequences"),
    (lambda: Categorical(axis=True), "axis=True"),
    (lambda: Categorical(ignore_index=1.5), r"ignore_index=1\.5.*an integer"),  # type: ignore[arg-type]
    (lambda: Bernoulli(ignore_index=1), "ignore_index=1 is a label"),
    (lambda: HeteroscedasticGaussian("precision"), r"'precision'.*log-variance"),  # type: ignore[arg-type]
    (lambda: HeteroscedasticGaussian(psd="ignore"), r"psd='ignore'.*clip"),  # type: ignore[arg-type]
    (lambda: Custom(None), r"nll=None.*a function"),  # type: ignore[arg-type]
    (lambda: Custom(lambda f, y: y, sample=3), r"sample=3.*a function"),  # type: ignore[arg-type]
    (lambda: Custom(lambda f, y: y, support=[]), "support is empty"),
    (lambda: Custom(lambda f, y: y, support=["a"]), r"support=\['a'\] cannot be made a tensor"),
    (lambda: Custom(lambda f, y: y, psd="no"), "psd='no'"),  # type: ignore[arg-type]
    (lambda: from_description({"kind": "Laplace"}), r"kind 'Laplace'.*Gaussian"),
]


@pytest.mark.parametrize(("make", "message"), MAKING)
def test_settings_that_make_no_sense(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_numbers_of_draws(n: Any) -> None:
    for method in ("sample", "project", "sample_gradients"):
        with pytest.raises(InputError, match=f"n={n}.*a positive integer"):
            getattr(Gaussian(), method)(F32, n)


def test_shapes_that_do_not_go_together() -> None:
    likelihood = Categorical()
    with pytest.raises(InputError, match=r"v has shape \(4, 2\) and f \(4, 3\)"):
        likelihood.product(F32, torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"f has shape \(4, 3\) and g \(3, 3\)"):
        likelihood.kl(F32, F32[:3])
    for covariance in (torch.zeros(4, 2), torch.zeros(4, 3, 2)):
        with pytest.raises(
            InputError,
            match=r"mean is a float32 tensor of shape \(4, 3\) and covariance .*separate example",
        ):
            likelihood.predictive(F32, covariance)


def test_residuals_that_are_all_zero_fit_no_variance() -> None:
    with pytest.raises(DataError, match=r"mean squared residual of f and y is 0\.0.*held-out"):
        Gaussian.fitted(F32, F32)
    empty = torch.ones(4, 3)
    empty[:, 1] = NAN
    with pytest.raises(DataError, match=r"is \[1\.0, nan, 1\.0\]"):
        Gaussian.fitted(F32, empty, per_output=True, masked=True)


def test_an_indefinite_hessian_names_its_eigenvalue_and_example() -> None:
    f = torch.zeros(3, 2, dtype=torch.float64)
    y = at((3, 1), (2, 0), 2.0, torch.float64)
    likelihood = HeteroscedasticGaussian()
    # [[1, 2], [2, 2]]: (3 − √17) / 2
    with pytest.raises(NumericalError, match=r"eigenvalue -0\.5616 at example 2 .*position 0.*psd=\"clip\""):
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
    f, y = torch.tensor([[5.0, 0.0]]), torch.tensor([[NAN]])
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
