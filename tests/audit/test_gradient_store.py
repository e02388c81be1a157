"""Stored gradients against autograd and dense algebra; stores that are interrupted, shared and mistaken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import linnet
from linnet.audit import GradientStore
from linnet.errors import DataError, FileFormatError, InputError, MemoryBudgetError
from linnet.files import load, save
from linnet.likelihoods import Categorical, Custom

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, LIKELIHOOD, DAMPING = 5, Categorical(axis=-1), 0.3
Batch = tuple[Tensor, Tensor]


class Language(nn.Module):
    """One causal attention layer with a norm, and a last layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, 4), nn.Embedding(8, 4)
        self.norm, self.mixed = nn.LayerNorm(4), nn.Linear(4, 12)
        self.out = nn.Linear(4, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.mixed(self.norm(h)).chunk(3, -1)
        later = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).triu(1).bool()
        weights = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
        result: Tensor = self.out(torch.tanh(h + weights @ v))
        return result


def language(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Language().double()


def batches(count: int = 5, seed: int = 1) -> list[Batch]:
    """Three sequences each, of two lengths, some labels to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        ids = torch.randint(VOCABULARY, (3, 5 + i % 2), generator=generator)
        y = ids[:, 1:].clone()
        y[torch.rand(y.shape, generator=generator) < 0.2] = -100
        found.append((ids[:, :-1], y))
    return found


def gradients(net: nn.Module, data: list[Batch]) -> Tensor:
    """The gradient of every sequence's loss by autograd, (N, P)."""
    rows = []
    for x, y in data:
        for ids, labels in zip(x, y, strict=True):
            loss = F.cross_entropy(net(ids[None])[0], labels, reduction="sum", ignore_index=-100)
            grads = torch.autograd.grad(loss, list(net.parameters()))
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def gauss_newton(net: nn.Module, data: list[Batch]) -> Tensor:
    """Σ Jᵀ Λ J over the labeled positions, by jacobians, (P, P)."""
    names = list(dict(net.named_parameters()))
    theta = {name: p.detach() for name, p in net.named_parameters()}
    size = sum(p.numel() for p in theta.values())
    total = torch.zeros(size, size, dtype=torch.float64)
    for x, y in data:
        for ids, labels in zip(x, y, strict=True):

            def logits(p: dict[str, Tensor], ids: Tensor = ids) -> Tensor:
                found: Tensor = torch.func.functional_call(net, p, (ids[None],))[0]
                return found

            jacobian = torch.func.jacrev(logits)(theta)
            rows = torch.cat([jacobian[name].flatten(2) for name in names], 2)
            for row, f, label in zip(rows, logits(theta), labels, strict=True):
                p = f.softmax(0)
                if label != -100:
                    total += row.T @ (torch.diag(p) - torch.outer(p, p)) @ row
    return total


def curvature(net: nn.Module, structure: str = "ekfac", data: list[Batch] | None = None) -> Any:
    """G over batches of one length."""
    own = [pair for pair in data or batches() if pair[0].shape[1] == 4]
    pair = torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])
    return linnet.curvature(net, pair, LIKELIHOOD, structure, expectation="exact")


def made(folder: Path, dtype: torch.dtype = torch.float64, size: int = 4, **given: Any) -> GradientStore:
    """A store of all batches in a sketch of 30 directions."""
    net = language()
    small = linnet.with_sketch(net, curvature(net), dim=30, **given)
    return GradientStore(folder, small, LIKELIHOOD, dtype, size).add(iter(batches()))


def test_all_directions_give_the_influence_in_all_weights(tmp_path: Path) -> None:
    net = language()
    data, queries = [pair for pair in batches() if pair[0].shape[1] == 4], batches(3, seed=7)
    g, own = gradients(net, data), gradients(net, queries)
    G = gauss_newton(net, data) / len(g)
    wanted = own @ torch.linalg.solve(G + DAMPING * torch.eye(len(G), dtype=G.dtype), g.T)
    small = linnet.with_sketch(net, curvature(net, "full", data), dim=G.shape[0])
    store = GradientStore(tmp_path, small, LIKELIHOOD, torch.float64, 4).add(iter(data))
    found = store.scores(iter(queries), DAMPING)
    assert found.shape == (9, 9)
    # what is left out are directions without curvature, along which no gradient of these data lies
    assert float((found - wanted).abs().max()) < 1e-9 * float(wanted.abs().max())
    itself = g @ torch.linalg.solve(G + DAMPING * torch.eye(len(G), dtype=G.dtype), g.T)
    assert torch.allclose(store.self_influence(DAMPING), itself.diagonal(), rtol=1e-9)


def test_a_network_of_its_own_weights_gives_the_empirical_fisher_matrix(tmp_path: Path) -> None:
    net, queries = language(), batches(3, seed=7)
    g, own = gradients(net, batches()), gradients(net, queries)
    fisher = g.T @ g / len(g) + DAMPING * torch.eye(g.shape[1], dtype=g.dtype)
    store = GradientStore(tmp_path, net, LIKELIHOOD, torch.float64, 4).add(iter(batches()))
    found = store.scores(iter(queries), DAMPING)
    assert torch.allclose(found, own @ torch.linalg.solve(fisher, g.T), rtol=1e-8, atol=1e-10)
    again = GradientStore(tmp_path, linnet.linearize(net))
    torch.testing.assert_close(again.scores(iter(queries), DAMPING), found)


@pytest.mark.parametrize("structure", ["ekfac", "kfac"])
def test_eigenvalues_of_products(tmp_path: Path, structure: str) -> None:
    net, queries = language(), batches(2, seed=7)
    G = curvature(net, structure)
    small = linnet.with_sketch(net, G, dim=10_000)
    store = GradientStore(tmp_path, small, LIKELIHOOD, torch.float64).add(iter(batches()))
    g, own = gradients(net, batches()), gradients(net, queries)
    # along eigenvectors without curvature, which take no direction, gradients vanish or are left out
    H = torch.stack([torch.cat([t.flatten() for t in small.displacement(unit).values()])
                     for unit in torch.eye(len(small.epsilon), dtype=torch.float64)], 1)  # fmt: skip
    inverse = H @ (H.T @ G.scaled(1 / 9).damped(DAMPING).solve(H)) @ H.T
    assert torch.allclose(store.scores(iter(queries), DAMPING), own @ inverse @ g.T, rtol=1e-8, atol=1e-10)


def test_top_is_the_largest_of_all_scores(tmp_path: Path) -> None:
    store, queries = made(tmp_path), batches(2, seed=7)
    every = store.scores(iter(queries))
    for lowest in (False, True):
        top = store.top(iter(queries), k=6, lowest=lowest)
        wanted = every.sort(1, descending=not lowest)
        assert torch.equal(top.indices, wanted.indices[:, :6])
        torch.testing.assert_close(top.scores, wanted.values[:, :6])
    assert store.top(iter(queries), k=99).indices.shape == (6, 15)
    own = store.scores(iter(batches()), DAMPING, "gradients").diagonal()
    assert torch.allclose(store.self_influence(DAMPING, "gradients"), own)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
@pytest.mark.thinned(2)
def test_shorter_types(tmp_path: Path, dtype: torch.dtype, error: float) -> None:
    """Lengths are kept apart, so that small gradients do not vanish in half precision."""
    whole, short = made(tmp_path / "whole"), made(tmp_path / "short", dtype)
    wanted, found = (store.scores(iter(batches()), DAMPING) for store in (whole, short))
    assert float((wanted - found).abs().max()) < error * float(wanted.abs().max())
    bytes_of = [sum(f.stat().st_size for f in s.folder.path.glob("rows-*")) for s in (whole, short)]
    assert bytes_of[0] - bytes_of[1] == 15 * 30 * (8 - dtype.itemsize)


def test_random_directions(tmp_path: Path) -> None:
    store = made(tmp_path, seed=3)
    assert store.scores(iter(batches(1)), DAMPING).shape == (3, 15)
    with pytest.raises(InputError, match="eigenvalues"):
        store.scores(iter(batches(1)), metric="curvature")


class _Interrupted(Exception):
    pass


def broken(after: int) -> Iterator[Batch]:
    """The batches, until something happens."""
    for i, batch in enumerate(batches()):
        if i == after:
            raise _Interrupted
        yield batch


def test_an_interrupted_store_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(tmp_path / "whole")
    net, folder = language(), tmp_path / "broken"
    small = linnet.with_sketch(net, curvature(net), dim=30)
    store = GradientStore(folder, small, LIKELIHOOD, torch.float64, 4)
    with pytest.raises(_Interrupted):
        store.add(broken(3))  # nine sequences: two shards of four
    assert (len(store), store.complete) == (0, False)
    with pytest.raises(InputError, match="no process came to the end"):
        store.scores(iter(batches(1)))
    computed = []
    inner = linnet.audit.gradient_store.LossGradients.rows  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "linnet.audit.gradient_store.LossGradients.rows",
        lambda self, x, y: (computed.append(len(y)), inner(self, x, y))[1],
    )
    again = GradientStore(folder, net).add(iter(batches()))  # the network is enough: the basis is there
    assert sum(computed) == 15 - 8
    assert again.complete
    torch.testing.assert_close(again.scores(iter(batches(1))), whole.scores(iter(batches(1))))
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name
    assert not list(folder.glob("*partial*"))


def test_parts_make_one_store_in_any_order_and_number(tmp_path: Path) -> None:
    whole, folder, net = made(tmp_path / "whole"), tmp_path / "parts", language()
    small = linnet.with_sketch(net, curvature(net), dim=30)
    last = GradientStore(folder, small, LIKELIHOOD, torch.float64, 4).add(iter(batches()), part=(2, 3))
    with pytest.raises(InputError, match="only part 2 came to the end"):
        last.top(iter(batches(1)))
    for part in ((0, 2), (1, 2)):
        store = GradientStore(folder, net)
        assert not store.complete
        store.add(iter(batches()), part=part)
    assert store.complete
    assert not (folder / "ends.json").exists()
    assert len(store) == 15
    torch.testing.assert_close(store.scores(iter(batches(1))), whole.scores(iter(batches(1))))
    with pytest.raises(DataError, match="other examples"):
        store.add(iter(batches(seed=2)), part=(0, 2))


def test_parts_whose_data_end_elsewhere_make_no_store(tmp_path: Path) -> None:
    net = language()
    store = GradientStore(tmp_path, net, LIKELIHOOD, torch.float64, shard_size=3)
    store.add(iter(batches(3)), part=(0, 3))  # nine sequences, of fifteen
    for part in (1, 2):
        with pytest.raises(DataError, match="9 examples, now 15"):
            store.add(iter(batches()), part=(part, 3))
        assert (store.complete, len(store)) == (False, 0)
    with pytest.raises(InputError, match="had other data, of 9 and 15 examples"):
        store.self_influence()
    store.add(iter(batches()), part=(0, 3))  # what was cut short comes whole
    assert (store.complete, len(store)) == (True, 15)
    with pytest.raises(DataError, match="15 examples, now 9"):
        store.add(iter(batches(3)))
    assert store.complete  # what all agreed on stays
    again = GradientStore(tmp_path / "changed", net, LIKELIHOOD, torch.float64, shard_size=3)
    again.add(iter(batches(3)), part=(0, 2))
    assert again.add(iter(batches())).complete  # one job for all, instead of two


@pytest.mark.long
def test_a_killed_store_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    made(tmp_path / "whole")
    script = "import sys; from tests.audit.test_gradient_store import *; killed(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    for _ in range(2):
        words = [sys.executable, "-c", script, str(tmp_path / "killed")]
        done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
    made(tmp_path / "killed")
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "killed").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def killed(folder: Path) -> None:
    """Make a store in a process that is killed in the middle of writing the next shard."""
    net = language()
    store = GradientStore(
        folder, linnet.with_sketch(net, curvature(net), dim=30), LIKELIHOOD, torch.float64, 4
    )
    there = len(list(folder.glob("rows-*")))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and "rows-" in str(arguments[1]) and len(list(folder.glob("rows-*"))) > there:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    store.add(iter(batches()))


class _Samples(IterableDataset[Batch]):
    """Sequences one by one."""

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches():
            yield from zip(x, y, strict=True)


def test_data_of_any_kind(tmp_path: Path) -> None:
    wanted = made(tmp_path / "whole").scores(iter(batches(1)))
    store = GradientStore(tmp_path / "samples", linnet.with_sketch(language(), curvature(language()), 30),
                          LIKELIHOOD, torch.float64, 4)  # fmt: skip
    assert torch.allclose(store.add(_Samples()).scores(batches(1)[0]), wanted)
    (x, y), count = batches(1)[0], torch.float64
    forms: list[Any] = [
        (x, y), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=2),
        [(x[:2], y[:2]), (x[2:], y[2:])], list(DataLoader(TensorDataset(x, y), batch_size=2)),
        iter([{"ids": x[:2], "labels": y[:2]}, {"ids": x[2:], "labels": y[2:]}]),
    ]  # fmt: skip
    found = []
    for i, data in enumerate(forms):
        store = GradientStore(tmp_path / str(i), language(), LIKELIHOOD, count).add(data)
        found.append(store.self_influence(DAMPING))
    assert all(torch.allclose(found[0], one) for one in found)


@pytest.mark.long
def test_a_causal_model_of_hugging_face(tmp_path: Path) -> None:
    """Dicts with a mask, batches of two lengths, an embedding that is the last layer too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    net = transformers.GPT2LMHeadModel(config).double().eval()
    ids, mask = torch.randint(50, (6, 10)), torch.ones(6, 10, dtype=torch.long)
    mask[3:, 7:] = 0
    following = F.pad(ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100), (0, 1), value=-100)
    data = [
        {"input_ids": ids[rows, :t], "attention_mask": mask[rows, :t], "labels": following[rows, :t]}
        for rows, t in ((slice(0, 3), 8), (slice(3, 6), 10))
    ]
    G = linnet.curvature(net, data[1], LIKELIHOOD, structure="ekfac", expectation="mc")
    small = linnet.with_sketch(net, G, dim=200)
    store = GradientStore(tmp_path, small, LIKELIHOOD, torch.float64).add(data)
    rows = []
    for batch in data:
        for one in range(3):
            x = {name: t[one : one + 1] for name, t in batch.items() if name != "labels"}
            loss = F.cross_entropy(net(**x).logits[0], batch["labels"][one], reduction="sum")
            rows.append(torch.autograd.grad(loss, list(net.parameters())))
    names = [name for name, _ in net.named_parameters()]
    columns = {name: torch.stack(each, -1) for name, each in zip(names, zip(*rows, strict=True), strict=True)}
    found = torch.cat([block for _, block in store.folder.blocks(torch.float64, torch.device("cpu"))])
    assert torch.allclose(found, small.projected(columns).T, rtol=1e-9, atol=1e-10)


def test_what_does_not_belong_to_a_store(tmp_path: Path) -> None:
    store, net = made(tmp_path), language()
    with pytest.raises(FileFormatError, match="weights differ"):
        GradientStore(tmp_path, language(1))
    with pytest.raises(FileFormatError, match="another network"):
        GradientStore(tmp_path, nn.Linear(2, 2))
    with pytest.raises(FileFormatError, match="weights differ"):  # of other directions
        GradientStore(tmp_path, linnet.with_sketch(net, curvature(net), dim=30, seed=1))
    for wrong in ({"dtype": torch.float32}, {"shard_size": 5}, {"likelihood": Categorical()}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}=.*begun with"):
            GradientStore(tmp_path, net, **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="other examples"):
        store.add(iter(batches(4)[::-1]))
    with pytest.raises(DataError, match="15 examples, now 12"):
        store.add(iter(batches(4)))
    file = store.folder.file(0)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FileFormatError, match="altered"):
        store.scores(iter(batches(1)))
    file.write_bytes(whole)
    content = load(file, "gradient-store-rows")
    save(tmp_path, file.stem, {**content, "store": "another"}, "gradient-store-rows")
    with pytest.raises(FileFormatError, match="the mark another"):
        store.scores(iter(batches(1)))
    file.unlink()
    with pytest.raises(InputError, match="1 of 4 shards are missing, first 0"):
        store.scores(iter(batches(1)))


def test_other_modules_with_equal_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    GradientStore(tmp_path, first, Categorical())
    with pytest.raises(FileFormatError, match="'1' is ReLU, and was Tanh"):
        GradientStore(tmp_path, nn.Sequential(first[0], nn.ReLU(), first[2]))


def test_what_cannot_be(tmp_path: Path) -> None:
    net = language()
    with pytest.raises(InputError, match="likelihood=None"):
        GradientStore(tmp_path / "a", net)
    with pytest.raises(InputError, match="dtype="):
        GradientStore(tmp_path / "a", net, LIKELIHOOD, dtype=torch.float8_e5m2)
    assert not (tmp_path / "a").exists()
    store = GradientStore(tmp_path / "b", net, LIKELIHOOD, memory="100kB")
    x, y = batches(1)[0]
    for data, error, words in (
        (iter(()), DataError, "empty"),
        ((x[:0], y[:0]), DataError, "empty"),
        ((x, y[:2]), DataError, "3 inputs"),
        ((x, y + VOCABULARY), DataError, "classes from 0"),
        ((x.double() / 0, y), DataError, "NaN or infinite"),
        (x, InputError, "Tensor"),
        (3, InputError, "int"),
    ):
        with pytest.raises(error, match=words):
            store.add(data)
    for part in ((2, 2), (0, 0), 3, "all"):
        with pytest.raises(InputError, match="part"):
            store.add((x, y), part=part)  # type: ignore[arg-type]
    store.add((x, y))
    with pytest.raises(DataError, match="empty"):
        store.scores(iter(()))
    with pytest.raises(InputError, match="metric="):
        store.scores((x, y), metric="fisher")
    with pytest.raises(InputError, match="damping="):
        store.scores((x, y), damping=0.0)
    with pytest.raises(MemoryBudgetError, match="curvature of the store"):
        store.scores((x, y))


def test_a_likelihood_of_ones_own_is_passed_again(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3)).double()
    own = Custom(lambda f, y: (f - y).pow(4).sum(-1))
    x = torch.randn(6, 2, dtype=torch.float64)
    data = x, torch.zeros(6, 3, dtype=torch.float64)
    store = GradientStore(tmp_path, net, own, torch.float64).add(data)
    wanted = torch.stack([_flat(net, (net(one[None]).pow(4)).sum()) for one in x])
    rows = torch.cat([rows for _, rows in store.folder.blocks(torch.float64, torch.device("cpu"))])
    assert torch.allclose(rows, wanted)
    with pytest.raises(InputError, match="Custom"):
        GradientStore(tmp_path, net)
    assert len(GradientStore(tmp_path, net, own)) == 6


def _flat(net: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of a loss."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def test_a_callable_output(tmp_path: Path) -> None:
    net, x, y = language(), *batches(1)[0]
    small = linnet.linearize(net, output=lambda f: 2 * f)
    GradientStore(tmp_path, small, LIKELIHOOD).add((x, y))
    with pytest.raises(InputError, match="output is missing"):
        GradientStore(tmp_path, net)
    with pytest.raises(InputError, match="has its own"):
        GradientStore(tmp_path / "new", small, LIKELIHOOD, output="logits")
    assert GradientStore(tmp_path, small).complete


def test_other_parameters_than_those_of_the_store_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3)
    data = x, torch.arange(6) % 2
    GradientStore(tmp_path, net, Categorical(), params="last-layer").add(data)
    assert len(GradientStore(tmp_path, net, params="2").scores(data)) == 6
    with pytest.raises(InputError, match=r"params='bias' of a store that was begun with others"):
        GradientStore(tmp_path, net, params="bias")
