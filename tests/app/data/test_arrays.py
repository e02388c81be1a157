"""Archives and the tasks they make: lazy reading, shots, subsets, and every archive that is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.app.data import (
    ImageTransform,
    TaskData,
    draw_shots,
    image_transform,
    load_data,
)
from linnet.app.data import arrays as arrays_module
from linnet.errors import DataError, FileFormatError, InputError
from linnet.npz import read_npz

Array = np.ndarray[Any, Any]
NUMBERS = np.random.default_rng(0).normal(size=(12, 2))


def images(count: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def archive(path: Path, **changes: object) -> Path:
    """A good archive of gray images with some arrays replaced, or left out where None."""
    content: dict[str, object] = {
        "x_train": images(12, 5, 6),
        "y_train": np.arange(12) % 3,
        "x_test": images(6, 5, 6, seed=1),
        "y_test": np.arange(6) % 3,
    }
    content |= changes
    np.savez_compressed(path, **{name: value for name, value in content.items() if value is not None})  # type: ignore[arg-type]
    return path


class TestArrays:
    def test_labels_images_and_ids(self, tmp_path: Path) -> None:
        task = load_data(archive(tmp_path / "d.npz", class_names=np.array(["a", "b", "c"])))
        assert task.classes == ("a", "b", "c")
        assert task.train.ids == tuple(f"train/{row}" for row in range(12))
        assert task.test.ids[5] == "test/5"
        assert task.image_mode == "L"
        assert np.array_equal(task.train.x[..., 0], images(12, 5, 6))
        assert task.train.y.dtype == np.int64
        assert load_data(archive(tmp_path / "d.npz")).classes == ("0", "1", "2")

    def test_members_are_unpacked_when_they_are_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        read = arrays_module.read_npz
        monkeypatch.setattr(
            arrays_module, "read_npz", lambda p, names: (asked.extend(names), read(p, names))[1]
        )
        task = load_data(archive(tmp_path / "d.npz", coarse=np.arange(3)))
        assert asked == ["y_train", "y_test"]
        task.tensors("test")
        task.tensors("test")
        assert asked == ["y_train", "y_test", "x_test"]

    def test_without_a_test_part_one_is_held_out(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "d.npz", x_test=None, y_test=None)
        task = load_data(path)
        assert np.bincount(task.test.y).tolist() == [1, 1, 1]
        rows = [int(name.removeprefix("train/")) for name in task.test.ids]
        assert np.array_equal(task.test.x[..., 0], images(12, 5, 6)[rows])
        assert load_data(path, seed=3).test.ids != task.test.ids

    def test_real_targets_make_a_regression(self, tmp_path: Path) -> None:
        y = np.linspace(0, 1, 12)
        task = load_data(archive(tmp_path / "d.npz", y_train=y, y_test=y[:6]))
        assert task.classes is None
        _, targets = task.tensors("train")
        assert torch.equal(targets, torch.from_numpy(y).float()[:, None])
        assert task.findings == ()
        whole = load_data(archive(tmp_path / "d.npz", y_train=np.arange(12.0), y_test=np.arange(6.0)))
        assert "whole numbers of a real type" in whole.findings[0]
        split = load_data(archive(tmp_path / "d.npz", y_train=y, x_test=None, y_test=None))
        assert (len(split.train), len(split.test)) == (10, 2)

    def test_features_are_taken_as_they_are(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).normal(size=(12, 4))
        ids = np.arange(48).reshape(12, 4)
        for train, dtype in ((x, torch.float32), (x.astype(">f4"), torch.float32), (ids, torch.int64)):
            task = load_data(archive(tmp_path / "d.npz", x_train=train, x_test=train[:6]))
            tensors = task.tensors("train")[0]
            assert tensors.dtype == dtype
            assert torch.equal(tensors, torch.from_numpy(train.astype(np.float64)).to(dtype))
            assert task.image_mode is None
        assert task.transform is None
        flat = load_data(archive(tmp_path / "d.npz", x_train=images(12, 4), x_test=images(6, 4)))
        assert flat.tensors("test")[0].dtype == torch.float32

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x_train": images(0, 5, 6), "y_train": np.arange(0)}, "x_train is empty"),
            ({"x_test": images(0, 5, 6), "y_test": np.arange(0)}, "x_test is empty"),
            ({"y_train": np.zeros(12, int)}, "one class only, '0'"),
            ({"y_train": np.arange(11) % 3}, "x_train has 12 samples but y_train has 11"),
            ({"y_test": np.arange(7) % 3}, "x_test has 6 samples but y_test has 7"),
            ({"y_train": np.arange(12) % 3 - 1}, r"y_train holds -1 for sample train/0 \(4 such"),
            ({"y_test": np.arange(6)}, r"y_test holds 3 for sample test/3 \(3 such labels\).*from 0 to 2"),
            ({"y_train": np.arange(12) % 3 * 100}, r"up to 200, but has 3 different labels.*return_inverse"),
            ({"class_names": np.array(["a", "b"])}, "y_train holds 2 for sample train/2.*from 0 to 1"),
            (
                {"y_train": np.arange(12) % 3 + 0.5, "class_names": np.array(["a", "b", "c"])},
                r"y_train holds 0\.5 for sample train/0",
            ),
            ({"y_train": np.eye(3, dtype=int)[np.arange(12) % 3]}, r"the shape \(12, 3\).*argmax"),
            ({"y_train": np.array(["a", "b", "c"] * 4)}, "y_train has the type <U1.*integer labels"),
            ({"y_train": np.full(12, np.nan)}, "y_train has NaN .* 12 of 12 samples, first in train/0"),
            ({"y_train": np.ones((12, 1, 2))}, r"y_train has the shape \(12, 1, 2\)"),
            (
                {"y_train": np.linspace(0, 1, 12), "y_test": np.arange(6) % 2},
                "y_test has .*int64.*real numbers",
            ),
            (
                {"y_train": NUMBERS[:12], "y_test": NUMBERS[:6, :1]},
                "different numbers of columns",
            ),
            (
                {"x_test": images(6, 5, 7)},
                r"x_test of .*\(6, 5, 7\).*samples of shape \(5, 6, 1\), as in x_train",
            ),
            ({"x_test": images(6, 5, 6).astype(float)}, "x_test of .*float64.*as in x_train"),
            ({"x_train": images(12, 3, 8, 8)}, "channels last.*transpose"),
            ({"x_train": np.zeros((12, 2), complex)}, "complex128.*numbers of shape"),
            ({"x_train": np.array(["a text"] * 12)}, "holds texts.*tokenizer"),
            ({"x_train": np.arange(12.0)}, r"x_train of .* has the shape \(12,\)"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_data(archive(tmp_path / "d.npz", **changes))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_not_finite(self, tmp_path: Path, value: float) -> None:
        x = np.ones((12, 4), np.float32)
        x[[3, 7], 2] = value
        task = load_data(archive(tmp_path / "d.npz", x_train=x, x_test=x[:3], y_test=np.arange(3)))
        with pytest.raises(
            DataError, match="x has NaN or infinite values in 2 of 12 samples, first in train/3"
        ):
            task.tensors("train")
        assert task.tensors("test")[0].shape == (3, 4)

    def test_missing_arrays_are_listed_with_what_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match=r"has no y_train; it holds: x_train, x_test, y_test"):
            load_data(archive(tmp_path / "d.npz", y_train=None))
        with pytest.raises(FileFormatError, match=r"has no y_test; it holds"):
            load_data(archive(tmp_path / "d.npz", y_test=None))

    def test_ragged_arrays_are_refused(self, tmp_path: Path) -> None:
        ragged = np.empty(12, dtype=object)
        ragged[:] = [np.zeros(n) for n in range(12)]
        with pytest.raises(
            FileFormatError, match=r"array x_train of .*Python objects.*all samples one shape"
        ):
            load_data(archive(tmp_path / "d.npz", x_train=ragged))

    def test_a_transform_of_features_is_refused(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "d.npz", x_train=np.zeros((12, 2)), x_test=np.zeros((6, 2)))
        with pytest.raises(InputError, match=r"float64, no images, and is not scaled.*leave out size"):
            load_data(path, ImageTransform(size=3))
        assert load_data(path, ImageTransform()).transform is None

    def test_every_truncation_is_an_error(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "d.npz")
        content = path.read_bytes()
        for length in range(0, len(content), 29):
            path.write_bytes(content[:length])
            with pytest.raises(FileFormatError, match=r"d\.npz is (truncated or altered|not an \.npz)"):
                load_data(path)

    def test_flipped_bits_never_give_other_data(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "d.npz", x_train=images(12, 2, 2), x_test=images(6, 2, 2))
        good = read_npz(path)
        content = path.read_bytes()
        refused = 0
        for position in range(0, len(content), 3):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            try:
                arrays = read_npz(path)
            except FileFormatError:
                refused += 1
            else:
                assert list(arrays) == list(good)
                assert all(np.array_equal(arrays[name], good[name]) for name in good)
        assert refused > len(content) // 6


class TestDoor:
    def test_unknown_and_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"data is .*d\.npz, and there is no such file"):
            load_data(tmp_path / "d.npz")
        with pytest.raises(InputError, match=r"does not exist.*a folder of images, an \.npz"):
            load_data(tmp_path / "nothing")
        (tmp_path / "d.parquet").write_bytes(b"")
        with pytest.raises(InputError, match="has an unknown kind"):
            load_data(tmp_path / "d.parquet")


@pytest.fixture
def task(tmp_path: Path) -> TaskData:
    return load_data(archive(tmp_path / "d.npz"))


class TestTaskData:
    def test_shots_are_stratified_nested_and_by_seed(self, task: TaskData) -> None:
        few, more, other = task.shots(2, seed=1), task.shots(3, seed=1), task.shots(2, seed=2)
        assert np.bincount(few.train.y).tolist() == [2, 2, 2]
        assert set(few.train.ids) < set(more.train.ids)
        assert few.train.ids != other.train.ids
        assert few.train.ids == task.shots(2, seed=1).train.ids
        assert few.test is task.test
        rows = [int(name.removeprefix("train/")) for name in few.train.ids]
        assert np.array_equal(few.train.x, task.train.x[rows])

    def test_too_many_shots(self, task: TaskData) -> None:
        with pytest.raises(DataError, match=r"shots is 5, but class '0' has 4.*at most 4"):
            task.shots(5)
        with pytest.raises(InputError, match="shots=0"):
            task.shots(0)
        with pytest.raises(DataError, match=r"class 'b' has 0 training samples.*add samples"):
            draw_shots(np.array([0, 0]), 1, 0, ["a", "b"])

    def test_a_small_class_gives_all_that_it_has_where_that_is_allowed(self) -> None:
        labels = np.repeat([0, 1, 3], [5, 2, 4])
        found = draw_shots(labels, 3, 0, list("abcd"), at_most=True)
        assert np.bincount(labels[found]).tolist() == [3, 2, 0, 3]
        assert set(draw_shots(labels, 2, 0, list("abcd"), at_most=True)) <= set(found)

    def test_shots_of_a_regression(self, tmp_path: Path) -> None:
        regression = load_data(archive(tmp_path / "r.npz", y_train=NUMBERS[:12, 0], y_test=NUMBERS[:6, 0]))
        with pytest.raises(DataError, match=r"no classes to draw shots of.*subset"):
            regression.shots(1)

    def test_subset_of_a_subset(self, task: TaskData) -> None:
        for first in (task.subset("test", [5, 3, 1]), task.subset("test", np.array([5, 3, 1]))):
            first.tensors("test")  # read before and after the second choice
            second = first.subset("test", [2, 0])
            assert second.test.ids == ("test/1", "test/5")
            assert np.array_equal(second.test.x, task.test.x[[1, 5]])
            assert second.test.y.tolist() == [1, 2]
            assert second.train is task.train

    @pytest.mark.parametrize("positions", [[], [12], [-1], [[0]]])
    def test_positions_out_of_range(self, task: TaskData, positions: list[Any]) -> None:
        with pytest.raises(InputError, match=r"positions are .* from 0 to 11"):
            task.subset("train", positions)

    def test_tensors(self, task: TaskData) -> None:
        x, y = dataclasses.replace(task, transform=image_transform("half", channels=3)).tensors("train")
        assert (x.shape, x.dtype, y.dtype) == ((12, 3, 5, 6), torch.float32, torch.int64)
        torch.testing.assert_close(x[:, 1], torch.from_numpy(images(12, 5, 6)) / 127.5 - 1)
        assert task.tensors("train", torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "train", "shape", "classes"),
    [
        ("eurosat_1000_500", 1000, (3, 64, 64), 10),
        ("flowers_64", 500, (3, 64, 64), 5),
        ("flowers_160", 75, (3, 160, 160), 5),
        ("mnist", 60_000, (1, 28, 28), 10),
    ],
)
@pytest.mark.thinned(2)
def test_real_archives(name: str, train: int, shape: tuple[int, ...], classes: int) -> None:
    from experiments.locate import find_data_dir

    try:
        folder = find_data_dir(require=[f"{name}.npz"])
    except DataError as error:
        pytest.skip(f"needs the data folder: {error}")
    task = load_data(folder / f"{name}.npz")
    assert task.classes is not None
    assert (len(task.train), len(task.classes)) == (train, classes)
    x, y = task.shots(2).tensors("train")
    assert x.shape == (2 * classes, *shape)
    assert y.bincount().tolist() == [2] * classes
    assert 0.05 < x.mean() < 0.7
