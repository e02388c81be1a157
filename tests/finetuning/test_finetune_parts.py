"""Parts of fine-tuning: augmentation, the preconditioner, examples by position, settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import linnet
from linnet.errors import InputError, NumericalError
from linnet.finetuning.augment import Augmentation
from linnet.finetuning.recipes import Recipe, Trial, candidates_for, effective_rate
from linnet.finetuning.trainer import ExampleSet, Objective
from linnet.optim.preconditioner import KroneckerPreconditioner
from tests.fitting.problems import near, network, real
from tests.refusals import refused

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Augmentation ----------------------------------------------------------------------------------------------


def ramp(n: int = 4, size: int = 14) -> Tensor:
    """Images whose values are their own coordinates."""
    rows = torch.arange(size, dtype=torch.float64)
    return torch.stack([rows[:, None].expand(size, size), rows[None].expand(size, size)]).expand(
        n, 2, size, size
    )


def test_center_crops_are_the_middle_of_enlarged_images() -> None:
    x = ramp(2, 16)
    center = Augmentation("center", size=14)(x)  # 14 · 8/7 = 16: nothing is resized
    assert torch.equal(center, x[:, :, 1:15, 1:15])
    assert Augmentation("center")(torch.ones(1, 3, 32, 48)).shape == (1, 3, 32, 48)
    assert Augmentation("random-crop").evaluation == Augmentation("center")
    assert Augmentation().evaluation == Augmentation()
    assert Augmentation()("anything") == "anything"


def test_random_crops_are_windows_of_each_image_and_flips_mirror() -> None:
    x = ramp(64, 16)
    crops = Augmentation("random-crop", size=14, flip=False)(x, seeded())
    tops, lefts = crops[:, 0, 0, 0], crops[:, 1, 0, 0]
    for crop, top, left in zip(crops, tops.int(), lefts.int(), strict=True):
        assert torch.equal(crop, x[0, :, top : top + 14, left : left + 14])
    assert set(tops.tolist()) == set(lefts.tolist()) == {0.0, 1.0, 2.0}
    flipped = Augmentation("random-crop", size=14)(x, seeded())
    mirrored = torch.tensor([bool((a == b.flip(2)).all()) for a, b in zip(flipped, crops, strict=True)])
    straight = torch.tensor([bool((a == b).all()) for a, b in zip(flipped, crops, strict=True)])
    assert (mirrored ^ straight).all()
    assert 15 < mirrored.sum() < 49


def test_resized_crops_show_a_share_of_the_image() -> None:
    x = ramp(64, 20)
    crops = Augmentation("resized-crop", size=12, flip=False)(x, seeded())
    assert crops.shape == (64, 2, 12, 12)
    height, width = crops[:, 0, -1, 0] - crops[:, 0, 0, 0], crops[:, 1, 0, -1] - crops[:, 1, 0, 0]
    share = (height + 1) * (width + 1) / 400
    assert share.min() < 0.25
    assert share.max() > 0.75
    assert (height / width).log().abs().max() < 0.6
    whole = Augmentation("resized-crop", area=1.0, flip=False)(torch.ones(2, 3, 8, 8), seeded())
    assert torch.equal(whole, torch.ones(2, 3, 8, 8))


@pytest.mark.parametrize("kind", ["random-crop", "resized-crop"])
def test_augmentation_is_a_function_of_its_generator(kind: str) -> None:
    x, change = real(8, 3, 16, 16), Augmentation(kind)
    assert torch.equal(change(x, seeded(1)), change(x, seeded(1)))
    assert not torch.equal(change(x, seeded(1)), change(x, seeded(2)))


def test_augmentation_refuses() -> None:
    refused(InputError, lambda: Augmentation("center")(torch.ones(2, 3)), "(2, 3)")
    refused(InputError, lambda: Augmentation("random-crop")(torch.ones(2, 3, 8, 8)), "seed")


# The preconditioner ----------------------------------------------------------------------------------------


def problem(structure: str = "kfac") -> tuple[nn.Module, Tensor, Tensor, object]:
    model, x, y = network(), real(12, 3, seed=5), real(12, 3, seed=6)
    return model, x, y, linnet.curvature(model, x, linnet.likelihoods.Gaussian(), structure=structure)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "full", "diagonal"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_multiplied_by_the_damped_inverse(structure: str, reduction: str) -> None:
    model, x, y, G = problem(structure)
    (0.5 * (model(x) - y).square().sum() / 12).backward()
    before = gradient(model)
    KroneckerPreconditioner(G, model, 0.3, reduction).step()
    dense = G.dense() / (12 if reduction == "mean" else 1) + 0.3 * torch.eye(len(before)).double()
    near(gradient(model), torch.linalg.solve(dense, before), 1e-8)


def test_damping_in_the_factors() -> None:
    model, x, y, G = problem()
    (0.5 * (model(x) - y).square().sum() / 12).backward()
    before = gradient(model)
    KroneckerPreconditioner(G, model, 0.3, inversion="factored").step()
    near(gradient(model), torch.linalg.solve(G.scaled(1 / 12).factored_damped(0.3).dense(), before), 1e-8)


def test_newton_in_one_step_for_a_linear_model() -> None:
    model, x, y, _ = problem()
    lin = linnet.linearize(model)
    G = linnet.curvature(lin, x, linnet.likelihoods.Gaussian(), structure="full")
    optimizer = torch.optim.SGD(lin.parameters(), lr=1.0)
    KroneckerPreconditioner(G, lin, damping=0.01).attach(optimizer)
    (0.5 * (lin(x) - y).square().sum() / 12).backward()
    optimizer.step()
    exact = linnet.fit(lin, (x, y), ridge=0.12, solver="dual")  # ρ = N τ
    for name, value in lin.delta.items():
        near(value, exact.delta[name], 1e-7)


def test_groups_frozen_parameters_and_optimizers() -> None:
    model, x, y, G = problem()
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    groups = [{"params": layers[0], "lr": 0.1}, {"params": layers[1], "precondition": False}]
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(groups, lr=0.01)
        handle = KroneckerPreconditioner(G, model).attach(optimizer)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        plain = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        now = [p.grad for p in model.parameters()]
        assert not torch.equal(now[0], plain[0])
        assert torch.equal(now[2], plain[2])
        handle.remove()
        (model(x) - y).square().mean().backward()
        held = model[0].weight.grad.clone()
        optimizer.step()
        assert torch.equal(model[0].weight.grad, held)
    model[0].bias.grad = None
    KroneckerPreconditioner(G, model).step()
    assert model[0].bias.grad is None


@pytest.mark.parametrize("named", [False, True])
def test_closures_are_preconditioned_at_every_evaluation(named: bool) -> None:
    """``optimizer.step(closure)`` sees the gradients that a plain step sees; LBFGS asks several times."""
    ends = []
    for way in ("plain", "closure", "lbfgs"):
        model, x, y, G = problem()
        many = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        optimizer = many if way == "lbfgs" else torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Tensor] = []

        def closure(model: nn.Module = model, x: Tensor = x, y: Tensor = y, o: Any = optimizer) -> Tensor:
            o.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        preconditioner = KroneckerPreconditioner(G, model)
        multiply = preconditioner.multiply
        preconditioner.multiply = lambda v, f=multiply, s=seen: s.append(v) or f(v)  # type: ignore
        handle = preconditioner.attach(optimizer)
        if way == "plain":
            loss = closure()
            optimizer.step()
        else:
            loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert float(loss.detach()) > 0
        assert len(seen) == (1 if way != "lbfgs" else many.state[many._params[0]]["func_evals"])
        handle.remove()
        optimizer.step(closure)
        assert len(seen) == (1 if way != "lbfgs" else 3)
    near(ends[0], ends[1])


def test_preconditioner_refuses() -> None:
    model, x, _, G = problem()
    refused(InputError, lambda: KroneckerPreconditioner(G, network(hidden=9)), "0.weight")
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    refused(InputError, lambda: KroneckerPreconditioner(G, model).attach(other), "covers")
    zero = linnet.curvature(model, 0 * x, linnet.likelihoods.Gaussian(), structure="kfac").scaled(0.0)
    refused(NumericalError, lambda: KroneckerPreconditioner(zero, model), "mean eigenvalue")


# Examples, settings, grids ---------------------------------------------------------------------------------


class Reader(Dataset):  # type: ignore[type-arg]
    """A data set that reads sample by sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


def test_examples_are_the_same_from_every_source() -> None:
    x, y = real(7, 2), torch.arange(7) % 3
    loader = DataLoader(Reader(x, y), batch_size=2, shuffle=True)
    rows = torch.tensor([5, 0, 2])
    for data in ((x, y), TensorDataset(x, y), Reader(x, y), loader):
        examples = ExampleSet(data, CPU)
        assert examples.n == 7
        got_x, got_y = examples.batch(rows)
        assert torch.equal(got_x, x[rows])
        assert torch.equal(got_y, y[rows])
        assert torch.equal(examples.labels(), y)
        part = examples.part(rows).part(torch.tensor([2, 1]))
        assert torch.equal(part.labels(), y[[2, 0]])
        assert part.fingerprint() != examples.fingerprint() == ExampleSet(data, CPU).fingerprint()

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield x[0], y[0]

    refused(InputError, lambda: ExampleSet(Stream(), CPU), "Stream")


def test_objective_has_the_optimum_of_the_fit() -> None:
    model, x, y = network(), real(9, 3, seed=1), torch.arange(9) % 3
    lin = linnet.linearize(model)
    decay = 0.3
    solved = linnet.fit(lin, (x, y), ridge=9 * decay, solver="dual")
    objective = Objective("squared", 3, 15.0, decay)
    loss = objective(solved.module(x), y)
    grads = torch.autograd.grad(loss, list(solved.module.delta.values()))
    for g, d in zip(grads, solved.module.delta.values(), strict=True):
        near(g, -decay * d.detach(), 1e-7)
    near(Objective("cross-entropy", 3, 15.0, 0.0)(x, y)[None], torch.nn.functional.cross_entropy(x, y)[None])


def test_recipes_and_grids() -> None:
    assert Recipe("lqf", optimizer="adam").preconditioner == "none"
    assert Recipe("lqf", preconditioner="ekfac", optimizer="adam").preconditioner == "ekfac"
    assert not Recipe("lqf", activation="relu").leaky
    assert Recipe("nlft", loss="squared").loss == "squared"
    lqf = Recipe("lqf")
    first = Trial(None, 1e-5, 28, Augmentation())
    assert candidates_for(None, lqf, first) == [first]
    assert len(candidates_for("paper", lqf, first)) == 4
    images = Trial(None, 1e-5, 28, Augmentation("center"))
    found = candidates_for("paper", lqf, images)
    assert len(found) == 9
    assert [c.augmentation.kind for c in found].count("resized-crop") == 1
    adam = candidates_for("paper", Recipe("gaf", optimizer="adam"), first)
    assert {(c.learning_rate, c.weight_decay) for c in adam} == {
        (r, w) for r in (1e-3, 4e-4, 1e-4) for w in (1e-5, 1e-6)
    }
    assert len(candidates_for("wide", lqf, first)) == 45
    mine = candidates_for({"learning_rate": [1.0, 2.0], "augmentation": ["none", "center"]}, lqf, first)
    assert [(c.learning_rate, c.augmentation.kind) for c in mine] == [
        (1.0, "none"), (1.0, "center"), (2.0, "none"), (2.0, "center"),
    ]  # fmt: skip
    near(torch.tensor([effective_rate(0.01, 0.9, 28)]), torch.tensor([1 / 280]), 1e-6)
    refused(InputError, lambda: candidates_for("all", lqf, first), "search=")
    refused(InputError, lambda: candidates_for({"seed": [1]}, lqf, first), "seed")
    refused(InputError, lambda: candidates_for({"learning_rate": []}, lqf, first), "learning_rate")


@pytest.mark.parametrize(
    ("depth", "normalized", "told"), [(5, False, True), (5, True, False), (2, False, False)]
)
def test_surgery_says_where_no_normalization_holds_the_maps(depth: int, normalized: bool, told: bool) -> None:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(4, 4), *([nn.LayerNorm(4)] if normalized else []), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(4, 2))
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    for activation in ("leaky-relu", "relu"):
        run = linnet.finetune(
            net, (x, y), linnet.Recipe(activation=activation), training=linnet.Training(steps=1)
        )
        assert any("no normalization" in note for note in run.notes) == (told and activation == "leaky-relu")


def test_a_result_is_told_in_one_line() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 5))
    data = torch.randn(24, 2, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    text = repr(linnet.finetune(net, data, training=linnet.Training(steps=2, learning_rate=0.01)))
    assert re.fullmatch(r"Finetuned\(lqf, 2 classes, final loss [\d.e+-]+\)", text)
