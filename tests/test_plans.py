"""Plans are made before what they would prevent: peaks measured in processes of their own, and refusals."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.app import cli
from linnet.errors import MemoryBudgetError
from linnet.fitting.head import with_head
from linnet.likelihoods import Categorical
from linnet.linalg import random as random_numbers
from linnet.tangent.capture import capture, hollow_capture
from linnet.tangent.features import Footprint, outline, treatment_within
from linnet.tangent.functional import Functional
from linnet.tangent.gram import GramTask, gram, plan_gram
from linnet.tangent.preflight import preflight
from linnet.tangent.tiles import captured_examples
from tests.curvatures.side_by_side import curvature_of
from tests.grids import grid
from tests.hangs import HANGS
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.zoo import assert_near

MEASURED = """
import resource, sys, torch
from torch import nn
import linnet
from linnet.curvatures import Passes
from linnet.errors import MemoryBudgetError
from linnet.tangent.preflight import preflight

what, network, budget = sys.argv[1:]
torch.manual_seed(0)
if network == "wide":
    net, x = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 300)), torch.randn(10, 512)
else:
    net, x = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100),
    ), torch.randn(10, 3, 32, 32)
data = x, torch.arange(10)
meaning = linnet.likelihoods.Categorical()
lin = linnet.linearize(net)
net(x[:1]).sum().backward()  # what torch takes for itself
passes = Passes(memory=budget)
work = {
    "preflight": lambda: preflight(net, x, memory=budget),
    "kernel": lambda: lin.kernel(x, memory=budget),
    "trace": lambda: lin.kernel(x, form="trace", memory=budget),
    "fit": lambda: linnet.fit(lin, data, ridge=1.0, memory=budget),
    "kfac": lambda: linnet.curvature(net, data, meaning, structure="kfac", passes=passes),
    "diagonal": lambda: linnet.curvature(net, data, meaning, structure="diagonal", passes=passes),
    "laplace": lambda: linnet.Laplace(net, meaning, structure="diagonal", passes=passes)
        .fit(data).predictive(x[:2], memory=budget),
}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    work[what]()
    print("done")
except MemoryBudgetError as error:
    print("refused", error)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
FAST = [("preflight", "images"), ("kernel", "wide"), ("kfac", "wide")]
SLOW = [
    (what, network)
    for what in ("preflight", "kernel", "trace", "fit", "kfac", "diagonal", "laplace")
    for network in ("wide", "images")
    if (what, network) not in FAST
]


@pytest.mark.parametrize(
    ("what", "network"), [*FAST, *(pytest.param(*case, marks=pytest.mark.long) for case in SLOW)]
)
@pytest.mark.parametrize("budget", grid((60_000_000, 200_000_000), (60_000_000,)))
@pytest.mark.thinned(2)
def test_a_process_stays_within_its_budget(what: str, network: str, budget: int) -> None:
    """The high-water mark grows by at most 1.25 times the budget and what is found out once of a network."""
    command = [sys.executable, "-c", MEASURED, what, network, str(budget)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
    *_, outcome, growth = ran.stdout.strip().splitlines()
    assert int(growth) <= 1.25 * budget + 150_000_000, ran.stdout
    assert outcome.startswith("done") or budget == 60_000_000, ran.stdout


LIMITED = """
import resource, sys, torch
from torch import nn
import linnet
net, x = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 40)), torch.randn(500, 64)
lin = linnet.linearize(net)
lin.kernel(x[:2])
from pathlib import Path
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmSize"].split()[0]) * 1024 + 600_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
work = {
    "kernel": lambda: lin.kernel(x),
    "jacobian": lambda: lin.jacobian(x),
    "full": lambda: linnet.curvature(net, (x, torch.arange(500) % 40), linnet.likelihoods.Categorical(),
                                     structure="full"),
}
for name, call in work.items():
    try:
        call()
        print(name, "ran")
    except linnet.errors.MemoryBudgetError as error:
        print(name, "refused", error)
"""


@pytest.mark.long
def test_a_limit_of_the_process_is_planned_for() -> None:
    """600 MB of address space: a kernel of 1.6 GB, a Jacobian of 3.4 GB and a matrix of 7 GB are refused."""
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    lines = ran.stdout.strip().splitlines()
    assert [line.split()[:2] for line in lines] == [[w, "refused"] for w in ("kernel", "jacobian", "full")]
    assert all("the memory budget" in line for line in lines)


# --- many outputs -----------------------------------------------------------------------------------


@pytest.fixture
def many() -> Functional:
    """A network with as many outputs as a language model has words."""
    torch.manual_seed(0)
    return Functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 50_257)))


def grown(call: Callable[[], Any]) -> int:
    """Bytes by which the high-water mark of this process grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def refused(call: Callable[[], Any], *parts: str) -> None:
    """The call is refused with words, before it takes memory."""

    def caught() -> None:
        with pytest.raises(MemoryBudgetError) as error:
            call()
        for part in parts:
            assert part in str(error.value)

    assert grown(caught) < 100_000_000


def test_the_kernel_of_a_vocabulary_is_refused_at_once(many: Functional) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    refused(lambda: gram(many, x, memory="1GB"), "647 GB", 'form="trace"', "kernel.npy")
    lin = linnet.linearize(many.model)
    refused(lambda: lin.jacobian(x, memory="1GB"), "Jacobian")
    data = x, torch.arange(8)
    refused(
        lambda: curvature_of(many.model, data, Categorical(), structure="full", memory="1GB",
                                 params="2.weight"),
        "curvature of 150771 parameters", "90.9 GB", "matrix-free",
    )  # fmt: skip
    mc = curvature_of(
        many.model,
        data,
        Categorical(),
        structure="diagonal",
        memory="1GB",
        expectation="mc",
        params="0.weight",
    )
    assert mc.trace() > 0


def test_a_preflight_of_a_thousand_classes_takes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 classes at 32 × 32 pixels would take 0.5 GB of gradients for three examples."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    found: list[Any] = []
    model, x = nn.Sequential(*layers, nn.Linear(32, 1000)), torch.randn(3, 3, 32, 32)
    assert grown(lambda: found.append(preflight(model, x, memory="100MB"))) < 60_000_000
    assert dict(found[0].memory.items)["kernel"] == 4 * 3000**2


def test_check_plans_for_the_head_that_adapt_puts_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 old classes, 2 new ones: the plan is for the random heads that all classes share."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def old():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 1000))\n"
    )
    images = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
    labels = np.array([0, 1] * 3)
    np.savez(tmp_path / "task.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    words = ["check", "--model", f"{tmp_path / 'nets.py'}:old", "--data", str(tmp_path / "task.npz")]
    assert cli.main([*words, "--memory", "1MB", "--verbose"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # of lines that are folded
    assert "4 outputs" in printed
    assert "its head of 1000 outputs is replaced" in printed


# --- the plan ---------------------------------------------------------------------------------------


def deep() -> nn.Module:
    """Layers of 8 positions whose gradients are cheaper to multiply and larger to keep than their factors."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(120, 120), nn.Tanh())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(960, 2)).double()


def inputs(n: int) -> Tensor:
    """Examples for it."""
    return torch.randn(n, 8, 120, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_what_is_probed_without_gradients_is_what_is_captured() -> None:
    function, x = Functional(deep()), inputs(3)
    for kind, k in (("full", 2), ("sum", 1)):
        hollow, real = hollow_capture(function, x, k), capture(function, x, kind)
        mine, its = (outline(c, function.names, (50, 50), kind) for c in (hollow, real))
        assert mine.widths == its.widths
        assert mine.rides == its.rides
        assert mine.pass_cost == its.pass_cost
        for name, choice in mine.choices.items():
            other = its.choices[name]
            assert (choice.uses, choice.costs, choice.pays) == (other.uses, other.costs, other.pays)
            assert choice.layer.nbytes == other.layer.nbytes
        assert mine.treatment(mine.cheapest) == its.treatment(its.cheapest)


def test_a_small_budget_takes_factors_where_gradients_would_be_captured_again() -> None:
    function, x = Functional(deep()), inputs(24)
    task = GramTask(function, x, None, "full")
    roomy, tight = plan_gram(task, "1GB"), plan_gram(task, "8MB")
    assert set(roomy.treatment.factored) == {"7.weight"}
    assert set(tight.treatment.factored) == {"0.weight", "2.weight", "4.weight", "7.weight"}
    assert roomy.sizes.hold == tight.sizes.hold == 24
    assert tight.memory.peak <= 8_000_000
    assert_near(gram(function, x, memory="8MB"), kernel_oracle(jacobian_oracle(deep(), x)))


def test_the_choice_stays_where_everything_fits_and_is_the_smallest_where_nothing_does() -> None:
    function, x = Functional(deep()), inputs(3)
    found = outline(hollow_capture(function, x, 2), function.names, (24, 24), "full")
    cheapest = found.treatment(found.cheapest)
    roomy = lambda _: Footprint(peak=10, captured=60)  # noqa: E731
    assert treatment_within(found, 10, roomy, 60, True) == cheapest
    least = min(found.features(found.treatment(some)).nbytes for some in (found.cheapest, {*found.choices}))
    by_bytes = lambda features: Footprint(peak=features.nbytes, captured=600)  # noqa: E731
    chosen = treatment_within(found, 1, by_bytes, 60, True)
    assert found.features(chosen).nbytes <= least


def test_cotangents_in_parts_give_the_same_kernel() -> None:
    """A budget for a few of 40 outputs at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(800, 40)).double()
    function, x = Functional(model), torch.randn(3, 1, 12, 12, dtype=torch.float64)
    task = GramTask(function, x, None, "full")
    budget = 10**8
    while (plan := plan_gram(task, budget)).sizes.columns == 40:
        budget = int(budget * 0.95)
    assert plan.memory.peak <= budget
    assert 1 <= plan.sizes.columns < 40
    assert_near(gram(function, x, memory=budget), kernel_oracle(jacobian_oracle(model, x)))


@pytest.mark.parametrize(("n", "hold"), [(7, 7), (7, 3), (7, 1), (6, 2)])
def test_captured_examples_are_counted(n: int, hold: int) -> None:
    assert captured_examples(n, n, True, hold) == sum(n - start for start in range(0, n, hold))
    assert captured_examples(n, 5, False, hold) == n + 5 * len(range(0, n, hold))


# --- counts -----------------------------------------------------------------------------------------


def test_counts_that_no_memory_holds_are_refused() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(12, 3), torch.arange(12) % 3
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge=1.0)
    G = linnet.curvature(net, (x, y), Categorical(), structure="kfac").damped(1.0).inverse()
    la = linnet.Laplace(net, Categorical(), structure="diagonal").fit((x, y))
    f, huge = torch.zeros(2, 3), 10**11
    calls: list[Callable[[], Any]] = [
        lambda: with_head(net, huge, data=(x, y)),
        lambda: with_head(net, huge, init="random"),
        lambda: fit.predictive(x).sample(huge),
        lambda: G.sample(huge),
        lambda: la.sample(huge),
        lambda: la.predictive(x[:2]).sample(huge),
        lambda: Categorical().sample(f, huge),
        lambda: Categorical().project(f, huge),
    ]
    for call in calls:
        refused(call, "would need", "To fix it")


def test_draws_that_fit_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    before: list[Tensor] = [
        draw((3, 4), 1, torch.float32, cpu) for draw in (random_numbers.normal, random_numbers.signs)
    ]
    monkeypatch.setattr(random_numbers, "PLANNED", 1)
    for old, draw in zip(before, (random_numbers.normal, random_numbers.signs), strict=True):
        assert torch.equal(old, draw((3, 4), 1, torch.float32, cpu))
