"""Tables: values, scales, and every line that is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.data import (
    Standardize,
    image_transform,
    load_data,
)
from linnet.errors import DataError, FileFormatError, InputError


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class TestTable:
    def rows(self, count: int, delimiter: str = ",") -> str:
        lines = ["rooms,area,price", *(f"{n % 4},{n * n}.5,{3 * n}e1" for n in range(count))]
        return "\n".join(lines).replace(",", delimiter) + "\n"

    def test_values_ids_and_split(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", self.rows(20)), test_fraction=0.25)
        assert (len(task.train), len(task.test)) == (15, 5)
        assert task.classes is None
        for part in (task.train, task.test):
            numbers = np.array([int(name.removeprefix("line ")) - 2 for name in part.ids])
            assert np.array_equal(part.x, np.stack([numbers % 4, numbers**2 + 0.5], axis=1))
            assert np.array_equal(part.y, 30.0 * numbers[:, None])

    def test_scale_comes_from_the_training_lines_alone(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", self.rows(20)))
        x, y = task.tensors("train", torch.float64)
        for values in (x, y):
            torch.testing.assert_close(
                values.mean(0), torch.zeros(values.shape[1]).double(), atol=1e-12, rtol=0
            )
            torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]).double())
        assert isinstance(task.transform, Standardize)
        assert task.transform == Standardize.of(task.train.x)
        assert task.targets is not None
        expected = torch.from_numpy((task.test.x - task.train.x.mean(0)) / task.train.x.std(0))
        torch.testing.assert_close(task.tensors("test", torch.float64)[0], expected)
        torch.testing.assert_close(task.targets.inverse(y), torch.from_numpy(task.train.y))
        torch.testing.assert_close(
            task.targets.inverse_variance(torch.ones(1, 1).double()).item(),
            task.train.y.var(),
            check_dtype=False,
        )

    def test_the_scale_stays_in_a_subset(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", self.rows(20)))
        smaller = task.subset("train", [0, 1, 2])
        assert torch.equal(smaller.tensors("train")[0], task.tensors("train")[0][:3])

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_delimiters_blank_lines_and_byte_order_mark(self, tmp_path: Path, delimiter: str) -> None:
        text = "\ufeff" + self.rows(5, delimiter).replace("\n", "\r\n\r\n")
        task = load_data(table(tmp_path / "d.csv", text), target="rooms")
        assert len(task.train) + len(task.test) == 5
        assert {tuple(y) for y in np.concatenate([task.train.y, task.test.y])} == {
            (0.0,),
            (1.0,),
            (2.0,),
            (3.0,),
        }

    def test_several_targets(self, tmp_path: Path) -> None:
        from linnet.data import read_table

        task = read_table(table(tmp_path / "d.csv", self.rows(9)), target=["price", "rooms"])
        assert task.train.y.shape == (7, 2)
        assert task.train.x.shape == (7, 1)

    def test_constant_columns_are_found_and_become_zero(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", "a,b,y\n" + "".join(f"0.1,{n},{n}\n" for n in range(10))))
        assert task.findings == ("constant in the training lines: a",)
        assert torch.allclose(task.tensors("test")[0][:, 0], torch.zeros(2))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("a,y\n", "has 0 lines of numbers"),
            ("a,y\n1,2\n", "has 1 lines of numbers"),
            ("1,2\n3,4\n5,6\n", "begins with numbers.*names on the first line"),
            ("a,a\n1,2\n3,4\n", "repeated column names: 'a'"),
            ("a,\n1,2\n3,4\n", "empty or repeated column names"),
            ("y\n1\n2\n", "no columns but the target"),
            ("a,y\n1,2\n3\n4,5\n6,7,8\n", "2 faulty lines: line 3: 1 cells, not 2; line 5: 3 cells, not 2"),
            ("a,y\n1,2\n\nred,4\n5,\n", r"2 faulty lines: line 4: a is 'red'; line 5: y is empty"),
            ("a,y\n1,2\nnan,4\n5,-inf\n", "line 3: a is nan, which is not finite; line 4: y is -inf"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_data(table(tmp_path / "d.csv", text))

    def test_many_faults_are_counted(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="20 faulty lines") as caught:
            load_data(table(tmp_path / "d.csv", "a,y\n" + "x,1\n" * 20))
        assert str(caught.value).count("line ") == 8

    def test_unknown_target_and_transform(self, tmp_path: Path) -> None:
        path = table(tmp_path / "d.csv", self.rows(9))
        with pytest.raises(InputError, match=r"target is 'cost'.*columns of .*: rooms, area, price"):
            load_data(path, target="cost")
        with pytest.raises(InputError, match="is a table, so ImageTransform"):
            load_data(path, image_transform("half"))

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00a,b", b"a,y\n\x80\x81,2\n"])
    def test_foreign_files(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "d.csv").write_bytes(content)
        with pytest.raises(FileFormatError, match=r"no table of text.*UTF-8"):
            load_data(tmp_path / "d.csv")
