"""Letters between a run's controller and the agents of its nodes, through a store that both can reach."""

import json
from typing import Any

from megalith.fleet.rendezvous import Store


class Letters:
    """Numbered letters under one name: one side puts, the other takes, each letter once and in order."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._written = self._read = 0

    def put(self, letter: dict[str, Any]) -> None:
        """Send something that JSON can hold."""
        self._written += 1
        self._store.set(f"{self._name}/{self._written}", json.dumps(letter))

    def pending(self) -> bool:
        """Whether the last letter put has not been taken."""
        return self._store.check([f"{self._name}/{self._written}"])

    def take(self) -> list[dict[str, Any]]:
        """All that have come since the last call."""
        letters = []
        while self._store.check([key := f"{self._name}/{self._read + 1}"]):
            letters.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)
            self._read += 1
        return letters


def orders(store: Store, member: int) -> Letters:
    """What the controller wants of an agent."""
    return Letters(store, f"orders/{member}")


def answers(store: Store, member: int) -> Letters:
    """What an agent has to say."""
    return Letters(store, f"answers/{member}")


def beat_key(member: int) -> str:
    """Where an agent shows that it is alive, and the signs of life of its ranks."""
    return f"beat/{member}"


def expelled_key(member: int) -> str:
    """Set once an agent counts as lost: its place may be another's."""
    return f"expelled/{member}"


def member_key(member: int) -> str:
    """Who joined as the so manyth."""
    return f"member/{member}"


def refuse(store: Store, name: str, why: str) -> None:
    """Say of a node that it may not join, and why."""
    store.set(refused_key(store.add(REFUSED, 1)), json.dumps({"name": name, "why": why}))


def refused_key(number: int) -> str:
    """Which node may not join, and why."""
    return f"refused/{number}"


JOINED, REFUSED = "joined", "refused"
"""How many have joined, and how often it was said of a node that it may not."""
