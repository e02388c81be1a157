"""Neural anisotropy directions against dense mixed derivatives and theorem 1."""

from __future__ import annotations

from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, NumericalError
from linnet.spectrum.anisotropy import MixedDerivative
from tests.fitting.problems import near, real
from tests.refusals import refused

Kind = Literal["full", "trace", "sum"]
KINDS: tuple[Kind, ...] = ("full", "trace", "sum")


def mlp(outputs: int = 1, inputs: int = 6) -> nn.Module:
    """A smooth network in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(inputs, 7), nn.GELU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, outputs)]
        return nn.Sequential(*layers).double()


def cnn() -> nn.Module:
    """A small convolutional network with a BatchNorm and pooling."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        net = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 1),
        )
    return net.double()


class Square(nn.Module):
    """f(x) = Σ_h v_h (z² + z) with z = w_h x: gradients in the weights are polynomials of degree two in x."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(real(4, 3, seed=1)), nn.Parameter(real(4, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N,)."""
        z = x @ self.w.T
        return (z.square() + z) @ self.v


def mixed(model: nn.Module, points: Tensor) -> Tensor:
    """E ∇²_{x,θ} f_c by nested plain derivatives, one entry of the gradient at a time: (C, P, D)."""
    model = model.eval()
    parameters = list(model.parameters())
    total: Any = 0
    for point in points:
        x = point[None].clone().requires_grad_()
        outputs = model(x).reshape(-1)
        blocks = []
        for f in outputs:
            gradients = torch.autograd.grad(f, parameters, create_graph=True)
            flat = torch.cat([g.reshape(-1) for g in gradients])
            rows = [torch.autograd.grad(g, x, retain_graph=True, allow_unused=True)[0] for g in flat]
            blocks.append(torch.stack([torch.zeros_like(x) if r is None else r for r in rows]).flatten(1))
        total = total + torch.stack(blocks)
    return total / len(points)


def arranged(m: Tensor, outputs: Kind) -> Tensor:
    """The matrix whose singular vectors are wanted."""
    if outputs == "sum":
        return m.sum(0)
    return m.flatten(0, 1) if outputs == "trace" else m.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("points", [1, 4])
@pytest.mark.parametrize("outputs", KINDS)
@pytest.mark.thinned(4)
def test_products_are_those_of_the_dense_matrix(
    outputs: Kind, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linnet.spectrum.anisotropy.BLOCK", 3)
    model, x = mlp(outputs=3), real(points, 6, seed=1)
    dense = arranged(mixed(model, x), outputs)
    operator = MixedDerivative(linnet.linearize(model).function, x, outputs)
    near(operator.dense(), dense)
    w = real(dense.shape[0], 20, seed=5)
    near(operator.T @ w, dense.T @ w)
    assert operator.T.T is operator


@pytest.mark.parametrize("outputs", KINDS)
@pytest.mark.parametrize("at", ["origin", "point", "average"])
@pytest.mark.thinned(6)
def test_directions_are_singular_vectors(outputs: Kind, at: str) -> None:
    model = mlp(outputs=2)
    where = {"origin": torch.zeros(6).double(), "point": real(1, 6, seed=2), "average": real(5, 6, seed=2)}[
        at
    ]
    m = arranged(mixed(model, where.reshape(-1, 6)), outputs)
    _, s, vt = torch.linalg.svd(m, full_matrices=False)
    found = linnet.spectrum.anisotropy_directions(model, where, k=3, form=outputs)
    near(found.singular_values, s[:3])
    assert found.directions.shape == ((3, 2, 6) if outputs == "full" else (3, 6))
    flat = found.directions.flatten(1)
    near((flat @ vt[:3].T).abs(), torch.eye(3).double(), 1e-7)
    near(flat @ flat.T, torch.eye(3).double())
    near((m @ flat.T).norm(dim=0), found.singular_values)
    assert bool((flat.gather(1, flat.abs().argmax(1, keepdim=True)) > 0).all())
    assert found.residual < 1e-9


def test_with_one_output_the_kinds_agree() -> None:
    found = [linnet.spectrum.anisotropy_directions(mlp(), torch.zeros(6), 3, kind) for kind in KINDS]
    for other in found[1:]:
        near(other.singular_values, found[0].singular_values)
        near(other.directions, found[0].directions, 1e-7)


def test_images_and_their_fourier_magnitudes() -> None:
    at = torch.zeros(2, 4, 4).double()  # one image without the example axis
    found = linnet.spectrum.anisotropy_directions(cnn(), at, k=4)
    assert found.directions.shape == (4, 2, 4, 4)
    near(found.singular_values, torch.linalg.svdvals(mixed(cnn(), at[None])[0])[:4])
    by_batch = linnet.spectrum.anisotropy_directions(cnn(), at[None], k=4)
    near(by_batch.directions, found.directions)
    images = found.images()
    assert (float(images.min()), float(images.max())) >= (0.0, 1.0)
    near(images - 0.5, found.directions / (2 * found.directions.abs().amax((1, 2, 3), keepdim=True)))
    magnitudes = found.fourier_magnitudes()
    assert magnitudes.shape == (4, 2, 4, 4)
    near(magnitudes[:, :, 2, 2], found.directions.sum((2, 3)).abs(), 1e-9)  # frequency zero is the mean
    near(magnitudes.square().sum((1, 2, 3)), torch.full((4,), 16.0).double())  # Parseval
    flat = linnet.spectrum.anisotropy_directions(mlp(), torch.zeros(6), 2)
    refused(InputError, flat.fourier_magnitudes, "(2, 6)")


def test_only_tracked_parameters_count() -> None:
    lin = linnet.linearize(mlp(), params="last-layer")
    found = linnet.spectrum.anisotropy_directions(lin, torch.zeros(6), k=2)
    m = mixed(mlp(), torch.zeros(1, 6).double())[0]
    near(found.singular_values, torch.linalg.svdvals(m[-6:])[:2])


def test_theorem_1_links_directions_and_alignment() -> None:
    """With x of the moments of a Gaussian up to the third order Stein's lemma is exact for this network."""
    x = 3**0.5 * torch.cat([torch.eye(3), -torch.eye(3)]).double()
    found = linnet.spectrum.anisotropy_directions(Square(), x, k=3)
    predictors = x @ found.directions.T  # g_u(x) = u · x
    alpha = linnet.spectrum.alignment(Square(), (x, predictors))
    near(alpha, found.singular_values.square(), 1e-9)
    assert float(found.singular_values[2]) > 0.1


@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=st.integers(0, 100))
def test_rotating_the_inputs_rotates_the_directions(seed: int) -> None:
    q, _ = torch.linalg.qr(real(6, 6, seed=seed))
    model = mlp()
    turned = nn.Sequential(nn.Linear(6, 6, bias=False), *model).double()
    with torch.no_grad():
        turned[0].weight.copy_(q)  # f(Qx)
    lin = linnet.linearize(
        turned, params=[f"{i + 1}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
    )
    first = linnet.spectrum.anisotropy_directions(model, torch.zeros(6), 2)
    second = linnet.spectrum.anisotropy_directions(lin, torch.zeros(6), 2)
    near(second.singular_values, first.singular_values)
    cosines = ((second.directions @ q.T) * first.directions).sum(1).abs()
    near(cosines, torch.ones(2).double(), 1e-6)


def test_tolerance_steps_and_seed() -> None:
    model = mlp(inputs=40)
    options: dict[str, Any] = {"model": model, "at": torch.zeros(40), "k": 2}
    loose = linnet.spectrum.anisotropy_directions(**options, tolerance=0.5)
    tight = linnet.spectrum.anisotropy_directions(**options)
    assert tight.residual < 1e-9 < loose.residual
    again, other = (linnet.spectrum.anisotropy_directions(**options, seed=s, tolerance=0.1) for s in (0, 1))
    assert not torch.equal(again.directions, other.directions)
    with pytest.raises(NumericalError, match="anisotropy"):
        linnet.spectrum.anisotropy_directions(**options, max_steps=1)


def test_the_mismatch_tells_a_kink_from_a_smooth_point() -> None:
    for kind in KINDS:
        smooth = linnet.spectrum.anisotropy_directions(mlp(outputs=2), real(4, 6, seed=2), 2, kind)
        assert smooth.mismatch < 1e-6
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    assert linnet.spectrum.anisotropy_directions(net, real(6, seed=1), 2).mismatch < 1e-6
    with torch.no_grad():
        net[0].bias.zero_()
        net[0].bias[0] = 1.0  # one unit is smooth at the origin, the others have their kink there
    assert linnet.spectrum.anisotropy_directions(net, torch.zeros(6), 2).mismatch > 0.1


def test_inference_mode_and_training_mode_do_not_matter() -> None:
    model = cnn().train()
    expected = linnet.spectrum.anisotropy_directions(model, torch.zeros(1, 2, 4, 4), 2)
    with torch.inference_mode():
        found = linnet.spectrum.anisotropy_directions(model, torch.zeros(1, 2, 4, 4), 2)
    near(found.directions, expected.directions)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# What cannot be.
