"""Encrypted connections between sites: an attacker on the path cannot read them, and no other certificate is accepted."""

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from megalith.fleet.secure.key import Key
from megalith.fleet.secure.peers import Address, Peers
from megalith.fleet.secure.tls import Tls
from tests import certificates
from tests.fleet.conftest import until
from tests.keys import KEY, OTHER_KEY
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Make tables `sites.tls` by name: for both sites, for one signed by another authority, and for one at another address."""
    folder = tmp_path_factory.mktemp("certificates")
    certificates.authority(folder)
    certificates.authority(folder, "other")
    return {
        "0": certificates.site(folder, "0"),
        "1": certificates.site(folder, "1"),
        "stranger": certificates.site(folder, "stranger", signed_by="other"),
        "elsewhere": certificates.site(folder, "elsewhere", address="10.0.0.1"),
    }


def _tls(table: Mapping[str, str]) -> Tls:
    return Tls.of(Path(table["certificate"]), Path(table["key"]), Path(table["authority"]))


@contextlib.contextmanager
def _two(
    first: Tls | None, second: Tls | None, *, key: Key = KEY, path: Callable[[Address], Address] = lambda address: address
) -> Iterator[tuple[Peers, Peers]]:
    """Make two sites that connect. `key`: the second site's key. `path`: the address at which the second finds the first."""
    one = Peers(0, 2, KEY, address_of=lambda _: None, tls=first)
    other = Peers(1, 2, key, address_of=lambda _: path(one.address), tls=second)
    one.open()
    other.open()
    try:
        yield one, other
    finally:
        for each in (one, other):
            each.close(seconds=0.0)


def _next(peers: Peers) -> bytes:
    while True:
        news = peers.next(PATIENCE)
        assert news is not None
        if news.message is not None:
            return news.message


def test_both_send_at_once(files: dict[str, dict[str, str]]) -> None:
    messages = [bytes([number]) * size for number, size in enumerate((0, 5, 1 << 14, 3 << 20, 7, 5 << 20))]
    with _two(_tls(files["0"]), _tls(files["1"])) as sites:
        until(lambda: sites[0].connected(1) and sites[1].connected(0), seconds=PATIENCE)
        for message in messages:
            for one in sites:
                one.send(message)
        for one in sites:
            assert [_next(one) for _ in messages] == messages
        sites[1].send(b"last words" * 100_000)
        sites[1].close(seconds=PATIENCE)
        assert _next(sites[0]) == b"last words" * 100_000


class _Tap:
    """An attacker on the path who forwards and records all bytes."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets, self._threads = [self._server], list[threading.Thread]()
        self.to: Address | None = None
        self._start(self._serve)

    def __enter__(self) -> "_Tap":
        return self

    def __exit__(self, *error: object) -> None:
        """End all threads and close all sockets, since processes of other tests would inherit them."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for one in self._sockets:
            one.close()

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def at(self, address: Address) -> Address:
        self.to = address
        return "127.0.0.1", self._server.getsockname()[1]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                self._sockets.append(one)
                assert self.to is not None
                other = socket.create_connection(self.to)
                self._sockets.append(other)
                for source, target in ((one, other), (other, one)):
                    self._start(self._pass, source, target)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("encrypted", [True, False])
def test_nobody_on_the_path_can_read(encrypted: bool, files: dict[str, dict[str, str]]) -> None:
    ends = [_tls(files[name]) if encrypted else None for name in "01"]
    with _Tap() as tap, _two(*ends, path=tap.at) as sites:
        until(lambda: sites[0].connected(1) and sites[1].connected(0), seconds=PATIENCE)
        sites[0].send(b"differences of weights")
        sites[1].send(b"differences of weights")
        assert [_next(one) for one in sites] == [b"differences of weights"] * 2
    assert (b"differences of weights" in tap.seen) is not encrypted


@pytest.mark.parametrize(
    ("first", "second", "trouble"),
    [
        ("0", "stranger", "unknown ca|closed"),
        ("stranger", "1", "unable to get local issuer"),
        ("elsewhere", "1", "IP address mismatch"),
        ("0", "", "closed|reset|no store of a run"),
        ("", "1", "wrong version number|closed|timed out"),
    ],
)
def test_others_are_refused(
    first: str, second: str, trouble: str, files: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is another authority's, or names another address, or is missing."""
    monkeypatch.setattr("megalith.fleet.secure.peers.PROOF_SECONDS", 1.0)
    ends = [_tls(files[name]) if name else None for name in (first, second)]
    with _two(*ends) as sites:
        until(lambda: sites[0].turned_away > 1 and re.search(trouble, sites[1].trouble(0)) is not None, seconds=PATIENCE)
        assert not sites[0].connected(1) and not sites[1].connected(0)


def test_a_certificate_does_not_replace_the_key(files: dict[str, dict[str, str]]) -> None:
    with _two(_tls(files["0"]), _tls(files["1"]), key=OTHER_KEY) as sites:
        until(lambda: "has another key" in sites[1].trouble(0), seconds=PATIENCE)
        assert sites[0].turned_away and not sites[0].connected(1)


def test_nothing_older_than_tls_1_3(files: dict[str, dict[str, str]]) -> None:
    old = _tls(files["1"])
    old.client.minimum_version = ssl.TLSVersion.TLSv1_2
    old.client.maximum_version = ssl.TLSVersion.TLSv1_2
    with _two(_tls(files["0"]), old) as sites:
        until(lambda: "protocol version" in sites[1].trouble(0), seconds=PATIENCE)


def test_files_that_do_not_belong_together(files: dict[str, dict[str, str]]) -> None:
    with pytest.raises(OSError, match=r"(?i)mismatch"):
        _tls(files["0"] | {"key": files["1"]["key"]})
    with pytest.raises(FileNotFoundError):
        _tls(files["0"] | {"authority": "none.pem"})
