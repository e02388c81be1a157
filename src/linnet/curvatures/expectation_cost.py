"""Cost of exact columns of the outputs' curvature, and the choice of sampled ones beyond a limit.

An example with K columns takes K backward passes, and K terms g gᵀ at every layer. With S positions, d inputs
and c outputs of a layer, in multiplications,

    exact       Σ S d c + K Σ S (d c + c²)
    training    3 Σ S d c: forward, backward, gradients of the weights

where K is about the number of outputs C: the cost grows as C², and as C³ once the last layer's c² = C² leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from linnet.curvatures.expectation import Expectation
from linnet.curvatures.layers import Layer

# Passes of training that exact columns may take. Few networks are trained for more, and the curvature of a
# trained network is not worth more than the network. Some hundred outputs are within it.
LIMIT = 128
# Labels drawn for each example beyond it: with the forward pass they take about as long as 3 passes of
# training, and their error is that of one label for each of 8 times as many examples.
SAMPLES = 8


def exact_passes(layers: Sequence[Layer], columns: int) -> float:
    """The cost of exact columns in passes of training over the same data."""
    forward = moments = 0.0
    for layer in layers:
        if not layer.factored:
            forward += layer.size
            continue
        c, d = _sizes(layer)
        forward += layer.form.positions * layer.groups * c * d
        moments += layer.form.positions * layer.groups * c * c
    if not forward:
        return 0.0
    return (forward + columns * (forward + moments)) / (3 * forward)


def _sizes(layer: Layer) -> tuple[int, int]:
    """Outputs and inputs of one group of a layer with factors."""
    rows, columns = layer.matrix
    c, d = (columns, rows) if layer.transposed else (rows, columns)
    return c, d - layer.biased


def by_cost(exact: Expectation, passes: float) -> tuple[Expectation, str]:
    """Exact columns, or samples where they would take too long."""
    if passes <= LIMIT:
        return exact, ""
    # labels drawn from the model give the Fisher matrix, which is Λ's own for canonical likelihoods alone
    labels = exact.likelihood.canonical or exact.matrix == "fisher"
    chosen = replace(exact, kind="mc" if labels else "random-projection", samples=SAMPLES)
    return chosen, f"exact columns would take as long as {passes:,.0f} passes of training, more than {LIMIT}"
