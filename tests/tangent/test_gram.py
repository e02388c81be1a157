"""Gram matrices in tiles: any blocking, any budget, interrupted or not, gives the same kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet.errors import MemoryBudgetError
from linnet.tangent import gram as gram_module
from linnet.tangent.functional import Findings, Functional
from linnet.tangent.gram import GramTask, gram, own_kernels, plan_gram
from linnet.tangent.jacobian import jacobian
from tests import zoo
from tests.fitting.problems import near, network, peak_bytes, real
from tests.hangs import HANGS
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.refusals import refused

OUTPUTS: tuple[Any, ...] = ("full", "trace", "diagonal", "sum")
gram_file = sys.modules["linnet.tangent.gram"]


def convolutional() -> nn.Module:
    """Shared weights of every kind: convolution, norm, linear over positions, embedding of nothing."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.Tanh(),
        nn.Conv2d(3, 2, 3),
        nn.Flatten(),
        nn.Linear(8, 2),
    ).double()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (network, (3,)),
    "conv": (convolutional, (1, 4, 4)),
}
CACHE: dict[str, Any] = {}


def case(name: str) -> tuple[Functional, Tensor, Tensor, Tensor, Tensor]:
    """A function, eleven and seven examples, and their Jacobians."""
    if name not in CACHE:
        build, shape = NETS[name]
        model, x1, x2 = build(), real(11, *shape, seed=1), real(7, *shape, seed=2)
        CACHE[name] = Functional(model), x1, x2, jacobian_oracle(model, x1), jacobian_oracle(model, x2)
    return CACHE[name]


def mirrored(kernel: Tensor) -> Tensor:
    """K(x2, x1)."""
    return kernel.permute(2, 3, 0, 1) if kernel.ndim == 4 else kernel.transpose(0, 1)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize(("block", "product"), [(1, 1), (2, 3), (3, 4), (5, 7), (4, 64), (64, 2)])
@pytest.mark.thinned(6)
def test_any_blocking(
    name: str, outputs: Any, block: int, product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x1, x2, j1, j2 = case(name)
    function.cache.kernels.clear()
    monkeypatch.setattr(gram_file, "CAPTURE", block)
    monkeypatch.setattr(gram_file, "PRODUCT", product * 3)
    monkeypatch.setattr(gram_file, "SMALLEST_PRODUCT", 1)
    square = gram(function, x1, form=outputs)
    near(square, kernel_oracle(j1, form=outputs))
    assert torch.equal(square, mirrored(square))
    near(gram(function, x1, x2, form=outputs), kernel_oracle(j1, j2, outputs))


def smallest(task: GramTask, to_disk: bool = False) -> int:
    """The smallest budget that suffices, by bisection."""
    low, high = 1, 10**8
    while low + 1 < high:
        middle = (low + high) // 2
        fits = (plan := plan_gram(task, middle, to_disk).memory).peak <= plan.budget
        low, high = (low, middle) if fits else (middle, high)
    return high


@settings(max_examples=12)
@given(extra=st.integers(0, 60_000), name=st.sampled_from(sorted(NETS)), outputs=st.sampled_from(OUTPUTS))
@pytest.mark.long
def test_any_budget(extra: int, name: str, outputs: Any) -> None:
    """From the least that suffices on: stationary blocks stay while others stream past them."""
    function, x1, x2, j1, j2 = case(name)
    for task, expected in (
        (GramTask(function, x1, None, outputs), kernel_oracle(j1, form=outputs)),
        (GramTask(function, x1, x2, outputs), kernel_oracle(j1, j2, outputs)),
    ):
        budget = smallest(task) + extra
        kernel = gram(function, x1, task.x2, form=outputs, memory=budget)
        near(kernel, expected)
        if task.x2 is None:
            assert torch.equal(kernel, mirrored(kernel))


@pytest.mark.parametrize("name", NETS)
def test_small_budgets_hold_fewer_examples_and_never_fewer_than_one(name: str) -> None:
    function, x1, *_ = case(name)
    task = GramTask(function, x1, None, "full")
    least = smallest(task)
    plans = [plan_gram(task, budget) for budget in (least, 2 * least, 10**8)]
    assert 1 <= plans[0].sizes.hold < 11
    assert plans[0].sizes.hold <= plans[1].sizes.hold <= plans[2].sizes.hold == 11
    assert plans[0].sizes.capture <= plans[2].sizes.capture
    for plan, budget in zip(plans, (least, 2 * least, 10**8), strict=True):
        assert plan.memory.peak <= budget


def test_symmetry_to_the_bit_in_float32_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Functional(network().float())
    x = real(23, 3, dtype=torch.float32)
    for block, product, memory in ((3, 5, None), (7, 2, None), (64, 64, 30_000)):
        monkeypatch.setattr(gram_file, "CAPTURE", block)
        monkeypatch.setattr(gram_file, "PRODUCT", product * 3)
        monkeypatch.setattr(gram_file, "SMALLEST_PRODUCT", 1)
        for outputs in OUTPUTS:
            kernel = gram(function, x, form=outputs, memory=memory)
            assert torch.equal(kernel, mirrored(kernel))


# --- the plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.thinned(3)
def test_the_plan_covers_the_features_that_are_held(
    name: str, outputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x1, *_ = case(name)
    task = GramTask(function, x1, None, outputs)
    held: list[int] = []
    hold = gram_file._hold

    def weighed(*args: Any) -> Any:
        features = hold(*args)
        held.append(features.nbytes)
        return features

    monkeypatch.setattr(gram_file, "_hold", weighed)
    for budget in (smallest(task), 10**8):
        held.clear()
        plan = plan_gram(task, budget)
        kernel = gram(function, x1, form=outputs, memory=budget)
        planned = dict(plan.memory.items)
        assert 0 < max(held) <= planned["features kept"]
        assert planned["kernel"] == kernel.nbytes


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 5))


def image() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


@pytest.mark.parametrize(("build", "shape"), [(wide, (30,)), (image, (3, 12, 12))])
@pytest.mark.parametrize("memory", ["4MB", "60MB"])
@pytest.mark.thinned(2)
def test_measured_memory_stays_within_the_plan(
    build: Callable[[], nn.Module], shape: tuple[int, ...], memory: str
) -> None:
    """Peak of live allocations at most 1.2 times what the plan says, in a tight budget and a roomy one."""
    function = Functional(build())
    x = real(120, *shape, dtype=torch.float32)
    gram(function, x[:4])  # what is found out once for each network is not part of the operation
    plan = plan_gram(GramTask(function, x, None, "full"), memory)
    peak = peak_bytes(lambda: gram(function, x, memory=memory))
    assert peak <= 1.2 * plan.memory.peak, f"{peak} of\n{plan.memory}"


def test_the_plan_in_words() -> None:
    function, x1, *_ = case("mlp")
    plan = plan_gram(GramTask(function, x1, None, "full"), "1MB")
    text = str(plan.memory)
    assert "kernel of 11 × 11 examples" in text
    assert (plan.sizes.capture, plan.sizes.hold) == (11, 11)
    assert "budget of 1.00 MB" in text


def test_a_budget_too_small_names_the_figure_and_two_ways_out() -> None:
    function, x1, *_ = case("mlp")
    task = GramTask(function, x1, None, "full")
    least = smallest(task)
    gram(function, x1, memory=least)
    error = refused(
        MemoryBudgetError, lambda: gram(function, x1, memory=100), "11 × 11 examples", "would need", "100 B"
    )
    assert "file='kernel.npy'" in str(error)
    assert 'form="trace"' in str(error)


# --- precision --------------------------------------------------------------------------------------


def test_a_square_takes_each_pair_once() -> None:
    pairs = gram_file._on_diagonal(3, 14, 2)
    seen = torch.zeros(14, 14)
    for (a, b), (c, d) in pairs:
        seen[a:b, c:d] += 1
        if (a, b) != (c, d):
            seen[c:d, a:b] += 1
    assert torch.equal(seen[3:, 3:], torch.ones(11, 11))
    assert sum((b - a) * (d - c) for (a, b), (c, d) in pairs) < 0.65 * 121


def test_accumulation_in_float64_is_closer_to_the_truth() -> None:
    """Gradients of very different size: float32 loses the small ones in the sum over parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 1))
    with torch.no_grad():
        model[0].weight[::7] *= 300.0
        model[2].weight[:, 1::3] *= 100.0
    x = torch.randn(6, 40)
    function = Functional(model)
    truth = kernel_oracle(jacobian(function, x).double())  # of the rows as they are, rounded to float32
    errors = {}
    for accumulate in ("float32", "float64"):
        function.cache = Findings()
        kernel = gram(function, x, accumulate=accumulate)
        errors[accumulate] = ((kernel.double() - truth).norm() / truth.norm()).item()
    assert gram(function, x, accumulate="float64").dtype == torch.float64
    assert errors["float64"] < errors["float32"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_have_float32_kernels(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    x = real(5, 3, dtype=dtype)
    kernel = gram(Functional(model), x)
    assert kernel.dtype == torch.float32
    near(kernel, kernel_oracle(jacobian_oracle(model, x)), 3e-2)


# --- interruptions ----------------------------------------------------------------------------------


class Interrupted(Exception):
    """Stands for Ctrl-C in the middle."""


class Counting:
    """Counts examples differentiated, and can break after some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> None:
        self.examples, self.stop_after = 0, stop_after
        capture, in_parts = gram_file.capture, gram_file.capture_parts_for_products

        def counted(function: Functional, x: Any, outputs: Any) -> Any:
            captured = capture(function, x, outputs)
            self.count(captured.n)
            return captured

        def counted_parts(function: Functional, x: Any, outputs: Any, columns: int) -> Any:
            self.count(len(x))
            yield from in_parts(function, x, outputs, columns)

        monkeypatch.setattr(gram_file, "capture", counted)
        monkeypatch.setattr(gram_file, "capture_parts_for_products", counted_parts)

    def count(self, examples: int) -> None:
        self.examples += examples
        if self.stop_after is not None and self.examples > self.stop_after:
            raise Interrupted


def streaming(name: str = "mlp", x2: bool = False) -> tuple[Functional, Tensor, Tensor | None, int]:
    """A task whose features do not fit, so that it has several steps."""
    function, x1, other, *_ = case(name)
    second = other if x2 else None
    task = GramTask(function, x1, second, "full")
    budget = smallest(task, to_disk=True)
    assert plan_gram(task, budget, to_disk=True).sizes.hold < 6
    return function, x1, second, budget


@pytest.mark.parametrize("x2", [False, True])
def test_an_interrupted_run_resumes(x2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x, second, budget = streaming(x2=x2)
    run = lambda file: gram(function, x, second, memory=budget, file=tmp_path / file)  # noqa: E731
    with monkeypatch.context() as patch:
        count = Counting(patch)
        expected = run("whole.npy").clone()
        total = count.examples
    with monkeypatch.context() as patch:
        Counting(patch, stop_after=2 * total // 3)
        with pytest.raises(Interrupted):
            run("k.npy")
    assert {p.name for p in tmp_path.glob("k.*")} == {"k.npy.partial", "k.npy.steps.json"}
    with monkeypatch.context() as patch:
        count = Counting(patch)
        kernel = run("k.npy")
        assert 0 < count.examples < 0.7 * total, "finished steps were computed again"
    assert torch.equal(kernel, expected)
    assert {p.name for p in tmp_path.glob("k.*")} == {"k.npy", "k.npy.made.json"}
    assert np.load(tmp_path / "k.npy").shape == tuple(expected.shape)


def test_a_run_whose_features_fit_resumes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are most of the work then: those that are done must not be done again."""
    function, x1, *_ = case("mlp")
    monkeypatch.setattr(gram_file, "PRODUCT", 2 * 3)
    monkeypatch.setattr(gram_file, "SMALLEST_PRODUCT", 1)
    function.cache.kernels.clear()
    tile, done = gram_file.kernel_tile, [0]

    def counted(*args: Any) -> Tensor:
        done[0] += 1
        if done[0] == stop:
            raise Interrupted
        return tile(*args)

    stop = 0
    monkeypatch.setattr(gram_file, "kernel_tile", counted)
    expected = gram(function, x1)
    total, stop = done[0], 2 * done[0] // 3
    assert total > 10
    done[0] = 0
    with pytest.raises(Interrupted):
        gram(function, x1, file=tmp_path / "k.npy")
    done[0], stop = 0, 0
    assert torch.equal(gram(function, x1, file=tmp_path / "k.npy"), expected)
    assert done[0] < 0.7 * total, "finished products were computed again"


CHANGES: dict[str, Callable[[], tuple[Functional, Tensor]]] = {
    "weights": lambda: (Functional(network(seed=5)), case("mlp")[1]),
    "data": lambda: (case("mlp")[0], case("mlp")[1] + 1.0),
    "parameters": lambda: (Functional(network(), ["0.weight", "0.bias", "2.weight"]), case("mlp")[1]),
    "output": lambda: (Functional(network(), output=lambda f: 2 * f), case("mlp")[1]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thinned(2)
def test_another_task_starts_anew(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old rows must not survive in the new matrix, nor, later on, the new ones in the old."""
    function, x, _, budget = streaming()
    other, other_x = CHANGES[change]()
    expected, other_expected = gram(function, x), gram(other, other_x)
    assert not torch.allclose(expected, other_expected)
    file = tmp_path / "k.npy"

    def interrupted(after: int, f: Functional, z: Tensor) -> None:
        with monkeypatch.context() as patch:
            Counting(patch, stop_after=after)
            with pytest.raises(Interrupted):
                gram(f, z, memory=budget, file=file)

    interrupted(30, function, x)
    near(gram(other, other_x, memory=budget, file=file), other_expected)
    file.unlink()
    interrupted(30, function, x)
    interrupted(1, other, other_x)  # broken off before its first step was done
    near(gram(function, x, memory=budget, file=file), expected)


@pytest.mark.long
def test_a_broken_record_or_matrix_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x, _, budget = streaming()
    expected, file = gram(function, x), tmp_path / "k.npy"
    for name, content in (
        ("k.npy.steps.json", b"{"), ("k.npy.steps.json", b"[]"), ("k.npy.steps.json", None),
        ("k.npy.partial", b"\x93NUMPY"), ("k.npy.partial", None),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            Counting(patch, stop_after=30)
            with pytest.raises(Interrupted):
                gram(function, x, memory=budget, file=file)
        path = tmp_path / name
        path.unlink() if content is None else path.write_bytes(content)
        near(gram(function, x, memory=budget, file=file), expected)
        file.unlink()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from tests.tangent.test_gram import streaming
gram_file = sys.modules["linnet.tangent.gram"]
sys.modules["linnet.tangent.store"].RECORD_SECONDS = 0.0
function, x, _, budget = streaming()
features, seen = gram_file._features, [0]
def dying(*args):
    seen[0] += 1
    if seen[0] == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    return features(*args)
gram_file._features = dying
gram_file.gram(function, x, memory=budget, file=Path(sys.argv[1]))
"""


@pytest.mark.long
def test_a_killed_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        "OMP_NUM_THREADS": "1",
    }
    file = tmp_path / "k.npy"
    command = [sys.executable, "-c", KILLED, str(file)]
    died = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=HANGS)
    assert died.returncode == -signal.SIGKILL, died.stderr
    done = json.loads((tmp_path / "k.npy.steps.json").read_text())["done"]
    assert done
    assert not file.exists()
    function, x, _, budget = streaming()
    whole = Counting(monkeypatch)
    expected = gram(function, x, memory=budget, file=tmp_path / "whole.npy").clone()
    total = whole.examples
    whole.examples = 0
    assert torch.equal(gram(function, x, memory=budget, file=file), expected)
    assert 0 < whole.examples < total


def test_the_kernel_of_a_linearization_is_the_same_gram() -> None:
    function, x1, x2, *_ = case("mlp")
    lin = linnet.Linearized(function)
    torch.testing.assert_close(lin.kernel(x1, x2), gram(function, x1, x2))
    torch.testing.assert_close(lin.kernel(x1, form="trace", memory="1MB"), gram(function, x1, form="trace"))
    assert gram_module is not None


# --- many outputs -----------------------------------------------------------------------------------


def many_outputs() -> tuple[Functional, Tensor, Tensor, Tensor, Tensor]:
    """A network of 24 outputs, six and four examples, and their Jacobians."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 24)).double()
    x1, x2 = real(6, 3, seed=1), real(4, 3, seed=2)
    return Functional(model), x1, x2, jacobian_oracle(model, x1), jacobian_oracle(model, x2)


@pytest.mark.parametrize("outputs", ["trace", "diagonal"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_outputs_come_in_parts_where_that_is_cheaper_than_other_passes(outputs: Any) -> None:
    """In float64: the sum over all parts of the outputs is the kernel, on both sides of the diagonal."""
    function, x1, x2, j1, j2 = many_outputs()
    seen = set()
    for second, expected in ((None, kernel_oracle(j1, form=outputs)), (x2, kernel_oracle(j1, j2, outputs))):
        task = GramTask(function, x1, second, outputs)
        least = smallest(task)
        for budget in (least, least + 1000, 2 * least, 10**8):
            plan = plan_gram(task, budget)
            seen.add(len(plan.parts))
            assert plan.parts[0][0] == 0
            assert plan.parts[-1][1] == 24
            assert plan.memory.peak <= budget
            kernel = gram(function, x1, second, form=outputs, memory=budget)
            near(kernel, expected)
            if second is None:
                assert torch.equal(kernel, mirrored(kernel))
    assert 1 in seen
    assert max(seen) > 2


def test_parts_need_less_than_all_outputs_at_once(tmp_path: Path) -> None:
    """A file is written tile by tile and takes all outputs at once; so do kernels between outputs."""
    function, x1, *_ = many_outputs()
    whole, apart = (smallest(GramTask(function, x1, None, form)) for form in ("full", "trace"))
    assert apart < whole / 2
    on_disk = plan_gram(GramTask(function, x1, None, "trace"), apart, to_disk=True)
    assert on_disk.parts == [(0, 24)]
    with pytest.raises(MemoryBudgetError, match="trace"):
        gram(function, x1, form="trace", memory=apart, file=tmp_path / "k.npy")


@pytest.mark.long
def test_own_traces_come_with_the_kernel_in_parts() -> None:
    function, x1, x2, j1, j2 = many_outputs()
    task = GramTask(function, x1, x2, "trace")
    budget = smallest(task)
    assert len(plan_gram(task, budget).parts) > 1
    kernel, own = gram_file.gram_and_own(function, x1, x2, memory=budget)
    near(
        kernel,
        kernel_oracle(j1, j2, "trace"),
    )
    near(own, kernel_oracle(j1, form="trace").diagonal())


def test_tiles_of_summed_outputs_do_not_shrink_with_their_number() -> None:
    """A product of a trace kernel has one row an example, one of the full kernel one an output."""
    function, x1, *_ = many_outputs()
    x = x1.repeat(100, 1)
    products = {form: plan_gram(GramTask(function, x, None, form), "2GB").sizes.product for form in OUTPUTS}
    assert products["trace"] == products["diagonal"] == products["sum"] > 5 * products["full"]


def test_fifty_thousand_outputs_are_refused_before_anything_is_made() -> None:
    """Cotangents for three examples alone would be 30 GB."""
    model = nn.Linear(2, 50_257)
    function, x = Functional(model), torch.randn(3, 2)
    with pytest.raises(MemoryBudgetError, match='form="trace"'):
        gram(function, x, memory="100MB")
    assert peak_bytes(lambda: plan_gram(GramTask(function, x, None, "full"), "100MB")) < 10**7
    summed = gram(function, x, form="sum", memory="100MB")
    near(summed.double(), 50_257 * (x.double() @ x.double().T + 1), 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "mlp-tanh",
        "lenet",
        "resnet-batchnorm",
        "vit-mha",
        "tied-embedding",
        "lstm",
        "shared-module",
        "decoder",
    ],
)
def test_own_kernels_are_the_diagonal_blocks(name: str) -> None:
    lin, x = zoo.linearized(name), zoo.case(name).animal.feed(5)
    wanted = lin.kernel(x).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    zoo.assert_near(own_kernels(lin.function, x), wanted)
