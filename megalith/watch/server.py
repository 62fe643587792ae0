"""Serves the live page to browsers on this machine, at 127.0.0.1 with a token in the address. Uses only the standard library.
Other users of the machine, and any page in a browser, may send requests to 127.0.0.1. Each request therefore needs the token and
the right Host header. A request must arrive within HEAD_SECONDS, and the client must read its reply within SEND_SECONDS. At most
CONNECTIONS connections are open at a time.
"""

import contextlib
import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from megalith import disk
from megalith.spec.alerts import AlertsSpec
from megalith.watch import causes, page, panels
from megalith.watch.alerts import Alerts
from megalith.watch.source import Source

CONNECTIONS, STREAMS = 48, 12  # open connections: all, and those that pages keep open for news
HEAD_SECONDS, SEND_SECONDS = 5.0, 10.0
HEAD_BYTES, BODY_BYTES = 16 << 10, 4 << 10
POLL_SECONDS = 0.5  # between looks at the logs
ALERT_SECONDS = 2.0  # between looks for news
END_SECONDS = 2.0  # at most until a look at the logs that is under way has ended
BEAT_SECONDS = 10.0  # at most between two words of a stream, so that a closed one is noticed
STREAM_SECONDS = 3600.0  # that a stream lasts; a page opens the next by itself
SHARE = 0.0005  # of a core that the same question about a panel may take, however often it is asked
STANDS, FRESH = 60.0, {"alive": 5.0}  # most seconds that an answer is kept, for panels that show how long ago something was
KEPT = 64  # answers that are kept

FIRST = ("alive", "loss", "speed", "rank-heatmap")
"""Panels whose data are included in the page, so that the page can draw them without a request."""

TYPES = {"json": "application/json", "html": "text/html; charset=utf-8", "stream": "text/event-stream", "text": "text/plain"}
_PHRASES = {200: "OK", 202: "Accepted", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
            408: "Request Timeout", 413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip

Order = Callable[[Source, Mapping[str, Any]], str]
"""A function that carries out an order that the page gives for a run, and describes the result. Raises ValueError for an unknown
order."""


@dataclass(frozen=True)
class Request:
    """The parts of an HTTP request that this server reads."""

    method: str
    path: str
    asked: Mapping[str, str]
    head: Mapping[str, str]
    body: bytes


class _Refused(Exception):  # noqa: N818  # it is an answer
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Server:
    """Serves one page about some runs. Everyone who has `address` may read the page. The server's threads are daemons, so they
    end with the process."""

    def __init__(
        self, sources: Sequence[Source], *, port: int = 0, order: Order | None = None, rules: AlertsSpec | None = None
    ) -> None:
        """`order`: a function that carries out orders from pages that also have the second token; None: the server accepts no
        orders. `rules`: the alerts. Raises OSError if the port is taken."""
        self.sources, self._order = sources, order
        self._alerts = [] if rules is None else [Alerts(source, rules) for source in sources]
        for source in sources:
            source.served = True
        self._token, self.second = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._socket = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port = self._socket.getsockname()[1]
        self._open, self._streams = threading.BoundedSemaphore(CONNECTIONS), threading.BoundedSemaphore(STREAMS)
        self._looked = -math.inf
        self._answers: dict[tuple[str, ...], tuple[float, bytes]] = {}  # until when each stands
        self._keeping = threading.Lock()
        self._news, self._done = threading.Condition(), threading.Event()
        self._following = threading.Thread(target=self._follow, daemon=True)

    @property
    def address(self) -> str:
        """Address at which a browser on this machine can open the page."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    @property
    def acting_address(self) -> str:
        """The address for users who may also give orders. This address has the second token after #, which browsers do not send."""
        return f"{self.address}#act={self.second}"

    def start(self) -> None:
        """Start threads that serve the page and follow the runs."""
        threading.Thread(target=self._accept, daemon=True).start()
        self._following.start()

    def close(self) -> None:
        """End the server and its threads. After this call, its sources may be closed."""
        self._done.set()
        with self._news:
            self._news.notify_all()
        self._socket.close()
        if self._following.is_alive():
            self._following.join(END_SECONDS)

    def _follow(self) -> None:
        while not self._done.is_set():
            began, busy = time.monotonic(), False
            for source in self.sources:
                while not self._done.is_set() and source.poll() and time.monotonic() - began < POLL_SECONDS:
                    busy = True
                busy |= source.behind
                if not source.behind and self._look_for_causes(source):
                    busy = True
            self._alert()
            if busy:
                with self._news:
                    self._news.notify_all()
            if not any(source.behind for source in self.sources):
                self._done.wait(POLL_SECONDS)

    def _alert(self) -> None:
        if not self._alerts or time.monotonic() < self._looked + ALERT_SECONDS:
            return
        self._looked = time.monotonic()
        for alerts in self._alerts:
            for alert in alerts.check(self._looked):
                print(f"alert: {alert.text}", file=sys.stderr, flush=True)

    def _look_for_causes(self, source: Source) -> bool:
        """Search for the causes of long steps; return True if they have changed. Only this thread adds events to a source, so no
        lock is needed to read the source."""
        before = source.causes
        try:
            causes.refresh(source)
        except Exception as error:  # whatever is wrong with a run's files, its page goes on without them
            source.causes = source.revision, time.monotonic() + causes.LONGEST, causes.CauseReport()
            print(f"the causes of long steps are unknown: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if source.causes is not before:
            with source.lock:  # the thread that predicts counts too
                source.revision += 1
            source.causes = (source.revision, *source.causes[1:]) if source.causes else None
            return True
        return False

    def _accept(self) -> None:
        while not self._done.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._open.acquire(blocking=False):
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(0.0)
                    connection.send(_head(503, "text", 0))
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                try:
                    self._answer(connection, _read(connection))
                except _Refused as refused:
                    _send(connection, _head(refused.status, "text", 0))
                except OSError:
                    raise
                except Exception as error:  # must not end the server, whatever is wrong with a run's files
                    print(f"a request could not be answered: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    _send(connection, _head(500, "text", 0))
        finally:
            self._open.release()

    # Requests

    def _answer(self, connection: socket.socket, request: Request) -> None:
        if request.head.get("host", "") not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            raise _Refused(403)  # another name that leads here: a foreign page's
        _, token, *rest = [*request.path.split("/"), "", ""][: max(2, request.path.count("/") + 1)]
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise _Refused(404)
        match request.method, rest:
            case "GET", [""]:
                data = [{name: panels.panel(source, name) for name in FIRST} for source in self.sources]
                names = [source.title for source in self.sources]
                whole = page.live(names, data, acts=self._order is not None).encode()
                _send(connection, _head(200, "html", len(whole), page.policy(live=True)) + whole)
            case "GET", ["news"]:
                self._stream(connection)
            case "GET", ["panel", name] if name in panels.PANELS:
                self._panel(connection, name, request.asked)
            case "POST", ["order"]:
                self._obey(connection, request)
            case "GET", _:
                raise _Refused(404)
            case _:
                raise _Refused(405)

    def _source(self, asked: Mapping[str, Any]) -> Source:
        at = panels.whole({"run": str(asked.get("run", 0))}, "run", 0)
        if at >= len(self.sources):
            raise _Refused(404)
        return self.sources[at]

    def _panel(self, connection: socket.socket, name: str, asked: Mapping[str, str]) -> None:
        whole, stands = self._panel_data(self._source(asked), name, asked)
        _send(connection, _head(200, "json", len(whole), more=(f"X-Megalith-Stands: {stands:.1f}",)) + whole)

    def _panel_data(self, source: Source, name: str, asked: Mapping[str, str]) -> tuple[bytes, float]:
        """Return the data of a panel as JSON, and the seconds for which they are reused: so long that computing them takes at
        most SHARE of a core, but for at most STANDS seconds (FRESH for some panels)."""
        key = (name, *(f"{one}={asked[one]}" for one in sorted(asked)))
        kept = self._answers.get(key)
        if kept is not None and time.monotonic() < kept[0]:
            return kept[1], kept[0] - time.monotonic()
        began = time.thread_time()
        whole = json.dumps(panels.panel(source, name, asked), separators=(",", ":"), default=str).encode()
        stands = min((time.thread_time() - began) / SHARE, FRESH.get(name, STANDS))
        with self._keeping:
            self._answers.pop(key, None)  # it goes to the end: the first was made longest ago
            self._answers[key] = time.monotonic() + stands, whole
            if len(self._answers) > KEPT:
                del self._answers[next(iter(self._answers))]
        return whole, stands

    def _obey(self, connection: socket.socket, request: Request) -> None:
        given = request.head.get("x-megalith-act", "")
        if self._order is None or not hmac.compare_digest(given.encode(), self.second.encode()):
            raise _Refused(403)
        try:
            wanted = json.loads(request.body)
            words = self._order(self._source(wanted), wanted)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            whole = json.dumps({"ok": False, "words": str(error)}).encode()
            _send(connection, _head(400, "json", len(whole)) + whole)
            return
        whole = json.dumps({"ok": True, "words": words}).encode()
        _send(connection, _head(202, "json", len(whole)) + whole)

    def _stream(self, connection: socket.socket) -> None:
        """Send the revision numbers of all runs' data whenever one changes, for at most STREAM_SECONDS or until the page closes
        the connection."""
        if not self._streams.acquire(blocking=False):
            raise _Refused(503)
        try:
            _send(connection, _head(200, "stream", None))
            until, last = time.monotonic() + STREAM_SECONDS, ""
            while not self._done.is_set() and time.monotonic() < until:
                now = json.dumps([source.revision for source in self.sources])
                _send(connection, b": still there\n\n" if now == last else f"data: {now}\n\n".encode())
                last = now
                with self._news:
                    self._news.wait(BEAT_SECONDS)
                self._done.wait(POLL_SECONDS)  # several pieces of news are one
        finally:
            self._streams.release()


def _read(connection: socket.socket) -> Request:
    """Read a request. Raises _Refused if the request is too slow, too long or invalid."""
    end, read = time.monotonic() + HEAD_SECONDS, b""
    while b"\r\n\r\n" not in read:
        read += _receive(connection, end)
        if len(read) > HEAD_BYTES:
            raise _Refused(413)
    first, *lines = read.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    body = read.partition(b"\r\n\r\n")[2]
    words = first.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        raise _Refused(400)
    head = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = head.get("content-length", "0")
    if not length.isdecimal() or int(length) > BODY_BYTES:
        raise _Refused(413)
    while len(body) < int(length):
        body += _receive(connection, end)
    try:
        parts = urlsplit(words[1])
        asked = dict(parse_qsl(parts.query, max_num_fields=32))
    except ValueError as error:
        raise _Refused(400) from error
    return Request(words[0], parts.path, asked, head, body[: int(length)])


def _receive(connection: socket.socket, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise _Refused(408)
    connection.settimeout(left)
    try:
        found = connection.recv(4096)
    except TimeoutError as error:
        raise _Refused(408) from error
    if not found:
        raise ConnectionResetError
    return found


def _send(connection: socket.socket, whole: bytes) -> None:
    """Send all data, or raise an error after SEND_SECONDS. Raises OSError."""
    end, rest = time.monotonic() + SEND_SECONDS, memoryview(whole)
    while rest:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        rest = rest[connection.send(rest[: 256 << 10]) :]


def _head(
    status: int,
    kind: str,
    length: int | None,
    policy: str = "default-src 'none'; frame-ancestors 'none'",
    more: Sequence[str] = (),
) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_PHRASES[status]}", "Connection: close", f"Content-Type: {TYPES[kind]}", "Cache-Control: no-store",
        f"Content-Security-Policy: {policy}", "X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer",
        "Cross-Origin-Resource-Policy: same-origin", "Cross-Origin-Opener-Policy: same-origin", "X-Frame-Options: DENY",
    ]  # fmt: skip
    lines += [*more, *([] if length is None else [f"Content-Length: {length}"])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def write(sources: Sequence[Source], path: Path) -> None:
    """Write the current page of some runs as one self-contained file."""
    data = [{name: panels.panel(source, name) for name in panels.PANELS} for source in sources]
    disk.write_whole(path, page.standing([source.title for source in sources], data))
