"""`linnet serve`: the page, its requests, and who may ask."""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linnet.app.runs.folder import load_run
from linnet.app.serve.server import LARGEST, Asked, Server, Session, _with_columns
from linnet.errors import DataError, InputError
from tests.app.runs.small_tasks import linnet, pictures
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[3]


class Browser:
    """What a page does."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=HANGS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        with contextlib.closing(connection), connection.getresponse() as answer:
            return answer.status, answer.headers, answer.read()

    def raw(self, method: str, path: str, host: str, key: str, *twice: str) -> int:
        """The status of a request, some headers of which are sent twice."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=HANGS)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": host, "X-Linnet-Key": key, "Content-Length": "0"}.items():
            for _ in range(1 + (name in twice)):
                connection.putheader(name, value)
        connection.endheaders()
        with contextlib.closing(connection), connection.getresponse() as answer:
            return answer.status

    def json(self, path: str, body: bytes = b"", name: str = "", status: int = 200) -> dict[str, Any]:
        found = self.ask("POST", path, body, X_Linnet_Key=self.server.key, X_Name=name)
        assert found[0] == status, found[2]
        value: dict[str, Any] = json.loads(found[2])
        return value


def served(folder: Path) -> Iterator[Browser]:
    with Server(Session(load_run(folder), folder.name)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Browser(server)
        server.shutdown()
        thread.join()


@pytest.fixture
def images(workshop: Path) -> Iterator[Browser]:
    yield from served(workshop / "pictures")


@pytest.fixture
def rows(workshop: Path) -> Iterator[Browser]:
    yield from served(workshop / "prices")


def png(label: int, seed: int = 7) -> bytes:
    buffer = io.BytesIO()
    image = pictures(np.array([label]), seed=seed)[0]
    Image.fromarray(image.squeeze()).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["images", "rows"])
def test_test_samples_are_offered_and_predicted(kind: str, request: pytest.FixtureRequest) -> None:
    browser: Browser = request.getfixturevalue(kind)
    offered = browser.json("/samples")["samples"]
    assert 1 < len(offered) <= 12
    assert all((one["picture"] is not None) == (kind == "images") for one in offered)
    for one in (offered[0], offered[-1]):
        found = browser.json("/try", one["id"].encode())["sample"]
        known = "label" if kind == "images" else "target"
        assert found["findings"][0] == f"Its {known} is {one['label']}."
    refused = browser.json("/try", b"../../etc/passwd", status=400)
    assert "none of the samples that are offered" in refused["error"]


def test_an_image_is_predicted_explained_and_its_samples_forgotten(images: Browser, workshop: Path) -> None:
    about = images.json("/about")
    assert (about["kind"], about["classes"]) == ("image", ["across", "along", "slanted"])
    found = images.json("/predict", png(1), "a%20drop.PNG")
    sample = found["sample"]
    assert sample["predicted"] == "along"
    assert sum(c["probability"] for c in sample["classes"]) == pytest.approx(1)
    assert sample["output"]["std"] > 0
    assert sample["picture"].startswith("data:image/png;base64,")
    influences = [n["influence"] for n in sample["up"]]
    assert influences == sorted(influences, reverse=True)
    first = sample["up"][0]["id"]
    after = images.json("/forget", json.dumps([first]).encode())
    assert after["forgotten"] == [first]
    assert after["train"] == about["train"] - 1
    assert after["before"]["classes"] == sample["classes"]
    assert first not in [n["id"] for n in after["sample"]["up"]]
    # exactly the run without it, and the run's folder is as it was
    run = load_run(workshop / "pictures")
    gone = run.samples.ids.index(first)
    kept = run.fit.forget([gone])
    samples = run.samples.take(np.setdiff1d(np.arange(run.fit.n), [gone]))
    smaller = Session(replace(run, fit=kept, samples=samples))
    alone = smaller.predict("x.png", png(1))
    for one, two in zip(alone["sample"]["classes"], after["sample"]["classes"], strict=True):
        assert one["name"] == two["name"]
        assert one["probability"] == pytest.approx(two["probability"])
    back = images.json("/restore")
    assert back["forgotten"] == []
    assert back["sample"]["classes"] == sample["classes"]


def test_samples_of_a_session_are_watched_together(images: Browser, workshop: Path) -> None:
    for seed in range(19):
        assert not images.json("/predict", png(seed % 3, seed), "x.png")["watched"]
    assert images.json("/watch", status=400)["error"] == "19 samples were asked for"
    assert images.json("/predict", png(1, 19), "x.png")["watched"]
    found = images.json("/watch")
    run = load_run(workshop / "pictures")
    shown = np.concatenate(
        [pictures(np.array([seed % 3 if seed < 19 else 1]), seed=seed) for seed in range(20)]
    )
    (record,) = run.fit.monitor(run.inputs(shown.reshape(20, *shown.shape[1:3], 1)))
    assert (found["n"], found["drifted"], found["rms_error"]) == (20, record.drifted, None)
    assert found["accuracy"] == pytest.approx(record.accuracy, abs=1e-6)
    assert found["p_value"] == pytest.approx(record.p_value)
    black = io.BytesIO()
    Image.fromarray(np.zeros_like(shown[0]).squeeze()).save(black, "PNG")
    for _ in range(40):
        images.json("/predict", black.getvalue(), "x.png")
    drifted = images.json("/watch")
    assert drifted["drifted"]
    assert set(drifted["leans"]) <= set(run.samples.ids)


def test_a_row_is_predicted_with_or_without_the_names_of_its_columns(rows: Browser, workshop: Path) -> None:
    about = rows.json("/about")
    assert (about["kind"], about["classes"]) == ("row", None)
    lines = (workshop / "prices.csv").read_text().splitlines()
    whole = rows.json("/predict", f"{lines[0]}\n{lines[5]}\n".encode())
    at = [lines[0].split(",").index(name) for name in about["columns"]]
    values = [lines[5].split(",")[i] for i in at]
    for text in (",".join(values), ";".join(values), "\t".join(values)):
        (value,) = rows.json("/predict", text.encode())["sample"]["values"]
        assert value == pytest.approx(whole["sample"]["values"][0], rel=1e-5)
    assert whole["sample"]["values"][0]["std"] > 0
    assert whole["sample"]["findings"] == []
    empty = rows.json("/predict", ",".join(["nan", *values[1:]]).encode())["sample"]["findings"]
    assert f"{about['columns'][0]} is empty in 1 of 1 lines and in no training line" in empty[0]
    told = rows.json("/predict", b"1,2", status=400)
    assert told["error"] == "the row has 2 values"
    assert about["columns"][0] in told["expected"]
    assert "the names of all its columns" in told["remedy"]
    for several in (lines[:3], lines[1:4]):
        told = rows.json("/predict", "\n".join(several).encode(), status=400)
        assert told["error"] == "3 lines were sent"
        assert "one row at a time" in told["remedy"]
    empty_row = rows.json("/predict", b"," * (len(values) - 1), status=400)
    assert empty_row["error"] == "the row is empty"
    assert "row" in rows.json("/predict", ",".join(["red"] * len(values)).encode(), status=400)["error"]
    assert rows.json("/predict", b" \n", status=400)["error"] == "nothing was sent"
    assert rows.json("/predict", b"\xff\xfe\x00", status=400)["error"] == "the row is not text"


def test_a_row_whose_cells_are_quoted_has_as_many_values_as_cells() -> None:
    columns = ["city", "size, m2", "n"]
    for row in ('"Paris, FR",100.0,2', "Oslo,100.0,2", '"a;b;c;d;e",1,2', '"Paris, FR";100;2'):
        named, kept = _with_columns(row, columns).splitlines()
        mark = ";" if row.count(";") == 2 else ","
        assert kept == row
        assert next(csv.reader([named], delimiter=mark)) == columns
    with pytest.raises(DataError, match="the row has 4 values"):
        _with_columns("Paris, FR,100.0,2", columns)


def test_files_that_are_no_images_and_ids_of_no_sample(images: Browser) -> None:
    damaged = images.json("/predict", b"not an image", "a.png", status=400)
    assert damaged["error"].startswith("the image cannot be decoded: a.png (")
    assert tempfile.gettempdir() not in damaged["error"]
    assert "--damaged" not in damaged["remedy"]
    for name, said in (("../../etc/passwd", "passwd is no"), ("b.HEIC", "b.HEIC is no"), ("", "has no name")):
        told = images.json("/predict", png(0), name, status=400)
        assert said in told["error"]
        assert ".jpg" in told["expected"]
    assert "no list" in images.json("/forget", b"{}", status=400)["error"]
    assert "no list" in images.json("/forget", b"[1]", status=400)["error"]
    assert "no list" in images.json("/forget", b"[" * 100_000, status=400)["error"]
    assert "none of" in images.json("/forget", b'["train/999"]', status=400)["error"]
    everything = json.dumps([f"train/{i}" for i in range(images.json("/about")["train"])]).encode()
    assert "all" in images.json("/forget", everything, status=400)["error"]
    assert images.json("/elsewhere", status=404) == {"error": "unknown"}


def test_only_the_page_may_ask(images: Browser) -> None:
    server = images.server
    here = f"127.0.0.1:{server.server_port}"
    key = {"X_Linnet_Key": server.key}
    for headers in (
        {}, {"X_Linnet_Key": "0" * 32}, {"X_Linnet_Key": "é"},
        {**key, "Host": "example.org"}, {**key, "Host": f"evil.example:{server.server_port}"},
        {**key, "Origin": "http://evil.example"}, {**key, "Origin": "null"}, {**key, "Origin": "http://["},
    ):  # fmt: skip
        assert images.ask("POST", "/about", **headers)[0] == 403, headers
    assert images.ask("POST", "/about", **key, Origin=f"http://{here}")[0] == 200
    assert images.ask("GET", "/")[0] == 403
    assert images.ask("GET", f"/?key={server.key[:-1]}")[0] == 403
    assert images.ask("GET", f"/other?key={server.key}")[0] == 404
    assert images.ask("PUT", "/", **key)[0] == 501
    assert images.ask("POST", "/predict", **key, Content_Length=str(LARGEST + 1))[0] == 413
    assert images.ask("POST", "/predict", **key, Content_Length="-1")[0] == 411
    assert images.ask("POST", "/predict", **key, Content_Length="9" * 5000)[0] == 413
    for twice in (["Host"], ["Content-Length"]):
        assert images.raw("POST", "/about", here, server.key, *twice) == 400
    assert images.raw("POST", "/about", here, server.key) == 200
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_runs_one_script_and_loads_nothing(images: Browser) -> None:
    status, headers, content = images.ask("GET", f"/?key={images.server.key}")
    page = content.decode()
    assert status == 200
    policy = headers["Content-Security-Policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)
    assert nonce is not None
    assert page.count(f'<script nonce="{nonce[1]}">') == page.count("<script") == 1
    assert "{nonce}" not in page
    assert "{key}" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"\son[a-z]+=|innerHTML|\sstyle=", page)
    assert headers["Cache-Control"] == "no-store"
    again = images.ask("GET", f"/?key={images.server.key}")[1]["Content-Security-Policy"]
    assert again != policy


def test_ports_that_cannot_be_had(workshop: Path) -> None:
    session = Session(load_run(workshop / "prices"))
    with Server(session) as server, pytest.raises(InputError, match=f"port {server.server_port} cannot"):
        Server(session, server.server_port)


@pytest.mark.long
def test_the_command_serves_until_it_is_interrupted(workshop: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "linnet", "serve", "--run", "prices", "--json", "--trust"],
        cwd=workshop, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = process.stderr.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?key=([0-9a-f]{32})", address)
        assert found is not None, address
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=HANGS)
        with contextlib.closing(connection):
            connection.request("POST", "/about", b"", {"X-Linnet-Key": found[2]})
            assert json.loads(connection.getresponse().read())["name"] == "prices"
        process.send_signal(signal.SIGINT)
        assert json.loads(process.communicate(timeout=HANGS)[0])["port"] == int(found[1])
        assert process.returncode == 0
    finally:
        process.kill()


TOKENS = """
import torch
from torch import nn

def bag():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 6), nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3))
"""


def test_a_run_on_token_ids_takes_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(TOKENS)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 12, (30, 4)), np.arange(30) % 3
    x[:, 0] = 4 * y + x[:, 0] % 3
    np.savez(tmp_path / "ids.npz", x_train=x[:24], y_train=y[:24], x_test=x[24:], y_test=y[24:])
    words = (
        "--data",
        tmp_path / "ids.npz",
        "--model",
        f"{tmp_path / 'nets.py'}:bag",
        "--out",
        tmp_path / "run",
    )
    linnet("adapt", *words)
    session = Session(load_run(tmp_path / "run", trust=True))
    found = session.predict("", b"4, 1, 2, 3")
    wanted = load_run(tmp_path / "run", trust=True).predict(np.array([[4, 1, 2, 3]])).probs
    assert wanted is not None
    assert found["sample"]["classes"][0]["probability"] == pytest.approx(float(wanted.max()))
    with pytest.raises(DataError, match=r"4\.5"):
        session.predict("", b"4.5, 1, 2, 3")


class Sums(Asked[tuple[int, ...], int]):
    """A session whose run is a list of numbers, and whose samples are divided by their sum."""

    def about(self) -> dict[str, Any]:
        return {}

    def _ids(self, run: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(map(str, run))

    def _without(self, run: tuple[int, ...], ids: Sequence[str]) -> tuple[int, ...]:
        return tuple(one for one in run if str(one) not in ids)

    def _read(self, name: str, content: bytes) -> int:
        return int(content)

    def _predicted(self, run: tuple[int, ...], new: int, behind: bool = True) -> dict[str, Any]:
        return {"value": new / sum(run)}


def test_a_request_that_fails_changes_nothing() -> None:
    session = Sums((1, -1, 2))
    assert session.predict("", b"6")["sample"] == {"value": 3.0}
    with pytest.raises(ZeroDivisionError):
        session.forget(["2"])
    assert session.forget(["1"]) == {
        "train": 2, "forgotten": ["1"], "sample": {"value": 6.0}, "before": {"value": 3.0},
    }  # fmt: skip
    with pytest.raises(ValueError, match="six"):
        session.predict("", b"six")
    assert session.restore()["sample"] == {"value": 3.0}
