"""Messages between a run's controller and its nodes' agents. The messages go through a store that only processes with the run's
key can use. An unreadable message is dropped, counted and reported, but never ends the process that reads it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from megalith.fleet.rendezvous import Store

REPORT_SECONDS = 60.0


class UnreadableMessages:
    """Counts the messages that this process could not read, and reports the count on standard error at most once a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        self._told = -float("inf")

    def drop(self, where: str, why: object) -> None:
        """Count an unreadable message; `where` is its key or queue."""
        self.count += 1
        if self._clock() - self._told >= REPORT_SECONDS:
            self._told = self._clock()
            print(
                f"a message was dropped ({where}: {str(why)[:200]}); {self.count} messages were dropped so far. Run the same "
                f"version of megalith on all nodes",
                file=sys.stderr,
                flush=True,
            )


def load(text: bytes) -> dict[str, Any]:
    """Decode a message, which is a JSON object. Raises ValueError for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not a JSON object")
    return found


class Messages:
    """A queue of numbered messages in the store: one process puts messages, and another one takes each message once, in order."""

    def __init__(self, store: Store, name: str, unreadable: UnreadableMessages | None = None) -> None:
        self._store, self._name = store, name
        self._unreadable = unreadable or UnreadableMessages()
        self._written = self._read = 0

    def put(self, message: dict[str, Any]) -> None:
        """Send a value that can be stored as JSON."""
        self._written += 1
        self._store.set(f"{self._name}/{self._written}", json.dumps(message))

    def pending(self) -> bool:
        """True if the last message was not taken yet."""
        return self._store.check([f"{self._name}/{self._written}"])

    def take(self) -> list[dict[str, Any]]:
        """Return all readable messages that arrived after the previous call."""
        messages = []
        while self._store.check([key := f"{self._name}/{self._read + 1}"]):
            text = self._store.get(key)
            self._store.delete_key(key)
            self._read += 1
            try:
                messages.append(load(text))
            except ValueError as error:
                self._unreadable.drop(key, error)
        return messages


def orders(store: Store, member: int, unreadable: UnreadableMessages | None = None) -> Messages:
    """Return the queue of the controller's orders to an agent."""
    return Messages(store, f"orders/{member}", unreadable)


def answers(store: Store, member: int, unreadable: UnreadableMessages | None = None) -> Messages:
    """Return the queue of an agent's answers to the controller."""
    return Messages(store, f"answers/{member}", unreadable)


def beat_key(member: int) -> str:
    """Return the key of an agent's heartbeat, which includes those of its ranks."""
    return f"beat/{member}"


def expelled_key(member: int) -> str:
    """Return the key that is set when an agent is declared lost, because another node may then replace its node."""
    return f"expelled/{member}"


def member_key(member: int) -> str:
    """Return the key of the node that joined as number `member`."""
    return f"member/{member}"


def refuse(store: Store, name: str, why: str) -> None:
    """Record that the node `name` may not join, with the reason `why`."""
    store.set(refused_key(store.add(REFUSED, 1)), json.dumps({"name": name, "why": why}))


def refused_key(number: int) -> str:
    """Return the key under which refusal number `number` is recorded."""
    return f"refused/{number}"


JOINED, REFUSED = "joined", "refused"
"""Keys of two counters: the nodes that joined, and the nodes that were refused."""
