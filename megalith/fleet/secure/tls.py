"""Encrypted connections: TLS 1.3, in which each end verifies the other's certificate.

One thread reads from a socket while another one writes to it, which OpenSSL does not allow. Therefore records are encrypted and
decrypted in memory, under a lock that is not held during waits for the network.
"""

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

RECORD_BYTES = 1 << 14  # the most that TLS puts into one record


class Connection(Protocol):
    """The methods of a socket that connections between sites use."""

    def recv(self, count: int, /) -> bytes:
        """Return received bytes, `count` at most; empty at the end of the stream."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all of `data`."""
        ...

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit each wait for the network."""
        ...

    def shutdown(self, how: int, /) -> None:
        """Close one direction of the connection, or both."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Tls(NamedTuple):
    """TLS settings of this end, for connections that it makes and that it accepts."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def of(cls, certificate: Path, key: Path, authority: Path) -> "Tls":
        """Read this end's certificate, its private key, and the certificate of the authority that signed both ends' certificates
        (PEM). Raises OSError if a file cannot be read, or if key and certificate do not match."""
        found = [ssl.SSLContext(protocol) for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)]
        for context in found:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        found[1].num_tickets = 0  # nobody resumes a session: a ticket would be written while another thread writes
        return cls(*found)

    def connect(self, connection: socket.socket, host: str) -> "EncryptedConnection":
        """Encrypt a connection that this end made to `host`. The other end's certificate must name `host`. Raises OSError."""
        return EncryptedConnection(connection, self.client, host=host)

    def accept(self, connection: socket.socket) -> "EncryptedConnection":
        """Encrypt a connection that the other end has made. Raises OSError."""
        return EncryptedConnection(connection, self.server)


class EncryptedConnection:
    """A connected socket with TLS. One thread may receive while another sends."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """Do the handshake. `host`: the host to which this end connected; None: the other end connected. Raises OSError, and
        leaves the socket open, if the other end has no valid certificate."""
        self._socket = connection
        self._came, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaving, server_side=host is None, server_hostname=host)
        self._lock, self._turn = threading.Lock(), threading.Lock()
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush()
                    self._feed(self._socket.recv(RECORD_BYTES))
        finally:
            with contextlib.suppress(OSError):
                self._flush()  # the end of the handshake, or what was wrong with it

    def recv(self, count: int, /) -> bytes:
        """Return received bytes, `count` at most; empty at the end of the stream. Raises OSError."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(count)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return b""  # also where it was cut: the frames inside say whether anything is missing
            data = self._socket.recv(count)
            with self._lock:
                self._feed(data)

    def sendall(self, data: bytes, /) -> None:
        """Send all of `data`. Raises OSError."""
        rest = memoryview(data)
        with self._turn:  # records must leave in the order in which they were made
            while rest:
                with self._lock:
                    rest = rest[self._tls.write(rest[:RECORD_BYTES]) :]
                    record = self._leaving.read()
                self._socket.sendall(record)

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit each wait for the network."""
        self._socket.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        """Close one direction of the connection, or both."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _feed(self, data: bytes) -> None:
        if data:
            self._came.write(data)
        else:
            self._came.write_eof()

    def _flush(self) -> None:
        if record := self._leaving.read():
            self._socket.sendall(record)
