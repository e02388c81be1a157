"""`linnet export`: files that answer as the run does, and run without linnet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from linnet.app import cli
from linnet.app.runs import exporting
from linnet.app.runs.changes import forget
from linnet.app.runs.folder import SavedRun, load_run
from linnet.app.runs.held_out import load_test
from linnet.errors import DependencyError, InputError, ModelError
from linnet.tangent.graph import Prototype
from tests.app.runs.small_tasks import linnet
from tests.app.runs.test_questions import NAMES
from tests.hangs import HANGS

LOAD = """
import json, sys, numpy, torch
told = {"linnet.json": ""}
module = torch.export.load(sys.argv[1], extra_files=told).module()
found = module(torch.from_numpy(numpy.load(sys.argv[2])))
numpy.savez(sys.argv[3], **dict(zip(json.loads(told["linnet.json"])["outputs"], found)))
assert "linnet" not in sys.modules
"""


def answers(path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """What a .pt2 file gives in a process that does not know linnet."""
    np.save(path.with_name("x.npy"), x)
    words = [sys.executable, "-W", "ignore", "-I", "-c", LOAD, path, path.with_name("x.npy")]
    subprocess.run([*map(str, words), str(path.with_name("found.npz"))], check=True, timeout=HANGS)
    return dict(np.load(path.with_name("found.npz")))


class Pooled(nn.Module):
    """Numbers in a tuple, as a run's answers are, of images of any size."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(side), nn.Flatten())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


def raw(run: SavedRun) -> tuple[np.ndarray, torch.Tensor]:
    """Raw test samples of a run, and the network's inputs."""
    task, why = load_test(run)
    assert task is not None, why
    return task.test.x[:5], task.tensors("test")[0][:5]


@pytest.mark.long
def test_a_run_of_pictures_as_a_file(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linnet("export", "--run", workshop / "pictures", "--out", tmp_path / "model.pt2", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == NAMES
    assert told["outputs"] == ["outputs", "probabilities"]
    # nine positions, though 7 have as many
    assert told["input"] == "images, uint8 (N, H, W, C), each 8 × 8 × 1"
    run = load_run(workshop / "pictures")
    x, inputs = raw(run)
    found = answers(tmp_path / "model.pt2", x)
    torch.testing.assert_close(torch.from_numpy(found["outputs"]), run.fit.predict(inputs))
    assert run.temperatures is not None
    expected = (run.fit.predict(inputs) / run.temperatures[1]).softmax(1)
    torch.testing.assert_close(torch.from_numpy(found["probabilities"]), expected)


@pytest.mark.long
def test_a_class_of_which_no_sample_is_left_has_no_probability(workshop: Path, tmp_path: Path) -> None:
    run = load_run(workshop / "pictures")
    assert run.samples.labels is not None
    less = forget(run, [run.samples.ids[at] for at in np.flatnonzero(run.samples.labels == 2)]).after
    exporting.write_export(less, tmp_path / "model.pt2", variance=False)
    x = raw(run)[0]
    found = answers(tmp_path / "model.pt2", x)["probabilities"]
    assert not found[:, 2].any()
    np.testing.assert_allclose(found, less.predict(x, std=False).probs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_network_with_merged_weights_as_a_file(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", f"{workshop / 'nets.py'}:conv", "--data", workshop / "pictures.npz"]
    linnet("adapt", *words, "--weight", "0", "--out", tmp_path / "linear")
    linnet("adapt", *words, "--weight", "0.5", "--out", tmp_path / "lower")
    out = ["--out", tmp_path / "model.pt2", "--merge"]
    linnet("export", "--run", tmp_path / "linear", *out)
    run = load_run(tmp_path / "linear")
    x, inputs = raw(run)
    found, merged = answers(tmp_path / "model.pt2", x), run.fit.merge()
    torch.testing.assert_close(torch.from_numpy(found["outputs"]), merged.network(inputs).detach())
    for run_folder, more in (("lower", []), ("linear", ["--variance"])):
        linnet("export", "--run", tmp_path / run_folder, *out, "--overwrite", *more, code=2)
    assert "--weight 0" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_of_a_table_as_a_file(workshop: Path, tmp_path: Path) -> None:
    linnet("export", "--run", workshop / "prices", "--out", tmp_path / "model.pt2")
    run = load_run(workshop / "prices")
    told = {"linnet.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=told)
    assert run.columns is not None
    encoding = json.loads(told["linnet.json"])["encoding"]
    assert [(one["name"], one["fill"], one["marked"]) for one in encoding] == [
        (column.name, column.fill, column.marked) for column in run.columns.features
    ]
    x, inputs = raw(run)
    found = answers(tmp_path / "model.pt2", x.astype(np.float32))
    assert run.transforms[1] is not None
    expected = run.transforms[1].inverse(run.fit.predict(inputs))
    torch.testing.assert_close(torch.from_numpy(found["values"]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_files_that_cannot_be_written(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["export", "--traceback", "--run", str(workshop / "prices"), "--out"]
    for name in ("model.pt", "nowhere/model.pt2"):
        with pytest.raises(InputError, match=r"ends in \.onnx or \.pt2"):
            cli.main([*words, str(tmp_path / name)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(
        DependencyError, match=r"onnxscript, which is not installed.*torch\[onnx\].*or write --out model\.pt2"
    ):
        cli.main([*words, str(tmp_path / "model.onnx")])

    def export(*given: object, **named: object) -> None:
        raise torch.onnx.OnnxExporterError("no rule for aten.foo\nand many lines")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.onnx.export", export)
    with pytest.raises(
        ModelError, match=r"ONNX exporter of torch .* \(no rule for aten\.foo\).*write --out model\.pt2"
    ):
        cli.main([*words, str(tmp_path / "model.onnx")])
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("name", ["pictures", "prices"])
def test_a_run_in_onnx(workshop: Path, tmp_path: Path, name: str) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    linnet("export", "--run", workshop / name, "--out", tmp_path / "model.onnx")
    run = load_run(workshop / name)
    x, inputs = raw(run)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    told = json.loads(session.get_modelmeta().custom_metadata_map["linnet"])
    assert [out.name for out in session.get_outputs()] == told["outputs"]
    assert told["classes"] == (None if run.classes is None else list(run.classes))
    first = session.run(None, {"x": x if x.dtype == np.uint8 else x.astype(np.float32)})[0]
    expected = run.fit.predict(inputs)
    expected = expected if run.transforms[1] is None else run.transforms[1].inverse(expected)
    torch.testing.assert_close(torch.from_numpy(first), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_sizes_that_an_onnx_file_takes() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for side, least in ((1, [1, 1]), (2, [])):  # torch's exporter fixes the windows of the second pooling
        net = Pooled(side).eval()
        free = exporting._in_onnx(net, Prototype(x), ["outputs"])[1]
        assert [one.least for one in free] == least
    with pytest.raises(ModelError, match=r"onnxruntime does not run .*Conv.*write --out model\.pt2"):
        exporting._in_onnx(net.double(), Prototype(x.double()), ["outputs"])
