"""Parts of a Gram matrix that write to one file: together they are the whole, whoever comes last."""

from __future__ import annotations

import os
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
from linnet.errors import InputError
from linnet.spectrum import gram, gram_part
from linnet.tangent import gram as gram_module
from linnet.tangent.store import GramFile, missing_parts
from linnet.tangent.tiles import TileSizes, run_of, tile_steps
from tests.hangs import HANGS
from tests.refusals import refused

N = 37
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net(shift: float = 0.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) + shift)
    return made


def parts(file: Path, of: int, order: list[int], x2: Tensor | None = None, **options: Any) -> list[Any]:
    return [gram_part(net(), X, x2, file=file, part=(index, of), **options) for index in order]


def found_in(file: Path) -> Tensor:
    return torch.from_numpy(np.load(file))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the examples that are differentiated."""
    counts = [0]
    capture = gram_module.capture

    def counting(function: Any, x: Tensor, form: Any) -> Any:
        counts[0] += len(x)
        return capture(function, x, form)

    monkeypatch.setattr(gram_module, "capture", counting)
    return counts


@pytest.mark.parametrize("of", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("x2", [None, Z])
@pytest.mark.parametrize("form", ["full", "trace"])
@pytest.mark.thinned(4)
def test_the_last_part_has_the_whole(of: int, x2: Tensor | None, form: Any, tmp_path: Path) -> None:
    order = torch.randperm(of, generator=torch.Generator().manual_seed(of)).tolist()
    found = parts(tmp_path / "k.npy", of, order, x2, form=form)
    whole = [one for one in found if one is not None]
    assert found[-len(whole) :] == whole  # a part without steps may come after the one that was the last
    assert len(whole) <= max(1, of // 2)
    for one in whole:
        assert torch.allclose(one, gram(net(), X, x2, form), rtol=1e-12, atol=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]


@pytest.mark.parametrize("of", [2, 3, 5, 16, 64])
def test_runs_have_every_step_once_and_about_as_much_to_do(of: int) -> None:
    steps = tile_steps(1000, 1000, True, TileSizes(hold=90, product=16, capture=22, columns=1))
    runs = [run_of(steps, index, of) for index in range(of)]
    assert [step for run in runs for step in run] == steps
    areas = [sum(step.area for step in run) for run in runs]
    assert max(areas) <= sum(areas) / of + 2 * max(step.area for step in steps)


@pytest.mark.long
def test_a_part_differentiates_few_examples(tmp_path: Path, captured: list[int]) -> None:
    x = torch.randn(512, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    most = 0
    for index in range(32):
        captured[0] = 0
        gram_part(net(), x, form="trace", file=tmp_path / "k.npy", part=(index, 32))
        most = max(most, captured[0])
    assert most < 0.45 * 512


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that are run from now on."""
    run, names = gram_module._run, list[str]()

    def noting(step: Any, *arguments: Any) -> None:
        names.append(step.key)
        run(step, *arguments)

    monkeypatch.setattr(gram_module, "_run", noting)
    return names


def test_gram_does_what_parts_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, expected, names = tmp_path / "k.npy", gram(net(), X, form="trace"), noted(monkeypatch)
    parts(file, 4, [0, 2], form="trace")
    before = len(names)
    whole = gram(net(), X, form="trace", file=file, memory="1GB")
    assert 0 < before < len(names) == len(set(names)), "steps were run again"
    assert torch.allclose(whole, expected, rtol=1e-12, atol=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]
    names.clear()
    assert torch.equal(gram(net(), X, form="trace", file=file), whole)
    assert not names, "a matrix that is there was computed again"


def test_a_finished_matrix_keeps_its_numbers_whatever_is_done_with_it(tmp_path: Path) -> None:
    file, expected = tmp_path / "k.npy", gram(net(), X, form="trace")
    (found,) = parts(file, 1, [0], form="trace")
    found.zero_()
    assert torch.allclose(gram(net(), X, form="trace", file=file), expected, rtol=1e-12, atol=1e-12)
    refused(InputError, lambda: gram(net(), X[:5], form="trace", file=file), "k.npy", "other examples")
    assert torch.allclose(found_in(file), expected, rtol=1e-12, atol=1e-12)


def test_parts_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "k.npy"
    assert missing_parts(file) == []
    parts(file, 5, [3, 0])
    assert missing_parts(file) == [1, 2, 4]

    def failing(step: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gram_module, "_run", failing)
        with pytest.raises(KeyboardInterrupt):
            parts(file, 5, [1])
    assert missing_parts(file) == [1, 2, 4]
    parts(file, 5, [1, 2, 4])
    assert missing_parts(file) == []


def test_a_part_among_another_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "k.npy"
    parts(file, 4, [0])
    refused(InputError, lambda: parts(file, 2, [1]), "k.npy", "is made in 4 parts", "one of 2", "one of 4")
    assert missing_parts(file) == [1, 2, 3]


def test_a_part_that_comes_too_late_computes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = parts(tmp_path / "k.npy", 2, [0, 1])
    names = noted(monkeypatch)
    for of in (2, 3):  # the number of those that made it, and another one
        (found,) = parts(tmp_path / "k.npy", of, [0], memory="1GB")
        assert torch.equal(found, whole)
    assert not names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]


def test_a_part_that_failed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run = tmp_path / "k.npy", gram_module._run
    done: list[str] = []

    def failing(step: Any, *arguments: Any) -> None:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(step.key)
        run(step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gram_module, "_run", failing)
        with pytest.raises(KeyboardInterrupt):
            parts(file, 2, [0])
    again = noted(monkeypatch)
    assert parts(file, 2, [1]) == [None]
    (found,) = parts(file, 2, [0])
    assert not set(done) & set(again)
    assert torch.allclose(found, gram(net(), X), rtol=1e-12, atol=1e-12)


def test_the_first_part_plans_for_all(tmp_path: Path) -> None:
    """A later part with another budget would cut the work elsewhere."""
    file = tmp_path / "k.npy"
    gram_part(net(), X, file=file, part=(0, 2), memory="8kB")
    found = gram_part(net(), X, file=file, part=(1, 2), memory="1GB")
    assert found is not None
    assert torch.allclose(found, gram(net(), X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", [None, "1GB"])
def test_a_run_whose_memory_is_not_given_goes_on_with_the_steps_it_began(
    memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory changes from one run to the next; with a budget that is given, another one begins anew."""
    file, run, names = tmp_path / "k.npy", gram_module._run, list[str]()
    monkeypatch.setattr(gram_module, "SMALLEST_PRODUCT", 6)
    monkeypatch.setattr(gram_module, "PRODUCT", 6)

    def failing(step: Any, *arguments: Any) -> None:
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(step.key)
        run(step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gram_module, "_run", failing)
        with pytest.raises(KeyboardInterrupt):
            gram(net(), X, form="trace", file=file, memory=memory)
    monkeypatch.setattr(gram_module, "PRODUCT", 5)  # as less memory would
    again = noted(monkeypatch)
    found = gram(net(), X, form="trace", file=file, memory=memory)
    assert len(again) == (5 if memory is None else 8)
    assert torch.allclose(found, gram(net(), X, form="trace"), rtol=1e-12, atol=1e-12)


OTHERS: dict[str, Callable[[Path], object]] = {
    "other examples": lambda file: gram_part(net(), X + 1, file=file, part=(1, 4)),
    "other weights": lambda file: gram_part(net(0.5), X, file=file, part=(1, 4)),
    "other form": lambda file: gram_part(net(), X, form="trace", file=file, part=(1, 4)),
    "other second examples": lambda file: gram(net(), X, Z, file=file),
    "number type": lambda file: gram(net().float(), X.float(), file=file),
}


@pytest.mark.parametrize("change", OTHERS)
def test_the_file_of_other_parts_is_refused(change: str, tmp_path: Path) -> None:
    file = tmp_path / "k.npy"
    parts(file, 4, [0])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused(InputError, lambda: OTHERS[change](file), "k.npy", "another run", change, "delete k.npy.partial")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("change", OTHERS)
def test_the_finished_file_of_another_run_is_refused(change: str, tmp_path: Path) -> None:
    file = tmp_path / "k.npy"
    gram(net(), X, file=file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused(InputError, lambda: OTHERS[change](file), "k.npy", "another run", change, "delete k.npy")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interrupted_run_of_one_process_is_refused_by_a_part(tmp_path: Path) -> None:
    store = GramFile(tmp_path / "k.npy", (2, 2), torch.float64, {"form": "full"})
    store.write_record()
    refused(InputError, lambda: parts(tmp_path / "k.npy", 2, [0]), "another run", "weights")


def test_records_without_a_matrix_are_stale(tmp_path: Path) -> None:
    parts(tmp_path / "k.npy", 3, [0])
    (tmp_path / "k.npy.partial").unlink()
    found = gram_part(net(0.5), X, file=tmp_path / "k.npy", part=(0, 1))
    assert torch.allclose(found, gram(net(0.5), X), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.long
def test_parts_at_the_same_time(tmp_path: Path) -> None:
    """Two processes begin, write and end together; one of them has the whole."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "k.npy"), str(index)], env=environment, cwd=root,
            stdout=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=HANGS)[0].strip() for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    assert "whole" in said
    assert torch.allclose(gram(net(), X), found_in(tmp_path / "k.npy"), rtol=1e-12, atol=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "k.npy.made.json"]


def test_it_takes_a_linearization_as_well(tmp_path: Path) -> None:
    lin = linnet.linearize(net(), params="0.weight")
    found = gram_part(lin, X, file=tmp_path / "k.npy", part=(0, 1))
    assert torch.allclose(found, lin.kernel(X), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [None, "float64"])
def test_sums_in_double_precision(accumulate: str | None, tmp_path: Path) -> None:
    model, x = net().float(), X.float()
    found = gram_part(model, x, file=tmp_path / "k.npy", part=(0, 1), accumulate=accumulate)
    assert found is not None
    assert found.dtype == (torch.float64 if accumulate else torch.float32)


if __name__ == "__main__":
    (found,) = parts(Path(sys.argv[1]), 2, [int(sys.argv[2])])
    print("None" if found is None else "whole")
