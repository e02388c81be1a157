"""A network in the coordinates of a curvature: the fit in that metric against dense solves."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, LinnetError, NumericalError
from linnet.fitting.last_layer import with_centered_head
from linnet.fitting.sketch import MetricNetwork
from linnet.likelihoods import Gaussian
from tests.fitting.problems import near, problem
from tests.refusals import refused
from tests.zoo_modules import TiedEmbedding

P = problem(n=9, tests=5)
TAU, RHO = 0.05, 0.3
STRUCTURES = ["kfac", "ekfac", "diagonal", "block", "full"]


def curvature(structure: str = "kfac", model: nn.Module | None = None) -> Any:
    targets = torch.zeros_like(P.t)
    return linnet.curvature(model or P.model, (P.x, targets), Gaussian(variance=1.0), structure=structure)


def dense(g: Any) -> Tensor:
    """G/N + τ I, in the order of J."""
    matrix: Tensor = g.dense() / len(P.x)
    return matrix + TAU * torch.eye(len(matrix), dtype=matrix.dtype)


def metric(structure: str = "kfac") -> tuple[MetricNetwork, Tensor]:
    g = curvature(structure)
    return linnet.with_metric(P.model, g, TAU), dense(g)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_fit_is_the_optimum_with_the_curvatures_ridge(structure: str) -> None:
    network, m = metric(structure)
    near(network(P.x), P.f0)
    lin = linnet.linearize(network)
    assert lin.parameter_names == ["epsilon"]
    j, jt = P.j.flatten(0, 1), P.j_test.flatten(0, 1)
    near(lin.kernel(P.x).flatten(2).flatten(0, 1), j @ torch.linalg.solve(m, j.T))
    fit = linnet.fit(lin, (P.x, P.y), ridge=RHO)
    # argmin ½‖f₀ + Jδ − t‖² + ½ρ δᵀ(G/N + τI)δ
    delta = torch.linalg.solve(j.T @ j + RHO * m, j.T @ P.residual)
    near(fit.predict(P.x_test), P.f0_test + (jt @ delta).view_as(P.f0_test))
    moved = network.displacement(fit.module.delta["epsilon"].detach())
    assert list(moved) == [name for name, _ in P.model.named_parameters()]
    near(torch.cat([piece.reshape(-1) for piece in moved.values()]), delta)


def test_audits_are_exact_in_the_metric() -> None:
    network, m = metric()
    fit = linnet.fit(linnet.linearize(network), (P.x, P.y), ridge=RHO)
    j = P.j
    for i in (0, 4):
        kept = [k for k in range(len(P.x)) if k != i]
        rows, r = j[kept].flatten(0, 1), (P.t - P.f0)[kept].reshape(-1)
        delta = torch.linalg.solve(rows.T @ rows + RHO * m, rows.T @ r)
        near(fit.loo()[i], P.f0[i] + j[i] @ delta)
        without = fit.forget([i])
        near(without.predict(P.x_test), P.f0_test + P.j_test @ delta)


def test_coordinates_of_the_network_do_not_matter() -> None:
    # W₂ tanh(W₁ x) with W₂ as a W₂ and a layer that divides: the same functions, other weights
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = copy.deepcopy(inner), factor
            with torch.no_grad():
                for p in self.inner[2].parameters():  # type: ignore[index]
                    p.div_(factor)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.inner[:2](x)  # type: ignore[index]
            outputs: Tensor = self.inner[2](hidden) * self.factor  # type: ignore[index]
            return outputs

    found = []
    for model in (P.model, Scaled(P.model, 40.0).double()):
        g = linnet.curvature(model, (P.x, torch.zeros_like(P.t)), Gaussian(variance=1.0), structure="full")
        lin = linnet.linearize(linnet.with_metric(model, g, 1e-9))
        natural = linnet.fit(lin, (P.x, P.y), ridge=RHO).predict(P.x)
        plain = linnet.fit(linnet.linearize(model), (P.x, P.y), ridge=RHO).predict(P.x)
        found.append((natural, plain))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4 * found[0][0].abs().max()
    assert (found[0][1] - found[1][1]).abs().max() > 1e-3 * found[0][1].abs().max()


def test_files_know_their_metric(tmp_path: Path) -> None:
    network, _ = metric()
    fit = linnet.fit(linnet.linearize(network), (P.x, P.y), ridge=RHO)
    fit.save(tmp_path / "fit")
    near(linnet.load_fit(tmp_path / "fit", metric()[0]).predict(P.x_test), fit.predict(P.x_test))
    for other in (linnet.with_metric(P.model, curvature(), 2 * TAU), metric("diagonal")[0], P.model):
        with pytest.raises(LinnetError, match=r"another network|epsilon"):
            linnet.load_fit(tmp_path / "fit", other)


def conv() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 2, groups=2, bias=False)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


def transposed() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.ConvTranspose2d(2, 3, 2, stride=2), nn.Tanh(), nn.Conv2d(3, 2, 4, stride=3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(18, 2))


def padded() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))


IMAGES = torch.randn(5, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [1, 1, 2, 5], [3, 0, 4, 2]])
NETWORKS = [(conv, IMAGES), (transposed, IMAGES), (TiedEmbedding, TOKENS % 4), (padded, TOKENS)]


@pytest.mark.parametrize(("make", "x"), NETWORKS)
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.thinned(6)
def test_the_kernel_goes_by_the_networks_own_rules(
    make: Any, x: Tensor, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().double().eval()
    targets = torch.zeros(len(x), model(x).shape[1], dtype=torch.float64)
    g = linnet.curvature(model, (x, targets), Gaussian(variance=1.0))
    network = linnet.with_metric(model, g, TAU)
    if moved:
        with torch.no_grad():
            network.epsilon += 0.1 * torch.randn(len(network.epsilon), dtype=torch.float64)
    lin = linnet.linearize(network)
    dense = lin.jacobian(x)
    with monkeypatch.context() as patch:
        patch.setattr("linnet.tangent.capture.exact_rows", lambda f, x, names, u: refuse(names))
        kernel = lin.kernel(x)
        near(kernel.flatten(2).flatten(0, 1), dense.flatten(0, 1) @ dense.flatten(0, 1).T)
        near(lin.kernel(x, form="trace"), torch.einsum("nimi->nm", kernel))
    columns = torch.eye(len(network.epsilon), dtype=torch.float64)
    near(lin.jvp(x, columns), dense)  # forward mode through H, padding rows held


def refuse(names: list[str]) -> dict[str, Tensor]:
    assert not names, f"{names} are differentiated example by example"
    return {}


def test_copies_and_the_network_itself() -> None:
    before = {name: t.clone() for name, t in P.model.state_dict().items()}
    P.model.train()
    network, _ = metric()
    assert P.model.training
    P.model.eval()
    assert all(torch.equal(t, P.model.state_dict()[name]) for name, t in before.items())
    assert all(p.requires_grad for p in P.model.parameters())
    assert [name for name, _ in network.named_parameters()] == ["epsilon"]
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        with torch.no_grad():
            other.epsilon += 0.1
        near(network(P.x), P.f0)
        assert (other(P.x) - P.f0).abs().max() > 1e-3
    moved = copy.deepcopy(P.model)
    with torch.no_grad():
        network.epsilon += 0.1
        for name, piece in network.displacement().items():
            moved.get_parameter(name).add_(piece)
    near(network(P.x), moved(P.x))


def test_heads_are_remembered_and_centered() -> None:
    probe = linnet.with_head(P.model, 3, "probe", (P.x, P.y))
    g = curvature(model=probe)
    fit = linnet.fit(linnet.linearize(linnet.with_metric(probe, g)), (P.x, P.y), ridge=RHO)
    assert any("head was fitted" in line for line in fit.record.warnings)
    centered = linnet.with_metric(with_centered_head(probe), g)
    assert centered(P.x).abs().max() == 0
    again = linnet.fit(linnet.linearize(centered), (P.x, P.y), ridge=RHO)
    assert not any("head was fitted" in line for line in again.record.warnings)


def test_what_was_summed_over_data_is_told() -> None:
    network, _ = metric()
    fit = linnet.fit(linnet.linearize(network), (P.x, P.y), ridge=RHO)
    refused(InputError, lambda: linnet.audit.release(fit, 1.0, 1e-3, clip=(1.0, 1.0)), "curvature")
    certificate = linnet.audit.forgetting_certificate(fit, fit.forget([1]))
    assert any("metric of a curvature" in line for line in certificate.warnings)


def test_what_is_refused() -> None:
    g = curvature()
    refused(InputError, lambda: linnet.with_metric("net", g), "a Linearized")  # type: ignore[arg-type]
    refused(InputError, lambda: linnet.with_metric(P.model, "kfac"), "structure=")  # type: ignore[arg-type]
    refused(InputError, lambda: linnet.with_metric(P.model, g, 0.0), "damping=0.0")
    refused(InputError, lambda: linnet.with_metric(P.model, curvature("matrix-free")), "can be inverted")
    other = problem(hidden=6).model
    refused(InputError, lambda: linnet.with_metric(other, g), "'0.weight'")
    refused(InputError, lambda: linnet.with_metric(nn.Linear(2, 2), g), "nothing of that name")
    refused(NumericalError, lambda: linnet.with_metric(P.model, g.scaled(0.0)), "mean eigenvalue")


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_curvature_of_another_precision(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    own, others = kinds
    other = copy.deepcopy(P.model).to(others)
    zeros = torch.zeros_like(P.t, dtype=others)
    g = linnet.curvature(other, (P.x.to(others), zeros), Gaussian(variance=1.0))
    network = linnet.with_metric(copy.deepcopy(P.model).to(own), g, TAU)
    fit = linnet.fit(linnet.linearize(network), (P.x.to(own), P.y), ridge=RHO)
    expected = linnet.fit(linnet.linearize(metric()[0]), (P.x, P.y), ridge=RHO).predict(P.x_test)
    found = fit.predict(P.x_test.to(own))
    assert found.dtype == own
    near(found.double(), expected, 1e-3)


def test_the_preflight_knows_the_rules_inside() -> None:
    report = linnet.preflight(metric()[0], P.x)
    assert report.ok
    assert not report.findings
    assert report.parameters[0].treatment == "coordinates of 4 parameters, by the rules for each"
    assert not report.parameters[0].exact
    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    g = linnet.curvature(odd, (x, torch.zeros(5, 2, dtype=torch.float64)), Gaussian(variance=1.0))
    network = linnet.with_metric(odd, g, TAU)
    plain = [p for p in linnet.preflight(odd, x).parameters if p.exact]
    found = linnet.preflight(network, x).parameters[0]
    assert found.exact == bool(plain)
    assert not plain or plain[0].name in found.treatment
