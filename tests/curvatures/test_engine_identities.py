"""Invariances of curvatures, and transformations that change them in a known way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.curvatures.curvature import Curvature
from linnet.likelihoods import Categorical, Gaussian
from tests.curvatures.curvature_oracles import Expected, Problem, families, indices
from tests.curvatures.side_by_side import curvature_of
from tests.zoo import assert_near, case, joined, rows

STRUCTURES = ("full", "block", "diagonal", "kfac", "ekfac")
NETWORKS = ("lenet", "mobilenet", "gpt2-eager", "shared-conv", "padding-index", "structured-output")
TIGHT = 1e-10


def curvatures(problem: Problem, x: Any, y: Tensor, structure: Any = STRUCTURES, **options: Any) -> Any:
    model, output = problem.case.model(), problem.case.output
    return curvature_of(model, (x, y), problem.likelihood, structure, output=output, **options)


def assert_all_near(found: dict[str, Curvature], expected: dict[str, Curvature], scale: float = 1.0) -> None:
    assert list(found) == list(expected)
    for structure, G in found.items():
        if structure == "ekfac" and G.made.sharing == "reduce":
            # few mean inputs leave the rest of the eigenbasis open; the trace does not depend on it
            assert_near(G.trace(), scale * expected[structure].trace(), TIGHT)
        else:
            assert_near(G.dense(), scale * expected[structure].dense(), TIGHT)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thinned(6)
def test_duplicated_data_double_everything(name: str, sharing: str) -> None:
    problem = Problem(name, families(name)[-1])
    x, y = problem.data
    once = curvatures(problem, x, y, sharing=sharing)
    twice = curvatures(problem, joined(x, x), torch.cat([y, y]), sharing=sharing, block=3)
    assert_all_near(twice, once, 2.0)
    assert twice["kfac"].made.examples == 8


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.thinned(2)
def test_the_order_of_examples_does_not_matter(name: str) -> None:
    problem = Problem(name, families(name)[-1])
    x, y = problem.data
    order = torch.tensor([2, 0, 3, 1])
    turned = curvatures(problem, rows(x, order), y[order], block=3)
    assert_all_near(turned, curvatures(problem, x, y))


@pytest.mark.parametrize("name", ["lenet", "norms", "tied-linears"])
def test_a_list_gives_the_same_as_separate_calls(name: str) -> None:
    problem = Problem(name, "categorical")
    together = problem.curvature(["kfac", "ekfac", "diagonal", "block"], block=3)
    for structure, G in together.items():
        alone = problem.curvature(structure, block=3)
        torch.testing.assert_close(alone.dense(), G.dense(), msg=structure)
        assert [p.structure for p in alone.parts] == [p.structure for p in G.parts]


def test_a_list_of_one_gives_a_dict() -> None:
    found = Problem("mlp-tanh", "categorical").curvature(["diagonal"])
    assert list(found) == ["diagonal"]
    assert isinstance(found["diagonal"], Curvature)


class Pairs(Dataset[Any]):
    """Samples one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


@pytest.mark.parametrize("kind", ["loader", "shuffled", "ragged", "data set", "tensor data set", "list pair"])
@pytest.mark.thinned(2)
def test_any_source_of_the_same_data_gives_the_same(kind: str) -> None:
    problem = Problem("lenet", "categorical")
    x, y = problem.data
    pairs = TensorDataset(x, y)
    data: Any = {
        "loader": DataLoader(pairs, batch_size=2),
        "shuffled": DataLoader(pairs, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "ragged": DataLoader(pairs, batch_size=3),
        "data set": Pairs(x, y),
        "tensor data set": pairs,
        "list pair": [x, y],
    }[kind]
    found = linnet.curvature(problem.case.model(), data, problem.likelihood, STRUCTURES)
    assert_all_near(found, curvatures(problem, x, y))


@pytest.mark.parametrize("form", ["tensor", "data set", "loader"])
def test_inputs_alone_are_enough_where_no_labels_are_needed(form: str) -> None:
    problem = Problem("mlp-tanh", "categorical")
    x, y = problem.data
    alone: Any = {"tensor": x, "data set": TensorDataset(x), "loader": DataLoader(TensorDataset(x), 3)}[form]
    for expectation in ("exact", "mc", "random-projection"):
        found = curvature_of(
            problem.case.model(), alone, problem.likelihood, STRUCTURES, expectation, samples=2, block=3
        )
        assert_all_near(found, curvatures(problem, x, y, expectation=expectation, samples=2, block=3))


@pytest.mark.parametrize("name", ["lenet", "norms", "gpt2-eager"])
@pytest.mark.thinned(2)
def test_a_subset_of_parameters_is_a_part_of_the_whole(name: str) -> None:
    problem = Problem(name, families(name)[-1])
    places = indices(problem.case.model())
    layers = {n.rsplit(".", 1)[0] for n in places}
    chosen = [n for n in places if n.rsplit(".", 1)[0] in sorted(layers)[::2]]
    own = torch.cat([places[n].flatten() for n in chosen])
    whole, subset = problem.curvature(STRUCTURES), problem.curvature(STRUCTURES, params=chosen)
    for structure, G in subset.items():
        assert G.function.names == chosen
        assert_near(G.dense(), whole[structure].dense()[own[:, None], own], TIGHT)


def test_a_weight_without_its_bias_loses_only_the_bias() -> None:
    problem = Problem("mlp-tanh", "categorical")
    whole, G = problem.curvature("kfac"), problem.curvature("kfac", params=["0.weight", "4.bias"])
    places = indices(problem.case.model())
    own = torch.cat([places["0.weight"].flatten(), places["4.bias"].flatten()])
    expected = whole.dense()[own[:, None], own]
    # B ⊗ A of the weight does not know the bias; a bias by itself has an exact block, Σ B
    assert_near(G.dense(), expected, TIGHT)
    assert [part.structure for part in G.parts] == ["kfac", "block"]


def test_a_mixture_takes_each_layer_from_its_structure() -> None:
    problem = Problem("lenet", "categorical")
    mixture = {r"^0\.": "ekfac", r"^3\.weight": "diagonal", "7": "block", ".*": "kfac"}
    G = problem.curvature(mixture, block=3)
    whole = problem.curvature(["ekfac", "diagonal", "block", "kfac"], block=3)
    expected = torch.zeros_like(G.dense())
    places = indices(problem.case.model())
    for layer, structure in (("0", "ekfac"), ("3", "diagonal"), ("7", "block"), ("9", "kfac")):
        own = torch.cat([places[f"{layer}.weight"].flatten(), places[f"{layer}.bias"].flatten()])
        expected[own[:, None], own] = whole[structure].dense()[own[:, None], own]
    torch.testing.assert_close(G.dense(), expected)
    assert [part.structure for part in G.parts] == ["ekfac", "diagonal", "block", "kfac"]
    assert "mixture" in repr(G)


def test_two_mixtures_in_one_list_are_both_returned() -> None:
    problem = Problem("mlp-tanh", "categorical")
    found = problem.curvature([{".*": "kfac"}, {".*": "diagonal"}])
    assert list(found) == ["mixture", "mixture 2"]
    torch.testing.assert_close(found["mixture"].dense(), problem.curvature("kfac").dense())
    torch.testing.assert_close(found["mixture 2"].dense(), problem.curvature("diagonal").dense())


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Categorical()])
def test_gauss_newton_is_the_hessian_of_a_linear_network(likelihood: Any, float64: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), torch.randn(7, 2, 3)
    y = torch.randn(7, 3) if isinstance(likelihood, Gaussian) else torch.randint(3, (7,))
    H = linnet.curvature(model, (x, y), likelihood, "full", matrix="hessian").dense()
    for structure in ("full", "block"):
        assert_near(linnet.curvature(model, (x, y), likelihood, structure).dense(), H, TIGHT)
    one = (x[:1], y[:1])
    H = linnet.curvature(model, one, likelihood, "full", matrix="hessian").dense()
    for structure in ("kfac", "ekfac", "kfra"):  # Kronecker products are exact for one example
        assert_near(linnet.curvature(model, one, likelihood, structure).dense(), H, TIGHT)


def test_kfra_implies_its_recursion() -> None:
    problem = Problem("mlp-tanh", "categorical")
    said = problem.curvature("kfra", expectation="recursion")
    torch.testing.assert_close(problem.curvature("kfra").dense(), said.dense())


def test_tied_and_reused_weights_are_those_of_one_layer_with_all_its_positions() -> None:
    problem = Problem("tied-linears", "gaussian")
    G = problem.curvature(STRUCTURES)
    expected = Expected.of(problem)
    tied = next(part for part in G["kfac"].parts if part.layer.names == ("first.weight",))
    assert tied.layer.form.uses == 2
    assert "uses" in tied.note, "what is approximated is said"
    own = expected.places["first.weight"].flatten()
    assert_near(G["full"].dense()[own[:, None], own], expected.full[own[:, None], own])


class Pair(nn.Module):
    """Two weights with biases in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
        self.w2, self.b2 = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, self.w1, self.b1)), self.w2, self.b2)


def test_two_layers_of_one_module_are_kept_apart(float64: torch.dtype) -> None:
    inner = Pair()
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for mine, its in zip(twin.parameters(), inner.parameters(), strict=True):
            mine.copy_(its)
    x = torch.randn(5, 3)
    for structure in STRUCTURES:
        G = linnet.curvature(nn.Sequential(inner), x, Gaussian(), structure)
        assert_near(G.dense(), linnet.curvature(twin, x, Gaussian(), structure).dense(), TIGHT)
        assert len({part.layer.name for part in G.parts}) == len(G.parts)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_attention_has_the_factors_of_its_projections(sharing: str, float64: torch.dtype) -> None:
    class Attention(nn.Module):
        """Two heads of self-attention with plain linear layers."""

        def __init__(self) -> None:
            super().__init__()
            self.project, self.out, self.last = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            weights = torch.softmax(q @ k.mT / 2**0.5, -1)
            return self.last(self.out((weights @ v).transpose(1, 2).flatten(2)).mean(1))

    class Fused(nn.Module):
        """The same with torch's own module."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attention(x, x, x)[0].mean(1))

    plain, fused, x = Attention(), Fused(), torch.randn(5, 4, 4)
    with torch.no_grad():
        for mine, its in zip(fused.parameters(), plain.parameters(), strict=True):
            mine.copy_(its)
    expected = linnet.curvature(plain, x, Categorical(), ["kfac", "ekfac"], sharing=sharing)
    found = linnet.curvature(fused, x, Categorical(), ["kfac", "ekfac"], sharing=sharing)
    assert_all_near(found, expected)
    for structure, G in found.items():
        assert {part.structure for part in G.parts} == {structure}


def test_low_rank_adaptation_and_plain_products_have_the_factors_of_linear_layers() -> None:
    lora = case("lora")
    G = linnet.curvature(lora.model(), lora.x1, Gaussian(), "kfac")
    first = next(part for part in G.parts if part.layer.names == ("0.lora_a",))
    x = lora.x1
    A = x.T @ x / len(x)
    operator: Any = first.operator
    assert_near(operator.right, A)
    plain = case("plain-arithmetic")
    G = linnet.curvature(plain.model(), plain.x1, Gaussian(), "kfac")
    product: Any = next(part for part in G.parts if part.layer.names == ("w",)).operator
    assert_near(product.left, plain.x1.T @ plain.x1 / 4)  # stored (d_in, d_out): A ⊗ B
    bias: Any = next(part for part in G.parts if part.layer.names == ("b",)).operator
    assert_near(product.right, bias.dense())  # B of one position is the exact block of the shift


@pytest.mark.parametrize("structure", [*STRUCTURES, "kfra"])
@pytest.mark.parametrize("name", ["mlp-relu", "lenet"])
@pytest.mark.thinned(4)
def test_a_masked_example_is_left_out(name: str, structure: str) -> None:
    if name == "lenet" and structure == "kfra":
        structure = "kfac"
    expected = case(name)
    y = torch.tensor([0, 2, 1, 0])
    y[1] = -100
    kept = [0, 2, 3]
    for block in (None, 1):  # with one example a batch, one batch is masked whole
        G = curvature_of(expected.model(), (expected.x1, y), Categorical(), structure, block=block)
        there = linnet.curvature(expected.model(), (expected.x1[kept], y[kept]), Categorical(), structure)
        assert_near(G.dense(), there.dense())
