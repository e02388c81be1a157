"""Baselines of a linear fit, and the head whose outputs start at zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import linnet
from linnet.fitting.descent import fine_tune, held_out_probe, nearest_class_mean
from linnet.fitting.last_layer import with_centered_head


def blobs(n: int = 60) -> tuple[Tensor, Tensor]:
    """Three classes around three corners."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 3
    return 2 * nn.functional.one_hot(y, 3) + 0.4 * torch.randn(n, 3, generator=generator), y


def network() -> nn.Module:
    """A small network with BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def test_fine_tuning_learns_and_leaves_the_network_alone() -> None:
    model = network().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = fine_tune(model, blobs(), steps=60)
    x, y = blobs(90)
    assert (tuned.predict(x).argmax(1) == y).double().mean() > 0.95
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    state = tuned.model.state_dict()
    assert torch.equal(state["1.running_mean"], before["1.running_mean"])
    assert not torch.equal(state["1.weight"], before["1.weight"])
    assert tuned.learning_rate in tuned.held_out
    assert tuned.held_out[tuned.learning_rate] == max(tuned.held_out.values())


def test_fine_tuning_repeats_and_follows_its_arguments() -> None:
    data, x = blobs(), blobs(9)[0]
    first = fine_tune(network(), data, steps=8, learning_rates=(0.1,)).predict(x)
    assert torch.equal(first, fine_tune(network(), data, steps=8, learning_rates=(0.1,)).predict(x))
    changes = [{"seed": 1}, {"steps": 9}, {"batch_size": 8}, {"learning_rates": (0.01,)}]
    for change in changes:
        other = fine_tune(network(), data, **{"steps": 8, "learning_rates": (0.1,), **change}).predict(x)  # type: ignore[arg-type]
        assert not torch.equal(first, other)


def test_fine_tuning_survives_a_rate_that_diverges() -> None:
    tuned = fine_tune(network(), blobs(), steps=30, learning_rates=(1e38, 0.03))
    assert tuned.learning_rate == 0.03


def test_fine_tuning_of_values() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    tuned = fine_tune(model, (x, x[:, :1] * 2), steps=200)
    assert ((tuned.predict(x) - 2 * x[:, :1]) ** 2).mean() < 0.5


def test_the_probe_does_not_see_the_held_out() -> None:
    x, _ = blobs()
    y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(3))  # nothing to be learned
    model = network()
    held = held_out_probe(model, (x, y), 3)
    own = linnet.with_head(model, 3, linnet.Probe(ridge=1e-6), data=(x, y)).eval()(x)
    assert (held.argmax(1) == y).double().mean() < (own.argmax(1) == y).double().mean()
    x, y = blobs()
    assert (held_out_probe(model, (x, y), 3, folds=60).argmax(1) == y).double().mean() > 0.9
    assert not torch.equal(held_out_probe(model, (x, y), 3), held_out_probe(model, (x, y), 3, seed=1))


def test_nearest_class_mean() -> None:
    x, y = blobs()
    assert (nearest_class_mean(network(), (x, y), x).argmax(1) == y).double().mean() > 0.9


def test_a_centered_head_is_zero_with_the_same_jacobian(float64: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    centered = with_centered_head(model)
    x = torch.ones(4, 3).cumsum(0) / 4
    plain, zeroed = linnet.linearize(model), linnet.linearize(centered)
    assert torch.equal(zeroed.base(x), torch.zeros(4, 2))
    assert zeroed.parameter_names == plain.parameter_names
    assert torch.allclose(zeroed.jacobian(x), plain.jacobian(x), rtol=1e-12)
    assert torch.allclose(zeroed.kernel(x), plain.kernel(x), rtol=1e-12)
    v = torch.ones(plain.space.dim)
    assert torch.allclose(zeroed.jvp(x, v), plain.jvp(x, v), rtol=1e-12)


def test_the_centered_fit_is_the_fit_that_draws_the_head_to_zero(float64: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, labels = blobs(12)
    x, y = x.double(), labels % 2
    probe = linnet.with_head(model, 2, data=(x, y))
    centered = linnet.fit(linnet.linearize(with_centered_head(probe)), (x, y), ridge=0.7)
    lin = linnet.linearize(probe)
    jacobian = lin.jacobian(x).reshape(24, -1)
    head = torch.cat([torch.zeros(20), *(p.detach().flatten() for p in list(probe.parameters())[2:])])
    target = 15 * nn.functional.one_hot(y, 2).double().flatten() - lin.base(x).flatten()
    # minimize ½‖t − f₀ − Jδ‖² + ½ρ‖δ + θ_head‖²
    matrix = jacobian.T @ jacobian + 0.7 * torch.eye(jacobian.shape[1])
    delta = torch.linalg.solve(matrix, jacobian.T @ target - 0.7 * head)
    expected = lin.base(x) + (jacobian @ delta).view(12, 2)
    assert torch.allclose(centered.predict(x), expected, rtol=1e-8)
