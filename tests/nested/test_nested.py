"""``linnet.adapt`` against dense algebra in float64: the kernel from autograd, every answer from a refit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import InputError, NumericalError
from linnet.fitting import linear_fit
from linnet.integrations.pretrained import BUILDERS
from linnet.linear.features import Examples, Explicit, WeightedSum
from linnet.linear.targets import Targets, make_targets
from linnet.nested import nested_fit, search
from linnet.nested.adapt import HEADS
from linnet.nested.features import Prior, RandomHeads
from linnet.nested.nested_fit import NestedFit
from linnet.nested.search import BIAS, Candidate, Kernels, Shares, right_together


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4)]
    return nn.Sequential(*layers).double()


def samples(n: int, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) % classes


def dense(net: nn.Module, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels of the head and of the body over all x, by autograd alone."""
    body = copy.deepcopy(net[:-1])
    draws = torch.randn(HEADS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6**-0.5
    phi = body(x)
    rows = []
    for head in draws:
        each = [torch.autograd.grad(f @ head, list(body.parameters()), retain_graph=True) for f in phi]
        rows.append(torch.stack([torch.cat([g.flatten() for g in one]) for one in each]))
    features = phi.detach() - center
    return features @ features.T, sum((j @ j.T for j in rows), torch.zeros(())) / HEADS


def reference(net: nn.Module, x: Tensor, n: int, weight: float) -> Tensor:
    """K of the mixture over all x, scaled by the first n."""
    center = net[:-1](x[:n]).mean(0).detach()
    head, body = dense(net, x, center)
    scales = [float(k[:n, :n].diagonal().mean() - k[:n, :n].mean()) for k in (head, body)]
    return BIAS + (1 - weight) * head / scales[0] + weight * body / scales[1]


def solution(kernel: Tensor, targets: Tensor, ridge: float, at: Tensor) -> Tensor:
    """Outputs everywhere of the ridge regression on some of the samples."""
    square = kernel[at][:, at] + ridge * torch.eye(len(at), dtype=torch.float64)
    return kernel[:, at] @ torch.linalg.solve(square, targets[at])


N, T, WEIGHT, RIDGE = 12, 5, 0.4, 0.05
NET = network()
X, Y = samples(N + T)
KERNEL = reference(NET, X, N, WEIGHT)
GOAL = 15.0 * torch.nn.functional.one_hot(Y).double()


@pytest.fixture(scope="module")
def fit() -> linnet.NestedFit:
    return linnet.adapt(NET, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> bool:
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_predictions_are_those_of_the_dense_kernel(fit: linnet.NestedFit) -> None:
    assert near(fit.predict(X), solution(KERNEL, GOAL, RIDGE, torch.arange(N)))


@pytest.mark.parametrize("weight", [0.0, WEIGHT])
def test_predictions_in_weights_are_those_by_the_kernel(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = linnet.adapt(NET, (X[:N], Y[:N]), weight=weight, ridge=RIDGE)
    alike = linnet.adapt(NET, (X[:N], Y[:N]), weight=weight, ridge=RIDGE)
    expected = solution(reference(NET, X, N, weight), GOAL, RIDGE, torch.arange(N))
    # by weights no kernel between new and old samples is formed, and the kernel needs no directions
    monkeypatch.setattr(WeightedSum, "cross", lambda *_: pytest.fail("a kernel"))
    assert near(fit.predict(X), expected)
    monkeypatch.undo()
    monkeypatch.setattr(linear_fit, "SHARE", 0.0)
    monkeypatch.setattr(WeightedSum, "weights", lambda *_: pytest.fail("weights"))
    if weight:  # a probe's weights take no memory to speak of
        assert near(alike.predict(X), expected)


def test_changed_fits_predict_by_their_own_weights(fit: linnet.NestedFit) -> None:
    _ = fit.predict(X)
    less, again = fit.forget([3]), fit.update((X[N:], Y[N:]))
    for made in (less, again):
        by_weights = made.predict(X[:2])
        [cross] = made.system.kernel_to_train(X[:2])
        assert near(by_weights, made.system.mean(cross))
        assert not near(by_weights, fit.predict(X[:2]), 1e-6)


def test_variances(fit: linnet.NestedFit) -> None:
    own = KERNEL[:N, :N] + RIDGE * torch.eye(N, dtype=torch.float64)
    explained = (KERNEL[N:, :N] @ torch.linalg.solve(own, KERNEL[:N, N:])).diagonal()
    expected = fit.noise / RIDGE * (KERNEL.diagonal()[N:] - explained)
    found = fit.predictive(X[N:])
    assert near(found.variance, expected[:, None].expand(-1, 3), 1e-6)
    assert near(found.mean, fit.predict(X[N:]))
    assert torch.allclose(found.probs.sum(1), torch.ones(T, dtype=torch.float64))


@pytest.mark.parametrize("memory", [None, "60kB"])
def test_means_and_variances_share_a_pass(memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.tangent import gram

    counted: list[int] = []
    features = gram._features

    def counting(task: gram.GramTask, plan: gram.GramPlan, x: Tensor, wanted: tuple[int, int], *rest: object):  # type: ignore[no-untyped-def]
        counted.append(wanted[1] - wanted[0] if x is task.x1 else 0)
        return features(task, plan, x, wanted, *rest)  # type: ignore[arg-type]

    fit = linnet.adapt(NET, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE, memory=memory)
    basis, train = fit.prior.features, fit.system.problem.examples
    apart = basis.cross(X[N:], train, memory), basis.own(X[N:], memory)
    monkeypatch.setattr(gram, "_features", counting)
    together = basis.cross_and_own(X[N:], train, memory)
    assert sum(counted) == T  # every new sample is differentiated once
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(apart, together, strict=True))
    fresh = linnet.adapt(NET, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE, memory=memory)
    first = fresh.predictive(X[N:])
    fit.predict(X[N:])
    second = fit.predictive(X[N:])  # the kernel with the training samples is known here
    assert torch.allclose(first.covariance, second.covariance, rtol=1e-10)
    counted.clear()
    some = fit.influence(X[N + 1 : N + 3])  # of samples that were predicted: nothing is differentiated again
    assert not counted
    assert torch.allclose(some, fit.influence(X[N:])[:, 1:3], rtol=1e-12)


def test_leave_one_out_is_a_refit(fit: linnet.NestedFit) -> None:
    loo = fit.loo()
    for i in range(N):
        rest = torch.tensor([j for j in range(N) if j != i])
        assert near(loo[i], solution(KERNEL, GOAL, RIDGE, rest)[i], 1e-7)


def test_influence_is_the_difference_of_a_refit(fit: linnet.NestedFit) -> None:
    found = fit.influence(X[N:])
    for i in (0, 7):
        rest = torch.tensor([j for j in range(N) if j != i])
        without = solution(KERNEL, GOAL, RIDGE, rest)[N:]
        assert near(found[i], fit.predict(X[N:]) - without, 1e-6)


def test_informativeness(fit: linnet.NestedFit) -> None:
    changes = [(fit.predict(X[:N]) - fit.forget([i]).predict(X[:N])).square().sum(1).mean() for i in range(N)]
    assert near(fit.informativeness(), torch.stack(changes), 1e-6)
    assert near(fit.informativeness(X[:N]), torch.stack(changes), 1e-6)


@pytest.mark.parametrize("shares", [{"weight": 0.0}, {"weight": 0.4}, {"earlier": 0.5}])
def test_scales_taken_anew_know_nothing_of_what_was_forgotten(shares: dict[str, float]) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 2
    x[0] *= 30  # an outlier, which means and scales know
    less = linnet.adapt(net, (x, y), ridge=0.3, **shares).forget([0, 7])
    rest = [i for i in range(20) if i not in (0, 7)]
    anew = linnet.adapt(net, (x[rest], y[rest]), ridge=0.3, **shares)
    found, query = less.recomputed(scales=True), torch.randn(9, 3).double()
    assert near(found.predict(query), anew.predict(query), 1e-9)
    assert near(found.predictive(query).variance, anew.predictive(query).variance, 1e-9)
    assert near(found.loo(), anew.loo(), 1e-8)
    assert not near(less.predict(query), anew.predict(query), 1e-2)
    assert near(less.recomputed().predict(query), less.predict(query), 1e-7)


def test_the_noise_of_values_is_taken_anew_with_the_scales() -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(40, 3).double()
    y = x[:, :1].sin() + 0.3 * torch.randn(40, 1).double() + 5
    fit = linnet.adapt(net, (x, y))
    known = fit.module.function.known
    found = fit.forget(range(5)).recomputed(scales=True)
    assert fit.module.function.known is known  # of the fit before, which shares the network
    shares = {"weight": fit.body_weight} if fit.body_weight else {"earlier": fit.earlier}
    anew = linnet.adapt(net, (x[5:], y[5:]), ridge=fit.ridge, **shares)
    query = torch.randn(9, 3).double()
    assert near(found.predict(query), anew.predict(query), 1e-9)
    assert near(found.predictive(query).variance, anew.predictive(query).variance, 1e-9)


def test_scales_of_a_fit_with_equations_are_not_taken_anew(fit: linnet.NestedFit) -> None:
    with pytest.raises(linnet.errors.InputError, match="before constrain"):
        fit.constrain(X[:1], fit.predict(X[:1])).recomputed(scales=True)


def test_forgetting_and_adding(fit: linnet.NestedFit) -> None:
    rest = torch.tensor([j for j in range(N) if j not in (2, 5)])
    smaller = fit.forget([2, 5])
    assert near(smaller.predict(X), solution(KERNEL, GOAL, RIDGE, rest), 1e-7)
    assert near(smaller.recomputed().predict(X), smaller.predict(X), 1e-7)
    larger = fit.update((X[N:], Y[N:]))
    assert near(larger.predict(X), solution(KERNEL, GOAL, RIDGE, torch.arange(N + T)), 1e-7)
    assert near(larger.forget(list(range(N, N + T))).predict(X), fit.predict(X), 1e-7)
    assert larger.n == N + T
    assert larger.labels is not None


def test_updating_can_choose_anew(fit: linnet.NestedFit) -> None:
    anew = fit.update((X[N:], Y[N:]), ridge="loo")
    expected = linnet.adapt(NET, (X, Y))
    assert (anew.body_weight, anew.ridge) == (expected.body_weight, expected.ridge)
    assert near(anew.predict(X), expected.predict(X))


def test_path(fit: linnet.NestedFit) -> None:
    path = fit.path([RIDGE, 1.0])
    assert path.loo_error[0] == pytest.approx(float((fit.targets - fit.loo()).square().sum(1).mean()))
    assert path.evidence[0] == pytest.approx(fit.system.dual.log_evidence())
    shared = KERNEL[:N, :N]
    full = torch.kron(shared, torch.eye(3, dtype=torch.float64))
    values = torch.linalg.eigvalsh(full)
    assert path.degrees_of_freedom[1] == pytest.approx(float((values / (values + 1)).sum()))
    assert fit.ridge in fit.path().ridges


def test_the_spectrum_is_without_the_intercept(fit: linnet.NestedFit) -> None:
    pytest.importorskip("matplotlib")
    center = torch.eye(N, dtype=torch.float64) - 1 / N
    values = torch.linalg.eigvalsh(center @ (KERNEL[:N, :N] - BIAS) @ center)[1:]
    shown = torch.from_numpy(fit.plot.spectrum().eigenvalues)
    assert float(shown.max()) < 0.01 * BIAS
    assert near(shown, values)


def test_without_the_body_it_is_the_linear_probe() -> None:
    fit = linnet.adapt(NET, (X[:N], Y[:N]), weight=0.0, ridge=RIDGE)
    assert near(fit.predict(X), solution(reference(NET, X, N, 0.0), GOAL, RIDGE, torch.arange(N)))
    phi = NET[:-1](X[:N]).detach()
    scale = float((phi - phi.mean(0)).square().sum(1).mean())
    probe = linnet.with_head(NET, 3, linnet.Probe(ridge=RIDGE * scale), data=(X[:N], Y[:N]))
    assert near(fit.predict(X), probe(X).detach(), 1e-3)  # the intercept's prior is wide, not flat


def test_a_far_task_takes_the_lower_layers_and_pure_noise_tells_nothing() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 5))
    x = torch.randn(150, 8)
    far = linnet.adapt(net, (x, (x[:, 0] * x[:, 1] > 0).long()))
    assert not far.is_probe
    assert "the lower layers take part" in far.record.reasons["body"]
    assert far.verdict is not None
    assert far.verdict.startswith("The lower layers")
    assert repr(far).splitlines()[0] == far.verdict == far.record.reasons["verdict"]
    labels = torch.randint(2, (150,), generator=torch.Generator().manual_seed(0))
    noise = linnet.adapt(net, (x, labels))
    assert noise.body_weight == 0
    assert "these samples cannot tell" in noise.verdict
    assert "not tested" in linnet.adapt(net, (x, labels), weight=0.0).verdict


def test_a_network_made_for_a_table_has_hidden_units() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    fit = linnet.adapt(BUILDERS["random"]("features", False, {"inputs": 5}), (x, (x[:, 0] > 0).long()))
    assert "lower layers" not in repr(fit) + str(fit.record.reasons)
    assert "hidden units" in str(fit.record.reasons)


def test_points_leave_out_one_sample_of_every_class_together() -> None:
    labels = torch.tensor(
        [0, 1, 1, 0, 2, 1, 0, 2, 3, 1, 1, 0]
    )  # class 3 has one sample, which does not count
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kernel, targets = BIAS + rows @ rows.T, make_targets(labels, 4, dtype=torch.float64)
    wanted = torch.zeros(12, dtype=torch.bool)
    for group in ([0, 1, 4], [3, 2, 7], [6, 5], [11, 9], [10]):
        rest = torch.tensor([i for i in range(12) if i not in group])
        outputs = solution(kernel, targets.values, 0.3, rest)[group]
        wanted[group] = outputs.argmax(1) == labels[group]
    counting = labels != 3
    assert right_together(kernel, targets, 0.3).equal(wanted[counting])
    assert 0 < int(wanted.sum()) < 11


def test_one_sample_a_class_takes_the_probe_by_evidence() -> None:
    x, _ = samples(4)
    fit = linnet.adapt(NET, (x, torch.arange(4)))
    assert fit.body_weight == 0
    assert fit.record.reasons["ridge"] == "highest evidence"
    path = fit.path()
    assert fit.ridge == pytest.approx(path.best("evidence"), rel=1e-6)


def test_single_samples_do_not_count() -> None:
    x, y = samples(10, 2)
    y[0] = 2
    fit = linnet.adapt(NET, (x, y), weight=0.0)
    errors = [(fit.targets - fit.loo()).square().sum(1)[1:].mean()]
    for ridge in (fit.ridge * 10**0.25, fit.ridge / 10**0.25):
        other = linnet.adapt(NET, (x, y), weight=0.0, ridge=ridge)
        errors.append((other.targets - other.loo()).square().sum(1)[1:].mean())
    assert errors[0] == min(errors)
    assert any("single example" in line for line in fit.record.warnings)


@pytest.mark.parametrize(("weight", "ridge"), [(0.5, 1.0), (0.5, None), (None, 1.0), (0.0, None)])
def test_one_sample_of_each_class(weight: float | None, ridge: float | None) -> None:
    x, _ = samples(3, 2)
    fit = linnet.adapt(NET, (x, torch.arange(3)), weight=weight, ridge=ridge)
    assert fit.body_weight == (weight or 0.0)
    goal, kernel = 15.0 * torch.eye(3, dtype=torch.float64), reference(NET, x, 3, fit.body_weight)
    assert near(fit.predict(x), solution(kernel, goal, fit.ridge, torch.arange(3)))


def test_the_grid_of_ridges_grows() -> None:
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double()
    exact = linnet.adapt(net, (x, x @ torch.ones(8, 1, dtype=torch.float64)), weight=0.0)
    assert exact.ridge == pytest.approx(1e-6)
    assert any("no regularization" in line for line in exact.record.warnings)
    noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert linnet.adapt(net, (x, noise), weight=0.0).ridge > 1


@pytest.mark.filterwarnings("ignore:12 of 24 samples are copies")
def test_a_ridge_below_the_rounding_is_refused() -> None:
    data = X[:N].float(), Y[:N]
    net = network().float()
    with pytest.raises(NumericalError, match="rounding"):
        linnet.adapt(net, (torch.cat([data[0], data[0]]), torch.cat([data[1], data[1]])), ridge=1e-12)
    exact = linnet.adapt(network(), (data[0].double(), data[1]), ridge=0.01, weight=0.5).loo()
    assert near(linnet.adapt(net, data, ridge=0.01, weight=0.5).loo().double(), exact, 1e-3)


def test_regression_of_several_values() -> None:
    values = X[:N].flatten(1)[:, :2]
    fit = linnet.adapt(NET, (X[:N], values), weight=WEIGHT, ridge=RIDGE)
    padded = torch.cat([values, torch.zeros(T, 2, dtype=torch.float64)])
    kernel = KERNEL - BIAS + fit.prior.mixture.bias
    assert near(fit.predict(X), solution(kernel, padded, RIDGE, torch.arange(N)))
    assert fit.classes is None
    assert fit.temperature is None


def test_the_network_is_not_touched() -> None:
    net = network().train()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    linnet.adapt(net, (X[:N], Y[:N]))
    assert net.training
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_many_samples_choose_the_share_on_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(48)
    scored: list[tuple[int, tuple[float, float]]] = []
    best_ridge, ridges = search.best_ridge, dict[float, float]()

    def counting(
        kernel: Tensor, targets: Targets, shares: tuple[float, float], ridge: float | None = None
    ) -> Candidate:
        scored.append((len(kernel), shares))
        found = best_ridge(kernel, targets, shares, ridge)
        ridges[shares[1]] = found.ridge
        return found

    monkeypatch.setattr(search, "best_ridge", counting)
    monkeypatch.setattr(search, "PILOT", 24)
    fit = linnet.adapt(NET, (x, x.flatten(1)[:, :3] ** 2))
    taken = fit.body_weight, fit.earlier
    assert scored[:5] == [(24, (0.0, share)) for share in (0.0, *search.EARLIER)]
    assert scored[5:-1] == [(24, (weight, scored[5][1][1])) for weight in search.WEIGHTS]
    assert scored[-1] == (48, taken)
    scored.clear()
    fit = linnet.adapt(NET, (x, y))  # of classes, no derivatives beside earlier layers
    assert scored == [(24, (0.0, share)) for share in (0.0, *search.EARLIER)]
    assert ridges[fit.earlier] > search.FAR  # so that every decade is tried
    assert fit.ridge == best_ridge(fit.system.kernel, fit._targets, (0.0, fit.earlier)).ridge
    assert fit.record.reasons["shares"].endswith("on 24 samples")
    scored.clear()
    linnet.adapt(NET, (x, y), weight=0.3)
    assert scored == [(48, (0.0, 0.0)), (48, (0.3, 0.0))]


def test_derivatives_are_tried_on_some_of_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(48)
    formed: list[int] = []
    kernel = RandomHeads.kernel

    def counting(self: RandomHeads, x: Tensor, *rest: Any) -> Tensor:
        formed.append(len(x))
        return kernel(self, x, *rest)

    monkeypatch.setattr(RandomHeads, "kernel", counting)
    monkeypatch.setattr(nested_fit, "TRIAL", 24)
    assert linnet.adapt(NET, (x, y)).body_weight == 0
    assert not formed
    shallow = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for net, goal in ((NET, x.flatten(1)[:, :3] ** 2), (shallow, y)):
        fit = linnet.adapt(net, (x, goal))
        assert formed == ([24, 48] if fit.body_weight else [24])
        formed.clear()
    monkeypatch.setattr(nested_fit, "TRIED", shallow[1].weight.numel())  # without its bias
    assert linnet.adapt(shallow, (x, y)).body_weight == 0
    assert not formed
    assert linnet.adapt(NET, (x, y), weight=0.5).body_weight == 0.5


@pytest.mark.parametrize("weight", [0.03, 1.0])
def test_rounding_errors_are_foreseen(weight: float) -> None:
    """Samples that a pooled network hardly tells apart: kernels all but constant, in float32."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(24) % 3
    x = torch.rand(24, 1, 8, 8, generator=generator) * (0.9 + 0.05 * y[:, None, None, None])
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )
    fit = linnet.adapt(net, (x, y), weight=weight, ridge=1e-3)
    assert isinstance(fit, NestedFit)
    (told,) = [one for one in fit.record.warnings if one.startswith("rounding leaves errors")]
    foreseen = float(told.split("about ")[1].split(",")[0])
    found = fit.predict(x) - (fit.targets - fit.ridge * fit.system.beta)
    assert foreseen / 8 < float(found.square().mean().sqrt()) < 2 * foreseen
    fine = linnet.adapt(net.double(), (x.double(), y), weight=weight, ridge=1e-3)
    assert not [one for one in fine.record.warnings if one.startswith("rounding")]


def test_a_kernel_that_is_rounding_alone_is_no_kernel() -> None:
    targets, n = make_targets(torch.arange(12) % 3, 3), 12
    torch.manual_seed(0)
    features = torch.randn(n, 4, dtype=torch.float64)
    noise = torch.randn(n, n, dtype=torch.float64)
    noise = noise + noise.T  # of a size of 1 where the samples differ by 10⁻⁷
    noise += (1e-7 - noise.diagonal().mean() + noise.mean()) * n / (n - 1) * torch.eye(n)
    kernels = Kernels(features @ features.T, body=100 + noise)
    assert search.choose(kernels, targets).taken.weight == 0
    assert search.choose(kernels, targets, Shares(ridge=0.1)).taken.weight == 0  # which the others bear
    for parts, weight in ((kernels, 0.5), (Kernels(100 + noise, body=noise), None)):
        with pytest.raises(NumericalError, match="rounding"):
            search.choose(parts, targets, Shares(weight))


@pytest.mark.parametrize("finite", [True, False])
def test_a_summand_more_is_a_term_more(finite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gauss(Explicit):
        """A Gaussian kernel of features, which has no weights."""

        finite = False

        def kernel(self, of: Examples, memory: Any = None) -> Tensor:
            return self.cross(of.x, of)

        def cross(self, x: Any, train: Examples, memory: Any = None) -> Tensor:
            return (-torch.cdist(self.phi(x), self.phi(train.x)).square()).exp()

        def own(self, x: Any, memory: Any = None) -> Tensor:
            return torch.ones(len(x), dtype=torch.float64)

        def cross_and_own(self, x: Any, train: Examples, memory: Any = None) -> tuple[Tensor, Tensor]:
            return self.cross(x, train), self.own(x)

    plane = torch.randn(X[0].numel(), 9, generator=torch.Generator().manual_seed(3)).double()

    def random(x: Tensor) -> Tensor:
        return (x.double().flatten(1) @ plane).relu()

    made = Prior.features.fget
    assert made is not None
    more = (0.7, (Explicit if finite else Gauss)(random))
    monkeypatch.setattr(Prior, "features", property(lambda self: WeightedSum((*made(self).terms, more))))
    first = linnet.adapt(NET, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE)
    fit = first.recomputed().update((X[N:], Y[N:])).forget([*range(N, N + T)])
    rows = random(X)
    kernel = rows @ rows.T if finite else (-torch.cdist(rows, rows).square()).exp()
    assert near(fit.predict(X), solution(KERNEL + 0.7 * kernel, GOAL, RIDGE, torch.arange(N)))
    assert near(fit.forget([0]).predict(X[:1]), fit.loo()[:1].to(X))


def test_of_several_networks_the_one_of_least_left_out_error_is_taken() -> None:
    x, y = samples(24)
    torch.manual_seed(5)
    poor = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.ReLU(), nn.Linear(2, 3)).double()
    fits = [linnet.adapt(one, (x, y)) for one in (poor, NET)]
    errors = [(fit.loo() - fit.targets).square().sum(1).mean() for fit in fits]
    better = int(errors[1] < errors[0])
    for nets in ([poor, NET], [NET, poor]):
        fit = linnet.adapt(nets, (x, y))
        assert torch.equal(fit.predict(x), fits[better].predict(x))
        assert f"Network {nets.index((poor, NET)[better]) + 1} " in fit.verdict
    assert "Network" not in linnet.adapt([NET], (x, y)).verdict
    for wrong in ([], [NET, 3]):
        with pytest.raises(InputError, match="model"):
            linnet.adapt(wrong, (x, y))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="two samples"):
        linnet.adapt([NET, poor], (x[:3], y[:3]))


def test_layers_that_were_frozen_to_train_the_head_take_part(fit: linnet.NestedFit) -> None:
    net = network().requires_grad_(False)
    net[-1].requires_grad_(True)
    found = linnet.adapt(net, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE)
    assert near(found.predict(X[N:]), fit.predict(X[N:]))
    net[0].requires_grad_(True)  # here the user chose among the layers
    assert linnet.adapt(net, (X[:N], Y[:N]), weight=WEIGHT, ridge=RIDGE).module.function.names == [
        "0.weight",
        "0.bias",
    ]
    with pytest.raises(linnet.errors.ModelError, match="all chosen parameters are in the last layer"):
        linnet.adapt(net, (X[:N], Y[:N]), params="last-layer")


def test_a_new_label_may_be_a_class_that_the_fit_has_not_seen(fit: linnet.NestedFit) -> None:
    y = Y[:N].clone()
    y[[2, 5]] = 3
    found = fit.relabel([2, 5], torch.tensor([3, 3]))
    expected = linnet.adapt(NET, (X[:N], y), weight=WEIGHT, ridge=RIDGE)
    assert found.classes == 4
    assert near(found.predict(X[N:]), expected.predict(X[N:]))
    assert near(found.loo(), expected.loo())
    with pytest.raises(linnet.errors.DataError, match="numbered from 3 without gaps"):
        fit.relabel([2], torch.tensor([5]))


def test_what_holds_a_network_is_refused_by_the_name_of_the_network() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self._trainer, self.task, self.model = nn.Linear(1, 1), "rows", nn.Linear(2, 2)

    for call in (lambda held: linnet.adapt(held, torch.randn(4, 2), [0, 1, 0, 1]), linnet.linearize):
        with pytest.raises(linnet.errors.InputError, match=r"the network that it holds: model\.model\."):
            call(Pipeline())


class Mixed(nn.Module):
    """Outputs that depend on the batch, or come to more than the last layer gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0) if self.kind == "batch" else x
        h = self.body(x).tanh()
        h = nn.functional.dropout(h) if self.kind == "random" else h
        f = self.head(h)
        return f * torch.ones(3) if self.kind == "scaled" else f


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("batch", "gives an example other outputs when its batch changes"),
        ("random", "is random in evaluation mode"),
        ("scaled", r"cannot run with other outputs of its last layer \(head\)"),
    ],
)
def test_networks_that_adapt_cannot_read_are_refused(kind: str, says: str) -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(linnet.errors.ModelError, match=says):
        linnet.adapt(Mixed(kind), (x, torch.arange(20) % 2))


def test_variances_that_outputs_share_take_a_number_an_example() -> None:
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double(),
        torch.randn(30, 4).double(),
    )
    fit, new = linnet.adapt(net, (x, torch.arange(30) % 3)), torch.randn(5, 4).double()
    found = fit.predictive(new)
    whole = fit.predictive(new, joint=True).joint_covariance
    each = torch.stack([whole[i, :, i] for i in range(5)])
    assert torch.allclose(found.variance, each.diagonal(dim1=1, dim2=2), atol=1e-12)
    assert torch.allclose(found.covariance, each, atol=1e-12)
    fit.memory = 1000
    with pytest.raises(linnet.errors.MemoryBudgetError, match="influence on 5 examples"):
        fit.influence(new)


@pytest.mark.filterwarnings("ignore:.*have the inputs of others")
@pytest.mark.parametrize("shape", [(1, 3, 3), (9,)])
def test_labels_that_contradict_are_said_and_hide_no_copies(shape: tuple[int, ...]) -> None:
    x = torch.randn(40, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2
    x, y = torch.cat([x, x[:20], x[:2]]), torch.cat([y, y[:20], 1 - y[:2]])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="20 of 62 samples are copies of others"):
        fit = linnet.adapt(net, (x, y))
    assert any("have the inputs of others" in line for line in fit.record.warnings) == (len(shape) > 1)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("judges", [60, 2000])
def test_the_ridge_of_many_samples_is_found_from_that_of_some(
    judges: int, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(150, 6, generator=draw, dtype=torch.float64)
    y = (x[:, 0] + x[:, 1] + 0.3 * torch.randn(150, generator=draw) > 0).long()
    weights = torch.rand(150, generator=draw, dtype=torch.float64) + 0.5 if weighed else None
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    found = []
    near, whole = search.near_ridge, search.best_ridge

    def both(kernel: Tensor, targets: Targets, known: search.Candidate) -> search.Candidate:
        one, shares = near(kernel, targets, known), (known.weight, known.earlier)
        found.extend([one, whole(kernel, targets, shares), whole(kernel, targets, shares, one.ridge)])
        return one

    monkeypatch.setattr(search, "PILOT", 100)
    monkeypatch.setattr(search, "JUDGES", judges)
    monkeypatch.setattr(search, "near_ridge", both)
    fit = linnet.adapt(net, (x, y), sample_weight=weights)
    one, best, there = found
    assert fit.ridge == one.ridge
    assert judges < 150 or one.ridge == best.ridge
    order = search.sampled(150, 150)[-judges:]  # every class has several samples
    assert torch.allclose(one.errors, there.errors[order], rtol=1e-6)
    assert torch.equal(one.right, there.right[order])


def test_weights_far_from_one_are_refused() -> None:
    x, y = torch.randn(24, 6).double(), torch.arange(24) % 2
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for scale in (1e-8, 1e8):
        with pytest.raises(InputError, match=r"sample_weight / sample_weight.mean\(\)"):
            linnet.adapt(net, (x, y), sample_weight=torch.full((24,), scale))
    linnet.adapt(
        net, (x, y), weight=0.0, ridge=1e-5, sample_weight=torch.full((24,), 1e-5)
    )  # nothing is searched


def test_many_classes_of_one_sample_each_take_the_ridge_of_highest_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, _ = samples(48)
    whole = linnet.adapt(NET, (x, torch.arange(48)))
    monkeypatch.setattr(search, "PILOT", 24)
    monkeypatch.setattr(search, "near_ridge", lambda *_: pytest.fail("leave-one-out says nothing here"))
    assert linnet.adapt(NET, (x, torch.arange(48))).ridge == whole.ridge
