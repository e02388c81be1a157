"""A small web server for one person: bound to this machine, opened by a key, and with one page.

Every request needs the key that was made when the server began, in its address or a header, and a Host of
this machine, so that no other page in the same browser can ask. The page runs the one script that it is sent
with, and talks to nobody else.
"""

from __future__ import annotations

import hmac
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from linnet.app.serve.session import Session
from linnet.errors import InputError, LinnetError
from linnet.files import finite
from linnet.memory import format_bytes

HOST = "127.0.0.1"
LARGEST = 32 << 20  # bytes of a request: a photograph has a few million
_DIGITS = 4300  # of a number that Python reads; more are refused by it
PATIENCE = 30.0  # seconds that a connection may be silent


class Server(ThreadingHTTPServer):
    """The server of one session."""

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session, self.key = session, secrets.token_hex(16)
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is nobody's fault."""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of the page."""

    server: Server
    server_version, sys_version = "linnet", ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        """The page."""
        place = urlsplit(self.path)
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
            answer = self._answer(urlsplit(self.path).path, content)
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
        if path == "/restore":
            return session.restore()
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
        known = self.headers.get("Host") in hosts and (origin is None or urlsplit(origin).netloc in hosts)
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
