"""K(x_i, x_i) alone equals the diagonal blocks of the whole kernel."""

from __future__ import annotations

import pytest

from linnet.tangent.gram import own_kernels
from tests.zoo import assert_near, case, linearized


@pytest.mark.parametrize(
    "name",
    [
        "mlp-tanh",
        "lenet",
        "resnet-batchnorm",
        "vit-mha",
        "tied-embedding",
        "lstm",
        "shared-module",
        "decoder",
    ],
)
def test_own_kernels_are_the_diagonal_blocks(name: str) -> None:

    lin, x = linearized(name), case(name).animal.feed(5)
    wanted = lin.kernel(x).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert_near(own_kernels(lin.function, x), wanted)
