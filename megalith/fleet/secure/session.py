"""An authenticated connection: both ends prove that they know the run's key; after that, every message has a MAC and a counter.

    server -> client   MAGIC, a nonce of the server
    client -> server   a nonce of the client, proof of the key over both nonces
    server -> client   ACCEPTED, proof of the key over both nonces         or REFUSED, and the end
    both               frames: length (4 bytes), counter (8), MAC (32), payload

Each direction has its own MAC key, derived from the run's key and both nonces. So a repeated frame, or one from another
connection or direction, has a wrong MAC or counter, and is dropped and counted. Frames are not encrypted.
"""

import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from megalith.fleet.secure.key import MAC_BYTES, Key

MAGIC = b"megalith store 1"
NONCE_BYTES = 32
ACCEPTED, REFUSED = b"+", b"-"
GREETING_BYTES, PROOF_BYTES, REPLY_BYTES = len(MAGIC) + NONCE_BYTES, NONCE_BYTES + MAC_BYTES, 1 + MAC_BYTES
MAX_PAYLOAD_BYTES = 16 << 20
_HEAD = struct.Struct(">IQ")  # length of the payload, counter
_FRAME_BYTES = _HEAD.size + MAC_BYTES


class TooLong(ValueError):  # noqa: N818  # it says what was found
    """The length field of a frame is larger than any message, so the stream does not consist of frames."""


@dataclass
class Sealer:
    """Encodes messages to frames, for one direction of a connection."""

    key: Key
    purpose: str
    session: bytes
    sent: int = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame. Raises TooLong for a payload beyond MAX_PAYLOAD_BYTES."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLong(f"a message of {len(payload)} bytes is longer than {MAX_PAYLOAD_BYTES}")
        self.sent += 1
        head = _HEAD.pack(len(payload), self.sent)
        return head + self.key.mac(self.purpose, self.session, head, payload) + payload


class Opener:
    """Decodes frames to messages, for one direction of a connection. `dropped` counts frames with a wrong MAC or a counter that
    is not the next one."""

    def __init__(self, key: Key, purpose: str, session: bytes) -> None:
        self._key, self._purpose, self._session = key, purpose, session
        self._buffer = bytearray()
        self._received = 0
        self.dropped = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the payloads of the frames that are complete and authentic. Raises TooLong."""
        self._buffer += data
        while len(self._buffer) >= _FRAME_BYTES:
            length, counter = _HEAD.unpack_from(self._buffer)
            if length > MAX_PAYLOAD_BYTES:
                raise TooLong(f"the length field of a frame is {length} bytes, which is too large")
            end = _FRAME_BYTES + length
            if len(self._buffer) < end:
                return
            head, mac = bytes(self._buffer[: _HEAD.size]), bytes(self._buffer[_HEAD.size : _FRAME_BYTES])
            payload = bytes(self._buffer[_FRAME_BYTES:end])
            del self._buffer[:end]
            if self._key.proves(mac, self._purpose, self._session, head, payload) and counter == self._received + 1:
                self._received = counter
                yield payload
            else:
                self.dropped += 1


class ServerHandshake:
    """The server's part of the handshake."""

    def __init__(self, key: Key) -> None:
        self._key, self._nonce = key, secrets.token_bytes(NONCE_BYTES)
        self.greeting = MAGIC + self._nonce

    def answer(self, proof: bytes) -> tuple[bytes, tuple[Opener, Sealer] | None]:
        """Check the client's PROOF_BYTES. Return the reply and, if the client knows the key, an Opener and a Sealer for the
        connection; else None in their place."""
        nonces = self._nonce + proof[:NONCE_BYTES]
        if not self._key.proves(proof[NONCE_BYTES:], "client", nonces):
            return REFUSED, None
        ends = Opener(self._key, "from client", nonces), Sealer(self._key, "from server", nonces)
        return ACCEPTED + self._key.mac("server", nonces), ends


class ClientHandshake:
    """The client's part of the handshake."""

    def __init__(self, key: Key, greeting: bytes) -> None:
        """`greeting`: the server's GREETING_BYTES. Raises ValueError if the bytes are not a greeting."""
        if not greeting.startswith(MAGIC):
            raise ValueError("the process that listens at this address is not the store of a run")
        self._key, own = key, secrets.token_bytes(NONCE_BYTES)
        self._nonces = greeting[len(MAGIC) :] + own
        self.proof = own + key.mac("client", self._nonces)

    def finish(self, reply: bytes) -> tuple[Sealer, Opener] | None:
        """Return a Sealer and an Opener for the connection; None if the server's reply does not prove that the server knows the
        key."""
        if reply[:1] != ACCEPTED or not self._key.proves(reply[1:], "server", self._nonces):
            return None
        return Sealer(self._key, "from client", self._nonces), Opener(self._key, "from server", self._nonces)
