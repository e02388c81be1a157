"""Saved curvatures come back to the bit, and interrupted sums go on where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import linnet
from linnet.curvatures import stream
from linnet.curvatures.curvature import Curvature
from linnet.errors import DataError, FileFormatError, InputError
from linnet.files import load, save
from linnet.likelihoods import Categorical, Gaussian
from linnet.tree import flatten
from linnet.unfinished import Checkpoint
from tests.curvatures.curvature_oracles import Problem
from tests.curvatures.side_by_side import curvature_of
from tests.zoo import BY_NAME, assert_near, case

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac", "kfra", "low-rank", "last-layer")
FILE = "curvature.safetensors"


def assert_same_bits(found: Curvature, expected: Curvature) -> None:
    """All that is stored is equal to the bit; products may round otherwise where the layout differs."""
    for mine, its in zip(found.parts, expected.parts, strict=True):
        spec, tensors = flatten(mine.operator)
        other_spec, others = flatten(its.operator)
        assert spec == other_spec
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())
        assert (mine.layer, mine.structure, mine.note) == (its.layer, its.structure, its.note)
    assert_near(found.dense(), expected.dense(), 1e-13)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp-tanh", "mobilenet"])
@pytest.mark.thinned(6)
def test_what_is_saved_comes_back_to_the_bit(name: str, structure: str, tmp_path: Path) -> None:
    if name == "mobilenet" and structure == "kfra":
        structure = "kfac"
    problem = Problem(name, "categorical")
    G = problem.curvature(structure)
    for i, M in enumerate([G, G.damped(0.5), G.damped(0.5).inverse(), G.scaled(3.0)]):
        path = M.save(tmp_path / str(i))
        assert path == tmp_path / str(i) / FILE
        back = linnet.load(tmp_path / str(i), problem.case.model())
        assert_same_bits(back, M)
        assert repr(back) == repr(M)
        assert back.coverage() == M.coverage()
        assert back.made == M.made
    b = torch.ones(G.shape[0]).double()
    damped = linnet.load(tmp_path / "1", problem.case.model())
    assert_near(damped.solve(b), G.damped(0.5).solve(b))
    assert_near(damped.output_covariance(problem.case.x2), G.damped(0.5).output_covariance(problem.case.x2))


def test_mixtures_subsets_and_adapters_come_back(tmp_path: Path) -> None:
    problem = Problem("lenet", "categorical")
    G = problem.curvature({"^0": "ekfac", ".*": "kfac"}, params=["0.weight", "3.weight", "3.bias"], samples=2)
    G.save(tmp_path)
    back = linnet.load(tmp_path, problem.case.model())
    assert_same_bits(back, G)
    assert back.function.names == G.function.names
    problem = Problem("dict-output", "categorical")
    adapter = BY_NAME["dict-output"].output
    problem.curvature("kfac").save(tmp_path)
    with pytest.raises(InputError, match=r"(?s)output is missing.*output="):
        linnet.load(tmp_path, problem.case.model())
    back = linnet.load(tmp_path, problem.case.model(), output=adapter)
    assert_same_bits(back, problem.curvature("kfac"))
    back = linnet.load(tmp_path, problem.case.model(), output=adapter)
    assert back.output_covariance(problem.case.x2).shape == (3, 3, 3)


def test_another_network_is_refused(tmp_path: Path) -> None:
    problem = Problem("mlp-tanh", "categorical")
    problem.curvature("kfac").save(tmp_path)
    with pytest.raises(FileFormatError, match=r"(?s)another network: its weights differ.*same checkpoint"):
        linnet.load(tmp_path, BY_NAME["mlp-tanh"].factory(1))
    with pytest.raises(FileFormatError, match=r"(?s)another network: it lacks '0\.weight'"):
        linnet.load(tmp_path, nn.Bilinear(2, 2, 2))
    with pytest.raises(FileFormatError, match="its weights differ"):
        linnet.load(tmp_path, nn.Sequential(*problem.case.model()[:3], nn.ReLU(), nn.Linear(8, 3)))


def test_missing_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    problem = Problem("mlp-tanh", "categorical")
    model = problem.case.model()
    with pytest.raises((InputError, FileFormatError), match=FILE):
        linnet.load(tmp_path, model)
    path = problem.curvature("kfac").save(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileFormatError, match="truncated"):
        linnet.load(tmp_path, model)
    path.unlink()
    save(tmp_path, "curvature", {"note": "of another kind"}, "fit")
    with pytest.raises(FileFormatError, match=r"(?s)fit.*curvature"):
        linnet.load(tmp_path, model)


class Stop(Exception):
    """An interruption."""


class Breaking(Dataset[Any]):
    """Samples one by one; after a number of reads, an interruption."""

    def __init__(self, x: Tensor, y: Tensor, reads: int | None) -> None:
        self.x, self.y, self.left = x, y, reads

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stop
        return self.x[i], self.y[i]


@pytest.fixture
def at_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished sums are written after every batch, and samples read two at once."""
    monkeypatch.setattr(Checkpoint, "note", Checkpoint.write)
    monkeypatch.setattr(stream, "SAMPLES_A_READ", 2)


def long_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(10, 1, 14, 14, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (10,), generator=generator)


def compute(data: Any, structure: Any = "ekfac", file: Path | None = None, **options: Any) -> Any:
    model, likelihood = options.pop("model", case("lenet").model()), options.pop("likelihood", Categorical())
    options = {"expectation": "mc", "samples": 2, "block": 2, **options}
    return curvature_of(model, data, likelihood, structure, file=file, **options)


@pytest.mark.parametrize("reads", [*range(5, 26, 3), 100])
@pytest.mark.usefixtures("at_every_batch")
@pytest.mark.thinned(6)
def test_an_interrupted_run_goes_on_to_the_same_bits(reads: int, tmp_path: Path) -> None:
    x, y = long_data()
    structures = ["ekfac", "diagonal", "kfac"]
    file = tmp_path / "sums.safetensors"
    samples = Breaking(x, y, 1000)
    whole = compute(samples, structures, file)
    needed = 1000 - samples.left
    assert not file.exists()
    try:
        found = compute(Breaking(x, y, reads), structures, file)
        interrupted = False
    except Stop:
        interrupted = True
        # what has been summed is on disk, once a batch has been
        found = compute(Breaking(x, y, None), structures, file)
    assert interrupted == (reads < needed)
    assert not file.exists()
    for structure, G in found.items():
        assert torch.equal(G.dense(), whole[structure].dense())
        assert G.made == whole[structure].made


@pytest.mark.usefixtures("at_every_batch")
def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.curvatures.accumulate import Accumulator

    x, y = long_data()
    file = tmp_path / "sums.safetensors"
    with pytest.raises(Stop):
        compute(Breaking(x, y, 7), "kfac", file)
    metadata = load(file, "unfinished-sums")
    done = metadata["place"]
    assert 1 <= done < 5
    added, original = [], Accumulator.add

    def noting(self: Accumulator, batch: Any) -> None:
        added.append(batch.index)
        original(self, batch)

    monkeypatch.setattr(Accumulator, "add", noting)
    compute(Breaking(x, y, None), "kfac", file)
    assert added == list(range(done, 5))


@pytest.mark.usefixtures("at_every_batch")
def test_sums_of_anything_else_are_refused(tmp_path: Path) -> None:
    x, y = long_data()
    file = tmp_path / "sums.safetensors"
    with pytest.raises(Stop):
        compute(Breaking(x, y, 7), "kfac", file)
    before = file.read_bytes()
    other = case("lenet").model()
    with torch.no_grad():
        other[0].bias += 1
    later = x.clone()
    later[1, 0, 0, 0] += 1
    tries: list[tuple[str, Any]] = [
        ("settings", lambda: compute((x, y), "diagonal", file)),
        ("settings", lambda: compute((x, y), "kfac", file, seed=1)),
        ("settings", lambda: compute((x, y), "kfac", file, samples=3)),
        ("settings", lambda: compute((x, y), "kfac", file, expectation="exact")),
        ("settings", lambda: compute((x, y), "kfac", file, sharing="reduce")),
        ("data", lambda: compute((x, y), "kfac", file, block=5)),
        ("data", lambda: compute((later, y), "kfac", file)),
        ("data", lambda: compute((x, (y + 1) % 4), "kfac", file)),
        ("network", lambda: compute((x, y), "kfac", file, model=other)),
        ("likelihood", lambda: compute((x, y), "kfac", file, likelihood=Categorical(ignore_index=-1))),
    ]  # fmt: skip
    for what, attempt in tries:
        with pytest.raises(InputError, match=rf"(?s)sums\.safetensors.*another.*{what}.*delete it") as caught:
            attempt()
        assert "file=" in str(caught.value)
        assert file.read_bytes() == before


@pytest.mark.usefixtures("at_every_batch")
def test_data_that_differ_only_where_they_were_read_before_are_refused(tmp_path: Path) -> None:
    x, y = long_data()
    file = tmp_path / "sums.safetensors"
    with pytest.raises(Stop):
        compute(Breaking(x, y, 9), "kfac", file)
    later = x.clone()
    later[3] += 1.0  # in the second batch, which has been summed
    with pytest.raises((InputError, DataError), match="data"):
        compute(Breaking(later, y, None), "kfac", file)


@pytest.mark.parametrize("reads", [17, 20])
@pytest.mark.usefixtures("at_every_batch")
def test_data_that_change_after_the_first_pass_are_refused(reads: int, tmp_path: Path) -> None:
    x, y = long_data()
    file = tmp_path / "sums.safetensors"
    with pytest.raises(Stop):
        compute(Breaking(x, y, reads), "ekfac", file)
    assert load(file, "unfinished-sums")["pass"] == 1
    later = x.clone()
    later[9] += 1.0  # read in the first pass, and not yet in the second
    with pytest.raises((InputError, DataError), match="data"):
        compute(Breaking(later, y, None), "ekfac", file)


@pytest.mark.usefixtures("at_every_batch")
def test_a_loader_that_draws_samples_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sums.safetensors"
    pairs = TensorDataset(*long_data())
    with pytest.raises(InputError, match=r"(?s)a DataLoader that draws.*sampler="):
        compute(DataLoader(pairs, 2, sampler=RandomSampler(pairs, replacement=True)), "kfac", file)
    compute(DataLoader(pairs, 2, shuffle=True), "kfac", file)  # read in the order of its data set
    assert not file.exists()


@pytest.mark.parametrize("name", ["sums-0-of-2.safetensors", "sums-11-of-12.safetensors"])
def test_sums_of_another_number_of_processes_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "sums-of-mine.safetensors").touch()
    with pytest.raises(InputError, match=rf"(?s){name} holds the sums of another number .*start as many"):
        compute(long_data(), "kfac", tmp_path / "sums.safetensors")
    (tmp_path / name).unlink()
    compute(long_data(), "kfac", tmp_path / "sums.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["sums-of-mine.safetensors"]


def test_the_file_must_be_named_for_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)file='.*sums\.pt'.*\.safetensors"):
        compute(long_data(), "kfac", tmp_path / "sums.pt")
    damaged = tmp_path / "sums.safetensors"
    damaged.write_bytes(b"half of it")
    with pytest.raises(FileFormatError, match="truncated"):
        compute(long_data(), "kfac", damaged)
    foreign = Problem("mlp-tanh", "gaussian").curvature("kfac").save(tmp_path)
    with pytest.raises(FileFormatError, match="unfinished-sums"):
        compute(long_data(), "kfac", foreign)


def test_the_likelihood_is_described_in_what_is_saved(tmp_path: Path) -> None:
    expected = case("mlp-tanh")
    G = linnet.curvature(expected.model(), expected.x1, Gaussian(torch.tensor([1.0, 2.0, 3.0])), "kfac")
    path = G.save(tmp_path)
    metadata = load(path, "curvature")
    assert json.dumps(metadata["made"].likelihood)
    assert linnet.load(tmp_path, expected.model()).made == G.made
