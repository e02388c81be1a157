"""The feed-forward network of the theory, written out in float64, one example at a time.

    h_l = Ŵ_l â_{l−1},  â_l = [φ(h_l); 1],  â_0 = [x; 1],  f = h_L          Botev 2020, eq. 3.10

Layers are counted from zero here: ``inputs[i]`` is the â that layer i sees, ``h[i]`` what it gives.
Parameters are in the theory's order, w_l = vec(Ŵ_l) with columns stacked (eq. 3.11), so that a layer's
Jacobian is âᵀ ⊗ I; ``FeedForward.order`` says where they are among the flat parameters of the same network
as a torch module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import linnet

Function = Callable[[Tensor], Tensor]
LIKELIHOODS = linnet.likelihoods
EXACT = 1e-10  # relative


@dataclass(frozen=True)
class Activation:
    """φ, φ' and φ'' (where it exists), and the torch module that is φ."""

    module: Callable[[], nn.Module]
    value: Function
    first: Function
    second: Function
    corners: tuple[float, ...] = ()  # where φ' jumps


def _slope(below: float) -> Function:
    return lambda h: torch.where(h > 0, torch.ones_like(h), torch.full_like(h, below))


ACTIVATIONS = {
    "tanh": Activation(
        nn.Tanh, torch.tanh, lambda h: h.cosh() ** -2, lambda h: -2 * h.tanh() / h.cosh() ** 2
    ),
    "softplus": Activation(
        nn.Softplus, lambda h: h.exp().log1p(), torch.sigmoid, lambda h: h.sigmoid() * (1 - h.sigmoid())
    ),
    "relu": Activation(nn.ReLU, lambda h: h.clamp(min=0), _slope(0.0), torch.zeros_like, (0.0,)),
    "leaky-relu": Activation(
        lambda: nn.LeakyReLU(0.1), lambda h: h * _slope(0.1)(h), _slope(0.1), torch.zeros_like, (0.0,)
    ),
    "hardtanh": Activation(
        nn.Hardtanh, lambda h: h.clamp(-1, 1), lambda h: (h.abs() < 1).to(h), torch.zeros_like, (-1.0, 1.0)
    ),
    "identity": Activation(nn.Identity, lambda h: h, torch.ones_like, torch.zeros_like),
}
SMOOTH = ("tanh", "softplus")
PIECEWISE_LINEAR = ("relu", "leaky-relu", "hardtanh", "identity")


@dataclass(frozen=True)
class Loss:
    """−log p(y | f) of one example, and the labels of p(y | f) with weights.

    The weighted labels give expectations of polynomials of degree 5 in y exactly: all labels there are, or
    the nodes of Gauss-Hermite quadrature.
    """

    likelihood: linnet.likelihoods.Likelihood
    outputs: int
    nll: Callable[[Tensor, Tensor], Tensor]
    labels: Callable[[Tensor], list[tuple[Tensor, Tensor]]]

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """Λ, (C, C)."""
        return hessian(lambda at: self.nll(at, y), f)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """∂L/∂f, (C,)."""
        return jacobian(lambda at: self.nll(at, y), f)

    def draw(self, outputs: Tensor, seed: int = 0) -> Tensor:
        """Labels for outputs (N, C): weighted labels taken with their probabilities."""
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for f in outputs:
            weights, labels = zip(*self.labels(f), strict=True)
            pick = torch.multinomial(torch.stack(weights), 1, generator=generator)
            drawn.append(labels[int(pick)])
        return torch.stack(drawn)


VARIANCE = 0.5


def _gaussian_labels(f: Tensor, deviation: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Three nodes for each component."""
    nodes = torch.tensor([-1, 0, 1]).to(f) * 3**0.5
    weights = torch.tensor([1, 4, 1]).to(f) / 6
    grid = [torch.tensor(picked) for picked in itertools.product(range(3), repeat=f.numel())]
    return [(weights[picked].prod(), f + deviation * nodes[picked]) for picked in grid]


def _categorical_labels(f: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(p, torch.tensor(c)) for c, p in enumerate(f.softmax(0))]


def _bernoulli_labels(f: Tensor) -> list[tuple[Tensor, Tensor]]:
    grid = [torch.tensor(bits).to(f) for bits in itertools.product((0, 1), repeat=f.numel())]
    return [((y * f.sigmoid() + (1 - y) * (-f).sigmoid()).prod(), y) for y in grid]


def _poisson_labels(f: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Counts up to where the probability of more is below rounding, for rates below 2."""
    counts = torch.arange(24).to(f)
    return [
        (p, y[None])
        for p, y in zip((counts * f - f.exp() - (counts + 1).lgamma()).exp(), counts, strict=True)
    ]


def _mixture(f: Tensor) -> Tensor:
    """p(y = 1 | f), Botev 2020, eq. 4.28."""
    gate, first, second = f.sigmoid()
    return gate * first + (1 - gate) * second


def _mixture_nll(f: Tensor, y: Tensor) -> Tensor:
    return -(y * _mixture(f) + (1 - y) * (1 - _mixture(f))).log()


def _natural_nll(f: Tensor, y: Tensor) -> Tensor:
    """−log N(y | μ, σ²) from η₁ = μ/σ² and η₂ = −1/(2σ²)."""
    return -(f[0] * y[0] + f[1] * y[0] ** 2) - f[0] ** 2 / (4 * f[1]) - (-2 * f[1]).log() / 2


LOSSES = {
    "gaussian": Loss(
        LIKELIHOODS.Gaussian(variance=VARIANCE),
        2,
        lambda f, y: (f - y).square().sum() / (2 * VARIANCE),
        lambda f: _gaussian_labels(f, torch.tensor(VARIANCE).to(f).sqrt()),
    ),
    "categorical": Loss(
        LIKELIHOODS.Categorical(), 3, lambda f, y: f.logsumexp(0) - f[y], _categorical_labels
    ),
    "bernoulli": Loss(
        LIKELIHOODS.Bernoulli(), 2, lambda f, y: (f.exp().log1p() - y * f).sum(), _bernoulli_labels
    ),
    "poisson": Loss(LIKELIHOODS.Poisson(), 1, lambda f, y: (f.exp() - y * f).sum(), _poisson_labels),
}
CANONICAL = tuple(LOSSES)
# No exponential family in f, or not in its natural parameters: Λ depends on y.
MIXTURE = Loss(
    LIKELIHOODS.mixture_of_classifiers(),
    3,
    _mixture_nll,
    lambda f: [(1 - _mixture(f), torch.tensor(0)), (_mixture(f), torch.tensor(1))],
)
LOG_VARIANCE = Loss(
    LIKELIHOODS.HeteroscedasticGaussian("log-variance"),
    2,
    lambda f, y: ((y[0] - f[0]) ** 2 * (-f[1]).exp() + f[1]) / 2,
    lambda f: _gaussian_labels(f[:1], (f[1:] / 2).exp()),
)
NATURAL = Loss(
    LIKELIHOODS.HeteroscedasticGaussian("natural"),
    2,
    _natural_nll,
    lambda f: _gaussian_labels(-f[:1] / (2 * f[1:]), (-2 * f[1:]) ** -0.5),
)


@dataclass(frozen=True, eq=False)
class State:
    """One example's way through the network: â of every layer's input, h of every layer's output."""

    inputs: list[Tensor]
    h: list[Tensor]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The network, by its Ŵ_l = [W_l, b_l]."""

    weights: tuple[Tensor, ...]
    activation: Activation
    biased: bool = True

    @classmethod
    def random(
        cls, widths: Sequence[int], activation: str = "tanh", biased: bool = True, seed: int = 0
    ) -> FeedForward:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            tuple(
                torch.randn(c, d + biased, generator=generator, dtype=torch.float64) * (1.5 / d) ** 0.5
                for d, c in itertools.pairwise(widths)
            ),
            ACTIVATIONS[activation],
            biased,
        )

    @property
    def depth(self) -> int:
        return len(self.weights)

    def weight(self, i: int) -> Tensor:
        """W, without the bias."""
        return self.weights[i][:, :-1] if self.biased else self.weights[i]

    def module(self) -> nn.Sequential:
        """The same network in torch."""
        layers: list[nn.Module] = []
        for i in range(self.depth):
            c, d = self.weight(i).shape
            layer = nn.Linear(d, c, bias=self.biased, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(self.weight(i))
                if self.biased:
                    layer.bias.copy_(self.weights[i][:, -1])
            layers += [layer, self.activation.module()] if i < self.depth - 1 else [layer]
        return nn.Sequential(*layers)

    @property
    def slices(self) -> list[slice]:
        """Each layer among the parameters in the theory's order."""
        ends = [0, *itertools.accumulate(w.numel() for w in self.weights)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    @property
    def order(self) -> Tensor:
        """Which of the module's flat parameters each parameter in the theory's order is."""
        orders, start = [], 0
        for w, part in zip(self.weights, self.slices, strict=True):
            c, d = w.shape
            flat = torch.arange(start, part.stop)
            start = part.stop
            matrix = flat[: c * (d - self.biased)].view(c, d - self.biased)
            if self.biased:
                matrix = torch.cat([matrix, flat[-c:, None]], 1)
            orders.append(matrix.T.flatten())
        return torch.cat(orders)

    def theory(self, matrix: Tensor) -> Tensor:
        """A matrix or vector over the module's parameters, in the theory's order."""
        return matrix[self.order] if matrix.ndim == 1 else matrix[self.order][:, self.order]

    def run(self, x: Tensor, shifts: Sequence[Tensor] | None = None) -> State:
        """Forward, with shifts added to the pre-activations."""
        a, inputs, hs = x, [], []
        for i, w in enumerate(self.weights):
            inputs.append(torch.cat([a, a.new_ones(1)]) if self.biased else a)
            hs.append(w @ inputs[-1] + (0 if shifts is None else shifts[i]))
            a = self.activation.value(hs[-1])
        return State(inputs, hs)

    def outputs(self, xs: Tensor) -> Tensor:
        return torch.stack([self.run(x).h[-1] for x in xs])

    def away_from_corners(self, xs: Tensor, margin: float = 1e-3) -> bool:
        """Whether the network is differentiable around here, for every example."""
        hidden = torch.cat([torch.cat(self.run(x).h[:-1]) for x in xs])
        return all(bool(((hidden - corner).abs() > margin).all()) for corner in self.activation.corners)


SEED = 6  # every layer of the ReLU network lets something through


def inputs(n: int, d: int, seed: int = 1) -> Tensor:
    """Normal inputs."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    loss: Loss, n: int = 1, activation: str = "tanh", biased: bool = True
) -> tuple[FeedForward, Tensor, Tensor]:
    """A network of three layers, n inputs, and labels that leave residuals."""
    network = FeedForward.random((3, 4, 3, loss.outputs), activation, biased, seed=SEED)
    if loss is NATURAL:
        network.weights[-1][1, -1] = -3.0  # η₂ < 0
    xs = inputs(n, 3)
    elsewhere = torch.eye(loss.outputs, dtype=torch.float64)[0]
    return network, xs, loss.draw(network.outputs(xs) + elsewhere)


# Naive formulas of one example


def chain(network: FeedForward, state: State, k: int, i: int) -> Tensor:
    """∂h_k/∂h_i = W_k B_{k−1} W_{k−1} … W_{i+1} B_i, zero for k < i."""
    if k < i:
        return torch.zeros(len(state.h[k]), len(state.h[i]), dtype=torch.float64)
    product = torch.eye(len(state.h[i]), dtype=torch.float64)
    for j in range(i, k):
        product = network.weight(j + 1) @ torch.diag(network.activation.first(state.h[j])) @ product
    return product


def output_jacobian(network: FeedForward, state: State) -> Tensor:
    """∂f/∂θ in the theory's order, (C, P): blocks âᵀ ⊗ ∂f/∂h (eq. 3.12)."""
    last = network.depth - 1
    blocks = [torch.kron(state.inputs[i][None], chain(network, state, last, i)) for i in range(network.depth)]
    return torch.cat(blocks, 1)


def preactivation_gradients(network: FeedForward, state: State, gradient: Tensor) -> list[Tensor]:
    """∂L/∂h of every layer, from ∂L/∂f."""
    last = network.depth - 1
    return [chain(network, state, last, i).T @ gradient for i in range(network.depth)]


def hessian_recursion(
    network: FeedForward, state: State, gradient: Tensor, curvature: Tensor
) -> list[Tensor]:
    """H_l = B_l W_{l+1}ᵀ H_{l+1} W_{l+1} B_l + D_l (eq. 3.23), from ∂L/∂f and Λ."""
    found, backward = [curvature], preactivation_gradients(network, state, gradient)
    for i in range(network.depth - 2, -1, -1):
        w, h = network.weight(i + 1), state.h[i]
        b = torch.diag(network.activation.first(h))
        # D_l = diag(∂L/∂a_l ∘ φ''(h_l)), eq. 3.22
        d = torch.diag((w.T @ backward[i + 1]) * network.activation.second(h))
        found.insert(0, b @ w.T @ found[0] @ w @ b + d)
    return found


def gauss_newton_recursion(network: FeedForward, state: State, curvature: Tensor) -> list[Tensor]:
    """G_l = B_l W_{l+1}ᵀ G_{l+1} W_{l+1} B_l (eq. 3.30), from Λ."""
    found = [curvature]
    for i in range(network.depth - 2, -1, -1):
        w, b = network.weight(i + 1), torch.diag(network.activation.first(state.h[i]))
        found.insert(0, b @ w.T @ found[0] @ w @ b)
    return found


def preactivation_hessian(network: FeedForward, x: Tensor, loss: Function) -> list[list[Tensor]]:
    """∂²L/∂h_k∂h_l by automatic differentiation, in shifts of the pre-activations."""
    shifts = tuple(torch.zeros_like(h) for h in network.run(x).h)
    blocks = hessian(lambda *shift: loss(network.run(x, shift).h[-1]), shifts)
    return [list(row) for row in blocks]


def khatri_rao(left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> Tensor:
    """A * B: Kronecker products of corresponding blocks."""
    return torch.cat(
        [
            torch.cat([torch.kron(a, b) for a, b in zip(*rows, strict=True)], 1)
            for rows in zip(left, right, strict=True)
        ]
    )


def input_products(state: State) -> list[list[Tensor]]:
    """The blocks â_k â_lᵀ of ã ãᵀ."""
    return [[torch.outer(a, b) for b in state.inputs] for a in state.inputs]


def first_order_component(network: FeedForward, state: State, gradient: Tensor) -> Tensor:
    """Hᶠᴼ: block (k, l) is â_{l−1}ᵀ ⊗ ∂â_{k−1}/∂h_l ⊗ (∂L/∂h_k)ᵀ for k > l, its transpose for k < l."""
    backward = preactivation_gradients(network, state, gradient)
    size = network.slices[-1].stop
    lower = torch.zeros(size, size, dtype=torch.float64)
    for k in range(network.depth):
        for i in range(k):
            slopes = torch.diag(network.activation.first(state.h[k - 1]))
            moved = slopes @ chain(network, state, k - 1, i)
            if network.biased:  # the constant 1 does not move
                moved = torch.cat([moved, moved.new_zeros(1, moved.shape[1])])
            block = torch.kron(torch.kron(state.inputs[i][None], moved), backward[k][:, None])
            lower[network.slices[k], network.slices[i]] = block
    return lower + lower.T


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number expected, which must not be zero."""
    largest = float(expected.abs().max())
    assert largest > 0, "nothing to compare with"
    return float((found - expected).abs().max()) / largest
