"""The ledger of nodes: a JSON-lines file of faults, quarantines and health checks, which outlives runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from megalith import disk
from megalith.control.policy import State

FILE = "nodes.jsonl"


@dataclass(frozen=True)
class NodeRecord:
    """A fault, quarantine or check of a node. `time`: seconds since the epoch."""

    time: float
    node: str
    what: Literal["fault", "quarantined", "check passed", "check failed"]
    detail: str = ""
    run: str = ""


@dataclass(frozen=True)
class Standing:
    """Status of a node. `quarantined`: time at which the node was excluded; None: the node may be used. `faults`: (time,
    detail) of each fault since the node last passed a check, oldest first."""

    node: str
    faults: tuple[tuple[float, str], ...] = ()
    quarantined: float | None = None
    checks: tuple[tuple[float, bool], ...] = field(default=())

    def faults_since(self, time: float) -> tuple[float, ...]:
        """Return the times of the node's faults after `time`."""
        return tuple(at for at, _ in self.faults if at > time)


def note(path: Path, record: NodeRecord) -> None:
    """Append a record to a ledger of nodes. Several runs may append to one ledger, because each record is one write. The ledger's
    folder must exist. If the disk is full or unavailable, the record is dropped."""
    line = json.dumps(asdict(record), separators=(",", ":")) + "\n"
    with disk.if_available(path), path.open("a+b", buffering=0) as file:
        disk.append(file.fileno(), line.encode())


def read_nodes(path: Path) -> list[NodeRecord]:
    """Return the records of a ledger of nodes, oldest first; empty if the file does not exist. Incomplete lines are skipped."""
    return [NodeRecord(**record) for record in map(disk.parse, disk.lines(path)) if record is not None]


def standings(records: Iterable[NodeRecord]) -> dict[str, Standing]:
    """Return the status of each node from the records, in the order in which nodes first appear."""
    found: dict[str, Standing] = {}
    for record in records:
        old = found.get(record.node, Standing(record.node))
        faults, out, checks = old.faults, old.quarantined, old.checks
        match record.what:
            case "fault":
                faults = (*faults, (record.time, record.detail))
            case "quarantined":
                out = record.time if out is None else out
            case "check passed":
                out, faults, checks = None, (), (*checks, (record.time, True))
            case "check failed":
                out, checks = record.time if out is None else out, (*checks, (record.time, False))
        found[record.node] = Standing(record.node, faults, out, checks)
    return found


def node_changes(before: State, after: State, *, time: float, reason: str, run: str) -> list[NodeRecord]:
    """Return the records to append when the policy's state changes from `before` to `after`, so that `standings` of the ledger
    equals the new state."""
    found = []
    for node, times in after.faults.items():
        if times and times[-1:] != before.faults.get(node, ())[-1:]:
            found.append(NodeRecord(times[-1], node, "fault", reason, run))
    new = [(node, at) for node, at in after.quarantined.items() if node not in before.quarantined]
    found += [NodeRecord(at, node, "quarantined", reason, run) for node, at in new]
    failed = [node for node, count in after.failed_checks.items() if count > before.failed_checks.get(node, 0)]
    found += [NodeRecord(time, node, "check failed", reason, run) for node in failed]
    passed = [node for node in before.quarantined if node not in after.quarantined]
    return [*found, *(NodeRecord(time, node, "check passed", reason, run) for node in passed)]
