"""Checks of the network and the data before fine-tuning starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.errors import DataError, InputError, WeightsError
from tests.finetuning.by_name import finetune
from tests.finetuning.test_finetune import SHORT, images, net
from tests.refusals import refused


class Scale(nn.BatchNorm2d):
    """A layer with the tensors of BatchNorm that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        """No normalization."""
        return x * self.weight[:, None, None]


def test_a_frozen_part_stays_frozen_in_every_recipe() -> None:
    model = net()
    model.conv1.requires_grad_(False)
    plain = finetune(model, images(), "nlft", **SHORT)
    assert torch.equal(plain.module.conv1.weight, net().conv1.weight)
    assert not torch.equal(plain.module.conv2.weight, net().conv2.weight)
    assert not any(name.startswith("conv1") for name in finetune(model, images(), **SHORT).module.delta)
    # a network that is frozen altogether is trained altogether, whatever head it gets
    whole = finetune(net().requires_grad_(False), images(), **SHORT)
    assert len(whole.module.delta) == len(list(net().parameters()))


@pytest.mark.parametrize("method", ["lqf", "gaf", "nlft", "fc", "b-lqf"])
@pytest.mark.thinned(2)
def test_weights_of_a_network_with_other_layers_are_refused(method: str, tmp_path: Path) -> None:
    tuned = finetune(net(), images(), method, **SHORT)
    tuned.save(tmp_path)
    torch.testing.assert_close(linnet.load(tmp_path, net()).predict(images()[0]), tuned.predict(images()[0]))
    other = net()
    other.norm = Scale(6)
    other.norm.load_state_dict(net().norm.state_dict())
    refused(WeightsError, lambda: linnet.load(tmp_path, other), "norm was BatchNorm2d and is Scale")


def test_values_that_a_recipe_does_not_use_are_refused() -> None:
    refused(InputError, lambda: finetune(net(), images(), "gaf", damping=0.1, **SHORT), "damping=0.1")
    unpaired = {**SHORT, "preconditioner": "none", "activation": "relu"}
    refused(InputError, lambda: finetune(net(), images(), damping=0.1, **unpaired), "damping=0.1")


def test_validation_data_are_of_the_kind_of_the_training_data() -> None:
    x, y = images()
    values = nn.functional.one_hot(y) - 0.5
    begun: list[int] = []
    options: dict[str, Any] = {**SHORT, "log": lambda values, step: begun.append(step)}
    refused(InputError, lambda: finetune(net(), (x, y), validation=(x, values), **options), "validation data")
    refused(
        InputError,
        lambda: finetune(net(), (x, values), validation=(x, y), **options),
        "float targets (N, 3)",
    )
    refused(DataError, lambda: finetune(net(), (x, y), validation=(x, y + 9), **options), "out of range")
    assert not begun


def test_labels_that_are_probably_no_classes_are_told_of_as_adapt_tells() -> None:
    x, y = images()
    for odd, word in ((5 * y, "without a sample"), ((y > 0).float(), "taken as values")):
        with pytest.warns(UserWarning, match=word):
            tuned = finetune(net(), (x, odd), "nlft" if odd.dtype == torch.int64 else "lqf", **SHORT)
        assert any(word in note for note in tuned.notes)
        with pytest.warns(UserWarning, match=word):
            linnet.adapt(net(), (x, odd), weight=0.0, ridge=1.0)
    refused(DataError, lambda: finetune(net(), (x, 1980 + y), **SHORT), "1982", "y.float()")
