"""The full kernel of a small fully connected network against torch.func. Claim: at least 100 times faster.

    python benchmarks/kernel_mlp.py --json kernel_mlp.json

MLP 784-512-512-10, N = 32, the kernel (32, 10, 32, 10) of all 670 k parameters. The contestants are the
two standard torch.func computations (Jacobian contraction, NTK-vector products); the ratio is to the
faster.
"""

from __future__ import annotations

import torch
from kernel_against_torch import compare
from measure import parser, setup
from networks import mlp


def main() -> None:
    """Entry point."""
    options = parser(__doc__ or "").parse_args()
    setup(options.threads)
    model = mlp(784, 512, 512, 10)
    x = torch.randn(32, 784)
    compare("Kernel of an MLP 784-512-512-10, N = 32, full", model, x, 100.0, options)


if __name__ == "__main__":
    main()
