"""Calls that processes share: the numbers of one process, its work divided, and the same error on all.

Run as a script (``RANK WORLD FOLDER``) this file is one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import linnet
from linnet.distributed import all_sum, apart, current, sharing, world
from linnet.errors import LinnetError
from linnet.fitting import CG, SGD, Shared, Sketch, accuracy
from linnet.likelihoods import Categorical, Gaussian
from linnet.linalg import factorize
from linnet.linalg.operator import LinearOperator
from linnet.linear import formed_rows
from linnet.nested import many as in_weights
from linnet.nested import nested_fit
from linnet.solvers import cg
from linnet.tangent import gram as gram_module
from linnet.unfinished import resumable
from tests.hangs import HANGS
from tests.ranks import one_of_ranks, run_ranks

N = 23  # no multiple of two or three
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=G, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=G)
T = torch.randn(N, 3, generator=G, dtype=torch.float64)
FINE = CG(1e-12, preconditioner="none")
# A test of its own ends iterations at 1e-11: what rounding leaves after that is 1e-9 of the numbers.
ROUNDING = 1e-9


def net() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made


def lin() -> linnet.Linearized:
    return linnet.linearize(net())


def process(**options: Any) -> linnet.TangentGP:
    return linnet.TangentGP(net(), Gaussian(variance=0.3), **options)


def iterated(space: str, n: int = N, **options: Any) -> Tensor:
    """Mean and variance of a process by conjugate gradients, whose variances all processes find together."""
    made = process(space=space, solver="cg", tolerance=1e-11, **options).fit(X[:n], T[:n])
    with sharing("variances"):
        found = made.predictive(X[:4])
        return torch.cat([found.mean, found.variance])


def many() -> Tensor:
    """A fit of samples that count as many, and what follows from it."""
    kept = nested_fit.MANY, in_weights.LANDMARKS
    nested_fit.MANY, in_weights.LANDMARKS = 5, 9
    try:
        deep = nn.Sequential(*net(), nn.Tanh(), nn.Linear(3, 4, bias=False).double()).requires_grad_(False)
        deep[-1].weight.fill_(0.5)  # type: ignore[operator, union-attr]
        fit = linnet.adapt(deep, (X, T + 50), earlier=0.5, ridge=0.3)
    finally:
        nested_fit.MANY, in_weights.LANDMARKS = kept
    with sharing("changes"):
        changed = fit.relabel([0, 1], T[:2] + 49), fit.forget([3]), fit.update((X[:2], T[:2] + 50))
        every = [fit.predict(X), fit.loo(), fit.predictive(X).variance, *(one.predict(X) for one in changed)]
    return torch.cat(every)


def fits(n: int) -> dict[str, Tensor]:
    """Fits of n examples by every solver."""
    data, classes = (X[:n], T[:n]), (X[:n], Y[:n])
    found = {
        "dual": linnet.fit(lin(), data, solver="dual", ridge=0.3).predict(X),
        "primal": linnet.fit(lin(), data, solver="primal", ridge=0.3).predict(X),
        "cg": linnet.fit(lin(), data, solver=FINE, ridge=0.3).predict(X),
        "softmax dual": linnet.fit(lin(), classes, "cross-entropy", solver="dual", ridge=0.3).predict(X),
        "softmax cg": linnet.fit(lin(), classes, "cross-entropy", solver=FINE, ridge=0.3).predict(X),
        "gp": process(solver="cholesky").fit(*data).predictive(X).variance,
        "gp, parameters": process(solver="cholesky", space="parameter").fit(*data).predictive(X).mean,
        "gp, function space": iterated("function", n, preconditioner="none"),
        "gp, parameter space": iterated("parameter", n, preconditioner="none"),
        "many samples": many(),
    }
    kernels = {"full": lin(), "trace": net(), "sum": lin(), "diagonal": lin()}
    for form, model in kernels.items():
        found[f"kernel {form}"] = linnet.spectrum.gram(model, X[:n], form=form)  # type: ignore[arg-type]
    found["kernel of two"] = linnet.spectrum.gram(lin(), X[:n], X[3:], "trace")
    return {f"{name}, {n} examples": value for name, value in found.items()}


def numbers(folder: Path, size: int) -> dict[str, Tensor]:
    """What all processes must find as one does."""
    found = fits(N) | (fits(2) if size > 2 else {})  # of two examples a third process has none
    loo = linnet.fit(lin(), (X, T), solver="primal", ridge="loo")
    found["ridge path"] = torch.stack([torch.tensor(loo.ridge), loo.loo().square().sum()])
    for name in ("nystrom", "ekfac", "kfac", "diagonal"):
        solver = CG(1e-12, preconditioner=name)
        found[name] = linnet.fit(lin(), (X, T), solver=solver, ridge=0.3).predict(X)
    sketched = linnet.fit(lin(), (X, T), solver=Sketch(dim=12, examples=15), ridge="loo")
    found["sketch"] = torch.cat([sketched.predict(X), sketched.loo(), sketched.forget([1]).predict(X)])
    shared = linnet.fit(lin(), (X, Y), solver=Shared(2), ridge="loo")
    found["one kernel for all outputs"] = torch.cat([shared.predict(X), shared.loo()])
    steps = linnet.fit(lin(), (X, T), solver=SGD(1e-2, 500), ridge=3.0)
    found["sgd"] = steps.predict(X)
    found["gp, stored kernel"] = iterated("function", preconditioner="pivoted-cholesky")
    found["gp, exact variance"] = iterated("parameter", preconditioner="none", variance="exact")
    more = process(solver="cholesky").fit(X[:9], T[:9]).update(X[9:], T[9:])
    found["gp, updated"] = more.predictive(X).mean
    adapted = linnet.adapt(net(), (X, Y))
    found["adapt"] = adapted.predict(X)
    for form in ("full", "trace", "sum"):
        pairs = linnet.spectrum.eigenfunctions(net(), X, 2, form, method="matrix-free")  # type: ignore[arg-type]
        found[f"spectrum {form}"] = pairs.values
    found["kernel, little memory"] = linnet.spectrum.gram(
        lin(), X, memory="24kB", file=folder / "k.npy"
    ).clone()
    found["kernel, in a file"] = linnet.spectrum.gram(lin(), X, X[2:], file=folder / "l.npy").clone()
    fit = linnet.fit(lin(), (X, T), solver=FINE, ridge=0.3)
    with sharing("leave-one-out"):
        found["loo by cg"] = fit.loo()
    found["loo alone"] = fit.loo()
    return found | resumed(folder)


@contextlib.contextmanager
def breaking(place: Any, name: str, after: int) -> Iterator[None]:
    """Work that fails on the last process when it calls something for so many times."""
    call, left = getattr(place, name), [after]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if world()[0] == world()[1] - 1 and left[0] < 0:
            raise RuntimeError("broken off")
        return call(*args, **options)

    setattr(place, name, counted)
    try:
        with contextlib.suppress(LinnetError, RuntimeError):
            yield
    finally:
        setattr(place, name, call)


def resumed(folder: Path) -> dict[str, Tensor]:
    """Work that fails on one process and is taken up again, the others having done more, or less."""
    sums, largest, formed_rows.LARGEST = folder / "sums", formed_rows.LARGEST, 3

    def sketched() -> Tensor:
        solver = Sketch(dim=12, basis="ekfac", examples=15)
        fit = linnet.fit(lin(), (X, T), solver=solver, ridge="loo")
        return torch.cat([fit.predict(X), fit.loo()])

    def kernel() -> Tensor:
        return linnet.spectrum.gram(lin(), X, memory="24kB").clone()

    places: dict[str, list[tuple[Any, str, int]]] = {
        "sketched": [(formed_rows, "form_rows", 2), (formed_rows, "form_rows", 1)],
        "kernel": [(gram_module, "_run", 1)],
    }
    found = {}
    for name, work in {"sketched": sketched, "kernel": kernel}.items():
        with resumable(folder / "whole", interval=0):
            whole = work()
        for place in places[name]:
            with breaking(*place), resumable(sums, interval=0):
                work()
            # (`os.walk` passes over what another process removes meanwhile)
            kept = [file for _, _, files in os.walk(sums) for file in files]
            assert any((".safetensors" if name == "sketched" else ".npy") in file for file in kept)
        with resumable(sums, interval=0):
            again = work()
        found[f"{name}, resumed"] = again
        found[f"{name}, bits that differ"] = 1.0 + (again != whole).sum()
    formed_rows.LARGEST = largest
    return found


def work(rank: int) -> dict[str, float]:
    """Operations of this process."""
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.randn(240, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wide = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    with torch.no_grad():
        for p in wide.parameters():
            p.fill_(0.01).add_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape))
    model = linnet.linearize(wide)
    linnet.fit(model, (x[:4], y[:4]), solver=FINE)  # what is looked at once for each network
    loose = CG(1e-3, preconditioner="none")
    calls: dict[str, Callable[[], object]] = {
        "kernel": lambda: linnet.spectrum.gram(model, x),
        "trace": lambda: linnet.spectrum.gram(model, x, form="trace"),
        "cg": lambda: linnet.fit(model, (x, y), solver=loose, ridge=1.0),
        "primal": lambda: linnet.fit(model, (x, y), solver="primal", ridge=1.0),
    }
    found = {}
    for name, call in calls.items():
        with FlopCounterMode(display=False) as counter:
            call()
        found[name] = float(counter.get_total_flops())
    captured = [0]
    capture = gram_module.capture

    def counting(function: Any, part: Tensor, form: Any) -> Any:
        captured[0] += len(part)
        return capture(function, part, form)

    gram_module.capture = counting
    linnet.spectrum.gram(model, x)
    gram_module.capture = capture
    return {**found, "captured": float(captured[0]), **decomposed(model, (x, y))}


def decomposed(model: linnet.Linearized, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Σ n³ of the factors that this process decomposes, for a metric and for a sketch."""
    costs, found, eigh = [0.0], {}, factorize.eigh

    def counting(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
        costs[0] += float(matrix.shape[-1]) ** 3
        return eigh(matrix, name)

    factorize.eigh = counting
    for name, solver in (("kfac", CG(1e-3, preconditioner="kfac")), ("ekfac", Sketch(dim=12, examples=15))):
        costs[0] = 0.0
        linnet.fit(model, data, solver=solver, ridge=1.0)
        found[f"decompositions, {name}"] = costs[0]
    few = (data[0][:40], data[1][:40])
    for solver in ("dual", "primal"):
        costs[0] = 0.0
        linnet.fit(model, few, solver=solver, ridge="loo")
        found[f"decomposition, {solver}"] = costs[0]
    factorize.eigh = eigh
    return found


# --- failures -----------------------------------------------------------------------------------------


class Failing(LinearOperator):
    """A matrix of one process whose third product fails."""

    def __init__(self, rank: int) -> None:
        self.shape, self.dtype, self.device, self.space = (9, 9), torch.float64, torch.device("cpu"), None
        self.left, self.rank = 3, rank

    def mm(self, v: Tensor) -> Tensor:
        self.left -= 1
        if self.rank and not self.left:
            raise RuntimeError("no such device")
        return v * torch.linspace(1, 2, 9, dtype=v.dtype)[:, None]

    @property
    def T(self) -> LinearOperator:
        return self


class Broken(nn.Module):
    """A network that fails on the last process once it has run some times."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank, self.left = net(), rank, [20]

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.rank and self.left[0] < 0:
            raise RuntimeError("no such device")
        found: Tensor = self.inner(x)
        return found


def shared_cg(rank: int) -> object:
    with sharing("a solve"):
        return cg(Failing(rank), torch.ones(9, dtype=torch.float64), tolerance=1e-12)


class Scaling(LinearOperator):
    """A matrix of the user's own."""

    def __init__(self, factor: float) -> None:
        self.shape, self.dtype, self.device, self.space = (51, 51), torch.float64, torch.device("cpu"), None
        self.factor = torch.tensor(factor)

    def mm(self, v: Tensor) -> Tensor:
        return self.factor * v

    @property
    def T(self) -> LinearOperator:
        return self


def other_settings(rank: int) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """Arguments that differ between two ranks, and words of the error: the user's own."""
    with apart():
        basis = linnet.curvature(net(), (X + rank, Y), Categorical(), structure="ekfac")
        before = process(solver="cholesky").fit(X[:9], T[:9] + rank)
        fit = linnet.fit(lin(), (X, T), ridge=1.0 + rank, solver="dual")
    data, seed = (X, T), torch.Generator().manual_seed(rank)

    def fitted(solver: Any) -> Callable[[], object]:
        return lambda: linnet.fit(lin(), data, solver=solver)

    names = [["0.weight"], ["0.bias"]][rank]
    scores = torch.utils.data.TensorDataset(X, T + rank)
    return {
        "dim": (fitted(Sketch(dim=30 + rank)), ["solver is Sketch(dim=30, ", "Sketch(dim=31, "]),
        "seed": (fitted(Sketch(dim=30, seed=rank)), ["solver is Sketch(dim=30, ", "seed=0)", "seed=1)"]),
        "combinations": (fitted(Shared(2 + rank)), ["solver is Shared(combinations=2, ", "combinations=3, "]),
        "basis": (fitted(Sketch(dim=30, basis=basis)), ["Sketch(dim=30, basis=Curvature with the hash "]),
        "preconditioner": (fitted(CG(preconditioner=basis.damped(1.0).inverse())), ["=Curvature with the"]),
        "own matrix": (fitted(CG(preconditioner=Scaling(1.0 + rank))), ["=Scaling with the hash "]),
        "likelihood": (lambda: linnet.TangentGP(net(), Gaussian(variance=0.3 + rank)).fit(*data),
                       ["likelihood is Gaussian(variance=0.3, ", "(variance=1.3, "]),
        "parameters": (lambda: linnet.adapt(net(), (X, Y), params=names), ["params is ['0.weight']"]),
        "before": (lambda: before.update(X[9:], T[9:]), ["DataError: processes differ: y before is"]),
        "fit": (lambda: linnet.spectrum.task_linearity(fit), ["fit is LinearFit with the hash "]),
        "generator": (lambda: linnet.spectrum.spectral_density(net(), X, seed=seed),
                      ["seed is Generator with the hash "]),
        "data set": (lambda: linnet.spectrum.alignment(net(), scores), ["DataError: processes differ: y is"]),
    }  # fmt: skip


def at_another_place(rank: int) -> object:
    """A process that makes a sum where the other measures roundings."""
    calls = []

    def summing(*arguments: Any, **named: Any) -> Tensor:
        calls.append(all_sum([torch.ones(2)]))
        return measure(*arguments, **named)

    measure = accuracy.gram
    if rank:
        accuracy.gram = summing
    try:
        with sharing("a check"):
            return accuracy.measured_rounding(linnet.linearize(net().float()).function, X.float(), 1.0)
    finally:
        accuracy.gram = measure


def failures(rank: int, folder: Path) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """What fails on two ranks, and words of the error on both."""
    flawed = X.clone()
    flawed[-1] = float("nan") if rank else flawed[-1]
    other = net()
    with torch.no_grad():
        other[0].bias.add_(rank)  # type: ignore[operator, union-attr]
    return {
        "NaN": (lambda: linnet.fit(lin(), (flawed, T)), ["DataError: on rank 1: x holds NaN"]),
        "data": (lambda: linnet.fit(lin(), (X + rank, T)), ["DataError: processes differ: x is", "apart()"]),
        "order": (lambda: process().fit(X.roll(rank, 0), T), ["DataError: processes differ: x is"]),
        "count": (lambda: linnet.spectrum.gram(lin(), X[rank:]), ["DataError", "(23, 4)", "(22, 4)"]),
        "weights": (lambda: linnet.fit(linnet.linearize(other), (X, T)), ["ModelError: processes differ"]),
        "ridge": (lambda: linnet.fit(lin(), (X, T), ridge=1.0 + rank),
                  ["InputError: processes differ: ridge is 1.0 on rank 0 and 2.0 on rank 1"]),
        "adapt": (lambda: linnet.adapt(net(), (X, Y.roll(rank))), ["DataError: processes differ: y is"]),
        "a network": (lambda: linnet.fit(linnet.linearize(Broken(rank)), (X, T), solver=FINE),
                      ["on rank 1", "no such device"]),
        "a product": (lambda: shared_cg(rank), ["ProcessGroupError: on rank 1: RuntimeError"]),
        "memory": (lambda: linnet.spectrum.gram(lin(), X, memory=100), ["MemoryBudgetError: on rank 0"]),
        "place": (lambda: at_another_place(rank), ["ProcessGroupError: processes came to different places",
                                                   "rank 1 to a sum of [('torch.float32', (2", "apart()"]),
        "a file": (lambda: linnet.spectrum.gram(lin(), X[:9], file=folder / "k.npy"),
                   ["InputError: on rank 0: file=", "other examples", "delete k.npy"]),
        **other_settings(rank),
        "a folder": (lambda: linnet.spectrum.gram(lin(), X, file=folder / f"{rank}" / "k.npy"),
                     ["InputError: processes differ: file is"]),
    }  # fmt: skip


def said_by(act: Callable[[], object]) -> str:
    try:
        act()
    except LinnetError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def late(rank: int) -> str:
    """The second process ends while the first waits for it."""

    def ended(part: Any) -> Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return X

    begin = time.monotonic()
    with sharing("a solve"):
        said = said_by(lambda: linnet.fit(lin(), (ended(None), T), solver=FINE))
    assert time.monotonic() - begin < HANGS / 2  # not the half hour after which torch gives up
    return said


def alone_on_one(rank: int) -> dict[str, Tensor]:
    """What the first process does by itself, while the others do nothing of the kind."""
    fit = linnet.fit(lin(), (X, T), solver=FINE, ridge=0.3)
    found = {}
    if rank == 0:
        found["asked alone"] = fit.predictive(X[:3]).variance  # questions are never waited for
        with apart():
            assert world() == (0, 1)
            found["fitted alone"] = linnet.fit(lin(), (X[:7], T[:7]), solver="dual").predict(X)
        recorder = linnet.spectrum.Recorder(X[:5], T[:5], k=2)
        recorder.note(net(), 0)
        found["recorded alone"] = torch.tensor(recorder.notes[0].values)
        tuned = linnet.finetune(net(), (X, Y), "gaf", training=linnet.Training(steps=2))
        found["tuned alone"] = tuned.predict(X[:3])
    assert current().world == 1
    return found


def run_rank(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    with one_of_ranks(rank, size, folder):
        torch.save(numbers(folder, size), folder / f"rank{rank}.pt")
        (folder / f"work{rank}.json").write_text(json.dumps(work(rank)))
        torch.save(alone_on_one(rank), folder / f"alone{rank}.pt")
        if size == 2:
            said = {name: said_by(act) for name, (act, _) in failures(rank, folder).items()}
            with apart():
                basis = linnet.curvature(net(), (X, Y), Categorical(), structure="kfac")
            if rank:
                basis.damped(1.0).logdet()  # what is computed on the way makes no difference
            fit = linnet.fit(lin(), (X, T), solver=Sketch(dim=12, basis=basis), ridge=0.3)
            said["nothing"] = str(fit.predict(X).sum().item())  # all are in step
            (folder / f"said{rank}.json").write_text(json.dumps(said))
        else:  # the last thing that this group does
            (folder / f"gone{rank}.txt").write_text(said_by(lambda: late(rank)))


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what one process does."""
    return tmp_path_factory.mktemp("one")


def compare(folder: Path, size: int, expected: dict[str, Tensor], ranks: list[int]) -> None:
    for rank in ranks:
        found = torch.load(folder / f"rank{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = float((found[name] - value).abs().max() / value.abs().max())
            assert error <= ROUNDING, f"{name} on rank {rank} of {size}: {error}"
    kernels = {"k.npy", "k.npy.made.json", "l.npy", "l.npy.made.json"}
    assert {path.name for path in folder.glob("*.npy*")} == kernels


def check_work(folder: Path, size: int, ranks: list[int]) -> None:
    """Each process has about its share of the operations; what is replicated is small."""
    whole = work(0)
    shares = [json.loads((folder / f"work{rank}.json").read_text()) for rank in ranks]
    for name, total in whole.items():
        if name.startswith("decompositions"):  # each factor by one process, and the largest is most of all
            assert sum(share[name] for share in shares) == pytest.approx(total * len(ranks) / size)
            assert all(share[name] < total for share in shares)
            continue
        if name.startswith("decomposition,"):  # one matrix has one owner
            assert sorted(share[name] for share in shares) == [0.0] * (len(ranks) - 1) + [total]
            continue
        largest = max(share[name] for share in shares)
        assert largest < 1.25 * total / size, f"{name}: {largest / total:.3f} of all on one of {size}"
        # several processes have smaller tiles, which save more of a symmetric kernel
        assert sum(share[name] for share in shares) > 0.7 * total * len(ranks) / size


@pytest.mark.long
@pytest.mark.dist
def test_two_processes_have_the_numbers_of_one_and_fail_alike(tmp_path: Path, alone: Path) -> None:
    run_ranks(__file__, tmp_path)
    compare(tmp_path, 2, numbers(alone, 2), [0, 1])
    check_work(tmp_path, 2, [0, 1])
    first, second = (json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2))
    for name, (_, words) in failures(0, tmp_path).items():
        assert all(word in first[name] for word in words), f"{name}: {first[name]}"
        assert first[name] == second[name], name
    assert first["nothing"] == second["nothing"]
    found = torch.load(tmp_path / "alone0.pt", weights_only=True)
    for name, value in alone_on_one(0).items():
        assert torch.allclose(found[name], value, rtol=1e-9), name


@pytest.mark.long
@pytest.mark.dist
def test_three_processes_have_the_numbers_of_one_and_notice_a_death(tmp_path: Path, alone: Path) -> None:
    run_ranks(__file__, tmp_path, 3, killed=(1,))
    compare(tmp_path, 3, numbers(alone, 3), [0, 1, 2])
    check_work(tmp_path, 3, [0, 1, 2])
    for rank in (0, 2):
        text = (tmp_path / f"gone{rank}.txt").read_text()
        assert text.startswith(f"ProcessGroupError: rank {rank} of 3 has lost another process")
        assert text.isascii(), text  # without what the backend says to its developers


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
