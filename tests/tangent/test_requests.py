"""Inputs and vectors that a linearization cannot use are refused in words."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import ModelError
from tests.fitting.problems import network, real
from tests.hangs import HANGS
from tests.oracles.dense import jacobian_oracle, kernel_oracle
from tests.zoo import assert_near

X = real(4, 3)
LIN = linnet.linearize(network())


def test_training_does_not_look_at_the_numbers() -> None:
    """A step of training must not wait for the device; the loss shows what is not finite."""
    x = X.clone()
    x[2, 1] = torch.nan
    result = LIN(x)
    assert result.requires_grad
    assert bool(result[2].isnan().all())
    assert bool(result[[0, 1, 3]].isfinite().all())


def test_an_infinite_mask_that_gives_finite_outputs_is_an_input() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.softmax(self.layer(x) + mask, -1)

    torch.manual_seed(0)
    net, mask = Masked().double(), torch.zeros(4, 3).double()
    mask[:, 2] = -torch.inf
    lin = linnet.linearize(net)
    with torch.no_grad():
        assert_near(lin((X, mask)), net(X, mask))


# --- networks ----------------------------------------------------------------------------------------


def test_a_sum_over_the_batch_is_no_output() -> None:
    lin = linnet.linearize(network(), output=lambda r: r.sum())
    for call in (lin, lin.base, lin.kernel, lin.jacobian, lin.gap):
        with pytest.raises(ModelError, match="number"):
            call(X)


def test_embeddings_with_sparse_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double()
    dense = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    dense.load_state_dict(net.state_dict())
    x = torch.tensor([[0, 1], [2, 1], [6, 6], [3, 0]])
    j, lin = jacobian_oracle(dense, x), linnet.linearize(net)
    assert_near(lin.kernel(x), kernel_oracle(j))
    assert_near(lin.jvp(x, torch.ones(j.shape[2]).double()), j.sum(2))
    assert_near(lin.vjp(x, torch.ones(4, 2).double(), like="flat"), j.sum((0, 1)))
    assert net[0].sparse


@pytest.mark.long
def test_group_normalization_of_images_with_channels_last() -> None:
    """torch 2.13 reads outside such an input in the backward pass; a crash ends the process."""
    script = """
        import torch, linnet
        from torch import nn
        from tests.oracles.dense import jacobian_oracle, kernel_oracle
        torch.manual_seed(0)
        first = nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(32, 2)).double()
        after = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2)).double()
        after[0].requires_grad_(False)
        x = torch.randn(5, 2, 4, 4).double()
        last = x.contiguous(memory_format=torch.channels_last)
        for net in (first, after, after.to(memory_format=torch.channels_last)):
            names = [name for name, p in net.named_parameters() if p.requires_grad]
            plain = net if net is first else net.to(memory_format=torch.contiguous_format)
            expected = jacobian_oracle(plain, x, names)
            lin = linnet.linearize(net if net is first else net.to(memory_format=torch.channels_last))
            assert (lin.kernel(last) - kernel_oracle(expected)).abs().max() < 1e-9
            assert (lin.jacobian(last) - expected).abs().max() < 1e-10
            found = lin.vjp(last, torch.ones(5, 2).double(), like="flat")
            assert (found - expected.sum((0, 1))).abs().max() < 1e-9
            linnet.fit(lin, (last, torch.ones(5, 2).double()), ridge=1.0, solver="cg").predict(last)
        print("finished")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.stdout.strip() == "finished", (done.returncode, done.stderr[-2000:])
