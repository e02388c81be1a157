"""Fused attention where derivatives are taken backward only, beside the plain kernels. Claim: not slower.

    python benchmarks/attention.py --json attention.json

A transformer encoder of four layers of width 256 (8 heads), 8 sequences, ten classes: the tangent kernel,
K-FAC from sampled labels, and Jᵀu. The plain contestant is the same call inside torch's own
``sdpa_kernel(MATH)``. Seconds are of the processor, so that other work on the machine disturbs them less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from measure import Row, parser, publish, setup, time_in_turns
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import linnet
from linnet.likelihoods import Categorical

SEQUENCES, WIDTH, CLASSES = 8, 256, 10


class Encoder(nn.Module):
    """Sequences of vectors to classes, by the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to (N, classes)."""
        return self.head(self.layers(x).mean(1))


def by_plain_kernels(call: Callable[[], object]) -> None:
    """The same with attention as products and a softmax."""
    with sdpa_kernel(SDPBackend.MATH):
        call()


def main() -> None:
    """Time every call both ways."""
    arguments = parser(__doc__ or "", threads=1, repeats=3)
    arguments.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    options = arguments.parse_args()
    setup(options.threads)
    net, rows = Encoder().eval(), []
    for tokens in options.tokens:
        x, y = torch.randn(SEQUENCES, tokens, WIDTH), torch.randint(CLASSES, (SEQUENCES,))
        u, lin = torch.randn(SEQUENCES, CLASSES), linnet.linearize(net)
        calls = {
            "kernel": lambda x=x, lin=lin: lin.kernel(x),
            "K-FAC, sampled labels": lambda x=x, y=y: linnet.curvature(
                net, (x, y), Categorical(), "kfac", expectation="mc"
            ),
            "Jᵀu": lambda x=x, u=u, lin=lin: lin.vjp(x, u),
        }
        for name, call in calls.items():
            contestants = {"fused": call, "plain": lambda call=call: by_plain_kernels(call)}
            found = time_in_turns(contestants, options.repeats, clock=time.process_time)
            fused, plain = found["fused"].median, found["plain"].median
            note = f"plain kernels {plain:.3g} s"
            rows.append(Row(f"{name}, {tokens} positions", fused, plain / fused, ">=", 1.0, note))
    publish("Attention", rows, options.json)


if __name__ == "__main__":
    main()
