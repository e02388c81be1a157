"""Wrong arguments, wrong data and wrong networks: each is an error that says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.curvatures import LowRank, MatrixFree, MonteCarlo, RandomProjection, engine
from linnet.errors import DataError, InputError, LinnetError, MemoryBudgetError, ModelError, NumericalError
from linnet.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
)
from tests.curvatures.side_by_side import curvature_of

pytestmark = pytest.mark.usefixtures("float64")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randint(2, (n,))


def call(**options: Any) -> Any:
    """A call that would be right, but for what is given."""
    given = {"model": network(), "data": data(), "likelihood": Categorical(), **options}
    return curvature_of(**given)


def quartic() -> Custom:
    return Custom(lambda f, y: (f - y).pow(4).sum(-1))


def concave(psd: str = "raise") -> Custom:
    return Custom(lambda f, y: -(f - y).square().sum(-1), psd=psd)


NAMES = r'"full", "block", "diagonal", "kfac", "ekfac", "kfra"'
WORDS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"structure": "nope"}, r"structure='nope'", NAMES, 'structure="kfac"'),
    ({"structure": []}, r"structure=\[\]", "a list of them", 'structure="kfac"'),
    ({"structure": None}, "structure=None", "a mapping of them", 'structure="kfac"'),
    ({"structure": ["kfac", 3]}, r"structure=\['kfac', 3\]", "a structure", 'structure="kfac"'),
    (
        {"expectation": "nope"},
        "expectation='nope'",
        '"exact", "mc", "random-projection"',
        "leave expectation=",
    ),
    ({"sharing": "nope"}, "sharing='nope'", '"expand", "reduce"', "leave sharing="),
    ({"matrix": "nope"}, "matrix='nope'", '"gauss-newton", "fisher" or "hessian"', "leave matrix="),
    ({"samples": 0}, "samples=0", "positive integer", "leave samples="),
    ({"samples": True}, "samples=True", "positive integer", "leave samples="),
    ({"samples": 2.0}, r"samples=2\.0", "positive integer", "leave samples="),
    ({"rank": -1}, "rank=-1", "positive integer", "leave rank="),
    ({"block": 0}, "block=0", "positive integer", "leave block="),
    ({"block": 2.5}, r"block=2\.5", "positive integer", "leave block="),
    ({"seed": 1.5}, r"seed=1\.5", "integer", "leave seed="),
    ({"seed": None}, "seed=None", "integer", "leave seed="),
    ({"method": "nope"}, "method='nope'", '"lanczos", "randomized"', "leave method="),
    ({"derivative": "nope"}, "derivative='nope'", '"exact", "finite-difference"', "leave derivative="),
    ({"memory": "lots"}, "memory is 'lots'", "number of bytes", "2GB"),
    ({"file": 3}, "file=3", "a path", "safetensors"),
    ({"params": 3}, "params=3", "list of names", 'params="all"'),
    ({"params": ["0.weight", "nope"]}, "params names 'nope'", "0.weight", "named_parameters"),
    ({"params": "^nothing$"}, r"params='\^nothing\$'", "at least one", "0.weight"),
    ({"likelihood": "mse"}, "likelihood='mse'", "linnet.likelihoods", r"Categorical\(\)"),
    ({"likelihood": Categorical}, "likelihood is", "linnet.likelihoods", "call the class"),
    ({"model": None}, "model is NoneType", "nn.Module", "the network itself"),
    ({"data": None}, "data is NoneType", r"\(x, y\) pair", "data="),
    ({"data": "abc"}, "data is str", "DataLoader", "data="),
]


@pytest.mark.parametrize(("given", "what", "expected", "remedy"), WORDS, ids=lambda v: str(v)[:40])
def test_wrong_values_are_named_with_what_is_right(
    given: dict[str, Any], what: str, expected: str, remedy: str
) -> None:
    with pytest.raises(InputError, match=rf"(?s){what}.*Expected: .*{expected}.*To fix it: .*{remedy}"):
        call(**given)


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"structure": ["kfac", "matrix-free"]}, r"(?s)\['kfac', 'matrix-free'\].*share one pass.*of their own"),
    ({"structure": ["low-rank", "kfac"]}, r"(?s)'low-rank'.*share one pass.*calls of their own"),
    ({"structure": ["kfac", "full"], "matrix": "hessian"}, r"(?s)'kfac', 'full'.*Hessian matrices in calls"),
    ({"structure": ["kfac", "kfra"]}, r"(?s)'kfra'.*alone with expectation=\"recursion\".*call of their own"),
    ({"structure": "kfac", "expectation": "recursion"}, r"(?s)'kfac'.*'recursion'.*structure=\"kfra\""),
    ({"structure": "kfac", "matrix": "hessian"}, r"(?s)'kfac'.*matrix='hessian'.*\"full\" or \"block\""),
    ({"structure": {".*": "kfac"}, "matrix": "hessian"}, r"(?s)matrix='hessian'.*\"full\" or \"block\""),
    ({"structure": "low-rank", "matrix": "hessian"}, r"(?s)'low-rank'.*matrix='hessian'"),
    ({"structure": "matrix-free", "expectation": "mc", "matrix": "hessian"}, r"(?s)'mc'.*leave expectation="),
    ({"structure": "last-layer", "params": ["0.weight"]}, r"(?s)last-layer.*Linearized.*params=\"last"),
    ({"structure": ["last-layer", "kfac"]}, r"(?s)last-layer.*params=\"last-layer\"\) with any other"),
    ({"expectation": "empirical", "matrix": "gauss-newton"}, r"(?s)'empirical'.*matrix='fisher'"),
    ({"likelihood": quartic(), "expectation": "mc", "matrix": "gauss-newton"}, r"(?s)'mc'.*matrix='fisher'"),
    (
        {"likelihood": quartic(), "expectation": "random-projection", "matrix": "fisher"},
        r"(?s)'random-projection'.*matrix='gauss-newton'",
    ),
    (
        {"structure": "matrix-free", "expectation": "mc", "derivative": "finite-difference"},
        r"(?s)finite-difference.*expectation=\"exact\"",
    ),
    ({"structure": "kfra", "file": "a.safetensors"}, r"(?s)a\.safetensors.*'kfra'.*leave file="),
    ({"structure": "low-rank", "file": "a.safetensors"}, r"(?s)a\.safetensors.*'low-rank'.*leave file="),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), TOGETHER, ids=lambda v: str(v)[:60])
def test_values_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(**given)


@pytest.mark.parametrize("shape", [(6, 1, 1), (6, 2)])
def test_an_error_shows_the_shape_of_all_labels(shape: tuple[int, ...]) -> None:
    data = torch.randn(6, 3), torch.zeros(shape, dtype=torch.long)
    with pytest.raises(DataError, match=re.escape(str(shape))):
        linnet.curvature(nn.Linear(3, 3), data, linnet.likelihoods.Categorical())


def test_a_linearization_has_its_own_parameters() -> None:
    lin = linnet.linearize(network())
    with pytest.raises(InputError, match=r"(?s)structure='last-layer'.*linnet\.linearize"):
        linnet.curvature(lin, data(), Categorical(), "last-layer")
    with pytest.raises(InputError, match=r"(?s)params= or output=.*linnet\.linearize"):
        linnet.Laplace(lin, Categorical(), params="all").fit(data())


def test_the_hessian_of_a_linearization_is_that_of_its_network() -> None:
    model, given = network(), data()
    whole = linnet.curvature(model, given, Categorical(), "full", matrix="hessian").dense()
    lin = linnet.linearize(model, params="last-layer")
    part = linnet.curvature(lin, given, Categorical(), "full", matrix="hessian").dense()
    assert torch.allclose(part, whole[-len(part) :, -len(part) :], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expectation": LowRank(3)}, "expectation"),
        ({"structure": MonteCarlo(3)}, "structure"),
        ({"passes": "4GB"}, "passes"),
        ({"passes": {"memory": "4GB"}}, "passes"),
    ],
)
def test_settings_stand_where_they_belong(given: dict[str, Any], said: str) -> None:
    for call in (linnet.curvature, linnet.Laplace):
        first = (network(), data(), Categorical()) if call is linnet.curvature else (network(), Categorical())
        with pytest.raises(InputError, match=said):
            call(*first, **given)


def test_a_word_is_its_settings_with_their_defaults() -> None:
    model, given = network(), data()
    for words, settings in (
        (("low-rank", "exact"), (LowRank(), "exact")),
        (("kfac", "mc"), ("kfac", MonteCarlo())),
        (("kfac", "random-projection"), ("kfac", RandomProjection())),
    ):
        one, other = (linnet.curvature(model, given, Categorical(), *way) for way in (words, settings))
        torch.testing.assert_close(one.dense(), other.dense())
    free = linnet.curvature(model, given, Categorical(), MatrixFree())
    v = torch.ones(free.shape[1])
    torch.testing.assert_close(free @ v, linnet.curvature(model, given, Categorical(), "matrix-free") @ v)


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({"0": "kfac"}, r"(?s)no structure for 2\.weight, 2\.bias.*\"\.\*\""),
        ({}, r"(?s)no structure for 0\.weight.*\"\.\*\""),
        ({"(": "kfac"}, r"(?s)key '\('.*no regular expression.*backslash"),
        ({3: "kfac"}, r"(?s)key 3.*regular expressions"),
        ({".*": "kfra"}, r"(?s)structure\['\.\*'\]='kfra'.*\"block\", \"diagonal\", \"kfac\", \"ekfac\""),
        ({".*": "matrix-free"}, r"(?s)'matrix-free'.*\"block\", \"diagonal\", \"kfac\", \"ekfac\""),
        ({".*": "nope"}, r"(?s)structure='nope'.*\"kfac\""),
        ({".*": None}, r"(?s)structure=None.*\"kfac\""),
    ],
    ids=str,
)
def test_mixtures_must_name_known_structures_for_all_layers(mixture: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(structure=mixture)


LABELS: list[tuple[Any, Any, str]] = [
    (Categorical(), torch.zeros(6), r"(?s)y has type torch\.float.*integer classes.*y\.long\(\)"),
    (Categorical(), torch.full((6,), 2), r"(?s)y\[\d\] is 2.*classes from 0 to 1"),
    (Categorical(), torch.full((6,), -1), r"(?s)y\[\d\] is -1.*ignore_index"),
    (Categorical(), torch.zeros(6, 3), r"(?s)y has .*3"),
    (Gaussian(), torch.zeros(6, dtype=torch.long), r"(?s)y has shape.*Categorical\(\)"),
    (Gaussian(), torch.zeros(6, 3), r"(?s)y has shape \(\d, 3\).*\(\d, 2\)"),
    (Gaussian(), torch.full((6, 2), torch.nan), r"(?s)nan.*masked=True"),
    (Bernoulli(), torch.full((6, 2), 3.0), r"(?s)y\[0, 0\] is 3"),
    (Poisson(), torch.full((6, 2), -1.0), r"(?s)y\[0, 0\] is -1"),
    (HeteroscedasticGaussian(), torch.zeros(6, 2), r"(?s)y has shape \(\d, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(("likelihood", "y", "message"), LABELS, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("structure", ["kfac", "kfra", "low-rank"])
def test_labels_of_the_wrong_kind_are_refused(
    structure: str, likelihood: Any, y: Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        call(data=(data()[0], y), likelihood=likelihood, structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block", "full", "kfra"])
def test_an_indefinite_hessian_is_named(structure: str) -> None:
    given = (data()[0], torch.zeros(6, 2))
    if structure != "kfra":
        with pytest.raises(NumericalError, match=r"(?s)Custom.*eigenvalue -2.*example 0.*psd=\"clip\""):
            call(data=given, likelihood=concave(), structure=structure)
    clipped = call(data=given, likelihood=concave("clip"), structure=structure)
    assert float(clipped.trace()) == 0.0


@pytest.mark.parametrize("structure", ["kfac", "full"])
def test_targets_are_missing_where_they_are_needed(structure: str) -> None:
    with pytest.raises(DataError, match=r"(?s)no targets.*'empirical'.*Categorical.*pass the targets"):
        call(data=data()[0], expectation="empirical", structure=structure)
    with pytest.raises(DataError, match=r"(?s)no targets.*Custom.*matrix=\"fisher\""):
        call(data=DataLoader(TensorDataset(data()[0]), 2), likelihood=quartic(), structure=structure)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra", "low-rank"])
def test_inputs_that_are_not_finite_are_named(structure: str, bad: float) -> None:
    x, y = data()
    x[4, 1] = bad
    with pytest.raises(DataError, match=r"(?s)x holds NaN or infinite.*index 4.*drop or repair"):
        call(data=(x, y), structure=structure)
    with pytest.raises(DataError, match=r"(?s)x holds NaN or infinite.*drop or repair"):
        call(data=DataLoader(TensorDataset(x, y), 2), structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra", "low-rank", "full"])
def test_data_without_examples_are_refused(structure: str) -> None:
    x, y = data(0)
    for empty in ((x, y), TensorDataset(x, y), DataLoader(TensorDataset(x, y), 2), DataLoader([], 2)):
        with pytest.raises(DataError, match=r"(?s)data is empty.*at least one example"):
            call(data=empty, structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra", "full", "low-rank", "diagonal"])
def test_a_batch_of_one_is_enough(structure: str) -> None:
    x, y = data(1)
    G = call(data=(x, y), structure=structure)
    assert G.made.examples == 1
    assert float(G.trace()) > 0


def test_pairs_of_different_lengths_are_refused() -> None:
    x, y = data()
    with pytest.raises(DataError, match=r"(?s)6 inputs but targets of shape \(4,\).*one target for each"):
        call(data=(x, y[:4]))


class Drifting(Dataset[Any]):
    """Other numbers at every read."""

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3), torch.tensor(i % 2)


def test_data_that_change_between_passes_are_found() -> None:
    for changing in (Drifting(), DataLoader(Drifting(), 2)):
        with pytest.raises(DataError, match=r"(?s)changes between passes.*other values.*augmentation"):
            call(data=changing, structure="ekfac")
        call(data=changing, structure="kfac")  # one pass is enough

    class Growing(Drifting):
        def __len__(self) -> int:
            self.length += 1
            return self.length

    class Fixed(Growing):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.ones(3), torch.tensor(0)

    with pytest.raises(DataError, match=r"(?s)changes between passes: \d+ examples, then \d+.*drop_last"):
        call(data=Fixed(), structure="ekfac")


class Logarithm(nn.Module):
    """Activations that are NaN for some examples, and outputs that hide it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.log(self.a(x).square() + x[:, :1])
        return torch.nan_to_num(self.c(torch.tanh(self.b(h))))


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block", "full", "kfra"])
def test_activations_that_are_not_finite_are_named_by_layer(structure: str) -> None:
    x, y = data()
    x[:, 0] = 1.0
    x[0, 0] = -100.0
    with pytest.raises(ModelError, match=r"(?s)activations are NaN.*input of b\.weight.*scale of x"):
        call(model=Logarithm(), data=(x, y), structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "kfra"])
def test_an_overflow_is_named_by_layer(structure: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.mul_(1e308)
        model[0].weight.mul_(1e6)
    with pytest.raises(ModelError, match=r"(?s)activations are NaN or infinite.*input of 2\.weight"):
        call(model=model, structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "kfra", "full"])
def test_inputs_that_the_network_cannot_take_are_explained(structure: str) -> None:
    x, y = data()
    with pytest.raises(ModelError, match=r"(?s)cannot run on x.*shapes cannot be multiplied.*shape, dtype"):
        call(data=(x[:, :2], y), structure=structure)
    with pytest.raises(ModelError, match=r"(?s)cannot run on x \(bool"):
        call(data=(x > 0, y), structure=structure)


def test_networks_without_real_weights_are_refused() -> None:
    with pytest.raises(ModelError, match=r"(?s)no floating-point parameter"):
        call(model=nn.Tanh())
    x = data()[0].to(torch.complex128)
    with pytest.raises(ModelError, match=r"(?s)is complex.*params="):
        call(model=nn.Linear(3, 2, dtype=torch.complex128), data=(x, data()[1]))


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "diagonal", "kfra", "low-rank"])
def test_too_little_memory_is_an_error_with_alternatives(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(engine, "_chunks", never)
    with pytest.raises(
        MemoryBudgetError, match=r"(?s)would need .*at most 100 B, the memory budget.*(use|lower) .*, or "
    ):
        call(structure=structure, memory=100)


def test_memory_is_asked_for_before_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(3000, 2000), nn.Tanh(), nn.Linear(2000, 2))
    x = torch.randn(2, 3000)
    with pytest.raises(MemoryBudgetError, match=r"(?s)6006002 parameters would need 577 TB.*matrix-free"):
        call(model=model, data=(x, data(2)[1]), structure="full", memory="1GB")


@pytest.mark.parametrize("structure", ["ekfac", "low-rank", "kfac", "block", "full", "kfra", "diagonal"])
def test_singular_matrices_are_named_by_layer(structure: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = network(), data(40)
    x[:, 1] = x[:, 0]
    if structure == "diagonal":
        x[:, 1] = 0.0
    if structure == "ekfac":  # nothing reaches the first layer
        with torch.no_grad():
            model[2].weight.zero_()
    G = call(model=model, data=(x, y), structure=structure, rank=5)
    layer = {"full": "curvature of all", "low-rank": "low-rank curvature"}.get(structure, "curvature of 0")
    for question in (lambda: G.solve(torch.ones(26)), lambda: G.logdet(), lambda: G.inverse()):
        try:
            question()
            said = caplog.text  # solved with a little damping, and a warning the first time
        except NumericalError as error:
            said = str(error)
        # the last layer of a softmax is singular too
        assert layer in said or "curvature of 2" in said
        assert "singular" in said or "positive definite" in said
    assert G.damped(0.1).logdet().isfinite()


def test_damping_must_not_be_negative() -> None:
    G = call()
    for damp in (G.damped, G.factored_damped):
        for wrong in (-1.0, float("nan"), float("inf"), "much"):
            with pytest.raises(InputError, match=r"(?s)(damping|multiplier) is .*(not negative|finite)"):
                damp(wrong)


@pytest.mark.parametrize(
    "wrong", [torch.ones(25), torch.ones(1, 26), torch.ones(26).float(), "v", {"0.weight": 1}]
)
def test_vectors_must_fit(wrong: Any) -> None:
    for function in (lambda G: G @ wrong, lambda G: G.damped(1.0).solve(wrong)):
        with pytest.raises((InputError, TypeError), match=r"(?s)26|float64|vector|Params|parameters"):
            function(call())


def test_all_errors_are_linnets_own() -> None:
    assert issubclass(DataError, LinnetError)
    assert issubclass(MemoryBudgetError, MemoryError)
