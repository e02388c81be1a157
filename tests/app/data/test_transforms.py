"""Normalization, resizing and splits by seed."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from linnet.app.data import ImageTransform, Standardize, draw_shots, image_transform, split
from linnet.errors import DataError, InputError

Array = np.ndarray[Any, Any]


def images(count: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


class TestTransforms:
    def test_normalization_by_name_and_by_numbers(self) -> None:
        x = images(3, 4, 4, 3)
        for transform in (
            image_transform("imagenet"),
            image_transform("0.485,0.456,0.406", "0.229,0.224,0.225"),
        ):
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            expected = ((torch.from_numpy(x) / 255 - mean) / std).permute(0, 3, 1, 2)
            torch.testing.assert_close(transform(x), expected)
        assert image_transform("none")(x).max() <= 1
        assert image_transform("cifar").mean == (0.4914, 0.4822, 0.4465)
        assert image_transform("0.1,0.2,0.3", "0.5").std == (0.5, 0.5, 0.5)
        assert image_transform("0.5", "0.5") == image_transform("half")

    @pytest.mark.parametrize(
        ("mean", "std", "message"),
        [
            ("imagenette", None, "'imagenette'.*one of imagenet, cifar, half, none.*did you mean imagenet"),
            ("0.5", None, r"mean is '0\.5' without a std"),
            ("imagenet", "0.5", "mean is 'imagenet'"),
            ("a,b", "1", "mean is 'a,b'"),
            ("0.5", "0.0", "positive stds"),
            ("nan", "1.0", "finite means"),
            ("0.1,0.2", "1,1", "do not belong together"),
            ("0.1,0.2,0.3", "1,1", "do not belong together"),
        ],
    )
    def test_wrong_normalization(self, mean: str, std: str | None, message: str) -> None:
        with pytest.raises(InputError, match=message):
            image_transform(mean, std)

    def test_wrong_size_channels_or_images(self) -> None:
        with pytest.raises(InputError, match="size=0"):
            image_transform(size=0)
        with pytest.raises(InputError, match="channels=4"):
            image_transform(channels=4)
        with pytest.raises(InputError, match=r"three channels \(channels=3\)"):
            image_transform("imagenet")(images(2, 4, 4, 1))

    def test_resizing_as_pillow_does(self) -> None:
        from PIL import Image

        x = images(2, 20, 30, 3)
        assert torch.equal(ImageTransform(size=20)(x[:, :, 5:25]), ImageTransform()(x[:, :, 5:25]))
        result = ImageTransform(size=10)(x)
        for pixels, got in zip(x, result, strict=True):
            scaled = Image.fromarray(pixels).resize((15, 10), Image.Resampling.BILINEAR).crop((2, 0, 12, 10))
            expected = torch.from_numpy(np.array(scaled)).permute(2, 0, 1) / 255
            assert (got - expected).abs().max() < 1.5 / 255

    def test_channels(self) -> None:
        gray = images(2, 4, 4, 1)
        repeated = ImageTransform(channels=3)(gray)
        assert repeated.shape == (2, 3, 4, 4)
        assert torch.equal(repeated[:, 0], repeated[:, 2])
        white = ImageTransform(channels=1)(np.full((1, 4, 4, 3), 255, np.uint8))
        torch.testing.assert_close(white, torch.ones(1, 1, 4, 4))

    @pytest.mark.parametrize("transform", [image_transform("imagenet", size=8), Standardize((1.0,), (2.0,))])
    def test_survives_json(self, transform: ImageTransform | Standardize) -> None:
        assert type(transform)(**json.loads(json.dumps(dataclasses.asdict(transform)))) == transform


class TestSplits:
    def test_parts_are_disjoint_complete_and_by_seed(self) -> None:
        train, test = split(11, None, seed=5)
        assert len(test) == 2
        assert sorted([*train, *test]) == list(range(11))
        assert not np.array_equal(test, split(11, None, seed=6)[1])

    def test_rare_classes(self) -> None:
        labels = np.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
        train, test = split(10, labels, seed=0)
        assert np.bincount(labels[train], minlength=3).tolist() == [1, 1, 6]
        assert np.bincount(labels[test], minlength=3).tolist() == [0, 1, 1]

    def test_neither_part_is_ever_empty(self) -> None:
        assert len(split(2, None, seed=0)[1]) == 1
        with pytest.raises(DataError, match="1 sample cannot be split"):
            split(1, None, 0)
        with pytest.raises(DataError, match="no class has two samples"):
            split(4, np.arange(4), 0)

    def test_the_global_generator_is_not_touched(self) -> None:
        torch.manual_seed(0)
        expected = torch.rand(1)
        torch.manual_seed(0)
        split(10, None, seed=1)
        draw_shots(np.repeat([0, 1], 5), 2, 1, ["a", "b"])
        assert torch.equal(torch.rand(1), expected)
