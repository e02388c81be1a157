"""linnet.precision: each type beside a float64 oracle, what is left out as it was, scopes that end.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import number_types
from linnet.curvatures import Passes
from linnet.distributed import require_same_arguments, sharing
from linnet.errors import InputError, LinnetError, NumericalError
from linnet.fitting import Sketch
from linnet.likelihoods import Categorical, Gaussian
from linnet.number_types import Precision, current, precision, products_in
from linnet.tangent import tiles
from linnet.tangent.functional import Functional
from linnet.tangent.gram import GramTask, gram, gram_and_own, own_kernels, plan_gram
from tests.fitting.problems import network, peak_bytes, real
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.ranks import one_of_ranks, run_ranks
from tests.refusals import refused

FORMS: tuple[Any, ...] = ("full", "trace", "diagonal", "sum")
ROUNDOFF = 2.0**-9  # of bfloat16: half of the spacing at 1
SINGLE = torch.finfo(torch.float32).eps


class Words(nn.Module):
    """An embedding and layers over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.outer = nn.Embedding(10, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(self.table(ids))).mean(1))
        return out


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: network(20, 40).float(), lambda: real(9, 20, dtype=torch.float32)),
    "convolution": (convolution, lambda: real(9, 1, 4, 4, dtype=torch.float32)),
    "words": (Words, lambda: torch.arange(54).reshape(9, 6) % 10),
}


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float32, examples, and its Jacobian in float64."""
    torch.manual_seed(3)
    model, x = NETS[name][0](), NETS[name][1]()
    twin = NETS[name][0]()
    twin.load_state_dict(model.state_dict())
    return model, x, jacobian_oracle(twin.double(), x.double() if x.is_floating_point() else x)


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and forty examples of three classes."""
    model, x = network(6, 12, seed=seed).float(), real(40, 6, seed=seed, dtype=torch.float32)
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


# --- kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.thinned(3)
def test_a_kernel_of_gradients_in_bfloat16_is_off_by_their_rounding(name: str, form: Any) -> None:
    """At most 4u √(K_aa K_bb) without shared weights; and here with them; never float32's rounding."""
    model, x, j = case(name)
    exact = kernel_oracle(j, form=form)
    with precision(capture="bfloat16"):
        found = linnet.linearize(model).kernel(x, form=form)
    off = float((found.double() - exact).abs().max() / exact.abs().max())
    assert found.dtype == torch.float32
    assert 1e3 * SINGLE < off < 4 * ROUNDOFF


@pytest.mark.parametrize("name", NETS)
def test_rounded_features_make_a_kernel_and_its_blocks(name: str) -> None:
    """What is rounded are features: the kernel has no negative eigenvalue, and its parts agree."""
    model, x, _ = case(name)
    function = Functional(model)
    with precision(capture="bfloat16"):
        whole, own, cross = gram(function, x), own_kernels(function, x), gram(function, x[:2], x)
    values = torch.linalg.eigvalsh(whole.reshape(27, 27).double())
    assert float(values.min()) > -1e-6 * float(values.max())
    size = float(whole.abs().max())
    assert float((whole.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - own).abs().max()) < 1e-6 * size
    assert float((whole[:2] - cross).abs().max()) < 1e-6 * size


def test_rows_in_bfloat16_are_summed_in_float32() -> None:
    """Torch's own product of bfloat16 matrices is rounded to bfloat16; 40,000 columns come in chunks."""
    left, right = real(3, 40_000).bfloat16(), real(4, 40_000, seed=1).bfloat16()
    exact = left.double() @ right.double().T
    found = tiles._product(left, right, None)
    size = (left.double().norm(dim=1)[:, None] * right.double().norm(dim=1)).max()
    assert found.dtype == torch.float32
    assert float((found.double() - exact).abs().max() / size) < 10 * SINGLE
    assert float(((left @ right.T).double() - exact).abs().max() / size) > 100 * SINGLE


@pytest.mark.parametrize("name", NETS)
def test_float64_sums_and_captures_are_closer_to_the_truth(name: str) -> None:
    model, x, j = case(name)
    exact = kernel_oracle(j)
    with precision(sums="float64"):
        summed = linnet.linearize(model).kernel(x)
    with precision(capture="float64"):
        kept = linnet.linearize(model).kernel(x)
    assert summed.dtype == kept.dtype == torch.float64
    for found in (summed, kept):
        assert float((found - exact).abs().max() / exact.abs().max()) < 10 * SINGLE


def test_float64_networks_keep_their_gradients_in_less() -> None:
    model, x = network(20, 40), real(9, 20)
    exact = kernel_oracle(jacobian_oracle(model, x))
    for capture, least, most in (("float32", 1e-10, 4 * SINGLE), ("tf32", 1e-10, 4 * SINGLE)):
        with precision(capture=capture):
            found = linnet.linearize(model).kernel(x)
        assert found.dtype == torch.float64  # so that whoever computes with it meets one type
        assert least < float((found - exact).abs().max() / exact.abs().max()) < most


@pytest.mark.parametrize("name", NETS)
def test_what_is_left_out_changes_no_bit(name: str) -> None:
    model, x, _ = case(name)
    lin = linnet.linearize(model)
    expected = lin.kernel(x)
    with precision():
        assert torch.equal(lin.kernel(x), expected)
    for options in ({"capture": "float32"}, {"capture": "tf32"}, {"sums": "float32"}):
        with precision(**options):  # on the CPU there is no TF32
            assert torch.equal(lin.kernel(x), expected)
    with precision(capture="bfloat16"):
        lin.kernel(x)
    assert torch.equal(lin.kernel(x), expected)  # what was planned for another type is not taken


def test_an_argument_wins() -> None:
    model, x, _ = case("mlp")
    with precision(sums="float64"):
        assert linnet.spectrum.gram(model, x, accumulate="float32").dtype == torch.float32
    with precision(sums="float32"):
        assert linnet.spectrum.gram(model, x, accumulate="float64").dtype == torch.float64


def test_plans_count_the_type() -> None:
    """bfloat16 keeps half of the bytes; the peak stays in the plan, in a tight budget too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 3))
    function, x = Functional(model), real(100, 1, 8, 8, dtype=torch.float32)
    task = GramTask(function, x, None, "full")
    gram(function, x[:4])
    single = dict(plan_gram(task, "1GB").memory.items)["features kept"]
    with precision(capture="bfloat16"):
        gram(function, x[:4])
        half = dict(plan_gram(task, "1GB").memory.items)["features kept"]
        assert half <= 0.51 * single
        for memory in ("1GB", 4_000_000):
            plan = plan_gram(task, memory)
            peak = peak_bytes(lambda memory=memory: gram(function, x, memory=memory))
            assert peak <= 1.2 * plan.memory.peak, f"{peak} of\n{plan.memory}"


def test_a_file_of_another_type_is_refused(tmp_path: Path) -> None:
    model, x, _ = case("mlp")
    file = tmp_path / "k.npy"
    with precision(capture="bfloat16"):
        coarse = linnet.spectrum.gram(model, x, file=file).clone()
    refused(InputError, lambda: linnet.spectrum.gram(model, x, file=file), "k.npy", "other linnet.precision")
    assert torch.equal(torch.from_numpy(np.load(file)), coarse)


# --- fits -------------------------------------------------------------------------------------------


def exact_fit(model: nn.Module, x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Outputs of the linear model on its data and the Jacobian, in float64."""
    twin = network(6, 12).float()
    twin.load_state_dict(model.state_dict())
    j = jacobian_oracle(twin.double(), x.double())
    rows, f0 = j.flatten(0, 1), twin(x.double()).detach()
    target = 15.0 * nn.functional.one_hot(y, 3)
    normal = rows.T @ rows + ridge * torch.eye(rows.shape[1], dtype=torch.float64)
    delta = torch.linalg.solve(normal, rows.T @ (target - f0).reshape(-1))
    return f0 + (rows @ delta).view_as(f0), j


def test_a_fit_that_bfloat16_cannot_answer_is_made_in_float64() -> None:
    model, x, y = problem()
    with precision(capture="bfloat16"):
        fit = linnet.fit(linnet.linearize(model), (x, y), ridge=0.3, solver="dual")
        plain = linnet.fit(linnet.linearize(model.double()), (x.double(), y), ridge=0.3, solver="dual")
        assert torch.allclose(fit.predict(x).double(), plain.predict(x.double()).double(), atol=1e-5)
    assert fit.record.reasons["precision"] == "float64: capture in bfloat16 cannot answer a ridge of 0.3"
    assert fit.module.function.dtype == torch.float64
    assert "capture in bfloat16" in plain.record.reasons["precision"]
    assert fit.summary()["certificate"] < 1e-10


def test_a_fit_that_bfloat16_can_answer_says_how_exact_it_is(tmp_path: Path) -> None:
    """Its certificate is that of the true kernel, inside, outside, and loaded."""
    model, x, y = problem()
    lin = linnet.linearize(model)
    with precision(capture="bfloat16"):
        fit = linnet.fit(lin, (x, y), ridge=1e6, solver="dual")
    certificate = fit.summary()["certificate"]
    beta, kernel = fit.system.beta.double().reshape(-1), lin.kernel(x).double().reshape(120, 120)
    residual = fit.system.residual.double().reshape(-1)
    exact = (kernel @ beta + fit.ridge * beta - residual).norm() / residual.norm()
    assert 1e-8 < certificate == pytest.approx(float(exact), rel=0.05)
    assert fit.module.function.dtype == torch.float32
    assert fit.record.reasons["precision"].startswith("capture in bfloat16; an entry of the kernel is off by")
    fit.save(tmp_path)
    loaded = linnet.load_fit(tmp_path, model)
    assert loaded.module.function.precision == Precision(capture="bfloat16")
    assert loaded.summary()["certificate"] == pytest.approx(certificate, rel=0.05)
    torch.testing.assert_close(loaded.predictive(x).variance, fit.predictive(x).variance)
    more = loaded.update((x[:3], y[:3]))
    assert more.module.function.precision == Precision(capture="bfloat16")


def test_later_answers_keep_the_types_of_the_fit() -> None:
    model, x, y = problem()
    fit = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0)
    gp = linnet.TangentGP(model, Gaussian(variance=0.3)).fit(x, x[:, :3])
    expected = fit.predictive(x[:5]).variance, gp.predictive(x[:5]).variance
    fit, gp = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0), gp.fit(x, x[:, :3])
    with precision(capture="bfloat16"):
        found = fit.predictive(x[:5]).variance, gp.predictive(x[:5]).variance
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


@pytest.mark.parametrize("make", ["process", "adapted"])
def test_equations_that_nobody_checks_take_no_coarse_types(make: str) -> None:
    model, x, y = problem()

    def solved() -> Tensor:
        if make == "process":
            return linnet.TangentGP(model, Gaussian(variance=0.3)).fit(x, x[:, :3]).predictive(x).variance
        return linnet.adapt(model, (x, y)).predict(x)

    expected = solved()
    with precision(capture="bfloat16", sums="float32"):
        assert torch.equal(solved(), expected)


@pytest.mark.parametrize("solver", ["primal", "sketch"])
def test_normal_equations_summed_in_float32(solver: str) -> None:
    """The certificate is that of the true equations, and a ridge that float32 cannot answer is refitted."""
    model, x, y = problem()
    asked: Any = Sketch(dim=20) if solver == "sketch" else solver
    expected = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0, solver=asked)
    with precision(sums="float32"):
        fit = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0, solver=asked)
        small = linnet.fit(linnet.linearize(model), (x, y), ridge=1e-5, solver=asked)
    assert fit.record.reasons["precision"] == "sums in float32"
    assert not torch.equal(fit.system.normal, expected.system.normal)
    size = expected.system.normal.diagonal()
    off = (fit.system.normal - expected.system.normal).abs() / (size[:, None] * size).sqrt()
    assert float(off.square().mean().sqrt()) < SINGLE  # a quarter of what the check of rounding assumes
    assert expected.summary()["certificate"] < 1e-12 < fit.summary()["certificate"] < 1e-5
    assert float((fit.predict(x) - expected.predict(x)).abs().max()) < 1e-3
    exact = linnet.fit(linnet.linearize(model), (x, y), ridge=1e-5, solver=asked)
    assert float((small.predict(x).double() - exact.predict(x).double()).abs().max()) < 1e-3 * 15.0
    if solver == "primal":  # of twenty directions none is small
        assert small.record.reasons["precision"] == "float64: sums in float32 cannot answer a ridge of 1e-05"
        outputs, _ = exact_fit(model, x, y, 10.0)
        assert float((fit.predict(x).double() - outputs).abs().max()) < 1e-3
        outputs, _ = exact_fit(model, x, y, 1e-5)
        assert float((small.predict(x).double() - outputs).abs().max()) < 1e-4


def test_fits_by_products_with_the_jacobian_take_no_coarse_kernel() -> None:
    model, x, y = problem()
    for solver in ("cg", "primal"):
        expected = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0, solver=solver).predict(x)
        with precision(capture="bfloat16"):
            fit = linnet.fit(linnet.linearize(model), (x, y), ridge=10.0, solver=solver)
        assert torch.equal(fit.predict(x), expected)
        assert "precision" not in fit.record.reasons


def test_a_cross_entropy_fit_is_checked_too() -> None:
    model, x, y = problem()
    with precision(capture="bfloat16"):
        fit = linnet.fit(linnet.linearize(model), (x, y), "cross-entropy", ridge=1e-3, solver="dual")
    exact = linnet.fit(linnet.linearize(model.double()), (x.double(), y), "cross-entropy", ridge=1e-3)
    assert "capture in bfloat16 cannot answer" in fit.record.reasons["precision"]
    assert float((fit.predict(x).double() - exact.predict(x.double()).double()).abs().max()) < 1e-3


# --- curvatures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
@pytest.mark.thinned(2)
def test_sums_over_many_batches_in_float64(structure: Any) -> None:
    """A hundred and twenty batches: float32 rounds every one of their sums, float64 none."""
    model = network(3, 4).float()
    x, y = real(120, 3, dtype=torch.float32), torch.arange(120) % 3
    one = Passes(block=1)

    def dense(**options: Any) -> Tensor:
        return linnet.curvature(model, (x, y), Categorical(), structure, "exact", **options).dense().double()

    twin = network(3, 4).float().double()
    exact = linnet.curvature(twin, (x.double(), y), Categorical(), structure, "exact").dense()
    plain = dense(passes=one)
    with precision(sums="float64"):
        found = dense(passes=one)
    with precision(capture="float32", sums="float32", decompositions="float64"):
        assert torch.equal(dense(passes=one), plain)
    off, better = (float((one - exact).norm() / exact.norm()) for one in (plain, found))
    assert better < 2 * SINGLE
    assert better < off / 2


def test_curvature_plans_count_the_totals() -> None:
    model, x, y = problem()
    with precision(sums="float64"), pytest.raises(LinnetError, match="sums in float64"):
        linnet.curvature(model, (x, y), Categorical(), "full", passes=Passes(memory="20KB"))


# --- scopes -----------------------------------------------------------------------------------------


def test_scopes_nest_and_end_with_an_exception() -> None:
    with precision(capture="bfloat16") as outer:
        assert outer == Precision("bfloat16")
        with contextlib.suppress(KeyError), precision(sums="float64", capture="float32"):
            assert current() == Precision("float32", "float64")
            raise KeyError
        with precision(decompositions="float32"):
            assert current() == Precision("bfloat16", None, "float32")
        assert current() == outer
    assert current() == Precision()


def test_threads_have_types_of_their_own() -> None:
    seen: list[Precision] = []
    with precision(sums="float64"):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [Precision()]


@pytest.mark.parametrize("name", ["capture", "sums", "decompositions"])
@pytest.mark.parametrize("value", ["float16", "double", "", torch.bfloat16, 3])
def test_other_types_are_refused_before_anything_is_entered(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name}.*Expected.*float32.*leave {name}= out"):
        precision(**{name: value})
    assert current() == Precision()


CUDA = torch.device("cuda")


def switches() -> Any:
    return number_types._switches(), torch.get_float32_matmul_precision()


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_tf32_is_switched_and_switched_back(before: str) -> None:
    """Torch's switches can be set without such a processor; they are of the whole process."""
    start = switches()
    try:
        torch.set_float32_matmul_precision(before)
        known = switches()
        for capture, on in (("tf32", True), ("bfloat16", True), ("float32", False)):
            with contextlib.suppress(KeyError), products_in(Precision(capture), CUDA):
                assert torch.backends.cuda.matmul.allow_tf32 is on
                assert torch.backends.cudnn.allow_tf32 is on
                raise KeyError
            assert switches() == known
        for types, device in ((Precision(), CUDA), (Precision("tf32"), torch.device("cpu"))):
            with products_in(types, device):
                assert switches() == known
        first, second = products_in(Precision("tf32"), CUDA), products_in(Precision("float32"), CUDA)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # as threads may end
        assert not torch.backends.cuda.matmul.allow_tf32
        second.__exit__(None, None, None)
        assert switches() == known
    finally:
        torch.set_float32_matmul_precision("highest")
        number_types._restore(start[0])
    assert switches() == start


@pytest.mark.parametrize("what", ["kernel", "own kernels", "with own", "curvature"])
def test_gradients_are_formed_and_multiplied_inside_the_switches(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Precision, torch.device]] = []

    @contextlib.contextmanager
    def noted(types: Precision, device: torch.device) -> Iterator[None]:
        seen.append((types, device))
        yield

    monkeypatch.setattr("linnet.tangent.gram.products_in", noted)
    monkeypatch.setattr("linnet.curvatures.accumulate.products_in", noted)
    model, x, y = problem()
    function = Functional(model)
    calls: dict[str, Callable[[], Any]] = {
        "kernel": lambda: gram(function, x),
        "own kernels": lambda: own_kernels(function, x),
        "with own": lambda: gram_and_own(function, x, x[:3]),
        "curvature": lambda: linnet.curvature(model, (x, y), Categorical(), "kfac", "exact"),
    }
    with precision(capture="tf32"):
        calls[what]()
    assert set(seen) == {(Precision("tf32"), torch.device("cpu"))}


@pytest.mark.parametrize("axes", [2, 3])
def test_products_on_nvidias_processors_are_torchs_widening_ones(axes: int) -> None:
    """Only the operation's name and arguments can be tried without one."""
    if not tiles.WIDENING:
        pytest.skip("torch has no such product yet")
    name = "bmm" if axes == 3 else "mm"
    schema = str(getattr(torch.ops.aten, name).dtype._schema)
    assert schema == f"aten::{name}.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"


def test_what_tf32_leaves_of_an_entry() -> None:
    """Ten bits on NVIDIA's processors where it is on, by the caller or by torch; elsewhere float32's."""
    cpu = torch.device("cpu")
    assert Precision("tf32").eps(torch.float32, CUDA) == 2.0**-10
    assert Precision("float32").eps(torch.float32, CUDA) == SINGLE
    assert Precision("tf32").eps(torch.float32, cpu) == Precision().eps(torch.float32, cpu) == SINGLE
    assert Precision("bfloat16").eps(torch.float64, cpu) == 2.0**-7
    start = switches()
    assert Precision().eps(torch.float32, CUDA) == 2.0**-10  # torch's own default in convolutions
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert Precision().eps(torch.float32, CUDA) == SINGLE
    finally:
        number_types._restore(start[0])
    assert Precision().eps(torch.float64, CUDA) == torch.finfo(torch.float64).eps


# --- several processes ------------------------------------------------------------------------------


def shared_kernels() -> list[Tensor]:
    """Kernels, whose features are exchanged."""
    model, x, _ = case("convolution")
    with sharing("kernels"), precision(capture="bfloat16"):
        return [linnet.linearize(model).kernel(x), linnet.linearize(model).kernel(x, form="trace")]


def shared_curvature() -> Tensor:
    """A sum over the examples of all processes."""
    model, x, y = problem()
    with precision(sums="float64"):
        return linnet.curvature(model, (x, y), Categorical(), "kfac", "exact").dense()


def shared_average(rank: int, world: int) -> Tensor:
    """A running sum to which every process adds a part."""
    model, x, y = problem()
    with precision(sums="float64"):
        made = linnet.RunningCurvature(model, Categorical(), "diagonal", "exact", decay=1.0)
        made.add(x[rank::world], y[rank::world], shared=world > 1)
        return made.curvature().diagonal()


def one_rank(rank: int, world: int, folder: Path) -> None:
    """What a rank computes and is told."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, world, folder):
        found = [*shared_kernels(), shared_curvature(), shared_average(rank, world)]
        torch.save(found, folder / f"{rank}.pt")
        told = pytest.raises(InputError, match=r"linnet\.precision")
        with precision(capture="bfloat16" if rank else None), sharing("a call"), told:
            require_same_arguments({"ridge": 1.0})


@pytest.mark.long
def test_two_processes_have_the_numbers_of_one_and_one_policy(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path)
    alone = [*shared_kernels(), shared_curvature(), shared_average(0, 1)]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for expected, first, second in zip(alone, *found, strict=True):
        assert torch.equal(first, second)
        assert float((first - expected).abs().max()) < 1e-6 * float(expected.abs().max())


# --- eigenvalues ------------------------------------------------------------------------------------


def test_a_ridge_path_in_float32_has_no_ridge_near_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the solution at the ridge that is chosen is as exact as any."""
    monkeypatch.setattr("linnet.linalg.factorize._LARGE", 100)
    model, x, y = problem()
    plain = linnet.fit(linnet.linearize(model), (x, y), ridge="loo", solver="dual")
    with precision(decompositions="float32"):
        fit = linnet.fit(linnet.linearize(model), (x, y), ridge="loo", solver="dual")
        path, exact = fit.path(), plain.path(fit.path().ridges)
    largest = float(torch.linalg.eigvalsh(fit.system.dual.kernel).max())
    assert float(path.ridges.min()) >= 100 * SINGLE * largest
    assert fit.ridge == pytest.approx(plain.ridge)
    assert torch.allclose(path.loo_error, exact.loo_error, rtol=1e-2)
    assert not torch.equal(path.loo_error, exact.loo_error)
    assert fit.summary()["certificate"] < 1e-12
    assert fit.record.reasons["precision"] == "decompositions in float32"
    with pytest.raises(NumericalError, match="ridge"):
        fit.path([1e-12])


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
