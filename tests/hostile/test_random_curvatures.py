"""Random networks: curvatures of every structure, and Laplace posteriors, against dense float64 algebra."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.curvatures.curvature import Curvature
from linnet.curvatures.expectation import batch_generator
from linnet.errors import ModelError
from tests.curvatures.side_by_side import curvature_of
from tests.hostile.cases import (
    drawn,
    every_network,
    families,
    gauss_newton,
    labels,
    likelihood,
    near,
    nll,
    output_derivatives,
    untouched,
)
from tests.hostile.random_networks import Network, called, frozen_copy, hessian, tracked

# what is drawn may end in a sigmoid, or have a layer that nothing depends on
pytestmark = pytest.mark.filterwarnings(
    "ignore:the network's outputs are", "ignore:the outputs do not depend on"
)

DENSE = ("full", "block", "diagonal")
KRONECKER = ("kfac", "ekfac")
TAU = 0.3  # damping, as a share of the mean of the diagonal
ROUNDING = 1e-10  # share of the largest gradient below which a gradient may be rounding alone


def indices(net: Network) -> dict[str, Tensor]:
    """Where the entries of each tracked parameter are among all of them."""
    found, start = {}, 0
    for name, p in net.model.named_parameters():
        if p.requires_grad:
            found[name] = torch.arange(start, start + p.numel()).view(p.shape)
            start += p.numel()
    return found


def rows_of(net: Network, part: Any) -> Tensor:
    """The indices of a layer's parameters, one after the other."""
    places = indices(net)
    return torch.cat([places[name].flatten() for name in part.layer.names])


def block(total: Tensor, rows: Tensor) -> Tensor:
    """Some rows and columns of a matrix."""
    return total[rows[:, None], rows]


def of_structure(net: Network, full: Tensor, G: Curvature, structure: str) -> Tensor:
    """What a structure keeps of the whole matrix."""
    if structure == "full":
        return full
    if structure == "diagonal":
        return full.diagonal().diag()
    kept, seen = torch.zeros_like(full), []
    for part in G.parts:
        rows = rows_of(net, part)
        kept[rows[:, None], rows] = block(full, rows)
        seen += rows.tolist()
        owners = (name.partition(".parametrizations.")[0] for name in part.layer.names)
        modules = {
            owner if f"{owner}.parametrizations." in name else name.rpartition(".")[0]
            for owner, name in zip(owners, part.layer.names, strict=True)
        }  # a parametrized weight belongs to the layer whose weight it is
        assert len(modules) == 1, f"a block of several modules: {part.layer.names}"
    assert sorted(seen) == list(range(len(full)))
    return kept


def check_operator(net: Network, G: Any, wanted: Tensor) -> None:
    """Everything that a curvature answers in closed form."""
    size = float(wanted.abs().max())
    near(G.dense(), wanted, size)
    v = net.numbers((len(wanted), 2), 6)
    near(G @ v, wanted @ v, size)
    near(G @ v[:, 0], wanted @ v[:, 0], size)
    named = G.space.to_flat(G @ G.space.to_params(v[:, 0]))
    near(named, wanted @ v[:, 0], size)
    near(G.trace(), wanted.trace())
    near(G.diagonal(), wanted.diagonal())
    tau = TAU * float(wanted.diagonal().mean()) + 1e-12
    damped = wanted + tau * torch.eye(len(wanted), dtype=torch.float64)
    D, inverse = G.damped(tau), torch.linalg.inv(damped)
    near(D.solve(v), inverse @ v)
    near(D.inverse().dense(), inverse)
    near(D.logdet(), torch.logdet(damped), 1.0)
    near(D.quadratic(net.j_test), torch.einsum("ncp,pq,ndq->ncd", net.j_test, damped, net.j_test))
    spread = torch.einsum("ncp,pq,ndq->ncd", net.j_test, inverse, net.j_test)
    near(D.inverse().output_covariance(net.x_test), spread)


@every_network
@pytest.mark.thinned(2)
def test_exact_structures(seed: int) -> None:
    with untouched(drawn(seed)) as net:
        for family in families(net):
            y, given = labels(net, family), likelihood(net, family)
            _, hessians = output_derivatives(net, family, net.outputs(net.x), y)
            full = gauss_newton(net.j, hessians)
            found = linnet.curvature(net.model, (net.x, y), given, list(DENSE))
            for structure in DENSE:
                check_operator(net, found[structure], of_structure(net, full, found[structure], structure))
            products = linnet.curvature(net.model, (net.x, y), given, "matrix-free")
            v = net.numbers((len(full), 2), 6)
            near(products @ v, full @ v, float(full.abs().max()))
            last = curvature_of(net.model, (net.x, y), given, "full", params=net.names[-1:])
            near(last.dense(), block(full, indices(net)[net.names[-1]].flatten()), float(full.abs().max()))


@every_network
@pytest.mark.thinned(2)
def test_gradients_at_labels(seed: int) -> None:
    """Observed labels, labels drawn from the model, and random projections: sums of outer products."""
    with untouched(drawn(seed)) as net:
        for family in families(net):
            y, given = labels(net, family), likelihood(net, family)
            f = net.outputs(net.x)
            gradients, _ = output_derivatives(net, family, f, y)
            drawn_, projected = (
                draw(f, 2, batch_generator(7, 0, f.device))
                for draw in (given.sample_gradients, given.project)
            )
            _check_possible(net, family, f, drawn_ * 2**0.5)
            wanted = {"empirical": gradients[None], "mc": drawn_, "random-projection": projected}
            for expectation, columns in wanted.items():
                options = {"expectation": expectation, "samples": 2, "seed": 7}
                found = curvature_of(net.model, (net.x, y), given, list(DENSE), **options)
                g = torch.einsum("kncp->knp", columns.flatten(2)[..., None] * net.j).flatten(0, 1)
                for structure in DENSE:
                    near(found[structure].dense(), of_structure(net, g.T @ g, found[structure], structure))


def _check_possible(net: Network, family: str, f: Tensor, gradients: Tensor) -> None:
    """Every gradient is that of −log p at a label that there is."""
    if family == "gaussian":
        return
    classes = f.shape[net.axis]
    every = []
    for label in range(max(classes, 2)):
        shape = [size for axis, size in enumerate(f.shape) if axis != net.axis]
        y = torch.full(shape, label)
        y = y if family == "categorical" else y.unsqueeze(net.axis)
        every.append(output_derivatives(net, family, f, y)[0].view(f.shape))
    for one in gradients:
        off = torch.stack([(one - wanted).abs().amax(net.axis) for wanted in every])
        assert float(off.amin(0).max()) < 1e-12


@every_network
def test_hessian(seed: int) -> None:
    with untouched(drawn(seed)) as net:
        family = families(net)[-1]
        y, given = labels(net, family), likelihood(net, family)
        wanted = hessian(net.model, net.x, lambda f: nll(net, family, f, y))
        if float((wanted - wanted.T).abs().max()) > 1e-8 * float(wanted.abs().max()):
            with pytest.raises(ModelError, match="not symmetric"):  # torch's own derivative is wrong
                linnet.curvature(net.model, (net.x, y), given, "full", matrix="hessian")
            return
        H = linnet.curvature(net.model, (net.x, y), given, "full", matrix="hessian")
        near(H.dense(), wanted)
        products = linnet.curvature(net.model, (net.x, y), given, "matrix-free", matrix="hessian")
        v = net.numbers((len(wanted), 2), 6)
        near(products @ v, wanted @ v, float(wanted.abs().max()))


# --- Kronecker factors ----------------------------------------------------------------------------


def linear_layers(net: Network) -> dict[str, nn.Linear]:
    """Plain linear layers whose own weight is tracked, and whose tensors no other module has."""
    holders: dict[int, int] = {}
    for m in net.model.modules():
        for p in m._parameters.values():
            holders[id(p)] = holders.get(id(p), 0) + 1
    return {
        name: m
        for name, m in net.model.named_modules()
        if type(m) is nn.Linear
        and m.weight.requires_grad
        and "weight" in m._parameters
        and all(holders[id(p)] == 1 for p in m._parameters.values() if p is not None)
    }


def by_hand(net: Network, name: str, columns: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """A, B and the number of positions of a linear layer, from its inputs and output gradients.

    None for a layer that is used twice, whose weight goes another way, or whose bias is not tracked.
    """
    model = frozen_copy(net.model)
    layer = model.get_submodule(name)
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(_: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
        seen.append((args[0].clone(), result))
        return result.clone()  # which the network may then write to

    handle = layer.register_forward_hook(watch)
    f = called(model, net.x).flatten(1)
    handle.remove()
    if len(seen) != 1 or (layer.bias is not None and not layer.bias.requires_grad):
        return None
    a, z = seen[0][0].detach().flatten(0, -2), seen[0][1]
    whole, own = torch.autograd.grad((f * columns.sum(1)).sum(), (layer.weight, z), retain_graph=True)
    if not torch.allclose(whole, own.flatten(0, -2).T @ a, rtol=1e-9, atol=1e-9):
        return None  # the weight is read elsewhere too
    if layer.bias is not None:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
    total = torch.zeros(z.shape[-1], z.shape[-1], dtype=torch.float64)
    for u in columns.unbind(1):
        g = torch.autograd.grad((f * u).sum(), z, retain_graph=True)[0].flatten(0, -2)
        total += g.T @ g
    return a.T @ a / len(a), total, len(a) // net.n


@every_network
def test_kronecker_structures(seed: int) -> None:
    with untouched(drawn(seed)) as net:
        family = families(net)[-1]
        y, given = labels(net, family), likelihood(net, family)
        _, hessians = output_derivatives(net, family, net.outputs(net.x), y)
        values, vectors = torch.linalg.eigh(hessians)
        columns = (vectors * values.clamp(min=0).sqrt()[:, None]).mT  # (N, K, C)
        full = gauss_newton(net.j, hessians)
        size = float(full.abs().max())
        found = linnet.curvature(net.model, (net.x, y), given, list(KRONECKER))
        by_name = {part.layer.names[0]: part for part in found["kfac"].parts}
        for name in linear_layers(net):
            part, factors = by_name[f"{name}.weight"], by_hand(net, name, columns)
            if factors is None:
                continue
            a, b, positions = factors
            weight = indices(net)[f"{name}.weight"].flatten()
            if float(net.j[..., weight].abs().max()) <= ROUNDING * float(net.j.abs().max()):
                # every unit is off at every example, or a norm of one number follows: what is left of the
                # gradients, zeros or rounding, cannot show how the weight is used
                assert float(block(found["kfac"].dense(), weight).abs().max()) <= ROUNDING**2 * size
                continue
            assert part.structure == "kfac"
            near(joined_block(net, part, found["kfac"].dense()), torch.kron(b, a), size)
            if net.n == 1 and positions == 1:
                near(torch.kron(b, a), joined_block(net, part, full), size)
        near(found["ekfac"].trace(), full.trace())
        for part in found["kfac"].parts:
            if part.structure == "block":
                rows = rows_of(net, part)
                near(block(found["kfac"].dense(), rows), block(full, rows), size)
        for structure in KRONECKER:
            check_operator(net, found[structure], found[structure].dense())


def joined_block(net: Network, part: Any, total: Tensor) -> Tensor:
    """The block of a linear layer, in the order of the matrix [W b]."""
    places = indices(net)
    own = [places[name] for name in part.layer.names]
    order = torch.cat([own[0], own[1][:, None]], 1) if len(own) == 2 else own[0]
    return block(total, order.flatten())


# --- Laplace --------------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
@pytest.mark.thinned(2)
def test_laplace(seed: int, structure: str) -> None:
    with untouched(drawn(seed)) as net:
        family = families(net)[seed % 2]
        y, given = labels(net, family), likelihood(net, family)
        f = net.outputs(net.x)
        full = gauss_newton(net.j, output_derivatives(net, family, f, y)[1])
        prior, scale = TAU * net.scale, (1.0, 2.5)[seed % 2]
        la = linnet.Laplace(net.model, given, structure, prior, data_scale=scale).fit((net.x, y))
        G = la.curvature.dense()
        if structure != "kfac":
            near(G, of_structure(net, full, la.curvature, structure))
        precision = scale * G + prior * torch.eye(len(G), dtype=torch.float64)
        spread = torch.linalg.inv(precision)
        near(la.covariance.dense(), spread)
        near(la.precision.dense(), precision)
        wanted = torch.einsum("ncp,pq,mdq->ncmd", net.j_test, spread, net.j_test)
        found = la.predictive(net.x_test, joint=True)
        near(found.mean.flatten(1), net.f_test)
        near(found.joint_covariance.reshape(wanted.shape), wanted)
        apart = torch.einsum("ncnd->ncd", wanted)
        alone = la.predictive(net.x_test)
        near(alone.covariance, apart)
        near(alone.variance.flatten(1), apart.diagonal(dim1=1, dim2=2))
        near(la.log_evidence(), _evidence(net, -scale * nll(net, family, f, y), precision, prior), 1.0)
        other = 3 * prior
        moved = scale * G + other * torch.eye(len(G), dtype=torch.float64)
        at_other = _evidence(net, -scale * nll(net, family, f, y), moved, other)
        near(la.log_evidence(prior_precision=other), at_other, 1.0)


def _evidence(net: Network, likelihood_: Tensor, precision: Tensor, prior: float) -> Tensor:
    """log p(D | θ*) + log N(θ*; 0, I/λ) + P/2 log 2π − ½ log det H."""
    theta = torch.cat([p.detach().flatten() for p in tracked(net.model)])
    spread = torch.tensor(prior, dtype=torch.float64).rsqrt()
    of_prior = torch.distributions.Normal(torch.zeros_like(theta), spread).log_prob(theta).sum()
    return likelihood_ + of_prior + 0.5 * len(theta) * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)
