"""A person's orders to a run in progress: files in its folder, which the controller collects and on which its policy decides.
Anyone who can write to the run folder can give orders.
"""

import contextlib
import json
import secrets
import time
from pathlib import Path

from megalith import disk
from megalith.fleet.observations import Ordered

FOLDER = "orders"
LOOK_SECONDS = 0.5  # between looks at the folder
OLD_SECONDS = 120.0  # an order left unread for this long no longer fits the situation
MAX_BYTES, MAX_FILES = 4096, 16
KNOWN = ("save", "stop", "quarantine")


def write(run_dir: Path, what: str, node: str = "") -> Path:
    """Write an order atomically, and return its file. Raises ValueError for an invalid order, OSError if it cannot be written."""
    if what not in KNOWN:
        raise ValueError(f"{what!r} is not an order. Use {', '.join(KNOWN[:-1])} or {KNOWN[-1]}.")
    if (what == "quarantine") != bool(node):
        raise ValueError(
            f"order {what!r} with node {node!r}: the order quarantine needs a node, and other orders must not have one"
        )
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    disk.write_whole(path, json.dumps({"what": what, "node": node, "time": time.time()}))
    return path


class Orders:
    """Reads new orders for a run's controller."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._next = 0.0

    def take(self) -> list[Ordered]:
        """Return the new orders, oldest first, and remove their files and those of old or invalid orders. Never raises
        OSError."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_SECONDS
        found: list[Ordered] = []
        for path in self._files():
            order = _read(path)
            with contextlib.suppress(OSError):
                path.unlink()  # first: an order that cannot be removed would be obeyed for ever
                if order is not None and abs(time.time() - order.time) < OLD_SECONDS:
                    found.append(order)
        return found

    def _files(self) -> list[Path]:
        try:
            return [path for path in sorted(self._folder.glob("*.json")) if path.is_file()][:MAX_FILES]
        except OSError:
            return []


def _read(path: Path) -> Ordered | None:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(MAX_BYTES))
        what, node, at = record["what"], record["node"], record["time"]
        right = what in KNOWN and isinstance(node, str) and isinstance(at, int | float) and (what == "quarantine") == bool(node)
        return Ordered(time=float(at), what=what, node=node) if right else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):  # the last two: deep brackets, a huge time
        return None
