"""Folders to share: nothing is lost, half a folder is none, and what comes from elsewhere is checked."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

import linnet
from linnet import files
from linnet.disk import process_mark
from linnet.errors import FileFormatError, InputError
from linnet.files import (
    LABELS,
    LABELS_KIND,
    labels_apart,
    load_tensors,
    read_labels,
    save_tensors,
    write_json,
)
from linnet.fitting import CG, Nystrom, Shared, Sketch
from linnet.hub import folder as module
from linnet.hub.card import CARD, is_own_card
from linnet.laplace.laplace import Laplace
from linnet.likelihoods import Categorical, Gaussian
from linnet.saved import READERS
from tests.fitting.problems import near, network, problem, real, refused
from tests.laplace.laplace_problems import classes, fitted, numbers
from tests.tangent_gp.tangent_gp_cases import WAYS, dense
from tests.zoo import BY_NAME

P = problem(tests=2)
S = problem(n=5, outputs=2, hidden=2, tests=2)
NAN = float("nan")
HELD = torch.tensor([[1.0, NAN], [NAN, 3.0]], dtype=torch.float64)


def adapted(**options: Any) -> Any:
    return linnet.adapt(P.model, (P.x, P.y), **options)


def small_relu() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def finetuned() -> Any:
    return linnet.finetune(small_relu(), (P.x.float(), P.y), training=linnet.Training(steps=2, batch_size=4))


FITS: dict[str, Callable[[], Any]] = {
    "dual": lambda: P.fit(ridge="loo", solver="dual"),
    "primal": lambda: P.fit(ridge=0.3, solver="primal"),
    "shared": lambda: P.fit(ridge="loo", solver=Shared(2)),
    "sketch": lambda: P.fit(ridge=0.3, solver=Sketch(dim=5)),
    "cg": lambda: S.fit(ridge=0.3, solver=CG(1e-10, 300, Nystrom(3))),
    "sgd": lambda: S.fit(ridge=3.0, solver="sgd"),
    "forgotten": lambda: P.fit(ridge=0.3).forget([1, 4]),
    "updated": lambda: P.fit(ridge=0.3).update((P.x[:2], P.y[:2])),
    "held outputs": lambda: S.fit(ridge=0.3, solver="dual").constrain(real(2, 3, seed=11), HELD),
    "held outputs, cg": lambda: S.fit(ridge=0.3, solver="cg").constrain(
        real(2, 3, seed=11), HELD, weight=2.0
    ),
    "float32, solved in float64": lambda: linnet.fit(
        linnet.linearize(network().float()), (P.x.float(), P.y), ridge=1e-6
    ),
    "last layer": lambda: linnet.fit(linnet.linearize(P.model, params="last-layer"), (P.x, P.y), ridge=0.3),
    "cross-entropy": lambda: P.fit(ridge=0.3, loss="cross-entropy"),
    "cross-entropy, cg": lambda: S.fit(ridge=3.0, loss="cross-entropy", solver=CG(1e-8)),
    "cross-entropy, forgotten": lambda: P.fit(ridge=0.3, loss="cross-entropy").forget([2]),
    "adapt": adapted,
    "adapt, lower layers": lambda: adapted(weight=0.5, ridge=0.1).forget([1]),
    "finetuned": finetuned,
}
STRUCTURES = ["full", "block", "diagonal", "low-rank", "kfac", "ekfac", "kfra", "last-layer"]
POSTERIORS: dict[str, Callable[[], Any]] = {
    **{f"laplace {kind}": lambda kind=kind: fitted(kind)[0] for kind in STRUCTURES},
    "laplace by layers": lambda: fitted({"0": "kfac", "2": "full"})[0],
    "laplace tuned": lambda: fitted("kfac", data_scale=1.5)[0].tune("evidence", prior="layer"),
}
PROCESSES: dict[str, Callable[[], Any]] = {
    f"process {name}": lambda way=way: linnet.TangentGP(
        dense().model, Gaussian(variance=0.2), prior_precision=0.7, **way
    ).fit(dense().x, dense().y)
    for name, way in WAYS.items()
}
MODELS = {**FITS, **POSTERIORS, **PROCESSES}


def network_of(name: str) -> torch.nn.Module:
    """The network that it was made of."""
    if name in POSTERIORS:
        return classes()[0]
    if name in PROCESSES:
        return dense().model
    if name == "finetuned":
        return small_relu()
    if "float32" in name:
        return network().float()
    return S.model if "cg" in name or name in ("sgd", "held outputs") else P.model


def records(folder: Path) -> dict[str, Any]:
    """Every tensor and all metadata, of both kinds of folders."""
    return {path.name: load_tensors(path, path.stem) for path in sorted(folder.glob("*.safetensors"))}


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit, in the same order."""
    assert list(one) == list(other)
    for (tensors, told), (again, retold) in zip(one.values(), other.values(), strict=True):
        assert [(name, t.dtype, t.shape) for name, t in tensors.items()] == [
            (name, t.dtype, t.shape) for name, t in again.items()
        ]
        assert all(torch.equal(_bytes(t), _bytes(again[name])) for name, t in tensors.items())
        unlike = {"curvature"}  # the checksum of another file
        assert json.dumps({k: v for k, v in told.items() if k not in unlike}) == json.dumps(
            {k: v for k, v in retold.items() if k not in unlike}
        )


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    net = network_of(name)
    x = P.x_test.to(next(net.parameters()).dtype)
    model.save(tmp_path / "files")
    assert model.save_pretrained(str(tmp_path / "folder")) == tmp_path / "folder"
    equal(records(tmp_path / "folder"), records(tmp_path / "files"))
    one, other = linnet.load(tmp_path / "folder", net), linnet.load(tmp_path / "files", net)
    assert type(one) is type(other) is type(model)
    for again in (one, other):  # memory layouts differ, and so may the last bit of what is computed
        near(again.predict(x), model.predict(x), exact := 1e-6 if "float32" in name else 1e-9)
        if name != "finetuned":
            near(again.predictive(x).variance, model.predictive(x).variance, exact)
        if isinstance(model, linnet.LinearFit | linnet.NestedFit):
            near(again.loo(), model.loo(), exact)


def test_the_folder_is_what_others_expect(tmp_path: Path) -> None:
    fit = P.fit(ridge="loo")
    fit.save_pretrained(tmp_path, card={"license": "mit", "datasets": ["a: b", "é"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == [CARD, "linear-fit.safetensors", LABELS]
    with safe_open(str(tmp_path / "linear-fit.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("x"), P.x)
    content = json.loads((tmp_path / LABELS).read_text())["content"]
    assert content["class"] == "LinearFit"
    assert content["linnet"] == linnet.__version__
    assert content["summary"]["ridge"] == fit.ridge
    assert content["files"]["linear-fit.safetensors"]["metadata"]["loss"] == "squared"
    _, block, page = (tmp_path / CARD).read_text().split("---\n", 2)
    assert yaml.safe_load(block) == {
        "library_name": "linnet",
        "tags": ["linnet", "linear-fit"],
        "license": "mit",
        "datasets": ["a: b", "é"],
    }
    for line in (
        "# LinearFit",
        "| examples | 7 |",
        f"| ridge | {fit.ridge:.4g} |",
        "training samples are in it",
    ):
        assert line in page


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("laplace kfac", "No training sample is in it"),
        ("process function", "**The training samples are in it**"),
        ("finetuned", "It holds the weights of its network"),
        ("adapt", "whose weights are not in this folder"),
    ],
)
def test_a_card_says_what_the_folder_gives_away(name: str, said: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    text = (tmp_path / CARD).read_text()
    assert said in text
    assert "license" not in text
    assert ("x" in names_of(tmp_path)) == ("**The training samples are in it**" in text)


def test_inputs_by_name_are_samples_too(tmp_path: Path) -> None:
    animal = BY_NAME["two-inputs"]
    x = animal.make_batch(5)
    lin = linnet.linearize(animal.factory(), output=animal.output)
    fit = linnet.fit(lin, (x, torch.tensor([0, 1, 0, 1, 2])), ridge=0.3)
    fit.save_pretrained(tmp_path)
    assert "**The training samples are in it**" in (tmp_path / CARD).read_text()
    near(linnet.load(tmp_path, animal.factory(), output=animal.output).predict(x), fit.predict(x), 1e-6)


def test_likelihoods_of_ones_own_are_passed_again(tmp_path: Path) -> None:
    model, x, y = numbers()
    own = linnet.likelihoods.Custom(
        lambda f, t: 0.5 * ((f - t) ** 2).sum(1), moments=lambda f: (f, torch.ones_like(f))
    )
    la = Laplace(model, own, "full").fit((x, y))
    la.save_pretrained(tmp_path)
    refused(InputError, lambda: linnet.load(tmp_path, model), "likelihood is missing")
    near(
        linnet.load(tmp_path, model, likelihood=own).predictive(x).variance, la.predictive(x).variance, 1e-12
    )


def names_of(folder: Path) -> set[str]:
    files = read_labels(folder / LABELS)["files"].values()
    return {name for label in files for name in label["order"]}


def test_texts_are_no_markup(tmp_path: Path) -> None:
    """A summary holds texts of users: names of classes, reasons of their own."""
    from linnet.hub.card import card_of

    label = {"order": ["x|y", "<b>"]}
    content = {"class": "A", "holds": "a", "linnet": "1", "files": {"a.safetensors": label}}
    told = {"a|b": "one | two\n## three", "html": "<script>", "link": "[x](javascript:y)", "none": None}
    page = card_of({**content, "summary": told}, "A.", 'hf:a/"b"', {"a.safetensors": 3}, {})
    assert r"| a\|b | one \| two ## three |" in page
    assert "<script>" not in page
    assert "\n## three" not in page
    assert r"\[x\](javascript:y)" in page
    assert r'linnet.load("hf:a/\"b\"", network)' in page
    assert r"| x\|y, &lt;b> |" in page


# --- writing ----------------------------------------------------------------------------------------


def test_a_page_is_written_anew_until_somebody_edits_it(tmp_path: Path) -> None:
    fit = P.fit(ridge=0.3)
    fit.save_pretrained(tmp_path, {"license": "mit"})
    fit.forget([0]).save_pretrained(tmp_path)
    text = (tmp_path / CARD).read_text()
    assert "| examples | 6 |" in text
    assert "license" not in text
    (tmp_path / CARD).write_text(text.replace("# LinearFit", "# My fit"))
    assert not is_own_card(tmp_path / CARD)
    fit.save_pretrained(tmp_path)
    assert "# My fit" in (tmp_path / CARD).read_text()
    assert linnet.load(tmp_path, P.model).n == 7


def test_other_files_stay(tmp_path: Path) -> None:
    """The network's own folder may be the same one."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    P.fit(ridge=0.3).save_pretrained(tmp_path)
    assert linnet.load(tmp_path, P.model).n == 7
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "config.json").read_text() == "{}"


def test_of_several_things_the_last_folder_is_read(tmp_path: Path) -> None:
    P.fit(ridge=0.3).save_pretrained(tmp_path)
    adapted().save_pretrained(tmp_path)
    assert type(linnet.load(tmp_path, P.model)) is linnet.NestedFit


def test_files_of_another_kind_go(tmp_path: Path) -> None:
    P.fit(ridge=0.3).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    adapted().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model.safetensors",
        "nested-fit.safetensors",
    ]
    P.fit(ridge=0.3).save(tmp_path)  # this one needs no linnet.json
    (tmp_path / LABELS).write_text("{}")
    P.fit(ridge=0.2).save_pretrained(tmp_path)  # over what says nothing of the others
    assert (tmp_path / "nested-fit.safetensors").exists()
    P.fit(ridge=0.1).save(tmp_path)
    adapted().save_pretrained(tmp_path)
    assert (tmp_path / "linear-fit.safetensors").exists()


def test_a_plain_save_over_it_is_read(tmp_path: Path) -> None:
    fit = P.fit(ridge=0.3)
    fit.save_pretrained(tmp_path)
    fit.forget([0]).save(tmp_path)
    assert linnet.load(tmp_path, P.model).n == 6


@pytest.mark.parametrize("apart", [False, True])
def test_numbers_that_json_lacks_come_back(apart: bool, tmp_path: Path) -> None:
    inf = float("inf")
    told = {"a": float("nan"), "b": [inf, {"not finite": -inf}], "not finite": "nan", "c": "nan"}
    same = {"not finite": {"not finite": "nan"}}
    with labels_apart() if apart else nullcontext({}) as labels:
        path = save_tensors(tmp_path, "fit", {"w": torch.ones(2)}, {**told, "same": same})
    if apart:
        write_json(tmp_path / LABELS, {"files": labels}, LABELS_KIND)
        text = (tmp_path / LABELS).read_text()
    else:
        with safe_open(str(path), "pt") as file:
            text = file.metadata()["linnet"].partition(" ")[2]
    json.loads(text, parse_constant=pytest.fail)
    read = load_tensors(path, "fit")[1]
    assert math.isnan(read.pop("a"))
    assert read == {**{name: value for name, value in told.items() if name != "a"}, "same": same}


def test_numbers_as_python_spells_them_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_marked", lambda value: value)
    monkeypatch.setattr(files, "_dump", lambda value, indent=None: json.dumps(value, indent=indent))
    told = {"loss": float("nan"), "bound": float("inf")}
    with labels_apart() as labels:
        path = save_tensors(tmp_path, "fit", {"w": torch.ones(2)}, told)
    write_json(tmp_path / LABELS, {"files": labels}, LABELS_KIND)
    run = write_json(tmp_path / "run.json", told, "run")
    inside = save_tensors(tmp_path / "inside", "fit", {"w": torch.ones(2)}, told)
    assert "NaN" in (tmp_path / LABELS).read_text()
    monkeypatch.undo()
    for read in (load_tensors(path, "fit")[1], load_tensors(inside, "fit")[1], files.read_json(run, "run")):
        assert math.isnan(read["loss"])
        assert read["bound"] == float("inf")


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    fit = P.fit(ridge=0.3)
    one, other = fit.save_pretrained(tmp_path / "1"), fit.save_pretrained(tmp_path / "2")
    for name in ("linear-fit.safetensors", LABELS, CARD):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_folder_that_is_half_written_is_none(
    old: bool, moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after some files have moved in: the old folder, or a refusal, never a mixture."""
    (la, x, y), place = fitted("kfac"), tmp_path / "folder"
    if old:
        Laplace(classes()[0], Categorical(), "kfac").fit((x[:6], y[:6])).save_pretrained(place)
    real_replace, done = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if Path(target).parent == place:
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        real_replace(source, target)

    monkeypatch.setattr(module.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        la.save_pretrained(place)
    monkeypatch.undo()
    assert not list(place.glob(".*"))
    if old and not moved:
        assert linnet.load(place, classes()[0]).examples == 6  # type: ignore[union-attr]
    else:
        with pytest.raises((FileFormatError, InputError)):
            linnet.load(place, classes()[0])
    la.save_pretrained(place)
    assert linnet.load(place, classes()[0]).examples == 12  # type: ignore[union-attr]


def test_a_failed_writing_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    fit = P.fit(ridge=0.3)
    fit.save_pretrained(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    def breaks(tensors: Any, filename: str, metadata: Any) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", breaks)
    for place in ("a", "b"):
        refused(InputError, lambda at=tmp_path / place: fit.forget([0]).save_pretrained(at), "no space left")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert not (tmp_path / "b").exists()


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    mark = process_mark().partition("-")[0]
    (tmp_path / f".linnet.{mark}-7fffffff-00.partial").mkdir()
    (tmp_path / f".linnet.{mark}-{os.getpid():x}-00.partial").mkdir()
    P.fit(ridge=0.3).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == [f".linnet.{mark}-{os.getpid():x}-00.partial"]


def test_where_no_folder_can_be(tmp_path: Path) -> None:
    fit = P.fit(ridge=0.3)
    (tmp_path / "file").write_text("")
    refused(InputError, lambda: fit.save_pretrained(tmp_path / "file"), "is a file", "folder")
    (tmp_path / "a" / CARD).mkdir(parents=True)
    (tmp_path / "b" / LABELS).mkdir(parents=True)
    fit.save_pretrained(tmp_path / "a")
    refused(InputError, lambda: fit.save_pretrained(tmp_path / "b"), "is a folder", "rename")
    assert [path.name for path in (tmp_path / "b").iterdir()] == [LABELS]
    for wrong in (None, 3, ""):
        refused(InputError, lambda wrong=wrong: fit.save_pretrained(wrong), f"directory={wrong!r}")


@pytest.mark.parametrize(
    "wrong", ["mit", [("license", "mit")], {1: 2}, {"a b": 1}, {"a\nb": 1}, {"a": {1}}, {"a": NAN}]
)
def test_what_is_no_metadata(wrong: Any, tmp_path: Path) -> None:
    refused(InputError, lambda: P.fit(ridge=0.3).save_pretrained(tmp_path / "a", wrong), "card")
    assert not (tmp_path / "a").exists()


def test_links_are_replaced_not_followed(tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("mine")
    place.mkdir()
    for name in ("linear-fit.safetensors", LABELS):
        (place / name).symlink_to(outside)
    (place / CARD).symlink_to(tmp_path / "nothing")
    P.fit(ridge=0.3).save_pretrained(place)
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in place.iterdir())
    assert not (tmp_path / "nothing").exists()


# --- what must not be loaded --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of several classes, which tests copy."""
    place = tmp_path_factory.mktemp("shared")
    P.fit(ridge=0.3).save_pretrained(place / "fit")
    P.fit(ridge=0.4).save_pretrained(place / "other")
    fitted("kfac")[0].save_pretrained(place / "laplace")
    model, x, y = numbers()
    linnet.TangentGP(model, Gaussian(variance=0.2)).fit(x, y).save_pretrained(place / "process")
    return place


@pytest.fixture
def fit_folder(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared / "fit", tmp_path / "fit"))


def load(place: Path) -> Any:
    return linnet.load(place, P.model)


@pytest.mark.parametrize("name", ["linear-fit.safetensors", LABELS])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated(name: str, share: float, fit_folder: Path) -> None:
    content = (fit_folder / name).read_bytes()
    (fit_folder / name).write_bytes(content[: int(share * len(content))])
    refused(FileFormatError, lambda: load(fit_folder), name)


@pytest.mark.parametrize("name", ["linear-fit.safetensors", LABELS])
def test_any_flipped_bit(name: str, fit_folder: Path) -> None:
    """The tensors, their names and every value of the JSON are under a checksum."""
    content, taken = (fit_folder / name).read_bytes(), 0
    for place in range(0, len(content), max(len(content) // 40, 1)):
        altered = bytearray(content)
        altered[place] ^= 1
        (fit_folder / name).write_bytes(bytes(altered))
        try:
            again = load(fit_folder)
        except (FileFormatError, InputError):
            continue
        taken += 1  # an ignored byte of the header or between the values: what is loaded is the same
        (fit_folder / name).write_bytes(content)
        torch.testing.assert_close(again.predict(P.x), load(fit_folder).predict(P.x))
    assert taken < 10


def test_values_of_the_json_cannot_be_edited(fit_folder: Path) -> None:
    text = (fit_folder / LABELS).read_text()
    (fit_folder / LABELS).write_text(text.replace('"ridge": 0.3', '"ridge": 0.5'))
    refused(FileFormatError, lambda: load(fit_folder), LABELS, "altered")
    (fit_folder / LABELS).write_text(json.dumps(json.loads(text)))  # spaces are free
    assert load(fit_folder).ridge == 0.3


@pytest.mark.parametrize("other", ["laplace", "process"])
def test_the_json_of_another_class(other: str, shared: Path, fit_folder: Path) -> None:
    shutil.copy(shared / other / LABELS, fit_folder / LABELS)
    refused(FileFormatError, lambda: load(fit_folder), "lacks", LABELS)
    refused(FileFormatError, lambda: linnet.load_fit(fit_folder, P.model), "says nothing of linear-fit")


def test_the_json_of_another_fit(shared: Path, fit_folder: Path) -> None:
    shutil.copy(shared / "other" / LABELS, fit_folder / LABELS)
    refused(FileFormatError, lambda: load(fit_folder), "altered")


@pytest.mark.parametrize("folder", ["fit", "laplace"])
def test_a_missing_file(folder: str, shared: Path, tmp_path: Path) -> None:
    names = [path.name for path in (shared / folder).iterdir() if path.name != CARD]
    net = P.model if folder == "fit" else classes()[0]
    for name in names:
        place = Path(shutil.copytree(shared / folder, tmp_path / name))
        (place / name).unlink()
        refused(FileFormatError, lambda place=place: linnet.load(place, net), LABELS)
    place = Path(shutil.copytree(shared / folder, tmp_path / "all"))
    (place / CARD).unlink()
    assert linnet.load(place, net) is not None


def rewritten(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A JSON that somebody has made, with its checksum: it is no signature."""
    content = read_labels(place / LABELS)
    change(content)
    write_json(place / LABELS, content, LABELS_KIND)


def test_a_newer_version(fit_folder: Path) -> None:
    label = json.loads((fit_folder / LABELS).read_text())
    (fit_folder / LABELS).write_text(json.dumps({**label, "version": 2}))
    refused(FileFormatError, lambda: load(fit_folder), "version 2", "upgrade linnet")
    (fit_folder / LABELS).write_text(json.dumps(label))
    rewritten(fit_folder, lambda content: content["files"]["linear-fit.safetensors"].update(version=2))
    refused(FileFormatError, lambda: load(fit_folder), "version 2", "upgrade linnet")


@pytest.mark.parametrize(
    "name",
    ["../linear-fit.safetensors", "a/b.safetensors", "C:x.safetensors", "..\\x.safetensors", "x.pkl", ""],
)
def test_names_of_files_elsewhere(name: str, fit_folder: Path) -> None:
    shutil.copy(fit_folder / "linear-fit.safetensors", fit_folder.parent)

    def moved(content: dict[str, Any]) -> None:
        content["files"] = {name: content["files"]["linear-fit.safetensors"]}

    rewritten(fit_folder, moved)
    refused(FileFormatError, lambda: load(fit_folder), "no label that can be read", "own folder")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content.update(files=[]),
        lambda content: content.update(files={}),
        lambda content: content.update(holds="../fit"),
        lambda content: content.update(holds=None),
        lambda content: content.update(holds=["linear-fit"]),
        lambda content: content["files"].update({"linear-fit.safetensors": 3}),
        lambda content: content["files"]["linear-fit.safetensors"].update(sha256=None),
        lambda content: content["files"]["linear-fit.safetensors"].pop("metadata"),
        lambda content: content["files"]["linear-fit.safetensors"].update(order=[["x"]]),
        lambda content: content["files"]["linear-fit.safetensors"].update(kind="laplace"),
        lambda content: content["files"]["linear-fit.safetensors"].update(format="other"),
    ],
)
def test_a_json_that_makes_no_sense(change: Callable[[dict[str, Any]], object], fit_folder: Path) -> None:
    rewritten(fit_folder, change)
    with pytest.raises(FileFormatError):
        load(fit_folder)


@pytest.mark.parametrize("metadata", [{}, {"ridge": "large"}, {"ridge": {"a": [None]}}])
@pytest.mark.parametrize("kind", sorted(READERS))
def test_whole_files_that_say_nothing(kind: str, metadata: dict[str, Any], tmp_path: Path) -> None:
    """Checksums say that a file is as it was written, not that linnet wrote it."""
    save_tensors(tmp_path, kind, {"delta": torch.ones(2)}, metadata)
    with pytest.raises(FileFormatError, match=kind):
        linnet.load(tmp_path, P.model)


def test_a_json_that_is_no_file(fit_folder: Path) -> None:
    (fit_folder / LABELS).unlink()
    (fit_folder / LABELS).mkdir()
    with pytest.raises(InputError, match=LABELS):
        load(fit_folder)
    (fit_folder / LABELS).rmdir()
    os.mkfifo(fit_folder / LABELS)
    refused(InputError, lambda: load(fit_folder), "pipe")


def test_links_of_the_hubs_cache_are_read(fit_folder: Path, tmp_path: Path) -> None:
    """The cache of huggingface_hub holds links; one into nothing, or to another file, is refused."""
    place = tmp_path / "snapshot"
    place.mkdir()
    for name in ("linear-fit.safetensors", LABELS):
        (place / name).symlink_to(fit_folder / name)
    assert load(place).n == 7
    (place / "linear-fit.safetensors").unlink()
    (place / "linear-fit.safetensors").symlink_to(tmp_path / "nothing")
    refused(FileFormatError, lambda: load(place), "lacks linear-fit.safetensors")
    (place / "linear-fit.safetensors").unlink()
    (place / "linear-fit.safetensors").symlink_to(fit_folder / CARD)
    refused(FileFormatError, lambda: load(place), "cannot be read as safetensors")


def test_another_network(fit_folder: Path) -> None:
    refused(FileFormatError, lambda: linnet.load(fit_folder, network(seed=5)), "weights differ")


def test_a_posterior_of_two_folders(shared: Path, tmp_path: Path) -> None:
    """Each file with a label of its own, and both made anew for one JSON: they were not saved together."""
    one, two = Path(shutil.copytree(shared / "laplace", tmp_path / "one")), tmp_path / "two"
    _, x, y = fitted("kfac")
    Laplace(classes()[0], Categorical(), "diagonal").fit((x, y)).save_pretrained(two)
    shutil.copy(two / "curvature.safetensors", one / "curvature.safetensors")
    foreign = read_labels(two / LABELS)["files"]["curvature.safetensors"]
    rewritten(one, lambda content: content["files"].update({"curvature.safetensors": foreign}))
    refused(FileFormatError, lambda: linnet.load(one, classes()[0]), "not saved together")
