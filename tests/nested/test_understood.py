"""What labels are taken for: classes or values, and a warning where that is improbable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import linnet
from linnet.errors import DataError, InputError


def network(outputs: int) -> nn.Module:
    """A small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
THREE = torch.arange(24) % 3
ONE_HOT = nn.functional.one_hot(THREE, 3).double()
GAPS = torch.tensor([3, 7])[torch.arange(24) % 2]


@pytest.mark.parametrize(
    ("y", "outputs", "word"),
    [
        (THREE, 1, "float"),  # a regression, or one class too many for one logit
        (3 * torch.arange(24), 5, "inverse"),  # identifiers
        (GAPS, 5, "inverse"),
        (THREE.double(), 5, "long"),
        (1 + THREE.double(), 5, "long"),
        (THREE.double() % 2, 1, "long"),
        (THREE.double()[:, None] % 2, 1, "long"),
        (ONE_HOT, 5, "argmax"),
    ],
)
def test_what_is_improbable_is_said_and_kept(y: Tensor, outputs: int, word: str) -> None:
    with pytest.warns(UserWarning, match=word):
        fit = linnet.adapt(network(outputs), (X, y), weight=0.0)
    assert any(word in line for line in fit.record.warnings)


@pytest.mark.parametrize(
    ("y", "outputs"),
    [
        (THREE, 5),
        (THREE % 2, 1),  # a logit
        (X[:, 0], 1),
        (X[:, 0], 5),
        (ONE_HOT + ONE_HOT.roll(1, 1), 5),  # several labels a sample
        (torch.arange(24).double() // 2, 1),  # counts
        (torch.arange(24).double() // 2 + 10, 5),
        (THREE.double()[:, None] * 2, 5),  # a column is a value for each sample
    ],
)
def test_what_is_probable_is_taken_without_a_word(y: Tensor, outputs: int) -> None:
    fit = linnet.adapt(network(outputs), (X, y), weight=0.0)
    expected = f"{fit.classes} classes" if fit.classes else f"{fit.targets.shape[1]} value(s)"
    assert fit.record.reasons["targets"] == expected
    assert expected in repr(fit)


def test_classes_without_a_sample_have_no_probability(tmp_path: Path) -> None:
    """The fit is that of the classes that there are, numbered from 0."""
    dense = linnet.adapt(network(5), (X, (GAPS == 7).long()))
    with pytest.warns(UserWarning, match="without a sample"):
        fit = linnet.adapt(network(5), (X, GAPS))
    assert "8 classes, 6 of them" in repr(fit)
    fit.save(tmp_path)
    for one in (fit, linnet.load(tmp_path, network(5))):
        found, expected = one.predictive(X).probs, dense.predictive(X).probs
        assert found.shape == (24, 8)
        torch.testing.assert_close(found[:, [3, 7]], expected, rtol=1e-9, atol=1e-12)
        assert float(found[:, [0, 1, 2, 4, 5, 6]].abs().max()) == 0
        assert one.point_temperature == pytest.approx(dense.point_temperature, rel=1e-9)
        assert one.noise == pytest.approx(dense.noise, rel=1e-9)
    scored = linnet.evaluate(fit, (X, GAPS))
    assert scored.nll == pytest.approx(linnet.evaluate(dense, (X, (GAPS == 7).long())).nll, rel=1e-9)
    more = fit.update((X[:2], torch.tensor([5, 5])))
    assert bool((more.predictive(X).probs[:, 5] > 0).all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.thinned(2)
def test_labels_of_unsigned_types_are_labels(dtype: torch.dtype) -> None:
    y, net = THREE.to(dtype), network(3)
    fit, adapted = linnet.fit(linnet.linearize(net), (X, y)), linnet.adapt(net, (X, y), weight=0.0)
    torch.testing.assert_close(fit.predict(X), linnet.fit(linnet.linearize(net), (X, THREE)).predict(X))
    for one in (fit, adapted, linnet.Laplace(net, linnet.likelihoods.Categorical()).fit((X, y))):
        found = one.predictive(X)
        torch.testing.assert_close(found.log_density(y), found.log_density(THREE))
    assert (
        linnet.audit.flips(net, fit, X, y).accuracy_after
        == linnet.audit.flips(net, fit, X, THREE).accuracy_after
    )
    run = linnet.finetune(net, (X, y), training=linnet.Training(steps=1))
    torch.testing.assert_close(
        run.predict(X), linnet.finetune(net, (X, THREE), training=linnet.Training(steps=1)).predict(X)
    )


WORDS = [["b", "a", "c"][k] for k in THREE.tolist()]
NUMBERS = torch.tensor([1, 0, 2])[THREE]


def test_names_of_classes_are_taken_wherever_the_fit_knows_them(tmp_path: Path) -> None:
    fit = linnet.adapt(network(5), (X, WORDS), weight=0.0)
    assert fit.class_names == ("a", "b", "c")
    pairs = [(X[k : k + 1], WORDS[k : k + 1]) for k in range(24)]
    expected = linnet.evaluate(fit, (X, NUMBERS))
    for data in ((X, WORDS), pairs, DataLoader(list(zip(X, WORDS, strict=True)), batch_size=7)):
        assert linnet.evaluate(fit, data).nll == pytest.approx(expected.nll)
    torch.testing.assert_close(
        linnet.audit.influence(fit, X, labels=WORDS).loss, linnet.audit.influence(fit, X, labels=NUMBERS).loss
    )
    alone = [linnet.evaluate(fit.predictive, (X[::3], y[::3])).nll for y in (WORDS, NUMBERS)]  # one class
    assert alone[0] == alone[1]
    flips = linnet.audit.flips
    assert str(flips(fit, fit, X, WORDS)) == str(flips(fit, fit, X, NUMBERS))
    assert fit.plot.calibration(X, WORDS).correct.mean() == expected.accuracy
    calls = (
        lambda y: linnet.evaluate(fit, (X, y)),
        lambda y: fit.report(None, (X, y)),
        lambda y: flips(fit, fit, X, y),
        lambda y: fit.plot.calibration(X, y),
    )
    for call in calls:
        with pytest.raises(DataError, match="'d'"):
            call(["d", *WORDS[1:]])
    with pytest.raises(InputError, match="same names"):
        linnet.adapt(network(5), (X, THREE)).update((X, WORDS))
    head, same = (linnet.with_head(network(5), 3, data=(X, y)) for y in (WORDS, NUMBERS))
    torch.testing.assert_close(head(X), same(X))
    assert "b" in fit.report(test=(X, WORDS)).html
