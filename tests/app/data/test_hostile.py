"""Data files that are made to exhaust memory, to wait for ever, or to reach other places: a sentence each."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet import files
from linnet.app.data import ImageTransform, load_data
from linnet.errors import DataError, FileFormatError, InputError, LinnetError, MemoryBudgetError
from linnet.npz import npz_headers, read_npz
from tests.refusals import refused

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")


def npy(shape: tuple[int, ...], content: bytes = b"", descr: str = "<f4") -> bytes:
    """An array's header, and whatever follows it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def archive(path: Path, packed: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    """An archive of members as they are given."""
    with zipfile.ZipFile(path, "w", packed) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def little_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(files, "available_bytes", lambda: free)


class TestArchives:
    @pytest.mark.parametrize("lie", ["header", "file_size", "compress_size"])
    def test_claims_of_a_quadrillion_numbers(self, lie: str, tmp_path: Path) -> None:
        path, count = tmp_path / "data.npz", 10**15
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("x.npy", npy((count,)))
            if lie != "header":
                file.infolist()[0].file_size = len(npy((count,))) + 4 * count
            if lie == "compress_size":
                file.infolist()[0].compress_size = 4 * count
        refused(FileFormatError, lambda: read_npz(path), str(path), "truncated or altered")
        refused(FileFormatError, lambda: npz_headers(path), str(path), "array x")

    def test_an_honest_bomb_is_refused_before_it_is_unpacked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = archive(tmp_path / "data.npz", x=npy((5, 10**6), bytes(2 * 10**7)), y=npy((1,), bytes(4)))
        assert path.stat().st_size < 30_000
        little_memory(monkeypatch, 10**7)
        error = refused(MemoryBudgetError, lambda: read_npz(path), str(path), "20.0 MB", "the array x")
        assert "10.0 MB" in str(error)
        assert read_npz(path, ["y"])["y"].tolist() == [0.0]
        assert npz_headers(path)["x"].shape == (5, 10**6)

    @pytest.mark.long
    def test_a_process_with_less_memory_than_the_machine(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "data.npz", x=npy((400, 10**6), bytes(4 * 10**8), "|u1")[: 128 + 4 * 10**8])
        program = (
            "import resource, sys; from pathlib import Path; import linnet.npz as npz\n"
            "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 10**8, resource.RLIM_INFINITY))\n"
            "try: npz.read_npz(sys.argv[1])\n"
            "except npz.MemoryBudgetError as error: print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
        )
        assert "for the array x" in done.stdout
        assert "400 MB" in done.stdout

    def test_a_header_of_gigabytes(self, tmp_path: Path) -> None:
        start = np.lib.format.magic(2, 0) + struct.pack("<I", 2**32 - 2)
        path = archive(tmp_path / "data.npz", x=start + b" " * 10**7)
        refused(FileFormatError, lambda: npz_headers(path), str(path), "array header")

    @pytest.mark.parametrize("shape", [(-1, -4), (10**9, 10**9, 0, -2)])
    def test_negative_lengths(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        path = archive(tmp_path / "data.npz", x=npy(shape, bytes(16)))
        refused(FileFormatError, lambda: read_npz(path), str(path), "shape")

    def test_elements_without_bytes(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "data.npz", x=npy((10**15,), descr="|S0"))
        refused(FileFormatError, lambda: npz_headers(path), str(path), "elements of 0 bytes")

    def test_rows_whose_names_alone_fill_the_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = 10**6
        columns = npy((rows, 1), bytes(rows), "|i1"), npy((rows,), bytes(rows), "|i1")
        path = archive(tmp_path / "data.npz", x_train=columns[0], y_train=columns[1])
        little_memory(monkeypatch, 5 * 10**7)
        refused(MemoryBudgetError, lambda: load_data(path), str(path), "names of 2000000 rows")

    def test_integers_are_widened_within_the_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, y = npy((4, 10**6), bytes(4 * 10**6), "|i1"), npy((4,), bytes([0, 1, 0, 1]), "|i1")
        task = load_data(archive(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y))
        little_memory(monkeypatch, 2 * 10**7)
        refused(MemoryBudgetError, lambda: task.train.x, "36.0 MB")

    def test_the_budget_of_the_user_is_obeyed_before_reading(self, tmp_path: Path) -> None:
        path = tmp_path / "data.npz"
        np.savez(path, x_train=np.zeros((8, 9, 9), np.uint8), y_train=np.arange(8) % 2)
        task = load_data(path)
        refused(MemoryBudgetError, lambda: task.require_memory("2kB"), "8 images of 9 x 9 pixels")
        assert "x" not in task.train.__dict__
        task.require_memory("3kB")


def png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose content is short."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of three small pictures."""
    from PIL import Image

    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (6, 6), (40 * i, 0, 0)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def read(folder: Path, **options: Any) -> None:
    task = load_data(folder, **options)
    assert len(task.train.x) + len(task.test.x) >= 6


class TestFolders:
    def test_pictures_of_too_many_pixels(self, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from PIL import Image

        sized = ImageTransform(size=4)
        for width, height in ((2**31 - 1, 2**31 - 1), (20_000, 10_000)):
            (photos / "bee" / "bomb.png").write_bytes(png(width, height))
            refused(DataError, lambda: read(photos, transform=sized), "bee/bomb.png", "pixels")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # the limit does not hang on Pillow's
        refused(DataError, lambda: read(photos), "bee/bomb.png", "200,000,000 pixels, more than 178,956,970")
        (photos / "bee" / "bomb.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF\n")
        refused(DataError, lambda: read(photos), "bee/bomb.png", "UnidentifiedImageError")

    def test_a_strip_that_scaling_would_blow_up(self, photos: Path) -> None:
        from PIL import Image

        Image.new("L", (200_000, 1)).save(photos / "bee" / "strip.png")
        size = ImageTransform(size=224)
        refused(DataError, lambda: read(photos, transform=size), "bee/strip.png", "1 x 200000", "44800000")
        with pytest.raises(DataError, match="would become one of 224 x 44800000"):
            size(np.zeros((1, 1, 200_000, 1), np.uint8))

    @pipes
    def test_a_pipe_among_the_pictures(self, photos: Path) -> None:
        os.mkfifo(photos / "bee" / "3.png")
        refused(DataError, lambda: read(photos), "bee/3.png", "a named pipe")
        task = load_data(photos, damaged="skip")
        assert "bee/3.png" in str(task.findings)

    def test_links_out_of_the_folder(self, photos: Path, tmp_path: Path) -> None:
        other = tmp_path / "private"
        other.mkdir()
        (photos / "ant" / "0.png").rename(other / "0.png")
        (photos / "ant" / "0.png").symlink_to(other / "0.png")
        refused(DataError, lambda: read(photos), "ant/0.png is a link", str(other / "0.png"))
        (photos / "ant" / "0.png").unlink()
        (photos / "ant").rename(other / "ant")
        (photos / "ant").symlink_to(other / "ant")
        refused(DataError, lambda: read(photos), "ant is a link", str(other / "ant"))

    def test_links_inside_the_folder_to_it_and_in_a_circle(self, photos: Path, tmp_path: Path) -> None:
        (photos / "bee" / "copy.png").symlink_to("0.png")
        (tmp_path / "alias").symlink_to(photos)
        task = load_data(tmp_path / "alias")
        assert "bee/copy.png" in task.train.ids + task.test.ids
        (photos / "bee" / "copy.png").unlink()
        for name in ("again", "more"):  # two of them: every round doubles the ways
            (photos / "bee" / name).symlink_to(".")
        task = load_data(photos)
        assert sorted(task.train.ids + task.test.ids) == [
            f"{c}/{i}.png" for c in ("ant", "bee") for i in range(3)
        ]


class TestTables:
    def table(self, folder: Path, content: bytes) -> Path:
        path = folder / "table.csv"
        path.write_bytes(content)
        return path

    def test_a_line_without_end(self, tmp_path: Path) -> None:
        path = self.table(tmp_path, b"a,b\n1,2\n")
        with path.open("r+b") as file:  # a hole: no bytes on the disk
            file.truncate(10**11)
        refused(
            FileFormatError, lambda: load_data(path), f"line 3 of {path}", "33,554,432 characters or more"
        )

    @pytest.mark.parametrize("cell", [b"x" * 200_000, b'"' + b"x\n" * 100_000])
    def test_a_cell_without_end(self, cell: bytes, tmp_path: Path) -> None:
        path = self.table(tmp_path, b"a,b\n1,2\n3," + cell)
        refused(FileFormatError, lambda: load_data(path), str(path), "field larger than field limit")

    def test_what_is_shown_of_a_faulty_cell_is_short(self, tmp_path: Path) -> None:
        path = self.table(tmp_path, b"a,b\n" + (b"1," + b"\0" * 9000 + b"\n") * 50)
        error = refused(DataError, lambda: load_data(path), str(path), "50 faulty lines", "line 2: b is")
        assert len(str(error)) < 2000
        path = self.table(tmp_path, b"a," + b"b" * 9000 + b"\n" + b"1,2\n" * 9 + b"1,x\n")
        assert len(str(refused(DataError, lambda: load_data(path), "line 11"))) < 2000

    def test_a_number_of_many_digits(self, tmp_path: Path) -> None:
        path = self.table(tmp_path, b"a,b\n1,2\n3," + b"9" * 5000 + b"\n")
        refused(DataError, lambda: load_data(path), "line 3: b is inf, which is not finite")

    def test_more_lines_than_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.table(tmp_path, b"a,b\n" + b"1,2\n" * (1 << 16))
        little_memory(monkeypatch, 2 * 10**6)
        refused(MemoryBudgetError, lambda: load_data(path), str(path), "more of its lines")

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (b"\xef\xbb\xbf", "is empty"),
            (b"\r\n\r\n", "is empty"),
            (b"\xef\xbb\xbfa,b\r\n", "has 0 lines of samples"),
            (b"a," * 100_000 + b"b\n1,2\n", "repeated column names: 'a'"),
            (b"\0\0\0\0", "has empty or repeated column names|has 0 lines of samples"),
        ],
    )
    def test_tables_without_lines(self, content: bytes, what: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=what) as caught:
            load_data(self.table(tmp_path, content))
        assert caught.value.expected


@pipes
@pytest.mark.parametrize("name", ["data.csv", "data.npz"])
def test_a_pipe_for_a_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refused(InputError, lambda: load_data(tmp_path / name), name, "is a named pipe")


@pytest.mark.parametrize("path", ["a\0b.csv", "x" * 5000, "x" * 300 + ".csv", 7, ""])
def test_paths_that_are_none(path: Any) -> None:
    with warnings.catch_warnings(), pytest.raises(LinnetError) as caught:
        load_data(path)
    assert caught.value.expected
