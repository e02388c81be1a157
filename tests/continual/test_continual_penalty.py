"""The penalties against dense quadratic forms, and what is promised bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet.continual import EWC, NonOnlineLaplace, OnlineLaplace, convert_strength
from linnet.errors import InputError, ModelError
from linnet.likelihoods import Categorical
from tests.continual.continual_cases import (
    MAKERS,
    OFF,
    flat,
    gauss_newton,
    gradient,
    moved_away,
    small_network,
    small_task,
    train,
)
from tests.curvatures.side_by_side import curvature_of, grouped


@pytest.mark.parametrize("structure", ["full", "block", "diagonal"])
def test_online_laplace_is_the_sum_of_dense_matrices(structure: str, float64: torch.dtype) -> None:
    net, prior, strength = small_network(), 0.7, 2.5
    method = OnlineLaplace(net, Categorical(), structure, prior_precision=prior, strength=strength)
    total = prior * torch.eye(len(flat(net)))
    for seed in range(3):
        task = small_task(seed)
        method.consolidate(task)
        g = gauss_newton(net, task[0])
        if structure == "diagonal":
            g = torch.diag(g.diagonal())
        if structure == "block":
            g = torch.block_diag(g[:25, :25], g[25:, 25:])
        total += strength * g
        delta = moved_away(net, seed=seed)
        value = method.penalty()
        torch.testing.assert_close(value.detach(), 0.5 * delta @ total @ delta, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(gradient(net, value), total @ delta, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(method.precision().dense(), total, rtol=1e-10, atol=1e-12)


def test_kronecker_penalty_is_the_explicit_form(float64: torch.dtype) -> None:
    net, task = small_network(), small_task(0)
    method = OnlineLaplace(net, Categorical(), prior_precision=0.0)
    method.consolidate(task)
    parts = linnet.curvature(net, task, Categorical()).parts
    start = [p.detach().clone() for p in net.parameters()]
    moved_away(net)
    want = torch.zeros(())
    for part, w, b, w0, b0 in zip(parts, net[::2], net[::2], start[::2], start[1::2], strict=True):  # type: ignore[index,arg-type]
        matrix = torch.cat([w.weight - w0, (b.bias - b0)[:, None]], 1).detach().flatten()
        want += 0.5 * matrix @ torch.kron(part.operator.left, part.operator.right) @ matrix  # type: ignore[attr-defined]
    torch.testing.assert_close(method.penalty().detach(), want, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("name", MAKERS)
def test_add_grad_equals_differentiating_the_penalty(name: str, float64: torch.dtype) -> None:
    net = small_network()
    method = MAKERS[name](net)
    for seed in range(2):
        train(net, method, small_task(seed))
        method.consolidate(small_task(seed))
    moved_away(net)
    value = method.penalty(examples=10)
    want = gradient(net, value)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    added = method.add_grad_(examples=10)
    assert value.item() > 0
    assert not added.requires_grad
    assert added.item() == pytest.approx(value.item(), rel=1e-12)
    got = torch.cat([p.grad.flatten() - 1 for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_the_gradient_is_that_of_finite_differences_and_of_second_order(
    name: str, float64: torch.dtype
) -> None:
    net = small_network()
    method = MAKERS[name](net)
    train(net, method, small_task(0))
    method.consolidate(small_task(0))
    moved_away(net)
    parameters = list(net.parameters())
    first = torch.autograd.grad(method.penalty(), parameters, create_graph=True)
    direction = [torch.randn_like(p) for p in parameters]
    along = sum((g * d).sum() for g, d in zip(first, direction, strict=True))
    assert isinstance(along, torch.Tensor)
    second = torch.cat([h.flatten() for h in torch.autograd.grad(along, parameters)])
    before = flat(net)
    slopes = []
    for sign in (1.0, -1.0):
        torch.nn.utils.vector_to_parameters(
            before + sign * 1e-3 * torch.cat([d.flatten() for d in direction]), parameters
        )
        slopes.append((method.penalty().item(), gradient(net, method.penalty())))
    # differences of a quadratic and of its gradient are exact
    assert (slopes[0][0] - slopes[1][0]) / 2e-3 == pytest.approx(along.item(), rel=1e-8)
    torch.testing.assert_close((slopes[0][1] - slopes[1][1]) / 2e-3, second, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_to_remember_is_exactly_zero(name: str) -> None:
    net = small_network()
    method = MAKERS[name](net)
    assert method.penalty().item() == 0.0
    assert not method.penalty(examples=5).requires_grad
    assert method.add_grad_().item() == 0.0
    assert all(p.grad is None for p in net.parameters())
    train(net, method, small_task(0))
    method.consolidate(small_task(0))
    assert method.tasks == 1
    assert method.penalty().item() == 0.0  # at μ itself
    assert gradient(net, method.penalty()).abs().max() == 0.0


@pytest.mark.parametrize("name", OFF)
def test_strength_zero_is_the_naive_run_bit_for_bit(name: str) -> None:
    runs = []
    for wanted in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
        method = OFF[name](net) if wanted else None
        for seed in range(3):
            train(net, method, small_task(seed), weight_decay=0.1)
            if method is not None:
                loader = torch.utils.data.DataLoader(
                    torch.utils.data.TensorDataset(*small_task(seed)), batch_size=8, shuffle=True
                )
                method.consolidate(loader)
        runs.append((flat(net), net[1].running_mean.clone(), torch.rand(3)))  # type: ignore[union-attr,operator]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_a_strength_changes_the_second_task(name: str) -> None:
    runs = []
    for wanted in (False, True):
        torch.manual_seed(3)
        net = small_network()
        method = MAKERS[name](net) if wanted else None
        ends = []
        for seed in range(2):
            train(net, method, small_task(seed))
            ends.append(flat(net))
            if method is not None:
                method.consolidate(small_task(seed))
        runs.append(ends)
    assert torch.equal(runs[0][0], runs[1][0])  # the first task is the naive one
    assert not torch.equal(runs[0][1], runs[1][1])
    assert (runs[1][1] - runs[1][0]).norm() < (runs[0][1] - runs[0][0]).norm()


@pytest.mark.parametrize("name", ["online", "ewc", "non-online"])
def test_consolidation_leaves_everything_as_it_was(name: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
    method = MAKERS[name](net)
    net(small_task(0)[0]).sum().backward()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(*small_task(0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    method.consolidate(loader)
    assert net.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(
        torch.equal(g, p.grad) for g, p in zip(gradients, net.parameters(), strict=True) if p.grad is not None
    )
    assert method.penalty(examples=24).item() == 0.0


def test_prior_mean_holds_from_the_start(float64: torch.dtype) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), "full", prior_precision=2.0, prior_mean=0.0)
    assert method.penalty().item() == pytest.approx(flat(net).square().sum().item(), rel=1e-12)
    method = OnlineLaplace(net, Categorical(), "full", prior_precision=2.0, prior_mean="initial")
    delta = moved_away(net)
    assert method.penalty().item() == pytest.approx(delta.square().sum().item(), rel=1e-12)
    given = {"0.weight": torch.zeros(5, 4)}
    method = OnlineLaplace(net, Categorical(), "full", prior_precision=2.0, prior_mean=given)
    assert method.penalty().item() == pytest.approx(net[0].weight.square().sum().item(), rel=1e-12)  # type: ignore[index,union-attr,operator]
    method = OnlineLaplace(net, Categorical(), "full", prior_precision=2.0, prior_mean="initial")
    method.consolidate(small_task(0))
    learned = gauss_newton(net, small_task(0)[0])
    delta = moved_away(net, seed=1)
    total = learned + 2.0 * torch.eye(len(delta))
    want = 0.5 * delta @ total @ delta
    assert method.penalty().item() == pytest.approx(want.item(), rel=1e-10)


@pytest.mark.parametrize("expectation", ["exact", "mc", "empirical"])
def test_ewc_is_a_term_a_task_with_the_fisher_matrix_chosen(expectation: str, float64: torch.dtype) -> None:
    net = small_network()
    method = EWC(net, Categorical(), strength=3.0, **grouped("diagonal", expectation, samples=4))
    want, anchors = [], []
    for seed in range(3):
        task = small_task(seed)
        method.consolidate(task)
        want.append(
            curvature_of(
                net, task, Categorical(), "diagonal", expectation, samples=4 if expectation == "mc" else 1
            ).diagonal()
        )
        anchors.append(flat(net))
        moved_away(net, seed=seed)
    total = sum(1.5 * f @ (flat(net) - mu).square() for f, mu in zip(want, anchors, strict=True))
    torch.testing.assert_close(method.penalty().detach(), total, rtol=1e-10, atol=0.0)


def test_exact_and_empirical_fisher_against_loops(float64: torch.dtype) -> None:
    net, (x, y) = small_network(), small_task(0)
    exact, empirical = torch.zeros_like(flat(net)), torch.zeros_like(flat(net))
    for i in range(len(x)):
        logits = net(x[i : i + 1])
        for c in range(3):
            loss = nn.functional.cross_entropy(logits, torch.tensor([c]))
            squares = (
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(loss, net.parameters(), retain_graph=True)]
                )
                ** 2
            )  # type: ignore[arg-type]
            exact += logits.softmax(1)[0, c].detach() * squares
            empirical += squares * float(y[i] == c)
    for expectation, want in (("exact", exact), ("empirical", empirical)):
        method = EWC(net, Categorical(), expectation=expectation)
        method.consolidate((x, y))
        before = flat(net)
        delta = moved_away(net)
        assert method.penalty().item() == pytest.approx((0.5 * want @ delta.square()).item(), rel=1e-10)
        torch.nn.utils.vector_to_parameters(before, net.parameters())


def test_online_ewc_decays(float64: torch.dtype) -> None:
    net = small_network()
    method = EWC(net, Categorical(), strength=2.0, variant="online", decay=0.5)
    total = torch.zeros_like(flat(net))
    for seed in range(3):
        moved_away(net, seed=seed)
        method.consolidate(small_task(seed))
        total = 0.5 * total + gauss_newton(net, small_task(seed)[0]).diagonal()
    delta = moved_away(net)
    assert method.penalty().item() == pytest.approx((total @ delta.square()).item(), rel=1e-10)


def test_non_online_measures_every_task_where_the_last_ended(float64: torch.dtype) -> None:
    net = small_network()
    method = NonOnlineLaplace(net, Categorical(), "full", prior_precision=0.3, strength=2.0)
    for seed in range(3):
        moved_away(net, seed=seed)
        method.consolidate(small_task(seed))
    total = 2.0 * sum(gauss_newton(net, small_task(seed)[0]) for seed in range(3)) + 0.3 * torch.eye(43)
    delta = moved_away(net)
    assert method.penalty().item() == pytest.approx((0.5 * delta @ total @ delta).item(), rel=1e-10)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.thinned(3)
def test_states_go_round_through_a_file_and_training_goes_on(name: str) -> None:
    net = small_network()
    method = MAKERS[name](net)
    train(net, method, small_task(0))
    method.consolidate(small_task(0))
    train(net, method, small_task(1), steps=4)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "method": method.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    twin = small_network()
    twin.load_state_dict(loaded["net"])
    other = MAKERS[name](twin)
    other.load_state_dict(loaded["method"])
    if isinstance(other, NonOnlineLaplace):
        with pytest.raises(InputError, match="remember"):
            other.consolidate(small_task(1))
        other.remember(small_task(0))
        with pytest.raises(InputError, match="remember"):
            other.remember(small_task(0))
    for model, one in ((net, method), (twin, other)):
        train(model, one, small_task(1), steps=4)
        one.consolidate(small_task(1))
        train(model, one, small_task(2), steps=4)
    assert other.tasks == 2
    assert torch.equal(flat(net), flat(twin))
    assert method.penalty().item() == other.penalty().item() > 0


def test_a_state_does_not_change_afterwards_and_must_fit(float64: torch.dtype) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical())
    method.consolidate(small_task(0))
    state = method.state_dict()
    moved_away(net)
    want = method.penalty().item()
    method.consolidate(small_task(1))
    method.load_state_dict(state)
    assert method.tasks == 1
    assert method.penalty().item() == want
    with pytest.raises(InputError, match="settings"):
        OnlineLaplace(net, Categorical(), strength=2.0).load_state_dict(state)
    with pytest.raises(InputError, match="method"):
        EWC(net, Categorical()).load_state_dict(state)
    with pytest.raises(InputError, match="the state has no state"):
        method.load_state_dict({key: value for key, value in state.items() if key != "state"})


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_is_not_whole_changes_nothing(name: str) -> None:
    net = small_network()
    method, other = MAKERS[name](net), MAKERS[name](net)
    for one in (method, other):
        one.after_step() if hasattr(one, "after_step") else None
    state = copy.deepcopy(method.state_dict())
    state["tasks"] = 7
    state["state"].popitem()
    before = other.penalty().item(), len(other._terms)
    with pytest.raises(InputError, match="not whole"):
        other.load_state_dict(state)
    assert other.tasks == 0
    assert (other.penalty().item(), len(other._terms)) == before


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_remembered_follows_the_network_to_another_type(name: str) -> None:
    net = small_network()
    method = MAKERS[name](net)
    train(net, method, small_task(0))
    method.consolidate(small_task(0))
    moved_away(net)
    before = method.penalty().item()
    net.double()
    value = method.penalty()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(before, rel=1e-4)
    assert method.to("cpu", torch.float32) is method
    assert method.penalty().item() == pytest.approx(before, rel=1e-4)
    net.to(torch.bfloat16)
    value = method.penalty()
    assert value.dtype == torch.float32
    value.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in net.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("name", MAKERS)
def test_states_move_between_devices(name: str) -> None:
    net = small_network()
    method = MAKERS[name](net)
    train(net, method, small_task(0))
    method.consolidate(small_task(0))
    moved_away(net)
    before, state = method.penalty().item(), method.state_dict()
    net.cuda()
    assert method.penalty().item() == pytest.approx(before, rel=1e-5)  # it follows the network
    other = MAKERS[name](net)
    other.load_state_dict(state)
    assert other.penalty().device.type == "cuda"
    assert other.penalty().item() == pytest.approx(before, rel=1e-5)
    net.cpu()
    back = MAKERS[name](net)
    back.load_state_dict(other.state_dict())
    assert back.penalty().item() == pytest.approx(before, rel=1e-5)


def test_autocast_does_not_reach_the_penalty() -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical())
    method.consolidate(small_task(0))
    moved_away(net)
    want = gradient(net, method.penalty())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = method.penalty()
    assert value.dtype == torch.float32
    assert torch.equal(gradient(net, value), want)


class Wrapper(nn.Module):
    """Stands for the wrapper of torch.compile."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_wrappers_are_looked_through() -> None:
    net = small_network()
    wrapped: Any = nn.DataParallel(Wrapper(net))
    method, plain = OnlineLaplace(wrapped, Categorical()), OnlineLaplace(net, Categorical())
    method.consolidate(small_task(0))
    plain.consolidate(small_task(0))
    moved_away(net)
    assert method.penalty().item() == plain.penalty().item() > 0


def test_strengths_in_other_scales(float64: torch.dtype) -> None:
    net, old, new = small_network(), 24, 60
    method = EWC(net, Categorical(), strength=5.0)
    method.consolidate(small_task(0, old))
    fisher = gauss_newton(net, small_task(0, old)[0]).diagonal()
    delta = moved_away(net)
    ours = method.penalty(examples=new).item()
    averaged = convert_strength(5.0, "linnet", "averaged", old=old, new=new)
    assert (averaged / 2 * (fisher / old) @ delta.square()).item() == pytest.approx(ours, rel=1e-10)
    mammoth = convert_strength(5.0, "linnet", "mammoth", old=old, new=new)
    assert (mammoth * (fisher / old) @ delta.square()).item() == pytest.approx(ours, rel=1e-10)
    avalanche = convert_strength(5.0, "linnet", "avalanche", old=old, new=new, batch=16)
    assert (avalanche * (fisher / old / 16) @ delta.square()).item() == pytest.approx(ours, rel=1e-10)
    assert convert_strength(avalanche, "avalanche", old=old, new=new, batch=16) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"merge": "add"}, "T² times"),
        ({"prior_mean": "zero"}, "prior_mean"),
        ({"prior_mean": {"nothing": torch.zeros(1)}}, "nothing"),
        ({"structure": "matrix-free"}, "matrix-free"),
        ({"matrix": "hessian"}, "hessian"),
        ({"model": nn.ReLU()}, "no floating-point parameter"),
        ({"file": "sums"}, "file"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"model": small_network(), "likelihood": Categorical(), **arguments}
    with pytest.raises((InputError, ModelError), match=said):
        OnlineLaplace(**given)


def test_more_arguments_that_cannot_be_used() -> None:
    net = small_network()
    with pytest.raises(InputError, match="decay"):
        EWC(net, Categorical(), decay=0.5)
    method = OnlineLaplace(net, Categorical())
    with pytest.raises(ModelError, match="no task"):
        method.precision()
    listed = OnlineLaplace(net, Categorical(), merge="exact")
    for seed in range(2):
        listed.consolidate(small_task(seed))
    with pytest.raises(ModelError, match="list of Kronecker"):
        listed.precision()


def test_a_failed_consolidation_changes_nothing() -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical())
    method.consolidate(small_task(0))
    moved_away(net)
    before = method.penalty().item()
    with pytest.raises(ValueError, match="empty"):
        method.consolidate((torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)))
    assert (method.tasks, method.penalty().item()) == (1, before)
