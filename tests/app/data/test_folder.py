"""Image folders: order, splits, decoding, and every folder that is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.app.data import ImageTransform, SampleSet, check_images, load_data
from linnet.app.data.task import check_classes
from linnet.errors import DataError, InputError

Array = np.ndarray[Any, Any]


def images(count: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_image(path: Path, pixels: Array, **options: object) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of ten 12x12 images, the class in the red channel."""
    for label, name in enumerate(["bee", "ant", "cow"]):
        for index, pixels in enumerate(images(10, 12, 12, 3, seed=label)):
            pixels[..., 0] = 100 * ["ant", "bee", "cow"].index(name)
            write_image(tmp_path / "photos" / name / f"{index}.png", pixels)
    return tmp_path / "photos"


class TestFolder:
    def test_order_ids_and_labels_are_those_of_sorted_folders(self, photos: Path) -> None:
        task = load_data(photos)
        assert task.classes == ("ant", "bee", "cow")
        names = sorted(task.train.ids + task.test.ids)
        assert names == [f"{c}/{i}.png" for c in ("ant", "bee", "cow") for i in range(10)]
        assert list(task.train.ids) == sorted(task.train.ids)
        for part in (task.train, task.test):
            assert [task.classes[label] for label in part.y] == [name.split("/")[0] for name in part.ids]
            assert (part.x[:, 0, 0, 0] == 100 * part.y).all()
        assert task.image_mode == "RGB"
        assert task.findings == ()

    def test_split_is_stratified_and_by_seed(self, photos: Path) -> None:
        one, same, other = (load_data(photos, seed=seed) for seed in (0, 0, 1))
        assert np.bincount(one.test.y).tolist() == [2, 2, 2]
        assert one.test.ids == same.test.ids
        assert one.test.ids != other.test.ids
        assert not set(one.train.ids) & set(one.test.ids)

    @pytest.mark.parametrize("held", ["test", "val", "valid", "validation"])
    def test_train_and_test_folders(self, tmp_path: Path, held: str) -> None:
        for part, count in (("train", 3), (held, 2)):
            for name in ("a", "b"):
                for index in range(count):
                    write_image(tmp_path / part / name / f"{index}.png", images(1, 4, 4, 3)[0])
        task = load_data(tmp_path)
        assert task.train.ids[:3] == ("train/a/0.png", "train/a/1.png", "train/a/2.png")
        assert task.test.ids == tuple(f"{held}/{name}/{index}.png" for name in "ab" for index in range(2))

    def test_a_class_may_be_called_train(self, tmp_path: Path) -> None:
        for name in ("train", "tram"):
            for index in range(3):
                write_image(tmp_path / name / f"{index}.png", images(1, 4, 4, 3)[0])
        assert load_data(tmp_path).classes == ("train", "tram")
        for name in ("train", "tram"):
            (tmp_path / name / "0.png").rename(tmp_path / name / "0.txt")
            for index in (1, 2):
                (tmp_path / name / f"{index}.png").write_bytes(b"x")
        with pytest.raises(DataError, match=r"no image in .* can be decoded, first train/1\.png"):
            load_data(tmp_path, damaged="skip")

    def test_folders_that_hold_no_task(self, tmp_path: Path, photos: Path) -> None:
        def refused(folder: Path, words: str) -> None:
            with pytest.raises(DataError, match=words):
                load_data(folder)

        pixels = images(1, 4, 4, 3)[0]
        bare, split = tmp_path / "bare", tmp_path / "split"
        bare.mkdir()
        refused(bare, r"has no class folders.*one folder of images for each class")
        write_image(bare / "only" / "0.png", pixels)
        refused(bare, "one class folder only, 'only'")
        (bare / "empty").mkdir()
        refused(bare, r"no class has two samples|one class only")
        (bare / "only" / "0.png").unlink()
        refused(bare, r"has no images.*files ending in \.jpg")
        for name in ("train/a", "train/b", "val/a", "val/z"):
            write_image(split / name / "0.png", pixels)
        refused(split, r"val has classes that are not in train: z.*among a, b")
        (photos / "dog").mkdir()
        assert load_data(photos).findings == ("no training sample of class dog",)
        for name in ("ant", "bee"):
            for file in (photos / name).iterdir():
                file.unlink()
        refused(photos, "one class only, 'cow'")

    def test_deeper_folders_hidden_files_and_other_files(self, photos: Path) -> None:
        write_image(photos / "ant" / "more" / "x.png", images(1, 12, 12, 3)[0])
        write_image(photos / "ant" / "._0.png", images(1, 12, 12, 3)[0])
        (photos / ".cache").mkdir()
        (photos / "ant" / "notes.txt").write_text("")
        task = load_data(photos)
        names = task.train.ids + task.test.ids
        assert "ant/more/x.png" in names
        assert "ant/._0.png" not in names
        assert task.findings == ("left out, no images: ant/notes.txt",)

    def test_only_the_images_asked_for_are_decoded(self, photos: Path) -> None:
        task = load_data(photos)
        few = task.shots(2)
        damaged = next(name for name in task.train.ids if name not in few.train.ids)
        (photos / damaged).write_bytes(b"no image")
        assert few.train.x.shape == (6, 12, 12, 3)
        with pytest.raises(DataError, match="1 of 24 images"):
            _ = task.train.x

    @pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b"", lambda b: b"GIF" + b[3:]])
    def test_damaged_files_are_listed_or_skipped(
        self, photos: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        for name in ("ant/3.png", "cow/7.png"):
            (photos / name).write_bytes(damage((photos / name).read_bytes()))
        task = load_data(photos)
        whole = SampleSet(task.train.source, np.arange(30), np.zeros(30), tuple(map(str, range(30))))
        with pytest.raises(DataError, match=r"2 of 30 .*ant/3\.png \(\w+: .*cow/7\.png.*damaged='skip'"):
            _ = whole.x
        task = load_data(photos, damaged="skip")
        assert task.findings == ("left out, damaged: ant/3.png, cow/7.png",)
        assert len(task.train.x) + len(task.test.x) == 28
        assert not {"ant/3.png", "cow/7.png"} & set(task.train.ids + task.test.ids)

    def test_images_of_different_sizes(self, photos: Path) -> None:
        write_image(photos / "cow" / "4.png", images(1, 9, 15, 3)[0])
        task = load_data(photos)
        with pytest.raises(DataError, match=r"cow/4\.png has 9x15 pixels, \w+/\d\.png has 12x12.*--size"):
            _ = (task.train.x, task.test.x)
        sized = load_data(photos, ImageTransform(size=8))
        assert sized.train.x.shape[1:] == sized.test.x.shape[1:] == (8, 8, 3)

    def test_scaling_keeps_the_middle_of_the_shorter_side(self, tmp_path: Path) -> None:
        wide = np.zeros((10, 30, 3), np.uint8)
        wide[:, 10:20] = 200
        for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            write_image(tmp_path / name, wide)
        x = load_data(tmp_path, ImageTransform(size=5)).train.x
        assert x[0, :, 1:4].min() == 200

    def test_large_jpegs_are_scaled_to_about_the_same_pixels(self, tmp_path: Path) -> None:
        from PIL import Image

        ramp = np.linspace(0, 255, 600).astype(np.uint8)
        pixels = np.stack(
            [np.tile(ramp, (400, 1)), np.full((400, 600), 90, np.uint8), np.tile(ramp[::-1], (400, 1))], -1
        )
        for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"):
            path = write_image(tmp_path / name, pixels, quality=95)
        x = load_data(tmp_path, ImageTransform(size=32)).train.x
        expected = Image.open(path).resize((48, 32), Image.Resampling.BILINEAR).crop((8, 0, 40, 32))
        assert np.abs(x[0].astype(int) - np.asarray(expected).astype(int)).max() <= 3

    def test_orientation_tag_is_applied(self, tmp_path: Path) -> None:
        from PIL import Image

        pixels = np.zeros((6, 10, 3), np.uint8)
        pixels[:3] = 255  # the upper half, which the tag turns to the right
        exif = Image.Exif()
        exif[0x0112] = 6
        for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            write_image(tmp_path / name, pixels, exif=exif)
        x = load_data(tmp_path).train.x
        assert x.shape[1:] == (10, 6, 3)
        assert x[0, :, 3:].min() == 255
        assert x[0, :, :3].max() == 0

    def test_more_than_eight_bits_are_refused_not_clipped(self, photos: Path) -> None:
        write_image(photos / "ant" / "0.png", images(1, 12, 12)[0].astype(np.uint16) * 257)
        task = load_data(photos)
        with pytest.raises(DataError, match=r"ant/0\.png \(it has more than 8 bits"):
            _ = (task.train.x, task.test.x)
        for name in ("bee/0.png", "cow/0.png", "cow/1.png"):
            write_image(photos / name, images(1, 12, 12)[0].astype(np.uint16) * 257)
        with pytest.raises(DataError, match=r"4 of 30 images .*ant/0\.png \(it has more than 8 bits"):
            check_images(task)
        with pytest.raises(InputError, match="damaged='maybe'"):
            load_data(photos, damaged="maybe")
        with pytest.raises(InputError, match=r"target is 'price'.*is no table"):
            load_data(photos, target="price")

    def test_every_mode_becomes_rgb_or_grey(self, tmp_path: Path) -> None:
        from PIL import Image

        base = Image.fromarray(images(1, 6, 6, 3)[0])
        palette = base.convert("P")
        palette.info["transparency"] = bytes([0, 128])
        variants = [palette, *(base.convert(mode) for mode in ("RGB", "L", "RGBA", "1", "LA"))]
        for label in "ab":
            (tmp_path / label).mkdir()
            for index, image in enumerate(variants):
                image.save(tmp_path / label / f"{index}.png")
            base.convert("CMYK").save(tmp_path / label / "cmyk.jpg")
        task = load_data(tmp_path, ImageTransform(channels=3))
        assert task.train.x.shape[1:] == (6, 6, 3)
        gray = load_data(tmp_path, ImageTransform(channels=1))
        assert gray.train.x.shape[1:] == (6, 6, 1)
        assert gray.image_mode == "L"


def test_classes_that_only_look_different_are_named() -> None:
    found = check_classes(np.array([0, 1, 2]), ["yes", "no", " Yes"])
    assert found == ["classes whose names differ in case or spaces alone: 'yes', ' Yes'"]
