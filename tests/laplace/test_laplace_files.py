"""Saving and loading posteriors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import linnet
from linnet.errors import FileFormatError, InputError
from linnet.laplace.laplace import Laplace
from tests.fitting.problems import near, real
from tests.laplace.laplace_problems import classes, fitted, numbers

L, C = linnet.likelihoods, linnet.curvatures


@pytest.mark.parametrize(
    "structure",
    [
        "full",
        "block",
        "diagonal",
        "low-rank",
        "kfac",
        "ekfac",
        "kfra",
        "last-layer",
        {"0": "kfac", "2": "full"},
    ],
)
@pytest.mark.thinned(4)
def test_everything_comes_back(structure: Any, tmp_path: Path) -> None:
    la, x, y = fitted(structure, data_scale=1.5)
    la.tune("evidence", prior="layer")
    again = linnet.load(la.save(tmp_path / "posterior"), classes()[0])
    assert again.prior_precision == la.prior_precision
    assert again.data_scale == la.data_scale == 1.5
    torch.testing.assert_close(again.log_evidence(), la.log_evidence())
    for method in ("glm", "mc"):
        one, other = (p.predictive(x, method, seed=0, samples=3) for p in (again, la))
        near(one.variance, other.variance, 1e-12)  # memory layouts differ, and so may the last bit
        near(one.probs, other.probs, 1e-12)
    for posterior in (la, again):
        posterior.tune("loo", (x, y))
    assert again.prior_precision == pytest.approx(la.prior_precision)


@pytest.mark.parametrize(
    "structure", ["kfac", "full", "last-layer", "low-rank", {"0": "kfac", "2": "diagonal"}]
)
@pytest.mark.thinned(2)
def test_data_can_be_added_to_what_was_loaded(structure: Any, tmp_path: Path) -> None:
    la, x, _ = fitted(structure)
    more = real(6, 3, seed=20), torch.arange(6) % 3
    again = linnet.load(la.save(tmp_path), classes()[0]).fit(more, add=True)
    near(again.predictive(x).variance, la.fit(more, add=True).predictive(x).variance, 1e-6)
    assert again.examples == 18


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("params", [None, "last-layer", "masked"])
@pytest.mark.parametrize(
    ("structure", "expectation"),
    [("full", "exact"), (C.LowRank(3, "randomized", seed=4), "exact"), ("kfac", C.MonteCarlo(2, seed=5))],
)
def test_so_are_parameters_seeds_and_methods(
    structure: Any, expectation: Any, params: Any, linear: bool, tmp_path: Path
) -> None:
    model, x, y = classes()
    if params == "masked":
        name, weight = next(iter(model.named_parameters()))
        params = {name: torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) > 0.4}
    before = linnet.linearize(model, params=params) if linear else model
    chosen = {} if linear else {"params": params}
    la = Laplace(before, L.Categorical(), structure, expectation=expectation, **chosen).fit((x, y))
    masked = isinstance(params, dict)  # whose masks the file has not
    again = linnet.load(la.save(tmp_path), linnet.linearize(model, params=params) if masked else before)
    more = real(6, 3, seed=20), torch.arange(6) % 3
    near(again.fit(more, add=True).curvature.trace(), la.fit(more, add=True).curvature.trace(), 1e-6)


@pytest.mark.parametrize("damping", ["exact", "matrix-normal", "factored"])
def test_tuned_noise_damping_and_prior_mean_are_kept(damping: str, tmp_path: Path) -> None:
    model, x, y = numbers()
    la = Laplace(
        model, L.Gaussian(variance=torch.tensor([0.5, 0.7])), "kfac", damping=damping, prior_mean=0.1
    )
    la.fit((x, y)).tune("evidence")
    again = linnet.load(la.save(tmp_path), model)
    assert again.likelihood.describe() == la.likelihood.describe()
    torch.testing.assert_close(
        again.predictive(x).with_noise().variance, la.predictive(x).with_noise().variance
    )
    torch.testing.assert_close(again.log_evidence(), la.log_evidence())


def test_custom_likelihoods_are_passed_again(tmp_path: Path) -> None:
    model, x, y = numbers()

    def nll(f: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((f - t) ** 2).sum(1)

    likelihood = L.Custom(nll, moments=lambda f: (f, torch.ones_like(f)))
    la = Laplace(model, likelihood, "full").fit((x, y))
    la.save(tmp_path)
    with pytest.raises(InputError, match="likelihood is missing"):
        linnet.load(tmp_path, model)
    torch.testing.assert_close(
        linnet.load(tmp_path, model, likelihood=likelihood).predictive(x).variance, la.predictive(x).variance
    )
    with pytest.raises(InputError, match="saved with"):
        linnet.load(tmp_path, model, likelihood=L.Gaussian())


def test_what_does_not_belong_is_refused(tmp_path: Path) -> None:
    la, x, y = fitted("kfac")
    la.save(tmp_path / "one")
    other = classes(seed=5)[0]
    with pytest.raises(FileFormatError, match="another network"):
        linnet.load(tmp_path / "one", other)
    Laplace(classes()[0], L.Categorical(), "diagonal").fit((x, y)).save(tmp_path / "two")
    file = tmp_path / "two" / "laplace.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(FileFormatError):
        linnet.load(tmp_path / "two", classes()[0])
    with pytest.raises(InputError):
        linnet.load(tmp_path / "three", classes()[0])
