"""Rendezvous of processes that an engine started, through a key-value store that may still hold keys of earlier starts.

The caller passes the store (torch's TCPStore, Megalith's own, or a dictionary in a test). torch's store has no authentication: anybody
who reaches its port may have written its values. So they are trusted only for an address, at which all processes then authenticate.
"""

import secrets
import time
from typing import Protocol

POLL_SECONDS = 0.02


class Store(Protocol):
    """Interface of a store, which torch's stores implement. `get` waits for the key, up to the store's own time limit."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""
        ...

    def get(self, key: str, /) -> bytes:
        """Wait until the key exists, and read it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """True if all of these keys are set."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that begins at 0, and return the sum."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; return True if it existed."""
        ...


class RunStore(Store, Protocol):
    """Interface of the store that the processes of a run with agents share (`secure.store_client`)."""

    def delete_prefix(self, prefix: str, /) -> None:
        """Remove all keys that begin with `prefix`."""
        ...


def agree(store: Store, value: str, *, rank: int, world: int, seconds: float) -> str:
    """Return rank 0's `value` on every rank of the current start. An engine may restart ranks while the store lives on, and its count
    of starts is not shared: the agents of several machines count separately. So each rank draws a fresh random word, and rank 0 answers
    it: the answer to a fresh word cannot be stale. Rank 0 returns once all ranks have confirmed. Until then it also answers stale
    words, which no rank reads. On rank 0, raises TimeoutError with the ranks that did not arrive within `seconds`; elsewhere, any error
    of the store's `get`.
    """
    if rank:
        word = secrets.token_hex(8)
        store.set(f"hello/{rank}", word)
        meeting, _, answer = _text(store.get(f"answer/{word}")).partition(" ")
        store.set(f"thanks/{meeting}/{rank}", "")
        return answer
    meeting, end = secrets.token_hex(8), time.monotonic() + seconds
    missing, answered = set(range(1, world)), dict[int, str]()
    while missing:
        for other in sorted(missing):
            word = _text(store.get(f"hello/{other}")) if store.check([f"hello/{other}"]) else None
            if word and answered.get(other) != word:
                answered[other] = word
                store.set(f"answer/{word}", f"{meeting} {value}")
            elif word and store.check([f"thanks/{meeting}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise TimeoutError(
                f"{_ranks(missing)} of {world} did not arrive within {seconds:g} s. See their output, or give them more time"
            )
        time.sleep(POLL_SECONDS if missing else 0)
    return value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _ranks(missing: set[int]) -> str:
    first = ", ".join(map(str, sorted(missing)[:8]))
    return f"rank{'s' * (len(missing) > 1)} {first}{' and more' * (len(missing) > 8)}"
