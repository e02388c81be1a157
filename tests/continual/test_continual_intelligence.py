"""Synaptic intelligence against a loop written out by hand."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.continual import SynapticIntelligence
from linnet.errors import InputError
from linnet.tangent.linearized import linearize
from tests.continual.continual_cases import flat, gradient, moved_away, small_network, small_task

C, XI = 0.7, 0.05


def by_hand(net: nn.Module, tasks: int, steps: int, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Ω, θ̃ and the last parameters, from the paper's formulas and two backward passes a step."""
    omega, anchor = torch.zeros_like(flat(net)), flat(net)
    for task in range(tasks):
        x, y = small_task(task)
        optimizer = torch.optim.Adam(net.parameters(), **settings)
        path, start = torch.zeros_like(omega), flat(net)
        for step in range(steps):
            rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            g = gradient(net, loss)  # of the loss alone
            theta = torch.cat([p.flatten() for p in net.parameters()])
            optimizer.zero_grad()
            (
                nn.functional.cross_entropy(net(x[rows]), y[rows]) + C * (omega * (theta - anchor) ** 2).sum()
            ).backward()
            before = flat(net)
            optimizer.step()
            path -= g * (flat(net) - before)
        omega = (omega + path / ((flat(net) - start) ** 2 + XI)).clamp(min=0)
        anchor = flat(net)
    return omega, anchor, flat(net)


@pytest.mark.parametrize("way", ["penalty", "add_grad_", "micro-batches"])
@pytest.mark.parametrize("order", ["zero first", "zero after", "zero before after_step"])
@pytest.mark.thinned(2)
def test_it_is_the_loop_written_by_hand(way: str, order: str, float64: torch.dtype) -> None:
    torch.manual_seed(1)
    net, tasks, steps = small_network(), 3, 9
    start = flat(net)
    want = by_hand(net, tasks, steps, lr=0.02, weight_decay=0.01)
    torch.nn.utils.vector_to_parameters(start, net.parameters())
    method = SynapticIntelligence(net, strength=C, damping=XI)
    for task in range(tasks):
        x, y = small_task(task)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=0.01)
        optimizer.zero_grad()
        for step in range(steps):
            rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
            if order == "zero first":
                optimizer.zero_grad()
            if way == "micro-batches":
                for half in (x[rows][:4], y[rows][:4]), (x[rows][4:], y[rows][4:]):
                    loss = nn.functional.cross_entropy(net(half[0]), half[1]) + method.penalty(examples=24)
                    (loss / 2).backward()
            else:
                loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
                (loss + method.penalty() if way == "penalty" else loss).backward()
                if way == "add_grad_":
                    method.add_grad_()
            optimizer.step()
            if order == "zero before after_step":
                optimizer.zero_grad()
            method.after_step()
            if order == "zero after":
                optimizer.zero_grad(set_to_none=False)
        method.consolidate()
    importance = torch.cat([method.importance[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(flat(net), want[2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(importance, want[0], rtol=1e-8, atol=1e-12)
    delta = moved_away(net)
    assert method.penalty().item() == pytest.approx((C * importance @ delta.square()).item(), rel=1e-12)


def test_examples_make_no_difference() -> None:
    net = small_network()
    method = SynapticIntelligence(net)
    step(net, method)
    method.consolidate()
    moved_away(net)
    assert method.penalty(examples=50).item() == method.penalty().item() > 0


def step(net: nn.Module, method: SynapticIntelligence | None, clear: bool = False) -> None:
    """One step of gradient descent."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    x, y = small_task(0)
    loss = nn.functional.cross_entropy(net(x), y)
    if method is not None:
        loss = loss + method.penalty()
    loss.backward()
    optimizer.step()
    if clear:
        optimizer.zero_grad(set_to_none=False)
    if method is not None:
        method.after_step()


def test_gradients_that_are_gone_are_found_out() -> None:
    net = small_network()
    method = SynapticIntelligence(net)
    with pytest.raises(InputError, match="zero_grad"):
        step(net, method, clear=True)
    with pytest.raises(InputError, match="after_step"):
        method.consolidate()


def test_hooks_go_with_the_method() -> None:
    net = small_network()
    method = SynapticIntelligence(net)
    step(net, method)
    assert all(p._post_accumulate_grad_hooks for p in net.parameters())
    del method
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    step(net, None)


def test_two_strengths_and_dampings_differ() -> None:
    found = []
    for strength, damping in ((1.0, 0.1), (2.0, 0.1), (1.0, 0.001)):
        torch.manual_seed(0)
        net = small_network()
        method = SynapticIntelligence(net, strength, damping)
        step(net, method)
        method.consolidate()
        moved_away(net)
        found.append(method.penalty().item())
    assert found[1] == pytest.approx(2 * found[0], rel=1e-6)
    assert found[2] > 1.5 * found[0]


def test_a_linearized_network(float64: torch.dtype) -> None:
    net = linearize(small_network())
    method = SynapticIntelligence(net, strength=C, damping=XI)
    grads, starts, afters = [], [], []
    x, y = small_task(0)
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(x), y) + method.penalty()
        net.zero_grad()
        loss.backward()
        grads.append(torch.cat([p.grad.flatten().clone() for p in net.delta.values() if p.grad is not None]))
        starts.append(flat(net))
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        afters.append(flat(net))
        method.after_step()
    method.consolidate()
    path = -sum(g * (a - b) for g, a, b in zip(grads, afters, starts, strict=True))
    want = path / ((afters[-1] - starts[0]) ** 2 + XI)
    found = torch.cat([method.importance[name].flatten() for name in net.parameter_names])
    torch.testing.assert_close(found, want.clamp(min=0), rtol=1e-10, atol=1e-14)
    moved_away(net)
    before = method.penalty().item()
    net.relinearize()
    assert method.penalty().item() == pytest.approx(before, rel=1e-12)


def test_importances_come_in_the_networks_order() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    method = SynapticIntelligence(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    method.after_step()
    method.consolidate()
    assert list(method.importance) == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_copies_follow_their_own_network(way: str, float64: torch.dtype) -> None:
    net = small_network()
    method = SynapticIntelligence(net, strength=C, damping=XI)
    both = (net, method)
    other, copied = copy.deepcopy(both) if way == "copy" else pickle.loads(pickle.dumps(both))
    importances = []
    for one, its in ((net, method), (other, copied)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        x, y = small_task(0)
        for _ in range(3):  # nothing asks for a penalty before the first task ends
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(x), y).backward()
            optimizer.step()
            its.after_step()
        its.consolidate()
        importances.append(its.importance)
    assert all(torch.equal(t, importances[1][name]) for name, t in importances[0].items())
    assert torch.equal(flat(net), flat(other))


@pytest.mark.parametrize("way", ["penalty", "add_grad_"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_penalty_is_taken_out_of_gradients_that_were_scaled_or_clipped(
    way: str, clip: float | None, float64: torch.dtype
) -> None:
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(1)
        net = small_network()
        method, want = SynapticIntelligence(net, strength=C, damping=XI), torch.zeros_like(flat(net))
        anchor = flat(net)
        for task in range(2):
            (x, y), path, start = small_task(task), torch.zeros_like(flat(net)), flat(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
            for _ in range(6):
                optimizer.zero_grad()
                g = gradient(net, nn.functional.cross_entropy(net(x), y))
                p = 2 * C * want * (flat(net) - anchor)
                added = method.penalty() if way == "penalty" else 0.0
                (scale * (nn.functional.cross_entropy(net(x), y) + added)).backward()
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= scale
                if way == "add_grad_":
                    method.add_grad_()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                    g = g * min(1.0, clip / (float((g + p).norm()) + 1e-6))
                before = flat(net)
                optimizer.step()
                method.after_step()
                path -= g * (flat(net) - before)
            method.consolidate()
            want, anchor = (want + path / ((flat(net) - start) ** 2 + XI)).clamp(min=0), flat(net)
        got = torch.cat([t.flatten() for t in method.importance.values()])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
        found.append(got)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_a_strength_cannot_be_changed_afterwards() -> None:
    method = SynapticIntelligence(small_network(), strength=C)
    with pytest.raises(InputError, match="of a method that is made"):
        method.strength = 2.0
    assert method.strength == C


def test_a_step_that_a_loss_scaler_skips_adds_nothing() -> None:
    nets = [small_network(), small_network()]
    nets[1].load_state_dict(nets[0].state_dict())
    x, y = small_task(0)
    found = []
    for skips, net in zip((True, False), nets, strict=True):
        method = SynapticIntelligence(net, strength=C)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if skips:
            nn.functional.cross_entropy(net(x), y).backward()
            for p in net.parameters():
                assert p.grad is not None
                p.grad.fill_(torch.inf)  # as after an overflow: the scaler calls no step
            method.after_step()
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            method.after_step()
        method.consolidate()
        found.append(torch.cat([value.flatten() for value in method.importance.values()]))
    assert bool(found[0].isfinite().all())
    torch.testing.assert_close(found[0], found[1])


def learned(ways: str, steps: int = 3) -> dict[str, Tensor]:
    """Ω after two tasks, the second with a head of its own and a layer that was frozen before."""
    torch.manual_seed(3)
    net = nn.ModuleDict({"body": nn.Linear(4, 6), "h0": nn.Linear(6, 3), "late": nn.Linear(6, 6)})
    net["late"].requires_grad_(False)
    method = SynapticIntelligence(net, strength=20.0, damping=XI)
    for task in range(2):
        x, y = small_task(task)
        if task:
            net["h1"] = nn.Linear(6, 3)
            net["late"].requires_grad_(True)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                net[f"h{task}"](net["late"](torch.tanh(net["body"](x)))), y % 3
            )
            if ways == "penalty":
                (loss + method.penalty()).backward()
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                method.add_grad_()
            optimizer.step()
            method.after_step()
        method.consolidate()
    return method.importance


@pytest.mark.parametrize("steps", [1, 3])
def test_the_first_step_of_what_is_new_counts(steps: int, float64: torch.dtype) -> None:
    one, other = learned("penalty", steps), learned("add_grad_", steps)
    assert one.keys() == other.keys() >= {"h1.weight", "late.weight"}
    assert all(float(one[name].sum()) > 0 for name in ("h1.weight", "late.weight"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, msg=name)


@pytest.mark.parametrize("way", ["penalty", "add_grad_"])
def test_gradients_that_others_put_in_their_place(way: str, float64: torch.dtype) -> None:
    """Data parallelism replaces gradients by views of its buckets; they go on to be accumulated."""
    found = []
    for replaced in (False, True):
        torch.manual_seed(0)
        net = small_network()
        method, optimizer = SynapticIntelligence(net, 20.0, XI), torch.optim.SGD(net.parameters(), 0.01)
        for task in range(2):
            x, y = small_task(task)
            for _ in range(3):
                optimizer.zero_grad()
                for rows in (slice(0, 12), slice(12, 24)):
                    loss = nn.functional.cross_entropy(net(x[rows]), y[rows]) / 2
                    if way == "penalty":
                        (loss + method.penalty() / 2).backward()
                    else:
                        loss.backward()  # type: ignore[no-untyped-call]
                    for p in net.parameters() if replaced else ():
                        assert p.grad is not None
                        p.grad = p.grad.clone()
                    if way == "add_grad_":
                        method.add_grad_(examples=2)
                optimizer.step()
                method.after_step()
            method.consolidate()
        found.append(torch.cat([value.flatten() for value in method.importance.values()]))
    torch.testing.assert_close(found[1], found[0])


class Perturbed(torch.optim.SGD):
    """A step by the gradient at a point nearby, as sharpness-aware minimization takes it."""

    def step(self, closure: Any = None) -> Any:
        kept = [p.detach().clone() for p in self.param_groups[0]["params"]]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            found = closure()
        with torch.no_grad():
            for p, before in zip(self.param_groups[0]["params"], kept, strict=True):
                p.copy_(before)
        super().step()
        return found


def path_of(way: str, thrown: bool) -> Tensor:
    """Ω of two tasks in which gradients are thrown away, or of the same training by hand."""
    torch.manual_seed(0)
    net = small_network()
    method = SynapticIntelligence(net, strength=50.0, damping=XI)
    for task in range(2):
        x, y = small_task(task)
        optimizer = (Perturbed if way == "nearby" else torch.optim.SGD)(net.parameters(), lr=0.01)

        def closure(x: Tensor = x, y: Tensor = y, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=way != "zeros")
            loss = nn.functional.cross_entropy(net(x), y)
            if way == "add_grad_":
                loss.backward()
                method.add_grad_()
            else:
                (loss + method.penalty()).backward()
            return loss

        for _ in range(5):
            for _ in range(1 + (thrown and task)):
                closure()
            optimizer.step(closure) if way == "nearby" else optimizer.step()
            method.after_step()
        method.consolidate()
    return torch.cat([value.flatten() for value in method.importance.values()])


@pytest.mark.parametrize("way", ["penalty", "zeros", "add_grad_"])
def test_gradients_that_are_thrown_away_count_once(way: str, float64: torch.dtype) -> None:
    torch.testing.assert_close(path_of(way, True), path_of(way, False))


def test_a_step_by_gradients_nearby(float64: torch.dtype) -> None:
    torch.manual_seed(0)
    net = small_network()
    omega, anchor = torch.zeros_like(flat(net)), flat(net)
    for task in range(2):
        x, y = small_task(task)
        path, start = torch.zeros_like(omega), flat(net)
        for _ in range(5):
            before = flat(net)

            at = before
            for _ in range(2):
                torch.nn.utils.vector_to_parameters(at, net.parameters())
                alone = gradient(net, nn.functional.cross_entropy(net(x), y))
                both = alone + 2 * 50.0 * omega * (at - anchor)
                at = before + 0.05 * both
            torch.nn.utils.vector_to_parameters(before - 0.01 * both, net.parameters())
            path -= alone * (flat(net) - before)
        omega = (omega + path / ((flat(net) - start) ** 2 + XI)).clamp(min=0)
        anchor = flat(net)
    torch.testing.assert_close(path_of("nearby", False), omega)


class Owner(nn.Module):
    """A network that holds its method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.method = SynapticIntelligence(self)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_network_that_holds_its_method_is_copied(way: Any) -> None:
    net = way(Owner())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (net.layer(torch.ones(2, 4)).square().sum() + net.method.penalty()).backward()
        optimizer.step()
        net.method.after_step()
    net.method.consolidate()
    assert float(net.method.importance["layer.weight"].sum()) > 0


def test_a_step_inside_backward_needs_the_method_first() -> None:
    net = nn.Linear(2, 1)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)  # type: ignore[arg-type]
    method = SynapticIntelligence(net)
    net(torch.ones(3, 2)).square().sum().backward()
    with pytest.raises(InputError, match="before hooks that step in backward"):
        method.after_step()


@pytest.mark.parametrize("way", ["penalty", "add_grad_"])
def test_embeddings_with_sparse_gradients(way: str, float64: torch.dtype) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Embedding(5, 3, sparse=sparse).double()
        method, optimizer = SynapticIntelligence(net, 5.0, XI), torch.optim.SGD(net.parameters(), 0.1)
        for ids in (torch.tensor([0, 1, 1]), torch.tensor([1, 3])):
            for _ in range(2):
                optimizer.zero_grad()
                loss = net(ids).square().sum()
                if way == "penalty":
                    (loss + method.penalty()).backward()
                else:
                    loss.backward()
                    method.add_grad_()
                optimizer.step()
                method.after_step()
            method.consolidate()
        found.append(method.importance["weight"])
    torch.testing.assert_close(found[0], found[1])
