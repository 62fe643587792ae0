"""The server sends a run's page only to clients with its address, and nothing else to anybody, whatever the request."""

import contextlib
import ctypes
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.commands import watch
from megalith.watch import panels, server
from megalith.watch.server import Server
from megalith.watch.source import Source
from tests.patience import PATIENCE
from tests.report.run_folder import start, step, write_run

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    source = Source(write_run(tmp_path / "run"), predicts=False)
    source.poll()
    one = Server([source], order=lambda source, wanted: f"{source.name}: {wanted['what']}")
    one.start()
    yield one
    one.close()


def _ask(
    one: Server, path: str, *, method: str = "GET", head: Mapping[str, str] | None = None, body: str = ""
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, body or None, dict(head or {}))
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()


def _path(one: Server, rest: str = "") -> str:
    return one.address.partition(str(one.port))[2] + rest


def _raw(one: Server, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", one.port), timeout=20) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        found = b""
        with contextlib.suppress(OSError):
            while read := connection.recv(65536):
                found += read
        return found


def test_the_page_and_its_panels(served: Server) -> None:
    status, head, page = _ask(served, _path(served))
    assert status == 200 and "first light" in page
    assert head["cache-control"] == "no-store" and head["x-frame-options"] == "DENY" and head["referrer-policy"] == "no-referrer"
    assert not re.search(r"https?://", page.replace("http://www.w3.org", ""))
    for name in panels.PANELS:
        status, head, found = _ask(served, _path(served, f"panel/{name}?run=0"))
        assert status == 200 and isinstance(json.loads(found), dict), name
        assert 0 <= float(head["x-megalith-stands"]) <= 60, "the page need not ask again before"


@pytest.mark.slow
def test_a_panel_that_is_dear_to_make_stands_and_one_that_tells_of_time_does_not_for_long(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seconds, now = dict[str, int](), {"loss": 0.02, "alive": 0.02, "run": 0.0}, [1000.0]

    def panel(source: Source, name: str, asked: Mapping[str, str]) -> dict[str, Any]:
        end = time.thread_time() + seconds[name]
        while time.thread_time() < end:
            pass
        made[name + asked.get("from", "")] = made.get(name + asked.get("from", ""), 0) + 1
        return made

    monkeypatch.setattr(server.panels, "panel", panel)
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    for at in range(41):  # a page that sends a request each second
        now[0] = 1000.0 + at
        for name, asked in (("loss", {}), ("loss", {"from": "7"}), ("alive", {}), ("run", {})):
            whole, stands = served._panel_data(served.sources[0], name, asked)
            assert json.loads(whole) and 0 <= stands < 60
    assert made["loss"] in (1, 2) and made["loss7"] in (1, 2), "20 ms at half a thousandth of a core stand for 40 s"
    assert made["alive"] == 9 and made["run"] > 30


def test_the_server_is_on_this_machine_alone(served: Server) -> None:
    assert served._socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404), ("/x/", 404), ("/panel/alive", 404), ("/%2e%2e/etc/passwd", 404), ("//", 404), ("/../run.toml", 404),
        ("TOKEN/../../etc/passwd", 404), ("TOKENpanel/../events.jsonl", 404), ("TOKENevents.jsonl", 404),
        ("TOKENpanel/nothing", 404), ("TOKENpanel/alive?run=9", 404), ("TOKENpanel/alive?run=-1", 200),
        ("TOKENpanel/rank-heatmap?row=../../etc&sort=%00&columns=99999999999999999999&from=nan", 200), ("TOKENpanel/", 404),
        ("TOKENpanel/__class__", 404), ("TOKENorder", 404),
    ],
)  # fmt: skip
def test_paths_outside_of_it(path: str, status: int, served: Server) -> None:
    assert _ask(served, path.replace("TOKEN", _path(served)))[0] == status


def test_another_host_in_the_head_is_refused(served: Server) -> None:
    """A page from a foreign host whose name resolves to 127.0.0.1 must not be able to read it."""
    assert _ask(served, _path(served), head={"Host": f"evil.example:{served.port}"})[0] == 403
    assert _ask(served, _path(served), head={"Host": f"localhost:{served.port}"})[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x00\xff\x16\x03\x01" * 50 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET http://other.example/ HTTP/1.1\r\n\r\n", b"BREW /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n\r\n", b"A" * 100_000,
        b"POST /TOKEN/order HTTP/1.1\r\nHost: HOST\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /TOKEN/order HTTP/1.1\r\nHost: HOST\r\nContent-Length: -1\r\n\r\n", b"GET /" + b"a" * 15000 + b" HTTP/1.1\r\n\r\n",
        b"GET /TOKEN/panel/alive?" + b"a=b&" * 3000 + b" HTTP/1.1\r\nHost: HOST\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_garbage_gets_an_error_and_the_next_request_an_answer(
    sent: bytes, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    token, host = _path(served).strip("/").encode(), f"127.0.0.1:{served.port}".encode()
    found = _raw(served, sent.replace(b"TOKEN", token).replace(b"HOST", host))
    assert not found.startswith(b"HTTP/1.1 200")
    assert _ask(served, _path(served, "panel/alive"))[0] == 200


@pytest.mark.slow
def test_a_thousand_slow_clients_are_borne_and_gone_after_their_time(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 1.0)
    threads = threading.active_count()
    slow = []
    try:
        for _ in range(1000):
            one = socket.create_connection(("127.0.0.1", served.port), timeout=5)
            with contextlib.suppress(OSError):
                one.send(b"GET / HT")
            slow.append(one)
        assert threading.active_count() <= threads + server.CONNECTIONS
        end = time.monotonic() + 20
        while _ask(served, _path(served, "panel/alive"))[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        for one in slow:
            one.close()


def test_who_reads_slowly_holds_nothing_for_long(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS", 0.5)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        server._send(ours, b"x" * (64 << 20))


def test_news_come_when_the_log_grows_and_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = events.EventLog(tmp_path)
    log.write(start())
    monkeypatch.setattr(server, "STREAMS", 2)
    one = Server([Source(tmp_path, predicts=False)])
    one.start()
    host = f"GET {_path(one, 'news')} HTTP/1.1\r\nHost: 127.0.0.1:{one.port}\r\n\r\n".encode()
    streams = [socket.create_connection(("127.0.0.1", one.port), timeout=20) for _ in range(2)]
    for stream in streams:
        stream.sendall(host)
        read = b""
        while b"data: [" not in read:
            read += stream.recv(4096)
    assert b"503" in _raw(one, host).split(b"\r\n")[0]
    log.write(step(1))
    read = b""
    while b"data: [" not in read:
        read += streams[0].recv(4096)
    one.close()
    for stream in streams:
        stream.close()


def test_an_order_needs_the_second_token(served: Server) -> None:
    order = json.dumps({"run": 0, "what": "save"})
    for head in ({}, {"X-Megalith-Act": ""}, {"X-Megalith-Act": served._token}, {"X-Megalith-Act": "é"}):
        assert _ask(served, _path(served, "order"), method="POST", head=head, body=order)[0] == 403
    status, _, found = _ask(served, _path(served, "order"), method="POST", head={"X-Megalith-Act": served.second}, body=order)
    assert (status, json.loads(found)) == (202, {"ok": True, "words": "first light: save"})
    for wrong in ("", "[]", "null", "{", '{"run": 7, "what": "save"}'):
        status, _, found = _ask(served, _path(served, "order"), method="POST", head={"X-Megalith-Act": served.second}, body=wrong)
        assert status in (400, 404), wrong
    assert served.second not in _ask(served, _path(served))[2]


def test_text_of_a_run_is_never_part_of_the_page(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    begun = start()
    begun.spec["name"] = EVIL
    for event in (begun, step(1), events.Sample(1, EVIL, EVIL), events.Problem("error", EVIL)):
        log.write(event)
    source = Source(tmp_path, predicts=False)
    while source.poll():
        pass
    one = Server([source])
    one.start()
    out = tmp_path / "page.html"
    server.write([source], out)
    for page in (_ask(one, _path(one))[2], out.read_text(encoding="utf-8")):
        assert page.count("<script") == 2 and page.count("</script>") == 2 and "<img" not in page
        given: Any = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
        assert [name.startswith(EVIL) for name in given["names"]] == [True]
    one.close()


def test_the_policy_names_this_script_and_style_and_nothing_else(served: Server) -> None:
    import base64
    import hashlib

    _, head, page = _ask(served, _path(served))
    policy = dict(part.strip().split(" ", 1) for part in head["content-security-policy"].split(";"))
    script, style = (
        re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1],
        re.findall(r"<style>(.*?)</style>", page, re.DOTALL)[0],
    )
    digest = lambda text: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"  # noqa: E731
    assert policy["script-src"] == digest(script) and policy["style-src"] == digest(style)
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
    assert not re.search(r"\son\w+=|style=", page.replace(script, ""))


def test_a_run_that_vanishes_leaves_its_page(tmp_path: Path) -> None:
    import shutil

    source = Source(write_run(tmp_path / "run"), predicts=False)
    one = Server([source])
    one.start()
    while source.poll():
        pass
    shutil.rmtree(tmp_path / "run")
    for name in panels.PANELS:
        assert _ask(one, _path(one, f"panel/{name}"))[0] == 200, name
    one.close()


def test_it_ends_well_when_it_is_told_to_while_it_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that reads the address may tell the command to end before it has begun to wait."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("os.nice", lambda _: 0)  # or all tests after this one would yield to other programs
    monkeypatch.setattr("builtins.print", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    try:
        watch.command([write_run(tmp_path / "run")])
    except KeyboardInterrupt:
        pytest.fail("the command ended as if a person had stopped something else")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_source_is_read_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed then, and their numbers may be those of others."""
    source, reading, ended = Source(write_run(tmp_path / "run")), threading.Event(), list[bool]()

    def slow() -> bool:
        reading.set()
        time.sleep(0.2)
        ended.append(True)
        return True

    monkeypatch.setattr(source, "poll", slow)
    server = Server([source])
    server.start()
    reading.wait(PATIENCE)
    server.close()
    looks = len(ended)
    assert looks
    time.sleep(0.5)
    assert len(ended) == looks


@pytest.mark.slow
def test_it_ends_when_it_is_told_to_whichever_thread_is_told(tmp_path: Path) -> None:
    """The system delivers a signal to any thread of a process. Python's handlers run in the main thread, which must not keep
    sleeping."""
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "megalith.cli", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "http://127.0.0.1" in process.stdout.readline()
        process.stdout.readline()  # its whole output is there, so its threads run
        tasks = {int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()}
        others = sorted(tasks - {process.pid}, reverse=True)  # the youngest thread may have ended meanwhile
        assert any(ctypes.CDLL(None).tgkill(process.pid, other, signal.SIGTERM) == 0 for other in others)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
