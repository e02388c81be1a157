"""A small web server for one person: bound to this machine, opened by a key, and with one page.

Every request needs the key that was made when the server began, in its address or a header, and a Host of
this machine, so that no other page in the same browser can ask. The page runs the one script that it is sent
with, and talks to nobody else. Nothing is written: forgetting changes the session alone.
"""

from __future__ import annotations

import contextlib
import csv
import hmac
import io
import json
import os
import secrets
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import numpy as np

from linnet.app.data import ImageTransform
from linnet.app.data.folder import SUFFIXES, UNDAMAGED
from linnet.app.data.task import SampleSet
from linnet.app.runs.changes import forget
from linnet.app.runs.folder import SavedRun
from linnet.app.runs.held_out import load_test
from linnet.app.runs.samples import NewSamples, answer_in_words, read_new
from linnet.errors import DataError, InputError, LinnetError
from linnet.files import finite
from linnet.memory import format_bytes
from linnet.report.reading import explanations
from linnet.report.tiles import thumbnail

HOST = "127.0.0.1"
LARGEST = 32 << 20  # bytes of a request: a photograph has a few million
_DIGITS = 4300  # of a number that Python reads; more are refused by it
PATIENCE = 30.0  # seconds that a connection may be silent
_BEHIND = 8  # training samples shown on each side of a prediction
_PIXELS = 96
# Samples that are looked at together: the last so many, and from so many on. Of 20 the standard error of
# the accuracy is about a tenth.
_WINDOW, _ENOUGH = 200, 20
_LISTED = 10  # classes whose probabilities are shown
_OFFERED = 12  # test samples that may be tried
Array = np.ndarray[Any, Any]
Run = TypeVar("Run")
Sample = TypeVar("Sample")


LEAVING = 2.0  # seconds that a connection is waited for when the server closes


class Server(ThreadingHTTPServer):
    """The server of one session."""

    daemon_threads = True

    def __init__(self, session: Asked[Any, Any], port: int = 0) -> None:
        self.session, self.key = session, secrets.token_hex(16)
        self.connections: dict[Any, threading.Thread] = {}  # connections, and what answers them
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port {port} cannot be opened on {HOST} ({getattr(error, 'strerror', None) or error})",
                expected="a free port of this machine, 1024 to 65535",
                remedy="leave --port out for one that is free",
            ) from error

    @property
    def address(self) -> str:
        """Where the page is, the key included."""
        return f"http://{HOST}:{self.server_port}/?key={self.key}"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, which is known while it lasts."""
        self.connections[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.pop(request, None)

    def server_close(self) -> None:
        """Close the connections too: a thread that is left when Python ends can abort the process."""
        super().server_close()
        for connection, thread in list(self.connections.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(LEAVING)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is nobody's fault."""


def _parsed(address: str) -> SplitResult:
    """The parts of an address; of none at all where it cannot be read."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of the page."""

    server: Server
    server_version, sys_version = "linnet", ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        """The page."""
        place = _parsed(self.path)
        if not self._is_ours(parse_qs(place.query).get("key", [""])[0]):
            return
        if place.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        nonce = secrets.token_urlsafe(16)
        source = files("linnet.app.serve").joinpath("page.html").read_text(encoding="utf-8")
        policy = (
            f"default-src 'none'; img-src data:; connect-src 'self'; script-src 'nonce-{nonce}'; "
            f"style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = source.replace("{nonce}", nonce).replace("{key}", self.server.key)
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), policy)

    def do_POST(self) -> None:
        """What the page asks."""
        if not self._is_ours(self.headers.get("X-Linnet-Key", "")):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._refuse(
                HTTPStatus.LENGTH_REQUIRED, "a request says how long it is: Content-Length is missing"
            )
            return
        if len(length) > _DIGITS or int(length) > LARGEST:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {format_bytes(LARGEST)}"
            )
            return
        content = self.rfile.read(int(length))
        try:
            answer = self._answer(_parsed(self.path).path, content)
        except LinnetError as error:
            told = {"error": error.what, "expected": error.expected, "remedy": error.remedy}
            self._send_json(HTTPStatus.BAD_REQUEST, told)
        except Exception as error:  # whatever it is, the page must be told
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})
        else:
            self._send_json(HTTPStatus.OK if answer else HTTPStatus.NOT_FOUND, answer or {"error": "unknown"})

    def _answer(self, path: str, content: bytes) -> dict[str, Any] | None:
        """The answer to a request; None for a path that is not known."""
        session = self.server.session
        if path == "/about":
            return session.about()
        if path == "/predict":
            return session.predict(unquote(self.headers.get("X-Name", "")), content)
        if path == "/samples":
            return {"samples": session.samples()}
        if path == "/try":
            return session.tried(content.decode("utf-8", "replace"))
        if path == "/restore":
            return session.restore()
        if path == "/watch":
            return session.watch()
        if path != "/forget":
            return None
        try:
            ids = json.loads(content)
        except (ValueError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise InputError("the ids are no list of texts", expected='such as ["train/3"]')
        return session.forget(ids)

    def _is_ours(self, key: str) -> bool:
        """Whether a request comes from the page, or from whoever was given its address; else refuse it."""
        if any(len(self.headers.get_all(name, [])) > 1 for name in ("Host", "Content-Length")):
            self._refuse(HTTPStatus.BAD_REQUEST, "a request has one Host and one Content-Length")
            return False
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        known = self.headers.get("Host") in hosts and (origin is None or _parsed(origin).netloc in hosts)
        if known and hmac.compare_digest(key.encode(), self.server.key.encode()):
            return True
        self.close_connection = True  # what follows has not been read
        self._refuse(HTTPStatus.FORBIDDEN, "open the address that linnet serve printed, key and all")
        return False

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """A short answer in words."""
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        """A record."""
        self._send(status, "application/json", json.dumps(finite(value), allow_nan=False).encode())

    def _send(
        self, status: HTTPStatus, kind: str, content: bytes, policy: str = "default-src 'none'"
    ) -> None:
        """An answer, never kept by the browser, framed, or read as another kind."""
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", policy),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address holds the key."""


# What the page asks of a run


class Asked(ABC, Generic[Run, Sample]):
    """One run, the sample at hand, and the training samples that were forgotten since it was opened."""

    # Requests come from several threads; one is answered at a time.

    def __init__(self, run: Run, name: str = "") -> None:
        self.name = name
        self._original = self._run = run
        self._sample: Sample | None = None
        self._lock = threading.RLock()

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the page shows before anything is asked."""

    @abstractmethod
    def _ids(self, run: Run) -> tuple[str, ...]:
        """The names of a run's training samples."""

    @abstractmethod
    def _without(self, run: Run, ids: Sequence[str]) -> Run:
        """A run without some of them."""

    @abstractmethod
    def _read(self, name: str, content: bytes) -> Sample:
        """The first sample of what was sent."""

    @abstractmethod
    def _predicted(self, run: Run, new: Sample, behind: bool = True) -> dict[str, Any]:
        """The prediction of the sample at hand by a run."""

    def predict(self, name: str, content: bytes) -> dict[str, Any]:
        """Predict one sample."""
        with self._lock:
            return self._answer(self._run, self._read(name, content))

    def samples(self) -> list[dict[str, Any]]:
        """Some of the run's own samples that may be tried; none by default."""
        return []

    def tried(self, name: str) -> dict[str, Any]:
        """Predict one of the run's own samples."""
        raise InputError(f"{name!r} is none of the samples that are offered", "one of the page")

    def forget(self, ids: Sequence[str]) -> dict[str, Any]:
        """Forget training samples, in this session alone."""
        with self._lock:
            return self._answer(self._without(self._run, list(ids)), self._sample, self._run)

    def restore(self) -> dict[str, Any]:
        """Take all forgotten samples back."""
        with self._lock:
            return self._answer(self._original, self._sample, self._run)

    def watch(self) -> dict[str, Any] | None:
        """What is known of the samples asked for so far, without their labels; None where nothing is."""
        return None

    def _counts(self) -> dict[str, Any]:
        """Training samples now, and those that were forgotten."""
        left = self._ids(self._run)
        forgotten = [name for name in self._ids(self._original) if name not in set(left)]
        return {"train": len(left), "forgotten": forgotten}

    def _answer(self, run: Run, sample: Sample | None, before: Run | None = None) -> dict[str, Any]:
        """The state of the session with a run and a sample, which it keeps once they have been answered."""
        predicted: dict[str, Any] = {}
        if sample is not None:
            predicted["sample"] = self._predicted(run, sample)
            if before is not None:
                predicted["before"] = self._predicted(before, sample, behind=False)
        self._run, self._sample = run, sample
        return {**self._counts(), **predicted}


class Session(Asked[SavedRun, NewSamples]):
    """A run on images or rows."""

    def __init__(self, run: SavedRun, name: str = "") -> None:
        super().__init__(run, name)
        self._seen: deque[Array] = deque(maxlen=_WINDOW)

    def predict(self, name: str, content: bytes) -> dict[str, Any]:
        """Predict one sample."""
        with self._lock:
            found = super().predict(name, content)
            assert self._sample is not None
            self._seen.append(self._sample.x[0])
            return {**found, "watched": len(self._seen) >= _ENOUGH}

    @cached_property
    def _offered(self) -> SampleSet | None:
        """Test samples to try, spread evenly over all; None where there are none any more."""
        task, _ = load_test(self._original)
        if task is None:
            return None
        places = np.linspace(0, len(task.test) - 1, min(_OFFERED, len(task.test)))
        return task.test.take(places.round().astype(np.int64))

    def samples(self) -> list[dict[str, Any]]:
        """Some of the run's test samples, with their answers."""
        with self._lock:
            part, run = self._offered, self._original
            if part is None:
                return []
            try:
                images = part.x if run.samples.images is not None else None
            except LinnetError:  # the files have changed since
                return []
            return [
                {
                    "id": name,
                    "label": answer_in_words(part.y[at], run.classes),
                    "picture": None if images is None else thumbnail(images[at], _PIXELS),
                }
                for at, name in enumerate(part.ids)
            ]

    def tried(self, name: str) -> dict[str, Any]:
        """Predict a test sample that is offered."""
        with self._lock:
            part = self._offered
            if part is None or name not in part.ids:
                return super().tried(name)
            one = part.take(np.array([part.ids.index(name)]))
            classes = self._original.classes
            told = f"Its {'target' if classes is None else 'label'} is {answer_in_words(one.y[0], classes)}."
            return self._answer(self._run, NewSamples(one.x, one.y, one.ids, (told,)))

    def watch(self) -> dict[str, Any]:
        """The accuracy to expect of the samples asked for so far, and whether they have drifted."""
        with self._lock:
            if len(self._seen) < _ENOUGH:
                raise InputError(
                    f"{len(self._seen)} samples were asked for", f"{_ENOUGH} or more", "ask more"
                )
            run = self._run
            (record,) = run.fit.monitor(run.inputs(np.stack(self._seen)))
            leans = [] if record.leans is None else record.leans.tolist()
            return {**json.loads(record.to_json()), "leans": [run.samples.ids[at] for at in leans]}

    def about(self) -> dict[str, Any]:
        """What the page shows before anything is asked."""
        run = self._original
        table = run.columns
        kind = "image" if isinstance(run.transforms[0], ImageTransform) else "row" if table else "numbers"
        return {
            "name": self.name,
            "kind": kind,
            "classes": run.classes,
            "columns": [] if table is None else [column.name for column in table.features],
            "numbers": int(np.prod(run.fit.x.shape[1:])) if kind == "numbers" else None,
            **self._counts(),
        }

    def _ids(self, run: SavedRun) -> tuple[str, ...]:
        return run.samples.ids

    def _without(self, run: SavedRun, ids: Sequence[str]) -> SavedRun:
        return forget(run, ids).after

    def _read(self, name: str, content: bytes) -> NewSamples:
        """The first sample of what was sent."""
        if not content.strip():
            raise InputError("nothing was sent", expected="an image file, or a row of values")
        with tempfile.TemporaryDirectory() as folder:
            about = self.about()
            if about["kind"] == "image":
                return self._image(Path(folder), PurePosixPath(name.replace("\\", "/")), content)
            text = text_of(content)
            if about["kind"] == "row":
                path = Path(folder) / "row.csv"
                path.write_text(_with_columns(text, about["columns"]), encoding="utf-8")
            else:
                path = Path(folder) / "row.npz"
                known = self._original.fit.x
                np.savez(path, x=_numbers(text, tuple(known.shape[1:]), not known.is_floating_point()))
            try:
                return read_new(path, self._original, prefer="test")
            except LinnetError as error:  # it names a file that nobody has seen
                what = error.what.replace(str(path), "the row")
                raise type(error)(what, error.expected, error.remedy) from error

    def _image(self, folder: Path, name: PurePosixPath, content: bytes) -> NewSamples:
        """An image that was sent, by way of a folder that errors do not name."""
        if name.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{name.name} is no image that is read here" if name.name else "the file has no name",
                expected=f"a file whose name ends in {', '.join(SUFFIXES)}",
                remedy="save it as .jpg or .png",
            )
        file = folder / f"sample{name.suffix.lower()}"
        file.write_bytes(content)
        try:
            return read_new(folder, self._original, prefer="test")
        except DataError as error:
            what = error.what.replace(f"1 of 1 images in {folder} ", "the image ")
            what = what.replace(f"{folder}{os.sep}", "").replace(file.name, name.name)
            remedy = "send a file that is whole" if error.remedy == UNDAMAGED else error.remedy
            raise DataError(what, error.expected, remedy) from error

    def _predicted(self, run: SavedRun, new: NewSamples, behind: bool = True) -> dict[str, Any]:
        """The prediction of the sample at hand by a run."""
        found = run.predict(new.x)
        std = None if found.std is None else found.std[0].tolist()
        result: dict[str, Any] = {"findings": [*new.findings, *([found.note] if found.note else [])]}
        if found.probs is not None and run.classes is not None:
            order = np.argsort(-found.probs[0], kind="stable")[:_LISTED].tolist()
            result["classes"] = [
                {"name": run.classes[i], "probability": float(found.probs[0, i])} for i in order
            ]
            result["predicted"] = run.classes[order[0]]
            spread = None if std is None else float(std[order[0]])
            result["output"] = {"value": float(found.mean[0, order[0]]), "std": spread}
        else:
            result["values"] = [
                {"value": float(value), "std": None if std is None else float(std[i])}
                for i, value in enumerate(found.mean[0])
            ]
        if behind:
            (made,) = explanations(run, new.x[:1], [0], found, _BEHIND)
            result |= {"up": [self._trained(run, n) for n in made.up]}
            result |= {"down": [self._trained(run, n) for n in made.down]}
            if run.samples.images is not None:
                result["picture"] = thumbnail(new.x[0], 2 * _PIXELS)
        return result

    @staticmethod
    def _trained(run: SavedRun, neighbor: Any) -> dict[str, Any]:
        """A training sample behind a prediction."""
        samples, at = run.samples, neighbor.sample
        assert samples.labels is not None
        return {
            "id": samples.ids[at],
            "label": answer_in_words(samples.labels[at], run.classes),
            "influence": neighbor.influence,
            "picture": None if samples.images is None else thumbnail(samples.images[at], _PIXELS),
        }


def text_of(content: bytes) -> str:
    """What was pasted."""
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError("the row is not text", expected="values in UTF-8", remedy="paste one line") from error


def _with_columns(text: str, columns: Sequence[str]) -> str:
    """A row below the names of its columns."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 2:
        raise DataError(
            f"{len(lines)} lines were sent",
            expected="one row, with or without a line of the columns' names above it",
            remedy="send one row at a time; linnet predict takes a whole table",
        )
    try:
        cells = {mark: next(csv.reader(lines[-1:], delimiter=mark)) for mark in ",;\t"}
    except csv.Error as error:
        raise DataError(f"the row cannot be read: {error}", "a row of a table", "paste one line") from error
    delimiter = max(cells, key=lambda mark: (len(cells[mark]) == len(columns), len(cells[mark])))
    row = cells[delimiter]
    if not any(cell.strip() for cell in row):
        raise DataError("the row is empty", f"values of {', '.join(columns)}", "fill in what is known")
    if len(lines) > 1:
        return "\n".join(lines) + "\n"
    if len(row) != len(columns):
        raise DataError(
            f"the row has {len(row)} values",
            expected=f"{len(columns)}, of {', '.join(columns)}",
            remedy="paste the first line of the table, with the names of all its columns, above the row",
        )
    named = io.StringIO()
    csv.writer(named, delimiter=delimiter, lineterminator="\n").writerow(columns)
    return f"{named.getvalue()}{lines[0]}\n"


def _numbers(text: str, shape: tuple[int, ...], whole: bool) -> Array:
    """Numbers as one sample, whole ones where the samples of the run are: token ids."""
    words = text.replace(",", " ").replace(";", " ").split()
    try:
        if whole:
            values = np.array([int(word) for word in words], dtype=np.int64)
        else:
            values = np.array([float(word) for word in words], dtype=np.float32)
    except (ValueError, OverflowError) as error:
        kind = "whole numbers" if whole else "numbers"
        raise DataError(f"{error}", expected=f"{kind} alone", remedy="separate them by commas") from error
    if len(values) != int(np.prod(shape)):
        wanted = f"{int(np.prod(shape))}, of shape {shape}"
        raise DataError(f"the row has {len(values)} numbers", expected=wanted, remedy="give one sample")
    return values.reshape(1, *shape)
