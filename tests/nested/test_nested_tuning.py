"""``linnet.adapt(..., tune=True)``: trained lower layers, judged on held-out folds, solved again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError
from linnet.fitting.descent import Descent
from linnet.linear.features import arc_cosine
from linnet.linear.targets import make_targets
from linnet.nested import nested_fit
from linnet.nested import tuning as module
from linnet.nested.nested_fit import NestedFit
from linnet.nested.search import BIAS, Rung, ladder, verdict
from linnet.nested.stages import Staged
from linnet.nested.tuning import FOLDS, Tuning
from linnet.tangent.functional import Functional
from linnet.unfinished import resumable

STEPS = 240


def network(outputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs)]
    return nn.Sequential(*layers).double()


def quadrants(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two classes by the sign of a product of two numbers out of four."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long()


DATA, TEST = quadrants(120), quadrants(400, 1)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and rates of a network this small."""
    small(monkeypatch)


def small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "STEPS", STEPS)
    patch.setattr(module, "VALUE_STEPS", STEPS)
    patch.setattr(module, "RATES", (1e-2, 3e-2))
    patch.setattr(module, "FIRST", 0)


@pytest.fixture(scope="module")
def fits() -> tuple[NestedFit, NestedFit]:
    """The fit at the original weights and the one at trained weights."""
    patch = pytest.MonkeyPatch()
    small(patch)
    found = linnet.adapt(network(), DATA), linnet.adapt(network(), DATA, tune=True)
    patch.undo()
    return found


def accuracy(fit: NestedFit) -> float:
    return float((fit.predict(TEST[0]).argmax(1) == TEST[1]).double().mean())


def test_training_is_taken_where_it_helps(fits: tuple[NestedFit, NestedFit]) -> None:
    plain, tuned = fits
    assert tuned.trained
    assert not plain.trained
    assert accuracy(tuned) > accuracy(plain) + 0.1
    assert [rung.taken for rung in tuned.rungs][-1]
    assert tuned.record.reasons["verdict"].startswith("Use the trained lower layers")
    assert tuned.record.criterion == "folds"
    assert any("trained on the same labels" in text for text in tuned.record.warnings)
    assert "forgetting them gives the same class as training again" in tuned.record.reasons["retraining"]


def test_the_fit_is_ridge_regression_on_the_trained_features(fits: tuple[NestedFit, NestedFit]) -> None:
    fit = fits[1]
    model = copy.deepcopy(fit.prior.network.model)
    x = torch.cat([DATA[0], TEST[0][:7]])
    phi, n = model[:-1](x).detach(), len(DATA[0])
    read = fit.prior.network.staged(x)
    assert torch.allclose(read[:, : phi.shape[1]], phi.double())

    # what earlier layers give after training, and what they gave before
    before = fits[0].prior.network
    own, other = (Functional(Staged(net, before.stages or ())) for net in (model, before.function.model))
    psi = [one.flat(one.theta, x).double()[:, phi.shape[1] :] for one in (own, other)]
    assert torch.allclose(read[:, phi.shape[1] :], torch.cat(psi, 1) / 2**0.5)

    phi = phi.double() - phi[:n].double().mean(0)
    head, early = phi @ phi.T, arc_cosine(read[:, phi.shape[1] :] @ read[:, phi.shape[1] :].T)
    names = [name for name, _ in model.named_parameters() if not name.startswith("4.")]
    body = linnet.linearize(model, params=names).jacobian(x)
    body = sum((j @ j.T for j in body.unbind(1)), torch.zeros(())) / fit.prior.network.heads
    weight, share = fit.body_weight, fit.earlier
    scales = [float(k[:n, :n].diagonal().mean() - k[:n, :n].mean()) for k in (head, early, body)]
    kernel = (1 - share) * head / scales[0] + share * early / scales[1]
    kernel = BIAS + (1 - weight) * kernel + weight * body / scales[2]
    square = kernel[:n, :n] + fit.ridge * torch.eye(n, dtype=torch.float64)
    expected = kernel[n:, :n] @ torch.linalg.solve(square, fit.targets.double())
    assert torch.allclose(fit.predict(x[n:]), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_held_out_outputs_are_those_of_a_network_trained_without_the_fold(
    fits: tuple[NestedFit, NestedFit],
) -> None:
    plain, fit = fits
    rate = float(fit.record.reasons["training"].split()[2].rstrip(","))
    tuning = Tuning(plain, 0)
    rest, held = tuning.parts(1)
    assert sorted(torch.cat([tuning.parts(k)[1] for k in range(FOLDS)]).tolist()) == list(range(fit.n))
    network = tuning.trained(rest, rate)
    kernels = tuning.kernels(network, fit.body_weight > 0)
    kernel = kernels.mixed(fit.body_weight, fit.earlier)[0]
    square = kernel[rest][:, rest] + fit.ridge * torch.eye(len(rest), dtype=torch.float64)
    expected = kernel[held][:, rest] @ torch.linalg.solve(square, fit.targets[rest].double())
    assert fit.held_out is not None
    assert torch.allclose(fit.held_out[held], expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(fit.loo(), fit.held_out)


def test_a_logger_is_told_and_the_network_that_is_given_stays_as_it_is(
    tmp_path: Path, fits: tuple[NestedFit, NestedFit]
) -> None:
    net, rows = network(), list[tuple[int, str, float]]()
    before = copy.deepcopy(net.state_dict())
    fit = linnet.adapt(net, DATA, tune=lambda told, step: rows.extend((step, *one) for one in told.items()))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())
    torch.testing.assert_close(fit.predict(TEST[0]), fits[1].predict(TEST[0]))

    runs = {step: int(value) for step, name, value in rows if name == "run"}
    assert sorted(set(runs.values())) == list(range(1, 2 + FOLDS + 1))  # two rates, two folds, all samples
    assert all((run - 1) * STEPS < step <= run * STEPS for step, run in runs.items())
    losses = [[v for step, name, v in rows if name == "loss" and runs[step] == run] for run in range(1, 6)]
    # epochs of 80 samples, and of 120, in batches of 32
    assert [len(loss) for loss in losses] == [STEPS // 3] * 4 + [STEPS // 4]
    assert all(loss[-1] < loss[0] - 1 for loss in losses)
    held = {step: value for step, name, value in rows if name == "held_out_accuracy"}
    assert list(held) == [
        STEPS,
        2 * STEPS,
        3 * STEPS,
        4 * STEPS,
    ]  # at the end of every run that leaves a fold
    assert fit.held_out is not None
    right = (fit.held_out.argmax(1) == DATA[1]).double().mean()
    assert abs(sum(list(held.values())[-2:]) / 2 - float(right)) < 0.15


def test_a_saved_fit_comes_back(tmp_path: Path, fits: tuple[NestedFit, NestedFit]) -> None:
    fit = fits[1]
    fit.save(tmp_path)
    back = linnet.load(tmp_path, network())
    assert back.trained
    assert back.rungs == fit.rungs
    assert (back.noise, back.temperature, back.variance_scale) == (
        fit.noise,
        fit.temperature,
        fit.variance_scale,
    )
    torch.testing.assert_close(back.loo(), fit.loo())
    # the bias's kernel of 1e3 and a ridge of 3e-4 leave eight digits
    assert torch.allclose(back.predict(TEST[0]), fit.predict(TEST[0]), atol=1e-5)
    again = back.forget([3]).predictive(TEST[0]).probs
    assert torch.allclose(again, fit.forget([3]).predictive(TEST[0]).probs, atol=1e-6)


@pytest.mark.long
def test_a_trained_fit_leaves_as_a_module_and_as_a_network(fits: tuple[NestedFit, NestedFit]) -> None:
    fit, x = fits[1], TEST[0][:9]
    mean, variance = fit.export(x, variance=True)(x)
    torch.testing.assert_close(mean, fit.predict(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, fit.predictive(x).variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(fit.merge().network(x), fit.predict(x), rtol=1e-5, atol=1e-5)


def test_changes_keep_what_folds_noted(fits: tuple[NestedFit, NestedFit]) -> None:
    fit = fits[1]
    less = fit.forget([0, 5])
    assert less.trained
    assert (less.noise, less.temperature) == (fit.noise, fit.temperature)
    assert less.loo().shape == (fit.n - 2, 2)
    assert torch.allclose(less.predict(TEST[0]), less.recomputed().predict(TEST[0]), atol=1e-6)
    more = fit.update((TEST[0][:4], TEST[1][:4]))
    assert torch.allclose(more.loo()[-4:], fit.predict(TEST[0][:4]), atol=1e-5)
    with pytest.raises(InputError, match="trained"):
        fit.update((TEST[0][:4], TEST[1][:4]), ridge="loo")


def test_examples_that_training_has_seen_keep_their_held_out_outputs(
    fits: tuple[NestedFit, NestedFit], tmp_path: Path
) -> None:
    fit = fits[1]
    fit.forget(range(20)).save(tmp_path)
    less = linnet.load(tmp_path / "nested-fit.safetensors", network())
    back = less.update((DATA[0][:20], DATA[1][:20])).update((DATA[0][30:31], DATA[1][30:31]))
    assert torch.equal(back.loo(), torch.cat([fit.loo()[20:], fit.loo()[:20], fit.loo()[30:31]]))
    wider = less.update((TEST[0][:2], torch.tensor([2, 2]))).update((DATA[0][:3], DATA[1][:3]))
    assert torch.equal(wider.loo()[-3:, :2], fit.loo()[:3])
    assert not wider.loo()[-3:, 2].any()


def test_probabilities_are_calibrated_by_held_out_outputs(fits: tuple[NestedFit, NestedFit]) -> None:
    fit = fits[1]
    confidence = float(fit.predictive(TEST[0]).probs.max(1).values.mean())
    assert abs(confidence - accuracy(fit)) < 0.12  # leave-one-out at these weights would claim 0.2 more


def test_regression_is_trained_as_well() -> None:
    x, y = DATA[0], DATA[0][:, :1] * DATA[0][:, 1:2]
    fit = linnet.adapt(network(1), (x, y), tune=True)
    assert fit.trained
    assert fit.rungs[-1].points is None
    assert "less error on held-out folds" in fit.record.reasons["verdict"]
    truth = TEST[0][:, :1] * TEST[0][:, 1:2]
    found = fit.predictive(TEST[0])
    plain = linnet.adapt(network(1), (x, y)).predict(TEST[0])
    assert float((found.mean - truth).square().mean()) < float((plain - truth).square().mean())
    z = (found.mean - truth)[:, 0] / (found.variance[:, 0] + fit.noise).sqrt()
    assert float(z.square().median()) < 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((DATA[0][:5], DATA[1][:5]), "5 samples"),
        ((DATA[0][:8], torch.arange(8)), "0 samples are of classes with more than one"),
        ((DATA[0][:8], torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])), "leaves one class only"),
    ],
)
def test_too_few_samples_keep_the_linear_fit(data: Any, said: str) -> None:
    fit = linnet.adapt(network(), data, tune=True)
    assert not fit.trained
    assert said in fit.record.reasons["verdict"]


def test_rates_at_which_the_network_breaks_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATES", (1e-2, float("inf")))
    monkeypatch.setattr(module, "FIRST", 1)
    fit = linnet.adapt(network(), DATA, tune=True)
    assert fit.record.reasons["training"].startswith("Adam at 0.01,")
    monkeypatch.setattr(module, "RATES", (float("inf"),) * 2)
    fit = linnet.adapt(network(), DATA, tune=True)
    assert not fit.trained
    assert "no learning rate" in fit.record.reasons["verdict"]


def test_rungs_are_compared_sample_by_sample(fits: tuple[NestedFit, NestedFit]) -> None:
    targets = fits[0]._targets
    truth = targets.values
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=truth.dtype)
    rungs = ladder([("linear probe", truth + 4 * noise)], truth + 3 * noise, targets, 7.0)
    gains = (16 - 9) * noise.square().sum(1) / (16 * noise.square().sum(1).mean())
    assert rungs[1].gain == pytest.approx(float(gains.mean()))
    assert rungs[1].gain_error == pytest.approx(float(gains.std()) / len(gains) ** 0.5)
    assert (rungs[1].taken, rungs[1].seconds) == (True, 7.0)
    alike = [("linear probe", truth + 3 * noise)], truth + 2.95 * noise.flip(0)
    same = ladder(*alike, targets, 7.0)
    assert same[1].taken  # classes: training usually helps
    assert verdict(same).startswith("Solved at the trained weights")
    assert "more than chance cannot be told" in verdict(same)
    kept = ladder(*alike, make_targets(truth, truth.shape[1], dtype=truth.dtype), 7.0)
    assert kept[0].taken  # values: it must show
    assert verdict(kept).startswith("Kept the linear probe")
    worse = ladder([("linear probe", truth + 3 * noise)], truth + 4 * noise, targets, 7.0)
    assert worse[0].taken
    assert "% more error on held-out folds" in verdict(worse)
    # less error, as all outputs are nearer, but the order of a fifth of them is wrong
    near = truth + 0.1 * noise
    near[::5] = near[::5].mean(1, keepdim=True) + 0.1 * (near[::5].mean(1, keepdim=True) - truth[::5])
    fewer = ladder([("linear probe", truth * 0.1)], near, targets, 7.0)
    assert fewer[1].gain > fewer[1].gain_error
    assert fewer[0].taken
    # the better of the two before it is what training has to reach, whichever is fitted
    ends = [("linear probe", truth * 0.9), ("linearized lower layers", -truth * 0.5)]
    third = ladder(ends, torch.cat([-truth[:40], truth[40:] * 0.95]), targets, 7.0)
    assert third[1].taken
    assert third[2].accuracy > third[1].accuracy
    assert "than the 100.0 % of the linear probe" in verdict(third)
    assert verdict(third).startswith("Kept the linearized lower layers: training")
    assert "less error on held-out folds and 20.0" in verdict(fewer)
    assert "points less accuracy" in verdict(fewer)


def test_an_error_of_a_log_says_when_it_came() -> None:
    def log(*_: object) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        linnet.adapt(network(), DATA, tune=log)
    assert caught.value.__notes__[0].startswith("tune= raised this at step")


def test_one_fold_is_enough_where_training_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spoiled(self: Tuning, rows: Tensor, rate: float) -> Any:
        calls.append(len(rows))
        broken = copy.deepcopy(self.features.model)
        broken[0].weight[:, :2] = 0  # type: ignore[index, operator, union-attr]
        made = self.features.moved(broken)
        made.before = made  # nothing is left of what it was
        return made

    x = DATA[0]
    data = x, (x[:, 0] + x[:, 1] > 0).long()
    plain = linnet.adapt(network(), data)
    monkeypatch.setattr(Tuning, "trained", spoiled)
    fit = linnet.adapt(network(), data, tune=True)
    assert len(calls) <= len(module.RATES)  # the search on the first fold, and no other run
    assert not fit.rungs[-1].taken
    assert "more error on held-out folds" in fit.record.reasons["verdict"]
    torch.testing.assert_close(fit.predict(x), plain.predict(x))


def test_the_first_fold_decides_whether_the_others_need_the_kernel_of_the_lower_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    kernels = Tuning.kernels

    def counted(self: Tuning, features: Any, share: bool) -> module.Kernels:
        asked.append(share)
        made = kernels(self, features, share)
        # a kernel of the lower layers that tells nothing: white
        return module.Kernels(made.head, torch.eye(len(made.head)).to(made.head)) if share else made

    monkeypatch.setattr(Tuning, "kernels", counted)
    monkeypatch.setattr(nested_fit, "tries_derivatives", lambda *_: True)
    assert linnet.adapt(network(), DATA).body_weight > 0
    fit = linnet.adapt(network(), DATA, tune=True)
    assert fit.body_weight == 0
    assert asked.count(True) == 1


@pytest.mark.parametrize(
    ("points", "gain", "begins"), [(3, 0.1, "Use"), (0.7, 0, "Solved"), (-0.5, 0.1, "Kept")]
)
def test_trained_layers_are_recommended_where_the_gain_is_significant(
    points: float, gain: float, begins: str
) -> None:
    trained = Rung("trained lower layers", 0.9, 0.81, gain, 1e-3, points, 0.7, taken=points > 0)
    told = verdict([Rung("linear probe", 1.0, 0.8), trained])
    assert told.startswith(begins)
    assert "+" not in told


def test_trained_networks_are_kept_inside_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, once, runs = linnet.adapt(network(), DATA, tune=True), Descent.__call__, [0]

    def stopped(descent: Descent, *given: Any) -> Any:
        runs[0] += 1
        if runs[0] == 4:
            raise KeyboardInterrupt
        return once(descent, *given)

    monkeypatch.setattr(Descent, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt), resumable(tmp_path / "kept", interval=0):
        linnet.adapt(network(), DATA, tune=True)
    with pytest.raises(InputError, match="another"), resumable(tmp_path / "kept", interval=0):
        linnet.adapt(network(), (0.9 * DATA[0], DATA[1]), tune=True)
    assert runs[0] == 4  # none was trained on the other inputs
    with resumable(tmp_path / "kept", interval=0):
        found = linnet.adapt(network(), DATA, tune=True)
    assert torch.equal(found.predict(TEST[0]), whole.predict(TEST[0]))
    assert [rung.error for rung in found.rungs] == [rung.error for rung in whole.rungs]
    assert not (tmp_path / "kept").exists()
