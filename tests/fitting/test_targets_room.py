"""Class labels are planned before their one-hot targets are made."""

import pytest
import torch

import linnet
from linnet.errors import DataError, MemoryBudgetError
from linnet.linear.targets import make_targets


@pytest.mark.parametrize("label", [10**12, 2**63 - 1])
def test_adapt_refuses_labels_that_number_no_classes(label: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    y = torch.arange(6) % 2 * label
    with pytest.raises(DataError, match="return_inverse"):
        linnet.adapt(net, (torch.randn(6, 4), y))


def test_targets_of_too_many_outputs_are_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"one-hot targets of 1000000000000 classes for 3 examples"):
        make_targets(torch.tensor([0, 1, 2]), 10**12)
