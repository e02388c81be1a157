"""What users hold, as the network takes it: the same numbers by every road, in fits and for new inputs."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import linnet
from linnet import audit
from linnet.errors import DataError, InputError, LinnetError
from linnet.tangent.data import Data, examples
from linnet.tangent.inputs import DataNotes, admit
from tests.hostile import doors

N = 12
BYTES = np.random.default_rng(0).integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
IMAGES = torch.from_numpy(BYTES).permute(0, 3, 1, 2) / 255
PICTURES = [Image.fromarray(array) for array in BYTES]
Y = torch.arange(N) % 3
NAMES = np.array(["owl", "ant", "bee"])[Y.numpy()]
TABLE = np.random.default_rng(1).normal(size=(N, 4)).astype(np.float32)
FRAME = pd.DataFrame(TABLE, columns=list("abcd"), index=range(50, 50 + N))
ROWS = torch.from_numpy(TABLE)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls write files where they are made."""
    monkeypatch.chdir(tmp_path)


def of_images(channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def of_tables() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


ROADS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "bytes, channels last": (of_images, BYTES, IMAGES),
    "bytes": (of_images, BYTES.transpose(0, 3, 1, 2), IMAGES),
    "channels last": (of_images, BYTES.astype(np.float32) / 255, IMAGES),
    "64 bits, channels last": (of_images, BYTES / 255.0, IMAGES),
    "pictures": (of_images, PICTURES, IMAGES),
    "list of tensors": (of_images, list(IMAGES), IMAGES),
    "list of arrays": (of_images, list(BYTES), IMAGES),
    "image": (of_images, {"image": IMAGES, "path": [f"{i}.png" for i in range(N)]}, IMAGES),
    "pixel_values": (of_images, {"pixel_values": PICTURES, "id": torch.arange(N)}, IMAGES),
    "list of mappings": (of_images, [{"image": picture} for picture in PICTURES], IMAGES),
    "64 bits": (of_tables, TABLE.astype(np.float64), ROWS),
    "extended": (of_tables, TABLE.astype(np.longdouble), ROWS),
    "other byte order": (of_tables, TABLE.astype(">f4"), ROWS),
    "backwards": (of_tables, TABLE[::-1].copy()[::-1], ROWS),
    "frame": (of_tables, FRAME, ROWS),
    "frame with gaps allowed": (of_tables, FRAME.astype("Float64"), ROWS),
    "numbers": (of_tables, TABLE.tolist(), ROWS),
    "integers": (of_tables, (9 * TABLE).astype(int), torch.from_numpy(9 * TABLE).trunc()),
}


@functools.cache
def fits() -> dict[str, Any]:
    """Models of the images and of the table, as tensors."""
    return {
        "images": linnet.fit(linnet.linearize(of_images()), (IMAGES, Y)),
        "images, adapted": linnet.adapt(of_images(), IMAGES, Y, weight=0.5, ridge=1.0),
        "images, Laplace": linnet.Laplace(of_images(), linnet.likelihoods.Categorical()).fit((IMAGES, Y)),
        "tables": linnet.fit(linnet.linearize(of_tables()), (ROWS, Y)),
    }


def some(x: Any) -> Any:
    """The first two examples."""
    return {key: value[:2] for key, value in x.items()} if isinstance(x, dict) else x[:2]


def answers(make: Callable[[], nn.Module], x: Any, y: Any) -> list[Tensor]:
    """What calls make of some training data, and of the first two of them as new inputs."""
    lin, few = linnet.linearize(make()), some(x)
    fits: list[Any] = [
        linnet.fit(lin, (x, y)),
        linnet.Laplace(make(), linnet.likelihoods.Categorical()).fit((x, Y)),
        linnet.adapt(make(), x, y, weight=0.5, ridge=1.0),
    ]
    predictions = [part for fit in fits for part in (fit.predict(few), fit.predictive(few).variance)]
    return [*predictions, fits[0].influence(few), lin(few), lin.kernel(x, few)]


EXPECTED = functools.cache(answers)  # of tensors, which several roads lead to


@pytest.mark.parametrize("name", ROADS)
@pytest.mark.thinned(6)
def test_every_road_leads_to_the_same_answers(name: str) -> None:
    make, x, tensors = ROADS[name]
    for found, expected in zip(answers(make, x, Y.tolist()), EXPECTED(make, tensors, Y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "said"),
    [(BYTES, "255.*permuted"), (BYTES / 255.0, "float64.*permuted"), ({"image": IMAGES, "id": Y}, "'id'")],
)
def test_what_was_done_is_in_the_record(x: Any, said: str) -> None:
    fits = linnet.fit(linnet.linearize(of_images()), (x, Y)), linnet.adapt(of_images(), x, Y)
    for fit in fits:
        assert re.search(said, fit.record.reasons["data"])
    assert "data" not in linnet.fit(linnet.linearize(of_images()), (IMAGES, Y)).record.reasons


@pytest.mark.parametrize(
    "y",
    [
        NAMES,
        NAMES.tolist(),
        pd.Series(NAMES, index=range(7, 7 + N)),
        pd.Series(NAMES, dtype="category"),
    ],
)
@pytest.mark.thinned(2)
def test_text_names_classes(y: Any, tmp_path: Any) -> None:
    codes = torch.from_numpy(np.unique(NAMES, return_inverse=True)[1])
    expected = linnet.adapt(of_tables(), TABLE, codes, weight=0.5, ridge=1.0)
    found = linnet.adapt(of_tables(), TABLE, y, weight=0.5, ridge=1.0)
    torch.testing.assert_close(found.predict(TABLE), expected.predict(TABLE))
    assert found.class_names == ("ant", "bee", "owl")
    assert expected.class_names is None
    more = found.update((TABLE[:2], ["bee", "owl"]))
    assert more.class_names == found.class_names
    assert more.targets[-2:].argmax(1).tolist() == [1, 2]
    assert found.update((TABLE[:1], ["cow"])).class_names == ("ant", "bee", "owl", "cow")
    found.save(tmp_path)
    assert linnet.load(tmp_path, of_tables()).class_names == found.class_names
    with pytest.raises(InputError, match=r"text.*unique"):
        linnet.Laplace(of_tables(), linnet.likelihoods.Categorical()).fit((TABLE, NAMES))


@pytest.mark.parametrize("n", [1, 2, 3])  # 3: as many as there are channels
@pytest.mark.parametrize("as_list", [list, lambda x: [one.double().numpy() for one in x]])
@pytest.mark.parametrize(("name", "x"), [("images", IMAGES), ("tables", ROWS)])
@pytest.mark.thinned(3)
def test_a_list_of_samples_is_a_batch_at_every_door(n: int, as_list: Any, name: str, x: Tensor) -> None:
    fit, listed, batch = fits()[name], as_list(x[:n]), x[:n]
    torch.testing.assert_close(fit.predict(listed), fit.predict(batch))
    torch.testing.assert_close(fit.module.kernel(listed), fit.module.kernel(batch))
    updated = [fit.update((given, Y[:n])).predict(x) for given in (listed, batch)]
    torch.testing.assert_close(*updated)
    scores = [linnet.evaluate(fit, (given, Y[:n])).nll for given in (listed, batch)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    if x is IMAGES:
        apart = [linnet.ood(fit, given, given).outside.entropy for given in (listed, batch)]
        torch.testing.assert_close(*apart)


def test_a_list_is_still_the_inputs_of_a_network_that_takes_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = of_tables()

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.layer(x + shift)

    lin = linnet.linearize(Two())
    torch.testing.assert_close(lin([ROWS[:2], ROWS[2:4]]), lin((ROWS[:2], ROWS[2:4])))
    single = linnet.linearize(of_tables())
    torch.testing.assert_close(single([ROWS[:5]]), single(ROWS[:5]))


def test_a_series_of_images_and_frames_at_every_door() -> None:
    fit = linnet.fit(linnet.linearize(of_images()), (pd.Series(PICTURES), Y))
    torch.testing.assert_close(fit.predict(pd.Series(PICTURES[:1])), fit.predict(IMAGES[:1]))
    for given, images in ((FRAME, ROWS), (TABLE, ROWS), (FRAME.astype(float), ROWS), (PICTURES, IMAGES)):
        made = fit if images is IMAGES else linnet.fit(linnet.linearize(of_tables()), (FRAME, Y))
        found, expected = (linnet.ood(made, x, x[:4]).outside.entropy for x in (given, images))
        torch.testing.assert_close(found, expected)
    double = FRAME.astype(float)
    kept = [linnet.spectrum.Recorder(x) for x in (double, ROWS)]
    values = [recorder.note(of_tables(), 0).values for recorder in kept]  # type: ignore[union-attr]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    stores = [audit.GradientStore(name, of_tables(), linnet.likelihoods.Categorical()) for name in ("a", "b")]
    for store, x in zip(stores, (double, ROWS), strict=True):
        store.add((x, Y))
    scores = [store.scores((x, Y)) for store, x in zip(stores, (double, ROWS), strict=True)]
    torch.testing.assert_close(*scores)


def test_text_of_any_form_is_the_same_labels() -> None:
    expected = linnet.fit(linnet.linearize(of_tables()), (TABLE, NAMES))
    raw = linnet.fit(linnet.linearize(of_tables()), (TABLE, NAMES.astype("S")))
    assert raw.class_names == expected.class_names
    assert torch.equal(raw.targets, expected.targets)
    by_name, by_number = (
        audit.counterfactual(expected, [0, 1], target) for target in (["bee", "ant"], [1, 0])
    )
    assert torch.equal(by_name.fit.targets, by_number.fit.targets)
    with pytest.raises(DataError, match="'cow'"):
        audit.counterfactual(expected, 0, "cow")
    one = nn.Sequential(of_tables(), nn.Linear(3, 1))  # three names are no numbers, whatever the network has
    assert not any("float" in line for line in linnet.adapt(one, TABLE, NAMES).record.warnings)


def hidden(values: Any, masked: bool = True) -> Any:
    return np.ma.array(values, mask=[masked] + [False] * (N - 1))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("gap", [None, float("nan"), 1])
@pytest.mark.parametrize("place", [0, 4])
def test_a_missing_label_among_samples_is_refused(gap: Any, place: int) -> None:
    labels: list[Any] = NAMES.tolist()
    labels[place] = gap
    for data in (list(zip(torch.from_numpy(TABLE), labels, strict=True)), Rows(labels)):
        with pytest.raises(LinnetError, match=r"y is|without targets"):
            linnet.adapt(of_images() if isinstance(data, Rows) else of_tables(), data)


def test_masks_that_hide_nothing_are_let_through() -> None:
    found = linnet.adapt(of_tables(), TABLE, hidden(Y.numpy(), masked=False), weight=0.5, ridge=1.0)
    assert torch.equal(found.targets, linnet.adapt(of_tables(), TABLE, Y, weight=0.5, ridge=1.0).targets)
    mask = TABLE > 1
    with pytest.raises(InputError, match="mask"):
        linnet.adapt(of_tables(), np.ma.array(TABLE, mask=mask), Y)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("column", [np.array(Y.tolist(), dtype=object), pd.Series(Y.tolist(), dtype=object)])
def test_whole_numbers_in_columns_of_objects_are_classes(column: Any) -> None:
    assert linnet.fit(linnet.linearize(of_tables()), (TABLE, column)).classes == 3
    assert linnet.adapt(of_tables(), TABLE, column).classes == 3


class Rows:
    """Samples as Hugging Face's data sets give them."""

    def __init__(self, y: Any = Y) -> None:
        self.y = y

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": PICTURES[i], "label": self.y[i], "file": f"{i}.png"}


def test_samples_of_every_kind() -> None:
    expected = linnet.fit(linnet.linearize(of_images()), (IMAGES, Y)).predict(IMAGES)
    samples = [{"image": image, "label": int(y)} for image, y in zip(IMAGES, Y, strict=True)]
    for data in (
        Rows(Y.tolist()),
        DataLoader(samples, 5, shuffle=True),  # type: ignore[arg-type]
        list(zip(PICTURES, Y.tolist(), strict=True)),
        [(IMAGES[i : i + 5], Y[i : i + 5]) for i in range(0, N, 5)],
    ):
        torch.testing.assert_close(linnet.fit(linnet.linearize(of_images()), data).predict(IMAGES), expected)
    assert linnet.adapt(of_images(), Rows(NAMES)).class_names == ("ant", "bee", "owl")


def test_one_picture_is_one_example() -> None:
    fit = linnet.adapt(of_images(), PICTURES, Y, weight=0.5, ridge=1.0)
    torch.testing.assert_close(fit.predict(PICTURES[3]), fit.predict(IMAGES[3:4]))


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(90, 3))


@pytest.mark.parametrize(
    ("network", "x", "words"),
    [
        (FLAT, BYTES, r"channels last.*permute\(0, 3, 1, 2\)"),
        (nn.Linear(4, 2), TABLE.astype(np.uint8), r"pixels or numbers.*x\.float\(\)"),
        (of_images(), [PICTURES[0], PICTURES[1].resize((9, 9))], "2 sizes.*resize"),
        (of_images(), [Image.new("I;16", (4, 4))], "mode 'I;16'.*RGB"),
        (nn.Linear(4, 2), FRAME.assign(e="x"), "columns without numbers: e.*get_dummies"),
        (nn.Bilinear(2, 2, 1), {"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, "'a', 'b'.*input1"),
        (nn.Linear(4, 2), "x.png", "x is str"),
    ],
)
def test_what_is_ambiguous_is_refused_in_words(network: nn.Module, x: Any, words: str) -> None:
    with pytest.raises(LinnetError, match=f"(?s){words}"):
        examples(network, x)


def test_a_network_that_takes_inputs_as_they_are_is_given_them() -> None:
    class Own(nn.Module):
        """Casts, scales and permutes by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.body = of_images()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.permute(0, 3, 1, 2).float() / 255)

    said = DataNotes()
    x = torch.from_numpy(BYTES)
    assert admit(Own(), x, said) is x
    assert said == DataNotes()
    table = nn.Embedding(9, 3)
    assert admit(table, Y) is Y  # not converted: it is looked up
    network = of_images().train()
    admit(network, x)
    assert all(module.training for module in network.modules())


# -- scales of images ------------------------------------------------------------------------------------


NORMALIZED = (IMAGES - 0.5) / 0.25


@pytest.mark.parametrize("x", [BYTES.astype(np.int64), BYTES.astype(np.int16), BYTES.tolist()])
def test_integers_are_scaled_as_bytes_are_by_networks_of_convolutions(x: Any) -> None:
    data = Data.of((x, Y), of_images())
    assert torch.equal(data.x, IMAGES)
    assert "divided by 255" in data.reasons["data"]
    with pytest.raises(DataError, match=r"x\.float\(\)"):
        fits()["images"].predict(np.asarray(x)[:2] * 2)


@pytest.mark.parametrize(
    ("x", "words"),
    [(BYTES.astype(np.float32), "x / 255"), (255 * IMAGES, "x / 255"), ((BYTES > 99).astype(int), "0 and 1")],
)
def test_a_fit_of_images_that_are_probably_not_scaled_says_so(x: Any, words: str) -> None:
    for call in (
        lambda: linnet.adapt(of_images(), x, Y, weight=0.5, ridge=1.0),
        lambda: linnet.fit(linnet.linearize(of_images()), (x, Y)),
    ):
        with pytest.warns(UserWarning, match=words):
            fit = call()
        assert any(words in warning for warning in fit.record.warnings)


SCALES = {"bytes": BYTES, "shares": IMAGES, "normalized": NORMALIZED, "far": 256 * NORMALIZED}


@functools.cache
def scaled(name: str) -> list[Any]:
    """Fits of images on some scale, and the same from files."""
    network, train = of_images(), SCALES[name]
    made = [linnet.fit(linnet.linearize(network), (train, Y)), linnet.adapt(network, train, Y)]
    with tempfile.TemporaryDirectory() as folder:
        return [*made, *(linnet.load(fit.save(f"{folder}/{i}"), network) for i, fit in enumerate(made))]


@pytest.mark.parametrize(
    ("train", "x", "doubted"),
    [
        ("bytes", IMAGES, False),
        ("shares", BYTES, False),
        ("normalized", NORMALIZED[:1], False),
        ("bytes", BYTES // 9, False),
        ("bytes", BYTES.astype(np.float32), True),
        ("bytes", NORMALIZED, True),
        ("normalized", BYTES, True),
        ("normalized", BYTES.astype(np.int64), True),
        ("normalized", 255 * IMAGES, True),
        ("normalized", IMAGES, True),
        ("far", IMAGES, True),
    ],
)
@pytest.mark.thinned(6)
def test_images_scaled_unlike_those_of_the_fit_are_doubted(train: str, x: Any, doubted: bool) -> None:
    for fit in scaled(train):
        for method in ("predict", "predictive", "influence", "update"):
            with pytest.warns(UserWarning, match="normalize") if doubted else contextlib.nullcontext():
                getattr(fit, method)((x, Y[: len(x)]) if method == "update" else x)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pictures_become_what_the_first_convolution_takes(mode: str, channels: int) -> None:
    pictures = [picture.convert(mode) for picture in PICTURES]
    if mode == "YCbCr":
        pictures = [picture.convert("RGB") for picture in pictures]  # where the rounding differs
    made = [one.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels]) for one in pictures]
    expected = torch.stack([torch.from_numpy(np.array(one)).reshape(6, 5, channels) for one in made])
    network = of_images(channels)
    assert torch.equal(Data.of((pictures, Y), network).x, expected.permute(0, 3, 1, 2) / 255)
    assert torch.equal(examples(network, pictures[3]), expected[3:4].permute(0, 3, 1, 2) / 255)


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
@pytest.mark.parametrize("channels", [1, 3])
def test_gray_arrays_have_no_axis_of_channels(kind: Any, channels: int) -> None:
    data = Data.of((BYTES[..., 0].astype(kind), Y), of_images(channels))
    assert torch.equal(data.x, IMAGES[:, :1].expand(-1, channels, -1, -1))


@pytest.mark.parametrize(
    "x", [IMAGES[3], IMAGES[3].numpy(), BYTES[3], BYTES[3].transpose(2, 0, 1), BYTES[3] / 255]
)
def test_one_array_is_one_image(x: Any) -> None:
    for name in ("images", "images, adapted"):
        torch.testing.assert_close(fits()[name].predict(x), fits()[name].predict(IMAGES[3:4]))


# -- new inputs as data come -----------------------------------------------------------------------------


class Bare(torch.utils.data.Dataset[Any]):
    """Samples without targets."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return IMAGES[i]


NEW: dict[str, Callable[[], Any]] = {
    "data set": lambda: torch.utils.data.TensorDataset(IMAGES, Y),
    "data set without targets": lambda: torch.utils.data.TensorDataset(IMAGES),
    "bare": Bare,
    "mappings": lambda: Rows(NAMES.tolist()),
    "shuffled": lambda: DataLoader(torch.utils.data.TensorDataset(IMAGES, Y), 5, shuffle=True),
    "loader of inputs": lambda: DataLoader(Bare(), 5),
    "generator": lambda: ((IMAGES[i : i + 5], Y[i : i + 5]) for i in range(0, N, 5)),
    "generator of inputs": lambda: (IMAGES[i : i + 5] for i in range(0, N, 5)),
    "generator of samples": lambda: ({"image": one, "label": 0} for one in PICTURES),
    "generator of pictures": lambda: iter(PICTURES),
    "list of samples": lambda: list(zip(PICTURES, Y.tolist(), strict=True)),
}


@pytest.mark.parametrize("name", NEW)
def test_new_inputs_come_as_data_do(name: str) -> None:
    laplace, adapted = fits()["images, Laplace"], fits()["images, adapted"]
    torch.testing.assert_close(laplace.predict(NEW[name]()), laplace.predict(IMAGES))
    torch.testing.assert_close(adapted.influence(NEW[name]()), adapted.influence(IMAGES))
    variances = adapted.predictive(NEW[name]()).variance, adapted.predictive(IMAGES).variance
    torch.testing.assert_close(*variances, rtol=1e-4, atol=1e-6)


# -- tables ----------------------------------------------------------------------------------------------


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    network, y = of_tables(), pd.Series(Y.numpy(), index=FRAME.index)
    fits = [linnet.adapt(network, FRAME, y), linnet.fit(linnet.linearize(network), (FRAME, y))]
    fits += [linnet.load(fit.save(tmp_path / str(i)), network) for i, fit in enumerate(fits)]
    for fit in fits:
        for frame in (FRAME[list("dbca")], pd.DataFrame(TABLE)):
            torch.testing.assert_close(fit.predict(frame), fit.predict(TABLE))
            assert linnet.evaluate(fit, (frame, Y)).accuracy == linnet.evaluate(fit, (TABLE, Y)).accuracy
        torch.testing.assert_close(fit.update((FRAME[list("dbca")], y)).x[N:], torch.from_numpy(TABLE))
        for odd in (FRAME.rename(columns={"a": "z"}), FRAME.assign(z=1.0)):
            with pytest.raises(InputError, match="'z'"):
                fit.predict(odd)


def test_targets_are_found_by_index() -> None:
    y = pd.Series(Y.numpy(), index=FRAME.index)
    fit = linnet.adapt(of_tables(), FRAME, y.sample(frac=1, random_state=0))
    assert fit.labels.tolist() == Y.tolist()
    for other in (y.reset_index(drop=True), y.set_axis([0] * N)):
        with pytest.raises(DataError, match="indices"):
            linnet.adapt(of_tables(), FRAME, other)
    with pytest.raises(InputError, match="apart"):
        linnet.adapt(of_tables(), FRAME.assign(y=Y.numpy()))


def test_batches_of_frames_have_their_columns_and_rows_in_order() -> None:
    y = pd.Series(Y.numpy(), index=FRAME.index)
    batches = [(FRAME[:8], y[:8][::-1]), (FRAME[8:][list("dbca")], y[8:])]
    fit = linnet.adapt(of_tables(), batches, weight=0.5, ridge=1.0)
    assert fit.labels.tolist() == Y.tolist()
    torch.testing.assert_close(fit.x, torch.from_numpy(TABLE))


FLAGS = (Y > 0).numpy()
BOOLEANS = [Y > 0, FLAGS.tolist(), pd.Series(FLAGS, dtype="boolean"), FLAGS.astype(object)]


@pytest.mark.parametrize("y", BOOLEANS)
def test_booleans_are_two_classes(y: Any) -> None:
    expected = linnet.adapt(of_tables(), TABLE, (Y > 0).long(), weight=0.5, ridge=1.0)
    found = linnet.adapt(of_tables(), TABLE, y, weight=0.5, ridge=1.0)
    assert torch.equal(found.targets, expected.targets)


@pytest.mark.parametrize("make", [linnet.adapt, lambda net, data: linnet.fit(linnet.linearize(net), data)])
def test_several_booleans_an_example_are_told_what_to_do(make: Any) -> None:
    flags = torch.stack([Y > 0, Y > 1, Y < 2], 1)
    for y in (flags, flags.numpy(), flags.numpy().astype(object), pd.DataFrame(flags.numpy())):
        with pytest.raises(
            InputError, match=r"pass y\.float\(\), or y\.astype\(float\).*y\.long\(\)\.argmax\(1\)"
        ):
            make(of_tables(), (TABLE, y))
    for y in (flags.float(), flags.numpy().astype(object).astype(float)):
        assert torch.equal(make(of_tables(), (TABLE, y)).targets, flags.double())
    hot = Y[:, None] == torch.arange(3)
    assert make(of_tables(), (TABLE, hot.long().argmax(1))).labels.tolist() == Y.tolist()


DATES = pd.date_range("2024-01-01", periods=N)
TIMES = {
    "dates": DATES,
    "with a zone": DATES.tz_localize("UTC"),
    "spans": DATES - DATES[0],
    "objects": np.array([*DATES.to_numpy()], dtype=object),
}


@pytest.mark.parametrize("kind", TIMES)
def test_a_column_of_times_is_refused_by_name(kind: str) -> None:
    times = pd.Series(TIMES[kind], index=FRAME.index)
    for x, y, name in (
        (FRAME.assign(when=times), Y, r"x\['when'\]"),
        (FRAME, FRAME[["a"]].assign(when=times), r"y\['when'\]"),
        (FRAME, times, "y"),
    ):
        with pytest.raises(InputError, match=rf"^{name} has times.*t - t\.min\(\)"):
            linnet.adapt(of_tables(), x, y)
    days = (times - times.min()) / np.timedelta64(1, "D")
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    assert linnet.adapt(net, FRAME.assign(when=days), Y).x[-1, -1] == N - 1


def test_a_column_of_targets_without_numbers_is_named() -> None:
    y = FRAME[["a"]].assign(word="one")
    with pytest.raises(InputError, match=r"y is DataFrame, columns without numbers: word.*get_dummies\(y\)"):
        linnet.adapt(of_tables(), FRAME, y)
    encoded = pd.get_dummies(y.assign(word=["one", "two"] * (N // 2)))
    assert linnet.adapt(of_tables(), FRAME, encoded).targets.shape == (N, 3)


def test_decimal_numbers_are_floats() -> None:
    for y in ([Decimal(int(k)) / 4 for k in Y], [[Decimal(int(k)) / 4] for k in Y]):
        assert torch.equal(linnet.adapt(of_tables(), TABLE, y).targets, Y[:, None].double() / 4)


# -- sequences -----------------------------------------------------------------------------------------


class Text(nn.Module):
    """The mean of the embeddings that a mask leaves, or the states themselves."""

    def __init__(self, hides: bool = True, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.hides, self.tokens = nn.Embedding(30, 6), nn.Linear(6, 3), hides, tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        keep = attention_mask[..., None].float() if self.hides else torch.ones_like(attention_mask)[..., None]
        states = self.table(input_ids) * keep
        return self.head(states if self.tokens else states.sum(1) / keep.sum(1))


def sentences(lengths: list[int]) -> list[BatchEncoding]:
    torch.manual_seed(1)
    rows = [torch.randint(1, 30, (1, n)) for n in lengths]
    return [BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}) for ids in rows]


LENGTHS = [5, 9, 4, 9, 7, 6]


def test_batches_padded_one_by_one_are_one_batch() -> None:
    parts, y = sentences(LENGTHS), torch.arange(6) % 3
    whole = {key: nn.utils.rnn.pad_sequence([part[key][0] for part in parts], True) for key in parts[0]}
    batches = list(zip(parts, y.split(1), strict=True))
    samples = [
        {**{k: v[0].tolist() for k, v in part.items()}, "label": int(t), "text": "…"}
        for part, t in zip(parts, y, strict=True)
    ]
    lists = {key: [part[key][0].tolist() for part in parts] for key in parts[0]}
    categorical = linnet.likelihoods.Categorical()
    calls: dict[str, Callable[[Any], Tensor]] = {
        "fit": lambda data: linnet.fit(linnet.linearize(Text()), data).predict(whole),
        "adapt": lambda data: linnet.adapt(Text(), data, weight=0.5, ridge=1.0).predict(whole),
        "with_head": lambda data: linnet.with_head(Text(), 3, data=data)(**whole),
        "Laplace": lambda data: linnet.Laplace(Text(), categorical).fit(data).predict(whole),
        "update": lambda data: linnet.fit(linnet.linearize(Text()), (whole, y)).update(data).predict(whole),
    }
    for call in calls.values():
        torch.testing.assert_close(call(batches), call((whole, y)))
    for data in ((BatchEncoding(lists), y), DataLoader(samples, 1, collate_fn=collated)):
        torch.testing.assert_close(calls["fit"](data), calls["fit"]((whole, y)))
    fit = linnet.fit(linnet.linearize(Text()), (whole, y))
    torch.testing.assert_close(fit.predict(parts[0]), fit.predict(whole)[:1])


def collated(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of one."""
    (one,) = samples
    return {key: torch.tensor(value)[None] for key, value in one.items() if key != "text"} | {
        "label": torch.tensor([one["label"]])
    }


def test_labels_of_tokens_are_filled_up_too() -> None:
    batches = [
        (part, torch.zeros(1, n, dtype=torch.long)) for part, n in zip(sentences([2, 3]), [2, 3], strict=True)
    ]
    x, y = Data.of(batches, Text(tokens=True)).pair
    assert y.tolist() == [[0, 0, -100], [0, 0, 0]]
    assert x["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_what_hidden_positions_hold_is_what_is_filled_in() -> None:
    long = BatchEncoding(
        {"input_ids": torch.tensor([[4, 5, 7, 29]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    )
    x, _ = Data.of([(sentences([2])[0], Y[:1]), (long, Y[:1])], Text()).pair
    assert x["input_ids"][0, 2:].tolist() == [29, 29]


def test_padding_that_is_not_left_out_is_refused() -> None:
    batches = list(zip(sentences([5, 9]), torch.tensor([[0], [1]]), strict=True))
    with pytest.raises(DataError, match="network's"):
        linnet.fit(linnet.linearize(Text(hides=False)), batches)
    with pytest.raises(DataError, match="mask"):
        Data.of([(torch.ones(1, n, dtype=torch.long), Y[:1]) for n in (5, 9)])


# -- every door ------------------------------------------------------------------------------------------

TAKING = ("x", "x1", "x2", "data", "pool", "queries", "validation", "batch", "at")
LEFT_OUT = (
    "audit.select", "spectrum.anisotropy_directions", "Linearized.relinearize", "Augmentation.__call__",
    "continual.convert_strength", "RunningCurvature.load_state_dict", "Plots", "surgery.with_bilinear_head",
)  # fmt: skip


def as_arrays(value: Any) -> Any:
    """Tensors as arrays of another type of float."""
    if isinstance(value, tuple):
        return tuple(map(as_arrays, value))
    array = value.numpy() if isinstance(value, Tensor) else value
    return array.astype(np.longdouble) if isinstance(array, np.ndarray) and array.dtype.kind == "f" else array


@pytest.mark.parametrize("name", doors.NAMES)
@pytest.mark.thinned(6)
def test_every_door_takes_arrays(name: str) -> None:
    for door in doors.doors(name):
        if not set(TAKING) & set(door.parameters) or any(out in door.name for out in LEFT_OUT):
            continue
        call, arguments = door.make()
        if not any(isinstance(arguments.get(name), Tensor | tuple) for name in TAKING):
            continue
        try:
            call(**arguments)
        except LinnetError:  # what the object of the table cannot do
            continue
        call, arguments = door.make()
        call(**{name: as_arrays(value) if name in TAKING else value for name, value in arguments.items()})


@pytest.fixture(scope="module")
def three() -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    x = torch.randn(20, 6)
    data, lin = (x, x[:, :3].argmax(1)), linnet.linearize(net)
    return [linnet.fit(lin, data, "cross-entropy"), linnet.fit(lin, data), linnet.adapt(net, data)]


@pytest.mark.parametrize("call", ["predict", "predictive", "influence", "sets"])
def test_examples_within_an_example_are_refused(three: list[Any], call: str) -> None:
    for fit in three:
        with pytest.raises(InputError, match=r"x has examples of shape \(20, 6\)") as error:
            getattr(fit, call)(fit.x[None])
        assert "of shape (6,)" in str(error.value)


def test_a_sparse_matrix_is_refused_with_what_to_do(three: list[Any]) -> None:
    sparse: Any = pytest.importorskip("scipy.sparse")
    x = sparse.csr_matrix(three[0].x.numpy())
    for fit in three:
        with pytest.raises(InputError, match=r"inputs are a sparse csr_matrix.*x\.toarray\(\)"):
            fit.predict(x)
    with pytest.raises(InputError, match=r"inputs are a sparse csr_matrix.*x\.toarray\(\)"):
        linnet.adapt(three[2].prior.network.model, (x, three[2].labels))


@pytest.mark.parametrize("make", [pd.DataFrame, np.array, lambda y: np.array(y, dtype=object)])
def test_a_column_of_names_is_names(three: list[Any], make: Callable[[Any], Any]) -> None:
    y = [[["on"], ["off"]][i % 2] for i in range(20)]
    fit = linnet.adapt(three[2].prior.network.model, (three[0].x, make(y)))
    assert fit.class_names == ("off", "on")


class Recurrent(torch.nn.Module):
    """A recurrent network that packs its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = torch.nn.GRU(3, 5, batch_first=True), torch.nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.cells(packed)[1][0])


def test_packed_sequences_are_told_to_be_padded() -> None:
    lengths, y = torch.tensor([4, 1, 2, 3]), torch.arange(4) % 2
    packed = rnn.pack_padded_sequence(torch.randn(4, 4, 3), lengths, batch_first=True, enforce_sorted=False)
    lin = linnet.linearize(Recurrent())
    with pytest.raises(InputError, match=r"x is a PackedSequence.*pad_packed_sequence"):
        linnet.fit(lin, (packed, y))
    assert linnet.fit(lin, (rnn.pad_packed_sequence(packed, batch_first=True), y)).n == 4
