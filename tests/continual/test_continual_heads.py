"""Networks whose parameters come, grow, freeze and go while tasks go by."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from linnet.continual import (
    EWC,
    ContinualMethod,
    NonOnlineLaplace,
    OnlineLaplace,
    SynapticIntelligence,
)
from linnet.errors import InputError, LinnetError, ModelError
from linnet.likelihoods import Categorical
from tests.continual.continual_cases import MAKERS, Maker, moved_away


class Heads(nn.Module):
    """A body and one head a task; the task in hand is a state of the network."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(6, 2) for _ in range(heads)])
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads[self.task](self.body(x))
        return found

    def select(self, task: int) -> None:
        """Serve another task."""
        self.task = task


class AllHeads(Heads):
    """The same, returning the outputs of every head."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        inner = self.body(x)
        return [head(inner) for head in self.heads]


def task(seed: int, classes: int = 2, n: int = 24) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, (x @ torch.randn(4, classes, generator=generator)).argmax(1)


def train(net: nn.Module, method: ContinualMethod, data: tuple[Tensor, Tensor], steps: int = 6) -> None:
    """A plain loop."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        out = net(data[0])
        out = out[net.task] if isinstance(out, list) else out
        loss = nn.functional.cross_entropy(out, data[1]) + method.penalty(examples=len(data[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step()


MULTI: dict[str, Maker] = {**MAKERS, "full": lambda net: OnlineLaplace(net, Categorical(), "full")}


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.thinned(2)
def test_heads_that_are_added_join_without_penalty(name: str) -> None:
    net = Heads()
    method = MULTI[name](net)
    for number in range(3):
        if number:
            net.heads.append(nn.Linear(6, 2))
        net.select(number)
        before = method.penalty().item()
        with torch.no_grad():
            net.heads[number].weight.add_(5.0)  # type: ignore[union-attr,operator]
        assert method.penalty().item() == before  # nothing is known about the new head
        train(net, method, task(number))
        if isinstance(method, NonOnlineLaplace):
            method.consolidate(task(number), prepare=lambda copy, number=number: copy.select(number))
        else:
            method.consolidate(task(number))
    grads = {n: g for n, g in _gradients(net, method).items() if g.abs().max() > 0}
    assert {f"heads.{i}.weight" for i in range(3)} | {"body.0.weight"} <= set(grads)


def _gradients(net: nn.Module, method: ContinualMethod) -> dict[str, Tensor]:
    """The penalty's gradients by name, a step away."""
    moved_away(net)
    names = [name for name, _ in net.named_parameters()]
    found = torch.autograd.grad(method.penalty(), list(net.parameters()), allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "full"])
def test_a_head_in_use_does_not_touch_the_others(structure: str) -> None:
    net = Heads(3)
    method = OnlineLaplace(net, Categorical(), structure)
    net.select(1)
    method.consolidate(task(0))
    grads = _gradients(net, method)
    reached = {n for n, g in grads.items() if g.abs().max() > 0}
    assert reached == {
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
        "heads.1.weight",
        "heads.1.bias",
    }


def test_heads_by_output_and_by_state_are_the_same() -> None:
    torch.manual_seed(1)
    net = Heads(2)
    both = AllHeads(2)
    both.load_state_dict(net.state_dict())
    by_state, by_output = OnlineLaplace(net, Categorical()), OnlineLaplace(both, Categorical())
    for number in range(2):
        by_state.consolidate(task(number), prepare=lambda copy, number=number: copy.select(number))
        by_output.consolidate(task(number), output=lambda outs, number=number: outs[number])
    assert net.task == 0
    moved_away(net)
    moved_away(both)
    assert by_state.penalty().item() == pytest.approx(by_output.penalty().item(), rel=1e-5)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("classes", [2, 5])
def test_parameters_of_another_shape_are_refused(name: str, classes: int) -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    method = MULTI[name](net)
    train(net, method, task(0, classes=3))
    method.consolidate(task(0, classes=3))
    kept, net[0] = net[0], nn.Linear(4, classes)
    with pytest.raises(ModelError, match="shape"):
        method.penalty()
    if not isinstance(method, NonOnlineLaplace):  # it measures all tasks again, in the shape of now
        with pytest.raises(LinnetError):
            method.consolidate(task(0, classes=2))
    net[0] = kept
    moved_away(net)
    assert method.penalty().item() > 0


@pytest.mark.parametrize("name", MAKERS)
def test_frozen_and_absent_parameters_are_tolerated(name: str) -> None:
    net = Heads(2)
    method = MAKERS[name](net)
    train(net, method, task(0))
    method.consolidate(task(0))
    moved_away(net)
    whole = method.penalty().item()
    net.body[0].requires_grad_(False)
    net.zero_grad()
    value = method.penalty()
    assert value.item() == pytest.approx(whole, rel=1e-6)
    value.backward()
    assert net.body[0].weight.grad is None
    assert net.heads[0].weight.grad is not None
    assert method.add_grad_().item() == pytest.approx(whole, rel=1e-6)
    assert net.body[0].weight.grad is None
    train(net, method, task(0))
    method.consolidate(task(0))
    del net.heads[0]
    net.heads.insert(0, nn.Identity())
    moved_away(net)
    assert method.penalty().item() > 0
    net.requires_grad_(False)
    assert not method.penalty().requires_grad
    net.body = nn.Sequential(*[nn.Flatten()] * 3, nn.Linear(4, 6))
    del net.heads[1]
    with pytest.raises(ModelError, match="none of the"):
        method.penalty()


def test_selected_parameters_alone_are_remembered() -> None:
    net = Heads()
    for method in (
        OnlineLaplace(net, Categorical(), params="body"),
        EWC(net, Categorical(), params="body"),
        OnlineLaplace(net, Categorical(), params="body", prior_mean=0.0),
    ):
        method.consolidate(task(0))
        assert not any(n.startswith("heads") for n in _gradients(net, method))


def test_importance_follows_heads() -> None:
    net = Heads()
    method = SynapticIntelligence(net)
    train(net, method, task(0))
    method.consolidate()
    net.heads.append(nn.Linear(6, 2))
    net.select(1)
    train(net, method, task(1))
    method.consolidate()
    assert set(method.importance) == {n for n, _ in net.named_parameters()}
    assert all(t.min() >= 0 for t in method.importance.values())


# -- names ---------------------------------------------------------------------------------------------


def remembering(make: str) -> tuple[nn.Sequential, ContinualMethod]:
    """A network of two layers after its first task, and the method that remembers it."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    method = MAKERS[make](net)
    train(net, method, task(0, classes=3), 3)
    method.consolidate(task(0, classes=3))
    return net, method


@pytest.mark.parametrize("make", MAKERS)
def test_parts_that_are_compiled_keep_their_penalty(make: str) -> None:
    net, method = remembering(make)
    moved_away(net)
    before, state = method.penalty(), method.state_dict()
    net[0] = torch.compile(net[0], backend="eager")  # type: ignore[assignment]
    torch.testing.assert_close(method.penalty(), before)
    other = MAKERS[make](net)
    other.load_state_dict(state)
    torch.testing.assert_close(other.penalty(), before)
    train(net, method, task(1, classes=3), 3)
    method.consolidate(task(1, classes=3))
    assert {name for block in method._terms[-1].precision.blocks for name in block.layer.names} == {
        f"{i}.{name}" for i in (0, 2) for name in ("weight", "bias")
    }


@pytest.mark.parametrize("make", MAKERS)
def test_a_parameter_that_has_another_name_is_refused(make: str) -> None:
    net, method = remembering(make)
    nn.utils.parametrizations.weight_norm(net[0])
    with pytest.raises(ModelError, match=r"'0\.weight'.*keep their names"):
        method.penalty()


class Served(Heads):
    """Tasks are served by copies that share the parameters."""

    def at(self, task: int) -> Heads:
        """One that serves a task."""
        found = copy.copy(self)
        found.task = task
        return found


def test_the_network_that_prepare_returns_is_taken() -> None:
    net = Served(2)
    method = EWC(net, Categorical())
    method.consolidate(task(0), prepare=lambda network: network.at(1))  # type: ignore[operator]
    names = {name for block in method._terms[0].precision.blocks for name in block.layer.names}
    assert "heads.1.weight" in names
    assert "heads.0.weight" not in names
    with pytest.raises(InputError, match="prepare returned a Linear"):
        method.consolidate(task(0), prepare=lambda network: nn.Linear(4, 2))
    net.kept = net(task(0)[0])  # type: ignore[assignment]
    with pytest.raises(ModelError, match="holds no tensors of an earlier pass"):
        method.consolidate(task(0), prepare=lambda network: None)


def test_a_lazy_network_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"weights: weight has no shape yet.*call model\(x\) on a batch first"
    ):
        SynapticIntelligence(nn.LazyLinear(3))
