"""Changes to a pretrained network before it is linearized, as ``linnet.surgery``.

Activations: :func:`leaky_relu` makes every ReLU leak, :func:`report` says where, :func:`recover` trains
shortly afterwards. Pooling: :func:`with_bilinear_head` pools the square root of the features' covariance.
A new last layer alone is :func:`linnet.with_head`.

Source: Achille, Golatkar, Ravichandran, Polito, Soatto, CVPR 2021, sections 3.3 and 4.2.
"""

from __future__ import annotations

from linnet.finetuning.bilinear import Bilinear, SquareRootPooling, with_bilinear_head
from linnet.finetuning.recovery import recover
from linnet.tangent.surgery import CappedLeakyReLU, leaky_relu, report

__all__ = [
    "leaky_relu",
    "report",
    "recover",
    "CappedLeakyReLU",
    "with_bilinear_head",
    "Bilinear",
    "SquareRootPooling",
]
