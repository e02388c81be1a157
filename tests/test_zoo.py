"""The zoo is what it says, and the oracles agree with finite differences and with textbook identities."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.oracles import dense as oracles
from tests.zoo import BY_NAME, ZOO, assert_near, case, every_animal


def flat_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shifted(model: nn.Module, step: Tensor) -> nn.Module:
    """A copy of the model with its trainable parameters moved by a flat vector."""
    moved = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(flat_parameters(moved)).detach() + step, flat_parameters(moved)
    )
    return moved


def linear_problem(classes: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """J (6, C, 9), targets, f0, and J, f0 of 3 test examples."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(6, classes, 9), (6, classes), (6, classes), (3, classes, 9), (3, classes)]
    j, targets, f0, j_test, f0_test = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    return j, targets, f0, j_test, f0_test


def test_names_are_unique_and_the_zoo_is_large() -> None:
    assert len(BY_NAME) == len(ZOO) >= 40


@every_animal
def test_networks_are_tiny_and_outputs_have_their_shape(name: str) -> None:
    animal, model = BY_NAME[name], BY_NAME[name].factory(0)
    assert sum(parameter.numel() for parameter in model.parameters()) < 4000
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert case(name).f1.shape == (4, animal.classes)
    assert 2 <= animal.classes <= 4 or name.startswith("regression")
    assert model.training == (zoo.TRAIN_MODE in animal.traits)


@every_animal
def test_networks_are_deterministic_and_do_not_mix_examples(name: str) -> None:
    animal, model = BY_NAME[name], BY_NAME[name].factory(0).eval()
    x = case(name).x1
    first = zoo.outputs(animal, model, x)
    assert torch.equal(first, zoo.outputs(animal, model, x))
    # whole batch against one example at a time
    assert_near(first, case(name).f1, 1e-12)
    again = animal.factory(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(animal.factory(1).parameters()), next(model.parameters()))


@every_animal
def test_jacobian_oracle_agrees_with_finite_differences(name: str) -> None:
    animal, model, expected = BY_NAME[name], BY_NAME[name].factory(0).eval(), case(name)
    if name == "padding-index":
        # autograd never updates the padding row, although the outputs depend on it
        expected = zoo.Case(**{**vars(expected), "j1": without_padding_row(model, expected.x1)})
    step = 1e-6
    for seed in range(3):
        v = expected.direction(seed)
        with torch.no_grad():
            ahead = zoo.outputs(animal, shifted(model, step * v), expected.x1)
            behind = zoo.outputs(animal, shifted(model, -step * v), expected.x1)
        assert_near((ahead - behind) / (2 * step), expected.j1 @ v, 1e-6)


def without_padding_row(model: nn.Module, x: Any) -> Tensor:
    """The Jacobian with the padding row of the embedding treated like any other."""
    model = copy.deepcopy(model)
    model.embedding.padding_idx = None
    return oracles.jacobian_oracle(model, x)


@every_animal
def test_traits_say_what_forward_mode_does(name: str) -> None:
    animal, model, expected = BY_NAME[name], BY_NAME[name].factory(0).eval(), case(name)
    pieces = expected.direction().split([p.numel() for p in flat_parameters(model)])
    theta = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    v = {n: piece.view_as(theta[n]) for n, piece in zip(theta, pieces, strict=True)}
    x = expected.x1
    args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, tuple) else (x,), {})

    def f(theta: dict[str, Tensor]) -> Tensor:
        result = torch.func.functional_call(model, theta, args, kwargs)
        return (result if animal.output is None else animal.output(result)).reshape(4, -1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if zoo.NO_FORWARD_AD in animal.traits:
            with pytest.raises(NotImplementedError, match="forward AD"):
                torch.func.jvp(f, (theta,), (v,))
        else:
            assert_near(torch.func.jvp(f, (theta,), (v,))[1], expected.j1 @ expected.direction())


@every_animal
def test_traits_say_what_parameters_are_like(name: str) -> None:
    animal, model = BY_NAME[name], BY_NAME[name].factory(0)
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    assert frozen == (zoo.FROZEN in animal.traits)
    uses = [
        p.requires_grad and not touched for p, touched in zip(model.parameters(), reached(name), strict=True)
    ]
    assert any(uses) == (zoo.UNUSED in animal.traits)


def reached(name: str) -> list[bool]:
    """For every parameter, whether some output depends on it."""
    model = BY_NAME[name].factory(0).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    zoo.outputs(BY_NAME[name], model, case(name).x1).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]


def test_oracles_leave_the_model_alone_and_accept_float32() -> None:
    model = BY_NAME["dropout-train"].factory(0).float()
    before = copy.deepcopy(model.state_dict())
    f = oracles.output_oracle(model, case("dropout-train").x1.float())
    j = oracles.jacobian_oracle(model, case("dropout-train").x1.float())
    assert f.dtype == j.dtype == torch.float64
    assert model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_jacobian_columns_follow_named_parameters_whatever_the_order_of_names() -> None:
    model, x, whole = BY_NAME["mlp-tanh"].factory(0), case("mlp-tanh").x1, case("mlp-tanh").j1
    part = oracles.jacobian_oracle(model, x, names=["4.bias", "0.weight"])
    assert torch.equal(part, torch.cat([whole[..., :48], whole[..., -3:]], dim=-1))
    with pytest.raises(KeyError, match="nothing"):
        oracles.jacobian_oracle(model, x, names=["nothing"])


def test_jacobian_of_frozen_parameters_on_request() -> None:
    model, x = BY_NAME["lora"].factory(0), case("lora").x1
    everything = [name for name, _ in model.named_parameters()]
    assert oracles.jacobian_oracle(model, x, names=everything).shape[2] == 237
    assert case("lora").parameters == 82


def test_outputs_that_are_no_tensor_and_inputs_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="OrderedDict"):
        oracles.output_oracle(BY_NAME["dict-output"].factory(0), case("dict-output").x1)
    with pytest.raises(TypeError, match="NoneType"):
        oracles.output_oracle(BY_NAME["mlp-tanh"].factory(0), None)


def test_inputs_without_an_example_axis_belong_to_all_examples() -> None:
    model = nn.Bilinear(3, 2, 1).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    model.forward = lambda x, scale: scale * x.sum(1, keepdim=True) * model.weight.sum()  # type: ignore[method-assign]
    scale = torch.tensor(2.0, dtype=torch.float64)
    expected = 2.0 * x.sum(1, keepdim=True) * model.weight.sum().item()
    assert_near(oracles.output_oracle(model, {"x": x, "scale": scale}), expected, 1e-14)


def test_kernel_oracle_sums_and_diagonals() -> None:
    j1, j2 = case("mlp-tanh").j1, case("mlp-tanh").j2
    rows = j1.reshape(12, -1) @ j2.reshape(9, -1).T
    full = oracles.kernel_oracle(j1, j2)
    assert_near(full, rows.reshape(4, 3, 3, 3), 1e-14)
    assert_near(oracles.kernel_oracle(j1, j2, "sum"), j1.sum(1) @ j2.sum(1).T, 1e-13)
    diagonal = oracles.kernel_oracle(j1, j2, "diagonal")
    assert diagonal[1, 2, 0] == full[1, 0, 2, 0]
    assert_near(oracles.kernel_oracle(j1, j2, "trace"), diagonal.sum(2), 1e-14)
    with pytest.raises(ValueError, match="nuclear"):
        oracles.kernel_oracle(j1, j2, "nuclear")  # type: ignore[arg-type]


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 100.0])
def test_ridge_oracle_is_stationary_and_equals_the_dual(ridge: float) -> None:
    j, targets, f0, *_ = linear_problem()
    delta = oracles.ridge_oracle(j, targets, f0, ridge)
    residual = targets - f0 - j @ delta
    assert_near(torch.einsum("ncp,nc->p", j, residual), ridge * delta, 1e-9)
    flat = j.reshape(-1, 9)
    dual = torch.linalg.solve(
        flat @ flat.T + ridge * torch.eye(12, dtype=j.dtype), (targets - f0).reshape(-1)
    )
    assert_near(delta, flat.T @ dual, 1e-9)


def test_ridge_oracle_without_ridge_has_least_norm() -> None:
    j, targets, f0, *_ = linear_problem()
    delta = oracles.ridge_oracle(j[:2], targets[:2], f0[:2], 0.0)
    assert_near(delta, torch.linalg.pinv(j[:2].reshape(4, 9)) @ (targets - f0)[:2].reshape(-1), 1e-10)


def test_posterior_oracle_is_the_gaussian_process() -> None:
    j, targets, f0, j_test, f0_test = linear_problem()
    ridge, noise = 0.3, 0.2
    mean, covariance = oracles.posterior_oracle(j, targets, f0, ridge, noise, j_test, f0_test)
    a, b = j.reshape(-1, 9), j_test.reshape(-1, 9)
    prior = noise / ridge
    gain = prior * b @ a.T @ torch.linalg.inv(prior * a @ a.T + noise * torch.eye(12, dtype=j.dtype))
    joint = prior * (b @ b.T - gain @ a @ b.T)
    assert_near(mean, f0_test + (gain @ (targets - f0).reshape(-1)).reshape(3, 2), 1e-9)
    assert_near(covariance[1], joint[2:4, 2:4], 1e-9)


def test_leave_one_out_oracle_matches_the_closed_form() -> None:
    j, targets, f0, *_ = linear_problem(classes=1)
    a, ridge = j[:, 0], 0.7
    hat = a @ torch.linalg.solve(a.T @ a + ridge * torch.eye(9, dtype=j.dtype), a.T)
    residual = (targets - f0)[:, 0] - hat @ (targets - f0)[:, 0]
    expected = targets[:, 0] - residual / (1 - hat.diag())
    assert_near(oracles.leave_one_out_oracle(j, targets, f0, ridge)[:, 0], expected, 1e-9)


def test_influence_oracle_on_the_training_set_contains_leave_one_out() -> None:
    j, targets, f0, *_ = linear_problem()
    fitted = oracles.linearized_oracle(f0, j, oracles.ridge_oracle(j, targets, f0, 0.7))
    effect = oracles.influence_oracle(j, targets, f0, 0.7, j)
    left_out = oracles.leave_one_out_oracle(j, targets, f0, 0.7)
    assert_near(torch.stack([effect[i, i] for i in range(6)]), fitted - left_out, 1e-9)


def test_hessian_of_a_linear_model_is_its_gauss_newton_matrix_and_its_fisher() -> None:
    model, x = nn.Linear(3, 3).double(), torch.randn(4, 3, dtype=torch.float64)
    f, j = oracles.output_oracle(model, x), oracles.jacobian_oracle(model, x)
    p = f.softmax(1)
    output_hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    ggn = oracles.ggn_oracle(j, output_hessian)
    assert_near(oracles.fisher_oracle(j, f, "categorical"), ggn, 1e-12)
    labels = torch.tensor([0, 2, 1, 1])
    cross_entropy = torch.nn.functional.cross_entropy
    assert_near(oracles.hessian_oracle(model, x, labels, cross_entropy), ggn, 1e-12)


def test_gaussian_fisher_is_the_scaled_gram_of_the_jacobian() -> None:
    j = case("mlp-tanh").j1
    fisher = oracles.fisher_oracle(j, case("mlp-tanh").f1, "gaussian", variance=0.5)
    assert_near(fisher, torch.einsum("ncp,ncq->pq", j, j) / 0.5, 1e-12)
    with pytest.raises(ValueError, match="cauchy"):
        oracles.fisher_oracle(j, case("mlp-tanh").f1, "cauchy")  # type: ignore[arg-type]


def test_hessian_oracle_agrees_with_differences_of_gradients() -> None:
    model, x, v = (
        BY_NAME["tied-linears"].factory(0),
        case("tied-linears").x1,
        case("tied-linears").direction(),
    )
    y = torch.tensor([0, 1, 2, 1])
    loss = torch.nn.functional.cross_entropy
    hessian = oracles.hessian_oracle(model, x, y, loss)
    assert_near(hessian, hessian.T.contiguous(), 1e-12)

    def gradient(step: float) -> Tensor:
        moved = shifted(model, step * v)
        loss(moved(x), y, reduction="sum").backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in flat_parameters(moved)])

    assert_near((gradient(1e-5) - gradient(-1e-5)) / 2e-5, hessian @ v, 1e-6)


def test_linearized_oracle_takes_flat_and_named_displacements() -> None:
    expected = case("mlp-tanh")
    v = expected.direction()
    pieces = v.split([p.numel() for p in expected.model().parameters()])
    named = dict(enumerate(pieces))
    assert torch.equal(
        oracles.linearized_oracle(expected.f1, expected.j1, v),
        oracles.linearized_oracle(expected.f1, expected.j1, {str(k): p for k, p in named.items()}),
    )
