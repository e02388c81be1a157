"""Sketched networks and fits against dense algebra with the directions written out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures.leading import leading_basis
from linnet.errors import FileFormatError, InputError, MemoryBudgetError
from linnet.fitting import CG, Sketch
from linnet.fitting.sketch import SketchedNetwork
from linnet.likelihoods import Gaussian
from linnet.memory import assumed

N, C = 30, 3


class Words(nn.Module):
    """An embedding, a grouped convolution, a norm, a shared and a transposed weight."""

    def __init__(self, words: int = 7) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 6)
        self.conv = nn.Conv1d(6, 8, 3, groups=2, padding=1)
        self.norm = nn.LayerNorm(5)
        self.shared = nn.Linear(5, 5)
        self.mix = nn.Parameter(torch.randn(40, 9) / 6)
        self.head = nn.Linear(9, C)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(ids).mT))
        h = torch.tanh(self.shared(torch.tanh(self.shared(h)))).flatten(1)
        out: Tensor = self.head(torch.tanh(h @ self.mix))
        return out


class Pictures(nn.Module):
    """Convolutions with strides, dilation and groups, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(4, 6, 2, groups=2, dilation=2)
        self.third = nn.ConvTranspose2d(6, 2, 2)
        self.head = nn.Linear(2 * 9, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.third(h)).flatten(1))
        return out


def case(name: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network in float64, N examples, their labels, and five others."""
    torch.manual_seed(0)
    if name == "words":
        words = Words().double()
        return words, torch.randint(7, (N, 5)), torch.randint(C, (N,)), torch.randint(7, (5, 5))
    if name == "pictures":
        x = torch.randn(N + 5, 1, 7, 7).double()
        return Pictures().double(), x[:N], torch.randint(C, (N,)), x[N:]
    x = torch.randn(N + 5, 4).double()
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, C)).double()
    return net, x[:N], torch.randint(C, (N,)), x[N:]


def gauss_newton(net: nn.Module, x: Tensor, structure: str = "ekfac") -> linnet.Curvature:
    """G of a Gaussian likelihood: JᵀJ."""
    zeros = torch.zeros(len(x), C, dtype=torch.float64)
    found: linnet.Curvature = linnet.curvature(net, (x, zeros), Gaussian(), structure=structure)
    return found


def directions(small: SketchedNetwork) -> Tensor:
    """H (P, D), column by column."""
    eye = torch.eye(len(small.epsilon), dtype=torch.float64)
    return torch.stack([torch.cat([t.flatten() for t in small.displacement(e).values()]) for e in eye], 1)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Raise unless two tensors are equal up to rounding, relative to the larger."""
    found, expected = found.detach(), expected.detach()
    scale = max(float(expected.abs().max()), 1e-12)
    assert float((found - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "block", "full"])
@pytest.mark.parametrize("name", ["words", "pictures", "dense"])
@pytest.mark.thinned(6)
def test_rows_and_displacements_agree_with_the_directions_written_out(name: str, structure: str) -> None:
    net, x, _, new = case(name)
    small = linnet.with_sketch(net, gauss_newton(net, x, structure), dim=40)
    h, lin, plain = directions(small), linnet.linearize(small), linnet.linearize(net)
    near(h.T @ h, torch.eye(40, dtype=torch.float64), 1e-12)
    j, j_new = (plain.jacobian(part).flatten(0, 1) @ h for part in (x, new))
    near(lin.jacobian(x).flatten(0, 1), j)
    near(lin.kernel(new, x).reshape(len(j_new), len(j)), j_new @ j.T)
    torch.testing.assert_close(small(x), net(x))
    flat = torch.randn(plain.space.dim, 2, dtype=torch.float64)
    near(small.projected(plain.space.to_params(flat)), h.T @ flat)
    kept = small.kept(x)
    near(torch.tensor(kept.share, dtype=torch.float64), j.square().sum() / plain.jacobian(x).square().sum())
    assert kept.examples == N
    assert sum(layer.directions for layer in kept.layers) == 40
    assert len(kept.table().splitlines()) == len(kept.layers) + 1


def test_a_large_embedding_keeps_single_entries() -> None:
    torch.manual_seed(0)
    net, x = Words(200).double(), torch.randint(200, (N, 5))
    x[:, 4] = x[:, 0]  # one word twice in each example
    small = linnet.with_sketch(net, gauss_newton(net, x), dim=300)
    table = next(basis for basis in small.bases if basis.layer.name == "table.weight")
    assert type(table).__name__ == "EntryBasis"
    assert 0 < table.size < 1200
    near(
        linnet.linearize(small).jacobian(x).flatten(0, 1),
        linnet.linearize(net).jacobian(x).flatten(0, 1) @ directions(small),
    )


@pytest.mark.parametrize("name", ["words", "pictures", "dense"])
def test_a_wide_side_is_its_own_basis(name: str) -> None:
    """Factors wider than ``widest`` are diagonal, and what is kept of them are single rows."""
    net, x, _, _ = case(name)
    zeros = torch.zeros(N, C, dtype=torch.float64)
    passes = linnet.curvatures.Passes(widest=8)
    curvature = linnet.curvature(net, (x, zeros), Gaussian(), structure="ekfac", passes=passes)
    assert any(getattr(part.operator, "halved", False) for part in curvature.parts)
    small = linnet.with_sketch(net, curvature, dim=40)
    h = directions(small)
    near(h.T @ h, torch.eye(40, dtype=torch.float64), 1e-12)
    near(
        linnet.linearize(small).jacobian(x).flatten(0, 1),
        linnet.linearize(net).jacobian(x).flatten(0, 1) @ h,
    )


def test_the_directions_are_those_of_the_largest_eigenvalues() -> None:
    net, x, _, _ = case("dense")
    curvature = gauss_newton(net, x, "full")
    bases, values = leading_basis(curvature, 10)
    expected = torch.linalg.eigvalsh(curvature.dense()).flip(0)[:10]
    near(values.sort(descending=True).values, expected)
    assert sum(basis.size for basis in bases) == 10
    # of equal eigenvalues as many as there is room for, and none that is zero
    flat = linnet.curvature(
        nn.Linear(3, 2).double(), (torch.eye(3).double(), torch.zeros(3, 2).double()), Gaussian(),
        structure="diagonal",
    )  # fmt: skip
    assert len(leading_basis(flat, 4)[1]) == 4
    assert len(leading_basis(flat, 100)[1]) == 8


@pytest.mark.parametrize("name", ["words", "dense"])
def test_a_sketched_fit_is_the_ridge_regression_on_its_features(name: str) -> None:
    net, x, y, new = case(name)
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge=0.5, solver=Sketch(dim=25, examples=20))
    h = directions(fit.module.model)
    plain = linnet.linearize(net)
    j, j_new = (plain.jacobian(part).flatten(0, 1) @ h for part in (x, new))
    system = j.T @ j + 0.5 * torch.eye(25, dtype=torch.float64)
    epsilon = torch.linalg.solve(system, j.T @ (fit.targets - net(x)).reshape(-1))
    near(fit.delta["epsilon"], epsilon)
    near(fit.predict(new), net(new) + (j_new @ epsilon).view(-1, C))
    near(torch.cat([t.flatten() for t in fit.displacement().values()]), h @ epsilon)
    variance = fit.noise * (j_new @ torch.linalg.solve(system, j_new.T)).diagonal().view(-1, C)
    near(fit.predictive(new).variance, variance, 1e-7)
    rest = torch.cat([torch.arange(3), torch.arange(4, N)])
    without = linnet.fit(linnet.linearize(fit.module.model), (x[rest], y[rest]), ridge=0.5, solver="primal")
    near(fit.loo()[3], without.predict(x[3:4])[0], 1e-8)
    near(fit.forget([3]).predict(new), without.predict(new))
    near(fit.forget([3]).update((x[3:4], y[3:4])).predict(new), fit.predict(new))
    near(fit.influence(new)[3], fit.predict(new) - without.predict(new), 1e-7)
    assert fit.solver == "sketch"
    assert fit.summary()["reasons"]["sketch"].endswith(f"in 25 of {plain.space.dim} directions")


def test_all_directions_give_the_exact_fit() -> None:
    net, x, y, new = case("words")
    lin = linnet.linearize(net)
    exact = linnet.fit(lin, (x, y), ridge="loo", solver="dual")
    fit = linnet.fit(lin, (x, y), ridge=exact.ridge, solver=Sketch(dim=10_000))
    near(fit.predict(new), exact.predict(new))
    near(fit.loo(), exact.loo())
    # along directions of eigenvalue zero new inputs may move, those of the data do not
    near(fit.predictive(x).variance, exact.predictive(x).variance, 1e-6)
    path, expected = fit.path(), exact.path(fit.path().ridges)
    near(path.loo_error, expected.loo_error, 1e-6)
    near(path.evidence, expected.evidence, 1e-6)


@pytest.mark.long
def test_settings_of_a_sketch_change_it() -> None:
    net, x, y, new = case("words")

    def fitted(**settings: Any) -> linnet.LinearFit:
        return linnet.fit(linnet.linearize(net), (x, y), ridge=0.5, solver=Sketch(**{"dim": 20, **settings}))

    plain = fitted().predict(new)
    for settings in (
        {"dim": 30}, {"basis": "kfac"}, {"basis": "diagonal"}, {"examples": 5},
        {"examples": 20, "seed": 1}, {"basis": gauss_newton(net, x[:10], "block")},
    ):  # fmt: skip
        assert float((fitted(**settings).predict(new) - plain).abs().max()) > 1e-6, settings
    torch.testing.assert_close(fitted().predict(new), plain)


def test_cross_entropy_along_the_directions() -> None:
    net, x, y, new = case("dense")
    lin = linnet.linearize(net)
    exact = linnet.fit(lin, (x, y), "cross-entropy", ridge=0.5)
    fit = linnet.fit(lin, (x, y), "cross-entropy", ridge=0.5, solver=Sketch(dim=10_000))
    near(fit.predict(new), exact.predict(new), 1e-4)
    near(fit.loo(), exact.loo(), 1e-4)
    assert fit.solver == "sketch"
    searched = [
        linnet.fit(lin, (x, y), "cross-entropy", ridge="loo", solver=s) for s in (Sketch(10_000), "dual")
    ]
    assert searched[0].ridge == pytest.approx(searched[1].ridge, rel=1e-3)


def test_a_saved_sketch_is_loaded_with_the_network_alone(tmp_path: Path) -> None:
    net, x, y, new = case("words")
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge="loo", solver=Sketch(dim=25))
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, net)
    torch.testing.assert_close(loaded.predict(new), fit.predict(new))
    near(loaded.loo(), fit.loo(), 1e-12)
    again = linnet.load_fit(tmp_path, fit.module.model)
    torch.testing.assert_close(again.predict(new), fit.predict(new))
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(FileFormatError, match="weights differ"):
        linnet.load_fit(tmp_path, other)
    with pytest.raises(FileFormatError, match="lacks"):
        linnet.load_fit(tmp_path, nn.Linear(2, 2))


def test_a_sketched_network_is_a_module() -> None:
    net, x, _, _ = case("words")
    small = linnet.with_sketch(net, gauss_newton(net, x), dim=12)
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        near(directions(twin), directions(small), 1e-15)
    assert [name for name, _ in small.named_parameters()] == ["epsilon"]
    assert "12 directions" in repr(small)
    posterior = linnet.Laplace(small, Gaussian(), structure="full").fit((x, torch.zeros(N, C).double()))
    assert posterior.predictive(x[:2]).variance.shape == (2, C)


def test_rows_that_exceed_the_memory_go_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is differentiated once, however many passes there are over the rows."""
    import linnet.linear.formed_rows as module

    net, x, y, new = case("pictures")
    small = linnet.with_sketch(net, gauss_newton(net, x), dim=4)
    lin = linnet.linearize(small)
    expected = linnet.fit(lin, (x, y), ridge="loo", solver="primal")
    counted = []
    formed = module.form_rows
    monkeypatch.setattr(module, "form_rows", lambda f, part: counted.append(len(part)) or formed(f, part))
    monkeypatch.setattr(module, "KEPT", 0.0)
    fit = linnet.fit(lin, (x, y), ridge="loo", solver="primal")
    assert sum(counted) < 2 * N  # a few are looked at once more, to bound the rounding errors
    torch.testing.assert_close(fit.loo(), expected.loo())
    rows = vars(fit.system.problem)["kept rows"]
    assert len(rows._written) * rows.size >= N
    # what is forgotten and added is taken from the same rows
    counted.clear()
    fit.forget([0, 1]).loo()
    assert sum(counted) < N
    # a disk that is full ends the file, not the fit
    monkeypatch.setattr(module.tempfile, "TemporaryFile", _full)
    counted.clear()
    fit = linnet.fit(lin, (x, y), ridge="loo", solver="primal")
    assert sum(counted) > 2 * N
    torch.testing.assert_close(fit.loo(), expected.loo())
    twin = copy.deepcopy(fit)
    near(twin.predict(new), fit.predict(new))


def _full(**_: Any) -> Any:
    """No room."""
    raise OSError(28, "No space left on device")


def test_a_sketch_preconditions_the_exact_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 1, 8, 8).double() + torch.linspace(-2, 2, 64).view(8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, C)).double()
    y, lin = torch.randint(C, (60,)), linnet.linearize(net)
    exact = linnet.fit(lin, (x, y), ridge=0.5, solver="dual")
    steps = []
    for preconditioner in (None, Sketch(dim=150)):
        fit = linnet.fit(lin, (x, y), ridge=0.5, solver=CG(tolerance=1e-10, preconditioner=preconditioner))
        near(fit.predict(x), exact.predict(x), 1e-6)
        steps.append(fit.system.steps)
    assert steps[1] < 0.7 * steps[0]
    assert "a sketch of 150 directions" in fit.summary()["reasons"]["preconditioner"]
    fit.save(tmp_path)
    near(linnet.load_fit(tmp_path, net).forget([2]).predict(x), exact.forget([2]).predict(x), 1e-5)


def test_auto_sketches_where_no_matrix_fits() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 60), nn.Tanh(), nn.Linear(60, 4)).double()
    x, y = torch.randn(200, 10).double(), torch.randint(4, (200,))
    lin = linnet.linearize(net)
    fit = linnet.fit(lin, (x, y), ridge="loo", memory="6MB")
    assert fit.solver == "sketch"
    assert "exact model would need" in fit.summary()["reasons"]["solver"]
    assert len(fit.delta["epsilon"]) == 256
    assert linnet.fit(lin, (x, y), ridge=1.0, memory="6MB").solver == "sketch"
    assert linnet.fit(lin, (x, y), ridge=1.0, memory="1MB").solver == "cg"
    with pytest.raises(MemoryBudgetError, match="directions"):
        linnet.fit(lin, (x, y), solver=Sketch(500), memory="1MB")


def test_what_cannot_be_sketched() -> None:
    net, x, y, _ = case("dense")
    curvature = gauss_newton(net, x)
    for wrong in ({"dim": 0}, {"dim": 2.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            linnet.with_sketch(net, curvature, **wrong)
    with pytest.raises(InputError, match="curvature"):
        linnet.with_sketch(net, "ekfac")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="model has"):
        linnet.with_sketch(nn.Linear(2, 2), curvature)
    low = gauss_newton(net, x, "low-rank")
    with pytest.raises(InputError, match="low-rank"):
        linnet.with_sketch(net, low)
    with pytest.raises(InputError, match="coordinates"):
        linnet.fit(linnet.linearize(linnet.with_metric(net, curvature)), (x, y), solver="sketch")


def test_random_directions_of_a_seed() -> None:
    net, x, _, _ = case("words")
    curvature = gauss_newton(net, x)
    one, again, other = (linnet.with_sketch(net, curvature, dim=40, seed=seed) for seed in (3, 3, 4))
    assert (one.orthonormal, one.eigenvalues) == (False, None)
    assert torch.equal(directions(one), directions(again))
    assert directions(one).shape == directions(other).shape
    assert not torch.equal(directions(one), directions(other))
    with assumed(10), pytest.raises(MemoryBudgetError, match="directions"):
        linnet.with_sketch(net, curvature, dim=40, seed=3)


@pytest.mark.parametrize(
    "dim", [4, pytest.param(11, marks=pytest.mark.long), 30, pytest.param(57, marks=pytest.mark.long)]
)
@pytest.mark.thinned(2)
def test_random_directions_are_as_many_as_asked_and_unbiased(dim: int) -> None:
    """E[H Hᵀ] = I also where a layer's share is less than its groups, no multiple of them, or all of it."""
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    x = torch.randn(6, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    curvature = gauss_newton(net, x, "diagonal")
    every = [directions(linnet.with_sketch(net, curvature, dim=dim, seed=seed)) for seed in range(200)]
    assert all(H.shape[1] == dim for H in every)
    lengths = torch.stack([H.square().sum(1) for H in every])
    error = lengths.std(0) / 200**0.5
    assert float(((lengths.mean(0) - 1).abs() / error).max()) < 5


def test_a_curvature_without_directions_is_refused() -> None:
    dead = nn.Sequential(nn.Linear(6, 3), nn.ReLU()).double()
    nn.init.constant_(dead[0].bias, -100.0)
    data = torch.randn(9, 6).double(), torch.arange(9) % 3
    with pytest.raises(InputError, match="curvature"):
        linnet.fit(linnet.linearize(dead), data, ridge=1.0, solver=Sketch(3))
    curvature = gauss_newton(dead, data[0], "diagonal")
    with pytest.raises(InputError, match="curvature"):
        linnet.with_sketch(dead, curvature, dim=3, seed=0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with pytest.raises(InputError, match="dim=1"):
        linnet.with_sketch(net, gauss_newton(net, data[0], "diagonal"), dim=1, seed=0)


def test_eigenvalues_of_the_mean_curvature_come_with_the_directions() -> None:
    net, x, _, _ = case("dense")
    G = gauss_newton(net, x, "full")
    small = linnet.with_sketch(net, G, dim=12)
    H, values = directions(small), small.eigenvalues
    assert values is not None
    assert torch.allclose(H.T @ G.dense() @ H / N, torch.diag(values), atol=1e-10)


@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
def test_the_estimate_of_rounding_bounds_the_error_of_float32(ridge: float) -> None:
    """And is no more than some hundred times as large."""
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
    single = linnet.linearize(linnet.with_sketch(net, _of_float32(net, x), dim=60))
    fit = linnet.fit(single, (x, y), ridge=ridge, solver="primal")
    assert fit.module.function.dtype == torch.float32
    whole = linnet.linearize(linnet.with_sketch(net, _of_float32(net, x), dim=60).double())
    exact = linnet.fit(whole, (x.double(), y.double()), ridge=ridge, solver="primal")
    found = linnet.audit.accuracy(fit)
    for error, bound in (
        (float((fit.predict(x) - exact.predict(x.double())).abs().max()), found.predictions),
        (float((fit.loo() - exact.loo()).abs().max()), found.leave_one_out),
    ):
        assert error <= bound <= 500 * error + 1e-5


def _of_float32(net: nn.Module, x: Tensor) -> linnet.Curvature:
    """JᵀJ of a network in float32."""
    found: linnet.Curvature = linnet.curvature(
        net, (x, torch.zeros(len(x), 2)), Gaussian(), structure="ekfac"
    )
    return found


def test_a_sketch_is_made_again_in_float64_where_float32_will_not_do() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    fit = linnet.fit(linnet.linearize(net), (x, x.prod(1, keepdim=True)), ridge=1e-9, solver=Sketch(38))
    assert fit.module.function.dtype == torch.float64
    assert "float64" in fit.summary()["reasons"]["precision"]
    assert float((fit.predict(x) - x.prod(1, keepdim=True)).abs().max()) < 0.2
