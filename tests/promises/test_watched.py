"""A live page disturbs no training, whatever happens to its server, and whoever sends requests to it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megalith.events import Incident, Problem, RunStarted, of_kind, read
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.files import load
from megalith.watch.server import CONNECTIONS
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, newest_step, prepare_text, train

RUN = """
name = "watched"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 4, zero = 3 }}
data.path = "{data}"
train = {{ steps = 100_000, global_batch = 8, seq_len = 32, precision = "fp32" }}
optimizer = {{ lr = 1e-3, schedule = "constant", warmup = 0 }}
checkpoint.every = 0
launch = {{ threads = 1, start_timeout = 600.0, timeout = 600.0 }}
fleet = {{ hang_floor = 600.0, straggler_steps = 1_000_000 }}
"""
"""Slow steps of a busy machine are no incidents here."""

MORE, SLOW_CLIENTS = 10, 1000
SECRET = "nobody outside may read this"
GARBAGE = [
    b"\r\n\r\n", b"\x00\xff\x16\x03\x01" * 50 + b"\r\n\r\n", b"A" * 100_000, b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"POST /TOKEN/order HTTP/1.1\r\nHost: HOST\r\nContent-Length: 99999999\r\n\r\n", b"GET //[ HTTP/1.1\r\n\r\n",
]  # fmt: skip
OUTSIDE = ["../run.toml", "../../secret", "%2e%2e/%2e%2e/secret", "panel/../../secret", "/etc/passwd", "events.jsonl", "run.toml"]


class Watched:
    """A run with a live page, both started by one command."""

    def __init__(self, run_file: Path, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [sys.executable, "-m", "megalith.cli", "train", str(run_file), "--run-dir", str(folder), "--watch"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.await_that(lambda: "http://127.0.0.1" in self.log.read_text() and self.last() > 0)
        self.address = self.log.read_text().partition("http://127.0.0.1")[2].split()[0]
        self.address = f"http://127.0.0.1{self.address}"
        (self.server,) = [one for one in psutil.Process(self.process.pid).children() if "watch" in one.cmdline()]

    def last(self) -> int:
        return newest_step(self.folder)

    def await_that(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-5000:]
            time.sleep(0.05)

    def trains_on(self) -> None:
        """Wait until MORE steps are done."""
        before = self.last()
        self.await_that(lambda: self.last() >= before + MORE)

    def get(self, path: str, *, body: bytes | None = None) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.address + path, data=body), timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:  # too many connections are open
            return 0, ""

    def send(self, sent: bytes) -> bytes:
        """Send bytes, and return the reply."""
        _, _, rest = self.address.partition("127.0.0.1:")
        port, token = rest.strip("/").split("/")
        found = sent.replace(b"TOKEN", token.encode()).replace(b"HOST", f"127.0.0.1:{port}".encode())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=PATIENCE) as connection:
            connection.sendall(found)
            return connection.recv(65536)
        return b""

    def crowd(self) -> list[socket.socket]:
        """Connect SLOW_CLIENTS times, and begin requests that are never finished. Connections beyond those that the server takes wait."""
        port = int(self.address.partition("127.0.0.1:")[2].partition("/")[0])
        found = [socket.socket() for _ in range(SLOW_CLIENTS)]
        for one in found:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        for one in found:
            with contextlib.suppress(OSError):  # it waits
                one.send(b"GET / HT")
        return found


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_whatever_happens_to_its_server_a_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN.format(data=prepare_text(tmp_path)))
    (tmp_path / "secret").write_text(SECRET)
    run = Watched(run_file, tmp_path / "run")
    crowd: list[socket.socket] = []
    try:
        assert run.get("panel/alive")[0] == 200
        for sent in GARBAGE:
            assert not run.send(sent).startswith(b"HTTP/1.1 200")
        for path in OUTSIDE:
            status, text = run.get(path)
            assert status == 404 and not text, path
        assert run.get("order", body=json.dumps({"run": 0, "what": "stop"}).encode())[0] == 403
        run.trains_on()
        crowd = run.crowd()
        assert run.server.num_threads() <= CONNECTIONS + 16
        run.trains_on()
        run.server.send_signal(signal.SIGSTOP)
        run.trains_on()
        run.server.send_signal(signal.SIGCONT)
        for one in crowd:
            one.close()
        run.await_that(lambda: run.get("panel/alive")[0] == 200)
        run.server.kill()
        run.trains_on()
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE) == ExitCode.STOPPED
    finally:
        for one in crowd:
            one.close()
        run.process.kill()
        run.process.wait()
    told = list(read(run.folder))
    assert len(of_kind(told, RunStarted)) == 1 and not of_kind(told, Incident)
    assert not [one for one in of_kind(told, Problem) if one.severity == "error"]
    assert not (run.folder / "orders").exists(), "the request without the second token ordered nothing"
    (tmp_path / "whole.toml").write_text(run_file.read_text().replace("100_000", str(run.last())))
    train(load(tmp_path / "whole.toml").spec, tmp_path / "whole")
    assert_same_bits(final_state(tmp_path / "whole"), final_state(run.folder))
