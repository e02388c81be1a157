"""The stream on a linearized network: the online posterior is exact, compression is the only loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from linnet.continual import ContinualMethod, NonOnlineLaplace, OnlineLaplace
from linnet.errors import DataError, InputError, ModelError
from linnet.likelihoods import Categorical, Gaussian
from linnet.tangent.linearized import Linearized, linearize
from tests.continual.continual_cases import moved_away, small_network
from tests.oracles.dense import ggn_oracle, jacobian_oracle, output_oracle, ridge_oracle

NOISE, PRIOR, TASKS = 0.5, 2.0, 4


def regression(seed: int, n: int = 6) -> tuple[Tensor, Tensor]:
    """A task of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 3, generator=generator, dtype=torch.float64)


def dense_jacobian(lin: Linearized, x: Tensor) -> Tensor:
    """J at θ₀ by plain autograd."""
    return jacobian_oracle(lin.model, x, lin.parameter_names)


def solve(lin: Linearized, method: ContinualMethod | None, x: Tensor, y: Tensor, ridge: float = 0.0) -> None:
    """The minimum of the summed loss and the penalty, by a quasi-Newton method."""
    optimizer = torch.optim.LBFGS(
        lin.parameters(),
        max_iter=2000,
        tolerance_grad=1e-12,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
        history_size=100,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = Gaussian(NOISE).nll(lin(x), y).sum()
        if method is not None:
            loss = loss + method.penalty()
        loss = loss + 0.5 * ridge * sum(p.square().sum() for p in lin.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def joint(lin: Linearized) -> tuple[Tensor, Tensor]:
    """δ of all tasks at once, and the precision of its posterior."""
    x = torch.cat([regression(s)[0] for s in range(TASKS)])
    y = torch.cat([regression(s)[1] for s in range(TASKS)])
    j, f0 = dense_jacobian(lin, x), output_oracle(lin.model, x)
    delta = ridge_oracle(j, y, f0, PRIOR * NOISE)
    output_hessian = torch.eye(3, dtype=torch.float64).expand(len(x), 3, 3) / NOISE
    return delta, ggn_oracle(j, output_hessian) + PRIOR * torch.eye(j.shape[2], dtype=torch.float64)


@pytest.mark.parametrize("non_online", [False, True])
def test_the_stream_of_squared_losses_equals_joint_training(non_online: bool, float64: torch.dtype) -> None:
    lin = linearize(small_network())
    method: ContinualMethod
    if non_online:
        method = NonOnlineLaplace(lin, Gaussian(NOISE), "full", prior_precision=PRIOR)
    else:
        method = OnlineLaplace(lin, Gaussian(NOISE), "full", prior_precision=PRIOR, prior_mean="initial")
    for seed in range(TASKS):
        x, y = regression(seed)
        first = non_online and seed == 0  # without a prior mean, the first task's weight decay is one's own
        solve(lin, method, x, y, PRIOR if first else 0.0)
        method.consolidate((x, y))
    want, precision = joint(lin)
    found = torch.cat([d.detach().flatten() for d in lin.delta.values()])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
    if isinstance(method, OnlineLaplace):
        torch.testing.assert_close(method.precision().dense(), precision, rtol=1e-10, atol=1e-10)


def test_the_uncertainty_along_the_stream_is_the_joint_one(float64: torch.dtype) -> None:
    lin = linearize(small_network())
    method = OnlineLaplace(lin, Gaussian(NOISE), "full", prior_precision=PRIOR, prior_mean="initial")
    probe = regression(0)[0]
    variances = []
    for seed in range(TASKS):
        method.consolidate(regression(seed))
        variances.append(method.precision().inverse().output_covariance(probe))
    j = dense_jacobian(lin, probe)
    want = torch.einsum("ncp,pq,ndq->ncd", j, torch.linalg.inv(joint(lin)[1]), j)
    torch.testing.assert_close(variances[-1], want, rtol=1e-8, atol=1e-10)
    traces = [v.diagonal(dim1=1, dim2=2).sum().item() for v in variances]
    assert traces == sorted(traces, reverse=True)


@pytest.mark.long
def test_kronecker_compression_is_the_only_loss(float64: torch.dtype) -> None:
    distances = {}
    for name, structure, merge in (
        ("full", "full", "svd"),
        ("list", "kfac", "exact"),
        ("svd", "kfac", "svd"),
        ("diagonal", "diagonal", "svd"),
    ):
        torch.manual_seed(0)
        lin = linearize(small_network())
        method = OnlineLaplace(lin, Gaussian(NOISE), structure, PRIOR, merge=merge, prior_mean="initial")
        total = PRIOR * torch.eye(43)
        anchor = torch.zeros(43)
        for seed in range(TASKS):
            x, y = regression(seed)
            solve(lin, method, x, y)
            j, f0 = dense_jacobian(lin, x).flatten(0, 1), output_oracle(lin.model, x).flatten()
            right = total @ anchor + j.T @ (y.flatten() - f0) / NOISE
            mode = torch.linalg.solve(total + j.T @ j / NOISE, right)
            found = torch.cat([d.detach().flatten() for d in lin.delta.values()])
            # each step is exact given what the structure kept of the past
            torch.testing.assert_close(found, mode, rtol=1e-5, atol=1e-6)
            method.consolidate((x, y))
            anchor = found
            if merge != "exact":
                total = method.precision().dense()
            else:
                unit = [column(method, lin, i) for i in range(43)]
                total = torch.stack(unit, 1)
        want = joint(lin)[0]
        distances[name] = ((anchor - want).norm() / want.norm()).item()
    assert distances["full"] < 1e-6
    assert distances["list"] > 1e-4
    assert distances["list"] < distances["diagonal"]
    assert distances["svd"] < distances["diagonal"]


def column(method: OnlineLaplace, lin: Linearized, i: int) -> Tensor:
    """A column of Λ, from the penalty's gradient."""
    before = [p.detach().clone() for p in lin.parameters()]
    at = nn.utils.parameters_to_vector(lin.parameters()).detach()
    at[i] += 1.0
    nn.utils.vector_to_parameters(at, lin.parameters())
    names = lin.parameter_names
    found = torch.autograd.grad(method.penalty(), [lin.delta[n] for n in names])
    with torch.no_grad():
        for p, b in zip(lin.parameters(), before, strict=True):
            p.copy_(b)
    return torch.cat([g.flatten() for g in found])


def test_classes_take_the_curvature_where_the_linear_model_is(float64: torch.dtype) -> None:
    lin = linearize(small_network())
    moved_away(lin)
    x = regression(0, 20)[0]
    y = lin(x).argmax(1)
    p = lin(x).detach().softmax(1)
    want = ggn_oracle(dense_jacobian(lin, x), torch.diag_embed(p) - p[:, :, None] * p[:, None])
    for data in ((x, y), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)):
        method = OnlineLaplace(lin, Categorical(), "full", prior_precision=0.0)
        method.consolidate(data)
        torch.testing.assert_close(method.precision().dense(), want, rtol=1e-10, atol=1e-12)
        assert method.penalty().item() == 0.0


def test_inputs_of_any_form(float64: torch.dtype) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            found: Tensor = self.out(torch.tanh(a + b))
            return found

    lin = linearize(Two())
    a, b = regression(0)[0], regression(1)[0]
    y = torch.tensor([0, 1] * 3)
    found = []
    for x in ((a, b), {"a": a, "b": b}):
        method = OnlineLaplace(lin, Categorical())
        method.consolidate((x, y))
        found.append(method.precision().dense())
    assert torch.equal(found[0], found[1])


def test_relinearizing_keeps_the_posterior(float64: torch.dtype) -> None:
    lin = linearize(small_network())
    method = OnlineLaplace(lin, Gaussian(NOISE), "full")
    method.consolidate(regression(0))
    moved_away(lin)
    before = method.penalty().item()
    lin.relinearize()
    assert method.penalty().item() == pytest.approx(before, rel=1e-12)


def test_a_linearization_has_its_own_output() -> None:
    lin = linearize(small_network())
    method = OnlineLaplace(lin, Categorical())
    data = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(InputError, match="output="):
        method.consolidate(data, output="logits")
    with pytest.raises(InputError, match="prepare="):
        method.consolidate(data, prepare=lambda net: net)


def test_evidence_along_the_stream_is_that_of_all_data(float64: torch.dtype) -> None:
    lin = linearize(small_network())
    method = OnlineLaplace(lin, Gaussian(NOISE), "full", prior_precision=PRIOR, prior_mean="initial")
    total = 0.0
    for seed in range(TASKS):
        x, y = regression(seed)
        solve(lin, method, x, y)
        total += method.log_evidence((x, y))
        method.consolidate((x, y))
    x = torch.cat([regression(s)[0] for s in range(TASKS)])
    y = torch.cat([regression(s)[1] for s in range(TASKS)])
    j, f0 = dense_jacobian(lin, x).flatten(0, 1), output_oracle(lin.model, x).flatten()
    covariance = j @ j.T / PRIOR + NOISE * torch.eye(len(j))
    want = torch.distributions.MultivariateNormal(f0, covariance).log_prob(y.flatten()).item()
    assert total == pytest.approx(want, rel=1e-8)


def test_evidence_prefers_the_prior_that_made_the_data(float64: torch.dtype) -> None:
    lin = linearize(small_network())
    x = regression(0, 40)[0]
    generator = torch.Generator().manual_seed(5)
    delta = torch.randn(43, generator=generator, dtype=torch.float64) / 3.0
    y = lin.base(x) + lin.jvp(x, delta) + 0.1 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
    found = {}
    for prior in (0.09, 9.0, 900.0):
        one = linearize(lin.model, params="all")
        method = OnlineLaplace(one, Gaussian(0.01), "full", prior_precision=prior, prior_mean="initial")
        solve(one, method, x, y)
        found[prior] = method.log_evidence((x, y))
    assert max(found, key=lambda prior: found[prior]) == 9.0


def test_evidence_needs_a_prior_and_targets() -> None:
    net = small_network()
    x = torch.randn(6, 4)
    with pytest.raises(ModelError, match="prior_precision"):
        OnlineLaplace(net, Categorical(), prior_precision=0.0).log_evidence((x, torch.zeros(6).long()))
    with pytest.raises(DataError, match="targets"):
        OnlineLaplace(net, Categorical()).log_evidence(x)
    method = OnlineLaplace(net, Categorical())
    value = method.log_evidence((x, torch.zeros(6).long()))
    assert value < -float(
        nn.functional.cross_entropy(net(x), torch.zeros(6).long(), reduction="sum").detach()
    )
