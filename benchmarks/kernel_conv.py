"""The full kernel of a deep convolution against torch.func. Claim: at least 15 times faster.

    python benchmarks/kernel_conv.py --json kernel_conv.json

Two 3x3 convolutions with 256 channels on 4x4 maps and a linear head, N = 8, C = 10: many weights on few
positions, where contracting positions beats forming gradients. The contestants are the two standard
torch.func computations (Jacobian contraction, NTK-vector products); the ratio is to the faster.
"""

from __future__ import annotations

import torch
from kernel_against_torch import compare
from measure import parser, setup
from networks import deep_convolution


def main() -> None:
    """Entry point."""
    options = parser(__doc__ or "").parse_args()
    setup(options.threads)
    model = deep_convolution(channels=256, size=4, classes=10)
    x = torch.randn(8, 256, 4, 4)
    compare(
        "Kernel of two 256-channel convolutions on 4x4 maps, N = 8, C = 10, full", model, x, 15.0, options
    )


if __name__ == "__main__":
    main()
