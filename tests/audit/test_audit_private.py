"""Differential privacy: calibration, sensitivity over all neighbors, the guarantee in one dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import audit
from linnet.audit.private_release import (
    clip_rows,
    clipped_optimum,
    gaussian_noise,
    jacobian_scales,
    privacy_delta,
)
from linnet.errors import InputError, NumericalError
from tests.fitting.problems import flat, near, network, problem, real
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.refusals import refused

CLIP = (1.5, 2.0)
RHO = 3.0


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- calibration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_noise_is_the_least_that_hides_an_example(epsilon: float, delta: float) -> None:
    """∫ (p − e^ε q)₊ of two Gaussians a sensitivity apart, by quadrature."""
    sensitivity = 0.7
    noise = gaussian_noise(sensitivity, epsilon, delta)
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64) * noise
    p = torch.exp(-0.5 * (z / noise) ** 2) / (noise * math.sqrt(2 * math.pi))
    q = torch.exp(-0.5 * ((z + sensitivity) / noise) ** 2) / (noise * math.sqrt(2 * math.pi))
    lost = float(torch.trapezoid((p - math.exp(epsilon) * q).clamp_min(0), z))
    assert lost == pytest.approx(delta, rel=1e-4)
    assert privacy_delta(0.999 * noise, sensitivity, epsilon) > delta
    assert privacy_delta(noise, sensitivity, epsilon) <= delta


def test_noise_is_proportional_to_the_sensitivity_and_less_than_the_classical() -> None:
    noise = gaussian_noise(1.0, 0.5, 1e-5)
    assert gaussian_noise(3.0, 0.5, 1e-5) == pytest.approx(3 * noise, rel=1e-12)
    assert noise < math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    assert gaussian_noise(1.0, 1000.0, 1e-5) < 0.05  # e^ε overflows


# --- the clipped optimum --------------------------------------------------------------------------------


def clipped_gradient(j: Tensor, r: Tensor, at: Tensor, rho: float, clip: tuple[float, float]) -> Tensor:
    """∇F by plain loops over examples."""
    total = rho * at
    for rows, residual in zip(j, r, strict=True):
        norm = float(torch.linalg.matrix_norm(rows, 2))
        s = min(1.0, clip[0] / norm)
        e = s * (residual - rows @ at)
        total = total - s * rows.T @ e * min(1.0, clip[1] / max(float(e.norm()), 1e-300))
    return total


@pytest.mark.parametrize("clip", [CLIP, (1e2, 1e2), (0.1, 0.05), (1e2, 0.5), (0.3, 1e2)])
def test_the_clipped_optimum_has_no_gradient(clip: tuple[float, float]) -> None:
    p = problem(n=9, seed=2)
    fit = p.fit(ridge=RHO, solver="dual")
    found = audit.release(fit, 1.0, 0.05, clip=clip, generator=generator())
    d = flat(found.delta)
    d = d - found.certificate.noise * torch.randn(len(d), generator=generator(), dtype=torch.float64)
    start = clipped_gradient(p.j, p.t - p.f0, torch.zeros_like(d), RHO, clip)
    gradient = clipped_gradient(p.j, p.t - p.f0, d, RHO, clip)
    rounding = 1e-15 * RHO * float(flat(found.delta).norm()) * float(p.kernel.trace())
    assert rounding < 1e-5 * float(start.norm())
    assert float(gradient.norm()) < 1e-9 * float(start.norm()) + rounding


def test_where_nothing_is_clipped_the_release_is_the_fit() -> None:
    p = problem()
    fit = p.fit(ridge=RHO, solver="dual")
    noise = audit.release(fit, 5.0, 0.1, clip=(1e3, 1e3), generator=generator(1))
    scale = noise.certificate.noise
    expected = flat(fit.delta) + scale * torch.randn(38, generator=generator(1), dtype=torch.float64)
    near(flat(noise.delta), expected, 1e-9)
    assert noise.private["clipped_jacobians"] == noise.private["clipped_residuals"] == 0
    near(noise.predict(p.x_test), p.f0_test + p.j_test @ flat(noise.delta), 1e-9)


def optimum(j: Tensor, r: Tensor, rho: float, clip: tuple[float, float]) -> Tensor:
    """δ of the clipped objective, from explicit Jacobians."""
    n, c, dim = j.shape
    scales = jacobian_scales(j @ j.mT, clip[0], 0.0)
    rows = (scales[:, None, None] * j).reshape(n * c, dim)
    beta = clipped_optimum(rows @ rows.T, scales[:, None] * r, rho, clip[1])
    return rows.T @ beta.reshape(-1)


def neighbors(j: Tensor, r: Tensor, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Every data set with one example less, or with one replaced by another, some of them extreme."""
    n = len(j)
    others = [(100.0 * real(*j.shape[1:], seed=s), 100.0 * real(j.shape[1], seed=s + 9)) for s in (1, 2)]
    for i in range(n):
        rest = [k for k in range(n) if k != i]
        if kind == "remove":
            yield j[rest], r[rest]
            continue
        twin = (-j[i], r[i]), (j[i], -100 * r[i])
        for row, residual in (*others, *twin):
            yield torch.cat([j[rest], row[None]]), torch.cat([r[rest], residual[None]])


@pytest.mark.parametrize("kind", ["remove", "replace"])
@pytest.mark.parametrize("clip", [CLIP, (0.4, 5.0), (4.0, 0.3)])
@pytest.mark.parametrize("rho", [0.5, 20.0])
@pytest.mark.thinned(2)
def test_no_neighbor_is_farther_than_the_sensitivity(
    kind: str, clip: tuple[float, float], rho: float
) -> None:
    p = problem(n=6, outputs=2, seed=4, hidden=3)
    fit = p.fit(ridge=rho, solver="dual")
    found = audit.release(fit, 1.0, 0.01, clip=clip, neighbors=kind)
    bound = found.certificate.constants["sensitivity"]
    here = optimum(p.j, p.t - p.f0, rho, clip)
    moves = [float((optimum(*other, rho, clip) - here).norm()) for other in neighbors(p.j, p.t - p.f0, kind)]
    assert 0 < max(moves) <= bound
    exact = (1 if kind == "remove" else 2) * clip[0] * clip[1] / rho
    assert bound == pytest.approx(exact, rel=0.01)
    assert found.certificate.noise == pytest.approx(gaussian_noise(bound, 1.0, 0.01), rel=1e-12)


def test_the_sensitivity_is_reached() -> None:
    """One example with a large residual moves the optimum of no data by κτ/ρ; its reverse by twice that."""
    j, r = 10 * real(1, 1, 4, seed=3), torch.tensor([[1e4]], dtype=torch.float64)
    alone, reverse = optimum(j, r, RHO, CLIP), optimum(j, -r, RHO, CLIP)
    assert float(alone.norm()) == pytest.approx(CLIP[0] * CLIP[1] / RHO, rel=1e-9)
    assert float((alone - reverse).norm()) == pytest.approx(2 * CLIP[0] * CLIP[1] / RHO, rel=1e-9)


def test_gradients_of_examples_are_clipped() -> None:
    e = real(5, 3) * torch.tensor([[0.01], [1.0], [10.0], [100.0], [0.0]], dtype=torch.float64)
    clipped = clip_rows(e, 0.5)
    assert float(clipped.norm(dim=1).max()) <= 0.5 * (1 + 1e-12)
    near(clipped[0], e[0], 1e-14)
    assert not clipped[4].any()


# --- the mechanisms ---------------------------------------------------------------------------------------


def test_the_noise_has_the_size_that_the_certificate_says() -> None:
    model = nn.Linear(60, 20).double()
    x, t = 0.1 * real(12, 60), real(12, 20)
    fit = linnet.fit(linnet.linearize(model), (x, t), ridge=5.0, solver="dual")
    drawn = [audit.release(fit, 1.0, 0.01, clip=(1.0, 1.0), generator=generator(s)) for s in (1, 2)]
    difference = flat(drawn[0].delta) - flat(drawn[1].delta)
    measured = float(difference.std()) / math.sqrt(2)
    assert measured == pytest.approx(drawn[0].certificate.noise, rel=0.08)  # 1,220 numbers: 2 %
    again = audit.release(fit, 1.0, 0.01, clip=(1.0, 1.0), generator=generator(1))
    assert torch.equal(flat(again.delta), flat(drawn[0].delta))


def test_a_certificate_says_what_it_covers() -> None:
    fit = problem().fit(ridge=RHO, solver="dual")
    found = audit.release(fit, 1.0, 0.05, clip=CLIP, neighbors="remove").certificate
    assert (found.epsilon, found.delta, found.neighbors) == (1.0, 0.05, "remove")
    text = str(found)
    for words in (
        "(1, 0.05) differential privacy",
        "added or removed",
        "Protected: δ",
        "Not protected",
        "head",
    ):
        assert words in text
    assert "clipped" not in text  # how many were clipped is private


def test_single_precision() -> None:
    p = problem()
    fit = linnet.fit(linnet.linearize(network().float()), (p.x.float(), p.y), ridge=RHO, solver="dual")
    found = audit.release(fit, 1.0, 0.05, clip=CLIP, generator=generator())
    exact = audit.release(p.fit(ridge=RHO, solver="dual"), 1.0, 0.05, clip=CLIP, generator=generator())
    near(flat(found.delta), flat(exact.delta), 1e-4)


# --- refusals ---------------------------------------------------------------------------------------------


def test_fits_that_would_leak() -> None:
    p = problem()
    for ridge in ("loo", "evidence", "gcv"):
        chosen = p.fit(ridge=ridge)
        refused(InputError, lambda f=chosen: audit.release(f, 1.0, 0.01, clip=CLIP), f"chosen by '{ridge}'")
    model = linnet.with_head(p.model, 3, linnet.Probe(ridge=1.0), data=(p.x, p.y))
    headed = linnet.fit(linnet.linearize(model), (p.x, p.y), ridge=RHO, solver="dual")
    refused(InputError, lambda: audit.release(headed, 1.0, 0.01, clip=CLIP), "head", "random")
    # forgetting an example does not take it out of the head
    refused(InputError, lambda: audit.release(headed.forget([0]), 1.0, 0.01, clip=CLIP), "head")
    held = p.fit(ridge=RHO, solver="dual").constrain(p.x[:1], p.t[:1])
    refused(InputError, lambda: audit.release(held, 1.0, 0.01, clip=CLIP), "equations")
    refused(InputError, lambda: audit.release(p.fit(ridge=RHO, solver="cg"), 1.0, 0.01, clip=CLIP), "'cg'")
    random = linnet.with_head(p.model, 3, init="random", seed=generator())
    fit = linnet.fit(linnet.linearize(random), (p.x, p.y), ridge=RHO, solver="dual")
    assert audit.release(fit, 1.0, 0.01, clip=CLIP).delta


def test_a_solution_that_is_not_the_optimum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = problem().fit(ridge=RHO, solver="dual")
    monkeypatch.setattr(
        "linnet.audit.private_release.clipped_optimum",
        lambda kernel, residual, ridge, limit: 1.01 * clipped_optimum(kernel, residual, ridge, limit),
    )
    refused(NumericalError, lambda: audit.release(fit, 1.0, 0.01, clip=CLIP), "away from the optimum")


def test_jacobians_are_clipped_by_their_norm() -> None:
    p = problem()
    j = jacobian_oracle(p.model, p.x)
    scales = jacobian_scales(j @ j.mT, 1.5, 0.0)
    norms = torch.linalg.matrix_norm(scales[:, None, None] * j, 2)
    assert float(norms.max()) <= 1.5 * (1 + 1e-12)
    assert bool((scales < 1).any())
    assert bool(((scales == 1) | ((norms - 1.5).abs() < 1e-12)).all())
    near(output_oracle(p.model, p.x), p.f0, 1e-14)
