"""Sums over tasks: exact where they can be, never over-counted, at constant memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.continual import EWC, NonOnlineLaplace, OnlineLaplace
from linnet.continual.quadratic import MERGES, PenaltyBlock, PenaltyPrecision, scaled, summed
from linnet.errors import ModelError
from linnet.likelihoods import Categorical
from linnet.linalg.kronecker import Kronecker, KroneckerEigen
from linnet.linalg.structured import Dense, Diagonal
from tests.continual.continual_cases import flat, gradient, moved_away, small_network, small_task

STRUCTURES = ("kfac", "ekfac", "diagonal", "block", "full", "low-rank", "kfra")


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.thinned(6)
def test_equal_tasks_count_once_each(structure: str, merge: str, float64: torch.dtype) -> None:
    net, task, tasks = small_network(), small_task(0), 4
    method = OnlineLaplace(net, Categorical(), structure, merge=merge, prior_precision=0.0, strength=2.0)
    g = linnet.curvature(net, task, Categorical(), structure).dense()
    for _ in range(tasks):
        method.consolidate(task)
    delta = moved_away(net)
    want = 2.0 * tasks * g @ delta
    torch.testing.assert_close(gradient(net, method.penalty()), want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("merge", MERGES)
def test_equal_tasks_of_singular_curvature(merge: str, float64: torch.dtype) -> None:
    net, (x, y), tasks = small_network(), small_task(0), 3
    x[:, 1] = 0.0  # an input that is never on, as at the edge of an image
    method = OnlineLaplace(net, Categorical(), merge=merge, prior_precision=0.0)
    g = linnet.curvature(net, (x, y), Categorical(), "kfac").dense()
    for _ in range(tasks):
        method.consolidate((x, y))
    delta = moved_away(net)
    want = tasks * g @ delta
    torch.testing.assert_close(gradient(net, method.penalty()), want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.thinned(2)
def test_equal_tasks_count_once_each_in_the_other_methods(merge: str, float64: torch.dtype) -> None:
    net, task, tasks = small_network(), small_task(0), 3
    g = linnet.curvature(net, task, Categorical(), "kfac").dense()
    methods = (
        NonOnlineLaplace(net, Categorical(), merge=merge, prior_precision=0.0),
        EWC(net, Categorical(), "kfac", variant="online", merge=merge),
        EWC(net, Categorical(), "kfac"),
    )
    for method in methods:
        for _ in range(tasks):
            method.consolidate(task)
    delta = moved_away(net)
    for method in methods:
        torch.testing.assert_close(gradient(net, method.penalty()), tasks * g @ delta, rtol=1e-8, atol=1e-10)


def test_a_list_of_products_is_the_exact_sum(float64: torch.dtype) -> None:
    net = small_network()
    exact = OnlineLaplace(net, Categorical(), merge="exact", prior_precision=0.0)
    merged = {
        m: OnlineLaplace(net, Categorical(), merge=m, prior_precision=0.0) for m in ("svd", "kl", "count")
    }
    total = torch.zeros(43, 43)
    for seed in range(4):
        total += linnet.curvature(net, small_task(seed), Categorical(), "kfac").dense()
        for method in (exact, *merged.values()):
            method.consolidate(small_task(seed))
    delta = moved_away(net)
    torch.testing.assert_close(gradient(net, exact.penalty()), total @ delta, rtol=1e-10, atol=1e-12)
    errors = {
        name: ((m.precision().dense() - total).norm() / total.norm()).item() for name, m in merged.items()
    }
    traces = {name: (m.precision().trace() / total.trace()).item() for name, m in merged.items()}
    assert all(0 < error < 0.5 for error in errors.values()), errors
    assert all(0.8 < ratio < 1.2 for ratio in traces.values()), traces
    assert errors["svd"] <= min(errors.values()) * 1.05  # merged one by one, it is near the best


def test_examples_without_a_label_weigh_nothing(float64: torch.dtype) -> None:
    net, found = small_network(), []
    (x, y), other = small_task(0), small_task(1)
    masked = y.clone()
    masked[len(y) // 2 :] = -100
    for task in ((x, masked), (x[: len(y) // 2], y[: len(y) // 2])):
        method = OnlineLaplace(net, Categorical(), merge="count", prior_precision=0.0)
        method.consolidate(task)
        method.consolidate(other)
        found.append(method.precision().dense())
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "full", "low-rank"])
@pytest.mark.thinned(2)
def test_memory_is_constant_in_the_number_of_tasks(structure: str) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), structure)
    online = EWC(net, Categorical(), structure, variant="online")
    sizes, online_sizes = [], []
    for seed in range(4):
        for one, found in ((method, sizes), (online, online_sizes)):
            one.consolidate(small_task(seed))
            found.append(one.nbytes())
    assert len(set(sizes)) == len(set(online_sizes)) == 1


def tensors(state: object) -> list[Tensor]:
    """All tensors of a state."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


@pytest.mark.parametrize("merge", ["svd", "kl", "count"])
def test_the_bytes_of_all_tensors_kept_are_constant(merge: str) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), merge=merge)
    found = []
    for seed in range(5):
        method.consolidate(small_task(seed))
        kept = tensors(method.state_dict())
        assert method.nbytes() == sum(t.numel() * t.element_size() for t in kept)
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kept)
        found.append(method.nbytes())
    # A and G of both layers, and μ
    assert set(found) == {4 * (5 * 5 + 5 * 5 + 6 * 6 + 3 * 3 + 43)}


def test_lists_grow_by_a_term_a_task() -> None:
    net = small_network()
    laplace = OnlineLaplace(net, Categorical(), merge="exact")
    offline = EWC(net, Categorical(), "kfac")
    sizes: list[tuple[int, int]] = []
    for seed in range(3):
        laplace.consolidate(small_task(seed))
        offline.consolidate(small_task(seed))
        sizes.append((laplace.nbytes(), offline.nbytes()))
    anchors = 4 * 43
    assert sizes[2][0] - sizes[1][0] == sizes[1][0] - sizes[0][0] == sizes[0][0] - anchors
    assert sizes[2][1] == 3 * sizes[0][1]


def positive(*shape: int, seed: int) -> Tensor:
    """Random positive definite matrices."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*shape, shape[-1] + 2, generator=generator, dtype=torch.float64)
    return root @ root.mT


@pytest.mark.parametrize("merge", ["svd", "kl", "count"])
def test_groups_merge_one_by_one(merge: str) -> None:
    first = Kronecker(positive(3, 2, seed=0), positive(3, 4, seed=1))
    second = Kronecker(positive(3, 2, seed=2), positive(3, 4, seed=3))
    one = summed(first, second, merge, (10, 30))
    assert isinstance(one, Kronecker)
    for r in range(3):
        pair = [Kronecker(m.left[r], m.right[r]) for m in (first, second)]
        alone = summed(pair[0], pair[1], merge, (10, 30))
        assert alone is not None
        got = torch.kron(one.left[r], one.right[r])
        torch.testing.assert_close(got, alone.dense(), rtol=1e-10, atol=1e-10)


def test_counts_average_the_input_factor_wherever_it_is() -> None:
    b, a = [positive(2, seed=s) for s in (0, 1)], [positive(3, seed=s) for s in (2, 3)]
    want_b, want_a = b[0] + b[1], (10 * a[0] + 30 * a[1]) / 40
    plain = summed(Kronecker(b[0], a[0]), Kronecker(b[1], a[1]), "count", (10, 30))
    turned = summed(Kronecker(a[0], b[0]), Kronecker(a[1], b[1]), "count", (10, 30), transposed=True)
    assert plain is not None
    assert turned is not None
    torch.testing.assert_close(plain.dense(), torch.kron(want_b, want_a))
    torch.testing.assert_close(turned.dense(), torch.kron(want_a, want_b))


def test_svd_is_the_nearest_product_and_kl_keeps_its_trace() -> None:
    terms = [Kronecker(positive(2, seed=s), positive(3, seed=s + 5)) for s in (0, 1)]
    total = terms[0].dense() + terms[1].dense()
    nearest, gaussian = (summed(terms[0], terms[1], m, (1, 1)) for m in ("svd", "kl"))
    assert isinstance(nearest, Kronecker)
    assert isinstance(gaussian, Kronecker)
    best = (nearest.dense() - total).norm()
    for seed in range(20):
        other = torch.kron(
            nearest.left + 0.01 * positive(2, seed=seed), nearest.right - 0.01 * positive(3, seed=seed)
        )
        assert (other - total).norm() > best
    # the stationary point of the KL divergence: tr(P⁻¹ S) = n m
    assert torch.linalg.solve(gaussian.dense(), total).trace().item() == pytest.approx(6.0, rel=1e-6)
    diverged = [divergence(m.dense(), total) for m in (gaussian, nearest)]
    assert diverged[0] < diverged[1]


def divergence(p: Tensor, s: Tensor) -> float:
    """KL(N(0, P⁻¹) ‖ N(0, S⁻¹)) of precisions."""
    ratio = torch.linalg.solve(p, s)
    return 0.5 * float(ratio.trace() - len(p) - ratio.logdet())


def test_corrected_products_merge_in_the_nearest_eigenvalues() -> None:
    terms = []
    for seed in (0, 1):
        base = KroneckerEigen.of(Kronecker(positive(2, seed=seed), positive(3, seed=seed + 5)))
        generator = torch.Generator().manual_seed(seed)
        terms.append(base.with_values(torch.rand(2, 3, generator=generator, dtype=torch.float64)))
    total = terms[0].dense() + terms[1].dense()
    one = summed(terms[0], terms[1], "svd", (1, 1))
    assert isinstance(one, KroneckerEigen)
    basis = torch.kron(one.left_vectors, one.right_vectors)
    torch.testing.assert_close(one.values.flatten(), (basis.T @ total @ basis).diagonal())
    grouped = [KroneckerEigen(m.left_vectors[None], m.right_vectors[None], m.values[None]) for m in terms]
    both = summed(grouped[0], grouped[1], "svd", (1, 1))
    assert both is not None
    torch.testing.assert_close(both.dense(), one.dense())


def test_a_task_without_curvature_in_a_layer_leaves_it_as_it_is() -> None:
    term = Kronecker(positive(2, seed=0), positive(3, seed=1))
    zero = Kronecker(torch.zeros(2, 2, dtype=torch.float64), positive(3, seed=2))
    for merge in ("svd", "kl", "count"):
        assert summed(term, zero, merge, (5, 5)) is term
        assert summed(zero, term, merge, (5, 5)) is term


def test_scaling_keeps_examples_in_the_factor_that_has_them() -> None:
    term = Kronecker(positive(2, seed=0), positive(3, seed=1))
    grouped = Kronecker(positive(3, 2, seed=0), positive(3, 4, seed=1))
    for operator in (term, grouped, Diagonal(torch.ones(2)), Dense(positive(2, seed=1))):
        torch.testing.assert_close(scaled(operator, 3.0).dense(), 3.0 * operator.dense())
        assert scaled(operator, 1.0) is operator
    assert torch.equal(scaled(term, 3.0).right, term.right)  # type: ignore[attr-defined]


def test_convolutions_groups_and_embeddings(float64: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(7, 4), nn.Conv1d(4, 4, 2, groups=2)
            self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            inner = torch.tanh(self.conv(self.table(ids).mT)).mean(2)
            found: Tensor = self.out(self.norm(inner))
            return found

    net = Mixed()
    ids = torch.randint(7, (20, 5), generator=torch.Generator().manual_seed(0))
    task = ids, ids.sum(1) % 3
    for merge in MERGES:
        method = OnlineLaplace(net, Categorical(), merge=merge, prior_precision=0.5)
        g = linnet.curvature(net, task, Categorical(), "kfac").dense()
        for _ in range(2):
            method.consolidate(task)
        before = flat(net)
        delta = moved_away(net)
        want = 2 * g @ delta + 0.5 * delta
        torch.testing.assert_close(gradient(net, method.penalty()), want, rtol=1e-8, atol=1e-9)
        torch.nn.utils.vector_to_parameters(before, net.parameters())


def test_mixed_structures_and_merged_non_online(float64: torch.dtype) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), {r"^0\.": "kfac", ".*": "block"}, prior_precision=0.0)
    method.consolidate(small_task(0))
    g = linnet.curvature(net, small_task(0), Categorical(), {r"^0\.": "kfac", ".*": "block"}).dense()
    torch.testing.assert_close(method.precision().dense(), g)
    listed = NonOnlineLaplace(net, Categorical(), prior_precision=0.0)
    merged = NonOnlineLaplace(net, Categorical(), prior_precision=0.0, merge="svd")
    for seed in range(2):
        listed.consolidate(small_task(seed))
        merged.consolidate(small_task(seed))
    moved_away(net)
    one, other = listed.penalty().item(), merged.penalty().item()
    assert one != other
    assert one == pytest.approx(other, rel=0.5)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "block", "full", "low-rank"])
@pytest.mark.parametrize("first", [False, True])
def test_a_bias_that_one_task_holds_still(structure: str, first: bool, float64: torch.dtype) -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), structure, prior_precision=0.5)
    bias = next(p for name, p in net.named_parameters() if name.endswith("bias"))
    for i in range(2):
        bias.requires_grad_((i == 0) != first)
        method.consolidate(small_task(i))
        bias.requires_grad_(True)
    precision = method.precision()
    delta = moved_away(net)
    want = gradient(net, method.penalty())
    torch.testing.assert_close(precision.mv(delta), want, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(precision.inverse().mv(want), delta, rtol=1e-6, atol=1e-8)
    columns = precision.dense()
    torch.testing.assert_close(precision.logdet(), torch.linalg.slogdet(columns)[1], rtol=1e-9, atol=1e-9)


def test_tasks_that_train_a_weight_and_then_its_bias_have_no_inverse() -> None:
    net = small_network()
    method = OnlineLaplace(net, Categorical(), "kfac")
    weight = next(p for name, p in net.named_parameters() if name.endswith("weight"))
    method.consolidate(small_task(0))
    weight.requires_grad_(False)
    method.consolidate(small_task(1))
    weight.requires_grad_(True)
    assert float(method.penalty().detach()) == 0.0
    with pytest.raises(ModelError, match="stands in blocks of two forms"):
        method.precision()


HEAD, WEIGHTS, BIASES = ["2.weight", "2.bias"], ["0.weight", "2.weight"], ["0.bias", "2.bias"]
EVERY = ["0.weight", "0.bias", *HEAD]


@pytest.mark.parametrize("structure", ["full", "low-rank", "diagonal", "block"])
@pytest.mark.parametrize("tasks", [[HEAD, EVERY], [EVERY, HEAD], [WEIGHTS, BIASES, EVERY], [BIASES, EVERY]])
def test_tasks_of_some_parameters_add_up(
    structure: str, tasks: list[list[str]], float64: torch.dtype
) -> None:
    net, data = small_network(), small_task(0)
    delta = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    precision = PenaltyPrecision()
    want = {name: torch.zeros_like(d) for name, d in delta.items()}
    for params in tasks:
        parts = linnet.curvature(net, data, Categorical(), structure, params=params).parts
        blocks = [PenaltyBlock.of(part, 1.0, 24.0, torch.float64) for part in parts]
        precision = precision.plus(blocks, "exact")
        for block in blocks:
            want = {name: t + block.product(delta).get(name, 0.0) for name, t in want.items()}
    torch.testing.assert_close(precision.product(delta), want, rtol=1e-8, atol=1e-10)
