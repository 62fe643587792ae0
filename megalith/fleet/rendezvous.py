"""Rendezvous of processes that a launcher started, through a key-value store that may still contain keys of earlier starts.

The caller passes the store (torch's TCPStore, Megalith's own, or a dictionary in a test). Anybody who can reach the port of
torch's TCPStore may write to it without authentication. Processes therefore agree through torch's store only on an address or a
name of a start, and agents authenticate each other when they connect to the address.
"""

import secrets
import time
from typing import Protocol

POLL_SECONDS = 0.02


class Store(Protocol):
    """Interface of a store, which torch's stores implement. `get` waits until the key exists, at most for the store's time
    limit."""

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
    """Return rank 0's `value` on every rank of the current start. A launcher may restart ranks while the store keeps its keys,
    and it has no count of starts that is equal on all machines. So each rank writes a new random word, to which rank 0 writes an
    answer; the answer to a new word cannot be from an earlier start. Rank 0 returns when all ranks have confirmed their answers.
    On rank 0, raises TimeoutError with the ranks that did not arrive within `seconds`; on other ranks, any error of the store's
    `get`.
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
                f"{_ranks(missing)} of {world} did not arrive within {seconds:g} s. Read the output of these ranks, or "
                f"increase launch.start_timeout"
            )
        time.sleep(POLL_SECONDS if missing else 0)
    return value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _ranks(missing: set[int]) -> str:
    first = ", ".join(map(str, sorted(missing)[:8]))
    return f"rank{'s' * (len(missing) > 1)} {first}{' and more' * (len(missing) > 8)}"
