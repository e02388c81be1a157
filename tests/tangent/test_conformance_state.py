"""State, buffers and training of linearizations, for every network of the zoo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import FileFormatError
from tests.oracles.dense import jacobian_oracle, output_oracle
from tests.zoo import Case, assert_near, case, every_animal, flat, linearize, set_delta

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)  # fmt: skip


class Snapshot:
    """Everything about a network that a call could change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [tensor.detach().clone() for tensor in self._tensors()]
        self.marks = self._marks()

    def _tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _marks(self) -> dict[str, Any]:
        tensors = self._tensors()
        return {
            "modes": [module.training for module in self.model.modules()],
            "requires_grad": [tensor.requires_grad for tensor in tensors],
            "gradients": [None if tensor.grad is None else id(tensor.grad) for tensor in tensors],
            "identities": [id(tensor) for tensor in tensors],
            "versions": [tensor._version for tensor in tensors],
            "tensor attributes": [sorted(vars(tensor)) for tensor in tensors],
            "hooks": [[len(getattr(m, kind)) for kind in HOOKS] for m in self.model.modules()],
            "attributes": [sorted(vars(module)) for module in self.model.modules()],
            "classes": [type(module) for module in self.model.modules()],
            "forwards": [module.forward.__func__ for module in self.model.modules()],  # type: ignore[attr-defined]
            "config": [repr(getattr(module, "config", None)) for module in self.model.modules()],
            "random state": torch.get_rng_state().tolist(),
        }

    def check(self) -> None:
        now = self._marks()
        assert {key for key in now if now[key] != self.marks[key]} == set()
        assert all(torch.equal(a, b) for a, b in zip(self.values, self._tensors(), strict=True))


def use_everything(lin: Any, expected: Case) -> None:
    """Every call that reads a network."""
    v = expected.direction()
    lin(expected.x1).sum().backward()
    with torch.no_grad():
        lin(expected.x1)
    lin.base(expected.x1)
    lin.jvp(expected.x1, v)
    lin.jvp(expected.x1, expected.direction(columns=2))
    lin.vjp(expected.x1, torch.ones(4, expected.animal.classes, dtype=torch.float64))
    lin.jacobian(expected.x1)
    for outputs in ("full", "trace", "diagonal", "sum"):
        lin.kernel(expected.x1, expected.x2, form=outputs)
        lin.kernel(expected.x1, form=outputs)


@every_animal
@pytest.mark.thinned(6)
def test_the_users_network_and_random_state_are_untouched(name: str) -> None:
    expected, model = case(name), case(name).model()
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    first.grad = torch.ones_like(first)
    next(iter(model.modules())).register_forward_hook(lambda *_: None)
    snapshot = Snapshot(model)
    lin = linnet.linearize(model, output=expected.output)
    snapshot.check()
    use_everything(lin, expected)
    snapshot.check()
    linnet.preflight(model, expected.x1, output=expected.output)
    snapshot.check()
    set_delta(lin, expected.direction())
    lin.relinearize()
    lin(expected.x1)
    snapshot.check()


@every_animal
@pytest.mark.thinned(2)
def test_a_network_left_in_train_mode_gives_the_same_linearization(name: str) -> None:
    expected, model = case(name), case(name).model().train()
    snapshot = Snapshot(model)
    lin = linnet.linearize(model, output=expected.output)
    lin.train()
    assert_near(lin.base(expected.x1), expected.f1, 1e-12)
    assert_near(lin.jvp(expected.x1, expected.direction()), expected.j1 @ expected.direction())
    set_delta(lin, expected.direction())
    assert_near(lin(expected.x1).flatten(1), expected.f1 + expected.j1 @ expected.direction())
    assert_near(lin.kernel(expected.x1), torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1))
    snapshot.check()
    assert not any(module.training for module in lin.model.modules())


@every_animal
@pytest.mark.thinned(3)
def test_inputs_are_untouched(name: str) -> None:
    expected = case(name)
    before = copy.deepcopy(expected.x1)
    use_everything(linearize(name), expected)
    as_list: Callable[[Any], list[Tensor]] = lambda x: (  # noqa: E731
        list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    )
    for a, b in zip(as_list(before), as_list(expected.x1), strict=True):
        assert torch.equal(a, b)
        assert not vars(b)
        assert not b.requires_grad


@every_animal
@pytest.mark.thinned(3)
def test_later_training_of_the_network_does_not_move_the_linearization(name: str) -> None:
    expected, model = case(name), case(name).model()
    lin = linnet.linearize(model, output=expected.output)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_near(lin.base(expected.x1), expected.f1, 1e-12)
    assert_near(lin.jacobian(expected.x1), expected.j1)


@every_animal
def test_gradient_of_a_loss_in_delta(name: str) -> None:
    expected, lin = case(name), linearize(name)
    delta = 0.3 * expected.direction(7)
    set_delta(lin, delta)
    targets = torch.randn_like(expected.f1)
    loss = 0.25 * (lin(expected.x1).flatten(1) - targets).pow(4).sum()
    loss.backward()
    # gradient in delta of L(f0 + J delta): Jᵀ ∂L/∂f
    residual = expected.f1 + expected.j1 @ delta - targets
    gradient = torch.einsum("ncp,nc->p", expected.j1, residual**3)
    actual = {n: torch.zeros_like(d) if d.grad is None else d.grad for n, d in lin.delta.items()}
    assert_near(flat(actual), gradient)
    assert all(parameter.grad is None for parameter in lin.model.parameters())


@every_animal
@pytest.mark.thinned(3)
def test_gradients_accumulate_over_batches(name: str) -> None:
    expected, lin = case(name), linearize(name)
    for x in (expected.x1, expected.x2, expected.x1):
        lin(x).sum().backward()
    gradient = 2 * expected.j1.sum((0, 1)) + expected.j2.sum((0, 1))
    actual = {n: torch.zeros_like(d) if d.grad is None else d.grad for n, d in lin.delta.items()}
    assert_near(flat(actual), gradient)


@every_animal
@pytest.mark.thinned(2)
def test_state_dict_holds_delta_only_and_comes_back(name: str, tmp_path: Any) -> None:
    expected, lin = case(name), linearize(name)
    delta = expected.direction(8)
    set_delta(lin, delta)
    state = lin.state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == expected.parameters
    torch.save(state, tmp_path / "delta.pt")
    other = linearize(name)
    other.load_state_dict(torch.load(tmp_path / "delta.pt", weights_only=True), strict=True)
    assert torch.equal(flat({n: d.detach() for n, d in other.delta.items()}), delta)
    assert torch.equal(other(expected.x1), lin(expected.x1))


@every_animal
@pytest.mark.thinned(3)
def test_relinearize_moves_the_point(name: str) -> None:
    expected, lin = case(name), linearize(name)
    lin(expected.x1)
    lin.kernel(expected.x1)
    delta = 0.1 * expected.direction(9)
    set_delta(lin, delta)
    before = flat(lin.theta0).clone()
    lin.relinearize()
    assert torch.equal(flat(lin.theta0), before + delta)
    assert all(torch.count_nonzero(value) == 0 for value in lin.delta.values())
    moved = expected.model()
    pieces = iter(delta.split([p.numel() for p in moved.parameters() if p.requires_grad]))
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.requires_grad:
                parameter.add_(next(pieces).view_as(parameter))
    j = jacobian_oracle(moved, expected.x1, output=expected.output)
    assert_near(lin(expected.x1).flatten(1), output_oracle(moved, expected.x1, expected.output), 1e-11)
    assert_near(lin.jacobian(expected.x1), j)
    assert_near(lin.kernel(expected.x1), torch.einsum("ncp,mdp->ncmd", j, j))
    set_delta(lin, expected.direction(10))
    assert_near(lin.jvp(expected.x1, expected.direction(10)), j @ expected.direction(10))


@every_animal
@pytest.mark.thinned(3)
def test_deep_copies_are_independent(name: str) -> None:
    expected, lin = case(name), linearize(name)
    lin(expected.x1)
    lin.kernel(expected.x1)
    twin = copy.deepcopy(lin)
    delta = expected.direction(11)
    set_delta(twin, delta)
    assert_near(twin(expected.x1).flatten(1), expected.f1 + expected.j1 @ delta)
    assert_near(lin(expected.x1).flatten(1), expected.f1, 1e-12)
    twin.relinearize()
    assert_near(lin.jacobian(expected.x1), expected.j1)
    assert_near(lin.kernel(expected.x1), torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1))


@every_animal
@pytest.mark.thinned(3)
def test_moving_to_float32_moves_everything(name: str) -> None:
    from tests.zoo import cast

    expected, lin = case(name), linearize(name)
    lin(expected.x1)
    lin.kernel(expected.x1)
    delta = expected.direction(12)
    set_delta(lin, delta)
    lin = lin.float()
    x = cast(expected.x1, torch.float32)
    assert lin(x).dtype == torch.float32
    assert_near(lin(x).flatten(1), expected.f1 + expected.j1 @ delta, 1e-4)
    assert_near(lin.jacobian(x), expected.j1, 1e-4)
    assert_near(lin.kernel(x), torch.einsum("ncp,mdp->ncmd", expected.j1, expected.j1), 1e-4)


@every_animal
@pytest.mark.thinned(2)
def test_preflight_names_every_parameter(name: str) -> None:
    expected = case(name)
    check = linnet.preflight(expected.model(), expected.x1, output=expected.output)
    wanted = [n for n, p in expected.model().named_parameters() if p.requires_grad]
    assert [row.name for row in check.parameters] == wanted
    assert check.ok, check.findings
    assert all(name in str(check) for name in wanted)


class Writing(nn.Module):
    """A network that counts its passes and keeps a mean, neither of which its outputs show."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(4, 6), nn.Linear(6, 3), 0
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        out: Tensor = self.head(self.body(x).tanh())
        return out


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.long])
def test_passes_that_write_leave_all_as_it_was(kind: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, y = Writing(), (3 * torch.randn(12, 4)).to(kind), torch.arange(12) % 3
    before = copy.deepcopy(net.state_dict())
    fit = linnet.adapt(net, (x, y))
    lin = linnet.linearize(net)
    other = linnet.fit(lin, (x.float(), y), ridge=1.0)
    for number, made in enumerate((fit, other)):
        expected = made.predict(x)
        made.save(tmp_path / str(number))
        assert torch.allclose(linnet.load(tmp_path / str(number), net).predict(x), expected)
    assert net.calls == 0
    assert all(torch.equal(t, net.state_dict()[name]) for name, t in before.items())
    double = linnet.linearize(copy.deepcopy(net).double()).function
    assert lin.double().function.fingerprint() == double.fingerprint()
    with torch.no_grad():
        net.count += 1
    with pytest.raises(FileFormatError, match="weights differ"):
        linnet.load(tmp_path / "1", net)
