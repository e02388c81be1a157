"""Tables: values, scales, and every line that is refused."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.app.data import Standardize, image_transform, load_data
from linnet.app.data.table import read_like
from linnet.app.data.task import Table
from linnet.errors import DataError, FileFormatError, InputError


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class TestTable:
    def rows(self, count: int, delimiter: str = ",") -> str:
        lines = ["rooms,area,price", *(f"{n % 4},{n * n}.5,{3 * n}e1" for n in range(count))]
        return "\n".join(lines).replace(",", delimiter) + "\n"

    def test_values_ids_and_split(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", self.rows(20)))
        assert (len(task.train), len(task.test)) == (16, 4)
        assert task.classes is None
        for part in (task.train, task.test):
            numbers = np.array([int(name.removeprefix("line ")) - 2 for name in part.ids])
            assert np.array_equal(part.x, np.stack([numbers % 4, numbers**2 + 0.5], axis=1))
            assert np.array_equal(part.y, 30.0 * numbers[:, None])

    def test_scale_comes_from_the_training_lines_alone(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", self.rows(20)))
        x, y = task.tensors("train", torch.float64)
        for values in (x, y):
            zeros = torch.zeros(values.shape[1]).double()
            torch.testing.assert_close(values.mean(0), zeros, atol=1e-12, rtol=0)
            torch.testing.assert_close(values.std(0, correction=0), zeros + 1)
        assert isinstance(task.transform, Standardize)
        assert task.transform == Standardize.of(task.train.x)
        assert task.targets is not None
        expected = torch.from_numpy((task.test.x - task.train.x.mean(0)) / task.train.x.std(0))
        torch.testing.assert_close(task.tensors("test", torch.float64)[0], expected)
        torch.testing.assert_close(task.targets.inverse(y), torch.from_numpy(task.train.y))
        variance = task.targets.inverse_variance(torch.ones(1, 1).double()).item()
        assert variance == pytest.approx(task.train.y.var())

    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    def test_delimiters_blank_lines_and_byte_order_mark(self, tmp_path: Path, delimiter: str) -> None:
        text = "\ufeff" + self.rows(5, delimiter).replace("\n", "\r\n\r\n")
        task = load_data(table(tmp_path / "d.csv", text), target="rooms")
        assert len(task.train) + len(task.test) == 5
        assert {*task.train.y[:, 0], *task.test.y[:, 0]} == {0.0, 1.0, 2.0, 3.0}

    @pytest.mark.parametrize("header", ['"len, mm, x, y";b;t', "a, mm;b, mm;t"])
    def test_commas_in_names_separate_nothing(self, tmp_path: Path, header: str) -> None:
        task = load_data(
            table(tmp_path / "d.csv", header + "\n" + "".join(f"{n};{-n};{n}\n" for n in range(9)))
        )
        assert task.train.x.shape[1] == 2

    def test_decimal_commas_are_read_where_nothing_else_is_meant(self, tmp_path: Path) -> None:
        lines = "".join(f"{n},5;{-n};0,{n}\n" for n in range(9))
        task = load_data(table(tmp_path / "d.csv", "a;b;t\n" + lines))
        assert {*task.train.x[:, 0], *task.test.x[:, 0]} == {n + 0.5 for n in range(9)}
        assert {*task.train.y[:, 0], *task.test.y[:, 0]} == {n / 10 for n in range(9)}
        assert "decimal commas are read as points: a, t" in task.findings
        for text in ("a,b\n" + "".join(f'"{n},125",{n}\n' for n in range(9)),
                     "a;b\n" + "".join(f"{n}.125,5;{n}\n" for n in range(9))):  # fmt: skip
            with pytest.raises(DataError, match="numbers with marks: a"):
                load_data(table(tmp_path / "d.csv", text))

    @pytest.mark.parametrize("delimiter", ["\t", ";"])
    def test_thousands_are_no_decimals(self, tmp_path: Path, delimiter: str) -> None:
        for lines in (
            [f"{n},609|{n}" if n % 2 else f"{n + 100}|{n}" for n in range(1, 12)],  # 1,609 beside 102
            [f"{n},609|{n}.5" for n in range(1, 12)],
            [f"{n}.609|{n},5" for n in range(1, 12)],
            [f"{n},609|{n}" if n % 2 else f"{n}.5|{n}" for n in range(2, 12)],
        ):
            text = "\n".join(["a|t", *lines]).replace("|", delimiter)
            with pytest.raises(DataError, match=r"numbers with marks: a \(\d[.,]609\)"):
                load_data(table(tmp_path / "d.csv", text))
        for cells in (["1,609", "0,855", "2,5"], ["1,609", "0,855", "2,125"], ["1,609", "101", "2,5"]):
            text = "\n".join(["a|t", *(f"{cells[n % 3]}|{n}" for n in range(12))]).replace("|", delimiter)
            task = load_data(table(tmp_path / "d.csv", text))
            assert {*task.train.x[:, 0], *task.test.x[:, 0]} == {float(c.replace(",", ".")) for c in cells}

    def test_commas_mean_what_they_meant_in_the_run(self, tmp_path: Path) -> None:
        new = table(tmp_path / "new.csv", "a;t\n8,609;1\n855;2\n")
        for cell, decimal in (("{}", False), ("{}.5", False), ("{},5", True)):
            lines = "".join(f"{cell.format(n)};{n % 5}\n" for n in range(12))
            task = load_data(table(tmp_path / "d.csv", "a;t\n" + lines))
            assert task.table is not None
            if decimal:
                x, _, _, findings = read_like(new, task.table, None)
                assert x[:, 0].tolist() == [8.609, 855]
                assert findings == ["decimal commas are read as points: a"]
                assert Table.of(asdict(task.table)).commas
            else:
                with pytest.raises(DataError, match=r"numbers with marks: a \(8,609\)"):
                    read_like(new, task.table, None)

    def test_marks_elsewhere_say_nothing_of_decimals(self, tmp_path: Path) -> None:
        rooms = "".join(f"{'1.2' if n == 3 else f'room {n % 3}'};1,{n:03};{n % 5}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", "room;a;t\n" + rooms))
        assert task.train.x[:, -1].max() < 2
        assert task.table is not None
        noted = table(tmp_path / "new.csv", "note;room;a;t\n" + "1.234;room 1;1,5;2\n1.235;room 2;1,125;3\n")
        assert read_like(noted, task.table, None)[0][:, -1].tolist() == [1.5, 1.125]
        old = replace(task.table, commas=None)  # as runs of before know nothing of it
        assert read_like(noted, old, None)[0][:, -1].tolist() == [1.5, 1.125]

    def test_addresses_are_texts(self, tmp_path: Path) -> None:
        lines = "".join(f"192.168.100.{200 + n % 3},{n},{n}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", "host,a,t\n" + lines))
        assert task.table is not None
        assert task.table.features[0].categories == ("192.168.100.200", "192.168.100.201", "192.168.100.202")

    def test_names_that_look_like_numbers_and_none(self, tmp_path: Path) -> None:
        lines = "".join(f"{('1_12', '11_2')[n % 2]},{'None' if n == 3 else n},{n}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", "site,a,t\n" + lines))
        assert task.table is not None
        assert [column.categories for column in task.table.features] == [("11_2", "1_12"), None]

    def test_the_index_of_a_data_frame_is_no_feature(self, tmp_path: Path) -> None:
        lines = "".join(f"{n},{n % 5},{n % 7}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", ",a,t\n" + lines))
        assert task.train.x.shape[1] == 1
        assert any("index (numbers of the lines)" in line for line in task.findings)

    @pytest.mark.parametrize(("name", "kept"), [("person_id", 1), ("userId", 1), ("glycemic_index", 2)])
    def test_ids_of_cases_that_came_twice_are_no_feature(self, tmp_path: Path, name: str, kept: int) -> None:
        lines = "".join(f"{n // 2},{n % 5},{n % 7}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", f"{name},a,t\n" + lines))
        assert task.train.x.shape[1] == kept

    def test_a_column_says_what_is_held_out(self, tmp_path: Path) -> None:
        lines = "".join(f"{n},{('train', 'train', 'val', 'test')[n % 4]},{n}\n" for n in range(20))
        task = load_data(table(tmp_path / "d.csv", "a,split,t\n" + lines))
        assert (len(task.train), len(task.test), task.train.x.shape[1]) == (10, 10, 1)

    def test_numbers_with_units_are_no_names(self, tmp_path: Path) -> None:
        dollars = "".join(f"{n},${n}.50\n" for n in range(20))
        with pytest.raises(DataError, match=r"t has numbers with units: \$0\.50"):
            load_data(table(tmp_path / "d.csv", "a,t\n" + dollars))
        kilos = load_data(
            table(tmp_path / "k.csv", "a,t\n" + "".join(f"{n},{n % 7} kg\n" for n in range(40)))
        )
        assert "t has numbers with units, 7 different ones: taken as classes" in kilos.findings
        named = load_data(table(tmp_path / "c.csv", "a,t\n" + "".join(f"{n},A{n % 7}\n" for n in range(40))))
        assert not any("units" in line for line in named.findings)

    def test_categories_that_are_numbers_with_units_are_told(self, tmp_path: Path) -> None:
        lines = "".join(f"{n % 4}.5 %,{n % 3} kg,A{n % 3},{n}\n" for n in range(40))
        task = load_data(table(tmp_path / "d.csv", "share,weight,kind,t\n" + lines))
        told = [one for one in task.findings if "units" in one]
        assert told == [
            "share has numbers with units, such as 0.5 %: the numbers alone would be a feature",
            "weight has numbers with units, such as 0 kg: the numbers alone would be a feature",
        ]
        assert task.train.x.shape[1] == 10  # they stay categories

    @pytest.mark.parametrize("stated", [";", "\t", ","])
    def test_the_line_that_states_the_delimiter_is_no_header(self, tmp_path: Path, stated: str) -> None:
        text = f"a,b{stated}t\n" if stated != "," else "a,t\n"
        lines = "".join(f"{n}{stated}{n % 3}\n" for n in range(12))
        task = load_data(table(tmp_path / "d.csv", f"\ufeffsep={stated}\r\n{text}{lines}"))
        assert task.train.x.shape[1] == 1
        assert {*task.train.ids, *task.test.ids} == {f"line {n}" for n in range(3, 15)}

    def test_a_line_above_the_names_is_pointed_to(self, tmp_path: Path) -> None:
        text = "# measured in May\na,b,t\n" + "".join(f"{n},{n},{n}\n" for n in range(9))
        with pytest.raises(DataError, match="with no line above them"):
            load_data(table(tmp_path / "d.csv", text))

    def test_classes_that_all_look_like_numbers_stay_names(self, tmp_path: Path) -> None:
        names = ("01", "1234567", "x")
        lines = "".join(f"{n},{names[n % 3]}\n" for n in range(30))
        task = load_data(table(tmp_path / "d.csv", "a,t\n" + lines))
        assert task.table is not None
        new = table(tmp_path / "new.csv", "a,t\n1,01\n2,1234567\n")
        assert read_like(new, task.table, task.classes)[1].tolist() == [0, 1]
        binary = load_data(table(tmp_path / "b.csv", "a,t\n" + "".join(f"{n},{n % 2}\n" for n in range(9))))
        assert binary.table is not None
        new = table(tmp_path / "new.csv", "a,t\n1,0.0\n2,1\n")
        assert read_like(new, binary.table, binary.classes)[1].tolist() == [0, 1]

    def test_constant_columns_are_found_and_become_zero(self, tmp_path: Path) -> None:
        task = load_data(table(tmp_path / "d.csv", "a,b,y\n" + "".join(f"0.1,{n},{n}\n" for n in range(10))))
        assert task.findings[1:] == ("constant in the training lines: a",)
        assert torch.allclose(task.tensors("test")[0][:, 0], torch.zeros(2))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("a,y\n", "has 0 lines of samples"),
            ("a,y\n1,2\n", "has 1 lines of samples"),
            ("1,2\n3,4\n5,6\n", "begins with numbers.*names on the first line"),
            ("a,a\n1,2\n3,4\n", "repeated column names: 'a'"),
            ("a,\n1,2\n3,4\n", "empty or repeated column names"),
            ("y\n1\n2\n", "no columns but the target"),
            ("a,y\n1,2\n3\n4,5\n6,7,8\n", "2 faulty lines: line 3: 1 cells, not 2; line 5: 3 cells, not 2"),
            ("a,y\n1,2\n\nred,4\n5,\n" + "6,7\n" * 9, r"2 faulty lines: line 4: a is 'red'; line 5: y is em"),
            ("a,y\n1,2\ninf,4\n5,-inf\n", "line 3: a is inf, which is not finite; line 4: y is -inf"),
            ("a,y\n1,red\n2,\n3,blue\n", "line 3: y is empty"),
            ("a,y\n1,red\n2,red\n3,red\n", "one class only, 'red'"),
            ("n,y\n" + "".join(f"w{n},{n}\n" for n in range(99)), r"no column can be a feature: n \(79"),
            ("a,y\n" + "x,1\n" * 20 + "2,3\n" * 200, "20 faulty lines"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(DataError, match=message) as caught:
            load_data(table(tmp_path / "d.csv", text))
        assert str(caught.value).count("line ") <= 8

    def test_unknown_target_and_transform(self, tmp_path: Path) -> None:
        path = table(tmp_path / "d.csv", self.rows(9))
        with pytest.raises(
            InputError, match=r"target is 'prize'.*one of rooms, area, price.*did you mean price"
        ):
            load_data(path, target="prize")
        with pytest.raises(InputError, match="is a table, and is not scaled"):
            load_data(path, image_transform("half"))

    @pytest.mark.parametrize(("name", "numbers", "stays"), [
        ("PassengerId", np.arange(40) + 1, False), ("row", 7 * np.arange(40), False),
        ("row", np.random.default_rng(0).permutation(40), False),
        ("user_id", 10**6 - np.arange(40) ** 2, False), ("people", 10**6 - np.arange(40) ** 2, True),
        ("liquid", 10**6 - np.arange(40) ** 2, True), ("rooms", np.arange(40) % 9, True),
    ])  # fmt: skip
    def test_columns_that_number_the_lines_are_left_out(
        self, tmp_path: Path, name: str, numbers: np.ndarray, stays: bool
    ) -> None:
        lines = [f"{number},{n % 5}.5,{n % 3}\n" for n, number in enumerate(numbers)]
        task = load_data(table(tmp_path / "d.csv", f"{name},size,price\n" + "".join(lines)))
        assert task.train.x.shape[1] == 1 + stays
        assert any(name in finding for finding in task.findings) != stays
        alone = load_data(
            table(tmp_path / "d.csv", f"{name},price\n" + "".join(line[:-6] + line[-2:] for line in lines))
        )
        assert alone.train.x.shape[1] == 1

    def test_the_target_that_is_assumed_is_told(self, tmp_path: Path) -> None:
        path = table(tmp_path / "d.csv", "a,b\n" + "".join(f"{n}.5,{n}.5\n" for n in range(20)) + "1.5,\n")
        with pytest.raises(DataError, match="--target"):
            load_data(path)
        assert "b, the last column" in load_data(table(path, "a,b\n1.5,2\n2.5,1\n3.5,2\n")).findings[0]
        assert not any("last" in one for one in load_data(path, target="b").findings)

    def test_numbers_of_classes_are_told(self, tmp_path: Path) -> None:
        lines = [f"{n}.5,{n % 3},{1000 - n * n}\n" for n in range(20)]
        (note,) = load_data(table(tmp_path / "d.csv", "a,kind,n\n" + "".join(lines)), target="kind").findings
        assert note.startswith("kind is whole numbers, 3 different ones: taken as a regression")
        for target in ("n", "a"):  # as many as there are lines, and no whole numbers
            assert load_data(tmp_path / "d.csv", target=target).findings == ()
        texts = [line.replace(f",{n % 3},", f",class{n % 3},") for n, line in enumerate(lines)]
        task = load_data(table(tmp_path / "d.csv", "a,kind,n\n" + "".join(texts)), target="kind")
        assert task.classes == ("class0", "class1", "class2")


def people(count: int = 60, seed: int = 0) -> str:
    """A table as it comes: texts, yes and no, empty cells, a name on each line."""
    rng = np.random.default_rng(seed)
    lines = ["name,city,member,age,note,left"]
    for n in range(count):
        city = ["Rome", "Oslo", "Lima", ""][rng.integers(4)]
        age = "" if rng.random() < 0.2 else f"{rng.integers(20, 60)}"
        lines.append(f"p{seed}-{n},{city},{['yes', 'no'][rng.integers(2)]},{age},,{['stays', 'goes'][n % 2]}")
    return "\n".join(lines) + "\n"


class TestTextsAndEmptyCells:
    def test_encoded_by_the_training_lines(self, tmp_path: Path) -> None:
        path = table(tmp_path / "d.csv", people())
        task = load_data(path)
        assert task.classes == ("goes", "stays")
        assert task.table is not None
        assert task.table.labels == (
            *("city = Lima", "city = Oslo", "city = Rome", "city is empty"),
            *("member = yes", "age", "age is empty"),
        )
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
        ages = [float(rows[int(i.split()[1]) - 2][3] or "nan") for i in task.train.ids]
        for part in (task.train, task.test):
            for name, x, label in zip(part.ids, part.x, part.y, strict=True):
                row = rows[int(name.split()[1]) - 2]
                hot = [float(row[1] == city) for city in ("Lima", "Oslo", "Rome", "")]
                age = [float(row[3] or np.nanmedian(ages)), float(row[3] == "")]
                assert x.tolist() == [*hot, float(row[2] == "yes"), *age]
                assert task.classes[label] == row[5]
        told = "; ".join(task.findings)
        assert "city (4), member (2)" in told
        assert f"age ({int(np.isnan(ages).sum())} of {len(ages)})" in told
        assert f"name ({len(task.train)} different texts), note (empty in all training lines)" in told

    def test_empty_cells_of_test_lines_alone_are_told(self, tmp_path: Path) -> None:
        lines = [f"train,{n},{'ab'[n % 2]},{'cde'[n % 3]},{n}.5" for n in range(9)]
        text = "\n".join(["split,x,two,three,y", *lines, "test,,,,3.5", "test,8,b,d,8.5"])
        task = load_data(table(tmp_path / "d.csv", text))
        assert task.test.x[0].tolist() == [4, 0.5, 0, 0, 0]
        told = [one for one in task.findings if "in no training line" in one]
        for one, taken in zip(
            told, ("4, the median", "neither of its two categories", "none of its categories"), strict=True
        ):
            assert f"is empty in 1 of 2 lines and in no training line: taken as {taken}" in one

    def test_zeros_and_ones_are_two_classes(self, tmp_path: Path) -> None:
        text = "a,y\n" + "".join(f"{n},{n % 2}\n" for n in range(10))
        task = load_data(table(tmp_path / "d.csv", text))
        assert task.classes == ("0", "1")
        assert "y is 0 or 1 throughout: taken as two classes" in task.findings

    def test_a_column_says_the_split(self, tmp_path: Path) -> None:
        text = "split,a,y\n" + "".join(f"{'test' if n % 3 else 'train'},{n},{n}.5\n" for n in range(9))
        task = load_data(table(tmp_path / "d.csv", text))
        assert task.train.ids == ("line 2", "line 5", "line 8")
        assert task.train.x.shape == (3, 1)
        assert "the column split says which lines are trained on (3) and tested" in task.findings


def test_a_table_may_end_in_tsv_and_others_say_what_to_do(tmp_path: Path) -> None:
    text = "when\ta\ty\n" + "".join(f"2021-03-{n + 1:02}\t{n % 4}\t{n}.5\n" for n in range(12))
    task = load_data(table(tmp_path / "d.tsv", text), target="y")
    assert task.train.x.shape[1] == 1
    assert any("when (dates" in finding for finding in task.findings)
    for ending, words in ((".csv.gz", "unpack it"), (".xlsx", "save the table as CSV"), (".txt", "as CSV")):
        (tmp_path / f"d{ending}").write_bytes(b"a,y\n")
        with pytest.raises(InputError, match=f"unknown kind.*{words}"):
            load_data(tmp_path / f"d{ending}")


@pytest.mark.parametrize("cells", ["low", "True", "7"])
def test_values_of_a_run_are_no_texts(tmp_path: Path, cells: str) -> None:
    task = load_data(table(tmp_path / "d.csv", "a,y\n" + "".join(f"{n},{n}.5\n" for n in range(12))))
    assert task.table is not None
    new = table(tmp_path / "new.csv", f"a,y\n1,{cells}\n2,{cells}\n")
    if cells == "7":
        assert read_like(new, task.table, None)[1].tolist() == [[7], [7]]
        return
    with pytest.raises(DataError, match=f"line 2: y is '{cells}'"):
        read_like(new, task.table, None)


def test_a_text_that_is_new_is_neither_of_two_categories(tmp_path: Path) -> None:
    lines = "".join(f"{'ab'[n % 2]},{'cde'[n % 3]},{n}.5\n" for n in range(12))
    task = load_data(table(tmp_path / "d.csv", "two,three,y\n" + lines))
    assert task.table is not None
    new = table(tmp_path / "new.csv", "two,three\na,c\nB,f\nb,d\n")
    x, _, _, findings = read_like(new, task.table, None)
    assert x.tolist() == [[0, 1, 0, 0], [0.5, 0, 0, 0], [1, 0, 1, 0]]
    assert "two has texts that the run has not seen: B, taken as neither of its two categories" in findings
    assert "three has texts that the run has not seen: f, taken as none of its categories" in findings


def test_categories_as_a_spreadsheet_writes_them_back(tmp_path: Path) -> None:
    lines = "".join(f"{n % 2 == 0},{('7', '8.0', 'x')[n % 3]},{n}.5\n" for n in range(12))
    task = load_data(table(tmp_path / "d.csv", "member,size,y\n" + lines))
    assert task.table is not None
    new = table(tmp_path / "new.csv", "member,size\nTRUE,7.0\nFALSE,8\ntrue,X\n")
    x, _, _, findings = read_like(new, task.table, None)
    assert x.tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert findings == ["size has texts that the run has not seen: X, taken as none of its categories"]


def test_answers_that_are_all_empty_are_none(tmp_path: Path) -> None:
    for kind in ("{}.5", "c{}"):
        lines = "".join(f"{n},{kind.format(n % 3)}\n" for n in range(12))
        task = load_data(table(tmp_path / "d.csv", "a,y\n" + lines))
        assert task.table is not None
        for empty in ("", "NA", " "):
            new = table(tmp_path / "new.csv", f"a,y\n1,{empty}\n2,{empty}\n")
            x, y, ids, _ = read_like(new, task.table, task.classes)
            assert (x.tolist(), y, ids) == ([[1], [2]], None, ("line 2", "line 3"))
            new = table(tmp_path / "new.csv", f"a,y\n1,{empty}\n2,{kind.format(1)}\n")
            with pytest.raises(DataError, match=r"y is empty in 1 of 2 lines.*line 2.*remove the column y"):
                read_like(new, task.table, task.classes)


def test_the_unicode_text_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    text = "größe\ta\ty\n" + "".join(f"{'klein' if n % 2 else 'groß'}\t{n % 4}\t{n}.5\n" for n in range(12))
    for encoding in ("utf-16", "utf-8-sig"):
        (tmp_path / "d.csv").write_text(text, encoding=encoding)
        task = load_data(tmp_path / "d.csv")
        assert task.table is not None
        assert task.table.features[0].name == "größe"
        assert task.table.features[0].categories == ("groß", "klein")


def test_numbers_with_units_and_answers_that_all_differ_are_named(tmp_path: Path) -> None:
    lines = "".join(f"{'-' * (n % 2)}{n}.5%,{n % 4},{n}\n" for n in range(70))
    task = load_data(table(tmp_path / "d.csv", "share,a,y\n" + lines))
    assert any("share (numbers with units, such as" in finding for finding in task.findings)
    text = "a,y\n" + "".join(f"{n % 4},2021-03-{n + 1:02}\n" for n in range(12))
    with pytest.raises(DataError, match=r"y has 12 different texts: 2021-03-01.*numbers for a regression"):
        load_data(table(tmp_path / "d.csv", text))


@pytest.mark.parametrize("content", [b"\xff\xfea,y\n\x80", b"a,y\n\x80\x81,2\n"])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"no table of text.*UTF-8"):
        load_data(tmp_path / "d.csv")
