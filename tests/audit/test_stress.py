"""Fits under shifts that are tried on their training examples: exactness, records, likeness, refusals."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.audit import monitor, stress_test
from linnet.audit.left_out import Reference, Unseen, confidence
from linnet.audit.monitor import Met, expected, likened
from linnet.audit.stress import references
from linnet.errors import DataError, InputError, LinnetError
from tests.audit.test_monitor import KINDS, fitted, network, samples, values


def turned(x: Tensor) -> Tensor:
    """Points mirrored in the first coordinate, and moved."""
    return x * torch.tensor([-1.0, 1, 1]).to(x) + 1.5


SHIFTS = {"turned": turned, "wide": lambda x: 3 * x}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_an_altered_example_is_judged_by_the_fit_without_it(kind: str) -> None:
    x, y = samples(14, 0)
    fit = fitted(kind, x, y, ridge=0.7)
    (found,) = references(fit, Reference.of(fit), {"turned": turned})
    assert found.unseen.spread is not None
    one_step = kind in ("softmax", "binary")
    right = []
    for i in range(14):
        without, new = fit.forget([i]), turned(x[i : i + 1])
        outputs = without.predict(new)[0]
        tolerance = 0.15 if one_step else 1e-7
        assert torch.allclose(found.unseen.outputs[i], outputs.to(found.unseen.outputs), atol=tolerance)
        covariance = without.system.covariance(new) / without.ridge
        spread = fit._unit * covariance.diagonal(dim1=1, dim2=2).mean().double()
        # one Newton step takes the curvature as it was
        assert torch.allclose(found.unseen.spread[i], spread, rtol=0.3 if one_step else tolerance)
        if kind == "values":
            right.append((values(x)[i] - outputs).square().mean())
        else:
            label = (y[i] > 0).long() if kind == "binary" else y[i]
            classes = torch.cat([-outputs, outputs]) if kind == "binary" else outputs
            right.append((classes.argmax() == label).double())
    if not one_step:
        assert torch.allclose(found.right, torch.stack(right).double(), atol=1e-7)


@pytest.mark.parametrize("kind", ["adapt", "values"])
def test_records(kind: str) -> None:
    x, y = samples(40, 0)
    fit = fitted(kind, x, y)
    calm, other, wide = stress_test(fit, SHIFTS)
    assert [record.shift for record in (calm, other, wide)] == [None, "turned", "wide"]
    assert {record.n for record in (calm, other, wide)} == {40}
    assert (calm.change, calm.change_error) == (0, 0)
    known = Reference.of(fit)
    found = references(fit, known, SHIFTS)[0].right
    if kind == "adapt":
        assert other.rms_error is None
        assert calm.accuracy == pytest.approx(float((fit.loo().argmax(1) == y).double().mean()))
        assert other.accuracy == pytest.approx(float(found.mean()))
        assert other.change == pytest.approx(other.accuracy - calm.accuracy)
        assert other.change_error == pytest.approx(float((found - known.right).std(correction=0)) / 40**0.5)
    else:
        assert other.accuracy is None
        assert other.rms_error == pytest.approx(float(found.mean().sqrt()))
        assert calm.rms_error is not None
        assert other.change == pytest.approx(other.rms_error - calm.rms_error)
    assert other.standard_error > 0


def test_the_accuracy_is_that_of_new_examples() -> None:
    x, y = samples(4000, 0)
    for shift in SHIFTS.values():
        before, after = [], []
        for start in range(0, 1000, 100):
            fit = fitted("adapt", x[start : start + 100], y[start : start + 100], ridge=1.0)
            (_, record) = stress_test(fit, {"a": shift})
            before.append(record.accuracy)
            after.append(float((fit.predict(shift(x[1000:])).argmax(1) == y[1000:]).double().mean()))
        off = torch.tensor(before) - torch.tensor(after)
        assert abs(float(off.mean())) < 3 * max(float(off.std()) / 10**0.5, 0.01)


def test_functions_and_altered_inputs_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(40, 0)
    fit = fitted("squared", x, y)
    for count in (40, 15):
        monkeypatch.setattr(sys.modules["linnet.audit.stress"], "EXAMPLES", count)
        for by_function, given in zip(
            stress_test(fit, {"a": turned}), stress_test(fit, {"a": turned(x).numpy()}), strict=True
        ):
            assert by_function.n == given.n == count
            assert by_function.accuracy == given.accuracy
    at = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:15]
    calm, _ = stress_test(fit, {"a": turned})
    assert calm.accuracy == pytest.approx(float((fit.loo().argmax(1) == y)[at].double().mean()))


@pytest.mark.parametrize("kind", ["adapt", "softmax", "values"])
@pytest.mark.thinned(2)
def test_batches_are_like_the_shifts_that_they_met(kind: str) -> None:
    (x, y), (new, truth) = samples(150, 0), samples(2000, 1)
    fit = fitted(kind, x, y)
    mixed = torch.where(
        torch.rand(2000, generator=torch.Generator().manual_seed(0))[:, None] < 0.4, 3 * new, new
    )
    batches = [new, turned(new), 3 * new, mixed]
    found, plain = [*monitor(fit, batches, shifts=SHIFTS)], [*monitor(fit, batches)]
    assert [batch.like for batch in found] == [None, "turned", "wide", "wide"]
    assert found[0].share is None
    for batch, share in zip(found[1:], (1, 1, 0.4), strict=True):
        assert batch.share == pytest.approx(share, abs=0.15)
        assert batch.explained is not None
        assert batch.explained > 0.8
    for batch, without in zip(found, plain, strict=True):
        assert without.like is without.share is without.explained is None
        assert (batch.p_value, batch.drifted) == (without.p_value, without.drifted)
    assert found[0].to_json() == plain[0].to_json()
    for batch, inputs in zip(found[1:], batches[1:], strict=True):
        outputs = fit.predict(inputs)
        if kind == "values":
            rms = float((outputs - values(new)).square().mean().sqrt())
            assert batch.rms_error == pytest.approx(rms, rel=0.2)
        else:
            right = float((outputs.argmax(1) == truth).double().mean())
            assert batch.accuracy is not None
            assert abs(batch.accuracy - right) < 3 * batch.standard_error
    if kind == "adapt":  # the corrected accuracy, by hand
        like = references(fit, Reference.of(fit), SHIFTS)[1]
        off = (like.right - confidence(fit, like.unseen)).mean()
        expected = float(fit.predictive(mixed).probs.double().amax(1).mean() + found[3].share * off)
        assert found[3].accuracy == pytest.approx(expected)


def test_errors_of_a_mixture_of_values_are_those_of_its_parts() -> None:
    x, y = samples(150, 0)
    fit = fitted("values", x, y)
    known = Reference.of(fit)
    (like,) = references(fit, known, {"wide": lambda x: 3 * x})

    class Prediction:  # of a batch half of which are the training examples, the other half these altered
        mean = torch.cat([known.unseen.outputs, like.unseen.outputs])
        variance = torch.cat([known.unseen.spread, like.unseen.spread])[:, None]  # type: ignore[list-item]

    half: Any = Prediction()
    found, error = expected(fit, known, half, Met(like, 0.5, 1.0))
    assert found == pytest.approx(float(torch.cat([known.right, like.right]).mean().sqrt()))
    assert 0 < error < found


def test_a_shift_that_changes_nothing_explains_nothing() -> None:
    x, y = samples(60, 0)
    y = y.clamp(max=1)
    y[7] = 2  # the only one of its class, which no shift is tried on
    fit = fitted("adapt", x, y)
    known = Reference.of(fit)
    same = references(fit, known, {"same": lambda x: x})
    far = references(fit, known, {"wide": lambda x: 3 * x})[0].unseen
    assert likened([known, *same], far).explained == pytest.approx(0, abs=1e-9)
    (batch,) = monitor(fit, [9 * x], shifts={"same": lambda x: x})
    assert batch.drifted
    assert batch.like is None
    assert batch.share == batch.explained == 0


def test_the_share_of_a_mixture_is_exact() -> None:
    x, y = samples(40, 0)
    fit = fitted("squared", x, y)
    reference = Reference.of(fit)
    known = [reference, *references(fit, reference, SHIFTS)]
    columns = ("outputs", "spread", "p")
    for calm, met in ((3, 1), (1, 4), (0, 1)):
        parts = calm * [reference.unseen] + met * [known[2].unseen]
        batch = Unseen(*(torch.cat([getattr(one, name) for one in parts]) for name in columns))
        found = likened(known, batch)
        assert found.like.shift == "wide"
        assert found.share == pytest.approx(met / (met + calm))
        assert found.explained == pytest.approx(1)
    for none in (likened(known, reference.unseen), likened([reference], known[1].unseen)):
        assert none.share == pytest.approx(0, abs=1e-9)
    assert none.explained == 0


def test_constant_outputs() -> None:
    x, _ = samples(20, 0)
    net = network(2)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    with pytest.warns(UserWarning, match="constant"):
        fit = linnet.fit(linnet.linearize(net), (x, torch.zeros(20, 2).double()), ridge=1.0)
    (record,) = monitor(fit, [x], shifts={"a": turned})
    assert record.like is None
    _, shifted = stress_test(fit, {"a": turned})
    assert shifted.rms_error == pytest.approx(0, abs=1e-9)
    assert shifted.change_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        [turned],
        "turned",
        {1: turned},
        {"a": 3},
        {"a": None},
        {"a": "text"},
        {"a": lambda x: "text"},
    ],
)
def test_shifts_that_are_none(wrong: Any) -> None:
    x, y = samples(12, 0)
    fit = fitted("adapt", x, y)
    with pytest.raises((InputError, DataError), match="shifts"):
        stress_test(fit, wrong)


def test_altered_examples_that_cannot_be_compared() -> None:
    x, y = samples(12, 0)
    fit = fitted("adapt", x, y)
    with pytest.raises(DataError, match=r"shifts\['fewer'\] has 5 examples.* 12 training examples"):
        stress_test(fit, {"fewer": lambda x: x[:5]})
    with pytest.raises(DataError, match=r"shifts\['part'\] has 6 examples"):
        [*monitor(fit, [x], shifts={"part": x[:6]})]
    with pytest.raises(DataError, match=r"shifts\['nan'\] holds NaN"):
        stress_test(fit, {"nan": lambda x: x * torch.nan})


def test_errors_of_a_network_name_the_shift() -> None:
    x, y = samples(12, 0)
    fit = fitted("adapt", x, y)
    with pytest.raises(LinnetError, match=r"shifts\['narrow'\]: .*cannot run"):
        stress_test(fit, {"narrow": lambda x: x[:, :2]})
    with pytest.raises(LinnetError, match=r"shifts\['pair'\]"):
        stress_test(fit, {"pair": lambda x: (x, y)})


def test_parts_of_an_input_are_no_shifts() -> None:
    x, y = samples(12, 0)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, points: Tensor) -> Tensor:
            found: Tensor = self.layer(points)
            return found

    fit = linnet.adapt(Named(), ({"points": x}, y))
    with pytest.raises(InputError, match="parts of an input"):
        stress_test(fit, {"points": x})
    assert len(stress_test(fit, {"wide": {"points": 3 * x}})) == 2


def test_random_shifts_are_the_same_each_time() -> None:
    x, y = samples(30, 0)
    fit, before = fitted("adapt", x, y), torch.get_rng_state()
    noise = {"noise": lambda x: x + torch.randn_like(x)}
    first, second = (stress_test(fit, noise)[1] for _ in range(2))
    assert (first.accuracy, first.change) == (second.accuracy, second.change)
    assert torch.equal(torch.get_rng_state(), before)


def test_shifts_may_take_gradients() -> None:
    x, y = samples(20, 0)
    fit = fitted("adapt", x, y)

    def uphill(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.square().sum(), x)
        return x + slope

    assert stress_test(fit, {"a": uphill})[1].accuracy == stress_test(fit, {"a": lambda x: 3 * x})[1].accuracy


def test_a_class_of_one_example_is_set_aside() -> None:
    x, y = samples(30, 0)
    y = y.clamp(max=1)
    y[7] = 2
    fit = fitted("adapt", x, y)
    calm, _ = stress_test(fit, SHIFTS)[:2]
    others = torch.arange(30) != 7
    assert calm.n == 29
    assert calm.accuracy == pytest.approx(float((fit.loo().argmax(1) == y)[others].double().mean()))
    with pytest.raises(InputError, match="no class has two examples"):
        stress_test(linnet.adapt(network(3), (x[:3], torch.arange(3))), SHIFTS)


def test_no_error_of_an_accuracy_is_zero() -> None:
    x, _ = samples(30, 0)
    fit = linnet.adapt(network(2), (x, (x[:, 0] > 0).long()))
    calm, _ = stress_test(fit, {"wide": lambda x: 3 * x})
    assert calm.standard_error > 0.02


def test_a_head_that_has_seen_the_labels_is_told() -> None:
    x, y = samples(40, 0)
    net = linnet.with_head(network(3), 3, data=(x, y))
    fit = linnet.fit(linnet.linearize(net), (x, y), ridge=1.0)
    with pytest.warns(UserWarning, match="head has seen labels"):
        stress_test(fit, SHIFTS)


def test_errors_of_a_function_are_its_own() -> None:
    x, y = samples(12, 0)

    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("by a user")

    with pytest.raises(RuntimeError, match="by a user"):
        stress_test(fitted("adapt", x, y), {"fails": fails})


def test_fits_without_a_closed_form_are_refused() -> None:
    x, y = samples(60, 0)
    fit = fitted("adapt", x, y)
    fit.held_out = fit.loo()
    with pytest.raises(InputError, match=r"shifts= of a fit with a cross-fitted head.*To fix it"):
        stress_test(fit, SHIFTS)
    with pytest.raises(InputError, match="shifts= of a fit"):
        monitor(fit, [x], shifts=SHIFTS)
    with pytest.raises(InputError, match=r"stress_test\(\) of a fit with sample_weight"):
        stress_test(linnet.adapt(network(3), (x, y), sample_weight=torch.rand(60)), SHIFTS)
