"""Encoding of requests to the run's store, and of the store's replies: an operation, then fields, each preceded by its length."""

import struct
from enum import IntEnum

_LENGTH = struct.Struct(">I")


class Operation(IntEnum):
    """The first byte of a message. DONE, NO and ERROR are replies."""

    SET = 1
    GET = 2
    CHECK = 3
    ADD = 4
    SWAP = 5
    DELETE = 6
    DELETE_PREFIX = 7
    COUNT = 8
    WAIT = 9
    STRANGERS = 10
    DONE = 128
    NO = 129
    ERROR = 130


STRANGERS = {
    "refused": "connections with another key",
    "late": "connections that did not prove in time that they know the key",
    "crowded": "connections without proof of the key that were closed to make room for newer ones",
    "left": "connections that were closed by the other end before they proved the key",
    "dropped": "messages that were altered, injected or repeated",
}
"""Counters of the store, in which it counts refused connections and messages, with their meanings."""


def pack(operation: Operation, *fields: bytes) -> bytes:
    """Encode a message: its operation, then each field after its length."""
    return bytes([operation]) + b"".join(_LENGTH.pack(len(one)) + one for one in fields)


def unpack(message: bytes) -> tuple[Operation, list[bytes]]:
    """Decode a message into its operation and fields. Raises ValueError if the bytes are not a message."""
    if not message:
        raise ValueError("an empty message")
    operation, at, fields = Operation(message[0]), 1, list[bytes]()
    while at < len(message):
        if at + _LENGTH.size > len(message):
            raise ValueError("a length is cut off")
        (length,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        if at + length > len(message):
            raise ValueError("a field is cut off")
        fields.append(message[at : at + length])
        at += length
    return operation, fields
